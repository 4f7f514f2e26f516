"""Run a job on an engine, collect its complete outcome, and compare two outcomes."""

from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from rookery.engines.engine import Engine, Job
from rookery.language.ledger import Ledger


class TooFewRepliesError(AssertionError):
    """A round failed because too many replies were lost; another seed may work."""


@dataclass(frozen=True)
class Outcome:
    """The complete outcome of a run.

    Attributes:
        state: the method's state.
        memory: for each client, the leaves of its memory and of its channel's state.
        server: the channel's state at the server; None for a federation.
        counts: the ledger's totals.
        exchanges: the ledger's entries for the last round.
        each_round: the number of exchanges in each round.
        work: the gradients computed by all clients in each round.
        sent, received: the bytes of arrays measured by the coordinator; None in the simulation.
    """

    state: Any
    memory: list[list[Any]]
    server: Any
    counts: dict[str, int]
    exchanges: list[dict[str, Any]]
    each_round: list[int]
    work: list[int]
    sent: int | None
    received: int | None


def outcome(engine: Engine, job: Job, rounds: int = 2, responders: Any = None) -> Outcome:
    """Run a job; `responders` are the sites', if they are not the engine's own."""
    session: Any = engine.open(job)
    ledger = Ledger()
    ledger.add([session.init()], job.clients.n)
    before = ledger.counts["gradients"]
    costs = session.advance(rounds)
    if session.stopped is not None:
        kind = TooFewRepliesError if session.stopped.failed else AssertionError
        raise kind(f"the run stopped: {session.stopped.reason} Smaller steps may help.")
    work = []
    for cost in costs:
        ledger.add([cost], job.cohort)
        work.append(ledger.counts["gradients"] - before)
        before = ledger.counts["gradients"]
    each_round = [sum(entry.count for entry in cost.exchanges.values()) for cost in costs]
    wire = getattr(session, "coordinator", None)
    sent, received = (None, None) if wire is None else (wire.sent, wire.received)
    state = jax.tree.map(np.array, session.state)
    memory, server = _memory(session, job.clients.n, responders)
    return Outcome(state, memory, server, ledger.counts, ledger.last, each_round, work, sent, received)


def _memory(session: Any, n: int, responders: Any) -> tuple[list[list[Any]], Any]:
    if hasattr(session, "sites"):
        sites = session.sites if responders is None else [responder._site for responder in responders]
        saved: Any = [site.memory.after(session.rounds) for site in sites]
        return [[np.array(leaf) for leaf in (*site["memory"], *site["client"])] for site in saved], None
    carry = session.save()
    leaves: Any = [getattr(leaf, "array", leaf) for leaf in jax.tree.leaves((carry.memory, carry.client))]
    return [[np.array(leaf[i]) for leaf in leaves] for i in range(n)], jax.tree.map(np.array, carry.server)


def difference(a: Any, b: Any, tolerance: float = 1e-10, types: bool = False) -> str:
    """Say in one line where two trees of arrays differ most; empty if they agree within the tolerance.

    With `types`, the arrays' types must agree, too.
    """
    structures: Any = jax.tree.structure(a), jax.tree.structure(b)
    if structures[0] != structures[1]:
        return f"the structure is {structures[0]} in one and {structures[1]} in the other"
    worst, said = 0.0, ""
    for (path, left), right in zip(jax.tree_util.tree_leaves_with_path(a), jax.tree.leaves(b), strict=True):
        left, right = np.asarray(left), np.asarray(right)
        name = jax.tree_util.keystr(path).removeprefix(".") or "the value"
        if left.shape != right.shape:
            return f"{name} has the shape {left.shape} in one and {right.shape} in the other"
        if types and left.dtype != right.dtype:
            return f"{name} is {left.dtype} in one and {right.dtype} in the other"
        if not np.issubdtype(left.dtype, np.number):
            if not np.array_equal(left, right):
                return f"{name} differs"
            continue
        if np.allclose(left, right, rtol=tolerance, atol=tolerance, equal_nan=True):
            continue
        gap = np.abs(left - right)
        most = float(np.max(np.where(np.isfinite(gap), gap, np.inf)))
        if most > worst:
            at = np.unravel_index(np.argmax(gap), gap.shape) if gap.ndim else ()
            place = f"[{', '.join(map(str, at))}]" if at else ""
            worst, said = most, f"{name}{place} is {left[at]:.12g} in one and {right[at]:.12g} in the other"
    return said


def close(a: Any, b: Any, tolerance: float = 1e-10) -> None:
    """Raise AssertionError unless both trees have the same structure and numbers."""
    gap = difference(a, b, tolerance)
    assert not gap, gap


def disagreement(here: Outcome, there: Outcome, tolerance: float = 1e-10) -> str:
    """Say in one line how two outcomes differ, at the server, at a client or in the ledger; empty if they agree."""
    said = difference(here.state, there.state, tolerance, types=True)
    if said:
        return f"state: {said}"
    for i, (left, right) in enumerate(zip(here.memory, there.memory, strict=True)):
        said = difference(left, right, tolerance, types=True)
        if said:
            return f"client {i}'s memory: {said}"
    for name, count in here.counts.items():
        if count != there.counts[name]:
            return f"ledger: {name} is {count} in one and {there.counts[name]} in the other"
    if here.exchanges != there.exchanges or here.each_round != there.each_round:
        return f"ledger: the exchanges are {here.exchanges} in one and {there.exchanges} in the other"
    return ""


def agree(here: Outcome, there: Outcome, tolerance: float = 1e-10) -> None:
    """Raise AssertionError unless server, clients and ledger have the same numbers."""
    gap = disagreement(here, there, tolerance)
    assert not gap, gap
