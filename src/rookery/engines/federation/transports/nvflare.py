"""NVIDIA FLARE as the network: a job that names classes of this package, which server and sites have installed.

`write_job` writes it and `supervise` runs it; `Server` and `Site` are what FLARE makes of it in its own processes.
"""

import json
import logging
import pkgutil
import queue
import re
import shutil
import threading
import time
import tomllib
from collections.abc import Callable, Mapping, Sequence
from contextlib import redirect_stdout, suppress
from functools import cache
from io import StringIO
from pathlib import Path
from typing import Any, NamedTuple

from rookery.engines.federation import wire
from rookery.engines.federation.transports import Event

SETTINGS = "rookery.toml"  # of the server and of each site, in its folder `local`
RESULTS = "rookery"  # the folder of a run's results, within the job's
OUTCOME = "outcome.json"  # how it ended, in there
PROBE_EVERY, PROBE_FOR = 5.0, 5.0  # seconds
PROGRAM = "rookery.cli.flare:coordinate"  # what the server does with a job's options: a layer above this one
_TOPIC = "rookery"  # of the heartbeat
_SHORT = 65_536  # bytes that a refusal has at most
_LOG = logging.getLogger(__name__)


def _collab() -> Any:
    try:
        from nvflare.collab import collab
    except ModuleNotFoundError as error:
        raise _missing() from error
    return collab


def _missing() -> ModuleNotFoundError:
    return ModuleNotFoundError("NVIDIA FLARE is not installed here: pip install 'rookery[nvflare]'.")


# The job.


def write_job(
    folder: str | Path, config: Mapping[str, Any], sites: Sequence[str], *, name: str = "rookery", minimum: int = 0
) -> Path:
    """Write a FLARE job that has no code in it.

    Arguments:
        folder: where to; it must not exist.
        config: the coordinator's options, values of JSON: see `Server`.
        sites: the sites' names as FLARE knows them; a site's number in the run is its place here.
        name: the job's.
        minimum: the fewest sites to start with; 0: all of them.
    """
    folder = Path(folder)
    sites = [str(site) for site in sites]
    if len(set(sites)) < len(sites) or not sites:
        raise ValueError(f"sites={sites}: give each site's name once.")
    if not 0 <= minimum <= len(sites):
        raise ValueError(f"minimum={minimum} is not between 0 and the number of sites, {len(sites)}.")
    if folder.exists():
        raise ValueError(f"{folder} exists; name a new folder for the job.")
    text = _packed({**config, "sites": sites})
    meta = {
        "name": name,
        "min_clients": minimum or len(sites),
        "resource_spec": {},
        "deploy_map": {"app": ["server", *sites]},
    }
    own, runtime = __name__, "nvflare.collab.runtime"
    controller = {
        "id": "controller",
        "path": f"{runtime}.controller.CollabController",
        "args": {"server_obj_id": "_server"},
    }
    executor = {"path": f"{runtime}.executor.CollabExecutor", "args": {"client_obj_id": "_client"}}
    server = {
        "format_version": 2,
        "workflows": [controller],
        "components": [{"id": "_server", "path": f"{own}.Server", "args": {"config": text}}],
    }
    client = {
        "format_version": 2,
        "executors": [{"tasks": ["*"], "executor": executor}],
        "components": [{"id": "_client", "path": f"{own}.Site", "args": {}}],
    }
    place = folder / "app" / "config"
    place.mkdir(parents=True)
    files = {folder / "meta.json": meta}
    files |= {place / "config_fed_server.json": server, place / "config_fed_client.json": client}
    for path, content in files.items():
        path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    return folder


def _packed(config: Mapping[str, Any]) -> str:
    """The configuration as JSON without braces: FLARE takes what stands in them for names of its variables."""
    for name, value in config.items():
        each = value if isinstance(value, list) else [value]
        if not all(v is None or isinstance(v, bool | int | float | str) for v in each):
            raise ValueError(f"The job's {name}={value!r} is not a number, a text or a list of them.")
    text = json.dumps(list(config.items()), allow_nan=False)
    return text.replace("{", "\\u007b").replace("}", "\\u007d")


def _unpacked(text: str) -> dict[str, Any]:
    return dict(json.loads(text))


# The network, seen from the server's job process.


