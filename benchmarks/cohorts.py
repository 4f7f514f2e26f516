"""Rounds of FedNest and ASFBO with cohorts of 10 to 10,000: python benchmarks/cohorts.py [--most 10000].

The papers' network (784-200-10) and batches (64); every client is in the cohort. Beside each time the bound that the
device sets: the bytes that the clients' work must move (see roofline.py) at the memory's rate, or its products at the
rate of a large one of float32 in JAX's own precision, whichever takes longer. Both rates are measured first.
"""

import argparse
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from roofline import of_client

import rookery as rk
from rookery import bench
from rookery.engines.engine import Job
from rookery.tasks.hyperrep import layers, representation_problem

METHODS = {
    "FedNest": (bench._paper_method, (300, 300)),
    "ASFBO": (lambda: rk.ASFBO(local_steps=15, batch_size=64), (450, 150)),
}
TURNS = {"FedNest": 23, "ASFBO": 14}  # of the loops whose length depends on the client


def main() -> None:
    """All cohorts of both."""
    given = argparse.ArgumentParser()
    given.add_argument("--most", type=int, default=10_000)
    given.add_argument("--cohorts", type=int, nargs="*")
    asked = given.parse_args()
    moved, multiplied = rates()
    print(f"memory: {moved / 1e12:.2f} TB/s; products: {multiplied / 1e12:.0f} TFLOP/s", flush=True)
    cohorts = asked.cohorts or [c for c in (10, 100, 1_000, 10_000) if c <= asked.most]
    for name, (method, (lower, upper)) in METHODS.items():
        for cohort in cohorts:
            data = bench._clients(cohort, lower, 784, upper)
            start = layers(jax.random.key(0), 784, 200, 10)
            session = rk.Simulation().open(Job(representation_problem(), data, method(), start, cohort))
            seconds = measured(session, 50 if cohort <= 100 else 5)
            traced = session._traced
            cost = of_client(traced.round.body, traced.setting.clients.client_axes(), TURNS[name])
            bound = max(cohort * cost.moved / moved, cohort * cost.flops / multiplied)
            what = "memory" if cost.moved / moved > cost.flops / multiplied else "arithmetic"
            print(
                f"{name}, cohort {cohort:6,}: {1e3 * seconds:8.3f} ms a round; a client moves {cost.moved / 1e6:.1f} "
                f"MB and multiplies {cost.flops / 1e9:.3f} GFLOP: {what} allows {1e3 * bound:.3f} ms, "
                f"{bound / seconds:.0%}",
                flush=True,
            )
            del session, data


def measured(session: Any, rounds: int) -> float:
    """Seconds a round, the best of five."""
    session.init()
    session.advance(rounds)
    each = []
    for _ in range(5):
        begin = time.perf_counter()
        session.advance(rounds)
        jax.block_until_ready(session.state)
        each.append((time.perf_counter() - begin) / rounds)
    return min(each)


def rates() -> tuple[float, float]:
    """Bytes a second of a copy, and operations a second of a product."""
    large = jax.default_backend() != "cpu"
    a = jnp.ones(2**28 if large else 2**24)
    turns = 20
    copying = lambda a: jax.lax.fori_loop(0, turns, lambda i, a: a + 1, a)
    b = jnp.ones((8192, 8192) if large else (1024, 1024))
    return 2 * a.nbytes * turns / best(copying, a), 2 * len(b) ** 3 * turns / best(
        lambda b: jax.lax.fori_loop(0, turns, lambda i, c: b @ c * 1e-4, b), b
    )


def best(work: Callable[..., Any], *args: Any) -> float:
    """Seconds, the best of three."""
    compiled, each = jax.jit(work), []
    jax.block_until_ready(compiled(*args))
    for _ in range(3):
        begin = time.perf_counter()
        jax.block_until_ready(compiled(*args))
        each.append(time.perf_counter() - begin)
    return min(each)


if __name__ == "__main__":
    main()
