"""What FedDRO's figures share: the methods, the runs on imbalanced images, and how the effect of I is judged."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from rookery.algorithms import MBSGD, PDSGD, CompositionalFedAvg, DSFedDRO, FastDRO, FedDRO
from rookery.data.clients import Clients
from rookery.experiments.machinery import Config, Finding
from rookery.experiments.machinery.claims import lead, together
from rookery.experiments.machinery.numbers import Figures, listed, means
from rookery.language.fed import Algorithm
from rookery.problems.objectives import kl_risk
from rookery.tasks.dro_imbalanced import SETTINGS, cross_entropies, dro_imbalanced, scores
from rookery.tasks.task import Task

GRID = (0.001, 0.01, 0.05, 0.1)  # the paper's learning rates


@dataclass(frozen=True)
class Drop:
    """A step size that falls to a tenth in the last quarter of the rounds; two with the same numbers are the same."""

    step: float
    rounds: int

    def __call__(self, t: Any) -> Any:
        """In round t."""
        return jnp.where(t < 3 * self.rounds // 4, self.step, 0.1 * self.step)


def helps_then_saturates(ended: Mapping[str, Mapping[int, np.ndarray]], metric: str, sign: int = 1) -> Finding:
    """Whether, for each method, the middle of a sweep over I ends better than its start, and half of that gain exceeds
    the gain from there to the end of the sweep, both by more than the margin. `sign` is -1 where lower is better."""
    figures = Figures()
    parts: list[bool | None] = []
    for method, own in ended.items():
        locals_, values = [*own], [sign * value for value in own.values()]
        middle = len(own) // 2
        helps = lead(values[middle], values[0])
        saturates = lead(0.5 * (values[middle] - values[0]), values[-1] - values[middle])
        parts += [helps.holds, saturates.holds]
        figures[f"{metric}, {method}, I = {listed(own)}"] = means(own)
        figures[f"{method}: gain from I = 1 to {locals_[middle]}, and the margin"] = helps
        figures[f"{method}: half of that less the gain from there, and the margin"] = saturates
    holds = together(parts)
    note = f"{parts.count(None)} of {len(parts)} comparisons are within the margin."
    return Finding(holds, figures, note if holds is None else "")


def paper_method(method: str, step: Any, momentum: float, local: int, server: float, **others: Any) -> Algorithm:
    """FedDRO or DS-FedDRO, with batches of 16 and both server steps the same."""
    own: dict[str, Any] = {"step": step, "momentum": momentum, "local_steps": local, "batch_size": 16, **others}
    return FedDRO(**own) if method == "FedDRO" else DSFedDRO(**own, server_step=server, server_inner_step=server)


DATA = {"cifar-10": "CIFAR10-ST", "cifar-100": "CIFAR100-ST"}
PENALTY, CAP = 1.0, 5.0  # λ and the cap of KL-DRO
IMAGES = ("FedDRO", "DS-FedDRO", "FastDRO", "PDSGD", "MBSGD", "FedAvg", "FedAvg, I = 5")
STEPS, SEARCH_STEPS, QUICK_STEPS = 2_400, 400, 12  # local steps; an epoch of CIFAR10-ST is 200
IMAGE_SERVER = 1.3
ACCURACIES = {"train_accuracy": "training accuracy", "accuracy": "test accuracy"}


class Tuned(NamedTuple):
    """The values that a search chooses: the step, β, and PDSGD's step on its weights."""

    step: float
    momentum: float = 0.5
    dual: float = 5e-4


# Chosen by the search on CIFAR10-ST, for KL-DRO with a cap.
CHOSEN = {
    "FedDRO": Tuned(0.01), "DS-FedDRO": Tuned(0.01), "FastDRO": Tuned(0.1), "PDSGD": Tuned(0.05), "MBSGD": Tuned(0.05),
    "FedAvg": Tuned(0.01), "FedAvg, I = 5": Tuned(0.01),
}  # fmt: skip


