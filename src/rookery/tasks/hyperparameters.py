"""Tuning hyperparameters: the upper level learns one regularisation weight for each feature of a linear classifier."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Float

from rookery.base.arguments import check_counts, check_seed
from rookery.data import PARTITIONS
from rookery.data.clients import Clients
from rookery.problems.problems import Bilevel
from rookery.tasks.task import Task

START, LEAST, MOST = 0.1, 0.01, 1.0  # of a penalty


def _cross_entropy(y: Any, batch: Any) -> Float[Array, ""]:
    scores = batch["features"] @ y["w"] + y["b"]
    return jnp.mean(optax.sigmoid_binary_cross_entropy(scores, batch["label"]))


def tuning_problem(least: float = LEAST, most: float = MOST) -> Bilevel:
    """Logistic regression with the penalty ½ Σ_j exp(x_j)·w_j² at the lower level, its validation loss at the upper.

    The penalties stay between `least` and `most`: without a bound below, one weight per feature is enough freedom to
    fit the validation data by heart.
    """

    def lower(x: Any, y: Any, batch: Any) -> Float[Array, ""]:
        return _cross_entropy(y, batch) + 0.5 * jnp.sum(jnp.exp(x) * y["w"] ** 2)

    return Bilevel(
        upper=lambda x, y, batch: _cross_entropy(y, batch),
        lower=lower,
        project_upper=lambda x: jnp.clip(x, np.log(least), np.log(most)),
    )


def hyperparameters(clients: int = 10, partition: str = "iid", noise: int = 30, seed: int = 0) -> Task:
    """Which features deserve trust? Breast tumours (scikit-learn's bundled data) beside features that are pure noise.

    Arguments:
        clients: how many; each keeps half of its samples for training (lower) and half for validation (upper).
        partition: "iid", "shards" or "dirichlet".
        noise: how many features of standard normal noise to put after the 30 real ones.
        seed: of the noise and of the split.

    x holds the logarithms of the penalties, all 0.1 at first; y = {"w", "b"}. `Task.evaluate` gives `loss` and
    `accuracy` on test samples that no client has, and `validation_loss`, the upper level's own.
    """
    check_seed(seed)
    check_counts(clients=clients)
    check_counts(0, noise=noise)
    from sklearn.datasets import load_breast_cancer  # slow to import, and only this task needs it

    features, labels = load_breast_cancer(return_X_y=True)
    features = (features - features.mean(axis=0)) / features.std(axis=0)
    rng = np.random.default_rng(seed)
    features = np.concatenate([features, rng.normal(size=(len(labels), noise))], axis=1)
    order = rng.permutation(len(labels))
    test, train = order[:129], order[129:]
    lower: list[Any] = []
    upper: list[Any] = []
    for part in PARTITIONS[partition](labels[train], clients, seed):
        mixed = rng.permutation(train[part])
        for level, own in ((lower, mixed[: len(mixed) // 2]), (upper, mixed[len(mixed) // 2 :])):
            level.append(_rows(features, labels, own))
    count = features.shape[1]
    data = Clients(lower, upper, weights="size")
    return Task(
        name="hyperparameters",
        problem=tuning_problem(),
        clients=data,
        init=(np.full(count, np.log(START)), {"w": np.zeros(count), "b": np.zeros(())}),
        evaluate=_metrics(_rows(features, labels, test), data),
        metric="loss",
        rounds=150,
        every=10,
        defaults={
            "upper_step": 30.0,
            "lower_step": 0.3,
            "lower_local_steps": 10,
            "neumann": "cg",
            "neumann_terms": 10,
            "hessian_step": 0.2,
        },
    )


def _rows(features: np.ndarray, labels: np.ndarray, own: np.ndarray) -> dict[str, np.ndarray]:
    return {"features": features[own], "label": labels[own].astype(float)}


def _metrics(test: Any, clients: Clients) -> Any:
    @jax.jit
    def metrics(y: Any, test: Any, validation: Any) -> dict[str, Array]:
        right = (test["features"] @ y["w"] + y["b"] > 0) == (test["label"] > 0.5)
        return {
            "accuracy": jnp.mean(right),
            "loss": _cross_entropy(y, test),
            "validation_loss": _cross_entropy(y, validation),
        }

    return lambda x, y: metrics(y, test, clients.upper.rows)
