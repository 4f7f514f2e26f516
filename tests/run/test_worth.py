"""`worth`: what a hospital sees of a split, the models against independent fits, the whole, bad input."""

import json
import re
from html import escape
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pandas as pd
import pytest
from scipy.optimize import minimize
from tests.run.worth_tables import rows, study
from typer.testing import CliRunner

import rookery as rk
from rookery import cli
from rookery.data import heart
from rookery.run.worth import methods, metrics
from rookery.run.worth.designs import Site, site
from rookery.run.worth.fits import RIDGE, minimise
from rookery.run.worth.hospitals import Hospital, federation, split
from rookery.run.worth.methods import ALONE, FEDERATED, FLOOR, METHODS, PENALTIES, POOLED


def exact(parts: methods.Study, _: Any) -> tuple[dict[str, Any], np.ndarray]:
    """Stand in for `fit_all`: the hospital's own models or the pooled ones for every method."""
    alone, pooled = methods._alone(parts), methods._pooled(parts)
    like = {ALONE: alone, "fine-tuned": alone, "Ditto": alone, "learnt weights": alone}
    weights = np.full((len(parts.sites),) * 2, 1 / len(parts.sites))
    return {name: like.get(name, pooled) for name in METHODS if name != FLOOR}, weights


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(methods, "fit_all", exact)


# What the models see.


def test_splits_are_stratified_and_every_row_has_one_part() -> None:
    hospital = Hospital("h", np.zeros((50, 1)), np.arange(50) < 10)
    parts = split(hospital, 30, seed=3)
    tests = ~parts.train
    assert (tests[:, :10].sum(axis=1) == 3).all()
    assert (tests[:, 10:].sum(axis=1) == 14).all()
    assert (parts.validation[:, :10].sum(axis=1) == 2).all()
    assert (parts.fit <= parts.train).all()
    assert len({row.tobytes() for row in parts.train}) == 30
    lone = split(Hospital("h", np.zeros((46, 1)), np.arange(46) > 0), 20, 0)
    assert lone.fit[:, 0].all()  # a class with one row is never tested, and never chooses


def test_features_are_filled_and_standardised_by_the_rows_of_the_design() -> None:
    table = rows()
    rng = np.random.default_rng(1)
    table["gap"] = np.where(rng.random(len(table)) < 0.3, np.nan, rng.normal(5e4, 3e3, len(table)))
    table["ward"] = rng.choice(["a", "b", "c"], len(table))
    data = federation(table, "hospital", "ill", None, [], [])
    assert data.columns == ("x0", "x1", "x2", "gap", "ward=b", "ward=c")
    parts = split(data.hospitals[1], 3, 0)
    made = site(data, data.hospitals[1], parts)
    own = table[table["hospital"] == "h1"].reset_index(drop=True)
    for design, used in enumerate([*parts.fit, *parts.train]):
        wanted = own[["x0", "x1", "x2", "gap"]].assign(b=own["ward"] == "b", c=own["ward"] == "c", m=own["gap"].isna())
        wanted = wanted.astype(float).fillna({"gap": own["gap"][used].median()})
        wanted = (wanted - wanted[used].mean()) / wanted[used].std(ddof=0)
        np.testing.assert_allclose(made.features(design)[:, :-1], wanted, atol=1e-9)
        assert (made.features(design)[:, -1] == 1).all()


def test_neither_test_rows_nor_other_hospitals_change_what_a_model_sees() -> None:
    table = rows().assign(gap=np.where(np.arange(94) % 5 == 0, np.nan, np.arange(94.0)))
    before = study(table)
    tested = ~before.sites[0].splits.train[1]
    changed = table.copy()
    changed.loc[np.flatnonzero(tested), ["x0", "gap"]] *= 50  # h0 has the first rows
    changed.loc[40:, ["x1", "gap"]] += 7
    after = study(changed)
    train = before.sites[0].splits.train[1]
    for design in (1, 3):  # the second split's two designs
        used = before.sites[0].used[design]
        np.testing.assert_allclose(
            before.sites[0].features(design, used), after.sites[0].features(design, used), atol=1e-8
        )
    assert np.abs(before.sites[0].features(3, ~train) - after.sites[0].features(3, ~train)).max() > 1


