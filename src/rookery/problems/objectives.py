"""Ready-made objectives over a per-sample loss: distributionally robust, fair, and averse to risk.

Each function here takes `loss(x, rows) -> (batch,)`, one number for each sample, and gives an `Objective`: the problem
for `rk.solve`, its exact value, and the weights p that it implies, by which a user sees what counts.

The mean over all samples is the mean over clients of their means: where all samples are to count the same, give the
clients weights in proportion to their sizes, `Clients(..., weights="size")`.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, PyTree

from rookery.base.arguments import check_positive, is_number
from rookery.base.placement import on_host
from rookery.data.clients import Clients
from rookery.data.rows import Rows
from rookery.problems.problems import Compositional, SingleLevel

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

Losses = Float[Array, " m"]
SampleLoss = Callable[[Any, Rows], Losses]
Members = Callable[[Rows], Float[Array, "batch groups"]]
_NO_CAP = 20.0  # log of a cap that no weight reaches: m p_i ≤ m
_WINDOW = 60.0  # how far from a fixed shift exponents are exact: e^60·1e10 is still a number in single precision


@dataclass(frozen=True)
class Objective:
    """A problem with what else one wants to know of it.

    Attributes:
        problem: for `rk.solve`.
        start: start(model, level=0.0) -> what `rk.solve` takes as init. The variable x is the model itself or, where
            the objective needs a number beside it, {"model": model, "level": level}, a level of the losses' size.
        value: value(x, rows) -> Φ on these samples, exactly. It is a function of the model alone: a level is put where
            it is best.
        weights: weights(x, rows) -> the p that attain the worst case in Φ: one number for each sample, or for each
            named group.
    """

    problem: Compositional | SingleLevel
    start: Callable[..., Any]
    value: Callable[[Any, Rows], Float[Array, ""]]
    weights: Callable[[Any, Rows], Any]


class Risk(NamedTuple):
    """A worst case: its value, and the p that attain it."""

    value: Float[Array, ""]
    weights: Losses


def kl(loss: SampleLoss, penalty: float, cap: float | None = None, shift: float | None = None) -> Objective:
    """KL-regularised DRO: min over x, max over p of Σ p_i ℓ_i − λ Σ p_i log(m p_i), which is λ log mean exp(ℓ/λ).

    p_i ∝ exp(ℓ_i/λ): a small λ looks at the largest loss alone, a large one at the mean.

    A mean over clients and minibatches of exp(ℓ/λ) overflows with the losses, and the usual cure, to take the largest
    loss out, is not a mean. So the shift is a variable, x = {"model", "level"}, and with z = (ℓ − level)/λ we have

        h = level,   g = (u, v) = mean (exp(min(z, log cap)), (z − log cap)₊),   f(u, v) = 2λ log((1 + u)/2) + λ·cap·v.

    In the level it falls where u > 1 and rises where u < 1, so its minimum is at u = 1. There p_i = min(e^z_i, cap)/m,
    they sum to 1, and the value is the maximum over all p with p_i ≤ cap/m: if no p_i needs more, λ log mean exp(ℓ/λ)
    exactly, and the level is that value. So minimisers and stationary points in the model are those of DRO. At another
    level the uncapped weights have the factor 2/(1 + u), and the level's own slope is between −cap and 1 (between −1
    and 1 while no sample is at the cap): it follows the losses at the step size of the model, which should be below 4λ.
    f is Lipschitz for u ≥ 0, linear in v, and no exponential is above the cap, however large a loss.

    Arguments:
        loss: per sample.
        penalty: λ.
        cap: a bound on m p_i, how often a sample may count as the average one does. With minibatches one hard sample
            has that factor in a step, so a cap of 5 or 10 allows for much larger steps. None: e^20, which no p_i needs
            in data of fewer samples: then start at a level of the losses' size. (`cvar` with size 1/cap and smoothing λ
            is the same objective as a single-level problem.)
        shift: a number in the place of the level: then x is the model, g = mean exp((ℓ − shift)/λ) and
            f(u) = shift + λ log u, which with shift = 0 is (4) of the FedDRO paper but for the factor λ, missing there.
            Exact while the largest loss is within 60λ of the shift; beyond, exp and log go on along tangents. A running
            estimate of g that falls behind meets a very steep f: expect runs that diverge where a level would not.

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
        raise ValueError(f"cap={cap!r} is not a number above 1, or None.")
    risk = lambda losses: kl_risk(losses, scale, cap)
    if shift is not None:
        if cap is not None:
            raise ValueError("a cap is relative to the level: give a cap or a shift, not both.")
        fixed = float(shift)
        problem = Compositional(
            inner=lambda x, rows: jnp.mean(_exp((per_sample(loss, x, rows) - fixed) / scale, _WINDOW)),
            outer=lambda u: fixed + scale * _log(u, math.exp(-_WINDOW)),
        )
        return _over_samples(problem, loss, risk, beside=False)
    most = _NO_CAP if cap is None else math.log(cap)

    def inner(x: Any, rows: Rows) -> Any:
        z = (per_sample(loss, x["model"], rows) - x["level"]) / scale
        return {"u": jnp.mean(jnp.exp(jnp.minimum(z, most))), "v": jnp.mean(jnp.maximum(z - most, 0))}

    def outer(value: Any) -> Float[Array, ""]:
        return scale * (2 * _log(1 + value["u"], 1.0) - 2 * math.log(2) + math.exp(most) * value["v"])

    problem = Compositional(inner, outer, extra=lambda x, rows: x["level"])
    return _over_samples(problem, loss, risk, beside=True)


