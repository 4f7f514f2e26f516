"""Few-shot learning: the upper level learns a shared representation, the lower level a head for each client."""

from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Float

from rookery.base import tree
from rookery.base.arguments import check_amounts, check_counts, check_seed
from rookery.base.draws import seed_key
from rookery.data import load
from rookery.data.clients import Clients
from rookery.problems.problems import Bilevel, SingleLevel
from rookery.tasks.images import Images, digit_images, mnist_images
from rookery.tasks.linear import half_square
from rookery.tasks.loss_tuning import network, scores
from rookery.tasks.task import Task, choice

LENGTH = 4.0  # of every representation, so that the curvature of a head's loss has the same bound at any x
FIT_STEPS = 50  # gradient steps from zero that fit a head to evaluate the representation
TEST_EPISODES = 200


def _represented(x: Any, images: Float[Array, "n pixels"]) -> Float[Array, "n width"]:
    output = scores(x, images)
    return LENGTH * output * jax.lax.rsqrt(jnp.sum(output**2, axis=1, keepdims=True) + 1e-6)


def representation(x: Any, batch: Any) -> Any:
    """Replace the images of a batch by the network's outputs, scaled to one length: a head's inputs."""
    return {**batch, "image": _represented(x, batch["image"])}


def _cross_entropy(x: Any, y: Any, batch: Any) -> Float[Array, ""]:
    """Return the batch's mean loss, each sample under the head of its own episode."""
    by_head = jnp.einsum("nd,edk->nek", batch["image"], y["w"]) + y["b"]
    chosen = jnp.take_along_axis(by_head, batch["episode"][:, None, None], axis=1)[:, 0]
    return jnp.mean(optax.softmax_cross_entropy_with_integer_labels(chosen, batch["label"]))


@cache
def few_shot_problem(episodes: int, penalty: float) -> Bilevel:
    """Return the problem. Lower: the sum over the client's episodes of mean loss + penalty/2·‖head‖².

    It is a sum and not a mean, so that steps that suit one episode suit any number; the solution is the same.
    """
    return Bilevel(
        upper=_cross_entropy,
        lower=lambda x, y, batch: episodes * _cross_entropy(x, y, batch),
        lower_scope="client",
        features=representation,
        penalty=lambda x, y: penalty * half_square(y),
    )


@cache
def _one_model(penalty: float) -> SingleLevel:
    def loss(z: Any, batch: Any) -> Float[Array, ""]:
        x, y = z
        return _cross_entropy(x, y, representation(x, batch))

    return SingleLevel(loss, penalty=lambda z: penalty * half_square(z[1]))


class _Pool(NamedTuple):
    """Images in rows, and the rows of each class."""

    images: np.ndarray
    classes: list[np.ndarray]


def _pool(images: np.ndarray, labels: np.ndarray) -> _Pool:
    by_label = np.argsort(labels, kind="stable")
    return _Pool(images, np.split(by_label, np.flatnonzero(np.diff(labels[by_label])) + 1))


def _omniglot_images(seed: int, data_dir: Any) -> Images:
    """Return Omniglot reduced from 105×105 to 21×21 by means over squares, and standardised."""
    omniglot = load("omniglot", data_dir)
    train, test = (
        images.reshape(-1, 21, 5, 21, 5).mean(axis=(2, 4), dtype=np.float32).reshape(-1, 441)
        for images in (omniglot.train, omniglot.test)
    )
    mean, deviation = train.mean(), train.std()
    return (train - mean) / deviation, omniglot.train_labels, (test - mean) / deviation, omniglot.test_labels


class _Setting(NamedTuple):
    """Defaults for a data set."""

    images: Callable[..., Images]
    clients: int
    episodes: int
    widths: tuple[int, ...]
    rounds: int
    upper_step: float


