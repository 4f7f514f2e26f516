"""What is predicted: a label with a positive class, or the time of an event."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from jaxtyping import Bool, Float

from rookery.base.arguments import nearest
from rookery.data.tables import listed, plain

if TYPE_CHECKING:
    import pandas as pd


@dataclass(frozen=True)
class Target:
    """The columns of what is predicted.

    Attributes:
        label: the column with the class; with times, the column that says whether the event was seen.
        positive: the class that counts as positive; None: the last of two.
        time: the column of times, or None.
    """

    label: Any
    positive: Any = None
    time: Any = None

    @property
    def columns(self) -> dict[str, Any]:
        """The columns by the arguments that name them."""
        return {"label": self.label} if self.time is None else {"time": self.time, "event": self.label}

    def times(self, columns: Mapping[Any, "pd.Series"]) -> Float[np.ndarray, " n"] | None:
        """Return the times, if there are any."""
        if self.time is None:
            return None
        column = columns[self.time]
        try:
            times = column.to_numpy(float)
        except (TypeError, ValueError) as error:
            raise ValueError(
                f"time must be a column of numbers, such as days; column {self.time!r} holds {column.iloc[0]!r}. Give "
                "the time from the start of observation."
            ) from error
        wrong = times[~np.isfinite(times) | (times < 0)]
        if len(wrong):
            raise ValueError(
                f"time must be at least 0 and finite; column {self.time!r} has {listed(f'{t:g}' for t in wrong)}. "
                "Correct these rows, or leave them out."
            )
        return times

    def outcomes(self, columns: Mapping[Any, "pd.Series"]) -> tuple[Bool[np.ndarray, " n"], Any]:
        """Return whether each row is positive, or its event was seen; and the value of the column that means this."""
        column = columns[self.label]
        classes = [whole(value) for value in sorted(column.unique(), key=lambda value: (str(type(value)), value))]
        if self.time is None:
            chosen = positive_class(classes, self.label, self.positive)
            return (column == chosen).to_numpy(bool), chosen
        if set(classes) - {0, 1}:
            others = listed(repr(value) for value in classes if value not in (0, 1))
            raise ValueError(
                f"event must be 1 where the event was seen and 0 where observation ended before; column "
                f"{self.label!r} also has {others}. Recode it."
            )
        return (column == 1).to_numpy(bool), 1


def target(label: Any, positive: Any, time: Any, event: Any) -> Target:
    """Return what is predicted; raise ValueError if a label and times are given, or only one of time and event."""
    label, time, event = map(plain, (label, time, event))
    if time is None and event is None:
        return Target(label, positive)
    if label is not None:
        raise ValueError(
            f"label must be left out if time and event are given; got {label!r}. Give either label, or the two."
        )
    if positive is not None:
        raise ValueError(f"positive must be left out if event is given, which is 0 or 1; got {positive!r}.")
    for missing, name in (("time", time), ("event", event)):
        if name is None:
            raise ValueError(
                f"{missing} must be the name of a column; got None. Survival needs both time=… and event=…."
            )
    if time == event:
        raise ValueError(f"event must be another column than time; got {time!r} for both.")
    return Target(event, time=time)


def positive_class(classes: list[Any], label: Any, wanted: Any) -> Any:
    """Return the class that counts as positive: the given one or, of two, the last."""
    if len(classes) < 2:
        raise ValueError(f"label must have two classes; column {label!r} has only {classes[0]!r}.")
    if wanted is not None:
        found = next((value for value in classes if value == wanted or str(value) == str(wanted)), None)
        if found is None:
            near = nearest(wanted, map(str, classes))
            fix = f"Did you mean {near!r}?" if near else f"Its values are {listed(classes)}."
            raise ValueError(f"positive must be a value of column {label!r}; got {wanted!r}. {fix}")
        return found
    if len(classes) > 2:
        raise ValueError(
            f"label must have two classes, or positive must name one of them to tell from the rest; column {label!r} "
            f"has {len(classes)}: {listed(classes)}. Give positive=…."
        )
    return classes[-1]


def whole(value: Any) -> Any:
    """Return a value as Python's own, and a whole float as an integer: a missing value makes floats of a column."""
    value = plain(value)
    return int(value) if isinstance(value, float) and value.is_integer() else value
