"""Hyper-representation and loss tuning: the losses, the sizes, and MNIST where it is at hand."""

import dataclasses

import jax
import jax.flatten_util
import jax.numpy as jnp
import numpy as np
import pytest

import rookery as rk
from rookery.base import tree
from rookery.data import DataError, load
from rookery.tasks.hyperrep import _shares
from rookery.tasks.loss_tuning import balanced_metrics, network, scores, vs_loss

KEY = jax.random.key(0)


@pytest.fixture(scope="module")
def mnist():
    try:
        return load("mnist")
    except DataError:
        pytest.skip("MNIST is not at hand")


def small_batch():
    rng = np.random.default_rng(0)
    labels = rng.integers(0, 10, 12)
    return {"image": rng.normal(size=(12, 6)), "label": labels, "balance": rng.uniform(0.5, 2, 12)}


def test_the_vs_loss_is_that_of_the_paper():
    batch = small_batch()
    y = network(KEY, (6, 5, 10))
    rng = np.random.default_rng(1)
    x = {name: rng.normal(size=10) for name in ("weight", "additive", "multiplicative")}
    f = np.asarray(scores(y, batch["image"]))
    l, d = x["additive"], x["multiplicative"]
    each = []
    for row, k in zip(f, batch["label"], strict=True):
        others = [np.exp(l[j] - l[k] + d[j] * row[j] - d[k] * row[k]) for j in range(10) if j != k]
        each.append(np.exp(x["weight"][k]) * np.log(1 + sum(others)))
    assert float(vs_loss(x, y, batch)) == pytest.approx(np.mean(each), rel=1e-5)


@pytest.mark.slow
def test_the_start_of_the_loss_is_plain_cross_entropy_and_the_upper_loss_does_not_see_it():
    task = rk.tasks.loss_tuning()
    x, y = task.init
    rows = jax.tree.map(lambda a: a[:50], task.clients.lower.rows)
    assert float(task.problem.g(x, y, rows)) == pytest.approx(float(task.single_level.problem.loss(y, rows)), rel=1e-6)
    direct = jax.grad(task.problem.f)(x, y, jax.tree.map(lambda a: a[:50], task.clients.upper.rows))
    assert all(float(jnp.abs(leaf).max()) == 0 for leaf in jax.tree.leaves(direct))
    np.testing.assert_allclose(task.problem.project_upper(x)["multiplicative"], 1)


def test_the_balanced_loss_is_the_mean_of_the_classes():
    labels = np.repeat(np.arange(10), np.arange(1, 11))
    images = np.random.default_rng(0).normal(size=(len(labels), 6)).astype(np.float32)
    y = network(KEY, (6, 10))
    f = np.asarray(scores(y, images))
    each = np.log(np.exp(f).sum(axis=1)) - f[np.arange(len(f)), labels]
    right = f.argmax(axis=1) == labels
    losses, accuracies = ([own[labels == k].mean() for k in range(10)] for own in (each, right))
    unweighted = {"image": images, "label": labels, "balance": np.ones(len(labels), np.float32)}
    metrics = balanced_metrics(images, labels, unweighted)(None, y)
    assert float(metrics["loss"]) == pytest.approx(np.mean(losses), rel=1e-5)
    assert float(metrics["accuracy"]) == pytest.approx(np.mean(accuracies), abs=1e-6)
    assert float(metrics["tail_accuracy"]) == pytest.approx(np.mean(accuracies[7:]), abs=1e-6)
    assert float(metrics["validation_loss"]) == pytest.approx(each.mean(), rel=1e-5)


def test_the_weights_of_the_validation_samples_are_those_of_the_whole_long_tailed_set():
    clients = rk.tasks.loss_tuning(clients=5).clients
    rows = {name: np.asarray(value) for name, value in clients.upper.rows.items()}
    labels = np.concatenate([np.asarray(clients.lower.rows["label"]), rows["label"]])
    counts = np.bincount(labels)
    np.testing.assert_allclose(rows["balance"], len(labels) / (10 * counts[rows["label"]]), rtol=1e-5)
    assert counts.tolist() == sorted(counts, reverse=True)


def test_clients_split_four_to_one_and_one_client_holds_everything():
    many, one = rk.tasks.loss_tuning().clients, rk.tasks.loss_tuning(clients=1).clients
    assert many.lower_sizes.sum() + many.upper_sizes.sum() == one.lower_sizes.sum() + one.upper_sizes.sum()
    assert (np.abs(many.lower_sizes - 4 * many.upper_sizes) <= 4).all()
    equal = rk.tasks.loss_tuning(partition="shards", equal=True).clients
    assert equal.lower.widest == equal.lower.narrowest


