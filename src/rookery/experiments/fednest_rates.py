"""The rates of the FedNest paper's theory (Theorems 3.1–3.2, Corollaries 3.1–3.3, Lemma 2.2), measured on quadratics."""

import functools
import math
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np
import pandas as pd
from jaxtyping import Array, Float
from matplotlib.figure import Figure

from rookery import report, theory
from rookery.algorithms import FedNest
from rookery.clients import Clients
from rookery.experiments.experiment import Claim, Config, Experiment, Finding
from rookery.experiments.fednest import PAPER
from rookery.fed import Algorithm
from rookery.problems import Compositional, Minimax, SingleLevel
from rookery.tasks import quadratic
from rookery.tasks.quadratic import solution
from rookery.tasks.task import Task

CLASSES = ("bilevel", "minimax", "compositional", "single level")
DIM, CLIENTS, SAMPLES = 4, 5, 64
SCALE = 0.02  # of the upper loss: the theory's steps, which are not scale-free, are then of a useful size
LOCAL_STEPS = np.array([1, 2, 3, 4, 5])  # τ_i
ROOTS = (16, 28, 50, 90, 160)  # √K
QUICK_ROOTS = (16, 28)
LOWER_ROUNDS = 8  # T of bilevel and minimax
TERMS = (1, 2, 3, 4, 6, 8, 12, 16, 24)  # N
RANDOM_TERMS = (1, 2, 4, 8, 12)
QUICK_TERMS, QUICK_RANDOM_TERMS = (2, 4, 8), (2,)
DRAWS, QUICK_DRAWS = 20_000, 2_000  # of the random hypergradient, a seed
STILL = 1e-9  # the step of the runs that only draw hypergradients: x moves too little to matter
SPREAD = 4.0  # κ of the lower Hessian in the runs about the bias

Rows = list[dict[str, np.ndarray]]


# The four problems. Matrices differ between clients, vectors between clients and samples.


def rates_task(seed: int, problem: str, noise: float) -> Task:
    """A stochastic quadratic of one of the CLASSES. The seed is the run's alone: the problem is the same for all."""
    return _problem(problem, noise)


@functools.cache
def _problem(name: str, noise: float) -> Task:
    make = {"bilevel": _bilevel, "minimax": _minimax, "compositional": _compositional, "single level": _single_level}
    return make[name](np.random.default_rng(CLASSES.index(name)), noise)


def _bilevel(rng: np.random.Generator, noise: float) -> Task:
    """g_i = ½yᵀA_i y − yᵀ(B_i x + b), f_i = SCALE·(½‖y − c‖² + ½‖x − d‖²)."""
    still = SCALE * np.eye(DIM)
    lower: Rows = [
        {"A": _alike(_definite(rng, 1.0, 1.5)), "B": _alike(0.4 * _turn(rng)), "b": _noisy(rng, noise)}
        for _ in range(CLIENTS)
    ]
    upper: Rows = [
        {
            "C": _alike(still), "D": _alike(still), "E": _alike(np.zeros((DIM, DIM))),
            "c": SCALE * _noisy(rng, noise), "d": SCALE * _noisy(rng, noise),
        }
        for _ in range(CLIENTS)
    ]  # fmt: skip
    clients = Clients(lower, upper, replace=True)
    task = _task(quadratic(clients=1).problem, clients, (np.ones(DIM), np.ones(DIM)), np.zeros_like)
    return _with_gradient(task, solution(task).hypergradient)


def _minimax_objective(x: Any, y: Any, batch: Any) -> Float[Array, ""]:
    """SCALE·(½‖x − d‖² − ½yᵀAy + yᵀ(Bx + b)), the mean over the batch."""
    a, b, shift, d = (jnp.mean(batch[name], axis=0) for name in ("A", "B", "b", "d"))
    return SCALE * (0.5 * x @ x - d @ x - 0.5 * y @ a @ y + y @ (b @ x + shift))


