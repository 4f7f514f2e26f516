"""The examples of three and of four hospitals, as their README has them: real processes, on this machine."""

import json
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

import rookery as rk
from rookery.cli.site import read_module
from rookery.engines.federation.policy import Policy

EXAMPLE = Path(__file__).parents[3] / "examples" / "hospitals"
ROUNDS = 40
SOURCES = ("laboratory", "letter", "billing")
SITES = ("general", "riverside", "university")
HEART_SITES = ("cleveland", "hungary", "switzerland", "va")
MODULES = ("compare", "make_data", "study", "hospital", "heart", "result")


@pytest.fixture
def example(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Its modules."""
    for name in MODULES:  # others' studies are called so, too
        sys.modules.pop(name, None)
    monkeypatch.syspath_prepend(str(EXAMPLE))
    import compare
    import make_data
    import study

    yield compare, make_data, study
    for name in MODULES:
        sys.modules.pop(name, None)


def levels(example: Any) -> dict[str, Any]:
    _, make_data, study = example
    return by_level(study, make_data.tables(0))


def by_level(study: Any, tables: dict[str, pd.DataFrame]) -> dict[str, Any]:
    own = [study.levels(table) for table in tables.values()]
    return {level: [rows[level] for rows in own] for level in own[0]}


def simulated(example: Any) -> pd.DataFrame:
    _, given, measure = example[0].nested(levels(example))
    task = example[2].task()
    how = {"every": task.every, "evaluate": task.evaluate, "evaluate_client": measure}
    return rk.solve(*given, rounds=ROUNDS, **how).history


def test_the_tables_are_unequal_and_one_source_is_often_wrong(example: Any) -> None:
    tables = example[1].tables(0)
    assert [len(table) for table in tables.values()] == [260, 200, 109]
    again = example[1].tables(0)
    assert all(table.equals(again[name]) for name, table in tables.items())
    together = pd.concat(list(tables.values()))
    assert len(together) == 569
    cancers = (
        together[together["use"] == "train"].groupby("source")["diagnosis"].apply(lambda d: (d == "malignant").mean())
    )
    assert cancers["billing"] < 0.2 < cancers["laboratory"]  # 37 % of the patients have one
    assert {len(table[table["use"] == "check"]) for table in tables.values()} == {8}


def test_a_table_that_is_not_as_agreed_is_refused(example: Any) -> None:
    table = example[1].tables(0)["university"]
    study = example[2]
    with pytest.raises(ValueError, match="no column 'worst_area'"):
        study.rows(table.drop(columns="worst_area"))
    with pytest.raises(ValueError, match="a source is one of"):
        study.rows(table.assign(source="hearsay"))


def test_the_readme_names_files_and_rules_that_there_are() -> None:
    text = (EXAMPLE / "README.md").read_text()
    for name in re.findall(r"`([a-z_]+\.(?:py|toml))`", text):
        assert (EXAMPLE / name).exists() or name == "rookery.toml", name  # which FLARE's folders have
    rules = Policy.read(EXAMPLE / "policy.toml")
    assert rules.aggregated is True


def test_a_hospitals_own_file_is_not_compared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, example: Any) -> None:
    """As the example has it: the task is imported from study.py, which is all that counts."""
    table = tmp_path / "patients.csv"
    example[1].tables(0)["university"].to_csv(table, index=False)
    monkeypatch.setenv("HOSPITAL_CSV", str(table))
    monkeypatch.setattr(sys, "path", [*sys.path])
    found = read_module(EXAMPLE / "hospital.py")[1].declared
    assert found is not None
    assert (set(found.files), found.private) == ({"study.py"}, None)
    assert str(tmp_path) not in json.dumps(found.words())


# Four hospitals.


@pytest.fixture
def four(example: Any) -> tuple[Any, Any, dict[str, pd.DataFrame]]:
    """The modules heart and result, and the tables."""
    import heart
    import result

    return heart, result, example[1].heart_tables(0)


def averaged(own: list[Any], rounds: int, step: float, steps: int, penalty: float) -> np.ndarray:
    """FedAvg's weights and intercept on all rows, in plain NumPy."""
    x = np.zeros(own[0]["features"].shape[1] + 1)
    penalties = np.array([penalty] * (len(x) - 1) + [0])
    sizes = np.array([len(rows["ill"]) for rows in own])
    for _ in range(rounds):
        ends = []
        for rows in own:
            z, end = np.column_stack([rows["features"], np.ones(len(rows["ill"]))]), x
            for _ in range(steps):
                end = end - step * (z.T @ (1 / (1 + np.exp(-z @ end)) - rows["ill"]) / len(z) + penalties * end)
            ends.append(end)
        x = sizes @ np.array(ends) / sizes.sum()
    return x


def test_own_intercepts_are_right_on_average_where_fedavg_is_not(four: Any) -> None:
    """The study in simulation: FedAvg's part is FedAvg, and the other one has each hospital's share of ill patients."""
    heart, result, tables = four
    assert [len(table) for table in tables.values()] == [303, 294, 123, 200]
    assert tuple(tables) == HEART_SITES
    task, own = heart.task(), by_level(heart, tables)
    clients = rk.Clients(**own, weights="size")
    method = task.algorithm(rk.FedBiOLocal)
    how = {"every": task.rounds, "evaluate_client": task.evaluate_client, "progress": False}
    run = rk.solve(task.problem, clients, method, task.init, task.rounds, **how)
    wanted = averaged(own["lower"], task.rounds, method.upper_step, method.local_steps, heart.PENALTY)
    np.testing.assert_allclose([*run.x["average"]["w"], run.x["average"]["b"]], wanted, atol=1e-4)
    wrong, accuracy = [], []
    for k, rows in enumerate(own["lower"]):
        memory = {"intercept": run.memory["intercept"][k], "alone": {n: v[k] for n, v in run.memory["alone"].items()}}
        models = heart.models(run.x, memory)
        chances = {name: 1 / (1 + np.exp(-heart.scores(model, rows))) for name, model in models.items()}
        wrong.append({name: abs(np.mean(p - rows["ill"])) for name, p in chances.items()})
        accuracy.append([float(heart.accuracy(model, own["test"][k])) for model in models.values()])
        assert len(rows["ill"]) + len(own["test"][k]["ill"]) == [303, 261, 46, 130][k]
    assert max(each["own_intercept"] for each in wrong) < 0.01
    assert min(each["fedavg"] for each in wrong[2:]) > 0.2  # Switzerland and VA

    sizes = np.array([len(rows["ill"]) for rows in own["lower"]])
    reported = run.history.iloc[-1][[f"{name}_accuracy" for name in heart.MODELS]]
    np.testing.assert_allclose(reported.to_numpy(float), sizes @ np.array(accuracy) / sizes.sum(), atol=1e-5)
    found = result.result(run.x, tables["va"])  # what the hospital finds out for itself
    np.testing.assert_allclose(list(found.values()), readme_results()["va"], atol=0.0006)
    np.testing.assert_allclose([found[name] for name in heart.MODELS], accuracy[3], atol=0.03)


def readme_results() -> dict[str, list[float]]:
    """The README's table of the four hospitals."""
    rows = re.findall(r"^([a-z]+) +(\d+(?: +[\d.]+){4})$", (EXAMPLE / "README.md").read_text(), flags=re.MULTILINE)
    return {name: [float(word) for word in numbers.split()] for name, numbers in rows}


def test_a_heart_table_is_standardised_by_the_rows_to_train_on(four: Any) -> None:
    heart, _, tables = four
    rows = heart.levels(tables["va"])
    np.testing.assert_allclose(rows["lower"]["features"].mean(axis=0), 0, atol=1e-5)
    changed = tables["va"].copy()
    changed.loc[changed["use"] == "test", "age"] += 30
    np.testing.assert_array_equal(heart.levels(changed)["lower"]["features"], rows["lower"]["features"])
    with pytest.raises(ValueError, match="no column 'ecg'"):
        heart.levels(tables["va"].drop(columns="ecg"))


def commands() -> dict[str, list[str]]:
    """The README's commands, by the word that follows `rookery`."""
    found: dict[str, list[str]] = {}
    for block in re.findall(r"```console\n(.*?)```", (EXAMPLE / "README.md").read_text(), flags=re.DOTALL):
        for line in re.sub(r"\\\n\s*", "", block).splitlines():
            words = re.search(r"rookery (federation|serve|site)\b", line)
            if words:
                found.setdefault(words[1], []).append(line)
    return found


def a_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


class Running:
    """Processes of the README's commands, in a folder with copies of the example's files."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.all = folder, []
        for file in EXAMPLE.glob("*.py"):
            (folder / file.name).write_bytes(file.read_bytes())

    def start(self, command: str, name: str, folder: Path | None = None) -> Any:
        """Begin, in a folder of its own if one is given; what it says is in a file of that name."""
        words = shlex.split(command)
        own = dict(word.split("=", 1) for word in words if re.match(r"[A-Z_]+=", word))
        words = [sys.executable, "-m", "rookery.cli", *words[len(own) + 1 :]]
        out = (self.folder / f"{name}.log").open("ab")
        process = subprocess.Popen(words, cwd=folder or self.folder, env=os.environ | own, stdout=out, stderr=out)
        self.all.append(process)
        return process

    def said(self, name: str) -> str:
        return (self.folder / f"{name}.log").read_text()

    def until(self, name: str, text: str, seconds: float = 240.0) -> None:
        end = time.monotonic() + seconds
        while text not in self.said(name):
            assert time.monotonic() < end, self.said(name)
            time.sleep(0.05)


@pytest.fixture
def running(tmp_path: Path) -> Iterator[Running]:
    own = Running(tmp_path)
    yield own
    for process in own.all:
        process.kill()
        process.wait()


@pytest.mark.slow
def test_the_readme_on_one_machine(running: Running, example: Any) -> None:
    """The study gives the simulation's numbers, though a site is killed and started again in the middle."""
    there, port = commands(), a_port()
    for table, rows in example[1].tables(0).items():
        (running.folder / "data").mkdir(exist_ok=True)
        rows.to_csv(running.folder / "data" / f"{table}.csv", index=False)
    init = there["federation"][0].replace("--coordinator localhost", f"--coordinator localhost:{port}")
    assert running.start(init, "init").wait() == 0, running.said("init")
    serve = there["serve"][0].replace("--status 9555", f"--status {a_port()}") + f" --rounds {ROUNDS}"
    coordinator = running.start(serve, "serve")
    sites = {name: next(c for c in there["site"] if f"kits/{name}" in c) for name in SITES}
    processes = {name: running.start(command, name) for name, command in sites.items()}
    running.until("serve", "All sites are there.")
    checkpoint = running.folder / "runs" / "first" / "checkpoint"
    end = time.monotonic() + 240
    while not list(checkpoint.glob("round_[1-9]*")):
        assert time.monotonic() < end, running.said("serve")
        time.sleep(0.02)
    processes["university"].send_signal(signal.SIGKILL)
    running.until("serve", "The run pauses: 2 of 3 replies")
    processes["university"] = running.start(sites["university"], "university")
    running.until("serve", "The run goes on.")
    assert coordinator.wait(240) == 0, running.said("serve")
    for name, process in processes.items():
        assert process.wait(30) == 0, running.said(name)
        assert "The run is over." in running.said(name)
    history = pd.read_csv(running.folder / "runs" / "first" / "history.csv")
    alone = simulated(example)
    columns = ["round", "exchanges", "bytes_up", "accuracy", "missed", *map("trust_{}".format, SOURCES)]
    np.testing.assert_allclose(history[columns], alone[columns], rtol=1e-3)
    last = history.iloc[-1]
    assert last["accuracy"] > 0.95
    assert last["trust_billing"] < 0.1 < 0.5 < last["trust_laboratory"]


@pytest.mark.slow
def test_four_hospitals_as_the_readme_has_them(running: Running, example: Any) -> None:
    """Every site keeps its own part in its folder, and finds its result in the run's files and its own table."""
    there, port = commands(), a_port()
    (running.folder / "data" / "heart").mkdir(parents=True)
    for table, rows in example[1].heart_tables(0).items():
        rows.to_csv(running.folder / "data" / "heart" / f"{table}.csv", index=False)
    heart = {what: [c for c in lines if "kits/heart" in c] for what, lines in there.items()}
    init = heart["federation"][0].replace("--coordinator localhost", f"--coordinator localhost:{port}")
    assert running.start(init, "init").wait() == 0, running.said("init")
    coordinator = running.start(heart["serve"][0], "serve")
    assert len(heart["site"]) == len(HEART_SITES)
    processes = {name: running.start(command, name) for name, command in zip(HEART_SITES, heart["site"], strict=True)}
    assert coordinator.wait(240) == 0, running.said("serve")
    for name, process in processes.items():
        assert process.wait(30) == 0, running.said(name)
        assert "The run is over." in running.said(name)
    run = running.folder / "runs" / "heart"
    last = pd.read_csv(run / "history.csv").iloc[-1]
    assert last["fedavg_accuracy"] + 0.03 < last["own_intercept_accuracy"]
    (line,) = re.findall(r"python (result\.py .* --picture result\.png)", (EXAMPLE / "README.md").read_text())
    shown = subprocess.run([sys.executable, *line.split()], cwd=running.folder, capture_output=True, text=True)
    assert shown.returncode == 0, shown.stderr
    table = {row.split()[0]: [float(word) for word in row.split()[1:]] for row in shown.stdout.splitlines()[1:]}
    assert tuple(table) == HEART_SITES
    for name, printed in readme_results().items():
        np.testing.assert_allclose(table[name], printed, atol=0.0006)
    assert (running.folder / "result.png").stat().st_size > 5000


@pytest.mark.slow
@pytest.mark.parametrize(
    ("before", "after", "line"),
    [
        (
            '("laboratory", "letter", "billing")',
            '("letter", "laboratory", "billing")',
            "study.py: SOURCES[0] is 'letter' here, 'laboratory' at the coordinator.",
        ),
        ("((14, 3.5)", "((12.0, 3.5)", "study.py: PUBLISHED['radius'][0][0] is 12.0 here, 14 at the coordinator."),
    ],
)
def test_a_hospital_with_another_study(running: Running, example: Any, before: str, after: str, line: str) -> None:
    """It refuses, and both sides say why; put right, though with other comments, it takes part."""
    there, port = commands(), a_port()
    (running.folder / "data").mkdir()
    for table, rows in example[1].tables(0).items():
        rows.to_csv(running.folder / "data" / f"{table}.csv", index=False)
    init = there["federation"][0].replace("--coordinator localhost", f"--coordinator localhost:{port}")
    assert running.start(init, "init").wait() == 0, running.said("init")
    own = running.folder / "university"
    own.mkdir()
    text = (EXAMPLE / "study.py").read_text()
    assert before in text
    (own / "hospital.py").write_bytes((EXAMPLE / "hospital.py").read_bytes())
    (own / "study.py").write_text(text.replace(before, after))
    serve = there["serve"][0].replace(" --status 9555", "") + " --rounds 3"
    coordinator = running.start(serve, "serve")
    site = lambda name: next(c for c in there["site"] if f"kits/{name}" in c)
    processes = [running.start(site(name), name) for name in ("general", "riverside")]
    elsewhere = re.sub(r"(data|kits|sites)/", lambda found: f"{running.folder}/{found[1]}/", site("university"))
    wrong = running.start(elsewhere, "university", own)
    running.until("serve", "university refuses: its study is not the coordinator's")
    assert line in running.said("serve")
    running.until("university", line)
    wrong.kill()
    wrong.wait()
    assert coordinator.poll() is None
    (own / "study.py").write_text(text.replace("PENALTY = 0.01", "PENALTY = 0.01  # as agreed on\n\n"))
    processes.append(running.start(elsewhere, "university", own))
    assert coordinator.wait(240) == 0, running.said("serve")
    for process in processes:
        assert process.wait(30) == 0
