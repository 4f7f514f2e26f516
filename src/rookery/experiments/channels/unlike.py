"""Robust means where clients differ: two labels for each client, and 20 % of them lie."""

from functools import partial

import numpy as np
import pandas as pd

from rookery.experiments.channels import drawing, liars, shared
from rookery.experiments.channels.liars import LEARN, RECOMMENDED, less, methods, rules
from rookery.experiments.channels.shared import NO_LIARS, Cell, end, loss
from rookery.experiments.machinery import Claims, Config, Experiment, Finding, Headline, description
from rookery.experiments.machinery.claims import Lead, all_lead, lead
from rookery.experiments.machinery.curves import ends

NAME = "channels-unlike"
SHARE, NEAR = 0.2, 0.05
CELLS: tuple[Cell, ...] = (NO_LIARS, *((attack, SHARE) for attack in shared.ATTACKS))
QUICK = (NO_LIARS, ("mimic", SHARE))


def runs(quick: bool) -> list[Config]:
    """Every method with every rule, without liars and under every attack."""
    found = []
    for key in liars.programs(quick):
        steps, radius = (liars.QUICK_STEPS, 1.0) if quick else liars.chosen(*key, NAME)
        cells = QUICK if quick else CELLS
        found += [shared.attacked(quick, True, *key, cell, steps, radius) for cell in cells]
    return found


claim = Claims()


@claim(
    "Without liars, the median loses more than 5 points of hyper-representation against the plain mean, for every "
    "method: clients with two labels each are all outliers to one another."
)
def the_median_ignores_them(results: pd.DataFrame) -> Finding:
    leads = {m: lead(loss(results, LEARN, m, "median", NO_LIARS), NEAR) for m in methods(results, LEARN)}
    return all_lead(leads, "its loss less 5 points")


def mixing_helps(results: pd.DataFrame, mixed: str, plain: str) -> dict[str, Lead]:
    """By how much less a method loses without liars if replies are mixed first."""
    of = partial(end, results, LEARN, cell=NO_LIARS)
    run = [m for m in methods(results, LEARN) if {mixed, plain} <= set(rules(results, LEARN, m, shared.RULES))]
    return {m: lead(of(m, mixed), of(m, plain)) for m in run} or {"not run": Lead(0.0, 0.0)}


@claim(
    "Without liars, nearest neighbors before the trimmed mean keep more of hyper-representation than the trimmed mean "
    "alone, for every method."
)
def neighbors_help(results: pd.DataFrame) -> Finding:
    return all_lead(mixing_helps(results, RECOMMENDED, "trimmed mean"))


@claim(
    "Without liars, buckets of two before the median keep more of hyper-representation than the median alone, for "
    "every method."
)
def buckets_help(results: pd.DataFrame) -> Finding:
    return all_lead(mixing_helps(results, "bucketing", "median"))


@claim(
    "Clients that mimic another one (20 %) cost the plain mean less than 5 points of hyper-representation, and cost "
    "every robust mean more than that, for every method."
)
def mimic(results: pd.DataFrame) -> Finding:
    cell, leads = ("mimic", SHARE), dict[str, Lead]()
    for m in methods(results, LEARN):
        plain = loss(results, LEARN, m, "mean", cell)
        leads[f"5 points less the loss of the mean, {m}"] = less(NEAR, plain)
        for name in rules(results, LEARN, m):
            leads[f"its loss less the mean's, {name}, {m}"] = lead(loss(results, LEARN, m, name, cell), plain)
    return all_lead(leads, "the difference")


@claim(
    "No robust mean stays within 5 points of the plain mean without liars in hyper-representation under every attack, "
    "for any method: clients that differ set the limit."
)
def a_limit(results: pd.DataFrame) -> Finding:
    cells = [cell for cell in shared.cells(results) if cell[1]]
    leads = {}
    for m in methods(results, LEARN):
        for name in rules(results, LEARN, m):
            most = np.max([loss(results, LEARN, m, name, cell) for cell in cells], axis=0)
            leads[f"{name}, {m}"] = lead(most, NEAR)
    return all_lead(leads, "the largest loss less 5 points")


unlike = Experiment(
    **description(NAME, {**globals(), "liars": liars}),
    runs=runs,
    picture=partial(drawing.table, share=SHARE),
    claims=tuple(claim),
    search=lambda quick: liars.search(quick, True, NAME),
    grid=shared.GRID,
    headlines=lambda results: [
        Headline(
            f"{m}, hyper-representation, without liars, {name}", "",
            ends(results, task=LEARN, method=m, rule=name, attack="none", share=0.0),
        )
        for m in methods(results, LEARN) for name in shared.among(results, "rule", ("mean", "median", RECOMMENDED))
    ],
    thinned=shared.kept,
)  # fmt: skip
