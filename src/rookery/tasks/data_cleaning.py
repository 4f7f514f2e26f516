"""Data cleaning: the upper level learns a weight for every training sample, so that wrong labels count for little."""

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float

from rookery.base.arguments import check_amounts, check_counts, check_seed
from rookery.data import PARTITIONS, noisy_labels
from rookery.data.clients import Clients
from rookery.problems.problems import Bilevel, SingleLevel
from rookery.tasks.images import Images, digit_images, mnist_images
from rookery.tasks.linear import cross_entropies, half_square, scores, zeros
from rookery.tasks.task import Task, bilevel_defaults, check_share, check_word, choice, split, take

LARGEST = 5.0  # bound of |x_j|: a weight stays between σ(−5) = .007 and σ(5) = .993


def weighted_loss(x: Any, y: Any, batch: Any) -> Float[Array, ""]:
    """Return the batch mean of σ(x_j)·ℓ_j(y), where j = batch["index"] is a sample's place in x."""
    return jnp.mean(jax.nn.sigmoid(x[batch["index"]]) * cross_entropies(y, batch))


@cache
def cleaning_problem(penalty: float) -> Bilevel:
    """Return the problem: weighted loss and penalty/2·‖y‖² at the lower level, plain cross-entropy at the upper."""
    return Bilevel(
        upper=lambda x, y, batch: jnp.mean(cross_entropies(y, batch)),
        lower=weighted_loss,
        project_upper=lambda x: jnp.clip(x, -LARGEST, LARGEST),
        penalty=lambda x, y: penalty * half_square(y),
    )


@cache
def _unweighted_problem(penalty: float) -> SingleLevel:
    loss = lambda y, batch: jnp.mean(cross_entropies(y, batch))
    return SingleLevel(loss, penalty=lambda y: penalty * half_square(y))


class _Setting(NamedTuple):
    """Defaults for a data set; `step` suits y and the linear system, which has the Hessian of y."""

    images: Callable[..., Images]
    clients: int
    cohort: int
    step: float
    rounds: int


SETTINGS = {
    "digits": _Setting(digit_images, clients=20, cohort=20, step=0.5, rounds=100),
    "mnist": _Setting(mnist_images, clients=100, cohort=10, step=0.05, rounds=200),
}


