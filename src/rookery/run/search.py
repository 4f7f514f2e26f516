"""The candidates of a search: ranges of hyperparameters, and the points to try in them."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import fields
from itertools import product
from typing import Any

import numpy as np

from rookery.base.arguments import is_number
from rookery.language import hyperparameters
from rookery.language.fed import Algorithm

Range = tuple[float, float]
Search = dict[str, Range | list[Any]]  # a range of real numbers, or the values to try
_REACH = 10.0  # the factor of a default range, below and above the algorithm's value
_LEVELS, _PRIMES = (3, 5, 7, 9, 11, 13), (3, 5, 7, 11, 13)  # values per step size; odd numbers include the middle
_INTEGERS = 5  # values per range of integers, each of which is compiled


def step_sizes(algorithm: Algorithm) -> list[str]:
    """Return the names of an algorithm's step sizes, without those that are "auto" or replaced by an optimizer.

    >>> import rookery as rk
    >>> step_sizes(rk.FedNest()), step_sizes(rk.FedNest(hessian_step=0.1)), step_sizes(rk.FedAvg())
    (['upper_step', 'lower_step'], ['upper_step', 'lower_step', 'hessian_step'], ['step'])
    """
    unused = hyperparameters.unused(algorithm)
    steps = [name for name in _settable(algorithm) if hyperparameters.is_step(algorithm, name) and name not in unused]
    return [name for name in steps if not isinstance(getattr(algorithm, name), str)]


def _settable(algorithm: Algorithm) -> list[str]:
    return [field.name for field in fields(algorithm) if field.init]  # type: ignore[arg-type]


def is_real(algorithm: Algorithm, name: str) -> bool:
    """Return whether the hyperparameter may be a real number, which is traced, rather than a count or a word."""
    return any(hyperparameters.is_real(algorithm, name, value) for value in (getattr(algorithm, name), 1))


def ranges(algorithm: Algorithm, search: Mapping[str, Range | list[Any] | None] | Sequence[str] | None) -> Search:
    """Return what to search, with default ranges filled in; raise ValueError if it cannot be searched."""
    if search is None:
        search = step_sizes(algorithm)
        if not search:
            raise ValueError(
                f"search must name what to search, with its range: {type(algorithm).__name__} has no step sizes. It "
                f"has: {', '.join(_settable(algorithm))}."
            )
    if isinstance(search, str) or not isinstance(search, Mapping | Sequence) or not search:
        raise ValueError(f"search must be names of step sizes, or a dict {{name: (low, high)}}; got {search!r}.")
    wanted = dict(search) if isinstance(search, Mapping) else dict.fromkeys(search)
    return {name: _range(algorithm, name, bounds) for name, bounds in wanted.items()}


def _range(algorithm: Algorithm, name: str, bounds: Any) -> Range | list[Any]:
    owner, known = type(algorithm).__name__, _settable(algorithm)
    if name not in known:
        raise ValueError(f"{owner} has no hyperparameter {name!r}; it has: {', '.join(known)}.")
    value, unused = getattr(algorithm, name), hyperparameters.unused(algorithm)
    if name in unused:
        raise ValueError(f"{owner}: {name} is not used, because {unused[name]} has its own step size. Search others.")
    if isinstance(bounds, list):
        if not bounds or len({repr(entry) for entry in bounds}) < len(bounds):
            raise ValueError(f"The values of {name} must be a list of different values; got {bounds!r}.")
        real = is_real(algorithm, name) and all(map(is_number, bounds))
        return [float(entry) for entry in bounds] if real else bounds
    if bounds is None:
        return _default_range(algorithm, name, value)
    try:
        low, high = (float(bound) for bound in bounds)
    except (TypeError, ValueError):
        raise ValueError(
            f"The range of {name} must be two numbers, (low, high), or a list of values; got {bounds!r}."
        ) from None
    if not 0 < low < math.inf or not high < math.inf:
        raise ValueError(
            f"The range of {name} must be of positive numbers, since it is logarithmic; got {low:g} to {high:g}."
        )
    if low >= high:
        raise ValueError(f"The range of {name} must be (low, high); got {low:g} to {high:g}. Give the lower end first.")
    if is_real(algorithm, name):
        return low, high
    if low != int(low) or high != int(high):
        raise ValueError(f"The range of {name} must be of integers; got {low:g} to {high:g}.")
    return integers(int(low), int(high))


def _default_range(algorithm: Algorithm, name: str, value: Any) -> Range:
    place = f"{type(algorithm).__name__}: {name}"
    if callable(value):
        raise ValueError(f"{place} is a schedule, which cannot be searched; give a number, or search others.")
    if not is_real(algorithm, name):
        raise ValueError(f"{place}={value!r} needs a range of integers, (low, high), or a list of values to search.")
    if not is_number(value) or not 0 < value < math.inf:
        raise ValueError(
            f"{place} must be a positive number to search around; got {value!r}. Give a range, (low, high)."
        )
    return float(value) / _REACH, float(value) * _REACH


def integers(low: int, high: int) -> list[Any]:
    """Return at most five integers from low to high, about evenly spaced in the logarithm.

    >>> integers(1, 20), integers(1, 3)
    ([1, 2, 4, 9, 20], [1, 2, 3])
    """
    count = min(_INTEGERS, high - low + 1)
    values = [round(low * (high / low) ** (k / (count - 1))) for k in range(count)]
    for k in range(1, count):  # small integers would repeat
        values[k] = max(values[k], values[k - 1] + 1)
    for k in reversed(range(count)):
        values[k] = min(values[k], high - (count - 1 - k))
    return values


def three_digits(value: float) -> float:
    """Round to three significant digits."""
    return float(f"{value:.3g}")


def all_candidates(search: Search, algorithm: Algorithm, most: int) -> list[dict[str, Any]]:
    """Return all combinations of the listed values, each with the points of `_grid` for the ranges."""
    listed = {name: values for name, values in search.items() if isinstance(values, list)}
    ranges = {name: ends for name, ends in search.items() if isinstance(ends, tuple)}
    combined = [dict(zip(listed, values, strict=True)) for values in product(*listed.values())]
    grid = _grid(ranges, algorithm, most, len(combined)) if ranges else [{}]
    if len(combined) > most:
        raise ValueError(
            f"candidates must be at least {len(combined)}, the number of combinations of the listed values; got {most}."
        )
    return [{name: (values | point)[name] for name in search} for values in combined for point in grid]


def _grid(ranges: dict[str, Range], algorithm: Algorithm, most: int, times: int) -> list[dict[str, float]]:
    """Return a grid of one or two step sizes; of more, a subset of the grid where any two values of any two meet once.

    The subset is an orthogonal array: a and b run through a grid with p values each, p prime, and the places of the
    others are (a + m·b) mod p, m = 1, 2, …, each shuffled such that the middle stays with the middle.

    Arguments:
        times: how often the grid is tried, each time with other values from the lists.
    """
    count = len(ranges)
    fitting = [n for n in _LEVELS if times * n ** min(count, 2) <= most and (count <= 2 or n in _PRIMES)]
    if not fitting or count > fitting[-1] + 1:
        least = times * next(n for n in _PRIMES if count <= n + 1) ** min(count, 2)
        also = f" and {times} combinations of listed values" if times > 1 else ""
        raise ValueError(
            f"candidates must be at least {least} to search {count} step size{'s' * (count > 1)}{also}; got {most}. "
            "Give more candidates, or search fewer step sizes."
        )
    levels = fitting[-1]
    middle = levels // 2
    rng = np.random.default_rng(0)
    shuffles = [np.insert(rng.permutation(np.delete(np.arange(levels), middle)), 0, middle) for _ in range(count - 2)]
    points = []
    for pair in product(range(levels), repeat=min(count, 2)):
        a, b = pair[0] - middle, pair[-1] - middle
        places = [*pair, *(shuffle[(a + m * b) % levels] for m, shuffle in enumerate(shuffles, 1))]
        shares = {name: k / (levels - 1) for k, name in zip(places, ranges, strict=True)}
        points.append({name: _value(*ranges[name], share, getattr(algorithm, name)) for name, share in shares.items()})
    return points


def _value(low: float, high: float, share: float, default: Any) -> float:
    """Return the value at this share of the logarithmic range, in three digits unless it is the algorithm's value."""
    value = low * (high / low) ** share
    if isinstance(default, int | float) and math.isclose(value, default, rel_tol=1e-9):
        return float(default)
    return three_digits(value)
