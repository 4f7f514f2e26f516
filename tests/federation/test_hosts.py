"""Every algorithm between a coordinator without data and hosts that trace the plan themselves."""

from tests.contract.cases import HARD, job, pairs, ragged, together
from tests.contract.runs import agree, outcome
from tests.federation.studies import hosts, in_memory, without_data

import rookery as rk


@together(pairs(), default={"FedAvg", "FedBiOLocal"})
def test_the_same_as_in_simulation(name: str, kind: str) -> None:
    what = job(name, ragged(kind), **HARD)
    here = outcome(rk.Simulation(), what)
    there = outcome(in_memory(own := hosts(what)), without_data(what), hosts=own)
    agree(here, there)
