"""Measure the speed of this machine: the FedNest paper's hyper-representation round against a yardstick.

The yardstick is one float32 product of 10×300×784 with 784×200, timed in the same run, so that the speed of the machine
cancels out. If PyTorch is installed, a plain loop over the clients with the same arithmetic is timed, too. A round of
ASFBO at the size of its own paper is compared with a round of FedNest by their arithmetic.
"""

import time
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from rookery.algorithms import ASFBO, FedNest
from rookery.data.clients import Clients
from rookery.engines import default_engine
from rookery.engines.engine import Job
from rookery.language.fed import Epochs
from rookery.tasks.hyperrep import layers, representation_problem

COHORT, SAMPLES, INPUTS, WIDTH, CLASSES, BATCH = 10, 300, 784, 200, 10, 64
PASSES, TERMS, STEP, HESSIAN_STEP = 5, 5, 0.01, 0.1
TRAINING, VALIDATION, LOCAL_STEPS = 450, 150, (5, 15)  # in the ASFBO paper


def measure(
    repeats: int = 7, torch: bool | None = None, scale: bool = True, single_loop: bool = True
) -> dict[str, Any]:
    """Return all measurements, times in seconds as the best of `repeats`; `torch` None: if it is installed."""
    product, the_round = yardstick(), paper_round(100)
    begin = time.perf_counter()
    the_round(1)
    compilation = time.perf_counter() - begin
    at_once = rounds_at_once()
    contenders: dict[str, Callable[[], Any]] = {"yardstick": product, "round": lambda: the_round(at_once)}
    if torch is not False:
        loop = torch_round()
        if loop is None and torch:
            raise ValueError("PyTorch is not installed, and the comparison needs it. Run pip install torch==2.13.0.")
        if loop is not None:
            contenders["torch"] = loop
    best = interleaved(contenders, repeats)
    best["round"] /= at_once
    result: dict[str, Any] = {
        "yardstick_seconds": best["yardstick"],
        "round_seconds": best["round"],
        "round_in_yardsticks": best["round"] / best["yardstick"],
        "compilation_seconds": compilation,
        "torch_seconds": best.get("torch"),
        "torch_in_rounds": best["torch"] / best["round"] if "torch" in best else None,
    }
    if scale:
        small, large = 1_000, 100_000
        sized = {str(n): cohort_round(n) for n in (small, large)}
        for advance in sized.values():
            advance(1)
        times = interleaved(_times(sized, at_once), repeats)
        result["seconds_1000_clients"] = times[str(small)] / at_once
        result["seconds_100000_clients"] = times[str(large)] / at_once
        result["growth_1000_to_100000_clients"] = times[str(large)] / times[str(small)]
    return result | (single_loop_rounds(repeats) if single_loop else {})


def rounds_at_once() -> int:
    """Return the number of rounds in one call: more on a GPU, so that the call itself does not count."""
    return 5 if jax.default_backend() == "cpu" else 50


def single_loop_rounds(repeats: int) -> dict[str, float]:
    """Time ASFBO and FedNest on 10 of 100 clients × 450 + 150 samples, and compare with their arithmetic.

    ASFBO takes τ_i = 15 steps at every client, or a number drawn from 5..15; then the slowest client sets the pace.
    """
    data = _clients(100, TRAINING, INPUTS, VALIDATION)
    start = layers(jax.random.key(0), INPUTS, WIDTH, CLASSES)
    methods = {
        "fednest": _paper_method(),
        "equal": ASFBO(local_steps=LOCAL_STEPS[1], batch_size=BATCH),
        "drawn": ASFBO(local_steps=LOCAL_STEPS, batch_size=BATCH),
    }
    rounds = {name: _rounds(method, data, start, COHORT) for name, method in methods.items()}
    for advance in rounds.values():
        advance(1)
    k = rounds_at_once()
    best = {name: seconds / k for name, seconds in interleaved(_times(rounds, k), repeats).items()}
    ratio, counted = best["equal"] / best["fednest"], asfbo_products() / fednest_products()
    return {
        "asfbo_seconds": best["equal"],
        "asfbo_in_fednest_rounds": ratio,
        "asfbo_in_fednest_rounds_by_arithmetic": counted,
        "asfbo_over_arithmetic": ratio / counted,
        "asfbo_drawn_over_equal_steps": best["drawn"] / best["equal"],
    }


