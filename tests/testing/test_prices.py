"""The page on what privacy costs with each method is what the plans say."""

import re
from pathlib import Path

import pytest

from rookery import algorithms
from rookery.testing import prices

PAGE = (Path(__file__).parents[2] / "docs" / "privacy-methods.md").read_text(encoding="utf-8")


def rows(text):
    return set(re.findall(r"^\| `\w+`.*$", text, re.MULTILINE))


def test_it_has_every_method_once():
    assert sorted(re.findall(r"^\| `(\w+)`", PAGE, re.MULTILINE)) == sorted(algorithms.__all__)


def test_it_is_current_for_some():
    made = prices.page(("FedAvg", "QFedAvg"))
    assert rows(made) <= rows(PAGE)
    assert made.partition("| method")[0] == PAGE.partition("| method")[0]


@pytest.mark.slow
def test_it_is_current():
    assert prices.page() == PAGE, "make docs writes it anew"
