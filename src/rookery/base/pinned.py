"""Rows in pinned host memory, which programs on the device read by themselves."""

import ctypes
import weakref
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from rookery.base.placement import HostArray


class PinnedArray(HostArray):
    """A copy of an array in pinned memory. On a CPU, whose programs read all of it, that is ordinary memory.

    Attributes:
        array: the copy as the host sees it. It is read-only.
        words: the same memory as programs on the device see it, as an array of unsigned integers of at most 32 bits
            with a row for each row; `unpacked` gives the rows. The memory exists as long as this array, or a view of
            `array`. Keep one of them until every program that reads the memory has ended.
    """

    placement = "pinned"

    def __init__(self, array: np.ndarray) -> None:
        super().__init__(array)
        self.words, self.array = _pinned(self.array, self.dtype, self.row_bytes)

    def __reduce__(self) -> Any:
        return PinnedArray, (np.array(self.array),)


def pinned(array: np.ndarray) -> PinnedArray:
    """Return a copy of an array in pinned memory; raise ValueError if the device cannot read it there."""
    device = jax.local_devices()[0]
    if device.platform not in ("cpu", "gpu") or "pinned_host" not in {m.kind for m in device.addressable_memories()}:
        raise ValueError(
            f'placement must be "device" or "host" on this device ({device.platform}), whose programs cannot read '
            'pinned memory; got "pinned".'
        )
    try:
        return PinnedArray(array)
    except Exception as error:
        if "RESOURCE_EXHAUSTED" in str(error):
            raise ValueError(
                'placement must be "host" for rows that do not fit into pinned memory, of which JAX takes at most 64 GB'
                f' unless XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB is set; got "pinned", and {array.nbytes / 1e9:.1f} GB.'
            ) from error
        reason = str(error).partition("\n")[0]
        raise ValueError(
            f'placement must be "device" or "host" here, where rows of {array.dtype} cannot be pinned ({reason}); got '
            '"pinned".'
        ) from error


def unpacked(words: Array, shape: tuple[int, ...], dtype: Any) -> Array:
    """Return the rows that these words hold, in this shape and type."""
    if not words.size:
        return jnp.zeros(shape, dtype)
    truth = np.dtype(dtype).kind == "b"
    kind = np.dtype(np.uint8 if truth else dtype)
    wide, narrow = max(words.dtype.itemsize, kind.itemsize), min(words.dtype.itemsize, kind.itemsize)
    if kind.itemsize == wide > narrow:
        words = words.reshape(len(words), -1, wide // narrow)
    rows = jax.lax.bitcast_convert_type(words, kind).reshape(shape)
    return rows != 0 if truth else rows


def _pinned(array: np.ndarray, dtype: np.dtype[Any], row_bytes: int) -> tuple[Any, np.ndarray]:
    """The words and the host's view of a copy of these rows, in this type, in pinned memory."""
    word = np.dtype(next(f"uint{8 * size}" for size in (4, 2, 1) if row_bytes % size == 0))
    if _bits(dtype) != 8 * dtype.itemsize:
        raise TypeError("a number does not take whole bytes")
    if not array.size:
        return jnp.zeros((len(array), 0), word), array.astype(dtype)
    rows = np.ascontiguousarray(array, dtype).reshape(len(array), -1).view(word)
    device = jax.local_devices()[0]
    if device.platform == "cpu" and np.shares_memory(rows, array):
        rows = rows.copy()  # JAX may use it in place
    sharding = jax.sharding.SingleDeviceSharding(device, memory_kind="pinned_host")
    kept = jax.device_put(rows, sharding).block_until_ready()
    memory: Any = (ctypes.c_ubyte * rows.nbytes).from_address(kept.unsafe_buffer_pointer())
    memory.kept = kept  # as long as the memory, or a view of it, exists
    on_host = np.frombuffer(memory, np.uint8).view(dtype).reshape(array.shape)
    on_host.flags.writeable = False
    words = jax.dlpack.from_dlpack(_Tensor(kept, word))
    weakref.finalize(words, lambda _: None, kept).atexit = False  # the memory exists as long as this array
    for i in (0, -1):
        if not (np.array_equal(words[i], rows[i]) and np.array_equal(on_host[i].reshape(-1).view(word), rows[i])):
            raise ValueError("the device reads other rows than the host")
    return words, on_host


def _bits(dtype: np.dtype[Any]) -> int:
    """The bits of a number of this type in JAX."""
    if dtype.kind == "b":
        return 8
    return int((jnp.finfo if jnp.issubdtype(dtype, jnp.floating) else jnp.iinfo)(dtype).bits)


class _Tensor:
    """A matrix in pinned memory, offered by DLPack as one that is on the device."""

    def __init__(self, kept: Any, word: np.dtype[Any]) -> None:
        device = jax.local_devices()[0]
        self._where = (_ON_CPU if device.platform == "cpu" else _ON_CUDA, device.local_hardware_id or 0)
        shape = (ctypes.c_int64 * 2)(*kept.shape)
        kind = _Kind(_UNSIGNED, 8 * word.itemsize, 1)
        self._tensor = _Managed(kept.unsafe_buffer_pointer(), *self._where, 2, kind, shape)
        self._tensor.deleter = ctypes.cast(ctypes.pythonapi.Py_IsInitialized, ctypes.c_void_p)
        _OFFERED.append((self._tensor, shape))

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


_OFFERED: list[Any] = []  # about 100 bytes each, which their reader may look at when it ends
_UNSIGNED, _ON_CPU, _ON_CUDA = 1, 1, 2  # DLPack's names of types and of devices
_capsule = ctypes.pythonapi.PyCapsule_New
_capsule.restype, _capsule.argtypes = ctypes.py_object, (ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)