def asfbo_products() -> float:
    """Count a client's multiplications in a round of ASFBO: τ times ∇f, and ∇_y g with two products, on batches."""
    hidden, output = BATCH * INPUTS * WIDTH, BATCH * WIDTH * CLASSES
    gradient = 2 * hidden + 3 * output  # forward; back to both layers
    products = 2 * hidden + 6 * output  # forward, and along z; back to the output layer; both again for the tangents
    return LOCAL_STEPS[1] * (gradient + products)


def fednest_products() -> float:
    """Count the same for FedNest, which computes the hidden layer's output on the training data once a round."""
    hidden, output = INPUTS * WIDTH, WIDTH * CLASSES
    steps = -(-PASSES * TRAINING // BATCH)
    lower = TRAINING * (hidden + 2 * output) + (steps - 1) * 2 * BATCH * 2 * output  # the anchor, and SVRG's pairs
    system = BATCH * (hidden + 2 * output) + TERMS * BATCH * 4 * output  # ∇_y f, and the series
    return lower + system + BATCH * (2 * hidden + 3 * output + 2 * hidden + 5 * output)  # and both parts of h


def interleaved(contenders: dict[str, Callable[[], Any]], repeats: int) -> dict[str, float]:
    """Return the best time of each, taken in turn, so that a busy moment does not hit only one of them."""
    best = dict.fromkeys(contenders, float("inf"))
    for work in contenders.values():
        jax.block_until_ready(work())
    for _ in range(repeats):
        for name, work in contenders.items():
            begin = time.perf_counter()
            jax.block_until_ready(work())
            best[name] = min(best[name], time.perf_counter() - begin)
    return best


def _times(rounds: dict[str, Callable[[int], Any]], k: int) -> dict[str, Callable[[], Any]]:
    return {name: partial(advance, k) for name, advance in rounds.items()}


def yardstick() -> Callable[[], Any]:
    """Return a function that multiplies 10×300×784 with 784×200."""
    rng = np.random.default_rng(0)
    a = jnp.asarray(rng.normal(size=(COHORT, SAMPLES, INPUTS)), jnp.float32)
    b = jnp.asarray(rng.normal(size=(INPUTS, WIDTH)), jnp.float32)
    product = jax.jit(jnp.matmul)
    return lambda: product(a, b)


def paper_round(clients: int) -> Callable[[int], Any]:
    """Return rounds of FedNest: 300 + 300 samples a client, 10 clients, MLP 784-200-10, batch 64, 5 epochs, N = 5."""
    start = layers(jax.random.key(0), INPUTS, WIDTH, CLASSES)
    return _rounds(_paper_method(), _clients(clients, SAMPLES, INPUTS, SAMPLES), start, COHORT)


def _paper_method() -> FedNest:
    return FedNest(
        upper_step=STEP,
        lower_step=STEP,
        lower_local_steps=Epochs(PASSES),
        neumann_terms=TERMS,
        hessian_step=HESSIAN_STEP,
        batch_size=BATCH,
    )


def cohort_round(clients: int) -> Callable[[int], Any]:
    """Return rounds with a cohort of 100 out of many small clients."""
    method = FedNest(lower_local_steps=10, hessian_step=HESSIAN_STEP, batch_size=4)
    return _rounds(method, _clients(clients, 8, 32, 8), layers(jax.random.key(0), 32, 64, CLASSES), 100)


def _clients(clients: int, lower: int, inputs: int, upper: int) -> Clients:
    rng = np.random.default_rng(1)

    def level(samples: int) -> list[Any]:
        images = rng.random(size=(clients, samples, inputs), dtype=np.float32)
        labels = rng.integers(CLASSES, size=(clients, samples), dtype=np.int32)
        return [{"image": i, "label": l} for i, l in zip(images, labels, strict=True)]

    return Clients(lower=level(lower), upper=level(upper))


def _rounds(method: Any, data: Clients, start: Any, cohort: int) -> Callable[[int], Any]:
    session = default_engine().open(Job(representation_problem(), data, method, start, cohort))
    session.init()

    def rounds(k: int) -> Any:
        session.advance(k)
        return session.state

    return rounds


def torch_round() -> Callable[[], Any] | None:
    """Return the round as a plain loop over the clients in PyTorch, or None if PyTorch is not installed."""
    try:
        import torch
    except ImportError:
        return None
    torch.manual_seed(0)
    images = torch.rand(2, COHORT, SAMPLES, INPUTS)
    labels = torch.randint(CLASSES, (2, COHORT, SAMPLES))
    w, b = torch.randn(INPUTS, WIDTH) / INPUTS**0.5, torch.zeros(WIDTH)
    v, c = torch.randn(WIDTH, CLASSES) / WIDTH**0.5, torch.zeros(CLASSES)
    steps = -(-PASSES * SAMPLES // BATCH)

    def loss(x: Any, y: Any, data: Any) -> Any:
        hidden = torch.relu(data[0] @ x[0] + x[1])
        return torch.nn.functional.cross_entropy(hidden @ y[0] + y[1], data[1])

    def leaves(*values: Any) -> Any:
        return [value.detach().requires_grad_() for value in values]

    def batch(level: int, i: int) -> Any:
        pick = torch.randperm(SAMPLES)[:BATCH]
        return images[level, i][pick], labels[level, i][pick]

    def mean(replies: Any) -> Any:
        return [torch.stack(leaf).mean(0) for leaf in zip(*replies, strict=True)]

    def grad_y(x: Any, y: Any, data: Any) -> Any:
        y = leaves(*y)
        return torch.autograd.grad(loss(x, y, data), y)

    def once() -> Any:
        x, y = [w, b], [v, c]
        q = mean([grad_y(x, y, (images[0, i], labels[0, i])) for i in range(COHORT)])
        locals_ = []
        for i in range(COHORT):
            local = y
            for _ in range(steps):
                data = batch(0, i)
                here, there = grad_y(x, local, data), grad_y(x, y, data)
                local = [o - STEP * (h - t + a) for o, h, t, a in zip(local, here, there, q, strict=True)]
            locals_.append(local)
        y = mean(locals_)
        p = [HESSIAN_STEP * r for r in mean([grad_y(x, y, batch(1, i)) for i in range(COHORT)])]
        total = p
        for _ in range(TERMS):
            replies = []
            for i in range(COHORT):
                y_leaf = leaves(*y)
                first = torch.autograd.grad(loss(x, y_leaf, batch(0, i)), y_leaf, create_graph=True)
                inner = sum((f * s).sum() for f, s in zip(first, p, strict=True))
                replies.append(torch.autograd.grad(inner, y_leaf))
            p = [s - HESSIAN_STEP * r for s, r in zip(p, mean(replies), strict=True)]
            total = [t + s for t, s in zip(total, p, strict=True)]
        replies = []
        for i in range(COHORT):
            x_leaf = leaves(*x)
            direct = torch.autograd.grad(loss(x_leaf, y, batch(1, i)), x_leaf)
            x_leaf, y_leaf = leaves(*x), leaves(*y)
            first = torch.autograd.grad(loss(x_leaf, y_leaf, batch(0, i)), y_leaf, create_graph=True)
            inner = sum((f * s).sum() for f, s in zip(first, total, strict=True))
            mixed = torch.autograd.grad(inner, x_leaf)
            replies.append([d - m for d, m in zip(direct, mixed, strict=True)])
        h = mean(replies)
        return mean([[a - STEP * d for a, d in zip(x, h, strict=True)] for _ in range(COHORT)])

    return once
