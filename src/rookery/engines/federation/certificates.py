"""X.509 certificates of a federation: a certificate authority (CA), what it issues, and checks of what was read.

Importing this file needs `cryptography`.
"""

import ipaddress
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from cryptography import x509
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, load_pem_private_key
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

_CA_DAYS = 3650
_SLACK = timedelta(days=1)  # participants' clocks differ
_USES = (
    "digital_signature", "content_commitment", "key_encipherment", "data_encipherment", "key_agreement",
    "key_cert_sign", "crl_sign", "encipher_only", "decipher_only",
)  # fmt: skip


@dataclass(frozen=True)
class Authority:
    """A federation's CA."""

    cert: x509.Certificate
    key: ec.EllipticCurvePrivateKey = field(repr=False)

    @property
    def pem(self) -> bytes:
        """Its certificate."""
        return self.cert.public_bytes(Encoding.PEM)

    def key_pem(self) -> bytes:
        """Its private key."""
        return _pem(self.key)

    def issue(self, name: str, days: int, hosts: list[str], server: bool) -> tuple[bytes, bytes]:
        """Issue a certificate for a name and its hosts, and return it with its private key (PEM)."""
        key = ec.generate_private_key(ec.SECP256R1())
        end = min(datetime.now(UTC) + timedelta(days=days), self.cert.not_valid_after_utc)
        issuer = self.cert.extensions.get_extension_for_class(x509.SubjectKeyIdentifier).value
        purpose = ExtendedKeyUsageOID.SERVER_AUTH if server else ExtendedKeyUsageOID.CLIENT_AUTH
        extensions: list[tuple[x509.ExtensionType, bool]] = [
            (x509.BasicConstraints(ca=False, path_length=None), True),
            (_usage("digital_signature"), True),
            (x509.ExtendedKeyUsage([purpose]), False),
            (x509.SubjectKeyIdentifier.from_public_key(key.public_key()), False),
            (x509.AuthorityKeyIdentifier.from_issuer_subject_key_identifier(issuer), False),
            *([(x509.SubjectAlternativeName(list(map(_general_name, hosts))), False)] if hosts else []),
        ]
        cert = _signed(_subject(name), self.cert.subject, key.public_key(), end, extensions, self.key)
        return cert.public_bytes(Encoding.PEM), _pem(key)


def new_authority(days: int) -> Authority:
    """Make a CA that is valid for ten years, or for `days` if that is longer."""
    key = ec.generate_private_key(ec.SECP256R1())
    name, end = _subject("Rookery federation CA"), datetime.now(UTC) + timedelta(days=max(days, _CA_DAYS))
    key_id = x509.SubjectKeyIdentifier.from_public_key(key.public_key())
    extensions: list[tuple[x509.ExtensionType, bool]] = [
        (x509.BasicConstraints(ca=True, path_length=0), True),
        (_usage("key_cert_sign", "crl_sign"), True),
        (key_id, False),
        (x509.AuthorityKeyIdentifier.from_issuer_subject_key_identifier(key_id), False),
    ]
    return Authority(_signed(name, name, key.public_key(), end, extensions, key), key)


def load_authority(paths: tuple[Path, Path], contents: tuple[bytes, bytes]) -> Authority:
    """Return the CA of a certificate and a private key; the paths are for messages."""
    cert, key = _certificate(paths[0], contents[0]), _private_key(paths[1], contents[1])
    if not isinstance(key, ec.EllipticCurvePrivateKey) or cert.public_key() != key.public_key():
        raise ValueError(f"{paths[1]} must be the private key of {paths[0]}; it is not. Put the right one back.")
    _check_dates(paths[0], cert)
    return Authority(cert, key)


def serial_of(cert: bytes) -> str:
    """Return the serial number of a certificate (PEM), in hexadecimal digits."""
    return f"{_certificate(Path('certificate'), cert).serial_number:x}"


def checked_name(paths: dict[str, Path], contents: dict[str, bytes]) -> str:
    """Return the name in a kit's certificate; ValueError unless it is valid, of the key and signed by the CA."""
    ca, cert = _certificate(paths["ca"], contents["ca"]), _certificate(paths["cert"], contents["cert"])
    if _private_key(paths["key"], contents["key"]).public_key() != cert.public_key():
        raise ValueError(f"{paths['key']} must be the private key of {paths['cert']}; it is not. Copy the kit again.")
    try:
        cert.verify_directly_issued_by(ca)
    except (ValueError, TypeError, InvalidSignature):
        raise ValueError(
            f"{paths['cert']} must be signed by the CA in {paths['ca']}; it is not. Copy the kit again."
        ) from None
    _check_dates(paths["cert"], cert)
    _check_dates(paths["ca"], ca)
    names = cert.subject.get_attributes_for_oid(NameOID.COMMON_NAME)
    if not names:
        raise ValueError(
            f"{paths['cert']} must have a common name, the participant's; it has none. Copy the kit again."
        )
    return str(names[0].value)


