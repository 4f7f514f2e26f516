"""Loss tuning (Fig. 3 of the FedNest paper): the search, the claims, and one figure scaled down, end to end."""

import pandas as pd
import pytest

from rookery.experiments import reproduce
from rookery.experiments.fednest import fig3 as figures
from rookery.experiments.fednest import tuning
from rookery.experiments.machinery.numbers import SPLITS


@pytest.mark.slow
def test_fig3a(tmp_path):
    out = reproduce("fednest-fig3a", tmp_path / "fednest-fig3a", quick=True, progress=False)
    results = pd.read_csv(out / "results.csv")
    assert set(results["method"]) == {"FedNest", "LFedNest", tuning.CENTRAL, tuning.UNTUNED}
    last = results[results["round"] == 60].set_index(["method", "steps"])["accuracy"]
    assert min(last["FedNest", tuning.SEARCHED], last["FedNest", tuning.EQUAL]) > 0.7
    assert set(pd.read_csv(out / "search.csv")["upper_step"]) == set(tuning.SEARCH["FedNest", "i.i.d."][0][-2:])
    assert "## Search" in (out / "summary.md").read_text()


def test_a_step_with_which_one_seed_fails_is_not_chosen():
    rows = [(0.6, 8, 0.3), (0.6, 9, 0.4), (2.0, 8, 0.1), (2.0, 9, float("nan"))]
    search = pd.DataFrame(
        [{"run": f"search: steps {upper:g}, 0.01", "seed": seed, "validation_loss": loss} for upper, seed, loss in rows]
    ).assign(method="FedNest", split="i.i.d.")
    assert tuning.GRID.best(search) == {("FedNest", "i.i.d."): {"upper": 0.6, "lower": 0.01}}


def frame(curves):
    """Results as the claims see them: {(method, split): the accuracies of each seed}, with equal and searched steps."""
    rows = [
        {"run": f"{method}, {split}, {steps}", "method": method, "split": split, "steps": steps, "seed": seed,
         "round": 10 * place, "exchanges": 10 * place, "accuracy": accuracy, "tail_accuracy": accuracy}
        for (method, split), seeds in curves.items()
        for steps in (tuning.EQUAL, tuning.SEARCHED)
        for seed, values in enumerate(seeds)
        for place, accuracy in enumerate(values)
        if steps == tuning.SEARCHED or method not in tuning.BESIDE
    ]  # fmt: skip
    return pd.DataFrame(rows)


def lasting(*ends):
    return [[0.1] + [end] * 20 for end in ends]


def test_svrg_and_sgd_are_compared_seed_by_seed():
    """A small lead counts where every seed has it."""
    full = {("FedNest", split): lasting(0.9, 0.93) for split in SPLITS}
    clear = frame(full | {("FedNestSGD", split): lasting(0.899, 0.929) for split in SPLITS})
    found = figures.svrg_tunes_better(clear)
    assert found.holds
    assert found.figures["lead, and the margin, at the end, i.i.d."] == pytest.approx([0.001, 0])
    assert figures.svrg_matters_more(clear).holds is None
    assert (
        figures.svrg_tunes_better(frame(full | {("FedNestSGD", s): lasting(0.95, 0.88) for s in SPLITS})).holds is None
    )


def test_better_convergence_asks_for_the_rounds_and_the_end():
    """Who is ahead at the end, but behind on average over the rounds, does not converge better."""
    late = [[0.1] * 11 + [end] * 10 for end in (0.95, 0.951)]
    sgd = {("FedNestSGD", split): lasting(0.9, 0.902) for split in SPLITS}
    found = figures.svrg_tunes_better(frame(sgd | {("FedNest", split): late for split in SPLITS}))
    assert found.holds is False
    assert found.figures["lead, and the margin, at the end, i.i.d."][0] > 0
    mixed = {("FedNest", "i.i.d."): late, ("FedNest", "non-i.i.d."): lasting(0.95, 0.951)}
    assert figures.svrg_tunes_better(frame(sgd | mixed)).holds is False
    less = {("FedNest", "i.i.d."): lasting(0.85, 0.851), ("FedNest", "non-i.i.d."): lasting(0.88, 0.8805)}
    assert figures.svrg_matters_more(frame(sgd | less)).holds is False  # less behind is not ahead


