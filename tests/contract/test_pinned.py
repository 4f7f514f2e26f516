"""Pinned rows give the numbers of rows on the device, and the program of the rounds reads them by itself."""

import pickle
import threading
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import rookery as rk
from rookery.base import placement, programs
from rookery.data.clients import Clients
from rookery.engines import engine
from rookery.engines.simulation import device as simulation
from rookery.engines.streaming import gathered, pinned, rowless
from rookery.testing.runs import agree, close, outcome

from .cases import HARD, case, job, pairs, ragged, together
from .test_placement import (
    COHORT,
    DITTO,
    FEDAVG,
    SEED,
    SIZES,
    N,
    as_hosted,
    cohorts,
    on_device,
    opened,
    rows,
    same,
    solved,
)  # fmt: skip

BY_BLOCKS = rk.Simulation(device_bytes=100)  # no cohort fits
# One that draws a cohort of its own, one with memory, and one with two levels and a loop of exchanges.
CORE = {"DRFA", "Ditto", "FedNest"}


@pytest.mark.slow
@together(pairs(), default=CORE)
@pytest.mark.parametrize("engine", [rk.Simulation(), BY_BLOCKS], ids=["cohorts", "blocks"])
def test_the_hard_setting(name: str, kind: str, engine: Any) -> None:
    """Unequal clients, a cohort, minibatches, clipping, noise and lost replies."""
    what = job(name, ragged(kind), **HARD)
    agree(outcome(rk.Simulation(), what, 3), outcome(engine, as_hosted(what, "pinned"), 3))


@pytest.mark.xdist_group("Ditto on the host")
def test_a_run_is_the_same() -> None:
    same(on_device(DITTO), solved("pinned", DITTO))


@pytest.mark.xdist_group("Ditto on the host")
@pytest.mark.parametrize("block", [3, "auto"])
def test_a_cohort_that_does_not_fit_goes_block_by_block(block: Any) -> None:
    how = rk.Simulation(device_bytes=100, block=block)
    assert not opened("pinned", engine=how).cohort_bytes
    same(on_device(DITTO), solved("pinned", DITTO, engine=how))


@pytest.mark.slow
def test_a_cohort_in_blocks() -> None:
    """The cohort's rows fit, and its clients are computed three at a time."""
    how = {"rounds": 3, "cohort": None, "engine": rk.Simulation(block=3)}
    same(solved("device", **how), solved("pinned", **how))


def test_the_program_reads_the_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """No thread reads any, no callback leaves the program, and many rounds are one call."""
    monkeypatch.setattr(placement.HostArray, "read", lambda *_: pytest.fail("the host has read rows"))
    monkeypatch.setattr(engine, "PROGRAMS", programs.Programs(most=64))
    calls: list[Any] = []
    compiled = engine.compiled
    monkeypatch.setattr(engine, "compiled", lambda *given, **how: _counted(compiled(*given, **how), calls))
    session = opened("pinned")
    before = set(threading.enumerate())
    session.advance(30)
    assert session.cohort_bytes == rowless.largest(SIZES, COHORT) * 8 * 4  # not what no loss looks at
    assert set(threading.enumerate()) == before
    _, (program, given) = calls
    assert len(calls) == 2  # the start, and all rounds
    text = program.lower(*given).as_text()
    assert "callback" not in text
    assert set(map(id, jax.tree.leaves(session._cohort.words))) <= set(map(id, jax.tree.leaves(given)))
    plain = opened("device")
    plain.advance(30)
    close(session.state, plain.state)


def _counted(program: Any, calls: list[Any]) -> Any:
    def call(*given: Any) -> Any:
        shown = jax.tree.map(lambda a: jnp.copy(a) if isinstance(a, jax.Array) and a.ndim < 2 else a, given)
        calls.append((program, shown))
        return program(*given)

    return call


