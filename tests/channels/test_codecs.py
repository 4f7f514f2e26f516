"""Each codec against NumPy: what is kept, what is packed, what is unbiased, and what is never larger than its input."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rookery.channels import codecs
from rookery.channels.codecs import LowRank, Quantize, RandomK, TopK

RNG = np.random.default_rng(5)
KEY = jax.random.key(3)
VECTOR = RNG.normal(size=37) * np.exp(RNG.normal(size=37))
MATRIX = RNG.normal(size=(12, 9))
ALL = [TopK(0.2, None), RandomK(0.2, None), Quantize(8), Quantize(4), Quantize(1), LowRank(2)]


def there_and_back(codec: Any, array: Any, unbiased: bool, key: Any = KEY) -> Any:
    array = jnp.asarray(array)
    return codecs.unpacked(codec, codecs.packed(codec, array, key, unbiased), array, unbiased)


@pytest.mark.parametrize("size", [1, 7, 8, 9, 64])
def test_bits_are_packed_as_numpy_packs_them(size: int) -> None:
    bits = RNG.integers(0, 2, size)
    packed = np.asarray(codecs.bits_packed(jnp.asarray(bits), 1))
    np.testing.assert_array_equal(packed, np.packbits(bits.astype(np.uint8), bitorder="little"))
    halves = RNG.integers(0, 16, size)
    packed = np.asarray(codecs.bits_packed(jnp.asarray(halves), 4))
    padded = np.append(halves, [0] * (size % 2))
    np.testing.assert_array_equal(packed, padded[::2] + 16 * padded[1::2])
    for numbers, width in ((bits, 1), (halves, 4), (RNG.integers(0, 256, size), 8)):
        back = codecs.bits_unpacked(codecs.bits_packed(jnp.asarray(numbers), width), width, size)
        np.testing.assert_array_equal(back, numbers)


def test_top_k_keeps_the_largest() -> None:
    _, places = codecs.packed(TopK(0.2, None), jnp.asarray(VECTOR), KEY, False)
    order = np.argsort(-np.abs(VECTOR))[:8]  # ⌈0.2 · 37⌉
    np.testing.assert_array_equal(np.sort(places), np.sort(order))
    assert places.dtype == np.uint8
    expected = np.zeros(37)
    expected[order] = VECTOR[order]
    np.testing.assert_array_equal(there_and_back(TopK(0.2, None), VECTOR, False), expected)


@pytest.mark.parametrize(("size", "kind"), [(256, "uint8"), (257, "uint16"), (65536, "uint16"), (65537, "uint32")])
def test_places_take_as_few_bytes_as_they_can(size: int, kind: str) -> None:
    array = np.zeros(size)
    array[-1] = 2.0  # the last place must fit
    packed = codecs.packed(TopK(None, 1), jnp.asarray(array), KEY, False)
    assert packed[1].dtype == kind
    np.testing.assert_array_equal(there_and_back(TopK(None, 1), array, False), array)


@pytest.mark.parametrize(("size", "k"), [(37, 8), (40, 8), (9, 9), (5, 1)])
def test_random_places_are_one_of_each_stretch(size: int, k: int) -> None:
    """Every entry of a stretch as often as any other, whatever the stretch's length."""
    draws = 4000
    places, lengths = jax.vmap(lambda seed: codecs.stretches(seed, size, k))(jnp.arange(draws, dtype=jnp.uint32))
    edges = np.concatenate([[0], np.cumsum(lengths[0])])
    assert edges[-1] == size
    assert np.ptp(lengths[0]) <= 1
    assert np.all((places >= edges[:-1]) & (places < edges[1:]))
    counts = np.bincount(np.asarray(places).ravel(), minlength=size)
    expected = np.repeat(draws / np.asarray(lengths[0]), np.asarray(lengths[0]))
    assert np.all(np.abs(counts - expected) <= 5 * np.sqrt(expected))


def test_random_k_sends_the_entries_of_its_seed() -> None:
    for unbiased in (True, False):
        values, seed = codecs.packed(RandomK(0.2, None), jnp.asarray(VECTOR), KEY, unbiased)
        places, lengths = codecs.stretches(seed, 37, 8)
        assert seed.dtype == np.uint32
        scaled = VECTOR[places] * (lengths if unbiased else 1)
        np.testing.assert_allclose(values, scaled, rtol=1e-15)
        expected = np.zeros(37)
        expected[places] = scaled
        np.testing.assert_allclose(there_and_back(RandomK(0.2, None), VECTOR, unbiased), expected, rtol=1e-15)


@pytest.mark.parametrize(("bits", "half"), [(8, 127), (4, 7)])
def test_the_levels_of_a_quantised_number(bits: int, half: int) -> None:
    scale = np.max(np.abs(VECTOR))
    nearest = np.round(VECTOR / scale * half) / half * scale
    np.testing.assert_allclose(there_and_back(Quantize(bits), VECTOR, False), nearest, rtol=1e-12, atol=1e-15)
    either = np.asarray(there_and_back(Quantize(bits), VECTOR, True)) / scale * half
    np.testing.assert_allclose(either, np.round(either), atol=1e-9)
    assert np.all(np.abs(either - VECTOR / scale * half) < 1)
    assert there_and_back(Quantize(bits), np.array([0.0, 0.0, 3.0, -1.0, 0.0, 0.0]), True)[0] == 0  # zero is a level


