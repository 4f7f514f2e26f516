"""Hyper-representation: the upper level learns a representation, the lower level a classifier on top of it."""

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
from rookery.data import PARTITIONS, load
from rookery.data.clients import Clients
from rookery.language.fed import Epochs
from rookery.parts import inverse_hessian
from rookery.problems.problems import Bilevel, Scope, SingleLevel
from rookery.tasks.task import Task, choice


def hidden(x: Any, batch: Any) -> Any:
    """What the classifier sees of a batch: the hidden layer's output in the place of the image."""
    return {**batch, "image": jax.nn.relu(batch["image"] @ x["w"] + x["b"])}


def _cross_entropy(x: Any, y: Any, batch: Any) -> Float[Array, ""]:
    scores = batch["image"] @ y["w"] + y["b"]
    marked = jax.nn.one_hot(batch["label"], scores.shape[-1], dtype=scores.dtype)  # whose gradient needs no scatter
    return jnp.mean(optax.softmax_cross_entropy(scores, marked))


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
def representation_problem(penalty: float = 0.0, l1: float = 0.0, scope: Scope = "global") -> Bilevel:
    """The problem alone: cross-entropy at both levels, penalty/2·‖y‖² + l1·‖y‖₁ beside it at the lower one."""

    def lower(x: Any, y: Any, batch: Any) -> Float[Array, ""]:
        loss = _cross_entropy(x, y, batch) + 0.5 * penalty * (jnp.sum(y["w"] ** 2) + jnp.sum(y["b"] ** 2))
        return loss + l1 * (jnp.sum(jnp.abs(y["w"])) + jnp.sum(jnp.abs(y["b"]))) if l1 else loss

    return Bilevel(upper=_cross_entropy, lower=lower, lower_scope=scope, features=hidden)


def hyperrep(
    clients: int | None = None,
    partition: str = "iid",
    width: int | None = None,
    penalty: float = 1e-3,
    seed: int = 0,
    data: str = "digits",
    equal: bool = False,
    share: bool = False,
    data_dir: str | Path | None = None,
    train: float = 0.5,
    l1: float = 0.0,
    first: tuple[int, int] | None = None,
    train_metrics: bool = False,
    scope: Scope = "global",
) -> Task:
    """An MLP on handwritten digits: hidden layer upper, output layer lower.

    Arguments:
        clients: how many (None: 50 for digits, 100 for MNIST); each one's samples are split at random into training
            (lower) and validation (upper) data.
        partition: "iid", "shards" (two label shards per client) or "dirichlet".
        width: of the hidden layer (None: 64 for digits, 200 for MNIST).
        penalty: of the lower level, penalty/2·‖y‖².
        seed: of the split and of the start.
        data: "digits", scikit-learn's bundled ones, 8×8; or "mnist", 28×28, normalised by its mean and deviation: at
            the sizes of Section 4.1 of the FedNest paper and with the steps of its authors' scripts.
        equal: leave out a few samples so that all clients have as many as the smallest: what runs on clients of one
            size is compiled once and needs no masks.
        share: evaluate how much of the hypergradient is implicit, too: ‖∇²_xy g·p‖/‖∇_x f‖ on at most 2,000 samples of
            each level from all clients, where p ≈ [∇²_y g]⁻¹∇_y f comes from 10 iterations of conjugate gradients
            (`implicit_share`), or from the Neumann series with N = 5, which is shorter, and 1/ℓ = 1/(2‖∇²_y g‖)
            (`implicit_share_series`) or 1/ℓ = .01 (`implicit_share_series_01`).
        data_dir: where the MNIST files are; see `rookery.data.load`.
        train: which part of a client's samples is training data.
        l1: of the lower level, l1·‖y‖₁.
        first: only the first so many images to train with, and to test with.
        train_metrics: evaluate on training images, too, at most 10,000 of all clients'.
        scope: "global", one output layer for all; or "client", one for each, of which no method knows them all.

    `Task.evaluate` gives the accuracy and the loss on test images that no client has. Where the output layers are the
    clients' own, it fits them, to each client's training data, and gives the mean over the clients of each one's
    accuracy and loss on test images in its own mix of labels.
    """
    choice("scope", scope, {"global": 0, "client": 0})
    if scope == "client" and (share or train_metrics):
        raise ValueError(
            'share and train_metrics look at one output layer for all, which scope="client" has not: leave them out.'
        )
    settings = _setting(data)
    clients = settings.clients if clients is None else clients
    width = settings.width if width is None else width
    check_seed(seed)
    check_counts(clients=clients, width=width)
    check_amounts(penalty=penalty, l1=l1)
    if not 0 < train < 1:
        raise ValueError(f"train={train} is not a part of the samples: give a number between 0 and 1.")
    images, labels, test_images, test_labels = settings.images(seed, data_dir)
    if first is not None:
        if np.shape(first) != (2,):
            raise ValueError(f"first={first!r} is not a pair: how many images to train with, and to test with.")
        check_counts(**{f"first[{i}]": count for i, count in enumerate(first)})
        images, labels, test_images, test_labels = (
            some[:n] for some, n in zip((images, labels, test_images, test_labels), np.repeat(first, 2), strict=True)
        )
    rng = np.random.default_rng([seed, 1])
    lower: list[Any] = []
    upper: list[Any] = []
    parts = PARTITIONS[partition](labels, clients, seed)
    most = min(map(len, parts)) if equal else None
    for part in parts:
        mixed = rng.permutation(part)[:most]
        half = min(max(1, int(train * len(mixed))), len(mixed) - 1)
        for level, own in ((lower, mixed[:half]), (upper, mixed[half:])):
            level.append({"image": images[own], "label": labels[own]})
    federation = Clients(lower, upper)
    x, y = layers(seed_key(seed), images.shape[1], width, 10)
    problem = representation_problem(penalty, l1, scope)
    metrics = test_metrics(test_images, test_labels)
    evaluate = metrics if scope == "global" else own_metrics(problem, lower, upper, y, test_images, test_labels)
    if share:
        implicit = implicit_share(problem, federation, seed)
        evaluate = lambda x, y: {**metrics(x, y), **implicit(x, y)}
    if train_metrics:
        some = np.random.default_rng([seed, 3]).permutation(len(federation.lower.rows["label"]))[:10_000]
        fitted = test_metrics(*(np.asarray(federation.lower.rows[name])[some] for name in ("image", "label")))
        evaluate = _with_prefix(evaluate, fitted, "train_")
    pooled = [jax.tree.map(lambda a, b: np.concatenate([a, b]), a, b) for a, b in zip(lower, upper, strict=True)]
    common: dict[str, Any] = {
        "metric": "accuracy", "rounds": settings.rounds, "cohort": min(10, clients), "every": 10,
    }  # fmt: skip
    single = Task(
        name="hyperrep",
        problem=_single_level(),
        clients=Clients(upper=pooled),
        init=(x, y),
        evaluate=lambda z, _: metrics(*z),
        defaults=settings.single,
        **common,
    )
    return Task(
        name="hyperrep",
        problem=problem,
        clients=federation,
        init=(x, y),
        evaluate=evaluate,
        defaults=settings.defaults if scope == "global" else settings.defaults | _OWN,
        single_level=single,
        **common,
    )


