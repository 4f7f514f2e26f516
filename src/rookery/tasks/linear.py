"""Linear classifiers {"w", "b"} for several tasks: their scores, losses, penalty and start."""

from typing import Any

import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Float


def scores(y: Any, rows: Any) -> Float[Array, "n classes"]:
    """Return the score of every class for each image."""
    return rows["image"] @ y["w"] + y["b"]


def cross_entropies(y: Any, rows: Any) -> Float[Array, " n"]:
    """Return the cross-entropy of each image."""
    return optax.softmax_cross_entropy_with_integer_labels(scores(y, rows), rows["label"])


def half_square(y: Any) -> Float[Array, ""]:
    """Return ½‖y‖²."""
    return 0.5 * (jnp.sum(y["w"] ** 2) + jnp.sum(y["b"] ** 2))


def zeros(inputs: int, classes: int) -> dict[str, np.ndarray]:
    """Return a classifier of zeros."""
    return {"w": np.zeros((inputs, classes), np.float32), "b": np.zeros(classes, np.float32)}


def binary_scores(y: Any, rows: Any) -> Float[Array, " n"]:
    """Return the score of each row; positive for label 1."""
    return rows["features"] @ y["w"] + y["b"]


def log_losses(y: Any, rows: Any) -> Float[Array, " n"]:
    """Return the logistic loss of each row."""
    return optax.sigmoid_binary_cross_entropy(binary_scores(y, rows), rows["label"])


def binary_zeros(inputs: int) -> dict[str, np.ndarray]:
    """Return a binary classifier of zeros."""
    return {"w": np.zeros(inputs, np.float32), "b": np.zeros((), np.float32)}
