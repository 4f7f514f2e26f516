"""Fig. 1 of FedDRO, robust training on imbalanced images; and the same with 32 clients."""

from collections.abc import Iterable, Sequence
from functools import partial
from itertools import product
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from rookery import report
from rookery.experiments.feddro import images as shared
from rookery.experiments.feddro.images import ACCURACIES, IMAGES, Tuned
from rookery.experiments.machinery import Claims, Config, Experiment, Finding, Grid, Headline, description
from rookery.experiments.machinery.claims import lead, together
from rookery.experiments.machinery.curves import ends, last, select
from rookery.experiments.machinery.drawing import below, by_method, draw
from rookery.experiments.machinery.numbers import Figures, listed, mean, two_errors

LONG, LONG_STEPS = "CIFAR10-ST, 60 epochs", 12_000
# The steps that were run for 60 epochs; the first is the best.
LONG_TRIED = {
    "FedDRO": (0.1, 0.05, 0.01), "DS-FedDRO": (0.1, 0.05, 0.01), "FastDRO": (0.1,), "PDSGD": (0.05,),
    "MBSGD": (0.1, 0.05), "FedAvg": (0.1, 0.05, 0.01), "FedAvg, I = 5": (0.01,),
}  # fmt: skip
# The paper's objective (4), by λ: the values chosen by the search, and the steps, β and dual steps that it tried.
_FOUR = dict.fromkeys(IMAGES, Tuned(0.1)) | {"DS-FedDRO": Tuned(0.05)}
FOUR: dict[float, dict[str, Tuned]] = {
    5.0: _FOUR,
    10.0: {method: own for method, own in _FOUR.items() if method != "FastDRO"} | {"PDSGD": Tuned(0.1, dual=0.0001)},
}
FOUR_TRIED = {
    5.0: ((0.01, 0.05, 0.1), (0.01, 0.1, 0.5), (0.0005, 0.001)),
    10.0: ((0.05, 0.1), (0.1, 0.5), (0.0001, 0.0005)),
}
SEARCH_SEED = 100


def with_four(penalty: float, data: str = "cifar-10") -> str:
    """The name of the runs with (4)."""
    return f"{shared.DATA[data]}, (4), λ = {penalty:g}"


def fig1_search(quick: bool) -> list[Config]:
    """The step by the training accuracy of a short run and, for 60 epochs, of the run itself; with (4) the step, β and
    PDSGD's dual step by the accuracy on held-out training images."""
    steps = shared.GRID[-1:] if quick else shared.GRID
    short = partial(shared.images, quick, "cifar-10", falls=False, steps=shared.SEARCH_STEPS, seeds=(9,))
    searched = [short(m, Tuned(step), name=f"search: {m}, step {step:g}") for m in IMAGES[:6] for step in steps]
    if quick:
        return searched
    long = partial(shared.images, quick, "cifar-10", words=LONG, steps=LONG_STEPS, evaluations=20, seeds=(0,))
    for method, tried in LONG_TRIED.items():
        searched += [long(method, Tuned(step), name=f"search: {method}, {LONG}, step {step:g}") for step in tried]
    for penalty, (tried_steps, momenta, duals) in FOUR_TRIED.items():
        data = with_four(penalty)
        four = partial(shared.images, quick, "cifar-10", words=data, four=penalty, evaluations=1, held_out=True)
        for method, step in product(FOUR[penalty], tried_steps):
            each = {"": Tuned(step)}
            if method in IMAGES[:2]:
                each = {f", β = {momentum:g}": Tuned(step, momentum) for momentum in momenta}
            elif method == "PDSGD":
                each = {f", dual step {dual:g}": Tuned(step, dual=dual) for dual in duals}
            name = f"search: {method}, {data}, step {step:g}"
            searched += [four(method, own, name=name + more, seeds=(SEARCH_SEED,)) for more, own in each.items()]
    return searched


def fig1_runs(quick: bool) -> list[Config]:
    """All methods on both data sets, and with the paper's objective (4); on the first also for longer."""
    run = partial(shared.images, quick)
    runs = [run("cifar-10", method) for method in IMAGES]
    if quick:
        return runs
    long = partial(run, "cifar-10", words=LONG, steps=LONG_STEPS, evaluations=20)
    runs += [long(method, Tuned(tried[0])) for method, tried in LONG_TRIED.items()]
    runs += [run("cifar-100", method) for method in IMAGES]
    for penalty, chosen in FOUR.items():
        runs += [run("cifar-10", m, tuned, with_four(penalty), penalty) for m, tuned in chosen.items()]
    others = {m: tuned for m, tuned in FOUR[5.0].items() if m != "FastDRO"}  # its training has no λ
    runs += [run("cifar-100", m, tuned, with_four(5.0, "cifar-100"), 5.0) for m, tuned in others.items()]
    return runs


