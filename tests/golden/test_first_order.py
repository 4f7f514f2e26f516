"""The methods that step along a field, against NumPy transcriptions; and their limits on quadratics, linear systems."""

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import fields
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import quadratics as q
import transcription as golden
from fields import TASK, M, Point, Vector, flat

import rookery as rk

ALPHA, BETA, GAMMA, LAMBDA = 0.02, 0.1, 0.15, 5.0  # the steps on x, on y and on the third variable, and the multiplier
ADAM, LONGEST = {"b1": 0.8, "b2": 0.95, "eps": 1e-3}, 0.5  # of an optimizer at the server; the longest change it takes
SMOOTHING, RATE, DUAL, DIFFERENCE, BOUND = 0.7, 0.3, 0.2, 0.1, 1.05


# The fields, written from the papers.


def f2sa(o: Any, w: Point) -> Point:
    x, y, z = w
    d_x = o.f_x(x, y) + LAMBDA * (o.g_x(x, y) - o.g_x(x, z))
    return d_x, o.f_y(x, y) / LAMBDA + o.g_y(x, y), o.g_y(x, z)


def f2sa_2(o: Any, w: Point) -> Point:
    x, plus, minus = w
    nu = 1 / LAMBDA
    d_x = (o.f_x(x, plus) + o.f_x(x, minus)) / 2 + (o.g_x(x, plus) - o.g_x(x, minus)) / (2 * nu)
    return d_x, o.g_y(x, plus) + nu * o.f_y(x, plus), o.g_y(x, minus) - nu * o.f_y(x, minus)


def v_pbgd(o: Any, w: Point) -> Point:
    x, y, omega = w
    d_x = o.f_x(x, y) + LAMBDA * (o.g_x(x, y) - o.g_x(x, omega))
    return d_x / LAMBDA, (o.f_y(x, y) + LAMBDA * o.g_y(x, y)) / LAMBDA, o.g_y(x, omega)


def meha(o: Any, w: Point) -> Point:
    x, y, theta = w
    d_x = o.f_x(x, y) / LAMBDA + o.g_x(x, y) - o.g_x(x, theta)
    d_y = o.f_y(x, y) / LAMBDA + o.g_y(x, y) - SMOOTHING * (y - theta)
    return d_x, d_y, o.g_y(x, theta) + SMOOTHING * (theta - y)


def sgha(smooth: Point, exact: bool) -> Callable[[Any, Point], Point]:
    def field(o: Any, w: Point) -> Point:
        (x, y, dual), tau = w, DIFFERENCE
        h_x = (o.g_x(x, y + tau * dual) - o.g_x(x, y - tau * dual)) / (2 * tau)
        h_y = (o.g_y(x, y + tau * dual) - o.g_y(x, y - tau * dual)) / (2 * tau)
        if exact:
            h_x, h_y = o.g_xy(x, y) @ dual, o.g_yy(x, y) @ dual
        d_x = o.f_x(x, y) + h_x + SMOOTHING * (x - smooth[0])
        return d_x, o.f_y(x, y) + h_y + SMOOTHING * (y - smooth[1]), DUAL * dual - o.g_y(x, y)

    return field


SIZES: dict[str, Any] = {"upper_step": ALPHA, "lower_step": BETA}
GIVEN: dict[str, Any] = SIZES | {"multiplier": LAMBDA}
LAGRANGIAN: dict[str, Any] = {"linear_step": GAMMA, "smoothing": SMOOTHING, "smoothing_rate": RATE}
LAGRANGIAN |= {"dual_regularization": DUAL, "difference": DIFFERENCE}
METHODS: dict[str, Any] = {
    "F2SA": (rk.F2SA(**GIVEN, auxiliary_step=GAMMA), f2sa, (ALPHA, BETA, GAMMA)),
    "F2SA2": (rk.F2SA2(**GIVEN), f2sa_2, (ALPHA, BETA, BETA)),
    "VPBGD": (rk.VPBGD(**GIVEN, auxiliary_step=GAMMA), v_pbgd, (ALPHA, BETA, GAMMA)),
    "MEHA": (rk.MEHA(**GIVEN, auxiliary_step=GAMMA, smoothing=SMOOTHING), meha, (ALPHA, BETA, GAMMA)),
}


