"""Data cleaning: the upper level learns a weight for every training sample, so that wrong labels count for little."""

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Bool, Float

from rookery.base.arguments import check_amounts, check_counts, check_seed
from rookery.data import PARTITIONS, noisy_labels
from rookery.data.clients import Clients
from rookery.problems.problems import Bilevel, SingleLevel
from rookery.tasks.hyperrep import digit_images, mnist_images
from rookery.tasks.task import Task, choice

LARGEST = 5.0  # of x_j, either way: a weight stays between σ(−5) = .007 and σ(5) = .993


def _scores(y: Any, batch: Any) -> Float[Array, "n classes"]:
    return batch["image"] @ y["w"] + y["b"]


def _cross_entropies(y: Any, batch: Any) -> Float[Array, " n"]:
    return optax.softmax_cross_entropy_with_integer_labels(_scores(y, batch), batch["label"])


def _size(y: Any) -> Float[Array, ""]:
    return 0.5 * (jnp.sum(y["w"] ** 2) + jnp.sum(y["b"] ** 2))


def weighted_loss(x: Any, y: Any, batch: Any) -> Float[Array, ""]:
    """The mean over the batch of σ(x_j)·ℓ_j(y), where j = batch["index"] is a sample's place in x."""
    return jnp.mean(jax.nn.sigmoid(x[batch["index"]]) * _cross_entropies(y, batch))


@cache
def cleaning_problem(penalty: float) -> Bilevel:
    """The problem alone: the weighted loss and penalty/2·‖y‖² at the lower level, plain cross-entropy at the upper."""
    return Bilevel(
        upper=lambda x, y, batch: jnp.mean(_cross_entropies(y, batch)),
        lower=lambda x, y, batch: weighted_loss(x, y, batch) + penalty * _size(y),
        project_upper=lambda x: jnp.clip(x, -LARGEST, LARGEST),
    )


@cache
def _unweighted_problem(penalty: float) -> SingleLevel:
    return SingleLevel(lambda y, batch: jnp.mean(_cross_entropies(y, batch)) + penalty * _size(y))


class _Setting(NamedTuple):
    """What goes with a data set; `step` is the one that suits y, and the linear system whose Hessian is that of y."""

    images: Callable[..., tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]]
    clients: int
    cohort: int
    step: float
    rounds: int


SETTINGS = {
    "digits": _Setting(digit_images, clients=20, cohort=20, step=0.5, rounds=100),
    "mnist": _Setting(mnist_images, clients=100, cohort=10, step=0.05, rounds=200),
}


