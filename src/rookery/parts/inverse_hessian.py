"""Inverse-Hessian products by Hessian-vector products, on one client or over the federation."""

from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from rookery.base import draws, tree

Product = Callable[[tree.Tree, Any], tree.Tree]  # (v, n) -> H·v, on the n-th minibatch
Loop = Callable[..., Any]  # fed.loop if a product is an exchange, else client.loop
Method = Literal["sum", "random", "cg"]


def solve(
    method: Method,
    loop: Loop,
    product: Product,
    b: tree.Tree,
    step: tree.Scalar,
    terms: int,
    key: Array,
    guard: bool = False,
) -> tree.Tree:
    """Approximate H⁻¹b by `terms` products (fewer in the random case).

    "sum": the Neumann series step·Σ_{n=0}^{terms} (I − step·H)ⁿ b.
    "random": terms·step·(I − step·H)^{N'} b with N' uniform in 0..terms−1. Its mean is the series with `terms` terms.
    "cg": `terms` iterations of conjugate gradients. All products use one minibatch, so that the system is fixed.

    `guard` is for an estimated step. I − step·H never lengthens a vector while step·H ≤ 2. If one grows, the step was
    too large for that minibatch, and the vector is scaled back to its previous length.
    """

    def contract(p: tree.Tree, n: Any) -> tree.Tree:
        after = tree.step(p, step, product(p, n))
        if not guard:
            return after
        length, grown = tree.norm(p), tree.norm(after)
        return tree.scale(jnp.where(grown > length, length / jnp.where(grown > length, grown, 1), 1), after)

    if method == "sum":
        return _neumann_sum(loop, contract, tree.scale(step, b), terms)
    if method == "random":
        count = draws.integers(key, (), 0, terms)
        return loop(count, lambda n, p: contract(p, n), tree.scale(terms * step, b), most=terms - 1)
    return _conjugate_gradients(loop, product, b, terms)


def _neumann_sum(loop: Loop, contract: Product, p: tree.Tree, terms: int) -> tree.Tree:
    def add_term(n: Any, carry: tuple[tree.Tree, tree.Tree]) -> tuple[tree.Tree, tree.Tree]:
        p, total = carry
        p = contract(p, n)
        return p, tree.add(total, p)

    return loop(terms, add_term, (p, p))[1]


def _conjugate_gradients(loop: Loop, product: Product, b: tree.Tree, terms: int) -> tree.Tree:
    def ratio(a: Float[Array, ""], over: Float[Array, ""]) -> Float[Array, ""]:
        return jnp.where(over > 0, a / jnp.where(over > 0, over, 1), 0)  # 0 once the residual is 0

    def iterate(_: Any, carry: tuple[tree.Tree, tree.Tree, tree.Tree]) -> tuple[tree.Tree, tree.Tree, tree.Tree]:
        p, residual, direction = carry
        image = product(direction, 0)
        size = ratio(tree.dot(residual, residual), tree.dot(direction, image))
        rest = tree.step(residual, size, image)
        turn = ratio(tree.dot(rest, rest), tree.dot(residual, residual))
        return tree.step(p, -size, direction), rest, tree.add(rest, tree.scale(turn, direction))

    return loop(terms, iterate, (tree.zeros_like(b), b, b))[0]


def power_iteration(loop: Loop, product: Product, like: tree.Tree, iterations: int, key: Array) -> tree.Tree:
    """Return H·u after `iterations` power iterations from a random vector like `like`; its norm approaches ‖H‖."""
    leaves, structure = jax.tree.flatten(like)
    keys = jax.random.split(key, len(leaves))
    start = [jax.random.normal(k, leaf.shape, leaf.dtype) for k, leaf in zip(keys, leaves, strict=True)]
    return loop(iterations, lambda n, v: product(unit(v), n), jax.tree.unflatten(structure, start))


def unit(v: tree.Tree) -> tree.Tree:
    """Scale v to unit length."""
    return tree.scale(1 / tree.norm(v), v)