def k32_runs(quick: bool) -> list[Config]:
    """32 clients, the same number of epochs."""
    run = partial(shared.images, quick, "cifar-10", clients=4 if quick else 32, steps=shared.STEPS // 4)
    runs = [run(method) for method in IMAGES[:6]]
    for penalty, chosen in {} if quick else FOUR.items():
        runs += [run(m, tuned, with_four(penalty), penalty) for m, tuned in chosen.items() if m in IMAGES[:6]]
    return runs


def fig1_picture(results: pd.DataFrame) -> Figure:
    """The accuracies with (4), λ = 5, over the run; and the ends of all groups of runs, with two standard errors."""
    results = results.assign(steps=results["round"] * results["local"])
    groups = list(results["data"].unique())
    first = with_four(5.0) if with_four(5.0) in groups else groups[0]
    fig, axes = report.figure(2, 1 + len(groups), width=4.5 + 2.5 * len(groups), height=6.4)
    for row, (metric, words) in enumerate(ACCURACIES.items()):
        own = select(results, data=first)
        draw(axes[row, 0], own, "steps", metric, by_method(own["method"].unique()), marker="")
        axes[row, 0].set_xlim(own["steps"].max() / 4)
        axes[row, 0].set_ylim(0.65 * own[metric].max(), 1.02 * own[metric].max())
        report.label(axes[row, 0], "local steps", words, first * (not row))
        for ax, (data, ended) in zip(axes[row, 1:], _image_ends(results, metric).items(), strict=True):
            for method, values in ended.items():
                look = {"fmt": "o", "color": report.style(method)["color"], "capsize": 3}
                ax.errorbar(mean(values), -IMAGES.index(method), xerr=two_errors(values), **look)
            methods = list(results["method"].unique())
            ax.set_yticks(-np.arange(len(methods)), methods if ax is axes[row, 1] else [""] * len(methods))
            title = data.replace("CIFAR10-ST, 60", "60").replace("-ST, (4)", "-ST (4)") + ", cap" * ("(4)" not in data)
            report.label(ax, f"{words} at the end", "", title * (not row))
    below(fig, axes[0, 0], len(IMAGES))
    return fig


def _image_ends(results: pd.DataFrame, metric: str) -> dict[str, dict[str, np.ndarray]]:
    """The ends of each method, for each group of runs."""
    groups = results.groupby("data", sort=False)
    return {str(data): {m: ends(own, metric, method=m) for m in own["method"].unique()} for data, own in groups}


def _compared(
    results: pd.DataFrame,
    better: Sequence[str],
    worse: Sequence[str],
    metrics: Iterable[str],
    slack: float | None = None,
) -> Finding:
    """Each of the better methods ends above each of the worse, in every group of runs and every metric, by more than
    the margin; with a slack, its mean is at most that much below."""
    parts: list[bool | None] = []
    figures = Figures()
    for metric in metrics:
        for data, own in _image_ends(results, metric).items():
            pairs = [(a, b) for a in better for b in worse if a != b and {a, b} <= {*own}]
            leads = {pair: lead(own[pair[0]], own[pair[1]]) for pair in pairs}
            parts += [one.holds if slack is None else one.mean >= -slack for one in leads.values()]
            least = min(leads, key=lambda pair: leads[pair].mean)
            words = f"least lead, {ACCURACIES[metric]}, {data}: {least[0]} over {least[1]}, and the margin"
            figures[words] = leads[least]
    counts = [parts.count(held) for held in (True, None, False)]
    return Finding(together(parts), {"comparisons that hold, are within the margin, fail": counts} | figures)


claim, k32_claim = Claims(), Claims()
HIGHER = "FedDRO and DS-FedDRO reach a higher training accuracy than every baseline."
AGAINST_ALL: Any = {"better": IMAGES[:2], "worse": IMAGES[2:]}
claim(HIGHER, "Fig. 1", **AGAINST_ALL, metrics=("train_accuracy",))(_compared)
text = "Their test accuracy is comparable or better: at most a point below every baseline's."
claim(text, "Fig. 1", **AGAINST_ALL, metrics=("accuracy",), slack=0.01)(_compared)
claim("DS-FedDRO is above FedDRO.", "Fig. 1", better=IMAGES[1:2], worse=IMAGES[:1], metrics=ACCURACIES)(_compared)
text = "FedAvg is significantly worse: with I = 5 below every other method."
claim(text, "Fig. 1", better=IMAGES, worse=IMAGES[-1:], metrics=ACCURACIES)(_compared)
k32_claim(HIGHER, **AGAINST_ALL, metrics=("train_accuracy",))(_compared)


def headlines(results: pd.DataFrame) -> list[Headline]:
    """Training accuracies with (4), and how unequal PDSGD's weights end; the paper's figure has no numbers."""
    lines = []
    for data, penalty in product(shared.DATA, FOUR):
        own = select(results, data=with_four(penalty, data))
        if len(own):
            shown = {f"{m}, training": ends(own, "train_accuracy", method=m) for m in (*IMAGES[:2], "PDSGD")}
            shown["PDSGD, spread of its weights"] = last(own, "spread", method="PDSGD")
            lines += [Headline(f"{words}, {with_four(penalty, data)}", "", ours) for words, ours in shown.items()]
    return lines


fig1 = Experiment(
    **description("feddro-fig1", globals(), penalties=listed(FOUR)),
    runs=fig1_runs,
    picture=fig1_picture,
    claims=tuple(claim),
    family="feddro-images",
    search=fig1_search,
    grid=Grid(
        r"step (?P<step>[\d.]+)(?:, β = (?P<β>[\d.]+))?(?:, dual step (?P<dual>[\d.]+))?$",
        ("data", "method"),
        lambda search: search["train_accuracy"].fillna(search.get("validation_accuracy", np.nan)),
        fixed=("step",),
    ),
    headlines=headlines,
)

k32 = Experiment(
    **description("feddro-k32", globals(), steps=shared.STEPS // 4, penalties=listed(FOUR)),
    runs=k32_runs,
    picture=fig1_picture,
    claims=tuple(k32_claim),
    family="feddro-images",
    headlines=headlines,
)
