"""The FedDRO paper's Figures 1 and 3: robust training on imbalanced images. Adult is in `feddro_adult`."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax.numpy as jnp
import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from rookery import report
from rookery.algorithms import MBSGD, PDSGD, CompositionalFedAvg, DSFedDRO, FastDRO, FedDRO
from rookery.experiments.claims import NOT_RUN, Claim, Finding, Verdict, differs, lead, together
from rookery.experiments.curves import Figures, below, curves, draw, ends, mean, select
from rookery.experiments.experiment import Config, Experiment, Headline
from rookery.experiments.feddro_theory import PAPER
from rookery.experiments.grid import Grid
from rookery.fed import Algorithm
from rookery.tasks.dro_imbalanced import dro_imbalanced
from rookery.tasks.task import Task

GRID = (0.001, 0.01, 0.05, 0.1)  # the paper's learning rates
ENDS = "*End* is the mean over the last tenth of the run, then over the seeds. Bands: lowest to highest of the seeds."
UNITS = {"round": "x synchronised", "exchanges": "exchanges", "megabytes": "megabytes up, all clients"}


@dataclass(frozen=True)
class Drop:
    """A step size that falls to a tenth in the last quarter of the rounds; two with the same numbers are the same."""

    step: float
    rounds: int

    def __call__(self, t: Any) -> Any:
        """In round t."""
        return jnp.where(t < 3 * self.rounds // 4, self.step, 0.1 * self.step)


def listed(values: Sequence[Any]) -> str:
    """With commas."""
    return ", ".join(map(str, values))


def _three_units(
    results: pd.DataFrame, metrics: dict[str, str], lines: dict[str, Any], columns: int, **looks: Any
) -> Figure:
    """A row for each metric: against synchronisations of x, exchanges and bytes."""
    results = results[results["round"] > 0].assign(megabytes=results["bytes_up"] / 1e6)
    fig, axes = report.figure(len(metrics), 3, width=14.0, height=3.6 * len(metrics) + 0.6)
    for row, (metric, words) in enumerate(metrics.items()):
        for column, (unit, name) in enumerate(UNITS.items()):
            ax = axes[row, column]
            draw(ax, results, unit, metric, lines, markevery=6, **looks)
            ax.set_xscale("log")
            report.label(ax, name if row == len(metrics) - 1 else "", words if not column else "")
    below(fig, axes[0, 0], columns)
    return fig


DATA = {"cifar-10": "CIFAR10-ST", "cifar-100": "CIFAR100-ST"}
PENALTY, CAP = 1.0, 5.0  # λ and the cap of KL-DRO
IMAGES = ("FedDRO", "DS-FedDRO", "FastDRO", "PDSGD", "MBSGD", "FedAvg", "FedAvg, I = 5")
STEPS, SEARCH_STEPS, QUICK_STEPS = 2_400, 400, 12  # local steps; an epoch of CIFAR10-ST is 200
LONG, LONG_STEPS = "CIFAR10-ST, 60 epochs", 12_000
IMAGE_SERVER = 1.3
IMAGE_SWEEP = (1, 5, 20)  # I
LAST_SYNCS = STEPS // IMAGE_SWEEP[-1]
# Chosen by the search, on CIFAR10-ST: the step.
IMAGE_CHOSEN: dict[str, float] = {
    "FedDRO": 0.01,
    "DS-FedDRO": 0.01,
    "FastDRO": 0.1,
    "PDSGD": 0.05,
    "MBSGD": 0.05,
    "FedAvg": 0.01,
    "FedAvg, I = 5": 0.01,
}


def plain_images(seed: int, clients: int, data: str, equal: bool, data_dir: Any = None) -> Task:
    """The mean loss, for methods that weigh the samples themselves."""
    task = dro_imbalanced(clients, seed=seed, data=data, equal=equal, penalty=PENALTY, cap=CAP, data_dir=data_dir)
    assert task.single_level is not None
    return task.single_level


def image_method(method: str, step: Any, local: int) -> Algorithm:
    """A method with batches of 16."""
    own: dict[str, Any] = {"step": step, "batch_size": 16}
    if method == "FedDRO":
        return FedDRO(**own, momentum=0.5, local_steps=local, first_batch=128)
    if method == "DS-FedDRO":
        two: dict[str, Any] = {"server_step": IMAGE_SERVER, "server_inner_step": IMAGE_SERVER}
        return DSFedDRO(**own, **two, momentum=0.5, local_steps=local, first_batch=128)
    if method == "FastDRO":
        return FastDRO(**own, objective="chi2", size=1.0)
    if method == "PDSGD":
        return PDSGD(**own, dual_step=5e-4, penalty=PENALTY)
    if method == "MBSGD":
        return MBSGD(**own)
    return CompositionalFedAvg(**own, case="II", local_steps=local, first_batch=128)


def images(
    quick: bool, data: str, method: str, local: int = 1, clients: int = 8, chosen: float | None = None,
    steps: int = STEPS, evaluations: int = 10, words: str = "", **changes: Any,
) -> Config:  # fmt: skip
    """One method on one data set, which the results call `words`, or by its name.

    A search has a constant step, other runs a tenth of it in the last quarter.
    """
    local = 5 if method == "FedAvg, I = 5" else local
    rounds = (QUICK_STEPS if quick else steps) // local
    step = Drop(IMAGE_CHOSEN[method], rounds) if chosen is None else chosen
    words = words or DATA[data]
    given: dict[str, Any] = {
        "name": f"{method}, {words}, I = {local}, K = {clients}",
        "labels": {"method": method, "data": words, "local": local, "clients": clients},
        "seeds": (0,) if quick else (0, 1, 2),
        **changes,
    }
    robust: dict[str, Any] = {"penalty": PENALTY, "cap": CAP}
    plain = method in ("FastDRO", "PDSGD")
    return Config(
        task=plain_images if plain else dro_imbalanced,
        settings={"data": "digits" if quick else data, "clients": clients, "equal": True} | ({} if plain else robust),
        algorithm=image_method(method.split(",")[0], step, local),
        rounds=rounds,
        every=max(1, rounds // evaluations),
        **given,
    )


def image_search(quick: bool) -> list[Config]:
    """The step of every method, by the training accuracy of a short run on a seed that is not reported."""
    return [
        images(quick, "cifar-10", method, chosen=step, steps=SEARCH_STEPS,
               name=f"search: {method}, step {step:g}", seeds=(9,))
        for method in IMAGES[:6]
        for step in (GRID[-1:] if quick else GRID)
    ]  # fmt: skip


def fig1_runs(quick: bool) -> list[Config]:
    """All methods on both data sets, the second with one seed, and on the first for longer, with one or two."""
    ten = [images(quick, "cifar-10", method) for method in IMAGES]
    if quick:
        return ten
    longer: dict[str, Any] = {"steps": LONG_STEPS, "evaluations": 20, "words": LONG}
    sixty = [images(quick, "cifar-10", m, **longer, seeds=(0, 1) if m in IMAGES[:2] else (0,)) for m in IMAGES]
    return ten + sixty + [images(quick, "cifar-100", method, seeds=(0,)) for method in IMAGES]


def fig3_runs(quick: bool) -> list[Config]:
    """Both of the paper's methods over I, on CIFAR10-ST."""
    return [
        images(quick, "cifar-10", method, local)
        for method in IMAGES[:2]
        for local in (IMAGE_SWEEP[:2] if quick else IMAGE_SWEEP)
    ]


