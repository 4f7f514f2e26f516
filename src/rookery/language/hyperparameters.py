"""Hyperparameters: the values a field's annotation allows, which fields are traced, and which may be schedules."""

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


@dataclasses.dataclass(frozen=True, eq=False)  # compared by identity: `typing` merges equal annotations
class Rule:
    """The values that a field may have: in words for its error message, and as a test.

    `schedule`: whether it may also be a function round -> float with such values.
    """

    expected: str
    holds: Callable[[Any], bool]
    schedule: bool = False

    def __repr__(self) -> str:
        return self.expected  # as `help` of a method shows the annotation


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
    def is_pair(item: Any) -> bool:
        two = isinstance(item, tuple) and len(item) == 2 and all(_is_positive(bound) for bound in item)
        return item is None or (two and item[0] <= item[1])

    return isinstance(value, tuple) and len(value) == 3 and all(map(is_pair, value))


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
    """Return whether the value is an array of numbers, or a list that converts to one."""
    if isinstance(value, jax.Array):
        return True
    try:
        dtype = np.asarray(value).dtype if isinstance(value, list | _ARRAYS) else None
    except ValueError:  # lists of different lengths
        return False
    return dtype is not None and any(jnp.issubdtype(dtype, kind) for kind in (jnp.number, jnp.bool_))


def _is_too_large(value: Any) -> bool:
    """Return whether a count, or one in a range or a list, does not fit into a loop's 32-bit integers."""
    counts = value if isinstance(value, tuple) else np.ravel(value).tolist() if is_array(value) else [value]
    return any(isinstance(count, int) and count >= 2**31 for count in counts)


def is_optimizer(value: Any) -> bool:
    """Return whether the value has the two functions of an optax optimizer."""
    parts = getattr(value, "init", None), getattr(value, "update", None)
    return not isinstance(value, type) and all(map(callable, parts))


_COUNT = Rule("an integer of at least 1", _is_count)
LOCAL_STEPS = Rule(
    "an integer of at least 1, a range (low, high), Epochs of a positive number, or a list with an integer for each "
    "client",
    _are_steps,
)

# The annotations of a method's fields. Fields annotated as float, int, bool or Literal[...] are checked against that;
# fields with any other annotation are not checked.
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

