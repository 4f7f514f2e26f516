"""Ditto, pFedMe, fine-tuned FedAvg and Local-train against NumPy transcriptions, and what `solve` does with memory.

The transcription is told who takes part, which samples are drawn and when the reference point moves; all arithmetic is
its own. The losses are logistic, the clients have unequal sizes and weights, and three of four take part in a round.
"""

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numpy.typing import NDArray

import rookery as rk
from rookery.data.cohort import sample_cohort

Vector = NDArray[np.float64]
SIZES, D, RIDGE, BATCH = (5, 7, 4, 6), 3, 0.1, 2
N, COHORT, ROUNDS, SEED = len(SIZES), 3, 3, 11
WEIGHTS = np.array([1.0, 2.0, 1.0, 3.0]) / 7
RADIUS = 0.5


def _loss(x: Any, b: Any) -> Any:
    return jnp.mean(jnp.logaddexp(0, -b["t"] * (b["a"] @ x))) + RIDGE / 2 * x @ x


def _ball(x: Any) -> Any:
    return x * jnp.minimum(1.0, RADIUS / jnp.linalg.norm(x))


class Data(NamedTuple):
    """One client's samples."""

    a: Vector
    t: Vector

    def gradient(self, x: Vector, rows: Any = slice(None)) -> Vector:
        a, t = self.a[rows], self.t[rows]
        return -(t / (1 + np.exp(t * (a @ x)))) @ a / len(t) + RIDGE * x

    def arrays(self) -> dict[str, Any]:
        return {"a": self.a, "t": self.t, "place": np.arange(len(self.t))}


RNG = np.random.default_rng(9)
SAMPLES = [Data(RNG.normal(size=(n, D)), np.sign(RNG.normal(size=n))) for n in (*SIZES, 6)]
NODES, CENTER = SAMPLES[:N], SAMPLES[N]
CLIENTS = rk.Clients(upper=[n.arrays() for n in NODES], weights=WEIGHTS, center=CENTER.arrays())
PROBLEM = rk.SingleLevel(_loss, project_upper=_ball)
START = np.array([0.5, -0.6, 0.2])


def project(x: Vector) -> Vector:
    return x * min(1.0, RADIUS / np.linalg.norm(x))


def rounds() -> list[tuple[Any, list[int]]]:
    """Each round's key and cohort."""
    each = []
    for t in range(ROUNDS):
        choice, noise = jax.random.split(jax.random.fold_in(jax.random.key(SEED), t + 1))
        each.append((noise, np.asarray(sample_cohort(choice, N, COHORT)).tolist()))
    return each


@cache
def _draw(level: Any, k: int) -> Callable[..., Any]:
    return jax.jit(lambda order, i: CLIENTS.view(level, k).draw(order, BATCH, i, False).rows["place"])


def batch(k: int, order: Any, i: int) -> Any:
    return np.asarray(_draw("upper", k)(order, i))


def descend(k: int, x: Vector, order: Any, step: float, steps: int) -> Vector:
    for i in range(steps):
        x = x - step * NODES[k].gradient(x, batch(k, order, i))
    return x


def mean(who: list[int], own: list[Vector]) -> Vector:
    p = WEIGHTS[who]
    return sum(p_k * x for p_k, x in zip(p / p.sum(), own, strict=True))  # type: ignore[return-value]


Path_ = list[tuple[Vector, Vector]]  # w, and the clients' own models, before the first round and after each


def ditto() -> Path_:
    """Algorithm 2 of Li et al. (2021): r = 2, s = 3, η_g = .3, η_l = .2, λ = .7."""
    w, v = START, np.tile(START, (N, 1))
    path = [(w, v.copy())]
    for noise, who in rounds():
        sent = []
        for k in who:
            common, order = jax.random.split(jax.random.fold_in(noise, k))
            sent.append(descend(k, w, jax.random.split(common)[1], 0.3, 2))
            for i in range(3):
                v[k] = v[k] - 0.2 * (NODES[k].gradient(v[k], batch(k, order, i)) + 0.7 * (v[k] - w))
        w = project(mean(who, sent))
        path.append((w, v.copy()))
    return path


INNER: list[int] = []  # steps that pFedMe's subproblems took


