"""Hyperparameters: which are traced and which are static, schedules, and the checks that go with each word."""

import dataclasses
import typing
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from rookery.arguments import is_number
from rookery.fed import Algorithm, Epochs
from rookery.source import Count


class Split(NamedTuple):
    """An algorithm in two parts: the record with its floats and arrays taken out, and those, to be traced."""

    fixed: Any
    traced: dict[str, Any]


@dataclasses.dataclass(frozen=True)
class _Traced:
    """Stands in the record for a value that is traced."""


def split(algorithm: Algorithm) -> Split:
    """Take the floats (in tuples, too) and the arrays out of the record: changing them does not compile anything."""
    traced: dict[str, Any] = {}
    for field in dataclasses.fields(algorithm):  # type: ignore[arg-type]
        value = getattr(algorithm, field.name)
        if _is_float(field, value) or _is_scalar(value):  # a float takes the variables' type, whatever its own
            traced[field.name] = float(value)
        elif isinstance(value, list | np.ndarray) or hasattr(value, "dtype"):
            traced[field.name] = jnp.asarray(value)
        elif isinstance(value, tuple) and all(isinstance(leaf, float) for leaf in jax.tree.leaves(value)):
            traced[field.name] = value
    return Split(dataclasses.replace(algorithm, **dict.fromkeys(traced, _Traced())), traced)  # type: ignore[type-var]


def join(fixed: Any, traced: dict[str, Any]) -> Any:
    """The inverse of split."""
    return dataclasses.replace(fixed, **traced)


def at_round(algorithm: Any, t: Count) -> Any:
    """The record with every schedule replaced by its value in round t."""
    now = {}
    for field in dataclasses.fields(algorithm):
        value = getattr(algorithm, field.name)
        if callable(value):
            now[field.name] = value(t)
    return dataclasses.replace(algorithm, **now)


def _is_float(field: Any, value: Any) -> bool:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    return isinstance(value, float) or field.type is float or float in typing.get_args(field.type)


def _is_scalar(value: Any) -> bool:
    return hasattr(value, "dtype") and np.ndim(value) == 0 and jnp.issubdtype(value.dtype, jnp.floating)


def _positive(value: Any) -> str | None:
    number = isinstance(value, int | float | np.number) and not isinstance(value, bool)
    number = number or (hasattr(value, "dtype") and np.ndim(value) == 0)
    return None if number and np.isfinite(value) and value > 0 else "a positive number"


def _share(value: Any) -> str | None:
    return None if _positive(value) is None and value <= 1 else "a number above 0, at most 1"


def _at_least_zero(value: Any) -> str | None:
    return None if value == 0 or _positive(value) is None else "a number, at least 0"


def _decay(value: Any) -> str | None:
    return None if value == 0 or (_positive(value) is None and value < 1) else "a number below 1, at least 0"


def _bounds(value: Any) -> str | None:
    def pair(own: Any) -> bool:
        two = isinstance(own, tuple) and len(own) == 2 and not any(_positive(bound) for bound in own)
        return own is None or (two and own[0] <= own[1])

    good = isinstance(value, tuple) and len(value) == 3 and all(pair(own) for own in value)
    return None if good else "a tuple with, for x, y and z, each a pair (least, most) of positive numbers or None"


def _local_steps(value: Any) -> str | None:
    if isinstance(value, Epochs):
        return None if is_number(value.passes) and value.passes > 0 else "Epochs of a positive number"
    if isinstance(value, tuple):
        good = len(value) == 2 and all(isinstance(v, int) for v in value) and 1 <= value[0] <= value[1]
        return None if good else "a range (low, high) of integers with 1 <= low <= high"
    if isinstance(value, list | np.ndarray) or hasattr(value, "dtype"):
        array = np.asarray(value)
        good = array.ndim == 1 and np.issubdtype(array.dtype, np.integer) and (array >= 1).all()
        return None if good else "one positive integer for each client"
    return _count(1)(value)


def _count(least: int) -> Callable[[Any], str | None]:
    def check(value: Any) -> str | None:
        good = isinstance(value, int) and not isinstance(value, bool) and value >= least
        return None if good else f"an integer, at least {least}"

    return check