def _defaults(step: float, samples: int) -> dict[str, Any]:
    """An entry of x has a gradient of the order 1/samples: upper steps are in proportion to them."""
    upper = 3.0 * samples
    return {
        "upper_step": upper,
        "lower_step": step,
        "lower_local_steps": 10,
        "neumann_terms": 10,
        "hessian_step": step,
        "linear_step": step,
        "local_steps": 5,
        "server_upper_step": upper,
        "server_lower_step": step,
        "server_linear_step": step,
        "bounds": ((upper / 10, upper), (step / 10, step), (step / 10, step)),
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
    """Which training samples deserve trust? A linear classifier of digits, some of whose labels are wrong.

    Lower: the mean over all training samples of σ(x_j)·ℓ_j(y) + penalty/2·‖y‖², one y for all clients. Upper: the mean
    cross-entropy on validation samples, whose labels are right. x has an entry for every training sample of every
    client, all 0 at first; a sample carries its place in x as `index`, and a client's gradient is zero but for its own
    entries. They stay between −5 and 5. There is no direct gradient: the upper loss does not depend on x.

    An entry's gradient is −σ'(x_j)⟨∇ℓ_j, p⟩ over the number of training samples N, so that upper steps are in
    proportion to N: the default is 3N. A minibatch moves the entries of its own samples alone; all data is the default.

    Arguments:
        clients: how many (None: 20 for digits, 100 for MNIST, of which 10 take part in a round).
        partition: "iid", "shards" or "dirichlet", by the right labels.
        corrupted: ρ, the fraction of the training labels that is wrong.
        validation: which part of a client's samples is validation data, never corrupted.
        penalty: of the lower level.
        seed: of the split and of the corruption.
        data: "digits", scikit-learn's bundled ones, 8×8; or "mnist", 28×28.
        equal: leave out a few samples so that all clients have as many as the smallest.
        wrong: which labels are: "samples", drawn anywhere and changed to another class, each equally likely; or
            "clients", all training labels of a fraction ρ of the clients, each off by one (0 for 1, …, 9 for 0).
        fit: what single-level methods train on: "training", the samples with the wrong labels; "validation", the others
            alone; or "all".
        data_dir: where the MNIST files are; see `rookery.data.load`.

    `Task.evaluate` gives `accuracy` and `loss` on test images that no client has; `validation_loss`, the upper level's
    own; and, if some labels are corrupted, `auc`, the chance that a clean sample has a larger weight than a corrupted
    one (a tie counts half), and the mean weight of either kind, `weight_clean` and `weight_corrupted`.
    `Task.single_level` trains the same classifier without weights, on the samples that `fit` says.
    """
    settings = choice("data", data, SETTINGS)
    divide = choice("partition", partition, PARTITIONS)
    choice("wrong", wrong, dict.fromkeys(("samples", "clients")))
    choice("fit", fit, dict.fromkeys(("training", "validation", "all")))
    if not 0 <= corrupted < 1:
        raise ValueError(f"corrupted={corrupted!r} is not a fraction: give a number from 0 to below 1.")
    if not 0 < validation < 1:
        raise ValueError(f"validation={validation!r} is not a part of the samples: give a number between 0 and 1.")
    clients = settings.clients if clients is None else clients
    check_seed(seed)
    check_counts(clients=clients)
    check_amounts(penalty=penalty)
    images, labels, test_images, test_labels = settings.images(seed, data_dir)
    rng = np.random.default_rng([seed, 1])
    parts = divide(labels, clients, seed)
    most = min(map(len, parts)) if equal else None
    train: list[np.ndarray] = []
    upper: list[Any] = []
    for part in parts:
        mixed = rng.permutation(part)[:most]
        cut = min(max(round((1 - validation) * len(mixed)), 1), len(mixed) - 1)
        train.append(mixed[:cut])
        upper.append({"image": images[mixed[cut:]], "label": labels[mixed[cut:]]})
    right = labels[np.concatenate(train)]
    sizes = [len(own) for own in train]
    if wrong == "clients":
        bad = rng.permutation(clients) < round(corrupted * clients)
        noisy = np.where(np.repeat(bad, sizes), (right + 1) % 10, right).astype(right.dtype)
    else:
        noisy = noisy_labels(right, corrupted, int(rng.integers(2**31)), classes=10)
    ends = np.cumsum(sizes)
    lower: list[Any] = [
        {
            "image": images[own],
            "label": noisy[end - len(own) : end],
            "index": np.arange(end - len(own), end, dtype=np.int32),
        }
        for own, end in zip(train, ends, strict=True)
    ]
    federation = Clients(lower, upper, weights="size")
    evaluate = cleaning_metrics(test_images, test_labels, federation.upper.rows, noisy != right)
    y = {"w": np.zeros((images.shape[1], 10), np.float32), "b": np.zeros(10, np.float32)}
    common: dict[str, Any] = {
        "metric": "accuracy", "rounds": settings.rounds, "cohort": min(settings.cohort, clients), "every": 10,
    }  # fmt: skip
    single = Task(
        name="data-cleaning",
        problem=_unweighted_problem(penalty),
        clients=Clients(upper=_fitted(lower, upper, fit), weights="size"),
        init=y,
        evaluate=lambda y, _: evaluate(None, y),
        defaults={"step": settings.step, "local_steps": 10},
        **common,
    )
    return Task(
        name="data-cleaning",
        problem=cleaning_problem(penalty),
        clients=federation,
        init=(np.zeros(len(right), np.float32), y),
        evaluate=evaluate,
        defaults=_defaults(settings.step, len(right)),
        single_level=single,
        **common,
    )


def _fitted(training: list[Any], validation: list[Any], fit: str) -> list[Any]:
    """Each client's samples for single-level methods."""
    if fit == "validation":
        return validation
    alone = [{"image": own["image"], "label": own["label"]} for own in training]
    if fit == "training":
        return alone
    return [{name: np.concatenate([a[name], b[name]]) for name in a} for a, b in zip(alone, validation, strict=True)]


def cleaning_metrics(images: np.ndarray, labels: np.ndarray, validation: Any, wrong: Bool[np.ndarray, " n"]) -> Any:
    """evaluate(x, y): the classifier on these images, the weights by whether a sample's label is wrong."""
    test = {"image": jnp.asarray(images), "label": jnp.asarray(labels)}
    marks = jnp.asarray(wrong)
    return lambda x, y: {
        **_metrics(y, test, validation),
        **({} if x is None or not wrong.any() else _weight_metrics(x, marks)),
    }


@jax.jit
def _metrics(y: Any, test: Any, validation: Any) -> dict[str, Array]:
    return {
        "accuracy": jnp.mean(jnp.argmax(_scores(y, test), axis=1) == test["label"]),
        "loss": jnp.mean(_cross_entropies(y, test)),
        "validation_loss": jnp.mean(_cross_entropies(y, validation)),
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
    """The area under the ROC curve: how often a clean sample weighs more than a corrupted one, ties counting half."""
    corrupted = jnp.sort(jnp.where(wrong, weights, jnp.inf))
    below = sum(jnp.searchsorted(corrupted, weights, side=side) for side in ("left", "right"))
    return jnp.mean(below, where=~wrong) / (2 * jnp.sum(wrong))
