"""FedBiO's data cleaning: MNIST with corrupted labels, a weight for each sample."""

from typing import Any

import pandas as pd
from matplotlib.figure import Figure

from rookery import report
from rookery.algorithms import FedAvg, FedBiO, FedBiOAcc, FedNest
from rookery.experiments.machinery import Claims, Config, Experiment, Finding, Grid, Headline, description
from rookery.experiments.machinery.claims import all_lead, lead
from rookery.experiments.machinery.curves import ends, ends_by, select, values
from rookery.experiments.machinery.drawing import below, by_method, draw
from rookery.experiments.machinery.numbers import chosen_words
from rookery.language.fed import Algorithm
from rookery.tasks.data_cleaning import data_cleaning

FRACTIONS = (0.1, 0.4, 0.8, 0.95)  # ρ
CLEANERS = ("FedBiOAcc", "FedBiO", "FedNest", "FedAvg")
# The upper step over the number of training samples (a weight's own gradient is of the order of its inverse), and the
# lower one, of y and of the linear system. By the search.
CLEANING_CHOSEN = {"FedBiOAcc": (10.0, 0.1), "FedBiO": (100.0, 0.1), "FedNest": (0.3, 0.1), "FedAvg": (0.0, 0.1)}
UPPER_GRID, LOWER_GRID = (0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0), (0.003, 0.01, 0.03, 0.1, 0.3)
NUMBER, QUICK_NUMBER = 48_000, 1_100  # of training samples


def plain_training(data_dir: Any = None, **settings: Any) -> Any:
    """The same classifier on the same labels, without weights."""
    return data_cleaning(data_dir=data_dir, **settings).single_level


def cleaner(method: str, quick: bool, factor: float, lower: float) -> Algorithm:
    """A method with five local steps (or inner ones) a round."""
    upper = factor * (QUICK_NUMBER if quick else NUMBER)
    batch: dict[str, Any] = {"batch_size": None if quick else 128}
    single: dict[str, Any] = {"upper_step": upper / 5, "lower_step": lower, "linear_step": lower, "local_steps": 5}
    if method == "FedAvg":
        return FedAvg(step=lower, local_steps=5, **batch)
    if method == "FedBiO":
        return FedBiO(**single, **batch)
    if method == "FedBiOAcc":
        return FedBiOAcc(**single, **batch, delta=5.0, offset=125.0)
    nested: dict[str, Any] = {"lower_local_steps": 5, "neumann_terms": 5}
    return FedNest(upper_step=upper, lower_step=lower, hessian_step=lower, **nested, **batch)


def cleaning(quick: bool, method: str, fraction: float, factor: float, lower: float, **changes: Any) -> Config:
    """One method at one fraction of corrupted labels."""
    return Config(
        name=f"{method}, ρ = {fraction:g}",
        labels={"method": method, "fraction": fraction},
        task=plain_training if method == "FedAvg" else data_cleaning,
        settings={"data": "digits" if quick else "mnist", "clients": 10, "corrupted": fraction, "equal": True},
        algorithm=cleaner(method, quick, factor, lower),
        rounds=20 if quick else 1000,
        every=5 if quick else 20,
        seeds=(0,) if quick else (0, 1, 2),
    ).but(**changes)


def cleaning_runs(quick: bool) -> list[Config]:
    """Four methods, four fractions (two when quick)."""
    chosen = dict.fromkeys(CLEANERS, (10.0, 0.5)) if quick else CLEANING_CHOSEN
    fractions = FRACTIONS[1:3] if quick else FRACTIONS
    return [cleaning(quick, m, fraction, *chosen[m]) for fraction in fractions for m in CLEANERS]


def cleaning_tried(quick: bool, method: str, upper: float, lower: float) -> Config:
    """Both steps of a method at ρ = .4, on a seed that is not reported."""
    name = f"search: {method}, upper {upper:g}, lower {lower:g}"
    return cleaning(quick, method, 0.4, upper, lower, name=name, seeds=(9,), every=20 if quick else 200)


def cleaning_search(quick: bool) -> list[Config]:
    """Both steps of every method."""
    upper, lower = (UPPER_GRID[-1:], (0.5,)) if quick else (UPPER_GRID, LOWER_GRID)
    return [
        cleaning_tried(quick, m, factor, step)
        for m in CLEANERS
        for step in lower
        for factor in ((0.0,) if m == "FedAvg" else upper)
    ]


def cleaning_picture(results: pd.DataFrame) -> Figure:
    """Test accuracy against communications for each fraction."""
    fractions = values(results, "fraction")
    fig, axes = report.figure(1, len(fractions), width=4.0 * len(fractions), height=4.0)
    for ax, fraction in zip(axes[0], fractions, strict=True):
        own = select(results[results["round"] > 0], fraction=fraction)
        draw(ax, own, "exchanges", "accuracy", by_method(CLEANERS), markevery=8)
        ax.set(xscale="log", ylim=(0.8, 0.94))
        report.label(ax, "communications", "test accuracy, from .8", f"{fraction:.0%} of the labels wrong")
    below(fig, axes[0, 0], 4)
    return fig


claim = Claims()


@claim("FedBiO ends above FedAvg at every ρ.")
def cleaning_helps(results: pd.DataFrame) -> Finding:
    fractions = values(results, "fraction")
    ours, plain = (ends_by(results, "fraction", fractions, method=method) for method in ("FedBiO", "FedAvg"))
    return all_lead({f"ρ = {fraction:g}": lead(ours[fraction], plain[fraction]) for fraction in fractions})


cleaning_experiment = Experiment(
    **description("fedbio-cleaning", globals(), chosen=chosen_words(CLEANING_CHOSEN)),
    runs=cleaning_runs,
    picture=cleaning_picture,
    claims=tuple(claim),
    search=cleaning_search,
    grid=Grid(
        r"upper (?P<upper>\S+), lower (?P<lower>\S+)$",
        ("method",),
        lambda search: -search["validation_loss"],
        wider=lambda key, values: [cleaning_tried(False, *key, *values.values())],
    ),
    headlines=lambda results: [
        Headline(f"{m}, 40 % wrong labels", "", ends(results, method=m, fraction=0.4)) for m in CLEANERS
    ],
)
