"""Where a plan lets values come from, and the guard that holds a coordinator to it."""

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import jax

from rookery.base.compat import Literal
from rookery.engines.federation.audit import Audit
from rookery.engines.federation.site import RefusedError, Sent
from rookery.engines.federation.store import Moment
from rookery.language.ledger import Exchange
from rookery.plan.calls import (
    Call,
    CenterCall,
    GatherCall,
    LoopCall,
    MapCall,
    Read,
    ReduceCall,
    ScatterCall,
    ServerWork,
    Visitor,
    WorkCall,
)
from rookery.plan.trace import Carry, Plan

Source = Any  # SENT, ROW, ("c", constant), ("m", call, output), ("memory", leaf) or ("client", leaf)
Operands = list[frozenset[Source]]  # for each operand what it may be
SENT, ROW = "v", "row"  # a value of the server's, and a client's row of one
_SERVER: frozenset[Source] = frozenset([SENT])
FINISH = -1  # what the last request of a phase calls for: no exchange


class Sources(NamedTuple):
    """What a plan allows, by the number of the call.

    Attributes:
        sent: the server's values that a client's function is given.
        own: the client's own values that it is given.
        replies: what an exchange sends. (What the server computes of the centre's data is no exchange.)
        kept: what is remembered at the end, of "memory" and of "client", the channel's.
        times: how often an exchange happens in one phase; None: the run decides.
    """

    sent: dict[int, Operands]
    own: dict[int, Operands]
    replies: dict[int, Operands]
    kept: dict[str, Operands]
    times: dict[int, int | None]


def sources(plan: Plan) -> Sources:
    """What the plan allows. It does not tell a loop's turns apart: a value may be that of any turn."""
    flow = _Flow()
    values: dict[Any, frozenset[Source]] = {v: _SERVER for v in plan.body.inputs}
    values.update((v, frozenset([("c", i)])) for i, v in enumerate(plan.body.inputs[: len(plan.consts)]))
    carry = plan.inputs.carry
    for kind in ("memory", "client") if isinstance(carry, Carry) else ():
        values.update((v, frozenset([(kind, i)])) for i, v in enumerate(jax.tree.leaves(getattr(carry, kind))))
    outputs = flow.visit(plan.body, [values[v] for v in plan.body.inputs])
    kept = jax.tree.unflatten(jax.tree.structure(plan.made), outputs).carry
    for kind in ("memory", "client"):
        flow.found.kept[kind] = jax.tree.leaves(getattr(kept, kind), is_leaf=lambda v: isinstance(v, frozenset))
    return flow.found


class _Flow(Visitor[frozenset[Source]]):
    """Notes where the operands of every call may come from."""

    def __init__(self) -> None:
        self.found = Sources({}, {}, {}, {}, {})
        self._times: int | None = 1  # how often the current step happens in a phase

    def literal(self, literal: Literal) -> frozenset[Source]:
        """A value of the server's."""
        return _SERVER

    def server(self, step: ServerWork, read: Read) -> Operands:
        """Values of the server's."""
        return [_SERVER] * len(step.outputs)

    def map(self, call: MapCall, read: Read) -> Operands:
        """Values of the client's own."""
        self._note(self.found.sent, call, read(call.sent))
        self._note(self.found.own, call, read(call.local))
        return _made_by(call)

    def scatter(self, call: ScatterCall, read: Read) -> Operands:
        """A client's row."""
        return [frozenset([ROW])]

    def reduce(self, call: ReduceCall, read: Read) -> Operands:
        """An exchange."""
        return self._exchange(call, read)

    def gather(self, call: GatherCall, read: Read) -> Operands:
        """An exchange."""
        return self._exchange(call, read)

    def center(self, call: CenterCall, read: Read) -> Operands:
        """An exchange with the client that holds the centre's data."""
        if call.holder is not None:
            self._note(self.found.sent, call, read(call.sent))
            self.found.own[call.number] = []
            self.found.replies[call.number] = _made_by(call)
            self.found.times[call.number] = self._times
        return [_SERVER] * len(call.outputs)

    def loop(self, call: LoopCall, read: Read) -> Operands:
        """Walk the body until what it carries is all that it may be."""
        fixed, start, outer = read(call.fixed), read(call.carry), self._times
        self._times = None if call.length is None or outer is None else call.length * outer
        carry = [_carried(value) for value in start]
        while True:
            made = self.visit(call.body, [*fixed, _SERVER, *carry])
            wider = [old | _carried(new) for old, new in zip(carry, made, strict=True)]
            if wider == carry:
                break
            carry = wider
        self._times = outer
        if call.length is None:  # there may be no turn
            return [a | b for a, b in zip(made, start, strict=True)]
        return made

    def _exchange(self, call: ReduceCall | GatherCall, read: Read) -> Operands:
        self._note(self.found.replies, call, read(call.rows))
        self.found.times[call.number] = self._times
        return [_SERVER] * len(call.outputs)

    def _note(self, where: dict[int, Operands], call: Call, operands: Operands) -> None:
        before = where.get(call.number, [frozenset()] * len(operands))
        where[call.number] = [old | new for old, new in zip(before, operands, strict=True)]


