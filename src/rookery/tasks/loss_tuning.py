"""Loss tuning: the upper level learns the parameters of a training loss, so that rare classes are learnt, too."""

from collections.abc import Callable
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Float

from rookery.base.arguments import check_amounts, check_counts, check_seed
from rookery.base.draws import seed_key, symmetric
from rookery.data import PARTITIONS, long_tailed
from rookery.data.clients import Clients
from rookery.language.fed import Epochs
from rookery.problems.problems import Bilevel, SingleLevel
from rookery.tasks.images import Images, digit_images, mnist_images
from rookery.tasks.task import Task, choice, split, take

LARGEST_WEIGHT, LARGEST_SHIFT, SCALES = 3.0, 5.0, (0.2, 5.0)  # bounds of |log ω|, of |l|, and of Δ


def scores(y: Any, images: Float[Array, "n pixels"]) -> Float[Array, "n classes"]:
    """Return the network's output: linear layers with ReLU between them."""
    *hidden, last = y
    for layer in hidden:
        images = jax.nn.relu(images @ layer["w"] + layer["b"])
    return images @ last["w"] + last["b"]


def vs_loss(x: Any, y: Any, batch: Any) -> Float[Array, ""]:
    """Return the batch mean of the VS-loss (Kini et al. 2021), ω_y·log(1 + Σ_{k≠y} exp(l_k − l_y + Δ_k f_k − Δ_y f_y)).

    It is the cross-entropy of the scores Δ_k f_k + l_k, with a weight for each class. x = {"weight": log ω,
    "additive": l, "multiplicative": Δ}.
    """
    adjusted = x["multiplicative"] * scores(y, batch["image"]) + x["additive"]
    losses = optax.softmax_cross_entropy_with_integer_labels(adjusted, batch["label"])
    return jnp.mean(jnp.exp(x["weight"])[batch["label"]] * losses)


def balanced_loss(x: Any, y: Any, batch: Any) -> Float[Array, ""]:
    """Return the batch mean of the cross-entropy, weighted by the samples' balance; it does not depend on x."""
    return jnp.mean(batch["balance"] * _cross_entropies(y, batch))


def _cross_entropies(y: Any, batch: Any) -> Float[Array, " n"]:
    return optax.softmax_cross_entropy_with_integer_labels(scores(y, batch["image"]), batch["label"])


def _square(y: Any) -> Any:
    return sum(jnp.sum(leaf**2) for leaf in jax.tree.leaves(y))


def _bounded(x: Any) -> Any:
    return {
        "weight": jnp.clip(x["weight"], -LARGEST_WEIGHT, LARGEST_WEIGHT),
        "additive": jnp.clip(x["additive"], -LARGEST_SHIFT, LARGEST_SHIFT),
        "multiplicative": jnp.clip(x["multiplicative"], *SCALES),
    }


@cache
def tuning_problem(penalty: float = 0.0) -> Bilevel:
    """Return the problem: the VS-loss plus penalty/2·‖y‖² at the lower level, the balanced loss at the upper.

    log ω stays in [−3, 3], l in [−5, 5] and Δ in [0.2, 5].
    """
    of_size = lambda x, y: 0.5 * penalty * _square(y)
    return Bilevel(upper=balanced_loss, lower=vs_loss, project_upper=_bounded, penalty=of_size)


@cache
def _untuned_problem(penalty: float) -> SingleLevel:
    loss = lambda y, batch: jnp.mean(_cross_entropies(y, batch))
    return SingleLevel(loss, penalty=lambda y: 0.5 * penalty * _square(y))


class _Setting(NamedTuple):
    """Defaults for a data set; of class k it keeps largest·ratio^{k/9} samples."""

    images: Callable[..., Images]
    clients: int
    widths: tuple[int, ...]
    largest: int
    ratio: float
    rounds: int
    upper_step: float
    lower_step: float
    batch_size: int


SETTINGS = {
    "digits": _Setting(digit_images, 20, (32, 16), 120, 0.05, 200, upper_step=0.1, lower_step=0.1, batch_size=8),
    "mnist": _Setting(mnist_images, 100, (200, 100), 6000, 0.01, 1000, upper_step=2.0, lower_step=0.01, batch_size=64),
}


