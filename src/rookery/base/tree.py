"""Arithmetic on pytrees: the operations that algorithms are written in."""

import functools
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PyTree

Tree: TypeAlias = Any  # a pytree of floating-point arrays
Scalar = float | Float[Array, ""]

# Not `optax.tree`, whose operations differ: `add` starts from 0, `sub` leaves NumPy leaves to NumPy (in float64), and
# `vdot` and `norm` round differently. Results would change in the last bits.


def add(a: Tree, b: Tree) -> Tree:
    """a + b."""
    return jax.tree.map(jnp.add, a, b)


def sub(a: Tree, b: Tree) -> Tree:
    """a − b."""
    return jax.tree.map(jnp.subtract, a, b)


def scale(c: Scalar, a: Tree) -> Tree:
    """c·a."""
    return jax.tree.map(lambda leaf: c * leaf, a)


def step(z: Tree, size: Scalar, direction: Tree) -> Tree:
    """z − size·direction: the form of every update of every algorithm."""
    return jax.tree.map(lambda leaf, d: leaf - size * d, z, direction)


def dot(a: Tree, b: Tree) -> Float[Array, ""]:
    """⟨a, b⟩ over all leaves."""
    products = jax.tree.leaves(jax.tree.map(lambda u, v: jnp.sum(u * v), a, b))
    return functools.reduce(jnp.add, products)


def norm(a: Tree) -> Float[Array, ""]:
    """The Euclidean norm over all leaves."""
    return jnp.sqrt(dot(a, a))


def clipped(a: Tree, bound: Scalar) -> Tree:
    """a·min(1, bound/‖a‖), or zero if (‖a‖/bound)² is not finite in single precision or in the type of a."""
    leaves = [leaf.astype(jnp.promote_types(leaf.dtype, jnp.float32)) for leaf in jax.tree.leaves(a) if leaf.size]
    if not leaves:
        return a
    # In units of the bound, entries whose squares are flushed to zero are too small to count. The reciprocal of a
    # larger bound would be flushed to zero itself.
    reciprocal = 1 / jnp.minimum(bound, 1e30)
    squares = (jnp.sum(jnp.square(jnp.abs(leaf * reciprocal.astype(leaf.real.dtype)))) for leaf in leaves)
    square = functools.reduce(jnp.add, squares)
    factor = 1 / jnp.sqrt(jnp.maximum(square, 1))  # not positive if `square` is not finite

    def shrunk(leaf: Array) -> Array:
        by = factor
        if jnp.finfo(leaf.dtype).bits < 32:  # rounding a short number to nearest could exceed the bound
            by = jnp.where(square > 1, factor * (1 - float(jnp.finfo(leaf.dtype).eps)), 1)
        return jnp.where(factor > 0, (leaf * by).astype(leaf.dtype), jnp.zeros((), leaf.dtype))

    return jax.tree.map(shrunk, a)


def zeros_like(a: Tree) -> Tree:
    """Zeros of the shape of a."""
    return jax.tree.map(jnp.zeros_like, a)


def nbytes(a: PyTree[Any]) -> int:
    """Return the bytes that the arrays take when they are sent."""
    return sum(int(leaf.size) * jnp.dtype(leaf.dtype).itemsize for leaf in jax.tree.leaves(a))


def path_name(path: tuple[Any, ...]) -> str:
    """Return a leaf's path in its pytree, for messages."""
    return jax.tree_util.keystr(path) or "(the array itself)"
