"""The lock-step engine: a coordinator that asks and sites that answer, in this process or over a network."""

import importlib.util
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
from rookery.engines.federation.asynchronous import check_job
from rookery.engines.federation.coordinator import Coordinator
from rookery.engines.federation.entropy import Entropy
from rookery.engines.federation.heads import Notary
from rookery.engines.federation.links import Links
from rookery.engines.federation.session import Session
from rookery.engines.federation.site import Noise, Site
from rookery.engines.federation.transports.memory import Memory, in_process
from rookery.language import channel as channels
from rookery.language.channel import is_private_for_records
from rookery.plan import trace as plan

_WASTE = 4  # sites are padded to the largest if that takes at most this many times the actual rows


@dataclass(frozen=True)
class Federation:
    """A coordinator and a site for each client, which exchange bytes.

    Each site holds only its own data and memory. A run gives the same numbers as in a `Simulation`, up to rounding, and
    the same ledger. Without an address all sites are in this process. With an address this process is the coordinator,
    and sites join it over the network: see `rookery site`. It then needs no data, only the form of a sample:
    `rk.Clients.like`.

    Arguments:
        address: "host:port" to listen at; None: the kit's, or without a kit, all sites are in this process.
        sites: their names. A client's number is its site's place among them.
        kit: the coordinator's folder of certificates, made by `rookery federation init`; it also has the sites' names.
        insecure: run without certificates, on this machine only. Names are not checked.
        deadline: the seconds that a site has for a reply. With `faults`, a site that takes longer is left out of that
            mean.
        patience: the seconds to wait if too few sites are connected for the run to continue: fewer than
            `faults.minimum` or, without `faults`, fewer than all (in an asynchronous run, than `buffer`). None: until
            they are back.
        tell: tell(text), called with a line about each event at a site; None: the lines go to the log "rookery".
        watch: watch(links), called after each event at a site, and after every exchange.
        transport: another way of carrying messages: a `Transport` (see `rookery.engines.federation.transports`); or,
            with the sites in this process, transport(sites) -> send(client, request) -> reply, where `send` raises
            TimeoutError if there is no reply.
        study: functions or modules, in addition to the problem's, whose source must be the same at all participants.
        allow_other_study: begin even if a site's study declares something else, and report it.
        heads: a file to append the heads of sites' audit logs to, after every round; None: they are countersigned, and
            not kept. See `rookery audit`.
        convolutions: as in `Simulation`.
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
    heads: str | Path | None = None
    convolutions: str = "auto"

    sees_memory = False

    def __post_init__(self) -> None:
        convolutions.check(self.convolutions, "Federation")
        if self.address is None and self.kit is None:
            network_only = [name for name in ("sites", "insecure") if getattr(self, name)]
            if network_only and self.transport is None:
                name = network_only[0]
                raise ValueError(
                    f"Federation: {name} must be left out for sites in this process; got {getattr(self, name)!r}. For "
                    "sites on a network, give an address, host:port."
                )
        if not isinstance(self.address, str | None):
            raise TypeError(f"Federation: address must be a text such as 'localhost:9443'; got {self.address!r}.")
        check_positive(deadline=self.deadline)
        if self.patience is not None:
            check_amounts(patience=self.patience)

        _check_transport(self.transport)

    def open(self, job: Job) -> "Session":
        """Open a session for this job."""
        if job.clock is not None:
            raise ValueError(
                "clock must be None with rk.Federation, where `seconds` in the history are real; got rk.Clock(...). "
                "For simulated seconds, use rk.Simulation."
            )
        check_job(job)
        if self.address is None and self.kit is None and not hasattr(self.transport, "receive"):
            if not job.clients.held:
                raise ValueError(
                    "clients must hold data for sites in this process; got the clients of rk.Clients.like. For sites "
                    "on a network, give an address, or a kit."
                )
            return _within_this_process(job, self)
        if job.clients.held:
            raise ValueError(
                "clients must be rk.Clients.like(...), which describes a sample, if sites on a network have the data; "
                "got clients with data."
            )
        attack = None if job.faults is None else job.faults.attack
        if attack is not None and not attack.alone:
            raise ValueError(
                "faults: attack must be one that a site can make by itself, in all rounds, for sites on a network; got "
                f"{attack!r}. Give e.g. rk.attacks.SignFlip(2), or try it in a simulation."
            )
        own_noise = is_private_for_records(job.channel) or not isinstance(self.transport, Memory)
        if job.noise_seed is not None and own_noise:
            raise ValueError(
                "noise_seed must be None over a network, because noise from a seed can be drawn again; got "
                f"{job.noise_seed}. Leave it out."
            )
        if channels.sums_securely(job.channel):
            if not getattr(self.transport, "secure_sums", True):
                raise ValueError(
                    "rk.secure_sum needs sites that sign keys with the federation's certificates, and sites of NVIDIA "
                    "FLARE do not. Use gRPC, or leave out rk.secure_sum."
                )
            _check_cryptography()
        transport = self.transport
        if transport is None:
            from rookery.engines.federation.transports.grpc import GrpcServer

            transport = GrpcServer(self.address, self.sites, self.kit, self.insecure)
        if len(transport.names) != job.clients.n:
            transport.close()
            raise ValueError(
                f"clients must be as many as the sites, {len(transport.names)}; got {job.clients.n}. Give "
                f"rk.Clients.like(..., n={len(transport.names)}), or the names of all sites."
            )
        tell = self.tell or logging.getLogger("rookery").warning
        links = Links(transport, self.deadline, self.patience, finite=True, tell=tell)
        links.watch = self.watch or links.watch
        signs = getattr(transport, "kit", None) is not None
        links.notary = Notary(self.heads, transport if signs else None, tell)
        try:
            study = declared(self.study, job.problem, job.measure)
            return meeting.meet(job, links, self.convolutions, study, self.allow_other_study)
        except BaseException as error:
            transport.close(
                str(error) if isinstance(error, ValueError | RuntimeError) else "the coordinator has failed"
            )
            raise


_PARTS = ("names", "rejoins", "send", "receive", "dismiss", "close")  # of a `Transport`


def _check_transport(transport: Any) -> None:
    """Raise TypeError if a transport lacks a method. A function is accepted, too: it is for sites in this process."""
    if isinstance(transport, type) and hasattr(transport, "receive"):
        name = transport.__name__
        raise TypeError(f"Federation: transport must be an object; got the class {name}. Give {name}(...).")
    lacks = [part for part in _PARTS if not hasattr(transport, part)]
    if transport is not None and lacks and (len(lacks) < len(_PARTS) or not callable(transport)):
        raise TypeError(
            f"Federation: transport must have {', '.join(_PARTS)}; got {transport!r} without {', '.join(lacks)}. See "
            "rookery.engines.federation.transports.Transport."
        )


def _within_this_process(job: Job, federation: Federation) -> "Session":
    traced = engine.traced(job, False, federation.convolutions)
    run = uuid.uuid4().hex[:16]
    sites = _sites(traced, run)
    return Session(traced, Coordinator(traced, run, Links(in_process(sites, federation.transport))), sites)


def _sites(traced: engine.Traced, run: str) -> list[Site]:
    """Return a site for each client; sites whose data have the same shapes share a trace."""
    clients, plans = traced.job.clients, {}
    sites = []
    for i in range(clients.n):
        data = clients.site(i, _padded(clients, i))
        shapes = tuple((a.shape, str(a.dtype)) for a in jax.tree.leaves(data))
        if shapes not in plans:
            setting = traced.setting._replace(clients=clients.site_shapes(data))
            plans[shapes] = plan.plans(setting, traced.job.start, traced.hyper, traced.job.measure)
        center = clients.at_center() if clients.center_client == i else None
        levels = traced.hyper.get(plan.LEVELS)
        noise = None if levels is None else Noise(Entropy(), levels, traced.job.noise_seed is not None)
        sites.append(Site(run, plans[shapes], i, data, center, noise=noise, masking=_masking(traced, run, i)))
    return sites


def _masking(traced: engine.Traced, run: str, client: int) -> Any:
    """Return a client's part in the run's secure sums; None if it has none."""
    if not channels.sums_securely(traced.job.channel):
        return None
    _check_cryptography()
    from rookery.engines.federation.masking import Masking

    return Masking(run, client)


def _check_cryptography() -> None:
    if importlib.util.find_spec("cryptography") is None:
        raise ValueError("rk.secure_sum in a federation needs cryptography. Run pip install 'rookery[federation]'.")


def _padded(clients: Clients, i: int) -> int:
    """Return the number of rows that client i's data are padded to, so that sites share programs.

    It is the largest client's number or, if that takes too much memory, 64 times the next power of four.
    """
    sources = [source for source in (clients.lower, clients.upper, clients.test) if source is not None]
    rows = max(_WASTE * len(jax.tree.leaves(s.rows)[0]) // clients.n for s in sources)
    widest = max(source.widest for source in sources)
    if widest <= max(rows, 1024):
        return widest
    size, padded = max(int(source.sizes[i]) for source in sources), 64
    while padded < size:
        padded *= 4
    return padded
