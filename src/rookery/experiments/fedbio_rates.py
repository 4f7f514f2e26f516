"""The communication complexity of the FedBiO paper's theory, on stochastic quadratics with known hypergradient."""

import dataclasses
import functools
import math
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from rookery import report
from rookery.algorithms import FedBiO, FedBiOAcc, FedBiOLocal, FedNest
from rookery.clients import Clients
from rookery.experiments.claims import Claim, Finding, differs, together
from rookery.experiments.curves import Figures, curves, mean, select, ticks
from rookery.experiments.experiment import Config, Experiment
from rookery.fed import Algorithm
from rookery.problems import Scope
from rookery.tasks import quadratic
from rookery.tasks.quadratic import solution
from rookery.tasks.task import Task

PAPER = (
    "Li, Huang and Huang, Communication-Efficient Federated Bilevel Optimization with Global and Local Lower Level "
    "Problems"
)
SAMPLES, NOISE, HETEROGENEITY = 64, 1.0, 0.5
FEDERATIONS = (4, 16)  # M
EPSILONS = (0.1, 0.04, 0.015, 0.005)  # of the mean ‖∇Φ‖², relative to the start's; at larger ones a run has few rounds
BOUNDS = {"FedBiO": -1.5, "FedBiOAcc": -1.0, "FedNest": -2.0}  # the theory's slopes of communications against ε
START = 0.03  # distance of the start of the runs about rates: small, so that noise and drift give floors above ε


def _grid(largest: float, count: int) -> tuple[float, ...]:
    """Each 1/√2 of the one before, to three digits."""
    return tuple(float(f"{largest * 2 ** (-k / 2):.3g}") for k in range(count))


STEPS = {"FedBiO": _grid(0.16, 11), "FedBiOAcc": _grid(5.66, 7), "FedNest": _grid(0.32, 14)}  # of FedBiOAcc: δ
LOCAL = 4  # I of FedBiO
SIZES = (4, 16, 64)  # M of the runs about the noise
DRIFTS = (0.04, 0.02, 0.01, 0.005)  # steps of the runs about the drift
NOISY = {"upper": {"upper_batch": 1}, "lower": {"lower_batch": 1}}  # the other level is exact
COSTS = ("exchanges", "samples")
STUDENT = (12.71, 4.30, 3.18)  # 97.5 % quantiles of t with 1, 2 and 3 degrees of freedom


@functools.cache
def _problem(clients: int, scope: Scope) -> Task:
    """With ‖∇Φ‖² relative to the start's as a metric."""
    task = quadratic(
        clients, samples=SAMPLES, noise=NOISE, heterogeneity=HETEROGENEITY, seed=7, replace=True, scope=scope
    )
    start = task.evaluate(*task.init)["gradient"]
    return dataclasses.replace(task, evaluate=lambda x, y: {"relative": task.evaluate(x, y)["gradient"] / start})


def rates_task(seed: int, clients: int, scope: Scope = "global") -> Task:
    """The same problem for every seed, which is the run's alone."""
    return _problem(clients, scope)


@functools.cache
def _near(clients: int) -> Task:
    """Clients that differ more, with less noise; their linear terms have mean zero, so that x*, y* and u* are 0."""
    task = quadratic(clients, samples=SAMPLES, noise=0.1, heterogeneity=1.0, seed=7, replace=True)
    lower, upper = (_centred(source.rows, clients) for source in (task.clients.lower, task.clients.upper))
    near = Clients(lower, upper, replace=True)
    x, y = task.init
    task = dataclasses.replace(task, clients=near, init=(START * np.ones_like(x), np.zeros_like(y)))
    gradient = solution(task).hypergradient
    measure = lambda x: float(np.sum(gradient(np.asarray(x, float)) ** 2))
    start = measure(task.init[0])
    return dataclasses.replace(task, evaluate=lambda x, y: {"relative": measure(x) / start})


