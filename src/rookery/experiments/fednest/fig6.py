"""Fig. 6 of FedNest: learning rates on MNIST, with two choices of 1/ℓ."""

import itertools
from functools import partial

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from rookery import report
from rookery.experiments.fednest import representation as shared
from rookery.experiments.machinery import Claims, Config, Experiment, Finding, Headline, description
from rookery.experiments.machinery.claims import together
from rookery.experiments.machinery.curves import ends, ends_by, values
from rookery.experiments.machinery.drawing import below, by_method, draw
from rookery.experiments.machinery.numbers import listed, means

RATES = (0.06, 0.03, 0.01, 0.003)
QUICK_RATES = (0.3, 0.1, 0.03, 0.01)
RATED = ("FedNest", "FedNestSGD", "LFedNestSVRG", "LFedNest")  # the more a method communicates, the earlier
AS_RATE = "rate"  # 1/ℓ is the rate, as in the authors' code
CONVERGED = 0.85  # an end accuracy that counts as converged


def with_rate(results: pd.DataFrame) -> pd.DataFrame:
    """The runs with 1/ℓ = rate, among them those whose rate is the fixed 1/ℓ."""
    fixed = shared.scripts(results)
    return pd.concat([results[results["hessian_step"] == AS_RATE], fixed[fixed["rate"] == shared.HESSIAN_STEP]])


def fig6_runs(quick: bool) -> list[Config]:
    """Four methods at four rates, non-i.i.d.; 1/ℓ is the rate (not where it is the fixed one), fixed, or estimated."""
    rates = QUICK_RATES if quick else RATES
    rated = partial(shared.representation, quick, split="non-i.i.d.")
    moving = [rated(m, rate=rate, hessian_step=rate) for rate in rates if rate != shared.HESSIAN_STEP for m in RATED]
    each = itertools.product((shared.HESSIAN_STEP, shared.AUTO), rates, RATED)
    return [
        *(c.but(name=f"{c.name}, 1/ℓ = rate", labels=c.labels | {"hessian_step": AS_RATE}) for c in moving),
        *(rated(m, rate=rate, hessian_step=step) for step, rate, m in each),
    ]


def fig6_picture(results: pd.DataFrame) -> Figure:
    """Test accuracy against communications, a panel for each rate; a row for each 1/ℓ."""
    fig, axes = report.figure(2, 4, width=15.0, height=7.0)
    rows = {"1/ℓ = rate": with_rate(results), f"1/ℓ = {shared.HESSIAN_STEP:g}": shared.scripts(results)}
    for row, (words, those) in zip(axes, rows.items(), strict=True):
        for ax, rate in zip(row, _rates(results), strict=True):
            draw(ax, those[those["rate"] == rate], "exchanges", "accuracy", by_method(RATED))
            ax.set_ylim(0, 1)
            across = "communications" if ax in axes[-1] else ""
            report.label(ax, across, "test accuracy" if ax is row[0] else "", f"both steps {rate:g}, {words}")
    below(fig, axes[0, 0], 4)
    return fig


# What the claims measure.


def _rates(results: pd.DataFrame) -> list[float]:
    """The largest first."""
    return values(results, "rate")[::-1]


def _grid(results: pd.DataFrame) -> dict[str, list[float]]:
    """The end accuracy of each method at each rate, the largest rate first."""
    return {m: means(ends_by(results, "rate", _rates(results), method=m)) for m in RATED}


claim, own_claim = Claims(), Claims()


@claim("FedNest converges at the largest rate, LFedNest does not.", "H.2")
def fednest_stands_the_largest(results: pd.DataFrame) -> Finding:
    full, _, _, light = _grid(results).values()
    rates = listed(_rates(results))
    figures = {f"FedNest, end at the rates {rates}": full, f"LFedNest, end at the rates {rates}": light}
    return Finding(full[0] >= CONVERGED > light[0], figures)


@claim("LFedNest converges at the smallest rate only.", "H.2")
def lfednest_needs_the_smallest(results: pd.DataFrame) -> Finding:
    own = _grid(results)["LFedNest"]
    return Finding(own[-1] >= CONVERGED > max(own[:-1]), {f"end at the rates {listed(_rates(results))}": own})


@claim("The more a method communicates, the larger the rate at which it converges.", "H.2")
def communication_stands_larger_rates(results: pd.DataFrame) -> Finding:
    """The largest rate at which a method converges falls from each method to the next lighter one. Undecided where two
    methods have the same one: a rate between those run may tell them apart."""
    converged = lambda own: [r for r, end in zip(_rates(results), own, strict=True) if end >= CONVERGED]
    largest = [max(converged(own), default=0.0) for own in _grid(results).values()]
    parts = [None if a == b else a > b for a, b in itertools.pairwise(largest)]
    figures = {f"largest rate, {', '.join(RATED)}": largest}
    return Finding(together(parts), figures, "Two methods have the same largest rate." * (together(parts) is None))


@claim("Both SVRG and FedOut stabilise the training (within half a point, at every rate above the smallest).", "H.2")
def svrg_and_fedout_stabilise(results: pd.DataFrame) -> Finding:
    """At every rate above the smallest, SVRG ends no lower than SGD (with both outer optimizers), and FedOut no lower
    than LFedOut, up to half a point. Undecided where both of a pair fail at each of these rates."""
    grid = {method: np.array(own[:-1]) for method, own in _grid(results).items()}
    pairs = (("FedNest", "FedNestSGD"), ("LFedNestSVRG", "LFedNest"), ("FedNest", "LFedNestSVRG"),
             ("FedNestSGD", "LFedNest"))  # fmt: skip
    gaps = {f"least lead, {a} over {b}": float((grid[a] - grid[b]).min()) for a, b in pairs}
    failed = [max(*grid[a], *grid[b]) < CONVERGED for a, b in pairs]
    holds = together([None if both else gap >= -0.005 for both, gap in zip(failed, gaps.values(), strict=True)])
    return Finding(holds, gaps, "Both light methods fail at each of these rates." * (holds is None))


@own_claim("With 1/ℓ = .01 at every rate: FedNest converges at the largest rate, LFedNest at the smallest only.")
def with_a_fixed_one(results: pd.DataFrame) -> Finding:
    own = shared.scripts(results)
    found = [fednest_stands_the_largest(own), lfednest_needs_the_smallest(own)]
    return Finding(together([each.holds for each in found]), found[0].figures)


fig6 = Experiment(
    **description("fednest-fig6", globals()),
    family=shared.FAMILY,
    runs=fig6_runs,
    picture=fig6_picture,
    claims=(*(each.on(with_rate) for each in claim), *own_claim),
    headlines=lambda results: [
        Headline(f"{m} at {rate:g}, 1/ℓ = rate", "", ends(with_rate(results), method=m, rate=rate))
        for m, rate in (("FedNest", 0.03), ("LFedNest", 0.03))
    ],
)
