"""The wire format: every message comes back bit for bit, and any other bytes are refused in bounded memory."""

import json
import struct
import tracemalloc
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import array_shapes

from rookery.engines.federation.wire import WireError, decode, encode

FIXED = settings(deadline=None, derandomize=True, max_examples=60)
MORE = settings(FIXED, max_examples=300)
INTEGERS = ["int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"]
TYPES = [np.dtype(t) for t in ("bool", *INTEGERS, "float16", jnp.bfloat16, "float32", "float64")]

TEXT = st.text(st.characters(blacklist_categories=["Cs"]))  # the default, without looking for what UTF-8 can encode
scalars = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | TEXT
json_values = st.recursive(
    scalars, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXT, inner, max_size=4), max_leaves=10
)
headers = st.dictionaries(TEXT.filter(lambda key: key != "arrays"), json_values, max_size=5)


@st.composite
def arrays(draw: st.DrawFn) -> np.ndarray:
    """An array of any type that is sent and of any bits, NaNs with payloads among them."""
    dtype = draw(st.sampled_from(TYPES))
    shape = draw(array_shapes(min_dims=0, max_dims=4, min_side=0, max_side=4))
    size = int(np.prod(shape)) * dtype.itemsize
    raw = np.frombuffer(draw(st.binary(min_size=size, max_size=size)), np.uint8)
    return (raw & 1 if dtype == np.dtype(bool) else raw).view(dtype).reshape(shape)


messages = st.builds(encode, headers, st.lists(arrays(), max_size=4))


def assert_same(decoded: list[np.ndarray], sent: list[np.ndarray]) -> None:
    """Equal types, shapes and bits."""
    assert [(a.dtype, a.shape, a.tobytes()) for a in decoded] == [(a.dtype, a.shape, a.tobytes()) for a in sent]
    assert all(a.dtype.isnative and a.flags.aligned for a in decoded)


def with_header(text: str | bytes, tail: bytes = b"") -> bytes:
    """A message with that text as its header."""
    head = text.encode() if isinstance(text, str) else text
    return struct.pack("<I", len(head)) + head + tail


def described(name: Any, shape: Any, tail: bytes = b"") -> bytes:
    """A message that claims one array."""
    return with_header(json.dumps({"arrays": [[name, shape]]}), tail)


def decode_or_refuse(message: bytes) -> None:
    """Whatever decodes takes no more bytes than came, and is sent again as the same."""
    try:
        header, found = decode(message)
    except WireError:
        return
    assert sum(a.nbytes for a in found) <= len(message)
    again, same = decode(encode(header, found))
    assert again == header
    assert_same(same, found)


@FIXED
@given(headers, st.lists(arrays(), max_size=4))
def test_round_trip(header: dict[str, Any], sent: list[np.ndarray]) -> None:
    found, decoded = decode(encode(header, sent))
    assert found == header
    assert json.dumps(found) == json.dumps(header)  # == holds between 1, 1.0 and True
    assert_same(decoded, sent)


@FIXED
@given(arrays(), st.randoms(use_true_random=False))
def test_byte_order_and_strides_do_not_matter(array: np.ndarray, random: Any) -> None:
    axes = random.sample(range(array.ndim), array.ndim) if array.ndim else []
    strided = array.transpose(axes)[tuple(slice(None, None, random.choice([1, 2, -1])) for _ in axes)]
    expected = np.array(strided, order="C")
    big = strided.byteswap().view(array.dtype.newbyteorder(">"))
    for sent in (strided, np.asfortranarray(strided), big):
        assert_same(decode(encode({}, [sent]))[1], [expected.reshape(sent.shape)])


def test_jax_arrays_and_scalars() -> None:
    _, decoded = decode(encode({}, [jnp.arange(3, dtype=jnp.bfloat16), np.float32(2), 3, True]))
    assert_same(decoded, [np.arange(3).astype(jnp.bfloat16), np.array(2, np.float32), np.array(3), np.array(True)])


@MORE
@given(st.binary(max_size=200) | st.binary(max_size=200).map(with_header))
@example(b"")
@example(b"\0\0\0")
def test_any_bytes(message: bytes) -> None:
    decode_or_refuse(message)


