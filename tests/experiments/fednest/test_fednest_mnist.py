"""The FedNest paper's experiments on MNIST, scaled down to the bundled digits, end to end."""

import dataclasses
import json

import pandas as pd
import pytest

from rookery.experiments import EXPERIMENTS, reproduce
from rookery.experiments.fednest import fig2, fig6
from rookery.experiments.fednest.representation import FAMILY
from rookery.experiments.machinery import one_run
from rookery.experiments.machinery.numbers import SPLITS
from rookery.experiments.machinery.running import run_experiment

NAMES = [name for name, experiment in EXPERIMENTS.items() if experiment.family == FAMILY]


@pytest.fixture(scope="module")
def out(tmp_path_factory):
    folder = tmp_path_factory.mktemp("fednest")
    (folder / "fednest-mnist-runs").mkdir()  # where the family's runs are shared
    return folder


@pytest.fixture(scope="module")
def fig2a(out):
    return reproduce("fednest-fig2a", out / "fednest-fig2a", quick=True, progress=False)


@pytest.mark.slow
def test_fig2a(fig2a):
    results = pd.read_csv(fig2a / "results.csv")
    assert set(results["method"]) == {"FedNest", "LFedNest"}
    assert {path.name for path in fig2a.iterdir()} == {
        "results.csv", "fednest-fig2a.png", "claims.json", "made.json", "summary.md",
    }  # fmt: skip
    assert set(results["hessian_step"]) == {"0.01", "auto"}
    last = results[results["round"] == 60].set_index("run")
    assert last.loc[last["method"] == "FedNest", "accuracy"].min() > 0.8
    full = results[results["method"] == "FedNest"]
    assert (full["implicit_share_series_01"] < full["implicit_share_series"]).all()
    assert len(json.loads((fig2a / "claims.json").read_text())) == len(EXPERIMENTS["fednest-fig2a"].claims)


@pytest.mark.slow
def test_fig2c_takes_the_runs_that_fig2a_left(fig2a, out, monkeypatch):
    computed = []
    solve = one_run.solve
    monkeypatch.setattr(one_run, "solve", lambda *given, **named: computed.append(given) or solve(*given, **named))
    runs = [config for config in fig2.fig2c.runs(True) if config.labels["tau"] == 1]
    alone = dataclasses.replace(
        EXPERIMENTS["fednest-fig2c"], runs=lambda quick: runs, claims=(), picture=EXPERIMENTS["fednest-fig2b"].picture
    )
    run_experiment(alone, out / "fednest-fig2c", quick=True, progress=False)
    assert computed == []


@pytest.mark.parametrize("name", NAMES)
def test_figures_of_one_run_give_it_one_name(name):
    """A run that two figures share is stored under one path only if they call it the same."""
    known = {}
    for other in NAMES:
        for quick in (False, True):
            for config in EXPERIMENTS[other].runs(quick):
                known.setdefault((one_run.fingerprint(config, 0), quick), set()).add(config.name)
    for quick in (False, True):
        for config in EXPERIMENTS[name].runs(quick):
            assert known[one_run.fingerprint(config, 0), quick] == {config.name}


def frame(curves, seeds=1):
    """Results as the claims see them: {(method, split, tau, rate): accuracies by evaluation}; seeds are alike."""
    rows = [
        {"run": f"{method} {split} {tau} {rate}", "method": method, "split": split, "tau": tau, "rate": rate,
         "hessian_step": "0.01", "seed": seed, "round": 10 * place, "exchanges": 100 * place, "accuracy": accuracy}
        for (method, split, tau, rate), values in curves.items()
        for seed in range(seeds)
        for place, accuracy in enumerate(values)
    ]  # fmt: skip
    return pd.DataFrame(rows)


