"""An ablation of ASFBO on MNIST: its three switches, and β."""

import itertools
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from rookery import report
from rookery.experiments.asfbo.representation import DIFFERENCES, FAMILY, READING, SETUP, algorithm, representation
from rookery.experiments.machinery.claims import Claims, Finding
from rookery.experiments.machinery.curves import averages, select
from rookery.experiments.machinery.drawing import legend, spread
from rookery.experiments.machinery.experiment import Config, Experiment
from rookery.experiments.machinery.numbers import listed, mean, means
from rookery.experiments.papers import ASFBO_PAPER

DIRECTIONS, AGGREGATIONS, SERVERS = ("gradient", "momentum", "storm"), ("sum", "reweighted"), ("fixed", "adaptive")
SWITCHES = ("direction", "aggregation", "server")
MOMENTA = (0.1, 0.25, 0.5, 0.9)
ABLATION_ROUNDS = 300


def ablated(quick: bool, direction: str, aggregation: str, server: str, momentum: float = 0.25) -> Config:
    """One combination of the three switches, and β."""
    labels: Any = {"direction": direction, "aggregation": aggregation, "server": server, "momentum": momentum}
    name = f"{direction}, {aggregation}, {server}, β = {momentum:g}"
    rounds = 20 if quick else ABLATION_ROUNDS
    own = algorithm("ASFBO", quick, **labels)
    return representation(quick, "ASFBO", "non-i.i.d.", own, name=name, labels=labels, rounds=rounds)


def ablation_runs(quick: bool) -> list[Config]:
    """All combinations at the paper's β, and the two momenta at others."""
    switches = list(itertools.product(DIRECTIONS, AGGREGATIONS, SERVERS))
    if quick:  # one switch at a time
        switches = [(d, a, s) for d, a, s in switches if d == "gradient" or (a, s) == (AGGREGATIONS[1], SERVERS[1])]
    betas = [ablated(quick, d, "reweighted", "adaptive", b) for d in DIRECTIONS[1:] for b in MOMENTA if b != 0.25]
    return [ablated(quick, *switch) for switch in switches] + betas


def ablation_picture(results: pd.DataFrame) -> Figure:
    """The switches' curves, and the ends against β."""
    fig, axes = report.figure(1, 3, width=15.0, height=4.6)
    colours = dict(zip(DIRECTIONS, (report.GREY, report.BLUE, report.GREEN), strict=True))
    at = select(results, momentum=0.25)
    for ax, server in zip(axes[0], SERVERS, strict=False):
        for direction in DIRECTIONS:
            for aggregation, line in zip(AGGREGATIONS, ("--", "-"), strict=True):
                own = select(at, server=server, direction=direction, aggregation=aggregation)
                look: dict[str, Any] = {"color": colours[direction], "linestyle": line, "marker": ""}
                if len(own):
                    report.band(ax, own, "round", "accuracy", label=f"{direction}, {aggregation}", **look)
        ax.set_ylim(0, 1)
        report.label(ax, "communication rounds", "test accuracy", f"{server} server step, β = .25")
    legend(axes[0, 0], 2)
    right = axes[0, 2]
    for direction in DIRECTIONS[1:]:
        over = [_over(results, direction, "reweighted", "adaptive", b) for b in MOMENTA]
        spread(right, MOMENTA, over, color=colours[direction], marker="o", linestyle="-", label=direction)
    report.label(right, "β", "test accuracy, mean over the rounds", "ASFBO and LA-ASFBO")
    legend(right, 2)
    return fig


def _over(results: pd.DataFrame, direction: str, aggregation: str, server: str, momentum: float = 0.25) -> np.ndarray:
    """The mean of the test accuracy over the rounds, for each seed: speed and end in one number."""
    return averages(results, direction=direction, aggregation=aggregation, server=server, momentum=momentum)


def _gains(results: pd.DataFrame, switch: str, off: str, on: str) -> dict[str, np.ndarray]:
    """What a switch adds to the mean accuracy over the rounds, for every setting of the other two, each seed."""
    gains: dict[str, np.ndarray] = {}
    there = {tuple(row) for row in results[[*SWITCHES]].to_numpy()}
    for switches in sorted(there):
        setting = dict(zip(SWITCHES, switches, strict=True))
        changed = setting | {switch: on}
        if setting[switch] == off and tuple(changed.values()) in there:
            others = ", ".join(value for name, value in setting.items() if name != switch)
            gains[f"gain, {others}"] = _over(results, **changed) - _over(results, **setting)
    return gains


def _finding(gains: dict[str, np.ndarray], holds: bool) -> Finding:
    return Finding(holds, {name: mean(gain) for name, gain in gains.items()})


def _alike(results: pd.DataFrame, switch: str, off: str, on: str) -> Finding:
    """Every gain is within half a point."""
    gains = _gains(results, switch, off, on)
    return _finding(gains, max(np.abs(means(gains)), default=1.0) <= 0.005)


claim = Claims()


@claim("Of the switches, momentum alone brings something in every combination.")
def momentum_brings(results: pd.DataFrame) -> Finding:
    """A gain over plain gradients in every combination, with every seed."""
    gains = _gains(results, "direction", "gradient", "momentum")
    return _finding(gains, bool(gains) and all(bool((gain > 0).all()) for gain in gains.values()))


@claim("The adaptive server step gains with plain gradients and with STORM, and loses with momentum.")
def adaptive_brings(results: pd.DataFrame) -> Finding:
    gains = _gains(results, "server", "fixed", "adaptive")
    return _finding(gains, all((mean(gain) > 0) == ("momentum" not in name) for name, gain in gains.items()))


@claim("STORM makes no difference over plain gradients (within half a point).")
def storm_brings(results: pd.DataFrame) -> Finding:
    return _alike(results, "direction", "gradient", "storm")


@claim("Re-weighting makes no difference where all τ_i are drawn alike (within half a point).")
def reweighting_brings(results: pd.DataFrame) -> Finding:
    return _alike(results, "aggregation", "sum", "reweighted")


@claim("β hardly matters (within 2 points).")
def beta_matters_little(results: pd.DataFrame) -> Finding:
    over = {d: [mean(_over(results, d, "reweighted", "adaptive", b)) for b in MOMENTA] for d in DIRECTIONS[1:]}
    holds = all(max(own) - min(own) <= 0.02 for own in over.values())
    return Finding(holds, {f"mean over the rounds at β = {listed(MOMENTA)}, {d}": own for d, own in over.items()})


ablation = Experiment(
    name="asfbo-ablation",
    title="what each switch of ASFBO brings",
    paper=f"{ASFBO_PAPER} (which has no ablation).",
    setup=(
        f"{SETUP}Here: non-i.i.d., {ABLATION_ROUNDS} rounds, evaluated every ten, every combination of the local "
        "direction (gradient, momentum, STORM), the aggregation (sum, re-weighted) and the server's step (fixed, "
        f"adaptive) at β = .25, and the two momenta at other β. {READING} *Gain*: of the mean test accuracy over the "
        "rounds."
    ),
    runs=ablation_runs,
    picture=ablation_picture,
    claims=tuple(claim),
    differences=DIFFERENCES,
    family=FAMILY,
)
