"""The list of revoked certificates: an X.509 list (CRL), signed by the federation's CA, that all participants keep.

Each list has a number. A participant keeps the newest that it has seen, wherever it came from, and never goes back.
Importing this file needs `cryptography`.
"""

import os
import tempfile
from collections.abc import Iterable
from datetime import UTC, datetime
from pathlib import Path
from typing import NamedTuple

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.serialization import Encoding

from rookery.engines.federation.certificates import SLACK, Authority


class Listed(NamedTuple):
    """The contents of a list."""

    number: int
    serials: frozenset[str]  # in hexadecimal digits


def make_list(ca: Authority, number: int, serials: Iterable[str]) -> bytes:
    """Return the list (PEM) of these serial numbers, in hexadecimal digits."""
    begin = datetime.now(UTC) - SLACK
    builder = x509.CertificateRevocationListBuilder().issuer_name(ca.cert.subject)
    builder = builder.last_update(begin).next_update(ca.cert.not_valid_after_utc)
    builder = builder.add_extension(x509.CRLNumber(number), critical=False)
    for serial in sorted(set(serials)):
        entry = x509.RevokedCertificateBuilder().serial_number(int(serial, 16)).revocation_date(begin)
        builder = builder.add_revoked_certificate(entry.build())
    return builder.sign(ca.key, hashes.SHA256()).public_bytes(Encoding.PEM)


def read_list(ca: bytes, content: bytes) -> Listed:
    """Return the contents of a list (PEM); ValueError unless this CA (PEM) has signed it."""
    try:
        found = x509.load_pem_x509_crl(content)
        number = found.extensions.get_extension_for_class(x509.CRLNumber).value.crl_number
    except (ValueError, x509.ExtensionNotFound):
        raise ValueError("a list of revoked certificates must be an X.509 list with a number; it is not") from None
    key = x509.load_pem_x509_certificate(ca).public_key()
    if not found.is_signature_valid(key):  # type: ignore[arg-type]
        raise ValueError("a list of revoked certificates must be signed by this federation's CA; it is not")
    return Listed(number, frozenset(f"{entry.serial_number:x}" for entry in found))


class Revocations:
    """A participant's copy of the list.

    Arguments:
        ca: the CA's certificate (PEM).
        path: the file that it is kept in, which may be replaced by a newer one at any time; None: it is in memory only.
        least: the number that the file's list must have at least; 0: there may be no file. ValueError if it is older.

    Attributes:
        pem: the newest list; empty if none was seen.
        number: its number; 0 if none was seen.
    """

    def __init__(self, ca: bytes, path: Path | None, least: int = 0) -> None:
        self._ca, self._path = ca, path
        self._stamp: tuple[int, ...] = ()
        self._serials: frozenset[str] = frozenset()
        self.pem, self.number = b"", 0
        self.refresh()
        if self.number < least:
            there = f"number {self.number}" if self.number else "missing"
            raise ValueError(
                f"{path} must be the list of revoked certificates of number {least} or later; it is {there}. Copy it "
                "from the folder of `rookery federation init`."
            )

    def names(self, serial: str) -> bool:
        """Return whether a certificate of this serial number (hexadecimal digits) is revoked."""
        return serial in self._serials

    def refresh(self) -> bool:
        """Read the file again if it has changed, and return whether there is a newer list.

        ValueError if the file can't be used; the list before stays in force.
        """
        if self._path is None:
            return False
        try:
            stat = self._path.stat()
            stamp = (stat.st_mtime_ns, stat.st_ino, stat.st_size)
            if stamp == self._stamp:
                return False
            self._stamp, content = stamp, self._path.read_bytes()
        except FileNotFoundError:
            return False
        except OSError as error:
            raise ValueError(f"{self._path} can't be read ({error.strerror}). Check its permissions.") from None
        try:
            return self._renew(content)
        except ValueError as error:
            raise ValueError(f"{self._path}: {error}. Copy it again.") from None

    def take(self, content: bytes) -> bool:
        """Take a list (PEM) from another participant, save it, and return whether it is newer.

        ValueError if it is older or not signed by the CA; OSError if it is in force, but can't be saved.
        """
        newer = self._renew(content)
        if newer and self._path is not None:
            replace_file(self._path, content)
            stat = self._path.stat()
            self._stamp = (stat.st_mtime_ns, stat.st_ino, stat.st_size)
        return newer

    def _renew(self, content: bytes) -> bool:
        found = read_list(self._ca, content)
        if found.number < self.number or (found.number == self.number and found.serials != self._serials):
            raise ValueError(
                f"a list of revoked certificates must be newer than number {self.number}; got {found.number}"
            )
        if found.number == self.number:
            return False
        self.pem, self.number, self._serials = content, found.number, found.serials
        return True


def replace_file(path: Path, content: bytes) -> None:
    """Write a public file of a kit in one step."""
    descriptor, beside = tempfile.mkstemp(prefix=f".{path.name}-", dir=path.parent)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
        Path(beside).chmod(0o644)
        Path(beside).replace(path)
    except OSError:
        Path(beside).unlink(missing_ok=True)
        raise
