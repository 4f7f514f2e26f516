"""Inverse-Hessian products against numpy.linalg.solve, and power iteration against numpy.linalg.eigvalsh."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.stats

from rookery.parts import inverse_hessian

DIM = 6
STEP = 0.15


def spd(seed: int = 0) -> np.ndarray:
    """Symmetric, with eigenvalues from 1 to 6."""
    basis, _ = np.linalg.qr(np.random.default_rng(seed).normal(size=(DIM, DIM)))
    return basis @ np.diag(np.linspace(1, 6, DIM)) @ basis.T


H = spd()
B = np.random.default_rng(1).normal(size=DIM)


def as_tree(v: Any) -> dict[str, Any]:
    """A vector as a pytree of two leaves, which exposes dot products over one leaf only."""
    return {"a": jnp.asarray(v)[:2], "b": jnp.asarray(v)[2:].reshape(2, 2)}


def flat(t: dict[str, Any]) -> Any:
    return jnp.concatenate([t["a"], t["b"].ravel()])


def product(v: Any, n: Any) -> Any:
    return as_tree(H @ flat(v))


def loop(n: Any, body: Any, carry: Any, most: int | None = None) -> Any:
    return jax.lax.fori_loop(0, n, body, carry)


def solve(method: Any, terms: int, b: np.ndarray = B, seed: int = 0) -> np.ndarray:
    found = inverse_hessian.solve(method, loop, product, as_tree(b), STEP, terms, jax.random.key(seed))
    return np.asarray(flat(found))


@pytest.mark.parametrize("terms", [1, 2, 5])
def test_sum_is_the_series_with_one_term_more(terms: int) -> None:
    contraction = np.eye(DIM) - STEP * H
    expected = STEP * sum(np.linalg.matrix_power(contraction, n) @ B for n in range(terms + 1))
    np.testing.assert_allclose(solve("sum", terms), expected, rtol=1e-12)


@pytest.mark.parametrize(("method", "terms"), [("sum", 200), ("cg", DIM)])
def test_enough_terms_give_the_solution(method: Any, terms: int) -> None:
    np.testing.assert_allclose(solve(method, terms), np.linalg.solve(H, B), rtol=1e-10, atol=1e-11)


@pytest.mark.parametrize("terms", [1, 2, 4])
def test_cg_is_optimal_in_the_krylov_space(terms: int) -> None:
    """After k iterations, the point of span(b, Hb, …, H^{k−1}b) that is nearest to H⁻¹b in the norm of H."""
    basis = np.stack([np.linalg.matrix_power(H, k) @ B for k in range(terms)], axis=1)
    nearest = basis @ np.linalg.solve(basis.T @ H @ basis, basis.T @ B)
    np.testing.assert_allclose(solve("cg", terms), nearest, rtol=1e-8)


def test_cg_stays_put_once_it_is_done() -> None:
    np.testing.assert_allclose(solve("cg", 60), np.linalg.solve(H, B), rtol=1e-10)
    np.testing.assert_array_equal(solve("cg", 5, b=np.zeros(DIM)), np.zeros(DIM))


def test_random_is_one_of_the_products_and_uniform() -> None:
    terms, draws = 5, 4000
    contraction = np.eye(DIM) - STEP * H
    ways = np.stack([terms * STEP * np.linalg.matrix_power(contraction, n) @ B for n in range(terms)])
    one = lambda key: flat(inverse_hessian.solve("random", loop, product, as_tree(B), STEP, terms, key))
    found = np.asarray(jax.jit(jax.vmap(one))(jax.random.split(jax.random.key(0), draws)))
    gaps = np.abs(found[:, None] - ways[None]).max(axis=2)
    np.testing.assert_allclose(gaps.min(axis=1), 0, atol=1e-12)
    counts = np.bincount(gaps.argmin(axis=1), minlength=terms)
    assert scipy.stats.chisquare(counts).pvalue > 1e-4, counts


@pytest.mark.parametrize(("method", "expected"), [("sum", [0, 1, 2, 3]), ("cg", [0, 0, 0, 0])])
def test_which_minibatch_each_product_uses(method: Any, expected: list[int]) -> None:
    """A fresh one for each term of the series; one and the same for all of cg, whose system must not change."""
    used = []

    def spy(v: Any, n: Any) -> Any:
        used.append(int(n))
        return product(v, n)

    def python_loop(n: Any, body: Any, carry: Any) -> Any:
        for i in range(int(n)):
            carry = body(i, carry)
        return carry

    inverse_hessian.solve(method, python_loop, spy, as_tree(B), STEP, 4, jax.random.key(0))
    assert used == expected


@pytest.mark.parametrize("step", [0.15, 0.6])  # I − step·H contracts; it does not, as 0.6·6 > 2
def test_the_guard_cuts_back_what_grows(step: float) -> None:
    p = step * B
    total = p
    for _ in range(30):
        after = p - step * H @ p
        p = after * min(1.0, np.linalg.norm(p) / np.linalg.norm(after))
        total = total + p
    key = jax.random.key(0)
    found = inverse_hessian.solve("sum", loop, product, as_tree(B), step, 30, key, guard=True)
    np.testing.assert_allclose(flat(found), total, rtol=1e-10)
    plain = inverse_hessian.solve("sum", loop, product, as_tree(B), step, 30, key)
    assert np.allclose(flat(plain), total) == (step == 0.15)  # where nothing grows it changes nothing
    nothing = inverse_hessian.solve("sum", loop, product, as_tree(0 * B), step, 3, key, guard=True)
    np.testing.assert_array_equal(flat(nothing), 0 * B)


def largest(iterations: int, seed: int = 0) -> float:
    v = inverse_hessian.power_iteration(loop, product, as_tree(B), iterations, jax.random.key(seed))
    return float(jnp.linalg.norm(flat(v)))


@pytest.mark.slow
def test_power_iteration_finds_the_largest_eigenvalue() -> None:
    exact = np.linalg.eigvalsh(H)[-1]
    assert abs(largest(200) - exact) < 1e-8
    for seed in range(20):  # from below, and close after ten
        assert 0.8 * exact < largest(10, seed) <= exact * (1 + 1e-12)
    assert largest(1, 0) != largest(1, 1)  # the start is drawn from the key


def test_unit() -> None:
    v = inverse_hessian.unit(as_tree(B))
    np.testing.assert_allclose(flat(v), B / np.linalg.norm(B), rtol=1e-14)
