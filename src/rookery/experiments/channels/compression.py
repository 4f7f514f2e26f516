"""Accuracy against bytes: methods × compressors."""

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from rookery import report
from rookery.channels.compression import low_rank, quantize, random_k, top_k
from rookery.channels.downlink import broadcast
from rookery.experiments.channels import liars, shared
from rookery.experiments.machinery import Claims, Config, Experiment, Finding, Grid, Headline, description
from rookery.experiments.machinery.claims import all_lead, lead
from rookery.experiments.machinery.curves import curves, ends, last, values
from rookery.experiments.machinery.drawing import below, zoom
from rookery.language.channel import chain

NAME = "channels-bytes"
CHANNELS: dict[str, Callable[[], Any]] = {
    "none": lambda: None,
    "8 bits": lambda: quantize(8),
    "4 bits": lambda: quantize(4),
    "1 bit": lambda: quantize(1, feedback="error"),
    "top 10 %": lambda: top_k(0.1),
    "top 1 %": lambda: top_k(0.01),
    "random 10 %": lambda: random_k(0.1),
    "rank 2": lambda: low_rank(2),
    "8 bits both ways": lambda: chain(quantize(8), broadcast(8)),
}
CLEANING = ("none", "8 bits", "1 bit", "top 10 %")
FACTORS = (1.0, 0.5, 0.2)  # of both steps
LEARN, CLEAN = shared.TASKS


def programs(quick: bool) -> list[tuple[str, str, str]]:
    """Each task, method and channel that is run, the most important first."""
    methods = ("FedBiO", "FedAvg") if quick else shared.METHODS
    keys = [(LEARN, method, name) for name in CHANNELS for method in methods]
    return keys if quick else [*keys, *((CLEAN, method, name) for name in CLEANING for method in methods)]


def compressed(quick: bool, task: str, method: str, name: str, steps: Any, factor: float) -> Config:
    """A method with a channel, and with both steps times a factor."""
    labels, channel = {"channel": name}, CHANNELS[name]()
    found = shared.config(quick, task, method, [factor * s for s in steps], labels, False, channel=channel)
    return found.but(every=1 if quick else 5)


def runs(quick: bool) -> list[Config]:
    """Every method with every channel."""
    if quick:
        return [compressed(quick, *key, liars.QUICK_STEPS, 1.0) for key in programs(quick)]
    return [compressed(quick, *key, steps(key), *shared.CHOSEN[NAME, *key]) for key in programs(quick)]


def steps(key: tuple[str, str, str]) -> tuple[float, ...]:
    """The steps of a method without compression."""
    return shared.CHOSEN[liars.NAME, *key[:2], "mean"]


def factor_search(quick: bool, key: tuple[str, str, str], steps: Any) -> list[Config]:
    """The search of the factor of one method and channel."""
    factors = FACTORS[:1] if quick else FACTORS
    return [shared.tried(quick, compressed(quick, *key, steps, f), f"factor {f:g}", key[2]) for f in factors]


def search(quick: bool) -> list[Config]:
    """The factor of every method and channel."""
    of = lambda key: liars.QUICK_STEPS if quick else steps(key)
    return [config for key in programs(quick) for config in factor_search(quick, key, of(key))]


def uploaded(results: pd.DataFrame, method: str, name: str, task: str = LEARN) -> float:
    """The bytes that all clients sent in all rounds."""
    return float(last(results, "bytes_up", task=task, method=method, channel=name)[0])


def lost(results: pd.DataFrame, method: str, name: str, task: str = LEARN) -> np.ndarray:
    """How much less accuracy a method reaches than without compression, for each seed."""
    of = partial(ends, results, task=task, method=method)
    return of(channel="none") - of(channel=name)


def methods(results: pd.DataFrame) -> list[str]:
    """The methods that were run."""
    return shared.among(results, "method", shared.METHODS, task=LEARN)


def within(results: pd.DataFrame, name: str, points: float) -> Finding:
    """Whether every method stays within so many points."""
    each = {m: lost(results, m, name) for m in methods(results)}
    return all_lead({m: liars.less(points / 100, own) for m, own in each.items()}, f"{points:g} points less its loss")


claim = Claims()


@claim("8 bits cost no method more than 1 point of hyper-representation, for at most 26 % of the bytes sent.")
def eight_bits(results: pd.DataFrame) -> Finding:
    return cheap(results, "8 bits", 1, 0.26)


@claim("4 bits cost no method more than 2 points of hyper-representation, for at most 14 % of the bytes sent.")
def four_bits(results: pd.DataFrame) -> Finding:
    return cheap(results, "4 bits", 2, 0.14)


