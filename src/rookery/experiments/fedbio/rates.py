"""The communication complexity of FedBiO's theory, on stochastic quadratics with known hypergradient."""

import itertools
import math
from collections.abc import Container
from typing import NamedTuple

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from rookery import report
from rookery.experiments.fedbio import quadratics
from rookery.experiments.machinery import Claims, Experiment, Finding, description
from rookery.experiments.machinery.claims import all_lead, lead, margin, together
from rookery.experiments.machinery.curves import last, select, values
from rookery.experiments.machinery.drawing import name_lines, ticks
from rookery.experiments.machinery.numbers import Figures, fitted_power, listed, mean, means, power

SLOPES = {  # the theory's against ε
    "exchanges": {"FedBiO": -1.5, "FedBiOAcc": -1.0, "FedBiOAccLocal": -1.0, "FedNest": -2.0},
    "samples": {"FedBiO": -2.5, "FedBiOAcc": -1.5, "FedBiOAccLocal": -1.5, "FedNest": -2.0},  # of a client
}
POWERS = {"exchanges": -1 / 3, "samples": -1.0}  # the theory's of M, FedBiOAcc
WORDS = {"exchanges": "communications", "samples": "samples of a client"}


def measured(results: pd.DataFrame) -> pd.DataFrame:
    """Add `so_far`, the mean of ‖∇Φ‖² over the rounds so far; `floor`, the mean over the second half of the run, in its
    last row; and `samples` of a client."""
    keys = [results["run"], results["seed"]]
    runs = results.groupby(["run", "seed"], sort=False)
    end = runs["round"].transform("last")
    pieces = runs["round"].diff() * (results["relative"] + runs["relative"].shift()) / 2  # the trapezoidal rule
    late = results["relative"].where(results["round"] > end / 2).groupby(keys).transform("mean")
    return results.assign(
        samples=(results["samples_upper"] + results["samples_lower"]) / results["clients"],
        so_far=pieces.groupby(keys).cumsum() / results["round"],
        floor=late.where(results["round"] == end),
    )


def thinned(results: pd.DataFrame) -> pd.DataFrame:
    """Keep the last row of every run and, of runs about rates, the rows between which the mean so far, averaged over
    the seeds, reaches ε. The claims and the picture need no more."""
    whole = measured(results)
    kept = whole["round"] == whole.groupby("run")["round"].transform("max")
    for run, own in select(whole, study="rate").groupby("run", sort=False):
        name, epsilon, table = own["method"].iloc[0], own["epsilon"].iloc[0], _table(own)
        epsilons = [epsilon] if epsilon else quadratics.EPSILONS[name]
        rounds = [near for e in epsilons for near in _around(table, e).index]
        kept |= (whole["run"] == run) & whole["round"].isin(rounds)
    labels = ["run", "study", "method", "clients", "epsilon", "step", "seed", "round"]
    return whole.loc[kept, [*labels, *quadratics.COSTS, "so_far", "floor"]]


class Least(NamedTuple):
    """What ε costs at the step of the grid that needs the fewest communications."""

    exchanges: float
    samples: float
    floor: float
    inside: bool  # the step is not at the edge of the grid


def _table(own: pd.DataFrame) -> pd.DataFrame:
    """The mean so far and the costs of one run by round, averaged over the seeds."""
    own = own[["round", "so_far", *quadratics.COSTS]].replace(np.nan, np.inf)
    return own[own["round"] > 0].groupby("round").mean()


def _around(table: pd.DataFrame, epsilon: float) -> pd.DataFrame:
    """The first row whose mean so far is at most ε, and the one before; empty if there is no such row."""
    below = np.flatnonzero(table["so_far"] <= epsilon)
    return table.iloc[max(below[0] - 1, 0) : below[0] + 1] if len(below) else table.iloc[:0]


def _reached(table: pd.DataFrame, epsilon: float) -> list[float]:
    """Communications, and samples of a client, until the mean so far of one run is ε."""
    near = _around(table, epsilon).iloc[::-1]
    if not len(near):
        return [np.inf, np.inf]
    at = lambda cost: np.exp(np.interp(math.log(epsilon), np.log(near["so_far"]), np.log(near[cost])))
    return [float(at(cost)) for cost in quadratics.COSTS]


