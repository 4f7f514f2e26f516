"""Runs that are private for each record: a site's own noise, and its account over all runs."""

from typing import Any

import jax
import numpy as np
import pytest
from tests.contract.cases import claims, job, ragged

import rookery as rk
from rookery.testing.runs import agree, outcome

HIDDEN = rk.private(noise=0.5, delta=1e-5, clip=1.0, unit="record")
METHODS = ("FedBiO", "LFedNest", "FedNest", "Scaffold")
SLOW = [pytest.param(name, marks=pytest.mark.slow) for name in METHODS if name != "Scaffold"]


def private(name: str, **given: Any) -> Any:
    return job(name, ragged(claims(name)[0], 3), channel=HIDDEN, **given)


@pytest.mark.parametrize("name", ["Scaffold", *SLOW])
def test_with_the_noise_seed_fixed_sites_have_the_numbers_of_a_simulation(name: str) -> None:
    what = private(name, noise_seed=5)
    agree(outcome(rk.Simulation(), what), outcome(rk.Federation(), what))


def test_without_a_noise_seed_no_two_runs_are_alike() -> None:
    """Except for the counts of samples, which say how many records are expected, not how many were drawn."""
    first, second = (outcome(rk.Federation(), private("Scaffold"), 3) for _ in range(2))
    leaves = zip(jax.tree.leaves(first.state.x), jax.tree.leaves(second.state.x), strict=True)
    assert not any(np.array_equal(a, b) for a, b in leaves)
    assert first.counts == second.counts
