"""The FedNest paper's experiments, scaled down, end to end."""

import json

import pandas as pd
import pytest

from rookery.experiments import EXPERIMENTS, reproduce
from rookery.experiments.machinery import one_run

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
        "FedNest converges linearly despite heterogeneity.": True,
        "LFedNest and FedNest outperform FedAvg-S.": True,
        "FedAvg-S stalls, at a floor that grows with s.": True,
        # All clients share their Hessians in x and in y, so that alternating local SGD does not drift.
        "LFedNest slightly outperforms FedAvg-S.": False,
        "LFedNest stalls, at a floor that grows with s.": False,
        "FedNest significantly improves the convergence of LFedNest.": False,
        "With sampled clients FedNest stalls, too.": True,
        "With sampled clients FedNest, LFedNest and FedAvg-S stall at the same level (within 10 %).": True,
        "SCAFFOLD-S, simultaneous too, does not stall when all clients take part.": True,
        "With sampled clients SCAFFOLD-S alone goes on converging.": True,
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
    assert {config.labels["method"] for config in configs} == {"FedNest", "LFedNest", "FedAvg-S", "SCAFFOLD-S"}
    assert {config.cohort for config in configs} == {None, 50}
    assert all(config.settings["clients"] == 1000 and config.rounds == 200 and config.float64 for config in configs)
    assert all(config.seeds == (0, 1, 2) for config in configs)
