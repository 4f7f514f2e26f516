"""The same rounds on 1, 2, 4 and 8 devices of one host: python benchmarks/devices.py [--cohort 800] [--most 8].

FedNest with the paper's network (784-200-10) on 100 samples of each client, bound by arithmetic. Each number of devices
runs in a process of its own, on as many cores as it has devices; efficiency is t(1) / (D · t(D)).
"""

import argparse
import os
import subprocess
import sys
import time


def main() -> None:
    """All of them, one after another."""
    given = argparse.ArgumentParser()
    given.add_argument("--cohort", type=int, default=800)
    given.add_argument("--most", type=int, default=8)
    given.add_argument("--devices", type=int, help="measure this number alone, in this process")
    asked = given.parse_args()
    if asked.devices:
        print(f"{_seconds(asked.devices, asked.cohort):.6f}")
        return
    alone, devices = 0.0, 1
    while devices <= min(asked.most, os.cpu_count() or 1):
        cores = ",".join(map(str, range(devices)))
        flags = "--xla_cpu_multi_thread_eigen=false"  # a device is a core
        environment = {**os.environ, "JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": str(devices), "XLA_FLAGS": flags}
        words = ["taskset", "-c", cores, sys.executable, __file__, f"--devices={devices}", f"--cohort={asked.cohort}"]
        seconds = float(subprocess.run(words, env=environment, capture_output=True, text=True, check=True).stdout)
        alone = alone or seconds
        print(
            f"{devices} devices: {1e3 * seconds:8.1f} ms a round, efficiency {alone / (devices * seconds):.0%}",
            flush=True,
        )
        devices *= 2


def _seconds(devices: int, cohort: int) -> float:
    """What a round takes, the best of five."""
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
    engine = rk.Simulation(mesh=devices) if devices > 1 else rk.Simulation()
    session = engine.open(Job(problem, clients, method, start, cohort))
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