def _least(results: pd.DataFrame, epsilon: float) -> Least:
    """The least costs of ε over the steps of these runs."""
    runs = [own for _, own in results.groupby("step")]
    costs = [_reached(_table(own), epsilon) for own in runs]
    best = int(np.argmin([exchanges for exchanges, _ in costs]))
    exchanges, samples = costs[best]
    return Least(exchanges, samples, floor=float(runs[best]["floor"].mean()), inside=0 < best < len(runs) - 1)


class Costs(dict[float, Least]):
    """The costs of one method and M for each ε that is reached with a best step inside its grid, largest ε first."""

    def of(self, cost: str) -> np.ndarray:
        """A field of each."""
        return np.array([getattr(one, cost) for one in self.values()])

    @property
    def dies_away(self) -> bool:
        """Whether all floors are so far below ε that how ε is reached says nothing of noise and drift."""
        return all(one.floor < 0.1 * epsilon for epsilon, one in self.items())

    def slope(self, cost: str, over: np.ndarray | float = 1.0) -> tuple[float, float]:
        """The power of ε in a cost, or in the cost divided by `over`, and half its 95 % interval."""
        return fitted_power([*self], self.of(cost) / over)

    def among(self, epsilons: Container[float]) -> "Costs":
        """The costs of these ε only."""
        return Costs({epsilon: one for epsilon, one in self.items() if epsilon in epsilons})


def _costs(results: pd.DataFrame, name: str) -> dict[int, Costs]:
    """The costs by M."""
    there = select(results, study="rate", method=name)
    found = {int(clients): Costs() for clients in values(there, "clients")}
    for clients, epsilon in itertools.product(found, quadratics.EPSILONS[name]):
        own = there[(there["clients"] == clients) & there["epsilon"].isin((0.0, epsilon))]  # 0: it serves all ε
        least = _least(own, epsilon) if len(own) else None
        if least and least.inside and np.isfinite(least.exchanges):
            found[clients][epsilon] = least
    return found


def _floors(results: pd.DataFrame, study: str, over: str) -> dict[float, np.ndarray]:
    """The floor by M or by the step, for each seed."""
    return {place: last(results, "floor", study=study, **{over: place}) for place in values(results, over, study=study)}


def picture(results: pd.DataFrame) -> Figure:
    """Communications against ε, with the theory's slopes; the floors against M; those of exact oracles by the step."""
    fig, axes = report.figure(1, 3, width=17.0, height=4.6)
    left, middle, right = axes[0]
    few = quadratics.FEDERATIONS[0]
    for name, colour in zip(quadratics.EPSILONS, report.COLOURS, strict=False):
        for clients, costs in _costs(results, name).items():
            epsilons, counts = np.array([*costs]), costs.of("exchanges")
            look = {"color": colour, "marker": "o", "linestyle": "-" if clients == few else "--"}
            left.loglog(epsilons, counts, **look, label=f"{name}, M = {clients}")
            if clients == few and len(counts):
                guide = counts[0] * (epsilons / epsilons[0]) ** SLOPES["exchanges"][name]
                left.loglog(epsilons, guide, color=colour, linestyle=":", linewidth=1.2)
    left.invert_xaxis()
    ticks(left, sorted({epsilon for own in quadratics.EPSILONS.values() for epsilon in own}))
    report.label(left, r"$\epsilon$, relative to the start", "communications", "To ε (dotted: the theory's slope)")
    name_lines(left)
    for study, words, colour in (
        ("noise", "FedBiO", report.BLUE),
        ("upper", "FedBiOLocal, upper", report.GREEN),
        ("lower", "FedBiOLocal, lower", report.ORANGE),
    ):
        floors = _floors(results, study, "clients")
        middle.loglog([*floors], means(floors), "o-", color=colour, label=words)
    ticks(middle, values(results, "clients", study="noise"))
    report.label(middle, "clients M", r"floor of $\|\nabla\Phi\|^2$", "More clients, by the noisy level")
    name_lines(middle)
    for local, line in ((1, "--"), (quadratics.LOCAL, "-")):
        floors = _floors(results, f"exact, I = {local}", "step")
        right.loglog([*floors], np.maximum(means(floors), 1e-32), f"o{line}", color=report.BLUE, label=f"I = {local}")
    ticks(right, [*floors])
    report.label(right, "step", r"floor of $\|\nabla\Phi\|^2$", "Exact oracles: drift")
    name_lines(right)
    return fig


