"""The command line, as a user meets it: what it prints, what it writes, and how it refuses."""

import json
import os
import subprocess
import sys
import tomllib
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import ClassVar

import numpy as np
import pandas as pd
import pytest
import typer
from typer.testing import CliRunner

import rookery as rk
from rookery import cli, report
from rookery.cli import demo_runs as demo
from rookery.cli.registry import ALGORITHMS, TASKS, find_algorithm
from rookery.cli.request import TaskOptions
from rookery.language import hyperparameters
from rookery.language.metrics import direction

slow = partial(pytest.param, marks=pytest.mark.slow)

SMALL = ["run", "quadratic", "--algorithm", "LFedNest", "--clients", "3", "--every", "2"]


DISTRIBUTED = ["run", "quadratic", "--processes", "2", "--coordinator"]


def invoke(*arguments):
    return CliRunner().invoke(cli.app, [str(argument) for argument in arguments])


def refused(*arguments):
    """The one line on standard error of a call that must end with code 2."""
    result = invoke(*arguments)
    assert result.exit_code == 2, result.output
    assert result.stdout == ""
    (line,) = result.stderr.splitlines()
    assert line.startswith("rookery: ")
    return line


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Two finished runs of six rounds."""
    folder = tmp_path_factory.mktemp("runs")
    for seed in (0, 1):
        result = invoke(*SMALL, "--rounds", 6, "--seed", seed, "--out", folder / str(seed))
        assert result.exit_code == 0, result.output
    return folder


# Lists.


def test_list_names_everything():
    result = invoke("list")
    assert result.exit_code == 0
    for name in [*ALGORITHMS, *TASKS, "digits"]:
        assert name in result.stdout


@pytest.mark.parametrize("what", ["algorithms", "tasks", "experiments", "datasets"])
def test_lists_as_json(what):
    entries = json.loads(invoke("list", what, "--json").stdout)[what]
    assert entries
    assert all(entry["name"] and entry["what it is"] for entry in entries)


def test_list_of_one_algorithm_gives_its_settings():
    entries = json.loads(invoke("list", "fednest", "--json").stdout)["FedNest"]
    (row,) = [entry for entry in entries if entry["setting"] == "neumann_terms"]
    assert (row["default"], row["in its paper"]) == ("5", "N")
    assert "terms of that series" in row["meaning"]


def test_soba_has_its_own_settings_and_runs(tmp_path):
    """It is a function that returns FedBiO: what it fixes cannot be set, and linear_step follows lower_step."""
    rows = json.loads(invoke("list", "soba", "--json").stdout)["SOBA"]
    assert [row["setting"] for row in rows] == ["upper_step", "lower_step", "linear_step", "batch_size"]
    assert rows[0]["in its paper"] == "ργ, on x"
    assert "SOBA" in {row["name"] for row in json.loads(invoke("list", "algorithms", "--json").stdout)["algorithms"]}
    small = ["--clients", 2, "--set", "lower_step=0.1", "--rounds", 1, "--quiet"]
    result = invoke("run", "quadratic", "--algorithm", "soba", *small, "--out", tmp_path / "a")
    assert result.exit_code == 0, result.output
    used = json.loads((tmp_path / "a" / "run.json").read_text())["hyperparameters"]
    assert (used["local_steps"], used["shared_batch"], used["linear_step"]) == (1, True, 0.1)
    repeated = tomllib.loads((tmp_path / "a" / "run.toml").read_text())
    assert (repeated["algorithm"], {*repeated["set"]}) == ("SOBA", {row["setting"] for row in rows})
    assert "SOBA on quadratic has no setting 'local_steps'" in refused(
        "run", "quadratic", "--algorithm", "SOBA", "--set", "local_steps=3"
    )


def test_lists_say_what_each_methods_own_field_may_be():
    """FedBiO's clients all take as many local steps, FedNest's may take epochs: the list says what a run accepts."""
    for name, cls in ALGORITHMS.items():
        for row in cli.listing._hyperparameters(find_algorithm(name)):
            if "local_steps" in row["setting"]:
                try:
                    hyperparameters.check(cls(**{row["setting"]: rk.Epochs(2)}), 3)
                    accepted = True
                except ValueError:
                    accepted = False
                assert ("epochs" in f"{row['may be']} {row['meaning']}".lower()) is accepted, (name, row)
    (row,) = [
        row
        for row in json.loads(invoke("list", "FedBiO", "--json").stdout)["FedBiO"]
        if row["setting"] == "local_steps"
    ]
    assert row["may be"] == "an integer of at least 1"


# Runs.


@pytest.mark.slow
def test_a_server_optimizer(tmp_path):
    """It changes the run, is written down, and a run goes on with it and with no other."""
    given = [*SMALL, "--rounds", 2, "--out", tmp_path / "run", "--server-optimizer"]
    assert invoke(*given, "adam:0.01").exit_code == 0
    assert json.loads((tmp_path / "run" / "run.json").read_text())["hyperparameters"]["server_optimizer"] == "adam:0.01"
    assert "server_optimizer/upper/0/mu" in np.load(tmp_path / "run" / "state.npz")
    assert invoke(*given, "adam:0.01", "--resume").exit_code == 0
    assert "holds another run" in refused(*given, "adam:0.02", "--resume")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("adamm:0.1", "There is no server optimizer 'adamm'; did you mean adam?"),
        ("adam", "must have a positive step size after the name, e.g. adam:0.001"),
        ("adam:fast", "must have a positive step size after the name, e.g. adam:0.001"),
    ],
)
def test_a_server_optimizer_that_does_not_exist(text, message):
    assert message in refused(*SMALL, "--server-optimizer", text)


def test_a_run_prints_its_metrics_and_exchanges():
    result = invoke(*SMALL, "--rounds", 2)
    assert result.exit_code == 0, result.output
    for word in ("LFedNest on quadratic", "distance", "exchanges per round", "sent per round", "seconds", "mean"):
        assert word in result.stdout


def test_a_run_with_memory_prints_no_exchange_that_sends_nothing():
    """Clients write their memory after the last exchange; they are sent nothing for that."""
    result = invoke("run", "minimax-quadratic", "--algorithm", "ScaffoldSaddle", "--clients", "3", "--rounds", "1")
    assert result.exit_code == 0, result.output
    assert "The exchanges of a round" in result.stdout
    assert "finish" not in result.stdout


def test_quiet_prints_nothing_and_json_only_json():
    assert invoke(*SMALL, "--rounds", 2, "--quiet").output == ""
    result = invoke(*SMALL, "--rounds", 2, "--set", "upper_step=1", "--set", "noise=0", "--json")
    told = json.loads(result.stdout)
    assert told["hyperparameters"]["upper_step"] == 1
    assert told["task_settings"] == {"noise": 0, "clients": 3, "seed": 0}
    assert told["rounds_done"] == 2
    assert set(told["last"]) == {"distance", "gradient", "lower_gap"}


def test_a_saved_run_holds_what_is_promised(saved):
    names = {path.name for path in (saved / "0").iterdir()}
    assert names >= {"run.json", "history.csv", "exchanges.csv", "state.npz", "best.npz", "picture.png"}
    description = json.loads((saved / "0" / "run.json").read_text())
    assert (description["task"], description["algorithm"], description["seed"]) == ("quadratic", "LFedNest", 0)
    assert (description["rounds"], description["cohort"], description["version"]) == (6, 3, rk.__version__)
    assert pd.read_csv(saved / "0" / "history.csv")["round"].tolist() == [0, 2, 4, 6]


def test_resume_gives_the_run_that_was_not_cut_short(saved, tmp_path):
    assert invoke(*SMALL, "--rounds", 2, "--out", tmp_path / "r").exit_code == 0
    result = invoke(*SMALL, "--rounds", 6, "--out", tmp_path / "r", "--resume")
    assert result.exit_code == 0, result.output
    whole, resumed = (pd.read_csv(folder / "history.csv") for folder in (saved / "0", tmp_path / "r"))
    pd.testing.assert_frame_equal(whole.drop(columns="seconds"), resumed.drop(columns="seconds"))
    with np.load(saved / "0" / "state.npz") as a, np.load(tmp_path / "r" / "state.npz") as b:
        for name in a:
            np.testing.assert_array_equal(a[name], b[name])


def test_resume_keeps_how_often_a_run_was_evaluated(tmp_path):
    """run.toml says how the first rows were made, and that later ones differ; without --every, it stays as it was."""
    given, out = [*SMALL[:-2], "--rounds"], ["--out", tmp_path / "r"]
    assert invoke(*given, 2, *out, "--every", 1).exit_code == 0
    assert invoke(*given, 4, *out, "--resume").exit_code == 0
    assert pd.read_csv(tmp_path / "r" / "history.csv")["round"].tolist() == [0, 1, 2, 3, 4]
    assert "Resumed" not in (tmp_path / "r" / "run.toml").read_text()
    assert invoke(*given, 8, *out, "--resume", "--every", 2).exit_code == 0
    assert pd.read_csv(tmp_path / "r" / "history.csv")["round"].tolist() == [0, 1, 2, 3, 4, 6, 8]
    text = (tmp_path / "r" / "run.toml").read_text()
    assert "\nevery = 1\n" in text
    assert "\nrounds = 8\n" in text
    assert text.count("# Resumed with --every 2; the first rows have --every 1.\n") == 1


def test_a_run_is_not_written_over(saved):
    before = (saved / "0" / "run.json").read_text()
    assert "holds a run already" in refused(*SMALL, "--rounds", 6, "--out", saved / "0")
    assert "holds another run" in refused(*SMALL, "--rounds", 6, "--out", saved / "0", "--seed", 5, "--resume")
    assert (saved / "0" / "run.json").read_text() == before
    assert "--resume needs --out" in refused(*SMALL, "--resume")


def test_bad_input_leaves_no_folder(tmp_path):
    assert "got 99" in refused(*SMALL, "--cohort", 99, "--out", tmp_path / "r")
    assert not (tmp_path / "r").exists()


def test_a_run_that_breaks_down_says_so_and_keeps_what_it_has(tmp_path):
    result = invoke(*SMALL, "--rounds", 400, "--set", "upper_step=1e8", "--json", "--out", tmp_path / "r")
    assert result.exit_code == 1
    (line,) = result.stderr.splitlines()
    assert line.startswith("rookery: The run stopped: ")
    assert "round" in line.lower()
    told = json.loads(result.stdout)
    assert told["stopped"] in line
    assert told["rounds_done"] < 400
    assert json.loads((tmp_path / "r" / "run.json").read_text())["stopped"] == told["stopped"]
    history = pd.read_csv(tmp_path / "r" / "history.csv")
    assert history["round"].iloc[-1] == told["rounds_done"]
    assert np.isfinite(history["distance"].iloc[0])


def test_what_a_stopped_run_leaves(tmp_path, monkeypatch):
    """The same where `solve` says so, with values that no axis has room for."""

    def solve(*given, **options):
        run = rk.solve(*given, **options)
        run.history.loc[run.history.index[-2:], "distance"] = [1e300, np.nan]
        run.stopped = "round 6: x is not finite"
        return run

    monkeypatch.setattr(cli.execution, "rk", SimpleNamespace(**{**vars(rk), "solve": solve}))
    result = invoke(*SMALL, "--rounds", 6, "--out", tmp_path / "r", "--quiet")
    assert result.exit_code == 1, result.output
    assert result.stderr.startswith("rookery: The run stopped: round 6: x is not finite. Try smaller steps")
    assert len(result.stderr.splitlines()) == 1
    assert (tmp_path / "r" / "picture.png").read_bytes().startswith(b"\x89PNG")
    assert json.loads((tmp_path / "r" / "run.json").read_text())["stopped"] == "round 6: x is not finite"


@pytest.mark.slow
def test_a_run_that_breaks_down_names_the_client_with_debug():
    result = invoke(*SMALL, "--rounds", 40, "--set", "upper_step=1e200", "--set", "neumann_terms=1", "--debug")
    assert result.exit_code == 1
    assert "client" in result.stderr
    assert len(result.stderr.splitlines()) == 1


def test_a_whole_run_was_not_stopped(saved):
    assert json.loads((saved / "0" / "run.json").read_text())["stopped"] is None


def test_a_metric_that_is_not_finite_is_told_where_the_variables_are(monkeypatch):
    def solve(*given, evaluate, **options):
        return rk.solve(*given, evaluate=lambda x, y: {**evaluate(x, y), "distance": np.nan}, **options)

    monkeypatch.setattr(cli.execution, "rk", SimpleNamespace(**{**vars(rk), "solve": solve}))
    result = invoke(*SMALL, "--rounds", 2, "--json")
    assert result.exit_code == 1
    assert "distance is not finite from round 0 on" in result.stderr
    assert "not the steps: `rookery check`" in result.stderr
    assert "smaller steps" not in result.stderr


def test_a_run_that_diverges_in_finite_numbers_says_so(tmp_path):
    result = invoke(*SMALL, "--rounds", 3, "--set", "upper_step=1e12", "--out", tmp_path / "r", "--quiet")
    assert result.exit_code == 1
    (line,) = result.stderr.splitlines()
    assert "LFedNest on quadratic: distance went from" in line
    assert "the run has diverged. Try smaller steps" in line
    assert "diverged" in json.loads((tmp_path / "r" / "run.json").read_text())["diverged"]


@pytest.mark.parametrize(
    ("metric", "values", "bad"),
    [
        ("loss", [2.0, 3e6], True),
        ("loss", [0.0, 5.0], False),  # it may start at 0
        ("loss", [1e-9, 1.0], False),
        ("accuracy", [0.1, 1e7], False),  # this way is better
        ("accuracy", [0.1, np.nan], True),
        ("loss", [np.nan, 0.5], False),
    ],
)
def test_what_counts_as_diverged(metric, values, bad):
    history = pd.DataFrame({"round": [0, 1], metric: values})
    assert (cli.execution.divergence(history, direction(metric)) is not None) is bad


def test_a_demo_with_a_run_that_stopped_ends_with_code_1(tmp_path, monkeypatch):
    made = demo.Demo(pd.DataFrame(), 1.0, tmp_path / "demo.png", ("FedNest, iid, seed 0: round 3: x is not finite",))
    monkeypatch.setattr(demo.Demo, "numbers", lambda self: {"stopped": self.stopped})
    monkeypatch.setattr(demo.Demo, "table", lambda self: "")
    monkeypatch.setattr(demo.Demo, "lines", lambda self: [])
    monkeypatch.setattr(demo, "run_demo", lambda *given, **options: made)
    result = invoke("demo", "--json")
    assert result.exit_code == 1
    assert "FedNest, iid, seed 0: round 3: x is not finite" in result.stderr


def test_a_lower_level_of_each_clients_own():
    """The task is set up so for a method that needs it, says so, and goes on from where it was cut short."""
    result = invoke("run", "quadratic", "--algorithm", "FedBiOLocal", "--clients", "3", "--rounds", 2, "--json")
    assert "quadratic has scope=client" in result.stderr
    told = json.loads(result.stdout)
    assert told["task_settings"]["scope"] == "client"
    assert set(told["last"]) == {"distance", "gradient"}
    assert "each client's own" in refused("run", "hyperparameters", "--algorithm", "FedBiOLocal")
    assert "one for all" in refused("run", "quadratic", "--algorithm", "FedBiO", "--set", "scope=client")


# What is refused.


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["run", "quadratik"], "did you mean quadratic"),
        (["run", "quadratic", "--algorithm", "LFedNset"], "LFedNest"),
        (["run", "quadratic", "--algorithm", "zzz"], "there are: AccFCSGM, AdaFBiO, AFL"),
        (["run", "quadratic", "--set", "uper_step=1"], "did you mean upper_step"),
        (["run", "quadratic", "--algorithm", "FedAvg"], "does not solve Bilevel"),
        (["run", "quadratic", "--partition", "iid"], "has no setting 'partition'"),
        (["run", "hyperparameters", "--partition", "idd"], "did you mean iid?"),
        (["run", "hyperparameters", "--clients", "0"], "at least 1"),
        (["run", "hyperparameters", "--clients", "5000"], "use fewer clients"),
        (["run", "quadratic", "--rounds", "-1"], "rounds must be an integer of at least 0; got -1"),
        (["run", "quadratic", "--every", "0"], "every must be an integer of at least 1; got 0"),
        (["reproduce", "fednest-fg4"], "did you mean fednest-fig4"),
        (["reproduce", "fednest-fig4", "--seeds", "0"], "at least 1"),
        (["list", "taks"], "did you mean tasks"),
        (["compare", "nowhere"], "nowhere does not exist"),
        (["run", "quadratic", "--quiet", "--json"], "--quiet and --json must not be given together"),
        (["run", "quadratic", "--seeds", "-1"], "seeds must be an integer of at least 1; got -1"),
        (["demo", "--out", "/dev/null"], "--out must be a folder; /dev/null is a file"),
        (["new", "problem", "numpy"], "numpy.py would hide the Python module numpy"),
        (["new", "algorithm", "Json"], "json.py would hide the Python module json"),
        ([*DISTRIBUTED, "localhost", "--process", "0"], "--coordinator must be HOST:PORT"),
        ([*DISTRIBUTED, "localhost:9480", "--process", "2"], "--process must be from 0 to --processes - 1"),
        ([*DISTRIBUTED, "localhost:9480", "--process", "0", "--processes", "0"], "got --process 0 of 0"),
    ],
)
def test_unknown_names_and_values(arguments, said):
    """Every one is refused before anything is computed or written."""
    assert said in refused(*arguments)


@pytest.mark.parametrize(
    ("setting", "said"),
    [
        ("upper_step", "must have the form key=value"),
        ("upper_step=", "must have the form key=value"),
        ("upper_step=fast", "upper_step must be a positive number; got 'fast'"),
        ("upper_step=-1", "upper_step must be a positive number; got -1"),
        ("upper_step=none", "upper_step must be a positive number; got None"),
        ("lower_rounds=1.5", "lower_rounds must be an integer of at least 1; got 1.5"),
        ("lower_local_steps=5..2", "low, high"),
        ("lower_local_steps=epochs:many", "epochs: must be followed by a number"),
        ("neumann=sun", "neumann must be one of 'sum', 'random', 'cg'; got 'sun'"),
        ("batch_size=0", "at least 1"),
        ("resample=maybe", "resample must be True or False; got 'maybe'"),
        ("samples=few", "samples must be an integer; got 'few'"),
        ("heterogeneity=true", "heterogeneity must be a number; got True"),
        ("seed=3", "--seed 3"),
    ],
)
def test_bad_settings(setting, said):
    assert said in refused("run", "quadratic", "--set", setting)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("3", 3),
        ("-2.5e-3", -0.0025),
        ("True", True),
        ("false", False),
        ("None", None),
        ("auto", "auto"),
        ("5..15", (5, 15)),
        ("5,15", (5, 15)),
        ("epochs:5", rk.Epochs(5.0)),
        ("random", "random"),
    ],
)
def test_values(text, value):
    read = cli.settings.parse_value(text)
    assert read == value
    assert type(read) is type(value)


@pytest.mark.parametrize(
    "arguments", [["frobnicate"], ["run"], ["run", "quadratic", "--rounds", "x"], ["run", "--what"]]
)
def test_what_typer_refuses_is_one_line_too(arguments, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["rookery", *arguments])
    with pytest.raises(SystemExit) as end:
        cli.main()
    assert end.value.code == 2
    told = capsys.readouterr()
    assert told.out == ""
    assert len(told.err.splitlines()) == 1


# How a task is handed to an algorithm.


@dataclass(frozen=True)
class BilevelOnly:
    """Stands for a method that knows bilevel problems alone."""

    solves: ClassVar[tuple[type, ...]] = (rk.Bilevel,)


def test_minimax_is_handed_over_as_bilevel_and_said_so():
    task, note = cli.request.fit(rk.tasks.minimax_quadratic(clients=3), BilevelOnly)
    assert isinstance(task.problem, rk.Bilevel)
    assert "handed over as one" in note
    unchanged, note = cli.request.fit(rk.tasks.minimax_quadratic(clients=3), rk.FedNest)
    assert isinstance(unchanged.problem, rk.Minimax)
    assert note == ""


def test_the_default_algorithm_solves_the_tasks_problem():
    tasks = {
        "FedNest": rk.tasks.quadratic(clients=3),
        "FedBiOLocal": rk.tasks.quadratic(clients=3, scope="client"),
        "WeightedNodesProx": rk.tasks.weighted_nodes(),
        "FedAvg": rk.tasks.weighted_nodes().single_level,
    }
    for name, task in tasks.items():
        assert cli.request.default_algorithm(task) == name
        assert type(task.problem) in ALGORITHMS[name].solves
    request = cli.request.resolve("quadratic", None, TaskOptions(["scope=client"], 3))
    assert (request.named_algorithm.name, request.note) == ("FedBiOLocal", "")
    assert cli.request.default_algorithm_of("weighted-nodes") == "WeightedNodesProx"


def test_a_task_is_made_once_to_choose_an_algorithm(monkeypatch):
    made = []
    monkeypatch.setitem(
        TASKS, "quadratic", lambda clients=3, seed=0: made.append(clients) or rk.tasks.quadratic(clients)
    )
    request = cli.request.resolve("quadratic", None, TaskOptions(["upper_step=0.5"], 4))
    assert (request.named_algorithm.name, request.method.upper_step, made) == ("FedNest", 0.5, [4])


def test_more_clients_than_there_can_be_are_refused_at_once():
    said = refused("run", "quadratic", "--clients", 10**11)
    assert "quadratic: clients must fit into memory; 100000000000 take about" in said
    with pytest.raises(ValueError, match="samples cannot be divided into 100000000000 parts"):
        rk.tasks.worst_group(clients=10**11)


def test_single_level_methods_get_the_single_level_reading():
    task, _ = cli.request.fit(rk.tasks.hyperrep(clients=5), rk.FedAvg)
    assert isinstance(task.problem, rk.SingleLevel)


# Files to start from.


@pytest.mark.parametrize(
    ("problem", "settings", "metric", "gain"),
    [
        ("minimax", ["--clients", 3], "distance", 0.5),
        ("compositional", [], "distance", 0.5),
        ("multi-level", [], "distance", 0.5),
        slow("single-level", ["--clients", 10, "--cohort", 5, "--set", "width=8"], "loss", 0.8),
        slow("weighted-nodes", [], "similar_weight", -1.5),  # it rises by half at least
    ],
)
def test_a_new_algorithm_for_every_class_of_problems(problem, settings, metric, gain, tmp_path):
    """The bilevel one is in test_own_code."""
    file = tmp_path / f"fed_{problem.replace('-', '_')}.py"
    said = invoke("new", "algorithm", "FedX", "--problem", problem, "--out", file).stdout
    task = cli.new._TASKS[problem]
    assert f"rookery run {task} --algorithm {file}:FedX --rounds 20" in said
    result = invoke("run", task, "-a", f"{file}:FedX", "--rounds", 20, "--every", 20, *settings, "--json")
    assert result.exit_code == 0, result.output
    told = json.loads(result.stdout)
    first, last = told["first"][metric], told["last"][metric]
    assert last < gain * first if gain > 0 else last > -gain * first


@pytest.mark.slow
@pytest.mark.parametrize(
    "problem", ["bilevel", "minimax", "compositional", "multi-level", "single-level", "weighted-nodes"]
)
def test_a_new_algorithm_keeps_the_contract(problem, tmp_path):
    file = tmp_path / f"kept_{problem.replace('-', '_')}.py"
    said = invoke("new", "algorithm", "FedX", "--problem", problem, "--out", file).stdout
    assert f"rookery contract {file}:FedX" in said
    result = invoke("contract", f"{file}:FedX", "--quick")
    assert result.exit_code == 0, result.output


def test_new_refuses_a_class_of_problems_that_is_not_known(tmp_path):
    out = ["--out", tmp_path / "f.py"]
    assert "did you mean minimax?" in refused("new", "algorithm", "FedX", "--problem", "minmax", *out)
    assert "--problem must be left out of `rookery new problem`" in refused(
        "new", "problem", "hospital", "--problem", "minimax", *out
    )
    assert not (tmp_path / "f.py").exists()


# Comparisons.


def test_compare_shows_runs_side_by_side(saved, tmp_path):
    picture = tmp_path / "new" / "c.png"
    result = invoke("compare", saved / "0", saved / "1", "--by", "bytes", "--out", picture)
    assert result.exit_code == 0, result.output
    assert "distance on quadratic" in result.stdout
    assert "means ± standard errors" in result.stdout
    assert result.stdout.count("LFedNest") == 1  # they differ in the seed alone
    assert picture.read_bytes().startswith(b"\x89PNG")
    told = json.loads(
        invoke("compare", saved / "0", saved / "1", "--metric", "gradient", "--out", picture, "--json").stdout
    )
    assert told["metric"] == "gradient"
    assert [row["seed"] for row in told["runs"]] == [0, 1]


@pytest.mark.parametrize("by", ["gradients", "products", "samples", "bytes", "seconds", "exchanges", "round", "rounds"])
def test_compare_by_every_measure(saved, tmp_path, by, monkeypatch):
    drawn = []
    monkeypatch.setattr(report, "save", lambda fig, path: drawn.append(fig) or path)
    told = json.loads(invoke("compare", saved, "--by", by, "--out", tmp_path / "c.png", "--json").stdout)
    assert told["by"] == ("rounds" if by == "round" else by)
    history = pd.read_csv(saved / "0" / "history.csv")
    assert told["runs"][0]["gradients"] == history["gradients"].iloc[-1] > 0
    assert told["runs"][0]["products"] == history["products"].iloc[-1] > 0
    (ax,) = drawn[0].axes
    assert ax.get_xlabel() == report.ACROSS[told["by"]]
    if by in ("gradients", "products"):
        assert ax.lines[0].get_xdata()[-1] == history[by].iloc[-1]


def test_compare_takes_what_report_takes(saved, tmp_path):
    task = rk.tasks.quadratic(clients=3)
    file = tmp_path / "runs.jsonl"
    run = rk.solve(
        task.problem, task.clients, task.algorithm(rk.LFedNest), task.init, 2,
        evaluate=task.evaluate, callbacks=[rk.trackers.JsonLines(file)], progress=False,
    )  # fmt: skip
    run.history.to_csv(tmp_path / "mine.csv", index=False)
    given = [file, tmp_path / "mine.csv", saved / "0"]
    told = json.loads(
        invoke(
            "compare", *given, "--by", "gradients", "--out", tmp_path / "c.png", "--metric", "distance", "--json"
        ).stdout
    )
    assert [row["last"] for row in told["runs"]][:2] == [run.history["distance"].iloc[-1]] * 2
    assert told["runs"][1]["method"] == "mine"
    assert told["runs"][1]["seed"] is None
    run.history.drop(columns="gradients").to_csv(tmp_path / "less.csv", index=False)
    assert "--by gradients needs runs that record gradients" in refused(
        "compare", tmp_path / "less.csv", "--by", "gradients"
    )


def test_compare_averages_where_all_runs_have_a_value(tmp_path, monkeypatch):
    """Seeds of different lengths are averaged over the rounds that all of them have, and that is said."""
    drawn = []
    monkeypatch.setattr(report, "save", lambda fig, path: drawn.append(fig) or path)
    for name, rounds in (("a", (0, 2, 4)), ("b", (0, 2, 4, 6, 8)), ("c", (0, 2, 4, 6))):
        (tmp_path / name).mkdir()
        frame = pd.DataFrame({"round": rounds, "loss": [float(ord(name) - 97 + k) for k in range(len(rounds))]})
        frame.to_csv(tmp_path / name / "mine.csv", index=False)
    files = [tmp_path / name / "mine.csv" for name in "abc"]
    result = invoke("compare", *files, "--out", tmp_path / "c.png")
    assert result.exit_code == 0, result.output
    assert "the means are over those that all have, up to round 4." in result.stdout
    assert drawn[0].axes[0].lines[0].get_xdata().tolist() == [0, 2, 4]
    told = json.loads(invoke("compare", *files, "--out", tmp_path / "c.png", "--json").stdout)
    assert [(row["rounds"], row["last"]) for row in told["runs"]] == [(4, 2.0), (4, 3.0), (4, 4.0)]
    assert len(told["notes"]) == 1
    pd.DataFrame({"round": [3], "loss": [1.0]}).to_csv(files[2], index=False)
    assert "must have a round in common" in refused("compare", *files)


# Several runs.


SEVERAL = [
    "run",
    "quadratic",
    "-a",
    "LFedNest",
    "-a",
    "FedBiO",
    "--clients",
    3,
    "--rounds",
    2,
    "--every",
    1,
    "--seeds",
    2,
]


def test_a_round_that_does_not_fit_is_one_line_too(capsys):
    with pytest.raises(typer.Exit) as end, cli.terminal.errors_in_one_line():
        raise MemoryError("The device, which has 8 GB, is out of memory. Use a smaller batch_size.")
    assert end.value.exit_code == 1
    assert capsys.readouterr().err == (
        "rookery: The device, which has 8 GB, is out of memory. Use a smaller batch_size.\n"
    )


def test_a_path_that_cannot_be_used_is_one_line_too(capsys):
    with pytest.raises(typer.Exit) as end, cli.terminal.errors_in_one_line():
        raise FileNotFoundError(2, "No such file or directory", "/proc/x")
    assert end.value.exit_code == 2
    assert capsys.readouterr().err == ("rookery: Cannot use /proc/x: No such file or directory. Give another path.\n")


def test_all_faults_of_a_table_are_told(tmp_path):
    (tmp_path / "ward.py").write_text(
        "import rookery as rk\n\ndef task():\n"
        "    return rk.Clients.from_frame({'h': [1, 2], 'v': ['a', 'b']}, 'h', standardize='all', drop=['w'])\n"
    )
    result = invoke("run", f"{tmp_path / 'ward.py'}:task")
    assert result.exit_code == 2
    first, *faults = result.stderr.splitlines()
    assert first.endswith("ValueError: 3 faults in the table or the arguments (ward.py, line 4):")
    assert [fault[:10] for fault in faults] == ["- standard", "- drop: th", "- column '"]


def test_several_runs_skip_what_is_finished_and_end_with_means(tmp_path, monkeypatch):
    """An interruption loses the run under way alone; the numbers are those of single runs."""
    given = [*SEVERAL, "--out", tmp_path / "g", "--set", "linear_step=0.05", "--set", "upper_step=0.1"]
    done, real = [], rk.solve

    def solve(*given, **options):
        run = real(*given, **options)
        run.interrupted = len(done) == 2
        done.append(options["seed"])
        return run

    monkeypatch.setattr(cli.execution, "rk", SimpleNamespace(**{**vars(rk), "solve": solve}))
    result = invoke(*given)
    assert result.exit_code == 130, result.output
    assert "2 of 4 runs are finished. Continue with --resume." in result.stderr
    assert "holds 3 of these runs already" in refused(*given)
    description = json.loads((tmp_path / "g" / "quadratic-FedBiO-seed0" / "run.json").read_text())
    (tmp_path / "g" / "quadratic-FedBiO-seed0" / "run.json").write_text(json.dumps({**description, "rounds_done": 1}))
    result = invoke(*given, "--resume")
    assert result.exit_code == 0, result.output
    assert done == [0, 1, 0, 0, 1]
    assert "means ± standard errors" in result.stdout
    assert {path.name for path in (tmp_path / "g").iterdir()} == {
        *(f"quadratic-{name}-seed{seed}" for name in ("LFedNest", "FedBiO") for seed in (0, 1)),
        "comparison.png",
        "report.html",
    }
    told = json.loads(invoke(*given, "--resume", "--json").stdout)
    assert len(done) == 5
    one = json.loads(
        invoke(*SMALL, "--rounds", 2, "--every", 1, "--seed", 1, "--set", "upper_step=0.1", "--json").stdout
    )
    assert told["runs"][1]["last"] == one["last"]["distance"]
    assert "holds another run" in refused(*given, "--resume", "--set", "lower_step=0.3")


def test_several_runs_are_checked_before_the_first_starts(tmp_path):
    out = ["--out", tmp_path / "g"]
    assert "--out must be given" in refused(*SEVERAL)
    assert "no run to continue" in refused(*SEVERAL, *out, "--resume")
    assert "seeds must be an integer of at least 1; got 0" in refused(*SEVERAL, *out, "--seeds", 0)
    assert "LFedNest is given twice" in refused(*SEVERAL, *out, "-a", "LFedNest")
    assert "did you mean upper_step" in refused(*SEVERAL, *out, "--set", "uper_step=1")
    assert "does not solve Bilevel" in refused(*SEVERAL, *out, "-a", "FedAvg")
    assert "did you mean" in refused("run", "quadratic", "minimax", *out)
    assert not (tmp_path / "g").exists()


def test_several_runs_of_which_one_diverges(tmp_path):
    result = invoke(*SEVERAL, "--seeds", 1, "--set", "linear_step=1e200", "--out", tmp_path / "g")
    assert result.exit_code == 1
    assert "1 of 2 runs diverged: FedBiO on quadratic, seed 0." in result.stderr.splitlines()[-1]
    assert (tmp_path / "g" / "comparison.png").exists()


@pytest.mark.parametrize(
    ("ended", "advice"),
    [
        ({"stopped": "before the first round: x is not finite."}, cli.execution.BAD_START),
        ({"diverged": "loss is not finite from round 0 on."}, cli.execution.BAD_START),
        ({"diverged": "loss is not finite from round 10 on."}, "Try smaller steps."),
    ],
)
def test_several_runs_that_are_not_finite_from_the_start(ended, advice, tmp_path, monkeypatch, capsys):
    run = {"algorithm": "FedAvg", "task": "t", "seed": 0, **ended}
    monkeypatch.setattr(report, "read_description", lambda folder: run)
    for name in ("read", "write"):
        monkeypatch.setattr(
            f"rookery.report.html.{name}", lambda *given: ([SimpleNamespace(metric="loss", history=pd.DataFrame())], [])
        )
    monkeypatch.setattr(cli.grid, "collect", lambda *given: (None, [], []))
    monkeypatch.setattr(cli.grid, "comparison_table", lambda *given: "")
    monkeypatch.setattr(report, "compared", lambda *given: None)
    monkeypatch.setattr(report, "save", lambda fig, path: path)
    assert cli.grid._show_means({"t": [tmp_path]}, tmp_path, True, False) == 1
    assert capsys.readouterr().err.endswith(f"FedAvg on t, seed 0. {advice}\n")


def test_explain_takes_a_default_that_solves_the_problem():
    result = invoke("explain", "quadratic", "--clients", 3, "--set", "scope=client")
    assert result.exit_code == 0, result.output
    assert "FedBiOLocal" in result.stdout


def test_compare_tells_apart_runs_of_one_method():
    base = {"task": "t", "cohort": 3, "task_settings": {"seed": 0}, "seed": 0}
    one = {**base, "algorithm": "FedNest", "hyperparameters": {"upper_step": 0.1, "lower_step": 1}}
    two = {**base, "algorithm": "FedNest", "hyperparameters": {"upper_step": 0.2, "lower_step": 1}}
    three = {**base, "algorithm": "FedAvg", "hyperparameters": {"step": 0.2}}
    again = {**one, "seed": 7, "task_settings": {"seed": 7}}
    assert report.labels([one, two, three]) == ["FedNest, upper_step=0.1", "FedNest, upper_step=0.2", "FedAvg"]
    assert report.labels([one, again]) == ["FedNest", "FedNest"]
    other = {**two, "task": "u", "cohort": 5}
    assert report.labels([one, other, {**three, "task": ""}]) == ["FedNest on t", "FedNest on u", "FedAvg"]


def test_compare_refuses(saved, tmp_path):
    assert "did you mean bytes" in refused("compare", saved / "0", "--by", "byte")
    assert "did you mean distance" in refused("compare", saved / "0", "--metric", "distanc")
    assert "--out must end in .png" in refused("compare", saved / "0", "--out", tmp_path / "c.txt")
    assert "is not a run" in refused("compare", saved / "0", tmp_path)


# The rest, end to end.


def test_the_program_itself(tmp_path):
    program = Path(sys.executable).with_name("rookery")
    call = [program, "run", "quadratic", "--algorithm", "FedBiO", "--clients", "2", "--rounds", "2", "--json"]
    done = subprocess.run(call, capture_output=True, text=True, cwd=tmp_path, check=False)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["rounds_done"] == 2
    assert not list(tmp_path.iterdir())


# Compiled programs on disk.


@pytest.mark.slow
def test_a_second_command_compiles_nothing(tmp_path):
    own = ("ROOKERY_CACHE", "JAX_COMPILATION", "JAX_PERSISTENT")
    environment = {name: value for name, value in os.environ.items() if not name.startswith(own)}
    environment |= {"XDG_CACHE_HOME": str(tmp_path / "cache")}
    call = [sys.executable, "-m", "rookery.cli", "run", "quadratic", "--algorithm", "LFedNest", "--rounds", "2"]

    def kept():
        done = subprocess.run([*call, "--quiet"], env=environment, capture_output=True, text=True, check=False)
        assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
        return {path.name for path in (tmp_path / "cache" / "rookery" / "jax").rglob("*-cache")}

    first = kept()
    assert first
    assert kept() == first


@pytest.mark.parametrize(
    ("variables", "folder", "others"),
    [
        ({}, "cache/rookery/jax", True),
        ({"ROOKERY_CACHE": "off"}, None, False),
        ({"JAX_COMPILATION_CACHE_DIR": "own"}, None, True),
        ({"XDG_CACHE_HOME": "file"}, None, False),
    ],
)
def test_where_compiled_programs_are_kept(variables, folder, others, tmp_path, monkeypatch):
    monkeypatch.delenv("ROOKERY_CACHE")
    for name in [name for name in os.environ if name.startswith(("JAX_COMPILATION", "JAX_PERSISTENT"))]:
        monkeypatch.delenv(name)
    (tmp_path / "file").write_text("no folder")
    for name, value in {"XDG_CACHE_HOME": "cache", **variables}.items():
        monkeypatch.setenv(name, value if value == "off" else str(tmp_path / value))
    given = {}
    monkeypatch.setattr("jax.config.update", given.__setitem__)
    cli.compilation_cache.keep_compiled()
    at = given.pop("jax_compilation_cache_dir", None)
    assert (at is None) if folder is None else at.startswith(str(tmp_path / folder))
    assert bool(given) is others


def test_reproduce_and_bench_hand_over(tmp_path, monkeypatch):
    asked = []
    claims = [
        {"claim": "It converges.", "where": "Fig. 4", "verdict": "reproduced"},
        {"claim": "It is faster.", "where": "Sec. 4", "verdict": "undecided"},
    ]
    (tmp_path / "claims.json").write_text(json.dumps(claims))
    monkeypatch.setattr("rookery.experiments.reproduce", lambda *given: asked.append(given) or given[1])
    result = invoke("reproduce", "fednest_fig4", "--quick", "--seeds", 2, "--out", tmp_path, "--quiet")
    assert result.exit_code == 0, result.output
    assert result.stdout == ""
    assert asked == [("fednest-fig4", tmp_path, True, 2, None, False)]
    said = invoke("reproduce", "fednest_fig4", "--quick", "--out", tmp_path).stdout
    assert "1 of 2 claims reproduced. Scaled down: this checks the code, not the paper." in said
    assert all(word in said for word in ("It converges.", "Fig. 4", "reproduced", "It is faster.", "undecided"))
    assert json.loads(invoke("reproduce", "fednest_fig4", "--out", tmp_path, "--json").stdout)["claims"] == claims
    lost = tmp_path / "nowhere"
    assert f"--data-dir must be a folder that exists; got {lost}" in refused(
        "reproduce", "fednest-fig4", "--quick", "--data-dir", lost
    )
    monkeypatch.setattr("rookery.cli.speed.measure", lambda: {"round_seconds": 0.5, "torch_seconds": None})
    assert json.loads(invoke("bench", "--json").stdout) == {"round_seconds": 0.5, "torch_seconds": None}
    assert "round_seconds" in invoke("bench").stdout