def test_claims_hold_where_they_should_and_fail_where_they_should():
    good, bad = [0.1] + [0.93] * 20, [0.1] + [0.85] * 20
    two = {("FedNest", split, 1, 0.01): good for split in SPLITS}
    low = frame({**two, ("LFedNest", "i.i.d.", 1, 0.01): good, ("LFedNest", "non-i.i.d.", 1, 0.01): bad}, seeds=2)
    for check in (fig2.lfednest_below, fig2.iid_alike, fig2.reaches_iid, fig2.fednest_level):
        assert check(low).holds
    assert not fig2.lfednest_level(low).holds
    high = frame({**two, ("LFedNest", "non-i.i.d.", 1, 0.01): [0.1] + [0.92] * 20}, seeds=2)
    assert not fig2.lfednest_below(high).holds
    slow = [0.1] * 4 + [0.93] * 17
    taus = frame({("FedNest", s, tau, 0.01): slow if tau == 1 else good for s in SPLITS for tau in (1, 5)}, seeds=2)
    assert fig2.tau_saves_communication(taus).holds
    assert not fig2.tau_improves_accuracy(taus).holds


def test_svrg_and_sgd_are_compared_up_to_the_end_of_the_printed_axis():
    ahead, fallen = [0.1] + [0.93] * 20, [0.1] + [0.93] * 40 + [0.5] * 10  # 4,000 communications are 40 evaluations
    pair = lambda first, second: frame(
        {("FedNest", "non-i.i.d.", 1, 0.01): first, ("FedNestSGD", "non-i.i.d.", 1, 0.01): second}, seeds=2
    )
    sgd = [0.1] + [0.9, 0.92] * 25
    assert fig2.svrg_converges_better(pair(fallen, sgd)).holds
    assert fig2.svrg_is_stabler(pair(fallen, sgd)).holds
    assert not fig2.svrg_converges_better(pair(sgd, ahead + [0.93] * 30)).holds
    assert not fig2.svrg_is_stabler(pair(sgd, ahead + [0.93] * 30)).holds


def test_rates_at_which_methods_converge():
    good, bad = [0.1] + [0.93] * 20, [0.1] + [0.3] * 20
    limits = {"FedNest": 0.3, "FedNestSGD": 0.1, "LFedNestSVRG": 0.03, "LFedNest": 0.01}
    rates = (0.3, 0.1, 0.03, 0.01)
    results = frame(
        {(m, "non-i.i.d.", 1, rate): good if rate <= limit else bad for m, limit in limits.items() for rate in rates}
    )
    for check in (
        fig6.fednest_stands_the_largest,
        fig6.lfednest_needs_the_smallest,
        fig6.communication_stands_larger_rates,
        fig6.svrg_and_fedout_stabilise,
    ):
        assert check(results).holds
    swapped = results.assign(method=results["method"].replace({"FedNest": "LFedNest", "LFedNest": "FedNest"}))
    swapped["run"] = swapped["method"] + swapped["rate"].astype(str)
    assert fig6.communication_stands_larger_rates(swapped).holds is False


def standing(*largest):
    """Results in which each method converges up to a rate."""
    good, bad = [0.1] + [0.93] * 20, [0.1] + [0.3] * 20
    stood = dict(zip(fig6.RATED, largest, strict=True))
    return frame({(m, "non-i.i.d.", 1, r): good if r <= stood[m] else bad for m in stood for r in fig6.RATES})


def test_methods_are_told_apart_by_the_largest_rate_that_they_stand():
    found = fig6.communication_stands_larger_rates(standing(0.06, 0.03, 0.01, 0.003))
    assert found.holds
    assert [*found.figures.values()] == [[0.06, 0.03, 0.01, 0.003]]
    assert fig6.with_a_fixed_one(standing(0.06, 0.03, 0.01, 0.003)).holds
    assert not fig6.with_a_fixed_one(standing(0.06, 0.03, 0.01, 0.01)).holds
    assert fig6.communication_stands_larger_rates(standing(0.06, 0.03, 0.003, 0.01)).holds is False
    same = fig6.communication_stands_larger_rates(standing(0.03, 0.03, 0.01, 0.003))
    assert same.holds is None
    assert "the same largest rate" in same.note


def test_where_the_rate_is_the_fixed_hessian_step_the_runs_count_for_both():
    names = {fig6.AS_RATE: {0.06, 0.003}, "0.01": {0.06, 0.01, 0.003}, "auto": {0.06, 0.01, 0.003}}
    rows = pd.DataFrame([{"hessian_step": step, "rate": rate} for step, rates in names.items() for rate in rates])
    own = fig6.with_rate(rows)
    assert sorted(own["rate"]) == [0.003, 0.01, 0.06]
    assert set(own["hessian_step"]) == {fig6.AS_RATE, "0.01"}
