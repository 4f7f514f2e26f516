"""The communication complexity of the FedBiO paper's theory, on stochastic quadratics with known hypergradient."""

import dataclasses
import functools
import math
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from rookery import report
from rookery.algorithms import FedBiO, FedBiOAcc, FedBiOLocal, FedNest
from rookery.experiments.claims import Claim, Finding, differs
from rookery.experiments.curves import Figures, curves, mean, select, ticks
from rookery.experiments.experiment import Config, Experiment
from rookery.fed import Algorithm
from rookery.problems import Scope
from rookery.tasks import quadratic
from rookery.tasks.task import Task

PAPER = (
    "Li, Huang and Huang, Communication-Efficient Federated Bilevel Optimization with Global and Local Lower Level "
    "Problems"
)
SAMPLES, NOISE, HETEROGENEITY = 64, 1.0, 0.5
FEDERATIONS = (4, 16)  # M
EPSILONS = (0.3, 0.1, 0.03, 0.01, 0.003)  # of ‖∇Φ‖², relative to the start's
BOUNDS = {"FedBiO": -1.5, "FedBiOAcc": -1.0, "FedNest": -2.0}  # the theory's slopes of communications against ε
LOCAL = 4  # I of FedBiO
SIZES = (4, 16, 64)  # M of the runs about the noise
DRIFTS = (0.04, 0.02, 0.01, 0.005)  # steps of the runs about the drift
NOISY = {"upper": {"upper_batch": 1}, "lower": {"lower_batch": 1}}  # the other level is exact
STUDENT = 3.18  # 97.5 % quantile of t with 3 degrees of freedom: five points, two parameters


@functools.cache
def _problem(clients: int, scope: Scope) -> Task:
    """With ‖∇Φ‖² relative to the start's as a metric."""
    task = quadratic(
        clients, samples=SAMPLES, noise=NOISE, heterogeneity=HETEROGENEITY, seed=7, replace=True, scope=scope
    )
    start = task.evaluate(*task.init)["gradient"]
    return dataclasses.replace(task, evaluate=lambda x, y: {"relative": task.evaluate(x, y)["gradient"] / start})


def rates_task(seed: int, clients: int, scope: Scope = "global") -> Task:
    """The same problem for every seed, which is the run's alone."""
    return _problem(clients, scope)


def method(name: str, clients: int, epsilon: float) -> tuple[Algorithm, int]:
    """A method with steps, batches and I that follow ε and M as in the theory; and its rounds, with room to spare."""
    if name == "FedBiO":  # steps ∝ ε^{1/2}, b ∝ 1/(Mε), I fixed
        step = 0.1 * math.sqrt(epsilon / EPSILONS[0])
        batch = math.ceil(2.4 / (clients * epsilon))
        rounds = 8 * (EPSILONS[0] / epsilon) ** 1.5
        return FedBiO(**_three(step), local_steps=LOCAL, batch_size=batch), round(rounds)
    if name == "FedBiOAcc":  # b ∝ ε^{-1/2}, I ∝ M^{-2/3}, α_t ∝ t^{-1/3}
        local = max(1, round(LOCAL * (clients / FEDERATIONS[0]) ** (-2 / 3)))
        batch = math.ceil(epsilon**-0.5)
        rounds = 30 * (EPSILONS[0] / epsilon) ** 1.15
        return FedBiOAcc(**_three(0.1), local_steps=local, batch_size=batch, delta=1.0, offset=8.0), round(rounds)
    step = 0.1 * epsilon / EPSILONS[0]  # FedNest: steps ∝ ε, batches and T fixed
    rounds = 10 * (EPSILONS[0] / epsilon) ** 2
    nest = FedNest(
        upper_step=step, lower_step=0.1, lower_local_steps=LOCAL, neumann_terms=10, hessian_step=0.1, batch_size=8
    )
    return nest, round(rounds)


