"""Robust and fair tasks, the portfolio, the image models and the examples that go with them."""

import runpy
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import rookery as rk
from rookery.data import DataError
from rookery.problems.models import MLP, ResNet, _convolved
from rookery.tasks.dro_imbalanced import SETTINGS, scores, step_profile
from rookery.tasks.fairness import GROUPS, adult_rows, positives, rates
from rookery.tasks.portfolio import best

EXAMPLES = Path(__file__).parents[2] / "examples"


def end(task, method, rounds, seed=0):
    """The last metrics of a run."""
    run = rk.solve(
        task.problem,
        task.clients,
        method,
        task.init,
        rounds,
        evaluate=task.evaluate,
        every=rounds,
        seed=seed,
        progress=False,
    )
    return run.history.iloc[-1]


# Models.


def neighbourhoods(values, stride=1):
    """Each place's 3×3 neighbours, row by row, in the channels; zeros beyond the edge."""
    _, height, width, _ = values.shape
    padded = np.pad(values, ((0, 0), (1, 1), (1, 1), (0, 0)))
    moved = [padded[:, i : i + height : stride, j : j + width : stride] for i in range(3) for j in range(3)]
    return np.concatenate(moved, axis=-1)


def test_the_kernels_of_the_residual_network_are_matrices():
    """A kernel's rows are the neighbours, row by row, and their channels."""
    values, kernel = jax.random.normal(jax.random.key(0), (2, 6, 6, 3)), jax.random.normal(jax.random.key(1), (27, 5))
    for stride in (1, 2):
        expected = neighbourhoods(values, stride) @ np.asarray(kernel)
        np.testing.assert_allclose(_convolved(values, kernel, 3, stride), expected, atol=1e-12)


@pytest.mark.slow
def test_a_small_residual_network():
    """By hand where that is easy: with kernels of zero a block is its shortcut, and the shortcut has no parameters."""
    model = ResNet(classes=4, blocks=1, width=4, groups=2)
    params = jax.jit(model.init)(jax.random.key(0))
    kernel = params["blocks"][-1][1]["kernel"]
    assert kernel.shape == (9 * 16, 16)
    assert float(jnp.std(kernel)) == pytest.approx((2 / (9 * 16)) ** 0.5, rel=0.05)
    images = jax.random.normal(jax.random.key(2), (3, 8, 8, 3))
    params["blocks"] = jax.tree.map(jnp.zeros_like, params["blocks"])
    first = neighbourhoods(images) @ np.asarray(params["first"]["kernel"])
    pairs = np.asarray(first).reshape(3, 64, 2, 2)  # places, two groups of two channels
    mean, variance = (of(pairs, axis=(1, 3), keepdims=True) for of in (np.mean, np.var))
    seen = np.maximum((pairs - mean) / np.sqrt(variance + 1e-5), 0).reshape(3, 8, 8, 4)[:, ::4, ::4].mean(axis=(1, 2))
    expected = np.pad(seen, ((0, 0), (6, 6))) @ np.asarray(params["last"]["w"])  # 4 channels, then 2 + 4 on either side
    np.testing.assert_allclose(jax.jit(model.apply)(params, images), expected, rtol=1e-6, atol=1e-6)


def test_colours_are_normalised_and_the_mlp_takes_images_of_any_shape():
    seen = {}

    class Model:
        def apply(self, params, images):
            seen["images"] = images
            return images

    scores(Model(), None, jnp.full((1, 2, 2, 3), 255, jnp.uint8))
    np.testing.assert_allclose(seen["images"][0, 0, 0], (1 - np.array([0.4914, 0.4822, 0.4465])) / SETTINGS_DEVIATION)
    mlp = MLP((4, 3, 2))
    params = mlp.init(jax.random.key(0))
    images = jax.random.normal(jax.random.key(1), (5, 2, 2))
    np.testing.assert_allclose(mlp.apply(params, images), mlp.apply(params, images.reshape(5, 4)))


