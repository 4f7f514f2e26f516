"""A server optimizer around every method: what travels stays the same, what it remembers stays, and what is refused."""

import dataclasses
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import rookery as rk
from rookery.engines import engine
from rookery.engines.federation import wire
from rookery.language.primitives import PRIMITIVES
from rookery.plan import trace as plan
from rookery.plan.costs import costs, counted_loops
from rookery.testing.runs import agree, outcome

from .cases import BOTH, CHEAP, HARD, case, claims, job, method, names, pairs, ragged, single, together

LAST = {"AFL": {"output": "last"}, "WeightedNodesProx": {"output": "last"}}  # what they report is where they go on
FIRST = [(name, claims(name)[0]) for name in names()]
FEDAVG = rk.FedAvg(step=0.05, local_steps=2)


def wrapped(name: str, upper: Any, lower: Any = None) -> Any:
    return rk.with_server_optimizer(method(name, **LAST.get(name, {})), upper, lower)


def reached(traced: plan.Plan, begin: Any) -> tuple[set[Any], set[str]]:
    """All values of a plan that depend on these inputs, and our primitives that are given one of them."""
    found, asked = set(begin), set()
    for eqn in traced.jaxpr.eqns:
        if any(v in found for v in eqn.invars if not hasattr(v, "val")):
            found.update(eqn.outvars)
            asked |= {str(eqn.primitive)} if eqn.primitive in PRIMITIVES else set()
    return found, asked


@together(pairs(), default=CHEAP | {"WeightedNodesProx"})
def test_what_travels_is_the_method_s(name: str, kind: str) -> None:
    """Exchanges and bytes are those of the method alone, no client's function depends on the moments, x does.

    In single precision, which stays.
    """
    it = single(ragged(kind))
    adam = optax.inject_hyperparams(optax.adam)(0.01)
    plain = engine.traced(job(name, it, method(name, **LAST.get(name, {})), **HARD)).round
    own_y = not kind.startswith("Local") and kind != "SingleLevel"
    traced = engine.traced(job(name, it, wrapped(name, adam, optax.adam(0.01) if own_y else None), **HARD))
    turns = [np.int32(2) for _ in counted_loops(plain.body)]
    assert costs(plain, turns) == costs(traced.round, turns)
    given = jax.tree.unflatten(jax.tree.structure(traced.round.given), traced.round.jaxpr.invars[-_count(traced) :])
    made = jax.tree.unflatten(jax.tree.structure(traced.round.made), traced.round.jaxpr.outvars)
    found, asked = reached(traced.round, jax.tree.leaves(given.carry.state.server_optimizer))
    assert not asked
    below = [getattr(made.carry.state, each) for each in getattr(method(name), "lower_variables", ("y",))]
    assert found.issuperset(jax.tree.leaves((made.carry.state.x, below if own_y else ())))
    before, after = traced.start.made.carry, traced.round.made.carry
    real = {leaf.dtype for leaf in jax.tree.leaves((before, after)) if jnp.issubdtype(leaf.dtype, jnp.inexact)}
    assert real == {np.dtype(np.float32)}


def test_a_tuple_of_moments_only_where_there_are_several_lower_variables() -> None:
    """Without `lower`, and for a y alone, the state is as if there were no z."""
    moments = lambda name, lower: (
        engine.traced(
            job(name, case("Bilevel"), wrapped(name, optax.sgd(1.0), lower))
        ).start.made.carry.state.server_optimizer.lower
    )
    alone = jax.tree.structure(moments("FedBiO", optax.adam(0.1)))
    assert alone == jax.tree.structure(optax.adam(0.1).init(jnp.zeros(2)))
    assert jax.tree.structure(moments("F2SA", optax.adam(0.1))) == jax.tree.structure(
        2 * (optax.adam(0.1).init(jnp.zeros(2)),)
    )
    assert moments("F2SA", None) is None


def _count(traced: Any) -> int:
    return len(jax.tree.leaves(traced.round.given))


@pytest.mark.slow
@together(FIRST, default={"FedAvg"})
def test_with_plain_steps_of_size_one_it_is_the_method_itself(name: str, kind: str) -> None:
    own_y = not kind.startswith("Local") and kind != "SingleLevel"
    one = optax.sgd(1.0)
    here = outcome(rk.Simulation(), job(name, ragged(kind), method(name, **LAST.get(name, {}))))
    there = outcome(rk.Simulation(), job(name, ragged(kind), wrapped(name, one, one if own_y else None)))
    agree(here, dataclasses.replace(there, state=type(there.state).of_method(*there.state[:-1])), 1e-9)


@together([("ScaffoldSaddle", "Minimax"), *(p for p in FIRST if p[0] in BOTH - {"ScaffoldSaddle"})], {"ScaffoldSaddle"})
@pytest.mark.slow
def test_both_engines(name: str, kind: str) -> None:
    """Unequal clients, a cohort, a channel and lost replies."""
    what = job(name, ragged(kind), wrapped(name, optax.adam(0.01)), **HARD)
    agree(outcome(rk.Simulation(block=2), what), outcome(rk.Federation(), what), 1e-8)


