"""ASFBO with unequal local work: hyper-representation on 2000 images, all clients in every round."""

import dataclasses
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from rookery import report
from rookery.experiments.asfbo import representation as shared
from rookery.experiments.machinery import Claims, Config, Experiment, Finding, Headline, description
from rookery.experiments.machinery.claims import all_lead, lead
from rookery.experiments.machinery.curves import last
from rookery.experiments.machinery.numbers import chosen_words
from rookery.tasks import hyperrep
from rookery.tasks.hyperrep import digit_images, mnist_images, test_metrics
from rookery.tasks.task import Task

UNEQUAL = (1, 2, 3, 5, 7, 9, 12, 15, 20, 26)  # τ_i; the labels are sorted over the clients, so they belong to classes
WORK = {"fixed": "τ_i fixed, 1 to 26", "drawn": "τ_i drawn from 5..15"}
HETERO_CHOSEN = {  # the factor of γ, by the search
    ("SimFBO", "fixed"): 3.0,
    ("SimFBO", "drawn"): 3.0,
    ("ShroFBO", "fixed"): 1.7,
    ("ShroFBO", "drawn"): 3.0,
}
HELD_OUT = 1000  # images by which the model is chosen
HETERO_SEEDS = (0, 1, 2, 3, 4, 5, 6, 7, *range(10, 17))  # 8 and 9 are the search's


def held_out(seed: int, data: str, first: tuple[int, int], data_dir: Any = None, **settings: Any) -> Task:
    """The task, also evaluated on training images that no client has: those after the first ones.

    `chosen_accuracy` is the test accuracy of the model with the highest `validation_accuracy` so far.
    """
    task = hyperrep(seed=seed, data=data, first=first, data_dir=data_dir, **settings)
    images, labels, *_ = (mnist_images if data == "mnist" else digit_images)(seed, data_dir)
    validate = test_metrics(images[first[0] :][:HELD_OUT], labels[first[0] :][:HELD_OUT])
    best = {"chosen_validation": -1.0, "chosen_accuracy": 0.0}

    def evaluate(x: Any, y: Any) -> dict[str, Any]:
        found = task.evaluate(x, y)
        validation = validate(x, y)
        if float(validation["accuracy"]) > best["chosen_validation"]:
            best["chosen_validation"] = float(validation["accuracy"])
            best["chosen_accuracy"] = float(found["accuracy"])
        return {**found, **{f"validation_{name}": value for name, value in validation.items()}, **best}

    return dataclasses.replace(task, evaluate=evaluate)


def unequal(quick: bool, method: str, work: str, scale: float, **changes: Any) -> Config:
    """One of the single-loop methods on 2000 images over ten clients, all of which take part."""
    steps: Any = np.array(UNEQUAL) if work == "fixed" else (5, 15)
    own = shared.algorithm(method, quick, scale, local_steps=steps)
    config = shared.representation(quick, method, "non-i.i.d.", own)
    small = {"data": "digits", "width": 32, "first": (1000, 200)} if quick else {"data": "mnist", "first": (2000, 1000)}
    return config.but(
        name=f"{method}, {WORK[work]}",
        labels={"method": method, "work": work},
        task=held_out,
        settings={**config.settings, **small, "clients": 10, "equal": True},
        cohort=None,
        rounds=20 if quick else 300,
        every=5,
        seeds=HETERO_SEEDS[:1] if quick else HETERO_SEEDS,
    ).but(**changes)


def hetero_runs(quick: bool) -> list[Config]:
    """Four methods, two kinds of local work."""
    methods = list(shared.SINGLE_LOOP)[::2] if quick else shared.SINGLE_LOOP
    return [unequal(quick, m, work, HETERO_CHOSEN.get((m, work), 1.0)) for m in methods for work in WORK]


def hetero_tried(quick: bool, method: str, work: str, scale: float) -> Config:
    """One factor of the server steps, on seeds that are not reported."""
    seeds = shared.SEARCH_SEEDS[-1:] if quick else shared.SEARCH_SEEDS
    return unequal(quick, method, work, scale, name=f"search: {method}, {WORK[work]}, γ times {scale:g}", seeds=seeds)


def hetero_search(quick: bool) -> list[Config]:
    """The server steps of SimFBO and ShroFBO."""
    scales = shared.FACTORS[3:4] if quick else shared.FACTORS
    return [hetero_tried(quick, m, work, scale) for m in shared.BASE for work in WORK for scale in scales]


def hetero_picture(results: pd.DataFrame) -> Figure:
    """The test accuracy of the chosen models, each seed, and medians."""
    fig, axes = report.figure(1, 1, width=8.0, height=4.4)
    ax, lowest = axes[0, 0], 0.81
    for place, work in enumerate(WORK):
        for j, (method, own) in enumerate(_by_seed(results, work).items()):
            at = np.full(len(own), place + 0.2 * (j - 1.5))
            look = report.style(method) | {"linestyle": ""}
            ax.plot(at, own, **look, alpha=0.5, label=method if place == 0 else "")
            ax.plot(at[:1], [np.median(own)], color=look["color"], marker="_", markersize=20, markeredgewidth=2.5)
            if failed := int((own < lowest).sum()):
                ax.text(at[0], lowest + 0.001, f"{failed} below", color=look["color"], ha="center", fontsize=8)
    ax.set_xticks(range(len(WORK)), list(WORK.values()))
    ax.set_ylim(lowest, 0.89)
    report.label(ax, "", "test accuracy", "The chosen models, each seed, and medians")
    report.legend(ax, loc="upper center", ncols=4)
    return fig


def _by_seed(results: pd.DataFrame, work: str) -> dict[str, np.ndarray]:
    """By method, the test accuracy of the model that validation chose, for each seed."""
    methods = [m for m in shared.SINGLE_LOOP if m in set(results["method"])]
    return {m: last(results, "chosen_accuracy", method=m, work=work) for m in methods}


claim = Claims()


@claim("The re-weighted methods' models are better than SimFBO's (fixed τ_i).")
def reweighting_helps(results: pd.DataFrame) -> Finding:
    own = _by_seed(results, "fixed")
    leads = {m: lead(accuracy, own["SimFBO"]) for m, accuracy in own.items() if m != "SimFBO"}
    return all_lead(leads, "lead over SimFBO")


hetero = Experiment(
    **description("asfbo-hetero", globals(), chosen=chosen_words(HETERO_CHOSEN)),
    runs=hetero_runs,
    picture=hetero_picture,
    claims=tuple(claim),
    family=shared.FAMILY,
    search=hetero_search,
    grid=shared.scale_grid(("method", "work"), "chosen_validation", hetero_tried),
    headlines=lambda results: [
        Headline(f"{m}, fixed τ_i, chosen model", "", own) for m, own in _by_seed(results, "fixed").items()
    ],
)
