"""FedDRO's theory on a stochastic composition: linear speed-up in the clients, and communications to reach ε."""

import functools
import math
from typing import Any

import jax.numpy as jnp
import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from rookery import report, theory
from rookery.algorithms import DSFedDRO, FedDRO
from rookery.data.clients import Clients
from rookery.experiments.machinery import Claims, Config, Experiment, Finding, description
from rookery.experiments.machinery.curves import area, curves, late, select
from rookery.experiments.machinery.numbers import Figures, fitted_power, mean
from rookery.problems.problems import Compositional
from rookery.tasks.task import Task

CLIENTS = (1, 4, 16)  # K
LENGTHS = (1024, 4096, 16384, 65536)  # T, local steps in all
SAMPLES, NOISE, HETEROGENEITY, DIMENSION, VALUES = 64, 1.0, 0.5, 5, 3
CONSTANTS = theory.CompositionalConstants(l_f0=math.sqrt(VALUES), l_f1=1.0, l_r0=1.0)
COMPLEXITY = {"FedDRO": -1.5, "DS-FedDRO": -1.0}  # powers of ε in the communications
COUNTED, COUNTED_LENGTHS = 4, tuple(2**n for n in range(10, 17))  # K and T of the runs about communications
MORE_LOCAL = 4  # the factor of FedDRO's I there: at K = 4, T^{1/4}/K^{3/4} is only 2 to 6
PROBLEM = Compositional(
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
        problem=PROBLEM,
        clients=Clients(upper=data, replace=True),
        init=(start, None),
        evaluate=lambda x, y: {"relative": jnp.sum(gradient(x) ** 2) / first},
        metric="relative",
    )


