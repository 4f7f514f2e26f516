"""Messages as bytes: a JSON header and the arrays' own bytes behind it. No code and no pickle."""

import json
import math
import struct
import sys
from typing import Any

import jax.numpy as jnp
import numpy as np

_INTEGERS = [f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)]
_TYPES: dict[str, Any] = {
    np.dtype(t).name: np.dtype(t) for t in ("bool", *_INTEGERS, "float16", jnp.bfloat16, "float32", "float64")
}


_LITTLE = sys.byteorder == "little"
_NAMES = {dtype: name for name, dtype in _TYPES.items()}


class WireError(ValueError):
    """Bytes that are not a message, or values that can't be sent in one."""


def encode(header: dict[str, Any], arrays: list[Any]) -> bytes:
    """The message: the header's length in 4 bytes, the header with the arrays' types and shapes, the arrays in C order.

    All numbers are little-endian. The header is JSON without NaN and infinity; its key "arrays" is taken.
    """
    return encode_each(header, arrays, [[]])[0]


def encode_each(header: dict[str, Any], shared: list[Any], own: list[list[Any]]) -> list[bytes]:
    """Messages that differ in their last arrays alone, whose types and shapes are the same in all of them."""
    if "arrays" in header:
        raise WireError('the key "arrays" of a header is taken; use another name')
    try:
        flat = [np.asarray(a, order="C") for a in shared]
        last = [[np.asarray(a, order="C") for a in each] for each in own]
        described = [[_name(a), a.shape] for a in (*flat, *last[0])]
        head = _ENCODER.encode({**header, "arrays": described}).encode()
        length = struct.pack("<I", len(head))
    except (struct.error, TypeError, ValueError, RecursionError) as error:
        raise WireError(f"can't be sent: {error}") from error
    begin = b"".join([length, head, *map(_bytes, flat)])
    return [begin + b"".join(map(_bytes, each)) if each else begin for each in last]


def _name(array: np.ndarray) -> str:
    name = _NAMES.get(array.dtype) or array.dtype.name
    if name not in _TYPES:
        raise WireError(f"arrays of type {array.dtype} are not sent; use one of {', '.join(_TYPES)}")
    return name


def _bytes(array: np.ndarray) -> Any:
    little = array if array.dtype.isnative and _LITTLE else array.astype(array.dtype.newbyteorder("<"), copy=False)
    return little.ravel().view(np.uint8).data


def decode(message: bytes) -> tuple[dict[str, Any], list[np.ndarray]]:
    """The header and the arrays; WireError if the bytes are anything else.

    It takes as much memory as the message's arrays have bytes, and a few dozen times the header's length.
    """
    try:
        (length,) = struct.unpack_from("<I", message)
        at = 4 + length
        if at > len(message):
            raise ValueError("it is cut short")
        text = str(message[4:at], "utf-8")
        header = _DECODER.decode(text)
        described = header.pop("arrays", None) if isinstance(header, dict) else None
        if not isinstance(described, list):
            raise ValueError('its header is not an object with a list of "arrays"')
        arrays = []
        for entry in described:
            arrays.append(_array(message, at, entry))
            at += arrays[-1].nbytes
        if at < len(message):
            raise ValueError(f"it has {len(message) - at} bytes too many")
    except (struct.error, ValueError, RecursionError) as error:
        raise WireError(f"not a message: {error}") from error
    return header, arrays


def _array(message: bytes, at: int, entry: Any) -> np.ndarray:
    """A copy of the array at that byte, aligned and in the machine's byte order."""
    match entry:
        # 64 is NumPy's limit, and keeps the product of the sizes short. A bool is an int, too, but not a size.
        case [str(name), list(shape)] if name in _TYPES and len(shape) <= 64 and all(type(s) is int for s in shape):
            dtype = _TYPES[name]
        case _:
            raise ValueError("an array is described by something else than a type and a shape")
    if min(shape, default=0) < 0 or math.prod(shape) * dtype.itemsize > len(message) - at:
        raise ValueError("an array has a size below 0, or more bytes than are left")
    if name == "bool" and np.ndarray(shape, np.uint8, message, at).max(initial=0) > 1:
        raise ValueError("a byte of a bool is neither 0 nor 1")
    return np.ndarray(shape, dtype.newbyteorder("<"), message, at).astype(dtype)


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("a key of its header stands there twice")
    return found


def _finite(number: str) -> float:
    if not math.isfinite(value := float(number)):
        raise ValueError("a number of its header is not finite")
    return value


_ENCODER = json.JSONEncoder(allow_nan=False)
_DECODER = json.JSONDecoder(object_pairs_hook=_unique, parse_constant=_finite, parse_float=_finite)
