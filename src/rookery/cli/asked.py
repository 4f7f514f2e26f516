"""What the words of a command stand for: a task, an algorithm, and their settings."""

from __future__ import annotations

import dataclasses
import inspect
import re
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer

import rookery as rk
from rookery.cli.config import config_option, set_with_config

if TYPE_CHECKING:
    from rookery.cli.registry import Found
    from rookery.tasks.task import Task


def _completed(kind: str) -> Callable[[str], list[str]]:
    def complete(incomplete: str) -> list[str]:
        from rookery.cli.registry import names

        return [name for name in names(kind) if name.lower().startswith(incomplete.lower())]

    return complete


TaskName = Annotated[
    str,
    typer.Argument(
        help="A task (see `rookery list tasks`), or your own: hospital.py:task, package.module:task.",
        autocompletion=_completed("task"),
    ),
]
AlgorithmName = Annotated[
    str | None,
    typer.Option(
        "--algorithm",
        "-a",
        help="See `rookery list algorithms`; or your own: fedx.py:FedX, package.module:FedX. If left out, FedNest, or "
        "FedAvg and so on where the task needs another.",
        autocompletion=_completed("algorithm"),
    ),
]
TaskNames = Annotated[
    list[str],
    typer.Argument(
        metavar="TASK...",
        help="Tasks (see `rookery list tasks`), or your own: hospital.py:task, package.module:task.",
        autocompletion=_completed("task"),
    ),
]
AlgorithmNames = Annotated[
    list[str] | None,
    typer.Option(
        "--algorithm",
        "-a",
        help="See `rookery list algorithms`; or your own: fedx.py:FedX, package.module:FedX. Repeat it for more. "
        "If left out, FedNest, or FedAvg and so on where the task needs another.",
        autocompletion=_completed("algorithm"),
    ),
]
Settings = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        callback=set_with_config,
        help="A hyperparameter of the algorithm, or a setting of the task: upper_step=0.1, batch_size=none, "
        "local_steps=5..15 (a range), local_steps=epochs:2. Repeat it for more.",
    ),
]
ConfigFile = Annotated[
    Path | None,
    typer.Option(
        "--config",
        callback=config_option,
        is_eager=True,
        help="A TOML file with options of this command; those on the command line win.",
    ),
]
Rounds = Annotated[int | None, typer.Option(help="How many; the task has a default.")]
Cohort = Annotated[int | None, typer.Option(help="Clients in each round; the task has a default.")]
ClientCount = Annotated[int | None, typer.Option("--clients", help="Clients in all; the task has a default.")]
Partition = Annotated[str | None, typer.Option(help="How data are dealt out: iid, shards or dirichlet.")]
Seed = Annotated[int, typer.Option(help="Of the task and of the run.")]


class Asked(NamedTuple):
    """What a task and an algorithm on the command line stand for."""

    named: Found  # the task
    algorithm: Found
    arguments: dict[str, Any]  # of the task
    task: Task
    method: Any
    note: str  # a line for the user, or ""

    @property
    def title(self) -> str:
        """Which method on which task."""
        return f"{self.algorithm.name} on {self.named.name}"


def ask(
    task: str, algorithm: str | None, settings: list[str], clients: int | None, partition: str | None, seed: int
) -> Asked:
    """Return the task and the algorithm with their settings."""
    from rookery.cli.registry import find_algorithm, find_task, make_task

    named = find_task(task)
    made_of, made = None, None
    if algorithm is None:
        made_of = _arguments(named, settings, clients, partition, seed)
        made = make_task(named, **made_of)
        algorithm = default_algorithm(made)
    method = find_algorithm(algorithm)
    cls = method.thing
    given, arguments = read_settings(settings, named, method)
    arguments |= own_options(named, clients, partition, seed)
    local = ""
    parameters = inspect.signature(named.thing).parameters
    if getattr(cls, "scope", "global") == "client" and "scope" in parameters.keys() - arguments:
        arguments["scope"] = "client"
        local = f"{method.name} gives every client a lower level of its own: {named.name} has scope=client."
    chosen, note = fit(made if made is not None and made_of == arguments else make_task(named, **arguments), cls)
    return Asked(named, method, arguments, chosen, chosen.algorithm(cls, **method.given | given), local or note)


