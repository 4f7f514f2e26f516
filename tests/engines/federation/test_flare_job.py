"""FLARE without FLARE: the job's folder, calls as a transport, a site's gate, and what the supervisor decides."""

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pandas as pd
import pytest
from typer.testing import CliRunner

from rookery import cli, report
from rookery.cli import flare
from rookery.engines.federation import supervisor, wire
from rookery.engines.federation.supervisor import JobFailedError, supervise
from rookery.engines.federation.transports import Event, nvflare
from rookery.engines.federation.transports.nvflare import Calls, Gate, write_job

CONFIG = {"task": "study.tasks:task", "algorithm": "FedNest", "set": ["upper_step=0.1"], "rounds": 3, "cohort": None}
SITES = ["site-1", "site-2", "site-3"]


# The job.


def test_a_job_names_classes_and_has_no_code(tmp_path: Path) -> None:
    folder = write_job(tmp_path / "job", CONFIG, SITES)
    files = sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())
    assert files == ["app/config/config_fed_client.json", "app/config/config_fed_server.json", "meta.json"]
    meta, server, client = (json.loads((folder / name).read_text()) for name in (files[2], files[1], files[0]))
    assert meta["deploy_map"] == {"app": ["server", *SITES]}
    assert meta["min_clients"] == 3
    (component,) = server["components"]
    assert component["path"] == "rookery.engines.federation.transports.nvflare.FlareServer"
    assert client["components"][0]["path"] == "rookery.engines.federation.transports.nvflare.FlareSite"
    assert client["components"][0]["args"] == {}  # a site takes nothing from the job
    assert nvflare._unpacked(component["args"]["config"]) == CONFIG | {"sites": SITES}


def test_a_configuration_has_no_braces_which_flare_would_read(tmp_path: Path) -> None:
    config = {"task": "a{b}:c", "set": ["{$HOME}"]}
    folder = write_job(tmp_path / "job", config, SITES, minimum=2)
    text = json.loads((folder / "app/config/config_fed_server.json").read_text())["components"][0]["args"]["config"]
    assert not set(text) & set("{}")
    assert nvflare._unpacked(text) == config | {"sites": SITES}
    assert json.loads((folder / "meta.json").read_text())["min_clients"] == 2


@pytest.mark.parametrize(
    ("config", "sites", "more", "message"),
    [
        ({"set": {"a": 1}}, SITES, {}, "The job's set must be a number, a text or a list of these; got {'a': 1}"),
        ({}, ["a", "a"], {}, "must name each site once"),
        ({}, [], {}, "must name each site once"),
        ({}, SITES, {"minimum": 4}, "minimum must be between 0 and the number of sites, 3; got 4"),
        ({"rounds": float("nan")}, SITES, {}, "not JSON compliant"),
    ],
)
def test_what_is_no_job_is_refused(tmp_path: Path, config: Any, sites: Any, more: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message.replace("{", r"\{")):
        write_job(tmp_path / "job", config, sites, **more)
    assert not (tmp_path / "job").exists()


def test_a_job_is_not_written_over(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"must be written to a new folder; .* exists"):
        write_job(tmp_path, CONFIG, SITES)


def test_without_flare_it_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("nvflare", "nvflare.collab", "nvflare.fuel.flare_api.flare_api"):
        monkeypatch.setitem(sys.modules, name, None)
    (tmp_path / "startup").mkdir()
    (tmp_path / "startup" / "fed_admin.json").write_text('{"admin": {"username": "a@b"}}')
    for need in (lambda: nvflare._published.__wrapped__(), lambda: supervisor.session(tmp_path)):
        with pytest.raises(ModuleNotFoundError, match=r"pip install 'rookery\[nvflare\]'"):
            need()


def test_a_folder_that_is_no_kit_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"must be a FLARE administrator's kit; it has no startup/fed_admin\.json"):
        supervisor.session(tmp_path)


# Calls as a transport.


class RunAborted(Exception):
    """Has the name of FLARE's."""


class Proxy:
    """A site as FLARE shows it."""

    def __init__(self, answer: Callable[[bytes], Any]) -> None:
        self._answer = answer

    def __call__(self, timeout: float) -> "Proxy":
        return self

    def ask(self, message: bytes) -> Any:
        return self._answer(message)


def failing(message: bytes) -> bytes:
    raise TimeoutError("function ask timed out")


def aborted(message: bytes) -> bytes:
    raise RunAborted("aborted")


