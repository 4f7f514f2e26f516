"""What the experiments on privacy share: the tasks, the methods, and runs with a budget for each client."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pandas as pd
from jaxtyping import Array, Float
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from rookery import report
from rookery.algorithms import ASFBO, FedAvg, FedBiO, FedDRO, FedNest, LFedNest, SimFBO
from rookery.base.draws import seed_key
from rookery.channels.private import private
from rookery.data.clients import Clients
from rookery.data.cohort import Poisson
from rookery.experiments.machinery import Config, Grid
from rookery.experiments.machinery.curves import ends, values
from rookery.experiments.machinery.drawing import below, spread
from rookery.experiments.machinery.numbers import keyed
from rookery.language.fed import Algorithm
from rookery.tasks.data_cleaning import data_cleaning
from rookery.tasks.hyperrep import hidden, hyperrep, layers
from rookery.tasks.images import digit_images, mnist_images
from rookery.tasks.linear import scores, zeros
from rookery.tasks.task import Task
from rookery.tasks.worst_group import plain_problem, robust_problem

EPSILONS = (1.0, 2.0, 4.0, 8.0, 16.0, np.inf)  # infinity: neither noise nor bounds
DELTA, QUANTILE, FIRST_BOUND = 1e-5, 0.5, 0.3
CLIENTS, COHORT, ROUNDS, WIDTH, LOCAL = 1000, 100, 100, 32, 5
SEEDS, SEARCH_SEED = (0, 1, 2, 3, 4), 9
CHOSEN = keyed(Path(__file__).with_name("chosen.csv"), 3)  # `upper` and `lower` of `algorithm`, by the search
BAD, GRAIN, TEMPERATURE, PENALTY = 0.2, 0.3, 0.1, 1e-3  # of `two_groups`
NESTED: dict[str, Any] = {"FedNest": FedNest, "LFedNest": LFedNest}
SINGLE_LOOP: dict[str, Any] = {"FedBiO": FedBiO, "ASFBO": ASFBO, "SimFBO": SimFBO}


# The tasks. The data are the same for every seed, so that runs with several seeds can share a compiled program.


def representation(seed: int, clients: int, plain: bool, data: str, data_dir: Any = None) -> Task:
    """Hyper-representation; `plain`: both layers trained together, for FedAvg."""
    task = hyperrep(clients, width=WIDTH, data=data, equal=True, data_dir=data_dir)
    start = layers(seed_key(seed), task.init[0]["w"].shape[0], WIDTH, 10)
    both: Any = lambda x, y, images: scores(y, hidden(x, {"image": images}))
    score = (lambda z, _, images: both(*z, images)) if plain else both
    return evaluated(task, plain, start, score, data, data_dir)


def cleaning(seed: int, clients: int, plain: bool, data: str, data_dir: Any = None) -> Task:
    """Data cleaning, with two fifths of the labels wrong; `plain`: no weights, for FedAvg."""
    task = data_cleaning(clients, data=data, equal=True, data_dir=data_dir)
    score = lambda x, y, images: scores(x if plain else y, {"image": images})
    return evaluated(task, plain, task.init[1] if plain else task.init, score, data, data_dir)


def two_groups(seed: int, clients: int, plain: bool, data: str, data_dir: Any = None) -> Task:
    """Good and bad scanners, as in the task `worst-group`; `plain`: the mean loss, for FedAvg."""
    images, labels, test, test_labels = _images(data, data_dir)
    rng = np.random.default_rng(1)
    parts = rng.permutation(len(labels))[: len(labels) // clients * clients].reshape(clients, -1)
    kinds = rng.permutation(clients) < round(BAD * clients)
    side = round(images.shape[1] ** 0.5)

    def scanned(images: np.ndarray, bad: bool) -> np.ndarray:
        if not bad:
            return images
        turned = np.rot90(images.reshape(-1, side, side), axes=(1, 2)).reshape(len(images), -1)
        return (turned + GRAIN * rng.normal(size=turned.shape)).astype(np.float32)

    group = lambda own, bad: np.full(len(own), bad, np.int32)
    rows = lambda own, bad: {"image": scanned(images[own], bad), "label": labels[own], "group": group(own, bad)}
    federation = Clients(upper=[rows(own, bool(bad)) for own, bad in zip(parts, kinds, strict=True)])
    tests = [jnp.asarray(scanned(test, bad)) for bad in (False, True)]

    def evaluate(x: Any, _: Any) -> dict[str, Any]:
        good, bad = (_right(scores(x, {"image": own}), test_labels) for own in tests)
        return _named("accuracy", (1 - BAD) * good + BAD * bad) | _named("worst", jnp.minimum(good, bad))

    shares, start = (1 - BAD, BAD), zeros(images.shape[1], 10)
    robust = robust_problem(shares, TEMPERATURE, PENALTY)
    task = Task("two-groups", robust, federation, (start, None), evaluate, "accuracy")
    return replace(task, problem=plain_problem(shares, "samples", PENALTY), init=start) if plain else task


def _images(data: str, data_dir: Any) -> Any:
    return (digit_images if data == "digits" else mnist_images)(0, data_dir)


def evaluated(task: Task, plain: bool, start: Any, score: Any, data: str, data_dir: Any) -> Task:
    """The task from this start with public weights, evaluated on both halves of the test images."""
    _, _, images, labels = _images(data, data_dir)
    images, whole, own = jnp.asarray(images), task.evaluate, task.single_level if plain else task
    assert own is not None
    weighted = not plain and task.name == "data-cleaning"

    def evaluate(x: Any, y: Any) -> dict[str, Any]:
        weights = {"auc": whole(x, y)["auc"]} if weighted else {}
        return _named("accuracy", _right(score(x, y, images), labels)) | weights

    levels = {name: getattr(own.clients, name) for name in ("lower", "upper")}
    rows = {name: (level.rows, level.sizes) for name, level in levels.items()}
    clients = Clients.from_arrays(*rows["upper"]) if plain else Clients.from_arrays(*rows["lower"], upper=rows["upper"])
    return replace(own, clients=clients, init=start, evaluate=evaluate)


def _right(score: Float[Array, "n classes"], labels: Any) -> Float[Array, " 2"]:
    """The share of right answers in the first half of the images, which the search uses, and in the second."""
    right, half = jnp.argmax(score, axis=1) == labels, len(labels) // 2
    return jnp.stack([jnp.mean(right[:half]), jnp.mean(right[half:])])


def _named(name: str, halves: Float[Array, " 2"]) -> dict[str, Any]:
    return {f"search_{name}": halves[0], name: halves[1]}


TASKS: dict[str, Any] = {"representation": representation, "cleaning": cleaning, "groups": two_groups}
SAMPLES = 48_000  # that have a weight in `cleaning`, on MNIST


# The runs.


def algorithm(method: str, upper: float, lower: float, batch_size: int | None = None) -> Algorithm:
    """A method with five local steps; `upper` is FedDRO's β, and FedAvg has only `lower`."""
    if method == "FedAvg":
        return FedAvg(step=lower, local_steps=LOCAL, batch_size=batch_size)
    if method == "FedDRO":
        return FedDRO(step=lower, momentum=upper, local_steps=LOCAL)
    if method in NESTED:
        own: dict[str, Any] = {"lower_local_steps": LOCAL, "neumann_terms": 5, "hessian_step": min(lower, 0.1)}
        own |= {"batch_size": batch_size, "anchor_batch": batch_size}
        return NESTED[method](upper_step=upper, lower_step=lower, **own)
    steps: dict[str, Any] = {"upper_step": upper / LOCAL, "lower_step": lower, "linear_step": lower}
    if method == "FedBiO":
        steps["shared_batch"] = True  # as in SimFBO; with full batches it changes nothing
    else:
        steps |= {f"server_{name}": value for name, value in steps.items()}
    if method == "ASFBO":
        steps["bounds"] = tuple((value / 10, value) for name, value in steps.items() if name.startswith("server_"))
    return SINGLE_LOOP[method](**steps, local_steps=LOCAL, batch_size=batch_size)


