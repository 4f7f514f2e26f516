"""A million clients of 8 samples of 33 numbers: python benchmarks/clients.py [--clients 1000000] [--cohort 1000].

Least squares by FedAvg (two local steps on minibatches of four) and by Scaffold, Ditto and FedBiOLocal, whose clients
remember 32 numbers each; clients with 8 samples, and with 1 to 8. Each line is measured in a separate process:

- building: the seconds that `rk.Clients.from_arrays` takes for existing arrays.
- a round of the cohort: FedAvg and Scaffold, alternating with a federation of 10,000 clients; the best of thirty
  measurements of ten rounds.
- with checkpoints: 400 rounds by `rk.solve`, saved every 20, from the first evaluation to the last; every save is made,
  however long it takes. Alternating, the best of two.
- memory: the peak of resident memory, minus the memory before `from_arrays` (the interpreter, JAX, and the user's
  arrays), divided by the bytes of those arrays; after building, and after ten rounds. The compiler's share is what ten
  rounds with 10,000 clients take beyond their data. On an accelerator: the peak of its bytes in use.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import jax
import numpy as np

import rookery as rk
from rookery.engines import checkpoints
from rookery.engines.engine import Job

SAMPLES, WIDTH, FEW, ROUNDS, EVERY = 8, 33, 10_000, 400, 20
STEPS: dict[str, Any] = {"local_steps": 2, "batch_size": 4}
METHODS = {
    "FedAvg": rk.FedAvg(step=0.01, **STEPS),
    "Scaffold": rk.Scaffold(step=0.01, **STEPS),
    "Ditto": rk.Ditto(step=0.01, personal_step=0.01, personal_steps=2, **STEPS),
    "FedBiOLocal": rk.FedBiOLocal(upper_step=0.01, lower_step=0.01, **STEPS),
}


def main() -> None:
    """Measure everything, or one part."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--clients", type=int, default=1_000_000)
    parser.add_argument("--cohort", type=int, default=1000)
    parser.add_argument("--unequal", action="store_true", help="1 to 8 samples")
    parser.add_argument("--method", choices=METHODS, default="FedAvg")
    parser.add_argument("--part", choices=("resident", "rounds", "checkpoints"))
    options = parser.parse_args()
    if options.part is not None:
        part = {"resident": _resident, "rounds": _rounds, "checkpoints": _checkpoints}[options.part]
        print(json.dumps(part(options.clients, options.cohort, options.unequal, options.method)))
        return
    for unequal in (False, True):
        print(f"{options.clients:,} clients of {'1 to ' if unequal else ''}{SAMPLES} samples", flush=True)
        for method in METHODS:
            many, few = (_part("resident", options, n, unequal, method) for n in (options.clients, FEW))
            compiler = few["run"] - few["data"]
            print(
                f"  {method}: built in {many['seconds']:.1f} s; {many['data'] / 1e9:.2f} GB of data, memory "
                f"{many['built'] / many['data']:.2f} x when built, {many['run'] / many['data']:.2f} x after ten "
                f"rounds, {(many['run'] - compiler) / many['data']:.2f} x without the compiler's; init "
                f"{many['init']:.1f} s",
                flush=True,
            )
            turns = _part("rounds", options, options.clients, unequal, method)
            print(
                f"  {method}: a round of {options.cohort} {turns['many']:.2f} ms, of {FEW:,} clients "
                f"{turns['few']:.2f} ms: {turns['many'] / turns['few']:.2f} x",
                flush=True,
            )
            if method == "FedAvg":  # its clients remember nothing
                continue
            turns = _part("checkpoints", options, options.clients, unequal, method)
            print(
                f"  {method}: a round with a checkpoint every {EVERY} {turns['many']:.2f} ms, of {FEW:,} clients "
                f"{turns['few']:.2f} ms: {turns['many'] / turns['few']:.2f} x",
                flush=True,
            )


