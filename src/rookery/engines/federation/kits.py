"""Kits: what each participant of a federation is given, made by a small certificate authority (CA) of its own.

A folder for each: its certificate and private key, the CA's certificate, and the coordinator's address.
"""

import difflib
import ipaddress
import json
import os
import re
import shutil
import tempfile
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from cryptography import x509
    from cryptography.hazmat.primitives.asymmetric import ec

PORT = 9443
COORDINATOR = "coordinator"
_CA = "ca"
_CA_DAYS = 3650
_SLACK = timedelta(days=1)  # clocks of participants differ
_LOCAL = ("localhost", "127.0.0.1", "::1")
_DNS = re.compile(r"(?=.{1,253}$)(?!-)[a-z0-9-]{1,63}(?<!-)(\.(?!-)[a-z0-9-]{1,63}(?<!-))*", re.IGNORECASE)
_FILES = {"ca": "ca.pem", "cert": "cert.pem", "key": "key.pem"}
_FLARE = (("client.crt", "client.key"), ("server.crt", "server.key"))  # of `nvflare provision`


@dataclass(frozen=True)
class Kit:
    """What a participant needs to take part. `sites` and `certificates` are empty in a site's own kit."""

    address: str  # the coordinator's, host:port
    name: str  # the participant's own, as in its certificate
    sites: tuple[str, ...]
    ca: bytes = field(repr=False)
    cert: bytes = field(repr=False)
    key: bytes = field(repr=False)
    certificates: dict[str, str] = field(default_factory=dict, repr=False)  # see `accepted`


def make_kits(out: Path, coordinator: str, sites: Sequence[str], days: int = 365) -> list[Path]:
    """Make a kit for the coordinator and for each site, in folders of `out`, and return those that were made.

    The CA's private key is in `out/ca`, which belongs to nobody's kit. In a folder that has kits already, sites that
    have none are added by the same CA; the kits that are there stay as they are, but for the coordinator's lists of
    sites and their certificates. A kit that was deleted or revoked is made anew, and its earlier certificate is no
    longer accepted.

    Arguments:
        out: the folder.
        coordinator: the host and port that sites connect to, "fl.example.org:9443"; without a port, 9443.
        sites: their names.
        days: how long the certificates are valid. The CA is for ten years, or as long as they are.
    """
    address, host = parse_address(coordinator)
    check_names(sites)
    if host.lower() in (name.lower() for name in sites):
        raise ValueError(f"A site can't be called {host}: that is the coordinator's address.")
    if not isinstance(days, int) or not 1 <= days <= 36500:
        raise ValueError(f"days must be a whole number from 1 to 36500, not {days!r}.")
    _need()
    if out.exists() and not out.is_dir():
        raise ValueError(f"{out} is a file; give a folder.")
    if out.exists() and any(out.iterdir()):
        return _add(out, address, sites, days)
    out.mkdir(parents=True, exist_ok=True)
    ca = _new_ca(days)
    made = [_write(out / _CA, {"ca.pem": ca.pem, "key.pem": ca.key_pem()})]
    made += [_issue(out, ca, site, address, days) for site in sites]
    return [*made, _issue(out, ca, COORDINATOR, address, days, host, sites, _serials(out, sites))]


def revoke(out: Path, site: str) -> Path:
    """Have the coordinator refuse a site's certificate, delete the site's folder, and return the file that says so.

    The coordinator needs that file, `kit.toml` of its kit; one that is running notices a new one within seconds. A new
    kit for the site is made by `make_kits`.

    Arguments:
        out: the folder with all kits.
        site: the site's name.
    """
    _need()
    if site == COORDINATOR:
        raise ValueError(
            "The coordinator's certificate can't be revoked, for sites keep no list; make new kits for all."
        )
    listing = out / COORDINATOR / "kit.toml"
    if not listing.exists():
        raise ValueError(f"There is no {listing}; give the folder that `rookery federation init` has written.")
    known = load_kit(listing.parent)
    if site not in known.sites:
        near = difflib.get_close_matches(site, known.sites, 1)
        hint = f"did you mean {near[0]}?" if near else f"there are: {', '.join(known.sites)}."
        raise ValueError(f"There is no site {site!r} in {listing}; {hint}")
    _list(listing, known, known.sites, known.certificates | _serials(out, known.sites) | {site: ""})
    if (out / site).exists():
        shutil.rmtree(out / site)
    return listing


