"""Robust training on imbalanced images: the samples that are hard, mostly of the rare classes, count more."""

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
from rookery.data import PARTITIONS, load
from rookery.data.clients import Clients
from rookery.problems.models import MLP, ResNet
from rookery.problems.objectives import Objective, chi2, kl, kl_risk, variance_risk
from rookery.problems.problems import SingleLevel
from rookery.tasks.hyperrep import digit_images
from rookery.tasks.task import Task, choice

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
_AT_ONCE = 500  # images in one piece of an evaluation


def step_profile(labels: Int[np.ndarray, " n"], few: int) -> Int[np.ndarray, " kept"]:
    """The samples that are kept, in ascending order, when the first half of the classes keep their last `few` alone.

    >>> labels = np.tile(np.arange(4), 50)
    >>> np.bincount(labels[step_profile(labels, few=3)]).tolist()
    [3, 3, 50, 50]
    """
    labels = np.asarray(labels)
    rare = (int(labels.max()) + 1) // 2
    smallest = int(np.bincount(labels)[:rare].min())
    if not 1 <= few <= smallest:
        raise ValueError(
            f"few={few!r}: a rare class keeps at least 1 sample, and at most the {smallest} of the smallest."
        )
    kept = [np.flatnonzero(labels == k)[-few:] for k in range(rare)]
    return np.sort(np.concatenate([*kept, np.flatnonzero(labels >= rare)]))


def scores(model: Model, params: Any, images: Array) -> Float[Array, "n classes"]:
    """The model's scores of images as they are kept; bytes are colours, and are normalised here."""
    if images.dtype == jnp.uint8:
        images = (images.astype(jnp.float32) / 255 - CIFAR_MEAN) / CIFAR_DEVIATION
    return model.apply(params, images)


def cross_entropies(model: Model, params: Any, rows: Any) -> Float[Array, " n"]:
    """The loss of each sample."""
    return optax.softmax_cross_entropy_with_integer_labels(scores(model, params, rows["image"]), rows["label"])


@cache
def robust_objective(model: Model, objective: str, penalty: float, cap: float | None = None) -> Objective:
    """The objective alone."""
    make, _ = choice("objective", objective, OBJECTIVES)
    return make(partial(cross_entropies, model), penalty, cap)


@cache
def plain_problem(model: Model) -> SingleLevel:
    """The mean loss, in which every sample counts the same."""
    return SingleLevel(lambda params, rows: jnp.mean(cross_entropies(model, params, rows)))


class _Setting(NamedTuple):
    """What goes with a data set."""

    images: Callable[..., tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]]
    model: Model
    few: int
    rounds: int
    defaults: dict[str, Any]


def _cifar(name: str, data_dir: Any) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    data = load(name, data_dir)
    return data.train, data.train_labels, data.test, data.test_labels


