"""Image models: records with `init(key)`, which returns plain arrays, and `apply(params, images)`, the scores."""

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from rookery.base.draws import symmetric


@dataclass(frozen=True)
class MLP:
    """Linear layers with ReLU between them, initialised as in PyTorch: U(−1/√fan-in, 1/√fan-in).

    Arguments:
        widths: the widths of the input, the hidden layers and the output.

    >>> params = MLP((64, 32, 10)).init(jax.random.key(0))
    >>> sum(leaf.size for leaf in jax.tree.leaves(params))
    2410
    """

    widths: tuple[int, ...]

    def init(self, key: Array) -> tuple[Any, ...]:
        """Return one {"w", "b"} for each layer."""
        layers = []
        for fan_in, out in pairwise(self.widths):
            key, kw, kb = jax.random.split(key, 3)
            draw = lambda k, shape, bound=fan_in**-0.5: symmetric(k, shape, bound)
            layers.append({"w": draw(kw, (fan_in, out)), "b": draw(kb, (out,))})
        return tuple(layers)

    def apply(self, params: Any, images: Float[Array, "n ..."]) -> Float[Array, "n classes"]:
        """Return the scores."""
        *hidden, last = params
        values = images.reshape(len(images), -1)
        for layer in hidden:
            values = jax.nn.relu(values @ layer["w"] + layer["b"])
        return values @ last["w"] + last["b"]


