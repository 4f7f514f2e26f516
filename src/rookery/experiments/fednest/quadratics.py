"""Stochastic quadratics of the four problem classes of FedNest's theory, and the theory's methods for them.

Matrices differ between clients, vectors between clients and samples.
"""

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from rookery import theory
from rookery.data.clients import Clients
from rookery.language.fed import Algorithm
from rookery.problems.problems import Compositional, Minimax, SingleLevel
from rookery.tasks import quadratic
from rookery.tasks.quadratic import solution
from rookery.tasks.task import Task

CLASSES = ("bilevel", "minimax", "compositional", "single level")
DIM, CLIENTS, SAMPLES = 4, 5, 64
SCALE = 0.02  # of the upper loss: the theory's steps, which are not scale-free, are then of a useful size
MINIMAX_SCALE = 0.1  # of the only loss: less would need a lower step above 1, which Lemma C.3 forbids
LOCAL_STEPS = np.array([1, 1, 2, 2, 3])  # τ_i
LOWER_ROUNDS = 5  # T of bilevel and minimax
START = (np.ones(DIM), np.ones(DIM))

Rows = list[dict[str, np.ndarray]]


def rates_task(seed: int, problem: str, noise: float) -> Task:
    """A stochastic quadratic of one of the CLASSES, the same for every seed of the run."""
    return _problem(problem, noise)


@functools.cache
def _problem(name: str, noise: float) -> Task:
    make = {"bilevel": _bilevel, "minimax": _minimax, "compositional": _compositional, "single level": _single_level}
    with jax.enable_x64(True):
        return make[name](np.random.default_rng(CLASSES.index(name)), noise)


def quadratic_task(problem: Any, clients: Clients, init: Any, gradient: Callable[[np.ndarray], np.ndarray]) -> Task:
    """A task whose metric is ‖∇Φ‖², by its closed form."""
    evaluate = lambda x, y: {"gradient": float(np.sum(gradient(np.asarray(x, float)) ** 2))}
    return Task("fednest-rates", problem, clients, init, evaluate, metric="gradient")


def _rows(row: Callable[[], dict[str, np.ndarray]]) -> Rows:
    """The data of each client."""
    return [row() for _ in range(CLIENTS)]


def turn(rng: np.random.Generator) -> np.ndarray:
    """A random rotation."""
    return np.linalg.qr(rng.normal(size=(DIM, DIM)))[0]


def definite(rng: np.random.Generator, low: float, high: float) -> np.ndarray:
    """A symmetric matrix with eigenvalues evenly from low to high, in random directions."""
    basis = turn(rng)
    return basis @ np.diag(np.linspace(low, high, DIM)) @ basis.T


def _alike(matrix: np.ndarray) -> np.ndarray:
    """The same matrix for every sample."""
    return np.repeat(matrix[None], SAMPLES, axis=0)


def _noisy(rng: np.random.Generator, noise: float) -> np.ndarray:
    """A client's vector, about of unit length, and samples around it whose mean it is."""
    away = noise * rng.normal(size=(SAMPLES, DIM))
    return rng.normal(size=DIM) / math.sqrt(DIM) + away - away.mean(axis=0)


def _means(rows: Rows, names: str) -> list[np.ndarray]:
    """The means over all clients and samples."""
    return [np.mean([own[name].mean(axis=0) for own in rows], axis=0) for name in names]


def _batch_means(batch: Any, names: str) -> list[Array]:
    return [jnp.mean(batch[name], axis=0) for name in names]


def _matrices(rng: np.random.Generator) -> dict[str, np.ndarray]:
    return {"A": _alike(definite(rng, 1.0, 1.25)), "B": _alike(0.35 * turn(rng))}


def _bilevel(rng: np.random.Generator, noise: float) -> Task:
    """g_i = ½yᵀA_i y − yᵀ(B_i x + b), f_i = SCALE·(½‖y − c‖² + ½‖x − d‖²)."""
    scaled, zero = _alike(SCALE * np.eye(DIM)), _alike(np.zeros((DIM, DIM)))
    lower = _rows(lambda: _matrices(rng) | {"b": _noisy(rng, noise)})
    vectors = lambda: {"c": SCALE * _noisy(rng, noise), "d": SCALE * _noisy(rng, noise)}
    upper = _rows(lambda: {"C": scaled, "D": scaled, "E": zero} | vectors())
    task = quadratic_task(quadratic(clients=1).problem, Clients(lower, upper, replace=True), START, np.zeros_like)
    return quadratic_task(task.problem, task.clients, task.init, solution(task).hypergradient)


def _minimax_objective(x: Any, y: Any, batch: Any) -> Float[Array, ""]:
    """½‖x − d‖² − ½yᵀAy + yᵀ(Bx + b), scaled, the mean over the batch."""
    a, b, shift, d = _batch_means(batch, "ABbd")
    return MINIMAX_SCALE * (0.5 * x @ x - d @ x - 0.5 * y @ a @ y + y @ (b @ x + shift))


