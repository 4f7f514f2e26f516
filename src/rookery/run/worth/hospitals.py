"""Each hospital's rows as numbers: categories, missing values, columns left out, and the repeated splits."""

import re
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
from jaxtyping import Bool, Float

from rookery.base.arguments import nearest
from rookery.data.clients import Clients
from rookery.data.columns import Owners, count_rows, owners
from rookery.data.tables import listed, plain, read_columns
from rookery.run.worth.outcomes import Target, positive_class, target, whole

if TYPE_CHECKING:
    import pandas as pd

TEST, VALIDATION = 0.34, 0.3  # shares of a hospital's rows, and of its training rows
_LEAST = 12  # rows of a hospital
_NUMBER = re.compile(r"[-+]?(\d+\.?\d*|\.\d+)(e[-+]?\d+)?", re.IGNORECASE)
_ID_ROWS, _ID_SHARE = 50, 0.95  # whole numbers look like an ID from this many rows and this share of distinct ones on
_MOST_VALUES = 50  # of a column of words
_MOST_COLUMNS = 500  # that the models see; their designs are matrices
_STRAY, _SEVERAL = 3, 5  # at most 3 words among at least 5 numbers: probably marks of missing values
_LEAST_EVENTS = 3  # of a hospital, with times
_ALIKE = 0.99  # correlation of ranks with the times, from which a note says so
_COPIES = 0.01  # share of rows that repeat another, from which a note says so


@dataclass(frozen=True)
class Hospital:
    """A hospital's rows: numbers with NaN where a value is missing, and whether each row is positive.

    With times, a row is positive if its event was seen, and the rows are in descending order of time.
    """

    name: str
    values: Float[np.ndarray, "n columns"]
    positive: Bool[np.ndarray, " n"]
    time: Float[np.ndarray, " n"] | None = None


@dataclass(frozen=True)
class Federation:
    """All hospitals' rows with the same columns.

    Attributes:
        hospitals: those of the table, in sorted order of their names.
        columns: what the columns of `values` are, such as "age" or "ward=surgery".
        gaps: the positions of columns with a missing value somewhere.
        label, positive: the column to predict, and its value that counts as positive. With times, the column of events.
        notes: what was left out or changed on the way.
        time: the column of times, if there is one.
    """

    hospitals: tuple[Hospital, ...]
    columns: tuple[str, ...]
    gaps: tuple[int, ...]
    label: str
    positive: Any
    notes: tuple[str, ...]
    time: str | None = None


@dataclass(frozen=True)
class Splits:
    """A hospital's repeated splits: for each, which rows are for training, and which of these fit the candidates."""

    train: Bool[np.ndarray, "splits n"]
    fit: Bool[np.ndarray, "splits n"]

    @property
    def validation(self) -> Bool[np.ndarray, "splits n"]:
        """The training rows on which penalties and other settings are chosen."""
        return self.train & ~self.fit


def federation(
    table: Any, by: Any, label: Any, positive: Any, drop: Sequence[str], categories: Sequence[str], time: Any = None,
    event: Any = None,
) -> Federation:  # fmt: skip
    """Read a table, or clients that were made with `Clients.from_frame(label=...)`. See `worth` for the arguments."""
    predicted = target(label, positive, time, event)
    if isinstance(table, Clients):
        if predicted.time is not None:
            raise ValueError("time and event need a table; got rk.Clients. Give the table and by=….")
        if by is not None or label is not None or drop or categories:
            raise ValueError(
                "by, label, drop and categories must be left out for rk.Clients, whose columns are fixed. Give them "
                "to Clients.from_frame, or give the table."
            )
        made = _of_clients(table, positive)
    else:
        made = _of_table(table, plain(by), predicted, drop, categories)
    if len(made.hospitals) < 2:
        raise ValueError(
            f"the table must have at least two hospitals; got one, {made.hospitals[0].name!r}. Give another column "
            "for by, or a table of several hospitals."
        )
    small = [hospital for hospital in made.hospitals if len(hospital.positive) < _LEAST]
    if small:
        names = listed(f"{h.name!r} has {count_rows(len(h.positive))}" for h in small)
        raise ValueError(f"a hospital must have at least {_LEAST} rows to be split; {names}. Leave these rows out.")
    if made.time is not None:
        _check_events(made)
    elif all(h.positive.all() or not h.positive.any() for h in made.hospitals):
        raise ValueError(
            f"at least one hospital must have both classes of {made.label!r}; got hospitals with one class each. A "
            "model learns nothing from them but which hospital a row comes from."
        )
    if len(made.columns) > _MOST_COLUMNS:
        raise ValueError(
            f"the table must have at most {_MOST_COLUMNS} columns to learn from, one for each further word of a "
            f"category; got {len(made.columns)}. Drop the others, or give summaries of them."
        )
    return replace(made, notes=(*made.notes, *_suspicions(made)))


