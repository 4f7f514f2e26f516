"""The choice of a round's cohort."""

from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from rookery.base import draws
from rookery.base.arguments import is_number

_OVERFLOW = 1e-13  # the probability that a Poisson cohort has more clients than there are places


@dataclass(frozen=True)
class Poisson:
    """Cohorts of random size, for private runs: each client is in a round's cohort with the same probability.

    The clients are drawn independently of each other. This reveals less of a client than a cohort of fixed size, and
    the account of `rk.private` says how much less.

    Arguments:
        expected: the expected number of clients in a round.
    """

    expected: float

    def __post_init__(self) -> None:
        if not is_number(self.expected) or self.expected <= 0:
            raise ValueError(f"Poisson: expected must be a positive number of clients; got {self.expected!r}.")


class Draw(NamedTuple):
    """How a run draws its cohorts.

    Attributes:
        places: the clients in a cohort or, with Poisson sampling, more than it will have.
        chance: with Poisson sampling, the probability of a client; None: cohorts of a fixed size.
        secret: whether they are drawn from the server's own entropy, so that no client knows them.
    """

    places: int
    chance: float | None = None
    secret: bool = False

    @classmethod
    def poisson(cls, sampling: Poisson, n: int) -> "Draw":
        """Return the draw of Poisson cohorts from n clients."""
        from scipy.stats import binom  # slow to import

        chance = float(sampling.expected) / n
        return cls(max(1, min(n, int(binom.isf(_OVERFLOW, n, chance)) + 1)), chance, secret=True)

    def __call__(self, key: Array, n: int) -> tuple[Int[Array, " places"], Bool[Array, " places"] | None]:
        """Return the clients in the places, in ascending order, and which of them are in the cohort; None: all."""
        if self.chance is None:
            return sample_cohort(key, n, self.places), None
        drawn = draws.coins(key, self.chance, (n,))
        ids = jnp.sort(jnp.argsort(~drawn)[: self.places]).astype(jnp.int32)  # those drawn, and others to fill up
        return ids, drawn[ids]


def overflow(places: int, n: int, chance: float) -> float:
    """Return the probability that the other clients of a Poisson cohort leave no place for one more client."""
    from scipy.stats import binom  # slow to import

    return float(binom.sf(places - 1, n - 1, chance)) if places < n else 0.0


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