def drained(calls: Calls) -> list[Event]:
    events = []
    while (event := calls.receive(0.0)) is not None:
        events.append(event)
    return events


def test_replies_come_as_events() -> None:
    calls = Calls(["a", "b"], {name: Proxy(lambda message: message + b"!") for name in "ab"}, 1.0)
    assert [event.kind for event in drained(calls)] == ["here", "here"]
    calls.send(1, b"hello")
    assert calls.receive(5.0) == Event(1, "reply", b"hello!")
    assert calls.receive(0.01) is None
    assert calls.heartbeat()["replies"] == 1


def test_a_site_that_is_not_in_the_job_is_gone() -> None:
    calls = Calls(["a", "b"], {"b": Proxy(bytes)}, 1.0)
    assert [event[:2] for event in drained(calls)] == [(0, "gone"), (1, "here")]
    calls.send(0, b"hello")
    assert [event[:2] for event in drained(calls)] == [(0, "gone")]
    assert set(calls.heartbeat()["gone"]) == {"a"}


@pytest.mark.parametrize("answer", [failing, lambda message: "text"], ids=["timeout", "type"])
def test_a_site_that_fails_is_gone_until_a_probe_finds_it(monkeypatch: pytest.MonkeyPatch, answer: Any) -> None:
    monkeypatch.setattr(nvflare, "PROBE_EVERY", 0.01)
    well = False
    probed = []

    def site(message: bytes) -> Any:
        if not message:
            probed.append(message)
        return answer(message) if not well else message

    calls = Calls(["a"], {"a": Proxy(site)}, 1.0)
    drained(calls)
    calls.send(0, b"hello")
    event = calls.receive(5.0)
    assert event is not None
    assert event[:2] == (0, "gone")
    calls.send(0, b"hello")  # nobody is called
    assert [event[:2] for event in drained(calls)] == [(0, "gone")]
    well = True
    assert calls.receive(5.0) == Event(0, "here")
    assert probed
    calls.send(0, b"hello")
    assert calls.receive(5.0) == Event(0, "reply", b"hello")
    calls.close()


def test_when_flare_ends_the_job_receiving_says_so() -> None:
    calls = Calls(["a", "b"], {"a": Proxy(aborted), "b": Proxy(bytes)}, 1.0)
    drained(calls)
    calls.send(0, b"hello")
    with pytest.raises(ConnectionAbortedError):
        calls.receive(5.0)


# A site's gate.


def answered(reply: bytes) -> dict[str, Any]:
    return wire.decode(reply)[0]


REQUEST = wire.encode({"number": 7}, [])


def test_the_server_alone_may_ask() -> None:
    gate = Gate(SimpleNamespace(handle=lambda message: b"reply"))
    assert gate.ask(REQUEST, "server") == b"reply"
    assert gate.ask(b"", "server") == b""  # a probe
    told = answered(gate.ask(REQUEST, "site-2"))
    assert (told["answer"], told["number"]) == ("refused", 7)
    assert answered(gate.ask(b"garbage", "site-2"))["answer"] == "refused"


def test_no_exception_leaves_a_site() -> None:
    def handle(message: bytes) -> bytes:
        raise KeyError("patient 17")

    reply = Gate(SimpleNamespace(handle=handle)).ask(REQUEST, "server")
    assert answered(reply)["answer"] == "refused"
    assert b"patient" not in reply


@pytest.mark.parametrize("text", ['module = "nowhere.py"', "module = ", ""], ids=["missing", "broken", "empty"])
def test_a_site_whose_settings_can_not_be_used_refuses(tmp_path: Path, text: str) -> None:
    (tmp_path / "local").mkdir()
    (tmp_path / "local" / "rookery.toml").write_text(text)
    workspace = SimpleNamespace(get_site_config_dir=lambda: str(tmp_path / "local"), get_root_dir=lambda: str(tmp_path))
    told = answered(Gate.open(workspace, "site-1").ask(REQUEST, "server"))
    assert (told["answer"], told["number"]) == ("refused", 7)
    assert "its log says why" in told["why"]
    assert str(tmp_path) not in told["why"]


# The server's part.


def refusing(message: bytes) -> bytes:
    return wire.encode({"answer": "refused", "number": 7, "why": "another plan."}, [])


