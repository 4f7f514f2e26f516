"""`rookery demo`."""

from pathlib import Path
from typing import Annotated

import typer

from rookery.cli.program import AsJson, Command, Quiet, app, border, complain, say, told_below, writable


@app.command(cls=Command)
def demo(
    out: Annotated[Path, typer.Option(help="Folder for the picture and the numbers.")] = Path("rookery-demo"),
    quiet: Quiet = False,
    json: AsJson = False,
) -> None:
    """What nesting is for, in three stories on handwritten digits: a table and a picture, in about a minute."""
    from rookery import report
    from rookery.cli import demonstration

    with border():
        writable(out)
        with told_below():
            result = demonstration.demo(out, progress=not (quiet or json))
        if json:
            print(report.to_json(result.numbers()))
        say(quiet, json, result.table(), *result.lines(), f"The picture: {result.picture}")
        if result.stopped:
            complain(f"Runs stopped early: {'; '.join(result.stopped)}")
            raise typer.Exit(1)
