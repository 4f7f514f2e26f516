"""Theorems 4.3 and 5.2 of FedDRO: linear speed-up in the number of clients, on a stochastic composition."""

import functools
import math
from functools import partial
from typing import Any

import jax.numpy as jnp
import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from rookery import report, theory
from rookery.algorithms import DSFedDRO, FedDRO
from rookery.data.clients import Clients
from rookery.experiments.machinery.claims import Claims, Finding
from rookery.experiments.machinery.curves import area, curves, late, select, values
from rookery.experiments.machinery.experiment import Config, Experiment
from rookery.experiments.machinery.numbers import Figures, mean
from rookery.experiments.papers import FEDDRO_PAPER
from rookery.problems.problems import Compositional
from rookery.tasks.task import Task

CLIENTS = (1, 4, 16)  # K
LENGTHS = (1024, 4096, 16384, 65536)  # T, local steps in all
SAMPLES, NOISE, HETEROGENEITY, DIMENSION, VALUES = 64, 1.0, 0.5, 5, 3
CONSTANTS = theory.CompositionalConstants(l_f0=math.sqrt(VALUES), l_f1=1.0, l_r0=1.0)
RATED = ("FedDRO", "DS-FedDRO")


@functools.cache
def _stochastic() -> Any:
    return Compositional(
        inner=lambda x, rows: jnp.mean(jnp.einsum("nij,j->ni", rows["a"], x) + rows["s"], axis=0),
        outer=lambda v: jnp.sum(jnp.sqrt(1 + v**2)),
        extra=lambda x, rows: 0.05 * x @ x,
    )


def rates_task(seed: int, clients: int) -> Task:
    """The same problem for every seed of the run."""
    return _composite(clients)


@functools.cache
def _composite(clients: int) -> Task:
    """K clients that differ, whose mean is the same for every K, and noisy samples; the metric is ‖∇Φ‖², relative."""
    rng = np.random.default_rng(7)
    a = rng.normal(size=(VALUES, DIMENSION))
    a, s = a / np.linalg.norm(a, 2), np.ones(VALUES)

    def centred(*shape: int) -> np.ndarray:
        """Along the first axis; a single one is zero."""
        draw = rng.normal(size=shape)
        return draw - draw.mean(axis=0)

    rows = {}
    for name, value in (("a", a), ("s", s)):
        own = HETEROGENEITY * centred(clients, 1, *value.shape) / math.sqrt(value.size)
        noise = NOISE * np.stack([centred(SAMPLES, *value.shape) for _ in range(clients)]) / math.sqrt(value.size)
        rows[name] = value + own + noise

    def gradient(x: Any) -> Any:
        value = a @ x + s
        return a.T @ (value / jnp.sqrt(1 + value**2)) + 0.1 * x

    start = np.full(DIMENSION, 2.0)
    first = float(jnp.sum(gradient(start) ** 2))
    data = [{name: value[k] for name, value in rows.items()} for k in range(clients)]
    return Task(
        name="composite",
        problem=_stochastic(),
        clients=Clients(upper=data, replace=True),
        init=(start, None),
        evaluate=lambda x, y: {"relative": jnp.sum(gradient(x) ** 2) / first},
        metric="relative",
    )