def _or(special: tuple[Any, ...], check: Callable[[Any], str | None]) -> Callable[[Any], str | None]:
    def either(value: Any) -> str | None:
        if any(value is s or (isinstance(value, str) and value == s) for s in special):
            return None
        expected = check(value)
        return expected and f"{expected}, or {' or '.join(map(repr, special))}"

    return either


def _one_of(*names: str) -> Callable[[Any], str | None]:
    return lambda value: None if value in names else "one of " + ", ".join(map(repr, names))


def _boolean(value: Any) -> str | None:
    return None if isinstance(value, bool) else "True or False"


def is_optimizer(value: Any) -> bool:
    """Whether it has the two functions of an optimizer of optax's."""
    parts = getattr(value, "init", None), getattr(value, "update", None)
    return not isinstance(value, type) and all(map(callable, parts))


def _optimizer(value: Any) -> str | None:
    return None if value is None or is_optimizer(value) else "an optimizer of optax's, as optax.adam(1e-3) is, or None"


# What a field without a rule may be, by its type.
_BY_TYPE: dict[Any, Callable[[Any], str | None]] = {
    float: lambda value: None if is_number(value) or _is_scalar(value) else "a number",
    int: lambda value: None if isinstance(value, int | np.integer) and not isinstance(value, bool) else "an integer",
    bool: _boolean,
}

# An optimizer has a step size of its own, in the place of this one.
REPLACED = {"optimizer": "step", "lower_optimizer": "lower_step", "upper_optimizer": "upper_step"}


def unused(algorithm: Algorithm) -> dict[str, str]:
    """The step sizes that are not used, each with the optimizer that is in its place."""
    return {step: name for name, step in REPLACED.items() if getattr(algorithm, name, None) is not None}


# The same word means the same thing in every algorithm, so what it may be is written once.
RULES: dict[str, Callable[[Any], str | None]] = {
    "step": _positive,
    "upper_step": _positive,
    "lower_step": _positive,
    "server_step": _positive,
    "hessian_step": _or(("auto",), _positive),
    "local_steps": _local_steps,
    "lower_local_steps": _local_steps,
    "upper_local_steps": _local_steps,
    "lower_rounds": _count(1),
    "neumann": _one_of("sum", "random", "cg"),
    "neumann_terms": _count(1),
    "batch_size": _or((None,), _count(1)),
    "anchor_batch": _or((None,), _count(1)),
    "upper_batch": _or((None,), _count(1)),
    "lower_batch": _or((None,), _count(1)),
    "first_batch": _or((None,), _count(1)),
    "inner_batch": _or((None,), _count(1)),
    "shared_batch": _boolean,
    "delta": _positive,
    "offset": _positive,
    "c_lower": _positive,
    "c_upper": _positive,
    "c_linear": _positive,
    "resample": _boolean,
    "scale_steps": _boolean,
    "linear_step": _positive,
    "server_upper_step": _positive,
    "server_lower_step": _positive,
    "server_linear_step": _positive,
    "momentum": _share,
    "gradient_momentum": _share,
    "server_inner_step": _positive,
    "anchor_every": _count(1),
    "as_printed": _boolean,
    "output": _one_of("last", "random"),
    "case": _one_of("I", "II"),
    "share_inner_every_step": _boolean,
    "share_inner": _boolean,
    "inner": _one_of("shared", "own"),
    "objective": _one_of("cvar", "chi2", "kl"),
    "size": _positive,
    "penalty": _positive,
    "pool": _boolean,
    "dual_step": _positive,
    "fairness": _at_least_zero,
    "decay": _decay,
    "floor": _positive,
    "bounds": _or((None,), _bounds),
    "radius": _or((None,), _positive),
    "direction": _one_of("gradient", "momentum", "storm"),
    "aggregation": _one_of("sum", "reweighted"),
    "server": _one_of("fixed", "adaptive"),
    "compress": _one_of("top", "random", "none", "sketch"),
    "shrink": _count(1),
    "error_feedback": _boolean,
    "model_step": _positive,
    "weight_step": _positive,
    "sync_every": _count(1),
    "refresh": _share,
    "steps": _count(1),
    "average": _one_of("last", "theory"),
    "strong_convexity": _or((None,), _positive),
    "personal_step": _positive,
    "personal_steps": _count(1),
    "proximal": _positive,
    "accuracy": _positive,
    "inner_steps": _count(1),
    "inner_step": _positive,
    "optimizer": _optimizer,
    "lower_optimizer": _optimizer,
    "upper_optimizer": _optimizer,
    "server_upper_optimizer": _optimizer,
    "server_lower_optimizer": _optimizer,
}


