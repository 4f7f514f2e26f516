"""Every bilevel method with one exchange a round on five problems, by exchanges and by work."""

from typing import Any

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from rookery import report
from rookery.experiments.choice import setting
from rookery.experiments.choice.setting import FIRST, METHODS, ONE, PROBLEMS, SECOND
from rookery.experiments.machinery import Claims, Config, Experiment, Finding, Headline, description
from rookery.experiments.machinery.claims import Lead, all_lead, lead
from rookery.experiments.machinery.drawing import below
from rookery.experiments.machinery.numbers import two_errors

PRODUCT = 2.5  # gradients that a product with a second derivative counts as
FEW = ("SOBA", "FedBiO", "F2SA", "FedMSA", "FedNest", "FedAvg")  # when quick
WORST = {"distance": 1e6, "loss": 1e2, "accuracy": 0.0}  # what a run that has left the finite numbers counts as
Ends = dict[tuple[str, str], np.ndarray]  # by problem and method


def runs(quick: bool) -> list[Config]:
    """Every method on every problem that it applies to; six when quick."""
    methods = [m for m in METHODS if not quick or m in FEW]
    return [setting.config(quick, p, m) for p in PROBLEMS for m in methods if setting.plays(m, p)]


def thinned(results: pd.DataFrame) -> pd.DataFrame:
    """One column for the metric that a problem reports, and those of the costs."""
    value = pd.Series(np.nan, results.index)
    for name, own in PROBLEMS.items():
        value = value.where(results["problem"] != name, results[own.metric])
    kept = ["run", "problem", "method", "seed", "round", "exchanges", "gradients", "products", "seconds"]
    return results[kept].assign(seconds=results["seconds"].round(3), value=value, auc=results["auc"])


def work(rows: pd.DataFrame, product: float = PRODUCT) -> pd.Series:
    """Gradients of all clients, with a product counted as so many."""
    return rows["gradients"] + product * rows["products"]


def budgets(results: pd.DataFrame) -> pd.DataFrame:
    """The exchanges and the work of SOBA's runs, for each problem."""
    soba = results[results["method"] == "SOBA"]
    return soba.assign(work=work(soba)).groupby("problem")[["exchanges", "work"]].max()


def ended(results: pd.DataFrame, by: str = "exchanges", column: str = "value") -> Ends:
    """The metric when the exchanges, or the work, of SOBA's runs are spent, for each seed; a distance as its log10."""
    most = results["problem"].map(budgets(results)[by])
    spent = results["exchanges"] if by == "exchanges" else work(results)
    within = results[spent <= 1.001 * most]
    runs = within.groupby(["problem", "method", "seed"], sort=False)[column]
    last = runs.last().where(runs.count() == runs.size())  # a run that has left the finite numbers has none
    found = {}
    for problem, method in dict.fromkeys(zip(results["problem"], results["method"], strict=True)):
        metric = PROBLEMS[problem].metric
        own = last.loc[problem, method].fillna(WORST[metric]).to_numpy()
        own = own if metric == "accuracy" else np.minimum(own, WORST[metric])
        found[problem, method] = np.log10(own) if metric == "distance" else own
    return found


def ahead(ends: Ends, problem: str, first: str, second: str) -> Lead:
    """How much better the first method is than the second: points of accuracy, of loss, or powers of ten."""
    sign = PROBLEMS[problem].sign
    return lead(sign * ends[problem, first], sign * ends[problem, second])


def among(ends: Ends, problem: str, methods: tuple[str, ...]) -> list[str]:
    """Those of the methods that were run."""
    return [m for m in methods if (problem, m) in ends]


def best(ends: Ends, problem: str, methods: tuple[str, ...]) -> str:
    """The method with the best mean."""
    sign = PROBLEMS[problem].sign
    return max(among(ends, problem, methods), key=lambda m: float(np.mean(sign * ends[problem, m])))


claim = Claims()


@claim(
    "On the quadratic with all clients, SOBA ends closer to x* than each method with five local steps in one exchange."
)
def one_step_has_no_bias(results: pd.DataFrame) -> Finding:
    ends, local = ended(results), tuple(m for m in ONE if m not in setting.ALIASES)
    return all_lead({m: ahead(ends, "exact", "SOBA", m) for m in among(ends, "exact", local)}, "powers of ten")


