"""Fig. 4 of FedNest: a minimax quadratic, with all clients or a sample of them in each round."""

from dataclasses import dataclass
from typing import Any, ClassVar

import jax
import numpy as np
import pandas as pd
from jaxtyping import Array
from matplotlib.figure import Figure

from rookery import report
from rookery.algorithms import FedAvgSaddle, FedNest, LFedNest
from rookery.algorithms.fednest import State, fed_inn, fed_out, lfed_inn, lfed_out
from rookery.engines.simulation import Simulation
from rookery.experiments.machinery import Claims, Config, Experiment, Finding, Headline, description
from rookery.experiments.machinery.claims import Lead, lead, together
from rookery.experiments.machinery.curves import curves, reached, select
from rookery.experiments.machinery.drawing import below
from rookery.experiments.machinery.numbers import listed
from rookery.language.fed import Fed
from rookery.problems.problems import Minimax
from rookery.tasks import minimax_quadratic

SPREADS = (1.0, 5.0, 10.0)  # s
ALL, KEPT, FRESH = "all clients", "one cohort a round", "fresh cohorts"
CONVERGED = 1e-12  # a squared distance to the saddle point that counts as reached
ROUNDING = 1e-22  # below it (the start is at 2000) double precision bends a straight line


@dataclass(frozen=True)
class FreshCohorts:
    """FedNest or LFedNest with another cohort for every inner round and for x, as in the authors' notebook."""

    method: FedNest | LFedNest

    solves: ClassVar[tuple[type, ...]] = (Minimax,)

    def init(self, fed: Fed, x: Any, y: Any, key: Array) -> State:
        return self.method.init(fed, x, y, key)

    def round(self, fed: Fed, state: State, key: Array) -> State:
        inner, outer = (fed_inn, fed_out) if isinstance(self.method, FedNest) else (lfed_inn, lfed_out)
        draws, works = jax.random.split(key)
        cohort = lambda t: fed.resample(jax.random.fold_in(draws, t))
        lower = lambda t, y: inner(self.method, cohort(t), state.x, y, None, jax.random.fold_in(works, t))
        rounds = self.method.lower_rounds
        y = fed.loop(rounds, lower, state.y)
        return State(*outer(self.method, cohort(rounds), state, y, None, jax.random.fold_in(works, rounds)))


def fig4_runs(quick: bool) -> list[Config]:
    """Three methods, three spreads; all clients, or a cohort, kept for the round or drawn anew for every step."""
    steps: dict[str, Any] = {"upper_step": 0.001, "lower_step": 0.001}
    nested: dict[str, Any] = {**steps, "lower_rounds": 10, "lower_local_steps": 50, "upper_local_steps": 500}
    full, light = FedNest(**nested), LFedNest(**nested)
    plain = {"FedNest": full, "LFedNest": light, "FedAvg-S": FedAvgSaddle(**steps, local_steps=500)}
    fresh = {"FedNest": FreshCohorts(full), "LFedNest": FreshCohorts(light)}
    methods: dict[str, dict[str, Any]] = {ALL: plain, KEPT: plain, FRESH: fresh}
    clients, cohort, rounds = (40, 10, 60) if quick else (1000, 50, 200)
    return [
        Config(
            name=f"{method}, s = {spread:g}, {sampling}",
            labels={"method": method, "s": spread, "sampling": sampling},
            task=minimax_quadratic,
            settings={"clients": clients, "spread": spread},
            algorithm=algorithm,
            rounds=rounds,
            cohort=None if sampling == ALL else cohort,
            every=4,
            seeds=(0,) if quick else tuple(range(3 if sampling == ALL else 10)),
            float64=True,
            engine=Simulation(block=1000),
        )
        for sampling, own in methods.items()
        for spread in SPREADS
        for method, algorithm in own.items()
    ]


# FedNest is drawn broad and pale, LFedNest dashed on top of it: they coincide.
LOOKS: dict[str, dict[str, Any]] = {
    "FedNest": {"linewidth": 4.5, "alpha": 0.45, "marker": ""},
    "LFedNest": {"linewidth": 1.6, "linestyle": (0, (3, 2)), "marker": ""},
    "FedAvg-S": {},
}


