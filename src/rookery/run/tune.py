"""`tune`: search step sizes and other hyperparameters by successive halving, many candidates in one program."""

import math
import secrets
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from itertools import pairwise, product
from typing import TYPE_CHECKING, Any

import jax
import numpy as np
from jaxtyping import Array, Bool

from rookery.base.arguments import check_counts, is_integer, is_number, kind_of
from rookery.base.content import Content
from rookery.data.clients import Clients
from rookery.engines.checks import check_function, check_run, start_values
from rookery.engines.engine import Job
from rookery.engines.simulation import Simulation
from rookery.engines.simulation.sweep import Sweep
from rookery.language import hyperparameters
from rookery.language.channel import Channel, Faults
from rookery.language.fed import Algorithm
from rookery.language.metrics import check_numbers, direction
from rookery.problems.problems import Problem, required_arguments
from rookery.problems.variables import taken
from rookery.run.solve import (
    SECONDS_AT_ONCE,
    Evaluate,
    RoundFailedError,
    check_between,
    interrupts,
    measuring,
    over_clients,
)

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure

Range = tuple[float, float]
Search = dict[str, Range | list[Any]]  # a range of real numbers, or the values to try
CANDIDATES = 49
REACH = 10.0  # how far a search goes from a value, up and down, where no range is given
_HALVINGS = 3  # the rungs are at 1/8, 1/4, 1/2 and all of the rounds
_LEVELS, _PRIMES = (3, 5, 7, 9, 11, 13), (3, 5, 7, 11, 13)  # how many values of each step size; odd: with a middle
_INTEGERS = 5  # how many of a range are tried: each is compiled
_HOPELESS = 1e6  # worse than the start by so many times max(1, |start|) counts as diverged
_EDGE = 0.08  # of a range's logarithm: what counts as its end


@dataclass(frozen=True, eq=False)
class Tuning:
    """What `tune` returns.

    Attributes:
        table: a DataFrame with a row for each candidate, the best first: its values; `status` ("finished", "stopped" at
            a rung, or "diverged"); `rounds`, how many it was given; `last`, its last metric; and the metric at each
            rung, in a column "round 25" and so on.
        best: the algorithm with the best values; None if every candidate diverged, or none was compared yet.
        search: for each hyperparameter that was searched its range (low, high), or the list of values tried.
        metric, higher_is_better: what "best" means.
        start: the metric before the first round, the same for all.
        rounds: those that the last rung asks for.
        seconds, compiling: of the whole search, and the part of it that went into compiling.
        interrupted: whether Ctrl-C was pressed.
    """

    table: "pd.DataFrame"
    best: Algorithm | None
    search: Search
    metric: str
    higher_is_better: bool
    start: float
    rounds: int
    seconds: float
    compiling: float
    interrupted: bool

    @property
    def value(self) -> float:
        """The best candidate's last metric."""
        return float(self.table["last"].iloc[0])

    @property
    def diverged(self) -> int:
        """How many candidates diverged."""
        return int((self.table["status"] == "diverged").sum())

    @property
    def edges(self) -> dict[str, str]:
        """The step sizes and integers whose best value lies at an end of what was searched: "lower" or "upper"."""
        found = {}
        for name, searched in self.search.items() if self.best is not None else ():
            value = getattr(self.best, name)
            if isinstance(searched, list):
                if not all(map(is_integer, searched)):
                    continue
                low, high = min(searched), max(searched)
                ends = {"lower": value == low > 1, "upper": value == high > low}
            else:
                share = math.log(value / searched[0]) / math.log(searched[1] / searched[0])
                ends = {"lower": share <= _EDGE, "upper": share >= 1 - _EDGE}
            if any(ends.values()):
                found[name] = "lower" if ends["lower"] else "upper"
        return found

    def moved(self) -> Search:
        """What to search next: as wide as before, and around the best where that lies at an end."""
        wanted = dict(self.search)
        for name in self.edges:
            searched, middle = self.search[name], getattr(self.best, name)
            low, high = min(searched), max(searched)
            reach = math.sqrt(high / max(low, 1 if isinstance(searched, list) else low))
            if isinstance(searched, list):
                wanted[name] = _integers(max(1, round(middle / reach)), max(round(middle * reach), middle + 1))
            else:
                wanted[name] = (_short(middle / reach), _short(middle * reach))
        return wanted

    def picture(self, title: str = "") -> "Figure":
        """The landscape: how good each candidate was, and which ones diverged."""
        from rookery.run.landscape import landscape  # matplotlib takes a while to import

        table, names = self.table, []
        for name, searched in self.search.items():
            positive = not isinstance(searched, list) or all(is_number(value) and value > 0 for value in searched)
            if not positive:  # words, say: by their places
                table = table.assign(**{name: table[name].map(lambda v, all=searched: 1 + all.index(v))})
                words = ", ".join(f"{place}: {value}" for place, value in enumerate(searched, 1))
                table = table.rename(columns={name: f"{name} ({words})"})
            names.append(name if positive else f"{name} ({words})")
        shown = title or (type(self.best).__name__ if self.best is not None else "All candidates diverged")
        return landscape(table, names, self.metric, self.higher_is_better, self.start, shown)

    def __repr__(self) -> str:
        found = ", ".join(f"{name}={_shown(getattr(self.best, name))}" for name in self.search) if self.best else "none"
        told = f"best: {found}, {self.metric}={self.value:.4g}, {self.diverged} of {len(self.table)} diverged"
        return f"Tuning({told}{', interrupted' if self.interrupted else ''})"