MINIMAX = Minimax(_minimax_objective)


def _minimax(rng: np.random.Generator, noise: float) -> Task:
    rows: Rows = [
        {
            "A": _alike(_definite(rng, 1.0, 1.5)), "B": _alike(0.4 * _turn(rng)),
            "b": _noisy(rng, noise), "d": _noisy(rng, noise),
        }
        for _ in range(CLIENTS)
    ]  # fmt: skip
    a, b, shift, d = (_mean(rows, name) for name in ("A", "B", "b", "d"))
    gradient = lambda x: SCALE * (x - d + b.T @ np.linalg.solve(a, b @ x + shift))
    return _task(MINIMAX, Clients(upper=rows, replace=True), (np.ones(DIM), np.ones(DIM)), gradient)


def _inner(x: Any, batch: Any) -> Float[Array, " d"]:
    """r(x) = Rx + s, the mean over the batch."""
    return jnp.mean(batch["R"], axis=0) @ x + jnp.mean(batch["s"], axis=0)


def _outer(y: Any, batch: Any) -> Float[Array, ""]:
    """SCALE·½‖y − c‖², the mean over the batch."""
    return SCALE * (0.5 * y @ y - jnp.mean(batch["c"], axis=0) @ y)


COMPOSITIONAL = Compositional(_inner, _outer)


def _compositional(rng: np.random.Generator, noise: float) -> Task:
    lower: Rows = [{"R": _alike(_definite(rng, 0.9, 1.1)), "s": _noisy(rng, noise)} for _ in range(CLIENTS)]
    upper: Rows = [{"c": _noisy(rng, 1.0)} for _ in range(CLIENTS)]  # D̃_f, and so the steps, depend on this noise
    r, s, c = _mean(lower, "R"), _mean(lower, "s"), _mean(upper, "c")
    gradient = lambda x: SCALE * r.T @ (r @ x + s - c)
    return _task(COMPOSITIONAL, Clients(lower, upper, replace=True), (np.ones(DIM), np.ones(DIM)), gradient)


def _single_loss(x: Any, batch: Any) -> Float[Array, ""]:
    """SCALE·(½xᵀDx − dᵀx), the mean over the batch."""
    return SCALE * (0.5 * x @ jnp.mean(batch["D"], axis=0) @ x - jnp.mean(batch["d"], axis=0) @ x)


SINGLE = SingleLevel(_single_loss)


def _single_level(rng: np.random.Generator, noise: float) -> Task:
    rows: Rows = [{"D": _alike(_definite(rng, 1.0, 2.0)), "d": _noisy(rng, noise)} for _ in range(CLIENTS)]
    matrix, d = _mean(rows, "D"), _mean(rows, "d")
    return _task(SINGLE, Clients(upper=rows, replace=True), np.ones(DIM), lambda x: SCALE * (matrix @ x - d))


def _task(problem: Any, clients: Clients, init: Any, gradient: Callable[[np.ndarray], np.ndarray]) -> Task:
    def evaluate(x: Any, y: Any) -> dict[str, float]:
        return {"gradient": float(np.sum(gradient(np.asarray(x, float)) ** 2))}

    return Task("fednest-rates", problem, clients, init, evaluate, metric="gradient")


def _with_gradient(task: Task, gradient: Callable[[np.ndarray], np.ndarray]) -> Task:
    return _task(task.problem, task.clients, task.init, gradient)


def _turn(rng: np.random.Generator) -> np.ndarray:
    """A random rotation."""
    return np.linalg.qr(rng.normal(size=(DIM, DIM)))[0]


def _definite(rng: np.random.Generator, low: float, high: float) -> np.ndarray:
    """A symmetric matrix with eigenvalues evenly from low to high, in random directions."""
    turn = _turn(rng)
    return turn @ np.diag(np.linspace(low, high, DIM)) @ turn.T


def _alike(matrix: np.ndarray) -> np.ndarray:
    """The same for every sample."""
    return np.repeat(matrix[None], SAMPLES, axis=0)


