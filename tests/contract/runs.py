"""A run on an engine, with all that it leaves behind; and how two of them are compared."""

from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from rookery.engines.engine import Engine, Job
from rookery.ledger import Ledger


@dataclass(frozen=True)
class Outcome:
    """What a run leaves behind.

    Attributes:
        state: the algorithm's.
        memory: for each client the leaves of what it remembers, and of what its side of the channel does.
        counts, exchanges: the ledger's; of the last round.
        each_round: exchanges, round by round.
        sent, received: bytes of arrays as the coordinator measured them; None in the simulation.
    """

    state: Any
    memory: list[list[Any]]
    counts: dict[str, int]
    exchanges: list[dict[str, Any]]
    each_round: list[int]
    sent: int | None
    received: int | None


def outcome(engine: Engine, job: Job, rounds: int = 2, hosts: Any = None) -> Outcome:
    """Run a job; `hosts` are those of the sites, where they are not the engine's own."""
    session: Any = engine.open(job)
    ledger = Ledger()
    ledger.add([session.init()], job.clients.n)
    costs = session.advance(rounds)
    assert session.stopped is None, session.stopped
    ledger.add(costs, job.cohort)
    each_round = [sum(entry.count for entry in cost.exchanges.values()) for cost in costs]
    wire = getattr(session, "coordinator", None)
    sent, received = (None, None) if wire is None else (wire.sent, wire.received)
    state = jax.tree.map(np.array, session.state)
    return Outcome(
        state, _memory(session, job.clients.n, hosts), ledger.counts, ledger.last, each_round, sent, received
    )


def _memory(session: Any, n: int, hosts: Any) -> list[list[Any]]:
    if hasattr(session, "sites"):
        sites = session.sites if hosts is None else [host._site for host in hosts]
        each = [site.remembered(session.rounds) for site in sites]
        return [[np.array(leaf) for leaf in (*own["memory"], *own["client"])] for own in each]
    carry = session.save()
    leaves = [getattr(leaf, "array", leaf) for leaf in jax.tree.leaves((carry.memory, carry.client))]
    return [[np.array(leaf[i]) for leaf in leaves] for i in range(n)]


def close(a: Any, b: Any, tolerance: float = 1e-10) -> None:
    """Both have the same structure and the same numbers."""
    assert jax.tree.structure(a) == jax.tree.structure(b)
    for left, right in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        np.testing.assert_allclose(np.asarray(left), np.asarray(right), rtol=tolerance, atol=tolerance)


def agree(here: Outcome, there: Outcome, tolerance: float = 1e-10) -> None:
    """The same numbers at the server and at every client, and the same ledger."""
    close(here.state, there.state, tolerance)
    close(here.memory, there.memory, tolerance)
    assert here.counts == there.counts
    assert here.exchanges == there.exchanges
    assert here.each_round == there.each_round
