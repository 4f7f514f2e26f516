"""Clients of a table: whose rows they are, what a sample is, and that nothing leaks between clients and levels."""

import re
import warnings
import zlib
from pathlib import Path
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
import pandas as pd
import pytest

import rookery as rk
from rookery import report
from rookery.engines.checks import start_values

SIZES = {"east": 2, "north": 7, "south": 20}


def frame(seed: int = 0) -> pd.DataFrame:
    """Three hospitals of unequal size, rows in a random order, an index that is not 0, 1, …"""
    rng = np.random.default_rng(seed)
    hospital = rng.permutation(np.repeat(list(SIZES), list(SIZES.values())))
    count = len(hospital)
    return pd.DataFrame(
        {
            "age": rng.integers(20, 90, count),
            "hospital": hospital,
            "pressure": rng.normal(120, 20, count),
            "sex": rng.choice(["f", "m"], count),
            "smokes": rng.choice([True, False], count),
            "ill": np.where(np.arange(count) % 3 == 0, "yes", "no"),
        },
        index=np.arange(count)[::-1] + 100,
    )


FRAME = frame()
CATEGORIES = {"sex": ["f", "m"]}


def made(table: Any = FRAME, by: str = "hospital", **given: Any) -> rk.Clients:
    return rk.Clients.from_frame(table, by, **{"label": "ill", "categories": CATEGORIES} | given)


def own_rows(name: str, upper: float, seed: int = 0) -> tuple[pd.DataFrame, pd.DataFrame]:
    """A client's rows at the lower and at the upper level, by the documented rule."""
    own = np.flatnonzero(FRAME["hospital"] == name)
    count = min(max(round(upper * len(own)), 1), len(own) - 1)
    mixed = np.random.default_rng([seed, zlib.crc32(name.encode())]).permutation(own)
    return FRAME.iloc[np.sort(mixed[count:])], FRAME.iloc[np.sort(mixed[:count])]


def columns(own: pd.DataFrame) -> np.ndarray:
    hot = [(own["sex"] == "f"), (own["sex"] == "m")]
    return np.stack([own["age"], own["pressure"], *hot, own["smokes"]], axis=1).astype(float)


def same(a: rk.Clients, b: rk.Clients) -> None:
    for level in ("lower", "upper"):
        one, two = getattr(a, level), getattr(b, level)
        assert one.rows.keys() == two.rows.keys()
        for key in one.rows:
            assert one.rows[key].dtype == two.rows[key].dtype
            np.testing.assert_allclose(one.rows[key], two.rows[key], rtol=1e-12)  # pandas before 3 reads to 1e-16
        np.testing.assert_array_equal(one.sizes, two.sizes)


def test_clients_of_a_frame_have_its_rows() -> None:
    clients = made(upper=0.3, weights="size", seed=5)
    assert clients.names == ("east", "north", "south")
    assert clients.lower_sizes.tolist() == [1, 5, 14]
    assert clients.upper_sizes.tolist() == [1, 2, 6]
    schema = clients.schema
    assert schema is not None
    assert schema.features == ("age", "pressure", "sex=f", "sex=m", "smokes")
    assert (schema.label, schema.classes) == ("ill", ("no", "yes"))
    for i, name in enumerate(clients.names):
        held = clients.client_data(i)
        for level, rows in zip(("lower", "upper"), own_rows(name, 0.3, seed=5), strict=True):
            np.testing.assert_array_equal(held[level][0]["features"], columns(rows))
            np.testing.assert_array_equal(held[level][0]["label"], (rows["ill"] == "yes").astype(int))
    assert clients.lower.rows["label"].dtype == jnp.int32
    np.testing.assert_allclose(clients.weights, np.array([1, 5, 14]) / 20)


def test_one_level_has_every_row_once() -> None:
    clients = made()
    assert clients.one_data_set
    assert clients.lower_sizes.tolist() == list(SIZES.values())
    assert sorted(np.asarray(clients.lower.rows["features"][:, 1])) == sorted(FRAME["pressure"])