def _runs(results: pd.DataFrame, method: str, spread: float, sampling: str) -> pd.DataFrame:
    """FedAvg-S has one cohort a round when sampled."""
    own = KEPT if sampling == FRESH and method == "FedAvg-S" else sampling
    return select(results, method=method, s=spread, sampling=own)


def fig4_picture(results: pd.DataFrame) -> Figure:
    """‖x‖² and ‖y‖² against rounds: a column for all clients and s = 1, then two samplings at s = 1 and one at 10."""
    fig, axes = report.figure(2, 4, width=13.5, height=6.4)
    columns = [(ALL, 1), (FRESH, 1), (FRESH, 10), (KEPT, 1)]
    for column, (sampling, spread) in zip(axes.T, columns, strict=True):
        for ax, (metric, name) in zip(column, {"x_distance": "‖x‖²", "y_distance": "‖y‖²"}.items(), strict=True):
            for method, look in LOOKS.items():
                report.band(ax, _runs(results, method, spread, sampling), "round", metric, label=method, **look)
            ax.set_yscale("log")
            ax.set_ylim(1e-37 if sampling == ALL else 1e-8, 1e4)
            ax.minorticks_off()
            report.label(ax, "rounds", name, f"{sampling}, s = {spread}")
    below(fig, axes[0, 0], 3)
    return fig


# What the claims measure.

AT = f"at s = {listed(SPREADS)}"


def _curves(results: pd.DataFrame, method: str, spread: float, sampling: str) -> list[pd.Series]:
    """‖x‖² + ‖y‖² by round, for each seed."""
    return curves(_runs(results, method, spread, sampling), "distance")


def _floors(results: pd.DataFrame, method: str, sampling: str) -> np.ndarray:
    """The mean over the last quarter of the rounds: a row for each s, a column for each seed."""
    floor = lambda curve: float(curve[curve.index >= 0.75 * curve.index[-1]].mean())
    return np.array([[floor(curve) for curve in _curves(results, method, s, sampling)] for s in SPREADS])


def _rounds(results: pd.DataFrame, spread: float) -> list[float]:
    """With all clients, the first round in which FedNest's squared distance is at most CONVERGED, for each seed."""
    return [reached(-curve, -CONVERGED) for curve in _curves(results, "FedNest", spread, ALL)]


def _lower(results: pd.DataFrame, method: str, sampling: str) -> list[Lead]:
    """By how many powers of ten a method's floor is below FedAvg-S's, for each s."""
    floors = (np.log10(_floors(results, m, sampling)) for m in ("FedAvg-S", method))
    return [lead(theirs, own) for theirs, own in zip(*floors, strict=True)]


def _stalls(results: pd.DataFrame, method: str, *samplings: str) -> Finding:
    """The method stays above CONVERGED, at a level that rises with s, with every seed."""
    floors = {sampling: _floors(results, method, sampling) for sampling in samplings}
    holds = [own.min() > 10 * CONVERGED and bool((np.diff(own, axis=0) > 0).all()) for own in floors.values()]
    return Finding(all(holds), {f"floor {AT}, {sampling}": own.mean(axis=1) for sampling, own in floors.items()})


claim = Claims()


@claim("With all clients: FedNest converges linearly despite heterogeneity.", "Fig. 4, caption")
def fednest_is_linear(results: pd.DataFrame) -> Finding:
    """A straight line in log distance down to rounding, falling all the way, and past CONVERGED."""
    runs = [curve for s in SPREADS for curve in _curves(results, "FedNest", s, ALL)]
    above = [curve[: int(np.argmax(curve < ROUNDING)) or len(curve)] for curve in runs]
    fits = [float(np.corrcoef(own.index, np.log(own))[0, 1] ** 2) for own in above]
    rounds = [own for s in SPREADS for own in _rounds(results, s)]
    falls = all(bool((np.diff(own) < 0).all()) for own in above)
    figures = {f"rounds to {CONVERGED:g}, at most": max(rounds), "r² of the line, at least": min(fits)}
    return Finding(falls and min(fits) > 0.99 and max(rounds) < np.inf, figures)


