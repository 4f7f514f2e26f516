"""Checks of arguments. Errors name the argument and what it must be."""

import dataclasses
import difflib
import functools
import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np


def nearest(name: Any, known: Iterable[str]) -> str | None:
    """Return the known name closest to a misspelt one, or None."""
    return next(iter(difflib.get_close_matches(str(name), sorted(known), 1)), None)


def naming_fields(cls: type) -> None:
    """Make a dataclass suggest the nearest field when it receives an unknown one."""
    init: Any = cls.__init__  # type: ignore[misc]
    known = [field.name for field in dataclasses.fields(cls) if field.init]

    @functools.wraps(init)
    def checked(self: Any, *args: Any, **values: Any) -> None:
        for name in values:
            if name not in known:
                steps = [field for field in known if field.endswith("step")] if name in _STEPS else []
                near = " or ".join(steps) or nearest(name, known)
                meant = f"Did you mean {near}?" if near else f"It has: {', '.join(known)}."
                raise TypeError(f"{cls.__name__} has no hyperparameter {name!r}. {meant}")
        init(self, *args, **values)

    cls.__init__ = checked  # type: ignore[misc]


_STEPS = ("lr", "learning_rate", "step_size", "stepsize", "eta", "alpha", "step")  # other names of a step size


def kind_of(value: Any) -> str:
    """Return the name of the value's type with its article: "a list", "an int"."""
    name = type(value).__name__
    return f"{'an' if name[0] in 'aeiouAEIOU' else 'a'} {name}"


def is_number(value: Any) -> bool:
    """Return whether the value is a finite real number."""
    real = isinstance(value, int | float | np.integer | np.floating) and not isinstance(value, bool)
    try:
        return real and math.isfinite(value)
    except OverflowError:  # an integer too large for a float
        return False


def is_integer(value: Any) -> bool:
    """Return whether the value is an integer; True and False are not."""
    return isinstance(value, int | np.integer) and not isinstance(value, bool)


def check_counts(least: int = 1, /, **values: Any) -> None:
    """Raise ValueError unless each value is an integer of at least `least`."""
    _require(values, lambda value: is_integer(value) and value >= least, f"an integer of at least {least}")


def check_amounts(**values: Any) -> None:
    """Raise ValueError unless each value is a number of at least 0."""
    _require(values, lambda value: is_number(value) and value >= 0, "a number of at least 0")


def check_positive(**values: Any) -> None:
    """Raise ValueError unless each value is a positive number."""
    _require(values, lambda value: is_number(value) and value > 0, "a positive number")


def check_seed(seed: Any, name: str = "seed") -> None:
    """Raise ValueError unless the seed is an unsigned 64-bit integer."""
    _require({name: seed}, lambda seed: is_integer(seed) and 0 <= seed < 2**64, "an integer from 0 to 2**64 - 1")


def _require(values: Mapping[str, Any], holds: Callable[[Any], bool], rule: str) -> None:
    for name, value in values.items():
        if not holds(value):
            raise ValueError(f"{name} must be {rule}; got {value!r}.")