def test_a_split_depends_on_the_seed_and_on_the_client_alone() -> None:
    whole = made(FRAME[FRAME["hospital"] != "east"], upper=0.5, standardize="client")
    alone = made(FRAME[FRAME["hospital"] == "south"], upper=0.5, standardize="client")
    np.testing.assert_array_equal(whole.client_data(1)["lower"][0]["features"], alone.lower.rows["features"])
    other = made(FRAME[FRAME["hospital"] == "south"], upper=0.5, standardize="client", seed=1)
    assert not np.array_equal(other.lower.rows["features"], alone.lower.rows["features"])


def changed(rows: pd.DataFrame) -> pd.DataFrame:
    table = FRAME.copy()
    table.loc[rows.index, "pressure"] = 1e4
    table.loc[rows.index, "age"] = 5
    return table


def test_standardizing_leaks_nothing_between_clients_or_levels() -> None:
    table = FRAME[FRAME["hospital"] != "east"]
    before = made(table, upper=0.3, standardize="client")
    for i, name in enumerate(before.names):
        lower, upper = own_rows(name, 0.3)
        mean, scale = columns(lower).mean(axis=0), columns(lower).std(axis=0)
        for level, rows in (("lower", lower), ("upper", upper)):
            expected = (columns(rows) - mean) / np.where(scale > 0, scale, 1)
            expected[:, 2:4] = columns(rows)[:, 2:4]  # categories stay 0 and 1
            np.testing.assert_allclose(before.client_data(i)[level][0]["features"], expected, atol=1e-12)
    after = made(changed(own_rows("south", 0.3)[1]).loc[table.index], upper=0.3, standardize="client")
    np.testing.assert_array_equal(before.lower.rows["features"], after.lower.rows["features"])
    own = [data.client_data(0)["upper"][0]["features"] for data in (before, after)]
    np.testing.assert_array_equal(*own)


def test_a_column_that_does_not_vary_is_zero_even_where_its_mean_is_rounded() -> None:
    table = {"by": ["a"] * 6 + ["b"] * 6, "v": [0.1] * 6 + [1.0, 2, 3, 4, 5, 6], "w": np.arange(12.0)}
    clients = rk.Clients.from_frame(table, "by", upper=0.5, standardize="client")
    for level in ("lower", "upper"):
        assert not clients.client_data(0)[level][0]["features"][:, 0].any()
        assert clients.client_data(1)[level][0]["features"][:, 0].any()


def test_public_numbers() -> None:
    plain, scaled = made(), made(standardize={"age": (60, 15), "smokes": (0.5, 0.5)})
    expected = (np.asarray(plain.lower.rows["features"]) - [60, 0, 0, 0, 0.5]) / [15, 1, 1, 1, 0.5]
    np.testing.assert_allclose(scaled.lower.rows["features"], expected)


class Columns:
    """What a Hugging Face dataset or a PyArrow table looks like to us."""

    def __init__(self, table: pd.DataFrame) -> None:
        self._table, self.column_names = table, list(table.columns)

    def __getitem__(self, name: str) -> list[Any]:
        return self._table[name].tolist()


class Lists(list):
    """A column that knows how to become an array."""

    def to_numpy(self) -> np.ndarray:
        return np.asarray(self)


@pytest.mark.parametrize("kind", ["mapping", "columns", "csv", "csv.gz", "categorical", "nullable"])
def test_anything_with_columns(kind: str, tmp_path: Path) -> None:
    table: Any = FRAME
    if kind == "mapping":
        table = {name: FRAME[name].to_numpy() for name in FRAME} | {"age": Lists(FRAME["age"])}
    elif kind == "columns":
        table = Columns(FRAME)
    elif kind.startswith("csv"):
        table = tmp_path / f"rows.{kind}"
        FRAME.to_csv(table, index=False)
    elif kind == "categorical":
        table = FRAME.astype({"sex": "category", "ill": "category", "hospital": "category"})
    else:
        table = FRAME.convert_dtypes()
    same(made(table, upper=0.3), made(upper=0.3))