def _with_prefix(evaluate: Any, more: Any, prefix: str) -> Any:
    """Both evaluations, the names of the second one's metrics with a prefix."""
    return lambda x, y: {**evaluate(x, y), **{f"{prefix}{name}": value for name, value in more(x, y).items()}}


@cache
def _single_level() -> SingleLevel:
    return SingleLevel(_joint)


class _Setting(NamedTuple):
    """What goes with a data set."""

    images: Callable[..., tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]]
    clients: int
    width: int
    rounds: int
    defaults: dict[str, Any]
    single: dict[str, Any]


def digit_images(seed: int, data_dir: Any = None) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """The bundled digits, scaled to [0, 1]: images and labels to train, and 360 to test, drawn at random."""
    from sklearn.datasets import load_digits  # slow to import, and only this function needs it

    images, labels = load_digits(return_X_y=True)
    images, labels = (images / 16.0).astype(np.float32), labels.astype(np.int32)
    order = np.random.default_rng(seed).permutation(len(labels))
    test, train = order[:360], order[360:]
    return images[train], labels[train], images[test], labels[test]


def mnist_images(seed: int = 0, data_dir: Any = None) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """MNIST as it is published, normalised: images and labels to train, and to test."""
    mnist = load("mnist", data_dir)

    def normalised(images: np.ndarray) -> np.ndarray:
        levels = ((np.arange(256) / 255 - MNIST_MEAN) / MNIST_DEVIATION).astype(np.float32)
        return levels[images.reshape(len(images), -1)]

    return normalised(mnist.train), mnist.train_labels, normalised(mnist.test), mnist.test_labels


MNIST_MEAN, MNIST_DEVIATION = 0.1307, 0.3081
_FIT_STEP, _FIT_STEPS = 0.05, 100  # of Adam, to fit a client's own output layer for the evaluation
_OWN = {"hessian_step": 0.01}  # the features of clients with two labels grow, and the curvature with them
SETTINGS = {
    "digits": _Setting(
        digit_images,
        clients=50,
        width=64,
        rounds=200,
        defaults={
            "upper_step": 0.03,
            "lower_step": 0.1,
            "lower_local_steps": 10,
            "neumann_terms": 5,
            "batch_size": 8,
            "local_steps": 10,
            "linear_step": 0.1,
        },
        single={"step": 0.1, "local_steps": 10, "batch_size": 8},
    ),
    "mnist": _Setting(
        mnist_images,
        clients=100,
        width=200,
        rounds=500,
        defaults={
            "upper_step": 0.01,
            "lower_step": 0.01,
            "lower_local_steps": Epochs(5),
            "neumann_terms": 5,
            "batch_size": 64,
            "local_steps": 10,
            "linear_step": 0.01,
        },
        single={"step": 0.01, "local_steps": Epochs(5), "batch_size": 64},
    ),
}


