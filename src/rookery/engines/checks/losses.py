"""Checks of a problem's losses by their shapes and traces, without computing values."""

import itertools
import warnings
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import jax
import jax.numpy as jnp

from rookery.base import jaxprs
from rookery.base.arguments import kind_of, nearest
from rookery.data.clients import Clients
from rookery.data.rows import ClientRows
from rookery.problems.functions import call
from rookery.problems.problems import Bilevel, Composed, Problem, WeightedNodes

_PAIRS = " A tuple of two is (x, y); give an x that is such a tuple itself as init=(x, None)."
_REMEMBERED = 256
_SHAPES: WeakKeyDictionary[Any, set[str]] = WeakKeyDictionary()  # by problem: the shapes it was checked with


class _Loss(NamedTuple):
    name: str  # the user's name for it, "Bilevel.upper"
    function: Callable[..., Any]  # of (x, y, batch)
    source: ClientRows
    inner: bool = False  # whether it is an inner function, whose value need not be one number


def _losses(problem: Any, clients: Clients) -> list[_Loss]:
    keyed = lambda loss: lambda x, y, batch: loss(x, y, batch, jax.random.key(0))
    losses = [_Loss(user_name(problem, "f"), keyed(problem.f), clients.upper)]
    if isinstance(problem, Bilevel):
        losses.append(_Loss(user_name(problem, "g"), keyed(problem.g), clients.lower))
    if isinstance(problem, WeightedNodes) and clients.center is not None:
        losses.append(_Loss("WeightedNodes.loss, on the centre's data,", keyed(problem.f), clients.center))
    if isinstance(problem, Composed):
        zeros = lambda a: jnp.zeros(a.shape[1:], a.dtype)
        sample = (jax.tree.map(zeros, clients.upper.rows),) if problem.inner_is_conditional else ()
        for n in range(len(problem.chain)):
            value = lambda x, y, batch, n=n: problem.r(x, y, batch, *sample, key=jax.random.key(0))[n]
            losses.append(_Loss(level_name(problem, n), value, clients.lower, inner=True))
    return losses


def user_name(problem: Any, loss: str) -> str:
    """Return the user's name for f, g or r, e.g. "Bilevel.upper"."""
    kind = type(problem).__name__
    if isinstance(problem, Composed):
        return f"{kind}.{'outer' if loss == 'f' else 'inner'}"
    first = {"Bilevel": "upper", "Minimax": "objective"}.get(kind, "loss")
    return f"{kind}.{first if loss == 'f' or kind != 'Bilevel' else 'lower'}"


def level_name(problem: Any, n: int) -> str:
    """Return the user's name for the n-th inner function."""
    return user_name(problem, "r") + (f"[{n}]" if isinstance(problem.inner, tuple) else "")


# Words for messages.


def describe(value: Any) -> str:
    """Return a phrase for a value of the wrong kind: "a list", "the class FedNest itself", "3"."""
    if value is None or isinstance(value, bool | int | float | str):
        return repr(value)
    if isinstance(value, type):
        return f"the class {value.__name__} itself"
    return kind_of(value)


def number_of_samples(count: int) -> str:
    """Return "one sample", "5 samples"."""
    return "one sample" if count == 1 else f"{count} samples"


def first_line(error: Exception) -> str:
    """Return an error's type and the first line of its message."""
    line = str(error).strip().splitlines()[0] if str(error).strip() else ""
    return f"{type(error).__name__}: {line}".rstrip(": .") + "."


def shape_of(value: Any) -> str:
    """Return the shapes of a pytree's leaves, or of the first few if there are many."""
    leaves = jax.tree_util.tree_leaves_with_path(value)
    shapes = [f"{jax.tree_util.keystr(path)} {leaf.shape}".strip() for path, leaf in leaves]
    return "; ".join(shapes) if len(shapes) <= 6 else "; ".join(shapes[:5]) + f"; and {len(shapes) - 5} more"


def warn(message: str) -> None:
    """Warn the user."""
    warnings.warn(message, UserWarning, stacklevel=2)


# Shapes.


