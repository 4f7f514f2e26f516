"""Learn whose text to trust: a transformer language model on 64 clients, half of which have text of poor quality.

The text comes from a small probabilistic grammar: prose whose verbs agree with their subjects and choose their objects,
across nested clauses; sums of digits; nested brackets. In the text of half of the clients most sentences are spoilt:
words in random order, random words, wrong agreement and wrong sums, or sentences backwards. Every client also holds a
few checked sentences. The lower level trains the model on all text, with a weight for each client; the upper level
learns these weights, so that the model does well on the checked sentences. F2SA does so with gradients alone, on two
copies of the model. FedAvg is the yardstick.

`python examples/language_model.py` trains 10 million parameters, for a GPU; with `--small`, 32,000 in a few minutes
on a laptop. It writes a picture, the histories and the learnt weights as it runs; `--search` prints the table by which
the steps were chosen.
"""

import argparse
import time
from functools import partial
from itertools import product
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import optax
import pandas as pd
from matplotlib.ticker import LogLocator

import rookery as rk


class Sizes(NamedTuple):
    """Sizes of the model, the text and the rounds."""

    width: int
    layers: int
    heads: int
    context: int  # words that the model sees
    clients: int
    pieces: tuple[int, int]  # of text, `context` words each: the fewest and the most of a client
    checked: int  # checked pieces of each client
    cohort: int
    local_steps: int  # of FedAvg; F2SA takes half as many, on two copies of the model
    batch: int
    rounds: int


class Steps(NamedTuple):
    """Step sizes: all methods use the first two, F2SA all four."""

    model: float  # Adam at the server, on the model
    local: float  # at the clients, on the model
    weight: float = 0.2  # Adam at the server, on x
    multiplier: float = 2.0  # F2SA's λ


LARGE = Sizes(384, 6, 6, 64, 64, (384, 1536), 8, cohort=16, local_steps=4, batch=8, rounds=600)
SMALL = Sizes(32, 2, 2, 16, 16, (32, 128), 8, cohort=8, local_steps=4, batch=8, rounds=100)
METHODS = NESTED, ALL, CLEAN, CHECKED, HALF = (
    "F2SA, learnt weights",
    "FedAvg, all text",
    "FedAvg, clean clients",
    "FedAvg, checked text",
    "FedAvg, all text, half the local steps",
)
CHOSEN = {LARGE: Steps(5e-4, 0.01, weight=0.05), SMALL: Steps(1e-2, 0.1)}
DECAY = 1e-5

# The grammar. A word is a number; every sentence ends with a full stop.

NOUNS = {
    "person": ["farmer", "doctor", "miner", "pilot", "baker", "judge"],
    "animal": ["dog", "horse", "bird", "cat", "bear", "goat"],
    "food": ["apple", "cake", "nut", "root", "plum", "egg"],
    "thing": ["cart", "lamp", "rope", "book", "drum", "boat"],
}
VERBS = {  # each with the kind of its object
    "person": [("buy", "thing"), ("mend", "thing"), ("feed", "animal"), ("greet", "person"), ("cook", "food")],
    "animal": [("eat", "food"), ("chase", "animal"), ("follow", "person"), ("find", "food")],
    "food": [("please", "person"), ("tempt", "animal")],
    "thing": [("help", "person"), ("scare", "animal")],
}
ADJECTIVES = {
    "person": ("old", "kind"),
    "animal": ("wild", "quick"),
    "food": ("sweet", "ripe"),
    "thing": ("new", "red"),
}
DIGITS = ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine"]
BRACKETS = [("(", ")"), ("[", "]"), ("<", ">")]
PLURAL = {"this": "these", "a": "some"} | {noun: noun + "s" for nouns in NOUNS.values() for noun in nouns}
PLURAL |= {verb + "s": verb for verbs in VERBS.values() for verb, _ in verbs}
OTHER = PLURAL | {plural: singular for singular, plural in PLURAL.items()}
PAIRS = [*ADJECTIVES.values(), *BRACKETS, ("that", "the"), ("plus", "is"), (".",)]
WORDS = [*OTHER, *DIGITS, *(word for pair in PAIRS for word in pair)]
CODE = {word: k for k, word in enumerate(WORDS)}


