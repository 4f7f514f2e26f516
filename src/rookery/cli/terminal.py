"""What a command prints: results for people or as JSON, errors as one line on standard error with an exit code."""

import os
import re
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import typer
from rich.console import Console

import rookery as rk
from rookery.base.printable import is_own, located, printable

_ERROR_LENGTH = 10_000  # the longest line of an error


def show(quiet: bool, as_json: bool, data: Any, *items: Any) -> None:
    """Print data as one JSON object if asked to; otherwise, unless quiet, tables and lines for people."""
    if as_json:
        from rookery.base.printing import to_json

        print(to_json(data))
    elif not quiet:
        console = Console(width=None if sys.stdout.isatty() else 120)
        for item in items:
            console.print(item, highlight=False, markup=False, soft_wrap=isinstance(item, str))


def complain(message: str) -> None:
    """Print one line to standard error; a list in the message keeps its lines."""
    lines = [printable(" ".join(part.split()), _ERROR_LENGTH) for part in re.split(r"\n(?=- )", message)]
    print("rookery: " + "\n".join(lines), file=sys.stderr)


def logger(quiet: bool, *also: Callable[[str], None], longest: int | None = None) -> Callable[[str], None]:
    """Return a function that prints a line with the time to standard error, unless quiet, and passes it to others."""

    def log(text: str) -> None:
        if not quiet:
            print(time.strftime("%H:%M:%S"), printable(text, longest) if longest else text, file=sys.stderr, flush=True)
        for other in also:
            other(text)

    return log


@contextmanager
def errors_in_one_line() -> Iterator[None]:
    """End the command with one line: code 2 for bad input, code 1 if a run fails."""
    try:
        yield
    except typer.Exit:
        raise
    except (ValueError, TypeError, OSError) as error:
        complain(_describe(error) if isinstance(error, OSError) else str(error))
        _tell_other_processes(error)
        raise typer.Exit(2) from None
    except MemoryError as error:
        complain(str(error) or "There is not enough memory for this.")
        _tell_other_processes(error)
        raise typer.Exit(1) from None
    except rk.NonFiniteError as error:
        _tell_other_processes(error)
        complain(f"The run broke down: {error}. Smaller steps may help.")
        raise typer.Exit(1) from None
    except RuntimeError as error:
        from rookery.base.processes import HostError

        if not isinstance(error, HostError):
            raise
        complain(f"{error} The run has ended; with --out, resume it from its last checkpoint with --resume.")
        sys.stdout.flush(), sys.stderr.flush()
        os._exit(1)  # JAX would wait for the other processes


@contextmanager
def locating_errors() -> Iterator[None]:
    """Turn an error raised by a user's code, or by a package that it called, into a ValueError with its place."""
    try:
        yield
    except Exception as error:
        frames = traceback.extract_tb(error.__traceback__)
        if not any(map(is_own, frames)) or Path(__file__).parents[1] in Path(frames[-1].filename).parents:
            raise
        raise ValueError(located(error)) from error


def _describe(error: OSError) -> str:
    if error.filename is None or error.strerror is None:
        return str(error)
    return f"Cannot use {error.filename}: {error.strerror}. Give another path."


def _tell_other_processes(error: Exception) -> None:
    """Tell the other processes of a distributed run why this one has ended."""
    if "rookery.base.processes" in sys.modules:
        from rookery.base import processes

        processes.report_failure(str(error))


@contextmanager
def without_nonfinite_warnings() -> Iterator[None]:
    """Hide the warning about values that are not finite; the command reports them in its last line."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", rk.NonFiniteWarning)
        yield


def writable(folder: Path, option: str = "--out") -> Path:
    """Return the folder; raise ValueError if files cannot be written into it. The folder is not created."""
    existing = folder
    while not existing.exists() and existing != existing.parent:
        existing = existing.parent
    if not existing.is_dir():
        raise ValueError(f"{option} must be a folder; {existing} is a file. Give another.")
    if not os.access(existing, os.W_OK | os.X_OK):
        raise ValueError(f"{option} must be a folder that may be written to; {existing} is not. Give another.")
    return folder


def folder_name(text: str) -> str:
    """Return the text with everything but letters, digits and dashes replaced by dashes.

    >>> folder_name("fedx.py:FedX on quadratic")
    'fedx-py-FedX-on-quadratic'
    """
    return re.sub(r"[^A-Za-z0-9-]+", "-", text)