def asks(config: dict[str, Any], calls: Calls, out: Path, own: Any) -> None:
    calls.send(0, REQUEST)
    if [calls.receive(5.0), calls.receive(5.0)][1][1:] != ("reply", REQUEST):  # type: ignore[index]
        raise RuntimeError("site-1 did not do it")


def breaks(config: dict[str, Any], calls: Calls, out: Path, own: Any) -> None:
    raise ValueError("There is no task 'x'.")


@pytest.mark.parametrize(
    ("program", "site", "ended", "why"),
    [
        (asks, bytes, "done", ""),
        (asks, refusing, "refused", "site-1 refuses: another plan."),
        (asks, failing, "lost", "site-1 did not do it"),
        (asks, aborted, "lost", "FLARE ended the job"),
        (breaks, bytes, "failed", "There is no task"),
    ],
    ids=["done", "refused", "lost", "aborted", "failed"],
)
def test_how_a_run_ended_is_written_down(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, program: Any, site: Any, ended: str, why: str
) -> None:
    monkeypatch.setattr(nvflare, "PROGRAM", f"{__name__}:{program.__name__}")
    calls = Calls(["site-1"], {"site-1": Proxy(site)}, 1.0)
    nvflare.serve({}, calls, tmp_path / "out", nvflare.Settings(tmp_path, {}))
    outcome = json.loads((tmp_path / "out" / "outcome.json").read_text())
    assert outcome["ended"] == ended
    assert why in outcome["why"]


# What the supervisor decides.


class AuthorizationError(Exception):
    """Has the name of FLARE's."""


class InvalidTarget(Exception):
    """Has the name of FLARE's."""


class NoConnection(Exception):
    """Has the name of FLARE's."""


class Script:
    """A session that follows a script: for each job, how it is seen from poll to poll, and what it leaves behind."""

    def __init__(self, tmp_path: Path, *jobs: dict[str, Any]) -> None:
        self._folder, self._jobs = tmp_path, [{**job, "seen": list(job["seen"])} for job in jobs]
        self.submitted = self.aborted = self.opened = 0
        self._ended = ""

    def __call__(self) -> "Script":
        self.opened += 1
        return self

    def close(self) -> None:
        pass

    @property
    def _job(self) -> dict[str, Any]:
        return self._jobs[self.submitted - 1]

    def submit_job(self, folder: str, submit_token: str) -> str:
        self.submitted += 1
        self._ended = ""
        return f"job-{self.submitted}"

    def get_job_meta(self, number: str) -> dict[str, Any]:
        seen = self._job["seen"]
        now = self._ended or (seen.pop(0) if len(seen) > 1 else seen[0])
        if isinstance(now, BaseException):
            raise now
        return {"status": now, "job_deploy_detail": self._job.get("deployed", ["server: OK", "site-1: OK"])}

    def do_app_command(self, number: str, topic: str, data: Any) -> dict[str, Any]:
        beat = self._job.get("beat", {"round": 1, "gone": {}})
        if isinstance(beat, Exception):
            raise beat
        return beat

    def get_connected_client_list(self) -> list[Any]:
        return [SimpleNamespace(name=name) for name in self._job.get("connected", SITES)]

    def abort_job(self, number: str) -> None:
        self.aborted += 1
        self._ended = "FINISHED:ABORTED"

    def download_job_result(self, number: str, destination: str) -> str:
        workspace = Path(destination) / number / "workspace"
        workspace.mkdir(parents=True)
        if "log" in self._job:
            (workspace / "error_log.txt").write_text(self._job["log"])
        if "left" in self._job:
            (workspace / "rookery").mkdir()
            nvflare.note(workspace / "rookery", *self._job["left"])
            (workspace / "rookery" / "history.csv").write_text(number)
        return str(workspace.parent)


RUNNING, DONE, BROKEN = "RUNNING", "FINISHED:COMPLETED", "FINISHED:EXECUTION_EXCEPTION"
GOOD = {"seen": ["SUBMITTED", RUNNING, DONE], "left": ("done",)}
LOST = {"seen": [RUNNING, BROKEN], "left": ("lost", "FLARE ended the job.")}


def supervised(script: Script, tmp_path: Path, **settings: Any) -> tuple[Path, list[str]]:
    told: list[str] = []
    settings = {"poll": 0.001, "silence": 0.05, "tell": told.append} | settings
    return supervise(script, tmp_path / "job", tmp_path / "out", **settings), told


