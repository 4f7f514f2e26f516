"""Data that stay on the host: the rows of the next rounds' cohorts travel to the device while it computes.

The device holds the rows of as many clients as a limit allows, in a pool; whoever a cohort needs and is not there is
brought, in the place of those who are needed last. A round is then what it is with all data on the device: the pool's
arrays stand for all rows, and each client's offset says where in the pool its own are. A round that needs clients who
can't be told beforehand, or more of them than there is room for, has its rows fetched block by block instead, as do
the start and evaluations: see fetched.py.
"""

import math
import weakref
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cached_property, partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from rookery.base import placement
from rookery.base.compat import Var
from rookery.data.clients import Clients
from rookery.engines import engine
from rookery.engines.engine import Job
from rookery.engines.simulation import device
from rookery.engines.simulation.device import Program
from rookery.engines.streaming import fetched, pool
from rookery.engines.streaming.fetched import Fetched, Level
from rookery.language.ledger import Amounts
from rookery.plan.calls import Body, LoopCall, MapCall
from rookery.plan.trace import Carry, Plan

BYTES: int | None = None  # of device memory for rows; None: half of what is free, or 2**28 if nobody knows
PIECE = 2**25  # bytes that are sent at once
TOGETHER = 2**25  # bytes that rounds planned together may need, beyond the first of them
_SHARE = 8  # of the pool: rounds that replace more of it are not planned together, or nobody could stay for later ones
_PARTS = 8  # a piece has room for as many eighths as it needs
_AHEAD = 256  # rounds whose cohorts are drawn at once
_DRAWN = 2**24  # numbers that may be needed for that


def opened(job: Job, settings: device.Settings) -> Any:
    """A session for clients whose rows are on the host."""
    if settings.mesh is not None:
        raise ValueError(
            'Simulation: clients with placement="host" are computed on one device, and mesh divides them among '
            'several: leave mesh out, or give placement="device".'
        )
    if settings.debug:
        from rookery.engines.simulation import debug

        traced, data, _ = fetched.prepared(job, settings.block, True, settings.convolutions)
        return debug.Session(traced, settings, data)
    return Session(job, settings)


