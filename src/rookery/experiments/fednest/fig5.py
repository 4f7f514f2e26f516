"""Fig. 5 of FedNest: the light methods on MNIST, alternating between the levels or not."""

import dataclasses
from typing import Any

import pandas as pd
from matplotlib.figure import Figure

from rookery import report
from rookery.experiments.fednest.representation import (
    COLLAPSE,
    FAMILY,
    REPRESENTATION,
    REPRESENTATION_DIFFERENCES,
    representation,
)
from rookery.experiments.machinery.claims import Claims, Finding, lead, together
from rookery.experiments.machinery.curves import best, ends, ends_by, select
from rookery.experiments.machinery.drawing import draw, legend, zoom
from rookery.experiments.machinery.experiment import Config, Experiment, Headline
from rookery.experiments.machinery.grid import Grid
from rookery.experiments.machinery.numbers import Figures, mean, means
from rookery.experiments.papers import FEDNEST_PAPER

LIGHT = ("LFedNest", "LFedNestSVRG", "LFedNestNonAlt")
UPPERS, LOWERS = (0.001, 0.003, 0.01, 0.03), (0.003, 0.01, 0.03, 0.1)
FIG5_STEPS = (0.003, 0.03)  # the upper step, which is also 1/ℓ, and the lower one, by the search
SEARCHED, SCRIPT = "searched", "the script's"


def light(quick: bool, method: str, upper: float, lower: float, steps: str = SEARCHED, **changes: Any) -> Config:
    """One light method, non-i.i.d., with 1/ℓ the upper step, as in the authors' code."""
    config = representation(quick, method, "non-i.i.d.")
    algorithm: Any = config.algorithm
    return config.but(
        name=f"{method}, steps {upper:g} and {lower:g}",
        labels={"method": method, "steps": steps},
        seeds=(0,) if quick else (0, 1, 2, 3, 4),
        algorithm=dataclasses.replace(algorithm, upper_step=upper, lower_step=lower, hessian_step=upper),
        settings={**config.settings, "share": False},
    ).but(**changes)


def light_tried(quick: bool, method: str, upper: float, lower: float) -> Config:
    """One pair of steps, on seeds that are not reported."""
    name, labels = f"search: {method}, upper {upper:g}, lower {lower:g}", {"method": method, "split": "non-i.i.d."}
    return light(quick, method, upper, lower, name=name, labels=labels, seeds=(9,) if quick else (8, 9))


def fig5_search(quick: bool) -> list[Config]:
    """Both steps, the same for all three."""
    uppers, lowers = ((0.1,), (0.1,)) if quick else (UPPERS, LOWERS)
    return [light_tried(quick, m, upper, lower) for m in LIGHT for upper in uppers for lower in lowers]


FIG5_GRID = Grid(
    r"upper (?P<upper>\S+), lower (?P<lower>\S+)$",
    ("split",),
    lambda search: search["accuracy"],
    wider=lambda key, values: [light_tried(False, method, *values.values()) for method in LIGHT],
)


def fig5_runs(quick: bool) -> list[Config]:
    """The three light methods, non-i.i.d., with the steps of the search, and with those of the authors' script."""
    script = 0.3 if quick else 0.01
    first = [light(quick, m, *((0.1, 0.1) if quick else FIG5_STEPS)) for m in LIGHT]
    return first + [light(quick, m, script, script, SCRIPT, name=f"{m}, the script's steps") for m in LIGHT]


def fig5_picture(results: pd.DataFrame) -> Figure:
    """Test accuracy against rounds and communications; beside it, against rounds with the script's steps."""
    fig, axes = report.figure(1, 3, width=15.5, height=4.8)
    own, script = (select(results, steps=steps) for steps in (SEARCHED, SCRIPT))
    rounds = own["round"].max()
    each = own[own["round"] == rounds].groupby("method")["exchanges"].mean() / rounds
    lines = {f"{method} ({each[method]:.0f})": {"method": method, "look": report.style(method)} for method in LIGHT}
    for ax, panel, across, title in (
        (axes[0, 0], own, "round", "by rounds"),
        (axes[0, 1], own, "exchanges", "by communications"),
        (axes[0, 2], script, "round", "by rounds, the script's steps (.01)"),
    ):
        draw(ax, panel, across, "accuracy", lines)
        if panel is own:
            zoom(ax, own)
        else:
            ax.set_ylim(0, 1)
        words = "rounds (the paper's epochs)" if across == "round" else "communications"
        report.label(ax, words, "test accuracy" if ax is axes[0, 0] else "", title)
    legend(axes[0, 1], 3, title="communications a round in parentheses")
    return fig


