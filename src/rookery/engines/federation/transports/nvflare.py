"""NVIDIA FLARE as the network: a job that names classes of this package, which the server and the sites have installed.

`write_job` writes the job, `supervisor` follows it, and FLARE makes `FlareServer` and `FlareSite` in its processes.
"""

import itertools
import json
import logging
import pkgutil
import queue
import threading
import time
import tomllib
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from rookery.base.printable import failure, printable
from rookery.engines.federation import wire
from rookery.engines.federation.transports import Event

SETTINGS = "rookery.toml"  # the file of the server and of each site, in its folder `local`
RESULTS = "rookery"  # the folder of a run's results, within the job's
OUTCOME = "outcome.json"  # the file in it that says how the run ended
PROBE_EVERY, PROBE_FOR = 5.0, 5.0  # seconds
# Functions of a package above this one: the server's program, and how a site makes its responder from its settings.
PROGRAM = "rookery.cli.flare:coordinate"
RESPONDER = "rookery.cli.flare:responder"
TOPIC = "rookery"  # of the heartbeat
_SHORT = 65_536  # the most bytes of a refusal
_LOG = logging.getLogger(__name__)


def missing() -> ModuleNotFoundError:
    """Return the error for a machine without FLARE."""
    return ModuleNotFoundError("NVIDIA FLARE is not installed here. Run pip install 'rookery[nvflare]'.")


# The job.


def write_job(
    folder: str | Path, config: Mapping[str, Any], sites: Sequence[str], *, name: str = "rookery", minimum: int = 0
) -> Path:
    """Write a FLARE job that contains no code.

    Arguments:
        folder: the job's folder; it must not exist.
        config: the coordinator's options as JSON values: see `FlareServer`.
        sites: the sites' names as FLARE knows them; a site's number in the run is its place here.
        name: the job's name.
        minimum: the fewest sites to start with; 0: all of them.
    """
    folder = Path(folder)
    sites = [str(site) for site in sites]
    if len(set(sites)) < len(sites) or not sites:
        raise ValueError(f"sites must name each site once; got {sites}.")
    if not 0 <= minimum <= len(sites):
        raise ValueError(f"minimum must be between 0 and the number of sites, {len(sites)}; got {minimum}.")
    if folder.exists():
        raise ValueError(f"The job must be written to a new folder; {folder} exists. Name another.")
    runtime = "nvflare.collab.runtime"
    controller = {"path": f"{runtime}.controller.CollabController", "args": {"server_obj_id": "_server"}}
    executor = {"path": f"{runtime}.executor.CollabExecutor", "args": {"client_obj_id": "_client"}}
    arguments = {"config": _packed({**config, "sites": sites})}
    files = {
        "meta.json": {
            "name": name,
            "min_clients": minimum or len(sites),
            "resource_spec": {},
            "deploy_map": {"app": ["server", *sites]},
        },
        "app/config/config_fed_server.json": {
            "format_version": 2,
            "workflows": [{"id": "controller", **controller}],
            "components": [{"id": "_server", "path": f"{__name__}.FlareServer", "args": arguments}],
        },
        "app/config/config_fed_client.json": {
            "format_version": 2,
            "executors": [{"tasks": ["*"], "executor": executor}],
            "components": [{"id": "_client", "path": f"{__name__}.FlareSite", "args": {}}],
        },
    }
    (folder / "app" / "config").mkdir(parents=True)
    for path, content in files.items():
        (folder / path).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    return folder


def _packed(config: Mapping[str, Any]) -> str:
    """Return the configuration as JSON without braces, which FLARE would take for its variables."""
    for name, value in config.items():
        values = value if isinstance(value, list) else [value]
        if not all(v is None or isinstance(v, bool | int | float | str) for v in values):
            raise ValueError(f"The job's {name} must be a number, a text or a list of these; got {value!r}.")
    text = json.dumps(list(config.items()), allow_nan=False)
    return text.replace("{", "\\u007b").replace("}", "\\u007d")


def _unpacked(text: str) -> dict[str, Any]:
    return dict(json.loads(text))


# The network, seen from the server's job process.


