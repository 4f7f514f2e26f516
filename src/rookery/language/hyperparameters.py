"""Hyperparameters: what a field may be, by its annotation; which fields are traced, and which may be schedules."""

import copy
import dataclasses
import functools
import inspect
import sys
import types
import typing
from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from rookery.base.arguments import is_number
from rookery.base.content import is_cached
from rookery.data.rows import Count
from rookery.language.client import Epochs

Schedule = Callable[[Count], Any]
_ARRAYS = jax.Array | np.ndarray | np.generic


@dataclasses.dataclass(frozen=True, eq=False)  # by identity: `typing` makes one object of equal annotations
class Rule:
    """What a field may be: in words for its error message, and as a test.

    `schedule`: it may also be a function round -> float, whose values are such numbers.
    """

    expected: str
    holds: Callable[[Any], bool]
    schedule: bool = False


def _is_positive(value: Any) -> bool:
    scalar = isinstance(value, _ARRAYS) and value.ndim == 0 and _is_real_type(value.dtype)
    return bool((scalar or is_number(value)) and 0 < value < np.inf)


def _is_real_type(dtype: Any) -> bool:
    return jnp.issubdtype(dtype, jnp.floating) or jnp.issubdtype(dtype, jnp.integer)


def _is_zero(value: Any) -> bool:
    return is_number(value) and value == 0


def _is_count(value: Any) -> bool:
    return isinstance(value, int | np.integer) and not isinstance(value, bool) and bool(value >= 1)


def _is_bounds(value: Any) -> bool:
    def pair(own: Any) -> bool:
        two = isinstance(own, tuple) and len(own) == 2 and all(_is_positive(bound) for bound in own)
        return own is None or (two and own[0] <= own[1])

    return isinstance(value, tuple) and len(value) == 3 and all(pair(own) for own in value)


def _are_steps(value: Any) -> bool:
    if isinstance(value, Epochs):
        return is_number(value.passes) and value.passes > 0
    if isinstance(value, tuple):
        return len(value) == 2 and all(_is_count(v) for v in value) and value[0] <= value[1]
    if is_array(value) and np.ndim(value):
        array = np.asarray(value)
        return array.ndim == 1 and np.issubdtype(array.dtype, np.integer) and bool((array >= 1).all())
    return _is_count(value)


def is_array(value: Any) -> bool:
    """Return whether the value is an array of numbers, or a list that makes one."""
    if isinstance(value, jax.Array):
        return True
    try:
        dtype = np.asarray(value).dtype if isinstance(value, list | _ARRAYS) else None
    except ValueError:  # lists of different lengths
        return False
    return dtype is not None and any(jnp.issubdtype(dtype, kind) for kind in (jnp.number, jnp.bool_))


def _is_too_large(value: Any) -> bool:
    """Whether a count, or one in a range or a list, does not fit into the integers that loops count with."""
    whole = value if isinstance(value, tuple) else np.ravel(value).tolist() if is_array(value) else [value]
    return any(isinstance(own, int) and own >= 2**31 for own in whole)


def is_optimizer(value: Any) -> bool:
    """Whether it has the two functions of an optax optimizer."""
    parts = getattr(value, "init", None), getattr(value, "update", None)
    return not isinstance(value, type) and all(map(callable, parts))


_COUNT = Rule("an integer of at least 1", _is_count)
LOCAL_STEPS = Rule(
    "an integer of at least 1, a range (low, high), Epochs of a positive number, or a list with an integer for each "
    "client",
    _are_steps,
)

# The annotations of a method's fields. A field with another annotation (float, int, bool, Literal[...]) is checked
# against that alone, and one whose annotation says nothing is not checked.
if TYPE_CHECKING:
    Step = Any
    Positive = Any
    Share = Any
    Decay = Any
    Amount = Any
    Steps = Any
    Bounds = Any
    Optimizer = Any
    AtLeastOne = int
    BatchSize = int | None
