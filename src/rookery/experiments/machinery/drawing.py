"""Draw an experiment's results: bands of curves, legends, ticks."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from rookery import report
from rookery.experiments.machinery.curves import select
from rookery.experiments.machinery.numbers import Numbers, mean, two_errors


def draw(
    ax: Axes, results: pd.DataFrame, across: str, metric: str, lines: Mapping[str, Mapping[str, Any]], **looks: Any
) -> None:
    """Draw a band for each entry of lines: its name, and the labels of its run ("look" changes its style)."""
    for name, labels in lines.items():
        own = select(results, **{label: value for label, value in labels.items() if label != "look"})
        report.band(ax, own, across, metric, label=name, **{**looks, **labels.get("look", {})})


def by_method(methods: Iterable[str]) -> dict[str, dict[str, Any]]:
    """Lines for `draw`, one for each method."""
    return {method: {"method": method} for method in methods}


def spread(ax: Axes, x: Numbers, groups: Sequence[Numbers], **look: Any) -> None:
    """Draw the mean of each group as a line, and two standard errors on each side as a band."""
    middle = np.array([mean(own) for own in groups])
    width = np.array([two_errors(own) for own in groups])
    ax.plot(x, middle, **look)
    ax.fill_between(x, middle - width, middle + width, color=look["color"], alpha=0.15, linewidth=0)


def zoom(ax: Axes, results: pd.DataFrame, metric: str = "accuracy") -> None:
    """Show from a little below the worst end to a little above the best value, leaving out runs that have failed."""
    last = results[results["round"] == results["round"].max()].groupby("run")[metric].min()
    good = last[last > 0.5 * last.max()]
    ax.set_ylim(max(0.0, float(good.min()) - 0.12), min(1.0, float(results[metric].max()) + 0.02))


def legend(ax: Axes, columns: int, **options: Any) -> None:
    """Put the legend below the panel, where it hides no line."""
    below = {"loc": "upper center", "bbox_to_anchor": (0.5, -0.16), "ncols": columns, "handlelength": 3.6}
    report.legend(ax, **below, **options)


def below(fig: Figure, ax: Axes, columns: int) -> None:
    """Put one legend for all panels, that of this one, below them."""
    fig.legend(*ax.get_legend_handles_labels(), loc="outside lower center", ncols=columns, frameon=False)


def name_lines(ax: Axes) -> None:
    """Write the name of each line to the right of the panel, at the height of its end, with room between two names."""
    heights = ax.transData + ax.transAxes.inverted()
    named = [line for line in ax.lines if not str(line.get_label()).startswith("_")]
    points = {line: np.asarray(line.get_xydata()) for line in named}
    ends = [(float(heights.transform(own[-1])[1]), line) for line, own in points.items() if len(own)]
    ends.sort(key=lambda end: end[0])
    room, places = 0.055, [min(max(height, 0.0), 1.0) for height, _ in ends]
    for i in range(1, len(places)):
        places[i] = max(places[i], places[i - 1] + room)
    for i in reversed(range(len(places))):  # none above the panel
        places[i] = min(places[i], 1.0 - room * (len(places) - 1 - i))
    for place, (_, line) in zip(places, ends, strict=True):
        words: dict[str, Any] = {"color": line.get_color(), "fontsize": 8, "va": "center", "annotation_clip": False}
        ax.annotate(str(line.get_label()), (1.01, place), xycoords="axes fraction", **words)


def ticks(ax: Axes, values: Sequence[float]) -> None:
    """Mark the values themselves along a logarithmic x axis."""
    ax.set_xticks(values, [f"{value:g}" for value in values])
    ax.minorticks_off()
