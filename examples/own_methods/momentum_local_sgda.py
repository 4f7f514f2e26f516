"""Momentum Local SGDA, a minimax method whose clients step along a momentum that the server averages, too."""

from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import jax

import rookery as rk


class State(NamedTuple):
    """The state between rounds."""

    x: Any
    y: Any
    momentum: Any  # d, of x and of y


@dataclass(frozen=True)
class MomentumLocalSGDA:
    """Take local descent steps on x and ascent steps on y along a momentum d.

    With G = (∇_x f, −∇_y f), a local step is (x, y) ← (x, y) − (α d_x, β d_y), and then, at the new point and on a
    fresh minibatch, d ← (1 − μ) d + μ G. The server averages x, y and d. The first d is the mean of the clients' G.

    Departures: any cohort and any client weights.

    Exchanges per round: 1, and 1 for the start.

    Reference: Sharma, Panda, Joshi and Varshney, Federated Minimax Optimization, ICML 2022.
    """

    upper_step: rk.Step = 0.01  # α
    lower_step: rk.Step = 0.01  # β
    momentum: rk.Share = 0.5  # μ, the weight of the new gradient
    local_steps: rk.Steps = 1
    batch_size: rk.BatchSize = None

    solves: ClassVar = (rk.Minimax,)

    def init(self, fed: rk.Fed, x: Any, y: Any, key: Any) -> State:
        """Return the initial state, with the mean of the first gradients as momentum."""
        first = fed.map(lambda c, k: directions(c, x, y, c.upper(k, self.batch_size)), key)
        return State(x, y, fed.mean(first, name="first momentum"))

    def round(self, fed: rk.Fed, state: State, key: Any) -> State:
        """Take local steps, then average."""

        def local(client: rk.Client, key: Any) -> State:
            count, order = jax.random.split(key)

            def step(i: Any, w: State) -> State:
                d_x, d_y = w.momentum
                x, y = rk.tree.step(w.x, self.upper_step, d_x), rk.tree.step(w.y, self.lower_step, d_y)
                new = directions(client, x, y, client.upper(order, self.batch_size, i))
                kept = rk.tree.scale(1 - self.momentum, w.momentum)
                return State(x, y, rk.tree.add(kept, rk.tree.scale(self.momentum, new)))

            return client.loop(client.steps(self.local_steps, count, self.batch_size, "upper"), step, state)

        return fed.mean(fed.map(local, key), name="x, y, momentum", around=state)


def directions(client: rk.Client, x: Any, y: Any, batch: Any) -> tuple[Any, Any]:
    """Return ∇_x f and −∇_y f."""
    f_x, f_y = client.f_x_and_y(x, y, batch)
    return f_x, rk.tree.scale(-1.0, f_y)
