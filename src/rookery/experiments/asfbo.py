"""The ASFBO paper's unequal local work, and its rates. MNIST, Fig. 1, is in `asfbo_mnist`."""

import dataclasses
import functools
from functools import partial
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from rookery import report
from rookery.algorithms import ASFBO
from rookery.experiments.asfbo_mnist import (
    BASE,
    DIFFERENCES,
    FACTORS,
    FAMILY,
    OURS,
    PAPER,
    READING,
    SCALE,
    SEARCH_SEEDS,
    SERVER,
    SETUP,
    SINGLE_LOOP,
    algorithm,
    chosen_words,
    finite,
    representation,
    wider,
)
from rookery.experiments.claims import Claim, Finding, Lead, lead, together
from rookery.experiments.curves import Figures, below, curves, draw, ends, mean, reached, select, ticks
from rookery.experiments.experiment import Config, Experiment, Headline
from rookery.experiments.grid import Grid
from rookery.tasks import hyperrep, quadratic
from rookery.tasks.hyperrep import test_metrics
from rookery.tasks.images import digit_images, mnist_images
from rookery.tasks.quadratic import solution
from rookery.tasks.task import Task

# Unequal local work.

UNEQUAL = (1, 2, 3, 5, 7, 9, 12, 15, 20, 26)  # τ_i; the labels are sorted over the clients, so they belong to classes
WORK = {"fixed": "τ_i fixed, 1 to 26", "drawn": "τ_i drawn from 5..15"}
HETERO_CHOSEN = {  # the factor of γ, by the search
    ("SimFBO", "fixed"): 3.0,
    ("SimFBO", "drawn"): 3.0,
    ("ShroFBO", "fixed"): 1.7,
    ("ShroFBO", "drawn"): 3.0,
}
HELD_OUT = 1000  # images by which the model is chosen
HETERO_SEEDS = (0, 1, 2, 3, 4, 5, 6, 7, *range(10, 17))  # 8 and 9 are the search's
DIVERGED = 0.6  # what is below this accuracy has


def held_out(seed: int, data: str, first: tuple[int, int], data_dir: Any = None, **settings: Any) -> Task:
    """The task, evaluated on the training images after the first ones, too, which no client has.

    `chosen_accuracy` is the test accuracy of the model with the highest `validation_accuracy` so far.
    """
    task = hyperrep(seed=seed, data=data, first=first, data_dir=data_dir, **settings)
    images, labels, *_ = (mnist_images if data == "mnist" else digit_images)(seed, data_dir)
    validate = test_metrics(images[first[0] :][:HELD_OUT], labels[first[0] :][:HELD_OUT])
    best = {"chosen_validation": -1.0, "chosen_accuracy": 0.0}

    def evaluate(x: Any, y: Any) -> dict[str, Any]:
        found = task.evaluate(x, y)
        validation = validate(x, y)
        if float(validation["accuracy"]) > best["chosen_validation"]:
            best["chosen_validation"] = float(validation["accuracy"])
            best["chosen_accuracy"] = float(found["accuracy"])
        return {**found, **{f"validation_{name}": value for name, value in validation.items()}, **best}

    return dataclasses.replace(task, evaluate=evaluate)


def unequal(quick: bool, method: str, work: str, scale: float, **changes: Any) -> Config:
    """One of the single-loop methods on 2000 images over ten clients, all of which take part."""
    steps: Any = np.array(UNEQUAL) if work == "fixed" else (5, 15)
    config = representation(
        quick,
        method,
        "non-i.i.d.",
        algorithm=algorithm(method, quick, scale, local_steps=steps),
        **{"name": f"{method}, {WORK[work]}", "seeds": HETERO_SEEDS[:1] if quick else HETERO_SEEDS, **changes},
        labels={"method": method, "work": work},
    )
    small = {"data": "digits", "width": 32, "first": (1000, 200)} if quick else {"data": "mnist", "first": (2000, 1000)}
    settings = {**config.settings, **small, "clients": 10, "equal": True}
    rounds, every = (20, 5) if quick else (300, 5)
    return dataclasses.replace(config, task=held_out, settings=settings, cohort=None, rounds=rounds, every=every)


def hetero_runs(quick: bool) -> list[Config]:
    """Four methods, two kinds of local work."""
    methods = list(SINGLE_LOOP)[::2] if quick else SINGLE_LOOP
    return [unequal(quick, m, work, HETERO_CHOSEN.get((m, work), 1.0)) for m in methods for work in WORK]


