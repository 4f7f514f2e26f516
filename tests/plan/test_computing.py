"""In which precision losses are computed, with how much memory, and how many clients fit side by side."""

import logging
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import rookery as rk
from rookery.engines.engine import Job
from rookery.engines.simulation import memory as room
from rookery.plan.computing import Computing

RNG = np.random.default_rng(0)
SIZES = (5, 9, 7)  # of unequal size
ROWS = [RNG.normal(size=(n, 6)).astype(np.float32) for n in SIZES]
CLIENTS = rk.Clients(lower=ROWS, upper=ROWS)
X, Y = np.float32(0.1) * np.ones(6, np.float32), np.zeros((6, 4), np.float32)
FEDBIO = rk.FedBiO(upper_step=0.1, lower_step=0.1, linear_step=0.1, local_steps=2, batch_size=3)


def lower(x: Any, y: Any, rows: Any) -> Any:
    return jnp.mean(jnp.tanh(rows * x @ y) ** 2) + 0.1 * jnp.sum((y - 0.3) ** 2)


def upper(x: Any, y: Any, rows: Any) -> Any:
    return jnp.mean((jnp.sin(rows @ y) - 0.2) ** 2) + 0.01 * jnp.sum(x**2)


PROBLEM = rk.Bilevel(upper, lower)


def solved(engine: Any = None, problem: Any = PROBLEM, **more: Any) -> rk.Run:
    given: dict[str, Any] = {"rounds": 3, "cohort": 2, "seed": 1, **more}
    return rk.solve(problem, CLIENTS, FEDBIO, (X, Y), engine=engine or rk.Simulation(), **given)


@cache
def plain() -> rk.Run:
    """As it is without any setting, for all who compare with it."""
    return solved()


def seen_types(engine: Any) -> set[str]:
    """Of x, y and rows, as the losses are given them."""
    types: set[str] = set()

    def watched(x: Any, y: Any, rows: Any) -> Any:
        types.update(str(a.dtype) for a in (x, y, rows))
        return lower(x, y, rows)

    engine.open(Job(rk.Bilevel(upper, watched), CLIENTS, FEDBIO, (X, Y), 2))
    return types


@pytest.mark.slow
@pytest.mark.xdist_group("computing")
def test_bfloat16_with_masters() -> None:
    """Losses are given bfloat16; the state, and what is added up, keep their type, and small steps are not lost."""
    low = solved(rk.Simulation(precision="bfloat16"))
    assert "bfloat16" in seen_types(rk.Simulation(precision="bfloat16"))
    assert {str(a.dtype) for a in (low.x, low.y)} == {"float32"}
    far = float(np.abs(low.y - plain().y).max())
    assert 0 < far < 0.02  # 8 bits
    quantum = np.asarray(low.y, jnp.bfloat16).astype(np.float32)
    assert np.abs(quantum - low.y).max() > 0  # the iterate has more than those 8
    pd_columns = ["exchanges", "bytes_up", "samples_lower"]
    assert low.history[pd_columns].equals(plain().history[pd_columns])


def test_a_bfloat16_round_by_hand() -> None:
    """FedAvg: y − η·∇ of the loss of rounded values, in float32."""
    loss = lambda y, rows: jnp.mean(jnp.tanh(rows @ y) ** 2)
    clients, start = rk.Clients(upper=ROWS[:1]), RNG.normal(size=(6, 2)).astype(np.float32)
    method = rk.FedAvg(step=0.5)
    run = rk.solve(rk.SingleLevel(loss), clients, method, start, rounds=1, engine=rk.Simulation(precision="bfloat16"))
    rounded = lambda a: jnp.asarray(a).astype(jnp.bfloat16)
    by_hand = jax.grad(lambda y: loss(rounded(y), rounded(ROWS[0])).astype(jnp.float32))(jnp.asarray(start))
    assert by_hand.dtype == jnp.float32
    np.testing.assert_allclose(run.x, start - 0.5 * by_hand, rtol=1e-6)
    exact = jax.grad(lambda y: loss(y, ROWS[0]))(start)
    assert np.abs(run.x - (start - 0.5 * exact)).max() > 1e-5


