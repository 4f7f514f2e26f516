"""The exchanges and bytes of a round, computed from its plan."""

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

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


class _Twice:
    """The recorded turns of any loop: two."""

    def __int__(self) -> int:
        return 2

    def __getitem__(self, _: Any) -> "_Twice":
        return self


def bytes_down(plan: Plan) -> dict[Any, np.ndarray]:
    """The bytes that a client is sent before each exchange, by its place in the plan, and after the last, "finish".

    An array has an axis for each loop around the exchange, for its first turn and the later ones. A centre whose data
    the server holds is not an exchange.
    """
    walker = _Costs(dict.fromkeys(counted_loops(plan.body), _Twice()))
    walker.known.update(plan.body.inputs[: len(plan.consts)])
    walker.visit(plan.body, plan.body.inputs)
    is_exchange = lambda call: isinstance(call, calls.ExchangeCall) or getattr(call, "holder", None) is not None
    numbers = [call.number for call in plan.body.calls if is_exchange(call)]
    table: dict[Any, np.ndarray] = {"finish": np.asarray(walker.pending.get(plan.inputs.ids, 0), float)}
    for k, number in enumerate(numbers):
        by_turn = walker.before[number]
        table[k] = np.zeros((2,) * len(next(iter(by_turn))))
        for turn, count in by_turn.items():
            table[k][turn] = count
    return table


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
        self.before: dict[int, dict[tuple[int, ...], int]] = {}  # a call's bytes down, in first and in later turns
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
        down = self._taken(call, read(call.ids))
        self.entries.setdefault(call.exchange, Entry()).add(Entry(1, call.exchange.reply_bytes, down))
        return [object() for _ in call.outputs]

    def center(self, call: calls.CenterCall, read: Read) -> list[Any]:
        entry = self.entries.setdefault(call.exchange, Entry())
        if call.holder is not None:
            self._send("center", call, read)
            entry.add(Entry(1, call.exchange.reply_bytes, self._taken(call, "center")))
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

    def _taken(self, call: calls.Call, cohort: Any) -> int:
        """The bytes for the next exchange, which this call is."""
        down = self.pending.pop(cohort, 0)
        self.before.setdefault(call.number, {})[tuple(min(i, 1) for i in self._turn)] = down
        return down

    def _add(self, cohort: Any, count: int) -> None:
        self.pending[cohort] = self.pending.get(cohort, 0) + count