def chi2(loss: SampleLoss, penalty: float, exact: bool = False) -> Objective:
    """χ²-regularised DRO: min over x, max over p of Σ p_i ℓ_i − λ·½ mean (m p_i − 1)².

    While no weight reaches zero, that is while min ℓ ≥ mean ℓ − λ, it is mean ℓ + var(ℓ)/(2λ), a composition with

        h = mean(ℓ + ℓ²/(2λ)),   g = mean ℓ,   f(u) = −u²/(2λ),

    and p_i = (1 + (ℓ_i − mean ℓ)/λ)/m. (The FedDRO paper prints this with the wrong sign and without the mean, (5): it
    is then −var(ℓ)/(2λ), which has no lower bound and whose minimisation spreads the losses.) Beyond, some of these
    weights are negative: the composition is still mean and variance, but no worst case over p ≥ 0.

    Arguments:
        loss: per sample.
        penalty: λ.
        exact: the exact dual at any λ, min over the level η of η + λ/2 + mean (ℓ − η)²₊/(2λ): no composition but a
            single-level problem in x = {"model", "level"}; p_i = (ℓ_i − η)₊/(λm).
    """
    scale = _positive("penalty", penalty)
    if exact:
        dual = lambda gap: jnp.maximum(gap, 0) ** 2 / (2 * scale)
        loss_at = lambda x, rows: scale / 2 + _dual(loss, dual, x, rows)
        return _over_samples(SingleLevel(loss_at), loss, lambda losses: chi2_risk(losses, scale), beside=True)

    def extra(x: Any, rows: Rows) -> Float[Array, ""]:
        each = per_sample(loss, x, rows)
        return jnp.mean(each + each**2 / (2 * scale))

    problem = Compositional(
        inner=lambda x, rows: jnp.mean(per_sample(loss, x, rows)),
        outer=lambda u: -(u**2) / (2 * scale),
        extra=extra,
    )
    return _over_samples(problem, loss, lambda losses: variance_risk(losses, scale), beside=False)


