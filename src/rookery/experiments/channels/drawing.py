"""Pictures of robust means: accuracy against the share of liars, and tables by attack."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from rookery import report
from rookery.experiments.channels import shared
from rookery.experiments.machinery.drawing import spread


def against_share(ax: Axes, results: pd.DataFrame, task: str, method: str, worst: Callable[..., np.ndarray]) -> None:
    """Draw worst(results, task, method, rule, share) against the share of liars, a line for each rule."""
    shares = sorted({share for _, share in shared.cells(results)})
    for name in shared.among(results, "rule", shared.RULES, task=task, method=method):
        each = [worst(results, task, method, name, share) for share in shares]
        spread(ax, np.array(shares), each, label=name, **look(name))
    ax.set_xticks(shares, [f"{100 * share:g} %" for share in shares])
    ax.set_ylim(0, 1)


def look(name: str) -> dict[str, Any]:
    """The style of a rule's line."""
    place = shared.RULES.index(name)
    return {"color": "black" if name == "mean" else f"C{place - 1}", "linestyle": "--" if name == "mean" else "-"}


def table(results: pd.DataFrame, share: float, metric: str = "accuracy") -> Figure:
    """The mean of a metric by rule (down) and attack (across), a panel for each task and method."""
    whole = results if metric in results and results[metric].notna().any() else results.assign(**{metric: np.nan})
    tasks = [t for t in shared.TASKS if metric == "accuracy" or t == "cleaning"]
    order = (*shared.METHODS, shared.EXTRA) if metric == "accuracy" else shared.METHODS[:-1]
    panels = [(t, m) for t in tasks for m in shared.among(whole, "method", order, task=t)]
    columns = min(5, max(sum(t == task for t, _ in panels) for task in tasks))
    rules = shared.among(whole, "rule", shared.RULES)
    fig, axes = report.figure(len(tasks), columns, width=1.4 + 2.3 * columns, height=3.5 * len(tasks))
    for ax in axes.flat:
        ax.set_visible(False)
    for row, task in enumerate(tasks):
        for column, method in enumerate(m for t, m in panels if t == task):
            ax = axes[row, column]
            ax.set_visible(True)
            own = whole[(whole["task"] == task) & (whole["method"] == method)]
            _table(ax, own, rules, share, metric)
            ax.set_yticks(range(len(rules)), rules if column == 0 else [""] * len(rules), fontsize=9)
            ax.set_title(f"{method},\n{shared.TASKS[task]}", fontsize=9)
    return fig


def _table(ax: Axes, own: pd.DataFrame, rules: list[str], share: float, metric: str) -> None:
    cells = [cell for cell in shared.cells(own) if cell in ((shared.NO_LIARS), (cell[0], share))]
    means = own.groupby(["rule", "attack", "share"])[metric].mean()
    value = lambda name, cell: float(means.get((name, *cell), np.nan))
    numbers = np.array([[value(name, cell) for cell in cells] for name in rules])
    ax.imshow(numbers, cmap="viridis", vmin=0, vmax=1, aspect="auto")
    for (i, j), number in np.ndenumerate(numbers):
        words = "–" if np.isnan(number) else f"{number:.2f}".replace("0.", ".")
        ax.text(j, i, words, ha="center", va="center", fontsize=9, color="white" if number < 0.6 else "black")
    ax.set_xticks(range(len(cells)), [cell[0] for cell in cells], rotation=40, ha="right", fontsize=9)
    ax.grid(visible=False)
