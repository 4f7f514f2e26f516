"""Tables, pictures and the files of a run."""

import json

import numpy as np
import pandas as pd
import pytest
from PIL import Image
from rich.console import Console

import rookery as rk
from rookery import report
from rookery.base.drawing import digest
from rookery.cli.registry import ALGORITHMS


def test_a_method_always_looks_the_same_and_methods_together_look_different():
    assert report.style("FedNest") == report.style("fed-nest")
    looks = list(report.styles(list(ALGORITHMS)).values())
    assert len({tuple(look.values()) for look in looks}) == len(ALGORITHMS)
    assert len({(look["color"], look["linestyle"]) for look in looks}) >= min(len(ALGORITHMS), 28)


def test_band_draws_the_mean_and_the_range_or_standard_errors():
    frame = pd.DataFrame({"round": [0, 1, 0, 1], "bytes": [0, 10, 0, 30], "loss": [4.0, 2, 2, 1], "seed": [0, 0, 1, 1]})
    _, axes = report.figure(1, 1)
    ax = axes[0, 0]
    report.band(ax, frame, "bytes", "loss", "FedNest", errors=None)
    (line,) = ax.lines
    assert line.get_xdata().tolist() == [0, 20]
    assert line.get_ydata().tolist() == [3, 1.5]
    corners = ax.collections[0].get_paths()[0].vertices
    assert (corners[:, 1].min(), corners[:, 1].max()) == (1, 4)
    report.band(ax, frame, "bytes", "loss", "FedNest")
    corners = ax.collections[1].get_paths()[0].vertices
    assert (corners[:, 1].min(), corners[:, 1].max()) == (0.5, 5)  # 1.5 − 2 · 0.5 and 3 + 2 · 1


def test_a_picture_carries_the_digest_of_what_it_shows(tmp_path):
    frame = pd.DataFrame({"round": [0, 1], "loss": [4.0, 2.0]})

    def drawn(factor):
        fig, axes = report.figure()
        report.band(axes[0, 0], frame.assign(loss=factor * frame["loss"]), "round", "loss", "FedAvg")
        return fig

    path = report.save(drawn(1), tmp_path / "a.png")
    assert Image.open(path).text["Drawn"] == digest(drawn(1))
    assert digest(drawn(1)) != digest(drawn(1.001))


def test_band_of_one_seed_and_of_gaps():
    frame = pd.DataFrame({"round": [0, 1, 2], "loss": [1.0, np.nan, 0.5]})
    _, axes = report.figure()
    report.band(axes[0, 0], frame, "round", "loss", "FedAvg")
    assert axes[0, 0].lines[0].get_xdata().tolist() == [0, 2]
    assert not axes[0, 0].collections


def test_band_leaves_out_rounds_that_a_seed_has_no_value_of():
    frame = pd.DataFrame({"round": [0, 1, 2, 0, 1], "loss": [4.0, np.nan, 1, 2, 1], "seed": [0, 0, 0, 1, 1]})
    _, axes = report.figure()
    report.band(axes[0, 0], frame, "round", "loss", "FedAvg")
    assert axes[0, 0].lines[0].get_xdata().tolist() == [0]


def test_save_makes_the_folder(tmp_path):
    fig, _ = report.figure(1, 2)
    assert report.save(fig, tmp_path / "new" / "a.png").read_bytes().startswith(b"\x89PNG")


def test_tables_keep_brackets_and_line_numbers_up():
    console = Console(width=80, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(report.table(pd.DataFrame({"name": ["[x, y]", "b"], "n": [1, 22]}), "Title"))
    text = console.export_text()
    assert "[x, y]" in text
    assert "Title" in text
    assert any(line.rstrip().endswith(" 1") for line in text.splitlines())


def test_json_is_strict():
    text = report.to_json({"a": float("nan"), "b": np.float32(2), "c": (1, 5), "d": rk.Epochs(2.0), "e": np.arange(2)})
    assert json.loads(text) == {"a": None, "b": 2.0, "c": [1, 5], "d": "Epochs(passes=2.0)", "e": [0, 1]}


def test_a_saved_run_is_read_back(tmp_path):
    task = rk.tasks.quadratic(clients=3)
    method = task.algorithm(rk.LFedNest)
    run = rk.solve(
        task.problem,
        task.clients,
        method,
        task.init,
        4,
        evaluate=task.evaluate,
        every=2,
        keep_best="-distance",
        progress=False,
    )
    report.write_run(tmp_path, {"task": "quadratic", "algorithm": "LFedNest"}, run, "distance")
    description, history = report.read_run(tmp_path)
    assert description["metric"] == "distance"
    assert description["rounds_done"] == 4
    pd.testing.assert_frame_equal(history, run.history)
    with np.load(tmp_path / "state.npz", allow_pickle=False) as state:
        np.testing.assert_array_equal(state["x"], run.x)
        np.testing.assert_array_equal(state["y"], run.y)
    with np.load(tmp_path / "best.npz", allow_pickle=False) as best:
        assert float(best["value"]) == pytest.approx(run.history["distance"].min())
    assert (tmp_path / "picture.png").exists()
    assert len(pd.read_csv(tmp_path / "exchanges.csv")) == len(run.exchanges)


def test_names_of_arrays_follow_the_tree():
    assert set(report.named_arrays({"x": {"w": 1, "b": 2}, "y": 3})) == {"x/w", "x/b", "y"}