def default_of(task: str, settings: list[str], clients: int | None, partition: str | None, seed: int) -> str:
    """The algorithm that runs on a task unless another one is asked for."""
    from rookery.cli.registry import find_task, make_task

    named = find_task(task)
    return default_algorithm(make_task(named, **_arguments(named, settings, clients, partition, seed)))


def default_algorithm(task: Task) -> str:
    """An algorithm for the class of problems that a task's is of.

    >>> default_algorithm(rk.tasks.minimax_quadratic()), default_algorithm(rk.tasks.quadratic(scope="client"))
    ('FedNest', 'FedBiOLocal')
    """
    plain: dict[type, str] = {rk.SingleLevel: "FedAvg", rk.WeightedNodes: "WeightedNodesProx"}
    problem: Any = task.problem
    if "client" in (getattr(problem, "lower_scope", None), getattr(problem, "inner_scope", None)):
        return "FedBiOLocal" if isinstance(problem, rk.Bilevel) else "FCSG"
    return plain.get(type(problem), "FedNest")


def _arguments(
    task: Found, settings: list[str], clients: int | None, partition: str | None, seed: int
) -> dict[str, Any]:
    """Those of the settings that are the task's, and its options."""
    names = inspect.signature(task.thing).parameters
    own = [entry for entry in settings if entry.partition("=")[0].strip().replace("-", "_") in names]
    return read_settings(own, task, None)[1] | own_options(task, clients, partition, seed)


def own_options(task: Found, clients: int | None, partition: str | None, seed: int) -> dict[str, Any]:
    """The settings of a task that have an option of their own."""
    parameters = inspect.signature(task.thing).parameters
    given = {"clients": clients, "partition": partition}
    if "seed" in parameters:
        given["seed"] = seed
    given = {name: value for name, value in given.items() if value is not None}
    for name, value in given.items():
        _check_argument(task, name, value)
    return given


def fit(task: Task, cls: Any) -> tuple[Task, str]:
    """The task as this algorithm can take it, and a line to say so where that is not how it was stated."""
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
    return task, ""  # solve says why not


# What --set understands.


def value_of(text: str) -> Any:
    """The value that a text on the command line stands for.

    >>> [value_of(text) for text in ("3", "0.1", "1e-3", "true", "none", "auto", "5..15", "5,15")]
    [3, 0.1, 0.001, True, None, 'auto', (5, 15), (5, 15)]
    >>> value_of("epochs:2")
    Epochs(passes=2.0)
    """
    text = text.strip()
    words = {"true": True, "false": False, "none": None}
    if text.lower() in words:
        return words[text.lower()]
    for read in (int, float):
        try:
            return read(text)
        except ValueError:
            continue
    pair = re.fullmatch(r"([^,]+?)(?:\.\.|,)([^,]+)", text)
    if pair:
        return (value_of(pair[1]), value_of(pair[2]))
    if text.lower().startswith("epochs:"):
        passes = value_of(text[len("epochs:") :])
        if not isinstance(passes, int | float):
            raise ValueError(f"{text!r}: epochs: is followed by a number, as in epochs:5.")
        return rk.Epochs(float(passes))
    return text


