"""The page of reproductions says what the files beside it say."""

import json
from pathlib import Path

import pandas as pd
import pytest

from rookery.experiments import EXPERIMENTS, experiment, page

DOCS = Path(__file__).parents[2] / "docs"


def test_the_page_is_the_one_its_files_give(tmp_path: Path) -> None:
    """`make docs` was run after the last reproduction."""
    (tmp_path / "reproduction").symlink_to(DOCS / "reproduction")
    page.write(tmp_path / "reproduction", tmp_path / "reproduction.md")
    assert (tmp_path / "reproduction.md").read_text() == (DOCS / "reproduction.md").read_text()


def test_every_experiment_is_on_it() -> None:
    text = (DOCS / "reproduction.md").read_text()
    for folder in filter(Path.is_dir, (DOCS / "reproduction").iterdir()):
        assert f"## {folder.name}\n" in text
        assert (folder / f"{folder.name}.png").exists()


@pytest.mark.parametrize("name", ["asfbo-fig1", "feddro-fig2", "fednest-fig3a", "fednest-fig3b", "weighted-covtype"])
def test_the_claims_can_be_recomputed_from_the_files(name: str) -> None:
    results = pd.read_csv(DOCS / "reproduction" / name / "results.csv")
    found = [experiment._as_json(claim, claim.check(results)) for claim in EXPERIMENTS[name].claims]
    assert found == json.loads((DOCS / "reproduction" / name / "claims.json").read_text())
