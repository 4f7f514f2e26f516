"""The directions of single-loop methods, which move x, y and z ≈ [∇²_y g]⁻¹∇_y f simultaneously."""

from typing import Any

from rookery.base import tree
from rookery.language.fed import Client

Three = tuple[tree.Tree, tree.Tree, tree.Tree]  # for x, y and z: variables, directions or sums of directions


def directions(
    c: Client, points: list[Three], orders: Any, step: Any, upper: int | None, lower: int | None, shared: bool
) -> list[Three]:
    """Return ∇_x f − ∇²_xy g z, ∇_y g and ∇²_y g z − ∇_y f at each point (x, y, z), on the same minibatches.

    Five keys (`orders`) order the minibatches, two of f and three of g; the step-th of each order is used. `lower` is
    the batch size of ∇_y g and `upper` that of the rest, None for all the data. If `shared`, or with full batches, one
    minibatch of f and one of g serve all terms, and each loss is evaluated once per point.
    """
    one_upper, one_lower = shared or upper is None, shared or (upper is None and lower is None)
    f_1, g_1 = c.upper(orders[0], upper, step), c.lower(orders[1], lower, step)
    f_2 = f_1 if one_upper else c.upper(orders[2], upper, step)
    g_2, g_3 = (g_1, g_1) if one_lower else (c.lower(orders[k], upper, step) for k in (3, 4))

    def at(x: tree.Tree, y: tree.Tree, z: tree.Tree) -> Three:
        if one_lower:  # which implies one_upper
            return c.f_and_g(x, y, z, f_1, g_1)
        f_x, f_y = c.f_x_and_y(x, y, f_1) if one_upper else (c.f_x(x, y, f_1), c.f_y(x, y, f_2))
        g_y, g_yy, g_xy = c.g_y(x, y, g_1), c.g_yy(x, y, g_3, z), c.g_xy(x, y, g_2, z)
        return tree.sub(f_x, g_xy), g_y, tree.sub(g_yy, f_y)

    return [at(*point) for point in points]
