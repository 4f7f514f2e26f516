"""`rookery report`: write saved runs into one HTML page."""

from pathlib import Path
from typing import Annotated

import typer

from rookery.cli.options import AsJson, Quiet, Runs
from rookery.cli.program import Command, app
from rookery.cli.terminal import show


@app.command(cls=Command)
def report(
    runs: Runs,
    out: Annotated[Path, typer.Option(help="The page.")] = Path("report.html"),
    title: Annotated[str | None, typer.Option(help="Its heading. Default: the tasks' names.")] = None,
    quiet: Quiet = False,
    json: AsJson = False,
) -> None:
    """Write runs into one HTML page that opens offline: curves, costs, settings, weights, a reproduction's claims."""
    from rookery.report import html

    html.write(runs, out, title)
    show(quiet, json, {"report": str(out), "runs": [str(path) for path in runs]}, f"The report: {out}")
