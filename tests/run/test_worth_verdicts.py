"""`worth`: metrics, intervals, verdicts, and what is said of them."""

from dataclasses import replace
from typing import Any

import numpy as np
import pandas as pd
import pytest
from scipy.stats import t
from sklearn.metrics import balanced_accuracy_score, roc_auc_score
from tests.run.worth_tables import rows, study

from rookery.run.worth import judging, metrics
from rookery.run.worth.designs import Site
from rookery.run.worth.hospitals import Hospital, split
from rookery.run.worth.methods import ALONE, FEDERATED, FLOOR, METHODS, POOLED


def test_metrics_agree_with_scikit_learn() -> None:
    rng = np.random.default_rng(0)
    chances, positive = rng.integers(0, 8, 60) / 8, rng.random(60) < 0.3
    assert metrics.auc(chances, positive) == pytest.approx(roc_auc_score(positive, chances), abs=1e-12)
    wanted = balanced_accuracy_score(positive, chances > 0.5)
    assert metrics.balanced_accuracy(chances, positive) == pytest.approx(wanted, abs=1e-12)
    assert np.isnan(metrics.auc(chances, np.ones(60, bool)))
    assert metrics.calibration(chances, positive) == pytest.approx(abs(chances.mean() - positive.mean()), abs=1e-12)


def test_the_interval_is_corrected_for_overlapping_splits() -> None:
    differences = np.random.default_rng(0).normal(0.1, 0.2, 20)
    mean, low, high = judging.interval(differences, 34 / 66)
    half = t.ppf(0.975, 19) * np.sqrt(differences.var(ddof=1) * (1 / 20 + 34 / 66))
    assert (mean, low, high) == pytest.approx((differences.mean(), mean - half, mean + half), abs=1e-12)
    assert high - low > 3 * (2 * t.ppf(0.975, 19) * differences.std(ddof=1) / np.sqrt(20))  # the naive one


def test_the_same_difference_on_every_split_is_no_demonstration() -> None:
    """Four test rows and two splits often differ by one row each; without a variance there is no interval."""
    mean, low, high = judging.interval(np.array([0.25, 0.25]), 0.5)
    assert mean == 0.25
    assert np.isnan([low, high]).all()
    assert judging.interval(np.zeros(2), 0.5) == (0, 0, 0)
    table, hospital = scored({"Ditto": 0.9, "FedAvg": 0.3}, noise=0)
    assert (table.set_index("method")["verdict"].drop(ALONE) == "cannot tell").all()
    assert "no method can be told apart" in judging.advise(table, hospital, "accuracy")


def test_verdicts_that_chance_would_give_are_in_doubt() -> None:
    names = [f"h{k}" for k in range(20)]
    rows = [{"hospital": name, "method": method, "verdict": "cannot tell"} for name in names for method in METHODS]
    table = pd.DataFrame(rows)
    some = table["method"].eq("Ditto") & table["hospital"].isin(names[:2])
    table.loc[some, "verdict"] = "gains"
    assert judging.headline(table, "auc") == (
        "By AUC, 2 of 20 hospitals seem to gain: h0 and h1 (2 of 120 comparisons; chance alone gives about 3)."
    )
    table["gain"] = np.where(some | (table["hospital"] == "h7"), 0.01, -0.01)
    assert ", of 20 hospitals: FedAvg at 1, FedAdam at 1, fine-tuned at 1, Ditto at 3, own" in judging.tendency(table)
    table.loc[some, "verdict"] = "loses"
    assert "at least one method seems to harm h0 and h1 (2 of 120" in judging.headline(table, "auc")
    table.loc[table["method"].isin(FEDERATED) & table["hospital"].isin(names[:2]), "verdict"] = "gains"
    assert judging.headline(table, "auc") == "By AUC, 2 of 20 hospitals demonstrably gain: h0 and h1."


