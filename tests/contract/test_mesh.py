"""Every algorithm gives the same numbers and the same ledger on several devices as on one."""

from functools import cache
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import rookery as rk
from rookery.engines.engine import Job
from rookery.engines.simulation.division import divide, mesh_of, shares
from rookery.testing.runs import agree, close, outcome

from .cases import HARD, case, job, pairs, ragged, together

# One that gathers and scatters. (Others: test_processes; and below DRFA, whose cohort has clients twice.)
CORE = {"PDSGD"}


@together(pairs(), default=CORE)
def test_the_hard_setting(name: str, kind: str) -> None:
    """Unequal clients, a cohort, minibatches, clipping, noise and lost replies, on a device for each client."""
    what = job(name, ragged(kind), **HARD)
    agree(outcome(rk.Simulation(block=2), what), outcome(rk.Simulation(mesh=4), what))


@pytest.mark.slow
@together(pairs())
def test_clients_that_do_not_divide_evenly(name: str, kind: str) -> None:
    """Four clients on three devices: two, two and none."""
    what = job(name, ragged(kind))
    agree(outcome(rk.Simulation(), what), outcome(rk.Simulation(mesh=3), what))


# Many clients on each device.

SIZES = (3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5)
METHODS: dict[str, Any] = {
    "FedAvg": rk.FedAvg(step=0.05, local_steps=(1, 3), batch_size=2),
    "PDSGD": rk.PDSGD(step=0.05, dual_step=0.1, penalty=2.0, batch_size=3),
    "DRFA": rk.DRFA(step=0.05, weight_step=0.1, local_steps=2, batch_size=2),
}


def many(method: Any, cohort: int, **given: Any) -> Job:
    """Eleven clients of unequal size and weight."""
    rng = np.random.default_rng(2)
    draw = lambda size: {"a": rng.normal(size=(size, 3)), "t": np.sign(rng.normal(size=size))}
    clients = rk.Clients(upper=[draw(size) for size in SIZES], weights=rng.uniform(0.5, 2, len(SIZES)))
    return Job(case("SingleLevel").problem, clients, method, (jnp.ones(3), ()), cohort, seed=7, **given)


@cache
def on_one_device(name: str, cohort: int) -> Any:
    return outcome(rk.Simulation(), many(METHODS[name], cohort, **HARD), 3)


@pytest.mark.slow
@pytest.mark.parametrize("cohort", [2, 7, 11])
@pytest.mark.parametrize("name", ["DRFA", "PDSGD", "FedAvg"])
@pytest.mark.parametrize(("mesh", "block"), [(2, 2), (4, "auto"), (2, 1)])
def test_any_cohort_in_any_blocks(name: str, cohort: int, mesh: int, block: Any) -> None:
    what = many(METHODS[name], cohort, **HARD)
    agree(on_one_device(name, cohort), outcome(rk.Simulation(mesh=mesh, block=block), what, 3))


@pytest.mark.slow
def test_a_mesh_of_ones_own() -> None:
    mesh = jax.sharding.Mesh(np.asarray(jax.devices()[1:3]), ("any",))
    what = many(METHODS["FedAvg"], 5)
    agree(outcome(rk.Simulation(), what), outcome(rk.Simulation(mesh=mesh), what))


# A whole run.


def solved(what: Job, mesh: Any, rounds: int = 6, **given: Any) -> rk.Run:
    """Solve it, with an evaluation on the clients."""
    loss = what.problem.loss
    measure = lambda client, x, y: {"loss": client.mean(lambda rows: loss(x, rows), client.upper())}
    return rk.solve(
        what.problem, what.clients, what.algorithm, what.start[0], rounds, cohort=what.cohort, seed=what.seed,
        evaluate_client=measure, every=2, keep_best="loss", engine=rk.Simulation(mesh=mesh), **given,
    )  # fmt: skip


def same(a: rk.Run, b: rk.Run) -> None:
    """Two runs have the same results."""
    close((a.state, a.memory), (b.state, b.memory))
    assert a.best is not None
    assert b.best is not None
    assert a.best.round == b.best.round
    close((a.best.x, a.best.value), (b.best.x, b.best.value))
    left, right = (run.history.drop(columns="seconds") for run in (a, b))
    np.testing.assert_allclose(left, right, rtol=1e-10)


@cache
def uncut() -> rk.Run:
    """The run on one device, for all who compare with it."""
    return solved(many(METHODS["PDSGD"], 5), None)


@pytest.mark.slow
@pytest.mark.xdist_group("PDSGD on devices")
def test_a_run_is_the_same() -> None:
    same(uncut(), solved(many(METHODS["PDSGD"], 5), 4))
    assert uncut().memory is not None


@pytest.mark.slow  # test_processes: from four devices of two processes to one
@pytest.mark.xdist_group("PDSGD on devices")
@pytest.mark.parametrize(("before", "after"), [(4, None), (4, 2), (None, 3), (2, 4)])
def test_a_checkpoint_goes_on_elsewhere(before: Any, after: Any, tmp_path: Path) -> None:
    what = many(METHODS["PDSGD"], 5)
    solved(what, before, 4, checkpoint=tmp_path)
    same(uncut(), solved(what, after, checkpoint=tmp_path))