else:
    Step = Annotated[float | Schedule, Rule("a positive number", _is_positive, schedule=True)]  # a step size
    Positive = Annotated[float | Schedule, Rule("a positive number", _is_positive, schedule=True)]
    Share = Annotated[
        float | Schedule, Rule("a number above 0 and at most 1", lambda v: _is_positive(v) and v <= 1, schedule=True)
    ]
    Decay = Annotated[
        float | Schedule,
        Rule("a number of at least 0 and below 1", lambda v: _is_zero(v) or (_is_positive(v) and v < 1), schedule=True),
    ]
    Amount = Annotated[
        float | Schedule, Rule("a number of at least 0", lambda v: _is_zero(v) or _is_positive(v), schedule=True)
    ]
    AtLeastOne = Annotated[int, _COUNT]
    BatchSize = Annotated[
        int | None, Rule("an integer of at least 1, or None for all the data", lambda v: v is None or _is_count(v))
    ]
    Steps = Annotated[Any, LOCAL_STEPS]  # a client's local steps: see Client.steps
    Bounds = Annotated[
        Any, Rule("a tuple of three, for x, y and z: a pair (least, most) of positive numbers, or None", _is_bounds)
    ]
    Optimizer = Annotated[
        Any, Rule("an optax optimizer such as optax.adam(1e-3), or None", lambda v: v is None or is_optimizer(v))
    ]

_WORDS = {  # for annotations that are texts and whose names can't be found
    "Step": Step, "Positive": Positive, "Share": Share, "Decay": Decay, "Amount": Amount, "AtLeastOne": AtLeastOne,
    "BatchSize": BatchSize, "Steps": Steps, "Bounds": Bounds, "Optimizer": Optimizer, "float": float, "int": int,
    "bool": bool,
}  # fmt: skip
_PLAIN = {
    float: Rule("a number", lambda v: is_number(v) or _is_scalar(v)),
    int: Rule("an integer", lambda v: isinstance(v, int | np.integer) and not isinstance(v, bool)),
    bool: Rule("True or False", lambda v: isinstance(v, bool)),
    type(None): Rule("None", lambda v: v is None),
}


@functools.cache
def annotations(cls: Any) -> dict[str, Any]:
    """The annotations of a class's fields, also where they are texts (`from __future__ import annotations`)."""
    found: dict[str, Any] = {}
    for base in reversed(cls.__mro__):
        names = vars(sys.modules[base.__module__]) if base.__module__ in sys.modules else {}
        for name, given in inspect.get_annotations(base).items():
            found[name] = _resolved(given, names, dict(vars(base)))
    return found


def _resolved(given: Any, names: dict[str, Any], own: dict[str, Any]) -> Any:
    """An annotation, or the text of one, without texts in it."""
    text = given.__forward_arg__ if isinstance(given, typing.ForwardRef) else given
    if isinstance(text, str):
        try:
            given = eval(text, dict(names), own)
        except Exception:  # a name of a function's own scope, say
            given = _WORDS.get(text.rpartition(".")[2], Any)
    members = _alternatives(given)
    if any(isinstance(member, typing.ForwardRef) for member in members):
        given = typing.Union[tuple(_resolved(member, names, own) for member in members)]  # noqa: UP007
    return given


def _alternatives(annotation: Any) -> list[Any]:
    """The members of a union, or the annotation alone."""
    if typing.get_origin(annotation) in (typing.Union, types.UnionType):
        return [own for member in typing.get_args(annotation) for own in _alternatives(member)]
    return [annotation]


def _rules(annotation: Any) -> list[Rule] | None:
    """The rules of which a value has to keep one; None if anything goes."""
    found: list[Rule] = []
    for own in _alternatives(annotation):
        stated = [note for note in getattr(own, "__metadata__", ()) if isinstance(note, Rule)]
        if typing.get_origin(own) is Literal:
            words = typing.get_args(own)
            one_of = "one of " if len(words) > 1 else ""
            stated = [Rule(one_of + ", ".join(map(repr, words)), functools.partial(_is_one_of, words))]
        rule = stated[0] if stated else _PLAIN.get(own) if isinstance(own, type) else None
        if rule is None:
            return None
        found.append(rule)
    return found


