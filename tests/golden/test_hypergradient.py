"""The hypergradient against closed forms: exact where the method is, within its error bars where it is random."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from evaluated import EvaluatedFed

import rookery as rk
from rookery.algorithms import fednest
from rookery.language.fed import Client
from rookery.tasks.quadratic import Solution, solution

WEIGHTS = [0.1, 0.3, 0.2, 0.4]
ALPHA = 0.01
STEP = 0.15  # 1/ℓ; curvatures are between 1 and 5


def make_task(**given: Any) -> Any:
    return rk.tasks.quadratic(**{"clients": 4, "sizes": [1, 3, 2, 5], "noise": 0.3, "seed": 2} | given)


TASK = make_task(weights=WEIGHTS)


@pytest.mark.parametrize(
    ("neumann", "terms"),
    [pytest.param("sum", 200, marks=pytest.mark.slow), ("cg", 4)],  # cg ends after as many iterations as y has entries
)
def test_one_step_of_x_is_the_closed_form(neumann: Any, terms: int) -> None:
    """With τ = 1, x moves by −α h: h can be read off."""
    method = rk.FedNest(
        upper_step=ALPHA, lower_step=0.1, neumann=neumann, neumann_terms=terms, hessian_step=STEP, lower_local_steps=2
    )
    x, y = np.array([0.3, -1.0, 0.7]), np.array([1.0, -0.5, 0.2, 0.4])
    run = rk.solve(TASK.problem, TASK.clients, method, (x, y), 1)
    h = (x - np.asarray(run.x)) / ALPHA
    np.testing.assert_allclose(h, solution(TASK).hypergradient(x, np.asarray(run.y)), rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize(("neumann", "terms"), [pytest.param("sum", 200, marks=pytest.mark.slow), ("cg", 4)])
def test_light_step_is_each_clients_own_closed_form(neumann: Any, terms: int) -> None:
    """LFedOut's clients know only their own matrices: the mean of their hypergradients, not that of the mean."""
    method = rk.LFedNest(
        upper_step=ALPHA, lower_step=0.1, neumann=neumann, neumann_terms=terms, hessian_step=STEP, lower_local_steps=2
    )
    x, y = np.array([0.3, -1.0, 0.7]), np.array([1.0, -0.5, 0.2, 0.4])
    run = rk.solve(TASK.problem, TASK.clients, method, (x, y), 1)
    h = (x - np.asarray(run.x)) / ALPHA
    closed = [of_cohort([i]) for i in range(4)]
    own = [p * s.hypergradient(x, np.asarray(run.y)) for p, s in zip(WEIGHTS, closed, strict=True)]
    np.testing.assert_allclose(h, sum(own), rtol=1e-8, atol=1e-8)
    assert np.abs(h - solution(TASK).hypergradient(x, np.asarray(run.y))).max() > 1e-2


def of_cohort(ids: list[int], task: Any = TASK) -> Solution:
    """The closed forms for these clients and their weights."""
    p = np.asarray(task.clients.weights)[ids]
    held = [{**task.clients.client_data(i)["lower"][0], **task.clients.client_data(i)["upper"][0]} for i in ids]
    means = {
        name: sum(w * own[name].mean(axis=0) for w, own in zip(p / p.sum(), held, strict=True)) for name in held[0]
    }
    return Solution(**means)


# The random estimator, over many keys at once.

X, Y = jnp.array([0.3, -1.0, 0.7]), jnp.array([1.0, -0.5, 0.2, 0.4])
TERMS = 4


def series(closed: Solution, terms: int, step: float = STEP) -> np.ndarray:
    """step·Σ_{n<terms} (I − step·H)ⁿ ∇_y f."""
    x, y = np.asarray(X), np.asarray(Y)
    b = closed.C @ y - closed.c + closed.E.T @ x
    contraction = np.eye(len(b)) - step * closed.A
    return step * sum(np.linalg.matrix_power(contraction, n) @ b for n in range(terms))


def estimates(task: Any, ids: Any, resample: bool, count: int, batch_size: int | None = None) -> np.ndarray:
    """p of FedIHGP for `count` keys; fed_ihgp is called as FedOut does, on a cohort of these ids."""
    method = rk.FedNest(
        neumann="random", neumann_terms=TERMS, hessian_step=STEP, resample=resample, batch_size=batch_size
    )

    def one(key: Any) -> Any:
        fed = EvaluatedFed(task.problem, task.clients, jnp.asarray(ids))
        return fednest.fed_ihgp(method, fed, X, Y, None, STEP, key)

    return np.asarray(jax.jit(jax.vmap(one))(jax.random.split(jax.random.key(0), count)))