def accepted(path: Path) -> dict[str, str]:
    """Read which certificate each site may connect with: its serial number, in hexadecimal digits; "": none.

    Of a site that is not listed, any certificate of the federation's CA is accepted: kits of an earlier version list
    none.
    """
    return _read_toml(path).get("certificates", {})


def serial_of(cert: bytes) -> str:
    """Return the serial number of a certificate (PEM), in hexadecimal digits."""
    return f"{_certificate(Path('certificate'), cert).serial_number:x}"


def load_kit(folder: Path, address: str | None = None, sites: Sequence[str] = ()) -> Kit:
    """The kit in a folder, of `make_kits` or a participant's of `nvflare provision`; ValueError if it can't be used.

    A folder of `nvflare provision` does not say where Rookery's coordinator is, nor, for the server, which sites there
    are: give `address` and `sites`. Given for a kit of `make_kits`, they replace what it says.
    """
    _need()
    if not folder.is_dir():
        raise ValueError(f"There is no folder {folder}; `rookery federation init` makes a kit for each participant.")
    check_names(sites, least=0)
    paths = _paths(folder)
    said = _read_toml(folder / "kit.toml") if not _is_flare(folder) else {}
    _check_private(paths["key"])
    read = {part: _read(path) for part, path in paths.items()}
    name = _check_certificate(paths, read)
    if said and said["name"] != name:
        raise ValueError(
            f"{folder / 'kit.toml'} is {said['name']}'s, and the certificate {name}'s; copy the kit again."
        )
    address = address or said.get("address")
    if address is None:
        raise ValueError(f"{folder} is of `nvflare provision`, which does not say where to connect; give the address.")
    listed = said.get("certificates", {})
    return Kit(
        parse_address(address)[0], name, tuple(sites) or tuple(said.get("sites", ())), **read, certificates=listed
    )


def parse_address(text: str) -> tuple[str, str]:
    """An address as host:port, and its host. A port that is not given is 9443.

    >>> parse_address("fl.example.org")
    ('fl.example.org:9443', 'fl.example.org')
    >>> parse_address("[::1]:8000")
    ('[::1]:8000', '::1')
    """
    bare = re.fullmatch(r"\[?([0-9a-f.]*:[0-9a-f:.]*:[0-9a-f:.]*)\]?", text, re.IGNORECASE)
    found = re.fullmatch(r"(\[[^\]]+\]|[^:\[\]]+)(?::(\d{1,5}))?", text)
    host, port = (bare[1], None) if bare else (found[1].strip("[]"), found[2]) if found else ("", None)
    number = int(port) if port else PORT
    try:
        ip = ipaddress.ip_address(host)
    except ValueError:
        ip = None
    numeric = re.fullmatch(r"[\d.]*", host) is not None
    if (ip is None and (numeric or not _DNS.fullmatch(host))) or not 0 < number < 65536:
        raise ValueError(f"An address must be a host or host:port, such as fl.example.org:9443; got {text!r}.")
    if ip is not None and ip.is_unspecified:
        raise ValueError(f"No site can connect to {host}; give the coordinator's name or address as sites see it.")
    return (f"[{host}]:{number}" if ":" in host else f"{host}:{number}"), host


def check_names(sites: Sequence[str], least: int = 1) -> None:
    """Raise ValueError if these can't be the names of a federation's sites."""
    if len(sites) < least:
        raise ValueError("A federation needs sites; give their names, for example a,b,c.")
    for name in sites:
        if not re.fullmatch(r"[A-Za-z0-9_-]{1,64}", name):
            raise ValueError(f"A site's name must be 1 to 64 letters, digits, '-' or '_'; got {name!r}.")
        if name.lower() in (COORDINATOR, _CA):
            raise ValueError(f"A site can't be called {name!r}, the name of another folder. Choose another.")
    lower = [name.lower() for name in sites]
    twice = next((name for name in sites if lower.count(name.lower()) > 1), None)
    if twice is not None:
        raise ValueError(f"Two sites are called {twice!r}, ignoring case. Give each its own name.")


# Files.


