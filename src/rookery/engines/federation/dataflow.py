"""Where a plan lets values come from, and the guard that holds a coordinator to it."""

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import jax

from rookery.base.compat import Literal
from rookery.engines.federation.audit import Audit
from rookery.engines.federation.site import RefusedError, Sent
from rookery.engines.federation.store import Moment
from rookery.language import fed
from rookery.plan.trace import Body, Call, Carry, Plan, Server

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
    """What the plan allows. Of a loop it does not tell the turns apart: a value is that of any turn."""
    found = Sources({}, {}, {}, {}, {})
    count = len(plan.consts)
    values: dict[Any, frozenset[Source]] = {v: _SERVER for v in plan.body.inputs}
    values.update((v, frozenset([("c", i)])) for i, v in enumerate(plan.body.inputs[:count]))
    carry = jax.tree.unflatten(jax.tree.structure(plan.given), plan.body.inputs[count:]).carry
    for kind in ("memory", "client") if isinstance(carry, Carry) else ():
        values.update((v, frozenset([(kind, i)])) for i, v in enumerate(jax.tree.leaves(getattr(carry, kind))))
    _walk(plan.body, values, found, 1)
    made = jax.tree.unflatten(jax.tree.structure(plan.made), plan.body.outputs).carry
    for kind in ("memory", "client"):
        found.kept[kind] = [_of(values, v) for v in jax.tree.leaves(getattr(made, kind))]
    return found


def _of(values: dict[Any, frozenset[Source]], v: Any) -> frozenset[Source]:
    return _SERVER if isinstance(v, Literal) else values[v]


def _walk(body: Body, values: dict[Any, frozenset[Source]], found: Sources, times: int | None) -> None:
    """Note what the body's calls are given, and in `values` what they make."""

    def note(where: dict[int, Operands], call: int, operands: Any) -> None:
        given = [_of(values, v) for v in operands]
        before = where.get(call, [frozenset()] * len(given))
        where[call] = [old | new for old, new in zip(before, given, strict=True)]

    for step in body.steps:
        if isinstance(step, Server):
            values.update((v, _SERVER) for v in step.outputs)
            continue
        eqn, params, call = step.eqn, step.eqn.params, step.number
        own: Operands = [frozenset([("m", call, i)]) for i in range(len(eqn.outvars))]
        made = [_SERVER] * len(eqn.outvars)
        if eqn.primitive is fed.client_map:
            inputs = params["inputs"]
            note(found.sent, call, eqn.invars[1 : 1 + inputs.sent])
            note(found.own, call, eqn.invars[1 + inputs.sent + inputs.key :])
            made = own
        elif eqn.primitive is fed.scatter:
            made = [frozenset([ROW])]
        elif eqn.primitive is fed.center:
            if params["holder"] is not None:
                note(found.sent, call, eqn.invars[: params["inputs"].sent])
                found.own[call], found.replies[call], found.times[call] = [], own, times
        elif eqn.primitive is fed.loop:
            made = _loop(step, [_of(values, v) for v in eqn.invars], found, times)
        else:
            note(found.replies, call, eqn.invars[1 + (eqn.primitive is fed.reduce) + params["lossy"] :])
            found.times[call] = times
        values.update(zip(eqn.outvars, made, strict=True))


def _loop(step: Call, given: Operands, found: Sources, times: int | None) -> Operands:
    """What the loop makes: its body walked until what it carries is all that it may be."""
    body, length = step.body, step.eqn.params["length"]
    assert body is not None
    given = given[length is None :]
    split = len(given) - len(body.outputs)
    fixed, start = given[:split], given[split:]
    carry, turns = list(map(_carried, start)), None if length is None or times is None else length * times
    while True:
        inside = dict(zip(body.inputs, [*fixed, _SERVER, *carry], strict=True))
        _walk(body, inside, found, turns)
        made = [_of(inside, v) for v in body.outputs]
        wider = [old | _carried(new) for old, new in zip(carry, made, strict=True)]
        if wider == carry:
            break
        carry = wider
    return [a | b for a, b in zip(made, start, strict=True)] if length is None else made  # there may be no turn


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
            eqn = plan.calls[call]
            exchange, aggregated = eqn.params["exchange"], eqn.primitive is fed.reduce
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
        eqn = plan.calls[call]
        if eqn.primitive is fed.center and (eqn.params["holder"] != self._client or wanted != call):
            raise RefusedError(f"{_name(plan, call)} is not this site's to compute here.")
        if with_key is not eqn.params["inputs"].key:
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
        center = plan.calls[call].primitive is fed.center
        if center and plan.calls[call].params["holder"] != self._client:
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
    given = jax.tree.unflatten(jax.tree.structure(plan.given), plan.body.inputs[len(plan.consts) :])
    calls = [step.eqn for step in plan.body.steps if isinstance(step, Call)]
    return any(eqn.primitive in (fed.reduce, fed.gather) and eqn.invars[0] is given.ids for eqn in calls)


def _allowed(given: list[Source], operands: Operands) -> bool:
    each = zip(given, operands, strict=False)
    return len(given) == len(operands) and all(ref == UNKNOWN or ref in allowed for ref, allowed in each)


def _name(plan: Plan, call: int) -> str:
    """An exchange in a message."""
    return repr(plan.calls[call].params["exchange"].name)
