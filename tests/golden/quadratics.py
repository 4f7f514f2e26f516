"""The golden tests' problems, stated twice: as losses for the library, as NumPy derivatives for the transcription.

All are quadratics whose clients differ in every matrix, in size and in weight, with a small smooth term beside them, so
that Hessians and Jacobians move with (x, y) and one taken at a stale point is seen.
"""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import rookery as rk
from rookery.data.cohort import sample_cohort

Vector = np.ndarray
Matrix = np.ndarray
Sample = dict[str, np.ndarray]

N_CLIENTS, X_DIM, Y_DIM = 5, 3, 4
LOWER_SIZES, UPPER_SIZES = (3, 1, 5, 2, 6), (2, 5, 1, 3, 4)
ONE_LARGE_CLIENT = (3, 1, 40, 2, 6)  # so much larger that whole data sets are taken in pieces
WEIGHTS = (0.1, 0.3, 0.2, 0.15, 0.25)
RADIUS = 0.5  # of the ball that some of the problems keep x in


def _own_mean(samples: Sample, value: Callable[[Sample], np.ndarray]) -> np.ndarray:
    """The mean of value(sample) over a client's samples, one at a time."""
    count = len(next(iter(samples.values())))
    total: Any = 0.0
    for s in range(count):
        total = total + value({name: array[s] for name, array in samples.items()})
    return total / count


def _tanh(s: Sample, x: Vector, y: Vector) -> float:
    """The derivative of log cosh at hᵀx + kᵀy."""
    return float(np.tanh(s["h"] @ x + s["k"] @ y))


@dataclass
class Bilevel:
    """Both levels quadratic but for one term.

    g = ½ yᵀAy − yᵀ(Bx + b) + log cosh(uᵀy + wᵀx), f = ½ yᵀCy − cᵀy + ½ xᵀDx − dᵀx + xᵀEy + log cosh(hᵀx + kᵀy).
    """

    lower: list[Sample]
    upper: list[Sample]
    p: Vector

    def f_x(self, i: int, x: Vector, y: Vector) -> Vector:
        return _own_mean(self.upper[i], lambda s: s["D"] @ x - s["d"] + s["E"] @ y + _tanh(s, x, y) * s["h"])

    def f_y(self, i: int, x: Vector, y: Vector) -> Vector:
        return _own_mean(self.upper[i], lambda s: s["C"] @ y - s["c"] + s["E"].T @ x + _tanh(s, x, y) * s["k"])

    def g_y(self, i: int, x: Vector, y: Vector) -> Vector:
        return _own_mean(
            self.lower[i],
            lambda s: s["A"] @ y - s["B"] @ x - s["b"] + np.tanh(s["u"] @ y + s["w"] @ x) * s["u"],
        )

    def g(self, i: int, x: Vector, y: Vector) -> float:
        """g itself."""

        def value(s: Sample) -> Any:
            quadratic = 0.5 * y @ s["A"] @ y - y @ (s["B"] @ x + s["b"])
            return quadratic + np.log(np.cosh(s["u"] @ y + s["w"] @ x))

        return float(_own_mean(self.lower[i], value))

    def g_x(self, i: int, x: Vector, y: Vector) -> Vector:
        return _own_mean(self.lower[i], lambda s: -s["B"].T @ y + np.tanh(s["u"] @ y + s["w"] @ x) * s["w"])

    def g_yy(self, i: int, x: Vector, y: Vector) -> Matrix:
        return _own_mean(
            self.lower[i], lambda s: s["A"] + np.outer(s["u"], s["u"]) / np.cosh(s["u"] @ y + s["w"] @ x) ** 2
        )

    def g_xy(self, i: int, x: Vector, y: Vector) -> Matrix:
        """∂²g/∂x∂y: a row for each entry of x."""
        return _own_mean(
            self.lower[i], lambda s: -s["B"].T + np.outer(s["w"], s["u"]) / np.cosh(s["u"] @ y + s["w"] @ x) ** 2
        )


@dataclass
class Minimax:
    """f = ½ xᵀDx − dᵀx + xᵀEy − ½ yᵀCy + cᵀy + log cosh(hᵀx + kᵀy). Its bilevel form has g = −f."""

    upper: list[Sample]
    p: Vector

    def f_x(self, i: int, x: Vector, y: Vector) -> Vector:
        return _own_mean(self.upper[i], lambda s: s["D"] @ x - s["d"] + s["E"] @ y + _tanh(s, x, y) * s["h"])

    def f_y(self, i: int, x: Vector, y: Vector) -> Vector:
        return _own_mean(self.upper[i], lambda s: s["E"].T @ x - s["C"] @ y + s["c"] + _tanh(s, x, y) * s["k"])

    def g_y(self, i: int, x: Vector, y: Vector) -> Vector:
        return -self.f_y(i, x, y)

    def g_yy(self, i: int, x: Vector, y: Vector) -> Matrix:
        return _own_mean(self.upper[i], lambda s: s["C"] - (1 - _tanh(s, x, y) ** 2) * np.outer(s["k"], s["k"]))

    def g_xy(self, i: int, x: Vector, y: Vector) -> Matrix:
        return _own_mean(self.upper[i], lambda s: -s["E"] - (1 - _tanh(s, x, y) ** 2) * np.outer(s["h"], s["k"]))


