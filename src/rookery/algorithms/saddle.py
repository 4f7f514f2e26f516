"""FedAvg and SCAFFOLD for saddle points: simultaneous local descent on x and ascent on y (Hou et al. 2021)."""

from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import jax
from jaxtyping import Array

from rookery.base import tree
from rookery.language.fed import BatchSize, Client, Fed, Step, Steps
from rookery.problems.problems import Minimax


class State(NamedTuple):
    """The two variables, and for SCAFFOLD the server's control variates of both."""

    x: tree.Tree
    y: tree.Tree
    control: Any = None


def _directions(c: Client, z: tuple[tree.Tree, tree.Tree], batch: Any) -> tuple[tree.Tree, tree.Tree]:
    """Return ∇_x f and −∇_y f at z = (x, y), the gradients of the two players' losses."""
    f_x, f_y = c.f_x_and_y(*z, batch)
    return f_x, tree.scale(-1.0, f_y)


@dataclass(frozen=True)
class _Saddle:
    """The hyperparameters of both methods."""

    upper_step: Step = 0.01  # α
    lower_step: Step = 0.01  # β
    local_steps: Steps = 1  # τ_i
    batch_size: BatchSize = None  # of ξ; None: all the client's data

    solves: ClassVar[tuple[type, ...]] = (Minimax,)


@dataclass(frozen=True)
class FedAvgSaddle(_Saddle):
    """FedAvg-S: local steps on both variables simultaneously, then the mean. With one client it is SGDA.

    FedAvg-S solves minimax problems. A local step is x ← x − α ∇_x f_i and y ← y − β (−∇_y f_i), both from the values
    before the step.

    Departures from the paper: none.

    Exchanges per round: 1.

    Reference: Hou, Thekumparampil, Fanti and Oh, Efficient Algorithms for Federated Saddle Point Optimization, 2021.
    """

    def init(self, fed: Fed, x: tree.Tree, y: tree.Tree, key: Array) -> State:
        return State(x, y)

    def round(self, fed: Fed, state: State, key: Array) -> State:
        def local(c: Client, k: Array) -> tuple[tree.Tree, tree.Tree]:
            count, order = jax.random.split(k)
            steps = c.steps(self.local_steps, count, self.batch_size, "upper")

            def step(v: Any, z: tuple[tree.Tree, tree.Tree]) -> tuple[tree.Tree, tree.Tree]:
                d_x, d_y = _directions(c, z, c.upper(order, self.batch_size, v))
                return tree.step(z[0], self.upper_step, d_x), tree.step(z[1], self.lower_step, d_y)

            return c.loop(steps, step, (state.x, state.y))

        x, y = fed.mean(fed.map(local, key), name="x, y", around=(state.x, state.y))
        return State(fed.problem.project_upper(x), y)


@dataclass(frozen=True)
class ScaffoldSaddle(_Saddle):
    """SCAFFOLD-S: FedAvg-S with control variates on the clients (c_i) and the server (c). With one client it is SGDA.

    SCAFFOLD-S solves minimax problems. A local step is z ← z − step·(d_i(z) − c_i + c) with d_i = (∇_x f_i, −∇_y f_i).
    Then c_i⁺ = c_i − c + (z − z_i)/(τ_i·step), SCAFFOLD's option II, and c ← c + Σ_S p_i (c_i⁺ − c_i), which keeps
    c = Σ p_i c_i (with equal weights, SCAFFOLD's c + (1/n) Σ_S).

    Departures from the paper: client weights; a server step of 1.

    Exchanges per round: 1, which carries the variables and the change of the control variates.

    Reference: Hou et al. 2021, with Karimireddy et al., SCAFFOLD, ICML 2020.
    """

    def init(self, fed: Fed, x: tree.Tree, y: tree.Tree, key: Array) -> State:
        """Start at c = 0."""
        return State(x, y, tree.zeros_like((x, y)))

    def memory(self, x: tree.Tree, y: tree.Tree) -> tuple[tree.Tree, tree.Tree]:
        """A client's memory: c_i, at first 0."""
        return tree.zeros_like((x, y))

    def round(self, fed: Fed, state: State, key: Array) -> State:
        z = (state.x, state.y)

        def local(c: Client, k: Array, c_i: Any) -> tuple[Any, Any]:
            count, order = jax.random.split(k)
            steps = c.steps(self.local_steps, count, self.batch_size, "upper")
            correction = tree.sub(state.control, c_i)

            def step(v: Any, z: tuple[tree.Tree, tree.Tree]) -> tuple[tree.Tree, tree.Tree]:
                d_x, d_y = tree.add(_directions(c, z, c.upper(order, self.batch_size, v)), correction)
                return tree.step(z[0], self.upper_step, d_x), tree.step(z[1], self.lower_step, d_y)

            last = c.loop(steps, step, z)
            moved = tree.sub(z, last)
            sizes = self.upper_step, self.lower_step
            progress = tuple(tree.scale(1 / (steps * size), d) for size, d in zip(sizes, moved, strict=True))
            change = tree.sub(progress, state.control)  # c_i⁺ − c_i
            return (last, change), tree.add(c_i, change)

        replies = fed.map_state(local, key)
        ((x, y), change), heard = fed.mean(replies, name="x, y, c", around=(z, None), heard=True)
        control = tree.add(state.control, tree.scale(heard.weight, change))  # c + Σ_S p_i (c_i⁺ − c_i)
        return State(fed.problem.project_upper(x), y, control)
