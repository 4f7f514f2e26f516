"""`client.when`: the right values, for the right clients, at the right cost."""

from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import rookery as rk
from rookery.engines.engine import Job
from rookery.engines.simulation.sweep import Sweep

PROBLEM = rk.SingleLevel(lambda x, b: jnp.mean(b) * x)
SIZES = (3, 5, 4, 6)
CLIENTS = rk.Clients(upper=[np.full(n, 1.0 + i) for i, n in enumerate(SIZES)])
DONE: list[int] = []


class State(NamedTuple):
    x: Any
    replies: Any
    y: tuple[()] = ()


@dataclass(frozen=True)
class Rarely:
    """Every client, in each of three steps, takes its whole gradient if a coin says so."""

    step: float = 1.0

    solves: ClassVar[tuple[type, ...]] = (rk.SingleLevel,)

    def init(self, fed: Any, x: Any, y: Any, key: Any) -> State:
        return State(x, jnp.zeros(4))

    def round(self, fed: Any, state: State, key: Any) -> State:
        def gradient(c: Any, x: Any, v: Any) -> Any:
            jax.debug.callback(lambda who: DONE.append(int(who)), c.id)
            return x + (v + 1) * c.f_x(state.x, (), c.upper(key)) * self.step

        def local(c: Any, k: Any) -> Any:
            coins = jax.random.bernoulli(k, 0.4, (3,))
            return c.loop(3, lambda v, x: c.when(coins[v], lambda c: gradient(c, x, v), x), jnp.zeros(()))

        return State(state.x, fed.gather(fed.map(local, key)))


def expected() -> tuple[np.ndarray, list[int]]:
    _, key = jax.random.split(jax.random.fold_in(jax.random.key(3), 1))
    coins = [np.asarray(jax.random.bernoulli(jax.random.fold_in(key, i), 0.4, (3,))) for i in range(4)]
    return np.array([coin @ [1, 2, 3] * (1.0 + i) for i, coin in enumerate(coins)]), [int(c.sum()) for c in coins]


@pytest.mark.parametrize(
    "engine",
    [
        rk.Simulation(),
        rk.Simulation(block=3),
        pytest.param(rk.Simulation(debug=True), marks=pytest.mark.slow),
        rk.Federation(),
    ],
)
def test_only_those_who_have_to_do_the_work(engine: Any) -> None:
    values, times = expected()
    assert 0 < sum(times) < 12
    DONE.clear()
    run = rk.solve(PROBLEM, CLIENTS, Rarely(), np.zeros(()), 1, seed=3, engine=engine)
    jax.effects_barrier()
    np.testing.assert_allclose(run.state.replies, values)
    assert [DONE.count(i) for i in range(4)] == times
    assert run.history["samples_upper"].iloc[-1] == sum(n * size for n, size in zip(times, SIZES, strict=True))
    assert run.history["gradients"].iloc[-1] == sum(times)


def test_vectorised_over_candidates() -> None:
    """As `rk.tune` runs them: an outer axis beside that of the clients."""
    sweep = Sweep(Job(PROBLEM, CLIENTS, Rarely(), (jnp.zeros(()), ()), cohort=4, seed=3), {"step"})
    steps = {"step": (1.0, 0.5)}
    carries, finite, replied, _ = sweep.advance(steps, sweep.start(steps, 2), np.arange(2, dtype=np.int32), 0, 1)
    values, _ = expected()
    np.testing.assert_allclose(carries.state.replies, np.stack([values, 0.5 * values]))
    assert finite.all()
    assert replied.all()
