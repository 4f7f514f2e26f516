"""Accuracy against ε for six methods on two tasks, private for each client."""

from functools import partial

import numpy as np
import pandas as pd

from rookery.experiments.machinery import Claims, Config, Experiment, Finding, Headline, description
from rookery.experiments.machinery.claims import Lead, all_lead, lead
from rookery.experiments.machinery.curves import ends
from rookery.experiments.machinery.numbers import listed
from rookery.experiments.privacy import shared

TASKS = {"representation": "hyper-representation", "cleaning": "data cleaning"}
ONE = ("FedBiO", "ASFBO", "SimFBO")  # with one exchange a round
METHODS = ("FedNest", "LFedNest", *ONE, "FedAvg")
NEAR = 0.05  # of accuracy


def runs(quick: bool) -> list[Config]:
    """Every method on both tasks at every budget; three when quick."""
    budgets = (3, 4, 5) if quick else range(len(shared.EPSILONS))
    keys = [(task, method, shared.EPSILONS[i]) for task in TASKS for method in METHODS for i in budgets]
    return [shared.config(quick, *key, (0.1, 0.01) if quick else shared.CHOSEN[key]) for key in keys]


def loss(results: pd.DataFrame, task: str, method: str, budget: float, metric: str = "accuracy") -> np.ndarray:
    """How much less than without noise a method reaches, for each seed."""
    of = partial(ends, results, metric, task=task, method=method)
    return of(budget=np.inf) - of(budget=budget)


claim = Claims()


@claim(f"At ε = 8 FedAvg stays within {100 * NEAR:g} points of its accuracy without noise, on both tasks.")
def fedavg_bears_it(results: pd.DataFrame) -> Finding:
    near = {words: loss(results, task, "FedAvg", 8.0) for task, words in TASKS.items()}
    return all_lead({words: lead(NEAR, own) for words, own in near.items()}, "5 points less its loss")


@claim(f"At ε = 8 {listed(ONE)}, with one exchange a round, each lose less accuracy than FedNest, on both tasks.")
def one_exchange(results: pd.DataFrame) -> Finding:
    leads: dict[str, Lead] = {}
    for task, words in TASKS.items():
        nested = loss(results, task, "FedNest", 8.0)
        leads |= {f"{m}, {words}": lead(nested, loss(results, task, m, 8.0)) for m in ONE}
    return all_lead(leads, "FedNest's loss less its own")


@claim("At ε = 8 LFedNest, with two exchanges a round, loses less accuracy than FedNest, on both tasks.")
def fewer_exchanges(results: pd.DataFrame) -> Finding:
    of = partial(loss, results, budget=8.0)
    leads = {words: lead(of(task, "FedNest"), of(task, "LFedNest")) for task, words in TASKS.items()}
    return all_lead(leads, "FedNest's loss less LFedNest's")


@claim(f"FedNest loses more than {100 * NEAR:g} points of hyper-representation even at ε = 16.")
def fednest_needs_more(results: pd.DataFrame) -> Finding:
    own = lead(loss(results, "representation", "FedNest", 16.0), NEAR)
    return Finding(own.holds, {"its loss less 5 points, and the margin": own})


@claim("In data cleaning without noise, FedNest and FedBiO end above FedAvg.")
def cleaning_helps(results: pd.DataFrame) -> Finding:
    of = partial(ends, results, task="cleaning", budget=np.inf)
    return all_lead({m: lead(of(method=m), of(method="FedAvg")) for m in ("FedNest", "FedBiO")})


@claim("In data cleaning at ε = 8, no method ends above FedAvg: what a client's own weights could tell is hidden.")
def cleaning_is_hidden(results: pd.DataFrame) -> Finding:
    of = partial(ends, results, task="cleaning", budget=8.0)
    return all_lead({m: lead(of(method="FedAvg"), of(method=m)) for m in METHODS[:-1]}, "FedAvg's lead")


@claim("In data cleaning at ε = 8, no method's weights tell wrong labels from right ones: the AUC is below .6.")
def weights_are_hidden(results: pd.DataFrame) -> Finding:
    found = {m: ends(results, "auc", task="cleaning", method=m, budget=8.0) for m in METHODS[:-1]}
    return all_lead({m: lead(0.6, own) for m, own in found.items()}, ".6 less the AUC")


accuracy = Experiment(
    **description("privacy-accuracy", globals()),
    runs=runs,
    picture=partial(shared.accuracies, tasks=TASKS, methods=METHODS),
    claims=tuple(claim),
    search=lambda quick: [c for task in TASKS for c in shared.search(quick, task, METHODS)],
    grid=shared.grid("search_accuracy"),
    headlines=lambda results: [
        Headline(f"{m}, hyper-representation, ε = 8", "", ends(results, task="representation", method=m, budget=8.0))
        for m in METHODS
    ],
)
