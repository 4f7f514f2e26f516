"""The minimax quadratic of Section 4.3 of the FedNest paper."""

from functools import cache
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from rookery.base.arguments import check_amounts, check_counts, check_seed
from rookery.data.clients import Clients
from rookery.problems.problems import Minimax
from rookery.tasks.task import Task

DEFAULTS = {
    "upper_step": 0.01, "lower_step": 0.05, "lower_rounds": 5, "lower_local_steps": 10,
    "upper_local_steps": 10, "local_steps": 10,
}  # fmt: skip


@cache
def _problem(penalty: float) -> Minimax:
    def objective(x: Any, y: Any, batch: Any) -> Float[Array, ""]:
        t, b = jnp.mean(batch["t"]), jnp.mean(batch["b"], axis=0)
        return -(0.5 * y @ y - b @ y + t * (y @ x)) + 0.5 * penalty * x @ x

    return Minimax(objective)


def minimax_quadratic(
    clients: int = 100, dim: int = 10, spread: float = 1.0, penalty: float = 10.0, seed: int = 0
) -> Task:
    """Find the saddle point, the origin, of f_i = −[½‖y‖² − b_iᵀy + yᵀA_i x] + (λ/2)‖x‖² with A_i = t_i·I.

    The data are t_i ~ U(0, 0.1) and b_i = b'_i − mean b' with b'_i ~ N(0, s²I).

    Arguments:
        clients: the number of clients (1000 in the authors' notebook).
        dim: dimension of x and of y.
        spread: s.
        penalty: λ.
        seed: seed of the problem.

    `Task.evaluate` returns `distance` = ‖x − x*‖² + ‖y − y*‖² and its two parts, `x_distance` and `y_distance`.
    """
    check_seed(seed)
    check_counts(clients=clients, dim=dim)
    check_amounts(spread=spread, penalty=penalty)
    rng = np.random.default_rng(seed)
    t = rng.uniform(0, 0.1, size=clients)
    b = spread * rng.normal(size=(clients, dim))
    b -= b.mean(axis=0)

    def evaluate(x: Any, y: Any) -> dict[str, float]:
        in_x, in_y = float(np.sum(np.asarray(x, float) ** 2)), float(np.sum(np.asarray(y, float) ** 2))
        return {"distance": in_x + in_y, "x_distance": in_x, "y_distance": in_y}

    return Task(
        name="minimax-quadratic",
        problem=_problem(penalty),
        clients=Clients(upper=[{"t": t[i : i + 1], "b": b[i : i + 1]} for i in range(clients)]),
        init=(np.full(dim, 10.0), np.full(dim, 10.0)),
        evaluate=evaluate,
        metric="distance",
        rounds=200,
        defaults=DEFAULTS,
    )
