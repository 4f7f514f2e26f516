"""Signatures with participants' keys, and who issued a certificate."""

from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from tests.engines.federation.clocks import ahead

from rookery.engines.federation.kits import load_kit
from rookery.engines.federation.provision import make_kits

pytest.importorskip("cryptography.x509")

from cryptography.hazmat.primitives.asymmetric import ed25519, rsa
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

from rookery.engines.federation import certificates
from rookery.engines.federation.certificates import issued_by, name_of, sign, verify

TEXT = b"four bytes and more \x00\xff"


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("signatures")
    make_kits(folder / "kits", "localhost", ["a", "b"], 30)
    make_kits(folder / "others", "localhost", ["a"], 30)
    return folder


def test_a_signature_holds_for_one_key_one_purpose_and_one_message(out: Path) -> None:
    a, b = load_kit(out / "kits" / "a"), load_kit(out / "kits" / "b")
    signature = sign(a.key, "audit", TEXT)
    assert verify(a.cert, "audit", TEXT, signature)
    assert not verify(b.cert, "audit", TEXT, signature)
    assert not verify(a.cert, "key", TEXT, signature)
    assert not verify(a.cert, "audi", b"t" + TEXT, signature)
    for wrong in (TEXT + b"\x00", TEXT[1:], b""):
        assert not verify(a.cert, "audit", wrong, signature)
    for forged in (b"", signature[:-1], signature + b"\x00", bytes(len(signature)), signature[::-1]):
        assert not verify(a.cert, "audit", TEXT, forged)
    assert not verify(b"no certificate", "audit", TEXT, signature)


def test_who_issued_a_certificate(out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    a, other = load_kit(out / "kits" / "a"), load_kit(out / "others" / "a")
    assert name_of(a.cert) == "a"
    assert issued_by(a.ca, a.cert)
    assert not issued_by(other.ca, a.cert)
    assert not issued_by(a.cert, other.cert)
    assert not issued_by(a.ca, b"")

    for days, valid in ((29, True), (31, False), (-2, False)):
        with monkeypatch.context() as patch:
            patch.setattr(certificates, "datetime", ahead(days))
            assert issued_by(a.ca, a.cert) is valid


def test_keys_of_nvflare_provision_sign_too(out: Path) -> None:
    """They are RSA keys."""
    pem: Any = lambda key: key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    key = rsa.generate_private_key(65537, 2048)
    paths = (out / "kits" / "ca" / "ca.pem", out / "kits" / "ca" / "key.pem")
    ca = certificates.load_authority(paths, (paths[0].read_bytes(), paths[1].read_bytes()))
    end = datetime.now(UTC) + timedelta(days=1)
    name = certificates._subject("r")
    cert = certificates._signed(name, ca.cert.subject, key.public_key(), end, [], ca.key).public_bytes(Encoding.PEM)
    signature = sign(pem(key), "audit", TEXT)
    assert verify(cert, "audit", TEXT, signature)
    assert not verify(cert, "audit", TEXT, bytes(len(signature)))
    assert issued_by(ca.pem, cert)
    with pytest.raises(ValueError, match="must be an EC or an RSA key; got"):
        sign(pem(ed25519.Ed25519PrivateKey.generate()), "audit", TEXT)
