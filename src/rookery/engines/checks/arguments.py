"""Checks of the arguments of a run: the problem, the clients, the algorithm, the start and the cohort."""

import dataclasses
import inspect
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from rookery import algorithms
from rookery.base.arguments import check_counts, check_seed, is_integer, is_number
from rookery.base.placement import check_types, duplicate
from rookery.data.clients import Clients
from rookery.data.joining import overflows
from rookery.engines.checks.losses import check_losses, check_used, describe, first_line, inner_shapes, shape_of
from rookery.language import hyperparameters
from rookery.language.fed import Algorithm
from rookery.problems.problems import Bilevel, Composed, Minimax, MultiLevel, Problem, SingleLevel, WeightedNodes

_FEW = 3  # methods that a message names

# The start.


def start_values(problem: Problem, clients: Clients, init: Any) -> tuple[Any, Any]:
    """Return x and y as arrays; raise if the problem, the clients or init are not what `solve` takes."""
    if not isinstance(problem, Problem):
        kinds = "rk.Bilevel, Minimax, Compositional, MultiLevel, SingleLevel or WeightedNodes"
        raise TypeError(f"problem must be an {kinds}; got {describe(problem)}.")
    if not isinstance(clients, Clients):
        raise TypeError(f"clients must be rk.Clients(lower=[...], upper=[...]); got {describe(clients)}.")
    check_types(clients)
    _check_functions(problem)
    if isinstance(problem, SingleLevel):
        return _arrays(init, "x"), ()
    if isinstance(problem, WeightedNodes):
        return _weights_and_model(problem, clients, init)
    if isinstance(problem, Composed) and not (type(init) is tuple and len(init) == 2):
        init = (init, None)
    if not (isinstance(init, tuple) and len(init) == 2):
        actual = f"a tuple of {len(init)}" if isinstance(init, tuple) else describe(init)
        raise ValueError(f"init must be a pair (x, y) for a {type(problem).__name__} problem; got {actual}.")
    x = _arrays(init[0], "x")
    if init[1] is None and isinstance(problem, Composed):
        return x, jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), inner_shapes(problem, clients, x))
    return x, _arrays(init[1], "y")


def _weights_and_model(problem: WeightedNodes, clients: Clients, init: Any) -> tuple[Any, Any]:
    """Return w and θ from θ, from (None, θ), or from (w, θ) with one number per client in w."""
    k, cap = clients.n, problem.cap
    if not is_number(cap) or not 0 < cap <= 1:
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
    weights = np.asarray(w)
    if abs(float(weights.sum()) - 1) >= 1e-5 or weights.min() < 0 or weights.max() > cap + 1e-6:
        raise ValueError(f"init: w must add up to 1, with each weight from 0 to cap={cap}; it is {weights}.")
    return w.astype(kind), theta


def _arrays(value: Any, name: str) -> Any:
    def check(path: Any, leaf: Any) -> Any:
        where = f"init: {name}" + (jax.tree_util.keystr(path) if path else "")
        if not isinstance(leaf, int | float | np.ndarray | np.generic | jax.Array) or isinstance(leaf, bool):
            raise ValueError(f"{where} must be a floating-point array; got {describe(leaf)}.")
        leaf = np.asarray(leaf, float) if isinstance(leaf, int | float) else leaf
        if not jnp.issubdtype(leaf.dtype, jnp.floating):
            raise ValueError(f"{where} must be floating point; its type is {leaf.dtype}. Use .astype(float).")
        if not isinstance(leaf, jax.Array) and overflows(np.asarray(leaf)).any():
            dtype = jax.dtypes.canonicalize_dtype(leaf.dtype)
            raise ValueError(f"{where} does not fit into {dtype}. Rescale it, or set jax_enable_x64.")
        array = duplicate(leaf) if isinstance(leaf, jax.Array) else jnp.array(leaf)
        on_cpu = array.is_fully_addressable and all(device.platform == "cpu" for device in array.devices())
        finite = np.isfinite(np.asarray(array)) if on_cpu else jnp.isfinite(array)  # JAX compiles this for each shape
        if not bool(finite.all()):
            raise ValueError(f"{where} must be finite; it has NaN or infinite entries.")
        return array

    if not jax.tree.leaves(value):
        raise ValueError(f"init: {name} must have at least one array to start from; got {value!r}.")
    return jax.tree_util.tree_map_with_path(check, value)


# Functions.

_FORMS: dict[str, tuple[str, ...]] = {"inner": ("x, batch", "x, batch, sample"), "outer": ("value", "value, batch")}
_FORMS |= dict.fromkeys(("upper", "lower", "objective"), ("x, y, batch",))
_FORMS |= dict.fromkeys(("extra", "features", "loss"), ("x, batch",))
_LEVELS = {"inner[0]": ("x, batch",), "outer": ("value",)}  # of a MultiLevel problem, and of the other levels:
_LEVEL = ("value, batch",)


