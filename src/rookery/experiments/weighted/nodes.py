"""What the figures on weighted nodes share: the methods, the runs, the search, the scores and the curves."""

import dataclasses
import itertools
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from rookery import report
from rookery.algorithms import Ditto, LocalSVRG, LocalTrain, PFedMe, WeightedNodesProx
from rookery.experiments.machinery import Config, Finding, Grid
from rookery.experiments.machinery.claims import Lead, lead, together
from rookery.experiments.machinery.curves import curves, labelled, select
from rookery.experiments.machinery.drawing import below, spread
from rookery.experiments.machinery.numbers import Figures, mean
from rookery.language.fed import Algorithm
from rookery.tasks.task import Task
from rookery.tasks.weighted_nodes import KINDS, SETTINGS, weighted_nodes

METHODS = ("Bi-level", "Local-train", "FedAvg", "Ditto", "pFedMe")
ALONE = METHODS[:2]  # they depend on the centre's samples; the others are trained once and scored for both centres
IMAGES = {"mnist": "MNIST", "fashion-mnist": "F-MNIST", "cifar-10": "CIFAR-10"}
FOUR = (1, 2, 3, 4)
SEEDS = (0, 1, 2, 3, 4)
POINTS = "samples_busiest"  # data points that a node processes
GRID = {
    "step": (0.05, 0.02, 0.01),
    "linear": (0.0005, 0.0002, 0.0001),
    "weight": (0.025, 0.02, 0.015),
    "sync": (10, 20),
}
LAMBDAS = {"Ditto": (0.05, 0.1, 0.2), "pFedMe": (5.0, 10.0, 15.0)}


def where(method: str, center: str) -> str:
    """The centre in the labels of a method's runs."""
    return center if method in ALONE else "both"


def node_task(seed: int, center: str, nested: bool, data_dir: Any = None, **settings: Any) -> Task:
    """The task for one centre or "both": nested for Bi-level, else single-level; accuracies have the centre's name."""
    kinds = KINDS if center == "both" else (center,)
    tasks: Any = {kind: weighted_nodes(center=kind, seed=seed, data_dir=data_dir, **settings) for kind in kinds}

    def measure(x: Any, y: Any, memory: Any) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for kind, task in tasks.items():
            own = task.evaluate(x, y) if nested else task.single_level.evaluate(x, y, memory)
            found |= {f"{kind}_{name}" if name.endswith("accuracy") else name: value for name, value in own.items()}
        return found

    first = tasks[kinds[0]]
    return dataclasses.replace(first if nested else first.single_level, evaluate=measure)


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
    svrg: dict[str, Any] = {"sync_every": sync, "refresh": refresh, "batch_size": batch}
    local: dict[str, Any] = {"local_steps": sync, "batch_size": batch}
    if method == "Bi-level":
        others = {"linear_step": values["linear"], "weight_step": values["weight"]}
        return WeightedNodesProx(model_step=step, **others, **svrg, steps=steps)
    if method == "Local-train":
        return LocalTrain(step=step, refresh=refresh, **local)
    if method == "FedAvg":
        return LocalSVRG(step=step, **svrg)
    if method == "Ditto":
        return Ditto(step=step, **local, personal_step=step, personal_steps=25, proximal=values["Ditto"])
    rate = SETTINGS[data].single["PFedMe"]["step"]
    return PFedMe(step=rate, **local, proximal=values["pFedMe"], accuracy=0.005, inner_step=0.05, inner_steps=20)


