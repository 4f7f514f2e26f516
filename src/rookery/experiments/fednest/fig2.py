"""Fig. 2 of FedNest: hyper-representation on MNIST, with three choices compared."""

import itertools
from typing import Any

import pandas as pd
from matplotlib.figure import Figure

from rookery import report
from rookery.experiments.fednest import representation as shared
from rookery.experiments.machinery import Claims, Config, Experiment, Finding, Headline, description
from rookery.experiments.machinery.claims import all_lead, lead, together
from rookery.experiments.machinery.curves import best, curves, ends, ends_by, moves, reached, select
from rookery.experiments.machinery.numbers import SPLITS, Figures, mean, means


def printed(results: pd.DataFrame) -> pd.DataFrame:
    """The runs up to where the axes of Fig. 2b and 2c end."""
    return results[results["exchanges"] <= 4000]


def non_iid(results: pd.DataFrame) -> pd.DataFrame:
    """The non-i.i.d. ones of these."""
    return select(printed(results), split="non-i.i.d.")


def picture(results: pd.DataFrame, across: str, lines: dict[str, Any], bottom: float) -> Figure:
    """Test accuracy against rounds or communications, from `bottom` on."""
    fig, axes = report.figure(1, 1, width=6.4, height=4.6)
    shared.panel(axes[0, 0], results, across, lines, "", bottom)
    return fig


# Fig. 2a: FedNest and LFedNest.

TWO = {"FedNest": report.BLUE, "LFedNest": report.VERMILION}


fig2a_claims = Claims()


@fig2a_claims("I.i.d., FedNest and LFedNest perform well, and alike (90 % or more, within 2 points).", "Sec. 4.1")
def iid_alike(results: pd.DataFrame) -> Finding:
    both = means(ends_by(shared.scripts(results), "method", TWO, split="i.i.d."))
    return Finding(min(both) >= 0.9 and max(both) - min(both) <= 0.02, {"end, FedNest and LFedNest": both})


@fig2a_claims("Non-i.i.d., FedNest achieves its i.i.d. performance (within 2 points).", "Sec. 4.1")
def reaches_iid(results: pd.DataFrame) -> Finding:
    both = means(ends_by(shared.scripts(results), "split", SPLITS, method="FedNest"))
    return Finding(both[1] >= both[0] - 0.02, {"end, i.i.d. and non-i.i.d.": both})


@fig2a_claims("Non-i.i.d., FedNest ends at about 91.5 % (within 2 points).", "Fig. 2a")
def fednest_level(results: pd.DataFrame) -> Finding:
    end = ends(shared.scripts(results), method="FedNest", split="non-i.i.d.")
    return Finding(abs(mean(end) - 0.915) <= 0.02, {"end, each seed": end})


@fig2a_claims("Non-i.i.d., FedNest outperforms LFedNest by 2 points or more.", "Sec. 4.1")
def lfednest_below(results: pd.DataFrame) -> Finding:
    """LFedNest's highest accuracy, before it fails, is 2 points below FedNest's end, and more than the margin."""
    own = select(shared.scripts(results), split="non-i.i.d.")
    full, light = ends_by(own, "method", TWO).values()
    ahead = lead(full, best(own, method="LFedNest"))
    figures = {"lead over LFedNest's highest accuracy, and the margin": ahead, "end, LFedNest": mean(light)}
    return Finding(lead(full - 0.02, best(own, method="LFedNest")).holds, figures)


@fig2a_claims("Non-i.i.d., LFedNest ends at about 87.5 % (within 2 points).", "Fig. 2a")
def lfednest_level(results: pd.DataFrame) -> Finding:
    own = select(shared.scripts(results), split="non-i.i.d.")
    end = ends(own, method="LFedNest")
    return Finding(abs(mean(end) - 0.875) <= 0.02, {"end, each seed": end, "highest": best(own, method="LFedNest")})


@fig2a_claims("With the script's N = 5 and 1/ℓ = .01 the implicit part is below an eighth of the direct one.")
def implicit_part(results: pd.DataFrame) -> Finding:
    """Where FedNest ends; with 1/ℓ from the Hessian it is above a half, and by conjugate gradients above all of it."""
    own = shared.scripts(results)
    shares = {
        "the series, 1/ℓ = .01": "implicit_share_series_01",
        "the series, 1/ℓ from the Hessian": "implicit_share_series",
        "conjugate gradients": "implicit_share",
    }
    end = {words: means(ends_by(own, "split", SPLITS, metric, method="FedNest")) for words, metric in shares.items()}
    short, series, exact = end.values()
    figures = {f"i.i.d. and non-i.i.d., {words}": both for words, both in end.items()}
    note = "The method is then nearly joint training: FedNest's curves hardly test a hypergradient."
    return Finding(max(short) < 1 / 8 and min(series) > 1 / 2 and min(exact) > 1, figures, note)


