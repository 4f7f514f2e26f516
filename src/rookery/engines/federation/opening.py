"""The opening of a run over a network: what sites say of themselves, and what they are told of the run."""

import dataclasses
import uuid
from typing import Any

import jax

from rookery.base.printable import printable
from rookery.data.clients import Clients
from rookery.engines import engine
from rookery.engines.engine import Job
from rookery.engines.federation import description, wire
from rookery.engines.federation.agreement import Declared
from rookery.engines.federation.coordinator import Coordinator
from rookery.engines.federation.host import fingerprint, sample_of
from rookery.engines.federation.links import Links, Reply, Request
from rookery.engines.federation.session import Session
from rookery.plan.trace import Plan

_HEADER = 1 << 20  # bytes of a reply beyond its arrays


def meet(job: Job, links: Links, convolve: str, study: Declared, allow_other_study: bool = False) -> Session:
    """Open a session with sites that have all agreed to the plan and the study; wait until they are there."""
    everyone = range(job.clients.n)
    number = links.number()
    hello = Request(number, wire.encode({"do": "hello", "number": number}, []))
    unfit = lambda i, reply: _no_hello(reply) or _differences(links.name(i), job.clients, reply)
    rejoins = links.transport.rejoins  # a site that does not fit is let go, and the others wait until it is put right
    told = links.ask(dict.fromkeys(everyone, hello), None, unfit if rejoins else _only_hello, dismiss=rejoins)
    wrong = {links.name(i): _differences(links.name(i), job.clients, told[i]) for i in everyone}
    if any(wrong.values()):
        raise ValueError(" ".join(f"{name} {line}" for name, line in wrong.items() if line))
    clients = _clients(job.clients, [told[i].header for i in everyone])
    traced = engine.traced(dataclasses.replace(job, clients=clients), False, convolve)
    session = Session(traced, Coordinator(traced, uuid.uuid4().hex, links))
    words = _words(traced) | {"study": study.words(), "allow_other_study": allow_other_study}
    links.transport.limit = _HEADER + max(map(_largest_reply, _plans(traced)))

    def opening(site: int, number: int) -> bytes:
        own = {
            "run": session.coordinator.run,
            "number": number,
            "client": site,
            "sizes": told[site].header["sizes"],
            "done": session.rounds if session.begun else -1,
            "store": session.store,
            "remembers": session.remembers,
            "wrote": int(session.wrote[site]),
        }
        return wire.encode({"do": "open", **words, **own}, [])

    links.opening = opening
    numbers = {i: links.number() for i in everyone}
    requests = {i: Request(numbers[i], opening(i, numbers[i]), opens=True) for i in everyone}
    found = links.ask(requests, least=len(everyone))
    away = [f"{links.name(i)} {links.records[i].why}" for i in everyone if i not in found]
    if away:
        session.coordinator.close("; ".join(away))
        raise ValueError(" ".join(away))
    for i in everyone:
        apart = found[i].header.get("study")
        if apart:
            lines = " ".join(map(str, apart)) if isinstance(apart, list) else str(apart)
            links.note(f"{links.name(i)} takes part with another study (--allow-other-study). {printable(lines)}")
    return session


def _plans(traced: engine.Traced) -> tuple[Plan, ...]:
    return (traced.start, traced.round, *([traced.measure] if traced.measure is not None else []))


def _no_hello(reply: Reply) -> str | None:
    """What is wrong with a site's first words: they are read before anything is agreed on."""
    said = reply.header
    size = lambda n: type(n) is int and 0 < n < 2**31
    match said:
        case {"answer": "hello", "name": str(), "conditions": dict(), "samples": dict(samples), "sizes": dict(sizes)}:
            lists = all(isinstance(arrays, list) for arrays in samples.values())
            each = [array for arrays in samples.values() for array in arrays] if lists else [None]
            shaped = all(isinstance(a, list) and [type(part) for part in a] == [str, list, str] for a in each)
            counts = [*sizes.values(), *([said["center"]] if said.get("center") is not None else [])]
            if shaped and set(sizes) == set(samples) and all(map(size, counts)):
                return None
    return "does not say who it is and what it has"


def _only_hello(site: int, reply: Reply) -> str | None:
    return _no_hello(reply)


def _largest_reply(traced: Plan) -> int:
    exchanges = [getattr(call, "exchange", None) for call in traced.body.calls]
    return max((exchange.reply_bytes for exchange in exchanges if exchange is not None), default=0)


def _differences(name: str, clients: Clients, told: Reply) -> str | None:
    """What keeps a site from taking part, in one line; None if nothing does."""
    said = told.header
    apart = description.differences(description.conditions(), said["conditions"], "at the coordinator", f"at {name}")
    lines = [f"runs under other conditions: {printable('; '.join(apart))}."] if apart else []
    if said["name"] != name:
        lines.append(f"calls itself {printable(repr(said['name']))}.")
    ours = {level: sample_of(source) for level, source in clients.levels().items() if source is not None}
    if said["samples"] != ours:
        lines.append(
            f"has other samples than the coordinator: {printable(_shown(said['samples']))} at the site, "
            f"{printable(_shown(ours))} at the coordinator."
        )
    return " It ".join(lines) or None


def _shown(samples: dict[str, Any]) -> str:
    each = lambda arrays: ", ".join(f"{name or 'array'} {tuple(shape)} {dtype}" for name, shape, dtype in arrays)
    return "; ".join(f"{level}: {each(arrays)}" for level, arrays in samples.items())


def _clients(like: Clients, told: list[dict[str, Any]]) -> Clients:
    """The clients, of the sizes that they said they have."""
    sizes = {level: [int(said["sizes"][level]) for said in told] for level in told[0]["sizes"]}
    center = None
    if like.center_client is not None:
        center = told[like.center_client]["center"]
        if center is None:
            raise ValueError(f"The site of client {like.center_client} is to hold the centre's data, and has none.")
    return like.with_sizes(sizes, center)


def _words(traced: engine.Traced) -> dict[str, Any]:
    """What every site is told of the run."""
    job, clients = traced.job, traced.job.clients
    plans = _plans(traced)
    center = clients.center
    return {
        "conditions": description.conditions(),
        "jax": jax.__version__,
        "algorithm": _described(job.algorithm),
        "channel": _described(job.channel),
        "faults": description.describe(job.faults),
        "clients": clients.n,
        "cohort": job.cohort,
        "levels": {
            level: [source.widest, source.narrowest, source.chunk]
            for level, source in clients.levels().items()
            if source is not None
        },
        "replace": clients.replace,
        "center": None if center is None else {"sample": sample_of(center), "size": center.widest},
        "center_client": clients.center_client,
        "products": traced.setting.products,
        "measures": traced.measure is not None,
        "fingerprint": fingerprint(plans),
        "signatures": [p.signature for p in plans],
    }


def _described(record: Any) -> Any:
    """In words; {"own": True} for what has none: the site's module must then have it."""
    try:
        return description.describe(record)
    except TypeError:
        return {"own": True}