def _part(name: str, options: Any, clients: int, unequal: bool, method: str) -> dict[str, float]:
    words = [f"--part={name}", f"--clients={clients}", f"--cohort={options.cohort}", f"--method={method}"]
    words += ["--unequal"] if unequal else []
    done = subprocess.run([sys.executable, __file__, *words], stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(done.stdout)


def _arrays(clients: int, unequal: bool) -> tuple[Any, np.ndarray]:
    rng = np.random.default_rng(0)
    sizes = rng.integers(1, SAMPLES + 1, clients) if unequal else np.full(clients, SAMPLES)
    total = int(sizes.sum())
    return {"a": rng.random((total, WIDTH - 1), np.float32), "t": rng.random(total, np.float32)}, sizes


def _problem(method: str) -> tuple[Any, Any]:
    """Return the problem, and the x and y to start from."""
    start = np.zeros(WIDTH - 1, np.float32)
    if method != "FedBiOLocal":
        return rk.SingleLevel(lambda x, rows: jax.numpy.mean((rows["a"] @ x - rows["t"]) ** 2)), (start, ())
    upper = lambda x, y, rows: jax.numpy.mean((rows["a"] @ (x + y) - rows["t"]) ** 2)
    lower = lambda x, y, rows: upper(x, y, rows) + 0.1 * jax.numpy.sum(y**2)
    return rk.Bilevel(upper, lower, lower_scope="client"), (start, start)


def _session(clients: rk.Clients, cohort: int, method: str) -> Any:
    problem, start = _problem(method)
    return rk.Simulation().open(Job(problem, clients, METHODS[method], start, cohort))


def _checkpoints(count: int, cohort: int, unequal: bool, method: str) -> dict[str, float]:
    """Return the milliseconds of a round, checkpoints included."""
    import orbax.checkpoint  # noqa: F401, not to be timed

    checkpoints.SHARE = 1e9
    (problem, start), best = _problem(method), {"many": np.inf, "few": np.inf}
    clients = {name: rk.Clients.from_arrays(*_arrays(n, unequal)) for name, n in (("many", count), ("few", FEW))}
    for name in ["few", "many"] * 2:
        stamps: list[float] = []
        evaluate = lambda x, y, stamps=stamps: {"x": float(x[0]), "stamp": stamps.append(time.perf_counter()) or 0.0}
        with tempfile.TemporaryDirectory() as folder:
            rk.solve(
                problem, clients[name], METHODS[method], start if method == "FedBiOLocal" else start[0], ROUNDS,
                cohort=cohort, every=EVERY, evaluate=evaluate, checkpoint=folder, progress=False,
            )  # fmt: skip
        best[name] = min(best[name], (stamps[-1] - stamps[1]) / (ROUNDS - EVERY))  # the first call compiles
    return {name: 1e3 * seconds for name, seconds in best.items()}


def _resident(count: int, cohort: int, unequal: bool, method: str) -> dict[str, float]:
    """Return the seconds and bytes of building, of the start and of ten rounds."""
    rows, sizes = _arrays(count, unequal)
    jax.block_until_ready(jax.jit(lambda a: a + 1)(np.zeros(3)))  # starts JAX
    before = _bytes("VmRSS")
    begin = time.perf_counter()
    clients = jax.block_until_ready(rk.Clients.from_arrays(rows, sizes))
    seconds, built = time.perf_counter() - begin, _bytes("VmHWM") - before
    session = _session(clients, cohort, method)
    begin = time.perf_counter()
    session.init()
    started = time.perf_counter() - begin
    session.advance(10)
    data = sum(a.nbytes for a in rows.values())
    return {"seconds": seconds, "data": data, "built": built, "init": started, "run": _bytes("VmHWM") - before}


def _bytes(name: str) -> int:
    """Return this process's resident memory, current (VmRSS) or peak (VmHWM); an accelerator's if there is one."""
    if jax.default_backend() != "cpu":
        return jax.local_devices()[0].memory_stats()["bytes_in_use" if name == "VmRSS" else "peak_bytes_in_use"]
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith(name))


def _rounds(count: int, cohort: int, unequal: bool, method: str) -> dict[str, float]:
    """Return the milliseconds of a round, measured alternately."""
    sessions = {
        name: _session(rk.Clients.from_arrays(*_arrays(n, unequal)), cohort, method)
        for name, n in (("many", count), ("few", FEW))
    }
    times: dict[str, list[float]] = {name: [] for name in sessions}
    for turn in range(31):
        for name, session in sessions.items():
            if not turn:
                session.init()
            begin = time.perf_counter()
            session.advance(10)
            times[name].append((time.perf_counter() - begin) / 10)
    return {name: 1e3 * min(own[1:]) for name, own in times.items()}


if __name__ == "__main__":
    main()
