"""The projection onto the capped simplex, against bisection and a general-purpose solver."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.optimize import minimize

from rookery.parts.projection import capped_simplex

projected = jax.jit(capped_simplex, static_argnums=1)


def bisected(v: np.ndarray, cap: float) -> np.ndarray:
    """Independent: halve the interval for λ until it can't be halved, then solve for it on the free entries."""
    low, high = v.min() - 1 - cap, v.max() + 1
    while low < (middle := (low + high) / 2) < high:
        low, high = (middle, high) if np.clip(v - middle, 0, cap).sum() > 1 else (low, middle)
    return np.clip(v - (low + high) / 2, 0, cap)


@pytest.mark.parametrize("size", [*(pytest.param(size, marks=pytest.mark.slow) for size in (1, 2)), 20])
def test_equals_bisection(size: int) -> None:
    rng = np.random.default_rng(size)
    for cap in np.linspace(1 / size, 1, 4).tolist():
        for scale in (0.0, 1e-3, 1.0, 1e3):
            v = scale * rng.normal(size=size) + rng.normal()
            w = np.asarray(projected(jnp.asarray(v), cap))
            assert w.sum() == pytest.approx(1, abs=1e-12)
            assert w.min() >= 0
            assert w.max() <= cap
            np.testing.assert_allclose(w, bisected(v, cap), rtol=0, atol=1e-10)


def test_equals_a_quadratic_program() -> None:
    rng = np.random.default_rng(0)
    for cap in (0.25, 0.4, 1.0):
        v = rng.normal(size=5)
        found = minimize(
            lambda w: (w - v) @ (w - v), np.full(5, 0.2), jac=lambda w: 2 * (w - v), bounds=[(0, cap)] * 5,
            constraints={"type": "eq", "fun": lambda w: w.sum() - 1}, method="SLSQP", options={"ftol": 1e-15},
        )  # fmt: skip
        np.testing.assert_allclose(projected(jnp.asarray(v), cap), found.x, atol=1e-7)


@pytest.mark.slow
def test_ties_and_many_nodes() -> None:
    """Ties share; a point of the set stays; ten thousand nodes are no harder."""
    np.testing.assert_allclose(
        capped_simplex(jnp.array([3.0, 3.0, 3.0, 0.0]), 0.4), [1 / 3, 1 / 3, 1 / 3, 0], atol=1e-15
    )
    np.testing.assert_allclose(capped_simplex(jnp.array([5.0, 5.0, 1.0, 1.0]), 0.4), [0.4, 0.4, 0.1, 0.1], atol=1e-15)
    np.testing.assert_allclose(capped_simplex(jnp.array([5.0, 5.0, 1.0, 1.0]), 0.5), [0.5, 0.5, 0, 0], atol=1e-15)
    np.testing.assert_array_equal(capped_simplex(jnp.array([9.0, -4.0, 0.0, 0.0]), 0.25), np.full(4, 0.25))
    inside = np.random.default_rng(1).dirichlet(np.ones(20))
    np.testing.assert_allclose(capped_simplex(jnp.asarray(inside), 1.0), inside, atol=1e-15)
    many = np.round(np.random.default_rng(2).normal(size=10_000), 2)
    for cap in (1e-4, 3e-3, 1.0):
        np.testing.assert_allclose(capped_simplex(jnp.asarray(many), cap), bisected(many, cap), rtol=0, atol=1e-10)
    single = capped_simplex(jnp.asarray(many, jnp.float32), 3e-3)
    assert single.dtype == jnp.float32
    assert float(single.astype(float).sum()) == pytest.approx(1, abs=1e-5)


def test_an_empty_set_is_refused() -> None:
    with pytest.raises(ValueError, match="at least 1/4"):
        capped_simplex(jnp.zeros(4), 0.2)
