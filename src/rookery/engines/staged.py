"""Data that stay on the host: the rows of the next rounds' cohorts travel to the device while it computes.

The device holds the rows of as many clients as a limit allows, in a pool; whoever a cohort needs and is not there is
brought, in the place of those who are needed last. A round is then what it is with all data on the device: the pool's
arrays stand for all rows, and each client's offset says where in the pool its own are. A round that needs clients who
can't be told beforehand, or more of them than there is room for, has its rows fetched block by block instead, as do
the start and evaluations: see fetched.py.
"""

from collections import deque
from collections.abc import Iterator
from functools import cached_property, partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from rookery import fed, placement
from rookery.clients import Clients
from rookery.engines import engine, fetched, pool, simulation
from rookery.engines.engine import Job
from rookery.engines.fetched import Fetched, Level
from rookery.engines.simulation import Program
from rookery.ledger import Amounts
from rookery.plan import Body, Call, Carry, Plan

BYTES: int | None = None  # of device memory for rows; None: half of what is free, or 2**28 if nobody knows
PIECE = 2**25  # bytes that are sent at once
TOGETHER = 2**25  # bytes that rounds planned together may need, beyond the first of them
_SHARE = 8  # of the pool: rounds that replace more of it are not planned together, or nobody could stay for later ones
_PIECES = 4  # of a size that may be on their way at once
_PARTS = 8  # a piece has room for as many eighths as it needs
_AHEAD = 256  # rounds whose cohorts are drawn at once
_DRAWN = 2**24  # numbers that may be needed for that


def opened(job: Job, settings: simulation.Simulation) -> Any:
    """A session for clients whose rows are on the host."""
    if settings.mesh is not None:
        raise ValueError(
            'Simulation: clients with placement="host" are computed on one device, and mesh divides them among '
            'several: leave mesh out, or give placement="device".'
        )
    if settings.debug:
        from rookery.engines import debug

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