fig2a = Experiment(
    **description("fednest-fig2a", globals()),
    family=shared.FAMILY,
    runs=lambda quick: [
        shared.representation(quick, m, split, hessian_step=step)
        for step, m, split in itertools.product((shared.HESSIAN_STEP, shared.AUTO), TWO, SPLITS)
    ],
    picture=lambda results: picture(shared.scripts(results), "round", shared.by_split("method", TWO), 0.6),
    claims=tuple(fig2a_claims),
    headlines=lambda results: [
        Headline(f"{m}, non-i.i.d.", told, ends(shared.scripts(results), method=m, split="non-i.i.d."))
        for m, told in zip(TWO, ("≈ .915", "≈ .875"), strict=True)
    ],
)


# Fig. 2b: SVRG or SGD in the inner optimizer.


def fig2b_runs(quick: bool) -> list[Config]:
    """FedNest with either inner optimizer, two splits; non-i.i.d. with more seeds than the other figures have."""
    iid, other = ([shared.representation(quick, method, split) for method in shared.INNER] for split in SPLITS)
    return iid + [config if quick else config.but(seeds=tuple(range(10))) for config in other]


fig2b_claims = Claims()


@fig2b_claims("Non-i.i.d., SVRG in FedInn provides better convergence.", "Fig. 2b, caption")
def svrg_converges_better(results: pd.DataFrame) -> Finding:
    """FedNest's accuracy is higher, on average over the printed axis and at its end, by more than the margin."""
    ahead = {words: shared.over_sgd(measure, non_iid(results)) for words, measure in shared.MEASURES.items()}
    return all_lead({words: lead(own) for words, own in ahead.items()})


@fig2b_claims("Non-i.i.d., SVRG in FedInn provides better stability.", "Fig. 2b, caption")
def svrg_is_stabler(results: pd.DataFrame) -> Finding:
    """FedNest's accuracy changes less between evaluations in the second half, by more than the margin."""
    more = shared.over_sgd(moves, non_iid(results))
    less = lead(-more)
    figures = {"difference of the changes between evaluations, and the margin": less}
    if mean(ends(results, method="FedNest", split="non-i.i.d.")) <= 2 / 10:  # a run that has failed is steady
        return Finding(False, figures, "FedNest's runs failed here.")
    return Finding(less.holds, figures)


fig2b = Experiment(
    **description("fednest-fig2b", globals()),
    family=shared.FAMILY,
    runs=fig2b_runs,
    picture=lambda results: picture(printed(results), "exchanges", shared.by_split("method", shared.INNER), 0.84),
    claims=tuple(fig2b_claims),
    headlines=lambda results: [
        Headline(f"{m}, non-i.i.d., at 4,000 communications", told, ends(non_iid(results), method=m))
        for m, told in zip(shared.INNER, ("≈ .91", "≈ .89"), strict=True)
    ],
)


# Fig. 2c: local steps in the outer optimizer.

TAUS = {1: report.BLUE, 5: report.VERMILION}


fig2c_claims = Claims()


@fig2c_claims("Larger τ saves on communication.", "Sec. 4.1")
def tau_saves_communication(results: pd.DataFrame) -> Finding:
    """With τ = 5 the end accuracy of τ = 1 is reached in fewer communications, by more than the margin."""
    figures: Figures = {}
    parts = []
    for split in SPLITS:
        own = select(printed(results), split=split)
        one, five = ([*map(reached, curves(own, across="exchanges", tau=tau), ends(own, tau=1))] for tau in TAUS)
        parts.append(lead(one, five).holds)
        figures[f"communications to the end accuracy of τ = 1, with τ = 1 and 5, {split}"] = [mean(one), mean(five)]
    return Finding(together(parts), figures)


@fig2c_claims("Larger τ improves test performance.", "Sec. 4.1")
def tau_improves_accuracy(results: pd.DataFrame) -> Finding:
    """With τ = 5 the end accuracy is higher by more than the margin, on both splits."""
    own = printed(results)
    leads = {split: lead(ends(own, tau=5, split=split), ends(own, tau=1, split=split)) for split in SPLITS}
    return all_lead(leads, "lead of τ = 5")


fig2c = Experiment(
    **description("fednest-fig2c", globals()),
    family=shared.FAMILY,
    runs=lambda quick: [shared.representation(quick, "FedNest", split, tau) for tau in TAUS for split in SPLITS],
    picture=lambda results: picture(printed(results), "exchanges", shared.by_split("tau", TAUS, "τ = {}"), 0.84),
    claims=tuple(fig2c_claims),
    headlines=lambda results: [
        Headline(f"τ = {tau}, non-i.i.d., at 4,000 communications", told, ends(non_iid(results), tau=tau))
        for tau, told in zip(TAUS, ("≈ .91", "≈ .933"), strict=True)
    ],
)