DYING = "The best step's floor is below a tenth of every ε: only the start's dying away is counted, not noise or drift."
FEW = "Fewer than three ε have their best step inside the grid."
WIDE = "The 95 % interval is too wide to tell."
MARGIN = 0.1  # an interval that holds the bound, and reaches further than this beyond it, tells nothing


def _no_steeper(slope: float, error: float, bound: float) -> bool | None:
    """Within its error the slope is no steeper than the bound; None where it may be steeper by more than MARGIN."""
    if slope + error < bound:
        return False
    return True if slope - error >= bound - MARGIN else None


def _logarithms(clients: int, costs: Costs) -> np.ndarray:
    """(ln T)^{3/2} of an accelerated method's local steps T: its proof bounds the mean by ln T/(bMT)^{2/3}."""
    return np.log(costs.of("exchanges") / 2 * quadratics.acc_local(clients)) ** 1.5


def rate(results: pd.DataFrame, name: str, cost: str) -> Finding:
    """A method's cost against ε, for every M: see `_no_steeper`; for accelerated methods without the logarithm."""
    accelerated = name in quadratics.ACCELERATED
    figures: Figures = {}
    judged: list[float] = []
    each: list[bool | None] = []
    notes: list[str] = []
    found = _costs(results, name)
    for clients, costs in found.items():
        slope, error = costs.slope(cost, _logarithms(clients, costs) if accelerated else 1.0)
        judged += [slope, error]
        holds = _no_steeper(slope, error, SLOPES[cost][name])
        if holds is None:
            notes.append(WIDE if np.isfinite(error) else FEW)
        if holds and costs.dies_away:
            holds = None
            notes.append(f"M = {clients}: {DYING}")
        each.append(holds)
        figures[f"plain slope, and half its 95 % interval, M = {clients}"] = costs.slope(cost)
        figures[f"{WORDS[cost]} at ε = {listed(costs)}, M = {clients}"] = costs.of(cost)
        figures[f"the best step's floor over ε, M = {clients}"] = costs.of("floor") / [*costs]
    log = " without the logarithm" if accelerated else ""
    sizes = listed(found)
    figures = {f"slope{log}, and half its 95 % interval, M = {sizes}": judged, **figures}
    return Finding(together(each), figures, " ".join(dict.fromkeys(notes)))


def acc_is_cheapest(results: pd.DataFrame) -> Finding:
    """At the smallest M and over the ε that all have: FedBiOAcc's slope is the flattest, FedNest's is the steepest, and
    the 95 % intervals do not overlap. Undecided where a method's floor is far below every ε."""
    names = ("FedBiOAcc", "FedBiO", "FedNest")
    costs = [_costs(results, name)[quadratics.FEDERATIONS[0]] for name in names]
    shared = set.intersection(*map(set, costs))
    slopes = [own.among(shared).slope("exchanges") for own in costs]
    figures = {f"slope, and half its 95 % interval, {', '.join(names)}": np.ravel(slopes)}
    each = [
        flat[0] > steep[0] if abs(flat[0] - steep[0]) > flat[1] + steep[1] else None
        for flat, steep in itertools.pairwise(slopes)
    ]
    if all(each) and any(own.dies_away for own in costs):
        return Finding(None, figures, DYING)
    return Finding(together(each), figures, "Two of the 95 % intervals overlap." if None in each else "")


