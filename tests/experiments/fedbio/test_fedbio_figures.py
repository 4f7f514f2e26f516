"""The applications of the FedBiO paper: their quick versions."""

import pytest


@pytest.mark.slow
def test_cleaning_tells_wrong_labels_and_beats_plain_training(quick):
    results, _ = quick("fedbio-cleaning")
    end = results[(results["fraction"] == 0.8) & (results["round"] == 20)].set_index("method")
    assert end["accuracy"]["FedBiO"] > end["accuracy"]["FedAvg"] + 0.1
    assert end["auc"]["FedBiO"] > 0.9


@pytest.mark.slow
def test_local_heads_learn_a_representation(quick):
    results, _ = quick("fedbio-hyperrep")
    own = results[results["method"] == "FedBiOLocal"]["accuracy"]
    assert own.iloc[-1] > own.iloc[0] + 0.05


@pytest.mark.slow
def test_group_weights_help_the_worst_group(quick):
    results, claims = quick("fedbio-fair")
    assert set(results[results["split"] == "mixed"]["method"]) == {"FedBiO", "FedBiOAcc", "FedAvg"}
    assert {"AFL", "DRFA", "q-FedAvg"} < set(results[results["split"] == "by group"]["method"])
    gain, margin = claims["The worst group gains over FedAvg on both splits."]["figures"]["least gain, and the margin"]
    assert gain > 0
    assert margin == "inf"  # one seed has no spread, so that nothing is decided