def rated(quick: bool, method: str, clients: int, length: int, study: str) -> Config:
    """A run of T local steps with the theorem's hyperparameters."""
    others: dict[str, Any] = {"batch_size": 1, "first_batch": 1}
    algorithm: FedDRO | DSFedDRO
    if method == "FedDRO":
        if study == "communications":
            others["local_steps"] = round(MORE_LOCAL * length**0.25 / clients**0.75)
        algorithm = theory.feddro(CONSTANTS, length, clients, c=1.0, **others)
    else:
        algorithm = theory.ds_feddro(length, clients, c=0.5, c_beta=4.0, c_gamma=0.5, **others)
    rounds = max(1, length // algorithm.local_steps)
    return Config(
        name=f"{method}, K = {clients}, T = {length}" + ", communications" * (study == "communications"),
        labels={"study": study, "method": method, "clients": clients, "length": length, "local": algorithm.local_steps},
        task=rates_task,
        settings={"clients": clients},
        algorithm=algorithm,
        rounds=rounds,
        every=max(1, rounds // 500),
        seeds=(0,) if quick else (0, 1, 2, 3, 4),
        float64=True,
    )


def rates_runs(quick: bool) -> list[Config]:
    """Two methods: three K and four T, and one K with more T."""
    lengths, federations, counted = ((256,), (1, 4), (256, 1024)) if quick else (LENGTHS, CLIENTS, COUNTED_LENGTHS)
    pairs = [(clients, length, "speed-up") for clients in federations for length in lengths]
    pairs += [(COUNTED, length, "communications") for length in counted]
    return [rated(quick, method, *pair) for method in COMPLEXITY for pair in pairs]


def thinned(results: pd.DataFrame) -> pd.DataFrame:
    """Of every run the first ten evaluations, then every 20th."""
    number = results.groupby(["run", "seed"]).cumcount()
    kept = ["run", "study", "method", "clients", "length", "local", "seed", "round", "relative"]
    return results.loc[(number < 10) | (number % 20 == 0), kept]


def _errors(own: pd.DataFrame, floor: bool = False) -> tuple[np.ndarray, np.ndarray]:
    """K, T and I of each run; and the mean of ‖∇Φ‖² over it, as in the theorems, or over its second half, the floor."""
    settings, errors = [], []
    for setting, run in own.groupby(["clients", "length", "local"]):
        settings.append(setting)
        errors.append(mean(late(run, "relative") if floor else [area(curve) for curve in curves(run, "relative")]))
    return np.array(settings).T, np.array(errors)


def rates_picture(results: pd.DataFrame) -> Figure:
    """The mean of ‖∇Φ‖² against K·T, where a linear speed-up is one line; and communications against ε."""
    fig, axes = report.figure(1, 3, width=14.5, height=4.4)
    for ax, method in zip(axes[0], COMPLEXITY, strict=False):
        (clients, lengths, _), errors = _errors(select(results, study="speed-up", method=method))
        for k, colour in zip(CLIENTS, (report.ORANGE, report.BLUE, report.GREEN), strict=True):
            own = clients == k
            ax.loglog(k * lengths[own], errors[own], "o-", color=colour, label=f"K = {k}")
        report.label(ax, "samples in all, K·T", r"mean $\|\nabla\Phi\|^2$, relative", method)
        report.legend(ax)
    right = axes[0, 2]
    for method, bound in COMPLEXITY.items():
        errors, counts, _ = _communications(results, method)
        right.loglog(errors, counts, **report.style(method), label=method)
        guide = counts[0] * (errors / errors[0]) ** bound
        right.loglog(errors, guide, ":", color=report.GREY, label=f"$\\epsilon^{{{bound:g}}}$")
    right.invert_xaxis()
    report.label(right, r"$\epsilon$, relative to the start", "synchronisations of x", f"Communications, K = {COUNTED}")
    report.legend(right)
    return fig


def _speed_up(results: pd.DataFrame, method: str) -> Finding:
    """The error and the floor fall at least like K^{−.4} and T^{−.4}: like C/√(KT), up to a tenth in the exponents."""
    figures: Figures = {}
    for floor in (False, True):
        (clients, lengths, _), errors = _errors(select(results, study="speed-up", method=method), floor)
        design = np.column_stack([np.log(clients), np.log(lengths), np.ones(len(errors))])
        powers = np.linalg.lstsq(design, np.log(errors), rcond=None)[0][:2]
        figures["powers of K and of T" + ", floor" * floor] = powers
    return Finding(bool(np.max([*figures.values()]) <= -0.4), figures)


claim = Claims("theory")
text = "FedDRO: the error falls like 1/√(KT), a linear speed-up (powers at most −.4)."
claim(text, "Thm 4.3", method="FedDRO")(_speed_up)
claim("DS-FedDRO: likewise.", "Thm 5.2", method="DS-FedDRO")(_speed_up)


def _communications(results: pd.DataFrame, method: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Of runs of several T: the error, how often x was synchronised, and the floor."""
    own = select(results, study="communications", method=method)
    (_, lengths, local), errors = _errors(own)
    return errors, lengths // local, _errors(own, floor=True)[1]


def _complexity(results: pd.DataFrame, method: str) -> Finding:
    """The power of ε in the synchronisations of x is no steeper than the bound within its 95 % interval, which reaches
    at most .1 beyond the bound."""
    bound = COMPLEXITY[method]
    errors, counts, floors = _communications(results, method)
    slope, half = fitted_power(errors, counts)
    holds = False if slope + half < bound else True if slope - half >= bound - 0.1 else None
    figures = {"power of ε, and half its 95 % interval": [slope, half], "ε": errors, "synchronisations of x": counts}
    low, high = min(floors / errors), max(floors / errors)
    note = f"Floors are {low:.0%} to {high:.0%} of ε: the way from the start is most of the count."
    return Finding(holds, figures, note)


for _method, _power, _where in (("FedDRO", "−3/2", "Cor. 4.4"), ("DS-FedDRO", "−1", "Cor. 5.3")):
    text = f"{_method}: synchronisations of x grow no faster than ε^{{{_power}}}."
    claim(text, _where, method=_method)(_complexity)


rates = Experiment(
    **description("feddro-rates", globals()),
    runs=rates_runs,
    picture=rates_picture,
    claims=tuple(claim),
    thinned=thinned,
)
