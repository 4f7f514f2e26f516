"""The rates of the FedNest paper's theory, scaled down, end to end; and what its checks make of made-up numbers."""

import json

import numpy as np
import pandas as pd
import pytest

from rookery.experiments import EXPERIMENTS, reproduce
from rookery.experiments.fednest import rates as theory
from rookery.experiments.fednest.quadratics import CLASSES


@pytest.fixture(scope="module")
def out(tmp_path_factory):
    return reproduce("fednest-rates", tmp_path_factory.mktemp("rates"), quick=True, progress=False)


@pytest.mark.slow
def test_writes_everything(out):
    assert {path.name for path in out.iterdir()} == {
        "results.csv", "fednest-rates.png", "claims.json", "made.json", "summary.md", "runs",
    }  # fmt: skip
    results = pd.read_csv(out / "results.csv")
    rates, biases = (results[results["part"] == part] for part in ("rate", "bias"))
    assert set(rates["problem"]) == {*CLASSES}
    assert rates["gradient"].notna().all()
    assert biases["bias"].notna().all()


@pytest.mark.slow
def test_gradients_fall_and_claims_are_evaluated(out):
    results = pd.read_csv(out / "results.csv")
    for problem in CLASSES:
        table = theory.by_rounds(results, problem, "mean")
        assert (table[400] < 0.75 * table[100]).all(), problem
    claims = {claim["claim"]: claim for claim in json.loads((out / "claims.json").read_text())}
    assert len(claims) == 7
    for text in (  # those that do not need long runs
        "The hypergradient's bias is geometric in N, no slower than (κ − 1)/κ.",
        "The mean of the random hypergradient has this bias (within the margin).",
    ):
        assert claims[text]["verdict"] == "reproduced", claims[text]


def test_slopes_of_made_up_runs():
    """A gradient that is c/√K throughout has slope −1/2; one that is c·K^(−0.4) is flatter, and is found out."""
    for power, holds in ((-0.5, True), (-0.4, False), (-1.0, True)):
        rows = [
            {"part": "rate", "problem": "minimax", "run": k, "seed": seed, "K": k, "round": t,
             "gradient": (9 + seed) * k**power}
            for seed in range(3)
            for k in (100.0, 1000.0, 10000.0)
            for t in np.linspace(0, k, 11)
        ]  # fmt: skip
        finding = theory._no_flatter(pd.DataFrame(rows), "minimax")
        for words in ("the mean", "the floor"):
            assert finding.figures[f"slope of {words}, and the margin"][0] == pytest.approx(power)
        assert finding.holds is holds


def test_a_mean_that_is_only_the_start_s_does_not_carry_a_floor_that_is_too_flat():
    """The start dies away in a time ∝ √K, the floor does not fall at all."""
    rows = [
        {"part": "rate", "problem": "minimax", "run": k, "seed": seed, "K": k, "round": t,
         "gradient": 9 * np.exp(-20 * t / np.sqrt(k)) + 1e-6 * (1 + seed / 10)}
        for seed in range(3)
        for k in (100.0, 1000.0, 10000.0)
        for t in np.linspace(0, k, 2001)
    ]  # fmt: skip
    finding = theory._no_flatter(pd.DataFrame(rows), "minimax")
    assert finding.figures["slope of the mean, and the margin"][0] < -0.4
    assert finding.holds is False


def test_full_size():
    configs = EXPERIMENTS["fednest-rates"].runs(False)
    rates = [config for config in configs if config.labels["part"] == "rate"]
    rounds = {config.rounds for config in rates}
    assert max(rounds) == 100 * min(rounds)
    assert all(config.float64 and len(config.seeds) >= 3 for config in rates)
    for problem in CLASSES:
        own = [config for config in rates if config.labels["problem"] == problem]
        steps = [getattr(config.algorithm, "upper_step", None) or config.algorithm.step for config in own]
        scaled = np.array(steps) * np.sqrt([config.rounds for config in own])
        np.testing.assert_allclose(scaled, scaled[0])  # α ∝ 1/√K
        assert all(config.algorithm.scale_steps for config in own)
