"""Run the experiments on robust means and compression side by side: many cells and seeds in one compiled program.

    python benchmarks/channels.py run FOLDER --seconds 500     # the search, and the runs with the values it chooses
    python benchmarks/channels.py choose FOLDER                # what the search chose: chosen.csv
    python benchmarks/channels.py store FOLDER RUNS            # the runs, where `rookery reproduce` finds them

`run` starts several processes with two threads each, which take the programs in turn, the most important first. They
write a line for each finished run, so that little is lost where the time is up, and continue from those they find. Runs
of one program differ in their steps, their seed, who lies and how, and the radius of clipping. A run equals that of
`rookery reproduce` up to rounding.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from threading import Lock
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import pandas as pd

from rookery.base import draws
from rookery.channels import attacks
from rookery.channels.attacks import _Attack, _moments
from rookery.channels.robust import CenteredClipping
from rookery.engines import engine
from rookery.engines.checks import start_values
from rookery.engines.engine import Job
from rookery.engines.simulation import device
from rookery.engines.simulation.device import Program
from rookery.experiments import channels
from rookery.experiments.channels import compression, liars, shared, unlike
from rookery.experiments.machinery import Config, Grid
from rookery.experiments.machinery.one_run import describe, fingerprint, run_path, runs_folder, write
from rookery.language import hyperparameters
from rookery.language.channel import Faults
from rookery.plan import trace
from rookery.plan.costs import costs, counted_loops
from rookery.run.arguments import checked

LANES, FEW_LANES = 30, 10  # runs side by side: of robust means, and with compression
SPARE = 20  # seconds before the end after which no program is begun

# The tasks.

TASKS = Lock()


def task_of(config: Config, data_dir: Any) -> Any:
    """The task. Its data do not depend on the seed, and it is made once."""
    with TASKS:
        return _made(config.task, tuple(config.settings.items()), data_dir)


@cache
def _made(make: Any, settings: tuple[tuple[str, Any], ...], data_dir: Any) -> Any:
    return make(seed=0, **dict(settings), data_dir=data_dir)


EVALUATIONS: dict[int, Callable[..., Any]] = {}


def evaluation(task: Any) -> Callable[..., Any]:
    """The evaluation of many runs at once."""
    return EVALUATIONS.setdefault(id(task), jax.jit(jax.vmap(task.evaluate)))


# One program for all attacks: who lies, how, and the radius of clipping are arrays, and so constants of its plan.

KINDS = ("sign flip", "a little", "inner product", "mimic")


@dataclass(frozen=True)
class AnyAttack(_Attack):
    """Any of KINDS. `attackers`: whether each client lies, and then the kind."""

    knows_all: ClassVar[bool] = True

    def __post_init__(self) -> None:
        pass

    def check(self, n: int) -> None:
        """All is well."""

    def liars(self, n: int, key: Any = None) -> Any:
        """See `attacks`."""
        return jnp.asarray(self.attackers)[:n] > 0.5

    def together(self, rows: list[Any], honest: Any, liars: Any, ids: Any) -> list[Any]:
        """See `attacks`."""
        kind = jnp.asarray(self.attackers)[-1]
        first = jnp.argmin(jnp.where(honest, ids, jnp.iinfo(ids.dtype).max))

        def one(a: Any) -> Any:
            mean, deviation = _moments(a, honest)
            lies = (-shared.SCALE * a, mean - shared.Z * deviation, -shared.EPSILON * mean, a[first])
            return jnp.select([kind == k for k in range(len(KINDS))], [jnp.broadcast_to(own, a.shape) for own in lies])

        return [one(a) for a in rows]


def attack_of(config: Config) -> np.ndarray:
    """The array that `AnyAttack` takes; nobody lies where labels are flipped, or without an attack."""
    n = config.settings["clients"]
    name, share = config.labels["attack"], config.labels["share"]
    if name not in KINDS:
        return np.zeros(n + 1, np.float32)
    return np.append(attacks.SignFlip(share).liars(n), KINDS.index(name)).astype(np.float32)


def labels_of(config: Config, clients: Any) -> list[np.ndarray]:
    """The labels of both levels, changed where clients lie about them."""
    found = []
    share = config.labels["share"] if config.labels.get("attack") == "labels" else 0.0
    for level in (clients.lower, clients.upper):
        labels = np.asarray(level.rows["label"])
        lies = np.repeat(attacks.SignFlip(share).liars(clients.n), np.asarray(level.sizes))
        found.append(np.where(lies, 9 - labels, labels).astype(labels.dtype))
    return found


# Runs side by side.


class Lanes:
    """Runs of one method with one rule or compressor, side by side.

    Arguments:
        config: one of their configurations.
        count: how many run side by side.
    """

    def __init__(self, config: Config, count: int, data_dir: Any) -> None:
        self._count, self._data_dir = count, data_dir
        self._robust = "rule" in config.labels
        mark = np.random.default_rng(0).random(config.settings["clients"] + 1).astype(np.float32)
        radius = np.array([0.7071], np.float32)
        changes: dict[str, Any] = {}
        if self._robust:
            changes["faults"] = Faults(attack=AnyAttack(jnp.asarray(mark)))
        if isinstance(config.channel, CenteredClipping):
            own = config.channel
            changes["channel"] = CenteredClipping(own.attackers, jnp.asarray(radius), own.iterations)  # type: ignore[arg-type]
        self._plan = self._traced(config.but(**changes))
        places = lambda value: [i for i, c in enumerate(self._plan.round.consts) if np.array_equal(c, value)]
        self._attack, self._radius = places(mark), places(radius)
        assert len(self._attack) == self._robust
        assert len(self._radius) == ("channel" in changes)
        data = self._plan.job.clients.without_names()
        self._structure = jax.tree.structure(data)
        axes = [None if place is None else 0 for place in label_places(data)]
        program = Program(self._plan.round, data, self._plan.job.cohort)
        self._advance = engine.compiled(
            self._plan.round,
            partial(_advance, program, self._plan.job.draw, self._structure, self._varies(), tuple(axes)),
            donate_argnums=3,
        )
        starts = Program(self._plan.start, data, "auto")
        self._start = engine.compiled(self._plan.start, partial(device.start, starts))

    def _traced(self, config: Config) -> engine.Traced:
        task = task_of(config, self._data_dir)
        job = Job(
            task.problem, task.clients, config.algorithm, task.init, config.cohort, channel=config.channel,
            faults=config.faults,
        )  # fmt: skip
        return engine.traced(checked(job, config.rounds))

    def _varies(self) -> list[bool]:
        """Which constants of the plan have a row for each run."""
        return [i in (*self._attack, *self._radius) for i in range(len(self._plan.round.consts))]

    def _consts(self, configs: Sequence[Config]) -> list[Any]:
        found = list(self._plan.round.consts)
        for place in self._attack:
            found[place] = jnp.stack([attack_of(config) for config in configs])
        for place in self._radius:
            found[place] = jnp.array([[config.channel.radius] for config in configs], jnp.float32)
        return found

    def _hyper(self, config: Config) -> Any:
        return trace.with_levels(config.channel, hyperparameters.split(config.algorithm).traced)

    def _begin(self, task: Any, data: Any, config: Config, seed: int) -> Any:
        """The carry before the first round."""
        begin = start_values(task.problem, task.clients, shared.start(task, config, seed))
        root = engine.noise_root(replace(self._plan.job, noise_seed=seed))
        consts = self._plan.start.consts
        return self._start(consts, data, self._hyper(config), begin, draws.seed_key(seed), root)[0]

    def _data(self, task: Any, configs: Sequence[Config]) -> list[Any]:
        """The arrays of the clients' data, with a row of labels for each run."""
        data = task.clients.without_names()
        each = [labels_of(config, task.clients) for config in configs]
        stacked = [jnp.stack([jnp.asarray(own[level]) for own in each]) for level in (0, 1)]
        leaves, places = jax.tree.leaves(data), label_places(data)
        return [leaf if place is None else stacked[place] for leaf, place in zip(leaves, places, strict=True)]

    def run(self, runs: Sequence[tuple[Config, int]]) -> list[list[dict[str, float]]]:
        """The history of each run: its metrics at every evaluation."""
        assert len(runs) <= self._count
        began, padded = time.perf_counter(), [*runs, *[runs[-1]] * (self._count - len(runs))]
        configs, config = [config for config, _ in padded], runs[0][0]
        task = task_of(config, self._data_dir)
        whole = task.clients.without_names()
        data = self._data(task, configs)
        consts, hyper = self._consts(configs), _stacked([self._hyper(own) for own in configs])
        carry = _stacked([self._begin(task, whole, *each) for each in padded])
        seeds = jnp.stack([draws.seed_key(seed) for _, seed in padded])
        histories: list[list[dict[str, float]]] = [[] for _ in runs]
        done = 0
        while True:
            values = jax.device_get(evaluation(task)(carry.state.x, carry.state.y))
            seconds = round((time.perf_counter() - began) / len(runs), 3)
            for k, history in enumerate(histories):
                metrics = {name: float(f"{v[k]:.6g}") for name, v in values.items()}
                history += [{"round": done, "seconds": seconds, **metrics, **self._costs(done, config)}]
            if done == config.rounds:
                return histories
            step = min(config.every, config.rounds - done)
            carry = self._advance(consts, data, hyper, carry, seeds, done, step)
            done += step

    def fit(self, config: Config) -> bool:
        """Whether the clients of a configuration have as many samples as those of this program."""
        return jax.tree.structure(task_of(config, self._data_dir).clients.without_names()) == self._structure

    def _costs(self, rounds: int, config: Config) -> dict[str, int]:
        """The exchanges and bytes so far; not counted for robust means."""
        if self._robust:
            return {}
        counted = {"exchanges": 0, "bytes_up": 0, "bytes_down": 0}
        for plan, times in ((self._plan.start, 1), (self._plan.round, rounds)):
            assert not counted_loops(plan.body)
            for entry in costs(plan, ()).values():
                counted["exchanges"] += times * entry.count
                counted["bytes_up"] += times * entry.up * config.settings["clients"]
                counted["bytes_down"] += times * entry.down * config.settings["clients"]
        return counted


