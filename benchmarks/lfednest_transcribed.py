"""The light methods of FedNest as in their authors' code, independent of Rookery's engines and algorithms.

    python benchmarks/lfednest_transcribed.py [--methods LFedNest ...] [--rounds 500] [--seeds 10] [--out FILE.csv]

Hyper-representation on non-i.i.d. MNIST (for its files see `rookery.data.load`), to see how many runs fail. Batches are
shuffled in every pass, the last one smaller; means are over batches, not over samples; every pass has a dropout mask;
the outer step has a fresh cohort; the lower level has .05(‖W‖ + ‖b‖); the series has N + 1 = 6 terms. `--text` follows
the paper's text instead: an even split, no dropout, ½·10⁻³‖y‖², one batch in the hypergradient and the same cohort. All
seeds run together, for each pair of lower and upper step; the upper step is also 1/ℓ.
"""

import argparse
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pandas as pd
from jax import Array

from rookery.tasks.images import mnist_images

METHODS = ("LFedNest", "LFedNestSVRG", "LFedNestNonAlt")
PAIRS = ((0.01, 0.01), (0.003, 0.003), (0.003, 0.01), (0.01, 0.003), (0.0055, 0.0055), (0.001, 0.01), (0.001, 0.001))
BATCH, WIDTH, COHORT, EPOCHS, TERMS = 64, 200, 10, 5, 5
Tree = Any


