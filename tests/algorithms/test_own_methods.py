"""The method of examples/own_methods: against NumPy, and over gRPC."""

import importlib.util
import sys
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tests.engines.federation.studies import study, without_data

import rookery as rk
from rookery.engines.engine import Job
from rookery.engines.federation.responder import Responder
from rookery.engines.federation.transports import grpc as network
from rookery.engines.federation.transports import grpc_site
from rookery.testing import NAMES, check_method
from rookery.testing.cases import VERY_UNEQUAL, job, ragged
from rookery.testing.runs import close, outcome

OWN = Path(__file__).parents[2] / "examples" / "own_methods"


def load(name: str) -> Any:
    spec = importlib.util.spec_from_file_location(name, OWN / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    sys.modules[name] = module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


GPBGD = load("g_pbgd").GPBGD

SIZES, WEIGHTS, STEPS = (1, 3, 40, 7), (1.0, 2.0, 0.5, 3.0), [1, 3, 2, 4]
P = np.array(WEIGHTS) / sum(WEIGHTS)
ROUNDS = 6


# Quadratics with unequal clients, as losses and as each client's mean matrices.


def rows(rng: Any, size: int) -> dict[str, np.ndarray]:
    """Samples of a client: those of g = ½yᵀAy − yᵀ(Bx + b) and f = ½yᵀCy − cᵀy + ½xᵀDx − dᵀx + xᵀEy."""
    definite = lambda n: np.stack([m @ m.T / n + np.eye(n) for m in rng.normal(size=(size, n, n))])
    draw = lambda *shape: rng.normal(size=(size, *shape))
    return {
        "A": definite(4), "B": draw(4, 3), "b": draw(4), "C": definite(4), "c": draw(4), "D": definite(3), "d": draw(3),
        "E": draw(3, 4),
    }  # fmt: skip


RNG = np.random.default_rng(8)
DATA = [rows(RNG, size) for size in SIZES]
MEANS = [{name: array.mean(axis=0) for name, array in own.items()} for own in DATA]
X, Y = np.array([0.5, -1.0, 0.2]), np.array([0.1, 0.4, -0.3, 1.0])


def lower(x: Any, y: Any, batch: Any) -> Any:
    m = {name: jnp.mean(batch[name], axis=0) for name in "ABb"}
    return 0.5 * y @ m["A"] @ y - y @ (m["B"] @ x + m["b"])


def upper(x: Any, y: Any, batch: Any) -> Any:
    m = {name: jnp.mean(batch[name], axis=0) for name in "CcDdE"}
    return 0.5 * y @ m["C"] @ y - m["c"] @ y + 0.5 * x @ m["D"] @ x - m["d"] @ x + x @ m["E"] @ y


def averaged(each: list[Any]) -> list[np.ndarray]:
    return [sum(p * part for p, part in zip(P, parts, strict=True)) for parts in zip(*each, strict=True)]


def g_pbgd_by_hand(alpha: float, beta: float, gamma: float) -> list[np.ndarray]:
    x, y = X, Y
    for _ in range(ROUNDS):
        (mean,) = averaged([(m["A"] @ y - m["B"] @ x - m["b"],) for m in MEANS])
        each = []
        for m, count in zip(MEANS, STEPS, strict=True):
            u, v = x, y
            for _ in range(count):
                d_u = m["D"] @ u - m["d"] + m["E"] @ v - 2 * gamma * m["B"].T @ mean
                d_v = m["C"] @ v - m["c"] + m["E"].T @ u + 2 * gamma * m["A"] @ mean
                u, v = u - alpha * d_u, v - beta * d_v
            each.append((u, v))
        x, y = averaged(each)
    return [x, y]


def test_g_pbgd_equals_its_transcription() -> None:
    clients = rk.Clients(
        lower=[{k: own[k] for k in "ABb"} for own in DATA],
        upper=[{k: own[k] for k in "CcDdE"} for own in DATA],
        weights=WEIGHTS,
    )
    method = GPBGD(upper_step=0.005, lower_step=0.007, multiplier=3.0, local_steps=STEPS)
    run = rk.solve(rk.Bilevel(upper, lower), clients, method, (X, Y), ROUNDS)
    close([*run.state], g_pbgd_by_hand(0.005, 0.007, 3.0), 1e-10)
    assert run.history["exchanges"].iloc[-1] == 2 * ROUNDS
    assert run.history["gradients"].iloc[-1] == (sum(STEPS) + len(STEPS)) * ROUNDS
    assert run.history["products"].iloc[-1] == 2 * sum(STEPS) * ROUNDS


# Over gRPC: sites whose module has imported the method.


def over_grpc(what: Job) -> Any:
    """Run a job between a coordinator and sites over gRPC; every site has the class, as if its module imported it."""
    names = tuple(f"site-{i}" for i in range(what.clients.n))
    transport = network.GrpcServer("127.0.0.1:0", names, None, True)
    sites = [Responder(name, study(what, i)) for i, name in enumerate(names)]
    join = lambda responder: grpc_site.join(
        responder.handle, lambda: responder.done, responder.name, transport.address, None, str, patience=60
    )
    threads = [threading.Thread(target=join, args=(responder,), daemon=True) for responder in sites]
    for thread in threads:
        thread.start()
    engine = rk.Federation(transport=transport, deadline=60.0, patience=60.0)
    session: Any = engine.open(without_data(what))
    try:
        session.init()
        session.advance(2)
        assert session.stopped is None
        return [np.array(leaf) for leaf in jax.tree.leaves(session.state)], session.coordinator
    finally:
        session.close()
        for thread in threads:
            thread.join(60)


@pytest.mark.slow
def test_over_grpc() -> None:
    """The same numbers and bytes as in simulation."""
    it = ragged("Bilevel", sizes=VERY_UNEQUAL)
    what = job(GPBGD(local_steps=2, batch_size=2), it)
    what = replace(what, cohort=it.n)
    here = outcome(rk.Simulation(), what)
    there, wire = over_grpc(what)
    close(jax.tree.leaves(here.state), there)
    assert (wire.sent, wire.received) == (here.counts["bytes_down"], here.counts["bytes_up"])


@pytest.mark.slow
def test_it_keeps_the_contract() -> None:
    report = check_method(GPBGD(), exchanges=2)
    assert [own.outcome for own in report.results] == ["passed"] * len(NAMES)
