"""Fair classification: a linear model with the same true positive rate in every group."""

from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from rookery.base.arguments import check_counts, check_seed
from rookery.data import PARTITIONS, load
from rookery.data.clients import Clients
from rookery.data.rows import Rows
from rookery.problems.objectives import Objective, equal_opportunity, group_shares
from rookery.problems.problems import SingleLevel
from rookery.tasks.linear import binary_scores, binary_zeros, log_losses
from rookery.tasks.task import Task, choice, smallest, take

GROUPS = ("White", "Black", "other")
CUTS = {  # upper ends of the buckets, inclusive; the last bucket has none
    "capital-gain": (1, 4000, 10000),
    "capital-loss": (1, 1800, 1950),
    "hours-per-week": (39, 41, 50),
    "education-num": (8, 9, 11),
}


def positives(rows: Any) -> Float[Array, "n groups"]:
    """Return 1 where a row is a positive of the group, else 0."""
    return (rows["group"][:, None] == jnp.arange(len(GROUPS))) * rows["label"][:, None]


@cache
def fair_objective(shares: tuple[float, ...], strength: float, smoothing: float, reference: Any) -> Objective:
    """Return the fair objective."""
    named = dict(zip(GROUPS, shares, strict=True))
    return equal_opportunity(log_losses, positives, named, strength=strength, smoothing=smoothing, reference=reference)


@cache
def plain_problem() -> SingleLevel:
    """Return the mean loss, which ignores the groups."""
    return SingleLevel(lambda x, rows: jnp.mean(log_losses(x, rows)))


def adult_rows(seed: int = 0, data_dir: str | Path | None = None) -> tuple[Rows, Rows]:
    """Return the official training and test sets of UCI Adult, in 120 columns of zeros and ones.

    Each of the 8 categories has a column per value ("?" is a value). Age (by the training set's quartiles), capital
    gain, capital loss, hours a week and years of education have 4 buckets each. Of these 122 columns, those of the
    races White and Black are left out.
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
    """Return synthetic data with 3 groups, where the most telling feature is recorded too low in the two small groups.

    A further feature says, with noise, whether a sample is of a small group; a fair model can use it to compensate.
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
    """Defaults for a data set."""

    rows: Callable[..., tuple[Rows, Rows]]
    rounds: int


SETTINGS = {"adult": _Setting(adult_rows, 2000), "synthetic": _Setting(synthetic_rows, 300)}
DEFAULTS = {
    "step": 0.1, "upper_step": 0.5, "momentum": 0.1, "local_steps": 5, "batch_size": 16, "lower_step": 0.2,
}  # fmt: skip


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
    """Predict who earns more than 50,000 dollars, by logistic regression with equal opportunity for three races.

    Arguments:
        clients: the number of clients.
        partition: "iid", "shards" (two label shards per client) or "dirichlet".
        strength, smoothing, reference: a, γ and the rate that a group is compared with; see
            `rookery.objectives.equal_opportunity`. Its tolerance ε is .01. The FedDRO paper adopts the set-up of GCIVR
            (Haddadpour et al. 2022), a = γ = .1 and reference "all"; the released code of GCIVR, whose penalty has no
            factor γ, minimises what is a = γ = 1 here.
        seed: seed of the split among clients, and of the synthetic data.
        data: "adult", UCI Adult with its official split; or "synthetic", small data that need no files.
        equal: leave out a few samples so that all clients have as many as the smallest.
        data_dir: the folder of the Adult files; see `rookery.data.load`.

    x = {"w", "b"}, initially zeros. `Task.evaluate` returns `accuracy` and `tpr_gap`, the largest TPR_all − TPR_j over
    the groups j, on the test set; `train_accuracy` and `train_tpr_gap` on the training set; and `risk`, the fair
    objective's value on the training set. `Task.single_level` minimises the mean loss, without fairness, and so does
    `ParallelSGD` on the task itself.
    """
    settings = choice("data", data, SETTINGS)
    divide = choice("partition", partition, PARTITIONS)
    check_seed(seed)
    check_counts(clients=clients)
    rows, test = settings.rows(seed, data_dir)
    parts = divide(rows["label"].astype(int), clients, seed)
    if equal:
        rng = np.random.default_rng([seed, 2])
        parts = [np.sort(rng.permutation(part)[: smallest(parts, equal)]) for part in parts]
    federation = Clients(upper=[take(rows, part) for part in parts], weights="size")
    shares = group_shares(federation, positives, GROUPS)
    fair = fair_objective(tuple(shares.values()), float(strength), float(smoothing), reference)
    start = binary_zeros(rows["features"].shape[1])
    test = {name: jnp.asarray(value) for name, value in test.items()}
    return Task(
        name="fairness",
        problem=fair.problem,
        clients=federation,
        init=fair.start(start),
        evaluate=lambda x, _: _metrics(fair, x, federation.upper.rows, test),
        metric="risk",
        rounds=settings.rounds,
        every=settings.rounds // 20,
        defaults=DEFAULTS,
    ).with_single_level(problem=plain_problem(), init=start)


def rates(x: Any, rows: Any) -> tuple[Float[Array, ""], Float[Array, ""]]:
    """Return the accuracy, and the largest TPR_all − TPR_j."""
    predicted = binary_scores(x, rows) > 0
    positive = rows["label"] > 0.5
    members = positives(rows)
    by_group = predicted @ members / jnp.sum(members, axis=0)
    return jnp.mean(predicted == positive), jnp.max(jnp.mean(predicted, where=positive) - by_group)


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
