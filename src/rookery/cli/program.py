"""The program `rookery`: its commands, imported when they are used, and its entry point."""

import difflib
import re
import sys
from importlib import import_module
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

import rookery as rk
from rookery.cli.compilation_cache import keep_compiled
from rookery.cli.terminal import complain, errors_in_one_line, locating_errors

# Each command: the module of this folder that adds it to `app`, and its line in `rookery --help`. JAX and most of the
# library are imported inside a command's function, so that --help is fast.
COMMANDS: dict[str, tuple[str, str]] = {
    "demo": ("demo", "Show what nested methods are for: three stories on bundled data, in about a minute."),
    "list": ("listing", "List algorithms, tasks, experiments and data sets; or the settings of one."),
    "new": ("new", "Write a file to start your own problem or algorithm from."),
    "check": ("check", "Check a problem before a run: curvature, derivatives, steps to try."),
    "join": ("join", "Check before you join: what a federation would be worth for each hospital of a table."),
    "explain": ("explain", "Show every exchange of a round, without running it."),
    "contract": ("contract", "Check your own method: engines, counts, checkpoints, clipping, precision."),
    "run": ("run", "Run one or several algorithms, tasks and seeds."),
    "tune": ("tune", "Search an algorithm's step sizes."),
    "compare": ("compare", "Compare saved runs in a table and a picture."),
    "report": ("report", "Write saved runs into one HTML page."),
    "reproduce": ("reproduce", "Reproduce a figure or a table of a paper, and check its claims."),
    "bench": ("bench", "Measure the speed of this machine on fixed work."),
    "federation": ("federation", "Set up a federation over a network."),
    "serve": ("serve", "Coordinate a run over a network."),
    "site": ("site", "Take part in a run over a network."),
    "audit": ("audit", "Verify a site's log, and count what the site has answered."),
    "flare": ("flare", "Run on an NVIDIA FLARE federation."),
}


class Commands(TyperGroup):
    """The group of all commands, which imports a command's module when it is used."""

    def __init__(self, **attributes: Any) -> None:
        """Start with the commands' names and lines of help."""
        super().__init__(**attributes)
        self.loaded = self.commands
        self.commands = {name: TyperCommand(name, callback=None, help=line) for name, (_, line) in COMMANDS.items()}
        self.names_only = False

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """Return the command; import it unless its name and its line of help suffice."""
        if cmd_name not in COMMANDS or self.names_only:
            return self.commands.get(cmd_name)
        import_module(f"rookery.cli.{COMMANDS[cmd_name][0]}")
        group: Any = typer.main.get_group(app)
        return group.loaded[cmd_name]

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Find the command; suggest the nearest one, which older versions of typer don't."""
        try:
            return super().resolve_command(ctx, args)
        except Exception as error:
            message, near = getattr(error, "message", ""), difflib.get_close_matches(args[0], COMMANDS, 1)
            if message.startswith("No such command") and near and "Did you mean" not in message:
                error.message = f"{message} Did you mean {near[0]!r}?"  # type: ignore[attr-defined]
            raise

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Write the help without importing any command."""
        self.names_only = True
        super().format_help(ctx, formatter)

    def shell_complete(self, ctx: Any, incomplete: str) -> Any:
        """Complete a command's name without importing any command."""
        self.names_only = True
        return super().shell_complete(ctx, incomplete)


app = typer.Typer(
    cls=Commands,
    help="Federated nested optimization: bilevel, minimax and compositional problems whose data stays with clients. "
    "Compiled programs are kept in the user's cache folder; set ROOKERY_CACHE=off to keep none.",
    pretty_exceptions_enable=False,
)


class Command(TyperCommand):
    """A command that refuses bad arguments with one line and exit code 2."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse the arguments."""
        if ctx.resilient_parsing:  # shell completion
            return super().parse_args(ctx, args)
        words = [*args]  # typer consumes args
        try:
            self._check_values(words)
            return super().parse_args(ctx, args)
        except Exception as error:
            if not isinstance(error, ValueError) and not hasattr(error, "format_message"):
                raise
            complain(str(error) if isinstance(error, ValueError) else _parse_error(error, ctx, words))
            raise typer.Exit(2) from None

    def invoke(self, ctx: Any) -> Any:
        """Run the command, with compiled programs kept on disk and errors reported in one line."""
        if ctx.params.get("quiet") and ctx.params.get("json"):
            complain(
                "--quiet and --json must not be given together, because --json prints one JSON object and nothing else."
            )
            raise typer.Exit(2)
        if ctx.info_name not in ("bench", "list"):  # bench measures compilation; list compiles nothing
            keep_compiled()
        with errors_in_one_line(), locating_errors():
            return super().invoke(ctx)

    def _check_values(self, args: list[str]) -> None:
        """Raise ValueError if an option's value is missing, empty, or another option."""
        options = {name: param for param in self.params for name in param.opts if name.startswith("-")}
        for word, following in zip(args, [*args[1:], None], strict=False):
            if word == "--":
                return
            name, sign, value = word.partition("=")
            if name not in options or getattr(options[name], "is_flag", False):
                continue
            if following in options and not sign:
                raise ValueError(f"{name} must have a value; got {following}, another option.")
            if (value if sign else following) == "":
                raise ValueError(f"{name} must have a value; got an empty one. Give a value, or leave it out.")


def _parse_error(error: Any, ctx: Any, args: list[str]) -> str:
    """Return typer's message; for a number that cannot be read, our own."""
    kind = re.search("a valid (integer|number|float)", getattr(error, "message", ""))  # the wording differs by version
    if kind is None or error.param is None:
        return error.format_message()
    text = (ctx.default_map or {}).get(error.param.name)
    for word, following in zip(args, [*args[1:], None], strict=False):
        name, sign, value = word.partition("=")
        if name in error.param.opts:
            text = value if sign else following
    return f"{error.param.opts[0]} must be {'an integer' if kind[1] == 'integer' else 'a number'}; got {text!r}."


def main() -> None:
    """Run the program; what typer refuses is reported in one line, too."""
    try:
        status = app(args=sys.argv[1:] or ["--help"], prog_name="rookery", standalone_mode=False)
    except Exception as error:
        if not hasattr(error, "format_message"):
            raise
        if error.format_message():  # empty if help was printed instead
            complain(error.format_message())
        status = 2
    sys.exit(status or 0)


def _print_version(wanted: bool) -> None:
    if wanted:
        print(rk.__version__)
        raise typer.Exit()


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Options of the program itself; the help text is that of `app`."""