def phrase(rng: Random, kind: str, plural: bool, depth: int) -> list[str]:
    """Return a noun phrase: a determiner, perhaps an adjective, the noun, perhaps a relative clause."""
    form = lambda word: PLURAL[word] if plural else word
    words = [rng.choice(["the", form("this"), form("a")])]
    words += [rng.choice(ADJECTIVES[kind])] if rng.random() < 0.3 else []
    words.append(form(rng.choice(NOUNS[kind])))
    return words + (["that", *predicate(rng, kind, plural, depth + 1)] if rng.random() < (0.4, 0.2, 0)[depth] else [])


def predicate(rng: Random, kind: str, plural: bool, depth: int) -> list[str]:
    """Return a verb that agrees with its subject, and an object of the kind that the verb takes."""
    verb, taken = rng.choice(VERBS[kind])
    return [verb if plural else verb + "s", *phrase(rng, taken, rng.random() < 0.5, depth)]


def sentence(rng: Random) -> list[str]:
    """Return a sentence: prose, a sum modulo ten, or brackets."""
    form = rng.random()
    if form < 0.7:
        kind, plural = rng.choice(list(NOUNS)), rng.random() < 0.5
        return [*phrase(rng, kind, plural, 0), *predicate(rng, kind, plural, 1), "."]
    if form < 0.85:
        a, b = rng.randrange(10), rng.randrange(10)
        return [DIGITS[a], "plus", DIGITS[b], "is", DIGITS[(a + b) % 10], "."]
    words, still_open = [], []
    for _ in range(4):
        begin, end = rng.choice(BRACKETS)
        words.append(begin)
        still_open.append(end)
        while still_open and rng.random() < 0.5:
            words.append(still_open.pop())
    return [*words, *reversed(still_open), "."]


def spoilt(rng: Random, words: list[str], kind: str) -> list[str]:
    """Spoil a sentence in one of four ways; its full stop stays."""
    if kind == "shuffled":
        words = rng.sample(words[:-1], len(words) - 1)
    elif kind == "random":
        words = [rng.choice(WORDS) if rng.random() < 0.5 else word for word in words[:-1]]
    elif kind == "disagreeing":
        words = [OTHER[word] if word in OTHER and rng.random() < 0.5 else word for word in words[:-1]]
        words = [*words[:-1], rng.choice(DIGITS)] if "plus" in words else words
    else:
        words = words[-2::-1]
    return [*words, "."]


KINDS = ("shuffled", "random", "disagreeing", "backwards")


def text(rng: Random, pieces: int, context: int, share: float = 0.0, kind: str = "") -> np.ndarray:
    """Return pieces of context + 1 words, each with a fresh start; this share of the sentences is spoilt."""
    rows = np.empty((pieces, context + 1), np.int32)
    for row in rows:
        words: list[str] = []
        while len(words) <= context:
            made = sentence(rng)
            words += spoilt(rng, made, kind) if rng.random() < share else made
        row[:] = [CODE[word] for word in words[: context + 1]]
    return rows


class Data(NamedTuple):
    """Each client's text, a clean test text, and the truth that no method sees: whose text is spoilt, and how."""

    training: list[dict]
    checked: list[dict]
    test: np.ndarray
    kinds: np.ndarray  # "clean", or one of KINDS
    shares: np.ndarray


