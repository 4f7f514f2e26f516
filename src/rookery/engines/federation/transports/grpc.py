"""Sites on a network, over gRPC: each holds one stream to the coordinator open, with a certificate on both sides.

A message goes in pieces of 1 MiB, but for the last, which is shorter and may be empty. There is nothing of protobuf in
it, and nothing that is read as anything but bytes.
"""

import logging
import os
import queue
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent import futures
from pathlib import Path
from typing import Any

from rookery.base.printable import printable
from rookery.engines.federation.kits import Kit, accepted, check_names, load_kit, parse_address, serial_of
from rookery.engines.federation.transports import Event
from rookery.engines.federation.wire import PART, Message, Parts, cut

LOG = logging.getLogger("rookery.network")
_UNREAD = 16  # messages of a site that nobody has waited for: it sends more than it is asked for
_SERVICE, _METHOD = "rookery.Federation", "Join"
_LOOPBACK = ("127.0.0.1", "localhost", "::1")
_LOG_EVERY = 10.0  # seconds from one line on refused connections to the next
_REVOKED = "the certificate of {!r} was revoked or replaced; ask for a new kit"
_FIRST = 16 << 20  # bytes that a site may send before the coordinator knows the plan
LIMIT = 1 << 32  # bytes that a site takes in one message
_OPTIONS: list[tuple[str, Any]] = [
    ("grpc.max_receive_message_length", PART),
    ("grpc.max_send_message_length", PART),
    ("grpc.max_metadata_size", 4096),
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
    ("grpc.http2.min_recv_ping_interval_without_data_ms", 5_000),
    ("grpc.so_reuseport", 0),
]


def _grpc() -> Any:
    # gRPC logs each handshake that fails: whoever reaches the port could fill the disk.
    os.environ.setdefault("GRPC_VERBOSITY", "ERROR")
    try:
        import grpc
    except ImportError:
        raise ValueError("A federation over a network needs grpcio: pip install 'rookery[federation]'.") from None
    return grpc


def pieces(message: Message) -> list[bytes]:
    """A message as it goes over the wire."""
    return message.parts if isinstance(message, Parts) else cut([message]) if len(message) >= PART else [message]


class Assembly:
    """Pieces become messages again.

    Arguments:
        limit: limit() -> how long a message may be.
    """

    def __init__(self, limit: Callable[[], int]) -> None:
        self._limit, self._length = limit, 0
        self._parts: list[bytes] = []

    def add(self, piece: bytes) -> bytes | None:
        """The message, if this was its last piece; ValueError for what is none, or is too long."""
        self._length += len(piece)
        if self._length > self._limit():
            raise ValueError(f"sends a message of more than the {self._limit()} bytes that it may have")
        if len(piece) == PART:
            self._parts.append(piece)
            return None
        message = b"".join([*self._parts, piece]) if self._parts else piece
        self._parts, self._length = [], 0
        return message


class _Connection:
    """A site's stream, at the coordinator."""

    def __init__(self, site: int, serial: str = "") -> None:
        self.site, self.serial = site, serial  # of its certificate
        self.out: queue.SimpleQueue[Message | None] = queue.SimpleQueue()
        self.unread = 0
        self.why = "has left"
        self.over = self.replaced = False
        self.dismissed = ""  # why it can't take part

    def close(self, why: str = "") -> None:
        if not self.over:
            self.over, self.why = True, why or self.why
            self.out.put(None)

    def give_way(self) -> None:
        """To another connection of the same site."""
        self.replaced = True
        self.close()


