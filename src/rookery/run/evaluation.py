"""Evaluations on the clients: `evaluate_client` as engines call it, and its means and quantiles over clients."""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from rookery.engines.checks import check_function
from rookery.problems.functions import required_arguments
from rookery.problems.variables import Adapted

Evaluate = Callable[..., dict[str, Any]]
QUANTILES = (0, 10, 50, 90, 100)  # over clients, in percent
_MIN_CLIENTS = 5  # quantiles of fewer clients would show single clients' values


def measuring(models: Adapted, evaluate_client: Evaluate | None) -> Evaluate | None:
    """Return `evaluate_client` as engines call it: measure(client, x, y, memory), with x and y as variables."""
    if evaluate_client is None:
        return None
    check_function("evaluate_client", evaluate_client, "client, x, y", "client, x, y, memory")
    function, count = evaluate_client, 3 if required_arguments(evaluate_client) >= 4 else 2
    return lambda client, x, y, memory: function(client, *models.whole((x, y, memory)[:count]))


def over_clients(
    rows: Mapping[str, np.ndarray], replied: np.ndarray, weights: np.ndarray, shows_each: bool = True
) -> dict[str, float]:
    """Return the weighted mean and the quantiles of each metric over the clients that replied.

    A mean without any weight is NaN. Without `shows_each`, there are no quantiles over fewer than five clients, and the
    mean over one client is NaN.
    """
    metrics, p = {}, weights[replied]
    least = 1 if shows_each else 2
    for name, values in rows.items():
        values = np.asarray(values, float)[replied]
        weighted = np.sum(p > 0) >= least
        metrics[name] = float(np.sum(np.where(p > 0, p * values, 0)) / np.sum(p)) if weighted else np.nan
        if shows_each or values.size >= _MIN_CLIENTS:
            metrics |= {f"{name}_q{q}": float(np.percentile(values, q)) if values.size else np.nan for q in QUANTILES}
    return metrics
