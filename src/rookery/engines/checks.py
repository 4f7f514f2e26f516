"""Validate the arguments of `solve` before anything is compiled."""

import dataclasses
import inspect
import itertools
import warnings
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import jax
import jax.numpy as jnp
import numpy as np

from rookery.base import jaxprs
from rookery.base.arguments import check_counts, check_seed, kind_of, nearest
from rookery.base.placement import check_types
from rookery.data.clients import Clients
from rookery.data.joining import overflows
from rookery.data.rows import ClientRows
from rookery.language import hyperparameters
from rookery.language.client import Client
from rookery.language.fed import Algorithm
from rookery.problems.problems import (
    Bilevel,
    Compositional,
    Minimax,
    Problem,
    SingleLevel,
    WeightedNodes,
    call,
    with_key,
)


def start_values(problem: Problem, clients: Clients, init: Any) -> tuple[Any, Any]:
    """Return x and y as arrays; raise if the problem, the clients or init are not what `solve` takes."""
    if not isinstance(problem, Problem):
        raise TypeError(
            "problem must be an rk.Bilevel, Minimax, Compositional, SingleLevel or WeightedNodes; got "
            f"{_kind(problem)}."
        )
    if not isinstance(clients, Clients):
        raise TypeError(f"clients must be rk.Clients(lower=[...], upper=[...]); got {_kind(clients)}.")
    check_types(clients)
    _check_functions(problem)
    if isinstance(problem, SingleLevel):
        return _arrays(init, "x"), ()
    if isinstance(problem, WeightedNodes):
        return _weights_and_model(problem, clients, init)
    if isinstance(problem, Compositional) and not (type(init) is tuple and len(init) == 2):
        init = (init, None)
    if not (isinstance(init, tuple) and len(init) == 2):
        given = f"a tuple of {len(init)}" if isinstance(init, tuple) else _kind(init)
        raise ValueError(f"init must be a pair (x, y) for a {type(problem).__name__} problem; got {given}.")
    x = _arrays(init[0], "x")
    if init[1] is None and isinstance(problem, Compositional):
        value = _inner_shape(problem, clients, x, 1)
        return x, jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), value)
    return x, _arrays(init[1], "y")


def _kind(value: Any) -> str:
    """What a value of the wrong kind is called: "a list", "the class FedNest", "3"."""
    if value is None or isinstance(value, bool | int | float | str):
        return repr(value)
    if isinstance(value, type):
        return f"the class {value.__name__} itself"
    return kind_of(value)


def _weights_and_model(problem: WeightedNodes, clients: Clients, init: Any) -> tuple[Any, Any]:
    """Return w and θ from θ alone, from (None, θ), or from (w, θ) with one number per client in w."""
    k, cap = clients.n, problem.cap
    if not isinstance(cap, int | float | np.number) or isinstance(cap, bool) or not 0 < cap <= 1:
        raise ValueError(f"WeightedNodes: cap must be a number above 0 and at most 1; got {cap!r}.")
    if cap * k < 1 - 1e-9:
        raise ValueError(
            f"WeightedNodes: with cap={cap} the weights of {k} clients can't add up to 1; give a cap of at least "
            f"1/{k} = {1 / k:.4g}."
        )
    pair = isinstance(init, tuple) and len(init) == 2 and (init[0] is None or np.shape(init[0]) == (k,))
    w, theta = init if pair else (None, init)
    theta = _arrays(theta, "theta")
    kind = jnp.promote_types(jnp.result_type(*jax.tree.leaves(theta)), jnp.float32)
    if w is None:
        return jnp.full(k, 1 / k, kind), theta
    w = _arrays(w, "w")
    if not (abs(float(jnp.sum(w)) - 1) < 1e-5 and float(jnp.min(w)) >= 0 and float(jnp.max(w)) <= cap + 1e-6):
        raise ValueError(f"init: w must add up to 1, with each weight from 0 to cap={cap}; it is {np.asarray(w)}.")
    return w.astype(kind), theta


def _arrays(value: Any, name: str) -> Any:
    def check(path: Any, leaf: Any) -> Any:
        where = f"init: {name}" + (jax.tree_util.keystr(path) if path else "")
        if not isinstance(leaf, int | float | np.ndarray | np.generic | jax.Array) or isinstance(leaf, bool):
            raise ValueError(f"{where} must be a floating-point array; got {_kind(leaf)}.")
        given = np.asarray(leaf, float) if isinstance(leaf, int | float) else leaf
        if not jnp.issubdtype(given.dtype, jnp.floating):
            raise ValueError(f"{where} must be floating point; its type is {given.dtype}. Use .astype(float).")
        if not isinstance(given, jax.Array) and overflows(np.asarray(given)).any():
            made = jax.dtypes.canonicalize_dtype(given.dtype)
            raise ValueError(f"{where} does not fit into {made}. Rescale it, or set jax_enable_x64.")
        array = jnp.array(given)
        if not bool(jnp.all(jnp.isfinite(array))):
            raise ValueError(f"{where} must be finite; it has NaN or infinite entries.")
        return array

    if not jax.tree.leaves(value):
        raise ValueError(f"init: {name} must have at least one array to start from; got {value!r}.")
    return jax.tree_util.tree_map_with_path(check, value)


