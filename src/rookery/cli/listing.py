"""`rookery list`: what can be run, and its settings."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rookery.cli.program import AsJson, Command, app, border, complain, say

if TYPE_CHECKING:
    from rookery.cli.registry import Found

Rows = list[dict[str, str]]


@app.command("list", cls=Command)
def list_names(
    what: Annotated[
        str | None,
        typer.Argument(
            help="algorithms, tasks, experiments or datasets; or one algorithm or task, also your own: fedx.py:FedX."
        ),
    ] = None,
    json: AsJson = False,
) -> None:
    """List what can be run; with a name, show its settings: what each means, and its default."""
    import pandas as pd

    from rookery import report
    from rookery.cli.registry import find, find_algorithm, find_task, is_algorithm, is_reference, names

    with border():
        kinds: dict[str, Callable[[], Rows]] = {
            "algorithms": _algorithm_names,
            "tasks": _task_names,
            "experiments": _experiment_names,
            "datasets": _dataset_names,
        }
        if what is None:
            lists = {kind: make() for kind, make in kinds.items()}
        elif is_reference(what):
            own = find_algorithm(what) if is_algorithm(what) else find_task(what)
            lists = {own.name: _parameters(own)}
        else:
            single = {name: partial(_one, find_algorithm, name) for name in names("algorithm")}
            single |= {name: partial(_one, find_task, name) for name in names("task")}
            kind, make = find("list of", what, single | kinds)
            lists = {kind: make()}
        if json:
            print(report.to_json(lists))
            return
        for kind, rows in lists.items():
            title = kind.capitalize() if kind in kinds else kind
            say(False, False, report.table(pd.DataFrame(rows), title) if rows else f"{kind} has no settings.")


def _one(look: Callable[[str], Found], name: str) -> Rows:
    return _parameters(look(name))


def _algorithm_names() -> Rows:
    from rookery.cli.registry import offered

    found, broken = offered("algorithm")
    for line in broken:
        complain(line)
    return [
        {
            "name": name,
            "solves": ", ".join(kind.__name__ for kind in own.thing.solves),
            "what it is": _first_line(own.thing),
        }
        for name, own in found.items()
    ]


def _task_names() -> Rows:
    from rookery.cli.registry import offered

    found, broken = offered("task")
    for line in broken:
        complain(line)
    return [
        {
            "name": name,
            "settings": ", ".join(inspect.signature(own.thing).parameters),
            "what it is": _first_line(own.thing),
        }
        for name, own in found.items()
    ]


def _experiment_names() -> Rows:
    from rookery.experiments import EXPERIMENTS

    return [{"name": name, "what it is": experiment.title} for name, experiment in EXPERIMENTS.items()]


def _dataset_names() -> Rows:
    from rookery.data import DATASETS

    return [{"name": name, "what it is": about} for name, about in DATASETS.items()]


def _parameters(own: Found) -> Rows:
    """Return the settings of an algorithm or a task: each name with its default and its meaning."""
    return _hyperparameters(own) if isinstance(own.thing, type) else _settings(own.thing)


def _hyperparameters(own: Found) -> Rows:
    from rookery.cli.registry import ALGORITHMS
    from rookery.language.hyperparameters import MEANINGS, expected

    notes = _comments(own.thing)
    rows = []
    for p in inspect.signature(own.thing).parameters.values():
        row = {"setting": p.name, "default": _shown(own.given.get(p.name, p.default))}
        row["may be"] = expected(own.thing, p.name)
        meaning, note = MEANINGS.get(p.name, ""), notes.get(p.name, "")
        if own.name in ALGORITHMS:
            rows.append(row | {"meaning": meaning, "in its paper": note})
        else:
            rows.append(row | {"meaning": note or meaning})
    return rows


def _comments(cls: type) -> dict[str, str]:
    """What a class says beside its fields."""
    found: dict[str, str] = {}
    for base in reversed(cls.__mro__[:-1]):
        try:
            source = inspect.getsource(base)
        except (OSError, TypeError):
            continue
        found |= dict(re.findall(r"^\s+(\w+):[^#\n]*=[^#\n]*#\s*(.*?)\s*$", source, re.MULTILINE))
    return found


def _settings(make: Callable[..., Any]) -> Rows:
    meanings = _described(inspect.getdoc(make) or "")
    rows = []
    for p in inspect.signature(make).parameters.values():
        meaning = meanings.get(p.name, "")
        default = _shown(p.default)
        told = re.search(r"\s*\(None: ([^()]*)\)", meaning)
        if p.default is None and told:
            default, meaning = told[1], meaning.replace(told[0], "")
        rows.append({"setting": p.name, "default": default, "meaning": meaning.rstrip(".")})
    return rows


def _described(doc: str) -> dict[str, str]:
    """The arguments that a docstring describes.

    >>> _described("Digits.\\n\\nArguments:\\n    ways, shots: of an\\n        episode.\\n    seed: of all.\\n\\nMore.")
    {'ways': 'of an episode.', 'shots': 'of an episode.', 'seed': 'of all.'}
    """
    section = re.search(r"^Arguments:\n((?:[ ]{4,}.*\n?|\n(?=[ ]{4}))*)", doc, re.MULTILINE)
    found: dict[str, str] = {}
    for entry in re.findall(r"^ {4}(\w[\w, ]*): (.*(?:\n {5,}.*)*)", section[1] if section else "", re.MULTILINE):
        found |= dict.fromkeys(entry[0].split(", "), " ".join(entry[1].split()))
    return found


def _shown(default: Any) -> str:
    if default is inspect.Parameter.empty:
        return "to be given"
    return str(default).lower() if default is None or isinstance(default, bool) else str(default)


def _first_line(thing: Any) -> str:
    return (inspect.getdoc(thing) or "").split("\n")[0]
