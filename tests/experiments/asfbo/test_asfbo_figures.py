"""The experiments of the ASFBO paper: their quick versions, and how they measure."""

import numpy as np
import pandas as pd
import pytest

from rookery.experiments import EXPERIMENTS
from rookery.experiments.asfbo import fig1


@pytest.mark.slow
def test_which_optimum_with_unequal_local_work(quick):
    """Even the quick runs tell the optimum of the weights p_i from that of the weights p_i τ_i."""
    results, _ = quick("asfbo-rates")
    end = results[(results["study"] == "limit") & (results["step"] == 1.0) & (results["round"] == 200)]
    near = end.set_index("method")["distance"] < end.set_index("method")["distance_weighted"]
    assert near.to_dict() == {"ASFBO": True, "LA-ASFBO": True, "ShroFBO": True, "SimFBO": False}


@pytest.mark.slow
@pytest.mark.parametrize("name", ["asfbo-fig1", "asfbo-hetero", "asfbo-ablation"])
def test_the_others_run(name, quick):
    quick(name)


def test_what_is_thinned_of_fig1_gives_the_claims_of_the_whole() -> None:
    """Of the baselines a few evaluations are kept, by which nothing that is read off them changes."""
    rng = np.random.default_rng(0)
    rounds = np.arange(0, 501, 2)
    frames = []
    losses = {"loss": 1.0, "train_loss": 1.0}
    for config in fig1.fig1_runs(False):
        for seed in config.seeds:
            level = 0.98 - 0.9 * np.exp(-rounds / rng.uniform(20, 60))
            noise = rng.uniform(-0.01, 0.01, (2, len(rounds)))
            labels = {"run": config.name, **config.labels, "seed": seed}
            measured = dict(zip(("accuracy", "train_accuracy"), np.round(level + noise, 4), strict=True))
            frames.append(pd.DataFrame({**labels, "round": rounds, "exchanges": rounds, **measured, **losses}))
    whole = pd.concat(frames, ignore_index=True)
    thin = EXPERIMENTS["asfbo-fig1"].thinned(whole)  # type: ignore[misc]
    assert len(thin) < 0.6 * len(whole)
    for claim in EXPERIMENTS["asfbo-fig1"].claims:
        assert claim.check is not None
        found, expected = claim.check(thin), claim.check(whole)
        assert (found.holds, found.note) == (expected.holds, expected.note)
        for name, values in expected.figures.items():
            np.testing.assert_allclose(found.figures[name], values, rtol=1e-9)
