"""The status page of a run: connected sites, rounds and metrics as curves, in a browser while it runs."""

import base64
import errno
import hashlib
import ipaddress
import json
import math
import re
import socket
import socketserver
import threading
import time
from collections import deque
from collections.abc import Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import rookery
from rookery.language.metrics import direction
from rookery.report import plain
from rookery.report.html import fill
from rookery.run.result import Run, is_metric
from rookery.run.trackers import flat

__all__ = ["StatusPage"]

_HERE = Path(__file__).parent
_LOOPBACK = ("localhost", "127.0.0.1", "::1")
_MOST = 1000  # rows that are kept
_BAND = ("_q10", "_q90")  # the quantiles over clients that are drawn around a metric
_EVENTS, _LETTERS = 100, 500
_STATES = ("connected", "gone", "late", "refused")


class StatusPage:
    """A page that shows a run as it goes, served from this process; a tracker, for `callbacks` of `solve`.

    `/` is the page, which refreshes itself, and `/status.json` what it shows. Both can only be read. Anyone who reaches
    the port can read them, so it is open to this machine alone unless another `host` is given.

    Arguments:
        port: to listen at; 0: any that is free. `port` and `url` tell which.
        host: the address to listen at. Requests must name it, or a loopback name; with 0.0.0.0, any address by number
            or this machine's name.

    Example:
        >>> import json, urllib.request
        >>> page = StatusPage(0)
        >>> page.event("b connected")
        >>> page.sites([{"name": "b", "state": "connected", "rounds": 0}])
        >>> page.row({"round": 0, "loss": 2.0})
        >>> shown = json.load(urllib.request.urlopen(page.url + "status.json"))
        >>> [(metric["name"], metric["y"]) for metric in shown["metrics"]]
        [('loss', [2.0])]
        >>> page.close()
    """

    def __init__(self, port: int, host: str = "127.0.0.1") -> None:
        self._lock = threading.Lock()
        self._rows = _Thinned()
        self._events: deque[dict[str, Any]] = deque(maxlen=_EVENTS)
        self._settings: dict[str, Any] = {}
        self._sites: list[dict[str, Any]] = []
        self._progress: dict[str, Any] = {}
        self._state, self._since = "waiting", time.time()
        self._body: bytes | None = None  # the JSON, until something changes
        self._server: _Server | None = _listen(port, host, self.json)
        self.port = int(self._server.server_address[1])
        self.url = f"http://{f'[{host}]' if ':' in host else host}:{self.port}/"
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.1,), name="status page", daemon=True)
        self._thread.start()

    def start(self, settings: dict[str, Any]) -> None:
        """Show a new run's settings, and forget an earlier run except for its events and sites."""
        with self._lock:
            self._settings = plain(flat(settings))
            self._rows = _Thinned()
            self._progress = {"rounds": settings.get("rounds")}
            self._state, self._since, self._body = "running", time.time(), None

    def row(self, row: dict[str, Any]) -> None:
        """A new row of the history."""
        shown = {name: _number(value) for name, value in row.items() if name == "round" or is_metric(name)}
        band = {name: _number(value) for name, value in row.items() if name.endswith(_BAND)}
        counts = {name: row[name] for name in ("exchanges", "bytes_up", "bytes_down", "missing") if name in row}
        with self._lock:
            self._rows.add(shown | band)
            self._progress |= counts | {"rounds_done": row["round"]}
            self._body = None

    def progress(self, rounds_done: int, rounds: int, exchanges: int, bytes_up: int, bytes_down: int) -> None:
        """How far the run is, where that is known before the next row."""
        given = {"rounds_done": rounds_done, "rounds": rounds, "exchanges": exchanges}
        with self._lock:
            self._progress |= {**given, "bytes_up": bytes_up, "bytes_down": bytes_down}
            self._body = None

    def sites(self, sites: Sequence[dict[str, Any]]) -> None:
        """All sites, in place of those told before.

        Each is a dict: `name`, `state` ("connected", "gone", "late" or "refused"), and, where known, `since` (seconds
        since 1970), `rounds`, `missing`, `bytes_up` and `bytes_down`.
        """
        for site in sites:
            if site["state"] not in _STATES:
                raise ValueError(f"A site's state is one of {', '.join(_STATES)}, not {site['state']!r}.")
        with self._lock:
            self._sites, self._body = [plain(site) for site in sites], None

    def event(self, text: str) -> None:
        """A line about what happened; the last hundred are shown, with the time."""
        with self._lock:
            self._events.append({"at": time.time(), "text": text[:_LETTERS]})
            self._body = None

    def end(self, run: Run | None) -> None:
        """The run is over; the page stays until `close`."""
        said = "failed" if run is None else "interrupted" if run.interrupted else "stopped" if run.stopped else "done"
        with self._lock:
            self._state, self._since, self._body = said, time.time(), None
        if run is not None and run.stopped:
            self.event(f"Stopped: {run.stopped}")

    def close(self) -> None:
        """Stop serving, and free the port."""
        server, self._server = self._server, None
        if server is not None:
            server.shutdown()
            server.server_close()
            self._thread.join()

    def json(self) -> bytes:
        """What is shown, as `/status.json` has it."""
        with self._lock:
            if self._body is None:
                shown = {
                    "made": f"Rookery {rookery.__version__}",
                    "state": self._state,
                    "since": self._since,
                    "settings": self._settings,
                    "sites": self._sites,
                    "progress": plain(self._progress),
                    "metrics": _metrics(self._rows.all()),
                    "events": list(self._events),
                }
                self._body = json.dumps(shown, allow_nan=False, separators=(",", ":")).encode()
            return self._body


