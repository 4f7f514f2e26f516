"""What the tests of the experiments share: a scaled-down run of one of them."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from rookery.experiments import EXPERIMENTS, reproduce


@pytest.fixture
def quick(tmp_path: Path) -> Callable[[str], tuple[pd.DataFrame, dict[str, dict[str, Any]]]]:
    """Run an experiment scaled down into tmp_path/NAME; return its results, and its claims by text."""

    def run(name: str) -> tuple[pd.DataFrame, dict[str, dict[str, Any]]]:
        folder = reproduce(name, tmp_path / name, quick=True, progress=False)
        assert {path.name for path in folder.iterdir()} >= {"results.csv", "claims.json", "summary.md", f"{name}.png"}
        claims = json.loads((folder / "claims.json").read_text())
        assert [claim["claim"] for claim in claims] == [claim.text for claim in EXPERIMENTS[name].claims]
        results = pd.read_csv(folder / "results.csv")
        assert np.isfinite(results.filter(["accuracy", "distance", "risk", "relative", "error"])).all(axis=None)
        return results, {claim["claim"]: claim for claim in claims}

    return run
