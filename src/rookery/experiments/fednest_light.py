"""The FedNest paper's light methods and learning rates on MNIST (App. H, Fig. 5 and 6)."""

import dataclasses
import itertools

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from rookery import report
from rookery.experiments.claims import UNDECIDED, Claim, Finding, Verdict, differs, together
from rookery.experiments.curves import Figures
from rookery.experiments.curves import best as _best
from rookery.experiments.curves import draw as _draw
from rookery.experiments.curves import ends as _ends
from rookery.experiments.curves import legend as _legend
from rookery.experiments.curves import mean as _mean
from rookery.experiments.curves import zoom as _zoom
from rookery.experiments.experiment import Config, Experiment, Headline
from rookery.experiments.fednest import PAPER
from rookery.experiments.fednest_mnist import (
    AUTO,
    COLLAPSE,
    FAMILY,
    HESSIAN_STEP,
    REPRESENTATION,
    REPRESENTATION_DIFFERENCES,
    end_of,
    fallen,
    from_hessian,
    representation,
    scripts,
    with_both,
)

# Fig. 5: alternating or not.

LIGHT = ("LFedNest", "LFedNestSVRG", "LFedNestNonAlt")


def fig5_runs(quick: bool) -> list[Config]:
    """The three light methods, non-i.i.d., both 1/ℓ."""
    return [
        representation(quick, method, "non-i.i.d.", hessian_step=step)
        for step in (HESSIAN_STEP, AUTO)
        for method in LIGHT
    ]


def fig5_picture(results: pd.DataFrame) -> Figure:
    """Test accuracy against rounds and against communications; beside it, against rounds with 1/ℓ from the Hessian."""
    fig, axes = report.figure(1, 3, width=15.5, height=4.8)
    own = scripts(results)
    rounds = own["round"].max()
    each = own[own["round"] == rounds].groupby("method")["exchanges"].mean() / rounds
    lines = {f"{method} ({each[method]:.0f})": {"method": method, "look": report.style(method)} for method in LIGHT}
    for ax, panel, across, title in (
        (axes[0, 0], own, "round", f"by rounds, 1/ℓ = {HESSIAN_STEP:g}"),
        (axes[0, 1], own, "exchanges", f"by communications, 1/ℓ = {HESSIAN_STEP:g}"),
        (axes[0, 2], from_hessian(results), "round", "by rounds, 1/ℓ from the Hessian"),
    ):
        _draw(ax, panel, across, "accuracy", lines)
        _zoom(ax, results)
        words = "rounds (the paper's epochs)" if across == "round" else "communications"
        report.label(ax, words, "test accuracy" if ax is axes[0, 0] else "", title)
    _legend(axes[0, 1], 3, title="communications a round in parentheses")
    return fig


def _ends_of_light(results: pd.DataFrame) -> Figures:
    return {f"end, {method}": _mean(_ends(results, method=method)) for method in LIGHT}


def alternating_better(results: pd.DataFrame) -> Finding:
    """LFedNest and LFedNestSVRG end above LFedNestNonAlt, with every seed."""
    ends = {method: _ends(results, method=method) for method in LIGHT}
    holds = all(bool((ends[method] > ends["LFedNestNonAlt"]).all()) for method in LIGHT[:2])
    figures = _ends_of_light(results) | {f"highest, {m}": _mean(_best(results, method=m)) for m in LIGHT}
    return Finding(holds, figures, fallen(results, *LIGHT))


def nonalt_near_eighty(results: pd.DataFrame) -> Finding:
    """LFedNestNonAlt ends between 75 and 85 %."""
    ends = _ends(results, method="LFedNestNonAlt")
    return Finding(0.75 <= _mean(ends) <= 0.85, {"end, each seed": ends.tolist()})


def svrg_helps_light(results: pd.DataFrame) -> Finding:
    """LFedNestSVRG ends above LFedNest, with every seed; where both have failed that is undecided."""
    svrg, sgd = (_ends(results, method=method) for method in ("LFedNestSVRG", "LFedNest"))
    high = [_best(results, method=method) for method in ("LFedNestSVRG", "LFedNest")]
    figures: Figures = {
        "end, LFedNestSVRG and LFedNest": [_mean(svrg), _mean(sgd)],
        "highest, LFedNestSVRG and LFedNest": [_mean(own) for own in high],
    }
    if max(*svrg, *sgd) < 0.2:
        note = "Both fail. Before that LFedNestSVRG is ahead, with every seed."
        return Finding(None, figures, note if (high[0] > high[1]).all() else "Both fail.")
    return Finding(bool((svrg > sgd).all()), figures)


