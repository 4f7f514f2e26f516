"""Trackers: what they are told of a run, the file of JSON lines, and what is said where a package is missing."""

import json
import math
import sys
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

import rookery as rk

SINGLE = rk.SingleLevel(lambda x, batch: jnp.mean((x - batch) ** 2))
CLIENTS = rk.Clients(upper=[np.array([1.0, 2.0]), np.array([3.0]), np.array([4.0, 5.0, 6.0])])


def solve(*callbacks: Any, rounds: int = 5, **given: Any) -> rk.Run:
    how: dict[str, Any] = {"every": 2, "cohort": 2, "seed": 3, "evaluate": lambda x, y: {"x": x}, "progress": False}
    return rk.solve(SINGLE, CLIENTS, rk.FedAvg(step=0.1), jnp.zeros(()), rounds, **how | given, callbacks=callbacks)


class Told:
    """A tracker that keeps all it is told."""

    def __init__(self) -> None:
        self.settings: list[dict[str, Any]] = []
        self.rows: list[dict[str, Any]] = []
        self.ends: list[rk.Run | None] = []

    def start(self, settings: dict[str, Any]) -> None:
        self.settings.append(settings)

    def row(self, row: dict[str, Any]) -> None:
        self.rows.append(row)

    def end(self, run: rk.Run | None) -> None:
        self.ends.append(run)


def lines(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


@pytest.mark.parametrize("engine", [rk.Simulation(), rk.Federation()])
def test_a_tracker_is_told_the_settings_every_row_and_the_end(engine: Any) -> None:
    told, seen = Told(), []
    run = solve(told, seen.append, engine=engine)
    assert isinstance(told, rk.trackers.Tracker)
    (settings,) = told.settings
    assert settings["algorithm"] == "FedAvg"
    assert settings["hyperparameters"]["step"] == 0.1
    assert [settings[name] for name in ("cohort", "seed", "rounds", "every", "clients")] == [2, 3, 5, 2, 3]
    assert settings["engine"] == type(engine).__name__
    assert told.rows == run.history.to_dict("records")
    assert told.ends == [run]
    assert [so_far.rounds for so_far in seen] == [2, 4, 5]  # functions are called as ever


def test_json_lines_hold_the_history(tmp_path: Path) -> None:
    file = tmp_path / "new" / "run.jsonl"
    run = solve(rk.trackers.JsonLines(file))
    start, *rows, end = lines(file)
    assert start["event"] == "start"
    assert start["settings"]["hyperparameters"]["step"] == 0.1
    assert rows == [{"event": "row", **row} for row in run.history.to_dict("records")]
    assert (end["event"], end["rounds"], end["interrupted"], end["stopped"]) == ("end", 5, False, None)
    assert end["exchanges"] == run.exchanges.to_dict("records")


def test_json_lines_are_there_while_the_run_goes_on(tmp_path: Path) -> None:
    counts = []
    solve(rk.trackers.JsonLines(tmp_path / "a.jsonl"), lambda run: counts.append(len(lines(tmp_path / "a.jsonl"))))
    assert counts == [3, 4, 5]


def test_what_is_not_finite_is_null(tmp_path: Path) -> None:
    solve(rk.trackers.JsonLines(tmp_path / "a.jsonl"), rounds=1, evaluate=lambda x, y: {"score": math.nan})
    assert [entry["score"] for entry in lines(tmp_path / "a.jsonl")[1:-1]] == [None, None]


def test_a_resumed_run_is_told_from_the_first_row_on(tmp_path: Path) -> None:
    file = tmp_path / "a.jsonl"
    solve(rk.trackers.JsonLines(file), lambda run: run.rounds >= 2, checkpoint=tmp_path / "c.npz")
    assert lines(file)[-1]["interrupted"]
    first = file.read_text()
    told = Told()
    run = solve(rk.trackers.JsonLines(file), told, checkpoint=tmp_path / "c.npz")
    assert told.rows == run.history.to_dict("records")
    assert file.read_text().startswith(first)  # nothing is lost
    assert [entry["event"] for entry in lines(file)] == ["start", "row", "row", "end", "start", *["row"] * 4, "end"]


def test_the_end_is_told_where_an_exception_ends_the_run(tmp_path: Path) -> None:
    def fail(run: rk.Run) -> None:
        raise ZeroDivisionError

    told = Told()
    with pytest.raises(ZeroDivisionError):
        solve(told, rk.trackers.JsonLines(tmp_path / "a.jsonl"), fail)
    assert told.ends == [None]
    assert lines(tmp_path / "a.jsonl")[-1]["interrupted"]


def test_a_round_that_fails_and_a_value_that_is_not_finite(tmp_path: Path) -> None:
    told = Told()
    with pytest.raises(rk.RoundFailedError):
        solve(told, faults=rk.Faults(dropout=0.9, minimum=2))
    assert told.ends == [None]
    far = Told()
    with pytest.warns(rk.NonFiniteWarning):
        rk.solve(SINGLE, CLIENTS, rk.FedAvg(step=1e200), jnp.ones(()), 5, callbacks=[far], progress=False)
    (run,) = far.ends
    assert run is not None
    assert run.stopped


@pytest.mark.parametrize(
    ("make", "package"),
    [
        (lambda: rk.trackers.TensorBoard("x"), "tensorboard"),
        (lambda: rk.trackers.MLflow(), "mlflow"),
        (lambda: rk.trackers.Wandb(), "wandb"),
    ],
)
def test_a_missing_package_is_named(make: Any, package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == package]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ImportError, match=rf"^This tracker needs {package}, .*: pip install {package}$"):
        make()


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (print, "callbacks must be a list of functions .*; got <built-in function print>"),
        (Told(), "callbacks must be a list of functions and of trackers .*; got <.*Told"),
        ([Told], "callbacks must be .*; it holds the class Told itself"),
        (["run.jsonl"], "callbacks must be .*; it holds 'run.jsonl'"),
    ],
)
def test_bad_callbacks(given: Any, message: str) -> None:
    with pytest.raises(TypeError, match=message):
        rk.solve(SINGLE, CLIENTS, rk.FedAvg(), jnp.zeros(()), 1, callbacks=given)


def test_json_lines_go_to_a_file(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"JsonLines: .* must be a file; it is a folder\."):
        rk.trackers.JsonLines(tmp_path)
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match=r"path must be writable; got .*file/a\.jsonl: "):
        solve(rk.trackers.JsonLines(tmp_path / "file" / "a.jsonl"), rounds=1)
