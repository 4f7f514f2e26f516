"""Accuracy against ε for six methods on two tasks, private for each record of ten hospitals."""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from rookery import report
from rookery.channels.private import private
from rookery.data.clients import Clients
from rookery.experiments.machinery import Claims, Config, Experiment, Finding, Grid, Headline, description
from rookery.experiments.machinery.claims import all_lead, lead
from rookery.experiments.machinery.curves import ends
from rookery.experiments.machinery.drawing import below
from rookery.experiments.machinery.numbers import keyed, listed
from rookery.experiments.privacy import shared
from rookery.experiments.privacy.accuracy import METHODS, ONE, loss
from rookery.tasks.data_cleaning import data_cleaning
from rookery.tasks.linear import scores
from rookery.tasks.task import Task

TASKS = {"representation-records": "hyper-representation", "cleaning-records": "data cleaning"}
LEARN, CLEAN = TASKS
NESTED = METHODS[:-1]
HOSPITALS, BATCH, ROUNDS = 10, 200, 100
NEAR, TOLD_APART = 0.05, 0.9  # of accuracy; of the area under the ROC curve
# What hyper-representation loses at ε = 8 in `privacy-accuracy`.
BY_CLIENT = {"FedNest": 0.0518, "LFedNest": 0.0172, "FedBiO": 0.0133, "ASFBO": 0.0, "SimFBO": 0.0112, "FedAvg": 0.0069}
# The upper and the lower step and the bound, by the search.
CHOSEN = keyed(Path(__file__).with_name("chosen_records.csv"), keys=3)


def cleaning(seed: int, clients: int, plain: bool, data: str, data_dir: Any = None) -> Task:
    """Data cleaning with a weight for each hospital, two fifths of which have only wrong labels."""
    task = data_cleaning(clients, data=data, equal=True, wrong="clients", data_dir=data_dir)
    score = lambda x, y, images: scores(x if plain else y, {"image": images})
    if plain:
        return shared.evaluated(task, plain, task.init[1], score, data, data_dir)
    lower, upper = task.clients.lower, task.clients.upper
    sizes = np.asarray(lower.sizes)
    hospital = np.repeat(np.arange(clients, dtype=np.int32), sizes)  # of each sample
    rows = {**lower.rows, "index": hospital}
    own = replace(
        task,
        clients=Clients.from_arrays(rows, sizes, upper=(upper.rows, upper.sizes)),
        evaluate=lambda x, y: task.evaluate(x[hospital], y),
    )
    return shared.evaluated(own, plain, (np.zeros(clients, np.float32), task.init[1]), score, data, data_dir)


MAKE: dict[str, Any] = {LEARN: shared.representation, CLEAN: cleaning}


def bounds(task: str, method: str, clip: float) -> dict[str, float]:
    """The bound of each oracle.

    In data cleaning the weights are ten numbers: their part of a product is a tenth of the rest, and the upper loss
    does not depend on them, so that its bound clips nothing and only sets the noise.
    """
    own = dict.fromkeys(("f_x", "f_y", "g_y", "g_yy", "g_xy"), clip)
    if task == CLEAN and method != "FedAvg":
        own |= {"f_x": clip / 1000, "g_xy": clip / 10}
    return own


