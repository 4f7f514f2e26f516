"""Whether the rounds of a plan can be asynchronous: decided from what the plan does."""

from collections.abc import Sequence

import jax

from rookery.base import jaxprs
from rookery.base.compat import Literal
from rookery.language.asynchronous import Asynchronous
from rookery.plan import calls
from rookery.plan.calls import Read, Visitor
from rookery.plan.trace import Plan

Tags = frozenset[str]
_COHORT, _RESULT, _MEMORY, _KEY, _DRAWN = "the cohort", "the result", "memory", "the key", "drawn numbers"
_NOTHING: Tags = frozenset()


def check(plan: Plan, how: Asynchronous) -> None:
    """Raise ValueError, with the reason, if the rounds of this plan can't be asynchronous.

    They can if clients reply once, using only what they were sent at the beginning, and if the server uses their
    replies only through one mean or sum.
    """
    name, counts_alike = plan.title.partition(".")[0], how.staleness == 0 and how.oldest is None
    reason, mirrors = _reason(plan)
    if reason is not None:
        raise ValueError(
            f"asynchronous must be None for {name} here: {reason}. Leave it out, or choose another method."
        )
    if mirrors and not counts_alike:
        raise ValueError(
            f"asynchronous: all replies must count alike for {name}, whose clients send what they remember, or how it "
            f"has changed; got {how!r}. Give staleness=0, and leave out oldest."
        )


def _reason(plan: Plan) -> tuple[str | None, bool]:
    """Why rounds can't be asynchronous, or None; and whether clients send values, other than differences, that depend
    on what they remember."""
    exchanges = [call for call in plan.body.calls if _is_exchange(call)]
    if len(exchanges) != 1 or plan.body.of(calls.LoopCall):
        names = ", ".join(dict.fromkeys(f'"{call.exchange.name}"' for call in exchanges))  # type: ignore[attr-defined]
        has = f"those named {names}" if names else "none"
        return f"a round must have one exchange, so that nobody is waited for in the middle of it; it has {has}", False
    (exchange,) = exchanges
    if isinstance(exchange, calls.CenterCall):
        return f'one client holds the data of the centre, and only it replies to "{exchange.exchange.name}"', False
    if isinstance(exchange, calls.GatherCall):
        return f'the server needs every reply to "{exchange.exchange.name}" by itself, from one cohort', False
    assert isinstance(exchange, calls.ReduceCall)
    if exchange.exchange.secure:
        return "a secure sum needs clients that reply to the same request", False
    dependence, known = _Dependence(plan), {plan.inputs.ids: _COHORT, plan.inputs.key: _KEY}
    known |= dict.fromkeys(jax.tree.leaves(plan.inputs.carry.memory), _MEMORY)
    outputs = dependence.visit(plan.body, [frozenset({known[v]} if v in known else ()) for v in plan.body.inputs])
    made = jax.tree.unflatten(jax.tree.structure(plan.made), outputs)
    is_tags = lambda value: isinstance(value, frozenset)
    server = jax.tree.leaves((made.carry.state, made.carry.server), is_leaf=is_tags)
    if dependence.reason is None and any(_COHORT in tags for tags in server):
        dependence.reason = "the server's state depends on which clients are asked, and the replies come from others"
    if dependence.reason is None and dependence.sends_drawn and any(_DRAWN in tags for tags in server):
        dependence.reason = (
            "the server draws numbers, sends them, and uses them again with the replies, and late replies belong to "
            "the numbers of an earlier round"
        )
    return dependence.reason, dependence.mirrors


def _is_exchange(call: calls.Call) -> bool:
    return isinstance(call, calls.ExchangeCall) or (isinstance(call, calls.CenterCall) and call.holder is not None)


class _Dependence(Visitor[Tags]):
    """Follows which values depend on the result of the exchange, and which other ones on the cohort or on the key."""

    def __init__(self, plan: Plan) -> None:
        self._ids = plan.inputs.ids
        self.reason: str | None = None
        self.mirrors = self.sends_drawn = False

    def literal(self, literal: Literal) -> Tags:
        return _NOTHING

    def server(self, step: calls.ServerWork, read: Read) -> list[Tags]:
        tags = dict(zip(step.jaxpr.invars, read(step.operands), strict=True))
        joined = {v: _joined([tags[u] for u in used]) for v, used in jaxprs.dependencies(step.jaxpr).items()}
        drawn = lambda v: _KEY in joined[v] and not jaxprs.is_key(v.aval)
        return [tags - {_KEY} | {_DRAWN} if drawn(v) else tags for v, tags in joined.items()]

    def map(self, call: calls.MapCall, read: Read) -> list[Tags]:
        self._check_cohort(call)
        self._check_sent(read(call.sent))
        if _RESULT in _joined([*read(call.sent), *([] if call.key is None else [read(call.key)])]):
            self.reason = f"its clients need the result of the exchange in the same round, at {call.source}"
        remembered = dict(
            zip(call.work.invars[len(call.work.invars) - len(call.local) :], read(call.local), strict=True)
        )
        used = jaxprs.dependencies(call.work)
        outputs = [[] if isinstance(v, Literal) else used[v] for v in call.work.outvars[:-1]]
        return [_joined([remembered.get(v, _NOTHING) for v in variables]) for variables in outputs]

    def scatter(self, call: calls.ScatterCall, read: Read) -> list[Tags]:
        self._check_cohort(call)
        self._check_sent([read(call.rows)])
        if _RESULT in read(call.rows):
            self.reason = "its clients need the result of the exchange in the same round"
        return [_NOTHING]

    def reduce(self, call: calls.ReduceCall, read: Read) -> list[Tags]:
        self._check_cohort(call)
        assert call.asynchronous is not None
        rows = read(call.rows)
        rows = rows if call.unpack is None else [_joined(rows)] * len(call.asynchronous)
        values = [tags for tags, is_move in zip(rows, call.asynchronous, strict=True) if not is_move]
        self.mirrors = _MEMORY in _joined(values)
        return [frozenset({_RESULT}) for _ in call.outputs]

    def center(self, call: calls.CenterCall, read: Read) -> list[Tags]:
        return [_joined(read(call.operands)) for _ in call.outputs]

    def _check_sent(self, sent: Sequence[Tags]) -> None:
        self.sends_drawn |= not _joined(sent).isdisjoint({_KEY, _DRAWN})

    def _check_cohort(self, call: calls.MapCall | calls.ScatterCall | calls.ReduceCall) -> None:
        if call.ids is not self._ids:
            self.reason = "it asks another cohort in the middle of a round"


def _joined(tags: Sequence[Tags]) -> Tags:
    return _NOTHING.union(*tags)
