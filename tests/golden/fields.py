"""Rounds of a field in NumPy, plain and anchored, and where they end on quadratics: for the tests of several methods.

A field is a function (o, w) -> D(w) of a tuple of vectors, where o has a client's derivatives f_x(x, y), f_y, g_x, ….
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import quadratics as q
import transcription as golden

import rookery as rk
from rookery.tasks.quadratic import Solution, solution

Vector = np.ndarray
Point = tuple[Vector, ...]
Field = Callable[[Any, Point], Point]


class Own:
    """The derivatives of one client of a golden problem."""

    def __init__(self, problem: Any, i: int) -> None:
        self.problem, self.i = problem, i

    def __getattr__(self, name: str) -> Any:
        return lambda x, y: getattr(self.problem, name)(self.i, x, y)


@dataclass
class Affine:
    """The derivatives of a quadratic, of one client or the mean."""

    m: Solution

    def f_x(self, x: Vector, y: Vector) -> Vector:
        return self.m.D @ x - self.m.d + self.m.E @ y

    def f_y(self, x: Vector, y: Vector) -> Vector:
        return self.m.C @ y - self.m.c + self.m.E.T @ x

    def g_x(self, x: Vector, y: Vector) -> Vector:
        return -self.m.B.T @ y

    def g_y(self, x: Vector, y: Vector) -> Vector:
        return self.m.A @ y - self.m.B @ x - self.m.b

    def g_yy(self, x: Vector, y: Vector) -> np.ndarray:
        return self.m.A

    def g_xy(self, x: Vector, y: Vector) -> np.ndarray:
        return -self.m.B.T


# Rounds, on a problem with unlike clients of unequal weights. All methods share its shapes and cohorts.

PROBLEM, CLIENTS = q.bilevel(lower=(2,) * 5, upper=(3,) * 5)
EACH = [Own(PROBLEM, i) for i in range(q.N_CLIENTS)]
LOCAL_STEPS = [2, 3, 1, 4, 2]  # τ_i
ROUNDS, SEED = 6, 5
COHORTS = q.cohorts(q.N_CLIENTS, 3, ROUNDS, seed=SEED)


def mean(cohort: Sequence[int], points: Sequence[Point]) -> Point:
    return tuple(golden.mean(PROBLEM, cohort, [point[k] for point in points]) for k in range(len(points[0])))


def stepped(w: Point, steps: Sequence[float], d: Point) -> Point:
    return tuple(v - size * part for v, size, part in zip(w, steps, d, strict=True))


def moved(
    field: Field, w: Point, steps: Sequence[float], cohort: Sequence[int], anchored: bool, turns: Any = None
) -> Point:
    """The mean of the points where the cohort's local steps end."""
    h = mean(cohort, [field(EACH[i], w) for i in cohort])
    ends = []
    for i in cohort:
        own = w
        for _ in range((LOCAL_STEPS if turns is None else turns)[i]):
            d = field(EACH[i], own)
            if anchored:
                d = tuple(a - b + c for a, b, c in zip(d, field(EACH[i], w), h, strict=True))
            own = stepped(own, steps, d)
        ends.append(own)
    return mean(cohort, ends)


def library(method: Any) -> list[tuple[Vector, Vector]]:
    """The library's x and y at the start and after each round."""
    return q.trajectory(q.BILEVEL, CLIENTS, method, q.INIT, ROUNDS, cohort=3, seed=SEED)


# Limits, on quadratics with unlike clients of unequal weights.

TASK = rk.tasks.quadratic(clients=5, seed=0, weights=[0.1, 0.3, 0.2, 0.15, 0.25])
M: Solution = solution(TASK)
P = np.asarray(TASK.clients.weights)


def alone(i: int) -> Solution:
    held = TASK.clients.client_data(i)
    return Solution(**{name: rows.mean(axis=0) for name, rows in {**held["lower"][0], **held["upper"][0]}.items()})


def flat(w: Point) -> Vector:
    return np.concatenate(w)


def affine(change: Callable[[Point], Point], like: Point) -> tuple[np.ndarray, Vector]:
    """The matrix and the vector of an affine map of a tuple of vectors, by probing."""
    cuts = np.cumsum([len(v) for v in like])[:-1]
    at = lambda v: flat(change(tuple(np.split(v, cuts))))
    zero = np.zeros(len(flat(like)))
    return np.stack([at(unit) - at(zero) for unit in np.eye(len(zero))], axis=1), at(zero)


def drifted(field: Field, steps: Sequence[float], turns: int, like: Point) -> Vector:
    """The limit of the plain form: (1 − mean T_iᴵ)⁻¹ mean Σ_{k<I} T_iᵏ t_i, for the local steps w ↦ T_i w + t_i."""
    whole, shift = 0.0, 0.0
    for weight, client in zip(P, [Affine(alone(i)) for i in range(len(P))], strict=True):

        def local(w: Point, client: Affine = client) -> Point:
            for _ in range(turns):
                w = stepped(w, steps, field(client, w))
            return w

        matrix, vector = affine(local, like)
        whole, shift = whole + weight * matrix, shift + weight * vector
    return np.linalg.solve(np.eye(len(shift)) - whole, shift)


def limit(method: Any, rounds: int) -> Any:
    """The state after a run."""
    return rk.solve(TASK.problem, TASK.clients, method, TASK.init, rounds).state
