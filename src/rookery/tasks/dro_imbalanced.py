"""Robust training on imbalanced images: hard samples, mostly of rare classes, count more."""

from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Float, Int

from rookery.base.arguments import check_counts, check_seed
from rookery.base.draws import seed_key
from rookery.data import PARTITIONS
from rookery.data.clients import Clients
from rookery.problems.models import MLP, ResNet
from rookery.problems.objectives import Objective, chi2, kl, kl_risk, variance_risk
from rookery.problems.problems import SingleLevel
from rookery.tasks.images import Images, digit_images, published_images
from rookery.tasks.task import Task, choice, smallest, take

Model = MLP | ResNet
OBJECTIVES: dict[str, tuple[Callable[..., Objective], Callable[..., Any]]] = {
    "kl": (kl, kl_risk),
    "exp": (
        lambda loss, penalty, cap: kl(loss, penalty, shift=0.0),
        lambda losses, penalty, cap: kl_risk(losses, penalty),
    ),
    "chi2": (
        lambda loss, penalty, cap: chi2(loss, penalty),
        lambda losses, penalty, cap: variance_risk(losses, penalty),
    ),
}
CIFAR_MEAN = np.array([0.4914, 0.4822, 0.4465], np.float32)
CIFAR_DEVIATION = np.array([0.2023, 0.1994, 0.2010], np.float32)
_BATCH = 500  # images evaluated at a time


def step_profile(labels: Int[np.ndarray, " n"], few: int) -> Int[np.ndarray, " kept"]:
    """Return the indices that remain, ascending, if the first half of the classes keep only their last `few` samples.

    >>> labels = np.tile(np.arange(4), 50)
    >>> np.bincount(labels[step_profile(labels, few=3)]).tolist()
    [3, 3, 50, 50]
    """
    labels = np.asarray(labels)
    rare = (int(labels.max()) + 1) // 2
    least = int(np.bincount(labels)[:rare].min())
    if not 1 <= few <= least:
        raise ValueError(f"few must be from 1 to {least}, the size of the smallest rare class; got {few!r}.")
    kept = [np.flatnonzero(labels == k)[-few:] for k in range(rare)]
    return np.sort(np.concatenate([*kept, np.flatnonzero(labels >= rare)]))


def scores(model: Model, params: Any, images: Array) -> Float[Array, "n classes"]:
    """Return the model's scores; images of bytes are colours, and are normalised first."""
    if images.dtype == jnp.uint8:
        images = (images.astype(jnp.float32) / 255 - CIFAR_MEAN) / CIFAR_DEVIATION
    return model.apply(params, images)


def cross_entropies(model: Model, params: Any, rows: Any) -> Float[Array, " n"]:
    """Return the loss of each sample."""
    return optax.softmax_cross_entropy_with_integer_labels(scores(model, params, rows["image"]), rows["label"])


@cache
def robust_objective(model: Model, objective: str, penalty: float, cap: float | None = None) -> Objective:
    """Return the robust objective."""
    make, _ = choice("objective", objective, OBJECTIVES)
    return make(partial(cross_entropies, model), penalty, cap)


@cache
def plain_problem(model: Model) -> SingleLevel:
    """Return the mean loss, in which all samples count the same."""
    return SingleLevel(lambda params, rows: jnp.mean(cross_entropies(model, params, rows)))


class _Setting(NamedTuple):
    """Defaults for a data set."""

    images: Callable[..., Images]
    model: Model
    few: int
    rounds: int
    defaults: dict[str, Any]


SETTINGS = {
    "digits": _Setting(
        digit_images,
        MLP((64, 32, 10)),
        few=10,
        rounds=300,
        defaults={
            "step": 0.1, "momentum": 0.1, "local_steps": 5, "batch_size": 16, "upper_step": 0.2, "lower_step": 0.5,
        },
    ),
    "cifar-10": _Setting(
        lambda seed, data_dir: published_images("cifar-10", data_dir),
        ResNet(10),
        few=100,
        rounds=120 * 200,
        defaults={
            "step": 0.05, "momentum": 0.1, "local_steps": 1, "batch_size": 16, "first_batch": 128, "upper_step": 0.05,
            "lower_step": 0.5, "anchor_batch": 16,
        },
    ),
}  # fmt: skip
SETTINGS["cifar-100"] = SETTINGS["cifar-10"]._replace(
    images=lambda seed, data_dir: published_images("cifar-100", data_dir), model=ResNet(100)
)


