"""Accuracy against the share of clients that lie: methods × robust means × attacks, clients alike."""

from functools import partial

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from rookery import report
from rookery.experiments.channels import drawing, shared
from rookery.experiments.channels.shared import NO_LIARS, Cell, end, loss
from rookery.experiments.machinery import Claims, Config, Experiment, Finding, Headline, description
from rookery.experiments.machinery.claims import Lead, all_lead, lead
from rookery.experiments.machinery.curves import ends
from rookery.experiments.machinery.drawing import below

NAME = "channels-liars"
SHARES = (0.1, 0.2, 0.3)
CELLS: tuple[Cell, ...] = (
    NO_LIARS,
    *(("sign flip", share) for share in SHARES),
    *(("a little", share) for share in SHARES),
    *(("inner product", share) for share in SHARES),
    *(("labels", share) for share in SHARES[1:]),
)
QUICK = (NO_LIARS, ("sign flip", 0.3), ("a little", 0.3), ("labels", 0.3))
LEARN, CLEAN = shared.TASKS
NEAR, LITTLE, MUCH = 0.05, 0.02, 0.2  # of accuracy
RECOMMENDED = "nearest neighbors"
BY_COORDINATE = ("median", "trimmed mean")
BY_REPLY = ("geometric median", "multi-Krum", RECOMMENDED)


def programs(quick: bool) -> list[tuple[str, str, str]]:
    """Each task, method and rule that is run, the most important first."""
    methods, few = (("FedBiO", "FedAvg"), shared.FEW) if quick else (shared.METHODS, shared.RULES)
    keys = [(task, method, name) for name in few for task in shared.TASKS for method in methods]
    return keys if quick else [*keys, *((LEARN, shared.EXTRA, name) for name in shared.FEW)]


def runs(quick: bool) -> list[Config]:
    """Every method with every rule under every attack."""
    found = []
    for key in programs(quick):
        steps, radius = (QUICK_STEPS, 1.0) if quick else chosen(*key)
        cells = QUICK if quick else CELLS
        found += [shared.attacked(quick, False, *key, cell, steps, radius) for cell in cells]
    return found


QUICK_STEPS = (0.1, 0.1)


def chosen(task: str, method: str, name: str, experiment: str = NAME) -> tuple[tuple[float, ...], float]:
    """The steps and the radius that the search chose."""
    steps = shared.CHOSEN[experiment, task, method, "mean"]
    return steps, shared.CHOSEN[experiment, task, method, name][0] if name == "clipping" else 1.0


def search(quick: bool, unlike: bool = False, experiment: str = NAME) -> list[Config]:
    """The steps of every method, and the radius of clipping."""
    found = []
    for task, method, name in programs(quick):
        if name == "mean":
            found += shared.step_search(quick, unlike, task, method)
        if name == "clipping":
            steps = shared.CHOSEN[experiment, task, method, "mean"]
            found += shared.radius_search(quick, unlike, task, method, steps)
    return found


# The claims, which were written before the reported runs.


def methods(results: pd.DataFrame, task: str, nested: bool = False) -> list[str]:
    """The methods that were run on a task; `nested`: those that learn weights."""
    return shared.among(results, "method", shared.METHODS[: -1 if nested else None], task=task)


def rules(results: pd.DataFrame, task: str, method: str, order: tuple[str, ...] = shared.ROBUST) -> list[str]:
    """The rules that a method was run with."""
    return shared.among(results, "rule", order, task=task, method=method)


def worst(results: pd.DataFrame, task: str, method: str, name: str, share: float) -> np.ndarray:
    """The lowest accuracy under any attack by this share of the clients, for each seed."""
    cells = [cell for cell in shared.cells(results) if cell[1] == share]
    return np.min([end(results, task, method, name, cell) for cell in cells], axis=0)


def less(a: float, b: np.ndarray) -> Lead:
    """How much b is below a."""
    return lead(np.full_like(b, a), b)


claim = Claims()


@claim(
    f"Where 20 or 30 % of the clients flip signs, the plain mean loses more than {100 * MUCH:g} points: every method, "
    "both tasks."
)
def the_mean_fails(results: pd.DataFrame) -> Finding:
    cells = [cell for cell in shared.cells(results) if cell[0] == "sign flip" and cell[1] >= 0.2]
    return all_lead(
        {
            f"{method}, {task}, {cell[1]:g}": lead(loss(results, task, method, "mean", cell), MUCH)
            for task in shared.TASKS
            for method in methods(results, task)
            for cell in cells
        },
        f"its loss less {100 * MUCH:g} points",
    )


