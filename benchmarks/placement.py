"""Compare where rows are: python benchmarks/placement.py [--placements device host pinned] [--clients 1000].

FedNest and ASFBO with the FedNest paper's network (784-200-10) and 300 + 300 samples a client, the images as float32
and as bytes that the loss scales. The device may hold a fourth of the rows (--share). All placements alternate in one
process, and the best time of several counts. With rows on the host, "moved" is the transfer in a round, as a share of
the cohort's rows; pinned rows are read by the rounds' own program, all of the cohort's in every round, and "reading"
is that part alone. A placement that fails is reported, and the others are measured without it.
"""

import argparse
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import rookery as rk
from rookery.base.placement import PLACES
from rookery.cli import speed
from rookery.engines.engine import Job
from rookery.tasks.hyperrep import hidden, layers, representation_problem


def main() -> None:
    """Compare both methods with both types."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--placements", nargs="+", choices=PLACES, default=list(PLACES))
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
    device = jax.local_devices()[0]
    print(f"JAX {jax.__version__}, {device.device_kind} ({device.platform})", flush=True)
    for kind in options.types:
        rows, sizes = _rows(options, kind), np.full(options.clients, options.samples)
        total = sum(a.nbytes for a in jax.tree.leaves(rows))
        most = int(options.share * total)
        print(f"{kind}: {total / 1e9:.2f} GB of rows, {most / 1e9:.2f} GB of them on the device", flush=True)
        make = lambda where, rows, sizes: rk.Clients.from_arrays(
            rows[0], sizes, upper=(rows[1], sizes), placement=where
        )
        placed = _each(options.placements, "  making clients", lambda where: make(where, rows, sizes))
        for name in options.methods:
            _compare(f"  {name}", methods[name], _problem(kind), placed, options, total, most)


def _each(names: Any, what: str, work: Callable[[str], Any]) -> dict[str, Any]:
    """What `work` returns for each name. A failure is printed."""
    made = {}
    for name in names:
        try:
            made[name] = work(name)
        except Exception as error:
            print(f"{what}, {name}: FAILED: {type(error).__name__}: {str(error).partition(chr(10))[0]}", flush=True)
    return made


def _compare(
    name: str, method: Any, problem: Any, placed: dict[str, rk.Clients], options: Any, total: int, most: int
) -> None:
    start = layers(jax.random.key(0), options.inputs, options.width, speed.CLASSES)
    engine = rk.Simulation(device_bytes=most)

    def rounds(session: Any) -> Any:
        session.advance(options.rounds)
        return session.state

    def opened(where: str) -> Any:
        session: Any = engine.open(Job(problem, placed[where], method, start, options.cohort))
        session.init()
        jax.block_until_ready(rounds(session))  # compiles, and fills the device
        return session

    sessions = _each(placed, name, opened)
    before = {where: (getattr(session, "moved", 0), session.rounds) for where, session in sessions.items()}
    try:
        best = speed.interleaved({where: partial(rounds, own) for where, own in sessions.items()}, options.repeats)
    except Exception as error:  # of whichever; so each by itself
        print(f"{name}, in turn: FAILED: {type(error).__name__}: {str(error).partition(chr(10))[0]}", flush=True)
        alone = lambda where: speed.interleaved({where: partial(rounds, sessions[where])}, options.repeats)[where]
        best = _each(sessions, f"{name}, alone", alone)
    reference = best.get("device")
    for where, seconds in best.items():
        each = seconds / options.rounds
        words = [f"{1e3 * each:.2f} ms a round"]
        if where != "device" and reference is not None:
            words.append(f"{reference / seconds:.0%} of the speed on the device")
        if where == "host":
            words.append(_moved(sessions[where], before[where], each, total * options.cohort / options.clients))
        if where == "pinned":
            words += _each([where], name, lambda _: _reading(sessions["pinned"], options)).values()
        print(f"{name}, {where}: {'; '.join(words)}", flush=True)
    states = {where: jax.device_get((own.state.x, own.state.y)) for where, own in sessions.items() if where in best}
    _agreement(name, states, {where: sessions[where].rounds for where in states})
    for session in sessions.values():
        session.close()


def _moved(session: Any, before: tuple[int, int], seconds: float, of_cohort: float) -> str:
    moved = (session.moved - before[0]) / max(1, session.rounds - before[1])
    if not session.moved:
        return "fetched in blocks"
    return f"moved {moved / of_cohort:.0%} of the cohort's rows, {moved / seconds / 1e9:.1f} GB/s"


def _reading(session: Any, options: Any) -> str:
    """How long the program takes to read a cohort's rows, and do nothing else."""
    if not session.cohort_bytes:
        return "read in blocks"
    data, repeats = session._cohort, 20
    rng = np.random.default_rng(0)
    cohorts = [np.sort(rng.choice(options.clients, options.cohort, replace=False)) for _ in range(repeats)]
    ids = jnp.asarray(np.array(cohorts, np.int32))
    leaves = lambda clients: [data.rows for data in clients.levels().values() if data is not None]
    read = jax.jit(lambda data, ids: leaves(data.cohort(ids)))

    def all_of_them() -> Any:
        for i in range(repeats):
            made = read(data, ids[i])
        return made

    seconds = speed.interleaved({"reading": all_of_them}, 3)["reading"] / repeats
    rate = f"{session.cohort_bytes / seconds / 1e9:.1f} GB/s"
    return f"reading {session.cohort_bytes / 1e6:.0f} MB takes {1e3 * seconds:.2f} ms of it ({rate})"


def _agreement(name: str, states: dict[str, Any], rounds: dict[str, int]) -> None:
    """Print how far results differ, for placements that have computed as many rounds."""
    for where, state in states.items():
        if where != "device" and "device" in states and rounds[where] == rounds["device"]:
            pairs = zip(jax.tree.leaves(state), jax.tree.leaves(states["device"]), strict=True)
            worst = max(float(np.max(np.abs(a - b))) for a, b in pairs)
            print(f"{name}, {where}: x and y differ by at most {worst:.1e} after {rounds[where]} rounds", flush=True)


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