def check_run(
    problem: Problem,
    clients: Clients,
    algorithm: Algorithm,
    x: Any,
    y: Any,
    rounds: int,
    cohort: int | None,
    every: int,
    seed: int,
) -> int:
    """Raise at the first argument that is wrong; return the cohort's size."""
    _check_pair(problem, clients, algorithm)
    hyperparameters.check(algorithm, clients.n, jnp.result_type(*jax.tree.leaves((x, y))))
    check_counts(0, rounds=rounds)
    check_counts(every=every)
    check_seed(seed)
    if cohort is None:
        cohort = clients.n
    if not isinstance(cohort, int | np.integer) or isinstance(cohort, bool) or not 1 <= cohort <= clients.n:
        raise ValueError(
            f"cohort must be an integer from 1 to {clients.n}, the number of clients, or None for all of them; got "
            f"{cohort!r}."
        )
    if cohort < clients.n and "all clients" in getattr(algorithm, "needs", ()):
        name = type(algorithm).__name__
        raise ValueError(f"{name} needs all {clients.n} clients in every round; got cohort={cohort}. Leave cohort out.")
    idle = int(np.sum(np.asarray(clients.weights) == 0))
    if cohort < clients.n and idle >= cohort:
        raise ValueError(
            f"cohort must be at least {idle + 1}, because {idle} clients have weight 0 and a cohort of these alone has "
            f"no mean; got {cohort}. Or leave them out of Clients."
        )
    _check_projection(problem, x)
    check_losses(problem, clients, x, y)
    check_used(problem, clients, x, y)
    return int(cohort)


def check_function(name: str, function: Any, *forms: str) -> None:
    """Raise TypeError unless it is a function of these arguments: "x, y" or "x, y, memory", with or without a key."""
    wanted = " or ".join(f"({form})" for form in forms)
    if not callable(function):
        raise TypeError(f"{name} must be a function of {wanted}; got {_kind(function)}.")
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # a built-in
        return
    without_key = [p for p in signature.parameters.values() if p.name != "key"]
    for form in forms:
        for own in (signature, signature.replace(parameters=without_key)):
            try:
                own.bind(*form.split(", "))
            except TypeError:
                continue
            return
    raise TypeError(f"{name} must be a function of {wanted}; it takes {signature}.")


def _check_projection(problem: Problem, x: Any) -> None:
    project = getattr(problem, "project_upper", None)
    if project is None:
        return
    where = f"{type(problem).__name__}.project_upper"
    check_function(where, project, "x")
    try:
        made = jax.eval_shape(project, x)
    except Exception as error:
        raise ValueError(f"{where} fails on init: {_first_line(error)} (x is {_shape(x)}.)") from error
    was, is_ = (_kinds(value) for value in (x, made))
    if was != is_:
        raise ValueError(f"{where} must keep the structure, shape and type of x, {was}; it returns {is_ or 'nothing'}.")


def _kinds(value: Any) -> str:
    leaves = jax.tree_util.tree_leaves_with_path(value)
    return "; ".join(f"{jax.tree_util.keystr(path)} {a.shape} {a.dtype}".strip() for path, a in leaves)


def _check_pair(problem: Problem, clients: Clients, algorithm: Algorithm) -> None:
    kind, name = type(problem).__name__, type(algorithm).__name__
    if isinstance(algorithm, type):
        raise TypeError(f"algorithm must be an instance, {algorithm.__name__}(...); got the class itself.")
    if isinstance(algorithm, str):
        raise TypeError(f"algorithm must be the method itself, rk.{algorithm}(...); got its name, {algorithm!r}.")
    if not hasattr(algorithm, "solves"):
        if hasattr(algorithm, "round"):
            raise TypeError(f"{name} must declare which problems it solves, e.g. solves: ClassVar = (rk.{kind},).")
        raise TypeError(f"algorithm must be a method, e.g. rk.FedNest(...); got {_kind(algorithm)}.")
    solves = algorithm.solves
    if not isinstance(solves, tuple) or not all(isinstance(cls, type) for cls in solves):
        raise TypeError(f"{name}.solves must be a tuple of problem classes, e.g. (rk.{kind},); got {solves!r}.")
    if not dataclasses.is_dataclass(algorithm):
        raise TypeError(f"{name} must be a dataclass: write @dataclass(frozen=True) above the class.")
    if not isinstance(problem, solves):
        can = ", ".join(cls.__name__ for cls in solves) or "nothing"
        way = ""
        if Bilevel in solves and hasattr(problem, "as_bilevel"):
            way = " Give it problem.as_bilevel()."
        raise ValueError(f"{name} does not solve {kind} problems (it solves: {can}).{way}")
    for method, form in (("init", "fed, x, y, key"), ("round", "fed, state, key")):
        check_function(f"{name}.{method}", getattr(algorithm, method, None), form)
    argument = "lower_scope" if isinstance(problem, Bilevel) else "inner_scope"
    scope = getattr(problem, argument, "global")
    if scope not in ("global", "client"):
        raise ValueError(f'{kind}: {argument} must be "global" or "client"; got {scope!r}.')
    if scope != getattr(algorithm, "scope", "global"):
        level = "a lower level" if isinstance(problem, Bilevel) else "an inner function"
        one, other = ("each client's own", "one for all") if scope == "client" else ("one for all", "each client's own")
        raise ValueError(f"{name} needs {level} that is {other}; this problem's is {one} ({argument}={scope!r}).")
    if isinstance(problem, Compositional):
        _check_composition(problem, name, algorithm)
    if isinstance(problem, WeightedNodes):
        check_nodes(clients)
    if "center" in getattr(algorithm, "needs", ()) and clients.center is None:
        raise ValueError(
            f"{name} trains on the centre's data, and these clients have none. Give Clients(..., center=rows)."
        )
    if "equal weights" in getattr(algorithm, "needs", ()) and _weights_differ(clients):
        raise ValueError(
            f"{name} solves problems whose clients count equally, and these clients' weights differ: leave weights out "
            "of Clients, or take another method, FedNest or AggITD."
        )
    if isinstance(problem, Minimax | SingleLevel) and not clients.one_data_set:
        raise ValueError(one_data_set_needed(kind))


