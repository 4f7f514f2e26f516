"""Your own algorithm for f(mean of the clients' g): a running inner value, then a step along the chain rule."""

from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import jax

import rookery as rk


class State(NamedTuple):
    """The state between rounds; its structure and types must not change."""

    x: Any
    y: Any  # an estimate of the inner value g(x)


@dataclass(frozen=True)
class Start:
    """Averages the inner value, then takes one step on x. Exchanges per round: 2."""

    step: rk.Step = 0.05  # on x
    momentum: rk.Share = 0.5  # the weight of the new inner value; 1: no memory
    batch_size: rk.BatchSize = None  # None: all data of the client

    solves: ClassVar = (rk.Compositional,)
    needs: ClassVar = ("known outer",)  # the outer function takes only the inner value

    def init(self, fed: rk.Fed, x: Any, y: Any, key: Any) -> State:
        """Return the initial state, with the clients' mean inner value."""
        return State(x, self._inner(fed, x, key))

    def round(self, fed: rk.Fed, state: State, key: Any) -> State:
        """Update the inner value, then take a step on x."""
        first, second = jax.random.split(key)
        x, old = state
        y = rk.tree.add(rk.tree.scale(1 - self.momentum, old), rk.tree.scale(self.momentum, self._inner(fed, x, first)))
        slope = jax.grad(fed.problem.outer)(y)

        def gradient(client: rk.Client, key: Any) -> Any:  # a client receives the values that this closes over
            direction = client.r_x(x, client.lower(key, self.batch_size), slope)
            if fed.problem.extra is not None:
                direction = rk.tree.add(direction, client.f_x(x, y, client.upper(key, self.batch_size)))
            return direction

        return State(rk.tree.step(x, self.step, fed.mean(fed.map(gradient, second), name="gradient")), y)

    def _inner(self, fed: rk.Fed, x: Any, key: Any) -> Any:
        return fed.mean(fed.map(lambda client, k: client.r(x, client.lower(k, self.batch_size)), key), name="inner")
