"""The mean of a loss over the rows of a batch: in one call if all rows count, row by row if some are padding."""

import functools
from collections.abc import Callable
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jaxtyping import Array

from rookery.base import tree
from rookery.data.rows import Batch, Chunks, Count
from rookery.problems.problems import Problem

C = TypeVar("C")
Data = Any  # a Batch, Chunks, or records.Drawn


def count_of(batch: Data) -> Count:
    """The number of samples in a batch."""
    if isinstance(batch, Chunks):
        return batch.total
    return jax.tree.leaves(batch.rows)[0].shape[0] if batch.mask is None else jnp.sum(batch.mask, dtype=jnp.int32)


def is_row_by_row(batch: Data) -> bool:
    """Return whether a mean over this batch is evaluated row by row."""
    return isinstance(batch, Chunks) or batch.mask is not None


def evaluate(loss: Callable[..., Any], batch: Data, random: bool, of: Callable[[Callable[..., Any]], C]) -> C:
    """Return `of` the mean of loss(*z, rows, key) over a batch, as a function of z.

    `of` is linear in that function: a value, a gradient, a product. `random`: whether the loss uses its key.
    """
    if isinstance(batch, Batch):
        if batch.mask is None:
            return of(lambda *z: loss(*z, batch.rows, batch.key if random else None))
        return _divided(of(_sum_of_valid(loss, batch, random)), jnp.sum(batch.mask))
    piece = lambda i: of(_sum_of_valid(loss, batch.get(i), random))
    zeros = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), jax.eval_shape(piece, 0))
    total = jax.lax.fori_loop(0, batch.pieces, lambda i, total: tree.add(total, piece(i)), zeros)
    return _divided(total, batch.total)


def row_by_row(loss: Callable[..., Any], batch: Batch, random: bool) -> Any:
    """The loss of each row by itself; if it is random, each row has its own key."""
    one = lambda row, key: loss(jax.tree.map(lambda a: a[None], row), key)
    if not random:
        return jax.vmap(lambda row: one(row, None))(batch.rows)
    count, key = jax.tree.leaves(batch.rows)[0].shape[0], batch.key
    assert key is not None
    keys = jax.vmap(lambda i: jax.random.fold_in(key, i))(jnp.arange(count, dtype=jnp.int32))
    return jax.vmap(one)(batch.rows, keys)


def _sum_of_valid(loss: Callable[..., Any], batch: Batch, random: bool) -> Callable[..., Any]:
    """The sum of the loss over the rows that are not padding, as a function of z."""

    def total(*z: tree.Tree) -> Any:
        losses = row_by_row(lambda *row: loss(*z, *row), batch, random)
        valid = lambda a: jnp.reshape(batch.mask, (-1,) + (1,) * (a.ndim - 1))  # type: ignore[arg-type]
        return jax.tree.map(lambda a: jnp.sum(a, axis=0, where=valid(a)), losses)

    return total


def _divided(total: C, count: Any) -> C:
    return jax.tree.map(lambda leaf: leaf / count.astype(leaf.dtype), total)


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def fixed_value(name: str, value: Array) -> Array:
    """The value of an oracle. Differentiating it raises an error, because the work would not be counted."""
    return value


@fixed_value.defjvp
def _(name: str, *_: Any) -> Any:
    raise TypeError(
        f"client.{name} must not be differentiated: the work would not be counted. Use the oracles client.{name}_x, "
        f"client.{name}_y or client.{name}_x_and_y."
    )


def share_features(problem: Problem, x: tree.Tree, upper: Data, lower: Data) -> bool:
    """Return whether two batches go through a problem's features as one.

    Their rows must have one structure and type and no padding, and no more numbers than x.
    """
    if problem.features is None or problem.random:
        return False
    if not all(isinstance(batch, Batch) and batch.mask is None for batch in (upper, lower)):
        return False
    flat: Any = [jax.tree.flatten(batch.rows) for batch in (upper, lower)]
    (first, structure), (second, other) = flat
    types = [[(a.shape[1:], a.dtype) for a in leaves] for leaves in (first, second)]
    numbers = lambda leaves: sum(jnp.size(leaf) for leaf in leaves)
    if structure != other or types[0] != types[1] or numbers(first + second) > numbers(jax.tree.leaves(x)):
        return False
    count = len(first[0]) + len(second[0])
    rows = [jax.ShapeDtypeStruct((count, *shape), dtype) for shape, dtype in types[0]]
    features = jax.eval_shape(problem.features, x, jax.tree.unflatten(structure, rows))
    return all(a.shape[:1] == (count,) for a in jax.tree.leaves(features))
