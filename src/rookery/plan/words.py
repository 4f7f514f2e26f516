"""A plan in words: every exchange of a round, what clients are sent, what they keep, and what they send."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax

from rookery.base import jaxprs
from rookery.base.compat import Literal
from rookery.language import channel as channels
from rookery.language import ledger
from rookery.plan import calls
from rookery.plan.calls import Read, Visitor

_CONSTANT = "constants"
_KEY, _ROUND = "a key", "the round's number"


def in_words(plan: Any) -> str:
    """Describe the plan, line by line."""
    ids, weights = plan.given.ids, plan.given.weights
    words = _Words(ids.shape)
    words.visit(plan.body, _inputs(plan))
    most = "at most " if jax.tree.leaves(plan.given.present) else ""  # Poisson cohorts
    down = channels.down(plan.channel)
    rounded = "" if down is None or ".init" in plan.title else f"; what they are sent is {down.in_words}"
    return "\n".join([f"{plan.title}, {most}{ids.shape[0]} of {weights.shape[0]} clients{rounded}", *words.lines])


@dataclass(eq=False)
class _Value:
    """A value's name, and whether clients have the value already."""

    name: str
    known: bool = False


def _inputs(plan: Any) -> list[_Value]:
    """The plan's inputs, by name."""
    names = [*[_CONSTANT] * len(plan.consts), *_input_names(plan.given)]
    return [_Value(name, name == _CONSTANT) for name in names]


def _input_names(given: Any) -> list[str]:
    names = []
    for path, _ in jax.tree_util.tree_leaves_with_path(given):
        at = [getattr(p, "name", getattr(p, "key", getattr(p, "idx", None))) for p in path]
        if at[0] == "carry" and isinstance(at[1], int):  # of `init`
            names.append("xy"[at[1]])
        elif at[0] == "carry":
            kinds = {"state": str(at[2]) if len(at) > 2 else "x", "server": "the channel's state", "noise": _KEY}
            names.append(kinds.get(str(at[1]), "its memory"))
        elif at[0] == "hyper":
            names.append(str(at[1]))
        else:
            names.append({"t": _ROUND, "ids": "the cohort", "weights": "the weights"}.get(str(at[0]), _KEY))
    return names


class _Named(Visitor[_Value]):
    """Names every value after the inputs and exchanges that it depends on."""

    def literal(self, literal: Literal) -> _Value:
        return _Value(_CONSTANT, known=True)

    def server(self, step: calls.ServerWork, read: Read) -> list[_Value]:
        inputs = dict(zip(step.jaxpr.invars, read(step.operands), strict=True))
        outputs = []
        for variables in jaxprs.dependencies(step.jaxpr).values():
            names = [inputs[v].name for v in variables]
            if _KEY in names:  # the key depends on the round's number, which adds nothing
                names = [name for name in names if name != _ROUND]
            outputs.append(_Value(_joined(names)))
        return outputs

    def loop(self, call: calls.LoopCall, read: Read) -> list[_Value]:
        """Name carried values after the exchange that makes them, or after their initial value."""
        body, start = call.body, read(call.carry)
        exchanged = {v: c.exchange.name for c in body.steps if hasattr(c, "exchange") for v in c.outputs}
        named = lambda value: value.name if value.name != _CONSTANT else "a value of the loop"
        carried = [exchanged.get(v, named(value)) for v, value in zip(body.outputs, start, strict=True)]
        self.visit(body, [*read(call.fixed), _Value("the turn"), *map(_Value, carried)])
        return [_Value(name) for name in carried]


class _Words(_Named):
    """Writes the description, one line or more for each call."""

    def __init__(self, cohort: tuple[int, ...]) -> None:
        self.lines: list[str] = []
        self._cohort = cohort
        self._maps, self._depth = 0, 1

    def _write(self, line: str) -> None:
        self.lines.append("  " * self._depth + line)

    def map(self, call: calls.MapCall, read: Read) -> list[_Value]:
        self._maps += 1
        name = f"#{self._maps}"
        ids: Any = call.ids.aval
        whose = "clients" if ids.shape == self._cohort else "all clients"
        self._write(f"{name} {whose} at {call.source}")
        needed = _needed(call, read)
        if needed.sent:
            self._write(f"     are sent: {needed.sent} ({in_bytes(needed.size)})")
        if needed.known:
            self._write(f"     have: {needed.known}")
        self._write(f"     keep: {ledger.shape_of(call.reply) or 'nothing'}")
        return [_Value(name) for _ in call.outputs]

    def scatter(self, call: calls.ScatterCall, read: Read) -> list[_Value]:
        self._write(f"   scatter: each client is sent its own row of {read(call.rows).name}")
        return [_Value("what it was sent")]

    def center(self, call: calls.CenterCall, read: Read) -> list[_Value]:
        by = "the server" if call.holder is None else f"client {call.holder}"
        self._write(f'   "{call.exchange.name}" on the centre\'s data, at {call.source}, by {by}')
        if call.holder is not None:
            self._bookkeeping(call.exchange)
        return [_Value(call.exchange.name) for _ in call.outputs]

    def exchange(self, call: calls.ExchangeCall, read: Read) -> list[_Value]:
        """Say what each client sends, and whether it is seen alone."""
        exchange, aggregated = call.exchange, isinstance(call, calls.ReduceCall)
        seen = "aggregated: only the result is used" if aggregated else "not aggregated: the server uses each reply"
        if getattr(call, "asynchronous", None) is not None:
            seen = f"aggregated as replies come: only the {exchange.kind} of those in the buffer is used"
        if exchange.secure:
            seen = f"summed securely: the coordinator never sees a reply, only sums of at least {exchange.secure}"
        self._write(
            f'   {exchange.kind} "{exchange.name}" of {_joined(v.name for v in read(call.rows))}: each sends '
            f"{exchange.shape} ({in_bytes(exchange.reply_bytes)}{before_compression(exchange)}), {seen}"
        )
        self._bookkeeping(exchange)
        return [_Value(exchange.name) for _ in call.outputs]

    def _bookkeeping(self, exchange: ledger.Exchange) -> None:
        for line in bookkeeping(exchange):
            self._write(f"     {line}")

    def loop(self, call: calls.LoopCall, read: Read) -> list[_Value]:
        turns = f"{call.length} times" if call.length is not None else "a number of times that is drawn"
        self._write(f"   loop, {turns}:")
        self._depth += 2
        outputs = super().loop(call, read)
        self._depth -= 2
        return outputs


