"""Local steps with momentum at both levels and local hypergradients: Gao (2022), and AdaFBiO of Huang (2022)."""

from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from rookery.base import tree
from rookery.data.rows import Count
from rookery.language.fed import AtLeastOne, BatchSize, Client, Decay, Fed, Positive, Share, Step, Steps
from rookery.parts import hypergradient, inverse_hessian
from rookery.parts.momentum import moving_average, storm
from rookery.problems.problems import Bilevel

Pair = tuple[tree.Tree, tree.Tree]  # for x and y


class State(NamedTuple):
    """The variables, their momenta, and the number of rounds so far."""

    x: tree.Tree
    y: tree.Tree
    u: tree.Tree
    v: tree.Tree
    rounds: Int[Array, ""]


@dataclass(frozen=True)
class _Estimator:
    """The hyperparameters of the family, and a client's estimates of its hypergradient and lower gradient."""

    upper_step: Step = 0.01  # β₁η, γ
    lower_step: Step = 0.01  # β₂η, λ
    local_steps: Steps = 5  # p, q: from one synchronisation to the next
    neumann: inverse_hessian.Method = "random"
    neumann_terms: AtLeastOne = 5  # J
    hessian_step: Step = 0.01  # 1/ℓ
    batch_size: BatchSize = None  # of every minibatch; None: all the client's data

    solves: ClassVar[tuple[type, ...]] = (Bilevel,)

    def estimates(self, c: Client, points: tuple[Pair, ...], key: Array) -> list[Pair]:
        """Return ∇̄f_i and ∇_y g_i at each point (x, y), with the same minibatches at all points."""
        ku, kl = jax.random.split(key)
        series: dict[str, Any] = {"method": self.neumann, "terms": self.neumann_terms, "step": self.hessian_step}
        series |= {"upper_batch": self.batch_size, "lower_batch": self.batch_size}
        at = lambda points: hypergradient.local_at(c, points, ku, **series)
        upper = [at([z])[0] for z in points] if self.neumann == "cg" else at(points)
        batch = c.lower(kl, self.batch_size)
        return [(h, c.g_y(*z, batch)) for z, h in zip(points, upper, strict=True)]


@dataclass(frozen=True)
class _Gao(_Estimator):
    """The steps shared by Gao's two methods."""

    momentum: Share = 0.3  # α₁η = α₂η, for LocalBSGVR α₁η² = α₂η²: the weight of the new estimate

    def init(self, fed: Fed, x: tree.Tree, y: tree.Tree, key: Array) -> State:
        """Start with zero momenta, which are not used before the first estimate."""
        return State(x, y, tree.zeros_like(x), tree.zeros_like(y), jnp.int32(0))

    def descend(self, z: Pair, m: Pair) -> Pair:
        """x ← x − β₁η·u and y ← y − β₂η·v."""
        return tree.step(z[0], self.upper_step, m[0]), tree.step(z[1], self.lower_step, m[1])

    def steps(self, c: Client, key: Array) -> Count:
        """The client's number of local steps."""
        return c.steps(self.local_steps, key, self.batch_size, "lower")

    def weight(self, state: State, v: Any) -> Any:
        """The momentum's parameter at local step v: 1 at the very first, where there is no momentum yet."""
        return jnp.where((state.rounds == 0) & (v == 0), 1, self.momentum)


