"""CoBo against a NumPy transcription, its clusters, and the linear system that fixed weights solve."""

from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import quadratics as q

import rookery as rk
from rookery.engines import engine
from rookery.plan import words
from rookery.testing import cases

HELD = q.data((1, 3, 40, 200, 2), 6, **q._SINGLE)
for i in (1, 3):  # these two disagree with the others
    HELD[i]["d"] = -2 * HELD[i]["d"]
LOSSES, CLIENTS = q.SingleLevel(HELD, q._normalised(q.WEIGHTS)), rk.Clients(upper=HELD, weights=q.WEIGHTS)
ETA, RHO, GAMMA = 0.1, 0.3, 0.4
WORDS: dict[str, Any] = {"step": ETA, "proximal": RHO, "weight_step": GAMMA}
ROUNDS, SEED = 8, 3
State = tuple[np.ndarray, np.ndarray]  # the models, in rows, and the weights


def met(t: int, cohort: Sequence[int]) -> list[tuple[int, int]]:
    """The pairs of a round: neighbours in a random order of the cohort. With an odd number one is left."""
    key = jax.random.split(jax.random.fold_in(jax.random.key(SEED), t + 1))[1]
    order = [cohort[j] for j in jax.random.permutation(jax.random.split(key, 4)[0], len(cohort))]
    return list(zip(order[::2], order[1::2], strict=False))


def transcribed(cohorts: Any, taus: Sequence[int], pair_every: int, normalize: bool) -> Iterator[State]:
    """Algorithm 1, pair by pair and client by client."""
    n = len(LOSSES.p)
    models, w = np.tile(q.INIT[0], (n, 1)), 1 - np.eye(n)
    yield models, w
    for t, cohort in enumerate(cohorts):
        w = w.copy()
        for i, j in met(t, cohort) if t % pair_every == 0 else []:
            middle = (models[i] + models[j]) / 2
            a, b = LOSSES.f_x(i, middle), LOSSES.f_x(j, middle)
            agree = a @ b / (np.linalg.norm(a) * np.linalg.norm(b) if normalize else 1)
            w[i, j] = w[j, i] = min(max(w[i, j] + GAMMA * agree, 0), 1)
        new = models.copy()
        for i in cohort:
            x = models[i]
            for _ in range(taus[i]):
                pull = sum((w[i, k] * (x - models[k]) for k in range(n) if k != i), np.zeros_like(x))
                x = x - ETA * (LOSSES.f_x(i, x) + RHO * pull)
            new[i] = q.project(x)
        models = new
        yield models, w


EVERYONE = [list(range(q.N_CLIENTS))] * ROUNDS
CASES: dict[str, tuple[dict[str, Any], int]] = {  # and the size of the cohort
    "one step": ({}, 5),
    "one step, an even cohort, the cosine": ({"normalize": True}, 4),
    "local steps, pairs in every second round": ({"local_steps": [5, 1, 3, 2, 5], "pair_every": 2}, 3),
}


@pytest.mark.parametrize("name", CASES)
def test_equals_the_transcription(name: str) -> None:
    given, size = CASES[name]
    cohorts = EVERYONE if size == q.N_CLIENTS else q.cohorts(q.N_CLIENTS, size, ROUNDS, seed=SEED)
    taus = given.get("local_steps", [1] * q.N_CLIENTS)
    expected = list(transcribed(cohorts, taus, given.get("pair_every", 1), given.get("normalize", False)))
    path: list[Any] = []
    keep = lambda x, y, memory: path.append((x, memory)) or {}
    method = rk.CoBo(**WORDS, **given)
    run = rk.solve(q.SINGLE_LEVEL, CLIENTS, method, q.INIT[0], ROUNDS, evaluate=keep, cohort=size, seed=SEED)
    q.assert_same([(memory,) for _, memory in path], [(models,) for models, _ in expected])
    q.assert_same([(x,) for x, _ in path[1:]], [(q.project(models.mean(axis=0)),) for models, _ in expected[1:]])
    np.testing.assert_allclose(run.weights, expected[-1][1], rtol=0, atol=1e-10)
    pairs = ~np.eye(q.N_CLIENTS, dtype=bool)
    assert expected[-3][1][pairs].min() < 0.9  # the weights were learnt before the last rounds
    assert any(np.isclose(np.linalg.norm(models, axis=1), q.RADIUS).any() for models, _ in expected[1:])
    exchanges = ROUNDS + sum(t % given["pair_every"] == 0 for t in range(ROUNDS)) if "pair_every" in given else ROUNDS
    assert run.history["exchanges"].iloc[-1] == exchanges
    if len(given) < 2:  # with one step, two gradients up, and the midpoint and the new model down
        assert run.exchanges["bytes_up"].sum() == size * 2 * 3 * 8
        assert run.exchanges["bytes_down"].sum() >= size * 2 * 3 * 8
        assert run.exchanges.set_index("name")["count"]["gradients"] == 1


