"""Theorems 3 and 4 of the paper on weighted nodes: communications to reach ε, on a convex quadratic F."""

import functools
import math
from typing import Any

import jax.numpy as jnp
import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from rookery import report
from rookery.algorithms import WeightedNodesABA, WeightedNodesProx
from rookery.data.clients import Clients
from rookery.experiments.machinery import Claims, Config, Experiment, Finding, description
from rookery.experiments.machinery.claims import lead, together
from rookery.experiments.machinery.curves import curves, last, select, values
from rookery.experiments.machinery.drawing import draw, ticks
from rookery.experiments.machinery.numbers import Figures, fitted_power, listed, mean
from rookery.parts.projection import capped_simplex
from rookery.problems.problems import WeightedNodes
from rookery.tasks.task import Task

NODES, CAP, LOCAL = 16, 0.5, 4  # K, b, τ where it is not 1
CURVATURES = (0.5, 1.5)  # of the samples in each coordinate; their mean is 1
REFRESH, LONGEST = 0.8, 0.2  # q and γ_0, with γ_0 ≤ q/4μ as in (17)
METHODS = {"ABA": WeightedNodesABA, "Prox": WeightedNodesProx}
METRICS = {"ABA": "gap", "Prox": "mapping"}
EPSILONS = {"ABA": (0.1, 0.04, 0.015, 0.005, 0.002), "Prox": (0.5, 0.33, 0.22, 0.15, 0.1)}  # relative to the start
WEIGHT_STEP = 1 / 3  # η = 1/(3ℓ_F), with ℓ_F = 1
POWERS = {"ABA": 2, "Prox": 1}  # γ ∝ 1/S^p where τ > 1
STRETCH = {"ABA": 1 / 40, "Prox": 1 / 3}  # of M: about 5, and so γ = γ_0, at the largest ε
FIXED = {0.2: report.VERMILION, 0.1: report.GREEN, 0.05: report.PURPLE}  # γ of the runs at a fixed one
LENGTHS = {"ABA": lambda e: 4.5 * e**-0.5, "Prox": lambda e: 3.0 * e**-2}  # S
BOUNDS = {("ABA", 1): -0.5, ("Prox", 1): -2.0, ("ABA", LOCAL): -1.5, ("Prox", LOCAL): -4.0}


def bowls(theta: Any, rows: Any) -> Any:
    """½Σ_j s_j(θ_j − t_j)², the mean over the rows."""
    return 0.5 * jnp.mean(jnp.sum(rows["s"] * (theta - rows["t"]) ** 2, axis=-1))


@functools.cache
def rates_task(seed: int) -> Task:
    """Node k's minimiser is e_k/k, so that F(w) = ½Σ((w_k − w*_k)/k)²; w* ∝ k is learnt from equal weights.

    The metrics are F(w) − F(w*) and ‖w − Proj(w − η∇F(w))‖/η with Prox's η, both relative to the start's. The seed
    does not matter.
    """
    k = np.arange(1, NODES + 1)
    best, curvature = k / k.sum(), 1.0 / k**2
    samples = np.where((np.arange(2)[:, None] + k) % 2, *CURVATURES)  # two, of opposite curvatures
    rows = lambda theta: {"s": samples, "t": np.tile(theta, (2, 1))}
    gap = lambda w: 0.5 * jnp.sum(curvature * (w - best) ** 2)
    after = lambda w: capped_simplex(w - WEIGHT_STEP * curvature * (w - best), CAP)
    mapping = lambda w: jnp.linalg.norm(w - after(w)) / WEIGHT_STEP
    start = jnp.full(NODES, 1 / NODES)
    first = gap(start), mapping(start)
    return Task(
        name="quadratic",
        problem=WeightedNodes(bowls, CAP),
        clients=Clients(lower=[rows(own) for own in np.diag(1.0 / k)], center=rows(best / k), replace=True),
        init=np.zeros(NODES),
        evaluate=lambda x, y: {"gap": gap(x) / first[0], "mapping": mapping(x) / first[1]},
        metric="gap",
    )


