"""The FedBiO family against a NumPy transcription, and what it does on quadratics whose solution is known."""

import dataclasses
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
import quadratics as q
import transcription as golden

import rookery as rk
from rookery import theory
from rookery.tasks.quadratic import solution

Vector = np.ndarray
LOCAL = rk.Bilevel(q.BILEVEL.upper, q.BILEVEL.lower, lower_scope="client", project_upper=q.project)
I = 3


@dataclass
class Letters:
    """The paper's."""

    eta: float = 0.05
    gamma: float = 0.1
    tau: float = 0.08
    delta: float = 1.3
    u0: float = 2.0
    c_omega: float = 0.9
    c_nu: float = 0.7
    c_u: float = 0.8
    Q: int = 3

    def alpha(self, t: int) -> float:
        return self.delta / (self.u0 + t) ** (1 / 3)


L = Letters()
STEPS: dict[str, Any] = {"upper_step": L.eta, "lower_step": L.gamma, "local_steps": I}
STORM: dict[str, Any] = {"delta": L.delta, "offset": L.u0, "c_lower": L.c_omega, "c_upper": L.c_nu}
LINEAR, SERIES = {"linear_step": L.tau}, {"neumann_terms": L.Q, "hessian_step": L.tau}
METHODS: dict[str, Any] = {
    "FedBiO": rk.FedBiO(**STEPS, **LINEAR),
    "FedBiOAcc": rk.FedBiOAcc(**STEPS, **STORM, **LINEAR, c_linear=L.c_u),
    "FedBiOLocal": rk.FedBiOLocal(**STEPS, **SERIES),
    "FedBiOAccLocal": rk.FedBiOAccLocal(**STEPS, **STORM, **SERIES),
}


# The algorithms once more, written from the paper; t counts all local steps, from 1.


def fedbio(problem: Any, start: Any, who: Sequence[Any]) -> Iterator[tuple[Vector, Vector]]:
    x, y = start
    u = np.zeros_like(y)
    yield x, y
    for cohort in who:
        own = {i: (x, y, u) for i in cohort}
        for _ in range(I):
            for i in cohort:
                x_i, y_i, u_i = own[i]
                f_x, f_y, g_y = problem.f_x(i, x_i, y_i), problem.f_y(i, x_i, y_i), problem.g_y(i, x_i, y_i)
                H, J = problem.g_yy(i, x_i, y_i), problem.g_xy(i, x_i, y_i)
                own[i] = (
                    x_i - L.eta * (f_x - J @ u_i),
                    y_i - L.gamma * g_y,
                    L.tau * f_y + (np.eye(len(y)) - L.tau * H) @ u_i,
                )
        x, y, u = (golden.mean(problem, cohort, [own[i][k] for i in cohort]) for k in range(3))
        yield x, y


def fedbio_acc(problem: Any, start: Any, who: Sequence[Any]) -> Iterator[tuple[Vector, Vector]]:
    x, y = start
    u = np.zeros_like(y)
    yield x, y

    def mu(i: int, x: Vector, y: Vector, u: Vector) -> Vector:
        return problem.f_x(i, x, y) - problem.g_xy(i, x, y) @ u

    def r(i: int, x: Vector, y: Vector, u: Vector) -> Vector:
        return problem.g_yy(i, x, y) @ u - problem.f_y(i, x, y)

    t, omega, nu, v = 0, y, x, u
    for cohort in who:
        if t == 0:
            momenta = {i: (problem.g_y(i, x, y), mu(i, x, y, u), r(i, x, y, u)) for i in cohort}
        else:
            momenta = {i: (omega, nu, v) for i in cohort}
        own = {i: (x, y, u) for i in cohort}
        for _ in range(I):
            t += 1
            a = L.alpha(t)
            old = dict(own)
            for i in cohort:
                (x_i, y_i, u_i), (o_i, n_i, v_i) = own[i], momenta[i]
                own[i] = x_i - L.eta * a * n_i, y_i - L.gamma * a * o_i, u_i - L.tau * a * v_i
            if t % I == 0:
                x, y, u = (golden.mean(problem, cohort, [own[i][k] for i in cohort]) for k in range(3))
                own = {i: (x, y, u) for i in cohort}
            for i in cohort:
                (x1, y1, u1), (x0, y0, u0), (o_i, n_i, v_i) = own[i], old[i], momenta[i]
                momenta[i] = (
                    problem.g_y(i, x1, y1) + (1 - L.c_omega * a**2) * (o_i - problem.g_y(i, x0, y0)),
                    mu(i, x1, y1, u1) + (1 - L.c_nu * a**2) * (n_i - mu(i, x0, y0, u0)),
                    r(i, x1, y1, u1) + (1 - L.c_u * a**2) * (v_i - r(i, x0, y0, u0)),
                )
        omega, nu, v = (golden.mean(problem, cohort, [momenta[i][k] for i in cohort]) for k in range(3))
        yield x, y


