"""Asynchronous rounds: clients reply when they are ready, and the server does not wait for all of them."""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array

from rookery.base.arguments import is_number


@dataclass(frozen=True)
class Asynchronous:
    """Asynchronous rounds (FedBuff): `rk.solve(..., cohort=100, clock=clock, asynchronous=rk.Asynchronous(buffer=10))`.

    `cohort` clients work at the same time. Each begins with the newest model. When one has replied, another client,
    drawn from those that are idle, begins in its place. When `buffer` replies have arrived, the server makes a step,
    which is a round, and empties the buffer. The staleness of a reply is the number of steps that the server has made
    since the client began.

    A mean in a round is over the replies in the buffer. For values that clients have moved away from the server's, such
    as x after local steps, a client sends the difference Δ_j from the model with which it began, and the server adds
    Σ s_j p_j Δ_j / Σ p_j to its newest value. Other values, such as gradients, are averaged with weights s_j p_j.

    Arguments:
        buffer: the replies in a round.
        staleness: a in s = (1 + staleness)^-a. With 0, all replies count alike.
        oldest: the largest staleness of a reply that counts. Older replies fill the buffer, but are ignored.
            None: all count.

    Example:
        >>> import numpy as np, rookery as rk
        >>> problem = rk.SingleLevel(lambda x, b: ((x - b) ** 2).mean())
        >>> clients = rk.Clients(upper=[np.ones(3), np.zeros(3), np.ones(3)])
        >>> clock = rk.Clock(compute=[10.0, 10.0, 1.0])
        >>> how = rk.Asynchronous(buffer=1)
        >>> run = rk.solve(problem, clients, rk.FedAvg(step=0.1), 0.0, rounds=4, clock=clock, asynchronous=how)
        >>> run.history["clock"].round(1).tolist()
        [0.0, 0.1, 0.1, 0.2, 0.2]
    """

    buffer: int
    staleness: float = 0.5
    oldest: int | None = None

    def __post_init__(self) -> None:
        if not _is_count(self.buffer, 1):
            raise ValueError(f"Asynchronous: buffer must be an integer of at least 1; got {self.buffer!r}.")
        if not is_number(self.staleness) or self.staleness < 0:
            raise ValueError(f"Asynchronous: staleness must be a number of at least 0; got {self.staleness!r}.")
        if self.oldest is not None and not _is_count(self.oldest, 0):
            raise ValueError(f"Asynchronous: oldest must be an integer of at least 0, or None; got {self.oldest!r}.")

    def weights(self, staleness: Any, dtype: Any) -> Array:
        """Return the factor s by which replies of this staleness count."""
        counts = (1 + jnp.asarray(staleness, dtype)) ** -self.staleness
        return counts if self.oldest is None else jnp.where(staleness <= self.oldest, counts, 0)


def begun_again(key: Array, again: Array) -> Array:
    """Return the key of a client that has begun `again` times before with the same model, so that it draws anew."""
    return jax.lax.select(again == 0, key, jax.random.fold_in(key, again))


def _is_count(value: Any, least: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least