def _centred(rows: Any, clients: int) -> list[dict[str, np.ndarray]]:
    """Each client's rows, where those of the linear terms have mean zero over all clients."""
    whole = {name: np.asarray(value, float) for name, value in rows.items()}
    whole |= {name: whole[name] - whole[name].mean(axis=0) for name in ("b", "c", "d") if name in whole}
    return [{name: np.split(value, clients)[i] for name, value in whole.items()} for i in range(clients)]


def near_task(seed: int, clients: int) -> Task:
    """The same problem for every seed, which is the run's alone."""
    return _near(clients)


def method(name: str, clients: int, epsilon: float, step: float) -> tuple[Algorithm, int]:
    """A method at a step, with batches and I that follow ε and M as in the theory; and its rounds.

    These are enough for the best step to reach ε; runs at larger ones, which do not, end when most of the mean is the
    floor's. FedNest's batches do not follow ε: a run serves all of them.
    """
    if name == "FedBiO":  # b ∝ 1/(Mε), I fixed
        batch = math.ceil(1.2 / (clients * epsilon) - 1e-9)
        rounds = min(4 + 5 * (0.3 / epsilon) ** 1.5, 10 + 0.02 / step**3)
        return FedBiO(**_three(step), local_steps=LOCAL, batch_size=batch), round(rounds)
    if name == "FedBiOAcc":  # b ∝ ε^{-1/2}, I ∝ M^{-2/3}, α_t = δ/(u₀ + t)^{1/3}
        local = max(1, round(LOCAL * (clients / FEDERATIONS[0]) ** (-2 / 3)))
        batch = math.ceil(epsilon**-0.5)
        rounds = 4 + 16 / local * (0.3 / epsilon) ** 1.15
        own: dict[str, Any] = {"local_steps": local, "batch_size": batch, "first_batch": 8 * batch}
        return FedBiOAcc(**_three(0.1), **own, delta=step, offset=8.0), round(rounds)
    nest = FedNest(
        upper_step=step, lower_step=0.1, lower_local_steps=LOCAL, neumann_terms=20, hessian_step=0.2, batch_size=1
    )
    return nest, round(min(1.4 / step**2, 14000))


def rated(quick: bool, name: str, clients: int, epsilon: float, step: float) -> Config:
    """A run at one step of the grid, for one ε (0: for all)."""
    algorithm, rounds = method(name, clients, epsilon, step)
    return Config(
        name=f"{name}, M = {clients}, ε = {epsilon:g}, step {step:g}" if epsilon else f"{name}, step {step:g}",
        labels={"study": "rate", "method": name, "clients": clients, "epsilon": epsilon, "step": step},
        task=near_task,
        settings={"clients": clients},
        algorithm=algorithm,
        rounds=min(rounds, 40) if quick else rounds,
        every=1 if quick else max(1, round(rounds / 1500)),
        seeds=(0,) if quick else (0, 1, 2),
        float64=True,
    )


def fixed(quick: bool, study: str, algorithm: Algorithm, clients: int, step: float, scope: Scope = "global") -> Config:
    """A run of a given length at a given step, whose floor is looked at."""
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
    epsilons = EPSILONS[:2] if quick else EPSILONS
    federations = FEDERATIONS[:1] if quick else FEDERATIONS
    sizes, drifts = (SIZES[:2], DRIFTS[:2]) if quick else (SIZES, DRIFTS)
    rates = [
        rated(quick, name, clients, epsilon, step)
        for name, steps in STEPS.items()
        for clients in (federations if name == "FedBiOAcc" else federations[:1])
        for epsilon in ((0.0,) if name == "FedNest" else epsilons if clients == FEDERATIONS[0] else epsilons[:3])
        for step in (steps[:3] if quick else steps)
    ]
    noise = [fixed(quick, "noise", FedBiO(**_three(0.02), batch_size=1), clients, 0.02) for clients in sizes]
    drift = [
        fixed(quick, f"exact, I = {local}", FedBiO(**_three(step), local_steps=local), 4, step)
        for local in (1, LOCAL)
        for step in drifts
    ]
    own: dict[str, Any] = {"upper_step": 0.02, "lower_step": 0.02, "neumann_terms": 20, "hessian_step": 0.1}
    sides = [
        fixed(quick, side, FedBiOLocal(**own, **batch), clients, 0.02, "client")
        for side, batch in NOISY.items()
        for clients in sizes
    ]
    return rates + noise + drift + sides


