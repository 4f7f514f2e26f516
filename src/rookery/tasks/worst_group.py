"""Two kinds of scanners, one of them rare and bad: robust training, which looks at the group that is served worst."""

from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Float

from rookery.base.arguments import check_amounts, check_counts, check_positive, check_seed
from rookery.data.clients import Clients
from rookery.problems.objectives import worst_group as worst_group_objective
from rookery.problems.problems import Compositional, SingleLevel
from rookery.tasks.hyperrep import digit_images
from rookery.tasks.task import Task, choice

GROUPS = ("good", "bad")
COUNTS = ("samples", "groups")
DEFAULTS = {
    "step": 0.5,
    "local_steps": 5,
    "momentum": 0.9,
    "upper_step": 0.5,
    "lower_step": 0.5,
}


def _scores(x: Any, images: Array) -> Float[Array, "n classes"]:
    return images @ x["w"] + x["b"]


def _losses(x: Any, rows: Any) -> Float[Array, " n"]:
    return optax.softmax_cross_entropy_with_integer_labels(_scores(x, rows["image"]), rows["label"])


def _members(rows: Any) -> Float[Array, "n groups"]:
    return jax.nn.one_hot(rows["group"], len(GROUPS))


def _size(x: Any) -> Float[Array, ""]:
    return 0.5 * (jnp.sum(x["w"] ** 2) + jnp.sum(x["b"] ** 2))


@cache
def robust_problem(shares: tuple[float, ...], temperature: float, penalty: float) -> Compositional:
    """The problem alone: the smoothed worst of the groups' mean losses, and penalty/2·‖x‖²."""
    worst: Any = worst_group_objective(_losses, _members, dict(zip(GROUPS, shares, strict=True)), temperature).problem
    return Compositional(worst.inner, worst.outer, extra=lambda x, rows: penalty * _size(x))


@cache
def plain_problem(shares: tuple[float, ...], count: str, penalty: float) -> SingleLevel:
    """The mean over the samples, or over the groups' means, and penalty/2·‖x‖²."""
    weights = np.ones(len(shares)) if count == "samples" else 1 / (len(shares) * np.asarray(shares))

    def loss(x: Any, rows: Any) -> Float[Array, ""]:
        each = _losses(x, rows)
        return jnp.mean(jnp.asarray(weights, each.dtype)[rows["group"]] * each) + penalty * _size(x)

    return SingleLevel(loss)


def worst_group(
    clients: int = 20,
    bad: float = 0.25,
    noise: float = 0.35,
    temperature: float = 0.1,
    penalty: float = 1e-3,
    count: str = "samples",
    seed: int = 0,
) -> Task:
    """Digits from two kinds of scanners with one linear model for both: who is served worst, and how well?

    All images of some of the clients are turned by 90° and grainy. The model is small: it cannot be right for both
    kinds, and the mean loss decides for the larger one. Robust training minimises λ log mean exp(L_a/λ) over the groups
    a, near the worse of the two groups' mean losses, and penalty/2·‖x‖²: see `rookery.objectives.worst_group`.

    Arguments:
        clients: how many; they have equally many images.
        bad: which part of the clients has the bad scanner; a client is told its own kind, and both kinds' shares.
        noise: standard deviation of what is added to each of a bad scanner's pixels, which are between 0 and 1, before
            they are cut off at 0 and 1.
        temperature: λ.
        penalty: of the model.
        count: what single-level methods minimise, the mean over all "samples", or that over the "groups" of their
            means: the sizes made up for by hand.
        seed: of the test images, the split, the choice of the clients and the noise.

    `Task.evaluate` gives, on 360 test images scanned both ways, `accuracy_good` and `accuracy_bad`; `worst_accuracy`,
    the lower of them; `accuracy`, their mean by the groups' shares; `worst_loss`, on the training images; and
    `weight_bad`, how much robust training has the bad scanners count. `Task.single_level`: as `count` says.
    """
    check_seed(seed)
    check_counts(clients=clients)
    check_positive(temperature=temperature)
    check_amounts(penalty=penalty, noise=noise)
    choice("count", count, dict.fromkeys(COUNTS))
    many = round(bad * clients) if 0 < bad < 1 else 0
    if not 0 < many < clients:
        raise ValueError(f"bad={bad!r} of clients={clients}: there must be clients of both kinds.")
    images, labels, test_images, test_labels = digit_images(seed)
    if clients > len(labels):
        raise ValueError(f"{len(labels)} samples cannot be divided into {clients} parts; use fewer clients.")
    rng = np.random.default_rng([seed, 1])
    parts = rng.permutation(len(labels))[: len(labels) // clients * clients].reshape(clients, -1)
    kinds = (rng.permutation(clients) < many).astype(np.int32)

    def rows(images: np.ndarray, labels: np.ndarray, kind: int) -> dict[str, np.ndarray]:
        scanned = _badly_scanned(images, noise, rng) if kind else images
        return {"image": scanned, "label": labels, "group": np.full(len(labels), kind, np.int32)}

    federation = Clients(
        upper=[rows(images[own], labels[own], int(kind)) for own, kind in zip(parts, kinds, strict=True)]
    )
    shares = (1 - many / clients, many / clients)
    tests = [jnp.asarray(rows(test_images, test_labels, kind)["image"]) for kind in range(len(GROUPS))]
    measure = partial(_metrics, tests, jnp.asarray(test_labels), federation.upper.rows, jnp.asarray(shares))
    evaluate = lambda x, _: measure(temperature, x)
    start = {"w": np.zeros((64, 10), np.float32), "b": np.zeros(10, np.float32)}
    common: dict[str, Any] = {
        "name": "worst-group", "clients": federation, "evaluate": evaluate, "metric": "worst_accuracy",
        "rounds": 100, "every": 10, "defaults": DEFAULTS,
    }  # fmt: skip
    return Task(
        problem=robust_problem(shares, float(temperature), float(penalty)),
        init=(start, None),
        single_level=Task(problem=plain_problem(shares, count, float(penalty)), init=start, **common),
        **common,
    )


def _badly_scanned(images: Float[np.ndarray, "n 64"], noise: float, rng: np.random.Generator) -> np.ndarray:
    turned = np.rot90(images.reshape(-1, 8, 8), axes=(1, 2)).reshape(-1, 64)
    return np.clip(turned + noise * rng.normal(size=turned.shape), 0, 1).astype(np.float32)


@jax.jit
def _metrics(tests: list[Array], labels: Array, rows: Any, shares: Array, temperature: Any, x: Any) -> dict[str, Array]:
    right = jnp.stack([jnp.mean(jnp.argmax(_scores(x, images), axis=1) == labels) for images in tests])
    losses = jnp.mean(_losses(x, rows)[:, None] * _members(rows), axis=0) / shares
    return {
        "accuracy": shares @ right,
        "worst_accuracy": jnp.min(right),
        **{f"accuracy_{name}": own for name, own in zip(GROUPS, right, strict=True)},
        "worst_loss": jnp.max(losses),
        "weight_bad": jax.nn.softmax(losses / temperature)[1],
    }
