"""F2SA and its relatives against NumPy transcriptions, and their limits on quadratics against linear systems."""

import dataclasses
from collections.abc import Iterator
from typing import Any

import fields
import jax.numpy as jnp
import numpy as np
import pytest
import quadratics as q
from fields import TASK, M, Point, Vector, flat

import rookery as rk

ALPHA, GAMMA, AUXILIARY, LAMBDA = 0.02, 0.1, 0.15, 5.0


# The fields, written from the papers, and the hyperparameters by their letters.


def f2sa(o: Any, w: Point) -> Point:
    x, y, z = w
    d_x = o.f_x(x, y) + LAMBDA * (o.g_x(x, y) - o.g_x(x, z))
    return d_x, o.f_y(x, y) / LAMBDA + o.g_y(x, y), o.g_y(x, z)


GIVEN: dict[str, Any] = {"upper_step": ALPHA, "lower_step": GAMMA, "multiplier": LAMBDA}
METHODS: dict[str, Any] = {
    "F2SA": (rk.F2SA(**GIVEN, auxiliary_step=AUXILIARY), f2sa, (ALPHA, GAMMA, AUXILIARY)),
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


@pytest.mark.parametrize(("name", "control", "lower_rounds"), [("F2SA", "none", None), ("F2SA", "anchor", 2)])
def test_equals_the_transcription(name: str, control: Any, lower_rounds: int | None) -> None:
    """Unlike clients, unequal weights, three clients of five, and several local steps."""
    method, field, steps = METHODS[name]
    given = {"control": control, "local_steps": fields.LOCAL_STEPS}
    given |= {} if lower_rounds is None else {"lower_rounds": lower_rounds}
    got = fields.library(dataclasses.replace(method, **given))
    q.assert_same(got, list(rounds(field, steps, control == "anchor", lower_rounds)))


# Limits.

STEPS: dict[str, Any] = {"upper_step": 0.1, "lower_step": 0.15, "multiplier": LAMBDA}


def penalised(lam: float) -> Vector:
    """x, y and z with z = y*(x), y the minimiser of f + λg, and the envelope theorem's gradient of x zero."""
    zero, n = np.zeros_like(M.A), len(M.d)
    matrix = np.block(
        [
            [M.D, M.E - lam * M.B.T, lam * M.B.T],
            [M.E.T - lam * M.B, M.C + lam * M.A, zero],
            [-M.B, zero, M.A],
        ]
    )
    assert matrix.shape[0] == n + 2 * len(M.b)
    return np.linalg.solve(matrix, np.concatenate([M.d, M.c + lam * M.b, M.b]))


def test_the_limit_of_f2sa_is_off_by_a_constant_over_the_multiplier() -> None:
    """Three local steps with an anchor end where one step does."""
    method = rk.F2SA(**STEPS, auxiliary_step=0.15, control="anchor", local_steps=3)
    np.testing.assert_allclose(flat(fields.limit(method, 600)), penalised(LAMBDA), rtol=0, atol=1e-10)
    bias = [lam * np.linalg.norm(penalised(lam)[:3] - M.x) for lam in (100, 1000, 10000)]
    np.testing.assert_allclose(bias, bias[-1], rtol=0.02)
    assert bias[-1] > 1e-2


def test_the_limit_without_an_anchor() -> None:
    """Three local steps of unlike clients drift, by as much as the local maps say."""
    method = rk.F2SA(**STEPS, auxiliary_step=0.15, local_steps=3)
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