def _noisy(rng: np.random.Generator, noise: float) -> np.ndarray:
    """A client's vector, about of unit length, and samples around it whose mean it is."""
    away = noise * rng.normal(size=(SAMPLES, DIM))
    return rng.normal(size=DIM) / math.sqrt(DIM) + away - away.mean(axis=0)


def _mean(rows: Rows, name: str) -> np.ndarray:
    return np.mean([own[name].mean(axis=0) for own in rows], axis=0)


# The methods, by the theory.


def _norm(matrix: np.ndarray) -> float:
    return float(np.linalg.norm(matrix, 2))


def _constants(name: str, noise: float) -> Any:
    """The problem's constants; gradients are bounded on a ball of radius 5 around the origin."""
    task = _problem(name, noise)
    if name == "bilevel":
        return theory.quadratic_constants(task)
    own = [task.clients.client_data(i) for i in range(CLIENTS)]
    if name == "single level":
        return theory.SingleLevelConstants(l_f=max(SCALE * _norm(c["upper"][0]["D"][0]) for c in own))
    if name == "minimax":
        curvature = []
        for c in own:
            a, b = c["upper"][0]["A"][0], c["upper"][0]["B"][0]
            curvature.append((SCALE * np.linalg.eigvalsh(a)[0], SCALE * _norm(np.block([[np.eye(DIM), b.T], [b, -a]]))))
        mu, smooth = min(m for m, _ in curvature), max(s for _, s in curvature)
        return theory.MinimaxConstants(mu_f=float(mu), l_f0=6 * smooth, l_f1=smooth, sigma_f=2 * SCALE * noise)
    return theory.CompositionalConstants(
        l_f0=6 * SCALE,
        l_f1=SCALE,
        l_r0=max(_norm(c["lower"][0]["R"][0]) for c in own),
        sigma_f=SCALE * math.sqrt(DIM),
        sigma_r0=noise * math.sqrt(DIM),
    )


def _method(name: str, noise: float, rounds: int, first: int) -> Algorithm:
    """The theorem's method for K rounds; ᾱ is such that α is at its cap for the smallest K, `first`."""
    constants = _constants(name, noise)
    others: dict[str, Any] = {"batch_size": 1}
    if name == "single level":  # its cap is far above the others'
        cap = theory.fedsvrg(constants, 1, alpha_bar=math.inf).step / 8
        return theory.fedsvrg(
            constants, rounds, alpha_bar=cap * math.sqrt(first), local_steps=LOCAL_STEPS, **others
        )
    t = None if name == "compositional" else LOWER_ROUNDS
    bar = theory.steps(constants, rounds, t).cap * math.sqrt(first)
    both = {"lower_local_steps": LOCAL_STEPS, "upper_local_steps": LOCAL_STEPS}
    return theory.fednest(constants, rounds, t, alpha_bar=bar, **both, **others)


# The bias of the hypergradient. One round of FedNest with one outer step is x ← x − α·h, so h is read off the move.


def bias_task(seed: int, terms: int, step: float, rounds: int) -> Task:
    """At (x, y*(x)) of a bilevel quadratic: how far the mean of `rounds` hypergradients with N = terms is off.

    `bias` is its component along the closed form's, whose length is `closed_form`; `off` is what else there is of it.
    """
    task = _bias_problem()
    closed = solution(task)
    x0, y0 = task.init
    hessian, f_y = closed.A / _bias_constants().l_g1, closed.C @ y0 - closed.c + closed.E.T @ x0
    left = np.linalg.matrix_power(np.eye(len(y0)) - hessian, terms) @ np.linalg.solve(closed.A, f_y)
    expected = -closed.B.T @ left
    length = float(np.linalg.norm(expected))

    def evaluate(x: Any, y: Any) -> dict[str, float]:
        error = (x0 - np.asarray(x, float)) / (step * rounds) - closed.hypergradient(x0, y0)
        along = float(error @ expected) / length
        return {
            "bias": along, "closed_form": length, "off": float(np.linalg.norm(error - along * expected / length)),
            "bound": _bound(terms, float(np.linalg.norm(f_y))), "printed_bound": _bound(terms, _bias_constants().l_f1),
        }  # fmt: skip

    return Task("hypergradient", task.problem, task.clients, task.init, evaluate, metric="bias")