def _add(out: Path, address: str, sites: Sequence[str], days: int) -> list[Path]:
    """Add sites to the kits in a folder."""
    listing = out / COORDINATOR / "kit.toml"
    for path in (out / _CA / "ca.pem", out / _CA / "key.pem", listing):
        if not path.exists():
            hint = "put it back, or give another folder"
            raise ValueError(f"{out} is not empty, and no whole set of kits: {path} is missing; {hint}.")
    known = load_kit(listing.parent)
    if known.address != address:
        raise ValueError(f"The kits in {out} are for a coordinator at {known.address}, not {address}; give that one.")
    ca = _read_ca(out / _CA)
    if known.ca != ca.pem:
        raise ValueError(f"{listing.parent} was not made by the CA in {out / _CA}; give another folder.")
    names = [*known.sites, *(site for site in sites if site not in known.sites)]
    check_names(names)
    new = [site for site in sites if not (out / site).exists()]
    for site in sites:
        if site not in known.sites and site not in new and load_kit(out / site).ca != ca.pem:
            raise ValueError(f"{out / site} was not made by the CA in {out / _CA}; give another name.")
    if not new and len(names) == len(known.sites):
        one = "These sites have their kits" if len(sites) > 1 else "This site has its kit"
        raise ValueError(f"{one} already; to make one anew, call `rookery federation revoke` first.")
    made = [_issue(out, ca, site, address, days) for site in new]
    _list(listing, known, names, known.certificates | _serials(out, names))
    return made


def _serials(out: Path, sites: Sequence[str]) -> dict[str, str]:
    """The serial numbers of the certificates in the sites' folders, of those that are there."""
    paths = {site: out / site / _FILES["cert"] for site in sites}
    return {site: serial_of(_read(path)) for site, path in paths.items() if path.exists()}


def _list(listing: Path, known: Kit, sites: Sequence[str], certificates: dict[str, str]) -> None:
    """Replace the coordinator's lists."""
    beside = listing.with_suffix(".new")
    beside.write_bytes(_toml(known.address, COORDINATOR, sites, certificates))
    beside.replace(listing)


