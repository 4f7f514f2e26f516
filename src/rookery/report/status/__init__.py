"""The status page of a run: sites, progress and metrics in a browser, while it runs."""

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
from rookery.report import plain
from rookery.report.html import higher_is_better, page
from rookery.run.result import Run, is_metric
from rookery.run.trackers import flat

__all__ = ["StatusPage"]

_HERE = Path(__file__).parent
_LOOPBACK = ("localhost", "127.0.0.1", "::1")
_MOST = 1000  # rows kept
_BAND = ("_q10", "_q90")  # the quantiles over clients drawn around a metric
_EVENTS, _LETTERS = 100, 500
_STATES = ("connected", "gone", "late", "refused")


class StatusPage:
    """A page that shows a run while it runs, served by this process; a tracker for `callbacks` of `solve`.

    `/` is the page, which refreshes itself, `/status.json` its data, and `/health` a summary for programs that watch
    over the process: its code is 200, or 503 if the run has failed. All are read-only. Anyone who reaches the port can
    read them, so it is open only to this machine unless another `host` is given.

    Arguments:
        port: the port to listen on; 0: any free one, see `port` and `url`.
        host: the address to listen on. Requests must name it, or a loopback name; with 0.0.0.0, any address by number
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
        self._moved = self._since  # when the last round was completed
        self._server: _Server | None = _listen(port, host, self)
        self.port = int(self._server.server_address[1])
        self.url = f"http://{f'[{host}]' if ':' in host else host}:{self.port}/"
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.1,), name="status page", daemon=True)
        self._thread.start()

    def start(self, settings: dict[str, Any]) -> None:
        """Begin a run with these settings; of a run before, only the events and the sites stay."""
        with self._lock:
            self._settings = plain(flat(settings))
            self._rows = _Thinned()
            self._progress = {"rounds": settings.get("rounds")}
            self._state, self._since, self._body = "running", time.time(), None
            self._moved = self._since

    def row(self, row: dict[str, Any]) -> None:
        """Add a row of the history."""
        shown = {name: _number(value) for name, value in row.items() if name == "round" or is_metric(name)}
        band = {name: _number(value) for name, value in row.items() if name.endswith(_BAND)}
        counts = {name: row.get(name) for name in ("exchanges", "bytes_up", "bytes_down", "missing", "epsilon")}
        counts = {name: _number(value) for name, value in counts.items() if value is not None}
        with self._lock:
            self._rows.add(shown | band)
            self._advance(counts | {"rounds_done": row["round"]})

    def progress(self, rounds_done: int, rounds: int, exchanges: int, bytes_up: int, bytes_down: int) -> None:
        """Update the progress before the next row."""
        counts = {"rounds_done": rounds_done, "rounds": rounds, "exchanges": exchanges}
        with self._lock:
            self._advance({**counts, "bytes_up": bytes_up, "bytes_down": bytes_down})

    def _advance(self, progress: dict[str, Any]) -> None:
        if progress["rounds_done"] != self._progress.get("rounds_done"):
            self._moved = time.time()
        self._progress |= progress
        self._body = None

    def sites(self, sites: Sequence[dict[str, Any]]) -> None:
        """Replace the list of sites.

        Each is a dict: `name`, `state` ("connected", "gone", "late" or "refused"), and, where known, `since` (seconds
        since 1970), `rounds`, `missing`, `bytes_up`, `bytes_down` and `epsilon` (what it has spent).
        """
        for site in sites:
            if site["state"] not in _STATES:
                raise ValueError(f"A site's state must be one of {', '.join(_STATES)}; got {site['state']!r}.")
        with self._lock:
            self._sites, self._body = [plain(site) for site in sites], None

    def event(self, text: str) -> None:
        """Add an event, shown with the time; the last hundred are kept."""
        with self._lock:
            self._events.append({"at": time.time(), "text": text[:_LETTERS]})
            self._body = None

    def end(self, run: Run | None) -> None:
        """End the run; the page stays until `close`."""
        state = "failed" if run is None else "interrupted" if run.interrupted else "stopped" if run.stopped else "done"
        state = "spent" if state == "done" and run is not None and run.spent else state
        with self._lock:
            self._state, self._since, self._body = state, time.time(), None
        if run is not None and run.stopped:
            self.event(f"Stopped: {run.stopped}")

    def close(self) -> None:
        """Stop serving and free the port."""
        server, self._server = self._server, None
        if server is not None:
            server.shutdown()
            server.server_close()
            self._thread.join()

    def json(self) -> bytes:
        """Return the content of `/status.json`."""
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

    def health(self) -> tuple[bool, bytes]:
        """Return whether the run has not failed, and the content of `/health`."""
        with self._lock:
            shown = {
                "state": self._state,
                "rounds_done": self._progress.get("rounds_done", 0),
                "seconds_since_last_round": round(time.time() - self._moved, 1),
                "sites": {state: sum(site["state"] == state for site in self._sites) for state in _STATES},
            }
            return self._state not in ("failed", "stopped"), json.dumps(plain(shown)).encode()


class _Thinned:
    """Evenly spaced rows, at most `_MOST`, and the last one."""

    def __init__(self) -> None:
        self._kept: list[dict[str, Any]] = []
        self._last: list[dict[str, Any]] = []  # if it is not in `_kept`
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
    """Return a number with as many digits as can be seen; None if it is not finite."""
    value = value if isinstance(value, float) else plain(value)
    if isinstance(value, float | bool):
        return float(f"{value:.7g}") if math.isfinite(value) else None
    return value


def _metrics(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the metrics, each with its points."""
    metrics: list[dict[str, Any]] = []
    for name in dict.fromkeys(name for row in rows for name in row if name != "round" and not name.endswith(_BAND)):
        points = [row for row in rows if isinstance(row.get(name), int | float)]
        low, high = ([row.get(name + end) for row in points] for end in _BAND)
        x, y = [row["round"] for row in points], [row[name] for row in points]
        band = {"low": low, "high": high} if any(value is not None for value in low) else {}
        metrics.append({"name": name, "higher": higher_is_better(name), "x": x, "y": y, **band})
    return [metric for metric in metrics if metric["y"]]


