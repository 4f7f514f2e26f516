"""Clients from a table whose rows name their client."""

import warnings
import zlib
from collections.abc import Collection, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
from jaxtyping import Array, Float

from rookery.base.arguments import check_seed, is_number
from rookery.data.columns import Block, class_codes, count_rows, feature_block, numbers, owners
from rookery.data.tables import listed, plain, read_columns

if TYPE_CHECKING:
    import pandas as pd

Arrays = dict[str, np.ndarray]
Scales = Mapping[str, tuple[float, float]]  # of a column: its mean and scale
C = TypeVar("C")
_LINES = 5  # faults of a table that a message lists


@dataclass(frozen=True)
class Schema:
    """What the arrays that come from a table stand for.

    Attributes:
        by: the column that names each row's client.
        names: the clients' names, in their order.
        features: what each entry of a sample's "features" is: a column's name, "sex=f" for a category, "scan[0]" for
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


class _Faults:
    """Collects what is wrong with a table and its arguments, to report everything together."""

    def __init__(self) -> None:
        self.found: list[ValueError | TypeError] = []

    @contextmanager
    def noted(self, fatal: bool = False) -> Iterator[None]:
        """Note the error of one check and go on to the next; after a fatal one, report."""
        try:
            yield
        except (ValueError, TypeError) as error:
            self.found.append(error)
            if fatal:
                self.report()

    def report(self) -> None:
        """Raise what was noted: one error as it is, several in one message."""
        if len(self.found) == 1:
            raise self.found[0] from None
        if self.found:
            lines = [f"- {error}" for error in self.found[:_LINES]]
            more = [f"- and {len(self.found) - _LINES} more."] if len(self.found) > _LINES else []
            first = f"{len(self.found)} faults in the table or the arguments:"
            raise ValueError("\n".join([first, *lines, *more])) from None


def from_frame(
    cls: type[C],
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
    standardize: str | Scales | None = None,
    center: str | None = None,
    client: str | None = None,
    weights: Sequence[float] | Float[Array, " n"] | str | None = None,
    replace: bool = False,
    seed: int = 0,
) -> C:
    """Make clients from a table with a column that names each row's client.

    A sample is {"features": floats (d,), "label": int32, "target": float}, the last two if you ask for them. `schema`
    says what they stand for; `names` are the clients' names in sorted order. All faults of a table are reported
    together.

    Arguments:
        table: a pandas DataFrame; a path to a CSV or Parquet file; {name: array}; or an object with `column_names`
            (or `columns`) that gives a column by name: a Hugging Face dataset, a PyArrow table.
        by: the column with the client's name. In a CSV file names are text: 01, 1 and 001 are three clients.
        upper: the share of each client's rows, at least one, that go to the upper level, drawn by the seed and the
            client's name; the others, at least one, go to the lower level. None: one data set for both.
        test: the share of each client's rows, at least one, that no method sees, for `evaluate_client`. Which rows
            these are depends on the table, `by`, `test` and `seed`, not on `upper`.
        features: columns of numbers (or of vectors of one length); None: all but `by`, label, target and `drop`.
        label: a column of classes, words or integers, coded 0, 1, … in the order of `classes`.
        target: a column with a number to predict.
        drop: columns to leave out.
        categories: {column: its values}, for columns of text: a feature for each value, 1 where a row has it.
        classes: the possible labels; None: those in the table, sorted. (Every client learns them, as it learns
            `categories`.)
        standardize: "client": subtract the mean of the client's own rows at the lower level and divide by their
            standard deviation (a column that does not vary becomes zero). Nothing from other clients or from the upper
            level is used. Or {column: (mean, scale)} with public numbers. None: leave the numbers as they are.
        center: the client whose rows all become the centre's; it is then not a client. For `WeightedNodes`.
        client: a name, such as "client", under which each sample has its client's number (int32), the position in
            `names`; −1 in the centre's rows. For losses with a weight for each client.
        weights, replace: as in `Clients`.
        seed: the seed of the split.

    Example:
        >>> from rookery import Clients
        >>> rows = {"hospital": ["a", "a", "b", "b", "b"], "age": [61, 48, 70, 39, 55], "ill": [1, 0, 1, 0, 0]}
        >>> clients = Clients.from_frame(rows, by="hospital", upper=0.3, label="ill")
        >>> clients.names, clients.lower_sizes.tolist(), clients.schema.features
        (('a', 'b'), [1, 2], ('age',))
    """
    faults = _Faults()
    with faults.noted():
        check_seed(seed)
    _check_shares(upper, test, faults)
    by, label, target = plain(by), plain(label), plain(target)
    categories = {} if categories is None else categories
    if not _check_kinds({"by": by, "label": label, "target": target}, features, drop, categories, classes, faults):
        faults.report()
    categories = {name: _plain_list(values) for name, values in categories.items()}
    classes = _plain_list(classes)
    _check_values(label, classes, standardize, client, faults)
    center = None if center is None else str(center)

    with faults.noted(fatal=True):
        columns = read_columns(table, by, [label, *categories])
    answers = [name for name in (label, target) if name is not None]
    wanted = _features(columns, by, features, answers, drop, categories, faults)
    if any(name not in columns for name in (by, *answers)):
        faults.report()  # a misspelt label leaves the real one among the features
    with faults.noted(fatal=True):
        of = owners(columns[by], by)
    blocks: dict[str, Block] = {}
    for name in wanted:
        with faults.noted():
            blocks[name] = feature_block(columns[name], name, categories.get(name), of)
    answer_columns: Arrays = {}
    coded_classes: tuple[Any, ...] = ()
    if label is not None:
        with faults.noted():
            answer_columns["label"], coded_classes = class_codes(columns[label], label, classes, of)
    if target is not None:
        with faults.noted():
            answer_columns["target"] = numbers(columns[target], target, of, "a target is a number").astype(float)

    if isinstance(standardize, Mapping):
        _check_scales(standardize, wanted, blocks, faults)
    clients = [name for name in of.names if name != center]
    with faults.noted():
        if len(clients) == len(of.names) and center is not None:
            raise ValueError(f"center must be a client of column {by!r}, which has {listed(of.names)}; got {center!r}.")
        if not clients:
            raise ValueError(f"center must leave other clients to learn from; got {center!r}, the only one.")
    rows: dict[str, list[np.ndarray]] = {}
    for name, own in zip(of.names, of.rows(), strict=True):
        with faults.noted():
            rows[name] = [own] if name == center else _split(own, name, upper, test, by, seed)
            if standardize == "client" and len(rows[name][0]) < 2:
                raise ValueError(
                    f'{name!r} has one row to train on, and standardize="client" would make it zero: leave this client '
                    "out, or give public numbers, standardize={column: (mean, scale)}."
                )
    faults.report()

    if isinstance(standardize, Mapping):
        blocks = {name: _scaled(block, standardize.get(name)) for name, block in blocks.items()}
    _warn_of_numbers(blocks, features is not None, standardize)
    arrays = {"features": np.concatenate([block.values for block in blocks.values()], axis=1), **answer_columns}
    if client is not None:
        position = {name: i for i, name in enumerate(clients)}
        arrays[client] = np.array([position.get(name, -1) for name in of.names], np.int32)[of.client]
    numeric = np.concatenate([np.full(len(block.names), not block.indicators) for block in blocks.values()])
    parts: dict[str, list[Arrays]] = {}
    for name, levels in rows.items():
        parts[name] = [{key: values[index] for key, values in arrays.items()} for index in levels]
        if standardize == "client":
            _standardize(parts[name], numeric)
    center_rows = None if center is None else parts.pop(center)[0]
    lower, *further = [list(level) for level in zip(*parts.values(), strict=True)]
    make: Any = cls
    made = make(
        lower,
        None if upper is None else further[0],
        weights,
        test=None if test is None else further[-1],
        center=center_rows,
        replace=replace,
    )
    entries = tuple(entry for block in blocks.values() for entry in block.names)
    made.schema = Schema(by, tuple(parts), entries, label, coded_classes, target, center)
    return made


# Arguments.


def _check_shares(upper: Any, test: Any, faults: _Faults) -> None:
    shares = []
    for name, value, none in (("upper", upper, "one data set for both levels"), ("test", test, "no test data")):
        with faults.noted():
            if value is None:
                continue
            if not (is_number(value) and 0 < value < 1):
                raise ValueError(f"{name} must be a share between 0 and 1, or None for {none}; got {value!r}.")
            shares.append(value)
    with faults.noted():
        if sum(shares) >= 1:
            raise ValueError(
                f"upper and test must leave rows to the lower level; got upper={upper!r} and test={test!r}. Give "
                "smaller shares."
            )


def _check_kinds(
    columns: dict[str, Any], features: Any, drop: Any, categories: Any, classes: Any, faults: _Faults
) -> bool:
    """Return whether columns are given by name, and several of them as lists."""
    before = len(faults.found)
    for what, name in columns.items():
        with faults.noted():
            if not isinstance(name, Hashable):
                raise TypeError(f"{what} must be the name of one column; got {name!r}.")
            if what != "by" and name is not None and name == columns["by"]:
                raise ValueError(f"{what} must be another column than by; got {name!r} for both.")
    lists = {"features": features, "drop": drop, "classes": classes}
    with faults.noted():
        if not isinstance(categories, Mapping):
            raise TypeError(
                f'categories must be a dict from a column to its values, such as {{"sex": ["f", "m"]}}; got '
                f"{categories!r}."
            )
        lists |= {f"categories[{name!r}]": values for name, values in categories.items()}
    for what, values in lists.items():
        is_list = isinstance(values, Collection) and all(isinstance(value, Hashable) for value in values)
        with faults.noted():  # a single string is refused later, with the fix
            if values is not None and not is_list:
                raise TypeError(
                    f"{what} must be a list of {'values' if what[0] == 'c' else 'columns'}; got {values!r}."
                )
    return len(faults.found) == before


def _plain_list(values: Any) -> Any:
    return values if values is None or isinstance(values, str) else [plain(value) for value in values]


def _check_values(label: Any, classes: Any, standardize: Any, client: Any, faults: _Faults) -> None:
    with faults.noted():
        if classes is not None and label is None:
            raise ValueError("classes lists the possible labels, and needs a label; got none. Give label=..., too.")
        if isinstance(classes, str) or (classes is not None and len(set(classes)) < len(classes)):
            raise ValueError(f"classes must be a list with every class once; got {classes!r}.")
    with faults.noted():
        if standardize not in (None, "client") and not isinstance(standardize, Mapping):
            raise ValueError(
                'standardize must be "client", {column: (mean, scale)} with public numbers, or None; got '
                f"{standardize!r}."
            )
    with faults.noted():
        if client is not None and (not isinstance(client, str) or client in ("features", "label", "target")):
            raise ValueError(
                f'client must be a name for the client\'s number in a sample, such as "client", other than '
                f'"features", "label" and "target"; got {client!r}.'
            )


def _features(
    columns: Mapping[str, "pd.Series"],
    by: str,
    features: Sequence[str] | None,
    answers: list[str],
    drop: Sequence[str],
    categories: Mapping[str, Any],
    faults: _Faults,
) -> list[str]:
    """Return the columns that are features; named columns that do not exist are faults."""
    lists = {"features": () if features is None else features, "drop": drop, "categories": list(categories)}
    for what, names in lists.items():
        if isinstance(names, str):
            with faults.noted():
                raise TypeError(f"{what} must be a list of columns; got {names!r}. Give {what}=[{names!r}].")
            lists[what] = [names]
    for what, name in [("by", by), *(("label or target", name) for name in answers)]:
        with faults.noted():
            if name not in columns:
                raise ValueError(f"the table has no column {name!r} ({what}); its columns are {listed(columns)}.")
    for what, names in lists.items():
        for name in names:
            with faults.noted():
                if name not in columns:
                    raise ValueError(f"{what}: the table has no column {name!r}; its columns are {listed(columns)}.")
                if name in (by, *answers):
                    raise ValueError(f"{what}: {name!r} is already the column of the clients, the label or the target.")
    chosen = columns if features is None else lists["features"]
    wanted = [name for name in dict.fromkeys(chosen) if name not in (by, *answers, *lists["drop"])]
    with faults.noted():
        if not wanted:
            raise ValueError("the features must have at least one column; none is left. Give features=[...].")
    return [name for name in wanted if name in columns]


def _check_scales(scales: Scales, wanted: list[str], blocks: Mapping[str, Block], faults: _Faults) -> None:
    for name, pair in scales.items():
        with faults.noted():
            if name not in wanted or (name in blocks and blocks[name].indicators):
                raise ValueError(f"standardize must name numeric features, {listed(wanted)}; got {name!r}.")
            if not (isinstance(pair, list | tuple) and len(pair) == 2 and all(map(is_number, pair)) and pair[1] > 0):
                raise ValueError(
                    f"standardize[{name!r}] must be (mean, scale), two numbers, the second positive; got {pair!r}."
                )


# Levels and scales.


def _split(
    rows: np.ndarray, name: str, upper: float | None, test: float | None, by: str, seed: int
) -> list[np.ndarray]:
    """Split a client's rows into lower level, upper level and test data, by the seed and the client's name.

    Test rows are the last of a random order, and those of the upper level the first, so neither depends on the other's
    share.
    """
    parts = [share is not None for share in (upper, test)]
    if len(rows) <= sum(parts):
        who = ["the data", "training and test data", "both levels", "both levels and the test data"]
        raise ValueError(
            f"{name!r} (column {by!r}) has {count_rows(len(rows))}, and {who[2 * parts[0] + parts[1]]} need one each: "
            "leave this client out, or ask for fewer parts."
        )
    if not any(parts):
        return [rows]
    mixed = np.random.default_rng([seed, zlib.crc32(name.encode())]).permutation(rows)
    tests = 0 if test is None else min(max(round(test * len(rows)), 1), max(len(rows) - 2, 1))
    count = 0 if upper is None else min(max(round(upper * len(rows)), 1), len(rows) - tests - 1)
    first, middle, last = np.split(mixed, [count, len(rows) - tests])
    return [np.sort(part) for part, exists in ((middle, True), (first, parts[0]), (last, parts[1])) if exists]


def _standardize(levels: list[Arrays], numeric: np.ndarray) -> None:
    """Standardize all levels by the mean and deviation of the first; zero where it does not vary."""
    values = levels[0]["features"]
    varies = np.ptp(values, axis=0) > 0
    mean, deviation = values.mean(axis=0), np.where(varies, values.std(axis=0), 1)
    for arrays in levels:
        scaled = np.where(varies, (arrays["features"] - mean) / deviation, 0)
        arrays["features"] = np.where(numeric, scaled, arrays["features"])


def _scaled(block: Block, pair: tuple[float, float] | None) -> Block:
    return block if pair is None else block._replace(values=(block.values - pair[0]) / pair[1])


_LEAST_ROWS, _UNIQUE = 50, 0.95  # a column looks like an ID from this many rows and this share of distinct integers on
_RATIO = 1e3  # the ratio of two features' ranges from which on their scales are very different


def _warn_of_numbers(blocks: Mapping[str, Block], chosen: bool, standardize: Any) -> None:
    """Warn about columns that look like an ID, unless the features were chosen, and about very different scales."""
    known = standardize if isinstance(standardize, Mapping) else {}
    likely = [] if chosen else [name for name, block in blocks.items() if name not in known and _is_id(block)]
    if likely:
        warnings.warn(
            f"column {listed(map(repr, likely))} is a feature and looks like an ID: its whole numbers differ in nearly "
            f"every row. Leave it out, drop={likely}, or name the features that you want, features=[...].",
            stacklevel=3,
        )
    spans = {name: np.ptp(block.values) for name, block in blocks.items() if name not in likely}
    spans = {name: float(span) for name, span in spans.items() if span > 0}
    if standardize == "client" or not spans:
        return
    small, large = min(spans, key=spans.__getitem__), max(spans, key=spans.__getitem__)
    if spans[large] > _RATIO * spans[small]:
        warnings.warn(
            f"the features have very different scales: {large!r} has a range of {spans[large]:.3g}, {small!r} of "
            f'{spans[small]:.3g}, and no single step size suits both. Give standardize="client", or public numbers, '
            f"standardize={{{large!r}: (mean, scale)}}.",
            stacklevel=3,
        )


def _is_id(block: Block) -> bool:
    values = block.values
    if block.indicators or values.shape[1] > 1 or len(values) < _LEAST_ROWS or (values % 1).any():
        return False
    return len(np.unique(values)) >= _UNIQUE * len(values)