@claim("On the quadratic with all clients, SOBA ends closer to x* than every first-order method.")
def penalties_have_bias(results: pd.DataFrame) -> Finding:
    ends = ended(results)
    return all_lead({m: ahead(ends, "exact", "SOBA", m) for m in among(ends, "exact", FIRST)}, "powers of ten")


@claim("With cohorts and minibatches, the best method with products ends closer to x* than every first-order method.")
def noise_hides_little(results: pd.DataFrame) -> Finding:
    ends = ended(results)
    top = best(ends, "noisy", SECOND)
    return all_lead({m: ahead(ends, "noisy", top, m) for m in among(ends, "noisy", FIRST)}, f"powers of ten, {top}'s")


@claim("In hyper-representation, after equal work, F2SA ends above SOBA and FedBiO: gradients alone are cheaper.")
def gradients_are_cheaper(results: pd.DataFrame) -> Finding:
    ends = ended(results, "work")
    return all_lead({m: ahead(ends, "layers", "F2SA", m) for m in ("SOBA", "FedBiO")})


@claim("In hyper-representation FedAvg, which trains both layers on all data, ends above every bilevel method.")
def the_ceiling(results: pd.DataFrame) -> Finding:
    ends = ended(results)
    leads = {m: ahead(ends, "layers", "FedAvg", m) for m in among(ends, "layers", METHODS[:-1])}
    return all_lead(leads, "FedAvg's lead")


@claim("In data cleaning every method with products ends above FedAvg on the labels as they are.")
def cleaning_helps(results: pd.DataFrame) -> Finding:
    ends = ended(results)
    return all_lead({m: ahead(ends, "cleaning", m, "FedAvg") for m in among(ends, "cleaning", SECOND)})


@claim(
    "After equal exchanges, FedNest, with ten of them a round, is behind the best method with one, on every problem."
)
def exchanges_cost(results: pd.DataFrame) -> Finding:
    ends = ended(results)
    tops = {p: best(ends, p, ONE) for p in PROBLEMS}
    return all_lead({f"{top}, {PROBLEMS[p].words}": ahead(ends, p, top, "FedNest") for p, top in tops.items()})


def picture(results: pd.DataFrame) -> Figure:
    """Draw a panel for each problem: the metric after equal exchanges, and after equal work."""
    fig, axes = report.figure(1, len(PROBLEMS), width=16.0, height=5.4)
    looks: dict[str, dict[str, Any]] = {
        "exchanges": {"fmt": "o", "color": report.BLUE}, "work": {"fmt": "s", "color": report.ORANGE, "mfc": "white"}
    }  # fmt: skip
    for by, look in looks.items():
        ends = ended(results, by)
        methods = [m for m in METHODS if any(method == m for _, method in ends)]
        for ax, (problem, own) in zip(axes[0], PROBLEMS.items(), strict=True):
            each = {m: ends[problem, m] for m in among(ends, problem, tuple(methods))}
            places = [-methods.index(m) - 0.3 * (by == "work") for m in each]
            errors = [two_errors(values) for values in each.values()]
            middles = [float(np.mean(values)) for values in each.values()]
            ax.errorbar(middles, places, xerr=errors, label=f"after equal {by}", markersize=5, **look)
            ax.set_yticks([-i for i in range(len(methods))], methods if ax is axes[0, 0] else [""] * len(methods))
            ax.grid(axis="x", color="#e4e4e4", linewidth=0.8)
            words = {"distance": "log₁₀ ‖x − x*‖²", "loss": "test loss", "accuracy": "test accuracy"}[own.metric]
            report.label(ax, words, "", own.words.replace(", ", ",\n"))
            ax.set_ylim(-len(methods) + 0.3, 0.7)
            if own.metric == "accuracy":
                ax.set_xlim(0.4, 1.0)
    below(fig, axes[0, 0], 2)
    return fig


def headlines(results: pd.DataFrame) -> list[Headline]:
    """The best method with one exchange on each problem; on quadratics log10 of the distance."""
    ends = ended(results)
    tops = {p: best(ends, p, ONE) for p in PROBLEMS}
    name = lambda p: "log10 of the distance" if PROBLEMS[p].metric == "distance" else PROBLEMS[p].metric
    each = {f"{m}, {PROBLEMS[p].words}, {name(p)}": ends[p, m] for p, m in tops.items()}
    return [Headline(words, "", values) for words, values in each.items()]


problems = Experiment(
    **description("choice-problems", globals()),
    runs=runs,
    picture=picture,
    claims=tuple(claim),
    grid=setting.GRID,
    thinned=thinned,
    headlines=headlines,
)
