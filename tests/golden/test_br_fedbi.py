"""BR-FedBi and its forms against NumPy transcriptions, the method that they are with the mean, and with liars."""

from collections.abc import Iterator
from typing import Any

import fields
import numpy as np
import pytest
import quadratics as q
from fields import EACH, Point

import rookery as rk
from rookery.theory.quadratic import solution

STEPS = (0.04, 0.1, 0.12)
SIZES: dict[str, Any] = dict(zip(("upper_step", "lower_step", "linear_step"), STEPS, strict=True))
THETA, LIARS = 0.3, 1


def directions(o: Any, w: Point) -> Point:
    x, y, z = w
    return o.f_x(x, y) - o.g_xy(x, y) @ z, o.g_y(x, y), o.g_yy(x, y) @ z - o.f_y(x, y)


def trimmed(cohort: Any, points: list[Point]) -> Point:
    """Per coordinate, without the largest and the smallest."""
    columns = [np.sort(np.stack(part), axis=0) for part in zip(*points, strict=True)]
    return tuple(c[LIARS : len(c) - LIARS].mean(axis=0) for c in columns)


def transcribed(aggregate: Any, theta: float) -> Iterator[Point]:
    w: Point = (*q.INIT, np.zeros(q.Y_DIM))
    memory: dict[int, Point] = {}
    yield w[:2]
    for cohort in fields.COHORTS:
        for i in cohort:
            new = directions(EACH[i], w)
            old = memory.get(i, new)
            memory[i] = tuple((1 - theta) * m + theta * d for m, d in zip(old, new, strict=True))
        w = fields.stepped(w, STEPS, aggregate(cohort, [memory[i] for i in cohort]))
        yield w[:2]


def library(method: Any, **given: Any) -> Any:
    return q.trajectory(q.BILEVEL, fields.CLIENTS, method, q.INIT, fields.ROUNDS, cohort=3, seed=fields.SEED, **given)


@pytest.mark.parametrize("robust", [pytest.param(False, marks=pytest.mark.slow), True], ids=["mean", "trimmed mean"])
def test_momentum_equals_the_transcription(robust: bool) -> None:
    """With the clients' weights in the mean, and without them in the rule; who sat out keeps its momentum."""
    aggregate = trimmed if robust else fields.mean
    given = {"channel": rk.trimmed_mean(LIARS)} if robust else {}
    q.assert_same(library(rk.BRFedBiM(**SIZES, momentum=THETA), **given), list(transcribed(aggregate, THETA)))


def test_br_fedbi_equals_the_transcription_under_a_rule() -> None:
    result = library(rk.BRFedBi(**SIZES), channel=rk.trimmed_mean(LIARS))
    q.assert_same(result, list(transcribed(trimmed, 1.0)))


def test_with_the_mean_it_is_fedbio_with_one_step_and_shared_batches() -> None:
    """On minibatches, too: both draw the same."""
    run = lambda method: q.trajectory(q.BILEVEL, fields.CLIENTS, method, q.INIT, 4, cohort=3, seed=1)
    fedbio = rk.FedBiO(**SIZES, local_steps=1, shared_batch=True, batch_size=1)
    q.assert_same(run(rk.BRFedBi(**SIZES, batch_size=1)), run(fedbio))


@pytest.mark.parametrize("refresh", [0.5, pytest.param(1e-9, marks=pytest.mark.slow)])
def test_estimates_on_full_batches_telescope(refresh: float) -> None:
    """v_i is D_i at each point, whether it is computed anew, or from differences; who sat out computes it anew."""
    q.assert_same(library(rk.BRFedBiP(**SIZES, refresh=refresh)), list(transcribed(fields.mean, 1.0)))


def test_the_coin_decides_for_all_clients_how_many_samples_they_take() -> None:
    """Two points on a minibatch of 1 of each level, or one on all samples; the first round takes all."""
    method = rk.BRFedBiP(**SIZES, refresh=0.5, batch_size=1)
    run = rk.solve(q.BILEVEL, fields.CLIENTS, method, q.INIT, 12, seed=2)
    rounds = np.diff(run.history["samples_lower"]).tolist()
    everything = int(np.sum(fields.CLIENTS.lower_sizes))
    assert rounds[0] == everything
    assert set(rounds) == {everything, q.N_CLIENTS}


TASK = rk.tasks.quadratic(clients=10, heterogeneity=0.0, noise=0.0, seed=7)


@pytest.mark.parametrize(
    "method",
    [rk.BRFedBiM, *(pytest.param(m, marks=pytest.mark.slow) for m in (rk.BRFedBi, rk.BRFedBiP))],
    ids=lambda m: m.__name__,
)
def test_seven_equal_honest_clients_reach_the_solution_beside_three_liars(method: Any) -> None:
    given = {"momentum": 0.8} if method is rk.BRFedBiM else {}
    faults = rk.Faults(attack=rk.attacks.SignFlip(3, scale=10.0))
    solved = lambda channel, rounds: (
        rk.solve(
            TASK.problem,
            TASK.clients,
            method(0.1, 0.3, 0.3, **given),
            TASK.init,
            rounds,
            channel=channel,
            faults=faults,
        ).x
    )
    np.testing.assert_allclose(solved(rk.median(3), 500), solution(TASK).x, rtol=0, atol=1e-11)
    assert np.linalg.norm(solved(None, 20) - solution(TASK).x) > 1e2
