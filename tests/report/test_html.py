"""The report, without a browser: it needs nothing but itself, its data are the history, and bad input is told."""

import json
import re
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pandas as pd
import pytest
from typer.testing import CliRunner

import rookery as rk
from rookery import cli, report
from rookery.report import html

SINGLE = rk.SingleLevel(lambda x, batch: jnp.mean((x - batch) ** 2))
CLIENTS = rk.Clients(upper=[np.array([1.0, 2.0]), np.array([3.0]), np.array([4.0, 5.0, 6.0])])


def solve(seed: int = 0, step: float = 0.1, callbacks: Any = (), rounds: int = 4) -> rk.Run:
    evaluate = lambda x, y: {"loss": (x - 4) ** 2, "weight_0": 0.25, "weight_1": 0.75, "never": np.nan}
    how: dict[str, Any] = {"cohort": 2, "seed": seed, "evaluate": evaluate, "progress": False, "callbacks": callbacks}
    return rk.solve(SINGLE, CLIENTS, rk.FedAvg(step=step), jnp.zeros(()), rounds, **how)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: Any) -> dict[str, rk.Run]:
    """Saved runs by folder: two seeds and another step."""
    folder = tmp_path_factory.mktemp("runs")
    made = {}
    for name, seed, step in (("a", 0, 0.1), ("b", 1, 0.1), ("c", 0, 0.05)):
        run = made[str(folder / name)] = solve(seed, step)
        hyper = {"step": step, "optimizer": None}
        said = {"task": "line", "task_settings": {"seed": seed}, "algorithm": "FedAvg", "hyperparameters": hyper}
        report.write_run(folder / name, {**said, "seed": seed, "cohort": 2, "rounds": 4}, run, "loss")
    return made


def data(page: str) -> dict[str, Any]:
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', page, re.DOTALL)
    assert found
    return json.loads(found[1])


def written(paths: Any, out: Path) -> dict[str, Any]:
    return data(html.write([Path(path) for path in paths], out).read_text())


def test_the_data_are_the_history(runs: dict[str, rk.Run], tmp_path: Path) -> None:
    found = written(runs, tmp_path / "new" / "report.html")
    assert [line["label"] for line in found["lines"]] == ["FedAvg, step=0.1", "FedAvg, step=0.05"]
    assert [(own["line"], own["seed"]) for own in found["runs"]] == [(0, 0), (0, 1), (1, 0)]
    assert found["metrics"] == [{"name": "loss", "higher": False, "quantiles": False}]
    for run, own in zip(runs.values(), found["runs"], strict=True):
        history = run.history
        for name in ("round", "exchanges", "seconds", "loss"):
            assert own["data"][name] == pytest.approx(history[name].tolist(), rel=1e-15)  # pandas before 3
        assert own["data"]["bytes"] == (history["bytes_up"] + history["bytes_down"]).tolist()
        assert own["data"]["samples"] == (history["samples_upper"] + history["samples_lower"]).tolist()
        for name in ("gradients", "products"):
            assert own["data"][name] == history[name].tolist()
        assert own["series"] == {"0": [0.25] * 5, "1": [0.75] * 5}
        assert own["exchanges"] == run.exchanges.to_dict("records")
    assert found["runs"][2]["settings"]["step"] == 0.05
    assert {"gradients", "products"} <= {axis["name"] for axis in found["across"]}


def test_the_page_needs_nothing_but_itself(runs: dict[str, rk.Run], tmp_path: Path) -> None:
    page = html.write([Path(path) for path in runs], tmp_path / "report.html").read_text()
    assert not re.search(r"https?:|//[a-z]+\.[a-z]|@import|\bfetch\(|XMLHttpRequest", page)
    assert set(re.findall(r'\b(?:src|href)="([^"]*)"', page)) == {"data:,"}
    assert "url(" not in page
    assert "{{" not in page


def test_what_a_page_holds_does_not_end_its_script(tmp_path: Path) -> None:
    frame = pd.DataFrame({"round": [0, 1], "</script>": [1.0, 2.0]})
    page = html.render([html.Source("a", "<!-- </script>", 0, frame, {"a": "<b>"})], title="<i>{{data}}</i>")
    found = data(page)
    assert found["lines"][0]["label"] == "<!-- </script>"
    assert page.count("</script>") == 2
    assert "<title>&lt;i&gt;{{data}}&lt;/i&gt;</title>" in page


