"""FedMSA on compositions of four functions against NumPy, and where it ends; the risk of a loss as a composition."""

import dataclasses
from typing import Any

import fields
import jax.numpy as jnp
import numpy as np
import pytest
import quadratics as q
from fields import Point, Vector, flat
from scipy.optimize import minimize
from test_fedmsa import ALPHA, BETA, GAMMA, RHO, transcribed

import rookery as rk

SIZES = (3, 1, 40, 2, 200)
SHAPES = {"M1": (2, 3), "s": (2,), "V": (2, 3), "M2": (4, 2), "W": (4, 2), "M3": (3, 4)}
CENTRE = np.array([0.5, -1.0, 0.2])
CUTS = (2, 6)  # of z¹, z² and z³, one after the other
LOWER, UPPER = q.data(SIZES, 7, **SHAPES), q.data(q.UPPER_SIZES, 8, D=(3, 3), d=(3,))
CLIENTS = rk.Clients(LOWER, UPPER, q.WEIGHTS)
START = np.array([0.8, -0.5, 0.3]), (np.array([1.0, 0.4]), np.array([-0.7, 0.2, 0.3, 0.1]), np.array([0.6, 0.9, -0.2]))

PROBLEM = rk.MultiLevel(
    inner=(
        lambda x, b: jnp.mean(b["M1"] @ x + b["s"] + jnp.tanh(b["V"] @ x), axis=0),
        lambda z, b: jnp.mean(b["M2"] @ z + jnp.tanh(b["W"] @ z), axis=0),
        lambda z, b: jnp.mean(jnp.sin(b["M3"] @ z), axis=0),
    ),
    outer=lambda z: jnp.sum(jnp.sqrt(1 + (z - CENTRE) ** 2)),
    extra=q._extra,
)


def sech2(a: Vector) -> Vector:
    return (1 / np.cosh(a) ** 2)[:, None]


class Own:
    """One client's functions and Jacobians, and its directions in w = (x, the z together, the u together)."""

    def __init__(self, i: int) -> None:
        self.i = i

    def mean(self, value: Any, rows: Any = LOWER) -> Any:
        count = len(next(iter(rows[self.i].values())))
        return sum(value({k: a[s] for k, a in rows[self.i].items()}) for s in range(count)) / count

    def __call__(self, w: Point) -> Point:
        x, y, *more = w
        z1, z2, z3 = np.split(y, CUTS)
        r1 = self.mean(lambda s: s["M1"] @ x + s["s"] + np.tanh(s["V"] @ x))
        r2 = self.mean(lambda s: s["M2"] @ z1 + np.tanh(s["W"] @ z1))
        r3 = self.mean(lambda s: np.sin(s["M3"] @ z2))
        j1 = self.mean(lambda s: s["M1"] + sech2(s["V"] @ x) * s["V"])
        j2 = self.mean(lambda s: s["M2"] + sech2(s["W"] @ z1) * s["W"])
        j3 = self.mean(lambda s: np.cos(s["M3"] @ z2)[:, None] * s["M3"])
        h = self.mean(lambda s: s["D"] @ x - s["d"], UPPER)
        far = z3 - CENTRE
        slope, gaps = far / np.sqrt(1 + far**2), np.concatenate([z1 - r1, z2 - r2, z3 - r3])
        if not more:
            return h + j1.T @ (j2.T @ (j3.T @ slope)), gaps
        u1, u2 = np.split(more[0], [2])
        return h + j1.T @ u1, gaps, np.concatenate([u1 - j2.T @ u2, u2 - j3.T @ slope])


def library(method: Any) -> list[tuple[Vector, Vector]]:
    seen: list[tuple[Vector, Vector]] = []

    def look(x: Any, y: Any) -> dict[str, float]:
        seen.append((np.array(x), np.concatenate(y)))
        return {}

    rk.solve(PROBLEM, CLIENTS, method, START, fields.ROUNDS, cohort=3, seed=fields.SEED, evaluate=look, every=1)
    return seen


@pytest.mark.parametrize("jacobians", [pytest.param("product", marks=pytest.mark.slow), "tracked"])
def test_equals_the_transcription(jacobians: Any) -> None:
    """With cohorts of three, local steps and momentum."""
    method = rk.FedMSA(ALPHA, BETA, GAMMA, fields.LOCAL_STEPS, RHO, jacobians=jacobians)
    w = (START[0], np.concatenate(START[1]), *([np.zeros(6)] if jacobians == "tracked" else []))
    each = [Own(i) for i in range(len(SIZES))]
    q.assert_same(library(method), list(transcribed(each, lambda o, w: o(w), w)))


# Limits, with affine functions r_n = A_n z + b_n, f = ½‖z − t‖² and h = ½‖x‖².

AFFINE = rk.MultiLevel(
    inner=tuple(lambda z, b, n=n: jnp.mean(b["A"][:, n] @ z + b["b"][:, n], axis=0) for n in range(3)),
    outer=lambda z: jnp.sum((z - 1) ** 2) / 2,
    extra=lambda x, b: x @ x / 2,
)
P = np.array([0.2, 0.5, 0.3])