def k32_runs(quick: bool) -> list[Config]:
    """32 clients, as many epochs, one seed."""
    many: dict[str, Any] = {"clients": 4 if quick else 32, "steps": STEPS // 4, "seeds": (0,)}
    return [images(quick, "cifar-10", method, **many) for method in IMAGES[:6]]


ACCURACIES = {"train_accuracy": "training accuracy", "accuracy": "test accuracy"}
WORST = "worst_accuracy"
METRICS = ACCURACIES | {"risk": "robust risk", WORST: "test accuracy of the worst class"}


def fig1_picture(results: pd.DataFrame) -> Figure:
    """Accuracies and risk against local steps, a column for each data set; the axes are those of the last half."""
    data = list(results["data"].unique())
    results = results.assign(steps=results["round"] * results["local"])
    shown = [metric for metric in METRICS if metric != WORST]
    fig, axes = report.figure(len(shown), len(data), width=max(6.0, 5.0 * len(data)), height=10.5)
    for column, name in enumerate(data):
        own = select(results, data=name)
        late = own[own["steps"] >= own["steps"].max() / 2]
        for row, metric in enumerate(shown):
            ax = axes[row, column]
            draw(ax, own, "steps", metric, {m: {"method": m} for m in _methods(own)}, markevery=3)
            low, high = late[metric].min(), late[metric].max()
            ax.set_ylim(low - 0.05 * (high - low), high + 0.05 * (high - low))
            last = row == len(shown) - 1
            report.label(ax, "local steps" if last else "", "" if column else METRICS[metric], "" if row else name)
    below(fig, axes[0, 0], 4)
    return fig


def fig3_picture(results: pd.DataFrame) -> Figure:
    """Both accuracies in three units."""
    lines = {
        f"{method}, I = {local}": {"method": method, "local": local, "look": {"color": colour, "linestyle": line}}
        for method, line in zip(IMAGES[:2], ("-", "--"), strict=True)
        for local, colour in zip(IMAGE_SWEEP, (report.BLUE, report.GREEN, report.ORANGE), strict=True)
        if local in set(results["local"])
    }
    return _three_units(results, ACCURACIES, lines, 3)


def _methods(own: pd.DataFrame) -> list[str]:
    return [method for method in IMAGES if method in set(own["method"])]


def _image_ends(results: pd.DataFrame, metric: str, data: str) -> dict[str, np.ndarray]:
    """By method, for each of its seeds."""
    own = select(results, data=data)
    return {method: ends(own, metric, method=method) for method in _methods(own)}


def _image_figures(results: pd.DataFrame, metric: str) -> Figures:
    """The means over the seeds, and how many seeds there are."""
    figures: Figures = {}
    for data in results["data"].unique():
        own = _image_ends(results, metric, data)
        counts = list(map(len, own.values()))
        seeds = listed(counts if len(set(counts)) > 1 else counts[:1])
        figures[f"{METRICS[metric]}, {data}: {', '.join(own)} (seeds: {seeds})"] = list(map(mean, own.values()))
    return figures


def _both_at_least(results: pd.DataFrame, metric: str, slack: float) -> Finding:
    """On every data set FedDRO and DS-FedDRO end no lower than every baseline, up to the slack, each by the mean over
    the seeds that it has."""
    holds = True
    for data in results["data"].unique():
        own = {method: mean(values) for method, values in _image_ends(results, metric, data).items()}
        best = max(value for method, value in own.items() if method not in IMAGES[:2])
        holds = holds and min(own[m] for m in IMAGES[:2]) >= best - slack
    return Finding(holds, _image_figures(results, metric))


def _both_lead(results: pd.DataFrame, metric: str, sign: int = 1) -> Finding:
    """On every data set FedDRO and DS-FedDRO end better than every baseline by more than two standard errors.

    `sign` is -1 where lower is better. It does not hold where one of them is worse by as much, and is undecided where a
    difference is smaller, or a method has one seed.
    """
    each = []
    for data in results["data"].unique():
        own = {method: sign * values for method, values in _image_ends(results, metric, data).items()}
        each += [lead(own[m], own[other]).holds for m in IMAGES[:2] for other in own if other not in IMAGES[:2]]
    return Finding(together(each), _image_figures(results, metric))


BEHIND = differs(
    "set-up",
    "At 12 epochs of CIFAR10-ST PDSGD leads and the others are close to each other. At 60 of the paper's 120 (8 "
    "clients, one or two seeds) FastDRO and MBSGD are ahead of FedDRO and DS-FedDRO, too, in both accuracies and in "
    "robust risk: more epochs alone are not what is missing. The step may be: it was chosen by runs of 400 steps, and "
    "one that is behind by then can be ahead later. With I = 1 FedDRO, DS-FedDRO, FedAvg and MBSGD have nearly the "
    "same iteration. The first three have the step .01 and end at a training accuracy of .84 to .86; MBSGD has .05, is "
    "behind them after 600 steps (.43 to .51–.56) and ahead at the end (.92). A longer search was not made.",
)


def train_above(results: pd.DataFrame) -> Finding:
    """See `_both_at_least`, without slack."""
    return _both_at_least(results, "train_accuracy", 0.0)


def comparable_on_test(results: pd.DataFrame) -> Finding:
    """See `_both_at_least`; comparable is 1 point."""
    return _both_at_least(results, "accuracy", 0.01)


def robust_risk(results: pd.DataFrame) -> Finding:
    """See `_both_lead`."""
    return _both_lead(results, "risk", sign=-1)


def worst_class(results: pd.DataFrame) -> Finding:
    """See `_both_lead`."""
    found = _both_lead(results, WORST)
    most = max(np.max(values) for values in found.figures.values())
    few = f"No method ends above {most:.2g}, and a difference is within two standard errors, or is of one seed."
    return replace(found, note=few if found.holds is None else "")


def ds_above(results: pd.DataFrame) -> Finding:
    """On every data set DS-FedDRO ends above FedDRO by more than two standard errors, in training and test accuracy.

    It does not hold where it ends below by as much, and is undecided where a difference is smaller, or is of one seed.
    """
    figures: Figures = {}
    leads, above = [], []
    for data in results["data"].unique():
        pairs = [[_image_ends(results, metric, data)[m] for m in ("DS-FedDRO", "FedDRO")] for metric in ACCURACIES]
        for words, (two, one) in zip(ACCURACIES.values(), pairs, strict=True):
            leads.append(lead(two, one))
            name = f"{words}, {data}, DS-FedDRO less FedDRO, two standard errors, and the difference by seed"
            figures[name] = [*leads[-1], *(two - one)]
        if (seeds := len(pairs[0][0])) > 1 and all(np.all(two > one) for two, one in pairs):
            above.append(f"{data} ({seeds} seeds)")
    few = " One seed has no spread." if any(np.isinf(pair.error) for pair in leads) else ""
    every = f" With every seed it is above in both accuracies: {'; '.join(above)}." if above else ""
    note = f"A difference is within two standard errors of the seeds.{few}{every}"
    return Finding(together([pair.holds for pair in leads]), figures, note)


def fedavg_worst(results: pd.DataFrame) -> Finding:
    """On every data set FedAvg (with I = 5, where that was run) ends lowest in training and test accuracy, by the means
    over the seeds."""
    holds = True
    for metric in ACCURACIES:
        for data in results["data"].unique():
            own = {method: mean(values) for method, values in _image_ends(results, metric, data).items()}
            holds = holds and own.get(IMAGES[6], own["FedAvg"]) == min(own.values())
    return Finding(holds, _image_figures(results, "train_accuracy") | _image_figures(results, "accuracy"))


def image_locals_help(results: pd.DataFrame) -> Finding:
    """At the same synchronisations, before any run's step falls, I helps, and from the second I to the last by less
    than half as much; undecided where the evaluations have no such place."""
    locals_ = sorted(results["local"].unique())
    figures: Figures = {}
    each: list[bool | None] = []
    for method in IMAGES[:2]:
        means = {}
        for local in locals_:
            whole = pd.concat(curves(results, "train_accuracy", method=method, local=local), axis=1).mean(axis=1)
            means[local] = whole[(whole.index > 0) & (whole.index <= 0.75 * whole.index[-1])]
        for some in (locals_, locals_[:2]):
            shared = set.intersection(*(set(means[local].index) for local in some))
            if shared:
                at = max(shared)
                own = [float(means[local][at]) for local in some]
                figures[f"training accuracy after {at} synchronisations, {method}, I = {listed(some)}"] = own
                rises = own[1] > own[0]
                each.append(rises and own[-1] - own[1] < 0.5 * (own[1] - own[0]) if len(some) > 2 else rises)
                break
        if len(some) < len(locals_):
            each.append(None)
    note = (
        f"It helps from I = {locals_[0]} to {locals_[1]}. Whether it saturates these runs cannot show: all have as "
        f"many local steps, so that the longest I has {LAST_SYNCS} synchronisations, the last quarter of them at a "
        "tenth of the step, and the shortest is first evaluated after 240."
    )
    return Finding(together(each), figures, note if None in each else "")


def image_locals_cost(results: pd.DataFrame) -> Finding:
    """At equal local steps, the largest I ends 1 to 5 points below I = 1 in training accuracy."""
    locals_ = sorted(results["local"].unique())
    figures: Figures = {}
    gaps = []
    for metric, words in ACCURACIES.items():
        for method in IMAGES[:2]:
            own = [mean(ends(results, metric, method=method, local=local)) for local in locals_]
            figures[f"{words} at the end, {method}, I = {listed(locals_)}"] = own
            gaps += [own[0] - own[-1]] * (metric == "train_accuracy")
    return Finding(min(gaps) > 0.01 and max(gaps) < 0.05, figures)


SETUP = (
    "CIFAR10-ST: of each of the first five classes the last 100 images, of the others all 5,000 (CIFAR100-ST: 50 "
    "classes with 100, 50 with 500); test images as published. Equal random shares, batches of 16 a client, ResNet-20 "
    f"with group normalisation, no augmentation. KL-DRO with λ = {PENALTY:g} and no sample counted more than "
    f"{CAP:g} times; β = .5; {STEPS:,} local steps, the step a tenth in the last quarter. FastDRO (χ² ball, "
    "ρ = 1) and PDSGD (KL, the same λ, dual step 5·10⁻⁴) weigh the samples themselves. The "
    "steps, from the paper's four values, by the training accuracy of a run of "
    f"{SEARCH_STEPS:,} steps: "
)
IMAGE_DIFFERENCES = (
    f"Shorter than the paper's: {STEPS:,} local steps are 12 epochs of CIFAR10-ST (10 of CIFAR100-ST), where its "
    "source trains for 120.",
    "Not given: the objective and λ, β, the number of rounds, weight decay (none here), the normalisation layer (group "
    "normalisation here: batches of 16 have poor statistics), crops and flips (none here), what FastDRO's uncertainty "
    "set is.",
    "The step falls at three quarters, as 90 of 120 in the paper's source.",
)
IMAGE_CLAIMS = (
    Claim("FedDRO and DS-FedDRO reach a training accuracy at least that of every baseline.", "Fig. 1", train_above,
          otherwise=BEHIND),
    Claim("Their test accuracy is comparable or better (within a point).", "Fig. 1", comparable_on_test,
          otherwise=BEHIND),
    Claim("DS-FedDRO is at least as good as FedDRO.", "Fig. 1", ds_above, otherwise=BEHIND),
    Claim("FedAvg is significantly worse (here: the worst).", "Fig. 1, Section 6", fedavg_worst, otherwise=differs(
        "set-up",
        "With I = 5 it is the lowest on CIFAR10-ST, at 12 epochs and at 60 (one seed); on CIFAR100-ST FastDRO is "
        "lower, with a step that was chosen on CIFAR10-ST. With I = 1, all that was run with 32 clients, Theorem 4.1 "
        "does not say that it fails. The clients' shares are random and equal, so that their inner values hardly "
        "differ.",
    )),
)  # fmt: skip
OWN_CLAIMS = (
    Claim("FedDRO and DS-FedDRO end with a lower robust risk than every baseline.", "ours", robust_risk, kind="own",
          otherwise=differs(
        "set-up",
        "PDSGD's is the lowest everywhere, on CIFAR10-ST at 12 epochs with three seeds; at 60 those of FastDRO and "
        "MBSGD are lower, too (one seed). The likely reason is the step, as for the accuracies.",
    )),
    Claim("Their test accuracy of the worst class is higher than that of every baseline.", "ours", worst_class,
          kind="own"),
)  # fmt: skip

fig1 = Experiment(
    name="feddro-fig1",
    title="robust training on imbalanced images",
    paper=f"{PAPER}: Figure 1.",
    setup=(
        f"8 clients. {SETUP}{IMAGE_CHOSEN}. I = 1, and FedAvg (case II) with I = 5, too. CIFAR100-ST with the same "
        f"steps and one seed. CIFAR10-ST for {LONG_STEPS:,} local steps (60 epochs), too: FedDRO and DS-FedDRO with "
        f"two seeds, the others with one. {ENDS}"
    ),
    runs=fig1_runs,
    picture=fig1_picture,
    claims=(*IMAGE_CLAIMS, *OWN_CLAIMS),
    differences=(
        *IMAGE_DIFFERENCES,
        f"On CIFAR10-ST also {LONG_STEPS:,} local steps, 60 epochs: half as many as in its source, with one or two "
        f"seeds, and with the steps that runs of {SEARCH_STEPS:,} chose.",
    ),
    family="feddro-images",
    search=image_search,
    grid=Grid(r"step (?P<step>\S+)$", ("method",), lambda search: search["train_accuracy"], fixed=("step",)),
    headlines=lambda results: [
        Headline(f"{m}, {data}, training", "", ends(results, "train_accuracy", method=m, data=data))
        for data in (DATA["cifar-10"], LONG)
        for m in ("DS-FedDRO", "PDSGD")
    ],
)

fig3 = Experiment(
    name="feddro-fig3",
    title="the number of local steps on CIFAR10-ST",
    paper=f"{PAPER}: Figure 3.",
    setup=f"8 clients. {SETUP}as in `feddro-fig1`. I = {listed(IMAGE_SWEEP)}. {ENDS}",
    runs=fig3_runs,
    picture=fig3_picture,
    claims=(
        Claim("Larger I helps for the same synchronisations of x, then it saturates.", "Fig. 3", image_locals_help),
        Claim("The same on CIFAR100-ST.", "Fig. 3", None, otherwise=Verdict(NOT_RUN, "CIFAR100-ST was not run here.")),
        Claim("At the same number of local steps, I = 20 costs a few points.", "ours", image_locals_cost, kind="own"),
    ),
    differences=(*IMAGE_DIFFERENCES, "The values of I are not given: ours. CIFAR100-ST was not run."),
    family="feddro-images",
    headlines=lambda results: [
        Headline(f"DS-FedDRO, I = {i}, training", "", ends(results, "train_accuracy", method=IMAGES[1], local=i))
        for i in IMAGE_SWEEP
    ],
)

k32 = Experiment(
    name="feddro-k32",
    title="the same with 32 clients",
    paper=f"{PAPER}: Section 6 (its figure is in an appendix that is not in the text at hand).",
    setup=f"32 clients, CIFAR10-ST, {STEPS // 4} steps (the same 12 epochs), one seed. {SETUP}as in `feddro-fig1`.",
    runs=k32_runs,
    picture=fig1_picture,
    claims=IMAGE_CLAIMS,
    differences=IMAGE_DIFFERENCES,
    family="feddro-images",
    headlines=lambda results: [
        Headline(f"{m}, training", "", ends(results, "train_accuracy", method=m)) for m in ("DS-FedDRO", "PDSGD")
    ],
)

EXPERIMENTS = (fig1, fig3, k32)
