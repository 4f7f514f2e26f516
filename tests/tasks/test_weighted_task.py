"""The task weighted-nodes: its samples are drawn as the paper says, its model is the paper's, and trust is learnt."""

import importlib
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from typer.testing import CliRunner

import rookery as rk
from rookery import report
from rookery.cli import app
from rookery.data.datasets import Dataset
from rookery.problems.models import CNN
from rookery.report import html
from rookery.tasks import weighted_nodes as task_function
from rookery.tasks.weighted_nodes import CIFAR, DIGITS, FORESTS

SMALL: dict[str, Any] = {"samples": 24, "validation": 10}


def node(task: rk.tasks.Task, k: int) -> Any:
    return jax.tree.map(np.asarray, task.clients.client_data(k)["lower"][0])


def center(task: rk.tasks.Task) -> Any:
    assert task.clients.center is not None
    return jax.tree.map(np.asarray, task.clients.center.rows)


@pytest.mark.parametrize("mixture", [DIGITS, CIFAR, FORESTS])
@pytest.mark.parametrize("kind", ["minority", "majority"])
def test_a_group_is_drawn_and_then_a_sample_of_it(mixture: Any, kind: str) -> None:
    rng = np.random.default_rng(0)
    labels = rng.permutation(np.repeat(np.arange(10), 30))  # in FORESTS' groups are 7 of them
    n = 20_000
    index = mixture.draw(rng, labels, kind, n)
    for group, chance in zip(mixture.groups, mixture.chances[kind], strict=True):
        members = np.flatnonzero(np.isin(labels, group))
        count = np.isin(index, members).sum()
        assert abs(count - n * chance) < 4.5 * np.sqrt(n * chance * (1 - chance))
        each = np.bincount(index, minlength=300)[members]  # all of a group's are equally likely
        expected = n * chance / len(members)
        assert np.abs(each - expected).max() < 5 * np.sqrt(expected)
    assert sum(mixture.chances[kind]) == pytest.approx(1)
    assert sorted(mixture.cycle) == sorted(mixture.cycle.values())


def test_the_settings_differ_in_what_they_do_to_the_majority() -> None:
    tasks = [task_function(setting=s, seed=3, **SMALL) for s in (1, 2, 3, 4)]
    plain, way = tasks[0], _way(3)
    assert plain.groups == ("minority",) * 5 + ("majority",) * 10
    assert plain.clients.lower_sizes.tolist() == [24] * 15
    cycle = np.array([1, 5, 0, 3, 4, 2, 6, 7, 8, 9])  # 2→0→1→5→2
    for k in range(15):
        own = [node(task, k) for task in tasks]
        if k < 5:
            for other in own[1:]:
                jax.tree.map(np.testing.assert_array_equal, own[0], other)
            continue
        for i, (labels, turns) in enumerate([(0, 0), (1, 0), (0, 1), (1, 1)]):
            expected = cycle[own[0]["label"]] if labels else own[0]["label"]
            np.testing.assert_array_equal(own[i]["label"], expected)
            clockwise = np.rot90(own[0]["image"], -1, axes=(1, 2))
            against = np.rot90(own[0]["image"], 1, axes=(1, 2))
            if not turns:
                np.testing.assert_array_equal(own[i]["image"], own[0]["image"])
            else:  # the same way for all nodes and in both settings
                assert np.array_equal(own[i]["image"], against) != np.array_equal(own[i]["image"], clockwise)
                np.testing.assert_array_equal(own[i]["image"], against if way == 1 else clockwise)
    assert not np.array_equal(node(plain, 0)["label"], node(plain, 1)["label"])  # each node draws by itself
    assert {_way(seed) for seed in range(7)} == {-1, 1}


def _way(seed: int) -> int:
    """How node 5's images are turned."""
    plain, turned = (node(task_function(setting=s, seed=seed, **SMALL), 5)["image"] for s in (1, 3))
    ways = [k for k in (-1, 1) if np.array_equal(np.rot90(plain, k, axes=(1, 2)), turned)]
    assert len(ways) == 1
    return ways[0]


