"""Runs of local steps on one client: plain SGD, and SVRG against an anchor."""

from collections.abc import Callable
from typing import Any

from rookery import tree
from rookery.clients import Count
from rookery.fed import Client

Gradient = Callable[[tree.Tree, Any], tree.Tree]  # (z, ν) -> the gradient at z on the ν-th minibatch


def sgd(c: Client, gradient: Gradient, z: tree.Tree, step: tree.Scalar, steps: Count) -> tree.Tree:
    """`steps` times z ← z − step·gradient(z, ν)."""
    return c.loop(steps, lambda v, z: tree.step(z, step, gradient(z, v)), z)


def svrg(c: Client, gradient: Gradient, z: tree.Tree, anchor: tree.Tree, step: tree.Scalar, steps: Count) -> tree.Tree:
    """From z_i = z, `steps` times z_i ← z_i − step·(gradient(z_i, ν) − gradient(z, ν) + anchor).

    Both gradients are on the same minibatch. At the first step they are equal, so it needs neither.
    """

    def correct(v: Any, z_i: tree.Tree) -> tree.Tree:
        difference = tree.sub(gradient(z_i, v), gradient(z, v))
        return tree.step(z_i, step, tree.add(difference, anchor))

    return c.loop(steps, correct, tree.step(z, step, anchor), before=1)
