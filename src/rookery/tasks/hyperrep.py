"""Hyper-representation: the upper level learns a representation, the lower level a classifier on top of it."""

from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Float
from sklearn.datasets import load_digits

from rookery.clients import Clients
from rookery.data import PARTITIONS
from rookery.problems import Bilevel, SingleLevel
from rookery.tasks.task import Task


def hidden(x: Any, batch: Any) -> Any:
    """What the classifier sees of a batch: the hidden layer's output in the place of the image."""
    return {**batch, "image": jax.nn.relu(batch["image"] @ x["w"] + x["b"])}


def _cross_entropy(x: Any, y: Any, batch: Any) -> Float[Array, ""]:
    scores = batch["image"] @ y["w"] + y["b"]
    return jnp.mean(optax.softmax_cross_entropy_with_integer_labels(scores, batch["label"]))


def _joint(z: Any, batch: Any) -> Float[Array, ""]:
    return _cross_entropy(z[0], z[1], hidden(z[0], batch))


def layers(key: Array, inputs: int, width: int, outputs: int) -> tuple[Any, Any]:
    """A hidden layer and an output layer, initialised as PyTorch's linear layers are: U(−1/√fan-in, 1/√fan-in)."""
    keys = jax.random.split(key, 4)

    def layer(kw: Array, kb: Array, fan_in: int, out: int) -> Any:
        bound = fan_in**-0.5
        return {
            "w": jax.random.uniform(kw, (fan_in, out), minval=-bound, maxval=bound),
            "b": jax.random.uniform(kb, (out,), minval=-bound, maxval=bound),
        }

    return layer(keys[0], keys[1], inputs, width), layer(keys[2], keys[3], width, outputs)


@cache
def representation_problem(penalty: float = 0.0) -> Bilevel:
    """The problem alone: cross-entropy at both levels, penalty/2·‖y‖² beside it at the lower one."""

    def lower(x: Any, y: Any, batch: Any) -> Float[Array, ""]:
        return _cross_entropy(x, y, batch) + 0.5 * penalty * (jnp.sum(y["w"] ** 2) + jnp.sum(y["b"] ** 2))

    return Bilevel(upper=_cross_entropy, lower=lower, features=hidden)


def hyperrep(clients: int = 50, partition: str = "iid", width: int = 64, penalty: float = 1e-3, seed: int = 0) -> Task:
    """An MLP on scikit-learn's bundled handwritten digits: hidden layer upper, output layer lower.

    Arguments:
        clients: how many; each one's samples are split evenly into training (lower) and validation (upper) data.
        partition: "iid", "shards" (two label shards per client) or "dirichlet".
        width: of the hidden layer.
        penalty: of the lower level, penalty/2·‖y‖².
        seed: of the split and of the start.

    `Task.evaluate` gives the accuracy and the loss on test images that no client has.
    """
    images, labels = load_digits(return_X_y=True)
    images = (images / 16.0).astype(np.float32)
    order = np.random.default_rng(seed).permutation(len(labels))
    test, train = order[:360], order[360:]
    parts = [train[part] for part in PARTITIONS[partition](labels[train], clients, seed)]
    rng = np.random.default_rng([seed, 1])
    lower: list[Any] = []
    upper: list[Any] = []
    for part in parts:
        mixed = rng.permutation(part)
        for level, own in ((lower, mixed[: len(mixed) // 2]), (upper, mixed[len(mixed) // 2 :])):
            level.append({"image": images[own], "label": labels[own].astype(np.int32)})
    data = Clients(lower, upper)
    x, y = layers(jax.random.key(seed), images.shape[1], width, 10)
    evaluate = test_metrics(images[test], labels[test])
    pooled = [jax.tree.map(lambda a, b: np.concatenate([a, b]), a, b) for a, b in zip(lower, upper, strict=True)]
    common: dict[str, Any] = {"metric": "accuracy", "rounds": 200, "cohort": min(10, clients), "every": 10}
    single = Task(
        name="hyperrep",
        problem=SingleLevel(_joint),
        clients=Clients(upper=pooled),
        init=(x, y),
        evaluate=lambda z, _: evaluate(*z),
        defaults={"step": 0.1, "local_steps": 10, "batch_size": 8},
        **common,
    )
    return Task(
        name="hyperrep",
        problem=representation_problem(penalty),
        clients=data,
        init=(x, y),
        evaluate=evaluate,
        defaults={
            "upper_step": 0.03,
            "lower_step": 0.1,
            "lower_local_steps": 10,
            "neumann_terms": 5,
            "batch_size": 8,
        },
        single_level=single,
        **common,
    )


def test_metrics(images: np.ndarray, labels: np.ndarray) -> Any:
    """evaluate(x, y) on these images: accuracy and loss."""
    batch = {"image": jnp.asarray(images), "label": jnp.asarray(labels)}
    return lambda x, y: _metrics(x, y, batch)


@jax.jit
def _metrics(x: Any, y: Any, batch: Any) -> dict[str, Array]:
    seen = hidden(x, batch)
    scores = seen["image"] @ y["w"] + y["b"]
    return {
        "accuracy": jnp.mean(jnp.argmax(scores, axis=1) == batch["label"]),
        "loss": _cross_entropy(x, y, seen),
    }
