"""ASFBO's rates on quadratics with known optimum and hypergradient: clients, local steps, and which optimum."""

import dataclasses
import functools
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from rookery import report
from rookery.algorithms import ASFBO
from rookery.experiments.asfbo.representation import OURS, SERVER, SINGLE_LOOP
from rookery.experiments.machinery.claims import Claims, Finding
from rookery.experiments.machinery.curves import last, reached, select, values
from rookery.experiments.machinery.drawing import ticks
from rookery.experiments.machinery.experiment import Config, Experiment
from rookery.experiments.machinery.numbers import Figures, listed, mean, power
from rookery.experiments.papers import ASFBO_PAPER
from rookery.tasks import quadratic
from rookery.tasks.quadratic import solution
from rookery.tasks.task import Task

CLIENTS, SAMPLES, NOISE = 32, 16, 1.0
COHORTS = (2, 4, 8, 16, 32)
LOCAL = (1, 4, 16)  # τ̄
STEPS = tuple(0.2 * 2.5**-k for k in range(6))  # τ̄·γ, the same for all three variables
EPSILON = 1e-2  # of ‖∇Φ‖²
BETWEEN = 20  # rounds between two evaluations
LIMIT_STEPS = (1, 2, 4, 8, 12)
FINENESS = (1.0, 0.5, 0.25)  # of all the steps, in the runs about the limit
FEW = 8  # the cohort of the runs with few clients


@functools.cache
def _stochastic() -> Task:
    return quadratic(clients=CLIENTS, samples=SAMPLES, noise=NOISE, heterogeneity=1.0, seed=5, replace=True)


def stochastic_task(seed: int) -> Task:
    """The same problem for every seed of the run."""
    return _stochastic()


def limit_task(seed: int) -> Task:
    """Five clients with exact oracles; the distances to the optimum of the weights p_i and of the weights p_i τ_i."""
    task = quadratic(clients=len(LIMIT_STEPS), seed=seed)
    weighted = solution(quadratic(clients=len(LIMIT_STEPS), seed=seed, weights=LIMIT_STEPS)).x
    evaluate = lambda x, y: task.evaluate(x, y) | {"distance_weighted": float(np.sum((np.asarray(x) - weighted) ** 2))}
    return dataclasses.replace(task, evaluate=evaluate)


def rated(quick: bool, cohort: int, local: int, step: float, study: str) -> Config:
    """ASFBO with a fixed server step γ = step/τ̄ on the stochastic problem."""
    gamma: dict[str, Any] = {name: step / local for name in SERVER}
    small: dict[str, Any] = {"upper_step": 1e-4, "lower_step": 1e-4, "linear_step": 1e-4}
    return Config(
        name=f"{study}: P = {cohort}, τ = {local}, γτ = {step:.3g}",
        labels={"study": study, "cohort": cohort, "local": local, "step": step, "method": "ASFBO"},
        task=stochastic_task,
        algorithm=ASFBO(**small, **gamma, server="fixed", momentum=0.9, local_steps=local, batch_size=1),
        rounds=200 if quick else 5000,
        cohort=cohort,
        every=BETWEEN,
        seeds=(0,) if quick else (0, 1, 2),
        float64=True,
    )


def limit(quick: bool, method: str, fineness: float) -> Config:
    """A method with unequal τ_i, run until it no longer moves."""
    local = {name: 0.01 * fineness for name in ("upper_step", "lower_step", "linear_step")}
    server = {name: 0.02 * fineness for name in SERVER}
    more = {"bounds": None, "server": "fixed"} if method in OURS else {}
    return Config(
        name=f"limit: {method}, steps times {fineness:g}",
        labels={"study": "limit", "cohort": 5, "local": 0, "step": fineness, "method": method},
        task=limit_task,
        algorithm=SINGLE_LOOP[method](**local, **server, **more, local_steps=np.array(LIMIT_STEPS)),
        rounds=200 if quick else round(4000 / fineness),
        every=50,
        seeds=(0,) if quick else (0, 1, 2),
        float64=True,
    )


def rates_runs(quick: bool) -> list[Config]:
    """The cohort's size at one step; rounds to ε over steps, for τ̄ with all clients and with few; the limits."""
    sizes, local_steps, steps = (COHORTS[::4], LOCAL[1:2], STEPS[:2]) if quick else (COHORTS, LOCAL, STEPS)
    configs = [rated(quick, size, 4, STEPS[2], "cohort") for size in sizes]
    configs += [
        rated(quick, cohort, local, step, "τ") for cohort in (FEW, CLIENTS) for local in local_steps for step in steps
    ]
    return configs + [limit(quick, method, fineness) for method in SINGLE_LOOP for fineness in FINENESS]


def _floors(results: pd.DataFrame) -> dict[int, float]:
    """By the cohort's size: the mean of ‖∇Φ‖² over the second half of the rounds and the seeds."""
    sizes = values(results, "cohort", study="cohort")
    runs = {size: select(results, study="cohort", cohort=size) for size in sizes}
    return {size: float(own[own["round"] > own["round"].max() / 2]["gradient"].mean()) for size, own in runs.items()}


def _rounds(results: pd.DataFrame, cohort: int, local: int) -> float:
    """Rounds until ‖∇Φ‖², over the seeds and the last 40 rounds, is EPSILON, at the best step."""
    best = np.inf
    for _, own in select(results, study="τ", cohort=cohort, local=local).groupby("step"):
        average = own.groupby("round")["gradient"].mean().rolling(2).mean()
        best = min(best, reached(-average.dropna(), -EPSILON))
    return best


