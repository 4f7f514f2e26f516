"""Oracles that are private for each record: clipped record by record, added up, and hidden by noise, at the client.

All that a client computes from its data then comes from such sums, and reveals no more than they do.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array

from rookery.base import compat, draws, tree
from rookery.base.factors import Values
from rookery.data.rows import Count, View

LEVELS = ("lower", "upper")  # a record belongs to one of them; the centre's data count as upper ones
OVERFLOW = 1e-12  # the probability that a minibatch has more records than there are places
_NUMBERS = 2**21  # that are kept of records whose values are computed side by side

# Marks what is released of a client's records, so that the account can find it in the plan. It changes no value.
release = compat.Primitive("release")
release.multiple_results = True
release.def_impl(lambda *values, **_: list(values))
release.def_abstract_eval(lambda *values, **_: list(values))
compat.lower_as(release, lambda *values, **_: list(values))
compat.batch_elementwise(release)


@dataclass(frozen=True, eq=False)
class Drawn:
    """Records for an oracle: those of `view` at index[:count]. Only oracles see them.

    Attributes:
        view: the client's data.
        index, count: the records.
        expected: the expected number of records, a public number by which a mean divides.
        level: "lower" or "upper".
        number: the number of the draw, in this function.
        chance: the probability that a record is drawn, at the client with the fewest records.
        depth: the number of loops around the draw.
        size: the expected number of records, if the client has as many; None: all.
        key: for a random loss.
    """

    view: View
    index: Array
    count: Count
    expected: Any
    level: str
    number: int
    chance: float
    depth: int
    size: int | None
    key: Any = None

    @property
    def rows(self) -> Any:
        """Raise ValueError: only oracles see the records."""
        raise ValueError(
            "A method must use only means over samples in a run that is private for each record; this one uses "
            "batch.rows, single samples."
        )


class Block(NamedTuple):
    """An oracle's part of a release. A product is bounded relative to the norm of the public vector `times`."""

    oracle: str
    times: Any = None


class Records:
    """Draws records and releases what oracles compute from them, inside one function of a client.

    Arguments:
        bound: bound(oracle) -> the largest norm of one record's value.
        key: from the client's own entropy.
        levels: the noise multipliers of the two levels.
    """

    def __init__(self, bound: Callable[[str], float], key: Array, levels: Array) -> None:
        self._bound, self._key, self._levels = bound, key, levels
        self._used = 0  # numbers of keys
        self._draws = 0
        self._loops: list[int | None] = []  # bounds on the turns of the loops around the current step
        self._known: list[tuple[Any, ...]] = []  # the minibatches drawn so far that the current step can see

    def enter(self, i: Any, most: int | None) -> tuple[Any, ...]:
        """Enter turn i of a loop of at most `most` turns. Returns the argument of `leave`."""
        before = self._key, list(self._known)
        self._key = jax.random.fold_in(self._next_key(), i)
        self._loops.append(most)
        return before

    def leave(self, before: tuple[Any, ...]) -> None:
        """Leave the loop."""
        self._key, self._known = before
        self._loops.pop()

    def _next_key(self) -> Array:
        self._used += 1
        return jax.random.fold_in(self._key, self._used)

    def all(self, view: View, level: str) -> Drawn:
        """Return all records."""
        self._draws += 1
        index = jnp.arange(view.widest, dtype=jnp.int32)
        expected = jnp.asarray(view.size)
        return Drawn(view, index, view.size, expected, level, self._draws, 1.0, len(self._loops), None)

    def minibatch(self, view: View, level: str, size: int, key: Any, step: Any) -> Drawn:
        """Draw each record with the same probability, so that `size` are expected, from the client's own entropy.

        A call with the same key and step, as values of the trace, has the same minibatch. Any other call has a draw of
        its own, which the account relies on.
        """
        for known, drawn in self._known:
            if known[:2] == (level, size) and known[2] is key and (known[3] is step or _equal(known[3], step)):
                return drawn
        rate = jnp.minimum(1.0, size / jnp.asarray(view.size, jnp.float32))
        coins = draws.coins(self._next_key(), rate, (view.widest,)) & (jnp.arange(view.widest) < view.size)
        places = _places(size, view.widest)
        order = jnp.cumsum(coins) - 1
        index = (
            jnp.zeros(places, jnp.int32)
            .at[jnp.where(coins, order, places)]
            .set(jnp.arange(view.widest, dtype=jnp.int32), mode="drop")
        )
        count, expected = jnp.minimum(jnp.sum(coins, dtype=jnp.int32), places), jnp.minimum(size, view.size)
        self._draws += 1
        chance = min(1.0, size / view.narrowest)
        drawn = Drawn(view, index, count, expected, level, self._draws, chance, len(self._loops), size)
        self._known.append(((level, size, key, step), drawn))
        return drawn

    def mean(self, drawn: Drawn, one: Callable[[Any, Any], Any], blocks: tuple[Block, ...]) -> Any:
        """Release the mean of one(row, key) over the records drawn.

        The value of a record has a part for each block, in units of its bound. It is clipped as a whole, so that a
        record changes the sum by at most 1, and the noise is in the same units.
        """
        units, pairs = [self._unit(block) for block in blocks], partial(zip, strict=True)

        def of_record(row: Any, key: Any) -> Any:
            value = one(jax.tree.map(lambda a: a[None], row), key)
            return (value,) if len(blocks) == 1 else tuple(value)

        total, like = _total(drawn, of_record, units)
        level = self._levels[LEVELS.index(drawn.level)]
        leaves, structure = jax.tree.flatten(total)
        noisy = [a + level.astype(a.dtype) * n for a, n in pairs(leaves, draws.normals_like(self._next_key(), leaves))]
        inside = self._loops[drawn.depth :]
        marked = release.bind(
            *noisy, level=drawn.level, draw=drawn.number, chance=drawn.chance, size=drawn.size, times=_product(inside),
            drawn=_product(self._loops[: drawn.depth]), oracles=tuple(block.oracle for block in blocks),
        )  # fmt: skip
        restored = [
            jax.tree.map(lambda a, to, u=unit: (a * (u / drawn.expected).astype(a.dtype)).astype(to.dtype), *both)
            for *both, unit in pairs(jax.tree.unflatten(structure, marked), like, units)
        ]
        return restored[0] if len(blocks) == 1 else tuple(restored)

    def _unit(self, block: Block) -> Array:
        bound = jnp.asarray(self._bound(block.oracle), jnp.float32)
        if block.times is None:
            return bound
        size = tree.norm(block.times).astype(jnp.float32)
        return bound * jnp.where((size > 0) & jnp.isfinite(size), size, 1)


