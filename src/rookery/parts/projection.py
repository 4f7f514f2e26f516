"""Projections onto simple sets."""

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from rookery.base import tree

# Not optax.projections: its ball under- and overflows, and its simplex misses the sum by 0.1 for float32 v near 1e6.


def ball(z: tree.Tree, radius: tree.Scalar) -> tree.Tree:
    """Return the nearest point with ‖z‖ ≤ radius, z·min(1, radius/‖z‖); the norm is over all leaves."""
    largest = functools.reduce(jnp.maximum, [jnp.max(jnp.abs(leaf), initial=0) for leaf in jax.tree.leaves(z)])
    unit = jnp.where(largest > 0, largest, 1)  # so that squares neither under- nor overflow
    scaled = jax.tree.map(lambda leaf: leaf / unit, z)
    norm = jnp.maximum(tree.norm(scaled), 1)
    return jax.tree.map(lambda leaf, s: jnp.where(unit * norm <= radius, leaf, s * (radius / norm)), z, scaled)


def simplex(v: Float[Array, " n"]) -> Float[Array, " n"]:
    """Return the nearest point with entries ≥ 0 that sum to 1: (v − τ)₊, with τ exact from the sorted entries."""
    v = jnp.maximum(v - jnp.max(v), -1)  # shifts τ and keeps it small; entries below -1 become 0
    falling = -jnp.sort(-v)
    thresholds = (jnp.cumsum(falling) - 1) / (1 + jnp.arange(len(v), dtype=v.dtype))  # τ if the first k stay above 0
    return jnp.maximum(v - thresholds[jnp.sum(falling > thresholds) - 1], 0)


def capped_simplex(v: Float[Array, " k"], cap: float) -> Float[Array, " k"]:
    """Return the nearest w to v with Σ w_k = 1 and 0 ≤ w_k ≤ cap, in O(k log k).

    w = clip(v − λ, 0, cap) for the λ at which the entries sum to 1. The sum is piecewise linear in λ, with kinks at the
    v_k and the v_k − cap. Two neighbouring kinks enclose 1, and λ is exact between them.
    """
    size = v.shape[0]
    if cap * size < 1 - 1e-9:
        raise ValueError(f"cap must be at least 1/{size}, so that {size} weights can sum to 1; got {cap}.")
    cap = min(cap, 1.0)
    # A gap larger than cap between neighbours acts like one of cap; cutting it keeps all numbers small.
    order = jnp.argsort(v)
    gaps = jnp.minimum(jnp.diff(v[order]), cap)
    ranked = jnp.append(-jnp.cumsum(gaps[::-1])[::-1], 0)
    below = jnp.concatenate([jnp.zeros(1, v.dtype), jnp.cumsum(ranked)])  # below[i]: the sum of the i lowest

    def total(level: Float[Array, " m"]) -> Float[Array, " m"]:
        positive, full = jnp.searchsorted(ranked, level), jnp.searchsorted(ranked, level + cap)
        return below[full] - below[positive] - level * (full - positive) + cap * (size - full)

    kinks = jnp.sort(jnp.concatenate([ranked, ranked - cap]))
    sums = total(kinks)
    left = jnp.clip(jnp.sum(sums >= 1) - 1, 0, 2 * size - 2)
    fall = sums[left] - sums[left + 1]
    share = jnp.where(fall > 0, (sums[left] - 1) / jnp.where(fall > 0, fall, 1), 0)
    level = kinks[left] + share * (kinks[left + 1] - kinks[left])
    # The running sums have rounding errors that grow with k; one Newton step removes them.
    w = jnp.clip(ranked - level, 0, cap)
    free = jnp.sum((w > 0) & (w < cap))
    w = jnp.clip(ranked - level + (1 - jnp.sum(w)) / jnp.maximum(free, 1), 0, cap)
    return jnp.where(
        jnp.isfinite(v), jnp.zeros_like(v).at[order].set(w), jnp.nan
    )  # an infinite entry is an error and must stay visible
