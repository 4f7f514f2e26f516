"""Your own algorithm for compositions of several functions: running inner values, then the chain rule by levels."""

from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import jax

import rookery as rk


class State(NamedTuple):
    """The state between rounds; its structure and types must not change."""

    x: Any
    y: Any  # a tuple with an estimate of each inner value


@dataclass(frozen=True)
class Start:
    """Averages the inner values, then takes one step on x.

    Exchanges per round: 2 for each inner function, and 1 if the problem has an extra loss.
    """

    step: rk.Step = 0.05  # on x
    momentum: rk.Share = 0.5  # the weight of new inner values; 1: no memory
    batch_size: rk.BatchSize = None  # None: all data of the client

    solves: ClassVar = (rk.MultiLevel,)

    def init(self, fed: rk.Fed, x: Any, y: Any, key: Any) -> State:
        """Return the initial state, with the clients' mean inner values."""
        return State(x, fed.problem.forward(x, lambda n, z: self._inner(fed, n, z, key)))

    def round(self, fed: rk.Fed, state: State, key: Any) -> State:
        """Update the inner values, then take a step on x."""
        first, second = jax.random.split(key)
        x, old = state

        def track(n: int, z: Any) -> Any:
            return rk.tree.add(
                rk.tree.scale(1 - self.momentum, old[n]), rk.tree.scale(self.momentum, self._inner(fed, n, z, first))
            )

        y = fed.problem.forward(x, track)
        slope = jax.grad(fed.problem.outer)(y[-1])
        for n in reversed(range(len(y))):  # a mean at every level, because a mean of products is not their product
            slope = self._pullback(fed, n, (x, *y)[n], slope, jax.random.fold_in(second, n))
        if fed.problem.extra is not None:
            extra = fed.map(lambda client, k: client.f_x(x, y, client.upper(k, self.batch_size)), second)
            slope = rk.tree.add(slope, fed.mean(extra, name="extra"))
        return State(fed.problem.project_upper(rk.tree.step(x, self.step, slope)), y)

    def _inner(self, fed: rk.Fed, n: int, z: Any, key: Any) -> Any:
        def value(client: rk.Client, k: Any) -> Any:  # a client receives the values that this closes over
            return client.r(z, client.lower(k, self.batch_size), level=n)

        return fed.mean(fed.map(value, jax.random.fold_in(key, n)), name=f"inner {n}")

    def _pullback(self, fed: rk.Fed, n: int, z: Any, slope: Any, key: Any) -> Any:
        def product(client: rk.Client, k: Any) -> Any:
            return client.r_x(z, client.lower(k, self.batch_size), slope, level=n)

        return fed.mean(fed.map(product, key), name=f"slope {n}")