def test_what_is_not_a_feature_is_left_out_with_a_note() -> None:
    table = rows().assign(
        patient=[f"P{i:03}" for i in range(94)], number=np.arange(94) + 1000, same=1.0, day=pd.Timestamp("2020-01-01")
    )
    table.loc[:1, "ill"] = np.nan
    data = federation(table, "hospital", "ill", None, ["x2"], [])
    assert data.columns == ("x0", "x1")
    (unlabelled, left_out) = data.notes
    assert unlabelled == "2 rows without 'ill' left out."
    for word in ("'patient' (looks like an ID", "'number' (looks like an ID", "'same' (one value)", "'day' (dates)"):
        assert word in left_out
    assert [len(each.positive) for each in data.hospitals] == [38, 24, 30]


def test_a_hospital_may_number_its_patients_from_one() -> None:
    table = rows(sizes=(60, 30, 30))
    number = table.groupby("hospital").cumcount() + 1
    table = table.assign(number=number, code="P" + number.astype(str), ward=number % 7)
    data = federation(table, "hospital", "ill", None, [], [])
    assert data.columns == ("x0", "x1", "x2", "ward")
    assert "'number' (looks like an ID" in data.notes[0]
    assert "'code' (looks like an ID" in data.notes[0]


def test_missing_values_do_not_change_classes_or_categories() -> None:
    """A missing value makes floats of whole numbers: 1 is 1.0, and codes have seven digits and a fraction."""
    table = rows().assign(ward=1_000_001.0 + np.arange(94) % 3)
    table = table.astype({"ill": float})
    table.loc[3, ["ill", "ward"]] = np.nan
    table.loc[4, "ward"] = np.nan
    data = federation(table, "hospital", "ill", "1", [], ["ward"])
    assert (data.positive, type(data.positive)) == (1, int)
    assert data.columns == ("x0", "x1", "x2", "ward=1000002", "ward=1000003", "ward missing")
    assert sum(int(h.positive.sum()) for h in data.hospitals) == (table["ill"] == 1).sum()


def test_copies_of_rows_and_of_the_label_are_named() -> None:
    table = rows().assign(severity=lambda d: d["ill"] * (1 + np.arange(94) % 4))
    assert federation(table.drop(columns="severity"), "hospital", "ill", None, [], []).notes == ()
    notes = federation(pd.concat([table, table[:3]]), "hospital", "ill", None, [], []).notes
    assert notes[0].startswith("3 rows repeat another row of the same hospital")
    assert notes[1] == "By itself, 'severity' tells the classes apart. Drop what restates the label."


def test_clients_are_split_anew() -> None:
    table = rows()
    clients = rk.Clients.from_frame(table, by="hospital", label="ill", test=0.2)
    data = federation(clients, None, None, None, [], [])
    assert [each.name for each in data.hospitals] == ["h0", "h1", "h2"]
    assert data.columns == ("x0", "x1", "x2")
    own = table[table["hospital"] == "h1"]
    np.testing.assert_allclose(
        np.sort(data.hospitals[1].values[:, 0]), np.sort(own["x0"].to_numpy(np.float32)), rtol=1e-6
    )
    assert data.hospitals[1].positive.sum() == own["ill"].sum()


# The models.


def loss(w: np.ndarray, z: np.ndarray, y: np.ndarray, a: np.ndarray, penalty: float) -> float:
    losses = np.logaddexp(0, z @ w) - y * (z @ w)
    return float(a @ losses + penalty * w[:-1] @ w[:-1] / 2 + RIDGE * w[-1] ** 2 / 2)


def test_the_exact_models_minimise_the_weighted_loss() -> None:
    parts = study(rows())
    used = [each.used[3] for each in parts.sites]
    shares = [0.2, 0.0, 0.8]
    models = minimise(parts.sites, used, 3, shares, PENALTIES)
    z = np.concatenate([parts.sites[k].features(3, used[k]) for k in (0, 2)])
    y = np.concatenate([parts.sites[k].positive[used[k]] for k in (0, 2)])
    a = np.concatenate([np.full(used[k].sum(), shares[k] / used[k].sum()) for k in (0, 2)])
    for model, penalty in zip(models, PENALTIES, strict=True):
        best = minimize(loss, np.zeros(4), (z, y, a, penalty), method="BFGS", options={"gtol": 1e-9})
        np.testing.assert_allclose(model, best.x, atol=1e-5)
        assert loss(model, z, y, a, penalty) <= best.fun + 1e-14


def test_separable_rows_and_one_class_have_finite_models() -> None:
    table = rows(sizes=(30, 30))
    table["x0"] = 100 * table["ill"] - 50 + table["x1"] / 10
    table.loc[table["hospital"] == "h1", "ill"] = 1
    parts = study(table)
    alone = methods._alone(parts)
    assert np.isfinite(alone).all()
    assert np.abs(alone).max() < 50