def make(sizes: Sizes, seed: int) -> Data:
    """Make clients of unequal size, every other one with spoilt sentences."""
    rng, n = Random(seed), sizes.clients
    kinds = np.array([KINDS[k // 2 % 4] if k % 2 else "clean" for k in range(n)])
    shares = np.array([rng.uniform(0.6, 1.0) if k % 2 else 0.0 for k in range(n)])
    pieces = np.linspace(*sizes.pieces, n // 2).astype(int).tolist()
    pieces = np.repeat(rng.sample(pieces, n // 2), 2)  # spoilt as often as clean; shuffled by the seed
    own = zip(pieces, shares, kinds, strict=True)
    training = [text(rng, size, sizes.context, share, kind) for size, share, kind in own]
    training = [{"words": rows, "client": np.full(len(rows), k, np.int32)} for k, rows in enumerate(training)]
    checked = [{"words": text(rng, sizes.checked, sizes.context)} for _ in range(n)]
    return Data(training, checked, text(rng, 256, sizes.context), kinds, shares)


# The model: a plain transformer whose layers are stacked, so that one layer is compiled.


@partial(jax.jit, static_argnames="sizes")
def transformer(key: jax.Array, sizes: Sizes) -> dict:
    """Return the parameters of a transformer."""
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


def times(a: jax.Array, w: Any) -> jax.Array:
    """Multiply by a matrix; or by a frozen matrix and its adapter, two thin ones (see adapters.py)."""
    if not isinstance(w, tuple):
        return a @ w
    frozen, down, up = w
    return a @ frozen + (a @ down.astype(a.dtype)) @ up.astype(a.dtype)


def losses(model: dict, rows: jax.Array, heads: int) -> jax.Array:
    """Return the mean cross-entropy of the next word, for each row."""
    seen, following = rows[:, :-1], rows[:, 1:]
    batch, length = seen.shape
    causal = jnp.tril(jnp.ones((length, length), bool))
    scaled = lambda a, scale: jax.nn.standardize(a, epsilon=1e-5) * scale

    def layer(a, own):
        q, k, v = jnp.split(times(scaled(a, own["norms"][0]), own["qkv"]).reshape(batch, length, heads, -1), 3, axis=-1)
        scores = jnp.einsum("bihd,bjhd->bhij", q, k) * q.shape[-1] ** -0.5
        shares = jax.nn.softmax(jnp.where(causal, scores, -1e9))
        a = a + times(jnp.einsum("bhij,bjhd->bihd", shares, v).reshape(a.shape), own["mix"])
        return a + times(jax.nn.gelu(times(scaled(a, own["norms"][1]), own["up"])), own["down"]), None

    a, _ = jax.lax.scan(layer, model["words"][seen] + model["places"], model["layers"])
    scores = scaled(a, model["norm"]) @ model["out"]
    return optax.softmax_cross_entropy_with_integer_labels(scores.astype(jnp.float32), following).mean(axis=1)


@partial(jax.jit, static_argnames="heads")
def perplexity(model: dict, rows: jax.Array, heads: int) -> jax.Array:
    """Return exp of the mean cross-entropy: the number of words between which the model is undecided."""
    return jnp.exp(jnp.mean(losses(model, rows, heads)))


# The problem, stated once: the weights of the clients above, the model below.


def weights(x: jax.Array, clients: rk.Clients) -> jax.Array:
    """Return the weights of the clients' text, which are equal at first."""
    trust = jax.nn.sigmoid(x)
    return trust / jnp.sum(clients.weights * trust) ** 0.75


def nested_problem(sizes: Sizes, clients: rk.Clients) -> rk.Bilevel:
    """x has a number for each client. The lower level, a language model's loss, is not convex."""

    def upper(x, model, batch):
        return jnp.mean(losses(model, batch["words"], sizes.heads))

    def lower(x, model, batch):
        own = weights(x, clients)[batch["client"]]
        return jnp.mean(own * losses(model, batch["words"], sizes.heads)) + DECAY / 2 * squares(model)

    # x is at most 3: no client's text is trusted much more than another's that is as good.
    return rk.Bilevel(upper, lower, project_upper=lambda x: jnp.clip(x, -5, 3))


def plain_problem(sizes: Sizes) -> rk.SingleLevel:
    """Return the problem without weights."""
    return rk.SingleLevel(
        lambda model, batch: jnp.mean(losses(model, batch["words"], sizes.heads)) + DECAY / 2 * squares(model)
    )


def squares(tree: dict) -> jax.Array:
    """Return the sum of the squares of all entries."""
    return sum(jnp.sum(a**2) for a in jax.tree.leaves(tree))


# The runs.


class Setting(NamedTuple):
    """What `rk.solve` is given first, and what is evaluated."""

    problem: Any
    clients: rk.Clients
    method: Any
    init: Any
    watch: Any


def setting(name: str, sizes: Sizes, data: Data, steps: Steps, seed: int) -> Setting:
    """Return the problem and the method of this name."""
    adam, step = optax.inject_hyperparams(optax.adam), steps.local
    halved = {"local_steps": sizes.local_steps // 2, "batch_size": sizes.batch}
    model = transformer(jax.random.key(seed), sizes)
    if name == NESTED:
        clients = rk.Clients(lower=data.training, upper=data.checked, weights="size")
        problem, init = nested_problem(sizes, clients), (np.zeros(clients.n, np.float32), model)
        method = rk.F2SA(1.0, step, auxiliary_step=step, multiplier=steps.multiplier, **halved)
        method = rk.with_server_optimizer(method, upper=adam(steps.weight), lower=adam(steps.model))
        watch = lambda x, y: {"perplexity": perplexity(y, data.test, sizes.heads), **of_kinds(x, data)}
        return Setting(problem, clients, method, init, watch)
    texts = {CHECKED: lambda own, few: [few]}.get(name, lambda own, few: [own, few])
    pairs = zip(data.training, data.checked, data.kinds, strict=True)
    kept = [texts(own["words"], few["words"]) for own, few, kind in pairs if name != CLEAN or kind == "clean"]
    clients = rk.Clients(upper=[{"words": np.concatenate(parts)} for parts in kept], weights="size")
    method = rk.FedAvg(step, **(halved if name == HALF else halved | {"local_steps": sizes.local_steps}))
    method = rk.with_server_optimizer(method, upper=adam(steps.model))
    watch = lambda x, y: {"perplexity": perplexity(x, data.test, sizes.heads)}
    return Setting(plain_problem(sizes), clients, method, model, watch)


def run_rounds(made: Setting, sizes: Sizes, rounds: int, every: int, seed: int, callbacks=()):
    """Run a setting, with the whole cohort side by side: a GPU has room."""
    cohort = min(sizes.cohort, made.clients.n)
    how = {
        "cohort": cohort,
        "engine": rk.Simulation(block=cohort),
        "seed": seed,
        "evaluate": made.watch,
        "every": every,
    }
    problem, clients, method, init, _ = made
    return rk.solve(problem, clients, method, init, rounds, **how, callbacks=callbacks, progress=False)


def relative(x: jax.Array, data: Data) -> jax.Array:
    """Return the weights that x stands for, divided by their mean over all text."""
    sizes = np.array([len(own["words"]) for own in data.training])
    return jax.nn.sigmoid(x) / (jax.nn.sigmoid(x) @ (sizes / sizes.sum()))


def of_kinds(x: jax.Array, data: Data) -> dict:
    """Return the mean weight of each kind of client."""
    return {kind: jnp.mean(relative(x, data)[data.kinds == kind]) for kind in ("clean", *KINDS)}


def weights_of(x: jax.Array, data: Data) -> pd.DataFrame:
    """Return the weight that was learnt for each client."""
    sizes = [len(own["words"]) for own in data.training]
    learnt = np.asarray(relative(jnp.asarray(x), data))
    return pd.DataFrame({"kind": data.kinds, "share": data.shares, "pieces": sizes, "weight": learnt})


def table(histories: pd.DataFrame) -> pd.DataFrame:
    """Return the last evaluation of each method: mean and deviation over the seeds, and the cost of a run."""
    rows = []
    for name, own in histories.groupby("method", sort=False):
        ends = own.groupby("seed").tail(1)
        late = own[own["round"] > 0].groupby("seed")[["round", "seconds"]].agg(lambda a: a.iloc[-1] - a.iloc[0])
        last, per_round = ends.iloc[0], (late["seconds"] / late["round"]).median()  # the first rounds compile
        rows.append([name, len(ends), ends["perplexity"].mean(), ends["perplexity"].std(), last["round"], per_round])
        rows[-1] += [last["exchanges"], last["bytes_up"] / 1e9, last["bytes_down"] / 1e9]
    columns = ["method", "seeds", "perplexity", "±", "rounds", "s/round", "exchanges", "GB up", "GB down"]
    return pd.DataFrame(rows, columns=columns).round({"perplexity": 3, "±": 3, "s/round": 4, "GB up": 3, "GB down": 3})


def draw(histories: pd.DataFrame, weights: pd.DataFrame, path: Path) -> None:
    """Draw the perplexity over rounds, and the weights of each kind of client."""
    fig, (left, right) = plt.subplots(1, 2, figsize=(10, 3.8), layout="constrained")
    colours = {ALL: "tab:orange", HALF: "tab:red", CHECKED: "tab:gray", NESTED: "tab:blue", CLEAN: "tab:green"}
    for name, own in histories[histories["round"] > 0].groupby("method", sort=False):
        over = own.groupby("round")["perplexity"].agg(["mean", "min", "max"])
        left.plot(over.index, over["mean"], color=colours[name], ls="--" if name == CLEAN else "-", label=name)
        left.fill_between(over.index, over["min"], over["max"], color=colours[name], alpha=0.2, lw=0)
    left.set(title="Perplexity of clean test text", xlabel="round", yscale="log")
    left.yaxis.set(major_locator=LogLocator(subs=(1, 2, 5)), major_formatter="{x:g}", minor_formatter="")
    left.legend()
    names = ("clean", *KINDS)
    places = weights["kind"].map(names.index).to_numpy()
    jitter = np.random.default_rng(0).uniform(-0.25, 0.25, len(places))
    right.scatter(places + jitter, weights["weight"], s=12, c=np.where(places == 0, "tab:green", "tab:red"))
    right.axhline(1, color="black", lw=0.5)
    right.set(xticks=range(len(names)), xticklabels=names, yscale="log")
    right.set(title="The weight that each client's text is given")
    fig.savefig(path, dpi=150)
    plt.close(fig)


def search(sizes: Sizes, rounds: int) -> None:
    """Try nine candidates for each method, on a separate federation and test text."""
    data, begin = make(sizes, seed=100), time.perf_counter()
    for name, word in ((NESTED, "weight"), (ALL, "local"), (CLEAN, "local"), (CHECKED, "local")):
        for one, other in product((0.3, 1.0, 3.0), repeat=2):
            start = CHOSEN[sizes]
            steps = start._replace(**{"model": one * start.model, word: other * getattr(start, word)})
            run = run_rounds(setting(name, sizes, data, steps, 0), sizes, rounds, rounds, 0)
            found = f"{run.history['perplexity'].iloc[-1]:.3f}" if run.stopped is None else run.stopped
            told = f"{name:24} model={steps.model:g} {word}={getattr(steps, word):g}: {found}"
            print(f"{time.perf_counter() - begin:6.0f} s  {told}", flush=True)


def main() -> None:
    """Run the methods, or search their steps."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--small", action="store_true", help="a model of 32,000 parameters and 16 clients")
    parser.add_argument("--search", action="store_true", help="try step sizes, and print the results")
    parser.add_argument("--rounds", type=int, help="rounds of each run")
    parser.add_argument("--seeds", type=int, nargs="+", default=[2, 3, 4], help="by default, seeds that chose no step")
    parser.add_argument("--methods", nargs="+", default=[NESTED, ALL, CLEAN], choices=METHODS)
    parser.add_argument("--minutes", type=float, default=np.inf, help="after so many minutes, stop")
    parser.add_argument("--out", type=Path, default=Path("language-model"), help="folder to write to")
    for word in Steps._fields:
        parser.add_argument(f"--{word}", type=float, help="instead of the chosen step: see Steps")
    options = parser.parse_args()
    sizes = SMALL if options.small else LARGE
    rounds = options.rounds or sizes.rounds
    others = {word: value for word in Steps._fields if (value := getattr(options, word)) is not None}
    if options.search:
        return search(sizes, rounds)
    begin, every = time.perf_counter(), max(1, rounds // 20)
    elapsed = lambda: time.perf_counter() - begin
    late = lambda: elapsed() > 60 * options.minutes
    options.out.mkdir(parents=True, exist_ok=True)
    model = jax.eval_shape(lambda: transformer(jax.random.key(0), sizes))
    print(f"{sum(a.size for a in jax.tree.leaves(model)):,} parameters, {sizes.clients} clients, {len(WORDS)} words")
    data = {seed: make(sizes, seed) for seed in options.seeds}
    finished, learnt = [], []
    for name, seed in product(options.methods, options.seeds):
        if late():
            break

        def save(run, name=name, seed=seed):
            """Save at every evaluation, so that an interrupted run leaves its results."""
            history = run.history.assign(method=name, seed=seed)
            pd.concat([*finished, history]).to_csv(options.out / "histories.csv", index=False)
            last = history.iloc[-1]
            told = f"{name}, seed {seed}, round {last['round']:.0f}: perplexity {last['perplexity']:.3f}"
            print(f"{elapsed():6.0f} s  {told}", flush=True)
            return late()

        made = setting(name, sizes, data[seed], CHOSEN[sizes]._replace(**others), seed)
        run = run_rounds(made, sizes, rounds, every, seed, callbacks=[save])
        finished.append(run.history.assign(method=name, seed=seed))
        if name == NESTED:
            learnt.append(weights_of(run.x, data[seed]).assign(seed=seed))
            pd.concat(learnt).to_csv(options.out / "weights.csv", index=False)
    if not finished:
        return print("No run was finished: give it more minutes.")
    histories = pd.concat(finished)
    print(table(histories).to_string(index=False))
    if learnt:
        weighed = pd.concat(learnt)
        print(weighed.groupby("kind")["weight"].agg(["mean", "min", "max"]).round(3).to_string())
        draw(histories, weighed, options.out / "language-model.png")
    memory = jax.local_devices()[0].memory_stats() or {}
    peak = f"{memory.get('peak_bytes_in_use', 0) / 1e9:.1f} GB at the most" if memory else ""
    print(f"{elapsed():.0f} s in all", peak)


if __name__ == "__main__":
    main()
