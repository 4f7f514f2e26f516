"""Accuracy by the clock where clients differ in speed: synchronous, over-selected and asynchronous rounds."""

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from rookery import report
from rookery.base.draws import seed_key
from rookery.data.clients import Clients
from rookery.experiments.channels import shared
from rookery.experiments.machinery import Claims, Config, Experiment, Finding, Grid, Headline, description
from rookery.experiments.machinery.claims import Lead, all_lead, lead
from rookery.experiments.machinery.curves import curves, reached, select
from rookery.experiments.machinery.drawing import below
from rookery.experiments.machinery.numbers import keyed
from rookery.language.asynchronous import Asynchronous
from rookery.language.channel import Faults
from rookery.language.clock import Clock
from rookery.tasks.data_cleaning import data_cleaning
from rookery.tasks.hyperrep import hidden, layers
from rookery.tasks.images import digit_images, mnist_images
from rookery.tasks.linear import scores
from rookery.tasks.task import Task

NAME = "delay"
CLIENTS, AT_WORK, HEARD, BUFFER = 100, 15, 10, 5
SLOWEST, FASTEST, LATENCY, UPLINK, DOWNLINK = 1.0, 10.0, 0.1, 1e6, 1e7  # gradients, seconds, bytes
SECONDS = 2000.0  # after which runs are compared
SLOW, FIRST_LABEL = 0.3, 7  # the share of the slowest clients, which hold the labels from this one on
BATCH = {"representation": 50, "cleaning": 40}
SEEDS, SEARCH_SEED = (0, 1, 2, 3, 4), 9
LEARN, CLEAN = TASKS = ("representation", "cleaning")
WORDS = shared.TASKS
METHODS = ("FedBiO", "SimFBO", "ASFBO", "FedNest", "LFedNest", "FedAvg")
SEVERAL = ("FedNest", "LFedNest")  # methods with more than one exchange in a round
SYNCHRONOUS, OVER, LATE = MODES = ("synchronous", "over-selected", "asynchronous")
EVEN = "asynchronous, staleness 0"  # where clients are unlike, with the steps of LATE
ALIKE, UNLIKE = KINDS = ("alike", "unlike")
CHOSEN = keyed(Path(__file__).with_name("chosen.csv"), 4)  # the steps by task, method, mode and kind of clients
EVALUATIONS = 40


# The tasks and the clock. The data are the same for every seed, so that runs with several seeds share a program.


def representation(seed: int, clients: int, plain: bool, kind: str, data: str, data_dir: Any = None) -> Task:
    """Hyper-representation; `plain`: both layers trained together, for FedAvg."""
    task = _task(LEARN, clients, plain, kind, data, data_dir)
    inputs = (task.clients.upper if plain else task.clients.lower).rows["image"].shape[1]
    return replace(task, init=layers(seed_key(seed), inputs, shared.WIDTH, 10))


def cleaning(seed: int, clients: int, plain: bool, kind: str, data: str, data_dir: Any = None) -> Task:
    """Data cleaning, with two fifths of the labels wrong."""
    return _task(CLEAN, clients, plain, kind, data, data_dir)


MAKE = {LEARN: representation, CLEAN: cleaning}


@lru_cache(maxsize=1)
def _task(name: str, clients: int, plain: bool, kind: str, data: str, data_dir: Any) -> Task:
    """The task with the start of one seed, which also evaluates the accuracy on the labels of slow clients."""
    task = shared.MAKE[name](0, clients, plain, False, data, data_dir)
    _, _, images, labels = (digit_images if data == "digits" else mnist_images)(0, data_dir)
    half = len(labels) // 2
    own = np.flatnonzero(labels >= FIRST_LABEL)
    own = own[own >= half]  # the first half is for the search
    pixels, right, whole = jnp.asarray(images[own]), jnp.asarray(labels[own]), task.evaluate

    def evaluate(x: Any, y: Any) -> dict[str, Any]:
        first, last = x if plain else (x, y)
        inputs = {"image": pixels} if name == CLEAN else hidden(first, {"image": pixels})
        correct = jnp.argmax(scores(last, inputs), axis=1) == right
        return {**whole(x, y), "slow": jnp.mean(correct)}

    if kind == UNLIKE:
        right_labels = None
        if name == CLEAN:
            clean = data_cleaning(clients, corrupted=0.0, data=data, equal=True, data_dir=data_dir)
            right_labels = clean.clients.lower.rows["label"]
        task = replace(task, clients=by_label(task.clients, plain, right_labels))
    return replace(task, evaluate=evaluate)


