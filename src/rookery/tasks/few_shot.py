"""Few-shot learning: the upper level learns a representation for all, the lower level a head for each client alone."""

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
from rookery.tasks.hyperrep import digit_images, mnist_images
from rookery.tasks.loss_tuning import network, scores
from rookery.tasks.task import Task, choice

LENGTH = 4.0  # of every representation: the curvature of a head's loss then has a bound that holds at any x
FIT_STEPS = 50  # gradient steps, from zero, that fit a head when the representation is scored
TEST_EPISODES = 200


def _represented(x: Any, images: Float[Array, "n pixels"]) -> Float[Array, "n width"]:
    output = scores(x, images)
    return LENGTH * output * jax.lax.rsqrt(jnp.sum(output**2, axis=1, keepdims=True) + 1e-6)


def representation(x: Any, batch: Any) -> Any:
    """What a head sees of a batch: the network's output in the place of the image, scaled to one length."""
    return {**batch, "image": _represented(x, batch["image"])}


def _cross_entropy(x: Any, y: Any, batch: Any) -> Float[Array, ""]:
    """Each sample under the head of its own episode; the batch's mean."""
    by_head = jnp.einsum("nd,edk->nek", batch["image"], y["w"]) + y["b"]
    own = jnp.take_along_axis(by_head, batch["episode"][:, None, None], axis=1)[:, 0]
    return jnp.mean(optax.softmax_cross_entropy_with_integer_labels(own, batch["label"]))


def _size(y: Any) -> Float[Array, ""]:
    return 0.5 * (jnp.sum(y["w"] ** 2) + jnp.sum(y["b"] ** 2))


@cache
def few_shot_problem(episodes: int, penalty: float) -> Bilevel:
    """The problem alone. Lower: the sum over the client's episodes of each one's mean loss + penalty/2·‖its head‖².

    A sum and not a mean, so that the steps that suit one episode suit any number of them; the heads are the same.
    """

    def lower(x: Any, y: Any, batch: Any) -> Float[Array, ""]:
        return episodes * _cross_entropy(x, y, batch) + penalty * _size(y)

    return Bilevel(upper=_cross_entropy, lower=lower, lower_scope="client", features=representation)


@cache
def _one_model(penalty: float) -> SingleLevel:
    def loss(z: Any, batch: Any) -> Float[Array, ""]:
        x, y = z
        return _cross_entropy(x, y, representation(x, batch)) + penalty * _size(y)

    return SingleLevel(loss)


class _Pool(NamedTuple):
    """Images in rows, and the rows of each class."""

    images: np.ndarray
    classes: list[np.ndarray]


def _pool(images: np.ndarray, labels: np.ndarray) -> _Pool:
    by_label = np.argsort(labels, kind="stable")
    return _Pool(images, np.split(by_label, np.flatnonzero(np.diff(labels[by_label])) + 1))


def _digits(seed: int, data_dir: Any) -> tuple[_Pool, _Pool]:
    images, labels, test_images, test_labels = digit_images(seed)
    return _pool(images, labels), _pool(test_images, test_labels)


def _mnist(seed: int, data_dir: Any) -> tuple[_Pool, _Pool]:
    images, labels, test_images, test_labels = mnist_images(seed, data_dir)
    return _pool(images, labels), _pool(test_images, test_labels)


def _omniglot(seed: int, data_dir: Any) -> tuple[_Pool, _Pool]:
    """105×105 made 21×21 by means over squares, normalised by the training images' mean and deviation."""
    omniglot = load("omniglot", data_dir)
    train, test = (
        images.reshape(-1, 21, 5, 21, 5).mean(axis=(2, 4), dtype=np.float32).reshape(-1, 441)
        for images in (omniglot.train, omniglot.test)
    )
    mean, deviation = train.mean(), train.std()
    train, test = (train - mean) / deviation, (test - mean) / deviation
    return _pool(train, omniglot.train_labels), _pool(test, omniglot.test_labels)


class _Setting(NamedTuple):
    """What goes with a data set."""

    pools: Callable[..., tuple[_Pool, _Pool]]
    clients: int
    episodes: int
    widths: tuple[int, ...]
    rounds: int
    upper_step: float