def sign(key: bytes, content: bytes) -> bytes:
    """Sign with a participant's private key (PEM)."""
    private = _private_key(Path("key"), key)
    if not isinstance(private, ec.EllipticCurvePrivateKey):
        raise ValueError("A kit must have an elliptic-curve key for secure sums; got another kind. Make new kits.")
    return private.sign(content, ec.ECDSA(hashes.SHA256()))


def check_signature(ca: bytes, cert: bytes, name: str, content: bytes, signature: bytes) -> None:
    """Raise ValueError unless this content is signed by the site of this name, with a certificate of the CA (PEM)."""
    given = _certificate(Path(f"the certificate of {name}"), cert)
    _check_site(given, _certificate(Path("the CA's certificate"), ca), name)
    key = given.public_key()
    try:
        if not isinstance(key, ec.EllipticCurvePublicKey):
            raise InvalidSignature
        key.verify(signature, content, ec.ECDSA(hashes.SHA256()))
    except InvalidSignature:
        raise ValueError(f"the keys of {name} must be signed with its certificate; they are not") from None


def _check_site(cert: x509.Certificate, ca: x509.Certificate, name: str) -> None:
    """Raise ValueError unless the CA issued this certificate, still valid, to the site of this name."""
    try:
        cert.verify_directly_issued_by(ca)
    except (ValueError, TypeError, InvalidSignature):
        raise ValueError(f"the certificate of {name} must be issued by this federation's CA; it is not") from None
    if not cert.not_valid_before_utc <= datetime.now(UTC) <= cert.not_valid_after_utc:
        raise ValueError(f"the certificate of {name} must be valid now; it is not")
    if [entry.value for entry in cert.subject.get_attributes_for_oid(NameOID.COMMON_NAME)] != [name]:
        raise ValueError(f"the certificate of {name} must have that name; it has another")
    try:
        uses: Any = cert.extensions.get_extension_for_class(x509.ExtendedKeyUsage).value
    except x509.ExtensionNotFound:
        uses = ()
    if ExtendedKeyUsageOID.CLIENT_AUTH not in uses:
        raise ValueError(f"the certificate of {name} must be a site's; it is not")


def _general_name(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)


def _subject(name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])


def _signed(
    subject: x509.Name, issuer: x509.Name, key: Any, end: datetime, extensions: list[Any], signing_key: Any
) -> x509.Certificate:
    builder = x509.CertificateBuilder().subject_name(subject).issuer_name(issuer).public_key(key)
    builder = builder.serial_number(x509.random_serial_number())
    builder = builder.not_valid_before(datetime.now(UTC) - _SLACK).not_valid_after(end)
    for extension, critical in extensions:
        builder = builder.add_extension(extension, critical)
    return builder.sign(signing_key, hashes.SHA256())


def _usage(*uses: str) -> x509.KeyUsage:
    return x509.KeyUsage(**{use: use in uses for use in _USES})


def _pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())


def _certificate(path: Path, content: bytes) -> x509.Certificate:
    try:
        return x509.load_pem_x509_certificate(content)
    except ValueError:
        raise ValueError(f"{path} must be a certificate in PEM form; it is not. Copy the kit again.") from None


def _private_key(path: Path, content: bytes) -> Any:
    try:
        return load_pem_private_key(content, password=None)
    except TypeError:
        raise ValueError(f"The private key {path} must have no password; it has one. Give a key without.") from None
    except (ValueError, UnsupportedAlgorithm):
        raise ValueError(f"{path} must be a private key in PEM form; it is not. Copy the kit again.") from None


def _check_dates(path: Path, cert: x509.Certificate) -> None:
    now, begin, end = datetime.now(UTC), cert.not_valid_before_utc, cert.not_valid_after_utc
    if now > end:
        raise ValueError(f"{path} expired on {end:%Y-%m-%d %H:%M} UTC. Make a new one with `rookery federation init`.")
    if now < begin:
        raise ValueError(f"{path} is valid only from {begin:%Y-%m-%d %H:%M} UTC on. Check this machine's clock.")
