"""Jaxprs as data: constants as inputs, pruning, extraction, loop bodies and fingerprints."""

import dataclasses
import enum
import hashlib
import types
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from rookery.base import compat, content, tree
from rookery.base.compat import ClosedJaxpr, Jaxpr, Literal, Var, jaxpr_as_fun


def trace(fn: Callable[..., Any], *args: Any) -> tuple[ClosedJaxpr, Any]:
    """Return fn's jaxpr and the shapes of its result. Always traces: JAX would reuse the trace of a known function."""
    return jax.make_jaxpr(lambda *a: fn(*a), return_shape=True)(*args)


def strong(a: Any) -> Array:
    """Return an array without a weak type, which a Python number would have."""
    a = jnp.asarray(a)
    return a if jax.dtypes.issubdtype(a.dtype, jax.dtypes.prng_key) else jnp.asarray(a, a.dtype)


def open_up(closed: ClosedJaxpr) -> Jaxpr:
    """Return the jaxpr with its constants as additional inputs, in front."""
    jaxpr = closed.jaxpr
    return part(jaxpr, jaxpr.eqns, [*jaxpr.constvars, *jaxpr.invars], jaxpr.outvars)


def prune(jaxpr: Jaxpr, needed: Sequence[bool] | None = None) -> tuple[Jaxpr, list[bool]]:
    """Remove dead code. Returns the jaxpr and which of its inputs it still uses."""
    pruned, used = compat.without_unused(jaxpr, list(needed or [True] * len(jaxpr.outvars)))
    return pruned, list(used)


def part(jaxpr: Jaxpr, eqns: Sequence[Any], inputs: Sequence[Var], outputs: Sequence[Any]) -> Jaxpr:
    """Return some equations of a jaxpr as a jaxpr of their own."""
    effects = frozenset().union(*(eqn.effects for eqn in eqns))
    return jaxpr.replace(
        constvars=(), invars=list(inputs), outvars=list(outputs), eqns=list(eqns), effects=effects,
        debug_info=jaxpr.debug_info._replace(arg_names=None, result_paths=None),
    )  # fmt: skip


def run(jaxpr: Jaxpr, *args: Any) -> list[Any]:
    """Evaluate a jaxpr without constants."""
    out = jaxpr_as_fun(ClosedJaxpr(jaxpr, ()))(*args)
    return [literal(v) if isinstance(v, Literal) else value for v, value in zip(jaxpr.outvars, out, strict=True)]


def free_vars(eqns: Iterable[Any]) -> list[Var]:
    """Return the variables that the equations read but do not compute, in the order of reading."""
    made: set[Var] = set()
    free: dict[Var, None] = {}
    for eqn in eqns:
        free.update(dict.fromkeys(v for v in eqn.invars if not isinstance(v, Literal) and v not in made))
        made.update(eqn.outvars)
    return list(free)


def dependencies(jaxpr: Jaxpr) -> dict[Var, list[Var]]:
    """Return, for each output, the inputs that it depends on, in order."""
    order = {v: i for i, v in enumerate(jaxpr.invars)}
    read: dict[Var, frozenset[Var]] = {v: frozenset([v]) for v in jaxpr.invars}
    for eqn in jaxpr.eqns:
        found = frozenset().union(*(read[v] for v in eqn.invars if not isinstance(v, Literal)))
        read.update(dict.fromkeys(eqn.outvars, found))
    return {v: sorted(read[v], key=order.__getitem__) for v in jaxpr.outvars if not isinstance(v, Literal)}


def within(value: Any) -> list[Jaxpr]:
    """Return the jaxprs in an equation's parameters."""
    if isinstance(value, ClosedJaxpr):
        return [value.jaxpr]
    if isinstance(value, Jaxpr):
        return [value]
    each = value.values() if isinstance(value, dict) else value if isinstance(value, tuple | list) else ()
    return [jaxpr for v in each for jaxpr in within(v)]


def literal(v: Literal) -> Array:
    """Return a literal's value in its type: JAX may hold a Python number."""
    return jnp.asarray(v.val, getattr(v.aval, "dtype", None))


DRAWN_AHEAD = 2**17  # bytes of one value that is drawn before a loop, for all of its turns


