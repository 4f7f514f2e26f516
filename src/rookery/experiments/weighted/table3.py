"""Table 3 of the paper on weighted nodes, with Fig. 1, 2 and 4–9 from the same runs; and the same on digits."""

import itertools
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from rookery import report
from rookery.experiments.machinery import Claims, Config, Experiment, Finding, Headline, description
from rookery.experiments.machinery.claims import Lead, lead, margin
from rookery.experiments.machinery.drawing import below
from rookery.experiments.machinery.numbers import Figures, keyed, mean, two_errors
from rookery.experiments.weighted import nodes
from rookery.experiments.weighted.nodes import METHODS, ahead, at_equal_points, best, cells, named, over_cells, scores
from rookery.tasks.weighted_nodes import KINDS

# The paper's: by setting, data set and centre, the mean and ± of each method.
TABLE = {
    cell: dict(zip(METHODS, zip(row[::2], row[1::2], strict=True), strict=True))
    for cell, row in keyed(Path(__file__).with_name("table3.csv"), 3).items()
}


def table3_runs(quick: bool) -> list[Config]:
    """Five methods, four settings, for each data set."""
    pairs = [("mnist", 2)] if quick else [(data, setting) for data in nodes.IMAGES for setting in nodes.FOUR]
    return [config for data, setting in pairs for config in nodes.all_methods(quick, data, setting)]


def table_picture(results: pd.DataFrame) -> Figure:
    """Means and two standard errors by setting; the paper's beside them, hollow."""
    names = list(dict.fromkeys(results["data"]))
    fig, axes = report.figure(len(names), 2, width=12.5, height=3.2 * len(names) + 0.5)
    for ax, (name, center) in zip(axes.flat, itertools.product(names, KINDS), strict=True):
        settings = [setting for data, setting in cells(results) if data == name]
        for j, method in enumerate(METHODS):
            look = {"color": report.style(method)["color"], "fmt": "o", "capsize": 2}
            for setting in settings:
                place, own = setting + 0.16 * (j - 2), scores(results, method, name, setting, center)
                ax.errorbar(place, mean(own), two_errors(own), label=method if setting == settings[0] else None, **look)
                if published := TABLE.get((setting, name, center)):
                    middle, deviation = published[method]
                    ax.errorbar(place + 0.05, middle, 2 * deviation / len(nodes.SEEDS) ** 0.5, **look, mfc="white")
        ax.set_xticks(settings)
        y = "test accuracy" if center == KINDS[0] else ""
        report.label(ax, "setting", y, f"{nodes.IMAGES.get(name, name)}, {center}")
    if names[0] in nodes.IMAGES:
        axes[0, 0].plot([], [], "o", color=report.GREY, mfc="white", label="hollow: the paper's")
    below(fig, axes[0, 0], 6)
    return fig


def fedavg_below_local(results: pd.DataFrame) -> Finding:
    """On the minority, in most cells of settings 2 to 4."""
    pair = (("Local-train", "minority"), ("FedAvg", "minority"))
    found = {cell: {"FedAvg": ahead(results, *cell, *pair)} for cell in cells(results) if cell[1] > 1}
    return over_cells({named(*cell): own for cell, own in found.items()}, most=True)


def personal_drop(results: pd.DataFrame) -> Finding:
    """On the minority, Ditto and pFedMe are lower in settings 2 to 4 than in setting 1."""
    found: dict[str, dict[str, Lead]] = {}
    for data, setting in cells(results):
        for method in METHODS[3:]:
            first, own = (scores(results, method, data, at, "minority") for at in (1, setting))
            if setting > 1 and first:
                found[f"{method}, {named(data, setting)}"] = {"fall": lead(first, own)}
    return over_cells(found) if found else Finding(None, {}, "The quick runs have one setting.")


def _rises(results: pd.DataFrame, method: str) -> dict[str, Lead]:
    """How much higher a method is on the majority than on the minority, by cell."""
    return {named(*cell): ahead(results, *cell, (method, "majority"), (method, "minority")) for cell in cells(results)}


def better_on_majority(results: pd.DataFrame) -> Finding:
    """FedAvg, Ditto and pFedMe are higher on the majority than on the minority, in most cells."""
    found = {f"{m}, {cell}": {"rise": rise} for m in METHODS[2:] for cell, rise in _rises(results, m).items()}
    return over_cells(found, most=True)


def alike_on_both(results: pd.DataFrame) -> Finding:
    """Bi-level's accuracies on the two groups differ by no more than the margin, in most cells."""
    rises = _rises(results, "Bi-level").values()
    apart = [rise.holds is not None for rise in rises]
    numbers = [sum(apart), mean([abs(rise.mean) for rise in rises])]
    figures = {f"of {len(apart)} cells: apart by more than the margin, mean distance": numbers}
    one_seed = results["seed"].nunique() == 1
    return Finding(None if one_seed else 2 * sum(apart) < len(apart), figures)


