"""Rows that stay on the host give the numbers of rows on the device, and only those that are needed are read."""

import itertools
from functools import cache
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import rookery as rk
from rookery.base import draws, placement, programs
from rookery.base.content import of_arrays
from rookery.engines import engine
from rookery.engines.engine import Job
from rookery.engines.simulation import device as simulation
from rookery.engines.streaming import fetched, pool, rowless, stage, staged
from rookery.testing.runs import agree, close, outcome

from .cases import HARD, case, full, job, pairs, ragged, together


def hosted(clients: rk.Clients, where: str = "host") -> rk.Clients:
    """The same clients with their rows on the host."""
    rows = lambda source: (jax.tree.map(np.array, source.rows), np.asarray(source.sizes))
    lower, upper = rows(clients.lower), None if clients.one_data_set else rows(clients.upper)
    center = None if clients.center is None else clients.center.rows
    own = rk.Clients.from_arrays(*lower, upper=upper, center=center, placement=where)
    own.weights = clients.weights
    return own


def as_hosted(what: Job, where: str = "host") -> Job:
    """The job with its clients' rows on the host."""
    return Job(**(vars(what) | {"clients": hosted(what.clients, where)}))


@pytest.fixture
def tight(monkeypatch: pytest.MonkeyPatch) -> None:
    """Room for one cohort, and pieces of a few rows."""
    least = lambda used, cohort, most: [rowless.largest(own.level.sizes, cohort) for own in used]
    monkeypatch.setattr(stage, "_capacities", least)
    monkeypatch.setattr(stage, "PIECE", 200)


# Where two cohorts fit, and where they don't: then every round is a call of its own, without a loop.
ROOMS = pytest.mark.parametrize("room", [pytest.param("small", marks=pytest.mark.slow), "scarce"])
CORE = {"Ditto"}  # with memory. (One that draws a cohort of its own, as DRFA does, is slow.)


@pytest.mark.usefixtures("tight")
@pytest.mark.slow
@together(pairs(), default=CORE)
def test_the_hard_setting(name: str, kind: str) -> None:
    """Unequal clients, a cohort, minibatches, clipping, noise and lost replies."""
    what = job(name, ragged(kind), **HARD)
    agree(outcome(rk.Simulation(), what, 3), outcome(rk.Simulation(), as_hosted(what), 3))


@pytest.mark.usefixtures("tight")
@pytest.mark.slow
@together(pairs())
def test_full_batches_of_equal_clients(name: str, kind: str) -> None:
    what = job(name, case(kind), full(name))
    agree(outcome(rk.Simulation(), what, 3), outcome(rk.Simulation(), as_hosted(what), 3))


# Many clients, of which a round needs few.

N, COHORT, SEED = 40, 5, 7
SIZES = np.random.default_rng(1).integers(1, 9, N)
FEDAVG = rk.FedAvg(step=0.05, local_steps=2, batch_size=2)
DITTO = rk.Ditto(step=0.05, local_steps=(1, 3), batch_size=2)


def rows(seed: int = 2) -> dict[str, np.ndarray]:
    """Samples of all of them, end to end."""
    rng = np.random.default_rng(seed)
    total = int(SIZES.sum())
    return {"a": rng.normal(size=(total, 3)), "t": np.sign(rng.normal(size=total)), "unused": np.zeros((total, 50))}


def solved(where: str, method: Any = FEDAVG, rounds: int = 12, data: Any = None, **given: Any) -> rk.Run:
    """A whole run, with an evaluation on the clients."""
    loss = case("SingleLevel").problem.loss
    clients = rk.Clients.from_arrays(rows() if data is None else data, SIZES, weights="size", placement=where)
    measure = lambda client, x, y: {"loss": client.mean(lambda rows: loss(x, rows), client.upper())}
    settings = {"cohort": COHORT, "seed": SEED, "every": 4, "evaluate_client": measure, "keep_best": "loss"} | given
    return rk.solve(case("SingleLevel").problem, clients, method, np.ones(3), rounds, **settings)


@cache
def on_device(method: Any) -> rk.Run:
    """The run with rows on the device, for all who compare with it."""
    return solved("device", method)


