"""What the figures of FedNest on MNIST share: the hyper-representation task, its methods and its set-up in words."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes

from rookery import report
from rookery.algorithms import FedNest, FedNestSGD, LFedNest, LFedNestNonAlt, LFedNestSVRG
from rookery.experiments.machinery.curves import averages, ends
from rookery.experiments.machinery.drawing import draw, legend, zoom
from rookery.experiments.machinery.experiment import Config, Experiment
from rookery.experiments.machinery.numbers import SPLITS
from rookery.experiments.papers import FEDNEST_PAPER
from rookery.language.fed import Epochs
from rookery.tasks import hyperrep

METHODS: dict[str, Any] = {cls.__name__: cls for cls in (FedNest, FedNestSGD, LFedNest, LFedNestSVRG, LFedNestNonAlt)}
FAMILY = "fednest-mnist"
HESSIAN_STEP = 0.01  # 1/ℓ, as in the authors' scripts
AUTO = "auto"  # 1/ℓ from the Hessian, for comparison
INNER = {"FedNest": report.BLUE, "FedNestSGD": report.ORANGE}  # with SVRG and SGD; their own colours are two blues
DASHES = {"i.i.d.": "--", "non-i.i.d.": "-"}
MEASURES = {"at the end": ends, "on average": averages}
ACROSS = {"round": "rounds (the paper's epochs)", "exchanges": "communications"}


def representation(
    quick: bool, method: str, split: str, tau: int = 1, rate: float | None = None, hessian_step: Any = HESSIAN_STEP
) -> Config:
    """One method on the hyper-representation task; figures that ask for the same one share its runs."""
    chosen = (0.1 if quick else 0.01) if rate is None else rate
    algorithm = METHODS[method](
        upper_step=chosen,
        lower_step=chosen,
        lower_local_steps=Epochs(5),
        upper_local_steps=tau,
        neumann_terms=5,
        hessian_step=hessian_step,
        batch_size=8 if quick else 64,
    )
    # 21 clients have as many samples each on either split, so that the two share one compiled program.
    small: dict[str, Any] = {"data": "digits", "clients": 21, "width": 32, "equal": True}
    return Config(
        name=f"{method}, {split}, τ = {tau}, steps {chosen:g}{', 1/ℓ from the Hessian' * (hessian_step == AUTO)}",
        labels={"method": method, "split": split, "tau": tau, "rate": chosen, "hessian_step": str(hessian_step)},
        task=hyperrep,
        settings={**(small if quick else {"data": "mnist"}), "partition": SPLITS[split], "share": True},
        algorithm=algorithm,
        rounds=60 if quick else 500,
        cohort=10,
        every=10,
        seeds=(0,) if quick else (0, 1, 2),
    )


REPRESENTATION = (
    "An MLP 784-200-10 on MNIST: the hidden layer is the upper variable, the output layer the lower one; cross-entropy "
    "at both levels, and ½·10⁻³‖y‖² at the lower. 100 clients of 300 training and 300 validation images, i.i.d. or in "
    "two label shards each. Ten clients a round, batches of 64, N = 5, T = 1, five local epochs in the inner "
    "optimizer, τ = 1 step in the outer one, both steps and 1/ℓ .01, 500 rounds (the paper's epochs), unless said "
    "otherwise. *End*: the mean test accuracy over the last tenth of the rounds, then over the seeds."
)
REPRESENTATION_DIFFERENCES = (
    "Steps, 1/ℓ and rounds, which the paper does not give, are the scripts'; the lower regulariser and the seeds ours.",
    "The authors' code differs from the paper's text, which is followed here: see `fednest-collapse` and the "
    "[errata](../errata.md#the-authors-inverse-hessian).",
    "The anchor of FedInn is the client's full gradient, as in the authors' code (the paper's is stochastic).",
)


def experiment(
    name: str, title: str, where: str, setup: str = "", differences: Sequence[str] = (), **parts: Any
) -> Experiment:
    """An experiment on this task: its name and title, the place in the paper, and what is added to the set-up."""
    return Experiment(
        name=name,
        title=f"hyper-representation on MNIST, {title}",
        paper=f"{FEDNEST_PAPER}, ICML 2022, {where}.",
        setup=f"{REPRESENTATION} {setup}".strip(),
        differences=(*REPRESENTATION_DIFFERENCES, *differences),
        family=FAMILY,
        **parts,
    )


def by_split(label: str, colours: Mapping[Any, str], words: str = "{}") -> dict[str, dict[str, Any]]:
    """Lines for `draw`: the values of a label on both splits, i.i.d. dashed."""
    return {
        f"{words.format(value)}, {split}": {
            label: value, "split": split, "look": {"color": colour, "linestyle": line, "marker": ""},
        }
        for value, colour in colours.items()
        for split, line in DASHES.items()
    }  # fmt: skip


def panel(ax: Axes, results: pd.DataFrame, across: str, lines: dict[str, Any], title: str, bottom: Any = None) -> None:
    """Test accuracy against rounds or communications, from `bottom` on."""
    draw(ax, results, across, "accuracy", lines)
    zoom(ax, results)
    ax.set_ylim(bottom=bottom)
    report.label(ax, ACROSS[across], "test accuracy", title)
    legend(ax, 2)


def scripts(results: pd.DataFrame) -> pd.DataFrame:
    """The runs with the authors' 1/ℓ."""
    return results[results["hessian_step"] == str(HESSIAN_STEP)]


def over_sgd(measure: Callable[..., np.ndarray], results: pd.DataFrame, **labels: Any) -> np.ndarray:
    """How much higher FedNest is than FedNestSGD by a measure, for each seed."""
    return measure(results, method="FedNest", **labels) - measure(results, method="FedNestSGD", **labels)
