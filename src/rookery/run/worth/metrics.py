"""The metrics, and their values on the test rows."""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import jax
import numpy as np
from jaxtyping import Bool, Float

from rookery.problems.survival import concordance
from rookery.run.worth.designs import Site
from rookery.run.worth.fits import probability
from rookery.run.worth.methods import CHANCE, FLOOR, METHODS, SURVIVAL_METHODS, Models

if TYPE_CHECKING:
    import pandas as pd

Chances = Float[np.ndarray, " n"]
Truth = Bool[np.ndarray, " n"]


def accuracy(chances: Chances, positive: Truth) -> float:
    """Return the share of rows whose more probable class is the true one."""
    return float(np.mean((chances > 0.5) == positive))


def balanced_accuracy(chances: Chances, positive: Truth) -> float:
    """Return the mean of both classes' accuracies; NaN if a class has no rows."""
    if positive.all() or not positive.any():
        return np.nan
    said = chances > 0.5
    return float((np.mean(said[positive]) + np.mean(~said[~positive])) / 2)


def auc(chances: Chances, positive: Truth) -> float:
    """Return the chance that a positive row ranks above a negative one, ties counting half; NaN if a class is missing.

    >>> auc(np.array([0.1, 0.4, 0.4, 0.9]), np.array([False, False, True, True]))
    0.875
    """
    count = int(positive.sum())
    others = len(positive) - count
    if not count or not others:
        return np.nan
    _, place, ties = np.unique(chances, return_inverse=True, return_counts=True)
    ranks = (np.cumsum(ties) - (ties - 1) / 2)[place]
    return float((ranks[positive].sum() - count * (count + 1) / 2) / (count * others))


def brier(chances: Chances, positive: Truth) -> float:
    """Return the mean squared error of the probabilities, which only the true probabilities minimise on average."""
    return float(np.mean((chances - positive) ** 2))


def calibration(chances: Chances, positive: Truth) -> float:
    """Return how far the mean probability is from the share of positive rows.

    >>> round(calibration(np.array([0.2, 0.4]), np.array([False, True])), 3)
    0.2
    """
    return float(abs(np.mean(chances) - np.mean(positive)))


METRICS: dict[str, Callable[[Chances, Truth], float]] = {
    "accuracy": accuracy,
    "balanced_accuracy": balanced_accuracy,
    "auc": auc,
    "brier": brier,
    "calibration": calibration,
}
SURVIVAL_METRICS = ("concordance",)
LOWER = ("brier", "calibration")  # metrics that are better when they are lower
_concordances = jax.jit(jax.vmap(concordance, (0, None, None)))


def scores(sites: Sequence[Site], fitted: dict[str, Models]) -> "pd.DataFrame":
    """Return a row for each split, hospital and method, with every metric on the split's test rows."""
    import pandas as pd

    rows = []
    measure = _of_times if sites[0].survival else _of_classes
    for k, site in enumerate(sites):
        for i in range(len(site.splits.train)):
            found = measure(site, i, {name: models[k, i] for name, models in fitted.items()})
            rows += [{"hospital": site.name, "method": name, "split": i, **own} for name, own in found.items()]
    return pd.DataFrame(rows)


def _of_classes(site: Site, split: int, models: dict[str, np.ndarray]) -> dict[str, dict[str, float]]:
    """Return every method's metrics on the split's test rows."""
    train = site.splits.train[split]
    features, truth = site.features(len(site.splits.train) + split, ~train), site.positive[~train]
    chances = {name: probability(features @ model) for name, model in models.items()}
    chances[FLOOR] = np.full(len(truth), site.positive[train].mean())
    return {name: {metric: of(chances[name], truth) for metric, of in METRICS.items()} for name in METHODS}


def _of_times(site: Site, split: int, models: dict[str, np.ndarray]) -> dict[str, dict[str, float]]:
    """Return every method's C-index on the split's test rows; NaN if no two of them can be compared."""
    tests = ~site.splits.train[split]
    features = site.features(len(site.splits.train) + split, tests)
    risks = {name: features @ model for name, model in models.items()} | {CHANCE: np.zeros(len(features))}
    assert site.time is not None
    found = _concordances(np.stack([risks[name] for name in SURVIVAL_METHODS]), site.positive[tests], site.time[tests])
    return {name: {"concordance": float(own)} for name, own in zip(SURVIVAL_METHODS, found, strict=True)}


def spoken(metric: str) -> str:
    """Return a metric's name for use in a sentence."""
    names = {
        "auc": "AUC",
        "brier": "Brier score",
        "calibration": "calibration error",
        "concordance": "C-index",
    }
    return names.get(metric, metric.replace("_", " "))


def number(value: float, sign: str = "") -> str:
    """Return a number without its leading zero, as tables of rates are printed.

    >>> number(0.656), number(-0.1216, "+"), number(1.0), number(float("nan"))
    ('.656', '-.122', '1.000', '–')
    >>> number(-0.0001, "+")
    '+.000'
    """
    if np.isnan(value):
        return "–"
    text = f"{round(value, 3) + 0.0:{sign}.3f}"  # no negative zero
    return text.replace("0.", ".", 1) if abs(value) < 0.9995 else text
