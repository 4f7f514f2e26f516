"""What every projection does: its result is the set's nearest point, for ties and for numbers of any magnitude."""

import math
from fractions import Fraction

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from rookery.parts import projection

FIXED = settings(deadline=None, derandomize=True, max_examples=15)
MORE = settings(FIXED, max_examples=100)
BALL, SIMPLEX = jax.jit(projection.ball), jax.jit(projection.simplex)
CAPPED = jax.jit(projection.capped_simplex, static_argnums=1)
SIZES = [1, 2, 5, 40]  # JAX compiles for every size: a few stand for all


@st.composite
def points(draw: st.DrawFn) -> np.ndarray:
    """A vector in float32 or float64, perhaps with ties, offset or with numbers of different magnitudes."""
    dtype, low, high = draw(st.sampled_from([(np.float32, -30, 37), (np.float64, -300, 307)]))
    magnitudes = (st.integers(-2, 2) | st.integers(low, high)).map(lambda exponent: 10.0**exponent)
    numbers = st.floats(-1, 1).map(lambda x: x if abs(x) > 1e-3 else 0.0)
    products = st.builds(float.__mul__, numbers, magnitudes)
    close = st.builds(lambda x, scale: [scale * a for a in x], st.lists(numbers, min_size=1, max_size=40), magnitudes)
    values = np.array(draw(close | st.lists(products, min_size=1, max_size=5))) + draw(st.just(0.0) | products)
    size = draw(st.sampled_from(SIZES))
    rng = np.random.default_rng(draw(st.integers(0, 100)))
    return rng.permutation(np.resize(values, size)).astype(dtype)


def caps(size: int) -> st.SearchStrategy[float]:
    """From the smallest cap that leaves a point in the set to more than 1."""
    return st.sampled_from([1 / size, 1.0, 3.0]) | st.floats(1 / size, 3 / size) | st.floats(1 / size, 1.5)


def ball(v: np.ndarray, radius: float) -> np.ndarray:
    """The projection of a tree of two leaves, the second of which may be empty."""
    w = BALL({"first": jnp.asarray(v[:1]), "rest": jnp.asarray(v[1:])}, radius)
    return np.concatenate([w["first"], w["rest"]])


def capped(v: np.ndarray, cap: float | None) -> np.ndarray:
    """The projection onto the capped simplex; without a cap, onto the simplex."""
    return np.asarray(SIMPLEX(jnp.asarray(v)) if cap is None else CAPPED(jnp.asarray(v), cap))


def exact(v: np.ndarray, cap: float | None) -> np.ndarray:
    """Independent: clip(v − λ, 0, cap) in rational numbers, with λ between the two kinks that enclose it."""
    high = max(Fraction(1 if cap is None else cap), Fraction(1, len(v)))
    u = [Fraction(float(a)) for a in v]
    total = lambda level: sum(min(max(a - level, Fraction(0)), high) for a in u)
    kinks = sorted({*u, *(a - high for a in u)})
    low, end = 0, len(kinks) - 1  # total(kinks[low]) ≥ 1 > total(kinks[end])
    while end - low > 1:
        middle = (low + end) // 2
        low, end = (middle, end) if total(kinks[middle]) >= 1 else (low, middle)
    start, stop = total(kinks[low]), total(kinks[end])
    level = kinks[low] + (start - 1) / (start - stop) * (kinks[end] - kinks[low])
    return np.array([float(min(max(a - level, Fraction(0)), high)) for a in u])


def assert_nearest(v: np.ndarray, w: np.ndarray, furthest: np.ndarray, rounding: float) -> None:
    """⟨v − w, z − w⟩ ≤ 0 for all z of the set, if for the z that is furthest in the direction v − w."""
    normal, edge = v.astype(float) - w, furthest - w.astype(float)
    largest = max(np.abs(v).max(), np.abs(w).max()), max(np.abs(furthest).max(), np.abs(w).max())
    assert (normal / largest[0]) @ (edge / largest[1]) <= len(v) * rounding


simplices = points().flatmap(lambda v: st.tuples(st.just(v), st.none() | caps(len(v))))


@settings(FIXED, max_examples=8)
@given(simplices)
@example((np.array([0, -1e30, -1e30, -1e30, -1e30]), 0.4))
@example((np.array([0, -3e38, -3e38, -3e38, -3e38], np.float32), None))
def test_simplex(case: tuple[np.ndarray, float | None]) -> None:
    v, cap = case
    w, high, rounding = capped(v, cap), 1 if cap is None else cap, 4 * len(v) * float(np.finfo(v.dtype).eps)
    assert w.dtype == v.dtype
    assert w.min() >= 0
    assert w.max() <= high + rounding
    assert abs(w.astype(float).sum() - 1) <= rounding
    np.testing.assert_allclose(w, exact(v, cap), rtol=0, atol=rounding)
    np.testing.assert_allclose(capped(w, cap), w, rtol=0, atol=rounding)
    order = np.random.default_rng(len(v)).permutation(len(v))
    np.testing.assert_allclose(capped(v[order], cap), w[order], rtol=0, atol=rounding)
    centred = v.astype(float) - v.max()  # a constant does not matter, since all points of the set have the same sum
    furthest, left = np.zeros(len(v)), 1.0
    for k in np.argsort(w - centred):
        furthest[k] = min(high, left)
        left -= furthest[k]
    assert_nearest(centred, w, furthest, rounding)


@pytest.mark.slow
@MORE
@given(simplices)
def test_more_points_of_the_simplex(case: tuple[np.ndarray, float | None]) -> None:
    test_simplex.hypothesis.inner_test(case)


radii = st.integers(-30, 30).map(lambda exponent: 10.0**exponent) | st.floats(0.01, 100)


@FIXED
@given(points(), radii)
def test_ball(v: np.ndarray, radius: float) -> None:
    w, norm = ball(v, radius), math.hypot(*v.tolist())
    rounding = 4 * len(v) * float(np.finfo(v.dtype).eps)
    assert w.dtype == v.dtype
    assert math.hypot(*w.tolist()) <= radius * (1 + rounding)
    if norm <= radius * (1 - rounding):
        np.testing.assert_array_equal(w, v)
    else:
        expected = [float(Fraction(a) * Fraction(radius) / Fraction(norm)) for a in v.tolist()]
        np.testing.assert_allclose(w, expected, rtol=rounding, atol=1e-37 * max(1, radius))
    np.testing.assert_allclose(ball(w, radius), w, rtol=rounding, atol=1e-37 * max(1, radius))
    order = np.random.default_rng(len(v)).permutation(len(v))
    np.testing.assert_allclose(ball(v[order], radius), w[order], rtol=rounding, atol=1e-37 * max(1, radius))
    normal = v.astype(float) - w
    length = math.hypot(*normal.tolist())
    if length > 0:
        assert_nearest(v, w, radius * (normal / length), rounding)


@pytest.mark.slow
@MORE
@given(points(), radii)
def test_more_points_of_the_ball(v: np.ndarray, radius: float) -> None:
    test_ball.hypothesis.inner_test(v, radius)


def test_a_ball_of_radius_zero() -> None:
    for v in (np.zeros(3), np.ones(3)):
        np.testing.assert_array_equal(ball(v, 0.0), np.zeros(3))


def test_what_is_not_finite_stays_visible() -> None:
    for wrong in (np.nan, np.inf, -np.inf):
        v = np.array([wrong, 0, 1, 2, 3])
        assert np.isnan(ball(v, 1.0)[0])
        assert np.isnan(capped(v, 0.4)[0])
        assert np.isnan(capped(v, None)[0]) or wrong == -np.inf  # whose weight is 0
