"""Many sites and many rounds: nothing grows."""

import gc
import threading
import time
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from tests.engines.federation.processes import Played, federation, in_threads, play, server
from tests.engines.federation.studies import without_data

import rookery as rk
from rookery.engines.checks import start_values
from rookery.engines.engine import Job

pytestmark = [pytest.mark.xdist_group("processes"), pytest.mark.slow]


def _loss(x: Any, batch: Any) -> Any:
    return jnp.mean((batch["a"] - x) ** 2)


def megabytes() -> float:
    gc.collect()
    status = Path("/proc/self/status").read_text()
    return int(status.split("VmRSS:")[1].split()[0]) / 1024


def test_fifty_sites_for_a_hundred_rounds() -> None:
    """Sites and coordinator in one process, so that what any of them leaks is seen."""
    names = tuple(f"site-{i}" for i in range(50))
    rng = np.random.default_rng(0)
    clients = rk.Clients(upper=[{"a": rng.normal(size=(1 + i % 3, 1000))} for i in range(50)])
    problem = rk.SingleLevel(_loss)
    start = start_values(problem, clients, np.zeros(1000))
    what = Job(problem, clients, rk.Ditto(step=0.1, local_steps=2, personal_step=0.1, personal_steps=1), start, 50, 0)
    transport, played = server(names), Played(missing=[0] * 50)
    memory, threads = {}, {}

    def between(t: int) -> None:
        if t in (10, 99):
            memory[t], threads[t] = megabytes(), threading.active_count()

    before = threading.active_count()
    with in_threads(what, transport.address, names):
        play(federation(transport, played), without_data(what), 100, played, between)
    assert memory[99] < 1.1 * memory[10], memory
    assert threads[99] <= threads[10]
    end = time.monotonic() + 10
    while threading.active_count() > before + 5 and time.monotonic() < end:
        time.sleep(0.1)
    assert threading.active_count() <= before + 5, [thread.name for thread in threading.enumerate()]
    assert not played.lost
    here = play(rk.Simulation(), what, 100)
    np.testing.assert_allclose(np.asarray(played.state.x), np.asarray(here.state.x), rtol=1e-9)