@pytest.mark.parametrize("together", [1, 8])  # as on a CPU and as on a GPU
def test_a_row_crosses_once_in_a_round(together: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The compiled program gathers each array of the cohort once, inside the loop over rounds."""
    monkeypatch.setattr(simulation, "together", lambda: together)
    session = opened("pinned")
    session.advance(1)
    of, data = session._round, session._cohort
    fixed = session._job.draw, session._job.minimum, simulation.ROUNDS_AT_ONCE, simulation.together()
    program = pinned.Program(of, data, session._side_by_side)
    advance = lambda *given: simulation.advance(program, *fixed, *given)
    given = of.consts, data, session._traced.hyper, session._carry, 0, 9, True, session._traced.seed
    text = jax.jit(advance).lower(*given).as_text()
    words = dict(zip(sorted(rows()), sum(data.words, ()), strict=True))
    gathers = [line for line in text.splitlines() if "gather" in line]
    count = {name: sum(f"(tensor<{len(a)}x{a.shape[1]}xui32>" in line for line in gathers) for name, a in words.items()}
    assert count == {"a": 1, "t": 1, "unused": 0}
    session.advance(19)
    plain = opened("device")
    plain.advance(20)
    close(session.state, plain.state)


@pytest.mark.parametrize("alike", [True, False])
def test_the_rows_of_any_clients(alike: bool) -> None:
    """In any order, some of them several times, and fewer than a block has."""
    sizes = np.full(N, 3) if alike else SIZES
    data = {"a": np.random.default_rng(3).normal(size=(sizes.sum(), 3)), "b": np.arange(sizes.sum()) % 251 > 100}
    here, there = (Clients.from_arrays(data, sizes, placement=where) for where in ("device", "pinned"))
    stand_in = gathered.gathered(there, 6)
    for ids in ([0], [7, 3, 7, 39, 3, 3], [5, 4, 3, 2, 1, 0], [1, 1, 1, 1]):
        ids = jnp.array(ids, jnp.int32)
        own, other = stand_in.members(ids), here.members(ids)
        close(own.weights, other.weights)
        for i in range(len(ids)):
            held = [_of_member(clients.lower, i) for clients in (own, other)]
            close(*held)
    ids = jnp.array([2, 5, 11, 38], jnp.int32)
    cohort = stand_in.cohort(ids)
    for i in ids.tolist():
        begin, size = int(cohort.lower.offsets[i]), int(cohort.lower.sizes[i])
        close(jax.tree.map(lambda a: a[begin : begin + size], cohort.lower.rows), here.client_data(i)["lower"][0])


def _of_member(data: Any, i: int) -> Any:
    begin, size = int(data.offsets[i, 0]), int(data.sizes[i, 0])
    return jax.tree.map(lambda a: np.asarray(a[begin : begin + size]), data.rows)


def test_nothing_is_compiled_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither in a later call, nor after a checkpoint, whose arrays are not committed to a device."""
    monkeypatch.setattr(engine, "PROGRAMS", programs.Programs(most=64))
    session, before = opened("pinned"), engine.PROGRAMS.made
    session.advance(2), session.advance(300)
    saved = jax.tree.map(np.array, session.save())
    session.restore(jax.tree.map(jnp.asarray, saved), 302)
    session.advance(1)
    assert engine.PROGRAMS.made - before == 1
    assert [program._cache_size() for program in engine.PROGRAMS._programs.values()] == [1, 1]


@pytest.mark.slow
def test_a_value_that_is_not_finite_ends_the_run_in_the_middle() -> None:
    data = rows()
    *before, last = map(set, cohorts(6).tolist())
    data["a"][np.isin(np.repeat(np.arange(N), SIZES), list(last - set.union(*before)))] = 1e308
    method, runs = rk.FedAvg(step=0.05, local_steps=3), []
    for where in ("device", "pinned"):
        with pytest.warns(rk.NonFiniteWarning, match="round 6: x is not finite"):
            runs.append(solved(where, method, 40, data, every=20, keep_best=None, evaluate_client=None))
    assert runs[0].stopped == runs[1].stopped
    close(runs[0].state, runs[1].state)


@pytest.mark.xdist_group("Ditto on the host")
@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("pinned", "pinned"),
        *(pytest.param(*own, marks=pytest.mark.slow) for own in (("host", "pinned"), ("pinned", "device"))),
    ],
)
def test_a_checkpoint_goes_on_elsewhere(before: str, after: str, tmp_path: Path) -> None:
    solved(before, DITTO, 4, checkpoint=tmp_path)
    same(on_device(DITTO), solved(after, DITTO, checkpoint=tmp_path))


