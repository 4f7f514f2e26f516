"""What the experiments on robust means and compression share: the tasks, the methods, the rules and the attacks."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

import rookery.channels.attacks as attacks
from rookery.algorithms import BRFedBiM
from rookery.base.draws import seed_key
from rookery.channels import robust
from rookery.experiments.machinery import Config, Grid
from rookery.experiments.machinery.curves import labelled, select
from rookery.experiments.machinery.numbers import keyed
from rookery.experiments.privacy import shared as privacy
from rookery.language.channel import Faults
from rookery.language.fed import Algorithm
from rookery.tasks.data_cleaning import data_cleaning
from rookery.tasks.hyperrep import hidden, hyperrep, layers
from rookery.tasks.linear import scores
from rookery.tasks.task import Task

CLIENTS, ROUNDS, WIDTH, LOCAL, SAMPLES = 20, 100, privacy.WIDTH, privacy.LOCAL, privacy.SAMPLES
BATCH = {"representation": 50, "cleaning": 200}  # a client's images of each level in a local step
SEEDS, SEARCH_SEEDS = (0, 1, 2, 3, 4), (9, 10, 11)
TASKS = {"representation": "hyper-representation", "cleaning": "data cleaning"}
METHODS = ("FedNest", "FedBiO", "ASFBO", "FedAvg")
EXTRA = "BRFedBiM"  # on hyper-representation alone

# By experiment, task, method and rule (or compressor): the upper and the lower step with the plain mean; with clipping
# the radius; with a compressor the factor of both steps.
CHOSEN = {
    key: tuple(value for value in values if value == value)
    for key, values in keyed(Path(__file__).with_name("chosen.csv"), 4).items()
}


# The tasks. The data are the same for every seed, so that runs with several seeds can share a compiled program.


def partition(unlike: bool) -> str:
    """How the clients' data are drawn: i.i.d., or two labels for each client."""
    return "shards" if unlike else "iid"


def representation(seed: int, clients: int, plain: bool, unlike: bool, data: str, data_dir: Any = None) -> Task:
    """Hyper-representation; `plain`: both layers trained together, for FedAvg."""
    task = hyperrep(clients, partition(unlike), width=WIDTH, data=data, equal=True, data_dir=data_dir)
    start = layers(seed_key(seed), task.init[0]["w"].shape[0], WIDTH, 10)
    both: Any = lambda x, y, images: scores(y, hidden(x, {"image": images}))
    score = (lambda z, _, images: both(*z, images)) if plain else both
    return privacy.evaluated(task, plain, start, score, data, data_dir)


def cleaning(seed: int, clients: int, plain: bool, unlike: bool, data: str, data_dir: Any = None) -> Task:
    """Data cleaning, with two fifths of the labels wrong; `plain`: no weights, for FedAvg."""
    task = data_cleaning(clients, partition(unlike), data=data, equal=True, data_dir=data_dir)
    score = lambda x, y, images: scores(x if plain else y, {"image": images})
    return privacy.evaluated(task, plain, task.init[1] if plain else task.init, score, data, data_dir)


def start(task: Task, config: Config, seed: int) -> Any:
    """What the task starts from with another seed."""
    if config.task is not representation:
        return task.init
    return layers(seed_key(seed), task.clients.lower.rows["image"].shape[1], WIDTH, 10)


MAKE: dict[str, Callable[..., Task]] = {"representation": representation, "cleaning": cleaning}

# The rules: all tolerate 30 % of the clients, and bucketing 20 %, which is nearly the most it can.
BORNE, BORNE_IN_BUCKETS = 0.3, 0.2


def rule(name: str, clients: int, radius: float = 1.0) -> Any:
    """A robust mean; None is the plain one."""
    liars = round(BORNE * clients)
    made = {
        "mean": lambda: None,
        "median": lambda: robust.median(BORNE),
        "trimmed mean": lambda: robust.trimmed_mean(BORNE),
        "geometric median": lambda: robust.geometric_median(BORNE),
        "multi-Krum": lambda: robust.krum(BORNE, keep=clients - liars - 2),
        "clipping": lambda: robust.centered_clipping(radius, BORNE),
        "nearest neighbors": lambda: robust.nearest_neighbors(robust.trimmed_mean(BORNE)),
        "bucketing": lambda: robust.bucketing(robust.median(BORNE_IN_BUCKETS)),
    }
    return made[name]()


