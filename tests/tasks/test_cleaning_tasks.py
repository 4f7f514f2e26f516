"""Data cleaning, few-shot learning and group weights: the losses, the metrics, and that learning pays."""

import json

import jax
import jax.flatten_util
import jax.numpy as jnp
import numpy as np
import pytest
from sklearn.metrics import roc_auc_score
from typer.testing import CliRunner

import rookery as rk
from rookery.cli import app
from rookery.data import DataError, load
from rookery.tasks.data_cleaning import auc, cleaning_problem
from rookery.tasks.few_shot import few_shot_problem, representation
from rookery.tasks.loss_tuning import network


def at_hand(name):
    try:
        return load(name)
    except DataError:
        pytest.skip(f"{name} is not at hand")


def run(task, name, rounds, **given):
    method = task.algorithm(getattr(rk, name), **given)
    return rk.solve(
        task.problem, task.clients, method, task.init, rounds, evaluate=task.evaluate, every=rounds, progress=False
    )


def as_double(value):
    return jax.tree.map(lambda a: jnp.asarray(a, jnp.float64) if jnp.issubdtype(a.dtype, jnp.floating) else a, value)


# Data cleaning.


@pytest.mark.slow
def test_a_step_is_along_the_hypergradient():
    rng = np.random.default_rng(0)
    sizes, ends = (2, 3, 4), np.cumsum((2, 3, 4))
    rows = lambda size: {"image": rng.normal(size=(size, 3)), "label": rng.integers(0, 10, size).astype(np.int32)}
    places = [np.arange(end - size, end, dtype=np.int32) for size, end in zip(sizes, ends, strict=True)]
    lower, upper = [{**rows(len(own)), "index": own} for own in places], [rows(size) for size in sizes]
    together = jax.tree.map(lambda *a: np.concatenate(a), *lower)
    x, y = rng.normal(size=9), {"w": np.zeros((3, 10)), "b": np.zeros(10)}
    problem = cleaning_problem(0.3)
    flat, shape = jax.flatten_util.ravel_pytree(y)

    @jax.jit
    def phi(x):
        """The upper loss at the lower solution, which Newton's method finds; and that solution."""
        g = lambda v: problem.g(x, shape(v), together)
        newton = lambda _, v: v - jnp.linalg.solve(jax.hessian(g)(v), jax.grad(g)(v))
        best = shape(jax.lax.fori_loop(0, 20, newton, flat))
        return sum(size / 9 * problem.f(x, best, own) for size, own in zip(sizes, upper, strict=True)), best

    expected = [float(phi(x + h)[0] - phi(x - h)[0]) / 2e-5 for h in 1e-5 * np.eye(9)]
    method = rk.FedNest(upper_step=1e-3, lower_step=1e-9, neumann="cg", neumann_terms=40, hessian_step=0.1)
    clients = rk.Clients(lower, upper, weights="size")
    found = (x - rk.solve(problem, clients, method, (x, phi(x)[1]), 1, progress=False).x) / 1e-3
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-8)
    assert np.abs(expected).min() > 1e-4


def test_the_auc_is_that_of_scikit_learn_and_a_tie_counts_half():
    rng = np.random.default_rng(0)
    wrong = rng.random(200) < 0.3
    for weights in (rng.random(200), rng.integers(0, 4, 200) / 4, np.full(200, 0.5), np.where(wrong, 0.0, 1.0)):
        assert float(auc(jnp.asarray(weights), jnp.asarray(wrong))) == pytest.approx(roc_auc_score(~wrong, weights))


def test_training_labels_are_corrupted_validation_labels_are_not():
    clean, noisy = (rk.tasks.data_cleaning(clients=7, corrupted=rho) for rho in (0.0, 0.4))
    np.testing.assert_array_equal(clean.clients.upper.rows["label"], noisy.clients.upper.rows["label"])
    labels, right = (np.asarray(task.clients.lower.rows["label"]) for task in (noisy, clean))
    assert (labels != right).sum() == round(0.4 * len(right))
    np.testing.assert_array_equal(noisy.clients.lower.rows["index"], np.arange(len(noisy.init[0])))
    assert "auc" not in clean.evaluate(*clean.init)
    x = np.where(labels == right, 1.0, -1.0)
    metrics = noisy.evaluate(x, noisy.init[1])
    assert float(metrics["auc"]) == 1
    assert float(metrics["weight_clean"]) == pytest.approx(1 / (1 + np.exp(-1)))
    assert float(metrics["weight_corrupted"]) == pytest.approx(1 / (1 + np.exp(1)))


