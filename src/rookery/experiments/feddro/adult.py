"""Fig. 2 and 4 of FedDRO: fair training on Adult, and the number of local steps."""

from functools import partial
from typing import Any

import numpy as np
import pandas as pd
from matplotlib import colormaps
from matplotlib.figure import Figure

from rookery import report
from rookery.algorithms import GCIVR, DSFedDRO, FedDRO, ParallelSGD
from rookery.experiments.feddro.images import ENDS, GRID, Drop
from rookery.experiments.machinery.claims import Claims, Finding, lead, together
from rookery.experiments.machinery.curves import ends, ends_by, select, values
from rookery.experiments.machinery.drawing import below, by_method, draw, ticks
from rookery.experiments.machinery.experiment import Config, Experiment, Headline
from rookery.experiments.machinery.grid import Grid
from rookery.experiments.machinery.numbers import Figures, listed, mean, means
from rookery.experiments.papers import FEDDRO_PAPER
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
Chosen = tuple[float, float]  # the step and β
# Chosen by the search: for each reading, and in Fig. 4 for each I.
FAIR_CHOSEN: dict[tuple[str, str], Chosen] = {
    ("FedDRO", "all"): (0.1, 0.9),
    ("FedDRO", "positives"): (0.1, 0.01),
    ("DS-FedDRO", "all"): (0.1, 0.9),
    ("DS-FedDRO", "positives"): (0.1, 0.0001),
    ("GCIVR", "all"): (0.1, 0.0),
    ("GCIVR", "positives"): (0.1, 0.0),
    ("unconstrained", "all"): (0.1, 0.0),
    ("unconstrained", "positives"): (0.1, 0.0),
}
_SWEPT: dict[tuple[str, str], tuple[Chosen, ...]] = {  # in the order of SWEEP
    ("rounds", "FedDRO"): ((0.1, 0.03), (0.1, 0.1), (0.1, 0.1), (0.1, 0.03), (0.1, 0.03), (0.05, 0.01)),
    ("rounds", "DS-FedDRO"): ((0.1, 0.003), (0.1, 0.001), (0.1, 0.001), (0.1, 0.001), (0.1, 0.001), (0.05, 0.001)),
    ("steps", "FedDRO"): ((0.1, 0.01), (0.1, 0.03), (0.1, 0.03), (0.1, 0.03), (0.1, 0.03), (0.05, 0.03)),
    ("steps", "DS-FedDRO"): ((0.1, 0.0001), (0.1, 0.001), (0.1, 0.001), (0.1, 0.001), (0.1, 0.001), (0.1, 0.001)),
}
SWEEP_CHOSEN = {(*key, i): pair for key, own in _SWEPT.items() for i, pair in zip(SWEEP, own, strict=True)}


def fair_method(method: str, step: Any, momentum: float, local: int) -> Algorithm:
    """A method on Adult."""
    if method == "FedDRO":
        return FedDRO(step=step, momentum=momentum, local_steps=local, batch_size=16)
    if method == "DS-FedDRO":
        two: dict[str, Any] = {"server_step": SERVER, "server_inner_step": SERVER}
        return DSFedDRO(step=step, momentum=momentum, local_steps=local, batch_size=16, **two)
    if method == "GCIVR":
        return GCIVR(step=step, anchor_every=ANCHOR, batch_size=16)
    return ParallelSGD(step=step, batch_size=16)


