"""The same rounds on 1, 2, 4 and 8 devices of one host: python benchmarks/devices.py [--cohort 800] [--most 8].

FedNest with the paper's network (784-200-10) on 100 samples of each client, bound by arithmetic. Each number of devices
runs in a separate process, with two cores per device if there are enough: a device computes on one, and the threads
that hand out its work need others. On as many cores as devices, eight devices took 1.4 times as long. Efficiency is
t(1) / (D · t(D)). A device computes the clients of a cohort that it holds: with 1,600 clients and a cohort of 800, the
largest of 8 shares has about 9 clients more than the average of 100.
"""

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any


def main() -> None:
    """Measure all of them, one after another."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--cohort", type=int, default=800)
    parser.add_argument("--most", type=int, default=8)
    parser.add_argument("--devices", type=int, help="measure this number alone, in this process")
    options = parser.parse_args()
    if options.devices:
        print(f"{seconds(options.devices if options.devices > 1 else None, options.cohort):.6f}")
        return

    def measured(devices: int) -> float:
        words = [*pinned(cores()[: 2 * devices]), __file__, f"--devices={devices}", f"--cohort={options.cohort}"]
        return float(
            subprocess.run(words, env=environment(devices), stdout=subprocess.PIPE, text=True, check=True).stdout
        )

    doubling("devices", options.most, measured)


def doubling(what: str, most: int, measured: Callable[[int], float]) -> None:
    """Print the times of 1, 2, 4, … of them, up to the number of cores."""
    alone, count = 0.0, 1
    while count <= min(most, os.cpu_count() or 1):
        taken = measured(count)
        alone = alone or taken
        print(f"{count} {what}: {1e3 * taken:8.1f} ms a round, efficiency {alone / (count * taken):.0%}", flush=True)
        count *= 2


def cores() -> list[int]:
    """Return the cores that may be used, first one thread of each."""
    seen: set[str] = set()
    firsts, others = [], []
    for core in sorted(os.sched_getaffinity(0)):
        siblings = Path(f"/sys/devices/system/cpu/cpu{core}/topology/thread_siblings_list")
        own = siblings.read_text() if siblings.exists() else str(core)
        (others if own in seen else firsts).append(core)
        seen.add(own)
    return firsts + others


def pinned(cores: list[int]) -> list[str]:
    """Return the command that runs this Python on these cores."""
    return ["taskset", "-c", ",".join(map(str, cores)), sys.executable]


def environment(devices: int) -> dict[str, str]:
    """Return the environment of a process with this number of devices, each of them a core.

    Memory that is freed stays with the process (MALLOC_*): devices that give it back to the system after every program
    and ask for it again wait for each other.
    """
    flags = "--xla_cpu_multi_thread_eigen=false"
    kept = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": str(10**11), "MALLOC_TOP_PAD_": str(2**26)}
    return {**os.environ, **kept, "JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": str(devices), "XLA_FLAGS": flags}


def seconds(mesh: Any, cohort: int) -> float:
    """Return the seconds of a round on these devices, the best of five."""
    import jax
    import numpy as np

    import rookery as rk
    from rookery.engines.engine import Job

    rng = np.random.default_rng(0)
    n, samples = 2 * cohort, 100
    draw = lambda: {
        "image": rng.normal(size=(n * samples, 784)).astype(np.float32),
        "label": rng.integers(0, 10, n * samples).astype(np.int32),
    }
    sizes = np.full(n, samples)
    clients = rk.Clients.from_arrays(draw(), sizes, upper=(draw(), sizes))

    def logits(x: jax.Array, y: jax.Array, rows: dict[str, jax.Array]) -> jax.Array:
        return jax.nn.relu(rows["image"] @ x) @ y

    def loss(x: jax.Array, y: jax.Array, rows: dict[str, jax.Array]) -> jax.Array:
        chosen = jax.nn.log_softmax(logits(x, y, rows))
        return -jax.numpy.mean(jax.numpy.take_along_axis(chosen, rows["label"][:, None], 1))

    problem = rk.Bilevel(loss, lambda x, y, rows: loss(x, y, rows) + 0.01 * jax.numpy.sum(y**2))
    start = (0.05 * rng.normal(size=(784, 200)).astype(np.float32), np.zeros((200, 10), np.float32))
    method = rk.FedNest(
        lower_rounds=1, lower_local_steps=2, neumann_terms=2, hessian_step=0.1, upper_local_steps=1, batch_size=64
    )
    session = rk.Simulation(mesh=mesh).open(Job(problem, clients, method, start, cohort))
    session.init()
    session.advance(1)
    best = np.inf
    for _ in range(5):
        begin = time.perf_counter()
        session.advance(1)
        jax.block_until_ready(session.state)
        best = min(best, time.perf_counter() - begin)
    return float(best)


if __name__ == "__main__":
    main()
