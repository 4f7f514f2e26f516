"""A plan in words says of every byte that is sent what it is."""

from typing import Any

import numpy as np
import pytest

import rookery as rk
from rookery.plan import words
from rookery.plan.costs import costs

TASK = rk.tasks.quadratic(clients=3)


@pytest.mark.parametrize(
    "method",
    [
        rk.FedNest(neumann="cg", hessian_step=0.3),
        rk.FedNest(neumann="sum"),
        rk.StocBiO(neumann="cg", hessian_step=0.3),
        rk.ASFBO(),
        rk.CommFedBiO(),
    ],
    ids=["FedNest cg", "FedNest", "StocBiO cg", "ASFBO", "CommFedBiO"],
)
def test_what_is_sent_is_named_and_counted(method: Any) -> None:
    """The bytes that the words give are at least those of the ledger (which counts once what stays the same in a loop),
    and none of them is without a name."""
    plan = rk.explain(TASK.problem, TASK.clients, method, TASK.init)
    found, rest, last = words.exchanges(plan, 0)
    assert all(own.sent for own in found if own.down)
    assert bool(rest) == bool(last)
    counted = sum(entry.down for entry in costs(plan, ()).values())
    told = sum(own.down * (own.times or 0) for own in found) + last
    assert told >= counted


@pytest.mark.parametrize(
    ("labels", "given", "said"),
    [
        (np.eye(2)[[0, 1] * 10], {}, r"one entry for each sample; got an array of shape \(20, 2\)"),
        (np.array([0, np.nan] * 10), {}, "missing values; got 10"),
        (np.arange(4), {"clients": 0}, "clients must be an integer of at least 1; got 0"),
        (np.arange(4), {"seed": -1}, "seed must be an integer from 0"),
    ],
)
@pytest.mark.parametrize("name", ["iid", "shards", "dirichlet"])
def test_labels_that_can_not_be_divided(name: str, labels: Any, given: dict[str, Any], said: str) -> None:
    from rookery.data import partition

    with pytest.raises(ValueError, match=said):
        getattr(partition, name)(labels, **{"clients": 2, **given})