def _check_functions(problem: Problem) -> None:
    """Raise TypeError if a field of the problem is not a function of the right arguments."""
    forms, kind = _FORMS | ({"loss": ("theta, batch",)} if isinstance(problem, WeightedNodes) else {}), type(problem)
    functions = dict(vars(problem))
    if isinstance(problem, MultiLevel):
        functions |= _levels(functions.pop("inner"))
        forms |= {name: _LEVEL for name in functions if name.startswith("inner")} | _LEVELS
    for name, function in functions.items():
        if name in forms and not (function is None and name in ("extra", "features")):
            check_function(f"{kind.__name__}.{name}", function, *forms[name])


def _levels(inner: Any) -> dict[str, Any]:
    """Return the functions of a tuple by name."""
    if not isinstance(inner, tuple) or not inner:
        actual = "an empty tuple" if inner == () else describe(inner)
        raise TypeError(f"MultiLevel.inner must be a tuple of functions, (r_1, r_2, ...); got {actual}.")
    return {f"inner[{n}]": function for n, function in enumerate(inner)}


def check_function(name: str, function: Any, *forms: str) -> None:
    """Raise TypeError unless it is a function of these arguments: "x, y" or "x, y, memory", with or without a key."""
    wanted = " or ".join(f"({form})" for form in forms)
    if not callable(function):
        raise TypeError(f"{name} must be a function of {wanted}; got {describe(function)}.")
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # a built-in function
        return
    without_key = signature.replace(parameters=[p for p in signature.parameters.values() if p.name != "key"])
    for form in forms:
        for accepted in (signature, without_key):
            try:
                accepted.bind(*form.split(", "))
            except TypeError:
                continue
            return
    raise TypeError(f"{name} must be a function of {wanted}; it takes {signature}.")


def _check_projection(problem: Problem, x: Any) -> None:
    project = getattr(problem, "project_upper", None)
    if project is None:
        return
    name = f"{type(problem).__name__}.project_upper"
    check_function(name, project, "x")
    try:
        projected = jax.eval_shape(project, x)
    except Exception as error:
        raise ValueError(f"{name} fails on init: {first_line(error)} (x is {shape_of(x)}.)") from error
    before, after = (_shapes_and_types(value) for value in (x, projected))
    if before != after:
        raise ValueError(
            f"{name} must keep the structure, shape and type of x, {before}; it returns {after or 'nothing'}."
        )


def _shapes_and_types(value: Any) -> str:
    leaves = jax.tree_util.tree_leaves_with_path(value)
    return "; ".join(f"{jax.tree_util.keystr(path)} {a.shape} {a.dtype}".strip() for path, a in leaves)


# The whole run.


def check_run(
    problem: Problem, clients: Clients, algorithm: Algorithm, x: Any, y: Any, rounds: int, cohort: int | None,
    every: int, seed: int,
) -> int:  # fmt: skip
    """Raise at the first wrong argument; return the size of the cohort."""
    _check_algorithm(problem, algorithm)
    _check_clients(problem, clients, algorithm)
    hyperparameters.check(algorithm, clients.n, jnp.result_type(*jax.tree.leaves((x, y))))
    check_counts(0, rounds=rounds)
    check_counts(every=every)
    check_seed(seed)
    size = clients.n if cohort is None else cohort
    if not is_integer(size) or not 1 <= size <= clients.n:
        raise ValueError(
            f"cohort must be an integer from 1 to {clients.n}, the number of clients, or None for all of them; got "
            f"{cohort!r}."
        )
    if size < clients.n and "all clients" in getattr(algorithm, "needs", ()):
        name = type(algorithm).__name__
        raise ValueError(f"{name} needs all {clients.n} clients in every round; got cohort={cohort}. Leave cohort out.")
    idle = int(np.sum(np.asarray(clients.weights) == 0))
    if size < clients.n and idle >= size:
        raise ValueError(
            f"cohort must be at least {idle + 1}, because {idle} clients have weight 0 and a cohort of these alone has "
            f"no mean; got {cohort}. Choose a larger one, or leave those clients out of Clients."
        )
    _check_projection(problem, x)
    check_losses(problem, clients, x, y)
    check_used(problem, clients, x, y)
    return int(size)


