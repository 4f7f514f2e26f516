"""The experiment on slow clients: its claims on invented results, its clients and their speeds, runs side by side."""

import importlib.util
import sys
from functools import partial
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from rookery.experiments.delay import delay
from rookery.experiments.machinery import one_run
from rookery.language.channel import Faults
from rookery.tasks import data_cleaning

EXPERIMENT, STEPS = delay.delay, (0.1, 0.1)


def invented(value, quick=False, seeds=(0, 1)):
    """Results in which each metric after some seconds is value(labels, share of the seconds, metric)."""
    rows = []
    for key in delay.keys(quick):
        for kind in delay.KINDS:
            for config in delay.reported(quick, key, kind, STEPS):
                of = config.labels
                for seconds in np.linspace(0, 1.1 * delay.SECONDS, 23):
                    metrics = {name: value(of, seconds / delay.SECONDS, name) for name in ("accuracy", "slow", "auc")}
                    length = {delay.SYNCHRONOUS: 25.0, delay.OVER: 12.0}.get(of["mode"], 4.0)
                    at = {"round": round(seconds / length), "clock": seconds, "seconds": 1.0}
                    rows += [{"run": config.name, **of, "seed": seed, **at, **metrics} for seed in seeds]
    return pd.DataFrame(rows)


SPEED = {delay.SYNCHRONOUS: 1.0, delay.OVER: 2.0}


def as_claimed(of, share, metric):
    """Modes differ in speed alone, but for the labels and the weights of slow clients."""
    over, unlike = of["mode"] == delay.OVER, of["clients"] == delay.UNLIKE
    if metric == "auc":
        return 0.9 + 0.02 * (of["mode"] == delay.LATE) - 0.1 * (over and unlike)
    lost = 0.3 * (over and unlike)
    if metric == "slow" and of["mode"] == delay.LATE:
        lost += 0.01
    several = 1.0 if of["method"] in delay.SEVERAL else 0.0
    return 0.97 - lost - (0.1 + 0.1 * several) * np.exp(-5 * SPEED.get(of["mode"], 4.0) * share)


def flat(of, share, metric):
    """All are the same."""
    return 0.9


def test_claims_hold_where_results_are_as_they_say_and_fail_where_all_are_the_same():
    good, same = invented(as_claimed), invented(flat)
    tolerant = ("within 1 point", "more than 1 point below", "less than 5 points", "60 %")
    strict = [claim for claim in EXPERIMENT.claims if not any(words in claim.text for words in tolerant)]
    assert len(EXPERIMENT.claims) == 13
    assert len(strict) == 9
    for claim in EXPERIMENT.claims:
        assert claim(good).holds, claim.text
    for claim in strict:
        assert not claim(same).holds, claim.text


def test_what_is_tolerant_fails_where_the_others_are_worse_and_as_long():
    def bad(of, share, metric):
        return 0.9 - 0.1 * (of["mode"] != delay.SYNCHRONOUS)

    results = invented(bad)
    results["round"] = (results["clock"] / 25).round()
    tolerant = [c for c in EXPERIMENT.claims if any(w in c.text for w in ("1 point", "less than 5 points", "60 %"))]
    assert len(tolerant) == 4
    for claim in tolerant:
        assert claim(results).holds is False, claim.text


def test_scaled_down_results_can_be_judged_and_drawn():
    results = invented(as_claimed, quick=True, seeds=(0,))
    for claim in EXPERIMENT.claims:
        assert claim(results).holds in (True, False, None)
    assert EXPERIMENT.headlines(results)
    for _, draw in EXPERIMENT.pictures.values():
        assert draw(results).axes


def test_a_metric_is_averaged_over_the_last_fifth_of_the_seconds():
    times = invented(lambda of, share, metric: share, seeds=(0,))
    key = (delay.LEARN, "FedBiO", delay.SYNCHRONOUS)
    assert delay.at(times, key) == pytest.approx([np.mean([0.85, 0.9, 0.95, 1.0])])
    assert delay.at(times, key, 0.5) == pytest.approx([np.mean([0.45, 0.5])])
    failed = times.assign(accuracy=np.where(times["clock"] > 1000, np.nan, 0.9))
    assert delay.at(failed, key) == [0.0]


def test_how_many_times_sooner():
    """Synchronous rounds are evaluated at .95 when they first have the mean of their last fifth, .925, less a point."""
    results = invented(lambda of, share, metric: SPEED.get(of["mode"], 4.0) * share, seeds=(0,))
    assert delay.faster(results, delay.LEARN, "FedBiO", delay.OVER) == pytest.approx([0.95 / 0.5])
    assert delay.faster(results, delay.LEARN, "FedBiO", delay.LATE) == pytest.approx([0.95 / 0.25])
    never = invented(lambda of, share, metric: share * (of["mode"] == delay.SYNCHRONOUS), seeds=(0,))
    assert delay.faster(never, delay.LEARN, "FedBiO", delay.LATE) == pytest.approx([0.95])


def test_every_mode_is_tuned_alike():
    for key in delay.keys(False):
        for kind in delay.KINDS:
            tried = delay.tried(False, key, kind)
            assert len({config.name for config in tried}) == 12
            assert {config.seeds for config in tried} == {(delay.SEARCH_SEED,)}
    assert delay.SEARCH_SEED not in delay.SEEDS


