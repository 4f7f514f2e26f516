"""Table 3 of the paper on weighted nodes, with Fig. 1, 2 and 4–9 from the same runs; and the same on digits."""

import itertools
from collections.abc import Sequence
from functools import partial

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from rookery import report
from rookery.experiments.machinery.claims import Claims, Finding, Lead, lead, margin
from rookery.experiments.machinery.drawing import below
from rookery.experiments.machinery.experiment import Config, Experiment, Headline
from rookery.experiments.machinery.numbers import Figures, mean, two_errors
from rookery.experiments.machinery.texts import description
from rookery.experiments.weighted import nodes
from rookery.experiments.weighted.nodes import METHODS, ahead, cells, named, over_cells, scores
from rookery.tasks.weighted_nodes import KINDS

# The paper's Table 3: setting, data, centre; then mean and ± of the test accuracy, in the order of METHODS.
_TABLE = """
1 fashion-mnist minority  0.7758 0.0059  0.6926 0.0175  0.7507 0.0097  0.7297 0.0146  0.7418 0.0235
1 mnist         minority  0.8824 0.0198  0.7850 0.0269  0.8297 0.0171  0.8358 0.0201  0.8568 0.0204
1 cifar-10      minority  0.5175 0.0065  0.3036 0.0102  0.2965 0.0075  0.4361 0.0166  0.4860 0.0067
1 fashion-mnist majority  0.8364 0.0121  0.7427 0.0110  0.8327 0.0119  0.8086 0.0141  0.8297 0.0070
1 mnist         majority  0.8443 0.0096  0.7550 0.0095  0.8484 0.0123  0.8059 0.0053  0.8320 0.0162
1 cifar-10      majority  0.5928 0.0068  0.3568 0.0144  0.5705 0.0052  0.5021 0.0204  0.5588 0.0110
2 fashion-mnist minority  0.7754 0.0082  0.6763 0.0116  0.5686 0.0211  0.7204 0.0059  0.7207 0.0130
2 mnist         minority  0.8580 0.0283  0.7874 0.0129  0.5809 0.0405  0.7841 0.0217  0.7506 0.0224
2 cifar-10      minority  0.5148 0.0051  0.3159 0.0110  0.2870 0.0106  0.3951 0.0121  0.4422 0.0131
2 fashion-mnist majority  0.8332 0.0063  0.7343 0.0104  0.7824 0.0062  0.7889 0.0093  0.8091 0.0044
2 mnist         majority  0.8384 0.0196  0.7650 0.0146  0.7746 0.0121  0.7841 0.0089  0.7911 0.0283
2 cifar-10      majority  0.5979 0.0044  0.3594 0.0086  0.5431 0.0087  0.4946 0.0131  0.5574 0.0104
3 fashion-mnist minority  0.7726 0.0170  0.6762 0.0126  0.5940 0.0211  0.6856 0.0247  0.7123 0.0239
3 mnist         minority  0.8736 0.0055  0.7803 0.0204  0.6225 0.0195  0.7452 0.0160  0.7203 0.0201
3 cifar-10      minority  0.5235 0.0060  0.3061 0.0107  0.3084 0.0099  0.4184 0.0149  0.4535 0.0068
3 fashion-mnist majority  0.8234 0.0119  0.7262 0.0074  0.7702 0.0143  0.7628 0.0115  0.7871 0.0104
3 mnist         majority  0.8342 0.0135  0.7698 0.0100  0.7632 0.0171  0.7742 0.0167  0.7650 0.0341
3 cifar-10      majority  0.5861 0.0064  0.3632 0.0083  0.5705 0.0123  0.4986 0.0175  0.5563 0.0038
4 fashion-mnist minority  0.7658 0.0117  0.6809 0.0079  0.5648 0.0481  0.6974 0.0130  0.7035 0.0187
4 mnist         minority  0.8588 0.0133  0.7645 0.0270  0.5475 0.0205  0.7176 0.0185  0.6932 0.0140
4 cifar-10      minority  0.5172 0.0107  0.3086 0.0052  0.3612 0.0181  0.3970 0.0105  0.4548 0.0069
4 fashion-mnist majority  0.8160 0.0051  0.7012 0.0066  0.7644 0.0258  0.7646 0.0085  0.7910 0.0110
4 mnist         majority  0.8455 0.0064  0.7476 0.0282  0.7577 0.0127  0.7608 0.0063  0.7688 0.0171
4 cifar-10      majority  0.5935 0.0074  0.3709 0.0079  0.5529 0.0077  0.4986 0.0102  0.5489 0.0060
"""
TABLE = {
    (int(row[0]), row[1], row[2]): dict(
        zip(nodes.METHODS, zip(*[iter(map(float, row[3:]))] * 2, strict=True), strict=True)
    )
    for row in map(str.split, _TABLE.strip().splitlines())
}


def table3_runs(quick: bool) -> list[Config]:
    """Five methods, four settings, for each data set."""
    pairs = [("mnist", 2)] if quick else [(data, setting) for data in nodes.IMAGES for setting in nodes.FOUR]
    return [config for data, setting in pairs for config in nodes.all_methods(quick, data, setting)]


def table3_search(quick: bool) -> list[Config]:
    """In setting 2."""
    return [config for data in (("mnist",) if quick else nodes.IMAGES) for config in nodes.search_in(quick, data, 2)]


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
claim(MINORITY, "Section 5, Table 3")(partial(nodes.best, center="minority"))
claim(MAJORITY, "Section 5, Table 3")(partial(nodes.best, center="majority", most=True))
for number, text, most in (("8", MINORITY, False), ("9", MAJORITY, True)):
    claim(f"At equal data points. {text}", f"Fig. {number}")(
        partial(nodes.best, center=text.split(":")[0].lower(), most=most, by=nodes.at_equal_points)
    )
claim("FedAvg is below Local-train on the minority, in most cells of settings 2–4.", "Section 5")(fedavg_below_local)
claim(DROP, "Section 5")(personal_drop)
claim("FedAvg, Ditto and pFedMe are better on the majority than on the minority (in most cells).", "Section 5")(
    better_on_majority
)
claim("Bi-level performs similarly on both groups (within the margin, in most cells).", "Section 5")(alike_on_both)
claim(TRUSTED, "Fig. 2, 4–6")(nodes.similar_trusted)
claim("Bi-level's, Local-train's and FedAvg's accuracies agree within the margin, in nine cells of ten.", "Table 3")(
    partial(_agree, methods=METHODS[:3])
)
claim("Ditto's and pFedMe's do.", "Table 3")(partial(_agree, methods=METHODS[3:]))
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
    search=table3_search,
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
claim(MINORITY)(partial(nodes.best, center="minority"))
claim(DROP)(personal_drop)
claim(TRUSTED)(nodes.similar_trusted)

digits = Experiment(
    **description("weighted-digits", globals()),
    runs=digits_runs,
    picture=table_picture,
    more={"the nodes' weights": nodes.weights_picture},
    claims=tuple(claim),
)
