"""What four hospitals have agreed on: the same file at the coordinator and at every hospital.

A model tells who has a heart disease. Nearly all patients are ill at one hospital, and a third at another, so that one
intercept for all is wrong at both. Three models are trained in one run:

- own_intercept: common weights, and an intercept of each hospital's own, which never leaves it (a lower level);
- fedavg: one model for all, its intercept included;
- alone: a model of each hospital's own, which never leaves it either.
"""

import jax.numpy as jnp
import numpy as np
import pandas as pd

import rookery as rk
from rookery.tasks import Task

NUMBERS = (
    "age", "sex", "resting_pressure", "cholesterol", "fasting_sugar", "max_heart_rate", "exercise_angina",
    "st_depression",
)  # fmt: skip
CATEGORIES = {"chest_pain": (2, 3, 4), "ecg": (1, 2)}  # the values with a column of their own
WIDTH = len(NUMBERS) + sum(map(len, CATEGORIES.values()))
SAMPLE = {"features": np.zeros(WIDTH, np.float32), "ill": np.float32(0)}
PENALTY = 0.01
MODELS = ("alone", "fedavg", "own_intercept")


def levels(table: pd.DataFrame) -> dict[str, dict[str, np.ndarray]]:
    """A hospital's complete rows as arrays, standardised by its own rows to train on: these means stay here."""
    for column in (*NUMBERS, *CATEGORIES, "ill", "use"):
        if column not in table:
            raise ValueError(f"the table has no column {column!r}")
    table = table.dropna(subset=[*NUMBERS, *CATEGORIES])
    columns = [table[name].to_numpy(float) for name in NUMBERS]
    columns += [table[name].to_numpy(float) == value for name, values in CATEGORIES.items() for value in values]
    features, train = np.stack(columns, axis=1), (table["use"] == "train").to_numpy()
    spread = features[train].std(axis=0)
    features = (features - features[train].mean(axis=0)) / np.where(spread > 0, spread, 1)
    rows = lambda chosen: {
        "features": features[chosen].astype(np.float32),
        "ill": table["ill"].to_numpy(np.float32)[chosen],
    }
    return {"lower": rows(train), "upper": rows(train), "test": rows(~train)}


def models(x, y):
    """The three models, of what is common (x) and what is the hospital's own (y)."""
    own = {"w": x["weights"], "b": y["intercept"]}
    return dict(zip(MODELS, (y["alone"], x["average"], own), strict=True))


def scores(model, rows):
    """The log odds of being ill."""
    return rows["features"] @ model["w"] + model["b"]


def loss(model, rows):
    """The mean loss of a model, with a penalty on its weights."""
    losses = jnp.logaddexp(0, scores(model, rows)) - rows["ill"] * scores(model, rows)
    return jnp.mean(losses) + PENALTY / 2 * jnp.sum(model["w"] ** 2)


def upper(x, y, rows):
    """What is common: the average model, and the weights for the intercepts that the hospitals have."""
    return loss(models(x, y)["fedavg"], rows) + loss(models(x, y)["own_intercept"], rows)


def lower(x, y, rows):
    """What is a hospital's own: its model, and its intercept for the common weights."""
    return loss(models(x, y)["alone"], rows) + loss(models(x, y)["own_intercept"], rows)


def accuracy(model, rows):
    """The share of patients whom a model calls ill or healthy as they are."""
    return jnp.mean((scores(model, rows) > 0) == (rows["ill"] > 0))


def measure(client, x, _, y):
    """What each hospital tells of its test rows: the accuracy of each model."""
    right = lambda model: client.mean(lambda rows: accuracy(model, rows), client.test())
    return {f"{name}_accuracy": right(model) for name, model in models(x, y).items()}


def task(clients: int = 4) -> Task:
    """The task; nothing of any hospital's data is in it."""
    model = lambda: {"w": np.zeros(WIDTH, np.float32), "b": np.float32(0)}
    return Task(
        name="heart",
        problem=rk.Bilevel(upper, lower, lower_scope="client"),
        clients=rk.Clients.like(lower=SAMPLE, upper=SAMPLE, test=SAMPLE, n=clients, weights="size"),
        init=(
            {"weights": np.zeros(WIDTH, np.float32), "average": model()},
            {"intercept": np.float32(0), "alone": model()},
        ),
        evaluate=lambda x, y: {},
        evaluate_client=measure,
        metric="own_intercept_accuracy",
        rounds=100,
        every=10,
        # At its best, an intercept does not change the loss, so that one term of the series is enough.
        defaults={"upper_step": 0.4, "lower_step": 0.4, "local_steps": 5, "neumann_terms": 1, "hessian_step": 0.4},
    )
