"""`rookery demo`: show what nested methods are for."""

from pathlib import Path
from typing import Annotated

import typer

from rookery.cli.options import AsJson, Quiet
from rookery.cli.program import Command, app
from rookery.cli.terminal import complain, show, without_nonfinite_warnings, writable


@app.command(cls=Command)
def demo(
    out: Annotated[Path, typer.Option(help="Folder for the picture and the numbers.")] = Path("rookery-demo"),
    quiet: Quiet = False,
    json: AsJson = False,
) -> None:
    """Show what nested methods are for: three stories on handwritten digits, in about a minute."""
    from rookery.cli import demo_runs

    writable(out)
    with without_nonfinite_warnings():
        result = demo_runs.run_demo(out, progress=not (quiet or json))
    show(quiet, json, result.numbers(), result.table(), *result.lines(), f"The picture: {result.picture}")
    if result.stopped:
        complain(f"Runs stopped early: {'; '.join(result.stopped)}")
        raise typer.Exit(1)
