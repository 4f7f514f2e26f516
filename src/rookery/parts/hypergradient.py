"""The hypergradient of one client alone: ∇_x f_i − ∇²_xy g_i·p with p ≈ [∇²_y g_i]⁻¹∇_y f_i, both of the client."""

from typing import Any

import jax
from jaxtyping import Array

from rookery import tree
from rookery.fed import Client
from rookery.parts import inverse_hessian
from rookery.problems import Bilevel, Minimax


def local(
    c: Client,
    x: tree.Tree,
    y: tree.Tree,
    key: Array,
    *,
    method: inverse_hessian.Method,
    terms: int,
    step: Any,
    upper_batch: int | None,
    lower_batch: int | None,
    guard: bool = False,
) -> tree.Tree:
    """∇_x f_i − ∇²_xy g_i·p at (x, y): one ξ for both parts of ∇f_i, independent batches for every product.

    The same key gives the same batches (and the same random number of terms) at another point, as STORM needs it.
    `method`, `terms`, `step` and `guard` as in `inverse_hessian.solve`.
    """
    k0, k1, k2, k3 = jax.random.split(key, 4)
    batch = c.upper(k0, upper_batch)
    if isinstance(c.problem, Minimax):
        return c.f_x(x, y, batch)
    f_x, v = c.f_x_and_y(x, y, batch)
    if isinstance(c.problem, Bilevel):
        product = lambda v, n: c.g_yy(x, y, c.lower(jax.random.fold_in(k1, n), lower_batch), v)
        v = inverse_hessian.solve(method, c.loop, product, v, step, terms, k2, guard)
    return tree.sub(f_x, c.g_xy(x, y, c.lower(k3, lower_batch), v))
