"""FedGDA-GT, local extragradient, ProxSkip-GDA and Momentum Local SGDA against NumPy transcriptions, and their limits.

The golden runs have clients of 1 to 200 samples and a projection; the limits are those of quadratic games.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import cache
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
import quadratics as q
import transcription as golden
from fields import Point, affine, flat, stepped

import rookery as rk

GAME, CLIENTS = q.minimax(upper=(1, 3, 40, 200, 2))
ALPHA, BETA, SHARE = 0.1, 0.07, 0.4
STEPS: dict[str, Any] = {"upper_step": ALPHA, "lower_step": BETA}
LOCAL_STEPS = [5, 1, 3, 2, 5]  # τ_i
ROUNDS, COHORT, SEED = 8, 3, 5
EVERYONE = [list(range(q.N_CLIENTS))] * ROUNDS
COHORTS = q.cohorts(q.N_CLIENTS, COHORT, ROUNDS, seed=SEED)


def mean(cohort: Sequence[int], points: Sequence[Point]) -> Point:
    return tuple(golden.mean(GAME, cohort, [point[k] for point in points]) for k in range(len(points[0])))


def field(i: int, w: Point) -> Point:
    return GAME.f_x(i, *w), -GAME.f_y(i, *w)


def projected(w: Point) -> Point:
    return q.project(w[0]), w[1]


def corrected(i: int, at: Point, w: Point, h: Point | None) -> Point:
    """G_i(at), or G_i(at) − G_i(w) + h."""
    return field(i, at) if h is None else tuple(a - b + c for a, b, c in zip(field(i, at), field(i, w), h, strict=True))


def descent(cohorts: Any, anchored: bool, extra: bool) -> Iterator[Point]:
    """FedGDA-GT's steps or those of FedAvg-S; with `extra` the look ahead of local extragradient."""
    w: Point = q.INIT
    yield w
    for cohort in cohorts:
        h = mean(cohort, [field(i, w) for i in cohort]) if anchored else None
        ends = []
        for i in cohort:
            own = w
            for _ in range(LOCAL_STEPS[i]):
                ahead = stepped(own, (ALPHA, BETA), corrected(i, own, w, h)) if extra else own
                own = stepped(own, (ALPHA, BETA), corrected(i, ahead, w, h))
            ends.append(own)
        w = projected(mean(cohort, ends))
        yield w


def momentum(cohorts: Any) -> Iterator[Point]:
    w: Point = q.INIT
    d = mean(EVERYONE[0], [field(i, w) for i in EVERYONE[0]])
    yield w
    for cohort in cohorts:
        ends = []
        for i in cohort:
            own, own_d = w, d
            for _ in range(LOCAL_STEPS[i]):
                own = (own[0] - ALPHA * own_d[0], own[1] - BETA * own_d[1])
                new = field(i, own)
                own_d = tuple((1 - SHARE) * old + SHARE * g for old, g in zip(own_d, new, strict=True))
            ends.append((*own, *own_d))
        *w_new, d_x, d_y = mean(cohort, ends)
        w, d = projected(tuple(w_new)), (d_x, d_y)
        yield w


def proxskip(counts: Sequence[int], chance: float) -> Iterator[tuple[Point, list[Point]]]:
    """The points and the clients' h_i."""
    everyone = EVERYONE[0]
    w: Point = q.INIT
    h: list[Point] = [tuple(np.zeros_like(v) for v in w)] * q.N_CLIENTS
    yield w, h
    for count in counts:
        ends = []
        for i in everyone:
            own = w
            for _ in range(count):
                own = stepped(own, (ALPHA, BETA), tuple(g - v for g, v in zip(field(i, own), h[i], strict=True)))
            ends.append(own)
        at = mean(everyone, ends)
        h = [
            tuple(v + chance / s * (a - b) for v, s, a, b in zip(h[i], (ALPHA, BETA), at, ends[i], strict=True))
            for i in everyone
        ]
        w = projected(at)
        yield w, h


LOCAL: dict[str, Any] = STEPS | {"local_steps": LOCAL_STEPS}
CASES: dict[str, tuple[Any, Callable[[Any], Iterator[Point]]]] = {
    "FedGDAGT": (rk.FedGDAGT(**LOCAL), lambda who: descent(who, anchored=True, extra=False)),
    "LocalExtragradient": (rk.LocalExtragradient(**LOCAL), lambda who: descent(who, anchored=False, extra=True)),
    "LocalExtragradient, anchored": (
        rk.LocalExtragradient(**LOCAL, control="anchor"),
        lambda who: descent(who, anchored=True, extra=True),
    ),
    "MomentumLocalSGDA": (rk.MomentumLocalSGDA(**LOCAL, momentum=SHARE), momentum),
}


