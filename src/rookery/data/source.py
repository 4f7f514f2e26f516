"""Rows of one level: joined and checked, a client's view of them, and the minibatches drawn from it."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int

from rookery.base import tree
from rookery.base.arguments import kind_of
from rookery.base.placement import HostArray, on_host

Rows: TypeAlias = Any  # a pytree of arrays with a common leading axis: the samples
Count = int | Int[Array, ""]


class Batch(NamedTuple):
    """Samples for a loss. With a mask, only the marked rows count and the loss is their mean, row by row."""

    rows: Rows
    mask: Bool[Array, " rows"] | None = None
    seen: bool = False  # the problem's `features` have been applied
    places: Int[Array, " rows"] | None = None  # which of the client's samples they are
    key: Array | None = None  # for a loss that is random


class Chunks(NamedTuple):
    """A whole data set in masked pieces, for clients of very unequal sizes: get(i) for i < pieces, `total` samples."""

    get: Callable[[Count], Batch]
    pieces: Int[Array, ""]
    total: Int[Array, ""]


def _refuse(self: Any, key: Any = "") -> Any:
    """The methods of an array, which a batch does not have; a tuple's own take integers."""
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
class Source:
    """One data set of every client, end to end: client i has rows offsets[i] to offsets[i] + sizes[i].

    `widest`, `narrowest` and `chunk` describe the whole federation, also in a `Source` that holds one client's rows
    alone: the shapes that a client computes with follow from them, and are the same on every engine.
    """

    rows: Rows
    offsets: Int[Array, " n"]
    sizes: Int[Array, " n"]
    widest: int  # the largest client's number of samples
    narrowest: int  # the smallest client's
    chunk: int | None  # the length of the pieces a whole data set is taken in; None: at once

    def member(self, rows: Rows, offset: Any, size: Any) -> "Source":
        """The same data set as one client has it."""
        return Source(rows, offset, size, self.widest, self.narrowest, self.chunk)


