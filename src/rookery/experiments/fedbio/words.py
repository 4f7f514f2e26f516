"""Sentences that the applications of FedBiO share."""

from collections.abc import Mapping
from typing import Any

from rookery.experiments.machinery.numbers import listed

OURS_TO_SET = "The paper names this application; its text at hand has no numbers for it. The whole set-up is ours."
ENDS = (
    "*End* is the mean over the last tenth of the rounds, then over the seeds. Bands: lowest to highest of the seeds."
)


def chosen_words(chosen: Mapping[Any, Any]) -> str:
    """The values that a search chose."""
    several = lambda value: listed(value if isinstance(value, tuple) else (value,))
    return "; ".join(f"{several(key)}: {several(value)}" for key, value in chosen.items())
