"""Rows kept in host memory or in a file and transferred piece by piece."""

import ctypes
import itertools
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import Any

import jax
import numpy as np

PLACES = ("device", "host", "pinned")
_THREADS = 4  # at most, to copy rows: one thread reads a third of what four do, and more are not faster
_PIECE = 2**26  # bytes that `pieces` reads together
_SHARE = 2**20  # bytes of a copy that are worth a thread of their own


def duplicate(a: jax.Array) -> jax.Array:
    """Return a copy on the same devices. JAX's own `copy` is compiled for each shape."""
    return jax.device_put(a, may_alias=False) if a.is_fully_addressable else a.copy()


class HostArray:
    """A NumPy array, possibly a file's (`numpy.memmap`), with the type that its rows get in JAX.

    JAX does not take it for an array: a compiled function that receives one by mistake refuses it.
    """

    placement = "host"

    def __init__(self, array: np.ndarray) -> None:
        self.array = array.view(np.ndarray)  # the same memory; slices of a memmap itself are slow to make
        # The type is fixed here, under the jax_enable_x64 that clients are made with.
        self.dtype = np.dtype(jax.dtypes.canonicalize_dtype(self.array.dtype.newbyteorder("=")))
        self.shape, self.ndim = self.array.shape, self.array.ndim
        self.row_bytes = int(np.prod(self.shape[1:], dtype=np.int64)) * self.dtype.itemsize  # in JAX

    def __len__(self) -> int:
        return len(self.array)

    def __getitem__(self, index: Any) -> np.ndarray:
        return self.array[index].astype(self.dtype)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        """Return the array itself, and a copy only if one or another type is requested."""
        return self.array if dtype is None and not copy else np.array(self.array, dtype)

    def read(self, begins: np.ndarray, sizes: np.ndarray, out: np.ndarray) -> None:
        """Copy runs of rows, with these beginnings and lengths, end to end; uses several threads."""
        groups = max(1, min(_threads(), out.nbytes // _SHARE, len(begins)))
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
        array, size = self.array, int(sizes[0])
        if size and array.flags.c_contiguous and np.all(sizes == size) and not np.any(begins % size):
            array = array[: len(array) // size * size].reshape(-1, size, *array.shape[1:])  # each run is a row
            rows, out = begins // size, out[: size * len(begins)].reshape(-1, *array.shape[1:])
        else:
            rows = spread(begins, sizes)
        if array.dtype == out.dtype and array.flags.c_contiguous and array.flags.aligned:
            np.take(array, rows, axis=0, out=out[: len(rows)], mode="clip")  # releases the GIL, makes no other copy
        else:
            np.copyto(out[: len(rows)], array[rows], casting="same_kind")

    def pieces(self) -> Iterator[np.ndarray]:
        """Yield all rows in order, some at a time."""
        step = max(1, _PIECE // max(1, self.row_bytes))
        for begin in range(0, len(self), step):
            yield np.ascontiguousarray(self[begin : begin + step])


def check(placement: Any) -> None:
    """Raise ValueError unless the placement is known."""
    if not isinstance(placement, str) or placement not in PLACES:
        raise ValueError(
            'placement must be "device", "host" for rows that stay in NumPy arrays or a numpy.memmap and travel to the '
            'device with their cohort, or "pinned" for a copy in pinned memory that the device reads by itself; got '
            f"{placement!r}."
        )


def check_types(value: Any) -> None:
    """Raise TypeError if rows are wider than JAX's numbers are now."""
    for leaf in jax.tree.leaves(value):
        if jax.dtypes.canonicalize_dtype(leaf.dtype) != leaf.dtype:
            where = " on the host" if isinstance(leaf, HostArray) else ""
            raise TypeError(
                f"The clients hold {leaf.dtype}{where}: they were made with jax_enable_x64, and this run is without it."
                " Make the clients without it, too, or set it for the run."
            )


def of(value: Any) -> str:
    """Return where the arrays of a pytree are: one of `PLACES`."""
    return next((leaf.placement for leaf in jax.tree.leaves(value) if isinstance(leaf, HostArray)), "device")


def on_host(value: Any) -> bool:
    """Return whether a pytree has arrays that stay on the host, pinned or not."""
    return of(value) != "device"


class Buffer:
    """Numbers that are written on the host and sent to the device.

    If the device supports it, they are in pinned memory, from which the device copies by itself. Do not change them
    until they have arrived.
    """

    def __init__(self, length: int, dtype: Any) -> None:
        device, self.array, self._pinned = jax.local_devices()[0], np.zeros(length, dtype), None
        if device.platform == "cpu" or "pinned_host" not in {memory.kind for memory in device.addressable_memories()}:
            return
        sharding, self._device = (
            jax.sharding.SingleDeviceSharding(device, memory_kind=kind) for kind in ("pinned_host", None)
        )
        pinned = jax.device_put(self.array, sharding).block_until_ready()
        if pinned.on_device_size_in_bytes() < self.array.nbytes:  # several numbers in a byte
            return
        memory: Any = (ctypes.c_ubyte * self.array.nbytes).from_address(pinned.unsafe_buffer_pointer())
        self.array, self._pinned = np.frombuffer(memory, np.uint8).view(dtype), pinned

    def sent(self) -> Any:
        """Send the numbers, and return them for a program on the device."""
        return self.array if self._pinned is None else jax.device_put(self._pinned, self._device)


def spread(begins: np.ndarray, sizes: np.ndarray) -> np.ndarray:
    """Return begin, begin + 1, … of each run, as many as its size, end to end."""
    return np.repeat(begins - (np.cumsum(sizes) - sizes), sizes) + np.arange(sizes.sum())


def _threads() -> int:
    return max(1, min(_THREADS, (os.cpu_count() or 1) - 2))  # two cores go on computing


@cache
def _workers() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(_threads(), "rookery-rows")
