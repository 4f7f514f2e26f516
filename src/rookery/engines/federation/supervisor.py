"""Supervise a FLARE job from the process that submits it: follow it, and submit it again if it was lost."""

import json
import re
import shutil
import time
import uuid
from collections.abc import Callable, Mapping
from contextlib import redirect_stdout, suppress
from io import StringIO
from pathlib import Path
from typing import Any, NamedTuple

from rookery.base.printable import printable
from rookery.engines.federation.transports.nvflare import OUTCOME, RESULTS, TOPIC, missing

_TRANSIENT = ("NoConnection", "NoReply", "SessionClosed", "SessionExpired")  # FLARE's exceptions, by name
_LINE = 2000  # characters of a reported line


class JobFailedError(RuntimeError):
    """A job that would fail again: a site refuses it, or it can't be run."""


class _Ended(NamedTuple):
    status: str  # FLARE's, or "silent"
    why: str
    started: bool  # whether a heartbeat was ever heard
    by_us: bool  # whether the supervisor ended it


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
        connect: connect() -> a session with FLARE's server: see `session`.
        job: the job's folder.
        out: the folder for the results.
        again: how often it may be submitted again.
        silence: seconds without a heartbeat after which a running job counts as lost.
        patience: seconds that a connected site may be out of the job before a new job is made.
        poll: seconds between checks of the job.
        tell: tell(text), called with a line about each event.
    """
    report = lambda text: tell(printable(text, _LINE))  # the text has words of the server, and of sites
    watch = _Watch(connect, silence, patience, poll, report)
    try:
        for left in range(again, -1, -1):
            number = watch.submit(Path(job))
            report(f"Job {number} is submitted.")
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
                raise JobFailedError(printable(why, _LINE))
            reason = (ended.by_us and ended.why) or outcome.get("why") or f"FLARE has ended the job ({ended.status})."
            if not left:
                raise JobFailedError(f"{printable(reason, _LINE)} It was submitted {again + 1} times.")
            report(f"{reason} The job is submitted again ({left} more times).")
    finally:
        watch.close()
    raise AssertionError


def _hopeless(ended: _Ended, outcome: dict[str, Any], folder: Path | None) -> str:
    """Return why a job is not submitted again; "" if it may be."""
    if outcome.get("ended") in ("refused", "failed"):
        return str(outcome.get("why"))
    if ended.status == "FINISHED:ABORTED" and not ended.by_us:
        return "The job was aborted by somebody else."
    if not (ended.started or outcome):
        return f"The job did not start ({ended.status}): {ended.why or _last_error(folder)}"
    return ""


class _Watch:
    """A session with FLARE's server, opened again if it breaks."""

    def __init__(
        self, connect: Callable[[], Any], silence: float, patience: float, poll: float, tell: Callable[[str], None]
    ) -> None:
        self._connect, self._silence, self._patience, self._poll, self._tell = connect, silence, patience, poll, tell
        self._session: Any = connect()
        self._round = self._said = -1
        self._hears = True  # whether it may ask for the heartbeat

    def close(self) -> None:
        """Log out."""
        with suppress(Exception), redirect_stdout(StringIO()):
            self._session.close()

    def submit(self, folder: Path) -> str:
        """Submit the job, and return its number."""
        token = uuid.uuid4().hex  # so that a job whose reply was lost is not submitted twice
        return self._do(lambda s: s.submit_job(str(folder.resolve()), submit_token=token))

    def fetch(self, number: str, out: Path) -> Path | None:
        """Download the job's files, and return their folder; None if there are none."""
        place = out / "jobs"
        place.mkdir(parents=True, exist_ok=True)
        try:
            return Path(self._do(lambda s: s.download_job_result(number, str(place))))
        except JobFailedError as error:
            self._tell(f"The results of job {number} can't be fetched: {error}")
            return None

    def follow(self, number: str) -> _Ended:
        """Follow the job until it has ended, or end it because it is lost."""
        self._said = -1
        began = heard = 0.0  # when it was first seen running, and last heard
        started = False
        while True:
            time.sleep(self._poll)
            meta = self._do(lambda s: s.get_job_meta(number))
            status, now = str(meta.get("status")), time.monotonic()
            if status.startswith("FINISHED"):
                return _Ended(status, _deployed(meta), started, False)
            if status != "RUNNING" or not self._hears:
                continue
            began = began or now
            beat = self._beat(number)
            if beat is None:
                if self._hears and now - max(began, heard) > self._silence:
                    self.end(number)
                    return _Ended("silent", f"Nothing was heard of the job for {self._silence:g} s.", started, True)
                continue
            heard, started = now, True
            self._repeat(beat)
            back = self._back(beat)
            if back:
                self.end(number)
                return _Ended("left", f"{', '.join(back)} left the job and is connected again.", started, True)

    def _beat(self, number: str) -> dict[str, Any] | None:
        try:
            with redirect_stdout(StringIO()):
                return self._session.do_app_command(number, TOPIC, {}) or None
        except Exception as error:
            if type(error).__name__ == "AuthorizationError":
                self._hears = False
                self._tell(
                    "The heartbeat can't be read, only the status, because your role lacks FLARE's right app_command."
                )
            return None

    def _repeat(self, beat: dict[str, Any]) -> None:
        for number, text in beat.get("said", ()):
            if number > self._said:
                self._said = number
                self._tell(text)
        if beat.get("round", -1) > self._round:
            self._round = beat["round"]
            self._tell(f"Round {self._round}.")

    def _back(self, beat: dict[str, Any]) -> list[str]:
        """Return the sites that the job has lost and FLARE has: only a new job brings them back."""
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
        """Use the session; if the server can't be reached, try for a while."""
        begin = time.monotonic()
        while True:
            try:
                with redirect_stdout(StringIO()):
                    return what(self._session)
            except Exception as error:
                if type(error).__name__ not in _TRANSIENT:
                    raise JobFailedError(f"FLARE: {printable(error)}") from error
                if time.monotonic() - begin > self._silence:
                    raise ConnectionError(f"FLARE's server can't be reached: {printable(error)}") from error
            time.sleep(self._poll)
            with suppress(Exception):
                session = self._connect()
                self.close()
                self._session = session