any_header = json_values | st.fixed_dictionaries({"arrays": json_values})


@FIXED
@given(any_header, st.binary(max_size=20))
def test_any_json(header: Any, tail: bytes) -> None:
    decode_or_refuse(with_header(json.dumps(header), tail))


sizes = st.integers() | st.integers(-1, 3) | st.sampled_from([2**31, 2**32, 2**62, 2**63, 2**64, 10**4000])


@FIXED
@given(
    st.sampled_from([t.name for t in TYPES]) | json_values,
    st.lists(sizes | st.booleans() | st.floats() | st.lists(sizes), max_size=5) | json_values,
    st.binary(max_size=40),
)
def test_any_description_of_an_array(name: Any, shape: Any, tail: bytes) -> None:
    decode_or_refuse(described(name, shape, tail))


@FIXED
@given(messages, st.data())
def test_a_changed_message(message: bytes, data: st.DataObject) -> None:
    """Bits flipped, bytes cut out, bytes put in."""
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(0, len(message)))
        match data.draw(st.sampled_from(["flip", "cut", "insert"])):
            case "flip":
                flipped = bytes(b ^ (1 << data.draw(st.integers(0, 7))) for b in message[at : at + 1])
                message = message[:at] + flipped + message[at + 1 :]
            case "cut":
                message = message[:at] + message[data.draw(st.integers(at, len(message))) :]
            case "insert":
                message = message[:at] + data.draw(st.binary(min_size=1, max_size=4)) + message[at:]
    decode_or_refuse(message)


@FIXED
@given(messages, st.data())
def test_too_few_and_too_many_bytes(message: bytes, data: st.DataObject) -> None:
    with pytest.raises(WireError):
        decode(message[: data.draw(st.integers(0, len(message) - 1))])
    with pytest.raises(WireError, match="1 bytes too many"):
        decode(message + b"\0")


# With more examples.


@pytest.mark.slow
@MORE
@given(headers, st.lists(arrays(), max_size=4))
def test_more_round_trips(header: dict[str, Any], sent: list[np.ndarray]) -> None:
    test_round_trip.hypothesis.inner_test(header, sent)


@pytest.mark.slow
@MORE
@given(any_header, st.binary(max_size=20))
def test_more_json(header: Any, tail: bytes) -> None:
    test_any_json.hypothesis.inner_test(header, tail)


@pytest.mark.slow
@MORE
@given(messages, st.data())
def test_more_changed_messages(message: bytes, data: st.DataObject) -> None:
    test_a_changed_message.hypothesis.inner_test(message, data)


REFUSED = {
    "no bytes": b"",
    "half a length": b"\1\0",
    "longer header than message": struct.pack("<I", 2**32 - 1) + b"{}",
    "not UTF-8": with_header(b'{"arrays": [], "a": "\xff"}'),
    "UTF-16": with_header('{"arrays": []}'.encode("utf-16-le")),
    "byte order mark": with_header('\ufeff{"arrays": []}'),
    "a list": with_header("[]"),
    "null": with_header("null"),
    "no arrays": with_header("{}"),
    "arrays is an object": with_header('{"arrays": {}}'),
    "arrays twice": with_header('{"arrays": [], "arrays": []}'),
    "a key twice, inside": with_header('{"arrays": [], "a": [{"b": 1, "b": 2}]}'),
    "NaN": with_header('{"arrays": [], "a": NaN}'),
    "-Infinity": with_header('{"arrays": [], "a": -Infinity}'),
    "1e999": with_header('{"arrays": [], "a": 1e999}'),
    "5000 digits": with_header(f'{{"arrays": [], "a": {"1" * 5000}}}'),
    "deep": with_header('{"arrays": ' + "[" * 100_000),
    "deep shape": with_header(f'{{"arrays": [["int8", {"[" * 900}{"]" * 900}]]}}'),
    "no shape": with_header('{"arrays": [["int8"]]}'),
    "a third entry": with_header('{"arrays": [["int8", [0], 0]]}'),
    "type object": described("object", [0]),
    "type complex": described("complex64", [0]),
    "type with byte order": described(">f4", [0]),
    "type is a list": described(["int8"], [0]),
    "shape is a number": described("int8", 1, b"a"),
    "shape is a text": described("int8", "1", b"a"),
    "size -1": described("int8", [-1]),
    "sizes -1 and -1": described("int8", [-1, -1], b"a"),
    "size -1 and 0": described("int8", [-1, 0]),
    "size 1.0": described("int8", [1.0], b"a"),
    "size true": described("int8", [True], b"a"),
    "size null": described("int8", [None], b"a"),
    "nested size": described("int8", [[1]], b"a"),
    "large": described("float64", [2**40]),
    "product overflows": described("int8", [2**32, 2**32]),
    "product overflows to 1": described("int8", [3, 12297829382473034411], b"a"),
    "bytes overflow": described("float64", [2**61]),
    "zero and overflow": described("float64", [0, 2**62, 2**62]),
    "zero and 10^4000": described("int8", [0, 10**4000]),
    "65 dimensions": described("int8", [1] * 65, b"a"),
    "100,000 dimensions": described("int8", [9] * 100_000, b"a"),
    "0-d without bytes": described("int8", []),
    "bool of 2": described("bool", [2], b"\1\2"),
}  # fmt: skip