def by_label(clients: Clients, plain: bool, right: Any = None) -> Clients:
    """The same samples dealt out anew, so that the last clients get all labels from FIRST_LABEL on.

    `right`: the right labels of the lower level, if its rows have others; `plain`: there is one level.
    """

    def dealt(level: Any, labels: Any = None) -> Any:
        labels = level.rows["label"] if labels is None else labels
        order = np.argsort(np.asarray(labels) >= FIRST_LABEL, kind="stable")
        return {name: np.asarray(rows)[order] for name, rows in level.rows.items()}, level.sizes

    upper = dealt(clients.upper)
    return Clients.from_arrays(*upper) if plain else Clients.from_arrays(*dealt(clients.lower, right), upper=upper)


def speeds(seed: int, clients: int, kind: str) -> Clock:
    """Speeds drawn log-uniformly over a factor of ten; where clients are unlike, the last ones are the slowest."""
    rng = np.random.default_rng([seed, 4])
    compute = np.exp(rng.uniform(np.log(SLOWEST), np.log(FASTEST), clients))
    if kind == UNLIKE:
        slow = round(SLOW * clients)
        order = np.argsort(-compute)
        compute = compute[np.concatenate([rng.permutation(order[:-slow]), rng.permutation(order[-slow:])])]
    return Clock(compute=compute, uplink=UPLINK, downlink=DOWNLINK, latency=LATENCY)


# The runs.

# Rounds to SECONDS, with a tenth to spare: by task and method synchronous ones; and how many more in the other modes.
ROUNDS = {
    LEARN: {"FedBiO": 85, "SimFBO": 85, "ASFBO": 85, "FedNest": 105, "LFedNest": 140, "FedAvg": 485},
    CLEAN: {"FedBiO": 85, "SimFBO": 85, "ASFBO": 85, "FedNest": 105, "LFedNest": 140},
}
MORE = {SYNCHRONOUS: 1.0, OVER: 2.05, LATE: 7.4}

Key = tuple[str, str, str]  # a task, a method and a mode


def keys(quick: bool) -> list[Key]:
    """What is run for each kind of clients."""
    some = ("FedBiO", "FedNest", "FedAvg") if quick else METHODS
    every = [(task, method, mode) for task in TASKS for method in some for mode in MODES if method in ROUNDS[task]]
    return [key for key in every if not (key[2] == LATE and key[1] in SEVERAL)]