@pytest.mark.slow
def test_poisson_cohorts() -> None:
    how: Any = {"channel": rk.private(8, 1e-3, clip=1.0), "cohort": rk.Poisson(4), "noise_seed": 3, "seed": SEED}
    placed = [rk.Clients.from_arrays(rows(), SIZES, placement=where) for where in ("device", "pinned")]
    runs = [rk.solve(case("SingleLevel").problem, own, FEDAVG, np.ones(3), 4, **how) for own in placed]
    close(runs[0].state, runs[1].state)


@pytest.mark.slow
def test_sites_take_their_own_rows() -> None:
    what = job("FedAvg", ragged("SingleLevel"))
    agree(outcome(rk.Simulation(), what), outcome(rk.Federation(), as_hosted(what, "pinned")))


@pytest.mark.slow
@pytest.mark.parametrize("where", ["host", "pinned"])
def test_both_levels_as_one(where: str) -> None:
    data = {"a": np.arange(12.0).reshape(6, 2)}
    clients = rk.Clients.from_arrays(data, [1, 2, 3], upper=(data, [3, 2, 1]), placement=where)
    assert clients.single_level().placement == where


def test_rows_are_those_of_the_moment_when_they_were_pinned() -> None:
    data = rows()
    clients = rk.Clients.from_arrays(data, SIZES, placement="pinned")
    before = clients.client_data(3)
    data["a"][:] = np.nan
    close(clients.client_data(3), before)
    with pytest.raises(ValueError, match="read-only"):
        clients.lower.rows["a"].array[:] = 0
    again = pickle.loads(pickle.dumps(clients.lower.rows["a"]))
    np.testing.assert_array_equal(again.array, clients.lower.rows["a"].array)


def test_the_memory_estimate_counts_a_cohort() -> None:
    sessions = [opened("pinned", engine=how) for how in (rk.Simulation(), BY_BLOCKS)]
    assert [own._memory_estimate.data for own in sessions] == [rowless.largest(SIZES, COHORT) * 8 * 4, 0]


@pytest.mark.slow
def test_other_rows_of_the_same_shapes() -> None:
    """They are no part of the program, which is found by its plan and the shapes."""
    first, second = (
        rk.solve(
            case("SingleLevel").problem, rk.Clients.from_arrays(rows(seed), SIZES, placement="pinned"), FEDAVG,
            np.ones(3), 3, cohort=COHORT, seed=SEED,
        )
        for seed in (2, 3)
    )  # fmt: skip
    assert not np.allclose(first.x, second.x)


@pytest.mark.parametrize(
    ("platform", "kinds", "message"),
    [
        ("tpu", ["device", "pinned_host"], r'must be "device" or "host" on this device \(tpu\).*; got "pinned"'),
        ("cpu", ["device"], r"on this device \(cpu\), whose programs cannot read pinned memory"),
    ],
)
def test_a_device_that_cannot_read_them(
    platform: str, kinds: list[str], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    memories = [type("Memory", (), {"kind": kind}) for kind in kinds]
    other = type("Device", (), {"platform": platform, "addressable_memories": lambda self: memories})()
    monkeypatch.setattr(jax, "local_devices", lambda: [other])
    with pytest.raises(ValueError, match=message):
        rk.Clients.from_arrays(np.ones(3), [1, 2], placement="pinned")


@pytest.mark.parametrize(
    ("reason", "message"),
    [
        ("RESOURCE_EXHAUSTED: out of memory", 'must be "host" .* XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB .*got "pinned"'),
        ("no such thing\nin two lines", r'where rows of float64 cannot be pinned \(no such thing\); got "pinned"'),
    ],
)
def test_memory_that_cannot_be_pinned(reason: str, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> Any:
        raise RuntimeError(reason)

    monkeypatch.setattr(jax, "device_put", refuse)
    with pytest.raises(ValueError, match=message) as error:
        rk.Clients.from_arrays(np.ones(3), [1, 2], placement="pinned")
    assert "\n" not in str(error.value)
