"""What the figures of FedNest on MNIST share: the hyper-representation task, its methods and its set-up in words."""

from collections.abc import Callable, Sequence
from typing import Any

import pandas as pd

from rookery import report
from rookery.algorithms import FedNest, FedNestSGD, LFedNest, LFedNestNonAlt, LFedNestSVRG
from rookery.experiments.machinery.claims import Claim, Claims, Finding
from rookery.experiments.machinery.experiment import Config
from rookery.experiments.machinery.numbers import SPLITS, Figures
from rookery.language.fed import Epochs
from rookery.tasks import hyperrep

METHODS: dict[str, Any] = {cls.__name__: cls for cls in (FedNest, FedNestSGD, LFedNest, LFedNestSVRG, LFedNestNonAlt)}
FAMILY = "fednest-mnist"
HESSIAN_STEP = 0.01  # 1/ℓ, as in the authors' scripts
AUTO = "auto"  # 1/ℓ from the Hessian, for comparison


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
    "An MLP 784-200-10 on MNIST: the hidden layer (157,000 parameters) is the upper variable, the output layer (2,010) "
    "the lower one, cross-entropy at both levels and ½·10⁻³‖y‖² at the lower. 100 clients of 600 images, split 300/300 "
    "into training and validation; i.i.d., or non-i.i.d. as in FedAvg: sorted by label, 200 shards of 300, two for "
    "each client. Ten clients a round, batches of 64, N = 5 in the Neumann series, T = 1, five local epochs in the "
    "inner optimizer, τ = 1 step in the outer one unless said otherwise, both steps .01, 1/ℓ = .01, 500 rounds (the "
    "paper's epochs); accuracy on the 10,000 test images every ten rounds. *End* is the mean over the last tenth of "
    "the rounds, then over the seeds. Bands: lowest to highest of the seeds."
)
REPRESENTATION_DIFFERENCES = (
    "The paper gives neither steps nor 1/ℓ nor rounds nor the lower regulariser: steps, 1/ℓ and rounds are those of "
    "the authors' scripts (where 1/ℓ is the outer step), the regulariser and the seeds are ours.",
    "The authors' code splits the non-i.i.d. clients 480/120, leaves dropout on, takes all of a client's data for the "
    "hypergradient and a fresh cohort for the outer step; for FedNest and FedNestSGD it does not reset the accumulator "
    "of its inverse-Hessian product. Here all of this is as in the paper's text.",
    "The anchor of FedInn is the client's full gradient, as in the authors' code (the paper's is stochastic).",
)
COLLAPSE = (
    "With the script's steps LFedNest fails non-i.i.d., with the authors' habits, too; with .003 for the upper step or "
    "1/ℓ it does not: [fednest-collapse](../fednest-collapse/summary.md)."
)


def by_split(methods: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Lines for methods on both splits: a method keeps its colour, i.i.d. is dashed."""
    return {
        f"{method}, {split}": {
            "method": method,
            "split": split,
            "look": {**report.style(method), "linestyle": "--" if split == "i.i.d." else "-"},
        }
        for method in methods
        for split in SPLITS
    }


def scripts(results: pd.DataFrame) -> pd.DataFrame:
    """The runs with the authors' 1/ℓ."""
    return results[results["hessian_step"] != AUTO]


def from_hessian(results: pd.DataFrame) -> pd.DataFrame:
    """The runs beside them: 1/ℓ is half the inverse of the lower Hessian's norm, estimated as it changes."""
    return results[results["hessian_step"] == AUTO]


def add_with_both(
    all_claims: Claims,
    claims: Sequence[Claim],
    ends: Callable[[pd.DataFrame], Figures],
    authors: Callable[[pd.DataFrame], pd.DataFrame] = scripts,
    words: str = f"{HESSIAN_STEP:g}",
    **why: Any,
) -> None:
    """Add the claims, checked with the authors' 1/ℓ, and one of ours: with 1/ℓ from the Hessian they come out the same.

    Where none of them holds either way, ours is undecided. `authors` selects the runs with the authors' 1/ℓ, and
    `words` says what it is.
    """
    all_claims += [claim.on(authors) for claim in claims]

    @all_claims(
        f"With 1/ℓ from the Hessian (half the inverse of its norm, estimated as it changes) in place of {words}, the "
        "paper's claims come out the same.",
        **why,
    )
    def the_same(results: pd.DataFrame) -> Finding:
        found = [(c.text, c(authors(results)).holds, c(from_hessian(results)).holds) for c in claims]
        if not any(old or new for _, old, new in found):
            return Finding(None, ends(from_hessian(results)), "None of them holds with either.")
        words = {True: "holds", False: "does not hold", None: "is undecided"}
        other = [f"“{text}” {words[new]} then." for text, old, new in found if old != new]
        return Finding(not other, ends(from_hessian(results)), " ".join(other))