def one_data_set_needed(kind: str) -> str:
    """The message for clients with two data sets where the problem takes one."""
    return (
        f"A {kind} problem needs clients with one data set, and these have two. Use clients.single_level() to join "
        "them."
    )


def _check_composition(problem: Compositional, name: str, algorithm: Algorithm) -> None:
    if problem.inner_is_conditional and not getattr(algorithm, "conditional", False):
        raise ValueError(
            f"{name} needs an inner function g(x, batch); this problem's is conditional, g(x, batch, sample): it "
            "depends on the outer sample. Take a method for conditional problems: FCSG or AccFCSGM."
        )
    needs = getattr(algorithm, "needs", ())
    if "known outer" in needs and not problem.outer_is_known:
        raise ValueError(
            f"{name} needs an outer function that is known to all, f(value); this problem's is each client's own, "
            "f(value, batch). Put what takes data into inner or extra, or take a method that averages ∇f: FedNest."
        )
    if "extra" in needs and problem.extra is None:
        raise ValueError(f"{name} minimises the extra part h alone, and this problem has none: give extra=h(x, batch).")


def check_nodes(clients: Clients) -> None:
    """Raise ValueError if these clients are not what a WeightedNodes problem needs."""
    if clients.center is None:
        raise ValueError(
            "A WeightedNodes problem judges the model on the centre's data, and these clients have none: give "
            "Clients(lower=[...], center=rows)."
        )
    if not clients.one_data_set:
        raise ValueError(
            "A WeightedNodes problem has one data set for each client: give lower=[...] alone, and center."
        )
    if _weights_differ(clients):
        raise ValueError(
            "A WeightedNodes problem learns the clients' weights, and Clients(weights=...) would not be used: leave "
            "weights out. To start from weights w, give init=(w, theta)."
        )


def _weights_differ(clients: Clients) -> bool:
    weights = np.asarray(clients.weights)
    return bool(np.ptp(weights) > 1e-5 * weights.max())


class _Loss(NamedTuple):
    """A loss as the user knows it."""

    name: str  # "Bilevel.upper"
    function: Callable[..., Any]  # of (x, y, batch)
    source: ClientRows


def _losses(problem: Any, clients: Clients) -> list[_Loss]:
    keyed = lambda loss: lambda x, y, batch: loss(x, y, batch, jax.random.key(0))
    found = [_Loss(_name(problem, "f"), keyed(problem.f), clients.upper)]
    if isinstance(problem, Bilevel):
        found.append(_Loss(_name(problem, "g"), keyed(problem.g), clients.lower))
    if isinstance(problem, WeightedNodes) and clients.center is not None:
        found.append(_Loss("WeightedNodes.loss, on the centre's data,", keyed(problem.f), clients.center))
    if isinstance(problem, Compositional):
        found.append(_Loss(_name(problem, "r"), _inner_loss(problem, clients), clients.lower))
    return found


def _name(problem: Any, loss: str) -> str:
    """What the user calls f, g or r."""
    kind = type(problem).__name__
    first = {"Bilevel": "upper", "Minimax": "objective", "Compositional": "outer"}.get(kind, "loss")
    other = {"Bilevel": "lower", "Compositional": "inner"}.get(kind, first)
    return f"{kind}.{first if loss == 'f' else other}"


_FORMS = {
    "upper": ("x, y, batch",),
    "lower": ("x, y, batch",),
    "objective": ("x, y, batch",),
    "inner": ("x, batch", "x, batch, sample"),
    "outer": ("value", "value, batch"),
    "extra": ("x, batch",),
    "features": ("x, batch",),
}


def _check_functions(problem: Problem) -> None:
    """Raise TypeError if a field of the problem is not a function of the right arguments."""
    forms = _FORMS | {"loss": ("theta, batch",) if isinstance(problem, WeightedNodes) else ("x, batch",)}
    for name, given in vars(problem).items():
        if name in forms and not (given is None and name in ("extra", "features")):
            check_function(f"{type(problem).__name__}.{name}", given, *forms[name])


_SHAPES: WeakKeyDictionary[Any, set[str]] = WeakKeyDictionary()  # problems and the shapes they were checked with


def check_losses(problem: Problem, clients: Clients, x: Any, y: Any) -> None:
    """Raise ValueError if a loss fails, returns anything but one real number, or broadcasts a batch against itself.

    This follows shapes only. A problem that passed is not checked again with the same shapes.
    """
    key = _shapes_key("losses", clients, x, y)
    if key in _known(_SHAPES, problem):
        return
    several, more = _batch_sizes(clients, x, y)
    sizes = lambda source: (1, several) if source.widest > 1 or not clients.held else (1,)  # batches there may be
    if isinstance(problem, Compositional):
        _check_inner(problem, clients, x, y, sizes(clients.lower))
    for loss in _losses(problem, clients):
        for count in sizes(loss.source):
            value = _traced(loss, x, y, count)[1]
            if loss.name != "Compositional.inner":
                _check_number(loss.name, value, count)
        if len(sizes(loss.source)) > 1:
            _check_crossing(loss, x, y, several, more)
    _known(_SHAPES, problem).add(key)


