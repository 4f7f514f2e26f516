"""Jaxprs as data: tracing, pruning and slicing them, loop bodies, and fingerprints."""

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
    """The jaxpr of fn and the shapes of its result. The lambda makes JAX trace again rather than reuse a trace."""
    return jax.make_jaxpr(lambda *a: fn(*a), return_shape=True)(*args)


def strong(a: Any) -> Array:
    """The value as an array that is not weakly typed."""
    a = jnp.asarray(a)
    return a if is_key(a) else jnp.asarray(a, a.dtype)


def is_key(value: Any) -> bool:
    """Return whether an array, or its shape and type, holds random keys."""
    return hasattr(value, "dtype") and bool(jax.dtypes.issubdtype(value.dtype, jax.dtypes.prng_key))


def open_up(closed: ClosedJaxpr) -> Jaxpr:
    """The jaxpr with its constants as its first inputs."""
    jaxpr = closed.jaxpr
    return part(jaxpr, jaxpr.eqns, [*jaxpr.constvars, *jaxpr.invars], jaxpr.outvars)


def prune(jaxpr: Jaxpr, needed: Sequence[bool] | None = None) -> tuple[Jaxpr, list[bool]]:
    """Remove dead code. Returns the jaxpr and which of its inputs it still uses. `needed`: which outputs to keep."""
    return compat.without_unused(jaxpr, list(needed or [True] * len(jaxpr.outvars)))


def part(jaxpr: Jaxpr, eqns: Sequence[Any], inputs: Sequence[Var], outputs: Sequence[Any]) -> Jaxpr:
    """Some equations of a jaxpr, as a separate jaxpr."""
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
    """The variables that the equations read but do not define, in the order of reading."""
    made: set[Var] = set()
    free: dict[Var, None] = {}
    for eqn in eqns:
        free.update(dict.fromkeys(v for v in eqn.invars if not isinstance(v, Literal) and v not in made))
        made.update(eqn.outvars)
    return list(free)


def dependencies(jaxpr: Jaxpr) -> dict[Var, list[Var]]:
    """For each output, the inputs that it depends on, in order."""
    order = {v: i for i, v in enumerate(jaxpr.invars)}
    sources: dict[Var, frozenset[Var]] = {v: frozenset([v]) for v in jaxpr.invars}
    for eqn in jaxpr.eqns:
        inputs = frozenset().union(*(sources[v] for v in eqn.invars if not isinstance(v, Literal)))
        sources.update(dict.fromkeys(eqn.outvars, inputs))
    return {v: sorted(sources[v], key=order.__getitem__) for v in jaxpr.outvars if not isinstance(v, Literal)}


def within(value: Any) -> list[Jaxpr]:
    """The jaxprs in an equation's parameters."""
    if isinstance(value, ClosedJaxpr):
        return [value.jaxpr]
    if isinstance(value, Jaxpr):
        return [value]
    each = value.values() if isinstance(value, dict) else value if isinstance(value, tuple | list) else ()
    return [jaxpr for v in each if type(v) not in _PLAIN for jaxpr in within(v)]


def inlined(eqn: Any, fn: Callable[..., Any]) -> list[Any]:
    """Return the equations of fn, which computes the same as an equation, from its inputs to its outputs."""
    like = lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, weak_type=getattr(a, "weak_type", False))
    closed = jax.make_jaxpr(fn)(*(like(v.aval) for v in eqn.invars))
    body = closed.jaxpr
    computed = {v for new in body.eqns for v in new.outvars}
    if closed.consts or len({v for v in body.outvars if v in computed}) < len(body.outvars):
        return [eqn]
    names: dict[Var, Any] = dict(zip([*body.invars, *body.outvars], [*eqn.invars, *eqn.outvars], strict=True))
    rename = lambda v: v if isinstance(v, Literal) else names.get(v, v)
    return [
        new.replace(invars=[*map(rename, new.invars)], outvars=[*map(rename, new.outvars)], source_info=eqn.source_info)
        for new in body.eqns
    ]


