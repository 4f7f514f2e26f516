"""What single-loop methods descend along: x, y and a third variable z ≈ [∇²_y g]⁻¹∇_y f, all at once."""

from typing import Any

from rookery.base import tree
from rookery.language.fed import Client

Three = tuple[tree.Tree, tree.Tree, tree.Tree]  # of x, y and z, in this order: variables, directions or their sums


def directions(
    c: Client, points: list[Three], orders: Any, step: Any, upper: int | None, lower: int | None, shared: bool
) -> list[Three]:
    """∇_x f − ∇²_xy g z, ∇_y g and ∇²_y g z − ∇_y f at each of the points (x, y, z), on the same minibatches.

    These are the step-th of five orders (keys), two of f and three of g: `lower` samples for ∇_y g and `upper` for the
    others, None for all there are. If `shared`, or where they are all the data, one of f and one of g serve throughout,
    and each loss is evaluated once a point.
    """
    one_upper, one_lower = shared or upper is None, shared or (upper is None and lower is None)
    f_1, g_1 = c.upper(orders[0], upper, step), c.lower(orders[1], lower, step)
    f_2 = f_1 if one_upper else c.upper(orders[2], upper, step)
    g_2, g_3 = (g_1, g_1) if one_lower else (c.lower(orders[k], upper, step) for k in (3, 4))

    def at(x: tree.Tree, y: tree.Tree, z: tree.Tree) -> Three:
        if one_lower:  # and then one of f, too
            return c.f_and_g(x, y, z, f_1, g_1)
        f_x, f_y = c.f_x_and_y(x, y, f_1) if one_upper else (c.f_x(x, y, f_1), c.f_y(x, y, f_2))
        g_y, g_yy, g_xy = c.g_y(x, y, g_1), c.g_yy(x, y, g_3, z), c.g_xy(x, y, g_2, z)
        return tree.sub(f_x, g_xy), g_y, tree.sub(g_yy, f_y)

    return [at(*point) for point in points]