def same(a: rk.Run, b: rk.Run) -> None:
    """Two runs have the same results."""
    close((a.state, a.memory), (b.state, b.memory))
    assert (a.rounds, a.interrupted, a.stopped) == (b.rounds, b.interrupted, b.stopped)
    assert a.best is not None
    assert b.best is not None
    close((a.best.round, a.best.x), (b.best.round, b.best.x))
    left, right = (run.history.drop(columns="seconds") for run in (a, b))
    np.testing.assert_allclose(left, right, rtol=1e-10)


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Room for about a fourth of all rows, and few rounds together."""
    monkeypatch.setattr(staged, "limit", lambda _: int(SIZES.sum()) * 8 * 4 // 4 * 2)
    monkeypatch.setattr(stage, "PIECE", 300)
    monkeypatch.setattr(staged, "TOGETHER", 600)
    monkeypatch.setattr(staged, "_SHARE", 1)


@pytest.fixture
def scarce(small: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Room for one cohort, so that every round is a call of its own."""
    monkeypatch.setattr(staged, "limit", lambda _: (2 * rowless.largest(SIZES, COHORT) + 2) * 8 * 4)


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> set[int]:
    """The clients whose rows are read."""
    owner, seen = np.repeat(np.arange(N), SIZES), set[int]()
    plain = placement.HostArray.read

    def spy(self: Any, begins: np.ndarray, sizes: np.ndarray, out: np.ndarray) -> None:
        seen.update(owner[placement.spread(begins, sizes)].tolist())
        plain(self, begins, sizes, out)

    monkeypatch.setattr(placement.HostArray, "read", spy)
    return seen


@pytest.mark.usefixtures("small")
@pytest.mark.xdist_group("Ditto on the host")
def test_a_run_is_the_same() -> None:
    same(on_device(DITTO), solved("host", DITTO))


@pytest.mark.usefixtures("small")
@pytest.mark.xdist_group("Ditto on the host")
def test_a_file_is_read_as_it_is(tmp_path: Path) -> None:
    given = rows()
    for name, array in given.items():
        np.save(tmp_path / f"{name}.npy", array)
    files = {name: np.load(tmp_path / f"{name}.npy", mmap_mode="r") for name in given}
    same(on_device(DITTO), solved("host", DITTO, data=files))


def opened(where: str = "host", method: Any = FEDAVG, engine: Any = None, **given: Any) -> Any:
    """A session."""
    clients = rk.Clients.from_arrays(rows(), SIZES, placement=where)
    what = Job(case("SingleLevel").problem, clients, method, (jnp.ones(3), ()), COHORT, seed=SEED, **given)
    session: Any = (engine or rk.Simulation()).open(what)
    session.init()
    return session


def cohorts(rounds: int) -> np.ndarray:
    """Who takes part in the first rounds."""
    return np.asarray([engine.round_keys(draws.seed_key(SEED), t, N, COHORT).ids for t in range(rounds)])


@pytest.mark.usefixtures("small")
def test_only_the_rows_of_cohorts_are_read(read: set[int]) -> None:
    session = opened()
    read.clear()  # of the start
    session.advance(4)
    incoming = session._incoming.result()[0]
    needed = [set(cohort.tolist()) for cohort in cohorts(incoming.end + 1)]
    assert set.union(*needed[:-1]) <= read <= set.union(*needed)
    assert len(read) < N
    assert all(own.arrays == (0, 1) for own in session._stage.levels)  # and not what no loss looks at
    assert all(own.capacity < SIZES.sum() / 2 for own in session._stage.levels)
    assert session.moved > 0


@pytest.mark.slow
@pytest.mark.usefixtures("tight")
def test_very_unequal_clients_and_buffers_that_are_used_again() -> None:
    """As on a GPU: a buffer is used again once its rows are in their places."""
    sizes = np.full(N, 2)
    sizes[[3, 17]] = 90  # so that a whole data set is taken in pieces
    data = {"a": np.random.default_rng(3).normal(size=(sizes.sum(), 3)), "t": np.ones(sizes.sum())}
    sessions: list[Any] = []
    for where in placement.PLACES:
        clients = rk.Clients.from_arrays(data, sizes, placement=where)
        what = Job(case("SingleLevel").problem, clients, rk.FedAvg(step=0.05), (jnp.ones(3), ()), COHORT, seed=SEED)
        sessions.append(rk.Simulation().open(what))
        sessions[-1].init()
    assert clients.lower.chunk is not None
    sessions[1]._stage._reuse = True
    for session in sessions:
        session.advance(30)
    close(sessions[0].state, sessions[1].state)
    close(sessions[0].state, sessions[2].state)


