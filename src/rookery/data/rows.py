"""Rows of one data set, a client's view of them, and the minibatches drawn from it."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int

Rows: TypeAlias = Any  # a pytree of arrays with a common leading axis: the samples
Count = int | Int[Array, ""]


class Batch(NamedTuple):
    """Samples for a loss. With a mask, the loss is evaluated row by row and averaged over the marked rows."""

    rows: Rows
    mask: Bool[Array, " rows"] | None = None
    seen: bool = False  # the problem's `features` have been applied
    places: Int[Array, " rows"] | None = None  # the samples' indices in the client's data
    key: Array | None = None  # for a random loss


class Chunks(NamedTuple):
    """A whole data set in masked pieces, for clients of very unequal sizes: get(i) for i < pieces, `total` samples."""

    get: Callable[[Count], Batch]
    pieces: Int[Array, ""]
    total: Int[Array, ""]


def _refuse(self: Any, key: Any = "") -> Any:
    """Raise TypeError where a batch is used as an array. Integer indices work, because a batch is a tuple."""
    if isinstance(key, int | slice):
        return tuple.__getitem__(self, key)
    raise TypeError(
        "A batch is not the samples themselves. Use the client's oracles, e.g. client.g(x, y, batch) or "
        "client.g_y(x, y, batch); batch.rows has the samples of a batch drawn with a size."
    )


for _kind in (Batch, Chunks):
    for _method in ("getitem", "sub", "rsub", "rmul", "truediv", "matmul", "rmatmul", "jax_array"):
        setattr(_kind, f"__{_method}__", _refuse)


@partial(
    jax.tree_util.register_dataclass,
    data_fields=["rows", "offsets", "sizes"],
    meta_fields=["widest", "narrowest", "chunk"],
)
@dataclass(frozen=True)
class ClientRows:
    """One data set of all clients, end to end: client i has rows offsets[i] to offsets[i] + sizes[i].

    `widest`, `narrowest` and `chunk` describe the whole federation, even where `rows` are one client's. The shapes that
    a client computes with follow from them and are therefore the same on every engine.
    """

    rows: Rows
    offsets: Int[Array, " n"]
    sizes: Int[Array, " n"]
    widest: int  # the largest client's number of samples
    narrowest: int  # the smallest client's
    chunk: int | None  # the length of the pieces in which a whole data set is taken; None: in one piece

    def member(self, rows: Rows, offset: Any, size: Any) -> "ClientRows":
        """Return the data set as one client holds it."""
        return ClientRows(rows, offset, size, self.widest, self.narrowest, self.chunk)


def chunk_length(total: int, clients: int, widest: int) -> int | None:
    """Return the length of pieces if the largest client has more than twice the average, else None.

    With pieces, the work of a cohort follows its own largest client, not the federation's.
    """
    average = -(-total // clients)
    return None if widest <= max(2 * average, 32) else max(average, 16)


class View(NamedTuple):
    """One client's part of a ClientRows. Offset and size may be traced; the bounds on the size are static."""

    rows: Rows
    offset: Count
    size: Count
    widest: int
    narrowest: int
    chunk: int | None

    def take(self, index: Int[Array, " rows"]) -> Rows:
        """Return the client's samples at these indices."""
        return _taken(self.rows, self.offset, index)

    def all(self) -> Batch | Chunks:
        """Return the client's whole data set."""
        if self.widest == self.narrowest:  # equal clients: one contiguous slice and no mask
            cut = lambda a: jax.lax.dynamic_slice_in_dim(a, self.offset, self.widest)
            return Batch(jax.tree.map(cut, self.rows), places=jnp.arange(self.widest, dtype=jnp.int32))
        if self.chunk is None:
            return self._piece(0, self.widest)
        chunk = self.chunk
        size = jnp.asarray(self.size)
        return Chunks(lambda i: self._piece(i * chunk, chunk), -(-size // chunk), size)

    def _piece(self, start: Count, length: int) -> Batch:
        index = start + jnp.arange(length, dtype=jnp.int32)
        places = jnp.minimum(index, self.size - 1)
        return Batch(self.take(places), index < self.size, places=places)

    def at_once(self) -> Batch:
        """Return the client's whole data set in one batch, even if most of it is padding."""
        whole = self.all()
        return whole if isinstance(whole, Batch) else self._piece(0, self.widest)

    def draw(self, key: Array, size: int, step: Count, replace: bool, seen: Rows | None = None) -> Batch:
        """Draw the step-th minibatch in the order that the key determines (see `Clients` for the two kinds of order).

        A client with fewer samples than `size` gives as many as it has, in a masked batch: each once or, with
        replacement, that many draws. No batch is longer than the largest client's data.
        """
        size = min(size, self.widest)
        place = jnp.arange(size, dtype=jnp.int32)
        mask = None if self.narrowest >= size else place < self.size
        index = minibatch(key, step, self.size, length=size, replace=replace)
        if seen is None:
            return Batch(self.take(index), mask, places=index)
        return Batch(_taken(seen, 0, index), mask, True, index)


def entries(a: Array, index: Any) -> Array:
    """Return a[index] for indices of at least 0 that are within bounds: fewer operations than indexing takes."""
    return a.at[index].get(mode="promise_in_bounds", wrap_negative_indices=False)


@partial(jax.jit, inline=True)
def _taken(rows: Rows, offset: Count, index: Int[Array, " k"]) -> Rows:
    """The rows at offset + index, which must be among them."""
    at = offset + index
    return jax.tree.map(lambda a: entries(a, at), rows)


@partial(jax.jit, static_argnames=("length", "replace"))
def minibatch(key: Array, step: Count, size: Count, length: int, replace: bool) -> Int[Array, " length"]:
    """Return the indices, in 0..size−1, of the step-th minibatch. (`LoopBody.ahead` knows this function by name.)"""
    place = jnp.arange(length, dtype=jnp.int32)
    size = jnp.asarray(size, jnp.int32)
    if replace:
        return jax.random.randint(jax.random.fold_in(key, step), (length,), 0, size, jnp.int32)
    per_batch = jnp.minimum(length, size)
    position = jnp.asarray(step, jnp.int32) * per_batch + place
    return shuffled(key, position % size, position // size, size)


_SHUFFLE_ROUNDS, _UNROLLED = 24, 6


def shuffled(key: Array, rank: Int[Array, " k"], epoch: Int[Array, " k"], size: Count) -> Int[Array, " k"]:
    """Return the sample at each rank of a pseudo-random order of 0..size−1, one order for each (key, epoch).

    The swap-or-not shuffle of Hoang, Morris and Rogaway (CRYPTO 2012) is a bijection for any size and is computed
    element by element. No permutation is sorted or stored, and clients of different sizes cost the same.
    """
    # Six rounds form one kernel: all 24 would take long to compile, and one each would cost 24 launches. The barriers
    # keep the rounds out of other kernels, which would compute (and compile) them again.
    words = jax.random.key_data(key)
    size = jnp.asarray(size, jnp.int32)
    drift = _mix(epoch.astype(jnp.uint32) ^ words[0]) + words[1]
    turns = np.arange(_SHUFFLE_ROUNDS, dtype=np.uint32)[:, None]
    # Every group of rounds reverses the order of its numbers. Without that, a CPU would write the result in place of
    # the loop's carry, and LLVM does not vectorise a loop whose output overlaps its input: it would take eight times as
    # long.
    backwards = turns // _UNROLLED % 2 == 0
    salts = _mix(jnp.where(backwards, drift[::-1], drift) + turns * np.uint32(0x9E3779B9))
    fractions = (salts >> 8).astype(jnp.float32) * np.float32(2.0**-24)
    pivots = jnp.minimum((fractions * size.astype(jnp.float32)).astype(jnp.int32), size - 1)
    salts, pivots = jax.lax.optimization_barrier(((~salts).astype(jnp.int32), pivots))
    # The loop body appears six times in the program, so it is kept small: each constant is a row of numbers (derived
    # from the salts, so that it is vectorised as they are), operations are plain ones on signed words, and only what
    # determines a hash's first bit is computed.
    zero = salts[:1] & 0
    size, *constants = (zero + value for value in (size, 16, 15, *(int(f.view(np.int32)) for f in _FACTORS)))
    sixteen, fifteen, *factors = constants

    def rounds(x: Array, drawn: tuple[Array, Array]) -> tuple[Array, None]:
        x = jax.lax.rev(x, (1,))
        for turn in range(_UNROLLED):
            salt, pivot = (jax.lax.slice_in_dim(each, turn, turn + 1) for each in drawn)
            partner = pivot - x
            partner = jax.lax.select(jax.lax.lt(partner, zero), partner + size, partner)
            h = jax.lax.max(x, partner) ^ salt
            h = (h ^ jax.lax.shift_right_logical(h, sixteen)) * factors[0]
            h = (h ^ jax.lax.shift_right_logical(h, fifteen)) * factors[1]
            x = jax.lax.select(jax.lax.lt(h, zero), partner, x)
        return x, None

    grouped = lambda each: each.reshape(-1, _UNROLLED, *each.shape[1:])
    x, _ = jax.lax.scan(rounds, zero + rank.astype(jnp.int32), (grouped(salts), grouped(pivots)))
    return jax.lax.optimization_barrier(x[0])


_FACTORS = np.uint32(0x7FEB352D), np.uint32(0x846CA68B)


def _mix(h: Array) -> Array:
    """Apply a 32-bit finaliser: every input bit reaches every output bit."""
    h = (h ^ (h >> 16)) * _FACTORS[0]
    h = (h ^ (h >> 15)) * _FACTORS[1]
    return h ^ (h >> 16)