def config(quick: bool, key: Key, kind: str, steps: Sequence[float], **changes: Any) -> Config:
    """A method on a task in a mode; `steps`: the upper one, in `cleaning` over shared.SAMPLES, and the lower one."""
    task, method, mode = key
    clients, at_work, heard, buffer = (20, 6, 4, 2) if quick else (CLIENTS, AT_WORK, HEARD, BUFFER)
    rounds = 4 if quick else round(ROUNDS[task][method] * MORE[mode])
    plain = method == "FedAvg"
    return Config(
        name=shared.run_name(*key, kind),
        labels={"task": task, "method": method, "mode": mode, "clients": kind},
        task=MAKE[task],
        settings={"clients": clients, "plain": plain, "kind": kind, "data": "digits" if quick else "mnist"},
        algorithm=shared.algorithm(task, method, steps, 5 if quick else BATCH[task]),
        cohort=at_work,
        faults=Faults(first=heard) if mode == OVER else None,
        asynchronous=Asynchronous(buffer=buffer) if mode == LATE else None,
        clock=partial(speeds, clients=clients, kind=kind),
        rounds=rounds,
        every=max(1, rounds // EVALUATIONS),
        seeds=(0,) if quick else SEEDS,
    ).but(**changes)


def reported(quick: bool, key: Key, kind: str, steps: Sequence[float]) -> list[Config]:
    """The runs of a method with these steps."""
    own = config(quick, key, kind, steps)
    if key[2] != LATE or kind != UNLIKE:
        return [own]
    even = replace(own.asynchronous, staleness=0.0)
    return [own, own.but(name=f"{own.name}, staleness 0", labels={**own.labels, "mode": EVEN}, asynchronous=even)]


def runs(quick: bool) -> list[Config]:
    """Every method in every mode, with both kinds of clients."""
    steps = lambda *labels: (0.1, 0.1) if quick else CHOSEN[labels]
    return [c for key in keys(quick) for kind in KINDS for c in reported(quick, key, kind, steps(*key, kind))]


# The search: twelve pairs of steps for each method, mode and kind, of which FedAvg has only the lower one.
UPPERS = {LEARN: (0.3, 1.0, 3.0), CLEAN: (1.0, 10.0, 100.0)}
LOWERS = (0.01, 0.03, 0.1, 0.3)
ALONE = tuple(float(f"{10 ** (k / 5.5 - 2):.2g}") for k in range(12))  # .01 to 1


def tried(quick: bool, key: Key, kind: str) -> list[Config]:
    """The configurations of the search of one method, on a seed that is not reported."""
    pairs = [(0.0, lower) for lower in ALONE]
    if key[1] != "FedAvg":
        pairs = [(upper, lower) for upper in UPPERS[key[0]] for lower in LOWERS]
    name = f"search: {shared.run_name(*key, kind)}, upper {{:g}}, lower {{:g}}"
    some = pairs[::8] if quick else pairs
    return [config(quick, key, kind, pair, name=name.format(*pair), seeds=(SEARCH_SEED,)) for pair in some]


def search(quick: bool) -> list[Config]:
    """The steps of every method in every mode, for both kinds of clients."""
    return [found for kind in KINDS for key in keys(quick) for found in tried(quick, key, kind)]


GRID = Grid(
    r"upper (?P<upper>\S+), lower (?P<lower>\S+)$",
    ("task", "method", "mode", "clients"),
    lambda found: found["search_accuracy"],
)


# The claims, which were written before the search and the reported runs.

EARLY, NEAR, MUCH, LESS = 1 / 3, 0.01, 0.1, 0.05  # of the seconds; of accuracy


def end(results: pd.DataFrame) -> float:
    """SECONDS, or scaled down the seconds of the shortest run."""
    if results["clock"].max() >= SECONDS:
        return SECONDS
    return float(results.groupby(["run", "seed"])["clock"].max().min())


def at(results: pd.DataFrame, key: Key, share: float = 1.0, kind: str = ALIKE, metric: str = "accuracy") -> np.ndarray:
    """A metric after this share of the seconds, averaged over the last fifth of them, for each seed; 0 for NaN."""
    until = share * end(results)
    found = []
    for curve in curves(results, metric, "clock", **_labels(key, kind)):
        before = curve[curve.index <= until]
        late = before[before.index > 0.8 * until]
        found.append(float((late if len(late) else before.tail(1)).mean()))
    return np.nan_to_num(np.array(found), nan=0.0)


def _labels(key: Key, kind: str) -> dict[str, str]:
    return dict(zip(("task", "method", "mode", "clients"), (*key, kind), strict=True))


def run_keys(results: pd.DataFrame, mode: str, task: str | None = None, nested: bool = False) -> list[Key]:
    """The tasks and methods that were run in a mode; `nested`: without FedAvg."""
    among = lambda own: shared.among(results, "method", METHODS[: -1 if nested else None], task=own, mode=mode)
    return [(own, method, mode) for own in ([task] if task else TASKS) for method in among(own)]


def ahead(
    results: pd.DataFrame, mode: str, other: str, share: float, points: float = 0.0, **how: Any
) -> dict[str, Lead]:
    """How much further a mode is than another, and `points` more, for each method that has both."""
    return {
        f"{task}, {method}": lead(at(results, (task, method, mode), share, **how) + points,
                                  at(results, (task, method, other), share, **how))
        for task, method, _ in run_keys(results, mode)
    }  # fmt: skip


def lengths(results: pd.DataFrame, key: Key) -> np.ndarray:
    """The seconds of a round, for each seed."""
    own = curves(results, "clock", **_labels(key, ALIKE))
    return np.array([float(c.iloc[-1] / c.index[-1]) for c in own])


def every(leads: dict[str, Lead], words: str = "lead") -> Finding:
    """`all_lead`, with a note on the methods that leave a claim undecided."""
    found = all_lead(leads, words)
    open_ones = "; ".join(name for name, own in leads.items() if own.holds is None)
    return replace(found, note=f"Within the margin: {open_ones}. The others hold.") if found.holds is None else found


claim = Claims()


@claim("Clients alike: an over-selected round takes less than 60 % of the seconds of a synchronous one, every method.")
def rounds_are_short(results: pd.DataFrame) -> Finding:
    ratios = {
        f"{task}, {method}": lengths(results, (task, method, OVER)) / lengths(results, (task, method, SYNCHRONOUS))
        for task, method, _ in run_keys(results, OVER)
    }
    return every({name: lead(np.full_like(own, 0.6), own) for name, own in ratios.items()}, ".6 less the share")


@claim("Clients alike: at a third of the time, over-selected rounds are ahead of synchronous ones, every method.")
def over_selection_is_ahead(results: pd.DataFrame) -> Finding:
    return every(ahead(results, OVER, SYNCHRONOUS, EARLY))


@claim("Clients alike: at a third of the time, asynchronous rounds are ahead of synchronous ones, every method.")
def asynchrony_is_ahead(results: pd.DataFrame) -> Finding:
    return every(ahead(results, LATE, SYNCHRONOUS, EARLY))


@claim("Clients alike: at a third of the time, asynchronous rounds are ahead of over-selected ones, every method.")
def asynchrony_is_first(results: pd.DataFrame) -> Finding:
    return every(ahead(results, LATE, OVER, EARLY))


@claim(
    f"Clients alike: asynchronous rounds reach in a third of the time, within {100 * NEAR:g} point, what synchronous "
    "ones reach in all of it, every method."
)
def three_times_as_fast(results: pd.DataFrame) -> Finding:
    of = partial(at, results)
    leads = {
        f"{task}, {method}": lead(of((task, method, LATE), EARLY) + NEAR, of((task, method, SYNCHRONOUS)))
        for task, method, _ in run_keys(results, LATE)
    }
    return every(leads, f"lead and {100 * NEAR:g} point")


@claim(
    f"Clients alike: at the end neither over-selected nor asynchronous rounds are more than {100 * NEAR:g} point below "
    "synchronous ones, every method."
)
def nothing_is_lost(results: pd.DataFrame) -> Finding:
    leads = {
        f"{name}, {mode}": own
        for mode in (OVER, LATE)
        for name, own in ahead(results, mode, SYNCHRONOUS, 1.0, NEAR).items()
    }
    return every(leads, f"lead and {100 * NEAR:g} point")


@claim(
    "Clients alike: at a third of the time, asynchronous FedBiO is ahead of FedNest and LFedNest with over-selected "
    "rounds, both tasks."
)
def one_exchange_is_ahead(results: pd.DataFrame) -> Finding:
    of = partial(at, results, share=EARLY)
    leads = {
        f"{task}, {method}": lead(of((task, "FedBiO", LATE)), of((task, method, OVER)))
        for task, method, _ in run_keys(results, OVER)
        if method in SEVERAL
    }
    return every(leads)


@claim("Clients alike: asynchronous rounds end data cleaning with a higher AUC than synchronous ones, every method.")
def weights_move_more(results: pd.DataFrame) -> Finding:
    of = lambda method, mode: at(results, (CLEAN, method, mode), metric="auc")
    return every({m: lead(of(m, LATE), of(m, SYNCHRONOUS)) for _, m, _ in run_keys(results, LATE, CLEAN)})


@claim(
    f"Where the slow clients hold the labels 7 to 9, over-selected rounds end more than {100 * MUCH:g} points below "
    "synchronous ones on these labels, every method."
)
def slow_labels_are_lost(results: pd.DataFrame) -> Finding:
    leads = ahead(results, OVER, SYNCHRONOUS, 1.0, MUCH, kind=UNLIKE, metric="slow")
    return every({name: Lead(-own.mean, own.error) for name, own in leads.items()}, f"loss less {100 * MUCH:g} points")


@claim(
    f"Where the slow clients hold the labels 7 to 9, asynchronous rounds end less than {100 * LESS:g} points below "
    "synchronous ones on these labels, every method."
)
def slow_labels_are_kept(results: pd.DataFrame) -> Finding:
    return every(
        ahead(results, LATE, SYNCHRONOUS, 1.0, LESS, kind=UNLIKE, metric="slow"), f"lead and {100 * LESS:g} points"
    )


@claim(
    "Where the slow clients hold the labels 7 to 9, asynchronous rounds end ahead of over-selected ones on all labels, "
    "every method."
)
def asynchrony_is_fairer(results: pd.DataFrame) -> Finding:
    return every(ahead(results, LATE, OVER, 1.0, kind=UNLIKE))


@claim(
    "Where the slow clients hold the labels 7 to 9, over-selected rounds end data cleaning with a lower AUC than "
    "synchronous ones, every method: the weights of slow clients hardly move."
)
def slow_weights_stay(results: pd.DataFrame) -> Finding:
    of = lambda method, mode: at(results, (CLEAN, method, mode), kind=UNLIKE, metric="auc")
    return every({m: lead(of(m, SYNCHRONOUS), of(m, OVER)) for _, m, _ in run_keys(results, OVER, CLEAN)})


@claim(
    "Where the slow clients hold the labels 7 to 9, asynchronous rounds in which replies count alike (staleness 0) end "
    "higher on these labels than the others (staleness .5), every method."
)
def stale_replies_matter(results: pd.DataFrame) -> Finding:
    return every(ahead(results, EVEN, LATE, 1.0, kind=UNLIKE, metric="slow"))


# The pictures.

LOOKS: dict[str, dict[str, Any]] = {
    SYNCHRONOUS: {"color": report.BLACK, "linestyle": "--"},
    OVER: {"color": report.ORANGE, "linestyle": "-"},
    LATE: {"color": report.BLUE, "linestyle": "-"},
    EVEN: {"color": report.SKY, "linestyle": "--"},
}
COLUMNS = 3


def picture(results: pd.DataFrame, kind: str = ALIKE, metric: str = "accuracy", words: str = "accuracy") -> Figure:
    """A metric against the simulated seconds: rows for each task, a panel for each method, a line for each mode."""
    shown = {task: shared.among(results, "method", METHODS, task=task) for task in TASKS}
    rows = {task: math.ceil(len(methods) / COLUMNS) for task, methods in shown.items()}
    fig, axes = report.figure(sum(rows.values()), COLUMNS, width=3.2 * COLUMNS, height=3.0 * sum(rows.values()))
    begin = 0
    for task, methods in shown.items():
        panels = axes[begin : begin + rows[task]].ravel()
        begin += rows[task]
        for ax in panels[len(methods) :]:
            ax.set_visible(False)
        own = select(results, task=task, clients=kind)
        top = own.groupby(["run", "round"])[metric].mean().max()
        for n, (ax, method) in enumerate(zip(panels, methods, strict=False)):
            for mode in shared.among(own, "mode", tuple(LOOKS), method=method):
                line = select(own, method=method, mode=mode)
                report.band(ax, line[line["clock"] > 0], "clock", metric, label=mode, marker="", **LOOKS[mode])
            ax.set_xscale("log")
            ax.set_xlim(end(results) / 50, end(results))
            ax.set_ylim(max(0.0, top - 0.25) if metric == "accuracy" and kind == ALIKE else 0.0, top + 0.02)
            report.label(ax, "simulated seconds", words if n % COLUMNS == 0 else "", f"{method},\n{WORDS[task]}")
    below(fig, axes[0, 0], len(LOOKS))
    return fig


def faster(results: pd.DataFrame, task: str, method: str, mode: str) -> np.ndarray:
    """How many times sooner than synchronous rounds, by their median over the seeds, a mode comes within a point of
    what these reach at the end."""
    goal = np.median(at(results, (task, method, SYNCHRONOUS))) - NEAR

    def seconds(own: str) -> np.ndarray:
        runs = curves(results, "accuracy", "clock", **_labels((task, method, own), ALIKE))
        return np.array([min(reached(curve[curve.index > 0], goal), end(results)) for curve in runs])

    return np.median(seconds(SYNCHRONOUS)) / seconds(mode)


delay = Experiment(
    **description(NAME, globals()),
    runs=runs,
    picture=picture,
    more={
        "slow clients hold the labels 7 to 9: accuracy on all labels": partial(picture, kind=UNLIKE),
        "slow clients hold the labels 7 to 9: accuracy on these labels": partial(
            picture, kind=UNLIKE, metric="slow", words="accuracy on 7, 8, 9"
        ),
    },
    claims=tuple(claim),
    search=search,
    grid=GRID,
    headlines=lambda results: [
        Headline(f"{method}, {WORDS[task]}, {mode}: sooner by a factor of", "", faster(results, task, method, mode))
        for mode in (OVER, LATE)
        for task, method, _ in run_keys(results, mode)
    ],
    thinned=lambda results: results[
        ["run", "task", "method", "mode", "clients", "seed", "round", "seconds", "clock", "accuracy", "slow"]
        + ["auc"] * ("auc" in results)
    ].round({"clock": 1, "seconds": 1, "accuracy": 4, "slow": 4, "auc": 4}),
)  # fmt: skip
