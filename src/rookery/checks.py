"""The border: what is given to `solve`, checked before anything is compiled. A message says what, where and the fix."""

import inspect
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from rookery import hyperparameters, jaxprs
from rookery.arguments import check_counts, check_seed
from rookery.client import Client
from rookery.clients import Clients
from rookery.fed import Algorithm
from rookery.placement import check_types
from rookery.problems import (
    Bilevel,
    Compositional,
    Minimax,
    Problem,
    SingleLevel,
    WeightedNodes,
    call,
    inner_value_like,
)
from rookery.source import Source, overflows


def start_values(problem: Problem, clients: Clients, init: Any) -> tuple[Any, Any]:
    """x and y as arrays."""
    if not isinstance(problem, Problem):
        raise TypeError(
            f"problem is a {type(problem).__name__}; give a Bilevel, Minimax, Compositional, SingleLevel or "
            "WeightedNodes."
        )
    if not isinstance(clients, Clients):
        raise TypeError(f"clients is a {type(clients).__name__}; give rk.Clients(lower=[...], upper=[...]).")
    check_types(clients)
    if isinstance(problem, SingleLevel):
        return _arrays(init, "x"), ()
    if isinstance(problem, WeightedNodes):
        return _weights_and_model(problem, clients, init)
    if isinstance(problem, Compositional) and not (type(init) is tuple and len(init) == 2):
        init = (init, None)
    if not (isinstance(init, tuple) and len(init) == 2):
        given = f"a tuple of {len(init)}" if isinstance(init, tuple) else f"a {type(init).__name__}"
        raise ValueError(f"init is {given}; a {type(problem).__name__} problem starts from a pair (x, y).")
    x = _arrays(init[0], "x")
    if init[1] is None and isinstance(problem, Compositional):
        return x, inner_value_like(problem, x, *_inner_data(problem, clients))
    return x, _arrays(init[1], "y")


def _weights_and_model(problem: WeightedNodes, clients: Clients, init: Any) -> tuple[Any, Any]:
    """w and θ from θ alone, from (None, θ), or from (w, θ) with a number for each client in w."""
    k, cap = clients.n, problem.cap
    if not isinstance(cap, int | float | np.number) or isinstance(cap, bool) or not 0 < cap <= 1:
        raise ValueError(f"WeightedNodes: cap={cap!r} is not a number above 0, at most 1.")
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
            raise ValueError(f"{where} is a {type(leaf).__name__}; a variable is a pytree of floating-point arrays.")
        given = np.asarray(leaf, float) if isinstance(leaf, int | float) else leaf
        if not jnp.issubdtype(given.dtype, jnp.floating):
            raise ValueError(f"{where} has the type {given.dtype}; a variable is floating point: use .astype(float).")
        if not isinstance(given, jax.Array) and overflows(np.asarray(given)).any():
            made = jax.dtypes.canonicalize_dtype(given.dtype)
            raise ValueError(f"{where} does not fit into {made}; rescale it, or set jax_enable_x64.")
        array = jnp.array(given)
        if not bool(jnp.all(jnp.isfinite(array))):
            raise ValueError(f"{where} is not finite (NaN or infinity); start from numbers.")
        return array

    if not jax.tree.leaves(value):
        raise ValueError(f"init: {name} holds no arrays ({value!r}); give the {name} to start from.")
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
    """Raise at the first thing that is wrong; the cohort's size if nothing is."""
    _check_pair(problem, clients, algorithm)
    hyperparameters.check(algorithm, clients.n, jnp.result_type(*jax.tree.leaves((x, y))))
    check_counts(0, rounds=rounds)
    check_counts(every=every)
    check_seed(seed)
    if cohort is None:
        cohort = clients.n
    if not isinstance(cohort, int | np.integer) or isinstance(cohort, bool) or not 1 <= cohort <= clients.n:
        raise ValueError(
            f"cohort={cohort!r}: the federation has {clients.n} clients; give a whole number from 1 to {clients.n}, or "
            "None for all of them."
        )
    if cohort < clients.n and "all clients" in getattr(algorithm, "needs", ()):
        name = type(algorithm).__name__
        raise ValueError(f"{name} needs all {clients.n} clients in every round, not cohort={cohort}: leave cohort out.")
    idle = int(np.sum(np.asarray(clients.weights) == 0))
    if cohort < clients.n and idle >= cohort:
        raise ValueError(
            f"cohort={cohort}: {idle} clients have the weight 0, and a cohort of these alone has no mean; leave them "
            f"out of Clients, or give a cohort of at least {idle + 1}."
        )
    _check_projection(problem, x)
    check_losses(problem, clients, x, y)
    return int(cohort)


