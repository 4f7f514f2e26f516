"""Fig. 2 and 4 of FedDRO: fair training on Adult, and the number of local steps."""

from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from rookery import report
from rookery.algorithms import GCIVR, ParallelSGD
from rookery.experiments.feddro.images import GRID, Drop, helps_then_saturates, paper_method
from rookery.experiments.machinery import Claims, Config, Experiment, Finding, Grid, Headline, description
from rookery.experiments.machinery.claims import lead, together
from rookery.experiments.machinery.curves import ends, ends_by, select, values
from rookery.experiments.machinery.drawing import below, by_method, draw, spread, ticks
from rookery.experiments.machinery.numbers import Figures, keyed, listed, mean, means
from rookery.language.fed import Algorithm
from rookery.tasks.fairness import fairness

SETTINGS: dict[str, dict[str, Any]] = {
    "all": {"strength": 0.1, "smoothing": 0.1, "reference": "all"},
    "positives": {"strength": 1.0, "smoothing": 0.1, "reference": "positives"},
}
WORDS = {"all": "against all samples, a = γ = .1", "positives": "against the positives, a = 1, γ = .1"}
FAIR = ("FedDRO", "DS-FedDRO", "GCIVR", "unconstrained")
LENGTH, QUICK_LENGTH = 20_000, 60  # local steps, where all runs have as many
ROUNDS, QUICK_ROUNDS = 1_000, 20  # synchronisations, where all runs have as many
STUDIES = {"rounds": f"{ROUNDS:,} synchronisations of x", "steps": f"{LENGTH:,} local steps"}
ANCHOR = 50  # GCIVR's steps from one full batch to the next
SERVER = 1.4
FAIR_MOMENTA = (0.00001, 0.00003, 0.0001, 0.0003, 0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 0.9)  # β
SWEEP = (1, 2, 5, 10, 20, 50)  # I
CHOSEN = keyed(Path(__file__).with_name("adult.csv"), 4)  # the step and β, by the search


def fair_method(method: str, step: Any, momentum: float, local: int) -> Algorithm:
    """A method on Adult."""
    if method in FAIR[:2]:
        return paper_method(method, step, momentum, local, SERVER)
    if method == "GCIVR":
        return GCIVR(step=step, anchor_every=ANCHOR, batch_size=16)
    return ParallelSGD(step=step, batch_size=16)


