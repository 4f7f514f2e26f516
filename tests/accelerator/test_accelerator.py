"""A smoke test on an accelerator, as users compile it: `make gpu`. Skipped where there is none."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import rookery as rk
from rookery.engines.interpreter import weighted_sum
from rookery.engines.streaming import stage

pytestmark = pytest.mark.skipif(jax.default_backend() == "cpu", reason="no accelerator")


def test_the_mean_is_not_rounded() -> None:
    """The server's mean is within 1e-6 of float64: no product in a shorter type."""
    rng = np.random.default_rng(0)
    weights, rows = rng.random(1000), rng.normal(size=(1000, 4096)) + 3
    exact = weights @ rows
    got = jax.jit(lambda w, v: weighted_sum(w, v))(jnp.float32(weights), jnp.float32(rows))
    assert np.abs(np.asarray(got, float) - exact).max() / np.abs(exact).max() < 1e-6


def _bilevel() -> Any:
    rng = np.random.default_rng(1)
    sizes = (6, 3, 8, 5)
    data = [{"a": rng.normal(size=(n, 4)), "t": rng.normal(size=n)} for n in sizes]
    clients = rk.Clients(lower=data, upper=data[::-1])
    fit = lambda x, y, b: jnp.mean((b["a"] @ y - b["t"]) ** 2)
    problem = rk.Bilevel(upper=fit, lower=lambda x, y, b: fit(x, y, b) + jnp.sum(jnp.exp(x) * y**2))
    return problem, clients, (np.zeros(4), np.zeros(4))


@pytest.mark.parametrize(
    "method",
    [
        rk.FedNest(lower_local_steps=(1, 3), batch_size=2, hessian_step=0.1),
        rk.ASFBO(local_steps=(1, 3), batch_size=2),
        rk.FedBiOAcc(batch_size=2, local_steps=2),
        rk.CommFedBiO(batch_size=2, shrink=2),
    ],
    ids=lambda method: type(method).__name__,
)
def test_the_engines_agree(method: Any) -> None:
    """Clients of unequal size, a cohort in blocks, a channel and dropouts: both engines to float32's rounding."""
    how: Any = {
        "rounds": 3,
        "cohort": 3,
        "seed": 5,
        "channel": rk.chain(rk.clip(1.0), rk.gaussian(0.01)),
        "noise_seed": 3,
        "faults": rk.Faults(dropout=0.2),
    }
    here = rk.solve(*_bilevel()[:2], method, _bilevel()[2], **how, engine=rk.Simulation(block=2))
    there = rk.solve(*_bilevel()[:2], method, _bilevel()[2], **how, engine=rk.Federation())
    for a, b in zip(jax.tree.leaves(here.state), jax.tree.leaves(there.state), strict=True):
        np.testing.assert_allclose(np.asarray(a), np.asarray(b), rtol=2e-3, atol=2e-4)
    assert here.history.drop(columns="seconds").equals(there.history.drop(columns="seconds"))


def test_rows_on_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows from buffers that are used again and again, and rows that the device reads: the numbers of the device's."""
    monkeypatch.setattr(stage, "PIECE", 2**18)
    rng = np.random.default_rng(2)
    sizes = rng.integers(20, 60, 200)
    rows = {"a": rng.integers(256, size=(sizes.sum(), 64), dtype=np.uint8), "t": rng.normal(size=sizes.sum())}
    engine = rk.Simulation(device_bytes=rows["a"].nbytes // 4)
    loss = lambda x, b: jnp.mean((b["a"].astype(jnp.float32) / 255 @ x - b["t"]) ** 2)
    runs = []
    for where in ("device", "host", "pinned"):
        clients = rk.Clients.from_arrays(rows, sizes, placement=where)
        method = rk.FedAvg(step=0.01, local_steps=3, batch_size=8)
        how: Any = {"cohort": 20, "engine": engine, "progress": False}
        runs.append(rk.solve(rk.SingleLevel(loss), clients, method, np.zeros(64), 60, **how))
    for run in runs[1:]:
        np.testing.assert_allclose(np.asarray(runs[0].x), np.asarray(run.x), rtol=1e-4, atol=1e-6)


def test_pinned_rows_stay_on_the_host() -> None:
    """An array that the device reads takes none of its memory."""
    before = jax.local_devices()[0].memory_stats()["bytes_in_use"]
    clients = rk.Clients.from_arrays(np.ones((2**16, 256), np.float32), np.full(256, 256), placement="pinned")
    after = jax.local_devices()[0].memory_stats()["bytes_in_use"]
    assert after - before < 2**20
    words = clients.lower.rows.words
    total = jax.jit(lambda a: jnp.sum(jax.lax.bitcast_convert_type(a[:: 2**10], jnp.float32)))(words)
    assert total == 2**6 * 256