@pytest.mark.parametrize("name", CASES)
def test_equals_the_transcription(name: str) -> None:
    """With cohorts of three of five unlike clients, of 1 to 200 samples and 1 to 5 local steps."""
    method, transcribed = CASES[name]
    expected = list(transcribed(COHORTS))
    q.assert_same(q.trajectory(q.MINIMAX, CLIENTS, method, q.INIT, ROUNDS, cohort=COHORT, seed=SEED), expected)
    assert any(np.isclose(np.linalg.norm(x), q.RADIUS) for x, _ in expected[1:])  # the projection was at work


def test_proxskip_equals_the_transcription() -> None:
    """The ledger says how many steps the rounds took."""
    path: list[Any] = []
    keep = lambda x, y, memory: path.append((x, y, memory)) or {}
    method = rk.ProxSkipGDA(**STEPS, chance=SHARE)
    run = rk.solve(q.MINIMAX, CLIENTS, method, q.INIT, ROUNDS, evaluate=keep, seed=SEED)
    counts = np.diff(run.history["gradients"]) // q.N_CLIENTS
    assert len(set(counts)) > 2  # several numbers of steps
    expected = list(proxskip([int(count) for count in counts], SHARE))
    q.assert_same([(x, y) for x, y, _ in path], [w for w, _ in expected])
    for (_, _, memory), (_, h) in zip(path, expected, strict=True):
        for ours, theirs in zip(memory, zip(*h, strict=True), strict=True):
            np.testing.assert_allclose(ours, np.stack(theirs), rtol=0, atol=1e-10)
    assert run.exchanges["count"].sum() == 1
    by_weight = [np.asarray(q.WEIGHTS) @ np.asarray(part) for part in run.memory]
    np.testing.assert_allclose(flat(tuple(by_weight)), 0, atol=1e-12)


def test_the_mean_of_proxskips_control_variates_with_lost_and_with_clipped_replies() -> None:
    game = rk.Minimax(lambda x, y, b: jnp.mean((x - b) ** 2 - (y + b) ** 2) + x * y)
    p = [1.0, 2.0, 3.0]
    clients = rk.Clients(upper=[np.arange(n) + 2.0 * n for n in (1, 3, 7)], weights=p)
    method, start = rk.ProxSkipGDA(**STEPS, chance=SHARE), (np.zeros(()), np.zeros(()))
    given: list[dict[str, Any]] = [{"faults": rk.Faults(dropout=0.2)}, {"channel": rk.clip(0.5)}]
    lost, clipped = (rk.solve(game, clients, method, start, 8, **each) for each in given)
    assert lost.history["missing"].iloc[-1] > 0
    assert min(np.abs(part).max() for part in lost.memory) > 0.1
    assert max(abs(p @ np.asarray(part)) for part in lost.memory) < 1e-12
    assert max(abs(p @ np.asarray(part)) for part in clipped.memory) > 0.1


def test_proxskip_refuses_a_cohort() -> None:
    with pytest.raises(
        ValueError, match=r"ProxSkipGDA needs all 5 clients in every round; got cohort=3\. Leave cohort"
    ):
        rk.solve(q.MINIMAX, CLIENTS, rk.ProxSkipGDA(), q.INIT, 1, cohort=3)


def test_fedgdagt_is_a_form_of_fedavg_s() -> None:
    named, form = rk.FedGDAGT(**LOCAL), rk.FedAvgSaddle(**LOCAL, control="anchor")
    assert {**vars(named)} == {**vars(form)}
    assert type(named).round is type(form).round


# Limits: f_i = ½xᵀD_ix − d_iᵀx + xᵀE_iy − ½yᵀC_iy + c_iᵀy, whose directions are G_i = M_i w − s_i.

SIZES = (3, 2)
P = np.array([0.1, 0.3, 0.2, 0.4])


def _quadratic(x: Any, y: Any, b: Any) -> Any:
    d2, d, e, c2, c = (jnp.mean(b[name], axis=0) for name in ("D", "d", "E", "C", "c"))
    return 0.5 * x @ d2 @ x - d @ x + x @ e @ y - 0.5 * y @ c2 @ y + c @ y


@cache
def game() -> tuple[rk.Clients, list[tuple[np.ndarray, np.ndarray]]]:
    """Four unlike clients, and the M_i and s_i."""
    shapes = {"C": (2, 2), "D": (3, 3), "E": (3, 2), "c": (2,), "d": (3,)}
    held = q.data((1, 2, 3, 2), 7, **shapes)
    linear = []
    for own in held:
        D, E, C, d, c = (own[name].mean(axis=0) for name in ("D", "E", "C", "d", "c"))
        linear.append((np.block([[D, E], [-E.T, C]]), np.concatenate([d, c])))
    return rk.Clients(upper=held, weights=P), linear


def limit(method: Any, rounds: int) -> rk.Run:
    start = (np.ones(3), -np.ones(2))
    return rk.solve(rk.Minimax(_quadratic), game()[0], method, start, rounds)


def saddle() -> np.ndarray:
    matrices, vectors = zip(*game()[1], strict=True)
    return np.linalg.solve(np.tensordot(P, matrices, 1), np.tensordot(P, vectors, 1))