def with_means(results: pd.DataFrame) -> pd.DataFrame:
    """With `so_far`, the mean of ‖∇Φ‖² over the rounds so far, of the runs about rates; and `samples` of a client.

    A file of thinned results holds `so_far`, which cannot be had from it.
    """
    own = select(results, study="rate")
    own = own.assign(samples=(own["samples_upper"] + own["samples_lower"]) / own["clients"])
    if "so_far" in own:
        return own
    runs = own.groupby(["run", "seed"], sort=False)
    length = runs["round"].diff()
    pieces = length * (own["relative"] + runs["relative"].shift()) / 2  # the trapezoidal rule
    return own.assign(so_far=pieces.groupby([own["run"], own["seed"]]).cumsum() / own["round"])


class Least(NamedTuple):
    """What ε costs at the step of the grid that needs the fewest communications."""

    exchanges: float
    samples: float
    step: float
    floor: float  # the mean of ‖∇Φ‖² over the second half of that run
    inside: bool  # the step is not at the edge of the grid


def _table(results: pd.DataFrame, **labels: Any) -> pd.DataFrame:
    """The mean so far and the costs by round, averaged over the seeds."""
    own = select(results, **labels)[["round", "so_far", *COSTS]].replace(np.nan, np.inf)
    return own[own["round"] > 0].groupby("round").mean()


def _reached(results: pd.DataFrame, epsilon: float, **labels: Any) -> tuple[float, float]:
    """Communications, and samples of a client, until the mean of ‖∇Φ‖² so far, averaged over the seeds, is ε."""
    table = _table(results, **labels)
    below = np.flatnonzero(table["so_far"] <= epsilon)
    if not len(below):
        return np.inf, np.inf
    near = table.iloc[max(below[0] - 1, 0) : below[0] + 1].iloc[::-1]
    at = [np.exp(np.interp(math.log(epsilon), np.log(near["so_far"]), np.log(near[cost]))) for cost in COSTS]
    return float(at[0]), float(at[1])


def _least(results: pd.DataFrame, name: str, clients: int, epsilon: float) -> Least:
    own = select(results, method=name, clients=clients, epsilon=0.0 if name == "FedNest" else epsilon)
    steps = sorted(own["step"].unique())
    costs = [_reached(own, epsilon, step=step) for step in steps]
    best = int(np.argmin([cost[0] for cost in costs]))
    means = _table(own, step=steps[best])["so_far"]
    half = np.interp(means.index[-1] / 2, means.index, means)
    return Least(*costs[best], steps[best], 2 * means.iloc[-1] - half, 0 < best < len(steps) - 1)


class Costs(NamedTuple):
    """Of one method and M, where the best step is inside its grid and ε is reached: by ε, from the largest."""

    epsilons: list[float]
    each: list[Least]

    @property
    def shares(self) -> list[float]:
        """The floors over ε."""
        return [one.floor / epsilon for epsilon, one in zip(self.epsilons, self.each, strict=True)]

    def slope(self, cost: str) -> tuple[float, float]:
        """Of log cost against log ε, and half its 95 % interval."""
        if len(self.epsilons) < 3:
            return np.nan, np.inf
        x, y = np.log(self.epsilons), np.log([getattr(one, cost) for one in self.each])
        fit = np.polyfit(x, y, 1)
        left = y - np.polyval(fit, x)
        error = math.sqrt(np.sum(left**2) / (len(x) - 2) / np.sum((x - x.mean()) ** 2))
        return float(fit[0]), STUDENT[len(x) - 3] * error


