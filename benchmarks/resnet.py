"""Compare an Equinox network with the same network of ours: python benchmarks/resnet.py [--blocks 3 --width 16].

The body of a residual network for CIFAR is the upper variable, its last layer the lower one, and FedNest tunes both. A
round is timed with `rookery.models.ResNet`, whose images are rows of pixels with their channels, and with Equinox's
layers, image by image and channels first. Both start with the same numbers and give the same losses.
"""

import argparse
import time
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

import rookery as rk
from rookery.engines.engine import Job
from rookery.problems.models import ResNet
from rookery.problems.variables import adapt

IMAGES, BATCH, CLIENTS, COHORT = 64, 16, 20, 5


class Layer(eqx.Module):
    """A 3×3 convolution, and its normalisation."""

    convolution: eqx.nn.Conv2d
    norm: eqx.nn.GroupNorm

    def __init__(self, layer: Any, channels: int, stride: int, groups: int) -> None:
        kernel = layer["kernel"].reshape(3, 3, channels, -1).transpose(3, 2, 0, 1)
        made = eqx.nn.Conv2d(channels, len(kernel), 3, stride, 1, use_bias=False, key=jax.random.key(0))
        self.convolution = eqx.tree_at(lambda c: c.weight, made, kernel)
        self.norm = eqx.nn.GroupNorm(groups, len(kernel))

    def __call__(self, image: Any) -> Any:
        return self.norm(self.convolution(image))


class Body(eqx.Module):
    """All layers but the last, for one image [channels, height, width]."""

    first: Layer
    blocks: list[tuple[Layer, Layer]]

    def __init__(self, net: ResNet, params: Any) -> None:
        self.first, self.blocks, channels = Layer(params["first"], 3, 1, net.groups), [], net.width
        for i, (one, two) in enumerate(params["blocks"]):
            stride, out = 2 if i % net.blocks == 0 and i > 0 else 1, one["scale"].size
            self.blocks.append((Layer(one, channels, stride, net.groups), Layer(two, out, 1, net.groups)))
            channels = out

    def __call__(self, image: Any) -> Any:
        values = jax.nn.relu(self.first(image))
        for one, two in self.blocks:
            inside = jax.nn.relu(one(values))
            step = values.shape[-1] // inside.shape[-1]
            more = len(inside) - len(values)
            short = jnp.pad(values[:, ::step, ::step], ((more // 2, more - more // 2), (0, 0), (0, 0)))
            values = jax.nn.relu(short + two(inside))
        return jnp.mean(values, axis=(1, 2))


def jobs(net: ResNet, size: int) -> dict[str, Job]:
    """Return both jobs, on the same images and with the same start."""
    rng = np.random.default_rng(0)
    rows = lambda n: {"image": rng.normal(size=(n, size, size, 3)).astype(np.float32), "label": rng.integers(0, 10, n)}
    clients = rk.Clients([rows(IMAGES) for _ in range(CLIENTS)], [rows(BATCH) for _ in range(CLIENTS)])
    params = net.init(jax.random.key(0))
    last = params.pop("last")

    def ours(x: Any, y: Any, images: Any) -> Any:
        return net.apply({**x, "last": y}, images)

    def theirs(x: Any, y: Any, images: Any) -> Any:
        return jax.vmap(x)(jnp.moveaxis(images, -1, 1)) @ y["w"] + y["b"]

    made = {}
    for name, scores, x in (("ours", ours, params), ("Equinox", theirs, Body(net, params))):

        def loss(x: Any, y: Any, batch: Any, scores: Any = scores) -> Any:
            log_shares = jax.nn.log_softmax(scores(x, y, batch["image"]))
            return -jnp.mean(jnp.take_along_axis(log_shares, batch["label"][:, None], axis=1))

        def lower(x: Any, y: Any, batch: Any, loss: Any = loss) -> Any:
            return loss(x, y, batch) + 0.005 * sum(jnp.sum(a**2) for a in jax.tree.leaves(y))

        adapted = adapt(rk.Bilevel(loss, lower), (x, last))
        method = rk.FedNest(
            upper_step=0.01, lower_step=0.01, lower_local_steps=2, upper_local_steps=1, neumann_terms=2,
            hessian_step=0.1, batch_size=BATCH,
        )  # fmt: skip
        made[name] = Job(adapted.problem, clients, method, adapted.init, COHORT)
    return made


def main() -> None:
    """Time a round of each, alternately."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--blocks", type=int, default=1)
    parser.add_argument("--width", type=int, default=8)
    parser.add_argument("--size", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    sessions, seconds, states = {}, {}, {}
    for name, job in jobs(ResNet(blocks=options.blocks, width=options.width), options.size).items():
        sessions[name], begin = rk.Simulation().open(job), time.perf_counter()
        sessions[name].init()
        sessions[name].advance(1)
        states[name] = jax.device_get(sessions[name].state.y)
        print(f"{name}: the first round, with compilation, {time.perf_counter() - begin:.1f} s")
    apart = max(abs(a - b).max() for a, b in zip(*map(jax.tree.leaves, states.values()), strict=True))
    at_once = 1 if jax.default_backend() == "cpu" else 10
    for _ in range(options.rounds):
        for name, session in sessions.items():
            begin = time.perf_counter()
            session.advance(at_once)
            jax.block_until_ready(session.state)
            seconds.setdefault(name, []).append((time.perf_counter() - begin) / at_once)
    best = {name: min(each) for name, each in seconds.items()}
    print(f"last layers apart after a round: {apart:.1e}")
    print(", ".join(f"{name} {value:.4f} s" for name, value in best.items()), end="")
    print(f" a round: Equinox's over ours {best['Equinox'] / best['ours']:.2f}")


if __name__ == "__main__":
    main()
