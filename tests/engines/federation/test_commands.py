"""`rookery serve` and `rookery site`: what a newcomer does wrong is told in one line, and leaves nobody waiting."""

import json
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.engines.federation.studies import responders, without_data
from typer.testing import CliRunner

import rookery as rk
from rookery import cli
from rookery.cli.flare import responder
from rookery.engines.engine import Job
from rookery.engines.federation import policy
from rookery.engines.federation.provision import make_kits
from rookery.engines.federation.responder import Responder
from rookery.engines.federation.transports import grpc
from rookery.engines.federation.transports.memory import Memory
from rookery.engines.federation.transports.nvflare import Settings
from rookery.report.status import StatusPage

STUDY = """
import jax.numpy as jnp, numpy as np, rookery as rk
from rookery.tasks import Task

def helper():
    pass

def task(clients=2):
    loss = lambda x, rows: jnp.mean((x - rows) ** 2)
    metrics = lambda x, y: {"loss": x**2}
    data = rk.Clients.like(upper=np.float32(0), n=clients)
    return Task("study", rk.SingleLevel(loss), data, np.float32(0), metrics, "loss", rounds=2, every=1)

def data():
    return {"upper": np.ones(3, np.float32)}
"""


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a study, and kits of two sites."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "study.py").write_text(STUDY)
    make_kits(tmp_path / "kits", "localhost", ["north", "south"])
    return tmp_path


def said(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(cli.app, list(arguments))
    assert "Traceback" not in result.output
    assert isinstance(result.exception, SystemExit | None)
    return result.exit_code, result.output.splitlines()[-1]


SERVE = ("serve", "study.py:task", "--algorithm", "FedAvg")


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (SERVE, "A coordinator needs certificates; got no kit. Give --kit FOLDER"),
        ((*SERVE, "--insecure"), "needs the sites' names; got none. Give --sites a,b,c"),
        ((*SERVE, "--insecure", "--sites", "a,b", "--asynchronous", "3"), "buffer must be at most the 2 clients that"),
        ((*SERVE, "--insecure", "--sites", "a,b", "--oldest", "3"), "--oldest needs --asynchronous"),
        ((*SERVE, "--kit", "kits/north"), "--kit must be the coordinator's; kits/north is that of the site north"),
        ((*SERVE, "--kit", "kits/coordinator", "--sites", "north,soth"), "no site 'soth'; did you mean south"),
        ((*SERVE, "--kit", "kits/nowhere"), "A kit must be a folder; there is none at kits/nowhere"),
        (("serve", "study.py", "--kit", "kits/coordinator"), "e.g. study.py:task"),
        (("site", "--module", "study.py"), "A site needs certificates"),
        (
            ("site", "--module", "study.py", "--kit", "kits/north", "--name", "south"),
            "--name must be that of the kit, north; got south",
        ),
        (
            ("site", "--module", "study.py", "--kit", "kits/coordinator"),
            "--kit must be a site's; kits/coordinator is the coordinator's",
        ),
        (("site", "--module", "studi.py", "--kit", "kits/north"), "There is no file"),
    ],
)
def test_refused_in_one_line(here: Path, words: tuple[str, ...], line: str) -> None:
    code, last = said(*words)
    assert (code, line in last) == (2, True), last
    assert not (here / "runs").exists()


@pytest.mark.parametrize(
    ("change", "line"),
    [
        (("return {", "return 1, {"), "; got a tuple."),
        (('"upper": np', '"uper": np'), "data must have keys among lower, upper, test, center, replace; got 'uper'"),
        (("def data", "def dta"), "must define data()"),
        (("np.ones(3", "np.load('none.npy'"), "FileNotFoundError"),
    ],
)
def test_a_site_whose_file_is_wrong_does_not_connect(here: Path, change: tuple[str, str], line: str) -> None:
    (here / "study.py").write_text(STUDY.replace(*change))
    code, last = said("site", "--module", "study.py", "--kit", "kits/north")
    assert (code, line in last) == (2, True), last


def test_sites_that_do_not_come_are_named(here: Path) -> None:
    code, last = said(*SERVE, "--insecure", "--sites", "a,b", "--address", "127.0.0.1:0", "--patience", "0")
    assert (code, last) == (1, "rookery: a is not connected; b is not connected.")


