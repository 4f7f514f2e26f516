"""`worth` with times and events: Cox's models against independent fits, the C-index, the whole, bad input."""

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pandas as pd
import pytest
from scipy.optimize import minimize
from tests.run.test_worth import exact
from tests.run.worth_tables import lives, survival_study
from tests.tasks.test_flamby import REAL
from typer.testing import CliRunner

import rookery as rk
from rookery import cli
from rookery.problems.survival import cox_losses
from rookery.run.worth import fits, methods, metrics
from rookery.run.worth.fits import RIDGE, minimise
from rookery.run.worth.hospitals import federation
from rookery.run.worth.methods import FEDERATED, PENALTIES, POOLED, SURVIVAL_METHODS

KNOWN = {"by": "hospital", "time": "days", "event": "died"}


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(methods, "fit_all", lambda *args: _survival(*exact(*args)))


def _survival(fitted: dict[str, Any], weights: Any) -> tuple[dict[str, Any], Any]:
    return {name: models for name, models in fitted.items() if name in SURVIVAL_METHODS}, weights


def partial_likelihood(w: np.ndarray, z: np.ndarray, event: np.ndarray, time: np.ndarray) -> float:
    """The mean over the rows of Cox's loss, row by row; of rows with one time, the later has the earlier at risk."""
    scores, total = z @ w, 0.0
    for i in np.flatnonzero(event):
        at_risk = [s for j, s in enumerate(scores) if time[j] > time[i] or (time[j] == time[i] and j <= i)]
        total += np.log(np.sum(np.exp(at_risk))) - scores[i]
    return total / len(scores)


# The models.


def test_the_latest_rows_come_first_and_there_is_no_intercept() -> None:
    table = lives()
    parts = survival_study(table)
    for each in parts.sites:
        assert each.time is not None
        assert (np.diff(each.time) <= 0).all()
        own = table[table["hospital"] == each.name].sort_values("days", ascending=False, kind="stable")
        np.testing.assert_array_equal(each.time, own["days"])
        np.testing.assert_array_equal(each.positive, own["died"] == 1)
        for design, used in enumerate(each.used):
            wanted = own[["x0", "x1", "x2"]].to_numpy()
            wanted = (wanted - wanted[used].mean(axis=0)) / wanted[used].std(axis=0)
            np.testing.assert_allclose(each.features(design)[:, :-1], wanted, atol=1e-9)
            assert not each.features(design)[:, -1].any()


def test_the_losses_of_rows_are_coxs() -> None:
    """Of rows in use, in both forms, with derivatives; the risks of others do not matter, however large."""
    rng = np.random.default_rng(0)
    z, w = rng.normal(size=(30, 4)), rng.normal(size=4)
    used, event, time = rng.random(30) < 0.7, rng.random(30) < 0.5, np.sort(rng.integers(0, 12, 30))[::-1]
    own = lambda w: cox_losses(z[used] @ w, jnp.asarray(event[used], float), jnp.asarray(time[used]))

    def masked(w: Any) -> Any:
        scores = jnp.where(used, z @ w, 700.0)
        return fits.row_losses(scores, {"event": jnp.asarray(event, float)}, jnp.asarray(used))[used]

    np.testing.assert_allclose(fits.losses_of(z[used] @ w, event[used], True), own(w), atol=1e-12)
    rows = fits.Rows(z[used], event[used].astype(float), np.full(used.sum(), 1 / used.sum()), time[used])
    objective = fits._cox([rows])
    expected = [objective.value(w[None])[0], *(found[0] for found in objective.derivatives(w[None]))]
    for of in (own, masked):
        mean = lambda w, of=of: jnp.mean(of(w))
        found = jax.jit(lambda w, mean=mean: (mean(w), jax.grad(mean)(w), jax.hessian(mean)(w)))(w)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-12), [*found], expected)
    small = fits.row_losses(jnp.array([0.0, 400.0], "f"), {"event": jnp.ones(2, "f")}, jnp.ones(2, bool))
    assert np.isfinite(small).all()  # nobody else is seen at risk


@pytest.mark.parametrize("together", [False, True])
def test_the_exact_models_minimise_coxs_loss(together: bool) -> None:
    """Hospitals by themselves are strata; together, all patients are compared."""
    parts = survival_study(lives())
    used, shares = [each.used[3] for each in parts.sites], [0.2, 0.0, 0.8]
    models = minimise(parts.sites, used, 3, shares, PENALTIES[2:4], together)
    chosen = [(s.features(3, u), s.positive[u], s.time[u]) for s, u in zip(parts.sites, used, strict=True)]
    del chosen[1]
    for model, penalty in zip(models, PENALTIES[2:4], strict=True):

        def loss(w: np.ndarray, penalty: float = penalty) -> float:
            ridge = penalty * w[:-1] @ w[:-1] / 2 + RIDGE * w[-1] ** 2 / 2
            if not together:
                return ridge + 0.2 * partial_likelihood(w, *chosen[0]) + 0.8 * partial_likelihood(w, *chosen[1])
            z, event, time = (np.concatenate(column) for column in zip(*chosen, strict=True))
            sizes = [len(own[1]) for own in chosen]
            weights = np.repeat(np.divide([0.2, 0.8], sizes), sizes)
            losses = np.asarray(cox_losses(z @ w, jnp.asarray(event, float), jnp.asarray(time)))
            return ridge + float(weights @ losses)

        best = minimize(loss, np.zeros(4), method="BFGS", options={"gtol": 1e-8})
        np.testing.assert_allclose(model, best.x, atol=1e-5)
        assert loss(model) <= best.fun + 1e-12


