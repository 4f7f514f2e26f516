"""What the figures of FedNest on MNIST share: the hyper-representation task, its methods and its set-up in words."""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes

from rookery import report
from rookery.algorithms import FedNest, FedNestSGD, LFedNest, LFedNestNonAlt, LFedNestSVRG
from rookery.experiments.machinery import Config
from rookery.experiments.machinery.curves import averages, ends
from rookery.experiments.machinery.drawing import draw, legend, zoom
from rookery.experiments.machinery.numbers import SPLITS
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