def check_losses(problem: Problem, clients: Clients, x: Any, y: Any) -> None:
    """Raise ValueError if a loss fails, does not return one real number, or broadcasts a batch against itself.

    Only shapes are computed. A problem that passed is not checked again with the same shapes.
    """
    key = _shapes_key("losses", clients, x, y)
    if key in known_of(_SHAPES, problem):
        return
    count, other_count = _batch_sizes(clients, x, y)
    counts = lambda source: (1, count) if source.widest > 1 or not clients.held else (1,)
    if isinstance(problem, Composed):
        _check_inner(problem, clients, x, y, counts(clients.lower))
    for loss in _losses(problem, clients):
        for n in counts(loss.source):
            traced, value = _traced(loss, x, y, n)
            if not loss.inner:
                _check_number(loss.name, value, n)
        crossing = _crossing(traced.jaxpr, n, {}) if n > 1 else None
        # An axis may have one of the two lengths by chance.
        if crossing and _crossing(_traced(loss, x, y, other_count)[0].jaxpr, other_count, {}):
            raise _crossing_error(loss.name, n, *crossing)
    known_of(_SHAPES, problem).add(key)


def _shapes_key(check: str, clients: Clients, x: Any, y: Any) -> str:
    rows = [source.rows for source in (clients.upper, clients.lower, clients.center) if source is not None]
    variables, samples = jax.tree.map(jax.typeof, (x, y)), jax.tree.map(lambda a: (a.shape[1:], str(a.dtype)), rows)
    several = [source.widest > 1 for source in (clients.upper, clients.lower)]
    return f"{check} {variables} {samples} {clients.one_data_set} {several} {clients.held}"


def known_of(cache: WeakKeyDictionary[Any, set[str]], problem: Problem) -> set[str]:
    """Return the keys cached for a problem, which is not cached if its functions cannot be hashed."""
    try:
        known = cache.setdefault(problem, set())
    except TypeError:
        return set()
    if len(known) > _REMEMBERED:
        known.clear()
    return known


def _batch_sizes(clients: Clients, x: Any, y: Any) -> list[int]:
    """Return two sizes that are not the length of an axis of the variables or of a sample."""
    rows = [source.rows for source in (clients.upper, clients.lower, clients.center) if source is not None]
    lengths = {n for a in jax.tree.leaves((x, y)) for n in jnp.shape(a)}
    lengths |= {n for a in jax.tree.leaves(rows) for n in a.shape[1:]}
    return list(itertools.islice((n for n in itertools.count(5, 2) if n not in lengths), 2))


def _batch(source: ClientRows, count: int) -> Any:
    return jax.tree.map(lambda a: jax.ShapeDtypeStruct((count, *a.shape[1:]), a.dtype), source.rows)


def _traced(loss: _Loss, x: Any, y: Any, count: int) -> tuple[Any, Any]:
    """Return the loss's jaxpr on a batch of `count` samples and the shape of its value."""
    batch = _batch(loss.source, count)
    try:
        return jaxprs.trace(loss.function, x, y, batch)
    except Exception as error:
        raise _failure(loss.name, error, count, {"x": x, "y": y, "a batch": batch}) from error


def _failure(name: str, error: Exception, count: int, arguments: dict[str, Any]) -> ValueError:
    """Return an error that says why a loss fails and on which arguments."""
    shapes = ", ".join(f"{what} is {shape_of(value)}" for what, value in arguments.items() if jax.tree.leaves(value))
    hint = " Check the shapes in init and in the data."
    if isinstance(error, KeyError):
        paths = (path for path, _ in jax.tree_util.tree_leaves_with_path(tuple(arguments.values())))
        keys = {str(k.key) for path in paths for k in path if isinstance(k, jax.tree_util.DictKey)}
        near = nearest(error.args[0] if error.args else "", keys)
        hint = f" Did you mean {near!r}?" if near else " Check the key."
    elif isinstance(error, jax.errors.JAXTypeError | jax.errors.JAXIndexError):
        hint = (
            " Losses are compiled, so they can't use an array's value in Python or NumPy: write jnp.where or "
            "jax.lax.cond for if, and jnp for np."
        )
    elif isinstance(error, AttributeError | NameError | ImportError):
        hint = ""
    where = f"{name} fails on init and a batch of {number_of_samples(count)}"
    return ValueError(f"{where}: {first_line(error)} ({shapes}.){hint}")


def _check_number(name: str, value: Any, count: int) -> None:
    shape, dtype = getattr(value, "shape", None), getattr(value, "dtype", None)
    if shape != ():
        actual = f"an array of shape {shape}" if shape is not None else describe(value)
        raise ValueError(
            f"{name} must return one number, the mean over the batch; on {number_of_samples(count)} it returns "
            f"{actual}. Use jnp.mean."
        )
    if dtype is None or not jnp.issubdtype(dtype, jnp.floating):
        raise ValueError(f"{name} must return a real floating-point number; it returns one of type {dtype}.")


