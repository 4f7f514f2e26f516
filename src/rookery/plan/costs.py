"""What a round costs, from its plan alone."""

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
    """The entries of the round's exchanges. `turns`: how often each loop of `counted_loops` ran.

    A client is sent the values that its functions close over and that it does not have yet: each once, except that
    values which a loop carries or makes are sent again in every turn. What a client is sent for its next reply counts
    with that exchange; after the last one it counts as "finish".
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
                    "A fed.loop of a length that is not known before the run stands inside another one: give one of "
                    "them an int."
                )
            numbers += [step.number] * counted + counted_loops(step.body, inside or counted)
    return numbers


class _Costs(Visitor[Any]):
    """Adds up the bytes. A value is its name: a variable of the plan's inputs, or a fresh object."""

    def __init__(self, turns: dict[int, Any]) -> None:
        self._turns = turns
        self._turn: tuple[int, ...] = ()  # of the loops around the current step
        self.entries: Entries = {}
        self.known: set[Any] = set()  # to everybody
        self.pending: dict[Any, int] = {}  # bytes for the next exchange, by cohort
        self._sent: dict[Any, set[Any]] = {}  # by cohort, which is the name of its ids

    def literal(self, literal: Literal) -> Any:
        """A literal is never sent."""
        return object()

    def server(self, step: calls.ServerWork, read: Read) -> list[Any]:
        """New values."""
        return [object() for _ in step.outputs]

    def map(self, call: calls.MapCall, read: Read) -> list[Any]:
        """The cohort is sent what it does not have, and keys."""
        cohort = read(call.ids)
        self._send(cohort, call, read)
        return [object() for _ in call.outputs]

    def scatter(self, call: calls.ScatterCall, read: Read) -> list[Any]:
        """Each client is sent a row."""
        rows = call.rows.aval
        self._add(read(call.ids), ledger.nbytes([jax.ShapeDtypeStruct(rows.shape[1:], rows.dtype)]))
        return [object()]

    def exchange(self, call: calls.ExchangeCall, read: Read) -> list[Any]:
        """One exchange."""
        down = self.pending.pop(read(call.ids), 0)
        self.entries.setdefault(call.exchange, Entry()).add(Entry(1, call.exchange.reply_bytes, down))
        return [object() for _ in call.outputs]

    def center(self, call: calls.CenterCall, read: Read) -> list[Any]:
        """An exchange with the holder, if that is a client."""
        entry = self.entries.setdefault(call.exchange, Entry())
        if call.holder is not None:
            self._send("center", call, read)
            entry.add(Entry(1, call.exchange.reply_bytes, self.pending.pop("center", 0)))
        return [object() for _ in call.outputs]

    def loop(self, call: calls.LoopCall, read: Read) -> list[Any]:
        """The body's entries times its turns. All turns after the first cost the same, if no inner loop is counted."""
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