class Calls:
    """A `Transport` of calls to FLARE's proxies of the sites.

    FLARE does not say that a site is lost: a call to it takes its whole time limit. From then on the site is gone, and
    is probed now and then beside the run.

    Arguments:
        names: the sites of the run.
        proxies: those of them that are in the job: proxy(timeout=seconds).ask(message=bytes) -> bytes.
        timeout: seconds for a call.
    """

    def __init__(self, names: Sequence[str], proxies: Mapping[str, Any], timeout: float) -> None:
        self.names = tuple(names)
        self._proxies, self._timeout = dict(proxies), timeout
        self._events: queue.SimpleQueue[Event | None] = queue.SimpleQueue()
        self._gone: dict[int, float] = {}  # since when
        self._lock, self._closed, self._aborted = threading.Lock(), threading.Event(), threading.Event()
        self.replies, self.round, self.heard = 0, -1, time.monotonic()
        self.refused: dict[str, str] = {}  # why, by name
        for site, name in enumerate(self.names):
            if name in self._proxies:
                self._events.put(Event(site, "here"))
            else:
                self._gone[site] = time.monotonic()
                self._events.put(_gone(site))

    def send(self, site: int, message: bytes) -> None:
        """See `Transport.send`."""
        if site in self._gone:
            self._events.put(_gone(site))
        else:
            self._start(self._call, site, message)

    def receive(self, seconds: float) -> Event | None:
        """See `Transport.receive`; ConnectionAbortedError once FLARE has ended the job."""
        try:
            event = self._events.get(timeout=seconds)
        except queue.Empty:
            event = None
        if self._aborted.is_set():
            raise ConnectionAbortedError("FLARE has ended the job.")
        return event

    def close(self) -> None:
        """See `Transport.close`."""
        self._closed.set()

    def told(self) -> dict[str, Any]:
        """What a supervisor is told: how many replies there were, how long ago, and who is gone for how long."""
        now = time.monotonic()
        gone = {self.names[site]: now - since for site, since in list(self._gone.items())}
        return {"round": self.round, "replies": self.replies, "silent": now - self.heard, "gone": gone}

    def _start(self, target: Callable[..., None], *args: Any) -> None:
        threading.Thread(target=target, args=args, daemon=True, name="rookery-call").start()

    def _call(self, site: int, message: bytes) -> None:
        try:
            reply = self._ask(site, message, self._timeout)
        except Exception as error:
            if not self._closed.is_set() and not self._is_abort(error):
                _LOG.warning("%s does not answer: %s", self.names[site], error)
                self._lose(site)
            return
        self.replies, self.heard = self.replies + 1, time.monotonic()
        self._note_refusal(site, reply)
        self._events.put(Event(site, "reply", reply))

    def _note_refusal(self, site: int, reply: bytes) -> None:
        if len(reply) > _SHORT:
            return
        with suppress(wire.WireError):
            header, _ = wire.decode(reply)
            if header.get("answer") == "refused":
                self.refused[self.names[site]] = str(header.get("why"))

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


class Own(NamedTuple):
    """A participant's own settings, which no job can change: what is in `local/rookery.toml` of its folder."""

    root: Path  # the participant's folder
    said: dict[str, Any]

    @classmethod
    def read(cls, workspace: Any) -> "Own":
        """Those of a FLARE workspace; the defaults where there is no file."""
        path, root = Path(workspace.get_site_config_dir()) / SETTINGS, Path(workspace.get_root_dir())
        return cls(root, tomllib.loads(path.read_text(encoding="utf-8")) if path.exists() else {})

    def folder(self, name: str) -> Path:
        """The folder of this name: as it is said, or within the participant's."""
        return self.root / str(self.said.get(name, Path("rookery") / name))

    def texts(self, name: str) -> list[str]:
        """A list of names of files or folders; of those within the participant's, in whole."""
        return [str(self.root / each) for each in self.said.get(name, [])]


def __getattr__(name: str) -> Any:
    """`Server` and `Site`, which need FLARE's decorators."""
    if name in ("Server", "Site"):
        return _published()[name]
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