def literal(v: Literal) -> Array:
    """A literal's value in its declared type: JAX may hold a Python number."""
    return jnp.asarray(v.val, getattr(v.aval, "dtype", None))


DRAWN_AHEAD = 2**17  # bytes of one value that is drawn before a loop, for all of its turns


class LoopBody:
    """A loop body fn(i, carry) -> (carry, aux), traced once. Its random draws can be made before the loop.

    Attributes:
        carry: the initial carry, in the types that the body returns.
        consts: the values that fn closes over.
        aux: the shapes of the aux.
        jaxpr: a function of (*consts, i, *carry, *draws made ahead).
    """

    def __init__(self, fn: Callable[[Any, Any], tuple[Any, Any]], carry: Any) -> None:
        for attempt in (1, 2):
            leaves, structure = jax.tree.flatten(carry)
            self._structure: Any = structure
            traced, shapes = trace(fn, jax.ShapeDtypeStruct((), jnp.int32), carry)
            outs = shapes[0]
            after: Any = jax.tree.structure(outs)
            if after != structure:
                raise TypeError(f"A loop's body must return the structure of its carry, {structure}; got {after}.")
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
                f"A loop's body must keep the shape and type of {tree.path_name(path)} of its carry, "
                f"{jax.typeof(old).dtype}{jnp.shape(old)}; got {new.dtype}{new.shape}."
            )
        self.carry = jax.tree.map(strong, carry)
        self.consts, self.aux = traced.consts, shapes[1]
        self.jaxpr, self._count, self._const_count = open_up(traced), len(leaves), len(traced.consts)

    def __call__(self, i: Any, carry: Any, drawn: Sequence[Array] = ()) -> tuple[Any, Any]:
        """The carry after turn i, and the aux; `drawn`: that turn's row of the draws that `ahead` returns."""
        out = run(self.jaxpr, *self.consts, jnp.asarray(i, jnp.int32), *jax.tree.leaves(carry), *drawn)
        aux = jax.tree.unflatten(jax.tree.structure(self.aux), out[self._count :])
        return jax.tree.unflatten(self._structure, out[: self._count]), aux

    def prune(self) -> None:
        """Remove dead code, such as unused keys. XLA would remove it, too, but only after it has compiled it."""
        pruned, _ = prune(self.jaxpr)
        self.jaxpr = part(pruned, pruned.eqns, self.jaxpr.invars, pruned.outvars)

    def constants_of_aux(self) -> Any | None:
        """The aux if it is the same in every turn; else None."""
        jaxpr, used = prune(self.jaxpr, [False] * self._count + [True] * (len(self.jaxpr.outvars) - self._count))
        if any(used[self._const_count :]):
            return None
        inputs = [c for c, is_used in zip(self.consts, used, strict=False) if is_used]
        return jax.tree.unflatten(jax.tree.structure(self.aux), run(jaxpr, *inputs))

    def before(self, most: int | None, limit: int = DRAWN_AHEAD) -> Callable[[Any], list[Array]]:
        """The draws of each turn, made ahead for a loop of at most `most` turns; None: nothing is drawn ahead.

        Each value has at most `limit` bytes for all turns together. See `ahead`.
        """
        rows = self.ahead(limit // most)(jnp.arange(most, dtype=jnp.int32)) if most else []
        return lambda i: [jax.lax.dynamic_index_in_dim(a, jnp.asarray(i, jnp.int32), keepdims=False) for a in rows]

    def ahead(self, limit: int = DRAWN_AHEAD) -> Callable[[Array], list[Array]]:
        """Return a function that draws for several turns; from now on each turn takes its row of the result.

        It draws keys and random integers that do not depend on what changes in the carry, of at most `limit` bytes
        each, and calls a jitted function only once for equal arguments. `_can_be_ahead` says which draws stay in the
        loop.
        """
        jaxpr, inputs = self.jaxpr, self._const_count + 1
        carried = zip(jaxpr.invars[inputs:], jaxpr.outvars, strict=False)
        known = {*jaxpr.invars[:inputs], *(before for before, after in carried if before is after)}
        calls: dict[Any, Any] = {}
        same: dict[Var, Var] = {}
        for eqn in jaxpr.eqns:
            read = [v for v in eqn.invars if not isinstance(v, Literal)]
            if not known.issuperset(read) or not _can_be_ahead(eqn, _SPARE * limit):
                continue
            known.update(eqn.outvars)
            if _draws(eqn) and all(_is_integer(v.aval) and _nbytes(v.aval) <= limit for v in eqn.outvars):
                arguments = tuple(
                    _array(np.asarray(v.val)) if isinstance(v, Literal) else same.get(v, v) for v in eqn.invars
                )
                jitted = {"name", "jaxpr"} <= eqn.params.keys()
                function = eqn.params["jaxpr"] if jitted else id(eqn)
                same.update(zip(eqn.outvars, calls.setdefault((function, arguments), eqn).outvars, strict=True))
        rename = lambda v: same.get(v, v) if isinstance(v, Var) else v
        eqns = [
            eqn.replace(invars=[rename(v) for v in eqn.invars])
            for eqn in jaxpr.eqns
            if not eqn.outvars or not same.keys() >= set(eqn.outvars)
        ]
        outvars: list[Any] = [rename(v) for v in jaxpr.outvars]
        draws = [v for eqn in calls.values() for v in eqn.outvars]
        rest, used = prune(part(jaxpr, eqns, [*jaxpr.invars, *draws], outvars))
        drawn = [v for v, is_used in zip(draws, used[len(jaxpr.invars) :], strict=True) if is_used]
        first, needed = prune(part(jaxpr, [eqn for eqn in jaxpr.eqns if not eqn.effects], jaxpr.invars, drawn))
        self.jaxpr = part(rest, rest.eqns, [*jaxpr.invars, *drawn], rest.outvars)

        def row(i: Array) -> list[Array]:
            given = [*self.consts, i, *jax.tree.leaves(self.carry)]
            return run(first, *(a for a, is_needed in zip(given, needed, strict=True) if is_needed))

        return lambda turns: list(jax.vmap(row)(turns)) if drawn else []


_SPARE = 64  # bytes for each byte of a result, to compute it: a shuffle needs 24


def _can_be_ahead(eqn: Any, limit: int) -> bool:
    """Return whether vectorising an equation over many turns keeps its numbers and takes little more memory.

    Random generators other than JAX's default draw other numbers when vectorised, callbacks may not allow it, and both
    branches of a condition would be computed. No value may exceed `limit` bytes, inner ones included. JAX's check for
    reused keys would mistake a row of a table for the same key in every turn.
    """
    outputs, inputs = [v.aval for v in eqn.outvars], [v.aval for v in eqn.invars]
    if eqn.effects or eqn.primitive in compat.IN_TURN or compat.is_foreign(eqn):
        return False
    if any(is_key(aval) and str(aval.dtype) != "key<fry>" for aval in [*outputs, *inputs]):
        return False
    if any(_nbytes(aval) > limit for aval in outputs) or compat.looks_for_reused_keys():
        return False
    return all(_can_be_ahead(inner, limit) for jaxpr in within(eqn.params) for inner in jaxpr.eqns)


def _draws(eqn: Any) -> bool:
    """Return whether an equation, or a function that it calls, derives keys or draws numbers."""
    return (
        compat.derives_keys(eqn)
        or eqn.params.get("name") == "minibatch"
        or any(_draws(inner) for jaxpr in within(eqn.params) for inner in jaxpr.eqns)
    )


def largest_draw(jaxpr: Jaxpr) -> int:
    """The most random words that one equation draws, those of inner jaxprs included."""
    avals: list[Any] = [eqn.outvars[0].aval for eqn in jaxpr.eqns if compat.draws_words(eqn)]
    inner = (largest_draw(each) for eqn in jaxpr.eqns for each in within(eqn.params))
    return max([0, *(aval.size for aval in avals), *inner])


def _is_integer(aval: Any) -> bool:
    """Return whether a value consists of keys, integers or booleans."""
    return not jnp.issubdtype(aval.dtype, jnp.inexact)


def _nbytes(aval: Any) -> int:
    return int(aval.size) * (8 if is_key(aval) else aval.dtype.itemsize) if hasattr(aval, "dtype") else 0


def identified(jaxpr: Jaxpr, also: Any = ()) -> "tuple[str, tuple[Same, ...]]":
    """A program's fingerprint, and the Python objects that it calls or refers to.

    Programs share a fingerprint only if their equations, types and JAX settings are the same. Constants must be inputs.
    The fingerprint does not depend on the process: callbacks are compared by their code and their contents. (If an
    object does not show its contents, the fingerprint holds in this process only.)

    A compiled program calls the very objects it was traced with, so a cache within a process compares them as well.
    """
    walker = _Walker()
    digest = hashlib.sha256(repr((also, _settings())).encode())
    digest.update(walker.text(jaxpr).encode())
    return digest.hexdigest(), tuple(walker.objects)


def fingerprint(jaxpr: Jaxpr, also: Any = ()) -> str:
    """See `identified`."""
    return identified(jaxpr, also)[0]


class Same:
    """An object compared by identity; objects that JAX defines are compared by value."""

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
    """The JAX settings on which a program depends."""
    config: Any = jax.config
    return config.jax_enable_x64, config.jax_default_matmul_precision, config.jax_threefry_partitionable


ONE_BY_ONE = "clients_one_by_one"  # the name of the batching rule of `Client.when`
_PLAIN = (type(None), bool, int, float, complex, str, bytes)


def _qualified(kind: Any) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"


class _Walker:
    """Writes a jaxpr as text, and collects the objects in it that text can't represent."""

    def __init__(self) -> None:
        self._texts: dict[int, str] = {}  # by the jaxpr's id
        self.objects: list[Same] = []

    def text(self, jaxpr: Jaxpr) -> str:
        if id(jaxpr) in self._texts:
            return self._texts[id(jaxpr)]
        numbers: dict[Var, int] = {}

        def name(v: Any) -> str:
            if isinstance(v, Literal):
                return f"{_array(np.asarray(v.val))}:{v.aval}"
            return f"v{numbers.setdefault(v, len(numbers))}"

        typed = lambda v: f"{name(v)}:{v.aval}:{getattr(v.aval, 'weak_type', False)}"
        lines = [" ".join(map(typed, [*jaxpr.constvars, *jaxpr.invars]))]
        for eqn in jaxpr.eqns:
            derived = compat.has_custom_derivative(eqn)  # its rule has been applied, and is not used again
            params = " ".join(
                f"{key}={self._param(value)}"
                for key, value in sorted(eqn.params.items())
                if key != "source" and not (derived and compat.is_rule(value))
            )
            outputs, inputs = " ".join(map(typed, eqn.outvars)), " ".join(map(name, eqn.invars))
            lines.append(f"{outputs} = {eqn.primitive} {params} {inputs}")
        lines.append(" ".join(map(name, jaxpr.outvars)))
        self._texts[id(jaxpr)] = hashlib.sha256("\n".join(lines).encode()).hexdigest()
        return self._texts[id(jaxpr)]

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
        if content.of_jax(value):
            value = getattr(value, "rule", value)  # JAX wraps a batching rule anew in each trace
        if getattr(value, "__name__", "") == ONE_BY_ONE:
            return ONE_BY_ONE  # the function next to it says what the rule computes
        self.objects.append(Same(value))
        if content.of_jax(value) and not dataclasses.is_dataclass(value):
            text = repr(value)
            return text if " at 0x" not in text else self._identity(value)
        return content.Content(self._identity).of(value)

    def _identity(self, value: Any) -> str:
        return f"{_qualified(type(value))}@{id(value)}"


def _array(value: Any) -> str:
    if is_key(value):
        value = jax.random.key_data(value)
    array = np.asarray(value)
    return f"{array.dtype}{array.shape}{hashlib.sha256(np.ascontiguousarray(array).tobytes()).hexdigest()}"


def digest(*values: Any) -> str:
    """A digest of texts and arrays."""
    each = (value if isinstance(value, str) else _array(value) for value in values)
    return hashlib.sha256("\n".join(each).encode()).hexdigest()
