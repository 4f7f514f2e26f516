"""Read tables: a DataFrame, a CSV or Parquet file, or any object with columns."""

import re
import warnings
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from rookery.base.arguments import kind_of

if TYPE_CHECKING:
    import pandas as pd

SHOWN = 6  # names or values that a message lists


def read_columns(table: Any, by: Any, coded: Sequence[Any]) -> dict[Any, "pd.Series"]:
    """Return the columns by name. The values of `coded` columns stand for classes."""
    if isinstance(table, str | Path):
        table = _read_file(Path(table), by, coded)
    names = table.keys() if isinstance(table, Mapping) else getattr(table, "column_names", None)
    names = getattr(table, "columns", None) if names is None else names
    if isinstance(names, Mapping):
        raise ValueError(f"the table must be one; got several parts, {listed(names)}. Give one of them.")
    if names is None or not hasattr(table, "__getitem__"):
        raise TypeError(
            "the table must be a pandas DataFrame, a path to a CSV or Parquet file, a dict {name: array}, or an object "
            f"with column_names; got {kind_of(table)}."
        )
    names = list(names)
    _refuse_duplicates(names)
    columns = {plain(name): _series(table[name]) for name in names}
    lengths = {name: len(column) for name, column in columns.items()}
    if len(set(lengths.values())) > 1:
        raise ValueError(
            f"the columns must have the same length; got {listed(f'{n}: {k}' for n, k in lengths.items())}."
        )
    if not columns or not next(iter(lengths.values())):
        raise ValueError("the table must have at least one row; it has none.")
    return columns


def _read_file(path: Path, by: Any, coded: Sequence[Any]) -> "pd.DataFrame":
    import pandas as pd  # slow to import, and only tables need it

    ending = path.name.lower().removesuffix(".gz").rpartition(".")[2]
    if ending not in ("csv", "parquet"):
        raise ValueError(f"{path} must end in .csv or .parquet. Read it with pandas, and give the DataFrame.")
    if not path.is_file():
        raise ValueError(f"there is no file {path}.")
    try:
        return pd.read_parquet(path) if ending == "parquet" else _read_csv(path, by, coded)
    except ImportError as error:
        raise ValueError(f"{path}: pandas needs pyarrow to read Parquet. Run pip install pyarrow.") from error
    except pd.errors.EmptyDataError as error:
        raise ValueError(f"{path} must have at least one row; it is empty.") from error
    except (pd.errors.ParserError, pd.errors.ParserWarning) as error:
        counts = re.search(r"Expected (\d+) fields in line (\d+), saw (\d+)", str(error))
        what = f"cannot be read as CSV ({str(error).splitlines()[0]})"
        if counts is not None:
            what = f"has {counts[3]} fields in line {counts[2]}, and {counts[1]} in the header"
        elif isinstance(error, pd.errors.ParserWarning):
            what = "has more fields in its rows than in its header"
        raise ValueError(f"{path} {what}. Correct the file, or quote values that contain a comma.") from error
    except UnicodeDecodeError as error:
        raise ValueError(
            f"{path} must be UTF-8 text; it is not. Read it with pandas.read_csv(path, encoding=...), and give the "
            "DataFrame."
        ) from error


def _read_csv(path: Path, by: Any, coded: Sequence[Any]) -> "pd.DataFrame":
    """Read a CSV file in which clients and classes keep their names: 01, 1 and 001 are three."""
    import pandas as pd

    header = pd.read_csv(path, header=None, nrows=1, dtype=str)  # read_csv itself renames duplicates, to age.1
    _refuse_duplicates(header.iloc[0].tolist())
    with warnings.catch_warnings():
        warnings.simplefilter("error", pd.errors.ParserWarning)  # rows longer than the header would be cut
        table = pd.read_csv(path, index_col=False)
    if by in table:
        names = pd.read_csv(path, index_col=False, usecols=[by], dtype=str, keep_default_na=False)[by]
        whole = all(re.fullmatch(r"0|-?[1-9]\d{0,17}", name) for name in names.unique())
        if not whole:  # whole numbers stay numbers, so that 9 comes before 10
            table[by] = names.where(names != "", None)
    for column in {*coded} & {*table}:
        names = pd.read_csv(path, index_col=False, usecols=[column], dtype=str)[column]
        if names.str.fullmatch(r"-?0\d+").any():  # as a number, 01 would be 1
            table[column] = names
    return table


def _refuse_duplicates(names: list[Any]) -> None:
    for name, count in Counter(names).items():
        if count > 1:
            raise ValueError(f"the table has more than one column {name!r}. Rename them, or leave one out.")


def _series(values: Any) -> "pd.Series":
    """Return a column, whose entries may be vectors."""
    import pandas as pd

    if isinstance(values, pd.Series):
        column = values.reset_index(drop=True)
    else:
        array = values.to_numpy() if hasattr(values, "to_numpy") else values
        array = np.asarray(array) if hasattr(array, "__array__") else list(array)
        column = pd.Series(list(array) if isinstance(array, np.ndarray) and array.ndim > 1 else array)
    return (column.astype(object) if isinstance(column.dtype, pd.CategoricalDtype) else column).infer_objects()


def plain(value: Any) -> Any:
    """Return a NumPy scalar as a Python number or text, and anything else as it is."""
    return value.item() if isinstance(value, np.generic) else value


def listed(names: Iterable[Any]) -> str:
    """Return the first few names, for a message."""
    all_names = [str(name) for name in names]
    more = f" and {len(all_names) - SHOWN} more" if len(all_names) > SHOWN else ""
    return ", ".join(all_names[:SHOWN]) + more
