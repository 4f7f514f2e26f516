"""One's own tasks and algorithms on the command line: files, modules, packages' entry points, --config and new."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from typer.testing import CliRunner

from rookery import algorithms, cli
from rookery.cli import registry
from rookery.language.meanings import MEANINGS

SMALL = ["quadratic", "--algorithm", "LFedNest", "--clients", "3", "--rounds", "4", "--every", "2"]


def invoke(*arguments: Any) -> Any:
    return CliRunner().invoke(cli.app, [str(argument) for argument in arguments])


def done(*arguments: Any) -> str:
    result = invoke(*arguments)
    assert result.exit_code == 0, result.output
    return result.stdout


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder of its own, whose modules are forgotten afterwards."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    before = {*sys.modules}
    yield tmp_path
    for name in {*sys.modules} - before:
        if str(tmp_path) in str(getattr(sys.modules[name], "__file__", "")):
            del sys.modules[name]


def same(one: Path, other: Path) -> None:
    """Two runs have the same numbers."""
    histories = [pd.read_csv(folder / "history.csv").drop(columns="seconds") for folder in (one, other)]
    pd.testing.assert_frame_equal(*histories)
    with np.load(one / "state.npz") as a, np.load(other / "state.npz") as b:
        assert all((a[name] == b[name]).all() for name in a)


def test_new_files_run_at_once_and_a_config_repeats_the_run(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "rookery run hospital.py:hospital --algorithm FedNest" in done("new", "problem", "hospital")
    assert "rookery run quadratic --algorithm fedx.py:FedX" in done("new", "algorithm", "FedX")
    ours = ["hospital.py:hospital", "--algorithm", "fedx.py:FedX"]
    said = done("run", *ours, "--rounds", 20, "--clients", 3, "--set", "noise=0.25", "--out", "a")
    assert "run.toml" in said
    assert "fedx.py:FedX on hospital.py:hospital" in said
    history = pd.read_csv(here / "a" / "history.csv")
    assert history["test_loss"].iloc[-1] < 0.5 * history["test_loss"].iloc[0]
    elsewhere = here / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.chdir(elsewhere)
    done("run", "--config", here / "a" / "run.toml", "--out", "b", "--quiet")
    same(here / "a", elsewhere / "b")
    described = [json.loads((folder / "run.json").read_text()) for folder in (here / "a", elsewhere / "b")]
    assert described[0]["task_settings"] == described[1]["task_settings"] == {"noise": 0.25, "clients": 3, "seed": 0}
    monkeypatch.chdir(here)
    assert {row["setting"]: row["meaning"] for row in json.loads(done("list", ours[0], "--json"))[ours[0]]}["noise"]
    assert "on u" in done("list", ours[2])
    assert "directions" in done("explain", *ours)


@pytest.mark.slow
def test_a_config_repeats_a_run_of_the_librarys(here: Path) -> None:
    """Ranges, words and an optimizer at the server, too; and what the command line says wins."""
    more = ["--set", "lower_local_steps=2..3", "--set", "batch_size=4", "--seed", 5, "--cohort", 2]
    done("run", *SMALL, *more, "--server-optimizer", "adam:0.01", "--out", "a")
    done("run", "--config", "a/run.toml", "--out", "b")
    same(here / "a", here / "b")
    told = json.loads(
        done("run", "--config", "a/run.toml", "--rounds", 1, "--set", "batch_size=none", "--seed", 6, "--json")
    )
    assert (told["rounds"], told["seed"], told["hyperparameters"]["batch_size"]) == (1, 6, None)
    assert told["hyperparameters"]["lower_local_steps"] == [2, 3]
    assert told["cohort"] == 2


def test_every_option_may_stand_in_a_config(here: Path) -> None:
    (here / "run.toml").write_text(
        'task = "quadratic"\nalgorithm = "LFedNest"\nrounds = 2\nclients = 3\nevery = 1\nout = "r"\njson = true\n'
        'server-optimizer = "sgd:1.0"\n[set]\nnoise = 0\nlower_local_steps = [1, 2]\nscale-steps = true\n'
    )
    told = json.loads(done("run", "--config", "run.toml"))
    assert (here / "r" / "history.csv").exists()
    assert told["hyperparameters"]["scale_steps"] is True
    assert told["task_settings"]["noise"] == 0


def test_a_module_an_instance_and_a_task_itself(here: Path) -> None:
    package = here / "mine_package"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "parts.py").write_text(
        "import rookery as rk\nfast = rk.LFedNest(upper_step=0.5)\nsmall = rk.tasks.quadratic(clients=3)\n"
    )
    told = json.loads(
        done("run", "mine_package.parts:small", "-a", "mine_package.parts:fast", "--rounds", 1, "--seed", 3, "--json")
    )
    assert told["hyperparameters"]["upper_step"] == 0.5
    assert told["hyperparameters"]["hessian_step"] == "auto"  # an instance is taken as it is
    assert told["cohort"] == 3
    assert (told["task"], told["task_settings"]) == ("mine_package.parts:small", {})


def test_a_file_with_the_name_of_a_module(here: Path) -> None:
    (here / "json.py").write_text("import rookery as rk\ntask = rk.tasks.quadratic(clients=2)\n")
    assert registry.find_task("json.py:task").name == "json.py:task"
    assert json.loads("1") == 1


def test_what_packages_offer(monkeypatch: pytest.MonkeyPatch) -> None:
    """A broken one is told in a line and does not break the others."""
    offered = [
        EntryPoint("ours", "rookery.tasks:quadratic", "rookery.tasks"),
        EntryPoint("lost", "no_such_package:task", "rookery.tasks"),
        EntryPoint("quadratic", "rookery.tasks:portfolio", "rookery.tasks"),
        EntryPoint("FedOurs", "rookery:LFedNest", "rookery.algorithms"),
        EntryPoint("FedLost", "json:nothing", "rookery.algorithms"),
    ]
    monkeypatch.setattr(registry, "entry_points", lambda group: [e for e in offered if e.group == group])
    result = invoke("list", "tasks", "--json")
    names = [entry["name"] for entry in json.loads(result.stdout)["tasks"]]
    assert names == sorted([*registry.TASKS, "ours"], key=str.casefold)
    lost, taken = result.stderr.splitlines()
    assert "The task 'lost' can't be loaded: ModuleNotFoundError: No module named 'no_such_package'" in lost
    assert "'quadratic' has the name of one of the library's" in taken
    assert len(invoke("list", "algorithms").stderr.splitlines()) == 1
    assert registry.find_task("quadratic").target is registry.TASKS["quadratic"]
    assert "upper_dim" in done("list", "ours")
    told = json.loads(done("run", "ours", "-a", "fedours", "--clients", 3, "--rounds", 1, "--json"))
    assert (told["task"], told["algorithm"]) == ("ours", "FedOurs")
    assert invoke("run", "quadratic", "-a", "FedLost").exit_code == 2


@pytest.mark.slow
def test_tune_takes_own_code_and_leaves_a_config_of_the_best(here: Path) -> None:
    (here / "mine.py").write_text("import rookery as rk\nslow = rk.LFedNest(upper_step=0.01, lower_step=0.1)\n")
    line = ["tune", "quadratic", "-a", "mine.py:slow", "--clients", 3, "--rounds", 4, "--over", "upper_step"]
    said = done(*line, "--candidates", 4, "--out", "t")
    assert "rookery run quadratic --algorithm mine.py:slow" in said
    assert "At most 4 were allowed" in said
    best = json.loads((here / "t" / "tuning.json").read_text())
    assert best["out"] == "t"
    told = json.loads(done("run", "--config", "t/best.toml", "--json"))
    assert told["hyperparameters"]["upper_step"] == best["best"]["upper_step"]
    assert told["last"]["distance"] == pytest.approx(best["value"], rel=1e-6)


# Lists.


def test_lists_are_sorted_whatever_the_capitals() -> None:
    names = [entry["name"] for entry in json.loads(done("list", "algorithms", "--json"))["algorithms"]]
    assert names == sorted(names, key=str.casefold)


@pytest.mark.parametrize("name", algorithms.__all__)
def test_every_hyperparameter_has_a_meaning(name: str) -> None:
    for row in cli.listing._hyperparameters(registry.find_algorithm(name)):
        assert row["meaning"], row
        assert row["setting"] in MEANINGS


@pytest.mark.parametrize("name", registry.TASKS)
def test_every_setting_has_a_meaning_and_a_default(name: str) -> None:
    rows = {row["setting"]: row for row in cli.listing._task_settings(registry.TASKS[name])}
    assert all(row["meaning"] for row in rows.values()), rows
    counted = {"clients", "nodes", "train"} & rows.keys()  # or, where the clients are given, who of them trains
    assert counted
    assert all(rows[setting]["default"] != "none" for setting in counted)


@pytest.mark.slow
def test_completion_of_names() -> None:
    source = "import sys; sys.argv = ['rookery']; from rookery.cli import main; main()"
    environment = {"_ROOKERY_COMPLETE": "complete_bash", "COMP_WORDS": "rookery run quad", "COMP_CWORD": "2"}

    done = subprocess.run(
        [sys.executable, "-c", source], env={**os.environ, **environment}, capture_output=True, text=True, check=False
    )
    assert done.stdout.split() == ["quadratic"]