# A prediction of shape (n, 1) minus targets of shape (n,) has shape (n, n): an error that yields plausible numbers.


def _crossing_error(name: str, count: int, a: Any, b: Any, result: Any) -> ValueError:
    return ValueError(
        f"{name} broadcasts arrays of shape {a} and {b} to {result} on a batch of {count} samples, so that every "
        "sample meets every other one. Make the shapes agree: use p[:, 0] for p of shape (n, 1), or drop the last axis "
        "of y or of the data. If all pairs are meant, write p[:, None] - t[None, :] with both of shape (n,)."
    )


def _crossing(jaxpr: Any, n: int, origin: dict[Any, Any]) -> tuple[Any, Any, Any] | None:
    """Return the shapes of the first two operands whose batch axes become two axes of the result, and its shape.

    The batch axes have length n, and the operands differ in rank. `origin` maps a variable to the shape that it had
    before axes were added to it.
    """
    shape = lambda v: tuple(getattr(v.aval, "shape", ()))
    before = lambda v: origin.get(v, shape(v)) if isinstance(v, jaxprs.Var) else shape(v)
    for eqn in jaxpr.eqns:
        kind = eqn.primitive
        if kind is jax.lax.broadcast_in_dim_p or (kind is jax.lax.reshape_p and _only_adds_ones(eqn)):
            origin[eqn.outvars[0]] = before(eqn.invars[0])
            continue
        for inner in jaxprs.within(eqn.params):
            same = len(inner.invars) == len(eqn.invars)
            known = {v: before(outer) for v, outer in zip(inner.invars, eqn.invars, strict=True)} if same else {}
            if crossing := _crossing(inner, n, known):
                return crossing
        result = shape(eqn.outvars[0]) if eqn.outvars else ()
        elementwise = all(_fits(shape(v), result) for v in eqn.invars) and kind is not jax.lax.dot_general_p
        if result.count(n) < 2 or not elementwise:
            continue
        once = sorted({before(v) for v in eqn.invars if before(v).count(n) == 1}, key=len)
        if len(once) > 1 and len(once[0]) < len(once[-1]) and all(before(v).count(n) < 2 for v in eqn.invars):
            return once[-1], once[0], result
    return None


def _only_adds_ones(eqn: Any) -> bool:
    """Return whether a reshape only adds or removes axes of length 1."""
    return [n for n in eqn.invars[0].aval.shape if n != 1] == [n for n in eqn.outvars[0].aval.shape if n != 1]


def _fits(shape: tuple[int, ...], result: tuple[int, ...]) -> bool:
    """Return whether an operand of this shape can take part in an elementwise operation with this result."""
    return shape == () or (len(shape) == len(result) and all(a in (1, b) for a, b in zip(shape, result, strict=True)))


# The inner functions of a composition.


def _check_inner(problem: Composed, clients: Clients, x: Any, y: Any, counts: Sequence[int]) -> None:
    """Raise ValueError if an inner function fails, if its value's shape depends on the batch or is not y's."""
    values = inner_shapes(problem, clients, x, counts)
    wanted, actual = shape_of(values), shape_of(y)
    structures: list[Any] = [jax.tree.structure(z) for z in (values, y)]
    if wanted != actual or structures[0] != structures[1]:
        several = isinstance(problem.inner, tuple)
        one = "have the shape of the inner function's value,"
        what = "be a tuple with the inner functions' values, of shapes" if several else one
        actual = actual if wanted != actual else f"{actual}, in {kind_of(y)}"
        raise ValueError(f"init: y must {what} {wanted}; its shape is {actual}.{_PAIRS}")


def inner_shapes(problem: Composed, clients: Clients, x: Any, counts: Sequence[int] = (1,)) -> Any:
    """Return the shapes of the inner functions' values, as y, on batches of each of these numbers of samples."""

    def shape(n: int, z: Any) -> Any:
        first, last = (_inner_shape(problem, clients, n, z, count) for count in (counts[0], counts[-1]))
        if shape_of(first) != shape_of(last):
            raise ValueError(
                f"{level_name(problem, n)} must return the mean over the batch; its value has one entry per sample: "
                f"{shape_of(last)} on {number_of_samples(counts[-1])}. Use jnp.mean(..., axis=0)."
            )
        return first

    return problem.forward(x, shape)