def check_function(name: str, function: Any, *forms: str) -> None:
    """Raise TypeError if it is no function of these arguments, or of those: "x, y", "x, y, memory"."""
    said = " or ".join(f"({form})" for form in forms)
    if not callable(function):
        raise TypeError(f"{name} is {function!r}; give a function of {said}.")
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # a built-in
        return
    for form in forms:
        try:
            signature.bind(*form.split(", "))
        except TypeError:
            continue
        return
    raise TypeError(f"{name} takes {signature}; give a function of {said}.")


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
        raise ValueError(f"{where} returns {is_ or 'nothing'}, and x is {was}: structure, shape and type must stay.")


def _kinds(value: Any) -> str:
    leaves = jax.tree_util.tree_leaves_with_path(value)
    return "; ".join(f"{jax.tree_util.keystr(path)} {a.shape} {a.dtype}".strip() for path, a in leaves)


def _check_pair(problem: Problem, clients: Clients, algorithm: Algorithm) -> None:
    kind, name = type(problem).__name__, type(algorithm).__name__
    if isinstance(algorithm, type):
        raise TypeError(
            f"algorithm is the class {algorithm.__name__} itself; give an instance: {algorithm.__name__}(...)."
        )
    if isinstance(algorithm, str):
        raise TypeError(f"algorithm is the word {algorithm!r}; give the method itself: rk.{algorithm}(...).")
    if not hasattr(algorithm, "solves"):
        raise TypeError(f"algorithm is {algorithm!r}; give a method, as rk.FedNest(...) is.")
    solves = algorithm.solves
    if not isinstance(problem, solves):
        can = ", ".join(cls.__name__ for cls in solves) or "nothing"
        way = ""
        if Bilevel in solves and hasattr(problem, "as_bilevel"):
            way = " Give it problem.as_bilevel()."
        raise ValueError(f"{name} does not solve {kind} problems (it solves: {can}).{way}")
    for method, form in (("init", "fed, x, y, key"), ("round", "fed, state, key")):
        check_function(f"{name}.{method}", getattr(algorithm, method, None), form)
    scope = getattr(problem, "lower_scope", getattr(problem, "inner_scope", "global"))
    if scope not in ("global", "client"):
        raise ValueError(f'{kind}: scope {scope!r} is not known; give "global" or "client".')
    if scope != getattr(algorithm, "scope", "global"):
        level = "a lower level" if isinstance(problem, Bilevel) else "an inner function"
        one, other = ("each client's own", "one for all") if scope == "client" else ("one for all", "each client's own")
        raise ValueError(f"{name} needs {level} that is {other}; this problem's is {one} (scope {scope!r}).")
    if isinstance(problem, Compositional):
        _check_composition(problem, name, algorithm)
    if isinstance(problem, WeightedNodes):
        check_nodes(clients)
    if "center" in getattr(algorithm, "needs", ()) and clients.center is None:
        raise ValueError(
            f"{name} trains on the centre's data, and these clients have none: give Clients(..., center=rows)."
        )
    if "equal weights" in getattr(algorithm, "needs", ()) and _weights_differ(clients):
        raise ValueError(
            f"{name} solves problems whose clients count equally, and these clients' weights differ: leave weights out "
            "of Clients, or take another method, FedNest or AggITD."
        )
    if isinstance(problem, Minimax | SingleLevel) and not clients.one_data_set:
        raise ValueError(f"A {kind} problem has one data set, these clients have two: give upper=[...] alone.")


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


def _one_sample(source: Source) -> Any:
    return jax.tree.map(lambda a: jax.ShapeDtypeStruct((1, *a.shape[1:]), a.dtype), source.rows)