def hetero_tried(quick: bool, method: str, work: str, scale: float) -> Config:
    """One factor of the server steps, on seeds that are not reported."""
    return unequal(
        quick, method, work, scale, name=f"search: {method}, {WORK[work]}, γ times {scale:g}",
        seeds=SEARCH_SEEDS[-1:] if quick else SEARCH_SEEDS,
    )  # fmt: skip


def hetero_search(quick: bool) -> list[Config]:
    """The server steps of SimFBO and ShroFBO."""
    scales = FACTORS[3:4] if quick else FACTORS
    return [hetero_tried(quick, m, work, scale) for m in BASE for work in WORK for scale in scales]


HETERO_GRID = Grid(SCALE, ("method", "work"), finite("chosen_validation"), wider=wider(hetero_tried))


def hetero_picture(results: pd.DataFrame) -> Figure:
    """Test accuracy against rounds, for each kind of local work, of the runs that last; that of the chosen models."""
    fig, axes = report.figure(1, 3, width=15.0, height=4.4)
    methods = [m for m in SINGLE_LOOP if m in set(results["method"])]
    for ax, (work, words) in zip(axes[0], WORK.items(), strict=False):
        runs = select(results, work=work)
        lasts = runs.groupby(["run", "seed"])["accuracy"].transform("last") >= DIVERGED
        left = runs[~lasts].groupby(["run", "seed"]).ngroups
        draw(ax, runs[lasts], "round", "accuracy", {m: {"method": m} for m in methods}, markevery=8)
        ax.set_ylim(0.6, 0.92)
        title = f"{words}, without {left} ending below {DIVERGED:g}" if left else words
        report.label(ax, "rounds", "test accuracy" if work == "fixed" else "", title)
    ax, lowest = axes[0, 2], 0.81
    for place, work in enumerate(WORK):
        for j, method in enumerate(methods):
            own = _chosen_models(results, work)[method]
            at = np.full(len(own), place + 0.2 * (j - 1.5))
            look = report.style(method)
            ax.plot(at, own, color=look["color"], marker=look["marker"], linestyle="", alpha=0.5)
            ax.plot(at[:1], [np.median(own)], color=look["color"], marker="_", markersize=20, markeredgewidth=2.5)
            if failed := int((own < lowest).sum()):
                ax.text(at[0], lowest + 0.001, f"{failed} below", color=look["color"], ha="center", fontsize=8)
    ax.set_xticks(range(len(WORK)), list(WORK.values()))
    ax.set_ylim(lowest, 0.89)
    report.label(ax, "", "", "The chosen models, each seed, and medians")
    below(fig, axes[0, 0], 4)
    return fig


def _chosen_models(results: pd.DataFrame, work: str) -> dict[str, np.ndarray]:
    """The test accuracy of the model with the highest validation accuracy, for each seed."""
    own = {
        m: curves(results, "chosen_accuracy", method=m, work=work) for m in SINGLE_LOOP if m in set(results["method"])
    }
    return {m: _last(each) for m, each in own.items()}


def _last(runs: list[pd.Series]) -> np.ndarray:
    return np.array([float(c.iloc[-1]) for c in runs])


def _reweighted(results: pd.DataFrame, work: str) -> Finding:
    """The models of ShroFBO, ASFBO and LA-ASFBO are above SimFBO's by more than the margin."""
    own = _chosen_models(results, work)
    figures: Figures = {f"the chosen model, {', '.join(own)}": [mean(each) for each in own.values()]}
    leads = {m: lead(each, own["SimFBO"]) for m, each in own.items() if m != "SimFBO"}
    figures |= {f"lead over SimFBO, and the margin, {m}": [*pair] for m, pair in leads.items()}
    last = [mean(ends(results, method=m, work=work)) for m in own]
    words = {True: "is", False: "is not", None: "is undecided"}
    note = "; ".join(f"{m} {words[pair.holds]}" for m, pair in leads.items()) + " (by the margin)."
    holds = together([pair.holds for pair in leads.values()])
    finals = {m: _last(curves(results, method=m, work=work)) for m in own}
    return Finding(holds, figures | {"the last models": last}, "" if holds else note + _without_diverged(own, finals))


