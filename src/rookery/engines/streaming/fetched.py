"""Clients whose rows are read from the host when a block of them is computed: for any cohort, in any order."""

import itertools
import threading
import weakref
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
from rookery.engines.streaming.gathered import gathered
from rookery.engines.streaming.rowless import Rowless, RowSpec, with_rows, without_rows
from rookery.plan.calls import MapCall

BYTES = 2**30  # of a block's rows, at most, unless a single client has more


@partial(jax.tree_util.register_dataclass, data_fields=["number", "rowless"], meta_fields=["specs", "capacities"])
@dataclass(frozen=True)
class Fetched(Rowless):
    """Stands for `Clients` in a program: the rows of `members` are read on the host while the program runs.

    Attributes:
        number: the number under which the host finds the rows, so that one program serves any clients of these shapes.
    """

    number: Array

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


def stand_in(clients: Clients, block: int) -> Rowless:
    """The stand-in for clients with rows on the host, for blocks of this size."""
    if clients.placement == "pinned":
        return gathered(clients, block)
    return Fetched(number=jnp.int32(_HOST_ROWS.number(clients)), **without_rows(clients, block))


def prepared(job: Job, block: int | str, debug: bool = False, convolve: str = "auto") -> tuple[Traced, Rowless, int]:
    """A job's plans for rows that are read block by block, the stand-in for its clients, and the size of blocks."""
    placement.check_types([data.rows for data in job.clients.levels().values() if data is not None])
    most = AUTO_BLOCK if isinstance(block, str) else block
    size = 1 if debug else _block_that_fits(job.clients, min(most, job.clients.n))
    data = stand_in(job.clients, size)
    traced = engine.traced(job, debug, convolve, data.shapes())
    if block == "auto" and not debug:
        plans = [plan for plan in (traced.start, traced.round, traced.measure) if plan is not None]
        fewer = min([size, *(auto_block([call]) for plan in plans for call in plan.body.of(MapCall))])
        if fewer < size:
            size, data = fewer, stand_in(job.clients, fewer)
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