def test_the_centre_is_like_its_kind() -> None:
    minor, major = (task_function(setting=4, center=kind, seed=3, **SMALL) for kind in ("minority", "majority"))
    np.testing.assert_array_equal(node(minor, 7)["label"], node(major, 7)["label"])  # the nodes stay the same
    plain = center(task_function(setting=1, center="majority", seed=3, **SMALL))
    np.testing.assert_array_equal(center(major)["image"], np.rot90(plain["image"], _way(3), axes=(1, 2)))
    np.testing.assert_array_equal(center(major)["label"], np.array([1, 5, 0, 3, 4, 2, 6, 7, 8, 9])[plain["label"]])
    untouched = center(task_function(setting=1, center="minority", seed=3, **SMALL))
    jax.tree.map(np.testing.assert_array_equal, center(minor), untouched)
    assert task_function(center_client=2, **SMALL).clients.center_client == 2


def test_the_same_seed_gives_the_same_task_and_all_seeds_one_problem() -> None:
    a, b, c = (task_function(seed=seed, **SMALL) for seed in (0, 0, 1))
    same = lambda s, t: all(
        map(np.array_equal, jax.tree.leaves((s.clients, s.init)), jax.tree.leaves((t.clients, t.init)))
    )
    assert same(a, b)
    assert not same(a, c)
    assert a.problem == c.problem
    assert hash(a.problem) == hash(c.problem)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"setting": 5}, "setting must be 1, 2, 3 or 4; got 5"),
        ({"center": "both"}, "center must be one of minority, majority; got 'both'"),
        ({"minority": 15}, "minority must leave nodes of both kinds"),
        ({"data": "covtype"}, "setting must be 1 for Covertype"),
    ],
)
def test_bad_input(given: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        task_function(**given)


def _fake(name: str, data_dir: Any = None) -> Dataset:
    """Files of the right form."""
    rng = np.random.default_rng(1)
    if name == "covtype":
        rows = rng.integers(0, 4000, (700, 54), dtype=np.int32)
        return Dataset(
            name, rows, np.arange(700, dtype=np.int32) % 7, rows[:0], np.zeros(0, np.int32), tuple("1234567")
        )
    shape = (32, 32, 3) if name == "cifar-10" else (28, 28)
    images = rng.integers(0, 256, (200, *shape), dtype=np.uint8)
    labels = np.arange(200, dtype=np.int32) % 10
    return Dataset(name, images, labels, images, labels, tuple("0123456789"))


@pytest.mark.parametrize(
    ("data", "setting", "size"),
    [
        ("fashion-mnist", 4, 360),
        pytest.param("cifar-10", 3, 1480, marks=pytest.mark.slow),
        ("covtype", 1, 385),
    ],
)
def test_other_data(data: str, setting: int, size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.import_module("rookery.tasks.images"), "load", _fake)
    task = task_function(data=data, setting=setting, **SMALL)
    assert sum(leaf.size for leaf in jax.tree.leaves(task.init)) == size
    metrics = task.evaluate(np.full(15, 1 / 15), task.init)
    assert metrics["similar_weight"] == pytest.approx(1 / 3)
    assert {"accuracy", "validation_accuracy", "weight_14"} <= set(metrics)
    if data == "covtype":
        rows = np.concatenate([node(task, k)["image"] for k in range(15)])
        assert np.abs(rows[:, :10]).max() < 3
        assert rows[:, 10:].max() > 1000  # these are left as they are
    else:
        assert node(task, 14)["image"].dtype == np.uint8


def test_the_networks_convolutions_are_convolutions() -> None:
    """Against XLA's own, with strides and padding as the paper gives them."""
    for channels, size, features in ((1, 28, 32), (3, 32, 125)):
        model = CNN(channels, size, 10)
        params = model.init(jax.random.key(1))
        rng = np.random.default_rng(channels)
        params = jax.tree.map(lambda a: a + 0.1 * rng.normal(size=a.shape), params)
        images = rng.normal(size=(6, size, size, channels))
        values: Any = images
        for layer, kernel in zip(params["convolutions"], (4, 2), strict=True):
            layer = jax.tree.map(np.asarray, layer)
            weights = layer["kernel"].reshape(kernel, kernel, channels, -1)
            values = jax.lax.conv_general_dilated(
                values, weights, (kernel, kernel), [(1, 1), (1, 1)], dimension_numbers=("NHWC", "HWIO", "NHWC")
            )
            values = np.asarray(values)
            flat = values.reshape(-1, values.shape[-1])
            flat = (flat - flat.mean(0)) / np.sqrt(flat.var(0) + 1e-5) * layer["scale"] + layer["shift"]
            values = np.maximum(flat, 0).reshape(values.shape)
        assert values[0].size == features
        expected = values.reshape(6, -1) @ np.asarray(params["last"]["w"]) + params["last"]["b"]
        np.testing.assert_allclose(jax.jit(model.apply)(params, images), expected, atol=1e-10)


@pytest.mark.slow
def test_a_network_that_normalises_by_the_batch_takes_it_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.import_module("rookery.tasks.images"), "load", _fake)
    task = task_function(data="mnist", setting=1, nodes=3, minority=1, **SMALL).single_level
    assert task is not None
    solve = lambda clients, size: rk.solve(
        task.problem, clients, rk.FedAvg(step=0.1, local_steps=1, batch_size=size), task.init, 1
    )
    whole, too_large = (solve(task.clients, size).x["last"]["w"] for size in (None, 25))  # a node has 24
    np.testing.assert_allclose(too_large, whole, rtol=1e-4, atol=1e-5)
    rows = task.clients.client_data(0)["upper"][0]
    unequal = rk.Clients(upper=[rows, jax.tree.map(lambda a: a[:9], rows)])
    with pytest.raises(ValueError, match="must be a mean over its batch"):
        solve(unequal, None)
    assert np.isfinite(np.asarray(solve(unequal, 9).x["last"]["w"])).all()


