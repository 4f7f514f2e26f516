"""The parts of a message: the updates that a channel acts on, and bookkeeping, which it leaves unchanged."""

from collections import OrderedDict
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp

from rookery.language import ledger
from rookery.language.channel import Bookkeeping, ChannelExchange, compresses
from rookery.language.tracing import PerClient


class Parts:
    """Splits the messages of an exchange into parts, and joins them again.

    Arguments:
        like: a message's shapes.
        name: the name of the exchange.
        marks, around: see `bookkeeping` and `around` in `Fed.mean`.
    """

    def __init__(self, like: Any, name: str, marks: Any, around: Any) -> None:
        self._like = jax.tree.leaves(like)
        self._structure = cast(Any, jax.tree.structure(like))
        self._marks = _marks(marks, like, name)
        start = self._structure.flatten_up_to(_spread(around, like))
        self._around = [s if mark is None else None for s, mark in zip(start, self._marks, strict=True)]

    @property
    def bookkeeping(self) -> list[Bookkeeping]:
        """The marks of the bookkeeping, in its order."""
        return [mark for mark in self._marks if mark is not None]

    @property
    def moves(self) -> list[bool]:
        """For each leaf, the updates first and then the bookkeeping, whether it is a difference to `around`."""
        updates = [s is not None for s, mark in zip(self._around, self._marks, strict=True) if mark is None]
        return updates + [False] * len(self.bookkeeping)

    def split(self, value: Any) -> tuple[Any, list[Any]]:
        """The updates, a tree with None in place of bookkeeping, and the bookkeeping."""
        leaves = self._structure.flatten_up_to(value)
        updates = [a if mark is None else None for a, mark in zip(leaves, self._marks, strict=True)]
        bookkeeping = [a for a, mark in zip(leaves, self._marks, strict=True) if mark is not None]
        return jax.tree.unflatten(self._structure, updates), bookkeeping

    def at_client(self, value: Any, above_least: bool = False) -> tuple[Any, list[Any]]:
        """The parts at the client: updates as differences to `around`, and bookkeeping clamped to its bounds.

        With `above_least`, the bookkeeping is what exceeds its lower bound.
        """
        both = zip(self._structure.flatten_up_to(value), self._around, strict=True)
        moves = jax.tree.unflatten(self._structure, [a if s is None else a - s for a, s in both])
        updates, bookkeeping = self.split(moves)
        clamped = [mark.bounded(a) for a, mark in zip(bookkeeping, self.bookkeeping, strict=True)]
        if above_least:
            clamped = [a - jnp.asarray(m.least, a.dtype) for a, m in zip(clamped, self.bookkeeping, strict=True)]
        return updates, clamped

    def at_server(self, updates: Any, bookkeeping: list[Any]) -> Any:
        """Join the parts at the server, and add `around` to the updates."""
        first, second = iter(jax.tree.leaves(updates)), iter(bookkeeping)
        leaves = [next(first) if mark is None else next(second) for mark in self._marks]
        both = zip(leaves, self._around, strict=True)
        moved = [a if s is None else (s + a).astype(a.dtype) for a, s in both]
        return jax.tree.unflatten(self._structure, moved)

    def described(self, record: ledger.Exchange, compressed: bool = False) -> ledger.Exchange:
        """The record with the meaning, shape and bounds of each piece of bookkeeping."""
        record = record._replace(plain_bytes=ledger.nbytes(self._like)) if compressed else record
        both = zip(self._like, self._marks, strict=True)
        pieces = [(mark.what, ledger.shape_of([a]), mark.most, mark.least) for a, mark in both if mark is not None]
        return record._replace(beside=tuple(pieces), updates=len(pieces) < len(self._marks))


class Encoded(NamedTuple):
    """The messages of an exchange."""

    value: PerClient  # with a channel: the encoded updates, and a list of the bookkeeping
    exchange: ChannelExchange
    channel: Any
    parts: Parts
    secure: Any = None  # the channel's secure sum, if it has one
    plain: Any = None  # in a secure sum: what its integers stand for

    def described(self, kind: str, name: str) -> ledger.Exchange:
        """The ledger's record of the exchange."""
        shapes = [jax.ShapeDtypeStruct(v.shape[1:], v.dtype) for v in jax.tree.leaves(self.value.rows)]
        return self.parts.described(described(name, kind, shapes), compresses(self.channel))


def described(name: str, kind: str, shapes: Any) -> ledger.Exchange:
    """The ledger's record of an exchange whose replies have these shapes and types."""
    return ledger.Exchange(name, kind, ledger.shape_of(shapes), ledger.nbytes(shapes))


def _marks(marks: Any, like: Any, name: str) -> list[Any]:
    """The mark of each leaf of `like`, or None; `marks` is a tree like it, or a prefix of it."""
    if marks is None or isinstance(marks, Bookkeeping):
        return [marks] * len(jax.tree.leaves(like))
    if isinstance(marks, tuple | list) and isinstance(like, tuple | list) and len(marks) == len(like):
        return [leaf for mark, part in zip(marks, like, strict=True) for leaf in _marks(mark, part, name)]
    if isinstance(marks, dict) and isinstance(like, dict) and marks.keys() <= like.keys():
        keys = list(like) if isinstance(like, OrderedDict) else sorted(like)  # in JAX's order
        return [leaf for key in keys for leaf in _marks(marks.get(key), like[key], name)]
    raise TypeError(
        f"bookkeeping of the exchange {name!r} must be a tree like the value, with rk.Bookkeeping(...) or None in it; "
        f"got {marks!r}."
    )


def _spread(around: Any, like: Any) -> Any:
    """Extend `around`, a tree like `like` or a prefix of it, to all leaves, with None for those that it leaves out."""
    if around is None:
        return jax.tree.map(lambda _: None, like)
    if isinstance(around, tuple | list) and isinstance(like, tuple | list):
        parts = [_spread(a, l) for a, l in zip(around, like, strict=True)]
        return type(like)(*parts) if hasattr(like, "_fields") else type(like)(parts)
    if isinstance(around, dict) and isinstance(like, dict):
        kind = OrderedDict if isinstance(like, OrderedDict) else dict
        return kind((k, _spread(around.get(k), like[k])) for k in like)
    return around
