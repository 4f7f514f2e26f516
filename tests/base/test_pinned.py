"""Arrays in pinned memory: the host and the device see the same rows, of every type."""

import gc
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rookery.base import pinned

NARROW = [jnp.bfloat16, jnp.float8_e4m3fn]


@pytest.mark.parametrize("kind", [np.bool_, np.uint8, np.int16, np.int32, np.float16, np.float32, np.float64, *NARROW])
@pytest.mark.parametrize("width", [1, 3, 4])
def test_rows_of_every_type(kind: Any, width: int) -> None:
    given = (np.arange(5 * width * 2).reshape(5, width, 2) % 7).astype(kind)
    found = pinned.pinned(given)
    rows = jax.jit(lambda words: pinned.unpacked(words[1:3], (2, width, 2), found.dtype))(found.words)
    assert rows.dtype == found.dtype == given.dtype
    np.testing.assert_array_equal(np.asarray(rows), given[1:3])
    np.testing.assert_array_equal(found.array, given)


def test_without_double_precision() -> None:
    with jax.enable_x64(False):
        found = pinned.pinned(np.arange(6.0).reshape(3, 2))
        assert found.dtype == found.array.dtype == np.float32
        np.testing.assert_array_equal(pinned.unpacked(found.words, (3, 2), found.dtype), [[0, 1], [2, 3], [4, 5]])


def test_rows_without_numbers() -> None:
    found = pinned.pinned(np.zeros((3, 0), np.int16))
    assert pinned.unpacked(found.words[:2], (2, 0), found.dtype).shape == (2, 0)


def test_columns_first() -> None:
    given = np.asfortranarray(np.arange(6.0).reshape(3, 2))
    np.testing.assert_array_equal(pinned.pinned(given).array, given)


def test_the_memory_lives_as_long_as_either_view() -> None:
    found = pinned.pinned(np.full((1000, 16), 3, np.int32))
    words, view = found.words, np.asarray(found)[5:7]
    del found
    gc.collect()
    assert words[999].sum() == 48
    assert view.sum() == 96


def test_numbers_of_half_a_byte() -> None:
    with pytest.raises(ValueError, match=r"float4_e2m1fn cannot be pinned \(a number does not take whole bytes\)"):
        pinned.pinned(np.zeros((4, 2), jnp.float4_e2m1fn))