def test_vectors_are_features() -> None:
    scans = np.arange(8.0).reshape(4, 2)
    for given in (scans, [row.tolist() for row in scans], pd.Series(list(scans))):
        clients = rk.Clients.from_frame({"by": [2, 10, 10, 2], "scan": given, "t": [0.5, 1, 2, 3]}, "by", target="t")
        assert clients.names == ("2", "10")  # by number
        assert clients.schema is not None
        assert clients.schema.features == ("scan[0]", "scan[1]")
        np.testing.assert_array_equal(clients.lower.rows["features"], scans[[0, 3, 1, 2]])
        np.testing.assert_array_equal(clients.lower.rows["target"], [0.5, 3, 1, 2])


def test_a_client_as_the_centre() -> None:
    clients = made(center="north")
    assert clients.names == ("east", "south")
    assert clients.center is not None
    np.testing.assert_array_equal(clients.center.rows["features"], columns(FRAME[FRAME["hospital"] == "north"]))


def test_classes_in_a_given_order_and_labels_as_numbers() -> None:
    flipped = made(classes=["yes", "no", "perhaps"])
    np.testing.assert_array_equal(flipped.lower.rows["label"], 1 - made().lower.rows["label"])
    floats = {"by": [0, 0, 1], "v": [1, 2, 3], "y": [7.0, 3.0, 7.0]}
    clients = rk.Clients.from_frame(floats, "by", label="y")
    assert clients.schema is not None
    assert clients.schema.classes == (3, 7)
    assert clients.lower.rows["label"].tolist() == [1, 0, 1]


@pytest.mark.slow
def test_engines_run_on_a_table_as_on_arrays() -> None:
    clients = made(standardize={"age": (60, 15), "pressure": (120, 20)}, weights="size")
    plain = rk.Clients([clients.client_data(i)["lower"][0] for i in range(3)], weights="size")
    loss = lambda x, b: jnp.mean(jnp.logaddexp(0, (1 - 2 * b["label"]) * (b["features"] @ x)))
    runs = [
        rk.solve(rk.SingleLevel(loss), data, rk.FedAvg(step=0.1), np.zeros(5), rounds=2, cohort=2, engine=engine)
        for data, engine in ((clients, rk.Federation()), (plain, rk.Simulation()))
    ]
    np.testing.assert_allclose(runs[0].x, runs[1].x, rtol=1e-12)


# Summaries.


def test_a_summary_counts() -> None:
    clients = made(upper=0.3, weights="size")
    table = clients.summary().set_index("client")
    assert table["lower"].tolist() == [1, 5, 14]
    expected = FRAME.groupby("hospital")["ill"].value_counts().unstack(fill_value=0)
    np.testing.assert_array_equal(table[["ill=no", "ill=yes"]], expected[["no", "yes"]])
    words = clients.describe()
    assert "3 clients by hospital with 29 samples, from 2 (east) to 20 (south) each; 69% of them at the lower" in words
    assert "no (66%), yes (34%)" in words
    plain = rk.Clients(lower=[{"t": np.zeros(3)}, {"t": np.ones(3)}])
    assert plain.describe() == "2 clients with 6 samples, 3 each."
    assert plain.summary()["samples"].tolist() == [3, 3]
    many = rk.Clients(lower=[{"label": np.arange(30)}, {"label": np.zeros(3, int)}])
    assert many.summary()["classes"].tolist() == [30, 1]
    assert "and 24 more. In 1 of the clients a class is missing; least like the whole is 1" in many.describe()


