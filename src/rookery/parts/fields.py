"""Steps along a field, w ← w − S·mean D_i(w), taken locally: plain, or corrected by an anchor."""

from collections.abc import Callable
from typing import Any, Literal

import jax
from jaxtyping import Array

from rookery.base import tree
from rookery.language.fed import Client, Data, Fed
from rookery.problems.problems import Minimax

Several = tuple[tree.Tree, ...]  # a method's variables, e.g. x, y and z; or a direction or a step size for each
Field = Callable[[Client, Several, Data, Any], Several]  # (client, w, upper batch, lower batch) -> D_i(w)
Control = Literal["none", "anchor"]


def descend(
    fed: Fed, field: Field, w: Several, key: Array, *, steps: tuple[Any, ...], local_steps: Any, batch_size: int | None,
    control: Control, name: str, extra: bool = False,
) -> Several:  # fmt: skip
    """Take the clients' local steps from w, and return the mean of the points that they reach.

    "none": w_i ← w_i − S·D_i(w_i). One exchange. With several steps and unlike clients the limit is not the root of
    mean D_i; the distance is proportional to the steps.

    "anchor": w_i ← w_i − S·(D_i(w_i) − D_i(w) + h), with both D_i on the same minibatch, and h = mean D_i(w). Two
    exchanges. With full batches the limit is the root for any number of steps.

    Arguments:
        field: D_i(w), on a minibatch of each level.
        w: the variables at the server.
        steps: S, a step size for each variable.
        local_steps: τ_i, as in `Client.steps`.
        name: the variables' names, for the ledger.
        extra: extragradient steps, w' = w_i − S·D at w_i and then w_i ← w_i − S·D at w', on a minibatch each; an anchor
            corrects both D.
    """
    k1, k2 = jax.random.split(key)
    anchor: Several | None = None
    if control == "anchor":
        at_server = lambda c, k: field(c, w, *minibatches(c, jax.random.split(k), batch_size))
        anchor = fed.mean(fed.map(at_server, k1), name=f"D_i({name})")

    def local(c: Client, k: Array) -> Several:
        count, *orders = jax.random.split(k, 3)
        turns = c.steps(local_steps, count, batch_size, "lower")

        def direction(v: Any, w_i: Several) -> Several:
            batches = minibatches(c, orders, batch_size, v)
            at = field(c, w_i, *batches)
            return at if anchor is None else tree.add(tree.sub(at, field(c, w, *batches)), anchor)

        def one(v: Any, w_i: Several) -> Several:
            if extra:
                v = 2 * v + (anchor is not None)  # the first of this step's two minibatches
                return move(w_i, direction(v + 1, move(w_i, direction(v, w_i), steps)), steps)
            return move(w_i, direction(v, w_i), steps)

        if anchor is None:
            return c.loop(turns, one, w)
        first = move(w, anchor, steps)  # at w itself the correction leaves the anchor alone
        first = move(w, direction(0, first), steps) if extra else first
        return c.loop(turns, one, first, before=1)

    return fed.mean(fed.map(local, k2), name=name, around=w)


def minibatches(c: Client, orders: Any, size: int | None, step: Any = 0) -> tuple[Data, Any]:
    """Return the step-th minibatches of the upper and the lower data, in the orders of two keys.

    A minimax problem has no lower data: the second is None.
    """
    upper = c.upper(orders[0], size, step)
    return upper, None if isinstance(c.problem, Minimax) else c.lower(orders[1], size, step)


def move(w: Several, along: Several, steps: tuple[Any, ...]) -> Several:
    """Step with each variable's own step size."""
    return tuple(tree.step(v, size, d) for v, size, d in zip(w, steps, along, strict=True))
