"""Rewrite convolutions and pooling as slices and matrix products.

With one kernel per client, and in loops on a CPU, XLA's convolutions and their gradients are many times slower than the
same arithmetic written as a product over patches. `rewrite` replaces them anywhere in a jaxpr. It is applied to a
client's whole function after differentiation, so that every convolution of a first or second derivative is replaced,
too.
"""

from collections.abc import Callable, Sequence
from functools import partial, reduce
from math import prod
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array

from rookery.base.compat import ClosedJaxpr, Jaxpr, eval_jaxpr, has_custom_derivative
from rookery.base.jaxprs import inlined, within

CHOICES = ("auto", "products", "xla")
_MOST_SLICES = 128  # convolutions and poolings that would need more are left as they are
_WIDE = 64  # length of a matrix row from which on a separate product pays


def check(choice: Any, where: str) -> None:
    """Raise ValueError unless the choice is known."""
    if choice not in CHOICES:
        raise ValueError(f'{where}: convolutions must be "auto", "products" or "xla"; got {choice!r}.')


def chosen(choice: str) -> bool:
    """Return whether to rewrite; "auto" does on CPUs and GPUs."""
    return choice == "products" or (choice == "auto" and jax.default_backend() in ("cpu", "gpu"))


def as_products(fn: Callable[..., Any]) -> Callable[..., Any]:
    """Return fn with its convolutions and pooling rewritten.

    Custom derivative rules around a convolution are dropped. Take derivatives first: as_products(jax.grad(f)).

    >>> image, kernel = jnp.ones((1, 1, 8, 8)), jnp.ones((2, 1, 3, 3))
    >>> same = as_products(lambda a, k: lax.conv(a, k, (1, 1), "VALID"))
    >>> same(image, kernel).shape, "conv" in str(jax.make_jaxpr(same)(image, kernel))
    ((1, 2, 6, 6), False)
    """

    def rewritten(*args: Any) -> Any:
        closed, shapes = jax.make_jaxpr(lambda *a: fn(*a), return_shape=True)(*args)
        out = eval_jaxpr(rewrite(closed.jaxpr), closed.consts, *jax.tree.leaves(args))
        return jax.tree.unflatten(jax.tree.structure(shapes), out)

    return rewritten


# The rewrite.


def rewrite(jaxpr: Jaxpr) -> Jaxpr:
    """Return the jaxpr with its convolutions and pooling rewritten; the same object if it has none."""
    if not _concerned(jaxpr):
        return jaxpr
    return jaxpr.replace(eqns=[new for eqn in jaxpr.eqns for new in _rewritten(eqn)])


def _concerned(jaxpr: Jaxpr) -> bool:
    """Return whether the jaxpr has anything to rewrite."""
    return any(_replacement(eqn) is not None or any(map(_concerned, within(eqn.params))) for eqn in jaxpr.eqns)


def _rewritten(eqn: Any) -> list[Any]:
    """Return the equations that replace an equation."""
    replacement = _replacement(eqn)
    if replacement is not None:
        return inlined(eqn, replacement)
    if not any(map(_concerned, within(eqn.params))):
        return [eqn]
    if has_custom_derivative(eqn):  # derivatives have been taken: only the function itself is needed
        body = eqn.params["call_jaxpr"]
        return inlined(eqn, lambda *a: eval_jaxpr(rewrite(body.jaxpr), body.consts, *a))
    return [eqn.replace(params={name: _rewritten_param(value) for name, value in eqn.params.items()})]


def _rewritten_param(value: Any) -> Any:
    if isinstance(value, ClosedJaxpr):
        return ClosedJaxpr(rewrite(value.jaxpr), value.consts)
    if isinstance(value, Jaxpr):
        return rewrite(value)
    return tuple(map(_rewritten_param, value)) if type(value) is tuple else value


def _replacement(eqn: Any) -> Callable[..., Any] | None:
    """Return a function that computes the same as an equation; None if the equation stays."""
    if any(0 in v.aval.shape for v in (*eqn.invars, *eqn.outvars)):
        return None
    if eqn.primitive is lax.conv_general_dilated_p:
        return _convolution(eqn)
    return _pooling(eqn) if eqn.primitive in _POOLING else None


# Convolutions: an image [n, *size, c] and a kernel [*kernel, c, o] give [n, *out, o].