def label_places(data: Any) -> list[int | None]:
    """For each array of the clients' data, the level whose labels it has; None: other data."""
    labels = [data.lower.rows["label"], data.upper.rows["label"]]
    which = lambda leaf: next((i for i, own in enumerate(labels) if own is leaf), None)
    return [which(leaf) for leaf in jax.tree.leaves(data)]


def _advance(
    program: Program, draw: Any, structure: Any, varies: list[bool], axes: tuple[Any, ...], consts: Any, data: Any,
    hyper: Any, carry: Any, seeds: Any, begin: Any, rounds: Any,
) -> Any:  # fmt: skip
    def one(consts: Any, leaves: Any, hyper: Any, carry: Any, seed: Any, t: Any) -> Any:
        clients = jax.tree.unflatten(structure, leaves)
        ids, before, after, _ = device.one_round(program, draw, consts, clients, hyper, carry, t, seed)
        return device.put(program, clients.n, carry, ids, before, after, True)

    each = jax.vmap(one, ([0 if own else None for own in varies], list(axes), 0, 0, 0, None))
    begin = jnp.asarray(begin, jnp.int32)
    turn = lambda t, carries: each(consts, data, hyper, carries, seeds, t)
    return jax.lax.fori_loop(begin, begin + rounds, turn, carry)


