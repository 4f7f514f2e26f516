"""What all have agreed on: the same file at the coordinator and at every hospital.

A model tells cancer from what is benign. Every diagnosis to train on has a source, and the model is to trust sources as
far as they deserve: the lower level fits the model with a weight for each source, the upper level chooses the weights,
by what the model then makes of the few rows whose diagnosis was checked.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pandas as pd

import rookery as rk
from rookery.tasks import Task

SOURCES = ("laboratory", "letter", "billing")
USES = {"lower": "train", "upper": "check", "test": "test"}  # what the levels are made of
PENALTY = 0.01

# The mean and the scale of each measurement, as published, so that no hospital has to tell its own: of its mean over
# the nuclei, of its error, and of its worst value.
PUBLISHED = {
    "radius": ((14, 3.5), (0.41, 0.28), (16, 4.8)),
    "texture": ((19, 4.3), (1.2, 0.55), (26, 6.1)),
    "perimeter": ((92, 24), (2.9, 2.0), (110, 34)),
    "area": ((650, 350), (40, 45), (880, 570)),
    "smoothness": ((0.096, 0.014), (0.007, 0.003), (0.13, 0.023)),
    "compactness": ((0.1, 0.053), (0.025, 0.018), (0.25, 0.16)),
    "concavity": ((0.089, 0.08), (0.032, 0.03), (0.27, 0.21)),
    "concave_points": ((0.049, 0.039), (0.012, 0.0062), (0.11, 0.066)),
    "symmetry": ((0.18, 0.027), (0.021, 0.0083), (0.29, 0.062)),
    "fractal_dimension": ((0.063, 0.0071), (0.0038, 0.0026), (0.084, 0.018)),
}
SCALES = {
    column: scale
    for name, scales in PUBLISHED.items()
    for column, scale in zip((f"mean_{name}", f"{name}_error", f"worst_{name}"), scales, strict=True)
}
SAMPLE = {"features": np.zeros(len(SCALES), np.float32), "cancer": np.float32(0), "source": np.int32(0)}


def rows(table: pd.DataFrame) -> dict[str, np.ndarray]:
    """The rows of a hospital's table as arrays, one entry for each patient."""
    for column in (*SCALES, "diagnosis", "source"):
        if column not in table:
            raise ValueError(f"the table has no column {column!r}")
    mean, scale = np.array(list(SCALES.values())).T
    source = pd.Index(SOURCES).get_indexer(table["source"])
    diagnosis = pd.Index(["benign", "malignant"]).get_indexer(table["diagnosis"])
    if min(source.min(), diagnosis.min()) < 0:
        raise ValueError(f"a diagnosis is benign or malignant, a source is one of {', '.join(SOURCES)}")
    features = (table[list(SCALES)].to_numpy(float) - mean) / scale
    return {
        "features": features.astype(np.float32),
        "cancer": diagnosis.astype(np.float32),
        "source": source.astype(np.int32),
    }


def levels(table: pd.DataFrame) -> dict[str, dict[str, np.ndarray]]:
    """The rows of a hospital's table at each level."""
    return {level: rows(table[table["use"] == use]) for level, use in USES.items()}


def _scores(y, rows):
    return rows["features"] @ y["w"] + y["b"]


def _losses(y, rows):
    return jnp.logaddexp(0, _scores(y, rows)) - rows["cancer"] * _scores(y, rows)


def trust(x):
    """The weight of each source, from 0 to 1."""
    return jax.nn.sigmoid(x)


def lower(x, y, rows):
    """The model's loss on rows to train on, each with the weight of its source."""
    size = jnp.sum(y["w"] ** 2) + y["b"] ** 2
    return jnp.mean(trust(x)[rows["source"]] * _losses(y, rows)) + PENALTY / 2 * size


def upper(x, y, rows):
    """The model's loss on checked rows."""
    return jnp.mean(_losses(y, rows))


def measure(client, x, y):
    """What each hospital tells of its test rows: how many are right, and how many are cancers that were missed."""
    right = lambda rows: jnp.mean((_scores(y, rows) > 0) == (rows["cancer"] > 0))
    missed = lambda rows: jnp.mean((_scores(y, rows) <= 0) & (rows["cancer"] > 0))
    return {"accuracy": client.mean(right, client.test()), "missed": client.mean(missed, client.test())}


def task(clients: int = 3) -> Task:
    """The task; nothing of any hospital's data is in it."""
    return Task(
        name="hospitals",
        problem=rk.Bilevel(upper, lower, project_upper=lambda x: jnp.clip(x, -5, 5)),
        clients=rk.Clients.like(lower=SAMPLE, upper=SAMPLE, test=SAMPLE, n=clients, weights="size"),
        init=(np.zeros(len(SOURCES), np.float32), {"w": np.zeros(len(SCALES), np.float32), "b": np.float32(0)}),
        evaluate=lambda x, y: dict(zip((f"trust_{source}" for source in SOURCES), trust(x), strict=True)),
        evaluate_client=measure,
        metric="accuracy",
        rounds=120,
        every=10,
        defaults={"upper_step": 3.0, "lower_step": 0.4, "linear_step": 0.4},
    )
