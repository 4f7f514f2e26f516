"""Local steps given as passes over a client's data, counted exactly."""

from dataclasses import dataclass
from fractions import Fraction
from math import ceil
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array


@dataclass(frozen=True)
class Epochs:
    """A number of local steps given as passes over the client's data: τ_i = ⌈passes · size_i / batch⌉, exactly.

    A client with fewer samples than the batch takes ⌈passes⌉ steps, as does every client without minibatches.
    """

    passes: float

    def steps(self, batch: int | None, view: Any) -> tuple[int, Any]:
        """The most steps that any client takes, and those of the client with this view of its data."""
        passes = _as_written(self.passes)
        most = ceil(passes if batch is None else passes * view.widest / min(batch, view.widest))
        if most >= 2**31:
            batches = "" if batch is None else f" with batches of {batch}"
            raise ValueError(f"{self}{batches} makes {most} steps; at most 2**31 - 1 are allowed.")
        if batch is None or view.widest == view.narrowest or view.widest <= batch:
            return most, most
        return most, _steps_in(passes, batch, view)


def _as_written(passes: float) -> Fraction:
    """The number that a float stands for, without rounding errors: 1/2500 for .0004, 5/3 for 5/3."""
    exact = Fraction(float(str(passes)))
    for bits in range(64):
        near = exact.limit_denominator(2**bits)
        if abs(near - exact) <= exact / 2**50:
            return near
    return exact


def _steps_in(passes: Fraction, batch: int, view: Any) -> Array:
    """⌈passes · size / min(batch, size)⌉ for a traced size, exactly and in 32 bits."""
    size = jnp.asarray(view.size, jnp.int32)
    whole, part = divmod(passes / batch, 1)
    part = _rounded_up(part, view.widest)  # makes no difference for sizes up to the largest
    a, b = part.numerator, part.denominator
    if a * view.widest < 2**31:
        count = -(-a * size // b)
    else:  # ⌊a · size / b⌋ bit by bit: the quotient so far, and a remainder below b
        quotient, rest = jnp.zeros_like(size), jnp.zeros(size.shape, jnp.uint32)
        bound = np.uint32(b)
        for bit in reversed(range(view.widest.bit_length())):
            quotient, rest = 2 * quotient, 2 * rest
            for more in (np.uint32(0), (size.astype(jnp.uint32) >> bit & 1) * np.uint32(a)):
                rest = rest + more
                quotient, rest = quotient + (rest >= bound), jnp.where(rest >= bound, rest - bound, rest)
        count = quotient + (rest > 0)
    count = whole * size + count.astype(jnp.int32)
    return count if view.narrowest >= batch else jnp.where(size < batch, ceil(passes), count)


def _rounded_up(number: Fraction, most: int) -> Fraction:
    """The smallest fraction of at least this number with a denominator of at most `most`."""
    near = number.limit_denominator(most)
    if near >= number:
        return near
    p, q = near.numerator, near.denominator  # the next such fraction after p/q is r/s with rq − ps = 1
    s = most - (most + pow(p, -1, q)) % q
    return Fraction((1 + p * s) // q, s)
