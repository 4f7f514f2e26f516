"""Your own problem: clinics that together tune a penalty for each column of their records."""

import jax.numpy as jnp
import numpy as np

import rookery as rk
from rookery.tasks import Task


def _errors(y, batch):  # type: ignore[no-untyped-def]
    return batch["a"] @ y - batch["t"]


def start(clients: int = 6, columns: int = 8, noise: float = 0.5, seed: int = 0) -> Task:
    """Learn which columns to trust: penalties at the upper level, a linear model at the lower.

    Arguments:
        clients: the number of clients.
        columns: columns of a record; the second half is irrelevant to the target.
        noise: noise in the target.
        seed: seed of the data.
    """
    rng = np.random.default_rng(seed)
    truth = np.where(np.arange(columns) < columns // 2, 1.0, 0.0)

    def records(count: int) -> dict[str, np.ndarray]:
        a = rng.normal(size=(count, columns))
        return {"a": a, "t": a @ truth + noise * rng.normal(size=count)}

    # Your data: for each client, a dict (or any pytree) of arrays whose first axis is the sample. Sizes may differ.
    sizes = rng.integers(8, 16, size=clients)
    federation = rk.Clients(lower=[records(n) for n in sizes], upper=[records(n) for n in sizes], weights="size")
    test = records(500)

    # Your losses: functions of the variables and a batch, each a mean over the batch.
    problem = rk.Bilevel(
        upper=lambda x, y, batch: jnp.mean(_errors(y, batch) ** 2) / 2,
        lower=lambda x, y, batch: jnp.mean(_errors(y, batch) ** 2) / 2 + jnp.sum(jnp.exp(x) * y**2) / 2,
        project_upper=lambda x: jnp.clip(x, -7.0, 1.0),
    )
    return Task(
        name="start",
        problem=problem,
        clients=federation,
        init=(np.full(columns, -2.0), np.zeros(columns)),  # x: logarithms of the penalties; y: the model
        evaluate=lambda x, y: {"test_loss": jnp.mean(_errors(y, test) ** 2) / 2},
        metric="test_loss",
        rounds=60,
        every=10,
        defaults={"upper_step": 1.0, "lower_step": 0.2, "linear_step": 0.2, "hessian_step": 0.2, "lower_rounds": 5},
    )
