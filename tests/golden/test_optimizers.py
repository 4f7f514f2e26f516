"""Optimizers at the server and for local steps against NumPy transcriptions: full batches, unequal clients, cohorts."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import optax
import pytest
import quadratics as q
import transcription as golden

import rookery as rk

STEPS = [3, 1, 2, 4, 1]  # τ_i
LETTERS = golden.Saddle(alpha=0.1, beta=0.0, tau=STEPS, project=q.project)
FEDAVG = rk.FedAvg(step=0.1, local_steps=STEPS)
ADAM = {"b1": 0.8, "b2": 0.95, "eps": 1e-3}
WHO = q.cohorts(q.N_CLIENTS, 2, 15, seed=5)
COHORT: dict[str, Any] = {"cohort": 2, "seed": 5}


def fedavg_round(ours: Any) -> Callable[..., tuple[Any]]:
    return lambda z, cohort: (list(golden.fedavg(ours, LETTERS, z[0], [cohort]))[-1],)


def single(clients: rk.Clients, algorithm: Any, **given: Any) -> list[Any]:
    return [(x,) for x, _ in q.trajectory(q.SINGLE_LEVEL, clients, algorithm, q.INIT[0], 15, **given)]


# The server's.


@pytest.mark.parametrize(
    "engine",
    [rk.Simulation(), pytest.param(rk.Federation(), marks=pytest.mark.slow)],
    ids=["simulation", "federation"],
)
def test_fedadam(engine: Any) -> None:
    """A cohort of unequal clients, on both engines; and x stays in its set."""
    ours, clients = q.single_level()
    rule = golden.adam(0.1, **ADAM)
    expected = list(golden.with_server(fedavg_round(ours), [rule], q.project, (q.INIT[0],), WHO))
    method = rk.with_server_optimizer(FEDAVG, upper=optax.adam(0.1, **ADAM))
    q.assert_same(single(clients, method, engine=engine, **COHORT), expected)
    assert any(np.isclose(np.linalg.norm(x), q.RADIUS) for (x,) in expected[1:])  # the projection was at work


NUMBERS = (0.05, 0.9, 0.99, 1e-2)


@pytest.mark.parametrize("kind", ["yogi", *(pytest.param(k, marks=pytest.mark.slow) for k in ("adam", "adagrad"))])
def test_the_optimizers_of_the_paper(kind: Any) -> None:
    ours, clients = q.single_level()
    rule = golden.adaptive(kind, *NUMBERS)
    expected = list(golden.with_server(fedavg_round(ours), [rule], q.project, (q.INIT[0],), WHO))
    method = rk.with_server_optimizer(FEDAVG, upper=rk.FedOpt(kind, *NUMBERS))
    q.assert_same(single(clients, method, **COHORT), expected)


@pytest.mark.parametrize("kind", ["adam", "yogi", "adagrad"])
@pytest.mark.parametrize("start", [None, 0.0])
def test_the_rules_of_the_paper(kind: Any, start: float | None) -> None:
    """v starts at τ², or at 0 as in FLamby; a variable with two parts of unlike scale."""
    rng = np.random.default_rng(0)
    gradients = [{"w": rng.normal(size=3), "b": 10 * rng.normal(size=())} for _ in range(20)]
    ours = rk.FedOpt(kind, *NUMBERS, start=start)
    rules = {name: golden.adaptive(kind, *NUMBERS, start=start) for name in ("w", "b")}
    state = ours.init(gradients[0])
    for gradient in gradients:
        update, state = ours.update(gradient, state)
        for name, rule in rules.items():
            np.testing.assert_allclose(update[name], -rule(gradient[name]), rtol=1e-12)


NEST = golden.Nest(
    alpha=0.08, beta=0.12, T=2, tau_inner=STEPS, tau_outer=[2, 3, 1, 1, 2], N=3, inverse_l=0.2, scaled=True
)
WORDS: dict[str, Any] = {
    "upper_step": 0.08, "lower_step": 0.12, "lower_rounds": 2, "lower_local_steps": STEPS,
    "upper_local_steps": [2, 3, 1, 1, 2], "neumann_terms": 3, "hessian_step": 0.2, "scale_steps": True,
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("lower", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_a_nested_sibling(lower: bool) -> None:
    """LFedNest with Adam on x and momentum on y, or on x only."""
    ours, clients = q.bilevel()
    one = lambda z, cohort: golden.NEST["LFedNest"](ours, NEST, cohort, *z)
    rules = [golden.adam(0.05, **ADAM), golden.momentum(0.9, 0.5) if lower else None]
    expected = list(golden.with_server(one, rules, lambda x: x, q.INIT, WHO))
    momentum = optax.sgd(0.9, momentum=0.5) if lower else None
    method = rk.with_server_optimizer(rk.LFedNest(**WORDS), optax.adam(0.05, **ADAM), momentum)
    q.assert_same(q.trajectory(q.BILEVEL, clients, method, q.INIT, 15, **COHORT), expected)


# The clients'.


@pytest.mark.parametrize("method", [rk.FedAvg, pytest.param(rk.FedProx, marks=pytest.mark.slow)])
def test_local_adam(method: Any) -> None:
    """Every client starts afresh in every round, for any number of steps."""
    ours, clients = q.single_level()
    prox = method is rk.FedProx
    rule = lambda: golden.adam(0.05, **ADAM)
    expected = [(x,) for x in golden.fedavg(ours, LETTERS, q.INIT[0], WHO, rule, mu=0.7 if prox else 0.0)]
    algorithm = method(local_steps=STEPS, optimizer=optax.adam(0.05, **ADAM), **({"proximal": 0.7} if prox else {}))
    q.assert_same(single(clients, algorithm, **COHORT), expected)


METHODS = ["FedNest", *(pytest.param(n, marks=pytest.mark.slow) for n in golden.NEST if n != "FedNest")]


@pytest.mark.slow
@pytest.mark.parametrize("name", METHODS)
def test_local_optimizers_of_both_levels(name: str) -> None:
    ours, clients = q.bilevel()
    rules = {"inner_rule": lambda: golden.momentum(0.2, 0.6), "outer_rule": lambda: golden.adam(0.05, **ADAM)}
    expected = list(golden.nest(name, ours, replace(NEST, **rules), q.INIT, WHO))
    own = {"lower_optimizer": optax.sgd(0.2, momentum=0.6), "upper_optimizer": optax.adam(0.05, **ADAM)}
    q.assert_same(q.trajectory(q.BILEVEL, clients, getattr(rk, name)(**WORDS, **own), q.INIT, 15, **COHORT), expected)
