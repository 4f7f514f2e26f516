"""Clipping and noise: no client moves a result by more than a bound, and what it moved is hidden."""

import functools
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array

from rookery import draws
from rookery.channel import Exchange, Plain


@dataclass(frozen=True)
class Clip(Plain):
    """See `clip`."""

    bound: float

    def encode(self, exchange: Exchange, value: Any, key: Array, state: Any) -> tuple[Any, Any]:
        """value·min(1, bound/‖value‖)."""
        leaves = [a.astype(_precise(a)) for a in jax.tree.leaves(value) if _is_real(a) and a.size]
        if not leaves:
            return value, state
        largest = functools.reduce(jnp.maximum, (jnp.max(jnp.abs(a)) for a in leaves))  # that no square overflows
        scale = jnp.where(largest > 0, largest, 1)
        norm = scale * jnp.sqrt(functools.reduce(jnp.add, (jnp.sum(jnp.square(a / scale)) for a in leaves)))
        factor = jnp.where(norm > self.bound, self.bound / jnp.where(norm > self.bound, norm, 1), 1)
        return jax.tree.map(lambda a: (a * factor).astype(a.dtype) if _is_real(a) else a, value), state


@dataclass(frozen=True)
class Gaussian(Plain):
    """See `gaussian`."""

    multiplier: float
    received: float | None = None  # the bound on what one client sends

    def bounded_by(self, bound: float | None) -> "Gaussian":
        """The same noise for values of at most this norm."""
        if bound is None:
            raise ValueError("rk.gaussian hides values of a known size: put rk.clip(bound) before it in the chain.")
        return replace(self, received=bound)

    def decode(self, exchange: Exchange, total: Any, key: Array, state: Any) -> tuple[Any, Any]:
        """The total plus noise of the standard deviation multiplier · bound · the largest weight of one client."""
        if self.received is None:
            self.bounded_by(None)
        scale = self.multiplier * self.received * exchange.share  # type: ignore[operator]
        leaves, structure = jax.tree.flatten(total)
        keys = jax.random.split(key, max(len(leaves), 1))

        def noisy(a: Array, k: Array) -> Array:
            if not _is_real(a):
                return a
            noise = draws.normals(k, a.shape, _precise(a))
            return (a + scale.astype(_precise(a)) * noise).astype(a.dtype)

        return jax.tree.unflatten(structure, [noisy(a, k) for a, k in zip(leaves, keys, strict=False)]), state


def clip(bound: float) -> Clip:
    """Scale down what a client sends to the norm `bound`, over all its numbers together.

    Of a reply that is an iterate, what is bounded is how far it is from the value that the server sent. Integers in a
    reply (a client's number, places of entries) are sent as they are.
    """
    return Clip(_positive("clip", "bound", bound))


def gaussian(multiplier: float) -> Gaussian:
    """Add normal noise to every result, `multiplier` times as large as what one client can move it by.

    Needs `rk.clip` before it. The noise is drawn by the server, from keys that no client has. How much privacy that
    gives is not computed.
    """
    return Gaussian(_positive("gaussian", "multiplier", multiplier))


def _positive(owner: str, name: str, value: Any) -> float:
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if not number or not 0 < value < float("inf"):
        raise ValueError(f"rk.{owner}: {name}={value!r} is not a positive number.")
    return float(value)


def _is_real(a: Array) -> bool:
    return bool(jnp.issubdtype(a.dtype, jnp.floating))


def _precise(a: Array) -> Any:
    return jnp.promote_types(a.dtype, jnp.float32)