def rated(quick: bool, name: str, clients: int, epsilon: float) -> Config:
    """A run that ends well after its running mean of ‖∇Φ‖² has reached ε."""
    algorithm, rounds = method(name, clients, epsilon)
    return Config(
        name=f"{name}, M = {clients}, ε = {epsilon:g}",
        labels={"study": "rate", "method": name, "clients": clients, "epsilon": epsilon, "step": 0.0},
        task=rates_task,
        settings={"clients": clients},
        algorithm=algorithm,
        rounds=40 if quick else rounds,
        every=1 if quick else max(1, rounds // 2000),
        seeds=(0,) if quick else (0, 1, 2),
        float64=True,
    )


def fixed(quick: bool, study: str, algorithm: Algorithm, clients: int, step: float, scope: Scope = "global") -> Config:
    """A run of a given length at a given step, whose floor is looked at."""
    words = {"noise": "all samples noisy", "upper": "upper samples noisy", "lower": "lower samples noisy"}
    return Config(
        name=f"{type(algorithm).__name__}, {words.get(study, study)}, M = {clients}, step {step:g}",
        labels={"study": study, "method": type(algorithm).__name__, "clients": clients, "epsilon": 0.0, "step": step},
        task=rates_task,
        settings={"clients": clients, "scope": scope},
        algorithm=algorithm,
        rounds=40 if quick else 4000,
        every=10,
        seeds=(0,) if quick else (0, 1, 2),
        float64=True,
    )


def _three(step: float) -> dict[str, Any]:
    return {"upper_step": step, "lower_step": step, "linear_step": step}


def runs(quick: bool) -> list[Config]:
    """Rates over ε; the floor with noise over M; that with exact oracles over the step; local lower levels."""
    epsilons = EPSILONS[:2] if quick else EPSILONS
    federations = FEDERATIONS[:1] if quick else FEDERATIONS
    sizes, drifts = (SIZES[:2], DRIFTS[:2]) if quick else (SIZES, DRIFTS)
    rates = [
        rated(quick, name, clients, epsilon)
        for name in BOUNDS
        for clients in (federations[:1] if name == "FedNest" else federations)  # its runs are long
        for epsilon in epsilons
    ]
    noise = [fixed(quick, "noise", FedBiO(**_three(0.02), batch_size=1), clients, 0.02) for clients in sizes]
    drift = [
        fixed(quick, f"exact, I = {local}", FedBiO(**_three(step), local_steps=local), 4, step)
        for local in (1, LOCAL)
        for step in drifts
    ]
    own: dict[str, Any] = {"upper_step": 0.02, "lower_step": 0.02, "neumann_terms": 20, "hessian_step": 0.1}
    sides = [
        fixed(quick, side, FedBiOLocal(**own, **batch), clients, 0.02, "client")
        for side, batch in NOISY.items()
        for clients in sizes
    ]
    return rates + noise + drift + sides


def _clients(results: pd.DataFrame, name: str) -> list[int]:
    return sorted(select(results, study="rate", method=name)["clients"].unique())


def _reached(results: pd.DataFrame, name: str, clients: int, epsilon: float) -> np.ndarray:
    """Communications until the mean of ‖∇Φ‖² so far is ε, for each seed."""
    own = curves(results, "relative", "exchanges", study="rate", method=name, clients=clients, epsilon=epsilon)
    found = []
    for curve in own:
        pieces = np.diff(curve.index) * (curve.to_numpy()[1:] + curve.to_numpy()[:-1]) / 2  # the trapezoidal rule
        so_far = pd.Series(np.cumsum(pieces) / curve.index[1:], curve.index[1:])
        below = so_far.index[so_far <= epsilon]
        found.append(float(below[0]) if len(below) else np.inf)
    return np.array(found)


def _slope(results: pd.DataFrame, name: str, clients: int) -> tuple[float, float]:
    """The slope of log communications against log ε, and half its 95 % interval."""
    epsilons = sorted(select(results, study="rate")["epsilon"].unique())
    counts = np.array([np.mean(_reached(results, name, clients, epsilon)) for epsilon in epsilons])
    if len(epsilons) < 3 or not np.isfinite(counts).all():
        return np.nan, np.inf
    x, y = np.log(epsilons), np.log(counts)
    fit = np.polyfit(x, y, 1)
    left = y - np.polyval(fit, x)
    error = math.sqrt(np.sum(left**2) / (len(x) - 2) / np.sum((x - x.mean()) ** 2))
    return float(fit[0]), STUDENT * error


def _floor(results: pd.DataFrame, **labels: Any) -> float:
    """The mean of ‖∇Φ‖² over the second half of the rounds and the seeds."""
    own = curves(results, "relative", **labels)
    return mean([float(curve[curve.index > curve.index[-1] / 2].mean()) for curve in own])


def _floors(results: pd.DataFrame, study: str, over: str) -> tuple[list[float], list[float]]:
    values = sorted(select(results, study=study)[over].unique())
    return values, [_floor(results, study=study, **{over: value}) for value in values]


def picture(results: pd.DataFrame) -> Figure:
    """Communications against ε; the floors against M; the floors of exact oracles against the step."""
    fig, axes = report.figure(1, 3, width=14.5, height=4.4)
    left, middle, right = axes[0]
    epsilons = sorted(select(results, study="rate")["epsilon"].unique())
    for name in BOUNDS:
        for clients in _clients(results, name):
            counts = [np.mean(_reached(results, name, clients, epsilon)) for epsilon in epsilons]
            look = {**report.style(name), "linestyle": "-" if clients == FEDERATIONS[0] else "--"}
            left.loglog(epsilons, counts, **look, label=f"{name}, M = {clients}")
    left.invert_xaxis()
    report.label(
        left, r"$\epsilon$, relative to the start", "communications", r"Until the mean $\|\nabla\Phi\|^2$ is ε"
    )
    report.legend(left)
    for study, words, colour in (
        ("noise", "FedBiO, all samples noisy", report.PURPLE),
        ("upper", "FedBiOLocal, upper samples noisy", report.GREEN),
        ("lower", "FedBiOLocal, lower samples noisy", report.ORANGE),
    ):
        middle.loglog(*_floors(results, study, "clients"), "o-", color=colour, label=words)
    ticks(middle, sorted(select(results, study="noise")["clients"].unique()))
    report.label(middle, "clients M", r"floor of $\|\nabla\Phi\|^2$", "Noise: more clients")
    report.legend(middle)
    for local, line in ((1, "--"), (LOCAL, "-")):
        steps, floors = _floors(results, f"exact, I = {local}", "step")
        right.loglog(steps, np.maximum(floors, 1e-32), f"o{line}", color=report.PURPLE, label=f"I = {local}")
    ticks(right, sorted(select(results, study=f"exact, I = {LOCAL}")["step"].unique()))
    report.label(right, "step", r"floor of $\|\nabla\Phi\|^2$", "Exact oracles: drift")
    report.legend(right)
    return fig


NEAR = 0.1  # of ε: where a run's floor is below that, how it comes to ε says nothing of its noise
START = (
    "Not shown by these runs: their floor is a few thousandths to a few hundredths of ε. The count is that of the "
    "start's dying away, and its slope is the step's own exponent."
)


def _share(results: pd.DataFrame, name: str, clients: int) -> float:
    """The largest floor of a method's runs, over its ε."""
    epsilons = select(results, study="rate", method=name, clients=clients)["epsilon"].unique()
    labels: dict[str, Any] = {"study": "rate", "method": name, "clients": clients}
    return max(_floor(results, epsilon=epsilon, **labels) / epsilon for epsilon in epsilons)


def _rate(results: pd.DataFrame, name: str) -> Finding:
    """The slope is no steeper than the bound, within its error, for every M, and the interval says something; undecided
    where the floors are far below ε."""
    figures: Figures = {}
    holds = near = True
    for clients in _clients(results, name):
        slope, error = _slope(results, name, clients)
        epsilons = sorted(select(results, study="rate")["epsilon"].unique(), reverse=True)
        counts = [float(np.mean(_reached(results, name, clients, epsilon))) for epsilon in epsilons]
        figures[f"slope at M = {clients}, and half its 95 % interval"] = [slope, error]
        figures[f"communications at ε = {', '.join(f'{e:g}' for e in epsilons)}, M = {clients}"] = counts
        figures[f"largest floor over ε, M = {clients}"] = share = _share(results, name, clients)
        holds = holds and slope + error >= BOUNDS[name] and error < 0.5
        near = near and share >= NEAR
    return Finding((bool(holds) if near else None) if holds else False, figures, "" if near else START)


def fedbio_rate(results: pd.DataFrame) -> Finding:
    """See `_rate`."""
    return _rate(results, "FedBiO")


def fedbioacc_rate(results: pd.DataFrame) -> Finding:
    """See `_rate`."""
    return _rate(results, "FedBiOAcc")


def fednest_rate(results: pd.DataFrame) -> Finding:
    """See `_rate`."""
    return _rate(results, "FedNest")


def acc_is_cheapest(results: pd.DataFrame) -> Finding:
    """From the largest ε to the smallest, FedBiOAcc's communications grow by the smallest factor, FedNest's most."""
    grow: dict[str, float] = {}
    epsilons = sorted(select(results, study="rate")["epsilon"].unique())
    clients = min(_clients(results, "FedNest"))
    for name in BOUNDS:
        counts = [np.mean(_reached(results, name, clients, epsilon)) for epsilon in (epsilons[0], epsilons[-1])]
        grow[name] = float(counts[0] / counts[1])
    figures: Figures = {f"growth at M = {clients}, {name}": value for name, value in grow.items()}
    if not grow["FedBiOAcc"] < grow["FedBiO"] < grow["FedNest"] < np.inf:
        return Finding(False, figures)
    near = min(_share(results, name, clients) for name in BOUNDS) >= NEAR
    return Finding(True if near else None, figures, "" if near else START)


def _falls(results: pd.DataFrame, study: str) -> Finding:
    """The floor falls from each M to the next, at least half as fast as 1/M in all."""
    sizes, floors = _floors(results, study, "clients")
    power = float(np.polyfit(np.log(sizes), np.log(floors), 1)[0])
    figures: Figures = {f"floor at M = {', '.join(map(str, sizes))}": floors, "as a power of M": power}
    return Finding(bool((np.diff(floors) < 0).all()) and power < -0.5, figures)


def error_falls(results: pd.DataFrame) -> Finding:
    """See `_falls`: FedBiO."""
    return _falls(results, "noise")


def upper_speeds_up(results: pd.DataFrame) -> Finding:
    """See `_falls`: FedBiOLocal, upper samples noisy."""
    return _falls(results, "upper")


def lower_does_not(results: pd.DataFrame) -> Finding:
    """FedBiOLocal, lower samples noisy: the floor does not fall with M."""
    fall = _falls(results, "lower")
    return Finding(not fall.holds, fall.figures)


def drift_remains(results: pd.DataFrame) -> Finding:
    """With exact oracles: I = 1 has no floor, with I = LOCAL the floor goes like the step to the power 2 (± .3)."""
    steps, floors = _floors(results, f"exact, I = {LOCAL}", "step")
    _, alone = _floors(results, "exact, I = 1", "step")
    power = float(np.polyfit(np.log(steps), np.log(floors), 1)[0])
    figures: Figures = {
        f"floor at steps {', '.join(f'{s:g}' for s in steps)}, I = {LOCAL}": floors,
        "as a power of the step": power,
        "the same, I = 1": alone,
    }
    return Finding(abs(power - 2) < 0.3 and max(alone) < 1e-3 * min(floors), figures)


rates = Experiment(
    name="fedbio-rates",
    title="communications to reach ε, on stochastic quadratics",
    paper=f"{PAPER}, Thm 1–4 and Table 1 (which has no such run).",
    setup=(
        f"Bilevel quadratics, M clients that differ, {SAMPLES} noisy samples each, drawn with replacement. *Rate*: "
        "communications until the mean of ‖∇Φ(x_t)‖² over the rounds so far is ε, relative to the start's; steps, "
        f"batches and I follow ε and M as in the theory: FedBiO steps ∝ ε^{{1/2}}, b ∝ 1/(Mε), I = {LOCAL}; FedBiOAcc "
        f"α_t ∝ t^{{-1/3}}, b ∝ ε^{{-1/2}}, I ∝ M^{{-2/3}} ({LOCAL} at M = {FEDERATIONS[0]}); FedNest steps ∝ ε, b = "
        "8. The slopes are fitted over five ε, two decades; the bounds are upper bounds, so a flatter slope agrees "
        "with them. *Noise*: the floor of FedBiO at a fixed step .02 and b = 1; and of FedBiOLocal with noisy samples "
        "at one level, the other exact. *Exact*: full gradients. A floor is the mean over the second half of 4000 "
        "rounds."
    ),
    runs=runs,
    picture=picture,
    claims=(
        Claim("FedBiO: communications grow no faster than ε^{-3/2}.", "Thm 1, Table 1", fedbio_rate, "theory"),
        Claim("FedBiOAcc: communications grow no faster than ε^{-1}.", "Thm 2, Table 1", fedbioacc_rate, "theory"),
        Claim("FedNest: communications grow no faster than ε^{-2}.", "Table 1", fednest_rate, "theory"),
        Claim(
            "As ε falls FedBiOAcc's communications grow least, FedNest's most.", "Table 1", acc_is_cheapest, "theory"
        ),
        Claim("The error falls with the number of clients.", "Thm 1, linear speed-up", error_falls, "theory"),
        Claim(
            "Local lower levels: it falls with the clients for upper-level samples …",
            "Thm 3",
            upper_speeds_up,
            "theory",
        ),
        Claim(
            "… but not for lower-level ones.",
            "Thm 3",
            lower_does_not,
            "theory",
            differs(
                "set-up",
                "On quadratics it falls as well: y_i enters the hypergradient linearly here, so that the clients' "
                "independent errors in y_i average out. The theory bounds ‖y_i − y_i*‖², which does not shrink with M.",
            ),
        ),
        Claim(
            "Exact oracles do not help: with I > 1 the drift alone forces steps ∝ ε^{1/2}.",
            "Thm 1, remark",
            drift_remains,
            "theory",
        ),
    ),
    differences=("The paper's experiments are not in its text at hand; this set-up is ours.",),
)

EXPERIMENTS = (rates,)
