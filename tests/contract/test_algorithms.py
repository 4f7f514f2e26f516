"""What every algorithm promises, on every class of problem it claims."""

import dataclasses
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import rookery as rk
from rookery import plan
from rookery.checks import start_values
from rookery.engines import engine
from rookery.engines.engine import Job
from rookery.tasks.quadratic import solution

from .cases import (
    DEALT,
    EXCHANGES,
    PER_CLIENT,
    PRESETS,
    SETTINGS,
    case,
    claims,
    method,
    names,
    pairs,
    ragged,
    weights,
)  # fmt: skip

PAIRS = pairs()
FIRST = [(name, claims(name)[0]) for name in names()]


# Those whose every contract is in `make test`; of the others it has what follows from the plan, `make slow` the rest.
QUICK = [("FedAvg", "SingleLevel"), ("ScaffoldSaddle", "Minimax")]


def together(cases: list[tuple[str, str]], cheap: bool = False) -> Any:
    """One test for each case; those of one case go to one worker, which then compiles it once.

    Unless it is cheap, it is a slow test for methods outside QUICK.
    """
    each = []
    for pair in cases:
        marks = [pytest.mark.xdist_group("-".join(pair))]
        if not cheap and pair not in QUICK:
            marks.append(pytest.mark.slow)
        each.append(pytest.param(*pair, marks=marks))
    return pytest.mark.parametrize(("name", "kind"), each)


def close(a: Any, b: Any, tolerance: float = 1e-10) -> None:
    """Both have the same structure and the same numbers."""
    assert jax.tree.structure(a) == jax.tree.structure(b)
    for left, right in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        np.testing.assert_allclose(np.asarray(left), np.asarray(right), rtol=tolerance, atol=tolerance)


def with_entries(state: Any, change: Any) -> Any:
    """The state with the entries that it has for each client put in another order, or left out."""
    own = lambda name: name in PER_CLIENT or getattr(state, name) is getattr(state, "weights", change)
    return state._replace(**{name: change(getattr(state, name)) for name in state._fields if own(name)})


def ledger(run: rk.Run) -> Any:
    return run.history.drop(columns="seconds").to_dict("list"), run.exchanges.to_dict("list")


def test_every_algorithm_has_its_settings_and_its_exchanges() -> None:
    assert set(SETTINGS) == set(names())
    assert set(EXCHANGES) == set(PAIRS)
    for name, of in PRESETS.items():
        assert getattr(rk, name).round is getattr(rk, of).round
        assert getattr(rk, name).init is getattr(rk, of).init


# Each case compiles two programs: SAMPLED (a cohort, minibatches, local steps that differ; in blocks) and WHOLE.
SAMPLED: dict[str, Any] = {"rounds": 3, "cohort": 3, "seed": 7, "engine": rk.Simulation(block=2)}
WHOLE: dict[str, Any] = {"rounds": 2, "seed": 1}


def sampled(name: str) -> dict[str, Any]:
    """SAMPLED, with everybody in the cohort of the methods that need it."""
    return {**SAMPLED, "cohort": None} if "all clients" in getattr(getattr(rk, name), "needs", ()) else SAMPLED


@together(PAIRS)
def test_lockstep_equals_simulation_in_blocks(name: str, kind: str) -> None:
    """A coordinator and sites that exchange bytes alone give the same numbers and the same ledger."""
    it = case(kind)
    arguments = (it.problem, it.clients(weights=weights(name)), method(name), it.init)
    here = rk.solve(*arguments, **sampled(name))
    there = rk.solve(*arguments, **{**sampled(name), "engine": rk.Federation()})
    close(here.state, there.state)
    assert ledger(here) == ledger(there)


HARD: dict[str, Any] = {
    "rounds": 2,
    "seed": 25,
    "channel": rk.chain(rk.clip(1.0), rk.gaussian(0.1)),
    "faults": rk.Faults(dropout=0.2),
}


@together(PAIRS)
def test_both_engines_agree_in_the_hard_setting(name: str, kind: str) -> None:
    """Clients of unequal size and weight, a cohort in blocks, clipping, noise and lost replies: numbers and ledger."""
    it = ragged(kind)
    arguments = (it.problem, it.clients(weights=weights(name)), method(name), it.init)
    how = {**HARD, "cohort": sampled(name)["cohort"]}
    here = rk.solve(*arguments, **how, engine=rk.Simulation(block=2))
    there = rk.solve(*arguments, **how, engine=rk.Federation())
    close(here.state, there.state)
    assert ledger(here) == ledger(there)


