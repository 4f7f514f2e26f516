"""A portfolio with the best trade-off of return and risk, from the records of several markets."""

from functools import cache
from typing import Any

import numpy as np

from rookery.base.arguments import check_amounts, check_counts, check_positive, check_seed
from rookery.data.clients import Clients
from rookery.problems.objectives import Objective
from rookery.problems.objectives import portfolio as mean_and_variance
from rookery.tasks.task import Task


@cache
def _objective(aversion: float, budget: float | None) -> Objective:
    return mean_and_variance(aversion, budget)


def portfolio(
    clients: int = 8,
    assets: int = 6,
    samples: int = 100,
    heterogeneity: float = 1.0,
    aversion: float = 1.0,
    budget: float | None = None,
    seed: int = 0,
) -> Task:
    """Minimise −mean⟨r, x⟩ + λ var⟨r, x⟩ over x, where every client has seen different returns r.

    Arguments:
        clients: the number of clients.
        assets: the length of x and r.
        samples: the number of returns that each client has.
        heterogeneity: how much the clients' mean returns differ.
        aversion: λ.
        budget: the sum of x; None: free.
        seed: seed of the returns.

    Returns are normal and correlated, with deviations from .5 to 1.5. x starts at zero, or at equal parts of the
    budget. `Task.evaluate` returns `distance` = ‖x − x*‖² and `excess` = Φ(x) − Φ(x*), from the closed form `best`.
    """
    check_seed(seed)
    check_counts(clients=clients, assets=assets, samples=samples)
    check_amounts(heterogeneity=heterogeneity)
    check_positive(aversion=aversion)
    if clients * samples <= assets:
        raise ValueError(f"clients·samples must be more than assets={assets}; got {clients}·{samples}.")
    rng = np.random.default_rng(seed)
    mean = rng.uniform(0.2, 0.8, assets)
    mixing = np.linalg.cholesky(0.5 + 0.5 * np.eye(assets)) * rng.uniform(0.5, 1.5, assets)[:, None]
    returns = []
    for _ in range(clients):
        local_mean = mean + 0.3 * heterogeneity * rng.normal(size=assets)
        returns.append(local_mean + rng.normal(size=(samples, assets)) @ mixing.T)
    objective = _objective(float(aversion), None if budget is None else float(budget))
    pooled = np.concatenate(returns)
    optimum = best(pooled, aversion, budget)
    value = lambda x: -np.mean(pooled @ x) + aversion * np.var(pooled @ x)

    def evaluate(x: Any, y: Any) -> dict[str, float]:
        x = np.asarray(x, float)
        return {"distance": float(np.sum((x - optimum) ** 2)), "excess": float(value(x) - value(optimum))}

    start = np.zeros(assets) if budget is None else np.full(assets, budget / assets)
    return Task(
        name="portfolio",
        problem=objective.problem,
        clients=Clients(upper=[{"returns": own} for own in returns], weights="size"),
        init=objective.start(start),
        evaluate=evaluate,
        metric="distance",
        rounds=200,
        defaults={"step": 0.05, "momentum": 0.5, "local_steps": 5, "upper_step": 0.1, "lower_step": 0.5},
    )


def best(returns: np.ndarray, aversion: float, budget: float | None = None) -> np.ndarray:
    """Return x* = Σ⁻¹(μ − ν1)/(2λ) for the mean μ and covariance Σ of these returns; ν makes x* sum to the budget."""
    mean = returns.mean(axis=0)
    covariance = np.cov(returns.T, bias=True)
    ones = np.ones(len(mean))
    toward = np.linalg.solve(covariance, np.stack([mean, ones], axis=1))
    excess = 0.0 if budget is None else (ones @ toward[:, 0] - 2 * aversion * budget) / (ones @ toward[:, 1])
    return (toward[:, 0] - excess * toward[:, 1]) / (2 * aversion)
