"""Tables 4 and 5 of the paper on weighted nodes: the size of the validation set."""

from pathlib import Path

import pandas as pd
from matplotlib.figure import Figure

from rookery import report
from rookery.experiments.machinery import Claims, Experiment, Finding, Headline, description
from rookery.experiments.machinery.claims import lead
from rookery.experiments.machinery.curves import values
from rookery.experiments.machinery.drawing import below, spread, ticks
from rookery.experiments.machinery.numbers import keyed, listed, means
from rookery.experiments.weighted.nodes import IMAGES, node_run, over_cells, scores
from rookery.tasks.weighted_nodes import KINDS

SIZES = (100, 200, 500, 1000)  # n_valid of Tables 4 and 5
SIZE_SEEDS = (1, 2, 3, 4, 5)  # the paper's is 1
BY_SIZE = keyed(Path(__file__).with_name("tables45.csv"), 2)  # the paper's test accuracy at these sizes


def sizes_picture(results: pd.DataFrame) -> Figure:
    """The test accuracy over the size of the validation set, and the paper's."""
    names = list(dict.fromkeys(results["data"]))
    fig, axes = report.figure(2, len(names), width=3.6 * len(names) + 0.4, height=5.6)
    for column, data in enumerate(names):
        for ax, center in zip(axes[:, column], KINDS, strict=True):
            own, told = _by_size(results, data, center), BY_SIZE.get((data, center), ())
            spread(ax, [*own], [*own.values()], color=report.BLUE, marker="o", label="ours, five seeds")
            if told:
                ax.plot(SIZES, told, "s:", color=report.VERMILION, label="the paper's, one seed")
            ax.set_xscale("log")
            ticks(ax, [*own])
            middle = (max(*told, *means(own)) + min(*told, *means(own))) / 2
            ax.set_ylim(middle - 0.05, middle + 0.05)  # as much in every panel
            x, y = "samples at the centre" * (center == KINDS[-1]), "test accuracy" * (not column)
            report.label(ax, x, y, f"{IMAGES.get(data, data)}, {center}")
    below(fig, axes[0, 0], 2)
    return fig


def _by_size(results: pd.DataFrame, data: str, center: str) -> dict[int, list[float]]:
    """The last models' accuracies at each size, one for each seed."""
    sizes = values(results, "validation", data=data, center=center)
    return {int(size): scores(results, "Bi-level", data, 2, center, last=True, validation=size) for size in sizes}


claim = Claims()


@claim("The largest is best, in most columns.", "Tables 4, 5")
def largest_is_best(results: pd.DataFrame) -> Finding:
    """The largest validation set is ahead of all the others by more than the margin, in most columns."""
    found = {}
    for data in dict.fromkeys(results["data"]):
        for center in KINDS:
            by_size = _by_size(results, data, center)
            *others, largest = by_size
            leads = {f"over {size}": lead(by_size[largest], by_size[size]) for size in others}
            found[f"{IMAGES.get(data, data)} {center}"] = leads
    finding = over_cells(found, most=True)
    note = "" if finding.holds else "The sizes differ by about a point, which five seeds do not tell apart."
    return Finding(finding.holds, finding.figures, note)


sizes = Experiment(
    **description("weighted-tables4-5", globals(), sizes=listed(SIZES)),
    runs=lambda quick: [
        node_run(quick, "Bi-level", data, 2, center, validation=size, seeds=SIZE_SEEDS[:1] if quick else SIZE_SEEDS)
        for data in (("mnist",) if quick else IMAGES)
        for size in ((40, 80) if quick else SIZES)
        for center in KINDS
    ],
    picture=sizes_picture,
    claims=tuple(claim),
    family="weighted",
    headlines=lambda results: [
        Headline(
            f"MNIST, minority, at {size}",
            f"{told:.4f}".replace("0.", "."),
            scores(results, "Bi-level", "mnist", 2, "minority", last=True, validation=size),
        )
        for size, told in zip(SIZES[::3], BY_SIZE["mnist", "minority"][::3], strict=True)
    ],
)
