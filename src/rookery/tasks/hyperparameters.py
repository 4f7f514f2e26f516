"""Hyperparameter tuning: the upper level learns a penalty for each feature of a linear classifier."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from rookery.base.arguments import check_counts, check_seed
from rookery.data import PARTITIONS
from rookery.data.clients import Clients
from rookery.problems.problems import Bilevel
from rookery.tasks.linear import binary_scores, log_losses
from rookery.tasks.task import Task, choice, split, take

START, LEAST, MOST = 0.1, 0.01, 1.0  # penalties
DEFAULTS = {
    "upper_step": 30.0, "lower_step": 0.3, "lower_local_steps": 10, "neumann": "cg", "neumann_terms": 10,
    "hessian_step": 0.2,
}  # fmt: skip


def _cross_entropy(y: Any, batch: Any) -> Float[Array, ""]:
    return jnp.mean(log_losses(y, batch))


def tuning_problem() -> Bilevel:
    """Return logistic regression with the penalty ½ Σ_j exp(x_j)·w_j² (lower) and its validation loss (upper).

    The penalties stay between 0.01 and 1: without a lower bound, a penalty per feature would overfit the validation
    data.
    """

    def lower(x: Any, y: Any, batch: Any) -> Float[Array, ""]:
        return _cross_entropy(y, batch) + 0.5 * jnp.sum(jnp.exp(x) * y["w"] ** 2)

    return Bilevel(
        upper=lambda x, y, batch: _cross_entropy(y, batch),
        lower=lower,
        project_upper=lambda x: jnp.clip(x, np.log(LEAST), np.log(MOST)),
    )


def hyperparameters(clients: int = 10, partition: str = "iid", noise: int = 30, seed: int = 0) -> Task:
    """Learn which features to trust: breast tumours (scikit-learn's bundled data), with pure noise as extra features.

    Arguments:
        clients: the number of clients; each uses half of its samples for training (lower) and half for validation
            (upper).
        partition: "iid", "shards" or "dirichlet".
        noise: the number of features of standard normal noise after the 30 real ones.
        seed: seed of the noise and of the split.

    x holds the logarithms of the penalties, which start at 0.1; y = {"w", "b"}. `Task.evaluate` returns `loss` and
    `accuracy` on test samples that no client has, and `validation_loss`, the upper loss.
    """
    divide = choice("partition", partition, PARTITIONS)
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
    halves = split(rng, [train[part] for part in divide(labels[train], clients, seed)], 0.5, rounding=int)
    rows = {"features": features, "label": labels.astype(float)}
    lower, upper = ([take(rows, half[level]) for half in halves] for level in (0, 1))
    count = features.shape[1]
    data = Clients(lower, upper, weights="size")
    return Task(
        name="hyperparameters",
        problem=tuning_problem(),
        clients=data,
        init=(np.full(count, np.log(START)), {"w": np.zeros(count), "b": np.zeros(())}),
        evaluate=_metrics(take(rows, test), data),
        metric="loss",
        rounds=150,
        defaults=DEFAULTS,
    )


def _metrics(test: Any, clients: Clients) -> Any:
    @jax.jit
    def metrics(y: Any, test: Any, validation: Any) -> dict[str, Array]:
        right = (binary_scores(y, test) > 0) == (test["label"] > 0.5)
        return {
            "accuracy": jnp.mean(right),
            "loss": _cross_entropy(y, test),
            "validation_loss": _cross_entropy(y, validation),
        }

    return lambda x, y: metrics(y, test, clients.upper.rows)
