"""FedNest and its variants, after Tarzanagh, Li, Thrampoulidis and Oymak, ICML 2022."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array

from rookery.base import tree
from rookery.data.source import Count
from rookery.language.fed import AtLeastOne, BatchSize, Bookkeeping, Client, Fed, Optimizer, PerClient, Step, Steps
from rookery.parts import features, hypergradient, inverse_hessian
from rookery.parts.local import sgd, svrg
from rookery.problems.problems import Bilevel, Compositional, Minimax

_POWER_ITERATIONS, _LOCAL_POWER_ITERATIONS = 10, 5
_PROBE = Bookkeeping("a power iteration for 1/ℓ")


class State(NamedTuple):
    """The two variables; and, where ℓ is estimated, the power iteration's vector, whose norm is the estimate."""

    x: tree.Tree
    y: tree.Tree
    probe: tree.Tree = None


@dataclass(frozen=True)
class _Nest:
    """What the family shares: the hyperparameters, and Alg. 1 with an inner and an outer optimizer left open."""

    upper_step: Step = 0.01  # α
    lower_step: Step = 0.01  # β
    lower_rounds: AtLeastOne = 1  # T
    lower_local_steps: Steps = 1  # τ_i of the inner optimizer
    upper_local_steps: Steps = 1  # τ_i of the outer optimizer
    neumann: inverse_hessian.Method = "sum"
    neumann_terms: AtLeastOne = 5  # N
    hessian_step: Step | Literal["auto"] = "auto"  # 1/ℓ_{g,1}
    batch_size: BatchSize = None  # of ξ and ζ; None: all the client's data
    anchor_batch: BatchSize = None  # of ζ_i in the anchor q_i; None: all the client's data
    resample: bool = False  # a fresh cohort for every exchange of FedIHGP
    scale_steps: bool = False  # α_i = α/τ_i and β_i = β/τ_i, as in the theory
    lower_optimizer: Optimizer = None  # of optax, for the local steps on y in the place of β; None: plain steps
    upper_optimizer: Optimizer = None  # the same on x in the place of α

    replaces: ClassVar = {"lower_optimizer": "lower_step", "upper_optimizer": "upper_step"}
    solves: ClassVar[tuple[type, ...]] = (Bilevel, Minimax, Compositional)

    def init(self, fed: Fed, x: tree.Tree, y: tree.Tree, key: Array) -> State:
        """The start; with hessian_step="auto", after a first estimate of ℓ."""
        if self.hessian_step != "auto" or not isinstance(fed.problem, Bilevel):
            return State(x, y)
        k0, k1 = jax.random.split(key)
        part = lambda v: fed.map(lambda c, k: c.g_yy(x, y, c.lower(k), v), k0)
        product = lambda v, _: fed.mean(part(v), name="Hv", bookkeeping=_PROBE)
        return State(x, y, inverse_hessian.power_iteration(fed.loop, product, y, _POWER_ITERATIONS, k1))


@dataclass(frozen=True)
class FedNest(_Nest):
    """Federated alternating SVRG with a global hypergradient.

    Solves bilevel problems; minimax (no implicit part) and compositional ones (an identity Hessian) by the same code.

    Round (Alg. 1): T times y ← FedInn(x, y), Alg. 4; then x ← FedOut(x, y), Alg. 2, whose p comes from FedIHGP, Alg. 3.

    Departures:
        the anchor q_i of Alg. 4 line 4 is the full local gradient unless `anchor_batch` is given (the paper's is
        stochastic; the authors' code is full);
        clients send ∇²_y g_i·p and the server forms p − (1/ℓ)·mean (Alg. 3 line 13 does it on the client: the same);
        local steps go through a client's samples without replacement, unless `Clients(replace=True)`;
        `neumann="sum"`, the default, is the deterministic series with N + 1 terms; "random" is Alg. 3; "cg" is ours;
        FedIHGP uses the round's cohort unless `resample=True` (Alg. 3 line 10; Lemma 2.2 needs it);
        `hessian_step="auto"`, the default, takes ℓ as twice the estimate of a power iteration: 10 of its steps at the
        start (exchanges of round 0) and one in every round, which rides with x in its exchange; a term of the series
        that grows all the same is cut back (`parts/inverse_hessian.py`).

    Exchanges a round: bilevel 2T + N + 3 (N' for N if random), minimax 2T + 2, compositional 2T + 3.

    Arguments: see the fields, each with the paper's symbol. `lower_local_steps` and `upper_local_steps` are an int, a
    range (low, high) drawn for each client and round, `Epochs(k)`, or an array with an entry for each client.
    `lower_optimizer` and `upper_optimizer`, of optax, take the local steps in the place of β and α: they
    are given the direction of the step (Alg. 4 or 6 and Alg. 2 or 5) as the gradient, and every client starts them
    afresh for every run of local steps.

    Example:
        >>> import rookery as rk
        >>> task = rk.tasks.quadratic(clients=4, seed=0)
        >>> method = rk.FedNest(upper_step=0.1, lower_step=0.2, lower_rounds=5, neumann_terms=30, hessian_step=0.2)
        >>> run = rk.solve(task.problem, task.clients, method, task.init, rounds=200, every=200, evaluate=task.evaluate)
        >>> bool(run.history["distance"].iloc[-1] < 1e-3)
        True

    Reference: Tarzanagh et al., FedNest: Federated Bilevel, Minimax, and Compositional Optimization, ICML 2022.
    """

    def round(self, fed: Fed, state: State, key: Array) -> State:
        """Alg. 1, lines 4–9."""
        inner, outer = jax.random.split(key)
        seen = features.seen(fed, state.x, key)
        y = _repeat(fed, self.lower_rounds, lambda y, k: fed_inn(self, fed, state.x, y, seen, k), state.y, inner)
        return State(*fed_out(self, fed, state, y, seen, outer))