def pfedme() -> Path_:
    """Algorithm 1 of T. Dinh et al. (2020): R = 2, η = .2, λ = 2, β = .8; at most 3 inner steps of .3, δ = .01."""
    w, theta = START, np.tile(START, (N, 1))
    path = [(w, theta.copy())]
    INNER.clear()
    for noise, who in rounds():
        sent = []
        for k in who:
            order = jax.random.split(jax.random.fold_in(noise, k))[1]
            w_k, theta[k] = w, w
            for r in range(2):
                rows = batch(k, order, r)
                taken = 0
                while taken < 3:
                    slope = NODES[k].gradient(theta[k], rows) + 2 * (theta[k] - w_k)
                    if np.linalg.norm(slope) <= 2 * 0.01:
                        break
                    theta[k] = theta[k] - 0.3 * slope
                    taken += 1
                INNER.append(taken)
                w_k = w_k - 0.2 * 2 * (w_k - theta[k])
            sent.append(w_k)
        w = project((1 - 0.8) * w + 0.8 * mean(who, sent))
        path.append((w, theta.copy()))
    return path


def fine_tuned() -> Path_:
    """FedAvg with 2 local steps of .3, then 3 steps of .2 on each copy."""
    w, v = START, np.tile(START, (N, 1))
    path = [(w, v.copy())]
    for noise, who in rounds():
        k1, k2 = jax.random.split(noise)
        own = lambda key, k: jax.random.split(jax.random.fold_in(key, k))[1]
        w = project(mean(who, [descend(k, w, own(k1, k), 0.3, 2) for k in who]))
        for k in who:
            v[k] = descend(k, w, own(k2, k), 0.2, 3)
        path.append((w, v.copy()))
    return path


METHODS: dict[str, tuple[Any, Callable[[], Path_]]] = {
    "Ditto": (
        rk.Ditto(step=0.3, local_steps=2, personal_step=0.2, personal_steps=3, proximal=0.7, batch_size=BATCH),
        ditto,
    ),
    "PFedMe": (
        rk.PFedMe(
            step=0.2, local_steps=2, proximal=2.0, server_step=0.8, accuracy=0.01, inner_step=0.3, inner_steps=3,
            batch_size=BATCH,
        ),
        pfedme,
    ),
    "FineTuned": (
        rk.FineTuned(step=0.3, local_steps=2, personal_step=0.2, personal_steps=3, batch_size=BATCH),
        fine_tuned,
    ),
}  # fmt: skip
GIVEN: dict[str, Any] = {"cohort": COHORT, "seed": SEED}


@pytest.mark.parametrize("name", METHODS)
def test_equals_the_transcription(name: str) -> None:
    method, transcription = METHODS[name]
    expected = transcription()
    path: list[Any] = []

    def keep(x: Any, y: Any, memory: Any) -> dict[str, Any]:
        path.append((np.asarray(x), np.asarray(memory)))
        return {}

    run = rk.solve(PROBLEM, CLIENTS, method, START, ROUNDS, evaluate=keep, **GIVEN)
    for (x, own), (x_golden, own_golden) in zip(path, expected, strict=True):
        np.testing.assert_allclose(x, x_golden, rtol=0, atol=1e-10)
        np.testing.assert_allclose(own, own_golden, rtol=0, atol=1e-10)
    np.testing.assert_array_equal(run.memory, path[-1][1])
    assert any(np.isclose(np.linalg.norm(x), RADIUS) for x, _ in expected[1:])  # the projection was at work
    if name == "PFedMe":
        assert min(INNER) < 3 == max(INNER)  # some subproblems were solved, others cut short
        gradients = sum(min(taken + 1, 3) for taken in INNER)  # one more, to see that it is solved
        assert run.history["gradients"].iloc[-1] == gradients


