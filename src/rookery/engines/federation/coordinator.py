"""The coordinator: it runs the server's part of the plan, and asks the sites for the clients' parts."""

import itertools
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from rookery.base import jaxprs
from rookery.base.printable import printable
from rookery.data.cohort import Draw
from rookery.engines import engine
from rookery.engines.engine import PROGRAMS
from rookery.engines.federation import wire
from rookery.engines.federation.asynchronous import AsynchronousPhase, Pace, first_requests
from rookery.engines.federation.links import Links, Request, SiteError, needed
from rookery.engines.federation.phase import Phase
from rookery.engines.federation.replies import wrong_rounds
from rookery.engines.federation.store import Moment
from rookery.engines.federation.values import Remembered, ServerValue
from rookery.language.ledger import Amounts
from rookery.plan.calls import ServerWork
from rookery.plan.trace import Carry, Given, Made, Plan


class Coordinator:
    """One run's server.

    Attributes:
        sent, received: bytes of arrays that went over the wire.
        lost, wrote, blamed: of the last phase; see `Phase`.
        memory_finite: for each array in the sites' memory, whether it was finite at all sites after the last phase.
    """

    def __init__(self, traced: engine.Traced, run: str, links: Links) -> None:
        self._traced, self.run, self.links = traced, run, links
        self._numbers = itertools.count()
        self._compiled: dict[int, Any] = {}
        self.sent = self.received = 0
        self.lost: set[int] = set()
        self.wrote: set[int] = set()
        self.memory_finite: list[bool] = []
        self.blamed: dict[str, str] = {}
        self._pace = None if traced.job.asynchronous is None else Pace(traced, links)

    def start(self) -> tuple[Made, Amounts]:
        """Run the algorithm's `init`."""
        traced = self._traced
        keys = engine.start_keys(traced.seed, traced.job.clients.n)
        made, amounts = self._phase(traced.start, (0, 0), traced.job.start, keys, traced.noise)
        if self._pace is not None:
            amounts = amounts._replace(exchanges={**amounts.exchanges, **first_requests(traced)}, staleness=0.0)
        return made, amounts

    def round(self, t: int, state: Any, server: Any, noise: Any) -> tuple[Made, Amounts]:
        """Run round t, counted from 0."""
        self.links.rounds = t
        traced, job = self._traced, self._traced.job
        if self._pace is None:
            keys = _round_keys(traced.seed, t, job.clients.n, job.draw, noise)
        else:  # the ids stand for the clients that begin
            key = engine.choice_and_key(traced.seed, t)[1]
            keys = engine.RoundKeys(jnp.arange(job.replies, dtype=jnp.int32), key, key)
        before = traced.round.given.carry
        memory, client = _remembered("memory", before.memory), _remembered("client", before.client)
        return self._phase(traced.round, (1, t), Carry(state, memory, client, server, noise), keys)

    def measure(self, t: int, state: Any) -> dict[str, Any]:
        """Evaluate x, y and the memory at each client after t rounds: rows by name."""
        traced = self._traced
        if self._pace is not None:
            self._pace.arrivals.settle()
        keys = engine.measure_keys(traced.seed, t, traced.job.clients.n)
        memory = _remembered("memory", traced.measure.given.carry.memory)
        made, _ = self._phase(traced.measure, (2, t), Carry((state.x, state.y), memory), keys)
        return made.carry.state

    def _phase(
        self, plan: Plan, moment: Moment, carry: Any, keys: engine.RoundKeys, noise: Any = ()
    ) -> tuple[Made, Amounts]:
        t, ids, weights = np.int32(moment[1]), ServerValue(keys.ids), self._traced.job.clients.weights
        given = Given(carry, self._traced.hyper, t, ids, weights, keys.key, keys.chance, noise, keys.present)
        leaves = jax.tree.leaves(given, is_leaf=lambda v: isinstance(v, Remembered | ServerValue))
        arguments = self._traced, plan, moment, ids, self.run, self.links, self._numbers, self._program
        pace = self._pace if moment[0] == 1 else None
        phase = Phase(*arguments) if pace is None else AsynchronousPhase(pace, *arguments)
        self.blamed = phase.blamed
        consts = [ServerValue(c, constant=i) for i, c in enumerate(plan.consts)]
        inputs = [v if isinstance(v, Remembered | ServerValue) else ServerValue(v) for v in leaves]
        out = phase.visit(plan.body, [*consts, *inputs])
        arrays = [v.array if isinstance(v, ServerValue) else v for v in out]
        made: Made = jax.tree.unflatten(jax.tree.structure(plan.made), arrays)
        phase.finish(made)
        if isinstance(phase, AsynchronousPhase):
            made = made._replace(least=phase.heard)
        self.lost, self.wrote = phase.lost, phase.wrote
        self.sent, self.received = self.sent + phase.sent, self.received + phase.received
        if moment[0] < 2:
            self.memory_finite = [all(leaf) for leaf in zip(*phase.finite, strict=True)]
        return made, phase.amounts(made)

    def _program(self, step: ServerWork) -> Callable[..., list[Any]]:
        """Return the server's equations between two calls, compiled once."""
        jaxpr = step.jaxpr
        if id(jaxpr) not in self._compiled:
            make = lambda: jax.jit(lambda *a: jaxprs.run(jaxpr, *a))
            self._compiled[id(jaxpr)] = PROGRAMS.find(("server", jaxprs.identified(jaxpr)), make)
        return self._compiled[id(jaxpr)]

    def ask_to_save(self, request: dict[str, Any]) -> dict[int, Any] | None:
        """Ask all sites for their checkpoints (see `Site`), and return the rounds that each has saved.

        Returns None if some did not reply and the run has faults.
        """
        links, n = self.links, self._traced.job.clients.n
        number = links.number()
        message = wire.encode({"do": "save", "run": self.run, "number": number, **request}, [])
        lossy = self._traced.job.faults is not None
        patience, links.patience = links.patience, 0.0 if lossy else links.patience
        try:
            replies = links.ask(dict.fromkeys(range(n), Request(number, message)), n if lossy else None, wrong_rounds)
        except SiteError as error:
            raise needed(error) from error
        finally:
            links.patience = patience
        for site, reply in replies.items():
            if "why" in reply.header:
                raise ValueError(f"{links.name(site)}: {printable(reply.header['why'])}")
        rounds = lambda said: range(said["rounds"][0], 10**9) if said["onwards"] and said["rounds"] else said["rounds"]
        return {i: rounds(replies[i].header) for i in range(n)} if len(replies) == n else None

    def close(self, why: str = "") -> None:
        """Tell sites on a network that the run is over, and disconnect them."""
        links = self.links
        if links.opening is not None:
            links.opening, links.patience, links.deadline = None, 0.0, 5.0
            links.tell, links.watch = lambda text: None, lambda links: None  # nobody needs to know that they leave
            number = links.number()
            message = wire.encode({"do": "finish", "number": number, "run": self.run, "why": why}, [])
            there = [i for i in range(self._traced.job.clients.n) if links.records[i].state != "gone"]
            for i in there:  # sites that have refused are told, too
                links.records[i].becomes("connected")
            links.ask({i: Request(number, message) for i in there}, least=0)
        links.transport.close(why)


@partial(jax.jit, static_argnums=(2, 3))
def _round_keys(seed: Any, t: Any, n: int, draw: Draw, noise: Any) -> engine.RoundKeys:
    return engine.round_keys(seed, t, n, draw, noise)


def _remembered(kind: str, value: Any) -> Any:
    """Return the tree with references to what sites remember in place of its leaves."""
    leaves, structure = jax.tree.flatten(value)
    return jax.tree.unflatten(structure, [Remembered(kind, i) for i in range(len(leaves))])