def image_task(
    seed: int, data: str, plain: bool, held_out: bool = False, spread: bool = False, data_dir: Any = None, **others: Any
) -> Task:
    """Imbalanced images; `plain`: the mean loss, for methods that weight the samples themselves.

    `spread` adds the standard deviation of PDSGD's sample weights over their mean; the clients store their logarithms.
    With `held_out` every tenth image of each client is left out of training, and the metrics are those of these images.
    """
    task = dro_imbalanced(seed=seed, data=data, equal=True, data_dir=data_dir, **others)
    single = task.single_level
    assert single is not None
    if held_out:
        model, each = SETTINGS[data].model, [task.clients.client_data(k)["upper"][0] for k in range(task.clients.n)]
        rows = {name: jnp.concatenate([own[name][9::10] for own in each]) for name in ("image", "label")}

        def measure(x: Any, _: Any) -> dict[str, Any]:
            right = jnp.argmax(scores(model, x, rows["image"]), axis=1) == rows["label"]
            risk = kl_risk(cross_entropies(model, x, rows), others["penalty"]).value
            return {"validation_accuracy": jnp.mean(right), "validation_risk": risk}

        left = [{name: np.delete(own[name], np.s_[9::10], axis=0) for name in rows} for own in each]
        clients = Clients(upper=left, weights="size")
        task, single = (replace(t, clients=clients, evaluate=measure) for t in (task, single))
    if spread:
        ratio = lambda r: jnp.std(r) / jnp.mean(r)
        weighed = lambda x, y, stored: single.evaluate(x, y) | {"spread": ratio(jnp.exp(stored - jnp.max(stored)))}
        return replace(single, evaluate=weighed)
    return single if plain else task


def image_method(method: str, step: Any, tuned: Tuned, penalty: float, local: int) -> Algorithm:
    """A method with batches of 16."""
    if method in IMAGES[:2]:
        return paper_method(method, step, tuned.momentum, local, IMAGE_SERVER, first_batch=128)
    own: dict[str, Any] = {"step": step, "batch_size": 16}
    if method == "FastDRO":
        return FastDRO(**own, objective="chi2", size=1.0)
    if method == "PDSGD":
        return PDSGD(**own, dual_step=tuned.dual, penalty=penalty)
    if method == "MBSGD":
        return MBSGD(**own)
    return CompositionalFedAvg(**own, case="II", local_steps=local, first_batch=128)


def images(
    quick: bool, data: str, method: str, tuned: Tuned | None = None, words: str = "", four: float | None = None,
    local: int = 1, clients: int = 8, steps: int = STEPS, evaluations: int = 10, falls: bool = True,
    held_out: bool = False, **changes: Any,
) -> Config:  # fmt: skip
    """One method on one data set, which the results call `words`, or by its name. `four` is the λ of the paper's
    objective (4); KL-DRO with a level and a cap if None. `steps` are local steps."""
    local = 5 if method == "FedAvg, I = 5" else local
    rounds = (min(steps, QUICK_STEPS) if quick else steps) // local
    tuned, words = tuned or CHOSEN[method], words or DATA[data]
    penalty = four or PENALTY
    settings: dict[str, Any] = {"data": "digits" if quick else data, "clients": clients, "held_out": held_out}
    settings |= {"objective": "exp" if four else "kl", "penalty": penalty, "cap": None if four else CAP}
    settings["plain"] = method in ("FastDRO", "PDSGD")
    settings |= {"spread": True} if method == "PDSGD" else {}
    step = Drop(tuned.step, rounds) if falls else tuned.step
    return Config(
        name=f"{method}, {words}, I = {local}, K = {clients}",
        labels={"method": method, "data": words, "local": local, "clients": clients},
        task=image_task,
        settings=settings,
        algorithm=image_method(method.split(",")[0], step, tuned, penalty, local),
        rounds=rounds,
        every=max(1, rounds // evaluations),
        seeds=(0,) if quick else (0, 1, 2),
    ).but(**changes)
