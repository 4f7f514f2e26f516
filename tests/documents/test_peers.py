"""The comparison with other libraries: its rules, and the page that is made from its results."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parents[2] / "benchmarks" / "peers"


@pytest.fixture(scope="module")
def peers() -> Any:
    """The module benchmarks/peers/run.py; its neighbour `tasks` is forgotten again."""
    import importlib.util

    before = sys.path[:]
    spec = importlib.util.spec_from_file_location("peers_run", HERE / "run.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["peers_run"] = module
    spec.loader.exec_module(module)
    yield module
    sys.path[:] = before
    del sys.modules["peers_run"], sys.modules["tasks"]


def printed(peers: Any, task: str = "mlp", **changes: Any) -> dict[str, Any]:
    """What a script prints."""
    compared = {name: getattr(peers.TASKS[task], name) for name in peers.COMPARED}
    machine = {"cpu": "A", "cores": 2, "boot": "b", "run": "r"}
    found = {
        "seconds": [9.0, 5.0, 1.0, 3.0, 2.0],
        "scores": [0.1, 0.5, 0.95, 0.97, 0.98],
        "processors": [2.0] * 5,
        "versions": {"x": "1"},
    }
    return {**found, "compared": compared | changes.pop("compared", {}), "machine": machine | changes}


def row(peers: Any, name: str = "rookery", task: str = "mlp", **changes: Any) -> dict[str, Any]:
    """The row of such a script."""
    return peers.row(name, task, printed(peers, task, **changes), 10**9, 20)


def test_a_row_has_the_median_after_two_rounds_and_the_time_to_the_target(peers: Any) -> None:
    found = row(peers)
    assert (found["first"], found["round"], found["reach"]) == (9.0, 2.0, 15.0)
    assert set(found) == set(peers.COLUMNS)
    every = peers.TASKS["stocbio"].every
    assert every > 1
    assert row(peers, task="stocbio")["round"] == 2.0 / every


@pytest.mark.parametrize("name", ["cpu", "cores", "boot", "run"])
def test_a_ratio_of_measurements_from_two_machines_is_refused(peers: Any, name: str) -> None:
    one = row(peers)
    assert peers.ratio(one, row(peers, "torch"), "round") == 1.0
    with pytest.raises(ValueError, match=f"one machine and one run; rookery and torch differ in {name}"):
        peers.ratio(one, row(peers, "torch", **{name: "another"}), "round")
    with pytest.raises(ValueError, match="one machine and one run"):
        peers.ratio({**one, name: ""}, {**one, name: ""}, "round")
    with pytest.raises(ValueError, match="one machine and one run"):
        peers.table([one, row(peers, "torch", **{name: "another"})])


def test_another_task_or_another_result_is_not_compared(peers: Any) -> None:
    assert row(peers)["status"] == "measured"
    other = row(peers, "torch", compared={"batch": 1})
    assert other["status"] == "another task: batch must be 60; got 1"
    rows = [row(peers), row(peers, "pfl"), {**row(peers, "torch"), "score": 0.5}, other]
    peers.check_scores(rows)
    assert [r["status"].split(":")[0] for r in rows] == ["measured", "measured", "another result", "another task"]
    assert "\n- plain PyTorch: another result: ends at 0.500, the median is 0.980\n" in peers.table(rows)


def test_clones_must_be_given_and_at_the_pinned_commit(peers: Any, tmp_path: Path) -> None:
    assert "give --benchmark-bilevel PATH" in peers.missing_code(peers.PEERS["benchmark"], None)
    assert "must be at 575d2af" in peers.missing_code(peers.PEERS["fednest"], tmp_path)


def test_lines_are_logical_ones_without_comments_and_docstrings(peers: Any, tmp_path: Path) -> None:
    path = tmp_path / "script.py"
    path.write_text('"""What it does."""\n\n# why\nx = [\n    1,\n]\n\n\ndef f():\n    """Return x."""\n    return x\n')
    assert peers.logical_lines(path) == 3


def test_the_committed_results_are_of_one_run_with_six_peers_and_two_nested_ones(peers: Any) -> None:
    rows = peers.read()
    measured = [r for r in rows if r["status"] == "measured"]
    assert all(tuple(r) == peers.COLUMNS for r in rows)
    assert len({tuple(r[name] for name in peers.MACHINE) for r in measured}) == 1
    assert len({r["peer"] for r in measured} - {"rookery"}) >= 6
    assert len({r["peer"] for r in measured if r["task"] in peers.NESTED} - {"rookery"}) >= 2
    planned = {(task, name) for name, p in peers.PEERS.items() for tasks in p.scripts.values() for task in tasks}
    assert {(r["task"], r["peer"]) for r in rows} == planned
    assert all(r["status"] for r in rows)


def test_the_page_has_the_table_of_the_committed_results(peers: Any) -> None:
    page = peers.PAGE.read_text(encoding="utf-8")
    assert peers.with_table(page, peers.read()) == page
    assert page.count(peers.MARKS[0]) == page.count(peers.MARKS[1]) == 1


def test_every_peer_has_its_requirements_pinned(peers: Any) -> None:
    for name in set(peers.PEERS) - {"rookery"}:  # which has the repository's constraints
        text = (HERE / "requirements" / f"{name}.txt").read_text(encoding="utf-8")
        wanted = [line for line in text.splitlines() if not line.startswith("#")]
        assert wanted, name
        assert all("==" in line for line in wanted), name


def test_a_script_prints_what_a_row_needs(peers: Any, capsys: pytest.CaptureFixture[str]) -> None:
    clock = sys.modules["tasks"].Clock(peers.TASKS["mlp"])
    for score in (0.1, 0.2, 0.93):
        clock.lap(lambda score=score: score)
    clock.print(["numpy"], **{name: getattr(peers.TASKS["mlp"], name) for name in peers.COMPARED})
    found = peers.row("torch", "mlp", json.loads(capsys.readouterr().out), 1, 1)
    assert found["status"] == "measured"
    assert found["score"] == 0.93
    assert found["boot"]
