"""A site's end of the gRPC stream: it connects, answers requests, and connects again if the connection is lost."""

import logging
import queue
import re
import socket
import ssl
import time
from collections.abc import Callable
from typing import Any

from rookery.base.printable import printable
from rookery.engines.federation.kits import Kit, parse_address
from rookery.engines.federation.transports.grpc import LOOPBACK, METHOD, OPTIONS, Assembly, import_grpc, pieces
from rookery.engines.federation.transports.trust import Trust, noted
from rookery.engines.federation.wire import Message

LOG = logging.getLogger("rookery.network")
LIMIT = 1 << 32  # bytes of a request
_PROBE = 5.0  # seconds for a look at the coordinator's certificate
_FAILURES = 3  # TLS failures in a row after which a site that was never connected gives up
_FINAL = ("PERMISSION_DENIED", "UNAUTHENTICATED", "ALREADY_EXISTS", "ABORTED", "FAILED_PRECONDITION")
_PAUSES = (0.1, 0.2, 0.5, 1.0, 2.0, 5.0)  # seconds between attempts to connect
_CHECK = "Check that the kit belongs to this federation."
_WRONG_HOST = (62, 64)  # OpenSSL's codes for a certificate of another host name, and of another address


class JoinError(RuntimeError):
    """The coordinator does not take this site."""


def join(
    handle: Callable[[bytes], Message],
    done: Callable[[], bool],
    name: str,
    address: str,
    kit: Kit | None,
    tell: Callable[[str], None] = LOG.info,
    limit: int = LIMIT,
    patience: float | None = None,
    receipts: Callable[[str, bytes], None] = lambda receipt, coordinator: None,
) -> None:
    """Connect as a site, answer until it is done, and connect again whenever the connection is lost.

    A site that was never connected gives up if its certificate, or the coordinator's, is not accepted.

    Arguments:
        handle, done: the methods of its `Responder`.
        name: the site's name.
        address: where the coordinator listens.
        kit: its certificates; None: no certificates, on this machine only.
        tell: tell(text), called with a line about each change of the connection.
        limit: how many bytes a request may have.
        patience: seconds without any connection after which it gives up; None: never.
        receipts: receipts(receipt, coordinator), called with a receipt for the head of the site's audit log and the
            coordinator's certificate: see `heads`.
    """
    if kit is None and parse_address(address)[1] not in LOOPBACK:
        raise ValueError(f"address must be on this machine without certificates; got {address}. Give a kit, too.")
    grpc = import_grpc()
    trust = None if kit is None else Trust(kit, parse_address(address)[1], tell)
    settings: Any = {"target": address, "options": [*OPTIONS, ("grpc.use_local_subchannel_pool", 1)]}

    def heard(trust: Trust, message: bytes) -> bool:
        """Return whether this was a note; ValueError if the coordinator must not be answered."""
        said = noted(message)
        if said is None:
            trust.check()
            return False
        trust.take(said)
        if "receipt" in said:
            trust.check()
            receipts(str(said["receipt"]), trust.coordinator)
        return True

    def attend() -> tuple[bool, str]:
        """Answer over one connection until it ends; return whether there was one, and why it ended."""
        metadata = [("site", name)]
        if trust is None:
            channel = grpc.insecure_channel(**settings)
        else:
            try:
                trust.begin()
            except ValueError as error:
                raise JoinError(f"{name} can't connect to {address}: {error}") from None
            metadata.append(("nonce", trust.nonce))
            own = trust.kit
            credentials = grpc.ssl_channel_credentials(own.ca, own.key, own.cert)
            channel = grpc.secure_channel(**settings, credentials=credentials)
        out: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        stream = channel.stream_stream(METHOD)(iter(out.get, None), metadata=metadata)
        connected, assembly = False, Assembly(lambda: limit)
        try:
            stream.initial_metadata()  # returns once it is connected, or can't be
            connected = stream.is_active()
            if connected:
                tell(f"Connected to {address}.")
            for piece in stream:
                whole = assembly.add(piece)
                if whole is not None:
                    message = bytes(whole)
                    if trust is not None and heard(trust, message):
                        continue
                    for part in pieces(handle(message)):
                        out.put(part)
                    if done():
                        out.put(None)
            return connected, "the coordinator has ended the connection"
        except ValueError as error:
            return connected, f"the coordinator {error}"
        except grpc.RpcError as error:
            why = printable(_without_addresses(str(error.details()))).rstrip(".")
            renewed = trust is not None and trust.kit is not own
            if error.code().name in _FINAL and not done() and not renewed:
                raise JoinError(f"The coordinator at {address} refuses {name}: {why}.") from None
            return connected, why
        finally:
            out.put(None)
            stream.cancel()
            channel.close()

    attempt, failures, last_told, ever, since = 0, 0, "", False, time.monotonic()
    while not done():
        connected, why = attend()
        if done():
            return
        if connected:
            attempt, last_told, ever, since = 0, "", True, time.monotonic()
        verdict = "" if trust is None or connected else _tls_verdict(trust.kit, address, why)
        failures = failures + 1 if verdict else 0
        if failures >= _FAILURES and not ever:
            raise JoinError(f"Cannot connect to {address}: {verdict}")
        if patience is not None and time.monotonic() - since > patience:
            raise JoinError(f"The coordinator at {address} can't be reached: {(verdict or why).rstrip('.')}.")
        why = verdict or f"{why}."
        if why != last_told:
            tell(f"Cannot connect to {address}: {why} Trying again.")
            last_told = why
        time.sleep(_PAUSES[min(attempt, len(_PAUSES) - 1)])
        attempt += 1


def _without_addresses(details: str) -> str:
    """Return what gRPC says of a connection, without the addresses that it has tried.

    >>> _without_addresses("failed to connect to all addresses; last error: UNKNOWN: ipv4:[::1]:1: Connection refused")
    'Connection refused'
    >>> _without_addresses("failed to connect to all addresses; last error: UNKNOWN: [::1]:1: Connection refused (111)")
    'Connection refused'
    >>> _without_addresses("Socket closed")
    'Socket closed'
    """
    _, tried, last = details.partition("last error: ")
    return re.sub(r" \(\d+\)$", "", last.rpartition(": ")[2]) if tried else details


def _tls_verdict(kit: Kit, address: str, said: str) -> str:
    """Return why TLS fails between this site and the coordinator; "" if something else is wrong.

    Arguments:
        kit: the site's kit.
        address: the coordinator's address.
        said: what gRPC says of the connection.
    """
    host, _, port = address.rpartition(":")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.load_verify_locations(cadata=kit.ca.decode())
    context.set_alpn_protocols(["h2"])
    try:
        with socket.create_connection((host.strip("[]"), int(port)), _PROBE) as plain:
            context.wrap_socket(plain, server_hostname=host.strip("[]")).close()
    except ssl.SSLCertVerificationError as error:
        if error.verify_code in _WRONG_HOST:
            return f"the coordinator's certificate is not for {host}. Check the address."
        if "expired" in error.verify_message:
            return "the coordinator's certificate has expired. Ask the coordinator to renew it."
        return f"the coordinator's certificate was not issued by this federation's CA. {_CHECK}"
    except ssl.SSLError as error:
        if error.reason in ("WRONG_VERSION_NUMBER", "RECORD_LAYER_FAILURE"):
            return "what listens there does not speak TLS. Check the address, and that the coordinator has a kit."
    except OSError:
        return ""
    # The coordinator's certificate is good, and it hangs up at the sight of the site's.
    if "closed" in said.lower() or "reset" in said.lower():
        return f"the coordinator does not accept this site's certificate. {_CHECK}"
    return ""
