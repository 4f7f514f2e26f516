"""Heterogeneous quadratics at both levels, with closed forms of the lower solution, hypergradient and optimum."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from rookery.base.arguments import check_amounts, check_counts, check_seed
from rookery.data.clients import Clients
from rookery.problems.problems import Bilevel, Scope
from rookery.tasks.task import Task, check_word

Vector = Float[np.ndarray, " d"]
DEFAULTS = {
    "upper_step": 0.05, "lower_step": 0.1, "lower_rounds": 3, "lower_local_steps": 3, "neumann_terms": 20,
    "hessian_step": 0.2, "linear_step": 0.1,
}  # fmt: skip


def _lower(x: Any, y: Any, batch: Any) -> Float[Array, ""]:
    """Return g = ½ yᵀAy − yᵀ(Bx + b), the mean over the batch."""
    a, b, shift = (jnp.mean(batch[name], axis=0) for name in ("A", "B", "b"))
    return 0.5 * y @ a @ y - y @ (b @ x + shift)


def _upper(x: Any, y: Any, batch: Any) -> Float[Array, ""]:
    """Return f = ½ yᵀCy − cᵀy + ½ xᵀDx − dᵀx + xᵀEy, the mean over the batch."""
    c, d, e, c1, d1 = (jnp.mean(batch[name], axis=0) for name in ("C", "D", "E", "c", "d"))
    return 0.5 * y @ c @ y - c1 @ y + 0.5 * x @ d @ x - d1 @ x + x @ e @ y


@dataclass(frozen=True)
class Solution:
    """The closed forms, from the clients' mean matrices."""

    A: np.ndarray
    B: np.ndarray
    b: np.ndarray
    C: np.ndarray
    D: np.ndarray
    E: np.ndarray
    c: np.ndarray
    d: np.ndarray

    def y(self, x: Vector) -> Vector:
        """Return y*(x) = A⁻¹(Bx + b)."""
        return np.linalg.solve(self.A, self.B @ x + self.b)

    def p(self, x: Vector, y: Vector) -> Vector:
        """Return [∇²_y g]⁻¹ ∇_y f at (x, y)."""
        return np.linalg.solve(self.A, self.C @ y - self.c + self.E.T @ x)

    def hypergradient(self, x: Vector, y: Vector | None = None) -> Vector:
        """Return ∇_x f − ∇²_xy g [∇²_y g]⁻¹ ∇_y f at (x, y); by default at y*(x), where it is the gradient of Φ."""
        y = self.y(x) if y is None else y
        return self.D @ x - self.d + self.E @ y + self.B.T @ self.p(x, y)

    @property
    def x(self) -> Vector:
        """The optimum."""
        return _root(self.hypergradient, len(self.d))


@dataclass(frozen=True)
class LocalSolution:
    """The closed forms if every client has its own lower level: Φ(x) = Σ p_i f_i(x, y_i*(x))."""

    p: np.ndarray  # the clients' weights
    clients: list[Solution]  # from each client's own matrices

    def y(self, x: Vector) -> np.ndarray:
        """Return y_i*(x), a row for each client."""
        return np.stack([own.y(x) for own in self.clients])

    def hypergradient(self, x: Vector) -> Vector:
        """Return ∇Φ(x), the mean of the clients' hypergradients."""
        return self.p @ np.stack([own.hypergradient(x) for own in self.clients])

    @property
    def x(self) -> Vector:
        """The optimum."""
        return _root(self.hypergradient, len(self.clients[0].d))


def _root(affine: Callable[[Vector], Vector], dim: int) -> Vector:
    """Return the zero of an affine map such as ∇Φ."""
    at_zero = affine(np.zeros(dim))
    matrix = np.stack([affine(unit) - at_zero for unit in np.eye(dim)], axis=1)
    return np.linalg.solve(matrix, -at_zero)


