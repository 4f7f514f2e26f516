"""`--clock` and its companions on the command line: the speeds they mean, what is written, and what is refused."""

import json
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import scipy.stats
from tests.cli.test_private_runs import invoke, refused

import rookery as rk
from rookery import report
from rookery.cli.speeds import read_clock
from rookery.report import html

TASK = ["quadratic", "--clients", "5", "--algorithm", "FedBiO"]
LATE = ["--clock", "compute=lognormal:50:1,latency=0.1", "--deadline", "0.2"]


@pytest.fixture(scope="module")
def timed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs") / "timed"
    result = invoke("run", *TASK, *LATE, "--rounds", 2, "--every", 1, "--out", folder)
    assert result.exit_code == 0, result.output
    assert "simulated seconds" in result.stdout
    return folder


def test_a_run_is_that_of_python(timed: Path) -> None:
    task = rk.tasks.quadratic(clients=5)
    clock = rk.Clock(compute=scipy.stats.lognorm(1.0, scale=50.0), latency=0.1)
    given = {"evaluate": task.evaluate, "clock": clock, "faults": rk.Faults(deadline=0.2)}
    run = rk.solve(task.problem, task.clients, task.algorithm(rk.FedBiO), task.init, 2, **given)
    described, history = report.read_run(timed)
    for column in ("clock", "missing", task.metric):
        np.testing.assert_allclose(history[column], run.history[column], rtol=1e-7)
    assert history["missing"].iloc[-1] > 0
    assert described["channel"] == {"clock": LATE[1], "deadline": 0.2}
    assert described["clock"] == pytest.approx(history["clock"].iloc[-1])


def test_it_can_be_repeated_and_resumed(timed: Path, tmp_path: Path) -> None:
    config = ["run", "--config", timed / "run.toml"]
    assert invoke(*config, "--out", tmp_path / "again").exit_code == 0
    assert invoke(*config, "--out", tmp_path / "again", "--rounds", 3, "--resume").exit_code == 0
    first, again = (pd.read_csv(folder / "history.csv") for folder in (timed, tmp_path / "again"))
    assert again["clock"].tolist()[:3] == pytest.approx(first["clock"].tolist())
    assert len(again) == 4
    other = refused(*config, "--out", tmp_path / "again", "--clock", "compute=3", "--resume")
    assert f"its clock is {LATE[1]}, here it is compute=3" in other


def test_an_asynchronous_run_is_that_of_python_and_can_be_resumed(tmp_path: Path) -> None:
    late = ["--clock", "latency=lognormal:1:1", "--asynchronous", 2, "--staleness", 1, "--oldest", 3]
    first = ["run", *TASK, *late, "--rounds", 2, "--every", 1, "--out", tmp_path / "r"]
    assert invoke(*first).exit_code == 0
    resumed = invoke("run", "--config", tmp_path / "r" / "run.toml", "--out", tmp_path / "r", "--rounds", 4, "--resume")
    assert resumed.exit_code == 0, resumed.output
    assert "4 rounds of 2 replies" in resumed.stdout
    task = rk.tasks.quadratic(clients=5)
    how = {"clock": rk.Clock(latency=scipy.stats.lognorm(1.0, scale=1.0)), "evaluate": task.evaluate, "every": 1}
    how["asynchronous"] = rk.Asynchronous(2, 1.0, 3)
    run = rk.solve(task.problem, task.clients, task.algorithm(rk.FedBiO), task.init, 4, **how)
    described, history = report.read_run(tmp_path / "r")
    for column in ("clock", "staleness", task.metric):
        np.testing.assert_allclose(history[column], run.history[column], rtol=1e-7)
    assert described["channel"] == {"clock": late[1], "asynchronous": 2, "staleness": 1.0, "oldest": 3}
    other = refused(*first, "--rounds", 6, "--resume", "--asynchronous", 3)
    assert "its asynchronous is 2, here it is 3" in other


def test_runs_are_compared_by_the_clock(timed: Path, tmp_path: Path) -> None:
    compared = invoke("compare", timed, "--by", "clock", "--out", tmp_path / "c.png", "--json")
    assert compared.exit_code == 0, compared.output
    data = json.loads(compared.stdout)
    assert data["runs"][0]["clock"] == pytest.approx(pd.read_csv(timed / "history.csv")["clock"].iloc[-1])
    assert invoke("report", timed, "--out", tmp_path / "r.html").exit_code == 0
    history = pd.read_csv(timed / "history.csv")
    page = html.payload(*html.read([timed]))
    assert page["runs"][0]["data"]["clock"] == pytest.approx(history["clock"].tolist())
    assert "clock" in [axis["name"] for axis in page["across"]]
    assert report.cost(history) == "clock"
    assert report.cost(history, history.drop(columns="clock")) == "exchanges"
    history.drop(columns="clock").to_csv(tmp_path / "untimed.csv", index=False)
    without = refused("compare", timed, tmp_path / "untimed.csv", "--by", "clock", "--out", tmp_path / "c.png")
    assert "--by clock needs runs that record clock" in without


