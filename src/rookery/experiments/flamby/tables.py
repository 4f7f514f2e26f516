"""What both of FLamby's tables share: its strategies, its published numbers, and ours beside them."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import ceil
from typing import Any

import numpy as np
import optax
import pandas as pd
from matplotlib.figure import Figure

from rookery import report
from rookery.algorithms import FedAvg, FedProx, Scaffold
from rookery.algorithms.server_optimizer import FedOpt, with_server_optimizer
from rookery.experiments.machinery import Claims, Config, Finding, Headline
from rookery.experiments.machinery.claims import lead
from rookery.experiments.machinery.drawing import below
from rookery.experiments.machinery.numbers import Figures, mean, two_errors
from rookery.language.fed import Algorithm
from rookery.tasks.task import Task

SEEDS = (42, 43, 44, 45, 46)
UPDATES, QUICK_UPDATES = 100, 3  # local steps of a round
STRATEGIES = ("FedAvg", "FedProx", "Scaffold", "FedAdam", "FedYogi", "FedAdagrad", "Cyclic")
Ends = dict[tuple[str, str], np.ndarray]


@dataclass(frozen=True)
class Adam:
    """`optax.adam` as a record, for the fingerprint of a run."""

    step: float

    @property
    def init(self) -> Any:
        """As in optax."""
        return optax.adam(self.step).init

    @property
    def update(self) -> Any:
        """As in optax."""
        return optax.adam(self.step).update


@dataclass(frozen=True)
class Benchmark:
    """A data set of FLamby, with its settings.

    Attributes:
        task: task(train=..., seed=...) makes the task.
        metric: accuracy or concordance.
        clients: the clients' names in words, by their names in the metrics, in FLamby's order.
        rows: training rows of each client, by its name.
        batch: rows of a minibatch.
        rounds: of the strategies.
        epochs, adam: passes and step of local and pooled training.
        local: η, for each strategy.
        proximal: μ of FedProx.
        server: η_s, for each strategy with an optimizer at the server.
        published: FLamby's numbers, by method and test, one for each of the SEEDS.
    """

    task: Callable[..., Task]
    metric: str
    clients: Mapping[str, str]
    rows: Mapping[str, int]
    batch: int
    rounds: int
    epochs: int
    adam: float
    local: Mapping[str, float]
    proximal: float
    server: Mapping[str, float]
    published: Mapping[tuple[Any, ...], tuple[float, ...]]

    @property
    def methods(self) -> dict[str, str]:
        """The methods in the order of the table, and their names in words."""
        alone = {client: f"{name} alone" for client, name in self.clients.items()}
        return {"pooled": "pooled training", **alone, **{name: name for name in STRATEGIES}}

    @property
    def tests(self) -> dict[str, str]:
        """The test sets and their names in words."""
        return {**self.clients, "pooled": "pooled test"}

    def runs(self, quick: bool) -> list[Config]:
        """Every method; a few of them when quick."""
        few = ("pooled", "FedAvg", "FedAdam", "Cyclic")
        return [self.config(quick, method) for method in (few if quick else self.methods)]

    def config(self, quick: bool, method: str, **changes: Any) -> Config:
        """One method with FLamby's settings."""
        strategy = method in STRATEGIES
        cyclic = ceil(self.rounds / len(self.clients))
        rounds = (cyclic if method == "Cyclic" else 2 if quick else self.rounds) if strategy else 1
        return Config(
            name=self.methods.get(method, method),
            labels={"method": method},
            task=self.task,
            settings={"train": next(iter(self.clients)) if method == "Cyclic" else "clients" if strategy else method},
            algorithm=self.strategy(quick, method) if strategy else self.alone(quick, method),
            rounds=rounds,
            every=1 if method == "Cyclic" else rounds,
            seeds=SEEDS[:2] if quick else SEEDS,
        ).but(**changes)

    def alone(self, quick: bool, client: str) -> Algorithm:
        """Local or pooled training: Adam on one client, for as many steps as FLamby takes."""
        rows = sum(self.rows.values()) if client == "pooled" else self.rows[client]
        steps = QUICK_UPDATES if quick else self.epochs * ceil(rows / self.batch)
        return FedAvg(local_steps=steps, batch_size=self.batch, optimizer=Adam(self.adam))

    def strategy(self, quick: bool, method: str) -> Algorithm:
        """A strategy; Cyclic is FedAvg with one client."""
        steps = QUICK_UPDATES if quick else UPDATES
        common: dict[str, Any] = {"step": self.local[method], "local_steps": steps, "batch_size": self.batch}
        if method == "FedProx":
            return FedProx(**common, proximal=self.proximal)
        if method == "Scaffold":
            return Scaffold(**common)
        if method not in self.server:
            return FedAvg(**common)
        rule: Any = method.removeprefix("Fed").lower()
        flamby = FedOpt(rule, self.server[method], decay=0.999, floor=1e-8, start=0.0)
        return with_server_optimizer(FedAvg(**common), upper=flamby)

    def turns(self, seed: int) -> int:
        """How many of the rounds are the first client's in FLamby's Cyclic, whose order is drawn for each cycle."""
        generator, n = np.random.default_rng(seed), len(self.clients)
        order = np.concatenate([generator.permutation(n) for _ in range(ceil(self.rounds / n))])
        return int(np.sum(order[: self.rounds] == 0))

    def ends(self, results: pd.DataFrame) -> Ends:
        """The metric at the end, one for each seed, by method and test."""
        last = results.groupby("run")["round"].transform("max")
        turns = {seed: self.turns(seed) for seed in results["seed"].unique()}
        at = last.where(results["method"] != "Cyclic", results["seed"].map(turns))
        by_method = results[results["round"] == at].groupby("method", sort=False)
        columns = {test: f"{self.metric}_{test}" for test in self.clients} | {"pooled": f"pooled_{self.metric}"}
        return {
            (str(method), test): own[column].to_numpy().round(5)
            for method, own in by_method
            for test, column in columns.items()
        }

    def beside(self, results: pd.DataFrame) -> dict[tuple[str, str], tuple[np.ndarray, np.ndarray]]:
        """Our numbers and FLamby's, seed by seed; nothing where it has none for these seeds."""
        seeds = results["seed"].unique()
        if not set(seeds) <= set(SEEDS):
            return {}
        theirs = lambda key: np.array([self.published[key][SEEDS.index(seed)] for seed in seeds])
        return {key: (ours, theirs(key)) for key, ours in self.ends(results).items() if key in self.published}