class _Thinned:
    """Rows, evenly spaced: at most `_MOST` of them, and the last."""

    def __init__(self) -> None:
        self._kept: list[dict[str, Any]] = []
        self._last: list[dict[str, Any]] = []  # if it is not among those
        self._every, self._count = 1, 0

    def add(self, row: dict[str, Any]) -> None:
        keep = self._count % self._every == 0
        self._last = [] if keep else [row]
        self._count += 1
        if keep:
            self._kept.append(row)
        if len(self._kept) > _MOST:
            self._kept, self._every = self._kept[::2], 2 * self._every

    def all(self) -> list[dict[str, Any]]:
        return self._kept + self._last


def _number(value: Any) -> Any:
    """A number as JSON has it, of as many digits as can be seen; None if it is not finite."""
    value = value if isinstance(value, float) else plain(value)
    if isinstance(value, float | bool):
        return float(f"{value:.7g}") if math.isfinite(value) else None
    return value


def _metrics(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The metrics, each with its points."""
    found = []
    for name in dict.fromkeys(name for row in rows for name in row if name != "round" and not name.endswith(_BAND)):
        own = [row for row in rows if isinstance(row.get(name), int | float)]
        low, high = ([row.get(name + end) for row in own] for end in _BAND)
        entry = {
            "name": name,
            "higher": _higher(name),
            "x": [row["round"] for row in own],
            "y": [row[name] for row in own],
        }
        banded = any(value is not None for value in low)
        found.append(entry | ({"low": low, "high": high} if banded else {}))
    return [entry for entry in found if entry["y"]]


def _higher(metric: str) -> bool | None:
    try:
        return direction(metric).higher_is_better
    except ValueError:
        return None


# The server.


def _page() -> tuple[bytes, str]:
    """The page, and a policy that lets it run its own script and styles, and fetch from where it came, alone."""
    files = {"style": "status.css", "script": "status.js"}
    page = fill(_HERE / "page.html", {name: (_HERE / file).read_text("utf-8") for name, file in files.items()})
    inside = {tag: re.findall(f"<{tag}>(.*?)</{tag}>", page, re.DOTALL) for tag in ("style", "script")}
    hashes = {tag: base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() for tag, (text,) in inside.items()}
    policy = "default-src 'none'; connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'"
    own = "".join(f"; {tag}-src 'sha256-{value}'" for tag, value in hashes.items())
    return page.encode(), f"{policy}{own}; frame-ancestors 'none'"


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False
    page, policy = b"", ""
    status: Any = None
    names: frozenset[str] = frozenset()  # what a request may call this host
    numbers = False  # whether any address by number will do

    def __init__(self, address: tuple[str, int], handler: Any) -> None:
        if ":" in address[0]:
            self.address_family = socket.AF_INET6
        super().__init__(address, handler)

    def server_bind(self) -> None:
        socketserver.TCPServer.server_bind(self)  # HTTPServer's looks for the host's full name, which may take long

    def handle_error(self, request: Any, client_address: Any) -> None:
        pass  # a browser that went away

    def is_named(self, host: str) -> bool:
        """Whether a request's Host header is this host's name: a page of another site may point its own name here."""
        found = re.fullmatch(r"(?:\[([0-9a-f:.]+)\]|([^:\[\]/@]+))(?::\d+)?", host.strip().lower())
        name = (found[1] or found[2]) if found else ""
        return name in self.names or (self.numbers and _is_number(name))


def _is_number(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def _listen(port: int, host: str, status: Any) -> _Server:
    if not isinstance(port, int) or not 0 <= port < 65536:
        raise ValueError(f"A status page's port is a number from 0 to 65535, not {port!r}.")
    try:
        server = _Server((host, port), _Handler)
    except OSError as error:
        reasons = {
            errno.EADDRINUSE: "is in use; give another, or 0 for any that is free",
            errno.EACCES: "is not for this user to open; give one above 1023",
        }
        reason = reasons.get(error.errno or 0, f"can't be opened: {error.strerror or error}")
        raise ValueError(f"The status page's port {port} at {host} {reason}.") from error
    server.page, server.policy = _page()
    server.status = status
    server.numbers = host in ("0.0.0.0", "::")
    own = (socket.gethostname(),) if server.numbers else ()
    server.names = frozenset(name.lower() for name in (*_LOOPBACK, host, *own))
    return server


class _Handler(BaseHTTPRequestHandler):
    server: _Server
    timeout = 10  # seconds for a request to arrive
    server_version, sys_version = "Rookery", ""

    def parse_request(self) -> bool:
        """Refuse what is not a GET or HEAD, or is meant for another host."""
        if not super().parse_request():
            return False
        if self.command not in ("GET", "HEAD"):
            self._answer(405, "text/plain", b"This page can only be read.\n", Allow="GET, HEAD")
        elif not self.server.is_named(self.headers.get("Host", "")):
            self._answer(421, "text/plain", b"This is not the host that was asked for.\n")
        else:
            return True
        return False

    def do_GET(self) -> None:
        path = self.path.partition("?")[0]
        if path == "/":
            self._answer(200, "text/html", self.server.page)
        elif path == "/status.json":
            self._answer(200, "application/json", self.server.status())
        else:
            self._answer(404, "text/plain", b"There is only / and /status.json.\n")

    do_HEAD = do_GET

    def _answer(self, code: int, kind: str, body: bytes, **more: str) -> None:
        self.close_connection = True
        self.send_response(code)
        headers = {
            "Content-Type": f"{kind}; charset=utf-8",
            "Content-Length": str(len(body)),
            "Content-Security-Policy": self.server.policy,
            "Cache-Control": "no-store",
            "Cross-Origin-Resource-Policy": "same-origin",
            "Referrer-Policy": "no-referrer",
            "X-Content-Type-Options": "nosniff",
            **more,
        }
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        pass  # the coordinator has its own log
