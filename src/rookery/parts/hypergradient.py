"""The hypergradient of one client alone: ∇_x f_i − ∇²_xy g_i·p with p ≈ [∇²_y g_i]⁻¹∇_y f_i, both of the client."""

from collections.abc import Sequence
from typing import Any

import jax
from jaxtyping import Array

from rookery.base import tree
from rookery.language.fed import Client
from rookery.parts import inverse_hessian
from rookery.problems.problems import Bilevel, Minimax


def local(c: Client, x: tree.Tree, y: tree.Tree, key: Array, **how: Any) -> tree.Tree:
    """∇_x f_i − ∇²_xy g_i·p at (x, y); the rest as in `local_at`."""
    return local_at(c, [(x, y)], key, **how)[0]


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
    """∇_x f_i − ∇²_xy g_i·p at each point (x, y), on the same minibatches (and random number of terms) at all of them.

    One ξ serves both parts of ∇f_i; the batches of all products are independent. `method`, `terms`, `step` and `guard`
    as in `inverse_hessian.solve`; for several points the guard looks at all their vectors together, and "cg", whose
    steps depend on the vector, is for one point only.
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