class LoopBody:
    """A loop's body, fn(i, carry) -> (carry, aux), traced once; random draws can be made before the loop.

    Attributes:
        carry: the initial carry.
        consts: the values that fn closes over.
        aux: its shapes.
        jaxpr: a jaxpr of (consts, i, carry, draws).
    """

    def __init__(self, fn: Callable[[Any, Any], tuple[Any, Any]], carry: Any) -> None:
        for attempt in (1, 2):
            leaves, structure = jax.tree.flatten(carry)
            self._structure: Any = structure
            traced, shapes = trace(fn, jax.ShapeDtypeStruct((), jnp.int32), carry)
            outs = shapes[0]
            after: Any = jax.tree.structure(outs)
            if after != structure:
                raise TypeError(
                    f"A loop's body returns the structure {after}, its carry has {self._structure}; they must agree."
                )
            paths = jax.tree_util.tree_leaves_with_path(carry)
            mixed = [
                (path, old, new)
                for (path, old), new in zip(paths, jax.tree.leaves(outs), strict=True)
                if (jnp.shape(old), jax.typeof(old).dtype) != (new.shape, new.dtype)
            ]
            weak = all(jax.typeof(old).weak_type and jnp.shape(old) == new.shape for _, old, new in mixed)
            if not mixed or not weak or attempt == 2:
                break
            carry = jax.tree.map(lambda old, new: jnp.asarray(old, new.dtype), carry, outs)
        if mixed:
            path, old, new = mixed[0]
            raise TypeError(
                f"A loop's body changes {tree.path_name(path)} of its carry from {jax.typeof(old).dtype}"
                f"{jnp.shape(old)} to {new.dtype}{new.shape}; shape and type must stay as they are."
            )
        self.carry = jax.tree.map(strong, carry)
        self.consts, self.aux = traced.consts, shapes[1]
        self.jaxpr, self._count, self._const_count = open_up(traced), len(leaves), len(traced.consts)

    def __call__(self, i: Any, carry: Any, drawn: Sequence[Array] = ()) -> tuple[Any, Any]:
        """Return the carry after iteration i, and the aux; `drawn` is that iteration's row of the result of `ahead`."""
        out = run(self.jaxpr, *self.consts, jnp.asarray(i, jnp.int32), *jax.tree.leaves(carry), *drawn)
        aux = jax.tree.unflatten(jax.tree.structure(self.aux), out[self._count :])
        return jax.tree.unflatten(self._structure, out[: self._count]), aux

    def constants_of_aux(self) -> Any | None:
        """Return the aux if it is the same in every iteration, else None."""
        jaxpr, used = prune(self.jaxpr, [False] * self._count + [True] * (len(self.jaxpr.outvars) - self._count))
        if any(used[self._const_count :]):
            return None
        inputs = [c for c, is_used in zip(self.consts, used, strict=False) if is_used]
        return jax.tree.unflatten(jax.tree.structure(self.aux), run(jaxpr, *inputs))

    def before(self, most: int | None, limit: int = DRAWN_AHEAD) -> Callable[[Any], list[Array]]:
        """Draw ahead for a loop of at most `most` iterations, and return the draws as a function of the iteration.

        A value of all iterations has at most `limit` bytes. With `most` None nothing is drawn ahead.
        """
        rows = self.ahead(limit // most)(jnp.arange(most, dtype=jnp.int32)) if most else []
        return lambda i: [jax.lax.dynamic_index_in_dim(a, jnp.asarray(i, jnp.int32), keepdims=False) for a in rows]

    def ahead(self, limit: int = DRAWN_AHEAD) -> Callable[[Array], list[Array]]:
        """Return a function that draws for several iterations together; each iteration then takes its row.

        It draws keys and random integers that do not depend on the carry, each of at most `limit` bytes. Calls of one
        jitted function with the same values are made once. See `_can_be_ahead` for what stays in the loop.
        """
        jaxpr, inputs = self.jaxpr, self._const_count + 1
        known = {*jaxpr.invars[:inputs]}
        calls: dict[Any, Any] = {}
        same: dict[Var, Var] = {}
        for eqn in jaxpr.eqns:
            read = [v for v in eqn.invars if not isinstance(v, Literal)]
            if not known.issuperset(read) or not _can_be_ahead(eqn, _SPARE * limit):
                continue
            known.update(eqn.outvars)
            if _draws(eqn) and all(_is_whole(v.aval) and _nbytes(v.aval) <= limit for v in eqn.outvars):
                given = tuple(
                    _array(np.asarray(v.val)) if isinstance(v, Literal) else same.get(v, v) for v in eqn.invars
                )
                what = eqn.params["jaxpr"] if {"name", "jaxpr"} <= eqn.params.keys() else id(eqn)  # a jitted function
                same.update(zip(eqn.outvars, calls.setdefault((what, given), eqn).outvars, strict=True))
        rename = lambda v: same.get(v, v) if isinstance(v, Var) else v
        eqns = [
            eqn.replace(invars=[rename(v) for v in eqn.invars])
            for eqn in jaxpr.eqns
            if not eqn.outvars or not same.keys() >= set(eqn.outvars)
        ]
        outvars: list[Any] = [rename(v) for v in jaxpr.outvars]
        found = [v for eqn in calls.values() for v in eqn.outvars]
        rest, used = prune(part(jaxpr, eqns, [*jaxpr.invars, *found], outvars))
        drawn = [v for v, is_used in zip(found, used[len(jaxpr.invars) :], strict=True) if is_used]
        first, needed = prune(part(jaxpr, [eqn for eqn in jaxpr.eqns if not eqn.effects], jaxpr.invars, drawn))
        self.jaxpr = part(rest, rest.eqns, [*jaxpr.invars, *drawn], rest.outvars)

        def row(i: Array) -> list[Array]:
            return run(first, *(a for a, is_needed in zip([*self.consts, i], needed, strict=False) if is_needed))

        return lambda turns: list(jax.vmap(row)(turns)) if drawn else []


_SPARE = 64  # bytes of working memory for each byte of a result: a shuffle needs 24


def _can_be_ahead(eqn: Any, limit: int) -> bool:
    """Return whether an equation can be computed for many iterations together, with the same numbers and little memory.

    Generators other than JAX's default draw different numbers when vectorised, callbacks may not allow it, and a
    condition would be computed both ways. Results, inner ones included, must have at most `limit` bytes. JAX's check
    for reused keys takes a row of a table for the same key in every iteration.
    """
    made, read = [v.aval for v in eqn.outvars], [v.aval for v in eqn.invars]
    if eqn.effects or eqn.primitive in compat.IN_TURN or compat.is_foreign(eqn):
        return False
    if any(_is_key(aval) and str(aval.dtype) != "key<fry>" for aval in [*made, *read]):
        return False
    if any(_nbytes(aval) > limit for aval in made) or compat.looks_for_reused_keys():
        return False
    return all(_can_be_ahead(each, limit) for jaxpr in within(eqn.params) for each in jaxpr.eqns)


def _draws(eqn: Any) -> bool:
    """Return whether an equation, or a function that it calls, derives keys or draws."""
    return (
        compat.derives_keys(eqn)
        or eqn.params.get("name") == "minibatch"
        or any(_draws(each) for jaxpr in within(eqn.params) for each in jaxpr.eqns)
    )


def largest_draw(jaxpr: Jaxpr) -> int:
    """Return the largest number of random words that one equation draws, in called functions, too."""
    avals: list[Any] = [eqn.outvars[0].aval for eqn in jaxpr.eqns if compat.draws_words(eqn)]
    return max(
        [0, *(aval.size for aval in avals), *(largest_draw(each) for eqn in jaxpr.eqns for each in within(eqn.params))]
    )


def _is_whole(aval: Any) -> bool:
    return not jnp.issubdtype(aval.dtype, jnp.inexact)


def _is_key(aval: Any) -> bool:
    return hasattr(aval, "dtype") and jax.dtypes.issubdtype(aval.dtype, jax.dtypes.prng_key)


def _nbytes(aval: Any) -> int:
    return int(aval.size) * (8 if _is_key(aval) else aval.dtype.itemsize) if hasattr(aval, "dtype") else 0


def identified(jaxpr: Jaxpr, also: Any = ()) -> "tuple[str, tuple[Same, ...]]":
    """Return a program's fingerprint, and the Python objects that it calls or refers to.

    Two programs share a fingerprint only if their equations, types and JAX settings are the same. Constants must be
    inputs. The fingerprint is the same in every process: callbacks are identified by their code and content. (With an
    object that does not reveal its content, it is valid in this process only.)

    A compiled program calls the very objects that it was traced with, so within a process these are compared, too.
    """
    walker = _Walker()
    digest = hashlib.sha256(repr((also, _settings())).encode())
    digest.update(walker.text(jaxpr).encode())
    return digest.hexdigest(), tuple(walker.objects)


def fingerprint(jaxpr: Jaxpr, also: Any = ()) -> str:
    """Return a program's fingerprint: see `identified`."""
    return identified(jaxpr, also)[0]


class Same:
    """An object that equals only itself or, if its class belongs to JAX or NumPy, an equal one."""

    def __init__(self, value: Any) -> None:
        self._value = value

    def __hash__(self) -> int:
        return hash(type(self._value))

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Same):
            return NotImplemented
        mine, theirs = self._value, other._value
        return mine is theirs or (content.of_jax(mine) and type(mine) is type(theirs) and bool(mine == theirs))


