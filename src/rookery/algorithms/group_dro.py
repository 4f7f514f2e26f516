"""Robustness and fairness over clients: AFL (Mohri et al. 2019), DRFA (Deng et al. 2020), q-FedAvg (Li et al. 2020)."""

from dataclasses import dataclass
from typing import Any, ClassVar, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from rookery.base import draws, tree
from rookery.language.fed import Amount, AtLeastOne, BatchSize, Bookkeeping, Client, Fed, Step, Steps
from rookery.parts.local import sgd
from rookery.parts.projection import simplex
from rookery.problems.problems import SingleLevel


class State(NamedTuple):
    """The output, the clients' weights λ, and the last iterate if the output is an average."""

    x: tree.Tree
    weights: Float[Array, " n"]
    y: tuple[()] = ()
    done: Any = None  # rounds, with output="average"
    last: Any = None  # the last x, with output="average"


class Point(NamedTuple):
    """The variable."""

    x: tree.Tree
    y: tuple[()] = ()


def _equal_weights(fed: Fed, x: tree.Tree) -> Float[Array, " n"]:
    return jnp.full(fed.n, 1 / fed.n, jnp.result_type(*jax.tree.leaves(x)))


@dataclass(frozen=True)
class AFL:
    """Agnostic federated learning: descent on x and projected ascent on one weight λ_k for every client.

    AFL solves single-level problems for the worst mixture of the clients, min over x, max over λ in the simplex of Σ
    λ_k F_k(x), so that no client is served worse than necessary.

    A round updates both from the old values: x ← x − γ_x Σ λ_k ∇F_k(x; ξ_k) (the paper's "per domain" gradients), and λ
    ← the projection onto the simplex of λ + γ_λ(F_1(x; ξ_1), …, F_n(x; ξ_n)). The output is the average of x over the
    rounds, as in the paper, or the last x with output="last"; the method itself continues from the last.

    Departures from the paper: λ starts uniform. The clients' own weights (`Clients(weights=...)`) are not used. With a
    cohort, both sums are over the cohort with the factor n/P, which keeps them unbiased; the paper uses all clients.

    Exchanges per round: 1, of the weighted gradient and a vector of n numbers with the loss at the client's entry.

    Reference: Mohri, Sivek and Suresh, Agnostic Federated Learning, ICML 2019.
    """

    step: Step = 0.01  # γ_x
    weight_step: Step = 0.01  # γ_λ
    batch_size: BatchSize = None  # of ξ; None: all the client's data
    output: Literal["last", "average"] = "average"

    solves: ClassVar[tuple[type, ...]] = (SingleLevel,)

    def init(self, fed: Fed, x: tree.Tree, y: tuple[()], key: Array) -> State:
        """Start with uniform λ."""
        start = State(x, _equal_weights(fed, x))
        return start if self.output == "last" else start._replace(done=jnp.int32(0), last=x)

    def round(self, fed: Fed, state: State, key: Array) -> State:
        x = state.x if state.last is None else state.last
        places = jnp.arange(fed.n)

        def both(c: Client, k: Array) -> tuple[tree.Tree, Array]:
            batch = c.upper(k, self.batch_size)
            loss = jnp.where(places == c.id, c.f(x, (), batch), 0)
            return tree.scale(fed.n, (tree.scale(state.weights[c.id], c.f_x(x, (), batch)), loss))

        direction, losses = fed.mean(fed.map(both, key), name="gradient, losses", weights=np.ones(fed.n))
        weights = simplex(tree.step(state.weights, self.weight_step, -losses))
        new = fed.problem.project_upper(tree.step(x, self.step, direction))
        if self.output == "last":
            return State(new, weights)
        done = state.done + 1
        average = jax.tree.map(lambda mean, last: mean + (last - mean) / done.astype(last.dtype), state.x, new)
        return State(average, weights, done=done, last=new)