def _costs(results: pd.DataFrame, name: str) -> dict[int, Costs]:
    """By M."""
    own = select(with_means(results), method=name)
    found = {}
    for clients in sorted(own["clients"].unique()):
        there = set(select(own, clients=clients)["epsilon"])
        run = [epsilon for epsilon in EPSILONS if name == "FedNest" or epsilon in there]
        each = {epsilon: _least(own, name, clients, epsilon) for epsilon in run}
        good = {epsilon: one for epsilon, one in each.items() if one.inside and np.isfinite(one.exchanges)}
        found[int(clients)] = Costs([*good], [*good.values()])
    return found


def _floor(results: pd.DataFrame, **labels: Any) -> float:
    """The mean of ‖∇Φ‖² over the second half of the rounds and the seeds."""
    own = curves(results, "relative", **labels)
    return mean([float(curve[curve.index > curve.index[-1] / 2].mean()) for curve in own])


def _floors(results: pd.DataFrame, study: str, over: str) -> tuple[list[float], list[float]]:
    values = sorted(select(results, study=study)[over].unique())
    return values, [_floor(results, study=study, **{over: value}) for value in values]


def picture(results: pd.DataFrame) -> Figure:
    """Communications against ε; the floors against M; the floors of exact oracles against the step."""
    fig, axes = report.figure(1, 3, width=14.5, height=4.4)
    left, middle, right = axes[0]
    for name, bound in BOUNDS.items():
        for clients, costs in _costs(results, name).items():
            epsilons, counts = np.array(costs.epsilons), [one.exchanges for one in costs.each]
            look = {**report.style(name), "linestyle": "-" if clients == FEDERATIONS[0] else "--"}
            left.loglog(epsilons, counts, **look, label=f"{name}, M = {clients}")
            if clients == FEDERATIONS[0] and counts:
                guide = counts[0] * (epsilons / epsilons[0]) ** bound
                left.loglog(epsilons, guide, color=look["color"], linestyle=":", linewidth=1.2)
    left.invert_xaxis()
    report.label(
        left, r"$\epsilon$, relative to the start", "communications", r"Until the mean $\|\nabla\Phi\|^2$ is ε"
    )
    report.legend(left)
    for study, words, colour in (
        ("noise", "FedBiO, all samples noisy", report.PURPLE),
        ("upper", "FedBiOLocal, upper samples noisy", report.GREEN),
        ("lower", "FedBiOLocal, lower samples noisy", report.ORANGE),
    ):
        middle.loglog(*_floors(results, study, "clients"), "o-", color=colour, label=words)
    ticks(middle, sorted(select(results, study="noise")["clients"].unique()))
    report.label(middle, "clients M", r"floor of $\|\nabla\Phi\|^2$", "Noise: more clients")
    report.legend(middle)
    for local, line in ((1, "--"), (LOCAL, "-")):
        steps, floors = _floors(results, f"exact, I = {local}", "step")
        right.loglog(steps, np.maximum(floors, 1e-32), f"o{line}", color=report.PURPLE, label=f"I = {local}")
    ticks(right, sorted(select(results, study=f"exact, I = {LOCAL}")["step"].unique()))
    report.label(right, "step", r"floor of $\|\nabla\Phi\|^2$", "Exact oracles: drift")
    report.legend(right)
    return fig


SAMPLE_BOUNDS = {"FedBiO": -2.5, "FedBiOAcc": -1.5, "FedNest": -2.0}  # of the samples of a client
NEAR = 0.1  # of ε: where all floors are below that, how ε is reached says nothing of noise and drift
DYING = (
    "Neither noise nor drift decides here: at the best step the floor is below a tenth of every ε. The count is that "
    "of the start's dying away, by which the mean so far falls like 1/t."
)
LEAST = (
    "The slopes are in that order and their intervals apart, but FedBiOAcc's is that of the start's dying away, −1: "
    "its floor is below a tenth of every ε."
)
FEW = "Fewer than three ε have their best step inside the grid."
WIDE = "The 95 % interval is too wide to tell."
TELLING = 0.1  # an interval that holds the bound and is wider than this to either side tells nothing


