"""Rows that stay in the host's memory or in a file: read in parts, never put on a device as a whole."""

import ctypes
import itertools
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import Any

import jax
import numpy as np

PLACES = ("device", "host")
_THREADS = 4  # at most, which copy rows: one alone reads a third of what they do, and more no faster
_AT_ONCE = 2**26  # bytes that are read together where all rows are looked at
_WORTH = 2**20  # bytes of a copy that is worth a thread of its own


class HostArray:
    """A NumPy array, maybe a file's (`numpy.memmap`), with the type that its rows get in JAX.

    It is no array for JAX: a compiled function that is given it by mistake refuses it.
    """

    def __init__(self, array: np.ndarray) -> None:
        self.array = array.view(np.ndarray)  # the same memory; slices of a memmap itself are slow to make
        # The type of its rows in JAX, as it is set when clients are made.
        self.dtype = np.dtype(jax.dtypes.canonicalize_dtype(self.array.dtype.newbyteorder("=")))

    @property
    def shape(self) -> tuple[int, ...]:
        """As of the array."""
        return self.array.shape

    @property
    def ndim(self) -> int:
        """As of the array."""
        return self.array.ndim

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

    def read(self, begins: np.ndarray, sizes: np.ndarray, out: np.ndarray) -> None:
        """Copy runs of rows, which begin here and are so long, end to end; by several threads."""
        groups = max(1, min(_threads(), out.nbytes // _WORTH, len(begins)))
        ends = np.cumsum(sizes)
        cuts = np.searchsorted(ends, ends[-1] * np.arange(groups + 1) // groups) if groups > 1 else [0, len(begins)]
        cuts[-1] = len(begins)
        parts = [slice(*cut) for cut in itertools.pairwise(cuts)]
        first = lambda part: ends[part.start] - sizes[part.start]
        work = [(begins[part], sizes[part], out[first(part) :]) for part in parts if part.start < part.stop]
        if len(work) == 1:
            self._copy(*work[0])
            return
        for _ in _workers().map(lambda part: self._copy(*part), work):
            pass

    def _copy(self, begins: np.ndarray, sizes: np.ndarray, out: np.ndarray) -> None:
        own, size = self.array, int(sizes[0])
        if size and own.flags.c_contiguous and np.all(sizes == size) and not np.any(begins % size):
            own = own[: len(own) // size * size].reshape(-1, size, *own.shape[1:])  # each run a row
            rows, out = begins // size, out[: size * len(begins)].reshape(-1, *own.shape[1:])
        else:
            rows = spread(begins, sizes)
        if own.dtype == out.dtype and own.flags.c_contiguous and own.flags.aligned:
            np.take(own, rows, axis=0, out=out[: len(rows)], mode="clip")  # other threads go on; nothing else is copied
        else:
            np.copyto(out[: len(rows)], own[rows], casting="same_kind")

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


def check_types(value: Any) -> None:
    """Raise TypeError where rows are wider than JAX has numbers now."""
    for leaf in jax.tree.leaves(value):
        if jax.dtypes.canonicalize_dtype(leaf.dtype) != leaf.dtype:
            where = " on the host" if isinstance(leaf, HostArray) else ""
            raise TypeError(
                f"The clients hold {leaf.dtype}{where}: they were made with jax_enable_x64, and this run is without it."
                " Make the clients without it, too, or set it for the run."
            )


def on_host(value: Any) -> bool:
    """Whether arrays of a pytree stay on the host."""
    return any(isinstance(leaf, HostArray) for leaf in jax.tree.leaves(value))


class Buffer:
    """Numbers that are written here and sent to the device.

    They are in memory from which the device copies by itself (pinned), where it knows such memory. They must stay as
    they are until they have arrived.
    """

    def __init__(self, length: int, dtype: Any) -> None:
        device, self.array, self._held = jax.local_devices()[0], np.zeros(length, dtype), None
        if device.platform == "cpu" or "pinned_host" not in {each.kind for each in device.addressable_memories()}:
            return
        pinned, self._device = (
            jax.sharding.SingleDeviceSharding(device, memory_kind=kind) for kind in ("pinned_host", None)
        )
        held = jax.device_put(self.array, pinned).block_until_ready()
        if held.on_device_size_in_bytes() < self.array.nbytes:  # several numbers in a byte
            return
        memory: Any = (ctypes.c_ubyte * self.array.nbytes).from_address(held.unsafe_buffer_pointer())
        self.array, self._held = np.frombuffer(memory, np.uint8).view(dtype), held

    def sent(self) -> Any:
        """The numbers for a program on the device, on their way there."""
        return self.array if self._held is None else jax.device_put(self._held, self._device)


def spread(begins: np.ndarray, sizes: np.ndarray) -> np.ndarray:
    """begin, begin + 1, … of each, as many as its size, end to end."""
    return np.repeat(begins - (np.cumsum(sizes) - sizes), sizes) + np.arange(sizes.sum())


def _threads() -> int:
    return max(1, min(_THREADS, (os.cpu_count() or 1) - 2))  # two go on computing


@cache
def _workers() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(_threads(), "rookery-rows")
