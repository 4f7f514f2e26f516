"""`rookery compare`: saved runs side by side."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rookery.cli.program import AsJson, Command, Quiet, app, border, say

if TYPE_CHECKING:
    import pandas as pd

    from rookery.language.metrics import Direction
    from rookery.report.html import Source


@app.command(cls=Command)
def compare(
    runs: Annotated[
        list[Path],
        typer.Argument(
            help="Folders of `rookery run --out`, `Run.save` or `rookery reproduce`, JSON-lines files, or CSV files."
        ),
    ],
    by: Annotated[
        str, typer.Option(help="rounds, exchanges, bytes, samples, gradients, products or seconds.")
    ] = "rounds",
    metric: Annotated[str | None, typer.Option(help="Which one; the first run's main metric if left out.")] = None,
    out: Annotated[Path, typer.Option(help="The picture.")] = Path("comparison.png"),
    quiet: Quiet = False,
    json: AsJson = False,
) -> None:
    """Compare saved runs in a table and a picture. Runs that differ in the seed alone share a line."""
    from rookery import report
    from rookery.cli.registry import find
    from rookery.language.metrics import direction
    from rookery.report import html

    with border():
        by = find("measure", "rounds" if by.strip().lower() == "round" else by, report.ACROSS)[0]
        sources, _ = html.read(runs)
        histories = [report.across(source.history) for source in sources]
        common = [name for name in report.metrics(sources[0].history) if all(name in own for own in histories)]
        common = [name for name in common if all(own[name].dtype.kind in "ifb" for own in histories)]
        if not common:
            raise ValueError("These runs have no metric in common.")
        lacking = [source.name for source, own in zip(sources, histories, strict=True) if by not in own]
        if lacking:
            raise ValueError(f"--by {by} needs runs that record {by}; {lacking[0]} does not.")
        asked = metric or next((own.metric for own in sources if own.metric and own.metric.lstrip("+-") in common), "")
        asked = asked or common[0]
        sign = asked[:1] if asked.startswith(("+", "-")) else ""
        name = sign + find("common metric", asked.removeprefix(sign), dict.fromkeys(common))[0]
        goal = direction(name, otherwise=False)
        if out.suffix.lower() not in (".png", ".pdf", ".svg"):
            raise ValueError(f"--out {out}: a picture's name ends in .png, .pdf or .svg.")
        frame, each, notes = gathered(sources, goal)
        tasks = list(dict.fromkeys(str(own.settings.get("task") or "") for own in sources))
        panels = [("", frame, goal.signed)]
        if len(tasks) > 1:
            parts = {task: frame[frame["task"] == task] for task in tasks}
            plain = lambda task, own: own.assign(label=own["label"].str.replace(f" on {task}", "", regex=False))
            panels = [(task, plain(task, own), goal.signed) for task, own in parts.items()]
        report.save(report.compared(panels, by), out)
        if json:
            print(report.to_json({"by": by, "metric": goal.name, "runs": each, "notes": notes, "picture": str(out)}))
        title = f"{goal.name} on {', '.join(tasks)}" if all(tasks) else goal.name
        say(quiet, json, lines(each, title), *notes, f"The picture: {out}")


def gathered(sources: Sequence[Source], goal: Direction) -> tuple[pd.DataFrame, list[dict[str, Any]], list[str]]:
    """Return all histories in one table, with a column for each measure; what each run came to; and notes.

    Runs of one label are averaged: of each, only the rounds count that all of them have, and a note says so.
    """
    import pandas as pd

    from rookery import report

    histories = [
        report.across(source.history).assign(
            label=source.label,
            seed=-1 if source.seed is None else source.seed,
            task=str(source.settings.get("task") or ""),
        )
        for source in sources
    ]
    notes = []
    for label in dict.fromkeys(source.label for source in sources):
        places = [k for k, source in enumerate(sources) if source.label == label]
        rounds = [{*histories[k]["round"]} for k in places]
        common = set.intersection(*rounds)
        if not common:
            raise ValueError(f"The runs of {label} must have a round in common; they have none. Compare them alone.")
        if common < set.union(*rounds):
            for k in places:
                histories[k] = histories[k][histories[k]["round"].isin(common)]
            notes.append(
                f"{label}: not all {len(places)} runs have the same rounds; the means are over those that all have, "
                f"up to round {max(common)}."
            )
    return (
        pd.concat(histories),
        [{"run": source.name, **_ended(own, goal)} for source, own in zip(sources, histories, strict=True)],
        notes,
    )


def _ended(own: pd.DataFrame, goal: Direction) -> dict[str, Any]:
    """Return what a run came to and what it cost; None for a cost that it does not record."""
    last, values = own.iloc[-1], own[goal.name]
    costs = {
        name: int(last[name]) if name in own else None for name in ("exchanges", "samples", "gradients", "products")
    }
    return {
        "method": last["label"],
        "seed": None if last["seed"] < 0 else int(last["seed"]),
        "last": float(values.iloc[-1]),
        "best": float(values.max() if goal.higher_is_better else values.min()),
        "rounds": int(last["round"]),
        **costs,
        "bytes": round(last["bytes"] * 1e6) if "bytes" in own else None,
        "seconds": float(last["seconds"]) if "seconds" in own else None,
    }


def lines(runs: list[dict[str, Any]], title: str) -> Any:
    """Return the runs as a table for the terminal: a row for each method, with means and standard errors."""
    import pandas as pd

    from rookery import report

    frame, rows = pd.DataFrame(runs), []
    several = len(frame) > frame["method"].nunique()
    for method, own in frame.groupby("method", sort=False):
        row = {"method": method, **({"runs": len(own)} if several else {"seed": own["seed"].iloc[0]})}
        row |= {
            name: report.mean_and_error(own[name].tolist()) for name in (("last",) if several else ("last", "best"))
        }
        for name in ("rounds", "exchanges", "bytes", "samples", "gradients", "products", "seconds"):
            known = own[name].dropna()
            show = report.size if name == "bytes" else report.number
            row[name] = (
                show(float(known.mean()) if name in ("bytes", "seconds") else round(known.mean()))
                if len(known)
                else "–"
            )
        rows.append(row)
    shown = pd.DataFrame(rows)
    if not several and frame["seed"].isna().all():
        shown = shown.drop(columns="seed")
    return report.table(shown, f"{title}; means ± standard errors over runs" if several else title)