@pytest.mark.usefixtures("small")
def test_a_part_is_on_the_device() -> None:
    session = opened()
    session.advance(30)
    assert all(own.capacity < SIZES.sum() / 2 for own in session._stage.levels)
    assert session.moved > 0
    plain = opened("device")
    plain.advance(30)
    close(session.state, plain.state)


def test_many_rounds_are_one_call_where_all_rows_fit() -> None:
    clients = rk.Clients.from_arrays(rows(), SIZES, placement="host")
    what = Job(case("SingleLevel").problem, clients, FEDAVG, (jnp.ones(3), ()), N, seed=SEED)
    assert rk.Simulation().open(what)._rounds_per_call == simulation.ROUNDS_AT_ONCE


def test_all_are_on_the_device_where_they_fit() -> None:
    session = opened()
    session.advance(256)
    moved = session.moved
    assert moved <= 1.5 * SIZES.sum() * 8 * 4  # everybody once, in pieces that are not quite full
    session.advance(100)
    assert session.moved == moved


def test_a_cohort_that_does_not_fit_goes_block_by_block(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fetched, "BYTES", 500)
    tight = rk.Simulation(device_bytes=100)
    same(solved("device", rounds=3), solved("host", rounds=3, engine=tight))
    assert opened(engine=tight)._stage is None
    assert opened()._stage is not None


def test_everybody_goes_block_by_block(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fetched, "BYTES", 500)
    everybody = {"rounds": 2, "cohort": None, "engine": rk.Simulation(block=3, device_bytes=100)}
    same(solved("device", **everybody), solved("host", **everybody))


@pytest.mark.usefixtures("small")
def test_a_changed_value_is_seen() -> None:
    data = rows()
    first = solved("host", rounds=4, data=data)
    data["a"][:] *= 2
    again = solved("host", rounds=4, data=data)
    assert not np.allclose(first.x, again.x)
    same(again, solved("device", rounds=4, data=data))


@pytest.mark.usefixtures("small")
def test_one_clients_object_whose_rows_change() -> None:
    data = rows()
    clients = rk.Clients.from_arrays(data, SIZES, placement="host")
    run = lambda: rk.solve(case("SingleLevel").problem, clients, FEDAVG, np.ones(3), 3, cohort=COHORT).x
    first, before = run(), of_arrays(clients)
    data["a"][:] *= 2
    assert not np.allclose(first, run())
    assert before != of_arrays(clients)


@pytest.mark.usefixtures("small")
def test_nothing_is_compiled_from_chunk_to_chunk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine, "PROGRAMS", programs.Programs(most=64))
    session, before = opened(), engine.PROGRAMS.made
    session.advance(200)  # pieces of all sizes, and the rounds
    assert engine.PROGRAMS.made - before <= 2 + stage.PARTS
    made, program = engine.PROGRAMS.made, session._rounds(session._stage.clients)
    session.advance(40)
    session.advance(1)
    assert engine.PROGRAMS.made == made
    assert program._cache_size() == 1


@ROOMS
def test_a_value_that_is_not_finite_ends_the_run_in_the_middle(room: str, request: Any) -> None:
    request.getfixturevalue(room)
    data = rows()
    *before, last = map(set, cohorts(6).tolist())
    data["a"][np.isin(np.repeat(np.arange(N), SIZES), list(last - set.union(*before)))] = 1e308
    method, runs = rk.FedAvg(step=0.05, local_steps=3), []
    for where in ("device", "host"):
        with pytest.warns(rk.NonFiniteWarning, match="round 6: x is not finite"):
            runs.append(solved(where, method, 40, data, every=20, keep_best=None, evaluate_client=None))
    device, host = runs
    assert device.stopped == host.stopped
    assert device.rounds == host.rounds == 5
    close(device.state, host.state)