def tune(
    problem: Problem,
    clients: Clients,
    algorithm: Algorithm,
    init: Any,
    rounds: int,
    *,
    metric: str,
    evaluate: Evaluate | None = None,
    evaluate_client: Evaluate | None = None,
    search: Mapping[str, Range | list[Any] | None] | Sequence[str] | None = None,
    candidates: int = CANDIDATES,
    cohort: int | None = None,
    seed: int = 0,
    noise_seed: int | None = None,
    channel: "Channel | Mapping[str, Channel] | None" = None,
    faults: Faults | None = None,
    slots: int | None = None,
    engine: Simulation | None = None,
    progress: bool | str | None = None,
) -> Tuning:
    """Search the step sizes and other hyperparameters of an algorithm by successive halving.

    All candidates run for an eighth of the rounds; the better half goes on to a quarter, the better half of those to
    the half, and the better half again to the end. They see the same cohorts and the same minibatches, those of `solve`
    with this seed, and a candidate's numbers are those that `solve` would give. Candidates are compared by the metric
    at full precision, and equal ones by the rungs before.

    A candidate has diverged, and is dropped, if its state, a client's memory or its metric is no longer finite, or if
    its metric is worse than at the start by more than a million times max(1, |metric at the start|). If all that go on
    diverge, the next best take their places.

    Arguments:
        problem, clients, algorithm, init, rounds, cohort, seed, noise_seed, channel, faults: as in `solve`. What is
            not searched stays as it is in `algorithm`. All candidates get the same noise of a channel.
        evaluate, evaluate_client: one of them or both, as in `solve`.
        metric: the metric that decides, as `keep_best` in `solve`: a name that says which way is better ("accuracy",
            "error_rate"), or any name with a sign, "+name" if higher is better, "-name" if lower is better. If it is
            computed on test data, the best candidate's value is too good: judge the result on other data.
        search: what to search. A range, {"upper_step": (0.01, 1.0)}, of real numbers, or of integers,
            {"local_steps": (1, 20)}, of which at most five are tried; or a list of values, {"local_steps": [1, 5, 20],
            "neumann": ["sum", "cg"]}. None for a range, or names alone: a factor of 10 below and above the algorithm's
            own step size. None: all step sizes. Integers and words are compiled once for each value.
        candidates: how many at most. All combinations of the listed values are tried, each with the same step sizes:
            one or two ranges form a grid, evenly spaced in the logarithm and around the middle of the ranges; more of
            them a part of the grid in which any two values of any two step sizes meet exactly once.
        slots: candidates computed side by side, on all devices together; None: 8, or 16 on a GPU.
        engine: `Simulation(mesh=...)` divides the candidates among devices, each of which has all clients' data. The
            results are those of one device, to rounding.
        progress: show a bar (a string is its title); None: if standard error is a terminal.

    Ctrl-C ends the search after the rounds under way, with the best so far.

    >>> import rookery as rk
    >>> task = rk.tasks.quadratic(clients=3)
    >>> method = task.algorithm(rk.LFedNest, upper_step=0.005)
    >>> found = rk.tune(task.problem, task.clients, method, task.init, 20, evaluate=task.evaluate, metric="distance",
    ...                 search=["upper_step"], candidates=5)
    >>> found.best.upper_step > 0.005
    True
    """
    begin = time.perf_counter()
    engine = Simulation() if engine is None else engine
    if not isinstance(engine, Simulation) or engine.debug:
        raise ValueError(f"engine={engine!r}: tune runs compiled and in this process; give rk.Simulation(mesh=...).")
    if clients.here is not None or not clients.held:
        raise ValueError("tune: this process does not hold the data of all clients; give Clients that hold them.")
    models = taken(problem, init)
    if evaluate is None and evaluate_client is None:
        raise ValueError(f"nothing measures {metric!r}: give evaluate=... or evaluate_client=...")
    if evaluate is not None:
        check_function("evaluate", evaluate, "x, y", "x, y, memory")
    problem, evaluate, measure = models.problem, models.seeing(evaluate), measuring(models, evaluate_client)
    x, y = start_values(problem, clients, models.init)
    check_counts(rounds=rounds, candidates=candidates, slots=1 if slots is None else slots)
    size = check_run(problem, clients, algorithm, x, y, rounds, cohort, 1, seed)
    check_between(channel, faults, noise_seed, size)
    wanted = _ranges(algorithm, search)
    goal = direction(metric, otherwise=False)  # refused below if it does not tell, once it is known to be a metric
    tried = _candidates(wanted, algorithm, int(candidates))
    for one in tried:
        hyperparameters.check(replace(algorithm, **one), clients.n)  # type: ignore[type-var]
    slots = slots or (8 if jax.default_backend() == "cpu" else 16)
    if channel is not None and noise_seed is None:
        noise_seed = secrets.randbits(64)  # the same noise for all, from entropy
    job = Job(problem, clients, algorithm, (x, y), size, int(seed), channel, faults, measure=measure)
    job = replace(job, noise_seed=noise_seed)
    race = _Race(job, tried, evaluate, metric, slots, engine)
    title = progress if isinstance(progress, str) else type(algorithm).__name__
    show = sys.stderr.isatty() if progress is None else bool(progress)
    with _bar(show, title) as bar, interrupts() as interrupt:
        bar(0, 1, "compiling")
        race.compile()
        race.climb(_rungs(int(rounds)), bar, interrupt)
        interrupted = interrupt.is_set()
    order = race.ranked()
    best = order[0] if race.lost[order[0]] is None and race.shown[order[0]] else None
    return Tuning(
        table=race.table(order, int(rounds)),
        best=None if best is None else replace(algorithm, **tried[best]),  # type: ignore[type-var]
        search=wanted,
        metric=goal.name,
        higher_is_better=goal.higher_is_better,
        start=race.start,
        rounds=int(rounds),
        seconds=time.perf_counter() - begin,
        compiling=race.compiling,
        interrupted=interrupted,
    )


