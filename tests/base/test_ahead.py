"""What is drawn before a loop, for many turns at once: the same numbers, and nothing else than draws."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src import config

import rookery as rk
from rookery.base import jaxprs
from rookery.data.rows import minibatch
from rookery.engines import engine
from rookery.engines.simulation import device as simulation

KEY = jax.random.key(3)
SIZES = jnp.array([5, 3, 8, 2])


def looped(turn: Any, carry: Any, limit: int | None, turns: int = 6) -> tuple[Any, list[Any], list[str]]:
    """The last carry, the shapes of what was drawn ahead, and the primitives left in the loop."""
    body = jaxprs.LoopBody(turn, carry)
    rows = [] if limit is None else body.ahead(limit)(jnp.arange(turns, dtype=jnp.int32))
    for i in range(turns):
        carry, _ = body(i, carry, [row[i] for row in rows])
    return carry, [row.shape for row in rows], [str(eqn.primitive) for eqn in body.jaxpr.eqns]


def drawing(i: Any, x: Any) -> Any:
    """Keys and integers by the turn, minibatches twice, one number by the carry, and one that is no integer."""
    own = list(jax.random.split(jax.random.fold_in(KEY, i), 2))
    picks = jax.vmap(lambda size: minibatch(own[0], i, size, length=2, replace=False))(SIZES)
    again = jax.vmap(lambda size: minibatch(own[0], i, size, length=2, replace=False))(SIZES)
    by_carry = jax.random.randint(jax.random.fold_in(KEY, x.astype(int)), (), 0, 9)
    return 0.5 * x + jnp.sum(picks * jnp.arange(2)) - jnp.sum(again) + by_carry + jax.random.normal(own[1]), ()


def test_draws_ahead_change_nothing() -> None:
    start = jnp.float64(1)
    there, none, inside = looped(drawing, start, None)
    here, drawn, left = looped(drawing, start, 2**10)
    assert none == []
    assert here == there
    assert sorted(drawn) == [(6, 2), (6, 4, 2)]  # the keys, and the minibatches, once
    assert inside.count("random_fold_in") == 2
    assert left.count("random_fold_in") == 1


def test_what_is_too_large_stays_in_the_loop() -> None:
    there, _, _ = looped(drawing, jnp.float64(1), None)
    here, drawn, _ = looped(drawing, jnp.float64(1), 31)  # the minibatches have 32 bytes
    assert here == there
    assert (6, 4, 2) not in drawn
    assert len(drawn) == 1


def test_keys_that_nothing_is_drawn_from_are_dropped() -> None:
    def turn(i: Any, x: Any) -> Any:
        unused, used = jax.random.split(jax.random.fold_in(KEY, i))
        jax.random.split(unused)
        return x + jax.random.normal(used), i

    body, whole = (jaxprs.LoopBody(turn, jnp.float64(1)) for _ in range(2))
    body.prune()
    splits = lambda of: sum(eqn.primitive.name == "random_split" for eqn in of.jaxpr.eqns)
    assert (splits(whole), splits(body)) == (2, 1)
    assert body(3, 1.0) == whole(3, 1.0)


def test_nothing_to_draw() -> None:
    here, drawn, _ = looped(lambda i, x: (x + i, ()), jnp.float64(1), 2**10)
    assert here == 16
    assert drawn == []


def test_what_the_carry_keeps_is_known_ahead() -> None:
    """A key that every turn passes on, as the server's noise is; a key that changes stays in the loop."""

    def turn(i: Any, carry: Any) -> Any:
        x, kept, new = carry
        picks = [jax.random.randint(jax.random.fold_in(key, i), (), 0, 9) for key in (kept, new)]
        return (x + 10 * picks[0] + picks[1], kept, jax.random.fold_in(new, 1)), ()

    carry = jnp.int64(1), KEY, jax.random.key(4)
    there, _, inside = looped(turn, carry, None)
    here, drawn, left = looped(turn, carry, 2**10)
    assert here == there
    assert drawn == [(6,)]
    assert (inside.count("random_fold_in"), left.count("random_fold_in")) == (3, 2)


def other_generator(i: Any, x: Any) -> Any:
    return x + jax.random.randint(jax.random.key(i, impl="rbg"), (), 0, 9), ()


def raw_key(i: Any, x: Any) -> Any:
    key = jax.random.key_data(jax.random.key(7, impl="rbg")) + i.astype(jnp.uint32)
    return x + jax.random.randint(jax.random.wrap_key_data(key, impl="rbg"), (), 0, 9), ()


def called_back(i: Any, x: Any) -> Any:
    odd = jax.pure_callback(lambda i: np.int32(2 * i + 1), jax.ShapeDtypeStruct((), jnp.int32), i)
    return x + jax.random.randint(jax.random.fold_in(KEY, odd), (), 0, 9), ()


def first_of_many(i: Any, x: Any) -> Any:
    few = jax.jit(lambda key: jax.random.permutation(key, 1000)[:2])
    return x + jnp.sum(few(jax.random.key_data(KEY) + i.astype(jnp.uint32))), ()


def by_condition(i: Any, x: Any) -> Any:
    return x + jax.lax.cond(i % 2 == 0, lambda: jax.random.randint(KEY, (), 0, 9), lambda: 1), ()


