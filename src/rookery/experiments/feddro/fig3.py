"""Fig. 3 of FedDRO: the number of local steps on imbalanced images."""

from functools import partial
from itertools import pairwise

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from rookery import report
from rookery.experiments.feddro.images import ACCURACIES, DATA, ENDS, IMAGE_DIFFERENCES, IMAGES, SETUP, images
from rookery.experiments.machinery.claims import Claims, Finding, lead, together
from rookery.experiments.machinery.curves import curves, ends, select
from rookery.experiments.machinery.drawing import below, draw
from rookery.experiments.machinery.experiment import Config, Experiment, Headline
from rookery.experiments.machinery.numbers import Figures, listed, mean
from rookery.experiments.papers import FEDDRO_PAPER

UNITS = {"round": "synchronisations of x", "exchanges": "exchanges", "steps": "local steps"}
IMAGE_SWEEP = (1, 5, 20)  # I
SYNCS = 240
SYNCED = {data: f"{words}, {SYNCS} synchronisations" for data, words in DATA.items()}


def fig3_runs(quick: bool) -> list[Config]:
    """Both of the paper's methods over I: on CIFAR10-ST with the same number of local steps, and on both data sets with
    the same number of synchronisations of x and a constant step."""
    sweep = [(m, local) for m in IMAGES[:2] for local in (IMAGE_SWEEP[:2] if quick else IMAGE_SWEEP)]
    syncs = 2 if quick else SYNCS
    return [images(quick, "cifar-10", m, local) for m, local in sweep] + [
        images(quick, data, m, local, falls=False, steps=syncs * local, words=words)
        for data, words in SYNCED.items()
        for m, local in sweep
    ]


def fig3_picture(results: pd.DataFrame) -> Figure:
    """The training accuracy in three units: above at equal synchronisations, last at equal local steps."""
    results = results[results["round"] > 0].assign(steps=results["round"] * results["local"])
    lines = {
        f"{method}, I = {local}": {"method": method, "local": local, "look": {"color": colour, "linestyle": line}}
        for method, line in zip(IMAGES[:2], ("-", "--"), strict=True)
        for local, colour in zip(IMAGE_SWEEP, (report.BLUE, report.GREEN, report.ORANGE), strict=True)
        if local in set(results["local"])
    }
    rows = [(SYNCED[data], words, "round") for data, words in DATA.items()]
    rows.append((DATA["cifar-10"], DATA["cifar-10"], "steps"))
    fig, axes = report.figure(len(rows), len(UNITS), width=14.0, height=11.4)
    for row, (data, name, same) in enumerate(rows):
        for column, (unit, words) in enumerate(UNITS.items()):
            ax = axes[row, column]
            draw(ax, select(results, data=data), unit, "train_accuracy", lines, markevery=6)
            ax.set_xscale("linear" if unit == same else "log")
            told = ("", "") if column else ("training accuracy", f"{name}, the same number of {UNITS[same]}")
            report.label(ax, words, *told)
    below(fig, axes[0, 0], 3)
    return fig


def image_locals_help(results: pd.DataFrame, data: str) -> Finding:
    """On one data set, with the same number of synchronisations of x, after half and after all of them: each I is above
    the one before, and the gain from the second I to the last is less than half of the gain from the first to the
    second. Each holds by more than the margin of the seeds. It does not hold where the opposite is true by as much;
    otherwise it is undecided."""
    results = select(results, data=SYNCED[data])
    locals_ = sorted(results["local"].unique())
    figures, gains = Figures(), Figures()
    each: list[bool | None] = []
    goes_on = True
    for method in IMAGES[:2]:
        for at in (results["round"].max() // 2, results["round"].max()):
            whole = [curves(results, "train_accuracy", method=method, local=local) for local in locals_]
            own = np.array([[curve[at] for curve in seeds] for seeds in whole])
            gain = np.diff(own, axis=0)
            saturates = lead(0.5 * gain[0], own[-1] - own[1])
            each += [*(lead(two, one).holds for one, two in pairwise(own)), saturates.holds]
            goes_on &= bool((gain.mean(axis=1) > 0).all()) and saturates.mean < 0
            place = f"after {at} synchronisations, {method}"
            figures[f"training accuracy {place}, I = {listed(locals_)}"] = list(map(mean, own))
            gains[f"half the first gain less the gain from there, and the margin, {place}"] = [*saturates]
            gains[f"gain per doubling of I, {place}"] = (gain.mean(axis=1) / np.diff(np.log2(locals_))).tolist()
    note = f"{each.count(None)} of {len(each)} comparisons are within the margin."
    if goes_on:
        note += f" By the means larger I helps, and up to I = {locals_[-1]}, the largest run, it does not saturate."
    holds = together(each)
    return Finding(holds, figures | gains, note if holds is None else "")


def image_locals_cost(results: pd.DataFrame) -> Finding:
    """At equal local steps, the largest I ends 1 to 5 points below I = 1 in training accuracy."""
    results = select(results, data=DATA["cifar-10"])
    locals_ = sorted(results["local"].unique())
    figures: Figures = {}
    gaps = []
    for metric, words in ACCURACIES.items():
        for method in IMAGES[:2]:
            own = [mean(ends(results, metric, method=method, local=local)) for local in locals_]
            figures[f"{words} at the end, {method}, I = {listed(locals_)}"] = own
            gaps += [own[0] - own[-1]] * (metric == "train_accuracy")
    return Finding(min(gaps) > 0.01 and max(gaps) < 0.05, figures)


claim = Claims()
claim("Larger I helps for the same synchronisations of x, then it saturates.", "Fig. 3")(
    partial(image_locals_help, data="cifar-10")
)
claim(
    "The same on CIFAR100-ST.",
    "Fig. 3",
    undecided="These runs are too short to tell. After 240 synchronisations the training accuracy of FedDRO with I = 1 "
    "is .024 (DS-FedDRO .026), and one class for all images gives .017: the gain from 1 to 5 (.045; .055) starts near "
    "this floor, and that from 5 to 20 (.099; .105), which is to be less than half of it, does not. Larger I helps, by "
    "more than the margin; whether that saturates later is open.",
)(partial(image_locals_help, data="cifar-100"))
claim("At the same number of local steps, I = 20 costs a few points.")(image_locals_cost)


fig3 = Experiment(
    name="feddro-fig3",
    title="the number of local steps",
    paper=f"{FEDDRO_PAPER}: Figure 3.",
    setup=(
        f"8 clients. {SETUP}as in `feddro-fig1`. I = {listed(IMAGE_SWEEP)}, on CIFAR10-ST. With every I also {SYNCS} "
        f"synchronisations of x ({listed(f'{SYNCS * local:,}' for local in IMAGE_SWEEP)} local steps), the step "
        "constant, on CIFAR10-ST and CIFAR100-ST. One of them sends 8.6 MB up (CIFAR100-ST: 8.8), all clients "
        f"together, an exchange of the inner value 64 bytes. {ENDS}"
    ),
    runs=fig3_runs,
    picture=fig3_picture,
    claims=tuple(claim),
    differences=(
        *IMAGE_DIFFERENCES,
        "The values of I are not given: ours. On CIFAR100-ST they have the same synchronisations alone, and the steps "
        "chosen on CIFAR10-ST.",
    ),
    family="feddro-images",
    headlines=lambda results: [
        Headline(f"DS-FedDRO, I = {local}, {data}, training", "", own)
        for data in SYNCED.values()
        for local in IMAGE_SWEEP
        for own in [ends(results, "train_accuracy", method="DS-FedDRO", local=local, data=data)]
    ],
)