def _made_by(call: Call) -> Operands:
    return [frozenset([("m", call.number, i)]) for i in range(len(call.outputs))]


def _carried(value: frozenset[Source]) -> frozenset[Source]:
    """What a loop carries is sent in every turn, constants too."""
    return frozenset(SENT if source[0] == "c" else source for source in value)


UNKNOWN = ("unknown",)  # what a reference stands for whose function this site has not been told


class Rule(Protocol):
    """A further rule about requests, such as a policy's limits."""

    def check(self, plan: Plan, moment: Moment, header: dict[str, Any]) -> None:
        """Raise RefusedError, with the reason, for a request that is not to be answered."""


class PlanGuard:
    """Refuses what the plan does not do: other functions and operands, other replies, more replies, other memory.

    A site kept to its plan sends what the plan sends, computed as the plan computes it from this site's data. That is
    all that can be checked here: the values that the server sends, and so the points at which a function is evaluated,
    are the coordinator's; so is what it does with a reply.

    What was answered is looked up in the log, which outlives this object. Rounds and evaluations of a run do not go
    back. Within one of them the site answers each exchange as often as it stands in the plan, with requests that
    differ; the same request, by its digest, is answered again. Where every client takes part in every round, there is
    no evaluation of a round that the site has not seen.

    Arguments:
        client: the site's number in the federation.
        log: where every answer is noted before it is sent. Its last run is the one that is guarded.
        everyone: whether the site must have replied in every round of the run.
        also: a further rule, asked about what the plan allows.
        refused: refused(header, why), told what was refused.
    """

    def __init__(
        self,
        client: int,
        log: Audit,
        everyone: bool = False,
        also: Rule | None = None,
        refused: Callable[[dict[str, Any], str], None] = lambda header, why: None,
    ) -> None:
        self._client, self._log, self._everyone, self._also, self._refused = client, log, everyone, also, refused
        self._sources: dict[int, Sources] = {}  # by phase
        # At least those that the site holds: the moment and the call of each number.
        self._maps: dict[int, tuple[Moment, int]] = {}

    def check(self, plan: Plan, moment: Moment, header: dict[str, Any]) -> None:
        """See `Guard`. What is refused leaves nothing behind."""
        before, self._maps = self._maps, dict(self._maps)
        try:
            self._check(plan, moment, header)
            if self._also is not None:
                self._also.check(plan, moment, header)
        except RefusedError as error:
            self._maps = before
            self._refused(header, str(error))
            raise

    def admit(self, plan: Plan, moment: Moment, header: dict[str, Any], request: str) -> None:
        """See `Guard`. The same request may come again, as often as its reply gets lost."""
        call = header["call"]
        times = 1 if call == FINISH else self._sources[moment[0]].times[call]
        different = self._log.answered.asked(moment, call) | {request}
        if times is not None and len(different) > times:
            asked = "to end a round" if call == FINISH else f"for {_name(plan, call)}"
            why = f"it is asked {asked} more often than in the plan."
            self._refused(header, why)
            raise RefusedError(why)

    def replied(self, plan: Plan, moment: Moment, header: dict[str, Any], request: str, sent: Sent) -> None:
        """See `Guard`."""
        call = header["call"]
        name, kind, aggregated = "finish", "finish", False
        if call != FINISH:
            exchange, aggregated = exchange_of(plan, call), isinstance(plan.calls[call], ReduceCall)
            name, kind = exchange.name, exchange.kind
        self._log.replied(moment, call, name, kind, aggregated, request, sent)
        keep = set(header["keep"])
        self._maps = {number: known for number, known in self._maps.items() if number in keep}

    def _check(self, plan: Plan, moment: Moment, header: dict[str, Any]) -> None:
        phase, t = moment
        if phase not in (0, 1, 2):
            raise RefusedError("the plan has no such phase.")
        if phase not in self._sources:
            self._sources[phase] = sources(plan)
        self._check_order(phase, t)
        found = self._sources[phase]
        try:
            for number, call, sent, with_key, own in header["maps"]:
                self._check_function(plan, found, header["call"], call, with_key)
                self._check_operands(found, moment, call, sent, own)
                if self._maps.setdefault(number, (moment, call)) != (moment, call):
                    raise RefusedError(f"two functions are to have the number {number}.")
            if "memory" in header or "client" in header:
                self._check_kept(found, moment, header)
            self._check_reply(plan, found, moment, header)
        except (KeyError, TypeError, ValueError) as error:
            raise RefusedError("that is no request.") from error

    def _check_order(self, phase: int, t: int) -> None:
        """That rounds and evaluations of the run go on, whatever was opened again in between."""
        seen = self._log.answered
        last = f"it has answered round {seen.moment[1]} of this run" if seen.moment[0] == 1 else "the start is over"
        if seen.moment > ((1, t) if phase == 2 else (phase, t)):
            raise RefusedError(f"{last}, and goes back to no earlier moment.")
        if phase == 2 and t < seen.evaluated:
            raise RefusedError(f"it was evaluated after {seen.evaluated} rounds, and goes back to no earlier one.")
        reached = seen.moment[1] + 1 if seen.moment[0] == 1 else seen.evaluated
        if phase == 2 and self._everyone and reached >= 0 and t > reached:
            raise RefusedError(f"it is to be evaluated after {t} rounds, and has seen {reached}.")

    def _check_function(self, plan: Plan, found: Sources, wanted: Any, call: Any, with_key: Any) -> None:
        if type(call) is not int or call not in found.sent:
            raise RefusedError("it is asked to compute what is no function of a client's in the plan.")
        asked = plan.calls[call]
        assert isinstance(asked, WorkCall)
        if isinstance(asked, CenterCall) and (asked.holder != self._client or wanted != call):
            raise RefusedError(f"{_name(plan, call)} is not this site's to compute here.")
        if with_key is not (asked.key is not None):
            raise RefusedError(f"function {call} is to be given a key that the plan does not give, or none.")

    def _check_operands(self, found: Sources, moment: Moment, call: int, sent: Any, own: Any) -> None:
        given = [SENT if type(ref) is int else self._source(moment, ref) for ref in sent]
        if not _allowed(given, found.sent[call]):
            raise RefusedError(f"function {call} is to be sent other values of the server's than in the plan.")
        if not _allowed([self._source(moment, ref) for ref in own], found.own[call]):
            raise RefusedError(f"function {call} is to be given other values of the client's than in the plan.")

    def _check_kept(self, found: Sources, moment: Moment, header: dict[str, Any]) -> None:
        if header["call"] != FINISH or moment[0] == 2:
            raise RefusedError("it is to remember something at another time than at the end of a round.")
        for kind in ("memory", "client"):
            if not _allowed([self._source(moment, ref) for ref in header[kind]], found.kept[kind]):
                raise RefusedError("it is to remember something else than in the plan.")

    def _check_reply(self, plan: Plan, found: Sources, moment: Moment, header: dict[str, Any]) -> None:
        call, reply = header["call"], header["reply"]
        if call == FINISH and not reply:
            return
        if type(call) is not int or call not in found.replies:
            raise RefusedError("it is asked for a reply to what is no exchange of the plan.")
        asked = plan.calls[call]
        if isinstance(asked, CenterCall) and asked.holder != self._client:
            raise RefusedError(f"{_name(plan, call)} is not this site's to send.")
        if not _allowed([self._source(moment, ref) for ref in reply], found.replies[call]):
            raise RefusedError(f"the reply to {_name(plan, call)} would be something else than in the plan.")

    def _source(self, moment: Moment, ref: Any) -> Source:
        """What a reference stands for; None for a value that is not of this moment.

        A site that has started anew knows no number: it has not got the value either, and asks for everything.
        """
        if not isinstance(ref, list):
            return ref
        if ref[0] != "m":
            return tuple(ref)
        _, number, output = ref
        if number not in self._maps:
            return UNKNOWN
        when, call = self._maps[number]
        return ("m", call, output) if when == moment else None


def is_fixed(plan: Plan) -> bool:
    """Whether the plan says how often each of its exchanges happens."""
    return None not in sources(plan).times.values()


def asks_everyone(plan: Plan) -> bool:
    """Whether every client of the cohort replies in every round: to an exchange outside of loops and `resample`."""
    exchanges = [step for step in plan.body.steps if isinstance(step, ReduceCall | GatherCall)]
    return any(call.ids is plan.inputs.ids for call in exchanges)


def _allowed(given: list[Source], operands: Operands) -> bool:
    each = zip(given, operands, strict=False)
    return len(given) == len(operands) and all(ref == UNKNOWN or ref in allowed for ref, allowed in each)


def _name(plan: Plan, call: int) -> str:
    """An exchange in a message."""
    return repr(exchange_of(plan, call).name)


def exchange_of(plan: Plan, call: int) -> Exchange:
    """The exchange with this number among the plan's calls."""
    asked = plan.calls[call]
    assert isinstance(asked, ReduceCall | GatherCall | CenterCall)
    return asked.exchange
