"""What the figures on weighted nodes share: the methods, the runs, the search, the scores and the curves."""

import dataclasses
import itertools
from typing import Any

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from rookery import report
from rookery.algorithms import Ditto, LocalSVRG, LocalTrain, PFedMe, WeightedNodesProx
from rookery.experiments.machinery.claims import Finding
from rookery.experiments.machinery.curves import select
from rookery.experiments.machinery.drawing import below
from rookery.experiments.machinery.experiment import Config
from rookery.experiments.machinery.grid import Grid
from rookery.experiments.machinery.numbers import Figures
from rookery.language.fed import Algorithm
from rookery.tasks.task import Task
from rookery.tasks.weighted_nodes import KINDS, SETTINGS, weighted_nodes

METHODS = ("Bi-level", "Local-train", "FedAvg", "Ditto", "pFedMe")
ALONE = METHODS[:2]  # they depend on the centre's samples; the others are trained once and scored for both centres
IMAGES = {"mnist": "MNIST", "fashion-mnist": "F-MNIST", "cifar-10": "CIFAR-10"}
FOUR = (1, 2, 3, 4)
SEEDS = (0, 1, 2, 3, 4)
GRID = {
    "step": (0.05, 0.02, 0.01),
    "linear": (0.0005, 0.0002, 0.0001),
    "weight": (0.025, 0.02, 0.015),
    "sync": (10, 20),
}
LAMBDAS = {"Ditto": (0.05, 0.1, 0.2), "pFedMe": (5.0, 10.0, 15.0)}


def _named(metrics: dict[str, Any], center: str) -> dict[str, Any]:
    """The metrics, with the centre's name before each accuracy."""
    return {f"{center}_{name}" if name.endswith("accuracy") else name: value for name, value in metrics.items()}


def one_center(seed: int, center: str, level: str, data_dir: Any = None, **settings: Any) -> Task:
    """The task for one centre, for Bi-level, or (level "single") for Local-train."""
    task = weighted_nodes(center=center, seed=seed, data_dir=data_dir, **settings)
    if level == "single":
        assert task.single_level is not None
        alone: Any = task.single_level.evaluate
        task = task.single_level
        return dataclasses.replace(task, evaluate=lambda x, y, memory: _named(alone(x, y, memory), center))
    measure: Any = task.evaluate
    return dataclasses.replace(task, evaluate=lambda x, y: _named(measure(x, y), center))


def both_centers(seed: int, data_dir: Any = None, **settings: Any) -> Task:
    """The task of methods whose training does not depend on the centre, scored for both."""
    tasks = {center: weighted_nodes(center=center, seed=seed, data_dir=data_dir, **settings) for center in KINDS}
    single = {center: task.single_level for center, task in tasks.items()}

    def measure(x: Any, y: Any, memory: Any) -> dict[str, Any]:
        scores: dict[str, Any] = {}
        for center, task in single.items():
            evaluate: Any = task.evaluate  # type: ignore[union-attr]
            scores |= _named(evaluate(x, y, memory), center)
        return scores

    first = single[KINDS[0]]
    assert first is not None
    return dataclasses.replace(first, evaluate=measure)


def chosen(data: str) -> dict[str, Any]:
    """γ, γ_h, η and τ of Bi-level, which the others share, and λ of Ditto and pFedMe: the task's defaults."""
    nested, single = SETTINGS[data].defaults, SETTINGS[data].single
    shared = ("model_step", "linear_step", "weight_step", "sync_every")
    numbers = dict(zip(GRID, (nested[name] for name in shared), strict=True))
    return numbers | {"Ditto": single["Ditto"]["proximal"], "pFedMe": single["PFedMe"]["proximal"]}


def trained(method: str, data: str, values: dict[str, Any]) -> Algorithm:
    """A method with these values; batch size, q and T_s are the task's."""
    batch, refresh, steps = (SETTINGS[data].defaults[name] for name in ("batch_size", "refresh", "steps"))
    step, sync = values["step"], values["sync"]
    if method == "Bi-level":
        three: dict[str, Any] = {"model_step": step, "linear_step": values["linear"], "weight_step": values["weight"]}
        return WeightedNodesProx(**three, steps=steps, sync_every=sync, refresh=refresh, batch_size=batch)
    if method == "Local-train":
        return LocalTrain(step=step, local_steps=sync, refresh=refresh, batch_size=batch)
    if method == "FedAvg":
        return LocalSVRG(step=step, sync_every=sync, refresh=refresh, batch_size=batch)
    own: dict[str, Any] = {"step": step, "local_steps": sync, "batch_size": batch}
    if method == "Ditto":
        return Ditto(**own, personal_step=step, personal_steps=25, proximal=values["Ditto"])
    own |= {"step": SETTINGS[data].single["PFedMe"]["step"]}
    return PFedMe(**own, proximal=values["pFedMe"], accuracy=0.005, inner_step=0.05, inner_steps=20)