def test_one_bit() -> None:
    """At random it is one of the two ends; to the nearest, the sign times the mean absolute value."""
    assert set(np.abs(np.asarray(there_and_back(Quantize(1), VECTOR, True)))) == {np.max(np.abs(VECTOR))}
    signs = np.sign(VECTOR) * np.mean(np.abs(VECTOR))
    np.testing.assert_allclose(there_and_back(Quantize(1), VECTOR, False), signs, rtol=1e-12)


@pytest.mark.parametrize("codec", [RandomK(0.2, None), Quantize(8), Quantize(4), Quantize(1)], ids=str)
def test_what_is_unbiased_by_its_error_bars(codec: Any) -> None:
    n = 4000
    drawn = np.asarray(jax.vmap(lambda key: there_and_back(codec, VECTOR, True, key))(jax.random.split(KEY, n)))
    bars = np.std(drawn, axis=0) / np.sqrt(n)
    assert np.all(np.abs(drawn.mean(axis=0) - VECTOR) <= 4.5 * bars + 1e-7 * np.max(np.abs(VECTOR)))
    assert np.any(bars > 0)


@pytest.mark.parametrize("codec", ALL, ids=str)
def test_with_feedback_the_error_is_smaller_than_what_is_sent(codec: Any) -> None:
    for scale in (1.0, 1e-30, 1e30):
        for value in (MATRIX * scale, np.sign(MATRIX) * scale, np.eye(12)[:, :9] * scale, np.zeros((12, 9))):
            error = np.linalg.norm(value - np.asarray(there_and_back(codec, value, False)))
            assert error <= np.linalg.norm(value) * (1 + 1e-12)
            assert error < np.linalg.norm(value) or isinstance(codec, RandomK) or not value.any()


def test_low_rank_is_a_projection_onto_the_main_directions() -> None:
    exact = RNG.normal(size=(12, 2)) @ RNG.normal(size=(2, 9))
    np.testing.assert_allclose(there_and_back(LowRank(2), exact, False), exact, atol=1e-10)
    cube = exact.reshape(12, 3, 3)
    np.testing.assert_allclose(there_and_back(LowRank(2), cube, False), cube, atol=1e-10)
    noisy = exact + 0.01 * MATRIX
    best = np.sqrt(np.sum(np.linalg.svd(noisy)[1][2:] ** 2))
    assert best <= np.linalg.norm(noisy - np.asarray(there_and_back(LowRank(2), noisy, False))) <= 1.01 * best
    basis, factor = codecs.packed(LowRank(2), jnp.asarray(noisy), KEY, False)
    np.testing.assert_allclose(basis.T @ basis, np.eye(2), atol=1e-12)
    np.testing.assert_allclose(factor, noisy.T @ basis, atol=1e-12)


@pytest.mark.parametrize("dtype", ["float64", "float32", "bfloat16", "float16"])
@pytest.mark.parametrize("codec", ALL, ids=str)
def test_every_type_comes_back(codec: Any, dtype: str) -> None:
    array = jnp.asarray(MATRIX, dtype)
    back = there_and_back(codec, array, False)
    assert (back.shape, back.dtype) == (array.shape, array.dtype)
    assert np.all(np.isfinite(np.asarray(back, np.float64)))
    error = np.linalg.norm(np.asarray(back, np.float64) - np.asarray(array, np.float64))
    assert error < 1.001 * np.linalg.norm(MATRIX)


def test_what_would_not_get_smaller_is_sent_as_it_is() -> None:
    for codec in ALL:
        for array in (np.zeros(()), np.ones((1,)), np.zeros((0, 3))):
            assert not codecs.is_packed(codec, array.shape, array.dtype)
            np.testing.assert_array_equal(there_and_back(codec, array, True), array)
    assert not codecs.is_packed(LowRank(2), (3, 3), np.dtype(np.float32))  # 12 numbers instead of 9
    assert not codecs.is_packed(LowRank(1), (50,), np.dtype(np.float32))


def test_what_a_liar_sends_is_finite() -> None:
    """Places beyond the array are left out, and products that overflow count as zero."""
    like = jax.ShapeDtypeStruct((300,), jnp.float32)
    sent = jnp.array([2.0, 3.0, 4.0], jnp.float32), jnp.array([299, 300, 65535], jnp.uint16)
    back = np.asarray(codecs.unpacked(TopK(None, 3), sent, like, False))
    assert back[299] == 2
    assert np.count_nonzero(back) == 1
    like = jax.ShapeDtypeStruct((9, 9), jnp.float32)
    huge = jnp.full((9, 1), 1e38, jnp.float32), jnp.full((9, 1), 1e38, jnp.float32)
    assert not np.any(codecs.unpacked(LowRank(1), huge, like, False))
