"""The flow of data in a plan: where the operands of every call may come from."""

from typing import Any, NamedTuple

import jax

from rookery.base.compat import Literal
from rookery.language.ledger import Exchange
from rookery.plan import calls
from rookery.plan.calls import Read, Visitor
from rookery.plan.trace import Carry, Plan

Source = Any  # SENT, ROW, ("c", constant), ("m", call, output), ("memory", leaf) or ("client", leaf)
Operands = list[frozenset[Source]]  # for each operand, its possible sources
SENT, ROW = "v", "row"  # a value of the server, and a client's row of one
_SERVER: frozenset[Source] = frozenset([SENT])


class Sources(NamedTuple):
    """What a plan allows, by the number of the call.

    Attributes:
        sent: the server's values that a client's function reads.
        local: the client's values that it reads.
        replies: what an exchange sends. (What the server computes from the centre's data is not an exchange.)
        remembered: what is remembered at the end: "memory" is the method's, "client" the channel's.
        times: how often an exchange happens in one phase; None: the run decides.
    """

    sent: dict[int, Operands]
    local: dict[int, Operands]
    replies: dict[int, Operands]
    remembered: dict[str, Operands]
    times: dict[int, int | None]


def sources(plan: Plan) -> Sources:
    """Return what the plan allows. The turns of a loop are not distinguished: a value may come from any turn."""
    flow = _Flow()
    values: dict[Any, frozenset[Source]] = {v: _SERVER for v in plan.body.inputs}
    values.update((v, frozenset([("c", i)])) for i, v in enumerate(plan.body.inputs[: len(plan.consts)]))
    carry = plan.inputs.carry
    for kind in ("memory", "client") if isinstance(carry, Carry) else ():
        values.update((v, frozenset([(kind, i)])) for i, v in enumerate(jax.tree.leaves(getattr(carry, kind))))
    outputs = flow.visit(plan.body, [values[v] for v in plan.body.inputs])
    kept = jax.tree.unflatten(jax.tree.structure(plan.made), outputs).carry
    for kind in ("memory", "client"):
        flow.found.remembered[kind] = jax.tree.leaves(getattr(kept, kind), is_leaf=lambda v: isinstance(v, frozenset))
    return flow.found


class _Flow(Visitor[frozenset[Source]]):
    """Notes where the operands of every call may come from."""

    def __init__(self) -> None:
        self.found = Sources({}, {}, {}, {}, {})
        self._times: int | None = 1  # how often the current step happens in a phase

    def literal(self, literal: Literal) -> frozenset[Source]:
        """Return the server as the source."""
        return _SERVER

    def server(self, step: calls.ServerWork, read: Read) -> Operands:
        """Return the server as the source."""
        return [_SERVER] * len(step.outputs)

    def map(self, call: calls.MapCall, read: Read) -> Operands:
        """Note the operands, and return the call as the source."""
        self._note(self.found.sent, call, read(call.sent))
        self._note(self.found.local, call, read(call.local))
        return _made_by(call)

    def scatter(self, call: calls.ScatterCall, read: Read) -> Operands:
        """Return a row as the source."""
        return [frozenset([ROW])]

    def exchange(self, call: calls.ExchangeCall, read: Read) -> Operands:
        """Note what is sent."""
        self._note(self.found.replies, call, read(call.rows))
        self.found.times[call.number] = self._times
        return [_SERVER] * len(call.outputs)

    def center(self, call: calls.CenterCall, read: Read) -> Operands:
        """Note an exchange with the client that holds the centre's data."""
        if call.holder is not None:
            self._note(self.found.sent, call, read(call.sent))
            self.found.local[call.number] = []
            self.found.replies[call.number] = _made_by(call)
            self.found.times[call.number] = self._times
        return [_SERVER] * len(call.outputs)

    def loop(self, call: calls.LoopCall, read: Read) -> Operands:
        """Walk the body until the possible sources of the carry stop growing."""
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

    def _note(self, where: dict[int, Operands], call: calls.Call, operands: Operands) -> None:
        before = where.get(call.number, [frozenset()] * len(operands))
        where[call.number] = [old | new for old, new in zip(before, operands, strict=True)]


def _made_by(call: calls.Call) -> Operands:
    return [frozenset([("m", call.number, i)]) for i in range(len(call.outputs))]


def _carried(value: frozenset[Source]) -> frozenset[Source]:
    """Return the sources of a carried value: it is sent in every turn, even if it began as a constant."""
    return frozenset(SENT if source[0] == "c" else source for source in value)


def is_fixed(plan: Plan) -> bool:
    """Return whether the plan fixes how often each of its exchanges happens."""
    return None not in sources(plan).times.values()


def secure_times(plan: Plan) -> dict[int, int | None]:
    """Return how often each secure sum happens in one phase, by the number of the call; None: the run decides."""
    return {call: times for call, times in sources(plan).times.items() if exchange_of(plan, call).secure}


def asks_everyone(plan: Plan) -> bool:
    """Return whether every client of the cohort replies in every round: to an exchange outside loops and `resample`."""
    exchanges = [step for step in plan.body.steps if isinstance(step, calls.ExchangeCall)]
    return any(call.ids is plan.inputs.ids for call in exchanges)


def exchange_of(plan: Plan, call: int) -> Exchange:
    """Return the exchange of the plan's call with this number."""
    found = plan.calls[call]
    assert isinstance(found, calls.ExchangeCall | calls.CenterCall)
    return found.exchange