def text_of(value: Any) -> str | None:
    """The text that `value_of` reads this value from; None if there is none.

    >>> [text_of(value) for value in (3, 0.1, True, None, "auto", (5, 15), rk.Epochs(2), [1, 2])]
    ['3', '0.1', 'true', 'none', 'auto', '5..15', 'epochs:2', None]
    """
    if hasattr(value, "item") and getattr(value, "ndim", None) == 0:
        value = value.item()
    if isinstance(value, bool) or value is None:
        return str(value).lower()
    if isinstance(value, tuple) and len(value) == 2:
        ends = [text_of(end) for end in value]
        text = None if None in ends else "..".join(map(str, ends))
    elif isinstance(value, rk.Epochs):
        text = f"epochs:{value.passes}"
    else:
        text = repr(value) if isinstance(value, int | float) else value if isinstance(value, str) else None
    return text if text is not None and text.strip() and value_of(text) == value else None


_OPTIMIZERS = ("adam", "yogi", "adagrad", "sgd", "momentum")


def optimizer_of(text: str) -> Any:
    """Return the optax optimizer that a text on the command line names; momentum is sgd with momentum=0.9.

    >>> hasattr(optimizer_of("adam:0.001"), "update")
    True
    """
    import optax

    from rookery.base.arguments import is_number
    from rookery.cli.registry import find

    word, _, size = text.partition(":")
    name, _ = find("server optimizer", word.strip(), dict.fromkeys(_OPTIMIZERS))
    step: Any = value_of(size)
    if not is_number(step) or step <= 0:
        raise ValueError(f"--server-optimizer {text!r}: give a positive step size after the name, as in {name}:0.001.")
    return optax.sgd(step, momentum=0.9) if name == "momentum" else getattr(optax, name)(step)


def read_settings(given: list[str], task: Found, method: Found | None) -> tuple[dict[str, Any], dict[str, Any]]:
    """What is set of the algorithm, if there is one, and what of the task."""
    from rookery.cli.registry import key

    of_algorithm = [] if method is None else [field.name for field in dataclasses.fields(method.thing)]
    parameters = inspect.signature(task.thing).parameters
    of_task = [name for name in parameters if name not in ("clients", "partition", "seed")]
    owner = f"The task {task.name}" if method is None else f"{method.name} on {task.name}"
    hyper: dict[str, Any] = {}
    arguments: dict[str, Any] = {}
    for entry in given:
        name, sign, text = entry.partition("=")
        name = name.strip().replace("-", "_")
        if not sign or not name or not text.strip():
            raise ValueError(f"--set must have the form key=value, as in --set upper_step=0.1; got {entry!r}.")
        if name in ("clients", "partition", "seed", "rounds", "cohort", "every"):
            raise ValueError(f"--set {entry!r}: that has an option of its own, --{name} {text}.")
        key(owner, name, [*of_algorithm, *of_task])
        if name in hyper or name in arguments:
            raise ValueError(f"--set {entry!r}: {name} is set twice; give it once.")
        value = value_of(text)
        if name in of_algorithm:
            hyper[name] = value
        else:
            _check_argument(task, name, value)
            arguments[name] = value
    return hyper, arguments


def _check_argument(task: Found, name: str, value: Any) -> None:
    """The task's function has such an argument, and the value is of its default's type."""
    from rookery.cli.registry import find
    from rookery.data import PARTITIONS

    parameters = inspect.signature(task.thing).parameters
    if name not in parameters:
        raise ValueError(f"The task {task.name} has no {name}; its settings are: {', '.join(parameters) or 'none'}.")
    default = parameters[name].default
    kinds: dict[type, tuple[Any, str]] = {
        bool: (bool, "true or false"),
        int: (int, "an integer"),
        float: (int | float, "a number"),
        str: (str, "a word"),
    }
    kind, expected = kinds.get(type(default), (object, ""))
    if not isinstance(value, kind) or (isinstance(value, bool) and type(default) is not bool and kind is not object):
        raise ValueError(f"{task.name}: {name} must be {expected}; got {value!r}.")
    if name == "partition":
        find("partition", value, PARTITIONS)
    if name == "clients" and value < 1:
        raise ValueError(f"{task.name}: clients must be an integer of at least 1; got {value}.")
