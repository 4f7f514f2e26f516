"""`rookery list`: algorithms, tasks, experiments and data sets, and the settings of one of them."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.box import SIMPLE_HEAD
from rich.table import Table
from rich.text import Text

from rookery.cli.lookup import find
from rookery.cli.options import AsJson
from rookery.cli.program import Command, app
from rookery.cli.terminal import complain, show

if TYPE_CHECKING:
    from rookery.cli.registry import Named

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
    """List what can be run; with a name, list its settings with their meanings and defaults."""
    from rookery.cli.own_code import is_reference
    from rookery.cli.registry import find_algorithm, find_either, find_task, names

    kinds: dict[str, Callable[[], Rows]] = {
        "algorithms": lambda: _offered("algorithm"),
        "tasks": lambda: _offered("task"),
        "experiments": _experiments,
        "datasets": _datasets,
    }
    if what is None:
        lists = {kind: make() for kind, make in kinds.items()}
    elif is_reference(what):
        named = find_either(what)
        lists = {named.name: settings_of(named)}
    else:
        single: dict[str, Callable[[], Rows]] = {}
        for kind, look_up in (("algorithm", find_algorithm), ("task", find_task)):
            for name in names(kind):
                single[name] = lambda look_up=look_up, name=name: settings_of(look_up(name))  # type: ignore[misc]
        kind, make = find("list of", what, single | kinds)
        lists = {kind: make()}
    titles = {kind: kind.capitalize() if kind in kinds else kind for kind in lists}
    tables = [_table(rows, titles[kind]) if rows else f"{kind} has no settings." for kind, rows in lists.items()]
    show(False, json, lists, *tables)


def _table(rows: Rows, title: str) -> Table:
    """Return rows as a table; `report.table` would import pandas."""
    grid = Table(title=title, title_justify="left", title_style="bold", header_style="bold", box=SIMPLE_HEAD)
    for name in rows[0]:
        grid.add_column(name, overflow="fold")
    for row in rows:
        grid.add_row(*map(Text, row.values()))
    return grid


def _offered(kind: str) -> Rows:
    from rookery.cli.registry import offered

    found, broken = offered(kind)
    for line in broken:
        complain(line)
    rows = []
    for name, named in found.items():
        if kind == "algorithm":
            row = {"solves": ", ".join(problem.__name__ for problem in named.algorithm.solves)}
        else:
            row = {"settings": ", ".join(inspect.signature(named.target).parameters)}
        rows.append({"name": name, **row, "what it is": (inspect.getdoc(named.target) or "").split("\n")[0]})
    return rows


def _experiments() -> Rows:
    from rookery.experiments import EXPERIMENTS

    return [{"name": name, "what it is": experiment.title} for name, experiment in EXPERIMENTS.items()]


def _datasets() -> Rows:
    from rookery.data import DATASETS

    return [{"name": name, "what it is": about} for name, about in DATASETS.items()]


def settings_of(named: Named) -> Rows:
    """Return the settings of an algorithm or a task, each with its default and its meaning."""
    from rookery.cli.registry import SPECIAL

    is_algorithm = isinstance(named.target, type) or named.name in SPECIAL
    return _hyperparameters(named) if is_algorithm else _task_settings(named.target)


def _hyperparameters(named: Named) -> Rows:
    from rookery.cli.registry import ALGORITHMS, SPECIAL
    from rookery.language.hyperparameters import expected
    from rookery.language.meanings import MEANINGS

    special = named.name in SPECIAL
    comments = described_arguments(inspect.getdoc(named.target) or "") if special else _field_comments(named.target)
    rows = []
    for p in inspect.signature(named.target).parameters.values():
        meaning, comment = MEANINGS.get(p.name, ""), comments.get(p.name, "")
        row = {"setting": p.name, "default": _default(named.hyperparameters.get(p.name, p.default))}
        row["may be"] = expected(named.algorithm, p.name)
        if named.name in ALGORITHMS | SPECIAL:
            rows.append(row | {"meaning": meaning, "in its paper": comment.rstrip(".")})
        else:
            rows.append(row | {"meaning": comment or meaning})
    return rows


def _field_comments(cls: type) -> dict[str, str]:
    """Return the comments behind a class's fields."""
    comments: dict[str, str] = {}
    for base in reversed(cls.__mro__[:-1]):
        try:
            source = inspect.getsource(base)
        except (OSError, TypeError):
            continue
        comments |= dict(re.findall(r"^\s+(\w+):[^#\n]*=[^#\n]*#\s*(.*?)\s*$", source, re.MULTILINE))
    return comments


def _task_settings(make: Callable[..., Any]) -> Rows:
    meanings = described_arguments(inspect.getdoc(make) or "")
    rows = []
    for p in inspect.signature(make).parameters.values():
        meaning, default = meanings.get(p.name, ""), _default(p.default)
        if_none = re.search(r"\s*\(None: ([^()]*)\)", meaning)
        if p.default is None and if_none:
            default, meaning = if_none[1], meaning.replace(if_none[0], "")
        rows.append({"setting": p.name, "default": default, "meaning": meaning.rstrip(".")})
    return rows


def described_arguments(doc: str) -> dict[str, str]:
    """Return the arguments that a docstring describes.

    >>> described_arguments("Digits.\\n\\nArguments:\\n    ways, shots: per\\n        episode.\\n    seed: of it.\\n")
    {'ways': 'per episode.', 'shots': 'per episode.', 'seed': 'of it.'}
    """
    section = re.search(r"^Arguments:\n((?:[ ]{4,}.*\n?|\n(?=[ ]{4}))*)", doc, re.MULTILINE)
    arguments: dict[str, str] = {}
    for entry in re.findall(r"^ {4}(\w[\w, ]*): (.*(?:\n {5,}.*)*)", section[1] if section else "", re.MULTILINE):
        arguments |= dict.fromkeys(entry[0].split(", "), " ".join(entry[1].split()))
    return arguments


def _default(default: Any) -> str:
    if default is inspect.Parameter.empty:
        return "to be given"
    return str(default).lower() if default is None or isinstance(default, bool) else str(default)
