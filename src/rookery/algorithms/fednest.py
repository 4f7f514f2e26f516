"""FedNest and its variants, after Tarzanagh, Li, Thrampoulidis and Oymak, ICML 2022."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array

from rookery.base import tree
from rookery.language.fed import AtLeastOne, BatchSize, Bookkeeping, Client, Fed, Optimizer, PerClient, Step, Steps
from rookery.parts import features, hypergradient, inverse_hessian
from rookery.parts.local import descend, sgd
from rookery.problems.problems import Bilevel, Compositional, Minimax

_POWER_ITERATIONS, _LOCAL_POWER_ITERATIONS = 10, 5
_PROBE = Bookkeeping("a power iteration for 1/ℓ")


class State(NamedTuple):
    """The two variables; and, if ℓ is estimated, the vector of the power iteration, whose norm is the estimate."""

    x: tree.Tree
    y: tree.Tree
    probe: tree.Tree = None


@dataclass(frozen=True)
class _Nest:
    """The hyperparameters of the family, and the estimate of ℓ before the first round."""

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
    lower_optimizer: Optimizer = None  # of optax, for the local steps on y instead of β; None: plain steps
    upper_optimizer: Optimizer = None  # the same on x instead of α

    replaces: ClassVar = {"lower_optimizer": "lower_step", "upper_optimizer": "upper_step"}
    solves: ClassVar[tuple[type, ...]] = (Bilevel, Minimax, Compositional)

    def init(self, fed: Fed, x: tree.Tree, y: tree.Tree, key: Array) -> State:
        """Start with a first estimate of ℓ if hessian_step="auto"."""
        if self.hessian_step != "auto" or not isinstance(fed.problem, Bilevel):
            return State(x, y)
        k0, k1 = jax.random.split(key)
        part = lambda v: fed.map(lambda c, k: c.g_yy(x, y, c.lower(k), v), k0)
        product = lambda v, _: fed.mean(part(v), name="Hv", bookkeeping=_PROBE)
        return State(x, y, inverse_hessian.power_iteration(fed.loop, product, y, _POWER_ITERATIONS, k1))


@dataclass(frozen=True)
class FedNest(_Nest):
    """Federated alternating SVRG with a global hypergradient.

    FedNest solves bilevel problems. The same code solves minimax problems, which have no implicit part, and
    compositional ones, whose Hessian is the identity.

    Each round (Alg. 1) runs y ← FedInn(x, y), Alg. 4, T times; then x ← FedOut(x, y), Alg. 2, whose p comes from
    FedIHGP, Alg. 3.

    Departures from the paper:
        the anchor q_i of Alg. 4 line 4 is the full local gradient unless `anchor_batch` is given (the paper's is
        stochastic, the authors' code has the full one);
        clients send ∇²_y g_i·p and the server forms p − (1/ℓ)·mean (Alg. 3 line 13 does it on the client, with the same
        result);
        local steps draw a client's samples without replacement unless `Clients(replace=True)`;
        `neumann="sum"`, the default, is the deterministic series with N + 1 terms; "random" is Alg. 3; "cg" is ours;
        FedIHGP uses the round's cohort unless `resample=True` (Alg. 3 line 10, which Lemma 2.2 requires);
        `hessian_step="auto"`, the default, takes ℓ as twice the estimate of a power iteration. The power iteration
        takes 10 steps at the start (exchanges of round 0) and one in every round, as part of the exchange of x. A term
        of the series that grows nevertheless is cut back (`parts/inverse_hessian.py`).

    Exchanges per round: bilevel 2T + N + 3 (N' in place of N if random), minimax 2T + 2, compositional 2T + 3.

    Arguments: see the fields, each with the paper's symbol. `lower_local_steps` and `upper_local_steps` are an int, a
    range (low, high) drawn for each client and round, `Epochs(k)`, or an array with an entry for each client. The optax
    optimizers `lower_optimizer` and `upper_optimizer` take the local steps instead of β and α. They receive the
    direction of the step (Alg. 4 or 6, and Alg. 2 or 5) as the gradient, and start afresh on every client for every run
    of local steps.

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
        return _alternate(self, fed, state, key, fed_inn, fed_out)


@dataclass(frozen=True)
class LFedNest(_Nest):
    """Light FedNest: local SGD at both levels, with each client's own hypergradient.

    LFedNest runs on bilevel, minimax and compositional problems. Each round (Alg. 1 with Alg. 6 and 5) runs
    y ← LFedInn(x, y) T times, then x ← LFedOut(x, y).

    Departures from the paper: in Alg. 5, ∇_x f_i(y…) is read as ∇_y f_i(x_{i,ν}, y), and the compositional y_{i,ν} as
    the broadcast y (typos); `neumann` is as in `FedNest`, but with the client's own Hessian; so is `hessian_step`,
    where "auto" takes the larger of the estimates for the mean Hessian and for the client's own, from 5 power
    iterations on the client.

    Exchanges per round: T + 1. `anchor_batch` and `resample` are not used.

    Reference: Tarzanagh et al. 2022, Appendix A.
    """

    def round(self, fed: Fed, state: State, key: Array) -> State:
        return _alternate(self, fed, state, key, lfed_inn, lfed_out, _samples(self))


@dataclass(frozen=True)
class FedNestSGD(_Nest):
    """FedNest with plain local SGD at the lower level: FedOut (Alg. 2) over LFedInn (Alg. 6).

    FedNestSGD solves the problems of `FedNest`.

    Departures from the paper: as in `FedNest`.

    Exchanges per round: bilevel T + N + 3, minimax T + 2, compositional T + 3.

    Reference: Tarzanagh et al. 2022, Table 2.
    """

    def round(self, fed: Fed, state: State, key: Array) -> State:
        return _alternate(self, fed, state, key, lfed_inn, fed_out)


@dataclass(frozen=True)
class LFedNestSVRG(_Nest):
    """Light FedNest with SVRG at the lower level: LFedOut (Alg. 5) over FedInn (Alg. 4).

    LFedNestSVRG runs on the problems of `LFedNest`.

    Departures from the paper: as in `LFedNest`, and the anchor is as in `FedNest`.

    Exchanges per round: 2T + 1.

    Reference: Tarzanagh et al. 2022, Table 2.
    """

    def round(self, fed: Fed, state: State, key: Array) -> State:
        return _alternate(self, fed, state, key, fed_inn, lfed_out)


@dataclass(frozen=True)
class LFedNestNonAlt(_Nest):
    """Light FedNest without alternation: each client runs the whole nested loop, then [x_i, y_i] is averaged once.

    LFedNestNonAlt runs on the problems of `LFedNest`.

    Departures from the paper: as in `LFedNest`.

    Exchanges per round: 1.

    Reference: Tarzanagh et al. 2022, Appendix H.1.
    """

    def round(self, fed: Fed, state: State, key: Array) -> State:
        def nested(c: Client, k: Array) -> tuple[tree.Tree, tree.Tree, tree.Tree]:
            inner, outer = jax.random.split(k)
            seen = c.seen(state.x, _samples(self))
            local = lambda t, y: local_inner(self, c, state.x, y, seen, jax.random.fold_in(inner, t))
            y = c.loop(self.lower_rounds, local, state.y)
            return *local_outer(self, c, state, y, seen, outer), y

        around, marks = (state.x, None, state.y), (None, _PROBE, None)
        x, probe, y = fed.mean(fed.map(nested, key), name="x, y", around=around, bookkeeping=marks)
        return State(fed.problem.project_upper(x), y, probe)


def _alternate(
    h: _Nest, fed: Fed, state: State, key: Array, inner: Callable[..., Any], outer: Callable[..., Any],
    samples: int | None = None,
) -> State:  # fmt: skip
    """Alg. 1, lines 4–9, with an inner and an outer optimizer."""
    k1, k2 = jax.random.split(key)
    seen = features.seen(fed, state.x, key, samples)
    lower = lambda t, y: inner(h, fed, state.x, y, seen, jax.random.fold_in(k1, t))
    y = fed.loop(h.lower_rounds, lower, state.y)
    return State(*outer(h, fed, state, y, seen, k2))


# The optimizers of the two levels.


def fed_inn(h: _Nest, fed: Fed, x: tree.Tree, y: tree.Tree, seen: PerClient | None, key: Array) -> tree.Tree:
    """FedInn (Alg. 4): SVRG on y. Two exchanges."""
    k1, k2 = jax.random.split(key)
    anchor = lambda c, k, z: c.g_y(x, y, c.lower(k, h.anchor_batch, seen=z))  # line 4
    q = fed.mean(fed.map(anchor, k1, seen), name="q")  # line 6
    return fed.mean(fed.map(lambda c, k, z: local_inner(h, c, x, y, z, k, q), k2, seen), name="y", around=y)


def lfed_inn(h: _Nest, fed: Fed, x: tree.Tree, y: tree.Tree, seen: PerClient | None, key: Array) -> tree.Tree:
    """LFedInn (Alg. 6): local SGD on y. One exchange."""
    return fed.mean(fed.map(lambda c, k, z: local_inner(h, c, x, y, z, k), key, seen), name="y", around=y)


def local_inner(
    h: _Nest, c: Client, x: tree.Tree, y: tree.Tree, seen: Any, key: Array, anchor: tree.Tree = None
) -> tree.Tree:
    """The local steps on y: lines 3–6 of Alg. 6, or with an anchor lines 7–12 of Alg. 4."""
    steps = _local_steps(h, "lower")
    return descend(c, lambda y, batch: c.g_y(x, y, batch), y, key, anchor=anchor, seen=seen, **steps)


def fed_out(
    h: _Nest, fed: Fed, state: State, y: tree.Tree, seen: PerClient | None, key: Array
) -> tuple[tree.Tree, tree.Tree, tree.Tree]:
    """FedOut (Alg. 2): SVRG on x, in which only the direct part of the hypergradient is corrected locally."""
    k0, k1, k2 = jax.random.split(key, 3)
    x = state.x
    p = fed_ihgp(h, fed, x, y, seen, _hessian_step(h, state), k0)  # line 3
    local_part = lambda c, k: hypergradient.given_vector(c, x, y, p, k, h.batch_size)  # lines 5–6
    anchor = fed.mean(fed.map(local_part, k1), name="h")  # line 8

    def local(c: Client, k: Array, z: Any) -> tuple[tree.Tree, tree.Tree]:  # lines 9–14
        x_i = descend(c, lambda x, batch: c.f_x(x, y, batch), x, k, anchor=anchor, **_local_steps(h, "upper"))
        return x_i, _probed(c, state.probe, x, y, z, k)

    x, probe = fed.mean(fed.map(local, k2, seen), name="x", around=(x, None), bookkeeping=(None, _PROBE))  # line 15
    return fed.problem.project_upper(x), y, probe


def fed_ihgp(
    h: _Nest, fed: Fed, x: tree.Tree, y: tree.Tree, seen: PerClient | None, hessian_step: Any, key: Array
) -> tree.Tree | None:
    """FedIHGP (Alg. 3): p ≈ [mean ∇²_y g_i]⁻¹ mean ∇_y f_i; None if the hypergradient has no implicit part."""
    if isinstance(fed.problem, Minimax):
        return None
    k0, k1, k2, k3 = jax.random.split(key, 4)
    cohort, seen = (fed.resample(k3), None) if h.resample else (fed, seen)
    f_y = cohort.mean(cohort.map(lambda c, k: c.f_y(x, y, c.upper(k, h.batch_size)), k0), name="p")  # lines 2–6
    if isinstance(fed.problem, Compositional):
        return f_y

    def product(p: tree.Tree, n: Any) -> tree.Tree:  # lines 11–15
        cohort = fed.resample(jax.random.fold_in(k3, n + 1)) if h.resample else fed
        hessian = lambda c, k, z: c.g_yy(x, y, c.lower(k, h.batch_size, seen=z), p)
        return cohort.mean(cohort.map(hessian, jax.random.fold_in(k1, n), seen), name="Hp")

    guard = isinstance(h.hessian_step, str)
    return inverse_hessian.solve(h.neumann, fed.loop, product, f_y, hessian_step, h.neumann_terms, k2, guard)


def lfed_out(
    h: _Nest, fed: Fed, state: State, y: tree.Tree, seen: PerClient | None, key: Array
) -> tuple[tree.Tree, tree.Tree, tree.Tree]:
    """LFedOut (Alg. 5): local SGD on x. One exchange."""
    local = lambda c, k, z: local_outer(h, c, state, y, z, k)
    x, probe = fed.mean(fed.map(local, key, seen), name="x", around=(state.x, None), bookkeeping=(None, _PROBE))
    return fed.problem.project_upper(x), y, probe


def local_outer(h: _Nest, c: Client, state: State, y: tree.Tree, seen: Any, key: Array) -> tuple[tree.Tree, tree.Tree]:
    """Alg. 5, lines 4–10, on one client: its x, and its part of the probe."""
    count, noise = jax.random.split(key)
    steps = c.steps(h.upper_local_steps, count, h.batch_size, "upper")
    hessian_step, probe = h.hessian_step, None
    if state.probe is not None:
        probe = _probed(c, state.probe, state.x, y, seen, key)
        again = lambda _, v: _probed(c, v, state.x, y, seen, key)
        local_probe = c.loop(_LOCAL_POWER_ITERATIONS - 1, again, probe)
        hessian_step = 1 / (2 * jnp.maximum(tree.norm(state.probe), tree.norm(local_probe)))
    series: dict[str, Any] = {"method": h.neumann, "terms": h.neumann_terms, "step": hessian_step}
    series |= {"guard": isinstance(h.hessian_step, str), "upper_batch": h.batch_size, "lower_batch": h.batch_size}

    def gradient(x: tree.Tree, v: Any) -> tree.Tree:  # lines 5–8
        return hypergradient.local_at(c, [(x, y)], jax.random.fold_in(noise, v), **series)[0]

    size = h.upper_step if h.upper_optimizer is None else 1.0
    return sgd(c, gradient, state.x, size / steps if h.scale_steps else size, steps, h.upper_optimizer), probe


def _local_steps(h: _Nest, level: Literal["lower", "upper"]) -> dict[str, Any]:
    """The arguments of `descend` for the local steps on y or x."""
    chosen = {name: getattr(h, f"{level}_{name}") for name in ("step", "local_steps", "optimizer")}
    return chosen | {"level": level, "batch_size": h.batch_size, "scale_steps": h.scale_steps}


def _samples(h: _Nest) -> int | None:
    """The number of samples that the lower level draws in a round; None if it is not known in advance."""
    if isinstance(h.lower_local_steps, int) and h.batch_size is not None:
        return h.lower_rounds * h.lower_local_steps * h.batch_size
    return None


def _hessian_step(h: _Nest, state: State) -> Any:
    """1/ℓ: as given, or from the power iteration with a safety factor of 2."""
    return h.hessian_step if state.probe is None else 1 / (2 * tree.norm(state.probe))


def _probed(c: Client, probe: tree.Tree, x: tree.Tree, y: tree.Tree, seen: Any, key: Array) -> tree.Tree:
    """The client's part of the next power iteration; None if ℓ is not estimated."""
    return None if probe is None else c.g_yy(x, y, c.lower(key, seen=seen), inverse_hessian.unit(probe))