RULES = (
    "mean", "median", "trimmed mean", "geometric median", "multi-Krum", "clipping", "nearest neighbors", "bucketing",
)  # fmt: skip
ROBUST = RULES[1:-1]  # those that tolerate 30 %
FEW = ("mean", "median", "nearest neighbors")  # for BRFedBiM, and scaled down

# The attacks.
SCALE, Z, EPSILON = 5.0, 1.5, 0.5


def other_labels(rows: Any) -> Any:
    """Nine minus the label."""
    return {**rows, "label": 9 - rows["label"]}


ATTACKS: dict[str, Callable[[float], Any]] = {
    "sign flip": lambda share: attacks.SignFlip(share, scale=SCALE),
    "a little": lambda share: attacks.ALittleIsEnough(share, z=Z),
    "inner product": lambda share: attacks.InnerProduct(share, scale=EPSILON),
    "labels": lambda share: attacks.LabelFlip(share, flip=other_labels),
    "mimic": lambda share: attacks.Mimic(share),
}
NO_LIARS = ("none", 0.0)
Cell = tuple[str, float]  # an attack, and the share of clients that lie


# The runs.


def algorithm(task: str, method: str, steps: Sequence[float], batch_size: int) -> Algorithm:
    """A method with five local steps, and BRFedBiM, which has one, with five times their batch."""
    upper, lower = steps
    upper = upper * SAMPLES if task == "cleaning" else upper
    if method == EXTRA:
        return BRFedBiM(upper_step=upper, lower_step=lower, linear_step=lower, batch_size=LOCAL * batch_size)
    both = 2 * batch_size if (task, method) == ("representation", "FedAvg") else batch_size  # both levels in one set
    return privacy.algorithm(method, upper, lower, both)


def run_name(*labels: str | float) -> str:
    """The name of a run with these labels."""
    return ", ".join(f"{label:g}" if isinstance(label, float) else label for label in labels)


