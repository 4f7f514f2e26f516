"""FedAvg-S and SCAFFOLD-S against the NumPy transcription: full batches, unequal clients and local steps."""

from typing import Any

import numpy as np
import pytest
import quadratics as q
import transcription as golden

import rookery as rk

STEPS = [3, 1, 2, 4, 1]  # τ_i
LETTERS = golden.Saddle(alpha=0.1, beta=0.07, tau=STEPS, project=q.project)
WORDS: dict[str, Any] = {"upper_step": 0.1, "lower_step": 0.07, "local_steps": STEPS}
METHODS = [(rk.FedAvgSaddle, golden.fedavg_saddle), (rk.ScaffoldSaddle, golden.scaffold_saddle)]


@pytest.mark.parametrize(("cls", "transcribed"), METHODS)
def test_equals_the_transcription(cls: type, transcribed: Any) -> None:
    ours, clients = q.minimax()
    expected = list(transcribed(ours, LETTERS, q.INIT, golden.everyone(ours, 15)))
    q.assert_same(q.trajectory(q.MINIMAX, clients, cls(**WORDS), q.INIT, 15), expected)
    assert any(np.isclose(np.linalg.norm(x), q.RADIUS) for x, _ in expected[1:])  # the projection was at work


@pytest.mark.slow
@pytest.mark.parametrize(("cls", "transcribed"), METHODS)
def test_a_cohort(cls: type, transcribed: Any) -> None:
    """SCAFFOLD's clients remember their control variates while they sit out."""
    ours, clients = q.minimax(weights=[1.0] * 5)
    who = q.cohorts(q.N_CLIENTS, 2, 25, seed=3)
    assert set().union(*who) == set(range(q.N_CLIENTS))
    expected = list(transcribed(ours, LETTERS, q.INIT, who))
    q.assert_same(q.trajectory(q.MINIMAX, clients, cls(**WORDS), q.INIT, 25, cohort=2, seed=3), expected)


@pytest.mark.slow
@pytest.mark.parametrize(("cls", "transcribed"), METHODS)
def test_weights_of_a_cohort(cls: type, transcribed: Any) -> None:
    """The variables by the cohort's mean, SCAFFOLD's c so that it stays Σ p_i c_i over all clients."""
    ours, clients = q.minimax()
    who = q.cohorts(q.N_CLIENTS, 2, 15, seed=4)
    expected = list(transcribed(ours, LETTERS, q.INIT, who))
    q.assert_same(q.trajectory(q.MINIMAX, clients, cls(**WORDS), q.INIT, 15, cohort=2, seed=4), expected)