SETTINGS = {
    "digits": _Setting(_digits, clients=20, episodes=2, widths=(64, 32), rounds=100, upper_step=0.3),
    "mnist": _Setting(_mnist, clients=50, episodes=4, widths=(128, 64), rounds=100, upper_step=0.3),
    "omniglot": _Setting(_omniglot, clients=100, episodes=4, widths=(128, 64), rounds=200, upper_step=0.1),
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
    """Few-shot episodes: a representation that all clients learn together, a head that each fits to its own classes.

    Each client has episodes of its own: `ways` classes drawn at random and numbered in the order they were drawn, so
    that the same label means something else to every client, and no head serves two of them. The support images are
    the lower level's data, the query images the upper's; both stay the same for the whole run. Images may turn up at
    several clients. x is an MLP whose output is scaled to length 4; y = {"w", "b"} holds a linear head for each of the
    client's episodes, and is the client's own: `Bilevel(lower_scope="client")`.

    Arguments:
        clients: how many (None: 20 for digits, 50 for MNIST, 100 for Omniglot).
        ways, shots, queries: of an episode: classes, and support and query images of each class.
        episodes: of each client (None: 2 for digits, 4 for the others).
        penalty: of the lower level, penalty/2·‖head‖², which makes it strongly convex.
        seed: of the episodes and of the start.
        data: "digits", scikit-learn's bundled ones, 8×8, with an MLP 64-64-32; "mnist", 28×28, 784-128-64; or
            "omniglot", characters scaled down to 21×21, 441-128-64.
        data_dir: where the files are; see `rookery.data.load`.

    `Task.evaluate` gives `accuracy` and `loss` on the query images of 200 fresh episodes, drawn from alphabets
    that no client has (Omniglot), or from images of the ten digits that no client has: for each a head is fitted to the
    support images by 50 gradient steps from zero. `client_accuracy` is the same on the clients' own episodes. Neither
    reads y. `Task.single_level` trains one network, head included, on all images of all clients (FedAvg); it is
    scored in the same way, by its representation.
    """
    settings = choice("data", data, SETTINGS)
    clients = settings.clients if clients is None else clients
    episodes = settings.episodes if episodes is None else episodes
    check_seed(seed)
    check_counts(clients=clients, episodes=episodes, shots=shots, queries=queries)
    check_counts(2, ways=ways)
    check_amounts(penalty=penalty)
    pools = settings.pools(seed, data_dir)
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
    common: dict[str, Any] = {
        "metric": "accuracy", "rounds": settings.rounds, "cohort": min(20, clients), "every": 10,
    }  # fmt: skip
    single = Task(
        name="few-shot",
        problem=_one_model(penalty),
        clients=Clients(upper=pooled),
        init=(x, y),
        evaluate=lambda z, _: evaluate(*z),
        defaults={"step": 0.1, "local_steps": 5},
        **common,
    )
    return Task(
        name="few-shot",
        problem=few_shot_problem(episodes, penalty),
        clients=Clients(lower, upper),
        init=(x, y),
        evaluate=evaluate,
        defaults={"upper_step": settings.upper_step, **DEFAULTS},
        single_level=single,
        **common,
    )


def _check(ways: int, shots: int, queries: int, pools: tuple[_Pool, _Pool]) -> None:
    classes = min(len(pool.classes) for pool in pools)
    if ways > classes:
        raise ValueError(f"ways={ways}: an episode has at most the {classes} classes there are.")
    images = min(len(own) for pool in pools for own in pool.classes)
    if shots + queries > images:
        raise ValueError(
            f"shots={shots} and queries={queries}: give together at most {images}, the images of the smallest class."
        )


def _episode(rng: np.random.Generator, pool: _Pool, ways: int, shots: int, queries: int) -> tuple[Any, Any]:
    """The support set and the query set of a fresh episode, whose classes are numbered as they are drawn."""
    drawn = [
        rng.permutation(pool.classes[k])[: shots + queries] for k in rng.choice(len(pool.classes), ways, replace=False)
    ]
    sets = []
    for start, end in ((0, shots), (shots, shots + queries)):
        rows = np.concatenate([own[start:end] for own in drawn])
        sets.append({"image": pool.images[rows], "label": np.repeat(np.arange(ways, dtype=np.int32), end - start)})
    return sets[0], sets[1]


def _numbered(sets: list[Any]) -> Any:
    """The sets of one client's episodes, end to end, each sample with the number of its episode."""
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
    """The mean accuracy and loss over episodes, each with a head of its own, fitted to the support images."""
    support, query = ({**own, "image": jax.vmap(lambda a: _represented(x, a))(own["image"])} for own in episodes)
    step = 2 / (LENGTH**2 + 1 + 2 * penalty)  # 1/L: a softmax has curvature ½ at most
    logits = lambda y, own: own["image"] @ y["w"] + y["b"]
    loss = lambda y, own: jnp.mean(optax.softmax_cross_entropy_with_integer_labels(logits(y, own), own["label"]))

    def one(support: Any, query: Any) -> tuple[Array, Array]:
        zero = {"w": jnp.zeros((support["image"].shape[1], ways)), "b": jnp.zeros(ways)}
        gradient = jax.grad(lambda y: loss(y, support) + penalty * _size(y))
        y = jax.lax.fori_loop(0, FIT_STEPS, lambda _, y: tree.step(y, step, gradient(y)), zero)
        return jnp.mean(jnp.argmax(logits(y, query), axis=1) == query["label"]), loss(y, query)

    accuracy, losses = jax.vmap(one)(support, query)
    return jnp.mean(accuracy), jnp.mean(losses)
