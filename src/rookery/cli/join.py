"""`rookery join`: what joining a federation would be worth for each hospital of a table."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

import rookery as rk
from rookery.cli.options import AsJson, Quiet
from rookery.cli.program import Command, app
from rookery.cli.terminal import show, writable

if TYPE_CHECKING:
    import pandas as pd

_HEART: dict[str, Any] = {"by": "hospital", "label": "ill", "categories": ["chest_pain", "ecg"]}
_SPARSE = ["slope", "vessels", "thal"]  # missing for most patients outside Cleveland


@app.command(cls=Command)
def join(
    table: Annotated[str, typer.Argument(help="A CSV or Parquet file; or heart, the bundled heart-disease table.")],
    by: Annotated[str | None, typer.Option(help="The column with the hospital's name.")] = None,
    label: Annotated[str | None, typer.Option(help="The column with the class to predict.")] = None,
    time: Annotated[
        str | None, typer.Option(help="For survival, instead of --label: the column with the time observed.")
    ] = None,
    event: Annotated[
        str | None, typer.Option(help="The column that says how it ended: 1 if the event was seen, 0 if censored.")
    ] = None,
    positive: Annotated[
        str | None,
        typer.Option(help="Its value that counts as positive. Default: the last of two; of more, name one."),
    ] = None,
    splits: Annotated[int, typer.Option(help="How many times the rows are split.")] = 20,
    metric: Annotated[
        str | None,
        typer.Option(
            help="What the advice refers to: accuracy (default), balanced_accuracy, auc, brier or calibration; with "
            "times, concordance."
        ),
    ] = None,
    drop: Annotated[list[str] | None, typer.Option(help="A column to leave out. Repeat it for more.")] = None,
    category: Annotated[
        list[str] | None,
        typer.Option(help="A column of numbers that stand for categories. Repeat it for more."),
    ] = None,
    seed: Annotated[int, typer.Option(help="The source of the splits.")] = 0,
    out: Annotated[
        Path | None, typer.Option(help="Folder for the page, the picture and the tables. Default: nothing is written.")
    ] = None,
    quiet: Quiet = False,
    json: AsJson = False,
) -> None:
    """Check before you join: compare each hospital's own model with what a federation would give it."""
    from rookery.run.worth.result import check_folder

    if out is not None:
        check_folder(writable(out))
    rows: Any = table
    survival = time is not None or event is not None
    chosen: dict[str, Any] = {"by": by, "label": label, "categories": category or []}
    if table == "heart":
        defaults = {name: None if survival and name == "label" else default for name, default in _HEART.items()}
        rows, chosen = _heart(), {name: chosen[name] or default for name, default in defaults.items()}
    for name in ("by",) if survival else ("by", "label"):
        if chosen[name] is None:
            raise ValueError(f"--{name} must name a column of the table; got none. Give --{name} COLUMN.")
    result = rk.worth(
        rows,
        **chosen,
        time=time,
        event=event,
        positive=positive,
        metric=metric,
        splits=splits,
        drop=drop or [],
        seed=seed,
        progress=False if quiet or json else None,
    )
    page = None if out is None else result.save(out)
    data = {
        "headline": result.headline,
        "advice": result.advice,
        "other_metrics": result.other_metrics,
        "metric": result.metric,
        "table": result.table.to_dict("records"),
        "weights": result.weights.to_dict("index"),
        "notes": result.notes,
        "settings": result.settings,
        "page": page,
    }
    show(quiet, json, data, str(result), *([] if page is None else [f"\nThe page: {page}"]))


def _heart() -> pd.DataFrame:
    """Return the complete rows of the bundled table, without the three columns that most patients lack."""
    from rookery.data import heart

    return heart.table().drop(columns=_SPARSE).dropna()