@claim("With all clients, or fresh cohorts: LFedNest and FedNest outperform FedAvg-S.", "Sec. 4.3")
def alternating_is_better(results: pd.DataFrame) -> Finding:
    """Their floors are lower by more than the margin, at every s."""
    leads = {
        f"powers of ten below FedAvg-S {AT}, {sampling}, {m}": _lower(results, m, sampling)
        for sampling in (FRESH, ALL)
        for m in ("LFedNest", "FedNest")
    }
    figures = {name: [own.mean for own in three] for name, three in leads.items()}
    return Finding(together([own.holds for three in leads.values() for own in three]), figures)


@claim("With all clients, or sampled ones: FedAvg-S stalls, at a floor that grows with s.", "Fig. 4")
def fedavg_stalls(results: pd.DataFrame) -> Finding:
    return _stalls(results, "FedAvg-S", KEPT, ALL)


@claim(
    "With fresh cohorts: LFedNest slightly outperforms FedAvg-S (a floor lower by a factor of 3 to 30).",
    "Fig. 4, caption",
)
def lfednest_is_slightly_better(results: pd.DataFrame) -> Finding:
    below = _lower(results, "LFedNest", FRESH)
    near = [np.log10(3) <= own.mean <= np.log10(30) for own in below]
    figures = {f"FedAvg-S over LFedNest {AT} (printed: about 5 to 10)": [10**own.mean for own in below]}
    note = "LFedNest's y is a mean over ten cohorts, FedAvg-S's over one. With all clients LFedNest does not stall."
    return Finding(together([*near, *(own.holds for own in below)]), figures, note)


@claim("With fresh cohorts: LFedNest stalls, at a floor that grows with s.", "Fig. 4")
def lfednest_stalls(results: pd.DataFrame) -> Finding:
    return _stalls(results, "LFedNest", FRESH)


@claim("FedNest significantly improves the convergence of LFedNest.", "Sec. 4.3")
def fednest_beats_lfednest(results: pd.DataFrame) -> Finding:
    """With all clients or fresh cohorts, the two curves differ by more than a hundredth."""
    apart = []
    for sampling in (ALL, FRESH):
        runs = ([c for s in SPREADS for c in _curves(results, m, s, sampling)] for m in ("FedNest", "LFedNest"))
        apart.append(max(float((b / a - 1).abs()[a > ROUNDING].max()) for a, b in zip(*runs, strict=True)))
    return Finding(max(apart) > 0.01, {f"largest relative difference, {ALL} and {FRESH}": apart})


@claim("With sampled clients FedNest stalls, too: with fresh cohorts, and with one a round, then where FedAvg-S does.")
def fednest_sampled_stalls(results: pd.DataFrame) -> Finding:
    """With one cohort a round the floors of the three methods are within 10 % of each other."""
    found = _stalls(results, "FedNest", FRESH, KEPT)
    full, *others = (_floors(results, m, KEPT).mean(axis=1) for m in ("FedNest", "LFedNest", "FedAvg-S"))
    ratios = np.array([own / full for own in others])
    note = "The b_i cancel over all clients, not over a cohort; SVRG corrects the drift within a cohort only."
    figures = {**found.figures, f"LFedNest and FedAvg-S over FedNest, {KEPT}": ratios[:, 0]}
    return Finding(bool(found.holds) and bool((abs(ratios - 1) < 0.1).all()), figures, note)


fig4 = Experiment(
    **description("fednest-fig4", globals()),
    runs=fig4_runs,
    picture=fig4_picture,
    claims=tuple(claim),
    headlines=lambda results: [
        Headline("FedNest, s = 1, all clients, rounds to 1e-12", "≈ 170", _rounds(results, 1)),
        Headline("LFedNest, s = 1, fresh cohorts, floor", "≈ .003", _floors(results, "LFedNest", FRESH)[0]),
        Headline("FedAvg-S, s = 1, fresh cohorts, floor", "≈ .015", _floors(results, "FedAvg-S", FRESH)[0]),
    ],
    thinned=lambda results: results[
        ["run", "method", "s", "sampling", "seed", "round", "distance", "x_distance", "y_distance"]
    ],
)
