"""Fair classification: a linear model whose true positive rate is to be the same in every group."""

from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Float

from rookery.base.arguments import check_counts, check_seed
from rookery.data import PARTITIONS, load
from rookery.data.clients import Clients
from rookery.data.rows import Rows
from rookery.problems.objectives import Objective, equal_opportunity, group_shares
from rookery.problems.problems import SingleLevel
from rookery.tasks.task import Task, choice

GROUPS = ("White", "Black", "other")
CUTS = {  # a bucket goes up to its number, which it contains; the last has none
    "capital-gain": (1, 4000, 10000),
    "capital-loss": (1, 1800, 1950),
    "hours-per-week": (39, 41, 50),
    "education-num": (8, 9, 11),
}


def log_losses(x: Any, rows: Any) -> Float[Array, " n"]:
    """The logistic loss of each sample."""
    return optax.sigmoid_binary_cross_entropy(rows["features"] @ x["w"] + x["b"], rows["label"])


def positives(rows: Any) -> Float[Array, "n groups"]:
    """Who is a positive of which group."""
    return (rows["group"][:, None] == jnp.arange(len(GROUPS))) * rows["label"][:, None]


@cache
def fair_objective(shares: tuple[float, ...], strength: float, smoothing: float, reference: Any) -> Objective:
    """The objective alone."""
    named = dict(zip(GROUPS, shares, strict=True))
    return equal_opportunity(log_losses, positives, named, strength=strength, smoothing=smoothing, reference=reference)


@cache
def plain_problem() -> SingleLevel:
    """The mean loss: nobody looks at the groups."""
    return SingleLevel(lambda x, rows: jnp.mean(log_losses(x, rows)))


def adult_rows(seed: int = 0, data_dir: str | Path | None = None) -> tuple[Rows, Rows]:
    """UCI Adult, the official training and test set, in 120 columns of zeros and ones.

    Each of the 8 categories is spread over its values ("?" is one); age (by the training set's quartiles), capital gain
    and loss, hours a week and years of education over 4 buckets each: 122 columns, less those of the two named races.
    """
    adult = load("adult", data_dir)
    place = {name: i for i, name in enumerate(adult.columns)}
    cuts = {"age": tuple(np.quantile(adult.train[:, place["age"]], (0.25, 0.5, 0.75))), **CUTS}
    named = [name for name in adult.columns if "=" in name and name not in ("race=White", "race=Black")]

    def rows(table: np.ndarray, labels: np.ndarray) -> Rows:
        blocks = [table[:, [place[name] for name in named]]]
        for name, ends in cuts.items():
            blocks.append(np.searchsorted(ends, table[:, place[name]])[:, None] == np.arange(len(ends) + 1))
        group = np.full(len(table), 2, np.int32)
        for j, name in enumerate(GROUPS[:2]):
            group[table[:, place[f"race={name}"]] > 0] = j
        features = np.concatenate(blocks, axis=1).astype(np.float32)
        return {"features": features, "label": labels.astype(np.float32), "group": group}

    return rows(adult.train, adult.train_labels), rows(adult.test, adult.test_labels)


def synthetic_rows(seed: int = 0, data_dir: Any = None) -> tuple[Rows, Rows]:
    """A stand-in: 3 groups, of which the two small ones are recorded too low in the feature that tells most.

    A further feature says, with noise, whether a sample is of a small group: by it a fair model can make up for that.
    """
    rng = np.random.default_rng([seed, 1])

    def rows(n: int) -> Rows:
        group = rng.choice(3, n, p=(0.7, 0.18, 0.12)).astype(np.int32)
        truth = rng.normal(size=(n, 3))
        label = truth @ (2.0, 1.0, -1.0) + 0.5 * rng.normal(size=n) > 1
        recorded = truth.copy()
        recorded[:, 0] -= np.array([0.0, 1.0, 0.7])[group]
        proxy = (group > 0) + 0.5 * rng.normal(size=n)
        features = np.column_stack([recorded, proxy]).astype(np.float32)
        return {"features": features, "label": label.astype(np.float32), "group": group}

    return rows(3000), rows(3000)


class _Setting(NamedTuple):
    """What goes with a data set."""

    rows: Callable[..., tuple[Rows, Rows]]
    rounds: int
    defaults: dict[str, Any]