@pytest.mark.slow
@together(PAIRS, cheap=True)
def test_full_batches_of_unequal_clients(name: str, kind: str) -> None:
    it = ragged(kind)
    arguments = (it.problem, it.clients(weights=weights(name)), full(name), it.init)
    here = rk.solve(*arguments, rounds=2, seed=3)
    there = rk.solve(*arguments, rounds=2, seed=3, engine=rk.Federation())
    close(here.state, there.state)
    assert ledger(here) == ledger(there)


def traced(name: str, kind: str, clients: rk.Clients, init: Any) -> engine.Traced:
    """The plans of a run."""
    start = start_values(case(kind).problem, clients, init)
    cohort = sampled(name)["cohort"] or clients.n
    return engine.traced(Job(case(kind).problem, clients, method(name), start, cohort))


@together(PAIRS, cheap=True)
def test_exchanges_are_those_of_the_paper(name: str, kind: str) -> None:
    """From the plan, which the ledger is computed from."""
    it = case(kind)
    found = traced(name, kind, it.clients(weights=weights(name)), it.init).round
    turns = [np.int32(0) for _ in plan.traced_loops(found.body)]
    assert sum(entry.count for entry in plan.costs(found, turns).values()) == EXCHANGES[name, kind]


@together([("FedNest", "Bilevel"), ("ScaffoldSaddle", "Minimax")])
def test_blocks_do_not_matter(name: str, kind: str) -> None:
    it = case(kind)
    arguments = (it.problem, it.clients(weights=weights(name)), method(name), it.init)
    blocks = rk.solve(*arguments, **SAMPLED)
    whole = rk.solve(*arguments, **{**SAMPLED, "engine": rk.Simulation()})
    close(whole.state, blocks.state, 1e-12)
    assert ledger(whole) == ledger(blocks)


def full(name: str) -> Any:
    """The algorithm with full batches and a fixed number of local steps."""
    steps = {field: 2 for field in ("lower_local_steps", "local_steps") if field in SETTINGS[name]}
    return method(name, **dict.fromkeys(BATCHES & set(SETTINGS[name])), **steps)


BATCHES = {"batch_size", "upper_batch", "lower_batch", "first_batch", "inner_batch"}


@together([pair for pair in PAIRS if pair[0] not in DEALT])
def test_the_order_of_clients_does_not_matter(name: str, kind: str) -> None:
    it = case(kind)
    solve = lambda clients: rk.solve(it.problem, clients, full(name), it.init, **WHOLE).state
    other = with_entries(solve(it.clients([2, 1, 0], [3, 2, 1])), lambda each: each[::-1])
    close(solve(it.clients([0, 1, 2], [1, 2, 3])), other, 1e-12)


@together(FIRST)
def test_copies_compiled_are_one_client_uncompiled(name: str, kind: str) -> None:
    """Three clients with the same data, vectorised and compiled, are that client alone, run step by step."""
    it = case(kind)
    run = lambda clients, **how: rk.solve(it.problem, clients, full(name), it.init, **WHOLE, **how)
    solve = lambda clients, **how: with_entries(run(clients, **how).state, lambda each: ())
    close(solve(it.clients([1, 1, 1], [1, 2, 3])), solve(it.clients([1]), engine=rk.Simulation(debug=True)), 1e-12)


@together(FIRST, cheap=True)
def test_single_precision_stays_single(name: str, kind: str) -> None:
    """By the types alone, which are known when a program is traced."""
    it = case(kind)
    single = lambda tree: jax.tree.map(lambda a: np.asarray(a, np.float32), tree)
    clients = rk.Clients(**single(it.data), **single(it.center))
    x, y = start_values(it.problem, clients, single(it.init))
    found = traced(name, kind, clients, single(it.init))
    carry, after = found.start.made.carry, found.round.made.carry
    own = kind.startswith("Local")  # the clients' y, and not the state's
    assert jax.tree.structure((after.state.x, after.state.y)) == jax.tree.structure((x, () if own else y))
    assert {leaf.dtype for leaf in jax.tree.leaves((after.state.x, after.state.y))} == {np.dtype(np.float32)}
    kinds = lambda tree: [(leaf.shape, leaf.dtype) for leaf in jax.tree.leaves(tree)]
    rows = lambda tree: [(leaf.shape[1:], leaf.dtype) for leaf in jax.tree.leaves(tree)]
    assert kinds(after.state) == kinds(carry.state)  # nothing changes its shape or its type from round to round
    assert rows(after.memory) == rows(carry.memory)