@dataclass(frozen=True)
class DRFA:
    """Distributionally robust federated averaging: AFL's problem with local steps, and clients drawn by their weights.

    DRFA solves single-level problems for the worst mixture of the clients, min over x, max over λ in the simplex of Σ
    λ_k F_k(x).

    Each round draws P clients by λ, with replacement, and one t' uniformly from 1..τ. Each client takes τ steps of SGD
    from x. x becomes the mean of their last points, and x' the mean of their points after t' steps. Then P clients,
    drawn uniformly, evaluate F_k(x'; ξ_k). With v_k = (n/P)F_k for these clients and 0 for the others, λ becomes the
    projection onto the simplex of λ + τγv. With t' random, τv is an unbiased estimate of the sum of the losses along
    the way.

    Departures from the paper: none. The authors' code differs from the paper: it draws the first clients uniformly and
    weights their mean by λ, draws a t' for each of them, and keeps λ above 0.001. Here λ starts uniform, x is projected
    onto the problem's set after the mean, and the clients' own weights are not used.

    Exchanges per round: 2, x and x' from the clients drawn by λ, then the losses (gathered, with the client's number).

    Reference: Deng, Kamani and Mahdavi, Distributionally Robust Federated Averaging, NeurIPS 2020.
    """

    step: Step = 0.01  # η
    weight_step: Step = 0.01  # γ
    local_steps: AtLeastOne = 1  # τ
    batch_size: BatchSize = None  # of ξ; None: all the client's data

    solves: ClassVar[tuple[type, ...]] = (SingleLevel,)

    def init(self, fed: Fed, x: tree.Tree, y: tuple[()], key: Array) -> State:
        """Start with uniform λ."""
        return State(x, _equal_weights(fed, x))

    def round(self, fed: Fed, state: State, key: Array) -> State:
        """Local steps by clients drawn by λ; then λ from the losses of others."""
        choice, pick, local, look = jax.random.split(key, 4)
        snapshot = draws.integers(pick, (), 1, self.local_steps + 1)  # t'

        def descend(c: Client, k: Array) -> tuple[tree.Tree, tree.Tree]:
            def one(v: Any, both: tuple[tree.Tree, tree.Tree]) -> tuple[tree.Tree, tree.Tree]:
                x, then = both
                x = tree.step(x, self.step, c.f_x(x, (), c.upper(k, self.batch_size, v)))
                return x, jax.tree.map(lambda new, old: jnp.where(v < snapshot, new, old), x, then)

            return c.loop(self.local_steps, one, (state.x, state.x))

        drawn = fed.resample(choice, state.weights)
        both = drawn.map(descend, local)
        means = drawn.mean(both, name="x, x at t'", weights=np.ones(fed.n), around=(state.x, state.x))
        x, between = (fed.problem.project_upper(mean) for mean in means)
        loss = lambda c, k: (jnp.asarray(c.id, jnp.int32), c.f(between, (), c.upper(k, self.batch_size)))
        number = Bookkeeping("the client's number", most=fed.n - 1)
        replies = fed.gather(fed.map(loss, look), name="losses", replied=True, bookkeeping=(number, None))
        (ids, losses), there = replies
        v = jnp.zeros_like(state.weights).at[ids].add((fed.n / jnp.sum(there)).astype(losses.dtype) * losses)
        return State(x, simplex(tree.step(state.weights, self.local_steps * self.weight_step, -v)))


@dataclass(frozen=True)
class QFedAvg:
    """q-FedAvg: FedAvg in which clients count more, the larger their loss.

    q-FedAvg solves single-level problems for fairness: min over x of Σ p_k F_k(x)^{q+1}/(q+1), for losses F_k ≥ 0.
    q = 0 is FedAvg; a large q considers the worst client only.

    In each round, client k computes F_k = F_k(x) on all its data, and x_k by SGD with the step 1/L from x. With
    w_k = L(x − x_k) it sends Δ_k = F_k^q w_k and h_k = qF_k^{q−1}‖w_k‖² + LF_k^q, an estimate of the curvature. Then
    x ← x − Σ p_kΔ_k/Σ p_k h_k. q-FedSGD is one local step on all the data.

    Departures from the paper: a uniform cohort whose sums have the weights p_k, whereas the paper draws clients by p_k
    and sums without weights; the expectation is the same. As in the authors' code, the powers are those of F_k + 1e-10.

    Exchanges per round: 1, of Δ_k and h_k.

    Reference: Li, Sanjabi, Beirami and Smith, Fair Resource Allocation in Federated Learning, ICLR 2020.
    """

    step: Step = 0.01  # 1/L
    fairness: Amount = 1.0  # q
    local_steps: Steps = 1  # of SGD
    batch_size: BatchSize = None  # of these; None: all the client's data

    solves: ClassVar[tuple[type, ...]] = (SingleLevel,)

    def init(self, fed: Fed, x: tree.Tree, y: tuple[()], key: Array) -> Point:
        return Point(x)

    def round(self, fed: Fed, state: Point, key: Array) -> Point:
        """Local steps, weighted by the losses before them."""
        x, q = state.x, self.fairness

        def local(c: Client, k: Array) -> tuple[tree.Tree, Array]:
            count, order = jax.random.split(k)
            loss = c.f(x, (), c.upper(order)) + 1e-10
            steps = c.steps(self.local_steps, count, self.batch_size, "upper")
            gradient = lambda z, v: c.f_x(z, (), c.upper(order, self.batch_size, v))
            w = tree.scale(1 / self.step, tree.sub(x, sgd(c, gradient, x, self.step, steps)))
            curvature = q * loss ** (q - 1) * tree.dot(w, w) + loss**q / self.step
            return tree.scale(loss**q, w), curvature

        delta, h = fed.mean(fed.map(local, key), name="delta, h", bookkeeping=(None, Bookkeeping("h")))
        return Point(fed.problem.project_upper(tree.step(x, 1 / h, delta)))