@cache
def _published() -> dict[str, type]:
    collab = _collab()

    class Server:
        """The coordinator, in the job's process at FLARE's server.

        Arguments:
            config: JSON, what `write_job` was given.
        """

        def __init__(self, config: str) -> None:
            self.config = config

        @collab.main
        def run(self) -> None:
            """Solve, and write results to the job's folder."""
            config, workspace = _unpacked(self.config), collab.workspace
            calls = Calls(config["sites"], {proxy.name: proxy for proxy in collab.clients}, config["deadline"])
            context = collab.fl_ctx
            context.get_engine().register_app_command(_TOPIC, lambda topic, data, context: calls.told())
            serve(config, calls, Path(workspace.get_run_dir(context.get_job_id())) / RESULTS, Own.read(workspace))

    class Site:
        """A site, in the job's process at the site."""

        def __init__(self) -> None:
            self._door: Door | None = None

        @collab.init
        def open(self) -> None:
            """Make the host from the site's own settings."""
            self._door = Door.open(collab.workspace, collab.site_name)

        @collab.publish
        def ask(self, message: bytes) -> bytes:
            """The one thing that can be called."""
            assert self._door is not None
            return self._door.ask(message, collab.caller)

        @collab.final
        def close(self) -> None:
            """Finish what is being written."""
            if self._door is not None:
                self._door.close()

    return {"Server": Server, "Site": Site}


def serve(config: dict[str, Any], calls: Calls, out: Path, own: Own) -> None:
    """Run the coordinator, and write down how it ended."""
    out.mkdir()
    note(out, "lost", "The job's process was lost.")  # unless it comes to say something else
    try:
        pkgutil.resolve_name(PROGRAM)(config, calls, out, own)
        note(out, "done")
    except ConnectionAbortedError:
        note(out, "lost", "FLARE ended the job: a site's process was lost, or somebody aborted it.")
    except Exception as error:
        _LOG.exception("the run failed")
        text = str(error) or type(error).__name__
        if calls.refused:
            text = "; ".join(f"{name} refuses: {why}" for name, why in calls.refused.items())
        note(out, "refused" if calls.refused else "lost" if calls.told()["gone"] else "failed", text)
    finally:
        calls.close()


def note(out: Path, ended: str, why: str = "") -> None:
    """Write down how the run has ended: "done", "refused", "failed" or "lost"."""
    text = json.dumps({"ended": ended, "why": why})
    new = out / f"{OUTCOME}.new"
    new.write_text(text, encoding="utf-8")
    new.replace(out / OUTCOME)  # the process may be killed at any time


class Door:
    """What stands between FLARE's calls and a site's host: the server alone may ask, and no exception gets out.

    FLARE sends the text of an exception and its traceback to the caller, and loses the reply to a call that ends in one
    before the first call: so what goes wrong is answered, and its text stays in the site's log.
    """

    def __init__(self, host: Any, refusal: str = "") -> None:
        self._host, self._refusal, self._lock = host, refusal, threading.Lock()

    @classmethod
    def open(cls, workspace: Any, name: str) -> "Door":
        """For the host that the site's own settings ask for."""
        try:
            return cls(_host(Own.read(workspace), name))
        except (Exception, SystemExit):
            _LOG.exception("%s can't be used; the job is refused", SETTINGS)
            return cls(None, f"its {SETTINGS}, or what that names, can't be used; its log says why.")

    def ask(self, message: bytes, caller: str) -> bytes:
        """The host's reply; a probe, which is empty, is answered at once."""
        if caller != "server":
            return _refused(message, "the server alone may ask.")
        if not message:
            return b""
        if self._host is None:
            return _refused(message, self._refusal)
        try:
            with self._lock:
                return self._host.handle(message)
        except Exception:
            _LOG.exception("a request failed")
            return _refused(message, "a request failed there; its log says why.")

    def close(self) -> None:
        """Finish what is being written."""
        if hasattr(self._host, "close"):
            self._host.close()


def _refused(message: bytes, why: str) -> bytes:
    try:
        number = wire.decode(message)[0].get("number")
    except wire.WireError:
        number = None
    return wire.encode({"answer": "refused", "number": number, "why": why}, [])


def _host(own: Own, name: str) -> Any:
    raise NotImplementedError


# The supervisor, in the submitting process.


class JobFailedError(RuntimeError):
    """A job that is not worth submitting again: a site refuses it, or it can't be run."""


