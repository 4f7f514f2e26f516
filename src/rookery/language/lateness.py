"""Late replies: which replies arrive in time, and each client's chance to be in time."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from rookery.base.printable import first_few
from rookery.language.channel import Faults


def heard(
    seconds: Array, present: Array | None, deadline: float | None, first: int | None, key: Array | None
) -> tuple[Array | None, Array]:
    """Return which replies arrive in time (None: all), and how long the server waits for them.

    Arguments:
        seconds: when the reply of each client of a cohort would arrive.
        present: which replies are not lost; None: all.
        deadline: the seconds after which the server stops waiting; None: never.
        first: the number of replies after which it stops waiting; None: all.
        key: breaks ties between replies that arrive together.
    """
    if present is None:
        return None, jnp.max(seconds)
    due = jnp.where(present, seconds, jnp.inf)
    if first is not None and first < len(seconds):
        assert key is not None
        by_chance = jax.random.permutation(key, len(seconds))
        due = jnp.where(jnp.argsort(jnp.lexsort((by_chance, due))) < first, due, jnp.inf)
    if deadline is None:
        end = jnp.max(jnp.where(jnp.isfinite(due), due, 0))
    else:
        late = jnp.any(jnp.isfinite(due) & (due > deadline))
        due = jnp.where(due <= deadline, due, jnp.inf)
        end = jnp.where(late, deadline, jnp.max(jnp.where(jnp.isfinite(due), due, 0)))
    return jnp.isfinite(due), end


def chances(times: np.ndarray, cohort: int, deadline: float | None, first: int | None, dropout: float) -> np.ndarray:
    """Return each client's chance to be in time, provided that it is asked and its reply is not lost.

    The chances are exact, and means over the first axis of `times`. A client is among the first if fewer than `first`
    others of its cohort, which is drawn uniformly, are faster and reply.

    Arguments:
        times: see `Watch.times`.
        cohort: how many clients are asked.
        deadline, first, dropout: see `Faults`.
    """
    n = times.shape[-1]
    by_rank = np.ones(n) if first is None or first >= cohort else _by_rank(n, cohort, first, dropout)

    def of_row(row: np.ndarray) -> np.ndarray:
        _, place, count = np.unique(row, return_inverse=True, return_counts=True)
        return (np.add.reduceat(by_rank, np.cumsum(count) - count) / count)[place]  # ties are broken by chance

    chance = np.apply_along_axis(of_row, -1, times)
    return np.mean(chance if deadline is None else np.where(times <= np.float32(deadline), chance, 0), axis=0)


def _by_rank(n: int, cohort: int, first: int, dropout: float) -> np.ndarray:
    """The chance to be among the first for the fastest client, the second fastest and so on, given that it replies."""
    from scipy.special import gammaln  # slow to import
    from scipy.stats import binom

    others = np.arange(cohort)  # how many other clients of the cohort reply
    shares = binom.pmf(others, cohort - 1, 1 - dropout)
    choose = lambda a, b: gammaln(a + 1) - gammaln(b + 1) - gammaln(a - b + 1)
    total = np.zeros(n)
    for replies, share in zip(others, shares, strict=True):
        if replies < first:
            total += share
        elif share > _NEGLIGIBLE:  # the sum over the rank of the `first`-th reply among all others
            rank = np.arange(first - 1, n - 1 - (replies - first))
            last = choose(rank, first - 1) + choose(n - 2 - rank, replies - first) - choose(n - 1, replies)
            by_rank = np.zeros(n)
            by_rank[rank] = np.exp(last)
            total += share * np.cumsum(by_rank[::-1])[::-1]
    return total


_NEGLIGIBLE = 1e-15


def checked_chances(
    times: np.ndarray, cohort: int, faults: Faults, exchange: str, names: Sequence[str]
) -> tuple[np.ndarray, list[int]]:
    """Return each client's chance to be heard in time, and the clients that never are.

    Raise ValueError if too few clients can ever reply in time or, with `faults.correct`, if one of them never can.
    """
    n = len(names)
    soonest = np.sort(times.min(axis=tuple(range(times.ndim - 1))))[min(faults.minimum, n) - 1]
    if faults.deadline is not None and not soonest <= np.float32(faults.deadline):
        raise ValueError(
            f"faults: deadline must leave at least {faults.minimum} of the clients the time to reply; got "
            f"{faults.deadline:g} s, and the exchange {exchange!r} takes them {soonest:.3g} s. Give a longer deadline."
        )
    chance = (1 - faults.dropout) * chances(times, cohort, faults.deadline, faults.first, faults.dropout)
    by_client = chance.reshape(-1, n)
    never = np.flatnonzero(by_client.min(axis=0) == 0).tolist()
    if faults.correct and never:
        raise ValueError(
            f"faults: correct needs a chance for each client to be heard; {len(never)} of {n} are always too late for "
            f"the exchange {exchange!r}: {first_few([names[i] for i in never])}. Give them speeds that vary from round "
            "to round, or leave correct out."
        )
    return chance, np.flatnonzero(by_client.max(axis=0) == 0).tolist()


def uncorrected(name: str, why: str) -> str:
    """Return the message that the bias of an exchange cannot be corrected."""
    return (
        "faults: correct must be False with this method and channel, because only means with the clients' own weights "
        f"can be corrected, and the exchange {name!r} {why}. Leave correct out."
    )
