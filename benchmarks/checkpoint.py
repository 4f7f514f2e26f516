"""Measure what checkpoints cost a run: personal models of 1,000 clients, 1 GB in all, saved once a minute.

    python benchmarks/checkpoint.py [--gigabytes 1] [--times 3] [--seconds 60]

Two clients take part in a round. The run waits at each save for one copy of the state in memory; the copy is written
while the run continues. The script prints this wait in seconds and as a share of the run's time, and times rounds with
and without a write in progress.
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
from rookery.engines.checkpoints import Checkpoint
from rookery.engines.engine import Job

CLIENTS = 1000


def main() -> None:
    """Open a session, and save it as `solve` does."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gigabytes", type=float, default=1.0)
    parser.add_argument("--times", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=60.0, help="from one save to the next")
    options = parser.parse_args()

    x = jax.random.normal(jax.random.key(0), (int(options.gigabytes * 1e9 / 4 / CLIENTS),), jnp.float32)
    problem = rk.SingleLevel(lambda x, b: jnp.mean((x[:16] - b) ** 2))
    clients = rk.Clients(upper=[np.full((1 + i % 3, 16), i, np.float32) for i in range(CLIENTS)])
    method = rk.Ditto(step=0.1, personal_step=0.1, personal_steps=1)
    session = rk.Simulation().open(Job(problem, clients, method, (x, ()), 2))
    session.init()
    session.advance(1)
    alone = rounds(session, 5.0)
    loading = seconds_of(lambda: import_module("orbax.checkpoint"))
    print(f"state: {options.gigabytes:g} GB; a round takes {alone:.3f} s; importing orbax took {loading:.1f} s, once")

    folder, waited, begin = Path(tempfile.mkdtemp()), [], time.perf_counter()
    with Checkpoint(folder, {}, session) as saver:
        for _ in range(options.times):
            start = time.perf_counter()
            waited.append(seconds_of(lambda: saver.save({"best": None}, None)))
            beside = rounds(session, 5.0)
            rounds(session, options.seconds - (time.perf_counter() - start))
            if waited[-1] < 1e-3:
                print("skipped: the last one is still being written, or takes too long")
            print(f"the run waits {waited[-1]:.2f} s; in the 5 s after it a round takes {beside:.3f} s", flush=True)
    total = time.perf_counter() - begin
    print(f"{sum(waited):.2f} s of {total:.0f} s: {100 * sum(waited) / total:.1f} % of the run's time")
    shutil.rmtree(folder)


def rounds(session: Any, seconds: float) -> float:
    """Run rounds for so many seconds; return the seconds of one."""
    begin, count = time.perf_counter(), 0
    while time.perf_counter() < begin + seconds:
        session.advance(1)
        jax.block_until_ready(session.state)
        count += 1
    return (time.perf_counter() - begin) / max(count, 1)


def seconds_of(call: Callable[[], Any]) -> float:
    """Return the seconds that a call takes."""
    begin = time.perf_counter()
    call()
    return time.perf_counter() - begin


if __name__ == "__main__":
    main()