def _is_one_of(words: tuple[Any, ...], value: Any) -> bool:
    return any(type(value) is type(word) and value == word for word in words)


def expected(cls: type, name: str) -> str:
    """What a field of a method may be, in words; empty if its annotation does not say."""
    return " or ".join(rule.expected for rule in _rules(annotations(cls).get(name, Any)) or [])


def may_be_schedule(cls: type, name: str) -> bool:
    """Whether the field may be a function of the round."""
    return any(rule.schedule for rule in _rules(annotations(cls).get(name, Any)) or [])


def is_step(algorithm: Any, name: str) -> bool:
    """Whether the field is a step size: it is annotated as one, or it is called one and is a number."""
    if any(own is Step for own in _alternatives(annotations(algorithm.__class__).get(name, Any))):
        return True
    value = getattr(algorithm, name)
    return (name == "step" or name.endswith("_step")) and (isinstance(value, float) or _is_scalar(value))


class Split(NamedTuple):
    """An algorithm in two parts: the record with its floats and arrays taken out, and those, to be traced."""

    fixed: Any
    traced: dict[str, Any]


@dataclasses.dataclass(frozen=True)
class _Traced:
    """Stands in the record for a value that is traced."""


def split(algorithm: Any) -> Split:
    """Take the floats (in tuples, too) and the arrays out of the record: changing them does not compile anything."""
    traced: dict[str, Any] = {}
    whole: dict[str, int] = {}
    for field in dataclasses.fields(algorithm):
        value = getattr(algorithm, field.name)
        if isinstance(value, np.integer):
            whole[field.name] = int(value)
        elif is_real(algorithm, field.name, value):  # a float takes the variables' type
            traced[field.name] = float(value)
        elif is_array(value):
            traced[field.name] = jnp.asarray(value)
        elif isinstance(value, tuple) and all(isinstance(leaf, float) for leaf in jax.tree.leaves(value)):
            traced[field.name] = value
    return Split(_with(algorithm, whole | dict.fromkeys(traced, _Traced())), traced)


def join(fixed: Any, traced: dict[str, Any]) -> Any:
    """The inverse of split."""
    return _with(fixed, traced)


def _with(algorithm: Any, values: dict[str, Any]) -> Any:
    """A copy of the record with other values. Nothing of the class runs: its __post_init__ has seen the record once."""
    made = copy.copy(algorithm)
    for name in [name for name in getattr(made, "__dict__", ()) if is_cached(type(made), name)]:
        object.__delattr__(made, name)  # computed from the other values
    for name, value in values.items():
        object.__setattr__(made, name, value)
    return made


def made_by_class(algorithm: Any) -> list[str]:
    """The names of what is not given but made of it, by a __post_init__: fields without `init`, other attributes."""
    fields = {field.name: field.init for field in dataclasses.fields(algorithm)}
    names = {**fields, **getattr(algorithm, "__dict__", {})}
    return [name for name in names if not fields.get(name) and not is_cached(type(algorithm), name)]


def at_round(algorithm: Any, t: Count) -> Any:
    """The record with every schedule replaced by its value in round t."""
    named = [field.name for field in dataclasses.fields(algorithm)]
    schedules = [name for name in named if _is_schedule(type(algorithm), name, getattr(algorithm, name))]
    return _with(algorithm, {name: getattr(algorithm, name)(t) for name in schedules})


def _is_schedule(cls: type, name: str, value: Any) -> bool:
    return callable(value) and may_be_schedule(cls, name)


def is_real(algorithm: Any, name: str, value: Any) -> bool:
    """Whether this value of a field is a real number, which is traced, and not a count."""
    if isinstance(value, float) or _is_scalar(value):
        return True
    if isinstance(value, bool) or not isinstance(value, int):
        return False
    kinds = _alternatives(annotations(algorithm.__class__).get(name, Any))
    return any(own is float or float in typing.get_args(getattr(own, "__origin__", None)) for own in kinds)


