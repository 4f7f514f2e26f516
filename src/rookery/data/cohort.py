"""The choice of a round's cohort."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int


def sample_cohort(key: Array, n: int, size: int, chances: Float[Array, " n"] | None = None) -> Int[Array, " size"]:
    """Draw clients uniformly without replacement, in ascending order; with `chances`, draw by them, with replacement.

    A small cohort of a large federation is drawn by Floyd's method (Bentley, CACM 1987), whose cost does not grow
    with n.
    """
    if chances is not None:
        share = jnp.asarray(chances, jnp.float32)
        return jnp.sort(jax.random.choice(key, n, (size,), p=share / jnp.sum(share))).astype(jnp.int32)
    if size == n:
        return jnp.arange(n, dtype=jnp.int32)
    if size > 2048 or 8 * size > n:
        return jnp.sort(jax.random.permutation(key, jnp.arange(n, dtype=jnp.int32))[:size])
    # Draw j is uniform in 0..n−size+j; if that client has been taken, take n−size+j itself. A client has been taken if
    # it equals an earlier draw, or if it is n−size+k of an earlier draw k that had to be replaced, and so on back.
    first, place = n - size, jnp.arange(size, dtype=jnp.int32)
    draws = jax.random.randint(key, (size,), 0, first + place + 1, jnp.int32)
    taken = jnp.any(jnp.tril(draws[:, None] == draws[None, :], -1), axis=1)
    back = jnp.where((draws >= first) & (draws - first < place), draws - first, place)
    for _ in range(size.bit_length()):
        taken, back = taken | taken[back], back[back]
    return jnp.sort(jnp.where(taken, first + place, draws))