@pytest.mark.parametrize("design", [pytest.param(0, marks=pytest.mark.slow), 3])
def test_all_splits_in_one_program_are_the_librarys_fedavg_on_each(design: int) -> None:
    parts = study(rows())
    clients, method = parts.clients(), rk.FedAvg(0.4, 3)
    models, penalties = methods._common(parts, clients, method)
    penalty = penalties[design % 2]
    data = [
        {"z": each.features(design, each.used[design]), "y": each.positive[each.used[design]].astype(float)}
        for each in parts.sites
    ]

    def one(w: Any, b: Any) -> Any:
        squares = penalty * jnp.sum(w[:-1] ** 2) + RIDGE * w[-1] ** 2
        return jnp.mean(jnp.logaddexp(0, b["z"] @ w) - b["y"] * (b["z"] @ w)) + squares / 2

    plain = rk.solve(rk.SingleLevel(one), rk.Clients(data, weights=parts.shares.tolist()), method, np.zeros(4), 100)
    np.testing.assert_allclose(models[design], plain.x, atol=2e-5)


@pytest.mark.slow
def test_learnt_weights_side_by_side_are_those_of_single_runs() -> None:
    parts = study(rows(sizes=(40, 24)))
    seen = []
    real = methods._swept

    def spying(*given: Any) -> Any:
        found = real(*given)
        seen.append((*given, *found))
        return found

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(methods, "_swept", spying)
        methods._learnt_weights(parts, 0.5)
    _, method, _, splits, penalties, models, weights = seen[1]  # the centre is h1
    assert len(splits) == 2 * len(methods._NODE_PENALTIES)
    for candidate in (1, 2):
        own, other = parts.sites[1], parts.sites[0]
        i, penalty = splits[candidate], penalties[candidate]

        def of(each: Site, design: int, used: np.ndarray, mark: float) -> dict[str, np.ndarray]:
            truth = each.positive[used].astype(float)
            return {"z": each.features(design, used), "y": truth, "p": np.full(len(truth), mark)}

        def one(w: Any, b: Any, penalty: float = penalty) -> Any:
            squares = penalty * jnp.sum(w[:-1] ** 2) + RIDGE * w[-1] ** 2
            return jnp.mean(jnp.logaddexp(0, b["z"] @ w) - b["y"] * (b["z"] @ w) + b["p"] * squares / 2)

        nodes = [of(other, 2 + i, other.splits.train[i], 1.0), of(own, i, own.splits.fit[i], 1.0)]
        clients = rk.Clients(nodes, center=of(own, i, own.splits.validation[i], 0.0))
        run = rk.solve(rk.WeightedNodes(one), clients, method, (parts.shares, np.zeros(4)), methods._NODE_ROUNDS)
        np.testing.assert_allclose(weights[candidate], run.weights, atol=1e-3)
        np.testing.assert_allclose(models[candidate], run.y, atol=1e-3)


# The whole.


def test_the_result_has_its_text_its_picture_and_its_page(quick: None, tmp_path: Path) -> None:
    names = {"h1": 'Zürich, <b>"A"</b> & Co', "h2": "h2", "h0": "St. $x_{$ Mary's of the long name"}
    table = rows().rename(columns={"x0": "<x0>"})
    table.loc[table["hospital"] == "h2", "ill"] = 0
    table["hospital"] = table["hospital"].map(names)
    result = rk.worth(table, "hospital", "ill", splits=3, metric="auc")
    text = str(result)
    assert all(name in text for name in (*METHODS, *names.values(), result.headline))
    assert "h2 cannot be judged beyond always saying the commoner class, because all its 30 rows" in text
    assert result.cell("h2", "FedAvg") == "–"
    assert len(result.table) == 3 * len(METHODS)
    assert len(result.splits) == 3 * 3 * len(METHODS)
    means = result.splits.groupby(["hospital", "method"])["auc"].mean()
    shown = result.table.set_index(["hospital", "method"])["auc"]
    assert means[names["h0"], POOLED] == pytest.approx(shown[names["h0"], POOLED])
    page = result.save(tmp_path / "out")
    assert sorted(path.name for path in page.parent.iterdir()) == [
        "splits.csv", "weights.csv", "worth.csv", "worth.html", "worth.png",
    ]  # fmt: skip
    written = page.read_text()
    assert all(escape(sentence) in written for sentence in result.advice.values())
    assert "<b>" not in written
    assert "http" not in written.replace("data:image/png", "")
    assert list(pd.read_csv(page.parent / "weights.csv", index_col=0).columns) == sorted(names.values())
    again = rk.worth(table, "hospital", "ill", splits=3, metric="auc")
    pd.testing.assert_frame_equal(again.splits, result.splits)
    with pytest.raises(ValueError, match="already holds worth"):
        result.save(tmp_path / "out")


