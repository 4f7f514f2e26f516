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
from rookery.base.draws import seed_key, symmetric
from rookery.data import PARTITIONS
from rookery.data.clients import Clients
from rookery.language.fed import Epochs
from rookery.parts import inverse_hessian
from rookery.problems.problems import Bilevel, Scope, SingleLevel
from rookery.tasks.images import Images, digit_images, mnist_images
from rookery.tasks.task import Task, check_share, check_word, choice, split, take


def hidden(x: Any, batch: Any) -> Any:
    """Replace the images of a batch by the hidden layer's outputs: the classifier's inputs."""
    return {**batch, "image": jax.nn.relu(batch["image"] @ x["w"] + x["b"])}


def _cross_entropy(x: Any, y: Any, batch: Any) -> Float[Array, ""]:
    scores = batch["image"] @ y["w"] + y["b"]
    marked = jax.nn.one_hot(batch["label"], scores.shape[-1], dtype=scores.dtype)  # its gradient needs no scatter
    return jnp.mean(optax.softmax_cross_entropy(scores, marked))


def _joint(z: Any, batch: Any) -> Float[Array, ""]:
    return _cross_entropy(z[0], z[1], hidden(z[0], batch))


def layers(key: Array, inputs: int, width: int, outputs: int) -> tuple[Any, Any]:
    """Return a hidden and an output layer, initialised like PyTorch's linear layers: U(−1/√fan-in, 1/√fan-in)."""
    keys = jax.random.split(key, 4)

    def layer(kw: Array, kb: Array, fan_in: int, out: int) -> Any:
        bound = fan_in**-0.5
        return {
            "w": symmetric(kw, (fan_in, out), bound),
            "b": symmetric(kb, (out,), bound),
        }

    return layer(keys[0], keys[1], inputs, width), layer(keys[2], keys[3], width, outputs)


@cache
def representation_problem(penalty: float = 0.0, l1: float = 0.0, scope: Scope = "global") -> Bilevel:
    """Return the problem: cross-entropy at both levels, plus penalty/2·‖y‖² + l1·‖y‖₁ at the lower level."""

    def of_size(x: Any, y: Any) -> Float[Array, ""]:
        square = 0.5 * penalty * (jnp.sum(y["w"] ** 2) + jnp.sum(y["b"] ** 2))
        return square + l1 * (jnp.sum(jnp.abs(y["w"])) + jnp.sum(jnp.abs(y["b"]))) if l1 else square

    return Bilevel(_cross_entropy, _cross_entropy, lower_scope=scope, features=hidden, penalty=of_size)


class _Setting(NamedTuple):
    """Defaults for a data set."""

    images: Callable[..., Images]
    clients: int
    width: int
    rounds: int
    upper_step: float
    lower_step: float
    local_steps: int | Epochs
    batch_size: int


