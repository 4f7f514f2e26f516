"""Means, slopes, lists and tables of numbers."""

import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from scipy.special import stdtrit

SPLITS = {"i.i.d.": "iid", "non-i.i.d.": "shards"}
Figures = dict[str, Any]
Numbers = Sequence[float] | np.ndarray


def mean(values: Numbers) -> float:
    """The mean as a plain number."""
    return float(np.mean(values))


def means(groups: Mapping[Any, Numbers]) -> list[float]:
    """The mean of each group."""
    return [mean(values) for values in groups.values()]


def two_errors(values: Numbers) -> float:
    """Two standard errors of the mean; 0 for one value."""
    return 2 * float(np.std(values, ddof=1)) / math.sqrt(len(values)) if len(values) > 1 else 0.0


def listed(values: Iterable[Any], form: str = "g") -> str:
    """Numbers or names, with commas between them.

    >>> listed([1, 0.5, "auto"])
    '1, 0.5, auto'
    """
    return ", ".join(value if isinstance(value, str) else f"{value:{form}}" for value in values)


def chosen_words(chosen: Mapping[Any, Any]) -> str:
    """The values that a search chose, by method and setting.

    >>> chosen_words({("FedNest", "i.i.d."): 0.1, "FedBiO": (10.0, 0.1)})
    'FedNest, i.i.d.: 0.1; FedBiO: 10, 0.1'
    """
    several = lambda value: listed(value if isinstance(value, tuple) else (value,))
    return "; ".join(f"{several(key)}: {several(value)}" for key, value in chosen.items())


def keyed(path: Path, keys: int) -> dict[tuple[Any, ...], tuple[float, ...]]:
    """The numbers in the rows of a CSV file, by its first columns, as many as `keys`."""
    rows = pd.read_csv(path, engine="python").itertuples(index=False, name=None)  # it reads floats exactly
    return {row[:keys]: row[keys:] for row in rows}


def power(x: Numbers, y: Numbers) -> float:
    """The exponent a of y ∝ xᵃ by least squares of the logarithms."""
    return float(np.polyfit(np.log(x), np.log(y), 1)[0])


def fitted_power(x: Numbers, y: Numbers) -> tuple[float, float]:
    """The exponent a of y ∝ xᵃ and half its 95 % interval; (nan, inf) below three points or if a y is not finite."""
    if len(x) < 3 or not np.isfinite(y).all():
        return np.nan, np.inf
    x, y = np.log(x), np.log(y)
    fit = np.polyfit(x, y, 1)
    residuals = y - np.polyval(fit, x)
    error = math.sqrt(np.sum(residuals**2) / (len(x) - 2) / np.sum((x - x.mean()) ** 2))
    return float(fit[0]), float(stdtrit(len(x) - 2, 0.975)) * error
