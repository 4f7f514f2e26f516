"""The coordinator's end of a network of sites over gRPC: each site holds one stream open, with certificates both ways.

A message goes in pieces of 1 MiB, except for the last, which is shorter and may be empty. A piece is plain bytes: no
protobuf.
"""

import logging
import os
import queue
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent import futures
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from rookery.base.printable import printable
from rookery.engines.federation import kits
from rookery.engines.federation.kits import Kit, accepted, check_names, load_kit, serial_of
from rookery.engines.federation.transports import Event
from rookery.engines.federation.transports.incoming import Incoming, Room
from rookery.engines.federation.transports.trust import EXPIRED, note, proof
from rookery.engines.federation.wire import PART, Message, Parts, cut

LOG = logging.getLogger("rookery.network")
LOOPBACK = ("127.0.0.1", "localhost", "::1")
_SERVICE, _JOIN = "rookery.Federation", "Join"
METHOD = f"/{_SERVICE}/{_JOIN}"
_UNREAD = 16  # unread messages of a site, beyond which it sends more than it is asked for
_LOG_EVERY = 10.0  # seconds between lines about refused connections
_REVOKED = "the certificate of {!r} was revoked or replaced; ask for a new kit"
_UNLIMITED = 1 << 62
_NEVER = datetime.max.replace(tzinfo=UTC)
_FIRST = 16 << 20  # bytes that a site may send before the coordinator knows the plan
OPTIONS: list[tuple[str, Any]] = [
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


def import_grpc() -> Any:
    """Return the package grpc; ValueError, with the fix, if it is missing."""
    # gRPC logs each handshake that fails: anyone who reaches the port could fill the disk.
    os.environ.setdefault("GRPC_VERBOSITY", "ERROR")
    try:
        import grpc
    except ImportError:
        raise ValueError(
            "A federation over a network needs grpcio, which is not installed. Run pip install 'rookery[federation]'."
        ) from None
    return grpc


def pieces(message: Message) -> list[bytes]:
    """Cut a message into the pieces that go over the wire."""
    return message.parts if isinstance(message, Parts) else cut([message]) if len(message) >= PART else [message]


class Assembly:
    """Put pieces together into messages.

    Arguments:
        limit: limit() -> how long a message may be.
        room: the memory that it shares with others; None: there is no limit.
    """

    def __init__(self, limit: Callable[[], int], room: Room | None = None) -> None:
        self._limit, self._room, self._length = limit, room or Room(_UNLIMITED), 0
        self._incoming: Incoming | None = None

    def add(self, piece: bytes) -> Message | None:
        """Return the message if this was its last piece; ValueError if it is too long."""
        self._length += len(piece)
        if self._length > self._limit():
            raise ValueError(f"sends a message of more than the {self._limit()} bytes that it may have")
        if self._incoming is None and len(piece) == PART:
            self._incoming = Incoming(self._room)
        if self._incoming is None:
            self._length = 0
            return piece
        self._incoming.add(piece)
        if len(piece) == PART:
            return None
        whole, self._incoming, self._length = self._incoming, None, 0
        return whole


class _Connection:
    """A site's stream, at the coordinator."""

    def __init__(self, site: int, cert: bytes, serial: str, end: datetime) -> None:
        self.site, self.cert, self.serial, self.end = site, cert, serial, end  # the certificate (PEM), and of it
        self.out: queue.SimpleQueue[Message | None] = queue.SimpleQueue()
        self.unread = 0
        self.why = "has left"
        self.over = self.replaced = self.refused = False
        self.dismissed = ""  # why the site can't take part

    def close(self, why: str = "") -> None:
        if not self.over:
            self.over, self.why = True, why or self.why
            self.out.put(None)


class GrpcServer:
    """The coordinator's `Transport`.

    Arguments:
        address: "host:port" to listen at.
        sites: their names; empty: those in the kit.
        kit: the folder with the coordinator's certificate.
        insecure: run without certificates, at a loopback address only.
    """

    def __init__(
        self, address: str | None, sites: Sequence[str] = (), kit: str | Path | None = None, insecure: bool = False
    ) -> None:
        grpc = import_grpc()
        listing = None if kit is None else Path(kit) / "kit.toml"
        if listing is not None and not listing.exists():  # a folder of `nvflare provision`, which has no address
            listing = None
        loaded = None if kit is None else load_kit(Path(kit), address if listing is None else None, sites)
        if loaded is None and not insecure:
            raise ValueError(
                "A coordinator needs certificates; got none. Give kit=FOLDER, made by `rookery federation init`, or "
                "insecure=True, which listens on this machine only."
            )
        self._listing, self._stamp, self._reading, self._ends = listing, (0, 0), threading.Lock(), _NEVER
        self.kit, self._revocations = loaded, None if loaded is None else kits.revocations(loaded)
        self._serials = loaded.certificates if loaded else {}  # see `accepted`
        self._refused, self._logged = 0, -_LOG_EVERY  # connections since the last line about them, and its time
        self.names = tuple(sites) or (tuple(loaded.sites) if loaded else ())
        check_names(self.names)
        self.limit, self.rejoins = _FIRST, True
        self._events: queue.SimpleQueue[tuple[_Connection | None, Event]] = queue.SimpleQueue()
        self._room = Room()
        self._lock = threading.Lock()
        self._connections: dict[int, _Connection] = {}
        self._warned: set[str] = set()
        if loaded is not None:
            self._warn(loaded.name, loaded.cert)
        self._certificates: dict[int, bytes] = {}  # of each site's last connection
        self._secure, self._closed, self._over = not insecure, False, "the run is over"
        self._pool = futures.ThreadPoolExecutor(2 * len(self.names) + 8, thread_name_prefix="rookery-join")
        self._server = grpc.server(self._pool, options=OPTIONS)
        join = grpc.stream_stream_rpc_method_handler(self._join)
        self._server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(_SERVICE, {_JOIN: join}),))
        self.address = self._bind(grpc, address or (loaded.address if loaded else ""), loaded)
        self._server.start()

    def _bind(self, grpc: Any, address: str, kit: Kit | None) -> str:
        host, _, _port = address.rpartition(":")
        if kit is None and host.strip("[]") not in LOOPBACK:
            raise ValueError(f"address must be at 127.0.0.1 without certificates; got {address!r}. Give a kit, too.")
        try:
            if kit is None:
                bound = self._server.add_insecure_port(address)
            else:
                both = grpc.ssl_server_credentials([(kit.key, kit.cert)], kit.ca, require_client_auth=True)
                bound = self._server.add_secure_port(address, both)
        except RuntimeError:
            bound = 0
        if not bound:
            raise OSError(
                f"The coordinator can't listen at {address}: the port is in use, or the address is not this machine's. "
                "Give another address."
            )
        return f"{host}:{bound}"

    def _join(self, requests: Any, context: Any) -> Iterator[bytes]:
        """Serve a site's stream, which ends when this generator does."""
        status = import_grpc().StatusCode
        try:
            connection = self._identify(context)
        except PermissionError as error:
            self._log_refusal(str(error))
            context.abort(status.PERMISSION_DENIED, str(error))
        site = connection.site
        context.send_initial_metadata(())  # tells the site that it is connected
        if self.kit is not None:
            self._introduce(connection, dict(context.invocation_metadata()).get("nonce", ""))
        with self._lock:  # so that a site's events come in the order in which they happen
            before = self._connections.get(site)
            self._connections[site] = connection
            self._certificates[site] = connection.cert
            self._ends = min(self._ends, connection.end)
            if before is not None:  # a reply to what was sent there never comes
                self._events.put((before, Event(site, "gone", b"has connected anew")))
            self._events.put((connection, Event(site, "here")))
        if before is not None:
            before.replaced = True
            before.close()
        why = self._refusal(self.names[site], connection)
        if why:  # since a moment ago
            self._refuse(connection, why)
        leave = lambda: self._leave(connection)
        if not context.add_callback(leave):  # gRPC asks for no piece after the stream has ended
            leave()
        threading.Thread(target=self._read, args=(connection, requests), daemon=True).start()
        while (message := connection.out.get()) is not None:
            yield from pieces(message)
        leave()
        if connection.replaced:
            context.abort(status.ALREADY_EXISTS, "another process has joined under this name")
        if connection.dismissed:
            context.abort(status.FAILED_PRECONDITION, connection.dismissed)
        if self._closed:  # the site did not answer, so it was not told
            context.abort(status.ABORTED, self._over)

    def _leave(self, connection: _Connection) -> None:
        """Note that a stream has ended."""
        connection.close()
        with self._lock:
            if self._connections.get(connection.site) is connection:
                del self._connections[connection.site]
                self._events.put((connection, Event(connection.site, "gone", connection.why.encode())))

    def _identify(self, context: Any) -> _Connection:
        """Return the connecting site's connection; PermissionError if it is refused."""
        if self._closed:
            raise PermissionError(self._over)
        claimed, cert, serial, end = dict(context.invocation_metadata()).get("site", ""), b"", "", _NEVER
        if self._secure:
            from rookery.engines.federation import certificates

            shown = context.auth_context()
            names, cert = shown.get("x509_common_name", []), shown["x509_pem_cert"][0]
            serial, end = serial_of(cert), certificates.end_of(cert)
            name = names[0].decode(errors="replace") if names else ""
            if name != claimed:
                raise PermissionError(
                    f"the certificate belongs to {name[:64]!r}, but the site calls itself {str(claimed)[:64]!r}"
                )
        number = self.names.index(claimed) if claimed in self.names else -1
        connection = _Connection(number, cert, serial, end)
        self._reread()
        why = self._refusal(str(claimed)[:64], connection)
        if why:
            raise PermissionError(why)
        if number < 0:
            raise PermissionError(f"{str(claimed)[:64]!r} is not one of this run's sites")
        return connection

    def _refusal(self, name: str, connection: _Connection) -> str:
        """Return why a site's certificate is not accepted; "" if it is."""
        if self._revocations is None:
            return ""
        serial = connection.serial
        if self._revocations.names(serial) or serial not in self._serials.get(name, serial).split():
            return _REVOKED.format(name)
        return EXPIRED.format(name, connection.end) if datetime.now(UTC) > connection.end else ""

    def _introduce(self, connection: _Connection, nonce: str) -> None:
        """Prove to a site who this is, and send it the list of revoked certificates and its renewed certificate."""
        assert self.kit is not None
        assert self._revocations is not None
        name = self.names[connection.site]
        fields = {"list": self._revocations.pem, **proof(self.kit, name, nonce)}
        connection.out.put(note(**fields, renewed=self._renewed(name)))
        self._warn(name, connection.cert)

    def _warn(self, name: str, cert: bytes) -> None:
        """Warn once that a certificate ends soon."""
        from rookery.engines.federation import certificates

        soon = certificates.ending(cert)
        if soon and name not in self._warned:
            self._warned.add(name)
            LOG.warning("The certificate of %s ends %s. Renew it with `rookery federation renew`.", name, soon)

    def _log_refusal(self, why: str) -> None:
        """Log refused connections: one line in ten seconds, however many there are."""
        with self._lock:
            self._refused, now = self._refused + 1, time.monotonic()
            if now - self._logged < _LOG_EVERY:
                return
            count, self._refused, self._logged = self._refused, 0, now
        LOG.warning("Refused %s: %s", "a connection" if count == 1 else f"{count} connections, the last of them", why)

    def _reread(self) -> None:
        """End connections whose certificates are no longer in force, and tell the other sites what has changed."""
        if self._revocations is None or self.kit is None:
            return
        with self._reading:
            changed = self._reread_files()
            if not changed and datetime.now(UTC) <= self._ends:
                return
            with self._lock:  # a site that joins later looks at what is in force after this
                connections = list(self._connections.values())
            refusals = [self._refusal(self.names[connection.site], connection) for connection in connections]
            self._ends = min((c.end for c, why in zip(connections, refusals, strict=True) if not why), default=_NEVER)
        for connection, why in zip(connections, refusals, strict=True):
            if why:
                self._refuse(connection, why)
            elif changed:
                waiting = self._renewed(self.names[connection.site])
                connection.out.put(note(list=self._revocations.pem, renewed=waiting))

    def _refuse(self, connection: _Connection, why: str) -> None:
        """End a connection, and drop everything that was received over it and not yet taken."""
        connection.dismissed, connection.refused = why, True
        connection.close(f"has lost its connection: {why}")
        self._leave(connection)

    def _renewed(self, name: str) -> bytes:
        """Return the certificate (PEM) that waits for a site; empty if there is none."""
        assert self.kit is not None
        try:
            return kits.renewed(self.kit, name)
        except ValueError as error:
            self._log_refusal(f"the renewed certificate of {name} can't be sent: {printable(error)}")
            return b""

    def _reread_files(self) -> bool:
        """Read the signed list of revoked certificates, and the coordinator's own; return whether one has changed."""
        assert self._revocations is not None
        try:
            changed = self._revocations.refresh()
            if self._listing is None:
                return changed
            stat = self._listing.stat()
            stamp = (stat.st_mtime_ns, stat.st_ino)
            if stamp == self._stamp:
                return changed
            self._serials, self._stamp = accepted(self._listing), stamp
            return True
        except (OSError, ValueError) as error:
            self._stamp = (0, 0)
            self._log_refusal(f"what was in force stays in force, as a list can't be read: {printable(error)}")
            return False

    def _read(self, connection: _Connection, requests: Any) -> None:
        assembly = Assembly(lambda: self.limit, self._room)
        try:
            for piece in requests:
                message = assembly.add(piece)
                if message is not None:
                    self._take(connection, message)
        except ValueError as error:
            LOG.warning("%s %s.", self.names[connection.site], error)
            connection.close(str(error))
        except Exception:  # the stream is broken
            connection.close("has lost its connection")
        connection.close()

    def _take(self, connection: _Connection, message: Message) -> None:
        with self._lock:
            if self._connections.get(connection.site) is connection:
                connection.unread += 1
                if connection.unread > _UNREAD:
                    raise ValueError("sends messages that nobody has asked for")
                self._events.put((connection, Event(connection.site, "reply", message)))

    def send(self, site: int, message: Message) -> None:
        """See `Transport`."""
        self._reread()
        with self._lock:
            connection = self._connections.get(site)
            if connection is None:
                self._events.put((None, Event(site, "gone", b"is not connected")))
            else:
                connection.out.put(message)

    def receive(self, seconds: float) -> Event | None:
        """See `Transport`."""
        try:
            connection, event = self._events.get(timeout=seconds) if seconds > 0 else self._events.get_nowait()
        except queue.Empty:
            self._reread()
            return None
        if event.kind == "reply" and connection is not None:
            self._reread()
            with self._lock:
                connection.unread = max(0, connection.unread - 1)
            if connection.refused:  # "gone" has been put behind it
                return self.receive(0.0)
        return event

    def certificate(self, site: int) -> bytes:
        """Return the certificate (PEM) of a site's last connection; empty if there is none."""
        return self._certificates.get(site, b"")

    def receipt(self, site: int, receipt: str) -> None:
        """Send a site the receipt for the head of its audit log: see `heads`."""
        with self._lock:
            connection = self._connections.get(site)
        if connection is not None:
            connection.out.put(note(receipt=receipt))

    def dismiss(self, site: int, why: str) -> None:
        """See `Transport`."""
        with self._lock:
            connection = self._connections.get(site)
        if connection is not None:
            connection.dismissed = printable(why)
            connection.close("was let go")

    def close(self, why: str = "") -> None:
        """See `Transport`."""
        self._over += f": {printable(why).rstrip('.')}" if why else ""
        self._closed = True
        with self._lock:
            connections = list(self._connections.values())
        for connection in connections:
            connection.close("the run is over")
        self._server.stop(grace=1.0).wait()
        self._pool.shutdown(wait=False)
