"""What every algorithm promises, on every class of problem it claims."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import rookery as rk
from rookery.engines import engine
from rookery.tasks.quadratic import solution
from rookery.testing import check_method, contract
from rookery.testing.runs import agree, close, outcome

from .cases import (
    CORE,
    DEALT,
    EXCHANGES,
    HARD,
    PER_CLIENT,
    PRESETS,
    SETTINGS,
    case,
    claims,
    full,
    job,
    method,
    names,
    pairs,
    ragged,
    single,
    together,
    weights,
)  # fmt: skip

PAIRS = pairs()
FIRST = [(name, claims(name)[0]) for name in names()]


# Methods that ask who a client is: with a weight for each or its samples, without exchanges, or with work dealt out.
WHOM = {"AFL", "CoBo", "DRFA", "FastDRO", "FedMBO", "LocalTrain", "WeightedNodesProx", "WeightedNodesABA"}


def with_entries(state: Any, change: Any) -> Any:
    """The state with the entries that it has for each client put in another order, or left out."""
    own = lambda name: name in PER_CLIENT or getattr(state, name) is getattr(state, "weights", change)
    return state._replace(**{name: change(getattr(state, name)) for name in state._fields if own(name)})


def test_every_algorithm_has_its_settings_and_its_exchanges() -> None:
    assert set(SETTINGS) == set(names())
    assert set(EXCHANGES) == set(PAIRS)
    for name, of in PRESETS.items():
        assert getattr(rk, name).round is getattr(rk, of).round
        assert getattr(rk, name).init is getattr(rk, of).init


@pytest.mark.slow
@together([("FedNest", "Bilevel"), ("ScaffoldSaddle", "Minimax")])
def test_blocks_do_not_matter(name: str, kind: str) -> None:
    what = job(name, ragged(kind), **HARD)
    agree(outcome(rk.Simulation(block=2), what), outcome(rk.Simulation(), what), 1e-12)


WHOLE: dict[str, Any] = {"rounds": 2, "seed": 1}


@together([pair for pair in PAIRS if pair[0] not in DEALT], default=CORE)
def test_the_order_of_clients_does_not_matter(name: str, kind: str) -> None:
    it = case(kind)
    uneven = weights(name) is not None
    solve = lambda clients: rk.solve(it.problem, clients, full(name), it.init, **WHOLE).state
    other = with_entries(solve(it.clients([2, 1, 0], [3, 2, 1] if uneven else None)), lambda each: each[::-1])
    close(solve(it.clients([0, 1, 2], [1, 2, 3] if uneven else None)), other, 1e-12)


PULLED = {"CoBo"}  # a copy's local steps are pulled to where the others began the round


@together([pair for pair in FIRST if pair[0] not in PULLED], default={"ScaffoldSaddle"})
def test_copies_compiled_are_one_client_uncompiled(name: str, kind: str) -> None:
    """Three clients with the same data, vectorised and compiled, are that client alone, run step by step."""
    it = case(kind)
    uneven = weights(name) is not None
    run = lambda clients, **how: rk.solve(it.problem, clients, full(name), it.init, **WHOLE, **how)
    solve = lambda clients, **how: with_entries(run(clients, **how).state, lambda each: ())
    copies = it.clients([1, 1, 1], [1, 2, 3] if uneven else None)
    close(solve(copies), solve(it.clients([1]), engine=rk.Simulation(debug=True)), 1e-12)


@together(PAIRS)
def test_the_plan(name: str, kind: str) -> None:
    """What is known once it is traced: exchanges are those of the paper, and single precision stays single.

    Under a channel and with lost replies; where jax_enable_x64 allows for more, too.
    """
    what = job(name, single(ragged(kind)), **HARD)
    traced = engine.traced(what)
    assert contract.exchanges_of(traced) == EXCHANGES[name, kind]
    contract.types_kept(traced, what, np.dtype(np.float32))  # nor does anything change its shape from round to round
    x, y = what.start
    own = kind.startswith("Local")  # the clients' y, and not the state's
    after = traced.round.made.carry.state
    assert jax.tree.structure((after.x, after.y)) == jax.tree.structure((x, () if own else y))


# SGHA's finite differences are exact on quadratics, CoBo's weights stay at 1 while the clients agree, and the coin of
# BRFedBiP falls the same way with half its chance.
NO_EFFECT = {"SGHA", "CoBo", "BRFedBiP"}


@together(FIRST, default={"FedAvg"})
def test_a_sweep_over_a_float_compiles_once(name: str, kind: str) -> None:
    own = method(name)
    named = [f.name for f in dataclasses.fields(own) if isinstance(getattr(own, f.name), float)]
    assert named
    assert named == contract.floats(own)
    run = lambda algorithm: outcome(rk.Simulation(block=2), job(name, ragged(kind), algorithm, **HARD))
    contract.sweep_compiles_nothing(own, run, effects=name not in NO_EFFECT)


# Lost replies, and channels.


@together([pair for pair in PAIRS if pair[0] not in WHOM], default={"ScaffoldSaddle"})
def test_lost_replies_of_equal_clients_change_nothing(name: str, kind: str) -> None:
    """Whoever is heard: the mean over equal clients is each one's value. (What a client remembers is its own.)"""
    it = case(kind)
    copies = it.clients([1, 1, 1, 1])
    run = lambda seed, **how: rk.solve(it.problem, copies, full(name), it.init, rounds=1, seed=seed, **how)

    def lossy(seed: int) -> tuple[int, rk.Run]:
        """With a seed from this one on with which some replies are lost, and not all to one exchange."""
        try:
            found = run(seed, faults=rk.Faults(dropout=0.4))
        except rk.RoundFailedError:
            return lossy(seed + 1)
        return (seed, found) if found.history["missing"].iloc[-1] else lossy(seed + 1)

    seed, heard = lossy(0)
    everybody = run(seed)
    close((everybody.x, everybody.y), (heard.x, heard.y), 1e-12)