class Calls:
    """A `Transport` of calls to FLARE's proxies of the sites.

    FLARE does not report that a site is lost: a call to it runs into its time limit. From then on the site counts as
    gone, and is probed now and then.

    Arguments:
        names: the sites of the run.
        proxies: the proxies of the sites in the job, by name: proxy(timeout=seconds).ask(message=bytes) -> bytes.
        timeout: seconds for a call.
    """

    secure_sums = False  # its sites have no certificates of ours

    def __init__(self, names: Sequence[str], proxies: Mapping[str, Any], timeout: float) -> None:
        self.names, self.limit, self.rejoins = tuple(names), 0, False  # FLARE has a limit of its own
        self._proxies, self._timeout = dict(proxies), timeout
        self._events: queue.SimpleQueue[Event | None] = queue.SimpleQueue()
        self._gone: dict[int, float] = {}  # and since when
        self._lock, self._closed, self._aborted = threading.Lock(), threading.Event(), threading.Event()
        self.replies, self.round = 0, -1
        self.refused: dict[str, str] = {}  # the reasons, by name
        self._numbers, self._lines = itertools.count(), deque[list[Any]](maxlen=20)  # a number and a text each
        for site, name in enumerate(self.names):
            if name in self._proxies:
                self._events.put(Event(site, "here"))
            else:
                self._gone[site] = time.monotonic()
                self._events.put(_gone(site))

    def send(self, site: int, message: wire.Message) -> None:
        """See `Transport.send`."""
        if site in self._gone:
            self._events.put(_gone(site))
        else:
            self._start(self._call, site, bytes(message))

    def receive(self, seconds: float) -> Event | None:
        """See `Transport.receive`; ConnectionAbortedError once FLARE has ended the job."""
        try:
            event = self._events.get(timeout=seconds)
        except queue.Empty:
            event = None
        if self._aborted.is_set():
            raise ConnectionAbortedError("FLARE has ended the job.")
        return event

    def dismiss(self, site: int, why: str) -> None:
        """Nothing to do: a job's sites stay the same."""

    def close(self, why: str = "") -> None:
        """See `Transport.close`."""
        self._closed.set()

    def heartbeat(self) -> dict[str, Any]:
        """Return what a supervisor learns: the round, the sites that are gone and for how long, and the last lines."""
        now = time.monotonic()
        gone = {self.names[site]: now - since for site, since in list(self._gone.items())}
        return {"round": self.round, "replies": self.replies, "gone": gone, "said": list(self._lines)}

    def say(self, text: str) -> None:
        """Log a line, and pass it to the supervisor."""
        _LOG.warning("%s", text)
        self._lines.append([next(self._numbers), text])

    def follow(self, links: Any) -> None:
        """Note the round."""
        self.round = links.rounds

    def _start(self, target: Callable[..., None], *args: Any) -> None:
        threading.Thread(target=target, args=args, daemon=True, name="rookery-call").start()

    def _call(self, site: int, message: bytes) -> None:
        try:
            reply = self._ask(site, message, self._timeout)
        except Exception as error:
            if not self._closed.is_set() and not self._is_abort(error):
                _LOG.warning("%s does not answer: %s", self.names[site], printable(error))
                self._lose(site)
            return
        self.replies += 1
        self._note_refusal(site, reply)
        self._events.put(Event(site, "reply", reply))

    def _note_refusal(self, site: int, reply: bytes) -> None:
        if len(reply) > _SHORT:
            return
        with suppress(wire.WireError):
            header, _ = wire.decode(reply)
            if header.get("answer") == "refused":
                self.refused[self.names[site]] = printable(header.get("why"))

    def _ask(self, site: int, message: bytes, timeout: float) -> bytes:
        reply = self._proxies[self.names[site]](timeout=timeout).ask(message=message)
        if not isinstance(reply, bytes):
            raise TypeError(f"a reply of type {type(reply).__name__}")
        return reply

    def _is_abort(self, error: Exception) -> bool:
        if type(error).__name__ != "RunAborted":
            return False
        self._aborted.set()
        self._events.put(None)  # wakes `receive`
        return True

    def _lose(self, site: int) -> None:
        with self._lock:
            first = site not in self._gone
            self._gone.setdefault(site, time.monotonic())
        self._events.put(_gone(site))
        if first:
            self._start(self._probe, site)

    def _probe(self, site: int) -> None:
        while not self._closed.wait(PROBE_EVERY):
            try:
                self._ask(site, b"", PROBE_FOR)
            except Exception as error:
                if self._is_abort(error):
                    return
                continue
            with self._lock:
                del self._gone[site]
            self._events.put(Event(site, "here"))
            return


def _gone(site: int) -> Event:
    return Event(site, "gone", b"is not in the job any more, or does not answer")


# What FLARE makes in its processes.


class Settings(NamedTuple):
    """A participant's settings, which no job can change: the file `local/rookery.toml` in its folder."""

    root: Path  # the participant's folder
    values: dict[str, Any]

    @classmethod
    def read(cls, workspace: Any) -> "Settings":
        """Read the settings in a FLARE workspace; they are empty if there is no file."""
        path, root = Path(workspace.get_site_config_dir()) / SETTINGS, Path(workspace.get_root_dir())
        return cls(root, tomllib.loads(path.read_text(encoding="utf-8")) if path.exists() else {})

    def folder(self, name: str, default: str) -> Path:
        """Return the folder with this name in the settings, or the default; both are relative to the participant's."""
        return self.root / str(self.values.get(name, default))

    def paths(self, name: str) -> list[str]:
        """Return a list of files or folders, relative to the participant's folder."""
        return [str(self.root / path) for path in self.values.get(name, [])]


