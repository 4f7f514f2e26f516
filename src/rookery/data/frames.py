"""Tables: rows with a column that says whose they are, divided into the clients' data."""

import re
import warnings
import zlib
from collections import Counter
from collections.abc import Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from rookery.base.arguments import check_seed, is_number, kind_of

if TYPE_CHECKING:
    import pandas as pd

Rows = dict[str, np.ndarray]
Numbers = Mapping[str, tuple[float, float]]  # of a column: its mean and scale
_SHOWN = 6  # names in a message
_LINES = 5  # faults of a table in a message


@dataclass(frozen=True)
class Schema:
    """What the arrays that were made of a table stand for.

    Attributes:
        by: the column that says whose row it is.
        names: the clients', in their order.
        features: what each column of a sample's "features" is: a column's name, "sex=f" for a category, "scan[0]" for
            an entry of a vector.
        label: the column of the classes, if there is one.
        classes: what each integer in "label" stands for: class i is classes[i].
        target: the column of the number to predict, if there is one.
        center: the client whose rows are the centre's, if there is one.
    """

    by: str
    names: tuple[str, ...]
    features: tuple[str, ...]
    label: str | None = None
    classes: tuple[Any, ...] = ()
    target: str | None = None
    center: str | None = None


class Divided(NamedTuple):
    """A table as the data of clients: one entry for each at either level, and for tests."""

    lower: list[Rows]
    upper: list[Rows] | None
    test: list[Rows] | None
    center: Rows | None
    schema: Schema


class _Faults:
    """What is wrong with a table and the arguments that go with it, told all at once.

    As a context manager it notes the error of one check and goes on to the next.
    """

    def __init__(self) -> None:
        self.found: list[ValueError | TypeError] = []

    def __enter__(self) -> None:
        pass

    def __exit__(self, _: Any, error: Any, __: Any) -> bool:
        if isinstance(error, ValueError | TypeError):
            self.found.append(error)
            return True
        return False

    def settle(self) -> None:
        """Raise what was noted: one error as it is, several in one message."""
        if len(self.found) == 1:
            raise self.found[0]
        if self.found:
            lines = [f"- {error}" for error in self.found[:_LINES]]
            more = [f"- and {len(self.found) - _LINES} more."] if len(self.found) > _LINES else []
            raise ValueError("\n".join([f"{len(self.found)} faults in the table or the arguments:", *lines, *more]))


