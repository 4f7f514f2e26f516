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


def as_written(passes: float) -> Fraction:
    """The number that a float stands for: 1/2500 for .0004, 5/3 for 5/3. What rounding added makes no step."""
    exact = Fraction(float(str(passes)))
    for bits in range(64):
        near = exact.limit_denominator(2**bits)
        if abs(near - exact) <= exact / 2**50:
            return near
    return exact


def steps_in(passes: Fraction, batch: int, view: Any) -> Array:
    """⌈passes · size / min(batch, size)⌉ for a traced size, exactly and in 32 bits."""
    size = jnp.asarray(view.size, jnp.int32)
    whole, part = divmod(passes / batch, 1)
    part = _at_least(part, view.widest)  # for no size that there is does it make a difference
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


def _at_least(number: Fraction, most: int) -> Fraction:
    """The smallest fraction that is not below the number, of those whose denominator is at most `most`."""
    near = number.limit_denominator(most)
    if near >= number:
        return near
    p, q = near.numerator, near.denominator  # the next after p/q of these fractions is r/s with rq − ps = 1
    s = most - (most + pow(p, -1, q)) % q
    return Fraction((1 + p * s) // q, s)
