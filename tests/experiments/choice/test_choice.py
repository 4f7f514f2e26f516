"""The comparison of methods: its claims on invented results, its candidates, its page, and a run scaled down."""

from itertools import combinations
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from rookery.experiments.choice import problems, setting, tables
from rookery.experiments.machinery.running import read_results

DOCS = Path(__file__).parents[3] / "docs"


def invented(value):
    """Results in which each method's metric is value(problem, method, round)."""
    rows = []
    for config in problems.runs(False):
        method, each = config.labels["method"], setting.EXCHANGES.get(config.labels["method"], 1)
        gradients, products = (3, 0) if method in (*setting.FIRST, "FedAvg") else (10, 10)
        for seed in setting.SEEDS:
            for t in range(0, config.rounds + 1, config.every):
                costs = {"exchanges": each * t, "gradients": gradients * t, "products": products * t}
                of = {"run": config.name, **config.labels, "seed": seed, "round": t, **costs, "seconds": t}
                rows.append({**of, "value": value(config.labels["problem"], method, t) * (1 + 1e-3 * seed), "auc": 0.9})
    return pd.DataFrame(rows)


def as_claimed(problem, method, t):
    """First-order methods are biased, products dear, FedAvg the ceiling of one problem and the floor of another."""
    if problem in ("exact", "noisy"):
        return 1e-8 if method == "SOBA" else 1e-2 if method in (*setting.FIRST, "FedNest") else 1e-4
    if problem == "penalties":
        return 0.3 if method == "FedNest" else 0.1
    best = {"layers": 0.9, "cleaning": 0.6}[problem]
    if method == "FedAvg":
        return best
    lost = 0.2 if method == "FedNest" else 0.05 * (method not in setting.FIRST)
    return {"layers": 0.85, "cleaning": 0.8}[problem] - lost


def test_claims_hold_where_results_are_as_they_say_and_fail_where_all_are_the_same():
    good = invented(as_claimed)
    assert {claim.text: claim(good).holds for claim in problems.problems.claims} == {
        claim.text: True for claim in problems.problems.claims
    }
    flat = invented(lambda problem, method, t: 0.5)
    assert not any(claim(flat).holds for claim in problems.problems.claims)


def test_a_run_that_leaves_the_finite_numbers_counts_as_the_worst():
    results = invented(lambda problem, method, t: np.nan if method == "MEHA" and t > 10 else 0.5)
    ends = problems.ended(results)
    assert (ends["layers", "MEHA"] == 0).all()
    assert (ends["exact", "MEHA"] == 6).all()


def test_equal_work_is_read_within_it():
    results = invented(lambda problem, method, t: t + 1.0)
    assert problems.budgets(results).loc["layers"].tolist() == [setting.BUDGET, setting.BUDGET * 35]
    ends = problems.ended(results, "work")
    for method, last in {"FedBiO": 200, "F2SA": 200, "F2SA, 1 step": 500}.items():  # the last costs 3 a round
        assert ends["layers", method][0] == last + 1
    dear = results.assign(products=results["products"] * (1 + (results["method"] == "FedBiO")))
    assert problems.ended(dear, "work")["layers", "FedBiO"][0] == 116  # at most 116.7 rounds, evaluated every 5


@pytest.mark.parametrize("problem", setting.PROBLEMS)
def test_every_method_has_equally_many_candidates_in_which_any_two_values_meet_once(problem):
    for method in setting.METHODS[:-1]:
        tried = setting.candidates(problem, method)
        assert len(tried) == len(setting.LEVELS) ** 2
        for i, j in combinations(range(3), 2):
            assert len({(values[i], values[j]) for values in tried}) == len(tried)
        assert tried[len(tried) // 2] == tuple(sorted({v[i] for v in tried})[3] for i in range(3))


def test_the_page_is_that_of_the_results():
    page = tables.page(read_results(DOCS / "reproduction" / "choice-problems"))
    assert (DOCS / "which-method.md").read_text(encoding="utf-8") == page


@pytest.mark.slow
def test_scaled_down(quick):
    results, _ = quick("choice-problems")
    assert set(results["method"]) == set(problems.FEW)
    own = results[(results["round"] > 0) & results["method"].isin(["F2SA", "FedAvg"])]
    assert (own["products"] == 0).all()
    assert (own["gradients"] > 0).all()
