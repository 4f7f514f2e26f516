"""Mean and worst group against ε: FedDRO and FedAvg, private for each client."""

from functools import partial

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from rookery import report
from rookery.experiments.machinery import Claims, Config, Experiment, Finding, Headline, description
from rookery.experiments.machinery.claims import all_lead, lead
from rookery.experiments.machinery.curves import ends, values
from rookery.experiments.machinery.drawing import below
from rookery.experiments.privacy import shared
from rookery.experiments.privacy.accuracy import loss

METHODS = ("FedDRO", "FedAvg")


def runs(quick: bool) -> list[Config]:
    """Both methods at every budget; three when quick."""
    budgets = (2, 3, 5) if quick else range(len(shared.EPSILONS))
    keys = [("groups", method, shared.EPSILONS[i]) for method in METHODS for i in budgets]
    return [shared.config(quick, *key, (0.5, 0.01) if quick else shared.CHOSEN[key]) for key in keys]


def picture(results: pd.DataFrame) -> Figure:
    """The accuracy on all images and on the worst group against ε."""
    fig, axes = report.figure(1, 1, width=6.0, height=4.2)
    for metric, words, style in (("accuracy", "mean", "-"), ("worst", "worst group", "--")):
        look = lambda i, style=style: {"color": f"C{i}", "linestyle": style}
        lines = {f"{m}, {words}": {"method": m, "look": look(i)} for i, m in enumerate(METHODS)}
        shared.against_budget(axes[0, 0], results, metric, lines)
    report.label(axes[0, 0], "ε", "test accuracy")
    below(fig, axes[0, 0], 2)
    return fig


claim = Claims()


@claim("Without noise, FedDRO's worst group ends above FedAvg's.")
def robust(results: pd.DataFrame) -> Finding:
    of = partial(ends, results, "worst", budget=np.inf)
    return all_lead({"FedDRO over FedAvg": lead(of(method="FedDRO"), of(method="FedAvg"))})


@claim("At ε = 8, FedDRO's worst group still ends above FedAvg's.")
def still_robust(results: pd.DataFrame) -> Finding:
    of = partial(ends, results, "worst", budget=8.0)
    return all_lead({"FedDRO over FedAvg": lead(of(method="FedDRO"), of(method="FedAvg"))})


@claim("At ε = 1, 2 and 4, noise takes more from FedDRO's worst group than from its mean.")
def worst_first(results: pd.DataFrame) -> Finding:
    lost = partial(loss, results, "groups", "FedDRO")
    budgets = [budget for budget in values(results, "budget") if budget <= 4]
    leads = {f"ε = {e:g}": lead(lost(e, "worst"), lost(e)) for e in budgets}
    return all_lead(leads, "loss of the worst less the mean's")


groups = Experiment(
    **description("privacy-groups", globals()),
    runs=runs,
    picture=picture,
    claims=tuple(claim),
    search=lambda quick: shared.search(quick, "groups", METHODS),
    grid=shared.grid("search_worst"),
    headlines=lambda results: [
        Headline(f"{m}, worst group, ε = 8", "", ends(results, "worst", method=m, budget=8.0)) for m in METHODS
    ],
)