def _is_scalar(value: Any) -> bool:
    return hasattr(value, "dtype") and np.ndim(value) == 0 and jnp.issubdtype(value.dtype, jnp.floating)


def unused(algorithm: Any) -> dict[str, str]:
    """The step sizes that are not used, each with the optimizer that is in its place: see `replaces` in `Algorithm`."""
    given = getattr(algorithm, "replaces", {})
    return {step: name for name, step in given.items() if getattr(algorithm, name, None) is not None}


# What the library's own words mean, for lists and pages. A class says beside its fields what its paper calls them.
MEANINGS: dict[str, str] = {
    "step": "step size on x",
    "upper_step": "step size on x",
    "lower_step": "step size on y",
    "server_step": "step size of the server, on what the clients' steps came to",
    "hessian_step": "step of the series for the inverse Hessian in y, at most 1/its largest eigenvalue, or auto",
    "local_steps": "steps of a client between two exchanges",
    "lower_local_steps": "local steps on y",
    "upper_local_steps": "local steps on x",
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
    "optimizer": "optax optimizer for the local steps; from Python only",
    "lower_optimizer": "optax optimizer for the local steps on y; from Python only",
    "upper_optimizer": "optax optimizer for the local steps on x; from Python only",
}


def _first_value(name: str, field: Any, schedule: Schedule, kind: Any) -> float:
    try:
        made = jax.eval_shape(schedule, jax.ShapeDtypeStruct((), np.int32))
        first, shape = schedule(0), made.shape
    except Exception as error:
        said = str(error).strip().splitlines() or [""]
        raise ValueError(
            f"{name}: the schedule {field.name} can't be compiled ({type(error).__name__}: {said[0]}): it is given the "
            "round as a traced integer, so write it with jax.numpy, jnp.where and the like, or take one of optax's."
        ) from error
    if not _is_real_type(made.dtype):
        raise ValueError(f"{name}: the schedule {field.name} returns {made.dtype}; return a real number.")
    if shape != ():
        raise ValueError(f"{name}: the schedule {field.name} returns an array of shape {shape}; return one number.")
    if made.dtype == np.float64 and not made.weak_type and kind is not None and jnp.finfo(kind).bits < 64:
        raise ValueError(
            f"{name}: the schedule {field.name} returns float64, and the variables are {np.dtype(kind)}: return "
            "jnp.float32(...), or start from float64."
        )
    return float(first)


def check(algorithm: Any, n: int, kind: Any = None) -> None:
    """Raise ValueError at the first hyperparameter that its annotation does not allow; `kind`: the variables' type."""
    cls: Any = type(algorithm)
    for field in dataclasses.fields(algorithm):
        value, where = getattr(algorithm, field.name), ""
        rules = _rules(annotations(cls).get(field.name, Any))
        if rules is None:
            continue
        if callable(value) and not any(rule.holds(value) for rule in rules):
            if not may_be_schedule(cls, field.name):
                hint = " Only a field that is annotated as rk.Step may be a schedule (round -> float)."
                what = expected(cls, field.name)
                raise ValueError(
                    f"{cls.__name__}: {field.name} must be {what}; got the function "
                    f"{getattr(value, '__name__', value)}.{hint if 'number' in what or 'integer' in what else ''}"
                )
            where, value = " in round 0", _first_value(cls.__name__, field, value, kind)
        if not any(rule.holds(value) for rule in rules):
            raise ValueError(f"{cls.__name__}: {field.name} must be {expected(cls, field.name)}; got {value!r}{where}.")
        if (LOCAL_STEPS in rules or _COUNT in rules) and _is_too_large(value):
            raise ValueError(f"{cls.__name__}: {field.name} must be below 2**31; got {value!r}.")
        if LOCAL_STEPS in rules and is_array(value) and np.ndim(value) and len(value) != n:
            raise ValueError(
                f"{cls.__name__}: {field.name} must have an entry for each of the {n} clients; got {len(value)}."
            )
