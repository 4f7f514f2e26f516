"""What the command line knows by name, the algorithms and the tasks. Suggests the nearest name."""

import difflib
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar

from rookery import algorithms, tasks
from rookery.tasks.task import Task

V = TypeVar("V")

ALGORITHMS: dict[str, type] = {name: getattr(algorithms, name) for name in algorithms.__all__}
TASKS: dict[str, Callable[..., Task]] = {
    name.replace("_", "-"): getattr(tasks, name) for name in tasks.__all__ if name.islower()
}


def find(kind: str, name: str, known: Mapping[str, V]) -> tuple[str, V]:
    """The entry of that name, and its name as it is written; capitals, `-` and `_` do not matter.

    >>> find("task", "Minimax_Quadratic", TASKS)[0]
    'minimax-quadratic'
    >>> find("algorithm", "FedNets", {"FedAvg": 1, "FedNest": 2})
    Traceback (most recent call last):
    ValueError: There is no algorithm 'FedNets'; did you mean FedNest?
    """
    plain = {_plain(entry): entry for entry in known}
    entry = plain.get(_plain(name))
    if entry is None:
        raise ValueError(f"There is no {kind} {name!r}; {_nearest(name, known)}")
    return entry, known[entry]


def key(owner: str, name: str, known: Iterable[str]) -> str:
    """The name, if it is known; for the settings of `owner`."""
    known = list(known)
    if name not in known:
        raise ValueError(f"{owner} has no setting {name!r}; {_nearest(name, known)}")
    return name


def _nearest(name: str, known: Iterable[str]) -> str:
    plain: dict[Any, str] = {_plain(entry): entry for entry in known}
    close = [plain[entry] for entry in difflib.get_close_matches(_plain(name), plain, n=3, cutoff=0.6)]
    if close:
        return f"did you mean {' or '.join(close)}?"
    return f"there are: {', '.join(sorted(plain.values()))}."


def _plain(name: str) -> str:
    return name.lower().replace("-", "").replace("_", "")
