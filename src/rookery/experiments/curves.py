"""How an experiment's results are read and drawn: the curves of a run, their ends, when they reach a level."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from rookery import report

SPLITS = {"i.i.d.": "iid", "non-i.i.d.": "shards"}
Figures = dict[str, float | list[float]]


def select(results: pd.DataFrame, **labels: Any) -> pd.DataFrame:
    """The rows with these labels."""
    for name, value in labels.items():
        results = results[results[name] == value]
    return results


def curves(results: pd.DataFrame, metric: str = "accuracy", across: str = "round", **labels: Any) -> list[pd.Series]:
    """The metric across rounds or exchanges, one series for each seed, of the one run with these labels."""
    own = select(results[list(dict.fromkeys(["run", "seed", across, metric, *labels]))], **labels)
    assert own["run"].nunique() == 1, f"{labels} is not one run"
    seeds, places, values = (own[name].to_numpy() for name in ("seed", across, metric))
    return [pd.Series(values[seeds == s], pd.Index(places[seeds == s], name=across), name=metric)
            for s in np.unique(seeds)]  # fmt: skip


def ends(results: pd.DataFrame, metric: str = "accuracy", **labels: Any) -> np.ndarray:
    """The mean over the last tenth of the rounds, for each seed; 0 where the run has left the finite numbers."""
    own = curves(results, metric, **labels)
    return np.nan_to_num(np.array([float(c[c.index > 0.9 * c.index[-1]].mean()) for c in own]), nan=0.0)


def late(results: pd.DataFrame, metric: str = "accuracy", **labels: Any) -> np.ndarray:
    """The mean over the second half of the rounds, the floor of a run that has settled, for each seed."""
    own = curves(results, metric, **labels)
    return np.array([float(c[c.index > c.index[-1] / 2].mean()) for c in own])


def moves(results: pd.DataFrame, metric: str = "accuracy", **labels: Any) -> np.ndarray:
    """The mean change from evaluation to evaluation in the second half of the rounds, for each seed."""
    own = curves(results, metric, **labels)
    return np.array([float(c[c.index >= c.index[-1] / 2].diff().abs().mean()) for c in own])


def area(curve: pd.Series) -> float:
    """The mean over the rounds by the trapezoidal rule, so that evaluations need not be evenly spaced."""
    places = curve.index.to_numpy(float)
    return float(np.trapezoid(curve.to_numpy(), places) / (places[-1] - places[0]))


def best(results: pd.DataFrame, metric: str = "accuracy", **labels: Any) -> np.ndarray:
    """The highest value of the run, for each seed."""
    return np.array([float(c.max()) for c in curves(results, metric, **labels)])


def mean(values: Sequence[float] | np.ndarray) -> float:
    """As a plain number."""
    return float(np.mean(values))


def reached(curve: pd.Series, level: float) -> float:
    """The first place of the curve at that level or above; infinity if there is none."""
    above = curve.index[curve >= level]
    return float(above[0]) if len(above) else np.inf


def draw(
    ax: Axes, results: pd.DataFrame, across: str, metric: str, lines: Mapping[str, Mapping[str, Any]], **looks: Any
) -> None:
    """A band for each entry of lines: its name, and the labels of its run ("look" changes its style)."""
    for name, labels in lines.items():
        own = select(results, **{label: value for label, value in labels.items() if label != "look"})
        report.band(ax, own, across, metric, label=name, **{**looks, **labels.get("look", {})})


def zoom(ax: Axes, results: pd.DataFrame, metric: str = "accuracy") -> None:
    """From a little below the worst end to a little above the best, but for runs that have failed."""
    last = results[results["round"] == results["round"].max()].groupby("run")[metric].min()
    good = last[last > 0.5 * last.max()]
    ax.set_ylim(max(0.0, float(good.min()) - 0.12), min(1.0, float(results[metric].max()) + 0.02))


def legend(ax: Axes, columns: int, **options: Any) -> None:
    """Below the panel, where it hides no line."""
    below = {"loc": "upper center", "bbox_to_anchor": (0.5, -0.16), "ncols": columns, "handlelength": 3.6}
    report.legend(ax, **below, **options)


def below(fig: Figure, ax: Axes, columns: int) -> None:
    """One legend for all panels, that of this one, below them."""
    fig.legend(*ax.get_legend_handles_labels(), loc="outside lower center", ncols=columns, frameon=False)


def ticks(ax: Axes, values: Sequence[float]) -> None:
    """The values themselves along a logarithmic x axis."""
    ax.set_xticks(values, [f"{value:g}" for value in values])
    ax.minorticks_off()
