"""What a plan reveals of a client: its releases, grouped by the cohort whose data they come from."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from math import prod
from typing import Any

from rookery.base import jaxprs
from rookery.base.compat import Jaxpr, Literal
from rookery.language.ledger import Exchange
from rookery.language.records import release
from rookery.plan import calls
from rookery.plan.calls import Read, Visitor


@dataclass(eq=False)
class Event:
    """One draw of a cohort, and all that is released of it: each exchange, with its number of times.

    Releases of the same cohort compose before the draw is taken into account; another draw is another event.

    Attributes:
        times: how often such a cohort is drawn in a round.
        releases: the exchanges with this cohort, and how often each takes place for one draw.
    """

    times: int
    releases: Counter[Exchange] = field(default_factory=Counter)


@dataclass(eq=False)
class RecordEvent:
    """One draw of a client's records, and all that its oracles release of them.

    Attributes:
        level: the data set, "lower" or "upper".
        chance: the probability that a record is drawn.
        times: how often such a minibatch is drawn in a round.
        size: the expected number of records, if the client has as many; None: all.
        center: whether the records are the centre's.
        releases: for one draw, how often each group of oracles is released together.
    """

    level: str
    chance: float
    times: int
    size: int | None = None
    center: bool = False
    releases: Counter[tuple[str, ...]] = field(default_factory=Counter)


@dataclass(frozen=True)
class Releases:
    """All releases of a plan.

    Attributes:
        events: of clients, by cohort, in the order of their first exchange.
        refused: why some of them cannot be accounted for, a sentence each.
        records: of records, by draw, if clients' oracles are private for each record.
        refused_records: why some of those cannot be accounted for.
    """

    events: tuple[Event, ...]
    refused: tuple[str, ...]
    records: tuple[RecordEvent, ...] = ()
    refused_records: tuple[str, ...] = ()

    @property
    def count(self) -> int:
        """How many results are released in a round."""
        each = [(event.times * times, exchange) for event in self.events for exchange, times in event.releases.items()]
        return sum(times * released(exchange) for times, exchange in each)


def released(exchange: Exchange) -> int:
    """Return how many results one exchange releases: its updates, and each piece of bookkeeping that is not public."""
    return exchange.updates + sum(most is None or most > least for _, _, most, least in exchange.beside)


def releases(plan: Any) -> Releases:
    """Collect what a plan releases to anyone who sees the server's results."""
    walker = _Releases()
    walker.visit(plan.body, [_Value(0) for _ in plan.body.inputs])
    unique = lambda reasons: tuple(dict.fromkeys(reasons))
    records = tuple(walker.records.values())
    return Releases(tuple(walker.events.values()), unique(walker.refused), records, unique(walker.refused_records))


@dataclass(eq=False)
class _Value:
    """A value of the plan.

    Attributes:
        depth: the number of loops around the step that makes it; it is made anew in each of their turns.
        carried: whether a loop carries it, so that it may come from any earlier turn.
    """

    depth: int
    carried: bool = False


def records_of(call: calls.WorkCall) -> tuple[RecordEvent, ...]:
    """Collect what a client's function releases of its records each time that it is computed.

    Raises ValueError if that has no bound.
    """
    walker = _Releases()
    walker.note_records(call)
    if walker.refused_records:
        raise ValueError(walker.refused_records[0])
    return tuple(walker.records.values())


def _marks(jaxpr: Jaxpr) -> Iterator[dict[str, Any]]:
    """The parameters of all `release`s in a client's function."""
    for eqn in jaxpr.eqns:
        if eqn.primitive is release:
            yield eqn.params
        for inner in jaxprs.within(list(eqn.params.values())):
            yield from _marks(inner)


class _Releases(Visitor[_Value]):
    """Collects the exchanges by their cohorts. A cohort is the value of its ids."""

    def __init__(self) -> None:
        self.events: dict[_Value, Event] = {}
        self.refused: list[str] = []
        self.records: dict[tuple[int, int], RecordEvent] = {}  # by call and draw
        self.refused_records: list[str] = []
        self._lengths: list[int] = []  # of the loops around the current step

    def literal(self, literal: Literal) -> _Value:
        return _Value(0)

    def server(self, step: calls.ServerWork, read: Read) -> list[_Value]:
        return self._new(step)

    def scatter(self, call: calls.ScatterCall, read: Read) -> list[_Value]:
        return self._new(call)

    def map(self, call: calls.MapCall, read: Read) -> list[_Value]:
        if call.repeats:
            self.refused.append("A cohort is drawn with replacement, and a client may count twice in it.")
        self.note_records(call)
        return self._new(call)

    def center(self, call: calls.CenterCall, read: Read) -> list[_Value]:
        if call.holder is not None:
            self.refused.append(f"The exchange {call.exchange.name!r} is with client {call.holder} alone, the centre.")
        self.note_records(call)
        return self._new(call)

    def gather(self, call: calls.GatherCall, read: Read) -> list[_Value]:
        self.refused.append(f"The server sees every reply to the exchange {call.exchange.name!r} by itself.")
        return self._new(call)

    def reduce(self, call: calls.ReduceCall, read: Read) -> list[_Value]:
        cohort, exchange = read(call.ids), call.exchange
        if cohort.carried:
            self.refused.append(f"The cohort of the exchange {exchange.name!r} is carried from turn to turn of a loop.")
        self.refused += [
            f"The exchange {exchange.name!r} carries bookkeeping without a bound ({what})."
            for what, _, most, _ in exchange.beside
            if most is None
        ]
        event = self.events.setdefault(cohort, Event(prod(self._lengths[: cohort.depth])))
        event.releases[exchange] += prod(self._lengths[cohort.depth :])
        return self._new(call)

    def loop(self, call: calls.LoopCall, read: Read) -> list[_Value]:
        if call.most is None:
            why = "The number of turns of a loop with exchanges is known only during the run."
            self.refused.append(why)
            self.refused_records.append(why)
        self._lengths.append(1 if call.most is None else call.most)
        fixed, depth = read(call.fixed), len(self._lengths)
        turn_and_carry = [_Value(depth, carried=True) for _ in call.body.inputs[len(fixed) :]]
        self.visit(call.body, [*fixed, *turn_and_carry])
        self._lengths.pop()
        return self._new(call)

    def note_records(self, call: calls.WorkCall) -> None:
        """Note what a client's function releases of its records."""
        for mark in _marks(call.work):
            drawn, times = mark["drawn"], mark["times"]
            if drawn is None or times is None:
                self.refused_records.append(f"The number of local steps at {call.source} has no bound before the run.")
                drawn, times = drawn or 1, times or 1
            often, at_center = prod(self._lengths) * drawn, isinstance(call, calls.CenterCall)
            event = RecordEvent(mark["level"], mark["chance"], often, mark["size"], at_center)
            self.records.setdefault((call.number, mark["draw"]), event).releases[mark["oracles"]] += times

    def _new(self, step: Any) -> list[_Value]:
        return [_Value(len(self._lengths)) for _ in step.outputs]
