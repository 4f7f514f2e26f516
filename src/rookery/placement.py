"""Rows that stay in the host's memory or in a file: read in parts, never put on a device as a whole."""

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import Any

import jax
import numpy as np

PLACES = ("device", "host")
_THREADS = 16  # at most, which copy rows
_AT_ONCE = 2**26  # bytes that are read together where all rows are looked at
_WORTH = 2**20  # bytes of a copy that is worth a thread of its own


class HostArray:
    """A NumPy array, maybe a file's (`numpy.memmap`), with the type that its rows get in JAX.

    It is no array for JAX: a compiled function that is given it by mistake refuses it.
    """

    def __init__(self, array: np.ndarray) -> None:
        self.array = array.view(np.ndarray)  # the same memory; slices of a memmap itself are slow to make

    @property
    def shape(self) -> tuple[int, ...]:
        """As of the array."""
        return self.array.shape

    @property
    def ndim(self) -> int:
        """As of the array."""
        return self.array.ndim

    @property
    def dtype(self) -> np.dtype[Any]:
        """The type of its rows in JAX."""
        return np.dtype(jax.dtypes.canonicalize_dtype(self.array.dtype.newbyteorder("=")))

    @property
    def row_bytes(self) -> int:
        """Bytes of a row in JAX."""
        return int(np.prod(self.shape[1:], dtype=np.int64)) * self.dtype.itemsize

    def __len__(self) -> int:
        return len(self.array)

    def __getitem__(self, index: Any) -> np.ndarray:
        return self.array[index].astype(self.dtype)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        """The array itself: not a copy, unless another type is asked for."""
        return self.array if dtype is None and not copy else np.array(self.array, dtype)

    def read(self, out: np.ndarray, begin: int) -> None:
        """Copy as many rows as `out` has, from row `begin` on."""
        np.copyto(out, self.array[begin : begin + len(out)], casting="same_kind")

    def pieces(self) -> Iterator[np.ndarray]:
        """All rows, some at a time, in order."""
        step = max(1, _AT_ONCE // max(1, self.row_bytes))
        for begin in range(0, len(self), step):
            yield np.ascontiguousarray(self[begin : begin + step])


def check(placement: Any) -> None:
    """Raise ValueError if there is no such placement."""
    if not isinstance(placement, str) or placement not in PLACES:
        raise ValueError(
            f'placement={placement!r} is not known: give "device", or "host" for rows that stay in NumPy arrays or in '
            "a numpy.memmap, of which only a cohort's travel to the device."
        )


def on_host(value: Any) -> bool:
    """Whether arrays of a pytree stay on the host."""
    return any(isinstance(leaf, HostArray) for leaf in jax.tree.leaves(value))


Copy = tuple[HostArray, np.ndarray, int]  # rows, where they go, and the first of them


def read(copies: Sequence[Copy]) -> None:
    """Many copies, by several threads."""
    total = sum(out.nbytes for _, out, _ in copies)
    groups = min(len(copies), _threads(), max(1, total // _WORTH))
    if groups <= 1:
        _each(copies)
        return
    for _ in _workers().map(_each, _shared(copies, total / groups, lambda copy: copy[1].nbytes)):
        pass


def _each(copies: Iterable[Copy]) -> None:
    for rows, out, begin in copies:
        rows.read(out, begin)


def _shared(items: Sequence[Any], share: float, size: Callable[[Any], int]) -> list[list[Any]]:
    """Items in groups of about the same total size."""
    groups: list[list[Any]] = [[]]
    held = 0
    for item in items:
        if held >= share:
            groups.append([])
            held = 0
        groups[-1].append(item)
        held += size(item)
    return groups


def _threads() -> int:
    return min(_THREADS, os.cpu_count() or 1)


@cache
def _workers() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(_threads(), "rookery-rows")
