"""A composition of affine functions, whose solution is known."""

from functools import cache

import jax.numpy as jnp
import numpy as np

from rookery.base.arguments import check_amounts, check_counts, check_seed
from rookery.data.clients import Clients
from rookery.problems.problems import MultiLevel
from rookery.tasks.task import Task


@cache
def _problem(levels: int) -> MultiLevel:
    inner = tuple(lambda z, b, n=n: jnp.mean(b["A"][:, n] @ z + b["b"][:, n], axis=0) for n in range(levels))
    return MultiLevel(inner, outer=lambda z: jnp.sum((z - 1) ** 2) / 2, extra=lambda x, b: x @ x / 2)


def composition(clients: int = 8, levels: int = 2, dim: int = 3, heterogeneity: float = 1.0, seed: int = 0) -> Task:
    """Minimise ½‖r_N(… r_1(x)) − 1‖² + ½‖x‖², where r_n = A_n z + b_n is the mean of the clients' r_n,i.

    Arguments:
        clients: the number of clients.
        levels: N, the number of inner functions.
        dim: the length of x and of every value.
        heterogeneity: how much the clients' A_n,i and b_n,i differ; 0: not at all.
        seed: seed of the problem.

    The task's default is `jacobians="tracked"`, with which `FedMSA` finds the solution x*, the root of a linear system.
    `Task.evaluate` returns `distance` = ‖x − x*‖².
    """
    check_seed(seed)
    check_counts(clients=clients, levels=levels, dim=dim)
    check_amounts(heterogeneity=heterogeneity)
    rng = np.random.default_rng(seed)
    own = lambda *shape: 0.2 * (rng.normal(size=shape) + heterogeneity * rng.normal(size=(clients, *shape)))
    a, b = 0.8 * np.eye(dim) + own(levels, dim, dim), own(levels, dim)
    whole, shift = np.eye(dim), np.zeros(dim)  # of the composition, whole·x + shift
    for matrix, vector in zip(a.mean(axis=0), b.mean(axis=0), strict=True):
        whole, shift = matrix @ whole, matrix @ shift + vector
    solution = np.linalg.solve(np.eye(dim) + whole.T @ whole, whole.T @ (1 - shift))
    return Task(
        name="composition",
        problem=_problem(levels),
        clients=Clients([{"A": a[i : i + 1], "b": b[i : i + 1]} for i in range(clients)]),
        init=np.zeros(dim),
        evaluate=lambda x, y: {"distance": float(np.sum((np.asarray(x, float) - solution) ** 2))},
        metric="distance",
        rounds=200,
        defaults={"upper_step": 0.05, "lower_step": 0.2, "linear_step": 0.2, "jacobians": "tracked"},
    )
