"""The lock-step engine with all its sites in this process: the proof that an algorithm is honest."""

import uuid
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import jax
import numpy as np

from rookery import convolutions, plan
from rookery.checkpoints import Folder
from rookery.clients import Clients
from rookery.engines import engine
from rookery.engines.engine import Job, Stopped
from rookery.engines.federation.coordinator import Coordinator, LostError, Transport
from rookery.engines.federation.site import Site
from rookery.ledger import Amounts

_WASTE = 4  # all sites are padded to the largest if that takes at most this many times the rows there are


@dataclass(frozen=True)
class Federation:
    """The lock-step engine: a coordinator and a site for each client, which exchange bytes.

    Each site holds its own data and memory only. A run gives the same numbers as in the `Simulation`, up to rounding,
    and the same ledger.

    Arguments:
        transport: transport(sites) -> send(client, request) -> reply, what carries the bytes; `send` raises
            TimeoutError where there is no reply. None: within this process.
        convolutions: as the `Simulation`'s.
    """

    transport: Any = None
    convolutions: str = "auto"

    sees_memory = False

    def __post_init__(self) -> None:
        convolutions.check(self.convolutions, "Federation")

    def open(self, job: Job) -> "Session":
        """A session for this job."""
        return Session(job, self)


class Session:
    """A run with its sites."""

    memory = None  # that of the sites is nobody else's

    def __init__(self, job: Job, federation: Federation) -> None:
        self._traced, self._job = engine.traced(job, False, federation.convolutions), job
        run = uuid.uuid4().hex[:16]
        self.sites = _sites(self._traced, run)
        send: Transport = lambda i, request: self.sites[i].handle(request)
        if federation.transport is not None:
            send = federation.transport(self.sites)
        self.coordinator = Coordinator(self._traced, run, send)
        self.rounds = 0
        self.stopped: Stopped | None = None
        self.warned: Stopped | None = None
        self._carry: Any = None
        remembered = self._traced.start.made.carry
        self.keepers = Keepers(self) if jax.tree.leaves((remembered.memory, remembered.client)) else None

    @cached_property
    def fingerprint(self) -> str:
        """Of the program and its constants."""
        return self._traced.fingerprint

    @property
    def state(self) -> Any:
        """The algorithm's state."""
        return self._carry.state

    def init(self) -> Amounts:
        """See `engine.Session.init`."""
        made, amounts = self.coordinator.start()
        self._carry = made.carry
        self._check(made.carry, -1)
        return amounts

    def advance(self, rounds: int) -> list[Amounts]:
        """See `engine.Session.advance`."""
        done: list[Amounts] = []
        minimum = 0 if self._job.faults is None else self._job.faults.minimum
        for _ in range(rounds):
            made, amounts = self.coordinator.round(self.rounds, self._carry.state, self._carry.server)
            if made.least is not None and int(made.least) < minimum:
                self.stopped = engine.too_few(self.rounds, int(made.least), minimum)
            elif self._check(made.carry, self.rounds):
                self._carry = made.carry
                self.rounds += 1
                done.append(amounts)
                continue
            break
        return done

    def measure(self) -> tuple[dict[str, np.ndarray], np.ndarray]:
        """See `engine.Session.measure`: with faults, a site that can't be reached is left out."""
        found = self.coordinator.measure(self.rounds, self._carry.state)
        replied = ~np.isin(np.arange(self._job.clients.n), list(self.coordinator.lost))
        return {name: np.asarray(rows) for name, rows in found.items()}, replied

    def _check(self, carry: Any, t: int) -> bool:
        """Whether the run goes on: all of the state is finite, and what the sites remember."""
        state = [bool(np.isfinite(np.asarray(leaf, float)).all()) for _, leaf in engine.real_leaves(carry.state)]
        finite = [*state, *self.coordinator.memory_finite]
        if all(finite):
            return True
        memory = self._traced.start.made.carry.memory  # its structure
        found = engine.not_finite(t, engine.where_not_finite(carry._replace(memory=memory), finite))
        if self._job.on_nonfinite == "stop":
            self.stopped = found
            return False
        self.warned = self.warned or found
        return True

    def save(self) -> Any:
        """See `engine.Session.save`: the server's part."""
        return self._carry.state, self._carry.server

    def restore(self, saved: Any, rounds: int) -> None:
        """See `engine.Session.restore`."""
        state, server = saved
        self._carry, self.rounds = plan.Carry(state, None, None, server), rounds

    def close(self) -> None:
        """Give up the sites."""
        for site in self.sites:
            site.close()
        self.sites = []