def config(quick: bool, task: str, method: str, epsilon: float, values: Sequence[float], **changes: Any) -> Config:
    """One method on one task with one budget; `values`: the upper step, in `cleaning` over SAMPLES, and the lower."""
    upper, lower = values
    clients, cohort, rounds = (60, 20, 3) if quick else (CLIENTS, COHORT, ROUNDS)
    delta = 1e-3 if quick else DELTA
    budget = private(epsilon, delta, FIRST_BOUND, rounds, quantile=QUANTILE) if epsilon < np.inf else None
    return Config(
        name=f"{task}, {method}, ε = {epsilon:g}",
        labels={"task": task, "method": method, "budget": epsilon},
        task=TASKS[task],
        settings={"clients": clients, "plain": method == "FedAvg", "data": "digits" if quick else "mnist"},
        algorithm=algorithm(method, upper * SAMPLES if task == "cleaning" else upper, lower),
        cohort=cohort if budget is None else Poisson(cohort),
        channel=budget,
        rounds=rounds,
        every=max(1, rounds // 10),
        seeds=(0,) if quick else SEEDS,
    ).but(**changes)


# What the search tries: `upper` and `lower` of `algorithm`, of FedAvg `lower` alone.
UPPERS: dict[str, tuple[float, ...]] = {
    "representation": (0.03, 0.1, 0.3, 1.0, 3.0),
    "cleaning": (0.001, 0.1, 1.0, 10.0, 100.0),
    "groups": (0.03, 0.1, 0.3, 0.5, 0.9),
}
LOWERS: dict[str, tuple[float, ...]] = {
    "representation": (0.01, 0.03, 0.1, 0.3, 1.0),
    "cleaning": (0.003, 0.01, 0.03, 0.1, 0.3, 1.0),
    "groups": (0.01, 0.03, 0.1, 0.3, 1.0),
}


def tried(quick: bool, task: str, method: str, epsilon: float, upper: float, lower: float) -> Config:
    """Both values of a method at one budget, on a seed that is not reported."""
    name = f"search: {task}, {method}, ε = {epsilon:g}, upper {upper:g}, lower {lower:g}"
    return config(quick, task, method, epsilon, (upper, lower), name=name, seeds=(SEARCH_SEED,))


def search(quick: bool, task: str, methods: tuple[str, ...]) -> list[Config]:
    """All values at every budget."""
    lowers, epsilons = (LOWERS[task][-1:], EPSILONS[3:4]) if quick else (LOWERS[task], EPSILONS)
    some = UPPERS[task][:1] if quick else UPPERS[task]
    uppers = lambda method: (0.0,) if method == "FedAvg" else some
    return [tried(quick, task, m, e, u, low) for m in methods for e in epsilons for u in uppers(m) for low in lowers]


def against_budget(ax: Axes, results: pd.DataFrame, metric: str, lines: Mapping[str, Mapping[str, Any]]) -> None:
    """Draw the metric after the last round against ε, a line for each entry, as in `drawing.draw`."""
    budgets = values(results, "budget")
    for name, labels in lines.items():
        own = {label: value for label, value in labels.items() if label != "look"}
        each = [ends(results, metric, **own, budget=budget) for budget in budgets]
        spread(ax, np.arange(len(budgets)), each, label=name, **labels["look"])
    ax.set_xticks(np.arange(len(budgets)), [f"{e:g}" if np.isfinite(e) else "none" for e in budgets])


def accuracies(results: pd.DataFrame, tasks: Mapping[str, str], methods: tuple[str, ...]) -> Figure:
    """Draw the test accuracy against ε, a panel for each task; `tasks`: their titles."""
    fig, axes = report.figure(1, len(tasks), width=5.0 * len(tasks), height=4.2)
    for ax, (task, words) in zip(axes[0], tasks.items(), strict=True):
        lines = {m: {"task": task, "method": m, "look": {"color": f"C{i}"}} for i, m in enumerate(methods)}
        against_budget(ax, results, "accuracy", lines)
        report.label(ax, "ε", "test accuracy", words)
    below(fig, axes[0, 0], len(methods))
    return fig


def grid(score: str) -> Grid:
    """How the search chooses: by the first half of the test images, after the last round."""
    pattern = r"upper (?P<upper>\S+), lower (?P<lower>\S+)$"
    return Grid(pattern, ("task", "method", "budget"), lambda found: found[score])