def config(quick: bool, task: str, method: str, epsilon: float, values: Sequence[float], **changes: Any) -> Config:
    """One method on one task with one budget; `values`: the upper step, in data cleaning over HOSPITALS, the lower one,
    and the bound."""
    upper, lower, clip = values
    batch, rounds, delta = (20, 3, 1e-3) if quick else (BATCH, ROUNDS, shared.DELTA)
    both = 2 * batch if (task, method) == (LEARN, "FedAvg") else batch  # it has the images of both levels in one set
    noisy = epsilon < np.inf
    return Config(
        name=f"{task}, {method}, ε = {epsilon:g}",
        labels={"task": task, "method": method, "budget": epsilon},
        task=MAKE[task],
        settings={"clients": HOSPITALS, "plain": method == "FedAvg", "data": "digits" if quick else "mnist"},
        algorithm=shared.algorithm(method, upper * HOSPITALS if task == CLEAN else upper, lower, both),
        channel=private(epsilon, delta, bounds(task, method, clip), rounds, unit="record") if noisy else None,
        rounds=rounds,
        every=max(1, rounds // 10),
        seeds=(0,) if quick else shared.SEEDS,
    ).but(**changes)


def runs(quick: bool) -> list[Config]:
    """Every method on both tasks at every budget; three when quick."""
    budgets = (0, 2, 3, 5) if quick else range(len(shared.EPSILONS))
    keys = [(task, method, shared.EPSILONS[i]) for task in TASKS for method in METHODS for i in budgets]
    return [config(quick, *key, (0.1, 0.1, 3.0) if quick else CHOSEN[key]) for key in keys]


# What the search tries. FedAvg has no upper step, and without noise there are no bounds.
UPPERS: dict[str, tuple[float, ...]] = {LEARN: (0.3, 1.0, 3.0), CLEAN: (0.1, 1.0, 10.0)}
LOWERS: tuple[float, ...] = (0.03, 0.1, 0.3, 1.0)
CLIPS: tuple[float, ...] = (1.0, 3.0, 10.0)


def search(quick: bool) -> list[Config]:
    """All values at every budget."""

    def tried(task: str, method: str, epsilon: float, upper: float, lower: float, clip: float) -> Config:
        name = f"search: {task}, {method}, ε = {epsilon:g}, upper {upper:g}, lower {lower:g}, clip {clip:g}"
        return config(quick, task, method, epsilon, (upper, lower, clip), name=name, seeds=(shared.SEARCH_SEED,))

    some = slice(1 if quick else None)
    uppers = lambda task, method: (0.0,) if method == "FedAvg" else UPPERS[task][some]
    return [
        tried(task, method, epsilon, upper, lower, clip)
        for task in TASKS
        for method in METHODS
        for epsilon in (shared.EPSILONS[3:4] if quick else shared.EPSILONS)
        for upper in uppers(task, method)
        for lower in LOWERS[some]
        for clip in (CLIPS[some] if epsilon < np.inf else (0.0,))
    ]


def weights(results: pd.DataFrame) -> Figure:
    """How well data cleaning's weights tell good hospitals from bad ones, against ε."""
    fig, axes = report.figure(1, 1, width=6.0, height=4.2)
    lines = {m: {"task": CLEAN, "method": m, "look": {"color": f"C{i}"}} for i, m in enumerate(NESTED)}
    shared.against_budget(axes[0, 0], results, "auc", lines)
    report.label(axes[0, 0], "ε", "AUC of the weights")
    below(fig, axes[0, 0], 3)
    return fig


def near(results: pd.DataFrame, methods: tuple[str, ...], budgets: tuple[float, ...]) -> Finding:
    """Whether methods stay near their accuracy without noise in hyper-representation."""
    lost = {f"{m}, ε = {budget:g}": loss(results, LEARN, m, budget) for m in methods for budget in budgets}
    return all_lead({name: lead(np.full_like(own, NEAR), own) for name, own in lost.items()}, "5 points less its loss")


claim = Claims()


@claim(
    f"At ε = 4 and at ε = 8, {listed(ONE)}, with one exchange a round, each stay within {100 * NEAR:g} points of their "
    "hyper-representation without noise."
)
def one_exchange_bears_it(results: pd.DataFrame) -> Finding:
    return near(results, ONE, (4.0, 8.0))


@claim(
    f"At ε = 8, FedNest, with ten exchanges a round, also stays within {100 * NEAR:g} points of its "
    "hyper-representation without noise: a record pays for what its client computes from it, not for each exchange."
)
def exchanges_are_free(results: pd.DataFrame) -> Finding:
    return near(results, ("FedNest",), (8.0,))


@claim("At ε = 1 every nested method loses more of hyper-representation than FedAvg.")
def nested_pay_more(results: pd.DataFrame) -> Finding:
    of = partial(loss, results, LEARN, budget=1.0)
    return all_lead({m: lead(of(m), of("FedAvg")) for m in NESTED}, "its loss less FedAvg's")


@claim(
    "At ε = 8 every method loses less of hyper-representation than with the client as the unit, on 1,000 clients "
    "(`privacy-accuracy`)."
)
def less_than_by_client(results: pd.DataFrame) -> Finding:
    lost = {m: loss(results, LEARN, m, 8.0) for m in METHODS}
    return all_lead({m: lead(np.full_like(own, BY_CLIENT[m]), own) for m, own in lost.items()}, "loss there less here")


@claim(
    f"In data cleaning at ε = 4, every nested method's weights tell good hospitals from bad ones: the AUC is above "
    f"{TOLD_APART:g}."
)
def told_apart(results: pd.DataFrame) -> Finding:
    found = {m: ends(results, "auc", task=CLEAN, method=m, budget=4.0) for m in NESTED}
    return all_lead({m: lead(own, np.full_like(own, TOLD_APART)) for m, own in found.items()}, "AUC less .9")


@claim("In data cleaning at ε = 4, every nested method ends above FedAvg.")
def cleaning_helps(results: pd.DataFrame) -> Finding:
    of = partial(ends, results, task=CLEAN, budget=4.0)
    return all_lead({m: lead(of(method=m), of(method="FedAvg")) for m in NESTED})


records = Experiment(
    **description("privacy-records", globals()),
    runs=runs,
    picture=partial(shared.accuracies, tasks=TASKS, methods=METHODS),
    more={"the weights of data cleaning against ε": weights},
    claims=tuple(claim),
    search=search,
    grid=Grid(
        r"upper (?P<upper>\S+), lower (?P<lower>\S+), clip (?P<clip>\S+)$",
        ("task", "method", "budget"),
        lambda found: found["search_accuracy"],
    ),
    headlines=lambda results: [
        Headline(f"{m}, hyper-representation, ε = 8", "", ends(results, task=LEARN, method=m, budget=8.0))
        for m in METHODS
    ],
)
