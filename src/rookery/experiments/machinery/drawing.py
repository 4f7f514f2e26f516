"""Draw an experiment's results: bands of curves, legends, ticks."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from rookery import report
from rookery.experiments.machinery.curves import select
from rookery.experiments.machinery.numbers import Numbers, mean


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
    width = np.array([2 * np.std(own, ddof=1) / np.sqrt(len(own)) if len(own) > 1 else 0 for own in groups])
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


def ticks(ax: Axes, values: Sequence[float]) -> None:
    """Mark the values themselves along a logarithmic x axis."""
    ax.set_xticks(values, [f"{value:g}" for value in values])
    ax.minorticks_off()
