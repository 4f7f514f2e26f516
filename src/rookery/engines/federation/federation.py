"""The lock-step engine: a coordinator that asks, and sites that answer, in this process or over a network."""

import logging
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax

from rookery.base import convolutions
from rookery.base.arguments import check_amounts, check_positive
from rookery.data.clients import Clients
from rookery.engines import engine
from rookery.engines.engine import Job
from rookery.engines.federation import meeting
from rookery.engines.federation.agreement import declared
from rookery.engines.federation.coordinator import Coordinator
from rookery.engines.federation.links import Links
from rookery.engines.federation.session import Session
from rookery.engines.federation.site import Site
from rookery.engines.federation.transports.memory import Memory, in_process
from rookery.plan import trace as plan

_WASTE = 4  # all sites are padded to the largest if that takes at most this many times the rows there are


@dataclass(frozen=True)
class Federation:
    """A coordinator and a site for each client, which exchange bytes.

    Each site holds its own data and memory only. A run gives the same numbers as in the `Simulation`, up to rounding,
    and the same ledger. Without an address all sites are in this process. With one this process is the coordinator, and
    sites join it over the network: see `rookery site`. It needs no data then, only what a sample looks like:
    `rk.Clients.like`.

    Arguments:
        address: "host:port" to listen at; None: where the kit says, or if there is none, all sites are in this process.
        sites: their names. A client's number is its site's place among them.
        kit: the coordinator's folder of certificates, made by `rookery federation init`; it has the sites' names, too.
        insecure: without certificates, on this machine alone: who connects is who it says it is.
        deadline: the seconds that a site has for a reply. With `faults`, a site that is later is left out of that mean.
        patience: the seconds to wait for sites without which the run can't go on: fewer than `faults.minimum`, or
            without `faults` any of them. None: until they are back.
        tell: tell(text), told what happens to sites; None: it goes to the log "rookery".
        watch: watch(links), called whenever something happened to sites, and after every exchange.
        transport: another way of carrying messages: an object like those in `rookery.engines.federation.transports`;
            or, with the sites in this process, transport(sites) -> send(client, request) -> reply, where `send` raises
            TimeoutError where there is no reply.
        study: functions or modules whose source all must have the same, beside those that the problem is made of.
        allow_other_study: whether a run begins though a site's study declares something else; it is told.
        convolutions: as the `Simulation`'s.
    """

    address: str | None = None
    sites: Sequence[str] = ()
    kit: str | Path | None = None
    insecure: bool = False
    deadline: float = 300.0
    patience: float | None = None
    tell: Callable[[str], None] | None = None
    watch: Callable[[Links], None] | None = None
    transport: Any = None
    study: Any = None
    allow_other_study: bool = False
    convolutions: str = "auto"

    sees_memory = False

    def __post_init__(self) -> None:
        convolutions.check(self.convolutions, "Federation")
        if self.address is None and self.kit is None:
            given = [name for name in ("sites", "insecure") if getattr(self, name)]
            if given and self.transport is None:
                raise ValueError(f"Federation: {given[0]} is for sites on a network: give an address, as host:port.")
        if not isinstance(self.address, str | None):
            raise TypeError(f"Federation: address={self.address!r} is no text; give host:port.")
        check_positive(deadline=self.deadline)
        if self.patience is not None:
            check_amounts(patience=self.patience)

    def open(self, job: Job) -> "Session":
        """A session for this job."""
        if self.address is None and self.kit is None and not hasattr(self.transport, "receive"):
            if not job.clients.held:
                raise ValueError("rk.Clients.like holds no data, sites on a network do: give an address, or a kit.")
            return _within_this_process(job, self)
        if job.clients.held:
            raise ValueError(
                "A Federation over a network leaves the data where they are: give clients=rk.Clients.like(...), what a "
                "sample looks like."
            )
        if job.noise_seed is not None and not isinstance(self.transport, Memory):
            raise ValueError(
                "noise_seed is for simulations: noise that comes from a seed can be drawn again. Leave it out over a "
                "network."
            )
        transport = self.transport
        if transport is None:
            from rookery.engines.federation.transports.grpc import GrpcServer

            transport = GrpcServer(self.address, self.sites, self.kit, self.insecure)
        if len(transport.names) != job.clients.n:
            transport.close()
            raise ValueError(f"There are {job.clients.n} clients and {len(transport.names)} sites; give as many.")
        tell = self.tell or logging.getLogger("rookery").warning
        links = Links(transport, self.deadline, self.patience, finite=True, tell=tell)
        links.watch = self.watch or links.watch
        try:
            study = declared(self.study, job.problem, job.measure)
            return meeting.meet(job, links, self.convolutions, study, self.allow_other_study)
        except BaseException as error:
            transport.close(
                str(error) if isinstance(error, ValueError | RuntimeError) else "the coordinator has failed"
            )
            raise


def _within_this_process(job: Job, federation: Federation) -> "Session":
    traced = engine.traced(job, False, federation.convolutions)
    run = uuid.uuid4().hex[:16]
    sites = _sites(traced, run)
    return Session(traced, Coordinator(traced, run, Links(in_process(sites, federation.transport))), sites)


def _sites(traced: engine.Traced, run: str) -> list[Site]:
    """A site for each client; sites whose data have the same shape share a trace, as they would share a program."""
    clients, plans = traced.job.clients, {}
    sites = []
    for i in range(clients.n):
        data = clients.site(i, _padded(clients, i))
        shapes = tuple((a.shape, str(a.dtype)) for a in jax.tree.leaves(data))
        if shapes not in plans:
            plans[shapes] = _traced_by(traced, clients.site_shapes(data))
        center = clients.at_center() if clients.center_client == i else None
        sites.append(Site(run, plans[shapes], i, data, center))
    return sites


def _traced_by(traced: engine.Traced, shapes: Clients) -> tuple[plan.Plan, ...]:
    """The plans, as a site with data of these shapes traces them."""
    return plan.plans(traced.setting._replace(clients=shapes), traced.job.start, traced.hyper, traced.job.measure)


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
