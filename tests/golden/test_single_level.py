"""FedAvg, FedProx, SCAFFOLD and FedSVRG against the NumPy transcription: full batches, unequal clients and steps."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import quadratics as q
import transcription as golden

import rookery as rk

STEPS = [3, 1, 2, 4, 1]  # τ_i
LETTERS = golden.Saddle(alpha=0.1, beta=0.0, tau=STEPS, project=q.project)


def run(clients: rk.Clients, algorithm: Any, **given: Any) -> list[Any]:
    return [(x,) for x, _ in q.trajectory(q.SINGLE_LEVEL, clients, algorithm, q.INIT[0], 15, **given)]


def wrap(xs: Any) -> list[Any]:
    return [(x,) for x in xs]


@pytest.mark.parametrize("cohort", [pytest.param(None, marks=pytest.mark.slow), 2])
def test_fedavg(cohort: int | None) -> None:
    ours, clients = q.single_level()
    who = golden.everyone(ours, 15) if cohort is None else q.cohorts(q.N_CLIENTS, cohort, 15, seed=5)
    expected = wrap(golden.fedavg(ours, LETTERS, q.INIT[0], who))
    q.assert_same(run(clients, rk.FedAvg(step=0.1, local_steps=STEPS), cohort=cohort, seed=5), expected)
    assert any(np.isclose(np.linalg.norm(x), q.RADIUS) for (x,) in expected[1:])  # the projection was at work


@pytest.mark.parametrize(
    ("cohort", "scaled"), [*(pytest.param(None, own, marks=pytest.mark.slow) for own in (False, True)), (2, True)]
)
def test_fedsvrg(cohort: int | None, scaled: bool) -> None:
    ours, clients = q.single_level()
    letters = replace(LETTERS, alpha=0.2 if scaled else 0.1)
    who = golden.everyone(ours, 15) if cohort is None else q.cohorts(q.N_CLIENTS, cohort, 15, seed=5)
    expected = wrap(golden.fedsvrg(ours, letters, q.INIT[0], who, scaled))
    algorithm = rk.FedSVRG(step=letters.alpha, local_steps=STEPS, scale_steps=scaled)
    q.assert_same(run(clients, algorithm, cohort=cohort, seed=5), expected)


@pytest.mark.parametrize("cohort", [pytest.param(None, marks=pytest.mark.slow), 2])
def test_fedprox(cohort: int | None) -> None:
    ours, clients = q.single_level()
    who = golden.everyone(ours, 15) if cohort is None else q.cohorts(q.N_CLIENTS, cohort, 15, seed=5)
    expected = wrap(golden.fedavg(ours, LETTERS, q.INIT[0], who, mu=0.7))
    algorithm = rk.FedProx(step=0.1, local_steps=STEPS, proximal=0.7)
    q.assert_same(run(clients, algorithm, cohort=cohort, seed=5), expected)
    plain = wrap(golden.fedavg(ours, LETTERS, q.INIT[0], who))
    assert max(np.abs(a[0] - b[0]).max() for a, b in zip(expected, plain, strict=True)) > 1e-3  # μ has a say


@pytest.mark.parametrize(
    ("cohort", "equal"),
    [*(pytest.param(*own, marks=pytest.mark.slow) for own in ((None, False), (2, True))), (2, False)],
)
def test_scaffold(cohort: int | None, equal: bool) -> None:
    """With equal weights, c moves by |S|/N of the cohort's mean change, as in the paper."""
    ours, clients = q.single_level([1.0] * q.N_CLIENTS) if equal else q.single_level()
    letters = replace(LETTERS, alpha=0.05)
    who = golden.everyone(ours, 15) if cohort is None else q.cohorts(q.N_CLIENTS, cohort, 15, seed=4)
    assert set().union(*who) == set(range(q.N_CLIENTS))
    expected = wrap(golden.scaffold(ours, letters, q.INIT[0], who, server=0.8))
    algorithm = rk.Scaffold(step=0.05, server_step=0.8, local_steps=STEPS)
    q.assert_same(run(clients, algorithm, cohort=cohort, seed=4), expected)