def _check_events(federation: Federation) -> None:
    """Raise ValueError for a hospital with too few events to fit, to choose and to test."""
    few = [hospital for hospital in federation.hospitals if hospital.positive.sum() < _LEAST_EVENTS]
    if few:
        names = listed(f"{h.name!r} has {h.positive.sum()}" for h in few)
        raise ValueError(
            f"a hospital must have at least {_LEAST_EVENTS} events, rows with 1 in {federation.label!r}: to fit, to "
            f"choose and to test; {names}. Leave its rows out."
        )


def _suspicions(federation: Federation) -> list[str]:
    """Return notes on what would make every model look better than it is: copies of rows, and of the label."""
    import pandas as pd

    notes, hospitals = [], federation.hospitals
    outcomes = [(h.positive,) if h.time is None else (h.positive, h.time) for h in hospitals]
    rows = [pd.DataFrame(np.column_stack([h.values, *own])) for h, own in zip(hospitals, outcomes, strict=True)]
    copies = sum(int(each.duplicated().sum()) for each in rows)
    if copies > _COPIES * sum(map(len, rows)):
        notes.append(
            f"{count_rows(copies)} {'repeats' if copies == 1 else 'repeat'} another row of the same hospital. Remove "
            "copies of one patient: a copy among the training rows gives a test row's answer away."
        )
    values, positive = (np.concatenate([getattr(h, name) for h in hospitals]) for name in ("values", "positive"))
    telling = []
    for name, column in zip(federation.columns, values.T, strict=True):
        some, others = (column[chosen & ~np.isnan(column)] for chosen in (positive, ~positive))
        if len(some) and len(others) and (some.min() > others.max() or some.max() < others.min()):
            telling.append(repr(name))
    what = "classes" if federation.time is None else "events"
    if federation.time is not None:
        notes += _restated_times(federation.columns, values, np.concatenate([h.time for h in hospitals]))
    if telling:
        notes.append(f"By itself, {listed(telling)} tells the {what} apart. Drop what restates the label.")
    return notes


def _restated_times(columns: Sequence[str], values: np.ndarray, times: np.ndarray) -> list[str]:
    """Return a note on columns that give the times away, such as the days to the last visit."""
    import pandas as pd

    frame = pd.DataFrame(dict(zip(columns, values.T, strict=True)))
    alike = frame.corrwith(pd.Series(times), method="spearman").abs()
    telling = alike.index[alike > _ALIKE]
    return (
        [f"By itself, {listed(map(repr, telling))} gives the times. Drop what restates them."] if len(telling) else []
    )


def split(hospital: Hospital, count: int, seed: int) -> Splits:
    """Draw splits stratified by the label: of each class, a third for tests, and a share of the rest for validation."""
    rng = np.random.default_rng([seed, zlib.crc32(hospital.name.encode())])
    train = np.ones((count, len(hospital.positive)), bool)
    fit = train.copy()
    for i in range(count):
        for of_class in (hospital.positive, ~hospital.positive):
            rows = rng.permutation(np.flatnonzero(of_class))
            tests = round(TEST * len(rows))
            validation = round(VALIDATION * (len(rows) - tests))
            train[i, rows[:tests]] = False
            fit[i, rows[: tests + validation]] = False
    return Splits(train, fit)


