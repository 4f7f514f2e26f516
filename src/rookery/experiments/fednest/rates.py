"""The rates of FedNest's theory in K, and the bias of its hypergradient in N, on quadratics."""

import dataclasses
import functools
from typing import Any

import jax
import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from rookery import report, theory
from rookery.algorithms import FedNest
from rookery.data.clients import Clients
from rookery.experiments.fednest import quadratics
from rookery.experiments.machinery import Claims, Config, Experiment, Finding, description
from rookery.experiments.machinery.claims import Lead, lead, margin, together
from rookery.experiments.machinery.curves import area, curves, select, values
from rookery.experiments.machinery.numbers import listed, power
from rookery.tasks import quadratic
from rookery.tasks.quadratic import solution
from rookery.tasks.task import Task

NOISE = 2.0  # standard deviation of a sample's vectors, which are of about unit length
ROOTS, QUICK_ROOTS = (18, 32, 56, 100, 180), (10, 20)  # √K
TERMS, RANDOM_TERMS, QUICK_TERMS = (2, 3, 4, 6, 8, 12, 16, 24), (2, 4, 8, 16), (2, 4)  # N
DRAWS, QUICK_DRAWS, PARTS = 20_000, 2_000, 50  # of the random hypergradient, a seed; and the parts that they come in
STILL = 1e-10  # the step of the runs that only draw hypergradients: x moves too little to matter

# The bias of the hypergradient. One round of FedNest with one outer step is x ← x − α·h, so h is read off the move.


@functools.cache
def _bias_problem() -> Task:
    """A bilevel quadratic with one sample a client, started at (x, y*(x))."""
    rng = np.random.default_rng(10)
    eye, zero = np.eye(quadratics.DIM), np.zeros((quadratics.DIM, quadratics.DIM))

    def lower() -> dict[str, np.ndarray]:
        a, b = quadratics.definite(rng, 1.0, 4.0), 0.5 * quadratics.turn(rng) + 0.5 * eye
        return {"A": a[None], "B": b[None], "b": rng.normal(size=(1, quadratics.DIM))}

    def upper() -> dict[str, np.ndarray]:
        c, d = 3 * rng.normal(size=(1, quadratics.DIM)) + 3, rng.normal(size=(1, quadratics.DIM))
        return {"C": eye[None], "D": eye[None], "E": zero[None], "c": c, "d": d}

    with jax.enable_x64(True):
        clients = Clients([lower() for _ in range(quadratics.CLIENTS)], [upper() for _ in range(quadratics.CLIENTS)])
        x = np.ones(quadratics.DIM)
        task = quadratics.quadratic_task(quadratic(clients=1).problem, clients, (x, x), np.zeros_like)
        return dataclasses.replace(task, init=(x, solution(task).y(x)))


@functools.cache
def _bias_constants() -> theory.Constants:
    return theory.quadratic_constants(_bias_problem())


def bias_task(seed: int, terms: int, step: float, rounds: int) -> Task:
    """How far the mean of `rounds` hypergradients with N = terms is off, at (x, y*(x)) of a bilevel quadratic.

    `bias` is the component of this error along the closed form's, whose length is `closed_form`, at the end of the run.
    `closed_variance` is that of the component of one random hypergradient.
    """
    task = _bias_problem()
    closed = solution(task)
    x0, y0 = task.init
    smooth = _bias_constants().l_g1
    hessian, f_y = closed.A / smooth, closed.C @ y0 - closed.c + closed.E.T @ x0
    power = lambda n: np.linalg.matrix_power(np.eye(len(y0)) - hessian, n)
    expected = -closed.B.T @ (power(terms) @ np.linalg.solve(closed.A, f_y))
    length = float(np.linalg.norm(expected))
    draws = [terms / smooth * float(expected @ closed.B.T @ power(n) @ f_y) for n in range(terms)]
    variance = float(np.var(draws)) / length**2

    def evaluate(x: Any, y: Any) -> dict[str, float]:
        error = (x0 - np.asarray(x, float)) / (step * rounds) - closed.hypergradient(x0, y0)
        return {"bias": float(error @ expected) / length, "closed_form": length, "closed_variance": variance}

    return Task("hypergradient", task.problem, task.clients, task.init, evaluate, metric="bias")