def quadratic(
    clients: int = 10,
    upper_dim: int = 3,
    lower_dim: int = 4,
    samples: int = 1,
    noise: float = 0.0,
    heterogeneity: float = 1.0,
    weights: Sequence[float] | str | None = None,
    sizes: Sequence[int] | None = None,
    seed: int = 0,
    replace: bool = False,
    scope: Scope = "global",
) -> Task:
    """Solve bilevel quadratics with curvature between 1 and 5 at both levels.

    Arguments:
        clients: the number of clients.
        upper_dim, lower_dim: dimensions of x and y.
        samples: samples per client and level.
        sizes: the number of samples of each client, instead of `samples`.
        noise: how much a client's samples differ from each other, in every matrix and vector, with the same mean.
        heterogeneity: how much the clients differ.
        weights: p_i, as in `Clients`.
        seed: seed of the problem.
        replace: as in `Clients`.
        scope: "global", one lower level for all; or "client", one for each client, with its own solution.

    `Task.evaluate` returns `distance` = ‖x − x*‖², `gradient` = ‖∇Φ(x)‖² and, with scope "global", `lower_gap` =
    ‖y − y*(x)‖². `solution(task)` returns the closed forms.
    """
    check_word("scope", scope, "global", "client")
    check_seed(seed)
    check_counts(clients=clients, upper_dim=upper_dim, lower_dim=lower_dim, samples=samples)
    check_amounts(noise=noise, heterogeneity=heterogeneity)
    if sizes is not None and not isinstance(sizes, list | tuple | np.ndarray):
        raise ValueError(f"sizes must be a list with the number of samples of each client; got {sizes!r}.")
    rng = np.random.default_rng(seed)
    counts = [samples] * clients if sizes is None else list(sizes)
    check_counts(**{f"sizes[{i}]": count for i, count in enumerate(counts)})
    base_b, base_e = rng.normal(size=(lower_dim, upper_dim)), 0.3 * rng.normal(size=(upper_dim, lower_dim))
    lower, upper = [], []
    for count in counts:
        matrices = {
            "A": _definite(rng, lower_dim, heterogeneity),
            "B": base_b + 0.3 * heterogeneity * rng.normal(size=base_b.shape),
            "b": heterogeneity * rng.normal(size=lower_dim),
            "C": _definite(rng, lower_dim, heterogeneity),
            "D": _definite(rng, upper_dim, heterogeneity),
            "E": base_e + 0.1 * heterogeneity * rng.normal(size=base_e.shape),
            "c": heterogeneity * rng.normal(size=lower_dim),
            "d": heterogeneity * rng.normal(size=upper_dim),
        }
        rows = {name: _spread(rng, value, count, noise, name in "ACD") for name, value in matrices.items()}
        lower.append({name: rows[name] for name in ("A", "B", "b")})
        upper.append({name: rows[name] for name in ("C", "D", "E", "c", "d")})
    data = Clients(lower, upper, weights, replace=replace)
    closed = _solve(data, scope)
    best = closed.x

    def evaluate(x: Any, y: Any) -> dict[str, float]:
        x = np.asarray(x, float)
        metrics = {"distance": np.sum((x - best) ** 2), "gradient": np.sum(closed.hypergradient(x) ** 2)}
        if scope == "global":
            metrics["lower_gap"] = np.sum((np.asarray(y, float) - closed.y(x)) ** 2)
        return {name: float(value) for name, value in metrics.items()}

    return Task(
        name="quadratic",
        problem=Bilevel(_upper, _lower, lower_scope=scope),
        clients=data,
        init=(np.ones(upper_dim), np.ones(lower_dim)),
        evaluate=evaluate,
        metric="distance",
        rounds=200,
        every=20,
        defaults=DEFAULTS,
    )


def solution(task: Task) -> Any:
    """Return the closed forms of a quadratic task: a `Solution`, or a `LocalSolution` for scope "client"."""
    return _solve(task.clients, task.problem.lower_scope)  # type: ignore[union-attr]


def _solve(clients: Clients, scope: Scope) -> Solution | LocalSolution:
    p = np.asarray(clients.weights, float)
    means = {}  # the mean of each client's samples, stacked
    for source in (clients.lower, clients.upper):
        for name, rows in source.rows.items():
            parts = np.split(np.asarray(rows, float), np.asarray(source.offsets)[1:])
            means[name] = np.stack([part.mean(axis=0) for part in parts])
    if scope == "client":
        local = [Solution(**{name: values[i] for name, values in means.items()}) for i in range(clients.n)]
        return LocalSolution(p, local)
    return Solution(**{name: np.tensordot(p, values, axes=1) for name, values in means.items()})


def _definite(rng: np.random.Generator, size: int, heterogeneity: float) -> np.ndarray:
    """Draw a symmetric matrix with eigenvalues in [1, 1 + 4·heterogeneity], at most 5, in random directions."""
    basis, _ = np.linalg.qr(rng.normal(size=(size, size)))
    return basis @ np.diag(1 + min(heterogeneity, 1.0) * rng.uniform(0, 4, size)) @ basis.T


def _spread(rng: np.random.Generator, mean: np.ndarray, count: int, noise: float, symmetric: bool) -> np.ndarray:
    """Draw samples around a mean, which they keep."""
    if noise == 0 or count == 1:
        return np.repeat(mean[None], count, axis=0)
    away = noise * rng.normal(size=(count, *mean.shape))
    if symmetric:
        away = (away + away.swapaxes(1, 2)) / 2
    return mean + away - away.mean(axis=0)