# Clients.


def _of_clients(clients: Clients, positive: Any) -> Federation:
    hospitals, numbers = [], []
    for i, name in enumerate(clients.names):
        parts = [clients.client_data(i).get(level) for level in ("lower", "upper", "test")]
        rows = [part[0] for part in parts if part is not None]
        if any(not isinstance(part, dict) or not {"features", "label"} <= {*part} for part in rows):
            raise ValueError(
                "the clients' samples must have features and a label. Make them with rk.Clients.from_frame(table, by=…,"
                " label=…), or give the table."
            )
        values = np.concatenate([np.asarray(part["features"], float) for part in rows])
        numbers.append(np.concatenate([np.asarray(part["label"]) for part in rows]))
        hospitals.append(Hospital(str(name), values.reshape(len(values), -1), np.zeros(len(values), bool)))
    schema = clients.schema
    classes = schema.classes if schema else tuple(np.unique(np.concatenate(numbers)).tolist())
    codes = range(len(classes)) if schema else classes
    label = str(schema.label) if schema else "label"
    chosen = positive_class(list(classes), label, positive)
    code = codes[classes.index(chosen)]
    made = tuple(Hospital(h.name, h.values, own == code) for h, own in zip(hospitals, numbers, strict=True))
    width = made[0].values.shape[1]
    columns = schema.features if schema else tuple(f"feature {j}" for j in range(width))
    return Federation(made, columns, (), label, chosen, ())


# Tables.


def _of_table(table: Any, by: Any, predicted: Target, drop: Sequence[str], categories: Sequence[str]) -> Federation:
    asked = [("by", by), *predicted.columns.items()]
    for what, name in asked:
        if name is None:
            raise ValueError(f"{what} must be the name of a column; got None. Give {what}=….")
    for what, some in (("drop", drop), ("categories", categories)):
        if isinstance(some, str):
            raise TypeError(f"{what} must be a list of columns; got {some!r}. Give {what}=[{some!r}].")
    columns = read_columns(table, by, [predicted.label])
    asked += [(what, name) for what, some in (("drop", drop), ("categories", categories)) for name in some]
    for what, name in asked:
        if name not in columns:
            near = nearest(name, map(str, columns))
            fix = f"Did you mean {near!r}?" if near else f"The columns are {listed(columns)}."
            raise ValueError(f"{what} must be a column of the table; got {name!r}. {fix}")
    outcome = predicted.columns
    for what, name in outcome.items():
        if by == name:
            raise ValueError(f"{what} must be another column than by; got {name!r} for both.")

    notes = []
    of = owners(columns[by], by)
    known = np.all([~columns[name].isna().to_numpy() for name in outcome.values()], axis=0)
    without = " or ".join(map(repr, outcome.values()))
    if not known.any():
        raise ValueError(f"the table must have rows with a value in {without}; got none. Fill the column.")
    if not known.all():
        notes.append(f"{count_rows(int((~known).sum()))} without {without} left out.")
        columns, of = _chosen(columns, np.flatnonzero(known), by)
    times = predicted.times(columns)
    if times is not None:
        latest_first = np.argsort(-times, kind="stable")
        (columns, of), times = _chosen(columns, latest_first, by), times[latest_first]
    is_positive, chosen = predicted.outcomes(columns)

    names: list[str] = []
    blocks: list[np.ndarray] = []
    left_out: list[str] = []
    for name, column in columns.items():
        if name in (by, *outcome.values(), *drop):
            continue
        found = _block(column, name, name in categories, of)
        if isinstance(found, str):
            left_out.append(f"{name!r} ({found})")
        else:
            names += found
            blocks += found.values()
    if left_out:
        notes.append(f"Columns left out: {', '.join(left_out)}.")
    if not blocks:
        raise ValueError("the table must have at least one column to learn from; none is left. Drop fewer columns.")
    values = np.stack(blocks, axis=1)
    gaps = tuple(np.flatnonzero(np.isnan(values).any(axis=0)).tolist())
    if gaps:
        shown = listed(repr(names[j]) for j in gaps)
        notes.append(
            f"Missing values in {shown}: filled with the median of the hospital's own training rows, and marked by a "
            "further column each."
        )
    hospitals = tuple(
        Hospital(name, values[rows], is_positive[rows], None if times is None else times[rows])
        for name, rows in zip(of.names, of.rows(), strict=True)
    )
    time = None if times is None else str(predicted.time)
    return Federation(hospitals, tuple(names), gaps, str(predicted.label), chosen, tuple(notes), time)


