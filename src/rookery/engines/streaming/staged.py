"""Runs with rows on the host: the rows of the next cohorts travel to the device while it computes.

The device holds the rows of as many clients as a limit allows. Clients that a cohort needs and the device does not hold
are transferred, and replace those that are needed last. A round is computed as if all data were on the device: the
stage's arrays stand for all rows, and each client's offset says where its rows are.

Rows are fetched block by block instead (see fetched.py) for the start, for evaluations, and for rounds that draw
another cohort or whose cohort does not fit.
"""

import weakref
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cached_property, partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from rookery.data.clients import Clients
from rookery.data.cohort import Draw
from rookery.engines import engine
from rookery.engines.engine import Job
from rookery.engines.simulation import device
from rookery.engines.simulation.device import Program
from rookery.engines.streaming import fetched, pinned
from rookery.engines.streaming.cohorts import Cohorts
from rookery.engines.streaming.pool import Pool, Prefetch
from rookery.engines.streaming.stage import Piece, Stage, stage_for
from rookery.language.ledger import Amounts
from rookery.plan.trace import Carry

TOGETHER = 2**25  # bytes that rounds prefetched together may need, beyond the first of them
_SHARE = 8  # rounds that replace more than this part of the stage are not prefetched together: others could not stay

Incoming = Future[tuple[Prefetch, list[Piece]]]


def opened(job: Job, settings: device.Settings) -> Any:
    """Open a session for clients whose rows are on the host."""
    if settings.mesh is not None:
        raise ValueError(
            f'Simulation: mesh must be None for clients with placement="{job.clients.placement}", which are computed '
            f'on one device; got mesh={settings.mesh!r}. Leave mesh out, or give placement="device".'
        )
    if settings.debug:
        from rookery.engines.simulation import debug

        traced, data, _ = fetched.prepared(job, settings.block, True, settings.convolutions)
        return debug.Session(traced, settings, data)
    if job.clients.placement == "pinned":
        return pinned.Session(job, settings, limit(settings))
    return Session(job, settings)


