"""Random integers, coins, normal numbers and keys that are the same with and without jax_enable_x64.

`jax.random.randint` and `bernoulli` draw words as wide as the numbers they return, so double precision changes every
draw. These functions compute with 32-bit words, in both modes, what `jax.random` draws with jax_enable_x64.
"""

import functools
import itertools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float, Int, UInt

from rookery.base.arguments import check_seed

WIDEST = 2**16  # spans are smaller, so that the product of two numbers below a span fits into 32 bits


def seed_key(seed: int) -> Array:
    """Return the key of a seed. Different seeds have different keys; below 2**32 it is `jax.random.key(seed)`."""
    check_seed(seed)
    high, low = divmod(int(seed), 2**32)
    return jax.random.wrap_key_data(jnp.array([high, low], jnp.uint32), impl="threefry2x32")


def integers(key: Array, shape: tuple[int, ...], low: Any, high: Any) -> Int[Array, "*shape"]:
    """Draw uniform integers, low ≤ i < high, for scalars with high − low < 2¹⁶; low if high ≤ low."""
    if isinstance(low, int | np.integer) and isinstance(high, int | np.integer) and high - low >= WIDEST:
        raise ValueError(f"The range of random integers must be shorter than {WIDEST}; got {low} to {high - 1}.")
    return _integers(key, shape, low, high)


@functools.partial(jax.jit, static_argnames="shape")
def _integers(key: Array, shape: tuple[int, ...], low: Any, high: Any) -> Int[Array, "*shape"]:
    low, high = jnp.asarray(low, jnp.int32), jnp.asarray(high, jnp.int32)
    span = jnp.maximum(high - low, 1).astype(jnp.uint32)
    word = jnp.square(WIDEST % span) % span  # 2³² mod span
    remainder = lambda words: (words[0] % span * word + words[1] % span) % span
    first, second = (remainder(_words(k, shape)) for k in jax.random.split(key))
    return low + remainder((first * word % span, second)).astype(jnp.int32)


@functools.partial(jax.jit, static_argnames="shape")
def coins(key: Array, chance: Any, shape: tuple[int, ...] = ()) -> Bool[Array, "*shape"]:
    """Draw True with probability `chance`, a scalar.

    In float32 the chance may be off by 2⁻²⁵, and a coin differs from the float64 one just as rarely.
    """
    chance = jnp.asarray(chance)
    chance = chance.astype(jnp.promote_types(chance.dtype, jnp.float32))
    scaled = jnp.where((chance > 0) & (chance < 1), chance, 0) * 2.0**32
    whole = jnp.floor(scaled)
    rest = jnp.ceil((scaled - whole) * 2.0**20).astype(jnp.uint32)  # a random float64 has 32 + 20 bits
    high, low = _words(key, shape)
    below = (high < whole.astype(jnp.uint32)) | ((high == whole.astype(jnp.uint32)) & (low >> 12 < rest))
    return below | (chance >= 1)


@jax.jit
def tosses(key: Array, chance: Any, most: Any) -> Int[Array, ""]:
    """Draw the number of tosses of a coin up to the first head, of probability `chance` > 0; cut at `most`."""
    high, _ = _words(key, ())
    tail = jnp.log((high.astype(jnp.float32) + 0.5) * 2.0**-32)  # of a uniform number above 0 and at most 1
    needed = jnp.floor(tail / jnp.log1p(-jnp.asarray(chance, jnp.float32)))
    return 1 + jnp.minimum(needed, jnp.asarray(most, jnp.float32) - 1).astype(jnp.int32)


@functools.partial(jax.jit, static_argnames="shape")
def normals(key: Array, shape: tuple[int, ...]) -> Float[Array, "*shape"]:
    """Draw normal numbers of 24 random bits each, in float32."""
    signed = lax.bitcast_convert_type(_stream(key, math.prod(shape)), jnp.int32) >> 8
    uniform = (2 * signed + 1).astype(jnp.float32) * np.float32(2**-24)  # between −1 and 1, exact
    return _quantiles(uniform).reshape(shape)