def loss_tuning(
    clients: int | None = None,
    partition: str = "iid",
    penalty: float = 0.0,
    seed: int = 0,
    data: str = "digits",
    equal: bool = False,
    data_dir: str | Path | None = None,
) -> Task:
    """Learn a loss function for long-tailed handwritten digits: VS-loss parameters (upper) and an MLP (lower).

    Arguments:
        clients: the number of clients (None: 20 for digits, 100 for MNIST); the samples of each are split 80/20 into
            training (lower) and validation (upper) data. A single client gives the centralised problem.
        partition: "iid", "shards" (two label shards per client) or "dirichlet".
        penalty: the lower level's penalty, penalty/2·‖y‖².
        seed: seed of the choice of samples, of the split and of the start.
        data: "digits", scikit-learn's bundled ones, with 120·0.05^{k/9} images of class k and an MLP 64-32-16-10; or
            "mnist" at the sizes of Section 4.2 of the FedNest paper, with min(its size, 6000·0.01^{k/9}) images of
            class k, 14,814 in all, and an MLP 784-200-100-10.
        equal: leave out a few samples so that all clients have as many as the smallest.
        data_dir: the folder of the MNIST files; see `rookery.data.load`.

    The upper loss is a mean over batches, with a weight n/(K·n_k) for a validation sample of class k, where n_k of the
    n samples of the whole long-tailed set (of all clients and both levels) are in class k. The mean over all validation
    samples is then the mean over the classes of their mean losses, up to the randomness of the 80/20 split. A client
    must know the n_k. There is no direct gradient: the upper loss does not depend on x.

    `Task.evaluate` returns, on test images that no client has, `accuracy`, the mean over the classes of their
    accuracies; `loss`, averaged in the same way; and `tail_accuracy`, for the three rarest classes. `validation_loss`
    is the upper loss on all validation samples. `Task.single_level` trains without tuning: plain cross-entropy on the
    training samples, which is the lower level with x at its start.
    """
    settings = choice("data", data, SETTINGS)
    divide = choice("partition", partition, PARTITIONS)
    clients = settings.clients if clients is None else clients
    check_seed(seed)
    check_counts(clients=clients)
    check_amounts(penalty=penalty)
    images, labels, test_images, test_labels = settings.images(seed, data_dir)
    kept = long_tailed(labels, settings.largest, settings.ratio, seed)
    images, labels = images[kept], labels[kept]
    counts = np.bincount(labels)
    balance = (len(labels) / (len(counts) * counts))[labels].astype(np.float32)
    halves = split(np.random.default_rng([seed, 1]), divide(labels, clients, seed), 0.8, equal)
    lower = [take({"image": images, "label": labels}, own) for own, _ in halves]
    upper = [take({"image": images, "label": labels, "balance": balance}, own) for _, own in halves]
    x = {"weight": np.zeros(10, np.float32), "additive": np.zeros(10, np.float32)}
    x["multiplicative"] = np.ones(10, np.float32)
    y = network(seed_key(seed), (images.shape[1], *settings.widths, 10))
    validation = jax.tree.map(lambda *parts: jnp.asarray(np.concatenate(parts)), *upper)
    evaluate = balanced_metrics(test_images, test_labels, validation)
    step, local_steps, batch_size = settings.lower_step, Epochs(5), settings.batch_size
    defaults = {
        "upper_step": settings.upper_step, "lower_step": step, "lower_local_steps": local_steps, "neumann_terms": 5,
        "hessian_step": step, "batch_size": batch_size,
    }  # fmt: skip
    return Task(
        name="loss-tuning",
        problem=tuning_problem(penalty),
        clients=Clients(lower, upper, weights="size"),
        init=(x, y),
        evaluate=evaluate,
        metric="accuracy",
        rounds=settings.rounds,
        cohort=min(10, clients),
        defaults=defaults,
    ).with_single_level(
        problem=_untuned_problem(penalty),
        clients=Clients(upper=lower, weights="size"),
        init=y,
        evaluate=lambda y, _: evaluate(None, y),
        defaults={"step": step, "local_steps": local_steps, "batch_size": batch_size},
    )


def network(key: Array, widths: tuple[int, ...]) -> tuple[Any, ...]:
    """Return linear layers of these widths, initialised like PyTorch's: U(−1/√fan-in, 1/√fan-in)."""
    layers = []
    for fan_in, out in pairwise(widths):
        key, kw, kb = jax.random.split(key, 3)
        draw = lambda k, shape, bound=fan_in**-0.5: symmetric(k, shape, bound)
        layers.append({"w": draw(kw, (fan_in, out)), "b": draw(kb, (out,))})
    return tuple(layers)


def balanced_metrics(images: np.ndarray, labels: np.ndarray, validation: Any) -> Any:
    """Return evaluate(x, y): metrics on these images in which all classes count the same."""
    counts = np.bincount(labels)
    balance = jnp.asarray((len(labels) / (len(counts) * counts))[labels], jnp.float32)
    test = {"image": jnp.asarray(images), "label": jnp.asarray(labels), "balance": balance}
    return lambda x, y: _metrics(y, test, validation)


@jax.jit
def _metrics(y: Any, test: Any, validation: Any) -> dict[str, Array]:
    right = jnp.argmax(scores(y, test["image"]), axis=1) == test["label"]
    tail = test["label"] >= 7
    return {
        "accuracy": jnp.mean(test["balance"] * right),
        "loss": balanced_loss(None, y, test),
        "tail_accuracy": jnp.sum(test["balance"] * right, where=tail) / jnp.sum(test["balance"], where=tail),
        "validation_loss": balanced_loss(None, y, validation),
    }
