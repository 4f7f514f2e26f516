"""The communication complexity of FedBiO's theory, on stochastic quadratics with known hypergradient."""

import math
from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from rookery import report
from rookery.experiments.fedbio import quadratics
from rookery.experiments.machinery.claims import Claims, Finding, margin, together
from rookery.experiments.machinery.curves import select, values
from rookery.experiments.machinery.drawing import ticks
from rookery.experiments.machinery.experiment import Experiment
from rookery.experiments.machinery.numbers import Figures, fitted_power, listed, mean, power
from rookery.experiments.papers import FEDBIO_PAPER

SLOPES = {  # the theory's against ε
    "exchanges": {"FedBiO": -1.5, "FedBiOAcc": -1.0, "FedNest": -2.0},
    "samples": {"FedBiO": -2.5, "FedBiOAcc": -1.5, "FedNest": -2.0},  # of a client
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
        rounds = [
            near for e in ([epsilon] if epsilon else quadratics.EPSILONS[name]) for near in _around(table, e).index
        ]
        kept |= (whole["run"] == run) & whole["round"].isin(rounds)
    labels = ["run", "study", "method", "clients", "epsilon", "step", "seed", "round"]
    return whole.loc[kept, [*labels, *quadratics.COSTS, "so_far", "floor"]]


class Least(NamedTuple):
    """What ε costs at the step of the grid that needs the fewest communications."""

    exchanges: float
    samples: float
    step: float
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


def _least(results: pd.DataFrame, epsilons: Iterable[float]) -> dict[float, Least]:
    """The least costs by ε."""
    runs = [(float(own["step"].iloc[0]), _table(own), _floor(own)) for _, own in results.groupby("step")]
    least = {}
    for epsilon in epsilons if runs else ():
        costs = [_reached(table, epsilon) for _, table, _ in runs]
        best = int(np.argmin([exchanges for exchanges, _ in costs]))
        (exchanges, samples), (step, _, floor) = costs[best], runs[best]
        least[epsilon] = Least(exchanges, samples, step, floor, 0 < best < len(runs) - 1)
    return least


class Costs(NamedTuple):
    """The costs of one method and M for each ε that is reached with a best step inside its grid, largest ε first."""

    epsilons: list[float]
    each: list[Least]

    def of(self, cost: str) -> np.ndarray:
        """A field of each."""
        return np.array([getattr(one, cost) for one in self.each])

    @property
    def shares(self) -> list[float]:
        """The floors over ε."""
        return [one.floor / epsilon for epsilon, one in zip(self.epsilons, self.each, strict=True)]

    def slope(self, cost: str, over: Sequence[float] | None = None) -> tuple[float, float]:
        """The power of ε in a cost, or in the cost divided by `over`, and half its 95 % interval."""
        return fitted_power(self.epsilons, self.of(cost) / np.asarray(1.0 if over is None else over))

    def among(self, epsilons: set[float]) -> "Costs":
        """The costs of these ε only."""
        pairs = [pair for pair in zip(self.epsilons, self.each, strict=True) if pair[0] in epsilons]
        return Costs([e for e, _ in pairs], [one for _, one in pairs])


def _costs(results: pd.DataFrame, name: str) -> dict[int, Costs]:
    """The costs by M."""
    found = {}
    there = select(results, study="rate", method=name)
    for clients in values(there, "clients"):
        own = select(there, clients=clients)
        epsilons = quadratics.EPSILONS[name]
        if name == "FedNest":  # a run serves all ε
            each = _least(own, epsilons)
        else:
            each = {e: one for e in epsilons for one in _least(select(own, epsilon=e), [e]).values()}
        good = {epsilon: one for epsilon, one in each.items() if one.inside and np.isfinite(one.exchanges)}
        found[int(clients)] = Costs([*good], [*good.values()])
    return found


def _floor(results: pd.DataFrame, **labels: Any) -> float:
    """The floor, averaged over the seeds."""
    return float(select(results, **labels)["floor"].mean())


def _floors(results: pd.DataFrame, study: str, over: str) -> tuple[list[float], list[float]]:
    places = values(results, over, study=study)
    return places, [_floor(results, study=study, **{over: place}) for place in places]


def picture(results: pd.DataFrame) -> Figure:
    """Communications against ε; the floors against M; the floors of exact oracles against the step."""
    fig, axes = report.figure(1, 3, width=14.5, height=4.4)
    left, middle, right = axes[0]
    for name, bound in SLOPES["exchanges"].items():
        for clients, costs in _costs(results, name).items():
            epsilons, counts = np.array(costs.epsilons), costs.of("exchanges")
            look = {**report.style(name), "linestyle": "-" if clients == quadratics.FEDERATIONS[0] else "--"}
            left.loglog(epsilons, counts, **look, label=f"{name}, M = {clients}")
            if clients == quadratics.FEDERATIONS[0] and len(counts):
                guide = counts[0] * (epsilons / epsilons[0]) ** bound
                left.loglog(epsilons, guide, color=look["color"], linestyle=":", linewidth=1.2)
    left.invert_xaxis()
    ticks(left, sorted({epsilon for own in quadratics.EPSILONS.values() for epsilon in own}))
    title = r"Until the mean $\|\nabla\Phi\|^2$ is ε"
    report.label(left, r"$\epsilon$, relative to the start", "communications", title)
    report.legend(left)
    for study, words, colour in (
        ("noise", "FedBiO, all samples noisy", report.PURPLE),
        ("upper", "FedBiOLocal, upper samples noisy", report.GREEN),
        ("lower", "FedBiOLocal, lower samples noisy", report.ORANGE),
    ):
        middle.loglog(*_floors(results, study, "clients"), "o-", color=colour, label=words)
    ticks(middle, values(results, "clients", study="noise"))
    report.label(middle, "clients M", r"floor of $\|\nabla\Phi\|^2$", "Noise: more clients")
    report.legend(middle)
    for local, line in ((1, "--"), (quadratics.LOCAL, "-")):
        steps, floors = _floors(results, f"exact, I = {local}", "step")
        right.loglog(steps, np.maximum(floors, 1e-32), f"o{line}", color=report.PURPLE, label=f"I = {local}")
    ticks(right, values(results, "step", study=f"exact, I = {quadratics.LOCAL}"))
    report.label(right, "step", r"floor of $\|\nabla\Phi\|^2$", "Exact oracles: drift")
    report.legend(right)
    return fig


BINDS = 0.1  # of ε: where all floors are below that, how ε is reached says nothing of noise and drift
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
MARGIN = 0.1  # an interval that holds the bound, and reaches further than this beyond it, tells nothing

claim = Claims()


def _no_steeper(slope: float, error: float, bound: float) -> bool | None:
    """Within its error the slope is no steeper than the bound; None where it may be steeper by more than MARGIN."""
    if slope + error < bound:
        return False
    return True if slope - error >= bound - MARGIN else None


def _logarithms(name: str, clients: int, costs: Costs) -> list[float] | None:
    """(ln T)^{3/2} of FedBiOAcc's local steps T: its proof bounds the mean by ln T/(bMT)^{2/3}."""
    if name != "FedBiOAcc":
        return None
    return [math.log(count / 2 * quadratics.acc_local(clients)) ** 1.5 for count in costs.of("exchanges")]


def rate(results: pd.DataFrame, of: tuple[str, str]) -> Finding:
    """A method's cost against ε, for every M: see `_no_steeper`; FedBiOAcc's without the logarithm."""
    name, cost = of
    figures: Figures = {}
    each: list[bool | None] = []
    notes: list[str] = []
    for clients, costs in _costs(results, name).items():
        figures[f"slope at M = {clients}, and half its 95 % interval"] = costs.slope(cost)
        slope, error = costs.slope(cost, _logarithms(name, clients, costs))
        if name == "FedBiOAcc":
            figures[f"the same without the logarithm, M = {clients}"] = [slope, error]
        holds = _no_steeper(slope, error, SLOPES[cost][name])
        notes += [] if holds is not None else [WIDE if np.isfinite(error) else FEW]
        if holds and max(costs.shares) < BINDS:
            holds, notes = None, [*notes, f"M = {clients}: {DYING}"]
        each.append(holds)
        at = f"at ε = {listed(costs.epsilons)}, M = {clients}"
        figures[f"{WORDS[cost]} {at}"] = costs.of(cost)
        if cost == "exchanges":
            figures[f"best {'α_1' if name == 'FedBiOAcc' else 'step'} {at}"] = costs.of("step")
            figures[f"its floor over ε, M = {clients}"] = costs.shares
    return Finding(together(each), figures, " ".join(dict.fromkeys(notes)))


def acc_is_cheapest(results: pd.DataFrame) -> Finding:
    """At the smallest M and over the ε that all have: FedBiOAcc's slope is the flattest, FedNest's is the steepest, and
    the 95 % intervals do not overlap. Undecided where a method's floor is far below every ε."""
    costs = {name: _costs(results, name)[quadratics.FEDERATIONS[0]] for name in quadratics.EPSILONS}
    shared = set.intersection(*(set(own.epsilons) for own in costs.values()))
    slopes = [own.among(shared).slope("exchanges") for own in costs.values()]
    fedbio, acc, nest = slopes
    at = f"slope at M = {quadratics.FEDERATIONS[0]}, and half its 95 % interval"
    figures = {f"{at}, {name}": slope for name, slope in zip(costs, slopes, strict=True)}
    each = [_flatter(acc, fedbio), _flatter(fedbio, nest)]
    if all(each) and any(max(own.shares) < BINDS for own in costs.values()):
        return Finding(None, figures, LEAST)
    return Finding(together(each), figures, "Two of the 95 % intervals overlap." if None in each else "")


def _flatter(a: tuple[float, float], b: tuple[float, float]) -> bool | None:
    """Whether slope a is flatter; None where the intervals overlap."""
    return a[0] > b[0] if abs(a[0] - b[0]) > a[1] + b[1] else None


def over_clients(results: pd.DataFrame, cost: str) -> Finding:
    """FedBiOAcc's cost as a power of M, the mean over the ε that both M have: see `_no_steeper`, for no flatter."""
    found = _costs(results, "FedBiOAcc")
    if len(found) < 2:
        return Finding(None, {}, "There is one M only.")
    (few, one), (many, other) = found.items()
    shared = set(one.epsilons) & set(other.epsilons)
    powers = np.log(other.among(shared).of(cost) / one.among(shared).of(cost)) / math.log(many / few)
    figures: Figures = {f"{WORDS[cost]}, as a power of M, by ε": powers}
    if len(powers) < 2:
        return Finding(None, figures, FEW)
    error = margin(len(powers)) * float(powers.std(ddof=1)) / math.sqrt(len(powers))
    figures["their mean, and the margin"] = [mean(powers), error]
    if max(one.shares + other.shares) < BINDS:
        return Finding(None, figures, DYING)
    holds = _no_steeper(-mean(powers), error, -POWERS[cost])
    return Finding(holds, figures, WIDE if holds is None else "")


def falls(results: pd.DataFrame, study: str) -> Finding:
    """The floor falls from each M to the next, at least half as fast as 1/M in all."""
    sizes, floors = _floors(results, study, "clients")
    exponent = power(sizes, floors)
    figures = {f"floor at M = {listed(sizes)}": floors, "as a power of M": exponent}
    return Finding(bool((np.diff(floors) < 0).all()) and exponent < -0.5, figures)


RISES = (
    "Over these ε it is steeper by a little: the communications times ε², which the bound holds below a constant, rise "
    "by 18 % from ε = .08 to .0025. From .005 to .0025 they do not: 6.17 and 6.07."
)
LOG = ", up to a logarithm"


def add_rate(name: str, cost: str, power: str, where: str, note: str = "", **why: str) -> None:
    """Add the claim that a method's cost grows no faster than a power of ε."""
    text = f"{name}: {WORDS[cost]} grow no faster than ε^{{{power}}}{note}."
    claim(text, where, "theory", **why)(partial(rate, of=(name, cost)))


add_rate("FedBiO", "exchanges", "-3/2", "Thm 1, Table 1")
add_rate("FedBiOAcc", "exchanges", "-1", "Thm 2, Table 1", LOG)
add_rate("FedNest", "exchanges", "-2", "Table 1", undecided=RISES)
claim("As ε falls FedBiOAcc's communications grow least, FedNest's most.", "Table 1", "theory")(acc_is_cheapest)
add_rate("FedBiO", "samples", "-5/2", "Thm 1, Table 1")
add_rate("FedBiOAcc", "samples", "-3/2", "Thm 2, Table 1", LOG)
add_rate("FedNest", "samples", "-2", "Table 1", undecided=RISES)
theory = partial(claim, kind="theory")
theory("FedBiOAcc: communications fall with the clients like M^{-1/3}.", "Thm 2, Table 1")(
    partial(over_clients, cost="exchanges")
)
theory("FedBiOAcc: samples of a client fall like M^{-1}.", "Thm 2, Table 1")(partial(over_clients, cost="samples"))
theory("The error falls with the number of clients.", "Thm 1, linear speed-up")(partial(falls, study="noise"))
theory("Local lower levels: it falls with the clients for upper-level samples …", "Thm 3")(
    partial(falls, study="upper")
)


@claim(
    "… but not for lower-level ones.",
    "Thm 3",
    "theory",
    set_up="On quadratics it falls as well: y_i enters the hypergradient linearly here, so that the clients' "
    "independent errors in y_i average out. The theory bounds ‖y_i − y_i*‖², which does not shrink with M.",
)
def lower_does_not(results: pd.DataFrame) -> Finding:
    """FedBiOLocal, lower samples noisy: the floor does not fall with M."""
    fall = falls(results, "lower")
    return Finding(not fall.holds, fall.figures)


@claim("Exact oracles do not help: with I > 1 the drift alone forces steps ∝ ε^{1/2}.", "Thm 1, remark", "theory")
def drift_remains(results: pd.DataFrame) -> Finding:
    """I = 1 has no floor; with I = LOCAL the floor goes like the step to the power 2 (± .3)."""
    steps, floors = _floors(results, f"exact, I = {quadratics.LOCAL}", "step")
    _, alone = _floors(results, "exact, I = 1", "step")
    exponent = power(steps, floors)
    figures = {
        f"floor at steps {listed(steps)}, I = {quadratics.LOCAL}": floors,
        "as a power of the step": exponent,
        "the same, I = 1": alone,
    }
    return Finding(abs(exponent - 2) < 0.3 and max(alone) < 1e-3 * min(floors), figures)


rates = Experiment(
    name="fedbio-rates",
    title="communications to reach ε, on stochastic quadratics",
    paper=f"{FEDBIO_PAPER}, Thm 1–4 and Table 1 (which has no such run).",
    setup=(
        f"Bilevel quadratics, M clients that differ, {quadratics.SAMPLES} noisy samples each, drawn with replacement. "
        "*Rate*: communications until the mean of ‖∇Φ(x_t)‖² over the rounds so far, which the theorems bound, "
        "averaged over the seeds, is ε, relative to the start's; the fewest over a grid of steps, each 2^{1/4} of the "
        "one before, so that no theory gives the step. An ε whose best step is at the edge of the grid is left out. On "
        "a quadratic that mean is A/(step·n) + floor(step) after n rounds. The best step's floor is then a third of ε "
        "where drift makes it, floor ∝ step² and n ∝ ε^{-3/2}; it is half of ε where the noise of plain steps does, "
        "floor ∝ step and n ∝ ε^{-2}. A floor far below ε would mean that neither decides. All else follows the "
        f"theorems, whose rates need it: FedBiO I = {quadratics.LOCAL}, b = 0.96/(Mε); FedBiOAcc b = ε^{{-1/2}}, I ∝ "
        f"M^{{-2/3}} ({quadratics.ACC_LOCAL} at M = {quadratics.FEDERATIONS[0]}), b_1 = I^{{3/2}}b, c = 80/(bM), u₀ = "
        "64b²/M (∝ (bM)²I^{9/2}), steps .1 α_t, and the grid is of δ/u₀^{1/3}, which is α_t at first (its samples over "
        "M follow from the communications, since I and b are set); FedNest b = 1. The clients' linear terms have mean "
        "zero, so that x* = y* = u* = 0. The start is 0.008 (FedNest: 0.03) from it in every entry, below and above by "
        "turns of the seed, so that in the mean it has no cross term with the drift. The samples' noise is 0.1 "
        "(FedBiO: 0.03, where the drift is to bind). All ε have the same seeds, by which all counts are higher, or "
        "lower. The slopes are fitted over the ε; the bounds are upper bounds, so a flatter slope agrees with them; "
        f"one whose 95 % interval holds the bound does, too, if it reaches at most {MARGIN:g} beyond it. The proof of "
        "Theorem 2 (App. B.2.5) ends at ln T/(bMT)^{2/3} for T local steps, and its O(·) does not show the logarithm: "
        "FedBiOAcc's costs are divided by (ln T)^{3/2} before they are held against a power of ε; the slopes without "
        "that stand beside. *Noise*: the floor of FedBiO at a fixed step .02 and b = 1; and of FedBiOLocal with noisy "
        "samples at one level, the other exact. *Exact*: full gradients. A floor is the mean over the second half of "
        "the rounds. `results.csv` holds of every run the last row, with the floor, and of those about rates also the "
        "two rows between which the mean so far (`so_far`) comes to ε."
    ),
    runs=quadratics.runs,
    thinned=thinned,
    picture=picture,
    claims=tuple(claim),
    differences=("The paper's experiments are not in its text at hand; this set-up is ours.",),
)
