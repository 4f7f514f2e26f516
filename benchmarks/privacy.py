"""Run the experiments on privacy side by side: all budgets and seeds of a method in one compiled program.

    python benchmarks/privacy.py noise noise.json              # needs dp-accounting: the noise for each budget
    python benchmarks/privacy.py run noise.json lines.jsonl    # the search, and the runs with the values it chooses
    python benchmarks/privacy.py choose lines.jsonl            # what the search chose: chosen.csv
    python benchmarks/privacy.py store lines.jsonl FOLDER      # the runs, where `rookery reproduce` finds them

`run` needs neither dp-accounting nor a network. It writes a line for each run and continues from those it finds; after
"--only" stand the tasks and methods to run, or to compute the noise of. A run equals that of `rookery reproduce` up to
rounding.
"""

import argparse
import dataclasses
import json
import time
from concurrent.futures import ThreadPoolExecutor
from functools import cache, partial
from pathlib import Path
from threading import Lock
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pandas as pd

from rookery.base import draws
from rookery.channels.private import PrivateRecords
from rookery.engines import engine
from rookery.engines.engine import Job
from rookery.engines.simulation import device
from rookery.engines.simulation.device import Program
from rookery.experiments.machinery.experiment import Config
from rookery.experiments.machinery.one_run import describe, fingerprint, run_path, runs_folder, write
from rookery.experiments.privacy import EXPERIMENTS, records, shared
from rookery.language import hyperparameters
from rookery.plan import trace
from rookery.run.arguments import checked

NOISY, NOISELESS = 45, 16  # runs side by side


def budget_of(config: Config) -> str:
    """The budget, as the file of the noise names it."""
    return f"{config.labels['budget']:g}"


def program_of(config: Config) -> str:
    """The name of the program that runs a configuration."""
    return f"{config.labels['task']}, {config.labels['method']}"


@cache
def task_of(make: Any, settings: tuple[tuple[str, Any], ...], data_dir: Any) -> Any:
    """The task. Its data do not depend on the seed."""
    return make(seed=0, **dict(settings), data_dir=data_dir)


@cache
def start_of(make: Any, settings: tuple[tuple[str, Any], ...], data_dir: Any, seed: int) -> Any:
    """The start of the runs with a seed."""
    if make is not shared.representation:
        return task_of(make, settings, data_dir).init
    return make(seed=seed, **dict(settings), data_dir=data_dir).init


def traced(config: Config, start: Any, channel: Any, data_dir: Any) -> engine.Traced:
    """The plans of a configuration."""
    task = task_of(config.task, tuple(config.settings.items()), data_dir)
    job = Job(task.problem, task.clients, config.algorithm, start, config.cohort, channel=channel)
    return engine.traced(checked(job, config.rounds))


class Bounded(PrivateRecords):
    """Private for records, with arrays as bounds: constants of the plan, which can differ from run to run."""

    def bound(self, oracle: str) -> Any:
        """See `PrivateRecords`."""
        return dict(self.clip)[oracle][0]


def channel_of(config: Config, levels: dict[str, dict[str, float]], scale: float = 1.0) -> Any:
    """The channel of a configuration with the noise of its budget; for records, arrays as bounds, times `scale`."""
    channel = config.channel
    if channel is None:
        return None
    noise = tuple(levels[budget_of(config)].items())
    if channel.unit == "client":
        return dataclasses.replace(channel, epsilon=None, noise=noise)
    clip = tuple((name, jnp.array([scale * bound], jnp.float32)) for name, bound in channel.clip)
    return Bounded(None, channel.delta, clip, channel.rounds, None, levels=noise)


