"""Hosts of all clients of a job, as sites have them, and the coordinator's job, which holds no data."""

import dataclasses
from pathlib import Path
from typing import Any

import jax
import numpy as np

import rookery as rk
from rookery.engines.engine import Job
from rookery.engines.federation.responder import Responder, Study
from rookery.engines.federation.transports.memory import Memory


def like(clients: rk.Clients) -> rk.Clients:
    """What the coordinator knows of them."""
    sample = lambda source: jax.tree.map(lambda a: np.asarray(a)[0], source.rows)
    levels = {name: sample(source) for name, source in clients.levels().items() if source is not None}
    center: Any = {}
    if clients.center is not None:
        held = clients.center_client is None
        rows = jax.tree.map(np.asarray, clients.center.rows) if held else sample(clients.center)
        center = {"center": rows, "center_client": clients.center_client}
    return rk.Clients.like(
        **levels, n=clients.n, weights=np.asarray(clients.weights), replace=clients.replace, **center
    )


def without_data(job: Job) -> Job:
    return dataclasses.replace(job, clients=like(job.clients))


def study(job: Job, i: int) -> Study:
    own = rk.Clients(**job.clients.client_data(i))
    init = job.start[0] if isinstance(job.problem, rk.SingleLevel) else job.start
    module = {"algorithm": job.algorithm, "channel": job.channel, "Method": type(job.algorithm)}
    return Study(job.problem, init, own, job.measure, module)


def names(job: Job) -> list[str]:
    return [f"site-{i}" for i in range(job.clients.n)]


def responders(job: Job, folder: Path | None = None, guard: Any = lambda i: lambda opened: None) -> list[Responder]:
    """`guard(i)` is that of site i."""
    own = lambda i: None if folder is None else folder / str(i)
    return [Responder(name, study(job, i), own(i), guard(i)) for i, name in enumerate(names(job))]


def in_memory(responders: list[Responder]) -> Any:
    """An engine of these responders, in this process."""
    ask = lambda i, message: responders[i].handle(message)
    names = [responder.name for responder in responders]
    return rk.Federation(transport=Memory(len(names), ask, names), patience=0.0)
