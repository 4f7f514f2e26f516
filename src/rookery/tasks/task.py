"""The record that every task returns."""

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

from rookery.data.clients import Clients
from rookery.language.fed import Algorithm
from rookery.problems.problems import Problem

V = TypeVar("V")


@dataclass(frozen=True)
class Task:
    """A problem, its data and what else a run needs.

    Attributes:
        name: what it is called on the command line.
        problem, clients, init: what `solve` takes.
        evaluate, evaluate_client: the metrics, likewise; at least one of the two.
        metric: the one to look at first, with a sign where its name does not say which way is better; see
            `rookery.language.metrics.direction`.
        rounds, cohort, every: defaults for a run.
        defaults: hyperparameters that work, by word; an algorithm takes those it has. Under an algorithm's name, a dict
            of words that are its own.
        single_level: the same data for single-level methods (FedAvg): all variables trained at once; None if there is
            no such reading.
        groups: of each client, a word for those it belongs to, where the task knows: to show learnt weights by.
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

    def algorithm(self, cls: type, **given: Any) -> Algorithm:
        """An algorithm with this task's defaults for it, but for what is given."""
        fields = {f.name for f in dataclasses.fields(cls)}
        words = self.defaults | self.defaults.get(cls.__name__, {})
        return cls(**({name: value for name, value in words.items() if name in fields} | given))


def choice(name: str, value: Any, known: Mapping[str, V]) -> V:
    """What a setting's word stands for; ValueError, with the words there are, if it is not one of them."""
    if value not in known:
        raise ValueError(f"{name}={value!r} is not known; there are: {', '.join(known)}.")
    return known[value]
