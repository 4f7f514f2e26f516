"""What the methods for min h(x) + f(g(x)) share: the slope of f, the plain part h, and the first inner value."""

import jax
from jaxtyping import Array

from rookery.base import tree
from rookery.data.source import Count
from rookery.language.fed import Client, Fed
from rookery.problems.problems import Problem


def slope(problem: Problem, y: tree.Tree) -> tree.Tree:
    """∇f(y), which takes no data: f is known to all."""
    return jax.grad(problem.outer)(y)  # type: ignore[union-attr]


def plus_h(
    c: Client, x: tree.Tree, y: tree.Tree, through_g: tree.Tree, key: Array, size: int | None, step: Count = 0
) -> tree.Tree:
    """∇h(x; ξ) + what comes through g; no data are touched where the problem has no h."""
    if c.problem.extra is None:  # type: ignore[union-attr]
        return through_g
    return tree.add(c.f_x(x, y, c.upper(key, size, step)), through_g)


def first_value(fed: Fed, x: tree.Tree, key: Array, size: int | None) -> tree.Tree:
    """mean g_k(x⁰): where an estimate of the inner value starts. One exchange, in `init`."""
    return fed.mean(fed.map(lambda c, k: c.r(x, c.lower(k, size)), key), name="y")
