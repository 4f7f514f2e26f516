"""Messages as bytes: a JSON header and the arrays' own bytes behind it. No code and no pickle."""

import json
import struct
from typing import Any

import numpy as np

_TYPES = {
    "float16",
    "float32",
    "float64",
    "int8",
    "int16",
    "int32",
    "int64",
    "uint8",
    "uint16",
    "uint32",
    "uint64",
    "bool",
}


class WireError(ValueError):
    """Bytes that are not a message."""


def encode(header: dict[str, Any], arrays: list[Any]) -> bytes:
    """The message."""
    flat = [np.asarray(a, order="C") for a in arrays]
    for array in flat:
        if array.dtype.name not in _TYPES:
            raise WireError(f"arrays of type {array.dtype} are not sent; use one of {sorted(_TYPES)}")
    head = json.dumps({**header, "arrays": [[a.dtype.name, list(a.shape)] for a in flat]}).encode()
    little = (a.astype(a.dtype.newbyteorder("<"), copy=False).tobytes() for a in flat)
    return b"".join([struct.pack("<I", len(head)), head, *little])


def decode(message: bytes) -> tuple[dict[str, Any], list[np.ndarray]]:
    """The header and the arrays; WireError if the bytes are anything else."""
    try:
        (length,) = struct.unpack_from("<I", message)
        header = json.loads(message[4 : 4 + length])
        described = header.pop("arrays")
    except Exception as error:
        raise WireError(f"not a message: {error}") from error
    arrays, at = [], 4 + length
    for name, shape in described:
        if name not in _TYPES or not all(isinstance(s, int) and s >= 0 for s in shape):
            raise WireError(f"not an array: type {name!r}, shape {shape!r}")
        dtype = np.dtype(name).newbyteorder("<")
        count = int(np.prod(shape, dtype=np.int64))
        if at + count * dtype.itemsize > len(message):
            raise WireError("the message is cut short")
        arrays.append(np.frombuffer(message, dtype, count, at).reshape(shape).astype(dtype.newbyteorder("=")))
        at += count * dtype.itemsize
    if at != len(message):
        raise WireError(f"{len(message) - at} bytes too many")
    return header, arrays