def bookkeeping(exchange: ledger.Exchange) -> list[str]:
    """A line for each piece of bookkeeping in a message, which no channel clips, with its bounds."""
    bound = lambda most, least: "no bound" if most is None else f"clamped to [{least:g}, {most:g}] under a channel"
    return [f"bookkeeping in it: {what} {shape}, {bound(*bounds)}" for what, shape, *bounds in exchange.beside]


def before_compression(exchange: ledger.Exchange) -> str:
    """A clause about a reply that a channel compresses."""
    return "" if exchange.plain_bytes is None else f"; {in_bytes(exchange.plain_bytes)} before compression"


class Exchanged(NamedTuple):
    """An exchange from the view of one client, in words."""

    name: str
    kind: str
    sent: str  # what the client is sent before it
    down: int  # the bytes of that
    shape: str  # of the client's reply
    up: int  # the bytes of that
    alone: bool  # whether the server sees the reply itself
    times: int | None  # in a round; None: known only during the run
    beside: tuple[str, ...] = ()  # the bookkeeping in the reply
    compressed: str = ""  # a clause about the reply, if a channel compresses it
    secure: int = 0  # the fewest replies of a secure sum; 0: it is not one


class _Exchanges(_Named):
    """Collects the exchanges of one client."""

    def __init__(self, client: int) -> None:
        self._client = client
        self.found: list[Exchanged] = []
        self.sent: list[str] = []  # since the last exchange
        self.down = 0
        self._times: int | None = 1

    def map(self, call: calls.MapCall, read: Read) -> list[_Value]:
        needed = _needed(call, read)
        self.sent += [needed.sent] if needed.sent else []
        self.down += needed.size
        return [_Value("a client's value") for _ in call.outputs]

    def scatter(self, call: calls.ScatterCall, read: Read) -> list[_Value]:
        rows = call.rows.aval
        self.sent.append(f"numbers of its own made of {read(call.rows).name.replace(', ', ' and ')}")
        self.down += ledger.nbytes([jax.ShapeDtypeStruct(rows.shape[1:], rows.dtype)])
        return [_Value("what it was sent")]

    def center(self, call: calls.CenterCall, read: Read) -> list[_Value]:
        if call.holder == self._client:
            needed = _needed(call, read)
            self._add(call.exchange, needed.sent, needed.size, alone=True)
        return [_Value(call.exchange.name) for _ in call.outputs]

    def exchange(self, call: calls.ExchangeCall, read: Read) -> list[_Value]:
        """An exchange. A reply that is not aggregated is seen alone."""
        self._add(call.exchange, _joined(self.sent), self.down, alone=not isinstance(call, calls.ReduceCall))
        self.sent, self.down = [], 0
        return [_Value(call.exchange.name) for _ in call.outputs]

    def _add(self, exchange: ledger.Exchange, sent: str, down: int, alone: bool) -> None:
        reply = exchange.shape, exchange.reply_bytes, alone, self._times, tuple(bookkeeping(exchange))
        how = before_compression(exchange), exchange.secure
        self.found.append(Exchanged(exchange.name, exchange.kind, sent, down, *reply, *how))

    def loop(self, call: calls.LoopCall, read: Read) -> list[_Value]:
        outer = self._times
        self._times = None if call.length is None or outer is None else outer * call.length
        outputs = super().loop(call, read)
        self._times = outer
        return outputs


def exchanges(plan: Any, client: int) -> tuple[list[Exchanged], str, int]:
    """A client's exchanges in order, what it is sent after the last one, and how many bytes that is."""
    words = _Exchanges(client)
    words.visit(plan.body, _inputs(plan))
    return words.found, _joined(words.sent), words.down


class _Needed(NamedTuple):
    """The values that a client's function closes over: those the client is sent, their bytes, and those it has."""

    sent: str
    size: int
    known: str


def _needed(call: calls.WorkCall, read: Read) -> _Needed:
    drawn = call.key is not None
    new = [v for v in dict.fromkeys(call.sent) if not read(v).known]
    size = ledger.nbytes([v.aval for v in new]) + 8 * drawn
    named = _joined([*(read(v).name for v in new), *["a key of its own"] * drawn])
    named = named or ("numbers made of constants alone" if size else "")
    had = [read(v).name for v in (*call.sent, *call.local) if v not in new]
    for v in new:
        read(v).known = True
    return _Needed(named, size, _joined(name for name in had if name != _CONSTANT))


def _joined(labels: Iterable[str]) -> str:
    """The parts of all labels, each once."""
    parts = dict.fromkeys(part for label in labels for part in label.split(", ") if part)
    for dull in (_CONSTANT, _KEY, "the cohort", "the weights"):  # other parts say more
        if len(parts) > 1 or dull == _CONSTANT:
            parts.pop(dull, None)
    return ", ".join(parts)


def in_bytes(size: int) -> str:
    return f"{size} bytes" if size < 1000 else f"{size / 1000:.3g} kB" if size < 10**6 else f"{size / 10**6:.3g} MB"