def test_local_train() -> None:
    """The steps of Local-SVRG with one node: 3 a round of .4, the reference point moving with chance .5."""
    x = r = START
    expected, new, samples = [x], True, 0
    for noise, _ in rounds():
        order, coins = jax.random.split(jax.random.fold_in(noise, N))
        moves = np.asarray(jax.random.bernoulli(jax.random.fold_in(coins, 0), 0.5, (3,)))
        for t in range(3):
            rows = np.asarray(_draw("center", 0)(order, t))
            v = CENTER.gradient(x, rows) - CENTER.gradient(r, rows) + CENTER.gradient(r)
            samples += BATCH + 6 * new
            new = bool(moves[t])
            r, x = x if new else r, x - 0.4 * v
        x = project(x)
        expected.append(x)
    path: list[Any] = []
    keep = lambda x, y: path.append(np.asarray(x)) or {}
    method = rk.LocalTrain(step=0.4, local_steps=3, refresh=0.5, batch_size=BATCH)
    run = rk.solve(PROBLEM, CLIENTS, method, START, ROUNDS, evaluate=keep, **GIVEN)
    np.testing.assert_allclose(path, expected, rtol=0, atol=1e-10)
    last = run.history.iloc[-1]
    assert last["exchanges"] == last["bytes_up"] == last["bytes_down"] == last["samples_lower"] == 0
    assert last["samples_upper"] == samples
    assert run.memory is None


def test_local_train_needs_a_centre() -> None:
    method = rk.LocalTrain(step=0.4, local_steps=3, refresh=0.5, batch_size=BATCH)
    with pytest.raises(ValueError, match="LocalTrain trains on the centre's data"):
        rk.solve(PROBLEM, rk.Clients(upper=[n.arrays() for n in NODES]), method, START, 1)


def test_local_train_at_a_client_sends_updates_that_can_be_clipped() -> None:
    clients = rk.Clients(upper=[n.arrays() for n in NODES], center=CENTER.arrays(), center_client=1)
    plan = str(rk.explain(PROBLEM, clients, rk.LocalTrain(batch_size=BATCH), START, channel=rk.clip(1.0)))
    assert "bookkeeping in it: whether the reference point moved (), clamped to [0, 1]" in plan


@pytest.mark.slow
def test_the_best_personal_models_survive_a_resume(tmp_path: Path) -> None:
    def evaluate(x: Any, y: Any, memory: Any) -> dict[str, Any]:
        return {"first": memory[0, 0]}  # rises and falls again

    method = METHODS["Ditto"][0]
    given: dict[str, Any] = {**GIVEN, "evaluate": evaluate, "keep_best": "+first"}
    whole = rk.solve(PROBLEM, CLIENTS, method, START, ROUNDS, **given)
    assert whole.best is not None
    own = ditto()
    best = int(np.argmax([v[0, 0] for _, v in own]))
    assert 0 < best < ROUNDS - 1  # neither at the start nor after the resume
    assert whole.best.round == best
    np.testing.assert_allclose(whole.best.memory, own[best][1], rtol=0, atol=1e-10)
    given["checkpoint"] = tmp_path / "run"
    rk.solve(PROBLEM, CLIENTS, method, START, ROUNDS - 1, **given)
    resumed = rk.solve(PROBLEM, CLIENTS, method, START, ROUNDS, **given)
    assert resumed.best is not None
    assert resumed.best.round == best
    for a, b in ((resumed.best.memory, whole.best.memory), (resumed.memory, whole.memory), (resumed.x, whole.x)):
        np.testing.assert_array_equal(a, b)


@pytest.mark.slow
def test_memory_that_nobody_sees() -> None:
    method = METHODS["FineTuned"][0]
    both = lambda x, y: {"value": x[0]}
    with pytest.raises(ValueError, match=r"a function of \(x, y\) here, because the sites of a Federation"):
        rk.solve(PROBLEM, CLIENTS, method, START, 1, evaluate=lambda x, y, memory: {}, engine=rk.Federation())
    two = rk.Clients(upper=[NODES[0].arrays()] * 2)
    run = rk.solve(PROBLEM, two, method, START, 1, evaluate=both, keep_best="+value", engine=rk.Federation())
    assert run.memory is None
    assert run.best is not None
    assert run.best.memory is None
    method = rk.FedAvg(step=0.1, batch_size=BATCH)  # remembers nothing
    none = lambda x, y, memory: {"none": memory is None}
    assert rk.solve(PROBLEM, two, method, START, 1, evaluate=none).history["none"].all()
