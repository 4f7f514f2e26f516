"""ASFBO's rates on quadratics with known optimum and hypergradient: clients, local steps, and which optimum."""

import dataclasses
import functools
import itertools
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from rookery import report
from rookery.algorithms import ASFBO
from rookery.experiments.asfbo.representation import OURS, SERVER, SINGLE_LOOP
from rookery.experiments.machinery import Claims, Config, Experiment, Finding, description
from rookery.experiments.machinery.claims import all_lead, lead
from rookery.experiments.machinery.curves import last, reached, select, values
from rookery.experiments.machinery.drawing import spread, ticks
from rookery.experiments.machinery.numbers import Figures, listed, mean, means, power
from rookery.tasks import quadratic
from rookery.tasks.quadratic import solution
from rookery.tasks.task import Task

CLIENTS, SAMPLES = 32, 16
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
    return quadratic(clients=CLIENTS, samples=SAMPLES, noise=1.0, heterogeneity=1.0, seed=5, replace=True)


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
        seeds=(0,) if quick else tuple(range(10 if study == "cohort" else 3)),
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
    configs += [rated(quick, p, local, step, "τ") for p in (FEW, CLIENTS) for local in local_steps for step in steps]
    return configs + [limit(quick, method, fineness) for method in SINGLE_LOOP for fineness in FINENESS]


def thinned(results: pd.DataFrame) -> pd.DataFrame:
    """Keep the last row of every run, with `floor`, the mean of ‖∇Φ‖² over the second half of the rounds; of runs about
    τ also the rows until the mean over the seeds is EPSILON."""
    end = results.groupby("run")["round"].transform("max")
    late = results["gradient"].where(results["round"] > end / 2)
    floor = late.groupby([results["run"], results["seed"]]).transform("mean").where(results["round"] == end)
    kept = results["round"] == end
    for run, own in select(results, study="τ").groupby("run"):
        kept |= (results["run"] == run) & (results["round"] <= _reaching(own)) & np.isfinite(_reaching(own))
    labels = ["run", "study", "cohort", "local", "step", "method", "seed", "round", "exchanges"]
    return results.assign(floor=floor).loc[kept, [*labels, "gradient", "distance", "distance_weighted", "floor"]]


def _floors(results: pd.DataFrame) -> dict[int, np.ndarray]:
    """The floor by the cohort's size, for each seed."""
    sizes = values(results, "cohort", study="cohort")
    return {size: last(results, "floor", study="cohort", cohort=size) for size in sizes}


def _reaching(own: pd.DataFrame) -> float:
    """Rounds until ‖∇Φ‖² of a run, over the seeds and the last 40 rounds, is EPSILON."""
    average = own.groupby("round")["gradient"].mean().rolling(2).mean()
    return reached(-average.dropna(), -EPSILON)


def _rounds(results: pd.DataFrame, cohort: int, local: int) -> float:
    """Rounds to EPSILON at the best step."""
    return min(_reaching(own) for _, own in select(results, study="τ", cohort=cohort, local=local).groupby("step"))


def _limits(results: pd.DataFrame, method: str, metric: str) -> list[float]:
    return [mean(last(results, metric, study="limit", method=method, step=fineness)) for fineness in FINENESS]


