"""Fig. 1 of ASFBO: six methods on MNIST, two splits."""

from functools import partial
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from rookery import report
from rookery.experiments.asfbo import representation as shared
from rookery.experiments.machinery import Claims, Config, Experiment, Finding, Headline, description
from rookery.experiments.machinery.claims import Lead, all_lead, lead, together
from rookery.experiments.machinery.curves import average, averages, ends, ends_by, reached, select
from rookery.experiments.machinery.drawing import by_method, draw, name_lines
from rookery.experiments.machinery.numbers import SPLITS, Figures, chosen_words, listed, mean, means

# What the paper leaves open: the server steps of SimFBO and ShroFBO, as a multiple of the paper's γ, and the rate of
# FedNest and LFedNest. By the search, for each method and split.
RATES = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3)
CHOSEN: dict[tuple[str, str], float] = {
    **{(method, split): 1.7 for method in shared.BASE for split in SPLITS},
    ("FedNest", "i.i.d."): 0.1,
    ("FedNest", "non-i.i.d."): 0.1,
    ("LFedNest", "i.i.d."): 0.1,
    ("LFedNest", "non-i.i.d."): 0.003,
}
# The second variant: γ as the paper has it for ASFBO, and the rate that the FedNest authors publish.
PUBLISHED: dict[str, float] = {"SimFBO": 1.0, "ShroFBO": 1.0, "FedNest": 0.01, "LFedNest": 0.01}
BASELINES = tuple(PUBLISHED)
GIVEN, BY_SEARCH, BY_PUBLICATION = "given", "searched", "published"  # where a method's steps come from
SEEDS = (0, 1, 2, 3, 4)
IID_SEEDS = (*SEEDS, 5, 6, 7, 10, 11, 12, 13, 14)  # where the methods are closer
NEW_SEEDS = tuple(range(15, 27))  # of ASFBO and LA-ASFBO, i.i.d.: fixed after the others had been looked at


def fig1_run(quick: bool, method: str, split: str, steps: str, scale: float = 1.0) -> Config:
    """One method with steps from one source; `scale` as in `algorithm`."""
    seeds: tuple[int, ...] = SEEDS
    if split == "i.i.d." and steps != BY_PUBLICATION:
        seeds = (*IID_SEEDS, *NEW_SEEDS) if method in shared.OURS else IID_SEEDS
    name = f"{method}, {split}" + (", published steps" if steps == BY_PUBLICATION else "")
    labels = {"method": method, "split": split, "steps": steps}
    size: dict[str, Any] = {"every": 5, "seeds": seeds[:1]} if quick else {"every": 2, "seeds": seeds}
    own = shared.algorithm(method, quick, scale)
    return shared.representation(quick, method, split, own, name=name, labels=labels, **size)


def fig1_runs(quick: bool) -> list[Config]:
    """Six methods on two splits, and the baselines with published steps."""
    given = [fig1_run(quick, m, split, GIVEN) for m in shared.OURS for split in SPLITS]
    searched = [fig1_run(quick, *pair, BY_SEARCH, scale) for pair, scale in CHOSEN.items()]
    published = [fig1_run(quick, m, split, BY_PUBLICATION, PUBLISHED[m]) for m in BASELINES for split in SPLITS]
    return given + searched + published


def fig1_tried(quick: bool, method: str, split: str, scale: float) -> Config:
    """One value of a baseline's free step, on seeds that are not reported."""
    name = f"search: {method}, {split}, {'γ times' if method in shared.BASE else 'rate'} {scale:g}"
    size: dict[str, Any] = {"seeds": shared.SEARCH_SEEDS, "rounds": 300, "every": 100}
    if quick:
        size = {"seeds": shared.SEARCH_SEEDS[-1:], "rounds": 10, "every": 10}
    return shared.representation(quick, method, split, shared.algorithm(method, quick, scale), name=name, **size)


def _with(results: pd.DataFrame, steps: str = BY_SEARCH) -> pd.DataFrame:
    """The runs of our methods, and of the baselines with these steps."""
    return results[results["steps"].isin([GIVEN, steps])]


PANELS = {  # and what part of the axis is shown
    "train_loss": ("training loss", (0.05, 0.35)),
    "loss": ("test loss", (0.05, 0.35)),
    "train_accuracy": ("training accuracy", (0.9, 0.99)),
    "accuracy": ("test accuracy", (0.9, 0.98)),
}