def _no_steeper(slope: float, error: float, bound: float) -> bool | None:
    """Within its error the slope is no steeper than the bound; None where the error is too large to say so."""
    if slope - error >= bound or slope + error < bound:
        return slope >= bound
    return True if error <= TELLING else None


def _rate(results: pd.DataFrame, name: str, cost: str, bound: float) -> Finding:
    """See `_no_steeper`: for every M."""
    figures: Figures = {}
    each: list[bool | None] = []
    notes: list[str] = []
    for clients, costs in _costs(results, name).items():
        slope, error = costs.slope(cost)
        holds = _no_steeper(slope, error, bound)
        notes += [] if holds is not None else [WIDE if np.isfinite(error) else FEW]
        if holds and max(costs.shares) < NEAR:
            holds, notes = None, [*notes, f"M = {clients}: {DYING}"]
        each.append(holds)
        at = f"at ε = {', '.join(f'{e:g}' for e in costs.epsilons)}, M = {clients}"
        figures[f"slope at M = {clients}, and half its 95 % interval"] = [slope, error]
        figures[f"{WORDS[cost]} {at}"] = [getattr(one, cost) for one in costs.each]
        if cost == "exchanges":
            figures[f"best {'δ' if name == 'FedBiOAcc' else 'step'} {at}"] = [one.step for one in costs.each]
            figures[f"its floor over ε, M = {clients}"] = costs.shares
    return Finding(together(each), figures, " ".join(dict.fromkeys(notes)))


WORDS = {"exchanges": "communications", "samples": "samples of a client"}


def fedbio_rate(results: pd.DataFrame) -> Finding:
    """See `_rate`."""
    return _rate(results, "FedBiO", "exchanges", BOUNDS["FedBiO"])


def fedbioacc_rate(results: pd.DataFrame) -> Finding:
    """See `_rate`."""
    return _rate(results, "FedBiOAcc", "exchanges", BOUNDS["FedBiOAcc"])


def fednest_rate(results: pd.DataFrame) -> Finding:
    """See `_rate`."""
    return _rate(results, "FedNest", "exchanges", BOUNDS["FedNest"])


def fedbio_samples(results: pd.DataFrame) -> Finding:
    """See `_rate`."""
    return _rate(results, "FedBiO", "samples", SAMPLE_BOUNDS["FedBiO"])


def fedbioacc_samples(results: pd.DataFrame) -> Finding:
    """See `_rate`."""
    return _rate(results, "FedBiOAcc", "samples", SAMPLE_BOUNDS["FedBiOAcc"])


def fednest_samples(results: pd.DataFrame) -> Finding:
    """See `_rate`."""
    return _rate(results, "FedNest", "samples", SAMPLE_BOUNDS["FedNest"])


def acc_is_cheapest(results: pd.DataFrame) -> Finding:
    """At the smallest M and over the ε that all have: FedBiOAcc's slope is flattest, FedNest's steepest, and the 95 %
    intervals are apart; undecided where a method's floor is far below every ε."""
    costs = {name: _costs(results, name)[FEDERATIONS[0]] for name in BOUNDS}
    shared = set.intersection(*(set(own.epsilons) for own in costs.values()))
    slopes = []
    for own in costs.values():
        pairs = [(e, one) for e, one in zip(own.epsilons, own.each, strict=True) if e in shared]
        slopes.append(Costs([e for e, _ in pairs], [one for _, one in pairs]).slope("exchanges"))
    fedbio, acc, nest = slopes
    figures: Figures = {
        f"slope at M = {FEDERATIONS[0]}, and half its 95 % interval, {name}": list(slope)
        for name, slope in zip(BOUNDS, slopes, strict=True)
    }
    each = [_flatter(acc, fedbio), _flatter(fedbio, nest)]
    if all(each) and any(max(own.shares) < NEAR for own in costs.values()):
        return Finding(None, figures, LEAST)
    return Finding(together(each), figures, "Two of the 95 % intervals overlap." if None in each else "")