def test_quantiles_belong_to_their_metric() -> None:
    names = ["acc", *(f"acc_q{q}" for q in (0, 10, 50, 90, 100)), "other_q10"]
    frame = pd.DataFrame({"round": [0, 1], **{name: [0.1, 0.2] for name in names}})
    found = html.payload([html.Source("a", "a", 0, frame, {})])
    assert found["metrics"] == [
        {"name": "acc", "higher": True, "quantiles": True},
        {"name": "other_q10", "higher": None, "quantiles": False},
    ]
    assert found["runs"][0]["data"]["acc_q90"] == [0.1, 0.2]


def test_a_sign_tells_which_way_is_better_and_gaps_are_null() -> None:
    frame = pd.DataFrame({"round": [0, 1, 2], "served": [1.0, np.inf, np.nan], "loss": [1.0, 2.0, 3.0]})
    found = html.payload([html.Source("a", "a", 0, frame, {}, metric="-served")])
    assert found["first"] == "served"
    assert found["metrics"][0]["higher"] is False
    assert found["runs"][0]["data"]["served"] == [1.0, None, None]


def test_weights_by_group(runs: dict[str, rk.Run], tmp_path: Path) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    for name in ("run.json", "history.csv"):
        (folder / name).write_text((Path(next(iter(runs))) / name).read_text())
    (folder / "weights.csv").write_text("sample,group,weight\n0,clean,0.75\n1,wrong,0.25\n")
    (own,) = written([folder], tmp_path / "r.html")["runs"]
    assert own["weights"] == {"group": ["clean", "wrong"], "weight": [0.75, 0.25]}
    (folder / "weights.csv").write_text("sample\n0\n")
    with pytest.raises(ValueError, match=r"weights\.csv has no column `weight` of numbers"):
        html.read([folder])


def test_more_lines_than_looks() -> None:
    frame = pd.DataFrame({"round": [0], "loss": [1.0]})
    found = html.payload([html.Source(str(k), f"line {k}", 0, frame, {}) for k in range(250)])
    assert len(found["lines"]) == 250


def test_json_lines_are_runs(tmp_path: Path) -> None:
    file = tmp_path / "runs.jsonl"
    tracker = rk.trackers.JsonLines(file)
    first, second = (solve(seed, callbacks=[tracker]) for seed in (0, 1))
    found = written([file], tmp_path / "r.html")
    assert [line["label"] for line in found["lines"]] == ["FedAvg"]
    assert [own["data"]["loss"] for own in found["runs"]] == [r.history["loss"].tolist() for r in (first, second)]
    assert found["runs"][1]["exchanges"] == second.exchanges.to_dict("records")
    assert found["runs"][1]["settings"]["step"] == 0.1
    again = solve(1, callbacks=[tracker])  # the same run once more: it stands for the one before
    with file.open("a") as more:
        more.write('{"event": "ro')  # a line on its way
    found = written([file], tmp_path / "r.html")
    assert len(found["runs"]) == 2
    assert found["runs"][1]["data"]["seconds"] == again.history["seconds"].tolist()


def test_a_folder_of_runs_stands_for_them_and_a_history_is_a_run(runs: dict[str, rk.Run], tmp_path: Path) -> None:
    folder = Path(next(iter(runs))).parent
    assert written([folder], tmp_path / "r.html") == written(runs, tmp_path / "r.html")
    run = next(iter(runs.values()))
    run.history.to_csv(tmp_path / "mine.csv", index=False)
    found = written([tmp_path / "mine.csv"], tmp_path / "r.html")
    assert [line["label"] for line in found["lines"]] == ["mine"]
    assert found["runs"][0]["data"]["loss"] == pytest.approx(run.history["loss"].tolist(), rel=1e-15)
    (tmp_path / "other.csv").write_text("a,b\n1,2\n")
    with pytest.raises(
        ValueError, match=r"other\.csv must have a column `round` of numbers, as run.history has; got a"
    ):
        html.read([tmp_path / "other.csv"])


def test_what_a_run_saves_is_a_run(tmp_path: Path) -> None:
    made = [solve(seed) for seed in (0, 1)]
    for run in made:
        run.save(tmp_path / "runs" / str(run.settings["seed"]))
    found = written([tmp_path / "runs"], tmp_path / "r.html")
    assert [line["label"] for line in found["lines"]] == ["FedAvg"]
    assert [own["seed"] for own in found["runs"]] == [0, 1]
    for run, own in zip(made, found["runs"], strict=True):
        assert own["data"]["loss"] == pytest.approx(run.history["loss"].tolist(), rel=1e-15)
        assert own["exchanges"] == run.exchanges.to_dict("records")
        assert own["settings"]["step"] == 0.1
    (tmp_path / "runs" / "0" / "settings.json").write_text("[]")
    with pytest.raises(ValueError, match=r"0 is not a run: settings\.json is not as `Run\.save` writes it"):
        html.read([tmp_path / "runs" / "0"])


