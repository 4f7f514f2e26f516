"""`rookery reproduce`: reproduce a published figure or table."""

import json as decode
from pathlib import Path
from typing import Annotated

import typer

from rookery.cli.lookup import find
from rookery.cli.options import AsJson, Quiet
from rookery.cli.program import Command, app
from rookery.cli.terminal import show, writable


@app.command(cls=Command)
def reproduce(
    experiment: Annotated[str, typer.Argument(help="See `rookery list experiments`.")],
    quick: Annotated[bool, typer.Option("--quick", help="Run the same code, scaled down to minutes or less.")] = False,
    out: Annotated[
        Path | None, typer.Option(help="Folder to write to. Default: runs/EXPERIMENT or runs/EXPERIMENT-quick.")
    ] = None,
    seeds: Annotated[int | None, typer.Option(help="The number of seeds; the experiment has a default.")] = None,
    data_dir: Annotated[Path | None, typer.Option(help="The folder that holds the data sets.")] = None,
    quiet: Quiet = False,
    json: AsJson = False,
) -> None:
    """Reproduce a figure or a table of a paper: numbers, a picture, and a verdict on each claim."""
    import pandas as pd

    from rookery import experiments, report
    from rookery.experiments.machinery.claims import REPRODUCED

    name, found = find("experiment", experiment, experiments.EXPERIMENTS)
    if seeds is not None and seeds < 1:
        raise ValueError(f"--seeds must be an integer of at least 1; got {seeds}.")
    if data_dir is not None and not data_dir.is_dir():
        raise ValueError(f"--data-dir must be a folder that exists; got {data_dir}.")
    folder = writable(out or Path("runs") / (f"{name}-quick" if quick else name))
    if out is None and found.family is not None:  # experiments of a family share their runs there
        (folder.parent / f"{found.family}-runs").mkdir(parents=True, exist_ok=True)
    folder = experiments.reproduce(name, folder, quick, seeds, data_dir, not (quiet or json))
    if quiet:
        return
    claims = decode.loads((folder / "claims.json").read_text(encoding="utf-8"))
    rows = [{"claim": c["claim"], "where": c["where"], "verdict": c["verdict"]} for c in claims]
    held = sum(c["verdict"] == REPRODUCED for c in claims)
    verdict = f"{held} of {len(claims)} claims reproduced."
    if quick:
        verdict += " Scaled down: this checks the code, not the paper."
    data = {"experiment": name, "quick": quick, "out": folder, "claims": claims}
    show(False, json, data, report.table(pd.DataFrame(rows), name), verdict, f"Written to {folder}")
