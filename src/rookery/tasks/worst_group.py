"""Robust training for the worst-served group: images from two kinds of scanners, one of them rare and bad."""

from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from rookery.base.arguments import check_amounts, check_counts, check_positive, check_seed
from rookery.data.clients import Clients
from rookery.problems.objectives import worst_group as worst_group_objective
from rookery.problems.problems import Compositional, SingleLevel
from rookery.tasks.images import digit_images
from rookery.tasks.linear import cross_entropies, half_square, scores, zeros
from rookery.tasks.task import Task, check_word

GROUPS = ("good", "bad")


def _members(rows: Any) -> Float[Array, "n groups"]:
    return jax.nn.one_hot(rows["group"], len(GROUPS))


@cache
def robust_problem(shares: tuple[float, ...], temperature: float, penalty: float) -> Compositional:
    """Return the problem: the smoothed maximum of the groups' mean losses, and penalty/2·‖x‖²."""
    named = dict(zip(GROUPS, shares, strict=True))
    worst: Any = worst_group_objective(cross_entropies, _members, named, temperature).problem
    return Compositional(worst.inner, worst.outer, extra=lambda x, rows: penalty * half_square(x))


@cache
def plain_problem(shares: tuple[float, ...], count: str, penalty: float) -> SingleLevel:
    """Return the mean over the samples, or over the groups' means, and penalty/2·‖x‖²."""
    weights = np.ones(len(shares)) if count == "samples" else 1 / (len(shares) * np.asarray(shares))

    def loss(x: Any, rows: Any) -> Float[Array, ""]:
        losses = cross_entropies(x, rows)
        return jnp.mean(jnp.asarray(weights, losses.dtype)[rows["group"]] * losses)

    return SingleLevel(loss, penalty=lambda x: penalty * half_square(x))


def worst_group(
    clients: int = 20,
    bad: float = 0.25,
    noise: float = 0.35,
    temperature: float = 0.1,
    penalty: float = 1e-3,
    count: str = "samples",
    seed: int = 0,
) -> Task:
    """Learn one linear model for digits from good and bad scanners, so that the worse-served group fares better.

    Some clients have a bad scanner: all their images are turned by 90° and grainy. The model is too small to be right
    for both kinds, and the mean loss favours the larger group. Robust training minimises λ log mean exp(L_a/λ) over the
    groups a, which is close to the larger of the two groups' mean losses, plus penalty/2·‖x‖²; see
    `rookery.objectives.worst_group`.

    Arguments:
        clients: the number of clients; all have the same number of images.
        bad: the share of clients with a bad scanner; a client knows its own kind and the shares of both.
        noise: standard deviation of the noise on a bad scanner's pixels, which are then clipped to [0, 1].
        temperature: λ.
        penalty: the penalty on the model.
        count: what single-level methods minimise: the mean over all "samples", or the mean over the "groups" of their
            means, which corrects for the sizes by hand.
        seed: seed of the test images, the split, the choice of clients and the noise.

    `Task.evaluate` returns, on 360 test images scanned both ways, `accuracy_good` and `accuracy_bad`; `worst_accuracy`,
    the lower of the two; `accuracy`, their mean by the groups' shares; `worst_loss`, on the training images; and
    `weight_bad`, the weight of the bad scanners in robust training. `Task.single_level` minimises what `count` says.
    """
    check_seed(seed)
    check_counts(clients=clients)
    check_positive(temperature=temperature)
    check_amounts(penalty=penalty, noise=noise)
    check_word("count", count, "samples", "groups")
    many = round(bad * clients) if 0 < bad < 1 else 0
    if not 0 < many < clients:
        raise ValueError(f"bad must leave clients of both kinds; got bad={bad!r} with clients={clients}.")
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
    start = zeros(64, 10)
    return Task(
        name="worst-group",
        problem=robust_problem(shares, float(temperature), float(penalty)),
        clients=federation,
        init=(start, None),
        evaluate=lambda x, _: measure(temperature, x),
        metric="worst_accuracy",
        defaults={"step": 0.5, "local_steps": 5, "momentum": 0.9, "upper_step": 0.5, "lower_step": 0.5},
    ).with_single_level(problem=plain_problem(shares, count, float(penalty)), init=start)


def _badly_scanned(images: Float[np.ndarray, "n 64"], noise: float, rng: np.random.Generator) -> np.ndarray:
    turned = np.rot90(images.reshape(-1, 8, 8), axes=(1, 2)).reshape(-1, 64)
    return np.clip(turned + noise * rng.normal(size=turned.shape), 0, 1).astype(np.float32)


@jax.jit
def _metrics(tests: list[Array], labels: Array, rows: Any, shares: Array, temperature: Any, x: Any) -> dict[str, Array]:
    right = jnp.stack([jnp.mean(jnp.argmax(scores(x, {"image": images}), axis=1) == labels) for images in tests])
    losses = jnp.mean(cross_entropies(x, rows)[:, None] * _members(rows), axis=0) / shares
    return {
        "accuracy": shares @ right,
        "worst_accuracy": jnp.min(right),
        **{f"accuracy_{name}": accuracy for name, accuracy in zip(GROUPS, right, strict=True)},
        "worst_loss": jnp.max(losses),
        "weight_bad": jax.nn.softmax(losses / temperature)[1],
    }
