"""The task and the algorithm that a command names, with their settings."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import rookery as rk
from rookery.cli.settings import (
    check_argument,
    known_settings,
    parameters_of,
    parse_optimizer,
    read_settings,
)

if TYPE_CHECKING:
    from rookery.cli.registry import Named
    from rookery.tasks.task import Task


class TaskOptions(NamedTuple):
    """The options of a command that set up a task; `settings` may also hold hyperparameters of the algorithm."""

    settings: Sequence[str] = ()
    clients: int | None = None
    partition: str | None = None
    seed: int = 0

    def arguments(self, task: Named) -> dict[str, Any]:
        """Return the task's arguments that have an option of their own."""
        given = {"clients": self.clients, "partition": self.partition}
        given |= {"seed": self.seed} if "seed" in parameters_of(task) else {}
        given = {name: value for name, value in given.items() if value is not None}
        for name, value in given.items():
            check_argument(task, name, value)
        return given


class Request(NamedTuple):
    """A task and an algorithm as a command names them."""

    named_task: Named
    named_algorithm: Named
    arguments: dict[str, Any]  # of the task
    task: Task
    algorithm: Any
    note: str  # a line for the user, or ""
    server_optimizer: str | None = None

    @property
    def title(self) -> str:
        """The algorithm and the task by name."""
        return f"{self.named_algorithm.name} on {self.named_task.name}"

    @property
    def method(self) -> Any:
        """The algorithm, with the server's optimizer if there is one."""
        if self.server_optimizer is None:
            return self.algorithm
        return rk.with_server_optimizer(self.algorithm, upper=parse_optimizer(self.server_optimizer))

    @property
    def hyperparameters(self) -> dict[str, Any]:
        """The algorithm's hyperparameters, and the server's optimizer if there is one."""
        values = {field.name: getattr(self.algorithm, field.name) for field in dataclasses.fields(self.algorithm)}
        return values | ({} if self.server_optimizer is None else {"server_optimizer": self.server_optimizer})


DEFAULTS = TaskOptions()


def resolve(
    task: str, algorithm: str | None = None, options: TaskOptions = DEFAULTS, server_optimizer: str | None = None
) -> Request:
    """Return the task and the algorithm of these names with their settings; the algorithm has a default."""
    from rookery.cli.registry import find_algorithm, find_task, make_task

    named_task = find_task(task)
    first_arguments, first = None, None
    if algorithm is None:
        first_arguments, first = _default_task(named_task, options)
        algorithm = default_algorithm(first)
    named = find_algorithm(algorithm)
    hyperparameters, arguments = read_settings(options.settings, named_task, named)
    arguments |= options.arguments(named_task)
    local = ""
    has_scope = "scope" in {*parameters_of(named_task)} - {*arguments}
    if getattr(named.algorithm, "scope", "global") == "client" and has_scope:
        arguments["scope"] = "client"
        local = f"{named.name} gives every client a lower level of its own: {named_task.name} has scope=client."
    made = first if first is not None and first_arguments == arguments else make_task(named_task, **arguments)
    fitted, note = fit(made, named.algorithm)
    method = fitted.algorithm(named.target, **named.hyperparameters | hyperparameters)
    return Request(named_task, named, arguments, fitted, method, local or note, server_optimizer)


def _default_task(task: Named, options: TaskOptions) -> tuple[dict[str, Any], Task]:
    """Return the task with the settings that are its own, and its arguments; others may be the algorithm's."""
    from rookery.cli.registry import make_task

    arguments = read_settings(known_settings(options.settings, task), task, None)[1] | options.arguments(task)
    return arguments, make_task(task, **arguments)


def default_algorithm_of(task: str, options: TaskOptions = DEFAULTS) -> str:
    """Return the name of the algorithm that runs on a task by default."""
    from rookery.cli.registry import find_task

    return default_algorithm(_default_task(find_task(task), options)[1])


def default_algorithm(task: Task) -> str:
    """Return the name of an algorithm that solves the task's problem.

    >>> default_algorithm(rk.tasks.minimax_quadratic()), default_algorithm(rk.tasks.quadratic(scope="client"))
    ('FedNest', 'FedBiOLocal')
    """
    problem: Any = task.problem
    if "client" in (getattr(problem, "lower_scope", None), getattr(problem, "inner_scope", None)):
        return "FedBiOLocal" if isinstance(problem, rk.Bilevel) else "FCSG"
    defaults: dict[type, str] = {
        rk.MultiLevel: "FedMSA",
        rk.SingleLevel: "FedAvg",
        rk.WeightedNodes: "WeightedNodesProx",
    }
    return defaults.get(type(problem), "FedNest")


def fit(task: Task, cls: Any) -> tuple[Task, str]:
    """Return the task in a form that this algorithm solves, and a note if that changes the problem."""
    from rookery.engines import checks

    kind = type(task.problem)
    if kind in cls.solves:
        return task, ""
    if rk.SingleLevel in cls.solves and task.single_level is not None:
        return task.single_level, ""
    if rk.Bilevel in cls.solves and hasattr(task.problem, "as_bilevel"):
        init = checks.start_values(task.problem, task.clients, task.init)
        note = f"{cls.__name__} solves bilevel problems: the {kind.__name__.lower()} problem is handed over as one."
        return dataclasses.replace(task, problem=task.problem.as_bilevel(), init=init), note
    return task, ""  # solve refuses it, with the reason
