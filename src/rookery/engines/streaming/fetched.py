"""Clients whose rows are read from the host when a block of them is computed: for any cohort, in any order."""

import itertools
import threading
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from rookery.base import placement
from rookery.base.placement import HostArray
from rookery.data.clients import Clients
from rookery.data.rows import ClientRows
from rookery.engines import engine
from rookery.engines.engine import Job, Traced
from rookery.engines.interpreter import AUTO_BLOCK, auto_block
from rookery.plan.calls import MapCall

BYTES = 2**30  # of a block's rows, at most, unless a single client has more


@dataclass(frozen=True)
class RowSpec:
    """The shape and type of one row of an array."""

    shape: tuple[int, ...]
    dtype: np.dtype[Any]

    def rows(self, count: int) -> jax.ShapeDtypeStruct:
        """The shape of an array of that many rows."""
        return jax.ShapeDtypeStruct((count, *self.shape), self.dtype)


@partial(jax.tree_util.register_dataclass, data_fields=["number", "rowless"], meta_fields=["specs", "capacities"])
@dataclass(frozen=True)
class Fetched:
    """Stands for `Clients` in a program: the rows of `members` are read on the host while the program runs.

    Attributes:
        number: the number under which the host finds the rows, so that one program serves any clients of these shapes.
        rowless: the clients without their rows.
        specs: for each level the structure of its rows and a `RowSpec` for each array; None for a level without data.
        capacities: for each level, the most rows that a block of clients has.
    """

    number: Array
    rowless: Clients
    specs: tuple[Any, ...]
    capacities: tuple[int, ...]

    @property
    def n(self) -> int:
        """The number of clients."""
        return self.rowless.n

    @property
    def weights(self) -> Any:
        """The clients' weights."""
        return self.rowless.weights

    def at_center(self) -> Clients:
        """See `Clients.at_center`."""
        return self.rowless.at_center()

    def client_axes(self) -> list[int | None]:
        """See `Clients.client_axes`."""
        return self.shapes().client_axes()

    def shapes(self) -> Clients:
        """The shapes with which plans are traced."""
        return with_rows(self.rowless, lambda k, j, spec: spec.rows(self.capacities[k]), self.specs)

    def members(self, ids: Any) -> Clients:
        """See `Clients.members`: each client's rows once, end to end."""
        names = list(self.rowless.levels())
        fetch = partial(jax.pure_callback, vmap_method="sequential")
        numbers = jax.ShapeDtypeStruct(ids.shape, jnp.int32)

        def read(k: int, j: int, spec: RowSpec) -> Any:
            like = spec.rows(self.capacities[k])
            return fetch(partial(_rows, names[k], j, like), like, self.number, ids)

        rows = with_rows(self.rowless, read, self.specs)

        def member(level: str, data: ClientRows) -> ClientRows:
            offsets = fetch(partial(_offsets, level), numbers, self.number, ids)
            return data.member(data.rows, offsets[:, None], data.sizes[ids][:, None])

        levels = [None if data is None else member(level, data) for level, data in rows.levels().items()]
        return self.rowless.with_data(levels, self.weights[ids][:, None])


def with_rows(rowless: Clients, make: Callable[[int, int, RowSpec], Any], specs: tuple[Any, ...]) -> Clients:
    """The clients with the rows make(level, array, spec), where both are given by number."""

    def filled(k: int, data: ClientRows | None) -> ClientRows | None:
        if data is None:
            return None
        structure, arrays = specs[k]
        rows = structure.unflatten([make(k, j, spec) for j, spec in enumerate(arrays)])
        return data.member(rows, data.offsets, data.sizes)

    levels = [filled(k, data) for k, data in enumerate(rowless.levels().values())]
    return rowless.with_data(levels, rowless.weights, rowless.center)


def fetched(clients: Clients, block: int) -> Fetched:
    """The stand-in for these clients, for blocks of this size."""
    levels = list(clients.levels().values())
    without_rows = lambda data: data.member(None, data.offsets, data.sizes)
    rowless = clients.map_levels(without_rows, clients.weights, clients.center)
    capacities = tuple(0 if data is None else largest(data.sizes, block) for data in levels)
    return Fetched(jnp.int32(_HOST_ROWS.number(clients)), rowless, tuple(map(_specs, levels)), capacities)


