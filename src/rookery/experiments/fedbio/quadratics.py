"""Stochastic quadratics for FedBiO's rates, and the runs on them."""

import dataclasses
import functools
import math
from typing import Any

import numpy as np

from rookery.algorithms import FedBiO, FedBiOAcc, FedBiOAccLocal, FedBiOLocal, FedNest
from rookery.data.clients import Clients
from rookery.experiments.machinery import Config
from rookery.language.fed import Algorithm
from rookery.problems.problems import Scope
from rookery.tasks import quadratic
from rookery.tasks.quadratic import solution
from rookery.tasks.task import Task

SAMPLES, NOISE, HETEROGENEITY = 64, 1.0, 0.5
FEDERATIONS = (4, 32)  # M
EPSILONS = {  # of the mean ‖∇Φ‖², relative to the start's; halved each time, so that b and the grid follow exactly
    "FedBiO": (0.08, 0.04, 0.02, 0.01, 0.005),
    "FedBiOAcc": (0.04, 0.02, 0.01, 0.005, 0.0025, 0.00125),
    "FedBiOAccLocal": (0.04, 0.02, 0.01, 0.005, 0.0025),
    "FedNest": (0.08, 0.04, 0.02, 0.01, 0.005, 0.0025),
}
# Distance of the start in every entry, and noise: so near that drift (FedBiO) or noise (the others) gives floors of the
# size of ε at steps so small that the start dies away over several rounds.
NEAR = {"FedBiO": (0.008, 0.03), "FedBiOAcc": (0.008, 0.1), "FedBiOAccLocal": (0.008, 0.1), "FedNest": (0.03, 0.1)}
SEEDS = {"FedBiO": 2, "FedBiOAcc": 4, "FedBiOAccLocal": 2, "FedNest": 8}
ACCELERATED = ("FedBiOAcc", "FedBiOAccLocal")
LOCAL, ACC_LOCAL = 4, 8  # I of FedBiO; of FedBiOAcc at the smallest M
SIZES = (4, 16, 64)  # M of the runs about the noise
DRIFTS = (0.04, 0.02, 0.01, 0.005)  # steps of the runs about the drift
COSTS = ("exchanges", "samples")


@functools.cache
def _problem(clients: int, scope: Scope) -> Task:
    """A quadratic whose metric is ‖∇Φ‖² relative to the start's."""
    noisy: dict[str, Any] = {"samples": SAMPLES, "noise": NOISE, "heterogeneity": HETEROGENEITY, "replace": True}
    task = quadratic(clients, **noisy, seed=7, scope=scope)
    start = task.evaluate(*task.init)["gradient"]
    return dataclasses.replace(task, evaluate=lambda x, y: {"relative": task.evaluate(x, y)["gradient"] / start})


def rates_task(seed: int, clients: int, scope: Scope = "global") -> Task:
    """The same problem for every seed of the run."""
    return _problem(clients, scope)