def test_whole_clients_may_be_wrong():
    right, wrong = (rk.tasks.data_cleaning(clients=5, corrupted=0.4 * on, wrong="clients", equal=True) for on in (0, 1))
    labels = lambda task, i: np.asarray(task.clients.client_data(i)["lower"][0]["label"])
    moved = [set(((labels(wrong, i) - labels(right, i)) % 10).tolist()) for i in range(5)]
    assert sorted(map(tuple, moved)) == [(0,), (0,), (0,), (1,), (1,)]
    assert (wrong.clients.upper.rows["label"] == right.clients.upper.rows["label"]).all()


@pytest.mark.parametrize("fit", ["training", "validation", "all"])
def test_what_single_level_methods_train_on(fit):
    task = rk.tasks.data_cleaning(clients=3, fit=fit)
    sizes = {"training": task.clients.lower_sizes, "validation": task.clients.upper_sizes}
    expected = sizes.get(fit, sizes["training"] + sizes["validation"])
    assert np.array_equal(task.single_level.clients.upper_sizes, expected)


@pytest.mark.slow
def test_the_weights_of_corrupted_samples_fall_and_training_on_them_is_worse():
    arguments = ["run", "data-cleaning", "--algorithm", "FedNest", "--set", "equal=true", "--rounds", "30", "--json"]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    learnt = json.loads(result.stdout)["last"]
    assert learnt["auc"] > 0.95
    assert learnt["weight_corrupted"] < 0.25 < 0.75 < learnt["weight_clean"]
    plain = run(rk.tasks.data_cleaning(equal=True).single_level, "FedAvg", 30).history.iloc[-1]
    assert learnt["loss"] < 0.7 * plain["loss"]
    assert "auc" not in plain


# Few-shot learning.


@pytest.mark.slow
def test_a_head_of_its_own_does_what_one_for_all_cannot():
    task = rk.tasks.few_shot(clients=12, episodes=1)
    problem = task.problem
    assert problem.lower_scope == "client"
    with pytest.raises(ValueError, match="FedNest needs a lower level that is one for all"):
        run(task, "FedNest", 1)
    x, y = as_double(task.init)
    seen, query = (as_double(representation(x, source.rows)) for source in (task.clients.lower, task.clients.upper))

    @jax.jit
    def fit(rows):
        step = lambda _, y: jax.tree.map(lambda a, d: a - 0.1 * d, y, jax.grad(problem.g_seen, 1)(x, y, rows))
        return jax.lax.fori_loop(0, 100, step, y)

    def accuracy(y, rows):
        return np.mean(np.argmax(rows["image"] @ y["w"][0] + y["b"][0], axis=1) == rows["label"])

    parts = lambda rows: [jax.tree.map(lambda a: a[i], rows) for i in range(12)]
    split = lambda rows: parts(jax.tree.map(lambda a: a.reshape(12, -1, *a.shape[1:]), rows))
    own = np.mean([accuracy(fit(s), q) for s, q in zip(split(seen), split(query), strict=True)])
    assert own > 0.7
    assert accuracy(fit(seen), query) < 0.4
    assert float(task.evaluate(*task.init)["client_accuracy"]) == pytest.approx(own, abs=0.02)


def test_an_episode_is_numbered_and_its_images_are_apart():
    task = rk.tasks.few_shot(clients=3, ways=4, shots=2, queries=3, episodes=2)
    assert (set(task.clients.lower_sizes), set(task.clients.upper_sizes)) == ({16}, {24})
    for i in range(3):
        held = task.clients.client_data(i)
        for e in range(2):
            both = [
                jax.tree.map(lambda a, e=e, own=own: a[own["episode"] == e], own)
                for own in (held["lower"][0], held["upper"][0])
            ]
            assert [np.bincount(own["label"]).tolist() for own in both] == [[2] * 4, [3] * 4]
            images = [{row.tobytes() for row in own["image"]} for own in both]
            assert not images[0] & images[1]
    assert task.init[1]["w"].shape == (2, 32, 4)


