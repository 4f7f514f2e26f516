"""Kits: what is in them, checked by cryptography's own verifier; adding sites; what is refused, in one line each."""

import contextlib
import json
import os
import shutil
import ssl
import stat
import sys
from datetime import UTC, datetime, timedelta
from ipaddress import ip_address
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from rookery import cli
from rookery.engines.federation import certificates, kits, provision
from rookery.engines.federation.kits import load_kit, parse_address
from rookery.engines.federation.provision import make_kits

x509 = pytest.importorskip("cryptography.x509")
verification = pytest.importorskip("cryptography.x509.verification")

from rookery.engines.federation.revocations import make_list  # noqa: E402


@pytest.fixture(scope="module")
def once(tmp_path_factory: Any) -> Path:
    """Kits that no test changes."""
    out = tmp_path_factory.mktemp("once") / "kits"
    make_kits(out, "fl.example.org:9000", ["a", "clinic_2"], 30)
    return out


@pytest.fixture
def out(tmp_path: Path) -> Path:
    make_kits(tmp_path / "kits", "localhost", ["a", "b"], 30)
    return tmp_path / "kits"


def certificate(folder: Path, name: str = "cert.pem") -> Any:
    return x509.load_pem_x509_certificate((folder / name).read_bytes())


def policy(ca: Path) -> Any:
    return verification.PolicyBuilder().store(verification.Store([certificate(ca, "ca.pem")]))


def test_a_kit_says_who_and_where(once: Path) -> None:
    kit = load_kit(once / "coordinator")
    assert (kit.address, kit.name, kit.sites) == ("fl.example.org:9000", "coordinator", ("a", "clinic_2"))
    site = load_kit(once / "clinic_2")
    assert (site.address, site.name, site.sites) == ("fl.example.org:9000", "clinic_2", ())
    assert site.ca == kit.ca == (once / "ca" / "ca.pem").read_bytes()
    assert site.key != kit.key
    assert "PRIVATE" not in repr(kit)
    assert "CERTIFICATE" not in repr(kit)


def test_the_verifier_accepts_them_for_their_purpose_alone(once: Path) -> None:
    coordinator, site = certificate(once / "coordinator"), certificate(once / "a")
    server = policy(once / "a").build_server_verifier(x509.DNSName("fl.example.org"))
    client = policy(once / "coordinator").build_client_verifier()
    assert server.verify(coordinator, [])
    assert client.verify(site, []).subjects == [x509.DNSName("a")]
    other = policy(once / "a").build_server_verifier(x509.DNSName("a"))
    for verifier, cert in ((server, site), (other, site), (client, coordinator)):
        with pytest.raises(verification.VerificationError):
            verifier.verify(cert, [])


def test_localhost_has_its_number(out: Path) -> None:
    for name in (x509.DNSName("localhost"), x509.IPAddress(ip_address("127.0.0.1"))):
        assert policy(out / "a").build_server_verifier(name).verify(certificate(out / "coordinator"), [])
    later = datetime.now(UTC) + timedelta(days=31)
    with pytest.raises(verification.VerificationError):
        policy(out / "a").time(later).build_client_verifier().verify(certificate(out / "a"), [])
    assert datetime.now(UTC) + timedelta(days=3000) < certificate(out / "a", "ca.pem").not_valid_after_utc


def test_what_a_certificate_may_do(once: Path) -> None:
    def has(cert: Any, kind: Any) -> Any:
        return cert.extensions.get_extension_for_class(kind)

    ca, site = certificate(once / "ca", "ca.pem"), certificate(once / "clinic_2")
    assert has(ca, x509.BasicConstraints).value == x509.BasicConstraints(ca=True, path_length=0)
    assert has(ca, x509.BasicConstraints).critical
    assert has(ca, x509.KeyUsage).value.key_cert_sign
    assert not has(site, x509.BasicConstraints).value.ca
    assert not has(site, x509.KeyUsage).value.key_cert_sign
    assert site.subject.rfc4514_string() == "CN=clinic_2"
    with pytest.raises(x509.ExtensionNotFound):  # _ is in no DNS name
        has(site, x509.SubjectAlternativeName)


