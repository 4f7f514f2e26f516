"""Sums of replies that are added one by one, whose result does not depend on their order."""

import itertools
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from rookery.language.primitives import accumulator

_CHUNK = 1 << 15  # numbers that are added at once, so that they stay in a cache
_BITS = 52  # of a double's fraction
_PARTS = 3
_LARGEST = 900  # the exponent beyond which numbers are added as they are


class ExactSum:
    """The weighted sum of arrays of one shape, without rounding before the end.

    Each term, a product in the type of the sum, is cut into three parts on fixed grids, so coarse that doubles add them
    up exactly (as in Demmel and Nguyen, 2015). The grids follow from the largest term of all arrays. Anything below the
    finest grid, which for up to 4,000 arrays is at least 80 bits below that term, is rounded off. Replies with values
    that are not finite, or near the end of a double's range, are added as they are.

    Arguments:
        shape, dtype: the shape and the type of the arrays.
        count: the largest number of arrays.
    """

    def __init__(self, shape: Sequence[int], dtype: Any, count: int) -> None:
        self._shape, self._dtype = tuple(shape), np.dtype(accumulator(dtype))
        self._parts = [np.zeros(math.prod(shape)) for _ in range(_PARTS)]  # the coarsest first
        self._rest: np.ndarray | None = None  # of terms that are not cut
        self._width = _BITS - max(count, 1).bit_length()  # of a part, in bits
        self._level = _PARTS - 1074 // self._width  # terms are at most 2^(level · width)

    def add(self, weight: Any, array: np.ndarray) -> None:
        """Add weight · array."""
        flat, factor = array.reshape(-1), self._dtype.type(weight)
        if not flat.size:
            return
        with np.errstate(all="ignore"):
            largest = float(abs(factor) * max(self._dtype.type(flat.max()), -self._dtype.type(flat.min())))
        exponent = math.frexp(largest)[1] if math.isfinite(largest) else _LARGEST + 1
        if not largest:
            return
        if exponent > _LARGEST:
            self._rest = np.zeros_like(self._parts[0]) if self._rest is None else self._rest
            with np.errstate(all="ignore"):
                self._rest += factor * flat.astype(self._dtype)
            return
        self._rise(-(-exponent // self._width))
        grids = [1.5 * 2.0 ** (_BITS + exponent) for exponent in self._exponents()]
        for begin in range(0, flat.size, _CHUNK):
            here = slice(begin, begin + _CHUNK)
            term = (factor * flat[here].astype(self._dtype)).astype(np.float64)
            rounded = np.empty_like(term)
            for grid, part in zip(grids, self._parts, strict=True):
                np.add(term, grid, out=rounded)
                np.subtract(rounded, grid, out=rounded)  # to a multiple of 2^exponent
                part[here] += rounded
                np.subtract(term, rounded, out=term)

    def _exponents(self) -> list[int]:
        """Return the exponents of the parts' grids."""
        return [(self._level - i) * self._width for i in range(1, _PARTS + 1)]

    def _rise(self, level: int) -> None:
        """Take coarser grids. Terms rounded to the finest of these are the parts that are kept."""
        for _ in range(min(level - self._level, _PARTS)):
            self._parts = [np.zeros_like(self._parts[0]), *self._parts[:-1]]
        self._level = max(level, self._level)

    def result(self) -> np.ndarray:
        """Return the sum."""
        total = np.empty(self._parts[0].size, self._dtype)
        for begin in range(0, total.size, _CHUNK):
            here = slice(begin, begin + _CHUNK)
            parts = [part[here].copy() for part in self._parts]
            for i, exponent in reversed(list(enumerate(self._exponents()[:-1]))):
                carried = np.ldexp(np.floor(np.ldexp(parts[i + 1], -exponent)), exponent)  # so that parts are unique
                parts[i] += carried
                parts[i + 1] -= carried
            high, middle, low = parts
            both = high + middle
            lost = (high - (both - (both - high))) + (middle - (both - high))  # Knuth's exact error of that sum
            with np.errstate(all="ignore"):
                total[here] = both + (lost + low) + (0 if self._rest is None else self._rest[here])
        return total.reshape(self._shape)


class ModularSum:
    """The sum of arrays of unsigned integers modulo 2^k, in one flat array `total`.

    Arguments:
        shapes: the shapes of the arrays of one reply, and their types, which are all the same.
    """

    def __init__(self, shapes: Sequence[Any]) -> None:
        ends = np.cumsum([0, *(math.prod(s.shape) for s in shapes)]).tolist()
        self._shapes, self._places = shapes, [slice(*pair) for pair in itertools.pairwise(ends)]
        self.total = np.zeros(ends[-1], shapes[0].dtype if shapes else np.uint32)

    def add(self, arrays: Sequence[np.ndarray]) -> None:
        """Add a reply."""
        for place, array in zip(self._places, arrays, strict=True):
            self.total[place] += array.reshape(-1)

    def result(self) -> list[np.ndarray]:
        """Return the sums in the form of a reply."""
        return [self.total[place].reshape(s.shape) for place, s in zip(self._places, self._shapes, strict=True)]