def _minimax(rng: np.random.Generator, noise: float) -> Task:
    rows = _rows(lambda: _matrices(rng) | {"b": _noisy(rng, noise), "d": _noisy(rng, noise)})
    a, b, shift, d = _means(rows, "ABbd")
    gradient = lambda x: MINIMAX_SCALE * (x - d + b.T @ np.linalg.solve(a, b @ x + shift))
    return quadratic_task(Minimax(_minimax_objective), Clients(upper=rows, replace=True), START, gradient)


def _inner(x: Any, batch: Any) -> Float[Array, " d"]:
    """r(x) = Rx + s, the mean over the batch."""
    matrix, shift = _batch_means(batch, "Rs")
    return matrix @ x + shift


def _outer(y: Any, batch: Any) -> Float[Array, ""]:
    """SCALE·½‖y − c‖², the mean over the batch."""
    [c] = _batch_means(batch, "c")
    return SCALE * (0.5 * y @ y - c @ y)


def _compositional(rng: np.random.Generator, noise: float) -> Task:
    lower = _rows(lambda: {"R": _alike(definite(rng, 0.9, 1.0)), "s": _noisy(rng, noise)})
    upper = _rows(lambda: {"c": _noisy(rng, 0.3)})  # D̃_f, and so the steps, depend on this noise
    (r, s), [c] = _means(lower, "Rs"), _means(upper, "c")
    gradient = lambda x: SCALE * r.T @ (r @ x + s - c)
    return quadratic_task(Compositional(_inner, _outer), Clients(lower, upper, replace=True), START, gradient)


def _single_loss(x: Any, batch: Any) -> Float[Array, ""]:
    """SCALE·(½xᵀDx − dᵀx), the mean over the batch."""
    matrix, d = _batch_means(batch, "Dd")
    return SCALE * (0.5 * x @ matrix @ x - d @ x)


def _single_level(rng: np.random.Generator, noise: float) -> Task:
    rows = _rows(lambda: {"D": _alike(definite(rng, 1.0, 2.0)), "d": _noisy(rng, noise)})
    matrix, d = _means(rows, "Dd")
    gradient = lambda x: SCALE * (matrix @ x - d)
    return quadratic_task(SingleLevel(_single_loss), Clients(upper=rows, replace=True), np.ones(DIM), gradient)


def _constants(name: str, noise: float) -> Any:
    """The problem's constants; gradients are bounded on a ball of radius 4 around the origin."""
    task = _problem(name, noise)
    if name == "bilevel":
        return theory.quadratic_constants(task)
    data = [task.clients.client_data(i) for i in range(CLIENTS)]
    norm = lambda matrix: float(np.linalg.norm(matrix, 2))
    if name == "single level":
        return theory.SingleLevelConstants(l_f=max(SCALE * norm(own["upper"][0]["D"][0]) for own in data))
    if name == "minimax":
        pairs = [(own["upper"][0]["A"][0], own["upper"][0]["B"][0]) for own in data]
        mu = min(float(np.linalg.eigvalsh(a)[0]) for a, _ in pairs)
        smooth = max(norm(np.block([[np.eye(DIM), b.T], [b, -a]])) for a, b in pairs)
        return theory.MinimaxConstants(
            mu_f=MINIMAX_SCALE * mu,
            l_f0=MINIMAX_SCALE * 5 * smooth,
            l_f1=MINIMAX_SCALE * smooth,
            sigma_f=MINIMAX_SCALE * noise * math.sqrt(2 * DIM),
        )
    return theory.CompositionalConstants(
        l_f0=3 * SCALE,
        l_f1=SCALE,
        l_r0=max(norm(own["lower"][0]["R"][0]) for own in data),
        sigma_f=SCALE * 0.3 * math.sqrt(DIM),
        sigma_r0=noise * math.sqrt(DIM),
    )


def theory_method(name: str, noise: float, rounds: int, first: int, **changes: Any) -> Algorithm:
    """The theorem's method for K rounds; ᾱ is such that α is at its cap for the smallest K, `first`."""
    constants = _constants(name, noise)
    others: dict[str, Any] = {"batch_size": 1}
    if name == "bilevel":
        others |= {"resample": False, **changes}  # every cohort is the whole federation
    if name == "single level":  # its cap is far above the others'
        cap = theory.fedsvrg(constants, 1, alpha_bar=math.inf).step / 8
        return theory.fedsvrg(constants, rounds, alpha_bar=cap * math.sqrt(first), local_steps=LOCAL_STEPS, **others)
    t = None if name == "compositional" else LOWER_ROUNDS
    bar = theory.steps(constants, rounds, t).cap * math.sqrt(first)
    others |= {"lower_local_steps": LOCAL_STEPS, "upper_local_steps": LOCAL_STEPS}
    return theory.fednest(constants, rounds, t, alpha_bar=bar, **others)