@pytest.mark.skipif(os.name != "posix", reason="modes are POSIX's")
def test_keys_are_their_owners_alone(once: Path) -> None:
    assert sorted(path.name for path in once.iterdir()) == ["a", "ca", "clinic_2", "coordinator"]
    for folder in once.iterdir():
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
        assert stat.S_IMODE((folder / "key.pem").stat().st_mode) == 0o600
    secret = (once / "ca" / "key.pem").read_bytes()
    assert all(secret not in path.read_bytes() for path in once.rglob("*.*") if path.parent.name != "ca")
    assert sorted(path.name for path in (once / "a").iterdir()) == [
        "ca.pem", "cert.pem", "key.pem", "kit.toml", "revoked.pem",
    ]  # fmt: skip


def contents(out: Path) -> dict[str, bytes]:
    return {str(path.relative_to(out)): path.read_bytes() for path in out.glob("*/*") if path.is_file()}


def test_a_second_init_adds_sites(out: Path) -> None:
    before = contents(out)
    assert make_kits(out, "localhost:9443", ["b", "c"], 30) == [out / "c"]
    after = contents(out)
    assert load_kit(out / "coordinator").sites == ("a", "b", "c")
    assert load_kit(out / "c").ca == load_kit(out / "a").ca
    assert {name for name in after if after[name] != before.get(name)} == {
        "coordinator/kit.toml", "c/ca.pem", "c/cert.pem", "c/key.pem", "c/kit.toml", "c/revoked.pem",
    }  # fmt: skip
    for path in (out / "a").iterdir():
        path.unlink()
    (out / "a").rmdir()  # sent to its site, or lost
    assert make_kits(out, "localhost", ["d"], 30) == [out / "d"]
    assert make_kits(out, "localhost", ["a"], 30) == [out / "a"]
    assert load_kit(out / "coordinator").sites == ("a", "b", "c", "d")
    listing = out / "coordinator" / "kit.toml"
    listing.write_text(listing.read_text().replace(', "d"', ""))  # as if stopped before it was written
    assert make_kits(out, "localhost", ["d"], 30) == []
    assert load_kit(out / "coordinator").sites == ("a", "b", "c", "d")


def test_another_init_on_the_folder_is_refused(out: Path, tmp_path: Path) -> None:
    before = contents(out)
    for coordinator, sites, words in [
        ("localhost", ["a", "b"], "already have their kits"),
        ("localhost:1", ["c"], "must be that of the kits in .*, localhost:9443; got localhost:1"),
        ("localhost", ["A"], "must have different names, ignoring case"),
    ]:
        with pytest.raises(ValueError, match=words):
            make_kits(out, coordinator, sites, 30)
    assert contents(out) == before
    make_kits(tmp_path / "others", "localhost", ["x"], 30)
    (tmp_path / "others" / "x").rename(out / "x")
    with pytest.raises(ValueError, match=r"must be made by the CA in .*; it was not"):
        make_kits(out, "localhost", ["x"], 30)
    (out / "ca" / "key.pem").write_bytes((out / "a" / "key.pem").read_bytes())
    with pytest.raises(ValueError, match="must be the private key of"):
        make_kits(out, "localhost", ["c"], 30)
    (out / "ca" / "key.pem").unlink()
    with pytest.raises(ValueError, match=r"ca/key.pem is missing"):
        make_kits(out, "localhost", ["c"], 30)
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match=r"must be written to a folder; .*file is a file"):
        make_kits(tmp_path / "file", "localhost", ["c"], 30)
    with pytest.raises(ValueError, match="must be empty, or a whole set of kits"):
        make_kits(tmp_path, "localhost", ["c"], 30)


@pytest.mark.parametrize(
    ("sites", "words"),
    [
        ([], "must have at least one site; got none"),
        (["a", "a"], "must have different names, ignoring case; got 'a' twice"),
        (["coordinator"], "must not be that of another folder; got 'coordinator'"),
        (["CA"], "must not be that of another folder; got 'CA'"),
        (["a b"], "letters, digits"),
        (["../a"], "letters, digits"),
        (["é"], "letters, digits"),
        (["a\n"], "letters, digits"),
        (["x" * 65], "must be 1 to 64"),
        (["localhost"], "must not be the coordinator's host; got 'localhost' for both"),
    ],
)
def test_names_that_are_refused(tmp_path: Path, sites: list[str], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        make_kits(tmp_path / "kits", "localhost", sites, 30)
    assert not (tmp_path / "kits").exists()


def test_the_longest_name(tmp_path: Path) -> None:
    make_kits(tmp_path / "kits", "10.0.0.7", ["x" * 64], 1)
    assert load_kit(tmp_path / "kits" / ("x" * 64)).address == "10.0.0.7:9443"


@pytest.mark.parametrize(
    ("text", "address", "host"),
    [
        ("fl.example.org", "fl.example.org:9443", "fl.example.org"),
        ("node-7:80", "node-7:80", "node-7"),
        ("10.0.0.7:80", "10.0.0.7:80", "10.0.0.7"),
        ("::1", "[::1]:9443", "::1"),
        ("[fe80::7]", "[fe80::7]:9443", "fe80::7"),
        ("[fe80::7]:80", "[fe80::7]:80", "fe80::7"),
    ],
)
def test_addresses(text: str, address: str, host: str) -> None:
    assert parse_address(text) == (address, host)


@pytest.mark.parametrize(
    "text", ["", "a b", "http://a", "a:b", "a:0", "a:70000", "a/b", "0.0.0.0", "[::]:80", "1.2.3", "-a", "a:1:2", "a\n"]
)
def test_addresses_that_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"must be a host or host:port|must be one that sites can connect to"):
        parse_address(text)


