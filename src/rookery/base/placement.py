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

PLACES = ("device", "host")
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
            'placement must be "device", or "host" for rows that stay in NumPy arrays or a numpy.memmap and travel to '
            f"the device with their cohort; got {placement!r}."
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


def on_host(value: Any) -> bool:
    """Return whether a pytree has arrays that stay on the host."""
    return any(isinstance(leaf, HostArray) for leaf in jax.tree.leaves(value))


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


class Pinned:
    """A copy of all rows in pinned memory, which programs on the device read by themselves.

    Attributes:
        rows: an array of the device, in its eyes. Keep this object until every program that reads it has ended.
    """

    def __init__(self, rows: HostArray) -> None:
        device, array = jax.local_devices()[0], np.asarray(rows)
        sharding = jax.sharding.SingleDeviceSharding(device, memory_kind="pinned_host")
        array = array if array.dtype == rows.dtype else rows[:]
        self._pinned = jax.device_put(np.ascontiguousarray(array), sharding).block_until_ready()
        where = (_ON_CPU if device.platform == "cpu" else _ON_CUDA, device.local_hardware_id or 0)
        kind = _Kind(_CODES[rows.dtype.kind], 8 * rows.dtype.itemsize, 1)
        self._shape = (ctypes.c_int64 * rows.ndim)(*rows.shape)
        self._tensor = _Managed(self._pinned.unsafe_buffer_pointer(), *where, rows.ndim, kind, self._shape)
        self._tensor.deleter = ctypes.cast(ctypes.pythonapi.Py_IsInitialized, ctypes.c_void_p)
        self._where = where
        self.rows = jax.dlpack.from_dlpack(self)
        first, last = (np.asarray(self.rows[i]) for i in (0, -1))
        if not (np.array_equal(first, array[0]) and np.array_equal(last, array[-1])):
            raise ValueError("The device reads other rows than the host.")

    def __dlpack_device__(self) -> tuple[int, int]:
        return self._where

    def __dlpack__(self, **_: Any) -> Any:
        return _capsule(ctypes.addressof(self._tensor), b"dltensor", None)


class _Kind(ctypes.Structure):
    _fields_ = (("code", ctypes.c_uint8), ("bits", ctypes.c_uint8), ("lanes", ctypes.c_uint16))


class _Managed(ctypes.Structure):
    """A tensor in DLPack's form. The reader calls `deleter`, which must be a C function: any that changes nothing."""

    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("kind", _Kind),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.c_void_p),
        ("byte_offset", ctypes.c_uint64),
        ("context", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p),
    )


_CODES = {"i": 0, "u": 1, "f": 2}  # DLPack's names of types, and of devices
_ON_CPU, _ON_CUDA = 1, 2
_capsule = ctypes.pythonapi.PyCapsule_New
_capsule.restype, _capsule.argtypes = ctypes.py_object, (ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)


def pinned(rows: HostArray) -> Pinned | None:
    """Return a copy of the rows in pinned memory; None if this device or version of JAX cannot read it."""
    device = jax.local_devices()[0]
    kinds = {memory.kind for memory in device.addressable_memories()}
    known = rows.dtype.kind in _CODES and rows.row_bytes > 0 and 0 < len(rows) < 2**31
    if device.platform not in ("cpu", "gpu") or "pinned_host" not in kinds or not known:
        return None
    try:
        return Pinned(rows)
    except Exception:  # without it, the rows are collected by threads
        return None


def spread(begins: np.ndarray, sizes: np.ndarray) -> np.ndarray:
    """Return begin, begin + 1, … of each run, as many as its size, end to end."""
    return np.repeat(begins - (np.cumsum(sizes) - sizes), sizes) + np.arange(sizes.sum())


def _threads() -> int:
    return max(1, min(_THREADS, (os.cpu_count() or 1) - 2))  # two cores go on computing


@cache
def _workers() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(_threads(), "rookery-rows")