fig5 = Experiment(
    name="fednest-fig5",
    title="hyper-representation on MNIST, alternating or not",
    paper=f"{PAPER}, ICML 2022, Fig. 5 and App. H.1.",
    setup=REPRESENTATION,
    runs=fig5_runs,
    picture=fig5_picture,
    claims=with_both(
        (
            Claim(
                "LFedNest and LFedNestSVRG achieve better performance than LFedNestNonAlt.",
                "H.1",
                alternating_better,
                otherwise=Verdict(
                    UNDECIDED,
                    "Both alternating methods learn, and fail after some 300 rounds; not even their highest accuracy "
                    "is above LFedNestNonAlt's end. Which habit of the authors' code keeps theirs from failing is not "
                    "found (`fednest-collapse`): five of them do not.",
                ),
            ),
            Claim(
                "LFedNestNonAlt remains around 80 % (75 to 85).",
                "H.1",
                nonalt_near_eighty,
                otherwise=differs(
                    "set-up",
                    "It ends at 89 % with every seed. The text is followed here; the authors' code departs from it "
                    "(dropout left on, another split, another regulariser), and with all its habits the highest "
                    "accuracy of LFedNest falls by as much, from 87 to 79 % (`fednest-collapse`).",
                ),
            ),
            Claim("SVRG in FedInn is necessary: LFedNestSVRG ends above LFedNest.", "H.1", svrg_helps_light),
        ),
        _ends_of_light,
    ),
    differences=(*REPRESENTATION_DIFFERENCES, COLLAPSE),
    family=FAMILY,
    headlines=lambda results: [Headline("LFedNestNonAlt", "≈ .80", end_of(results, "LFedNestNonAlt"))],
)


# Fig. 6: learning rates.

RATES = (0.06, 0.03, 0.01, 0.003)
QUICK_RATES = (0.3, 0.1, 0.03, 0.01)
SEARCHED_RATES = (0.3, 0.1)
RATED = ("FedNest", "FedNestSGD", "LFedNestSVRG", "LFedNest")  # the more a method communicates, the earlier
CONVERGED = 0.85  # an end accuracy that counts as converged


def fig6_runs(quick: bool) -> list[Config]:
    """Four methods at four rates, non-i.i.d., both 1/ℓ."""
    return [
        representation(quick, method, "non-i.i.d.", rate=rate, hessian_step=step)
        for step in (HESSIAN_STEP, AUTO)
        for rate in (QUICK_RATES if quick else RATES)
        for method in RATED
    ]


def fig6_search(quick: bool) -> list[Config]:
    """The rates above, on a seed that is not reported."""
    rates = () if quick else SEARCHED_RATES
    configs = [representation(quick, method, "non-i.i.d.", rate=rate) for rate in rates for method in RATED]
    return [dataclasses.replace(config, seeds=(9,)) for config in configs]


def _rates(results: pd.DataFrame) -> list[float]:
    return sorted(results["rate"].unique(), reverse=True)


def fig6_picture(results: pd.DataFrame) -> Figure:
    """Test accuracy against communications, a panel for each rate; a row for each 1/ℓ."""
    fig, axes = report.figure(2, 4, width=15.0, height=7.0)
    panels = ((scripts(results), f"1/ℓ = {HESSIAN_STEP:g}"), (from_hessian(results), "1/ℓ from the Hessian"))
    for row, (those, words) in zip(axes, panels, strict=True):
        for ax, rate in zip(row, _rates(results), strict=True):
            own = those[those["rate"] == rate]
            _draw(ax, own, "exchanges", "accuracy", {method: {"method": method} for method in RATED})
            ax.set_ylim(0, 1)
            report.label(ax, "", "test accuracy" if ax is row[0] else "", f"both steps {rate:g}, {words}")
    for ax in axes[1]:
        report.label(ax, "communications")
    _legend(axes[1, 0], 2)
    return fig


def _grid(results: pd.DataFrame) -> dict[str, list[float]]:
    """The end accuracy of each method at each rate, the largest rate first."""
    rates = _rates(results)
    return {m: [_mean(_ends(results, method=m, rate=rate)) for rate in rates] for m in RATED}


def _grid_figures(results: pd.DataFrame) -> Figures:
    rates = ", ".join(f"{rate:g}" for rate in _rates(results))
    return {f"end at {rates}, {method}": list(own) for method, own in _grid(results).items()}