# The server.


def _page() -> tuple[bytes, str]:
    """Return the page, and a policy that allows only its own script and styles, and requests to its own host."""
    text = page(_HERE / "status", {"title": "Rookery: status", "schemes": "light dark"})
    inside = {tag: re.findall(f"<{tag}>(.*?)</{tag}>", text, re.DOTALL) for tag in ("style", "script")}
    hashes = {tag: base64.b64encode(hashlib.sha256(code.encode()).digest()).decode() for tag, (code,) in inside.items()}
    policy = "default-src 'none'; connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'"
    own = "".join(f"; {tag}-src 'sha256-{value}'" for tag, value in hashes.items())
    return text.encode(), f"{policy}{own}; frame-ancestors 'none'"


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False
    page, policy = b"", ""
    shown: Any = None  # the `StatusPage`
    names: frozenset[str] = frozenset()  # names of this host that a request may use
    numbers = False  # whether a request may use any IP address

    def __init__(self, address: tuple[str, int], handler: Any) -> None:
        if ":" in address[0]:
            self.address_family = socket.AF_INET6
        super().__init__(address, handler)

    def server_bind(self) -> None:
        socketserver.TCPServer.server_bind(self)  # HTTPServer's looks up the host's full name, which may take long

    def handle_error(self, request: Any, client_address: Any) -> None:
        pass  # a browser that went away

    def is_named(self, host: str) -> bool:
        """Return whether a Host header names this host: another site may point its own name here (DNS rebinding)."""
        match = re.fullmatch(r"(?:\[([0-9a-f:.]+)\]|([^:\[\]/@]+))(?::\d+)?", host.strip().lower())
        name = (match[1] or match[2]) if match else ""
        return name in self.names or (self.numbers and _is_number(name))


def _is_number(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def _listen(port: int, host: str, shown: StatusPage) -> _Server:
    if not isinstance(port, int) or not 0 <= port < 65536:
        raise ValueError(f"port must be a number from 0 to 65535; got {port!r}.")
    try:
        server = _Server((host, port), _Handler)
    except OSError as error:
        reasons = {
            errno.EADDRINUSE: "is in use. Give another, or 0 for any free one",
            errno.EACCES: "needs more permissions. Give one above 1023",
        }
        reason = reasons.get(error.errno or 0, f"can't be opened: {error.strerror or error}")
        raise ValueError(f"The status page's port {port} at {host} {reason}.") from error
    server.page, server.policy = _page()
    server.shown = shown
    server.numbers = host in ("0.0.0.0", "::")
    own = (socket.gethostname(),) if server.numbers else ()
    server.names = frozenset(name.lower() for name in (*_LOOPBACK, host, *own))
    return server


class _Handler(BaseHTTPRequestHandler):
    server: _Server
    timeout = 10  # seconds for a request to arrive
    server_version, sys_version = "Rookery", ""

    def parse_request(self) -> bool:
        """Refuse requests other than GET and HEAD, and those for another host."""
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
            self._answer(200, "application/json", self.server.shown.json())
        elif path == "/health":
            well, body = self.server.shown.health()
            self._answer(200 if well else 503, "application/json", body)
        else:
            self._answer(404, "text/plain", b"There is only /, /status.json and /health.\n")

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