def _without_diverged(own: dict[str, np.ndarray], finals: dict[str, np.ndarray]) -> str:
    """How many runs diverge before they have a model, and later; the leads over SimFBO of the others' chosen models.

    `own` are the accuracies of the chosen models, `finals` those after the last round.
    """
    failed = {m: int((each < DIVERGED).sum()) for m, each in own.items()}
    if not any(failed.values()):
        return ""
    leads: dict[str, Lead] = {}
    for method in (m for m in own if m != "SimFBO"):
        lasting = (own[method] >= DIVERGED) & (own["SimFBO"] >= DIVERGED)
        if lasting.sum() > 1:
            leads[method] = lead(own[method][lasting], own["SimFBO"][lasting])
    later = {m: int(((each >= DIVERGED) & (finals[m] < DIVERGED)).sum()) for m, each in own.items()}
    counts = lambda each: " and ".join(f"{count} of {m}" for m, count in each.items() if count)
    note = f" Of {len(own['SimFBO'])} runs each, {counts(failed)} diverge early, at the factor that the search chose"
    note += f", so that even the chosen model is below {DIVERGED:g}"
    note += f" (later, after the chosen model: {counts(later)})." if any(later.values()) else "."
    if not leads:
        return note
    told = ", ".join(f"{m} {more.mean:+.4f} ± {more.error:.4f}" for m, more in leads.items())
    behind = [m for m, more in leads.items() if more.holds is False]
    then = f" {' and '.join(behind)} {'is' if len(behind) == 1 else 'are'} behind then." if behind else ""
    return f"{note} The leads on the other seeds: {told}.{then}"


hetero = Experiment(
    name="asfbo-hetero",
    title="hyper-representation with unequal local work",
    paper=f"{PAPER}, Sec. 6.1 (which names the data; no figure shows the runs).",
    setup=(
        f"{SETUP}Here: the first 2000 training images and the first 1000 test images; ten clients with two label "
        f"shards each, all taking part in every round; τ_i drawn from 5..15, or fixed at {UNEQUAL} for the ten "
        f"clients; 300 rounds, evaluated every 5. The model is chosen by its accuracy on the {HELD_OUT} training "
        "images after these, which no client has. The factor of γ, chosen by the search in the same way: "
        f"{chosen_words(HETERO_CHOSEN)}. {READING} The curves are of the runs that end at {DIVERGED:g} or more."
    ),
    runs=hetero_runs,
    picture=hetero_picture,
    claims=(
        Claim("The re-weighted methods' models are better than SimFBO's (fixed τ_i).", "from the theory, Sec. 5",
              partial(_reweighted, work="fixed"), "theory"),
        Claim("The re-weighted methods' models are better than SimFBO's (drawn τ_i).", "from the theory, Sec. 5",
              partial(_reweighted, work="drawn"), "theory"),
    ),
    differences=(
        *DIFFERENCES[:1],
        "The paper names only the images of this experiment. Clients, participation, τ_i, rounds, the choice of the "
        f"model and the {len(HETERO_SEEDS)} seeds (fixed before the last ten were run) are ours; all methods overfit, "
        "so that the last model says little.",
        "The server steps of SimFBO and ShroFBO were searched on seeds that are not reported, by the accuracy of the "
        "chosen model on the images it is chosen by (`search.csv`).",
    ),
    family=FAMILY,
    search=hetero_search,
    grid=HETERO_GRID,
    headlines=lambda results: [
        Headline(f"{m}, fixed τ_i, chosen model", "", own) for m, own in _chosen_models(results, "fixed").items()
    ],
)  # fmt: skip


# The rates, on quadratics whose optimum and hypergradient are known.

CLIENTS, SAMPLES, NOISE = 32, 16, 1.0
COHORTS = (2, 4, 8, 16, 32)
LOCAL = (1, 4, 16)  # τ̄
STEPS = tuple(0.2 * 2.5**-k for k in range(6))  # τ̄·γ, the same for all three variables
EPSILON = 1e-2  # of ‖∇Φ‖²
BETWEEN = 20  # rounds between two evaluations
LIMIT_STEPS = (1, 2, 4, 8, 12)
FINENESS = (1.0, 0.5, 0.25)  # of all the steps, in the runs about the limit
FEW = 8  # the cohort of the runs with few clients


@functools.cache
def _stochastic() -> Task:
    return quadratic(clients=CLIENTS, samples=SAMPLES, noise=NOISE, heterogeneity=1.0, seed=5, replace=True)


def stochastic_task(seed: int) -> Task:
    """The same problem for every seed, which is the run's alone."""
    return _stochastic()


def limit_task(seed: int) -> Task:
    """Five clients with exact oracles; the distances to the optimum of the weights p_i and of the weights p_i τ_i."""
    task = quadratic(clients=len(LIMIT_STEPS), seed=seed)
    weighted = solution(quadratic(clients=len(LIMIT_STEPS), seed=seed, weights=LIMIT_STEPS)).x
    evaluate = lambda x, y: task.evaluate(x, y) | {"distance_weighted": float(np.sum((np.asarray(x) - weighted) ** 2))}
    return dataclasses.replace(task, evaluate=evaluate)