class _Axis(NamedTuple):
    """A convolution along one of its spatial axes."""

    size: int  # of the image
    kernel: int
    out: int
    stride: int
    low: int  # padding before the image, which may be negative
    spread: int  # lhs_dilation: the distance of the image's entries
    dilation: int  # rhs_dilation: the distance of the kernel's entries

    @property
    def swapped(self) -> "_Axis":
        """The axis with kernel and output swapped."""
        return self._replace(kernel=self.out, out=self.kernel, stride=self.dilation, dilation=self.stride)

    def edge(self, first: int, length: int) -> tuple[int, int, int]:
        """Return the padding that makes the axis begin at `first`, in the kernel's coordinates, with this length."""
        before = self.low - first
        return before, length - before - ((self.size - 1) * self.spread + 1), self.spread - 1


Axes = Sequence[_Axis]
Dot = Callable[[Array, Array], Array]


def _convolution(eqn: Any) -> Callable[[Array, Array], Array] | None:
    params, (image, kernel), out = eqn.params, (v.aval for v in eqn.invars), eqn.outvars[0].aval
    of_image, of_kernel, of_out = params["dimension_numbers"]
    axes = [
        _Axis(image.shape[i], kernel.shape[k], out.shape[o], stride, low, spread, dilation)
        for i, k, o, stride, (low, _), spread, dilation in zip(
            of_image[2:], of_kernel[2:], of_out[2:], params["window_strides"], params["padding"],
            params["lhs_dilation"], params["rhs_dilation"], strict=True,
        )
    ]  # fmt: skip
    if min(_count(axes, "kernel"), _count(axes, "out")) > _MOST_SLICES:
        return None
    wide = jnp.promote_types(out.dtype, jnp.float32) if jnp.issubdtype(out.dtype, jnp.inexact) else out.dtype
    dot = partial(_dot, precision=params["precision"], dtype=wide)
    order = (of_out[0], *of_out[2:], of_out[1])
    back = [order.index(axis) for axis in range(len(order))]

    def convolve(image: Array, kernel: Array) -> Array:
        image = jnp.transpose(image, (of_image[0], *of_image[2:], of_image[1]))
        kernel = jnp.transpose(kernel, (*of_kernel[2:], of_kernel[1], of_kernel[0]))
        value = _grouped(image, kernel, axes, dot, params["feature_group_count"], params["batch_group_count"])
        return jnp.transpose(value, back).astype(out.dtype)

    return convolve


def _count(axes: Axes, of: str) -> int:
    return prod(getattr(axis, of) for axis in axes)


def _dot(a: Array, b: Array, precision: Any, dtype: Any) -> Array:
    return lax.dot_general(a, b, (((a.ndim - 1,), (0,)), ((), ())), precision=precision, preferred_element_type=dtype)


