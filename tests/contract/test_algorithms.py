"""What every algorithm promises, on every class of problem it claims."""

import dataclasses
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import rookery as rk
from rookery.checks import start_values
from rookery.engines import simulation
from rookery.hyperparameters import split
from rookery.tasks.quadratic import solution

from .cases import CORE, DEALT, EXCHANGES, PER_CLIENT, PRESETS, SETTINGS, case, claims, method, names, pairs

PAIRS = pairs()
FIRST = [(name, claims(name)[0]) for name in names()]


def together(cases: list[tuple[str, str]], cheap: bool = False) -> Any:
    """One test for each case; those of one case go to one worker, which then compiles it once.

    Unless it is cheap, it is a slow test for methods outside CORE, and for further classes of problem but FedNest's.
    """
    each = []
    for pair in cases:
        marks = [pytest.mark.xdist_group("-".join(pair))]
        if not cheap and (pair[0] not in CORE or (pair not in FIRST and pair[0] != "FedNest")):
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
    arguments = (it.problem, it.clients(weights=[1, 2, 1, 3]), method(name), it.init)
    here = rk.solve(*arguments, **sampled(name))
    there = rk.solve(*arguments, **{**sampled(name), "engine": rk.Federation()})
    close(here.state, there.state)
    assert ledger(here) == ledger(there)


@together(PAIRS)
def test_exchanges_are_those_of_the_paper(name: str, kind: str) -> None:
    it = case(kind)
    run = rk.solve(it.problem, it.clients(weights=[1, 2, 1, 3]), method(name), it.init, **sampled(name))
    assert np.diff(run.history["exchanges"]).tolist() == [EXCHANGES[name, kind]] * 3


@together([("FedNest", "Bilevel"), ("ScaffoldSaddle", "Minimax")])
def test_blocks_do_not_matter(name: str, kind: str) -> None:
    it = case(kind)
    arguments = (it.problem, it.clients(weights=[1, 2, 1, 3]), method(name), it.init)
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
    program = (rk.Simulation(), it.problem, split(method(name)).fixed)
    traced, key = split(method(name)).traced, jax.random.key(0)
    carry, _ = simulation._start_compiled.eval_shape(*program, clients, traced, x, y, key)
    after, _ = simulation._advance_compiled.eval_shape(*program, 4, 1, clients, traced, carry, 0, 1, key)
    own = kind.startswith("Local")  # the clients' y, and not the state's
    assert jax.tree.structure((after.state.x, after.state.y)) == jax.tree.structure((x, () if own else y))
    assert {leaf.dtype for leaf in jax.tree.leaves((after.state.x, after.state.y))} == {np.dtype(np.float32)}
    kinds = lambda tree: [(leaf.shape, leaf.dtype) for leaf in jax.tree.leaves(tree)]
    assert kinds(after) == kinds(carry)  # nothing changes its shape or its type from round to round


@together(FIRST)
def test_a_sweep_over_a_float_compiles_once(name: str, kind: str) -> None:
    it = case(kind)
    clients = it.clients(weights=[1, 2, 1, 3])
    floats = [f.name for f in dataclasses.fields(method(name)) if isinstance(getattr(method(name), f.name), float)]
    assert floats
    run = lambda **given: rk.solve(it.problem, clients, method(name, **given), it.init, **sampled(name))
    before = run()
    compiled = simulation._advance_compiled._cache_size()
    for field in floats:
        other = run(**{field: 0.5 * getattr(method(name), field)})
        pairs = zip(jax.tree.leaves((other.x, other.memory)), jax.tree.leaves((before.x, before.memory)), strict=True)
        assert not all(np.allclose(a, b, rtol=1e-12) for a, b in pairs), field
    assert simulation._advance_compiled._cache_size() == compiled


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


def test_a_site_that_forgot_catches_up() -> None:
    """A site that lost the round's earlier results asks for them and goes on with the same numbers."""
    it = case("Minimax")
    arguments = (it.problem, it.clients(), method("ScaffoldSaddle"), it.init)
    expected = rk.solve(*arguments, rounds=4, cohort=3, seed=3)

    class Forgetful(rk.Federation):
        def _open(self, cohort: int) -> Any:
            coordinator, asked = super()._open(cohort), itertools.count()
            send = coordinator._send

            def forget(i: int, request: bytes) -> bytes:
                if next(asked) % 3 == 0:
                    site = self._sites[i]
                    site._at, site._results, site._state, site._kept = None, [], None, {}
                return send(i, request)

            coordinator._send = forget
            return coordinator

    close(expected.state, rk.solve(*arguments, rounds=4, cohort=3, seed=3, engine=Forgetful()).state)
