"""What clients remember, kept on the host: the numbers, the ledger and the checkpoints are those of the device."""

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pandas as pd
import pytest

import rookery as rk
from rookery.engines import checkpoints, folders
from rookery.engines.streaming import remembered

SIZES = [1 + i % 4 for i in range(60)]
ROWS = [np.random.default_rng(i).normal(size=(k, 3)).astype(np.float32) for i, k in enumerate(SIZES)]
CLIENTS = rk.Clients(lower=ROWS, upper=ROWS)
SQUARES = rk.SingleLevel(lambda x, b: jnp.mean((x - b) ** 2))
PAIR = rk.Bilevel(
    lambda x, y, b: jnp.mean((x + y - b) ** 2),
    lambda x, y, b: jnp.mean((y - b * x) ** 2) + jnp.sum(y**2),
    lower_scope="client",
)
ZERO = np.zeros(3, np.float32)
SCAFFOLD = rk.Scaffold(step=0.1, local_steps=2, batch_size=2)
GIVEN: dict[str, Any] = {
    "problem": SQUARES,
    "clients": CLIENTS.single_level(),
    "algorithm": SCAFFOLD,
    "init": ZERO,
    "rounds": 9,
    "cohort": 7,
    "every": 3,
    "progress": False,
    "evaluate": lambda x, y, memory: {"x": x[0], "all": np.sum(np.asarray(memory))},
}


@pytest.fixture(autouse=True)
def _few_rounds_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remembered, "BYTES", 7 * 12 * 2)  # two rounds of the vectors of seven clients


def same(given: dict[str, Any], **more: Any) -> rk.Run:
    """The run with the memory on the host, after a comparison to the last bit with the other one."""
    there, here = (rk.solve(**given, engine=rk.Simulation(memory=where), **more) for where in ("device", "host"))
    compare(there, here)
    return here


def compare(there: rk.Run, here: rk.Run) -> None:
    clock = {"columns": "seconds"}
    pd.testing.assert_frame_equal(here.history.drop(**clock), there.history.drop(**clock), check_exact=True)
    assert jax.tree.structure(here.memory) == jax.tree.structure(there.memory)
    for a, b in zip(*(jax.tree.leaves((run.state, run.memory)) for run in (here, there)), strict=True):
        assert a.dtype == b.dtype
        np.testing.assert_array_equal(a, b)


METHODS = {
    "Scaffold": {},
    "Ditto": {"algorithm": rk.Ditto(step=0.1, personal_step=0.1, personal_steps=2)},
    "FedBiOLocal": {"problem": PAIR, "clients": CLIENTS, "algorithm": rk.FedBiOLocal(), "init": (ZERO, ZERO)},
    "a channel's memory": {"channel": rk.top_k(0.5, feedback="error"), "rounds": 4},
    "lost replies": {"faults": rk.Faults(dropout=0.4)},
    "everyone": {"cohort": 60, "rounds": 4},
    "a cohort larger than a block": {"cohort": 40, "rounds": 4},
}


@pytest.mark.parametrize(
    "name", [pytest.param(m, marks=[] if m in ("Scaffold", "lost replies") else pytest.mark.slow) for m in METHODS]
)
def test_the_same_numbers(name: str) -> None:
    run = same(GIVEN | METHODS[name])
    assert all(isinstance(leaf, np.ndarray) for leaf in jax.tree.leaves(run.memory))


@pytest.mark.slow
def test_in_private_runs() -> None:
    """Poisson cohorts, drawn from the server's entropy. Quick: `test_the_same_numbers`."""
    channel = rk.private(epsilon=8.0, delta=1e-2, clip=1.0)
    given = {**GIVEN, "channel": channel, "cohort": rk.Poisson(6.0), "noise_seed": 1, "evaluate": None}
    same(given)


def test_only_the_rows_of_cohorts_are_on_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """The compiled rounds get the rows of fourteen clients, and the start gives one."""
    shapes = set()
    put = remembered.Program.put
    monkeypatch.setattr(
        remembered.Program, "put", lambda self, ids, n, value, rows: shapes.add(value[0].shape)
        or put(self, ids, n, value, rows),
    )  # fmt: skip
    job = rk.Simulation(memory="host", block=59).open(_job())  # traced anew
    started = job._program("start", job._traced.start, None)
    job.init()
    job.advance(5)
    assert shapes == {(14, 3)}
    made = jax.eval_shape(
        started, job._traced.start.consts, job._data, job._traced.hyper, job._traced.job.start, job._traced.seed,
        job._traced.noise,
    )  # fmt: skip
    assert made[0].memory.shape == (1, 3)


