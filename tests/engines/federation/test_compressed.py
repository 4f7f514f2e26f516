"""Compressed messages over gRPC: the bytes that are sent, and the numbers of the simulation."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tests.engines.federation.processes import Played, federation, in_threads, play, server
from tests.engines.federation.studies import without_data

import rookery as rk
from rookery.engines.checks import start_values
from rookery.engines.engine import Job
from rookery.testing.runs import close

pytestmark = [pytest.mark.xdist_group("processes"), pytest.mark.slow]

SIZE, NAMES = 50_000, ("a", "b", "c")


def _loss(x: Any, batch: Any) -> Any:
    return jnp.mean((batch["a"] - x) ** 2)


def over_grpc(channel: Any, faults: Any = None) -> tuple[Played, Played]:
    """The same run over the network and in simulation."""
    rng = np.random.default_rng(0)
    clients = rk.Clients(upper=[{"a": rng.normal(size=(n, SIZE)).astype("f")} for n in (1, 3, 2)])
    problem = rk.SingleLevel(_loss)
    start = start_values(problem, clients, np.zeros(SIZE, "f"))
    what = Job(problem, clients, rk.FedAvg(step=0.1, local_steps=2), start, 3, 0, channel, faults)
    transport, played = server(NAMES), Played(missing=[0] * 3)
    with in_threads(what, transport.address, NAMES):
        play(federation(transport, played), without_data(what), 3, played)
    return played, play(rk.Simulation(), what, 3)


def test_one_in_a_hundred_over_the_network() -> None:
    """Under 3 % of the plain bytes, in all that travels, headers and opening included."""
    (plain, _), (packed, here) = over_grpc(None), over_grpc(rk.top_k(0.01))
    close(packed.state.x, here.state.x)
    assert packed.session.coordinator.received == 3 * 3 * 500 * (4 + 2)
    assert packed.session.coordinator.received < 0.03 * plain.session.coordinator.received
    assert packed.links.received < 0.03 * plain.links.received


@pytest.mark.parametrize("feedback", ["error", "difference", "aggregate"])
def test_both_ways(feedback: str) -> None:
    channel = rk.chain(rk.clip(3.0), rk.quantize(4, feedback=feedback), rk.broadcast(8))
    there, here = over_grpc(channel)
    close(there.state, here.state)
    assert there.session.coordinator.received == 3 * 3 * (SIZE // 2 + 4)
    carried = 4 * SIZE if feedback == "aggregate" else 0
    each = there.session.coordinator.sent / 9
    assert SIZE + carried < each < SIZE + carried + 64
    assert jax.tree.leaves(here.carry.client) or feedback == "aggregate"
