"""Values of many records with outer products as their factors, against the values themselves."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.flatten_util import ravel_pytree

from rookery.base import factors
from rookery.base.factors import Values

RNG = np.random.default_rng(0)
ROWS = {"a": jnp.asarray(RNG.normal(size=(6, 4, 9))), "t": jnp.asarray(RNG.normal(size=(6, 4, 3)))}
POINT = {"w": jnp.asarray(RNG.normal(size=(9, 8))), "v": jnp.asarray(RNG.normal(size=(8, 3))), "b": jnp.ones(8)}
ALONG = jax.tree.map(lambda leaf: jnp.asarray(RNG.normal(size=leaf.shape)), POINT)


def loss(z: Any, row: Any, positions: int = 1) -> Any:
    """A network of two dense layers, on one or several positions of a row."""
    a, t = row["a"][:positions], row["t"][:positions]
    return jnp.sum((jnp.tanh(a @ z["w"] + z["b"]) @ z["v"] - t) ** 2) / positions


def gradient(row: Any) -> Any:
    return jax.grad(loss)(POINT, row)


def product(row: Any) -> Any:
    return jax.jvp(lambda z: jax.grad(loss)(z, row), (POINT,), (ALONG,))[1]


def jitted(row: Any) -> Any:
    return jax.grad(lambda z: -jax.jit(loss, static_argnums=2)(z, row, 1))(POINT)


def penalised(row: Any) -> Any:
    return jax.grad(lambda z: loss(z, row) + jnp.sum(z["w"] ** 2))(POINT)


def positions(row: Any) -> Any:
    return jax.grad(lambda z: loss(z, row, 4))(POINT)


def plain(row: Any) -> Any:
    return {"a": row["a"] ** 2, "n": jnp.sum(row["t"]), "half": row["t"].astype(jnp.bfloat16)}


FUNCTIONS = [gradient, product, jitted, penalised, positions, plain]


def of_rows(fn: Callable[..., Any]) -> np.ndarray:
    leaves = jax.tree.leaves(jax.jit(jax.vmap(fn))(ROWS))
    return np.concatenate([np.asarray(leaf, float).reshape(6, -1) for leaf in leaves], axis=1)


@pytest.mark.parametrize("fn", FUNCTIONS)
def test_norms_and_sums_are_those_of_the_values(fn: Any) -> None:
    values = Values(fn, jax.tree.map(lambda a: a[0], ROWS))
    found, units = values.of(ROWS), [jnp.asarray(1.0)] * len(jax.tree.leaves(values.shapes))
    expected, weights = of_rows(fn), np.linspace(0.1, 1, 6)
    np.testing.assert_allclose(values.norms(found, units), np.linalg.norm(expected, axis=1), rtol=1e-6)
    total = ravel_pytree(values.sums(found, units, jnp.asarray(weights)))[0]
    np.testing.assert_allclose(total, weights @ expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(("fn", "kept"), [(gradient, 2), (product, 2), (jitted, 2), (penalised, 1), (plain, 0)])
def test_dense_layers_are_kept_as_factors(fn: Any, kept: int) -> None:
    values = Values(fn, jax.tree.map(lambda a: a[0], ROWS))
    assert sum(isinstance(value, tuple) for value in values.of(ROWS)) == kept
    if fn is gradient:
        assert values.numbers == 8 + (8 + 3) + (9 + 8)


def test_units_scale_each_leaf() -> None:
    values = Values(gradient, jax.tree.map(lambda a: a[0], ROWS))
    found, units = values.of(ROWS), [jnp.asarray(u) for u in (2.0, 0.5, 8.0)]
    scaled = [leaf / u for leaf, u in zip(jax.tree.leaves(gradient_rows()), units, strict=True)]
    flat = np.concatenate([np.asarray(leaf).reshape(6, -1) for leaf in scaled], axis=1)
    np.testing.assert_allclose(values.norms(found, units), np.linalg.norm(flat, axis=1), rtol=1e-6)
    total = values.sums(found, units, jnp.ones(6))
    np.testing.assert_allclose(ravel_pytree(total)[0], flat.sum(axis=0), rtol=1e-6, atol=1e-9)


def gradient_rows() -> Any:
    return jax.vmap(gradient)(ROWS)


def test_a_norm_is_never_too_small_where_terms_cancel() -> None:
    """In single precision the sum of 1e4·(l ⊗ r) and −1e4·(l' ⊗ r), l' close to l, is mostly rounding."""
    rows = {k: v.astype(jnp.float32) for k, v in ROWS.items()}
    left = 1e4 * jnp.stack([rows["a"][:, 0], -rows["a"][:, 0] * (1 + 1e-6)], axis=1)
    right = jnp.stack([rows["t"][:, 0]] * 2, axis=1)
    true = np.linalg.norm(np.einsum("nkp,nkq->npq", np.asarray(left, float), np.asarray(right, float)), axis=(1, 2))
    assert (np.asarray(factors._norms((left, right))) >= true * (1 - 1e-5)).all()


@pytest.mark.parametrize("bad", [np.nan, np.inf, 1e200])
def test_what_is_not_finite_shows_in_the_norm_and_stays_out_of_the_sum(bad: float) -> None:
    rows = {**ROWS, "a": ROWS["a"].at[2].set(bad)}
    fn = lambda row: jax.grad(lambda z: jnp.sum((row["a"][:1] @ z["w"]) ** 2 * 1e200))(POINT)
    values = Values(fn, jax.tree.map(lambda a: a[0], rows))
    found, units = values.of(rows), [jnp.asarray(1.0)] * 3
    norms = values.norms(found, units)
    assert list(np.isfinite(norms)) == [True, True, False, True, True, True]
    total = values.sums(found, units, jnp.where(jnp.isfinite(norms), 1 / norms, 0))
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(total))


@pytest.mark.parametrize("size", [1e-30, 1e30])
def test_no_square_overflows(size: float) -> None:
    rows = {"a": (ROWS["a"] * size).astype(jnp.float32)}
    fn = lambda row: {
        "outer": jax.grad(lambda w: jnp.sum(row["a"][:1] @ w))(jnp.ones((9, 8), jnp.float32)),
        "a": row["a"],
    }
    values = Values(fn, jax.tree.map(lambda a: a[0], rows))
    norms = values.norms(values.of(rows), [jnp.float32(1)] * 2)
    a = np.asarray(ROWS["a"])
    expected = np.sqrt(np.sum(a**2, axis=(1, 2)) + 8 * np.sum(a[:, 0] ** 2, axis=1))
    np.testing.assert_allclose(np.asarray(norms, float) / size, expected, rtol=1e-5)


def test_a_large_input_without_a_gradient_adds_nothing() -> None:
    rows = {"a": ROWS["a"].astype(jnp.float32).at[2].set(3e38)}
    fn = lambda row: jax.grad(lambda w: jnp.sum(row["a"][:1] @ w) * (row["a"][0, 0] < 1e30))(
        jnp.ones((9, 8), jnp.float32)
    )
    values = Values(fn, jax.tree.map(lambda a: a[0], rows))
    found, units = values.of(rows), [jnp.float32(0.5)]
    norms = values.norms(found, units)
    assert float(norms[2]) == 0.0
    total = values.sums(found, units, jnp.ones(6, jnp.float32))
    expected = 2 * np.delete(np.asarray(ROWS["a"]), 2, axis=0)[:, 0].sum(axis=0)
    np.testing.assert_allclose(total, np.tile(expected[:, None], 8), rtol=1e-4, atol=1e-5)