def fair(
    quick: bool, method: str, setting: str, chosen: Chosen, local: int = 1, study: str = "steps", **changes: Any
) -> Config:
    """One method with the local steps, or the synchronisations, that all runs of its study have."""
    if study == "rounds":
        rounds = QUICK_ROUNDS if quick else ROUNDS
    else:
        rounds = (QUICK_LENGTH if quick else LENGTH) // (ANCHOR if method == "GCIVR" else local)
    return Config(
        name=f"{method}, {setting}, I = {local}" + (f", {ROUNDS} synchronisations" if study == "rounds" else ""),
        labels={"method": method, "setting": setting, "local": local, "study": study},
        task=fairness,
        settings={**SETTINGS[setting], "data": "synthetic" if quick else "adult", "equal": True},
        algorithm=fair_method(method, Drop(chosen[0], rounds), chosen[1], local),
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
    return [
        fair(quick, method, setting, (step, momentum), local, study, name=f"{words}, step {step:g}, β = {momentum:g}",
             seeds=(9,))
        for step in grid
        for momentum in (momenta if "DRO" in method else (0.0,))
    ]  # fmt: skip


def fig2_search(quick: bool) -> list[Config]:
    """Every method, in both readings."""
    return [config for setting in SETTINGS for method in FAIR for config in _tried(quick, method, setting)]


def fig4_search(quick: bool) -> list[Config]:
    """Both of the paper's methods, for every I and both budgets."""
    return [
        config
        for study in STUDIES
        for method in FAIR[:2]
        for local in (SWEEP[:2] if quick else SWEEP)
        for config in _tried(quick, method, "positives", local, study)
    ]


def _score(search: pd.DataFrame) -> pd.Series:
    """The objective at the end; for the unconstrained run, which has another one, the training accuracy."""
    return (-search["risk"]).where(search["method"] != "unconstrained", search["train_accuracy"])


FAIR_GRID = Grid(
    pattern=r"step (?P<step>\S+), β = (?P<β>\S+)$",
    keys=("study", "method", "setting", "local"),
    score=_score,
    fixed=("step",),
)


def fig2_runs(quick: bool) -> list[Config]:
    """Four methods, two readings of the constraint."""
    return [fair(quick, m, setting, FAIR_CHOSEN[m, setting]) for setting in SETTINGS for m in FAIR]


def fig4_runs(quick: bool) -> list[Config]:
    """Both of the paper's methods over I, for both budgets."""
    return [
        fair(quick, method, "positives", SWEEP_CHOSEN[study, method, local], local, study)
        for study in STUDIES
        for method in FAIR[:2]
        for local in (SWEEP[:2] if quick else SWEEP)
    ]


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
        axes[0, column].set_ylim(0.82, 0.862)
        axes[1, column].set_ylim(-0.005, 0.13)
    below(fig, axes[0, 0], 4)
    return fig


def fig4_picture(results: pd.DataFrame) -> Figure:
    """The objective against synchronisations for each I; below, where it ends against I, for both budgets."""
    locals_ = values(results, "local")
    fig, axes = report.figure(2, 2, width=11.0, height=7.6)
    shades = colormaps["viridis"](np.linspace(0.0, 0.85, len(locals_)))
    for ax, method in zip(axes[0], FAIR[:2], strict=True):
        own = select(results[results["round"] > 0], study="rounds", method=method)
        lines = {
            f"I = {local}": {"local": local, "look": {"color": shade, "linestyle": "-", "marker": ""}}
            for local, shade in zip(locals_, shades, strict=True)
        }
        draw(ax, own, "round", "risk", lines)
        ax.set_xscale("log")
        last = own[own["round"] == own["round"].max()]["risk"]
        ax.set_ylim(float(last.min()) - 0.01, float(last.max()) + 0.12)
        report.label(ax, "synchronisations of x", "objective, training set", f"{method}, β chosen for each I")
        report.legend(ax)
    for ax, (study, words) in zip(axes[1], STUDIES.items(), strict=True):
        for method in FAIR[:2]:
            risks = _risks(results, study, method)
            deviations = [np.std(risk) for risk in risks.values()]
            ax.errorbar(locals_, means(risks), deviations, **report.style(method), label=method, capsize=3)
        ax.set_xscale("log")
        ticks(ax, locals_)
        report.label(ax, "local steps I", "objective at the end", f"After {words}")
        report.legend(ax)
    return fig


def _fair_ends(results: pd.DataFrame, metric: str, setting: str) -> dict[str, np.ndarray]:
    return ends_by(results, "method", FAIR, metric, setting=setting)


def _fair_figures(results: pd.DataFrame, setting: str) -> Figures:
    metrics = {"accuracy": "test accuracy", "tpr_gap": "test TPR gap", "risk": "objective"}
    return {f"{words}, {listed(FAIR)}": means(_fair_ends(results, m, setting)) for m, words in metrics.items()}


claim_2, claim_4 = Claims(), Claims()


def _above_gcivr(results: pd.DataFrame, setting: str) -> Finding:
    """Both end more accurate than GCIVR, by more than the margin; their gaps at most .02 above its."""
    accuracy, gap = (_fair_ends(results, metric, setting) for metric in ("accuracy", "tpr_gap"))
    figures = _fair_figures(results, setting)
    parts: list[bool | None] = []
    for method in FAIR[:2]:
        more = lead(accuracy[method], accuracy["GCIVR"])
        figures[f"lead in accuracy, {method} over GCIVR, and the margin"] = more
        parts += [more.holds, mean(gap[method]) <= mean(gap["GCIVR"]) + 0.02]
    return Finding(together(parts), figures)


claim_2(
    "FedDRO and DS-FedDRO: more accurate than GCIVR at a comparable violation (within .02).",
    "Fig. 2",
    set_up="A tie: the three are within .0003 of each other. In this reading a group's positives are compared with all "
    "samples, and with a = γ = .1 the constraint hardly changes the classifier. The paper trains on a fifth of the "
    "data, with noisy groups.",
)(partial(_above_gcivr, setting="all"))
claim_2(
    "The same with the constraint against the positives.",
    "Fig. 2, our reading",
    "own",
    set_up="DS-FedDRO is, with a smaller gap and a lower objective; FedDRO is not: with I = 1 and batches of 16 its "
    "inner value is noisy, and the seeds end far apart.",
)(partial(_above_gcivr, setting="positives"))


@claim_2("The violation is below the unconstrained run's.", "Fig. 2")
def lower_violation(results: pd.DataFrame) -> Finding:
    """Against all samples, as in the paper: a gap below the unconstrained run's by more than the margin."""
    gap = _fair_ends(results, "tpr_gap", "all")
    falls = {method: lead(gap["unconstrained"], gap[method]) for method in FAIR[:2]}
    figures = _fair_figures(results, "all")
    figures |= {f"gap, unconstrained less {method}, and the margin": fall for method, fall in falls.items()}
    return Finding(together([fall.holds for fall in falls.values()]), figures)


@claim_2("Compared with the positives, the gap falls to half at a small loss of accuracy.")
def lower_violation_ours(results: pd.DataFrame) -> Finding:
    """Against the positives, a = 1: at most half the gap at 2 points of accuracy."""
    by_name = lambda metric: dict(zip(FAIR, means(_fair_ends(results, metric, "positives")), strict=True))
    accuracy, gap, free = by_name("accuracy"), by_name("tpr_gap"), "unconstrained"
    holds = all(gap[m] < 0.5 * gap[free] and accuracy[m] > accuracy[free] - 0.02 for m in FAIR[:2])
    return Finding(holds, _fair_figures(results, "positives"))


def _risks(results: pd.DataFrame, study: str, method: str) -> dict[int, np.ndarray]:
    """The objective at the end, by I."""
    return ends_by(results, "local", values(results, "local"), "risk", study=study, method=method)


@claim_4("Larger I helps for the same synchronisations of x, then it saturates.", "Fig. 4")
def locals_help(results: pd.DataFrame) -> Finding:
    """At equal synchronisations the objective falls from I = 1 to the middle of the sweep by more than the
    margin, and from there to its end by less than half of that."""
    figures: Figures = {}
    holds = True
    for method in FAIR[:2]:
        own = _risks(results, "rounds", method)
        locals_, risks = [*own], [*own.values()]
        middle = len(own) // 2
        (fall, error), (more, _) = lead(risks[0], risks[middle]), lead(risks[middle], risks[-1])
        figures[f"objective, {method}, I = {listed(locals_)}"] = means(own)
        words = f"its fall to I = {locals_[middle]}, the margin, and the fall from there, {method}"
        figures[words] = [fall, error, more]
        holds = holds and fall > error and more < 0.5 * fall
    return Finding(holds, figures)


@claim_4(
    "At the same number of local steps I costs nothing once β is chosen for it: DS-FedDRO ends within .001 at every I, "
    "FedDRO no higher than at I = 1."
)
def locals_cost(results: pd.DataFrame) -> Finding:
    one, two = (np.array(means(_risks(results, "steps", method))) for method in FAIR[:2])
    at = listed(values(results, "local"))
    figures = {f"objective at the end, {m}, I = {at}": own for m, own in zip(FAIR[:2], (one, two), strict=True)}
    return Finding(bool(np.abs(two - two[0]).max() < 0.001 and one[1:].max() <= one[0]), figures)


ADULT = (
    "UCI Adult, official split, 8 clients with equal shares, i.i.d.; logistic regression on 120 binary columns; groups "
    "White, Black, other; ε = .01. Batches of 16, the step a tenth in the last quarter."
)
ADULT_DIFFERENCES = (
    "The paper adopts GCIVR's set-up, which trains on a random fifth of train and test together, with noisy group "
    "columns: here the official split and the true groups.",
    "Not given: β, the number of rounds, when the step falls. The step (from the paper's four values) and β were "
    "searched by the objective at the end, on a seed that is not reported (`search.csv`).",
    "What a communication round of FedDRO is the paper does not say: synchronisations of x, exchanges and bytes are "
    "three different axes, and all three are in `results.csv`.",
)


def _chosen_words(chosen: dict[Any, Chosen]) -> str:
    """The values that a search chose: the step, then β where the method has one."""
    each = {", ".join(map(str, key)): pair for key, pair in chosen.items()}
    return "; ".join(f"{key}: {step:g}" + (f", {beta:g}" if beta else "") for key, (step, beta) in each.items())


fig2 = Experiment(
    name="feddro-fig2",
    title="equal opportunity on Adult",
    paper=f"{FEDDRO_PAPER}: Figure 2.",
    setup=(
        f"{ADULT} {LENGTH:,} local steps, I = 1. GCIVR: a full batch every {ANCHOR} steps; DS-FedDRO: both server "
        f"steps {SERVER}; unconstrained: parallel SGD on the loss alone. Step and β by method and reading: "
        f"{_chosen_words(FAIR_CHOSEN)}. Two readings of the constraint: against the loss of all samples with a = γ = "
        ".1, as in the paper; and, ours, against the positives of all groups with a = 1, γ = .1. *TPR gap*: the "
        f"largest of TPR_all − TPR_j. {ENDS}"
    ),
    runs=fig2_runs,
    picture=fig2_picture,
    claims=tuple(claim_2),
    differences=(
        *ADULT_DIFFERENCES,
        "Two chosen values are at the end of their grid. The step .1 is the largest of the paper's own. Against all "
        "samples β = .9 is the largest of ours, where β makes no difference (.3329 from .01 to .9, FedDRO).",
    ),
    family="feddro-adult",
    search=fig2_search,
    grid=FAIR_GRID,
    headlines=lambda results: [
        Headline(f"{m}, accuracy", "", ends(results, method=m, setting="all")) for m in ("DS-FedDRO", "GCIVR")
    ],
)

fig4 = Experiment(
    name="feddro-fig4",
    title="the number of local steps on Adult",
    paper=f"{FEDDRO_PAPER}: Figure 4.",
    setup=(
        f"{ADULT} The constraint against the positives, a = 1, γ = .1; I = {', '.join(map(str, SWEEP))}; every I for "
        f"{STUDIES['rounds']}, and for {STUDIES['steps']}. Step and β by budget, method and I: "
        f"{_chosen_words(SWEEP_CHOSEN)}. {ENDS}"
    ),
    runs=fig4_runs,
    picture=fig4_picture,
    claims=tuple(claim_4),
    differences=(
        *ADULT_DIFFERENCES,
        "The values of I are not given: ours. Step and β are chosen for each, from the steps .01, .05 and .1 and from "
        "β between .001 and .1 (for I = 1 and equal local steps from the grid of `feddro-fig2`). DS-FedDRO's β is the "
        "smallest for every I > 1. A wider search for it on the same seed (`wider.csv`, β from .00001 to .03; 201 of "
        "its 208 runs) has the lowest objective at a β between .00003 and .003, .0015 below that of the chosen values "
        "at I = 50 and 1,000 synchronisations, .0008 or less below it elsewhere: the claims were not run again.",
    ),
    family="feddro-adult",
    search=fig4_search,
    grid=FAIR_GRID,
    headlines=lambda results: [
        Headline(f"DS-FedDRO, I = {i}, objective", "", ends(results, "risk", study="rounds", method=FAIR[1], local=i))
        for i in (1, 10, 50)
    ],
)