# What is searched.


def step_sizes(algorithm: Algorithm) -> list[str]:
    """The names of an algorithm's step sizes, but for words ("auto") and those that an optimizer takes the place of.

    >>> import rookery as rk
    >>> step_sizes(rk.FedNest()), step_sizes(rk.FedNest(hessian_step=0.1)), step_sizes(rk.FedAvg())
    (['upper_step', 'lower_step'], ['upper_step', 'lower_step', 'hessian_step'], ['step'])
    """
    named = [name for name in _settable(algorithm) if hyperparameters.is_step(algorithm, name)]
    named = [name for name in named if name not in hyperparameters.unused(algorithm)]
    return [n for n in named if not isinstance(getattr(algorithm, n), str)]


def _settable(algorithm: Algorithm) -> list[str]:
    return [f.name for f in fields(algorithm) if f.init]  # type: ignore[arg-type]


def _is_real(algorithm: Algorithm, name: str) -> bool:
    """Whether the hyperparameter is, or may be, a real number, which is traced; and not a count or a word."""
    return any(hyperparameters.is_real(algorithm, name, value) for value in (getattr(algorithm, name), 1))


def _ranges(algorithm: Algorithm, search: Mapping[str, Range | list[Any] | None] | Sequence[str] | None) -> Search:
    """What is searched, or a ValueError that says what is wrong with it."""
    owner, known = type(algorithm).__name__, _settable(algorithm)
    names = step_sizes(algorithm)
    if search is None:
        search = names
        if not names:
            raise ValueError(
                f"{owner} has no step sizes; name what to search, with its range. It has: {', '.join(known)}."
            )
    if isinstance(search, str) or not isinstance(search, Mapping | Sequence) or not search:
        raise ValueError(f"search must be names of step sizes, or a dict {{name: (low, high)}}; got {search!r}.")
    wanted = dict(search) if isinstance(search, Mapping) else dict.fromkeys(search)
    return {name: _range(algorithm, owner, known, name, bounds) for name, bounds in wanted.items()}