@together(PAIRS, default={"ScaffoldSaddle"})
def test_a_bound_that_nothing_reaches_changes_nothing(name: str, kind: str) -> None:
    run = lambda **given: outcome(rk.Federation(), job(name, ragged(kind), **given), 3)
    free, bounded = run(), run(channel=rk.clip(1e9))
    close((free.state, free.memory), (bounded.state, bounded.memory))


# What a stranger's method is held to, on clients of 1, 3, 40 and 200 samples.

SAME_KEY = {"FastDRO", "FedDRO", "MBSGD", "SCGD", "WeightedNodesProx"}  # two maps draw the same minibatches, as stated
LONG = [pytest.param(name, marks=pytest.mark.slow) for name in ("unequal clients", "loose clip", "resume")]


@pytest.mark.parametrize("check", ["keys", "channel and faults", *LONG])
@together(PAIRS, default={"FedAvg"})
def test_the_contract_of_anyone_s_method(name: str, kind: str, check: str) -> None:
    skip = ["keys"] if name in SAME_KEY else []
    report = check_method(method(name), kind, exchanges=EXCHANGES[name, kind], only=[check], skip=skip)
    assert len(report.of("passed")) == 1 - (check in skip)


BOUND = 1e-3
# Methods whose x moves by more than what they are sent: it is scaled to a length, or to the clients' shares of it.
SCALED = {
    "ASFBO",
    "LAASFBO",
    "SimFBO",
    "ShroFBO",
    "QFedAvg",
    "AFL",
    "LocalTrain",
    "WeightedNodesProx",
    "WeightedNodesABA",
}


@together([pair for pair in PAIRS if pair[0] not in SCALED], default={"ScaffoldSaddle"})
def test_a_channel_sees_how_far_an_iterate_moved(name: str, kind: str) -> None:
    """Under a tight bound x (and y, where it is an iterate) stays near, instead of shrinking to the bound."""
    what = job(name, ragged(kind), channel=rk.clip(BOUND))
    found = outcome(rk.Federation(), what, 1)
    moved = lambda a, b: max(np.max(np.abs(u - v)) for u, v in zip(*map(jax.tree.leaves, (a, b)), strict=True))
    bound = (EXCHANGES[name, kind] + 1) * BOUND
    assert moved(found.state.x, what.start[0]) <= bound
    if kind in ("Bilevel", "Minimax"):
        assert moved(found.state.y, what.start[1]) <= bound


