"""What checkpoints cost a run: FedAvg on a model of 1 GB, with little work, saved once a minute.

    python benchmarks/checkpoint.py [--gigabytes 1] [--saves 3] [--seconds 60]

Printed are the seconds that the run waits at each save, and the share of its time that this is; what is written then is
written while the run goes on. The rounds are timed with and without writing beside them.
"""

import argparse
import shutil
import tempfile
import time
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import rookery as rk
from rookery.checkpoints import Checkpoint
from rookery.engines.engine import Job


def main() -> None:
    """Open a session, and save it as `solve` does."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gigabytes", type=float, default=1.0)
    parser.add_argument("--saves", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=60.0, help="from one save to the next")
    asked = parser.parse_args()

    x = jax.random.normal(jax.random.key(0), (int(asked.gigabytes * 1e9 / 4),), jnp.float32)
    problem = rk.SingleLevel(lambda x, b: jnp.mean((x[:1024] - b) ** 2))
    clients = rk.Clients(upper=[np.ones((2, 1024), np.float32), np.zeros((3, 1024), np.float32)])
    session = rk.Simulation(block=1).open(Job(problem, clients, rk.FedAvg(step=0.1), (x, ()), 2))
    del x
    session.init()
    session.advance(1)
    alone = rounds(session, 5.0)
    loading = seconds_of(lambda: import_module("orbax.checkpoint"))
    print(f"a state of {asked.gigabytes:g} GB; a round takes {alone:.2f} s; orbax is imported in {loading:.1f} s, once")

    folder, waited, begin = Path(tempfile.mkdtemp()), [], time.perf_counter()
    with Checkpoint(folder, {}, session) as saver:
        for _ in range(asked.saves):
            start = time.perf_counter()
            waited.append(seconds_of(lambda: saver.save({"best": None}, None, always=True)))
            beside = rounds(session, 5.0)
            rounds(session, asked.seconds - (time.perf_counter() - start))
            print(f"the run waits {waited[-1]:.2f} s; in the 5 s after it a round takes {beside:.2f} s", flush=True)
    total = time.perf_counter() - begin
    print(f"{sum(waited):.2f} s of {total:.0f} s: {100 * sum(waited) / total:.1f} % of the run's time")
    shutil.rmtree(folder)


def rounds(session: Any, seconds: float) -> float:
    """Rounds for that long; the seconds of one."""
    begin, count = time.perf_counter(), 0
    while time.perf_counter() < begin + seconds:
        session.advance(1)
        jax.block_until_ready(session.state)
        count += 1
    return (time.perf_counter() - begin) / max(count, 1)


def seconds_of(call: Callable[[], Any]) -> float:
    """How long a call takes."""
    begin = time.perf_counter()
    call()
    return time.perf_counter() - begin


if __name__ == "__main__":
    main()