class Server:
    """The coordinator's end: see `Transport`.

    Arguments:
        address: "host:port" to listen at.
        sites: their names; none: those that the kit has.
        kit: the folder with the coordinator's certificate.
        insecure: without certificates, at a loopback address alone.
    """

    def __init__(
        self, address: str | None, sites: Sequence[str] = (), kit: str | Path | None = None, insecure: bool = False
    ) -> None:
        grpc = _grpc()
        own = told = None
        if kit is not None:
            told = None if (Path(kit) / "kit.toml").exists() else address  # that of `nvflare provision` has none
            own = load_kit(Path(kit), told, sites)
        if own is None and not insecure:
            raise ValueError(
                "A coordinator needs certificates: give kit=FOLDER, made by `rookery federation init`; or "
                "insecure=True, which listens on this machine alone."
            )
        self._list = None if kit is None or told is not None else Path(kit) / "kit.toml"
        self._listed, self._stamp, self._next_look = own.certificates if own else {}, (0, 0), 0.0
        self._refused, self._logged = 0, -_LOG_EVERY  # connections since the last line, and when that was
        given = address or (own.address if own else "")
        self.names = tuple(sites) or (tuple(own.sites) if own else ())
        check_names(self.names)
        self.limit, self.rejoins = _FIRST, True  # bytes of a reply
        self.garbage = 0
        self._events: queue.SimpleQueue[Event] = queue.SimpleQueue()
        self._lock, self._connections = threading.Lock(), {}  # type: ignore[var-annotated]
        self._secure, self._closed, self._over = not insecure, False, "the run is over"
        self._pool = futures.ThreadPoolExecutor(2 * len(self.names) + 8, thread_name_prefix="rookery-join")
        self._server = grpc.server(self._pool, options=_OPTIONS)
        join = grpc.stream_stream_rpc_method_handler(self._join)
        self._server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(_SERVICE, {_METHOD: join}),))
        self.address = self._bind(grpc, given, own)
        self._server.start()

    def _bind(self, grpc: Any, given: str, own: Kit | None) -> str:
        host, _, _port = given.rpartition(":")
        if own is None and host.strip("[]") not in _LOOPBACK:
            raise ValueError(f"Without certificates a coordinator listens at 127.0.0.1 alone, not at {given!r}.")
        try:
            if own is None:
                bound = self._server.add_insecure_port(given)
            else:
                both = grpc.ssl_server_credentials([(own.key, own.cert)], own.ca, require_client_auth=True)
                bound = self._server.add_secure_port(given, both)
        except RuntimeError:
            bound = 0
        if not bound:
            raise OSError(f"The coordinator can't listen at {given}: the port is in use, or the address is not here.")
        return f"{host}:{bound}"

    def _join(self, requests: Any, context: Any) -> Iterator[bytes]:
        """A site's stream: it ends when this generator does."""
        grpc = _grpc()
        site, serial, why = self._who(context)
        if site is None:
            self._refuse(why)
            context.abort(grpc.StatusCode.PERMISSION_DENIED, why)
        context.send_initial_metadata(())  # it knows that it is connected
        connection = _Connection(site, serial)
        with self._lock:  # so that what happens to a site is told in the order in which it happens
            before = self._connections.get(site)
            self._connections[site] = connection
            if before is not None:  # a reply to what was sent there never comes
                self._events.put(Event(site, "gone", b"has connected anew"))
            self._events.put(Event(site, "here"))
        if before is not None:
            before.give_way()
        left = lambda: self._left(connection)
        if not context.add_callback(left):  # a stream that ends while a piece is on its way asks for no other
            left()
        threading.Thread(target=self._read, args=(connection, requests), daemon=True).start()
        while (message := connection.out.get()) is not None:
            yield from pieces(message)
        left()
        if connection.replaced:
            context.abort(grpc.StatusCode.ALREADY_EXISTS, "another process has joined under this name")
        if connection.dismissed:
            context.abort(grpc.StatusCode.FAILED_PRECONDITION, connection.dismissed)
        if self._closed:  # a site that was not told, for it did not answer
            context.abort(grpc.StatusCode.ABORTED, self._over)

    def _left(self, connection: _Connection) -> None:
        """Its stream has ended."""
        connection.close()
        with self._lock:
            if self._connections.get(connection.site) is connection:
                del self._connections[connection.site]
                self._events.put(Event(connection.site, "gone", connection.why.encode()))

    def _who(self, context: Any) -> tuple[Any, str, str]:
        """The number of the site that connects and its certificate's serial number, or None and why it is refused."""
        if self._closed:
            return None, "", self._over
        told = dict(context.invocation_metadata()).get("site", "")
        serial = ""
        if self._secure:
            proof = context.auth_context()
            names = proof.get("x509_common_name", [])
            name = names[0].decode(errors="replace") if names else ""
            if name != told:
                return None, "", f"the certificate is of {name[:64]!r}, and the site calls itself {str(told)[:64]!r}"
            serial = serial_of(proof["x509_pem_cert"][0])
            self._look_at_the_list()
            if self._listed.get(name, serial) != serial:
                return None, "", _REVOKED.format(name[:64])
        if told not in self.names:
            return None, "", f"{str(told)[:64]!r} is none of this run's sites"
        return self.names.index(told), serial, ""

    def _refuse(self, why: str) -> None:
        """Log a refused connection: one line in ten seconds, however many there are."""
        with self._lock:
            self._refused, now = self._refused + 1, time.monotonic()
            if now - self._logged < _LOG_EVERY:
                return
            count, self._refused, self._logged = self._refused, 0, now
        LOG.warning("Refused %s: %s", "a connection" if count == 1 else f"{count} connections, the last of them", why)

    def _look_at_the_list(self) -> None:
        """Read which certificates are accepted, if that has changed, and end the connections of all others."""
        if self._list is None or time.monotonic() < self._next_look:
            return
        self._next_look = time.monotonic() + 1.0
        try:
            stamp = self._list.stat()
            if (stamp.st_mtime_ns, stamp.st_ino) == self._stamp:
                return
            self._listed, self._stamp = accepted(self._list), (stamp.st_mtime_ns, stamp.st_ino)
        except (OSError, ValueError) as error:
            self._stamp = (0, 0)
            self._refuse(f"{self._list} can't be read, and the list before holds: {printable(error)}")
            return
        with self._lock:
            connections = list(self._connections.values())
        for connection in connections:
            name = self.names[connection.site]
            if self._listed.get(name, connection.serial) != connection.serial:
                connection.dismissed = _REVOKED.format(name)
                connection.close("has lost its connection: its certificate was revoked")

    def _read(self, connection: _Connection, requests: Any) -> None:
        assembly = Assembly(lambda: self.limit)
        try:
            for piece in requests:
                message = assembly.add(piece)
                if message is not None:
                    self._take(connection, message)
        except ValueError as error:
            self.garbage += 1
            LOG.warning("%s %s.", self.names[connection.site], error)
            connection.close(str(error))
        except Exception:  # the stream is broken
            connection.close("has lost its connection")
        connection.close()

    def _take(self, connection: _Connection, message: bytes) -> None:
        with self._lock:
            if self._connections.get(connection.site) is connection:
                connection.unread += 1
                if connection.unread > _UNREAD:
                    raise ValueError("sends messages that nobody has asked for")
                self._events.put(Event(connection.site, "reply", message))

    def send(self, site: int, message: Message) -> None:
        """See `Transport`."""
        with self._lock:
            connection = self._connections.get(site)
            if connection is None:
                self._events.put(Event(site, "gone", b"is not connected"))
            else:
                connection.out.put(message)

    def receive(self, seconds: float) -> Event | None:
        """See `Transport`."""
        self._look_at_the_list()
        try:
            event = self._events.get(timeout=seconds) if seconds > 0 else self._events.get_nowait()
        except queue.Empty:
            return None
        if event.kind == "reply":
            with self._lock:
                connection = self._connections.get(event.site)
                if connection is not None:
                    connection.unread = max(0, connection.unread - 1)
        return event

    def dismiss(self, site: int, why: str) -> None:
        """See `Transport`."""
        with self._lock:
            connection = self._connections.get(site)
        if connection is not None:
            connection.dismissed = printable(why)
            connection.close("was let go")

    def close(self, why: str = "") -> None:
        """Let all sites go."""
        self._over += f": {printable(why).rstrip('.')}" if why else ""
        self._closed = True
        with self._lock:
            connections = list(self._connections.values())
        for connection in connections:
            connection.close("the run is over")
        self._server.stop(grace=1.0).wait()
        self._pool.shutdown(wait=False)


