"""The functions of a problem: whether they are random, how they are called, and how they are replaced by others."""

import inspect
from collections.abc import Callable
from dataclasses import fields, replace
from typing import Any

from jaxtyping import Array


def takes_key(function: Callable[..., Any]) -> bool:
    """Return whether a function has a parameter `key`."""
    return "key" in _parameters(function)


def call(function: Callable[..., Any], *args: Any, key: Array | None) -> Any:
    """Call the function, with the key if it takes one."""
    return function(*args, key=key) if takes_key(function) else function(*args)


def with_key(problem: Any, key: Array) -> Any:
    """Return the problem with this key fixed in its random functions."""

    def fixed(function: Callable[..., Any]) -> Callable[..., Any]:
        keyed: Any = lambda *args: function(*args, key=key)
        signature = inspect.signature(function)
        others = [p for name, p in signature.parameters.items() if name != "key"]
        keyed.__signature__ = signature.replace(parameters=others)
        return keyed

    return with_functions(problem, lambda _, function: fixed(function) if takes_key(function) else function)


def with_functions(problem: Any, change: Callable[[str, Callable[..., Any]], Any]) -> Any:
    """Return the problem with change(name, function) for each of its functions; one of a tuple is named "inner[0]"."""

    def changed(name: str, value: Any) -> Any:
        if isinstance(value, tuple):
            return tuple(changed(f"{name}[{n}]", part) for n, part in enumerate(value))
        return change(name, value) if callable(value) else value

    values = {field.name: getattr(problem, field.name) for field in fields(problem)}
    return replace(problem, **{name: changed(name, value) for name, value in values.items()})


def _parameters(function: Callable[..., Any]) -> dict[str, inspect.Parameter]:
    try:
        return dict(inspect.signature(function).parameters)
    except (TypeError, ValueError):  # a built-in or a C function such as jnp.sum's wrappers
        return {}


def required_arguments(function: Callable[..., Any]) -> int:
    """Return how many positional arguments a function requires, not counting a key."""
    parameters = _parameters(function)
    if not parameters:
        return 1
    positional = inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD
    return sum(p.default is p.empty and p.kind in positional and name != "key" for name, p in parameters.items())