def over_clients(results: pd.DataFrame, name: str, cost: str) -> Finding:
    """A cost as a power of M, the mean over the ε that both M have: see `_no_steeper`, for no flatter."""
    (few, one), (many, other) = _costs(results, name).items()
    powers = np.log(other.among(one).of(cost) / one.among(other).of(cost)) / math.log(many / few)
    if len(powers) < 2:
        return Finding(None, {"as a power of M, by ε": powers}, FEW)
    error = margin(len(powers)) * float(powers.std(ddof=1)) / math.sqrt(len(powers))
    figures: Figures = {"power of M, mean over ε, and the margin": [mean(powers), error], "by ε": powers}
    if one.dies_away and other.dies_away:
        return Finding(None, figures, DYING)
    holds = _no_steeper(-mean(powers), error, -POWERS[cost])
    return Finding(holds, figures, WIDE if holds is None else "")


def falls(results: pd.DataFrame, study: str) -> Finding:
    """The floor falls from each M to the next by more than the margin, at least half as fast as 1/M in all."""
    floors = _floors(results, study, "clients")
    exponent = power([*floors], means(floors))
    pairs = itertools.pairwise(floors.items())
    found = all_lead({f"M = {p} to {q}": lead(before, after) for (p, before), (q, after) in pairs}, "fall")
    figures = {"floor as a power of M": exponent, f"floor at M = {listed(floors)}": means(floors)}
    return Finding(together([found.holds, exponent < -0.5]), figures | dict(found.figures))


claim = Claims("theory")
EXPONENTS = {
    ("FedBiO", "Thm 1, Table 1"): ("-3/2", "-5/2"),
    ("FedBiOAcc", "Thm 2, Table 1"): ("-1", "-3/2"),
    ("FedBiOAccLocal", "Thm 4"): ("-1", "-3/2"),
    ("FedNest", "Table 1"): ("-2", "-2"),
}
for (name, where), exponents in EXPONENTS.items():
    log = ", up to a logarithm" if name in quadratics.ACCELERATED else ""
    for cost, exponent in zip(quadratics.COSTS, exponents, strict=True):
        text = f"{name}: {WORDS[cost]} grow no faster than ε^{{{exponent}}}{log}."
        claim(text, where, name=name, cost=cost)(rate)
claim("As ε falls FedBiOAcc's communications grow least, FedNest's most.", "Table 1")(acc_is_cheapest)
for name, where in (("FedBiOAcc", "Thm 2, Table 1"), ("FedBiOAccLocal", "Thm 4")):
    text = f"{name}: communications fall with the clients like M^{{-1/3}}."
    claim(text, where, name=name, cost="exchanges")(over_clients)
text = "FedBiOAcc: samples of a client fall like M^{-1}."
claim(text, "Thm 2, Table 1", name="FedBiOAcc", cost="samples")(over_clients)
text = "FedBiO: the error falls with the clients, at least like M^{-1/2}."
claim(text, "Thm 1, linear speed-up", study="noise")(falls)
claim("Local lower levels: it does so for upper-level samples …", "Thm 3", study="upper")(falls)


@claim("… but not for lower-level ones.", "Thm 3")
def lower_does_not(results: pd.DataFrame) -> Finding:
    fall = falls(results, "lower")
    return Finding(None if fall.holds is None else not fall.holds, fall.figures)


@claim(
    "Exact oracles do not help: with I > 1 drift alone leaves a floor like the step to the power 2 (± .3).",
    "Thm 1, remark",
)
def drift_remains(results: pd.DataFrame) -> Finding:
    """And I = 1 has no floor, or one below a thousandth of that."""
    floors = _floors(results, f"exact, I = {quadratics.LOCAL}", "step")
    alone = _floors(results, "exact, I = 1", "step")
    exponent = power([*floors], means(floors))
    figures = {
        "floor as a power of the step": exponent,
        f"floor at steps {listed(floors)}, I = {quadratics.LOCAL}": means(floors),
        "the same, I = 1": means(alone),
    }
    return Finding(abs(exponent - 2) < 0.3 and max(means(alone)) < 1e-3 * min(means(floors)), figures)


rates = Experiment(
    **description("fedbio-rates", globals()),
    runs=quadratics.runs,
    thinned=thinned,
    picture=picture,
    claims=tuple(claim),
)