def solve(algorithm: Any, rounds: int = 3, **given: Any) -> rk.Run:
    it = case("SingleLevel")
    how: dict[str, Any] = {"cohort": 3, "seed": 2} | given
    return rk.solve(it.problem, it.clients(weights=[1, 2, 1, 3]), algorithm, it.init, rounds, **how)


def test_a_site_is_sent_no_moment() -> None:
    """What goes over the wire, message by message, beside what the optimizer remembers between the rounds."""
    sent: list[float] = []
    moments: list[float] = []

    def transport(sites: Any) -> Any:
        def send(client: int, request: bytes) -> bytes:
            sent.extend(float(v) for a in wire.decode(request)[1] if a.dtype.kind == "f" for v in a.ravel())
            return sites[client].handle(request)

        return send

    def look(run: rk.Run) -> None:
        held = run.state.server_optimizer.upper[0]
        moments.extend(float(v) for a in (held.mu, held.nu) for v in np.ravel(a))
        seen.append(np.array(run.x))

    seen: list[Any] = []
    algorithm = rk.with_server_optimizer(FEDAVG, upper=optax.adam(0.1))
    solve(algorithm, 4, engine=rk.Federation(transport=transport), callbacks=[look])
    assert len(set(moments)) == 4 * 6
    assert not set(moments) & set(sent)
    assert set(sent) == {FEDAVG.step, 1.0, *(float(v) for x in seen[:-1] for v in x)}  # the step, and x


def test_hyperparameters_are_the_method_s_own_and_compile_nothing() -> None:
    """Those of the method; and an optimizer's, where optax keeps them in its state: the rounds compile once."""
    adam = optax.adam(0.1)
    first = solve(rk.with_server_optimizer(FEDAVG, upper=adam))
    compiled = engine.PROGRAMS.made
    other = solve(dataclasses.replace(rk.with_server_optimizer(FEDAVG, upper=adam), step=0.1))
    assert engine.PROGRAMS.made == compiled
    assert not np.allclose(first.x, other.x)
    injected = lambda step: rk.with_server_optimizer(FEDAVG, upper=optax.inject_hyperparams(optax.adam)(step))
    np.testing.assert_allclose(solve(injected(0.1)).x, first.x, rtol=1e-6)
    compiled = engine.PROGRAMS.made
    assert not np.allclose(solve(injected(0.2)).x, first.x)
    assert engine.PROGRAMS.made == compiled + 1  # the start, where the number is


@pytest.mark.slow
def test_tune_and_the_best() -> None:
    it = case("SingleLevel")
    judge = lambda x, y: {
        "loss": float(it.problem.f(x, y, jax.tree.map(lambda *a: np.concatenate(a), *it.data["upper"])))
    }
    algorithm = rk.with_server_optimizer(FEDAVG, upper=optax.adam(0.05))
    found = rk.tune(
        it.problem, it.clients(), algorithm, it.init, 4, evaluate=judge, metric="loss", search=["step"], candidates=3
    )
    assert type(found.best) is type(algorithm)
    assert found.best.step in (0.005, 0.05, 0.5)
    run = rk.solve(it.problem, it.clients(), found.best, it.init, 4, evaluate=judge, keep_best="loss")
    assert run.best is not None
    np.testing.assert_allclose(run.history["loss"].iloc[-1], found.value, rtol=1e-9)


def test_a_checkpoint_goes_on_with_an_optimizer_made_anew(tmp_path: Path) -> None:
    made = lambda step=0.1: rk.with_server_optimizer(FEDAVG, upper=optax.adam(step))
    file = tmp_path / "run"
    solve(made(), 2, checkpoint=file)
    whole, resumed = solve(made(), 4), solve(made(), 4, checkpoint=file)
    jax.tree.map(np.testing.assert_array_equal, whole.state, resumed.state)
    with pytest.raises(ValueError, match="belongs to another run: its program"):
        solve(made(0.2), 6, checkpoint=file)


@pytest.mark.slow
def test_weights_stay_in_their_simplex() -> None:
    it = case("WeightedNodes")
    algorithm = wrapped("WeightedNodesABA", optax.adam(0.3))
    run = rk.solve(dataclasses.replace(it.problem, cap=0.5), it.clients(), algorithm, it.init, 2)
    assert np.max(run.weights) <= 0.5 + 1e-12
    assert np.min(run.weights) >= 0
    np.testing.assert_allclose(np.sum(run.weights), 1)
    assert np.ptp(run.weights) > 0.1
    assert not hasattr(solve(rk.with_server_optimizer(FEDAVG, optax.sgd(1.0)), 0).state, "weights")


# What is refused.


def odd(init: Any, update: Any) -> optax.GradientTransformation:
    return optax.GradientTransformation(init, update)