@pytest.mark.parametrize("message", REFUSED.values(), ids=REFUSED)
def test_refused_in_little_memory(message: bytes) -> None:
    assert peak(message, refused=True) < 50_000 + 40 * len(message)


MANY = {
    "objects": '{{"arrays": [], "a": [{}]}}'.format(",".join(['{"":{}}'] * 10_000)),
    "lists": '{{"arrays": [], "a": [{}]}}'.format(",".join(["[[]]"] * 10_000)),
    "keys": '{{"arrays": [], {}}}'.format(",".join(f'"{i:x}":[]' for i in range(10_000))),
    "empty arrays": '{{"arrays": [{}]}}'.format(",".join(['["bool",[0]]'] * 10_000)),
    "wide characters": '{{"arrays": [], "a": "{}\U0001f426"}}'.format("a" * 500_000),
}


@pytest.mark.parametrize("text", MANY.values(), ids=MANY)
def test_a_header_takes_a_few_dozen_times_its_length(text: str) -> None:
    message = with_header(text)
    assert peak(message) < 40 * len(message)


def test_large_arrays_are_copied_once() -> None:
    array = np.zeros(10**6)
    tracemalloc.start()
    message = encode({}, [array])
    assert tracemalloc.get_traced_memory()[1] < 1.01 * array.nbytes
    tracemalloc.stop()
    assert peak(message) < 1.01 * array.nbytes


def peak(message: bytes, refused: bool = False) -> int:
    """The bytes that decoding took at most."""
    tracemalloc.start()
    try:
        if refused:
            with pytest.raises(WireError, match="not a message"):
                decode(message)
        else:
            decode(message)
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(
    "array",
    [
        np.array([None]), 10**30, np.array([1j]), np.array(["a"]), np.array([b"a"]), np.zeros(1, "M8[s]"),
        np.zeros(1, "m8[s]"), np.zeros(1, "i4,f4"), [[1], [2, 3]], jax.random.key(0),
    ],
    ids=["object", "large", "complex", "str", "bytes", "datetime", "timedelta", "record", "ragged", "key"],
)  # fmt: skip
def test_arrays_that_are_not_sent(array: Any) -> None:
    with pytest.raises(WireError, match=r"must have one of the types|can't be sent"):
        encode({}, [array])


@pytest.mark.parametrize(
    "value",
    [float("nan"), float("inf"), {1, 2}, np.int64(1), 10**5000],
    ids=["NaN", "infinity", "set", "NumPy scalar", "5000 digits"],
)
def test_headers_that_are_not_sent(value: Any) -> None:
    with pytest.raises(WireError, match="can't be sent"):
        encode({"a": value}, [])
    with pytest.raises(WireError, match="reserved"):
        encode({"arrays": value}, [])