def dro_imbalanced(
    clients: int = 8,
    partition: str = "iid",
    objective: str = "kl",
    penalty: float = 1.0,
    cap: float | None = 5.0,
    few: int | None = None,
    seed: int = 0,
    data: str = "digits",
    equal: bool = False,
    data_dir: str | Path | None = None,
) -> Task:
    """Learn images with a robust loss, where half of the classes are rare.

    Arguments:
        clients: the number of clients.
        partition: "iid", "shards" (two label shards per client) or "dirichlet".
        objective: "kl" or "chi2" of `rookery.objectives`; or "exp", KL with neither a level nor a cap:
            λ log mean exp(ℓ/λ), (4) of the FedDRO paper. It needs a larger λ, or it overflows.
        penalty: λ of the objective; the smaller it is, the more hard samples count.
        cap: for "kl", the largest weight of a sample, as a multiple of the average; see `rookery.objectives.kl`.
        few: how many samples a rare class keeps (None: 10 for digits, 100 for CIFAR).
        seed: seed of the split among clients and of the start; for digits, also of the choice of test images.
        data: "digits", scikit-learn's bundled ones, with an MLP 64-32-10; "cifar-10" or "cifar-100" with a ResNet-20:
            CIFAR10-ST and CIFAR100-ST of Qi et al. (2022), the set-up of the FedDRO paper.
        equal: leave out a few samples so that all clients have as many as the smallest.
        data_dir: the folder of the CIFAR files; see `rookery.data.load`.

    The training set keeps the last `few` samples, in the order of the files, of every class in the first half, and all
    samples of the other half: CIFAR10-ST has 5·100 + 5·5000 images. The test set is as published. Images are neither
    cropped nor flipped, since a loss has no random numbers. A round of FedDRO takes `local_steps` steps on 16 images
    per client; an epoch of CIFAR10-ST with 8 clients is 200 steps.

    x is {"model", "level"} for "kl" and the model for the others. `Task.evaluate` returns, on the test images,
    `accuracy` and `worst_accuracy`, the accuracy of the worst class; and on the training images `train_accuracy`,
    `risk`, the value of the robust objective, and `rare_weight`, the sum of its weights on the rare classes.
    `Task.single_level` minimises the mean loss.
    """
    settings = choice("data", data, SETTINGS)
    divide = choice("partition", partition, PARTITIONS)
    model, few = settings.model, settings.few if few is None else few
    check_seed(seed)
    check_counts(clients=clients, few=few)
    robust = robust_objective(model, objective, float(penalty), cap)
    images, labels, test_images, test_labels = settings.images(seed, data_dir)
    kept = step_profile(labels, few)
    kept_rows = {"image": images[kept], "label": labels[kept]}
    parts = divide(kept_rows["label"], clients, seed)
    if equal:
        rng = np.random.default_rng([seed, 1])
        parts = [np.sort(rng.permutation(part)[: smallest(parts, equal)]) for part in parts]
    federation = Clients(upper=[take(kept_rows, part) for part in parts], weights="size")
    start = model.init(seed_key(seed))
    classes = int(kept_rows["label"].max()) + 1
    test = {"image": jnp.asarray(test_images), "label": jnp.asarray(test_labels)}
    rows = federation.upper.rows
    measure = partial(_metrics, model, objective, classes, float(penalty), cap)
    init = robust.start(start, level=np.log(classes))
    with_level = init[0] is not start
    return Task(
        name="dro-imbalanced",
        problem=robust.problem,
        clients=federation,
        init=init,
        evaluate=lambda x, _: measure(x["model"] if with_level else x, rows, test),
        metric="accuracy",
        rounds=settings.rounds,
        every=settings.rounds // 30,
        defaults=settings.defaults,
    ).with_single_level(problem=plain_problem(model), init=start, evaluate=lambda x, _: measure(x, rows, test))


@partial(jax.jit, static_argnums=(0, 1, 2, 3, 4))
def _metrics(
    model: Model, objective: str, classes: int, penalty: float, cap: float | None, params: Any, rows: Any, test: Any
) -> dict[str, Array]:
    score = lambda images: jax.lax.map(lambda image: scores(model, params, image[None])[0], images, batch_size=_BATCH)
    right = jnp.argmax(score(test["image"]), axis=1) == test["label"]
    by_class = jnp.zeros(classes).at[test["label"]].add(right) / jnp.zeros(classes).at[test["label"]].add(1)
    trained = score(rows["image"])
    losses = optax.softmax_cross_entropy_with_integer_labels(trained, rows["label"])
    risk = OBJECTIVES[objective][1](losses, penalty, cap)
    return {
        "accuracy": jnp.mean(right),
        "worst_accuracy": jnp.min(by_class),
        "train_accuracy": jnp.mean(jnp.argmax(trained, axis=1) == rows["label"]),
        "risk": risk.value,
        "rare_weight": jnp.sum(risk.weights, where=rows["label"] < classes // 2),
    }