def test_results_of_a_job_that_ends_well_are_fetched(tmp_path: Path) -> None:
    beat = {"round": 1, "gone": {}, "said": [[0, "site-2 is gone."], [1, "site-2 is back."]]}
    script = Script(tmp_path, {**GOOD, "seen": [RUNNING, RUNNING, DONE], "beat": beat})
    out, told = supervised(script, tmp_path)
    assert (out / "history.csv").read_text() == "job-1"
    assert told == ["Job job-1 is submitted.", "site-2 is gone.", "site-2 is back.", "Round 1."]


def test_ctrl_c_ends_the_job(tmp_path: Path) -> None:
    script = Script(tmp_path, {"seen": [RUNNING, KeyboardInterrupt()]})
    with pytest.raises(KeyboardInterrupt):
        supervised(script, tmp_path)
    assert script.aborted == 1


def test_a_job_that_lost_a_site_is_submitted_again(tmp_path: Path) -> None:
    script = Script(tmp_path, LOST, {"seen": [RUNNING, BROKEN]}, GOOD)  # the second one left nothing, but was heard
    out, told = supervised(script, tmp_path)
    assert (out / "history.csv").read_text() == "job-3"
    assert script.submitted == 3
    assert any("submitted again" in text for text in told)


def test_it_is_not_submitted_for_ever(tmp_path: Path) -> None:
    script = Script(tmp_path, LOST, LOST, LOST)
    with pytest.raises(JobFailedError, match=r"FLARE ended the job. It was submitted 2 times"):
        supervised(script, tmp_path, again=1)
    assert script.submitted == 2


@pytest.mark.parametrize(
    ("job", "message"),
    [
        (
            {"seen": [RUNNING, DONE], "left": ("refused", "site-2 refuses: another plan.")},
            "site-2 refuses: another plan.",
        ),
        ({"seen": [RUNNING, DONE], "left": ("failed", "There is no task 'x'.")}, "There is no task"),
        ({"seen": [RUNNING, DONE], "left": ("failed", "no\x1b[2J\nJob 7.")}, r"no\\x1b\[2J\\nJob 7."),
        ({"seen": [RUNNING, "FINISHED:ABORTED"], "left": ("lost", "")}, "aborted by somebody else"),
        (
            {"seen": ["SUBMITTED", BROKEN], "deployed": ["server: OK", "site-1: BYOC not permitted"]},
            r"did not start \(FINISHED:EXECUTION_EXCEPTION\): site-1: BYOC not permitted",
        ),
        ({"seen": [BROKEN], "log": "now - X - ERROR - [a - b] - a class is not allowed\n"}, "a class is not allowed"),
        ({"seen": [BROKEN]}, "gives no reason"),
    ],
    ids=["refused", "failed", "forged", "aborted", "not deployed", "not started", "no reason"],
)
def test_a_job_that_is_hopeless_is_not_submitted_again(tmp_path: Path, job: Any, message: str) -> None:
    script = Script(tmp_path, job)
    with pytest.raises(JobFailedError, match=message):
        supervised(script, tmp_path, again=5)
    assert script.submitted == 1


def test_a_job_that_is_not_heard_any_more_counts_as_lost(tmp_path: Path) -> None:
    silent = {"seen": [RUNNING], "beat": TimeoutError(), "left": ("lost", "")}  # its status stays as it is for ever
    script = Script(tmp_path, silent, GOOD)
    _, told = supervised(script, tmp_path)
    assert (script.submitted, script.aborted) == (2, 1)
    assert any("Nothing was heard" in text for text in told)


def test_a_site_that_left_the_job_and_is_connected_needs_a_new_job(tmp_path: Path) -> None:
    beat = {"round": 4, "gone": {"site-2": 70.0, "site-3": 5.0}}
    away = {"seen": [RUNNING] * 3 + [DONE], "beat": beat, "connected": ["site-1", "site-3"], "left": ("done",)}
    script = Script(tmp_path, away)
    supervised(script, tmp_path)
    assert script.submitted == 1  # it is really away: the others go on
    script = Script(tmp_path, {**LOST, "seen": [RUNNING], "beat": beat}, GOOD)
    _, told = supervised(script, tmp_path / "again")
    assert (script.submitted, script.aborted) == (2, 1)
    assert any("site-2 left the job and is connected again" in text for text in told)


