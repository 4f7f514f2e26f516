"""Checks of arguments that are numbers: each raises a ValueError that names the argument and says what it may be."""

import math
from typing import Any

import numpy as np


def is_number(value: Any) -> bool:
    """Whether the value is a real number, and finite."""
    real = isinstance(value, int | float | np.integer | np.floating) and not isinstance(value, bool)
    return real and math.isfinite(value)


def check_counts(least: int = 1, /, **given: Any) -> None:
    """Each is an integer, at least `least`."""
    for name, value in given.items():
        if not isinstance(value, int | np.integer) or isinstance(value, bool) or value < least:
            raise ValueError(f"{name}={value!r} is not an integer, at least {least}.")


def check_amounts(**given: Any) -> None:
    """Each is a number, at least 0."""
    for name, value in given.items():
        if not is_number(value) or value < 0:
            raise ValueError(f"{name}={value!r} is not a number, at least 0.")


def check_positive(**given: Any) -> None:
    """Each is a positive number."""
    for name, value in given.items():
        if not is_number(value) or value <= 0:
            raise ValueError(f"{name}={value!r} is not a positive number.")


def check_seed(seed: Any) -> None:
    """It is an integer of 64 bits."""
    if not isinstance(seed, int | np.integer) or isinstance(seed, bool) or not 0 <= seed < 2**64:
        raise ValueError(f"seed={seed!r} is not an integer from 0 to 2**64 - 1.")