@claim(
    f"Where 10 % flip signs, the plain mean still goes the right way, more slowly: it loses less than {100 * NEAR:g} "
    "points, every method, both tasks."
)
def ten_percent_slow_the_mean(results: pd.DataFrame) -> Finding:
    cells = [("sign flip", 0.1)] if ("sign flip", 0.1) in shared.cells(results) else [NO_LIARS]
    return all_lead(
        {
            f"{method}, {task}": less(NEAR, loss(results, task, method, "mean", cell))
            for task in shared.TASKS
            for method in methods(results, task)
            for cell in cells
        },
        f"{100 * NEAR:g} points less its loss",
    )


@claim(
    f"Wrong labels in 30 % of the clients cost the plain mean less than {100 * NEAR:g} points: every method, both "
    "tasks."
)
def wrong_labels_are_mild(results: pd.DataFrame) -> Finding:
    return all_lead(
        {
            f"{method}, {task}": less(NEAR, loss(results, task, method, "mean", ("labels", 0.3)))
            for task in shared.TASKS
            for method in methods(results, task)
        },
        f"{100 * NEAR:g} points less its loss",
    )


@claim(
    f"Where 30 % flip signs, every robust mean that tolerates them stays within {100 * NEAR:g} points of the plain "
    "mean without liars in hyper-representation, for every method."
)
def all_tolerate_sign_flips(results: pd.DataFrame) -> Finding:
    return all_lead(
        {
            f"{name}, {method}": less(NEAR, loss(results, LEARN, method, name, ("sign flip", 0.3)))
            for method in methods(results, LEARN)
            for name in rules(results, LEARN, method)
        },
        f"{100 * NEAR:g} points less its loss",
    )


@claim(
    f"Without liars, no robust mean costs more than {100 * LITTLE:g} points of hyper-representation, for any method."
)
def insurance_is_cheap(results: pd.DataFrame) -> Finding:
    return all_lead(
        {
            f"{name}, {method}": less(LITTLE, loss(results, LEARN, method, name, NO_LIARS))
            for method in methods(results, LEARN)
            for name in rules(results, LEARN, method)
        },
        f"{100 * LITTLE:g} points less its loss",
    )


@claim(
    "In hyper-representation, 30 % that lie within the spread (a little is enough) take more from the median and from "
    "the trimmed mean than 30 % that flip signs, for every method."
)
def small_lies_are_worse(results: pd.DataFrame) -> Finding:
    of = partial(end, results, LEARN)
    return all_lead(
        {
            f"{name}, {method}": lead(of(method, name, ("sign flip", 0.3)), of(method, name, ("a little", 0.3)))
            for method in methods(results, LEARN)
            for name in rules(results, LEARN, method, BY_COORDINATE)
        },
        "accuracy under sign flips less that under the other",
    )


@claim(
    f"Under the attack that is worst for each, the trimmed mean after nearest neighbors is within {100 * LITTLE:g} "
    "points of the best robust mean in hyper-representation: every method, every share."
)
def the_recommended_rule(results: pd.DataFrame) -> Finding:
    shares = sorted({share for _, share in shared.cells(results) if share})
    leads = {}
    for method in methods(results, LEARN):
        for share in shares:
            each = {name: worst(results, LEARN, method, name, share) for name in rules(results, LEARN, method)}
            best = max(each, key=lambda name: float(each[name].mean()))
            own = each[RECOMMENDED] + LITTLE
            leads[f"{method}, {share:g}"] = lead(own, each[best])
    return all_lead(leads, f"its accuracy and {100 * LITTLE:g} points, less that of the best")


