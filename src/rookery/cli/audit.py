"""`rookery audit`: a site's log, verified, and what it counts."""

from __future__ import annotations

import json as jsons
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from rookery.cli.program import AsJson, Command, app, border, complain, say

if TYPE_CHECKING:
    from rookery.engines.federation.audit import Counts, Found


@app.command(cls=Command)
def audit(
    folder: Annotated[Path, typer.Argument(help="The site's folder, as in `rookery site --folder`.")],
    policy: Annotated[Path | None, typer.Option(help="The site's policy, to see what is left of its limits.")] = None,
    json: AsJson = False,
) -> None:
    """Verify a site's audit log, and count what the site has answered; code 1 if the log is broken."""
    from rookery.engines.federation.audit import FILE, read
    from rookery.engines.federation.policy import Policy

    with border():
        path = folder / FILE
        if not path.exists() and not path.with_suffix(".head").exists():
            raise ValueError(f"FOLDER must be a site's folder with {FILE} in it; {folder} has none.")
        limits = {} if policy is None else Policy.read(policy).limits
        found, log = read(path)
        if json:
            print(jsons.dumps(_described(path, found, log, limits)))
        else:
            say(False, False, _verdict(found), _totals(log.counts, limits), *_runs(log.runs))
    if found.broken is not None:
        complain(f"{path} is not as it was written, from line {found.broken} on; what follows is not counted.")
        raise typer.Exit(1)


def _described(path: Path, found: Found, log: Any, limits: dict[str, int]) -> dict[str, Any]:
    runs = {name: asdict(own.counts) for name, own in log.runs.items()}
    told = {"lines": found.lines, "broken": found.broken, "torn": found.torn, "head": found.head}
    return {"log": str(path), **told, "counts": asdict(log.counts), "limits": limits, "runs": runs}


def _verdict(found: Found) -> str:
    text = f"{found.lines:,} lines, {'all as written' if found.broken is None else 'up to the broken one'}."
    if found.torn:
        text += " The last one is not complete: it is being written, or its reply was never sent."
    if not found.head:
        text += " There is no audit.head, so lines that were cut off at the end would not be noticed."
    return text


def _totals(counts: Counts, limits: dict[str, int]) -> Table:
    from rookery.engines.federation.policy import LIMITS

    table = Table("all runs", box=None, pad_edge=False)
    table.add_column("so far", justify="right")
    table.add_column("limit" if limits else "", justify="right")
    for name, count in asdict(counts).items():
        table.add_row(LIMITS.get(name, name), f"{count:,}", f"{limits[name]:,}" if name in limits else "")
    return table


def _runs(runs: dict[str, Any]) -> list[Table]:
    from rookery.base.printable import printable
    from rookery.engines.federation.audit import Counts
    from rookery.engines.federation.policy import LIMITS

    table = Table("run", box=None, pad_edge=False)
    for name in asdict(Counts()):
        table.add_column(LIMITS.get(name, name), justify="right")
    for run, own in runs.items():
        table.add_row(printable(run, 64), *(f"{count:,}" for count in asdict(own.counts).values()))
    return [table] if runs else []