def chunk_length(total: int, clients: int, widest: int) -> int | None:
    """Pieces are taken where the largest client is more than twice the average.

    A cohort's work then follows its own largest client, not the whole federation's.
    """
    average = -(-total // clients)
    return None if widest <= max(2 * average, 32) else max(average, 16)


class View(NamedTuple):
    """One client's part of a Source. Offset and size may be traced; the bounds on the size are static."""

    rows: Rows
    offset: Count
    size: Count
    widest: int
    narrowest: int
    chunk: int | None

    def take(self, index: Int[Array, " rows"]) -> Rows:
        """The client's samples at these places."""
        return jax.tree.map(lambda a: a.at[self.offset + index].get(mode="promise_in_bounds"), self.rows)

    def all(self) -> Batch | Chunks:
        """The client's whole data set."""
        if self.widest == self.narrowest:  # equal clients: one contiguous slice and no mask
            cut = lambda a: jax.lax.dynamic_slice_in_dim(a, self.offset, self.widest)
            return Batch(jax.tree.map(cut, self.rows), places=jnp.arange(self.widest))
        if self.chunk is None:
            return self._piece(0, self.widest)
        chunk = self.chunk
        size = jnp.asarray(self.size)
        return Chunks(lambda i: self._piece(i * chunk, chunk), -(-size // chunk), size)

    def _piece(self, start: Count, length: int) -> Batch:
        index = start + jnp.arange(length)
        places = jnp.minimum(index, self.size - 1)
        return Batch(self.take(places), index < self.size, places=places)

    def at_once(self) -> Batch:
        """The client's whole data set in one batch, even if clients differ so much that most of it is padding."""
        whole = self.all()
        return whole if isinstance(whole, Batch) else self._piece(0, self.widest)

    def draw(self, key: Array, size: int, step: Count, replace: bool, seen: Rows | None = None) -> Batch:
        """The step-th minibatch in the order that key stands for (see `Clients` for the two kinds of order).

        A client with fewer samples than `size` gives as many as it has, in a masked batch: all of them or, with
        replacement, so many draws. No batch is longer than the largest client's data.
        """
        size = min(size, self.widest)
        place = jnp.arange(size, dtype=jnp.int32)
        mask = None if self.narrowest >= size else place < self.size
        index = minibatch(key, step, self.size, length=size, replace=replace)
        if seen is None:
            return Batch(self.take(index), mask, places=index)
        return Batch(jax.tree.map(lambda a: a.at[index].get(mode="promise_in_bounds"), seen), mask, True, index)


@partial(jax.jit, static_argnames=("length", "replace"))
def minibatch(key: Array, step: Count, size: Count, length: int, replace: bool) -> Int[Array, " length"]:
    """The samples of the step-th minibatch: places in 0..size−1. (`Client.loop` finds it by its name.)"""
    place = jnp.arange(length, dtype=jnp.int32)
    size = jnp.asarray(size, jnp.int32)
    if replace:
        return jax.random.randint(jax.random.fold_in(key, step), (length,), 0, size, jnp.int32)
    own = jnp.minimum(length, size)
    position = jnp.asarray(step, jnp.int32) * own + place
    return shuffled(key, position % size, position // size, size)


_SHUFFLE_ROUNDS, _WRITTEN_OUT = 24, 6  # written out: of a loop's turn


def shuffled(key: Array, rank: Int[Array, " k"], epoch: Int[Array, " k"], size: Count) -> Int[Array, " k"]:
    """The sample at each rank of a pseudo-random order of 0..size−1, one order for each (key, epoch).

    The swap-or-not shuffle of Hoang, Morris and Rogaway (CRYPTO 2012): a bijection for any size, computed place by
    place. No permutation is sorted or stored, and clients of different sizes cost the same. Six of its rounds are one
    kernel: all would be a long one to compile, each for itself a launch. The barriers keep them out of other kernels,
    which would compute (and compile) them again.
    """
    words = jax.random.key_data(key)
    size = jnp.asarray(size, jnp.int32)
    drift = _mix(epoch.astype(jnp.uint32) ^ words[0]) + words[1]
    turns = np.arange(_SHUFFLE_ROUNDS, dtype=np.uint32)[:, None] * np.uint32(0x9E3779B9)
    salts = _mix(drift + turns)
    fractions = (salts >> 8).astype(jnp.float32) * np.float32(2.0**-24)
    pivots = jnp.minimum((fractions * size.astype(jnp.float32)).astype(jnp.int32), size - 1)
    salts, pivots = jax.lax.optimization_barrier(((~salts).astype(jnp.int32), pivots))
    # What follows is six times as long in the program: so a row of numbers for each constant (made of the salts: it is
    # then vectorised as they are), plain operations on signed words, and of a hash what its first bit depends on.
    zero = salts[:1] & 0
    size, *constants = (zero + value for value in (size, 16, 15, *(int(f.view(np.int32)) for f in _FACTORS)))
    sixteen, fifteen, *factors = constants

    def some(x: Array, drawn: tuple[Array, Array]) -> tuple[Array, None]:
        for turn in range(_WRITTEN_OUT):
            salt, pivot = (jax.lax.slice_in_dim(each, turn, turn + 1) for each in drawn)
            partner = pivot - x
            partner = jax.lax.select(jax.lax.lt(partner, zero), partner + size, partner)
            h = jax.lax.max(x, partner) ^ salt
            h = (h ^ jax.lax.shift_right_logical(h, sixteen)) * factors[0]
            h = (h ^ jax.lax.shift_right_logical(h, fifteen)) * factors[1]
            x = jax.lax.select(jax.lax.lt(h, zero), partner, x)
        return x, None

    grouped = lambda each: each.reshape(-1, _WRITTEN_OUT, *each.shape[1:])
    x, _ = jax.lax.scan(some, zero + rank.astype(jnp.int32), (grouped(salts), grouped(pivots)))
    return jax.lax.optimization_barrier(x[0])


_FACTORS = np.uint32(0x7FEB352D), np.uint32(0x846CA68B)


def _mix(h: Array) -> Array:
    """A 32-bit finaliser: every input bit reaches every output bit."""
    h = (h ^ (h >> 16)) * _FACTORS[0]
    h = (h ^ (h >> 15)) * _FACTORS[1]
    return h ^ (h >> 16)


def join(parts: Sequence[Rows], level: str, first: int = 0) -> Source:
    """The data of clients, the first of them of this number."""
    if not parts:
        raise ValueError(f"{level} is an empty list: a federation needs at least one client.")
    leaves, structure = jax.tree_util.tree_flatten_with_path(parts[0])
    names = [tree.path_name(path) for path, _ in leaves]
    if not leaves:
        raise ValueError(f"{level}: client {first} holds no arrays.")
    columns: list[list[np.ndarray]] = [[] for _ in leaves]
    sizes = np.empty(len(parts), np.int32)
    for i, part in enumerate(parts):
        flat, own = jax.tree.flatten(part)
        if str(own) != str(structure):
            raise ValueError(
                f"{level}: client {first + i}'s data has the structure {own}, client {first}'s {structure}."
            )
        arrays = [np.asarray(leaf) for leaf in flat]
        for name, array in zip(names, arrays, strict=True):
            if array.ndim == 0:
                raise ValueError(
                    f"{level}: client {first + i}'s {name} is a single number; its leading axis must count samples."
                )
        lengths = {len(array) for array in arrays}
        if len(lengths) > 1:
            each = ", ".join(f"{name}: {len(array)}" for name, array in zip(names, arrays, strict=True))
            raise ValueError(
                f"{level}: client {first + i}'s arrays disagree in their leading axis ({each}); "
                "give every array of a client one row per sample."
            )
        sizes[i] = lengths.pop()
        if sizes[i] == 0:
            raise ValueError(f"{level}: client {first + i} is empty; leave it out, or give it at least one sample.")
        for column, name, array in zip(columns, names, arrays, strict=True):
            if column and (array.shape[1:], array.dtype) != (column[0].shape[1:], column[0].dtype):
                raise ValueError(
                    f"{level}: client {first + i}'s {name} has samples of shape {array.shape[1:]} and type "
                    f"{array.dtype}, client {first}'s {column[0].shape[1:]} and {column[0].dtype}; they must agree."
                )
            column.append(array)
    return _source([np.concatenate(column) for column in columns], structure, names, sizes, level, first)


def end_to_end(given: Any, level: str, placement: str) -> Source:
    """A level's data, given as (rows, sizes): all samples end to end, and each client's number of them."""
    if not isinstance(given, tuple) or len(given) != 2:
        raise TypeError(f"{level} is {kind_of(given)}; give a pair (rows, sizes).")
    rows, counts = given
    leaves, structure = jax.tree_util.tree_flatten_with_path(rows)
    names = [tree.path_name(path) for path, _ in leaves]
    if not leaves:
        raise ValueError(f"{level}: the rows hold no arrays.")
    for name, (_, leaf) in zip(names, leaves, strict=True):
        if placement == "host" and not isinstance(leaf, np.ndarray):
            raise TypeError(
                f"{level}: {name} is {kind_of(leaf)}; rows that stay on the host are NumPy arrays or "
                "numpy.memmap: give one of those, or leave placement out."
            )
    arrays = [np.asarray(leaf) for _, leaf in leaves]
    counted = np.asarray(counts)
    if counted.ndim != 1 or not len(counted) or counted.dtype.kind not in "iu":
        raise ValueError(f"{level}: sizes must be whole numbers, one for each client; got {counts!r:.60}.")
    if counted.min() < 1:
        least = int(np.argmin(counted))
        raise ValueError(
            f"{level}: every client needs at least one sample; client {least} has the size {counted[least]}. "
            "Leave it out, or correct its size."
        )
    total = int(counted.sum(dtype=np.int64))
    for name, array in zip(names, arrays, strict=True):
        if array.ndim == 0 or len(array) != total:
            has = "is a single number" if array.ndim == 0 else f"has {len(array)} rows"
            raise ValueError(f"{level}: {name} {has}, and the sizes add up to {total}.")
    return _source(arrays, structure, names, counted, level, placement=placement)


def joined(lower: Source, upper: Source) -> Source:
    """Both levels as one: each client's samples of the lower level, then those of the upper."""
    flat: Any = jax.tree.flatten(lower.rows), jax.tree.flatten(upper.rows)
    (first, structure), (second, other) = flat
    kind = lambda leaves: [(str(a.dtype), a.shape[1:]) for a in leaves]
    if structure != other or kind(first) != kind(second):
        raise ValueError(
            "clients.single_level() needs samples of one kind at both levels; the lower has "
            f"{_kinds(lower.rows)}, the upper {_kinds(upper.rows)}."
        )
    sizes = [np.asarray(source.sizes) for source in (lower, upper)]
    owner = np.concatenate([np.repeat(np.arange(len(own)), own) for own in sizes])
    order = np.argsort(owner, kind="stable")
    pairs = zip(first, second, strict=True)
    arrays = [np.concatenate([np.asarray(a), np.asarray(b)])[order] for a, b in pairs]
    names = [tree.path_name(path) for path, _ in jax.tree_util.tree_flatten_with_path(lower.rows)[0]]
    placement = "host" if on_host(lower.rows) else "device"
    return _source(arrays, structure, names, sizes[0] + sizes[1], "lower", placement=placement)


def _kinds(rows: Rows) -> str:
    leaves = jax.tree_util.tree_flatten_with_path(rows)[0]
    return ", ".join(f"{tree.path_name(path)}: {a.dtype}{list(a.shape[1:])}" for path, a in leaves)


_AT_ONCE = 1 << 22  # numbers that are looked at together
_ALIGNED = 64  # bytes, for memory that JAX shares


def _source(
    joined: list[np.ndarray], structure: Any, names: list[str], sizes: np.ndarray, level: str, begin: int = 0,
    placement: str = "device",
) -> Source:  # fmt: skip
    """A level's data, looked at once: arrays of all samples end to end."""
    ends = np.cumsum(sizes, dtype=np.int64)
    if ends[-1] > np.iinfo(np.int32).max:
        raise ValueError(f"{level}: {ends[-1]} samples in all; at most {np.iinfo(np.int32).max} can be indexed.")
    for name, array in zip(names, joined, strict=True):
        real = jnp.issubdtype(array.dtype, jnp.floating) or np.issubdtype(array.dtype, np.integer)
        if not (real or array.dtype == bool):
            raise ValueError(f"{level}: {name} has the type {array.dtype}; data are arrays of real numbers.")
        if not array.dtype.isnative:
            raise ValueError(
                f"{level}: {name} has the type {array.dtype.str}, the byte order of another machine; give "
                f"a.astype({array.dtype.newbyteorder('=').str!r})."
            )
        made = jax.dtypes.canonicalize_dtype(array.dtype)
        if made == array.dtype and array.dtype.kind in "biu":
            continue
        wrong = _rows_where(lambda a: ~np.isfinite(a) | overflows(a), array)
        for find, what, fix in (
            (lambda a: ~np.isfinite(a), "is not finite (NaN or infinity)", "clean or fill the data before the run"),
            (overflows, f"does not fit into {made}", "rescale the data, or set jax_enable_x64"),
        ):
            bad = wrong[_rows_where(find, array[wrong])] if wrong.size else wrong
            if bad.size:
                client = int(np.searchsorted(ends, bad[0], side="right"))
                row = int(bad[0] - (ends[client] - sizes[client]))
                raise ValueError(
                    f"{level}: {name} {what} in {bad.size} sample(s), first in sample {row} of client "
                    f"{begin + client}; {fix}."
                )
    put = HostArray if placement == "host" else _placed
    return Source(
        jax.tree.unflatten(structure, [put(array) for array in joined]),
        jnp.asarray(ends - sizes, jnp.int32),
        jnp.array(sizes, jnp.int32),  # a copy: the caller may use the array again
        int(sizes.max()),
        int(sizes.min()),
        chunk_length(int(ends[-1]), len(sizes), int(sizes.max())),
    )


def _rows_where(find: Callable[[np.ndarray], np.ndarray], array: np.ndarray) -> np.ndarray:
    """The places of the rows in which something is found, looked for piece by piece: a mask of all would be large."""
    step = max(1, _AT_ONCE // max(1, int(np.prod(array.shape[1:], dtype=np.int64))))
    found = []
    for begin in range(0, len(array), step):
        piece = array[begin : begin + step]
        piece = piece.astype(np.float32) if piece.dtype.kind == "V" else piece  # bfloat16
        marked = find(piece)
        if marked.any():
            found.append(begin + np.flatnonzero(marked.reshape(len(piece), -1).any(axis=1)))
    return np.concatenate(found) if found else np.zeros(0, int)


def _placed(array: np.ndarray) -> Array:
    """The array on the default device, copied once: `jnp.asarray` would hold two copies for a while.

    On a CPU `device_put` shares aligned memory. What nobody can write to (JAX's own arrays) may be shared with the
    caller; anything else is copied into memory of NumPy's, which has huge pages, where rows here and there are found
    faster.
    """
    with jax.ensure_compile_time_eval():  # under a trace, too
        where = next(iter(jax.device_put(0).devices())).platform
        if where == "cpu" and _may_change(array):
            made = jax.dtypes.canonicalize_dtype(array.dtype)
            room = np.empty(array.size * made.itemsize + _ALIGNED, np.uint8)
            begin = -room.ctypes.data % _ALIGNED
            own = room[begin : begin + array.size * made.itemsize].view(made).reshape(array.shape)
            np.copyto(own, array, casting="unsafe")
            array = own
        return jax.block_until_ready(jax.device_put(array))


def _may_change(array: Any) -> bool:
    """Whether the caller can write to the array's memory: to any but that of JAX's arrays and of bytes."""
    while isinstance(array, np.ndarray | memoryview):
        if isinstance(array, np.ndarray) and array.flags.writeable:
            return True
        array = array.base if isinstance(array, np.ndarray) else array.obj
    return not isinstance(array, jax.Array | bytes)


def overflows(array: np.ndarray) -> Bool[np.ndarray, "..."]:
    """Where a finite number does not fit into the type that the array gets in JAX, which may be narrower."""
    made = jax.dtypes.canonicalize_dtype(array.dtype)
    if made == array.dtype:
        return np.zeros(array.shape, bool)
    if np.issubdtype(made, np.integer):
        return (array < np.iinfo(made).min) | (array > np.iinfo(made).max)
    with np.errstate(over="ignore"):
        return np.isfinite(array) & ~np.isfinite(array.astype(made))
