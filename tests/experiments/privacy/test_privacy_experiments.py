"""The experiments on privacy: their claims on invented results, and both scaled down."""

import importlib.util
from pathlib import Path

import jax
import numpy as np
import pandas as pd
import pytest

from rookery.experiments.machinery import one_run
from rookery.experiments.privacy import accuracy, groups, records, shared


def invented(experiment, value):
    """Results in which each metric is value(task, method, budget, metric)."""
    rows = []
    for config in experiment.runs(False):
        of = config.labels
        metrics = {m: value(of["task"], of["method"], of["budget"], m) for m in ("accuracy", "worst", "auc")}
        for seed in shared.SEEDS:
            rows += [{"run": config.name, **of, "seed": seed, "round": t, **metrics} for t in (0, shared.ROUNDS)]
    return pd.DataFrame(rows)


def by_exchanges(task, method, budget, metric):
    """Noise costs accuracy in proportion to a method's exchanges, and the worst group twice; it hides the weights."""
    if metric == "auc":
        return 0.5 if budget < np.inf else 0.9
    lost = (2 if metric == "worst" else 1) * {"FedNest": 10, "LFedNest": 2}.get(method, 1) * 0.1 / budget
    cleaned = task == "cleaning" and method != "FedAvg"
    gain = 0.05 * (cleaned and budget == np.inf) - 0.01 * (cleaned and budget < np.inf)
    return 0.85 + gain + 0.05 * (method == "FedDRO" and metric == "worst") - lost


@pytest.mark.parametrize("experiment", [accuracy.accuracy, groups.groups])
def test_claims_hold_where_results_are_as_they_say_and_fail_where_all_are_the_same(experiment):
    good = invented(experiment, by_exchanges)
    assert all(claim(good).holds for claim in experiment.claims)
    flat = invented(experiment, lambda task, method, budget, metric: 0.9)
    strict = [claim for claim in experiment.claims if "stays within" not in claim.text]
    assert not any(claim(flat).holds for claim in strict)
    assert experiment.picture(good).axes


def by_records(task, method, budget, metric):
    """Noise costs nested methods a little more than FedAvg, and hospitals' weights are learnt all the same."""
    if metric == "auc":
        return 1.0
    if task == records.CLEAN:
        return (0.85 if method == "FedAvg" else 0.92) - 0.01 / budget
    least = min(lost for lost in records.BY_CLIENT.values() if lost > 0)
    gain = 0.01 if method == "ASFBO" and budget < np.inf else 0.0  # with the client as the unit it lost nothing
    return 0.96 + gain - (4 if method == "FedAvg" else 6) * least / budget


def test_claims_on_records_hold_where_results_are_as_they_say_and_fail_where_they_are_not():
    good = invented(records.records, by_records)
    assert all(claim(good).holds for claim in records.records.claims)
    worse = lambda task, method, budget, metric: 0.5 if budget < np.inf and method != "FedAvg" else 0.9
    nested = [claim for claim in records.records.claims if "loses more" not in claim.text]
    assert not any(claim(invented(records.records, worse)).holds for claim in nested)
    assert all(picture(good).axes for _, picture in records.records.pictures.values())


@pytest.mark.slow
@pytest.mark.parametrize("name", ["privacy-accuracy", "privacy-groups", "privacy-records"])
def test_scaled_down(quick, name):
    results, _ = quick(name)
    assert {8.0, np.inf} < set(results["budget"])
    private = results[results["budget"] < np.inf]
    assert (private["epsilon"] <= private["budget"]).all()
    assert private["epsilon"].max() > 0.9 * private["budget"].max()


@pytest.fixture
def driver():
    """`benchmarks/privacy.py`, which the results come from."""
    path = Path(__file__).parents[3] / "benchmarks" / "privacy.py"
    spec = importlib.util.spec_from_file_location("privacy_driver", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def check_side_by_side(driver, configs):
    """Runs side by side equal those of `solve`."""
    first, wanted, levels = configs[0], [(config, seed) for config in configs for seed in (0, 3)], {}
    with jax.enable_x64(False):
        if first.channel is not None:
            start = driver.task_of(first.task, tuple(first.settings.items()), None).init
            levels["8"] = dict(driver.traced(first, start, first.channel, None).job.channel.levels)
        found = driver.Lanes(first, levels, 5, None).run(wanted)
    for (config, seed), history in zip(wanted, found, strict=True):
        alone = one_run.run(config, seed, None, lambda run: None).history
        assert [row["accuracy"] for row in history] == pytest.approx(alone["accuracy"].tolist(), abs=1e-2)
        assert history[-1]["accuracy"] != history[0]["accuracy"]


@pytest.mark.slow
@pytest.mark.parametrize(("task", "method"), [("representation", "FedBiO"), ("groups", "FedDRO")])
@pytest.mark.parametrize("epsilon", [8.0, np.inf])
def test_runs_side_by_side_equal_those_of_solve(driver, task, method, epsilon):
    values = ((0.1, 0.01), (0.3, 0.03))
    check_side_by_side(driver, [shared.config(True, task, method, epsilon, own) for own in values])


@pytest.mark.slow
@pytest.mark.parametrize(("task", "method"), [(records.LEARN, "FedBiO"), (records.CLEAN, "FedNest")])
@pytest.mark.parametrize("epsilon", [8.0, np.inf])
def test_runs_side_by_side_have_bounds_of_their_own(driver, task, method, epsilon):
    values = ((3.0, 1.0, 0.3), (3.0, 1.0, 10.0))  # only the bounds differ
    check_side_by_side(driver, [records.config(True, task, method, epsilon, own) for own in values])
