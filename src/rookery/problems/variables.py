"""A model as a variable: of any pytree the floating-point arrays are optimised, and everything else is kept.

Equinox modules, Flax variables and states, and a user's own trees hold more than numbers to optimise: functions, flags,
counters, keys. Methods see `Variables`, the arrays alone; losses, `evaluate` and results have the tree as it was given.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.tree_util import DictKey, SequenceKey

from rookery.problems.problems import (
    Bilevel,
    Compositional,
    Minimax,
    Problem,
    SingleLevel,
    WeightedNodes,
    unconstrained,
)


@jax.tree_util.register_pytree_with_keys_class
class Variables:
    """The floating-point arrays of a model, x's or y's, by their names."""

    def __init__(self, of: str, names: tuple[str, ...], arrays: tuple[Any, ...]) -> None:
        self.of, self.names, self.arrays = of, names, arrays

    def tree_flatten_with_keys(self) -> tuple[list[tuple[Any, Any]], tuple[str, tuple[str, ...]]]:
        """Its arrays, each with its name."""
        return [(DictKey(name), a) for name, a in zip(self.names, self.arrays, strict=True)], (self.of, self.names)

    @classmethod
    def tree_unflatten(cls, whose: tuple[str, tuple[str, ...]], arrays: Any) -> "Variables":
        """The inverse of tree_flatten_with_keys."""
        return cls(*whose, tuple(arrays))

    def __repr__(self) -> str:
        return f"Variables({', '.join(self.names)})"


@dataclass(frozen=True, eq=False)
class Model:
    """A tree of which some leaves are variables: its structure, their names, and the other leaves."""

    of: str  # "x", "y" or "theta"
    structure: Any
    names: tuple[str, ...]
    leaves: tuple[Any, ...]  # None in the places of the variables
    places: tuple[int, ...]

    def variables(self, value: Any) -> Variables:
        """Those of a tree of this structure."""
        leaves = self.structure.flatten_up_to(value)
        return Variables(self.of, self.names, tuple(leaves[i] for i in self.places))

    def whole(self, variables: Variables) -> Any:
        """The tree with these variables."""
        leaves = list(self.leaves)
        for i, a in zip(self.places, variables.arrays, strict=True):
            leaves[i] = a
        return jax.tree.unflatten(self.structure, leaves)


@dataclass(frozen=True)
class Taken:
    """A problem and its start as methods see them, and the way back."""

    problem: Any
    init: Any
    models: tuple[Model, ...] = ()

    def whole(self, value: Any) -> Any:
        """The value with every `Variables` in it as the model that it is of."""
        if not self.models:
            return value
        of = {model.of: model for model in self.models}
        back = lambda v: of[v.of].whole(v) if isinstance(v, Variables) else v
        return jax.tree.map(back, value, is_leaf=lambda v: isinstance(v, Variables))

    def seeing(self, function: Callable[..., Any] | None) -> Callable[..., Any] | None:
        """A function of models as one of variables: `evaluate`, say."""
        if function is None or not self.models:
            return function
        given = function
        return functools.wraps(given)(lambda *args: given(*self.whole(args)))


def taken(problem: Problem, init: Any) -> Taken:
    """The problem and the start with their models taken apart, where there are any."""
    if not isinstance(problem, Problem):
        return Taken(problem, init)
    x, y, back = _pair(problem, init)
    of_x, of_y = _model(x, "x"), _model(y, "theta" if isinstance(problem, WeightedNodes) else "y")
    if of_x is None and of_y is None:
        return Taken(problem, init)
    start = back(x if of_x is None else of_x.variables(x), y if of_y is None else of_y.variables(y))
    return Taken(_adapted(problem, of_x, of_y), start, tuple(m for m in (of_x, of_y) if m is not None))


def _pair(problem: Problem, init: Any) -> tuple[Any, Any, Callable[[Any, Any], Any]]:
    """The models of a start, and how a start is made of them; what is no start is left to `start_values`."""
    pair = isinstance(init, tuple) and len(init) == 2 and not hasattr(init, "_fields")
    if isinstance(problem, SingleLevel) or (isinstance(problem, Compositional) and not pair):
        return init, None, lambda x, y: x
    if isinstance(problem, WeightedNodes):
        weights = pair and (init[0] is None or hasattr(init[0], "shape") or isinstance(init[0], list))
        return (None, init[1], lambda x, y: (init[0], y)) if weights else (None, init, lambda x, y: y)
    if not pair:
        return None, None, lambda x, y: init
    if isinstance(problem, Compositional):  # y is the inner function's value
        return init[0], None, lambda x, y: (x, init[1])
    return init[0], init[1], lambda x, y: (x, y)


def _model(value: Any, name: str) -> Model | None:
    """The model that a value is; None if all its leaves are variables, or none is."""
    with_paths, structure = jax.tree_util.tree_flatten_with_path(value)
    is_variable = [_is_variable(path, leaf, name) for path, leaf in with_paths]
    if all(is_variable) or not any(is_variable):
        return None
    places = tuple(i for i, own in enumerate(is_variable) if own)
    names = tuple(jax.tree_util.keystr(with_paths[i][0]) for i in places)
    leaves = tuple(None if own else leaf for own, (_, leaf) in zip(is_variable, with_paths, strict=True))
    return Model(name, structure, names, leaves, places)


def _is_variable(path: Any, leaf: Any, name: str) -> bool:
    plain = all(isinstance(key, DictKey | SequenceKey) for key in path)
    if isinstance(leaf, bool | np.bool_):
        return False
    if isinstance(leaf, int | float):
        return plain  # in a module it is a setting: a rate, a number of layers
    if not isinstance(leaf, np.ndarray | np.generic | jax.Array) or leaf.dtype == bool:
        return False
    if jnp.issubdtype(leaf.dtype, jnp.floating):
        return True
    numbers = np.issubdtype(leaf.dtype, np.number) if isinstance(leaf.dtype, np.dtype) else False
    if plain and numbers:
        raise ValueError(
            f"init: {name}{jax.tree_util.keystr(path)} must be floating point; its type is {leaf.dtype}. Use "
            ".astype(float)."
        )
    return plain and leaf.dtype == object


def _adapted(problem: Any, x: Model | None, y: Model | None) -> Any:
    """The problem as a function of `Variables`."""

    def of(function: Any, *models: Model | None) -> Any:
        if function is None:
            return None

        @functools.wraps(function)
        def adapted(*args: Any, **key: Any) -> Any:
            own = [a if m is None else m.whole(a) for m, a in zip(models, args, strict=False)]
            return function(*own, *args[len(models) :], **key)

        return adapted

    if isinstance(problem, WeightedNodes):
        return replace(problem, loss=of(problem.loss, y))
    project = problem.project_upper
    if x is not None and project is not unconstrained:
        model = x
        problem = replace(problem, project_upper=lambda v: model.variables(project(model.whole(v))))
    if isinstance(problem, Bilevel):
        seen = of(problem.features, x)
        return replace(problem, upper=of(problem.upper, x, y), lower=of(problem.lower, x, y), features=seen)
    if isinstance(problem, Minimax):
        return replace(problem, objective=of(problem.objective, x, y))
    if isinstance(problem, Compositional):
        return replace(problem, inner=of(problem.inner, x), extra=of(problem.extra, x))
    return replace(problem, loss=of(problem.loss, x))