def _agree(results: pd.DataFrame, methods: Sequence[str]) -> Finding:
    """In nine of ten cells the mean is within the margin of the paper's, from both deviations."""
    found: dict[str, list[Lead]] = {method: [] for method in methods}
    for (setting, data, center), published in TABLE.items():
        if (data, setting) not in cells(results):
            continue
        for method in methods:
            own, (middle, deviation) = scores(results, method, data, setting, center), published[method]
            error = np.hypot(deviation, np.std(own, ddof=1)) / len(own) ** 0.5
            found[method].append(Lead(mean(own) - middle, margin(len(own)) * error))
    within = [more.holds is None for leads in found.values() for more in leads]
    figures: Figures = {"cells within the margin, of all": [sum(within), len(within)]}
    for method, leads in found.items():
        figures[f"{method}: mean difference"] = mean([more.mean for more in leads] or [0.0])
    return Finding(bool(within) and sum(within) >= 0.9 * len(within), figures)


MINORITY = "Minority: Bi-level is best on all data sets, in all settings."
MAJORITY = "Majority: Bi-level is overall the best (in most cells)."
DROP = "Ditto and pFedMe drop from setting 1 to 2, 3 and 4 on the minority."
TRUSTED = "The weights of similar nodes rise, of dissimilar ones fall."

claim = Claims()
claim(MINORITY, "Section 5, Table 3", center="minority")(best)
claim(MAJORITY, "Section 5, Table 3", center="majority", most=True)(best)
claim(f"At equal data points. {MINORITY}", "Fig. 8", center="minority", by=at_equal_points)(best)
claim(f"At equal data points. {MAJORITY}", "Fig. 9", center="majority", most=True, by=at_equal_points)(best)
claim("FedAvg is below Local-train on the minority, in most cells of settings 2–4.", "Section 5")(fedavg_below_local)
claim(DROP, "Section 5")(personal_drop)
claim("FedAvg, Ditto and pFedMe are better on the majority than on the minority (in most cells).", "Section 5")(
    better_on_majority
)
claim("Bi-level performs similarly on both groups (within the margin, in most cells).", "Section 5")(alike_on_both)
claim(TRUSTED, "Fig. 2, 4–6")(nodes.similar_trusted)
text = "Bi-level's, Local-train's and FedAvg's accuracies agree within the margin, in nine cells of ten."
claim(text, "Table 3", methods=METHODS[:3])(_agree)
claim("Ditto's and pFedMe's do.", "Table 3", methods=METHODS[3:])(_agree)
claim("Down-sampled ImageNet, all rows.", "Table 3")(None)


table3 = Experiment(
    **description("weighted-table3", globals()),
    runs=table3_runs,
    picture=table_picture,
    more={
        "test accuracy over synchronisations (Fig. 1, 7)": nodes.accuracies_picture,
        "test accuracy over data points (Fig. 8, 9)": partial(nodes.accuracies_picture, across=nodes.POINTS),
        "the nodes' weights (Fig. 2, 4–6)": nodes.weights_picture,
    },
    claims=tuple(claim),
    family="weighted",
    search=lambda quick: [
        c for data in (("mnist",) if quick else nodes.IMAGES) for c in nodes.search_in(quick, data, 2)
    ],
    grid=nodes.SEARCH_GRID,
    headlines=lambda results: [
        Headline(
            f"{method}, {nodes.IMAGES[data]}, setting 2, minority",
            "{:.4f} ± {:.4f}".format(*TABLE[2, data, "minority"][method]).replace("0.", "."),
            scores(results, method, data, 2, "minority"),
        )
        for method, data in (*(("Bi-level", data) for data in nodes.IMAGES), ("FedAvg", "mnist"))
    ],
)


def digits_runs(quick: bool) -> list[Config]:
    """Five methods, four settings, on the bundled digits; nothing was chosen on these seeds."""
    settings, seeds = ((2,), (3,)) if quick else (nodes.FOUR, (3, 4, 5))
    return [config for setting in settings for config in nodes.all_methods(quick, "digits", setting, seeds=seeds)]


claim = Claims()
claim(MINORITY, center="minority")(best)
claim(DROP)(personal_drop)
claim(TRUSTED)(nodes.similar_trusted)

digits = Experiment(
    **description("weighted-digits", globals()),
    runs=digits_runs,
    picture=table_picture,
    more={"the nodes' weights": nodes.weights_picture},
    claims=tuple(claim),
)