def fair(
    quick: bool, method: str, setting: str, local: int = 1, study: str = "steps", given: Any = None, **changes: Any
) -> Config:
    """One method with the local steps, or the synchronisations, that all runs of its study have.

    `given` are the step and β, instead of the chosen ones.
    """
    step, momentum = given or CHOSEN[study, method, setting, local]
    if study == "rounds":
        rounds = QUICK_ROUNDS if quick else ROUNDS
    else:
        rounds = (QUICK_LENGTH if quick else LENGTH) // (ANCHOR if method == "GCIVR" else local)
    return Config(
        name=f"{method}, {setting}, I = {local}" + (f", {ROUNDS} synchronisations" if study == "rounds" else ""),
        labels={"method": method, "setting": setting, "local": local, "study": study},
        task=fairness,
        settings={**SETTINGS[setting], "data": "synthetic" if quick else "adult", "equal": True},
        algorithm=fair_method(method, Drop(step, rounds), momentum, local),
        rounds=rounds,
        every=max(1, rounds // 50),
        seeds=(0,) if quick else (0, 1, 2, 3, 4),
    ).but(**changes)


def _tried(quick: bool, method: str, setting: str, local: int = 1, study: str = "steps") -> list[Config]:
    """The step and β of one method: the paper's steps, on a seed that is not reported."""
    whole = (local, study) == (1, "steps")
    grid, momenta = (list(GRID), list(FAIR_MOMENTA)) if whole else (list(GRID[1:]), list(FAIR_MOMENTA[4:-2]))
    if quick:
        grid, momenta = grid[-1:], momenta[-1:]
    words = f"search: {method}, {setting}, I = {local}, {study}"
    pairs = product(grid, momenta if "DRO" in method else (0.0,))
    run = partial(fair, quick, method, setting, local=local, study=study, seeds=(9,))
    return [run(given=pair, name=f"{words}, step {pair[0]:g}, β = {pair[1]:g}") for pair in pairs]


def _score(search: pd.DataFrame) -> pd.Series:
    """The objective at the end; for the unconstrained run, which has another one, the training accuracy."""
    return (-search["risk"]).where(search["method"] != "unconstrained", search["train_accuracy"])


KEYS = ("study", "method", "setting", "local")
FAIR_GRID = Grid(r"step (?P<step>\S+), β = (?P<β>\S+)$", KEYS, _score, fixed=("step",))
PAIRS = [(method, setting) for setting in SETTINGS for method in FAIR]  # of Fig. 2


def _swept(quick: bool) -> list[tuple[str, str, int, str]]:
    """The methods, readings, I and budgets of Fig. 4."""
    runs = product(STUDIES, FAIR[:2], SWEEP[:2] if quick else SWEEP)
    return [(method, "positives", local, study) for study, method, local in runs]


def fig2_picture(results: pd.DataFrame) -> Figure:
    """Test accuracy and violation against exchanges, for both readings."""
    fig, axes = report.figure(2, 2, width=10.5, height=7.4)
    for column, setting in enumerate(SETTINGS):
        own = select(results[results["exchanges"] > 1], setting=setting)
        for row, (metric, words) in enumerate((("accuracy", "test accuracy"), ("tpr_gap", "TPR gap, test"))):
            draw(axes[row, column], own, "exchanges", metric, by_method(FAIR), markevery=8)
            axes[row, column].set_xscale("log")
            title = f"Constraint {WORDS[setting]}" if not row else ""
            report.label(axes[row, column], "exchanges" if row else "", words if not column else "", title)
        axes[0, column].set_ylim(0.835, 0.862)
        axes[1, column].set_ylim(0, 0.13)
    below(fig, axes[0, 0], 4)
    return fig


def fig4_picture(results: pd.DataFrame) -> Figure:
    """Where the objective ends, against I, for both budgets."""
    fig, axes = report.figure(1, 2, width=10.5, height=4.4)
    for ax, (study, words) in zip(axes[0], STUDIES.items(), strict=True):
        for method in FAIR[:2]:
            each = _risks(results, study, method)
            spread(ax, [*each], [*each.values()], **report.style(method), label=method)
        ax.set_xscale("log")
        ticks(ax, [*each])
        report.label(ax, "local steps I", "objective at the end, training set", f"After {words}")
        report.legend(ax)
    return fig


def _fair_ends(results: pd.DataFrame, metric: str, setting: str) -> dict[str, np.ndarray]:
    return ends_by(results, "method", FAIR, metric, setting=setting)


def _fair_figures(results: pd.DataFrame, setting: str) -> Figures:
    metrics = {"tpr_gap": "test TPR gap", "accuracy": "test accuracy"}
    return {f"{words}, {listed(FAIR)}": means(_fair_ends(results, m, setting)) for m, words in metrics.items()}


def _above_gcivr(results: pd.DataFrame, setting: str) -> Finding:
    """Both end more accurate than GCIVR, by more than the margin; their gaps at most .02 above its."""
    accuracy, gap = (_fair_ends(results, metric, setting) for metric in ("accuracy", "tpr_gap"))
    more = {method: lead(accuracy[method], accuracy["GCIVR"]) for method in FAIR[:2]}
    parts = [one.holds for one in more.values()]
    parts += [mean(gap[method]) <= mean(gap["GCIVR"]) + 0.02 for method in FAIR[:2]]
    figures = {f"lead in accuracy, {method} over GCIVR, and the margin": one for method, one in more.items()}
    return Finding(together(parts), figures | _fair_figures(results, setting))


claim_2, claim_4 = Claims(), Claims()
text = "FedDRO and DS-FedDRO: more accurate than GCIVR at a comparable violation (within .02)."
claim_2(text, "Fig. 2", setting="all")(_above_gcivr)
claim_2("The same with the constraint against the positives.", setting="positives")(_above_gcivr)


@claim_2("Against the positives, the gap falls to less than half, at a loss of at most two points of accuracy.")
def lower_violation(results: pd.DataFrame) -> Finding:
    figures = _fair_figures(results, "positives")
    gap, accuracy = figures.values()
    holds = max(gap[:2]) < 0.5 * gap[-1] and min(accuracy[:2]) > accuracy[-1] - 0.02
    return Finding(holds, figures)


def _risks(results: pd.DataFrame, study: str, method: str) -> dict[int, np.ndarray]:
    """The objective at the end, by I."""
    return ends_by(results, "local", values(results, "local"), "risk", study=study, method=method)


@claim_4("Larger I helps for the same synchronisations of x, then it saturates.", "Fig. 4")
def locals_help(results: pd.DataFrame) -> Finding:
    """See `helps_then_saturates`, for the objective."""
    return helps_then_saturates({m: _risks(results, "rounds", m) for m in FAIR[:2]}, "objective", sign=-1)


fig2 = Experiment(
    **description("feddro-fig2", globals()),
    runs=lambda quick: [fair(quick, *pair) for pair in PAIRS],
    picture=fig2_picture,
    claims=tuple(claim_2),
    family="feddro-adult",
    search=lambda quick: [config for pair in PAIRS for config in _tried(quick, *pair)],
    grid=FAIR_GRID,
    headlines=lambda results: [
        Headline(f"{m}, accuracy", "", ends(results, method=m, setting="all")) for m in ("DS-FedDRO", "GCIVR")
    ],
)

fig4 = Experiment(
    **description("feddro-fig4", globals(), locals=listed(SWEEP)),
    runs=lambda quick: [fair(quick, *run) for run in _swept(quick)],
    picture=fig4_picture,
    claims=tuple(claim_4),
    family="feddro-adult",
    search=lambda quick: [config for run in _swept(quick) for config in _tried(quick, *run)],
    grid=FAIR_GRID,
    headlines=lambda results: [
        Headline(f"DS-FedDRO, I = {i}, objective", "", ends(results, "risk", study="rounds", method=FAIR[1], local=i))
        for i in (1, 10, 50)
    ],
)
