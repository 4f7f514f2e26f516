"""Group weights: the upper level learns how much each group counts in training, to serve the worst group better."""

from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from rookery.base.arguments import check_amounts, check_counts, check_positive, check_seed
from rookery.data import PARTITIONS, load
from rookery.data.clients import Clients
from rookery.problems.problems import Bilevel, SingleLevel
from rookery.tasks.linear import binary_scores, binary_zeros, log_losses
from rookery.tasks.task import Task, bilevel_defaults, choice, split, take

FARTHEST = 3.0  # bound of the distance of x_a from its start


def _half_square(y: Any) -> Float[Array, ""]:
    return 0.5 * (jnp.sum(y["w"] ** 2) + y["b"] ** 2)


@cache
def group_problem(shares: tuple[float, ...], temperature: float, penalty: float) -> Bilevel:
    """Return the problem for groups with these shares of all samples; see `group_weights`."""
    share = np.asarray(shares, np.float32)

    def upper(x: Any, y: Any, batch: Any) -> Float[Array, ""]:
        tilted = temperature * jnp.expm1(log_losses(y, batch) / temperature)
        return jnp.mean(tilted / (len(share) * jnp.asarray(share)[batch["group"]]))

    def lower(x: Any, y: Any, batch: Any) -> Float[Array, ""]:
        weights = (jax.nn.softmax(x) / share)[batch["group"]]
        return jnp.mean(weights * log_losses(y, batch))

    start = np.log(share)
    near = lambda x: jnp.clip(x, start - FARTHEST, start + FARTHEST)
    return Bilevel(upper, lower, project_upper=near, penalty=lambda x, y: penalty * _half_square(y))


@cache
def _plain_problem(penalty: float) -> SingleLevel:
    loss = lambda y, batch: jnp.mean(log_losses(y, batch))
    return SingleLevel(loss, penalty=lambda y: penalty * _half_square(y))


class _Tables(NamedTuple):
    """A row per person: groups (`group`) are weighted, and true positive rates are compared between parts (`part`)."""

    train: dict[str, np.ndarray]
    test: dict[str, np.ndarray]
    names: tuple[str, ...]  # the groups' names


class _Grouping(NamedTuple):
    """A way to divide Adult; `has(column)` is 0 or 1 for each person, and `rich` is the label."""

    names: tuple[str, ...]
    group: Callable[..., np.ndarray]
    part: Callable[..., np.ndarray]


def _man(has: Any, rich: Any = None) -> np.ndarray:
    return has("sex=Male")


def _white(has: Any, rich: Any = None) -> np.ndarray:
    return has("race=White")


GROUPS = {
    "sex-income": _Grouping(
        ("women_low", "women_high", "men_low", "men_high"), lambda has, rich: 2 * _man(has) + rich, _man
    ),
    "sex": _Grouping(("women", "men"), _man, _man),
    "race": _Grouping(("others", "white"), _white, _white),
    "sex-race": _Grouping(
        ("women_others", "women_white", "men_others", "men_white"),
        *[lambda has, rich: 2 * _man(has) + _white(has)] * 2,
    ),
    "doctorate": _Grouping(("others", "doctors"), *[lambda has, rich: has("education=Doctorate")] * 2),
}


def _adult(groups: str | None, seed: int, data_dir: Any) -> _Tables:
    """Return Adult with categories as zeros and ones, and numbers (for capital, log(1 + ·)) standardised."""
    grouping = choice("groups", "sex-income" if groups is None else groups, GROUPS)
    adult = load("adult", data_dir)
    column = {name: i for i, name in enumerate(adult.columns)}
    numbers = [i for name, i in column.items() if "=" not in name]
    heavy = [column["capital-gain"], column["capital-loss"]]
    tables = []
    for raw, labels in ((adult.train, adult.train_labels), (adult.test, adult.test_labels)):
        features = raw.copy()
        features[:, heavy] = np.log1p(raw[:, heavy])
        has = lambda name, raw=raw: raw[:, column[name]].astype(np.int32)
        group, part = grouping.group(has, labels), grouping.part(has, labels)
        tables.append({"features": features, "label": labels.astype(np.float32), "group": group, "part": part})
    known = tables[0]["features"][:, numbers]
    mean, deviation = known.mean(axis=0), known.std(axis=0)
    for table in tables:
        table["features"][:, numbers] = (table["features"][:, numbers] - mean) / deviation
    return _Tables(tables[0], tables[1], grouping.names)


def _synthetic(groups: str | None, seed: int, data_dir: Any) -> _Tables:
    """Return two groups, nine in ten and one in ten, whose labels follow normal features in directions 60° apart."""
    if groups is not None:
        raise ValueError(f"groups must be left out for synthetic data, which have their own two; got {groups!r}.")
    rng = np.random.default_rng([seed, 0])
    first, second = np.linalg.qr(rng.normal(size=(10, 2)))[0].T
    directions = 3 * np.stack([first, 0.5 * first + 0.75**0.5 * second])
    tables = []
    for count in (4000, 4000):
        features = rng.normal(size=(count, 10)).astype(np.float32)
        group = (rng.random(count) < 0.1).astype(np.int32)
        chance = 1 / (1 + np.exp(-np.sum(features * directions[group], axis=1)))
        label = (rng.random(count) < chance).astype(np.float32)
        tables.append({"features": features, "label": label, "group": group, "part": group})
    return _Tables(tables[0], tables[1], ("large", "small"))


SETTINGS = {"synthetic": (_synthetic, 10), "adult": (_adult, 20)}  # the tables, and the number of clients


