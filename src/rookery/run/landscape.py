"""The figure of a search: a curve for one step size, maps of pairs for more."""

import itertools
import math
from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import pandas as pd
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.colors import LogNorm, Normalize
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from rookery.base.drawing import BLUE, GREY, VERMILION, figure, label, scale


def landscape(table: pd.DataFrame, names: Sequence[str], metric: str, higher: bool, start: float, title: str) -> Figure:
    """Draw the candidates in `Tuning.table`: a curve for one step size, maps of pairs for more; good is dark."""
    good, lost = (table[(table["status"] == "diverged") == is_lost] for is_lost in (False, True))
    shades = _Shades(good["last"].to_numpy(float), higher, start)
    pairs, levels = list(itertools.combinations(names, 2)), table[names[0]].nunique()
    panels = max(1, len(pairs))
    cols, width, height = (panels, 4.6, 3.5) if panels <= 3 else (3, 4.2, 3.2) if panels <= 6 else (5, 3.4, 2.7)
    text = 6.0 if panels <= 3 and levels <= 7 else None
    if len(pairs) == 1:
        width, height, text = 1.6 + 0.75 * levels, 1.2 + 0.57 * levels, 8.5
    rows = -(-panels // cols)
    fig, axes = figure(rows, cols, width * cols, height * rows)
    for ax in axes.flat[panels:]:
        ax.set_visible(False)
    if not pairs:
        _curve(axes[0, 0], good, lost, names[0], metric, higher, start)
    for ax, (x, y) in zip(axes.flat, pairs, strict=False):
        _map(ax, table, x, y, shades, text)
    if pairs and len(good):
        words = f"{metric.replace('_', ' ')}, when last seen"
        fig.colorbar(shades.scale(), ax=axes, label=words, shrink=0.9, pad=0.02, extend=shades.extend)
    fig.suptitle(title, fontsize=12, fontweight="bold", x=0.01, ha="left")
    early = good[good["status"] == "stopped"]["rounds"].min()
    notes = {
        "framed: the best" if pairs else "ringed: the best": len(good) > 0,
        f"×: diverged, {len(lost)} of {len(table)}": len(lost) > 0,
        f"r{early}: stopped at round {early}": len(pairs) <= 1 and early > 0,
        "a cell is one candidate, the other step sizes differ from cell to cell": len(pairs) > 1,
    }
    fig.supxlabel(";  ".join(filter(notes.get, notes)), fontsize=9, color=GREY, x=0.01, ha="left")
    return fig


class _Shades:
    """Shades of blue for a metric: the better, the darker. Values worse than the start are as pale as the start."""

    def __init__(self, values: np.ndarray, higher: bool, start: float) -> None:
        self.colours = colormaps["Blues" if higher else "Blues_r"]
        low, high = (float(values.min()), float(values.max())) if len(values) else (0.0, 1.0)
        worst, self.extend = (low, "neither") if higher else (high, "neither")
        if math.isfinite(start) and (start > low if higher else start < high):
            worst, self.extend = start, "min" if higher else "max"
        low, high = (worst, high) if higher else (low, worst)
        if low > high:  # no candidate is better than the start
            low, high = min(values), max(values)
        logarithmic = not higher and low > 0 and high > 30 * low
        self.norm = LogNorm(low, high, clip=True) if logarithmic else Normalize(low, high, clip=True)

    def scale(self) -> ScalarMappable:
        """Return the scale of a colour bar."""
        return ScalarMappable(self.norm, self.colours)

    def colour(self, value: float) -> Any:
        """Return the shade of a value."""
        return self.colours(self.norm(value))

    def ink(self, value: float) -> str:
        """Return a text colour that is legible on the shade of a value."""
        red, green, blue, _ = self.colour(value)
        return "white" if 0.3 * red + 0.59 * green + 0.11 * blue < 0.55 else "#222222"


def _map(ax: Axes, table: pd.DataFrame, x: str, y: str, shades: _Shades, text: float | None) -> None:
    """Draw a cell for each pair of values, with the metric in it if `text` is a font size."""
    places = {name: {value: k for k, value in enumerate(sorted(table[name].unique()))} for name in (x, y)}
    for rank, row in reversed(list(enumerate(table.to_dict("records")))):
        across, up = places[x][row[x]], places[y][row[y]]
        face = "#f2f2f2" if row["status"] == "diverged" else shades.colour(row["last"])
        edge, width = (VERMILION, 2.5) if rank == 0 and row["status"] != "diverged" else ("white", 1.5)
        cell = Rectangle((across - 0.5, up - 0.5), 1, 1, facecolor=face, edgecolor=edge, linewidth=width)
        ax.add_patch(cell)
        if row["status"] == "diverged":
            ax.plot(across, up, "x", color=GREY, markersize=7 if text else 5)
        elif text:
            write = partial(ax.text, color=shades.ink(row["last"]), ha="center", va="center")
            early = text > 8 and row["status"] == "stopped"
            write(across, up + 0.12 * early, f"{row['last']:.3g}", fontsize=text)
            if early:
                write(across, up - 0.22, f"r{row['rounds']}", fontsize=text - 2, alpha=0.8)
    for axis, name, every in ((ax.xaxis, x, 1 if text else 2), (ax.yaxis, y, 1)):  # as many as fit
        axis.set_ticks(list(places[name].values())[::every], [f"{value:.3g}" for value in places[name]][::every])
    ax.set(xlim=(-0.52, len(places[x]) - 0.48), ylim=(-0.52, len(places[y]) - 0.48))
    ax.grid(visible=False)
    ax.spines[:].set_visible(False)
    ax.tick_params(length=0, labelsize=None if text and text > 8 else 8)
    label(ax, x=x, y=y)


def _curve(ax: Axes, good: pd.DataFrame, lost: pd.DataFrame, x: str, metric: str, higher: bool, start: float) -> None:
    line = good.sort_values(x)
    ax.set(xscale="log")
    ax.plot(line[x], line["last"], color=BLUE, linewidth=1.2, marker="o", markersize=5)
    for _, row in good[good["status"] == "stopped"].iterrows():
        ax.annotate(
            f"r{row['rounds']}", (row[x], row["last"]), (0, 6), textcoords="offset points", fontsize=8, color=GREY
        )
    ax.plot(good[x].head(1), good["last"].head(1), "o", markersize=12, markerfacecolor="none", color=VERMILION)
    scale(ax, higher, good["last"].tolist())
    if ax.get_yscale() == "log" and good["last"].min() < start < ax.get_ylim()[1] / 10:
        ax.set_ylim(top=10 * start)  # how far above the start a candidate ends does not matter
    for value in lost[x]:
        ax.plot(value, 0.03, "x", color=GREY, transform=ax.get_xaxis_transform(), clip_on=False)
    label(ax, x=x, y=f"{metric.replace('_', ' ')}, when last seen")