def divide(
    table: Any,
    by: str,
    *,
    upper: float | None = None,
    test: float | None = None,
    features: Sequence[str] | None = None,
    label: str | None = None,
    target: str | None = None,
    drop: Sequence[str] = (),
    categories: Mapping[str, Sequence[Any]] | None = None,
    classes: Sequence[Any] | None = None,
    standardize: str | Numbers | None = None,
    center: str | None = None,
    client: str | None = None,
    seed: int = 0,
) -> Divided:
    """Divide the rows of a table by client and level; `Clients.from_frame` explains the arguments."""
    faults = _Faults()
    with faults:
        check_seed(seed)
    _check_shares(upper, test, faults)
    by, label, target = _plain(by), _plain(label), _plain(target)
    known = {} if categories is None else categories
    if not _check_kinds({"by": by, "label": label, "target": target}, features, drop, known, classes, faults):
        faults.settle()
    known, classes = {name: _listed(values) for name, values in known.items()}, _listed(classes)
    _check_words(label, classes, standardize, client, faults)
    center = None if center is None else str(center)
    columns: dict[Any, pd.Series] = {}
    with faults:
        columns = _columns(table, by, [label, *known])
    if not columns:
        faults.settle()
    answers = [name for name in (label, target) if name is not None]
    wanted = _features(columns, by, features, answers, drop, known, faults)
    if any(name not in columns for name in (by, *answers)):
        faults.settle()  # a misspelt label leaves the real one among the features
    whose = _Whose(np.zeros(0, int), [])
    with faults:
        whose = _Whose(*_owners(columns[by], by))
    if not whose.names:
        faults.settle()
    blocks: dict[str, _Block] = {}
    for name in wanted:
        with faults:
            blocks[name] = _block(columns[name], name, known.get(name), whose)
    everything: Rows = {}
    coded: tuple[Any, ...] = ()
    if label is not None:
        with faults:
            everything["label"], coded = _coded(columns[label], label, classes, whose)
    if target is not None:
        with faults:
            everything["target"] = _numbers(columns[target], target, whose, "a target is a number").astype(float)
    if isinstance(standardize, Mapping):
        _check_numbers(standardize, wanted, blocks, faults)
    others = [name for name in whose.names if name != center]
    with faults:
        if len(others) == len(whose.names) and center is not None:
            raise ValueError(f"center={center!r} is not a client: column {by!r} has {_list(whose.names)}.")
        if not others:
            raise ValueError(f"center={center!r} is the only client: there are no others to learn from.")
    rows: dict[str, list[np.ndarray]] = {}
    for name, own in zip(whose.names, whose.rows(), strict=True):
        with faults:
            rows[name] = [own] if name == center else _split(own, name, upper, test, by, seed)
            if standardize == "client" and len(rows[name][0]) < 2:
                raise ValueError(
                    f'{name!r} has one row to train on, and standardize="client" would make it zero: leave this client '
                    "out, or give public numbers, standardize={column: (mean, scale)}."
                )
    faults.settle()
    if isinstance(standardize, Mapping):
        blocks = {name: _scaled(block, standardize.get(name)) for name, block in blocks.items()}
    _warn_of_numbers(blocks, features is not None, standardize)
    everything = {"features": np.concatenate([block.values for block in blocks.values()], axis=1), **everything}
    if client is not None:
        numbers = {name: number for number, name in enumerate(others)}
        everything[client] = np.array([numbers.get(name, -1) for name in whose.names], np.int32)[whose.owner]
    numeric = np.concatenate([np.full(len(block.names), not block.indicators) for block in blocks.values()])
    parts: dict[str, list[Rows]] = {}
    for name, levels in rows.items():
        parts[name] = [{key: values[own] for key, values in everything.items()} for own in levels]
        if standardize == "client":
            _scale_by_first(parts[name], numeric)
    held = None if center is None else parts.pop(center)[0]
    labels = tuple(entry for block in blocks.values() for entry in block.names)
    schema = Schema(by, tuple(parts), labels, label, coded, target, center)
    lower, *further = [list(level) for level in zip(*parts.values(), strict=True)]
    upper_level, test_data = None if upper is None else further[0], None if test is None else further[-1]
    return Divided(lower, upper_level, test_data, held, schema)


def _check_shares(upper: Any, test: Any, faults: _Faults) -> None:
    shares = []
    for asked, value, none in (("upper", upper, "one data set for both levels"), ("test", test, "no test data")):
        with faults:
            if value is None:
                continue
            if not (is_number(value) and 0 < value < 1):
                raise ValueError(f"{asked}={value!r} is not a share between 0 and 1 of a client's rows; None: {none}.")
            shares.append(value)
    with faults:
        if sum(shares) >= 1:
            raise ValueError(
                f"upper={upper!r} and test={test!r} leave no rows to the lower level: give smaller shares."
            )


def _check_kinds(
    columns: dict[str, Any], features: Any, drop: Any, categories: Any, classes: Any, faults: _Faults
) -> bool:
    """Whether columns are given by their names, and several things as lists."""
    before = len(faults.found)
    for what, name in columns.items():
        with faults:
            if not isinstance(name, Hashable):
                raise TypeError(f"{what} must be the name of one column; got {name!r}.")
            if what != "by" and name is not None and name == columns["by"]:
                raise ValueError(f"{what} must be another column than by; got {name!r} for both.")
    with faults:
        if not isinstance(categories, Mapping):
            raise TypeError(
                f'categories must be a dict from a column to its values, such as {{"sex": ["f", "m"]}}; got '
                f"{categories!r}."
            )
    lists = {"features": features, "drop": drop, "classes": classes}
    if isinstance(categories, Mapping):
        lists |= {f"categories[{name!r}]": values for name, values in categories.items()}
    for what, values in lists.items():
        with faults:  # a text is refused later, with the fix
            if values is not None and not _is_list(values):
                raise TypeError(
                    f"{what} must be a list of {'values' if what[0] == 'c' else 'columns'}; got {values!r}."
                )
    return len(faults.found) == before