@pytest.mark.slow
@ROOMS
def test_too_few_replies_end_the_run_at_the_same_round(room: str, request: Any) -> None:
    request.getfixturevalue(room)
    failed = []
    for where in ("device", "host"):
        with pytest.raises(rk.RoundFailedError) as error:
            solved(where, rounds=40, faults=rk.Faults(dropout=0.5, minimum=2), every=40)
        failed.append(error.value)
    assert str(failed[0]) == str(failed[1])
    assert failed[0].run.rounds == failed[1].run.rounds
    close(failed[0].run.state, failed[1].run.state)


@pytest.mark.usefixtures("small")
@pytest.mark.xdist_group("Ditto on the host")
@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("host", "host"),
        *(pytest.param(*own, marks=pytest.mark.slow) for own in (("device", "host"), ("host", "device"))),
    ],
)
def test_a_checkpoint_goes_on_elsewhere(before: str, after: str, tmp_path: Path) -> None:
    solved(before, DITTO, 4, checkpoint=tmp_path)
    same(on_device(DITTO), solved(after, DITTO, checkpoint=tmp_path))


@pytest.mark.usefixtures("small")
def test_a_callback_that_ends_the_run_loses_no_round() -> None:
    stop = [lambda run: run.rounds >= 7]
    one, other = (solved(where, every=7, rounds=40, callbacks=stop) for where in ("device", "host"))
    assert other.rounds == 7
    assert other.interrupted
    same(one, other)


@ROOMS
def test_rounds_in_any_portions(room: str, request: Any) -> None:
    request.getfixturevalue(room)
    session, plain = opened(), opened("device")
    assert (session._rounds_per_call == 1) == (room == "scarce")
    for count in (1, 3, 7, 2, 11):
        assert len(session.advance(count)) == count
    plain.advance(24)
    close(session.state, plain.state)
    session.restore(jax.tree.map(jnp.copy, plain.save()), 24)
    session.rounds = plain.rounds = 3  # as after a checkpoint of round 3
    session.advance(2), plain.advance(2)
    close(session.state, plain.state)


@pytest.mark.slow
@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("where", ["read", "store"])
@pytest.mark.parametrize("turn", [1, 4])
def test_an_error_loses_and_repeats_nothing(monkeypatch: pytest.MonkeyPatch, where: str, turn: int) -> None:
    """Of the disk, say, in the first plan or a later one: the session goes on from where it was."""
    session, plain, calls = opened(), opened("device"), itertools.count(1)
    own = getattr(stage.Stage, where)

    def fails_once(*given: Any) -> Any:
        if next(calls) == turn:
            raise OSError("the disk is gone")
        return own(*given)

    monkeypatch.setattr(stage.Stage, where, fails_once)
    with pytest.raises(OSError, match="the disk is gone"):
        session.advance(12)
    done = session.rounds
    assert done < 12
    assert (done > 0) == (turn > 1)
    plain.advance(done) if done else None
    close(session.state, plain.state)
    session.advance(12 - done), plain.advance(12 - done)
    close(session.state, plain.state)


@pytest.mark.usefixtures("small")
def test_rows_of_later_rounds_are_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    session = opened()
    session.advance(1)
    end = session._ready.end
    own = staged._read
    monkeypatch.setattr(staged, "_read", lambda *given: own(*given) if given[2] < end else 1 / 0)
    session = opened()
    assert len(session.advance(end)) == end
    with pytest.raises(ZeroDivisionError):
        session.advance(1)


def test_a_handful_of_bytes() -> None:
    session = rk.Simulation().open(
        Job(
            rk.SingleLevel(lambda x, b: jnp.mean((x - b) ** 2)),
            rk.Clients.from_arrays(np.arange(5, dtype=np.uint8), np.ones(5, int), placement="host"),
            rk.FedAvg(step=0.1), (jnp.ones(()), ()), 2,
        )
    )  # fmt: skip
    session.init()
    assert len(session.advance(3)) == 3


@pytest.mark.slow
def test_types_that_only_jax_has() -> None:
    runs = []
    for where in placement.PLACES:
        narrow = {"a": np.asarray(rows()["a"], jnp.bfloat16), "t": np.asarray(rows()["t"], jnp.float8_e4m3fn)}
        clients = rk.Clients.from_arrays(narrow, SIZES, placement=where)
        loss = lambda x, b: jnp.mean((b["a"].astype(float) @ x - b["t"].astype(float)) ** 2)
        runs.append(rk.solve(rk.SingleLevel(loss), clients, FEDAVG, np.ones(3), 3, cohort=COHORT).x)
    close(runs[0], runs[1])
    close(runs[0], runs[2])