def test_a_reproduction_and_its_claims(tmp_path: Path) -> None:
    folder = tmp_path / "paper-fig1"
    folder.mkdir()
    claim = {
        "claim": "It works.", "where": "Fig. 1", "kind": "experiment", "verdict": "reproduced", "cause": "",
        "figures": {"end": 0.1}, "note": "",
    }  # fmt: skip
    (folder / "claims.json").write_text(json.dumps([claim]))
    (folder / "results.csv").write_text(
        "run,method,seed,round,loss,word\nA one,A,0,0,1,x\nA one,A,0,5,.5,x\nA one,A,1,0,2,x\n"
    )
    found = written([folder], tmp_path / "r.html")
    assert found["claims"] == [{"name": "paper-fig1", "claims": [claim]}]
    assert [(own["seed"], own["data"]) for own in found["runs"]] == [
        (0, {"round": [0, 5], "loss": [1.0, 0.5]}),
        (1, {"round": [0], "loss": [2.0]}),
    ]
    assert found["runs"][0]["settings"] == {"experiment": "paper-fig1", "seed": 0, "method": "A"}
    (folder / "claims.json").write_text("[1]")
    with pytest.raises(ValueError, match=r"paper-fig1 is not a reproduction: "):
        html.read([folder])


@pytest.mark.slow
@pytest.mark.parametrize("folder", sorted(Path("docs/reproduction").glob("*/")), ids=lambda path: path.name)
def test_the_reproductions_in_the_repository(folder: Path) -> None:
    found = data(html.render(*html.read([folder])))
    assert found["runs"]
    assert found["claims"][0]["claims"]


# The command.


def invoke(*arguments: Any) -> Any:
    return CliRunner().invoke(cli.app, ["report", *map(str, arguments)])


def refused(*arguments: Any) -> str:
    result = invoke(*arguments)
    assert result.exit_code == 2, result.output
    assert result.stdout == ""
    (line,) = result.stderr.splitlines()
    return line


def test_the_command(runs: dict[str, rk.Run], tmp_path: Path) -> None:
    out = tmp_path / "r.html"
    result = invoke(*runs, "--out", out)
    assert result.exit_code == 0, result.output
    assert result.stdout == f"The report: {out}\n"
    assert "<h1>line</h1>" in out.read_text()
    assert json.loads(invoke(*runs, "--out", out, "--json").stdout)["report"] == str(out)
    assert invoke(*runs, "--out", out, "--quiet", "--title", "Mine").stdout == ""
    assert "<h1>Mine</h1>" in out.read_text()


def test_bad_input_is_told_in_one_line(runs: dict[str, rk.Run], tmp_path: Path) -> None:
    out, good = tmp_path / "r.html", next(iter(runs))
    empty, broken, begun, other = (_folder(tmp_path / name) for name in ("empty", "broken", "begun", "other"))
    (broken / "run.json").write_text("{")
    (begun / "run.json").write_text('{"task": "t", "algorithm": "a"}')
    (other / "run.json").write_text('{"task": "t"}')
    (other / "history.csv").write_text("round,loss\n0,1\n")
    row = tmp_path / "row.jsonl"
    row.write_text('{"event": "row", "round": 0, "loss": 1}\n')
    text, binary = tmp_path / "notes.txt", tmp_path / "state.npz"
    text.write_text("hello\n")
    binary.write_bytes(b"PK\x03\x04\xff\xfe\n")
    assert "nowhere does not exist. Give folders that `rookery run --out`" in refused("nowhere", "--out", out)
    assert f"{empty} is not a run. Give folders" in refused(good, empty, "--out", out)
    assert "broken is not a run: it has no readable run.json" in refused(broken, "--out", out)
    assert "begun holds a run that has not ended" in refused(begun, "--out", out)
    assert "other is not a run: its run.json has no algorithm" in refused(other, "--out", out)
    assert "row.jsonl, line 1: not a line of rk.trackers.JsonLines" in refused(row, "--out", out)
    assert "notes.txt, line 1: not a line of rk.trackers.JsonLines" in refused(text, "--out", out)
    assert "state.npz is not a run" in refused(binary, "--out", out)
    assert "--out must end in .html" in refused(good, "--out", tmp_path / "r.pdf")
    assert "--out must be a file" in refused(good, "--out", _folder(tmp_path / "x.html"))
    assert not out.exists()


def _folder(path: Path) -> Path:
    path.mkdir()
    return path


def test_runs_without_metrics() -> None:
    with pytest.raises(ValueError, match=r"These runs have no metrics\. Pass evaluate"):
        html.render([html.Source("a", "a", 0, pd.DataFrame({"round": [0]}), {})])
