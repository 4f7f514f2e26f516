"""The privacy account: the releases of a plan, and their ε against events written by hand."""

import math
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import dp_accounting as dp
import jax.numpy as jnp
import numpy as np
import pytest
from dp_accounting import pld, rdp

import rookery as rk
from rookery.engines.engine import Job, traced
from rookery.plan.releases import releases
from rookery.run.arguments import checked

CLIENTS, COHORT, ROUNDS, DELTA = 12, 4, 5, 1e-3
TASK = rk.tasks.quadratic(clients=CLIENTS)
SINGLE = rk.SingleLevel(lambda x, b: ((x - b) ** 2).mean())


def both(algorithm, cohort=COHORT, noise=1.0, **more):
    channel = rk.private(delta=DELTA, noise=noise, **more)
    job = Job(TASK.problem, TASK.clients, TASK.algorithm(algorithm), TASK.init, cohort, channel=channel)
    return traced(checked(job, ROUNDS))


def epsilon(algorithm, cohort, noise):
    found = both(algorithm, cohort, noise)
    return found.job.channel.spent(found.account, ROUNDS)


def gaussian(noise, releases):
    return dp.GaussianDpEvent(noise / math.sqrt(releases))


def plans(algorithm):
    found = both(algorithm)
    return releases(found.start), releases(found.round)


def named(found):
    return [
        (event.times, {exchange.name: times for exchange, times in event.releases.items()}) for event in found.events
    ]


def test_every_exchange_of_a_round_is_a_release():
    """FedNest sends 2T + N + 3 messages a round, with T = 3 and N = 20 here."""
    start, fednest = plans(rk.FedNest)
    assert named(fednest) == [(1, {"q": 3, "y": 3, "p": 1, "Hp": 20, "h": 1, "x": 1})]
    assert fednest.count == 2 * 3 + 20 + 3
    assert start.count == 0
    assert plans(rk.FedBiO)[1].count == 1
    assert plans(rk.AdaFBiO)[0].count == 1  # in the start


class State(NamedTuple):
    x: Any
    y: Any = ()


@dataclass(frozen=True)
class Resampling:
    """Two cohorts of its own, one of them in each turn of a loop, and an exchange with the round's."""

    solves: ClassVar = (rk.SingleLevel,)

    def init(self, fed, x, y, key):
        return State(x)

    def round(self, fed, state, key):
        mean = lambda cohort, x, name: cohort.mean(cohort.map(lambda c, k: c.f_x(x, (), c.upper(k, None)), key), name)

        def turn(i, x):
            fresh = fed.resample(key)
            x = mean(fresh, x, "fresh")
            x = mean(fresh, x, "again")
            return mean(fed, x, "own")

        x = fed.loop(3, turn, state.x)
        other = fed.resample(key)
        return State(fed.loop(2, lambda i, x: mean(other, x, "other"), x))


def test_releases_of_one_draw_are_one_event_and_another_draw_is_another():
    clients = rk.Clients(upper=[np.ones((3, 2))] * 6)
    plan = rk.explain(SINGLE, clients, Resampling(), jnp.zeros(2), cohort=2)
    assert sorted(named(releases(plan)), key=str) == sorted(
        [(3, {"fresh": 1, "again": 1}), (1, {"own": 3}), (1, {"other": 2})], key=str
    )


@pytest.mark.parametrize("noise", [2.0, pytest.param(8.0, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    ("algorithm", "released", "start"),
    [
        pytest.param(rk.FedBiO, 1, 0, marks=pytest.mark.slow),
        (rk.AdaFBiO, 1, 1),
        (rk.LFedNest, 4, 0),
        pytest.param(rk.FedNest, 29, 0, marks=pytest.mark.slow),
    ],
)
class TestEpsilon:
    """ε is that of `dp-accounting` for events written by hand."""

    def test_of_poisson_cohorts(self, algorithm, released, start, noise):
        by_hand = pld.PLDAccountant(value_discretization_interval=1e-3)
        if start:
            by_hand.compose(gaussian(noise, start))
        by_hand.compose(dp.PoissonSampledDpEvent(COHORT / CLIENTS, gaussian(noise, released)), ROUNDS)
        assert epsilon(algorithm, rk.Poisson(COHORT), noise) == pytest.approx(by_hand.get_epsilon(DELTA), rel=1e-6)

    def test_of_cohorts_of_fixed_size(self, algorithm, released, start, noise):
        """A replaced client changes a sum by two bounds."""
        by_hand = rdp.RdpAccountant(neighboring_relation=dp.NeighboringRelation.REPLACE_ONE)
        if start:
            by_hand.compose(gaussian(noise / 2, start))
        drawn = dp.SampledWithoutReplacementDpEvent(CLIENTS, COHORT, gaussian(noise / 2, released))
        by_hand.compose(drawn, ROUNDS)
        assert epsilon(algorithm, COHORT, noise) == pytest.approx(by_hand.get_epsilon(DELTA), rel=1e-9)

    def test_of_all_clients(self, algorithm, released, start, noise):
        by_hand = pld.PLDAccountant(value_discretization_interval=1e-3)
        by_hand.compose(gaussian(noise / 2, ROUNDS * released + start))
        assert epsilon(algorithm, None, noise) == pytest.approx(by_hand.get_epsilon(DELTA), rel=1e-3)


def test_the_noise_for_a_budget_keeps_to_it_and_not_by_much():
    found = both(rk.LFedNest, rk.Poisson(COHORT))
    noise = found.account.noise(2.0, DELTA, ROUNDS)
    assert 1.99 < found.account.epsilon(noise, DELTA, ROUNDS) <= 2.0


def test_more_of_anything_reveals_more():
    account = both(rk.LFedNest, rk.Poisson(COHORT)).account
    assert account.epsilon(4.0, DELTA, 5) < account.epsilon(4.0, DELTA, 6)
    assert account.epsilon(4.0, DELTA, 5) < account.epsilon(3.9, DELTA, 5)
    assert account.epsilon(4.0, 1e-3, 5) < account.epsilon(4.0, 1e-4, 5)


@pytest.mark.parametrize(
    ("algorithm", "why"),
    [
        (rk.CommFedBiO, "sees every reply to the exchange 'Hu − f_y' by itself"),
        (rk.FedMBO, "sees every reply"),
    ],
)
def test_what_cannot_be_accounted_for_is_refused(algorithm, why):
    with pytest.raises(ValueError, match=f"must have releases that can all be accounted for.*{why}"):
        both(algorithm)