def _setting(data: str) -> _Setting:
    if data not in SETTINGS:
        raise ValueError(f"data={data!r} is not known; there are: {', '.join(SETTINGS)}.")
    return SETTINGS[data]


def implicit_share(problem: Bilevel, clients: Clients, seed: int, samples: int = 2000) -> Any:
    """share(x, y): the norm of the hypergradient's implicit part over that of its direct part, on a fixed sample."""
    rng = np.random.default_rng([seed, 2])

    def some(rows: Any) -> Any:
        own = rng.permutation(len(jax.tree.leaves(rows)[0]))[:samples]
        return jax.tree.map(lambda a: a[own], rows)

    lower, upper = some(clients.lower.rows), some(clients.upper.rows)
    return lambda x, y: _shares(problem, x, y, lower, upper)


@partial(jax.jit, static_argnums=0)
def _shares(problem: Bilevel, x: Any, y: Any, lower: Any, upper: Any) -> dict[str, Float[Array, ""]]:
    seen = lower if problem.features is None else problem.features(x, lower)
    f_x, f_y = jax.grad(problem.f, (0, 1))(x, y, upper)
    g_y = lambda y: jax.grad(problem.g_seen, 1)(x, y, seen)
    product = lambda v, _: jax.jvp(g_y, (y,), (v,))[1]
    loop = lambda n, body, carry: jax.lax.fori_loop(0, n, body, carry)
    key = jax.random.key(0)
    largest = tree.norm(inverse_hessian.power_iteration(loop, product, y, 10, key))

    def share(p: Any) -> Float[Array, ""]:
        implicit = jax.grad(lambda x: jax.jvp(lambda y: problem.g(x, y, lower), (y,), (p,))[1])(x)
        return tree.norm(implicit) / tree.norm(f_x)

    series = lambda step: inverse_hessian.solve("sum", loop, product, f_y, step, 5, key)
    return {
        "implicit_share": share(inverse_hessian.solve("cg", loop, product, f_y, 0.0, 10, key)),
        "implicit_share_series": share(series(1 / (2 * largest))),
        "implicit_share_series_01": share(series(0.01)),
    }


def own_metrics(problem: Bilevel, lower: Any, upper: Any, y: Any, images: np.ndarray, labels: np.ndarray) -> Any:
    """evaluate(x, _) where every client has an output layer of its own, which is fitted first, from y on."""
    longest = max(len(own["label"]) for own in lower)
    fill = lambda a: np.concatenate([a, np.zeros((longest - len(a), *a.shape[1:]), a.dtype)])
    rows = jax.tree.map(lambda *each: jnp.stack([fill(a) for a in each]), *lower)
    mask = jnp.stack([np.arange(longest) < len(own["label"]) for own in lower])
    every = [np.concatenate([a["label"], b["label"]]) for a, b in zip(lower, upper, strict=True)]
    mix = np.stack([np.bincount(own, minlength=10) / len(own) for own in every])
    weight = mix[:, labels] / np.bincount(labels, minlength=10)[labels]  # of a test image for a client
    weight = jnp.asarray(weight / weight.sum(axis=1, keepdims=True), jnp.float32)
    test = {"image": jnp.asarray(images), "label": jnp.asarray(labels)}
    return lambda x, _: _own_metrics(problem, x, y, rows, mask, test, weight)


@partial(jax.jit, static_argnums=0)
def _own_metrics(problem: Bilevel, x: Any, y: Any, rows: Any, mask: Any, test: Any, weight: Any) -> dict[str, Array]:
    optimizer = optax.adam(_FIT_STEP)

    def one(rows: Any, mask: Any, weight: Any) -> tuple[Array, Array]:
        seen = hidden(x, rows)

        def loss(y: Any) -> Float[Array, ""]:  # on the marked rows, each alone as a batch
            alone = jax.vmap(lambda row: problem.g_seen(x, y, jax.tree.map(lambda a: a[None], row)))(seen)
            return jnp.sum(alone, where=mask) / jnp.sum(mask)

        def step(_: Any, carry: Any) -> Any:
            change, state = optimizer.update(jax.grad(loss)(carry[0]), carry[1])
            return optax.apply_updates(carry[0], change), state

        own = jax.lax.fori_loop(0, _FIT_STEPS, step, (y, optimizer.init(y)))[0]
        scores = hidden(x, test)["image"] @ own["w"] + own["b"]
        wrong = optax.softmax_cross_entropy_with_integer_labels(scores, test["label"])
        return weight @ (jnp.argmax(scores, axis=1) == test["label"]), weight @ wrong

    accuracy, loss = jax.vmap(one)(rows, mask, weight)
    return {"accuracy": jnp.mean(accuracy), "loss": jnp.mean(loss)}


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