def _inner_shape(problem: Composed, clients: Clients, n: int, z: Any, count: int) -> Any:
    arguments = {"value" if n else "x": z, "a batch": _batch(clients.lower, count)}
    if problem.inner_is_conditional:
        row = lambda a: jax.ShapeDtypeStruct(a.shape[1:], a.dtype)
        arguments["the outer sample"] = jax.tree.map(row, clients.upper.rows)
    try:
        function = problem.chain[n]
        return jax.eval_shape(lambda *z: call(function, *z, key=jax.random.key(0)), *arguments.values())
    except Exception as error:
        hint = "" if n else _PAIRS
        raise ValueError(f"{_failure(level_name(problem, n), error, count, arguments)}{hint}") from error


# Variables without effect.


def check_used(problem: Any, clients: Clients, x: Any, y: Any) -> None:
    """Raise ValueError if a variable has no effect on the problem; warn if its levels are not nested.

    This looks at the traced gradients, not at their values.
    """
    key = _shapes_key("used", clients, x, y)
    if key in known_of(_SHAPES, problem):
        return
    uses = {loss.name: _variables_used(loss, x, y) for loss in _losses(problem, clients)}
    why = "{0} is not used, or only in functions whose derivative is 0 (sign, round, argmax, comparisons)"
    kind = type(problem).__name__
    needed = {"Bilevel": "y", "Minimax": "xy", "SingleLevel": "x", "WeightedNodes": "y"}.get(kind, "")
    for (name, used), variable in itertools.product(uses.items(), needed):
        if not used[variable]:
            symbol = "theta" if kind == "WeightedNodes" else variable
            fix = " Use rk.SingleLevel if the problem has one level." if kind != "SingleLevel" else ""
            raise ValueError(
                f"{name} must depend on {symbol}; its gradient in {symbol} is 0 everywhere: {why.format(symbol)}.{fix}"
            )
    if isinstance(problem, Bilevel):
        if not any(used["x"] for used in uses.values()):
            raise ValueError(f"Bilevel.upper or Bilevel.lower must depend on x; in both, {why.format('x')}.")
        if not uses["Bilevel.lower"]["x"]:
            warn("Bilevel.lower does not depend on x, so its solution is the same for every x: no level is nested.")
        if problem.upper is problem.lower and clients.one_data_set:
            warn(
                "Bilevel.upper and Bilevel.lower are the same function on the same data, so the lower solution already "
                "minimises the upper loss. Give the levels different data: rk.Clients(lower=[...], upper=[...])."
            )
    if isinstance(problem, Composed) and not uses[user_name(problem, "f")]["x"]:
        for n in range(1, len(problem.chain)):
            name = level_name(problem, n)
            if not any(uses[name].values()):
                raise ValueError(f"{name} must depend on the value before it; {why.format('its first argument')}.")
        if not (uses[level_name(problem, 0)]["x"] and uses[user_name(problem, "f")]["y"]):
            raise ValueError(
                f"{level_name(problem, 0)} must depend on x and {kind}.outer on the inner value, or extra on x; here "
                "x has no effect."
            )
    known_of(_SHAPES, problem).add(key)


def _variables_used(loss: _Loss, x: Any, y: Any) -> dict[str, bool]:
    """Return whether the loss's derivatives in x and in y are not zero by construction."""

    def pulled_back(cotangent: Any, x: Any, y: Any, batch: Any) -> Any:
        return jax.vjp(lambda x, y: loss.function(x, y, batch), x, y)[1](cotangent)

    batch = _batch(loss.source, 1)
    try:
        value = jax.eval_shape(loss.function, x, y, batch)
        traced, _ = jaxprs.trace(pulled_back, value, x, y, batch)
    except Exception as error:
        raise ValueError(
            f"{loss.name} can't be differentiated: {first_line(error)} Methods need its gradient by reverse-mode "
            "differentiation; use jax.lax.scan or fori_loop with a fixed length for while_loop."
        ) from error
    jaxpr = jaxprs.open_up(traced)
    cotangents = slice(len(traced.consts), len(traced.consts) + len(jax.tree.leaves(value)))
    count, in_x = len(jaxpr.outvars), len(jax.tree.leaves(x))

    def depends(outputs: range) -> bool:
        _, used = jaxprs.prune(jaxpr, [i in outputs for i in range(count)])
        return any(used[cotangents])

    return {"x": depends(range(in_x)), "y": depends(range(in_x, count))}
