"""The settings of `--set`: their values as text, and the algorithm or task that they belong to."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import rookery as rk
from rookery.cli.lookup import check_setting, find

if TYPE_CHECKING:
    from rookery.cli.registry import Named

TASK_OPTIONS = ("clients", "partition", "seed")  # settings of a task that have an option of their own
_OPTIONS = (*TASK_OPTIONS, "rounds", "cohort", "every")
_OPTIMIZERS = ("adam", "yogi", "adagrad", "sgd", "momentum")


def parse_value(text: str) -> Any:
    """Return the value that a text on the command line stands for.

    >>> [parse_value(text) for text in ("3", "0.1", "1e-3", "true", "none", "auto", "5..15", "5,15")]
    [3, 0.1, 0.001, True, None, 'auto', (5, 15), (5, 15)]
    >>> parse_value("epochs:2")
    Epochs(passes=2.0)
    """
    text = text.strip()
    words = {"true": True, "false": False, "none": None}
    if text.lower() in words:
        return words[text.lower()]
    for number in (int, float):
        try:
            return number(text)
        except ValueError:
            continue
    pair = re.fullmatch(r"([^,]+?)(?:\.\.|,)([^,]+)", text)
    if pair:
        return (parse_value(pair[1]), parse_value(pair[2]))
    if text.lower().startswith("epochs:"):
        passes = parse_value(text[len("epochs:") :])
        if not isinstance(passes, int | float):
            raise ValueError(f"epochs: must be followed by a number, e.g. epochs:5; got {text!r}.")
        return rk.Epochs(float(passes))
    return text


def format_value(value: Any) -> str | None:
    """Return the text that `parse_value` reads as this value; None if there is no such text.

    >>> [format_value(value) for value in (3, 0.1, True, None, "auto", (5, 15), rk.Epochs(2), [1, 2])]
    ['3', '0.1', 'true', 'none', 'auto', '5..15', 'epochs:2', None]
    """
    if hasattr(value, "item") and getattr(value, "ndim", None) == 0:
        value = value.item()
    if isinstance(value, bool) or value is None:
        return str(value).lower()
    if isinstance(value, tuple) and len(value) == 2:
        ends = [format_value(end) for end in value]
        text = None if None in ends else "..".join(map(str, ends))
    elif isinstance(value, rk.Epochs):
        text = f"epochs:{value.passes}"
    else:
        text = repr(value) if isinstance(value, int | float) else value if isinstance(value, str) else None
    return text if text is not None and text.strip() and parse_value(text) == value else None


def setting_name(entry: str) -> str:
    """Return the name in name=value, with underscores."""
    return entry.partition("=")[0].strip().replace("-", "_")


def read_settings(
    entries: Iterable[str], task: Named | None, algorithm: Named | None
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the hyperparameters of the algorithm and the arguments of the task that entries of `--set` give."""
    fields = [] if algorithm is None else parameters_of(algorithm)
    parameters = [] if task is None else [name for name in parameters_of(task) if name not in TASK_OPTIONS]
    owner = " on ".join(named.name for named in (algorithm, task) if named is not None)
    hyperparameters: dict[str, Any] = {}
    arguments: dict[str, Any] = {}
    for entry in entries:
        name, text = setting_name(entry), entry.partition("=")[2]
        if not name or not text.strip():
            raise ValueError(f"--set must have the form key=value, e.g. --set upper_step=0.1; got {entry!r}.")
        if task is not None and name in _OPTIONS:
            raise ValueError(
                f"--set must not have {name}, which has an option of its own; got {entry!r}. Give --{name} {text}."
            )
        check_setting(owner if algorithm is not None else f"The task {owner}", name, [*fields, *parameters])
        if name in hyperparameters or name in arguments:
            raise ValueError(f"--set {entry!r}: {name} is set twice. Give it once.")
        if name in fields:
            hyperparameters[name] = parse_value(text)
        elif task is not None:
            arguments[name] = parse_value(text)
            check_argument(task, name, arguments[name])
    return hyperparameters, arguments


def parameters_of(named: Named) -> list[str]:
    """Return the names of the settings of a task or an algorithm."""
    return list(inspect.signature(named.target).parameters)


def check_argument(task: Named, name: str, value: Any) -> None:
    """Raise ValueError unless the task has this setting and the value has the type of its default."""
    from rookery.data import PARTITIONS

    parameters = inspect.signature(task.target).parameters
    if name not in parameters:
        raise ValueError(
            f"The task {task.name} has no setting {name!r}; its settings are: {', '.join(parameters) or 'none'}."
        )
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


def known_settings(entries: Sequence[str], task: Named, algorithm: Named | None = None) -> list[str]:
    """Return the entries of `--set` that this task or this algorithm has."""
    fields = [] if algorithm is None else parameters_of(algorithm)
    return [entry for entry in entries if setting_name(entry) in (*fields, *parameters_of(task))]


def parse_optimizer(text: str) -> Any:
    """Return the optax optimizer that a text such as adam:0.001 names; momentum is sgd with momentum=0.9.

    >>> hasattr(parse_optimizer("adam:0.001"), "update")
    True
    """
    import optax

    from rookery.base.arguments import is_number

    word, _, size = text.partition(":")
    name, _ = find("server optimizer", word.strip(), dict.fromkeys(_OPTIMIZERS))
    step: Any = parse_value(size)
    if not is_number(step) or step <= 0:
        raise ValueError(
            f"--server-optimizer must have a positive step size after the name, e.g. {name}:0.001; got {text!r}."
        )
    return optax.sgd(step, momentum=0.9) if name == "momentum" else getattr(optax, name)(step)
