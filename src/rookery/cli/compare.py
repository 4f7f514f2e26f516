"""`rookery compare`: saved runs side by side."""

from pathlib import Path
from typing import Annotated, Any

import pandas as pd
import typer

from rookery import report
from rookery.cli.program import AsJson, Command, Quiet, app, border, say
from rookery.metrics import Direction, direction
from rookery.registry import find


@app.command(cls=Command)
def compare(
    runs: Annotated[list[Path], typer.Argument(help="Folders that `rookery run --out` wrote.")],
    by: Annotated[str, typer.Option(help="rounds, exchanges, bytes, samples or seconds.")] = "rounds",
    metric: Annotated[str | None, typer.Option(help="Which one; the first run's main metric if left out.")] = None,
    out: Annotated[Path, typer.Option(help="The picture.")] = Path("comparison.png"),
    quiet: Quiet = False,
    json: AsJson = False,
) -> None:
    """Show saved runs side by side: a table and a picture. Runs that differ in the seed alone share a line."""
    with border():
        by = find("measure", by, report.ACROSS)[0]
        saved = [report.read_run(folder) for folder in runs]
        for folder, (description, _) in zip(runs, saved, strict=True):
            lacking = {"task_settings", "hyperparameters", "seed", "cohort"} - description.keys()
            if lacking:
                raise ValueError(f"{folder} is not a run of `rookery run`: its run.json lacks {min(lacking)}.")
        common = [m for m in report.metrics(saved[0][1]) if all(m in history for _, history in saved)]
        if not common:
            raise ValueError("These runs have no metric in common.")
        asked = saved[0][0]["metric"] if metric is None else metric
        sign = asked[:1] if asked.startswith(("+", "-")) else ""
        goal = direction(sign + find("common metric", asked.removeprefix(sign), dict.fromkeys(common))[0])
        labels = report.labels([description for description, _ in saved])
        frame = pd.concat(
            report.across(history).assign(label=label, seed=description["seed"], run=str(folder))
            for label, folder, (description, history) in zip(labels, runs, saved, strict=True)
        )
        if out.suffix.lower() not in (".png", ".pdf", ".svg"):
            raise ValueError(f"--out {out}: a picture's name ends in .png, .pdf or .svg.")
        rows = pd.DataFrame([_row(own, goal) for _, own in frame.groupby("run", sort=False)])
        report.save(report.compared(frame, by, goal.signed), out)
        if json:
            print(report.to_json({"by": by, "metric": goal.name, "runs": rows.to_dict("records"), "picture": str(out)}))
        shown = rows.assign(bytes=rows["bytes"].map(report.size))
        tasks = ", ".join(dict.fromkeys(description["task"] for description, _ in saved))
        say(quiet, json, report.table(shown, f"{goal.name} on {tasks}"), f"The picture: {out}")


def _row(own: pd.DataFrame, goal: Direction) -> dict[str, Any]:
    last, values = own.iloc[-1], own[goal.name]
    return {
        "run": last["run"],
        "method": last["label"],
        "seed": int(last["seed"]),
        "last": float(values.iloc[-1]),
        "best": float(values.max() if goal.higher_is_better else values.min()),
        "rounds": int(last["round"]),
        "exchanges": int(last["exchanges"]),
        "bytes": int(last["bytes_up"] + last["bytes_down"]),
        "samples": int(last["samples"]),
        "seconds": float(last["seconds"]),
    }