def rated(quick: bool, method: str, clients: int, length: int) -> Config:
    """A run of T local steps with the theorem's hyperparameters."""
    batch: dict[str, Any] = {"batch_size": 1, "first_batch": 1}
    algorithm: FedDRO | DSFedDRO
    if method == "FedDRO":
        algorithm = theory.feddro(CONSTANTS, length, clients, c=1.0, **batch)
    else:
        algorithm = theory.ds_feddro(length, clients, c=0.5, c_beta=4.0, c_gamma=0.5, **batch)
    rounds = max(1, length // algorithm.local_steps)
    return Config(
        name=f"{method}, K = {clients}, T = {length}",
        labels={"method": method, "clients": clients, "length": length},
        task=rates_task,
        settings={"clients": clients},
        algorithm=algorithm,
        rounds=rounds,
        every=max(1, rounds // 500),
        seeds=(0,) if quick else (0, 1, 2, 3, 4),
        float64=True,
    )


def rates_runs(quick: bool) -> list[Config]:
    """Two methods, three K, four T."""
    lengths, federations = ((256,), (1, 4)) if quick else (LENGTHS, CLIENTS)
    return [rated(quick, m, clients, length) for m in RATED for clients in federations for length in lengths]


def _error(results: pd.DataFrame, method: str, clients: int, length: int) -> float:
    """The mean of ‖∇Φ‖² over the run, as the theorems bound it; over the seeds."""
    return mean([area(c) for c in curves(results, "relative", method=method, clients=clients, length=length)])


def _floor(results: pd.DataFrame, method: str, clients: int, length: int) -> float:
    """The mean of ‖∇Φ‖² over the second half of the run; over the seeds."""
    return mean(late(results, "relative", method=method, clients=clients, length=length))


def _powers(results: pd.DataFrame, method: str, error: Any) -> tuple[float, float, float]:
    """The powers of K and of T in the error, by least squares over all pairs; and that of K at the longest T."""
    pairs = select(results, method=method)[["clients", "length"]].drop_duplicates().to_numpy()
    errors = np.log([error(results, method, k, t) for k, t in pairs])
    design = np.column_stack([np.log(pairs), np.ones(len(pairs))])
    of_k, of_t, _ = np.linalg.lstsq(design, errors, rcond=None)[0]
    longest = pairs[:, 1] == pairs[:, 1].max()
    at_end = np.polyfit(np.log(pairs[longest, 0]), errors[longest], 1)[0] if longest.sum() > 1 else np.nan
    return float(of_k), float(of_t), float(at_end)


def rates_picture(results: pd.DataFrame) -> Figure:
    """The mean of ‖∇Φ‖² against T for each K, and against K·T, where a linear speed-up is one line."""
    fig, axes = report.figure(2, 2, width=11.5, height=8.2)
    for row, method in enumerate(RATED):
        own = select(results, method=method)
        for clients, colour in zip(CLIENTS, (report.ORANGE, report.BLUE, report.GREEN), strict=True):
            if clients not in set(own["clients"]):
                continue
            lengths = np.array(values(own, "length", clients=clients))
            errors = [_error(results, method, clients, length) for length in lengths]
            axes[row, 0].loglog(lengths, errors, "o-", color=colour, label=f"K = {clients}")
            axes[row, 1].loglog(clients * lengths, errors, "o-", color=colour, label=f"K = {clients}")
        report.label(axes[row, 0], "local steps T" if row else "", r"mean $\|\nabla\Phi\|^2$, relative", method)
        report.label(axes[row, 1], "samples in all, K·T" if row else "", "", f"{method}: one line, if linear")
        report.legend(axes[row, 0])
    return fig


claim = Claims()


def _speed_up(results: pd.DataFrame, method: str) -> Finding:
    """The error falls at least like K^{−.4} and T^{−.4}: this is the bound, C/√(KT), up to a tenth in the exponents.
    The error is the mean over the run, which the theorems bound, and also its floor, which is not the decay from the
    start."""
    figures: Figures = {}
    powers = []
    for error, words in ((_error, ""), (_floor, ", floor")):
        of_k, of_t, at_end = _powers(results, method, error)
        figures |= {f"power of K{words}": of_k, f"power of T{words}": of_t}
        figures[f"power of K at the longest T{words}"] = at_end
        powers += [of_k, of_t]
    return Finding(max(powers) <= -0.4, figures)


claim("FedDRO: the error falls like 1/√(KT), a linear speed-up.", "Thm 4.3", "theory")(
    partial(_speed_up, method="FedDRO")
)
claim("DS-FedDRO: likewise.", "Thm 5.2", "theory")(partial(_speed_up, method="DS-FedDRO"))


@claim("DS-FedDRO needs fewer exchanges than FedDRO to the same error.", "Thm 5.2, Table 1", "theory")
def fewer_exchanges(results: pd.DataFrame) -> Finding:
    """At the longest T and the most clients, DS-FedDRO needs fewer exchanges than FedDRO until the mean of ‖∇Φ‖² so far
    reaches the larger of the two final means (within a tenth)."""
    own = results[(results["length"] == results["length"].max()) & (results["clients"] == results["clients"].max())]
    level = max(mean([area(c) for c in curves(own, "relative", "exchanges", method=m)]) for m in RATED)
    counts = {}
    for method in RATED:
        each = []
        for curve in curves(own, "relative", "exchanges", method=method):
            so_far = [area(curve.iloc[: end + 1]) for end in range(1, len(curve))]
            below = curve.index[1:][np.array(so_far) <= 1.1 * level]
            each.append(float(below[0]) if len(below) else np.inf)
        counts[method] = mean(each)
    figures: Figures = {"the mean of ‖∇Φ‖² to be reached (within a tenth)": level}
    figures |= {f"exchanges to it, {m}": count for m, count in counts.items()}
    return Finding(counts["DS-FedDRO"] < counts["FedDRO"], figures)


rates = Experiment(
    name="feddro-rates",
    title="linear speed-up in the number of clients, on a stochastic composition",
    paper=f"{FEDDRO_PAPER}: Theorems 4.3 and 5.2 (which have no such run).",
    setup=(
        f"h = .05‖x‖², g = Ax + s with {VALUES} entries, f(v) = Σ√(1 + v²), x of {DIMENSION} entries. K clients whose "
        f"A_k and s_k differ and have the same mean for every K; {SAMPLES} noisy samples each, drawn one at a time "
        "with replacement. Hyperparameters as in the theorems (`rookery.theory`): FedDRO η = √(K/T), β = 4η, I = "
        "T^{1/4}/K^{3/4}; DS-FedDRO η = .5/√(IT), β = 4η, I = √(T/K), γ_x = √(KI), γ_y = γ_x/2. The error is the mean "
        "of ‖∇Φ‖² over a run, relative to the start's, over five seeds."
    ),
    runs=rates_runs,
    picture=rates_picture,
    claims=tuple(claim),
    differences=(
        "The paper has no such run; the set-up is ours.",
        "Theorem 5.2 prints γ_x = O(√(K/T)). With that a run's steps add up to K^{3/4}T^{−1/4} at most: a long run "
        "does not leave its start. γ_x = √(KI) is used instead, which makes γ_x·η the step of Theorem 4.3.",
    ),
)