def __getattr__(name: str) -> Any:
    """Return `FlareServer` or `FlareSite`, which need FLARE's decorators."""
    if name in ("FlareServer", "FlareSite"):
        return _published()[name]
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


@cache
def _published() -> dict[str, type]:
    try:
        from nvflare.collab import collab
    except ModuleNotFoundError as error:
        raise missing() from error

    class FlareServer:
        """The coordinator, in the job's process at FLARE's server.

        Arguments:
            config: the `config` of `write_job`, packed.
        """

        def __init__(self, config: str) -> None:
            self.config = config

        @collab.main
        def run(self) -> None:
            """Solve, and write the results to the job's folder."""
            config, workspace = _unpacked(self.config), collab.workspace
            calls = Calls(config["sites"], {proxy.name: proxy for proxy in collab.clients}, config["deadline"])
            context = collab.fl_ctx
            context.get_engine().register_app_command(TOPIC, lambda topic, data, context: calls.heartbeat())
            out = Path(workspace.get_run_dir(context.get_job_id())) / RESULTS
            serve(config, calls, out, Settings.read(workspace))

    class FlareSite:
        """A site, in the job's process at the site."""

        def __init__(self) -> None:
            self._gate: Gate | None = None

        @collab.init
        def open(self) -> None:
            """Make the responder from the site's settings."""
            self._gate = Gate.open(collab.workspace, collab.site_name)

        @collab.publish
        def ask(self, message: bytes) -> bytes:
            """Answer a request. Nothing else can be called."""
            assert self._gate is not None
            return self._gate.ask(message, collab.caller)

        @collab.final
        def close(self) -> None:
            """Finish writing."""
            if self._gate is not None:
                self._gate.close()

    return {"FlareServer": FlareServer, "FlareSite": FlareSite}


def serve(config: dict[str, Any], calls: Calls, out: Path, settings: Settings) -> None:
    """Run the coordinator, and write down how it ended."""
    out.mkdir()
    note(out, "lost", "The job's process was lost.")  # stays if the process is killed
    try:
        pkgutil.resolve_name(PROGRAM)(config, calls, out, settings)
        note(out, "done")
    except ConnectionAbortedError:
        note(out, "lost", "FLARE ended the job: a site's process was lost, or somebody aborted it.")
    except Exception as error:
        _LOG.error("The run failed.\n%s", failure())
        text = str(error) or type(error).__name__
        if calls.refused:
            text = " ".join(f"{name} refuses: {why.rstrip('.')}." for name, why in calls.refused.items())
        note(out, "refused" if calls.refused else "lost" if calls.heartbeat()["gone"] else "failed", text)
    finally:
        calls.close()


def note(out: Path, ended: str, why: str = "") -> None:
    """Write down how the run ended: "done", "refused", "failed" or "lost"."""
    text = json.dumps({"ended": ended, "why": why})
    new = out / f"{OUTCOME}.new"
    new.write_text(text, encoding="utf-8")
    new.replace(out / OUTCOME)  # the process may be killed at any time


class Gate:
    """Passes FLARE's calls to a site's responder: only the server may ask, and no exception gets out.

    FLARE sends the text and the traceback of an exception to the caller, and loses the reply if one is raised before
    the first call. So the site answers with a refusal, and the text stays in its log.
    """

    def __init__(self, responder: Any, refusal: str = "") -> None:
        self._responder, self._refusal, self._lock = responder, refusal, threading.Lock()

    @classmethod
    def open(cls, workspace: Any, name: str) -> "Gate":
        """Return the gate to the responder that the site's settings describe."""
        try:
            return cls(pkgutil.resolve_name(RESPONDER)(Settings.read(workspace), name))
        except (Exception, SystemExit):
            _LOG.exception("%s can't be used; the job is refused", SETTINGS)
            return cls(None, f"its {SETTINGS}, or what that names, can't be used; its log says why.")

    def ask(self, message: bytes, caller: str) -> bytes:
        """Return the responder's reply; a probe, which is empty, gets an empty reply."""
        if caller != "server":
            return _refused(message, "only the server may ask; another participant did.")
        if not message:
            return b""
        if self._responder is None:
            return _refused(message, self._refusal)
        try:
            with self._lock:
                return bytes(self._responder.handle(message))
        except Exception:
            _LOG.error("A request failed.\n%s", failure())
            return _refused(message, "a request failed there; its log says why.")

    def close(self) -> None:
        """Finish writing."""
        if hasattr(self._responder, "close"):
            self._responder.close()


def _refused(message: bytes, why: str) -> bytes:
    try:
        number = wire.decode(message)[0].get("number")
    except wire.WireError:
        number = None
    return wire.encode({"answer": "refused", "number": number, "why": why}, [])
