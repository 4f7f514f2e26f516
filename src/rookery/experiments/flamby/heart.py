"""FLamby's table of Fed-Heart-Disease, and its fine-tuning."""

import dataclasses
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pandas as pd

from rookery.algorithms.personalised import FineTuned
from rookery.experiments.flamby import tables
from rookery.experiments.machinery import Config, Experiment, Finding, Headline, description
from rookery.experiments.machinery.claims import all_lead, lead
from rookery.experiments.machinery.curves import last
from rookery.experiments.machinery.numbers import keyed
from rookery.tasks.flamby import fed_heart
from rookery.tasks.task import Task

HEART = tables.Benchmark(
    task=fed_heart,
    metric="accuracy",
    clients={"cleveland": "Cleveland", "hungary": "Hungary", "switzerland": "Switzerland", "va": "Long Beach VA"},
    rows={"cleveland": 199, "hungary": 172, "switzerland": 30, "va": 85},
    batch=4,
    rounds=15,
    epochs=50,
    adam=0.001,
    local={
        "FedAvg": 0.001, "FedProx": 0.001, "Scaffold": 0.001, "FedAdam": 0.01, "FedYogi": 0.003162,
        "FedAdagrad": 0.003162, "Cyclic": 0.01,
    },
    proximal=0.01,
    server={"FedAdam": 0.01, "FedYogi": 0.01, "FedAdagrad": 0.316228},
    published=keyed(Path(__file__).with_name("heart.csv"), 2),
)  # fmt: skip
BASELINE = {"cleveland": 0.53846, "hungary": 0.62921, "switzerland": 0.9375, "va": 0.77778, "pooled": 0.51575}
TUNED = 0.00316227  # η of the fine-tuning example
PUBLISHED_TUNED = {"FedAvg": ".7180 ± .0160", "fine-tuned": ".7350 ± .0090"}


def fine_tuned(seed: int = 0) -> Task:
    """The task with the mean accuracy of the hospitals' own models, each on its own tests."""
    task = fed_heart(seed=seed)

    def evaluate(x: Any, y: Any, memory: Any) -> dict[str, Any]:
        each = jax.vmap(lambda own: task.evaluate(own, y))(memory)
        own = [each[f"accuracy_{client}"][k] for k, client in enumerate(HEART.clients)]
        return {**task.evaluate(x, y), "personal_accuracy": jnp.mean(jnp.stack(own))}

    return dataclasses.replace(task, evaluate=evaluate)


def runs(quick: bool) -> list[Config]:
    """All methods of the table, and fine-tuning."""
    steps = tables.QUICK_UPDATES if quick else tables.UPDATES
    tuned = FineTuned(TUNED, steps, personal_step=TUNED, personal_steps=steps, batch_size=HEART.batch)
    labels = {"method": "FineTuned"}
    return [
        *HEART.runs(quick),
        HEART.config(quick, "FedAvg", name="FineTuned", labels=labels, task=fine_tuned, settings={}, algorithm=tuned),
    ]


claim = tables.claims(HEART, "Fed-Heart-Disease", "five")


@claim("Fine-tuning loses no accuracy in the mean over the hospitals, with any seed.", "Fine-tuning")
def tuning_helps(results: pd.DataFrame) -> Finding:
    before, after = (last(results, metric, method="FineTuned") for metric in ("accuracy", "personal_accuracy"))
    return Finding(bool(np.all(after >= before)), {"gain for each seed": after - before})


claim(
    "Of the 55 means without Cyclic, at least 54 are within one of FLamby's standard deviations.",
    benchmark=HEART,
    least=54,
)(tables.nearly_all)


@claim("In Switzerland and Long Beach, every federated strategy is worse than always predicting the commoner class.")
def below_a_constant(results: pd.DataFrame) -> Finding:
    found = HEART.ends(results)
    federated = [method for method in tables.STRATEGIES[:-1] if (method, "va") in found]
    pairs = [(method, client) for method in federated for client in ("switzerland", "va")]
    leads = {f"{m}, {HEART.clients[c]}": lead(BASELINE[c], found[m, c]) for m, c in pairs}
    return all_lead(leads, "lead of the commoner class")


heart = Experiment(
    **description("flamby-heart", globals()),
    runs=runs,
    picture=partial(tables.picture, benchmark=HEART, baseline=BASELINE),
    claims=tuple(claim),
    headlines=lambda results: [
        *tables.headlines(results, HEART),
        Headline("FedAvg before fine-tuning", PUBLISHED_TUNED["FedAvg"], last(results, method="FineTuned")),
        Headline("fine-tuned", PUBLISHED_TUNED["fine-tuned"], last(results, "personal_accuracy", method="FineTuned")),
    ],
)
