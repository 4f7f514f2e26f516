"""One case for every algorithm and every class of problem it claims. A new algorithm is added to SETTINGS, once."""

from dataclasses import dataclass
from functools import cache
from typing import Any

import jax.numpy as jnp
import numpy as np

import rookery as rk
from rookery import algorithms
from rookery.tasks.quadratic import quadratic

# Hyperparameters with which each algorithm is put through the contract: small numbers, every feature in use.
NESTED = {"upper_step": 0.05, "lower_step": 0.1, "lower_rounds": 2, "lower_local_steps": (1, 3), "neumann_terms": 2}
NEST = NESTED | {"upper_local_steps": 2, "hessian_step": 0.15, "batch_size": 2}
SADDLE = {"upper_step": 0.02, "lower_step": 0.05, "local_steps": (1, 3), "batch_size": 2}
SINGLE = {"step": 0.05, "local_steps": (1, 3), "batch_size": 2}
SETTINGS: dict[str, dict[str, Any]] = {
    "FedNest": NEST,
    "LFedNest": NEST,
    "FedNestSGD": NEST,
    "LFedNestSVRG": NEST,
    "LFedNestNonAlt": NEST,
    "FedAvgSaddle": SADDLE,
    "ScaffoldSaddle": SADDLE,
    "FedAvg": SINGLE,
    "FedSVRG": SINGLE,
}

# Exchanges a round as the specification states them, from T and N; by class of problem.
T, N = NESTED["lower_rounds"], NESTED["neumann_terms"]
EXCHANGES: dict[tuple[str, str], int] = {
    ("FedNest", "Bilevel"): 2 * T + N + 3,
    ("FedNest", "Minimax"): 2 * T + 2,
    ("FedNest", "Compositional"): 2 * T + 3,
    ("LFedNest", "Bilevel"): T + 1,
    ("LFedNest", "Minimax"): T + 1,
    ("LFedNest", "Compositional"): T + 1,
    ("FedNestSGD", "Bilevel"): T + N + 3,
    ("FedNestSGD", "Minimax"): T + 2,
    ("FedNestSGD", "Compositional"): T + 3,
    ("LFedNestSVRG", "Bilevel"): 2 * T + 1,
    ("LFedNestSVRG", "Minimax"): 2 * T + 1,
    ("LFedNestSVRG", "Compositional"): 2 * T + 1,
    ("LFedNestNonAlt", "Bilevel"): 1,
    ("LFedNestNonAlt", "Minimax"): 1,
    ("LFedNestNonAlt", "Compositional"): 1,
    ("FedAvgSaddle", "Minimax"): 1,
    ("ScaffoldSaddle", "Minimax"): 1,
    ("FedAvg", "SingleLevel"): 1,
    ("FedSVRG", "SingleLevel"): 2,
}


@dataclass(frozen=True)
class Case:
    """A problem with its clients' data as lists, so that a test can reorder or repeat them."""

    problem: Any
    data: dict[str, list[Any]]
    init: Any

    def clients(self, order: list[int] | None = None, weights: Any = None) -> rk.Clients:
        """The clients, in this order (which may repeat or leave out some)."""
        picked = self.data if order is None else {k: [v[i] for i in order] for k, v in self.data.items()}
        return rk.Clients(**picked, weights=weights)


def _saddle(x: Any, y: Any, batch: Any) -> Any:
    a, b, c = (jnp.mean(batch[k], axis=0) for k in "abc")
    return 0.5 * x @ x * jnp.exp(c[0]) + x @ a @ y - 0.5 * y @ y + b @ y - c @ x


def _inner(x: Any, batch: Any) -> Any:
    return {"r": jnp.mean(jnp.tanh(batch["m"] @ x) + batch["s"], axis=0)}


def _outer(value: Any, batch: Any) -> Any:
    return jnp.mean(jnp.sum((value["r"] - batch["t"]) ** 2, axis=-1)) + jnp.sum(value["r"] ** 4)


def _extra(x: Any, batch: Any) -> Any:
    return 0.5 * jnp.mean(batch["w"]) * x @ x


def _loss(x: Any, batch: Any) -> Any:
    return jnp.mean(jnp.log1p(jnp.exp(-batch["t"] * (batch["a"] @ x)))) + 0.05 * x @ x


@cache
def case(kind: str, clients: int = 4, samples: int = 3) -> Case:
    """The problem of this class: heterogeneous clients, several samples each."""
    rng = np.random.default_rng(5)
    draw = lambda *shape: rng.normal(size=(samples, *shape))
    if kind == "Bilevel":
        task = quadratic(clients=clients, samples=samples, noise=0.1, seed=3)
        data = {level: [task.clients.client_data(i)[level][0] for i in range(clients)] for level in ("lower", "upper")}
        return Case(task.problem, data, task.init)
    if kind == "Minimax":
        data = {"upper": [{"a": 0.3 * draw(3, 2), "b": draw(2), "c": 0.3 * draw(3)} for _ in range(clients)]}
        return Case(rk.Minimax(_saddle), data, (np.ones(3), np.ones(2)))
    if kind == "Compositional":
        data = {
            "lower": [{"m": draw(2, 3), "s": draw(2)} for _ in range(clients)],
            "upper": [{"t": draw(2), "w": np.abs(draw())} for _ in range(clients)],
        }
        return Case(rk.Compositional(_inner, _outer, _extra), data, (np.ones(3), {"r": np.ones(2)}))
    data = {"upper": [{"a": draw(3), "t": np.sign(draw())} for _ in range(clients)]}
    return Case(rk.SingleLevel(_loss), data, np.ones(3))


def names() -> list[str]:
    """Every algorithm of the library."""
    return sorted(algorithms.__all__)


def pairs() -> list[tuple[str, str]]:
    """Every algorithm with every class of problem it claims."""
    return [(name, cls.__name__) for name in names() for cls in getattr(rk, name).solves]


def method(name: str, **given: Any) -> Any:
    """The algorithm with its settings."""
    return getattr(rk, name)(**(SETTINGS[name] | given))