def node_run(
    quick: bool, method: str, data: str, setting: int, center: str, given: dict[str, Any] | None = None,
    outer: int | None = None, validation: int | None = None, **changes: Any,
) -> Config:  # fmt: skip
    """One method, with as many exchanges as Bi-level makes; center is "both" for methods that do not depend on it."""
    data = "digits" if quick else data
    values = chosen(data) | (given or {})
    nested = method == "Bi-level"
    every = 1 if nested else 2 * -(-SETTINGS[data].defaults["steps"] // values["sync"]) + 1  # exchanges of its round
    own = {"data": data, "setting": setting, "center": center}
    return Config(
        name=f"{method}, {data}, setting {setting}, {center}" + (f", {validation}" if validation else ""),
        labels={"method": method, **own, "validation": validation or 0},
        task=node_task,
        settings={**own, "nested": nested, "validation": validation or SETTINGS[data].sizes[1]},
        algorithm=trained(method, data, values),
        rounds=every * (2 if quick else outer or SETTINGS[data].rounds),
        every=every,
        seeds=SEEDS[:1] if quick else SEEDS,
    ).but(**changes)


def all_methods(quick: bool, data: str, setting: int, **changes: Any) -> list[Config]:
    """The five methods, for both centres."""
    runs = dict.fromkeys((method, where(method, center)) for method in METHODS for center in KINDS)
    return [node_run(quick, method, data, setting, center, **changes) for method, center in runs]


def search_in(quick: bool, data: str, setting: int) -> list[Config]:
    """The paper's grid for Bi-level, both centres; then λ of Ditto and pFedMe. No result is reported for its seed."""
    grid = [dict(zip(GRID, values, strict=True)) for values in itertools.product(*GRID.values())]
    tried: list[tuple[str, str, dict[str, Any], str]] = []  # method, centre, values, and these in words
    for given in grid[:1] if quick else grid:
        words = ", ".join(f"{name} {value:g}" for name, value in given.items())
        tried += [("Bi-level", center, given, words) for center in KINDS]
    for method, values in LAMBDAS.items():
        tried += [(method, "both", {method: value}, f"λ {value:g}") for value in (values[:1] if quick else values)]
    named = lambda method, center, words: f"search: {data}, {method}, {center}, {words}"
    return [
        node_run(quick, m, data, setting, center, given, 5, name=named(m, center, words), seeds=(9,))
        for m, center, given, words in tried
    ]


SEARCH_GRID = Grid(
    pattern=r"(?:step (?P<step>\S+), linear (?P<linear>\S+), weight (?P<weight>\S+), sync (?P<sync>\S+)|λ (?P<λ>\S+))$",
    keys=("data", "method"),
    score=lambda search: search[[f"{center}_validation_accuracy" for center in KINDS]].mean(axis=1),  # one, or both
    fixed=("step", "linear", "weight", "sync", "λ"),
)


# What the claims measure.


def run_of(results: pd.DataFrame, method: str, data: str, setting: int, center: str, **labels: Any) -> pd.DataFrame:
    """The rows of a method's run for a centre, or for both."""
    return select(results, method=method, data=data, setting=setting, center=where(method, center), **labels)


def scores(
    results: pd.DataFrame, method: str, data: str, setting: int, center: str, last: bool = False, **labels: Any
) -> list[float]:
    """The test accuracy, for each seed, of the model with the highest validation accuracy; with `last`, and on
    Covertype, of the last model."""
    rows = labelled(results, method=method, data=data, setting=setting, center=where(method, center), **labels)
    places, seeds = np.flatnonzero(rows), results["seed"].to_numpy()[rows]
    by_seed = [places[seeds == seed] for seed in np.unique(seeds)]
    validation = results[f"{center}_validation_accuracy"].to_numpy() if not (last or data == "covtype") else None
    best = [own[-1] if validation is None else own[np.nanargmax(validation[own])] for own in by_seed]
    return [float(value) for value in results[f"{center}_accuracy"].to_numpy()[best]]


def cells(results: pd.DataFrame) -> list[tuple[str, int]]:
    """The data sets and settings of the results."""
    return sorted(results[["data", "setting"]].drop_duplicates().itertuples(index=False, name=None))


def named(data: str, setting: int) -> str:
    """A cell's name."""
    return f"{IMAGES.get(data, data)}, setting {setting}"


def over_cells(found: Mapping[str, Mapping[str, Lead]], most: bool = False) -> Finding:
    """Whether all the leads of a cell exceed the margin, in all cells or in most; a note names the others.

    "In most" is undecided if neither more than half of the cells hold, nor at least half fail.
    """
    each = [together([more.holds for more in leads.values()]) for leads in found.values()]
    counts = [each.count(value) for value in (True, None, False)]
    holds = together(each)
    if most:
        decided = 2 * counts[0] > len(each) or 2 * counts[2] >= len(each)
        holds = counts[0] > counts[2] if decided else None
    figures: Figures = {f"of {len(each)}: holds, within the margin, fails": counts} if len(each) > 1 else {}
    notes: dict[bool | None, list[str]] = {None: [], False: []}
    for (cell, leads), own in zip(found.items(), each, strict=True):
        closest = min(leads, key=lambda name: leads[name].mean - leads[name].error)
        figures[f"{cell}, {closest}: difference, margin"] = leads[closest]
        if not own:
            notes[own].append(f"{cell} ({', '.join(name for name, more in leads.items() if more.holds is own)})")
    words = {None: "Within the margin", False: "It fails"}
    note = " ".join(f"{words[value]}: {'; '.join(cells)}." for value, cells in notes.items() if 0 < len(cells) < 7)
    return Finding(holds, figures, "" if holds else note)


def ahead(results: pd.DataFrame, data: str, setting: int, one: tuple[str, str], other: tuple[str, str]) -> Lead:
    """How far a method for a centre is ahead of another in a cell, over the seeds that both have."""
    first, second = (scores(results, method, data, setting, center) for method, center in (one, other))
    return lead(first[: len(second)], second)


def by_validation(results: pd.DataFrame, method: str, data: str, setting: int, center: str) -> Lead:
    """Bi-level's lead over a method."""
    return ahead(results, data, setting, ("Bi-level", center), (method, center))


def at_equal_points(results: pd.DataFrame, method: str, data: str, setting: int, center: str) -> Lead:
    """Bi-level's lead after the largest number of data points that both reach, seed by seed."""
    runs = [run_of(results, name, data, setting, center) for name in ("Bi-level", method)]
    ours, others = (curves(own, f"{center}_accuracy", POINTS) for own in runs)
    ends = [min(one.index[-1], two.index[-1]) for one, two in zip(ours, others, strict=True)]
    at = lambda runs: [np.interp(end, run.index, run) for end, run in zip(ends, runs, strict=True)]
    return lead(at(ours), at(others))


def best(results: pd.DataFrame, center: str, most: bool = False, by: Callable[..., Lead] = by_validation) -> Finding:
    """Bi-level is ahead of every other method, in all cells or in most."""
    found = {named(*cell): {m: by(results, m, *cell, center) for m in METHODS[1:]} for cell in cells(results)}
    return over_cells(found, most)


def similar_trusted(results: pd.DataFrame) -> Finding:
    """In every configuration of Bi-level the similar nodes' share of the weight rises by more than the margin."""
    own = select(results, method="Bi-level").groupby(["run", "seed"])["similar_weight"]
    start, end = own.first(), own.last()
    figures: Figures = {
        "similar nodes' share at the end: lowest, mean": [float(end.min()), float(end.mean())],
        "its least rise": float((end - start).min()),
    }
    rises = [lead(own.to_numpy(), start[run].to_numpy()).holds for run, own in end.groupby("run")]
    return Finding(together(rises), figures)


# Pictures.


def _panels(results: pd.DataFrame, words: str) -> tuple[Figure, list[tuple[Axes, str, int, str]]]:
    """A row for each data set and centre, a column for each setting; with one setting, a column for each centre."""
    settings = sorted(results["setting"].unique())
    panels = [(d, s, c) for d in dict.fromkeys(results["data"]) for c in KINDS for s in settings]
    columns = max(len(settings), len(KINDS))
    rows = len(panels) // columns
    width = 2.9 if columns > 2 else 4.0
    fig, axes = report.figure(rows, columns, width=width * columns + 1, height=0.75 * width * rows + 0.6)
    for i, (ax, (data, setting, center)) in enumerate(zip(axes.flat, panels, strict=True)):
        title = f"{IMAGES.get(data, data)}, {center}, setting {setting}"
        report.label(ax, x=words if i >= len(panels) - columns else "", title=title)
    return fig, [(ax, *panel) for ax, panel in zip(axes.flat, panels, strict=True)]


def accuracies_picture(results: pd.DataFrame, across: str = "exchanges", near: float | None = None) -> Figure:
    """Fig. 1 and 7, over synchronisations; or Fig. 8 and 9, over data points, from the first evaluation on.

    Of Local-train, which makes no exchanges, a line at its last. `near` enlarges the best: the height below them.
    """
    points = across == POINTS
    fig, panels = _panels(results, "data points of a node" if points else "synchronisations")
    for ax, data, setting, center in panels:
        ends = []
        for method in METHODS:
            own = run_of(results, method, data, setting, center)
            last = own.groupby("seed")[f"{center}_accuracy"].last().to_numpy()
            ends.append(mean(last))
            if method == "Local-train" and not points:
                look = {"color": report.style(method)["color"], "linestyle": ":", "label": method}
                spread(ax, [0, select(results, data=data)["exchanges"].max()], [last, last], **look)
            else:
                shown = own[own["round"] > 0] if points else own
                report.band(ax, shown, across, f"{center}_accuracy", method, marker="")
        low, high = (min(ends) - 0.04, 0.03) if near is None else (max(ends) - near, near / 4)
        ax.set(ylim=(low, max(ends) + high), xscale="log" if points else "linear")
    below(fig, fig.axes[0], 5)
    return fig


def weights_picture(results: pd.DataFrame) -> Figure:
    """Fig. 2 and 4 to 6: each node's weight, the mean over the seeds."""
    fig, panels = _panels(results, "outer iterations")
    for ax, data, setting, center in panels:
        own = run_of(results, "Bi-level", data, setting, center).groupby("round")
        for k in range(15):
            similar = (k < 5) == (center == "minority")
            words = "similar nodes" if similar else "dissimilar nodes"
            colour = report.BLUE if similar else report.VERMILION
            ax.plot(own[f"weight_{k}"].mean(), color=colour, label=words if k in (0, 14) else None)
    below(fig, fig.axes[0], 2)
    return fig