def cvar(loss: SampleLoss, size: float, smoothing: float | None = None) -> Objective:
    """CVaR: the mean of the worst samples, a share α of them; max over p of Σ p_i ℓ_i with every p_i ≤ 1/(αm).

    Its dual is a single-level problem in x = {"model", "level"}, min over the level η of η + mean (ℓ − η)₊/α; the best
    level is the α-quantile from above.

    Arguments:
        loss: per sample.
        size: α, the share of samples that count, in (0, 1]; 1 is the mean.
        smoothing: λ of a penalty −λ Σ p_i log(m p_i), which makes the dual smooth: p_i = min(e^{(ℓ_i−η)/λ}, 1/α)/m.
    """
    if not (is_number(size) and 0 < size <= 1):
        raise ValueError(f"size={size!r} is not a share of the samples, in (0, 1].")
    width = None if smoothing is None else _positive("smoothing", smoothing)
    most = 1 / float(size)

    def dual(gap: Losses) -> Losses:
        if width is None:
            return most * jnp.maximum(gap, 0)
        knee = width * math.log(most)  # beyond, the weight is the largest, and the dual goes on along its tangent
        below = width * jnp.expm1(jnp.minimum(gap, knee) / width)
        return below + most * jnp.maximum(gap - knee, 0)

    problem = SingleLevel(lambda x, rows: _dual(loss, dual, x, rows))
    return _over_samples(problem, loss, lambda losses: cvar_risk(losses, float(size), width), beside=True)


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
    """The mean loss, and a penalty on groups whose positives are served worse than the rest.

    With L the mean loss over all samples and L_j⁺ that over the positives of group j, group j's constraint is
    c_j = L_j⁺ − L − ε ≤ 0, a smooth stand-in for "its true positive rate is at most ε below everybody's"; and

        Φ = L + max over p of a Σ_j p_j c_j − γ KL(p ‖ uniform) = L + γ log[(1 + Σ_j exp(a c_j/γ))/(G + 1)],

    where p is over the G groups and "no group" (c_0 = 0). As a composition, h = L, g = (L_1⁺, …, L_G⁺, L) and f smooth
    with ‖∇f‖ ≤ a√2. A client's part of L_j⁺ is its sum over *its* positives of group j with the *federation's* count of
    them, so the mean over clients is the group's own mean loss, even where a client has nobody of the group.

    Arguments:
        loss: per sample.
        members: members(rows) -> (batch, G), 1 where a sample is a positive of the group and 0 elsewhere.
        shares: for each group, by name and in the order of `members`, its positives' share of all samples: see
            `group_shares`.
        strength: a.
        tolerance: ε.
        smoothing: γ.
        reference: what a group is compared with: "all" samples, as above and in the literature, where rare positives
            have the larger loss in every group and the penalty raises all true positive rates at the accuracy's cost;
            or the "positives" of all groups (which are taken to be disjoint), which looks at the differences alone.

    `weights` gives p_j by the group's name; what they lack to 1 is on "no group".
    """
    a, gamma = _positive("strength", strength), _positive("smoothing", smoothing)
    if reference not in ("all", "positives"):
        raise ValueError(f'reference={reference!r} is not known; there are: "all", "positives".')
    each_share = _group_shares(shares)

    def inner(x: Any, rows: Rows) -> Any:
        each = per_sample(loss, x, rows)
        return {"all": jnp.mean(each), "groups": _group_means(each, members(rows), each_share)}

    def scores(value: Any) -> Float[Array, " groups_and_none"]:
        groups = value["groups"]
        part = (each_share / each_share.sum()).astype(groups.dtype)
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
    """The worst served group: min over x, max over p of Σ p_a L_a − λ KL(p ‖ uniform), which is λ log mean exp(L_a/λ).

    L_a is the mean loss of group a and p is over the groups, however large each is. As a composition g = (L_1, …, L_G),
    as in `equal_opportunity` with the federation's count of a group, and f = λ log mean exp(·/λ), with ‖∇f‖ ≤ 1.

    Arguments:
        loss: per sample.
        members: members(rows) -> (batch, G), 1 where a sample is of the group and 0 elsewhere.
        shares: for each group, by name and in the order of `members`, its share of all samples: see `group_shares`.
        penalty: λ; a small one looks at the worst group alone, a large one at the plain mean over the groups.

    `weights` gives p_a by the group's name.
    """
    scale = _positive("penalty", penalty)
    each_share = _group_shares(shares)
    means = lambda x, rows: _group_means(per_sample(loss, x, rows), members(rows), each_share)
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
        raise ValueError("shares is empty: name at least one group, {name: its share of all samples}.")
    for name, share in shares.items():
        if not (is_number(share) and share > 0):
            raise ValueError(f"group {name!r} has no members: its share of the samples is {share!r}; leave it out.")
    return np.array(list(shares.values()), float)


