"""Local steps on one client: SGD, and SVRG against an anchor; plain, or by an optimizer."""

from collections.abc import Callable
from typing import Any, Literal

import jax
from jaxtyping import Array

from rookery.base import tree
from rookery.data.rows import Count
from rookery.language.fed import Client, Data
from rookery.parts import optimizers

Gradient = Callable[[tree.Tree, Any], tree.Tree]  # (z, ν) -> the gradient at z on the ν-th minibatch


def descend(
    c: Client,
    gradient: Callable[[tree.Tree, Data], tree.Tree],
    z: tree.Tree,
    key: Array,
    *,
    level: Literal["lower", "upper"],
    step: tree.Scalar,
    local_steps: Any,
    batch_size: int | None,
    anchor: tree.Tree = None,
    optimizer: Any = None,
    scale_steps: bool = False,
    seen: Any = None,
) -> tree.Tree:
    """Take the client's τ_i local steps from z, each on the next minibatch of its data at `level`.

    Arguments:
        gradient: gradient(z, batch), the direction to step against.
        step: the size of a step; not used with an optimizer, which has its own step size.
        local_steps: τ_i, as in `Client.steps`.
        anchor: the anchor of SVRG; None: plain SGD.
        scale_steps: divide the step by τ_i.
        seen: the features of the lower data, see `features.seen`.
    """
    count, order = jax.random.split(key)
    steps = c.steps(local_steps, count, batch_size, level)

    def at(z: tree.Tree, v: Any) -> tree.Tree:
        batch = c.lower(order, batch_size, v, seen=seen) if level == "lower" else c.upper(order, batch_size, v)
        return gradient(z, batch)

    size = step if optimizer is None else 1.0
    size = size / steps if scale_steps else size
    if anchor is None:
        return sgd(c, at, z, size, steps, optimizer)
    return svrg(c, at, z, anchor, size, steps, optimizer)


def bounds_of_steps(local_steps: Any) -> tuple[int | None, int]:
    """Return the largest and the smallest number of local steps of any client; None, 0 if they depend on the data."""
    if isinstance(local_steps, int):
        return local_steps, local_steps
    return (local_steps[1], local_steps[0]) if isinstance(local_steps, tuple) else (None, 0)


def sgd(
    c: Client, gradient: Gradient, z: tree.Tree, step: tree.Scalar, steps: Count, optimizer: Any = None
) -> tree.Tree:
    """Repeat z ← z − step·gradient(z, ν) `steps` times.

    With an optimizer, which starts afresh, z ← z + step·(its update).
    """
    if optimizer is None:
        return c.loop(steps, lambda v, z: tree.step(z, step, gradient(z, v)), z)
    move = _by(optimizer, step)
    return c.loop(steps, lambda v, both: move(both, gradient(both[0], v)), _start(optimizer, z))[0]


def svrg(
    c: Client, gradient: Gradient, z: tree.Tree, anchor: tree.Tree, step: tree.Scalar, steps: Count,
    optimizer: Any = None,
) -> tree.Tree:  # fmt: skip
    """From z_i = z, repeat z_i ← z_i − step·(gradient(z_i, ν) − gradient(z, ν) + anchor) `steps` times.

    Both gradients use the same minibatch. At the first step they cancel and are not computed. For the optimizer, see
    `sgd`.
    """

    def corrected(z_i: tree.Tree, v: Any) -> tree.Tree:
        return tree.add(tree.sub(gradient(z_i, v), gradient(z, v)), anchor)

    if optimizer is None:
        first = tree.step(z, step, anchor)
        return c.loop(steps, lambda v, z_i: tree.step(z_i, step, corrected(z_i, v)), first, before=1)
    move = _by(optimizer, step)
    moved = move(_start(optimizer, z), anchor)
    return c.loop(steps, lambda v, both: move(both, corrected(both[0], v)), moved, before=1)[0]


def _start(optimizer: Any, z: tree.Tree) -> tuple[tree.Tree, Any]:
    return z, optimizers.start(optimizer, z, "The local steps")


def _by(optimizer: Any, step: tree.Scalar) -> Callable[..., tuple[tree.Tree, Any]]:
    """Return the function ((z, state), gradient) -> (z, state) that takes one step."""

    def move(both: tuple[tree.Tree, Any], gradient: tree.Tree) -> tuple[tree.Tree, Any]:
        z, state = both
        direction, state = optimizers.direction(optimizer, gradient, state, z)
        return tree.step(z, step, direction), state

    return move
