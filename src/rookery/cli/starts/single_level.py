"""Your own algorithm for one loss: local steps at each client, then a server step along their mean."""

from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import rookery as rk


class State(NamedTuple):
    """The state between rounds; its structure and types must not change."""

    x: Any
    y: tuple[()] = ()


@dataclass(frozen=True)
class Start:
    """Local SGD with a step size for the server. Exchanges per round: 1."""

    step: rk.Step = 0.1  # at a client
    server_step: rk.Step = 1.0  # along the mean of the clients' changes
    local_steps: rk.AtLeastOne = 5
    batch_size: rk.BatchSize = None  # None: all data of the client

    solves: ClassVar = (rk.SingleLevel,)

    def init(self, fed: rk.Fed, x: Any, y: Any, key: Any) -> State:
        """Return the initial state."""
        return State(x)

    def round(self, fed: rk.Fed, state: State, key: Any) -> State:
        """Take local steps, then average."""
        x = state.x

        def local(client: rk.Client, key: Any) -> Any:  # a client receives the values that this closes over
            def step(i: Any, z: Any) -> Any:
                return rk.tree.step(z, self.step, client.f_x(z, (), client.upper(key, self.batch_size, i)))

            return client.loop(self.local_steps, step, x)

        mean = fed.mean(fed.map(local, key), name="x", around=x)
        return State(fed.problem.project_upper(rk.tree.step(x, self.server_step, rk.tree.sub(x, mean))))