def check_losses(problem: Problem, clients: Clients, x: Any, y: Any) -> None:
    """Raise ValueError if a loss fails on a batch of one sample, or returns anything but one real number."""
    upper, lower = _one_sample(clients.upper), _one_sample(clients.lower)
    losses = [("upper" if isinstance(problem, Bilevel) else _first_field(problem), problem.f, upper)]
    if isinstance(problem, Bilevel):
        losses.append(("lower", problem.g, lower))
    if isinstance(problem, WeightedNodes) and clients.center is not None:
        losses.append(("loss, on the centre's data,", problem.f, _one_sample(clients.center)))
    if isinstance(problem, Compositional):
        _check_inner(problem, x, y, _inner_data(problem, clients))
    for name, loss, batch in losses:
        where = f"{type(problem).__name__}.{name}"
        try:
            value = jax.eval_shape(lambda *z, loss=loss: loss(*z, jax.random.key(0)), x, y, batch)
        except Exception as error:
            raise ValueError(
                f"{where} fails on init and a batch of one sample: {_first_line(error)} (Check that init has the "
                f"structure the loss expects: x is {_shape(x)}, y is {_shape(y)}, a batch is {_shape(batch)}.)"
            ) from error
        shape, dtype = getattr(value, "shape", None), getattr(value, "dtype", None)
        if shape != ():
            given = f"an array of shape {shape}" if shape is not None else f"a {type(value).__name__}"
            raise ValueError(f"{where} returns {given}; a loss is one number, the mean over the batch: use jnp.mean.")
        if dtype is None or not jnp.issubdtype(dtype, jnp.floating):
            raise ValueError(f"{where} returns a number of type {dtype}; a loss is real and floating point.")


def _first_field(problem: Any) -> str:
    return {"Minimax": "objective", "Compositional": "outer"}.get(type(problem).__name__, "loss")


def _inner_data(problem: Compositional, clients: Clients) -> tuple[Any, ...]:
    """A batch of one sample and, in a conditional problem, the outer sample."""
    if not problem.inner_is_conditional:
        return (_one_sample(clients.lower),)
    row = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape[1:], a.dtype), clients.upper.rows)
    return _one_sample(clients.lower), row


_PAIRS = " A tuple of two is (x, y); give an x that is such a tuple itself as init=(x, None)."


def _check_inner(problem: Compositional, x: Any, y: Any, data: tuple[Any, ...]) -> None:
    batch, *sample = data
    try:
        value = jax.eval_shape(lambda *z: call(problem.inner, *z, key=jax.random.key(0)), x, *data)
    except Exception as error:
        raise ValueError(
            f"Compositional.inner fails on init and a batch of one sample: {_first_line(error)} (x is {_shape(x)}, a "
            f"batch is {_shape(batch)}{f', the outer sample {_shape(*sample)}' if sample else ''}.{_PAIRS})"
        ) from error
    if _shape(value) != _shape(y):
        raise ValueError(
            f"init: y is {_shape(y)}, and the inner function's value is {_shape(value)}; they must agree.{_PAIRS}"
        )


def _first_line(error: Exception) -> str:
    line = str(error).strip().splitlines()[0] if str(error).strip() else ""
    return f"{type(error).__name__}: {line}".rstrip(": ") + "."


def _shape(value: Any) -> str:
    leaves = jax.tree_util.tree_leaves_with_path(value)
    each = [f"{jax.tree_util.keystr(path)} {leaf.shape}".strip() for path, leaf in leaves]
    return "; ".join(each) if len(each) <= 6 else "; ".join(each[:5]) + f"; and {len(each) - 5} more"


# A loss is a mean over its batch. Where samples are evaluated one by one, that is more than a manner of speaking.


_SOUND: OrderedDict[str, None] = OrderedDict()  # losses that were tried out, by what they came to
_REMEMBERED = 256
_LOOKED_AT = 64  # samples, in search of two that differ
_TRIED = 16  # samples of an evaluation


def check_means(problem: Problem, clients: Clients, x: Any, y: Any, names: frozenset[str]) -> None:
    """Raise ValueError if a loss that is evaluated sample by sample is no mean over its batch.

    Tried out on two samples, at a point near the start: what methods use of the loss on both samples, against the mean
    of the same on each.
    """
    for name in sorted(names - problem.random):  # of a random loss, two evaluations differ in any case
        rows = _two_samples(clients.lower if name in ("g", "r") else clients.upper, clients.here)
        if rows is None:
            continue
        z = _nudged((x, y))
        both_ways = _together_and_alone(_used_of(problem, clients, name))
        key = _key_of(both_ways, z, rows)
        if key not in _SOUND:
            _compare(problem, name, both_ways, (z, (x, y)), rows)
            _remember(key)