def inner(method: str, tau: int, rounds: int) -> tuple[float, int, float]:
    """γ, T_s and the logarithm in T_s, for S rounds: the theorems' at s = S − 1, with constants of our own."""
    power = POWERS[method]
    if tau == 1:
        log = math.log(rounds ** (2 * power) / LONGEST)
        return LONGEST, math.ceil(log / LONGEST), log
    most = max(1 / LONGEST, STRETCH[method] * rounds**power)
    log = math.log(most**3)
    return 1 / most, math.ceil(most * log), log


def rates_run(quick: bool, method: str, tau: int, epsilon: float = 0.0, step: float = LONGEST) -> Config:
    """A run of S rounds, where S, γ and T_s follow ε; or, without ε, at a fixed γ with enough inner steps to forget the
    start."""
    if epsilon:
        rounds, every, name = math.ceil(LENGTHS[method](epsilon)), 1, f"ε = {epsilon:g}"
        step, steps, log = inner(method, tau, rounds)
    else:
        rounds, every, name = 20 if quick else 400, 10, f"γ = {step:g}"
        steps, log = round(24 / step), 1.0
    study = "rate" if epsilon else "fixed"
    return Config(
        name=f"{method}, τ = {tau}, {name}",
        labels={"study": study, "method": method, "tau": tau, "epsilon": epsilon, "log": log, "step": step},
        task=rates_task,
        algorithm=METHODS[method](
            model_step=step, linear_step=step, weight_step=WEIGHT_STEP, steps=steps, sync_every=tau,
            refresh=REFRESH, batch_size=1, average="theory", strong_convexity=1.0,
        ),
        rounds=rounds,
        every=every,
        seeds=(0,) if quick else (0, 1, 2),
        float64=True,
    )  # fmt: skip


def rates_runs(quick: bool) -> list[Config]:
    """Two methods, with and without local steps, over ε; and ABA at fixed γ."""
    count = 1 if quick else 5
    rates = [rates_run(quick, m, tau, e) for m in METHODS for tau in (1, LOCAL) for e in EPSILONS[m][:count]]
    return rates + [rates_run(quick, "ABA", tau, step=step) for tau in (1, LOCAL) for step in [*FIXED][:count]]


def rounds_to(curve: pd.Series, method: str, epsilon: float) -> float:
    """Rounds until ε is reached; infinity if it is not. Between evaluations, logarithms are interpolated.

    ABA: F(w_ag) − F* ≤ ε. Prox, after s rounds: the mean of the squared gradient mapping over w^(0), …, w^(s−1), one of
    which it returns, is at most ε².
    """
    rounds = np.arange(curve.index[-1] + 1)
    found = np.exp(np.interp(rounds, curve.index.to_numpy(float), np.log(curve.to_numpy())))
    if method == "Prox":
        found = np.append(np.inf, np.sqrt(np.cumsum(found**2) / (rounds + 1))[:-1])
    hit = np.flatnonzero(found <= epsilon)
    return float(hit[0]) if len(hit) else np.inf


def _counts(results: pd.DataFrame, method: str, tau: int) -> np.ndarray:
    """Rows: ε, from the largest; rounds and communications until it is reached; the logarithm in T_s."""
    table = []
    for epsilon in values(results, "epsilon", study="rate", method=method, tau=tau)[::-1]:
        own = select(results, study="rate", method=method, tau=tau, epsilon=epsilon)
        end = own.iloc[-1]
        rounds = mean([rounds_to(curve, method, epsilon) for curve in curves(own, METRICS[method])])
        table.append((epsilon, rounds, rounds * end["exchanges"] / end["round"], end["log"]))
    return np.array(table, float).T