def test_a_lead_that_only_the_picked_steps_have_is_undecided():
    sgd = {("FedNestSGD", split): lasting(0.9, 0.902) for split in SPLITS}
    more = frame(sgd | {("FedNest", "i.i.d."): lasting(0.91, 0.912), ("FedNest", "non-i.i.d."): lasting(0.95, 0.9521)})
    assert figures.svrg_matters_more(more).holds
    same = frame(sgd | {("FedNest", split): lasting(0.91, 0.912) for split in SPLITS})
    mixed = pd.concat([more[more["steps"] == tuning.EQUAL], same[same["steps"] == tuning.SEARCHED]])
    assert figures.svrg_matters_more(mixed).holds is None
    assert "were picked after a search" in figures.svrg_matters_more(mixed).note


def test_what_is_above_no_tuning():
    """FedNest and the centralised run by 2 points and more than the margin; LFedNest by more than the margin."""
    none, central = {(tuning.UNTUNED, "i.i.d."): lasting(0.89, 0.9)}, {(tuning.CENTRAL, "i.i.d."): lasting(0.93, 0.94)}
    light = lambda *ends: {("LFedNest", "i.i.d."): lasting(*ends)}
    good = frame(none | central | {("FedNest", "i.i.d."): lasting(0.92, 0.93)} | light(0.899, 0.91))
    assert figures.above_no_tuning(good).holds
    assert figures.lfednest_tunes(good).holds
    assert figures.near_centralised(good).holds
    poor = frame(none | central | {("FedNest", "i.i.d."): lasting(0.9, 0.93)} | light(0.91, 0.899))
    assert not figures.above_no_tuning(poor).holds
    assert figures.lfednest_tunes(poor).holds is None
    assert figures.lfednest_tunes(poor).note
    assert figures.lfednest_tunes(frame(none | light(0.88, 0.891))).holds is False


def test_the_curves_of_fig3a_coincide_only_if_no_run_fails():
    two = lambda *ends: frame({("FedNest", "i.i.d."): lasting(0.92, 0.93), ("LFedNest", "i.i.d."): lasting(*ends)})
    assert figures.coincide(two(0.91, 0.92)).holds
    assert not figures.coincide(two(0.88, 0.89)).holds
    broken = frame({("FedNest", "i.i.d."): lasting(0.9), ("LFedNest", "i.i.d."): [[0.9] * 30 + [0.4] * 3]})
    assert not figures.coincide(broken).holds


def test_the_papers_claims_are_read_at_equal_steps_and_up_to_the_end_of_the_printed_axis():
    """The runs with searched steps, and what comes after the axis, are left to the claims of our own."""
    runs = [(m, steps) for m in ("FedNest", "LFedNest") for steps in (tuning.EQUAL, tuning.SEARCHED)]
    runs += [(m, tuning.SEARCHED) for m in tuning.BESIDE]
    rows = [
        {"run": f"{method}, {steps}", "method": method, "split": "i.i.d.", "steps": steps, "seed": 0, "round": at,
         "exchanges": each * at, "accuracy": 0.5}
        for method, steps in runs
        for each in [10 if method == "FedNest" else 2]
        for at in range(0, 3001, 100)
    ]  # fmt: skip
    cut = {across: tuning.printed(pd.DataFrame(rows), across) for across in figures.ACROSS}
    for own in cut.values():
        assert set(own.loc[own["method"].isin(tuning.TWO), "steps"]) == {tuning.EQUAL}
        assert own.loc[own["method"].isin(tuning.BESIDE), "round"].max() == 1000
    last = {across: own.groupby("method")["round"].max() for across, own in cut.items()}
    assert [last["round"][method] for method in tuning.TWO] == [1000, 1000]
    assert [last["exchanges"][method] for method in tuning.TWO] == [600, 3000]
    assert set(tuning.searched(pd.DataFrame(rows))["steps"]) == {tuning.SEARCHED}


def test_one_seed_decides_nothing():
    one = frame({(method, split): lasting(end) for method, end in (("FedNest", 0.9), ("FedNestSGD", 0.8))
                 for split in SPLITS})  # fmt: skip
    for check in (figures.svrg_tunes_better, figures.svrg_matters_more, figures.svrg_tunes_steadier):
        assert check(one).holds is None
