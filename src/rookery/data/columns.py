"""Convert the columns of a table to arrays; errors name the column, the client and the fix."""

import warnings
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from rookery.data.tables import SHOWN, listed, plain

if TYPE_CHECKING:
    import pandas as pd

_FILL = (
    "drop these rows (dropna), or fill them (fillna) with a number that does not come from other clients and add an "
    "indicator column"
)


class Owners(NamedTuple):
    """Which client each row belongs to."""

    client: np.ndarray  # of each row, a position in `names`
    names: list[str]

    def rows(self) -> list[np.ndarray]:
        """Return each client's rows, in the table's order."""
        order = np.argsort(self.client, kind="stable")
        return np.split(order, np.cumsum(np.bincount(self.client, minlength=len(self.names)))[:-1])

    def refuse(self, wrong: np.ndarray, column: Any, what: str, fix: str) -> None:
        """Raise ValueError if a row is wrong: how many rows of which client, and the fix."""
        if wrong.any():
            counts = np.bincount(self.client[wrong], minlength=len(self.names))
            first = int(np.flatnonzero(counts)[0])
            total = "" if counts[first] == wrong.sum() else f" ({int(wrong.sum())} of all clients)"
            rows = count_rows(counts[first])
            raise ValueError(f"column {column!r} {what} {rows} of {self.names[first]!r}{total}: {fix}.")


class Block(NamedTuple):
    """A column as numbers: one or several entries of a sample's features."""

    names: tuple[str, ...]
    values: np.ndarray  # [rows, len(names)]
    indicators: bool  # zeros and ones of a category, which are not rescaled


def count_rows(count: int) -> str:
    """Return "1 row" or "3 rows"."""
    return "1 row" if count == 1 else f"{count} rows"


def owners(column: "pd.Series", by: str) -> Owners:
    """Return the clients that a column names, in sorted order."""
    import pandas as pd

    missing = int(column.isna().sum())
    if missing:
        raise ValueError(
            f"column {by!r} does not name the client of {count_rows(missing)}: fill it, or drop those rows."
        )
    try:
        client, values = pd.factorize(column, sort=True)
    except TypeError as error:
        raise ValueError(f"column {by!r} holds {type(column[0]).__name__}s; give names or numbers.") from error
    names = [str(value) for value in values]
    for name, count in Counter(names).items():
        if count > 1:
            raise ValueError(f"column {by!r} has both a number and a word {name!r}: make them one kind.")
    return Owners(client, names)


def feature_block(column: "pd.Series", name: Any, categories: Sequence[Any] | None, of: Owners) -> Block:
    """Return the numbers of a feature: a category's indicators, vectors, or plain numbers."""
    if categories is not None:
        of.refuse(column.isna().to_numpy(), name, "has missing values in", _FILL)
        if len(set(categories)) < len(categories) or isinstance(categories, str):
            raise ValueError(f"categories[{name!r}] must be a list with every value once; got {categories!r}.")
        codes = _codes(column, name, categories, "categories", of)
        indicators = np.equal.outer(codes.astype(int), np.arange(len(categories)))
        return Block(tuple(f"{name}={value}" for value in categories), indicators.astype(float), True)
    if isinstance(column.iloc[0], list | tuple | np.ndarray):
        values = _vectors(column, name, of)
        return Block(tuple(f"{name}[{j}]" for j in range(values.shape[1])), values, False)
    fix = f"leave it out, drop=[{name!r}], or list its values, categories={{{name!r}: [...]}}"
    return Block((str(name),), numbers(column, name, of, "a feature is a number", fix)[:, None], False)


def _codes(column: "pd.Series", name: Any, values: Sequence[Any], argument: str, of: Owners) -> np.ndarray:
    """Return each entry's position in `values`."""
    codes = column.map({value: i for i, value in enumerate(values)})
    unknown = column[codes.isna()]
    first = repr(plain(unknown.iloc[0])) if len(unknown) else ""
    of.refuse(codes.isna().to_numpy(), name, f"has {first}, which {argument} does not list, in", "add it there")
    return codes.to_numpy()


def _vectors(column: "pd.Series", name: Any, of: Owners) -> np.ndarray:
    try:
        values = np.stack([np.asarray(entry, float) for entry in column])
    except (TypeError, ValueError):
        values = np.zeros(0)
    if values.ndim != 2:
        raise ValueError(
            f"column {name!r} holds arrays that are not vectors of one length: leave it out, drop=[{name!r}], or give "
            "the arrays to rk.Clients."
        )
    of.refuse(~np.isfinite(values).all(axis=1), name, "has missing values in", _FILL)
    return values


def numbers(column: "pd.Series", name: Any, of: Owners, rule: str, fix: str = "leave it out") -> np.ndarray:
    """Return a column of finite numbers as floats."""
    from pandas.api.types import is_bool_dtype, is_datetime64_any_dtype, is_numeric_dtype

    present = column.dropna().infer_objects()
    if len(present) and not (is_numeric_dtype(present) or is_bool_dtype(present)):
        shown = listed(repr(plain(value)) for value in present.unique()[:SHOWN])
        kind = "text" if isinstance(present.iloc[0], str) else f"values of type {type(present.iloc[0]).__name__}"
        kind = "dates" if is_datetime64_any_dtype(present) else kind
        raise ValueError(f"column {name!r} holds {kind} ({shown}), and {rule}: {fix}.")
    of.refuse(column.isna().to_numpy(), name, "has missing values in", _FILL)
    values = column.to_numpy(float)
    of.refuse(~np.isfinite(values), name, "is infinite in", "clean these rows, or drop them")
    return values


def class_codes(
    column: "pd.Series", name: str, classes: Sequence[Any] | None, of: Owners
) -> tuple[np.ndarray, tuple[Any, ...]]:
    """Return the labels as integers, and the classes that they stand for."""
    import pandas as pd
    from pandas.api.types import is_float_dtype

    of.refuse(column.isna().to_numpy(), name, "has missing values in", "drop these rows: a label cannot be filled")
    if is_float_dtype(column):
        if (column % 1 != 0).any():
            raise ValueError(
                f"column {name!r} holds fractions, and a label is a class: to predict a number, give target={name!r}."
            )
        column = column.astype(int)
    codes: Any
    if classes is None:
        codes, found = pd.factorize(column, sort=True)
        classes = [plain(value) for value in found]
    else:
        codes = _codes(column, name, classes, "classes", of)
    if len(classes) == 1:
        warnings.warn(f"column {name!r} has only one class, {classes[0]!r}, so nothing can be learned.", stacklevel=3)
    return np.asarray(codes, np.int32), tuple(classes)