def limit() -> int:
    """Bytes of device memory for rows."""
    if BYTES is not None:
        return BYTES
    stats = jax.local_devices()[0].memory_stats() or {}
    free = stats.get("bytes_limit", 2**29) - stats.get("bytes_in_use", 0)
    return max(0, free // 2)


class _Flight(NamedTuple):
    """Rounds that are being computed."""

    rounds: int
    reports: Any


class Session(device.Session):
    """A run with rows on the host."""

    def __init__(self, job: Job, settings: device.Settings) -> None:
        traced, data, block = fetched.prepared(job, settings.block, convolve=settings.convolutions)
        super().__init__(traced, settings)
        self._data: Any = data
        self._block = block
        self._settings = settings
        self._stage = _stage(traced, data)
        if self._stage is not None:
            self._pooled = engine.traced(job, convolve=settings.convolutions, seen=self._stage.seen)
            self._cohorts = Cohorts(self._pooled.seed, job.clients.n, job.cohort)
            levels = self._stage.levels
            sizes, costs, rooms = zip(*((own.level.sizes, own.row_bytes, own.room) for own in levels), strict=True)
            self._pool = pool.Pool(sizes, costs, rooms, self._cohorts)
            usual = lambda own: 2 * job.cohort * own.level.sizes.mean()  # the rows of two cohorts
            two = all(own.room >= min(own.level.sizes.sum(), usual(own)) for own in levels)
            self._at_once = device.ROUNDS_AT_ONCE if two else 1  # rounds in a call
        self._ready: pool.Plan | None = None  # rounds for which all rows are there, or on their way
        self._coming: Future[tuple[pool.Plan, list[Piece]]] | None = None  # and those after them
        self._reader = ThreadPoolExecutor(1, "rookery-reader")  # plans, and reads rows, while rounds are computed
        weakref.finalize(self, self._reader.shutdown, wait=False)

    @cached_property
    def fingerprint(self) -> str:
        """Of the program as it is with all rows on the device."""
        return engine.traced(self._job, convolve=self._settings.convolutions).fingerprint

    @property
    def moved(self) -> int:
        """Bytes of rows sent to the device for rounds."""
        return 0 if self._stage is None else self._stage.moved

    def close(self) -> None:
        """Give up the state, and the rows on the device."""
        super().close()
        self._reader.shutdown(cancel_futures=True)
        self._coming = None
        self._stage = None

    def advance(self, rounds: int) -> list[Amounts]:
        """See `engine.Session.advance`. Rows for the rounds after these are sent, too, while these are computed."""
        stage, job = self._stage, self._job
        if stage is None:
            return super().advance(rounds)
        traced, strict = self._pooled, job.on_nonfinite == "stop"
        program = self._rounds(stage.clients)
        done: list[Amounts] = []
        flights: deque[_Flight] = deque()
        go, t, end = jnp.bool_(True), self.rounds, self.rounds + rounds
        try:
            while t < end and self.stopped is None:
                self._bring(t)
                assert self._ready is not None
                count = min(self._ready.end, end, t + self._at_once) - t
                self._carry, reports, go = program(
                    traced.round.consts, stage.clients, traced.hyper, self._carry, t, count, strict, traced.seed, go
                )
                flights.append(_Flight(count, reports))
                t += count
                if len(flights) > 1:
                    done += self._landed(flights)
        finally:  # where rows could not be read, too: the state is that after all rounds that were begun
            while flights and self.stopped is None:
                done += self._landed(flights)
        return done

    def _landed(self, flights: "deque[_Flight]") -> list[Amounts]:
        """What the first of them has cost, once it is done."""
        reports = jax.device_get(flights[0].reports)
        return self._told(reports, flights.popleft().rounds)

    def _bring(self, t: int) -> None:
        """See to it that the rows for round t are there, or on their way, and that those for later rounds are read."""
        assert self._stage is not None
        while self._ready is None or not self._ready.begin <= t < self._ready.end:
            self._coming = self._coming or self._ask(t)
            try:
                plan, pieces = self._coming.result()
                self._stage.store(pieces)  # those of other rounds, too: the pool counts on them
            except BaseException:
                if self._coming.done():  # nobody knows what has arrived; who is only interrupted waits again
                    self._pool.clear()
                    self._ready = self._coming = None
                raise
            self._ready, self._coming = plan, None
        if self._coming is None:
            self._coming = self._ask(self._ready.end)

    def _ask(self, t: int) -> "Future[tuple[pool.Plan, list[Piece]]]":
        """For the rows of the rounds from t on."""
        assert self._stage is not None
        most, enough = device.ROUNDS_AT_ONCE, min(TOGETHER, self._stage.nbytes // _SHARE)
        if t != self._pool.planned:
            self._cohorts.restart(t)
        self._cohorts.reach(t + 2 * most)
        return self._reader.submit(_read, self._pool, self._stage, t, most, enough)

    def _rounds(self, clients: Clients) -> Any:
        of, job, block = self._pooled.round, self._job, self._settings.block
        fixed = job.cohort, device.minimum(job), self._at_once, device.together()
        return engine.PROGRAMS.find(
            ("staged rounds", of.identity, device.shapes(clients), block, *fixed),
            lambda: engine.compiled(of, partial(advance, Program(of, clients, block), *fixed), donate_argnums=3),
        )


def advance(
    program: Program, cohort: int, minimum: int, most: int, together: int, consts: Any, clients: Clients, hyper: Any,
    carry: Carry, begin: Any, rounds: Any, strict: Any, seed: Array, go: Any,
) -> Any:  # fmt: skip
    """See `device.advance`; nothing is done unless `go`, and the last result is whether all rounds were good."""
    rounds = jnp.where(go, rounds, 0)
    carry, reports = device.advance(
        program, cohort, minimum, most, together, consts, clients, hyper, carry, begin, rounds, strict, seed
    )
    good = (reports["least"] >= minimum) & (jnp.all(reports["finite"], axis=1) | ~jnp.asarray(strict))
    return carry, reports, go & jnp.all(good | (jnp.arange(most) >= rounds))


def _read(own: pool.Pool, stage: "Stage", t: int, most: int, enough: int) -> tuple[pool.Plan, list["Piece"]]:
    """Plan the rounds from t on and read their rows. (What is a thread's own in JAX is not looked at here.)"""
    plan = own.plan(t, most, enough)
    return plan, stage.read(plan.moves)


class Cohorts:
    """The cohorts of the next rounds: drawn where rounds are computed, ahead of time, for the thread that plans."""

    def __init__(self, seed: Array, n: int, cohort: int) -> None:
        numbers = cohort**2 if cohort <= 2048 and 8 * cohort <= n else n  # of a draw: see `sample_cohort`
        at_once = max(1, min(_AHEAD, _DRAWN // numbers))

        def draw(seed: Array, begin: Array) -> Array:
            each = lambda t: engine.round_keys(seed, t, n, cohort).ids
            return jax.lax.map(each, begin + jnp.arange(_AHEAD, dtype=jnp.int32), batch_size=at_once)

        self._seed, self._draw = seed, engine.PROGRAMS.find(("cohorts", n, cohort), lambda: jax.jit(draw))
        self.restart(0)

    def restart(self, t: int) -> None:
        """The next rounds are those from t on; nobody is planning others."""
        self._drawn: dict[int, Any] = {}
        self._end = t

    def reach(self, t: int) -> None:
        """Draw those of all rounds before t, at least."""
        while self._end < t:
            self._drawn[self._end] = self._draw(self._seed, jnp.int32(self._end))
            self._end += _AHEAD

    def __call__(self, t: int) -> np.ndarray:
        """Of rounds t, t + 1, …, a row for each."""
        return np.asarray(self._drawn.pop(t))


# The rows on the device.


class Used(NamedTuple):
    """What rounds use of a level, and how many of its rows the device has room for."""

    name: str
    level: Level
    arrays: tuple[int, ...]  # by their number at this level
    room: int

    @property
    def row_bytes(self) -> int:
        """Of a sample."""
        return sum(self.level.arrays[j].row_bytes for j in self.arrays)


class Piece(NamedTuple):
    """Rows of all levels that travel together, and where they go."""

    rooms: tuple[int, ...]  # how many rows of each level it has room for
    numbers: dict[str, placement.Buffer]  # by their type, end to end


class Stage:
    """The pool's arrays, and the way there.

    Attributes:
        levels: those that are used.
        seen: the shapes with which a round is traced.
        clients: their rows, as far as they are there; the arrays are donated by `store`.
        moved: bytes that were sent.
    """

    def __init__(self, data: Fetched, levels: list[Used]) -> None:
        self.levels, self.moved, self._data = levels, 0, data
        rooms = {own.name: own.room for own in levels}
        names = list(data.described.levels())
        shape = lambda k, j, sample: sample.rows(rooms.get(names[k], data.rooms[k]))
        self.seen = fetched.with_rows(data.described, shape, data.samples)
        self._samples = [[data.samples[names.index(own.name)][1][j] for j in own.arrays] for own in levels]
        self._rows = [
            [jnp.zeros((own.room, *sample.shape), sample.dtype) for sample in each]
            for own, each in zip(levels, self._samples, strict=True)
        ]
        self._offsets = [jnp.zeros(data.n, jnp.int32) for _ in levels]
        self._none = [  # of arrays that no round looks at
            [jnp.zeros((1, *sample.shape), sample.dtype) for sample in (own[1] if own else ())] for own in data.samples
        ]
        self.nbytes = sum(own.room * own.row_bytes for own in levels)
        share = min(1.0, PIECE / max(1, self.nbytes))
        self._part = [max(1, math.ceil(own.room * share / _PARTS)) for own in levels]  # rows of an eighth of a piece
        self._layouts: dict[tuple[int, ...], Layout] = {}
        self._shapes = device.shapes((self._rows, self._offsets))
        self._stored: Any = None  # which is there once the last pieces are in their places
        self._reuse = jax.default_backend() != "cpu"  # a CPU's device may use a buffer as it is
        self._sent: dict[Any, deque[tuple[dict[str, placement.Buffer], Any]]] = {}  # buffers of pieces, and these there

    @property
    def clients(self) -> Clients:
        """See the class."""
        names = list(self._data.described.levels())
        places = {own.name: k for k, own in enumerate(self.levels)}
        there = {
            (own.name, j): a
            for own, each in zip(self.levels, self._rows, strict=True)
            for j, a in zip(own.arrays, each, strict=True)
        }
        rows = lambda k, j, _: there.get((names[k], j), self._none[k][j])
        own = fetched.with_rows(self._data.described, rows, self._data.samples)
        moved = [
            source if source is None or name not in places
            else source.member(source.rows, self._offsets[places[name]], source.sizes)
            for name, source in own.levels().items()
        ]  # fmt: skip
        return Clients.tree_unflatten((own.replace, own.center_client), (*moved, own.weights, own.center))

    def read(self, moves: list[tuple[int, ...]]) -> list[Piece]:
        """Clients' rows, ready to be sent."""
        if not moves:
            return []
        who, *places = np.array(moves).T
        runs = []  # of each level: the clients' rows on the host, in the pool, and end to end as they travel
        for own, begins in zip(self.levels, places, strict=True):
            sizes = own.level.sizes[who]
            ends = np.cumsum(sizes)
            runs.append(Runs(who, own.level.offsets[who], begins, ends - sizes, ends))
        whole = [_PARTS * part for part in self._part]
        pieces = max(-(-int(own.ends[-1]) // most) for own, most in zip(runs, whole, strict=True))
        return [
            self._piece([own.within(i * most, (i + 1) * most) for own, most in zip(runs, whole, strict=True)])
            for i in range(pieces)
        ]

    def _piece(self, runs: "list[Runs]") -> Piece:
        lengths = [int(own.ends[-1]) if len(own.ends) else 0 for own in runs]
        eighths = max(-(-length // size) for length, size in zip(lengths, self._part, strict=True))
        rooms = tuple(eighths * size for size in self._part)
        layout = self._layout(rooms)
        buffers = self._buffer(rooms, layout)
        numbers = {name: own.array for name, own in buffers.items()}
        for k, (level, own, length) in enumerate(zip(self.levels, runs, lengths, strict=True)):
            first = np.maximum(own.firsts, 0)
            for j, array in enumerate(level.arrays):
                rows = layout[k, j].of(numbers)
                level.level.arrays[array].read(own.here + first - own.firsts, own.ends - first, rows[:length])
            table = layout[k, "runs"].of(numbers)
            table[:, : len(first)] = own.who, own.there, own.firsts
            table[:, len(first) :] = [[self._data.n], [level.room], [length]]  # nobody's rows, which go nowhere
        return Piece(rooms, buffers)

    def store(self, pieces: list[Piece]) -> None:
        """Send pieces, and have their rows put into their places once the rounds under way no longer need these.

        There is room for the rows of one plan on their way, so those of the one before must have arrived.
        """
        jax.block_until_ready(self._stored)
        for piece in pieces:
            layout = self._layout(piece.rooms)
            store = engine.PROGRAMS.find(
                ("store", tuple(layout.items()), self._shapes),
                lambda: jax.jit(partial(_store, layout), donate_argnums=(0, 1)),
            )
            numbers = {name: own.sent() for name, own in piece.numbers.items()}
            self._rows, self._offsets, self._stored = store(self._rows, self._offsets, numbers)
            if self._reuse:
                self._sent.setdefault(piece.rooms, deque()).append((piece.numbers, self._stored))
            self.moved += sum(room * own.row_bytes for room, own in zip(piece.rooms, self.levels, strict=True))

    def _layout(self, rooms: tuple[int, ...]) -> "Layout":
        """Where a piece has what, by level: the rows of each array, and where they go."""
        if rooms in self._layouts:
            return self._layouts[rooms]
        ends: dict[str, int] = {}

        def part(shape: tuple[int, ...], dtype: Any) -> Part:
            begin = ends.get(np.dtype(dtype).name, 0)
            ends[np.dtype(dtype).name] = begin + int(np.prod(shape))
            return Part(np.dtype(dtype), begin, shape)

        layout: Layout = {}
        for k, (room, samples) in enumerate(zip(rooms, self._samples, strict=True)):
            for j, sample in enumerate(samples):
                layout[k, j] = part((room, *sample.shape), sample.dtype)
            layout[k, "runs"] = part((3, min(room, self._data.n) + 1), np.int32)
        self._layouts[rooms] = layout
        return layout

    def _buffer(self, rooms: tuple[int, ...], layout: "Layout") -> dict[str, placement.Buffer]:
        """Room for a piece: that of one which has arrived, or new."""
        sent = self._sent.get(rooms)
        if sent and sent[0][1].is_ready():
            return sent.popleft()[0]
        rooms_of: dict[Any, int] = {}
        for part in layout.values():
            rooms_of[part.dtype] = max(rooms_of.get(part.dtype, 0), part.begin + int(np.prod(part.shape)))
        return {dtype.name: placement.Buffer(room, dtype) for dtype, room in rooms_of.items()}


class Part(NamedTuple):
    """Where in the numbers of a type an array is."""

    dtype: np.dtype[Any]
    begin: int
    shape: tuple[int, ...]

    def of(self, numbers: dict[str, Any]) -> Any:
        """The array itself."""
        return numbers[self.dtype.name][self.begin : self.begin + int(np.prod(self.shape))].reshape(self.shape)


Layout = dict[tuple[int, Any], Part]


class Runs(NamedTuple):
    """Clients' rows: each one's stand together, and all of them end to end."""

    who: np.ndarray
    here: np.ndarray  # where they begin on the host
    there: np.ndarray  # and in the pool
    firsts: np.ndarray  # and end to end; a client's first may be before all that is looked at
    ends: np.ndarray

    def within(self, begin: int, end: int) -> "Runs":
        """Those that have rows in a window; places are counted from there."""
        which = slice(np.searchsorted(self.ends, begin, "right"), np.searchsorted(self.firsts, end))
        who, here, there, firsts, ends = (own[which] for own in self)
        return Runs(who, here, there, firsts - begin, np.minimum(ends, end) - begin)


def _store(layout: Layout, rows: Any, offsets: Any, numbers: Any) -> Any:
    def level(k: int) -> tuple[list[Array], Array]:
        who, there, firsts = layout[k, "runs"].of(numbers)
        place = jnp.arange(layout[k, 0].shape[0], dtype=jnp.int32)
        begun = jnp.zeros_like(place).at[jnp.maximum(firsts, 0)].add(1, mode="drop")
        where = place + (there - firsts)[jnp.cumsum(begun) - 1]
        put = lambda a, new: a.at[where].set(new, mode="drop", unique_indices=True)
        moved = [put(a, layout[k, j].of(numbers)) for j, a in enumerate(rows[k])]
        return moved, offsets[k].at[who].set(there, mode="drop")

    each = [level(k) for k in range(len(rows))]
    return [own for own, _ in each], [own for _, own in each], jnp.bool_(True)


def _stage(traced: engine.Traced, data: Fetched) -> Stage | None:
    """Room for what rounds use; None if a cohort has none, or can't be told beforehand."""
    plan, job = traced.round, traced.job
    if not own_cohort(plan):
        return None
    held = fetched.levels(job.clients)
    marked = fetched.with_rows(data.described, lambda k, j, sample: ("row", k, j), data.samples)
    leaves = jax.tree.leaves(marked, is_leaf=lambda a: isinstance(a, tuple) and a[:1] == ("row",))
    read = [leaves[i] for call in plan.body.of(MapCall) for i in call.data]
    looked_at = {leaf for leaf in read if isinstance(leaf, tuple)}
    names = list(data.described.levels())
    used = [
        Used(name, held[name], tuple(sorted(j for _, k, j in looked_at if names[k] == name)), 0)
        for name in names
        if any(names[k] == name for _, k, _ in looked_at)
    ]
    rooms = _rooms(used, job.cohort, limit())
    return None if not rooms else Stage(data, [own._replace(room=room) for own, room in zip(used, rooms, strict=True)])


def _rooms(used: list[Used], cohort: int, most: int) -> list[int]:
    """For each level the rows that there is room for: those of any cohort, and the same share of the rest; else none.

    Room is left for the rows of a cohort that are on their way.
    """
    least = [fetched.largest(own.level.sizes, cohort) for own in used]
    whole = [int(own.level.sizes.sum()) for own in used]
    size = lambda rows: sum(own.row_bytes * count for own, count in zip(used, rows, strict=True))
    room = most - min(max(size(least), most // 8), most // 2)
    if size(whole) <= most:
        return whole
    if size(least) > room:
        return []
    share = (room - size(least)) / (size(whole) - size(least))
    return [few + int(share * (all_ - few)) for few, all_ in zip(least, whole, strict=True)]


def own_cohort(plan: Plan) -> bool:
    """Whether all work of a round is that of its own cohort: no other is drawn in it."""

    def holds(body: Body, cohort: set[Any]) -> bool:
        loops = [step for step in body.steps if isinstance(step, LoopCall)]
        within = lambda loop: {
            inner
            for outer, inner in zip(loop.fixed, loop.body.inputs, strict=False)
            if isinstance(outer, Var) and outer in cohort
        }
        mapped = [step for step in body.steps if isinstance(step, MapCall)]
        return all(call.ids in cohort for call in mapped) and all(holds(loop.body, within(loop)) for loop in loops)

    return holds(plan.body, {plan.inputs.ids})