# What the words mean, for lists and pages. A class says beside its fields what they are called in its paper.
MEANINGS: dict[str, str] = {
    "step": "step size on x",
    "upper_step": "step size on x",
    "lower_step": "step size on y",
    "server_step": "step size of the server, on what the clients' steps came to",
    "hessian_step": "step of the series for the inverse Hessian in y, at most 1/its largest eigenvalue, or auto",
    "local_steps": "steps of a client between two exchanges: a number, a range, epochs, or one number for each client",
    "lower_local_steps": "local steps on y: a number, a range, epochs, or one number for each client",
    "upper_local_steps": "local steps on x: a number, a range, epochs, or one number for each client",
    "lower_rounds": "how often y is improved in a round, before x moves",
    "neumann": "how the inverse Hessian is applied: sum (a series), random (a series of random length), cg",
    "neumann_terms": "terms of that series, or steps of cg; more: a truer hypergradient, more exchanges",
    "batch_size": "samples of a minibatch",
    "anchor_batch": "samples of the gradients that variance reduction starts from",
    "upper_batch": "samples of the upper level's minibatches",
    "lower_batch": "samples of the lower level's minibatches",
    "first_batch": "samples of the estimates that the method starts from",
    "inner_batch": "samples of the inner function's minibatches",
    "shared_batch": "whether all of a step's derivatives are taken on the same minibatch",
    "delta": "factor of the steps' schedule, which falls like delta/(offset + t)^(1/3)",
    "offset": "offset of the steps' schedule: the larger, the later it falls",
    "c_lower": "weight of what is new in the momentum of y",
    "c_upper": "weight of what is new in the momentum of x",
    "c_linear": "weight of what is new in the momentum of the linear system",
    "resample": "whether every exchange draws a cohort of its own",
    "scale_steps": "whether step sizes are divided by the number of local steps",
    "linear_step": "step size on the solution of the linear system, [∇²_y g]⁻¹∇_y f",
    "server_upper_step": "step size of the server on x",
    "server_lower_step": "step size of the server on y",
    "server_linear_step": "step size of the server on the solution of the linear system",
    "momentum": "weight of what is new in a running estimate; 1: no memory",
    "gradient_momentum": "weight of what is new in the running gradient",
    "server_inner_step": "step size of the server on the inner function's value",
    "anchor_every": "steps from one estimate on large batches to the next",
    "as_printed": "whether the paper's lines are followed where its proof needs others",
    "output": "what the run returns: the last iterate, one drawn at random, or the average",
    "case": "which of the paper's variants",
    "share_inner_every_step": "whether the inner function's value is averaged at every step",
    "share_inner": "whether the clients' inner values are averaged",
    "inner": "whose inner value is used: that of all clients together (shared), or each client's own",
    "objective": "which worst case over the samples: cvar, chi2 or kl",
    "size": "size of the set of weights: the share of the worst samples (cvar), the radius (chi2)",
    "penalty": "how much unequal weights cost: the smaller, the more the hard samples count",
    "pool": "whether the worst case is over all clients' batches together",
    "dual_step": "step size on the samples' weights",
    "fairness": "how much clients with a large loss count; 0: as in FedAvg",
    "decay": "how much of the second moment is kept from step to step",
    "floor": "what is added to the second moment's root, so that steps stay bounded",
    "bounds": "least and largest adaptive step sizes of x, y and the linear system",
    "radius": "radius of the ball that an estimate is kept in",
    "direction": "what a step follows: the gradient, its momentum, or STORM's",
    "aggregation": "how clients with different numbers of steps are weighed: sum, or reweighted",
    "server": "step sizes of the server: fixed or adaptive",
    "compress": "how messages are compressed: top, random, none or sketch",
    "shrink": "by what factor a message is made smaller",
    "error_feedback": "whether what compression left out is added to the next message",
    "model_step": "step size on the model",
    "weight_step": "step size on the clients' weights",
    "sync_every": "local steps from one exchange to the next",
    "refresh": "chance, at each step, that the reference point of variance reduction is renewed",
    "steps": "local steps of one call of Local-SVRG",
    "average": "which iterate a call of Local-SVRG returns: the last one, or the theory's average",
    "strong_convexity": "of the losses; the average's weights depend on it",
    "personal_step": "step size on the client's own model",
    "personal_steps": "steps on the client's own model in a round",
    "proximal": "how strongly a client's model is held to the common one",
    "accuracy": "norm of the gradient at which a client's own problem counts as solved",
    "inner_steps": "steps on the client's own problem, at most",
    "inner_step": "step size on the client's own problem",
    "optimizer": "optimizer of optax's for the local steps; from Python alone",
    "lower_optimizer": "optimizer of optax's for the local steps on y; from Python alone",
    "upper_optimizer": "optimizer of optax's for the local steps on x; from Python alone",
}


