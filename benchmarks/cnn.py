"""Time a round of FedAvg on a convolutional network: python benchmarks/cnn.py [--clients 1000 --cohort 50].

The network of pfl's CIFAR-10 benchmark, written with plain `lax` convolutions and pooling: 3×3 convolutions to 32 and
64 channels without padding, ReLU after each, 2×2 max pooling, dense layers to 128 and 10; 1.6 million parameters in
float32. A client has 50 random images of 32×32×3 and takes five steps with batches of 10; 10 of 100 clients a round.
`benchmarks/cnn_pfl.py` is the same in pfl. --xla adds a run without the rewrite of convolutions (a minute).
"""

import argparse
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import rookery as rk
from rookery.engines.engine import Job

IMAGES, BATCH = 50, 10


def init(seed: int) -> Any:
    """Return the network's parameters."""
    rng = np.random.default_rng(seed)
    shapes = {"first": (3, 3, 3, 32), "second": (3, 3, 32, 64), "third": (14 * 14 * 64, 128), "last": (128, 10)}
    draw = lambda shape: rng.normal(0, (2 / np.prod(shape[:-1])) ** 0.5, shape).astype(np.float32)
    return {name: {"w": draw(shape), "b": np.zeros(shape[-1], np.float32)} for name, shape in shapes.items()}


def scores(params: Any, images: jax.Array) -> jax.Array:
    """Return the network's scores for images [n, 32, 32, 3]."""
    values = images
    for name in ("first", "second"):
        layer = params[name]
        layout = ("NHWC", "HWIO", "NHWC")
        values = lax.conv_general_dilated(values, layer["w"], (1, 1), "VALID", dimension_numbers=layout)
        values = jax.nn.relu(values + layer["b"])
    values = lax.reduce_window(values, -jnp.inf, lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "VALID")
    values = values.reshape(len(images), -1)
    values = jax.nn.relu(values @ params["third"]["w"] + params["third"]["b"])
    return values @ params["last"]["w"] + params["last"]["b"]


def loss(params: Any, batch: Any) -> jax.Array:
    """The cross-entropy."""
    found = jax.nn.log_softmax(scores(params, batch["image"]))
    return -jnp.mean(jnp.take_along_axis(found, batch["label"][:, None], axis=1))


def job(number: int, cohort: int) -> Job:
    """Return the job to time."""
    rng = np.random.default_rng(0)
    one = lambda: {
        "image": rng.normal(size=(IMAGES, 32, 32, 3)).astype(np.float32),
        "label": rng.integers(0, 10, IMAGES).astype(np.int32),
    }
    clients = rk.Clients(upper=[one() for _ in range(number)])
    method = rk.FedAvg(step=0.01, local_steps=IMAGES // BATCH, batch_size=BATCH)
    return Job(rk.SingleLevel(loss), clients, method, (init(0), ()), cohort)


def seconds(engine: rk.Simulation, job: Job, rounds: int) -> tuple[float, float, float]:
    """Return the seconds to the end of the first round, of the best later round, and of processor time in a round."""
    session, begin = engine.open(job), time.perf_counter()
    session.init()
    session.advance(1)
    first, each = time.perf_counter() - begin, []
    at_once = 1 if jax.default_backend() == "cpu" else 20
    session.advance(at_once)
    used = time.process_time()
    for _ in range(rounds):
        begin = time.perf_counter()
        session.advance(at_once)
        jax.block_until_ready(session.state)
        each.append((time.perf_counter() - begin) / at_once)
    return first, min(each), (time.process_time() - used) / (rounds * at_once)


def main() -> None:
    """Time a round."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--clients", type=int, default=100)
    parser.add_argument("--cohort", type=int, default=10)
    parser.add_argument("--block", default="auto", help="clients side by side")
    parser.add_argument("--xla", action="store_true", help="also as XLA convolves")
    options = parser.parse_args()
    work = job(options.clients, options.cohort)
    block = options.block if options.block == "auto" else int(options.block)
    for convolutions, rounds in (("auto", options.rounds), *([("xla", 1)] if options.xla else [])):
        first, each, used = seconds(rk.Simulation(block=block, convolutions=convolutions), work, rounds)
        print(
            f'convolutions="{convolutions}": {1e3 * each:.2f} ms a round, {1e3 * used:.0f} ms of the processors; '
            f"the first, with compilation, {first:.1f} s"
        )


if __name__ == "__main__":
    main()