def test_clients_of_wider_numbers_than_the_run_has() -> None:
    clients = rk.Clients.from_arrays(rows(), SIZES, placement="host")
    with jax.enable_x64(False), pytest.raises(TypeError, match="made with jax_enable_x64, and this run is without it"):
        rk.solve(case("SingleLevel").problem, clients, FEDAVG, np.ones(3, np.float32), 3, cohort=COHORT)


@pytest.mark.slow
def test_client_by_client() -> None:
    given = {"rounds": 1, "cohort": 2, "keep_best": None, "evaluate_client": None}
    runs = [solved(where, engine=rk.Simulation(debug=True), **given) for where in placement.PLACES]
    close(runs[0].state, runs[1].state)
    close(runs[0].state, runs[2].state)


@pytest.mark.slow
def test_sites_take_their_own_rows() -> None:
    what = job("FedAvg", ragged("SingleLevel"))
    agree(outcome(rk.Simulation(), what), outcome(rk.Federation(), as_hosted(what)))


@pytest.mark.slow
def test_a_search_of_steps() -> None:
    found = []
    for where in placement.PLACES:
        clients = rk.Clients.from_arrays(rows(), SIZES, placement=where)
        loss = case("SingleLevel").problem.loss
        measure = lambda client, x, y: {"loss": client.mean(lambda rows: loss(x, rows), client.upper())}
        found.append(
            rk.tune(
                case("SingleLevel").problem, clients, FEDAVG, np.ones(3), 8, metric="loss", evaluate_client=measure,
                search=["step"], candidates=3, cohort=COHORT,
            )
        )  # fmt: skip
    assert found[0].best == found[1].best == found[2].best


def test_what_clients_tell_of_themselves() -> None:
    data = rows() | {"label": np.arange(SIZES.sum()) % 3}
    here, *others = (rk.Clients.from_arrays(data, SIZES, weights="size", placement=where) for where in placement.PLACES)
    assert [own.placement for own in (here, *others)] == ["device", "host", "pinned"]
    assert [repr(own).rpartition(", ")[2] for own in others] == ["on the host)", "in pinned memory)"]
    for there in others:
        assert here.summary().equals(there.summary())
        assert here.describe() == there.describe()
        assert of_arrays(here) == of_arrays(there)
        close(here.client_data(3), there.client_data(3))
        assert there.held
    assert [np.shares_memory(own.lower.rows["a"].array, data["a"]) for own in others] == [True, False]


@pytest.mark.parametrize("dtype", [np.float64, np.int16])  # as it is, and not
@pytest.mark.parametrize("order", ["C", "F"])
def test_threads_that_share_a_copy(monkeypatch: pytest.MonkeyPatch, dtype: Any, order: str) -> None:
    monkeypatch.setattr(placement, "_threads", lambda: 5)
    monkeypatch.setattr(placement, "_SHARE", 64)
    rng = np.random.default_rng(4)
    rows = np.asarray(rng.integers(100, size=(402, 3)), dtype, order=order)
    runs = [(rng.integers(0, 390, count), rng.integers(0, 9, count)) for count in (0, 1, 2, 7, 40)]
    alike = np.full(40, 4)  # whole clients, as they are where all have as many rows; and pieces of such
    runs += [(4 * rng.integers(0, 100, 40), alike), (4 * rng.integers(0, 99, 40) + 1, alike), (alike[:0], alike[:0])]
    for begins, sizes in runs:
        out = np.zeros((sizes.sum(), 3))
        placement.HostArray(rows).read(begins, sizes, out)
        np.testing.assert_array_equal(out, rows[placement.spread(begins, sizes)])


def test_the_data_are_no_argument_of_a_program() -> None:
    clients = rk.Clients.from_arrays(rows(), SIZES, placement="host")
    with pytest.raises(TypeError, match="HostArray"):
        jax.jit(lambda c: c.weights)(clients)


