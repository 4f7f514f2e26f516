"""The ready-made tasks: their defaults work, and the hyperparameters that are learnt are worth learning."""

import runpy
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from scipy.optimize import minimize
from sklearn.linear_model import LogisticRegression

import rookery as rk
from rookery.cli.registry import TASKS
from rookery.cli.request import default_algorithm
from rookery.tasks.hyperrep import hidden
from rookery.tasks.images import digit_images

EXAMPLES = Path(__file__).parents[2] / "examples"
# Tasks whose metric is an accuracy, or whose data may not be at hand: they have tests of their own.
OTHERS = (
    "data-cleaning",
    "dro-imbalanced",
    "fairness",
    "fed-heart",
    "fed-tcga",
    "few-shot",
    "group-weights",
    "hyperrep",
    "loss-tuning",
    "weighted-nodes",
    "worst-group",
)


@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=pytest.mark.slow) if n == "hyperparameters" else n for n in TASKS if n not in OTHERS],
)
def test_the_defaults_lower_the_metric(name):
    task = TASKS[name]()
    method = task.algorithm(getattr(rk, default_algorithm(task)))
    run = rk.solve(
        task.problem,
        task.clients,
        method,
        task.init,
        60,
        cohort=task.cohort,
        evaluate=task.evaluate,
        every=60,
        progress=False,
    )
    first, last = run.history[task.metric]
    assert last < 0.5 * first


def _fit(rows, penalty):
    """Penalised logistic regression by L-BFGS, independent of the library; its weights and intercept."""
    a, sign = rows["features"].astype(float), 2.0 * rows["label"] - 1

    def objective(z):
        margin = sign * (a @ z[:-1] + z[-1])
        pull = -sign / (1 + np.exp(margin)) / len(sign)
        value = np.logaddexp(0, -margin).mean() + 0.5 * penalty * z[:-1] @ z[:-1]
        return value, np.append(a.T @ pull + penalty * z[:-1], pull.sum())

    z = minimize(objective, np.zeros(a.shape[1] + 1), jac=True, method="L-BFGS-B", options={"maxiter": 1000}).x
    return {"w": z[:-1], "b": z[-1]}


@pytest.mark.slow
def test_learnt_penalties_beat_the_start_and_hold_against_a_grid():
    # Of seeds that were not looked at when the task's settings were chosen. A single seed may well go to the grid.
    problem = rk.tasks.hyperparameters().problem
    tested = {"start": [], "grid": [], "learnt": []}
    trust = []
    for seed in range(3, 9):
        task = replace(rk.tasks.hyperparameters(seed=seed), problem=problem)
        method = task.algorithm(rk.FedNest)
        run = rk.solve(
            problem, task.clients, method, task.init, task.rounds, evaluate=task.evaluate, every=150, progress=False
        )
        rows = {name: np.asarray(value) for name, value in task.clients.lower.rows.items()}
        start = task.evaluate(None, _fit(rows, 0.1))
        grid = [task.evaluate(None, _fit(rows, penalty)) for penalty in np.geomspace(1e-3, 1, 7)]
        by_validation = min(grid, key=lambda metrics: float(metrics["validation_loss"]))
        last = run.history.iloc[-1]
        assert last["loss"] < start["loss"]
        assert last["validation_loss"] < by_validation["validation_loss"]
        for name, metrics in (("start", start), ("grid", by_validation), ("learnt", last)):
            tested[name].append(float(metrics["loss"]))
        penalties = np.exp(run.x)
        trust.append(np.median(penalties[:30]) < np.median(penalties[30:]))
    mean = {name: np.mean(values) for name, values in tested.items()}
    assert mean["learnt"] < 0.8 * mean["start"]
    assert mean["learnt"] < 1.05 * mean["grid"]
    assert all(trust), "the noise is to be penalised more than the measurements"


@pytest.mark.slow
def test_clients_that_differ():
    task = rk.tasks.hyperparameters(partition="dirichlet")
    method = task.algorithm(rk.FedNest)
    run = rk.solve(task.problem, task.clients, method, task.init, 60, evaluate=task.evaluate, every=60, progress=False)
    assert run.history["accuracy"].iloc[-1] > 0.93


@pytest.mark.slow
def test_the_example_draws_its_picture(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MPLBACKEND", "Agg")
    names = runpy.run_path(str(EXAMPLES / "hyperparameters.py"))
    assert (tmp_path / "hyperparameters.png").stat().st_size > 10_000
    losses = names["run"].history["loss"]
    assert losses.iloc[-1] < 0.75 * losses.iloc[10]
    penalties = np.exp(names["run"].x)
    assert np.median(penalties[:30]) < 0.5 * np.median(penalties[30:])


def test_output_layers_of_the_clients_own():
    """With one client the fit is plain logistic regression: scikit-learn's, on the same features, agrees."""
    task = rk.tasks.hyperrep(clients=1, scope="client", penalty=0.01)
    x, _ = task.init
    own = task.clients.client_data(0)["lower"][0]
    features = np.asarray(hidden(x, own)["image"])
    fit = LogisticRegression(C=1 / (0.01 * len(features)), max_iter=1000).fit(features, own["label"])
    images, labels = digit_images(0)[2:]
    expected = fit.score(np.asarray(hidden(x, {"image": images})["image"]), labels)
    assert float(task.evaluate(x, ())["accuracy"]) == pytest.approx(expected, abs=0.03)


@pytest.mark.slow
@pytest.mark.parametrize(("cls", "scope", "least"), [(rk.FedBiO, "global", 0.6), (rk.FedBiOLocal, "client", 0.9)])
def test_hyperrep_with_two_labels_a_client(cls, scope, least):
    task = rk.tasks.hyperrep(partition="shards", equal=True, scope=scope)
    run = rk.solve(
        task.problem, task.clients, task.algorithm(cls), task.init, 40, cohort=10, every=20, evaluate=task.evaluate
    )
    assert np.isfinite(run.history["loss"]).all()
    assert run.history["accuracy"].iloc[-1] > least
    assert run.history["loss"].iloc[-1] < run.history["loss"].iloc[0]
