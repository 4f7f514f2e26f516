"""Human-readable numbers, tables and progress bars, and values as JSON."""

import json
import math
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pandas as pd
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.table import Table
from rich.text import Text

from rookery.base.printable import without_address


def number(value: Any) -> str:
    """Format a number for people.

    >>> [number(v) for v in (0.93333, 12345, 1e-9, float("nan"), "x")]
    ['0.9333', '12345', '1e-09', 'nan', 'x']
    """
    if isinstance(value, bool | str) or value is None:
        return str(value)
    if isinstance(value, int | np.integer):
        return str(int(value))
    return f"{float(value):.4g}"


def size(count: float) -> str:
    """Format a number of bytes for people.

    >>> [size(n) for n in (12, 3400, 5.6e6, 7.8e9)]
    ['12 B', '3.4 kB', '5.6 MB', '7.8 GB']
    """
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000 or unit == "GB":
            break
        count /= 1000
    return f"{count:.0f} B" if unit == "B" else f"{count:.3g} {unit}"


def mean_and_error(values: Sequence[float]) -> str:
    r"""Format the mean and, for several values, its standard error.

    >>> mean_and_error([0.90, 0.92, 0.94]), mean_and_error([0.5])
    ('0.92\xa0±\xa00.012', '0.5')
    """
    array = np.asarray(values, float)
    if len(array) < 2:
        return number(array.mean())
    return f"{array.mean():.3g}\u00a0±\u00a0{array.std(ddof=1) / math.sqrt(len(array)):.2g}"  # no line break


def table(frame: pd.DataFrame, title: str = "") -> Table:
    """Return a frame as a table for the terminal: first column left-aligned, numbers and sizes right-aligned."""
    grid = Table(title=title or None, title_justify="left", title_style="bold", header_style="bold", box=SIMPLE_HEAD)
    for position, name in enumerate(frame.columns):
        numeric = frame[name].map(lambda v: re.match(r"[-+.\d]|nan$|never$|$", number(v)) is not None).all()
        grid.add_column(Text(str(name)), justify="right" if numeric and position else "left", overflow="fold")
    for row in frame.itertuples(index=False):
        grid.add_row(*(Text(number(value)) for value in row))
    return grid


@contextmanager
def bar(*columns: ProgressColumn, show: bool, transient: bool = False) -> Iterator[Progress]:
    """Show a progress bar on standard error, or nothing. (Old versions of rich end a disabled bar by a blank line.)"""
    progress = Progress(*columns, console=Console(stderr=True), disable=not show, transient=transient)
    with progress if show else nullcontext():
        yield progress


@contextmanager
def bars(title: str, total: int, done: int, show: bool) -> Iterator[Callable[[str, int], Callable[[Any], None]]]:
    """Show two bars: over the runs, and over the rounds of the current run.

    Yields `start(name, rounds)`, which returns a callback for `solve`; call the callback with None for a skipped run.
    """
    columns = (
        TextColumn("{task.description}"),
        BarColumn(bar_width=24),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    with bar(*columns, show=show) as progress:
        runs = progress.add_task(f"{title}: runs", total=total, completed=done)
        rounds = progress.add_task("rounds", total=None, visible=False)

        def start(name: str, count: int) -> Callable[[Any], None]:
            progress.reset(rounds, description=name, total=count, visible=True)

            def update(run: Any) -> None:
                done = count if run is None else run.rounds
                progress.update(rounds, completed=done)
                if done == count:
                    progress.advance(runs)

            return update

        yield start
        progress.update(rounds, visible=False)


def plain(value: Any) -> Any:
    """Return a value as JSON can hold it: non-finite numbers become null, arrays lists, other objects their text."""
    if isinstance(value, dict):
        return {str(name): plain(entry) for name, entry in value.items()}
    if isinstance(value, list | tuple) or (isinstance(value, np.ndarray | jax.Array) and value.ndim > 0):
        return [plain(entry) for entry in value]
    if isinstance(value, bool | str | int) or value is None:
        return value
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, np.bool_):
        return bool(value)
    if isinstance(value, np.integer):
        return int(value)
    if isinstance(value, float | np.floating | jax.Array | np.ndarray):
        return float(value) if math.isfinite(value) else None
    return without_address(value)


def to_json(value: Any) -> str:
    """Return the value as JSON text."""
    return json.dumps(plain(value), indent=2, ensure_ascii=False, allow_nan=False)
