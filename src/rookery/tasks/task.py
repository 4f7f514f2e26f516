"""The record that every task returns, and the steps that tasks share: checking settings and splitting samples."""

import dataclasses
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np

from rookery.base.arguments import is_number
from rookery.data.clients import Clients
from rookery.language.fed import Algorithm
from rookery.problems.problems import Problem

V = TypeVar("V")


@dataclass(frozen=True)
class Task:
    """A problem, its data, and defaults for a run.

    Attributes:
        name: its name on the command line.
        problem, clients, init: as in `rk.solve`.
        evaluate, evaluate_client: the metrics, as in `rk.solve`; at least one of the two.
        metric: the main metric, with a sign if its name does not say which way is better; see
            `rookery.language.metrics.direction`.
        rounds, cohort, every: defaults for a run.
        defaults: hyperparameters that work, by name; an algorithm takes those that it has. A dict under the name of an
            algorithm holds values for that algorithm only.
        single_level: the same data for single-level methods (FedAvg), which train all variables together; None if the
            task has no such form.
        groups: for each client, the name of its group, by which learnt weights are shown; empty if unknown.
    """

    name: str
    problem: Problem
    clients: Clients
    init: Any
    evaluate: Callable[..., dict[str, Any]]
    metric: str
    rounds: int = 100
    cohort: int | None = None
    every: int = 10
    defaults: dict[str, Any] = field(default_factory=dict)
    single_level: "Task | None" = None
    groups: tuple[str, ...] = ()
    evaluate_client: Callable[..., dict[str, Any]] | None = None

    def algorithm(self, cls: Callable[..., Algorithm], **given: Any) -> Algorithm:
        """Return an algorithm with this task's defaults for it, except for the hyperparameters given.

        `cls` is its class, or a function that returns one, such as `SOBA`.
        """
        fields = inspect.signature(cls).parameters
        defaults = self.defaults | self.defaults.get(cls.__name__, {})
        return cls(**({name: value for name, value in defaults.items() if name in fields} | given))

    def with_single_level(self, **changes: Any) -> "Task":
        """Return the task with a single-level form: itself, with these attributes changed."""
        return dataclasses.replace(self, single_level=dataclasses.replace(self, groups=(), **changes))


def choice(name: str, value: Any, known: Mapping[str, V]) -> V:
    """Return what a setting's word stands for; raise ValueError if the word is unknown."""
    if value not in known:
        raise ValueError(f"{name} must be one of {', '.join(known)}; got {value!r}.")
    return known[value]


def check_word(name: str, value: Any, *known: str) -> None:
    """Raise ValueError unless the value is one of the known words."""
    choice(name, value, dict.fromkeys(known))


def check_share(**given: Any) -> None:
    """Raise ValueError unless each value is a number between 0 and 1."""
    for name, value in given.items():
        if not is_number(value) or not 0 < value < 1:
            raise ValueError(f"{name} must be a number between 0 and 1; got {value!r}.")


def take(rows: Mapping[str, np.ndarray], index: Any) -> dict[str, np.ndarray]:
    """Return the rows with these indices."""
    return {name: values[index] for name, values in rows.items()}


def smallest(parts: Sequence[Any], equal: bool) -> int | None:
    """Return how many samples each client keeps: with `equal`, as many as the smallest client has, else None (all)."""
    return min(map(len, parts)) if equal else None


def split(
    rng: np.random.Generator,
    parts: Sequence[np.ndarray],
    share: float,
    equal: bool = False,
    rounding: Callable[[float], int] = round,
) -> list[tuple[np.ndarray, np.ndarray]]:
    """Shuffle each client's samples and cut them in two: a `share` of them, and the rest; neither is empty."""
    most, halves = smallest(parts, equal), []
    for part in parts:
        mixed = rng.permutation(part)[:most]
        cut = min(max(rounding(share * len(mixed)), 1), len(mixed) - 1)
        halves.append((mixed[:cut], mixed[cut:]))
    return halves


def bilevel_defaults(upper_step: float, lower_step: float) -> dict[str, Any]:
    """Return hyperparameters for bilevel methods, with the lower step for y and for the linear system as well."""
    return {
        "upper_step": upper_step,
        "lower_step": lower_step,
        "lower_local_steps": 10,
        "neumann_terms": 10,
        "hessian_step": lower_step,
        "linear_step": lower_step,
        "local_steps": 5,
        "server_upper_step": upper_step,
        "server_lower_step": lower_step,
        "server_linear_step": lower_step,
        "bounds": ((upper_step / 10, upper_step), (lower_step / 10, lower_step), (lower_step / 10, lower_step)),
    }