def _is_list(values: Any) -> bool:
    return isinstance(values, Collection) and all(isinstance(value, Hashable) for value in values)


def _plain(value: Any) -> Any:
    """Python's own number or text where it is NumPy's."""
    return value.item() if isinstance(value, np.generic) else value


def _listed(values: Any) -> Any:
    return values if values is None or isinstance(values, str) else [_plain(value) for value in values]


def _check_words(label: Any, classes: Any, standardize: Any, client: Any, faults: _Faults) -> None:
    with faults:
        if classes is not None and label is None:
            raise ValueError("classes says what the labels may be, and there is no label: give label=..., too.")
        if isinstance(classes, str) or (classes is not None and len(set(classes)) < len(classes)):
            raise ValueError(f"classes must be a list with every class once; got {classes!r}.")
    with faults:
        if standardize not in (None, "client") and not isinstance(standardize, Mapping):
            raise ValueError(
                f'standardize={standardize!r} is not known: give "client", {{column: (mean, scale)}} with public '
                "numbers, or None."
            )
    with faults:
        if client is not None and (not isinstance(client, str) or client in ("features", "label", "target")):
            raise ValueError(
                f'client must be a name for the client\'s number in a sample, such as "client", other than '
                f'"features", "label" and "target"; got {client!r}.'
            )


# Reading.


def _columns(table: Any, by: Any, coded: Sequence[Any]) -> dict[Any, "pd.Series"]:
    """The columns by name, from anything that has columns; the values of `coded` stand for classes."""
    if isinstance(table, str | Path):
        table = _read(Path(table), by, coded)
    names = table.keys() if isinstance(table, Mapping) else getattr(table, "column_names", None)
    names = getattr(table, "columns", None) if names is None else names
    if isinstance(names, Mapping):
        raise ValueError(f"the table has several parts, {_list(names)}: give one of them.")
    if names is None or not hasattr(table, "__getitem__"):
        raise TypeError(
            f"the table is {kind_of(table)}; give a pandas DataFrame, a path to a CSV or Parquet file, or "
            "something with columns: {name: array}, or an object with column_names."
        )
    names = list(names)
    _refuse_doubles(names)
    columns = {_plain(name): _series(table[name]) for name in names}
    lengths = {name: len(column) for name, column in columns.items()}
    if len(set(lengths.values())) > 1:
        raise ValueError(f"the columns differ in length: {_list(f'{n}: {k}' for n, k in lengths.items())}.")
    if not columns or not next(iter(lengths.values())):
        raise ValueError("the table has no rows: a federation needs at least one client with data.")
    return columns


def _read(path: Path, by: Any, coded: Sequence[Any]) -> "pd.DataFrame":
    import pandas as pd  # slow to import, and only tables need it

    ending = path.name.lower().removesuffix(".gz").rpartition(".")[2]
    if ending not in ("csv", "parquet"):
        raise ValueError(f"{path} ends neither in .csv nor in .parquet: read it with pandas, and give the DataFrame.")
    if not path.is_file():
        raise ValueError(f"there is no file {path}.")
    try:
        return pd.read_parquet(path) if ending == "parquet" else _read_csv(path, by, coded)
    except ImportError as error:
        raise ValueError(f"{path}: to read Parquet pandas needs pyarrow: pip install pyarrow.") from error
    except pd.errors.EmptyDataError as error:
        raise ValueError(f"{path} has no rows: it is empty.") from error
    except (pd.errors.ParserError, pd.errors.ParserWarning) as error:
        counts = re.search(r"Expected (\d+) fields in line (\d+), saw (\d+)", str(error))
        what = f"cannot be read as CSV ({str(error).splitlines()[0]})"
        if counts is not None:
            what = f"has {counts[3]} fields in line {counts[2]}, and {counts[1]} in the header"
        elif isinstance(error, pd.errors.ParserWarning):
            what = "has more fields in its rows than in its header"
        raise ValueError(f"{path} {what}. Correct the file, or quote values that have a comma in them.") from error
    except UnicodeDecodeError as error:
        raise ValueError(
            f"{path} is not UTF-8 text: read it with pandas.read_csv(path, encoding=...), and give the DataFrame."
        ) from error


