"""Ready-made objectives over a per-sample loss: distributionally robust, fair, and risk-averse.

Each function takes `loss(x, rows) -> (batch,)`, one number for each sample, and returns an `Objective`: the problem
for `rk.solve`, its exact value, and the weights p that it gives to the samples or groups.

The mean over all samples is the mean over clients of their means. For all samples to count the same, give the clients
weights in proportion to their sizes: `Clients(..., weights="size")`.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, PyTree

from rookery.base.arguments import check_positive, is_number
from rookery.base.placement import on_host
from rookery.data.clients import Clients
from rookery.data.rows import Rows
from rookery.problems.problems import Compositional, SingleLevel
from rookery.problems.risks import Losses, Risk, chi2_ball_risk, chi2_risk, cvar_risk, kl_risk, variance_risk

__all__ = [
    "Objective",
    "Risk",
    "chi2",
    "chi2_ball_risk",
    "chi2_risk",
    "cvar",
    "cvar_risk",
    "equal_opportunity",
    "group_shares",
    "kl",
    "kl_risk",
    "portfolio",
    "variance_risk",
    "worst_group",
]

SampleLoss = Callable[[Any, Rows], Losses]
Members = Callable[[Rows], Float[Array, "batch groups"]]
_NO_CAP = 20.0  # log of a cap that no weight reaches: m p_i ≤ m
_WINDOW = 60.0  # exponents this far from a fixed shift are exact: e^60·1e10 is finite in single precision


@dataclass(frozen=True)
class Objective:
    """A problem, its exact value and the weights that it implies.

    Attributes:
        problem: for `rk.solve`.
        start: start(model, level=0.0) -> the init for `rk.solve`. The variable x is the model itself or, if the
            objective also has a level, {"model": model, "level": level} with a level of the losses' size.
        value: value(x, rows) -> Φ on these samples, exactly. It depends on the model only: a level takes its best
            value.
        weights: weights(x, rows) -> the p that attain the worst case in Φ: one number for each sample, or for each
            named group.
    """

    problem: Compositional | SingleLevel
    start: Callable[..., Any]
    value: Callable[[Any, Rows], Float[Array, ""]]
    weights: Callable[[Any, Rows], Any]


def kl(loss: SampleLoss, penalty: float, cap: float | None = None, shift: float | None = None) -> Objective:
    """KL-regularised DRO: min over x, max over p of Σ p_i ℓ_i − λ Σ p_i log(m p_i), which is λ log mean exp(ℓ/λ).

    p_i ∝ exp(ℓ_i/λ): a small λ looks only at the largest loss, a large one at the mean.

    A mean of exp(ℓ/λ) over clients and minibatches overflows. The usual cure is to subtract the largest loss, but that
    is not a mean. Here the shift is a variable, x = {"model", "level"}, and with z = (ℓ − level)/λ we have

        h = level,   g = (u, v) = mean (exp(min(z, log cap)), (z − log cap)₊),   f(u, v) = 2λ log((1 + u)/2) + λ·cap·v.

    As a function of the level the objective falls where u > 1 and rises where u < 1, so its minimum is at u = 1. There
    the p_i = min(e^z_i, cap)/m sum to 1, and the value is the maximum over all p with p_i ≤ cap/m. If no p_i reaches
    the cap, that is λ log mean exp(ℓ/λ) exactly, and the level equals it. So minimisers and stationary points in the
    model are those of DRO. At another level the uncapped weights have the factor 2/(1 + u), and the slope in the level
    is between −cap and 1 (between −1 and 1 while no sample is at the cap): the level follows the losses at the step
    size of the model, which should be below 4λ. f is Lipschitz for u ≥ 0, linear in v, and no exponential exceeds the
    cap, however large a loss.

    Arguments:
        loss: per sample.
        penalty: λ.
        cap: a bound on m p_i, a sample's weight relative to the average. In a minibatch one hard sample may have this
            weight, so a cap of 5 or 10 allows much larger steps. None: e^20, which no p_i reaches if there are fewer
            than e^20 samples; then start at a level of the losses' size. (`cvar` with size 1/cap and smoothing λ is the
            same objective as a single-level problem.)
        shift: a number that replaces the level. Then x is the model, g = mean exp((ℓ − shift)/λ) and
            f(u) = shift + λ log u. With shift = 0 this is (4) of the FedDRO paper, except for the factor λ, which is
            missing there. This form is exact while the largest loss is within 60λ of the shift; beyond, exp and log
            continue along tangents. If a running estimate of g falls behind, f is very steep there, and a run can
            diverge that would not with a level.

    Example:
        >>> import jax.numpy as jnp
        >>> robust = kl(lambda x, rows: (rows["t"] - x) ** 2, penalty=1.0)
        >>> rows = {"t": jnp.array([0.0, 1.0, 2.0])}
        >>> x, _ = robust.start(jnp.array(0.0))
        >>> [round(float(p), 3) for p in robust.weights(x, rows)]
        [0.017, 0.047, 0.936]
    """
    scale = _positive("penalty", penalty)
    if cap is not None and not (is_number(cap) and cap > 1):
        raise ValueError(f"cap must be a number above 1, or None; got {cap!r}.")
    risk = lambda losses: kl_risk(losses, scale, cap)
    if shift is not None:
        if cap is not None:
            raise ValueError("cap and shift must not be given together, because a cap is relative to the level.")
        fixed = float(shift)
        problem = Compositional(
            inner=lambda x, rows: jnp.mean(_exp((per_sample(loss, x, rows) - fixed) / scale, _WINDOW)),
            outer=lambda u: fixed + scale * _log(u, math.exp(-_WINDOW)),
        )
        return _over_samples(problem, loss, risk, has_level=False)
    most = _NO_CAP if cap is None else math.log(cap)

    def inner(x: Any, rows: Rows) -> Any:
        z = (per_sample(loss, x["model"], rows) - x["level"]) / scale
        return {"u": jnp.mean(jnp.exp(jnp.minimum(z, most))), "v": jnp.mean(jnp.maximum(z - most, 0))}

    def outer(value: Any) -> Float[Array, ""]:
        return scale * (2 * _log(1 + value["u"], 1.0) - 2 * math.log(2) + math.exp(most) * value["v"])

    problem = Compositional(inner, outer, extra=lambda x, rows: x["level"])
    return _over_samples(problem, loss, risk, has_level=True)


def chi2(loss: SampleLoss, penalty: float, exact: bool = False) -> Objective:
    """χ²-regularised DRO: min over x, max over p of Σ p_i ℓ_i − λ·½ mean (m p_i − 1)².

    While no weight is zero, i.e. min ℓ ≥ mean ℓ − λ, it equals mean ℓ + var(ℓ)/(2λ), a composition with

        h = mean(ℓ + ℓ²/(2λ)),   g = mean ℓ,   f(u) = −u²/(2λ),

    and p_i = (1 + (ℓ_i − mean ℓ)/λ)/m. (In the FedDRO paper, (5) has the wrong sign and lacks the mean: it is
    −var(ℓ)/(2λ), which has no lower bound and whose minimisation spreads the losses.) Otherwise some of these weights
    are negative: the composition is still mean and variance, but not a worst case over p ≥ 0.

    Arguments:
        loss: per sample.
        penalty: λ.
        exact: use the dual, which is exact at any λ: min over the level η of η + λ/2 + mean (ℓ − η)²₊/(2λ). It is a
            single-level problem in x = {"model", "level"}, not a composition; p_i = (ℓ_i − η)₊/(λm).
    """
    scale = _positive("penalty", penalty)
    if exact:
        dual = lambda gap: jnp.maximum(gap, 0) ** 2 / (2 * scale)
        loss_at = lambda x, rows: scale / 2 + _dual(loss, dual, x, rows)
        return _over_samples(SingleLevel(loss_at), loss, lambda losses: chi2_risk(losses, scale), has_level=True)

    def extra(x: Any, rows: Rows) -> Float[Array, ""]:
        losses = per_sample(loss, x, rows)
        return jnp.mean(losses + losses**2 / (2 * scale))

    problem = Compositional(
        inner=lambda x, rows: jnp.mean(per_sample(loss, x, rows)),
        outer=lambda u: -(u**2) / (2 * scale),
        extra=extra,
    )
    return _over_samples(problem, loss, lambda losses: variance_risk(losses, scale), has_level=False)


def cvar(loss: SampleLoss, size: float, smoothing: float | None = None) -> Objective:
    """CVaR: the mean over the worst share α of the samples; max over p of Σ p_i ℓ_i with every p_i ≤ 1/(αm).

    Its dual is a single-level problem in x = {"model", "level"}, min over the level η of η + mean (ℓ − η)₊/α; the best
    level is the α-quantile from above.

    Arguments:
        loss: per sample.
        size: α, the share of samples that count, in (0, 1]; 1 is the mean.
        smoothing: λ of a penalty −λ Σ p_i log(m p_i), which makes the dual smooth: p_i = min(e^{(ℓ_i−η)/λ}, 1/α)/m.
    """
    if not (is_number(size) and 0 < size <= 1):
        raise ValueError(f"size must be a share of the samples in (0, 1]; got {size!r}.")
    width = None if smoothing is None else _positive("smoothing", smoothing)
    most = 1 / float(size)

    def dual(gap: Losses) -> Losses:
        if width is None:
            return most * jnp.maximum(gap, 0)
        knee = width * math.log(most)  # beyond, the weight is 1/α and the dual is its tangent
        below = width * jnp.expm1(jnp.minimum(gap, knee) / width)
        return below + most * jnp.maximum(gap - knee, 0)

    problem = SingleLevel(lambda x, rows: _dual(loss, dual, x, rows))
    return _over_samples(problem, loss, lambda losses: cvar_risk(losses, float(size), width), has_level=True)


def equal_opportunity(
    loss: SampleLoss,
    members: Members,
    shares: Mapping[str, float],
    *,
    strength: float = 1.0,
    tolerance: float = 0.01,
    smoothing: float = 0.1,
    reference: Literal["all", "positives"] = "all",
) -> Objective:
    """The mean loss plus a penalty on groups whose positives are served worse than the rest.

    With L the mean loss over all samples and L_j⁺ that over the positives of group j, group j's constraint is
    c_j = L_j⁺ − L − ε ≤ 0, a smooth stand-in for "its true positive rate is at most ε below everybody's"; and

        Φ = L + max over p of a Σ_j p_j c_j − γ KL(p ‖ uniform) = L + γ log[(1 + Σ_j exp(a c_j/γ))/(G + 1)],

    where p is over the G groups and "no group" (c_0 = 0). As a composition, h = L, g = (L_1⁺, …, L_G⁺, L), and f is
    smooth with ‖∇f‖ ≤ a√2. A client's part of L_j⁺ is the sum over *its* positives of group j divided by the
    *federation's* count of them. The mean over clients is thus the group's mean loss, even if a client has no members.

    Arguments:
        loss: per sample.
        members: members(rows) -> (batch, G), 1 where a sample is a positive of the group and 0 elsewhere.
        shares: for each group, by name and in the order of `members`, its positives' share of all samples: see
            `group_shares`.
        strength: a.
        tolerance: ε.
        smoothing: γ.
        reference: what a group is compared with. "all" samples, as above and in the literature: rare positives have
            the larger loss in every group, and the penalty raises all true positive rates at the expense of accuracy.
            The "positives" of all groups (assumed to be disjoint): only differences between groups count.

    `weights` gives p_j by the group's name; the rest, 1 − Σ p_j, is on "no group".
    """
    a, gamma = _positive("strength", strength), _positive("smoothing", smoothing)
    if reference not in ("all", "positives"):
        raise ValueError(f'reference must be "all" or "positives"; got {reference!r}.')
    share = _group_shares(shares)

    def inner(x: Any, rows: Rows) -> Any:
        losses = per_sample(loss, x, rows)
        return {"all": jnp.mean(losses), "groups": _group_means(losses, members(rows), share)}

    def scores(value: Any) -> Float[Array, " groups_and_none"]:
        groups = value["groups"]
        part = (share / share.sum()).astype(groups.dtype)
        against = value["all"] if reference == "all" else part @ groups
        return jnp.concatenate([jnp.zeros_like(groups[:1]), a * (groups - against - tolerance) / gamma])

    problem = Compositional(
        inner=inner,
        outer=lambda value: gamma * (jax.nn.logsumexp(scores(value)) - math.log(len(shares) + 1)),
        extra=lambda x, rows: jnp.mean(per_sample(loss, x, rows)),
    )

    def weights(x: Any, rows: Rows) -> dict[str, Float[Array, ""]]:
        return dict(zip(shares, jax.nn.softmax(scores(inner(x, rows)))[1:], strict=True))

    value = lambda x, rows: problem.f(x, inner(x, rows), rows)
    return Objective(problem, lambda model, level=0.0: (model, None), value, weights)


def worst_group(loss: SampleLoss, members: Members, shares: Mapping[str, float], penalty: float = 0.1) -> Objective:
    """The worst-served group: min over x, max over p of Σ p_a L_a − λ KL(p ‖ uniform), which is λ log mean exp(L_a/λ).

    L_a is the mean loss of group a, and p is over the groups, regardless of their sizes. As a composition,
    g = (L_1, …, L_G), with the federation's count of a group as in `equal_opportunity`, and f = λ log mean exp(·/λ),
    with ‖∇f‖ ≤ 1.

    Arguments:
        loss: per sample.
        members: members(rows) -> (batch, G), 1 where a sample is of the group and 0 elsewhere.
        shares: for each group, by name and in the order of `members`, its share of all samples: see `group_shares`.
        penalty: λ; a small one looks only at the worst group, a large one at the plain mean over the groups.

    `weights` gives p_a by the group's name.
    """
    scale = _positive("penalty", penalty)
    share = _group_shares(shares)
    means = lambda x, rows: _group_means(per_sample(loss, x, rows), members(rows), share)
    problem = Compositional(
        inner=means, outer=lambda value: scale * (jax.nn.logsumexp(value / scale) - math.log(len(shares)))
    )

    def weights(x: Any, rows: Rows) -> dict[str, Float[Array, ""]]:
        return dict(zip(shares, jax.nn.softmax(means(x, rows) / scale), strict=True))

    return Objective(
        problem, lambda model, level=0.0: (model, None), lambda x, rows: problem.outer(means(x, rows)), weights
    )


def _group_shares(shares: Mapping[str, float]) -> np.ndarray:
    if not shares:
        raise ValueError("shares must name at least one group, {name: its share of all samples}; got none.")
    for name, share in shares.items():
        if not (is_number(share) and share > 0):
            raise ValueError(f"group {name!r} must have members; its share of the samples is {share!r}. Leave it out.")
    return np.array(list(shares.values()), float)


def _group_means(losses: Losses, belongs: Array, shares: np.ndarray) -> Float[Array, " groups"]:
    """Return the batch's part of each group's mean loss."""
    if belongs.shape != (*losses.shape, len(shares)):
        raise ValueError(
            f"members must return an array of shape (batch, {len(shares)}), a column for each share; got "
            f"{belongs.shape}."
        )
    return jnp.mean(losses[:, None] * belongs, axis=0) / shares.astype(losses.dtype)


def group_shares(clients: Clients, members: Members, names: Sequence[str]) -> dict[str, float]:
    """Return each group's share of all samples, with the clients' weights: a federation counts it once, at the start.

    Raises ValueError for a group without members.
    """
    data = clients.lower
    rows = jax.tree.map(np.asarray, data.rows) if on_host(data.rows) else data.rows
    belongs = np.asarray(members(rows), float)
    if belongs.ndim != 2 or belongs.shape[1] != len(names):
        raise ValueError(
            f"members must return an array of shape (batch, {len(names)}), a column for each name; got {belongs.shape}."
        )
    by_client = np.split(belongs, np.asarray(data.offsets)[1:])
    shares = np.asarray(clients.weights, float) @ np.stack([part.mean(axis=0) for part in by_client])
    for name, share in zip(names, shares, strict=True):
        if not share > 0:
            raise ValueError(
                f"group {name!r} must have members (positives) with some client; it has none. Leave it out."
            )
    return dict(zip(names, shares.tolist(), strict=True))


def portfolio(aversion: float, budget: float | None = None) -> Objective:
    """Mean and variance of a portfolio: min over x of −mean⟨r, x⟩ + λ var⟨r, x⟩ over the returns r, rows["returns"].

    h = mean(−⟨r, x⟩ + λ⟨r, x⟩²), g = mean⟨r, x⟩, f(u) = −λu²: the mean-variance form of `chi2` with ℓ = −⟨r, x⟩ and
    penalty 1/(2λ). (The FedDRO paper's f = −E + Var of g = R(x) is not a function of a mean.) With μ, Σ the mean and
    covariance of r, x* = Σ⁻¹μ/(2λ) and Φ* = −μᵀΣ⁻¹μ/(4λ). The weights may be negative, as in `chi2`.

    Arguments:
        aversion: λ.
        budget: the sum of x, kept by a projection after each server step; None: free.
    """
    scale = 1 / (2 * _positive("aversion", aversion))
    free = chi2(lambda x, rows: -(rows["returns"] @ x), scale)
    if budget is None:
        return free
    project = lambda x: x + (budget - jnp.sum(x)) / len(x)
    return replace(free, problem=replace(free.problem, project_upper=project))


def per_sample(loss: SampleLoss, x: Any, rows: Rows) -> Losses:
    """Return the losses; raise ValueError unless there is one for each sample."""
    losses = loss(x, rows)
    batch = jax.tree.leaves(rows)[0].shape[0]
    if jnp.shape(losses) != (batch,):
        shape = "a single number" if jnp.shape(losses) == () else f"the shape {jnp.shape(losses)}"
        raise ValueError(
            f"the loss must return one number for each sample, without the mean; for {batch} sample(s) it returns "
            f"{shape}."
        )
    return losses


def _over_samples(
    problem: Compositional | SingleLevel, loss: SampleLoss, risk: Callable[[Losses], Risk], has_level: bool
) -> Objective:
    worst = lambda x, rows: risk(per_sample(loss, x["model"] if has_level else x, rows))

    def start(model: PyTree[Any], level: float = 0.0) -> Any:
        x = model
        if has_level:
            x = {"model": model, "level": np.asarray(level, jnp.result_type(*jax.tree.leaves(model)))}
        return (x, None) if isinstance(problem, Compositional) else x

    return Objective(problem, start, lambda x, rows: worst(x, rows).value, lambda x, rows: worst(x, rows).weights)


def _dual(loss: SampleLoss, dual: Callable[[Losses], Losses], x: Any, rows: Rows) -> Float[Array, ""]:
    return x["level"] + jnp.mean(dual(per_sample(loss, x["model"], rows) - x["level"]))


def _exp(z: Array, most: float) -> Array:
    """exp up to `most`, and its tangent beyond."""
    return jnp.exp(jnp.minimum(z, most)) * (1 + jnp.maximum(z - most, 0))


def _log(u: Array, least: float) -> Array:
    """log down to `least`, and its tangent below."""
    return jnp.log(jnp.maximum(u, least)) + jnp.minimum(u - least, 0) / least


def _positive(name: str, value: Any) -> float:
    check_positive(**{name: value})
    return float(value)


def __dir__() -> list[str]:
    return __all__