def test_a_picture_of_sizes_and_labels(tmp_path: Path) -> None:
    fig = report.clients_picture(made(upper=0.3), "Hospitals")
    sizes, labels = fig.axes
    assert [tick.get_text() for tick in sizes.get_yticklabels()] == ["south", "north", "east"]
    assert [bar.get_width() for bar in sizes.containers[0]] == [14, 5, 1]
    ends = [bar.get_x() + bar.get_width() for bar in labels.containers[1]]
    np.testing.assert_allclose(ends, 1)
    assert report.save(fig, tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")
    many = rk.Clients(lower=[{"label": np.arange(30) % (2 + i)} for i in range(50)])
    fig = report.clients_picture(many)
    assert len(fig.axes[1].containers) == 11  # ten classes and the others
    assert len(report.clients_picture(rk.Clients(lower=[np.zeros(3)])).axes) == 1


# Bad input.


def without(**new: Any) -> pd.DataFrame:
    return FRAME.assign(**new)


def with_gap(column: str, hospital: str, count: int) -> pd.DataFrame:
    table = FRAME.copy()
    table[column] = table[column].astype(object) if table[column].dtype.kind not in "f" else table[column]
    table.loc[table.index[table["hospital"] == hospital][:count], column] = np.nan
    return table


DOUBLE = pd.DataFrame([[1, 2, "a"]], columns=["v", "v", "hospital"])


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: made(by="clinic"), r"no column 'clinic' \(by\); its columns are age, hospital, pressure"),
        (lambda: made(label="dead"), r"no column 'dead' \(label or target\)"),
        (lambda: made(features=["age", "weight"]), r"features: the table has no column 'weight'"),
        (lambda: made(drop=["weight"]), r"drop: the table has no column 'weight'"),
        (lambda: made(features=["age", "ill"], categories={}), r"features: 'ill' is already the column of the clients"),
        (lambda: made(features=[]), r"the features must have at least one column; none is left"),
        (lambda: made(pd.concat([FRAME, FRAME[FRAME["hospital"] == "east"].assign(hospital="alone")[:1]]), upper=0.3),
         r"'alone' \(column 'hospital'\) has 1 row, and both levels need one"),
        (lambda: made(categories={}), r"column 'sex' holds text \('[fm]', '[fm]'\).*drop=\['sex'\].*categories="),
        (lambda: made(without(seen=pd.Timestamp("2020-01-01"))), r"column 'seen' holds dates .*a feature is a number"),
        (lambda: made(with_gap("age", "north", 3)), r"column 'age' has missing values in 3 rows of 'north': drop"),
        (lambda: made(without(pressure=FRAME["pressure"].where(FRAME["hospital"] == "north"))),
         r"column 'pressure' has missing values in 2 rows of 'east' \(22 of all clients\)"),
        (lambda: made(with_gap("sex", "south", 2)), r"column 'sex' has missing values in 2 rows of 'south'"),
        (lambda: made(with_gap("ill", "south", 2)), r"column 'ill' has missing values in 2 rows of 'south': drop"),
        (lambda: made(with_gap("hospital", "south", 4)), r"column 'hospital' does not name the client of 4 rows: fill"),
        (lambda: made(without(pressure=np.inf)), r"column 'pressure' is infinite in 2 rows of 'east' \(29 of all"),
        (lambda: made(categories={"sex": ["f"]}), r"column 'sex' has 'm', which categories does not list, in \d+ row"),
        (lambda: made(classes=["no"]), r"column 'ill' has 'yes', which classes does not list, in"),
        (lambda: made(classes=["no"], label=None, drop=["ill"]), r"classes .*needs a label; got none. Give label="),
        (lambda: made(FRAME[:0]), r"the table must have at least one row"),
        (lambda: made(DOUBLE), r"more than one column 'v'\. Rename"),
        (lambda: made(label="pressure", drop=["ill"]), r"'pressure' holds fractions.*give target='pressure'"),
        (lambda: made(upper=1.0), r"upper must be a share between 0 and 1, .*; got 1.0"),
        (lambda: made(upper=30), r"upper must be a share between 0 and 1, .*; got 30"),
        (lambda: made(standardize="all"), r"standardize must be \"client\", .*; got 'all'"),
        (lambda: made(standardize={"sex": (0, 1)}), r"standardize must name numeric features, .*; got 'sex'"),
        (lambda: made(standardize={"age": (0, 0)}), r"standardize\['age'\] must be \(mean, scale\).*; got \(0, 0\)"),
        (lambda: made(standardize="client", upper=0.3), r"'east' has one row to train on.*would make it zero"),
        (lambda: made(center="west"),
         r"center must be a client of column 'hospital', which has east, north, south; got"),
        (lambda: made({"hospital": ["a", "b"], "v": [1]}), r"columns must have the same length; got hospital: 2, v: 1"),
        (lambda: made({"hospital": [1, "1"], "v": [1, 2]}, label=None, categories=None), r"both a number and a word"),
        (lambda: made("rows.xlsx"), r"rows.xlsx must end in .csv or .parquet. Read it with pandas"),
        (lambda: made("rows.csv"), r"there is no file rows.csv"),
        (lambda: rk.Clients.from_frame({"by": [1, 2], "v": [[1, 2], [3]]}, "by"), r"column 'v' holds arrays"),
        (lambda: made(by="ill"), r"label must be another column than by; got 'ill' for both"),
        (lambda: made({"hospital": list(np.array(["a", "b"])), "v": list(np.array(["f", "m"]))}, label=None,
                      categories={"v": ["f"]}), r"column 'v' has 'm', which categories does not list"),
        (lambda: made({"hospital": ["a", "b"], "v": list(np.array(["f", "m"]))}, label=None, categories=None),
         r"column 'v' holds text \('f', 'm'\)"),
        (lambda: made(classes=[1, 2], label="age", drop=["ill"]), r"column 'age' has \d+, which classes does not list"),
        (lambda: made(without(v=[[1, 2], [3]] * 14 + [[1]])), r"column 'v' holds arrays that are not vectors of one"),
    ],
)  # fmt: skip
def test_bad_tables(call: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        call()
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"by": ["hospital"]}, r"by must be the name of one column; got \['hospital'\]"),
        ({"label": ["ill"]}, r"label must be the name of one column; got \['ill'\]"),
        ({"categories": ["sex"]}, r"categories must be a dict from a column to its values.*; got \['sex'\]"),
        ({"categories": {"sex": 2}}, r"categories\['sex'\] must be a list of values; got 2"),
        ({"features": ["age", ["sex"]]}, r"features must be a list of columns; got \['age', \['sex'\]\]"),
        ({"drop": 3}, r"drop must be a list of columns; got 3"),
        ({"classes": 3}, r"classes must be a list of values; got 3"),
    ],
)
def test_arguments_of_the_wrong_kind(given: Any, message: str) -> None:
    with pytest.raises(TypeError, match=message):
        made(**given)