@dataclass(frozen=True)
class LocalBSGM(_Gao):
    """Local SGD with momentum at both levels, each client with its own hypergradient.

    LocalBSGM solves bilevel problems whose lower level has the same distribution on all clients (otherwise the mean of
    the clients' hypergradients is not the hypergradient of the mean).

    Each client takes p steps at its own (x, y): u ← (1 − α₁η)u + α₁η∇̄f_i, v ← (1 − α₂η)v + α₂η∇_y g_i, then
    x ← x − β₁ηu, y ← y − β₂ηv. ∇̄f_i uses the random Neumann series of the client's own Hessian. Then x, y, u and v are
    averaged.

    Departures from the paper: unverified, since we had no access to the paper's algorithm box; this is its outline,
    with the estimators of its decentralised sibling (Gao, Gu and Thai, AISTATS 2023, Alg. 1–2); the length of the
    series is drawn from 0..J−1 (the sibling prints 0..J with the factor J/ℓ); one `momentum` for both levels; cohorts
    instead of all clients.

    Exchanges per round: 1, which carries x, y, u and v.

    Reference: Gao, On the Convergence of Momentum-Based Algorithms for Federated Bilevel Optimization Problems, 2022.
    """

    def round(self, fed: Fed, state: State, key: Array) -> State:
        def local(c: Client, k: Array) -> tuple[Pair, Pair]:
            count, noise = jax.random.split(k)

            def one(v: Any, carry: tuple[Pair, Pair]) -> tuple[Pair, Pair]:
                z, m = carry
                (new,) = self.estimates(c, (z,), jax.random.fold_in(noise, v))
                m = moving_average(m, new, self.weight(state, v))
                return self.descend(z, m), m

            return c.loop(self.steps(c, count), one, ((state.x, state.y), (state.u, state.v)))

        start = (state.x, state.y), (state.u, state.v)
        (x, y), (u, v) = fed.mean(fed.map(local, key), name="x, y, u, v", around=start)
        return State(fed.problem.project_upper(x), y, u, v, state.rounds + 1)


@dataclass(frozen=True)
class LocalBSGVR(_Gao):
    """LocalBSGM with STORM instead of momentum: u ← ∇̄f_i(new) + (1 − α₁η²)(u − ∇̄f_i(old)), v alike.

    LocalBSGVR solves bilevel problems whose lower level has the same distribution on all clients. `old` is the point of
    the client's last estimate, evaluated on the same minibatch (and with the same length of the series). After a
    synchronisation it is the client's own point before the average, which the client remembers.

    Departures from the paper: unverified, as for `LocalBSGM`; the first estimate uses the usual batch size, not a
    larger one; a client that was not in the last round uses the mean of the others' last points, x + β₁ηu and y + β₂ηv,
    as its own (the paper has all clients in every round). If only a tenth of heterogeneous clients take part in each
    round, a `momentum` of .1 can diverge.

    Exchanges per round: 1, which carries x, y, u and v.

    Reference: Gao 2022.
    """

    def memory(self, x: tree.Tree, y: tree.Tree) -> tuple[Pair, Int[Array, ""]]:
        """A client's memory: the point and the round of its last estimate."""
        return (x, y), jnp.int32(-1)

    def round(self, fed: Fed, state: State, key: Array) -> State:
        momenta = state.u, state.v
        others = tree.step(state.x, -self.upper_step, state.u), tree.step(state.y, -self.lower_step, state.v)

        def local(c: Client, k: Array, memory: Any) -> tuple[Any, Any]:
            count, noise = jax.random.split(k)
            point, when = memory
            recent = when == state.rounds - 1
            old = jax.tree.map(lambda a, b: jnp.where(recent, a, b), point, others)

            def one(v: Any, carry: tuple[Pair, Pair, Pair]) -> tuple[Pair, Pair, Pair]:
                z, old, m = carry
                new, before = self.estimates(c, (z, old), jax.random.fold_in(noise, v))
                m = storm(new, m, before, self.weight(state, v))
                return self.descend(z, m), z, m

            z, last, m = c.loop(self.steps(c, count), one, ((state.x, state.y), old, momenta))
            return (z, m), (last, state.rounds)

        start = (state.x, state.y), momenta
        (x, y), (u, v) = fed.mean(fed.map_state(local, key), name="x, y, u, v", around=start)
        return State(fed.problem.project_upper(x), y, u, v, state.rounds + 1)


class AdaptiveState(NamedTuple):
    """The variables, their momenta, the squares and norms behind the step sizes, and the number of steps so far."""

    x: tree.Tree
    y: tree.Tree
    w: tree.Tree
    v: tree.Tree
    a: tree.Tree
    b: Float[Array, ""]
    t: Int[Array, ""]