class _Ended(NamedTuple):
    status: str  # FLARE's, or "silent"
    why: str
    started: bool  # whether our part of it was ever heard
    ours: bool  # whether the supervisor ended it


def supervise(
    connect: Callable[[], Any],
    job: str | Path,
    out: str | Path,
    *,
    again: int = 3,
    silence: float = 120.0,
    patience: float = 60.0,
    poll: float = 2.0,
    tell: Callable[[str], None] = lambda text: None,
) -> Path:
    """Submit a job, follow it, and fetch its results; submit it again if FLARE ended it because a site was lost.

    The run then goes on from its checkpoint at the server.

    Arguments:
        connect: gives a session with FLARE's server: see `session`.
        job: the job's folder.
        out: where results go to.
        again: how often it may be submitted again.
        silence: after so many seconds without a sign of life a running job counts as lost.
        patience: a site that is connected and has left the job is waited for so many seconds before a new job is made.
        poll: seconds from one look at the job to the next.
        tell: told what happens.
    """
    watch = _Watch(connect, silence, patience, poll, tell)
    try:
        for left in range(again, -1, -1):
            number = watch.submit(Path(job))
            tell(f"Job {number} is submitted.")
            try:
                ended = watch.follow(number)
            except KeyboardInterrupt:
                watch.end(number)
                raise
            folder = watch.fetch(number, Path(out))
            outcome = _outcome(folder)
            if outcome.get("ended") == "done":
                return _results(folder, Path(out))
            why = _hopeless(ended, outcome, folder)
            if why:
                raise JobFailedError(why)
            reason = (ended.ours and ended.why) or outcome.get("why") or f"FLARE has ended the job ({ended.status})."
            if not left:
                raise JobFailedError(f"{reason} It was submitted {again + 1} times.")
            tell(f"{reason} The job is submitted again ({left} more times).")
    finally:
        watch.close()
    raise AssertionError


def _hopeless(ended: _Ended, outcome: dict[str, Any], folder: Path | None) -> str:
    """Why a job need not be submitted again; "" if it may be."""
    if outcome.get("ended") in ("refused", "failed"):
        return str(outcome.get("why"))
    if ended.status == "FINISHED:ABORTED" and not ended.ours:
        return "The job was aborted, by somebody else."
    if not (ended.started or outcome):
        return f"The job did not start ({ended.status}): {ended.why or _last_error(folder)}"
    return ""