@pytest.mark.slow
def test_tuning_beats_no_tuning_on_the_rare_digits():
    tails = {"FedNest": [], "FedSVRG": []}
    for seed in (0, 1):
        task = rk.tasks.loss_tuning(seed=seed, equal=True)
        for name, own in (("FedNest", task), ("FedSVRG", task.single_level)):
            method = own.algorithm(getattr(rk, name))
            run = rk.solve(
                own.problem,
                own.clients,
                method,
                own.init,
                60,
                cohort=10,
                evaluate=own.evaluate,
                every=20,
                progress=False,
            )
            tails[name].append(run.history["tail_accuracy"].iloc[-2:].mean())
    assert np.mean(tails["FedNest"]) > np.mean(tails["FedSVRG"])


def test_one_output_layer_for_all_is_not_looked_at_where_there_are_many() -> None:
    with pytest.raises(ValueError, match='leave them out with scope="client"'):
        rk.tasks.hyperrep(scope="client", share=True)


@pytest.mark.slow
def test_the_implicit_share_on_a_small_case():
    task = rk.tasks.hyperrep(clients=5, width=4, share=True)
    x, y = task.init
    rows = task.clients.lower.rows, task.clients.upper.rows
    shares = _shares(task.problem, x, y, *rows)
    with jax.enable_x64(True):
        x, y, lower, upper = jax.tree.map(
            lambda a: jnp.asarray(a, jnp.float64) if jnp.issubdtype(a.dtype, jnp.floating) else a, (x, y, *rows)
        )
        flat, shape = jax.flatten_util.ravel_pytree(y)
        g = lambda x, v: task.problem.g(x, shape(v), lower)
        f_x, f_y = jax.grad(lambda x, v: task.problem.f(x, shape(v), upper), (0, 1))(x, flat)
        hessian = np.asarray(jax.hessian(g, 1)(x, flat))
        step, p, term = 0.01, 0.0, np.asarray(f_y)
        for _ in range(6):
            p, term = p + step * term, term - step * hessian @ term
        implicit = jax.grad(lambda x: jax.grad(g, 1)(x, flat) @ jnp.asarray(p))(x)
        expected = float(tree.norm(implicit) / tree.norm(f_x))
    assert float(shares["implicit_share_series_01"]) == pytest.approx(expected, rel=1e-3)
    assert set(task.evaluate(*task.init)) == {"accuracy", "loss", *shares}


def test_data_sets_by_name():
    for make in (rk.tasks.hyperrep, rk.tasks.loss_tuning):
        with pytest.raises(ValueError, match="data must be one of digits, mnist; got 'letters'"):
            make(data="letters")


@pytest.mark.parametrize("partition", ["iid", "shards"])
def test_hyperrep_on_mnist_has_the_sizes_of_the_paper(mnist, partition):
    task = rk.tasks.hyperrep(data="mnist", partition=partition)
    assert task.clients.n == 100
    assert set(task.clients.lower_sizes) == set(task.clients.upper_sizes) == {300}
    x, y = task.init
    assert sum(leaf.size for leaf in jax.tree.leaves(x)) == 157_000
    assert sum(leaf.size for leaf in jax.tree.leaves(y)) == 2_010
    images = np.asarray(task.clients.lower.rows["image"])
    assert abs(images.mean()) < 0.01
    assert abs(images.std() - 1) < 0.01
    classes = [len(np.unique(own["label"])) for own in (task.clients.client_data(i)["lower"][0] for i in range(100))]
    assert max(classes) <= 4 if partition == "shards" else min(classes) >= 8


def test_loss_tuning_on_mnist_has_the_sizes_of_the_paper(mnist):
    task = rk.tasks.loss_tuning(data="mnist")
    labels = np.concatenate([np.asarray(source.rows["label"]) for source in (task.clients.lower, task.clients.upper)])
    assert np.bincount(labels).tolist() == [5923, 3597, 2156, 1293, 775, 465, 278, 167, 100, 60]
    assert [leaf["w"].shape for leaf in task.init[1]] == [(784, 200), (200, 100), (100, 10)]
    assert dataclasses.replace(task).problem is rk.tasks.loss_tuning(data="mnist", seed=1).problem