class JoinError(RuntimeError):
    """The coordinator does not take this site."""


def _plain(details: str) -> str:
    """What gRPC says of a connection, without the addresses that it has tried.

    >>> _plain("failed to connect to all addresses; last error: UNKNOWN: ipv4:127.0.0.1:1: Connection refused")
    'Connection refused'
    """
    _, tried, last = details.partition("last error: ")
    return last.rpartition(": ")[2] if tried else details


_ANOTHER_CA = "the coordinator's certificate was not issued by this federation's CA"
_CHECK = "Check that the kit belongs to this federation."
_NOT_FOR = (62, 64)  # OpenSSL's numbers of a certificate for another host, and for another address


def _verdict(kit: Kit, address: str, said: str) -> str:
    """Why TLS fails between this site and the coordinator; "" if something else is wrong.

    Arguments:
        kit: the site's.
        address: the coordinator's.
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
        if error.verify_code in _NOT_FOR:
            return f"the coordinator's certificate is not for {host}. Check the address."
        if "expired" in error.verify_message:
            return "the coordinator's certificate has expired. Ask the coordinator to renew it."
        return f"{_ANOTHER_CA}. {_CHECK}"
    except ssl.SSLError as error:
        if error.reason in ("WRONG_VERSION_NUMBER", "RECORD_LAYER_FAILURE"):
            return "what listens there does not speak TLS. Check the address, and that the coordinator has a kit."
    except OSError:
        return ""
    # The coordinator's certificate is good, and it hangs up at the sight of the site's.
    if "closed" in said.lower() or "reset" in said.lower():
        return f"the coordinator does not accept this site's certificate. {_CHECK}"
    return ""


_PROBE = 5.0  # seconds for a look at the coordinator's certificate
_HOPELESS = 3  # attempts in a row that TLS ends, after which a site that was never connected gives up
_FINAL = ("PERMISSION_DENIED", "UNAUTHENTICATED", "ALREADY_EXISTS", "ABORTED", "FAILED_PRECONDITION")
_AGAIN = (0.1, 0.2, 0.5, 1.0, 2.0, 5.0)  # seconds from one attempt to connect to the next


def join(
    handle: Callable[[bytes], Message],
    done: Callable[[], bool],
    name: str,
    address: str,
    kit: Kit | None,
    tell: Callable[[str], None] = LOG.info,
    limit: int = LIMIT,
    patience: float | None = None,
) -> None:
    """Connect as a site, answer until it is done, and connect again whenever the connection is lost.

    A site that was never connected gives up if its certificate, or the coordinator's, is not accepted.

    Arguments:
        handle, done: of its `Responder`.
        name, address: its own name, and where the coordinator listens.
        kit: its certificates; None: without, on this machine alone.
        tell: tell(text), told what happens.
        limit: how many bytes a request may have.
        patience: the seconds without any connection after which it gives up; None: never.
    """
    grpc = _grpc()
    if kit is None and parse_address(address)[1] not in _LOOPBACK:
        raise ValueError(f"Without certificates a site joins a coordinator on this machine alone, not {address}.")
    attempt, since, said, hopeless, ever = 0, time.monotonic(), "", 0, False
    while not done():
        how: Any = {"target": address, "options": [*_OPTIONS, ("grpc.use_local_subchannel_pool", 1)]}
        if kit is None:
            channel = grpc.insecure_channel(**how)
        else:
            own = grpc.ssl_channel_credentials(kit.ca, kit.key, kit.cert)
            channel = grpc.secure_channel(**how, credentials=own)
        out: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        connected = False
        stream = channel.stream_stream(f"/{_SERVICE}/{_METHOD}")(iter(out.get, None), metadata=(("site", name),))
        try:
            assembly = Assembly(lambda: limit)
            stream.initial_metadata()  # until it is connected, or can't be
            connected = stream.is_active()
            if connected:
                attempt, said, hopeless, ever = 0, "", 0, True
                tell(f"Connected to {address}.")
            for piece in stream:
                message = assembly.add(piece)
                if message is not None:
                    for part in pieces(handle(message)):
                        out.put(part)
                    if done():
                        out.put(None)
            why = "the coordinator has ended the connection"
        except ValueError as error:
            why = f"the coordinator {error}"
        except grpc.RpcError as error:
            why = printable(_plain(str(error.details()))).rstrip(".")
            if error.code().name in _FINAL and not done():
                raise JoinError(f"The coordinator at {address} refuses {name}: {why}.") from None
        finally:
            out.put(None)
            stream.cancel()
            channel.close()
        if done():
            return
        since = time.monotonic() if connected else since
        verdict = "" if kit is None or connected else _verdict(kit, address, why)
        hopeless = hopeless + 1 if verdict else 0
        if hopeless >= _HOPELESS and not ever:
            raise JoinError(f"Cannot connect to {address}: {verdict}")
        if patience is not None and time.monotonic() - since > patience:
            raise JoinError(f"The coordinator at {address} can't be reached: {(verdict or why).rstrip('.')}.")
        why = verdict or f"{why}."
        if why != said:
            tell(f"Cannot connect to {address}: {why} Trying again.")
            said = why
        time.sleep(_AGAIN[min(attempt, len(_AGAIN) - 1)])
        attempt += 1
