"""The exchanges and bytes of a round, computed from its plan."""

from collections.abc import Sequence
from typing import Any

import jax

from rookery.base.compat import Literal
from rookery.language import ledger
from rookery.language.ledger import Entries, Entry
from rookery.plan import calls
from rookery.plan.calls import Read, Visitor
from rookery.plan.trace import Plan

FINISH = ledger.Exchange("finish", "finish", "", 0)


def costs(plan: Plan, turns: Sequence[Any]) -> Entries:
    """The entries of the round's exchanges. `turns`: the number of turns of each loop of `counted_loops`.

    A client is sent the values that its functions close over, each once. Values that a loop carries or computes are
    sent again in every turn. What a client is sent before a reply counts with that exchange; after the last exchange it
    counts as "finish".
    """
    walker = _Costs(dict(zip(counted_loops(plan.body), turns, strict=True)))
    walker.known.update(plan.body.inputs[: len(plan.consts)])  # every participant has the plan's constants
    walker.visit(plan.body, plan.body.inputs)
    down = walker.pending.get(plan.inputs.ids, 0)
    if down or plan.writes_memory:
        walker.entries.setdefault(FINISH, Entry()).add(Entry(0, 0, down))
    return walker.entries


def counted_loops(body: calls.Body, inside: bool = False) -> list[int]:
    """The numbers of the loops whose length is not known before the run, in the plan's order."""
    numbers = []
    for step in body.steps:
        if isinstance(step, calls.LoopCall):
            counted = step.length is None
            if counted and inside:
                raise ValueError(
                    "Of two nested calls of fed.loop, one must have an int as its number of turns; got two that are "
                    "known only during the run."
                )
            numbers += [step.number] * counted + counted_loops(step.body, inside or counted)
    return numbers


class _Costs(Visitor[Any]):
    """Adds up the bytes. Values are names: a variable for a plan's input, a new object for any other value."""

    def __init__(self, turns: dict[int, Any]) -> None:
        self._turns = turns
        self._turn: tuple[int, ...] = ()  # of the loops around the current step
        self.entries: Entries = {}
        self.known: set[Any] = set()  # values that every client has
        self.pending: dict[Any, int] = {}  # bytes for the next exchange, by cohort
        self._sent: dict[Any, set[Any]] = {}  # by cohort, which is the name of its ids

    def literal(self, literal: Literal) -> Any:
        return object()

    def server(self, step: calls.ServerWork, read: Read) -> list[Any]:
        return [object() for _ in step.outputs]

    def map(self, call: calls.MapCall, read: Read) -> list[Any]:
        cohort = read(call.ids)
        self._send(cohort, call, read)
        return [object() for _ in call.outputs]

    def scatter(self, call: calls.ScatterCall, read: Read) -> list[Any]:
        rows = call.rows.aval
        self._add(read(call.ids), ledger.nbytes([jax.ShapeDtypeStruct(rows.shape[1:], rows.dtype)]))
        return [object()]

    def exchange(self, call: calls.ExchangeCall, read: Read) -> list[Any]:
        down = self.pending.pop(read(call.ids), 0)
        self.entries.setdefault(call.exchange, Entry()).add(Entry(1, call.exchange.reply_bytes, down))
        return [object() for _ in call.outputs]

    def center(self, call: calls.CenterCall, read: Read) -> list[Any]:
        entry = self.entries.setdefault(call.exchange, Entry())
        if call.holder is not None:
            self._send("center", call, read)
            entry.add(Entry(1, call.exchange.reply_bytes, self.pending.pop("center", 0)))
        return [object() for _ in call.outputs]

    def loop(self, call: calls.LoopCall, read: Read) -> list[Any]:
        """Add the costs of all turns. Turns after the first cost the same, unless an inner loop varies in length."""
        outer, fixed = self.entries, read(call.fixed)
        recorded = None if call.length is not None else self._turns[call.number]
        length: Any = call.length if recorded is None else int(recorded[self._turn] if self._turn else recorded)
        differ = any(inner.length is None for inner in call.body.of(calls.LoopCall))
        for i in range(length if differ else min(length, 2)):
            self.entries, self._turn = {}, (*self._turn, i)
            self.visit(call.body, [*fixed, *(object() for _ in call.body.inputs[len(fixed) :])])
            ledger.add_entries(outer, self.entries, length - 1 if i == 1 and not differ else 1)
            self._turn = self._turn[:-1]
        self.entries = outer
        return [object() for _ in call.outputs]

    def _send(self, cohort: Any, call: calls.MapCall | calls.CenterCall, read: Read) -> None:
        has = self._sent.setdefault(cohort, set())
        new = [v for v in dict.fromkeys(call.sent) if read(v) not in has | self.known]
        has.update(map(read, new))
        self._add(cohort, ledger.nbytes([v.aval for v in new]) + 8 * (call.key is not None))

    def _add(self, cohort: Any, count: int) -> None:
        self.pending[cohort] = self.pending.get(cohort, 0) + count
