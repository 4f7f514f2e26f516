"""Runs of local steps against plain loops: the points, the order of the minibatches, and which are shared."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import rookery as rk
from rookery.language.fed import Client
from rookery.parts.local import sgd, svrg

STEP = 0.1
MATRICES = np.random.default_rng(0).normal(size=(8, 3, 3))  # the ν-th minibatch's gradient is M_ν z
START = np.array([1.0, -2.0, 0.5])


class PlainClient:
    """A client whose loop is Python's."""

    def loop(self, n: int, body: Any, carry: Any, before: int = 0) -> Any:
        for i in range(n - before):
            carry = body(i, carry)
        return carry


class Spy:
    """The gradient, and where and on which minibatch it was asked for."""

    def __init__(self) -> None:
        self.calls: list[tuple[np.ndarray, int]] = []

    def __call__(self, z: Any, v: Any) -> Any:
        self.calls.append((np.asarray(z), int(v)))
        return MATRICES[v] @ z


@pytest.mark.parametrize("steps", [1, 4])
def test_sgd(steps: int) -> None:
    spy = Spy()
    found = sgd(PlainClient(), spy, START, STEP, steps)  # type: ignore[arg-type]
    z = START
    for v in range(steps):
        z = z - STEP * MATRICES[v] @ z
    np.testing.assert_allclose(found, z, rtol=1e-13)
    assert [v for _, v in spy.calls] == list(range(steps))  # a fresh minibatch every step


@pytest.mark.parametrize("steps", [1, 2, 5])
def test_svrg(steps: int) -> None:
    anchor, spy = np.array([0.3, 0.1, -0.4]), Spy()
    found = svrg(PlainClient(), spy, START, anchor, STEP, steps)  # type: ignore[arg-type]
    z = START - STEP * anchor  # at the first step the two gradients cancel for any minibatch
    for v in range(steps - 1):
        z = z - STEP * (MATRICES[v] @ z - MATRICES[v] @ START + anchor)
    np.testing.assert_allclose(found, z, rtol=1e-13)
    assert len(spy.calls) == 2 * (steps - 1)
    pairs = list(zip(spy.calls[::2], spy.calls[1::2], strict=True))
    assert len({v for (_, v), _ in pairs}) == steps - 1
    for (here, v), (there, w) in pairs:
        assert v == w, "the two gradients are on different minibatches"
        np.testing.assert_array_equal(there, START)  # the correction is taken at the anchor's point
        assert not np.allclose(here, START)


def test_svrg_of_one_client_is_gradient_descent() -> None:
    """With the full gradient as anchor the correction leaves exactly the gradient at z_i."""
    m = MATRICES[0] @ MATRICES[0].T
    found = svrg(PlainClient(), lambda z, v: m @ z, START, m @ START, STEP, 6)  # type: ignore[arg-type]
    z = START
    for _ in range(6):
        z = z - STEP * m @ z
    np.testing.assert_allclose(found, z, rtol=1e-12)


def test_a_traced_number_of_steps() -> None:
    """Different for each client of one vectorised map, and counted by the client's own loop."""
    problem = rk.SingleLevel(lambda x, b: 0.5 * jnp.mean(b["a"]) * x**2)
    curvature = [1.0, 2.0, 3.0]
    clients = rk.Clients(upper=[{"a": np.array([a])} for a in curvature])
    steps = jnp.array([4, 1, 3])

    def run(i: Any) -> Any:
        results = []
        for local, anchor in ((sgd, ()), (svrg, (jnp.asarray(0.5),))):
            c = Client(problem, clients, i, i)
            gradient = lambda x, v: c.f_x(x, (), c.upper(jax.random.key(0), None, v))
            results.append((local(c, gradient, jnp.asarray(2.0), *anchor, STEP, steps[i]), c.work))
        return results

    (plain, sgd_work), (corrected, svrg_work) = jax.jit(jax.vmap(run))(jnp.arange(3))
    for i, (a, count) in enumerate(zip(curvature, [4, 1, 3], strict=True)):
        np.testing.assert_allclose(plain[i], 2.0 * (1 - STEP * a) ** count, rtol=1e-12)
        z = 2.0
        for _ in range(count):
            z = z - STEP * (a * z - a * 2.0 + 0.5)
        np.testing.assert_allclose(corrected[i], z, rtol=1e-12)
        assert sgd_work[i].tolist() == [count, 0, count, 0]
        assert svrg_work[i].tolist() == [2 * (count - 1), 0, 2 * (count - 1), 0]