def _shapes_key(what: str, clients: Clients, x: Any, y: Any) -> str:
    rows = [source.rows for source in (clients.upper, clients.lower, clients.center) if source is not None]
    variables, samples = jax.tree.map(jax.typeof, (x, y)), jax.tree.map(lambda a: (a.shape[1:], str(a.dtype)), rows)
    sizes = [source.widest > 1 for source in (clients.upper, clients.lower)]
    return f"{what} {variables} {samples} {clients.one_data_set} {sizes} {clients.held}"


def _check_number(name: str, value: Any, count: int) -> None:
    """Raise ValueError unless a loss returns one real number."""
    shape, dtype = getattr(value, "shape", None), getattr(value, "dtype", None)
    if shape != ():
        given = f"an array of shape {shape}" if shape is not None else _kind(value)
        raise ValueError(
            f"{name} must return one number, the mean over the batch; on {_samples(count)} it returns {given}. Use "
            "jnp.mean."
        )
    if dtype is None or not jnp.issubdtype(dtype, jnp.floating):
        raise ValueError(f"{name} must return a real floating-point number; it returns one of type {dtype}.")


def _known(cache: WeakKeyDictionary[Any, set[str]], problem: Problem) -> set[str]:
    """What is known of a problem; nothing is kept of one whose functions cannot be hashed."""
    try:
        known = cache.setdefault(problem, set())
    except TypeError:
        return set()
    if len(known) > _REMEMBERED:
        known.clear()
    return known


def _batch_sizes(clients: Clients, x: Any, y: Any) -> list[int]:
    """Two sizes that are not the length of an axis of the variables or of a sample."""
    held = [source.rows for source in (clients.upper, clients.lower, clients.center) if source is not None]
    lengths = {n for a in jax.tree.leaves((x, y)) for n in jnp.shape(a)}
    lengths |= {n for a in jax.tree.leaves(held) for n in a.shape[1:]}
    free = (n for n in itertools.count(5, 2) if n not in lengths)
    return [next(free), next(free)]


def _batch(source: ClientRows, count: int) -> Any:
    return jax.tree.map(lambda a: jax.ShapeDtypeStruct((count, *a.shape[1:]), a.dtype), source.rows)


def _samples(count: int) -> str:
    return "one sample" if count == 1 else f"{count} samples"


def _traced(loss: _Loss, x: Any, y: Any, count: int) -> tuple[Any, Any]:
    """The loss's jaxpr on a batch of `count` samples, and the shape of its value."""
    batch = _batch(loss.source, count)
    try:
        return jaxprs.trace(loss.function, x, y, batch)
    except Exception as error:
        raise _failure(loss.name, error, count, {"x": x, "y": y, "a batch": batch}) from error


def _failure(name: str, error: Exception, count: int, given: dict[str, Any]) -> ValueError:
    """An error that says why a loss fails and what it was given."""
    shapes = ", ".join(f"{what} is {_shape(value)}" for what, value in given.items() if jax.tree.leaves(value))
    hint = " Check the shapes in init and in the data."
    if isinstance(error, KeyError):
        paths = (path for path, _ in jax.tree_util.tree_leaves_with_path(tuple(given.values())))
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
    return ValueError(f"{name} fails on init and a batch of {_samples(count)}: {_first_line(error)} ({shapes}.){hint}")


# A prediction of shape (n, 1) minus targets of shape (n,) has shape (n, n): an error, however plausible the numbers.


def _check_crossing(loss: _Loss, x: Any, y: Any, *counts: int) -> None:
    """Raise ValueError if arrays of different rank broadcast the batch against itself, at each of these sizes."""
    look = lambda count: _crossing(_traced(loss, x, y, count)[0].jaxpr, count, {})
    found = look(counts[0])
    if found is not None and all(look(count) for count in counts[1:]):  # an axis may have the one length by chance
        a, b, made = found
        raise ValueError(
            f"{loss.name} broadcasts arrays of shape {a} and {b} to {made} on a batch of {counts[0]} samples, so that "
            "every sample meets every other one. Make the shapes agree: use p[:, 0] for p of shape (n, 1), or drop the "
            "last axis of y or of the data. If all pairs are meant, write p[:, None] - t[None, :] with both of shape "
            "(n,)."
        )


def _crossing(jaxpr: Any, n: int, origin: dict[Any, Any]) -> tuple[Any, Any, Any] | None:
    """The shapes of the first two arrays of different rank whose batch axes, of length n, become two axes.

    `origin` has for each variable the shape that it had before axes were added to it.
    """
    shape = lambda v: tuple(getattr(v.aval, "shape", ()))
    before = lambda v: origin.get(v, shape(v)) if isinstance(v, jaxprs.Var) else shape(v)
    for eqn in jaxpr.eqns:
        kind = eqn.primitive
        if kind is jax.lax.broadcast_in_dim_p or (kind is jax.lax.reshape_p and _without_ones(eqn)):
            origin[eqn.outvars[0]] = before(eqn.invars[0])
            continue
        for inner in jaxprs.within(eqn.params):
            same = len(inner.invars) == len(eqn.invars)
            known = {v: before(given) for v, given in zip(inner.invars, eqn.invars, strict=True)} if same else {}
            if found := _crossing(inner, n, known):
                return found
        made = shape(eqn.outvars[0]) if eqn.outvars else ()
        if made.count(n) < 2 or not all(_fits(shape(v), made) for v in eqn.invars) or kind is jax.lax.dot_general_p:
            continue
        once = sorted({before(v) for v in eqn.invars if before(v).count(n) == 1}, key=len)
        if len(once) > 1 and len(once[0]) < len(once[-1]) and all(before(v).count(n) < 2 for v in eqn.invars):
            return once[-1], once[0], made
    return None