def _specs(data: ClientRows | None) -> Any:
    if data is None:
        return None
    leaves, structure = jax.tree.flatten(data.rows)
    return structure, tuple(RowSpec(leaf.shape[1:], leaf.dtype) for leaf in leaves)


def largest(sizes: Any, count: int) -> int:
    """The most rows that `count` different clients have."""
    return int(np.sort(np.asarray(sizes, np.int64))[-count:].sum())


def prepared(job: Job, block: int | str, debug: bool = False, convolve: str = "auto") -> tuple[Traced, Fetched, int]:
    """A job's plans for rows that are fetched, the stand-in for its clients, and the size of blocks."""
    placement.check_types([data.rows for data in job.clients.levels().values() if data is not None])
    most = AUTO_BLOCK if isinstance(block, str) else block
    size = 1 if debug else _block_that_fits(job.clients, min(most, job.clients.n))
    data = fetched(job.clients, size)
    traced = engine.traced(job, debug, convolve, data.shapes())
    if block == "auto" and not debug:
        plans = [plan for plan in (traced.start, traced.round, traced.measure) if plan is not None]
        fewer = min([size, *(auto_block([call]) for plan in plans for call in plan.body.of(MapCall))])
        if fewer < size:
            size, data = fewer, fetched(job.clients, fewer)
            traced = engine.traced(job, debug, convolve, data.shapes())
    return traced, data, size


def _block_that_fits(clients: Clients, most: int) -> int:
    """The largest block whose rows take at most BYTES."""
    total: Any = 0
    for level in levels_of(clients).values():
        row_bytes = sum(array.row_bytes for array in level.arrays)
        total = total + row_bytes * np.cumsum(np.sort(level.sizes)[::-1][:most])
    return max(1, int(np.searchsorted(total, BYTES, side="right")))


# On the host: callbacks, which must not wait for JAX.


class Level(NamedTuple):
    """A level's rows, and where in them each client's rows are."""

    arrays: list[HostArray]
    offsets: np.ndarray
    sizes: np.ndarray


def levels_of(clients: Clients) -> dict[str, Level]:
    """The rows of each level that has data, by name."""
    present = {name: data for name, data in clients.levels().items() if data is not None}
    integers = lambda a: np.asarray(a, np.int64)
    return {
        name: Level(jax.tree.leaves(data.rows), integers(data.offsets), integers(data.sizes))
        for name, data in present.items()
    }


class _HostRows:
    """Clients' rows by number, as long as the clients exist. Threads may share it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._count = itertools.count(1)
        self._numbers: weakref.WeakKeyDictionary[Clients, int] = weakref.WeakKeyDictionary()
        self._levels: dict[int, dict[str, Level]] = {}

    def number(self, clients: Clients) -> int:
        """The number of these clients, which get one if they have none yet."""
        with self._lock:
            if clients not in self._numbers:
                number = next(self._count)
                self._levels[number] = levels_of(clients)
                weakref.finalize(clients, self._levels.pop, number)
                self._numbers[clients] = number
            return self._numbers[clients]

    def level(self, number: Any, name: str) -> Level:
        """A level of the clients with this number."""
        return self._levels[int(number)][name]


_HOST_ROWS = _HostRows()


def _once(level: Level, ids: Any) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The different clients among `ids`, where their rows begin end to end, and the position of each id among them."""
    clients, positions = np.unique(np.asarray(ids), return_inverse=True)
    sizes = level.sizes[clients]
    return clients, np.cumsum(sizes) - sizes, positions


def _offsets(name: str, number: Any, ids: Any) -> np.ndarray:
    _, begins, positions = _once(_HOST_ROWS.level(number, name), ids)
    return begins[positions].astype(np.int32)


def _rows(name: str, j: int, like: Any, number: Any, ids: Any) -> np.ndarray:
    level = _HOST_ROWS.level(number, name)
    clients, _, _ = _once(level, ids)
    out = np.zeros(like.shape, like.dtype)
    level.arrays[j].read(level.offsets[clients], level.sizes[clients], out[: level.sizes[clients].sum()])
    return out