SETTINGS = {
    "digits": _Setting(digit_images, clients=20, episodes=2, widths=(64, 32), rounds=100, upper_step=0.3),
    "mnist": _Setting(mnist_images, clients=50, episodes=4, widths=(128, 64), rounds=100, upper_step=0.3),
    "omniglot": _Setting(_omniglot_images, clients=100, episodes=4, widths=(128, 64), rounds=200, upper_step=0.1),
}
DEFAULTS = {"lower_step": 0.1, "hessian_step": 0.1, "linear_step": 0.1, "neumann_terms": 10, "local_steps": 5}


def few_shot(
    clients: int | None = None,
    ways: int = 5,
    shots: int = 5,
    queries: int = 10,
    episodes: int | None = None,
    penalty: float = 0.1,
    seed: int = 0,
    data: str = "digits",
    data_dir: str | Path | None = None,
) -> Task:
    """Learn a representation for few-shot episodes together, while each client fits a head to its own classes.

    An episode has `ways` classes, drawn at random and numbered in the order drawn. The same label therefore means
    something else at every client, and no head serves two clients. The support images are the lower level's data, the
    query images the upper level's; both stay the same for the whole run, and clients may share images. x is an MLP
    whose output is scaled to length 4; y = {"w", "b"} holds a linear head for each of the client's episodes, with
    `Bilevel(lower_scope="client")`.

    Arguments:
        clients: the number of clients (None: 20 for digits, 50 for MNIST, 100 for Omniglot).
        ways, shots, queries: classes in an episode, and support and query images of each class.
        episodes: episodes per client (None: 2 for digits, 4 for the others).
        penalty: the lower level's penalty, penalty/2·‖head‖², which makes it strongly convex.
        seed: seed of the episodes and of the start.
        data: "digits", scikit-learn's bundled ones, 8×8, with an MLP 64-64-32; "mnist", 28×28, 784-128-64; or
            "omniglot", characters scaled down to 21×21, 441-128-64.
        data_dir: the folder of the files; see `rookery.data.load`.

    `Task.evaluate` returns `accuracy` and `loss` on the query images of 200 fresh episodes, drawn from alphabets that
    no client has (Omniglot) or from images of the ten digits that no client has. For each episode a head is fitted to
    the support images by 50 gradient steps from zero. `client_accuracy` is the accuracy on the clients' own episodes.
    None of these metrics uses y. `Task.single_level` trains one network, head included, on all images of all clients
    (FedAvg); it is evaluated in the same way, by its representation.
    """
    settings = choice("data", data, SETTINGS)
    clients = settings.clients if clients is None else clients
    episodes = settings.episodes if episodes is None else episodes
    check_seed(seed)
    check_counts(clients=clients, episodes=episodes, shots=shots, queries=queries)
    check_counts(2, ways=ways)
    check_amounts(penalty=penalty)
    images, labels, test_images, test_labels = settings.images(seed, data_dir)
    pools = _pool(images, labels), _pool(test_images, test_labels)
    _check(ways, shots, queries, pools)
    rng = np.random.default_rng([seed, 1])
    draw = partial(_episode, rng, ways=ways, shots=shots, queries=queries)
    own = [[draw(pools[0]) for _ in range(episodes)] for _ in range(clients)]
    fresh = [draw(pools[1]) for _ in range(TEST_EPISODES)]
    lower, upper = ([_numbered([both[level] for both in each]) for each in own] for level in (0, 1))
    pooled = [jax.tree.map(lambda a, b: np.concatenate([a, b]), *both) for both in zip(lower, upper, strict=True)]
    x = network(seed_key(seed), (pools[0].images.shape[1], *settings.widths))
    y = {"w": np.zeros((episodes, settings.widths[-1], ways), np.float32), "b": np.zeros((episodes, ways), np.float32)}
    known, new = _stacked([both for each in own for both in each]), _stacked(fresh)
    evaluate = lambda x, y: _metrics(x, known, new, ways, penalty)
    return Task(
        name="few-shot",
        problem=few_shot_problem(episodes, penalty),
        clients=Clients(lower, upper),
        init=(x, y),
        evaluate=evaluate,
        metric="accuracy",
        rounds=settings.rounds,
        cohort=min(20, clients),
        defaults={"upper_step": settings.upper_step, **DEFAULTS},
    ).with_single_level(
        problem=_one_model(penalty),
        clients=Clients(upper=pooled),
        evaluate=lambda z, _: evaluate(*z),
        defaults={"step": 0.1, "local_steps": 5},
    )


