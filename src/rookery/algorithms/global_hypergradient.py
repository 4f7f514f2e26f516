"""Federated bilevel methods with an unbiased global hypergradient: FedMBO and FBO-AggITD (both ICML 2023)."""

from dataclasses import dataclass
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jaxtyping import Array

from rookery.base import draws, tree
from rookery.data.rows import Count
from rookery.language.fed import AtLeastOne, BatchSize, Client, Fed, Step, Steps
from rookery.parts import features, hypergradient
from rookery.parts.local import descend
from rookery.parts.state import State
from rookery.problems.problems import Bilevel


@dataclass(frozen=True)
class FedMBO:
    """Large-batch steps at the lower level, and a hypergradient whose factors all come from different clients.

    FedMBO solves bilevel problems whose clients have equal weights.

    Each round (Alg. 1) takes T steps y ← y − β mean ∇_y g_i, with a fresh cohort for each, and then a step on x along
    the hypergradient at the new y (Alg. 2). The hypergradient is built in P *slots*. A slot starts as p = (N/ℓ)∇_y f_i
    at some client and draws its own N_j from 0..N−1. N_j times it goes to a freshly drawn client, which returns
    p − (1/ℓ)∇²_y g_i·p. A last client returns ∇_x f_i − ∇²_xy g_i·p. x steps along the mean of the slots. Each slot is
    an unbiased estimate of the global N-term series (a slot that stayed with one client would estimate that client's
    series), and the variance falls with the number of slots.

    Departures from the paper:
        ∇_x f_i is computed in the last exchange instead of the first, so that P vectors of the size of x need not be
        kept (the mean is the same; Alg. 2 line 4 prints ∇_y f there, but equation (6) has ∇_x f);
        the clients of one exchange are drawn without replacement and assigned to the slots at random, so the slots are
        not quite independent of each other, although the clients within one slot are;
        a finished slot travels on unchanged: its client computes nothing, but its bytes count;
        clients are drawn uniformly, since the paper's problem has no weights. Unequal weights are refused, because the
        hypergradient would not be that of the weighted problem.

    Exchanges per round: T + max_j N_j + 2, at most T + N + 1. While p is built, its vectors are gathered, not averaged.

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
        return State(x, y)

    def round(self, fed: Fed, state: State, key: Array) -> State:
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
                return c.loop(_if(l < count), factor, p, most=1)

            new, there = cohort.gather(cohort.map(product, noise, cohort.scatter(dealt)), name="Hp", replied=True)
            return jax.tree.map(lambda a, b: _where(there, a, b), new, dealt[0]), dealt[1]

        p, _ = fed.loop(jnp.max(counts), once, (p, counts))
        last = lambda c, k, p: hypergradient.given_vector(c, x, y, p, k, self.batch_size)
        cohort, noise, order = _fresh(fed, k3)
        return cohort.mean(cohort.map(last, noise, cohort.scatter(_in_order(order, p))), name="h")


def _fresh(fed: Fed, key: Array) -> tuple[Fed, Array, Array]:
    """Draw a fresh cohort, a key for its noise, and the random order in which it gets the slots."""
    who, noise, order = jax.random.split(key, 3)
    return fed.resample(who), noise, jax.random.permutation(order, jnp.arange(fed.cohort_size, dtype=jnp.int32))


def _where(there: Array, new: Array, old: Array) -> Array:
    """Return the new rows of the clients that replied, and the old rows of the others."""
    return jnp.where(there.reshape(-1, *(1,) * (new.ndim - 1)), new, old)


def _in_order(order: Array, rows: Any) -> Any:
    return jax.tree.map(lambda a: a[order], rows)


def _if(condition: Any) -> Count:
    """Return the number of turns of a loop that acts as an `if`."""
    return jnp.where(condition, 1, 0)


@dataclass(frozen=True)
class AggITD:
    """FBO-AggITD: the hypergradient is built along the iterations on y, in exchanges that y needs anyway.

    AggITD solves bilevel problems.

    Each round (Alg. 1–4) draws Q from 0..N. For t = 0..N, one exchange gives the anchor q = mean ∇_y g_i(x, y^t) (t <
    N) and the vector z, which is mean ∇_y f_i(x, y^t) at t = Q and then z ← mean (z − λ∇²_y g_i(x, y^t)·z). For t < N a
    second exchange gives y^{t+1} by FedNest's FedInn. With p = λ(N + 1)z, h = mean (∇_x f_i − ∇²_xy g_i·p) at y^N, and
    x moves by FedNest's FedOut. The mean over Q is λ Σ_Q Π_{t=Q+1}^{N} (I − λ∇²_y g(x, y^t))∇_y f(x, y^Q): N + 1 terms
    along the iterates.

    Departures from the paper:
        p is λ(N + 1)z^N: Alg. 1 drops λ in line 6 and has z^{N−1} in line 15, against the paper's own formulas;
        the anchor q_i is the full local gradient unless `anchor_batch` is given (the paper's is stochastic);
        before t = Q there is no z, and zeros are sent instead, which count as bytes.

    Exchanges per round: 2N + 3.

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
        return State(x, y)

    def round(self, fed: Fed, state: State, key: Array) -> State:
        k0, k1, k2, k3, k4 = jax.random.split(key, 5)
        x, n = state.x, self.lower_rounds
        chosen = draws.integers(k0, (), 0, n + 1)  # Q
        seen = features.seen(fed, x, key)
        shared: Any = {"batch_size": self.batch_size, "scale_steps": self.scale_steps}

        def track(c: Client, k: Array, t: Any, y: tree.Tree, z: tree.Tree, local_features: Any) -> tree.Tree:
            """Return z_i of step t."""
            ku, kl = jax.random.split(k)
            product = lambda z: c.g_yy(x, y, c.lower(kl, self.batch_size, seen=local_features), z)
            z = c.loop(_if(t > chosen), lambda _, z: tree.step(z, self.hessian_step, product(z)), z, most=1)
            return c.loop(_if(t == chosen), lambda _, z: c.f_y(x, y, c.upper(ku, self.batch_size)), z, most=1)

        def inner(t: Any, pair: tuple[tree.Tree, tree.Tree]) -> tuple[tree.Tree, tree.Tree]:
            y, z = pair
            ka, kb = jax.random.split(jax.random.fold_in(k1, t))

            def both(c: Client, k: Array, local_features: Any) -> tuple[tree.Tree, tree.Tree]:
                kq, kz = jax.random.split(k)
                q_i = c.g_y(x, y, c.lower(kq, self.anchor_batch, seen=local_features))
                return q_i, track(c, kz, t, y, z, local_features)

            q, z = fed.mean(fed.map(both, ka, seen), name="q, z", around=(None, z))

            def local(c: Client, k: Array, local_features: Any) -> tree.Tree:
                steps: Any = {"level": "lower", "step": self.lower_step, "local_steps": self.lower_local_steps}
                return descend(c, lambda y, b: c.g_y(x, y, b), y, k, anchor=q, seen=local_features, **steps, **shared)

            return fed.mean(fed.map(local, kb, seen), name="y", around=y), z

        y, z = fed.loop(n, inner, (state.y, tree.zeros_like(state.y)))
        z = fed.mean(
            fed.map(lambda c, k, local_features: track(c, k, n, y, z, local_features), k2, seen), name="z", around=z
        )
        p = tree.scale(self.hessian_step * (n + 1), z)
        local_part = lambda c, k: hypergradient.given_vector(c, x, y, p, k, self.batch_size)
        h = fed.mean(fed.map(local_part, k3), name="h")

        def outer(c: Client, k: Array) -> tree.Tree:
            steps: Any = {"level": "upper", "step": self.upper_step, "local_steps": self.upper_local_steps}
            return descend(c, lambda x, b: c.f_x(x, y, b), x, k, anchor=h, **steps, **shared)

        return State(fed.problem.project_upper(fed.mean(fed.map(outer, k4), name="x", around=x)), y)