def fixed_point(local: Callable[[int, Point], Point], like: Point) -> np.ndarray:
    """Where the mean of the clients' local steps ends: the fixed point of the mean of affine maps, found by probing."""
    maps = [affine(lambda w, i=i: local(i, w), like) for i in range(len(P))]  # type: ignore[misc]
    whole, shift = (sum(p * part[k] for p, part in zip(P, maps, strict=True)) for k in (0, 1))
    return np.linalg.solve(np.eye(len(shift)) - whole, shift)


SIZE = 0.15
GIVEN: dict[str, Any] = {"upper_step": SIZE, "lower_step": SIZE}


def descends(steps: int, extra: bool) -> Callable[[int, Point], Point]:
    def local(i: int, w: Point) -> Point:
        (matrix, vector), (at,) = game()[1][i], w
        for _ in range(steps):
            ahead = at - SIZE * (matrix @ at - vector) if extra else at
            at = at - SIZE * (matrix @ ahead - vector)
        return (at,)

    return local


def with_momentum(steps: int) -> Callable[[int, Point], Point]:
    def local(i: int, w: Point) -> Point:
        (matrix, vector), (at, d) = game()[1][i], w
        for _ in range(steps):
            at = at - SIZE * d
            d = (1 - SHARE) * d + SHARE * (matrix @ at - vector)
        return at, d

    return local


FLAT = np.zeros(5)


@pytest.mark.parametrize(("extra", "steps"), [(False, 5), pytest.param(True, 1, marks=pytest.mark.slow), (True, 5)])
def test_plain_local_steps_end_off_the_saddle_point(extra: bool, steps: int) -> None:
    """Where the formula says; with a look ahead even for one step."""
    method = (rk.LocalExtragradient if extra else rk.FedAvgSaddle)(**GIVEN, local_steps=steps)
    expected = fixed_point(descends(steps, extra), (FLAT,))
    run = limit(method, 150)
    np.testing.assert_allclose(flat((run.x, run.y)), expected, rtol=0, atol=1e-10)
    assert np.linalg.norm(expected - saddle()) > 1e-3


ANCHORED: dict[str, Any] = GIVEN | {"local_steps": 5}


@pytest.mark.parametrize("method", [rk.FedGDAGT(**ANCHORED), rk.LocalExtragradient(**ANCHORED, control="anchor")])
def test_anchored_steps_end_at_the_saddle_point(method: Any) -> None:
    run = limit(method, 150)
    np.testing.assert_allclose(flat((run.x, run.y)), saddle(), rtol=0, atol=1e-10)


@pytest.mark.parametrize("steps", [pytest.param(1, marks=pytest.mark.slow), 5])
def test_the_limit_with_momentum(steps: int) -> None:
    """The saddle point for one local step, and the fixed point of the mean of the local maps for several."""
    run = limit(rk.MomentumLocalSGDA(**GIVEN, local_steps=steps, momentum=SHARE), 250)
    expected = fixed_point(with_momentum(steps), (FLAT, FLAT))[:5]
    np.testing.assert_allclose(flat((run.x, run.y)), expected, rtol=0, atol=1e-10)
    off = np.linalg.norm(expected - saddle())
    assert off < 1e-10 if steps == 1 else off > 1e-3


def test_proxskip_ends_at_the_saddle_point_and_remembers_the_clients_directions_there() -> None:
    run = limit(rk.ProxSkipGDA(**GIVEN, chance=0.4), 300)
    np.testing.assert_allclose(flat((run.x, run.y)), saddle(), rtol=0, atol=1e-10)
    remembered = np.concatenate([np.asarray(part) for part in run.memory], axis=1)
    expected = [matrix @ saddle() - vector for matrix, vector in game()[1]]
    np.testing.assert_allclose(remembered, expected, rtol=0, atol=1e-9)


@pytest.mark.parametrize(
    ("method", "factor"),
    [(rk.FedAvgSaddle, np.sqrt(1 + 0.3**2)), (rk.LocalExtragradient, np.sqrt(1 - 0.3**2 + 0.3**4))],
)
def test_on_a_bilinear_game_extragradient_shrinks_the_distance_and_descent_ascent_does_not(
    method: Any, factor: float
) -> None:
    """On f = xy, by √(1 − γ² + γ⁴) a step; that of descent ascent grows by √(1 + γ²)."""
    norms: list[float] = []
    keep = lambda x, y: norms.append(float(np.hypot(x, y))) or {}
    problem = rk.Minimax(lambda x, y, b: jnp.mean(b) * x * y)
    rk.solve(
        problem, rk.Clients(upper=[np.ones(2)]), method(0.3, 0.3), (np.array(1.0), np.array(-2.0)), 5, evaluate=keep
    )
    np.testing.assert_allclose(np.divide(norms[1:], norms[:-1]), factor, rtol=1e-12)
