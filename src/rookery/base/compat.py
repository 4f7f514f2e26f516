"""All that may change with a version of JAX: its private parts, and the primitives that are known by name.

Each says what needs it, and what happens where JAX no longer has it. What is public is used where it is needed.
"""

from collections.abc import Callable
from typing import Any

import jax
from jax import lax
from jax.core import ShapedArray, eval_jaxpr
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal, Primitive, Var, jaxpr_as_fun
from jax.interpreters import mlir, partial_eval

__all__ = ["ClosedJaxpr", "Jaxpr", "Literal", "Primitive", "ShapedArray", "Var", "eval_jaxpr", "jaxpr_as_fun"]

# Jaxprs: what the plan and all engines are built on. Without any one of them nothing runs.


def without_unused(jaxpr: Jaxpr, needed: list[bool]) -> tuple[Jaxpr, list[bool]]:
    """The jaxpr without what the needed results do not depend on, and which of its inputs are left."""
    pruned, used = partial_eval.dce_jaxpr(jaxpr, needed)
    return pruned, list(used)


def lower_as(primitive: Primitive, function: Callable[..., Any]) -> None:
    """Let the compiler take a primitive with several results as this function: debugging runs need it."""
    mlir.register_lowering(primitive, mlir.lower_fun(function, multiple_results=True))


# Settings and services.


def keys_by_kernel() -> Callable[[bool], Any] | None:
    """A context, for this thread alone, in which a GPU hashes keys with a kernel of JAX's own.

    It shortens compilation on a GPU. None where JAX has no such setting: then hashes are compiled with the program.
    """
    from jax._src import config

    return getattr(config, "threefry_gpu_kernel_lowering", None)


def shared_service() -> Any:
    """The client of the key-value service that JAX's processes share; None where there is one process.

    `base/processes.py` needs it. Without it, runs of several processes fail at the start with an AttributeError.
    """
    from jax._src import distributed

    return distributed.global_state.client


def looks_for_reused_keys() -> bool:
    """Whether JAX looks for keys that are used twice: it takes a row of a table for the same key in every turn."""
    return bool(getattr(jax.config, "jax_debug_key_reuse", False))


# Primitives of `jax.lax`, by their public names. One that a version of JAX does not have is left out.


def _named(names: str) -> frozenset[Any]:
    return frozenset(getattr(lax, f"{name}_p") for name in names.split() if hasattr(lax, f"{name}_p"))


# What a compiler computes where it is read, so that it takes no memory of its own. Without one, estimates are larger.
_FUSED = _named("""
    abs add and broadcast_in_dim ceil clamp convert_element_type copy cos div eq erf exp exp2
    expm1 floor ge gt integer_pow iota is_finite le log log1p logistic lt max min mul ne neg not or pad pow real
    reshape rev round rsqrt select_n shift_left shift_right_arithmetic shift_right_logical sign sin sqrt square
    squeeze stop_gradient sub tan tanh transpose xor
""")


def is_fused(eqn: Any) -> bool:
    """Whether a compiler computes it where it is read."""
    return eqn.primitive in _FUSED or eqn.primitive.name == "add_any"  # which has no public name


LOOPS = _named("scan while")
# What can't be computed for many turns of a loop at once: a condition would be computed both ways, and generators but
# JAX's default draw other numbers when vectorised.
IN_TURN = _named("while cond rng_bit_generator rng_uniform")

# Primitives that have no public name: known by their own.


def has_custom_derivative(eqn: Any) -> bool:
    """Whether an equation calls a function with a derivative rule of its own."""
    return eqn.primitive.name in ("custom_jvp_call", "custom_vjp_call", "custom_vjp_call_jaxpr")


def is_foreign(eqn: Any) -> bool:
    """Whether an equation calls something outside of JAX: a callback, or a library."""
    return "callback" in eqn.primitive.name or "ffi" in eqn.primitive.name


def draws_words(eqn: Any) -> bool:
    """Whether an equation draws random words."""
    return eqn.primitive.name in ("random_bits", "threefry2x32")


def derives_keys(eqn: Any) -> bool:
    """Whether an equation derives keys or draws; wrapping a key derives nothing.

    Without these names draws are not made ahead: programs are right, and slower to compile on a GPU.
    """
    name = eqn.primitive.name
    return draws_words(eqn) or (name.startswith("random_") and name not in ("random_wrap", "random_unwrap"))
