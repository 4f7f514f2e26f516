"""G-PBGD, a bilevel method that penalises the gradient of the lower level, in a federated form."""

from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import jax

import rookery as rk


class State(NamedTuple):
    """The state between rounds."""

    x: Any
    y: Any


@dataclass(frozen=True)
class GPBGD:
    """Descend on f(x, y) + γ‖∇_y g(x, y)‖² in x and y together.

    The squared gradient of the mean g is not the mean of the clients' squared gradients, so a round has two exchanges.
    The first is v = mean ∇_y g_i(x, y). In the second the clients take local steps from the server's x and y, both from
    the values before the step,

        x ← x − α (∇_x f(x, y) + 2γ ∇²_xy g(x, y) v)
        y ← y − β (∇_y f(x, y) + 2γ ∇²_y g(x, y) v)

    and the server averages x and y. If g is strongly convex in y, the limit is off by O(1/γ).

    Departures: the paper has one machine and exact gradients. The federated form, local steps with a fixed v, and
    minibatches are ours.

    Exchanges per round: 2.

    Reference: Shen and Chen, On Penalty-based Bilevel Gradient Descent Method, ICML 2023.
    """

    upper_step: rk.Step = 0.01  # α
    lower_step: rk.Step = 0.01  # β
    multiplier: rk.Positive = 10.0  # γ; the steps must be of the order of 1/γ
    local_steps: rk.Steps = 1
    batch_size: rk.BatchSize = None

    solves: ClassVar = (rk.Bilevel,)

    def init(self, fed: rk.Fed, x: Any, y: Any, key: Any) -> State:
        """Return the initial state."""
        return State(x, y)

    def round(self, fed: rk.Fed, state: State, key: Any) -> State:
        """Average the lower gradients, then take local steps and average their ends."""
        k1, k2 = jax.random.split(key)
        slope = lambda client, key: client.g_y(state.x, state.y, client.lower(key, self.batch_size))
        v = rk.tree.scale(2 * self.multiplier, fed.mean(fed.map(slope, k1), name="v"))

        def local(client: rk.Client, key: Any) -> State:
            count, upper_key, lower_key = jax.random.split(key, 3)

            def step(i: Any, w: State) -> State:
                lower = client.lower(lower_key, self.batch_size, i)
                f_x, f_y = client.f_x_and_y(w.x, w.y, client.upper(upper_key, self.batch_size, i))
                d_x = rk.tree.add(f_x, client.g_xy(w.x, w.y, lower, v))
                d_y = rk.tree.add(f_y, client.g_yy(w.x, w.y, lower, v))
                return State(rk.tree.step(w.x, self.upper_step, d_x), rk.tree.step(w.y, self.lower_step, d_y))

            return client.loop(client.steps(self.local_steps, count, self.batch_size, "lower"), step, state)

        return fed.mean(fed.map(local, k2), name="x, y", around=state)