def _without_ones(eqn: Any) -> bool:
    """Whether a reshape only adds or removes axes of length 1."""
    return [n for n in eqn.invars[0].aval.shape if n != 1] == [n for n in eqn.outvars[0].aval.shape if n != 1]


def _fits(shape: tuple[int, ...], made: tuple[int, ...]) -> bool:
    """Whether an operand of this shape may be one of an elementwise operation."""
    return shape == () or (len(shape) == len(made) and all(a in (1, b) for a, b in zip(shape, made, strict=True)))


# A variable that has no effect.


def _variables_used(loss: _Loss, x: Any, y: Any) -> dict[str, bool]:
    """Whether the loss has a derivative in x and in y that is not zero by construction."""
    batch = _batch(loss.source, 1)
    try:
        value = jax.eval_shape(loss.function, x, y, batch)

        def pulled_back(cotangent: Any, x: Any, y: Any, batch: Any) -> Any:
            return jax.vjp(lambda x, y: loss.function(x, y, batch), x, y)[1](cotangent)

        traced, _ = jaxprs.trace(pulled_back, value, x, y, batch)
    except Exception as error:
        raise ValueError(
            f"{loss.name} can't be differentiated: {_first_line(error)} Methods need its gradient by reverse-mode "
            "differentiation; use jax.lax.scan or fori_loop with a fixed length for while_loop."
        ) from error
    jaxpr = jaxprs.open_up(traced)
    cotangents = slice(len(traced.consts), len(traced.consts) + len(jax.tree.leaves(value)))
    in_x = len(jax.tree.leaves(x))
    count = len(jaxpr.outvars)

    def depends(outputs: range) -> bool:
        _, used = jaxprs.prune(jaxpr, [i in outputs for i in range(count)])
        return any(used[cotangents])

    return {"x": depends(range(in_x)), "y": depends(range(in_x, count))}


def check_used(problem: Any, clients: Clients, x: Any, y: Any) -> None:
    """Raise ValueError if a variable has no effect on the problem; warn if its levels are not nested.

    This looks at the traced gradients, not at their values.
    """
    key = _shapes_key("used", clients, x, y)
    if key in _known(_SHAPES, problem):
        return
    uses = {loss.name: _variables_used(loss, x, y) for loss in _losses(problem, clients)}
    why = "{0} is not used, or only in functions whose derivative is 0 (sign, round, argmax, comparisons)"
    kind = type(problem).__name__
    needed = {"Bilevel": "y", "Minimax": "xy", "SingleLevel": "x", "WeightedNodes": "y"}.get(kind, "")
    for name, used in uses.items():
        for variable in needed:
            if not used[variable]:
                called = "theta" if kind == "WeightedNodes" else variable
                fix = " Use rk.SingleLevel if the problem has one level." if kind != "SingleLevel" else ""
                raise ValueError(
                    f"{name} must depend on {called}; its gradient in {called} is 0 everywhere: "
                    f"{why.format(called)}.{fix}"
                )
    if isinstance(problem, Bilevel):
        if not any(used["x"] for used in uses.values()):
            raise ValueError(f"Bilevel.upper or Bilevel.lower must depend on x; in both, {why.format('x')}.")
        if not uses["Bilevel.lower"]["x"]:
            _warn("Bilevel.lower does not depend on x, so its solution is the same for every x: no level is nested.")
        if problem.upper is problem.lower and clients.one_data_set:
            _warn(
                "Bilevel.upper and Bilevel.lower are the same function on the same data, so the lower solution already "
                "minimises the upper loss. Give the levels different data: rk.Clients(lower=[...], upper=[...])."
            )
    if isinstance(problem, Compositional):
        outer, inner = uses["Compositional.outer"], uses["Compositional.inner"]
        if not (inner["x"] and outer["y"]) and not outer["x"]:
            raise ValueError(
                "Compositional.inner must depend on x and Compositional.outer on the inner value, or extra on x; here "
                "x has no effect."
            )
    _known(_SHAPES, problem).add(key)


def _inner_loss(problem: Compositional, clients: Clients) -> Callable[..., Any]:
    """The inner function as one of (x, y, batch)."""
    zeros = lambda a: jnp.zeros(a.shape[1:], a.dtype)
    sample = (jax.tree.map(zeros, clients.upper.rows),) if problem.inner_is_conditional else ()
    return lambda x, y, batch: call(problem.inner, x, batch, *sample, key=jax.random.key(0))


def _warn(message: str) -> None:
    warnings.warn(message, UserWarning, stacklevel=2)


def _inner_data(problem: Compositional, clients: Clients, count: int = 1) -> tuple[Any, ...]:
    """The shapes of a batch and, in a conditional problem, of the outer sample."""
    if not problem.inner_is_conditional:
        return (_batch(clients.lower, count),)
    row = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape[1:], a.dtype), clients.upper.rows)
    return _batch(clients.lower, count), row


