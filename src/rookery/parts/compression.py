"""Compressed messages: a few entries of a vector and their places. A pytree is compressed as one flat vector.

Top-k keeps the k entries of largest size; it is a contraction, and biased. Random-k keeps k entries drawn uniformly;
with the factor d/k it is unbiased, without it a contraction, which is what error feedback needs.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

Flat = Float[Array, " d"]


def kept(size: int, shrink: int) -> int:
    """k, the number of entries that are sent of a vector of this size: one in `shrink`, rounded up."""
    return -(-size // shrink)


def top_places(v: Flat, k: int) -> Int[Array, " k"]:
    """The places of the k entries of largest size."""
    return jax.lax.top_k(jnp.abs(v), k)[1]


def random_places(key: Array, size: int, k: int) -> Int[Array, " k"]:
    """k places drawn uniformly without replacement. Everybody who has the key has the places: they need not travel."""
    return jax.random.permutation(key, jnp.arange(size, dtype=jnp.int32))[:k]


def spread(values: Float[Array, " k"], places: Int[Array, " k"], size: int) -> Flat:
    """The vector that has these values at these places, and zeros elsewhere."""
    return jnp.zeros(size, values.dtype).at[places].add(values)
