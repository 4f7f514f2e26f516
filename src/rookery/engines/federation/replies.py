"""Checks of sites' replies: each returns what is wrong with a reply, or None."""

import math
from typing import Any

import jax.numpy as jnp
import numpy as np

from rookery.base.printable import printable
from rookery.engines.federation.links import Reply
from rookery.language import ledger
from rookery.language.primitives import accumulator


def wrong_arrays(exchange: str, reply: Reply, shapes: list[Any]) -> str | None:
    """Check that a reply to the exchange of this name has arrays of these shapes and types, and nothing else."""
    if [(a.shape, a.dtype) for a in reply.arrays] != shapes:
        got = [(a.shape, str(a.dtype)) for a in reply.arrays]
        return f"replies to {exchange!r} with {printable(got)}, where the plan has {shapes}."
    if "finite" in reply.header:
        return f"replies to {exchange!r} with more than the plan has"
    return None


def is_forgotten(reply: Reply) -> bool:
    """Return whether a site says that it has no keys for secure sums any more."""
    return reply.header.get("forgotten") is True and not reply.arrays


def unusable_values(exchange: str, reply: Reply) -> str | None:
    """Check that the values of a reply, and their squares, are finite."""
    for array in reply.arrays:
        if jnp.issubdtype(array.dtype, jnp.inexact) and array.size:
            # In the accumulator's precision: squares of float16 are added up in float32.
            most = math.sqrt(float(jnp.finfo(accumulator(array.dtype)).max))
            largest = float(np.max(np.abs(array)))  # NaN if any value is
            if not math.isfinite(largest):
                return f"replies to {exchange!r} with a value that is not finite"
            if largest > most:
                return f"replies to {exchange!r} with a value of {largest:.1e}, too large to compute with"
    return None


def wrong_work(reply: Reply) -> str | None:
    """Check the counts of the work that was done."""

    def fits(entry: Any) -> bool:
        match entry:
            case [number, list(counts)] if len(counts) == len(ledger.WORK):
                return all(map(_is_count, [number, *counts]))
        return False

    work = reply.header.get("work")
    return None if isinstance(work, list) and all(map(fits, work)) else "does not say what work it has done"


def wrong_rounds(site: int, reply: Reply) -> str | None:
    """Check the list of saved rounds."""
    match reply.header:
        case {"why": str()}:
            return None
        case {"rounds": list(rounds), "onwards": bool()} if all(map(_is_count, rounds)):
            return None
    return "does not say which rounds it has saved"


def wrong_finish(reply: Reply, leaves: int) -> str | None:
    """Check the reply to a request that only has the site remember something."""
    finite = reply.header.get("finite", [True] * leaves)
    if reply.arrays or not isinstance(finite, list) or [type(f) for f in finite] != [bool] * leaves:
        return "replies with more than that it remembers"
    return None


def _is_count(number: Any) -> bool:
    return type(number) is int and number >= 0