claim = Claims()


@claim("LFedNest and LFedNestSVRG achieve better performance than LFedNestNonAlt (by rounds).", "H.1")
def alternating_better(results: pd.DataFrame) -> Finding:
    end = ends_by(results, "method", LIGHT, steps=SEARCHED)
    leads = {m: lead(end[m], end["LFedNestNonAlt"]) for m in LIGHT[:2]}
    figures: Figures = {f"end, {m}": mean(own) for m, own in end.items()}
    figures |= {f"lead over LFedNestNonAlt, and the margin, {m}": pair for m, pair in leads.items()}
    own = select(results, steps=SEARCHED)
    budget = float(select(own, method="LFedNestNonAlt")["exchanges"].max())
    late = own[(own["exchanges"] > 0.9 * budget) & (own["exchanges"] <= budget)]
    same = [float(select(late, method=m)["accuracy"].mean()) for m in LIGHT]
    figures[f"over the last tenth of {budget:.0f} communications, {', '.join(LIGHT)}"] = same
    note = "A round has 2, 3 and 1 communications: with as many of them the three are within half a point."
    return Finding(together([p.holds for p in leads.values()]), figures, note * (max(same) - min(same) < 0.005))


@claim(
    "LFedNestNonAlt remains around 80 % (75 to 85).",
    "H.1",
    set_up="It ends at 89 to 90 % with every seed, and at 89 to 90 % with the script's steps, too. The text is "
    "followed here; with the habits of the authors' code (dropout left on, another split, another regulariser) it ends "
    "at 78 to 83 % with the script's steps (`fednest-collapse`).",
)
def nonalt_near_eighty(results: pd.DataFrame) -> Finding:
    end = ends(results, method="LFedNestNonAlt", steps=SEARCHED)
    return Finding(0.75 <= mean(end) <= 0.85, {"end, each seed": end})


@claim("SVRG in FedInn boosts it: LFedNestSVRG ends above LFedNest (by rounds).", "H.1")
def svrg_helps_light(results: pd.DataFrame) -> Finding:
    end = ends_by(results, "method", ("LFedNestSVRG", "LFedNest"), steps=SEARCHED)
    ahead = lead(end["LFedNestSVRG"], end["LFedNest"])
    return Finding(ahead.holds, {"end, LFedNestSVRG and LFedNest": means(end), "the lead, and the margin": ahead})


@claim("With the script's steps, .01, LFedNest and LFedNestSVRG learn and then fail, with every seed.")
def light_fails(results: pd.DataFrame) -> Finding:
    """They end below half of the highest accuracy they had; LFedNestNonAlt does not."""
    end = ends_by(results, "method", LIGHT, steps=SCRIPT)
    high = {method: best(results, method=method, steps=SCRIPT) for method in LIGHT}
    failed = {method: end[method] < 0.5 * high[method] for method in LIGHT}
    holds = all(failed[m].all() for m in LIGHT[:2]) and not failed["LFedNestNonAlt"].any()
    return Finding(bool(holds), {f"highest, and end, {m}": [mean(high[m]), mean(end[m])] for m in LIGHT})


fig5 = Experiment(
    name="fednest-fig5",
    title="hyper-representation on MNIST, alternating or not",
    paper=f"{FEDNEST_PAPER}, ICML 2022, Fig. 5 and App. H.1.",
    setup=(
        f"{REPRESENTATION} Here: 1/ℓ is the upper step, as in the authors' code; one pair of steps for all three "
        f"methods, as in their script, by the search: {FIG5_STEPS[0]:g} and {FIG5_STEPS[1]:g}; five seeds. Beside "
        "them, both steps .01, the script's for Fig. 2."
    ),
    runs=fig5_runs,
    picture=fig5_picture,
    claims=tuple(claim),
    differences=(
        *REPRESENTATION_DIFFERENCES,
        COLLAPSE,
        "The paper gives no step for this figure, and with those of the script for Fig. 2 two of the three methods "
        "fail. The steps were searched on two seeds that are not reported, by the test accuracy at the end, on average "
        "over the methods. LFedNest's and LFedNestNonAlt's own best are the same pair. LFedNestSVRG's is .03 and .3, "
        "beyond this grid (`wider.csv`): with it four seeds end at 93 to 95 %, and one fails.",
    ),
    family=FAMILY,
    search=fig5_search,
    grid=FIG5_GRID,
    headlines=lambda results: [
        Headline(m, "≈ .80" if m == "LFedNestNonAlt" else "", ends(results, method=m, steps=SEARCHED))
        for m in reversed(LIGHT)
    ],
)