def _stacked(each: list[Any]) -> Any:
    return jax.tree.map(lambda *leaves: jnp.stack([jnp.asarray(leaf) for leaf in leaves]), *each)


# What is run.

Key = tuple[str, str, str]  # the task, the method, and the rule or compressor
NAMES = {experiment.name: experiment for experiment in channels.EXPERIMENTS}


def programs(quick: bool) -> list[tuple[str, Key]]:
    """All programs, the most important first; each belongs to robust means or to compression."""
    robust, small = liars.programs(quick), compression.programs(quick)
    first = [key for key in robust if key[2] in shared.RULES[:3] and key[1] != shared.EXTRA]
    learn = [key for key in small if key[0] == liars.LEARN]
    rest = [key for key in robust if key not in first]
    important = [key for key in rest if key[2] == liars.RECOMMENDED and key[1] != shared.EXTRA]
    means = [key for key in rest if key[2] == "mean"]
    rest = [key for key in rest if key not in (*important, *means)]
    of = lambda keys, kind: [(kind, key) for key in keys]
    return [
        *of(first, "robust"),
        *of(important, "robust"),
        *of(learn[: len(learn) // 2], "bytes"),
        *of(rest[: len(rest) // 2], "robust"),
        *of(means, "robust"),
        *of(learn[len(learn) // 2 :], "bytes"),
        *of(rest[len(rest) // 2 :], "robust"),
        *of([key for key in small if key not in learn], "bytes"),
    ]


class Worker:
    """One process of several.

    Arguments:
        folder: where the lines are.
        among: where the processes leave word for one another: what is taken, what was chosen, and what failed.
        number: of this process.
        deadline: when to stop, in seconds as `time.time` counts them.
        only: tasks, methods or rules; programs with none of them are left out.
    """

    def __init__(
        self, folder: Path, among: Path, number: int, deadline: float, data_dir: Any, quick: bool, only: Sequence[str]
    ) -> None:
        self._folder, self._among, self._number, self._deadline = folder, among, number, deadline
        self._data_dir, self._quick, self._only, self._lock = data_dir, quick, only, Lock()
        self._done = stored(folder)

    def work(self) -> None:
        """Take programs until all are taken or the time is up."""
        waiting = [own for own in programs(self._quick) if not self._only or set(own[1]) & set(self._only)]
        while waiting and time.time() < self._deadline - SPARE:
            ready = [own for own in waiting if self._ready(*own)]
            if not ready:
                time.sleep(0.2)
                over = lambda kind, key: (
                    self._claim(kind, key).exists() or self._failed("robust", (*key[:2], "mean")).exists()
                )
                waiting = [own for own in waiting if not over(*own)]
                continue
            waiting.remove(ready[0])
            try:
                self._claim(*ready[0]).open("x").close()
            except FileExistsError:
                continue
            try:
                self._run(*ready[0])
            except Exception:
                self._failed(*ready[0]).open("w").close()
                print(f"{ready[0]} failed:", file=sys.stderr)
                traceback.print_exc()
                sys.stderr.flush()

    def _claim(self, kind: str, key: Key) -> Path:
        return self._among / "claims" / "-".join([kind, *key]).replace(" ", "_").replace("%", "")

    def _failed(self, kind: str, key: Key) -> Path:
        return self._among / "failed" / self._claim(kind, key).name

    def _ready(self, kind: str, key: Key) -> bool:
        """Whether the search that it needs is done."""
        return key[2] == "mean" or self._choice(liars.NAME, (*key[:2], "mean")).exists()

    def _choice(self, experiment: str, key: Key) -> Path:
        return self._among / "choices" / "-".join([experiment, *key]).replace(" ", "_").replace("%", "")

    def _chosen(self, experiment: str, key: Key) -> list[float]:
        """What the search chose, as soon as it has."""
        path = self._choice(experiment, key)
        while not path.exists():
            if time.time() > self._deadline or self._failed("robust", (*key[:2], "mean")).exists():
                raise TimeoutError(f"{path.name} was not searched.")
            time.sleep(0.2)
        found: list[float] = json.loads(path.read_text())
        return found

    def _run(self, kind: str, key: Key) -> None:
        (self._robust if kind == "robust" else self._compressed)(key)

    def _robust(self, key: Key) -> None:
        """All runs of a method with a rule: the search first, where it has one."""
        task, method, rule = key
        lanes: list[Lanes] = []
        for name, differ, cells in ((liars.NAME, False, liars.CELLS), (unlike.NAME, True, unlike.CELLS)):
            if self._quick:
                cells = unlike.QUICK if differ else liars.QUICK
            radius = 1.0
            if rule == "mean":
                search = shared.step_search(self._quick, differ, task, method)
                self._search(name, key, shared.GRID, search, lanes, LANES)
            steps = self._chosen(name, (task, method, "mean"))
            if rule == "clipping":
                search = shared.radius_search(self._quick, differ, task, method, steps)
                self._search(name, key, shared.GRID, search, lanes, LANES)
                (radius,) = self._chosen(name, key)
            configs = [shared.attacked(self._quick, differ, *key, cell, steps, radius) for cell in cells]
            self._runs(name, configs, lanes, LANES)

    def _compressed(self, key: Key) -> None:
        """All runs of a method with a compressor, the search first."""
        name, grid = compression.NAME, compression.compression.grid
        assert grid is not None
        steps, lanes = self._chosen(liars.NAME, (*key[:2], "mean")), list[Lanes]()
        self._search(name, key, grid, compression.factor_search(self._quick, key, steps), lanes, FEW_LANES)
        (factor,) = self._chosen(name, key)
        self._runs(name, [compression.compressed(self._quick, *key, steps, factor)], lanes, FEW_LANES)

    def _search(
        self, name: str, key: Key, grid: Grid, search: list[Config], lanes: list[Lanes], count: int
    ) -> None:  # fmt: skip
        """Run a search and write down what it chooses."""
        rows = self._runs(name, search, lanes, count)
        best = grid.best(pd.DataFrame([{**row, **row["history"][-1]} for row in rows]))[key]
        write(self._choice(name, key), json.dumps(list(best.values())))

    def _runs(self, name: str, configs: Iterable[Config], lanes: list[Lanes], count: int) -> list[dict[str, Any]]:
        """Run the configurations that are missing; return the lines of all."""
        every = [(config, seed) for config in configs for seed in config.seeds]
        done = lambda config, seed: self._done.get((name, config.name, seed), {}).get("made") == made_by(config)
        wanted = [pair for pair in every if not done(*pair)]
        for at in range(0, len(wanted), count):
            began, some = time.perf_counter(), wanted[at : at + count]
            if not lanes or not lanes[0].fit(some[0][0]):
                lanes[:] = [Lanes(some[0][0], count, self._data_dir)]
            made = time.perf_counter()
            for (config, seed), history in zip(some, lanes[0].run(some), strict=True):
                row = {"experiment": name, "run": config.name, **config.labels, "seed": seed, "made": made_by(config)}
                self._done[name, config.name, seed] = row | {"history": history}
            with self._lock, (self._folder / f"lines-{self._number}.jsonl").open("a") as file:
                rows = [self._done[name, config.name, seed] for config, seed in some]
                file.write("".join(json.dumps(row) + "\n" for row in rows))
            words = f"{made - began:.1f} s tracing, {time.perf_counter() - made:.1f} s in all the rest"
            print(f"{time.time() - self._deadline:.0f} {name}, {some[0][0].name}: {len(some)}, {words}", flush=True)
        return [self._done[name, config.name, seed] for config, seed in every]


def made_by(config: Config) -> Any:
    """What distinguishes runs of one name: the values chosen."""
    return json.loads(json.dumps(describe([config.algorithm, config.channel, config.faults])))


def stored(folder: Path) -> dict[tuple[str, str, int], dict[str, Any]]:
    """The lines in a folder, by experiment, run and seed."""
    found = {}
    for path in sorted(folder.glob("lines-*.jsonl")):
        for line in path.read_text().splitlines():
            try:
                row = json.loads(line)
            except json.JSONDecodeError:  # cut off
                continue
            found[row["experiment"], row["run"], row["seed"]] = row
    return found


# The commands.


def run(folder: Path, seconds: float, workers: int, threads: int, options: Sequence[str]) -> None:
    """Start the processes, and end them when the time is up. `folder` gets a file of lines for each, and a log."""
    deadline = time.time() + seconds
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as among, (folder / "log.txt").open("a") as log:
        for name in ("claims", "choices", "failed"):
            (Path(among) / name).mkdir()
        command = [sys.executable, __file__, "work", str(folder), among, "--deadline", str(deadline)]
        command += ["--threads", str(threads), *options]
        start = lambda number: subprocess.Popen([*command, "--number", str(number)], stdout=log, stderr=log)
        processes = [start(number) for number in range(workers)]
        for process in processes:
            try:
                process.wait(max(0.0, deadline - time.time()))
            except subprocess.TimeoutExpired:
                process.kill()
        for process in processes:
            process.wait()
    print(f"{len(stored(folder))} runs, {time.time() - deadline + seconds:.0f} s.")


def work(worker: Worker, threads: int) -> None:
    """One process: its threads take programs in turn."""
    with ThreadPoolExecutor(threads) as pool:
        for finished in [pool.submit(worker.work) for _ in range(threads)]:
            finished.result()


def choose(folder: Path) -> None:
    """Print what the search chose."""
    rows = [row for row in stored(folder).values() if row["run"].startswith("search: ")]
    print("experiment,task,method,channel,first,second")
    for name, experiment in NAMES.items():
        own = pd.DataFrame([{**row, **row["history"][-1]} for row in rows if row["experiment"] == name])
        if len(own) and experiment.grid is not None:
            for key, values in sorted(experiment.grid.best(own).items()):
                both = [f"{value:g}" for value in values.values()]
                print(name, *key, *both, *[""] * (2 - len(both)), sep=",")


def store(folder: Path, to: Path, quick: bool) -> None:
    """Write the runs where `rookery reproduce NAME --out TO/NAME` finds them."""
    done = stored(folder)
    for name, experiment in NAMES.items():
        missing = []
        for config in [*experiment.runs(quick), *(experiment.search(quick) if experiment.search else [])]:
            for seed in config.seeds:
                row = done.get((name, config.name, seed), {})
                if row.get("made") != made_by(config):
                    missing.append(f"{config.name}, seed {seed}")  # or with other values
                    continue
                where = run_path(runs_folder(experiment, to / name), config, seed, fingerprint(config, seed))
                write(where, pd.DataFrame(row["history"]).to_csv(index=False))
        print(f"{name}: {len(missing)} runs are missing.", *missing[:20], sep="\n")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=("run", "work", "choose", "store"))
    parser.add_argument("paths", nargs="+", type=Path)
    parser.add_argument("--data-dir", default=os.environ.get("ROOKERY_DATA"))
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--seconds", type=float, default=3600.0)
    parser.add_argument("--workers", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--number", type=int, default=0)
    parser.add_argument("--deadline", type=float, default=0.0)
    parser.add_argument("--only", nargs="*", default=[])
    given = parser.parse_args()
    if given.command == "run":
        options = ["--quick"] * given.quick + ["--data-dir", given.data_dir] * bool(given.data_dir)
        only = ["--only", *given.only] if given.only else []
        run(given.paths[0], given.seconds, given.workers, given.threads, [*options, *only])
    elif given.command == "work":
        own = given.number, given.deadline, given.data_dir, given.quick, given.only
        work(Worker(*given.paths, *own), given.threads)
    elif given.command == "choose":
        choose(*given.paths)
    else:
        store(*given.paths, given.quick)
