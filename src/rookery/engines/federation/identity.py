"""Who a participant is: signatures with its certificate, and checks of others' signatures."""

from typing import Any

from rookery.engines.federation.kits import FILES, Kit, revocations

_PURPOSE = "keys of a secure sum"


class Identity:
    """A site's certificate and key, with which it signs the keys of its masks. It needs `cryptography`."""

    def __init__(self, kit: Kit) -> None:
        self._kit, self._revocations = kit, revocations(kit)

    @property
    def cert(self) -> str:
        """The certificate that goes with a signature (PEM), which may have been renewed."""
        path = None if self._kit.folder is None else self._kit.folder / FILES["cert"]
        return (self._kit.cert if path is None or not path.exists() else path.read_bytes()).decode()

    def sign(self, content: bytes) -> str:
        """Return a signature, in hexadecimal digits."""
        from rookery.engines.federation.certificates import sign

        return sign(self._kit.key, _PURPOSE, content).hex()

    def check(self, name: str, cert: Any, signature: Any, content: bytes) -> None:
        """Raise ValueError unless the site of this name signed the content, with a certificate that is in force."""
        from rookery.engines.federation import certificates

        pem = str(cert).encode()
        if not certificates.issued_by(self._kit.ca, pem):
            raise ValueError(
                f"the certificate of {name} must be issued by this federation's CA and be valid now; it is not"
            )
        if certificates.name_of(pem) != name or certificates.is_server(pem):
            raise ValueError(f"the certificate of {name} must be that site's; it is another participant's")
        self._revocations.refresh()
        if self._revocations.names(certificates.serial_of(pem)):
            raise ValueError(f"the certificate of {name} must be in force; it was revoked")
        try:
            given = bytes.fromhex(str(signature))
        except ValueError:
            given = b""
        if not certificates.verify(pem, _PURPOSE, content, given):
            raise ValueError(f"the keys of {name} must be signed with its certificate; they are not")
