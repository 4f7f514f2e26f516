"""Clipping and noise: a bound on one client's effect on a result, and noise that hides the effect."""

from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array

from rookery.base import draws, tree
from rookery.base.arguments import is_number
from rookery.language.channel import ChannelExchange, Plain


@dataclass(frozen=True)
class Clip(Plain):
    """See `clip`."""

    bound: float

    def encode(self, exchange: ChannelExchange, value: Any, key: Array, state: Any) -> tuple[Any, Any]:
        """Return value·min(1, bound/‖value‖), or zero: see `tree.clipped`."""
        _numbers(exchange, value, "clip")
        return tree.clipped(value, self.bound), state


@dataclass(frozen=True)
class Gaussian(Plain):
    """See `gaussian`."""

    multiplier: float
    received: float | None = None  # the bound on one client's message

    def bounded_by(self, bound: float | None) -> "Gaussian":
        """Return the same noise for values of at most this norm."""
        if bound is None:
            raise ValueError("rk.gaussian needs a bound on the values. Put rk.clip(bound) before it in the chain.")
        return replace(self, received=bound)

    def decode(self, exchange: ChannelExchange, total: Any, key: Array, state: Any) -> tuple[Any, Any]:
        """Add noise with the standard deviation multiplier · bound · the largest weight of one client."""
        if self.received is None:
            self.bounded_by(None)
        scale = self.multiplier * self.received * exchange.share  # type: ignore[operator]
        _numbers(exchange, total, "gaussian")
        return noisy(total, scale, key), state


def noisy(total: Any, scale: Array, key: Array) -> Any:
    """Add normal noise with this standard deviation to every number."""
    leaves, structure = jax.tree.flatten(total)
    pairs = zip(leaves, draws.normals_like(key, leaves), strict=True)
    return jax.tree.unflatten(structure, [(a + scale.astype(n.real.dtype) * n).astype(a.dtype) for a, n in pairs])


def clip(bound: float) -> Clip:
    """Scale what a client sends down to the norm `bound`, over all its numbers together.

    If a reply is an iterate, its distance from the value that the server sent is bounded. An update with an entry that
    is not finite counts as zero; so does, in single precision, an update 10¹⁹ times as large as the bound. Integers
    cannot be scaled: a method that sends them marks them as `rk.Bookkeeping`, which has its own bound.
    """
    return Clip(_positive("clip", "bound", bound))


def gaussian(multiplier: float) -> Gaussian:
    """Add normal noise to every result; its standard deviation is `multiplier` times the largest effect of one client.

    It needs `rk.clip` before it. The server draws the noise from its own entropy, so that no participant can reproduce
    it; see `noise_seed` in `rk.solve`. Bookkeeping gets no noise. The resulting privacy is
    not computed; `rk.private` keeps to a budget.
    """
    return Gaussian(_positive("gaussian", "multiplier", multiplier))


def _positive(owner: str, name: str, value: Any) -> float:
    if not is_number(value) or value <= 0:
        raise ValueError(f"rk.{owner}: {name} must be a positive number; got {value!r}.")
    return float(value)


def _numbers(exchange: ChannelExchange, value: Any, owner: str) -> list[Array]:
    """Return the leaves; raise TypeError unless all are floating-point."""
    leaves = jax.tree.leaves(value)
    for leaf in leaves:
        if not jnp.issubdtype(leaf.dtype, jnp.inexact):
            raise TypeError(
                f"rk.{owner} needs floating-point updates, but the exchange {exchange.name!r} sends {leaf.dtype}. Mark "
                "that part of the message in the method with bookkeeping=(None, rk.Bookkeeping(...))."
            )
    return leaves