class Lanes:
    """Runs of one method on one task side by side, all with noise or all without.

    Arguments:
        config: one of their configurations.
        levels: the noise multipliers of each budget, by exchange; for records, of the lower and of the upper data.
        count: how many run side by side.
    """

    def __init__(self, config: Config, levels: dict[str, dict[str, float]], count: int, data_dir: Any) -> None:
        self._of = (config.task, tuple(config.settings.items()), data_dir)
        self._levels, self._count, self._data_dir = levels, count, data_dir
        self._plans: dict[Any, engine.Traced] = {}
        self._by_record = config.channel is not None and config.channel.unit == "record"
        first = self._plan(config)
        other = self._traced(config, 2.0) if self._by_record else first
        self._data = first.job.clients.without_names()
        program, consts = Program(first.round, self._data, first.job.cohort), first.round.consts
        self._varies = [not np.array_equal(*pair) for pair in zip(consts, other.round.consts, strict=True)]
        self._advance = engine.compiled(
            first.round, partial(_advance, program, first.job.draw, self._varies), donate_argnums=3
        )
        self._evaluate = jax.jit(jax.vmap(task_of(*self._of).evaluate))
        self._starts: dict[str, Any] = {}

    def _traced(self, config: Config, scale: float = 1.0) -> engine.Traced:
        return traced(config, task_of(*self._of).init, channel_of(config, self._levels, scale), self._data_dir)

    def _plan(self, config: Config) -> engine.Traced:
        """The plans with the noise of a budget; those of any budget serve where `init` has no exchange. For records,
        the plans with these bounds."""
        key = config.channel.clip if self._by_record else budget_of(config)
        if not self._by_record and self._plans and not next(iter(self._plans.values())).start.exchanges:
            return next(iter(self._plans.values()))
        if key not in self._plans:
            self._plans[key] = self._traced(config)
        return self._plans[key]

    def _hyper(self, config: Config) -> Any:
        found = hyperparameters.split(config.algorithm).traced
        return trace.with_levels(channel_of(config, self._levels), found)

    def _begin(self, config: Config, seed: int) -> Any:
        """The carry before the first round."""
        plan = self._plan(config)
        if plan.start.fingerprint not in self._starts:
            program = Program(plan.start, self._data, "auto")
            self._starts[plan.start.fingerprint] = engine.compiled(plan.start, partial(device.start, program))
        begin = self._starts[plan.start.fingerprint]
        job = checked(dataclasses.replace(plan.job, start=start_of(*self._of, seed), cohort=config.cohort))
        root = engine.noise_root(dataclasses.replace(plan.job, noise_seed=seed))
        carry, _ = begin(plan.start.consts, self._data, self._hyper(config), job.start, draws.seed_key(seed), root)
        if config.channel is None or self._by_record:
            return carry
        levels = {name: jnp.float32(level) for name, level in self._levels[budget_of(config)].items()}
        return carry._replace(server={name: {**own, "noise": levels[name]} for name, own in carry.server.items()})

    def _consts(self, configs: list[Config]) -> list[Any]:
        """The constants of the plan, with a row for each run where they differ."""
        each = zip(*(self._plan(config).round.consts for config in configs), strict=True)
        return [jnp.stack(own) if varies else own[0] for own, varies in zip(each, self._varies, strict=True)]

    def run(self, runs: list[tuple[Config, int]]) -> list[list[dict[str, float]]]:
        """The history of each run: its metrics at every evaluation."""
        assert len(runs) <= self._count
        began, padded = time.perf_counter(), [*runs, *[runs[-1]] * (self._count - len(runs))]
        consts, hyper = self._consts([config for config, _ in padded]), _stacked([self._hyper(c) for c, _ in padded])
        carry = _stacked([self._begin(*each) for each in padded])
        seeds = jnp.stack([draws.seed_key(seed) for _, seed in padded])
        histories: list[list[dict[str, float]]] = [[] for _ in runs]
        done, config = 0, runs[0][0]
        while True:
            values = jax.device_get(self._evaluate(carry.state.x, carry.state.y))
            seconds = (time.perf_counter() - began) / len(runs)
            for k, history in enumerate(histories):
                history += [{"round": done, "seconds": seconds, **{name: float(v[k]) for name, v in values.items()}}]
            if done == config.rounds:
                return histories
            step = min(config.every, config.rounds - done)
            carry = self._advance(consts, self._data, hyper, carry, seeds, done, step)
            done += step


def _advance(
    program: Program, draw: Any, varies: list[bool], consts: Any, clients: Any, hyper: Any, carry: Any, seeds: Any,
    begin: Any, rounds: Any,
) -> Any:  # fmt: skip
    def one(consts: Any, hyper: Any, carry: Any, seed: Any, t: Any) -> Any:
        ids, before, after, _ = device.one_round(program, draw, consts, clients, hyper, carry, t, seed)
        return device.put(program, clients.n, carry, ids, before, after, True)

    each = jax.vmap(one, ([0 if own else None for own in varies], 0, 0, 0, None))
    begin = jnp.asarray(begin, jnp.int32)
    return jax.lax.fori_loop(begin, begin + rounds, lambda t, carries: each(consts, hyper, carries, seeds, t), carry)


def _stacked(each: list[Any]) -> Any:
    return jax.tree.map(lambda *leaves: jnp.stack([jnp.asarray(leaf) for leaf in leaves]), *each)


# The commands.


def noise(path: Path, data_dir: Any, quick: bool, only: list[str]) -> None:
    """Write the noise multipliers of every method and budget."""
    found: dict[str, dict[str, dict[str, float]]] = {}
    for config in searched(quick, only):
        levels = found.setdefault(program_of(config), {})
        if config.channel is not None and budget_of(config) not in levels:
            start = task_of(config.task, tuple(config.settings.items()), data_dir).init
            levels[budget_of(config)] = dict(traced(config, start, config.channel, data_dir).job.channel.levels)
            print(program_of(config), budget_of(config), levels[budget_of(config)], flush=True)
    write(path, json.dumps(found, indent=1))


def searched(quick: bool, only: list[str]) -> list[Config]:
    """The configurations of all searches, or those of some tasks or methods."""
    found = [config for experiment in EXPERIMENTS if experiment.search for config in experiment.search(quick)]
    return [config for config in found if not only or set(config.labels.values()) & set(only)]


