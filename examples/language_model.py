"""Whose text to trust: a transformer language model on 64 clients, half of whom have text of poor quality.

The text comes from a small probabilistic grammar: prose whose verbs agree with their subjects across nested clauses,
sums of digits, and nested brackets. In the text of half of the clients most sentences are spoilt: words in random
order, random words, wrong agreement and wrong sums, or sentences backwards. Every client also holds a few checked
sentences. The lower level trains the model on all text, with a weight for each client; the upper level learns these
weights, so that the model does well on the checked sentences (FedBiO). FedAvg gives every client's text its plain weight.

`python examples/language_model.py` trains 10 million parameters, for a GPU; `--small` takes a minute on a laptop. It
writes a picture, the histories and the learnt weights, as it goes; `--search` prints the table by which the steps
were chosen.
"""

import argparse
import time
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import optax
import pandas as pd

import rookery as rk


class Sizes(NamedTuple):
    """Of the model, the text and the rounds."""

    width: int
    layers: int
    heads: int
    context: int  # words the model sees at once
    clients: int
    texts: tuple[int, int]  # of `context` words, the fewest and the most that a client has
    checked: int  # of them that a client has beside, and that are right
    cohort: int
    local_steps: int
    batch: int
    rounds: int


LARGE = Sizes(384, 6, 6, 64, 64, (96, 384), 8, 16, 4, 8, 250)
SMALL = Sizes(32, 2, 2, 24, 16, (32, 128), 8, 8, 2, 8, 100)

MODEL_STEP, WEIGHT_STEP = 3e-3, 0.1  # of Adam at the server, on the model (all methods) and on x
LOCAL_STEP = 0.1  # of the clients' local steps on the model (all methods)
LINEAR_STEP, DAMPING = 0.05, 1.0  # of FedBiO's linear system
DECAY = 1e-5

# The grammar. A word is a number; every sentence ends with a full stop.

CLASSES = {  # singular nouns; what each kind of them does, and to what
    "person": ["farmer", "doctor", "child", "pilot", "baker", "judge"],
    "animal": ["dog", "horse", "bird", "cat", "wolf", "sheep"],
    "food": ["apple", "cake", "fish", "root", "berry", "egg"],
    "thing": ["cart", "lamp", "rope", "book", "drum", "boat"],
}
VERBS = {
    "person": {"buy": "thing", "mend": "thing", "feed": "animal", "greet": "person", "cook": "food"},
    "animal": {"eat": "food", "chase": "animal", "follow": "person", "find": "food"},
    "food": {"please": "person", "tempt": "animal"},
    "thing": {"help": "person", "scare": "animal"},
}
ADJECTIVES = {"person": ["old", "kind"], "animal": ["wild", "quick"], "food": ["sweet", "fresh"], "thing": ["new", "red"]}
DIGITS = ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine"]
BRACKETS = [("(", ")"), ("[", "]"), ("<", ">")]
NUMBER = {noun: noun + "s" for nouns in CLASSES.values() for noun in nouns}  # the plural of a noun
NUMBER |= {verb + "s": verb for verbs in VERBS.values() for verb in verbs}  # and of a verb
NUMBER |= {"this": "these", "a": "some"}
OTHER = NUMBER | {plural: singular for singular, plural in NUMBER.items()}
WORDS = sorted({*OTHER, *sum(ADJECTIVES.values(), []), *DIGITS, *sum(BRACKETS, ()), "that", "the", "plus", "is", "."})
CODE = {word: k for k, word in enumerate(WORDS)}


def phrase(rng: np.random.Generator, kind: str, plural: bool, depth: int) -> list[str]:
    """A noun with what belongs to it: a determiner, an adjective, a relative clause."""
    form = lambda word: NUMBER[word] if plural else word
    words = [["the", form("this"), form("a")][rng.integers(3)]]
    words += [ADJECTIVES[kind][rng.integers(2)]] if rng.random() < 0.3 else []
    words.append(form(CLASSES[kind][rng.integers(6)]))
    if rng.random() < (0.4, 0.2, 0)[depth]:
        words += ["that", *predicate(rng, kind, plural, depth + 1)]
    return words


def predicate(rng: np.random.Generator, kind: str, plural: bool, depth: int) -> list[str]:
    """A verb that agrees with its subject, and an object of the kind that the verb takes."""
    verb = list(VERBS[kind])[rng.integers(len(VERBS[kind]))]
    return [verb if plural else verb + "s", *phrase(rng, VERBS[kind][verb], rng.random() < 0.5, depth)]


def sentence(rng: np.random.Generator) -> list[str]:
    """Prose, a sum modulo ten, or brackets."""
    form = rng.random()
    if form < 0.7:
        kind, plural = list(CLASSES)[rng.integers(4)], rng.random() < 0.5
        return [*phrase(rng, kind, plural, 0), *predicate(rng, kind, plural, 1), "."]
    if form < 0.85:
        a, b = rng.integers(10, size=2)
        return [DIGITS[a], "plus", DIGITS[b], "is", DIGITS[(a + b) % 10], "."]
    words, still_open = [], []
    for _ in range(4):
        still_open.append(BRACKETS[rng.integers(3)])
        words.append(still_open[-1][0])
        while still_open and rng.random() < 0.5:
            words.append(still_open.pop()[1])
    return [*words, *(close for _, close in reversed(still_open)), "."]