SETTINGS = {
    "digits": _Setting(
        digit_images,
        MLP((64, 32, 10)),
        few=10,
        rounds=300,
        defaults={
            "step": 0.1,
            "momentum": 0.1,
            "local_steps": 5,
            "batch_size": 16,
            "upper_step": 0.2,
            "lower_step": 0.5,
        },
    ),
    "cifar-10": _Setting(
        lambda seed, data_dir: _cifar("cifar-10", data_dir),
        ResNet(10),
        few=100,
        rounds=120 * 200,
        defaults={
            "step": 0.05,
            "momentum": 0.1,
            "local_steps": 1,
            "batch_size": 16,
            "first_batch": 128,
            "upper_step": 0.05,
            "lower_step": 0.5,
            "anchor_batch": 16,
        },
    ),
}
SETTINGS["cifar-100"] = SETTINGS["cifar-10"]._replace(
    images=lambda seed, data_dir: _cifar("cifar-100", data_dir), model=ResNet(100)
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
    """Images of which half the classes are rare, learnt with a robust loss.

    Arguments:
        clients: how many.
        partition: "iid", "shards" (two label shards per client) or "dirichlet".
        objective: "kl" or "chi2", of `rookery.objectives`; or "exp", which is KL with neither a level nor a cap:
            λ log mean exp(ℓ/λ), (4) of the FedDRO paper. It needs a larger λ, or leaves the finite numbers.
        penalty: its λ; the smaller, the more the hard samples count.
        cap: of "kl", how often a sample may count as the average one does; see `rookery.objectives.kl`.
        few: how many samples a rare class keeps (None: 10 for digits, 100 for CIFAR).
        seed: of the split among clients and of the start; for digits of the choice of test images, too.
        data: "digits", scikit-learn's bundled ones, with an MLP 64-32-10; "cifar-10" or "cifar-100" with a ResNet-20:
            CIFAR10-ST and CIFAR100-ST of Qi et al. (2022), the set-up of the FedDRO paper.
        equal: leave out a few samples so that all clients have as many as the smallest.
        data_dir: where the CIFAR files are; see `rookery.data.load`.

    Of every class in the first half the training set keeps the last `few` samples in the order of the files, and the
    other half whole: CIFAR10-ST has 5·100 + 5·5000 images. The test set is as published. No crops and flips: a loss
    sees a batch and no random numbers. A round of FedDRO is `local_steps` steps on 16 images a client: an epoch of
    CIFAR10-ST with 8 clients is 200 steps.

    x is {"model", "level"} for "kl" and the model for the others. `Task.evaluate` gives the `accuracy` on the test
    images, `worst_accuracy`, that of the worst class, and, on the training images, `train_accuracy`, `risk`, the robust
    objective's value, and `rare_weight`, the sum of the weights it puts on the rare classes. `Task.single_level` is the
    same without robustness: the mean loss.
    """
    settings = choice("data", data, SETTINGS)
    divide = choice("partition", partition, PARTITIONS)
    model, few = settings.model, settings.few if few is None else few
    check_seed(seed)
    check_counts(clients=clients, few=few)
    robust = robust_objective(model, objective, float(penalty), cap)
    images, labels, test_images, test_labels = settings.images(seed, data_dir)
    kept = step_profile(labels, few)
    images, labels = images[kept], labels[kept]
    parts = divide(labels, clients, seed)
    if equal:
        rng, most = np.random.default_rng([seed, 1]), min(map(len, parts))
        parts = [np.sort(rng.permutation(part)[:most]) for part in parts]
    federation = Clients(upper=[{"image": images[own], "label": labels[own]} for own in parts], weights="size")
    start = model.init(seed_key(seed))
    classes = int(labels.max()) + 1
    test = {"image": jnp.asarray(test_images), "label": jnp.asarray(test_labels)}
    rows = federation.upper.rows
    measure = partial(_metrics, model, objective, classes, float(penalty), cap)
    common: dict[str, Any] = {
        "name": "dro-imbalanced",
        "clients": federation,
        "metric": "accuracy",
        "rounds": settings.rounds,
        "every": settings.rounds // 30,
        "defaults": settings.defaults,
    }
    init = robust.start(start, level=np.log(classes))
    beside = init[0] is not start
    return Task(
        problem=robust.problem,
        init=init,
        evaluate=lambda x, _: measure(x["model"] if beside else x, rows, test),
        single_level=Task(
            problem=plain_problem(model), init=start, evaluate=lambda x, _: measure(x, rows, test), **common
        ),
        **common,
    )


@partial(jax.jit, static_argnums=(0, 1, 2, 3, 4))
def _metrics(
    model: Model, objective: str, classes: int, penalty: float, cap: float | None, params: Any, rows: Any, test: Any
) -> dict[str, Array]:
    of = lambda images: jax.lax.map(lambda image: scores(model, params, image[None])[0], images, batch_size=_AT_ONCE)
    right = jnp.argmax(of(test["image"]), axis=1) == test["label"]
    by_class = jnp.zeros(classes).at[test["label"]].add(right) / jnp.zeros(classes).at[test["label"]].add(1)
    trained = of(rows["image"])
    losses = optax.softmax_cross_entropy_with_integer_labels(trained, rows["label"])
    risk = OBJECTIVES[objective][1](losses, penalty, cap)
    return {
        "accuracy": jnp.mean(right),
        "worst_accuracy": jnp.min(by_class),
        "train_accuracy": jnp.mean(jnp.argmax(trained, axis=1) == rows["label"]),
        "risk": risk.value,
        "rare_weight": jnp.sum(risk.weights, where=rows["label"] < classes // 2),
    }