def test_a_diagnosis() -> None:
    clients = (rk.Clients.from_arrays(rows(), SIZES, placement=where) for where in placement.PLACES)
    here, *others = (str(rk.check(case("SingleLevel").problem, own, np.ones(3))) for own in clients)
    assert others == [here, here]


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        ({"placement": "disk"}, ValueError, 'placement must be "device", "host" for .*; got \'disk\''),
        ({"placement": None}, ValueError, "placement must be .*; got None"),
        ({"rows": [[1.0, 2.0]]}, TypeError, "must be a NumPy array or numpy.memmap; got a float"),
        ({"rows": jnp.ones(2)}, TypeError, "Give one of those, or leave placement out"),
        ({"rows": jnp.ones(2), "placement": "pinned"}, TypeError, 'with placement="pinned", .* must be a NumPy array'),
        ({"upper": (jnp.ones(2), [1, 1])}, TypeError, "upper: .* NumPy array or numpy.memmap"),
        ({"rows": np.array([1.0, np.nan])}, ValueError, "is not finite .* sample 0 of client 1"),
        ({"sizes": [1, 2]}, ValueError, "must have as many rows as the sizes add up to, 3; got 2"),
    ],
)
def test_bad_input(given: dict[str, Any], error: type[Exception], message: str) -> None:
    given = {"rows": np.ones(2), "sizes": [1, 1], "placement": "host"} | given
    with pytest.raises(error, match=message):
        rk.Clients.from_arrays(**given)


@pytest.mark.parametrize("where", ["host", "pinned"])
def test_what_is_refused(where: str) -> None:
    with pytest.raises(ValueError, match=f'placement="{where}".* got mesh=2. Leave mesh out'):
        solved(where, engine=rk.Simulation(mesh=2))
    with pytest.raises(ValueError, match=f'memory must be "device" for clients with placement="{where}"; got "host"'):
        solved(where, engine=rk.Simulation(memory="host"))
    how = {"asynchronous": rk.Asynchronous(buffer=2), "clock": rk.Clock(compute=np.ones(N))}
    with pytest.raises(ValueError, match="must have their rows on the device in an asynchronous run"):
        solved(where, **how)


@pytest.mark.parametrize("wrong", [-1, 1.5, "1 GB", True])
def test_a_wrong_number_of_bytes(wrong: Any) -> None:
    with pytest.raises(ValueError, match="device_bytes must be an integer of at least 0, or None; got"):
        rk.Simulation(device_bytes=wrong)


# The pool.


def test_an_arena_joins_what_is_given_back() -> None:
    arena = pool.Arena(10)
    assert [arena.take(3), arena.take(3), arena.take(4), arena.take(1)] == [0, 3, 6, None]
    assert arena.give(0, 3) == 3
    assert arena.give(6, 4) == 4
    assert arena.take(5) is None
    assert arena.give(3, 3) == 10
    assert arena.take(10) == 0


@pytest.mark.parametrize("seed", range(4))
def test_a_pool_holds_what_rounds_need_and_reads_little(seed: int) -> None:
    rng = np.random.default_rng(seed)
    n, cohort = 60, 6
    sizes = [rng.integers(1, 12, n), rng.integers(3, 5, n)] if seed < 3 else [np.full(n, 5), np.full(n, 3)]
    rooms = [int(np.sort(own)[-cohort:].sum() + 40 * (seed > 0)) for own in sizes]
    drawn = np.stack([np.sort(rng.choice(n, cohort, replace=False)) for _ in range(1000)])
    own = pool.Pool(sizes, [1, 2], rooms, lambda t: drawn[t : t + 50])
    held: list[dict[int, int]] = [{}, {}]  # by level: each row's client
    t, brought = 0, 0
    while t < 300:
        plan = own.prefetch(t, 20, 40)
        assert plan.begin == t < plan.end
        for client, *places in plan.moves:
            brought += 1
            for level, size, place, room in zip(held, sizes, places, rooms, strict=True):
                assert place + size[client] <= room
                level.update(dict.fromkeys(range(place, place + size[client]), client))
        for client in set(drawn[plan.begin : plan.end].reshape(-1).tolist()):
            for level, size, begin in zip(held, sizes, own._places[client], strict=True):
                assert all(level[row] == client for row in range(begin, begin + size[client]))
        t = plan.end
    assert brought < 300 * cohort * (1.0 if seed == 0 else 0.75)
