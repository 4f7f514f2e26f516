"""Runs with pinned rows: the program of the rounds reads the rows of each cohort by itself.

A round begins with a copy of its cohort's rows to the device, and is then computed as if all rows were there. Many
rounds are one compiled call, in which the host has nothing to do.

Rows are read block by block instead (see gathered.py) for the start, for evaluations, and for rounds that draw another
cohort or whose cohort does not fit.
"""

from dataclasses import replace
from functools import cached_property, partial
from typing import Any

import jax

from rookery.engines import engine
from rookery.engines.engine import Job
from rookery.engines.simulation import device
from rookery.engines.streaming import fetched
from rookery.engines.streaming.rowless import largest
from rookery.engines.streaming.used import used_levels, uses_own_cohort
from rookery.language.ledger import Amounts
from rookery.plan.trace import Given


class Session(device.Session):
    """A run with pinned rows.

    Attributes:
        cohort_bytes: the bytes of rows that are read for a round; 0 if they are read block by block.
    """

    def __init__(self, job: Job, settings: device.Settings, most: int) -> None:
        traced, data, block = fetched.prepared(job, settings.block, convolve=settings.convolutions)
        needed = sum(largest(used.level.sizes, job.cohort) * used.row_bytes for used in used_levels(traced, data))
        fits = needed <= most and uses_own_cohort(traced.round)
        self.cohort_bytes = needed if fits else 0
        super().__init__(traced, settings, rows=self.cohort_bytes)
        self._settings, self._side_by_side = settings, self._block
        self._data: Any = data
        self._block = block
        if fits:
            levels = data.rowless.levels().values()
            capacities = tuple(0 if level is None else largest(level.sizes, job.cohort) for level in levels)
            self._cohort: Any = replace(data, capacities=capacities)
            shapes = self._cohort.shapes()
            self._round = engine.traced(job, convolve=settings.convolutions, shapes=shapes).round

    @cached_property
    def fingerprint(self) -> str:
        """Of the program with all rows on the device."""
        return engine.traced(self._job, convolve=self._settings.convolutions).fingerprint

    def advance(self, rounds: int) -> list[Amounts]:
        """See `engine.Session.advance`."""
        if not self.cohort_bytes:
            return super().advance(rounds)
        of, job, data, block = self._round, self._job, self._cohort, self._side_by_side
        fixed = job.draw, job.minimum, device.ROUNDS_AT_ONCE, device.together()
        program = engine.PROGRAMS.find(
            ("pinned rounds", of.identity, engine.shapes(data), block, *fixed),
            lambda: engine.compiled(of, partial(device.advance, Program(of, data, block), *fixed), donate_argnums=3),
        )
        return self._advanced(rounds, program, of, data)

    def init(self) -> Amounts:
        """See `engine.Session.init`."""
        amounts = super().init()
        self._carry = _committed(self._carry)
        return amounts

    def restore(self, saved: Any, rounds: int) -> None:
        """See `engine.Session.restore`."""
        super().restore(_committed(saved), rounds)


def _committed(carry: Any) -> Any:
    """Return arrays that are committed to the device, as pinned rows are. Others would be compiled for again."""
    return jax.device_put(carry, jax.local_devices()[0])


class Program(device.Program):
    """A round's plan, interpreted with the rows of its cohort."""

    def __call__(self, consts: list[Any], clients: Any, given: Given) -> tuple[Any, dict[str, Any]]:
        return super().__call__(consts, clients.cohort(given.ids), given)
