"""Projections onto simple sets."""

import jax.numpy as jnp
from jaxtyping import Array, Float

from rookery import tree


def ball(z: tree.Tree, radius: tree.Scalar) -> tree.Tree:
    """The nearest point with ‖z‖ ≤ radius, the norm over all leaves: z·min(1, radius/‖z‖)."""
    return tree.scale(radius / jnp.maximum(tree.norm(z), radius), z)


def simplex(v: Float[Array, " n"]) -> Float[Array, " n"]:
    """The nearest point with entries ≥ 0 of the sum 1: (v − τ)₊, with τ exact from the sorted entries."""
    v = v - jnp.max(v)  # which changes τ alone, and keeps it small
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
    v = v - jnp.max(v)
    ranked = jnp.sort(v)
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
    w = jnp.clip(v - level, 0, cap)
    free = jnp.sum((w > 0) & (w < cap))
    return jnp.clip(v - level + (1 - jnp.sum(w)) / jnp.maximum(free, 1), 0, cap)
