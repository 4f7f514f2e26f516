"""Models as variables: the floating-point arrays of a pytree are optimised, everything else is kept.

Equinox modules, Flax variables and states, and users' own trees hold more than numbers to optimise: functions, flags,
counters, keys. Methods see `Variables`, only the arrays; losses, `evaluate` and results have the tree as the user gave
it.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.tree_util import DictKey, SequenceKey

from rookery.problems.functions import with_functions
from rookery.problems.problems import Composed, Problem, SingleLevel, WeightedNodes, unconstrained


@jax.tree_util.register_pytree_with_keys_class
class Variables:
    """The floating-point arrays of a model, x or y, by name."""

    def __init__(self, of: str, names: tuple[str, ...], arrays: tuple[Any, ...]) -> None:
        self.of, self.names, self.arrays = of, names, arrays

    def tree_flatten_with_keys(self) -> tuple[list[tuple[Any, Any]], tuple[str, tuple[str, ...]]]:
        """Return the arrays, each with its name."""
        return [(DictKey(name), a) for name, a in zip(self.names, self.arrays, strict=True)], (self.of, self.names)

    @classmethod
    def tree_unflatten(cls, fixed: tuple[str, tuple[str, ...]], arrays: Any) -> "Variables":
        """Invert `tree_flatten_with_keys`."""
        return cls(*fixed, tuple(arrays))

    def __repr__(self) -> str:
        return f"Variables({', '.join(self.names)})"


@dataclass(frozen=True, eq=False)
class Model:
    """A tree in which some leaves are variables: its structure, their names, and the other leaves."""

    of: str  # "x", "y" or "theta"
    structure: Any
    names: tuple[str, ...]
    leaves: tuple[Any, ...]  # None at the variables' positions
    positions: tuple[int, ...]

    def variables(self, value: Any) -> Variables:
        """Return the variables of a tree of this structure."""
        leaves = self.structure.flatten_up_to(value)
        return Variables(self.of, self.names, tuple(leaves[i] for i in self.positions))

    def whole(self, variables: Variables) -> Any:
        """Return the tree with these variables."""
        leaves = list(self.leaves)
        for i, a in zip(self.positions, variables.arrays, strict=True):
            leaves[i] = a
        return jax.tree.unflatten(self.structure, leaves)


@dataclass(frozen=True)
class Adapted:
    """A problem and its start as functions of `Variables`, and the conversion of results back to models."""

    problem: Any
    init: Any
    models: tuple[Model, ...] = ()

    def whole(self, value: Any) -> Any:
        """Return the value with every `Variables` in it replaced by its model."""
        if not self.models:
            return value
        models = {model.of: model for model in self.models}
        restore = lambda v: models[v.of].whole(v) if isinstance(v, Variables) else v
        return jax.tree.map(restore, value, is_leaf=lambda v: isinstance(v, Variables))

    def on_variables(self, function: Callable[..., Any] | None) -> Callable[..., Any] | None:
        """Return a function of models, e.g. `evaluate`, as a function of variables."""
        if function is None or not self.models:
            return function
        return functools.wraps(function)(lambda *args: function(*self.whole(args)))


def adapt(problem: Problem, init: Any) -> Adapted:
    """Separate the variables from the models in a problem's start, if there are any."""
    if not isinstance(problem, Problem):
        return Adapted(problem, init)
    x, y, back = _pair(problem, init)
    of_x, of_y = _model(x, "x"), _model(y, "theta" if isinstance(problem, WeightedNodes) else "y")
    if of_x is None and of_y is None:
        return Adapted(problem, init)
    start = back(x if of_x is None else of_x.variables(x), y if of_y is None else of_y.variables(y))
    return Adapted(_adapted(problem, of_x, of_y), start, tuple(m for m in (of_x, of_y) if m is not None))


def _pair(problem: Problem, init: Any) -> tuple[Any, Any, Callable[[Any, Any], Any]]:
    """Return x and y of a start, and a function that rebuilds it. `start_values` refuses what is not a start."""
    pair = isinstance(init, tuple) and len(init) == 2 and not hasattr(init, "_fields")
    if isinstance(problem, SingleLevel) or (isinstance(problem, Composed) and not pair):
        return init, None, lambda x, y: x
    if isinstance(problem, WeightedNodes):
        weights = pair and (init[0] is None or hasattr(init[0], "shape") or isinstance(init[0], list))
        return (None, init[1], lambda x, y: (init[0], y)) if weights else (None, init, lambda x, y: y)
    if not pair:
        return None, None, lambda x, y: init
    if isinstance(problem, Composed):  # y is the inner function's value
        return init[0], None, lambda x, y: (x, init[1])
    return init[0], init[1], lambda x, y: (x, y)


def _model(value: Any, name: str) -> Model | None:
    """Return a value as a model; None if all of its leaves are variables, or none of them."""
    with_paths, structure = jax.tree_util.tree_flatten_with_path(value)
    is_variable = [_is_variable(path, leaf, name) for path, leaf in with_paths]
    if all(is_variable) or not any(is_variable):
        return None
    positions = tuple(i for i, variable in enumerate(is_variable) if variable)
    names = tuple(jax.tree_util.keystr(with_paths[i][0]) for i in positions)
    leaves = tuple(None if variable else leaf for variable, (_, leaf) in zip(is_variable, with_paths, strict=True))
    return Model(name, structure, names, leaves, positions)


def _is_variable(path: Any, leaf: Any, name: str) -> bool:
    plain = all(isinstance(key, DictKey | SequenceKey) for key in path)  # in dicts and sequences, not in a module
    if isinstance(leaf, bool | np.bool_):
        return False
    if isinstance(leaf, int | float):
        return plain  # in a module it is a setting, e.g. a rate
    if not isinstance(leaf, np.ndarray | np.generic | jax.Array) or leaf.dtype == bool:
        return False
    if jnp.issubdtype(leaf.dtype, jnp.floating):
        return True
    numbers = np.issubdtype(leaf.dtype, np.number) if isinstance(leaf.dtype, np.dtype) else False
    if plain and numbers:
        raise ValueError(
            f"init: {name}{jax.tree_util.keystr(path)} must be floating point; its type is {leaf.dtype}. "
            "Use .astype(float)."
        )
    return plain and leaf.dtype == object


def _adapted(problem: Any, x: Model | None, y: Model | None) -> Any:
    """Return the problem as a function of `Variables`."""

    def of(name: str, function: Any) -> Any:
        models = [{"x": x, "y": y}[variable] for variable in problem.takes.get(name, "")]
        if not any(models):
            return function

        @functools.wraps(function)
        def adapted(*args: Any, **key: Any) -> Any:
            whole = [a if m is None else m.whole(a) for m, a in zip(models, args, strict=False)]
            return function(*whole, *args[len(models) :], **key)

        return adapted

    adapted, project = with_functions(problem, of), getattr(problem, "project_upper", unconstrained)
    if x is None or project is unconstrained:
        return adapted
    return replace(adapted, project_upper=lambda v: x.variables(project(x.whole(v))))