def _write(folder: Path, files: dict[str, bytes]) -> Path:
    """Make a folder with these files, that only its owner can read, all at once."""
    beside = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))  # mode 700
    for name, content in files.items():
        with open(os.open(beside / name, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
            file.write(content)
        if name != "key.pem":
            (beside / name).chmod(0o644)
    beside.rename(folder)
    return folder


def _toml(address: str, name: str, sites: Sequence[str] | None, certificates: Mapping[str, str] | None = None) -> bytes:
    lines = [f"address = {json.dumps(address)}", f"name = {json.dumps(name)}"]
    if sites is not None:
        lines.append(f"sites = {json.dumps(list(sites))}")
    if certificates:
        lines += [
            "",
            "# The serial number of the one certificate that each site may connect with; none if it is empty.",
        ]
        lines += ["[certificates]", *(f"{site} = {json.dumps(serial)}" for site, serial in certificates.items())]
    return ("\n".join(lines) + "\n").encode()


def _read_toml(path: Path) -> dict[str, Any]:
    content = _read(path)
    try:
        said = tomllib.loads(content.decode())
    except ValueError as error:
        raise ValueError(f"{path} can't be read: {error}") from error
    sites = said.get("sites", [])
    right = isinstance(sites, list) and all(
        isinstance(one, str) for one in [said.get("address"), said.get("name"), *sites]
    )
    if not right:
        raise ValueError(f"{path} can't be read: address and name are texts, sites is a list of texts.")
    serials = said.get("certificates", {})
    if not isinstance(serials, dict) or not all(isinstance(one, str) for one in serials.values()):
        raise ValueError(f"{path} can't be read: certificates must be a table of texts.")
    return said


def _is_flare(folder: Path) -> bool:
    return not (folder / "kit.toml").exists() and (folder / "startup" / "rootCA.pem").exists()


def _paths(folder: Path) -> dict[str, Path]:
    """The files of a kit."""
    if not _is_flare(folder):
        return {part: folder / name for part, name in _FILES.items()}
    startup = folder / "startup"
    cert, key = next((own for own in _FLARE if (startup / own[0]).exists()), _FLARE[0])
    return {"ca": startup / "rootCA.pem", "cert": startup / cert, "key": startup / key}


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except FileNotFoundError:
        raise ValueError(f"The kit is not complete: there is no {path}.") from None
    except OSError as error:
        raise ValueError(f"{path} can't be read: {error.strerror}.") from None


def _check_private(path: Path) -> None:
    if os.name == "posix" and path.exists() and path.stat().st_mode & 0o077:
        raise ValueError(f"Others than its owner can read or change the private key {path}: chmod 600 {path}")


# Certificates.


def _need() -> None:
    try:
        import cryptography.x509  # noqa: F401
    except ImportError as error:
        raise ImportError(
            "Certificates need cryptography, which is not installed: pip install rookery[federation]"
        ) from error


@dataclass(frozen=True)
class _Authority:
    cert: "x509.Certificate"
    key: "ec.EllipticCurvePrivateKey" = field(repr=False)

    @property
    def pem(self) -> bytes:
        from cryptography.hazmat.primitives.serialization import Encoding

        return self.cert.public_bytes(Encoding.PEM)

    def key_pem(self) -> bytes:
        return _pem(self.key)


def _new_ca(days: int) -> _Authority:
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes
    from cryptography.hazmat.primitives.asymmetric import ec

    key = ec.generate_private_key(ec.SECP256R1())
    name = _subject("Rookery federation CA")
    end = datetime.now(UTC) + timedelta(days=max(days, _CA_DAYS))
    own = x509.SubjectKeyIdentifier.from_public_key(key.public_key())
    builder = _builder(name, name, key.public_key(), end)
    builder = builder.add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
    builder = builder.add_extension(_usage(key_cert_sign=True, crl_sign=True), critical=True)
    builder = builder.add_extension(own, critical=False)
    builder = builder.add_extension(x509.AuthorityKeyIdentifier.from_issuer_subject_key_identifier(own), critical=False)
    return _Authority(builder.sign(key, hashes.SHA256()), key)


def _read_ca(folder: Path) -> _Authority:
    from cryptography.hazmat.primitives.asymmetric import ec

    _check_private(folder / "key.pem")
    cert = _certificate(folder / "ca.pem", _read(folder / "ca.pem"))
    key = _private_key(folder / "key.pem", _read(folder / "key.pem"))
    if not isinstance(key, ec.EllipticCurvePrivateKey) or cert.public_key() != key.public_key():
        raise ValueError(f"{folder / 'key.pem'} is not the key of {folder / 'ca.pem'}; put the right one back.")
    _check_dates(folder / "ca.pem", cert)
    return _Authority(cert, key)


def _issue(
    out: Path,
    ca: _Authority,
    name: str,
    address: str,
    days: int,
    host: str = "",
    sites: Sequence[str] | None = None,
    certificates: Mapping[str, str] | None = None,
) -> Path:
    """Write the kit of a participant; the coordinator has a `host`."""
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.hazmat.primitives.serialization import Encoding
    from cryptography.x509.oid import ExtendedKeyUsageOID

    key = ec.generate_private_key(ec.SECP256R1())
    end = min(datetime.now(UTC) + timedelta(days=days), ca.cert.not_valid_after_utc)
    issuer = ca.cert.extensions.get_extension_for_class(x509.SubjectKeyIdentifier).value
    purpose = ExtendedKeyUsageOID.SERVER_AUTH if host else ExtendedKeyUsageOID.CLIENT_AUTH
    known_as = _known_as(name, host)
    extensions: list[tuple[x509.ExtensionType, bool]] = [
        (x509.BasicConstraints(ca=False, path_length=None), True),
        (_usage(digital_signature=True), True),
        (x509.ExtendedKeyUsage([purpose]), False),
        (x509.SubjectKeyIdentifier.from_public_key(key.public_key()), False),
        (x509.AuthorityKeyIdentifier.from_issuer_subject_key_identifier(issuer), False),
        *([(x509.SubjectAlternativeName(known_as), False)] if known_as else []),
    ]
    builder = _builder(_subject(name), ca.cert.subject, key.public_key(), end)
    for extension, critical in extensions:
        builder = builder.add_extension(extension, critical)
    cert = builder.sign(ca.key, hashes.SHA256()).public_bytes(Encoding.PEM)
    listing = _toml(address, name, sites, certificates)
    files = {"ca.pem": ca.pem, "cert.pem": cert, "key.pem": _pem(key), "kit.toml": listing}
    return _write(out / name, files)


def _known_as(name: str, host: str) -> list["x509.GeneralName"]:
    """A certificate's alternative names: the coordinator's host, or a site's name if it can be one of a host."""
    from cryptography import x509

    if not host:
        return [x509.DNSName(name)] if _DNS.fullmatch(name) else []
    found: list[x509.GeneralName] = []
    for one in dict.fromkeys([host, "localhost", "127.0.0.1"] if host in _LOCAL else [host]):
        try:
            found.append(x509.IPAddress(ipaddress.ip_address(one)))
        except ValueError:
            found.append(x509.DNSName(one))
    return found


def _subject(name: str) -> "x509.Name":
    from cryptography import x509
    from cryptography.x509.oid import NameOID

    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])