def _flatter(a: tuple[float, float], b: tuple[float, float]) -> bool | None:
    """None where the intervals overlap."""
    return a[0] > b[0] if abs(a[0] - b[0]) > a[1] + b[1] else None


def _over_clients(results: pd.DataFrame, cost: str, bound: float) -> Finding:
    """FedBiOAcc's cost as a power of M, the mean over the ε that both M have: see `_no_steeper`, for no flatter."""
    found = _costs(results, "FedBiOAcc")
    if len(found) < 2:
        return Finding(None, {}, "There is one M only.")
    (few, one), (many, other) = found.items()
    at = {e: getattr(least, cost) for e, least in zip(one.epsilons, one.each, strict=True)}
    pairs = [(at[e], getattr(least, cost)) for e, least in zip(other.epsilons, other.each, strict=True) if e in at]
    powers = np.array([math.log(b / a) / math.log(many / few) for a, b in pairs])
    figures: Figures = {f"{WORDS[cost]}, as a power of M, by ε": powers.tolist()}
    if len(powers) < 2:
        return Finding(None, figures, FEW)
    error = 2 * float(powers.std(ddof=1)) / math.sqrt(len(powers))
    figures["their mean, and two standard errors"] = [mean(powers), error]
    if max(one.shares + other.shares) < NEAR:
        return Finding(None, figures, DYING)
    holds = _no_steeper(-mean(powers), error, -bound)
    return Finding(holds, figures, WIDE if holds is None else "")


def acc_communications_over_clients(results: pd.DataFrame) -> Finding:
    """See `_over_clients`."""
    return _over_clients(results, "exchanges", -1 / 3)


def acc_samples_over_clients(results: pd.DataFrame) -> Finding:
    """See `_over_clients`."""
    return _over_clients(results, "samples", -1.0)


def _falls(results: pd.DataFrame, study: str) -> Finding:
    """The floor falls from each M to the next, at least half as fast as 1/M in all."""
    sizes, floors = _floors(results, study, "clients")
    power = float(np.polyfit(np.log(sizes), np.log(floors), 1)[0])
    figures: Figures = {f"floor at M = {', '.join(map(str, sizes))}": floors, "as a power of M": power}
    return Finding(bool((np.diff(floors) < 0).all()) and power < -0.5, figures)


def error_falls(results: pd.DataFrame) -> Finding:
    """See `_falls`: FedBiO."""
    return _falls(results, "noise")


def upper_speeds_up(results: pd.DataFrame) -> Finding:
    """See `_falls`: FedBiOLocal, upper samples noisy."""
    return _falls(results, "upper")


def lower_does_not(results: pd.DataFrame) -> Finding:
    """FedBiOLocal, lower samples noisy: the floor does not fall with M."""
    fall = _falls(results, "lower")
    return Finding(not fall.holds, fall.figures)


def drift_remains(results: pd.DataFrame) -> Finding:
    """With exact oracles: I = 1 has no floor, with I = LOCAL the floor goes like the step to the power 2 (± .3)."""
    steps, floors = _floors(results, f"exact, I = {LOCAL}", "step")
    _, alone = _floors(results, "exact, I = 1", "step")
    power = float(np.polyfit(np.log(steps), np.log(floors), 1)[0])
    figures: Figures = {
        f"floor at steps {', '.join(f'{s:g}' for s in steps)}, I = {LOCAL}": floors,
        "as a power of the step": power,
        "the same, I = 1": alone,
    }
    return Finding(abs(power - 2) < 0.3 and max(alone) < 1e-3 * min(floors), figures)


