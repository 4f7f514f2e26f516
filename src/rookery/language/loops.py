"""Loops and branches of a client's function, for compiled, vectorised and debugging runs."""

from collections.abc import Callable
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from rookery.base import compat, convolutions, jaxprs
from rookery.language import ledger
from rookery.language.ledger import WORK

C = TypeVar("C")


def fixed_loop(count: Any, step: Callable[[Any, C], C], start: C) -> C:
    """Compute `count` steps, in a loop of fixed length if the count is known before the run."""
    first: Any = np.int32(0)
    last: Any = np.int32(count) if isinstance(count, int) else jnp.asarray(count, jnp.int32)
    return jax.lax.fori_loop(first, last, step, start)


# A client's loop in a debugging run, which computes it turn by turn: see engines/simulation/debug.py.
client_loop = compat.Primitive("client_loop")
client_loop.multiple_results = True
client_loop.def_abstract_eval(lambda *_, body, carried, **__: [v.aval for v in body.outvars])


def _compiled_loop(count: Any, *values: Any, body: Any, go_on: Any, carried: int, before: int) -> list[Any]:
    """A `client_loop` inside a part of a debugging run that is compiled, such as a branch."""
    fixed, carry = values[: len(values) - carried], list(values[len(values) - carried :])

    def more(state: Any) -> Any:
        i, carry = state
        return (i < count) & (True if go_on is None else jaxprs.run(go_on[0], *(fixed[j] for j in go_on[1]), *carry)[0])

    step = lambda s: (s[0] + 1, jaxprs.run(body, *fixed, s[0], *s[1]))
    return jax.lax.while_loop(more, step, (jnp.int32(0), carry))[1]


compat.lower_as(client_loop, _compiled_loop)


def stepwise(turn: jaxprs.LoopBody, count: Any, before: int, go_on: Any, carry: C) -> tuple[C, Array]:
    """Compute a loop as a `client_loop`. Returns the carry and the counts of work."""

    def counting(i: Any, both: Any) -> tuple[Any, Any]:
        carry, added = turn(i, both[0])
        return (carry, ledger.add(both[1], added)), ()

    looped = jaxprs.LoopBody(counting, (carry, jnp.zeros((2, len(WORK)), jnp.uint32)))
    leaves, structure = jax.tree.flatten(looped.carry)
    body, fixed, more = looped.jaxpr, list(looped.consts), None
    if go_on is not None:
        traced, _ = jaxprs.trace(lambda *a: go_on(jax.tree.unflatten(structure, a)[0]), *leaves)
        condition, count_fixed = jaxprs.open_up(traced), len(fixed)
        more = (condition, tuple(range(count_fixed, count_fixed + len(traced.consts))))
        extra = condition.invars[: len(traced.consts)]  # read by the condition only, and ignored by the body
        inputs = [*body.invars[:count_fixed], *extra, *body.invars[count_fixed:]]
        body, fixed = jaxprs.part(body, body.eqns, inputs, body.outvars), [*fixed, *traced.consts]
    turns = jnp.asarray(count, jnp.int32)
    out = client_loop.bind(turns, *fixed, *leaves, body=body, go_on=more, carried=len(leaves), before=before)
    return jax.tree.unflatten(structure, out)


def rarely(condition: Any, compute: Callable[[], C], otherwise: C, products: bool = False) -> C:
    """Return compute() if the condition holds, else `otherwise`. Vectorised, it computes only where it holds."""
    closed = jax.make_jaxpr(compute)()  # its constants become arguments, which a batching rule can see
    jaxpr = convolutions.rewrite(closed.jaxpr) if products else closed.jaxpr
    leaves, structure = jax.tree.flatten(otherwise)

    @jax.custom_batching.custom_vmap
    def choose(condition: Any, inputs: list[Any], otherwise: list[Any]) -> list[Any]:
        return jax.lax.cond(condition, lambda: compat.eval_jaxpr(jaxpr, inputs), lambda: otherwise)

    @choose.def_vmap
    def clients_one_by_one(size: int, batched: Any, condition: Any, inputs: list[Any], otherwise: list[Any]) -> Any:
        per_client = lambda a, is_batched: a if is_batched else jnp.broadcast_to(a, (size, *a.shape))
        holds = per_client(condition, batched[0])
        order = jnp.argsort(~holds)  # the clients for which it holds come first

        def of_one(i: Array, values: list[Any]) -> list[Any]:
            j = order[i]
            arguments = [a[j] if is_batched else a for a, is_batched in zip(inputs, batched[1], strict=True)]
            new = compat.eval_jaxpr(jaxpr, arguments)
            return [value.at[j].set(one) for value, one in zip(values, new, strict=True)]

        start = [per_client(a, is_batched) for a, is_batched in zip(otherwise, batched[2], strict=True)]
        return jax.lax.fori_loop(0, jnp.sum(holds), of_one, start), [True] * len(start)

    return jax.tree.unflatten(structure, choose(condition, closed.consts, leaves))