def rated(quick: bool, cohort: int, local: int, step: float, study: str) -> Config:
    """ASFBO with a fixed server step γ = step/τ̄ on the stochastic problem."""
    gamma: dict[str, Any] = {name: step / local for name in SERVER}
    small: dict[str, Any] = {"upper_step": 1e-4, "lower_step": 1e-4, "linear_step": 1e-4}
    return Config(
        name=f"{study}: P = {cohort}, τ = {local}, γτ = {step:.3g}",
        labels={"study": study, "cohort": cohort, "local": local, "step": step, "method": "ASFBO"},
        task=stochastic_task,
        algorithm=ASFBO(**small, **gamma, server="fixed", momentum=0.9, local_steps=local, batch_size=1),
        rounds=200 if quick else 5000,
        cohort=cohort,
        every=BETWEEN,
        seeds=(0,) if quick else (0, 1, 2),
        float64=True,
    )


def limit(quick: bool, method: str, fineness: float) -> Config:
    """A method with unequal τ_i, run until it stands still."""
    local = {name: 0.01 * fineness for name in ("upper_step", "lower_step", "linear_step")}
    server = {name: 0.02 * fineness for name in SERVER}
    more = {"bounds": None, "server": "fixed"} if method in OURS else {}
    return Config(
        name=f"limit: {method}, steps times {fineness:g}",
        labels={"study": "limit", "cohort": 5, "local": 0, "step": fineness, "method": method},
        task=limit_task,
        algorithm=SINGLE_LOOP[method](**local, **server, **more, local_steps=np.array(LIMIT_STEPS)),
        rounds=200 if quick else round(4000 / fineness),
        every=50,
        seeds=(0,) if quick else (0, 1, 2),
        float64=True,
    )


def rates_runs(quick: bool) -> list[Config]:
    """The cohort's size at one step; rounds to ε over steps, for τ̄ with all clients and with few; the limits."""
    sizes = COHORTS[::4] if quick else COHORTS  # as few programs as will do
    cohorts = [rated(quick, size, 4, STEPS[2], "cohort") for size in sizes]
    local_steps = LOCAL[1:2] if quick else LOCAL
    steps = STEPS[:2] if quick else STEPS
    saved = [
        rated(quick, cohort, local, step, "τ") for cohort in (FEW, CLIENTS) for local in local_steps for step in steps
    ]
    limits = [limit(quick, method, fineness) for method in SINGLE_LOOP for fineness in FINENESS]
    return cohorts + saved + limits


def _values(results: pd.DataFrame, study: str, label: str) -> list[Any]:
    return sorted(select(results, study=study)[label].unique())


def _floor(results: pd.DataFrame, **labels: Any) -> float:
    """The mean of ‖∇Φ‖² over the second half of the rounds and the seeds."""
    own = select(results, **labels)
    return float(own[own["round"] > own["round"].max() / 2]["gradient"].mean())


def _rounds(results: pd.DataFrame, cohort: int, local: int) -> float:
    """Rounds until ‖∇Φ‖², over the seeds and the last 40 rounds, is EPSILON, at the best step."""
    best = np.inf
    for _, own in select(results, study="τ", cohort=cohort, local=local).groupby("step"):
        average = own.groupby("round")["gradient"].mean().rolling(2).mean()
        best = min(best, reached(-average.dropna(), -EPSILON))
    return best


def rates_picture(results: pd.DataFrame) -> Figure:
    """The floor against P; rounds to ε against τ̄; the distance to the two optima."""
    fig, axes = report.figure(1, 3, width=14.0, height=4.2)
    left, middle, right = axes[0]
    cohorts, local_steps = _values(results, "cohort", "cohort"), _values(results, "τ", "local")
    left.loglog(cohorts, [_floor(results, study="cohort", cohort=p) for p in cohorts], "o-", color=report.BLUE)
    report.label(left, f"clients in a round, of {CLIENTS}", r"$\|\nabla\Phi\|^2$, second half", "More clients")
    ticks(left, cohorts)
    for cohort, colour in ((CLIENTS, report.BLUE), (FEW, report.VERMILION)):
        rounds = [_rounds(results, cohort, local) for local in local_steps]
        middle.loglog(local_steps, rounds, "o-", color=colour, label=f"{cohort} of {CLIENTS} clients")
    report.label(middle, "local steps τ̄", f"rounds to {EPSILON:g}, at the best step", "More local steps")
    ticks(middle, local_steps)
    report.legend(middle)
    for method in SINGLE_LOOP:
        for metric, line in (("distance", "-"), ("distance_weighted", ":")):
            look = {**report.style(method), "linestyle": line}
            own = [_limit(results, method, fineness, metric) for fineness in FINENESS]
            label = f"{method}, {'p_i' if metric == 'distance' else 'p_i τ_i'}"
            right.loglog(FINENESS, own, **look, label=label)
    report.label(right, "steps, times", r"$\|x - x^*\|^2$ at the end", "Which optimum, with unequal τ_i")
    ticks(right, FINENESS)
    report.legend(right, fontsize=7)
    return fig


