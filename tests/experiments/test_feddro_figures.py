"""The experiments of the FedDRO paper: what they consist of, and their quick versions."""

from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from rookery.experiments import EXPERIMENTS, reproduce
from rookery.experiments import feddro_theory as theory
from rookery.experiments.experiment import fingerprint

NAMES = [name for name in EXPERIMENTS if name.startswith("feddro-")]


@pytest.mark.parametrize("name", NAMES)
def test_runs_have_names_of_their_own_and_one_fingerprint_means_one_computation(name: str) -> None:
    experiment = EXPERIMENTS[name]
    configs = [*(experiment.search(False) if experiment.search else []), *experiment.runs(False)]
    assert len({config.name for config in configs}) == len(configs)
    what = [(config.task, repr(config.settings), config.algorithm, config.rounds) for config in configs]
    marks = [fingerprint(config, 0) for config in configs]
    for mark, own in zip(marks, what, strict=True):
        assert own == what[marks.index(mark)]


def test_the_claim_on_fedavg_can_fail() -> None:
    """One method that stalls and one that does not, each alone, as rows of results."""
    rows = [
        {
            "run": f"{method} {step}",
            "study": "step",
            "method": method,
            "step": step,
            "seed": 0,
            "round": 9,
            "error": 0.7,
        }
        for method in theory.FAILS
        for step in (0.1, 0.01)
    ]
    assert theory.fedavg_stalls(pd.DataFrame(rows)).holds
    rows[-1]["error"] = 1e-3  # at the smaller step it comes close
    assert not theory.fedavg_stalls(pd.DataFrame(rows)).holds


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_quick_versions_run(name: str, tmp_path: Path) -> None:
    folder = reproduce(name, tmp_path / name, quick=True, progress=False)
    results = pd.read_csv(folder / "results.csv")
    assert np.isfinite(results.filter(["accuracy", "risk", "relative", "error"])).all(axis=None)
    assert (folder / f"{name}.png").exists()
