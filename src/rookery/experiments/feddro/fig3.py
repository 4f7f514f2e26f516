"""Fig. 3 of FedDRO: the number of local steps on imbalanced images."""

from collections.abc import Sequence
from functools import partial
from itertools import product

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from rookery import report
from rookery.experiments.feddro import images as shared
from rookery.experiments.feddro.fig1 import FOUR, with_four
from rookery.experiments.feddro.images import IMAGES, Tuned
from rookery.experiments.machinery import Claims, Config, Experiment, Finding, Headline, description
from rookery.experiments.machinery.curves import last, select, values
from rookery.experiments.machinery.drawing import draw
from rookery.experiments.machinery.numbers import listed

SWEEP, SYNCS = (1, 5, 20), 240  # I, and synchronisations of x
LONG_SWEEP = (*SWEEP, 50, 100)
FOUR_SYNCS, FOUR_STEP = 120, 0.05  # with the paper's objective (4)
FOUR_MOST = {5.0: dict.fromkeys(IMAGES[:2], 100), 10.0: {"FedDRO": 20, "DS-FedDRO": 50}}  # the largest I run, by λ
SYNCED = {data: f"{words}, {SYNCS} synchronisations" for data, words in shared.DATA.items()}
WITH_FOUR = {penalty: f"{with_four(penalty)}, {FOUR_SYNCS} synchronisations" for penalty in FOUR}
EARLY_SYNCS = 48
EARLY = f"{shared.DATA['cifar-10']}, {EARLY_SYNCS} synchronisations"


def fig3_runs(quick: bool) -> list[Config]:
    """Both of the paper's methods over I, with as many synchronisations of x: on both data sets; fewer, with larger I;
    and with (4)."""
    syncs, sweep = (2, SWEEP[:2]) if quick else (SYNCS, SWEEP)
    run = partial(shared.images, quick, falls=False)
    pairs = [(method, local) for method in IMAGES[:2] for local in sweep]
    runs = [run(d, m, words=words, local=i, steps=syncs * i) for d, words in SYNCED.items() for m, i in pairs]
    four = partial(run, "cifar-10", tuned=Tuned(FOUR_STEP))
    early = partial(run, "cifar-10", words=EARLY, evaluations=2)
    pairs = [(method, local) for method in IMAGES[:2] for local in (sweep if quick else LONG_SWEEP)]
    runs += [early(method, local=local, steps=EARLY_SYNCS * local) for method, local in pairs]
    for penalty, words in {} if quick else WITH_FOUR.items():
        own = [(m, i) for m, i in pairs if i <= FOUR_MOST[penalty][m]]
        runs += [four(m, words=words, four=penalty, local=i, steps=FOUR_SYNCS * i) for m, i in own]
    return runs


def fig3_picture(results: pd.DataFrame) -> Figure:
    """The training accuracy; of the runs with (4) only those with an I whose seeds all stayed finite."""
    shades = (report.BLUE, report.GREEN, report.ORANGE, report.VERMILION, report.PURPLE)
    panels = list(results["data"].unique())
    fig, axes = report.figure(1, len(panels), width=4.6 * len(panels), height=4.6)
    for ax, name in zip(axes[0], panels, strict=True):
        own = select(results[results["round"] > 0], data=name)
        finite = own.groupby(["method", "local"])["risk"].apply(lambda risk: risk.notna().all())
        for method, local in finite.index[finite]:
            look = {"color": shades[LONG_SWEEP.index(local)], "linestyle": "-" if method == "FedDRO" else "--"}
            labels = {"method": method, "local": local, "look": look | {"marker": ""}}
            draw(ax, own, "round", "train_accuracy", {f"{method}, I = {local}": labels})
        report.label(ax, "synchronisations of x", "training accuracy" * (ax is axes[0, 0]), name)
    handles = {text: handle for ax in axes[0] for handle, text in zip(*ax.get_legend_handles_labels(), strict=True)}
    fig.legend(handles.values(), handles.keys(), loc="outside lower center", ncols=4, frameon=False)
    return fig


def _after(results: pd.DataFrame, data: str, method: str, local: int) -> np.ndarray:
    return last(results, "train_accuracy", data=data, method=method, local=local)


def locals_help(results: pd.DataFrame, data: Sequence[str], most: int = SWEEP[-1]) -> Finding:
    """See `helps_then_saturates`, in training accuracy after all synchronisations, for I up to `most`, in each of these
    groups of runs."""
    ended = {}
    there = [words for words in data if words in set(results["data"])]  # a quick run has not all of them
    for method, words in product(IMAGES[:2], there):
        own = [local for local in values(results, "local", data=words) if local <= most]
        named = f", {words}" if len(there) > 1 else ""
        ended[method + named] = {local: _after(results, words, method, local) for local in own}
    return shared.helps_then_saturates(ended, "training accuracy")


claim = Claims()
text = "Larger I helps for the same synchronisations of x, then it saturates: CIFAR10-ST, I up to 20."
claim(text, "Fig. 3", data=(SYNCED["cifar-10"], WITH_FOUR[10.0]))(locals_help)
claim("The same on CIFAR100-ST.", "Fig. 3", data=(SYNCED["cifar-100"],))(locals_help)
claim("The same on CIFAR10-ST after 48 synchronisations, I up to 100.", data=(EARLY,), most=100)(locals_help)


fig3 = Experiment(
    **description("feddro-fig3", globals(), locals=listed(SWEEP), long_locals=listed(LONG_SWEEP)),
    runs=fig3_runs,
    picture=fig3_picture,
    claims=tuple(claim),
    family="feddro-images",
    headlines=lambda results: [
        Headline(f"DS-FedDRO, I = {local}, training, {data}", "", _after(results, data, "DS-FedDRO", local))
        for data in (SYNCED["cifar-10"], WITH_FOUR[10.0])
        for local in values(results, "local", data=data, method="DS-FedDRO")
    ],
)