class _Watch:
    """One supervisor's session with FLARE's server, opened again if it breaks."""

    def __init__(
        self, connect: Callable[[], Any], silence: float, patience: float, poll: float, tell: Callable[[str], None]
    ) -> None:
        self._connect, self._silence, self._patience, self._poll, self._tell = connect, silence, patience, poll, tell
        self._session: Any = connect()
        self._round = -1
        self._hears = True  # whether it may ask for the heartbeat

    def close(self) -> None:
        """Log out."""
        with suppress(Exception), redirect_stdout(StringIO()):
            self._session.close()

    def submit(self, folder: Path) -> str:
        """The job's number."""
        return self._do(lambda s: s.submit_job(str(folder.resolve())))

    def fetch(self, number: str, out: Path) -> Path | None:
        """The folder of what the job left behind; None if there is nothing."""
        place = out / "jobs"
        place.mkdir(parents=True, exist_ok=True)
        try:
            return Path(self._do(lambda s: s.download_job_result(number, str(place))))
        except ConnectionError:
            raise
        except Exception as error:
            self._tell(f"The results of job {number} can't be fetched: {error}")
            return None

    def follow(self, number: str) -> _Ended:
        """Until it has ended, or is ended because it is lost."""
        began = heard = 0.0  # when it was first seen running, and last heard
        started = False
        while True:
            time.sleep(self._poll)
            meta = self._do(lambda s: s.get_job_meta(number))
            status, now = str(meta.get("status")), time.monotonic()
            if status.startswith("FINISHED"):
                return _Ended(status, _deployed(meta), started, False)
            if status != "RUNNING":
                continue
            if not self._hears:
                continue
            began = began or now
            beat = self._beat(number)
            if beat is None:
                if self._hears and now - max(began, heard) > self._silence:
                    self.end(number)
                    return _Ended("silent", f"Nothing was heard of the job for {self._silence:g} s.", started, True)
                continue
            heard, started = now, True
            self._say_round(beat)
            back = self._back(beat)
            if back:
                self.end(number)
                return _Ended("left", f"{', '.join(back)} left the job and is connected again.", started, True)

    def _beat(self, number: str) -> dict[str, Any] | None:
        try:
            with redirect_stdout(StringIO()):
                return self._session.do_app_command(number, _TOPIC, {}) or None
        except Exception as error:
            if type(error).__name__ == "AuthorizationError":
                self._hears = False
                self._tell("There is no heartbeat: your role has not FLARE's right app_command. The status must do.")
            return None

    def _say_round(self, beat: dict[str, Any]) -> None:
        if beat.get("round", -1) > self._round:
            self._round = beat["round"]
            self._tell(f"Round {self._round}.")

    def _back(self, beat: dict[str, Any]) -> list[str]:
        """Sites that the job has lost and that FLARE has: only a new job brings them back."""
        gone = [name for name, seconds in beat.get("gone", {}).items() if seconds > self._patience]
        if not gone:
            return []
        connected = {client.name for client in self._do(lambda s: s.get_connected_client_list())}
        return sorted(connected & set(gone))

    def end(self, number: str) -> None:
        """Abort the job, and wait until that is done."""
        with suppress(Exception):
            self._do(lambda s: s.abort_job(number))
            end = time.monotonic() + 60
            while time.monotonic() < end:
                if str(self._do(lambda s: s.get_job_meta(number)).get("status")).startswith("FINISHED"):
                    break
                time.sleep(self._poll)

    def _do(self, what: Callable[[Any], Any]) -> Any:
        """Do something with the session; if the server can't be reached, try for a while."""
        begin = time.monotonic()
        while True:
            try:
                with redirect_stdout(StringIO()):
                    return what(self._session)
            except Exception as error:
                if type(error).__name__ not in _BROKEN:
                    raise
                if time.monotonic() - begin > self._silence:
                    raise ConnectionError(f"FLARE's server can't be reached: {error}") from error
            time.sleep(self._poll)
            with suppress(Exception):
                session = self._connect()
                self.close()
                self._session = session


_BROKEN = ("NoConnection", "NoReply", "SessionClosed", "SessionExpired")


def _deployed(meta: Mapping[str, Any]) -> str:
    """What went wrong where the job was deployed."""
    detail = [str(line) for line in meta.get("job_deploy_detail") or ()]
    return "; ".join(line for line in detail if not re.search(r":\s*OK\s*$", line))


def _outcome(folder: Path | None) -> dict[str, Any]:
    path = None if folder is None else folder / "workspace" / RESULTS / OUTCOME
    return json.loads(path.read_text(encoding="utf-8")) if path is not None and path.exists() else {}


def _last_error(folder: Path | None) -> str:
    path = None if folder is None else folder / "workspace" / "error_log.txt"
    lines = (
        path.read_text(encoding="utf-8", errors="replace").splitlines() if path is not None and path.exists() else []
    )
    told = [line for line in lines if " - ERROR - " in line]
    return told[-1].rpartition(" - ")[2] if told else "FLARE gives no reason; look at the server's log."


def _results(folder: Path | None, out: Path) -> Path:
    assert folder is not None
    shutil.copytree(folder / "workspace" / RESULTS, out, dirs_exist_ok=True)
    return out


def session(admin: str | Path) -> Any:
    """A session with FLARE's server, by the folder of an administrator's kit."""
    admin = Path(admin).resolve()
    path = admin / "startup" / "fed_admin.json"
    if not path.exists():
        raise ValueError(f"{admin} is no administrator's kit of FLARE: there is no {path}.")
    user = json.loads(path.read_text(encoding="utf-8"))["admin"]["username"]
    try:
        from nvflare.fuel.flare_api.flare_api import new_secure_session
    except ModuleNotFoundError as error:
        raise _missing() from error
    with redirect_stdout(StringIO()):
        try:
            return new_secure_session(user, str(admin), timeout=30.0)
        except Exception as error:
            raise ConnectionError(
                f"FLARE's server can't be reached as {user}: {type(error).__name__}: {error}"
            ) from error
