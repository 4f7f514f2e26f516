"""Bilevel methods published for one machine, in synchronous form: every oracle is the mean of the clients' oracles.

With one client, each method is the published one. Independent oracles share an exchange. The form and its exchanges are
ours, not the papers'.
"""

from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from rookery.base import tree
from rookery.language.fed import AtLeastOne, BatchSize, Client, Fed, PerClient, Positive, Step
from rookery.parts import features, inverse_hessian
from rookery.parts.momentum import storm
from rookery.parts.state import State
from rookery.problems.problems import Bilevel

Point = tuple[tree.Tree, tree.Tree]  # (x, y)


@dataclass(frozen=True)
class _Synchronous:
    """The family's hyperparameters and round: T steps on y, then one on x along the hypergradient at the new y."""

    upper_step: Step = 0.01  # α
    lower_step: Step = 0.01  # β
    lower_rounds: AtLeastOne = 5  # T, t_k, D
    neumann: inverse_hessian.Method = "random"
    neumann_terms: AtLeastOne = 5  # N, Q
    hessian_step: Step = 0.1  # 1/ℓ, η
    batch_size: BatchSize = None  # of every minibatch; None: all the client's data

    solves: ClassVar[tuple[type, ...]] = (Bilevel,)

    def init(self, fed: Fed, x: tree.Tree, y: tree.Tree, key: Array) -> State:
        return State(x, y)

    def round(self, fed: Fed, state: State, key: Array) -> State:
        lower, upper = jax.random.split(key)
        draws = None if self.batch_size is None else self.batch_size * (self.lower_rounds + self.neumann_terms)
        seen = features.seen(fed, state.x, key, draws)

        def one_step(t: Any, y: tree.Tree) -> tree.Tree:
            gradient = lambda c, k, z: c.g_y(state.x, y, c.lower(k, self.batch_size, seen=z))
            mean = fed.mean(fed.map(gradient, jax.random.fold_in(lower, t), seen), name="g_y")
            return tree.step(y, self.lower_step, mean)

        y = fed.loop(self.lower_rounds, one_step, state.y)
        ((direction, _),) = _directions(self, fed, ((state.x, y),), seen, upper)
        return State(fed.problem.project_upper(tree.step(state.x, self.upper_step, direction)), y)


def _directions(
    h: Any, fed: Fed, points: tuple[Point, ...], seen: PerClient | None, key: Array, lower: bool = False
) -> list[tuple[tree.Tree, tree.Tree]]:
    """Return the hypergradient at each point, and ∇_y g if `lower`; all points use the same minibatches.

    One ξ serves both parts of ∇f; the minibatches of the products are independent. Exchanges: N + 2 (N' if random).
    """
    k0, k1, k2, k3 = jax.random.split(key, 4)

    def gradients(c: Client, k: Array) -> Any:
        ku, kl = jax.random.split(k)
        batch = c.upper(ku, h.batch_size)
        both = [c.f_x_and_y(*z, batch) for z in points]
        below = c.lower(kl, h.batch_size) if lower else None
        return both, [None if below is None else c.g_y(*z, below) for z in points]

    both, g_y = fed.mean(fed.map(gradients, k0), name="f_x, f_y, g_y" if lower else "f_x, f_y")

    def product(p: list[tree.Tree], n: Any) -> list[tree.Tree]:
        def hessian(c: Client, k: Array, z: Any) -> list[tree.Tree]:
            batch = c.lower(k, h.batch_size, seen=z)
            return [c.g_yy(*point, batch, v) for point, v in zip(points, p, strict=True)]

        return fed.mean(fed.map(hessian, jax.random.fold_in(k1, n), seen), name="Hp")

    f_y = [pair[1] for pair in both]
    p = inverse_hessian.solve(h.neumann, fed.loop, product, f_y, h.hessian_step, h.neumann_terms, k2)

    def jacobian(c: Client, k: Array) -> list[tree.Tree]:
        batch = c.lower(k, h.batch_size)
        return [c.g_xy(*z, batch, v) for z, v in zip(points, p, strict=True)]

    mixed = fed.mean(fed.map(jacobian, k3), name="Jp")
    return [(tree.sub(f_x, j), g) for (f_x, _), j, g in zip(both, mixed, g_y, strict=True)]


@dataclass(frozen=True)
class BSA(_Synchronous):
    """Bilevel stochastic approximation: many steps on y for each step on x.

    BSA solves bilevel problems. A round is t_k times y ← y − β∇_y g(x, y); then, at the new y, x ← Proj(x − α∇̄f) with
    the random Neumann series. The paper's steps fall like k^{−1/2}: use schedules, `upper_step=lambda k: 0.1 * (k + 1)
    ** -0.5`.

    Departures from the paper: synchronous over the clients; y continues from its last value, as in the public benchmark
    (benchopt/benchmark_bilevel; in the paper every iteration starts from the same y₀: unverified); t_k is constant.

    Exchanges per round: t_k + N' + 2.

    Reference: Ghadimi and Wang, Approximation Methods for Bilevel Programming, 2018.
    """