def rates_picture(results: pd.DataFrame) -> Figure:
    """Communications against ε with the bounds' slopes, for both methods; and the gap at fixed γ over the rounds."""
    fig, axes = report.figure(1, 3, width=14.5, height=4.6)
    for ax, method in zip(axes[0], METHODS, strict=False):
        for tau, colour in ((1, report.BLUE), (LOCAL, report.ORANGE)):
            epsilons, _, counts, logs = _counts(results, method, tau)
            bound = counts[0] * (epsilons / epsilons[0]) ** BOUNDS[method, tau] * logs / logs[0]
            ax.loglog(epsilons, counts, "o-", color=colour, label=f"τ = {tau}")
            words = f"bound, $\\tilde O(\\epsilon^{{{BOUNDS[method, tau]:g}}})$"
            ax.loglog(epsilons, bound, ":", color=colour, label=words)
        ax.invert_xaxis()
        ticks(ax, list(EPSILONS[method]))
        what = "F gap" if method == "ABA" else "gradient mapping"
        report.label(ax, "ε, relative to the start", "communications", f"{method}: until the {what} is ε")
        report.legend(ax)
    ax = axes[0, -1]
    look = {"marker": "o", "markevery": 1}
    lines: dict[str, dict[str, Any]] = {
        f"τ = {LOCAL}, γ = {step:g}": {"tau": LOCAL, "step": step, "look": {**look, "color": colour, "linestyle": "-"}}
        for step, colour in FIXED.items()
    }
    lines["τ = 1, every γ"] = {"tau": 1, "step": LONGEST, "look": {**look, "color": report.BLACK, "linestyle": ":"}}
    draw(ax, select(results, study="fixed"), "round", "gap", lines)
    ax.set_yscale("log")
    report.label(ax, "rounds", "F gap, relative", "ABA at a fixed γ")
    report.legend(ax)
    return fig


claim = Claims("theory")


def _rate(results: pd.DataFrame, method: str, tau: int) -> Finding:
    """Without the logarithm in T_s the slope is no steeper than the bound, within its error, which is below .5."""
    epsilons, rounds, counts, logs = _counts(results, method, tau)
    slope, error = fitted_power(epsilons, counts / logs)
    figures: Figures = {
        f"power of ε without T_s's logarithm, ± (bound {BOUNDS[method, tau]:g})": [slope, error],
        f"communications at ε = {listed(epsilons)}": counts,
        f"rounds times ε^{-BOUNDS[method, 1]:g}": rounds * epsilons ** -BOUNDS[method, 1],
    }
    return Finding(bool(slope + error >= BOUNDS[method, tau] and error < 0.5), figures)


for method, tau, power in (("ABA", 1, "1/2"), ("Prox", 1, "2"), ("ABA", LOCAL, "3/2"), ("Prox", LOCAL, "4")):
    text = f"{method}, τ {'=' if tau == 1 else '>'} 1: communications grow no faster than ε^{{-{power}}}."
    claim(text, "Thm 3" if method == "ABA" else "Thm 4", method=method, tau=tau)(_rate)


@claim("At a fixed γ, local steps leave an error that falls with γ; τ = 1 leaves none.", "Prop. 3, (45)")
def drift_remains(results: pd.DataFrame) -> Finding:
    """At the end τ = 1 has the same gap at every γ (within 1 %); τ > 1 has a larger one, which falls with γ."""
    steps = values(results, "step", study="fixed")[::-1]
    alone, local = ([last(results, "gap", study="fixed", tau=t, step=step) for step in steps] for t in (1, LOCAL))
    ends = [mean(own) for own in alone]
    above, fall = lead(local[0], alone[0]), lead(local[0], local[-1])
    figures: Figures = {
        f"F gap at γ = {listed(steps)}, τ = {LOCAL} (τ = 1: {ends[0]:.3g})": [mean(own) for own in local],
        f"τ = {LOCAL} over τ = 1 at γ = {steps[0]:g}, and the margin": above,
        f"fall from γ = {steps[0]:g} to {steps[-1]:g}, and the margin": fall,
    }
    return Finding(together([max(ends) < 1.01 * min(ends), above.holds, fall.holds]), figures)


rates = Experiment(
    **description("weighted-rates", globals()),
    runs=rates_runs,
    picture=rates_picture,
    claims=tuple(claim),
)
