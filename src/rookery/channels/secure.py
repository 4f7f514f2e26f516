"""Secure sums: clients send integers that can be added up without anyone seeing a single reply."""

import math
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array

from rookery.base.arguments import is_integer, is_number
from rookery.language.channel import Bookkeeping, ChannelExchange, Plain
from rookery.language.primitives import result_type

_SIGNED = {16: jnp.int16, 32: jnp.int32, 64: jnp.int64}
_UNSIGNED = {16: jnp.uint16, 32: jnp.uint32, 64: jnp.uint64}
_FEWEST = 3  # clients: with two, each could subtract its own reply from the sum


class FixedPoint(NamedTuple):
    """How one array is written as integers.

    Attributes:
        bound: the largest absolute value.
        unit: what the integer 1 stands for.
        dtype: the type of the array.
    """

    bound: float
    unit: float
    dtype: Any


@dataclass(frozen=True)
class SecureSum(Plain):
    """See `secure_sum`."""

    bits: int = 32
    unit: float | None = None
    threshold: int | None = None
    received: float | None = None  # the bound on one client's message

    def bounded_by(self, bound: float | None) -> "SecureSum":
        """Return the same sum for values of at most this norm."""
        if bound is None:
            raise ValueError(
                "rk.secure_sum needs a bound on the values, from which its integers follow. Put rk.clip(bound) before "
                "it in a chain."
            )
        return replace(self, received=bound)

    @property
    def secure(self) -> "SecureSum":
        """The channel itself; see `Chain.secure`."""
        return self

    def init(self, exchange: ChannelExchange) -> tuple[Any, Any]:
        if self.received is None:
            self.bounded_by(None)
        if exchange.kind in ("gather", "center"):
            what = (
                "gathers single replies" if exchange.kind == "gather" else "asks the one client with the centre's data"
            )
            raise ValueError(
                f"rk.secure_sum shows the server only sums, and the exchange {exchange.name!r} {what}. Choose another "
                "method, or give channels by name: channel={'x': rk.chain(...)}."
            )
        return (), ()

    def fewest(self, clients: int) -> int:
        """Return the fewest replies that are added up: two thirds of the cohort, unless a number was given.

        It takes the same number of sites to reveal a mask. Because they are more than half, a coordinator that tells
        sites different things can't have both parts of a mask revealed.
        """
        if clients < _FEWEST:
            raise ValueError(
                f"rk.secure_sum needs at least {_FEWEST} clients in an exchange, because with two sites each could "
                f"subtract its own reply; got {clients}."
            )
        if self.threshold is None:
            return -(-2 * clients // 3)
        if not clients < 2 * self.threshold <= 2 * clients:
            raise ValueError(
                f"rk.secure_sum: threshold must be more than half of the {clients} clients of an exchange, and at most "
                f"all; got {self.threshold}."
            )
        return self.threshold

    def plain(self, name: str, message: Any, marks: list[Bookkeeping], clients: int) -> Any:
        """Return the `FixedPoint` of each array of a message; raise ValueError if its integers have no bound.

        Arguments:
            name: the name of the exchange.
            message: the updates, and a list of the bookkeeping.
            marks: how each array of the bookkeeping is marked.
            clients: the number of clients in the cohort.
        """
        self.fewest(clients)
        updates, marked = message
        for mark in marks:
            if mark.most is None:
                raise ValueError(
                    f"rk.secure_sum needs bounds from which its integers follow, and the exchange {name!r} carries "
                    f"bookkeeping without one ({mark.what}). Choose another method or setting."
                )
        of = lambda bound, a: FixedPoint(bound, self._unit(bound, clients, name), a.dtype)
        points = [of(mark.most or 1.0, a) for mark, a in zip(marks, marked, strict=True)]
        return jax.tree.map(lambda a: of(self.received, a), updates), points

    def _unit(self, bound: float, clients: int, name: str) -> float:
        """Return what the integer 1 stands for: the smallest power of two with which no sum can overflow."""
        most = 2 ** (self.bits - 1) - 1
        overflows = lambda unit: clients * (bound / unit + 1) > most
        if self.unit is not None:
            if overflows(self.unit):
                raise ValueError(
                    f"rk.secure_sum: unit must be so large that the sum of {clients} clients with values of up to "
                    f"{bound:g} fits {self.bits} bits, in the exchange {name!r}; got {self.unit:g}. Leave it out."
                )
            return self.unit
        room = most / clients - 1
        if room < 1:
            raise ValueError(
                f"rk.secure_sum: bits={self.bits} are too few for the sum of {clients} clients. Give more bits."
            )
        unit = 2.0 ** math.ceil(math.log2(bound / room))
        unit = 2 * unit if overflows(unit) else unit
        if not 1e-30 < unit < 1e30:
            raise ValueError(
                f"rk.secure_sum needs a bound that single precision can scale, in the exchange {name!r}; got {bound:g}."
            )
        return unit

    def integers(self, plain: Any, message: Any, weight: Array, key: Array) -> Any:
        """Return the message as integers modulo 2^bits, with the client's weight in them.

        `weight` is relative to the largest of the cohort. With 16 bits, rounding is random and unbiased.
        """
        values, structure = jax.tree.flatten(message)
        points = jax.tree.leaves(plain, is_leaf=_is_point)
        each = zip(values, points, strict=True)
        return jax.tree.unflatten(
            structure, [self._integer(a, p, weight, jax.random.fold_in(key, i)) for i, (a, p) in enumerate(each)]
        )

    def _integer(self, value: Array, point: FixedPoint, weight: Array, key: Array) -> Array:
        kind = jnp.promote_types(value.dtype, jnp.float64 if self.bits == 64 else jnp.float32)
        limited = jnp.clip(value.astype(kind), -point.bound, point.bound) * weight.astype(kind)
        scaled = jnp.where(jnp.isfinite(limited), limited, 0) * (1 / point.unit)
        if self.bits < 32:
            scaled = jnp.floor(scaled + jax.random.uniform(key, scaled.shape, jnp.float32).astype(kind))
        signed = jnp.round(scaled).astype(_SIGNED[self.bits])
        return jax.lax.bitcast_convert_type(signed, _UNSIGNED[self.bits])

    def values(self, plain: Any, sums: Any, factor: Array) -> Any:
        """Return the numbers that sums of such integers stand for, times a factor."""
        totals, structure = jax.tree.flatten(sums)
        points = jax.tree.leaves(plain, is_leaf=_is_point)
        each = zip(totals, points, strict=True)
        return jax.tree.unflatten(structure, [self._value(a, p, factor) for a, p in each])

    def _value(self, total: Array, point: FixedPoint, factor: Array) -> Array:
        kind = jnp.promote_types(point.dtype, jnp.float32)
        signed = jax.lax.bitcast_convert_type(total, _SIGNED[self.bits])
        return (signed.astype(kind) * point.unit * factor.astype(kind)).astype(result_type(point.dtype))


def secure_sum(bits: int = 32, unit: float | None = None, threshold: int | None = None) -> SecureSum:
    """Add up clients' updates so that the server sees only the sum: `rk.chain(rk.clip(1.0), rk.secure_sum())`.

    Clients multiply their updates by their weights and round them to integers modulo 2^bits. In a federation over a
    network, and in `rk.Federation()`, each site hides its integers under masks that cancel in the sum (Bonawitz et al.,
    2017), and the coordinator receives numbers that look random. A simulation rounds in the same way, without masks. A
    secure sum must be the last member of a chain, after `rk.clip`, whose bound fixes the integers.

    If sites drop out in the middle of an exchange, the sum is over the remaining ones. With fewer replies than the
    threshold, nothing is revealed and the round fails. The following are refused before the run: methods that gather
    single replies, a centre held by a client, bookkeeping without a bound, channels that reduce single replies, fewer
    than three clients, cohorts drawn with replacement, and integers that could overflow.

    Arguments:
        bits: 16, 32 or 64 (which needs `jax_enable_x64`). With 16 bits a message is half as long, and rounding is
            random and unbiased.
        unit: what the integer 1 stands for. None: the smallest power of two with which no sum can overflow.
        threshold: the fewest sites whose replies are added up, more than half of the cohort. None: two thirds.

    Example:
        >>> import rookery as rk
        >>> channel = rk.chain(rk.clip(1.0), rk.secure_sum())
        >>> channel.secure.fewest(10)
        7
    """
    if bits not in _SIGNED or isinstance(bits, bool):
        raise ValueError(f"rk.secure_sum: bits must be 16, 32 or 64; got {bits!r}.")
    if bits == 64 and not jax.config.jax_enable_x64:  # type: ignore[attr-defined]
        raise ValueError("rk.secure_sum: bits=64 needs JAX's 64-bit types. Set jax_enable_x64, or give bits=32.")
    if unit is not None and (not is_number(unit) or not 0 < unit < math.inf):
        raise ValueError(f"rk.secure_sum: unit must be a positive number, or None; got {unit!r}.")
    if threshold is not None and (not is_integer(threshold) or threshold < 2):
        raise ValueError(f"rk.secure_sum: threshold must be an integer of at least 2, or None; got {threshold!r}.")
    return SecureSum(int(bits), None if unit is None else float(unit), None if threshold is None else int(threshold))


def _is_point(value: Any) -> bool:
    return isinstance(value, FixedPoint)