# Clusters: f_i = (a_i/2)‖x − μ_k‖², three clients around each of two points.

CURVATURE = np.array([0.5, 1.0, 2.0, 1.5, 0.8, 1.2])
CENTRES = np.array([[1.0, -1.0]] * 3 + [[-2.0, 0.5]] * 3)
BOWLS = rk.SingleLevel(lambda x, b: jnp.mean(b["a"] * jnp.sum((x - b["m"]) ** 2, axis=-1)) / 2)
SIX = rk.Clients(upper=[{"a": CURVATURE[i : i + 1], "m": CENTRES[i : i + 1]} for i in range(6)])


@pytest.mark.parametrize("normalize", [False, True])
def test_the_weights_become_the_clusters(normalize: bool) -> None:
    method = rk.CoBo(step=0.2, proximal=0.2, weight_step=0.1, normalize=normalize)
    run = rk.solve(BOWLS, SIX, method, np.array([9.0, 7.0]), 400)
    np.testing.assert_array_equal(run.weights, np.kron(np.eye(2), np.ones((3, 3))) - np.eye(6))
    np.testing.assert_allclose(run.memory, CENTRES, rtol=0, atol=1e-12)


@pytest.mark.parametrize("local_steps", [1, 5])
def test_fixed_weights_end_at_the_root_of_a_linear_system(local_steps: int) -> None:
    """(diag(a) + ρ(diag(W1) − W))X = diag(a)μ, with all weights at 1; also for several local steps."""
    rho = 0.2
    method = rk.CoBo(step=0.2, proximal=rho, weight_step=0.0, local_steps=local_steps)
    run = rk.solve(BOWLS, SIX, method, np.array([9.0, 7.0]), 300)
    ones = 1 - np.eye(6)
    system = np.diag(CURVATURE) + rho * (np.diag(ones.sum(axis=1)) - ones)
    np.testing.assert_allclose(run.memory, np.linalg.solve(system, CURVATURE[:, None] * CENTRES), rtol=0, atol=1e-10)
    np.testing.assert_array_equal(run.weights, ones)


# What the server and the clients know.

LOSSY: dict[str, Any] = {"faults": rk.Faults(dropout=0.3), "channel": rk.chain(rk.clip(0.5), rk.gaussian(0.1))}


@pytest.mark.parametrize("given", [pytest.param({}, marks=pytest.mark.slow), {"local_steps": 2, "pair_every": 2}])
def test_a_client_remembers_the_model_that_the_server_has_of_it(given: dict[str, Any]) -> None:
    """Whatever a channel changes, and whoever does not reply; and the weights stay symmetric."""
    missing = 0
    for seed in range(3):
        how: dict[str, Any] = {"cohort": 5, "noise_seed": 1, "seed": seed, **LOSSY}
        run = rk.solve(BOWLS, SIX, rk.CoBo(step=0.2, **given), np.array([9.0, 7.0]), 3, **how)
        np.testing.assert_array_equal(run.memory, run.state.models)
        np.testing.assert_array_equal(run.weights, run.weights.T)
        missing += run.history["missing"].iloc[-1]
    assert missing > 5


@pytest.mark.parametrize(("local_steps", "seen"), [(1, ["gradients"]), (2, ["gradients", "x"])])
def test_plans_say_that_the_server_sees_every_model_and_gradient(local_steps: int, seen: list[str]) -> None:
    """To the coordinator, and to a site."""
    method = rk.CoBo(local_steps=local_steps)
    plan = str(rk.explain(BOWLS, SIX, method, np.array([9.0, 7.0])))
    assert plan.count("not aggregated: the server uses each reply") == len(seen)
    assert "its own row of models" in plan
    assert "of ," not in plan
    found, _, _ = words.exchanges(engine.traced(cases.job(method, cases.case("SingleLevel"))).round, 0)
    assert [exchange.name for exchange in found if exchange.alone] == seen


def test_a_private_run_is_refused() -> None:
    with pytest.raises(ValueError, match="The server sees every reply to the exchange 'gradients' by itself"):
        rk.solve(BOWLS, SIX, rk.CoBo(), np.zeros(2), 1, channel=rk.private(epsilon=8, delta=1e-5, clip=1.0))


def test_each_client_evaluates_its_own_model_on_both_engines() -> None:
    own = lambda c, x, y, memory: {"loss": c.f(memory, (), c.upper())}
    run = lambda engine: rk.solve(BOWLS, SIX, rk.CoBo(step=0.2), np.zeros(2), 3, evaluate_client=own, engine=engine)
    here, there = run(rk.Simulation()), run(rk.Federation())
    losses = CURVATURE / 2 * np.sum((np.asarray(here.memory) - CENTRES) ** 2, axis=1)
    for each in (here, there):
        np.testing.assert_allclose(each.history["loss"].iloc[-1], losses.mean(), rtol=1e-12)