@dataclass(frozen=True)
class LFedNest(_Nest):
    """Light FedNest: local SGD at both levels, the hypergradient computed by each client alone.

    Round (Alg. 1 with Alg. 6 and 5): T times y ← LFedInn(x, y); then x ← LFedOut(x, y).

    Departures: in Alg. 5, ∇_x f_i(y…) is read as ∇_y f_i(x_{i,ν}, y), and the compositional y_{i,ν} as the y of the
    broadcast (typos); `neumann` as in `FedNest`, but on the client's own Hessian; `hessian_step` too, but "auto" takes
    the larger of the mean Hessian's estimate and the client's own, from 5 power iterations on the client.

    Exchanges a round: T + 1. `anchor_batch` and `resample` are not used.

    Reference: Tarzanagh et al. 2022, Appendix A.
    """

    def round(self, fed: Fed, state: State, key: Array) -> State:
        """Alg. 1 with the light optimizers."""
        inner, outer = jax.random.split(key)
        seen = features.seen(fed, state.x, key, _draws(self))
        y = _repeat(fed, self.lower_rounds, lambda y, k: lfed_inn(self, fed, state.x, y, seen, k), state.y, inner)
        return State(*lfed_out(self, fed, state, y, seen, outer))


@dataclass(frozen=True)
class FedNestSGD(_Nest):
    """FedNest with plain local SGD at the lower level: FedOut (Alg. 2) over LFedInn (Alg. 6).

    Departures: as in `FedNest`. Exchanges a round: bilevel T + N + 3, minimax T + 2, compositional T + 3.

    Reference: Tarzanagh et al. 2022, Table 2.
    """

    def round(self, fed: Fed, state: State, key: Array) -> State:
        """Alg. 1 with the light inner optimizer."""
        inner, outer = jax.random.split(key)
        seen = features.seen(fed, state.x, key)
        y = _repeat(fed, self.lower_rounds, lambda y, k: lfed_inn(self, fed, state.x, y, seen, k), state.y, inner)
        return State(*fed_out(self, fed, state, y, seen, outer))


@dataclass(frozen=True)
class LFedNestSVRG(_Nest):
    """Light FedNest with SVRG at the lower level: LFedOut (Alg. 5) over FedInn (Alg. 4).

    Departures: as in `LFedNest`, and the anchor as in `FedNest`. Exchanges a round: 2T + 1.

    Reference: Tarzanagh et al. 2022, Table 2.
    """

    def round(self, fed: Fed, state: State, key: Array) -> State:
        """Alg. 1 with the light outer optimizer."""
        inner, outer = jax.random.split(key)
        seen = features.seen(fed, state.x, key)
        y = _repeat(fed, self.lower_rounds, lambda y, k: fed_inn(self, fed, state.x, y, seen, k), state.y, inner)
        return State(*lfed_out(self, fed, state, y, seen, outer))


@dataclass(frozen=True)
class LFedNestNonAlt(_Nest):
    """Light FedNest without alternation: each client runs the whole nested loop alone, [x_i, y_i] is averaged once.

    Departures: as in `LFedNest`. Exchanges a round: 1.

    Reference: Tarzanagh et al. 2022, Appendix H.1.
    """

    def round(self, fed: Fed, state: State, key: Array) -> State:
        """Both levels on the client."""

        def nested(c: Client, k: Array) -> tuple[tree.Tree, tree.Tree, tree.Tree]:
            inner, outer = jax.random.split(k)
            seen = c.seen(state.x, _draws(self))
            local = lambda t, y: local_inner(self, c, state.x, y, seen, jax.random.fold_in(inner, t))
            y = c.loop(self.lower_rounds, local, state.y)
            return *local_outer(self, c, state, y, seen, outer), y

        around, marks = (state.x, None, state.y), (None, _PROBE, None)
        x, probe, y = fed.mean(fed.map(nested, key), name="x, y", around=around, bookkeeping=marks)
        return State(fed.problem.project_upper(x), y, probe)


