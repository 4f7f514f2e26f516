"""FLamby's tables: its published numbers, its settings, the claims on invented results, and both scaled down."""

import numpy as np
import pandas as pd
import pytest

import rookery as rk
from rookery.data import DataError
from rookery.experiments.flamby import tables
from rookery.experiments.flamby.heart import HEART, heart
from rookery.experiments.flamby.tcga import TCGA, tcga


def invented(benchmark, wrong=0.0, garbage=7.0):
    """Results that are FLamby's numbers, shifted by `wrong` in half of the seeds' numbers more than in the others."""
    rows = []
    for method in benchmark.methods:
        for i, seed in enumerate(tables.SEEDS):
            for at in range(5):
                right = at == (benchmark.turns(seed) if method == "Cyclic" else 4)
                values = {
                    f"pooled_{benchmark.metric}" if test == "pooled" else f"{benchmark.metric}_{test}": (
                        benchmark.published[method, test][i] + wrong * (1 + 0.1 * i) if right else garbage
                    )
                    for test in benchmark.tests
                }
                rows.append({"run": method, "method": method, "seed": seed, "round": at, **values})
    if benchmark is TCGA:
        return pd.DataFrame(rows)
    tuned = [{"seed": seed, "accuracy": 0.7, "personal_accuracy": 0.7 + wrong} for seed in tables.SEEDS]
    tuned = [{"run": "FineTuned", "method": "FineTuned", "round": 15, **row} for row in tuned]
    return pd.concat([pd.DataFrame(rows), pd.DataFrame(tuned)], ignore_index=True)


@pytest.mark.parametrize(
    ("benchmark", "method", "means", "spreads"),
    [
        (HEART, "FedAvg", [0.731, 0.719, 0.650, 0.640, 0.748], [0.022, 0.033, 0.114, 0.051, 0.027]),
        (HEART, "switzerland", [0.481, 0.391, 0.725, 0.671, 0.483], [0.054, 0.042, 0.122, 0.064, 0.045]),
        (
            TCGA,
            "Scaffold",
            [0.593, 0.755, 0.676, 0.454, 0.911, 0.733, 0.699],
            [0.041, 0.115, 0.047, 0.139, 0.063, 0.149, 0.035],
        ),
    ],
)
def test_the_published_means(benchmark, method, means, spreads):
    values = np.array([benchmark.published[method, test] for test in benchmark.tests])
    np.testing.assert_allclose(values.mean(axis=1), means, atol=6e-4)
    np.testing.assert_allclose(values.std(axis=1, ddof=1), spreads, atol=6e-4)
    assert len(benchmark.published) == len(benchmark.methods) * len(benchmark.tests)


def test_the_first_clients_turns_in_cyclic():
    assert [HEART.turns(seed) for seed in tables.SEEDS] == [4, 4, 4, 4, 3]
    assert [TCGA.turns(seed) for seed in tables.SEEDS] == [0, 1, 1, 1, 1]
    for benchmark, most in ((HEART, 4), (TCGA, 1)):
        config = benchmark.config(False, "Cyclic")
        assert (config.rounds, config.every) == (most, 1)
        assert config.settings["train"] == next(iter(benchmark.clients))


def test_the_settings_are_flambys():
    algorithms = {
        (name, method): benchmark.config(False, method).algorithm
        for name, benchmark in (("heart", HEART), ("tcga", TCGA))
        for method in benchmark.methods
    }
    adagrad = algorithms["heart", "FedAdagrad"]
    expected = rk.FedOpt("adagrad", 0.316228, momentum=0.9, decay=0.999, floor=1e-8, start=0.0)
    assert (adagrad.server_upper_optimizer, adagrad.step, adagrad.local_steps) == (expected, 0.003162, 100)
    assert algorithms["tcga", "FedProx"] == rk.FedProx(step=0.1, local_steps=100, proximal=0.1, batch_size=8)
    assert algorithms["tcga", "Scaffold"] == rk.Scaffold(step=0.01, server_step=1.0, local_steps=100, batch_size=8)
    assert algorithms["heart", "switzerland"].local_steps == 50 * 8  # 30 rows: seven batches of four, and one of two
    assert algorithms["tcga", "pooled"].local_steps == 30 * 109


@pytest.mark.parametrize(("experiment", "benchmark"), [(heart, HEART), (tcga, TCGA)])
def test_claims_hold_on_flambys_own_numbers_and_fail_on_others(experiment, benchmark):
    good = invented(benchmark)
    assert all(claim(good).holds for claim in experiment.claims)
    assert len(experiment.claims) > len(benchmark.methods)
    wrong = invented(benchmark, wrong=-0.1)
    ours = [claim for claim in experiment.claims if "commoner" not in claim.text]
    assert not any(claim(wrong).holds for claim in ours)
    other_seeds = good.assign(seed=good["seed"] - 42)
    assert all(claim(other_seeds).holds is None for claim in experiment.claims[: len(benchmark.methods)])
    assert experiment.picture(good).axes
    assert len(experiment.headlines(good)) >= len(benchmark.methods)


def test_one_patient_in_one_seed_is_within_the_margin():
    results = invented(HEART)
    at = results.index[(results["method"] == "pooled") & (results["seed"] == 44) & (results["round"] == 4)]
    results.loc[at, "accuracy_hungary"] += 1 / 89
    assert tables.agrees(results, HEART, "pooled").holds
    every = results["method"] == "pooled"
    results.loc[every, "accuracy_hungary"] += 1 / 89
    assert tables.agrees(results, HEART, "pooled").holds is False


@pytest.mark.slow
@pytest.mark.parametrize("name", ["flamby-heart", "flamby-tcga"])
def test_scaled_down(quick, name):
    try:
        results, _ = quick(name)
    except DataError:
        pytest.skip("tcga-brca is not at hand")
    assert set(results["seed"]) == set(tables.SEEDS[:2])
    assert {"pooled", "FedAvg", "FedAdam", "Cyclic"} <= set(results["method"])
