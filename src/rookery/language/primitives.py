"""The plan's primitives, which engines interpret. In the plan, a per-client value has a leading client axis."""

from typing import Any

import jax.numpy as jnp
from jaxtyping import Array

from rookery.base.compat import Primitive, ShapedArray

client_map = Primitive("client_map")  # ids, what the client is sent, its key, its earlier values -> its new values
scatter = Primitive("scatter")  # ids, rows at the server -> a value for each client
# ids, weights, who is present, what `unpack` closes over, per-client values -> weighted sums, who replied; in an
# asynchronous run, also the sum of the weights, their sum reduced by staleness, and the largest of these
reduce = Primitive("reduce")
gather = Primitive("gather")  # ids, who is present, per-client values -> rows at the server, who replied
center = Primitive("center")  # what the centre is sent, its key -> values at the server
loop = Primitive("loop")  # n, what the body closes over, carry -> carry
PRIMITIVES = (client_map, scatter, reduce, gather, center, loop)
for _primitive in PRIMITIVES:
    _primitive.multiple_results = True


def accumulator(dtype: Any) -> Any:
    """The type in which values of this type are added up: float32 or better."""
    return jnp.promote_types(dtype, jnp.float32)


def result_type(dtype: Any) -> Any:
    """The type of a mean of values of this type."""
    return dtype if jnp.issubdtype(dtype, jnp.inexact) else accumulator(dtype)


def sum_type(weights: Any, dtype: Any) -> Any:
    """The type in which values of this type are added up: their own if the weights are unsigned, as in a secure sum."""
    return dtype if jnp.issubdtype(weights, jnp.unsignedinteger) else accumulator(dtype)


def weighted_sum(weights: Array, rows: Array) -> Array:
    """Σ w_j v_j over the rows with a weight other than 0, in the type of a mean."""
    w = weights.astype(accumulator(rows.dtype)).reshape(-1, *(1,) * (rows.ndim - 1))
    return jnp.sum(jnp.where(w != 0, w * rows, 0), axis=0).astype(result_type(rows.dtype))


def largest_of(weights: Array) -> Array:
    """The largest absolute weight; 1 if all are 0."""
    most = jnp.max(jnp.abs(weights))
    return jnp.where(most > 0, most, 1)


def zeroed(present: Array, rows: Array) -> Array:
    """The rows, with zeros for clients that are not present."""
    return jnp.where(present.reshape(-1, *(1,) * (rows.ndim - 1)), rows, jnp.zeros((), rows.dtype))


def _like(variables: Any, *lead: int) -> list[Any]:
    return [ShapedArray((*lead, *v.aval.shape), v.aval.dtype) for v in variables]


client_map.def_abstract_eval(lambda ids, *_, work, **__: _like(work.outvars[:-1], *ids.shape))
center.def_abstract_eval(lambda *_, work, **__: _like(work.outvars[:-1]))
loop.def_abstract_eval(lambda *_, body, **__: _like(body.outvars))
scatter.def_abstract_eval(lambda ids, rows: [ShapedArray(rows.shape, rows.dtype)])


@reduce.def_abstract_eval
def _(
    ids: Any, weights: Any, *rows: Any, lossy: bool, unpack: Any = None, asynchronous: Any = None, **_: Any
) -> list[Any]:
    shapes = [(v.shape[1:], v.dtype) for v in rows[lossy:]]
    if unpack is not None:
        shapes = [(v.aval.shape, v.aval.dtype) for v in unpack.outvars]
    sums = [ShapedArray(shape, sum_type(weights.dtype, dtype)) for shape, dtype in shapes]
    totals = [ShapedArray((), weights.dtype)] * (0 if asynchronous is None else 3)
    return sums + [ShapedArray(weights.shape, jnp.bool_)] * lossy + totals


@gather.def_abstract_eval
def _(ids: Any, *rows: Any, lossy: bool, **_: Any) -> list[Any]:
    return [ShapedArray(v.shape, v.dtype) for v in (*rows[lossy:], *rows[:lossy])]
