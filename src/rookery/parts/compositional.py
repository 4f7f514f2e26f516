"""Parts of the methods for min h(x) + f(g(x)): the slope of f, the plain part h, and the first inner value."""

import jax
from jaxtyping import Array

from rookery.base import tree
from rookery.data.rows import Count
from rookery.language.fed import Client, Fed
from rookery.problems.problems import Problem


def slope(problem: Problem, y: tree.Tree) -> tree.Tree:
    """Return ∇f(y). It needs no data, since f is known to all clients."""
    return jax.grad(problem.outer)(y)  # type: ignore[union-attr]


def plus_h(
    c: Client, x: tree.Tree, y: tree.Tree, through_g: tree.Tree, key: Array, size: int | None, step: Count = 0
) -> tree.Tree:
    """Return ∇h(x; ξ) + `through_g`. A problem without h needs no data for this."""
    if c.problem.extra is None:  # type: ignore[union-attr]
        return through_g
    return tree.add(c.f_x(x, y, c.upper(key, size, step)), through_g)


def first_value(fed: Fed, x: tree.Tree, key: Array, size: int | None) -> tree.Tree:
    """Return mean g_k(x⁰), the first estimate of the inner value. One exchange, in `init`."""
    return fed.mean(fed.map(lambda c, k: c.r(x, c.lower(k, size)), key), name="y")
