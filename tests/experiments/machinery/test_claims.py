"""Claims and searches: verdicts, tolerances, edges of a grid and how it is widened."""

import math

import numpy as np
import pandas as pd
import pytest
from scipy import stats

from rookery import report
from rookery.algorithms import FedNest
from rookery.experiments import Claim, Config, Experiment, Finding, Verdict
from rookery.experiments.machinery import running, summary
from rookery.experiments.machinery.claims import FAILURES, Claims, judge, lead
from rookery.experiments.machinery.grid import Grid
from rookery.tasks import quadratic

NOTHING = pd.DataFrame()


def claim(holds):
    return Claims()("It is so.", "Fig. 1")(lambda results: Finding(holds, {"end": math.inf}, "Measured."))


def test_a_claim_that_holds_is_reproduced_and_one_within_the_tolerance_undecided():
    row = judge(claim(True), NOTHING)
    assert (row["verdict"], row["cause"], row["kind"], row["note"]) == ("reproduced", "", "experiment", "Measured.")
    assert row["figures"] == {"end": "inf"}
    assert judge(claim(None), NOTHING)["verdict"] == "undecided"
    assert judge(claim(None), NOTHING)["note"] == "Measured."


def test_a_claim_that_fails_has_the_verdict_that_was_given_for_it_or_is_refused():
    row = judge(claim(False), NOTHING, otherwise=FAILURES["budget"]._replace(why="12 of 120 epochs."))
    assert (row["verdict"], row["cause"], row["note"]) == ("differs, ours", "budget", "12 of 120 epochs. Measured.")
    row = judge(claim(False), NOTHING, otherwise=FAILURES["the paper's"]._replace(why="It cannot."))
    assert (row["verdict"], row["cause"]) == ("differs, the paper's", "")
    with pytest.raises(ValueError, match=r"“It is so.” does not hold or is not run\. Give the reason"):
        judge(claim(False), NOTHING)
    assert judge(claim(False), NOTHING, whole=False)["verdict"] == "undecided"


def test_a_claim_without_a_check_is_not_run():
    absent = Claim("On ImageNet.", "Table 3", None)
    for whole in (True, False):
        assert judge(absent, NOTHING, whole, Verdict("not run", "No data."))["verdict"] == "not run"
    with pytest.raises(ValueError, match=r"is not run\. Give the reason"):
        judge(absent, NOTHING)


def test_a_lead_is_by_seeds_where_they_pair():
    base = np.array([0.1, 0.5, 0.9])
    assert lead(base + 0.01, base).holds is True
    assert lead(base, base + np.array([0.01, 0.011, 0.012])).holds is False
    assert lead(base + 0.01, base, paired=False).holds is None
    assert lead(base + 0.01, base[:2]).holds is None
    found = lead([0.9], [0.1])
    assert (found.mean, found.error, found.holds) == (pytest.approx(0.8), math.inf, None)


@pytest.mark.parametrize("seeds", [2, 3, 5, 9, 10, 25])
def test_with_few_seeds_a_lead_has_to_exceed_the_t_quantile(seeds):
    gains = np.random.default_rng(seeds).normal(size=seeds)
    error = gains.std(ddof=1) / math.sqrt(seeds)
    factor = stats.t.ppf(0.975, seeds - 1) if seeds < 10 else 2
    assert lead(gains, np.zeros(seeds)).error == pytest.approx(factor * error, rel=1e-3)


GRID = Grid(r"rate (?P<rate>\S+), terms (?P<terms>\S+)$", ("method",), lambda search: search["score"], fixed=("terms",))


def searched(score):
    rows = [
        {
            "run": f"search: {m}, rate {rate}, terms {terms}",
            "method": m,
            "seed": seed,
            "round": 1,
            "score": score(m, rate, terms),
        }
        for m in ("A", "B")
        for rate in (0.01, 0.03, 0.1)
        for terms in (5, 10)
        for seed in (8, 9)
    ]
    return pd.DataFrame(rows)


def test_the_best_values_and_those_at_the_edge():
    search = searched(lambda m, rate, terms: -abs(rate - (0.03 if m == "A" else 0.5)) + terms)
    assert GRID.best(search) == {("A",): {"rate": 0.03, "terms": 10}, ("B",): {"rate": 0.1, "terms": 10}}
    edges = {(edge.key, edge.name): edge for edge in GRID.edges(search)}
    assert set(edges) == {(("A",), "terms"), (("B",), "terms"), (("B",), "rate")}
    assert edges[("B",), "rate"].beyond == 0.3
    lines = summary._searched(GRID, search)
    assert "| A | rate 0.03, terms 10 † |" in lines
    assert "| B | rate 0.1 †, terms 10 † |" in lines
    assert any("terms is the paper's own" in line for line in lines)
    assert GRID.edges(search[search["run"].str.contains("rate 0.03, terms 5")]) == []


def tried(rate):
    method = FedNest(upper_step=rate, lower_step=0.2, hessian_step=0.2)
    return Config(
        f"search: rate {rate:g}", quadratic, method, 2, {"clients": 2}, seeds=(9,), labels={"method": "FedNest"}
    )


def small(widest):
    """The larger the rate the better, up to the widest: an experiment whose grid ends too early."""
    grid = Grid(
        r"rate (?P<rate>\S+)$",
        ("method",),
        lambda search: search["run"].str.extract(r"rate (\S+)$")[0].astype(float).map(lambda r: -abs(r - widest)),
        wider=lambda key, values: [tried(values["rate"])],
    )
    return Experiment(
        "small", "a small one", "No paper.", "Two clients.", lambda quick: [tried(0.01)],
        lambda results: report.figure()[0], (), search=lambda quick: [tried(0.02), tried(0.04)], grid=grid,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("widest", "rates"),
    [pytest.param(0.05, {0.02, 0.04, 0.08}, marks=pytest.mark.slow), (9.0, {0.02, 0.04, 0.08, 0.2})],
)
def test_a_search_goes_on_beyond_the_edge_of_its_grid_twice_at_most(tmp_path, capsys, widest, rates):
    running.run_experiment(small(widest), tmp_path)
    search = pd.read_csv(tmp_path / "search.csv")
    assert {float(run.split()[-1]) for run in search["run"]} == rates
    assert "FedNest: rate 0.04 (the largest)" in capsys.readouterr().err
    assert ("†" in (tmp_path / "summary.md").read_text()) == (widest == 9.0)
    before = (tmp_path / "search.csv").read_bytes()
    running.run_experiment(small(widest), tmp_path)
    assert (tmp_path / "search.csv").read_bytes() == before