def _chosen(columns: dict[Any, "pd.Series"], rows: np.ndarray, by: Any) -> tuple[dict[Any, "pd.Series"], Owners]:
    """Return these rows of the columns, and their owners."""
    columns = {name: column.iloc[rows].reset_index(drop=True) for name, column in columns.items()}
    return columns, owners(columns[by], by)


def _block(column: "pd.Series", name: Any, category: bool, of: Owners) -> dict[str, np.ndarray] | str:
    """Return a column as named columns of numbers, or why it is left out."""
    from pandas.api.types import is_bool_dtype, is_datetime64_any_dtype, is_numeric_dtype

    present = column.dropna().infer_objects()
    if not len(present):
        return "no values"
    if isinstance(present.iloc[0], list | tuple | np.ndarray):
        return "vectors"
    if is_datetime64_any_dtype(present):
        return "dates"
    number = is_numeric_dtype(present) or is_bool_dtype(present)
    values = present.to_numpy(float) if number else present.astype(str).to_numpy()
    distinct = len(np.unique(values))
    if distinct == 1 and len(present) == len(column):
        return "one value"
    apart = not _repeats(values, of.client[present.index])  # a hospital may number its patients from 1
    if apart and len(present) >= _LEAST and not number:
        return "looks like an ID: no two rows of a hospital share a value"
    if number and not category:
        nearly = apart or distinct >= _ID_SHARE * len(present)
        if nearly and len(present) >= _ID_ROWS and not (values % 1).any():
            return "looks like an ID: whole numbers that differ in nearly every row"
        numbers = column.astype(float).to_numpy(float)
        of.refuse(np.isinf(numbers), name, "is infinite in", "clean these rows, or drop them")
        return {str(name): numbers}
    words = column.map(lambda value: str(whole(value)), na_action="ignore")
    levels = sorted(words.dropna().unique())
    if not category:
        _refuse_stray_words(name, levels)
    if distinct > _MOST_VALUES:
        return f"{distinct} different words"
    made = {f"{name}={level}": (words == level).to_numpy(float) for level in levels[1:]}  # the first is the rest
    return made | ({f"{name} missing": words.isna().to_numpy(float)} if words.isna().any() else {})


def _repeats(values: np.ndarray, hospital: np.ndarray) -> bool:
    """Return whether two rows of one hospital share a value."""
    import pandas as pd

    return bool(pd.DataFrame({"hospital": hospital, "value": values}).duplicated().any())


def _refuse_stray_words(name: Any, levels: Sequence[str]) -> None:
    """Raise ValueError for a column of numbers that a few words, such as "?", turned into a column of words."""
    stray = [level for level in levels if not _NUMBER.fullmatch(level.strip())]
    if stray and len(stray) <= _STRAY and len(levels) - len(stray) >= _SEVERAL:
        raise ValueError(
            f"column {name!r} must hold numbers or words; got numbers and {listed(map(repr, stray))}. Leave cells "
            f"without a value empty, or give categories=[{name!r}]."
        )
