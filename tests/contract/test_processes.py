"""Several processes with several devices each give the numbers of one, and fail together, with a clear word."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

import rookery as rk
from rookery.base import processes
from rookery.testing.runs import outcome

from .cases import HARD, HOSTED, job, ragged

HERE = Path(__file__).parent
PATH = os.pathsep.join([str(HERE.parent), *sys.path])
ENVIRONMENT = {**os.environ, "PYTHONPATH": PATH, "JAX_NUM_CPU_DEVICES": "2", "JAX_ENABLE_X64": "1"}


def address() -> str:
    """One that is free."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{probe.getsockname()[1]}"


@pytest.mark.parametrize("cases", [[], pytest.param(HOSTED, marks=pytest.mark.slow)], ids=["runs", "methods"])
def test_two_processes_of_two_devices(cases: list[tuple[str, str]], tmp_path: Path) -> None:
    """Whole runs, and what they refuse; and a few rounds of each of these methods."""
    where, given = address(), ["-".join(pair) for pair in cases]
    each = [
        subprocess.Popen(
            [sys.executable, "-m", f"{HERE.name}.distributed", where, "2", str(i), str(tmp_path), *given],
            env=ENVIRONMENT,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for i in range(2)
    ]
    expected = {  # while they work
        name: outcome(rk.Simulation(block=2), job(name, ragged(kind), **HARD)) for name, kind in cases
    }
    said = [process.communicate(timeout=500) for process in each]
    lines = [[json.loads(line) for line in out.splitlines() if line.startswith("{")] for out, _ in said]
    errors = [error for _, error in said]

    assert each[0].returncode == 0, errors[0]
    told = {line["method"]: line["counts"] for line in lines[0] if "method" in line}
    assert not any("method" in line for line in lines[1])
    for name, one in expected.items():
        with np.load(tmp_path / f"{name}.npz") as found:
            leaves = [found[file] for file in found.files]
        memory = [np.stack(own) for own in zip(*one.memory, strict=True)]
        for a, b in zip(leaves, [*jax.tree.leaves(one.state), *memory], strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-10, atol=1e-10)
        assert told[name] == one.counts

    runs = [next(line for line in own if "loaded" in line) for own in lines]
    assert [own["loaded"] for own in runs] == [[0, 1], [2, 3]]
    assert runs[0]["history"] == runs[1]["history"]
    goes_on(tmp_path / "checkpoint", runs[0])

    complaints = [[line["error"] for line in own if "error" in line] for own in lines]
    assert complaints[0][:3] == complaints[1]
    for complaint, what in zip(complaints[0], ("its data is", "its step is '1.1'", "its program"), strict=False):
        assert complaint.startswith("process 1 does not agree with process 0: ")
        assert what in complaint
    assert complaints[0][3] == "process 1: OSError: client 2: no such file."
    assert each[1].returncode == 1
    assert "OSError: client 2: no such file" in errors[1]


def goes_on(checkpoint: Path, before: dict[str, Any]) -> None:
    """What two processes have saved, one goes on with: the numbers are those of a run that was never cut."""
    it = ragged("SingleLevel")
    clients = rk.Clients.from_loader(4, lambda i: {"upper": it.data["upper"][i]}, weights="size")
    method = rk.PDSGD(step=0.05, dual_step=0.1, penalty=2.0, batch_size=3)
    evaluate = lambda x, y: {"norm": float(np.linalg.norm(x))}
    measure = lambda client, x, y: {"loss": client.mean(lambda rows: it.problem.loss(x, rows), client.upper())}
    solve = lambda rounds, **given: rk.solve(
        it.problem, clients, method, it.init, rounds, cohort=3, every=2, evaluate=evaluate, evaluate_client=measure,
        keep_best="-norm", **given,
    )  # fmt: skip
    whole, gone_on = solve(6), solve(6, checkpoint=checkpoint)
    np.testing.assert_allclose(before["history"]["loss"], whole.history["loss"][:3], rtol=1e-10)
    np.testing.assert_allclose(gone_on.x, whole.x, rtol=1e-10)
    left, right = (run.history.drop(columns="seconds") for run in (whole, gone_on))
    np.testing.assert_allclose(left, right, rtol=1e-10)


def test_one_process_gathers_its_own_value() -> None:
    assert processes.ONE_PROCESS.gather({"a": 1}) == [{"a": 1}]
    assert processes.ONE_PROCESS.on_lead(lambda: 3) == 3
    assert processes.lead()
    processes.ONE_PROCESS.agree({"a": 1})


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (("localhost:1", 2, None), "must be given together, or all left out"),
        (("localhost:1", 2, 2), "process must be from 0 to 1; got 2"),
        (("localhost", 2, 0), "must have the form host:port"),
    ],
)
def test_bad_addresses(given: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        processes.start(*given)


def test_joining_changes_no_hook_and_reports_an_uncaught_error(monkeypatch: pytest.MonkeyPatch) -> None:
    registered: list[Any] = []
    reported: list[str] = []
    monkeypatch.setattr(jax.distributed, "initialize", lambda *given, **settings: None)
    monkeypatch.setattr("atexit.register", registered.append)
    monkeypatch.setattr(processes, "report_failure", reported.append)
    hook = sys.excepthook
    processes.start("localhost:1", 1, 0)
    assert sys.excepthook is hook
    (at_exit,) = registered
    monkeypatch.delattr(sys, "last_value", raising=False)
    at_exit()
    assert reported == []
    monkeypatch.setattr(sys, "last_value", OSError("no such file"), raising=False)
    at_exit()
    assert reported == ["OSError: no such file"]


# The command line.


def commands(out: Path, *more: str) -> list[subprocess.Popen[str]]:
    """Two processes that run FedBiO together."""
    where = address()
    words = ["run", "hyperrep", "--algorithm=FedBiO", "--clients=6", "--every=50", "--rounds=1000000", "--coordinator"]
    return [
        subprocess.Popen(
            [
                sys.executable,
                "-m",
                "rookery.cli",
                *words,
                where,
                "--processes",
                "2",
                "--process",
                str(i),
                "--out",
                str(out),
                *more,
            ],
            env=ENVIRONMENT,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for i in range(2)
    ]


def saved(out: Path) -> list[Path]:
    """Wait for a checkpoint."""
    for _ in range(1200):
        found = [path for path in out.glob("checkpoint/round_*") if path.name.removeprefix("round_").isdigit()]
        if len(found) > 1:
            return found
        time.sleep(0.1)
    raise AssertionError("no checkpoint was written")


@pytest.mark.slow
@pytest.mark.parametrize("victim", [0, 1])
def test_a_process_that_dies_ends_the_run_on_all(victim: int, tmp_path: Path) -> None:
    each = commands(tmp_path)
    saved(tmp_path)
    worker = subprocess.run(["pgrep", "-P", str(each[victim].pid)], capture_output=True, text=True, check=True).stdout
    os.kill(int(worker), signal.SIGKILL)
    said = [process.communicate(timeout=60)[1] for process in each]
    assert [process.returncode for process in each] == [1, 1]
    assert all("from its last checkpoint with --resume" in own.splitlines()[-1] for own in said)


@pytest.mark.slow
@pytest.mark.parametrize("what", [signal.SIGINT, signal.SIGTERM], ids=["Ctrl-C", "SIGTERM"])
def test_a_signal_to_one_stops_all(what: signal.Signals, tmp_path: Path) -> None:
    """A terminal's Ctrl-C reaches the worker itself; a scheduler's SIGTERM the process that watches over it."""
    each = commands(tmp_path)
    saved(tmp_path)
    worker = subprocess.run(["pgrep", "-P", str(each[1].pid)], capture_output=True, text=True, check=True).stdout
    os.kill(int(worker) if what is signal.SIGINT else each[1].pid, what)
    said = [process.communicate(timeout=120) for process in each]
    assert [process.returncode for process in each] == [130, 130]
    assert "Continue with --resume" in said[0][1]
    assert not [line for line in said[1][0].splitlines() if not line.startswith("[Gloo]")]  # only the first prints
    assert (tmp_path / "history.csv").exists()