def _bound(terms: int, factor: float) -> float:
    """κ·factor·((κ − 1)/κ)^N."""
    kappa = _bias_constants().kappa
    return kappa * factor * (1 - 1 / kappa) ** terms


@functools.cache
def _bias_problem() -> Task:
    """A bilevel quadratic with one sample a client, started at (x, y*(x))."""
    rng = np.random.default_rng(10)
    one = lambda value: value[None]
    lower = [
        {
            "A": one(_definite(rng, 1.0, SPREAD)), "B": one(0.5 * _turn(rng) + 0.5 * np.eye(DIM)),
            "b": one(rng.normal(size=DIM)),
        }
        for _ in range(CLIENTS)
    ]  # fmt: skip
    upper = [
        {
            "C": one(np.eye(DIM)), "D": one(np.eye(DIM)), "E": one(np.zeros((DIM, DIM))),
            "c": one(3 * rng.normal(size=DIM) + 3), "d": one(rng.normal(size=DIM)),
        }
        for _ in range(CLIENTS)
    ]  # fmt: skip
    task = _task(quadratic(clients=1).problem, Clients(lower, upper), (np.ones(DIM), np.ones(DIM)), np.zeros_like)
    x = np.ones(DIM)
    return _task(task.problem, task.clients, (x, solution(task).y(x)), np.zeros_like)


@functools.cache
def _bias_constants() -> theory.Constants:
    return theory.quadratic_constants(_bias_problem())


def _bias_config(neumann: Any, terms: int, rounds: int, seeds: tuple[int, ...]) -> Config:
    step = 1.0 if rounds == 1 else STILL
    return Config(
        name=f"bias, {neumann}, N = {terms}",
        labels={"part": "bias", "problem": "bilevel", "neumann": neumann, "N": terms, "kappa": _bias_constants().kappa},
        task=bias_task,
        settings={"terms": terms, "step": step, "rounds": rounds},
        algorithm=FedNest(
            upper_step=step,
            lower_step=0.1,
            neumann=neumann,
            neumann_terms=terms - 1 if neumann == "sum" else terms,  # the sum has one term more
            hessian_step=1 / _bias_constants().l_g1,
        ),
        rounds=rounds,
        every=rounds,
        seeds=seeds,
        float64=True,
    )


NOISE = {"bilevel": 2.0, "minimax": 2.0, "compositional": 2.0, "single level": 2.0}


def rates_runs(quick: bool) -> list[Config]:
    """Each class at each K, with its own step; then the hypergradient at each N."""
    roots, seeds = (QUICK_ROOTS, (0, 1)) if quick else (ROOTS, (0, 1, 2, 3, 4))
    configs = [
        Config(
            name=f"{name}, K = {root**2}",
            labels={"part": "rate", "problem": name, "K": root**2},
            task=rates_task,
            settings={"problem": name, "noise": NOISE[name]},
            algorithm=_method(name, NOISE[name], root**2, roots[0] ** 2),
            rounds=root**2,
            every=root // 2,
            seeds=seeds,
            float64=True,
        )
        for name in CLASSES
        for root in roots
    ]
    terms, random, draws = (
        (QUICK_TERMS, QUICK_RANDOM_TERMS, QUICK_DRAWS) if quick else (TERMS, RANDOM_TERMS, DRAWS)
    )
    configs += [_bias_config("sum", n, 1, (0,)) for n in terms if n > 1]
    return configs + [_bias_config("random", n, draws, seeds) for n in random]