@dataclass
class Compositional:
    """r = Mx + m + tanh(Wx), f(v) = ½ vᵀQv − qᵀv and, if `extra`, h = ½ xᵀDx − dᵀx."""

    lower: list[Sample]
    upper: list[Sample]
    p: Vector
    extra: bool = True

    def r(self, i: int, x: Vector) -> Vector:
        return _own_mean(self.lower[i], lambda s: s["M"] @ x + s["m"] + np.tanh(s["W"] @ x))

    def jacobian(self, i: int, x: Vector) -> Matrix:
        return _own_mean(self.lower[i], lambda s: s["M"] + s["W"] / np.cosh(s["W"] @ x)[:, None] ** 2)

    def outer_gradient(self, i: int, v: Vector) -> Vector:
        return _own_mean(self.upper[i], lambda s: s["Q"] @ v - s["q"])

    def extra_gradient(self, i: int, x: Vector) -> Vector:
        return _own_mean(self.upper[i], lambda s: s["D"] @ x - s["d"]) if self.extra else np.zeros_like(x)

    # Its bilevel form, g = ½‖y − r(x)‖².

    def f_x(self, i: int, x: Vector, y: Vector) -> Vector:
        return self.extra_gradient(i, x)

    def f_y(self, i: int, x: Vector, y: Vector) -> Vector:
        return self.outer_gradient(i, y)

    def g_y(self, i: int, x: Vector, y: Vector) -> Vector:
        return y - self.r(i, x)

    def g_yy(self, i: int, x: Vector, y: Vector) -> Matrix:
        return np.eye(len(y))

    def g_xy(self, i: int, x: Vector, y: Vector) -> Matrix:
        return -self.jacobian(i, x).T


@dataclass
class SingleLevel:
    """f = ½ xᵀDx − dᵀx + log cosh(uᵀx)."""

    upper: list[Sample]
    p: Vector

    def f_x(self, i: int, x: Vector) -> Vector:
        return _own_mean(self.upper[i], lambda s: s["D"] @ x - s["d"] + np.tanh(s["u"] @ x) * s["u"])


# The same losses for the library, means over a batch.


def _bilevel_lower(x: Any, y: Any, batch: Any) -> Any:
    a, b, shift = (jnp.mean(batch[name], axis=0) for name in ("A", "B", "b"))
    smooth = jnp.mean(jnp.log(jnp.cosh(batch["u"] @ y + batch["w"] @ x)))
    return 0.5 * y @ a @ y - y @ (b @ x + shift) + smooth


def _coupling(x: Any, y: Any, batch: Any) -> Any:
    return jnp.mean(jnp.log(jnp.cosh(batch["h"] @ x + batch["k"] @ y)))


def _bilevel_upper(x: Any, y: Any, batch: Any) -> Any:
    c2, d2, e, c, d = (jnp.mean(batch[name], axis=0) for name in ("C", "D", "E", "c", "d"))
    return 0.5 * y @ c2 @ y - c @ y + 0.5 * x @ d2 @ x - d @ x + x @ e @ y + _coupling(x, y, batch)


def _saddle(x: Any, y: Any, batch: Any) -> Any:
    c2, d2, e, c, d = (jnp.mean(batch[name], axis=0) for name in ("C", "D", "E", "c", "d"))
    return 0.5 * x @ d2 @ x - d @ x + x @ e @ y - 0.5 * y @ c2 @ y + c @ y + _coupling(x, y, batch)


def _inner(x: Any, batch: Any) -> Any:
    return jnp.mean(batch["M"] @ x + batch["m"] + jnp.tanh(batch["W"] @ x), axis=0)


def _outer(value: Any, batch: Any) -> Any:
    q2, q = jnp.mean(batch["Q"], axis=0), jnp.mean(batch["q"], axis=0)
    return 0.5 * value @ q2 @ value - q @ value


def _extra(x: Any, batch: Any) -> Any:
    d2, d = jnp.mean(batch["D"], axis=0), jnp.mean(batch["d"], axis=0)
    return 0.5 * x @ d2 @ x - d @ x


def _single(x: Any, batch: Any) -> Any:
    smooth = jnp.mean(jnp.log(jnp.cosh(batch["u"] @ x)))
    return _extra(x, batch) + smooth


def project(x: Any) -> Any:
    """The nearest point of the ball of radius RADIUS, in either arithmetic."""
    size = (x @ x) ** 0.5
    return x * (RADIUS / (jnp.maximum(size, RADIUS) if hasattr(x, "at") else max(size, RADIUS)))


# One object each, so that every test that uses it shares what was compiled.
BILEVEL = rk.Bilevel(_bilevel_upper, _bilevel_lower)
MINIMAX = rk.Minimax(_saddle, project_upper=project)
COMPOSITIONAL = rk.Compositional(_inner, _outer, _extra)
COMPOSITIONAL_ALONE = rk.Compositional(_inner, _outer)
SINGLE_LEVEL = rk.SingleLevel(_single, project_upper=project)
INIT = (np.array([0.8, -0.5, 0.3]), np.array([1.0, 0.4, -0.7, 0.2]))