def test_all_faults_of_a_table_at_once() -> None:
    table = with_gap("age", "north", 3).assign(pressure=np.inf, when=pd.Timestamp("2020-01-01"))
    with pytest.raises(ValueError, match=r"^9 faults in the table or the arguments:\n- ") as caught:
        made(table, upper=2, classes=[0, 1, 0], standardize="all", center="west", drop=["weight"])
    lines = str(caught.value).splitlines()
    assert len(lines) == 7
    assert lines[1].startswith("- upper must be a share")
    assert lines[2].startswith("- classes must be a list with every class once; got [0, 1, 0].")
    assert lines[-1] == "- and 4 more."
    with pytest.raises(ValueError, match=r"^2 faults in the table") as caught:
        made(table, drop=["when"])
    assert "column 'age' has missing values in 3 rows" in str(caught.value)
    assert "column 'pressure' is infinite" in str(caught.value)
    with pytest.raises(ValueError, match=r"^3 faults in the table"):
        made(label="dead", target="died", features=["weight"], categories={})


# Which rows.


@pytest.mark.parametrize(("count", "test"), [(3, 0.9), (10, 0.5), (40, 0.2), (200, 0.33)])
def test_test_rows_do_not_depend_on_the_levels(count: int, test: float) -> None:
    """With so many rows each; rows of the upper level do not depend on the test's, unless there are too few."""
    table = {"site": ["a", "b", "c"] * count, "row": np.arange(3 * count)}
    made = lambda **given: rk.Clients.from_frame(table, by="site", features=["row"], seed=3, **given)
    rows = lambda source: np.asarray(source.rows["features"]).tolist()
    expected = made(test=test)
    for upper in (0.01, 0.09):
        nested = made(test=test, upper=upper)
        assert rows(nested.test) == rows(expected.test)
        assert sorted(rows(nested.single_level().lower)) == sorted(rows(expected.lower))
        assert rows(nested.upper) == rows(made(upper=upper).upper)


# Names, numbers and scales.


