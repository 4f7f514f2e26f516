"""What every script of this comparison shares: the tasks, their data, the clock and the machine's fingerprint.

Only NumPy and the standard library are needed here, because each script runs in its library's own environment.
"""

import argparse
import gzip
import hashlib
import importlib.metadata
import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

Client = tuple[np.ndarray, np.ndarray]  # images and labels


@dataclass(frozen=True)
class Task:
    """What is to be done, the same for everyone.

    Attributes:
        title: what it is.
        parameters: the size of the model, all levels together.
        clients, cohort: clients in all and in a round; 1 and 1 on a single machine.
        batch, steps: the samples of a minibatch, and the steps of a client in a round, at the lower level if there
            are two.
        rounds: rounds to run; on a single machine, steps of the upper level.
        every: rounds between two readings of the clock, each with an evaluation.
        target: the score to reach: the test accuracy, or on the quadratics -log10 of the squared hypergradient.
        step: of the steps of `steps`.
        ratio: what divides it to give the step of the upper level.
        near: how far apart the final scores may be.
    """

    title: str
    parameters: int
    clients: int
    cohort: int
    batch: int
    steps: int
    rounds: int
    every: int
    target: float
    step: float
    ratio: float = 1.0
    near: float = 0.02


COMPARED = ("parameters", "clients", "cohort", "batch", "steps", "rounds")  # what each script reports
TASKS = {
    "mlp": Task("FedAvg, MLP 784-200-10 on MNIST", 159_010, 100, 10, 60, 10, rounds=12, every=1, target=0.9, step=0.1),
    "cnn": Task("FedAvg, convolutional network", 1_626_442, 100, 10, 10, 5, rounds=12, every=1, target=0.9, step=0.03),
    "fednest": Task(
        "FedNest, hyper-representation", 159_010, 100, 10, 64, 40, rounds=4, every=1, target=0.25, step=0.01, near=0.2
    ),
    "stocbio": Task(
        "stocBiO, penalties on covertype", 385, 1, 1, 64, 10, rounds=500, every=50, target=0.7, step=0.0625, ratio=0.01
    ),
    "soba": Task(
        "SOBA, penalties on covertype", 385, 1, 1, 64, 1, rounds=5000, every=500, target=0.7, step=1.0, ratio=0.01
    ),
    "mrbo": Task(
        "MRBO, penalties on covertype", 385, 1, 1, 64, 1, rounds=2000, every=200, target=0.7, step=1.0, ratio=0.01
    ),
    "f2sa": Task("F2SA, quadratics", 110, 1, 1, 64, 10, rounds=100, every=10, target=-0.5, step=0.1, near=0.2),
    "saba": Task("SABA, quadratics", 110, 1, 1, 64, 1, rounds=500, every=50, target=0.0, step=0.1, near=0.2),
}


# What a script does around its library's work.


def arguments(*names: str) -> argparse.Namespace:
    """Return the command line of a script that does these tasks, with `task` as a `Task` and its name in `name`."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--task", choices=names, default=names[0])
    parser.add_argument("--data", type=Path, default=os.environ.get("ROOKERY_DATA", "data"))
    parser.add_argument("--code", type=Path, help="a clone of the code to run")
    options = parser.parse_args()
    options.name, options.task = options.task, TASKS[options.task]
    return options


class Clock:
    """Measures rounds, without the evaluations between them.

    Every `task.every` rounds the script calls `lap` with a function that returns the score. What a library does before
    its first round, such as compiling, counts as part of it: with `skip` the first call, at the start, ends no round.
    """

    def __init__(self, task: Task, skip: bool = False) -> None:
        self.task, self.skip = task, skip
        self.seconds: list[float] = []
        self.processors: list[float] = []
        self.scores: list[float] = []
        self._before = 0.0, 0.0
        self._begin = time.perf_counter(), processor_seconds()

    def lap(self, score: Callable[[], Any]) -> dict[str, float]:
        """End a round, or `task.every` of them, and evaluate."""
        elapsed, used = time.perf_counter() - self._begin[0], processor_seconds() - self._begin[1]
        found = float(score())
        if self.skip:
            self.skip, self._before = False, (elapsed, used)
        else:
            self.seconds.append(elapsed + self._before[0])
            self.processors.append(used + self._before[1])
            self.scores.append(found)
            self._before = 0.0, 0.0
        self._begin = time.perf_counter(), processor_seconds()
        return {"score": found}

    def print(self, packages: Sequence[str], **compared: int) -> None:
        """Print the measurements as a line of JSON."""
        versions = {name: importlib.metadata.version(name) for name in packages}
        found = {"seconds": self.seconds, "processors": self.processors, "scores": self.scores, "versions": versions}
        compared = {name: int(compared[name]) for name in COMPARED}
        print(json.dumps({**found, "machine": machine(), "compared": compared}))


def family(root: int) -> set[int]:
    """Return a process and its descendants."""
    parents, found = {}, {root}
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            parents[int(entry.name)] = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
        except OSError:  # it has ended
            continue
    while new := {pid for pid, parent in parents.items() if parent in found} - found:
        found |= new
    return found


def processor_seconds() -> float:
    """Return the processor time that this process and its descendants have used so far."""
    used = 0
    for pid in family(os.getpid()):
        try:
            used += sum(map(int, Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11:13]))
        except OSError:
            continue
    return used / os.sysconf("SC_CLK_TCK")


def machine() -> dict[str, Any]:
    """Return what tells this machine, its start and this run from others."""
    models = [
        line.split(":")[1].strip() for line in Path("/proc/cpuinfo").read_text().splitlines() if "model name" in line
    ]
    boot = Path("/proc/sys/kernel/random/boot_id").read_bytes()
    return {
        "cpu": models[0],
        "cores": len(os.sched_getaffinity(0)),
        "boot": hashlib.sha256(boot).hexdigest()[:12],
        "run": os.environ.get("PEERS_RUN", ""),
    }


# The data.


def mnist(folder: Path) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Return MNIST: training images and labels, test images and labels; images as rows, normalised."""

    def read(name: str, header: int) -> np.ndarray:
        with gzip.open(folder / "mnist" / f"{name}-ubyte.gz") as file:
            return np.frombuffer(file.read(), np.uint8)[header:]

    arrays = []
    for part in ("train", "t10k"):
        images = read(f"{part}-images-idx3", 16).reshape(-1, 784)
        arrays += [
            ((images / 255 - 0.1307) / 0.3081).astype(np.float32),
            read(f"{part}-labels-idx1", 8).astype(np.int32),
        ]
    return tuple(arrays)  # type: ignore[return-value]