def test_methods_with_several_exchanges_are_not_asynchronous():
    asynchronous = {key[:2] for key in delay.keys(False) if key[2] == delay.LATE}
    assert asynchronous == {key[:2] for key in delay.keys(False) if key[1] not in delay.SEVERAL}
    configs = [config for key in delay.keys(False) for config in delay.tried(False, key, delay.ALIKE)]
    assert {config.cohort for config in configs} == {delay.AT_WORK}


@pytest.mark.parametrize("seed", [0, 1])
def test_the_speeds_have_a_ten_fold_spread_and_slow_clients_are_the_last_where_they_are_unlike(seed):
    for kind in delay.KINDS:
        compute = delay.speeds(seed, 100, kind).compute
        assert 1 <= compute.min() < 1.2
        assert 8 < compute.max() <= 10
        assert (compute[70:].max() < compute[:70].min()) == (kind == delay.UNLIKE)
    assert not np.array_equal(compute, delay.speeds(seed + 2, 100, kind).compute)


@pytest.mark.parametrize("task", delay.TASKS)
def test_slow_clients_hold_the_last_labels(task):
    made = {kind: delay.MAKE[task](0, 10, False, kind, "digits").clients for kind in delay.KINDS}
    clean = data_cleaning(10, corrupted=0.0, equal=True).clients.lower.rows["label"]
    for name in ("lower", "upper"):
        alike, unlike = (getattr(made[kind], name) for kind in (delay.ALIKE, delay.UNLIKE))
        labels = np.asarray(unlike.rows["label"])
        if task == delay.CLEAN and name == "lower":
            labels = np.asarray(clean)[np.asarray(unlike.rows["index"])]  # the right ones
        size = len(labels) // 10
        assert (labels[8 * size :] >= delay.FIRST_LABEL).all()
        assert (labels[: 6 * size] < delay.FIRST_LABEL).all()
        same = [np.sort(np.asarray(own.rows["image"]).sum(axis=1)) for own in (alike, unlike)]
        np.testing.assert_array_equal(*same)
        np.testing.assert_array_equal(alike.sizes, unlike.sizes)


def test_over_selection_seldom_hears_slow_clients():
    """The page says: 4 % of the replies that count are of the slowest 30 %, and the five slowest are never heard."""
    rng, heard = np.random.default_rng(0), np.zeros(delay.CLIENTS)  # by how many clients are faster
    for _ in range(4000):
        cohort = np.sort(rng.choice(delay.CLIENTS, delay.AT_WORK, replace=False))
        heard[cohort[: delay.HEARD]] += 1
    slow = round(delay.SLOW * delay.CLIENTS)
    assert round(heard[-slow:].sum() / heard.sum(), 2) == 0.04
    assert (heard[-(delay.AT_WORK - delay.HEARD) :] == 0).all()


def test_the_correction_of_over_selection_is_refused():
    config = delay.config(True, (delay.LEARN, "FedAvg", delay.OVER), delay.ALIKE, STEPS)
    with pytest.raises(ValueError, match="2 of 20 are always too late"):
        one_run.run(config.but(faults=Faults(first=4, correct=True)), 0, None, lambda run: None)


@pytest.fixture
def driver(monkeypatch):
    """`benchmarks/delay.py`, which the results come from."""
    path = Path(__file__).parents[3] / "benchmarks" / "delay.py"
    spec = importlib.util.spec_from_file_location("delay_driver", path)
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "delay_driver", module)
    spec.loader.exec_module(module)
    return module


def test_runs_of_other_steps_are_other_files(driver, tmp_path):
    key = (delay.LEARN, "FedBiO", delay.LATE)
    configs = [c for steps in (STEPS, (0.3, 0.1), (0.1, 0.3)) for c in delay.reported(False, key, delay.UNLIKE, steps)]
    paths = {driver.stored_at(tmp_path, config, seed) for config in configs for seed in (0, 1)}
    assert len(paths) == 2 * len(configs) == 12


@pytest.mark.slow  # test_scaled_down_results_can_be_judged_and_drawn has the claims and the pictures
def test_scaled_down(quick):
    results, _ = quick("delay")
    assert results["accuracy"].nunique() > 5
    assert set(results["mode"]) == {*delay.MODES, delay.EVEN}


@pytest.mark.slow  # the driver is no part of the package
@pytest.mark.parametrize(
    "key",
    [
        ("cleaning", "FedBiO", "asynchronous"),
        ("representation", "FedNest", "over-selected"),
        ("representation", "FedAvg", "asynchronous"),
    ],
    ids=lambda key: key[1],
)
def test_runs_side_by_side_equal_those_of_solve(driver, monkeypatch, key):
    monkeypatch.setattr(driver, "LANES", 3)
    make = partial(delay.config, True, key, delay.UNLIKE, rounds=9, every=4)
    wanted = [(make((0.1, 0.1)), 0), (make((0.3, 0.05)), 1)]
    solves = [partial(one_run.run, config, seed, None, lambda run: None) for config, seed in wanted]
    for run, solve in zip(driver.Together().run(solves), solves, strict=True):
        names = [name for name in run.history if name != "seconds"]
        pd.testing.assert_frame_equal(run.history[names], solve().history[names], rtol=1e-5, atol=1e-2)
