"""What coordinator and sites prove to each other over gRPC beyond TLS, in notes that travel between the messages.

TLS checks that both certificates were issued by the CA and are valid, but not that they are still in force. The
coordinator reads a site's certificate from the connection. gRPC shows a site nothing of the coordinator's, so the
coordinator proves with its first note that it holds the key of a certificate that is in force: it signs the site's name
and a number that the site has drawn for this connection.
"""

import base64
import ipaddress
import json
import secrets
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

from rookery.engines.federation import kits
from rookery.engines.federation.kits import Kit

_MARK = bytes(4)  # no message begins like this: its header would be empty
_PURPOSE = "coordinator"
EXPIRED = "the certificate of {!r} expired on {:%Y-%m-%d %H:%M} UTC; renew it with `rookery federation renew`"


def note(**fields: Any) -> bytes:
    """Return a note: texts, or bytes, by name."""
    texts = {k: base64.b64encode(v).decode() if isinstance(v, bytes) else v for k, v in fields.items()}
    return _MARK + json.dumps(texts).encode()


def noted(message: bytes) -> dict[str, Any] | None:
    """Return the fields of a note; None for a message of the protocol. ValueError if it is neither."""
    if not message.startswith(_MARK):
        return None
    fields = json.loads(message[len(_MARK) :])
    if not isinstance(fields, dict):
        raise ValueError("a note must be a JSON object")
    return fields


def proof(kit: Kit, site: str, nonce: str) -> dict[str, bytes]:
    """Return the fields by which the coordinator proves to a site who it is."""
    from rookery.engines.federation.certificates import sign

    return {"certificate": kit.cert, "signature": sign(kit.key, _PURPOSE, _statement(site, nonce))}


def _statement(site: str, nonce: str) -> bytes:
    return json.dumps([site, nonce]).encode()


class Trust:
    """What a site knows of the coordinator's certificate and of its own, from one connection to the next.

    Arguments:
        kit: the site's kit.
        host: the host under which the coordinator is reached.
        tell: tell(text), called with what its owner should know.

    Attributes:
        kit: the site's kit, with a renewed certificate once there is one.
        nonce: the number that the coordinator has to sign on this connection.
        coordinator: the certificate (PEM) that the coordinator has proved to be its own; empty before.
    """

    def __init__(self, kit: Kit, host: str, tell: Callable[[str], None]) -> None:
        self.kit, self._host, self._tell = kit, host, tell
        self._revocations = kits.revocations(kit)
        self._told = self.nonce = ""
        self.coordinator = b""

    def begin(self) -> None:
        """Begin a connection; ValueError if the site's own certificate has expired or was revoked."""
        from rookery.engines.federation import certificates

        self.nonce, self.coordinator = secrets.token_hex(16), b""
        end, soon = certificates.end_of(self.kit.cert), certificates.ending(self.kit.cert)
        self._refresh()
        if datetime.now(UTC) > end:
            raise ValueError(f"{EXPIRED.format(self.kit.name, end)}.")
        if self._revocations.names(certificates.serial_of(self.kit.cert)):
            raise ValueError(f"the certificate of {self.kit.name!r} was revoked; ask for a new kit.")
        if soon and soon != self._told:
            self._told = soon
            self._tell(f"This site's certificate ends {soon}. Renew it with `rookery federation renew`.")

    def take(self, said: dict[str, Any]) -> None:
        """Take a note of the coordinator's; ValueError, which ends the connection, if the note can't be trusted."""
        if "list" in said or "signature" in said:  # a coordinator that leaves out its list has none
            self._take_list(_bytes(said, "list"))
        if "signature" in said:
            self._take_proof(_bytes(said, "certificate"), _bytes(said, "signature"))
        if said.get("renewed"):
            self._take_renewed(_bytes(said, "renewed"))

    def check(self) -> None:
        """Check that the coordinator has proved who it is, and that its certificate is in force; else ValueError."""
        from rookery.engines.federation import certificates

        if not self.coordinator:
            raise ValueError("has not proved who it is")
        self._refresh()
        if self._revocations.names(self._serial):
            raise ValueError("has a certificate that was revoked. Ask for its new address or certificate")
        if datetime.now(UTC) > self._end:
            raise ValueError(EXPIRED.format("coordinator", certificates.end_of(self.coordinator)))

    def _refresh(self) -> None:
        """Read the list of revoked certificates again; if it can't be used, the one before stays in force."""
        try:
            self._revocations.refresh()
        except ValueError as error:
            self._tell(str(error))

    def _take_list(self, content: bytes) -> None:
        """Take the coordinator's list of revoked certificates, which may not be older than the newest one seen."""
        if not content and not self._revocations.number:
            return  # kits of an earlier version
        try:
            if not content:
                raise ValueError("a list of revoked certificates must be there; it has none")
            newer = self._revocations.take(content)
        except OSError as error:
            self._tell(
                f"The new list of revoked certificates can't be saved in {self.kit.folder} ({error.strerror}). It is "
                "in force until this site ends."
            )
            return
        except ValueError as error:
            raise ValueError(f"has a list of revoked certificates that is not to be trusted: {error}") from None
        if newer:
            self._tell(f"List {self._revocations.number} of revoked certificates is in force.")

    def _take_proof(self, cert: bytes, signature: bytes) -> None:
        from rookery.engines.federation import certificates

        known = certificates.issued_by(self.kit.ca, cert) and certificates.is_server(cert)
        if not known or bare_host(self._host) not in map(bare_host, certificates.hosts_of(cert)):
            raise ValueError(f"shows a certificate that is not the coordinator's at {self._host}")
        if not certificates.verify(cert, _PURPOSE, _statement(self.kit.name, self.nonce), signature):
            raise ValueError("can't prove that its certificate is its own")
        self.coordinator, self._serial, self._end = cert, certificates.serial_of(cert), certificates.end_of(cert)
        self.check()

    def _take_renewed(self, cert: bytes) -> None:
        """Take this site's renewed certificate, for the same private key."""
        from rookery.engines.federation import certificates
        from rookery.engines.federation.revocations import replace_file

        kit = self.kit
        if cert == kit.cert or not self.coordinator:
            return
        own = certificates.issued_by(kit.ca, cert) and certificates.same_key(cert, kit.cert)
        if not own or certificates.name_of(cert) != kit.name:
            raise ValueError("sends a renewed certificate that is not this site's")
        if certificates.end_of(cert) <= certificates.end_of(kit.cert):
            return
        if self._revocations.names(certificates.serial_of(cert)):
            return
        self.kit = replace(kit, cert=cert)
        if kit.folder is None:
            return
        until = f"{certificates.end_of(cert):%Y-%m-%d %H:%M} UTC"
        try:
            replace_file(kit.folder / kits.FILES["cert"], cert)
            self._tell(f"This site's certificate was renewed, and is valid until {until}.")
        except OSError as error:
            self._tell(f"This site's renewed certificate can't be saved in {kit.folder} ({error.strerror}).")


def bare_host(host: str) -> str:
    """Return a host in the one form that can be compared.

    >>> bare_host("FL.example.org"), bare_host("0:0::1")
    ('fl.example.org', '::1')
    """
    try:
        return str(ipaddress.ip_address(host))
    except ValueError:
        return host.lower()


def _bytes(said: dict[str, Any], name: str) -> bytes:
    return base64.b64decode(str(said.get(name, "")))
