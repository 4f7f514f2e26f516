"""An algorithm of your own for one loss: local steps at each client, then a step of the server on their mean."""

from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import rookery as rk


class State(NamedTuple):
    """What goes from round to round: its structure and types stay as they are."""

    x: Any
    y: tuple[()] = ()


@dataclass(frozen=True)
class Start:
    """Local SGD with a step size for the server. Exchanges a round: 1."""

    step: rk.Step = 0.1  # of a client
    server_step: rk.Step = 1.0  # on the mean of what the clients' steps came to
    local_steps: rk.AtLeastOne = 5
    batch_size: rk.BatchSize = None  # None: all the client's data

    solves: ClassVar = (rk.SingleLevel,)

    def init(self, fed: rk.Fed, x: Any, y: Any, key: Any) -> State:
        """The start."""
        return State(x)

    def round(self, fed: rk.Fed, state: State, key: Any) -> State:
        """Local steps, then the mean."""
        x = state.x

        def local(client: rk.Client, key: Any) -> Any:  # what it reads from outside is what a client is sent
            def step(i: Any, z: Any) -> Any:
                return rk.tree.step(z, self.step, client.f_x(z, (), client.upper(key, self.batch_size, i)))

            return client.loop(self.local_steps, step, x)

        mean = fed.mean(fed.map(local, key), name="x", around=x)
        return State(fed.problem.project_upper(rk.tree.step(x, self.server_step, rk.tree.sub(x, mean))))
