"""FedMSA against a NumPy transcription, its exact limit, and the method that it is with one local step."""

from collections.abc import Iterator
from typing import Any

import fields
import jax.numpy as jnp
import numpy as np
import pytest
import quadratics as q
from fields import EACH, TASK, M, Point, flat

import rookery as rk

ALPHA, BETA, GAMMA, RHO = 0.04, 0.1, 0.12, 0.3
SIZES: dict[str, Any] = {"upper_step": ALPHA, "lower_step": BETA, "linear_step": GAMMA}


def directions(o: Any, w: Point) -> Point:
    x, y, u = w
    return o.f_x(x, y) - o.g_xy(x, y) @ u, o.g_y(x, y), o.g_yy(x, y) @ u - o.f_y(x, y)


def combined(*terms: tuple[float, Point]) -> Point:
    return tuple(sum(factor * w[k] for factor, w in terms) for k in range(len(terms[0][1])))  # type: ignore[misc]


def transcribed(each: Any, directions: Any, w: Point, anchor: str = "cohort") -> Iterator[Point]:
    """Phase 1 and phase 2, with the telescoping sums as they are printed."""
    h, before = w, w
    yield w[:2]
    for t, cohort in enumerate(fields.COHORTS):
        own, first = [], range(len(each)) if anchor == "all" else cohort
        for i in first:
            new = directions(each[i], w)
            own.append(new if t == 0 else combined((1, new), (1 - RHO, h), (RHO - 1, directions(each[i], before))))
        h = fields.mean(first, own)
        ends = []
        for i in cohort:
            v, last, h_i = w, w, h
            for _ in range(fields.LOCAL_STEPS[i]):
                h_i = combined((1, directions(each[i], v)), (1, h_i), (-1, directions(each[i], last)))
                last, v = v, fields.stepped(v, (ALPHA, BETA, GAMMA)[: len(v)], h_i)
            ends.append(v)
        before, w = w, fields.mean(cohort, ends)
        yield w[:2]


@pytest.mark.parametrize("anchor", ["all", pytest.param("cohort", marks=pytest.mark.slow)])
def test_equals_the_transcription(anchor: Any) -> None:
    method = rk.FedMSA(**SIZES, momentum=RHO, local_steps=fields.LOCAL_STEPS, anchor=anchor)
    q.assert_same(fields.library(method), list(transcribed(EACH, directions, (*q.INIT, np.zeros(q.Y_DIM)), anchor)))


def test_the_limit_is_the_solution_for_any_number_of_local_steps() -> None:
    """FedBiO's is not."""
    steps = {"upper_step": 0.05, "lower_step": 0.1, "linear_step": 0.1, "local_steps": 5}
    y = M.y(M.x)
    x, y_end, u, *_ = fields.limit(rk.FedMSA(**steps, momentum=0.5), 400)
    np.testing.assert_allclose(flat((x, y_end, u)), flat((M.x, y, M.p(M.x, y))), rtol=0, atol=1e-10)
    expected = fields.drifted(directions, (0.05, 0.1, 0.1), 5, (*TASK.init, TASK.init[1]))
    assert np.linalg.norm(expected[:3] - M.x) > 0.01


def test_all_clients_in_phase_1_make_the_limit_exact_with_one_client_in_phase_2() -> None:
    """And the ledger counts them: five in the first exchange, one in the second."""
    method = rk.FedMSA(0.05, 0.1, 0.1, 5, anchor="all")
    run = rk.solve(TASK.problem, TASK.clients, method, TASK.init, 800, cohort=1)
    y = M.y(M.x)
    np.testing.assert_allclose(flat((run.x, run.y, run.state.u)), flat((M.x, y, M.p(M.x, y))), rtol=0, atol=1e-10)
    assert run.exchanges["bytes_up"].tolist() == [5 * 8 * (3 + 4 + 4), 8 * (3 + 4 + 4)]


def test_one_local_step_without_momentum_is_soba() -> None:
    """That is FedBiO with one local step and one minibatch for all terms."""
    ours, fedbio = (
        q.trajectory(q.BILEVEL, fields.CLIENTS, method, q.INIT, 5)
        for method in (rk.FedMSA(**SIZES, momentum=1.0, local_steps=1), rk.SOBA(**SIZES))
    )
    q.assert_same(ours, fedbio)
    assert rk.SOBA(0.1, 0.2) == rk.FedBiO(0.1, 0.2, linear_step=0.2, shared_batch=True)


# Compositional problems: r has the clients' data, and f is known to all.

CENTRE = np.array([0.5, -1.0, 0.2, 0.4])
COMPOSED, COMPOSED_CLIENTS = q.compositional()


class Composed:
    """Directions of one client, D_i = (∇h_i(x) + ∇r_i(x)ᵀ∇f(y), y − r_i(x))."""

    def __init__(self, i: int) -> None:
        self.i = i

    def __call__(self, w: Point) -> Point:
        (x, y), far = w, w[1] - CENTRE
        through = COMPOSED.jacobian(self.i, x).T @ (far / np.sqrt(1 + far**2))
        return COMPOSED.extra_gradient(self.i, x) + through, y - COMPOSED.r(self.i, x)


def test_compositional_problems_equal_the_transcription() -> None:
    problem = rk.Compositional(q._inner, lambda v: jnp.sum(jnp.sqrt(1 + (v - CENTRE) ** 2)), q._extra)
    method = rk.FedMSA(**SIZES, momentum=RHO, local_steps=fields.LOCAL_STEPS)
    given = (problem, COMPOSED_CLIENTS, method, q.INIT, fields.ROUNDS)
    got = q.trajectory(*given, cohort=3, seed=fields.SEED)
    each = [Composed(i) for i in range(q.N_CLIENTS)]
    q.assert_same(got, list(transcribed(each, lambda o, w: o(w), q.INIT)))


def test_the_limit_of_a_composition_is_the_solution() -> None:
    """½‖r(x)‖² + ½x² with r = mean (m_i x + s_i): x* = −m̄ s̄/(m̄² + 1)."""
    m, s = np.array([1.0, 2.0, 3.0]), np.array([3.0, -1.0, 2.0])
    inner = lambda x, b: jnp.mean(b["m"]) * x + jnp.mean(b["s"])
    problem = rk.Compositional(inner, lambda v: v**2 / 2, lambda x, b: x**2 / 2)
    clients = rk.Clients([{"m": m[i : i + 1], "s": s[i : i + 1]} for i in range(3)])
    run = rk.solve(problem, clients, rk.FedMSA(0.02, 0.2, local_steps=5), np.array(1.0), 400)
    assert float(run.x) == pytest.approx(-m.mean() * s.mean() / (m.mean() ** 2 + 1), abs=1e-10)


@pytest.mark.slow
def test_the_estimate_of_the_direction_varies_less_with_momentum() -> None:
    """On minibatches, at the solution, where the mean direction is 0: ‖h‖² is its variance."""
    task = rk.tasks.quadratic(clients=3, samples=20, noise=0.5, seed=0, replace=True)
    sizes: dict[str, Any] = {"upper_step": 1e-3, "lower_step": 2e-3, "linear_step": 2e-3, "batch_size": 1}
    found = []
    for momentum in (1.0, 0.1):
        method = rk.FedMSA(**sizes, momentum=momentum, local_steps=2)
        ends = [rk.solve(task.problem, task.clients, method, task.init, 3000, seed=s).state.h for s in range(8)]
        found.append(np.mean([sum(np.sum(np.square(part)) for part in h) for h in ends]))
    assert found[1] < found[0] / 4
