"""BOME (Liu et al., NeurIPS 2022): bilevel problems as a dynamic barrier on the lower level's optimality gap."""

from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array

from rookery.base import tree
from rookery.language.fed import AtLeastOne, BatchSize, Bookkeeping, Client, Fed, PerClient, Share, Step, Steps
from rookery.parts import features, fields
from rookery.parts.local import descend
from rookery.parts.state import State
from rookery.problems.problems import Bilevel

_FLOOR = 1e-8  # keeps λ finite where ∇q̂ vanishes


@dataclass(frozen=True)
class BOME:
    """BOME: descend on f while the optimality gap of the lower level keeps falling, with first derivatives only.

    BOME solves bilevel problems. Its lower level need not be strongly convex in y; a Polyak–Łojasiewicz inequality is
    enough. A round starts with T steps ŷ ← ŷ − α∇_y g(x, ŷ) from ŷ = y. The gap q̂(x, y) = g(x, y) − g(x, ŷ), with ŷ
    held constant, then gives
        λ = max((φ − ⟨∇f, ∇q̂⟩)/(‖∇q̂‖² + 1e-8), 0), with φ = η‖∇q̂‖² or φ = ηq̂,
        (x, y) ← (x, y) − ξ(∇f + λ∇q̂).
    ⟨∇q̂, direction⟩ is at least φ, so the gap falls to first order.

    A small T causes a bias: as ξ falls, the limit is the point at which the hypergradient, computed with a Neumann
    series of T terms, is zero. With a constant ξ there is no fixed point, since λ grows as the gap falls: x keeps
    moving at a distance from that limit that is proportional to ξ (.06 to .3 times ξ on eight quadratics). Once ∇q̂ is
    so small that the 1e-8 matters (on these quadratics with ξ < .001), the distance no longer falls with ξ.

    Departures from the paper: unverified, since we had no access to the paper's algorithm box; the steps are those of
    the authors' code and of the public benchmark (benchopt/benchmark_bilevel), which agree. The federated form is ours:
    each of the T updates of ŷ is the mean of local steps, and the server forms λ from the means of ∇f and ∇q̂, because a
    mean of the clients' own λ would be another method. With several local steps on ŷ, unlike clients have ŷ ≠ y even
    where y solves the lower level, which moves the limit: keep `lower_local_steps` at 1. The paper is deterministic;
    minibatches are ours, one of each level in the last exchange. x is projected onto the problem's set, if it has one.

    Exchanges per round: T + 1.

    Example:
        >>> import rookery as rk
        >>> task = rk.tasks.quadratic(clients=4, seed=0)
        >>> method = rk.BOME(upper_step=0.002, lower_step=0.002, auxiliary_step=0.2, lower_rounds=20)
        >>> run = rk.solve(task.problem, task.clients, method, task.init, rounds=2000, every=2000,
        ...                evaluate=task.evaluate)
        >>> bool(run.history["distance"].iloc[-1] < 1e-4)
        True

    Reference: Liu, Ye, Wright, Stone and Liu, BOME! Bilevel Optimization Made Easy: A Simple First-Order Approach,
    NeurIPS 2022.
    """

    upper_step: Step = 0.01  # ξ of x
    lower_step: Step = 0.01  # ξ of y
    auxiliary_step: Step = 0.1  # α, of ŷ
    lower_rounds: AtLeastOne = 10  # T
    lower_local_steps: Steps = 1  # local steps on ŷ in each of them
    barrier: Literal["gradient", "value"] = "gradient"  # φ = η‖∇q̂‖², or ηq̂
    barrier_rate: Share = 0.5  # η
    batch_size: BatchSize = None  # of every minibatch; None: all the client's data

    solves: ClassVar[tuple[type, ...]] = (Bilevel,)

    def init(self, fed: Fed, x: tree.Tree, y: tree.Tree, key: Array) -> State:
        return State(x, y)

    def round(self, fed: Fed, state: State, key: Array) -> State:
        (x, y), (k1, k2) = state, jax.random.split(key)
        y_hat = self._lower(fed, x, y, k1)

        def slopes(c: Client, k: Array) -> Any:
            upper, lower = fields.minibatches(c, jax.random.split(k), self.batch_size)
            g_x, g_y = c.g_x_and_y(x, y, lower)
            q = tree.sub(g_x, c.g_x(x, y_hat, lower)), g_y
            gap = c.g(x, y, lower) - c.g(x, y_hat, lower) if self.barrier == "value" else None
            return c.f_x_and_y(x, y, upper), q, gap

        f, q, gap = fed.mean(fed.map(slopes, k2), name="∇f, ∇q̂", bookkeeping=(None, None, Bookkeeping("q̂")))
        square = tree.dot(q, q)
        phi = self.barrier_rate * (square if self.barrier == "gradient" else gap)
        multiplier = jnp.maximum((phi - tree.dot(f, q)) / (square + _FLOOR), 0)
        d_x, d_y = tree.add(f, tree.scale(multiplier, q))
        x = fed.problem.project_upper(tree.step(x, self.upper_step, d_x))
        return State(x, tree.step(y, self.lower_step, d_y))

    def _lower(self, fed: Fed, x: tree.Tree, y: tree.Tree, key: Array) -> tree.Tree:
        """Return ŷ."""
        fixed = self.batch_size is not None and isinstance(self.lower_local_steps, int)
        draws = self.lower_rounds * self.lower_local_steps * self.batch_size if fixed else None
        seen: PerClient | None = features.seen(fed, x, key, draws)
        how: dict[str, Any] = {"level": "lower", "step": self.auxiliary_step, "batch_size": self.batch_size}

        def once(t: Any, y: tree.Tree) -> tree.Tree:
            gradient = lambda c: lambda y, batch: c.g_y(x, y, batch)
            local = lambda c, k, z: descend(c, gradient(c), y, k, local_steps=self.lower_local_steps, seen=z, **how)
            return fed.mean(fed.map(local, jax.random.fold_in(key, t), seen), name="ŷ", around=y)

        return fed.loop(self.lower_rounds, once, y)
