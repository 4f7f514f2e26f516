"""Choose the values of the methods that `rookery reproduce choice-problems` compares.

    python benchmarks/choice.py search FOLDER [PROBLEM ...]   # by successive halving; a file for each of them
    python benchmarks/choice.py choose FOLDER search.csv      # gather them, and write the best into chosen.csv

Each candidate runs on the two seeds of the search. All candidates of a method run side by side, as in `rk.tune`.
"""

import sys
import threading
import time
from pathlib import Path

import numpy as np
import pandas as pd

from rookery.engines.engine import Job
from rookery.engines.simulation import Simulation
from rookery.experiments.choice import setting
from rookery.experiments.machinery.one_run import write
from rookery.run.arguments import checked
from rookery.run.race import Race, rungs

FIELDS = ("upper_step", "lower_step", "linear_step", "multiplier", "auxiliary_step", "hessian_step", "step",
          "server_upper_step", "server_lower_step", "server_linear_step")  # fmt: skip


def raced(problem: str, method: str, seed: int) -> pd.DataFrame:
    """The candidates of a method on a problem, and where each of them ended."""
    task = setting.task(seed, problem, plain=method == "FedAvg")
    values = setting.candidates(problem, method)
    methods = [setting.algorithm(problem, method, *own) for own in values]
    tried = [{field: getattr(own, field) for field in FIELDS if hasattr(own, field)} for own in methods]
    tried = [{field: value for field, value in own.items() if isinstance(value, float)} for own in tried]
    own, rounds = setting.PROBLEMS[problem], setting.BUDGET // setting.EXCHANGES.get(method, 1)
    job = checked(Job(task.problem, task.clients, methods[0], task.init, own.cohort, seed, None, None), rounds)
    race = Race(job, tried, task.evaluate, f"-{own.chosen_by}", 8, Simulation())
    race.compile()
    race.climb(rungs(rounds), lambda *_: None, threading.Event())
    rows = []
    for own_values, lost, shown in zip(values, race.lost, race.shown, strict=True):
        last = max(shown, default=0)
        row = {"run": setting.name(problem, method, own_values), "problem": problem, "method": method, "seed": seed}
        rows.append({**row, "round": last, "score": np.nan if lost is not None or not shown else shown[last]})
    return pd.DataFrame(rows)


def search(folder: Path, problems: list[str]) -> None:
    """Run what is missing."""
    for method in setting.METHODS:
        for problem in problems:
            path = folder / f"{problem}-{method}.csv"
            if setting.plays(method, problem) and not path.exists():
                clock = time.time()
                found = pd.concat([raced(problem, method, seed) for seed in setting.SEARCH_SEEDS])
                write(path, found.to_csv(index=False))
                print(f"{problem}, {method}: {time.time() - clock:.0f} s, best {found['score'].min():.4g}", flush=True)


def choose(folder: Path, out: Path) -> None:
    """Write all candidates to `out` and the chosen values to chosen.csv."""
    keys = [(p, m) for p in setting.PROBLEMS for m in setting.METHODS if setting.plays(m, p)]
    found = pd.concat([pd.read_csv(folder / f"{p}-{m}.csv") for p, m in keys], ignore_index=True)
    write(out, found.to_csv(index=False, float_format="%.6g"))
    best = setting.GRID.best(pd.read_csv(out))
    rows = pd.DataFrame([{"problem": p, "method": m, **own} for (p, m), own in best.items()])
    write(Path(setting.__file__).with_name("chosen.csv"), rows.to_csv(index=False))


if __name__ == "__main__":
    folder = Path(sys.argv[2])
    if sys.argv[1] == "search":
        search(folder, sys.argv[3:] or list(setting.PROBLEMS))
    else:
        choose(folder, Path(sys.argv[3]))
