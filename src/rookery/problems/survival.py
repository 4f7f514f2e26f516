"""Survival analysis: Cox's loss and the concordance index."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float


def cox_losses(scores: Float[Array, " n"], event: Float[Array, " n"], time: Float[Array, " n"]) -> Float[Array, " n"]:
    """Return each row's part of Cox's negative log partial likelihood; a score is a log hazard.

    It is log Σ_j exp(s_j) − s_i for a row with an event, over the rows j that are still at risk at time T_i, otherwise
    0. Ties are not corrected: of rows with the same time, the later one has the earlier one in its risk set, and not
    the reverse. Because of the risk sets, the sum is not a mean over rows that can be computed row by row.
    """
    place = jnp.arange(len(time))
    before = (time[None] == time[:, None]) & (place[None] <= place[:, None])
    at_risk = (time[None] > time[:, None]) | before
    everyone = jnp.broadcast_to(scores, at_risk.shape)
    return event * (jax.nn.logsumexp(everyone, axis=1, where=at_risk) - scores)


def concordance(scores: Float[Array, " n"], event: Float[Array, " n"], time: Float[Array, " n"]) -> Float[Array, ""]:
    """Return the C-index: the share of comparable pairs whose scores are in the right order; a tie counts ½.

    A pair (i, j) is comparable if i has an event, and j a later time or the same time and no event; the order is right
    if s_i > s_j. Two events at the same time are not compared. Without a comparable pair the index is NaN.
    """
    dead = event > 0
    later = (time[None] > time[:, None]) | ((time[None] == time[:, None]) & ~dead[None])
    pairs = dead[:, None] & later
    right = 0.5 * (1 + jnp.sign(scores[:, None] - scores[None]))
    return jnp.sum(right, where=pairs) / jnp.sum(pairs)
