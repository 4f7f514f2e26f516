"""Every algorithm between a coordinator without data and hosts that trace the plan themselves."""

import pytest
from tests.contract.cases import HARD, claims, full, job, names, pairs, ragged, together
from tests.federation.studies import hosts, in_memory, without_data

import rookery as rk
from rookery.testing.runs import agree, outcome


@pytest.mark.slow
@together(pairs())
def test_the_same_as_in_simulation(name: str, kind: str) -> None:
    what = job(name, ragged(kind), **HARD)
    here = outcome(rk.Simulation(), what)
    there = outcome(in_memory(own := hosts(what)), without_data(what), hosts=own)
    agree(here, there)


# One of each class of problem and a few that differ; all of them are in the slow tests, and in the hard setting.
FAMILIES = {"FastDRO", "FedBiO", "FedSVRG", "NASA", "PFedMe", "ScaffoldSaddle", "WeightedNodesProx"}


@pytest.mark.parametrize("name", [n if n in FAMILIES else pytest.param(n, marks=pytest.mark.slow) for n in names()])
def test_the_same_with_two_sites_of_unequal_size(name: str) -> None:
    what = job(name, ragged(claims(name)[0], 2), full(name))
    here = outcome(rk.Simulation(), what, 1)
    there = outcome(in_memory(own := hosts(what)), without_data(what), 1, hosts=own)
    agree(here, there)