def _spread(values: np.ndarray) -> list[float]:
    return [mean(values), float(np.std(values, ddof=1))]


def agrees(results: pd.DataFrame, benchmark: Benchmark, method: str) -> Finding:
    """All means of one method are within the margin of FLamby's, seed by seed from the same starts."""
    both = {test: pair for (own, test), pair in benchmark.beside(results).items() if own == method}
    if not both or results["seed"].nunique() < 2:
        return Finding(None, {}, "FLamby has no numbers to compare these runs with.")
    leads = {test: lead(*pair) for test, pair in both.items()}
    far = max(leads, key=lambda test: abs(leads[test].mean) / (leads[test].error + 1e-9))
    figures: Figures = {f"farthest, {benchmark.tests[far]}: difference, margin": leads[far]}
    for test, (ours, theirs) in both.items():
        figures[f"{benchmark.tests[test]}: ours, ±; FLamby's, ±"] = [*_spread(ours), *_spread(theirs)]
    return Finding(all(own.holds is None for own in leads.values()), figures)


def nearly_all(results: pd.DataFrame, benchmark: Benchmark, least: int) -> Finding:
    """So many means are within one of FLamby's standard deviations, without Cyclic."""
    both = {key: pair for key, pair in benchmark.beside(results).items() if len(pair[0]) > 1}
    far = {key: (abs(mean(ours) - mean(theirs)) - 1e-6, theirs) for key, (ours, theirs) in both.items()}  # rounded
    near = [gap <= np.std(theirs, ddof=1) for key, (gap, theirs) in far.items() if key[0] != "Cyclic"]
    errors = [gap <= two_errors(theirs) for gap, theirs in far.values()]
    figures = {
        "means within one standard deviation, of all": [sum(near), len(near)],
        "with Cyclic: within two standard errors, of all": [sum(errors), len(errors)],
    }
    return Finding(sum(near) >= least if len(far) == len(benchmark.published) else None, figures)


def claims(benchmark: Benchmark, where: str, count: str) -> Claims:
    """A claim for each method."""
    claim = Claims()
    for method, words in benchmark.methods.items():
        own = "Cyclic, run as what it is (the first client alone)" if method == "Cyclic" else words
        text = f"{own[:1].upper()}{own[1:]}: all {count} means are within the margin of FLamby's."
        claim(text, where, benchmark=benchmark, method=method)(agrees)
    return claim


def picture(results: pd.DataFrame, benchmark: Benchmark, baseline: Mapping[str, float]) -> Figure:
    """Means and two standard errors of every method, a panel for each test; FLamby's below them, hollow."""
    own, found = benchmark.beside(results), benchmark.ends(results)
    methods = [method for method in benchmark.methods if (method, "pooled") in found]
    fig, axes = report.figure(1, len(benchmark.tests), width=1.9 * len(benchmark.tests) + 1.6, height=5.2)
    for ax, (test, words) in zip(axes[0], benchmark.tests.items(), strict=True):
        for place, method in enumerate(methods):
            look = {"fmt": "o", "capsize": 2, "markersize": 5}
            ours, theirs = found[method, test], own.get((method, test), (None, None))[1]
            ax.errorbar(mean(ours), place - 0.14, xerr=two_errors(ours), color=report.BLUE, **look)
            if theirs is not None:
                error = two_errors(theirs)
                ax.errorbar(mean(theirs), place + 0.14, xerr=error, color=report.VERMILION, mfc="white", **look)
        if test in baseline:
            ax.axvline(baseline[test], color=report.GREY, linestyle="--", zorder=0)
        ax.set_yticks(range(len(methods)), [benchmark.methods[m] for m in methods] if ax is axes[0, 0] else [])
        ax.set_ylim(len(methods) - 0.5, -0.5)
        ax.grid(axis="x", color="#e4e4e4", linewidth=0.8)
        report.label(ax, benchmark.metric, "", words)
    axes[0, 0].plot([], [], "o", color=report.BLUE, label="Rookery")
    axes[0, 0].plot([], [], "o", color=report.VERMILION, mfc="white", label="FLamby, published")
    if baseline:
        axes[0, 0].plot([], [], "--", color=report.GREY, label="always the commoner class")
    below(fig, axes[0, 0], 3)
    return fig


def headlines(results: pd.DataFrame, benchmark: Benchmark) -> list[Headline]:
    """The mean over the clients, for each method."""
    rows = []
    own = benchmark.beside(results)
    for method, words in benchmark.methods.items():
        pairs = [own[method, client] for client in benchmark.clients if (method, client) in own]
        if pairs:
            ours, theirs = (np.mean(values, axis=0) for values in zip(*pairs, strict=True))
            told = "{:.4f} ± {:.4f}".format(*_spread(theirs)).replace("0.", ".")
            rows.append(Headline(f"{words}, mean over clients", told, ours))
    return rows
