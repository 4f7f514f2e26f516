"""The FedNest paper's experiments, scaled down, end to end."""

import json

import pandas as pd
import pytest

from rookery.experiments import EXPERIMENTS, reproduce
from rookery.experiments.fednest import fig4 as fig4_module
from rookery.experiments.machinery import one_run

ROUNDS = "with fresh cohorts, and with one a round, then where FedAvg-S does."
pytestmark = pytest.mark.xdist_group("fig4")  # one worker, one run


@pytest.fixture(scope="module")
def fig4(tmp_path_factory):
    return reproduce("fednest-fig4", tmp_path_factory.mktemp("fig4"), quick=True, progress=False)


@pytest.mark.slow
def test_fig4_writes_everything(fig4):
    assert {path.name for path in fig4.iterdir()} == {
        "results.csv", "fednest-fig4.png", "claims.json", "made.json", "summary.md", "runs",
    }  # fmt: skip
    results = pd.read_csv(fig4 / "results.csv")
    assert results["run"].nunique() == 24
    assert results["distance"].notna().all()
    assert "Scaled down" in (fig4 / "summary.md").read_text()


@pytest.mark.slow
def test_fig4_claims(fig4):
    claims = json.loads((fig4 / "claims.json").read_text())
    assert {claim["claim"]: claim["verdict"] == "reproduced" for claim in claims} == {
        "With all clients: FedNest converges linearly despite heterogeneity.": True,
        # One seed, and so no margin: the leads are undecided.
        "With all clients, or fresh cohorts: LFedNest and FedNest outperform FedAvg-S.": False,
        "With all clients, or sampled ones: FedAvg-S stalls, at a floor that grows with s.": True,
        "With fresh cohorts: LFedNest slightly outperforms FedAvg-S (a floor lower by a factor of 3 to 30).": False,
        "With fresh cohorts: LFedNest stalls, at a floor that grows with s.": True,
        # All clients share their Hessians in x and in y, so that alternating local SGD does not drift.
        "FedNest significantly improves the convergence of LFedNest.": False,
        f"With sampled clients FedNest stalls, too: {ROUNDS}": True,
    }
    for claim in claims:
        assert claim["figures"]
        assert claim["where"]
        assert claim["verdict"] == "reproduced" or claim["note"], "a claim that does not hold says why"


@pytest.mark.slow
def test_fig4_second_call_computes_nothing(fig4, monkeypatch):
    def refuse(*args, **kwargs):
        raise AssertionError("computed again")

    monkeypatch.setattr(one_run, "solve", refuse)
    before = (fig4 / "results.csv").read_bytes()
    reproduce("fednest-fig4", fig4, quick=True, progress=False)
    assert (fig4 / "results.csv").read_bytes() == before
    with pytest.raises(AssertionError, match="computed again"):  # a configuration that is not there
        reproduce("fednest-fig4", fig4, quick=True, seeds=[7], progress=False)


def test_fig4_full_size_is_the_paper_s():
    configs = EXPERIMENTS["fednest-fig4"].runs(False)
    assert {config.labels["method"] for config in configs} == {"FedNest", "LFedNest", "FedAvg-S"}
    assert {config.cohort for config in configs} == {None, 50}
    assert all(config.settings["clients"] == 1000 and config.rounds == 200 and config.float64 for config in configs)
    assert {config.labels["sampling"]: len(config.seeds) for config in configs} == {
        "all clients": 3, "one cohort a round": 10, "fresh cohorts": 10,
    }  # fmt: skip


def made_up(levels, seeds=3):
    """Runs that stay at a level·s² from the start, by method and sampling; each seed a little higher."""
    rows = [
        {"run": f"{method}, {s}, {sampling}", "method": method, "sampling": sampling, "s": s, "seed": seed,
         "round": at, "distance": level * s**2 * (1 + seed / 100)}
        for (method, sampling), level in levels.items()
        for s in fig4_module.SPREADS
        for seed in range(seeds)
        for at in range(0, 201, 4)
    ]  # fmt: skip
    return pd.DataFrame(rows)


@pytest.mark.parametrize(("light", "holds"), [(0.1, True), (0.5, False), (0.01, False), (2.0, False)])
def test_slightly_better_is_a_factor_of_3_to_30(light, holds):
    levels = {("FedAvg-S", fig4_module.KEPT): 1.0, ("LFedNest", fig4_module.FRESH): light}
    assert fig4_module.lfednest_is_slightly_better(made_up(levels)).holds is holds


def test_fednest_is_better_than_lfednest_only_if_their_curves_differ():
    samplings = (fig4_module.ALL, fig4_module.FRESH)
    same = {(method, sampling): 1.0 for method in ("FedNest", "LFedNest") for sampling in samplings}
    assert not fig4_module.fednest_beats_lfednest(made_up(same)).holds
    assert fig4_module.fednest_beats_lfednest(made_up(same | {("LFedNest", fig4_module.ALL): 1.1})).holds
    assert fig4_module.lfednest_stalls(made_up(same)).holds