def test_the_lower_loss_is_the_sum_over_the_episodes():
    rng = np.random.default_rng(0)
    rows = {
        "image": rng.normal(size=(6, 5)),
        "label": np.array([0, 1, 2, 0, 1, 2]),
        "episode": np.array([0, 0, 0, 1, 1, 1]),
    }
    x = as_double(network(jax.random.key(0), (5, 4)))
    y = {"w": rng.normal(size=(2, 4, 3)), "b": rng.normal(size=(2, 3))}
    h = np.asarray(rows["image"] @ x[0]["w"] + x[0]["b"])
    h = 4 * h / np.linalg.norm(h, axis=1, keepdims=True)
    total = 0.0
    for e in range(2):
        own = rows["episode"] == e
        f = h[own] @ y["w"][e] + y["b"][e]
        total += np.mean(np.log(np.exp(f).sum(axis=1)) - f[np.arange(3), rows["label"][own]])
        total += 0.05 * ((y["w"][e] ** 2).sum() + (y["b"][e] ** 2).sum())
    assert float(few_shot_problem(2, 0.1).g(x, y, rows)) == pytest.approx(total, rel=1e-5)


@pytest.mark.slow
def test_the_representation_is_learnt_from_local_heads():
    task = rk.tasks.few_shot(clients=12, episodes=1)
    accuracy = run(task, "FedBiOLocal", 30, neumann_terms=5).history["accuracy"]
    assert accuracy.iloc[-1] > accuracy.iloc[0] + 0.1


# Group weights.


@pytest.mark.slow
def test_weights_start_at_one_and_the_upper_loss_bounds_the_worst_group():
    task = rk.tasks.group_weights(partition="shards")
    x, _ = task.init
    rng = np.random.default_rng(0)
    y = {"w": rng.normal(size=10), "b": rng.normal()}
    rows = jax.tree.map(lambda a: a[:500], task.clients.lower.rows)
    plain = float(task.single_level.problem.loss(y, rows))
    assert float(task.problem.g(x, y, rows)) == pytest.approx(plain, rel=1e-5)

    rows = {name: np.asarray(value, float) for name, value in task.clients.upper.rows.items()}
    margin = (2 * rows["label"] - 1) * (rows["features"] @ y["w"] + y["b"])
    losses = np.logaddexp(0, -margin)
    share = np.exp(x)
    each = [3 * np.expm1(losses[rows["group"] == a] / 3).sum() / share[a] for a in (0, 1)]
    upper = float(task.problem.f(x, y, task.clients.upper.rows))
    assert upper == pytest.approx(sum(each) / (2 * len(losses)), rel=1e-5)
    counted = np.mean([3 * np.expm1(losses[rows["group"] == a] / 3).mean() for a in (0, 1)])
    worst = max(losses[rows["group"] == a].mean() for a in (0, 1))
    assert worst < 3 * np.log(2 * (1 + counted / 3))

    trained = {name: np.asarray(value, float) for name, value in task.clients.lower.rows.items()}
    other = np.array([0.3, -0.4])
    weights = (np.exp(other) / np.exp(other).sum() / share)[trained["group"].astype(int)]
    margin = (2 * trained["label"] - 1) * (trained["features"] @ y["w"] + y["b"])
    lower = np.mean(weights * np.logaddexp(0, -margin)) + 0.0005 * (y["w"] @ y["w"] + y["b"] ** 2)
    assert float(task.problem.g(other, y, task.clients.lower.rows)) == pytest.approx(lower, rel=1e-5)
    far = task.problem.project_upper(jnp.asarray(x) + jnp.array([9.0, -9.0]))
    np.testing.assert_allclose(far - x, [3, -3], rtol=1e-5)


def test_group_metrics_by_hand():
    task = rk.tasks.group_weights(seed=1)
    rng = np.random.default_rng(0)
    x, y = jnp.array([0.3, -0.4]), {"w": jnp.asarray(rng.normal(size=10)), "b": jnp.asarray(0.2)}
    found = {name: float(value) for name, value in task.evaluate(x, y).items()}
    accuracy, loss = ([found[f"{what}_{name}"] for name in ("large", "small")] for what in ("accuracy", "loss"))
    assert found["worst_accuracy"] == min(accuracy)
    assert found["worst_loss"] == max(loss)
    assert found["group_gap"] == pytest.approx(max(accuracy) - min(accuracy))
    assert min(accuracy) < found["accuracy"] < max(accuracy)
    shares = np.exp(task.init[0])
    softmax = np.exp(x) / np.exp(x).sum()
    assert [found["weight_large"], found["weight_small"]] == pytest.approx((softmax / shares).tolist(), rel=1e-5)
    everyone = {"w": jnp.zeros(10), "b": jnp.asarray(1.0)}  # all are told yes: every true positive rate is 1
    assert float(task.evaluate(x, everyone)["tpr_gap"]) == 0
    assert not [name for name in task.single_level.evaluate(y, ()) if name.startswith("weight")]