def _group_means(each: Losses, belongs: Array, shares: np.ndarray) -> Float[Array, " groups"]:
    """The batch's part of each group's mean loss."""
    if belongs.shape != (*each.shape, len(shares)):
        raise ValueError(f"members gives the shape {belongs.shape}; give (batch, {len(shares)}), as shares has.")
    return jnp.mean(each[:, None] * belongs, axis=0) / shares.astype(each.dtype)


def group_shares(clients: Clients, members: Members, names: Sequence[str]) -> dict[str, float]:
    """Each group's share of all samples, with the clients' weights: what a federation counts once, before it starts.

    Raises ValueError for a group that no client has a member of.
    """
    source = clients.lower
    rows = jax.tree.map(np.asarray, source.rows) if on_host(source.rows) else source.rows
    belongs = np.asarray(members(rows), float)
    if belongs.ndim != 2 or belongs.shape[1] != len(names):
        raise ValueError(
            f"members gives the shape {belongs.shape}; give (batch, {len(names)}), a column for each name."
        )
    own = np.split(belongs, np.asarray(source.offsets)[1:])
    share = np.asarray(clients.weights, float) @ np.stack([part.mean(axis=0) for part in own])
    for name, of in zip(names, share, strict=True):
        if not of > 0:
            raise ValueError(f"group {name!r} has no members (positives) with any client; leave it out.")
    return dict(zip(names, share.tolist(), strict=True))


def portfolio(aversion: float, budget: float | None = None) -> Objective:
    """Mean and variance of a portfolio: min over x of −mean⟨r, x⟩ + λ var⟨r, x⟩ over the returns r, rows["returns"].

    h = mean(−⟨r, x⟩ + λ⟨r, x⟩²), g = mean⟨r, x⟩, f(u) = −λu²: the mean-variance form of `chi2` with ℓ = −⟨r, x⟩ and
    penalty 1/(2λ). (The FedDRO paper's f = −E + Var of g = R(x) is not a function of a mean.) With μ, Σ the mean and
    covariance of r, x* = Σ⁻¹μ/(2λ) and Φ* = −μᵀΣ⁻¹μ/(4λ). The weights may be negative, as those of `chi2`.

    Arguments:
        aversion: λ.
        budget: the sum of x, kept by projection after each server step; None: free.
    """
    scale = 1 / (2 * _positive("aversion", aversion))
    free = chi2(lambda x, rows: -(rows["returns"] @ x), scale)
    if budget is None:
        return free
    held = lambda x: x + (budget - jnp.sum(x)) / len(x)
    problem = free.problem
    assert isinstance(problem, Compositional)
    kept = Compositional(problem.inner, problem.outer, problem.extra, project_upper=held)
    return Objective(kept, free.start, free.value, free.weights)


# The worst cases in closed form, of the losses alone: value and weights. Where the samples do not count the same to
# begin with, `reference` says what each counts in the place of 1/m, to the sum 1; where it is 0 there is no sample.
# All of them compute with the losses less their maximum: an offset of the losses costs no precision.