# The set that x is in.

RADIUS = 0.05


@together([pair for pair in PAIRS if pair[1] != "WeightedNodes"], default={"ScaffoldSaddle"})
def test_x_stays_in_its_set(name: str, kind: str) -> None:
    it = case(kind)
    start = it.init if kind == "SingleLevel" else (np.ones_like(it.init[0]), it.init[1])
    box = lambda x: jnp.clip(x, 1 - RADIUS, 1 + RADIUS)
    problem = dataclasses.replace(it.problem, project_upper=box)
    far: list[float] = []
    rk.solve(
        problem, it.clients(weights=weights(name)), method(name), start, rounds=4,
        evaluate=lambda x, y: far.append(float(np.max(np.abs(np.asarray(x) - 1)))) or {},
    )  # fmt: skip
    assert len(far) == 5
    assert max(far) <= RADIUS + 1e-12
    assert max(far) > 0


# Solutions.


def _solution(kind: str) -> Any:
    """A case of equal clients with its exact solution, and its clients."""
    it = case(kind)
    if kind == "Bilevel":
        task = rk.tasks.quadratic(clients=3, heterogeneity=1.0, seed=2)
        closed = solution(task)
        return task.problem, task.clients, (closed.x, closed.y(closed.x))
    if kind == "Minimax":
        task = rk.tasks.minimax_quadratic(clients=5, spread=2.0, seed=1)
        return task.problem, task.clients, (np.zeros(10), np.zeros(10))
    problem = rk.SingleLevel(lambda x, b: jnp.mean(jnp.sum((x - b["t"]) ** 2 * b["w"], axis=-1)))
    rows = [{"t": np.full((1, 2), float(i)), "w": np.full((1, 2), 1.0 + i)} for i in range(3)]
    best = sum(i * (1.0 + i) for i in range(3)) / sum(1.0 + i for i in range(3))
    assert it is not None
    return problem, rk.Clients(upper=rows), np.full(2, best)


@together([("FedNest", "Bilevel"), ("FedNest", "Minimax"), ("FedSVRG", "SingleLevel")], default=names())
def test_a_solution_stays_put(name: str, kind: str) -> None:
    """Methods that correct client drift have the exact solution of heterogeneous clients as a fixed point."""
    problem, clients, best = _solution(kind)
    given: dict[str, Any] = {"batch_size": None}
    if name == "FedNest":
        given |= {"neumann": "cg", "neumann_terms": 12, "lower_local_steps": np.arange(1, clients.n + 1)}
    run = rk.solve(problem, clients, method(name, **given), best, rounds=5)
    x, y = (best, ()) if kind == "SingleLevel" else best
    close((run.x, run.y), (x, y), 1e-9)


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    ["LFedNest", "LFedNestNonAlt", "FedNestSGD", "LFedNestSVRG"],
)
def test_a_solution_of_equal_clients_stays_put(name: str) -> None:
    """Methods without that correction keep the solution where the clients are equal: all their signs are right."""
    task = rk.tasks.quadratic(clients=1, seed=2)
    closed = solution(task)
    best = (closed.x, closed.y(closed.x))
    given = {"batch_size": None, "neumann": "cg", "neumann_terms": 12}
    run = rk.solve(task.problem, task.clients, method(name, **given), best, rounds=5)
    close((run.x, run.y), best, 1e-9)


@pytest.mark.slow
@pytest.mark.parametrize(
    "given",
    [
        {"neumann": "random", "neumann_terms": 4, "resample": True, "lower_rounds": 1},
        {"neumann": "cg", "hessian_step": "auto", "lower_rounds": 1},
    ],
    ids=["random", "cg"],
)
def test_random_number_of_terms_and_fresh_cohorts_on_both_engines(given: dict[str, Any]) -> None:
    """The random N' and cohorts drawn anew for each exchange agree too, exchange by exchange."""
    what = job("FedNest", ragged("Bilevel"), method("FedNest", **given), **HARD)
    agree(outcome(rk.Simulation(block=2), what, 3), outcome(rk.Federation(), what, 3))