# The optimizers of the two levels.


def fed_inn(h: _Nest, fed: Fed, x: tree.Tree, y: tree.Tree, seen: PerClient | None, key: Array) -> tree.Tree:
    """FedInn (Alg. 4): SVRG on y. Two exchanges."""
    k1, k2 = jax.random.split(key)
    anchor = lambda c, k, z: c.g_y(x, y, c.lower(k, h.anchor_batch, seen=z))  # line 4
    q = fed.mean(fed.map(anchor, k1, seen), name="q")  # line 6

    def local(c: Client, k: Array, z: Any) -> tree.Tree:  # lines 7–12
        count, order = jax.random.split(k)
        steps = c.steps(h.lower_local_steps, count, h.batch_size, "lower")
        gradient = lambda y, v: c.g_y(x, y, c.lower(order, h.batch_size, v, seen=z))
        return svrg(c, gradient, y, q, *_lower_steps(h, steps))

    return fed.mean(fed.map(local, k2, seen), name="y", around=y)  # line 13


def lfed_inn(h: _Nest, fed: Fed, x: tree.Tree, y: tree.Tree, seen: PerClient | None, key: Array) -> tree.Tree:
    """LFedInn (Alg. 6): local SGD on y. One exchange."""
    return fed.mean(fed.map(lambda c, k, z: local_inner(h, c, x, y, z, k), key, seen), name="y", around=y)


def local_inner(h: _Nest, c: Client, x: tree.Tree, y: tree.Tree, seen: Any, key: Array) -> tree.Tree:
    """Alg. 6, lines 3–6, on one client."""
    count, order = jax.random.split(key)
    steps = c.steps(h.lower_local_steps, count, h.batch_size, "lower")
    gradient = lambda y, v: c.g_y(x, y, c.lower(order, h.batch_size, v, seen=seen))
    return sgd(c, gradient, y, *_lower_steps(h, steps))


def fed_out(
    h: _Nest, fed: Fed, state: State, y: tree.Tree, seen: PerClient | None, key: Array
) -> tuple[tree.Tree, tree.Tree, tree.Tree]:
    """FedOut (Alg. 2): SVRG on x, where only the direct part of the hypergradient is corrected locally."""
    k0, k1, k2 = jax.random.split(key, 3)
    x = state.x
    p = fed_ihgp(h, fed, x, y, seen, _hessian_step(h, state), k0)  # line 3

    def local_part(c: Client, k: Array) -> tree.Tree:  # lines 5–6
        ku, kl = jax.random.split(k)
        direct = c.f_x(x, y, c.upper(ku, h.batch_size))
        return direct if p is None else tree.sub(direct, c.g_xy(x, y, c.lower(kl, h.batch_size), p))

    anchor = fed.mean(fed.map(local_part, k1), name="h")  # line 8

    def local(c: Client, k: Array, z: Any) -> tuple[tree.Tree, tree.Tree]:  # lines 9–14
        count, order = jax.random.split(k)
        steps = c.steps(h.upper_local_steps, count, h.batch_size, "upper")
        gradient = lambda x, v: c.f_x(x, y, c.upper(order, h.batch_size, v))
        x_i = svrg(c, gradient, x, anchor, *_upper_steps(h, steps))
        return x_i, _probed(c, state.probe, x, y, z, k)

    x, probe = fed.mean(fed.map(local, k2, seen), name="x", around=(x, None), bookkeeping=(None, _PROBE))  # line 15
    return fed.problem.project_upper(x), y, probe