def _check_algorithm(problem: Problem, algorithm: Algorithm) -> None:
    """Raise unless the algorithm is a method for problems of this kind."""
    kind, name = type(problem).__name__, type(algorithm).__name__
    if isinstance(algorithm, type):
        raise TypeError(f"algorithm must be an instance, {algorithm.__name__}(...); got the class itself.")
    if isinstance(algorithm, str):
        raise TypeError(f"algorithm must be the method itself, rk.{algorithm}(...); got its name, {algorithm!r}.")
    if not hasattr(algorithm, "solves"):
        if hasattr(algorithm, "round"):
            raise TypeError(f"{name} must declare which problems it solves, e.g. solves: ClassVar = (rk.{kind},).")
        raise TypeError(f"algorithm must be a method, e.g. rk.FedNest(...); got {describe(algorithm)}.")
    solves = algorithm.solves
    if not isinstance(solves, tuple) or not all(isinstance(cls, type) for cls in solves):
        raise TypeError(f"{name}.solves must be a tuple of problem classes, e.g. (rk.{kind},); got {solves!r}.")
    if not dataclasses.is_dataclass(algorithm):
        raise TypeError(f"{name} must be a dataclass: write @dataclass(frozen=True) above the class.")
    if not isinstance(problem, solves):
        known = ", ".join(cls.__name__ for cls in solves) or "nothing"
        fix = _methods_for(type(problem))
        if Bilevel in solves and hasattr(problem, "as_bilevel"):
            fix = " Give it problem.as_bilevel()."
        raise ValueError(f"{name} does not solve {kind} problems (it solves: {known}).{fix}")
    for method, form in (("init", "fed, x, y, key"), ("round", "fed, state, key")):
        check_function(f"{name}.{method}", getattr(algorithm, method, None), form)
    argument = "lower_scope" if isinstance(problem, Bilevel) else "inner_scope"
    scope = getattr(problem, argument, "global")
    if scope not in ("global", "client"):
        raise ValueError(f'{kind}: {argument} must be "global" or "client"; got {scope!r}.')
    if scope != getattr(algorithm, "scope", "global"):
        level = "a lower level" if isinstance(problem, Bilevel) else "an inner function"
        actual, needed = (
            ("each client's own", "one for all") if scope == "client" else ("one for all", "each client's own")
        )
        raise ValueError(f"{name} needs {level} that is {needed}; this problem's is {actual} ({argument}={scope!r}).")
    if isinstance(problem, Composed):
        _check_composition(problem, name, algorithm)


def _methods_for(kind: type) -> str:
    """Return a sentence with the methods for this class of problems, if they are few."""
    names = [name for name in algorithms.__all__ if kind in getattr(algorithms, name).solves]
    return f" Take {' or '.join(names)}." if 0 < len(names) <= _FEW else ""


def _check_composition(problem: Composed, name: str, algorithm: Algorithm) -> None:
    if problem.inner_is_conditional and not getattr(algorithm, "conditional", False):
        raise ValueError(
            f"{name} needs an inner function g(x, batch); this problem's is conditional, g(x, batch, sample): it "
            "depends on the outer sample. Take a method for conditional problems: FCSG or AccFCSGM."
        )
    needs = getattr(algorithm, "needs", ())
    if "known outer" in needs and not problem.outer_is_known:
        raise ValueError(
            f"{name} needs an outer function without data, f(value); this problem's is f(value, batch). Put what "
            "takes data into inner or extra, or take a method that averages ∇f: FedNest."
        )
    if "extra" in needs and problem.extra is None:
        raise ValueError(f"{name} minimises only the extra part h, and this problem has none. Give extra=h(x, batch).")


def _check_clients(problem: Problem, clients: Clients, algorithm: Algorithm) -> None:
    """Raise ValueError if these clients are not what the problem and the method need."""
    name, needs = type(algorithm).__name__, getattr(algorithm, "needs", ())
    if isinstance(problem, WeightedNodes):
        check_nodes(clients)
    if "center" in needs and clients.center is None:
        raise ValueError(
            f"{name} trains on the centre's data, and these clients have none. Give Clients(..., center=rows)."
        )
    if "equal weights" in needs and _weights_differ(clients):
        raise ValueError(
            f"{name} solves problems whose clients count equally, and these clients' weights differ. Leave weights out "
            "of Clients, or take another method: FedNest or AggITD."
        )
    check_one_data_set(problem, clients)


def check_one_data_set(problem: Problem, clients: Clients) -> None:
    """Raise ValueError if the clients have two data sets where the problem takes one."""
    if isinstance(problem, Minimax | SingleLevel) and not clients.one_data_set:
        raise ValueError(
            f"A {type(problem).__name__} problem needs clients with one data set, and these have two. Use "
            "clients.single_level() to join them."
        )


def check_nodes(clients: Clients) -> None:
    """Raise ValueError if these clients are not what a WeightedNodes problem needs."""
    if clients.center is None:
        raise ValueError(
            "A WeightedNodes problem judges the model on the centre's data, and these clients have none. Give "
            "Clients(lower=[...], center=rows)."
        )
    if not clients.one_data_set:
        raise ValueError(
            "A WeightedNodes problem needs clients with one data set, and these have two. Give only lower=[...], and "
            "center."
        )
    if _weights_differ(clients):
        raise ValueError(
            "A WeightedNodes problem learns the clients' weights and would not use Clients(weights=...). Leave weights "
            "out; to start from weights w, give init=(w, theta)."
        )


def _weights_differ(clients: Clients) -> bool:
    weights = np.asarray(clients.weights)
    return bool(np.ptp(weights) > 1e-5 * weights.max())
