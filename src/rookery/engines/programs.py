"""Compiled functions that share: where two of them come to the same program, it is compiled once.

The pieces of a loop differ in where their inputs come from, and in nothing else. `jax.jit` can't see that: it knows
functions, not what they come to.
"""

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.interpreters import partial_eval
from jaxtyping import Array, Int

_compiled: dict[str, Callable[..., list[Any]]] = {}  # by the program's text


def index(i: int) -> Int[Array, ""]:
    """A number that is an input of the program, not part of it."""
    return jnp.asarray(np.array([i], np.int32))[0]  # an array that a function closes over; a scalar would be written in


@dataclass
class _Program:
    """A function for arguments of certain types."""

    run: Callable[..., list[Any]]
    constants: list[Any]  # what the function closes over and needs: inputs, too
    used: list[int]  # the leaves of the arguments that it needs
    structure: Any  # of what it gives

    def __call__(self, leaves: list[Any]) -> Any:
        return jax.tree.unflatten(self.structure, self.run(*self.constants, *(leaves[i] for i in self.used)))


def shared(fn: Callable[..., Any]) -> Callable[..., Any]:
    """The function, compiled, or what was compiled for another that comes to the same."""
    programs: dict[Any, _Program] = {}

    def call(*args: Any) -> Any:
        leaves, structure = jax.tree.flatten(args)
        types = (structure, _settings(), *map(jax.typeof, leaves))
        if types not in programs:
            programs[types] = _program(fn, args, leaves)
        return programs[types](leaves)

    return call


def _settings() -> tuple[Any, ...]:
    """JAX's settings on which a program depends."""
    config: Any = jax.config
    return config.jax_enable_x64, config.jax_default_matmul_precision, config.jax_threefry_partitionable


def _program(fn: Callable[..., Any], args: Any, leaves: list[Any]) -> _Program:
    closed, shapes = jax.make_jaxpr(fn, return_shape=True)(*args)
    inputs, count = [*closed.consts, *leaves], len(closed.consts)
    # Once more, with the constants as arguments.
    every = jax.make_jaxpr(lambda *a: jax.core.eval_jaxpr(closed.jaxpr, a[:count], *a[count:]))(*inputs)
    jaxpr, needed = partial_eval.dce_jaxpr(every.jaxpr, [True] * len(every.out_avals))
    used = [i for i, is_needed in enumerate(needed) if is_needed]
    run = jax.jit(lambda *a: jax.core.eval_jaxpr(jaxpr, every.consts, *a), keep_unused=True)
    text = run.lower(*(inputs[i] for i in used)).as_text()
    types = f"{[every.in_avals[i] for i in used]} {every.out_avals}"  # weak types, which the text does not tell
    key = hashlib.sha256(f"{types}\n{text}".encode()).hexdigest()
    same = run if "callback" in text else _compiled.setdefault(key, run)  # the text does not tell callbacks apart
    constants = [jnp.array(inputs[i]) for i in used if i < count]
    return _Program(same, constants, [i - count for i in used if i >= count], jax.tree.structure(shapes))
