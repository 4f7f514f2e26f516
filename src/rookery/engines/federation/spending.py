"""What a site has released of its records, over all runs in its log, and the ε that this comes to."""

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from rookery.channels.account import Account, Draws
from rookery.channels.private import PrivateRecords
from rookery.engines.federation.site import RefusedError, SpentError
from rookery.language.channel import is_private_for_records
from rookery.language.records import LEVELS, OVERFLOW
from rookery.plan.calls import CenterCall, WorkCall
from rookery.plan.releases import RecordEvent, records_of, releases
from rookery.plan.trace import Plan

BOTH = "both"  # the level of a release if both levels have the same data
_MOST = 100_000  # rounds to look ahead
Counts = tuple[Counter[tuple[float, float]], ...]  # for each level, how often records were drawn: precision, chance


class Release(NamedTuple):
    """A draw of a site's records, and all that is released of it.

    Attributes:
        level: "lower" or "upper", or "both" if both levels have the same data.
        precision: Σ 1/σ² over the releases, for noise multipliers σ.
        chance: the probability that a record is drawn.
    """

    level: str
    precision: float
    chance: float


@dataclass(frozen=True)
class Prices:
    """What a run's functions release of this site's records.

    Attributes:
        noise: the multipliers that the site has agreed to, by level.
        sizes: its numbers of records: "lower", "upper" and, if it holds the centre's data, "center".
        joined: whether both levels have the same data.
    """

    noise: Mapping[str, float]
    sizes: Mapping[str, int]
    joined: bool

    def call(self, call: WorkCall) -> Counter[Release]:
        """Return what a function releases each time that it is computed."""
        return self._priced(records_of(call))

    def plan(self, plan: Plan) -> Counter[Release]:
        """Return what the whole plan releases."""
        here = [event for event in releases(plan).records if not event.center or "center" in self.sizes]
        return self._priced(here)

    def _priced(self, events: Iterable[RecordEvent]) -> Counter[Release]:
        priced: Counter[Release] = Counter()
        for event in events:
            size = self.sizes["center" if event.center else event.level]
            chance = 1.0 if event.size is None else min(1.0, event.size / size)
            level = BOTH if self.joined and not event.center else event.level
            priced[Release(level, event.releases.total() / self.noise[event.level] ** 2, chance)] += event.times
        return priced


def prices(plans: tuple[Plan, ...], data: Any, holds_center: bool) -> Prices | None:
    """Return the prices of a run for a site with these data; None if the run is not private for each record.

    Raises RefusedError if not everything that it releases can be accounted for.
    """
    channel = plans[1].channel
    if not is_private_for_records(channel):
        return None
    noise = multipliers(channel)
    for plan in plans[:2]:
        found = releases(plan).refused_records
        if found:
            raise RefusedError(f"what the run releases of its records can't be accounted for. {found[0]}")
    sizes = {"lower": int(data.lower.sizes[0]), "upper": int(data.upper.sizes[0])}
    center = {"center": data.center.widest} if holds_center and data.center is not None else {}
    return Prices(noise, sizes | center, data.one_data_set)


def multipliers(channel: Any) -> dict[str, float]:
    """Return a channel's noise multipliers as the site adds them; RefusedError if there is none for each level."""
    try:
        if type(channel) is PrivateRecords:
            with np.errstate(over="ignore"):
                noise = {str(name): float(np.float32(level)) for name, level in channel.levels}
            if sorted(noise) == sorted(LEVELS) and all(0 < level < math.inf for level in noise.values()):
                return noise
    except (TypeError, ValueError):
        pass
    raise RefusedError("the run's channel must have a positive noise multiplier for the lower and for the upper data.")


def bare(plans: tuple[Plan, ...], described: Any, client: int) -> str | None:
    """Return the plan in which a function of this client reads records and adds no noise; None if none does."""
    rows = {i for i, axis in enumerate(described.client_axes()) if axis is None}
    for plan in plans:
        for call in plan.body.of(WorkCall):
            reads = call.holder == client if isinstance(call, CenterCall) else not rows.isdisjoint(call.data)
            if reads and call.noise is None:
                return plan.title
    return None


@dataclass
class Spending:
    """The releases of a site's records.

    Releases of other data than the present count for both levels: a record may have been in either.

    Attributes:
        data: identifies the data of the last release.
    """

    data: str = ""
    _releases: dict[str, Counter[Release]] = field(default_factory=dict)

    def add(self, data: str, new: Mapping[Release, int]) -> None:
        """Add releases of these data."""
        self.data = data
        self._releases.setdefault(data, Counter()).update(new)

    def counts(self, data: str | None = None) -> Counts:
        """Return all releases for each level of these data; None: of the last ones."""
        present = self.data if data is None else data
        found: Counts = tuple(Counter() for _ in LEVELS)
        for held, by_release in self._releases.items():
            for level, counts in zip(LEVELS, found, strict=True):
                for release, times in by_release.items():
                    if held != present or release.level in (level, BOTH):
                        counts[release[1:]] += times
        return found

    def epsilon(self, delta: float, data: str | None = None) -> float:
        """Return the ε of all releases."""
        return epsilon(self.counts(data), delta)


def plus(counts: Counts, new: Mapping[Release, int], times: int = 1) -> Counts:
    """Return the counts after further releases."""
    added = [
        Counter({release[1:]: times * n for release, n in new.items() if release.level in (level, BOTH)})
        for level in LEVELS
    ]
    return tuple(before + more for before, more in zip(counts, added, strict=True))


def epsilon(counts: Counts, delta: float) -> float:
    """Return the ε of these releases, for the level with the larger one."""
    accounts = [
        Account(tuple(Draws(times, *draw) for draw, times in sorted(level.items())), (), overflow=OVERFLOW)
        for level in counts
    ]
    return max(account.epsilon(1.0, delta, 0) for account in accounts)


class Budget:
    """A site's budget. It looks ahead, so that ε need not be computed for every request.

    Arguments:
        epsilon, delta: the budget.
    """

    def __init__(self, epsilon: float, delta: float) -> None:
        self.epsilon, self.delta = epsilon, delta
        self._within: Counts = tuple(Counter() for _ in LEVELS)  # releases that are within the budget

    def check(self, before: Counts, new: Mapping[Release, int]) -> None:
        """Raise SpentError, with what is spent, if further releases would exceed the budget."""
        after = plus(before, new)
        if all(a <= b for a, b in zip(after, self._within, strict=True)):
            return
        either = tuple(a | b for a, b in zip(after, self._within, strict=True))
        for ahead in (plus(either, new, 63), plus(after, new, 7), after):
            total = epsilon(ahead, self.delta)
            if total <= self.epsilon:
                self._within = ahead
                return
        spent = epsilon(before, self.delta)
        raise SpentError(
            f"its privacy budget is spent: ε = {spent:.3g} of {self.epsilon:g} at δ = {self.delta:g}, and this request "
            f"would make it {total:.3g}."
        )

    def rounds(self, before: Counts, start: Mapping[Release, int], each: Mapping[Release, int]) -> int | None:
        """Return how many rounds of a run are within the budget; -1: not even its start; None: 100,000 or more."""
        fits = lambda rounds: epsilon(plus(plus(before, start), each, rounds), self.delta) <= self.epsilon
        if not fits(0):
            return -1
        high = 1
        while fits(high):
            high *= 2
            if high > _MOST:
                return None
        low = high // 2
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if fits(middle) else (low, middle)
        return low