def _limit(results: pd.DataFrame, method: str, fineness: float, metric: str) -> float:
    return mean([c.iloc[-1] for c in curves(results, metric, study="limit", method=method, step=fineness)])


def error_falls(results: pd.DataFrame) -> Finding:
    """‖∇Φ‖² in the second half of the rounds falls from each size of the cohort to the next."""
    cohorts = _values(results, "cohort", "cohort")
    floors = [_floor(results, study="cohort", cohort=p) for p in cohorts]
    slope = float(np.polyfit(np.log(cohorts), np.log(floors), 1)[0])
    figures: Figures = {f"floor at P = {', '.join(map(str, cohorts))}": floors, "as a power of P": slope}
    return Finding(bool((np.diff(floors) < 0).all()), figures)


def local_steps_save(results: pd.DataFrame) -> Finding:
    """With all clients, sixteen times the local steps save half of the rounds or more; with few, at most half of that.

    A count is known up to the rounds between two evaluations: the first has to hold for the least gain that they
    allow, the second for the largest.
    """
    local_steps = _values(results, "τ", "local")
    every, few = ([_rounds(results, cohort, local) for local in local_steps] for cohort in (CLIENTS, FEW))
    gain = [every[0] / every[-1], few[0] / few[-1]]
    least, most = (every[0] - BETWEEN) / every[-1], few[0] / max(few[-1] - BETWEEN, 1)
    figures: Figures = {
        f"rounds at τ̄ = {', '.join(map(str, local_steps))}, all clients": every,
        f"the same, {FEW} of {CLIENTS}": few,
        "rounds saved, all and few": gain,
        "the least with all, and the most with few, that the evaluations allow": [least, most],
    }
    holds = np.isfinite([*every, *few]).all() and least >= 2 and most <= least / 2
    return Finding(bool(holds), figures)


def the_limits(results: pd.DataFrame) -> Finding:
    """As the steps shrink SimFBO nears the optimum of p_i τ_i and no other; ShroFBO, ASFBO and LA-ASFBO that of p_i."""
    figures: Figures = {}
    holds = True
    for method in SINGLE_LOOP:
        near, other = ("distance_weighted", "distance") if method == "SimFBO" else ("distance", "distance_weighted")
        towards = [_limit(results, method, fineness, near) for fineness in FINENESS]
        away = _limit(results, method, FINENESS[-1], other)
        holds = holds and towards[-1] < 0.2 * towards[0] and away > 10 * towards[-1]
        figures[f"{method}: to its own optimum as the steps halve, and to the other one"] = [*towards, away]
    return Finding(holds, figures)


rates = Experiment(
    name="asfbo-rates",
    title="clients, local steps, and which optimum, on quadratics",
    paper=f"{PAPER}, Thm 1, Cor. 1 and Sec. 5 (which has no such run).",
    setup=(
        f"Bilevel quadratics with known optimum and hypergradient. *Cohort* and *τ*: {CLIENTS} clients that differ, "
        f"{SAMPLES} noisy samples each, batches of 1, ASFBO with β = .9 and its server step held fixed at γ (the "
        "theory's bounds closed), local steps 10⁻⁴. Rounds to ε are at the best γ of six, from τ̄γ = .2 down by "
        f"factors of 2.5, for each P and τ̄; ε = {EPSILON:g} for ‖∇Φ‖², averaged over the seeds and 40 rounds. "
        f"*Limit*: five clients with exact oracles, τ_i = {LIMIT_STEPS}, local steps .01 and server steps .02, then "
        "half and a quarter of both; three problems."
    ),
    runs=rates_runs,
    picture=rates_picture,
    claims=(
        Claim("The error falls with P.", "Thm 1", error_falls, "theory"),
        Claim(
            "Larger τ̄ saves rounds when all clients take part, far less when few do.",
            "Cor. 1, remarks",
            local_steps_save,
            "theory",
        ),
        Claim(
            "With unequal τ_i SimFBO tends to the optimum of the problem weighted by p_i τ_i, ShroFBO and ASFBO to "
            "that of p_i.",
            "Sec. 4.3",
            the_limits,
            "theory",
        ),
    ),
    differences=("The server's step is fixed in these runs: the theory only asks that it stays between two bounds.",),
)

EXPERIMENTS = (hetero, rates)