def _range(algorithm: Algorithm, owner: str, known: list[str], name: str, bounds: Any) -> Range | list[Any]:
    if name not in known:
        raise ValueError(f"{owner} has no hyperparameter {name!r}; it has: {', '.join(known)}.")
    value, unused = getattr(algorithm, name), hyperparameters.unused(algorithm)
    if name in unused:
        raise ValueError(f"{owner}: {name} is not used, since {unused[name]} has its own step size: search others.")
    if isinstance(bounds, list):
        if not bounds or len({repr(own) for own in bounds}) < len(bounds):
            raise ValueError(f"The values of {name} must be a list of different values; got {bounds!r}.")
        return [float(own) for own in bounds] if _is_real(algorithm, name) and all(map(is_number, bounds)) else bounds
    if callable(value) and bounds is None:
        raise ValueError(f"{owner}: {name} is a schedule, which cannot be searched; give a number, or search others.")
    if bounds is None:
        if not _is_real(algorithm, name):
            raise ValueError(
                f"{owner}: {name}={value!r} needs a range of integers, (low, high), or a list of values to search."
            )
        if not is_number(value) or not 0 < value < math.inf:
            raise ValueError(f"{owner}: {name}={value!r} is not a number to search around; give a range, (low, high).")
        return float(value) / REACH, float(value) * REACH
    try:
        low, high = (float(bound) for bound in bounds)
    except (TypeError, ValueError):
        raise ValueError(
            f"The range of {name} must be two numbers, (low, high), or a list of values; got {bounds!r}."
        ) from None
    if not 0 < low < math.inf or not high < math.inf:
        raise ValueError(
            f"The range of {name} must be of positive numbers, since it is logarithmic; got {low:g} to {high:g}."
        )
    if low >= high:
        raise ValueError(f"The range of {name} goes from {low:g} to {high:g}; give the lower end first.")
    if _is_real(algorithm, name):
        return low, high
    if low != int(low) or high != int(high):
        raise ValueError(f"The range of {name} must be of integers; got {low:g} to {high:g}.")
    return _integers(int(low), int(high))


def _integers(low: int, high: int) -> list[Any]:
    """At most five integers from low to high, about evenly spaced in the logarithm.

    >>> _integers(1, 20), _integers(1, 3)
    ([1, 2, 4, 9, 20], [1, 2, 3])
    """
    count = min(_INTEGERS, high - low + 1)
    values = [round(low * (high / low) ** (k / (count - 1))) for k in range(count)]
    for k in range(1, count):  # small ones lie close together
        values[k] = max(values[k], values[k - 1] + 1)
    for k in reversed(range(count)):
        values[k] = min(values[k], high - (count - 1 - k))
    return values


