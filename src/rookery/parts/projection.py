"""Projections onto simple sets."""

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from rookery.base import tree

# Not optax.projections: its ball under- and overflows, and its simplex misses the sum by 0.1 for float32 v near 1e6.


def ball(z: tree.Tree, radius: tree.Scalar) -> tree.Tree:
    """The nearest point with ‖z‖ ≤ radius, the norm over all leaves: z·min(1, radius/‖z‖)."""
    largest = functools.reduce(jnp.maximum, [jnp.max(jnp.abs(leaf), initial=0) for leaf in jax.tree.leaves(z)])
    unit = jnp.where(largest > 0, largest, 1)  # so that no square under- or overflows
    scaled = jax.tree.map(lambda leaf: leaf / unit, z)
    norm = jnp.maximum(tree.norm(scaled), 1)
    return jax.tree.map(lambda leaf, s: jnp.where(unit * norm <= radius, leaf, s * (radius / norm)), z, scaled)


def simplex(v: Float[Array, " n"]) -> Float[Array, " n"]:
    """The nearest point with entries ≥ 0 of the sum 1: (v − τ)₊, with τ exact from the sorted entries."""
    v = jnp.maximum(v - jnp.max(v), -1)  # which changes τ alone, and keeps it small; what is below -1 becomes 0
    falling = -jnp.sort(-v)
    thresholds = (jnp.cumsum(falling) - 1) / (1 + jnp.arange(len(v), dtype=v.dtype))  # τ if the first k stay above 0
    return jnp.maximum(v - thresholds[jnp.sum(falling > thresholds) - 1], 0)


def capped_simplex(v: Float[Array, " k"], cap: float) -> Float[Array, " k"]:
    """The nearest w to v with Σ w_k = 1 and 0 ≤ w_k ≤ cap, in O(k log k).

    It is clip(v − λ, 0, cap) with the λ for which that adds up to 1. The sum is piecewise linear in λ, with kinks at
    the v_k and the v_k − cap: two of them enclose 1, and between those two λ is exact.
    """
    size = v.shape[0]
    if cap * size < 1 - 1e-9:
        raise ValueError(f"cap={cap}: {size} weights of at most that do not add up to 1; it must be at least 1/{size}.")
    cap = min(cap, 1.0)
    # A gap between neighbours that is larger than cap acts like one of cap: cut to it, all numbers are small.
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
    # The running sums have rounding errors that grow with k; one step of Newton's method takes them out.
    w = jnp.clip(ranked - level, 0, cap)
    free = jnp.sum((w > 0) & (w < cap))
    w = jnp.clip(ranked - level + (1 - jnp.sum(w)) / jnp.maximum(free, 1), 0, cap)
    return jnp.where(jnp.isfinite(v), jnp.zeros_like(v).at[order].set(w), jnp.nan)  # ±∞ is an error, and stays visible