def fednest_stands_the_largest(results: pd.DataFrame) -> Finding:
    """At the largest rate FedNest ends at CONVERGED or above and LFedNest below it."""
    grid = _grid(results)
    return Finding(grid["FedNest"][0] >= CONVERGED > grid["LFedNest"][0], _grid_figures(results))


def lfednest_needs_the_smallest(results: pd.DataFrame) -> Finding:
    """LFedNest ends at CONVERGED or above at the smallest rate, and at no other."""
    own = _grid(results)["LFedNest"]
    holds = own[-1] >= CONVERGED and max(own[:-1]) < CONVERGED
    return Finding(holds, {"end, the largest rate first": own})


def communication_stands_larger_rates(results: pd.DataFrame) -> Finding:
    """The largest rate at which a method ends at CONVERGED or above falls from each method to a lighter one; undecided
    where two have the same."""
    rates = _rates(results)
    largest = [max((r for r, end in zip(rates, own, strict=True) if end >= CONVERGED), default=0.0)
               for own in _grid(results).values()]  # fmt: skip
    holds = together([None if a == b else a > b for a, b in itertools.pairwise(largest)])
    note = (
        "FedNest and FedNestSGD both stand the largest rate that was run, LFedNestSVRG and LFedNest only the smallest: "
        "with FedOut more than without, but not between these. The rates are not ordered either: in the search, at .1, "
        "LFedNestSVRG ends at .947 (one seed), where it fails at .01 to .06."
    )
    return Finding(holds, {f"largest rate, {', '.join(RATED)}": largest}, note if holds is None else "")


def svrg_and_fedout_stabilise(results: pd.DataFrame) -> Finding:
    """At every rate above the smallest: SVRG ends no lower than SGD (both outer optimizers), FedOut than LFedOut; up to
    half a point. Undecided where both of a pair fail at each of these rates."""
    grid = {method: np.array(own[:-1]) for method, own in _grid(results).items()}
    pairs = (("FedNest", "FedNestSGD"), ("LFedNestSVRG", "LFedNest"), ("FedNest", "LFedNestSVRG"),
             ("FedNestSGD", "LFedNest"))  # fmt: skip
    gaps = {f"least lead, {a} over {b}": float((grid[a] - grid[b]).min()) for a, b in pairs}
    failed = [max(*grid[a], *grid[b]) < CONVERGED for a, b in pairs]
    holds = together([None if both else gap >= -0.005 for both, gap in zip(failed, gaps.values(), strict=True)])
    note = (
        "Both light methods fail at each of these rates: that SVRG stabilises is seen with FedOut alone; and with 1/ℓ "
        "from the Hessian FedNest fails at rates that FedNestSGD stands."
    )
    return Finding(holds, dict(gaps), note if any(failed) else "")


fig6 = Experiment(
    name="fednest-fig6",
    title="hyper-representation on MNIST, learning rates",
    paper=f"{PAPER}, ICML 2022, Fig. 6 and App. H.2.",
    setup=f"{REPRESENTATION} Here both steps take four values (1/ℓ does not), and a run has converged if it ends at "
    f"{CONVERGED:.0%}.",
    runs=fig6_runs,
    picture=fig6_picture,
    claims=with_both(
        (
            Claim("FedNest converges at the largest rate, LFedNest does not.", "H.2", fednest_stands_the_largest),
            Claim("LFedNest converges at the smallest rate only.", "H.2", lfednest_needs_the_smallest),
            Claim(
                "The more a method communicates, the larger the rate at which it converges.",
                "H.2",
                communication_stands_larger_rates,
            ),
            Claim("Both SVRG and FedOut stabilise the training.", "H.2", svrg_and_fedout_stabilise),
        ),
        _grid_figures,
        differs("set-up", "With 1/ℓ from the Hessian FedNest fails at the two largest rates."),
    ),
    differences=(
        *REPRESENTATION_DIFFERENCES,
        "The paper's four rates are not given. Ours were chosen with 1/ℓ from the Hessian, before the runs with .01: "
        "from .06, at which three of the four methods fail then, down to .003. What lies above is in the search "
        "(`search.csv`, 1/ℓ = .01): at .1 LFedNest fails and the others do not; at .3 all four do.",
    ),
    family=FAMILY,
    search=fig6_search,
    headlines=lambda results: [
        Headline(f"{m} at {RATES[0]:g}", "", _ends(scripts(results), method=m, rate=RATES[0]))
        for m in ("FedNest", "LFedNest")
    ],
)

EXPERIMENTS = (fig5, fig6)
