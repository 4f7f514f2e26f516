"""Algorithms and tasks by name: the library's, those of other packages, and users' own.

A package offers its own by entry points in the groups `rookery.tasks` and `rookery.algorithms`.
"""

import dataclasses
import inspect
import tracemalloc
from collections.abc import Callable, Mapping
from importlib.metadata import EntryPoint, entry_points
from typing import Any, NamedTuple

import jax

from rookery import algorithms, tasks
from rookery.algorithms.fedbio import SOBA
from rookery.base.arguments import kind_of
from rookery.base.printable import located
from rookery.cli.lookup import find, plain
from rookery.cli.own_code import is_reference, load_reference
from rookery.engines.simulation.memory import memory_of, readable
from rookery.tasks.task import Task

ALGORITHMS: dict[str, type] = {name: getattr(algorithms, name) for name in algorithms.__all__}
SPECIAL: dict[str, Callable[..., Any]] = {"SOBA": SOBA}  # functions that return one of these, with fixed fields
TASKS: dict[str, Callable[..., Task]] = {
    name.replace("_", "-"): getattr(tasks, name) for name in tasks.__all__ if name.islower()
}


class Named(NamedTuple):
    """A task or an algorithm, found by its name.

    Attributes:
        name: its name in tables and files.
        reference: a name that finds it from any folder.
        target: for a task, a function that returns it; for an algorithm, the class, or a function that returns an
            instance of one.
        hyperparameters: their values, if the name stands for an instance of an algorithm.
    """

    name: str
    reference: str
    target: Any
    hyperparameters: dict[str, Any]

    @property
    def algorithm(self) -> Any:
        """The class of an algorithm."""
        return self.target if isinstance(self.target, type) else type(self.target())


def find_task(name: str) -> Named:
    """Return a task by its name, by file.py:name or by package.module:name."""
    name, reference, target = _find("task", name, TASKS)
    if isinstance(target, Task):
        return Named(name, reference, lambda: target, {})
    if not callable(target) or isinstance(target, type):
        raise ValueError(
            f"A task must be a rookery.tasks.Task, or a function returning one; {name} is {_kind(target)}."
        )
    return Named(name, reference, target, {})


def make_task(named: Named, **settings: Any) -> Task:
    """Return the task with these settings; errors in a user's function are reported with their place."""
    missing = [
        p.name
        for p in inspect.signature(named.target).parameters.values()
        if p.default is p.empty and p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY) and p.name not in settings
    ]
    if missing:
        option = f"--{missing[0]} ..." if missing[0] in ("clients", "partition") else f"--set {missing[0]}=..."
        raise ValueError(f"{named.name} needs a value for {missing[0]}; got none. Give {option}.")
    if named.name in TASKS:
        _check_memory(named, settings)
        return named.target(**settings)
    try:
        task = named.target(**settings)
    except Exception as error:
        raise ValueError(f"{named.name} failed: {located(error)}") from error
    if not isinstance(task, Task):
        raise ValueError(f"{named.name} must return a rookery.tasks.Task; it returns {_kind(task)}.")
    return task


_MANY = 100_000  # with fewer clients, memory is not checked
_SAMPLE = 16  # clients by which memory is measured


def _check_memory(named: Named, settings: dict[str, Any]) -> None:
    """Raise ValueError if so many clients do not fit into memory, judging by a few of them."""
    count = settings.get("clients", 0)
    if count < _MANY:
        return
    named.target(**settings | {"clients": _SAMPLE})  # fills caches
    peaks = []
    for clients in (_SAMPLE, 2 * _SAMPLE):
        tracemalloc.start()
        try:
            named.target(**settings | {"clients": clients})
            peaks.append(tracemalloc.get_traced_memory()[1])
        finally:
            tracemalloc.stop()
    needed, available = (peaks[1] - peaks[0]) / _SAMPLE * count, memory_of(jax.local_devices()[0])
    if needed > available:
        raise ValueError(
            f"{named.name}: clients must fit into memory; {count} take about {readable(needed)}, and there are "
            f"{readable(available)}. Give fewer."
        )


def find_algorithm(name: str) -> Named:
    """Return an algorithm by its name, by file.py:name or by package.module:name."""
    name, reference, target = _find("algorithm", name, ALGORITHMS | SPECIAL)
    if name in SPECIAL:
        return Named(name, reference, target, {})
    cls = target if isinstance(target, type) else type(target)
    missing = [part for part in ("solves", "init", "round") if not hasattr(cls, part)]
    if missing or not dataclasses.is_dataclass(cls):
        lacks = f" without {' and '.join(missing)}" if len(missing) < 3 and missing else ""
        raise ValueError(
            f"An algorithm must be a frozen dataclass with solves, init and round; {name} is {_kind(target)}{lacks}."
        )
    values = {} if cls is target else {f.name: getattr(target, f.name) for f in dataclasses.fields(cls) if f.init}
    return Named(name, reference, cls, values)


def find_either(reference: str) -> Named:
    """Return the algorithm or the task of a reference."""
    return find_algorithm(reference) if hasattr(load_reference(reference)[2], "solves") else find_task(reference)


def offered(kind: str) -> tuple[dict[str, Named], list[str]]:
    """Return all algorithms or all tasks, sorted by name, and a line for each one of a package that can't be used."""
    known, look_up = (ALGORITHMS | SPECIAL, find_algorithm) if kind == "algorithm" else (TASKS, find_task)
    found, broken = {}, []
    for name in names(kind):
        try:
            found[name] = look_up(name)
        except ValueError as error:
            broken.append(str(error))
    for name in _plugins(kind):
        if plain(name) in {*map(plain, known)}:
            broken.append(f"A package's {kind} {name!r} has the name of one of the library's, and is not used.")
    return found, broken


def names(kind: str) -> list[str]:
    """Return the names of all algorithms or tasks, sorted, including those of packages; nothing is loaded."""
    known = {plain(name): name for name in (*_plugins(kind), *(ALGORITHMS | SPECIAL if kind == "algorithm" else TASKS))}
    return sorted(known.values(), key=str.casefold)


def _find(kind: str, name: str, known: Mapping[str, Any]) -> tuple[str, str, Any]:
    """Return the name as it is written, a reference from any folder, and the object."""
    if is_reference(name):
        return load_reference(name)
    built_in = plain(name) in {*map(plain, known)}  # and no installed package has to be asked
    name, entry = find(kind, name, known if built_in else {**_plugins(kind), **known})
    if not isinstance(entry, EntryPoint):
        return name, name, entry
    try:
        return name, name, entry.load()
    except Exception as error:
        package = "" if entry.dist is None else f" of the package {entry.dist.name}"
        raise ValueError(f"The {kind} {name!r}{package} can't be loaded: {located(error)}") from error


def _plugins(kind: str) -> dict[str, EntryPoint]:
    return {entry.name: entry for entry in entry_points(group=f"rookery.{kind}s")}


def _kind(value: Any) -> str:
    if isinstance(value, type):
        return f"the class {value.__name__}"
    return "a function" if inspect.isfunction(value) else kind_of(value)