def test_without_the_right_to_ask_the_status_must_do(tmp_path: Path) -> None:
    script = Script(tmp_path, {"seen": [RUNNING] * 100 + [DONE], "beat": AuthorizationError(), "left": ("done",)})
    begin = time.monotonic()
    _, told = supervised(script, tmp_path)
    assert time.monotonic() - begin > 0.05
    assert sum("app_command" in text for text in told) == 1


def test_a_broken_session_is_opened_again(tmp_path: Path) -> None:
    script = Script(tmp_path, {"seen": [NoConnection(), RUNNING, DONE], "left": ("done",)})
    supervised(script, tmp_path)
    assert (script.opened, script.submitted) == (2, 1)
    script = Script(tmp_path, {"seen": [InvalidTarget("no such job\x1b[2J")]})
    with pytest.raises(JobFailedError, match=r"^FLARE: no such job\\x1b\[2J$"):
        supervised(script, tmp_path / "other")
    script = Script(tmp_path, {"seen": [NoConnection()]})
    with pytest.raises(ConnectionError, match="can't be reached"):
        supervised(script, tmp_path / "again")


# The command.


def invoked(*words: str) -> Any:
    return CliRunner().invoke(cli.app, ["flare", "submit", *words])


def test_the_command_refuses_in_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "nvflare.fuel.flare_api.flare_api", None)
    (tmp_path / "startup").mkdir()
    (tmp_path / "startup" / "fed_admin.json").write_text('{"admin": {"username": "a@b"}}')
    kit, out = ["--admin", str(tmp_path)], ["--out", str(tmp_path / "out")]
    for words, message in {
        ("a.b:task", *kit, *out): "NVIDIA FLARE is not installed here",
        ("a.b:task", "--admin", str(tmp_path / "none"), *out): "must be a FLARE administrator's kit",
        ("a.b:task", *kit, *out, "--run", "../x"): "--run must be at most 100 letters, digits",
        ("a.b:task", *kit, *out, "--noise", "1"): "Give --clip, too",
        ("a.b:task", *kit, *out, "--oldest", "1"): "--oldest needs --asynchronous",
        ("hospital.py:task", *kit, *out): "The task of a job must be in a module",
        ("a.b:task", *kit): "Missing option '--out'",
    }.items():
        done = invoked(*words)
        assert done.exit_code == 2, done.output
        assert message in done.output
        assert len(done.output.splitlines()) == 1
    assert not (tmp_path / "out").exists()


def test_no_escape_sequence_of_the_server_reaches_the_terminal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Names of sites, what fails, and the results that were fetched."""
    nasty = "\x1b[2J\u202e"
    script = Script(tmp_path, {"seen": [RUNNING], "connected": [nasty]})
    script.submitted = 1
    monkeypatch.setattr(supervisor, "session", lambda admin: script)
    words = ("a.b:task", "--admin", str(tmp_path), "--out", str(tmp_path / "out"))
    for error in (JobFailedError(nasty), ConnectionError(nasty), ValueError(nasty)):
        monkeypatch.setattr(supervisor, "supervise", Mock(side_effect=error))
        shown = invoked(*words).output
        assert shown.count("\\x1b[2J\\u202e") == 2
        assert "\x1b" not in shown
    monkeypatch.setattr(supervisor, "supervise", Mock())
    history = pd.DataFrame({"round": [0, 1], nasty: [1.0, 2.0]})
    monkeypatch.setattr(
        report, "read_run", lambda out: ({"algorithm": nasty, "task": nasty, "stopped": nasty}, history)
    )
    shown = invoked(*words).output
    assert shown.count("\\x1b[2J") == 5
    assert "\x1b" not in shown


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"task": "/etc/evil.py:task"}, "must be in a module"),
        ({"algorithm": "evil.py:FedX"}, "must be in a module"),
        ({"task": "other.tasks:task"}, "must be one that the server's rookery.toml lists; got other.tasks:task"),
        ({"task": "os:system", "set": ["command=touch FILE"], "sites": ["a"]}, "must be one that"),
    ],
)
@pytest.mark.parametrize("listed", [{"tasks": ["study.tasks:task"]}, {}])
def test_a_job_names_nothing_but_what_the_server_allows(
    tmp_path: Path, options: Any, message: str, listed: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    own = nvflare.Settings(tmp_path, listed)
    asked = {"task": "study.tasks:task", "algorithm": "FedNest", "run": "a", **options}
    with pytest.raises(ValueError, match=message):
        flare.coordinate(asked, Calls([], {}, 1.0), tmp_path, own)
    assert not list(tmp_path.iterdir())