_BY_NAME = {  # for annotations that are strings with names that can't be resolved
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
    """The annotations of a class's fields, resolved if they are strings (`from __future__ import annotations`)."""
    resolved: dict[str, Any] = {}
    for base in reversed(cls.__mro__):
        names = vars(sys.modules[base.__module__]) if base.__module__ in sys.modules else {}
        for name, annotation in inspect.get_annotations(base).items():
            resolved[name] = _resolved(annotation, names, dict(vars(base)))
    return resolved


def _resolved(annotation: Any, names: dict[str, Any], local: dict[str, Any]) -> Any:
    """The annotation with all strings in it evaluated."""
    text = annotation.__forward_arg__ if isinstance(annotation, typing.ForwardRef) else annotation
    if isinstance(text, str):
        try:
            annotation = eval(text, dict(names), local)
        except Exception:  # e.g. a name that is local to a function
            annotation = _BY_NAME.get(text.rpartition(".")[2], Any)
    members = _alternatives(annotation)
    if any(isinstance(member, typing.ForwardRef) for member in members):
        annotation = typing.Union[tuple(_resolved(member, names, local) for member in members)]  # noqa: UP007
    return annotation


def _alternatives(annotation: Any) -> list[Any]:
    """The members of a union, or the annotation itself."""
    if typing.get_origin(annotation) in (typing.Union, types.UnionType):
        return [inner for member in typing.get_args(annotation) for inner in _alternatives(member)]
    return [annotation]


def _rules(annotation: Any) -> list[Rule] | None:
    """The rules, one of which a value must satisfy; None if any value is allowed."""
    rules: list[Rule] = []
    for member in _alternatives(annotation):
        stated = [note for note in getattr(member, "__metadata__", ()) if isinstance(note, Rule)]
        if typing.get_origin(member) is Literal:
            words = typing.get_args(member)
            one_of = "one of " if len(words) > 1 else ""
            stated = [Rule(one_of + ", ".join(map(repr, words)), functools.partial(_is_one_of, words))]
        rule = stated[0] if stated else _PLAIN.get(member) if isinstance(member, type) else None
        if rule is None:
            return None
        rules.append(rule)
    return rules


def _is_one_of(words: tuple[Any, ...], value: Any) -> bool:
    return any(type(value) is type(word) and value == word for word in words)


def expected(cls: type, name: str) -> str:
    """The values that a field may have, in words; empty if its annotation does not restrict them."""
    return " or ".join(rule.expected for rule in _rules(annotations(cls).get(name, Any)) or [])


def may_be_schedule(cls: type, name: str) -> bool:
    """Return whether a field may be a function of the round."""
    return any(rule.schedule for rule in _rules(annotations(cls).get(name, Any)) or [])


def is_step(algorithm: Any, name: str) -> bool:
    """Return whether a field is a step size: annotated as one, or a number that is named like one."""
    if any(member is Step for member in _alternatives(annotations(algorithm.__class__).get(name, Any))):
        return True
    value = getattr(algorithm, name)
    return (name == "step" or name.endswith("_step")) and (isinstance(value, float) or _is_scalar(value))


class Split(NamedTuple):
    """An algorithm in two parts: a record without floats and arrays, and the floats and arrays, which are traced."""

    fixed: Any
    traced: dict[str, Any]


@dataclasses.dataclass(frozen=True)
class _Traced:
    """Stands in the record for a value that is traced."""


def split(algorithm: Any) -> Split:
    """Take floats, tuples of floats and arrays out of the record, so that changing them needs no compilation."""
    traced: dict[str, Any] = {}
    integers: dict[str, int] = {}
    for field in dataclasses.fields(algorithm):
        value = getattr(algorithm, field.name)
        if isinstance(value, np.integer):
            integers[field.name] = int(value)
        elif is_real(algorithm, field.name, value):  # as a Python float, it takes the type of the variables
            traced[field.name] = float(value)
        elif is_array(value):
            traced[field.name] = jnp.asarray(value)
        elif isinstance(value, tuple) and all(isinstance(leaf, float) for leaf in jax.tree.leaves(value)):
            traced[field.name] = value
    return Split(_with(algorithm, integers | dict.fromkeys(traced, _Traced())), traced)


def join(fixed: Any, traced: dict[str, Any]) -> Any:
    """The inverse of split."""
    return _with(fixed, traced)


def _with(algorithm: Any, values: dict[str, Any]) -> Any:
    """A copy of the record with other values. Its __post_init__ does not run again."""
    record = copy.copy(algorithm)
    for name in [name for name in getattr(record, "__dict__", ()) if is_cached(type(record), name)]:
        object.__delattr__(record, name)  # computed from the old values
    for name, value in values.items():
        object.__setattr__(record, name, value)
    return record


def made_by_class(algorithm: Any) -> list[str]:
    """The names of attributes that a __post_init__ computes: fields without `init`, and other attributes."""
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
    """Return whether a field's value is a real number, which is traced, and not a count."""
    if isinstance(value, float) or _is_scalar(value):
        return True
    if isinstance(value, bool) or not isinstance(value, int):
        return False
    kinds = _alternatives(annotations(algorithm.__class__).get(name, Any))
    return any(kind is float or float in typing.get_args(getattr(kind, "__origin__", None)) for kind in kinds)


def _is_scalar(value: Any) -> bool:
    return hasattr(value, "dtype") and np.ndim(value) == 0 and jnp.issubdtype(value.dtype, jnp.floating)


def unused(algorithm: Any) -> dict[str, str]:
    """The step sizes that are not used, each with the optimizer that replaces it: see `replaces` in `Algorithm`."""
    replaces = getattr(algorithm, "replaces", {})
    return {step: name for name, step in replaces.items() if getattr(algorithm, name, None) is not None}


def _first_value(name: str, field: Any, schedule: Schedule, dtype: Any) -> float:
    """The value of a schedule in round 0. Raise ValueError if the schedule does not return a number of a valid type."""
    what = f"{name}: the schedule {field.name}"
    try:
        value = jax.eval_shape(schedule, jax.ShapeDtypeStruct((), np.int32))
        first = schedule(0)
    except Exception as error:
        said = str(error).strip().splitlines() or [""]
        raise ValueError(
            f"{what} can't be compiled ({type(error).__name__}: {said[0]}). It is given the round as a traced integer: "
            "write it with jax.numpy, e.g. jnp.where, or take an optax schedule."
        ) from error
    if not _is_real_type(value.dtype):
        raise ValueError(f"{what} must return a real number; got {value.dtype}.")
    if value.shape != ():
        raise ValueError(f"{what} must return one number; got an array of shape {value.shape}.")
    if value.dtype == np.float64 and not value.weak_type and dtype is not None and jnp.finfo(dtype).bits < 64:
        raise ValueError(
            f"{what} must return the variables' type, {np.dtype(dtype)}; got float64. Return jnp.float32(...), or "
            "start from float64."
        )
    return float(first)


def check(algorithm: Any, n: int, dtype: Any = None) -> None:
    """Raise ValueError for the first hyperparameter with an invalid value. `dtype`: the variables' type."""
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
            where, value = " in round 0", _first_value(cls.__name__, field, value, dtype)
        if not any(rule.holds(value) for rule in rules):
            raise ValueError(f"{cls.__name__}: {field.name} must be {expected(cls, field.name)}; got {value!r}{where}.")
        if (LOCAL_STEPS in rules or _COUNT in rules) and _is_too_large(value):
            raise ValueError(f"{cls.__name__}: {field.name} must be below 2**31; got {value!r}.")
        if LOCAL_STEPS in rules and is_array(value) and np.ndim(value) and len(value) != n:
            raise ValueError(
                f"{cls.__name__}: {field.name} must have an entry for each of the {n} clients; got {len(value)}."
            )
