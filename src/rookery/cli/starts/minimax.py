"""An algorithm of your own for min over x, max over y: local steps on both players, then the clients' mean."""

from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import rookery as rk


class State(NamedTuple):
    """What goes from round to round: its structure and types stay as they are."""

    x: Any
    y: Any


@dataclass(frozen=True)
class Start:
    """Descends in x and ascends in y, several steps at each client. Exchanges a round: 1."""

    upper_step: rk.Step = 0.01  # on x
    lower_step: rk.Step = 0.05  # on y
    local_steps: rk.AtLeastOne = 5
    batch_size: rk.BatchSize = None  # None: all the client's data

    solves: ClassVar = (rk.Minimax,)

    def init(self, fed: rk.Fed, x: Any, y: Any, key: Any) -> State:
        """The start."""
        return State(x, y)

    def round(self, fed: rk.Fed, state: State, key: Any) -> State:
        """Local steps, then the mean."""

        def local(client: rk.Client, key: Any) -> Any:  # what it reads from outside is what a client is sent
            def step(i: Any, z: Any) -> Any:
                f_x, f_y = client.f_x_and_y(z[0], z[1], client.upper(key, self.batch_size, i))
                return rk.tree.step(z[0], self.upper_step, f_x), rk.tree.step(z[1], -self.lower_step, f_y)

            return client.loop(self.local_steps, step, (state.x, state.y))

        x, y = fed.mean(fed.map(local, key), name="x, y", around=(state.x, state.y))
        return State(fed.problem.project_upper(x), y)