def refused(folder: Path, **given: Any) -> str:
    with pytest.raises(ValueError) as caught:
        load_kit(folder, **given)
    message = str(caught.value)
    assert "\n" not in message
    return message


def test_broken_kits_are_refused(out: Path, tmp_path: Path) -> None:
    kit, other = out / "a", out / "b"
    whole = {path.name: path.read_bytes() for path in kit.iterdir()}

    def mend() -> None:
        for name, content in whole.items():
            (kit / name).write_bytes(content)
            (kit / name).chmod(0o600)

    assert "A kit must be a folder; there is none at" in refused(tmp_path / "nowhere")
    for name in whole:
        (kit / name).unlink()
        assert f"there is no {kit / name}" in refused(kit)
        mend()
    for name, kind in [("ca.pem", "certificate"), ("cert.pem", "certificate"), ("key.pem", "private key")]:
        (kit / name).write_bytes(b"?")
        assert f"{kit / name} must be a {kind} in PEM form" in refused(kit)
        mend()
    for text in ("?", "name = 'a'", "name = 'a'\naddress = 3", "name = 'a'\naddress = 'b'\nsites = 'c'"):
        (kit / "kit.toml").write_text(text)
        assert f"{kit / 'kit.toml'} must {'be TOML' if text == '?' else 'have texts as address and name'}" in refused(
            kit
        )
        mend()
    (kit / "kit.toml").write_text(whole["kit.toml"].decode().replace('"a"', '"b"'))
    assert "kit.toml must have the name of the certificate, a; it has b" in refused(kit)
    mend()
    (kit / "key.pem").write_bytes((other / "key.pem").read_bytes())
    assert "key.pem must be the private key of" in refused(kit)
    mend()
    make_kits(tmp_path / "more", "localhost", ["a"], 30)
    (kit / "ca.pem").write_bytes((tmp_path / "more" / "a" / "ca.pem").read_bytes())
    assert "must be signed by the CA in" in refused(kit)
    mend()
    for mode in (0o640, 0o604, 0o620):
        (kit / "key.pem").chmod(mode)
        assert f"chmod 600 {kit / 'key.pem'}" in refused(kit)
    mend()
    assert load_kit(kit, address="10.0.0.7", sites=["z"]).sites == ("z",)
    assert "An address must be" in refused(kit, address="a b")


