"""FedBiO's fair training: learnt weights of the groups of Adult."""

from typing import Any

import pandas as pd
from matplotlib.figure import Figure

from rookery import report
from rookery.algorithms import AFL, DRFA, FedAvg, FedBiO, FedBiOAcc, QFedAvg
from rookery.experiments.machinery import Claims, Config, Experiment, Finding, Grid, Headline, description
from rookery.experiments.machinery.claims import Lead, all_lead, lead
from rookery.experiments.machinery.curves import ends, ends_by, select
from rookery.experiments.machinery.drawing import draw, name_lines
from rookery.experiments.machinery.numbers import chosen_words
from rookery.language.fed import Algorithm
from rookery.tasks.group_weights import group_weights

FAIR = ("FedBiO", "FedBiOAcc", "FedAvg")
ACROSS = ("AFL", "DRFA", "q-FedAvg")  # fair over clients: on the split by groups
FAIR_SPLITS = {"mixed": "iid", "by group": "shards"}
PAIRS = [(m, "mixed") for m in FAIR] + [(m, "by group") for m in (*FAIR, *ACROSS)]
# By the search: the upper step of FedBiO and FedBiOAcc, the weights' step of AFL and DRFA, q of q-FedAvg.
UPPERS = (0.003, 0.01, 0.03, 0.1, 0.3, 1.0)
FAIR_SEARCH: dict[tuple[str, str], tuple[float, tuple[float, ...]]] = {  # the best, and what was tried
    ("FedBiO", "mixed"): (0.1, UPPERS),
    ("FedBiOAcc", "mixed"): (0.03, UPPERS),
    ("FedBiO", "by group"): (0.01, UPPERS),
    ("FedBiOAcc", "by group"): (0.03, UPPERS),
    ("AFL", "by group"): (0.003, (0.001, *UPPERS)),
    ("DRFA", "by group"): (0.0003, (0.00003, 0.0001, 0.0003, 0.001, 0.003, 0.01, 0.03, 0.1, 0.3)),
    ("q-FedAvg", "by group"): (10.0, (0.1, 0.3, 1.0, 3.0, 10.0, 30.0)),
}
FAIR_CHOSEN = {key: best for key, (best, _) in FAIR_SEARCH.items()}


def plain_groups(data_dir: Any = None, **settings: Any) -> Any:
    """The same classifier on the plain loss."""
    return group_weights(data_dir=data_dir, **settings).single_level


def fair_method(method: str, scale: float) -> Algorithm:
    """A method on Adult; `scale` is the value that the search chooses."""
    step = 0.3
    nested: dict[str, Any] = {"upper_step": scale, "lower_step": step, "linear_step": step, "local_steps": 5}
    if method == "FedBiO":
        return FedBiO(**nested)
    if method == "FedBiOAcc":
        return FedBiOAcc(**nested, delta=2.0, offset=8.0)
    if method == "AFL":  # it makes one step a round, the others five
        return AFL(step=1.0, weight_step=scale, output="last")
    if method == "DRFA":
        return DRFA(step=step, weight_step=scale, local_steps=5)
    if method == "q-FedAvg":
        return QFedAvg(step=step, fairness=scale, local_steps=5)
    return FedAvg(step=step, local_steps=5)


def fair(quick: bool, method: str, split: str, scale: float | None = None, **changes: Any) -> Config:
    """One method on Adult by group."""
    scale = (1.0 if quick else FAIR_CHOSEN.get((method, split), 0.0)) if scale is None else scale
    data: dict[str, Any] = {"data": "synthetic", "groups": None} if quick else {"data": "adult", "groups": "sex-income"}
    return Config(
        name=f"{method}, {split}",
        labels={"method": method, "split": split},
        task=group_weights if method in FAIR[:2] else plain_groups,
        settings={**data, "equal": True, "partition": FAIR_SPLITS[split]},
        algorithm=fair_method(method, scale),
        rounds=20 if quick else 900,
        every=5 if quick else 20,
        seeds=(0,) if quick else (0, 1, 2),
    ).but(**changes)


PANELS = {"worst_accuracy": "accuracy of the worst group", "accuracy": "accuracy"}


def fair_picture(results: pd.DataFrame) -> Figure:
    """The accuracies against communications; a row for each split."""
    fig, axes = report.figure(2, 2, width=12.0, height=7.2)
    looks = report.styles((*FAIR, *ACROSS))
    for row, split in zip(axes, FAIR_SPLITS, strict=True):
        own = select(results[results["round"] > 0], split=split)
        lines = {m: {"method": m, "look": look} for m, look in looks.items() if m in set(own["method"])}
        for ax, (metric, words) in zip(row, PANELS.items(), strict=True):
            draw(ax, own, "exchanges", metric, lines, markevery=5)
            report.label(ax, "communications", words, f"clients {split}")
            name_lines(ax)
    return fig


claim = Claims()


@claim("The worst group gains over FedAvg on both splits.")
def worst_group_gains(results: pd.DataFrame) -> Finding:
    leads: dict[str, Lead] = {}
    for split in FAIR_SPLITS:
        own = ends_by(results, "method", FAIR, "worst_accuracy", split=split)
        leads |= {f"{m}, clients {split}": lead(own[m], own["FedAvg"]) for m in FAIR[:2]}
    return all_lead(leads, "gain")


fair_experiment = Experiment(
    **description("fedbio-fair", globals(), chosen=chosen_words(FAIR_CHOSEN)),
    runs=lambda quick: [fair(quick, method, split) for method, split in PAIRS],
    picture=fair_picture,
    claims=tuple(claim),
    search=lambda quick: [
        fair(quick, m, split, scale, name=f"search: {m}, {split}, {scale:g}", seeds=(9,), every=20 if quick else 300)
        for (m, split), (_, tried) in FAIR_SEARCH.items()
        for scale in (tried[-2:-1] if quick else tried)
    ],
    grid=Grid(r"(?P<value>\S+)$", ("method", "split"), lambda search: -search["validation_loss"]),
    headlines=lambda results: [
        Headline(f"{m}, worst group", "", ends(results, "worst_accuracy", method=m, split="mixed")) for m in FAIR
    ],
)
