"""Your own algorithm that learns each client's weight from the loss on the centre's data."""

from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp

import rookery as rk
from rookery.parts.projection import capped_simplex


class State(NamedTuple):
    """The state between rounds; its structure and types must not change."""

    x: Any  # the clients' weights
    y: Any  # the model
    h: Any  # an estimate of [∇²_y g]⁻¹∇_y f, with f the loss on the centre's data

    @property
    def weights(self) -> Any:
        """The clients' weights, which `Run.weights` shows."""
        return self.x


@dataclass(frozen=True)
class Start:
    """One step on the model, on the linear system for the hypergradient, and on the weights. Exchanges per round: 2."""

    model_step: rk.Step = 0.5
    linear_step: rk.Step = 0.05
    weight_step: rk.Step = 0.2
    batch_size: rk.BatchSize = None  # None: all data of the client

    solves: ClassVar = (rk.WeightedNodes,)
    needs: ClassVar = ("all clients",)

    def init(self, fed: rk.Fed, x: Any, y: Any, key: Any) -> State:
        """Return the initial state."""
        return State(x, y, rk.tree.zeros_like(y))

    def round(self, fed: rk.Fed, state: State, key: Any) -> State:
        """Take one step on each variable."""
        first, second, third = jax.random.split(key, 3)
        w, y, h = state

        def directions(client: rk.Client, key: Any) -> Any:  # a client receives the values that this closes over
            lower = client.lower(key, self.batch_size)
            return client.g_y(w, y, lower), client.g_yy(w, y, lower, h)

        d_y, product = fed.mean(fed.map(directions, first), name="directions", weights=w)
        f_y = fed.center(lambda client, key: client.f_y(w, y, client.upper(key)), second)
        y, h = rk.tree.step(y, self.model_step, d_y), rk.tree.step(h, self.linear_step, rk.tree.sub(product, f_y))

        def slope(client: rk.Client, key: Any) -> Any:
            return rk.tree.dot(client.g_y(w, y, client.lower(key, self.batch_size)), h)

        slopes, replied = fed.gather(fed.map(slope, third), name="slopes", replied=True)
        slopes = jnp.where(replied, slopes, jnp.mean(slopes, where=replied)).astype(w.dtype)
        return State(capped_simplex(rk.tree.step(w, -self.weight_step, slopes), fed.problem.cap), y, h)
