"""A client's part of the hypergradient, ∇_x f_i − ∇²_xy g_i·p, for a given p or for p ≈ [∇²_y g_i]⁻¹∇_y f_i."""

from collections.abc import Sequence
from typing import Any

import jax
from jaxtyping import Array

from rookery.base import tree
from rookery.language.fed import Client
from rookery.parts import inverse_hessian
from rookery.problems.problems import Bilevel, Minimax


def given_vector(c: Client, x: tree.Tree, y: tree.Tree, p: tree.Tree, key: Array, size: int | None) -> tree.Tree:
    """Return ∇_x f_i − ∇²_xy g_i·p at (x, y) for the p that the server sends; ∇_x f_i if p is None."""
    ku, kl = jax.random.split(key)
    direct = c.f_x(x, y, c.upper(ku, size))
    return direct if p is None else tree.sub(direct, c.g_xy(x, y, c.lower(kl, size), p))


def local_at(
    c: Client,
    points: Sequence[tuple[tree.Tree, tree.Tree]],
    key: Array,
    *,
    method: inverse_hessian.Method,
    terms: int,
    step: Any,
    upper_batch: int | None,
    lower_batch: int | None,
    guard: bool = False,
) -> list[tree.Tree]:
    """Return ∇_x f_i − ∇²_xy g_i·p at each point (x, y), with p from the client's own Hessian.

    All points share their minibatches and the random number of terms. One ξ serves both parts of ∇f_i; the minibatches
    of the products are independent. For `method`, `terms`, `step` and `guard` see `inverse_hessian.solve`. The guard
    looks at the vectors of all points together. "cg" is for one point only, since its steps depend on the vector.
    """
    assert method != "cg" or len(points) == 1
    k0, k1, k2, k3 = jax.random.split(key, 4)
    batch = c.upper(k0, upper_batch)
    if isinstance(c.problem, Minimax):
        return [c.f_x(x, y, batch) for x, y in points]
    f_x, p = zip(*(c.f_x_and_y(x, y, batch) for x, y in points), strict=True)
    if isinstance(c.problem, Bilevel):

        def product(p: tuple[tree.Tree, ...], n: Any) -> tuple[tree.Tree, ...]:
            batch = c.lower(jax.random.fold_in(k1, n), lower_batch)
            return tuple(c.g_yy(x, y, batch, v) for (x, y), v in zip(points, p, strict=True))

        p = inverse_hessian.solve(method, c.loop, product, p, step, terms, k2, guard)
    mixed = c.lower(k3, lower_batch)
    return [tree.sub(d, c.g_xy(x, y, mixed, v)) for (x, y), d, v in zip(points, f_x, p, strict=True)]