@pytest.mark.slow
def test_learnt_weights_serve_the_worst_group_better():
    task = rk.tasks.group_weights(equal=True)
    learnt = run(task, "FedNest", 60, upper_step=1.0).history.iloc[-1]
    plain = run(task.single_level, "FedAvg", 60).history.iloc[-1]
    assert learnt["worst_loss"] < 0.8 * plain["worst_loss"]
    assert learnt["worst_accuracy"] > plain["worst_accuracy"] + 0.05
    assert learnt["group_gap"] < 0.5 * plain["group_gap"]
    assert learnt["tpr_gap"] < 0.5 * plain["tpr_gap"]
    assert learnt["accuracy"] > plain["accuracy"] - 0.06
    assert learnt["weight_small"] > 2 > 1 > learnt["weight_large"]


# Bad input, and the files that may be at hand.


@pytest.mark.parametrize(
    ("make", "given", "message"),
    [
        (rk.tasks.data_cleaning, {"corrupted": 1.0}, "corrupted must be a number from 0 to below 1; got 1.0"),
        (rk.tasks.data_cleaning, {"corrupted": -0.1}, "corrupted must be a number from 0 to below 1; got -0.1"),
        (rk.tasks.data_cleaning, {"validation": 0.0}, "validation must be a number between 0 and 1; got 0.0"),
        (rk.tasks.data_cleaning, {"data": "letters"}, "data must be one of digits, mnist; got 'letters'"),
        (rk.tasks.data_cleaning, {"partition": "x"}, "partition must be one of iid, shards, dirichlet; got 'x'"),
        (rk.tasks.few_shot, {"data": "letters"}, "data must be one of digits, mnist, omniglot; got 'letters'"),
        (rk.tasks.few_shot, {"ways": 11}, "ways must be at most 10, the number of classes; got 11"),
        (rk.tasks.few_shot, {"shots": 0}, "shots must be an integer of at least 1; got 0"),
        (rk.tasks.few_shot, {"queries": 100}, r"shots \+ queries must be at most"),
        (rk.tasks.few_shot, {"clients": -1}, "clients must be an integer of at least 1; got -1"),
        (rk.tasks.group_weights, {"data": "x"}, "data must be one of synthetic, adult; got 'x'"),
        (rk.tasks.group_weights, {"partition": "x"}, "partition must be one of"),
        (rk.tasks.group_weights, {"groups": "sex"}, "groups must be left out for synthetic data"),
        (rk.tasks.group_weights, {"data": "adult", "groups": "x"}, "groups must be one of sex-income, .*; got 'x'"),
        (rk.tasks.group_weights, {"temperature": 0.0}, "temperature must be a positive number; got 0.0"),
    ],
)
def test_bad_input_is_named(make, given, message):
    with pytest.raises(ValueError, match=message):
        make(**given)


def test_cleaning_mnist_has_a_weight_for_each_of_48_000_samples():
    at_hand("mnist")
    task = rk.tasks.data_cleaning(data="mnist", corrupted=0.8)
    assert task.init[0].shape == (48_000,)
    assert set(task.clients.lower_sizes) == {480}
    assert task.defaults["upper_step"] == 144_000


def test_omniglot_is_tested_on_other_alphabets():
    omniglot = at_hand("omniglot")
    alphabets = [
        {omniglot.names[k].split("/")[0] for k in np.unique(labels)}
        for labels in (omniglot.train_labels, omniglot.test_labels)
    ]
    assert not alphabets[0] & alphabets[1]
    task = rk.tasks.few_shot(data="omniglot", clients=4, ways=20, shots=1, queries=2)
    assert task.clients.lower.rows["image"].shape == (4 * 4 * 20, 441)
    assert 1 / 20 < float(task.evaluate(*task.init)["accuracy"]) < 0.5


def test_the_groups_of_adult():
    adult = at_hand("adult")
    task = rk.tasks.group_weights(data="adult")
    man = adult.train[:, adult.columns.index("sex=Male")]
    rich = adult.train_labels == 1
    counts = [np.sum((man == m) & (rich == r)) for m in (0, 1) for r in (0, 1)]
    np.testing.assert_allclose(np.exp(task.init[0]), np.array(counts) / len(rich), rtol=1e-5)
    names = {name for name in task.evaluate(*task.init) if name.startswith("weight_")}
    assert names == {"weight_women_low", "weight_women_high", "weight_men_low", "weight_men_high"}
    for groups, count in (("sex", 2), ("race", 2), ("sex-race", 4), ("doctorate", 2)):
        assert rk.tasks.group_weights(data="adult", groups=groups).init[0].shape == (count,)