@claim(
    "In hyper-representation, where 30 % lie a little, FedNest with ten exchanges a round loses more than FedBiO with "
    "one, both with the trimmed mean after nearest neighbors."
)
def every_exchange_is_attacked(results: pd.DataFrame) -> Finding:
    if "FedNest" not in methods(results, LEARN):
        return Finding(None, {"not run": 0})
    lost = partial(loss, results, LEARN, name=RECOMMENDED, cell=("a little", 0.3))
    own = lead(lost(method="FedNest"), lost(method="FedBiO"))
    calm = less(LITTLE, loss(results, LEARN, "FedNest", RECOMMENDED, NO_LIARS))
    figures = {
        "FedNest's loss less FedBiO's, and the margin": own,
        f"{100 * LITTLE:g} points less FedNest's loss without liars": calm,
    }
    if own.holds and not calm.holds:
        why = "FedNest already fails without liars with this rule, in one run of five."
        return Finding(
            None, figures, f"{why} The claim held by its first wording; this check was added after the runs."
        )
    return Finding(own.holds, figures)


@claim(
    "In data cleaning without liars, the median and the trimmed mean leave the weights where they started, because "
    "each entry moves at one client only: the AUC is .5, within .01, for every nested method."
)
def coordinates_stay(results: pd.DataFrame) -> Finding:
    gaps = {
        f"{name}, {method}": np.abs(end(results, CLEAN, method, name, NO_LIARS, "auc") - 0.5)
        for method in methods(results, CLEAN, nested=True)
        for name in rules(results, CLEAN, method, BY_COORDINATE)
    }
    return all_lead({name: less(0.01, gap) for name, gap in gaps.items()}, ".01 less the distance from .5")


@claim(
    "In data cleaning without liars, the rules that combine whole replies (geometric median, multi-Krum, and the "
    "trimmed mean after nearest neighbors) do learn weights: the AUC is above .8 for every nested method."
)
def whole_replies_move(results: pd.DataFrame) -> Finding:
    return all_lead(
        {
            f"{name}, {method}": lead(end(results, CLEAN, method, name, NO_LIARS, "auc"), 0.8)
            for method in methods(results, CLEAN, nested=True)
            for name in rules(results, CLEAN, method, BY_REPLY)
        },
        "AUC less .8",
    )


@claim(
    "In data cleaning where 20 % lie a little, the plain mean turns the weights around: the AUC is below .5 for every "
    "nested method."
)
def weights_are_turned(results: pd.DataFrame) -> Finding:
    cell = next(c for c in (("a little", 0.2), ("a little", 0.3)) if c in shared.cells(results))
    return all_lead(
        {m: less(0.5, end(results, CLEAN, m, "mean", cell, "auc")) for m in methods(results, CLEAN, nested=True)},
        ".5 less the AUC",
    )


@claim(
    "In data cleaning where 30 % flip signs, every nested method with the trimmed mean after nearest neighbors ends "
    "above FedAvg with the same rule."
)
def cleaning_among_liars(results: pd.DataFrame) -> Finding:
    of = partial(end, results, CLEAN, name=RECOMMENDED, cell=("sign flip", 0.3))
    plain = of(method="FedAvg")
    return all_lead({m: lead(of(method=m), plain) for m in methods(results, CLEAN, nested=True)})


# The pictures.


def picture(results: pd.DataFrame) -> Figure:
    """Accuracy under the worst attack against the share of liars: a row for each task, a column for each method."""
    fig, axes = report.figure(len(shared.TASKS), len(shared.METHODS), width=14.0, height=7.0)
    for row, (task, words) in zip(axes, shared.TASKS.items(), strict=True):
        for ax, method in zip(row, shared.METHODS, strict=True):
            drawing.against_share(ax, results, task, method, worst)
            report.label(ax, "share of liars", "accuracy", f"{method}, {words}")
    below(fig, axes[0, 0], len(shared.RULES))
    return fig


liars = Experiment(
    **description(NAME, globals()),
    runs=runs,
    picture=picture,
    more={
        "test accuracy with 30 % of liars, by attack": partial(drawing.table, share=0.3),
        "test accuracy with 20 % of liars, by attack": partial(drawing.table, share=0.2),
        "how well data cleaning's weights tell wrong labels from right ones (AUC)": partial(
            drawing.table, share=0.2, metric="auc"
        ),
    },
    claims=tuple(claim),
    search=search,
    grid=shared.GRID,
    headlines=lambda results: [
        Headline(
            f"{m}, hyper-representation, 30 % flip signs, nearest neighbors", "",
            ends(results, task=LEARN, method=m, rule=RECOMMENDED, attack="sign flip", share=0.3),
        )
        for m in shared.among(results, "method", (*shared.METHODS, shared.EXTRA), task=LEARN)
    ],
    thinned=shared.kept,
)  # fmt: skip