@claim(
    "1 bit with error feedback costs no method more than 5 points of hyper-representation, for at most 4 % of the "
    "bytes sent."
)
def one_bit(results: pd.DataFrame) -> Finding:
    return cheap(results, "1 bit", 5, 0.04)


def cheap(results: pd.DataFrame, name: str, points: float, share: float) -> Finding:
    """Whether every method stays within so many points, for this share of the bytes at most."""
    found = within(results, name, points)
    shares = {m: uploaded(results, m, name) / uploaded(results, m, "none") for m in methods(results)}
    few = all(own <= share for own in shares.values())
    figures = {**found.figures, **{f"share of the bytes, {m}": own for m, own in shares.items()}}
    return Finding(found.holds if few else False, figures)


@claim("Sending the largest 1 % of the entries loses more of hyper-representation than the largest 10 %: every method.")
def fewer_entries(results: pd.DataFrame) -> Finding:
    each = {m: lead(lost(results, m, "top 1 %"), lost(results, m, "top 10 %")) for m in methods(results)}
    return all_lead(each, "its loss less that of 10 %")


@claim("The largest 10 % of the entries lose less of hyper-representation than a random 10 %: every method.")
def the_largest(results: pd.DataFrame) -> Finding:
    each = {m: lead(lost(results, m, "random 10 %"), lost(results, m, "top 10 %")) for m in methods(results)}
    return all_lead(each, "the random ones' loss less the largest ones'")


@claim(
    "For the bytes that they send in all rounds, 8, 4 and 1 bits and the largest 10 % and 1 % of the entries each "
    "reach more of hyper-representation than the same method does without compression."
)
def for_the_same_bytes(results: pd.DataFrame) -> Finding:
    names = ("8 bits", "4 bits", "1 bit", "top 10 %", "top 1 %")
    return all_lead({f"{name}, {m}": ahead(results, m, name) for m in methods(results) for name in names})


def ahead(results: pd.DataFrame, method: str, name: str) -> Any:
    """The accuracy for the bytes of all rounds less that without compression for as many, between its evaluations."""
    of = partial(curves, results, across="bytes_up", task=LEARN, method=method)
    own = [float(c.iloc[-1]) for c in of(channel=name)]
    plain = [np.interp(uploaded(results, method, name), c.index, c) for c in of(channel="none")]
    return lead(own, np.array(plain))


@claim("8 bits both ways cost no method more than 2 points of hyper-representation.")
def both_ways(results: pd.DataFrame) -> Finding:
    return within(results, "8 bits both ways", 2)


@claim(
    "In data cleaning the largest 10 % of the entries cost FedNest, FedBiO and ASFBO at most 1 point: a client moves "
    "one weight in twenty."
)
def sparse_by_themselves(results: pd.DataFrame) -> Finding:
    there = shared.among(results, "method", shared.METHODS[:-1], task=CLEAN)
    if not there:
        return Finding(None, {"not run": 0})
    each = {m: liars.less(0.01, lost(results, m, "top 10 %", CLEAN)) for m in there}
    return all_lead(each, "1 point less its loss")


def picture(results: pd.DataFrame) -> Figure:
    """Accuracy against the kilobytes that a client has sent, a panel for each method."""
    shown = shared.METHODS
    fig, axes = report.figure(1, len(shown), width=15.0, height=4.4)
    clients = shared.CLIENTS if results["round"].max() > 2 else 10
    for ax, method in zip(axes[0], shown, strict=True):
        own = results[results["task"] == LEARN].assign(kilobytes=results["bytes_up"] / clients / 1e3)
        own = own[(own["method"] == method) & (own["round"] > 0)]
        for i, name in enumerate(n for n in CHANNELS if n in values(own, "channel")):
            color: Any = {"color": "black" if name == "none" else f"C{i - 1}"}
            report.band(ax, own[own["channel"] == name], "kilobytes", "accuracy", label=name, **color)
        if len(own):
            zoom(ax, own)
        ax.set_xscale("log")
        report.label(ax, "kB sent by a client", "test accuracy", method)
    below(fig, axes[0, -1], len(CHANNELS))
    return fig


compression = Experiment(
    **description(NAME, globals()),
    runs=runs,
    picture=picture,
    claims=tuple(claim),
    search=search,
    grid=Grid(r"factor (?P<factor>\S+)$", ("task", "method", "channel"), lambda found: found["search_accuracy"]),
    headlines=lambda results: [
        Headline(f"{m}, hyper-representation, {name}", "", ends(results, task=LEARN, method=m, channel=name))
        for m in methods(results) for name in ("none", "1 bit")
    ],
)  # fmt: skip
