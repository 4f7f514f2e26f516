"""F2SA, a bilevel method that needs first derivatives only, in a federated form."""

from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import jax

import rookery as rk


class State(NamedTuple):
    """The state between rounds."""

    x: Any
    y: Any  # near the minimum of f + λg
    z: Any  # near the minimum of g


@dataclass(frozen=True)
class F2SA:
    """Descend on a penalty instead of the hypergradient: no Hessian- or Jacobian-vector products.

    The bilevel problem is replaced by min_x min_y max_z f(x, y) + λ (g(x, y) − g(x, z)), whose solution is off by
    O(1/λ). Each round takes local steps on all three variables, from the values before the step:

        x ← x − α (∇_x f(x, y) + λ (∇_x g(x, y) − ∇_x g(x, z)))
        y ← y − β (∇_y f(x, y)/λ + ∇_y g(x, y))
        z ← z − γ ∇_y g(x, z)

    and the server averages x, y and z.

    Departures: the paper has one machine, takes T steps on y and z before a step on x, and lets λ grow. Here all three
    move together, because a client's own y and z would bias the mean of x; λ may be a schedule of the round.

    Exchanges per round: 1.

    Reference: Kwon, Kwon, Wright and Nowak, A Fully First-Order Method for Stochastic Bilevel Optimization, ICML 2023.
    """

    upper_step: rk.Step = 0.01  # α
    lower_step: rk.Step = 0.1  # β
    auxiliary_step: rk.Step = 0.1  # γ
    multiplier: rk.Positive = 10.0  # λ
    local_steps: rk.Steps = 1
    batch_size: rk.BatchSize = None

    solves: ClassVar = (rk.Bilevel,)

    def init(self, fed: rk.Fed, x: Any, y: Any, key: Any) -> State:
        """Return the initial state, with z = y."""
        return State(x, y, y)

    def round(self, fed: rk.Fed, state: State, key: Any) -> State:
        """Take local steps, then average."""

        def local(client: rk.Client, key: Any) -> State:
            count, upper_key, y_key, z_key = jax.random.split(key, 4)

            def step(i: Any, w: State) -> State:
                upper = client.upper(upper_key, self.batch_size, i)
                f_x, f_y = client.f_x_and_y(w.x, w.y, upper)
                g_x, g_y = client.g_x_and_y(w.x, w.y, client.lower(y_key, self.batch_size, i))
                h_x, h_y = client.g_x_and_y(w.x, w.z, client.lower(z_key, self.batch_size, i))
                d_x = rk.tree.add(f_x, rk.tree.scale(self.multiplier, rk.tree.sub(g_x, h_x)))
                d_y = rk.tree.add(rk.tree.scale(1 / self.multiplier, f_y), g_y)
                return State(
                    rk.tree.step(w.x, self.upper_step, d_x),
                    rk.tree.step(w.y, self.lower_step, d_y),
                    rk.tree.step(w.z, self.auxiliary_step, h_y),
                )

            return client.loop(client.steps(self.local_steps, count, self.batch_size, "lower"), step, state)

        return fed.mean(fed.map(local, key), name="x, y, z", around=state)