@dataclass(frozen=True)
class TTSA(_Synchronous):
    """Two-timescale stochastic approximation: one step on y, one on x, with step sizes that fall at different rates.

    TTSA solves bilevel problems. A round is y⁺ = y − β_k∇_y g(x, y); x⁺ = Proj(x − α_k∇̄f(x, y⁺)) with the random
    Neumann series. The two timescales are schedules, β_k ∝ k^{−2/5} and α_k ∝ k^{−3/5}: `lower_step=lambda k: 0.1 *
    (k + 1) ** -0.4`.

    Departures from the paper: synchronous over the clients. The form is that of the public benchmark
    (benchopt/benchmark_bilevel), but each product has its own minibatch.

    Exchanges per round: N' + 3.

    Reference: Hong, Wai, Wang and Yang, A Two-Timescale Framework for Bilevel Optimization, 2020.
    """

    lower_rounds: AtLeastOne = 1  # one step on y


@dataclass(frozen=True)
class ALSET(_Synchronous):
    """Alternating SGD: a few steps on y, one on x, with step sizes of the same order.

    ALSET solves bilevel problems. A round is T times y ← y − β∇_y g(x, y) from the last y; then, at the new y,
    x ← x − α(∇_x f − ∇²_xy g·p), with p by the random Neumann series and one ξ for both parts of ∇f. FedNest with one
    client, τ = 1 and full batches is ALSET.

    Departures from the paper: synchronous over the clients.

    Exchanges per round: T + N' + 2.

    Reference: Chen, Sun and Yin, Closing the Gap: Tighter Analysis of Alternating Stochastic Gradient Methods for
    Bilevel Problems, NeurIPS 2021, Alg. 1.
    """


@dataclass(frozen=True)
class StocBiO(_Synchronous):
    """Warm-started steps on y, and a hypergradient from the whole Neumann series.

    stocBiO solves bilevel problems. A round is D times y ← y − step·∇_y g from the last y; then p = η Σ_{k=0}^{Q} r_k
    with r_0 = ∇_y f and r_k = r_{k−1} − η∇²_y g·r_{k−1}, a fresh minibatch for each product; then x ← x − β(∇_x
    f − ∇²_xy g·p).

    Departures from the paper: synchronous over the clients; all minibatches have the same size (the theory's shrink
    along the series). The authors' code reuses one minibatch for all products and sums the series differently; this
    follows the paper.

    Exchanges per round: D + Q + 2.

    Reference: Ji, Yang and Liang, Bilevel Optimization: Convergence Analysis and Enhanced Design, ICML 2021, Alg. 2–3.
    """

    neumann: inverse_hessian.Method = "sum"


class MomentumState(NamedTuple):
    """The variables, their momenta, the point of the last estimates, and the number of rounds so far."""

    x: tree.Tree
    y: tree.Tree
    v: tree.Tree
    u: tree.Tree
    before: Point
    rounds: Int[Array, ""]


@dataclass(frozen=True)
class MRBO:
    """STORM on both levels, in a single loop.

    MRBO solves bilevel problems. A round at (x_k, y_k) is
        u_k = ∇_y g + (1 − β_k)(u_{k−1} − ∇_y g(before)), v_k = ∇̄f + (1 − α_k)(v_{k−1} − ∇̄f(before)),
        x ← x − γη_k v and y ← y − λη_k u,
    where `before` is the previous point, evaluated on the same minibatches, and ∇̄f uses the whole Neumann series.
    η_k = d/(m + k)^{1/3}; α_{k+1} = c₁η_k² and β_{k+1} = c₂η_k², at most 1; u_0 and v_0 are plain estimates. With
    `neumann="random"` the estimator is that of SUSTAIN (Khanduri et al., NeurIPS 2021).

    Departures from the paper: synchronous over the clients. The recursions agree with the public benchmark's
    (benchopt/benchmark_bilevel), which starts from 0 where the paper starts from plain estimates; the form of α_k, β_k
    and η_k is unverified, and k counts from 0.

    Exchanges per round: Q + 2.

    Reference: Yang, Ji and Liang, Provably Faster Algorithms for Bilevel Optimization, NeurIPS 2021, Alg. 1.
    """

    upper_step: Step = 0.01  # γ
    lower_step: Step = 0.01  # λ
    delta: Positive = 4.0  # d of η_k
    offset: Positive = 64.0  # m of η_k
    c_upper: Positive = 0.5  # c₁
    c_lower: Positive = 0.5  # c₂
    neumann: inverse_hessian.Method = "sum"
    neumann_terms: AtLeastOne = 5  # Q
    hessian_step: Step = 0.1  # η of the series
    batch_size: BatchSize = None  # of every minibatch; None: all the client's data

    solves: ClassVar[tuple[type, ...]] = (Bilevel,)

    def init(self, fed: Fed, x: tree.Tree, y: tree.Tree, key: Array) -> MomentumState:
        """Start with zero momenta, which are not used before the first estimate."""
        return MomentumState(x, y, tree.zeros_like(x), tree.zeros_like(y), (x, y), jnp.int32(0))

    def round(self, fed: Fed, state: MomentumState, key: Array) -> MomentumState:
        eta = lambda k: self.delta / (self.offset + k) ** (1 / 3)
        forget = lambda c: jnp.where(state.rounds == 0, 1.0, jnp.minimum(c * eta(state.rounds - 1) ** 2, 1.0))
        new, old = _directions(self, fed, ((state.x, state.y), state.before), None, key, lower=True)
        v = storm(new[0], state.v, old[0], forget(self.c_upper))
        u = storm(new[1], state.u, old[1], forget(self.c_lower))
        size = eta(state.rounds)
        x = fed.problem.project_upper(tree.step(state.x, self.upper_step * size, v))
        y = tree.step(state.y, self.lower_step * size, u)
        return MomentumState(x, y, v, u, (state.x, state.y), state.rounds + 1)