@pytest.mark.slow
def test_memory_is_compared_with_the_model() -> None:
    """What is divided among the devices, with what each of them has; in `evaluate`, and at the end."""
    what = many(rk.Ditto(step=0.05, personal_step=0.1, proximal=0.5, batch_size=2), 5)
    evaluate = lambda x, y, memory: {"apart": jnp.sum((memory - x) ** 2)}
    run = lambda mesh: rk.solve(
        what.problem, what.clients, what.algorithm, what.start[0], 2, cohort=5, seed=7, evaluate=evaluate,
        keep_best="-apart", engine=rk.Simulation(mesh=mesh),
    )  # fmt: skip
    one, four = run(None), run(4)
    np.testing.assert_allclose(four.history["apart"], one.history["apart"], rtol=1e-10)
    close(four.memory - four.x, one.memory - one.x)
    close(four.best.memory - four.best.x, one.best.memory - one.best.x)


@pytest.mark.slow
def test_a_value_that_is_not_finite_ends_the_run_on_all_devices() -> None:
    what = many(rk.FedAvg(step=1e200, local_steps=3), 5)
    with pytest.warns(rk.NonFiniteWarning) as one:
        solved(what, None)
    with pytest.warns(rk.NonFiniteWarning) as four:
        solved(what, 4)
    assert str(one[0].message) == str(four[0].message)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"mesh": 3}, "of the 2 clients; got 3 devices. Give mesh=2"),
        ({"mesh": 9}, "mesh must be .* from 1 to 4; got 9"),
        ({"mesh": True}, "mesh must be .*; got True"),
        ({"mesh": "two"}, "mesh must be .*; got 'two'"),
    ],
)
def test_bad_meshes(given: dict[str, Any], message: str) -> None:
    clients = rk.Clients(upper=[{"a": np.ones((1, 3)), "t": np.ones(1)}] * 2)
    with pytest.raises(ValueError, match=message):
        rk.solve(case("SingleLevel").problem, clients, METHODS["FedAvg"], np.ones(3), 1, engine=rk.Simulation(**given))


def test_debugging_is_for_one_device() -> None:
    with pytest.raises(ValueError, match="Leave mesh out"):
        rk.Simulation(mesh=2, debug=True)


@pytest.mark.parametrize("mesh", [None, 2])
def test_who_holds_a_part_of_the_clients_needs_the_mesh_it_was_loaded_for(mesh: Any) -> None:
    """Else it would compute with other clients' rows."""
    what = many(METHODS["FedAvg"], 5)
    what.clients.here = range(0, 3)  # as Clients.from_loader sets it in the first of four processes
    with pytest.raises(ValueError, match=r'[Tt]his process holds .*mesh="all"'):
        solved(what, mesh)


# How clients are divided.


@pytest.mark.parametrize(("devices", "sizes"), [(2, [7, 7, 7]), (3, [4] * 9)])
def test_equal_clients_keep_their_order(devices: int, sizes: list[int]) -> None:
    each = -(-len(sizes) // devices)
    held = shares(np.asarray(sizes), devices, each)
    np.testing.assert_array_equal(np.concatenate(held), np.arange(len(sizes)))
    assert max(map(len, held)) == each


@pytest.mark.parametrize("devices", [2, 3, 8])
@pytest.mark.parametrize("n", [8, 64, 1001])
def test_unequal_clients_are_divided_by_number_and_by_samples(n: int, devices: int) -> None:
    """No device has more samples than another by more than the largest client's."""
    sizes = np.maximum(np.random.default_rng(n).lognormal(3, 1.5, n).astype(int), 1)
    held = shares(sizes, devices, -(-n // devices))
    np.testing.assert_array_equal(np.sort(np.concatenate(held)), np.arange(n))
    assert max(map(len, held)) == -(-n // devices)
    assert all((np.diff(sizes[clients]) >= 0).all() for clients in held)  # blocks have clients of like sizes
    load = [sizes[clients].sum() for clients in held]
    assert max(load) - min(load) <= sizes.max()


def test_a_mesh_of_unequal_clients_holds_as_many_samples_on_each_device() -> None:
    """Clients sorted by size, divided in their order, would give the first device most of the rows."""
    sizes = np.sort(np.random.default_rng(0).integers(1, 100, 40))[::-1]
    clients = rk.Clients.from_arrays({"a": np.arange(float(sizes.sum()))}, sizes)
    division = divide(mesh_of(4), clients)
    rows = division.divided(clients).lower.rows["a"]
    assert rows.shape[0] <= 4 * (sizes.sum() / 4 + 10)
    starts = np.cumsum(sizes) - sizes
    for d, (shard, held) in enumerate(zip(rows.addressable_shards, division.held, strict=True)):
        expected = np.concatenate([np.arange(starts[i], starts[i] + sizes[i]) for i in held])
        np.testing.assert_array_equal(np.asarray(shard.data)[: len(expected)], expected, err_msg=f"device {d}")