def test_a_site_gives_up_in_one_line(here: Path) -> None:
    given = ("--insecure", "--name", "a", "--address", "127.0.0.1:1", "--patience", "0")
    code, last = said("site", "--module", "study.py", *given)
    assert (code, last) == (1, "rookery: The coordinator at 127.0.0.1:1 can't be reached: Connection refused.")


def test_a_site_that_explains_says_what_it_waits_for(here: Path) -> None:
    words = ("site", "--module", "study.py", "--kit", "kits/north", "--address", "localhost:1", "--patience", "0")
    shown = lambda *more: CliRunner().invoke(cli.app, [*words, *more]).output
    assert "Waiting for the coordinator, which opens the run when all sites are" in shown("--explain")
    assert "Waiting" not in shown("--explain", "--quiet") + shown()


def test_the_file_of_a_run_repeats_it(here: Path) -> None:
    given = ("--insecure", "--sites", "a,b", "--address", "127.0.0.1:0", "--patience", "0")
    said(*SERVE, *given, "--out", "runs/first")
    code, last = said("serve", "--config", "runs/first/run.toml", "--out", "runs/second")
    assert (code, last) == (1, "rookery: a is not connected; b is not connected.")


@pytest.mark.parametrize(
    ("first", "then", "line"),
    [
        (("--clip", "1"), ("--clip", "0.001"), "begun with --clip 1, and is resumed with --clip 0.001"),
        ((), ("--clip", "0.001"), "begun without --clip, and is resumed with --clip 0.001"),
        (("--minimum", "1"), (), "begun with --minimum 1, and is resumed without --minimum"),
        (("--asynchronous", "2"), (), "begun with --asynchronous 2, and is resumed without --asynchronous"),
        (("--asynchronous", "2"), ("--asynchronous", "2", "--oldest", "3"), "without --oldest, and is resumed with"),
    ],
)
def test_a_run_is_not_resumed_with_other_options(
    here: Path, first: tuple[str, ...], then: tuple[str, ...], line: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is refused before any site is asked, or could be."""
    given = ("--insecure", "--sites", "a,b", "--address", "127.0.0.1:0", "--patience", "0", "--out", "runs/first")
    said(*SERVE, *given, *first)
    monkeypatch.setattr(grpc, "GrpcServer", None)
    code, last = said(*SERVE, *given, *then, "--resume")
    assert (code, line in last) == (2, True), last


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (("DRFA", "--private", "8"), "The server sees every reply to the exchange 'losses' by itself."),
        (("FastDRO", "--private", "8", "--unit", "record"), "A method must use only means over samples"),
        (("FedAvg", "--private", "0.01", "--noise", "1"), "epsilon must be large enough for one round; got 0.01"),
    ],
)
def test_a_private_run_is_refused_before_sites_are_asked(
    here: Path, words: tuple[str, ...], line: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grpc, "GrpcServer", None)
    network = ("--insecure", "--sites", "a,b", "--out", "runs/first")
    code, last = said("serve", "study.py:task", "--algorithm", *words, "--delta", "1e-3", *network)
    assert (code, line in last) == (2, True), last
    assert not (here / "runs").exists()


def test_what_a_site_knows_is_checked_once_it_says_so(here: Path) -> None:
    """What a record costs depends on sizes: as the coordinator knows none, the run waits for the sites."""
    private = ("--private", "0.1", "--delta", "1e-3", "--unit", "record", "--set", "batch_size=1")
    network = ("--insecure", "--sites", "a,b", "--address", "127.0.0.1:0", "--patience", "0")
    assert said(*SERVE, *private, *network) == (1, "rookery: a is not connected; b is not connected.")


def test_the_status_page_of_a_private_run(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """At the end it has all rounds, and what they cost; also if the run was only resumed to fetch its results."""
    (here / "policy.toml").write_text("epsilon = 99.0\ndelta = 1e-3\nshow_epsilon = true\n")
    names, shown = ["north", "south"], list[Any]()
    monkeypatch.setattr(policy, "_SHOWN_FOR", 0.0)
    monkeypatch.setattr(StatusPage, "close", lambda page: shown.append(json.loads(page.json())))
    private = ("--private", "99", "--delta", "1e-3", "--unit", "record", "--noise", "3")
    network = ("--insecure", "--sites", ",".join(names), "--status", "0", "--rounds", "2", "--out", "first")
    for more in ((), ("--resume",)):
        settings = {"module": "study.py", "policy": "policy.toml"}
        own = [responder(Settings(here, settings | {"folder": f"memory/{name}"}), name) for name in names]
        ask: Any = lambda i, message, own=own: own[i].handle(message)
        monkeypatch.setattr(grpc, "GrpcServer", lambda *_, ask=ask: Memory(2, ask, names))
        assert said(*SERVE, *private, *network, *more)[0] == 0
        for each in own:
            each._log.close()
    cost = json.loads((here / "first" / "run.json").read_text())["epsilon"]
    for page in shown:
        assert (page["state"], page["progress"]["rounds_done"], page["progress"]["rounds"]) == ("done", 2, 2)
        assert page["progress"]["exchanges"] == 2
        assert page["progress"]["epsilon"] == pytest.approx(cost)
    assert [site["epsilon"] for site in shown[0]["sites"]] == pytest.approx([cost, cost])


@pytest.mark.parametrize("there", [False, True], ids=["no folder", "a folder"])
def test_a_run_that_sites_refuse_leaves_nothing_behind(
    here: Path, there: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = responders(a_job())
    network = Memory(2, lambda i, message: own[i].handle(message), [responder.name for responder in own])
    monkeypatch.setattr(grpc, "GrpcServer", lambda *_: network)
    if there:
        (here / "first").mkdir()
        (here / "first" / "notes.txt").touch()
    code, last = said(*SERVE, "--insecure", "--sites", ",".join(network.names), "--out", "first")
    assert (code, "site-1 refuses: its study is not the coordinator's" in last) == (2, True), last
    assert [path.name for path in here.glob("first/*")] == (["notes.txt"] if there else [])
    assert (here / "first").exists() == there


def a_job(shift: float = 0.0) -> Job:
    problem = rk.SingleLevel(lambda x, rows: ((x - rows + shift) ** 2).mean())
    clients = rk.Clients(upper=[np.ones(2, np.float32), np.ones(3, np.float32)])
    return Job(problem, clients, rk.FedAvg(), (np.float32(0), ()), 2, 0)


def ended(own: list[Responder]) -> list[tuple[bool, str]]:
    ask: Any = lambda i, message: own[i].handle(message)
    engine = rk.Federation(transport=Memory(len(own), ask, [responder.name for responder in own]), patience=0.0)
    with pytest.raises(ValueError, match="site-1 refuses: its plan differs"):
        engine.open(without_data(a_job()))
    return [(responder.done, responder.reason) for responder in own]


def test_a_study_that_differs_at_one_site_ends_the_run_for_all() -> None:
    """Also for the site that refuses: nobody waits for a coordinator that is gone. The reason is told whole."""
    own = [responders(a_job())[0], responders(a_job(shift=1.0))[1]]
    for done, reason in ended(own):
        assert done
        assert reason.endswith("problem, method, evaluation or constants differ.")


def test_a_coordinator_that_is_stopped_between_two_evaluations_goes_on(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    job = a_job()
    presses = [3]  # the round in which Ctrl-C is pressed

    def watch(links: Any) -> None:
        if links.rounds in presses:
            presses.clear()
            signal.raise_signal(signal.SIGINT)

    def solved(**how: Any) -> rk.Run:
        own = responders(job)
        ask: Any = lambda i, message: own[i].handle(message)
        engine = rk.Federation(transport=Memory(2, ask, [responder.name for responder in own]), patience=0.0, **how)
        clients = without_data(job).clients
        evaluate = lambda x, y: {"loss": x**2}
        return rk.solve(
            job.problem, clients, job.algorithm, job.start[0], 10, every=5, evaluate=evaluate, engine=engine,
            checkpoint=tmp_path / "run",
        )  # fmt: skip

    stopped = solved(watch=watch)
    assert stopped.interrupted
    assert stopped.rounds == 4
    assert "Ctrl-C again to stop immediately" in capfd.readouterr().err
    resumed = solved()
    assert (resumed.rounds, resumed.history["round"].tolist()) == (10, [0, 5, 10])


def test_clients_without_data_are_not_simulated() -> None:
    with pytest.raises(ValueError, match="give an address, or a kit"):
        rk.Federation().open(without_data(a_job()))
