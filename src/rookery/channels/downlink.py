"""Compression of what the server sends: `broadcast`."""

from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array

from rookery.base.jaxprs import is_key
from rookery.channels.codecs import Quantize, check_bits, is_packed, packed, unpacked
from rookery.language.channel import Plain

LEAST = 16  # numbers of an array; smaller ones, such as step sizes, are sent as they are


@dataclass(frozen=True)
class Downlink:
    """Packs the server's values."""

    codec: Quantize

    @property
    def in_words(self) -> str:
        """A clause for descriptions of a plan."""
        return f"rounded to {self.codec.bits} bit{'s' * (self.codec.bits > 1)} per number"

    def packs(self, value: Any) -> bool:
        """Return whether a value is sent packed."""
        real = not is_key(value) and jnp.issubdtype(value.dtype, jnp.floating)
        return bool(real and value.size >= LEAST and is_packed(self.codec, value.shape, value.dtype))

    def pack(self, value: Array, key: Array) -> tuple[Array, ...]:
        """At the server: pack a value."""
        return packed(self.codec, value, key, True)

    def unpack(self, arrays: tuple[Array, ...], like: Any) -> Array:
        """At a client: the value, rounded."""
        return unpacked(self.codec, arrays, like, True)


@dataclass(frozen=True)
class Broadcast(Plain):
    """See `broadcast`."""

    bits: int

    def __post_init__(self) -> None:
        check_bits("broadcast", self.bits)

    @property
    def down(self) -> Downlink:
        """The `Downlink` that packs the values sent to clients."""
        return Downlink(Quantize(self.bits))


def broadcast(bits: int = 8) -> Broadcast:
    """Round what the server sends to its clients: each entry of an array x to one of a few levels within max |x|.

    In every round, floating-point arrays of 16 numbers or more are rounded up or down at random, as by `rk.quantize`,
    and sent with `bits` bits per number; all clients of a round are sent the same. The server keeps the exact values:
    an update is the difference from the rounded value that a client was sent, and the server adds it to the exact one.
    Smaller arrays, rows of `fed.scatter`, messages to a centre and everything in the start and in evaluations are sent
    as they are.

    The error is in proportion to the largest entry of x, so that iterates stay at a distance from the solution.

    Arguments:
        bits: 8, 4 or 1.

    Example:
        >>> import rookery as rk
        >>> channel = rk.chain(rk.top_k(0.01), rk.broadcast(bits=8))
    """
    return Broadcast(bits)
