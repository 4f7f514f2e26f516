"""Minibatches and cohorts by their statistics: bijections, equal counts, uniform marginals, no repeats by mistake."""

from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.stats

import rookery as rk
from rookery.data.cohort import sample_cohort
from rookery.data.rows import shuffled

LEAST_P = 1e-4  # keys are fixed, so a test that passes once passes always


def orders(size: int, keys: Any, epoch: int = 0) -> np.ndarray:
    """One whole order for each key."""
    return np.asarray(_orders(size)(keys, epoch))


@cache
def _orders(size: int) -> Any:
    one = lambda key, epoch: shuffled(key, jnp.arange(size), jnp.full(size, epoch), size)
    return jax.jit(jax.vmap(one, (0, None)))


def keys(count: int, seed: int = 0) -> Any:
    return jax.random.split(jax.random.key(seed), count)


@pytest.mark.parametrize(
    "size", [1, 4, 31, 1000, *(pytest.param(size, marks=pytest.mark.slow) for size in (2, 3, 5, 300))]
)
def test_shuffled_is_a_bijection(size: int) -> None:
    for epoch in (0, 1, 5000):
        found = orders(size, keys(20), epoch)
        np.testing.assert_array_equal(np.sort(found, axis=1), np.tile(np.arange(size), (20, 1)))


def test_shuffled_with_a_traced_size() -> None:
    """Clients of different sizes share one program: the order must not depend on how the size is given."""
    one = jax.jit(lambda size: shuffled(jax.random.key(3), jnp.arange(9), jnp.zeros(9, int), size))
    np.testing.assert_array_equal(one(jnp.int32(9)), orders(9, jax.random.key(3)[None])[0])


@pytest.mark.parametrize("size", [3, 50, *(pytest.param(size, marks=pytest.mark.slow) for size in (2, 7, 1000))])
def test_every_sample_is_equally_likely_at_the_first_rank(size: int) -> None:
    zero = jnp.zeros(1, int)
    first = jax.jit(jax.vmap(lambda key: shuffled(key, zero, zero, size)))(keys(20_000))
    counts = np.bincount(np.asarray(first).ravel(), minlength=size)
    assert scipy.stats.chisquare(counts).pvalue > LEAST_P, counts


@pytest.mark.parametrize("size", [3, 4])
def test_every_order_is_equally_likely(size: int) -> None:
    """All size! of them, so that no two ranks go together."""
    found, counts = np.unique(orders(size, keys(24_000)), axis=0, return_counts=True)
    assert len(found) == {3: 6, 4: 24}[size]
    assert scipy.stats.chisquare(counts).pvalue > LEAST_P, counts


def test_epochs_have_different_and_independent_orders() -> None:
    first, second = orders(300, keys(50), 0), orders(300, keys(50), 1)
    assert (first == second).mean() < 3 / 300  # a pair of random orders agrees in one place of 300
    joint = np.zeros((4, 4))
    np.add.at(joint, (orders(4, keys(16_000), 0)[:, 0], orders(4, keys(16_000), 1)[:, 0]), 1)
    assert scipy.stats.chisquare(joint.ravel()).pvalue > LEAST_P, joint


@pytest.mark.slow
def test_the_epochs_of_one_key_are_uniform_too() -> None:
    """A local run of many epochs has one key: the drift alone must mix."""
    ranks = jnp.zeros(6000, int)
    found = np.asarray(shuffled(jax.random.key(0), ranks, jnp.arange(6000), 6))
    assert scipy.stats.chisquare(np.bincount(found, minlength=6)).pvalue > LEAST_P


def test_keys_have_different_orders() -> None:
    found = orders(300, keys(50))
    assert len(np.unique(found, axis=0)) == 50


# Minibatches: each sample is its client's number and its own.

SIZES = [12, 3, 8]


def federation(sizes: list[int], replace: bool = False) -> rk.Clients:
    return rk.Clients(upper=[{"id": 1000 * i + np.arange(s)} for i, s in enumerate(sizes)], replace=replace)


@partial(jax.jit, static_argnums=(2, 5))
def draw(clients: rk.Clients, i: Any, size: int, key: Any, step: Any, replace: bool) -> Any:
    batch = clients.view("upper", i).draw(key, size, step, replace)
    return batch.rows["id"], jnp.ones(size, bool) if batch.mask is None else batch.mask


def batches(clients: rk.Clients, i: int, size: int, steps: int, key: Any) -> list[np.ndarray]:
    """The samples of the first `steps` minibatches of client i."""
    found = []
    for step in range(steps):
        rows, mask = draw(clients, i, size, key, step, clients.replace)
        found.append(np.asarray(rows)[np.asarray(mask)])
    return found


@pytest.mark.parametrize("sizes", [SIZES, [12, 12, 12]], ids=["ragged", "equal"])
@pytest.mark.parametrize("size", [3, 5, *(pytest.param(size, marks=pytest.mark.slow) for size in (1, 4))])
def test_every_sample_equally_often(sizes: list[int], size: int) -> None:
    """Over whole epochs, also where a minibatch runs from one epoch into the next."""
    for seed in range(3):
        drawn = batches(federation(sizes), 0, size, 12, jax.random.key(seed))
        assert all(len(batch) == size for batch in drawn)
        found, counts = np.unique(np.concatenate(drawn), return_counts=True)
        np.testing.assert_array_equal(found, np.arange(12))
        assert set(counts) == {size}  # 12 steps of `size` samples are `size` epochs of 12
        first = np.concatenate(drawn)[:12]
        assert len(set(first)) == 12, "a sample came twice within an epoch"