@pytest.mark.xdist_group("computing")
@pytest.mark.parametrize(
    "engine",
    [rk.Simulation(remat=True), pytest.param(rk.Simulation(precision="float32"), marks=pytest.mark.slow)],
)
def test_the_same_numbers(engine: Any) -> None:
    np.testing.assert_allclose(solved(engine).y, plain().y, rtol=1e-6)


def test_remat_computes_again() -> None:
    """In the derivative of a loss more sines and tangents than before; of its products none."""

    def count(computing: Computing, name: str) -> int:
        problem = computing(PROBLEM)
        jaxpr = jax.make_jaxpr(jax.grad(problem.g, 1))(X, Y, ROWS[0])
        return str(jaxpr).count(f" = {name}[") + str(jaxpr).count(f" = {name} ")

    assert count(Computing(remat=True), "tanh") > count(Computing(), "tanh") == 1
    assert count(Computing(remat=True), "dot_general") == count(Computing(), "dot_general")


def test_float32_multiplies_in_full() -> None:
    jaxpr = jax.make_jaxpr(jax.grad(Computing("float32")(PROBLEM).g, 1))(X, Y, ROWS[0])
    products = [eqn for eqn in jaxpr.eqns if eqn.primitive.name == "dot_general"]
    assert products
    assert all(set(eqn.params["precision"]) == {jax.lax.Precision.HIGHEST} for eqn in products)


def test_a_random_loss_keeps_its_key() -> None:
    def noisy(y: Any, rows: Any, key: Any) -> Any:
        return jnp.mean((rows @ y + jax.random.normal(key, ())) ** 2)

    for computing in (Computing("bfloat16"), Computing(remat=True)):
        problem = computing(rk.SingleLevel(noisy))
        assert problem.random == {"f"}
        key = jax.random.key(0)
        np.testing.assert_allclose(problem.f(Y, (), ROWS[0], key), noisy(Y, ROWS[0], key), rtol=0.02)


