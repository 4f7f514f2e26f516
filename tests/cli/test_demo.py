"""The demo: its commands give its methods, what it prints and draws, and (slowly) what it finds."""

import json
import math
import shlex
import threading
import time

import jax
import pandas as pd
import pytest
from typer.testing import CliRunner

from rookery import cli, report
from rookery.cli import demo_picture, demo_runs
from rookery.cli import demo_stories as demo
from rookery.cli.request import TaskOptions, resolve

ENTRIES = [(story, entry) for story in demo.STORIES for entry in story.entries]


def asked(command):
    """What the command line makes of a command: the task's settings and the method."""
    words = shlex.split(command)
    settings = [words[k + 1] for k, word in enumerate(words) if word == "--set"]
    return resolve(words[2], words[4], TaskOptions(settings))


@pytest.mark.parametrize(("story", "entry"), ENTRIES, ids=lambda value: getattr(value, "words", None))
def test_a_command_gives_the_method_of_its_story(story, entry):
    told = asked(story.command(entry))
    task, method = story.task(entry, seed=0)
    assert told.method == method
    same = jax.tree.map(lambda a, b: bool((a == b).all()), told.task.clients, task.clients)
    assert all(jax.tree.leaves(same))
    assert f"--rounds {entry.rounds} " in story.command(entry)


@pytest.mark.parametrize(("story", "entry"), ENTRIES, ids=lambda value: getattr(value, "words", None))
def test_what_was_chosen_is_in_the_grid_and_not_at_its_edge(story, entry):
    assert set(entry.chosen) == set(entry.searched)
    for name, value in entry.chosen.items():
        assert value in sorted(entry.searched[name])[1:-1], name


def test_all_methods_of_a_story_are_searched_alike():
    for story in demo.STORIES:
        assert len({math.prod(map(len, entry.searched.values())) for entry in story.entries}) == 1


def made_up(seeds=(0, 1)):
    rows = []
    for story, entry in ENTRIES:
        for seed in seeds:
            told = {"story": story.name, "words": entry.words, "algorithm": entry.name, "seed": seed}
            cost = {"round": 5, "exchanges": 10, "bytes_up": 2e3, "bytes_down": 3e6, "seconds": 0.5}
            learnt = {"weight_clean": 0.9, "weight_corrupted": 0.1, "similar_weight": 0.95, "weight_bad": 0.7}
            each = {f"weight_{k}": 1 / 15 for k in range(15)}
            right = {"accuracy": 0.8 + 0.02 * seed, "worst_accuracy": 0.7, "accuracy_good": 0.9}
            rows.append({**told, **cost, **learnt, **each, **right})
    return pd.DataFrame(rows)


def test_the_table_and_the_picture(tmp_path):
    result = demo_runs.Demo(made_up(), 3.0, tmp_path / "demo.png")
    rows = result.rows()
    assert len(rows) == len(ENTRIES)
    assert rows["mean"].iloc[0] == pytest.approx(0.81)
    assert rows["spread"].iloc[0] == pytest.approx(0.02 / 2**0.5)
    assert json.loads(report.to_json(result.numbers()))["learnt"]["wrong labels"]["weight_corrupted"] == 0.1
    report.save(demo_picture.draw(result.runs), result.picture)
    assert result.picture.read_bytes().startswith(b"\x89PNG")
    assert result.picture.stat().st_size < 250_000
    assert sum("rookery run" in line for line in result.lines()) == len(demo.STORIES)
    assert result.table().row_count == len(ENTRIES)


def test_a_command_gives_the_demos_numbers():
    story, entry = demo.ROBUST, demo.ROBUST.entries[0]
    run = demo.train(story, entry, 2, seed=1)
    words = shlex.split(story.command(entry).replace(f"--rounds {entry.rounds}", "--rounds 2"))
    told = CliRunner().invoke(cli.app, [*words[1:], "--seed", "1", "--json"])
    assert json.loads(told.stdout)["last"]["worst_loss"] == run.history["worst_loss"].iloc[-1]


def test_runs_of_the_demo_go_side_by_side_in_order_and_end_with_an_error():
    programs = demo_runs._programs()
    assert sorted(entry.words for _, entry in programs) == sorted(entry.words for _, entry in ENTRIES)
    assert [entry for _, entry in programs[:3]] == [story.entries[-1] for story in demo.STORIES]
    begun = []

    def call(k):
        begun.append(k)
        if k == 1000:
            raise ValueError("stop")
        return -k

    with demo_runs._side_by_side() as map_:
        assert map_(call, range(20)) == [-k for k in range(20)]
    with pytest.raises(ValueError, match="stop"), demo_runs._side_by_side() as map_:
        map_(lambda k: call(k) if k == 1000 else time.sleep(0.01), [1000, *range(1000)])
    assert threading.active_count() < 20


@pytest.mark.slow
def test_the_demo_from_end_to_end(tmp_path):
    result = demo_runs.run_demo(tmp_path / "demo", rounds=2, seeds=1, progress=False)
    assert result.picture.read_bytes().startswith(b"\x89PNG")
    assert not result.stopped
    assert pd.read_csv(tmp_path / "demo" / "demo.csv")["seed"].unique().tolist() == [0]
    assert result.rows().set_index("algorithm")["exchanges"]["LocalTrain"] == 0


@pytest.mark.slow
@pytest.mark.parametrize("story", demo.STORIES, ids=lambda story: story.name)
def test_the_nested_method_is_the_best_of_its_story(story):
    *others, nested = [
        demo.train(story, entry, entry.rounds, seed=3).history[story.metric].iloc[-1] for entry in story.entries
    ]
    margin = 0.0 if story is demo.ROBUST else 0.02  # weighting groups by hand is nearly as good
    assert nested > max(others) + margin
    assert nested > others[0] + 0.05  # FedAvg
