"""Worst cases over sample weights in closed form: the value, and the weights p that attain it.

`reference` gives the samples' weights, which sum to 1, if they are not all 1/m; a sample of weight 0 is ignored. All
functions subtract the largest loss first, so an offset of the losses costs no precision.
"""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

Losses = Float[Array, " m"]


class Risk(NamedTuple):
    """A worst case: its value, and the weights p that attain it."""

    value: Float[Array, ""]
    weights: Losses


def kl_risk(losses: Losses, penalty: float, cap: float | None = None, reference: Losses | None = None) -> Risk:
    """λ log mean exp(ℓ/λ), and p ∝ exp(ℓ/λ); with a cap, p = min(e^{(ℓ−η)/λ}, cap)/m, where η makes them sum to 1."""
    m = len(losses)
    top, gap = _below_largest(losses, reference)
    if cap is None or cap >= m:
        z = gap / penalty + (-math.log(m) if reference is None else jnp.log(reference))
        return Risk(top + penalty * jax.nn.logsumexp(z), jax.nn.softmax(z))
    if reference is not None:
        raise ValueError(
            "kl_risk: cap and reference must not be given together, because a cap needs samples of equal weight."
        )
    falling = -jnp.sort(-gap)

    def others(k: Array) -> tuple[Array, Array]:
        """Return the weight m p left if all losses above ℓ_k are at the cap, and e^{(ℓ − ℓ_k)/λ} of the others."""
        below = gap - falling[k]
        left = jnp.maximum(m - cap * jnp.sum(below > 0), 0).astype(gap.dtype)
        return left, jnp.where(below > 0, 0, jnp.exp(jnp.minimum(below, 0) / penalty))

    def halve(_: Any, bracket: tuple[Array, Array]) -> tuple[Array, Array]:
        """Bisect for the smallest k with which no other loss exceeds the cap."""
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
    """mean ℓ + var(ℓ)/(2λ), and p = (1 + (ℓ − mean ℓ)/λ)/m, which may be negative."""
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
    """max over p of Σ p ℓ where ½ mean (m p − 1)² ≤ ρ: p ∝ (ℓ − η)₊, all on the largest losses if ρ allows it.

    Let the k losses above η have the share Q, the mean μ and the variance v. On these,
    p = (1 + (ℓ − μ)·√(((1 + 2ρ)Q − 1)/v))/(Qm). Bisection finds k: with η equal to the k-th largest loss,
    mean (ℓ − η)²₊ exceeds (1 + 2ρ)(mean (ℓ − η)₊)² if that η is too high.
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
    """max over p of Σ p ℓ, minus λ Σ p log(m p) with smoothing, where p ≤ 1/(αm)."""
    if smoothing is not None:
        return kl_risk(losses, smoothing, 1 / size, reference)
    q = _uniform(losses) if reference is None else reference
    top, gap = _below_largest(losses, reference)
    order = jnp.argsort(-gap)
    shares = q[order]
    larger = jnp.cumsum(shares) - shares  # the share of samples with a larger loss
    p = jnp.zeros_like(losses).at[order].set(jnp.clip(size - larger, 0, shares) / size)
    return Risk(top + p @ gap, p)


def _below_largest(losses: Losses, reference: Losses | None = None) -> tuple[Float[Array, ""], Losses]:
    """Return the largest loss, and all losses minus it."""
    exists = None if reference is None else reference > 0
    top = jax.lax.stop_gradient(jnp.max(losses, where=exists, initial=None if exists is None else -jnp.inf))
    return top, losses - top


def _uniform(losses: Losses) -> Losses:
    return jnp.full(len(losses), 1 / len(losses), losses.dtype)