class Session(simulation.Session):
    """A run with rows on the host."""

    def __init__(self, job: Job, settings: simulation.Simulation) -> None:
        traced, data, block = fetched.prepared(job, settings.block, convolve=settings.convolutions)
        super().__init__(traced, settings)
        self._data: Any = data
        self._block = block
        self._settings = settings
        self._stage = _stage(traced, data)
        if self._stage is not None:
            self._pooled = engine.traced(job, convolve=settings.convolutions, seen=self._stage.seen)
            cohorts = Cohorts(self._pooled.seed, job.clients.n, job.cohort)
            levels = self._stage.levels
            sizes, costs, rooms = zip(*((own.level.sizes, own.row_bytes, own.room) for own in levels), strict=True)
            self._pool = pool.Pool(sizes, costs, rooms, cohorts)
        self._ready: pool.Plan | None = None  # rounds for which all rows are there, or on their way

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
        if self.stopped is None:
            self._bring(t)
        while t < end and self.stopped is None:
            assert self._ready is not None
            count = min(self._ready.end, end) - t
            self._carry, reports, go = program(
                traced.round.consts, stage.clients, traced.hyper, self._carry, t, count, strict, traced.seed, go
            )
            flights.append(_Flight(count, reports))
            t += count
            while len(flights) > 1:
                done += self._landed(flights.popleft())
            if self.stopped is None:
                self._bring(t)
        while flights and self.stopped is None:
            done += self._landed(flights.popleft())
        return done

    def _landed(self, flight: _Flight) -> list[Amounts]:
        return self._told(jax.device_get(flight.reports), flight.rounds)

    def _bring(self, t: int) -> None:
        """See to it that the rows for round t are there, or on their way."""
        assert self._stage is not None
        if self._ready is None or not self._ready.begin <= t < self._ready.end:
            self._ready = self._pool.plan(t, simulation.ROUNDS_AT_ONCE, min(TOGETHER, self._stage.nbytes // _SHARE))
            self._stage.bring(self._ready.moves)

    def _rounds(self, clients: Clients) -> Any:
        of, job, block = self._pooled.round, self._job, self._settings.block
        fixed = job.cohort, simulation.minimum(job), simulation.ROUNDS_AT_ONCE
        return engine.PROGRAMS.find(
            ("staged rounds", of.identity, simulation.shapes(clients), block, *fixed),
            lambda: jax.jit(partial(advance, Program(of, clients, block), *fixed), donate_argnums=3),
        )


def advance(
    program: Program, cohort: int, minimum: int, most: int, consts: Any, clients: Clients, hyper: Any, carry: Carry,
    begin: Any, rounds: Any, strict: Any, seed: Array, go: Any,
) -> Any:  # fmt: skip
    """See `simulation.advance`; nothing is done unless `go`, and the last result is whether all rounds were good."""
    rounds = jnp.where(go, rounds, 0)
    carry, reports = simulation.advance(
        program, cohort, minimum, most, consts, clients, hyper, carry, begin, rounds, strict, seed
    )
    good = (reports["least"] >= minimum) & (jnp.all(reports["finite"], axis=1) | ~jnp.asarray(strict))
    return carry, reports, go & jnp.all(good | (jnp.arange(most) >= rounds))


class Cohorts:
    """The cohorts of rounds t, t + 1, …, computed where rounds are; those after them are under way meanwhile."""

    def __init__(self, seed: Array, n: int, cohort: int) -> None:
        numbers = cohort**2 if cohort <= 2048 and 8 * cohort <= n else n  # of a draw: see `sample_cohort`
        at_once = max(1, min(_AHEAD, _DRAWN // numbers))

        def draw(seed: Array, begin: Array) -> Array:
            each = lambda t: engine.round_keys(seed, t, n, cohort).ids
            return jax.lax.map(each, begin + jnp.arange(_AHEAD, dtype=jnp.int32), batch_size=at_once)

        self._seed, self._draw = seed, engine.PROGRAMS.find(("cohorts", n, cohort), lambda: jax.jit(draw))
        self._next: tuple[int, Any] = (-1, None)

    def __call__(self, t: int) -> np.ndarray:
        """A row for each round."""
        begin, ids = self._next
        if begin != t:
            ids = self._draw(self._seed, jnp.int32(t))
        self._next = (t + _AHEAD, self._draw(self._seed, jnp.int32(t + _AHEAD)))
        return np.asarray(ids)


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


class Stage:
    """The pool's arrays, and the way there.

    Attributes:
        levels: those that are used.
        seen: the shapes with which a round is traced.
        clients: their rows, as far as they are there; the arrays are donated by `bring`.
        moved: bytes that were sent.
    """

    def __init__(self, data: Fetched, levels: list[Used]) -> None:
        self.levels, self.moved, self._data = levels, 0, data
        rooms = {own.name: own.room for own in levels}
        names = list(data.described.levels())
        shape = lambda k, j, sample: sample.rows(rooms.get(names[k], data.rooms[k]))
        self.seen = fetched.with_rows(data.described, shape, data.samples)
        arrays = [[own.level.arrays[j] for j in own.arrays] for own in levels]
        self._rows = [
            [jnp.zeros((own.room, *array.shape[1:]), array.dtype) for array in each]
            for own, each in zip(levels, arrays, strict=True)
        ]
        self._offsets = [jnp.zeros(data.n, jnp.int32) for _ in levels]
        self._none = [  # of arrays that no round looks at
            [jnp.zeros((1, *sample.shape), sample.dtype) for sample in (own[1] if own else ())] for own in data.samples
        ]
        self._reuse = jax.default_backend() != "cpu"  # a CPU's device may use a buffer as it is
        self._buffers: dict[Any, deque[tuple[list[np.ndarray], Any]]] = {}

    @property
    def nbytes(self) -> int:
        """Of the pool."""
        return sum(own.room * own.row_bytes for own in self.levels)

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

    def bring(self, moves: list[tuple[int, ...]]) -> None:
        """Send clients' rows to their places; nothing is waited for but for buffers that are still being sent."""
        if not moves:
            return
        who, *places = np.array(moves).T
        for k, (own, begins) in enumerate(zip(self.levels, places, strict=True)):
            sizes = own.level.sizes[who]
            rows, where = (fetched.spread(begin, sizes) for begin in (own.level.offsets[who], begins))
            firsts = np.cumsum(sizes) - sizes
            for begin, end, size in _pieces(own, len(rows)):
                here = slice(*np.searchsorted(firsts, [begin, end]))  # the clients whose first row is in it
                self._send(k, own, size, rows[begin:end], where[begin:end], who[here], begins[here])

    def _send(self, k: int, own: Used, size: int, rows: Any, where: Any, who: Any, begins: Any) -> None:
        """A piece with room for `size` rows: these of the host to these of the pool; and where clients now begin."""
        buffers = self._buffer(k, own, size)
        for j, buffer in zip(own.arrays, buffers, strict=True):
            own.level.arrays[j].read(rows, buffer[: len(rows)])
        sent = jax.device_put(buffers)
        if self._reuse:
            self._buffers[k, size].append((buffers, sent))
        store = engine.PROGRAMS.find(
            ("store", simulation.shapes((self._rows[k], sent)), self._data.n),
            lambda: jax.jit(_store, donate_argnums=(0, 1)),
        )
        filled = lambda a, beyond: np.concatenate([a, beyond + np.arange(size - len(a))]).astype(np.int32)
        given = filled(where, own.room), filled(who, self._data.n), filled(begins, 0)  # beyond the last: not written
        self._rows[k], self._offsets[k] = store(self._rows[k], self._offsets[k], sent, *given)
        self.moved += size * own.row_bytes

    def _buffer(self, k: int, own: Used, size: int) -> list[np.ndarray]:
        """Room for a piece: new, or that of a piece which has arrived."""
        held = self._buffers.setdefault((k, size), deque())
        if len(held) < _PIECES:
            arrays = [own.level.arrays[j] for j in own.arrays]
            return [placement.buffer((size, *a.shape[1:]), a.dtype) for a in arrays]
        buffers, sent = held.popleft()
        jax.block_until_ready(sent)
        return buffers


def _store(rows: Any, offsets: Any, sent: Any, where: Any, who: Any, at: Any) -> Any:
    put = lambda a, new: a.at[where].set(new, mode="drop", unique_indices=True)
    return [put(a, new) for a, new in zip(rows, sent, strict=True)], offsets.at[who].set(at, mode="drop")


def _pieces(own: Used, rows: int) -> Iterator[tuple[int, int, int]]:
    """The first row of each piece, the row after its last, and its room: of few different sizes."""
    part = -(-min(PIECE // max(1, own.row_bytes), own.room) // _PARTS) or 1
    whole = _PARTS * part
    for begin in range(0, rows, whole):
        end = min(begin + whole, rows)
        yield begin, end, -(-(end - begin) // part) * part


def _stage(traced: engine.Traced, data: Fetched) -> Stage | None:
    """Room for what rounds use; None if a cohort has none, or can't be told beforehand."""
    plan, job = traced.round, traced.job
    if not own_cohort(plan):
        return None
    held = fetched.levels(job.clients)
    marked = fetched.with_rows(data.described, lambda k, j, sample: ("row", k, j), data.samples)
    leaves = jax.tree.leaves(marked, is_leaf=lambda a: isinstance(a, tuple) and a[:1] == ("row",))
    maps = [eqn for eqn in plan.calls.values() if eqn.primitive is fed.client_map]
    looked_at = {leaves[i] for eqn in maps for i in eqn.params["inputs"].data if isinstance(leaves[i], tuple)}
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
    given = jax.tree.unflatten(jax.tree.structure(plan.given), plan.body.inputs[len(plan.consts) :])

    def holds(body: Body, ids: set[Any]) -> bool:
        for step in body.steps:
            if not isinstance(step, Call):
                continue
            if step.eqn.primitive is fed.client_map and step.eqn.invars[0] not in ids:
                return False
            if step.body is not None:
                fixed = step.eqn.invars[step.eqn.params["length"] is None :]
                pairs = zip(fixed[: len(fixed) - len(step.body.outputs)], step.body.inputs, strict=False)
                same = {inner for outer, inner in pairs if not hasattr(outer, "val") and outer in ids}
                if not holds(step.body, same):
                    return False
        return True

    return holds(plan.body, {given.ids})