def _read_csv(path: Path, by: Any, coded: Sequence[Any]) -> "pd.DataFrame":
    """A CSV file, whose clients and classes keep the names that they have in it: 01, 1 and 001 are three."""
    import pandas as pd

    first = pd.read_csv(path, header=None, nrows=1, dtype=str)  # read_csv itself renames doubles, to age.1
    _refuse_doubles(first.iloc[0].tolist())
    with warnings.catch_warnings():
        warnings.simplefilter("error", pd.errors.ParserWarning)  # rows longer than the header: it would cut them
        table = pd.read_csv(path, index_col=False)
    if by in table:
        names = pd.read_csv(path, index_col=False, usecols=[by], dtype=str, keep_default_na=False)[by]
        whole = all(re.fullmatch(r"0|-?[1-9]\d{0,17}", name) for name in names.unique())
        if not whole:  # else the names can be had from the numbers, and 9 comes before 10
            table[by] = names.where(names != "", None)
    for column in {*coded} & {*table}:
        names = pd.read_csv(path, index_col=False, usecols=[column], dtype=str)[column]
        if names.str.fullmatch(r"-?0\d+").any():  # as a number, 01 would be 1
            table[column] = names
    return table


def _refuse_doubles(names: list[Any]) -> None:
    doubles = [name for name, count in Counter(names).items() if count > 1]
    if doubles:
        raise ValueError(f"the table has more than one column {doubles[0]!r}: rename them, or leave one out.")


def _series(values: Any) -> "pd.Series":
    """A column; an entry may be a vector."""
    import pandas as pd

    if isinstance(values, pd.Series):
        column = values.reset_index(drop=True)
    else:
        array = values.to_numpy() if hasattr(values, "to_numpy") else values
        array = np.asarray(array) if hasattr(array, "__array__") else list(array)
        column = pd.Series(list(array) if isinstance(array, np.ndarray) and array.ndim > 1 else array)
    return (column.astype(object) if isinstance(column.dtype, pd.CategoricalDtype) else column).infer_objects()


def _features(
    columns: Mapping[str, Any],
    by: str,
    features: Sequence[str] | None,
    answers: list[str],
    drop: Sequence[str],
    categories: Mapping[str, Any],
    faults: _Faults,
) -> list[str]:
    """The columns that are features, of those that exist; columns which are named and do not exist are faults."""
    for what, given in (("features", features), ("drop", drop)):
        with faults:
            if isinstance(given, str):
                raise TypeError(f"{what}={given!r} is one word; give a list of columns: {what}=[{given!r}].")
    features, drop = ([given] if isinstance(given, str) else given for given in (features, drop))  # type: ignore[assignment]
    for what, name in [("by", by), *(("label or target", name) for name in answers)]:
        with faults:
            if name not in columns:
                raise ValueError(f"the table has no column {name!r} ({what}): its columns are {_list(columns)}.")
    named: dict[str, Iterable[str]] = {
        "features": () if features is None else features,
        "drop": drop,
        "categories": categories,
    }
    for what, listed in named.items():
        for name in listed:
            with faults:
                if name not in columns:
                    raise ValueError(f"{what}: the table has no column {name!r}: its columns are {_list(columns)}.")
                if name in (by, *answers):
                    raise ValueError(f"{what}: {name!r} is the column of the clients, the label or the target already.")
    chosen = columns if features is None else features
    wanted = [name for name in dict.fromkeys(chosen) if name not in (by, *answers, *drop)]
    with faults:
        if not wanted:
            raise ValueError("no column is left for the features: give features=[...].")
    return [name for name in wanted if name in columns]


# Columns.


class _Whose(NamedTuple):
    """Which client each row belongs to."""

    owner: np.ndarray
    names: list[str]

    def rows(self) -> list[np.ndarray]:
        """Each client's rows, in the table's order."""
        order = np.argsort(self.owner, kind="stable")
        return np.split(order, np.cumsum(np.bincount(self.owner, minlength=len(self.names)))[:-1])

    def refuse(self, wrong: np.ndarray, column: Any, what: str, fix: str) -> None:
        """Raise if a row is wrong: how many of whom, and the fix."""
        if wrong.any():
            counts = np.bincount(self.owner[wrong], minlength=len(self.names))
            first = int(np.flatnonzero(counts)[0])
            total = "" if counts[first] == wrong.sum() else f" ({int(wrong.sum())} of all clients)"
            raise ValueError(f"column {column!r} {what} {_rows(counts[first])} of {self.names[first]!r}{total}: {fix}.")


