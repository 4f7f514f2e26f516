"""FedMSA (Tarzanagh et al. 2023): federated stochastic approximation with several coupled sequences."""

from dataclasses import dataclass
from typing import Any, ClassVar, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array

from rookery.base import tree
from rookery.language.fed import BatchSize, Client, Fed, Share, Step, Steps
from rookery.parts.compositional import plus_h, slope
from rookery.parts.fields import Several, minibatches, move
from rookery.parts.momentum import storm
from rookery.problems.problems import Bilevel, Composed, Compositional, MultiLevel


class State(NamedTuple):
    """The variables, the server's momentum h of all, and the last round's variables.

    In bilevel problems u ≈ [∇²_y g]⁻¹∇_y f. With `jacobians="tracked"` u is the tuple u¹, …, uᴺ⁻¹. Else it is empty.
    """

    x: tree.Tree
    y: tree.Tree
    u: tree.Tree
    h: Several
    before: Several
    rounds: Array


@dataclass(frozen=True)
class FedMSA:
    """FedMSA: local steps on x, y and u, corrected so that unlike clients do not drift.

    FedMSA solves bilevel, compositional and multi-level problems. It looks for the root of mean D_i(w). A round has two
    phases.

    1. Each client sends D_i(w; ξ) − (1 − ρ) D_i(w⁻; ξ) on one minibatch, where w⁻ is the last round's w. The server
       forms h ← mean + (1 − ρ) h, a STORM estimate of mean D_i(w). In the first round ρ = 1.
    2. Each client starts from v = w and h_i = h and takes τ_i steps v ← v − S·h_i, each but the last followed by
       h_i ← D_i(v; ζ) + h_i − D_i(v⁻; ζ), where v⁻ is the point before the step. The server averages v.

    With full batches h_i = D_i(v) − D_i(w) + mean D_i(w). The limit is then the root of mean D_i for any number of
    local steps, if all clients take part in phase 1. With `anchor="all"`, the paper's form, all clients take part in
    phase 1, and only the round's cohort, which may be a single client, in phase 2. The directions are:

    - bilevel: w = (x, y, u), with the directions of `FedBiO`, D_i = (∇_x f − ∇²_xy g u, ∇_y g, ∇²_y g u − ∇_y f);
    - compositional: w = (x, y), and D_i = (∇r_i(x)ᵀ∇f(y), y − r_i(x));
    - multi-level: w = (x, z¹, …, zᴺ), with y for the z together, and D_i = (P_i, z¹ − r_1,i(x), …, zᴺ − r_N,i(zᴺ⁻¹)),
      where P_i = ∇r_1,i(x)ᵀ∇r_2,i(z¹)ᵀ … ∇r_N,i(zᴺ⁻¹)ᵀ∇f(zᴺ).

    The root is the solution, with one exception. In multi-level problems P_i is a product of one client's Jacobians,
    and the mean of products is the product of means only if at most one of the factors differs between the clients.
    Otherwise the limit is another point, which no step size or momentum moves. `jacobians="tracked"` (ours) removes the
    bias: it adds variables uⁿ, which track the mean of ∇r_{n+1}(zⁿ)ᵀuⁿ⁺¹ from uᴺ = ∇f(zᴺ) down, so that P_i =
    ∇r_1,i(x)ᵀu¹, and every part of D_i contains only one of the client's functions. With a single inner function both
    forms are the same.

    Departures from the paper:
        unverified, since we had no access to the paper's algorithm box; the steps are those of the authors' code, with
        the same ξ at both points of phase 1, as in its multi-level script (the bilevel script reuses stored values);
        in the paper all clients take part in phase 1; here the round's cohort does, unless `anchor="all"`;
        the server, not the clients, adds (1 − ρ)h, with the same result;
        u starts at 0, without the authors' initial rounds of FedAvg and FedIHGP; y and u each have their own step size;
        the outer function of a composition is known to all, and every inner function has a minibatch of its own;
        x is projected onto the problem's set, if it has one, after the mean.

    Exchanges per round: 2, the first for h, the second for the variables.

    Example:
        >>> import rookery as rk
        >>> task = rk.tasks.quadratic(clients=4, seed=0)
        >>> method = rk.FedMSA(upper_step=0.02, lower_step=0.05, linear_step=0.05, local_steps=5)
        >>> run = rk.solve(task.problem, task.clients, method, task.init, rounds=300, every=300, evaluate=task.evaluate)
        >>> bool(run.history["distance"].iloc[-1] < 1e-9)
        True

    Reference: Tarzanagh et al., Federated Multi-Sequence Stochastic Approximation with Local Hypergradient Estimation,
    2023.
    """

    upper_step: Step = 0.01  # α
    lower_step: Step = 0.05  # β, of y
    linear_step: Step = 0.05  # β, of u, which compositional problems do not have
    local_steps: Steps = 4  # K
    momentum: Share = 0.5  # ρ, the weight of the new directions
    batch_size: BatchSize = None  # of every minibatch; None: all the client's data
    anchor: Literal["cohort", "all"] = "cohort"  # which clients take part in phase 1
    jacobians: Literal["product", "tracked"] = "product"  # of multi-level problems: see above

    solves: ClassVar[tuple[type, ...]] = (Bilevel, Compositional, MultiLevel)
    needs: ClassVar[tuple[str, ...]] = ("known outer",)

    def init(self, fed: Fed, x: tree.Tree, y: tree.Tree, key: Array) -> State:
        """Start at u = 0, with a momentum that the first round does not use."""
        problem, u = fed.problem, ()
        if isinstance(problem, Bilevel):
            u = tree.zeros_like(y)
        elif self.jacobians == "tracked":
            u = tree.zeros_like(problem.tracked(y)[:-1])
        w = (x, y, u)
        return State(*w, tree.zeros_like(w), w, jnp.int32(0))

    def round(self, fed: Fed, state: State, key: Array) -> State:
        (k1, k2), w = jax.random.split(key), state[:3]
        kept = jnp.where(state.rounds == 0, 0.0, 1 - self.momentum)  # 1 − ρ
        steps = self.upper_step, self.lower_step, self.linear_step

        def difference(c: Client, k: Array) -> Several:
            new, old = _directions(c, [w, state.before], jax.random.split(k), self.batch_size)
            return tree.sub(new, tree.scale(kept, old))

        first = fed.everyone if self.anchor == "all" else fed
        h = tree.add(first.mean(first.map(difference, k1), name="h"), tree.scale(kept, state.h))

        def local(c: Client, k: Array) -> Several:
            count, *orders = jax.random.split(k, 3)

            def step(v: Any, carry: tuple[Several, Several]) -> tuple[Several, Several]:
                old, h_i = carry
                new = move(old, h_i, steps)
                at_new, at_old = _directions(c, [new, old], orders, self.batch_size, v)
                return new, storm(at_new, h_i, at_old, 0.0)

            turns = c.steps(self.local_steps, count, self.batch_size, "lower")
            return move(*c.loop(turns, step, (w, h), before=1), steps)

        x, y, u = fed.mean(fed.map(local, k2), name="x, y, u", around=w)
        return State(fed.problem.project_upper(x), y, u, h, w, state.rounds + 1)


def _directions(c: Client, points: list[Several], orders: Any, size: int | None, step: Any = 0) -> list[Several]:
    """Return D_i at each point, on the same minibatches."""
    if isinstance(c.problem, Bilevel):
        upper, lower = minibatches(c, orders, size, step)
        return [c.f_and_g(x, y, u, upper, lower) for x, y, u in points]
    problem: Composed = c.problem  # type: ignore[assignment]
    batches = [c.lower(jax.random.fold_in(orders[1], n), size, step) for n in range(len(problem.chain))]

    def composed(x: tree.Tree, y: tree.Tree, u: Several) -> Several:
        z, v = problem.tracked(y), slope(c.problem, problem.tracked(y)[-1])
        values, pullbacks = zip(*map(c.r_and_pullback, (x, *z), batches, range(len(z))), strict=True)
        gaps = []
        for n in reversed(range(len(z))):
            v = pullbacks[n](v)
            if u and n > 0:  # u[n − 1] tracks v, and takes its place
                gaps.append(tree.sub(u[n - 1], v))
                v = u[n - 1]
        through = plus_h(c, x, y, v, orders[0], size, step)
        return through, tree.sub(y, problem.joined(values)), tuple(reversed(gaps))

    return [composed(x, y, u) for x, y, u in points]