def node_run(
    quick: bool, method: str, data: str, setting: int, center: str, given: dict[str, Any] | None = None,
    outer: int | None = None, validation: int | None = None, **changes: Any,
) -> Config:  # fmt: skip
    """One method, with as many exchanges as Bi-level makes; center is "both" for methods that do not depend on it."""
    data = "digits" if quick else data
    values = chosen(data) | (given or {})
    exchanges = 2 * -(-SETTINGS[data].defaults["steps"] // values["sync"]) + 1
    outer = 2 if quick else outer or SETTINGS[data].rounds
    rounds, every = (outer, 1) if method == "Bi-level" else (outer * exchanges, exchanges)
    settings: dict[str, Any] = {"setting": setting, "data": data}
    if validation is not None:
        settings["validation"] = validation
    if center != "both":
        settings |= {"center": center, "level": "nodes" if method == "Bi-level" else "single"}
    labels = {"method": method, "data": data, "setting": setting, "center": center, "validation": validation or 0}
    return Config(
        name=f"{method}, {data}, setting {setting}, {center}" + (f", {validation}" if validation else ""),
        labels=labels,
        task=both_centers if center == "both" else one_center,
        settings=settings,
        algorithm=trained(method, data, values),
        rounds=rounds,
        every=every,
        seeds=SEEDS[:1] if quick else SEEDS,
    ).but(**changes)


def all_methods(quick: bool, data: str, setting: int, **changes: Any) -> list[Config]:
    """The five methods, for both centres."""
    alone = [node_run(quick, method, data, setting, center, **changes) for method in ALONE for center in KINDS]
    return alone + [node_run(quick, method, data, setting, "both", **changes) for method in METHODS[2:]]


def search_in(quick: bool, data: str, setting: int) -> list[Config]:
    """The paper's grid for Bi-level, both centres; then λ of Ditto and pFedMe. No result is reported for its seed."""

    def tried(method: str, center: str, given: dict[str, Any], words: str) -> Config:
        name = f"search: {data}, {method}, {center}, {words}"
        return node_run(quick, method, data, setting, center, given, 5, name=name, seeds=(9,))

    grid = [dict(zip(GRID, values, strict=True)) for values in itertools.product(*GRID.values())]
    found = []
    for given in grid[:1] if quick else grid:
        words = ", ".join(f"{name} {value:g}" for name, value in given.items())
        found += [tried("Bi-level", center, given, words) for center in KINDS]
    for method, values in LAMBDAS.items():
        for value in values[:1] if quick else values:
            found.append(tried(method, "both", {method: value}, f"λ {value:g}"))
    return found


SEARCH_GRID = Grid(
    pattern=r"(?:step (?P<step>\S+), linear (?P<linear>\S+), weight (?P<weight>\S+), sync (?P<sync>\S+)|λ (?P<λ>\S+))$",
    keys=("data", "method"),
    score=lambda search: search[[f"{center}_validation_accuracy" for center in KINDS]].mean(axis=1),  # one, or both
    fixed=("step", "linear", "weight", "sync", "λ"),
)


def scores(
    results: pd.DataFrame, method: str, data: str, setting: int, center: str, last: bool = False, **labels: Any
) -> list[float]:
    """The test accuracy, for each seed, of the model with the highest validation accuracy; with `last`, and on
    Covertype, of the last model."""
    where = center if method in ALONE else "both"
    own = select(results, method=method, data=data, setting=setting, center=where, **labels)
    by_seed = own.groupby("seed")
    best = by_seed.tail(1) if last or data == "covtype" else own.loc[by_seed[f"{center}_validation_accuracy"].idxmax()]
    return [float(value) for value in best[f"{center}_accuracy"]]


def cells(results: pd.DataFrame) -> list[tuple[str, int]]:
    """The data sets and settings of the results."""
    return sorted(results[["data", "setting"]].drop_duplicates().itertuples(index=False, name=None))


def _panels(results: pd.DataFrame, words: str) -> tuple[Figure, list[tuple[Axes, str, str, int]]]:
    """A row for each data set and centre, a column for each setting; with one setting, a column for each centre."""
    settings = sorted(results["setting"].unique())
    panels = [(d, c, s) for d in dict.fromkeys(results["data"]) for c in KINDS for s in settings]
    columns = len(settings) if len(settings) > 1 else len(KINDS)
    rows = len(panels) // columns
    width = 2.9 if columns > 2 else 4.0
    fig, axes = report.figure(rows, columns, width=width * columns + 1, height=0.75 * width * rows + 0.6)
    for i, (ax, (data, center, setting)) in enumerate(zip(axes.flat, panels, strict=True)):
        title = f"{IMAGES.get(data, data)}, {center}, setting {setting}"
        report.label(ax, x=words if i >= len(panels) - columns else "", title=title)
    return fig, [(ax, *panel) for ax, panel in zip(axes.flat, panels, strict=True)]


def _over(results: pd.DataFrame, across: str, words: str) -> Figure:
    """The test accuracy of all the methods."""
    fig, panels = _panels(results, words)
    for ax, data, center, setting in panels:
        draw_methods(ax, results, across, data, setting, center)
        ax.set_ylim(bottom=after_start(results, data, setting, center) - 0.05)
    below(fig, fig.axes[0], 5)
    return fig


def draw_methods(ax: Axes, results: pd.DataFrame, across: str, data: str, setting: int, center: str) -> None:
    """The test accuracy of each method; of Local-train, which makes no exchanges, a line at its last."""
    for method in METHODS:
        where = center if method in ALONE else "both"
        own = select(results, method=method, data=data, setting=setting, center=where)
        if method == "Local-train" and across == "exchanges":
            last = own.groupby("seed")[f"{center}_accuracy"].last().mean()
            ax.axhline(last, label=method, color=report.style(method)["color"], linestyle=":")
        else:
            report.band(ax, own, across, f"{center}_accuracy", method, marker="")


def after_start(results: pd.DataFrame, data: str, setting: int, center: str) -> float:
    """The lowest mean after the first evaluations, where the picture may begin."""
    own = select(results, data=data, setting=setting).dropna(subset=[f"{center}_accuracy"])
    means = own.groupby(["run", "round"])[f"{center}_accuracy"].mean()
    return min(float(line.iloc[min(2, len(line) - 1) :].min()) for _, line in means.groupby("run"))


def over_exchanges(results: pd.DataFrame) -> Figure:
    """Fig. 1 and 7; Local-train, which makes no exchanges, as a line at its last accuracy."""
    return _over(results, "exchanges", "synchronisations")


def over_samples(results: pd.DataFrame) -> Figure:
    """Figures 8 and 9."""
    return _over(results, "samples_busiest", "data points of a node")


def weights_picture(results: pd.DataFrame) -> Figure:
    """Figures 2 and 4 to 6: each node's weight, the mean over the seeds."""
    fig, panels = _panels(results, "outer iterations")
    for ax, data, center, setting in panels:
        own = select(results, method="Bi-level", data=data, setting=setting, center=center).groupby("round")
        for k in range(15):
            similar = (k < 5) == (center == "minority")
            words = "similar nodes" if similar else "dissimilar nodes"
            colour = report.BLUE if similar else report.VERMILION
            ax.plot(own[f"weight_{k}"].mean(), color=colour, label=words if k in (0, 14) else None)
    below(fig, fig.axes[0], 2)
    return fig


def similar_trusted(results: pd.DataFrame) -> Finding:
    """In every run of Bi-level the similar nodes end with a larger share of the weight than they began with."""
    own = select(results, method="Bi-level").groupby(["run", "seed"])["similar_weight"]
    start, end = own.first(), own.last()
    figures: Figures = {
        "least rise of the similar nodes' share": float((end - start).min()),
        "lowest share at the end": float(end.min()),
        "mean share at the end": float(end.mean()),
    }
    return Finding(bool((end > start).all()), figures)


PERSONAL = "Ditto's and pFedMe's accuracy is the mean over the personal models of the nodes of the centre's group."
SCORED = (
    "The scored model is that of the first evaluation with the highest validation accuracy; Local-train's is its "
    f"accuracy on what it learns from. {PERSONAL}"
)


def chosen_words(*data: str) -> str:
    """The values that the search chose."""
    signs = ("γ", "γ_h", "η", "τ", "λ of Ditto", "λ of pFedMe")
    each = (", ".join(f"{sign} = {v:g}" for sign, v in zip(signs, chosen(d).values(), strict=True)) for d in data)
    return "Chosen by the search: " + "; ".join(f"{d}: {words}" for d, words in zip(data, each, strict=True)) + "."


IMAGE_RUNS = (
    "15 nodes, 5 of the minority; 4,000 images each, 500 at the centre, 5,000 to test; the paper's CNN with batch "
    f"statistics; b = 1/3, batches of 50, T_s = 400, q = 1/50. {chosen_words(*IMAGES)} 20 outer iterations; the others "
    "as many exchanges."
)
IMAGE_DIFFERENCES = (
    "Not given: the outer iterations, w⁰ (1/K here), θ⁰, whose personal model is scored, what ± means (standard "
    "deviation here).",
    "Not said: for which runs the values are chosen. Here once for a data set, in setting 2, by the mean validation "
    "accuracy of both centres after five outer iterations, on a seed that is not reported.",
    "Not given: the step of pFedMe's inner descent (.05 here). In settings 3 and 4 the majority's validation and test "
    "images are turned as its nodes' are.",
    "A data point counts once for each minibatch it is drawn into; pFedMe uses a minibatch for up to 20 steps.",
    "Down-sampled ImageNet, the paper's fourth data set, is not to be had here: not run.",
)
