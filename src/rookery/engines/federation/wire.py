"""The wire format of messages: a JSON header followed by the arrays' bytes. No code and no pickle."""

import json
import math
import struct
import sys
from collections.abc import Iterable
from typing import Any

import jax.numpy as jnp
import numpy as np

_INTEGERS = [f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)]
# The dtypes that may be sent: none of variable size, and no objects.
TYPES: dict[str, Any] = {
    np.dtype(t).name: np.dtype(t) for t in ("bool", *_INTEGERS, "float16", jnp.bfloat16, "float32", "float64")
}
PART = 1 << 20
_ALIGNED = 64  # the first array begins at a multiple of this many bytes
_LITTLE = sys.byteorder == "little"
_NAMES = {dtype: name for name, dtype in TYPES.items()}
_AS_SENT = {name: dtype.newbyteorder("<") for name, dtype in TYPES.items()}


class WireError(ValueError):
    """Bytes that are not a message, or values that can't be sent in one."""


def encode(header: dict[str, Any], arrays: list[Any]) -> bytes:
    """Return a message: the header's length in 4 bytes, the header with the arrays' types and shapes, and the arrays.

    Numbers are little-endian and arrays in C order. The header is JSON without NaN and infinity; its key "arrays" is
    reserved.
    """
    return b"".join(_buffers(header, arrays, [[]])[0])


class Parts:
    """A long message in parts of 1 MiB; the last is shorter. Messages to several sites share parts."""

    def __init__(self, parts: list[bytes]) -> None:
        self.parts = parts

    def __len__(self) -> int:
        return sum(map(len, self.parts))

    def __bytes__(self) -> bytes:
        return b"".join(self.parts)


Message = bytes | Parts


def cut(buffers: Iterable[Any]) -> list[bytes]:
    """Join buffers and cut them into parts of 1 MiB, except for the last, which is shorter and may be empty."""
    parts: list[bytes] = []
    held: list[Any] = []
    free = PART
    for one in buffers:
        buffer, at = memoryview(one), 0
        while len(buffer) - at >= free:
            parts.append(b"".join([*held, buffer[at : at + free]]))
            at, held, free = at + free, [], PART
        held.append(buffer[at:])
        free -= len(buffer) - at
    return [*parts, b"".join(held)]


def encode_each(header: dict[str, Any], shared: list[Any], last: list[list[Any]]) -> list[Message]:
    """Return messages that differ only in their last arrays, whose types and shapes are the same in all."""
    begin, ends = _buffers(header, shared, last)
    *parts, rest = cut(begin)
    messages = [cut([rest, *end]) if end else [rest] for end in ends]
    return [Parts([*parts, *more]) if parts or len(more) > 1 else more[0] for more in messages]


def _buffers(header: dict[str, Any], shared: list[Any], last: list[list[Any]]) -> tuple[list[Any], list[list[Any]]]:
    """Return the common beginning of such messages, and the end of each."""
    if "arrays" in header:
        raise WireError('the key "arrays" of a header is reserved. Use another name')
    try:
        first = [np.asarray(a, order="C") for a in shared]
        ends = [[np.asarray(a, order="C") for a in arrays] for arrays in last]
        described = [[_name(a), a.shape] for a in (*first, *ends[0])]
        head = _ENCODER.encode({**header, "arrays": described}).encode()
        head += b" " * (-(4 + len(head)) % _ALIGNED)
        length = struct.pack("<I", len(head))
    except (struct.error, TypeError, ValueError, RecursionError) as error:
        raise WireError(f"can't be sent: {error}") from error
    return [length, head, *map(_bytes, first)], [list(map(_bytes, arrays)) for arrays in ends]


def _name(array: np.ndarray) -> str:
    name = _NAMES.get(array.dtype) or array.dtype.name
    if name not in TYPES:
        raise WireError(f"an array must have one of the types {', '.join(TYPES)}; got {array.dtype}")
    return name


def _bytes(array: np.ndarray) -> Any:
    little = array if array.dtype.isnative and _LITTLE else array.astype(array.dtype.newbyteorder("<"), copy=False)
    return little.ravel().view(np.uint8).data


def decode(message: Message) -> tuple[dict[str, Any], list[np.ndarray]]:
    """Return the header and the arrays of a message; WireError if the bytes are not a message.

    The arrays are read-only views of the message, or copies where alignment or byte order requires it. The header takes
    a few dozen times its length in memory.
    """
    message = bytes(message)
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
    """Return the array at that byte, aligned and in the machine's byte order."""
    match entry:
        # 64 is NumPy's limit, and keeps the product of the sizes short. A bool is an int, too, but not a size.
        case [str(name), list(shape)] if name in TYPES and len(shape) <= 64 and all(type(s) is int for s in shape):
            dtype, little = TYPES[name], _AS_SENT[name]
        case _:
            raise ValueError("the description of an array is not a type and a shape")
    if min(shape, default=0) < 0 or math.prod(shape) * dtype.itemsize > len(message) - at:
        raise ValueError("an array has a size below 0, or more bytes than are left")
    if name == "bool" and np.ndarray(shape, np.uint8, message, at).max(initial=0) > 1:
        raise ValueError("a byte of a bool is neither 0 nor 1")
    array: np.ndarray = np.ndarray(shape, little, message, at)
    if little != dtype or not array.flags.aligned:
        array = array.astype(dtype)
        array.flags.writeable = False
    return array


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    entries = dict(pairs)
    if len(entries) < len(pairs):
        raise ValueError("a key of its header occurs twice")
    return entries


def _finite(number: str) -> float:
    if not math.isfinite(value := float(number)):
        raise ValueError("a number of its header is not finite")
    return value


_ENCODER = json.JSONEncoder(allow_nan=False)
_DECODER = json.JSONDecoder(object_pairs_hook=_unique, parse_constant=_finite, parse_float=_finite)
