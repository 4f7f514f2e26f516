"""The steps of Local-SVRG on one node (Gorbunov et al. 2021): Algorithm 1 of the paper on adaptively weighted nodes."""

from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool

from rookery.base import draws, tree
from rookery.data.rows import Count
from rookery.language.fed import Client, Data

Average = Literal["last", "theory"]


class FiniteSum(NamedTuple):
    """A node's f_k, the mean of its f_{k,i}, given by the gradients that Local-SVRG needs."""

    whole: Callable[[Client, tree.Tree, Array], tree.Tree]  # ∇f_k(x)
    difference: Callable[[Client, tree.Tree, tree.Tree, Data], tree.Tree]  # ∇f_{k,B}(x) − ∇f_{k,B}(r)
    draw: Callable[[Client, Array, Count], Data] | None  # the t-th minibatch B; None: all the data


def upper_loss(batch_size: int | None) -> FiniteSum:
    """Return the loss of a single-level problem on the client's or the centre's data."""
    return FiniteSum(
        whole=lambda c, x, k: c.f_x(x, (), c.upper(k)),
        difference=lambda c, x, r, batch: tree.sub(c.f_x(x, (), batch), c.f_x(r, (), batch)),
        draw=None if batch_size is None else lambda c, k, t: c.upper(k, batch_size, t),
    )


class Reference(NamedTuple):
    """A node's memory: r_k (the paper's y_k), ∇f_k(r_k), and whether r_k has moved since that was computed."""

    point: tree.Tree
    gradient: tree.Tree
    moved: Bool[Array, ""]


class Pace(NamedTuple):
    """Step size and probabilities of Local-SVRG."""

    step: Any  # γ
    refresh: Any  # q
    decay: Any  # min(γμ, q/4), with average="theory"; else None


def pace(step: Any, refresh: Any, average: Average, strong_convexity: Any) -> Pace:
    """Return the numbers that follow from a method's hyperparameters."""
    if average == "last":
        return Pace(step, refresh, None)
    if strong_convexity is None:
        raise ValueError(
            'average="theory" needs strong_convexity, the μ of the losses; got None. Set strong_convexity=….'
        )
    return Pace(step, refresh, jnp.minimum(step * strong_convexity, refresh / 4))


def start(x: tree.Tree) -> Reference:
    """Return r_k = x, with its gradient still to be computed (line 2)."""
    return Reference(x, tree.zeros_like(x), jnp.array(True))


def _averaged(average: tree.Tree, x: tree.Tree, decay: Any, t: Count) -> tree.Tree:
    """Update the average of line 15 with x^(t), whose share is u_t/U_t = decay/(1 − (1 − decay)^(t+1))."""
    if decay is None:
        return None
    share = -decay / jnp.expm1((t + 1) * jnp.log1p(-decay))
    return jax.tree.map(lambda a, b: a + share.astype(a.dtype) * (b - a), average, x)


def steps(
    c: Client, f: FiniteSum, z: Any, reference: Reference, key: Array, pace: Pace, count: int, first: Count, done: Count
) -> tuple[Any, Reference]:
    """Take `count` steps from z = (x, average) on one node (lines 5–7 and 11).

    `first` is the number of the first step's minibatch, `done` the number of steps before it.
    """
    order, coins = jax.random.split(key)
    moves = draws.coins(jax.random.fold_in(coins, first), pace.refresh, (count,))

    def one(v: Count, carry: tuple[Any, Reference]) -> tuple[Any, Reference]:
        (x, average), reference = carry
        if f.draw is None:  # f_B = f_k, and the terms at r_k cancel
            direction, after = f.whole(c, x, order), reference
        else:
            gradient = c.when(reference.moved, lambda c: f.whole(c, reference.point, order), reference.gradient)
            direction = tree.add(f.difference(c, x, reference.point, f.draw(c, order, first + v)), gradient)
            point = jax.tree.map(lambda new, old: jnp.where(moves[v], new, old), x, reference.point)
            after = Reference(point, gradient, moves[v])
        x = tree.step(x, pace.step, direction)
        return (x, _averaged(average, x, pace.decay, done + v + 1)), after

    return c.loop(count, one, (z, reference))