def _shown(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _candidates(search: Search, algorithm: Algorithm, most: int) -> list[dict[str, Any]]:
    """All combinations of the listed values, each with the points of `_grid` for the ranges."""
    listed = {name: values for name, values in search.items() if isinstance(values, list)}
    ranges = {name: ends for name, ends in search.items() if isinstance(ends, tuple)}
    combined = [dict(zip(listed, values, strict=True)) for values in product(*listed.values())]
    grid = _grid(ranges, algorithm, most, len(combined)) if ranges else [{}]
    if len(combined) > most:
        raise ValueError(
            f"candidates={most}: the listed values have {len(combined)} combinations; give at least as many "
            "candidates, or fewer values."
        )
    return [{name: (one | point)[name] for name in search} for one in combined for point in grid]


def _grid(ranges: dict[str, Range], algorithm: Algorithm, most: int, times: int) -> list[dict[str, float]]:
    """A grid of one or two step sizes; of more, a part of it in which any two values of any two of them meet once.

    That part is an orthogonal array: a and b go through a grid with a prime p of values each, and the places of the
    others are (a + m·b) mod p, m = 1, 2, …, each shuffled so that the middle stays with the middle. `times`: how often
    the grid is tried, with other values of what is listed.
    """
    count = len(ranges)
    fitting = [n for n in _LEVELS if times * n ** min(count, 2) <= most and (count <= 2 or n in _PRIMES)]
    if not fitting or count > fitting[-1] + 1:
        least = times * next(n for n in _PRIMES if count <= n + 1) ** min(count, 2)
        also = f" and {times} combinations of listed values" if times > 1 else ""
        raise ValueError(
            f"candidates={most}: with {count} step size{'s' * (count > 1)}{also} to search give at least {least}, or "
            "search fewer."
        )
    levels = fitting[-1]
    middle = levels // 2
    rng = np.random.default_rng(0)
    shuffles = [np.insert(rng.permutation(np.delete(np.arange(levels), middle)), 0, middle) for _ in range(count - 2)]
    tried = []
    for pair in product(range(levels), repeat=min(count, 2)):
        a, b = pair[0] - middle, pair[-1] - middle
        places = [*pair, *(shuffle[(a + m * b) % levels] for m, shuffle in enumerate(shuffles, 1))]
        tried.append(
            {
                name: _value(*ends, k / (levels - 1), getattr(algorithm, name))
                for k, (name, ends) in zip(places, ranges.items(), strict=True)
            }
        )
    return tried


def _value(low: float, high: float, share: float, own: Any) -> float:
    """The value at this share of the (logarithmic) range, in three digits; the algorithm's own as it is."""
    value = low * (high / low) ** share
    if isinstance(own, int | float) and math.isclose(value, own, rel_tol=1e-9):
        return float(own)
    return _short(value)


def _short(value: float) -> float:
    return float(f"{value:.3g}")


def _rungs(rounds: int) -> list[int]:
    """The rounds at which the candidates are compared.

    >>> _rungs(200), _rungs(5), _rungs(1)
    ([25, 50, 100, 200], [1, 2, 3, 5], [1])
    """
    return sorted({-(-rounds // 2**k) for k in range(_HALVINGS + 1)})


# The race.


class _Group:
    """Candidates that differ in real numbers alone: one compiled program runs them side by side."""

    def __init__(
        self, job: Job, records: list[Any], real: set[str], members: list[int], slots: int, engine: Simulation
    ):
        self.members = members
        self._tried = [{name: getattr(records[i], name) for name in real} for i in members]
        self.sweep = Sweep(replace(job, algorithm=records[members[0]]), real, engine)
        self.width, self._room = self.sweep.even(slots), self.sweep.even(len(members))  # with padding
        self._carries: Any = None

    def start(self) -> None:
        """Make the candidates' state before the first round."""
        self._carries = self.sweep.start(self._values([*range(len(self.members))], self._room), self._room)

    def advance(self, ids: list[int], at: int, count: int) -> tuple[Bool[Array, " slots"], Bool[Array, " slots"]]:
        """`count` rounds from round `at` on for at most `width` members; for each slot see `Sweep.advance`."""
        own = [self.members.index(i) for i in ids]
        where = np.asarray(own + [self._room] * (self.width - len(own)), np.int32)  # the rest is padding, discarded
        self._carries, finite, replied = self.sweep.advance(
            self._values(own, self.width), self._carries, where, at, count
        )
        return finite, replied

    def candidate(self, i: int) -> tuple[Any, Any]:
        """The state of a candidate, and what its clients remember."""
        return self.sweep.candidate(self._carries, self.members.index(i))

    def _values(self, own: list[int], length: int) -> dict[str, tuple[float, ...]]:
        padded = own + [0] * (length - len(own))
        return {name: tuple(self._tried[k][name] for k in padded) for name in self._tried[0]}


class _Race:
    """The candidates: where each one is, what it has shown so far, and whether it is lost."""

    def __init__(
        self, job: Job, tried: list[dict[str, Any]], evaluate: Evaluate | None, metric: str, slots: int,
        engine: Simulation,
    ) -> None:  # fmt: skip
        self.tried = tried
        self.shown: list[dict[int, float]] = [{} for _ in tried]  # the metric by round
        self.lost: list[int | None] = [None for _ in tried]  # the round at which it was seen to have diverged
        self.compiling, self.start, self.done = 0.0, math.nan, 0  # seconds; the metric at first; rounds of candidates
        goal = direction(metric, otherwise=False)
        self._evaluate, self._asked, self._metric, self._higher = evaluate, metric, goal.name, goal.higher_is_better
        self._sees = 3 if evaluate is not None and required_arguments(evaluate) >= 3 else 2  # x and y, or memory, too
        self._weights = None if job.measure is None else np.asarray(job.clients.weights, float)
        self._everyone, self._faults = np.ones(job.clients.n, bool), job.faults
        records = [replace(job.algorithm, **one) for one in tried]
        differ = [*tried[0], *hyperparameters.made_by_class(records[0])]
        known = {f.name for f in fields(job.algorithm)}
        real = {name for name in differ if name in known and _is_real(records[0], name)}
        members: dict[str, list[int]] = {}
        for i, record in enumerate(records):
            fixed = [getattr(record, name) for name in differ if name not in real]
            members.setdefault(f"{fixed!r} {Content().of(fixed)}", []).append(i)  # a repr may leave numbers out
        self.slots = min(slots, max(map(len, members.values())))
        self._groups = [_Group(job, records, real, own, self.slots, engine) for own in members.values()]

    def compile(self) -> None:
        """Make the programs, and the candidates' state before the first round."""
        begin = time.perf_counter()
        for group in self._groups:
            group.start()
            if group is self._groups[0]:
                self.start = self._measure(0, 0)
                direction(self._asked)
            jax.block_until_ready(group.advance(group.members[:1], 0, 0))
        self.compiling = time.perf_counter() - begin

    def climb(self, rungs: list[int], bar: Callable[..., None], interrupt: threading.Event) -> None:
        """Run to each rung the best half of those that have reached the one before."""
        lengths = np.diff([0, *rungs])
        # Half of them each time, and as many more as there are slots that would be empty.
        keep = [self.slots * -(-len(self.tried) // (2**k * self.slots)) for k in range(len(rungs))]
        for k, (begin, end) in enumerate(pairwise([0, *rungs])):
            ready = [i for i in self.ranked() if self.lost[i] is None and max(self.shown[i], default=0) == begin]
            later = int(np.dot(keep[k + 1 :], lengths[k + 1 :]))
            while ready and not interrupt.is_set():
                entrants, ready = ready[: keep[k]], ready[keep[k] :]
                if self._run(entrants, begin, end, later, bar, interrupt):
                    break

    def _run(
        self, entrants: list[int], begin: int, end: int, later: int, bar: Callable[..., None],
        interrupt: threading.Event,
    ) -> list[int]:  # fmt: skip
        """Those of the entrants, all at round `begin`, that reach round `end` (or Ctrl-C), compared there."""
        live, at, at_once = entrants, begin, 1
        while live and at < end and not interrupt.is_set():
            lost = sum(at is not None for at in self.lost)
            words = f"{len(live)} of {len(self.tried)} candidates to round {end}, {lost} diverged"
            bar(self.done, self.done + len(live) * (end - at) + later, words)
            count = min(at_once, end - at)
            clock = time.perf_counter()
            good = self._advance(live, at, count)
            at_once = max(1, min(2 * count, int(SECONDS_AT_ONCE * count / (time.perf_counter() - clock))))
            at, self.done = at + count, self.done + len(live) * count
            live = self._drop(live, good, at)
        now = np.array([self._measure(i, at) for i in live])
        for i, value in zip(live, now.tolist(), strict=True):
            if math.isfinite(value):
                self.shown[i][at] = value
        good = np.isfinite(now)
        if math.isfinite(self.start):
            worse = self.start - now if self._higher else now - self.start
            good &= worse <= _HOPELESS * max(1.0, abs(self.start))
        return self._drop(live, good, at)

    def _drop(self, live: list[int], good: np.ndarray, at: int) -> list[int]:
        for i, fine in zip(live, good, strict=True):
            if not fine:
                self.lost[i] = at
        return [i for i in live if self.lost[i] is None]

    def _advance(self, live: list[int], at: int, count: int) -> np.ndarray:
        """`count` rounds from round `at` on for these candidates; for each, whether all was finite."""
        calls = []
        for group in self._groups:
            own = [i for i in group.members if i in live]
            for k in range(0, len(own), group.width):
                some = own[k : k + group.width]
                calls.append((some, group.advance(some, at, count)))
        fine: dict[int, Any] = {}
        for some, (finite, replied) in jax.device_get(calls):
            if not replied[: len(some)].all() and self._faults is not None:
                raise RoundFailedError(
                    f"Between rounds {at + 1} and {at + count} fewer replies with any weight arrived than "
                    f"faults.minimum={self._faults.minimum}. Lower the minimum or the dropout."
                )
            fine |= dict(zip(some, finite, strict=False))
        return np.array([fine[i] for i in live], bool)

    def _measure(self, i: int, at: int) -> float:
        metrics: Any = {}
        with np.errstate(all="ignore"):  # numbers that overflow are what a candidate is dropped for
            group = next(group for group in self._groups if i in group.members)
            state, memory = group.candidate(i)
            if self._evaluate is not None:
                metrics = self._evaluate(*(state.x, state.y, memory)[: self._sees])
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
        """All candidates, the best first: by the last rung they reached, the metric there, and at those before."""
        sign = -1 if self._higher else 1

        def rank(i: int) -> Any:
            seen = self.shown[i]
            rounds = sorted(seen, reverse=True)
            return self.lost[i] is not None, [-r for r in rounds[:1]] or [0], [sign * seen[r] for r in rounds]

        return sorted(range(len(self.tried)), key=rank)

    def table(self, order: list[int], rounds: int) -> "pd.DataFrame":
        """See `Tuning.table`."""
        import pandas as pd

        columns = sorted({at for shown in self.shown for at in shown})
        rows = []
        for i in order:
            lost, shown = self.lost[i], self.shown[i]
            last = max(shown, default=0)
            status = "diverged" if lost is not None else "finished" if last == rounds else "stopped"
            value = shown[last] if lost is None and shown else math.nan
            at_rungs = {f"round {at}": shown.get(at, math.nan) for at in columns}
            ended = {"status": status, "rounds": last if lost is None else lost, "last": value}
            rows.append({**self.tried[i], **ended, **at_rungs})
        return pd.DataFrame(rows)


@contextmanager
def _bar(show: bool, title: str) -> Iterator[Callable[[int, int, str], None]]:
    """A bar on standard error."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (
        TextColumn("{task.description}"),
        BarColumn(bar_width=24),
        TimeRemainingColumn(),
        TextColumn("{task.fields[words]}"),
    )
    with Progress(*columns, console=Console(stderr=True), disable=not show, transient=True) as bar:
        task = bar.add_task(title, total=1, words="")
        yield lambda done, total, words: bar.update(task, completed=done, total=total, words=words)
