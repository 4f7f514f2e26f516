"""The price of privacy: what a round of a method releases, and the noise and the ε that follow."""

import math
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, replace

from rookery.channels.account import Account, Worst
from rookery.channels.private import Budgeted
from rookery.data.cohort import Poisson
from rookery.engines.engine import Job, traced
from rookery.plan.releases import Releases, released, releases
from rookery.plan.trace import Plan
from rookery.run.arguments import checked

_ROUNDS = 100  # for which ε is given


_NOTHING = Releases((), ())


@dataclass(frozen=True)
class Price:
    """What privacy costs with a method; print it to see everything. `rk.explain(..., private=...)` computes it.

    Attributes:
        channel: the `rk.private` that was asked for, with the noise of each exchange if that is known.
        refused: why such a run is refused; None if it is not.
        start, round: what the start and a round release.
        account: the account of a run in which every exchange has a noise multiplier of 1.
        chosen: the account with the channel's own noise, if that is known.
        cohorts: how cohorts are drawn, in words.
    """

    channel: Budgeted
    refused: str | None = None
    start: Releases = _NOTHING
    round: Releases = _NOTHING
    account: Account | Worst | None = None
    chosen: Account | Worst | None = None
    cohorts: str = ""

    def epsilon(self, rounds: int = _ROUNDS, noise: float = 1.0) -> float:
        """Return ε after this many rounds with this noise multiplier; infinite if the run can't be private."""
        return math.inf if self.account is None else self.account.epsilon(noise, self.channel.delta, rounds)

    def noise(self, epsilon: float, rounds: int) -> float:
        """Return the noise multiplier with which this many rounds cost at most ε; infinite if that is impossible."""
        return math.inf if self.account is None else self.account.noise(epsilon, self.channel.delta, rounds)

    @property
    def count(self) -> int:
        """How many results a round releases: of a cohort, or of a client's minibatches."""
        if self.channel.unit == "client":
            return self.round.count
        return sum(event.times * event.releases.total() for event in self.round.records)

    @property
    def shares(self) -> dict[str, float]:
        """The part of each exchange, by name, in what a round reveals of a client."""
        levels, parts = dict(self.channel.levels), defaultdict[str, float](float)
        for event in self.round.events if self.channel.unit == "client" else ():
            for exchange, times in event.releases.items():
                parts[exchange.name] += event.times * times * released(exchange) / levels.get(exchange.name, 1.0) ** 2
        return {name: part / sum(parts.values()) for name, part in parts.items()}

    def __str__(self) -> str:
        unit = f"Privacy for each {self.channel.unit}"
        if self.refused is not None:
            return f"{unit} is refused: {self.refused}"
        lines = [f"{unit}, at δ = {self.channel.delta:g}, {self.cohorts}"]
        if self.channel.unit == "client":
            lines += _released(self.start, "the start releases", "all clients")
            lines += _released(self.round, "a round releases", "its cohort")
        else:
            lines += [*_of_records(self.start, "in the start"), *_of_records(self.round, "in a round")]
        lines.append(f"  ε after {_ROUNDS} rounds with a noise multiplier of 1: {self.epsilon():.3g}")
        return "\n".join([*lines, *self._of_the_channel()])

    def _of_the_channel(self) -> Iterator[str]:
        """Describe what the channel's own noise costs."""
        channel, account, shares = self.channel, self.chosen, self.shares
        if account is None:
            yield f"  the noise for ε = {channel.epsilon:g} depends on the number of rounds, which was not given"
            return
        rounds = channel.rounds or _ROUNDS
        yield f"  ε after {rounds} rounds with the noise below: {channel.spent(account, rounds):.3g}"
        most = channel.affordable(account, rounds)
        if most < rounds:
            until = f"ends the run after {most} round{'s' * (most > 1)}" if most > 0 else "does not allow one round"
            yield f"  the budget of ε = {channel.epsilon:g} {until}"
        for name, level in channel.levels:
            if channel.unit == "record":
                yield f"    {name} data: a noise multiplier of {level:.3g}"
            else:
                part = f"{shares[name]:.0%} of what a round reveals" if name in shares else "in the start only"
                yield f'    "{name}": a noise multiplier of {level:.3g}, {part}'


def _released(found: Releases, what: str, whose: str) -> Iterator[str]:
    for event in found.events:
        named = [(f'"{e.name}"', times, released(e)) for e, times in event.releases.items()]
        parts = [f"{name}{_times(times)}{f' ({own} results)' if own > 1 else ''}" for name, times, own in named]
        count = sum(times * own for _, times, own in named)
        cohort = whose if event.times == 1 else f"each of {event.times} cohorts"
        yield f"  {what} {count} result{'s' * (count > 1)} of {cohort}: {', '.join(parts)}"


def _of_records(found: Releases, when: str) -> Iterator[str]:
    for event in found.records:
        drawn = "all records" if event.chance == 1 else f"a minibatch of {event.chance:.3g} of the records"
        named = "; ".join(f"{', '.join(oracles)}{_times(times)}" for oracles, times in event.releases.items())
        yield f"  a client releases {when}{_times(event.times)}, from {drawn} of its {event.level} data: {named}"


def _times(count: int) -> str:
    return "" if count == 1 else f" {count} times"


def explained(job: Job, private: Budgeted) -> tuple[Plan, Price]:
    """Return the plan of a round, and the price of privacy for the job, which has no channel. Nothing is run."""
    try:
        found = traced(checked(replace(job, channel=replace(private, epsilon=None, noise=1.0, levels=()))))
        channel, chosen = private, None
        if private.noise is not None or private.rounds is not None:
            channel = private.calibrated(found.start, found.round, found.setting)
            chosen = channel.account(found.start, found.round, found.setting)
    except ValueError as error:
        cohort = max(1, round(job.cohort.expected)) if isinstance(job.cohort, Poisson) else job.cohort
        plain = traced(checked(replace(job, cohort=cohort)))  # raises for everything that privacy is not the reason of
        return plain.round, Price(private, str(error))
    each, n = found.setting.cohort, found.setting.clients.n
    drawn = f"cohorts of {each} of {n} clients" if each < n else f"all {n} clients in each round"
    if found.setting.chance is not None:
        drawn = f"cohorts of about {found.setting.chance * n:g} of {n} clients (Poisson)"
    both = releases(found.start), releases(found.round)
    return found.round, Price(channel, None, *both, found.account, chosen, drawn)