def _grouped(image: Array, kernel: Array, axes: Axes, dot: Dot, features: int, batches: int) -> Array:
    """Convolve in groups of the features or of the batch."""
    groups = max(features, batches)
    if groups == 1:
        return _convolved(image, kernel, axes, dot)
    at, last = image.ndim - 1 if features > 1 else 0, kernel.ndim - 1
    images = image.reshape(*image.shape[:at], groups, image.shape[at] // groups, *image.shape[at + 1 :])
    kernels = kernel.reshape(*kernel.shape[:-1], groups, kernel.shape[-1] // groups)
    value = jax.vmap(lambda a, k: _convolved(a, k, axes, dot), (at, last), last)(images, kernels)
    return value.reshape(*value.shape[:-2], -1)


def _convolved(image: Array, kernel: Array, axes: Axes, dot: Dot) -> Array:
    """Convolve in the form that copies least."""
    many, places, (c, o), n = _count(axes, "kernel"), _count(axes, "out"), kernel.shape[-2:], len(image)
    if places < many:  # the gradient of a kernel: few outputs, each of many inputs
        seen = jnp.moveaxis(kernel, -2, 0).reshape(-1, o).T
        pieces = _patches(jnp.swapaxes(image, 0, -1), [axis.swapped for axis in axes])  # as in the forward pass
        each = jnp.stack([dot(seen, piece.reshape(seen.shape[1], -1)) for piece in pieces])  # [pieces, o, out · n]
        value = jnp.moveaxis(each, 1, -1).reshape(*(axis.out for axis in axes), n, o)
        return jnp.moveaxis(value, -2, 0)
    if _count(axes, "size") * o < places * c:
        return _product_first(image, kernel, axes, dot)
    pieces = _patches(image, axes)
    kernels = kernel.reshape(len(pieces), -1, o)
    return reduce(lax.add, [dot(piece, kernels[i]) for i, piece in enumerate(pieces)])


def _patches(image: Array, axes: Axes) -> list[Array]:
    """Return the inputs of every output, side by side: [n, *out, kernel · c], in pieces along the last axis.

    On a CPU there is a piece for each entry of the kernel's first axis, unless the pieces would be small. Patches
    overlap in the image, and copying them in one piece would be most of the work. On a GPU one large product is faster.
    """
    reach = [(axis.kernel - 1) * axis.dilation + (axis.out - 1) * axis.stride + 1 for axis in axes]
    image = _padded(image, [axis.edge(0, length) for axis, length in zip(axes, reach, strict=True)])
    numbers = range(len(axes))
    if jax.default_backend() == "cpu" and len(axes) > 1 and _count(axes[1:], "kernel") * image.shape[-1] >= _WIDE:
        rows = _side_by_side(image, axes, numbers[1:])
        return [_entry(rows, axes, {0: k}) for k in range(axes[0].kernel)]
    return [_side_by_side(image, axes, numbers)]


def _side_by_side(image: Array, axes: Axes, along: Sequence[int]) -> Array:
    """Return the inputs along some of the axes, concatenated in the features."""
    entries = np.ndindex(*(axes[i].kernel for i in along))
    return jnp.concatenate([_entry(image, axes, dict(zip(along, entry, strict=True))) for entry in entries], axis=-1)


def _entry(image: Array, axes: Axes, at: dict[int, int]) -> Array:
    """Return the inputs of one entry of the kernel, at these positions of some axes; other axes stay as they are."""
    first, last, stride = [0] * image.ndim, list(image.shape), [1] * image.ndim
    for i, k in at.items():
        first[i + 1] = k * axes[i].dilation
        last[i + 1] = first[i + 1] + (axes[i].out - 1) * axes[i].stride + 1
        stride[i + 1] = axes[i].stride
    return lax.slice(image, first, last, stride)


def _product_first(image: Array, kernel: Array, axes: Axes, dot: Dot) -> Array:
    """Multiply every pixel by the whole kernel, and add up the contributions to each output."""
    c, o = kernel.shape[-2:]
    products = dot(image, jnp.moveaxis(kernel, -2, 0).reshape(c, -1))
    strides, parts = (1, *(axis.stride for axis in axes), 1), []
    for number, entry in enumerate(np.ndindex(*(axis.kernel for axis in axes))):
        part = lax.slice_in_dim(products, number * o, (number + 1) * o, axis=-1)
        edges = [
            axis.edge(k * axis.dilation, (axis.out - 1) * axis.stride + 1) for k, axis in zip(entry, axes, strict=True)
        ]
        part = _padded(part, edges)
        parts.append(lax.slice(part, (0,) * part.ndim, part.shape, strides))
    return _alone(reduce(lax.add, parts))


def _padded(image: Array, edges: Sequence[tuple[int, int, int]]) -> Array:
    if all(edge == (0, 0, 0) for edge in edges):
        return image
    return lax.pad(image, jnp.zeros((), image.dtype), [(0, 0, 0), *edges, (0, 0, 0)])


def _alone(total: Array) -> Array:
    """On a GPU, compute a sum in a separate kernel: fused with later reductions it would be slower."""
    return total if jax.default_backend() == "cpu" else lax.optimization_barrier(total)


# Pooling.


class _Windows(NamedTuple):
    """Windows over an array, with one entry for each of its axes."""

    size: tuple[int, ...]
    stride: tuple[int, ...]
    padding: tuple[tuple[int, int], ...]

    def entries(self, array: Array, fill: Any) -> list[Array]:
        """Return the first entry of each window, the second of each, and so on."""
        edges = [(low, high, 0) for low, high in self.padding]
        padded = lax.pad(array, jnp.asarray(fill, array.dtype), edges) if any(map(any, edges)) else array
        last = [(n - w) // s * s + 1 for n, w, s in zip(padded.shape, self.size, self.stride, strict=True)]
        firsts = np.ndindex(*self.size)
        return [lax.slice(padded, f, [a + b for a, b in zip(f, last, strict=True)], self.stride) for f in firsts]

    def put_back(self, entries: Sequence[Array], shape: Sequence[int]) -> Array:
        """Apply the transpose of `entries`: sum what every entry of the array has in its windows."""
        total: Any = None
        for first, entry in zip(np.ndindex(*self.size), entries, strict=True):
            edges = []
            for f, n, length, s, (low, _) in zip(first, shape, entry.shape, self.stride, self.padding, strict=True):
                edges.append((f - low, n + low - f - ((length - 1) * s + 1), s - 1))
            part = lax.pad(entry, jnp.zeros((), entry.dtype), edges)
            total = part if total is None else total + part
        return _alone(total)

    @property
    def apart(self) -> bool:
        """Whether windows neither overlap nor extend beyond the array."""
        return self.size == self.stride and not any(map(any, self.padding))

    def spread(self, value: Array, which: Array, shape: Sequence[int]) -> Array:
        """Return `put_back` of one value per window, at its `which`-th entry, for windows that are `apart`."""
        wide = [length for pair in zip(value.shape, self.size, strict=True) for length in pair]
        within = lambda a: lax.broadcast_in_dim(a, wide, range(0, 2 * a.ndim, 2))
        numbers = lax.iota(jnp.int32, prod(self.size)).reshape(self.size)
        here = within(which) == lax.broadcast_in_dim(numbers, wide, range(1, 2 * value.ndim, 2))
        covered = [a * b for a, b in zip(value.shape, self.size, strict=True)]
        spread = lax.select(here, within(value), jnp.zeros(wide, value.dtype)).reshape(covered)
        edges = [(0, n - length, 0) for n, length in zip(shape, covered, strict=True)]
        return lax.pad(spread, jnp.zeros((), value.dtype), edges) if list(shape) != covered else spread


def _pooling(eqn: Any) -> Callable[..., Any] | None:
    params = eqn.params
    dilated = (*params.get("base_dilation", ()), *params.get("window_dilation", ()))
    if any(d != 1 for d in dilated) or prod(params["window_dimensions"]) > _MOST_SLICES:
        return None
    windows = _Windows(params["window_dimensions"], params["window_strides"], params["padding"])
    return partial(_POOLING[eqn.primitive], windows, **{k: params[k] for k in ("select_prim",) if k in params})


def _limit(dtype: Any, largest: bool) -> Any:
    """Return the padding of a maximum (`largest`) or a minimum."""
    if jnp.issubdtype(dtype, jnp.inexact):
        return -jnp.inf if largest else jnp.inf
    return jnp.iinfo(dtype).min if largest else jnp.iinfo(dtype).max


def _gather_add(windows: _Windows, tangent: Array, array: Array, select_prim: Any) -> Array:
    """Return the tangent at the first of a window's extreme entries; 0 where all are −∞, as in XLA."""
    fill = _limit(array.dtype, select_prim is lax.ge_p)
    best: Any = None
    for value, change in zip(windows.entries(array, fill), windows.entries(tangent, 0), strict=True):
        if best is None:
            best, out = lax.full_like(value, fill), lax.full_like(change, 0)
        stays = select_prim.bind(best, value)
        best, out = lax.select(stays, best, value), lax.select(stays, out, change)
    return out


def _scatter_add(windows: _Windows, source: Array, array: Array, select_prim: Any) -> Array:
    """Apply the transpose of `_gather_add`: the first of a window's extreme entries gets the window's value."""
    fill = _limit(array.dtype, select_prim is lax.ge_p)
    best, *rest = windows.entries(array, fill)
    which = jnp.zeros(best.shape, jnp.int32)
    for number, value in enumerate(rest, 1):
        stays = select_prim.bind(best, value)
        best, which = lax.select(stays, best, value), jnp.where(stays, which, number)
    if windows.apart:
        return windows.spread(source, which, array.shape)
    parts = [jnp.where(which == number, source, 0) for number in range(1 + len(rest))]
    return windows.put_back(parts, array.shape)


_POOLING: dict[Any, Callable[..., Any]] = {
    lax.reduce_window_max_p: lambda windows, a: reduce(lax.max, windows.entries(a, _limit(a.dtype, True))),
    lax.reduce_window_min_p: lambda windows, a: reduce(lax.min, windows.entries(a, _limit(a.dtype, False))),
    lax.reduce_window_sum_p: lambda windows, a: reduce(lax.add, windows.entries(a, 0)),
    lax.select_and_gather_add_p: _gather_add,
    lax.select_and_scatter_add_p: _scatter_add,
}