def _first_value(name: str, field: Any, schedule: Callable[[Count], Any], kind: Any) -> float:
    if field.type is not float and float not in typing.get_args(field.type):
        raise ValueError(f"{name}: {field.name} is a function; only a step size may be a schedule (round -> float).")
    try:
        made = jax.eval_shape(schedule, jax.ShapeDtypeStruct((), np.int32))
        first, shape = schedule(0), made.shape
    except Exception as error:
        said = str(error).strip().splitlines() or [""]
        raise ValueError(
            f"{name}: the schedule {field.name} can't be compiled ({type(error).__name__}: {said[0]}): it is given the "
            "round as a traced integer, so write it with jax.numpy, jnp.where and the like, or take one of optax's."
        ) from error
    if shape != ():
        raise ValueError(f"{name}: the schedule {field.name} returns an array of shape {shape}; return one number.")
    if made.dtype == np.float64 and not made.weak_type and kind is not None and jnp.finfo(kind).bits < 64:
        raise ValueError(
            f"{name}: the schedule {field.name} returns float64, and the variables are {np.dtype(kind)}: return "
            "jnp.float32(...), or start from float64."
        )
    return float(first)


def check(algorithm: Algorithm, n: int, kind: Any = None) -> None:
    """Raise ValueError at the first hyperparameter that is not what its word asks for; `kind`: the variables' type."""
    name = type(algorithm).__name__
    for field in dataclasses.fields(algorithm):  # type: ignore[arg-type]
        value = getattr(algorithm, field.name)
        rule = RULES.get(field.name)
        if typing.get_origin(field.type) is Literal:
            rule = _one_of(*typing.get_args(field.type))  # a method may have some of a word's choices only
        if rule is None:
            rule = _BY_TYPE.get(field.type)
        if rule is None or (value is None and type(None) in typing.get_args(field.type)):
            continue
        if field.type is int and rule is _local_steps:
            rule = _count(1)  # a method whose clients all take as many
        where = ""
        if callable(value) and rule is not _optimizer:
            where, value = " in round 0", _first_value(name, field, value, kind)
        expected = rule(value)
        if expected:
            raise ValueError(f"{name}: {field.name}={value!r}{where} is not {expected}.")
        if "local_steps" in field.name and not isinstance(value, int | tuple | Epochs) and len(value) != n:
            raise ValueError(f"{name}: {field.name} has {len(value)} entries; give one for each of the {n} clients.")
    if getattr(algorithm, "average", "last") == "theory" and getattr(algorithm, "strong_convexity", None) is None:
        raise ValueError(f'{name}: average="theory" weighs the iterates by μ: give strong_convexity=μ, of the losses.')