def test_a_search_by_the_clock_writes_a_run_that_can_be_repeated(tmp_path: Path) -> None:
    clock = ["--clock", "compute=10,latency=1", "--until", 48, "--over", "local_steps=1,3"]
    tuned = invoke("tune", *TASK, *clock, "--rounds", 60, "--out", tmp_path / "t", "--json")
    assert tuned.exit_code == 0, tuned.output
    data = json.loads(tuned.stdout)
    assert data["until"] == 48
    assert data["rounds"] == data["candidates"][0]["rounds"]
    assert f"--rounds {data['rounds']} --clock compute=10,latency=1 --set local_steps=" in data["run"]
    assert "Increase --rounds" not in tuned.stderr
    best = (tmp_path / "t" / "best.toml").read_text()
    assert 'clock = "compute=10,latency=1"' in best
    assert f"rounds = {data['rounds']}" in best
    assert invoke("run", "--config", tmp_path / "t" / "best.toml", "--out", tmp_path / "best").exit_code == 0
    rounds, seconds = pd.read_csv(tmp_path / "best" / "history.csv")[["round", "clock"]].iloc[-1]
    assert rounds == data["rounds"]
    assert seconds <= 48 < seconds * (rounds + 1) / rounds
    short = invoke("tune", *TASK, *clock, "--rounds", 9, "--out", tmp_path / "short", "--quiet")
    assert "The best candidate ran all 9 rounds, perhaps in less than 48 s. Increase --rounds." in short.stderr


def test_files_of_speeds(tmp_path: Path) -> None:
    (tmp_path / "speeds.csv").write_text("compute,latency\n1,0.5\n2,0.25\n")
    (tmp_path / "trace.csv").write_text("1,2\n3,4\n5,6\n")
    table = read_clock(f"{tmp_path}/speeds.csv,uplink=1e3,seed=4")
    assert table.compute.tolist() == [1, 2]
    assert table.latency.tolist() == [0.5, 0.25]
    assert (table.uplink, table.downlink, table.seed) == (1000.0, np.inf, 4)
    assert read_clock(f"compute={tmp_path}/trace.csv").compute.tolist() == [[1, 2], [3, 4], [5, 6]]
    (tmp_path / "wrong.csv").write_text("compute,speed\n1,2\n")
    said = refused("run", *TASK, "--clock", f"{tmp_path}/wrong.csv")
    assert "There is no speed of --clock called 'speed'" in said
    said = refused("run", *TASK, "--clock", f"{tmp_path}/speeds.csv")
    assert "compute must have a number for each of the 5 clients; got 2 numbers." in said


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--clock", "compute=-3"], "Clock: compute must be positive; got -3."),
        (["--clock", "compute=lognormal:50"], "--clock must have parts such as compute=50"),
        (["--clock", "compute=lognormal:50:-1"], "got 'compute=lognormal:50:-1'"),
        (
            ["--clock", "compute"],
            "--clock must have parts such as compute=50, or name a CSV file; 'compute' is neither.",
        ),
        (["--clock", "upload=3"], "There is no speed of --clock called 'upload'; there are: compute"),
        (["--clock", "compute=1,compute=2"], "--clock must give compute once"),
        (["--clock", "compute=no.csv"], "no.csv cannot be read"),
        (["--deadline", 3], "--deadline needs --clock"),
        (["--first", 3], "--first needs --clock"),
        (["--correct"], "--correct needs --clock"),
        (["--asynchronous", 2], "asynchronous: a simulation needs the speeds of clients; got clock=None"),
        (["--staleness", 2], "--staleness needs --asynchronous"),
        (["--oldest", 2], "--oldest needs --asynchronous"),
        (["--asynchronous", 0], "Asynchronous: buffer must be an integer of at least 1; got 0."),
        (["--clock", "compute=50", "--correct"], "Faults: correct must be False without deadline or first"),
        (["--clock", "compute=50", "--deadline", "0.001"], "deadline must leave at least 1 of the clients the time"),
    ],
)
def test_what_is_refused_is_refused_before_anything_is_written(arguments: list[str], said: str, tmp_path: Path) -> None:
    assert said in refused("run", *TASK, *arguments, "--out", tmp_path / "r")
    assert not (tmp_path / "r").exists()


def test_a_budget_needs_a_clock() -> None:
    assert "--until needs --clock" in refused("tune", *TASK, "--until", 3)
