"""Time private rounds against plain ones: python benchmarks/private_rounds.py [--unit client] [--cohort 20].

FedBiO and FedNest with the papers' network (784-200-10) and five local steps; clients or, with `--unit record`, records
as the unit of privacy. Plain and private rounds alternate in one process, in an order drawn for each repetition; a line
has the best time of each, and the median over the repetitions of private over plain.
"""

import argparse
import dataclasses
import statistics
import time
from typing import Any

import jax
import numpy as np

import rookery as rk
from rookery.cli import speed
from rookery.engines.engine import Job
from rookery.run.arguments import checked
from rookery.tasks.hyperrep import layers, representation_problem

METHODS = {
    "FedBiO": rk.FedBiO(local_steps=5),
    "FedNest": rk.FedNest(lower_local_steps=5, upper_local_steps=5, hessian_step=speed.HESSIAN_STEP),
}


def main() -> None:
    """Compare the rounds of both methods."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--clients", type=int, default=100)
    parser.add_argument("--cohort", type=int, default=20)
    parser.add_argument("--samples", type=int, default=100, help="of a client, at each level")
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--unit", choices=["client", "record"], default="client")
    parser.add_argument("--rounds", type=int, default=speed.rounds_at_once(), help="in one measurement")
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--methods", nargs="*", default=list(METHODS))
    options = parser.parse_args()
    clients = speed._clients(options.clients, options.samples, speed.INPUTS, options.samples)
    start = layers(jax.random.key(0), speed.INPUTS, speed.WIDTH, speed.CLASSES)
    for name in options.methods:
        private = rk.private(delta=1e-3, clip=0.3, noise=1.0, unit=options.unit)
        channels = {"plain": None, "private": private}
        method = dataclasses.replace(METHODS[name], batch_size=options.batch)
        sessions: dict[str, Any] = {}
        for what, channel in channels.items():
            job = Job(representation_problem(), clients, method, start, options.cohort, channel=channel)
            sessions[what] = rk.Simulation().open(checked(job))
            sessions[what].init()
            sessions[what].advance(options.rounds)
        times = alternating(sessions, options)
        ratios = [b / a for a, b in zip(times["plain"], times["private"], strict=True)]
        before, after = (1e3 * min(times[what]) / options.rounds for what in channels)
        print(
            f"{name}: {before:.2f} ms a round, private {after:.2f} ms: {after / before:.2f} times as long "
            f"(median {statistics.median(ratios):.2f})",
            flush=True,
        )


def alternating(sessions: dict[str, Any], options: Any) -> dict[str, list[float]]:
    """The seconds of some rounds of each session, measured in turn."""
    order, times = np.random.default_rng(0), {what: [] for what in sessions}
    for _ in range(options.repeats):
        for what in order.permutation(list(sessions)):
            begin = time.perf_counter()
            sessions[what].advance(options.rounds)
            jax.block_until_ready(sessions[what].state)
            times[what].append(time.perf_counter() - begin)
    return times


if __name__ == "__main__":
    main()