def fig1_picture(results: pd.DataFrame) -> Figure:
    """I.i.d. above, non-i.i.d. below: losses and accuracies by rounds."""
    results = _with(results)
    results = results[(results["round"] > 0) & (results["round"] % 20 == 0)]
    fig, axes = report.figure(2, len(PANELS), width=4.8 * len(PANELS), height=7.2)
    for row, split in enumerate(SPLITS):
        for ax, (metric, (words, limits)) in zip(axes[row], PANELS.items(), strict=True):
            draw(ax, select(results, split=split), "round", metric, by_method(shared.METHODS), markevery=6)
            ax.set_ylim(*limits)
            report.label(ax, "rounds" if row else "", words, split)
            name_lines(ax)
    return fig


CONVERGED = 0.85
LEVELS = (0.9, 0.93, 0.95, 0.96, 0.97)
TOLERANCE = 1.05  # of a count of rounds or exchanges


def fig1_thinned(results: pd.DataFrame) -> pd.DataFrame:
    """Keep every evaluation of ASFBO and LA-ASFBO; of the others those of the first 20 rounds, every 20 rounds, in the
    last tenth and where the mean over the seeds reaches a level. Accuracies are counts of 10,000 images, so four digits
    are exact."""
    digits = dict.fromkeys(PANELS, 4)
    results = results.round(digits)
    rounds = results["round"]
    kept = results["method"].isin(shared.OURS) | (rounds <= 20) | (rounds % 20 == 0) | (rounds > 0.9 * rounds.max())
    for run, own in results.groupby("run"):
        reaching = [reached(average(own, m), level) for m in ("train_accuracy", "accuracy") for level in LEVELS]
        kept |= (results["run"] == run) & rounds.isin(reaching)
    return results.loc[kept, ["run", "method", "split", "steps", "seed", "round", "exchanges", *digits]]


claim = Claims()


@claim("I.i.d., all six converge (they end at 85 % or more); searched steps.", "Sec. 6.2")
def all_converge(results: pd.DataFrame) -> Finding:
    own = means(ends_by(_with(results), "method", shared.METHODS, split="i.i.d."))
    return Finding(min(own) >= CONVERGED, {"lowest end": min(own), f"end, {listed(shared.METHODS)}": own})


def first(results: pd.DataFrame, split: str, steps: str = BY_SEARCH) -> Finding:
    """ASFBO and LA-ASFBO reach every level that any method reaches, and they reach it no later than any baseline (times
    TOLERANCE), on training and on test images."""
    figures: Figures = {}
    later: list[float] = []
    count = 0
    for metric, words in (("train_accuracy", "training"), ("accuracy", "test")):
        mean_curves = {m: average(_with(results, steps), metric, method=m, split=split) for m in shared.METHODS}
        counts = {m: [reached(own, level) for level in LEVELS] for m, own in mean_curves.items()}
        table = [(level, each) for level, *each in zip(LEVELS, *counts.values(), strict=True) if np.isfinite(min(each))]
        count += len(table)
        later += [100 * level for level, each in table if max(each[:2]) > TOLERANCE * min(each[2:])]
        figures |= {f"rounds to {listed(LEVELS)} {words} accuracy, {m}": own for m, own in counts.items()}
    figures = {"levels at which both are first, and all levels": [count - len(later), count], **figures}
    return Finding(not later, figures, f"It is earlier up to {max(later):g} %." if later else "")


def highest(results: pd.DataFrame, split: str) -> Finding:
    """Both end above every baseline by more than the margin, on training and on test images."""
    leads: dict[str, Lead] = {}
    for metric in ("accuracy", "train_accuracy"):
        own = ends_by(_with(results), "method", shared.METHODS, metric, split=split)
        leads |= {f"{PANELS[metric][0]}, {m} over {b}": lead(own[m], own[b]) for m in shared.OURS for b in BASELINES}
    return all_lead(leads)


def lowest(results: pd.DataFrame, split: str) -> Finding:
    """Both end below every baseline by more than the margin, on training and on test images."""
    leads: dict[str, Lead] = {}
    for metric in ("loss", "train_loss"):
        own = ends_by(_with(results), "method", shared.METHODS, metric, split=split)
        leads |= {f"{PANELS[metric][0]}, {m} under {b}": lead(own[b], own[m]) for m in shared.OURS for b in BASELINES}
    return all_lead(leads)