_PAIRS = " A tuple of two is (x, y); give an x that is such a tuple itself as init=(x, None)."


def _check_inner(problem: Compositional, clients: Clients, x: Any, y: Any, counts: Sequence[int]) -> None:
    """Raise ValueError if the inner function fails, or if its value's shape depends on the batch or is not y's."""
    made = [_inner_shape(problem, clients, x, count) for count in counts]
    if _shape(made[0]) != _shape(made[-1]):
        raise ValueError(
            "Compositional.inner must return the mean over the batch; its value has one entry per sample: "
            f"{_shape(made[-1])} on {_samples(counts[-1])}. Use jnp.mean(..., axis=0)."
        )
    if _shape(made[0]) != _shape(y):
        raise ValueError(
            f"init: y is {_shape(y)}, and the inner function's value is {_shape(made[0])}; they must agree.{_PAIRS}"
        )


def _inner_shape(problem: Compositional, clients: Clients, x: Any, count: int) -> Any:
    batch, *sample = data = _inner_data(problem, clients, count)
    try:
        return jax.eval_shape(lambda *z: call(problem.inner, *z, key=jax.random.key(0)), x, *data)
    except Exception as error:
        given = {"x": x, "a batch": batch} | ({"the outer sample": sample[0]} if sample else {})
        raise ValueError(f"{_failure('Compositional.inner', error, count, given)}{_PAIRS}") from error


def _first_line(error: Exception) -> str:
    line = str(error).strip().splitlines()[0] if str(error).strip() else ""
    return f"{type(error).__name__}: {line}".rstrip(": .") + "."


def _shape(value: Any) -> str:
    leaves = jax.tree_util.tree_leaves_with_path(value)
    each = [f"{jax.tree_util.keystr(path)} {leaf.shape}".strip() for path, leaf in leaves]
    return "; ".join(each) if len(each) <= 6 else "; ".join(each[:5]) + f"; and {len(each) - 5} more"


# A loss is a mean over its batch.


_SOUND: OrderedDict[str, None] = OrderedDict()  # losses that were found to be means, by program and data
_VALUES: WeakKeyDictionary[Any, set[str]] = WeakKeyDictionary()  # problems, and the samples and starts checked
_REMEMBERED = 256
_LOOKED_AT = 64  # samples, in search of some that differ
_TRIED = 16  # samples of an evaluation
_FEW = 3  # samples of a batch


def check_means(problem: Problem, clients: Clients, x: Any, y: Any, names: frozenset[str]) -> None:
    """Check the losses on a few samples: they must be finite at the start, and means over their batch.

    A loss in `names` is evaluated sample by sample: if it is not a mean, that would change the problem, and this raises
    ValueError. For any other loss it warns. Compared is what methods use of the loss on the batch with the mean of the
    same over its samples, at a point near the start.
    """
    for name in sorted(names - problem.random):  # two evaluations of a random loss differ in any case
        check_mean(problem, clients, x, y, name)
    _check_values(problem, clients, x, y, names)


def of_level(clients: Clients, name: str) -> Any:
    """Return the samples on which a loss (f, g or r) is evaluated."""
    return clients.lower if name in ("g", "r") else clients.upper


def check_mean(problem: Problem, clients: Clients, x: Any, y: Any, name: str, count: int = _FEW) -> None:
    """Raise ValueError if a loss (f, g or r) is not a mean over batches of `count` samples."""
    source = of_level(clients, name)
    rows = _few_samples(source, clients.here, count)
    if rows is None:
        return
    z = _nudged((x, y))
    both_ways = _together_and_alone(_used_of(problem, clients, name))
    key = _key_of(both_ways, z, rows)
    if key not in _SOUND:
        more = "; or give all clients the same number of samples, and batches that are not larger"
        _compare(problem, name, both_ways, (z, (x, y)), rows, "" if source.widest == source.narrowest else more)
        _remember(key)


def _check_values(problem: Any, clients: Clients, x: Any, y: Any, names: frozenset[str]) -> None:
    """Raise ValueError if a loss is not finite at the start; warn if one that is not in `names` is not a mean."""
    if any(isinstance(a, jax.ShapeDtypeStruct) for a in jax.tree.leaves((x, y))):
        return
    sources = {"f": clients.upper} | (
        {"g": clients.lower} if isinstance(problem, Bilevel) else {"r": clients.lower} if _composed(problem) else {}
    )
    rows = {name: _few_samples(source, clients.here, _FEW, least=1) for name, source in sources.items()}
    key = jaxprs.digest(repr(sorted(names)), *jax.tree.leaves((rows, x, y)))
    if key in _known(_VALUES, problem):
        return
    compared = rows.keys() - names - problem.random
    fixed = with_key(problem, jax.random.key(0))
    sample = jax.tree.map(lambda a: _read(a, 0, 1)[0], clients.upper.rows) if _composed(problem) else None

    def values(x: Any, y: Any, rows: Any) -> dict[str, Any]:
        inner = lambda own: fixed.inner(x, own, *([sample] if fixed.inner_is_conditional else []))
        at = (x, inner(rows["r"])) if "r" in rows else (x, y)
        of = {"f": lambda own: fixed.f(*at, own), "g": lambda own: fixed.g(x, y, own), "r": inner}
        alone = lambda name, own: _over_samples(of[name], own) if name in compared else None
        return {name: (of[name](own), alone(name, own)) for name, own in rows.items()}

    evaluate = jax.jit(values)
    for name, (together, _) in evaluate(x, y, rows).items():
        if not _finite(together):
            _check_finite(problem, clients, name, evaluate, x, y, rows)
    for name, (together, alone) in evaluate(*_nudged((x, y)), rows).items():
        for a, b in zip(*map(jax.tree.leaves, (together, alone)), strict=True) if name in compared else ():
            if not _close(a, b):
                _warn(_not_a_mean(problem, name, "it", a, b, rows[name]) + " " + _SCALE)
                break
    _known(_VALUES, problem).add(key)


