"""A plan in words: every exchange of a round, what clients are sent, what they keep, and what they send."""

from collections.abc import Iterable
from typing import Any

import jax
from jax.extend.core import Literal, Var

from rookery import fed, ledger


def in_words(plan: Any) -> str:
    """The plan, line by line."""
    given = plan.given
    lines = [f"{plan.title}, {given.ids.shape[0]} of {given.weights.shape[0]} clients"]
    labels = dict(zip(plan.body.inputs, [*["constants"] * len(plan.consts), *_input_names(given)], strict=True))
    _Words(lines).body(plan.body, labels, 1)
    return "\n".join(lines)


def _input_names(given: Any) -> list[str]:
    names = []
    for path, _ in jax.tree_util.tree_leaves_with_path(given):
        at = [getattr(p, "name", getattr(p, "key", getattr(p, "idx", None))) for p in path]
        if at[0] == "carry":
            names.append({"state": str(at[2]) if len(at) > 2 else "x"}.get(str(at[1]), "its memory"))
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

    def body(self, body: Any, labels: dict[Any, str], depth: int) -> None:
        pad = "  " * depth

        def label(v: Any) -> str:
            return "constants" if isinstance(v, Literal) else labels[v]

        for step in body.steps:
            if not hasattr(step, "eqn"):
                made = _joined(label(v) for v in step.inputs)
                labels.update((v, made) for v in step.outputs)
                continue
            eqn, params = step.eqn, step.eqn.params
            if eqn.primitive is fed.client_map:
                self._maps += 1
                inputs, mark = params["inputs"], f"#{self._maps}"
                self._lines.append(f"{pad}{mark} clients at {params['source']}")
                self._function(eqn.invars[1:], inputs, label, pad)
                self._lines.append(
                    f"{pad}     keep: {ledger.shape_of([v.aval for v in params['work'].outvars[:-1]]) or 'nothing'}"
                )
                labels.update((v, mark) for v in eqn.outvars)
            elif eqn.primitive is fed.scatter:
                self._lines.append(f"{pad}   scatter: each client is sent its own row of {label(eqn.invars[1])}")
                labels.update((v, "what it was sent") for v in eqn.outvars)
            elif eqn.primitive is fed.center:
                holder = "the server" if params["holder"] is None else f"client {params['holder']}"
                self._lines.append(
                    f"{pad}   center {params['exchange'].name!r} at {params['source']}, held by {holder}"
                )
                self._function(eqn.invars, params["inputs"], label, pad)
                labels.update((v, params["exchange"].name) for v in eqn.outvars)
            elif eqn.primitive is fed.loop:
                self._loop(step, labels, label, depth)
            else:
                self._exchange(eqn, label, pad)
                labels.update((v, params["exchange"].name) for v in eqn.outvars)

    def _function(self, given: Any, inputs: Any, label: Any, pad: str) -> None:
        sent, own = given[: inputs.sent], given[inputs.sent + inputs.key :]
        values = [v for v in dict.fromkeys(sent) if isinstance(v, Var) and label(v) != "constants"]
        size = ledger.nbytes([v.aval for v in values]) + 8 * inputs.key
        named = _joined([*(label(v) for v in values), *["a key of its own"] * inputs.key])
        if named:
            self._lines.append(f"{pad}     are sent: {named} ({_bytes(size)})")
        if own:
            self._lines.append(f"{pad}     use: {_joined(label(v) for v in own)}")

    def _exchange(self, eqn: Any, label: Any, pad: str) -> None:
        exchange = eqn.params["exchange"]
        rows = eqn.invars[1 + (eqn.primitive is fed.reduce) + eqn.params["lossy"] :]
        seen = "aggregated before anyone sees it" if eqn.primitive is fed.reduce else "seen by the server one by one"
        self._lines.append(
            f'{pad}   {exchange.kind} "{exchange.name}" of {_joined(label(v) for v in rows)}: each sends '
            f"{exchange.shape} ({_bytes(exchange.reply_bytes)}), {seen}"
        )

    def _loop(self, step: Any, labels: dict[Any, str], label: Any, depth: int) -> None:
        assert step.body is not None
        length = step.eqn.params["length"]
        turns = f"{length} times" if length is not None else "a number of times that is drawn"
        self._lines.append(f"{'  ' * depth}   loop, {turns}:")
        given = step.eqn.invars[length is None :]
        carried = len(step.eqn.outvars)
        names = [label(v) for v in given]
        inner = [*names[: len(given) - carried], "the turn", *names[len(given) - carried :]]
        self.body(step.body, dict(zip(step.body.inputs, inner, strict=True)), depth + 2)
        labels.update(zip(step.eqn.outvars, names[len(given) - carried :], strict=True))


def _joined(labels: Iterable[str]) -> str:
    """The labels, each once; what is made of several names them all."""
    each = dict.fromkeys(part for label in labels for part in label.split(", "))
    for dull in ("constants", "a key", "the cohort", "the weights"):  # what else it was made of says more
        if len(each) > 1 or dull == "constants":
            each.pop(dull, None)
    return ", ".join(each)


def _bytes(size: int) -> str:
    return f"{size} bytes" if size < 1000 else f"{size / 1000:.3g} kB" if size < 10**6 else f"{size / 10**6:.3g} MB"
