"""Check arguments that are numbers; each check raises a ValueError that names the argument and what it must be."""

import math
from typing import Any

import numpy as np


def is_number(value: Any) -> bool:
    """Return whether the value is a finite real number."""
    real = isinstance(value, int | float | np.integer | np.floating) and not isinstance(value, bool)
    return real and math.isfinite(value)


def is_integer(value: Any) -> bool:
    """Return whether the value is an integer; True and False are not."""
    return isinstance(value, int | np.integer) and not isinstance(value, bool)


def check_counts(least: int = 1, /, **given: Any) -> None:
    """Raise ValueError unless each value is an integer of at least `least`."""
    for name, value in given.items():
        if not is_integer(value) or value < least:
            raise ValueError(f"{name} must be an integer of at least {least}; got {value!r}.")


def check_amounts(**given: Any) -> None:
    """Raise ValueError unless each value is a number of at least 0."""
    for name, value in given.items():
        if not is_number(value) or value < 0:
            raise ValueError(f"{name} must be a number of at least 0; got {value!r}.")


def check_positive(**given: Any) -> None:
    """Raise ValueError unless each value is a positive number."""
    for name, value in given.items():
        if not is_number(value) or value <= 0:
            raise ValueError(f"{name} must be a positive number; got {value!r}.")


def check_seed(seed: Any) -> None:
    """Raise ValueError unless the seed is an unsigned integer of 64 bits."""
    if not is_integer(seed) or not 0 <= seed < 2**64:
        raise ValueError(f"seed must be an integer from 0 to 2**64 - 1; got {seed!r}.")
