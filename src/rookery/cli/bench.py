"""`rookery bench`: measure the speed of this machine."""

from rookery.cli.options import AsJson, Quiet
from rookery.cli.program import Command, app
from rookery.cli.terminal import show


@app.command(cls=Command)
def bench(quiet: Quiet = False, json: AsJson = False) -> None:
    """Measure the speed of this machine on fixed work."""
    import pandas as pd

    from rookery import report
    from rookery.cli import speed

    result = speed.measure()
    values = pd.DataFrame({"": result.keys(), "value": report.plain(result).values()})
    show(quiet, json, result, report.table(values))
