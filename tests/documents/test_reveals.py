"""The attacks on the page "What a site reveals": they work without protection, and fail under the record unit."""

import logging
import re
from pathlib import Path
from typing import Any

import jax
import matplotlib.pyplot as plt
import numpy as np
import pytest

import rookery as rk

PAGE = Path(__file__).parents[2] / "docs" / "tutorials" / "what-a-site-reveals.md"
CELLS = re.findall(r"```\{code-cell\}\n(.*?)```", PAGE.read_text(encoding="utf-8"), flags=re.DOTALL)
RECORD = rk.private(noise=1.0, delta=1e-3, clip=2.0, unit="record")


def run(*cells: str) -> dict[str, Any]:
    names: dict[str, Any] = {}
    for cell in cells:
        exec(compile(cell, PAGE.name, "exec"), names)
    return names


def test_a_gradient_gives_the_rows_back_unless_records_are_hidden() -> None:
    with jax.enable_x64(False):
        read_rows = run(CELLS[0], CELLS[2].replace("NEURONS = 2000", "NEURONS = 500"))["read_rows"]
        (bare, _), (hidden, _) = read_rows(None), read_rows(RECORD)
    assert np.mean(bare < 0.01) > 0.4
    assert np.min(hidden) > 0.1
    assert np.median(hidden) > 1


@pytest.mark.slow
def test_the_page(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Every reader's errors are as the page says; its last cell prints three refusals."""
    monkeypatch.setattr(plt, "show", plt.close)
    log = logging.getLogger("rookery")
    level = log.level
    try:
        with jax.enable_x64(False):
            names = run(*CELLS)
    finally:
        log.setLevel(level)
    found = {key: [float(v.rstrip("%")) for v in row] for key, row in names["table"].items()}
    client = "client unit, ε = 8"
    for key in (("no protection", "the server"), ("clipping", "the server"), (client, "the server")):
        matrix, record, row, near = found.pop(key)
        assert matrix < 1e-5
        assert record < 1e-2  # one record's part of the matrix is small, so that rounding weighs more in it
        assert row < 1e-4
        assert near > 80
    assert found[client, "everyone else"][0] > 10
    eight, two = (found[f"record unit, ε = {epsilon}", "the server"] for epsilon in (8, 2))
    assert 0.2 < eight[0] < 0.7 < two[0]
    assert all(min(record, row) > 0.8 and near < 3 for _, record, row, near in found.values())
    plan, bare, spent = capsys.readouterr().out.splitlines()
    assert "does not approve this plan, whose fingerprint is …." in plan  # a page shows no fingerprints
    assert "must hide single records" in bare
    assert "budget is spent: ε = 2.89 of 3" in spent
