"""A plan in words: every exchange of a round, what clients are sent, what they keep, and what they send."""

from collections.abc import Iterable
from typing import Any

import jax
from jax.extend.core import Literal

from rookery import fed, ledger


def in_words(plan: Any) -> str:
    """The plan, line by line."""
    given = plan.given
    lines = [f"{plan.title}, {given.ids.shape[0]} of {given.weights.shape[0]} clients"]
    names = [*[_CONSTANT] * len(plan.consts), *_input_names(given)]
    values = [_Value(name, name == _CONSTANT) for name in names]
    _Words(lines).body(plan.body, dict(zip(plan.body.inputs, values, strict=True)), 1)
    return "\n".join(lines)


_CONSTANT = "constants"


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
            kinds = {"state": str(at[2]) if len(at) > 2 else "x", "server": "the channel's state"}
            names.append(kinds.get(str(at[1]), "its memory"))
        elif at[0] == "hyper":
            names.append(str(at[1]))
        else:
            names.append(
                {"t": "the round's number", "ids": "the cohort", "weights": "the weights"}.get(str(at[0]), "a key")
            )
    return names


class _Words:
    def __init__(self, lines: list[str]) -> None:
        self._lines, self._maps = lines, 0

    def body(self, body: Any, values: dict[Any, _Value], depth: int) -> None:
        """The lines of a body's steps; names of what it makes are added to `values`."""
        pad = "  " * depth

        def of(v: Any) -> _Value:
            return _Value(_CONSTANT, True) if isinstance(v, Literal) else values[v]

        for step in body.steps:
            if not hasattr(step, "eqn"):
                made = _joined(of(v).name for v in step.inputs)
                values.update((v, _Value(made)) for v in step.outputs)
                continue
            eqn, params = step.eqn, step.eqn.params
            name = params["exchange"].name if "exchange" in params else "what it was sent"
            if eqn.primitive is fed.client_map:
                self._maps += 1
                name = f"#{self._maps}"
                self._lines.append(f"{pad}{name} clients at {params['source']}")
                self._function(eqn.invars[1:], params["inputs"], of, pad)
                shapes = ledger.shape_of([v.aval for v in params["work"].outvars[:-1]])
                self._lines.append(f"{pad}     keep: {shapes or 'nothing'}")
            elif eqn.primitive is fed.scatter:
                self._lines.append(f"{pad}   scatter: each client is sent its own row of {of(eqn.invars[1]).name}")
            elif eqn.primitive is fed.center:
                holder = "the server" if params["holder"] is None else f"client {params['holder']}"
                self._lines.append(f'{pad}   "{name}" on the centre\'s data, at {params["source"]}, by {holder}')
            elif eqn.primitive is fed.loop:
                self._loop(step, values, of, depth)
                continue
            else:
                self._exchange(eqn, of, pad)
            values.update((v, _Value(name)) for v in eqn.outvars)

    def _function(self, given: Any, inputs: Any, of: Any, pad: str) -> None:
        sent, own = given[: inputs.sent], given[inputs.sent + inputs.key :]
        new = [v for v in dict.fromkeys(sent) if not of(v).known]
        size = ledger.nbytes([v.aval for v in new]) + 8 * inputs.key
        named = _joined([*(of(v).name for v in new), *["a key of its own"] * inputs.key])
        used = _joined(of(v).name for v in (*sent, *own) if v not in new and of(v).name != _CONSTANT)
        for v in new:
            of(v).known = True
        if named:
            self._lines.append(f"{pad}     are sent: {named} ({_bytes(size)})")
        if used:
            self._lines.append(f"{pad}     have: {used}")

    def _exchange(self, eqn: Any, of: Any, pad: str) -> None:
        exchange = eqn.params["exchange"]
        rows = eqn.invars[1 + (eqn.primitive is fed.reduce) + eqn.params["lossy"] :]
        seen = "aggregated before anyone sees it" if eqn.primitive is fed.reduce else "seen by the server one by one"
        self._lines.append(
            f'{pad}   {exchange.kind} "{exchange.name}" of {_joined(of(v).name for v in rows)}: each sends '
            f"{exchange.shape} ({_bytes(exchange.reply_bytes)}), {seen}"
        )

    def _loop(self, step: Any, values: dict[Any, _Value], of: Any, depth: int) -> None:
        length, body = step.eqn.params["length"], step.body
        turns = f"{length} times" if length is not None else "a number of times that is drawn"
        self._lines.append(f"{'  ' * depth}   loop, {turns}:")
        given = step.eqn.invars[length is None :]
        fixed, start = given[: len(given) - len(body.outputs)], given[len(given) - len(body.outputs) :]
        made = {v: s.eqn.params["exchange"].name for s in body.steps if "exchange" in _params(s) for v in s.eqn.outvars}
        carried = [made.get(after, of(before).name) for after, before in zip(body.outputs, start, strict=True)]
        inside = [*map(of, fixed), _Value("the turn"), *map(_Value, carried)]
        self.body(body, dict(zip(body.inputs, inside, strict=True)), depth + 2)
        values.update((v, _Value(name)) for v, name in zip(step.eqn.outvars, carried, strict=True))


def _params(step: Any) -> dict[str, Any]:
    return step.eqn.params if hasattr(step, "eqn") else {}


def _joined(labels: Iterable[str]) -> str:
    """The labels, each once; what is made of several names them all."""
    each = dict.fromkeys(part for label in labels for part in label.split(", "))
    for dull in ("constants", "a key", "the cohort", "the weights"):  # what else it was made of says more
        if len(each) > 1 or dull == "constants":
            each.pop(dull, None)
    return ", ".join(each)


def _bytes(size: int) -> str:
    return f"{size} bytes" if size < 1000 else f"{size / 1000:.3g} kB" if size < 10**6 else f"{size / 10**6:.3g} MB"
