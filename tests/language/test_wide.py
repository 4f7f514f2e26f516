"""Counts of 64 bits as pairs of 32."""

import jax
import numpy as np

from rookery.language import ledger


def test_a_row_of_known_and_traced_counts_keeps_every_digit():
    row = jax.jit(lambda n: ledger.wide_row([5, 2**33 + 7, n, 2**31]))(3)
    assert [int(low) + 2**32 * int(high) for low, high in np.asarray(row).T] == [5, 2**33 + 7, 3, 2**31]
