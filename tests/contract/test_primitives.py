"""The primitives themselves: an algorithm that uses every one of them, against NumPy and on both engines."""

from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import rookery as rk
from rookery.data.cohort import sample_cohort
from rookery.engines.engine import Job
from rookery.testing.runs import outcome

VALUES, WEIGHTS = np.array([1.0, 2.0, 4.0, 8.0, 16.0]), np.array([0.1, 0.3, 0.2, 0.15, 0.25])
CHANCES, OTHERS = jnp.array([0.1, 0.0, 0.6, 0.0, 0.3]), jnp.array([1.0, 0.0, 2.0, 3.0, 5.0])
PROBLEM = rk.SingleLevel(lambda x, b: jnp.mean(jnp.mean(b) * x))


class State(NamedTuple):
    x: Any  # the result of the round
    seen: Any  # what the gather gave
    y: tuple[()] = ()


@dataclass(frozen=True)
class Everything:
    """mean, sum, gather, scatter, a loop of random length, values handed on, memory, and fresh cohorts."""

    step: float = 1.0

    solves: ClassVar[tuple[type, ...]] = (rk.SingleLevel,)

    def init(self, fed: Any, x: Any, y: Any, key: Any) -> State:
        fed.map_state(lambda c, k, _: (0.0, 100 * c.f_x(1.0, (), c.upper(k))), key)  # no exchange at all
        return State(x, jnp.zeros(fed.cohort_size if fed.cohort_size < fed.n else 3))

    def round(self, fed: Any, state: State, key: Any) -> State:
        k1, k2, k3 = jax.random.split(key, 3)
        value = fed.map(lambda c, k: c.f_x(1.0, (), c.upper(k)), k1)
        mean = fed.mean(value, name="mean")
        places = fed.scatter(jnp.arange(3.0))
        total = fed.sum(fed.map(lambda c, k, v, place: v + mean + place, k1, value, places), name="sum")
        times = jax.random.randint(k2, (), 0, 4)
        grown = fed.loop(times, lambda i, z: fed.mean(fed.map(lambda c, k: z + 1.0, k1), name="loop"), jnp.zeros(()))
        remembered = fed.map_state(lambda c, k, m: (m, m + 1), k1)
        seen = fed.gather(remembered, name="gather")
        other = fed.resample(k3)
        handed = other.scatter({"row": seen})
        fresh = other.mean(other.map(lambda c, k, z: z["row"] * c.f_x(1.0, (), c.upper(k)), k1, handed), name="fresh")
        drawn = fed.resample(k2, CHANCES)
        drawn_mean = drawn.mean(drawn.map(lambda c, k: c.f_x(1.0, (), c.upper(k)), k1), name="drawn", weights=OTHERS)
        return State(jnp.stack([mean, total, grown, fresh, drawn_mean]), seen)


def clients() -> rk.Clients:
    return rk.Clients(upper=[np.array([v]) for v in VALUES], weights=WEIGHTS)


