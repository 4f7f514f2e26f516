"""Your own algorithm: one step on each variable per round, along the clients' mean direction."""

from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import rookery as rk


class State(NamedTuple):
    """The state between rounds; its structure and types must not change."""

    x: Any
    y: Any
    u: Any  # an estimate of [∇²_y g]⁻¹∇_y f


@dataclass(frozen=True)
class Start:
    """Descends in y, in the linear system for the hypergradient, and in x, simultaneously. Exchanges per round: 1."""

    upper_step: rk.Step = 0.01  # on x
    lower_step: rk.Step = 0.1  # on y
    linear_step: rk.Step = 0.1  # on u
    batch_size: rk.BatchSize = None  # None: all data of the client

    solves: ClassVar = (rk.Bilevel,)

    def init(self, fed: rk.Fed, x: Any, y: Any, key: Any) -> State:
        """Return the initial state."""
        return State(x, y, rk.tree.zeros_like(y))

    def round(self, fed: rk.Fed, state: State, key: Any) -> State:
        """Take one step on each variable."""
        x, y, u = state

        def directions(client: rk.Client, key: Any) -> Any:  # a client receives the values that this closes over
            lower, upper = client.lower(key, self.batch_size), client.upper(key, self.batch_size)
            f_x, f_y = client.f_x_and_y(x, y, upper)
            g_yy, g_xy = client.g_yy(x, y, lower, u), client.g_xy(x, y, lower, u)
            return rk.tree.sub(f_x, g_xy), client.g_y(x, y, lower), rk.tree.sub(g_yy, f_y)

        d_x, d_y, d_u = fed.mean(fed.map(directions, key), name="directions")
        return State(
            rk.tree.step(x, self.upper_step, d_x),
            rk.tree.step(y, self.lower_step, d_y),
            rk.tree.step(u, self.linear_step, d_u),
        )
