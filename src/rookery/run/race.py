"""Successive halving: candidates of one algorithm, run side by side and compared at the rungs."""

import math
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import jax
import numpy as np
from jaxtyping import Array, Bool

from rookery.base.arguments import kind_of
from rookery.base.content import Content
from rookery.engines.engine import Job
from rookery.engines.simulation import Simulation
from rookery.engines.simulation.sweep import Sweep
from rookery.language import hyperparameters
from rookery.language.metrics import check_numbers, direction
from rookery.problems.functions import required_arguments
from rookery.run.evaluation import Evaluate, over_clients
from rookery.run.progress import SECONDS_PER_CALL
from rookery.run.result import RoundFailedError
from rookery.run.search import is_real

if TYPE_CHECKING:
    import pandas as pd

_HALVINGS = 3  # the rungs are at 1/8, 1/4, 1/2 and all of the rounds
_HOPELESS = 1e6  # a metric worse than the start by this many times max(1, |start|) counts as diverged


def rungs(rounds: int) -> list[int]:
    """Return the rounds at which the candidates are compared.

    >>> rungs(200), rungs(5), rungs(1)
    ([25, 50, 100, 200], [1, 2, 3, 5], [1])
    """
    return sorted({-(-rounds // 2**k) for k in range(_HALVINGS + 1)})


class _Group:
    """Candidates that differ only in real numbers: one compiled program runs them side by side."""

    def __init__(
        self, job: Job, algorithms: list[Any], real: set[str], members: list[int], slots: int, engine: Simulation
    ):
        self.members = members
        self._points = [{name: getattr(algorithms[i], name) for name in real} for i in members]
        self.sweep = Sweep(replace(job, algorithm=algorithms[members[0]]), real, engine)
        self.width, self._padded = self.sweep.even(slots), self.sweep.even(len(members))
        self._carries: Any = None

    def start(self) -> None:
        """Compute the candidates' state before the first round."""
        self._carries = self.sweep.start(self._values([*range(len(self.members))], self._padded), self._padded)

    def advance(
        self, ids: list[int], at: int, count: int, left: list[float] | None = None
    ) -> tuple[Bool[Array, " slots"], Bool[Array, " slots"], Any]:
        """Advance at most `width` members from round `at` by `count`; see `Sweep.advance` for what each slot gives.

        `left`: the seconds of the clock that each of them may still use; None: any number.
        """
        places = [self.members.index(i) for i in ids]
        slots = np.asarray(places + [self._padded] * (self.width - len(places)), np.int32)  # padding is discarded
        values = self._values(places, self.width)
        padding = [0.0] * (self.width - len(ids))
        seconds = () if left is None else np.asarray([*left, *padding], np.float32)
        self._carries, *ended = self.sweep.advance(values, self._carries, slots, at, count, seconds)
        return tuple(ended)

    def candidate(self, i: int) -> tuple[Any, Any]:
        """Return the state of a candidate and the memory of its clients."""
        return self.sweep.candidate(self._carries, self.members.index(i))

    def _values(self, places: list[int], length: int) -> dict[str, tuple[float, ...]]:
        padded = places + [0] * (length - len(places))
        return {name: tuple(self._points[k][name] for k in padded) for name in self._points[0]}


class Race:
    """The candidates of a search: their metrics so far, and which of them have diverged.

    They are compared after equal rounds or, with `until`, after equal seconds of the clock. Each candidate has then
    completed all rounds that end within that time, but at most `rounds`.
    """

    def __init__(
        self, job: Job, candidates: list[dict[str, Any]], evaluate: Evaluate | None, metric: str, slots: int,
        engine: Simulation, rounds: int, until: float | None = None,
    ) -> None:  # fmt: skip
        self.candidates, self._rounds, self._until = candidates, rounds, until
        self.rungs: list[Any] = rungs(rounds) if until is None else [until / 2**k for k in range(_HALVINGS, -1, -1)]
        self.at = [0 for _ in candidates]  # the rounds that each has completed
        self._clock = [0.0 for _ in candidates]  # their seconds; only with `until`
        self._waiting: set[int] = set()  # those whose next round would end after the next rung; only with `until`
        self.shown: list[dict[Any, float]] = [{} for _ in candidates]  # the metric by rung
        self.lost: list[int | None] = [None for _ in candidates]  # the round at which it was found to have diverged
        self.compile_seconds, self.start = 0.0, math.nan  # `start`: the metric before the first round
        goal = direction(metric, otherwise=False)
        self._evaluate, self._signed, self._metric, self._higher = evaluate, metric, goal.name, goal.higher_is_better
        self._arguments = 3 if evaluate is not None and required_arguments(evaluate) >= 3 else 2  # x, y and memory
        self._weights = None if job.measure is None else np.asarray(job.clients.weights, float)
        self._everyone, self._faults = np.ones(job.clients.n, bool), job.faults
        algorithms = [replace(job.algorithm, **values) for values in candidates]
        differ = [*candidates[0], *hyperparameters.made_by_class(algorithms[0])]
        known = {field.name for field in fields(job.algorithm)}
        real = {name for name in differ if name in known and is_real(algorithms[0], name)}
        members: dict[str, list[int]] = {}
        for i, algorithm in enumerate(algorithms):
            fixed = [getattr(algorithm, name) for name in differ if name not in real]
            members.setdefault(f"{fixed!r} {Content().of(fixed)}", []).append(i)  # a repr may leave numbers out
        self.slots = min(slots, max(map(len, members.values())))
        self._groups = [_Group(job, algorithms, real, ids, self.slots, engine) for ids in members.values()]

    def compile(self) -> None:
        """Compile the programs and compute the candidates' state before the first round."""
        begin = time.perf_counter()
        for group in self._groups:
            group.start()
            if group is self._groups[0]:
                self.start = self._measure(0, 0)
                direction(self._signed)
            jax.block_until_ready(group.advance(group.members[:1], 0, 0, None if self._until is None else [0.0]))
        self.compile_seconds = time.perf_counter() - begin

    def climb(self, bar: Callable[..., None], interrupt: threading.Event) -> None:
        """Run to each rung the better half of the candidates that reached the one before."""
        rungs = self.rungs
        lengths = np.diff([0, *rungs])
        # Half of the candidates each time, and more where slots would be empty.
        keep = [self.slots * -(-len(self.candidates) // (2**k * self.slots)) for k in range(len(rungs))]
        for k, (begin, end) in enumerate(pairwise([0, *rungs])):
            ready = [i for i in self.ranked() if self.lost[i] is None and max(self.shown[i], default=0) == begin]
            later = float(np.dot(keep[k + 1 :], lengths[k + 1 :]))
            while ready and not interrupt.is_set():
                entrants, ready = ready[: keep[k]], ready[keep[k] :]
                if self._run(entrants, end, later, bar, interrupt):
                    break
            if not interrupt.is_set() and not any(self.at):
                raise ValueError(
                    f"until must leave candidates the time for a round before they are first compared; got "
                    f"{self._until:g} s, and none has completed one after {end:g} s. Give more seconds."
                )

    def _run(
        self, entrants: list[int], end: Any, later: float, bar: Callable[..., None], interrupt: threading.Event
    ) -> list[int]:
        """Run the entrants to the rung `end` (or Ctrl-C), compare them, and return the survivors."""
        live, per_call = entrants, 1
        self._waiting.clear()
        while (running := self._running(live, end)) and not interrupt.is_set():
            diverged, done = sum(round is not None for round in self.lost), sum(self._reached())
            until = f"round {end}" if self._until is None else f"{end:g} s"
            text = f"{len(live)} of {len(self.candidates)} candidates to {until}, {diverged} diverged"
            bar(done, done + sum(end - self._reached()[i] for i in live) + later, text)
            last = end if self._until is None else self._rounds
            count = min(per_call, last - max(self.at[i] for i in running))
            began = time.perf_counter()
            good = self._advance(running, count, end)
            per_call = max(1, min(2 * count, int(SECONDS_PER_CALL * count / (time.perf_counter() - began))))
            self._drop(running, good)
            live = [i for i in live if self.lost[i] is None]
        values = np.array([self._measure(i, self.at[i]) for i in live])
        place = max((self._reached()[i] for i in live), default=end) if interrupt.is_set() else end
        for i, value in zip(live, values.tolist(), strict=True):
            if math.isfinite(value):
                self.shown[i][place] = value
        good = np.isfinite(values)
        if math.isfinite(self.start):
            worse = self.start - values if self._higher else values - self.start
            good &= worse <= _HOPELESS * max(1.0, abs(self.start))
        return self._drop(live, good)

    def _running(self, live: list[int], end: Any) -> list[int]:
        """Return the candidates that have rounds to compute before the rung `end`."""
        if self._until is None:
            return [i for i in live if self.at[i] < end]
        return [i for i in live if i not in self._waiting and self.at[i] < self._rounds]

    def _reached(self) -> Sequence[float]:
        """Return how far the candidates have come, in rounds or in seconds."""
        return self.at if self._until is None else self._clock

    def _drop(self, live: list[int], good: np.ndarray) -> list[int]:
        for i, fine in zip(live, good, strict=True):
            if not fine:
                self.lost[i] = self.at[i]
        return [i for i in live if self.lost[i] is None]

    def _advance(self, running: list[int], count: int, end: Any) -> np.ndarray:
        """Advance these candidates by `count` rounds, or until the rung; return whether all values were finite."""
        calls = []
        for group in self._groups:
            by_round: dict[int, list[int]] = {}
            for i in running:
                if i in group.members:
                    by_round.setdefault(self.at[i], []).append(i)
            for at, ids in by_round.items():
                for k in range(0, len(ids), group.width):
                    side_by_side = ids[k : k + group.width]
                    left = None if self._until is None else [end - self._clock[i] for i in side_by_side]
                    calls.append((side_by_side, left, group.advance(side_by_side, at, count, left)))
        fine: dict[int, Any] = {}
        for side_by_side, left, (finite, replied, timed) in jax.device_get(calls):
            at = self.at[side_by_side[0]]
            if not replied[: len(side_by_side)].all() and self._faults is not None:
                raise RoundFailedError(
                    f"Between rounds {at + 1} and {at + count} fewer replies with a positive weight arrived than "
                    f"faults.minimum={self._faults.minimum}. Lower the minimum or the dropout."
                )
            fine |= dict(zip(side_by_side, finite, strict=False))
            done = [count] * len(side_by_side) if left is None else timed[1].tolist()
            for k, i in enumerate(side_by_side):
                self.at[i] += done[k]
                if left is not None:
                    self._clock[i] += left[k] - float(timed[0][k])
                    if done[k] < count:
                        self._waiting.add(i)
        return np.array([fine[i] for i in running], bool)

    def _measure(self, i: int, at: int) -> float:
        metrics: Any = {}
        with np.errstate(all="ignore"):  # a candidate whose numbers overflow is dropped
            group = next(group for group in self._groups if i in group.members)
            state, memory = group.candidate(i)
            if self._evaluate is not None:
                metrics = self._evaluate(*(state.x, state.y, memory)[: self._arguments])
            if self._weights is not None and isinstance(metrics, dict):
                rows = group.sweep.measure(state, memory, at)
                metrics = {**metrics, **over_clients(rows, self._everyone, self._weights)}
        if not isinstance(metrics, dict) or self._metric not in metrics:
            known = ", ".join(metrics) if isinstance(metrics, dict) else kind_of(metrics)
            raise ValueError(
                f"metric={self._metric!r} must name a metric that evaluate returns; it returns {known or 'nothing'}."
            )
        check_numbers("evaluate", metrics)
        return float(metrics[self._metric])

    def ranked(self) -> list[int]:
        """Return the candidates, the best first: by the last rung reached, the metric there, and at earlier rungs."""
        sign = -1 if self._higher else 1

        def rank(i: int) -> Any:
            shown = self.shown[i]
            rounds = sorted(shown, reverse=True)
            return self.lost[i] is not None, [-r for r in rounds[:1]] or [0], [sign * shown[r] for r in rounds]

        return sorted(range(len(self.candidates)), key=rank)

    def table(self) -> "pd.DataFrame":
        """Return `Tuning.table`."""
        import pandas as pd

        columns = sorted({at for shown in self.shown for at in shown})
        rows = []
        for i in self.ranked():
            lost, shown = self.lost[i], self.shown[i]
            last = max(shown, default=0)
            status = "diverged" if lost is not None else "finished" if last == self.rungs[-1] else "stopped"
            value = shown[last] if lost is None and shown else math.nan
            unit = "round {:d}" if self._until is None else "second {:g}"
            at_rungs = {unit.format(at): shown.get(at, math.nan) for at in columns}
            ended = {"status": status, "rounds": self.at[i] if lost is None else lost, "last": value}
            rows.append({**self.candidates[i], **ended, **at_rungs})
        return pd.DataFrame(rows)
