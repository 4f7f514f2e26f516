"""The FedNest paper's experiments on MNIST, scaled down to the bundled digits, end to end."""

import dataclasses
import json

import pandas as pd
import pytest

from rookery.experiments import EXPERIMENTS, Claim, reproduce
from rookery.experiments.fednest import fig2, fig6
from rookery.experiments.fednest.representation import FAMILY, add_with_both
from rookery.experiments.machinery import one_run
from rookery.experiments.machinery.claims import Claims
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
    runs = [config for config in fig2.fig2c_runs(True) if config.labels["tau"] == 1]
    alone = dataclasses.replace(
        EXPERIMENTS["fednest-fig2c"], runs=lambda quick: runs, claims=(), picture=fig2.fig2b_picture
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


def frame(curves):
    """Results as the claims see them: {(method, split, tau, rate): accuracies by evaluation}."""
    rows = []
    for (method, split, tau, rate), values in curves.items():
        for place, accuracy in enumerate(values):
            rows.append(
                {"run": f"{method} {split} {tau} {rate}", "method": method, "split": split, "tau": tau, "rate": rate,
                 "seed": 0, "round": 10 * place, "exchanges": 100 * place, "accuracy": accuracy}
            )  # fmt: skip
    return pd.DataFrame(rows)


def test_claims_hold_where_they_should_and_fail_where_they_should():
    good, bad = [0.1] + [0.93] * 20, [0.1] + [0.85] * 20
    two = {("FedNest", split, 1, 0.01): good for split in SPLITS}
    low = frame({**two, ("LFedNest", "i.i.d.", 1, 0.01): good, ("LFedNest", "non-i.i.d.", 1, 0.01): bad})
    assert fig2.lfednest_below(low).holds
    assert fig2.iid_alike(low).holds
    assert fig2.reaches_iid(low).holds
    assert fig2.above_ninety(low).holds
    high = frame({**two, ("LFedNest", "non-i.i.d.", 1, 0.01): good})
    assert not fig2.lfednest_below(high).holds
    slow = [0.1] * 4 + [0.93] * 17
    taus = frame({("FedNest", s, tau, 0.01): slow if tau == 1 else good for s in SPLITS for tau in (1, 5)})
    assert fig2.tau_saves_communication(taus).holds
    assert not fig2.tau_improves_accuracy(taus).holds


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


def standing(**converging):
    """Results in which each method converges at these rates, of the four and those beyond that were run of it."""
    good, bad = [0.1] + [0.93] * 20, [0.1] + [0.3] * 20
    return frame(
        {
            (m, "non-i.i.d.", 1, rate): good if rate in converging[m] else bad
            for m in fig6.RATED
            for rate in (*fig6.RATES, *fig6.EDGE_RATES[m])
        }
    )


def test_rates_beyond_the_figure_s_tell_what_a_method_stands():
    low, four = (0.003, 0.0055), (0.003, 0.01, 0.03, 0.06)
    apart = {"FedNest": (*four, 0.1, 0.13), "FedNestSGD": (*four, 0.1), "LFedNestSVRG": low, "LFedNest": (0.003,)}
    found = fig6.communication_stands_larger_rates(standing(**apart))
    assert found.holds
    assert [*found.figures.values()] == [[0.13, 0.1, 0.0055, 0.003]] * 2
    assert not found.note
    results = standing(**apart)
    assert fig6.fednest_stands_the_largest(results).holds  # of the figure's four, as before
    assert fig6.lfednest_needs_the_smallest(results).holds
    again = fig6.communication_stands_larger_rates(standing(**apart | {"LFedNest": (0.003, 0.01)}))
    assert again.holds is False
    assert "LFedNest converges up to 0.003, fails above it, and converges again at 0.01." in again.note
    assert [*again.figures.values()][1][-1] == 0.003
    same = fig6.communication_stands_larger_rates(standing(**apart | {"FedNest": (*four, 0.1)}))
    assert same.holds is None
    assert "FedNest and FedNestSGD have the same largest rate, 0.1." in same.note
    beyond = fig6.communication_stands_larger_rates(standing(**apart | {"LFedNestSVRG": (0.003, 0.1)}))
    assert beyond.holds is None
    assert "LFedNestSVRG still converges at the largest rate that was run, 0.1." in beyond.note


def test_the_paper_s_claims_are_checked_with_one_hessian_step_and_compared_with_the_other():
    good, bad = [0.1] + [0.93] * 20, [0.1] + [0.85] * 20

    def both(others):
        ends = {("LFedNest", split): [0.93] * 21 for split in SPLITS} | others
        curves = {("FedNest", split, 1, 0.01): good for split in SPLITS}
        return frame(curves | {(*key, 1, 0.01): values for key, values in ends.items()})

    apart = both({("LFedNest", "non-i.i.d."): bad}).assign(hessian_step="0.01")
    close = both({}).assign(hessian_step="auto")
    claims = Claims()
    add_with_both(claims, [Claim("Below.", "Fig. 2a", fig2.lfednest_below)], fig2._ends_by_split)
    for beside, same in ((apart, True), (close, False)):
        results = pd.concat([apart, beside.assign(hessian_step="auto", run=beside["run"] + " auto")])
        below, alike = (claim(results) for claim in claims)
        assert below.holds
        assert alike.holds is same
        assert ("“Below.” does not hold then." in alike.note) is not same
    assert [claim.kind for claim in claims] == ["experiment", "own"]


def test_a_run_that_learnt_and_failed_is_named():
    fell, stayed = [0.1] + [0.9] * 10 + [0.1] * 10, [0.1] + [0.9] * 20
    results = frame({("LFedNest", "non-i.i.d.", 1, 0.01): fell, ("LFedNestNonAlt", "non-i.i.d.", 1, 0.01): stayed})
    assert "LFedNest reaches 90 % and fails after round 100" in fig2.fallen(results, "LFedNest")
    assert not fig2.fallen(results, "LFedNestNonAlt")


def test_where_the_rate_is_the_fixed_hessian_step_the_runs_count_for_both():
    names = {fig6.AS_RATE: {0.06, 0.003}, "0.01": {0.06, 0.01, 0.003}, "auto": {0.06, 0.01, 0.003}}
    rows = pd.DataFrame([{"hessian_step": step, "rate": rate} for step, rates in names.items() for rate in rates])
    own = fig6.with_rate(rows)
    assert sorted(own["rate"]) == [0.003, 0.01, 0.06]
    assert set(own["hessian_step"]) == {fig6.AS_RATE, "0.01"}
    assert sorted(fig6.with_fixed(rows)["rate"]) == [0.003, 0.01, 0.06]
