"""The two networks for the scripts that use JAX, without a library of networks. They are not counted as their lines."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

SHAPES = {
    "mlp": {"hidden": (784, 200), "last": (200, 10)},
    "cnn": {"first": (3, 3, 3, 32), "second": (3, 3, 32, 64), "hidden": (14 * 14 * 64, 128), "last": (128, 10)},
}


def init(name: str, seed: int = 0) -> Any:
    """Return the parameters, drawn like PyTorch's."""
    rng, params = np.random.default_rng(seed), {}
    for layer, shape in SHAPES[name].items():
        bound = np.prod(shape[:-1]) ** -0.5
        draw = lambda *shape: rng.uniform(-bound, bound, shape).astype(np.float32)
        params[layer] = {"w": draw(*shape), "b": draw(shape[-1])}
    return params


def scores(params: Any, images: jax.Array) -> jax.Array:
    """Return the scores of the classes."""
    values = images
    for name in ("first", "second"):
        if name in params:
            layout = ("NHWC", "HWIO", "NHWC")
            values = lax.conv_general_dilated(values, params[name]["w"], (1, 1), "VALID", dimension_numbers=layout)
            values = jax.nn.relu(values + params[name]["b"])
    if "first" in params:
        values = lax.reduce_window(values, -jnp.inf, lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "VALID")
    values = values.reshape(len(images), -1)
    values = jax.nn.relu(values @ params["hidden"]["w"] + params["hidden"]["b"])
    return values @ params["last"]["w"] + params["last"]["b"]


def losses(scores: jax.Array, labels: jax.Array) -> jax.Array:
    """Return the cross-entropy of each sample."""
    return -jnp.take_along_axis(jax.nn.log_softmax(scores), labels[:, None], axis=1)[:, 0]


@jax.jit
def accuracy(params: Any, images: jax.Array, labels: jax.Array) -> jax.Array:
    """Return the share of images whose class has the highest score."""
    return jnp.mean(scores(params, images).argmax(1) == labels)


def upper_loss(x: jax.Array, z: jax.Array, batch: Any) -> jax.Array:
    """The cross-entropy of the linear model z on forest covers."""
    return jnp.mean(losses(batch["x"] @ z, batch["y"]))


def lower_loss(x: jax.Array, z: jax.Array, batch: Any) -> jax.Array:
    """The same plus a penalty for each class, exp(x)."""
    return upper_loss(x, z, batch) + 0.5 * jnp.exp(x) @ (z**2).sum(0)


@jax.jit
def cover_accuracy(z: jax.Array, features: jax.Array, labels: jax.Array) -> jax.Array:
    """Return the share of samples whose class has the highest score."""
    return jnp.mean((features @ z).argmax(1) == labels)
