"""STORM: a recursive momentum whose error shrinks as the steps do (Cutkosky and Orabona 2019)."""

from rookery.base import tree


def storm(new: tree.Tree, momentum: tree.Tree, old: tree.Tree, forget: tree.Scalar) -> tree.Tree:
    """new + (1 − forget)·(momentum − old): `new` and `old` are estimates on the same minibatch at two points."""
    return tree.add(new, tree.scale(1 - forget, tree.sub(momentum, old)))
