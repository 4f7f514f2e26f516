"""Values of many records at once, without forming the outer products that they contain.

A record's gradient in a dense layer is the outer product of the layer's input and the gradient of its output. Its norm
follows from these two factors, and a weighted sum of many records' gradients is a single matrix product of them.
"""

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from rookery.base import compat, jaxprs
from rookery.base.compat import Jaxpr, Literal, Var

_EXACT = lax.Precision.HIGHEST  # the norms and the sum must agree: no TF32


class _Term(NamedTuple):
    """A matrix product in a value: the equation, and the value's axes as axes of the product."""

    eqn: Any
    order: tuple[int, ...]
    negative: bool = False


@dataclass(frozen=True)
class _Leaf:
    """A value: the sum of matrix products (`terms`) with axes in one order or, without terms, any other value."""

    shape: tuple[int, ...]
    terms: tuple[_Term, ...] = ()

    @property
    def inner(self) -> int:
        """The length of the axis that the products sum over."""
        return sum(_contracted(term.eqn) for term in self.terms)


class Values:
    """The values fn(row) of many records, with outer products as their factors.

    Arguments:
        fn: the function of one record; `args` are an example of its arguments.
    """

    def __init__(self, fn: Callable[..., Any], *args: Any) -> None:
        closed, self.shapes = jaxprs.trace(fn, *args)
        jaxpr = jaxprs.open_up(closed)
        eqns = [each for eqn in jaxpr.eqns for each in _flat(eqn)]
        made = {v: eqn for eqn in eqns for v in eqn.outvars}
        self._leaves = [_leaf(v, made) for v in jaxpr.outvars]
        wanted: list[Any] = []
        for v, leaf in zip(jaxpr.outvars, self._leaves, strict=True):
            wanted += [factor for term in leaf.terms for factor in term.eqn.invars] if leaf.terms else [v]
        body, used = jaxprs.prune(jaxprs.part(jaxpr, eqns, jaxpr.invars, wanted))
        self._run = lambda *leaves: jaxprs.run(
            body, *(a for a, is_used in zip([*closed.consts, *leaves], used, strict=True) if is_used)
        )
        self.numbers = sum(math.prod(v.aval.shape) for v in wanted)  # kept for each record

    def of(self, *args: Any) -> list[Any]:
        """Return the values of the records along the arguments' leading axis: for each leaf an array or two factors."""
        flat = iter(jax.vmap(lambda *a: self._run(*jax.tree.leaves(a)))(*args))
        found: list[Any] = []
        for leaf in self._leaves:
            if not leaf.terms:
                found.append(next(flat))
                continue
            pairs = [_factors(term, next(flat), next(flat)) for term in leaf.terms]
            found.append(tuple(jnp.concatenate(side, axis=1) for side in zip(*pairs, strict=True)))
        return found

    def norms(self, values: Sequence[Any], units: Sequence[Array]) -> Float[Array, " n"]:
        """Return the norm of each record's value, with each leaf in its unit; NaN or ∞ if an entry is not finite."""
        return functools.reduce(_hypotenuse, (_norms(value) / unit for value, unit in zip(values, units, strict=True)))

    def sums(self, values: Sequence[Any], units: Sequence[Array], weights: Float[Array, " n"]) -> Any:
        """Return Σ weights_i · value_i, with each leaf in its unit; records of weight zero are ignored."""
        counts = weights != 0
        masked = lambda a: jnp.where(_per_record(counts, a), a, 0)
        total = []
        for leaf, value, unit in zip(self._leaves, values, units, strict=True):
            scaled = weights / unit
            if not leaf.terms:
                rows = masked(_wide(value))
                total.append(jnp.einsum("n,n...->...", scaled.astype(rows.dtype), rows, precision=_EXACT))
                continue
            both = [_scaled(a, (1, 2)) for a in value]  # as in `norms`, so that XLA computes it once
            sizes = [jnp.where(most > 0, size, 0) for _, size, most in both]
            factor = scaled.astype(sizes[0].dtype) * jnp.minimum(*sizes) * jnp.maximum(*sizes)  # so, without overflow
            left, right = (masked(a) for a, *_ in both)
            flat = (a.reshape(-1, a.shape[-1]) for a in (left * factor[:, None, None], right))
            product = jnp.einsum("np,nq->pq", *flat, precision=_EXACT)
            order = leaf.terms[0].order
            shape = [leaf.shape[order.index(axis)] for axis in range(len(order))]
            total.append(product.reshape(shape).transpose(order))
        return jax.tree.unflatten(jax.tree.structure(self.shapes), total)


def _hypotenuse(a: Array, b: Array) -> Array:
    """√(a² + b²) without overflow."""
    most, least = jnp.maximum(a, b), jnp.minimum(a, b)
    return most * jnp.sqrt(1 + (least / jnp.where(most > 0, most, 1)) ** 2)