WRITE_A_MEAN = "Write it as a mean (jnp.mean over the batch, plus terms without data)"
UNLESS = "; ignore this if the loss uses statistics of the batch, as batch normalisation does."
_SCALE = f"Its size depends on the batch, and clients of other sizes would be refused. {WRITE_A_MEAN}{UNLESS}"


def _composed(problem: Any) -> bool:
    return isinstance(problem, Compositional)


def _over_samples(function: Callable[[Any], Any], rows: Any) -> Any:
    """The mean of function over batches of one sample each."""
    each = jax.vmap(lambda row: function(jax.tree.map(lambda a: a[None], row)))(rows)
    return jax.tree.map(lambda a: jnp.mean(a, axis=0), each)


def _finite(value: Any) -> bool:
    return all(bool(np.isfinite(np.asarray(a, np.float64)).all()) for a in jax.tree.leaves(value))


_MOST = 4096  # samples on which a value that is not finite is looked at again


def _check_finite(
    problem: Any, clients: Clients, name: str, evaluate: Callable[..., Any], x: Any, y: Any, rows: Any
) -> None:
    """Raise ValueError if a loss is not finite at the start on all samples of a client, either: a mean over those of a
    class, say, is not on a few of them.
    """
    levels = {"f": clients.upper, "g": clients.lower, "r": clients.lower}
    more = {own: _few_samples(levels[own], clients.here, _MOST, least=1) for own in rows}
    if not _finite(evaluate(x, y, more)[name][0]):
        who = clients.names[_largest(levels[name], clients.here)[0]]
        raise ValueError(
            f"{_name(problem, name)} must be finite at init; it is NaN or infinite on the samples of client {who}. "
            "Start elsewhere, or look for log, sqrt or a division at 0 and for exp of a large number."
        )


def check_features(problem: Problem, clients: Clients, x: Any) -> None:
    """Raise ValueError if a row of a problem's features is not made of that row alone.

    Tried out on two samples of each level, if need be of two clients, at a point near the start: both together, against
    one by one.
    """
    features: Any = problem.features
    sources = [] if features is None else [s for s in (clients.lower, clients.upper) if s is not None]

    def both_ways(x: Any, rows: Any) -> Any:
        return features(x, rows), jax.vmap(lambda row: features(x, jax.tree.map(lambda a: a[None], row)))(rows)

    for rows in (_few_samples(source, clients.here, 2, of_one=False) for source in sources):
        if rows is None or (key := _key_of(both_ways, _nudged(x), rows)) in _SOUND:
            continue
        together, alone = map(jax.tree.leaves, jax.jit(both_ways)(_nudged(x), rows))
        for a, b in zip(together, alone, strict=True):
            if a.shape[:1] != (2,) or b.shape != (2, 1, *a.shape[1:]) or not _close(a, b[:, 0]):
                raise ValueError(
                    "Bilevel.features makes something else of two samples together than of each of them alone. It has "
                    "to keep the batch's leading axis, and to make each row of that row alone, without statistics of "
                    "the batch: it is given all of a client's samples at once, or those of both levels. Compute what "
                    "depends on the batch as a whole in the losses, and leave features out."
                )
        _remember(key)


def _key_of(both_ways: Callable[..., Any], *given: Any) -> str:
    """What is tried out, and on which numbers."""
    traced, _ = jaxprs.trace(both_ways, *given)
    return jaxprs.digest(jaxprs.fingerprint(jaxprs.open_up(traced)), *traced.consts, *jax.tree.leaves(given[1:]))


def _close(a: Any, b: Any) -> bool:
    """Return whether two arrays are the same to rounding, or not finite and so not to be compared."""
    if not jnp.issubdtype(a.dtype, jnp.floating):
        return bool(np.all(np.asarray(a) == np.asarray(b)))
    tolerance = min(0.1, max(1e-6, 8000 * float(jnp.finfo(a.dtype).eps)))
    a, b = (np.asarray(own, np.float64).ravel() for own in (a, b))
    if not (np.isfinite(a).all() and np.isfinite(b).all()):
        return True
    return float(np.linalg.norm(a - b)) <= tolerance * float(np.linalg.norm(a) + np.linalg.norm(b)) + 1e-30


def _remember(key: str) -> None:
    """That this has been tried out and was sound."""
    _SOUND[key] = None
    if len(_SOUND) > _REMEMBERED:
        _SOUND.popitem(last=False)


