"""Federated bilevel methods whose hypergradient is the global one, in the mean: FedMBO and FBO-AggITD (ICML 2023)."""

from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array

from rookery.base import draws, tree
from rookery.data.source import Count
from rookery.language.fed import AtLeastOne, BatchSize, Client, Fed, Step, Steps
from rookery.parts import features
from rookery.parts.local import svrg
from rookery.problems.problems import Bilevel


class State(NamedTuple):
    """The two variables."""

    x: tree.Tree
    y: tree.Tree


@dataclass(frozen=True)
class FedMBO:
    """Large-batch steps at the lower level, and a hypergradient whose every factor comes from another client.

    Solves bilevel problems whose clients count equally.

    Round (Alg. 1): T times, with a fresh cohort each, y ← y − β mean ∇_y g_i. Then the hypergradient at the new y
    (Alg. 2), in P *slots*: a slot starts as p = (N/ℓ)∇_y f_i at some client and draws its own N_j from 0..N−1; N_j
    times it goes to another client, drawn afresh, who returns p − (1/ℓ)∇²_y g_i·p; a last client returns
    ∇_x f_i − ∇²_xy g_i·p. x steps along the slots' mean. Each slot estimates the global N-term series without bias (one
    that stayed with its client would estimate the client's own), and the variance falls with the number of slots.

    Departures:
        ∇_x f_i is asked in the last exchange, not in the first, so that the P vectors of x's size need not be kept (the
        same mean; Alg. 2 line 4 prints ∇_y f there, equation (6) has ∇_x f);
        the clients of one exchange are drawn without replacement and dealt out to the slots at random, so that the
        slots are not quite independent; a slot's own clients are;
        a slot that is done travels on unchanged: nothing is asked of its client, but its bytes are counted;
        clients are drawn uniformly: the paper's problem has no weights. Unequal ones are refused: the hypergradient
        would not be that of the weighted problem.

    Exchanges a round: T + max_j N_j + 2, at most T + N + 1. While p is built, its vectors are gathered, not averaged.

    Reference: Huang, Zhang and Ji, Achieving Linear Speedup in Non-IID Federated Bilevel Learning, ICML 2023, Alg. 1–2.
    """

    upper_step: Step = 0.01  # α
    lower_step: Step = 0.01  # β
    lower_rounds: AtLeastOne = 5  # T
    neumann_terms: AtLeastOne = 5  # N
    hessian_step: Step = 0.1  # 1/ℓ
    batch_size: BatchSize = None  # S, of every minibatch; None: all the client's data

    solves: ClassVar[tuple[type, ...]] = (Bilevel,)
    needs: ClassVar[tuple[str, ...]] = ("equal weights",)

    def init(self, fed: Fed, x: tree.Tree, y: tree.Tree, key: Array) -> State:
        """The start."""
        return State(x, y)

    def round(self, fed: Fed, state: State, key: Array) -> State:
        """Alg. 1."""
        lower, upper = jax.random.split(key)
        x = state.x

        def one_step(t: Any, y: tree.Tree) -> tree.Tree:
            cohort, noise, _ = _fresh(fed, jax.random.fold_in(lower, t))
            gradient = lambda c, k: c.g_y(x, y, c.lower(k, self.batch_size))
            return tree.step(y, self.lower_step, cohort.mean(cohort.map(gradient, noise), name="g_y"))

        y = fed.loop(self.lower_rounds, one_step, state.y)
        x = tree.step(x, self.upper_step, self._hypergradient(fed, x, y, upper))
        return State(fed.problem.project_upper(x), y)

    def _hypergradient(self, fed: Fed, x: tree.Tree, y: tree.Tree, key: Array) -> tree.Tree:
        """Alg. 2."""
        k0, k1, k2, k3 = jax.random.split(key, 4)
        counts = draws.integers(k0, (fed.cohort_size,), 0, self.neumann_terms)  # N_j

        def first(c: Client, k: Array) -> tree.Tree:
            return tree.scale(self.neumann_terms * self.hessian_step, c.f_y(x, y, c.upper(k, self.batch_size)))

        cohort, noise, _ = _fresh(fed, k1)
        p, there = cohort.gather(cohort.map(first, noise), name="p", replied=True)
        p = jax.tree.map(lambda a: _where(there, a, jnp.sum(a, axis=0) / jnp.sum(there).astype(a.dtype)), p)

        def once(l: Any, slots: tuple[tree.Tree, Array]) -> tuple[tree.Tree, Array]:
            cohort, noise, order = _fresh(fed, jax.random.fold_in(k2, l))
            dealt = _in_order(order, slots)

            def product(c: Client, k: Array, slot: tuple[tree.Tree, Array]) -> tree.Tree:
                p, count = slot
                factor = lambda _, p: tree.step(p, self.hessian_step, c.g_yy(x, y, c.lower(k, self.batch_size), p))
                return c.loop(_if(l < count), factor, p)

            new, there = cohort.gather(cohort.map(product, noise, cohort.scatter(dealt)), name="Hp", replied=True)
            return jax.tree.map(lambda a, b: _where(there, a, b), new, dealt[0]), dealt[1]

        p, _ = fed.loop(jnp.max(counts), once, (p, counts))

        def last(c: Client, k: Array, p: tree.Tree) -> tree.Tree:
            ku, kl = jax.random.split(k)
            direct = c.f_x(x, y, c.upper(ku, self.batch_size))
            return tree.sub(direct, c.g_xy(x, y, c.lower(kl, self.batch_size), p))

        cohort, noise, order = _fresh(fed, k3)
        return cohort.mean(cohort.map(last, noise, cohort.scatter(_in_order(order, p))), name="h")