SETTINGS = {
    "digits": _Setting(digit_images, 50, 64, 200, upper_step=0.03, lower_step=0.1, local_steps=10, batch_size=8),
    "mnist": _Setting(mnist_images, 100, 200, 500, 0.01, lower_step=0.01, local_steps=Epochs(5), batch_size=64),
}
_FIT_STEP, _FIT_STEPS = 0.05, 100  # for Adam, to fit a client's own output layer before it is evaluated


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
    """Learn an MLP for handwritten digits: the hidden layer at the upper level, the output layer at the lower.

    Arguments:
        clients: the number of clients (None: 50 for digits, 100 for MNIST); the samples of each are split at random
            into training (lower) and validation (upper) data.
        partition: "iid", "shards" (two label shards per client) or "dirichlet".
        width: width of the hidden layer (None: 64 for digits, 200 for MNIST).
        penalty: the lower level's penalty, penalty/2·‖y‖².
        seed: seed of the split and of the start.
        data: "digits", scikit-learn's bundled ones, 8×8; or "mnist", 28×28, standardised, at the sizes of Section 4.1
            of the FedNest paper and with the steps of its authors' scripts.
        equal: leave out a few samples so that all clients have as many as the smallest; code for clients of one size
            is compiled once and needs no masks.
        share: also evaluate how much of the hypergradient is implicit, ‖∇²_xy g·p‖/‖∇_x f‖, on at most 2,000 samples of
            each level from all clients; p ≈ [∇²_y g]⁻¹∇_y f comes from 10 iterations of conjugate gradients
            (`implicit_share`), or from a Neumann series with only N = 5 terms and 1/ℓ = 1/(2‖∇²_y g‖)
            (`implicit_share_series`) or 1/ℓ = .01 (`implicit_share_series_01`).
        data_dir: the folder of the MNIST files; see `rookery.data.load`.
        train: the share of a client's samples used for training.
        l1: the lower level's penalty l1·‖y‖₁.
        first: use only the first images: (the number of training images, the number of test images).
        train_metrics: also evaluate on training images, at most 10,000 from all clients.
        scope: "global", one output layer for all; or "client", one for each client, which stays there.

    `Task.evaluate` returns the accuracy and the loss on test images that no client has. With scope "client", it fits
    each client's output layer to its training data, and returns the mean over the clients of their accuracies and
    losses on test images in the client's own mix of labels.
    """
    check_word("scope", scope, "global", "client")
    if scope == "client" and (share or train_metrics):
        raise ValueError('share and train_metrics need one output layer for all; leave them out with scope="client".')
    settings = choice("data", data, SETTINGS)
    divide = choice("partition", partition, PARTITIONS)
    clients = settings.clients if clients is None else clients
    width = settings.width if width is None else width
    check_seed(seed)
    check_counts(clients=clients, width=width)
    check_amounts(penalty=penalty, l1=l1)
    check_share(train=train)
    images, labels, test_images, test_labels = settings.images(seed, data_dir)
    if first is not None:
        if np.shape(first) != (2,):
            raise ValueError(f"first must be a pair, the images to train with and to test with; got {first!r}.")
        check_counts(**{f"first[{i}]": count for i, count in enumerate(first)})
        images, labels = images[: first[0]], labels[: first[0]]
        test_images, test_labels = test_images[: first[1]], test_labels[: first[1]]
    halves = split(np.random.default_rng([seed, 1]), divide(labels, clients, seed), train, equal, rounding=int)
    rows = {"image": images, "label": labels}
    lower, upper = ([take(rows, half[level]) for half in halves] for level in (0, 1))
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
    step, local_steps, batch_size = settings.lower_step, settings.local_steps, settings.batch_size
    defaults = {
        "upper_step": settings.upper_step, "lower_step": step, "lower_local_steps": local_steps, "neumann_terms": 5,
        "batch_size": batch_size, "local_steps": 10, "linear_step": step,
    }  # fmt: skip
    if scope == "client":
        defaults["hessian_step"] = 0.01  # with two labels a client, features and curvature grow
    pooled = [jax.tree.map(lambda a, b: np.concatenate([a, b]), a, b) for a, b in zip(lower, upper, strict=True)]
    return Task(
        name="hyperrep",
        problem=problem,
        clients=federation,
        init=(x, y),
        evaluate=evaluate,
        metric="accuracy",
        rounds=settings.rounds,
        cohort=min(10, clients),
        defaults=defaults,
    ).with_single_level(
        problem=_single_level(),
        clients=Clients(upper=pooled),
        evaluate=lambda z, _: metrics(*z),
        defaults={"step": step, "local_steps": local_steps, "batch_size": batch_size},
    )


def _with_prefix(evaluate: Any, more: Any, prefix: str) -> Any:
    """Return both evaluations in one, with a prefix to the names of the second one's metrics."""
    return lambda x, y: {**evaluate(x, y), **{f"{prefix}{name}": value for name, value in more(x, y).items()}}


@cache
def _single_level() -> SingleLevel:
    return SingleLevel(_joint)


def implicit_share(problem: Bilevel, clients: Clients, seed: int, samples: int = 2000) -> Any:
    """Return share(x, y): the norm of the hypergradient's implicit part over that of its direct part, on a sample."""
    rng = np.random.default_rng([seed, 2])

    def sample(rows: Any) -> Any:
        index = rng.permutation(len(jax.tree.leaves(rows)[0]))[:samples]
        return jax.tree.map(lambda a: a[index], rows)

    lower, upper = sample(clients.lower.rows), sample(clients.upper.rows)
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
    """Return evaluate(x, _) for output layers of the clients' own, which are fitted first, starting from y."""
    longest = max(len(rows["label"]) for rows in lower)
    pad = lambda a: np.concatenate([a, np.zeros((longest - len(a), *a.shape[1:]), a.dtype)])
    rows = jax.tree.map(lambda *clients: jnp.stack([pad(a) for a in clients]), *lower)
    mask = jnp.stack([np.arange(longest) < len(rows["label"]) for rows in lower])
    client_labels = [np.concatenate([a["label"], b["label"]]) for a, b in zip(lower, upper, strict=True)]
    mix = np.stack([np.bincount(of_client, minlength=10) / len(of_client) for of_client in client_labels])
    weight = mix[:, labels] / np.bincount(labels, minlength=10)[labels]  # of each test image, for each client
    weight = jnp.asarray(weight / weight.sum(axis=1, keepdims=True), jnp.float32)
    test = {"image": jnp.asarray(images), "label": jnp.asarray(labels)}
    return lambda x, _: _own_metrics(problem, x, y, rows, mask, test, weight)


@partial(jax.jit, static_argnums=0)
def _own_metrics(problem: Bilevel, x: Any, y: Any, rows: Any, mask: Any, test: Any, weight: Any) -> dict[str, Array]:
    optimizer = optax.adam(_FIT_STEP)

    def one(rows: Any, mask: Any, weight: Any) -> tuple[Array, Array]:
        seen = hidden(x, rows)

        def loss(y: Any) -> Float[Array, ""]:  # the mean over the unmasked rows, each as a batch of one
            losses = jax.vmap(lambda row: problem.g_seen(x, y, jax.tree.map(lambda a: a[None], row)))(seen)
            return jnp.sum(losses, where=mask) / jnp.sum(mask)

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
    """Return evaluate(x, y): accuracy and loss on these images."""
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
