"""Every algorithm between a coordinator without data and responders that trace the plan themselves."""

import dataclasses
from typing import Any

import pytest
from tests.contract.cases import HARD, claims, full, job, names, pairs, ragged, together
from tests.engines.federation.studies import in_memory, responders, without_data

import rookery as rk
from rookery.engines.federation import wire
from rookery.testing.runs import agree, outcome


@pytest.mark.slow
@together(pairs())
def test_the_same_as_in_simulation(name: str, kind: str) -> None:
    what = job(name, ragged(kind), **HARD)
    here = outcome(rk.Simulation(), what)
    there = outcome(in_memory(own := responders(what)), without_data(what), responders=own)
    agree(here, there)


# One with memory; all methods are in the slow tests. (Two levels: the hard setting of the contract.)
FAMILIES = {"PFedMe"}


@pytest.mark.parametrize("name", [n if n in FAMILIES else pytest.param(n, marks=pytest.mark.slow) for n in names()])
def test_the_same_with_two_sites_of_unequal_size(name: str) -> None:
    what = job(name, ragged(claims(name)[0], 2), full(name))
    here = outcome(rk.Simulation(), what, 1)
    there = outcome(in_memory(own := responders(what)), without_data(what), 1, responders=own)
    agree(here, there)


@pytest.mark.slow
def test_sites_that_lie_under_a_robust_mean() -> None:
    """A site learns the attack with the plan, and lies by itself."""
    faults = rk.Faults(attack=rk.attacks.SignFlip((1,), scale=5.0))
    what = dataclasses.replace(job("FedAvg", ragged("SingleLevel"), channel=rk.median(1), faults=faults), cohort=4)
    here = outcome(rk.Simulation(), what)
    there = outcome(in_memory(own := responders(what)), without_data(what), responders=own)
    agree(here, there)


@pytest.mark.parametrize("name", ["Scaffold", pytest.param("FedNest", marks=pytest.mark.slow)])
def test_no_site_is_sent_a_reply_of_another(name: str) -> None:
    what = job(name, ragged(claims(name)[0], 3), full(name))
    engine, sent, replied = in_memory(own := responders(what)), dict[int, set[bytes]](), dict[int, set[bytes]]()
    ask = engine.transport._ask
    arrays = lambda message: {a.tobytes() for a in wire.decode(message)[1] if a.size > 1}

    def tapped(i: int, message: Any) -> bytes:
        answer = bytes(ask(i, message))
        sent.setdefault(i, set()).update(arrays(message))
        replied.setdefault(i, set()).update(arrays(answer))
        return answer

    engine.transport._ask = tapped
    outcome(engine, without_data(what), 2, responders=own)
    for i, mine in sent.items():
        others = {array for j, theirs in replied.items() for array in theirs if j != i}
        assert mine
        assert others
        assert not mine & others