@pytest.mark.parametrize("turn", [other_generator, raw_key, called_back, first_of_many, by_condition])
def test_what_can_not_be_drawn_for_many_turns_stays_in_the_loop(turn: Any) -> None:
    """Other numbers when vectorised, no vectorisation, much memory for a small result, a branch seldom taken."""
    there, _, _ = looped(turn, jnp.int64(1), None)
    here, drawn, _ = looped(turn, jnp.int64(1), 16)
    assert here == there
    assert drawn == []


def test_the_search_for_keys_used_twice_finds_none() -> None:
    with jax.debug_key_reuse(True):
        _, drawn, _ = looped(drawing, jnp.float64(1), 2**10, turns=1)
    assert drawn == []


METHODS = [
    rk.FedNest(lower_local_steps=(1, 3), batch_size=2, hessian_step=0.1, neumann_terms=3),
    rk.ASFBO(local_steps=(1, 3), batch_size=2),
    rk.CommFedBiO(batch_size=2, shrink=2),
    rk.FedNest(lower_local_steps=2, hessian_step="auto", neumann_terms=2),
]


def bilevel() -> Any:
    rng = np.random.default_rng(1)
    data = [{"a": rng.normal(size=(n, 4)), "t": rng.normal(size=n)} for n in (6, 3, 8, 5)]
    fit = lambda x, y, b: jnp.mean((b["a"] @ y - b["t"]) ** 2)
    problem = rk.Bilevel(upper=fit, lower=lambda x, y, b: fit(x, y, b) + jnp.sum(jnp.exp(x) * y**2))
    return problem, rk.Clients(lower=data, upper=data[::-1]), (np.zeros(4), np.zeros(4))


SLOW = pytest.mark.slow


@pytest.mark.parametrize(
    ("method", "mesh"),
    [
        pytest.param(METHODS[0], None, id="FedNest", marks=SLOW),
        pytest.param(METHODS[0], 2, id="FedNest, two devices", marks=SLOW),
        pytest.param(METHODS[1], None, id="ASFBO", marks=SLOW),
        pytest.param(METHODS[2], None, id="CommFedBiO", marks=SLOW),
        pytest.param(METHODS[3], None, id="FedNest, auto", marks=SLOW),
    ],
)
def test_rounds_drawn_together_are_the_same(method: Any, mesh: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Unequal clients, cohorts, a channel, dropouts, and a number of rounds that three does not divide."""
    problem, clients, start = bilevel()
    how: dict[str, Any] = {"cohort": 3, "seed": 5, "faults": rk.Faults(dropout=0.2), "every": 4}
    how |= {"channel": rk.chain(rk.clip(1.0), rk.gaussian(0.01)), "noise_seed": 3}
    alone = rk.solve(problem, clients, method, start, 7, **how)
    monkeypatch.setattr(simulation, "together", lambda: 3)
    together = rk.solve(problem, clients, method, start, 7, **how, engine=rk.Simulation(mesh=mesh))
    for a, b in zip(jax.tree.leaves(alone.state), jax.tree.leaves(together.state), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-13, atol=1e-15)
    assert alone.history.drop(columns="seconds").equals(together.history.drop(columns="seconds"))


def test_a_run_that_ends_early_or_stops(monkeypatch: pytest.MonkeyPatch) -> None:
    """Too few replies in a round that is not the first of those drawn together, and a run continued from there."""
    problem, clients, start = bilevel()
    how: dict[str, Any] = {"cohort": 2, "seed": 0, "faults": rk.Faults(dropout=0.1, minimum=2)}
    found = []
    for together in (1, 4):
        monkeypatch.setattr(simulation, "together", lambda together=together: together)
        session = rk.Simulation().open(
            engine.Job(problem, clients, rk.FedNest(hessian_step=0.1), start, how["cohort"], seed=how["seed"],
                       faults=how["faults"])
        )  # fmt: skip
        session.init()
        session.advance(20)
        found.append((session.rounds, str(session.stopped), [np.asarray(a) for a in jax.tree.leaves(session.state)]))
    (rounds, why, state), (others, other, other_state) = found
    assert 1 < rounds == others < 20
    assert why == other
    assert rounds % 4
    for a, b in zip(state, other_state, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-13)


def test_keys_by_kernel_on_a_gpu_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """JAX's own setting holds while a program is called, and not where much is drawn at once."""
    problem, clients, start = bilevel()
    plans = engine.traced(engine.Job(problem, clients, rk.FedNest(hessian_step=0.1), start, 4))
    noisy = rk.SingleLevel(lambda x, b, key: jnp.mean((x - b) ** 2) + jnp.mean(jax.random.normal(key, (200, 200)) * x))
    drawn = engine.traced(engine.Job(noisy, rk.Clients(upper=[np.ones(3)]), rk.FedAvg(), (np.zeros(()), ()), 1))
    setting = lambda: config.threefry_gpu_kernel_lowering.value

    def seen(fail: bool) -> Any:
        if fail:
            raise ValueError("no")
        return setting()

    monkeypatch.setattr(jax, "jit", lambda function, **options: function)
    assert not engine.compiled(plans.round, seen)(False)
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    by_kernel = engine.compiled(plans.round, seen)
    assert by_kernel(False)
    assert not setting()
    with pytest.raises(ValueError, match="no"):
        by_kernel(True)
    assert not setting()
    assert not engine.compiled(drawn.round, seen)(False)
    assert jaxprs.largest_draw(drawn.round.jaxpr) == 40_000
