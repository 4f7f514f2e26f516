"""Codecs that make one array smaller for a message, and restore it at the server: sparse, quantised, of low rank."""

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from rookery.base import draws
from rookery.base.arguments import is_integer, is_number
from rookery.language import ledger
from rookery.language.primitives import accumulator

# A codec packs an array of finite numbers into a few arrays, and unpacks these into an array of the first shape and
# type. With `unbiased`, the expected result is the array itself, if the codec can do that; otherwise the error is
# smaller than the array, as feedback needs it.


def packed(codec: Any, array: Array, key: Array, unbiased: bool) -> tuple[Array, ...]:
    """Return the packed array, or the array itself if packing does not make it smaller."""
    return codec.pack(array, key, unbiased) if is_packed(codec, array.shape, array.dtype) else (array,)


def unpacked(codec: Any, arrays: tuple[Array, ...], like: Any, unbiased: bool) -> Array:
    """Invert `packed`, as far as possible. What is not finite becomes 0."""
    whole = codec.unpack(arrays, like, unbiased) if is_packed(codec, like.shape, like.dtype) else arrays[0]
    return jnp.where(jnp.isfinite(whole), whole, 0).astype(like.dtype)


@lru_cache(maxsize=4096)
def is_packed(codec: Any, shape: tuple[int, ...], dtype: Any) -> bool:
    """Return whether the codec makes arrays of this shape and type smaller; others are sent as they are."""
    like = jax.ShapeDtypeStruct(shape, dtype)
    if not codec.fits(like):
        return False
    sent = jax.eval_shape(lambda a, key: codec.pack(a, key, True), like, jax.eval_shape(lambda: draws.seed_key(0)))
    return ledger.nbytes(sent) < ledger.nbytes([like])


@dataclass(frozen=True)
class TopK:
    """The entries with the largest absolute values, and their places. See `top_k`."""

    share: float | None
    k: int | None
    name: ClassVar[str] = "top_k"

    def __post_init__(self) -> None:
        _check_amount(self)

    @property
    def in_words(self) -> str:
        return f"of each array, {_kept(self)} with the largest absolute values are sent"

    def fits(self, like: Any) -> bool:
        return like.size > 0

    def pack(self, array: Array, key: Array, unbiased: bool) -> tuple[Array, ...]:
        flat = array.ravel()
        places = largest(flat, _count(self, flat.size))
        return flat[places], places.astype(place_type(flat.size))

    def unpack(self, arrays: tuple[Array, ...], like: Any, unbiased: bool) -> Array:
        values, places = arrays
        return spread(values, places.astype(jnp.int32), like.size).reshape(like.shape)


@dataclass(frozen=True)
class RandomK:
    """One random entry of each of k stretches of equal length; a seed is sent instead of the entries' places."""

    share: float | None
    k: int | None
    name: ClassVar[str] = "random_k"

    def __post_init__(self) -> None:
        _check_amount(self)

    @property
    def in_words(self) -> str:
        return f"of each array, {_kept(self)} drawn at random are sent"

    def fits(self, like: Any) -> bool:
        return like.size > 0

    def pack(self, array: Array, key: Array, unbiased: bool) -> tuple[Array, ...]:
        seed, size = jax.random.bits(key, (), jnp.uint32), array.size
        places, lengths = stretches(seed, size, _count(self, size))
        values = array.ravel()[places]
        return (values * lengths.astype(values.dtype) if unbiased else values), seed

    def unpack(self, arrays: tuple[Array, ...], like: Any, unbiased: bool) -> Array:
        values, seed = arrays
        places, _ = stretches(seed, like.size, _count(self, like.size))
        return spread(values, places, like.size).reshape(like.shape)


@dataclass(frozen=True)
class Quantize:
    """Equally spaced levels from −s to s (with 4 or 8 bits one of them is 0), and the number s. See `quantize`."""

    bits: int
    name: ClassVar[str] = "quantize"

    def __post_init__(self) -> None:
        check_bits(self.name, self.bits)

    @property
    def in_words(self) -> str:
        return f"each number is rounded to {self.bits} bit{'s' * (self.bits > 1)}"

    @property
    def levels(self) -> int:
        """The number of the highest level; the lowest is 0."""
        return max(1, 2**self.bits - 2)

    def fits(self, like: Any) -> bool:
        return like.size > 0

    def pack(self, array: Array, key: Array, unbiased: bool) -> tuple[Array, ...]:
        flat = array.ravel().astype(accumulator(array.dtype))
        if self.bits == 1 and not unbiased:
            return bits_packed((flat >= 0).astype(jnp.uint8), 1), jnp.mean(jnp.abs(flat))
        scale = jnp.max(jnp.abs(flat))
        safe = jnp.where(scale >= jnp.finfo(flat.dtype).tiny, scale, 1)
        exact = (flat / safe + 1) * (self.levels / 2)
        if unbiased:
            uniform = (jax.random.bits(key, flat.shape, jnp.uint32) >> 8).astype(flat.dtype) * 2.0**-24
            whole = jnp.floor(exact)
            level = whole + (uniform < exact - whole)
        else:
            level = jnp.round(exact)
        return bits_packed(jnp.clip(level, 0, self.levels).astype(jnp.uint8), self.bits), scale

    def unpack(self, arrays: tuple[Array, ...], like: Any, unbiased: bool) -> Array:
        level, scale = bits_unpacked(arrays[0], self.bits, like.size), arrays[1]
        return (scale * ((2 * level.astype(scale.dtype) - self.levels) / self.levels)).reshape(like.shape)


