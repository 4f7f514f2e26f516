"""Federated learning on adaptively weighted nodes by bilevel optimization (anonymous, under review).

Local-SVRG (Gorbunov et al. 2021) minimises a finite sum over weighted nodes. Two calls of it give a hypergradient,
along which the weights take a proximal or an accelerated step.
"""

from dataclasses import dataclass
from typing import Any, ClassVar, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from rookery.base import tree
from rookery.data.rows import Count
from rookery.language.fed import AtLeastOne, BatchSize, Client, Fed, PerClient, Positive, Share, Step
from rookery.parts import local_svrg, output
from rookery.parts.local_svrg import Average, FiniteSum, Pace, Reference
from rookery.parts.projection import capped_simplex
from rookery.problems.problems import SingleLevel, WeightedNodes


def _local_svrg(
    fed: Fed, f: FiniteSum, w: Array, x: tree.Tree, key: Array, pace: Pace, sync_every: int, steps: int, name: str
) -> tree.Tree:
    """Algorithm 1, LOCAL-SVRG({f_k}, w, x, γ, τ, q, T), in ⌈T/τ⌉ exchanges."""

    def window(first: Count, count: int, carry: tuple[Any, PerClient]) -> tuple[Any, PerClient]:
        z, references = carry
        local = lambda c, k, reference: local_svrg.steps(c, f, z, reference, k, pace, count, first, first)
        both = fed.map(local, key, references)
        iterates = fed.map(lambda c, k, both: both[0], key, both)
        references = fed.map(lambda c, k, both: both[1], key, both)
        return fed.mean(iterates, name=name, weights=w, around=z), references

    z = x, None if pace.decay is None else x
    carry = z, fed.map(lambda c, k: local_svrg.start(x), key)
    carry = fed.loop(steps // sync_every, lambda i, carry: window(i * sync_every, sync_every, carry), carry)
    if steps % sync_every:
        carry = window(steps - steps % sync_every, steps % sync_every, carry)
    (last, average), _ = carry
    return last if average is None else average


class SingleLevelState(NamedTuple):
    """The output of Local-SVRG; with average="theory", also the last iterate and the number of steps."""

    x: tree.Tree
    y: tuple[()] = ()
    last: Any = None
    done: Any = None


@dataclass(frozen=True)
class LocalSVRG:
    """Local SVRG steps, with a full local gradient recomputed at random times; then the weighted mean.

    Local-SVRG solves single-level problems, min over x of Σ w_k f_k(x), with w the clients' weights.

    Each round takes τ steps (Alg. 1, lines 3–14) x_k ← x_k − γ(∇f_{k,B}(x_k) − ∇f_{k,B}(r_k) + ∇f_k(r_k)). With
    probability q, r_k then becomes the x_k from before the step (line 7). After τ steps x ← Σ w_k x_k (line 9).
    ∇f_k(r_k), on all the data, is computed only when r_k has moved.

    Departures from the paper: minibatches instead of single samples, drawn without replacement within a round unless
    `Clients(replace=True)`. The paper returns the average of line 15 (`average="theory"`, where the nodes send
    the average of their own iterates in the same exchange), and its experiments return the last iterate
    (`average="last"`). With a cohort, the other clients keep their r_k. With `batch_size=None` the terms at r_k cancel
    and are left out.

    Exchanges per round: 1. Steps in all: rounds·τ.

    Reference: Gorbunov, Hanzely and Richtárik, Local SGD: Unified Theory and New Efficient Methods, AISTATS 2021;
    Algorithm 1 of Federated Learning on Adaptively Weighted Nodes by Bilevel Optimization.
    """

    step: Step = 0.01  # γ
    sync_every: AtLeastOne = 10  # τ
    refresh: Share = 0.02  # q
    batch_size: BatchSize = None  # |B|; None: all the client's data
    average: Average = "last"
    strong_convexity: Positive | None = None  # μ, for average="theory"

    solves: ClassVar[tuple[type, ...]] = (SingleLevel,)

    def init(self, fed: Fed, x: tree.Tree, y: tuple[()], key: Array) -> SingleLevelState:
        return SingleLevelState(x) if self.average == "last" else SingleLevelState(x, (), x, jnp.int32(0))

    def memory(self, x: tree.Tree, y: tuple[()]) -> Reference:
        """A client's memory: its reference point, at first x."""
        return local_svrg.start(x)

    def round(self, fed: Fed, state: SingleLevelState, key: Array) -> SingleLevelState:
        pace = local_svrg.pace(self.step, self.refresh, self.average, self.strong_convexity)
        losses = local_svrg.upper_loss(self.batch_size)
        averaged = state.last is not None
        z, done = ((state.last, state.x), state.done) if averaged else ((state.x, None), 0)

        def local(c: Client, k: Array, reference: Reference) -> tuple[Any, Reference]:
            return local_svrg.steps(c, losses, z, reference, k, pace, self.sync_every, 0, done)

        project = fed.problem.project_upper
        x, average = fed.mean(fed.map_state(local, key), name="x", around=z)
        if not averaged:
            return SingleLevelState(project(x))
        return SingleLevelState(project(average), (), project(x), done + self.sync_every)


@dataclass(frozen=True)
class _WeightedNodes:
    """The hyperparameters of both methods, and their hypergradient."""

    model_step: Step = 0.01  # γ of (1), for θ
    linear_step: Step = 0.01  # γ of (15), for h
    weight_step: Step = 0.01  # η
    steps: AtLeastOne = 100  # T_s
    sync_every: AtLeastOne = 10  # τ
    refresh: Share = 0.02  # q
    batch_size: BatchSize = None  # |B|; None: all the client's data
    average: Average = "last"  # the output of Local-SVRG
    strong_convexity: Positive | None = None  # μ, for average="theory"

    solves: ClassVar[tuple[type, ...]] = (WeightedNodes,)
    needs: ClassVar[tuple[str, ...]] = ("all clients",)

    def hypergradient(self, fed: Fed, w: Array, theta: tree.Tree, key: Array) -> tuple[tree.Tree, Float[Array, " k"]]:
        """Approximate θ(w) and ∇F(w): (14)–(15), lines 4–10 of Algorithm 3 and 6–12 of Algorithm 2."""
        k1, k2, k3, k4 = jax.random.split(key, 4)
        draw = None if self.batch_size is None else lambda c, k, t: c.lower(k, self.batch_size, t)
        numbers = (self.refresh, self.average, self.strong_convexity)

        losses = FiniteSum(
            whole=lambda c, y, k: c.g_y(w, y, c.lower(k)),
            difference=lambda c, y, r, batch: tree.sub(c.g_y(w, y, batch), c.g_y(w, r, batch)),
            draw=draw,
        )
        pace = local_svrg.pace(self.model_step, *numbers)
        y = _local_svrg(fed, losses, w, theta, k1, pace, self.sync_every, self.steps, "theta")

        at_center = fed.center(lambda c, k: c.f_y(w, y, c.upper(k)), k2, name="center")  # ∇L_0(θ)
        system = FiniteSum(  # of ½hᵀ∇²L_k(θ)h − hᵀ∇L_0(θ), whose gradient is linear in h
            whole=lambda c, h, k: tree.sub(c.g_yy(w, y, c.lower(k), h), at_center),
            difference=lambda c, h, r, batch: c.g_yy(w, y, batch, tree.sub(h, r)),
            draw=draw,
        )
        pace_h = local_svrg.pace(self.linear_step, *numbers)
        h = _local_svrg(fed, system, w, at_center, k3, pace_h, self.sync_every, self.steps, "h")

        slopes = fed.map(lambda c, k: tree.dot(c.g_y(w, y, c.lower(k)), h), k4)
        slope, there = fed.gather(slopes, name="slopes", replied=True)
        slope = jnp.where(there, slope, jnp.mean(slope, where=there))  # missing slopes are replaced by the mean
        return y, -slope.astype(w.dtype)


class ProxState(NamedTuple):
    """The output, weights x = w and model y = θ; and the last iterate, if the output is a random one."""

    x: Float[Array, " k"]
    y: tree.Tree
    last_weights: Any = None  # with output="random"
    last_model: Any = None
    done: Any = None  # rounds

    @property
    def weights(self) -> Float[Array, " k"]:
        """w."""
        return self.x


@dataclass(frozen=True)
class WeightedNodesProx(_WeightedNodes):
    """Proximal gradient steps on the nodes' weights, with a hypergradient from two calls of Local-SVRG.

    The method solves weighted-nodes problems, min over w in the capped simplex of L_0(θ(w)), θ(w) = argmin Σ w_k
    L_k(θ).

    Round s (Alg. 3) is
        θ ← LOCAL-SVRG(L_k, w, θ) from the last θ (lines 4–5), and ∇L_0(θ) at the centre (line 6);
        h ← LOCAL-SVRG(½hᵀ∇²L_k(θ)h − hᵀ∇L_0(θ), w, ∇L_0(θ)) (lines 7–8), both with T_s steps;
        ∂_k F = −⟨∇L_k(θ), h⟩ (lines 9–10), and w ← Proj(w − η∇F) (line 11).
    The returned model belongs to the weights before this step.

    Departures from the paper: a node sends the number ⟨∇L_k(θ), h⟩, not the vector ∇L_k(θ) (line 9); these replies are
    not aggregated. There are two step sizes γ, as in the experiments: `model_step` for θ and `linear_step` for h. T_s
    is the same in all rounds. `output="last"` returns the last weights, as in the experiments, and "random" those of
    line 13: one of w^(0), …, w^(S−1), each equally likely, with its θ. Local-SVRG is as in `LocalSVRG`.

    Exchanges per round: 2⌈T_s/τ⌉ + 1, and 1 more if a client holds the centre's data. All clients take part.

    Reference: Federated Learning on Adaptively Weighted Nodes by Bilevel Optimization, Algorithms 1 and 3.
    """

    output: Literal["last", "random"] = "last"

    def init(self, fed: Fed, x: Array, y: tree.Tree, key: Array) -> ProxState:
        return ProxState(x, y) if self.output == "last" else ProxState(x, y, x, y, jnp.int32(0))

    def round(self, fed: Fed, state: ProxState, key: Array) -> ProxState:
        inner, pick = jax.random.split(key)
        last = self.output == "last"
        w, before = (state.x, state.y) if last else (state.last_weights, state.last_model)
        theta, gradient = self.hypergradient(fed, w, before, inner)
        w_new = capped_simplex(tree.step(w, self.weight_step, gradient), fed.problem.cap)
        if last:
            return ProxState(w_new, theta)
        x, y = output.one_of(state.done + 1, (w, theta), (state.x, state.y), pick)
        return ProxState(x, y, w_new, theta, state.done + 1)


class ABAState(NamedTuple):
    """The output x = w_ag and its model y = θ, the weights w, and the number of rounds done."""

    x: Float[Array, " k"]
    y: tree.Tree
    last_weights: Float[Array, " k"]
    done: Any

    @property
    def weights(self) -> Float[Array, " k"]:
        """w_ag."""
        return self.x


@dataclass(frozen=True)
class WeightedNodesABA(_WeightedNodes):
    """Accelerated steps on the nodes' weights (ABA of Ghadimi and Wang 2018), for convex F.

    The method solves weighted-nodes problems, like `WeightedNodesProx`.

    Round s = 0, 1, … (Alg. 2) is w_md = 2/(s+2)·w + s/(s+2)·w_ag (line 4); ∇F(w_md) as in `WeightedNodesProx` (lines
    5–12); w ← Proj(w − η(s+1)/4·∇F) (line 13); w_ag ← Proj(w_md − η∇F) (line 14). The method returns w_ag, with the
    model of w_md.

    Departures from the paper: as in `WeightedNodesProx`.

    Exchanges per round: 2⌈T_s/τ⌉ + 1, and 1 more if a client holds the centre's data. All clients take part.

    Reference: Federated Learning on Adaptively Weighted Nodes by Bilevel Optimization, Algorithms 1 and 2.
    """

    def init(self, fed: Fed, x: Array, y: tree.Tree, key: Array) -> ABAState:
        """Start at w_ag = w (line 2)."""
        return ABAState(x, y, x, jnp.int32(0))

    def round(self, fed: Fed, state: ABAState, key: Array) -> ABAState:
        s, cap = state.done.astype(state.x.dtype), fed.problem.cap
        share = 2 / (s + 2)
        w_md = share * state.last_weights + (1 - share) * state.x
        theta, gradient = self.hypergradient(fed, w_md, state.y, key)
        w = capped_simplex(tree.step(state.last_weights, self.weight_step * (s + 1) / 4, gradient), cap)
        w_ag = capped_simplex(tree.step(w_md, self.weight_step, gradient), cap)
        return ABAState(w_ag, theta, w, state.done + 1)
