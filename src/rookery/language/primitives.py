"""The plan's own primitives. A per-client value has a leading client axis in the plan; engines give the meaning."""

from typing import Any

import jax.numpy as jnp

from rookery.base.compat import Primitive, ShapedArray

client_map = Primitive("client_map")  # ids, what the client is sent, its key, its own values -> its new values
scatter = Primitive("scatter")  # ids, rows at the server -> a value for each client
reduce = Primitive("reduce")  # ids, weights, who is present, per-client values -> weighted sums, who replied
gather = Primitive("gather")  # ids, who is present, per-client values -> the rows at the server, who replied
center = Primitive("center")  # what the centre is sent, its key -> values at the server
loop = Primitive("loop")  # n, what the body closes over, carry -> carry
PRIMITIVES = (client_map, scatter, reduce, gather, center, loop)
for _primitive in PRIMITIVES:
    _primitive.multiple_results = True


def accumulator(dtype: Any) -> Any:
    """The type in which values of this type are added up: float32 or better."""
    return jnp.promote_types(dtype, jnp.float32)


def _like(variables: Any, *lead: int) -> list[Any]:
    return [ShapedArray((*lead, *v.aval.shape), v.aval.dtype) for v in variables]


client_map.def_abstract_eval(lambda ids, *_, work, **__: _like(work.outvars[:-1], *ids.shape))
center.def_abstract_eval(lambda *_, work, **__: _like(work.outvars[:-1]))
loop.def_abstract_eval(lambda *_, body, **__: _like(body.outvars))
scatter.def_abstract_eval(lambda ids, rows: [ShapedArray(rows.shape, rows.dtype)])


@reduce.def_abstract_eval
def _(ids: Any, weights: Any, *rows: Any, lossy: bool, **_: Any) -> list[Any]:
    sums = [ShapedArray(v.shape[1:], accumulator(v.dtype)) for v in rows[lossy:]]
    return sums + [ShapedArray(weights.shape, jnp.bool_)] * lossy


@gather.def_abstract_eval
def _(ids: Any, *rows: Any, lossy: bool, **_: Any) -> list[Any]:
    return [ShapedArray(v.shape, v.dtype) for v in (*rows[lossy:], *rows[:lossy])]
