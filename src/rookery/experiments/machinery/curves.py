"""Read an experiment's results: the curves of a run, their ends and means."""

from collections.abc import Iterable
from typing import Any

import numpy as np
import pandas as pd


def select(results: pd.DataFrame, **labels: Any) -> pd.DataFrame:
    """The rows with these labels."""
    return results[labelled(results, **labels)]


def labelled(results: pd.DataFrame, **labels: Any) -> np.ndarray:
    """Which rows have these labels."""
    rows = np.ones(len(results), bool)
    for name, value in labels.items():
        rows &= results[name].to_numpy() == value
    return rows


def values(results: pd.DataFrame, label: str, **labels: Any) -> list[Any]:
    """The values of a label, sorted, among the rows with these labels."""
    return sorted(select(results, **labels)[label].unique())


def curves(results: pd.DataFrame, metric: str = "accuracy", across: str = "round", **labels: Any) -> list[pd.Series]:
    """The metric over rounds or exchanges of the one run with these labels, a series for each seed."""
    rows = labelled(results, **labels)
    assert results["run"][rows].nunique() == 1, f"{labels} is not one run"
    seeds, places, values = (results[name].to_numpy()[rows] for name in ("seed", across, metric))
    own = {seed: seeds == seed for seed in np.unique(seeds)}
    return [pd.Series(values[at], pd.Index(places[at], name=across), name=metric) for at in own.values()]


def average(results: pd.DataFrame, metric: str = "accuracy", across: str = "round", **labels: Any) -> pd.Series:
    """The curve of the one run with these labels, averaged over the seeds."""
    return pd.concat(curves(results, metric, across, **labels), axis=1).mean(axis=1)


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


def reached(curve: pd.Series, level: float) -> float:
    """The first place where the curve is at the level or above; infinity if it never is."""
    above = curve.index[curve >= level]
    return float(above[0]) if len(above) else np.inf