def test_no_minibatch_is_repeated() -> None:
    """Over an epoch and from one epoch, key or client to the next."""
    clients = federation([12, 12, 12])
    drawn = batches(clients, 0, 4, 9, jax.random.key(0)) + batches(clients, 0, 4, 9, jax.random.key(1))
    assert len({tuple(batch) for batch in drawn}) == len(drawn)
    assert {int(v) // 1000 for batch in batches(clients, 2, 4, 9, jax.random.key(0)) for v in batch} == {2}


@pytest.mark.parametrize("replace", [False, True])
def test_a_client_smaller_than_the_batch(replace: bool) -> None:
    drawn = batches(federation(SIZES, replace), 1, 5, 6, jax.random.key(0))
    assert all(len(batch) == 3 for batch in drawn)
    assert {int(v) for batch in drawn for v in batch} == {1000, 1001, 1002}
    if not replace:  # all of its samples, every time
        assert all(sorted(batch) == [1000, 1001, 1002] for batch in drawn)
    # Its neighbours have enough.
    assert all(
        len(batch) == 5 and set(batch // 1000) == {2} for batch in batches(federation(SIZES), 2, 5, 6, keys(1)[0])
    )


@pytest.mark.parametrize("replace", [False, True])
@pytest.mark.parametrize("sizes", [SIZES, [12, 12, 12]], ids=["ragged", "equal"])
def test_a_batch_is_never_larger_than_the_data(sizes: list[int], replace: bool) -> None:
    clients, key = federation(sizes, replace), jax.random.key(0)
    of = lambda i, size, step: clients.view("upper", i).draw(key, size, step, replace)
    for i in range(3):
        for step in range(3):
            batch, whole = of(i, 10**12, step), of(i, 12, step)
            assert batch.rows["id"].shape == (12,)
            jax.tree.map(np.testing.assert_array_equal, batch, whole)


def test_a_huge_batch_costs_what_the_data_cost() -> None:
    clients = rk.Clients(upper=[np.arange(10.0) + i for i in range(3)])
    problem, start = rk.SingleLevel(lambda x, b: jnp.mean((x - b) ** 2)), np.zeros(())
    run = lambda size: rk.solve(problem, clients, rk.FedAvg(step=0.1, local_steps=3, batch_size=size), start, 4)
    whole, huge = run(10), run(10**9)
    assert float(huge.x) == float(whole.x)
    assert huge.history["samples_upper"].tolist() == whole.history["samples_upper"].tolist()


def test_with_replacement() -> None:
    """Independent uniform draws: so samples do come twice in a minibatch, and steps do not depend on each other."""
    clients = federation(SIZES, replace=True)

    @jax.jit
    @jax.vmap
    def draw(key: Any) -> Any:
        view = clients.view("upper", jnp.asarray(2))
        return jnp.stack([view.draw(key, 2, step, True).rows["id"] for step in range(2)]) - 2000

    found = np.asarray(draw(keys(16_000)))  # (keys, steps, places), samples 0..7
    for a, b in (((0, 0), (0, 1)), ((0, 0), (1, 0))):
        joint = np.zeros((8, 8))
        np.add.at(joint, (found[:, *a], found[:, *b]), 1)
        assert scipy.stats.chisquare(joint.ravel()).pvalue > LEAST_P
    assert (found[:, 0] == found[:, 1]).all(axis=1).mean() < 0.05


# Cohorts.

COHORTS = [(10, 4), (7, 7), (9, 1), (6, 5), (40, 5), (1000, 3)]  # the last two are drawn by Floyd's method


def draw_cohorts(n: int, size: int, count: int) -> np.ndarray:
    return np.asarray(jax.jit(jax.vmap(lambda key: sample_cohort(key, n, size)))(keys(count)))


@pytest.mark.parametrize(("n", "size"), COHORTS)
def test_a_cohort_is_a_sorted_set_of_clients(n: int, size: int) -> None:
    found = draw_cohorts(n, size, 2000)
    assert found.shape == (2000, size)
    assert found.min() >= 0
    assert found.max() < n
    assert (np.diff(found, axis=1) > 0).all()  # ascending, so no duplicates
    if size == n:
        np.testing.assert_array_equal(found[0], np.arange(n))


@pytest.mark.parametrize(
    ("n", "size"), [(10, 4), (40, 5), *(pytest.param(*own, marks=pytest.mark.slow) for own in ((9, 1), (16, 2)))]
)
def test_every_client_is_equally_likely(n: int, size: int) -> None:
    counts = np.bincount(draw_cohorts(n, size, 20_000).ravel(), minlength=n)
    # Draws without replacement vary less than a multinomial: the usual statistic, scaled, is chi-square again.
    statistic = ((counts - counts.mean()) ** 2 / counts.mean()).sum() * (n - 1) / (n - size)
    assert scipy.stats.chi2.sf(statistic, n - 1) > LEAST_P, counts


@pytest.mark.parametrize(
    ("n", "size", "sets"),
    [(6, 3, 20), (16, 2, 120), *(pytest.param(*own, marks=pytest.mark.slow) for own in ((5, 2, 10), (24, 3, 2024)))],
)
def test_every_cohort_is_equally_likely(n: int, size: int, sets: int) -> None:
    found, counts = np.unique(draw_cohorts(n, size, 40_000), axis=0, return_counts=True)
    assert len(found) == sets
    assert scipy.stats.chisquare(counts).pvalue > LEAST_P, counts
