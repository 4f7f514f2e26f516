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
from cryptography.hazmat.primitives.asymmetric import ec, padding, rsa
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, load_pem_private_key
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

_CA_DAYS = 3650
_SOON = timedelta(days=14)  # how long before its end a certificate is to be renewed, if that is a quarter of its time
SLACK = timedelta(days=1)  # participants' clocks differ
_PSS = padding.PSS(padding.MGF1(hashes.SHA256()), padding.PSS.DIGEST_LENGTH)
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

    def renew(self, cert: bytes, days: int | None = None) -> bytes:
        """Issue a certificate (PEM) that differs from one of this CA's in its dates and its serial number alone.

        `days` is how long it is valid; None: as long as the one before.
        """
        old = _certificate(Path("certificate"), cert)
        old.verify_directly_issued_by(self.cert)
        valid = old.not_valid_after_utc - old.not_valid_before_utc - SLACK if days is None else timedelta(days=days)
        end = min(datetime.now(UTC) + valid, self.cert.not_valid_after_utc)
        extensions = [(extension.value, extension.critical) for extension in old.extensions]
        new = _signed(old.subject, self.cert.subject, old.public_key(), end, extensions, self.key)
        return new.public_bytes(Encoding.PEM)

    def reissue(self, cert: bytes) -> tuple[bytes, bytes]:
        """Issue a certificate for the name, purpose and hosts of another one, and return it with a new private key."""
        old = _certificate(Path("certificate"), cert)
        valid = old.not_valid_after_utc - old.not_valid_before_utc - SLACK
        return self.issue(name_of(cert), max(1, valid.days), hosts_of(cert), is_server(cert))


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


def serials_of(certs: bytes) -> set[str]:
    """Return the serial numbers of several certificates (PEM), in hexadecimal digits."""
    return {f"{cert.serial_number:x}" for cert in x509.load_pem_x509_certificates(certs)}


def name_of(cert: bytes) -> str:
    """Return the participant's name in a certificate (PEM); "" if it has none."""
    names = _certificate(Path("certificate"), cert).subject.get_attributes_for_oid(NameOID.COMMON_NAME)
    return str(names[0].value) if names else ""


def end_of(cert: bytes) -> datetime:
    """Return when a certificate (PEM) ends."""
    return _certificate(Path("certificate"), cert).not_valid_after_utc


def ending(cert: bytes) -> str:
    """Return when a certificate (PEM) ends if that is soon, "on 2030-01-31, in 9 days"; otherwise ""."""
    found, now = _certificate(Path("certificate"), cert), datetime.now(UTC)
    left, whole = found.not_valid_after_utc - now, found.not_valid_after_utc - found.not_valid_before_utc
    if left > min(_SOON, whole / 4):
        return ""
    return f"on {found.not_valid_after_utc:%Y-%m-%d %H:%M} UTC, in {max(0, left.days)} days"


def same_key(first: bytes, second: bytes) -> bool:
    """Return whether two certificates (PEM) belong to the same private key."""
    path = Path("certificate")
    return bool(_certificate(path, first).public_key() == _certificate(path, second).public_key())


def is_server(cert: bytes) -> bool:
    """Return whether a certificate (PEM) is for a coordinator; certificates of `nvflare provision` don't say."""
    uses = _extension(cert, x509.ExtendedKeyUsage)
    return uses is None or ExtendedKeyUsageOID.SERVER_AUTH in uses


def hosts_of(cert: bytes) -> list[str]:
    """Return the hosts that a certificate (PEM) is for."""
    names = _extension(cert, x509.SubjectAlternativeName)
    return [str(name.value) for name in names or () if isinstance(name, x509.DNSName | x509.IPAddress)]


def _extension(cert: bytes, kind: Any) -> Any:
    try:
        return _certificate(Path("certificate"), cert).extensions.get_extension_for_class(kind).value
    except x509.ExtensionNotFound:
        return None


def sign(key: bytes, purpose: str, message: bytes) -> bytes:
    """Sign a message with a participant's private key (PEM).

    A signature holds for one purpose alone, so that a message of one protocol can't be passed off in another. Each
    purpose is a constant text of the program.
    """
    private, text = _private_key(Path("key"), key), _for_purpose(purpose, message)
    if isinstance(private, ec.EllipticCurvePrivateKey):
        return private.sign(text, ec.ECDSA(hashes.SHA256()))
    if isinstance(private, rsa.RSAPrivateKey):  # of `nvflare provision`
        return private.sign(text, _PSS, hashes.SHA256())
    raise ValueError(f"A participant's key must be an EC or an RSA key; got {type(private).__name__}. Make a new kit.")


def verify(cert: bytes, purpose: str, message: bytes, signature: bytes) -> bool:
    """Return whether the owner of a certificate (PEM) has signed this message for this purpose: see `sign`.

    It says nothing about the certificate: see `issued_by`.
    """
    text = _for_purpose(purpose, message)
    try:
        public = x509.load_pem_x509_certificate(cert).public_key()
        if isinstance(public, ec.EllipticCurvePublicKey):
            public.verify(signature, text, ec.ECDSA(hashes.SHA256()))
        elif isinstance(public, rsa.RSAPublicKey):
            public.verify(signature, text, _PSS, hashes.SHA256())
        else:
            return False
    except (ValueError, InvalidSignature, UnsupportedAlgorithm):
        return False
    return True


def issued_by(ca: bytes, cert: bytes, today: bool = True) -> bool:
    """Return whether a CA has issued a certificate (both PEM) and, with `today`, both are valid today.

    It says neither whose certificate it is (`name_of`) nor whether it was revoked (`Revocations`).
    """
    now = datetime.now(UTC)
    try:
        both = x509.load_pem_x509_certificate(ca), x509.load_pem_x509_certificate(cert)
        both[1].verify_directly_issued_by(both[0])
    except (ValueError, TypeError, InvalidSignature, UnsupportedAlgorithm):
        return False
    return not today or all(one.not_valid_before_utc <= now <= one.not_valid_after_utc for one in both)


def checked_name(paths: dict[str, Path], contents: dict[str, bytes]) -> str:
    """Return the name in a kit's certificate; ValueError unless it is valid, fits its key and is signed by the CA."""
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


def _for_purpose(purpose: str, message: bytes) -> bytes:
    return f"rookery: {purpose}".encode() + b"\0" + message


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
    builder = builder.not_valid_before(datetime.now(UTC) - SLACK).not_valid_after(end)
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
        raise ValueError(f"{path} expired on {end:%Y-%m-%d %H:%M} UTC. Renew it with `rookery federation renew`.")
    if now < begin:
        raise ValueError(f"{path} is valid only from {begin:%Y-%m-%d %H:%M} UTC on. Check this machine's clock.")