class _Block(NamedTuple):
    """A column as numbers: one for each entry of a sample, or several."""

    names: tuple[str, ...]
    values: np.ndarray  # [rows, len(names)]
    indicators: bool  # zeros and ones of a category, which are not rescaled


def _owners(column: "pd.Series", by: str) -> tuple[np.ndarray, list[str]]:
    import pandas as pd

    missing = int(column.isna().sum())
    if missing:
        raise ValueError(f"column {by!r} does not name the client of {_rows(missing)}: fill it, or drop those rows.")
    try:
        owner, values = pd.factorize(column, sort=True)
    except TypeError as error:
        raise ValueError(f"column {by!r} holds {type(column[0]).__name__}s; give names or numbers.") from error
    names = [str(value) for value in values]
    for name, count in Counter(names).items():
        if count > 1:
            raise ValueError(f"column {by!r} has both a number and a word {name!r}: make them one kind.")
    return owner, names


_FILL = (
    "drop these rows (dropna), or fill them (fillna) with a number that does not come from other clients and add an "
    "indicator column"
)


def _block(column: "pd.Series", name: Any, known: Sequence[Any] | None, whose: _Whose) -> _Block:
    """A feature's numbers."""
    if known is not None:
        whose.refuse(column.isna().to_numpy(), name, "has missing values in", _FILL)
        if len(set(known)) < len(known) or isinstance(known, str):
            raise ValueError(f"categories[{name!r}]={known!r}: give a list of values, each once.")
        code = column.map({value: i for i, value in enumerate(known)})
        new = column[code.isna()]
        other = repr(_plain(new.iloc[0])) if len(new) else ""
        whose.refuse(code.isna().to_numpy(), name, f"has {other}, which categories does not list, in", "add it there")
        hot = np.equal.outer(code.to_numpy(int), np.arange(len(known)))
        return _Block(tuple(f"{name}={value}" for value in known), hot.astype(float), True)
    if isinstance(column.iloc[0], list | tuple | np.ndarray):
        values = _vectors(column, name, whose)
        return _Block(tuple(f"{name}[{j}]" for j in range(values.shape[1])), values, False)
    fix = f"leave it out, drop=[{name!r}], or list what it may be, categories={{{name!r}: [...]}}"
    return _Block((str(name),), _numbers(column, name, whose, "a feature is a number", fix)[:, None], False)


def _vectors(column: "pd.Series", name: Any, whose: _Whose) -> np.ndarray:
    try:
        values = np.stack([np.asarray(entry, float) for entry in column])
    except (TypeError, ValueError):
        values = np.zeros(0)
    if values.ndim != 2:
        raise ValueError(
            f"column {name!r} holds arrays that are no vectors of one length: leave it out, drop=[{name!r}], or give "
            "the arrays to rk.Clients."
        )
    whose.refuse(~np.isfinite(values).all(axis=1), name, "has missing values in", _FILL)
    return values


def _numbers(column: "pd.Series", name: Any, whose: _Whose, rule: str, fix: str = "leave it out") -> np.ndarray:
    from pandas.api.types import is_bool_dtype, is_numeric_dtype

    present = column.dropna().infer_objects()
    if len(present) and not (is_numeric_dtype(present) or is_bool_dtype(present)):
        shown = _list(repr(_plain(value)) for value in present.unique()[:_SHOWN])
        raise ValueError(f"column {name!r} holds {_kind(present)} ({shown}), and {rule}: {fix}.")
    whose.refuse(column.isna().to_numpy(), name, "has missing values in", _FILL)
    values = column.to_numpy(float)
    whose.refuse(~np.isfinite(values), name, "is infinite in", "clean these rows, or drop them")
    return values


def _kind(column: "pd.Series") -> str:
    from pandas.api.types import is_datetime64_any_dtype

    if is_datetime64_any_dtype(column):
        return "dates"
    return "text" if isinstance(column.iloc[0], str) else f"values of type {type(column.iloc[0]).__name__}"


