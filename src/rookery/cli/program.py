"""The program itself: its start, how it speaks and how it refuses, and the options that several commands have."""

import hashlib
import os
import platform
import re
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from typer.core import TyperCommand, TyperGroup

import rookery as rk
from rookery.base.printable import printable

_LINE = 10_000  # characters of a complaint
# Each command: the module of this folder that adds it to `app`, and its line in `rookery --help`. JAX and most of the
# library are imported inside a command's function, so that its --help need not wait for them.
COMMANDS: dict[str, tuple[str, str]] = {
    "demo": ("demo", "Show what nesting is for, in three stories on bundled data, in about a minute."),
    "list": ("listing", "List what can be run; with a name, show its settings."),
    "new": ("new", "Write a file to start your own problem or algorithm from."),
    "check": ("check", "Check a problem before a run: curvature, derivatives, steps to try."),
    "explain": ("explain", "Show every exchange of a round, without running it."),
    "contract": ("contract", "Check a method of your own: engines, counts, checkpoints, clipping, precision."),
    "run": ("run", "Run one or several algorithms, tasks and seeds."),
    "tune": ("tune", "Search an algorithm's step sizes."),
    "compare": ("compare", "Compare saved runs in a table and a picture."),
    "report": ("report", "Write saved runs into one HTML page."),
    "reproduce": ("reproduce", "Reproduce a figure or a table of a paper, and check its claims."),
    "bench": ("reproduce", "Measure the speed of this machine on fixed work."),
    "federation": ("federation", "Set up a federation over a network."),
    "serve": ("serve", "Coordinate a run over a network."),
    "site": ("site", "Take part in a run over a network."),
    "audit": ("audit", "Verify a site's log, and count what the site has answered."),
    "flare": ("flare", "Run on a federation of NVIDIA FLARE."),
}


class Commands(TyperGroup):
    """The program, whose commands are imported when they are asked for."""

    def __init__(self, **given: Any) -> None:
        """Start with the commands' names and lines of help."""
        super().__init__(**given)
        self.loaded = self.commands
        self.commands = {name: TyperCommand(name, callback=None, help=line) for name, (_, line) in COMMANDS.items()}
        self.named_only = False

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """Return the command, imported unless its name and its line are all that is needed."""
        if cmd_name not in COMMANDS or self.named_only:
            return self.commands.get(cmd_name)
        import_module(f"rookery.cli.{COMMANDS[cmd_name][0]}")
        group: Any = typer.main.get_group(app)
        return group.loaded[cmd_name]

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Write the help, without importing any command."""
        self.named_only = True
        super().format_help(ctx, formatter)

    def shell_complete(self, ctx: Any, incomplete: str) -> Any:
        """Complete a command's name, without importing any command."""
        self.named_only = True
        return super().shell_complete(ctx, incomplete)


app = typer.Typer(
    cls=Commands,
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
    try:
        status = app(args=sys.argv[1:] or ["--help"], prog_name="rookery", standalone_mode=False)
    except Exception as error:
        if not hasattr(error, "format_message"):
            raise
        if error.format_message():  # empty where help was printed instead
            complain(error.format_message())
        status = 2
    sys.exit(status or 0)


class Command(TyperCommand):
    """A command whose arguments are refused in one line, too."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """The arguments, checked for values that are missing."""
        if ctx.resilient_parsing:  # a shell completes
            return super().parse_args(ctx, args)
        try:
            self._check_values(args)
            return super().parse_args(ctx, args)
        except Exception as error:
            if not isinstance(error, ValueError) and not hasattr(error, "format_message"):
                raise
            complain(error.format_message() if hasattr(error, "format_message") else str(error))
            raise typer.Exit(2) from None

    def invoke(self, ctx: Any) -> Any:
        """Run it, with compiled programs kept on disk."""
        if ctx.params.get("quiet") and ctx.params.get("json"):
            complain("--quiet and --json exclude each other: --json prints one JSON object and nothing else.")
            raise typer.Exit(2)
        if ctx.info_name != "bench":  # it measures compilation
            keep_compiled()
        return super().invoke(ctx)

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
    import jax

    from rookery.data.files import cache_dir

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
    except typer.Exit:
        raise
    except (ValueError, TypeError, OSError) as error:
        complain(_in_words(error) if isinstance(error, OSError) else str(error))
        _tell_other_processes(error)
        raise typer.Exit(2) from None
    except MemoryError as error:  # a round that the device has no room for says so, and what to do
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
        complain(f"{error} The run has ended; with --out, it goes on from its last checkpoint with --resume.")
        sys.stdout.flush(), sys.stderr.flush()
        os._exit(1)  # JAX would wait for the others


def _in_words(error: OSError) -> str:
    if error.filename is None or error.strerror is None:
        return str(error)
    return f"Cannot use {error.filename}: {error.strerror}. Give another path."


def _tell_other_processes(error: Exception) -> None:
    """Tell the other processes of a distributed run why this one has ended."""
    if "rookery.base.processes" in sys.modules:
        from rookery.base import processes

        processes.report_failure(str(error))


@contextmanager
def told_below() -> Iterator[None]:
    """Hide the warning about values that are not finite, where a line at the end of the command says the same."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", rk.NonFiniteWarning)
        yield


def complain(message: str) -> None:
    """One line on standard error; a list in the message keeps its lines."""
    lines = [printable(" ".join(part.split()), _LINE) for part in re.split(r"\n(?=- )", message)]
    print("rookery: " + "\n".join(lines), file=sys.stderr)


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