for split in SPLITS:
    both = f"{split.capitalize()}, ASFBO and LA-ASFBO"
    fewest = f"{both} reach 90 to 97 % in the fewest rounds (within 5 %);"
    claim(f"{fewest} searched steps.", "Sec. 6.2", split=split)(first)
    claim(f"{fewest} published steps.", split=split, steps=BY_PUBLICATION)(first)
    claim(f"{both} end highest, on training and test images; searched steps.", "Sec. 6.2", split=split)(highest)
    claim(f"{both} end with the lowest loss on training and test images; searched steps.", split=split)(lowest)


@claim(
    "On both splits they generalize better: the smallest gap of training to test accuracy; searched steps.", "Sec. 6.2"
)
def generalize(results: pd.DataFrame) -> Finding:
    leads: dict[str, Lead] = {}
    for split in SPLITS:
        own = partial(ends_by, _with(results), "method", shared.METHODS, split=split)
        test, train = own("accuracy"), own("train_accuracy")
        gaps = {m: train[m] - test[m] for m in shared.METHODS}
        leads |= {f"{split}, {m} and {b}": lead(gaps[b], gaps[m]) for m in shared.OURS for b in BASELINES}
    return all_lead(leads, "baseline's gap less theirs")


def lfednest_fails(results: pd.DataFrame, steps: str) -> Finding:
    """Non-i.i.d., LFedNest ends below CONVERGED."""
    end = ends(results, method="LFedNest", split="non-i.i.d.", steps=steps)
    return Finding(mean(end) < CONVERGED, {"end, each seed": end})


FAILS = "Non-i.i.d., LFedNest fails (it ends below 85 %);"
claim(f"{FAILS} searched steps.", "Sec. 6.2", steps=BY_SEARCH)(lfednest_fails)
claim(f"{FAILS} published steps.", steps=BY_PUBLICATION)(lfednest_fails)


def accelerated(results: pd.DataFrame, split: str) -> Finding:
    """On average over the rounds, LA-ASFBO's test accuracy is higher than ASFBO's by more than the margin. At the end
    it is not lower by more than the margin. I.i.d. on the NEW_SEEDS alone."""
    used = results[results["seed"].isin(NEW_SEEDS)] if split == "i.i.d." and results["seed"].nunique() > 1 else results
    whole, end = (
        lead(measure(used, method="LA-ASFBO", split=split), measure(used, method="ASFBO", split=split))
        for measure in (averages, ends)
    )
    figures = {"lead of LA-ASFBO, mean over the rounds, and the margin": whole, "the same at the end": end}
    return Finding(together([whole.holds, end.holds is not False]), figures, LOOKED if split == "i.i.d." else "")


LOOKED = (
    "Five and then 13 seeds had been looked at and decided nothing; the claim is judged on the 12 seeds fixed after "
    "that, alone. An earlier run of these seeds, different by rounding only, had a lead of .06 points."
)
claim("I.i.d., LA-ASFBO is slightly better than ASFBO.", "Sec. 6.2", split="i.i.d.")(accelerated)
claim("Non-i.i.d., LA-ASFBO is faster than ASFBO.", "Sec. 6.2", split="non-i.i.d.")(accelerated)


fig1 = Experiment(
    **description(
        "asfbo-fig1",
        globals(),
        seeds=len(SEEDS),
        iid_seeds=len(IID_SEEDS),
        most_seeds=len(IID_SEEDS) + len(NEW_SEEDS),
        chosen=chosen_words(CHOSEN),
    ),
    runs=fig1_runs,
    picture=fig1_picture,
    claims=tuple(claim),
    family=shared.FAMILY,
    search=lambda quick: [
        fig1_tried(quick, method, split, scale)
        for method in BASELINES
        for scale in ((shared.FACTORS if method in shared.BASE else RATES)[: 1 if quick else None])
        for split in SPLITS
    ],
    grid=shared.scale_grid(("method", "split"), "train_accuracy", fig1_tried),
    thinned=fig1_thinned,
    headlines=lambda results: [
        Headline(f"{m}, non-i.i.d., {steps} steps", "", ends(results, method=m, split="non-i.i.d.", steps=steps))
        for m, steps in (("ASFBO", GIVEN), ("LA-ASFBO", GIVEN), ("ShroFBO", BY_SEARCH), ("ShroFBO", BY_PUBLICATION))
    ],
)