def test_names_of_clients_in_a_csv_file_are_text(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("site,v\n01,1\n1,2\n001,3\n1,4\n")
    clients = rk.Clients.from_frame(tmp_path / "a.csv", by="site")
    assert clients.names == ("001", "01", "1")
    assert clients.lower_sizes.tolist() == [1, 1, 2]
    assert rk.Clients.from_frame(tmp_path / "a.csv", by="site", center="01").names == ("001", "1")
    (tmp_path / "b.csv").write_text("site,v\n10,1\n9,2\n10,3\n")  # as in a DataFrame: by number
    assert rk.Clients.from_frame(tmp_path / "b.csv", by="site").names == ("9", "10")
    (tmp_path / "c.csv").write_text("site,v\nNA,1\nnan,2\n1.0,3\n1,4\n")
    assert rk.Clients.from_frame(tmp_path / "c.csv", by="site").names == ("1", "1.0", "NA", "nan")
    (tmp_path / "d.csv").write_text("site,v\n,1\na,2\n")
    with pytest.raises(ValueError, match="column 'site' does not name the client of 1 row: fill it"):
        rk.Clients.from_frame(tmp_path / "d.csv", by="site")


def test_classes_in_a_csv_file_keep_their_zeros(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("site,v,code,kind\na,1,01,007\na,2,1,7\nb,3,1,7\nb,4,01,7\n")
    clients = rk.Clients.from_frame(tmp_path / "a.csv", "site", label="code", categories={"kind": ["007", "7"]})
    assert clients.schema.classes == ("01", "1")
    assert clients.schema.features == ("v", "kind=007", "kind=7")
    assert clients.lower.rows["label"].tolist() == [0, 1, 1, 0]
    (tmp_path / "b.csv").write_text("site,v,code\na,1,0\nb,2,10\n")
    assert rk.Clients.from_frame(tmp_path / "b.csv", "site", label="code").schema.classes == (0, 10)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("site,v\na,1\nb,2,3\n", r"a.csv has 3 fields in line 3, and 2 in the header\. Correct the file, or quote"),
        ("site,v\na,1,2\nb,2,3\n", r"a.csv has more fields in its rows than in its header\. Correct the file"),
        ('site,v\na,"1\nb,2\n', r"a.csv cannot be read as CSV \(.*\)\. Correct the file"),
    ],
)
def test_ragged_files(text: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text(text)
    with pytest.raises(ValueError, match=message) as caught:
        rk.Clients.from_frame(tmp_path / "a.csv", by="site")
    assert "\n" not in str(caught.value)
    (tmp_path / "a.csv").write_bytes("site,v\nZürich,1\n".encode("latin-1"))
    with pytest.raises(ValueError, match=r"a.csv must be UTF-8 text; it is not. Read it with pandas"):
        rk.Clients.from_frame(tmp_path / "a.csv", by="site")


def test_classes_are_given_once() -> None:
    with pytest.raises(ValueError, match=r"^classes must be a list with every class once; got \[0, 1, 0\]\.$"):
        rk.Clients.from_frame({"by": ["a", "b"], "v": [1.0, 2.0], "k": [0, 1]}, "by", label="k", classes=[0, 1, 0])


def patients() -> pd.DataFrame:
    rng = np.random.default_rng(0)
    return pd.DataFrame(
        {
            "hospital": rng.choice(["a", "b"], 100),
            "patient_id": rng.permutation(10**6)[:100],
            "age": rng.integers(20, 90, 100),
            "pressure": rng.normal(120, 20, 100),
        }
    )


def test_an_id_and_different_scales_are_warnings() -> None:
    with pytest.warns(UserWarning, match="column 'patient_id'") as caught:
        rk.Clients.from_frame(patients(), by="hospital")
    (one,) = [str(warning.message) for warning in caught]
    assert one.startswith("column 'patient_id' is a feature and looks like an ID: its whole numbers differ")
    assert "drop=['patient_id']" in one
    assert "\n" not in one
    assert caught[0].filename == __file__
    with pytest.warns(UserWarning, match="very different scales") as caught:
        rk.Clients.from_frame(patients().assign(dose=1e-3 * patients()["age"]), by="hospital", drop=["patient_id"])
    (two,) = [str(warning.message) for warning in caught]
    assert two.startswith("the features have very different scales: 'pressure' has a range of ")
    assert "'dose' of 0.069" in two
    assert 'standardize="client"' in two
    assert "\n" not in two


@pytest.mark.parametrize(
    "given",
    [
        {"drop": ["patient_id"]},
        {"features": ["patient_id"]},  # chosen
        {"features": ["patient_id", "age"], "standardize": "client"},
        {"standardize": {"patient_id": (5e5, 3e5)}},
    ],
)
def test_no_warning_where_all_is_well(given: Any) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        rk.Clients.from_frame(patients(), by="hospital", **given)
        rk.Clients.from_frame(patients()[:40], by="hospital", drop=["patient_id"])


def test_the_number_of_the_client_in_a_sample() -> None:
    clients = made(upper=0.3, test=0.2, client="who", center="east", features=["age", "pressure"], categories={})
    assert clients.names == ("north", "south")
    for i in range(2):
        own = clients.client_data(i)
        for level in ("lower", "upper", "test"):
            assert set(own[level][0]["who"].tolist()) == {i}
            assert own[level][0]["who"].dtype == np.int32
    assert set(np.asarray(clients.center.rows["who"]).tolist()) == {-1}
    assert "who" not in made().lower.rows
    for wrong in ("features", "label", "target", 3):
        with pytest.raises(ValueError, match=rf"^client must be a name .*; got {wrong!r}\.$"):
            made(client=wrong)


def test_bad_kinds_of_tables() -> None:
    with pytest.raises(TypeError, match=r"the table must be a pandas DataFrame, .*; got an int"):
        made(3)
    with pytest.raises(TypeError, match=re.escape("drop must be a list of columns; got 'sex'. Give drop=['sex']")):
        made(drop="sex")
    parts = Columns(FRAME)
    parts.column_names = {"train": ["a"], "test": ["a"]}  # type: ignore[assignment]
    with pytest.raises(ValueError, match=r"several parts, train, test\. Give one of them"):
        made(parts)


def test_files(tmp_path: Path) -> None:
    (tmp_path / "double.csv").write_text("hospital,v,v\na,1,2\n")
    with pytest.raises(ValueError, match="more than one column 'v'"):
        made(tmp_path / "double.csv")
    (tmp_path / "empty.csv").write_text("")
    with pytest.raises(ValueError, match="must have at least one row; it is empty"):
        made(tmp_path / "empty.csv")
    try:
        FRAME.to_parquet(tmp_path / "rows.parquet")
    except ImportError:
        (tmp_path / "rows.parquet").write_bytes(b"PAR1")
        with pytest.raises(ValueError, match=r"pandas needs pyarrow to read Parquet\. Run pip install pyarrow"):
            made(tmp_path / "rows.parquet")
    else:
        same(made(tmp_path / "rows.parquet", upper=0.3), made(upper=0.3))


def test_one_class_is_a_warning() -> None:
    with pytest.warns(UserWarning, match="column 'ill' has only one class, 'no'"):
        made(without(ill="no"))


# x alone.


class Pair(NamedTuple):
    a: Any
    b: Any


SHIFTED = [np.array([[1.0, 2.0]]), np.array([[3.0, 0.0], [1.0, 1.0]])]


def test_a_compositional_problem_takes_x_alone() -> None:
    clients = rk.Clients(upper=SHIFTED)
    whole = lambda x, b: jnp.mean(b, axis=0) * x
    outer = lambda v: jnp.sum((v - 1) ** 2)
    run = rk.solve(rk.Compositional(whole, outer), clients, rk.MBSGD(step=0.1), np.ones(2), rounds=1)
    mean = np.array([1.5, 1.25])  # of the clients' means
    np.testing.assert_allclose(run.x, 1 - 0.1 * 2 * (mean - 1) * mean, rtol=1e-12)

    split = rk.Compositional(lambda x, b: whole(jnp.stack(list(x)), b), outer)
    both = (np.ones(()), np.ones(()))
    for init in ((both, None), Pair(*both), list(both)):
        x, y = start_values(split, clients, init)
        assert type(x) is type(init[0] if isinstance(init[0], tuple) else init)
        np.testing.assert_array_equal(np.stack(list(x)), np.ones(2))
        np.testing.assert_array_equal(y, np.zeros(2))
    with pytest.raises(ValueError, match=r"A tuple of two is \(x, y\); give an x that is such .* as init=\(x, None\)"):
        rk.solve(split, clients, rk.MBSGD(), both, rounds=1)
