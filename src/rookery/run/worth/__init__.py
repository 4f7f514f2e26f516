"""`worth`: what joining a federation is worth for each hospital, before any model is shipped."""

import sys
from collections.abc import Sequence
from typing import Any

import numpy as np

from rookery.base.arguments import check_seed, is_integer, nearest
from rookery.run.progress import progress_bar
from rookery.run.worth import judging, methods, metrics
from rookery.run.worth.designs import site
from rookery.run.worth.hospitals import TEST, VALIDATION, Federation, federation, split
from rookery.run.worth.metrics import METRICS, SURVIVAL_METRICS
from rookery.run.worth.result import Worth

__all__ = ["Worth", "worth"]


def worth(
    table: Any,
    by: Any = None,
    label: Any = None,
    *,
    time: Any = None,
    event: Any = None,
    positive: Any = None,
    metric: str | None = None,
    splits: int = 20,
    drop: Sequence[str] = (),
    categories: Sequence[str] = (),
    seed: int = 0,
    progress: bool | None = None,
) -> Worth:
    """Compare what each hospital gets alone with what it gets from a federation, on repeated splits of a table.

    All models are logistic regressions or, with times, Cox regressions. In every split, a third of a hospital's rows
    are for tests. Of its training rows, 30 % serve to choose penalties and other settings; the chosen model is then
    trained on all training rows. Missing values are filled with medians, and columns standardised, by the hospital's
    own training rows.

    Arguments:
        table: a pandas DataFrame, a path to a CSV or Parquet file, {name: array}, or clients from
            `Clients.from_frame(label=...)`, whose rows at all levels are split anew.
        by: the column with the hospital's name. Leave it out for clients.
        label: the column with the class to predict. Leave it out for clients, and for times.
        time: for survival, instead of a label: the column with the time that a patient was observed.
        event: the column that says whether the event was seen, 1, or not, 0 (censored).
        positive: the value of `label` that counts as positive. None: the last of two values. If there are more than two
            values, all others count as negative.
        metric: "accuracy", "balanced_accuracy", "auc", "brier" or "calibration" (how far the mean probability is from
            the share of positive rows): what gains and the advice refer to. All are in the result. With times, the only
            metric is "concordance", the C-index. None: "accuracy", or "concordance".
        splits: how many times the rows are split.
        drop: columns to leave out. Columns that look like an ID, dates, and columns with one value are left out, too,
            with a note.
        categories: columns of numbers that stand for categories. Columns of words always do.
        seed: the source of the splits.
        progress: show a bar; None: if standard error is a terminal.

    Example:
        >>> from rookery.data import heart
        >>> table = heart.table().drop(columns=["slope", "vessels", "thal"]).dropna()
        >>> result = rk.worth(table, "hospital", "ill", categories=["chest_pain", "ecg"])  # doctest: +SKIP
        >>> result.save("worth")  # doctest: +SKIP
    """
    possible = (*METRICS,) if time is None and event is None else SURVIVAL_METRICS
    metric = possible[0] if metric is None else metric
    if metric not in possible:
        near = nearest(str(metric).lower(), possible)
        fix = f" Did you mean {near!r}?" if near else ""
        one = "one of " if len(possible) > 1 else ""
        raise ValueError(f"metric must be {one}{', '.join(possible)}; got {metric!r}.{fix}")
    if not is_integer(splits) or splits < 2:
        raise ValueError(f"splits must be an integer of at least 2; got {splits!r}.")
    check_seed(seed)
    data = federation(table, by, label, positive, drop, categories, time, event)
    study = methods.Study(tuple(site(data, each, split(each, int(splits), seed)) for each in data.hospitals))
    shown = sys.stderr.isatty() if progress is None else progress
    steps = len(study.methods) - 1  # the floor is not trained
    with progress_bar(shown and "Comparing methods", None) as update:
        begun: list[str] = []

        def tell(name: str) -> None:
            update(len(begun), steps, name)
            begun.append(name)

        fitted, weights = methods.fit_all(study, tell)
        update(steps, steps, "")
    return _result(data, study, fitted, weights, metric, int(splits), seed)


def _result(
    data: Federation, study: methods.Study, fitted: dict[str, Any], weights: np.ndarray, metric: str, splits: int,
    seed: int,
) -> Worth:  # fmt: skip
    import pandas as pd

    names = [each.name for each in data.hospitals]
    measured = metrics.scores(study.sites, fitted)
    table = judging.judged(measured, study.sites, metric)
    count = len(names) * sum(name in methods.FEDERATED for name in study.methods)
    notes = (
        *data.notes,
        f"{splits} splits, stratified by the {'events' if study.survival else 'label'}: {TEST:.0%} of a hospital's "
        f"rows for tests, and {VALIDATION:.0%} of the others to choose settings. Test rows serve for nothing else.",
        "Medians, means and deviations come from the hospital's own training rows of the split. The names of columns "
        "and the values of categories are shared.",
        f"Intervals are corrected for the overlap of the splits. Each is for one comparison: of {count} comparisons "
        f"without any difference, about {count / 40:.2g} would show a gain by chance.",
        judging.tendency(table),
    )
    settings = {
        **_predicted(data),
        "metric": metric,
        "splits": splits,
        "seed": seed,
        "features": list(data.columns),
        "rows": {each.name: len(each.positive) for each in data.hospitals},
    }
    return Worth(
        judging.headline(table, metric),
        {each.name: judging.advise(table, each, metric) for each in study.sites},
        judging.disagreement(table),
        table,
        measured,
        pd.DataFrame(weights, index=names, columns=names),
        metric,
        notes,
        settings,
    )


def _predicted(data: Federation) -> dict[str, Any]:
    if data.time is None:
        return {"label": data.label, "positive": data.positive}
    events = {each.name: int(each.positive.sum()) for each in data.hospitals}
    return {"time": data.time, "event": data.label, "events": events}