@dataclass(frozen=True)
class LowRank:
    """An array as a matrix, projected onto r of its main directions, as two factors. See `low_rank`."""

    rank: int
    name: ClassVar[str] = "low_rank"

    def __post_init__(self) -> None:
        if not is_integer(self.rank) or self.rank < 1:
            raise ValueError(f"rk.low_rank: rank must be an integer of at least 1; got {self.rank!r}.")

    @property
    def in_words(self) -> str:
        return f"each matrix is sent as two factors of rank {self.rank}"

    def fits(self, like: Any) -> bool:
        return like.size > 0 and len(like.shape) > 1 and self.rank < min(_matrix(like.shape))

    def pack(self, array: Array, key: Array, unbiased: bool) -> tuple[Array, ...]:
        kind = accumulator(array.dtype)
        matrix = array.reshape(_matrix(array.shape)).astype(kind)
        scale = jnp.max(jnp.abs(matrix))
        unit = matrix / jnp.where(scale >= jnp.finfo(kind).tiny, scale, 1)
        start = draws.normals(key, (matrix.shape[1], self.rank)).astype(kind)
        basis = _orthonormal(_product(unit, start))
        basis = _orthonormal(_product(unit, _product(unit.T, basis)))
        return basis.astype(array.dtype), _product(matrix.T, basis).astype(array.dtype)

    def unpack(self, arrays: tuple[Array, ...], like: Any, unbiased: bool) -> Array:
        basis, factor = (a.astype(accumulator(a.dtype)) for a in arrays)
        return _product(basis, factor.T).reshape(like.shape)


def _check_amount(codec: TopK | RandomK) -> None:
    owner, share, k = codec.name, codec.share, codec.k
    if (share is None) == (k is None):
        raise ValueError(f"rk.{owner} must be given a share such as 0.01, or k=...; got {share!r} and {k!r}.")
    if k is not None and (not is_integer(k) or k < 1):
        raise ValueError(f"rk.{owner}: k must be an integer of at least 1; got {k!r}.")
    if share is not None and (not is_number(share) or not 0 < share < 1):
        raise ValueError(f"rk.{owner}: share must be a number between 0 and 1, such as 0.01; got {share!r}.")


def check_bits(owner: str, bits: Any) -> None:
    """Raise ValueError if numbers with this many bits can't be packed."""
    if not is_integer(bits) or bits not in (1, 4, 8):
        raise ValueError(f"rk.{owner}: bits must be 8, 4 or 1; got {bits!r}.")


def _count(codec: TopK | RandomK, size: int) -> int:
    """k, for an array of this size."""
    return codec.k if codec.k is not None else max(1, math.ceil(codec.share * size))  # type: ignore[operator]


def _kept(codec: TopK | RandomK) -> str:
    if codec.k is not None:
        return f"{codec.k} numbers"
    return f"{100 * codec.share:.3g} % of the numbers"  # type: ignore[operator]


def largest(values: Float[Array, " d"], k: int) -> Int[Array, " k"]:
    """Return the places of the k entries with the largest absolute values; of equal ones, the first."""
    return jax.lax.top_k(jnp.abs(values), k)[1]


def random_places(key: Array, size: int, k: int) -> Int[Array, " k"]:
    """Draw k places uniformly without replacement. Clients that have the key know them, so they are not sent."""
    return jax.random.permutation(key, jnp.arange(size, dtype=jnp.int32))[:k]


def spread(values: Float[Array, " k"], places: Int[Array, " k"], size: int) -> Float[Array, " d"]:
    """Return the vector with these values at these places and zeros elsewhere."""
    return jnp.zeros(size, values.dtype).at[places].add(values, mode="drop")


def stretches(seed: Array, size: int, k: int) -> tuple[Int[Array, " k"], Int[Array, " k"]]:
    """Cut a vector into k stretches of about equal length. Returns a random place in each, and the lengths."""
    every, longer = divmod(size, k)
    number = jnp.arange(k, dtype=jnp.int32)
    begins, lengths = number * every + jnp.minimum(number, longer), every + (number < longer).astype(jnp.int32)
    words = jax.random.bits(jax.random.key(seed, impl="threefry2x32"), (k,), jnp.uint32)
    return begins + (words % lengths.astype(jnp.uint32)).astype(jnp.int32), lengths


def place_type(size: int) -> Any:
    """Return the smallest type of unsigned integers below `size`."""
    return jnp.uint8 if size <= 2**8 else jnp.uint16 if size <= 2**16 else jnp.uint32


def bits_packed(numbers: Int[Array, " d"], bits: int) -> Int[Array, " bytes"]:
    """Pack numbers with this many bits into bytes; the first number is in the lowest bits. The last byte is padded."""
    each = 8 // bits
    padded = jnp.pad(numbers.astype(jnp.uint8), (0, -numbers.size % each)).reshape(-1, each)
    shifts = jnp.arange(0, 8, bits, dtype=jnp.uint8)
    return jnp.sum(padded << shifts, axis=1, dtype=jnp.uint8)


def bits_unpacked(packed: Int[Array, " bytes"], bits: int, size: int) -> Int[Array, " d"]:
    """Invert `bits_packed`."""
    shifts = jnp.arange(0, 8, bits, dtype=jnp.uint8)
    return ((packed[:, None] >> shifts) & jnp.uint8(2**bits - 1)).ravel()[:size]


def _matrix(shape: tuple[int, ...]) -> tuple[int, int]:
    return shape[0], math.prod(shape[1:])


def _product(a: Array, b: Array) -> Array:
    return jnp.matmul(a, b, precision="highest")


def _orthonormal(columns: Array) -> Array:
    return jnp.linalg.qr(columns)[0]
