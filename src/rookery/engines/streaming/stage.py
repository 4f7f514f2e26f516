"""The rows on the device: the arrays that hold them, the buffers they travel in, and how rows are packed into these."""

import math
from collections import deque
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from rookery.base import placement
from rookery.data.clients import Clients
from rookery.engines import engine
from rookery.engines.streaming.rowless import Rowless, largest, with_rows
from rookery.engines.streaming.used import Used, used_levels, uses_own_cohort

PIECE = 2**25  # bytes of one transfer
PARTS = 8  # a piece is as many eighths of PIECE as its rows need


class Piece(NamedTuple):
    """Rows of all levels that travel together, and where they go."""

    lengths: tuple[int, ...]  # for each level, the rows that it can hold
    numbers: dict[str, placement.Buffer]  # by their type, end to end


class Stage:
    """The rows on the device, and their transfer.

    Attributes:
        levels: the levels that rounds use.
        shapes: the shapes with which a round is traced.
        moved: the bytes transferred so far.
    """

    def __init__(self, data: Rowless, levels: list[Used]) -> None:
        self.levels, self.moved, self._data = levels, 0, data
        capacities = {used.name: used.capacity for used in levels}
        names = list(data.rowless.levels())
        shape = lambda k, j, spec: spec.rows(capacities.get(names[k], data.capacities[k]))
        self.shapes = with_rows(data.rowless, shape, data.specs)
        self._specs = [[data.specs[names.index(used.name)][1][j] for j in used.arrays] for used in levels]
        self._rows = [
            [jnp.zeros((used.capacity, *spec.shape), spec.dtype) for spec in specs]
            for used, specs in zip(levels, self._specs, strict=True)
        ]
        self._offsets = [jnp.zeros(data.n, jnp.int32) for _ in levels]
        self._unread = [  # stand for arrays that no round reads
            [jnp.zeros((1, *spec.shape), spec.dtype) for spec in (level[1] if level else ())] for level in data.specs
        ]
        self.nbytes = sum(used.capacity * used.row_bytes for used in levels)
        share = min(1.0, PIECE / max(1, self.nbytes))
        self._part = [max(1, math.ceil(used.capacity * share / PARTS)) for used in levels]  # rows of an eighth
        self._layouts: dict[tuple[int, ...], Layout] = {}
        self._array_shapes = engine.shapes((self._rows, self._offsets))
        self._stored: Any = None  # ready once the last pieces are in their places
        self._reuse = jax.default_backend() != "cpu"  # a CPU device may use a buffer in place
        # By the lengths of pieces: their buffers, each with an array that is ready once the buffer can be used again.
        self._sent: dict[Any, deque[tuple[dict[str, placement.Buffer], Any]]] = {}

    @property
    def clients(self) -> Clients:
        """The clients with the rows that are on the device. `store` donates the arrays."""
        rowless = self._data.rowless
        names = list(rowless.levels())
        positions = {used.name: k for k, used in enumerate(self.levels)}
        arrays = {
            (used.name, j): a
            for used, rows in zip(self.levels, self._rows, strict=True)
            for j, a in zip(used.arrays, rows, strict=True)
        }
        filled = with_rows(rowless, lambda k, j, _: arrays.get((names[k], j), self._unread[k][j]), self._data.specs)
        levels = [
            data if data is None or name not in positions
            else data.member(data.rows, self._offsets[positions[name]], data.sizes)
            for name, data in filled.levels().items()
        ]  # fmt: skip
        return filled.with_data(levels, filled.weights, filled.center)

    def read(self, moves: list[tuple[int, ...]]) -> list[Piece]:
        """Read the rows of clients into pieces; see `pool.Prefetch.moves`."""
        if not moves:
            return []
        clients, *places = np.array(moves).T
        runs = []
        for used, begins in zip(self.levels, places, strict=True):
            sizes = used.level.sizes[clients]
            ends = np.cumsum(sizes)
            runs.append(Runs(clients, used.level.offsets[clients], begins, ends - sizes, ends))
        whole = [PARTS * part for part in self._part]
        pieces = max(-(-int(run.ends[-1]) // most) for run, most in zip(runs, whole, strict=True))
        return [
            self._piece([run.within(i * most, (i + 1) * most) for run, most in zip(runs, whole, strict=True)])
            for i in range(pieces)
        ]

    def _piece(self, runs: "list[Runs]") -> Piece:
        totals = [int(run.ends[-1]) if len(run.ends) else 0 for run in runs]
        eighths = max(-(-total // part) for total, part in zip(totals, self._part, strict=True))
        lengths = tuple(eighths * part for part in self._part)
        layout = self._layout(lengths)
        buffers = self._buffers(lengths, layout)
        numbers = {name: buffer.array for name, buffer in buffers.items()}
        for k, (used, run, total) in enumerate(zip(self.levels, runs, totals, strict=True)):
            first = np.maximum(run.firsts, 0)
            for j, array in enumerate(used.arrays):
                rows = layout[k, j].of(numbers)
                used.level.arrays[array].read(run.on_host + first - run.firsts, run.ends - first, rows[:total])
            table = layout[k, "runs"].of(numbers)
            table[:, : len(first)] = run.clients, run.on_device, run.firsts
            table[:, len(first) :] = [[self._data.n], [used.capacity], [total]]  # out of bounds: not written
        return Piece(lengths, buffers)

    def store(self, pieces: list[Piece]) -> None:
        """Send pieces. The device stores their rows once the rounds under way no longer need the replaced ones.

        Waits until the rows of the previous prefetch have arrived, because the device has room for one in transit.
        """
        jax.block_until_ready(self._stored)
        for piece in pieces:
            layout = self._layout(piece.lengths)
            store = engine.PROGRAMS.find(
                ("store", piece.lengths, tuple(layout.items()), self._array_shapes),
                lambda: jax.jit(partial(_store, piece.lengths, layout), donate_argnums=(0, 1)),
            )
            numbers = {name: buffer.sent() for name, buffer in piece.numbers.items()}
            self._rows, self._offsets, self._stored = store(self._rows, self._offsets, numbers)
            if self._reuse:
                self._sent.setdefault(piece.lengths, deque()).append((piece.numbers, self._stored))
            self.moved += sum(rows * used.row_bytes for rows, used in zip(piece.lengths, self.levels, strict=True))

    def _layout(self, lengths: tuple[int, ...]) -> "Layout":
        """Where the parts of a piece of these lengths are: the rows of each array, and the table of its runs."""
        if lengths in self._layouts:
            return self._layouts[lengths]
        ends: dict[str, int] = {}

        def part(shape: tuple[int, ...], dtype: Any) -> Part:
            begin = ends.get(np.dtype(dtype).name, 0)
            ends[np.dtype(dtype).name] = begin + int(np.prod(shape))
            return Part(np.dtype(dtype), begin, shape)

        layout: Layout = {}
        for k, (length, specs) in enumerate(zip(lengths, self._specs, strict=True)):
            for j, spec in enumerate(specs):
                layout[k, j] = part((length, *spec.shape), spec.dtype)
            layout[k, "runs"] = part((3, min(length, self._data.n) + 1), np.int32)
        self._layouts[lengths] = layout
        return layout

    def _buffers(self, lengths: tuple[int, ...], layout: "Layout") -> dict[str, placement.Buffer]:
        """Buffers for a piece, by type: those of a piece that has arrived, or new ones."""
        sent = self._sent.get(lengths)
        if sent and sent[0][1].is_ready():
            return sent.popleft()[0]
        sizes: dict[Any, int] = {}
        for part in layout.values():
            sizes[part.dtype] = max(sizes.get(part.dtype, 0), part.begin + int(np.prod(part.shape)))
        return {dtype.name: placement.Buffer(size, dtype) for dtype, size in sizes.items()}


class Part(NamedTuple):
    """An array inside the buffer of its type."""

    dtype: np.dtype[Any]
    begin: int
    shape: tuple[int, ...]

    def of(self, numbers: dict[str, Any]) -> Any:
        """The array, from the buffers by type."""
        return numbers[self.dtype.name][self.begin : self.begin + int(np.prod(self.shape))].reshape(self.shape)


Layout = dict[tuple[int, Any], Part]  # by level and array, or "runs"


class Runs(NamedTuple):
    """The rows of some clients at one level: contiguous for each client, and end to end in transit."""

    clients: np.ndarray
    on_host: np.ndarray  # where each client's rows begin on the host,
    on_device: np.ndarray  # on the device,
    firsts: np.ndarray  # and in transit; negative if they began in an earlier piece
    ends: np.ndarray  # where they end in transit

    def within(self, begin: int, end: int) -> "Runs":
        """The runs with rows in this window of the transit order, with positions relative to it."""
        which = slice(np.searchsorted(self.ends, begin, "right"), np.searchsorted(self.firsts, end))
        clients, on_host, on_device, firsts, ends = (column[which] for column in self)
        return Runs(clients, on_host, on_device, firsts - begin, np.minimum(ends, end) - begin)


def _store(lengths: tuple[int, ...], layout: Layout, rows: Any, offsets: Any, numbers: Any) -> Any:
    """Write a piece's rows and the offsets of its clients."""

    def level(k: int) -> tuple[list[Array], Array]:
        clients, on_device, firsts = layout[k, "runs"].of(numbers)
        position = jnp.arange(lengths[k], dtype=jnp.int32)
        begun = jnp.zeros_like(position).at[jnp.maximum(firsts, 0)].add(1, mode="drop")
        run = jnp.cumsum(begun) - 1
        where = position + (on_device - firsts)[run]
        put = lambda a, new: a.at[where].set(new, mode="drop", unique_indices=True)
        written = [put(a, layout[k, j].of(numbers)) for j, a in enumerate(rows[k])]
        return written, offsets[k].at[clients].set(on_device, mode="drop")

    new_rows, new_offsets = zip(*map(level, range(len(rows))), strict=True)
    return list(new_rows), list(new_offsets), jnp.bool_(True)


def stage_for(traced: engine.Traced, data: Rowless, most: int) -> Stage | None:
    """A stage of at most `most` bytes for a job's rounds; None if no cohort fits, or a round draws another cohort."""
    if not uses_own_cohort(traced.round):
        return None
    used = used_levels(traced, data)
    fitting = _capacities(used, traced.job.cohort, most)
    if not fitting:
        return None
    return Stage(data, [level._replace(capacity=rows) for level, rows in zip(used, fitting, strict=True)])


def _capacities(used: list[Used], cohort: int, most: int) -> list[int]:
    """For each level, the number of rows that fit on the device; empty if a cohort does not fit.

    Each level gets the rows of any cohort and the same share of the rest. Room is left for a cohort in transit.
    """
    least = [largest(level.level.sizes, cohort) for level in used]
    whole = [int(level.level.sizes.sum()) for level in used]
    size = lambda rows: sum(level.row_bytes * count for level, count in zip(used, rows, strict=True))
    limit = most - min(max(size(least), most // 8), most // 2)
    if size(whole) <= most:
        return whole
    if size(least) > limit:
        return []
    share = (limit - size(least)) / (size(whole) - size(least))
    return [some + int(share * (everything - some)) for some, everything in zip(least, whole, strict=True)]