# b and a of the continued fraction b₀ + a₁/(w + b₁ + a₂/(w + b₂ + …)), from the last ones on; its error is 1e-8.
_B = (23.7077043, -24.3733679, 29.0244412, -18.3077798, 16.3793289, 0.0375701174)
_A = (629.241774, 2.94496337, 683.648584, -45.3883099, 4.22420465)


def _quantiles(uniform: Float[Array, " n"]) -> Float[Array, " n"]:
    """Return the normal quantiles of (1 + u)/2 for float32 numbers u, at most 1 − 2⁻²⁴ in size, to 2e-6 of their size.

    u over its quantile is a smooth function of w = −log(1 − u²) (Giles, "Approximating the erfinv function", 2012),
    here a rational one. Nothing is added to a product: a compiler may round the two as one, and would not in every
    program. On a CPU, a normal number takes a fifth less time than with √2·erf_inv(u). The division comes last because
    XLA does not repeat divisions; it would otherwise hash again for the arrays that get the noise.
    """
    w = -jnp.log((1 - uniform) * (1 + uniform))
    ratio = w + np.float32(_B[0])
    for a, b in zip(_A[:-1], _B[1:-1], strict=True):
        ratio = w + np.float32(b) + np.float32(a) / ratio
    return uniform / (np.float32(_B[-1]) + np.float32(_A[-1]) / ratio)


def symmetric(key: Array, shape: tuple[int, ...], bound: float) -> Float[Array, "*shape"]:
    """Draw uniform numbers between −bound and bound, those of `jax.random.uniform` with this shape.

    With jax_enable_x64 they are other numbers, in double precision. They are drawn as one row: as a matrix, they take
    four times as long to compile on a CPU.
    """
    return jax.random.uniform(key, (math.prod(shape),), minval=-bound, maxval=bound).reshape(shape)


def _stream(key: Array, count: int) -> UInt[Array, " count"]:
    """Return random words: both words of the Threefry-2x32 hash (20 rounds) of 0, 1, 2, … under the key.

    They are the words of `jax.random.split(key, ...)`. JAX writes each round of the hash to memory on a CPU; here the
    hash and what is computed from it are one loop over the numbers, which takes a third of the time to run and to
    compile. Every hash is computed twice, once for each of its words, which costs less than moving words.
    """
    index = lax.iota(jnp.uint32, count)
    first, second = jax.random.key_data(key)
    schedule = (first, second, first ^ second ^ np.uint32(0x1BD11BDA))
    left, right = lax.broadcast(first, (count,)), (index >> 1) + second
    for turn in range(5):
        for by in ((13, 15, 26, 6), (17, 29, 16, 24))[turn % 2]:
            left = left + right
            right = left ^ (lax.shift_left(right, np.uint32(by)) | lax.shift_right_logical(right, np.uint32(32 - by)))
        left = left + schedule[(turn + 1) % 3]
        right = right + schedule[(turn + 2) % 3] + np.uint32(turn + 1)
    return lax.select(index & 1 == 0, left, right)


def normals_like(key: Array, leaves: Sequence[Any]) -> list[Array]:
    """Draw normal numbers for every number of some real or complex arrays, in at least single precision.

    One draw for all of them: on a GPU the time is that of starting the kernels.
    """
    kinds = [jnp.promote_types(a.dtype, jnp.float32) for a in leaves]
    parts = [2 if jnp.issubdtype(kind, jnp.complexfloating) else 1 for kind in kinds]
    counts = [part * math.prod(a.shape) for part, a in zip(parts, leaves, strict=True)]
    drawn = normals(key, (sum(counts),))
    found = []
    for a, kind, part, end in zip(leaves, kinds, parts, itertools.accumulate(counts), strict=True):
        own = drawn[end - part * math.prod(a.shape) : end].reshape(part, *a.shape).astype(jnp.finfo(kind).dtype)
        found.append(own[0] if part == 1 else lax.complex(own[0], own[1]))
    return found


def _words(key: Array, shape: tuple[int, ...]) -> tuple[Array, Array]:
    """Return the upper and lower halves of random 64-bit words."""
    words = jax.random.key_data(jax.random.split(key, shape))
    return words[..., 0], words[..., 1]
