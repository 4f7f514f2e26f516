"""BOME against a NumPy transcription, the promise of its barrier, and its limit."""

import itertools
from collections.abc import Iterator
from typing import Any

import fields
import numpy as np
import pytest
import quadratics as q
import transcription as golden
from fields import PROBLEM, M, Point, Vector, flat

import rookery as rk

XI, PSI, ALPHA, ETA, T = 0.05, 0.3, 0.15, 0.9, 3
GIVEN: dict[str, Any] = {"upper_step": XI, "lower_step": PSI, "auxiliary_step": ALPHA, "lower_rounds": T}
GIVEN |= {"barrier_rate": ETA}


def parts(cohort: Any, x: Vector, y: Vector, turns: Any) -> tuple[Point, Point, float]:
    """The cohort's ∇f and ∇q̂, over x and y, and q̂."""
    y_hat = y
    for _ in range(T):
        ends = []
        for i in cohort:
            own = y_hat
            for _ in range(turns[i]):
                own = own - ALPHA * PROBLEM.g_y(i, x, own)
            ends.append(own)
        y_hat = golden.mean(PROBLEM, cohort, ends)
    at = lambda name, *z: golden.mean(PROBLEM, cohort, [np.asarray(getattr(PROBLEM, name)(i, *z)) for i in cohort])
    f = at("f_x", x, y), at("f_y", x, y)
    return f, (at("g_x", x, y) - at("g_x", x, y_hat), at("g_y", x, y)), float(at("g", x, y) - at("g", x, y_hat))


def transcribed(barrier: str, turns: Any) -> Iterator[Point]:
    x, y = q.INIT
    yield x, y
    for cohort in fields.COHORTS:
        f, q_hat, gap = parts(cohort, x, y, turns)
        square = flat(q_hat) @ flat(q_hat)
        phi = ETA * (square if barrier == "gradient" else gap)
        lam = max((phi - flat(f) @ flat(q_hat)) / (square + 1e-8), 0)
        multipliers.append(lam)
        x, y = fields.stepped((x, y), (XI, PSI), tuple(a + lam * b for a, b in zip(f, q_hat, strict=True)))
        yield x, y


multipliers: list[float] = []


@pytest.mark.parametrize(
    ("barrier", "turns"),
    [("gradient", fields.LOCAL_STEPS), pytest.param("value", [1] * q.N_CLIENTS, marks=pytest.mark.slow)],
)
def test_equals_the_transcription(barrier: Any, turns: list[int]) -> None:
    method = rk.BOME(**GIVEN, barrier=barrier, lower_local_steps=turns)
    multipliers.clear()
    q.assert_same(fields.library(method), list(transcribed(barrier, turns)))
    assert max(multipliers) > 0.3


def test_the_gap_falls_as_the_barrier_promises() -> None:
    """⟨∇q̂, direction⟩ is φ where λ > 0, and at least φ elsewhere, up to the 1e-8 in λ's denominator."""
    everyone = range(q.N_CLIENTS)
    run = q.trajectory(q.BILEVEL, fields.CLIENTS, rk.BOME(**GIVEN), q.INIT, fields.ROUNDS)
    for (x, y), (x_new, y_new) in itertools.pairwise(run):
        f, q_hat, _ = parts(everyone, x, y, [1] * q.N_CLIENTS)
        direction, slope = flat(((x - x_new) / XI, (y - y_new) / PSI)), flat(q_hat)
        phi = ETA * slope @ slope
        lam = max(0.0, (phi - flat(f) @ slope) / (slope @ slope + 1e-8))
        assert slope @ direction == pytest.approx(max(phi - 1e-8 * lam, flat(f) @ slope), abs=1e-10)
        assert lam > 0


@pytest.mark.slow
@pytest.mark.parametrize("terms", [1, 3])
def test_the_limit_is_that_of_the_series(terms: int) -> None:
    """x ends near the root of the hypergradient with T terms, at a distance in proportion to the steps."""

    def hypergradient(x: Vector) -> Vector:
        y = M.y(x)
        z = ALPHA * sum(np.linalg.matrix_power(np.eye(len(M.A)) - ALPHA * M.A, k) for k in range(terms))
        return M.D @ x - M.d + M.E @ y + M.B.T @ z @ (M.C @ y - M.c + M.E.T @ x)

    at_zero = hypergradient(np.zeros(3))
    root = np.linalg.solve(np.stack([hypergradient(unit) - at_zero for unit in np.eye(3)], axis=1), -at_zero)
    for xi in (0.016, 0.004):
        method = rk.BOME(xi, xi, ALPHA, lower_rounds=terms)
        far = np.linalg.norm(np.asarray(fields.limit(method, int(40 / xi)).x) - root)
        assert 0.05 * xi < far < 0.1 * xi
        assert far < np.linalg.norm(root - M.x) / 10