def assert_unbiased(samples: np.ndarray, target: np.ndarray) -> None:
    """The mean lies within four standard errors of the target, in every entry."""
    error = samples.std(axis=0, ddof=1) / np.sqrt(len(samples))
    off = np.abs(samples.mean(axis=0) - target) / error
    assert off.max() < 4, f"{off.max():.1f} standard errors off: {samples.mean(axis=0)} for {target}"


def assert_told_apart(samples: np.ndarray, *others: np.ndarray) -> None:
    """The error bars are small enough to tell the target from each of these."""
    error = samples.std(axis=0, ddof=1) / np.sqrt(len(samples))
    for other in others:
        assert (np.abs(samples.mean(axis=0) - other) / error).max() > 8


def test_random_neumann_with_everyone() -> None:
    samples = estimates(TASK, range(4), resample=False, count=20_000)
    closed = solution(TASK)
    assert_unbiased(samples, series(closed, TERMS))
    assert_told_apart(samples, series(closed, TERMS + 1), series(closed, TERMS - 1), series(closed, TERMS) / TERMS)


def test_random_neumann_of_one_cohort_estimates_that_cohorts_series() -> None:
    ids = [0, 2]
    samples = estimates(TASK, ids, resample=False, count=20_000)
    assert_unbiased(samples, series(of_cohort(ids), TERMS))
    assert_told_apart(samples, series(solution(TASK), TERMS))


@pytest.mark.slow
def test_random_neumann_with_fresh_cohorts_estimates_everyones_series() -> None:
    """Lemma 2.2: fresh, independent cohorts of equal weights, for any cohort of the round."""
    task = make_task()
    samples = estimates(task, [0, 2], resample=True, count=60_000)
    closed = solution(task)
    assert_unbiased(samples, series(closed, TERMS))
    one_at_a_time = [[0, 1], [0, 2], [0, 3], [1, 2], [1, 3], [2, 3]]
    reused = np.mean([series(of_cohort(ids, task), TERMS) for ids in one_at_a_time], axis=0)
    # One fresh cohort for all exchanges would give E[Hⁿb] instead of E[H]ⁿE[b].
    assert_told_apart(samples, reused, series(of_cohort([0, 2], task), TERMS))


@pytest.mark.slow
def test_random_neumann_with_minibatches() -> None:
    """Fresh minibatches for every product: their noise averages out although the estimator multiplies them."""
    task = make_task(sizes=[6, 4, 5, 8], noise=1.0)
    samples = estimates(task, range(4), resample=False, count=60_000, batch_size=2)
    closed = solution(task)
    assert_unbiased(samples, series(closed, TERMS))
    assert_told_apart(samples, series(closed, TERMS + 1), series(closed, TERMS - 1))
    assert len(np.unique(samples[:, 0])) > 50 * TERMS  # the minibatches were drawn at all


# Minibatch oracles.


@pytest.mark.parametrize(
    ("i", "replace"),  # fewer samples than the batch, and more
    [(3, False), *(pytest.param(*own, marks=pytest.mark.slow) for own in ((0, False), (0, True), (3, True)))],
)
def test_minibatch_oracles_are_unbiased(i: int, replace: bool) -> None:
    task = make_task(sizes=[2, 3, 4, 7], noise=1.0, replace=replace)
    closed = of_cohort([i], task)
    x, y, v = np.asarray(X), np.asarray(Y), np.array([0.5, -1.0, 2.0, 0.3])
    expected = {
        "f_x": closed.D @ x - closed.d + closed.E @ y,
        "f_y": closed.C @ y - closed.c + closed.E.T @ x,
        "g_y": closed.A @ y - closed.B @ x - closed.b,
        "g_yy": closed.A @ v,
        "g_xy": -closed.B.T @ v,
    }

    def oracles(key: Any) -> dict[str, Any]:
        c = Client(task.problem, task.clients, jnp.asarray(i), jnp.asarray(i))
        lower, upper = c.lower(key, 3, step=1), c.upper(key, 3, step=1)
        return {
            "f_x": c.f_x(X, Y, upper),
            "f_y": c.f_y(X, Y, upper),
            "g_y": c.g_y(X, Y, lower),
            "g_yy": c.g_yy(X, Y, lower, v),
            "g_xy": c.g_xy(X, Y, lower, v),
        }

    drawn = jax.jit(jax.vmap(oracles))(jax.random.split(jax.random.key(1), 10_000))
    for name, target in expected.items():
        samples = np.asarray(drawn[name])
        if i == 0 and not replace:  # a client with fewer samples than the batch gives all of them
            np.testing.assert_allclose(samples, np.broadcast_to(target, samples.shape), rtol=1e-12, atol=1e-12)
        else:
            assert_unbiased(samples, target)
            assert samples.std(axis=0).min() > 1e-3