def _coded(column: "pd.Series", name: str, classes: Sequence[Any] | None, whose: _Whose) -> tuple[np.ndarray, Any]:
    """The labels as integers, and what they stand for."""
    import pandas as pd
    from pandas.api.types import is_float_dtype

    whose.refuse(column.isna().to_numpy(), name, "has missing values in", "drop these rows: nothing stands for a label")
    if is_float_dtype(column):
        if (column % 1 != 0).any():
            raise ValueError(
                f"column {name!r} holds fractions, and a label is a class: to predict a number, give target={name!r}."
            )
        column = column.astype(int)
    code: Any
    if classes is None:
        code, found = pd.factorize(column, sort=True)
        classes = _listed(found)
    else:
        code = column.map({value: i for i, value in enumerate(classes)})
        new = column[code.isna()]
        other = repr(_plain(new.iloc[0])) if len(new) else ""
        whose.refuse(code.isna().to_numpy(), name, f"has {other}, which classes does not list, in", "add it there")
    if len(classes) == 1:
        warnings.warn(f"column {name!r} has one class only, {classes[0]!r}: nothing to tell apart.", stacklevel=4)
    return np.asarray(code, np.int32), tuple(classes)


# Levels and scales.


def _split(own: np.ndarray, name: str, upper: float | None, test: float | None, by: str, seed: int) -> list[np.ndarray]:
    """A client's rows at the lower level, at the upper and for tests, drawn by the seed and the client's name alone.

    The rows for tests are the last of a random order, the upper level's the first: neither depends on the other's
    share.
    """
    parts = [share is not None for share in (upper, test)]
    if len(own) <= sum(parts):
        who = ["the data", "training and test data", "both levels", "both levels and the test data"]
        raise ValueError(
            f"{name!r} (column {by!r}) has {'one row' if len(own) == 1 else f'{len(own)} rows'}, and "
            f"{who[2 * parts[0] + parts[1]]} need one each: leave this client out, or ask for fewer parts."
        )
    if not any(parts):
        return [own]
    mixed = np.random.default_rng([seed, zlib.crc32(name.encode())]).permutation(own)
    tests = 0 if test is None else min(max(round(test * len(own)), 1), max(len(own) - 2, 1))
    count = 0 if upper is None else min(max(round(upper * len(own)), 1), len(own) - tests - 1)
    first, middle, last = np.split(mixed, [count, len(own) - tests])
    return [np.sort(rows) for rows, there in ((middle, True), (first, parts[0]), (last, parts[1])) if there]


def _scale_by_first(levels: list[Rows], numeric: np.ndarray) -> None:
    """All levels by mean and deviation of the first; zero where it has no deviation."""
    values = levels[0]["features"]
    varies = np.ptp(values, axis=0) > 0
    mean, deviation = values.mean(axis=0), np.where(varies, values.std(axis=0), 1)
    for rows in levels:
        scaled = np.where(varies, (rows["features"] - mean) / deviation, 0)
        rows["features"] = np.where(numeric, scaled, rows["features"])


def _check_numbers(given: Numbers, wanted: list[str], blocks: Mapping[str, _Block], faults: _Faults) -> None:
    for name, pair in given.items():
        with faults:
            if name not in wanted or (name in blocks and blocks[name].indicators):
                raise ValueError(f"standardize: {name!r} is not a numeric feature; there are {_list(wanted)}.")
            if not (isinstance(pair, list | tuple) and len(pair) == 2 and all(map(is_number, pair)) and pair[1] > 0):
                raise ValueError(
                    f"standardize[{name!r}]={pair!r} is not (mean, scale), two numbers, the second positive."
                )


def _scaled(block: _Block, pair: tuple[float, float] | None) -> _Block:
    return block if pair is None else block._replace(values=(block.values - pair[0]) / pair[1])


_LEAST_ROWS, _UNIQUE = 50, 0.95  # of a column of integers that looks like an ID: rows in all, and different ones
_RATIO = 1e3  # of the ranges of two features, above which they are of different scales


