"""What the participants of the FLARE tests share: tasks whose data are elsewhere. The server finds them by name."""

from typing import Any

import jax.numpy as jnp
import numpy as np

import rookery as rk
from rookery.tasks.task import Task

SIZES = (5, 9, 14)  # rows of each site
SAMPLE = {"a": np.zeros(3), "t": np.float64(0)}


def rows(site: int) -> dict[str, Any]:
    """A site's own data."""
    rng = np.random.default_rng(site)
    return {"a": rng.normal(size=(SIZES[site], 3)), "t": rng.normal(size=SIZES[site]) + site}


def upper(x: Any, y: Any, batch: Any) -> Any:
    """The fit of y, and a pull on x."""
    return jnp.mean((batch["a"] @ y - batch["t"]) ** 2) / 2 + 0.05 * jnp.sum(x**2)


def lower(x: Any, y: Any, batch: Any) -> Any:
    """A strongly convex quadratic in y."""
    return jnp.mean((batch["a"] @ y - batch["t"]) ** 2) / 2 + jnp.sum((y - x) ** 2) / 2


def fit(x: Any, batch: Any) -> Any:
    """One level."""
    return jnp.mean((batch["a"] @ x - batch["t"]) ** 2) / 2


def own_fit(client: Any, x: Any, y: Any, memory: Any) -> dict[str, Any]:
    """How well a client's own model fits."""
    return {"own_loss": client.mean(lambda batch: fit(memory, batch), client.upper())}


def norm(x: Any, y: Any = ()) -> dict[str, float]:
    """Of x: it needs no data."""
    return {"norm": float(jnp.linalg.norm(x))}


def nested(clients: rk.Clients) -> Task:
    """FedNest's."""
    start = (np.ones(3), np.zeros(3))
    return Task("nested", rk.Bilevel(upper, lower), clients, start, norm, "-norm", rounds=6, every=1)


def personal(clients: rk.Clients) -> Task:
    """Ditto's."""
    problem = rk.SingleLevel(fit)
    return Task("personal", problem, clients, np.ones(3), norm, "-norm", 6, every=1, evaluate_client=own_fit)


def other(clients: rk.Clients) -> Task:
    """FedNest's, with another loss."""
    return Task(
        "nested", rk.Bilevel(upper, lambda *a: 2 * lower(*a)), clients, (np.ones(3), np.zeros(3)), norm, "-norm"
    )


TASK = nested(rk.Clients.like(lower=SAMPLE, upper=SAMPLE, n=3))
PERSONAL = personal(rk.Clients.like(upper=SAMPLE, n=3))
OTHER = other(rk.Clients.like(lower=SAMPLE, upper=SAMPLE, n=3))
