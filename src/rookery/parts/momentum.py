"""Running estimates: the moving average, and STORM (Cutkosky and Orabona 2019)."""

from rookery.base import tree


def moving_average(old: tree.Tree, new: tree.Tree, share: tree.Scalar) -> tree.Tree:
    """(1 − share)·old + share·new."""
    return tree.step(old, share, tree.sub(old, new))


def storm(new: tree.Tree, momentum: tree.Tree, old: tree.Tree, forget: tree.Scalar) -> tree.Tree:
    """new + (1 − forget)·(momentum − old): `new` and `old` are estimates on the same minibatch at two points."""
    return tree.add(new, tree.scale(1 - forget, tree.sub(momentum, old)))