@together(FIRST)
def test_a_sweep_over_a_float_compiles_once(name: str, kind: str) -> None:
    it = case(kind)
    clients = it.clients(weights=weights(name))
    floats = [f.name for f in dataclasses.fields(method(name)) if isinstance(getattr(method(name), f.name), float)]
    assert floats
    run = lambda **given: rk.solve(it.problem, clients, method(name, **given), it.init, **sampled(name))
    before = run()
    compiled = engine.PROGRAMS.made
    for field in floats:
        other = run(**{field: 0.5 * getattr(method(name), field)})
        pairs = zip(jax.tree.leaves((other.x, other.memory)), jax.tree.leaves((before.x, before.memory)), strict=True)
        assert not all(np.allclose(a, b, rtol=1e-12) for a, b in pairs), field
    assert engine.PROGRAMS.made == compiled


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


@together([("FedNest", "Bilevel"), ("FedNest", "Minimax"), ("FedSVRG", "SingleLevel")])
def test_a_solution_stays_put(name: str, kind: str) -> None:
    """Methods that correct client drift have the exact solution of heterogeneous clients as a fixed point."""
    problem, clients, best = _solution(kind)
    given: dict[str, Any] = {"batch_size": None}
    if name == "FedNest":
        given |= {"neumann": "cg", "neumann_terms": 12, "lower_local_steps": np.arange(1, clients.n + 1)}
    run = rk.solve(problem, clients, method(name, **given), best, rounds=5)
    x, y = (best, ()) if kind == "SingleLevel" else best
    close((run.x, run.y), (x, y), 1e-9)


@pytest.mark.parametrize("name", ["LFedNest", "LFedNestNonAlt", "FedNestSGD", "LFedNestSVRG"])
def test_a_solution_of_equal_clients_stays_put(name: str) -> None:
    """Methods without that correction keep the solution where the clients are equal: all their signs are right."""
    task = rk.tasks.quadratic(clients=1, seed=2)
    closed = solution(task)
    best = (closed.x, closed.y(closed.x))
    given = {"batch_size": None, "neumann": "cg", "neumann_terms": 12}
    run = rk.solve(task.problem, task.clients, method(name, **given), best, rounds=5)
    close((run.x, run.y), best, 1e-9)


@pytest.mark.slow
def test_random_number_of_terms_and_fresh_cohorts_in_lockstep() -> None:
    """The random N' and cohorts drawn anew for each exchange agree too, exchange by exchange."""
    it = case("Bilevel")
    for given in (
        {"neumann": "random", "neumann_terms": 4, "resample": True, "lower_rounds": 1},
        {"neumann": "cg", "hessian_step": "auto", "lower_rounds": 1},
    ):
        arguments = (it.problem, it.clients(weights=[1, 2, 1, 3]), method("FedNest", **given), it.init)
        here = rk.solve(*arguments, rounds=3, cohort=2, seed=3)
        there = rk.solve(*arguments, rounds=3, cohort=2, seed=3, engine=rk.Federation())
        close(here.state, there.state)
        assert ledger(here) == ledger(there)


def disturbed(sites: list[Any]) -> Any:
    """A transport that loses and repeats requests, to sites that forget."""
    asked = itertools.count()

    def send(i: int, request: bytes) -> bytes:
        k = next(asked)
        if k % 7 == 3:
            raise TimeoutError
        if k % 3 == 0:
            sites[i].forget()
        first = sites[i].handle(request)
        return sites[i].handle(request) if k % 2 else first

    return send


@pytest.mark.parametrize(("name", "kind"), [("ScaffoldSaddle", "Minimax"), ("FedSVRG", "SingleLevel")])
def test_lost_and_repeated_requests_change_nothing(name: str, kind: str) -> None:
    it = case(kind)
    arguments = (it.problem, it.clients(), method(name), it.init)
    expected = rk.solve(*arguments, rounds=3, cohort=3, seed=3)
    run = rk.solve(*arguments, rounds=3, cohort=3, seed=3, engine=rk.Federation(transport=disturbed))
    close(expected.state, run.state)
    assert ledger(expected) == ledger(run)