def _builder(
    subject: "x509.Name", issuer: "x509.Name", key: "ec.EllipticCurvePublicKey", end: datetime
) -> "x509.CertificateBuilder":
    from cryptography import x509

    builder = x509.CertificateBuilder().subject_name(subject).issuer_name(issuer).public_key(key)
    builder = builder.serial_number(x509.random_serial_number())
    return builder.not_valid_before(datetime.now(UTC) - _SLACK).not_valid_after(end)


def _usage(**given: bool) -> "x509.KeyUsage":
    from cryptography import x509

    none = dict.fromkeys(
        ("digital_signature", "content_commitment", "key_encipherment", "data_encipherment", "key_agreement",
         "key_cert_sign", "crl_sign", "encipher_only", "decipher_only"), False,
    )  # fmt: skip
    return x509.KeyUsage(**none | given)


def _pem(key: "ec.EllipticCurvePrivateKey") -> bytes:
    from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

    return key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())


def _check_certificate(paths: dict[str, Path], read: dict[str, bytes]) -> str:
    """The name in a kit's certificate; ValueError if it is not valid, not of the key, or not signed by the CA."""
    from cryptography.exceptions import InvalidSignature
    from cryptography.x509.oid import NameOID

    ca, cert = _certificate(paths["ca"], read["ca"]), _certificate(paths["cert"], read["cert"])
    key = _private_key(paths["key"], read["key"])
    if key.public_key() != cert.public_key():
        raise ValueError(f"{paths['key']} is not the key of {paths['cert']}; copy the kit again.")
    try:
        cert.verify_directly_issued_by(ca)
    except (ValueError, TypeError, InvalidSignature):
        raise ValueError(f"{paths['cert']} is not signed by the CA in {paths['ca']}; copy the kit again.") from None
    _check_dates(paths["cert"], cert)
    _check_dates(paths["ca"], ca)
    names = cert.subject.get_attributes_for_oid(NameOID.COMMON_NAME)
    if not names:
        raise ValueError(f"{paths['cert']} names nobody (it has no common name).")
    return str(names[0].value)


def _certificate(path: Path, content: bytes) -> "x509.Certificate":
    from cryptography import x509

    try:
        return x509.load_pem_x509_certificate(content)
    except ValueError:
        raise ValueError(f"{path} is no certificate (PEM); copy the kit again.") from None


def _private_key(path: Path, content: bytes) -> Any:
    from cryptography.exceptions import UnsupportedAlgorithm
    from cryptography.hazmat.primitives.serialization import load_pem_private_key

    try:
        return load_pem_private_key(content, password=None)
    except TypeError:
        raise ValueError(f"The private key {path} has a password; give one without.") from None
    except (ValueError, UnsupportedAlgorithm):
        raise ValueError(f"{path} is no private key (PEM); copy the kit again.") from None


def _check_dates(path: Path, cert: "x509.Certificate") -> None:
    now, begin, end = datetime.now(UTC), cert.not_valid_before_utc, cert.not_valid_after_utc
    if now > end:
        raise ValueError(f"{path} expired on {end:%Y-%m-%d %H:%M} UTC; `rookery federation init` makes a new one.")
    if now < begin:
        raise ValueError(f"{path} is valid only from {begin:%Y-%m-%d %H:%M} UTC on; is this machine's clock right?")