def _warn_of_numbers(blocks: Mapping[str, _Block], chosen: bool, standardize: Any) -> None:
    """Warn about columns that look like an ID, unless the features were chosen, and about very different scales."""
    known = standardize if isinstance(standardize, Mapping) else {}
    likely = [] if chosen else [name for name, block in blocks.items() if name not in known and _is_id(block)]
    if likely:
        warnings.warn(
            f"column {_list(map(repr, likely))} holds whole numbers that are different in nearly every row, as an ID's "
            f"are, and is a feature. Leave it out, drop={likely}, or name the features that you want, features=[...].",
            stacklevel=4,
        )
    spans = {name: np.ptp(block.values) for name, block in blocks.items() if name not in likely}
    spans = {name: float(span) for name, span in spans.items() if span > 0}
    if standardize == "client" or not spans:
        return
    small, large = min(spans, key=spans.__getitem__), max(spans, key=spans.__getitem__)
    if spans[large] > _RATIO * spans[small]:
        warnings.warn(
            f"the features have very different scales: {large!r} has a range of {spans[large]:.3g}, {small!r} of "
            f'{spans[small]:.3g}, and no one step size suits both. Give standardize="client", or public numbers, '
            f"standardize={{{large!r}: (mean, scale)}}.",
            stacklevel=4,
        )


def _is_id(block: _Block) -> bool:
    values = block.values
    if block.indicators or values.shape[1] > 1 or len(values) < _LEAST_ROWS or (values % 1).any():
        return False
    return len(np.unique(values)) >= _UNIQUE * len(values)


def _rows(count: int) -> str:
    return "1 row" if count == 1 else f"{count} rows"


def _list(names: Iterable[Any]) -> str:
    all_names = [str(name) for name in names]
    more = f" and {len(all_names) - _SHOWN} more" if len(all_names) > _SHOWN else ""
    return ", ".join(all_names[:_SHOWN]) + more


# Summaries.

_COUNTED = 20  # classes, each with a column of its own


def summary(
    names: Sequence[str], weights: np.ndarray, sizes: Mapping[str, np.ndarray], counts: Mapping[str, np.ndarray]
) -> "pd.DataFrame":
    """A row for each client: its name, its weight, its samples at each level, and those of each class in all."""
    import pandas as pd

    shown = dict(counts)
    if len(counts) > _COUNTED:
        shown = {"classes": np.sum([own > 0 for own in counts.values()], axis=0)}
    return pd.DataFrame({"client": list(names), "weight": weights, **sizes, **shown})


def describe(by: str, names: Sequence[str], sizes: Mapping[str, np.ndarray], counts: Mapping[str, np.ndarray]) -> str:
    """The same in words."""
    total = np.sum(list(sizes.values()), axis=0)
    small, large = int(np.argmin(total)), int(np.argmax(total))
    each = f"from {total[small]} ({names[small]}) to {total[large]} ({names[large]}) each"
    if total[small] == total[large]:
        each = f"{total[small]} each"
    words = f"{len(names)} client{'s' * (len(names) > 1)}{by} with {total.sum()} samples, {each}"
    if len(sizes) > 1:
        where = {"lower": "at the lower level", "upper": "at the upper", "samples": "to learn", "test": "for tests"}
        shares = [f"{own.sum() / total.sum():.0%} {where[name]}" for name, own in sizes.items()]
        shares[0] = shares[0].replace("%", "% of them")
        words += f"; {', '.join(shares[:-1])} and {shares[-1]}"
    if not counts:
        return words + "."
    table = np.stack(list(counts.values()))
    of_all = table.sum(axis=1) / table.sum()
    order = np.argsort(-of_all, kind="stable")[:_SHOWN]
    classes = ", ".join(f"{list(counts)[i]} ({of_all[i]:.0%})" for i in order)
    more = f" and {len(counts) - len(order)} more" if len(counts) > len(order) else ""
    lacking = int((table == 0).any(axis=0).sum())
    far = np.abs(table / table.sum(axis=0) - of_all[:, None]).sum(axis=0) / 2
    words += f". Labels: {classes}{more}. "
    words += f"In {lacking} of the clients a class is missing" if lacking else "All clients have all classes"
    if len(names) > 1:
        most = int(np.argmax(far))
        words += f"; least like the whole is {names[most]}, where {far[most]:.0%} of the labels would have to change"
    return words + "."