def rounds(field: Any, steps: Any, anchored: bool, lower_rounds: int | None) -> Iterator[Point]:
    """x and y at the start and after each round."""
    w: Point = (*q.INIT, q.INIT[1])
    yield w[:2]
    for cohort in fields.COHORTS:
        if lower_rounds is None:
            w = fields.moved(field, w, steps, cohort, anchored)
        else:
            x = w[0]
            below = lambda o, v, x=x: field(o, (x, *v))[1:]
            for _ in range(lower_rounds):
                w = (x, *fields.moved(below, w[1:], steps[1:], cohort, anchored))
            above = lambda o, v, low=w[1:]: field(o, (*v, *low))[:1]
            w = (*fields.moved(above, (x,), steps[:1], cohort, anchored), *w[1:])
        yield w[:2]


CASES = [("F2SA", "none", None), ("F2SA", "anchor", 2), ("F2SA2", "anchor", None), ("VPBGD", "none", None)]


@pytest.mark.parametrize(("name", "control", "lower_rounds"), [*CASES, ("MEHA", "anchor", None)])
def test_equals_the_transcription(name: str, control: Any, lower_rounds: int | None) -> None:
    """Unlike clients, unequal weights, three clients of five, and several local steps."""
    method, field, steps = METHODS[name]
    given = {"control": control, "local_steps": fields.LOCAL_STEPS}
    given |= {} if lower_rounds is None else {"lower_rounds": lower_rounds}
    got = fields.library(dataclasses.replace(method, **given))
    q.assert_same(got, list(rounds(field, steps, control == "anchor", lower_rounds)))


@pytest.mark.parametrize("name", ["F2SA", pytest.param("MEHA", marks=pytest.mark.slow)])
def test_an_optimizer_at_the_server_steps_both_lower_variables(name: str) -> None:
    """Adam on x; on y and z a clipped momentum, each with its own norm and memory."""

    lengths: list[list[float]] = [[], []]

    def clipped(seen: list[float]) -> golden.Rule:
        push = golden.momentum(0.9, 0.5)

        def rule(gradient: Vector) -> Vector:
            seen.append(float(np.linalg.norm(gradient)))
            return push(gradient * min(1.0, LONGEST / seen[-1]))

        return rule

    method, field, steps = METHODS[name]
    one = lambda w, cohort: fields.moved(field, w, steps, cohort, False)
    rules = [golden.adam(0.05, **ADAM), *map(clipped, lengths)]
    expected = list(golden.with_server(one, rules, lambda x: x, (*q.INIT, q.INIT[1]), fields.COHORTS))
    assert all(min(seen) < LONGEST < max(seen) for seen in lengths)
    momentum = optax.chain(optax.clip_by_global_norm(LONGEST), optax.sgd(0.9, momentum=0.5))
    method = dataclasses.replace(method, local_steps=fields.LOCAL_STEPS)
    got = fields.library(rk.with_server_optimizer(method, upper=optax.adam(0.05, **ADAM), lower=momentum))
    q.assert_same(got, [w[:2] for w in expected])