def phi(problem: Any, i: int, x: Vector, y: Vector) -> Vector:
    H, b = problem.g_yy(i, x, y), problem.f_y(i, x, y)
    series = sum(np.linalg.matrix_power(np.eye(len(y)) - L.tau * H, k) @ b for k in range(L.Q + 1))
    return problem.f_x(i, x, y) - L.tau * problem.g_xy(i, x, y) @ series


def fedbio_local(problem: Any, start: Any, who: Sequence[Any]) -> Iterator[tuple[Vector, ...]]:
    x, y = start
    ys = {i: y for i in range(len(problem.p))}
    yield (x,)
    for cohort in who:
        xs = {i: x for i in cohort}
        for i in cohort:
            for _ in range(I):
                d_x, d_y = phi(problem, i, xs[i], ys[i]), problem.g_y(i, xs[i], ys[i])
                xs[i], ys[i] = xs[i] - L.eta * d_x, ys[i] - L.gamma * d_y
        x = q.project(golden.mean(problem, cohort, [xs[i] for i in cohort]))
        yield (x,)


def fedbio_acc_local(problem: Any, start: Any, who: Sequence[Any]) -> Iterator[tuple[Vector, ...]]:
    """A client that was not in the round before begins with a fresh ω_i, at the x of now."""
    x, y = start
    n, t, nu = len(problem.p), 0, x
    ys: dict[int, Vector] = {i: y for i in range(n)}
    omegas: dict[int, Vector] = {}
    before: list[int] = []
    yield (x,)
    for cohort in who:
        for i in cohort:
            if t == 0 or i not in before:
                omegas[i] = problem.g_y(i, x, ys[i])
        nus = {i: phi(problem, i, x, ys[i]) if t == 0 else nu for i in cohort}
        xs = {i: x for i in cohort}
        for _ in range(I):
            t += 1
            a = L.alpha(t)
            old = {i: (xs[i], ys[i]) for i in cohort}
            for i in cohort:
                xs[i], ys[i] = xs[i] - L.eta * a * nus[i], ys[i] - L.gamma * a * omegas[i]
            if t % I == 0:
                x = q.project(golden.mean(problem, cohort, [xs[i] for i in cohort]))
                xs = {i: x for i in cohort}
            for i in cohort:
                omegas[i] = problem.g_y(i, xs[i], ys[i]) + (1 - L.c_omega * a**2) * (
                    omegas[i] - problem.g_y(i, *old[i])
                )
                nus[i] = phi(problem, i, xs[i], ys[i]) + (1 - L.c_nu * a**2) * (nus[i] - phi(problem, i, *old[i]))
        nu = golden.mean(problem, cohort, [nus[i] for i in cohort])
        before = list(cohort)
        yield (x,)


TRANSCRIBED = {
    "FedBiO": fedbio, "FedBiOAcc": fedbio_acc, "FedBiOLocal": fedbio_local, "FedBiOAccLocal": fedbio_acc_local,
}  # fmt: skip


def ours(name: str, clients: rk.Clients, rounds: int, **given: Any) -> list[tuple[Vector, ...]]:
    """The library's x and y; only x if y belongs to the clients."""
    method = METHODS[name]
    found = q.trajectory(LOCAL if "Local" in name else q.BILEVEL, clients, method, q.INIT, rounds, **given)
    return [pair[: 1 if "Local" in name else 2] for pair in found]