def rates_picture(results: pd.DataFrame) -> Figure:
    """The floor against P; rounds to ε against τ̄; the distance to the two optima."""
    fig, axes = report.figure(1, 3, width=15.0, height=4.2)
    left, middle, right = axes[0]
    floors, local_steps = _floors(results), values(results, "local", study="τ")
    spread(left, [*floors], [*floors.values()], color=report.BLUE, marker="o")
    left.set(xscale="log", yscale="log")
    report.label(left, f"clients in a round, P of {CLIENTS}", r"floor of $\|\nabla\Phi\|^2$", "More clients")
    ticks(left, [*floors])
    for cohort, colour in ((CLIENTS, report.BLUE), (FEW, report.VERMILION)):
        rounds = [_rounds(results, cohort, local) for local in local_steps]
        middle.loglog(local_steps, rounds, "o-", color=colour, label=f"{cohort} of {CLIENTS} clients")
    report.label(middle, "local steps τ̄", f"rounds to {EPSILON:g}, at the best step", "More local steps")
    ticks(middle, local_steps)
    middle.set_yticks([50, 100, 200, 400], ["50", "100", "200", "400"])
    report.legend(middle)
    for place, method in enumerate(SINGLE_LOOP):
        for metric, line in (("distance", "-"), ("distance_weighted", ":")):
            shifted = np.array(FINENESS) * 1.06**place  # so that equal lines stand beside each other
            look = {**report.style(method), "linestyle": line}
            right.loglog(shifted, _limits(results, method, metric), **look, label=method if line == "-" else "")
    title = "Which optimum: of p_i, or (dotted) of p_i τ_i"
    report.label(right, "steps, times (lines shifted)", r"$\|x - x^*\|^2$ at the end", title)
    ticks(right, FINENESS)
    report.legend(right, loc="center left", bbox_to_anchor=(0.0, 0.65))
    return fig


claim = Claims("theory")


@claim("The error falls with P.", "Thm 1")
def error_falls(results: pd.DataFrame) -> Finding:
    """The floor falls from each size of the cohort to the next, by more than the margin."""
    floors = _floors(results)
    pairs = itertools.pairwise(floors.items())
    found = all_lead({f"P = {p} to {q}": lead(before, after) for (p, before), (q, after) in pairs}, "fall")
    figures = {f"floor at P = {listed(floors)}": means(floors), "as a power of P": power([*floors], means(floors))}
    return Finding(found.holds, figures | dict(found.figures))


@claim(
    "τ̄ = 16 for 1 at least halves the rounds when all clients take part, and saves at most half as much when few do.",
    "Cor. 1, remarks",
)
def local_steps_save(results: pd.DataFrame) -> Finding:
    """Counts are known up to the rounds between two evaluations: the first statement has to hold for the least gain
    that this allows, the second for the largest."""
    local_steps = values(results, "local", study="τ")
    every, few = ([_rounds(results, cohort, local) for local in local_steps] for cohort in (CLIENTS, FEW))
    least, most = (every[0] - BETWEEN) / every[-1], few[0] / max(few[-1] - BETWEEN, 1)
    figures = {
        "rounds saved: the least with all that the evaluations allow, the most with few": [least, most],
        f"rounds at τ̄ = {listed(local_steps)}, all clients": every,
        f"the same, {FEW} of {CLIENTS}": few,
    }
    return Finding(bool(np.isfinite([*every, *few]).all() and least >= 2 and most <= least / 2), figures)


@claim("With unequal τ_i SimFBO tends to the optimum of the weights p_i τ_i, the others to that of p_i.", "Sec. 4.3")
def the_limits(results: pd.DataFrame) -> Finding:
    """With a quarter of the steps the distance to a method's own optimum is below a fifth of what it was, and below a
    tenth of that to the other."""
    figures: Figures = {}
    falls, apart = [], []
    for method in SINGLE_LOOP:
        near, other = ("distance_weighted", "distance") if method == "SimFBO" else ("distance", "distance_weighted")
        towards, away = _limits(results, method, near), _limits(results, method, other)[-1]
        falls.append(towards[-1] / towards[0])
        apart.append(away / towards[-1])
        figures[f"{method}: to its own optimum as the steps halve, and to the other one"] = [*towards, away]
    least = "at a quarter of the steps: distance, times, at most; nearer than to the other, times"
    figures = {least: [max(falls), min(apart)], **figures}
    return Finding(max(falls) < 0.2 and min(apart) > 10, figures)


rates = Experiment(
    **description("asfbo-rates", globals()),
    runs=rates_runs,
    thinned=thinned,
    picture=rates_picture,
    claims=tuple(claim),
)
