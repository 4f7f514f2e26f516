"""What FedDRO's figures on imbalanced images share: the methods, the runs and how their ends are compared."""

from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp

from rookery.algorithms import MBSGD, PDSGD, CompositionalFedAvg, DSFedDRO, FastDRO, FedDRO
from rookery.experiments.machinery.experiment import Config
from rookery.language.fed import Algorithm
from rookery.tasks.dro_imbalanced import dro_imbalanced
from rookery.tasks.task import Task

GRID = (0.001, 0.01, 0.05, 0.1)  # the paper's learning rates
ENDS = "*End* is the mean over the last tenth of the run, then over the seeds. Bands: lowest to highest of the seeds."


@dataclass(frozen=True)
class Drop:
    """A step size that falls to a tenth in the last quarter of the rounds; two with the same numbers are the same."""

    step: float
    rounds: int

    def __call__(self, t: Any) -> Any:
        """In round t."""
        return jnp.where(t < 3 * self.rounds // 4, self.step, 0.1 * self.step)


DATA = {"cifar-10": "CIFAR10-ST", "cifar-100": "CIFAR100-ST"}
SIZES = {"CIFAR10-ST": 25_500, "CIFAR100-ST": 30_000}  # training images
BATCH, CLIENTS = 16, 8  # samples of a client in a step; clients unless others are said
PENALTY, CAP = 1.0, 5.0  # λ and the cap of KL-DRO
IMAGES = ("FedDRO", "DS-FedDRO", "FastDRO", "PDSGD", "MBSGD", "FedAvg", "FedAvg, I = 5")
STEPS, SEARCH_STEPS, QUICK_STEPS = 2_400, 400, 12  # local steps; an epoch of CIFAR10-ST is 200
IMAGE_SERVER = 1.3
# The step, chosen by the search on CIFAR10-ST.
IMAGE_CHOSEN: dict[str, float] = {
    "FedDRO": 0.01, "DS-FedDRO": 0.01, "FastDRO": 0.1, "PDSGD": 0.05, "MBSGD": 0.05, "FedAvg": 0.01,
    "FedAvg, I = 5": 0.01,
}  # fmt: skip
ACCURACIES = {"train_accuracy": "training accuracy", "accuracy": "test accuracy"}
WORST = "worst_accuracy"
METRICS = ACCURACIES | {"risk": "robust risk", WORST: "test accuracy of the worst class"}


def plain_images(
    seed: int,
    clients: int,
    data: str,
    equal: bool,
    data_dir: Any = None,
    objective: str = "kl",
    penalty: float = PENALTY,
) -> Task:
    """The mean loss, for methods that weigh the samples themselves; the objective is that of the risk measured."""
    own: dict[str, Any] = {"seed": seed, "data": data, "equal": equal, "data_dir": data_dir}
    task = dro_imbalanced(clients, objective=objective, penalty=penalty, cap=CAP, **own)
    assert task.single_level is not None
    return task.single_level


def image_method(method: str, step: Any, local: int) -> Algorithm:
    """A method with batches of 16."""
    own: dict[str, Any] = {"step": step, "batch_size": BATCH}
    if method == "FedDRO":
        return FedDRO(**own, momentum=0.5, local_steps=local, first_batch=128)
    if method == "DS-FedDRO":
        two: dict[str, Any] = {"server_step": IMAGE_SERVER, "server_inner_step": IMAGE_SERVER}
        return DSFedDRO(**own, **two, momentum=0.5, local_steps=local, first_batch=128)
    if method == "FastDRO":
        return FastDRO(**own, objective="chi2", size=1.0)
    if method == "PDSGD":
        return PDSGD(**own, dual_step=5e-4, penalty=PENALTY)
    if method == "MBSGD":
        return MBSGD(**own)
    return CompositionalFedAvg(**own, case="II", local_steps=local, first_batch=128)


def images(
    quick: bool, data: str, method: str, local: int = 1, clients: int = CLIENTS, step: float | None = None,
    falls: bool = True, steps: int = STEPS, evaluations: int = 10, words: str = "", **changes: Any,
) -> Config:  # fmt: skip
    """One method on one data set, which the results call `words`, or by its name; `step` is the chosen one if None."""
    local = 5 if method == "FedAvg, I = 5" else local
    rounds = (min(steps, QUICK_STEPS) if quick else steps) // local
    step = IMAGE_CHOSEN[method] if step is None else step
    words = words or DATA[data]
    plain = method in ("FastDRO", "PDSGD")
    robust: dict[str, Any] = {} if plain else {"penalty": PENALTY, "cap": CAP}
    return Config(
        name=f"{method}, {words}, I = {local}, K = {clients}",
        labels={"method": method, "data": words, "local": local, "clients": clients},
        task=plain_images if plain else dro_imbalanced,
        settings={"data": "digits" if quick else data, "clients": clients, "equal": True} | robust,
        algorithm=image_method(method.split(",")[0], Drop(step, rounds) if falls else step, local),
        rounds=rounds,
        every=max(1, rounds // evaluations),
        seeds=(0,) if quick else (0, 1, 2),
    ).but(**changes)


SETUP = (
    "CIFAR10-ST: of each of the first five classes the last 100 images, of the others all 5,000 (CIFAR100-ST: 50 "
    "classes with 100, 50 with 500); test images as published. Equal random shares, batches of 16 a client, ResNet-20 "
    f"with group normalisation, no augmentation. KL-DRO with λ = {PENALTY:g} and no sample counted more than {CAP:g} "
    f"times; β = .5; {STEPS:,} local steps, the step a tenth in the last quarter. FastDRO (χ² ball, ρ = 1) and PDSGD "
    "(KL, the same λ, dual step 5·10⁻⁴) weigh the samples themselves. The steps, from the paper's four values, by the "
    f"training accuracy of a run of {SEARCH_STEPS:,} steps: "
)
IMAGE_DIFFERENCES = (
    f"Shorter than the paper's: {STEPS:,} local steps are 12 epochs of CIFAR10-ST (10 of CIFAR100-ST), where its "
    "source trains for 120.",
    "Not given: λ, β, the number of rounds, weight decay (none here), the normalisation layer (group normalisation "
    "here: batches of 16 have poor statistics), crops and flips (none here), what FastDRO's uncertainty set is.",
    "The step falls at three quarters, as 90 of 120 in the paper's source.",
)