def fed_ihgp(
    h: _Nest, fed: Fed, x: tree.Tree, y: tree.Tree, seen: PerClient | None, hessian_step: Any, key: Array
) -> tree.Tree | None:
    """FedIHGP (Alg. 3): p ≈ [mean ∇²_y g_i]⁻¹ mean ∇_y f_i. None where there is no implicit part."""
    if isinstance(fed.problem, Minimax):
        return None
    k0, k1, k2, k3 = jax.random.split(key, 4)
    cohort, own = (fed.resample(k3), None) if h.resample else (fed, seen)
    f_y = cohort.mean(cohort.map(lambda c, k: c.f_y(x, y, c.upper(k, h.batch_size)), k0), name="p")  # lines 2–6
    if isinstance(fed.problem, Compositional):
        return f_y

    def product(p: tree.Tree, n: Any) -> tree.Tree:  # lines 11–15
        cohort = fed.resample(jax.random.fold_in(k3, n + 1)) if h.resample else fed
        hessian = lambda c, k, z: c.g_yy(x, y, c.lower(k, h.batch_size, seen=z), p)
        return cohort.mean(cohort.map(hessian, jax.random.fold_in(k1, n), own), name="Hp")

    return inverse_hessian.solve(h.neumann, fed.loop, product, f_y, hessian_step, h.neumann_terms, k2, _estimated(h))


def lfed_out(
    h: _Nest, fed: Fed, state: State, y: tree.Tree, seen: PerClient | None, key: Array
) -> tuple[tree.Tree, tree.Tree, tree.Tree]:
    """LFedOut (Alg. 5): local SGD on x. One exchange."""
    local = lambda c, k, z: local_outer(h, c, state, y, z, k)
    x, probe = fed.mean(fed.map(local, key, seen), name="x", around=(state.x, None), bookkeeping=(None, _PROBE))
    return fed.problem.project_upper(x), y, probe


def local_outer(h: _Nest, c: Client, state: State, y: tree.Tree, seen: Any, key: Array) -> tuple[tree.Tree, tree.Tree]:
    """Alg. 5, lines 4–10, on one client; and the client's part of the probe."""
    count, noise = jax.random.split(key)
    steps = c.steps(h.upper_local_steps, count, h.batch_size, "upper")
    hessian_step, probe = h.hessian_step, None
    if state.probe is not None:
        probe = _probed(c, state.probe, state.x, y, seen, key)
        again = lambda _, v: _probed(c, v, state.x, y, seen, key)
        own = c.loop(_LOCAL_POWER_ITERATIONS - 1, again, probe)
        hessian_step = 1 / (2 * jnp.maximum(tree.norm(state.probe), tree.norm(own)))
    gradient = lambda x, v: _local_hypergradient(h, c, x, y, hessian_step, jax.random.fold_in(noise, v))
    return sgd(c, gradient, state.x, *_upper_steps(h, steps)), probe


def _local_hypergradient(h: _Nest, c: Client, x: tree.Tree, y: tree.Tree, hessian_step: Any, key: Array) -> tree.Tree:
    """Alg. 5, lines 5–8: the client's own hypergradient, one ξ for both parts of ∇f."""
    method = {"method": h.neumann, "terms": h.neumann_terms, "step": hessian_step, "guard": _estimated(h)}
    return hypergradient.local(c, x, y, key, **method, upper_batch=h.batch_size, lower_batch=h.batch_size)


# Small things that several of them need.


def _repeat(fed: Fed, times: int, once: Callable[[Any, Array], Any], y: tree.Tree, key: Array) -> tree.Tree:
    """Alg. 1, lines 5–7."""
    return fed.loop(times, lambda t, y: once(y, jax.random.fold_in(key, t)), y)


def _draws(h: _Nest) -> int | None:
    """How many samples the lower level draws in a round, where that is known."""
    if isinstance(h.lower_local_steps, int) and h.batch_size is not None:
        return h.lower_rounds * h.lower_local_steps * h.batch_size
    return None


def _lower_steps(h: _Nest, steps: Count) -> tuple[Any, Count, Any]:
    """Of the local steps on y: their size, how many, and by which optimizer (whose updates then have the size 1)."""
    return _local_step(h, h.lower_step if h.lower_optimizer is None else 1.0, steps), steps, h.lower_optimizer


def _upper_steps(h: _Nest, steps: Count) -> tuple[Any, Count, Any]:
    """The same of those on x."""
    return _local_step(h, h.upper_step if h.upper_optimizer is None else 1.0, steps), steps, h.upper_optimizer


def _local_step(h: _Nest, step: Any, steps: Count) -> Any:
    return step / steps if h.scale_steps else step


def _estimated(h: _Nest) -> bool:
    return isinstance(h.hessian_step, str)


def _hessian_step(h: _Nest, state: State) -> Any:
    """1/ℓ: as given, or from the power iteration, with a factor 2 of headroom."""
    return h.hessian_step if state.probe is None else 1 / (2 * tree.norm(state.probe))


def _probed(c: Client, probe: tree.Tree, x: tree.Tree, y: tree.Tree, seen: Any, key: Array) -> tree.Tree:
    """The client's part of one more power iteration, if ℓ is estimated at all."""
    return None if probe is None else c.g_yy(x, y, c.lower(key, seen=seen), inverse_hessian.unit(probe))
