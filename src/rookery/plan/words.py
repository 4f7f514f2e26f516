"""A plan in words: every exchange of a round, what clients are sent, what they keep, and what they send."""

from collections.abc import Iterable
from typing import Any, NamedTuple

import jax

from rookery.base import jaxprs
from rookery.base.compat import Literal
from rookery.language import fed, ledger


def in_words(plan: Any) -> str:
    """The plan, line by line."""
    given = plan.given
    lines = [f"{plan.title}, {given.ids.shape[0]} of {given.weights.shape[0]} clients"]
    _Words(lines).body(plan.body, _named(plan), 1)
    return "\n".join(lines)


def _named(plan: Any) -> "dict[Any, _Value]":
    """The plan's inputs by their names."""
    names = [*[_CONSTANT] * len(plan.consts), *_input_names(plan.given)]
    values = [_Value(name, name == _CONSTANT) for name in names]
    return dict(zip(plan.body.inputs, values, strict=True))


_CONSTANT = "constants"
_KEY, _ROUND = "a key", "the round's number"


class _Value:
    """A value by its name; who has been sent it has it."""

    def __init__(self, name: str, known: bool = False) -> None:
        self.name, self.known = name, known


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


class _Words:
    def __init__(self, lines: list[str]) -> None:
        self._lines, self._maps = lines, 0

    def body(self, body: Any, values: dict[Any, _Value], depth: int) -> None:
        """The lines of a body's steps; names of what it makes are added to `values`."""

        def of(v: Any) -> _Value:
            return _Value(_CONSTANT, True) if isinstance(v, Literal) else values[v]

        for step in body.steps:
            if not hasattr(step, "eqn"):
                for v, read in jaxprs.dependencies(step.jaxpr).items():
                    names = [of(u).name for u in read]
                    if _KEY in names:  # drawn for this round: its number says nothing more
                        names = [name for name in names if name != _ROUND]
                    values[v] = _Value(_joined(names))
                continue
            eqn, params = step.eqn, step.eqn.params
            name = params["exchange"].name if "exchange" in params else "what it was sent"
            if eqn.primitive is fed.client_map:
                self._maps += 1
                name = f"#{self._maps}"
                self._map(eqn, of, depth)
            elif eqn.primitive is fed.scatter:
                self._scatter(eqn, of, depth)
            elif eqn.primitive is fed.center:
                self._center(eqn, of, depth)
            elif eqn.primitive is fed.loop:
                self._loop(step, values, of, depth)
                continue
            else:
                self._exchange(eqn, of, depth)
            values.update((v, _Value(name)) for v in eqn.outvars)

    def _map(self, eqn: Any, of: Any, depth: int) -> None:
        pad = "  " * depth
        self._lines.append(f"{pad}#{self._maps} clients at {eqn.params['source']}")
        given = _given(eqn.invars[1:], eqn.params["inputs"], of)
        if given.sent:
            self._lines.append(f"{pad}     are sent: {given.sent} ({in_bytes(given.size)})")
        if given.used:
            self._lines.append(f"{pad}     have: {given.used}")
        shapes = ledger.shape_of([v.aval for v in eqn.params["work"].outvars[:-1]])
        self._lines.append(f"{pad}     keep: {shapes or 'nothing'}")

    def _scatter(self, eqn: Any, of: Any, depth: int) -> None:
        self._lines.append(f"{'  ' * depth}   scatter: each client is sent its own row of {of(eqn.invars[1]).name}")

    def _center(self, eqn: Any, of: Any, depth: int) -> None:
        exchange, holder, pad = eqn.params["exchange"], eqn.params["holder"], "  " * depth
        by = "the server" if holder is None else f"client {holder}"
        self._lines.append(f'{pad}   "{exchange.name}" on the centre\'s data, at {eqn.params["source"]}, by {by}')
        self._lines += [f"{pad}     {line}" for line in bookkeeping(exchange) if holder is not None]

    def _exchange(self, eqn: Any, of: Any, depth: int) -> None:
        exchange, pad = eqn.params["exchange"], "  " * depth
        rows = eqn.invars[1 + (eqn.primitive is fed.reduce) + eqn.params["lossy"] :]
        seen = "aggregated before anyone sees it" if eqn.primitive is fed.reduce else "seen by the server one by one"
        self._lines.append(
            f'{pad}   {exchange.kind} "{exchange.name}" of {_joined(of(v).name for v in rows)}: each sends '
            f"{exchange.shape} ({in_bytes(exchange.reply_bytes)}), {seen}"
        )
        self._lines += [f"{pad}     {line}" for line in bookkeeping(exchange)]

    def _loop(self, step: Any, values: dict[Any, _Value], of: Any, depth: int) -> None:
        length, body = step.eqn.params["length"], step.body
        self._turns(length, depth)
        given = step.eqn.invars[length is None :]
        fixed, start = given[: len(given) - len(body.outputs)], given[len(given) - len(body.outputs) :]
        made = {v: s.eqn.params["exchange"].name for s in body.steps if "exchange" in _params(s) for v in s.eqn.outvars}
        named = lambda v: of(v).name if of(v).name != _CONSTANT else "a value of the loop"
        carried = [made.get(after, named(before)) for after, before in zip(body.outputs, start, strict=True)]
        inside = [*map(of, fixed), _Value("the turn"), *map(_Value, carried)]
        self.body(body, dict(zip(body.inputs, inside, strict=True)), depth + 2)
        values.update((v, _Value(name)) for v, name in zip(step.eqn.outvars, carried, strict=True))
        self._leave()

    def _turns(self, length: int | None, depth: int) -> None:
        turns = f"{length} times" if length is not None else "a number of times that is drawn"
        self._lines.append(f"{'  ' * depth}   loop, {turns}:")

    def _leave(self) -> None:
        """A loop is over."""