def check_features(problem: Problem, clients: Clients, x: Any) -> None:
    """Raise ValueError if a row of a problem's features is not made of that row alone.

    Tried out on two samples of each level, if need be of two clients, at a point near the start: both together, against
    one by one.
    """
    features: Any = problem.features
    sources = [] if features is None else [s for s in (clients.lower, clients.upper) if s is not None]

    def both_ways(x: Any, rows: Any) -> Any:
        return features(x, rows), jax.vmap(lambda row: features(x, jax.tree.map(lambda a: a[None], row)))(rows)

    for rows in (_two_samples(source, clients.here, of_one=False) for source in sources):
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
    """Whether two arrays of numbers are the same to rounding, or have none to compare."""
    if not jnp.issubdtype(a.dtype, jnp.floating):
        return bool(jnp.all(a == b))
    if not bool(jnp.all(jnp.isfinite(a)) & jnp.all(jnp.isfinite(b))):
        return True
    size = float(jnp.linalg.norm(a.ravel()) + jnp.linalg.norm(b.ravel()))
    tolerance = min(0.1, max(1e-6, 8000 * float(jnp.finfo(a.dtype).eps)))
    return float(jnp.linalg.norm((a - b).ravel())) <= tolerance * size + 1e-30


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
            clients.few(_TRIED, ragged)
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


def _two_samples(source: Source, here: range | None = None, of_one: bool = True) -> Any:
    """Two samples of the largest client that is here, or else of two clients, if possible such that differ; or None."""
    here = range(len(source.sizes)) if here is None else here
    sizes = np.asarray(source.sizes)[here.start : here.stop]
    largest, size = here.start + int(np.argmax(sizes)), int(sizes.max())
    if size < 2 and not of_one:
        largest, size = here.start, int(sizes.sum())
    if size < 2:
        return None
    begin = int(source.offsets[largest])
    end = begin + min(size, _LOOKED_AT)
    first = [np.asarray(a[begin:end]) for a in jax.tree.leaves(source.rows)]
    differs = np.any([(a != a[:1]).reshape(len(a), -1).any(axis=1) for a in first], axis=0)
    other = int(np.argmax(differs)) if differs.any() else 1
    return jax.tree.map(lambda a: a[np.array([begin, begin + other])], source.rows)


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
    def both_ways(z: Any, rows: Any) -> Any:
        each = jax.vmap(lambda row: used(z, jax.tree.map(lambda a: a[None], row)))(rows)
        return used(z, rows), jax.tree.map(lambda a: jnp.mean(a, axis=0), each)

    return both_ways


def _nudged(z: Any) -> Any:
    """A point near z: at z itself (all zeros, say) much is equal by chance."""
    rng = np.random.default_rng(0)
    return jax.tree.map(lambda a: jnp.asarray(a + 0.1 * rng.normal(size=a.shape), a.dtype), z)


def _compare(problem: Any, name: str, both_ways: Callable[..., Any], points: Sequence[Any], rows: Any) -> None:
    for z in points:
        together, alone = jax.jit(both_ways)(z, rows)
        pairs = list(zip(jax.tree.leaves(together), jax.tree.leaves(alone), strict=True))
        if all(bool(jnp.all(jnp.isfinite(a)) & jnp.all(jnp.isfinite(b))) for a, b in pairs):
            break
    else:
        return
    for a, b in pairs:
        if not _close(a, b):
            upper = "upper" if isinstance(problem, Bilevel) else _first_field(problem)
            lower = {Bilevel: "lower", Compositional: "inner"}.get(type(problem), upper)
            where = {"r": "inner", "g": lower}.get(name, upper)
            what = "it" if name == "f" and a.ndim == 0 else "its gradient" if name != "r" else "its value"
            shown = lambda v: np.array2string(np.asarray(v).ravel()[:3], precision=5)
            raise ValueError(
                f"{type(problem).__name__}.{where} is no mean over its batch: on two samples {what} is {shown(a)}, the "
                f"mean over each of them alone {shown(b)}. Where clients differ in size, have fewer samples than a "
                "batch, or where the method weighs single samples, the loss is evaluated sample by sample, and that "
                "would change the problem. Write it as a mean (jnp.mean over the batch, plus terms without data); or "
                "give all clients as many samples, and batches that are not larger."
            )