def kl_risk(losses: Losses, penalty: float, cap: float | None = None, reference: Losses | None = None) -> Risk:
    """λ log mean exp(ℓ/λ), and p ∝ exp(ℓ/λ); with a cap, p = min(e^{(ℓ−η)/λ}, cap)/m, whose η makes them sum to 1."""
    m = len(losses)
    top, gap = _below_largest(losses, reference)
    if cap is None or cap >= m:
        z = gap / penalty + (-math.log(m) if reference is None else jnp.log(reference))
        return Risk(top + penalty * jax.nn.logsumexp(z), jax.nn.softmax(z))
    if reference is not None:
        raise ValueError("kl_risk takes a cap or a reference, not both: a cap needs samples that all count the same.")
    falling = -jnp.sort(-gap)

    def others(k: Array) -> tuple[Array, Array]:
        """With all losses above ℓ_k at the cap: the weight m p left for the others, and e^{(ℓ − ℓ_k)/λ} of each."""
        below = gap - falling[k]
        left = jnp.maximum(m - cap * jnp.sum(below > 0), 0).astype(gap.dtype)
        return left, jnp.where(below > 0, 0, jnp.exp(jnp.minimum(below, 0) / penalty))

    def halve(_: Any, bracket: tuple[Array, Array]) -> tuple[Array, Array]:
        """Towards the smallest k with which no other loss needs more than the cap."""
        low, high = bracket
        middle = (low + high) // 2
        left, rest = others(middle)
        enough = left <= cap * jnp.sum(rest)
        return jnp.where(enough, low, middle + 1), jnp.where(enough, middle, high)

    most = int(m / cap)
    _, k = jax.lax.fori_loop(0, most.bit_length() + 1, halve, (jnp.int32(0), jnp.int32(most)))
    left, rest = others(k)
    q = jnp.where(gap > falling[k], cap, rest * left / jnp.sum(rest))
    return Risk(top + jnp.mean(q * gap) - penalty * jnp.mean(jax.scipy.special.xlogy(q, q)), q / m)


def variance_risk(losses: Losses, penalty: float) -> Risk:
    """mean ℓ + var(ℓ)/(2λ), and p = (1 + (ℓ − mean ℓ)/λ)/m, of which some may be negative."""
    top, gap = _below_largest(losses)
    mean = jnp.mean(gap)
    gap = gap - mean
    return Risk(top + mean + jnp.mean(gap**2) / (2 * penalty), (1 + gap / penalty) / len(losses))


def chi2_risk(losses: Losses, penalty: float, reference: Losses | None = None) -> Risk:
    """max over p of Σ p ℓ − λ·½ mean (m p − 1)²: p = (ℓ − η)₊/(λm), with η such that they sum to 1."""
    q = _uniform(losses) if reference is None else reference
    top, gap = _below_largest(losses, reference)
    order = jnp.argsort(-gap)
    falling, shares = gap[order], q[order]
    levels = (jnp.cumsum(shares * falling) - penalty) / jnp.cumsum(shares)  # η if the first k have all the weight
    level = levels[jnp.sum(falling > levels) - 1]
    ratio = jnp.maximum(gap - level, 0) / penalty
    value = top + q @ (ratio * gap) - penalty / 2 * (q @ (ratio - 1) ** 2)
    return Risk(value, q * ratio)


def chi2_ball_risk(losses: Losses, size: float, reference: Losses | None = None) -> Risk:
    """max over p of Σ p ℓ where ½ mean (m p − 1)² ≤ ρ: p ∝ (ℓ − η)₊, all on the largest losses if ρ allows for it.

    With the k largest losses above η, of the share Q, the mean μ and the variance v among them, p is on them
    (1 + (ℓ − μ)·√(((1 + 2ρ)Q − 1)/v))/(Qm). How many they are is found by bisection: at η equal to the k-th largest
    loss, mean (ℓ − η)²₊ exceeds (1 + 2ρ)(mean (ℓ − η)₊)² if that η is too high.
    """
    q = _uniform(losses) if reference is None else reference
    top, losses = _below_largest(losses, reference)
    falling = -jnp.sort(-losses)

    def halve(_: Any, bracket: tuple[Array, Array]) -> tuple[Array, Array]:
        low, high = bracket
        middle = (low + high) // 2
        above = jnp.maximum(losses - falling[middle], 0)
        too_high = q @ above**2 >= (1 + 2 * size) * (q @ above) ** 2
        return jnp.where(too_high, middle, low), jnp.where(too_high, high, middle)

    last, _ = jax.lax.fori_loop(0, len(losses).bit_length(), halve, (jnp.int32(0), jnp.int32(len(losses))))
    on = jnp.where(losses >= falling[last], q, 0)
    share = jnp.sum(on)
    gap = losses - on @ losses / share
    variance = on @ gap**2 / share
    slope = jnp.sqrt(jnp.maximum((1 + 2 * size) * share - 1, 0) / jnp.where(variance > 0, variance, 1))
    p = on / share * jnp.maximum(1 + slope * gap, 0)
    p = p / jnp.sum(p)
    return Risk(top + p @ losses, p)