def bookkeeping(exchange: ledger.Exchange) -> list[str]:
    """What of a message no channel clips or hides, in words, and what bounds it."""
    bound = lambda most: "no bound" if most is None else f"clamped to [0, {most:g}] under a channel"
    return [f"bookkeeping in it: {what} {shape}, {bound(most)}" for what, shape, most in exchange.beside]


class Exchanged(NamedTuple):
    """An exchange as one client takes part in it, in words."""

    name: str
    kind: str
    sent: str  # what it is sent for it
    down: int  # the bytes of that
    shape: str  # of its reply
    up: int  # the bytes of that
    alone: bool  # whether its reply is seen as it is
    times: int | None  # in a round; None: the run draws it
    beside: tuple[str, ...] = ()  # the bookkeeping in it, in words


class _Exchanges(_Words):
    """Collects a client's exchanges."""

    def __init__(self, client: int) -> None:
        super().__init__([])
        self._client = client
        self.found: list[Exchanged] = []
        self.sent: list[str] = []  # since the last exchange
        self.down = 0
        self._times: list[int | None] = [1]

    def _map(self, eqn: Any, of: Any, depth: int) -> None:
        given = _given(eqn.invars[1:], eqn.params["inputs"], of)
        self.sent += [given.sent] if given.sent else []
        self.down += given.size

    def _scatter(self, eqn: Any, of: Any, depth: int) -> None:
        row = eqn.invars[1].aval
        self.sent.append(f"numbers of its own made of {of(eqn.invars[1]).name.replace(', ', ' and ')}")
        self.down += ledger.nbytes([jax.ShapeDtypeStruct(row.shape[1:], row.dtype)])

    def _center(self, eqn: Any, of: Any, depth: int) -> None:
        if eqn.params["holder"] == self._client:
            given = _given(eqn.invars, eqn.params["inputs"], of)
            self._add(eqn.params["exchange"], given.sent, given.size, alone=True)

    def _exchange(self, eqn: Any, of: Any, depth: int) -> None:
        self._add(eqn.params["exchange"], _joined(self.sent), self.down, alone=eqn.primitive is not fed.reduce)
        self.sent, self.down = [], 0

    def _add(self, own: ledger.Exchange, sent: str, down: int, alone: bool) -> None:
        times = self._times[-1]
        reply = own.shape, own.reply_bytes, alone, times, tuple(bookkeeping(own))
        self.found.append(Exchanged(own.name, own.kind, sent, down, *reply))

    def _turns(self, length: int | None, depth: int) -> None:
        before = self._times[-1]
        self._times.append(None if length is None or before is None else before * length)

    def _leave(self) -> None:
        self._times.pop()


def exchanges(plan: Any, client: int) -> tuple[list[Exchanged], str, int]:
    """A client's exchanges in order; and what it is sent after the last one, with the bytes of that."""
    words = _Exchanges(client)
    words.body(plan.body, _named(plan), 0)
    return words.found, _joined(words.sent), words.down


class _Given(NamedTuple):
    """What a client's function is given: what is new to the client, the bytes of that, and what it had."""

    sent: str
    size: int
    used: str


def _given(given: Any, inputs: Any, of: Any) -> _Given:
    sent, own = given[: inputs.sent], given[inputs.sent + inputs.key :]
    new = [v for v in dict.fromkeys(sent) if not of(v).known]
    size = ledger.nbytes([v.aval for v in new]) + 8 * inputs.key
    named = _joined([*(of(v).name for v in new), *["a key of its own"] * inputs.key])
    named = named or ("numbers made of constants alone" if size else "")
    used = _joined(of(v).name for v in (*sent, *own) if v not in new and of(v).name != _CONSTANT)
    for v in new:
        of(v).known = True
    return _Given(named, size, used)


def _params(step: Any) -> dict[str, Any]:
    return step.eqn.params if hasattr(step, "eqn") else {}


def _joined(labels: Iterable[str]) -> str:
    """The labels, each once; what is made of several names them all."""
    each = dict.fromkeys(part for label in labels for part in label.split(", "))
    for dull in (_CONSTANT, _KEY, "the cohort", "the weights"):  # what else it was made of says more
        if len(each) > 1 or dull == _CONSTANT:
            each.pop(dull, None)
    return ", ".join(each)


def in_bytes(size: int) -> str:
    return f"{size} bytes" if size < 1000 else f"{size / 1000:.3g} kB" if size < 10**6 else f"{size / 10**6:.3g} MB"