def test_the_command_reads_a_file(quick: None, tmp_path: Path) -> None:
    rows().assign(code=["yes" if i % 2 else "no" for i in range(94)]).to_csv(tmp_path / "t.csv", index=False)
    given = ["join", str(tmp_path / "t.csv"), "--by", "hospital", "--label", "ill", "--splits", "2", "--drop", "x2"]
    shown = CliRunner().invoke(cli.app, [*given, "--json", "--out", str(tmp_path / "out")])
    assert shown.exit_code == 0, shown.output
    data = json.loads(shown.stdout)
    assert data["settings"]["features"] == ["x0", "x1", "code=yes"]
    assert Path(data["page"]).is_file()
    assert {row["method"] for row in data["table"]} == {*METHODS}
    text = CliRunner().invoke(cli.app, given)
    assert data["headline"] in text.output
    refused = CliRunner().invoke(cli.app, [*given, "--out", str(tmp_path / "out")])
    assert refused.exit_code == 2
    assert "already holds" in refused.output


def tiny() -> pd.DataFrame:
    return pd.concat([rows(), rows(1, (5,)).assign(hospital="tiny")])


def one_class_each() -> pd.DataFrame:
    return rows().assign(ill=lambda d: (d["hospital"] == "h0").astype(int))


@pytest.mark.parametrize(
    ("table", "given", "message"),
    [
        (lambda: rows().assign(hospital="a"), {}, "must have at least two hospitals; got one, 'a'"),
        (tiny, {}, "must have at least 12 rows to be split; 'tiny' has 5 rows. Leave"),
        (one_class_each, {}, "at least one hospital must have both classes of 'ill'"),
        (lambda: rows().assign(ill=1), {}, "label must have two classes; column 'ill' has only 1"),
        (lambda: rows().assign(ill=np.arange(94) % 3), {}, "positive must name one of them.*has 3: 0, 1, 2"),
        (rows, {"positive": 2}, "positive must be a value of column 'ill'; got 2. Its values are 0, 1"),
        (rows, {"label": "il"}, "label must be a column of the table; got 'il'. Did you mean 'ill'?"),
        (rows, {"by": "hospitl"}, "by must be a column of the table; got 'hospitl'. Did you mean 'hospital'?"),
        (rows, {"drop": ["x9"]}, "drop must be a column of the table; got 'x9'. The columns are x0, x1"),
        (rows, {"drop": "x1"}, r"drop must be a list of columns; got 'x1'. Give drop=\['x1'\]"),
        (rows, {"label": "hospital"}, "label must be another column than by"),
        (rows, {"label": None}, "label must be the name of a column; got None"),
        (rows, {"drop": ["x0", "x1", "x2"]}, "must have at least one column to learn from"),
        (
            rows,
            {"metric": "AUC"},
            "metric must be one of accuracy, balanced_accuracy, auc, brier, calibration; got 'AUC'. Did you mean 'auc'",
        ),
        (rows, {"metric": "acuracy"}, "Did you mean 'accuracy'?"),
        (rows, {"splits": 1}, "splits must be an integer of at least 2; got 1"),
        (lambda: "nowhere.csv", {}, "there is no file nowhere.csv"),
        (
            lambda: rows().assign(age=["?", *map(str, np.arange(93) % 30)]),
            {},
            r"column 'age' must hold numbers or words; got numbers and '\?'. Leave .* categories=\['age'\]",
        ),
        (
            lambda: rows().join(pd.DataFrame(np.random.default_rng(0).normal(size=(94, 500))).add_prefix("g")),
            {},
            "must have at most 500 columns to learn from, .*; got 503",
        ),
    ],
)
def test_bad_input_is_one_clear_line(table: Any, given: dict[str, Any], message: str) -> None:
    with pytest.raises((ValueError, TypeError), match=message) as caught:
        rk.worth(table(), **{"by": "hospital", "label": "ill"} | given)
    assert "\n" not in str(caught.value)