def data(sizes: tuple[int, ...], seed: int, **shapes: tuple[int, ...]) -> list[Sample]:
    """Samples for each client: square shapes are positive definite, and clients and samples differ in all of them."""
    rng = np.random.default_rng(seed)
    base = {name: rng.normal(size=shape) for name, shape in shapes.items()}

    def one(name: str, shape: tuple[int, ...], own: np.ndarray) -> np.ndarray:
        value = 0.5 * (base[name] + own) + 0.3 * rng.normal(size=shape)
        if len(shape) == 2 and shape[0] == shape[1]:
            return np.eye(shape[0]) + value @ value.T / shape[0]
        return 0.7 * value

    clients = []
    for count in sizes:
        own = {name: rng.normal(size=shape) for name, shape in shapes.items()}
        clients.append(
            {name: np.stack([one(name, shape, own[name]) for _ in range(count)]) for name, shape in shapes.items()}
        )
    return clients


_UPPER = {"C": (Y_DIM, Y_DIM), "D": (X_DIM, X_DIM), "E": (X_DIM, Y_DIM), "c": (Y_DIM,), "d": (X_DIM,)}
_UPPER |= {"h": (X_DIM,), "k": (Y_DIM,)}
_LOWER = {"A": (Y_DIM, Y_DIM), "B": (Y_DIM, X_DIM), "b": (Y_DIM,), "u": (Y_DIM,), "w": (X_DIM,)}
_INNER = {"M": (Y_DIM, X_DIM), "m": (Y_DIM,), "W": (Y_DIM, X_DIM)}
_OUTER = {"Q": (Y_DIM, Y_DIM), "q": (Y_DIM,), "D": (X_DIM, X_DIM), "d": (X_DIM,)}
_SINGLE = {"D": (X_DIM, X_DIM), "d": (X_DIM,), "u": (X_DIM,)}


def _normalised(weights: Any) -> Vector:
    return np.asarray(weights, float) / np.sum(weights)


def bilevel(weights: Any = WEIGHTS, lower: Any = LOWER_SIZES, upper: Any = UPPER_SIZES) -> tuple[Bilevel, rk.Clients]:
    low, up = data(lower, 1, **_LOWER), data(upper, 2, **_UPPER)
    return Bilevel(low, up, _normalised(weights)), rk.Clients(low, up, weights)


def minimax(weights: Any = WEIGHTS, upper: Any = UPPER_SIZES) -> tuple[Minimax, rk.Clients]:
    up = data(upper, 3, **_UPPER)
    return Minimax(up, _normalised(weights)), rk.Clients(upper=up, weights=weights)


def compositional(weights: Any = WEIGHTS, extra: bool = True) -> tuple[Compositional, rk.Clients]:
    low, up = data(LOWER_SIZES, 4, **_INNER), data(UPPER_SIZES, 5, **_OUTER)
    return Compositional(low, up, _normalised(weights), extra), rk.Clients(low, up, weights)


def single_level(weights: Any = WEIGHTS) -> tuple[SingleLevel, rk.Clients]:
    up = data(LOWER_SIZES, 6, **_SINGLE)
    return SingleLevel(up, _normalised(weights)), rk.Clients(upper=up, weights=weights)


# The library's run, to lay beside the transcription's.


def cohorts(n: int, size: int, rounds: int, seed: int) -> list[Sequence[int]]:
    """Return the cohorts that a run with this seed draws. Another test checks the statistics of the draw."""
    root = jax.random.key(seed)
    keys = [jax.random.split(jax.random.fold_in(root, t + 1))[0] for t in range(rounds)]
    return [[int(i) for i in sample_cohort(key, n, size)] for key in keys]


def trajectory(
    problem: Any, clients: rk.Clients, algorithm: Any, init: Any, rounds: int, **given: Any
) -> list[tuple[Vector, Vector]]:
    """The library's variables at the start and after each round."""
    seen: list[tuple[Vector, Vector]] = []

    def look(x: Any, y: Any) -> dict[str, float]:
        seen.append((np.array(x), np.array(y)))
        return {}

    rk.solve(problem, clients, algorithm, init, rounds, evaluate=look, every=1, **given)
    return seen


def assert_same(ours: Sequence[Any], golden: Sequence[Any]) -> None:
    """Equal round by round to 1e-10, and not because nothing moves."""
    assert len(ours) == len(golden)
    for t, (got, expected) in enumerate(zip(ours, golden, strict=True)):
        for name, a, b in zip("xy"[: len(expected)], got, expected, strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-10, atol=1e-10, err_msg=f"{name} after round {t}")
    for k in range(len(golden[0])):
        moves = [np.abs(after[k] - before[k]).max() for before, after in itertools.pairwise(golden)]
        assert max(moves) > 1e-4, "the test would pass on an algorithm that does nothing"
        assert max(moves) < 10, "the run diverges: agreement to 1e-10 means little"