@pytest.mark.parametrize("name", METHODS)
def test_equals_the_transcription(name: str) -> None:
    """Unequal weights; three clients of five, so that some sit out and come back, and others go on."""
    problem, clients = q.bilevel(lower=(2,) * 5, upper=(3,) * 5)
    who = q.cohorts(q.N_CLIENTS, 3, 8, seed=5)
    assert any(set(a) & set(c) - set(b) for a, b, c in zip(who, who[1:], who[2:], strict=False))
    assert all(set(a) & set(b) for a, b in itertools.pairwise(who))
    assert set().union(*who) == set(range(q.N_CLIENTS))
    q.assert_same(ours(name, clients, 8, cohort=3, seed=5), list(TRANSCRIBED[name](problem, q.INIT, who)))


# Exact oracles, heterogeneous clients.

STEADY: dict[str, Any] = {"upper_step": 0.05, "lower_step": 0.1}


@pytest.fixture(scope="module")
def task() -> Any:
    return rk.tasks.quadratic(clients=4, seed=0)


@pytest.fixture(scope="module")
def local_task() -> Any:
    return rk.tasks.quadratic(clients=4, seed=0, scope="client")


def limit(task: Any, method: Any, rounds: int) -> Any:
    return rk.solve(task.problem, task.clients, method, task.init, rounds, every=rounds, progress=False)


def test_one_local_step_is_exact(task: Any) -> None:
    closed = solution(task)
    run = limit(task, rk.FedBiO(**STEADY, linear_step=0.1), 800)
    for found, expected in ((run.x, closed.x), (run.y, closed.y(closed.x)), (run.state.u, closed.p(closed.x, run.y))):
        np.testing.assert_allclose(found, expected, rtol=0, atol=1e-8)


@pytest.mark.slow
def test_the_bias_of_local_steps_is_in_proportion_to_the_steps(task: Any) -> None:
    closed, floors = solution(task), []
    for size in (0.2, 0.1, 0.05):
        method = rk.FedBiO(upper_step=0.05 * size, lower_step=0.1 * size, linear_step=0.1 * size, local_steps=4)
        floors.append(np.linalg.norm(limit(task, method, int(1200 / size)).x - closed.x))
    assert floors[0] > 1e-3
    np.testing.assert_allclose([floors[1] / floors[0], floors[2] / floors[1]], 0.5, rtol=0.2)


@pytest.mark.slow
def test_the_own_hypergradients_mean_is_right_for_local_lower_levels_alone(task: Any, local_task: Any) -> None:
    """FedBiOLocal on its own problem; and one step of it from the solution of the other."""
    closed, local = solution(task), solution(local_task)

    def objective(x: Vector) -> float:  # Σ p_i f_i(x, y_i*(x)), written out
        total = 0.0
        for weight, m in zip(local.p, local.clients, strict=True):
            y = np.linalg.solve(m.A, m.B @ x + m.b)
            total += weight * (y @ m.C @ y / 2 - m.c @ y + x @ m.D @ x / 2 - m.d @ x + x @ m.E @ y)
        return total

    at = np.array([0.3, -0.2, 0.5])
    slopes = [(objective(at + h) - objective(at - h)) / 2e-4 for h in 1e-4 * np.eye(3)]
    np.testing.assert_allclose(local.hypergradient(at), slopes, rtol=1e-7)
    assert np.linalg.norm(closed.x - local.x) > 0.05

    method = rk.FedBiOLocal(**STEADY, neumann_terms=90, hessian_step=0.2)
    run = limit(local_task, method, 800)
    np.testing.assert_allclose(run.x, local.x, rtol=0, atol=1e-8)
    assert run.y == ()

    there = dataclasses.replace(local_task, init=(closed.x, closed.y(closed.x)))
    own_mean = (closed.x - np.asarray(limit(there, method, 1).x)) / method.upper_step
    assert np.linalg.norm(closed.hypergradient(closed.x)) < 1e-12
    assert np.linalg.norm(own_mean) > 0.1

    sent = run.exchanges.set_index("name")  # 4 clients, 3 numbers in x, 8 bytes each; the 4 of y are not among them
    assert sent["bytes_up"].to_dict() == {"x": 4 * 3 * 8, "finish": 0}
    assert sent["bytes_down"].to_dict() == {"x": 4 * (3 + 3) * 8, "finish": 0}  # x and three step sizes


# Problems that have a bilevel form.


