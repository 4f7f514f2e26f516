"""An ablation of ASFBO on MNIST: its three switches, and β."""

import itertools
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from rookery import report
from rookery.experiments.asfbo import representation as shared
from rookery.experiments.machinery import Claims, Config, Experiment, Finding, description
from rookery.experiments.machinery.claims import all_lead, lead
from rookery.experiments.machinery.curves import averages, select
from rookery.experiments.machinery.drawing import draw, name_lines
from rookery.experiments.machinery.numbers import listed, means

DIRECTIONS, AGGREGATIONS, SERVERS = ("gradient", "momentum", "storm"), ("sum", "reweighted"), ("fixed", "adaptive")
MOMENTA = (0.1, 0.25, 0.5, 0.9)


def ablated(quick: bool, direction: str, aggregation: str, server: str, momentum: float = 0.25) -> Config:
    """One combination of the three switches, and β."""
    labels: Any = {"direction": direction, "aggregation": aggregation, "server": server, "momentum": momentum}
    name = f"{direction}, {aggregation}, {server}, β = {momentum:g}"
    rounds = 20 if quick else 300
    own = shared.algorithm("ASFBO", quick, **labels)
    return shared.representation(quick, "ASFBO", "non-i.i.d.", own, name=name, labels=labels, rounds=rounds)


def ablation_runs(quick: bool) -> list[Config]:
    """All combinations at the paper's β, and the two momenta at others."""
    switches = list(itertools.product(DIRECTIONS, AGGREGATIONS, SERVERS))
    if quick:  # one switch at a time
        switches = [(d, a, s) for d, a, s in switches if d == "gradient" or (a, s) == (AGGREGATIONS[1], SERVERS[1])]
    betas = [ablated(quick, d, "reweighted", "adaptive", b) for d in DIRECTIONS[1:] for b in MOMENTA if b != 0.25]
    return [ablated(quick, *switch) for switch in switches] + betas


def ablation_picture(results: pd.DataFrame) -> Figure:
    """The switches' curves at the paper's β."""
    fig, axes = report.figure(1, 2, width=11.0, height=4.6)
    colours = {"gradient": report.GREY, "momentum": report.BLUE, "storm": report.GREEN}
    lines = {
        f"{direction}, {aggregation}": {
            "direction": direction,
            "aggregation": aggregation,
            "look": {"color": colours[direction], "linestyle": line, "marker": ""},
        }
        for direction in DIRECTIONS
        for aggregation, line in (("sum", "--"), ("reweighted", "-"))
    }
    at = results[(results["momentum"] == 0.25) & (results["round"] % 20 == 0)]
    for ax, server in zip(axes[0], SERVERS, strict=True):
        draw(ax, select(at, server=server), "round", "accuracy", lines)
        ax.set_ylim(0.85, 0.97)
        report.label(ax, "rounds", "test accuracy", f"{server} server step, β = .25 (dashed: sum)")
        name_lines(ax)
    return fig


def _gains(results: pd.DataFrame, direction: str) -> dict[str, np.ndarray]:
    """What a direction adds to the mean accuracy over the rounds, for every setting of the other two, each seed."""
    at = select(results, momentum=0.25)
    runs = {labels: own for labels, own in at.groupby(["direction", "aggregation", "server"])}
    gain = lambda *others: averages(runs[direction, *others]) - averages(runs["gradient", *others])
    return {listed(others): gain(*others) for own, *others in runs if own == direction}


claim = Claims()


@claim("Momentum gains over plain gradients in every combination.")
def momentum_brings(results: pd.DataFrame) -> Finding:
    gains = _gains(results, "momentum")
    return all_lead({name: lead(gain) for name, gain in gains.items()}, "gain")


@claim("STORM makes no difference over plain gradients (within half a point).")
def storm_brings(results: pd.DataFrame) -> Finding:
    gains = _gains(results, "storm")
    largest = max(np.abs(means(gains)))
    return Finding(largest <= 0.005, {"largest gain or loss": largest, f"gain, {'; '.join(gains)}": means(gains)})


ablation = Experiment(
    **description("asfbo-ablation", globals()),
    runs=ablation_runs,
    picture=ablation_picture,
    claims=tuple(claim),
    family=shared.FAMILY,
)
