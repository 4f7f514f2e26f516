"""FedBiO's few-shot episodes: a shared representation and local heads."""

from typing import Any

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from rookery import report
from rookery.algorithms import FedBiOAccLocal, FedBiOLocal
from rookery.experiments.machinery import Claims, Config, Experiment, Finding, Grid, Headline, description
from rookery.experiments.machinery.curves import average, ends, reached
from rookery.experiments.machinery.drawing import by_method, draw
from rookery.experiments.machinery.numbers import chosen_words, listed
from rookery.tasks.few_shot import few_shot

LOCAL = {"FedBiOLocal": FedBiOLocal, "FedBiOAccLocal": FedBiOAccLocal}
LEVELS = (0.7, 0.8, 0.85, 0.88)
SHOT_SEARCH = {"FedBiOLocal": (0.03, 0.1, 0.3, 1.0, 3.0), "FedBiOAccLocal": (0.1, 0.3, 1.0, 3.0, 10.0, 30.0)}
SHOT_STEPS = {"FedBiOLocal": 0.3, "FedBiOAccLocal": 1.0}


def episodes(quick: bool, method: str, upper: float | None = None, **changes: Any) -> Config:
    """One method on few-shot episodes."""
    step = (0.3 if quick else SHOT_STEPS[method]) if upper is None else upper
    common: dict[str, Any] = {"upper_step": step, "lower_step": 0.1, "hessian_step": 0.1, "neumann_terms": 10}
    more: dict[str, Any] = {"delta": 1.0, "offset": 8.0} if method == "FedBiOAccLocal" else {}
    return Config(
        name=method,
        labels={"method": method},
        task=few_shot,
        settings={"data": "digits", "clients": 10} if quick else {"data": "omniglot"},
        algorithm=LOCAL[method](**common, **more, local_steps=5, batch_size=10 if quick else 25),
        cohort=5 if quick else 20,
        rounds=20 if quick else 500,
        every=5,
        seeds=(0,) if quick else (0, 1, 2, 3, 4),
    ).but(**changes)


def episodes_search(quick: bool) -> list[Config]:
    """The upper step of both, on two seeds that are not reported."""
    size: dict[str, Any] = {"seeds": (8, 9), "rounds": 200, "every": 50}
    if quick:
        size = {"seeds": (9,), "rounds": 10, "every": 10}
    return [
        episodes(quick, method, step, name=f"search: {method}, upper step {step:g}", **size)
        for method, steps in SHOT_SEARCH.items()
        for step in (steps[2:3] if quick else steps)
    ]


def episodes_picture(results: pd.DataFrame) -> Figure:
    """Accuracy on fresh episodes against communications."""
    fig, axes = report.figure(1, 1, width=6.0, height=4.2)
    ax = axes[0, 0]
    draw(ax, results, "exchanges", "accuracy", by_method(LOCAL), markevery=5)
    ax.set_ylim(0.75, 0.91)
    report.label(ax, "communications", "accuracy on new characters")
    report.legend(ax)
    return fig


claim = Claims()


@claim("FedBiOAccLocal reaches 70 to 88 % in fewer communications than FedBiOLocal.")
def fewer_communications(results: pd.DataFrame) -> Finding:
    """FedBiOAccLocal's mean over the seeds reaches every level that either reaches with fewer communications."""
    runs = {m: average(results, across="exchanges", method=m) for m in LOCAL}
    counts = {m: [reached(own, level) for level in LEVELS] for m, own in runs.items()}
    plain, accelerated = counts.values()
    figures = {f"communications to {listed(LEVELS)}, {'; '.join(LOCAL)}": [*plain, *accelerated]}
    fewer = [fast < slow for slow, fast in zip(plain, accelerated, strict=True) if np.isfinite([slow, fast]).any()]
    return Finding(bool(fewer) and all(fewer), figures)


hyperrep_experiment = Experiment(
    **description("fedbio-hyperrep", globals(), chosen=chosen_words(SHOT_STEPS)),
    runs=lambda quick: [episodes(quick, method) for method in LOCAL],
    picture=episodes_picture,
    claims=tuple(claim),
    search=episodes_search,
    grid=Grid(r"upper step (?P<upper>\S+)$", ("method",), lambda search: search["accuracy"]),
    headlines=lambda results: [Headline(m, "", ends(results, method=m)) for m in LOCAL],
)