def test_a_minimax_problem() -> None:
    task = rk.tasks.minimax_quadratic(clients=3, dim=2, penalty=1.0)
    method = rk.FedBiO(upper_step=0.3, lower_step=0.5, linear_step=0.5)
    problem: Any = task.problem
    run = rk.solve(problem.as_bilevel(), task.clients, method, task.init, 200, every=200)
    np.testing.assert_allclose(np.concatenate([run.x, run.y]), 0, atol=1e-8)


def test_a_compositional_problem() -> None:
    """½‖r(x)‖² + ½ x² with r = mean (m_i x + s_i): x* = −m̄ s̄/(m̄² + 1)."""
    m, s = np.array([1.0, 2.0, 6.0]), np.array([3.0, -1.0, 2.0])
    inner = lambda x, b: jnp.mean(b["m"]) * x + jnp.mean(b["s"])
    problem = rk.Compositional(inner, lambda v: v**2 / 2, lambda x, b: x**2 / 2)
    clients = rk.Clients([{"m": m[i : i + 1], "s": s[i : i + 1]} for i in range(3)])
    method = rk.FedBiO(upper_step=0.02, lower_step=0.5, linear_step=0.5)
    run = rk.solve(problem.as_bilevel(), clients, method, (np.array(1.0), np.array(0.0)), 400, every=400)
    assert float(run.x) == pytest.approx(-m.mean() * s.mean() / (m.mean() ** 2 + 1), abs=1e-8)


# Minibatches.

SEEDS = 16
SMALL: dict[str, Any] = {"clients": 3, "upper_dim": 2, "lower_dim": 2, "samples": 8, "noise": 0.2, "replace": True}
NOISY: dict[str, Any] = {"batch_size": 1, "lower_batch": 1}


@pytest.mark.slow
@pytest.mark.parametrize("scope", ["global", pytest.param("client", marks=pytest.mark.slow)])
def test_minibatches(scope: Any) -> None:
    """STORM's estimate of the upper direction varies less than the plain one; the theory's steps converge."""
    task = rk.tasks.quadratic(**SMALL, heterogeneity=0.1, seed=0, scope=scope)
    plain: Any = rk.FedBiO if scope == "global" else rk.FedBiOLocal
    storm: Any = rk.FedBiOAcc if scope == "global" else rk.FedBiOAccLocal

    def solve(method: Any, rounds: int, **how: Any) -> Any:
        return rk.solve(task.problem, task.clients, method, task.init, rounds, every=100, progress=False, **how)

    series: dict[str, Any] = {} if scope == "global" else {"neumann_terms": 6}
    method = plain(**NOISY, **series, upper_step=0.02, lower_step=0.1)
    slower = {"delta": 0.5 * 100 ** (1 / 3), "offset": 100.0, "c_lower": 0.4, "c_upper": 0.4}  # α_t from a half on
    faster = storm(**NOISY, **series, **slower, upper_step=0.04, lower_step=0.2, first_batch=1)
    if scope == "global":
        method = dataclasses.replace(method, linear_step=0.1)
        faster = dataclasses.replace(faster, linear_step=0.2, c_linear=0.4)
    estimates: dict[str, list[Vector]] = {"plain": [], "storm": []}
    for seed in range(SEEDS):
        before, after = (np.asarray(solve(method, rounds, seed=seed).x) for rounds in (60, 61))
        estimates["plain"].append((before - after) / method.upper_step)
        momenta = solve(faster, 60, seed=seed).state.momenta
        estimates["storm"].append(np.asarray(momenta[0] if scope == "global" else momenta))
    found = []
    for values in estimates.values():
        squares = np.sum((values - np.mean(values, axis=0)) ** 2, axis=1) * SEEDS / (SEEDS - 1)
        found.append((squares.mean(), squares.std(ddof=1) / np.sqrt(SEEDS)))
    (large, error), (small, other) = found
    assert large - small > 3 * np.hypot(error, other)
    assert small < large / 2

    # A run with the theory's steps: ‖∇Φ‖² ends below the ε that it is for.
    known, steps = theory.quadratic_constants(task), 1000
    for chosen in (
        theory.fedbio(known, steps, 3, scope=scope, **NOISY, **series),
        theory.fedbio_acc(known, steps, 3, local_steps=1, scope=scope, **NOISY, **series),
    ):
        gradient = solve(chosen, steps, evaluate=task.evaluate).history["gradient"].to_numpy()
        assert gradient[-5:].mean() < steps ** (-2 / 3) < 1e-2 * gradient[0]