@pytest.mark.parametrize(
    "problem",
    [
        rk.Minimax(lambda x, y, rows: jnp.mean(rows * x @ y) - jnp.sum(y**2)),
        rk.Compositional(inner=lambda x, rows: jnp.mean(rows, axis=0) * x, outer=lambda u: jnp.sum(u**2)),
        rk.WeightedNodes(lambda y, rows: jnp.mean((rows @ y) ** 2)),
        rk.Bilevel(upper, lower, features=lambda x, rows: rows * x),
    ],
)
def test_every_class(problem: Any) -> None:
    """Close to the same function, and in its type."""
    low, y = Computing("bfloat16", True)(problem), X + 1 if isinstance(problem, rk.Compositional) else Y + 1
    for name in ("f", "g"):
        a, b = (getattr(p, name)(X, y, ROWS[0]) for p in (problem, low))
        np.testing.assert_allclose(a, b, rtol=0.05)
        assert a.dtype == b.dtype


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"precision": "float16"}, r'precision must be "bfloat16", "float32" or None; got \'float16\''),
        ({"precision": 16}, "precision must be .*; got 16"),
        ({"remat": 1}, "remat must be True or False; got 1"),
    ],
)
def test_bad_input(given: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        rk.Simulation(**given)


@pytest.mark.slow
def test_a_checkpoint_of_another_precision(tmp_path: Any) -> None:
    solved(checkpoint=tmp_path / "run")
    with pytest.raises(ValueError, match="another run"):
        solved(rk.Simulation(precision="bfloat16"), rounds=5, checkpoint=tmp_path / "run")


# Room.


def test_values_alive_at_one_time() -> None:
    """Two products of 100×100 are alive at once, and never three; what is computed entry by entry takes nothing."""

    def chain(a: Any) -> Any:
        for _ in range(5):
            a = jnp.sin(a @ a) + 1.0
        return jnp.sum(a)

    jaxpr = jax.make_jaxpr(chain)(np.ones((100, 100), np.float32)).jaxpr
    assert 2 * 40_000 <= room.peak(jaxpr) < 3.1 * 40_000


def test_a_loop_holds_its_body() -> None:
    def loop(a: Any) -> Any:
        return jax.lax.fori_loop(0, 10, lambda i, a: jnp.tanh(a @ a) @ a, a)

    jaxpr = jax.make_jaxpr(loop)(np.ones((100, 100), np.float32)).jaxpr
    assert 2 * 40_000 <= room.peak(jaxpr) <= 4 * 40_000


def session(block: Any = "auto", cohort: int = 3) -> Any:
    return rk.Simulation(block=block).open(Job(PROBLEM, CLIENTS, FEDBIO, (X, Y), cohort))


def limited(monkeypatch: pytest.MonkeyPatch, limit: int) -> None:
    monkeypatch.setattr(room, "memory_of", lambda device: limit)


def test_as_many_as_fit(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    estimate = session()._memory_estimate
    each, held = estimate.per_client, estimate.data + 2 * estimate.kept
    assert each > sum(a.nbytes for a in (X, Y))
    limited(monkeypatch, held + 4 * each)
    small = session()
    assert small._block.fit == 2
    (note,) = small.notes
    assert note.startswith("2 of 3 clients are computed side by side: each takes about ")
    with caplog.at_level(logging.INFO, "rookery"):
        run = solved(cohort=3)
    assert note in caplog.messages
    monkeypatch.undo()
    np.testing.assert_allclose(run.y, solved(cohort=3).y, rtol=1e-6)
    assert not session().notes
    assert not session(block=1).notes


def test_nothing_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    limited(monkeypatch, 300)
    with pytest.raises(room.MemoryLimitError, match=r"has 300 bytes\. The clients' data take .*What helps: "):
        session()


def test_out_of_memory_while_it_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    opened = session(block=2)
    opened.init()

    def fails(*_: Any) -> Any:
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory while trying to allocate 21 bytes.")

    monkeypatch.setattr(opened, "_program", lambda *_, **__: fails)
    with pytest.raises(room.MemoryLimitError, match=r"out of memory.*the work of 2 clients side by side about .*remat"):
        opened.advance(1)


@pytest.mark.parametrize(
    ("lines", "files", "limits"),
    [
        ("0::/app/run\n", {"app/run/memory.max": "max", "app/memory.max": "4000", "memory.max": "max"}, [4000]),  # v2
        ("0::/outside/of/it\n", {"memory.max": "3000"}, [3000]),  # a container whose group is the root
        ("4:memory:/jobs/7\n1:cpu:/\n0::/\n", {"memory/jobs/7/memory.limit_in_bytes": "2000"}, [2000]),  # v1
        (
            "9:cpu,memory:/docker/a\n",
            {"memory/memory.limit_in_bytes": "9223372036854771712", "memory/docker/memory.limit_in_bytes": "1000"},
            [1000, 9223372036854771712],
        ),
        ("0::/\n", {}, []),
        (None, {}, []),
    ],
)
def test_limits_of_control_groups(lines: Any, files: dict[str, str], limits: list[int], tmp_path: Any) -> None:
    texts = {f"sys/fs/cgroup/{name}": text for name, text in files.items()} | (
        {} if lines is None else {"proc/self/cgroup": lines}
    )
    for name, text in texts.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text + "\n")
    assert room._cgroup_limits(tmp_path) == limits


def test_a_container_has_the_memory_of_its_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not that of the machine."""
    monkeypatch.setattr(room, "_cgroup_limits", lambda root: [10**9, 8 * 10**8])
    device = jax.local_devices()[0]
    if not device.memory_stats():
        assert room.memory_of(device) == 8 * 10**8 // jax.local_device_count()
