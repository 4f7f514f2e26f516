"""Read an experiment's results: curves, their ends, means and slopes."""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd

SPLITS = {"i.i.d.": "iid", "non-i.i.d.": "shards"}
STUDENT = (12.71, 4.30, 3.18, 2.78, 2.57, 2.45, 2.36)  # 97.5 % quantiles of t with 1, 2, … degrees of freedom
Figures = dict[str, Any]
Numbers = Sequence[float] | np.ndarray


def select(results: pd.DataFrame, **labels: Any) -> pd.DataFrame:
    """The rows with these labels."""
    return results[_chosen(results, labels)]


def _chosen(results: pd.DataFrame, labels: Mapping[str, Any]) -> np.ndarray:
    """Which rows have these labels."""
    chosen = np.ones(len(results), bool)
    for name, value in labels.items():
        chosen &= (results[name] == value).to_numpy()
    return chosen


def values(results: pd.DataFrame, label: str, **labels: Any) -> list[Any]:
    """The values of a label, sorted, among the rows with these labels."""
    return sorted(select(results, **labels)[label].unique())


def curves(results: pd.DataFrame, metric: str = "accuracy", across: str = "round", **labels: Any) -> list[pd.Series]:
    """The metric over rounds or exchanges of the one run with these labels, a series for each seed."""
    chosen = _chosen(results, labels)
    assert results["run"][chosen].nunique() == 1, f"{labels} is not one run"
    seeds, places, values = (results[name].to_numpy()[chosen] for name in ("seed", across, metric))
    own = {seed: seeds == seed for seed in np.unique(seeds)}
    return [pd.Series(values[at], pd.Index(places[at], name=across), name=metric) for at in own.values()]


def ends(results: pd.DataFrame, metric: str = "accuracy", **labels: Any) -> np.ndarray:
    """The mean over the last tenth of the rounds, for each seed; 0 where the run has left the finite numbers."""
    runs = curves(results, metric, **labels)
    return np.nan_to_num(np.array([float(c[c.index > 0.9 * c.index[-1]].mean()) for c in runs]), nan=0.0)


def ends_by(
    results: pd.DataFrame, label: str, values: Iterable[Any], metric: str = "accuracy", **labels: Any
) -> dict[Any, np.ndarray]:
    """The `ends` of several runs, by the value of a label."""
    return {value: ends(results, metric, **{label: value}, **labels) for value in values}


def late(results: pd.DataFrame, metric: str = "accuracy", **labels: Any) -> np.ndarray:
    """The mean over the second half of the rounds, for each seed: the floor of a run that has settled."""
    return np.array([float(c[c.index > c.index[-1] / 2].mean()) for c in curves(results, metric, **labels)])


def moves(results: pd.DataFrame, metric: str = "accuracy", **labels: Any) -> np.ndarray:
    """The mean change between evaluations in the second half of the rounds, for each seed."""
    runs = curves(results, metric, **labels)
    return np.array([float(c[c.index >= c.index[-1] / 2].diff().abs().mean()) for c in runs])


def averages(results: pd.DataFrame, metric: str = "accuracy", **labels: Any) -> np.ndarray:
    """The mean over the evaluations, for each seed."""
    return np.array([c.mean() for c in curves(results, metric, **labels)])


def best(results: pd.DataFrame, metric: str = "accuracy", **labels: Any) -> np.ndarray:
    """The highest value of the run, for each seed."""
    return np.array([float(c.max()) for c in curves(results, metric, **labels)])


def last(results: pd.DataFrame, metric: str = "accuracy", **labels: Any) -> np.ndarray:
    """The value after the last round, for each seed."""
    return np.array([float(c.iloc[-1]) for c in curves(results, metric, **labels)])


def area(curve: pd.Series) -> float:
    """The mean over the rounds by the trapezoidal rule; evaluations need not be evenly spaced."""
    places = curve.index.to_numpy(float)
    return float(np.trapezoid(curve.to_numpy(), places) / (places[-1] - places[0]))


def mean(values: Numbers) -> float:
    """The mean as a plain number."""
    return float(np.mean(values))


def means(groups: Mapping[Any, Numbers]) -> list[float]:
    """The mean of each group."""
    return [mean(values) for values in groups.values()]


def reached(curve: pd.Series, level: float) -> float:
    """The first place where the curve is at the level or above; infinity if it never is."""
    above = curve.index[curve >= level]
    return float(above[0]) if len(above) else np.inf


def listed(values: Iterable[Any], form: str = "g") -> str:
    """Numbers or names, with commas between them.

    >>> listed([1, 0.5, "auto"])
    '1, 0.5, auto'
    """
    return ", ".join(value if isinstance(value, str) else f"{value:{form}}" for value in values)


def power(x: Numbers, y: Numbers) -> float:
    """The exponent a of y ∝ xᵃ by least squares of the logarithms."""
    return float(np.polyfit(np.log(x), np.log(y), 1)[0])


def fitted_power(x: Numbers, y: Numbers) -> tuple[float, float]:
    """The exponent a of y ∝ xᵃ and half its 95 % interval; without an answer below three points or beyond the finite
    numbers."""
    if len(x) < 3 or not np.isfinite(y).all():
        return np.nan, np.inf
    x, y = np.log(x), np.log(y)
    fit = np.polyfit(x, y, 1)
    residuals = y - np.polyval(fit, x)
    error = math.sqrt(np.sum(residuals**2) / (len(x) - 2) / np.sum((x - x.mean()) ** 2))
    return float(fit[0]), STUDENT[len(x) - 3] * error
