"""The quick versions of the FedBiO and ASFBO papers' experiments: they run, and say what they should."""

import json
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from rookery.experiments import EXPERIMENTS, reproduce

FILES = {"results.csv", "claims.json", "summary.md"}


def quick(name: str, out: Path) -> tuple[pd.DataFrame, dict[str, dict[str, object]]]:
    """Run it; its results, and its claims by text."""
    folder = reproduce(name, out / name, quick=True, progress=False)
    assert {path.name for path in folder.iterdir()} >= FILES | {f"{name}.png"}
    claims = json.loads((folder / "claims.json").read_text())
    assert [claim["claim"] for claim in claims] == [claim.text for claim in EXPERIMENTS[name].claims]
    results = pd.read_csv(folder / "results.csv")
    assert np.isfinite(results.filter(["accuracy", "distance", "relative"])).all(axis=None)
    return results, {claim["claim"]: claim for claim in claims}


@pytest.mark.slow
def test_cleaning_tells_wrong_labels_and_beats_plain_training(tmp_path: Path) -> None:
    results, claims = quick("fedbio-cleaning", tmp_path)
    assert (
        claims["Weights of corrupted samples fall below those of clean ones (AUC above .8 at every ρ)."]["verdict"]
        == "reproduced"
    )
    end = results[(results["fraction"] == 0.8) & (results["round"] == 20)].set_index("method")
    assert end["accuracy"]["FedBiO"] > end["accuracy"]["FedAvg"] + 0.1
    assert end["auc"]["FedBiO"] > 0.9


@pytest.mark.slow
def test_local_heads_learn_a_representation(tmp_path: Path) -> None:
    results, _ = quick("fedbio-hyperrep", tmp_path)
    own = results[results["method"] == "FedBiOLocal"]["accuracy"]
    assert own.iloc[-1] > own.iloc[0] + 0.05


@pytest.mark.slow
def test_group_weights_help_the_worst_group(tmp_path: Path) -> None:
    results, claims = quick("fedbio-fair", tmp_path)
    assert set(results[results["split"] == "mixed"]["method"]) == {"FedBiO", "FedBiOAcc", "FedAvg"}
    assert {"AFL", "DRFA", "q-FedAvg"} < set(results[results["split"] == "by group"]["method"])
    assert claims["The worst group gains."]["verdict"] == "reproduced"


@pytest.mark.slow
def test_which_optimum_with_unequal_local_work(tmp_path: Path) -> None:
    """Even the quick runs tell the optimum of the weights p_i from that of the weights p_i τ_i."""
    results, _ = quick("asfbo-rates", tmp_path)
    end = results[(results["study"] == "limit") & (results["step"] == 1.0) & (results["round"] == 200)]
    near = end.set_index("method")["distance"] < end.set_index("method")["distance_weighted"]
    assert near.to_dict() == {"ASFBO": True, "LA-ASFBO": True, "ShroFBO": True, "SimFBO": False}


@pytest.mark.slow
@pytest.mark.parametrize("name", ["asfbo-fig1", "asfbo-hetero", "asfbo-ablation", "fedbio-rates"])
def test_the_others_run(name: str, tmp_path: Path) -> None:
    quick(name, tmp_path)