rates = Experiment(
    name="fedbio-rates",
    title="communications to reach ε, on stochastic quadratics",
    paper=f"{PAPER}, Thm 1–4 and Table 1 (which has no such run).",
    setup=(
        f"Bilevel quadratics, M clients that differ, {SAMPLES} noisy samples each, drawn with replacement. *Rate*: "
        "communications until the mean of ‖∇Φ(x_t)‖² over the rounds so far, which the theorems bound, averaged over "
        "three seeds, is ε, relative to the start's; the fewest over a grid of steps (of FedBiOAcc: of δ in α_t = "
        "δ/(8 + t)^{1/3}), so that no theory gives the step. Batches and I do follow the theory, as its rates need "
        f"it: FedBiO b = 1.2/(Mε), I = {LOCAL}; FedBiOAcc b = ε^{{-1/2}}, 8b at first, I ∝ M^{{-2/3}} ({LOCAL} at M = "
        f"{FEDERATIONS[0]}; M = {FEDERATIONS[1]} at the three larger ε); FedNest b = 1. The clients' linear "
        f"terms have mean zero, so that x* = y* = u* = 0, and the start is {START:g} from it in every entry: so near "
        "that at the larger steps drift or noise keeps the mean above ε. An ε whose best step is at the edge of the "
        "grid is left out. The slopes are fitted over the ε that remain; the bounds are upper bounds, so a flatter "
        "slope agrees with them; one whose 95 % interval holds the bound does, too, if the interval is within ± "
        f"{TELLING:g}. *Noise*: "
        "the floor of FedBiO at a fixed step .02 and b = 1; and of FedBiOLocal with noisy samples at one level, the "
        "other exact. *Exact*: full gradients. A floor is the mean over the second half of 4000 "
        "rounds."
    ),
    runs=runs,
    picture=picture,
    claims=(
        Claim("FedBiO: communications grow no faster than ε^{-3/2}.", "Thm 1, Table 1", fedbio_rate, "theory"),
        Claim("FedBiOAcc: communications grow no faster than ε^{-1}.", "Thm 2, Table 1", fedbioacc_rate, "theory"),
        Claim("FedNest: communications grow no faster than ε^{-2}.", "Table 1", fednest_rate, "theory"),
        Claim(
            "As ε falls FedBiOAcc's communications grow least, FedNest's most.", "Table 1", acc_is_cheapest, "theory"
        ),
        Claim("FedBiO: samples of a client grow no faster than ε^{-5/2}.", "Thm 1, Table 1", fedbio_samples, "theory"),
        Claim(
            "FedBiOAcc: samples of a client grow no faster than ε^{-3/2}.",
            "Thm 2, Table 1",
            fedbioacc_samples,
            "theory",
        ),
        Claim("FedNest: samples of a client grow no faster than ε^{-2}.", "Table 1", fednest_samples, "theory"),
        Claim(
            "FedBiOAcc: communications fall with the clients like M^{-1/3}.",
            "Thm 2, Table 1",
            acc_communications_over_clients,
            "theory",
        ),
        Claim("FedBiOAcc: samples of a client fall like M^{-1}.", "Thm 2, Table 1", acc_samples_over_clients, "theory"),
        Claim("The error falls with the number of clients.", "Thm 1, linear speed-up", error_falls, "theory"),
        Claim(
            "Local lower levels: it falls with the clients for upper-level samples …",
            "Thm 3",
            upper_speeds_up,
            "theory",
        ),
        Claim(
            "… but not for lower-level ones.",
            "Thm 3",
            lower_does_not,
            "theory",
            differs(
                "set-up",
                "On quadratics it falls as well: y_i enters the hypergradient linearly here, so that the clients' "
                "independent errors in y_i average out. The theory bounds ‖y_i − y_i*‖², which does not shrink with M.",
            ),
        ),
        Claim(
            "Exact oracles do not help: with I > 1 the drift alone forces steps ∝ ε^{1/2}.",
            "Thm 1, remark",
            drift_remains,
            "theory",
        ),
    ),
    differences=("The paper's experiments are not in its text at hand; this set-up is ours.",),
)

EXPERIMENTS = (rates,)