def _check(ways: int, shots: int, queries: int, pools: tuple[_Pool, _Pool]) -> None:
    classes = min(len(pool.classes) for pool in pools)
    if ways > classes:
        raise ValueError(f"ways must be at most {classes}, the number of classes; got {ways}.")
    images = min(len(own) for pool in pools for own in pool.classes)
    if shots + queries > images:
        raise ValueError(
            f"shots + queries must be at most {images}, the size of the smallest class; got {shots} + {queries}."
        )


def _episode(rng: np.random.Generator, pool: _Pool, ways: int, shots: int, queries: int) -> tuple[Any, Any]:
    """Return the support set and the query set of a fresh episode, its classes numbered in the order drawn."""
    drawn = [
        rng.permutation(pool.classes[k])[: shots + queries] for k in rng.choice(len(pool.classes), ways, replace=False)
    ]
    sets = []
    for start, end in ((0, shots), (shots, shots + queries)):
        rows = np.concatenate([images[start:end] for images in drawn])
        sets.append({"image": pool.images[rows], "label": np.repeat(np.arange(ways, dtype=np.int32), end - start)})
    return sets[0], sets[1]


def _numbered(sets: list[Any]) -> Any:
    """Join the sets of a client's episodes, each sample with the number of its episode."""
    numbers = [np.full(len(own["label"]), i, np.int32) for i, own in enumerate(sets)]
    joined = {name: np.concatenate([own[name] for own in sets]) for name in ("image", "label")}
    return {**joined, "episode": np.concatenate(numbers)}


def _stacked(episodes: list[tuple[Any, Any]]) -> Any:
    return jax.tree.map(lambda *a: jnp.asarray(np.stack(a)), *episodes)


@partial(jax.jit, static_argnums=3)
def _metrics(x: Any, known: Any, new: Any, ways: int, penalty: float) -> dict[str, Array]:
    accuracy, loss = _score(x, new, ways, penalty)
    return {"accuracy": accuracy, "loss": loss, "client_accuracy": _score(x, known, ways, penalty)[0]}


def _score(x: Any, episodes: Any, ways: int, penalty: float) -> tuple[Array, Array]:
    """Return the mean accuracy and loss over episodes, with a head fitted to the support images of each."""
    support, query = ({**own, "image": jax.vmap(lambda a: _represented(x, a))(own["image"])} for own in episodes)
    step = 2 / (LENGTH**2 + 1 + 2 * penalty)  # 1/L: a softmax has curvature ½ at most
    logits = lambda y, own: own["image"] @ y["w"] + y["b"]
    loss = lambda y, own: jnp.mean(optax.softmax_cross_entropy_with_integer_labels(logits(y, own), own["label"]))

    def one(support: Any, query: Any) -> tuple[Array, Array]:
        zero = {"w": jnp.zeros((support["image"].shape[1], ways)), "b": jnp.zeros(ways)}
        gradient = jax.grad(lambda y: loss(y, support) + penalty * half_square(y))
        y = jax.lax.fori_loop(0, FIT_STEPS, lambda _, y: tree.step(y, step, gradient(y)), zero)
        return jnp.mean(jnp.argmax(logits(y, query), axis=1) == query["label"]), loss(y, query)

    accuracy, losses = jax.vmap(one)(support, query)
    return jnp.mean(accuracy), jnp.mean(losses)