def _norms(value: Any) -> Array:
    if not isinstance(value, tuple):
        rows, size, _ = _scaled(value, tuple(range(1, value.ndim)))
        return size * jnp.sqrt(jnp.sum(rows**2, axis=tuple(range(1, value.ndim))))
    (left, one, _), (right, other, _) = (_scaled(a, (1, 2)) for a in value)
    size = one * other
    if left.shape[1] == 1:
        return size * jnp.sqrt(jnp.sum(left**2, axis=(1, 2))) * jnp.sqrt(jnp.sum(right**2, axis=(1, 2)))
    # ‖Σ_k l_k ⊗ r_k‖² = Σ_jk ⟨l_j, l_k⟩⟨r_j, r_k⟩. Terms may cancel, so a bound on the rounding is added.
    gram = lambda a: jnp.einsum("nkp,njp->nkj", a, a, precision=_EXACT)
    square = jnp.sum(gram(left) * gram(right), axis=(1, 2))
    apart = jnp.sum(jnp.sqrt(jnp.sum(left**2, axis=2) * jnp.sum(right**2, axis=2)), axis=1)
    rounding = (left.shape[1] + left.shape[2] + right.shape[2]) * float(jnp.finfo(left.dtype).eps)
    return size * jnp.sqrt(jnp.maximum(square, 0) + rounding * apart**2)


def _scaled(a: Array, axes: tuple[int, ...]) -> tuple[Array, Array, Array]:
    """Return each record's entries divided by a scale, so that no square overflows, the scale, and the largest entry.

    The scale is near the largest entry, positive and finite.
    """
    a = _wide(a)
    most = jnp.max(jnp.abs(a), axis=axes, initial=0)
    limit = float(jnp.finfo(a.dtype).max) / 8  # above it, 1/most is flushed to zero
    scale = jnp.where(most > 0, jnp.clip(most, 1 / limit, limit), 1)
    return a / _per_record(scale, a), scale, most


def _wide(a: Array) -> Array:
    return a.astype(jnp.promote_types(a.dtype, jnp.float32))


def _per_record(rows: Array, like: Array) -> Array:
    return rows.reshape(-1, *(1,) * (like.ndim - 1))


# Which values are matrix products.


def _leaf(v: Any, made: dict[Var, Any]) -> _Leaf:
    terms = _terms(v, made)
    if terms and len({term.order for term in terms}) == 1:
        leaf = _Leaf(v.aval.shape, tuple(terms))
        rows = _free(terms[0].eqn)[0]
        sizes = math.prod(rows), math.prod(v.aval.shape) // max(1, math.prod(rows))
        if leaf.inner * sum(sizes) < math.prod(sizes):  # cheaper than the product, and smaller
            return leaf
    return _Leaf(v.aval.shape)


def _terms(v: Any, made: dict[Var, Any]) -> list[_Term] | None:
    """Return the matrix products whose sum is a value; None if it is computed otherwise."""
    if isinstance(v, Literal) or v not in made:
        return None
    eqn = made[v]
    if eqn.primitive is lax.dot_general_p:
        (_, _), batch = eqn.params["dimension_numbers"]
        same = {a.aval.dtype for a in eqn.invars} == {v.aval.dtype}
        return None if any(batch) or not same else [_Term(eqn, tuple(range(len(v.aval.shape))))]
    if eqn.primitive is lax.transpose_p:
        found = _terms(eqn.invars[0], made)
        by = eqn.params["permutation"]
        return found and [term._replace(order=tuple(term.order[axis] for axis in by)) for term in found]
    if eqn.primitive is lax.neg_p:
        found = _terms(eqn.invars[0], made)
        return found and [term._replace(negative=not term.negative) for term in found]
    if compat.adds(eqn):
        parts = [_terms(each, made) for each in eqn.invars]
        return [term for part in parts for term in part or []] if all(parts) else None
    return None


def _contracted(eqn: Any) -> int:
    (axes, _), _ = eqn.params["dimension_numbers"]
    return math.prod(eqn.invars[0].aval.shape[axis] for axis in axes)


def _free(eqn: Any) -> list[tuple[int, ...]]:
    """The sizes of both operands' axes that a matrix product does not sum over."""
    contracted, _ = eqn.params["dimension_numbers"]
    shapes = [v.aval.shape for v in eqn.invars]
    return [
        tuple(size for axis, size in enumerate(shape) if axis not in axes)
        for shape, axes in zip(shapes, contracted, strict=True)
    ]


def _factors(term: _Term, left: Array, right: Array) -> tuple[Array, Array]:
    """The operands of all records as matrices [n, inner, outer]."""
    contracted, _ = term.eqn.params["dimension_numbers"]
    inner = _contracted(term.eqn)
    sides = []
    for a, axes in zip((left, right), contracted, strict=True):
        first = jnp.moveaxis(a, [axis + 1 for axis in axes], range(1, 1 + len(axes)))
        sides.append(first.reshape(a.shape[0], inner, -1))
    return (-sides[0] if term.negative else sides[0]), sides[1]


def _flat(eqn: Any) -> list[Any]:
    """The equations of a jitted function that has a matrix product; any other equation as it is."""
    if not {"name", "jaxpr"} <= eqn.params.keys() or not _has_product(eqn.params["jaxpr"].jaxpr):
        return [eqn]
    inner = eqn.params["jaxpr"]
    eqns = jaxprs.inlined(eqn, lambda *a: compat.eval_jaxpr(inner.jaxpr, inner.consts, *a))
    return eqns if eqns == [eqn] else [each for one in eqns for each in _flat(one)]


def _has_product(jaxpr: Jaxpr) -> bool:
    return any(
        eqn.primitive is lax.dot_general_p or any(map(_has_product, jaxprs.within(eqn.params))) for eqn in jaxpr.eqns
    )
