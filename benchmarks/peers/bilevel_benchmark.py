"""The solvers of benchmark_bilevel on its own problems, with its own best parameters."""

import importlib
import itertools
import sys

import jax
import numpy as np
import sklearn.datasets

import tasks

options = tasks.arguments("stocbio", "soba", "mrbo", "f2sa", "saba")
task = options.task
sys.path.insert(0, str(options.code))
covers = options.name in ("stocbio", "soba", "mrbo")
if covers:
    table = tasks.table(options.data)
    sklearn.datasets.fetch_covtype = lambda **_: (table[:, :-1].astype(float), table[:, -1].copy())

dataset = importlib.import_module("datasets.covtype" if covers else "datasets.simulated").Dataset
given = {} if covers else {"dim_inner": 100, "dim_outer": 10}
problem = dataset.get_instance(**given).get_data()
objective = importlib.import_module("objective").Objective.get_instance()
objective.set_data(**problem)

solver = importlib.import_module(f"solvers.{options.name}").Solver.get_instance(
    step_size=task.step, outer_ratio=task.ratio, batch_size=task.batch, eval_freq=task.every,
    **({"delta_lmbda": 0.01, "lmbda0": 1} if options.name == "f2sa" else {}),
)  # fmt: skip
solver.run_once = lambda *_: None  # no warm-up: the clock shows the compilation
solver.set_objective(**objective.get_objective())


def score() -> float:
    """Return the test accuracy, or -log10 of the squared norm of the hypergradient."""
    metrics = problem["metrics"](solver.inner_var, solver.outer_var)
    return 1 - metrics["test_accuracy"] if covers else -np.log10(metrics["value"])  # its "accuracy" counts errors


def callback() -> bool:
    """Read the clock after each call of the solver; return whether to go on."""
    if next(calls) > 0:
        jax.block_until_ready((solver.inner_var, solver.outer_var))
        clock.lap(score)
    return len(clock.seconds) < task.rounds // task.every


calls, clock = itertools.count(), tasks.Clock(task)
solver.run(callback)
clock.print(
    ["benchopt", "jax"],
    parameters=np.size(solver.inner_var) + np.size(solver.outer_var),
    clients=1,
    cohort=1,
    batch=solver.batch_size,
    steps=task.steps,
    rounds=len(clock.seconds) * solver.eval_freq,
)
