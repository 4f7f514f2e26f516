"""How a run over a network begins: sites say what they hold, the coordinator opens the run, and all agree to it."""

import dataclasses
import uuid
from typing import Any

import rookery
from rookery.base.printable import printable
from rookery.data.clients import Clients
from rookery.engines import engine
from rookery.engines.engine import Job
from rookery.engines.federation import description, wire
from rookery.engines.federation.agreement import Declared
from rookery.engines.federation.coordinator import Coordinator
from rookery.engines.federation.links import Links, Reply, Request
from rookery.engines.federation.opening import is_count, is_sample, run_fields, sample_of
from rookery.engines.federation.session import Session
from rookery.plan.trace import Plan

_HEADER = 1 << 20  # bytes that a reply may have in addition to its arrays


def meet(job: Job, links: Links, convolve: str, study: Declared, allow_other_study: bool = False) -> Session:
    """Wait for all sites, and open a session once they have agreed to the plan and the study."""
    everyone = range(job.clients.n)
    hellos = _hellos(job, links)
    clients = _sized(job.clients, hellos)
    traced = engine.traced(dataclasses.replace(job, clients=clients), False, convolve)
    protocols = [description.agreed_protocol(_protocols(said)) for said in hellos]
    session = Session(traced, Coordinator(traced, uuid.uuid4().hex, links))
    shared = run_fields(traced) | {"study": study.words(), "allow_other_study": allow_other_study}
    plans = [plan for plan in (traced.start, traced.round, traced.measure) if plan is not None]
    links.transport.limit = _HEADER + max(map(_largest_reply, plans))

    def opening(site: int, number: int) -> bytes:
        fields = {
            "run": session.coordinator.run,
            "number": number,
            "conditions": description.conditions(protocols[site]),
            "client": site,
            "sizes": hellos[site]["sizes"],
            "done": session.rounds if session.begun else -1,
            "store": session.store,
            "remembers": session.remembers,
            "wrote": int(session.wrote[site]),
        }
        return wire.encode({"do": "open", **shared, **fields}, [])

    links.opening = opening
    numbers = {i: links.number() for i in everyone}
    requests = {i: Request(numbers[i], opening(i, numbers[i]), opens=True) for i in everyone}
    replies = links.ask(requests, least=len(everyone))
    away = [f"{links.name(i)} {links.records[i].why}" for i in everyone if i not in replies]
    if away:
        why = " ".join(f"{line.rstrip('.')}." for line in away)
        session.coordinator.close(why)
        raise ValueError(why)
    for i in everyone:
        apart = replies[i].header.get("study")
        if apart:
            lines = " ".join(map(str, apart)) if isinstance(apart, list) else str(apart)
            links.note(f"{links.name(i)} takes part with another study (--allow-other-study). {printable(lines)}")
    return session


def _hellos(job: Job, links: Links) -> list[dict[str, Any]]:
    """Return what each site says of itself.

    A site that does not fit is dismissed, and the others wait for it to come back, if the transport lets it.
    """
    everyone, number = range(job.clients.n), links.number()
    hello = Request(number, wire.encode({"do": "hello", "number": number}, []))
    unfit = lambda i, reply: _malformed(i, reply) or _differences(links.name(i), job.clients, reply.header)
    rejoins = links.transport.rejoins
    replies = links.ask(dict.fromkeys(everyone, hello), None, unfit if rejoins else _malformed, dismiss=rejoins)
    found = [replies[i].header for i in everyone]
    apart = {links.name(i): _differences(links.name(i), job.clients, found[i]) for i in everyone}
    if any(apart.values()):
        raise ValueError(" ".join(f"{name} {line}" for name, line in apart.items() if line))
    versions = {links.name(i): said["conditions"].get("rookery") for i, said in zip(everyone, found, strict=True)}
    for name, version in versions.items():
        if version != rookery.__version__:
            links.note(f"{name} has Rookery {version}, the coordinator {rookery.__version__}.")
    return found


def _malformed(site: int, reply: Reply) -> str | None:
    """Return what is wrong with the form of a site's hello, which is read before anything is agreed on."""
    said = reply.header
    match said:
        case {"answer": "hello", "name": str(), "conditions": dict(), "samples": dict(samples), "sizes": dict(sizes)}:
            counts = [*sizes.values(), *([said["center"]] if said.get("center") is not None else [])]
            if all(map(is_sample, samples.values())) and set(sizes) == set(samples) and all(map(is_count, counts)):
                return None
    return "must say its name, its conditions and its samples first, and did not"


def _differences(name: str, clients: Clients, said: dict[str, Any]) -> str | None:
    """Return what keeps a site from taking part, in one line; None if nothing does."""
    apart = description.differences(said["conditions"], "at the coordinator", f"at {name}", _protocols(said))
    lines = (
        [f"runs under other conditions: {printable('; '.join(apart))}. Use the same on both sides."] if apart else []
    )
    if said["name"] != name:
        lines.append(f"calls itself {printable(repr(said['name']))}.")
    ours = {level: sample_of(source) for level, source in clients.levels().items() if source is not None}
    if said["samples"] != ours:
        lines.append(
            f"has other samples than the coordinator: {printable(_shown(said['samples']))} at the site, "
            f"{printable(_shown(ours))} at the coordinator."
        )
    return " It ".join(lines) or None


def _protocols(said: dict[str, Any]) -> list[Any]:
    """Return the oldest and the newest version of the protocol that a site understands."""
    match said.get("protocols"):
        case [int(oldest), int(newest)]:
            return [oldest, newest]
    return [said["conditions"].get("protocol")] * 2  # the first version of Rookery names only one


def _shown(samples: dict[str, Any]) -> str:
    each = lambda arrays: ", ".join(f"{name or 'array'} {tuple(shape)} {dtype}" for name, shape, dtype in arrays)
    return "; ".join(f"{level}: {each(arrays)}" for level, arrays in samples.items())


def _sized(like: Clients, hellos: list[dict[str, Any]]) -> Clients:
    """Return the clients with the sizes that their sites announced."""
    sizes = {level: [int(said["sizes"][level]) for said in hellos] for level in hellos[0]["sizes"]}
    center = None
    if like.center_client is not None:
        center = hellos[like.center_client]["center"]
        if center is None:
            raise ValueError(
                f"The site of client {like.center_client} must hold the centre's data; it has none. Return "
                '{"center": rows, ...} from its data().'
            )
    return like.with_sizes(sizes, center)


def _largest_reply(plan: Plan) -> int:
    exchanges = [getattr(call, "exchange", None) for call in plan.body.calls]
    return max((exchange.reply_bytes for exchange in exchanges if exchange is not None), default=0)
