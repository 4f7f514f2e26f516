"""Who a participant is: signatures with its certificate, and checks of others' signatures."""

from dataclasses import dataclass
from typing import Any

from rookery.engines.federation.kits import Kit


@dataclass(frozen=True)
class Identity:
    """A site's certificate and key, with which it signs the keys of its masks.

    Its methods need `cryptography`.
    """

    kit: Kit

    @property
    def cert(self) -> str:
        """The certificate that goes with a signature (PEM)."""
        return self.kit.cert.decode()

    def sign(self, content: bytes) -> str:
        """Return a signature, in hexadecimal digits."""
        from rookery.engines.federation.certificates import sign

        return sign(self.kit.key, content).hex()

    def check(self, name: str, cert: Any, signature: Any, content: bytes) -> None:
        """Raise ValueError unless the site of this name signed the content, with a certificate of the same CA."""
        from rookery.engines.federation.certificates import check_signature

        try:
            given = str(cert).encode(), bytes.fromhex(str(signature))
        except ValueError:
            raise ValueError(f"the keys of {name} must be signed with its certificate; they are not") from None
        check_signature(self.kit.ca, given[0], name, content, given[1])