def spoilt(rng: np.random.Generator, words: list[str], kind: str) -> list[str]:
    """The sentence, in one of four ways not what it should be; its full stop stays."""
    words = words[:-1]
    if kind == "shuffled":
        words = [words[k] for k in rng.permutation(len(words))]
    elif kind == "random":
        words = [WORDS[rng.integers(len(WORDS))] if rng.random() < 0.5 else word for word in words]
    elif kind == "disagreeing":
        words = [OTHER[word] if word in OTHER and rng.random() < 0.5 else word for word in words]
        words = words[:-1] + [DIGITS[rng.integers(10)]] if "plus" in words else words
    else:
        words = words[::-1]
    return [*words, "."]


KINDS = ("shuffled", "random", "disagreeing", "backwards")


def text(rng: np.random.Generator, pieces: int, context: int, share: float = 0.0, kind: str = "") -> np.ndarray:
    """Pieces of context + 1 words, each begun afresh; this share of the sentences is spoilt."""
    rows = np.empty((pieces, context + 1), np.int32)
    for row in rows:
        words: list[str] = []
        while len(words) <= context:
            made = sentence(rng)
            words += spoilt(rng, made, kind) if rng.random() < share else made
        row[:] = [CODE[word] for word in words[: context + 1]]
    return rows


class Federation(NamedTuple):
    """The clients' text, and what they do not know: who has which kind of spoilt sentences ("" for none)."""

    clients: rk.Clients
    kinds: np.ndarray
    shares: np.ndarray
    test: np.ndarray


def federation(sizes: Sizes, seed: int, held_out: int = 1) -> Federation:
    """Clients of unequal size, every other one with spoilt sentences; `held_out` tells the test text from others."""
    rng = np.random.default_rng([seed, 0])
    n = sizes.clients
    kinds = np.array([KINDS[k // 2 % 4] if k % 2 else "" for k in range(n)])
    shares = np.where(kinds == "", 0, rng.uniform(0.6, 1.0, n))
    counts = rng.integers(*sizes.texts, size=n, endpoint=True)
    lower = [
        {"words": text(rng, counts[k], sizes.context, shares[k], kinds[k]), "client": np.full(counts[k], k, np.int32)}
        for k in range(n)
    ]
    upper = [{"words": text(rng, sizes.checked, sizes.context)} for _ in range(n)]
    test = text(np.random.default_rng([seed, held_out]), 256, sizes.context)
    return Federation(rk.Clients(lower=lower, upper=upper, weights="size"), kinds, shares, test)


# The model: a plain transformer whose layers are stacked, so that one layer is compiled.


def transformer(key: jax.Array, sizes: Sizes) -> dict:
    """Its parameters."""
    d, n = sizes.width, sizes.layers
    keys = jax.random.split(key, 6)
    normal = lambda key, *shape, size: size * jax.random.normal(key, shape)
    layers = {
        "norms": jnp.ones((n, 2, d)),
        "qkv": normal(keys[0], n, d, 3 * d, size=d**-0.5),
        "mix": normal(keys[1], n, d, d, size=(2 * n * d) ** -0.5),
        "up": normal(keys[2], n, d, 4 * d, size=d**-0.5),
        "down": normal(keys[3], n, 4 * d, d, size=(8 * n * d) ** -0.5),
    }
    words, places = (normal(k, m, d, size=0.02) for k, m in zip(keys[4:], (len(WORDS), sizes.context), strict=True))
    return {"words": words, "places": places, "layers": layers, "norm": jnp.ones(d), "out": jnp.zeros((d, len(WORDS)))}


def losses(model: dict, rows: jax.Array, heads: int) -> jax.Array:
    """The mean cross-entropy of the next word, of each row."""
    seen, following = rows[:, :-1], rows[:, 1:]
    batch, length = seen.shape
    causal = jnp.tril(jnp.ones((length, length), bool))
    scaled = lambda a, scale: jax.nn.standardize(a, epsilon=1e-5) * scale

    def layer(a, own):
        q, k, v = jnp.split((scaled(a, own["norms"][0]) @ own["qkv"]).reshape(batch, length, heads, -1), 3, axis=-1)
        scores = jnp.einsum("bihd,bjhd->bhij", q, k) * q.shape[-1] ** -0.5
        shares = jax.nn.softmax(jnp.where(causal, scores, -1e9))
        a = a + jnp.einsum("bhij,bjhd->bihd", shares, v).reshape(a.shape) @ own["mix"]
        return a + jax.nn.gelu(scaled(a, own["norms"][1]) @ own["up"]) @ own["down"], None

    a, _ = jax.lax.scan(layer, model["words"][seen] + model["places"], model["layers"])
    scores = scaled(a, model["norm"]) @ model["out"]
    return optax.softmax_cross_entropy_with_integer_labels(scores, following).mean(axis=1)


# The problem, stated once: the weights of the clients above, the model below.


def problems(sizes: Sizes, clients: rk.Clients) -> tuple[rk.Bilevel, rk.SingleLevel]:
    """With a weight for each client, and without."""
    squares = lambda model: sum(jnp.sum(a**2) for a in jax.tree.leaves(model))
    fixed = jax.lax.stop_gradient

    def upper(x, model, batch):
        return jnp.mean(losses(model, batch["words"], sizes.heads))

    def lower(x, model, batch):
        weights = jnp.exp(x) / jnp.sum(clients.weights * jnp.exp(x))  # 1 on average
        fit = jnp.mean(weights[batch["client"]] * losses(model, batch["words"], sizes.heads))
        # The last term is zero and so is its gradient: it adds DAMPING to the curvature that the hypergradient sees.
        still = squares(jax.tree.map(lambda a: a - fixed(a), model))
        return fit + DECAY / 2 * squares(model) + DAMPING / 2 * still

    alone = lambda model, batch: upper(None, model, batch) + DECAY / 2 * squares(model)
    return rk.Bilevel(upper, lower, project_upper=lambda x: jnp.clip(x, -4, 4)), rk.SingleLevel(alone)
