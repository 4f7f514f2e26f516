"""`rookery audit`: verify a site's log, and count what it records."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from rookery.cli.options import AsJson
from rookery.cli.program import Command, app
from rookery.cli.terminal import complain, show

if TYPE_CHECKING:
    from rookery.engines.federation.audit import Audit, Counts, Found
    from rookery.engines.federation.heads import Compared
    from rookery.engines.federation.policy import Policy


class Verify(Command):
    """The command, which may also be written `rookery audit verify FOLDER`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse the arguments."""
        also = args[:1] == ["verify"] and len(args) > 1 and not args[1].startswith("-")
        return super().parse_args(ctx, args[1:] if also else args)


@app.command(cls=Verify)
def audit(
    folder: Annotated[Path, typer.Argument(help="The site's folder, as in `rookery site --folder`; or its log.")],
    policy: Annotated[Path | None, typer.Option(help="The site's policy, to show its limits.")] = None,
    heads: Annotated[
        Path | None,
        typer.Option(help="The coordinator's heads.jsonl, to compare with. Default: the receipts beside the log."),
    ] = None,
    ca: Annotated[Path | None, typer.Option(help="ca.pem of a kit, to check the signatures of heads.")] = None,
    site: Annotated[str | None, typer.Option(help="The site's name, if there are heads of several.")] = None,
    json: AsJson = False,
) -> None:
    """Verify a site's audit log, and count what the site has answered. Exit code 1 if the log is broken or cut."""
    from rookery.engines.federation.audit import FILE, RECEIPTS, read
    from rookery.engines.federation.policy import Policy

    path = folder if folder.is_file() else folder / FILE
    heads = path.with_suffix(RECEIPTS) if heads is None and path.with_suffix(RECEIPTS).exists() else heads
    if not path.exists() and not path.with_suffix(".head").exists():
        raise ValueError(f"FOLDER must be a site's folder with {FILE} in it; {folder} has none.")
    rules = Policy() if policy is None else Policy.read(policy)
    limits = rules.limits
    found, log = read(path)
    privacy = _privacy(log, rules)
    compared = None if heads is None else _compared(path, heads, ca, site)
    data = {
        "log": path, "lines": found.lines, "broken": found.broken, "torn": found.torn, "head": found.head,
        "counts": asdict(log.counts), "limits": limits,
        "runs": {name: asdict(run.counts) | privacy.get("runs", {}).get(name, {}) for name, run in log.runs.items()},
        **({"privacy": privacy["all"]} if privacy else {}),
        **({} if compared is None else {"heads": {"file": heads, **compared._asdict()}}),
    }  # fmt: skip
    spent = _spent(privacy)
    verdict = [_verdict(found), *([] if compared is None or compared.wrong else [_agrees(compared, heads)])]
    show(False, json, data, *verdict, _totals(log.counts, limits), *spent, *_runs(log.runs, privacy))
    if found.broken is not None:
        complain(f"{path} differs from what was written, from line {found.broken} on; the rest is not counted.")
    if compared is not None and compared.wrong:
        complain(f"{path} differs from what {heads} says of it: {compared.wrong}.")
    if found.broken is not None or (compared is not None and compared.wrong):
        raise typer.Exit(1)


def _compared(path: Path, heads: Path, ca: Path | None, site: str | None) -> Compared:
    from rookery.engines.federation.heads import compare

    try:
        return compare(path, heads, None if ca is None else ca.read_bytes(), site)
    except OSError as error:
        raise ValueError(f"--ca must be ca.pem of a kit; {ca} can't be read ({error.strerror}).") from None
    except ImportError as error:
        raise ValueError(f"--ca needs cryptography ({error}). Run pip install 'rookery[federation]'.") from None


def _agrees(compared: Compared, heads: Path | None) -> str:
    signed = "with valid signatures" if compared.signed else "whose signatures were not checked: give --ca"
    return f"It has all {compared.lines:,} lines of the {compared.heads:,} heads in {heads}, {signed}."


def _verdict(found: Found) -> str:
    text = f"{found.lines:,} lines, {'all as written' if found.broken is None else 'up to the broken one'}."
    if found.torn:
        text += " The last one is incomplete: it is being written, or its reply was never sent."
    if not found.head:
        text += " There is no audit.head, so lines cut off at the end would not be noticed."
    return text


def _privacy(log: Audit, rules: Policy) -> dict[str, Any]:
    """Return what the site has spent, in total and by run; empty if no run was private for each record."""
    deltas = [run.delta for run in log.runs.values() if run.delta is not None]
    if not deltas:
        return {}
    delta = min(deltas) if rules.delta is None else rules.delta
    bare = [name for name, run in log.runs.items() if run.delta is None and run.counts.exchanges]
    total = {"epsilon": log.spending.epsilon(delta), "delta": delta, "budget": rules.epsilon, "not private": bare}
    private = {name: run for name, run in log.runs.items() if run.delta is not None}
    return {"all": total, "runs": {name: {"epsilon": run.spending.epsilon(delta)} for name, run in private.items()}}


def _spent(privacy: dict[str, Any]) -> list[str]:
    if not privacy:
        return []
    total = privacy["all"]
    budget = "" if total["budget"] is None else f" of {total['budget']:g}"
    text = f"Privacy of each record: ε = {total['epsilon']:.3g}{budget} at δ = {total['delta']:g} is spent."
    count = len(total["not private"])
    if count:
        text += f" It does not cover {count} run{'s that were' if count > 1 else ' that was'} not private."
    return [text]


def _totals(counts: Counts, limits: dict[str, int]) -> Table:
    from rookery.engines.federation.policy import LIMITS

    table = Table("all runs", box=None, pad_edge=False)
    table.add_column("so far", justify="right")
    table.add_column("limit" if limits else "", justify="right")
    for name, count in asdict(counts).items():
        table.add_row(LIMITS.get(name, name), f"{count:,}", f"{limits[name]:,}" if name in limits else "")
    return table


def _runs(runs: dict[str, Any], privacy: dict[str, Any]) -> list[Table]:
    from rookery.base.printable import printable
    from rookery.engines.federation.audit import Counts
    from rookery.engines.federation.policy import LIMITS

    table = Table("run", box=None, pad_edge=False)
    for name in asdict(Counts()):
        table.add_column(LIMITS.get(name, name), justify="right")
    if privacy:
        table.add_column("ε", justify="right")
    for name, run in runs.items():
        spent = privacy.get("runs", {}).get(name)
        last = [] if not privacy else ["not private" if spent is None else f"{spent['epsilon']:.3g}"]
        table.add_row(printable(name, 64), *(f"{count:,}" for count in asdict(run.counts).values()), *last)
    return [table] if runs else []