def affine(unlike: tuple[int, ...]) -> tuple[np.ndarray, np.ndarray]:
    """The matrices and vectors by client and level. They differ between clients in these levels only."""
    rng = np.random.default_rng(3)
    a, b = (np.broadcast_to(0.2 * rng.normal(size=s), (3, *s)).copy() for s in ((3, 2, 2), (3, 2)))
    a += 0.8 * np.eye(2)
    for n in unlike:
        a[:, n] += 0.3 * rng.normal(size=(3, 2, 2))
        b[:, n] += rng.normal(size=(3, 2))
    return a, b


def roots(a: np.ndarray, b: np.ndarray) -> tuple[Vector, Vector]:
    """The solution, and the point where the mean of the products of the clients' own Jacobians would end."""
    (a1, a2, a3), (b1, b2, b3) = np.tensordot(P, a, 1), np.tensordot(P, b, 1)
    whole, shift = a3 @ a2 @ a1, a3 @ (a2 @ b1 + b2) + b3 - 1
    products = sum(p * (m[2] @ m[1] @ m[0]).T for p, m in zip(P, a, strict=True))
    ends = [np.linalg.solve(np.eye(2) + through @ whole, -through @ shift) for through in (whole.T, products)]
    return ends[0], ends[1]


def ends(a: np.ndarray, b: np.ndarray, **given: Any) -> Any:
    clients = rk.Clients([{"A": a[i : i + 1], "b": b[i : i + 1]} for i in range(3)], weights=P)
    return rk.solve(AFFINE, clients, rk.FedMSA(0.05, 0.2, 0.2, local_steps=4, **given), np.zeros(2), 400)


def test_the_limit_is_the_solution_where_one_function_differs_and_with_tracked_jacobians() -> None:
    """For unlike clients the product of a client's own Jacobians ends elsewhere, where the formula says."""
    for level in range(3):
        one = affine((level,))
        np.testing.assert_allclose(ends(*one).x, roots(*one)[0], rtol=0, atol=1e-10)
    unlike = affine((0, 1, 2))
    solution, biased = roots(*unlike)
    assert np.linalg.norm(biased - solution) > 0.05
    np.testing.assert_allclose(ends(*unlike).x, biased, rtol=0, atol=1e-10)
    run = ends(*unlike, jacobians="tracked")
    np.testing.assert_allclose(run.x, solution, rtol=0, atol=1e-10)
    (_, a2, a3), _ = np.tensordot(P, unlike[0], 1), None
    slope = np.asarray(run.y[-1]) - 1
    np.testing.assert_allclose(flat(run.state.u), flat((a2.T @ a3.T @ slope, a3.T @ slope)), rtol=0, atol=1e-10)


def test_two_functions_are_a_compositional_problem() -> None:
    """With one inner function the problem is the two-level one, with the same minibatches, and nothing to track."""
    inner, outer, y = PROBLEM.inner[0], lambda z: jnp.sum(jnp.sqrt(1 + (z - 1) ** 2)), START[1][0]
    method = rk.FedMSA(ALPHA, BETA, GAMMA, 2, RHO, batch_size=2)
    two = rk.solve(rk.Compositional(inner, outer), CLIENTS, method, (START[0], y), 4, cohort=3)
    method = dataclasses.replace(method, jacobians="tracked")
    chain = rk.solve(rk.MultiLevel((inner,), outer), CLIENTS, method, (START[0], (y,)), 4, cohort=3)
    np.testing.assert_allclose(chain.x, two.x, rtol=0, atol=1e-12)


def test_semideviation() -> None:
    """Mean loss plus semideviation of clients with unlike samples, against a minimiser of all samples together."""
    rng = np.random.default_rng(0)
    rows = [{"a": rng.normal(size=(n, 2)), "t": rng.normal(size=n) + i} for i, n in enumerate((4, 1, 8))]
    losses = lambda x, b, lib: (b["a"] @ x - b["t"]) ** 2
    problem = rk.MultiLevel(
        inner=(
            lambda x, b: (x, jnp.mean(losses(x, b, jnp))),
            lambda v, b: (v[1], jnp.mean(jnp.maximum(losses(v[0], b, jnp) - v[1], 0) ** 2)),
        ),
        outer=lambda v: v[0] + jnp.sqrt(v[1] + 1e-3),
    )
    clients = rk.Clients(rows, weights="size")
    run = rk.solve(problem, clients, rk.FedMSA(0.02, 0.2, 0.2, 2, jacobians="tracked"), np.zeros(2), 1500)
    together = {name: np.concatenate([r[name] for r in rows]) for name in "at"}

    def risk(x: Vector) -> float:
        each = losses(x, together, np)
        return float(each.mean() + np.sqrt(np.mean(np.maximum(each - each.mean(), 0) ** 2) + 1e-3))

    best = minimize(risk, np.zeros(2), tol=1e-12)
    np.testing.assert_allclose(run.x, best.x, rtol=0, atol=1e-5)
