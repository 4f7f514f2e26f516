"""Runs of local steps on one client: SGD, and SVRG against an anchor; plain, or by an optimizer."""

from collections.abc import Callable
from typing import Any

from rookery.base import tree
from rookery.data.source import Count
from rookery.language.fed import Client
from rookery.parts import optimizers

Gradient = Callable[[tree.Tree, Any], tree.Tree]  # (z, ν) -> the gradient at z on the ν-th minibatch


def most_steps(local_steps: Any) -> int | None:
    """The largest number of local steps that any client takes, where it is known before the run; else None."""
    if isinstance(local_steps, int):
        return local_steps
    return local_steps[1] if isinstance(local_steps, tuple) else None


def sgd(
    c: Client, gradient: Gradient, z: tree.Tree, step: tree.Scalar, steps: Count, optimizer: Any = None
) -> tree.Tree:
    """`steps` times z ← z − step·gradient(z, ν).

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
    """From z_i = z, `steps` times z_i ← z_i − step·(gradient(z_i, ν) − gradient(z, ν) + anchor).

    Both gradients are on the same minibatch. At the first step they are equal, so it needs neither. With an optimizer,
    as in `sgd`.
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
    """((z, state), gradient) -> the same after one step."""

    def move(both: tuple[tree.Tree, Any], gradient: tree.Tree) -> tuple[tree.Tree, Any]:
        z, state = both
        direction, state = optimizers.direction(optimizer, gradient, state, z)
        return tree.step(z, step, direction), state

    return move
