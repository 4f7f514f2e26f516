"""What a client's part of a plan must at least compute and move, counted in its jaxpr.

A product, a gather, a reduction or a sort reads its operands and writes its result once. What is computed entry by
entry costs nothing where it is read once, and otherwise one reading of what it depends on and one writing. What all
clients share (the server's iterate) is read once for all of them, so it counts nothing. A loop counts its body as often
as it turns, a loop of unknown length (the slowest client's) as often as is said.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
from jax.extend.core import Jaxpr, Literal

from rookery import fed, jaxprs, ledger
from rookery.engines.room import _FUSED as ENTRY_BY_ENTRY
from rookery.plan import Body, Call

VIEWS = {"reshape", "squeeze", "expand_dims", "broadcast_in_dim", "iota", "copy"}
CALLS = ("jaxpr", "call_jaxpr", "fun_jaxpr")


@dataclass
class Cost:
    """Floating-point operations of products, and bytes moved."""

    flops: float = 0.0
    moved: float = 0.0

    def add(self, other: "Cost", times: float = 1.0) -> None:
        """Add `times` times the other."""
        self.flops += times * other.flops
        self.moved += times * other.moved


def of_client(body: Body, axes: list[Any], turns: float) -> Cost:
    """One client's in a round."""
    total = Cost()
    for step in body.steps:
        if not isinstance(step, Call):
            continue
        if step.body is not None:
            length = step.eqn.params["length"]
            total.add(of_client(step.body, axes, turns), turns if length is None else length)
        elif step.eqn.primitive is fed.client_map:
            work, inputs = step.eqn.params["work"], step.eqn.params["inputs"]
            own = [False] * inputs.sent + [True] * (len(work.invars) - inputs.sent)
            total.add(_of(work, own, turns)[0])
    return total


def _of(jaxpr: Jaxpr, own: list[bool], turns: float) -> tuple[Cost, list[bool]]:
    """The cost, of inputs of which some are the client's own; and which of the outputs are."""
    cost = Cost()
    is_own = dict(zip(jaxpr.invars, own, strict=True))
    mine = lambda v: not isinstance(v, Literal) and is_own.get(v, False)
    readers: dict[Any, int] = {}
    for eqn in jaxpr.eqns:
        for v in eqn.invars:
            if not isinstance(v, Literal):
                readers[v] = readers.get(v, 0) + 1
    for v in jaxpr.outvars:
        if not isinstance(v, Literal):
            readers[v] = readers.get(v, 0) + 2  # it is written
    sources: dict[Any, frozenset[Any]] = {}  # what a fused value is computed from
    read = lambda v: sources.get(v, frozenset([v])) if mine(v) else frozenset()
    size = lambda values: ledger.nbytes([v.aval for v in values])
    for eqn in jaxpr.eqns:
        name, inner = eqn.primitive.name, jaxprs.within(eqn.params)
        given = [mine(v) for v in eqn.invars]
        if not any(given):
            is_own |= dict.fromkeys(eqn.outvars, False)
            continue
        is_own |= dict.fromkeys(eqn.outvars, True)
        if name == "scan":
            held, carried = eqn.params["num_consts"], eqn.params["num_carry"]
            for _ in range(2):  # what the loop makes its own
                one, out = _of(inner[0], given, turns)
                given[held : held + carried] = [a or b for a, b in zip(given[held:], out[:carried], strict=False)]
            cost.add(one, eqn.params["length"])
        elif name == "while":
            fixed = eqn.params["cond_nconsts"]
            for _ in range(2):
                one, out = _of(eqn.params["body_jaxpr"].jaxpr, given[fixed:], turns)
                start = fixed + eqn.params["body_nconsts"]
                given[start:] = [a or b for a, b in zip(given[start:], out, strict=True)]
            cost.add(one, turns)
        elif name == "cond":
            branches = [_of(each, given[1:], turns)[0] for each in inner]
            cost.add(max(branches, key=lambda c: c.moved))
        elif inner and all(len(each.invars) == len(given) for each in inner[:1]):
            one, out = _of(inner[0], given, turns)
            cost.add(one)
            is_own |= dict(zip(eqn.outvars, out, strict=False))
        elif name in ENTRY_BY_ENTRY or name in VIEWS or "random" in name or "threefry" in name:
            needs = frozenset().union(*map(read, eqn.invars))
            (out, *_) = eqn.outvars
            if readers.get(out, 0) <= 1 or name in VIEWS:
                sources[out] = needs
            else:
                cost.moved += size(needs) + size([out])
        else:
            needs = frozenset().union(*map(read, eqn.invars))
            if name in ("gather", "dynamic_slice"):  # of the table only what is taken
                needs = frozenset().union(*map(read, eqn.invars[1:]))
                cost.moved += size(eqn.outvars)
            cost.moved += size(needs) + size(eqn.outvars)
            if name == "dot_general":
                (contracted, _), _ = eqn.params["dimension_numbers"]
                deep = np.prod([eqn.invars[0].aval.shape[d] for d in contracted])
                cost.flops += 2 * float(deep * np.prod(eqn.outvars[0].aval.shape))
    return cost, [mine(v) for v in jaxpr.outvars]
