"""Run the experiment on slow clients with many runs side by side: those of one program in one vectorised call.

    python benchmarks/delay.py run FOLDER --workers 6 --seconds 200   # the search, and the runs with what it chooses
    python benchmarks/delay.py choose FOLDER                          # what the search chose: chosen.csv
    python benchmarks/delay.py store FOLDER RUNS                      # where `reproduce delay --out RUNS` looks

`run` starts several processes, which divide the tasks, methods and modes among them. In each, every run of a search,
and then every seed, has a thread with a `solve` of its own. Programs that all threads are about to call are called
once for all of them. The runs are stored as they finish, and are not computed again.
"""

import argparse
import os
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pandas as pd

from rookery.engines import engine
from rookery.experiments.delay import delay
from rookery.experiments.machinery import Config, one_run
from rookery.experiments.machinery.one_run import fingerprint, run_path, write

LANES = 12  # as many as the search of one method has runs
SPARE = 8  # seconds before the end after which nothing is begun


class Together:
    """Runs in threads of their own, whose calls of compiled programs are one call."""

    def __init__(self) -> None:
        self._turn = threading.Condition()
        self._active = 0
        self._waiting: dict[int, tuple[Any, Callable[..., Any], tuple[Any, ...]]] = {}
        self._results: dict[int, Any] = {}
        self._batched: dict[Any, Callable[..., Any]] = {}
        self._find = engine.PROGRAMS.find

    def run(self, functions: Sequence[Callable[[], Any]]) -> list[Any]:
        """What the functions return, or the exceptions that they raise."""
        found: list[Any] = [None] * len(functions)

        def one(k: int) -> None:
            try:
                found[k] = functions[k]()
            except Exception as error:
                found[k] = error
            with self._turn:
                self._active -= 1
                self._call_if_all_wait()

        engine.PROGRAMS.find = self._found  # type: ignore[method-assign]
        try:
            self._active = len(functions)
            threads = [threading.Thread(target=one, args=(k,)) for k in range(len(functions))]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        finally:
            engine.PROGRAMS.find = self._find  # type: ignore[method-assign]
        return found

    def _found(self, key: Any, make: Callable[[], Any]) -> Any:
        with self._turn:
            program = self._find(key, make)
        if "timetable" in key[:2]:  # on the CPU, and short
            return lambda *args: self._alone(program, args)
        return lambda *args: self._joined(key, program, args)

    def _alone(self, program: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        with self._turn:
            return program(*args)

    def _joined(self, key: Any, program: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        me = threading.get_ident()
        with self._turn:
            self._waiting[me] = key, program, args
            self._call_if_all_wait()
            self._turn.wait_for(lambda: me in self._results)
            result = self._results.pop(me)
        if isinstance(result, Exception):
            raise result
        return result

    def _call_if_all_wait(self) -> None:
        if not self._waiting or len(self._waiting) < self._active:
            return
        waiting, self._waiting = self._waiting, {}
        for key in dict.fromkeys(key for key, _, _ in waiting.values()):
            own = {me: (program, args) for me, (k, program, args) in waiting.items() if k == key}
            (program, (_, data, *_)), *_ = own.values()
            rows = [(consts, *rest) for _, (consts, _, *rest) in own.values()]
            batched = self._batched.setdefault(key, jax.jit(partial(_side_by_side, program)))
            try:
                outputs = batched(data, rows + rows[-1:] * (LANES - len(rows)))
            except Exception as error:
                outputs = [error] * len(own)
            self._results |= dict(zip(own, outputs, strict=False))
        self._turn.notify_all()


def _side_by_side(program: Callable[..., Any], data: Any, rows: list[Any]) -> list[Any]:
    """The outputs of a program for each row of its arguments other than the data, which all rows share."""
    stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *rows)
    function = getattr(program, "__wrapped__", program)  # without `jax.jit`, whose options must not be nested
    outputs = jax.vmap(lambda consts, *rest: function(consts, data, *rest))(*stacked)
    return [jax.tree.map(lambda a, k=k: a[k], outputs) for k in range(len(rows))]


class Worker:
    """One process of several."""

    def __init__(self, folder: Path, deadline: float, data_dir: Any, quick: bool) -> None:
        self._folder, self._deadline, self._data_dir, self._quick = folder, deadline, data_dir, quick
        self._together = Together()

    def work(self, keys: Sequence[delay.Key]) -> None:
        """Compute the search and the runs of these, for clients that are alike first."""
        for kind in delay.KINDS:
            for key in keys:
                try:
                    self._run(key, kind)
                except Exception:
                    print(f"{key}, {kind} failed:", file=sys.stderr)
                    traceback.print_exc()
                    sys.stderr.flush()

    def _run(self, key: delay.Key, kind: str) -> None:
        search = self._computed(delay.tried(self._quick, key, kind))
        if search is None:
            return
        (best,) = delay.GRID.best(search).values()
        self._computed(delay.reported(self._quick, key, kind, tuple(best.values())))

    def _computed(self, configs: Sequence[Config]) -> pd.DataFrame | None:
        """Where the runs end, after computing those that are missing; None if the time is up."""
        wanted = [(c, s, stored_at(self._folder, c, s)) for c in configs for s in c.seeds]
        missing = [each for each in wanted if not each[2].exists()]
        if missing and time.time() > self._deadline - SPARE:
            return None
        if missing:
            began = time.time()
            solves = [partial(one_run.run, c, s, self._data_dir, lambda run: None) for c, s, _ in missing]
            missing[0][0].task(seed=0, **missing[0][0].settings, data_dir=self._data_dir)  # made once, for all threads
            for (_, _, path), run in zip(missing, self._together.run(solves), strict=True):
                if isinstance(run, Exception):
                    raise run
                write(path, run.history.to_csv(index=False))
            left, took = self._deadline - time.time(), time.time() - began
            print(f"{left:.0f} s left, {configs[0].name}: {len(missing)} in {took:.1f} s", flush=True)
        return pd.concat([one_run.read_run(path, c, s).tail(1) for c, s, path in wanted], ignore_index=True)


def stored_at(folder: Path, config: Config, seed: int) -> Path:
    """The file of a run, by its name and its steps."""
    steps = "-".join(f"{value:g}" for value in vars(config.algorithm).values() if isinstance(value, float))
    return run_path(folder, config, seed, steps)


def run(folder: Path, workers: int, seconds: float, options: Sequence[str]) -> None:
    """Start the processes, and end them when the time is up."""
    deadline = time.time() + seconds
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "log.txt").open("a") as log:
        command = [sys.executable, __file__, "work", str(folder), "--deadline", str(deadline)]
        start = lambda k: subprocess.Popen(
            [*command, "--part", str(k), "--workers", str(workers), *options], stdout=log, stderr=log
        )
        for process in [start(k) for k in range(workers)]:
            try:
                process.wait(max(0.0, deadline - time.time()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
    print(f"{len(list(folder.glob('*.csv')))} runs, {time.time() - deadline + seconds:.0f} s.")


def read(folder: Path, quick: bool) -> dict[tuple[delay.Key, str], pd.DataFrame]:
    """Where the runs of each search ended."""
    found = {}
    for kind in delay.KINDS:
        for key in delay.keys(quick):
            configs = [(c, stored_at(folder, c, c.seeds[0])) for c in delay.tried(quick, key, kind)]
            rows = [one_run.read_run(path, c, c.seeds[0]).tail(1) for c, path in configs if path.exists()]
            if len(rows) == len(configs):
                found[key, kind] = pd.concat(rows, ignore_index=True)
    return found


def choose(folder: Path, quick: bool) -> None:
    """Print what the search chose."""
    print("task,method,mode,clients,upper,lower")
    for (key, kind), search in read(folder, quick).items():
        (best,) = delay.GRID.best(search).values()
        print(*key, kind, *(f"{value:g}" for value in best.values()), sep=",")


def store(folder: Path, to: Path, quick: bool) -> None:
    """Write the runs where `rookery reproduce delay --out TO` finds them."""
    missing = []
    for config in [*delay.runs(quick), *delay.search(quick)]:
        for seed in config.seeds:
            path = stored_at(folder, config, seed)
            if path.exists():
                write(run_path(to / "runs", config, seed, fingerprint(config, seed)), path.read_text())
            else:
                missing.append(f"{config.name}, seed {seed}")
    print(f"{len(missing)} runs are missing.", *missing[:20], sep="\n")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=("run", "work", "choose", "store"))
    parser.add_argument("paths", nargs="+", type=Path)
    parser.add_argument("--data-dir", default=os.environ.get("ROOKERY_DATA"))
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--seconds", type=float, default=3600.0)
    parser.add_argument("--workers", type=int, default=6)
    parser.add_argument("--part", type=int, default=0)
    parser.add_argument("--deadline", type=float, default=0.0)
    given = parser.parse_args()
    if given.command == "run":
        options = ["--quick"] * given.quick + ["--data-dir", given.data_dir] * bool(given.data_dir)
        run(given.paths[0], given.workers, given.seconds, options)
    elif given.command == "work":
        worker = Worker(given.paths[0], given.deadline, given.data_dir, given.quick)
        worker.work(delay.keys(given.quick)[given.part :: given.workers])
    elif given.command == "choose":
        choose(*given.paths, given.quick)
    else:
        store(*given.paths, given.quick)