def test_dates(out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Clock(datetime):
        days = 31

        @classmethod
        def now(cls, tz: Any = None) -> datetime:
            return datetime.now(tz) + timedelta(days=cls.days)

    end = certificate(out / "a").not_valid_after_utc
    monkeypatch.setattr(certificates, "datetime", Clock)
    assert f"cert.pem expired on {end:%Y-%m-%d %H:%M} UTC" in refused(out / "a")
    Clock.days = -5
    assert "valid only from" in refused(out / "a")


def test_kits_of_nvflare_provision(once: Path, tmp_path: Path) -> None:
    for who, kind in (("a", "client"), ("coordinator", "server")):
        startup = tmp_path / who / "startup"
        startup.mkdir(parents=True)
        for name, own in (("ca.pem", "rootCA.pem"), ("cert.pem", f"{kind}.crt"), ("key.pem", f"{kind}.key")):
            (startup / own).write_bytes((once / who / name).read_bytes())
            (startup / own).chmod(0o600)
    assert load_kit(tmp_path / "a", address="10.0.0.7").name == "a"
    server = load_kit(tmp_path / "coordinator", address="10.0.0.7", sites=["a", "b"])
    assert (server.address, server.name, server.sites) == ("10.0.0.7:9443", "coordinator", ("a", "b"))
    assert "Give the address" in refused(tmp_path / "a")
    (tmp_path / "coordinator" / "startup" / "server.key").chmod(0o644)
    assert "chmod 600" in refused(tmp_path / "coordinator", address="10.0.0.7")
    (tmp_path / "a" / "startup" / "client.crt").unlink()
    assert "client.crt" in refused(tmp_path / "a", address="10.0.0.7")


def test_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def init(*more: str) -> Any:
        where = ["--coordinator", "localhost:9000", "--out", str(tmp_path / "kits")]
        return CliRunner().invoke(cli.app, ["federation", "init", *where, *more])

    done = init("--sites", "a, b", "--json")
    assert done.exit_code == 0, done.output
    assert [Path(kit).name for kit in json.loads(done.stdout)["kits"]] == ["ca", "a", "b", "coordinator"]
    assert "the kit of site c" in init("--sites", "c").output
    for given, words in ((["--sites", "c"], "already"), (["--sites", "d", "--days", "0"], "days"), ([], "--sites")):
        failed = init(*given)
        assert failed.exit_code == 2
        assert words in failed.stderr
        assert failed.stderr.count("\n") == 1
    monkeypatch.setitem(sys.modules, "cryptography.x509", None)
    assert "pip install 'rookery[federation]'" in init("--sites", "d").stderr


def test_revoking(tmp_path: Path) -> None:
    """The coordinator's list has the one serial number that is accepted of each site; the site's folder is deleted."""
    make_kits(tmp_path / "kits", "localhost", ["a", "b"], 30)
    serial = lambda name: kits.serial_of((tmp_path / "kits" / name / "cert.pem").read_bytes())
    listed = lambda: kits.accepted(tmp_path / "kits" / "coordinator" / "kit.toml")
    first = serial("a")
    assert listed() == {"a": first, "b": serial("b")}

    def command(*words: str) -> Any:
        return CliRunner().invoke(cli.app, ["federation", *words])

    where = ("--kits", str(tmp_path / "kits"))
    done = command("revoke", "a", *where)
    assert done.exit_code == 0, done.output
    assert "revoked.pem" in done.stdout
    assert "kit.toml" in done.stdout
    assert listed() == {"a": "", "b": serial("b")}
    assert not (tmp_path / "kits" / "a").exists()
    make_kits(tmp_path / "kits", "localhost", ["c"], 30)  # others are added, and it stays so
    assert listed() == {"a": "", "b": serial("b"), "c": serial("c")}
    again = command("init", "--coordinator", "localhost", "--sites", "a", "--out", str(tmp_path / "kits"))
    assert again.exit_code == 0, again.output
    assert listed()["a"] == serial("a") != first
    for name, words in (
        ("aa", "did you mean a?"),
        ("zzz", "there are: a, b, c, coordinator"),
    ):
        failed = command("revoke", name, *where)
        assert (failed.exit_code, failed.stderr.count("\n")) == (2, 1)
        assert words in failed.stderr
    nowhere = command("revoke", "a", "--kits", str(tmp_path))
    assert "rookery federation init" in nowhere.stderr


def test_a_kit_of_an_earlier_version_lists_no_certificates_until_it_is_changed(tmp_path: Path) -> None:
    out = tmp_path / "kits"
    make_kits(out, "localhost", ["a", "b"], 30)
    listing = out / "coordinator" / "kit.toml"
    listing.write_text(listing.read_text().partition("\n\n")[0] + "\n")
    assert load_kit(out / "coordinator").certificates == {}
    serial = kits.serial_of((out / "b" / "cert.pem").read_bytes())
    provision.revoke(out, "a")
    assert kits.accepted(listing) == {"a": "", "b": serial}
    listing.write_text(listing.read_text() + "c = 7\n")
    with pytest.raises(ValueError, match="must have a table of texts as certificates"):
        load_kit(out / "coordinator")


def renewing(out: Path, *words: str) -> Any:
    return CliRunner().invoke(cli.app, ["federation", "renew", *words, "--kits", str(out)])


def read_list(out: Path, name: str) -> Any:
    return kits.revocations(load_kit(out / name))


def test_every_kit_has_the_same_signed_list_of_revoked_certificates(out: Path) -> None:
    old = {name: kits.serial_of((out / name / "cert.pem").read_bytes()) for name in ("a", "b", "coordinator")}
    assert read_list(out, "b").number == 1
    key = (out / "coordinator" / "key.pem").read_bytes()
    assert [path.name for path in provision.revoke(out, "a")] == ["revoked.pem", "kit.toml"]
    assert {path.read_bytes() for path in out.glob("*/revoked.pem")} == {(out / "ca" / "revoked.pem").read_bytes()}
    provision.revoke(out, "coordinator")
    make_kits(out, "localhost", ["a"], 30)
    shutil.rmtree(out / "b")
    make_kits(out, "localhost", ["b"], 30)  # the certificate before is revoked, too
    for name in ("a", "b", "coordinator"):
        found = read_list(out, name)
        assert all(map(found.names, old.values()))
        assert not found.names(kits.serial_of((out / name / "cert.pem").read_bytes()))
    assert load_kit(out / "coordinator").key != key
    assert shake(out / "coordinator", out / "a") == "a"
    assert load_kit(out / "coordinator").revocations == 4


def test_a_list_that_is_missing_old_or_forged(out: Path, tmp_path: Path) -> None:
    first = (out / "a" / "revoked.pem").read_bytes()
    own = read_list(out, "a")
    assert (own.refresh(), own.take(first)) == (False, False)
    provision.revoke(out, "b")
    second = (out / "a" / "revoked.pem").read_bytes()
    assert own.refresh()
    with pytest.raises(ValueError, match="must be newer than number 2; got 1"):
        own.take(first)
    (out / "a" / "revoked.pem").write_bytes(first)  # the older one is put back under a running site
    with pytest.raises(ValueError, match=r"revoked.pem: .* must be newer than number 2; got 1. Copy it again"):
        own.refresh()
    assert own.number == 2
    assert read_list(out, "a").take(second)
    assert (out / "a" / "revoked.pem").read_bytes() == second
    make_kits(tmp_path / "others", "localhost", ["x"], 30)
    for path in (tmp_path / "others" / "x" / "cert.pem", tmp_path / "others" / "x" / "revoked.pem"):
        with pytest.raises(ValueError, match=r"must be an X\.509 list|must be signed by this federation's CA"):
            own.take(path.read_bytes())
    wrong = bytearray(second)
    wrong[200] ^= 1
    with pytest.raises(ValueError, match="must be"):
        own.take(bytes(wrong))
    paths = (out / "ca" / "ca.pem", out / "ca" / "key.pem")
    ca = certificates.load_authority(paths, (paths[0].read_bytes(), paths[1].read_bytes()))
    with pytest.raises(ValueError, match="must be newer than number 2; got 2"):
        own.take(make_list(ca, 2, []))  # another one of the same number
    (out / "a" / "revoked.pem").unlink()
    assert not own.refresh()
    assert own.number == 2
    with pytest.raises(ValueError, match=r"must be complete; there is no .*revoked\.pem"):
        read_list(out, "a")
    (out / "coordinator" / "revoked.pem").write_bytes(first)
    with pytest.raises(ValueError, match="of number 2 or later; it is number 1"):
        read_list(out, "coordinator")


def test_renewing(out: Path) -> None:
    """The key stays, the certificate before remains valid, and all of them can be revoked."""
    before = {name: load_kit(out / name) for name in ("a", "b", "coordinator")}
    serial = {name: kits.serial_of(kit.cert) for name, kit in before.items()}
    done = renewing(out, "a", "--days", "60")
    assert done.exit_code == 0, done.output
    new = load_kit(out / "a")
    assert (new.key, new.cert == before["a"].cert) == (before["a"].key, False)
    assert certificate(out / "a").not_valid_after_utc - certificate(out / "b").not_valid_after_utc > timedelta(days=29)
    assert kits.renewed(load_kit(out / "coordinator"), "a") == new.cert
    assert kits.renewed(load_kit(out / "coordinator"), "b") == b""
    assert kits.accepted(out / "coordinator" / "kit.toml")["a"].split() == [serial["a"], kits.serial_of(new.cert)]
    assert shake(out / "coordinator", out / "a") == "a"
    shutil.rmtree(out / "b")  # it was sent
    assert renewing(out).exit_code == 0
    assert kits.renewed(load_kit(out / "coordinator"), "b") != before["b"].cert
    assert not (out / "b").exists()
    coordinator = load_kit(out / "coordinator")
    assert (coordinator.key, coordinator.cert == before["coordinator"].cert) == (before["coordinator"].key, False)
    assert (
        policy(out / "ca").build_server_verifier(x509.DNSName("localhost")).verify(certificate(out / "coordinator"), [])
    )
    assert certificates.serials_of((out / "ca" / "issued" / "coordinator.pem").read_bytes()) == {
        serial["coordinator"], kits.serial_of(coordinator.cert),
    }  # fmt: skip
    provision.revoke(out, "coordinator")
    found = read_list(out, "coordinator")
    assert found.names(serial["coordinator"])  # the one before its renewal, whose key is the same
    assert found.names(kits.serial_of(coordinator.cert))
    provision.revoke(out, "a")
    mine = out / "b"
    mine.mkdir()
    for name, part in (("ca.pem", new.ca), ("cert.pem", new.cert), ("key.pem", new.key)):
        (mine / name).write_bytes(part)
    (mine / "key.pem").chmod(0o600)
    (mine / "kit.toml").write_text('address = "localhost"\nname = "a"\n')
    shutil.copy(out / "ca" / "revoked.pem", mine)
    with pytest.raises(ValueError, match=r"cert.pem must not be revoked; it is. Ask for a new kit"):
        load_kit(mine)
    shutil.rmtree(mine)
    found = read_list(out, "coordinator")
    assert found.names(serial["a"])
    assert found.names(kits.serial_of(new.cert))
    assert not found.names(serial["b"])
    for words, line in ((["a"], "'a' must not be revoked; it is"), (["d"], "There is no participant 'd'")):
        failed = renewing(out, *words)
        assert (failed.exit_code, failed.stderr.count("\n")) == (2, 1)
        assert line in failed.stderr
    assert renewing(out).exit_code == 0


def test_kits_of_an_earlier_version_get_a_list(out: Path) -> None:
    for path in out.glob("*/revoked.pem"):
        path.unlink()
    for path in out.glob("*/kit.toml"):
        path.write_text("".join(line for line in path.read_text().splitlines(True) if "revocations" not in line))
    shutil.rmtree(out / "ca" / "issued")
    assert read_list(out, "a").number == load_kit(out / "coordinator").revocations == 0
    serial = kits.serial_of((out / "b" / "cert.pem").read_bytes())
    assert renewing(out, "a").exit_code == 0
    provision.revoke(out, "b")
    for name in ("a", "coordinator"):
        found = read_list(out, name)
        assert (found.number, found.names(serial)) == (1, True)
    make_kits(out, "localhost", ["c"], 30)
    assert [load_kit(out / name).revocations for name in ("a", "c", "coordinator")] == [0, 1, 1]


def context(kit: Path, server: bool) -> ssl.SSLContext:
    made = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER if server else ssl.PROTOCOL_TLS_CLIENT)
    made.load_cert_chain(kit / "cert.pem", kit / "key.pem")
    made.load_verify_locations(kit / "ca.pem")
    made.verify_mode = ssl.CERT_REQUIRED
    made.verify_flags |= ssl.VERIFY_X509_STRICT
    return made