def test_fedavg_on_all_splits_is_the_librarys_on_each() -> None:
    parts = survival_study(lives())
    clients, method = parts.clients(), rk.FedAvg(0.4, 3)
    models, penalties = methods._common(parts, clients, method)
    design = 3
    data = [
        {
            "z": s.features(design, s.used[design]),
            "e": s.positive[s.used[design]].astype(float),
            "t": s.time[s.used[design]],
        }
        for s in parts.sites
    ]
    longest = max(len(own["t"]) for own in data)

    def padded(own: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        """With rows after them that are in nobody's risk set."""
        count = len(own["t"])
        longer = {name: np.pad(a, [(0, longest - count), (0, 0)][: a.ndim]) for name, a in own.items()}
        longer["t"][count:] = -1
        return longer | {"n": np.full(longest, float(count))}

    def one(w: Any, b: Any) -> Any:
        squares = penalties[1] * jnp.sum(w[:-1] ** 2) + RIDGE * w[-1] ** 2
        return jnp.sum(cox_losses(b["z"] @ w, b["e"], b["t"]) / b["n"]) + squares / 2

    problem = rk.SingleLevel(one, batch_statistic=True)
    plain = rk.solve(problem, rk.Clients([*map(padded, data)], weights=parts.shares.tolist()), method, np.zeros(4), 100)
    np.testing.assert_allclose(models[design], plain.x, atol=2e-5)


def test_an_event_after_which_nobody_is_at_risk_chooses_nothing() -> None:
    parts = survival_study(lives())
    each = parts.sites[0]
    rows = each.splits.validation[0]
    last = np.flatnonzero(rows)[0]
    only = lambda row: np.arange(len(rows)) == row
    assert not replace(each, positive=only(last)).can_choose()[0]
    assert replace(each, positive=only(np.flatnonzero(rows)[1])).can_choose()[0]
    assert not replace(each, positive=~rows).can_choose()[0]


def test_the_c_index_is_that_of_all_pairs_of_test_rows() -> None:
    parts = survival_study(lives())
    models = np.random.default_rng(0).normal(size=(3, 2, 4)).round(1)
    fitted = {name: models for name in SURVIVAL_METHODS if name != "chance"}
    found = metrics.scores(parts.sites, fitted).set_index(["hospital", "method", "split"])["concordance"]
    for k, each in enumerate(parts.sites):
        tests = ~each.splits.train[1]
        scores = each.features(3, tests) @ models[k, 1]
        event, time = each.positive[tests], each.time[tests]
        right = pairs = 0.0
        for i in np.flatnonzero(event):
            for j in range(len(scores)):
                if time[i] < time[j] or (time[i] == time[j] and not event[j]):
                    pairs += 1
                    right += 1.0 if scores[i] > scores[j] else 0.5 * (scores[i] == scores[j])
        assert found[each.name, "FedAvg", 1] == pytest.approx(right / pairs, abs=1e-6)
        assert found[each.name, "chance", 1] == 0.5


# The whole.


def test_the_command_reads_times_and_events(quick: None, tmp_path: Path) -> None:
    table = lives().assign(code=["yes" if i % 2 else "no" for i in range(94)])
    table.loc[0, "days"] = np.nan
    table.to_csv(tmp_path / "t.csv", index=False)
    given = ["join", str(tmp_path / "t.csv"), "--by", "hospital", "--time", "days", "--event", "died", "--splits", "2"]
    shown = CliRunner().invoke(cli.app, [*given, "--json", "--out", str(tmp_path / "out")])
    assert shown.exit_code == 0, shown.output
    data = json.loads(shown.stdout)
    assert data["settings"]["features"] == ["x0", "x1", "x2", "code=yes"]
    assert data["settings"]["rows"] == {"h0": 39, "h1": 24, "h2": 30}
    assert data["settings"]["events"]["h1"] == table["died"][40:64].sum()
    assert data["metric"] == "concordance"
    assert [row["method"] for row in data["table"][: len(SURVIVAL_METHODS)]] == [*SURVIVAL_METHODS]
    assert "own intercept" not in SURVIVAL_METHODS
    assert "1 row without 'days' or 'died' left out." in data["notes"]
    assert "its own model" in data["advice"]["h0"]
    written = Path(data["page"]).read_text()
    for words in (
        "days to died in 3 hospitals",
        "C-index",
        "there is no intercept to share",
        "Rows (events): h0: 39 (",
    ):
        assert words in written
    for words in ("Brier", "commoner class", "own intercept"):
        assert words not in written
    text = CliRunner().invoke(cli.app, given)
    assert data["headline"] in text.output


def test_what_gives_the_outcome_away_is_named() -> None:
    table = lives()
    table = table.assign(last_visit=table["days"] + 1000, state=table["died"] * 2.0)
    notes = federation(table, "hospital", None, None, [], [], "days", "died").notes
    assert "By itself, 'last_visit' gives the times. Drop what restates them." in notes
    assert "By itself, 'state' tells the events apart. Drop what restates the label." in notes
    assert federation(lives(), "hospital", None, None, [], [], "days", "died").notes == ()


def with_days(days: Any) -> pd.DataFrame:
    return lives().assign(days=days)


def with_events(died: Any) -> pd.DataFrame:
    return lives().assign(died=died)


@pytest.mark.parametrize(
    ("table", "given", "message"),
    [
        (
            lambda: with_events(lambda d: d["died"] * (d["hospital"] != "h1")),
            {},
            r"at least 3 events, rows with 1 in 'died': to fit, to choose and to test; 'h1' has 0\. Leave its rows out",
        ),
        (lambda: with_days(lambda d: d["days"] - 5), {}, "time must be at least 0 and finite; column 'days' has -"),
        (lambda: with_days("long"), {}, "time must be a column of numbers, such as days; column 'days' holds 'long'"),
        (lambda: with_events(lambda d: d["died"] + 1), {}, r"event must be 1 where .*; column 'died' also has 2\. Rec"),
        (lambda: with_events("yes"), {}, r"event must be 1 where .*; column 'died' also has 'yes'\. Rec"),
        (lambda: with_events(np.nan), {}, "must have rows with a value in 'days' or 'died'; got none"),
        (lives, {"label": "died"}, "label must be left out if time and event are given; got 'died'. Give either"),
        (
            lives,
            {"event": None},
            "event must be the name of a column; got None. Survival needs both time=… and event=…",
        ),
        (lives, {"time": None}, "time must be the name of a column; got None. Survival needs both"),
        (lives, {"event": "days"}, "event must be another column than time; got 'days' for both"),
        (lives, {"time": "hospital"}, "time must be another column than by; got 'hospital' for both"),
        (lives, {"event": "dyed"}, "event must be a column of the table; got 'dyed'. Did you mean 'died'"),
        (lives, {"positive": 1}, "positive must be left out if event is given, which is 0 or 1; got 1"),
        (lives, {"metric": "auc"}, "metric must be concordance; got 'auc'"),
        (lambda: lives().assign(hospital="a"), {}, "must have at least two hospitals; got one, 'a'"),
        (
            lambda: rk.Clients.from_frame(lives(), by="hospital", label="died"),
            {"by": None},
            "time and event need a table; got rk.Clients",
        ),
    ],
)
def test_bad_times_are_one_clear_line(table: Any, given: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        rk.worth(table(), **KNOWN | given)
    assert "\n" not in str(caught.value)


# In full.


@pytest.mark.slow
def test_on_tcga_nothing_can_be_told_apart() -> None:
    """The six regions of docs/join.md."""
    folder = Path(REAL) / "tcga-brca"
    if not folder.is_dir():
        pytest.skip("tcga-brca is not at hand")
    patients, sites, known = (
        pd.read_csv(folder / f"{name}.csv", keep_default_na=False) for name in ("brca", "centers", "train_test_split")
    )
    region = patients["pid"].str.split("-").str[1].map(sites.set_index("TSS Code")["Region"])
    table = patients.assign(region=region)[patients["pid"].isin(known["pid"])]
    result = rk.worth(table, "region", time="T", event="E")
    assert result.headline.startswith("By C-index, nothing can be told apart")
    federated = result.table[result.table["method"].isin(FEDERATED)]
    assert (federated["verdict"] == "cannot tell").all()
    page = (Path(__file__).parents[2] / "docs" / "join.md").read_text(encoding="utf-8")
    found: Any = result.table.set_index(["hospital", "method"])
    for method in ("alone", "FedAvg", POOLED):
        (row,) = re.findall(rf"^\| {method}, C-index \| ([.1].*) \|$", page, re.MULTILINE)
        for name, cell in zip(result.hospitals, row.split(" | "), strict=True):
            assert found.loc[(name, method), "concordance"] == pytest.approx(float(cell.split()[0]), abs=0.006)


@pytest.mark.slow
def test_hospitals_whose_patients_follow_one_rule_gain() -> None:
    result = rk.worth(lives(2, (60,) * 4, 12, 0.3), "hospital", time="days", event="died", splits=10)
    gains = result.table.set_index(["method", "hospital"])["gain"]
    for method in ("FedAvg", "FedAdam", "fine-tuned", "Ditto", POOLED):
        assert gains[method].mean() > 0.02
    assert (gains["chance"] < 0).all()
    exact, averaged = (result.table.set_index(["method", "hospital"]).loc[m, "concordance"] for m in (POOLED, "FedAvg"))
    assert np.abs(exact - averaged).max() < 0.03  # 500 local steps come near the exact common model
