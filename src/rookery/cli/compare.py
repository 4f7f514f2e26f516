"""`rookery compare`: compare saved runs in a table and a picture."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rookery.cli.lookup import find
from rookery.cli.options import AsJson, Quiet, Runs
from rookery.cli.program import Command, app
from rookery.cli.terminal import show

if TYPE_CHECKING:
    import pandas as pd

    from rookery.language.metrics import Direction
    from rookery.report.html import Source


@app.command(cls=Command)
def compare(
    runs: Runs,
    by: Annotated[
        str, typer.Option(help="rounds, exchanges, bytes, samples, gradients, products, seconds, clock or epsilon.")
    ] = "rounds",
    metric: Annotated[str | None, typer.Option(help="The metric. Default: the first run's main metric.")] = None,
    out: Annotated[Path, typer.Option(help="The picture.")] = Path("comparison.png"),
    quiet: Quiet = False,
    json: AsJson = False,
) -> None:
    """Compare saved runs in a table and a picture. Runs that differ only in the seed share a line."""
    from rookery import report
    from rookery.report import html

    by = find("measure", "rounds" if by.strip().lower() == "round" else by, report.ACROSS)[0]
    sources, _ = html.read(runs)
    goal = _common_metric(sources, metric, by)
    if out.suffix.lower() not in (".png", ".pdf", ".svg"):
        raise ValueError(f"--out must end in .png, .pdf or .svg; got {out}.")
    frame, summaries, notes = collect(sources, goal)
    tasks = list(dict.fromkeys(str(source.settings.get("task") or "") for source in sources))
    panels = [("", frame, goal.signed)]
    if len(tasks) > 1:
        panels = []
        for task in tasks:
            part = frame[frame["task"] == task]
            labels = part["label"].str.replace(f" on {task}", "", regex=False)
            panels.append((task, part.assign(label=labels), goal.signed))
    report.save(report.compared(panels, by), out)
    data = {"by": by, "metric": goal.name, "runs": summaries, "notes": notes, "picture": str(out)}
    title = f"{goal.name} on {', '.join(tasks)}" if all(tasks) else goal.name
    show(quiet, json, data, comparison_table(summaries, title), *notes, f"The picture: {out}")


def _common_metric(sources: Sequence[Source], metric: str | None, by: str) -> Direction:
    """Return the metric to compare: the one given, or the first run's main metric that all runs have."""
    from rookery import report
    from rookery.language.metrics import direction

    histories = [report.across(source.history) for source in sources]
    numeric = lambda name: all(name in history and history[name].dtype.kind in "ifb" for history in histories)
    common = [name for name in report.metrics(sources[0].history) if numeric(name)]
    if not common:
        raise ValueError("The runs must have a metric in common; they have none. Compare runs of one task.")
    without = [source.name for source, history in zip(sources, histories, strict=True) if by not in history]
    if without:
        raise ValueError(f"--by {by} needs runs that record {by}; {without[0]} does not. Leave that run out.")
    main = [source.metric for source in sources if source.metric and source.metric.lstrip("+-") in common]
    wanted = metric or (main or common)[0]
    sign = wanted[:1] if wanted.startswith(("+", "-")) else ""
    name = find("common metric", wanted.removeprefix(sign), dict.fromkeys(common))[0]
    return direction(sign + name, otherwise=False)


def collect(sources: Sequence[Source], goal: Direction) -> tuple[pd.DataFrame, list[dict[str, Any]], list[str]]:
    """Return all histories in one table with a column for each measure, a summary of each run, and notes.

    Runs with the same label are averaged over the rounds that all of them have; a note says if their rounds differ.
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
            raise ValueError(
                f"The runs of {label} must have a round in common; they have none. Compare them separately."
            )
        if common < set.union(*rounds):
            for k in places:
                histories[k] = histories[k][histories[k]["round"].isin(common)]
            notes.append(
                f"{label}: not all {len(places)} runs have the same rounds; the means are over those that all have, "
                f"up to round {max(common)}."
            )
    summaries = [
        {"run": source.name, **_summary(history, goal)} for source, history in zip(sources, histories, strict=True)
    ]
    return pd.concat(histories), summaries, notes


def _summary(history: pd.DataFrame, goal: Direction) -> dict[str, Any]:
    """Return a run's result and costs; None for a cost that it does not record."""
    last, values = history.iloc[-1], history[goal.name]
    counts = ("exchanges", "samples", "gradients", "products")
    return {
        "method": last["label"],
        "seed": None if last["seed"] < 0 else int(last["seed"]),
        "last": float(values.iloc[-1]),
        "best": float(values.max() if goal.higher_is_better else values.min()),
        "rounds": int(last["round"]),
        **{name: int(last[name]) if name in history else None for name in counts},
        "bytes": round(last["bytes"] * 1e6) if "bytes" in history else None,
        "seconds": float(last["seconds"]) if "seconds" in history else None,
        "clock": float(last["clock"]) if "clock" in history else None,
        "epsilon": float(last["epsilon"]) if "epsilon" in history else None,
    }


def comparison_table(summaries: list[dict[str, Any]], title: str) -> Any:
    """Return the runs as a table for the terminal: a row for each method, with means and standard errors."""
    import pandas as pd

    from rookery import report

    frame, rows = pd.DataFrame(summaries), []
    several = len(frame) > frame["method"].nunique()
    for method, runs in frame.groupby("method", sort=False):
        row = {"method": method, **({"runs": len(runs)} if several else {"seed": runs["seed"].iloc[0]})}
        for name in ("last",) if several else ("last", "best"):
            row[name] = report.mean_and_error(runs[name].tolist())
        timed = ("clock",) if frame["clock"].notna().any() else ()
        for name in ("rounds", "exchanges", "bytes", "samples", "gradients", "products", "seconds", *timed):
            values = runs[name].dropna()
            mean = values.mean() if len(values) else None
            if mean is None:
                row[name] = "–"
            elif name == "bytes":
                row[name] = report.size(float(mean))
            else:
                row[name] = report.number(float(mean) if name in ("seconds", "clock") else round(mean))
        rows.append(row)
    shown = pd.DataFrame(rows)
    if frame["epsilon"].notna().any():
        spent = frame.groupby("method", sort=False)["epsilon"].max()
        shown.insert(3, "ε", ["none" if pd.isna(value) else report.number(float(value)) for value in spent])
    if not several and frame["seed"].isna().all():
        shown = shown.drop(columns="seed")
    return report.table(shown, f"{title}; means ± standard errors over runs" if several else title)
