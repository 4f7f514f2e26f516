"""Your own algorithm for min over x, max over y: local steps on both players, then the clients' mean."""

from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import rookery as rk


class State(NamedTuple):
    """The state between rounds; its structure and types must not change."""

    x: Any
    y: Any


@dataclass(frozen=True)
class Start:
    """Descends in x and ascends in y, several steps at each client. Exchanges per round: 1."""

    upper_step: rk.Step = 0.01  # on x
    lower_step: rk.Step = 0.05  # on y
    local_steps: rk.AtLeastOne = 5
    batch_size: rk.BatchSize = None  # None: all data of the client

    solves: ClassVar = (rk.Minimax,)

    def init(self, fed: rk.Fed, x: Any, y: Any, key: Any) -> State:
        """Return the initial state."""
        return State(x, y)

    def round(self, fed: rk.Fed, state: State, key: Any) -> State:
        """Take local steps, then average."""

        def local(client: rk.Client, key: Any) -> Any:  # a client receives the values that this closes over
            def step(i: Any, z: Any) -> Any:
                f_x, f_y = client.f_x_and_y(z[0], z[1], client.upper(key, self.batch_size, i))
                return rk.tree.step(z[0], self.upper_step, f_x), rk.tree.step(z[1], -self.lower_step, f_y)

            return client.loop(self.local_steps, step, (state.x, state.y))

        x, y = fed.mean(fed.map(local, key), name="x, y", around=(state.x, state.y))
        return State(fed.problem.project_upper(x), y)
