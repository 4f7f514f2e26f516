"""The program itself: its start, how it speaks and how it refuses, and the options that several commands have."""

import hashlib
import os
import platform
import re
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import jax
import typer
from rich.console import Console
from typer.core import TyperCommand

import rookery as rk
from rookery import hosts
from rookery.data.files import cache_dir

app = typer.Typer(
    help="Federated nested optimization: bilevel, minimax and compositional problems whose data stays with clients. "
    "Compiled programs are kept in the user's cache folder; ROOKERY_CACHE=off keeps none.",
    pretty_exceptions_enable=False,
)
Out = Annotated[Path | None, typer.Option(help="Folder to write to.")]
Quiet = Annotated[bool, typer.Option("--quiet", help="Print nothing but errors.")]
AsJson = Annotated[
    bool, typer.Option("--json", help="Print one JSON object to standard output, and nothing else there.")
]


def main() -> None:
    """The entry point. What typer itself refuses is told in one line too."""
    if sys.argv[1:2] != ["bench"]:  # it measures compilation
        keep_compiled()
    try:
        status = app(args=sys.argv[1:] or ["--help"], prog_name="rookery", standalone_mode=False)
    except Exception as error:
        if not hasattr(error, "format_message"):
            raise
        complain(error.format_message())
        status = 2
    sys.exit(status or 0)


class Command(TyperCommand):
    """A command whose arguments are refused in one line, too."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """The arguments, checked for values that are missing."""
        if ctx.resilient_parsing:  # a shell completes
            return super().parse_args(ctx, args)
        with border():
            self._check_values(args)
            try:
                return super().parse_args(ctx, args)
            except Exception as error:
                if not hasattr(error, "format_message"):
                    raise
                raise ValueError(error.format_message()) from None

    def _check_values(self, args: list[str]) -> None:
        """Raise ValueError if an option is followed by another one in the place of its value, or by nothing."""
        options = {name: param for param in self.params for name in param.opts if name.startswith("-")}
        for word, after in zip(args, [*args[1:], None], strict=False):
            if word == "--":
                return
            name, sign, value = word.partition("=")
            if name not in options or getattr(options[name], "is_flag", False):
                continue
            if after in options and not sign:
                raise ValueError(f"{name} needs a value, and {after} is another option.")
            if (value if sign else after) == "":
                raise ValueError(f"{name} is empty; give a value, or leave it out.")


def keep_compiled() -> None:
    """Let JAX keep compiled programs on disk, so that a command compiles nothing a second time.

    A variable of JAX's own, such as JAX_COMPILATION_CACHE_DIR, wins; ROOKERY_CACHE=off leaves all of JAX's settings.
    """
    if os.environ.get("ROOKERY_CACHE", "").lower() == "off":
        return
    settings: dict[str, Any] = {
        "jax_persistent_cache_min_compile_time_secs": 0.0,
        "jax_persistent_cache_min_entry_size_bytes": -1,
    }
    if "JAX_COMPILATION_CACHE_DIR" not in os.environ:
        try:
            folder = cache_dir() / "jax" / _processor()
            folder.mkdir(parents=True, exist_ok=True)
        except (OSError, RuntimeError):  # the second: there is no home
            return
        if not os.access(folder, os.W_OK):
            return
        settings["jax_compilation_cache_dir"] = str(folder)
    for name, value in settings.items():
        if name.upper() not in os.environ:
            jax.config.update(name, value)


def _processor() -> str:
    """A name of this kind of processor: a program compiled for one may not run on another that shares the folder."""
    cpuinfo = Path("/proc/cpuinfo")
    text = cpuinfo.read_text() if cpuinfo.exists() else platform.processor()
    told = sorted(set(re.findall(r"^(?:model name|flags|Features)\b.*", text, re.MULTILINE))) or text
    return f"{platform.machine()}-{hashlib.sha256(repr(told).encode()).hexdigest()[:8]}"


@contextmanager
def border() -> Iterator[None]:
    """Bad input ends in one line and code 2; numbers that are not finite, in one line and code 1."""
    try:
        yield
    except rk.NonFiniteError as error:
        hosts.failed(str(error))
        complain(f"The run broke down: {error}. Smaller steps may help.")
        raise typer.Exit(1) from None
    except (ValueError, TypeError, OSError) as error:
        complain(str(error))
        hosts.failed(str(error))
        raise typer.Exit(2) from None
    except hosts.HostError as error:
        complain(f"{error} The run has ended; with --out, it goes on from its last checkpoint with --resume.")
        sys.stdout.flush(), sys.stderr.flush()
        os._exit(1)  # JAX would wait for the others


@contextmanager
def told_below() -> Iterator[None]:
    """Hide the warning about values that are not finite, where a line at the end of the command says the same."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", rk.NonFiniteWarning)
        yield


def complain(message: str) -> None:
    """One line on standard error."""
    print("rookery: " + " ".join(message.split()), file=sys.stderr)


def say(quiet: bool, as_json: bool, *what: Any) -> None:
    """Tables and lines for a person to read."""
    if not (quiet or as_json):
        console = Console(width=None if sys.stdout.isatty() else 120)
        for item in what:
            console.print(item, highlight=False, markup=False, soft_wrap=isinstance(item, str))


def writable(folder: Path, option: str = "--out") -> Path:
    """The folder, if files can be written into it; it is not made yet."""
    there = folder
    while not there.exists() and there != there.parent:
        there = there.parent
    if not there.is_dir():
        raise ValueError(f"{option} {folder}: {there} is a file; give a folder.")
    if not os.access(there, os.W_OK | os.X_OK):
        raise ValueError(f"{option} {folder}: {there} may not be written to; give another folder.")
    return folder


def _version(asked: bool) -> None:
    if asked:
        print(rk.__version__)
        raise typer.Exit()


@app.callback()
def options(
    version: Annotated[bool, typer.Option("--version", callback=_version, is_eager=True, help="Print it.")] = False,
) -> None:
    """Options of the program itself; the help text is that of `app`."""
