"""What a newcomer gets wrong in the first hour: one clear line each, and no file is touched that was not named."""

import json
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pandas as pd
import pytest
from typer.testing import CliRunner

import rookery as rk
from rookery import cli, report
from rookery.experiments import EXPERIMENTS
from rookery.experiments.machinery.one_run import runs_folder

QUADRATIC = "run quadratic -a LFedNest --clients 3 --rounds 2"
TUNE = "tune quadratic -a LFedNest --clients 3 --rounds 4"


def invoke(line: str, *more: str) -> Any:
    return CliRunner().invoke(cli.app, [*line.split(), *more])


def told(line: str, *more: str) -> str:
    """The one line on standard error of a call that must end with code 2."""
    result = invoke(line, *more)
    assert result.exit_code == 2, result.output
    assert result.stdout == ""
    (said,) = result.stderr.splitlines()
    assert said.startswith("rookery: ")
    return said


def tree_of(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a finished run, folders that look like runs, own files, and a file in the way."""
    folder = tmp_path_factory.mktemp("newcomer")
    here = Path.cwd()
    os.chdir(folder)
    try:
        assert invoke(f"{QUADRATIC} --out done").exit_code == 0
        for name, text in {"empty": "{}", "list": "[1, 2]", "part": '{"task": "q"}', "cut": '{"task": '}.items():
            Path(name).mkdir()
            Path(name, "run.json").write_text(text)
        Path("part", "history.csv").write_text("a,b\n1,2\n")
        Path("damaged").mkdir()
        Path("damaged", "run.json").write_text(Path("done", "run.json").read_text())
        Path("damaged", "history.csv").write_text("a,b\n1,2\n")
        Path("short").mkdir()
        Path("short", "run.json").write_text('{"task": "q", "algorithm": "a", "metric": "distance"}')
        Path("short", "history.csv").write_text(Path("done", "history.csv").read_text())
        Path("searched").mkdir()
        Path("searched", "tuning.json").write_text("{}")
        Path("full").mkdir()
        Path("full", "summary.md").write_text("# fednest-fig4")
        Path("file").write_text("in the way")
        Path("own.py").write_text(OWN)
        Path("broken.py").write_text("def task(:\n")
        Path("raises.py").write_text("import json\njson.loads('{')\n")
        Path("missing.py").write_text("import no_such_package\n")
        Path("good.toml").write_text('task = "quadratic"\nalgorithm = "LFedNest"\nclients = 3\nrounds = 2\n')
        Path("bad.toml").write_text("rounds = \n")
        Path("typo.toml").write_text('task = "quadratic"\nround = 3\n')
        Path("kind.toml").write_text('task = "quadratic"\nrounds = [1]\n')
        Path("word.toml").write_text('task = "quadratic"\nrounds = "many"\n')
        Path("flag.toml").write_text('task = "quadratic"\nquiet = "yes"\n')
        Path("set.toml").write_text('task = "quadratic"\nset = 3\n')
        Path("setting.toml").write_text('task = "quadratic"\n[set]\nuper_step = 0.1\n')
        Path("table.toml").write_text('task = "quadratic"\n[set]\nupper_step = {a = 1}\n')
    finally:
        os.chdir(here)
    return folder


OWN = '''
import rookery as rk
from rookery.tasks import Task
import jax.numpy as jnp
import numpy as np

number = 3

class Plain:
    pass

def task(n, seed=0):
    """A task."""
    return Task("own", rk.SingleLevel(lambda x, b: jnp.mean((x - b) ** 2)), rk.Clients(upper=[np.ones(int(n))] * 3),
                np.zeros(()), lambda x, y: {"loss": x}, "loss", rounds=2)

def pair():
    return 1, 2

def fails():
    return {}["key"]

def measures():
    return Task("own", rk.SingleLevel(lambda x, b: jnp.mean((x - b) ** 2)), rk.Clients(upper=[np.ones(2)] * 3),
                np.zeros(()), lambda x, y: {"loss": {}["key"]}, "loss", rounds=2)

def ward(clients):
    return task(clients)
'''


COMMANDS = [
    # Seeds, rounds and the other numbers.
    (f"{QUADRATIC} --seed 18446744073709551616", "seed must be an integer from 0 to 2**64 - 1; got 18446744073"),
    (f"{QUADRATIC} --seed -1", "seed must be an integer from 0 to 2**64 - 1; got -1"),
    (f"{QUADRATIC} --seed 1.5", "--seed must be an integer; got '1.5'"),
    (f"{QUADRATIC} --seed=x", "--seed must be an integer; got 'x'"),
    (f"{QUADRATIC} --rounds -1", "rounds must be an integer of at least 0; got -1"),
    (f"{QUADRATIC} --rounds 1e3", "--rounds must be an integer; got '1e3'"),
    (f"{QUADRATIC} --every 0", "every must be an integer of at least 1; got 0"),
    (f"{QUADRATIC} --cohort 0", "cohort must be an integer from 1 to 3, the number of clients, or None"),
    (f"{QUADRATIC} --cohort 4", "; got 4"),
    (f"{QUADRATIC} --clients -2", "clients must be an integer of at least 1; got -2"),
    ("check quadratic --seed -1", "seed must be an integer from 0 to 2**64 - 1; got -1"),
    # What is set.
    (f"{QUADRATIC} --set upper_dim=0", "upper_dim must be an integer of at least 1; got 0"),
    (f"{QUADRATIC} --set samples=-4", "samples must be an integer of at least 1; got -4"),
    (f"{QUADRATIC} --set samples=0", "samples must be an integer of at least 1; got 0"),
    (f"{QUADRATIC} --set lower_dim=-1", "lower_dim must be an integer of at least 1; got -1"),
    (f"{QUADRATIC} --set sizes=abc", "sizes must be a list with the number of samples of each client; got 'abc'"),
    (f"{QUADRATIC} --set noise=-1", "noise must be a number of at least 0; got -1"),
    (f"{QUADRATIC} --set noise=nan", "noise must be a number of at least 0; got nan"),
    (f"{QUADRATIC} --set replace=yes", "replace must be true or false; got 'yes'"),
    (f"{QUADRATIC} --set upper_step=nan", "upper_step must be a positive number; got nan"),
    (f"{QUADRATIC} --set upper_step=inf", "upper_step must be a positive number; got inf"),
    (f"{QUADRATIC} --set upper_step=0", "upper_step must be a positive number; got 0"),
    (f"{QUADRATIC} --set upper_step==3", "upper_step must be a positive number; got '=3'"),
    (f"{QUADRATIC} --set upper_step=0.1,0.2", "upper_step must be a positive number; got (0.1, 0.2)"),
    (f"{QUADRATIC} --set lower_local_steps=epochs:0", "for each client; got Epochs("),
    (f"{QUADRATIC} --set =3", "must have the form key=value"),
    (f"{QUADRATIC} --set noise", "must have the form key=value"),
    (f"{QUADRATIC} --set noise=0 --set noise=1", "noise is set twice. Give it once"),
    (f"{QUADRATIC} --set upper_step=1 --set upper-step=2", "upper_step is set twice"),
    ("run quadratic --set --rounds 2", "--set must have a value; got --rounds, another option"),
    (f"{QUADRATIC} --set rounds=3", "which has an option of its own; got 'rounds=3'. Give --rounds 3"),
    (f"{QUADRATIC} --set width=3", "LFedNest on quadratic has no setting 'width'"),
    ("check quadratic --set upper_step=1", "The task quadratic has no setting 'upper_step'"),
    ("run hyperrep --set width=-5", "width must be an integer of at least 1; got -5"),
    ("run hyperrep --set width=0", "width must be an integer of at least 1; got 0"),
    ("run minimax-quadratic --set spread=-1", "spread must be a number of at least 0; got -1"),
    ("run minimax-quadratic --set penalty=-1", "penalty must be a number of at least 0; got -1"),
    ("run minimax-quadratic --set dim=0", "dim must be an integer of at least 1; got 0"),
    ("run portfolio --set assets=0", "assets must be an integer of at least 1; got 0"),
    ("run dro-imbalanced --set few=5000", "few must be from 1 to"),
    (f"{QUADRATIC} --server-optimizer adam:-1", "must have a positive step size after the name"),
    # Names.
    ("run quadratik", "There is no task 'quadratik'; did you mean quadratic or minimax-quadratic?"),
    ("run quadratic -a FedNets", "There is no algorithm 'FedNets'; did you mean"),
    ("run quadratic -a FedAvg", "FedAvg does not solve Bilevel problems"),
    ("run quadratic --algorthm FedNest", "No such option"),
    ("run", "Missing argument"),
    ("compare", "Missing argument"),
    ("list nothing", "There is no list of 'nothing'"),
    ("explain quadratic -a zzz", "there are: AccFCSGM, AdaFBiO, AFL"),
    ("new problm x", "There is no kind 'problm'; did you mean problem?"),
    ("new problem class", "NAME must be a name in Python, of letters, digits and _, e.g. hospital; got 'class'"),
    ("new problem 3d", "NAME must be a name in Python, of letters, digits and _, e.g. hospital; got '3d'"),
    ("new problem own", "own.py exists already"),
    ("new problem x --out x.txt", "--out must end in .py; got x.txt"),
    # One's own code.
    ("run nowhere.py:task", "There is no file"),
    ("run own.py", "own.py is a file. Name something in it, e.g. own.py:"),
    ("run own.py:tsk", "own.py has no 'tsk'; did you mean task?"),
    ("run own.py:number", "A task must be a rookery.tasks.Task, or a function returning one; own.py:number is an int"),
    ("run own.py:Plain", "a function returning one; own.py:Plain is the class Plain"),
    ("run own.py:pair", "own.py:pair must return a rookery.tasks.Task; it returns a tuple"),
    ("run own.py:fails", "own.py:fails failed: KeyError: 'key' (own.py, line 21)"),
    ("run own.py:measures -a FedAvg", "KeyError: 'key' (own.py, line 25)"),
    ("run own.py:task", "own.py:task needs a value for n; got none. Give --set n=..."),
    ("run own.py:ward", "own.py:ward needs a value for clients; got none. Give --clients ..."),
    ("run own.py:task --clients 3", "The task own.py:task has no setting 'clients'; its settings are: n, seed"),
    ("run broken.py:task", "broken.py can't be loaded: SyntaxError"),
    ("run raises.py:task", "raises.py can't be loaded: JSONDecodeError"),
    ("run missing.py:task", "missing.py can't be loaded: ModuleNotFoundError: No module named 'no_such_package'"),
    ("run no_such_package.tasks:task", "There is no module 'no_such_package.tasks'"),
    ("run quadratic -a own.py:Plain", "frozen dataclass with solves, init and round; own.py:Plain is the class Plain"),
    ("run quadratic -a own.py:task", "a frozen dataclass with solves, init and round; own.py:task is a function"),
    ("list own.py:nothing", "own.py has no 'nothing'"),
    # --config.
    ("run --config nowhere.toml", "--config nowhere.toml can't be read: No such file"),
    ("run --config bad.toml", "--config must be a TOML file; bad.toml is not"),
    ("run --config typo.toml", "There is no option of `rookery run` called 'round'; did you mean rounds?"),
    ("run --config kind.toml", "rounds must be a value for --rounds; got [1]"),
    ("run --config word.toml", "--rounds must be an integer; got 'many'"),
    ("run --config flag.toml", "quiet must be true or false; got 'yes'"),
    ("run --config set.toml", "set must be a table, e.g. [set]"),
    ("run --config setting.toml", "FedNest on quadratic has no setting 'uper_step'; did you mean upper_step"),
    ("run --config table.toml", "upper_step must be a number"),
    ("run --config good.toml --seed -1", "seed must be an integer from 0 to 2**64 - 1; got -1"),
    # Files.
    (f"{QUADRATIC} --out done", "done holds a run already. Continue it with --resume, or give another --out"),
    (f"{QUADRATIC} --out typo --resume", "typo holds no run to continue"),
    (f"{QUADRATIC} --resume", "--resume needs --out DIR"),
    (f"{QUADRATIC} --out file", "--out must be a folder; file is a file"),
    (f"{QUADRATIC} --out file/x", "--out must be a folder; file is a file"),
    (f"{QUADRATIC} --out /dev/null", "--out must be a folder; /dev/null is a file"),
    (f"{QUADRATIC} --out=", "--out must have a value; got an empty one. Give a value, or leave it out"),
    (f"{QUADRATIC} --out list --resume", "list is not a run: its run.json has no task"),
    (f"{QUADRATIC} --out empty --resume", "empty is not a run: its run.json has no task"),
    (f"{QUADRATIC} --out cut --resume", "cut is not a run: it has no readable run.json"),
    (f"{QUADRATIC} --out done --resume --rounds 1",
     "--rounds must be at least 2, the rounds that done has already; got 1"),
    (f"{QUADRATIC} --out done --resume --set upper_step=0.5", "its upper_step is 0.05, here it is 0.5. Give"),
    (f"{QUADRATIC} --out done --resume --seed 4", "another run: its seed is 0, here it is 4"),
    (f"{TUNE} --out file", "--out must be a folder; file is a file"),
    (f"{TUNE} --out searched", "searched holds a search already. Give another --out"),
    ("reproduce fednest-fig4 --quick --out file", "--out must be a folder; file is a file"),
    ("reproduce fednest-fig4 --quick --out full", "full holds full results, and these are scaled down"),
    ("reproduce fednest-fig4 --seeds 0", "--seeds must be an integer of at least 1; got 0"),
    ("compare nowhere", "nowhere does not exist. Give folders"),
    ("compare file", "file holds no run"),
    ("compare empty", "empty is not a run: its run.json has no task"),
    ("compare list", "list is not a run: its run.json has no task"),
    ("compare part", "part is not a run: its run.json has no algorithm"),
    ("compare short", "short is not a run: run.json has no cohort"),
    ("compare damaged", "damaged is not a run: its history.csv or run.json is damaged"),
    ("compare done --by colour", "There is no measure 'colour'"),
    ("compare done --out done.txt", "--out must end in .png, .pdf or .svg; got done.txt"),
    # Searches.
    (f"{TUNE} --candidates 0", "candidates must be an integer of at least 1; got 0"),
    (f"{TUNE} --candidates 4", "candidates must be at least 9 to search 3 step sizes; got 4"),
    (f"{TUNE} --over upper_step=1:0.1", "Give the lower end first"),
    (f"{TUNE} --over upper_step=a:b", "must have the form name=low:high"),
    (f"{TUNE} --over neumann_terms", "needs a range of integers, (low, high), or a list of values"),
    (f"{TUNE} --over upper_step --over upper_step=1:2", "upper_step is named twice"),
    (f"{TUNE} --metric nothing", "must name a metric that evaluate returns; it returns distance"),
]  # fmt: skip


@pytest.mark.parametrize(("line", "message"), COMMANDS, ids=[line for line, _ in COMMANDS])
def test_commands(line: str, message: str, places: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One line, and every file is as it was."""
    monkeypatch.chdir(places)
    before = {name: content for name, content in tree_of(places).items() if "__pycache__" not in name}
    assert message in told(line)
    assert {name: content for name, content in tree_of(places).items() if "__pycache__" not in name} == before


@pytest.mark.parametrize("line", [QUADRATIC, TUNE, "demo", "reproduce fednest-fig4", "compare done"])
def test_an_empty_out(line: str, places: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(places)
    assert "--out must have a value; got an empty one" in told(line, "--out", "")


def test_a_run_that_is_under_way_is_left_alone(places: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fcntl = pytest.importorskip("fcntl")
    monkeypatch.chdir(places)
    with Path("done", ".lock").open("w") as lock:
        lock.write("4711")
        lock.flush()
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert "done: this run is under way, in process 4711" in told(f"{QUADRATIC} --out done --resume")
    Path("done", ".lock").unlink()


def test_a_search_without_a_folder_finds_a_new_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    request = cli.request.resolve("quadratic", "LFedNest", cli.request.TaskOptions(clients=3))
    assert cli.tune._new_folder(request) == Path("runs/tune-quadratic-LFedNest")
    Path("runs/tune-quadratic-LFedNest").mkdir(parents=True)
    assert cli.tune._new_folder(request) == Path("runs/tune-quadratic-LFedNest-2")


def test_reproductions_of_two_scales_have_two_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    asked: list[Any] = []
    monkeypatch.setattr("rookery.experiments.reproduce", lambda *given: asked.append(given[1]) or given[1])
    for line in ("fednest-fig4", "fednest-fig4 --quick", "fednest-fig2a --out new/folder"):
        assert invoke(f"reproduce {line} --quiet").exit_code == 0
    assert asked == [Path("runs/fednest-fig4"), Path("runs/fednest-fig4-quick"), Path("new/folder")]
    assert not list(tmp_path.iterdir())  # nothing beside what was named


def test_an_experiment_stores_its_runs_where_it_was_told_to(tmp_path: Path) -> None:
    """Beside --out only where experiments of a family share a folder already."""
    family = EXPERIMENTS["fednest-fig2a"]
    assert runs_folder(family, tmp_path / "a") == tmp_path / "a" / "runs"
    (tmp_path / f"{family.family}-runs").mkdir()
    assert runs_folder(family, tmp_path / "a") == tmp_path / f"{family.family}-runs"


def test_json_has_paths_as_text() -> None:
    assert report.plain({"out": Path("runs/a")}) == {"out": "runs/a"}


# Python.


def rows() -> dict[str, np.ndarray]:
    return {"a": np.ones((2, 2), np.float32)}


X = np.ones(2, np.float32)
SINGLE = rk.SingleLevel(lambda x, b: jnp.mean((b["a"] - x) ** 2))
CLIENTS = rk.Clients(upper=[rows()] * 3)


def upper(x: Any, y: Any, b: Any) -> Any:
    return jnp.mean((b["a"] - y) ** 2) + jnp.sum(x**2)


def lower(x: Any, y: Any, b: Any) -> Any:
    return jnp.mean((b["a"] - y) ** 2) + jnp.sum((x - y) ** 2)


def solve(**given: Any) -> rk.Run:
    return rk.solve(**{"problem": SINGLE, "clients": CLIENTS, "algorithm": rk.FedAvg(), "init": X, "rounds": 1} | given)


def projected(project: Any) -> Callable[[], Any]:
    two = rk.Clients(lower=[rows()] * 3, upper=[rows()] * 3)
    problem = rk.Bilevel(upper, lower, project_upper=project)
    return lambda: solve(problem=problem, clients=two, algorithm=rk.LFedNest(hessian_step=0.1), init=(X, X))


def fedavg(**given: Any) -> Callable[[], Any]:
    return lambda: solve(algorithm=rk.FedAvg(**given))


def evaluated(**given: Any) -> Callable[[], Any]:
    return lambda: solve(**given)


def tuned(**given: Any) -> Callable[[], Any]:
    return lambda: rk.tune(SINGLE, CLIENTS, rk.FedAvg(), X, 4, **{"metric": "loss"} | given)


CALLS: list[tuple[str, Callable[[], Any], str]] = [
    ("init of objects", lambda: solve(init=np.array([object()])), "init: x must be floating point; its type is object"),
    ("block 0", lambda: solve(engine=rk.Simulation(block=0)), 'integer of at least 1, or "auto"; got 0'),
    ("block -1", lambda: solve(engine=rk.Simulation(block=-1)), "got -1"),
    ("block 1.5", lambda: solve(engine=rk.Simulation(block=1.5)), "got 1.5"),  # type: ignore[arg-type]
    ("debug", lambda: solve(engine=rk.Simulation(debug="no")), "debug must be True or False; got 'no'"),  # type: ignore[arg-type]
    ("cohort True", lambda: solve(cohort=True), "got True"),
    ("checkpoint 3", lambda: solve(checkpoint=3), "checkpoint must be the name of a folder; got 3"),
    ("checkpoint True", lambda: solve(checkpoint=True), "checkpoint must be the name of a folder; got True"),
    ("epochs of a word", fedavg(local_steps=rk.Epochs("2")), "for each client; got Epochs("),  # type: ignore[arg-type]
    ("epochs of nothing", fedavg(local_steps=rk.Epochs(None)), "for each client; got Epochs("),  # type: ignore[arg-type]
    ("epochs True", fedavg(local_steps=rk.Epochs(True)), "for each client; got Epochs("),
    ("tune without evaluate", tuned(evaluate=None), "metric='loss' needs evaluate="),
    ("tune by a number", tuned(evaluate=3), "evaluate must be a function of (x, y) or (x, y, memory); got 3"),
    ("tune by words", tuned(evaluate=lambda x, y: {"loss": "low"}), "'loss' is a str (low)"),
    ("projection 3", projected(3), "Bilevel.project_upper must be a function of (x); got 3"),
    ("projection's arity", projected(lambda x, y: x), "must be a function of (x); it takes (x, y)"),
    ("projection fails", projected(lambda x: x["q"]), "Bilevel.project_upper fails on init: TypeError"),
    ("projection's shape", projected(lambda x: x[:1]), "shape and type of x, (2,) float32; it returns (1,) float32"),
    ("projection's type", projected(lambda x: x.astype(jnp.float16)), "it returns (2,) float16"),
    ("projection's structure", projected(lambda x: {"a": x}), "it returns ['a'] (2,) float32"),
    ("projection to nothing", projected(lambda x: None), "it returns nothing"),
    ("evaluate a word", evaluated(evaluate=lambda x, y: "low"), "must return a dict of numbers, {name: number}"),
    ("evaluate None", evaluated(evaluate=lambda x, y: None), "it returns a NoneType"),
    ("evaluate complex", evaluated(evaluate=lambda x, y: {"a": 1j}), "'a' is a complex (1j)"),
    ("evaluate words", evaluated(evaluate=lambda x, y: {"a": "x"}), "'a' is a str (x)"),
    ("evaluate Nones", evaluated(evaluate=lambda x, y: {"a": None}), "'a' is a NoneType (None)"),
    ("evaluate arrays", evaluated(evaluate=lambda x, y: {"a": x}), "'a' is an array of shape (2,)"),
    ("evaluate names", evaluated(evaluate=lambda x, y: {1: 2}), "the name 1 is an int"),
    ("evaluate of 0", evaluated(evaluate=lambda: {}), "a function of (x, y) or (x, y, memory); it takes ()"),
    ("evaluate of 1", evaluated(evaluate=lambda x: {}), "it takes (x)"),
    ("evaluate of 4", evaluated(evaluate=lambda x, y, z, w: {}), "it takes (x, y, z, w)"),
    ("evaluate 3", evaluated(evaluate=3), "evaluate must be a function of (x, y) or (x, y, memory); got 3"),
    ("client complex", evaluated(evaluate_client=lambda c, x, y: {"a": 1j}), "'a' is a complex (1j)"),
    ("client words", evaluated(evaluate_client=lambda c, x, y: {"a": "x"}), "'a' is a str (x)"),
    ("client None", evaluated(evaluate_client=lambda c, x, y: {"a": None}), "'a' is a NoneType (None)"),
    ("client of 1", evaluated(evaluate_client=lambda x: {}), "evaluate_client must be a function of (client, x, y)"),
    ("schedule of vectors", fedavg(step=lambda t: jnp.ones(2)), "the schedule step must return one number"),
    ("schedule of nothing", fedavg(step=lambda: 0.1), "takes 0 positional arguments but 1 was given"),
    ("schedule of two", fedavg(step=lambda t, u: 0.1), "missing 1 required positional argument"),
    ("schedule of words", fedavg(step=lambda t: "x"), "the schedule step can't be compiled (TypeError"),
    ("negative schedule", fedavg(step=lambda t: -0.1), "step must be a positive number; got -0.1 in round 0"),
    ("wide schedule", fedavg(step=lambda t: jnp.float64(0.1)), "must return the variables' type, float32; got float64"),
    ("unknown hyperparameter", lambda: rk.FedNest(steps=3), "FedNest has no hyperparameter 'steps'. Did you mean"),  # type: ignore[call-arg]
    ("a method's name", lambda: solve(algorithm="FedAvg"), "must be the method itself, rk.FedAvg(...); got its name"),
    ("no method", lambda: solve(algorithm=None), "algorithm must be a method, e.g. rk.FedNest(...); got None"),
    ("a class", lambda: solve(algorithm=rk.FedAvg), "algorithm must be an instance, FedAvg(...); got the class itself"),
    ("callbacks 3", lambda: solve(callbacks=3), "(\"run.jsonl\"); got 3"),
    ("callbacks of numbers", lambda: solve(callbacks=[3]), "(\"run.jsonl\"); it holds 3"),
    ("callbacks of two", lambda: solve(callbacks=[lambda a, b: 0]), "must be a function of (run); it takes (a, b)"),
    ("channel 3", lambda: solve(channel=3), "channel must be a channel such as rk.clip(1.0), or a dict from exchange"),
    ("channel by name", lambda: solve(channel={"x": 3}), "names to channels; got 3"),
    ("keep_best 3", lambda: solve(keep_best=3, evaluate=lambda x, y: {"a": 1}), "such as 'loss'; got 3"),
    ("a number as loss", lambda: solve(problem=rk.SingleLevel(3)), "loss must be a function of (x, batch); got 3"),  # type: ignore[arg-type]
]  # fmt: skip


class State(NamedTuple):
    """Of an author's algorithm."""

    x: Any
    y: Any = ()


def gradient(state: State, fed: Any, key: Any, batch: Any = None) -> Any:
    return fed.mean(fed.map(lambda c, k: c.f_x(state.x, (), c.upper(k) if batch is None else batch(c, k)), key))


def authored(
    round_: Any = lambda self, fed, state, key: State(state.x - self.size_of_it * gradient(state, fed, key)),
    init: Any = lambda self, fed, x, y, key: State(x),
    **given: Any,
) -> Callable[[], Any]:
    """A run with an algorithm of one's own."""

    @dataclass(frozen=True)
    class Mine:
        step: rk.Step = 0.1
        size_of_it: float = 0.1
        count: int = 1
        flag: bool = False

        solves: ClassVar[tuple[type, ...]] = (rk.SingleLevel,)
        init: ClassVar[Any]
        round: ClassVar[Any]

    Mine.init, Mine.round = init, round_
    return lambda: solve(algorithm=Mine(**given))


AUTHORS: list[tuple[str, Callable[[], Any], str]] = [
    ("a word for a number", authored(size_of_it="big"), "Mine: size_of_it must be a number; got 'big'"),
    ("a number for a count", authored(count=1.5), "Mine: count must be an integer; got 1.5"),
    ("a number for a flag", authored(flag=1), "Mine: flag must be True or False; got 1"),
    ("another shape", authored(lambda self, fed, s, k: State(s.x[None])), "a round must keep the shape and type of .x"),
    ("no state", authored(lambda self, fed, s, k: s.x), "Mine: a round must return the structure"),
    ("a state without y", authored(init=lambda self, fed, x, y, k: (x,)), "Mine.init must return a NamedTuple"),
    ("init's arity", authored(init=lambda self, x, y: State(x)), "a function of (fed, x, y, key); it takes (x, y)"),
    ("round's arity", authored(lambda self, fed, s: s), "must be a function of (fed, state, key); it takes (fed, s)"),
    (
        "no batch",
        authored(lambda self, fed, s, k: State(gradient(s, fed, k, lambda c, k: jnp.ones(3)))),
        "must be given a batch such as client.upper(key, size)",
    ),
    (
        "batch of -1",
        authored(lambda self, fed, s, k: State(gradient(s, fed, k, lambda c, k: c.upper(k, -1)))),
        "client.upper: size must be an integer of at least 1; got -1",
    ),
    (
        "no lower level",
        authored(lambda self, fed, s, k: State(fed.mean(fed.map(lambda c, k: c.g_y(s.x, (), c.lower(k)), k)))),
        "A SingleLevel problem has no lower level g; use client.f_x",
    ),
]  # fmt: skip
CALLS += AUTHORS


def test_an_authors_step_may_be_a_schedule() -> None:
    assert authored(step=lambda t: 0.1 / (1 + t))().rounds == 1


@pytest.mark.parametrize(("call", "message"), [row[1:] for row in CALLS], ids=[row[0] for row in CALLS])
def test_calls(call: Callable[[], Any], message: str) -> None:
    with pytest.raises((ValueError, TypeError)) as caught:
        call()
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_step_of_another_type_takes_that_of_the_variables() -> None:
    assert jax.config.jax_enable_x64
    for step in (np.float64(0.1), np.array(0.1), jnp.asarray(0.1, jnp.float64)):
        run = solve(algorithm=rk.FedAvg(step=step, local_steps=2))
        assert run.x.dtype == np.float32


def test_a_resumed_run_has_the_rows_of_a_whole_one(tmp_path: Path) -> None:
    """Ctrl-C between two evaluations leaves a row of its own; the run that goes on from there does not keep it."""
    given = {"evaluate": lambda x, y: {"loss": jnp.sum(x**2)}, "algorithm": rk.FedAvg(step=0.1)}
    file = tmp_path / "run.npz"
    assert solve(**given, rounds=3, every=2, checkpoint=file).history["round"].tolist() == [0, 2, 3]
    resumed, whole = solve(**given, rounds=6, every=2, checkpoint=file), solve(**given, rounds=6, every=2)
    columns = ["round", "exchanges", "loss"]
    pd.testing.assert_frame_equal(resumed.history[columns], whole.history[columns])


def test_what_is_far_beyond_the_start_has_diverged() -> None:
    found = rk.tune(
        SINGLE, CLIENTS, rk.FedAvg(), X + 1, 24, metric="loss", search={"step": (0.01, 1e3)}, candidates=5,
        evaluate=lambda x, y: {"loss": jnp.mean((x - 1) ** 2)},
    )  # fmt: skip
    assert found.diverged >= 1
    assert json.loads(report.to_json(found.table["last"].tolist()))[0] < 1