def batches(key: Array, n: int) -> tuple[Array, Array]:
    """Return the indices of a pass over n samples, a row for each batch, and which of them count."""
    count = -(-n // BATCH)
    order = jnp.concatenate([jax.random.permutation(key, n), jnp.zeros(count * BATCH - n, int)])
    return order.reshape(count, BATCH), (jnp.arange(count * BATCH) < n).astype(float).reshape(count, BATCH)


def cross_entropy(y: Tree, seen: Array, labels: Array, counts: Array) -> Array:
    """Return the mean over the samples that count."""
    scores = jax.nn.log_softmax(seen @ y[0].T + y[1])
    return -jnp.sum(counts * jnp.take_along_axis(scores, labels[:, None], 1)[:, 0]) / jnp.sum(counts)


def rounds(method: str, text: bool) -> Callable[..., Tree]:
    """Return a round of a method: round(x, y, key, clients, lower step, upper step)."""

    def mask(key: Array, shape: tuple[int, ...]) -> Array:
        return jnp.ones(shape) if text else 2.0 * jax.random.bernoulli(key, 0.5, shape)

    def size(y: Tree) -> Array:
        squares = [jnp.sum(part**2) for part in y]
        return 0.5e-3 * sum(squares) if text else 0.05 * sum(map(jnp.sqrt, squares))

    def drawn(key: Array, n: int, whole: bool = True) -> tuple[Array, Array, Array]:
        """Return the batches of a pass, or its first, with their masks."""
        order, dropout = jax.random.split(key)
        places, counts = batches(order, n)
        places, counts = (places, counts) if whole else (places[:1], counts[:1])
        return places, counts, mask(dropout, (len(places), BATCH, WIDTH))

    def mean(y: Tree, hidden: Array, labels: Array, given: tuple[Array, Array, Array]) -> Array:
        """Return the mean over the batches, which all count the same."""
        one = lambda p, counts, m: cross_entropy(y, jax.nn.relu(hidden[p] * m), labels[p], counts)
        return jnp.mean(jax.vmap(one)(*given))

    def inner(x: Tree, start: Tree, images: Array, labels: Array, key: Array, step: Array, anchor: Tree) -> Tree:
        """Take local SGD steps on y, or SVRG steps with an anchor."""
        hidden = images @ x[0].T + x[1]

        def epoch(y: Tree, key: Array) -> tuple[Tree, None]:
            order, noise = jax.random.split(key)
            places, counts = batches(order, len(images))

            def descend(y: Tree, batch: tuple[Array, Array, Array]) -> tuple[Tree, None]:
                p, count, key = batch
                first, second = jax.random.split(key)

                def loss(y: Tree, key: Array) -> Array:
                    seen = jax.nn.relu(hidden[p] * mask(key, (BATCH, WIDTH)))
                    return cross_entropy(y, seen, labels[p], count) + size(y)

                gradient = jax.grad(loss)(y, first)
                if anchor is not None:
                    old = jax.grad(loss)(start, second)
                    gradient = jax.tree.map(lambda g, o, a: g - o + a, gradient, old, anchor)
                return jax.tree.map(lambda a, g: a - step * g, y, gradient), None

            return jax.lax.scan(descend, y, (places, counts, jax.random.split(noise, len(places))))[0], None

        return jax.lax.scan(epoch, start, jax.random.split(key, EPOCHS))[0]

    def outer(x: Tree, y: Tree, own: tuple[Array, ...], key: Array, step: Array) -> Tree:
        """Return the client's hypergradient; `step` is 1/ℓ."""
        images, labels, checked, checks = own
        keys = jax.random.split(key, 4)
        sizes = (len(checked), len(images), len(images), len(checked))
        first, series, mixed, direct = (drawn(k, n, not text) for k, n in zip(keys, sizes, strict=True))
        hidden = images @ x[0].T + x[1]
        lower = jax.grad(lambda y: mean(y, hidden, labels, series) + size(y))
        term = jax.grad(lambda y: mean(y, checked @ x[0].T + x[1], checks, first))(y)
        p = term
        for _ in range(TERMS):
            product = jax.jvp(lower, (y,), (term,))[1]
            term = jax.tree.map(lambda a, h: a - step * h, term, product)
            p = jax.tree.map(jnp.add, p, term)

        def mixed_part(x: Tree) -> Array:
            gradient = jax.grad(lambda y: mean(y, images @ x[0].T + x[1], labels, mixed))(y)
            return sum(jnp.vdot(a, b) for a, b in zip(gradient, p, strict=True))

        implicit = jax.grad(mixed_part)(x)
        plain = jax.grad(lambda x: mean(y, checked @ x[0].T + x[1], checks, direct))(x)
        return jax.tree.map(lambda d, i: d - step * i, plain, implicit)

    def once(x: Tree, y: Tree, key: Array, clients: list[Array], lower: Array, upper: Array) -> tuple[Tree, Tree]:
        keys = jax.random.split(key, 5)
        choose = lambda key: [c[jax.random.choice(key, len(c), (COHORT,), replace=False)] for c in clients]
        each = lambda key: jax.random.split(key, COHORT)
        average = lambda tree: jax.tree.map(lambda a: a.mean(0), tree)
        own = choose(keys[0])
        anchor = None
        if method == "LFedNestSVRG":

            def full(images: Array, labels: Array, key: Array) -> Tree:
                given, hidden = drawn(key, len(images)), images @ x[0].T + x[1]
                return jax.grad(lambda y: mean(y, hidden, labels, given) + size(y))(y)

            anchor = average(jax.vmap(full)(*own[:2], each(keys[4])))
        ys = jax.vmap(lambda i, l, k: inner(x, y, i, l, k, lower, anchor))(*own[:2], each(keys[1]))
        y = average(ys)
        if method == "LFedNestNonAlt":
            g = jax.vmap(lambda y, *own: outer(x, y, own[:4], own[4], upper))(ys, *own, each(keys[3]))
        else:
            own = own if text else choose(keys[2])
            g = jax.vmap(lambda *own: outer(x, y, own[:4], own[4], upper))(*own, each(keys[3]))
        return jax.tree.map(lambda a, g: a - upper * g.mean(0), x, g), y

    return once


def prepared(seed: int, images: np.ndarray, labels: np.ndarray, text: bool) -> tuple[list[np.ndarray], Tree]:
    """Return 100 clients with two label shards each, and PyTorch's start."""
    rng = np.random.RandomState(seed)
    order, shards = labels.argsort(kind="stable").reshape(200, 300), rng.permutation(200)
    parts: list[list[np.ndarray]] = [[], [], [], []]
    checked = 300 if text else 120
    for i in range(100):
        own = order[shards[2 * i : 2 * i + 2]].ravel()
        rng.shuffle(own)
        train, check = own[checked:], own[:checked]
        for part, rows in zip(parts, (images[train], labels[train], images[check], labels[check]), strict=True):
            part.append(rows)
    uniform = lambda n, *shape: rng.uniform(-(n**-0.5), n**-0.5, shape).astype(np.float32)
    start = ((uniform(784, WIDTH, 784), uniform(784, WIDTH)), (uniform(WIDTH, 10, WIDTH), uniform(WIDTH, 10)))
    return [np.stack(part) for part in parts], start


def main() -> None:
    """Run the pairs of steps and write each seed's result after 50 rounds, at its best and at the end."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--methods", nargs="+", default=METHODS, choices=METHODS)
    parser.add_argument("--text", action="store_true", help="the habits of the paper's text")
    parser.add_argument("--rounds", type=int, default=500)
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--pairs", type=int, default=len(PAIRS), help="how many of the pairs of steps")
    parser.add_argument("--data-dir")
    parser.add_argument("--out")
    options = parser.parse_args()
    images, labels, test, answers = mnist_images(data_dir=options.data_dir)
    made = [prepared(seed, images, labels, options.text) for seed in range(options.seeds)]
    clients, start = jax.tree.map(lambda *a: jnp.asarray(np.stack(a)), *made)
    rows = []
    for method in options.methods:
        once = rounds(method, options.text)

        def ten(state: Tree, key: Array, clients: list[Array], lower: Array, upper: Array, once: Any = once) -> Any:
            step = lambda state, key: (once(*state, key, clients, lower, upper), None)
            x, y = state = jax.lax.scan(step, state, jax.random.split(key, 10))[0]
            scores = jax.nn.relu(test @ x[0].T + x[1]) @ y[0].T + y[1]
            return state, jnp.mean(scores.argmax(1) == jnp.asarray(answers))

        compiled = jax.jit(jax.vmap(ten, (0, 0, 0, None, None)))
        for lower, upper in PAIRS[: options.pairs]:
            state, accuracy = start, []
            for r in range(options.rounds // 10):
                keys = jnp.stack([jax.random.key(seed * 10_000 + r) for seed in range(options.seeds)])
                state, now = compiled(state, keys, clients, lower, upper)
                accuracy.append(np.asarray(now))
            table = np.array(accuracy)  # rounds, seeds
            end, best = table[-max(1, len(table) // 10) :].mean(0), table.max(0)
            early = table[min(4, len(table) - 1)]
            for seed in range(options.seeds):
                found = {"after_50": early[seed], "highest": best[seed], "end": end[seed]}
                which = {"method": method, "habits": "text" if options.text else "authors'"}
                rows.append({**which, "lower": lower, "upper": upper, "seed": seed, **found})
            failed = int((end < 0.5 * best).sum())
            print(f"{method}, lower {lower:g}, upper {upper:g}: ends at {end.mean():.3f}, {failed} of {len(end)} fail")
    if options.out:
        pd.DataFrame(rows).to_csv(options.out, index=False, float_format="%.4f")


if __name__ == "__main__":
    main()