def _bias_config(neumann: Any, terms: int, rounds: int, seeds: tuple[int, ...]) -> Config:
    step = 1.0 if rounds == 1 else STILL
    return Config(
        name=f"bias, {neumann}, N = {terms}",
        labels={"part": "bias", "problem": "bilevel", "neumann": neumann, "N": terms, "kappa": _bias_constants().kappa},
        task=bias_task,
        settings={"terms": terms, "step": step, "rounds": rounds},
        algorithm=FedNest(
            upper_step=step,
            lower_step=0.1,
            neumann=neumann,
            neumann_terms=terms - 1 if neumann == "sum" else terms,  # the sum has one term more
            hessian_step=1 / _bias_constants().l_g1,
        ),
        rounds=rounds,
        every=max(1, rounds // PARTS),
        seeds=seeds,
        float64=True,
    )


def rates_runs(quick: bool) -> list[Config]:
    """Each class at each K, with its own step; then the hypergradient at each N."""
    roots, seeds = (QUICK_ROOTS, (0, 1)) if quick else (ROOTS, tuple(range(3, 11)))
    changes: dict[str, Any] = {"neumann_terms": 7} if quick else {}  # the same at every K: one program for all
    # Evaluated every √K/2 rounds: the start of a run, which is about √K rounds long, is then resolved equally well.
    configs = [
        Config(
            name=f"{name}, K = {root**2}",
            labels={"part": "rate", "problem": name, "K": root**2},
            task=quadratics.rates_task,
            settings={"problem": name, "noise": NOISE},
            algorithm=quadratics.theory_method(name, NOISE, root**2, roots[0] ** 2, **changes),
            rounds=root**2,
            every=5 if quick else root // 2,
            seeds=seeds,
            float64=True,
        )
        for name in quadratics.CLASSES
        for root in roots
    ]
    terms, random, draws = (QUICK_TERMS, QUICK_TERMS, QUICK_DRAWS) if quick else (TERMS, RANDOM_TERMS, DRAWS)
    configs += [_bias_config("sum", n, 1, (0,)) for n in terms]
    return configs + [_bias_config("random", n, draws, seeds) for n in random]


# What the claims measure.


MEASURES = {"mean": area, "floor": lambda curve: float(curve[curve.index > curve.index[-1] / 2].mean())}


def by_rounds(results: pd.DataFrame, problem: str, measure: str) -> pd.DataFrame:
    """The mean of ‖∇Φ(x^k)‖² over all rounds or over the second half: a row for each seed, a column for each K."""
    own = select(results, part="rate", problem=problem)
    runs = {k: curves(own, "gradient", K=k) for k in values(own, "K")}
    return pd.DataFrame({k: [MEASURES[measure](curve) for curve in each] for k, each in runs.items()})


def slope(table: pd.DataFrame) -> Lead:
    """The slope of the logarithms, fitted for each seed: its mean, and the margin."""
    return lead([power(table.columns.to_numpy(float), row) for row in table.to_numpy(float)])


claim = Claims("theory")


def _no_flatter(results: pd.DataFrame, problem: str) -> Finding:
    """The slopes of the mean over all rounds, which the theorem bounds, and of the floor are at most −1/2 plus the
    margin. The mean is mostly the decay from the start, the floor is the noise."""
    fitted = {measure: slope(by_rounds(results, problem, measure)) for measure in MEASURES}
    parts = [own.mean <= -0.5 + own.error if own.error <= 0.1 else None for own in fitted.values()]
    few = "A margin is too wide to tell: more seeds are needed." * (None in parts)
    return Finding(together(parts), {f"slope of the {name}, and the margin": own for name, own in fitted.items()}, few)


for name, symbol, where in (
    ("Bilevel", "Φ", "Thm 3.1, Cor. 3.1"),
    ("Minimax", "Φ", "Thm 3.1, Cor. 3.2"),
    ("Compositional", "Φ", "Cor. 3.3"),
    ("Single level", "f", "Thm 3.2"),
):
    text = f"{name}: mean ‖∇{symbol}‖² falls no flatter than K^(−1/2)."
    claim(text, where, problem=name.lower())(_no_flatter)


def _biases(results: pd.DataFrame, neumann: str) -> pd.DataFrame:
    """At the end of the runs: by N, the mean over the seeds and its standard error."""
    own = select(results, part="bias", neumann=neumann)
    groups = own[own["round"] == own["round"].max()].groupby("N")
    table = groups[["bias", "closed_form", "kappa"]].mean()
    return table.assign(error=groups["bias"].sem())


@claim("The hypergradient's bias is geometric in N, no slower than (κ − 1)/κ.", "Lemma 2.2")
def bias_is_geometric(results: pd.DataFrame) -> Finding:
    """From each N to the next the summed series' bias falls by (κ − 1)/κ or more a term."""
    table = _biases(results, "sum")
    bias, rate = table["bias"].to_numpy(), 1 - 1 / float(table["kappa"].iloc[0])
    factors = (bias[1:] / bias[:-1]) ** (1 / np.diff(table.index.to_numpy(float)))
    holds = bool((factors <= rate * (1 + 1e-6)).all() and (bias > 0).all())
    return Finding(holds, {"largest factor a term, and (κ − 1)/κ": [factors.max(), rate]})


@claim("The mean of the random hypergradient has this bias (within the margin).", "Lemma 2.2, (16)")
def random_has_that_bias(results: pd.DataFrame) -> Finding:
    table, seeds = _biases(results, "random"), select(results, neumann="random")["seed"].nunique()
    away = ((table["bias"] - table["closed_form"]) / table["error"]).abs()
    figures = {f"standard errors away at N = {listed(table.index)}": away, "measured": table["bias"]}
    return Finding(bool((away < margin(seeds)).all()), figures)


@claim("The variance of the random hypergradient grows with N.", "ours; (10), (17f), (18)", "own")
def variance_grows(results: pd.DataFrame) -> Finding:
    """It is the closed form's, within a third, and grows with N."""
    own = results[results["neumann"] == "random"]
    found = {}
    for n, runs in own.groupby("N"):
        parts = [np.diff(run["bias"]) * run["round"].max() / np.diff(run["round"]) for _, run in runs.groupby("seed")]
        lengths = np.diff(next(iter(runs.groupby("seed")))[1]["round"])
        found[n] = float(np.var(np.concatenate(parts), ddof=1) * lengths.mean())
    measured = pd.Series(found)
    closed = own.groupby("N")["closed_variance"].first()
    near = bool(((measured / closed - 1).abs() < 1 / 3).all())
    note = "The second line of (10) bounds the first moment only, and the σ̃_f of (18) has no N."
    figures = {f"variance at N = {listed(measured.index, '.0f')}": measured, "closed form": closed}
    return Finding(near and bool((np.diff(measured) > 0).all()), figures, note)


def rates_picture(results: pd.DataFrame) -> Figure:
    """√K times the mean of ‖∇Φ‖² and times its floor, relative to the smallest K; the bias against N."""
    fig, axes = report.figure(1, 3, width=15.5, height=4.4)
    colours = (report.BLUE, report.VERMILION, report.GREEN, report.PURPLE)
    titles = {"mean": "Mean ‖∇Φ‖² over the run", "floor": "Its floor: the second half of the run"}
    for ax, (measure, title) in zip(axes[0], titles.items(), strict=False):
        for name, colour, marker in zip(quadratics.CLASSES, colours, "os^D", strict=True):
            table = by_rounds(results, name, measure)
            fitted, k = slope(table), table.columns.to_numpy(float)
            scaled = table * np.sqrt(k) / (table.iloc[:, 0].mean() * np.sqrt(k[0]))
            text = f"{name}: {fitted.mean:.3f} ± {fitted.error:.3f}".replace("-", "−")
            bars = {"yerr": 2 * scaled.sem(), "capsize": 3, "linewidth": 1.6, "markersize": 5}
            ax.errorbar(k, scaled.mean(), label=text, color=colour, marker=marker, **bars)
        ax.axhline(1, color=report.GREY, linestyle=":", linewidth=2, label="slope −1/2")
        ax.set_xscale("log")
        report.label(ax, "rounds K, each its own run", "times √K, relative to the smallest K", title)
        report.legend(ax, title="fitted slope and margin", title_fontsize=9)
    axes[0, 0].set_ylim(0.85, 1.25)
    axes[0, 1].set_yscale("log")

    right, summed, drawn = axes[0, 2], _biases(results, "sum"), _biases(results, "random")
    right.plot(summed.index, summed["bias"], label="summed series", color=report.SKY, marker="v", linestyle="--")
    both = {"color": report.BLUE, "marker": "o", "linestyle": "none", "capsize": 3}
    right.errorbar(drawn.index, drawn["bias"], yerr=2 * drawn["error"], label="random, mean of many draws", **both)
    rate = summed["bias"].iloc[0] * (1 - 1 / summed["kappa"]) ** (summed.index - summed.index[0])
    right.plot(summed.index, rate, label="((κ − 1)/κ)ᴺ", color=report.GREY, linestyle=":", linewidth=2)
    right.set_yscale("log")
    report.label(right, "N", "bias of the hypergradient", f"Bias in N, κ = {summed['kappa'].iloc[0]:.2f}")
    report.legend(right)
    return fig


rates = Experiment(
    **description("fednest-rates", globals(), local=listed(quadratics.LOCAL_STEPS)),
    runs=rates_runs,
    picture=rates_picture,
    claims=tuple(claim),
)