def run(noise: Path, lines: Path, data_dir: Any, quick: bool, only: list[str], threads: int) -> None:
    """Run the search of each method, and its runs with the chosen values; several methods at a time."""
    levels, done, lock = json.loads(noise.read_text()), stored(lines), Lock()
    groups: dict[tuple[str, bool], list[Config]] = {}
    for config in searched(quick, only):
        groups.setdefault((program_of(config), config.channel is None), []).append(config)

    def one(name: str, noiseless: bool) -> None:
        search, lanes, count = groups[name, noiseless], None, NOISELESS if noiseless else NOISY
        for chosen in (False, True):
            wanted = [(config, shared.SEARCH_SEED) for config in search]
            if chosen:
                names = {config.name for config in search}
                best = choices([row for (run, _), row in list(done.items()) if run in names])
                wanted = [(config, seed) for config in finals(search, best, quick) for seed in config.seeds]
            wanted = [pair for pair in wanted if (pair[0].name, pair[1]) not in done]
            for at in range(0, len(wanted), count):
                began, some = time.perf_counter(), wanted[at : at + count]
                lanes = lanes or Lanes(some[0][0], levels[name], count, data_dir)
                for (config, seed), history in zip(some, lanes.run(some), strict=True):
                    row = {"run": config.name, **config.labels, "seed": seed, "made": made_by(config)}
                    done[config.name, seed] = row = {**row, "history": history}
                    with lock, lines.open("a") as file:
                        file.write(json.dumps(row) + "\n")
                words = f"{name}{', no noise' if noiseless else ''}, {'runs' if chosen else 'search'}"
                print(f"{words}: {len(some)} in {time.perf_counter() - began:.1f} s", flush=True)

    for search in groups.values():  # in one thread, so that each is made once
        task_of(search[0].task, tuple(search[0].settings.items()), data_dir)
    with ThreadPoolExecutor(threads) as pool:
        for finished in [pool.submit(one, *group) for group in groups]:
            finished.result()


def made_by(config: Config) -> Any:
    """What distinguishes runs of one name: the values chosen."""
    return describe([config.algorithm, config.channel])


def stored(lines: Path) -> dict[tuple[str, int], dict[str, Any]]:
    """The runs in a file of lines."""
    rows = [json.loads(line) for line in lines.read_text().splitlines()] if lines.exists() else []
    return {(row["run"], row["seed"]): row for row in rows}


def choices(rows: list[dict[str, Any]]) -> dict[Any, tuple[float, ...]]:
    """What the search chose, by task, method and budget."""
    whole = pd.DataFrame([{**row, **row["history"][-1]} for row in rows])
    found: dict[Any, tuple[float, ...]] = {}
    for experiment in EXPERIMENTS:
        tried = experiment.search(False) if experiment.search else []
        own = whole[whole["task"].isin({config.labels["task"] for config in tried})]
        if len(own) and experiment.grid:
            best = experiment.grid.best(own.reset_index(drop=True))
            found |= {key: tuple(values.values()) for key, values in best.items()}
    return found


def finals(search: list[Config], best: dict[Any, Any], quick: bool) -> list[Config]:
    """The configurations of the runs with the chosen values."""
    keys = dict.fromkeys((c.labels["task"], c.labels["method"], c.labels["budget"]) for c in search)
    return [(records if key[0] in records.TASKS else shared).config(quick, *key, best[key]) for key in keys]


def choose(lines: Path) -> None:
    """Print what the search chose."""
    best = choices([row for (run, _), row in stored(lines).items() if run.startswith("search: ")])
    print("task,method,budget,upper,lower" + ",clip" * (max(map(len, best.values())) > 2))
    for key, values in best.items():
        print(*key[:2], *(f"{value:g}" for value in (key[2], *values)), sep=",")


def store(lines: Path, folder: Path, quick: bool) -> None:
    """Write the runs where `rookery reproduce NAME --out FOLDER/NAME` finds them."""
    done, missing = stored(lines), 0
    for experiment in EXPERIMENTS:
        configs = [*experiment.runs(quick), *(experiment.search(quick) if experiment.search else [])]
        for config, seed in [(c, s) for c in configs for s in c.seeds]:
            if done.get((config.name, seed), {}).get("made") != made_by(config):
                missing += 1  # or with other values
                continue
            where = runs_folder(experiment, folder / experiment.name)
            history = pd.DataFrame(done[config.name, seed]["history"])
            write(run_path(where, config, seed, fingerprint(config, seed)), history.to_csv(index=False))
    print(f"{missing} runs are missing.")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=("noise", "run", "choose", "store"))
    parser.add_argument("paths", nargs="+", type=Path)
    parser.add_argument("--data-dir")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--only", nargs="*", default=[])
    parser.add_argument("--threads", type=int, default=8)
    given = parser.parse_args()
    if given.command == "noise":
        noise(*given.paths, given.data_dir, given.quick, given.only)
    elif given.command == "run":
        run(*given.paths, given.data_dir, given.quick, given.only, given.threads)
    elif given.command == "choose":
        choose(*given.paths)
    else:
        store(*given.paths, given.quick)