def rates_picture(results: pd.DataFrame) -> Figure:
    """The floor against P; rounds to ε against τ̄; the distance to the two optima."""
    fig, axes = report.figure(1, 3, width=14.0, height=4.2)
    left, middle, right = axes[0]
    floors, local_steps = _floors(results), values(results, "local", study="τ")
    left.loglog([*floors], [*floors.values()], "o-", color=report.BLUE)
    report.label(left, f"clients in a round, of {CLIENTS}", r"$\|\nabla\Phi\|^2$, second half", "More clients")
    ticks(left, [*floors])
    for cohort, colour in ((CLIENTS, report.BLUE), (FEW, report.VERMILION)):
        rounds = [_rounds(results, cohort, local) for local in local_steps]
        middle.loglog(local_steps, rounds, "o-", color=colour, label=f"{cohort} of {CLIENTS} clients")
    report.label(middle, "local steps τ̄", f"rounds to {EPSILON:g}, at the best step", "More local steps")
    ticks(middle, local_steps)
    report.legend(middle)
    for method in SINGLE_LOOP:
        for metric, line, words in (("distance", "-", "p_i"), ("distance_weighted", ":", "p_i τ_i")):
            look = {**report.style(method), "linestyle": line}
            right.loglog(FINENESS, _limits(results, method, metric), **look, label=f"{method}, {words}")
    report.label(right, "steps, times", r"$\|x - x^*\|^2$ at the end", "Which optimum, with unequal τ_i")
    ticks(right, FINENESS)
    report.legend(right, fontsize=7)
    return fig


def _limits(results: pd.DataFrame, method: str, metric: str) -> list[float]:
    return [mean(last(results, metric, study="limit", method=method, step=fineness)) for fineness in FINENESS]


claim = Claims()


@claim("The error falls with P.", "Thm 1", "theory")
def error_falls(results: pd.DataFrame) -> Finding:
    """‖∇Φ‖² in the second half of the rounds falls from each size of the cohort to the next."""
    floors = _floors(results)
    sizes, floor = [*floors], [*floors.values()]
    figures = {f"floor at P = {listed(sizes)}": floor, "as a power of P": power(sizes, floor)}
    return Finding(bool((np.diff(floor) < 0).all()), figures)


@claim("Larger τ̄ saves rounds when all clients take part, far less when few do.", "Cor. 1, remarks", "theory")
def local_steps_save(results: pd.DataFrame) -> Finding:
    """With all clients, sixteen times the local steps save half of the rounds or more; with few, at most half of that.

    A count is known up to the rounds between two evaluations. The first statement has to hold for the least gain that
    this allows, the second for the largest.
    """
    local_steps = values(results, "local", study="τ")
    every, few = ([_rounds(results, cohort, local) for local in local_steps] for cohort in (CLIENTS, FEW))
    least, most = (every[0] - BETWEEN) / every[-1], few[0] / max(few[-1] - BETWEEN, 1)
    figures = {
        f"rounds at τ̄ = {listed(local_steps)}, all clients": every,
        f"the same, {FEW} of {CLIENTS}": few,
        "rounds saved, all and few": [every[0] / every[-1], few[0] / few[-1]],
        "the least with all, and the most with few, that the evaluations allow": [least, most],
    }
    holds = np.isfinite([*every, *few]).all() and least >= 2 and most <= least / 2
    return Finding(bool(holds), figures)


@claim(
    "With unequal τ_i SimFBO tends to the optimum of the problem weighted by p_i τ_i, ShroFBO and ASFBO to that of "
    "p_i.",
    "Sec. 4.3",
    "theory",
)
def the_limits(results: pd.DataFrame) -> Finding:
    """As the steps shrink a method nears its own optimum, and no other."""
    figures: Figures = {}
    holds = True
    for method in SINGLE_LOOP:
        near, other = ("distance_weighted", "distance") if method == "SimFBO" else ("distance", "distance_weighted")
        towards, away = _limits(results, method, near), _limits(results, method, other)[-1]
        holds = holds and towards[-1] < 0.2 * towards[0] and away > 10 * towards[-1]
        figures[f"{method}: to its own optimum as the steps halve, and to the other one"] = [*towards, away]
    return Finding(holds, figures)


rates = Experiment(
    name="asfbo-rates",
    title="clients, local steps, and which optimum, on quadratics",
    paper=f"{ASFBO_PAPER}, Thm 1, Cor. 1 and Sec. 5 (which has no such run).",
    setup=(
        f"Bilevel quadratics with known optimum and hypergradient. *Cohort* and *τ*: {CLIENTS} clients that differ, "
        f"{SAMPLES} noisy samples each, batches of 1, ASFBO with β = .9 and its server step held fixed at γ (the "
        "theory's bounds closed), local steps 10⁻⁴. Rounds to ε are at the best γ of six, from τ̄γ = .2 down by "
        f"factors of 2.5, for each P and τ̄; ε = {EPSILON:g} for ‖∇Φ‖², averaged over the seeds and 40 rounds. "
        f"*Limit*: five clients with exact oracles, τ_i = {LIMIT_STEPS}, local steps .01 and server steps .02, then "
        "half and a quarter of both; three problems."
    ),
    runs=rates_runs,
    picture=rates_picture,
    claims=tuple(claim),
    differences=("The server's step is fixed in these runs: the theory only asks that it stays between two bounds.",),
)