def test_more_than_two_classes_are_told_apart_from_the_rest() -> None:
    table = rows().assign(ill=np.array(["mild", "none", "severe"])[np.arange(94) % 3])
    data = federation(table, "hospital", "ill", "severe", [], [])
    assert sum(int(each.positive.sum()) for each in data.hospitals) == (table["ill"] == "severe").sum()


# In full.


@pytest.mark.slow
def test_heart_has_the_published_comparisons_signs() -> None:
    """20 splits: nobody gains by accuracy; FedAvg harms VA and Switzerland, and most of that can be avoided."""
    table = heart.table().drop(columns=["slope", "vessels", "thal"]).dropna()
    result = rk.worth(table, "hospital", "ill", categories=["chest_pain", "ecg"])
    found: Any = result.table.set_index(["hospital", "method"])
    federated = result.table[result.table["method"].isin(FEDERATED)]
    assert not (federated["verdict"] == "gains").any()
    assert result.headline.startswith("By accuracy, nobody demonstrably gains")
    assert found.loc[("Switzerland", "FedAvg"), "verdict"] == found.loc[("VA", "FedAvg"), "verdict"] == "loses"
    assert -0.5 < found.loc[("Switzerland", "FedAvg"), "gain"] < -0.25
    assert -0.18 < found.loc[("VA", "FedAvg"), "gain"] < -0.06
    for name in ("Switzerland", "VA"):
        for method in ("own intercept", "learnt weights"):
            assert found.loc[(name, method), "gain"] > found.loc[(name, "FedAvg"), "gain"] / 2
            assert found.loc[(name, method), "verdict"] == "cannot tell"
    for name in ("Cleveland", "Hungary"):
        assert (federated.loc[federated["hospital"] == name, "verdict"] == "cannot tell").all()
    assert "cannot be judged" in result.advice["Switzerland"]
    for name, wrong in {"Hungary": 0.12, "VA": 0.24, "Switzerland": 0.45}.items():  # as docs/join.md has it
        assert found.loc[(name, "FedAvg"), "calibration"] == pytest.approx(wrong, abs=0.01)
        assert 0.015 < found.loc[(name, "own intercept"), "calibration"] < 0.045
    # Section 7 of the specification, another draw of the splits.
    wanted = {"Cleveland": (0.793, 0.778), "Hungary": (0.826, 0.800), "Switzerland": (1, 0.593), "VA": (0.766, 0.638)}
    for name, (alone, average) in wanted.items():
        assert found.loc[(name, ALONE), "accuracy"] == pytest.approx(alone, abs=0.03)
        assert found.loc[(name, "FedAvg"), "accuracy"] == pytest.approx(average, abs=0.04)

    page = (Path(__file__).parents[2] / "docs" / "join.md").read_text(encoding="utf-8")
    for method in METHODS:
        (row,) = re.findall(rf"^\| {method} \| ([.1].*) \|$", page, re.MULTILINE)
        for name, cell in zip(wanted, row.split(" | "), strict=True):
            printed, gain = (float(x) for x in re.findall(r"[-+]?\d?\.\d+", cell.replace("−", "-") + " .0")[:2])
            assert found.loc[(name, method), "accuracy"] == pytest.approx(printed, abs=0.004)
            if method != ALONE:
                assert found.loc[(name, method), "gain"] == pytest.approx(gain, abs=0.004)
            assert ("*" in cell) == (found.loc[(name, method), "verdict"] in ("gains", "loses"))


@pytest.mark.slow
def test_hospitals_that_follow_one_rule_gain_and_the_brier_score_sees_it_first() -> None:
    """The ten made-up hospitals of docs/join.md."""
    result = rk.worth(rows(2, (150,) * 10, 20, 0.5), "hospital", "ill")
    gains = result.table.set_index(["method", "hospital"]).loc["FedAvg", "gain"]
    assert 0 < gains.min() < 0.015 < 0.06 < gains.max() < 0.08
    federated = result.table[result.table["method"].isin(FEDERATED)]
    gaining = lambda metric: federated.loc[federated[f"{metric}_verdict"] == "gains", "hospital"].nunique()
    assert (gaining("accuracy"), gaining("brier")) == (0, 5)
    assert re.search("by Brier score, .* gain", result.other_metrics)
    for metric in metrics.METRICS:
        assert not (federated[f"{metric}_verdict"] == "loses").any()


@pytest.mark.slow
def test_labels_without_any_signal_are_not_told_apart() -> None:
    result = rk.worth(rows(3, (60, 60, 60), 4, 0.0), "hospital", "ill", splits=10)
    assert "nothing can be told apart" in result.headline
