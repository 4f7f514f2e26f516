"""Metrics: validation of their values, and whether higher is better, by name or by a sign."""

import difflib
import re
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import numpy as np

from rookery.base.arguments import kind_of

HIGHER = {
    "acc", "accuracy", "auc", "auroc", "bleu", "concordance", "coverage", "dice", "f1", "gain", "iou", "likelihood",
    "precision", "profit", "r2", "recall", "return", "returns", "reward", "rewards", "score", "scores", "sensitivity",
    "similarity", "specificity", "tpr", "utility", "welfare",
}  # fmt: skip
LOWER = {
    "bias", "cost", "deviation", "disparity", "dist", "distance", "divergence", "entropy", "error", "errors",
    "excess", "fnr", "fpr", "gap", "gradient", "loss", "losses", "mae", "mse", "nll", "norm", "penalty",
    "perplexity", "regret", "residual", "risk", "rmse", "suboptimality", "variance", "violation",
}  # fmt: skip

NEUTRAL = {
    "average", "avg", "final", "lower", "max", "mean", "median", "min", "percent", "rate", "sum", "test", "total",
    "train", "training", "upper", "val", "valid", "validation",
}  # fmt: skip


@dataclass(frozen=True)
class Direction:
    """A metric's name, and whether a higher value of it is better."""

    name: str
    higher_is_better: bool

    @property
    def signed(self) -> str:
        """The name with a sign, which `direction` maps back to this."""
        return f"{'+' if self.higher_is_better else '-'}{self.name}"

    def better(self, value: float, than: float) -> bool:
        """Return whether `value` is better than `than`; False if one of them is NaN."""
        return value > than if self.higher_is_better else value < than


def check_numbers(source: str, metrics: Any) -> None:
    """Raise TypeError if the metrics that `source` returns are not {name: real number}; numbers may be traced."""
    rule = f"{source} must return a dict of numbers, {{name: number}}"
    if not isinstance(metrics, dict):
        raise TypeError(f"{rule}; it returns {kind_of(metrics)}.")
    for name, value in metrics.items():
        if not isinstance(name, str):
            raise TypeError(f"{rule}; the name {name!r} is {kind_of(name)}.")
        dtype = getattr(value, "dtype", None) or np.asarray(value).dtype
        real = any(jnp.issubdtype(dtype, kind) for kind in (jnp.bool_, jnp.integer, jnp.floating))
        if np.shape(value) or not real:
            array = f"an array of shape {np.shape(value)}"
            shown = array if np.shape(value) else f"{kind_of(value)} ({value!s:.40})"
            raise TypeError(f"{rule}; {name!r} is {shown}.")


def direction(metric: str, otherwise: bool | None = None) -> Direction:
    """Return the direction of "+name" (higher is better), "-name" (lower is better), or of a name that implies it.

    The last word of a name decides; words such as rate, mean and test are skipped, and so is a quantile's suffix. If
    the word is unknown, `otherwise` says whether higher is better; None raises a ValueError.

    >>> direction("accuracy"), direction("error_rate").higher_is_better, direction("+clients_served").name
    (Direction(name='accuracy', higher_is_better=True), False, 'clients_served')
    """
    if not isinstance(metric, str) or not metric.lstrip("+-"):
        raise ValueError(f"A metric must be a name that evaluate returns, such as 'loss'; got {metric!r}.")
    if metric[0] in "+-":
        return Direction(metric[1:], metric[0] == "+")
    words = [word for word in re.split(r"[^a-z0-9]+", re.sub(r"_q\d+$", "", metric.lower())) if word]
    word = next((word for word in reversed(words) if word not in NEUTRAL), "")
    if word in HIGHER or word in LOWER:
        return Direction(metric, word in HIGHER)
    if otherwise is not None:
        return Direction(metric, otherwise)
    near = difflib.get_close_matches(word, sorted(HIGHER | LOWER), 1)
    meant = f" Or did you mean {metric.lower().replace(word, near[0])!r}?" if near else ""
    raise ValueError(
        f"The metric {metric!r} does not say which way is better. Write '+{metric}' if higher is better, '-{metric}' "
        f"if lower is better.{meant}"
    )
