"""Clients whose rows are fetched from the host whenever a block of them is computed: for any cohort, in any order."""

import itertools
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
class Sample:
    """What a row of an array looks like."""

    shape: tuple[int, ...]
    dtype: np.dtype[Any]

    def rows(self, room: int) -> jax.ShapeDtypeStruct:
        """The shape of so many of them."""
        return jax.ShapeDtypeStruct((room, *self.shape), self.dtype)


@partial(jax.tree_util.register_dataclass, data_fields=["number", "described"], meta_fields=["samples", "rooms"])
@dataclass(frozen=True)
class Fetched:
    """For a program, what `Clients` on a device are: the rows of `members` are read on the host while it runs.

    Attributes:
        number: whose rows: a compiled program serves any clients of these shapes.
        described: the clients, without their rows.
        samples: for each level its rows' structure and a `Sample` for each array; None if there is no such level.
        rooms: for each level the rows that a block of clients has room for.
    """

    number: Array
    described: Clients
    samples: tuple[Any, ...]
    rooms: tuple[int, ...]

    @property
    def n(self) -> int:
        """How many clients there are."""
        return self.described.n

    @property
    def weights(self) -> Any:
        """The clients' weights."""
        return self.described.weights

    def at_center(self) -> Clients:
        """See `Clients.at_center`."""
        return self.described.at_center()

    def client_axes(self) -> list[int | None]:
        """See `Clients.client_axes`."""
        return self.seen().client_axes()

    def seen(self) -> Clients:
        """The shapes with which plans are traced."""
        return with_rows(self.described, lambda k, j, sample: sample.rows(self.rooms[k]), self.samples)

    def members(self, ids: Any) -> Clients:
        """See `Clients.members`: each client's rows once, end to end."""
        names = list(self.described.levels())
        fetch = partial(jax.pure_callback, vmap_method="sequential")
        numbers = jax.ShapeDtypeStruct(ids.shape, jnp.int32)

        def read(k: int, j: int, sample: Sample) -> Any:
            like = sample.rows(self.rooms[k])
            return fetch(partial(_rows, names[k], j, like), like, self.number, ids)

        rows = with_rows(self.described, read, self.samples)

        def own(level: str, source: ClientRows) -> ClientRows:
            offsets = fetch(partial(_offsets, level), numbers, self.number, ids)
            return source.member(source.rows, offsets[:, None], source.sizes[ids][:, None])

        each = [None if source is None else own(level, source) for level, source in rows.levels().items()]
        fixed = self.described.replace, self.described.center_client
        return Clients.tree_unflatten(fixed, (*each, self.weights[ids][:, None], None))


def with_rows(described: Clients, make: Callable[[int, int, Sample], Any], samples: tuple[Any, ...]) -> Clients:
    """The clients with rows: make(level, array, sample)."""

    def own(k: int, source: ClientRows | None) -> ClientRows | None:
        if source is None:
            return None
        structure, each = samples[k]
        rows = structure.unflatten([make(k, j, sample) for j, sample in enumerate(each)])
        return source.member(rows, source.offsets, source.sizes)

    levels = [own(k, source) for k, source in enumerate(described.levels().values())]
    fixed = described.replace, described.center_client
    return Clients.tree_unflatten(fixed, (*levels, described.weights, described.center))


def fetched(clients: Clients, block: int) -> Fetched:
    """For blocks of this size."""
    rowless = lambda source: None if source is None else source.member(None, source.offsets, source.sizes)
    sources = list(clients.levels().values())
    fixed = clients.replace, clients.center_client
    described = Clients.tree_unflatten(fixed, (*map(rowless, sources), clients.weights, clients.center))
    rooms = tuple(0 if source is None else largest(source.sizes, block) for source in sources)
    return Fetched(jnp.int32(_number(clients)), described, tuple(map(_samples, sources)), rooms)


def _samples(source: ClientRows | None) -> Any:
    if source is None:
        return None
    leaves, structure = jax.tree.flatten(source.rows)
    return structure, tuple(Sample(leaf.shape[1:], leaf.dtype) for leaf in leaves)


def largest(sizes: Any, count: int) -> int:
    """The rows that so many different clients have at most."""
    return int(np.sort(np.asarray(sizes, np.int64))[-count:].sum())


def prepared(job: Job, block: int | str, debug: bool = False, convolve: str = "auto") -> tuple[Traced, Fetched, int]:
    """A job's plans as they are computed with rows that are fetched, these rows, and the size of blocks."""
    placement.check_types([source.rows for source in job.clients.levels().values() if source is not None])
    most = AUTO_BLOCK if isinstance(block, str) else block
    size = 1 if debug else _that_fit(job.clients, min(most, job.clients.n))
    data = fetched(job.clients, size)
    traced = engine.traced(job, debug, convolve, data.seen())
    if block == "auto" and not debug:
        plans = [own for own in (traced.start, traced.round, traced.measure) if own is not None]
        fewer = min([size, *(auto_block([call]) for plan in plans for call in plan.body.of(MapCall))])
        if fewer < size:
            size, data = fewer, fetched(job.clients, fewer)
            traced = engine.traced(job, debug, convolve, data.seen())
    return traced, data, size


def _that_fit(clients: Clients, most: int) -> int:
    """The clients of a block whose rows take no more than BYTES."""
    total: Any = 0
    for level in levels(clients).values():
        each = sum(array.row_bytes for array in level.arrays)
        total = total + each * np.cumsum(np.sort(level.sizes)[::-1][:most])
    return max(1, int(np.searchsorted(total, BYTES, side="right")))


# What runs on the host: in a callback, where nothing of JAX may be waited for.


class Level(NamedTuple):
    """A level's rows, and where in them each client's are."""

    arrays: list[HostArray]
    offsets: np.ndarray
    sizes: np.ndarray


_held: dict[int, dict[str, Level]] = {}  # by the number that programs are given
_numbers: "weakref.WeakKeyDictionary[Clients, int]" = weakref.WeakKeyDictionary()
_count = itertools.count(1)


def levels(clients: Clients) -> dict[str, Level]:
    """What there is of each level."""
    each = {name: source for name, source in clients.levels().items() if source is not None}
    numbers = lambda a: np.asarray(a, np.int64)
    return {
        name: Level(jax.tree.leaves(source.rows), numbers(source.offsets), numbers(source.sizes))
        for name, source in each.items()
    }


def _number(clients: Clients) -> int:
    """The number by which callbacks find these clients, as long as they are there."""
    if clients not in _numbers:
        number = next(_count)
        _numbers[clients], _held[number] = number, levels(clients)
        weakref.finalize(clients, _held.pop, number)
    return _numbers[clients]


def _once(level: Level, ids: Any) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The different clients among `ids`, where each one's rows begin if they stand end to end, and whose each is."""
    who, back = np.unique(np.asarray(ids), return_inverse=True)
    sizes = level.sizes[who]
    return who, np.cumsum(sizes) - sizes, back


def _offsets(name: str, number: Any, ids: Any) -> np.ndarray:
    _, begins, back = _once(_held[int(number)][name], ids)
    return begins[back].astype(np.int32)


def _rows(name: str, j: int, like: Any, number: Any, ids: Any) -> np.ndarray:
    level = _held[int(number)][name]
    who, _, _ = _once(level, ids)
    out = np.zeros(like.shape, like.dtype)
    level.arrays[j].read(level.offsets[who], level.sizes[who], out[: level.sizes[who].sum()])
    return out
