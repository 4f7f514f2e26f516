"""`tune`: search step sizes and other hyperparameters by successive halving."""

import math
import secrets
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import jax

from rookery.base.arguments import check_counts, check_positive, is_integer, is_number
from rookery.channels.private import Budgeted
from rookery.data.clients import Clients
from rookery.engines.checks import check_function
from rookery.engines.engine import Job
from rookery.engines.simulation import Simulation
from rookery.language import hyperparameters
from rookery.language.channel import Channel, Faults
from rookery.language.clock import Clock
from rookery.language.fed import Algorithm
from rookery.language.metrics import direction
from rookery.problems.problems import Problem
from rookery.problems.variables import adapt
from rookery.run.arguments import checked
from rookery.run.evaluation import Evaluate, measuring
from rookery.run.progress import interrupts, progress_bar
from rookery.run.race import Race
from rookery.run.search import Range, Search, all_candidates, integers, ranges, three_digits

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure

CANDIDATES = 49
_EDGE = 0.08  # share of a range, in the logarithm, that counts as its end


@dataclass(frozen=True, eq=False)
class Tuning:
    """The result of `tune`.

    Attributes:
        table: a DataFrame with a row per candidate, the best first: its values; `status` ("finished", "stopped" at a
            rung, or "diverged"); `rounds`, how many it ran; `last`, its last metric; and the metric at each rung, in
            columns named "round 25" and so on, or with `until` "second 75".
        best: the algorithm with the best values; None if every candidate diverged, or none was compared yet.
        search: the range (low, high) of each hyperparameter that was searched, or the list of values tried.
        metric, higher_is_better: what "best" means.
        start: the metric before the first round, the same for all candidates.
        rounds: the rounds of the last rung; with `until`, those of the best candidate.
        until: the seconds of the last rung; None: candidates were compared after equal rounds.
        seconds, compiling: the seconds of the whole search, and of compiling in it.
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
    until: float | None = None

    @property
    def value(self) -> float:
        """The best candidate's last metric."""
        return float(self.table["last"].iloc[0])

    @property
    def diverged(self) -> int:
        """The number of candidates that diverged."""
        return int((self.table["status"] == "diverged").sum())

    @property
    def edges(self) -> dict[str, str]:
        """The step sizes and integers whose best value lies at the "lower" or "upper" end of what was searched."""
        edges = {}
        for name, searched in self.search.items() if self.best is not None else ():
            value = getattr(self.best, name)
            if isinstance(searched, list):
                if not all(map(is_integer, searched)):
                    continue
                low, high = min(searched), max(searched)
                at_lower, at_upper = value == low > 1, value == high > low
            else:
                share = math.log(value / searched[0]) / math.log(searched[1] / searched[0])
                at_lower, at_upper = share <= _EDGE, share >= 1 - _EDGE
            if at_lower or at_upper:
                edges[name] = "lower" if at_lower else "upper"
        return edges

    def moved(self) -> Search:
        """Return what to search next: the same ranges, but centred on the best value if that value lies at an end."""
        search = dict(self.search)
        for name in self.edges:
            searched, middle = self.search[name], getattr(self.best, name)
            low, high = min(searched), max(searched)
            reach = math.sqrt(high / max(low, 1 if isinstance(searched, list) else low))
            if isinstance(searched, list):
                search[name] = integers(max(1, round(middle / reach)), max(round(middle * reach), middle + 1))
            else:
                search[name] = (three_digits(middle / reach), three_digits(middle * reach))
        return search

    def picture(self, title: str = "") -> "Figure":
        """Draw the landscape: the metric of each candidate, and which candidates diverged."""
        from rookery.run.landscape import landscape  # matplotlib is slow to import

        table, names = self.table, []
        for name, searched in self.search.items():
            positive = not isinstance(searched, list) or all(is_number(value) and value > 0 for value in searched)
            if not positive:  # e.g. words, drawn by their places in the list
                table = table.assign(**{name: table[name].map(lambda v, all=searched: 1 + all.index(v))})
                words = ", ".join(f"{place}: {value}" for place, value in enumerate(searched, 1))
                table = table.rename(columns={name: f"{name} ({words})"})
            names.append(name if positive else f"{name} ({words})")
        title = title or (type(self.best).__name__ if self.best is not None else "All candidates diverged")
        return landscape(table, names, self.metric, self.higher_is_better, self.start, title)

    def __repr__(self) -> str:
        show = lambda value: f"{value:.4g}" if isinstance(value, float) else str(value)
        best = ", ".join(f"{name}={show(getattr(self.best, name))}" for name in self.search) if self.best else "none"
        text = f"best: {best}, {self.metric}={self.value:.4g}, {self.diverged} of {len(self.table)} diverged"
        return f"Tuning({text}{', interrupted' if self.interrupted else ''})"


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
    clock: Clock | None = None,
    until: float | None = None,
    slots: int | None = None,
    engine: Simulation | None = None,
    progress: bool | str | None = None,
) -> Tuning:
    """Search the step sizes and other hyperparameters of an algorithm by successive halving.

    All candidates run for an eighth of the rounds; the better half continues to a quarter, the better half of those to
    a half, and the better half of those to the end. All see the same cohorts and minibatches, which are those of
    `solve` with this seed, and a candidate's numbers are those that `solve` would give. Candidates are compared by the
    metric at full precision, and ties are broken by the previous rungs.

    A candidate has diverged, and is dropped, if its state, a client's memory or its metric is no longer finite, or if
    its metric is worse than at the start by more than a million times max(1, |metric at the start|). If all candidates
    that continue diverge, the next best take their places.

    Arguments:
        problem, clients, algorithm, init, rounds, cohort, seed, noise_seed, channel, faults, clock: as in `solve`.
            What is not searched stays as it is in `algorithm`. All candidates get the same noise of a channel.
        until: with a clock, a budget of simulated seconds. Candidates are then compared after an eighth of these
            seconds and so on instead of rounds, and a candidate whose rounds are short runs more rounds, up to
            `rounds`.
        evaluate, evaluate_client: one of them or both, as in `solve`.
        metric: the metric that decides, like `keep_best` in `solve`: a name that says which way is better ("accuracy",
            "error_rate"), or any name with a sign, "+name" if higher is better, "-name" if lower is better. If it is
            computed on test data, the best candidate's value is optimistic: judge the result on other data.
        search: what to search. A range, {"upper_step": (0.01, 1.0)}, of real numbers, or of integers,
            {"local_steps": (1, 20)}, of which at most five are tried; or a list of values, {"local_steps": [1, 5, 20],
            "neumann": ["sum", "cg"]}. If a range is None, or if only names are given, it goes from a tenth of the
            algorithm's step size to ten times that. None: all step sizes. Each value of an integer or a word is
            compiled separately.
        candidates: how many at most. All combinations of the listed values are tried, each with the same step sizes:
            one or two ranges form a grid, evenly spaced in the logarithm around the middle of the ranges; more ranges
            form a subset of the grid in which any two values of any two step sizes meet exactly once.
        slots: candidates computed side by side, on all devices together; None: 8, or 16 on a GPU.
        engine: `Simulation(mesh=...)` divides the candidates among devices, each of which holds all clients' data. The
            results are those of one device, up to rounding.
        progress: show a bar (a string is its title); None: show it if standard error is a terminal.

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
        raise ValueError(f"engine must be a compiled rk.Simulation(mesh=...) to tune; got {engine!r}.")
    if engine.memory == "host":
        raise ValueError('engine: memory must be "device" to tune; got "host". Leave it out.')
    if clients.here is not None or not clients.held:
        raise ValueError("clients must hold the data of all clients in this process to tune; these do not.")
    if evaluate is None and evaluate_client is None:
        raise ValueError(f"metric={metric!r} needs evaluate=..., or evaluate_client=..., that returns it.")
    if evaluate is not None:
        check_function("evaluate", evaluate, "x, y", "x, y, memory")
    check_counts(rounds=rounds, candidates=candidates, slots=1 if slots is None else slots)
    models = adapt(problem, init)
    measure = measuring(models, evaluate_client)
    job = Job(models.problem, clients, algorithm, models.init, cohort, seed, channel, faults, measure=measure)
    if isinstance(channel, Budgeted):
        raise ValueError(
            "tune must not be given rk.private: each candidate is a run that reveals something. Tune on public data, "
            "without it."
        )
    job = checked(replace(job, noise_seed=noise_seed, clock=clock), rounds)
    if until is not None:
        check_positive(until=until)
        if clock is None:
            raise ValueError(f"until={until} needs clock=rk.Clock(...), whose seconds it counts; got clock=None.")
    if channel is not None and noise_seed is None:
        job = replace(job, noise_seed=secrets.randbits(64))  # the same noise for all candidates, from entropy
    rounds, search = int(rounds), ranges(algorithm, search)
    tried = all_candidates(search, algorithm, int(candidates))
    for values in tried:
        hyperparameters.check(replace(algorithm, **values), clients.n)  # type: ignore[type-var]
    slots = slots or (8 if jax.default_backend() == "cpu" else 16)
    race = Race(job, tried, models.on_variables(evaluate), metric, slots, engine, rounds, until)
    with progress_bar(progress, algorithm, counts=False) as bar, interrupts() as interrupt:
        bar(0, 1, "compiling")
        race.compile()
        race.climb(bar, interrupt)
        interrupted = interrupt.is_set()
    best = race.ranked()[0]
    compared = race.lost[best] is None and race.shown[best]
    goal = direction(metric, otherwise=False)
    return Tuning(
        table=race.table(),
        best=replace(algorithm, **tried[best]) if compared else None,  # type: ignore[type-var]
        search=search,
        metric=goal.name,
        higher_is_better=goal.higher_is_better,
        start=race.start,
        rounds=rounds if until is None else race.at[best],
        seconds=time.perf_counter() - begin,
        compiling=race.compile_seconds,
        interrupted=interrupted,
        until=until,
    )