def check_measure(problem: Problem, clients: Clients, measure: Callable[..., Any], z: Any, memory: Any) -> None:
    """Raise ValueError if `evaluate_client` takes something for a mean over samples that is none.

    Tried out on a few samples of the largest client: all of them at once, against one by one. `memory` gives the shapes
    of what clients remember, with a row for each.
    """
    sources = [source for source in (clients.lower, clients.upper, clients.test) if source is not None]
    if all(source.widest == source.narrowest for source in sources):
        return
    own = _nudged(jax.tree.map(lambda a: jnp.zeros(a.shape[1:], a.dtype), memory))
    x, y = _nudged(z)
    together, alone = (
        jax.jit(lambda data: measure(Client(problem, data, 0, 0).with_key(jax.random.key(0)), x, y, own))(
            clients.subset(_TRIED, ragged)
        )
        for ragged in (False, True)
    )
    for name, a in together.items():
        a, b = float(a), float(alone[name])
        if np.isfinite([a, b]).all() and abs(a - b) > 1e-3 * (abs(a) + abs(b)) + 1e-12:
            raise ValueError(
                f"evaluate_client: {name!r} is no mean over samples: on a few of them it is {a:.5g}, the mean over "
                f"each alone {b:.5g}. Where clients differ in size, client.mean evaluates sample by sample; compute it "
                "from client.samples() instead, where only the rows that batch.mask marks are samples."
            )


def _largest(source: ClientRows, here: range | None) -> tuple[int, int]:
    """The client with the most samples among those whose data are here, and how many they are."""
    here = range(len(source.sizes)) if here is None else here
    sizes = np.asarray(source.sizes)[here.start : here.stop]
    return here.start + int(np.argmax(sizes)), int(sizes.max())


def _few_samples(source: ClientRows, here: range | None, count: int, least: int = 2, of_one: bool = True) -> Any:
    """Return up to `count` samples of the largest client that is here, if possible ones that differ from the first.

    None if it has fewer than `least`. With of_one=False they may be those of several clients.
    """
    client, size = _largest(source, here)
    if size < least and not of_one:
        mine = range(len(source.sizes)) if here is None else here
        client, size = mine.start, int(np.asarray(source.sizes)[mine.start : mine.stop].sum())
    if size < least:
        return None
    begin = int(source.offsets[client])
    looked_at = max(count, min(size, _LOOKED_AT))
    first = jax.tree.map(lambda a: _read(a, begin, begin + min(size, looked_at)), source.rows)
    differs = np.any([(a != a[:1]).reshape(len(a), -1).any(axis=1) for a in jax.tree.leaves(first)], axis=0)
    order = np.argsort(~differs[1:], kind="stable") + 1
    chosen = np.sort(np.concatenate([[0], order[: count - 1]]))
    return jax.tree.map(lambda a: a[chosen], first)


def _read(a: Any, begin: int, end: int) -> np.ndarray:
    """Some rows, in NumPy: JAX would compile the slice, which is needed only where rows are not in host memory."""
    if isinstance(a, jax.Array) and all(device.platform == "cpu" for device in a.devices()):
        a = np.asarray(a)
    return np.asarray(a[begin:end])


def _used_of(problem: Any, clients: Clients, name: str) -> Callable[[Any, Any], Any]:
    """(z, rows) -> what methods use of the loss at z = (x, y): all of it is linear in the batch's mean loss."""
    if name == "r":
        sample = jax.tree.map(lambda a: a[0], clients.upper.rows)
        return lambda z, rows: problem.inner(z[0], rows, *([sample] if problem.inner_is_conditional else []))
    if name == "f":
        return lambda z, rows: jax.value_and_grad(lambda z: problem.f(*z, rows))(z)

    def of_g(z: Any, rows: Any) -> Any:  # ∇_y g, and the products with v = y: of ½‖y − r(x)‖² these are means, too
        x, y = z
        return jax.grad(problem.g, 1)(x, y, rows), jax.jvp(
            lambda y: jax.grad(problem.g, (0, 1))(x, y, rows), (y,), (y,)
        )[1]

    return of_g


def _together_and_alone(used: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    return lambda z, rows: (used(z, rows), _over_samples(lambda own: used(z, own), rows))


def _nudged(z: Any) -> Any:
    """Return a point near z: at z itself (all zeros, say) much is equal by chance."""
    rng = np.random.default_rng(0)
    return jax.tree.map(lambda a: (np.asarray(a, np.float64) + 0.1 * rng.normal(size=a.shape)).astype(a.dtype), z)


def _compare(
    problem: Any, name: str, both_ways: Callable[..., Any], points: Sequence[Any], rows: Any, more: str
) -> None:
    for z in points:
        together, alone = jax.jit(both_ways)(z, rows)
        if _finite((together, alone)):
            break
    else:
        return
    for a, b in zip(*map(jax.tree.leaves, (together, alone)), strict=True):
        if not _close(a, b):
            what = "its value" if name == "r" else "it" if a.ndim == 0 and name == "f" else "its gradient"
            raise ValueError(
                f"{_not_a_mean(problem, name, what, a, b, rows)} Where clients differ in size, have "
                "fewer samples than a batch, or where the method weights single samples, the loss is evaluated sample "
                f"by sample, and that would change the problem. {WRITE_A_MEAN}{more}."
            )


def _not_a_mean(problem: Any, name: str, what: str, together: Any, alone: Any, rows: Any) -> str:
    shown = lambda v: np.array2string(np.asarray(v).ravel()[:3], precision=5)
    count = len(jax.tree.leaves(rows)[0])
    return (
        f"{_name(problem, name)} must be a mean over its batch; on {_samples(count)} {what} is {shown(together)}, and "
        f"the mean over each of them alone is {shown(alone)}."
    )