def group_weights(
    clients: int | None = None,
    partition: str = "iid",
    groups: str | None = None,
    temperature: float = 3.0,
    penalty: float = 1e-3,
    seed: int = 0,
    data: str = "synthetic",
    equal: bool = False,
    data_dir: str | Path | None = None,
) -> Task:
    """Learn how much each group should count in training, so that the worst-served group fares better.

    Lower: one logistic regression for all clients, on Σ_a softmax(x)_a·L_a(y) + penalty/2·‖y‖², where L_a is the mean
    training loss of group a. A sample of group a therefore has the weight softmax(x)_a/π_a, where π_a is the group's
    share of all samples; every client knows the shares. x starts at log π, where every weight is 1, and stays within 3
    of it.

    Upper: the goal is a low validation loss of the worst group. A maximum of means, even a smoothed one, is not a mean
    over clients, so the upper loss is a bound that is: the mean over the groups of the mean over their validation
    samples of T·(exp(ℓ/T) − 1), where T is the temperature. If F is its value, every group's mean loss is at most
    T·log(G·(1 + F/T)) for G groups (by Jensen's inequality; up to the randomness of the split, since a sample's weight
    in F is 1/(G·π_a)). A low T emphasises the worst samples; a high T gives the plain mean over the groups. A client
    may hold one group or any mixture. There is no direct gradient: the upper loss does not depend on x.

    Arguments:
        clients: the number of clients (None: 10 for synthetic data, 20 for Adult); each keeps a quarter of its samples
            for validation.
        partition: "iid"; or by group, not by label: "shards" (most clients hold two groups at most) or "dirichlet".
        groups: for Adult: "sex-income" (None), the four groups of sex and income: equal opportunity, where the worst
            served are women with a high income; "sex"; "race", white or not; "sex-race"; or "doctorate" (Mohri et al.
            2019), with one or without. With the last four, the worst group gains next to nothing.
        temperature: T.
        penalty: the lower level's penalty.
        seed: seed of the split, and of the synthetic data.
        data: "synthetic", two groups, nine in ten and one in ten, for which different linear rules are right; or
            "adult", UCI Adult: does a person earn more than 50,000 dollars?
        equal: leave out a few samples so that all clients have as many as the smallest.
        data_dir: the folder of the Adult files; see `rookery.data.load`.

    `Task.evaluate` returns, on people that no client has, `accuracy` and `loss`; `worst_accuracy` and `worst_loss`, of
    the worst group; `group_gap`, the difference between the best and the worst group's accuracy; `tpr_gap`, the
    difference in true positive rates (between the sexes for "sex-income"); `validation_loss`, F; and each group's
    accuracy, loss and weight (`accuracy_women`, …). `Task.single_level` is the same regression without weights.
    """
    read, default_clients = choice("data", data, SETTINGS)
    divide = choice("partition", partition, PARTITIONS)
    clients = default_clients if clients is None else clients
    check_seed(seed)
    check_counts(clients=clients)
    check_positive(temperature=temperature)
    check_amounts(penalty=penalty)
    train, test, names = read(groups, seed, data_dir)
    shares = np.bincount(train["group"], minlength=len(names)) / len(train["group"])
    problem = group_problem(tuple(shares.tolist()), temperature, penalty)
    rows = {name: train[name] for name in ("features", "label", "group")}
    halves = split(np.random.default_rng([seed, 1]), divide(train["group"], clients, seed), 0.75, equal)
    lower, upper = ([take(rows, half[level]) for half in halves] for level in (0, 1))
    y = binary_zeros(rows["features"].shape[1])
    federation = Clients(lower, upper, weights="size")
    evaluate = group_metrics(test, names, problem, shares, federation.upper.rows)
    return Task(
        name="group-weights",
        problem=problem,
        clients=federation,
        init=(np.log(shares).astype(np.float32), y),
        evaluate=evaluate,
        metric="worst_accuracy",
        rounds=200,
        defaults=bilevel_defaults(0.3, 0.5),
    ).with_single_level(
        problem=_plain_problem(penalty),
        clients=Clients(upper=lower, weights="size"),
        init=y,
        evaluate=lambda y, _: evaluate(None, y),
        defaults={"step": 0.5, "local_steps": 10},
    )


def group_metrics(test: Any, names: tuple[str, ...], problem: Bilevel, shares: np.ndarray, validation: Any) -> Any:
    """Return evaluate(x, y): metrics over all these people, per group, and the gaps between groups."""
    test = {name: jnp.asarray(value) for name, value in test.items()}
    parts = int(test["part"].max()) + 1
    return lambda x, y: _metrics(names, parts, problem, x, y, shares, test, validation)


@partial(jax.jit, static_argnums=(0, 1, 2))
def _metrics(
    names: tuple[str, ...], parts: int, problem: Bilevel, x: Any, y: Any, shares: Any, test: Any, validation: Any
) -> dict[str, Array]:
    positive = test["label"] > 0.5
    right = (binary_scores(y, test) > 0) == positive
    losses = log_losses(y, test)
    means = lambda value, group, count: jnp.stack([jnp.mean(value, where=group == a) for a in range(count)])
    groups = {"accuracy": means(right, test["group"], len(names)), "loss": means(losses, test["group"], len(names))}
    metrics = {
        "accuracy": jnp.mean(right),
        "loss": jnp.mean(losses),
        "worst_accuracy": jnp.min(groups["accuracy"]),
        "worst_loss": jnp.max(groups["loss"]),
        "group_gap": jnp.ptp(groups["accuracy"]),
        "tpr_gap": jnp.ptp(means(right, jnp.where(positive, test["part"], -1), parts)),
        "validation_loss": problem.f(x, y, validation),
    }
    if x is not None:
        groups["weight"] = jax.nn.softmax(x) / shares
    return metrics | {f"{metric}_{name}": each[a] for metric, each in groups.items() for a, name in enumerate(names)}