def data_cleaning(
    clients: int | None = None,
    partition: str = "iid",
    corrupted: float = 0.4,
    validation: float = 0.2,
    penalty: float = 1e-3,
    seed: int = 0,
    data: str = "digits",
    equal: bool = False,
    wrong: str = "samples",
    fit: str = "training",
    data_dir: str | Path | None = None,
) -> Task:
    """Learn which training samples deserve trust: a linear classifier of digits, some of whose labels are wrong.

    Lower: the mean over all training samples of σ(x_j)·ℓ_j(y) + penalty/2·‖y‖², with one y for all clients. Upper: the
    mean cross-entropy on validation samples, whose labels are right. x has an entry for every training sample of every
    client, initially 0 and kept between −5 and 5. A sample carries its place in x as `index`, and a client's gradient
    is zero outside its own entries. There is no direct gradient: the upper loss does not depend on x.

    The gradient of an entry is −σ'(x_j)⟨∇ℓ_j, p⟩/N, where N is the number of training samples. Upper steps are
    therefore proportional to N; the default is 3N. A minibatch moves only the entries of its own samples, so full
    batches are the default.

    Arguments:
        clients: the number of clients (None: 20 for digits, 100 for MNIST, of which 10 take part in a round).
        partition: "iid", "shards" or "dirichlet", by the right labels.
        corrupted: ρ, the fraction of training labels that are wrong.
        validation: the fraction of a client's samples used for validation; these are never corrupted.
        penalty: the lower level's penalty.
        seed: seed of the split and of the corruption.
        data: "digits", scikit-learn's bundled ones, 8×8; or "mnist", 28×28.
        equal: leave out a few samples so that all clients have as many as the smallest.
        wrong: which labels are wrong: "samples", drawn anywhere and changed to another class, each equally likely; or
            "clients", all training labels of a fraction ρ of the clients, each off by one (0 for 1, …, 9 for 0).
        fit: what single-level methods train on: "training", the samples with the wrong labels; "validation", only the
            others; or "all".
        data_dir: the folder of the MNIST files; see `rookery.data.load`.

    `Task.evaluate` returns `accuracy` and `loss` on test images that no client has, and `validation_loss`, the upper
    loss. If some labels are corrupted, it also returns the mean weight of either kind, `weight_clean` and
    `weight_corrupted`, and `auc`, the chance that a clean sample has a larger weight than a corrupted one (a tie counts
    half). `Task.single_level` trains the same classifier without weights, on the samples chosen by `fit`.
    """
    settings = choice("data", data, SETTINGS)
    divide = choice("partition", partition, PARTITIONS)
    check_word("wrong", wrong, "samples", "clients")
    check_word("fit", fit, "training", "validation", "all")
    if not 0 <= corrupted < 1:
        raise ValueError(f"corrupted must be a number from 0 to below 1; got {corrupted!r}.")
    check_share(validation=validation)
    clients = settings.clients if clients is None else clients
    check_seed(seed)
    check_counts(clients=clients)
    check_amounts(penalty=penalty)
    images, labels, test_images, test_labels = settings.images(seed, data_dir)
    rng = np.random.default_rng([seed, 1])
    halves = split(rng, divide(labels, clients, seed), 1 - validation, equal)
    upper: list[Any] = [take({"image": images, "label": labels}, own) for _, own in halves]
    train = [own for own, _ in halves]
    sizes = [len(own) for own in train]
    right = labels[np.concatenate(train)]
    if wrong == "clients":
        bad = rng.permutation(clients) < round(corrupted * clients)
        noisy = np.where(np.repeat(bad, sizes), (right + 1) % 10, right).astype(right.dtype)
    else:
        noisy = noisy_labels(right, corrupted, int(rng.integers(2**31)), classes=10)
    places = np.split(np.arange(len(right), dtype=np.int32), np.cumsum(sizes)[:-1])
    lower: list[Any] = [
        {"image": images[own], "label": noisy[place], "index": place} for own, place in zip(train, places, strict=True)
    ]
    federation = Clients(lower, upper, weights="size")
    evaluate = cleaning_metrics(test_images, test_labels, federation.upper.rows, noisy != right)
    y = zeros(images.shape[1], 10)
    return Task(
        name="data-cleaning",
        problem=cleaning_problem(penalty),
        clients=federation,
        init=(np.zeros(len(right), np.float32), y),
        evaluate=evaluate,
        metric="accuracy",
        rounds=settings.rounds,
        cohort=min(settings.cohort, clients),
        defaults=bilevel_defaults(3.0 * len(right), settings.step),
    ).with_single_level(
        problem=_unweighted_problem(penalty),
        clients=Clients(upper=_single_level_rows(lower, upper, fit), weights="size"),
        init=y,
        evaluate=lambda y, _: evaluate(None, y),
        defaults={"step": settings.step, "local_steps": 10},
    )


def _single_level_rows(training: list[Any], validation: list[Any], fit: str) -> list[Any]:
    """Return each client's samples for single-level methods."""
    if fit == "validation":
        return validation
    plain = [{"image": rows["image"], "label": rows["label"]} for rows in training]
    if fit == "training":
        return plain
    return [{name: np.concatenate([a[name], b[name]]) for name in a} for a, b in zip(plain, validation, strict=True)]


def cleaning_metrics(images: np.ndarray, labels: np.ndarray, validation: Any, wrong: Bool[np.ndarray, " n"]) -> Any:
    """Return evaluate(x, y): the classifier on these images, and the weights of right and wrong labels."""
    test = {"image": jnp.asarray(images), "label": jnp.asarray(labels)}
    marks = jnp.asarray(wrong)
    return lambda x, y: {
        **_metrics(y, test, validation),
        **({} if x is None or not wrong.any() else _weight_metrics(x, marks)),
    }


@jax.jit
def _metrics(y: Any, test: Any, validation: Any) -> dict[str, Array]:
    return {
        "accuracy": jnp.mean(jnp.argmax(scores(y, test), axis=1) == test["label"]),
        "loss": jnp.mean(cross_entropies(y, test)),
        "validation_loss": jnp.mean(cross_entropies(y, validation)),
    }


@jax.jit
def _weight_metrics(x: Any, wrong: Bool[Array, " n"]) -> dict[str, Array]:
    weights = jax.nn.sigmoid(x)
    return {
        "auc": auc(weights, wrong),
        "weight_clean": jnp.mean(weights, where=~wrong),
        "weight_corrupted": jnp.mean(weights, where=wrong),
    }


def auc(weights: Float[Array, " n"], wrong: Bool[Array, " n"]) -> Float[Array, ""]:
    """Return the area under the ROC curve: how often a clean sample outweighs a corrupted one, a tie counting half."""
    corrupted = jnp.sort(jnp.where(wrong, weights, jnp.inf))
    below = sum(jnp.searchsorted(corrupted, weights, side=side) for side in ("left", "right"))
    return jnp.mean(below, where=~wrong) / (2 * jnp.sum(wrong))