def _job(**more: Any) -> Any:
    from rookery.engines.engine import Job

    return Job(GIVEN["problem"], GIVEN["clients"], SCAFFOLD, (ZERO, ()), 7, **more)


@pytest.mark.parametrize("first", ["device", pytest.param("host", marks=pytest.mark.slow)])
def test_a_run_is_continued_on_either(first: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With all rows in one array, and with changed rows alone."""
    monkeypatch.setattr(checkpoints, "SHARE", 1e9)
    monkeypatch.setattr(folders.Folder, "busy", lambda self: False)
    monkeypatch.setattr(folders, "APART", 1)
    other = {"device": "host", "host": "device"}[first]
    whole = rk.solve(**GIVEN)
    for after in (6, 9):  # stopped after 6 rounds, and then complete
        engine = rk.Simulation(memory=first if after == 6 else other)
        stop = [lambda run, after=after: run.rounds >= after]
        run = rk.solve(**GIVEN, engine=engine, checkpoint=tmp_path / "run", callbacks=stop)
    assert folders.Folder(tmp_path / "run").header(9)["apart"]["since"] == 6
    compare(whole, run)


def test_a_run_of_several_devices_goes_on_with_the_memory_on_the_host(tmp_path: Path) -> None:
    """Four devices have places for 60 clients: the checkpoint of 58 has rows of padding, and the memory has not."""
    given = GIVEN | {"clients": rk.Clients(upper=ROWS[:58]), "rounds": 6}
    rk.solve(**given | {"rounds": 3}, engine=rk.Simulation(mesh=4), checkpoint=tmp_path / "run")
    run = rk.solve(**given, engine=rk.Simulation(memory="host"), checkpoint=tmp_path / "run")
    assert run.memory.shape == (58, 3)
    np.testing.assert_allclose(run.memory, rk.solve(**given).memory, rtol=1e-4, atol=1e-6)


def test_a_run_that_diverges_ends_as_on_the_device() -> None:
    given = GIVEN | {"algorithm": rk.Ditto(step=0.1, personal_step=1e30, personal_steps=1)}
    with pytest.warns(rk.NonFiniteWarning, match="stopped there"):
        run = same(given)
    assert run.stopped is not None


def test_it_is_chosen_where_the_device_is_full(monkeypatch: pytest.MonkeyPatch) -> None:
    """On an accelerator: on a CPU both are the same memory."""
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    assert not isinstance(rk.Simulation().open(_job()), remembered.Session)
    monkeypatch.setattr("rookery.engines.simulation.memory.memory_of", lambda device: 6000)
    session = rk.Simulation().open(_job())
    assert isinstance(session, remembered.Session)
    assert "What clients remember (720 bytes) stays on the host." in session.notes
    assert not isinstance(rk.Simulation(memory="device").open(_job()), remembered.Session)


class Starts(rk.Scaffold):
    def init(self, fed: Any, x: Any, y: Any, key: Any) -> Any:
        fed.map_state(lambda c, k, m: ((), m + c.id), key)
        return super().init(fed, x, y, key)


@pytest.mark.parametrize(
    ("changed", "engine", "message"),
    [
        ({}, {"mesh": "all"}, r"memory must be \"device\" with mesh='all'; got \"host\""),
        ({}, {"debug": True}, r"memory must be \"device\" with debug=True; got \"host\""),
        ({"algorithm": Starts(step=0.1)}, {}, 'memory must be "device" for Starts, which computes in init'),
        (
            {"evaluate_client": lambda c, x, y, m: {"m": m[0]}}, {},
            'memory must be "device" with an evaluate_client that reads what clients remember',
        ),
        (
            {"clients": rk.Clients.from_arrays(np.ones((60, 3), np.float32), [1] * 60, placement="host")}, {},
            'memory must be "device" for clients with placement="host"',
        ),
    ],
    ids=["mesh", "debug", "init", "evaluate_client", "placement"],
)  # fmt: skip
def test_where_it_is_refused(changed: dict[str, Any], engine: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        rk.solve(**GIVEN | changed, engine=rk.Simulation(memory="host", **engine))


def test_an_evaluate_client_that_does_not_read_it() -> None:
    same({**GIVEN, "rounds": 3}, evaluate_client=lambda c, x, y: {"loss": c.f(x, y, c.samples())})


def test_bad_settings() -> None:
    with pytest.raises(ValueError, match='memory must be "auto", "device" or "host"; got \'disk\''):
        rk.Simulation(memory="disk")
    with pytest.raises(ValueError, match='memory must be "device" to tune; got "host"'):
        rk.tune(
            SQUARES, GIVEN["clients"], SCAFFOLD, ZERO, 3, evaluate=lambda x, y: {"loss": x[0]}, metric="loss",
            engine=rk.Simulation(memory="host"),
        )  # fmt: skip