@dataclass(frozen=True)
class AdaFBiO(_Estimator):
    """STORM at both levels with adaptive step sizes, which all clients share between two synchronisations.

    AdaFBiO solves bilevel problems.

    Each client takes q steps: x⁺ = x − γη_t A⁻¹w, y⁺ = y − λη_t B⁻¹v, then
    w ← ∇̄f_i(x⁺, y⁺) + (1 − c₂η_t²)(w − ∇̄f_i(x, y)) and v ← ∇_y g_i(x⁺, y⁺) + (1 − c₁η_t²)(v − ∇_y g_i(x, y)), each on
    one minibatch. η_t = δ/(m + t)^{1/3}, and ∇̄f_i uses the client's own Neumann series. Then the server averages x, y,
    w and v, and updates a ← ϱa + (1 − ϱ)w² (entry by entry), A = diag(√a + ρ), b ← ϱb + (1 − ϱ)‖v‖ and B = (b + ρ)I.

    Departures from the paper: unverified, since we had no access to the paper's algorithm box; this is its outline,
    with the adaptive matrices of AdaGDA (Huang, Wu and Hu, AISTATS 2023, (5)–(6)). The start is ours: w and v start at
    the mean of the clients' estimates, and a and b at their first update from 0. c₁η_t² and c₂η_t² are capped at 1.

    Exchanges per round: 1, which carries x, y, w and v; one more before the first round.

    Reference: Huang, Fast Adaptive Federated Bilevel Optimization, 2022.
    """

    local_steps: AtLeastOne = 5  # q
    delta: Positive = 1.0  # δ of η_t
    offset: Positive = 8.0  # m of η_t
    c_upper: Positive = 1.0  # c₂
    c_lower: Positive = 1.0  # c₁
    decay: Decay = 0.9  # ϱ
    floor: Positive = 0.1  # ρ

    def init(self, fed: Fed, x: tree.Tree, y: tree.Tree, key: Array) -> AdaptiveState:
        """Start with a first estimate."""
        w, v = fed.mean(fed.map(lambda c, k: self.estimates(c, ((x, y),), k)[0], key), name="w, v")
        return AdaptiveState(x, y, w, v, *self._refreshed(tree.zeros_like(x), 0.0, w, v), jnp.int32(0))

    def round(self, fed: Fed, state: AdaptiveState, key: Array) -> AdaptiveState:
        root = jax.tree.map(lambda a: jnp.sqrt(a) + self.floor, state.a)  # the diagonal of A

        def local(c: Client, k: Array) -> tuple[Pair, Pair]:
            def one(s: Any, carry: tuple[Pair, Pair]) -> tuple[Pair, Pair]:
                (x, y), (w, v) = carry
                eta = self.delta / (self.offset + state.t + s) ** (1 / 3)
                x_new = tree.step(x, self.upper_step * eta, jax.tree.map(jnp.divide, w, root))
                y_new = tree.step(y, self.lower_step * eta / (state.b + self.floor), v)
                new, old = self.estimates(c, ((x_new, y_new), (x, y)), jax.random.fold_in(k, s))
                w = storm(new[0], w, old[0], jnp.minimum(self.c_upper * eta**2, 1.0))
                v = storm(new[1], v, old[1], jnp.minimum(self.c_lower * eta**2, 1.0))
                return (x_new, y_new), (w, v)

            return c.loop(self.local_steps, one, ((state.x, state.y), (state.w, state.v)))

        start = (state.x, state.y), (state.w, state.v)
        (x, y), (w, v) = fed.mean(fed.map(local, key), name="x, y, w, v", around=start)
        a, b = self._refreshed(state.a, state.b, w, v)
        return AdaptiveState(fed.problem.project_upper(x), y, w, v, a, b, state.t + self.local_steps)

    def _refreshed(self, a: tree.Tree, b: Any, w: tree.Tree, v: tree.Tree) -> tuple[tree.Tree, Any]:
        squares = jax.tree.map(jnp.square, w)
        return tree.step(a, 1 - self.decay, tree.sub(a, squares)), b - (1 - self.decay) * (b - tree.norm(v))