_SAME = {"momentum": 0.1, "local_steps": 5, "batch_size": 16, "lower_step": 0.2}
SETTINGS = {
    "adult": _Setting(adult_rows, 2000, {"step": 0.1, "upper_step": 0.5, **_SAME}),
    "synthetic": _Setting(synthetic_rows, 300, {"step": 0.1, "upper_step": 0.5, **_SAME}),
}


def fairness(
    clients: int = 8,
    partition: str = "iid",
    strength: float = 1.0,
    smoothing: float = 0.1,
    reference: str = "all",
    seed: int = 0,
    data: str = "adult",
    equal: bool = False,
    data_dir: str | Path | None = None,
) -> Task:
    """Who earns more than 50,000 dollars? Logistic regression with equal opportunity for three groups by race.

    Arguments:
        clients: how many.
        partition: "iid", "shards" (two label shards per client) or "dirichlet".
        strength, smoothing, reference: a, γ and what a group is compared with, see
            `rookery.objectives.equal_opportunity`; its tolerance ε is .01. The set-up that the FedDRO paper adopts, of
            GCIVR (Haddadpour et al. 2022), has a = γ = .1 and reference "all"; its released code, where the penalty has
            no factor γ, minimises what is a = γ = 1 here.
        seed: of the split among clients, and of the synthetic data.
        data: "adult", UCI Adult with its official split; or "synthetic", a small stand-in that needs no files.
        equal: leave out a few samples so that all clients have as many as the smallest.
        data_dir: where the Adult files are; see `rookery.data.load`.

    x = {"w", "b"}, zeros at first. `Task.evaluate` gives the `accuracy` and the `tpr_gap`, the largest of
    TPR_all − TPR_j over the groups j, both on the test set and (`train_accuracy`, `train_tpr_gap`) on the training set;
    and `risk`, the fair objective's value on the latter. `Task.single_level` is the same without fairness,
    and so is `ParallelSGD` on the task itself: h alone is the mean loss.
    """
    settings = choice("data", data, SETTINGS)
    divide = choice("partition", partition, PARTITIONS)
    check_seed(seed)
    check_counts(clients=clients)
    rows, test = settings.rows(seed, data_dir)
    parts = divide(rows["label"].astype(int), clients, seed)
    if equal:
        rng, most = np.random.default_rng([seed, 2]), min(map(len, parts))
        parts = [np.sort(rng.permutation(part)[:most]) for part in parts]
    held = [{name: value[own] for name, value in rows.items()} for own in parts]
    federation = Clients(upper=held, weights="size")
    shares = group_shares(federation, positives, GROUPS)
    fair = fair_objective(tuple(shares.values()), float(strength), float(smoothing), reference)
    start = {"w": np.zeros(rows["features"].shape[1], np.float32), "b": np.zeros((), np.float32)}
    test = {name: jnp.asarray(value) for name, value in test.items()}
    common: dict[str, Any] = {
        "name": "fairness",
        "clients": federation,
        "evaluate": lambda x, _: _metrics(fair, x, federation.upper.rows, test),
        "metric": "risk",
        "rounds": settings.rounds,
        "every": settings.rounds // 20,
        "defaults": settings.defaults,
    }
    single = Task(problem=plain_problem(), init=start, **common)
    return Task(problem=fair.problem, init=fair.start(start), single_level=single, **common)


def rates(x: Any, rows: Any) -> tuple[Float[Array, ""], Float[Array, ""]]:
    """The accuracy, and the largest of TPR_all − TPR_j."""
    said = rows["features"] @ x["w"] + x["b"] > 0
    positive = rows["label"] > 0.5
    each = positives(rows)
    by_group = said @ each / jnp.sum(each, axis=0)
    return jnp.mean(said == positive), jnp.max(jnp.mean(said, where=positive) - by_group)


@partial(jax.jit, static_argnums=0)
def _metrics(fair: Objective, x: Any, rows: Any, test: Any) -> dict[str, Array]:
    accuracy, gap = rates(x, test)
    train_accuracy, train_gap = rates(x, rows)
    return {
        "accuracy": accuracy,
        "tpr_gap": gap,
        "train_accuracy": train_accuracy,
        "train_tpr_gap": train_gap,
        "risk": fair.value(x, rows),
    }
