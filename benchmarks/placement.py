"""Compare rows on the host with rows on the device: python benchmarks/placement.py [--clients 1000] [--cohort 100].

FedNest and ASFBO with the FedNest paper's network (784-200-10) and 300 + 300 samples a client, the images as float32
and as bytes that the loss scales. The device may hold a fourth of the rows (--share). Both placements alternate in one
process, and the best time of several counts; "moved" is the transfer in a round, as a share of the cohort's rows.
"""

import argparse
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import rookery as rk
from rookery.cli import speed
from rookery.engines.engine import Job
from rookery.engines.streaming import staged
from rookery.tasks.hyperrep import hidden, layers, representation_problem


def main() -> None:
    """Compare both methods with both types."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--clients", type=int, default=1000)
    parser.add_argument("--cohort", type=int, default=100)
    parser.add_argument("--samples", type=int, default=speed.SAMPLES, help="of a client, at each level")
    parser.add_argument("--inputs", type=int, default=speed.INPUTS)
    parser.add_argument("--width", type=int, default=speed.WIDTH)
    parser.add_argument("--share", type=float, default=0.25, help="of the rows that may be on the device")
    parser.add_argument("--rounds", type=int, default=speed.rounds_at_once(), help="in one measurement")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--methods", nargs="*", default=["FedNest", "ASFBO"])
    parser.add_argument("--types", nargs="*", default=["float32", "uint8"])
    options = parser.parse_args()
    methods = {
        "FedNest": speed._paper_method(),
        "ASFBO": rk.ASFBO(local_steps=speed.LOCAL_STEPS[1], batch_size=speed.BATCH),
    }
    for kind in options.types:
        rows, sizes = _rows(options, kind), np.full(options.clients, options.samples)
        placed = {
            where: rk.Clients.from_arrays(rows[0], sizes, upper=(rows[1], sizes), placement=where)
            for where in ("device", "host")
        }
        total = sum(a.nbytes for a in jax.tree.leaves(rows))
        staged.BYTES = int(options.share * total)
        print(f"{kind}: {total / 1e9:.2f} GB of rows, {staged.BYTES / 1e9:.2f} GB of them on the device", flush=True)
        for name in options.methods:
            _compare(f"  {name}", methods[name], _problem(kind), placed, options, total)


def _compare(name: str, method: Any, problem: Any, placed: dict[str, rk.Clients], options: Any, total: int) -> None:
    start = layers(jax.random.key(0), options.inputs, options.width, speed.CLASSES)
    sessions: dict[str, Any] = {
        where: rk.Simulation().open(Job(problem, clients, method, start, options.cohort))
        for where, clients in placed.items()
    }
    for session in sessions.values():
        session.init()

    def rounds(session: Any) -> Any:
        session.advance(options.rounds)
        return session.state

    host = sessions["host"]
    rounds(host)  # fills the device, and compiles
    before, begin = host.moved, host.rounds
    best = speed.interleaved({where: partial(rounds, own) for where, own in sessions.items()}, options.repeats)
    device, other = (best[where] / options.rounds for where in ("device", "host"))
    moved = (host.moved - before) / (host.rounds - begin)
    share = moved / (total * options.cohort / options.clients)
    how = (
        f"moved {share:.0%} of the cohort's rows, {moved / other / 1e9:.1f} GB/s" if host.moved else "fetched in blocks"
    )
    print(
        f"{name}: {1e3 * device:.2f} ms a round on the device, {1e3 * other:.2f} ms on the host; {how}; "
        f"{device / other:.0%} of the speed",
        flush=True,
    )


def _rows(options: Any, kind: str) -> list[dict[str, np.ndarray]]:
    rng, total = np.random.default_rng(1), options.clients * options.samples

    def level() -> dict[str, np.ndarray]:
        images = rng.integers(256, size=(total, options.inputs), dtype=np.uint8)
        labels = rng.integers(speed.CLASSES, size=total, dtype=np.int32)
        return {"image": images if kind == "uint8" else images.astype(np.float32) / np.float32(255), "label": labels}

    return [level(), level()]


def _problem(kind: str) -> rk.Bilevel:
    plain = representation_problem()
    if kind == "float32":
        return plain
    scaled = lambda x, batch: hidden(x, {**batch, "image": batch["image"].astype(jnp.float32) / 255})
    return rk.Bilevel(plain.upper, plain.lower, features=scaled)


if __name__ == "__main__":
    main()
