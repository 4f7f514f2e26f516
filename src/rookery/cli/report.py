"""`rookery report`: saved runs in one HTML page."""

from pathlib import Path
from typing import Annotated

import typer

from rookery.cli.program import AsJson, Command, Quiet, app, border, say


@app.command(cls=Command)
def report(
    runs: Annotated[
        list[Path],
        typer.Argument(
            help="Folders of `rookery run --out`, `Run.save` or `rookery reproduce`, JSON-lines files, or CSV files."
        ),
    ],
    out: Annotated[Path, typer.Option(help="The page.")] = Path("report.html"),
    title: Annotated[str | None, typer.Option(help="Its heading; the tasks' names if left out.")] = None,
    quiet: Quiet = False,
    json: AsJson = False,
) -> None:
    """Write runs into one HTML page that opens offline: curves, costs, settings, weights, a reproduction's claims."""
    from rookery import report as reports
    from rookery.report import html

    with border():
        html.write(runs, out, title)
        if json:
            print(reports.to_json({"report": str(out), "runs": [str(path) for path in runs]}))
        say(quiet, json, f"The report: {out}")