@dataclass(frozen=True)
class ResNet:
    """The residual network for CIFAR of He et al. (2016), with 6·blocks + 2 layers; ResNet-20 by default.

    Three stages of blocks of two 3×3 convolutions, with the channels doubled and the image halved from stage to stage;
    shortcuts without parameters (zeros for the new channels); He-normal initialisation.

    Departure: group normalisation instead of batch normalisation, because a client's batches are small and averaged
    running statistics would be the weak point. The number of parameters is the same: 269,722 with 10 classes.

    Arguments:
        classes: the number of scores.
        blocks: the number of blocks in each of the three stages.
        width: the number of channels of the first stage.
        groups: the number of groups that the channels are normalised in.

    >>> params = jax.eval_shape(ResNet().init, jax.random.key(0))
    >>> sum(leaf.size for leaf in jax.tree.leaves(params))
    269722
    """

    classes: int = 10
    blocks: int = 3
    width: int = 16
    groups: int = 8

    def init(self, key: Array) -> Any:
        """Return {"first": a convolution, "blocks": two for each block, "last": a linear layer}."""
        keys = iter(jax.random.split(key, 2 + 6 * self.blocks))

        def normal(shape: tuple[int, ...], fan_in: int) -> Array:
            return jax.random.normal(next(keys), shape) * (2 / fan_in) ** 0.5

        def convolution(channels: int, out: int) -> Any:
            kernel = normal((9 * channels, out), 9 * channels)
            return {"kernel": kernel, "scale": jnp.ones(out), "shift": jnp.zeros(out)}

        first = convolution(3, self.width)
        blocks, channels = [], self.width
        for stage in range(3):
            out = self.width * 2**stage
            for _ in range(self.blocks):
                blocks.append((convolution(channels, out), convolution(out, out)))
                channels = out
        last = {"w": normal((channels, self.classes), channels), "b": jnp.zeros(self.classes)}
        return {"first": first, "blocks": blocks, "last": last}

    def apply(self, params: Any, images: Float[Array, "n height width 3"]) -> Float[Array, "n classes"]:
        """Return the scores."""
        values = jax.nn.relu(self._convolve(params["first"], images))
        for i, (one, two) in enumerate(params["blocks"]):
            stride = 2 if i % self.blocks == 0 and i > 0 else 1
            inside = jax.nn.relu(self._convolve(one, values, stride))
            short = values[:, ::stride, ::stride]
            more = inside.shape[-1] - short.shape[-1]
            short = jnp.pad(short, ((0, 0), (0, 0), (0, 0), (more // 2, more - more // 2)))
            values = jax.nn.relu(short + self._convolve(two, inside))
        return jnp.mean(values, axis=(1, 2)) @ params["last"]["w"] + params["last"]["b"]

    def _convolve(self, layer: Any, values: Float[Array, "n h w c"], stride: int = 1) -> Float[Array, "n h w c"]:
        """Apply a 3×3 convolution and its normalisation."""
        values = _convolved(values, layer["kernel"], 3, stride)
        return _normalised(values, self.groups) * layer["scale"] + layer["shift"]


@dataclass(frozen=True)
class CNN:
    """The small network of the paper on adaptively weighted nodes, its Appendix G.

    Two convolutions, each with batch normalisation and ReLU, and a linear layer. The first has kernels of 4×4, stride
    4, padding 1 and as many channels as the image; the second 2×2, stride 2, padding 1 and 2 channels, or 5 for colour
    images. 28×28 → 7×7 → 4×4·2 = 32 features; 32×32·3 → 8×8·3 → 5×5·5 = 125. Initialised as in PyTorch:
    U(−1/√fan-in, 1/√fan-in). The convolutions have no bias: the normalisation would remove it.

    Values are normalised by the statistics of the batch, with a learnt scale and shift; there are no running averages.
    The loss on a batch is therefore not a mean over its samples: clients need equal sizes of at least the batch size,
    which `solve` checks. To evaluate, pass the whole set in one call: it is normalised by its own statistics.

    Arguments:
        channels: 1, or 3 for colour.
        size: the width and height of the image.
        classes: the number of scores.

    >>> params = CNN().init(jax.random.key(0))
    >>> CNN().apply(params, jnp.zeros((5, 28, 28))).shape, sum(leaf.size for leaf in jax.tree.leaves(params))
    ((5, 10), 360)
    """

    channels: int = 1
    size: int = 28
    classes: int = 10

    def init(self, key: Array) -> Any:
        """Return {"convolutions": (two), "last": a linear layer}."""
        k1, k2, k3, k4 = jax.random.split(key, 4)
        uniform = lambda k, shape, fan_in: symmetric(k, shape, fan_in**-0.5)

        def convolution(k: Array, kernel: int, out: int) -> Any:
            fan_in = kernel**2 * self.channels
            return {"kernel": uniform(k, (fan_in, out), fan_in), "scale": jnp.ones(out), "shift": jnp.zeros(out)}

        out = 2 if self.channels == 1 else 5
        features = _patches(_patches(self.size, 4), 2) ** 2 * out
        last = {"w": uniform(k3, (features, self.classes), features), "b": uniform(k4, (self.classes,), features)}
        return {"convolutions": (convolution(k1, 4, self.channels), convolution(k2, 2, out)), "last": last}

    def apply(self, params: Any, images: Float[Array, "n h w *c"]) -> Float[Array, "n classes"]:
        """Return the scores."""
        values = images.reshape(len(images), self.size, self.size, self.channels)
        for layer, kernel in zip(params["convolutions"], (4, 2), strict=True):
            values = _convolved(values, layer["kernel"], kernel, kernel)
            mean, variance = jnp.mean(values, axis=(0, 1, 2)), jnp.var(values, axis=(0, 1, 2))
            values = (values - mean) * jax.lax.rsqrt(variance + 1e-5) * layer["scale"] + layer["shift"]
            values = jax.nn.relu(values)
        return values.reshape(len(images), -1) @ params["last"]["w"] + params["last"]["b"]


def _patches(size: int, kernel: int) -> int:
    """Return how many patches fit side by side, with padding 1 and the kernel's width as the stride."""
    return (size + 2 - kernel) // kernel + 1


def _convolved(
    values: Float[Array, "n h w c"], kernel: Float[Array, "d o"], width: int, stride: int
) -> Float[Array, "n a b o"]:
    """Convolve with padding 1. The kernel is a matrix: width × width × c rows, a column for each output."""
    dtype = jnp.result_type(values, kernel)
    values, kernel = values.astype(dtype), kernel.astype(dtype).reshape(width, width, values.shape[-1], -1)
    layout = ("NHWC", "HWIO", "NHWC")
    return jax.lax.conv_general_dilated(values, kernel, (stride, stride), ((1, 1), (1, 1)), dimension_numbers=layout)


def _normalised(values: Float[Array, "n h w c"], groups: int) -> Float[Array, "n h w c"]:
    """Normalise to mean 0 and variance 1 over the pixels and channels of each group."""
    n, height, width, channels = values.shape
    each = values.reshape(n, height, width, groups, channels // groups)
    mean = jnp.mean(each, axis=(1, 2, 4), keepdims=True)
    variance = jnp.var(each, axis=(1, 2, 4), keepdims=True)
    return ((each - mean) * jax.lax.rsqrt(variance + 1e-5)).reshape(values.shape)
