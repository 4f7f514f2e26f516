"""Time rounds of FedNest and ASFBO with cohorts of 10 to 10,000: python benchmarks/cohorts.py [--most 10000].

The papers' network (784-200-10) and batches (64); every client is in the cohort. Each time is compared with what the
device allows: the bytes moved at the rate of a large copy, or the products at the rate of a large float32 product in
JAX's default precision, the longer of the two. Both rates are measured first. The bytes are those of a program in which
every matrix product, every gather and every sum over clients is a separate kernel and everything else is fused
(`moved`); and, for comparison, of a program in which a whole local step stays on the chip (`needed`), which no compiler
produces.
"""

import argparse
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

import rookery as rk
from rookery.cli import speed
from rookery.engines.engine import Job
from rookery.tasks.hyperrep import layers, representation_problem

METHODS = {
    "FedNest": (speed._paper_method, (300, 300)),
    "ASFBO": (lambda: rk.ASFBO(local_steps=15, batch_size=64), (450, 150)),
}
# Numbers: of the two layers, of a sample and of what y sees of it; and of a batch of these.
X, Y, ROW, HIDDEN = 784 * 200, 200 * 10, 784, 200
BATCH, SEEN = 64 * ROW, 64 * HIDDEN


def needed(name: str) -> float:
    """Return the bytes that a client's round must move if a whole local step stays on the chip.

    FedNest: the 300 training samples once and three batches of 64; what y sees of the samples, written and read; in
    each of 23 local steps a batch of it, y, its anchor and the new y. ASFBO: in each of 15 local steps two batches, and
    x and its direction, both read and written.
    """
    if name == "FedNest":
        return 4 * (300 * ROW + 3 * BATCH + 2 * 300 * HIDDEN + 23 * (SEEN + 3 * Y))
    return 4 * 15 * (2 * BATCH + 4 * X)


def moved(name: str) -> float:
    """Return the bytes that a client's round moves if products, gathers and sums are separate kernels.

    FedNest: the client's 300 samples are picked (read and written) and multiplied; what y sees of them is written, and
    read by the two products of the anchor. Three batches are picked, multiplied and seen. Two gradients by x: a batch,
    what comes back, and x's gradient, written and then summed over clients. A local step (23) and a term of the series
    (5) pick a batch of what y sees, of which four products are made; a local step has y six times besides.
    ASFBO, a local step (15): x is made of its start and q (one read, one written). Two batches are picked and,
    together, multiplied by x, seen, and multiplied again by what comes back, which gives a gradient. The update reads
    q, u and that, and writes q and u. What y sees is read or written sixteen times by the output layer's products and
    their tangents.
    """
    if name == "FedNest":
        samples, seen = 300 * ROW, 300 * HIDDEN
        picked = 3 * samples + 3 * seen + 3 * (3 * BATCH + SEEN)
        by_x = 2 * (BATCH + SEEN + 2 * X)
        return 4 * (picked + by_x + (23 + 5) * 6 * SEEN + 23 * 6 * Y)
    return 4 * 15 * (8 * BATCH + 9 * X + 16 * SEEN)


def multiplied(name: str) -> float:
    """Return the operations of a client's products in a round."""
    return 2 * (speed.fednest_products() * 300 / 450 if name == "FedNest" else speed.asfbo_products())


def main() -> None:
    """Measure all cohorts for both methods."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--most", type=int, default=10_000)
    parser.add_argument("--cohorts", type=int, nargs="*")
    options = parser.parse_args()
    copied, computed = rates()
    print(f"memory: {copied / 1e12:.2f} TB/s; products: {computed / 1e12:.0f} TFLOP/s", flush=True)
    cohorts = options.cohorts or [c for c in (10, 100, 1_000, 10_000) if c <= options.most]
    for name, (method, (lower, upper)) in METHODS.items():
        for cohort in cohorts:
            data = speed._clients(cohort, lower, 784, upper)
            start = layers(jax.random.key(0), 784, 200, 10)
            session = rk.Simulation().open(Job(representation_problem(), data, method(), start, cohort))
            seconds = measured(session, 50 if cohort <= 100 else 5)
            memory, products = cohort * moved(name) / copied, cohort * multiplied(name) / computed
            bound, what = max((memory, "memory"), (products, "arithmetic"))
            least = max(cohort * needed(name) / copied, products)
            print(
                f"{name}, cohort {cohort:6,}: {1e3 * seconds:8.3f} ms a round; a client moves {moved(name) / 1e6:.1f} "
                f"MB and multiplies {multiplied(name) / 1e9:.2f} GFLOP: {what} allows {1e3 * bound:.3f} ms, "
                f"{bound / seconds:.0%}; with local steps on the chip {1e3 * least:.3f} ms, {least / seconds:.0%}",
                flush=True,
            )
            del session, data


def measured(session: Any, rounds: int) -> float:
    """Return the seconds of a round, the best of five."""
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
    """Return the bytes per second of a copy, and the operations per second of a product."""
    large = jax.default_backend() != "cpu"
    a = jnp.ones(2**28 if large else 2**24)
    turns = 20
    copying = lambda a: jax.lax.fori_loop(0, turns, lambda i, a: a + 1, a)
    b = jnp.ones((8192, 8192) if large else (1024, 1024))
    return 2 * a.nbytes * turns / best(copying, a), 2 * len(b) ** 3 * turns / best(
        lambda b: jax.lax.fori_loop(0, turns, lambda i, c: b @ c * 1e-4, b), b
    )


def best(work: Callable[..., Any], *args: Any) -> float:
    """Return the seconds, the best of three."""
    compiled, each = jax.jit(work), []
    jax.block_until_ready(compiled(*args))
    for _ in range(3):
        begin = time.perf_counter()
        jax.block_until_ready(compiled(*args))
        each.append(time.perf_counter() - begin)
    return min(each)


if __name__ == "__main__":
    main()
