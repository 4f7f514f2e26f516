"""Numbers at the border: what a narrower type can't hold, weights, cohorts, and the sizes of tasks."""

import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import rookery as rk
from rookery import tasks
from rookery.engines import checks

SINGLE = rk.SingleLevel(lambda x, b: jnp.mean((b["a"] - x) ** 2))
BILEVEL = rk.Bilevel(lambda x, y, b: jnp.mean((b["a"] - y) ** 2), lambda x, y, b: jnp.mean((b["a"] - x * y) ** 2))


def rows(*values: Any) -> dict[str, np.ndarray]:
    return {"a": np.array(values)}


def four(weights: Any = None, level: str = "upper") -> rk.Clients:
    return rk.Clients(**{level: [rows(1.0, 2.0)] * 4}, weights=weights)


def checked(clients: rk.Clients, cohort: Any = None, seed: Any = 0) -> int:
    x, y = checks.start_values(SINGLE, clients, 1.0)
    return checks.check_run(SINGLE, clients, rk.FedAvg(), x, y, 1, cohort, 1, seed)


def refused(call: Callable[[], Any], message: str) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        call()
    assert "\n" not in str(caught.value)


# What does not fit into single precision.


@pytest.mark.parametrize(
    ("values", "kind"),
    [((1.0, 1.0, 1e200), "float32"), ((0, 0, 2**40), "int32"), ((0, 0, -(2**31) - 1), "int32")],
)
def test_data_that_do_not_fit(values: Any, kind: str) -> None:
    parts = [rows(values[0]), rows(*values)]
    message = rf"lower: \['a'\] does not fit into {kind} in 1 sample\(s\), first in sample 2 of client 1; rescale .*x64"
    with jax.enable_x64(False):
        refused(lambda: rk.Clients(lower=parts), message)
        refused(lambda: rk.Clients(upper=[rows(1.0)], center=rows(*values)), f"^center: .*{kind}.*sample 2")
        rk.Clients(lower=[rows(1e-200, 3e38), rows(1.0)])  # what is too small is zero
        rk.Clients(lower=[rows(2**31 - 1, -(2**31)), rows(0)])
    held = rk.Clients(lower=parts).lower.rows["a"]
    assert held.tolist() == [values[0], *values]


def test_a_start_that_does_not_fit() -> None:
    with jax.enable_x64(False):
        clients = four()
        for x in (1e200, np.array([1.0, -1e200]), np.float64(1e200)):
            refused(
                lambda x=x: checks.start_values(SINGLE, clients, x),
                r"^init: x does not fit into float32\. Rescale .*x64",
            )
        refused(lambda: checks.start_values(SINGLE, clients, np.array([np.inf])), "init: x must be finite")
    assert checks.start_values(SINGLE, four(), 1e200)[0] == 1e200


def test_a_start_of_objects() -> None:
    refused(
        lambda: checks.start_values(SINGLE, four(), np.array([object()])),
        "init: x must be floating point; its type is object",
    )


# Weights, cohorts and seeds.


@pytest.mark.parametrize("weights", [["1", "2", "3", "4"], [True] * 4, [1j] * 4, [1, 2, 3, "4"], {1, 2, 3, 4}])
def test_weights_that_are_not_numbers(weights: Any) -> None:
    refused(lambda: four(weights), r'^weights must be one number per client, "size" or None; got .*\.$')


@pytest.mark.parametrize("replace", ["yes", 1, None])
def test_replace(replace: Any) -> None:
    message = rf"^replace must be True or False; got {replace!r}\.$"
    refused(lambda: rk.Clients(upper=[rows(1.0)], replace=replace), message)


def test_a_cohort_is_a_number() -> None:
    refused(lambda: checked(four(), True), "^cohort must be an integer from 1 to 4, .*; got True")


def test_a_cohort_without_weight() -> None:
    idle = four([0, 1, 0, 2])
    message = "cohort must be at least 3, because 2 clients have weight 0 .*leave those clients out of Clients"
    for cohort in (1, 2):
        refused(lambda cohort=cohort: checked(idle, cohort), message)
    assert [checked(idle, cohort) for cohort in (3, 4, None)] == [3, 4, 4]
    assert checked(four([0, 1, 1, 1]), 2) == 2