def _settings() -> tuple[Any, ...]:
    """Return the JAX settings that a program depends on."""
    config: Any = jax.config
    return config.jax_enable_x64, config.jax_default_matmul_precision, config.jax_threefry_partitionable


ONE_BY_ONE = "clients_one_by_one"  # the name of the batching rule of `Client.when`
_PLAIN = (type(None), bool, int, float, complex, str, bytes)


def _qualified(kind: Any) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"


class _Walker:
    """Writes a jaxpr as text, and collects the objects that text cannot represent."""

    def __init__(self) -> None:
        self._seen: dict[int, str] = {}
        self.objects: list[Same] = []

    def text(self, jaxpr: Jaxpr) -> str:
        if id(jaxpr) in self._seen:
            return self._seen[id(jaxpr)]
        numbers: dict[Var, int] = {}

        def name(v: Any) -> str:
            if isinstance(v, Literal):
                return f"{_array(np.asarray(v.val))}:{v.aval}"
            return f"v{numbers.setdefault(v, len(numbers))}"

        typed = lambda v: f"{name(v)}:{v.aval}:{getattr(v.aval, 'weak_type', False)}"
        lines = [" ".join(map(typed, [*jaxpr.constvars, *jaxpr.invars]))]
        for eqn in jaxpr.eqns:
            derived = compat.has_custom_derivative(eqn)  # derivatives have been taken: rules are not used
            params = " ".join(
                f"{key}={self._param(value)}"
                for key, value in sorted(eqn.params.items())
                if key != "source" and not (derived and callable(value))
            )
            made, given = " ".join(map(typed, eqn.outvars)), " ".join(map(name, eqn.invars))
            lines.append(f"{made} = {eqn.primitive} {params} {given}")
        lines.append(" ".join(map(name, jaxpr.outvars)))
        self._seen[id(jaxpr)] = hashlib.sha256("\n".join(lines).encode()).hexdigest()
        return self._seen[id(jaxpr)]

    def _param(self, value: Any) -> str:
        kind = type(value)
        if kind in _PLAIN:
            return f"{kind.__name__}:{value!r}"
        if isinstance(value, ClosedJaxpr):
            return self.text(value.jaxpr) + "".join(_array(c) for c in value.consts)
        if isinstance(value, Jaxpr):
            return self.text(value)
        if isinstance(value, np.ndarray | np.generic | jax.Array) or kind.__name__ == "TypedNdArray":
            return _array(value)
        if isinstance(value, tuple | list | set | frozenset):
            each = [self._param(v) for v in value]
            return f"{_qualified(kind)}({','.join(sorted(each) if isinstance(value, set | frozenset) else each)})"
        if isinstance(value, dict):
            return "{" + ",".join(f"{self._param(k)}:{self._param(v)}" for k, v in value.items()) + "}"
        if isinstance(value, enum.Enum):
            return f"{_qualified(kind)}.{value.name}"
        if isinstance(value, type | types.ModuleType | np.dtype):
            return f"{kind.__name__}:{getattr(value, '__module__', '')}.{getattr(value, '__qualname__', value)}"
        if getattr(getattr(value, "rule", value), "__name__", "") == ONE_BY_ONE:
            return ONE_BY_ONE  # the function next to it determines what it does
        self.objects.append(Same(value))
        if content.of_jax(value) and not dataclasses.is_dataclass(value):
            text = repr(value)
            return text if " at 0x" not in text else self._own(value)
        return content.Content(self._own).of(value)

    def _own(self, value: Any) -> str:
        return f"{_qualified(type(value))}@{id(value)}"


def _array(value: Any) -> str:
    if jax.dtypes.issubdtype(value.dtype, jax.dtypes.prng_key):
        value = jax.random.key_data(value)
    array = np.asarray(value)
    return f"{array.dtype}{array.shape}{hashlib.sha256(np.ascontiguousarray(array).tobytes()).hexdigest()}"


def digest(*values: Any) -> str:
    """Return a digest of texts and arrays."""
    each = (value if isinstance(value, str) else _array(value) for value in values)
    return hashlib.sha256("\n".join(each).encode()).hexdigest()