def cvar_risk(losses: Losses, size: float, smoothing: float | None = None, reference: Losses | None = None) -> Risk:
    """max over p of Σ p ℓ, less λ Σ p log(m p) with smoothing, where p ≤ 1/(αm)."""
    if smoothing is not None:
        return kl_risk(losses, smoothing, 1 / size, reference)
    q = _uniform(losses) if reference is None else reference
    top, gap = _below_largest(losses, reference)
    order = jnp.argsort(-gap)
    shares = q[order]
    larger = jnp.cumsum(shares) - shares  # the share of those with a larger loss
    p = jnp.zeros_like(losses).at[order].set(jnp.clip(size - larger, 0, shares) / size)
    return Risk(top + p @ gap, p)


def _below_largest(losses: Losses, reference: Losses | None = None) -> tuple[Float[Array, ""], Losses]:
    """The largest loss of a sample, and all losses less it."""
    there = None if reference is None else reference > 0
    top = jax.lax.stop_gradient(jnp.max(losses, where=there, initial=None if there is None else -jnp.inf))
    return top, losses - top


def _uniform(losses: Losses) -> Losses:
    return jnp.full(len(losses), 1 / len(losses), losses.dtype)


# What they share.


def per_sample(loss: SampleLoss, x: Any, rows: Rows) -> Losses:
    """The losses, if they are one for each sample; ValueError if not."""
    each = loss(x, rows)
    batch = jax.tree.leaves(rows)[0].shape[0]
    if jnp.shape(each) != (batch,):
        given = "a single number" if jnp.shape(each) == () else f"the shape {jnp.shape(each)}"
        raise ValueError(f"the loss gives {given} for {batch} sample(s); give one number for each, without the mean.")
    return each


def _over_samples(
    problem: Compositional | SingleLevel, loss: SampleLoss, risk: Callable[[Losses], Risk], beside: bool
) -> Objective:
    of = lambda x, rows: risk(per_sample(loss, x["model"] if beside else x, rows))

    def start(model: PyTree[Any], level: float = 0.0) -> Any:
        x = {"model": model, "level": np.asarray(level, jnp.result_type(*jax.tree.leaves(model)))} if beside else model
        return (x, None) if isinstance(problem, Compositional) else x

    return Objective(problem, start, lambda x, rows: of(x, rows).value, lambda x, rows: of(x, rows).weights)


def _dual(loss: SampleLoss, dual: Callable[[Losses], Losses], x: Any, rows: Rows) -> Float[Array, ""]:
    return x["level"] + jnp.mean(dual(per_sample(loss, x["model"], rows) - x["level"]))


def _exp(z: Array, most: float) -> Array:
    """exp, and beyond `most` its tangent."""
    return jnp.exp(jnp.minimum(z, most)) * (1 + jnp.maximum(z - most, 0))


def _log(u: Array, least: float) -> Array:
    """log, and below `least` its tangent."""
    return jnp.log(jnp.maximum(u, least)) + jnp.minimum(u - least, 0) / least


def _positive(name: str, value: Any) -> float:
    check_positive(**{name: value})
    return float(value)


def __dir__() -> list[str]:
    return __all__