@functools.cache
def _near(clients: int, start: float, noise: float, scope: Scope) -> Task:
    """Clients that differ more, with less noise; their linear terms have mean zero, so that x*, y* and u* are 0.

    They are copies of the same few clients, so that only their number changes with M. With a lower level for each
    client, b_i = c_i = 0, so that x* and all y_i*(x*) are 0 and a short series has no bias there.
    """
    few = FEDERATIONS[0]
    task = quadratic(few, samples=SAMPLES, noise=noise, heterogeneity=1.0, seed=7, replace=True, scope=scope)
    own = task.clients
    lower, upper = (_centred(source.rows, few) for source in (own.lower, own.upper))
    if scope == "client":
        for rows, name in [*((own, "b") for own in lower), *((own, "c") for own in upper)]:
            rows[name] = rows[name] - rows[name].mean(axis=0)
    near = Clients(lower * (clients // few), upper * (clients // few), replace=True)
    x, y = task.init
    task = dataclasses.replace(task, clients=near, init=(start * np.ones_like(x), np.zeros_like(y)))
    gradient = solution(task).hypergradient
    measure = lambda x: float(np.sum(gradient(np.asarray(x, float)) ** 2))
    first = measure(task.init[0])
    return dataclasses.replace(task, evaluate=lambda x, y: {"relative": measure(x) / first})


def _centred(rows: Any, clients: int) -> list[dict[str, np.ndarray]]:
    """Each client's rows, where those of the linear terms have mean zero over all clients."""
    whole = {name: np.asarray(value, float) for name, value in rows.items()}
    whole |= {name: whole[name] - whole[name].mean(axis=0) for name in ("b", "c", "d") if name in whole}
    return [{name: np.split(value, clients)[i] for name, value in whole.items()} for i in range(clients)]


def near_task(seed: int, clients: int, start: float, noise: float, scope: Scope = "global") -> Task:
    """The same problem for every seed of the run; the start of every other seed is on the other side of the optimum.

    The cross term between the start's part of ∇Φ and the drift's part is then zero in the mean over the seeds. With
    that term, n ε^{3/2} goes to its limit like ε^{1/2}, not like ε.
    """
    task = _near(clients, start, noise, scope)
    x, y = task.init
    return dataclasses.replace(task, init=((-1) ** seed * x, y))


def steps(name: str, clients: int, epsilon: float) -> tuple[float, ...]:
    """The grid of steps (FedBiOAcc: of α_1): powers of 2^{1/4} around the best step seen for ε (FedNest: for all ε)."""
    middle, places = 0.02, range(-13, 10)
    if name == "FedBiO":
        middle, places = 0.01 * math.sqrt(epsilon / 0.08), range(-2, 3)
    elif name in ACCELERATED:
        middle, places = 0.125 * clients / FEDERATIONS[0], range(-2, 3)
    return tuple(float(f"{middle * 2 ** (k / 4):.3g}") for k in places)


def acc_local(clients: int) -> int:
    """I of FedBiOAcc, ∝ M^{-2/3}."""
    return round(ACC_LOCAL * (clients / FEDERATIONS[0]) ** (-2 / 3))


def method(name: str, clients: int, epsilon: float, step: float) -> tuple[Algorithm, int]:
    """A method at a step, all else as in the theory; and its rounds, enough for the best step to reach ε (FedNest: all
    ε, on which its batches do not depend)."""
    if name == "FedBiO":  # b ∝ 1/(Mε), I fixed
        algorithm = FedBiO(**_three(step), local_steps=LOCAL, batch_size=round(0.96 / (clients * epsilon)))
        return algorithm, round(110 * (epsilon / 0.08) ** -1.5)
    if name in ACCELERATED:  # b ∝ ε^{-1/2}, I ∝ M^{-2/3}, b_1 = I^{3/2}b, c ∝ 1/(bM), u₀ ∝ (bM)²I^{9/2}; δ: by α_1
        local = acc_local(clients)
        batch = round(epsilon**-0.5)
        offset, forget = 64 * batch**2 / clients, 80 / (batch * clients)
        common: dict[str, Any] = {
            "upper_step": 0.1, "lower_step": 0.1, "local_steps": local, "batch_size": batch, "c_upper": forget,
            "first_batch": round(local**1.5 * batch), "delta": step * offset ** (1 / 3), "offset": offset,
            "c_lower": forget,
        }  # fmt: skip
        accelerated: Algorithm = FedBiOAcc(**common, linear_step=0.1, c_linear=forget)
        if name == "FedBiOAccLocal":  # b_y = bM
            accelerated = FedBiOAccLocal(**common, lower_batch=batch * clients, neumann_terms=8, hessian_step=1 / 3)
        return accelerated, round(5 / epsilon * (clients / FEDERATIONS[0]) ** (-1 / 3))
    inner: dict[str, Any] = {"lower_step": 0.1, "lower_local_steps": 4, "neumann_terms": 20, "hessian_step": 0.2}
    rounds = round(min(1.4 / step**2, 14_000 if step > 0.004 else 56_000))
    return FedNest(upper_step=step, **inner, batch_size=1), rounds


def rated(quick: bool, name: str, clients: int, epsilon: float, step: float) -> Config:
    """A run at one step of the grid, for one ε (0: for all); the seeds are the same for all ε."""
    algorithm, rounds = method(name, clients, epsilon, step)
    start, noise = NEAR[name]
    scope = {"scope": "client"} if name == "FedBiOAccLocal" else {}
    return Config(
        name=f"{name}, M = {clients}, ε = {epsilon:g}, step {step:g}" if epsilon else f"{name}, step {step:g}",
        labels={"study": "rate", "method": name, "clients": clients, "epsilon": epsilon, "step": step},
        task=near_task,
        settings={"clients": clients, "start": start, "noise": noise, **scope},
        algorithm=algorithm,
        rounds=min(rounds, 40) if quick else rounds,
        every=1 if quick or name in ACCELERATED else min(9, max(1, round(rounds / 1500))),
        seeds=(0,) if quick else tuple(range(SEEDS[name])),
        float64=True,
    )


def fixed(quick: bool, study: str, algorithm: Algorithm, clients: int, step: float, scope: Scope = "global") -> Config:
    """A run of fixed length at a fixed step, for its floor."""
    words = {"noise": "all samples noisy", "upper": "upper samples noisy", "lower": "lower samples noisy"}
    return Config(
        name=f"{type(algorithm).__name__}, {words.get(study, study)}, M = {clients}, step {step:g}",
        labels={"study": study, "method": type(algorithm).__name__, "clients": clients, "epsilon": 0.0, "step": step},
        task=rates_task,
        settings={"clients": clients, "scope": scope},
        algorithm=algorithm,
        rounds=40 if quick else 4000,
        every=10,
        seeds=(0,) if quick else (0, 1, 2),
        float64=True,
    )


def _three(step: float) -> dict[str, Any]:
    return {"upper_step": step, "lower_step": step, "linear_step": step}


def runs(quick: bool) -> list[Config]:
    """Rates over ε; the floor with noise over M; that with exact oracles over the step; local lower levels."""
    sizes, drifts = (SIZES[:2], DRIFTS[:2]) if quick else (SIZES, DRIFTS)
    rates = [
        rated(quick, name, clients, epsilon, step)
        for name, epsilons in EPSILONS.items()
        for clients in FEDERATIONS[: 2 if name in ACCELERATED else 1]
        for epsilon in ((0.0,) if name == "FedNest" else epsilons[:2] if quick else epsilons)
        for step in steps(name, clients, epsilon)[: 3 if quick else None]
    ]
    noise = [fixed(quick, "noise", FedBiO(**_three(0.02), batch_size=1), clients, 0.02) for clients in sizes]
    drift = [
        fixed(quick, f"exact, I = {local}", FedBiO(**_three(step), local_steps=local), 4, step)
        for local in (1, LOCAL)
        for step in drifts
    ]
    own: dict[str, Any] = {"upper_step": 0.02, "lower_step": 0.02, "neumann_terms": 20, "hessian_step": 0.1}
    sides = [
        fixed(quick, side, FedBiOLocal(**own, **{f"{side}_batch": 1}), clients, 0.02, "client")  # the other is exact
        for side in ("upper", "lower")
        for clients in sizes
    ]
    return rates + noise + drift + sides