@pytest.mark.parametrize("exact", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_sgha_equals_the_transcription(exact: bool) -> None:
    """With differences, and with exact products in their place; g is no quadratic, so that these are not the same."""

    def transcribed() -> Iterator[Point]:
        (x, y), dual = q.INIT, np.zeros(q.Y_DIM)
        smooth = x, y
        yield x, y
        for cohort in fields.COHORTS:
            field = sgha(smooth, exact)
            x, y, dual = fields.moved(field, (x, y, dual), (ALPHA, BETA, GAMMA), cohort, anchored=exact)
            smooth = smooth[0] + RATE * (x - smooth[0]), smooth[1] + RATE * (y - smooth[1])
            lengths.append(np.linalg.norm(dual))
            dual = dual * min(1, BOUND / lengths[-1])
            yield x, y

    lengths: list[Any] = []
    method = rk.SGHA(**SIZES, **LAGRANGIAN, radius=BOUND, local_steps=fields.LOCAL_STEPS)
    if exact:
        method = dataclasses.replace(method, difference=None, control="anchor")
    q.assert_same(fields.library(method), list(transcribed()))
    assert min(lengths) < BOUND < max(lengths)  # the projection was at work


# Limits. Three local steps with an anchor end where one step does.

ANCHORED: dict[str, Any] = {"control": "anchor", "local_steps": 3}
STEADY: dict[str, Any] = {"upper_step": 0.1, "lower_step": 0.15, "multiplier": LAMBDA}
NONE = np.zeros_like(M.A)


def system(*rows: list[np.ndarray], right: list[Vector]) -> Vector:
    return np.linalg.solve(np.block([*map(list, rows)]), np.concatenate(right))


def penalised(lam: float) -> Vector:
    """x, y and z with z = y*(x), y the minimiser of f + λg, and the envelope theorem's gradient of x zero."""
    return system(
        [M.D, M.E - lam * M.B.T, lam * M.B.T],
        [M.E.T - lam * M.B, M.C + lam * M.A, NONE],
        [-M.B, NONE, M.A],
        right=[M.d, M.c + lam * M.b, M.b],
    )


def central(nu: float) -> Vector:
    """x with the minimisers of g + νf and of g − νf."""
    return system(
        [M.D, M.E / 2 - M.B.T / (2 * nu), M.E / 2 + M.B.T / (2 * nu)],
        [nu * M.E.T - M.B, M.A + nu * M.C, NONE],
        [-nu * M.E.T - M.B, NONE, M.A - nu * M.C],
        right=[M.d, M.b + nu * M.c, M.b - nu * M.c],
    )


def enveloped(c: float, smoothing: float) -> Vector:
    unit = smoothing * np.eye(len(M.b))
    return system(
        [M.D / c, M.E / c - M.B.T, M.B.T],
        [M.E.T / c - M.B, M.C / c + M.A - unit, unit],
        [-M.B, -unit, M.A + unit],
        right=[M.d / c, M.c / c + M.b, M.b],
    )


def lagrangian(p: float) -> Vector:
    return system(
        [M.D, M.E, -M.B.T], [M.E.T, M.C, M.A], [-M.B, M.A, -p * np.eye(len(M.b))], right=[M.d, M.c, M.b]
    )  # fmt: skip


def bias(of: Callable[[float], Vector], size: float) -> float:
    """How far x is from the solution, if the method's parameter has this size."""
    return float(np.linalg.norm(of(size)[:3] - M.x))


def check_limit(method: Any, expected: Vector, count: int = 600) -> None:
    x, y, z, *_ = fields.limit(method, count)
    np.testing.assert_allclose(flat((x, y, z)), expected, rtol=0, atol=1e-10)
    assert np.linalg.norm(expected[:3] - M.x) > 1e-4


def test_the_limit_of_f2sa_is_off_by_a_constant_over_the_multiplier() -> None:
    check_limit(rk.F2SA(**STEADY, auxiliary_step=0.15, **ANCHORED), penalised(LAMBDA))
    assert 100 * bias(penalised, 100) == pytest.approx(1000 * bias(penalised, 1000), rel=0.02)


def test_the_limit_of_v_pbgd_is_that_of_f2sa() -> None:
    check_limit(rk.VPBGD(0.4, 0.1, LAMBDA, auxiliary_step=0.15, **ANCHORED), penalised(LAMBDA))


def test_the_limit_of_f2sa_2_is_off_by_the_square_of_that() -> None:
    check_limit(rk.F2SA2(0.1, 0.15, 10.0, **ANCHORED), central(0.1))
    assert 100**2 * bias(central, 0.01) == pytest.approx(1000**2 * bias(central, 0.001), rel=0.02)


def test_the_limit_of_meha_is_off_by_a_constant_over_the_multiplier() -> None:
    method = rk.MEHA(0.3, 0.1, auxiliary_step=0.15, multiplier=LAMBDA, smoothing=2.0, **ANCHORED)
    check_limit(method, enveloped(LAMBDA, 2.0), 1200)
    of = lambda c: enveloped(c, 2.0)
    assert 1000 * bias(of, 1000) == pytest.approx(10_000 * bias(of, 10_000), rel=0.02)


def test_the_limit_of_sgha_is_off_by_a_constant_times_the_regularization() -> None:
    """The differences, the smoothing and its rate do not matter on a quadratic."""
    check_limit(rk.SGHA(0.05, 0.05, 0.15, dual_regularization=DUAL, difference=0.5, **ANCHORED), lagrangian(DUAL), 1200)
    assert bias(lagrangian, 0.01) / 0.01 == pytest.approx(bias(lagrangian, 0.001) / 0.001, rel=0.05)
    assert bias(lagrangian, 0) < 1e-12


def test_the_limit_without_an_anchor() -> None:
    """Three local steps of unlike clients drift, by as much as the local maps say."""
    method = rk.F2SA(**STEADY, auxiliary_step=0.15, local_steps=3)
    like = (*TASK.init, TASK.init[1])
    expected = fields.drifted(f2sa, (0.1, 0.15, 0.15), 3, like)
    np.testing.assert_allclose(flat(fields.limit(method, 600)), expected, rtol=0, atol=1e-10)
    assert np.linalg.norm(expected - penalised(LAMBDA)) > 0.01


def test_both_ends_of_a_correction_have_one_minibatch() -> None:
    """If D_i depends on the minibatch alone, the corrections are zero, and k local steps are k times one step."""
    lower = lambda x, y, b: 0.5 * jnp.mean(b["a"]) * y @ y + jnp.mean(b["d"] @ x)
    problem = rk.Bilevel(lambda x, y, b: jnp.mean(b["d"] @ x) + jnp.sum(y), lower)
    draw = np.random.default_rng(3).normal
    rows = [{"d": draw(size=(6, 3)), "a": 1 + draw(size=6) ** 2} for _ in range(3)]
    method = rk.F2SA(upper_step=0.1, batch_size=2, control="anchor")
    ends = [
        rk.solve(problem, rk.Clients(rows, rows), dataclasses.replace(method, local_steps=count), q.INIT, 1).x
        for count in (1, 4)
    ]
    one, four = (np.asarray(x) - q.INIT[0] for x in ends)
    assert np.linalg.norm(one) > 1e-3
    np.testing.assert_allclose(four, 4 * one, rtol=1e-12)


def test_meha_without_convexity() -> None:
    """g = ¼(y² − 1)² + ½κ(y − x)² from y = .1, where it is concave: y ends where ∇_y g vanishes, up to O(1/c)."""
    kappa, smoothing = 0.3, 2.0
    problem = rk.Bilevel(
        lambda x, y, b: 0.5 * ((x - 0.5) ** 2 + (y - b["t"][0]) ** 2),
        lambda x, y, b: 0.25 * (y**2 - 1) ** 2 + 0.5 * b["k"][0] * (y - x) ** 2,
    )
    clients = rk.Clients([{"k": np.array([kappa])}], [{"t": np.array([2.0])}])
    slope = lambda x, y: y * (y**2 - 1) + kappa * (y - x)

    def prox(x: float, y: float) -> float:
        z = y
        for _ in range(50):  # Newton
            z = z - (slope(x, z) + smoothing * (z - y)) / (3 * z**2 - 1 + kappa + smoothing)
        return z

    start, slopes = (np.array(-0.2), np.array(0.1)), []
    assert 3 * 0.1**2 - 1 + kappa < 0
    for c in (20.0, 100.0):
        method = rk.MEHA(upper_step=0.5, multiplier=c, smoothing=smoothing)
        x, y, z = map(float, rk.solve(problem, clients, method, start, 6000).state)
        assert abs(z - prox(x, y)) < 1e-6 * abs(0.1 - prox(-0.2, 0.1))
        slopes.append(abs(slope(x, y)))
    assert slopes[0] < 0.2
    assert slopes[0] / slopes[1] == pytest.approx(5, rel=0.2)