def scored(values: dict[str, float], noise: float = 0.01, positive: Any = None) -> tuple[pd.DataFrame, Site]:
    """The accuracies of one hospital's methods, with noise of its own over splits, and the hospital."""
    positive = np.arange(40) % 2 == 0 if positive is None else positive
    hospital = study(rows(sizes=(40, 24)), 20).sites[0]
    parts = split(Hospital("h0", np.zeros((40, 1)), positive), 20, 0)
    hospital = replace(hospital, positive=positive, splits=parts)
    rng = np.random.default_rng(0)
    table = [
        {"hospital": "h0", "method": name, "split": i} | dict.fromkeys(metrics.METRICS, values.get(name, 0.7) + drawn)
        for name in METHODS
        for i, drawn in enumerate(rng.normal(0, noise, 20))
    ]
    return judging.judged(pd.DataFrame(table), [hospital], "accuracy"), hospital


def test_a_gain_counts_only_if_its_interval_excludes_zero() -> None:
    table, hospital = scored({"Ditto": 0.8, FLOOR: 0.5})
    verdicts = table.set_index("method")["verdict"]
    assert verdicts["Ditto"] == "gains"
    assert (verdicts[["FedAvg", POOLED, "learnt weights"]] == "cannot tell").all()
    assert "gains 10 points of accuracy" in judging.advise(table, hospital, "accuracy")
    assert judging.headline(table, "accuracy") == "By accuracy, 1 of 1 hospitals demonstrably gains: h0."
    noisy, _ = scored({"Ditto": 0.8, FLOOR: 0.5}, noise=0.2)
    assert (noisy.set_index("method")["verdict"].drop(ALONE) == "cannot tell").all()
    assert judging.headline(noisy, "accuracy").startswith("By accuracy, nothing can be told apart")


def test_harm_is_named_with_what_avoids_it() -> None:
    table, hospital = scored({"FedAvg": 0.5, "FedAdam": 0.6, "fine-tuned": 0.56, FLOOR: 0.7})
    said = judging.advise(table, hospital, "accuracy")
    assert "shows no demonstrable gain over its own model; FedAvg costs it 20 points" in said
    assert "and FedAdam and fine-tuned also lose" in said
    assert "Ditto, own intercept and learnt weights avoid most of that loss" in said
    assert "does not demonstrably beat always saying the commoner class" in said
    assert judging.headline(table, "accuracy").endswith("at least one method demonstrably harms h0.")


def test_a_number_is_called_a_hospital_in_sentences() -> None:
    table, hospital = scored({"Ditto": 0.8, FLOOR: 0.5})
    table["hospital"] = "7"
    assert judging.headline(table, "accuracy").endswith("gains: hospital 7.")
    assert judging.advise(table, replace(hospital, name="7"), "accuracy").startswith("Hospital 7 gains 10 points")


def test_the_brier_score_is_better_when_it_is_lower() -> None:
    table, hospital = scored({})
    measured = pd.DataFrame(
        {"hospital": "h0", "method": name, "split": i} | dict.fromkeys(metrics.METRICS, value + i % 2 / 1000)
        for name, value in (dict.fromkeys(METHODS, 0.2) | {"Ditto": 0.1}).items()
        for i in range(20)
    )
    measured.loc[measured["method"] == ALONE, list(metrics.METRICS)] = 0.2
    table = judging.judged(measured, [hospital], "brier").set_index("method")
    assert table.loc["Ditto", "gain"] == pytest.approx(0.0995)
    assert (table.loc["Ditto", "brier_verdict"], table.loc["Ditto", "auc_verdict"]) == ("gains", "loses")


def test_a_hospital_with_one_class_is_not_judged_beyond_it() -> None:
    table, hospital = scored({"Ditto": 0.9, "FedAvg": 0.3}, positive=np.arange(40) > 0)
    assert not (table["verdict"] == "gains").any()
    said = judging.advise(table, hospital, "accuracy")
    assert "cannot be judged beyond always saying the commoner class, because all but 1 of its 40 rows" in said
    assert "FedAvg costs it 40 points" in said


def test_another_metric_that_judges_otherwise_is_named() -> None:
    table, _ = scored({})
    table.loc[table["method"] == "FedAvg", "balanced_accuracy_verdict"] = "gains"
    assert judging.disagreement(table) == "Other metrics judge otherwise: by balanced accuracy, h0 gains."
    table.loc[table["method"] == "Ditto", "brier_verdict"] = "loses"
    assert judging.disagreement(table).endswith(
        "by balanced accuracy, h0 gains; by Brier score, at least one method harms h0."
    )
    assert judging.disagreement(scored({})[0]) == ""
