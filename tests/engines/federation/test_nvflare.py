"""Runs over a provisioned FLARE federation on this machine: a server, three sites, mutual TLS, no shipped code."""

import dataclasses
import importlib.util
import json
import os
import shutil
import signal
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import orbax.checkpoint as ocp
import pandas as pd
import pytest
from tests.engines.federation.studies import in_memory, responders, without_data
from typer.testing import CliRunner

import rookery as rk
from rookery import cli
from rookery.engines import engine
from rookery.engines.engine import Job
from rookery.engines.federation import entropy, supervisor
from rookery.engines.federation.audit import FILE, read
from rookery.engines.federation.transports import nvflare

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("nvflare") is None, reason="needs pip install 'rookery[nvflare]'"),
    pytest.mark.xdist_group("nvflare"),
]
HERE = Path(__file__).parent
SITES = ["site-1", "site-2", "site-3"]
TASKS = ["flare_study:TASK", "flare_study:PERSONAL", "nowhere.at.all:task"]  # that the server lists
MODULE = """\
import sys
sys.path.append({here!r})
import flare_study
task = flare_study.{task}

def data():
    rows = flare_study.rows({site})
    return {data}
"""


@pytest.fixture(scope="session")
def federation(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    sys.path.append(str(HERE))
    from flare_loopback import Loopback

    source = Path(rk.__file__).parents[1]
    made = Loopback(tmp_path_factory.mktemp("flare"), SITES, [source])
    (made.kit("localhost") / "local" / "rookery.toml").write_text(
        f"path = [{json.dumps(str(HERE))}]\ntasks = {json.dumps(TASKS)}\n"
    )
    try:
        made.start_all(lambda: supervisor.session(made.admin))
        yield made
    finally:
        made.stop()


def settle(federation: Any, task: str, odd: dict[str, str] | None = None, policy: str = "") -> None:
    """Have the sites bring their data to this task, one of them perhaps to another."""
    for number, name in enumerate(SITES):
        which = (odd or {}).get(name, task)
        data = '{"upper": rows}' if which == "PERSONAL" else '{"lower": rows, "upper": rows}'
        local = federation.kit(name) / "local"
        (local / "hospital.py").write_text(MODULE.format(here=str(HERE), task=which, site=number, data=data))
        (local / "policy.toml").write_text(policy)
        (local / "rookery.toml").write_text('module = "local/hospital.py"\npolicy = "local/policy.toml"\n')


def submitted(federation: Any, out: Path, *words: str) -> Any:
    given = ["--admin", str(federation.admin), "--out", str(out), "--deadline", "60", *words]
    return CliRunner().invoke(cli.app, ["flare", "submit", *given])


def simulated(task: Any, method: Any, rounds: int, **more: Any) -> rk.Run:
    options = {"evaluate": task.evaluate, "evaluate_client": task.evaluate_client, "every": 1, **more}
    return rk.solve(task.problem, task.clients, method, task.init, rounds, **options)


def whole(name: str) -> Any:
    """The task with everybody's data."""
    sys.path.append(str(HERE))
    import flare_study

    each = [flare_study.rows(i) for i in range(3)]
    if name == "PERSONAL":
        return flare_study.personal(rk.Clients(upper=each))
    return flare_study.nested(rk.Clients(lower=each, upper=each))


def agree(out: Path, run: rk.Run) -> None:
    """State and history are those of the simulation."""
    with np.load(out / "state.npz") as state:
        np.testing.assert_allclose(state["x"], run.x, rtol=0, atol=1e-10)
    history = pd.read_csv(out / "history.csv")
    names = [name for name in run.history.columns if name != "seconds" and "_q" not in name]
    assert not [name for name in history if "_q" in name]  # quantiles of three would show a site's own
    np.testing.assert_allclose(history[names], run.history[names], rtol=0, atol=1e-10)


@pytest.mark.parametrize(
    ("task", "method"),
    [
        ("TASK", rk.FedNest(upper_step=0.1, lower_step=0.1, hessian_step=0.1)),
        ("PERSONAL", rk.Ditto(local_steps=2, personal_steps=3)),
    ],
    ids=["FedNest", "Ditto"],
)
def test_a_run_has_the_simulations_numbers(federation: Any, tmp_path: Path, task: str, method: Any) -> None:
    settle(federation, task)
    given = [f"--set={name}={value}" for name, value in vars(method).items() if value != getattr(type(method), name)]
    done = submitted(federation, tmp_path, f"flare_study:{task}", "--algorithm", type(method).__name__, *given)
    assert done.exit_code == 0, done.output + federation.logs()
    agree(tmp_path, simulated(whole(task), method, 6))
    outcome = json.loads((tmp_path / "outcome.json").read_text())
    assert outcome["ended"] == "done"


def checkpoint(federation: Any, run: str) -> Path:
    """The last one of a run, at the server."""
    folder = federation.kit("localhost") / "rookery" / "runs" / run / "checkpoint"
    return max(folder.glob("round_*[0-9]"), key=lambda place: int(place.name[6:]))


PRIVATE = ["flare_study:TASK", "--algorithm", "FedBiO", "--delta", "1e-3"]


def test_a_run_that_is_private_for_each_client_ends_with_its_budget(
    federation: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the server's noise, the simulation has the same numbers, and the same ε."""
    settle(federation, "TASK")
    given = ["--private", "8", "--noise", "2", "--rounds", "40", "--run", "clients"]
    done = submitted(federation, tmp_path, *PRIVATE, *given)
    assert done.exit_code == 3, done.output + federation.logs()
    assert "the budget of ε = 8 at δ = 0.001 is spent after round 4 of 40" in done.output
    kept = ocp.PyTreeCheckpointer().restore(checkpoint(federation, "clients") / "arrays")["carry"]
    noise = kept[max(kept, key=int)]
    assert (noise.shape, noise.dtype) == ((2,), np.uint32)
    monkeypatch.setattr(engine, "noise_root", lambda job: noise)
    run = simulated(whole("TASK"), rk.FedBiO(), 40, channel=rk.private(8, 1e-3, noise=2.0))
    assert run.spent
    agree(tmp_path, run)
    described = json.loads((tmp_path / "run.json").read_text())
    assert (described["spent"], described["rounds_done"]) == (True, run.rounds)
    assert described["epsilon"] == pytest.approx(run.history["epsilon"].iloc[-1])
    assert described["epsilon"] < 8


def test_a_run_that_is_private_for_each_record_ends_with_the_sites_budget(federation: Any, tmp_path: Path) -> None:
    """The rounds until then can be fetched; with the sites' secrets, a federation in one process has their numbers."""
    settle(federation, "TASK", policy="epsilon = 6.0\ndelta = 1e-3\n")
    given = [*PRIVATE, "--unit", "record", "--private", "100", "--noise", "1.5", "--run", "records"]
    done = submitted(federation, tmp_path / "first", *given, "--rounds", "30")
    assert done.exit_code == 1, done.output + federation.logs()
    assert "refuses: its privacy budget is spent: ε = " in done.output
    assert "submitted again" not in done.output
    rounds = int(checkpoint(federation, "records").name[6:])
    assert 0 < rounds < 30
    done = submitted(federation, tmp_path / "then", *given, "--rounds", str(rounds))
    assert done.exit_code == 0, done.output + federation.logs()
    task = whole("TASK")
    channel = rk.private(100, 1e-3, noise=1.5, unit="record")
    job = Job(task.problem, task.clients, rk.FedBiO(), task.init, 3, 0, channel)
    cost = pd.read_csv(tmp_path / "then" / "history.csv")["epsilon"].iloc[-1]
    assert cost < 6
    for i, name in enumerate(SITES):
        place = federation.kit(name) / "rookery" / "memory"
        assert read(place / FILE)[1].spending.epsilon(1e-3) == pytest.approx(cost)
        (tmp_path / str(i)).mkdir()
        shutil.copy(place / entropy.FILE, tmp_path / str(i))
    alone = in_memory(responders(job, tmp_path))
    task = dataclasses.replace(task, clients=without_data(job).clients)
    run = simulated(task, rk.FedBiO(), rounds, channel=channel, engine=alone)
    agree(tmp_path / "then", run)


@pytest.mark.parametrize(
    ("policy", "given", "line"),
    [
        ("", ["--private", "8", "--algorithm", "FedNest"], "The exchange 'x' carries bookkeeping without a bound"),
        ("epsilon = 6.0\ndelta = 1e-3\n", ["--private", "8"], "so the run must hide single records"),
    ],
)
def test_a_private_run_that_is_refused_leaves_nothing_at_the_server(
    federation: Any, tmp_path: Path, policy: str, given: list[str], line: str
) -> None:
    settle(federation, "TASK", policy=policy)
    done = submitted(federation, tmp_path, *PRIVATE, *given, "--run", "refused")
    assert done.exit_code == 1, done.output + federation.logs()
    assert line in done.output
    assert not (federation.kit("localhost") / "rookery" / "runs" / "refused").exists()


def test_a_job_whose_worker_is_killed_goes_on_from_its_checkpoint(federation: Any, tmp_path: Path) -> None:
    settle(federation, "PERSONAL")
    killed: list[int] = []

    def kill() -> None:
        folder, end = federation.kit("localhost") / "rookery" / "runs" / "killed" / "checkpoint", time.monotonic() + 120
        while time.monotonic() < end:
            if folder.exists() and any(int(p.name[6:]) >= 5 for p in folder.glob("round_*[0-9]")):
                killed.extend(federation.workers("site-2"))
                for pid in killed:
                    os.kill(pid, signal.SIGKILL)
                return
            time.sleep(0.05)

    thread = threading.Thread(target=kill)
    thread.start()
    words = ["--algorithm", "Ditto", "--set", "local_steps=2", "--set", "personal_steps=3", "--rounds", "100"]
    done = submitted(federation, tmp_path, "flare_study:PERSONAL", *words, "--run", "killed")
    thread.join()
    assert done.exit_code == 0, done.output + federation.logs()
    assert killed
    assert "submitted again" in done.output
    agree(tmp_path, simulated(whole("PERSONAL"), rk.Ditto(local_steps=2, personal_steps=3), 100))


def test_shipped_code_is_refused_where_our_job_is_not(federation: Any, tmp_path: Path) -> None:
    """Every participant says `byoc: none`, and all jobs above ran."""
    job = nvflare.write_job(tmp_path / "job", {"deadline": 60.0}, SITES)
    (job / "app" / "custom").mkdir()
    (job / "app" / "custom" / "more.py").write_text("print('code')\n")
    connect = lambda: supervisor.session(federation.admin)
    with pytest.raises(supervisor.JobFailedError, match=r"(?i)byoc"):
        supervisor.supervise(connect, job, tmp_path / "out", again=0)


def test_a_site_with_another_plan_refuses_and_says_why(federation: Any, tmp_path: Path) -> None:
    settle(federation, "TASK", {"site-2": "OTHER"})
    done = submitted(federation, tmp_path, "flare_study:TASK", "--algorithm", "FedNest")
    assert done.exit_code == 1, done.output + federation.logs()
    assert "site-2 refuses: its plan differs" in done.output
    assert "submitted again" not in done.output


def test_a_site_without_a_module_refuses(federation: Any, tmp_path: Path) -> None:
    settle(federation, "TASK")
    (federation.kit("site-3") / "local" / "rookery.toml").write_text('module = "nowhere.py"\n')
    done = submitted(federation, tmp_path, "flare_study:TASK", "--algorithm", "FedNest")
    assert done.exit_code == 1, done.output + federation.logs()
    assert "site-3 refuses: its rookery.toml" in done.output


def test_a_task_that_the_server_has_not_is_told(federation: Any, tmp_path: Path) -> None:
    settle(federation, "TASK")
    done = submitted(federation, tmp_path, "nowhere.at.all:task")
    assert done.exit_code == 1, done.output + federation.logs()
    assert "There is no module" in done.output