@pytest.mark.parametrize("seed", [-1, 2**64, True, 0.5])
def test_seeds(seed: Any) -> None:
    refused(lambda: checked(four(), seed=seed), rf"^seed must be an integer from 0 to 2\*\*64 - 1; got {seed!r}\.$")
    refused(lambda: tasks.quadratic(seed=seed), rf"^seed must be an integer from 0 to 2\*\*64 - 1; got {seed!r}")
    checked(four(), seed=2**64 - 1)


def test_fedmbo_wants_equal_weights() -> None:
    def ask(weights: Any) -> int:
        clients = four(weights)
        x, y = checks.start_values(BILEVEL, clients, (1.0, 1.0))
        return checks.check_run(BILEVEL, clients, rk.FedMBO(), x, y, 1, None, 1, 0)

    refused(lambda: ask([1, 2, 1, 3]), "FedMBO solves problems whose clients count equally.*Leave weights out.*AggITD")
    assert ask(None) == ask([0.2] * 4) == ask("size") == 4


# The tasks' own arguments.


@pytest.mark.parametrize(
    ("task", "given"),
    [
        *[
            ("quadratic", {name: value})
            for name in ("clients", "upper_dim", "lower_dim", "samples")
            for value in (0, -4)
        ],
        ("quadratic", {"noise": -1}),
        ("quadratic", {"heterogeneity": float("nan")}),
        ("quadratic", {"sizes": "abc"}),
        ("quadratic", {"sizes": 5}),
        ("quadratic", {"clients": 2.0}),
        ("minimax_quadratic", {"dim": 0}),
        ("minimax_quadratic", {"spread": -1}),
        ("minimax_quadratic", {"penalty": -1}),
        ("composition", {"levels": 0}),
        ("composition", {"dim": 0}),
        ("composition", {"heterogeneity": -1}),
        ("portfolio", {"assets": 0}),
        ("portfolio", {"samples": 0}),
        ("portfolio", {"clients": 1, "samples": 6}),
        ("hyperparameters", {"noise": -1}),
        ("hyperrep", {"width": 0}),
        ("hyperrep", {"width": -5}),
        ("hyperrep", {"clients": 0}),
        ("hyperrep", {"penalty": -1}),
        ("hyperrep", {"l1": -1}),
        ("hyperrep", {"first": 3}),
        ("data_cleaning", {"clients": 0}),
        ("data_cleaning", {"penalty": -1}),
        ("data_cleaning", {"wrong": "all"}),
        ("data_cleaning", {"fit": "test"}),
        ("worst_group", {"bad": 0}),
        ("worst_group", {"bad": 1.5}),
        ("worst_group", {"clients": 1}),
        ("worst_group", {"noise": -1}),
        ("worst_group", {"temperature": 0}),
        ("worst_group", {"count": "all"}),
        ("dro_imbalanced", {"few": 0}),
        ("dro_imbalanced", {"few": -5}),
        ("dro_imbalanced", {"few": 5000}),
        ("dro_imbalanced", {"penalty": -1}),
        ("few_shot", {"clients": 0}),
        ("few_shot", {"episodes": 0}),
        ("few_shot", {"ways": 1}),
        ("few_shot", {"shots": 0}),
        ("few_shot", {"penalty": -1}),
        ("group_weights", {"clients": 0}),
        ("group_weights", {"penalty": -1}),
        ("loss_tuning", {"clients": 0}),
        ("loss_tuning", {"penalty": -1}),
        ("weighted_nodes", {"samples": 0}),
        ("weighted_nodes", {"validation": 0}),
        ("weighted_nodes", {"samples": "abc"}),
        ("fairness", {"data": "synthetic", "clients": 0}),
        ("fairness", {"data": "synthetic", "strength": -1}),
    ],
)
def test_sizes_of_tasks(task: str, given: dict[str, Any]) -> None:
    name = next(reversed(given))
    value = re.escape(repr(given[name]))
    message = rf"{name}(={value}(\.0)?| must be .*; got (\d+·)?{value}(\.0)?\.$|\[0\])"
    refused(lambda: getattr(tasks, task)(**given), message)