def expected(rounds: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """The same by hand, from the keys and the cohorts alone."""
    memory = 100 * VALUES
    for t in range(rounds):
        choice, noise = jax.random.split(jax.random.fold_in(jax.random.key(seed), t + 1))
        ids = np.asarray(sample_cohort(choice, 5, 3))
        _, k2, k3 = jax.random.split(noise, 3)
        p = WEIGHTS[ids]
        mean = p @ VALUES[ids] / p.sum()
        total = 5 / 3 * p @ (VALUES[ids] + mean + np.arange(3))
        grown = int(jax.random.randint(k2, (), 0, 4))
        seen, memory[ids] = memory[ids].copy(), memory[ids] + 1
        other = np.asarray(sample_cohort(k3, 5, 3))
        fresh = WEIGHTS[other] @ (VALUES[other] * seen) / WEIGHTS[other].sum()
        drawn = np.asarray(sample_cohort(k2, 5, 3, CHANCES))
        drawn_mean = OTHERS[drawn] @ VALUES[drawn] / OTHERS[drawn].sum()
    return np.array([mean, total, grown, fresh, drawn_mean]), seen


@pytest.mark.parametrize(
    "engine",
    [
        pytest.param(rk.Simulation(), marks=pytest.mark.slow),
        rk.Simulation(block=2),
        pytest.param(rk.Simulation(debug=True), marks=pytest.mark.slow),
        "lockstep",
    ],
)
def test_every_primitive_is_what_it_says(engine: Any) -> None:
    engine = rk.Federation() if engine == "lockstep" else engine
    run = rk.solve(PROBLEM, clients(), Everything(), np.zeros(5), rounds=5, cohort=3, seed=11, engine=engine)
    x, seen = expected(5, 11)
    np.testing.assert_allclose(run.x, x, rtol=1e-12)
    np.testing.assert_allclose(run.state.seen, seen, rtol=1e-12)
    kinds = dict(zip(run.exchanges["name"], run.exchanges["kind"], strict=True))
    assert kinds["gather"] == "gather"  # said to be not aggregated
    assert kinds["sum"] == "sum"
    assert kinds["mean"] == kinds["fresh"] == "mean"


def test_the_ledger_adds_up() -> None:
    """Bytes by hand: float64, three clients; and the same on both engines."""
    runs = [
        rk.solve(PROBLEM, clients(), Everything(), np.zeros(5), rounds=6, cohort=3, seed=2, engine=engine)
        for engine in (rk.Simulation(block=2), rk.Federation())
    ]
    assert runs[0].history.drop(columns="seconds").equals(runs[1].history.drop(columns="seconds"))
    assert runs[0].exchanges.equals(runs[1].exchanges)
    history = runs[0].history
    for t in range(6):
        _, noise = jax.random.split(jax.random.fold_in(jax.random.key(2), t + 1))
        times = int(jax.random.randint(jax.random.split(noise, 3)[1], (), 0, 4))
        row = history.diff().iloc[t + 1]
        assert row["exchanges"] == 5 + times
        assert row["bytes_up"] == 3 * 8 * (5 + times)
        # What functions close over: the mean and the place for the sum, z in every turn, and the fresh cohort's rows.
        # No client reads the state; data are used whole, without a key; nothing is sent after the last exchange.
        down = 8 + 8 + 8 * times + 8
        assert row["bytes_down"] == 3 * down
    assert history["samples_busiest"].iloc[-1] == history["samples_upper"].iloc[0] / 5 + 6 * 3
    drawn = [sample_cohort(jax.random.split(_noise(2, t), 3)[1], 5, 3, CHANCES) for t in range(6)]
    different = sum(len(set(np.asarray(ids).tolist())) for ids in drawn)
    assert different < 6 * 3  # somebody was drawn twice, and worked once
    assert history["samples_upper"].iloc[-1] == 5 + 6 * (3 + 3) + different


def _noise(seed: int, t: int) -> Any:
    return jax.random.split(jax.random.fold_in(jax.random.key(seed), t + 1))[1]


class Judged(NamedTuple):
    x: Any
    y: tuple[()] = ()


@dataclass(frozen=True)
class Central:
    """The centre's value between two means, also inside a loop."""

    solves: ClassVar[tuple[type, ...]] = (rk.SingleLevel,)

    def init(self, fed: Any, x: Any, y: Any, key: Any) -> Judged:
        return Judged(x)

    def round(self, fed: Any, state: Judged, key: Any) -> Judged:
        k1, k2, k3 = jax.random.split(key, 3)
        own = lambda c, k: c.f_x(1.0, (), c.upper(k))
        mean = fed.mean(fed.map(own, k1), name="mean")
        judge = lambda i, z: (
            z
            + fed.center(lambda c, k: (i + 1) * c.f_x(1.0, (), c.upper(k, 2)), jax.random.fold_in(k2, i), name="judge")
        )
        judged = fed.loop(2, judge, mean)
        return Judged(fed.mean(fed.map(lambda c, k: judged * own(c, k), k3), name="last"))


CENTER = np.array([1.0, 10.0, 100.0])


def with_center(holder: int | None) -> rk.Clients:
    return rk.Clients(upper=[np.array([v]) for v in VALUES], weights=WEIGHTS, center=CENTER, center_client=holder)


def judged_on(engine: Any, clients: rk.Clients) -> rk.Run:
    return rk.solve(PROBLEM, clients, Central(), np.zeros(()), rounds=3, cohort=3, seed=4, engine=engine)


@pytest.mark.parametrize("holder", [pytest.param(None, marks=pytest.mark.slow), 1])
def test_the_center(holder: int | None) -> None:
    """Its value, its minibatches, and its bytes by hand: none of the server's own, one reply of a client's."""
    given = with_center(holder)
    here, there = (judged_on(engine, given) for engine in (rk.Simulation(block=2), rk.Federation()))
    assert here.history.drop(columns="seconds").equals(there.history.drop(columns="seconds"))
    assert here.exchanges.equals(there.exchanges)
    np.testing.assert_allclose(here.x, there.x, rtol=1e-12)
    history = here.history.diff()
    for t in range(3):
        choice, noise = jax.random.split(jax.random.fold_in(jax.random.key(4), t + 1))
        ids = np.asarray(sample_cohort(choice, 5, 3))
        row = history.iloc[t + 1]
        assert row["samples_upper"] == 3 + 2 * 2 + 3
        assert row["samples_busiest"] == 1 + 2 * 2 + 1  # everybody waits for the centre, too
        assert row["exchanges"] == (2 if holder is None else 4)
        assert row["bytes_up"] == 3 * 2 * 8 + (0 if holder is None else 2 * 8)
        # Clients are sent `judged`, once; the centre's holder the turn (4 bytes) and a key, twice.
        assert row["bytes_down"] == 3 * 8 + (0 if holder is None else 2 * (4 + 8))
    picked = [
        np.asarray(given.view("center", 0).draw(jax.random.fold_in(jax.random.fold_in(k2, i), 5), 2, 0, False).rows)
        for k2 in [jax.random.split(noise, 3)[1]]
        for i in range(2)
    ]
    p = WEIGHTS[ids] / WEIGHTS[ids].sum()
    judged = p @ VALUES[ids] + picked[0].mean() + 2 * picked[1].mean()
    np.testing.assert_allclose(here.x, judged * (p @ VALUES[ids]), rtol=1e-12)
    center = here.exchanges.set_index("name").loc["judge"]
    assert (center["kind"], center["count"]) == ("center", 0 if holder is None else 2)


@pytest.mark.slow
@pytest.mark.parametrize("holder", [None, 1])
def test_the_center_uncompiled(holder: int | None) -> None:
    here, slowly = (judged_on(rk.Simulation(**how), with_center(holder)) for how in ({"block": 2}, {"debug": True}))
    np.testing.assert_allclose(here.x, slowly.x, rtol=1e-12)


TABLE = np.arange(5.0)


@dataclass(frozen=True)
class Sends:
    """Values that functions close over: again, in a loop, by another cohort, after the last exchange, and constants."""

    step: float = 0.5

    solves: ClassVar[tuple[type, ...]] = (rk.SingleLevel,)

    def memory(self, x: Any, y: Any) -> Any:
        return x

    def init(self, fed: Any, x: Any, y: Any, key: Any) -> Judged:
        return Judged(x)

    def round(self, fed: Any, state: Judged, key: Any) -> Judged:
        x = state.x
        first = fed.mean(fed.map(lambda c, k: self.step * x * c.f_x(1.0, (), c.upper(k, 1)), key), name="first")
        second = fed.mean(fed.map(lambda c, k: x + first + TABLE, key), name="second")
        turn = lambda i, z: fed.mean(fed.map(lambda c, k: z + i * x, key), name="loop")
        last = fed.loop(3, turn, second)
        other = fed.resample(key)
        fresh = other.mean(other.map(lambda c, k: x + first, key), name="fresh")
        fed.map_state(lambda c, k, m: (0.0, m + second), key)
        return Judged(last + fresh)


def test_what_a_client_is_sent() -> None:
    """By hand: what its functions close over and it has not got, each once; a key that it uses; no constants."""
    clients = rk.Clients(upper=[np.array([v, v]) for v in VALUES], weights=WEIGHTS)
    job = Job(PROBLEM, clients, Sends(), (jnp.zeros(5), ()), cohort=3)
    vector, number, turn, key = 5 * 8, 8, 4, 8
    down = {
        "first": vector + number + key,  # x, the step and the key of a minibatch
        "second": vector,  # the first mean: x is there, and the table is a constant of the program
        "loop": 3 * (vector + turn),  # what the loop carries, in every turn
        "fresh": 2 * vector,  # another cohort has neither x nor the mean
        "finish": vector,  # the second mean, for the clients' memory
    }
    up = {"first": 1, "second": 1, "loop": 3, "fresh": 1, "finish": 0}
    for engine in (rk.Simulation(), rk.Federation()):
        found = outcome(engine, job, 1)
        assert {own["name"]: own["bytes_down"] for own in found.exchanges} == {k: 3 * v for k, v in down.items()}
        assert {own["name"]: own["bytes_up"] for own in found.exchanges} == {k: 3 * v * vector for k, v in up.items()}
        assert found.counts["bytes_down"] == 3 * sum(down.values()) + 5 * vector  # at the start: x, to remember
        assert found.sent in (None, found.counts["bytes_down"])
        assert found.received in (None, found.counts["bytes_up"])


def test_a_fresh_cohort_has_no_memory() -> None:
    @dataclass(frozen=True)
    class Forgetful:
        solves: ClassVar[tuple[type, ...]] = (rk.SingleLevel,)

        def init(self, fed: Any, x: Any, y: Any, key: Any) -> Judged:
            return Judged(x)

        def round(self, fed: Any, state: Judged, key: Any) -> Judged:
            fed.resample(key).map_state(lambda c, k, m: (m, m), key)
            return state

    with pytest.raises(ValueError, match="memory of a cohort of `resample` or `everyone` would be lost"):
        rk.solve(PROBLEM, clients(), Forgetful(), np.zeros(()), 1)