GROWS = odd(lambda x: (), lambda g, s, x=None: (g, (*s, g)))
WIDENS = odd(lambda x: jnp.zeros(()), lambda g, s, x=None: (g, jnp.zeros(2)))
FLAT = odd(lambda x: (), lambda g, s, x=None: (jnp.zeros(()), s))
ASKS = odd(lambda x: (), lambda g, s, x, value: (g, s))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: rk.with_server_optimizer(FEDAVG, optax.adam), r"upper must be .*; got <function .* Call it"),
        (lambda: rk.with_server_optimizer(FEDAVG, 0.1), r"upper must be an optax optimizer; got 0.1. Use for example"),
        (lambda: rk.with_server_optimizer(FEDAVG, lower="adam"), r"lower must be an optax optimizer; got 'adam'"),
        (lambda: rk.with_server_optimizer(FEDAVG), r"needs an optimizer; got none. Set upper="),
        (lambda: rk.with_server_optimizer(rk.FedAvg, optax.sgd(1.0)), r"must be an algorithm.*; got the class FedAvg"),
        (lambda: rk.with_server_optimizer("FedAvg", optax.sgd(1.0)), r"method must be an algorithm.*; got a str"),
        (
            lambda: rk.with_server_optimizer(rk.with_server_optimizer(FEDAVG, optax.sgd(1.0)), optax.sgd(1.0)),
            r"has a server optimizer already. Chain two",
        ),
        (lambda: rk.with_server_optimizer(FEDAVG, lower=optax.sgd(1.0)), r"lower must be left out for FedAvg, which"),
        (lambda: rk.with_server_optimizer(FEDAVG, GROWS), r"upper: an update must keep the structure"),
        (lambda: rk.with_server_optimizer(FEDAVG, WIDENS), r"upper: an update must keep the structure"),
        (lambda: rk.with_server_optimizer(FEDAVG, FLAT), r"upper: the optimizer's updates must have the structure"),
        (lambda: rk.with_server_optimizer(FEDAVG, ASKS), r"upper: the optimizer fails .*TypeError.*receives the"),
        (lambda: rk.with_server_optimizer(rk.AFL(), optax.sgd(1.0)), r"AFL must return its last .*Set output=\"last\""),
        (lambda: rk.FedOpt("sgd", 0.1), r"^rule must be one of adam, yogi, adagrad; got 'sgd'\.$"),
        (lambda: rk.FedOpt("adam", 0.0), r"^step must be a positive number; got 0.0\.$"),
        (lambda: rk.FedOpt("adam", 0.1, floor=0.0), r"^floor must be a positive number; got 0.0\.$"),
        (lambda: rk.FedOpt("adam", 0.1, decay=1.0), r"^decay must be below 1; got 1.0\.$"),
        (lambda: rk.FedOpt("adam", 0.1, start=-1.0), r"^start must be a number of at least 0; got -1.0\.$"),
        (lambda: rk.FedOpt("adam", 0.1, start=""), r"^start must be a number of at least 0; got ''\.$"),
        (lambda: rk.FedAvg(optimizer=GROWS), r"The local steps: an update must keep the structure"),
        (lambda: rk.FedAvg(optimizer=optax.adam), r"FedAvg: optimizer must be an optax .*; got the function adam"),
        (lambda: rk.FedAvg(optimizer="adam"), r"FedAvg: optimizer must be an optax optimizer.*; got 'adam'"),
    ],
)  # fmt: skip
def test_refused(make: Any, message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=message) as told:
        solve(make(), 1)
    assert "\n" not in str(told.value)


def test_what_an_optimizer_takes_the_place_of_is_not_searched() -> None:
    it, algorithm = case("SingleLevel"), rk.FedAvg(optimizer=optax.adam(0.1))
    how: Any = {"evaluate": lambda x, y: {"loss": 0.0}, "metric": "loss"}
    with pytest.raises(ValueError, match="FedAvg: step is not used, because optimizer has its own step size"):
        rk.tune(it.problem, it.clients(), algorithm, it.init, 1, search=["step"], **how)
    with pytest.raises(ValueError, match="FedAvg has no step sizes"):
        rk.tune(it.problem, it.clients(), algorithm, it.init, 1, **how)


@pytest.mark.slow
def test_any_state_in_a_local_loop() -> None:
    """Integers, Python's own numbers and wider types in an optimizer's state, and steps whose number is drawn."""

    def update(g: Any, state: Any, x: Any = None) -> Any:
        count, size, wide = state
        return jax.tree.map(lambda a: -size * a, g), (count + 1, size * 0.5, wide + 1)

    halving = odd(lambda x: (0, 0.1, np.float64(0)), update)
    what = job("FedAvg", single(case("SingleLevel")), method("FedAvg", optimizer=halving))
    here, there = (outcome(own, what) for own in (rk.Simulation(), rk.Federation()))
    agree(here, there, 1e-5)
    assert here.state.x.dtype == np.float32
    assert not np.allclose(here.state.x, what.start[0], atol=1e-3)