def _deployed(meta: Mapping[str, Any]) -> str:
    """Return what went wrong where the job was deployed."""
    detail = [str(line) for line in meta.get("job_deploy_detail") or ()]
    return "; ".join(line for line in detail if not re.search(r":\s*OK\s*$", line))


def _outcome(folder: Path | None) -> dict[str, Any]:
    path = None if folder is None else folder / "workspace" / RESULTS / OUTCOME
    return json.loads(path.read_text(encoding="utf-8")) if path is not None and path.exists() else {}


def _last_error(folder: Path | None) -> str:
    path = None if folder is None else folder / "workspace" / "error_log.txt"
    text = path.read_text(encoding="utf-8", errors="replace") if path is not None and path.exists() else ""
    errors = [line for line in text.splitlines() if " - ERROR - " in line]
    return errors[-1].rpartition(" - ")[2] if errors else "FLARE gives no reason; look at the server's log."


def _results(folder: Path | None, out: Path) -> Path:
    """Copy the results to `out`; the job's other files stay in its folder `jobs`."""
    assert folder is not None
    shutil.copytree(folder / "workspace" / RESULTS, out, dirs_exist_ok=True)
    shutil.rmtree(folder / "workspace" / RESULTS)
    return out


def session(admin: str | Path) -> Any:
    """Open a session with FLARE's server, with the folder of an administrator's kit."""
    admin = Path(admin).resolve()
    path = admin / "startup" / "fed_admin.json"
    if not path.exists():
        raise ValueError(f"{admin} must be a FLARE administrator's kit; it has no {path.relative_to(admin)}.")
    user = json.loads(path.read_text(encoding="utf-8"))["admin"]["username"]
    try:
        from nvflare.fuel.flare_api.flare_api import new_secure_session
    except ModuleNotFoundError as error:
        raise missing() from error
    with redirect_stdout(StringIO()):
        try:
            return new_secure_session(user, str(admin), timeout=30.0)
        except Exception as error:
            raise ConnectionError(
                f"FLARE's server can't be reached as {user}: {type(error).__name__}: {printable(error)}"
            ) from error