SETTINGS_DEVIATION = np.array([0.2023, 0.1994, 0.2010])


# Imbalanced images.


def test_the_first_half_of_the_classes_keep_their_last_samples():
    labels = np.array([0, 1, 2, 3, 0, 1, 2, 3, 0, 1, 2, 3])
    assert step_profile(labels, 1).tolist() == [2, 3, 6, 7, 8, 9, 10, 11]
    task = rk.tasks.dro_imbalanced(few=7)
    counts = np.bincount(np.asarray(task.clients.upper.rows["label"]))
    assert counts[:5].tolist() == [7] * 5
    assert counts[5:].min() > 100
    other = rk.tasks.dro_imbalanced(equal=True, seed=1)
    assert other.clients.upper.narrowest == other.clients.upper.widest
    assert other.problem is task.problem  # compiled once for all seeds
    assert SETTINGS["cifar-10"].few == SETTINGS["cifar-100"].few == 100


@pytest.mark.slow
@pytest.mark.parametrize(("data", "classes"), [("cifar-10", 10), ("cifar-100", 100)])
def test_cifar_has_the_published_sizes(data, classes):
    try:
        task = rk.tasks.dro_imbalanced(data=data)
    except DataError:
        pytest.skip(f"{data} is not at hand")
    counts = np.bincount(np.asarray(task.clients.upper.rows["label"]))
    assert counts.tolist() == [100] * (classes // 2) + [50_000 // classes] * (classes // 2)
    assert task.clients.upper.rows["image"].shape[1:] == (32, 32, 3)


@pytest.mark.slow
def test_robust_training_serves_the_worst_class():
    """FedDRO on KL-DRO against FedAvg on the mean loss, at the same steps: a seed that no setting was chosen on."""
    task = rk.tasks.dro_imbalanced(seed=10, equal=True)
    robust = end(task, task.algorithm(rk.FedDRO), 150)
    plain = end(task.single_level, task.single_level.algorithm(rk.FedAvg), 150)
    assert robust["worst_accuracy"] > plain["worst_accuracy"] + 0.1
    assert robust["accuracy"] > plain["accuracy"] + 0.03
    assert robust["risk"] < 0.5 * plain["risk"]


@pytest.mark.slow
def test_the_metrics_of_imbalanced_images():
    task = rk.tasks.dro_imbalanced(penalty=0.5)
    x = task.init[0]
    found = {name: float(value) for name, value in task.evaluate(x, None).items()}
    rows = task.clients.upper.rows
    f = np.asarray(MLP((64, 32, 10)).apply(x["model"], rows["image"]))
    labels = np.asarray(rows["label"])
    losses = np.log(np.exp(f).sum(axis=1)) - f[np.arange(len(f)), labels]
    p = np.exp(losses / 0.5) / np.exp(losses / 0.5).sum()  # the cap is far away at the start
    assert found["risk"] == pytest.approx(0.5 * np.log(np.mean(np.exp(losses / 0.5))), rel=1e-5)
    assert found["rare_weight"] == pytest.approx(p[labels < 5].sum(), rel=1e-4)
    assert found["train_accuracy"] == pytest.approx(np.mean(f.argmax(axis=1) == labels))
    assert 0 <= found["worst_accuracy"] <= found["accuracy"] <= 1
    assert float(task.problem.f(x, task.problem.inner(x, rows), rows)) == pytest.approx(found["risk"], abs=0.05)


def test_the_objective_without_a_level_is_the_log_of_the_mean_exponential():
    """(4) of the FedDRO paper times λ: x is the model alone, and a cap plays no part."""
    task = rk.tasks.dro_imbalanced(objective="exp", penalty=5.0)
    x, rows = task.init[0], task.clients.upper.rows
    assert jax.tree.structure(x) == jax.tree.structure(task.single_level.init)
    f = np.asarray(scores(MLP((64, 32, 10)), x, rows["image"]), float)
    losses = np.log(np.exp(f).sum(axis=1)) - f[np.arange(len(f)), np.asarray(rows["label"])]
    expected = 5 * np.log(np.mean(np.exp(losses / 5)))
    assert float(task.problem.f(x, task.problem.inner(x, rows), rows)) == pytest.approx(expected, rel=1e-5)
    assert float(task.evaluate(x, None)["risk"]) == pytest.approx(expected, rel=1e-5)
    assert float(task.single_level.evaluate(x, None)["risk"]) == pytest.approx(expected, rel=1e-5)
    capped = rk.tasks.dro_imbalanced(objective="exp", penalty=5.0, cap=1.5)
    assert float(capped.evaluate(x, None)["risk"]) == pytest.approx(expected, rel=1e-5)


def test_words_that_are_not_known():
    for given, message in (
        ({"data": "letters"}, "data must be one of digits, cifar-10, cifar-100; got 'letters'"),
        ({"objective": "max"}, "objective must be one of kl, exp, chi2; got 'max'"),
        ({"partition": "odd"}, "partition must be one of iid, shards, dirichlet; got 'odd'"),
    ):
        with pytest.raises(ValueError, match=message):
            rk.tasks.dro_imbalanced(**given)
    with pytest.raises(ValueError, match="data must be one of adult, synthetic; got 'letters'"):
        rk.tasks.fairness(data="letters")


# Fairness.


@pytest.mark.slow
def test_fairness_lowers_the_gap():
    """FedDRO against FedAvg on the mean loss, on the synthetic stand-in."""
    task = rk.tasks.fairness(data="synthetic", seed=10, equal=True)
    plain = end(task.single_level, task.single_level.algorithm(rk.FedAvg), 200)
    fair = end(task, task.algorithm(rk.FedDRO), 200)
    assert fair["tpr_gap"] < 0.5 * plain["tpr_gap"]
    assert fair["train_tpr_gap"] < 0.5 * plain["train_tpr_gap"]
    assert fair["risk"] < 0.6 * plain["risk"]
    assert fair["accuracy"] > 0.8


def test_the_rates_by_hand():
    said = np.array([1, 1, 0, 0, 1, 0, 1, 1.0])
    label = np.array([1, 1, 1, 0, 0, 1, 1, 1.0])
    rows = {"features": (2 * said - 1)[:, None], "label": label, "group": np.array([0, 0, 0, 0, 1, 1, 1, 2])}
    accuracy, gap = rates({"w": np.ones(1), "b": 0.0}, jax.tree.map(jnp.asarray, rows))
    assert float(accuracy) == pytest.approx(5 / 8)
    assert float(gap) == pytest.approx(4 / 6 - 1 / 2)  # TPRs 2/3, 1/2 and 1; 4/6 of all


def test_adult_has_the_published_counts():
    try:
        parts = adult_rows()
    except DataError:
        pytest.skip("Adult is not at hand")
    for rows, counts in zip(parts, ([7117, 387, 337], [3490, 179, 177]), strict=True):
        assert np.asarray(positives(rows)).sum(axis=0).tolist() == counts
        assert rows["features"].shape[1] == 120
        assert set(np.unique(rows["features"])) == {0, 1}
        assert set(rows["features"].sum(axis=1)[rows["group"] < 2]) == {12}  # 7 categories and 5 buckets
        assert set(rows["features"].sum(axis=1)[rows["group"] == 2]) == {13}
    assert len(parts[0]["label"]) == 32561
    assert len(GROUPS) == 3


def test_adult_that_is_not_there_is_a_clear_error(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr("rookery.data.files._PATIENCE", 0.01)
    monkeypatch.setattr("rookery.data.datasets.SOURCES", {"adult": _without_addresses()})
    with pytest.raises(DataError, match="adult"):
        rk.tasks.fairness(data_dir=tmp_path)


def _without_addresses():
    from dataclasses import replace

    from rookery.data.datasets import SOURCES

    (form,) = SOURCES["adult"]
    return (replace(form, files=tuple(replace(file, urls=()) for file in form.files)),)


# The worst group.


def test_the_groups_are_scanned_as_said():
    good, bad = (rk.tasks.worst_group(clients=4, bad=0.5, noise=noise) for noise in (0.0, 0.3))
    kinds = [int(good.clients.client_data(i)["upper"][0]["group"][0]) for i in range(4)]
    assert sorted(kinds) == [0, 0, 1, 1]
    for i, kind in enumerate(kinds):
        one, other = (np.asarray(task.clients.client_data(i)["upper"][0]["image"]) for task in (good, bad))
        assert np.array_equal(one, other) == (kind == 0)
    x = {"w": np.random.default_rng(0).normal(size=(64, 10)), "b": np.zeros(10)}
    found = good.evaluate(x, None)
    assert float(found["accuracy"]) == pytest.approx(float(found["accuracy_good"] + found["accuracy_bad"]) / 2)
    assert float(found["worst_accuracy"]) == min(float(found["accuracy_good"]), float(found["accuracy_bad"]))


@pytest.mark.slow
def test_groups_weighted_by_hand_count_the_same():
    by_sample, by_group = (
        rk.tasks.worst_group(clients=4, bad=0.25, count=c).single_level for c in ("samples", "groups")
    )
    rows = by_sample.clients.upper.rows
    x = jax.tree.map(lambda a: np.random.default_rng(0).normal(size=a.shape), by_sample.init)
    one = lambda task, kind: task.problem.f(x, (), jax.tree.map(lambda a: a[np.asarray(rows["group"]) == kind], rows))
    plain = lambda kind: one(by_sample, kind) - penalty
    penalty = 1e-3 * sum(float((a**2).sum()) for a in x.values()) / 2
    assert float(by_group.problem.f(x, (), rows) - penalty) == pytest.approx(float(plain(0) + plain(1)) / 2, rel=1e-5)
    assert float(by_sample.problem.f(x, (), rows) - penalty) == pytest.approx(
        float(0.75 * plain(0) + 0.25 * plain(1)), rel=1e-5
    )


# The portfolio.


@pytest.mark.parametrize("budget", [None, pytest.param(1.0, marks=pytest.mark.slow)])
def test_the_portfolio_is_found(budget):
    task = rk.tasks.portfolio(clients=4, assets=3, samples=20, budget=budget)
    found = end(task, task.algorithm(rk.FedNest), 400)
    assert found["distance"] < 1e-8
    assert abs(found["excess"]) < 1e-8
    returns = np.asarray(task.clients.upper.rows["returns"])
    x = best(returns, 1.0, budget)
    value = lambda x: -np.mean(returns @ x) + np.var(returns @ x)
    rng = np.random.default_rng(0)
    for _ in range(20):
        away = rng.normal(size=3)
        away -= 0 if budget is None else away.mean()
        assert value(x + 0.1 * away) > value(x)
    assert budget is None or x.sum() == pytest.approx(budget)


# The examples.


@pytest.fixture
def example(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return lambda name: runpy.run_path(str(EXAMPLES / f"{name}.py"))


@pytest.mark.slow
def test_policy_evaluation_finds_the_least_squares_solution(example):
    names = example("policy_evaluation")
    assert names["error"] < 1e-4
    assert np.linalg.norm(names["squares"] - names["exact"]) > 0.2 * np.linalg.norm(names["exact"])


@pytest.mark.slow
def test_adaptation_beats_none(example):
    errors = example("maml")["errors"]
    assert errors["MAML"][1] < 0.6 * errors["MAML"][0]
    assert errors["MAML"][1] < 0.7 * min(errors["plain"])


def test_the_signal_is_retrieved(example):
    history = example("phase_retrieval")["run"].history
    assert history["error"].iloc[0] > 0.3
    assert history["error"].iloc[-1] < 1e-4