def shake(server: Path, client: Path, host: str = "localhost") -> str:
    """The client's name as the server sees it, after a TLS handshake; ssl.SSLError if one of them refuses."""
    up, down = ssl.MemoryBIO(), ssl.MemoryBIO()
    ends = [
        context(server, True).wrap_bio(up, down, server_side=True),
        context(client, False).wrap_bio(down, up, server_hostname=host),
    ]
    for _ in range(6):
        for end in ends:
            with contextlib.suppress(ssl.SSLWantReadError):
                end.do_handshake()
    with contextlib.suppress(ssl.SSLWantReadError):
        ends[1].read()  # with TLS 1.3 a client learns here that it was refused
    found: Any = ends[0].getpeercert()
    return str(dict(pair for part in found["subject"] for pair in part)["commonName"])


def test_a_tls_handshake(out: Path, tmp_path: Path) -> None:
    make_kits(out, "localhost", ["_"], 30)
    assert shake(out / "coordinator", out / "a") == "a"
    assert shake(out / "coordinator", out / "_", host="127.0.0.1") == "_"
    make_kits(tmp_path / "others", "localhost", ["a"], 30)
    for server, client, host in [
        (out / "coordinator", tmp_path / "others" / "a", "localhost"),
        (tmp_path / "others" / "coordinator", out / "a", "localhost"),
        (out / "coordinator", out / "a", "elsewhere.example"),
        (out / "b", out / "a", "b"),  # a site is no coordinator
        (out / "coordinator", out / "coordinator", "localhost"),  # and the coordinator no site
    ]:
        with pytest.raises(ssl.SSLError):
            shake(server, client, host)
