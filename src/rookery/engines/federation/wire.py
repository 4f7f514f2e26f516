"""Messages as bytes: a JSON header and the arrays' own bytes behind it. No code and no pickle."""

import json
import math
import struct
import sys
from collections.abc import Iterable
from typing import Any

import jax.numpy as jnp
import numpy as np

_INTEGERS = [f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)]
# The types of arrays that travel: nothing with a size of its own choosing, and nothing that is an object.
TYPES: dict[str, Any] = {
    np.dtype(t).name: np.dtype(t) for t in ("bool", *_INTEGERS, "float16", jnp.bfloat16, "float32", "float64")
}


_ALIGNED = 64  # bytes, at whose multiples the first array begins
_LITTLE = sys.byteorder == "little"
_NAMES = {dtype: name for name, dtype in TYPES.items()}
_AS_SENT = {name: dtype.newbyteorder("<") for name, dtype in TYPES.items()}


class WireError(ValueError):
    """Bytes that are not a message, or values that can't be sent in one."""


def encode(header: dict[str, Any], arrays: list[Any]) -> bytes:
    """The message: the header's length in 4 bytes, the header with the arrays' types and shapes, the arrays in C order.

    All numbers are little-endian. The header is JSON without NaN and infinity; its key "arrays" is taken.
    """
    return b"".join(_buffers(header, arrays, [[]])[0])


PART = 1 << 20


class Parts:
    """A long message in parts of 1 MiB, but for the last, which is shorter. Messages to several sites share parts."""

    def __init__(self, parts: list[bytes]) -> None:
        self.parts = parts

    def __len__(self) -> int:
        return sum(map(len, self.parts))

    def __bytes__(self) -> bytes:
        return b"".join(self.parts)


Message = bytes | Parts


def cut(buffers: Iterable[Any]) -> list[bytes]:
    """Bytes in parts of 1 MiB, but for the last, which is shorter, and may be empty."""
    parts: list[bytes] = []
    held: list[Any] = []
    room = PART
    for given in buffers:
        buffer, at = memoryview(given), 0
        while len(buffer) - at >= room:
            parts.append(b"".join([*held, buffer[at : at + room]]))
            at, held, room = at + room, [], PART
        held.append(buffer[at:])
        room -= len(buffer) - at
    return [*parts, b"".join(held)]


def encode_each(header: dict[str, Any], shared: list[Any], own: list[list[Any]]) -> list[Message]:
    """Messages that differ in their last arrays alone, whose types and shapes are the same in all of them."""
    begin, ends = _buffers(header, shared, own)
    *parts, rest = cut(begin)
    messages = [cut([rest, *end]) if end else [rest] for end in ends]
    return [Parts([*parts, *more]) if parts or len(more) > 1 else more[0] for more in messages]


def _buffers(header: dict[str, Any], shared: list[Any], own: list[list[Any]]) -> tuple[list[Any], list[list[Any]]]:
    """What such messages begin with, and how each of them ends."""
    if "arrays" in header:
        raise WireError('the key "arrays" of a header is taken; use another name')
    try:
        flat = [np.asarray(a, order="C") for a in shared]
        last = [[np.asarray(a, order="C") for a in each] for each in own]
        described = [[_name(a), a.shape] for a in (*flat, *last[0])]
        head = _ENCODER.encode({**header, "arrays": described}).encode()
        head += b" " * (-(4 + len(head)) % _ALIGNED)
        length = struct.pack("<I", len(head))
    except (struct.error, TypeError, ValueError, RecursionError) as error:
        raise WireError(f"can't be sent: {error}") from error
    return [length, head, *map(_bytes, flat)], [list(map(_bytes, each)) for each in last]


def _name(array: np.ndarray) -> str:
    name = _NAMES.get(array.dtype) or array.dtype.name
    if name not in TYPES:
        raise WireError(f"arrays of type {array.dtype} are not sent; use one of {', '.join(TYPES)}")
    return name


def _bytes(array: np.ndarray) -> Any:
    little = array if array.dtype.isnative and _LITTLE else array.astype(array.dtype.newbyteorder("<"), copy=False)
    return little.ravel().view(np.uint8).data


def decode(message: Message) -> tuple[dict[str, Any], list[np.ndarray]]:
    """The header and the arrays; WireError if the bytes are anything else.

    The arrays can't be written to: where they can, they are the message's own bytes. Otherwise it takes as much memory
    as they have bytes; and a few dozen times the header's length.
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
    """The array at that byte, aligned and in the machine's byte order."""
    match entry:
        # 64 is NumPy's limit, and keeps the product of the sizes short. A bool is an int, too, but not a size.
        case [str(name), list(shape)] if name in TYPES and len(shape) <= 64 and all(type(s) is int for s in shape):
            dtype, little = TYPES[name], _AS_SENT[name]
        case _:
            raise ValueError("an array is described by something else than a type and a shape")
    if min(shape, default=0) < 0 or math.prod(shape) * dtype.itemsize > len(message) - at:
        raise ValueError("an array has a size below 0, or more bytes than are left")
    if name == "bool" and np.ndarray(shape, np.uint8, message, at).max(initial=0) > 1:
        raise ValueError("a byte of a bool is neither 0 nor 1")
    found: np.ndarray = np.ndarray(shape, little, message, at)
    if little != dtype or not found.flags.aligned:
        found = found.astype(dtype)
        found.flags.writeable = False
    return found


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