def limit(settings: device.Settings) -> int:
    """The bytes of device memory for rows: half of what is free, or 2**28 if that is unknown, unless they are given."""
    if settings.device_bytes is not None:
        return settings.device_bytes
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
        self._stage = stage_for(traced, data, limit(settings))
        if self._stage is not None:
            self._staged = engine.traced(job, convolve=settings.convolutions, shapes=self._stage.shapes)
            self._cohorts = Cohorts(self._staged.seed, job.clients.n, job.draw)
            levels = self._stage.levels
            columns = zip(*((used.level.sizes, used.row_bytes, used.capacity) for used in levels), strict=True)
            sizes, costs, capacities = columns
            self._pool = Pool(sizes, costs, capacities, self._cohorts)
            two_cohorts = lambda used: min(used.level.sizes.sum(), 2 * job.cohort * used.level.sizes.mean())
            several = all(used.capacity >= two_cohorts(used) for used in levels)
            self._rounds_per_call = device.ROUNDS_AT_ONCE if several else 1
        self._ready: Prefetch | None = None  # rounds whose rows are on the device, or on their way
        self._incoming: Incoming | None = None  # the rounds after them
        self._reader = ThreadPoolExecutor(1, "rookery-reader")  # reads rows while rounds are computed
        weakref.finalize(self, self._reader.shutdown, wait=False)

    @cached_property
    def fingerprint(self) -> str:
        """A digest of the program with all rows on the device."""
        return engine.traced(self._job, convolve=self._settings.convolutions).fingerprint

    @property
    def moved(self) -> int:
        """The bytes of rows sent to the device for rounds."""
        return 0 if self._stage is None else self._stage.moved

    def close(self) -> None:
        """Release the state and the rows on the device."""
        super().close()
        self._reader.shutdown(cancel_futures=True)
        self._incoming = None
        self._stage = None

    def advance(self, rounds: int) -> list[Amounts]:
        """See `engine.Session.advance`. Rows for later rounds are sent while these rounds are computed."""
        stage, job = self._stage, self._job
        if stage is None:
            return super().advance(rounds)
        traced, strict = self._staged, job.on_nonfinite == "stop"
        program = self._rounds(stage.clients)
        done: list[Amounts] = []
        flights: deque[_Flight] = deque()
        go: Any = jnp.bool_(True)
        t, end = self.rounds, self.rounds + rounds
        self._cohorts.noise = np.asarray(self._carry.noise) if job.draw.secret else ()
        try:
            while t < end and self.stopped is None:
                self._bring(t)
                assert self._ready is not None
                count = min(self._ready.end, end, t + self._rounds_per_call) - t
                self._carry, reports, go = program(
                    traced.round.consts, stage.clients, traced.hyper, self._carry, t, count, strict, traced.seed, go
                )
                flights.append(_Flight(count, reports))
                t += count
                if len(flights) > 1:
                    done += self._landed(flights)
        finally:  # also if rows could not be read: the state is the one after all rounds that were begun
            while flights and self.stopped is None:
                done += self._landed(flights)
        return done

    def _landed(self, flights: deque[_Flight]) -> list[Amounts]:
        """The cost of the first of these rounds, once they are computed."""
        reports = jax.device_get(flights[0].reports)
        return self._completed(reports, flights.popleft().rounds)

    def _bring(self, t: int) -> None:
        """Get the rows for round t onto the device or on their way, and have those for later rounds read."""
        assert self._stage is not None
        while self._ready is None or not self._ready.begin <= t < self._ready.end:
            self._incoming = self._incoming or self._request(t)
            try:
                prefetch, pieces = self._incoming.result()
                self._stage.store(pieces)  # also those of other rounds: the pool takes them for stored
            except BaseException:
                if self._incoming.done():  # an error, so it is unknown what has arrived; an interrupt waits again
                    self._pool.clear()
                    self._ready = self._incoming = None
                raise
            self._ready, self._incoming = prefetch, None
        if self._incoming is None:
            self._incoming = self._request(self._ready.end)

    def _request(self, t: int) -> Incoming:
        """Have the rows of the rounds from t on read."""
        assert self._stage is not None
        most, enough = device.ROUNDS_AT_ONCE, min(TOGETHER, self._stage.nbytes // _SHARE)
        if t != self._pool.end:
            self._cohorts.restart(t)
        self._cohorts.reach(t + 2 * most)
        return self._reader.submit(_read, self._pool, self._stage, t, most, enough)

    def _rounds(self, clients: Clients) -> Any:
        of, job, block = self._staged.round, self._job, self._settings.block
        fixed = job.draw, job.minimum, self._rounds_per_call, device.together()
        return engine.PROGRAMS.find(
            ("staged rounds", of.identity, engine.shapes(clients), block, *fixed),
            lambda: engine.compiled(of, partial(advance, Program(of, clients, block), *fixed), donate_argnums=3),
        )


def advance(
    program: Program, draw: Draw, minimum: int, most: int, together: int, consts: Any, clients: Clients, hyper: Any,
    carry: Carry, begin: Any, rounds: Any, strict: Any, seed: Array, go: Any,
) -> Any:  # fmt: skip
    """See `device.advance`. Nothing is computed unless `go`; the last result is whether all rounds were good."""
    rounds = jnp.where(go, rounds, 0)
    carry, reports = device.advance(
        program, draw, minimum, most, together, consts, clients, hyper, carry, begin, rounds, strict, seed
    )
    good = (reports["least"] >= minimum) & (jnp.all(reports["finite"], axis=1) | ~jnp.asarray(strict))
    return carry, reports, go & jnp.all(good | (jnp.arange(most) >= rounds))


def _read(pool: Pool, stage: Stage, t: int, most: int, enough: int) -> tuple[Prefetch, list[Piece]]:
    """Schedule the rounds from t on and read their rows. It runs in a thread without JAX's thread-local settings."""
    prefetch = pool.prefetch(t, most, enough)
    return prefetch, stage.read(prefetch.moves)