def digits(folder: Path) -> tuple[list[Client], Client]:
    """MNIST dealt to 100 clients with 600 images each; and the test set."""
    images, labels, test, answers = mnist(folder)
    parts = np.random.default_rng(0).permutation(len(images)).reshape(100, 600)
    return [(images[p], labels[p]) for p in parts], (test, answers)


def patterns() -> tuple[list[Client], Client]:
    """100 clients with 50 images of 32×32×3 each, ten patterns in noise; and 1,000 test images."""
    rng = np.random.default_rng(0)
    known = rng.normal(size=(10, 32, 32, 3))

    def draw(number: int) -> Client:
        labels = rng.integers(0, 10, number).astype(np.int32)
        return (0.7 * known[labels] + rng.normal(size=(number, 32, 32, 3))).astype(np.float32), labels

    return [draw(50) for _ in range(100)], draw(1000)


def shards(folder: Path) -> tuple[list[tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]], Client]:
    """MNIST, sorted by label: two shards of 300 for each client, 480 images to train and 120 to validate."""
    images, labels, test, answers = mnist(folder)
    rng = np.random.default_rng(0)
    order = labels.argsort(kind="stable").reshape(200, 300)[rng.permutation(200)].reshape(100, 600)
    parts = rng.permuted(order, axis=1)
    return [(images[p[:480]], labels[p[:480]], images[p[480:]], labels[p[480:]]) for p in parts], (test, answers)


def table(folder: Path) -> np.ndarray:
    """Forest covers as published: 54 columns and the class, from 1 to 7."""
    with gzip.open(folder / "covtype" / "covtype.data.gz", "rt") as file:
        return np.fromstring(file.read().replace("\n", ","), np.int16, sep=",").reshape(-1, 55)


def covertype(folder: Path) -> dict[str, np.ndarray]:
    """Forest covers, standardised: x, y to train, x_val, y_val to validate and x_test, y_test; 64, 16 and 20 %."""
    rows = np.random.default_rng(0).permutation(table(folder))
    x, y = rows[:, :-1].astype(np.float32), rows[:, -1].astype(np.int32) - 1
    cuts = int(0.64 * len(x)), int(0.8 * len(x))
    mean, deviation = x[: cuts[0]].mean(0), x[: cuts[0]].std(0)
    found = {}
    for name, a, b in (("", 0, cuts[0]), ("_val", *cuts), ("_test", cuts[1], len(x))):
        found[f"x{name}"], found[f"y{name}"] = (x[a:b] - mean) / np.where(deviation > 0, deviation, 1), y[a:b]
    return found


def quadratics(code: Path) -> tuple[Any, Any, Callable[[Any, Any], float]]:
    """Return benchmark_bilevel's quadratics from a clone: the inner and outer samples, and the score of (x, z)."""
    sys.path.insert(0, str(code))
    import jax
    from benchmark_utils.gen_matrices import gen_matrices

    keys = jax.random.split(jax.random.PRNGKey(2442), 2)
    parts = [
        tuple(map(np.asarray, gen_matrices(n, 100, 10, 1.0, 1.0, 0.1, 0.1, key)))
        for n, key in zip((1024, 1024), keys, strict=True)
    ]
    (a, _, c, r, _), (f, h, k, s, t) = ([m.mean(0, dtype=float) for m in part] for part in parts)

    def score(x: Any, z: Any) -> float:
        x = np.asarray(x, float)
        solution = np.linalg.solve(a, -r - c.T @ x)
        adjoint = np.linalg.solve(a, f @ solution + k.T @ x + s)
        return float(-np.log10(np.sum((h @ x + k @ solution + t - c @ adjoint) ** 2)))

    return *parts, score