def config(
    quick: bool, task: str, method: str, steps: Sequence[float], labels: Mapping[str, Any], unlike: bool, **changes: Any
) -> Config:
    """One method on one task; `steps`: the upper one, in `cleaning` over SAMPLES, and the lower one."""
    clients, rounds, batch = (10, 2, 10) if quick else (CLIENTS, ROUNDS, BATCH[task])
    data = "digits" if quick else "mnist"
    return Config(
        name=run_name(task, method, *labels.values()),
        labels={"task": task, "method": method, **labels},
        task=MAKE[task],
        settings={"clients": clients, "plain": method == "FedAvg", "unlike": unlike, "data": data},
        algorithm=algorithm(task, method, steps, batch),
        rounds=rounds,
        every=max(1, rounds // 5),
        seeds=(0,) if quick else SEEDS,
    ).but(**changes)


def attacked(
    quick: bool,
    unlike: bool,
    task: str,
    method: str,
    name: str,
    cell: Cell,
    steps: Sequence[float],
    radius: float = 1.0,
) -> Config:
    """A method with a rule, under an attack."""
    clients = 10 if quick else CLIENTS
    attack = None if cell == NO_LIARS else Faults(attack=ATTACKS[cell[0]](cell[1]))
    labels = {"rule": name, "attack": cell[0], "share": cell[1]}
    return config(quick, task, method, steps, labels, unlike, channel=rule(name, clients, radius), faults=attack)


# The search: twenty pairs of steps for each method, of which FedAvg has only the lower one.
UPPERS = {"representation": (0.1, 0.3, 1.0, 3.0), "cleaning": (0.1, 1.0, 10.0, 100.0)}
LOWERS = (0.01, 0.03, 0.1, 0.3, 1.0)
ALONE = tuple(float(f"{10 ** (k / 8 - 2.5):.2g}") for k in range(20))  # .0032 to .75
RADII = (0.03, 0.1, 0.3, 1.0, 3.0, 10.0)
TRIED_ON: tuple[Cell, ...] = (NO_LIARS, ("sign flip", 0.2), ("a little", 0.2))  # radii


def pairs(quick: bool, task: str, method: str) -> list[tuple[float, float]]:
    """The steps that are tried."""
    if method == "FedAvg":
        tried = [(0.0, lower) for lower in ALONE]
    else:
        tried = [(upper, lower) for upper in UPPERS[task] for lower in LOWERS]
    return tried[::13] if quick else tried


def tried(quick: bool, found: Config, words: str, label: str) -> Config:
    """A configuration of the search."""
    seeds = SEARCH_SEEDS[:1] if quick else SEARCH_SEEDS
    return found.but(name=f"search: {found.labels['task']}, {found.labels['method']}, {label}, {words}", seeds=seeds)


def step_search(quick: bool, unlike: bool, task: str, method: str) -> list[Config]:
    """The search of the steps, with the plain mean and without liars."""
    return [
        tried(
            quick, attacked(quick, unlike, task, method, "mean", NO_LIARS, steps),
            f"upper {steps[0]:g}, lower {steps[1]:g}", "mean",
        )
        for steps in pairs(quick, task, method)
    ]  # fmt: skip


def radius_search(quick: bool, unlike: bool, task: str, method: str, steps: Sequence[float]) -> list[Config]:
    """The search of the radius of centered clipping, with these steps, under attacks."""
    return [
        tried(
            quick, attacked(quick, unlike, task, method, "clipping", cell, steps, radius),
            f"{cell[0]} {cell[1]:g}, radius {radius:g}", "clipping",
        )
        for radius in (RADII[::3] if quick else RADII)
        for cell in (TRIED_ON[:2] if quick else TRIED_ON)
    ]  # fmt: skip


GRID = Grid(
    r"(?:upper (?P<upper>\S+), lower (?P<lower>\S+)|radius (?P<radius>\S+))$",
    ("task", "method", "rule"),
    lambda found: found["search_accuracy"],
)


def cells(found: pd.DataFrame) -> list[Cell]:
    """The attacks and shares among the results, in order."""
    pairs = set(zip(found["attack"].tolist(), found["share"].tolist(), strict=True))
    order = ["none", *ATTACKS]
    return sorted(pairs, key=lambda cell: (order.index(cell[0]), cell[1]))


def among(results: pd.DataFrame, label: str, order: Sequence[str], **labels: Any) -> list[str]:
    """The values of a label that were run, in this order."""
    there = set(select(results, **labels)[label])
    return [value for value in order if value in there]


def end(results: pd.DataFrame, task: str, method: str, name: str, cell: Cell, metric: str = "accuracy") -> np.ndarray:
    """A metric after the last round, for each seed; 0 where the run has left the finite numbers."""
    rows = labelled(results, run=run_name(task, method, name, *cell))
    assert rows.any(), f"{(task, method, name, *cell)} was not run"
    rounds, seeds, values = (results[column].to_numpy()[rows] for column in ("round", "seed", metric))
    last = rounds == rounds.max()
    return np.nan_to_num(values[last][np.argsort(seeds[last])].astype(float), nan=0.0)


def loss(results: pd.DataFrame, task: str, method: str, name: str, cell: Cell) -> np.ndarray:
    """How much less accuracy a method reaches than with the plain mean and without liars, for each seed."""
    return end(results, task, method, "mean", NO_LIARS) - end(results, task, method, name, cell)


def kept(results: pd.DataFrame) -> pd.DataFrame:
    """The last evaluation of every run, without what is the same or not shown."""
    wanted = ["run", "task", "method", "rule", "attack", "share", "seed", "round", "seconds", "accuracy", "auc"]
    last = results[results["round"] == results["round"].max()]
    return last[[name for name in wanted if name in last]]