def _fresh(fed: Fed, key: Array) -> tuple[Fed, Array, Array]:
    """A fresh cohort, a key for its noise, and a random order in which the slots are dealt out to it."""
    who, noise, order = jax.random.split(key, 3)
    return fed.resample(who), noise, jax.random.permutation(order, jnp.arange(fed.cohort_size, dtype=jnp.int32))


def _where(there: Array, new: Array, old: Array) -> Array:
    """The rows of those who replied, and the old ones of the others."""
    return jnp.where(there.reshape(-1, *(1,) * (new.ndim - 1)), new, old)


def _in_order(order: Array, rows: Any) -> Any:
    return jax.tree.map(lambda a: a[order], rows)


def _if(condition: Any) -> Count:
    """How often a loop runs that is an `if`."""
    return jnp.where(condition, 1, 0)


@dataclass(frozen=True)
class AggITD:
    """FBO-AggITD: the hypergradient is built on the way to y, in the exchanges that y needs anyway.

    Solves bilevel problems.

    Round (Alg. 1–4): draw Q from 0..N. For t = 0..N, one exchange gives the anchor q = mean ∇_y g_i(x, y^t) (t < N) and
    the vector z: mean ∇_y f_i(x, y^t) at t = Q, then z ← mean (z − λ∇²_y g_i(x, y^t)·z); for t < N a second one gives
    y^{t+1} by FedNest's FedInn. With p = λ(N + 1)z, h = mean (∇_x f_i − ∇²_xy g_i·p) at y^N; x moves by FedNest's
    FedOut. The mean over Q is λ Σ_Q Π_{t=Q+1}^{N} (I − λ∇²_y g(x, y^t))∇_y f(x, y^Q): N + 1 terms along the iterates.

    Departures:
        p is λ(N + 1)z^N: Alg. 1 drops λ in line 6 and has z^{N−1} in line 15, against the paper's own formulas;
        the anchor q_i is the full local gradient unless `anchor_batch` is given (the paper's is stochastic);
        before t = Q there is no z yet and zeros are sent in its place, which count as bytes.

    Exchanges a round: 2N + 3.

    Reference: Xiao and Ji, Communication-Efficient Federated Hypergradient Computation via Aggregated Iterative
    Differentiation, ICML 2023, Alg. 1–4.
    """

    upper_step: Step = 0.01  # α
    lower_step: Step = 0.01  # β
    lower_rounds: AtLeastOne = 5  # N, which is also the length of the series
    lower_local_steps: Steps = 1  # τ_i of the lower level
    upper_local_steps: Steps = 1  # τ_i of the upper level
    hessian_step: Step = 0.1  # λ
    batch_size: BatchSize = None  # of ξ, ζ and u; None: all the client's data
    anchor_batch: BatchSize = None  # of ζ_i in the anchor q_i; None: all the client's data
    scale_steps: bool = True  # β_i = β/τ_i and α_i = α/τ_i, as in the paper

    solves: ClassVar[tuple[type, ...]] = (Bilevel,)

    def init(self, fed: Fed, x: tree.Tree, y: tree.Tree, key: Array) -> State:
        """The start."""
        return State(x, y)

    def round(self, fed: Fed, state: State, key: Array) -> State:
        """Alg. 1."""
        k0, k1, k2, k3, k4 = jax.random.split(key, 5)
        x, n = state.x, self.lower_rounds
        chosen = draws.integers(k0, (), 0, n + 1)  # Q
        seen = features.seen(fed, x, key)

        def track(c: Client, k: Array, t: Any, y: tree.Tree, z: tree.Tree, own: Any) -> tree.Tree:
            """z_i of step t."""
            ku, kl = jax.random.split(k)
            product = lambda z: c.g_yy(x, y, c.lower(kl, self.batch_size, seen=own), z)
            z = c.loop(_if(t > chosen), lambda _, z: tree.step(z, self.hessian_step, product(z)), z)
            return c.loop(_if(t == chosen), lambda _, z: c.f_y(x, y, c.upper(ku, self.batch_size)), z)

        def inner(t: Any, pair: tuple[tree.Tree, tree.Tree]) -> tuple[tree.Tree, tree.Tree]:
            y, z = pair
            ka, kb = jax.random.split(jax.random.fold_in(k1, t))

            def both(c: Client, k: Array, own: Any) -> tuple[tree.Tree, tree.Tree]:
                kq, kz = jax.random.split(k)
                return c.g_y(x, y, c.lower(kq, self.anchor_batch, seen=own)), track(c, kz, t, y, z, own)

            q, z = fed.mean(fed.map(both, ka, seen), name="q, z", around=(None, z))

            def local(c: Client, k: Array, own: Any) -> tree.Tree:
                count, order = jax.random.split(k)
                steps = c.steps(self.lower_local_steps, count, self.batch_size, "lower")
                gradient = lambda y, v: c.g_y(x, y, c.lower(order, self.batch_size, v, seen=own))
                return svrg(c, gradient, y, q, self._scaled(self.lower_step, steps), steps)

            return fed.mean(fed.map(local, kb, seen), name="y", around=y), z

        y, z = fed.loop(n, inner, (state.y, tree.zeros_like(state.y)))
        z = fed.mean(fed.map(lambda c, k, own: track(c, k, n, y, z, own), k2, seen), name="z", around=z)
        p = tree.scale(self.hessian_step * (n + 1), z)

        def local_part(c: Client, k: Array) -> tree.Tree:
            ku, kl = jax.random.split(k)
            return tree.sub(c.f_x(x, y, c.upper(ku, self.batch_size)), c.g_xy(x, y, c.lower(kl, self.batch_size), p))

        h = fed.mean(fed.map(local_part, k3), name="h")

        def outer(c: Client, k: Array) -> tree.Tree:
            count, order = jax.random.split(k)
            steps = c.steps(self.upper_local_steps, count, self.batch_size, "upper")
            gradient = lambda x, v: c.f_x(x, y, c.upper(order, self.batch_size, v))
            return svrg(c, gradient, x, h, self._scaled(self.upper_step, steps), steps)

        return State(fed.problem.project_upper(fed.mean(fed.map(outer, k4), name="x", around=x)), y)

    def _scaled(self, step: Any, steps: Count) -> Any:
        return step / steps if self.scale_steps else step
