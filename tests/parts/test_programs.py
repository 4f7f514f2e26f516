"""Functions that come to the same program share what was compiled; others never do."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import rookery as rk
from rookery.engines import federation, programs


def new(*calls: Callable[[], Any]) -> int:
    """How many programs these calls add."""
    before = len(programs._compiled)
    for call in calls:
        call()
    return len(programs._compiled) - before


def test_inputs_that_are_not_needed_make_no_difference() -> None:
    first = programs.shared(lambda a, b: {"sum": jnp.sum(jnp.exp(a) * 0.1718)})
    second = programs.shared(lambda old, a: {"total": jnp.sum(jnp.exp(a[1]) * 0.1718)})
    x, y = jnp.arange(3.0), jnp.ones((2, 2))
    assert new(lambda: first(x, y), lambda: second(y, [y, x])) == 1
    expected = float(np.exp(np.arange(3.0)).sum() * 0.1718)
    assert float(first(x, y)["sum"]) == pytest.approx(expected)
    assert float(second(y, [y, x])["total"]) == pytest.approx(expected)


def test_inputs_are_told_apart_by_their_place() -> None:
    """The same text but for which of two like inputs is taken, and which comes first."""
    x, y = jnp.array([2.0, 3.0]), jnp.array([5.0, 7.0])
    take, drop = programs.shared(lambda a, b: a**3), programs.shared(lambda a, b: b**3)
    np.testing.assert_allclose([take(x, y), drop(x, y)], [x**3, y**3])
    one, other = programs.shared(lambda a, b: a - 2 * b), programs.shared(lambda a, b: b - 2 * a)
    np.testing.assert_allclose([one(x, y), other(x, y)], [x - 2 * y, y - 2 * x])


def test_what_a_function_closes_over_is_an_input() -> None:
    def scaled(values: np.ndarray) -> Callable[..., Any]:
        return programs.shared(lambda a: jnp.cos(a) * values)

    one, two = scaled(np.array([1.0, 2.0])), scaled(np.array([3.0, 4.0]))
    x = jnp.zeros(2)
    assert new(lambda: one(x), lambda: two(x)) == 1
    np.testing.assert_allclose([one(x), two(x)], [[1, 2], [3, 4]])


def test_a_number_in_the_code_is_part_of_the_program_and_an_index_is_not() -> None:
    x = jnp.ones(())
    written = [programs.shared(lambda a, i=i: jnp.tanh(a) + 10 * i) for i in range(3)]
    given = [programs.shared(lambda a, i=i: jnp.tanh(a) + 10 * programs.index(i)) for i in range(3)]
    assert new(*(lambda f=f: f(x) for f in written)) == 3
    assert new(*(lambda f=f: f(x) for f in given)) == 1
    np.testing.assert_allclose([f(x) for f in given], [f(x) for f in written])


def test_other_types_are_another_program() -> None:
    double = programs.shared(lambda a: 2 * a)
    for dtype in (jnp.float32, jnp.int32, jnp.bfloat16):
        assert double(jnp.ones(5, dtype)).dtype == dtype
    assert double(jnp.ones(7)).shape == (7,)


def test_callbacks_are_told_apart() -> None:
    """In the text they are numbers."""
    shape = jax.ShapeDtypeStruct((), np.float32)
    calls = [programs.shared(lambda a, by=by: jax.pure_callback(lambda v: v * by, shape, a)) for by in (2, 3)]
    assert [float(f(np.float32(5))) for f in calls] == [10, 15]


def test_a_changed_setting_of_jax_is_another_program() -> None:
    draw = programs.shared(lambda key: jax.random.normal(key, (3,)))
    key = jax.random.key(3)
    for partitionable in (True, False, True):
        with jax.threefry_partitionable(partitionable):
            np.testing.assert_array_equal(draw(key), jax.random.normal(key, (3,)))


def test_what_a_function_closed_over_is_taken_as_it_was() -> None:
    values = np.ones(3)
    add = programs.shared(lambda a: a + values)
    x = jnp.zeros(3)
    add(x)
    values[:] = 7
    np.testing.assert_array_equal(add(x), np.ones(3))


def test_an_engine_serves_again_with_other_data() -> None:
    engine, problem = rk.Federation(), rk.SingleLevel(lambda x, batch: jnp.mean((x - batch) ** 2))
    for value in (1.0, 10.0):
        clients = rk.Clients(upper=[np.full((2, 1), value)] * 2)
        run = rk.solve(problem, clients, rk.FedAvg(step=0.5), jnp.zeros(1), 3, engine=engine, progress=False)
        assert float(run.x[0]) == pytest.approx(value)


def test_a_weak_type_is_another_type() -> None:
    """Literals: the programs have the same text."""
    strong, weak = programs.shared(lambda a: np.float32(0.3125)), programs.shared(lambda a: 0.3125)
    with jax.enable_x64(False):
        x = jnp.ones(3)
        assert [jax.typeof(f(x)).weak_type for f in (strong, weak, strong)] == [False, True, False]


def test_the_windows_of_a_loop_are_one_program_for_a_site() -> None:
    """Three times the exchanges, and no more programs; and the same numbers as in the simulation."""
    rng = np.random.default_rng(0)
    rows = [{"a": rng.normal(size=(6, 3)), "b": rng.normal(size=6)} for _ in range(4)]
    problem = rk.WeightedNodes(lambda theta, batch: jnp.mean((batch["a"] @ theta - batch["b"]) ** 2), 0.5)
    clients = rk.Clients(lower=rows[:3], center=rows[3])

    def solve(windows: int, engine: Any) -> Any:
        method = rk.WeightedNodesProx(0.05, 0.05, 0.1, steps=4 * windows, sync_every=4, refresh=0.3, batch_size=2)
        return rk.solve(problem, clients, method, jnp.zeros(3), 2, engine=engine, progress=False)

    with jax.enable_x64(True):
        few, many = new(lambda: solve(4, rk.Federation())), new(lambda: solve(12, rk.Federation()))
        assert few >= 1
        assert many == 0
        here, there = solve(12, rk.Federation()), solve(12, rk.Simulation())
        np.testing.assert_allclose(here.weights, there.weights, rtol=1e-10)
        np.testing.assert_allclose(here.y, there.y, rtol=1e-10)


class State(NamedTuple):
    x: Any
    y: tuple[()] = ()


@dataclass(frozen=True)
class LaterAgain:
    """The first map's value is needed for the first exchange and the third, not for the second."""

    solves: ClassVar[tuple[type, ...]] = (rk.SingleLevel,)

    def init(self, fed: Any, x: Any, y: Any, key: Any) -> State:
        return State(x)

    def round(self, fed: Any, state: State, key: Any) -> State:
        first = fed.map(lambda c, k: c.f_x(state.x, (), c.upper(k)), key)
        one = fed.mean(first, name="one")
        two = fed.mean(fed.map(lambda c, k: one + 1, key), name="two")
        return State(fed.mean(fed.map(lambda c, k, value: value * two, key, first), name="three"))


def test_a_site_computes_nothing_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    pieces: list[Any] = []
    make = federation._piece
    monkeypatch.setattr(federation, "_piece", lambda *which: pieces.append(make(*which)) or pieces[-1])
    problem, clients = rk.SingleLevel(lambda x, batch: jnp.mean((x - batch) ** 2)), rk.Clients(upper=[np.ones((2, 1))])
    here = rk.solve(problem, clients, LaterAgain(), jnp.zeros(1), 1, engine=rk.Federation(), progress=False)
    assert [piece.maps for piece in pieces] == [(0,), (1,), (2,)]
    assert float(here.x[0]) == pytest.approx(-2 * (-2 + 1))  # f_x = 2(x - 1) = -2