class Keepers:
    """The sites, which save what they remember at their own disks: see `checkpoints.Keepers`."""

    def __init__(self, session: Session) -> None:
        self._session = session

    def open(self, folder: Path, run: str) -> dict[str, list[int]]:
        """The rounds that each site has saved of this run; sites of this process have them in `folder/sites`."""
        for i, site in enumerate(self._session.sites):
            site.folder = Folder(folder / "sites" / str(i))
        return {f"client {i}": rounds for i, rounds in enumerate(self._ask({"do": "open", "name": run}))}

    def save(self, keep: int | None) -> bool:
        """Have all sites begin to save; False if one can't be reached, and the run has faults."""
        return self._reached({"do": "save", "round": self._session.rounds, "keep": keep})

    def wait(self) -> bool:
        """Until all sites have written; False likewise."""
        return self._reached({"do": "wait"})

    def restore(self, done: int) -> None:
        """Have all sites go on from that round, and delete later ones."""
        self._ask({"do": "restore", "round": done})

    def _ask(self, asked: dict[str, Any]) -> list[list[int]]:
        coordinator = self._session.coordinator
        return [coordinator.ask_to_save(i, asked) for i in range(len(self._session.sites))]

    def _reached(self, asked: dict[str, Any]) -> bool:
        try:
            self._ask(asked)
        except LostError as error:
            if self._session.coordinator.faults is None:
                raise RuntimeError(f"{error}, and the run has no faults=rk.Faults(...).") from error
            return False
        return True


def _sites(traced: engine.Traced, run: str) -> list[Site]:
    """A site for each client; sites whose data have the same shape share a trace, as they would share a program."""
    clients, plans = traced.job.clients, {}
    sites = []
    for i in range(clients.n):
        data = clients.site(i, _padded(clients, i))
        shapes = tuple((a.shape, str(a.dtype)) for a in jax.tree.leaves(data))
        if shapes not in plans:
            plans[shapes] = _traced_by(traced, clients.seen_by_site(data))
        center = clients.at_center() if clients.center_client == i else None
        sites.append(Site(run, plans[shapes], i, data, center))
    return sites


def _traced_by(traced: engine.Traced, shapes: Clients) -> tuple[plan.Plan, ...]:
    """The plans, as a site with data of these shapes traces them."""
    setting = traced.setting._replace(clients=shapes)
    states = plan.channel_states(setting, traced.round) if setting.channel is not None else ((), ())
    start = plan.start_plan(setting, traced.job.start, traced.hyper, states)
    plans = start, plan.round_plan(setting, start.made.carry, traced.hyper)
    measure = traced.job.measure
    return plans if measure is None else (*plans, plan.measure_plan(setting, measure, start.made.carry, traced.hyper))


def _padded(clients: Clients, i: int) -> int:
    """The number of rows that client i's data are padded to, so that sites share programs: the largest's, or if that
    would take too much memory, the next power of four."""
    sources = [source for source in (clients.lower, clients.upper, clients.test) if source is not None]
    rows = max(_WASTE * len(jax.tree.leaves(s.rows)[0]) // clients.n for s in sources)
    widest = max(source.widest for source in sources)
    if widest <= max(rows, 1024):
        return widest
    size, padded = max(int(source.sizes[i]) for source in sources), 64
    while padded < size:
        padded *= 4
    return padded
