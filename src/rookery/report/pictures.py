"""Figures of runs and of clients."""

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from rookery.base.drawing import BLUE, COLOURS, FILLS, GREY, band, figure, label, legend, scale, styles
from rookery.data.clients import Clients
from rookery.language.metrics import direction
from rookery.run.result import SUMS

ACROSS = {
    "rounds": "rounds",
    "exchanges": "exchanges (each: every client sends once)",
    "bytes": "megabytes sent, both ways",
    "samples": "samples used",
    "gradients": "gradients computed, all clients together",
    "products": "Hessian- and Jacobian-vector products, all clients together",
    "seconds": "seconds",
    "clock": "simulated seconds",
    "epsilon": "ε",
}


def across(history: pd.DataFrame) -> pd.DataFrame:
    """Return the history with a column for each measure in ACROSS that it records."""
    sums = {"rounds": ("round",), **SUMS}
    columns: dict[str, Any] = {
        name: sum(history[part] for part in parts) for name, parts in sums.items() if {*parts} <= {*history}
    }
    if "bytes" in columns:
        columns["bytes"] = columns["bytes"] / 1e6
    return history.assign(**columns)


def cost(*histories: pd.DataFrame) -> str:
    """Return what runs are best compared by, among the measures in ACROSS: the clock if all have one, or exchanges."""
    return "clock" if all("clock" in history for history in histories) else "exchanges"


def picture(history: pd.DataFrame, metric: str, title: str) -> Figure:
    """Draw the metric of one run, given with or without its sign, over rounds and over exchanges or its clock."""
    fig, axes = figure(1, 2, width=9.2, height=3.6)
    history, shown = across(history), direction(metric, otherwise=False)
    for ax, by in zip(axes[0], ("rounds", cost(history)), strict=True):
        band(ax, history, by, shown.name, label=title, errors=None, color=BLUE, linestyle="-", marker="o")
        scale(ax, shown.higher_is_better, history[shown.name].tolist())
        label(ax, x=ACROSS[by], y=shown.name.replace("_", " ") if by == "rounds" else "")
    fig.suptitle(title, fontsize=12, fontweight="bold")
    return fig


def weights_picture(history: pd.DataFrame, groups: Sequence[str], title: str = "") -> Figure:
    """Draw the clients' weights (the columns `weight_0`, `weight_1`, …) over rounds, in one colour per group."""
    fig, axes = figure(1, 1, width=6.4, height=4.0)
    ax = axes[0, 0]
    colours = dict(zip(dict.fromkeys(groups), itertools.cycle(COLOURS), strict=False))
    for k, group in enumerate(groups):
        first = groups.index(group) == k
        words = f"{group} ({list(groups).count(group)} clients)" if first else None
        ax.plot(history["round"], history[f"weight_{k}"], color=colours[group], alpha=0.7, linewidth=1.3, label=words)
    ax.axhline(1 / len(groups), color=GREY, linewidth=0.8, linestyle=":")
    label(ax, x="rounds", y="weight", title=title)
    legend(ax)
    return fig


def clients_picture(clients: Clients, title: str = "") -> Figure:
    """Draw each client's samples by level, and the shares of its labels if samples have any.

    Up to 40 clients are named; more are sorted by size.
    """
    counts = {name: own.astype(float) for name, own in clients.label_counts().items()}
    levels = {"": clients.lower_sizes}
    if not clients.one_data_set:
        levels = {"lower level": clients.lower_sizes, "upper level": clients.upper_sizes}
    named = clients.n <= 40
    total = np.sum(list(levels.values()), axis=0)
    order = np.arange(clients.n)[::-1] if named else np.argsort(total, kind="stable")
    height = min(9.0, 1.5 + 0.25 * clients.n) if named else 5.0
    fig, axes = figure(1, 1 + bool(counts), width=9.2 if counts else 5.6, height=max(2.4, height))
    shades = dict(zip(levels, (GREY, "#c4c4c4"), strict=False))
    _stacked(axes[0, 0], {name: own[order] for name, own in levels.items()}, shades)
    label(axes[0, 0], x="samples", y="" if named else "clients, by size")
    if counts:
        shares = {name: own[order] / total[order] for name, own in _most_frequent(counts).items()}
        colours = dict(zip(shares, FILLS, strict=False)) | {"others": "#dddddd"}
        _stacked(axes[0, 1], shares, colours)
        label(axes[0, 1], x="share of the client's samples")
        axes[0, 1].set_xlim(0, 1)
    for place, ax in enumerate(axes[0]):
        ticks = [clients.names[i] for i in order] if named and place == 0 else []
        ax.set_yticks(range(len(ticks)), ticks)
        ax.set_ylim(-0.6, clients.n - 0.4)
        ax.grid(visible=False)
    if title:
        fig.suptitle(title, fontsize=12, fontweight="bold", x=0.01, ha="left")
    return fig


def _stacked(ax: Axes, parts: dict[str, np.ndarray], colours: dict[str, str]) -> None:
    """Draw a stacked horizontal bar for each client."""
    begin: Any = 0.0
    for name, own in parts.items():
        ax.barh(
            np.arange(len(own)),
            own,
            left=begin,
            height=0.8 if len(own) <= 40 else 1.0,
            color=colours[name],
            label=name or None,
        )
        begin = begin + own
    if any(parts):
        legend(ax, loc="lower left", bbox_to_anchor=(-0.01, 1), ncols=6, handlelength=1, columnspacing=1.2, borderpad=0)


def _most_frequent(counts: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Return as many classes as there are distinct colours, and the rest as "others"."""
    if len(counts) <= len(FILLS):
        return counts
    first = sorted(counts, key=lambda name: -counts[name].sum())[: len(FILLS)]
    others = np.sum([own for name, own in counts.items() if name not in first], axis=0)
    return {name: own for name, own in counts.items() if name in first} | {"others": others}


def compared(panels: Sequence[tuple[str, pd.DataFrame, str]], by: str) -> Figure:
    """Draw a panel for each (title, runs, metric), and in it a line for each `label`, over a measure of ACROSS."""
    columns = min(len(panels), 3)
    rows = -(-len(panels) // columns)
    fig, axes = figure(rows, columns, width=6.4 if columns == 1 else 4.8 * columns, height=4.2 * rows)
    looks = styles(list(dict.fromkeys(name for _, runs, _ in panels for name in runs["label"])))
    for ax in axes.flat[len(panels) :]:
        ax.set_visible(False)
    for ax, (title, runs, metric) in zip(axes.flat, panels, strict=False):
        shown = direction(metric, otherwise=False)
        for name, own in runs.groupby("label", sort=False):
            band(ax, own, by, shown.name, label=str(name), errors=None, **looks[str(name)])
        scale(ax, shown.higher_is_better, runs[shown.name].tolist())
        label(ax, x=ACROSS[by], y=shown.name.replace("_", " "), title=title)
        legend(ax)
    return fig