def _total(drawn: Drawn, one: Callable[[Any, Any], Any], units: Sequence[Array]) -> tuple[Any, Any]:
    """Return the sum over the records drawn of one(row, key), in units, clipped to a norm of 1; and its types."""
    places = drawn.index.shape[0]
    row = jax.tree.map(lambda a: a[0], drawn.view.take(drawn.index[:1]))
    values = Values(one, row, drawn.key)
    per_leaf = [u for unit, part in zip(units, values.shapes, strict=True) for u in [unit] * len(jax.tree.leaves(part))]
    together = min(places, max(1, _NUMBERS // max(1, values.numbers)))

    def piece(i: Any) -> Any:
        place = i * together + jnp.arange(together, dtype=jnp.int32)
        rows = drawn.view.take(drawn.index[jnp.minimum(place, places - 1)])
        keys = None if drawn.key is None else jax.vmap(lambda j: jax.random.fold_in(drawn.key, j))(place)
        found = values.of(rows, keys)
        norms = values.norms(found, per_leaf)
        valid = (place < drawn.count) & jnp.isfinite(norms)
        return values.sums(found, per_leaf, jnp.where(valid, 1 / jnp.maximum(norms, 1), 0))

    if places <= together:
        return piece(jnp.int32(0)), values.shapes
    zeros = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), jax.eval_shape(piece, jnp.int32(0)))
    pieces = -(-jnp.asarray(drawn.count, jnp.int32) // together)
    return jax.lax.fori_loop(0, pieces, lambda i, total: tree.add(total, piece(i)), zeros), values.shapes


def _product(bounds: list[int | None]) -> int | None:
    """The product of bounds; None if one of them is not known."""
    total = 1
    for bound in bounds:
        if bound is None:
            return None
        total *= bound
    return total


def _equal(a: Any, b: Any) -> bool:
    return isinstance(a, int) and isinstance(b, int) and a == b


@cache
def _places(size: int, widest: int) -> int:
    """How many places a minibatch of this expected size needs.

    A client with n records draws Binomial(n, size/n) of them; its tail is heaviest for the client with the most
    (Anderson and Samuels, 1967).
    """
    from scipy.stats import binom  # slow to import

    return int(min(widest, binom.isf(OVERFLOW, widest, min(1.0, size / widest)) + 1))