def test_personal_models_are_scored_where_they_belong() -> None:
    task = task_function(seed=1, center="majority", **SMALL).single_level
    assert task is not None
    own = jax.tree.map(lambda a: a + 0.3 * jax.random.normal(jax.random.key(a.size), (15, *a.shape)), task.init)
    metrics = task.evaluate(task.init, (), own)
    each = [task.evaluate(jax.tree.map(lambda a: a[k], own), (), None)["accuracy"] for k in range(5, 15)]
    assert float(metrics["accuracy"]) == pytest.approx(np.mean(each), abs=1e-6)
    reference = {"point": own, "gradient": own}  # the memory of a method without personal models
    assert task.evaluate(task.init, (), reference) == task.evaluate(task.init, (), None)


@pytest.mark.slow
def test_the_right_nodes_are_trusted(tmp_path: Path) -> None:
    """The defaults, at the command line: the table, the picture, and weights that are not in the way."""
    out = tmp_path / "run"
    asked = ["run", "weighted-nodes", "--algorithm", "WeightedNodesProx", "--rounds", "40", "--out", str(out)]
    said = CliRunner().invoke(app, asked)
    assert said.exit_code == 0, said.output
    assert "Who was trusted" in said.output
    assert "weight_3" not in said.output
    description, history = report.read_run(out)
    assert set(description["last"]) == {"accuracy", "validation_accuracy", "similar_weight"}
    last = history.iloc[-1]
    assert last["similar_weight"] > 0.9
    assert last[[f"weight_{k}" for k in range(5)]].sum() == pytest.approx(last["similar_weight"], abs=1e-5)
    assert last["accuracy"] > history["accuracy"].iloc[0] + 0.5
    assert (out / "weights.png").stat().st_size > 10_000
    (source,), _ = html.read([out])
    assert source.weights is not None
    assert source.weights.groupby("group")["weight"].sum().max() == pytest.approx(last["similar_weight"], abs=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("setting", [2, 4])
def test_learning_whom_to_trust_beats_the_others_on_the_minority(setting: int) -> None:
    """The mean over three seeds that the defaults were not chosen by, of the models that validation picks."""
    names = ("WeightedNodesProx", "LocalTrain", "LocalSVRG", "Ditto", "PFedMe", "FineTuned")
    score = dict.fromkeys(names, 0.0)
    for seed in (3, 4, 5):
        for name in names:
            task = task_function(setting=setting, seed=seed)
            task = task if name == "WeightedNodesProx" else task.single_level  # type: ignore[assignment]
            method = task.algorithm(getattr(rk, name))
            run = rk.solve(
                task.problem, task.clients, method, task.init, task.rounds, evaluate=task.evaluate, every=task.every,
                seed=seed, keep_best="validation_accuracy",
            )  # fmt: skip
            assert run.best is not None
            score[name] += float(run.history.set_index("round")["accuracy"][run.best.round]) / 3
    ours = score.pop("WeightedNodesProx")
    assert ours > max(score.values()) + 0.03, score
