"""Everything that may change with a version of JAX: its private parts, and primitives matched by name.

Each entry says who needs it, and what happens if JAX no longer has it. Public names are imported where they are used.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax import lax
from jax.core import ShapedArray, Tracer, eval_jaxpr
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal, Primitive, Var, jaxpr_as_fun
from jax.interpreters import batching, mlir, partial_eval

__all__ = ["ClosedJaxpr", "Jaxpr", "Literal", "Primitive", "ShapedArray", "Tracer", "Var", "eval_jaxpr", "jaxpr_as_fun"]

# Jaxprs, on which the plan and all engines are built. Nothing runs without them.


def without_unused(jaxpr: Jaxpr, needed: list[bool]) -> tuple[Jaxpr, list[bool]]:
    """Return the jaxpr with dead code removed, and which of its inputs it still uses."""
    pruned, used = partial_eval.dce_jaxpr(jaxpr, needed)
    return pruned, list(used)


def lower_as(primitive: Primitive, function: Callable[..., Any]) -> None:
    """Let XLA compile a primitive with several results as this function. Debugging runs need it."""
    mlir.register_lowering(primitive, mlir.lower_fun(function, multiple_results=True))


def batch_elementwise(primitive: Primitive) -> None:
    """Let `vmap` pass through a primitive that has several results and treats each of its operands separately."""
    batching.primitive_batchers[primitive] = lambda args, dims, **params: (primitive.bind(*args, **params), dims)


# Settings and services.


def keys_by_kernel() -> Callable[[bool], Any] | None:
    """Return a context, for this thread only, in which a GPU hashes keys with JAX's own kernel.

    It shortens compilation on a GPU. Returns None if JAX has no such setting; hashes are then compiled with the
    program.
    """
    from jax._src import config

    return getattr(config, "threefry_gpu_kernel_lowering", None)


@functools.cache
def cpu_options() -> dict[str, Any]:
    """Return options for programs on a CPU: without XLA's fusion emitters, they compile in two thirds of the time.

    The programs run equally fast. Returns {} if this version of XLA has no other emitters.
    """
    options = {"xla_cpu_use_fusion_emitters": False}
    try:
        jax.jit(lambda a: a, compiler_options=options).lower(np.float32(0)).compile()
    except Exception:
        return {}
    return options


def shared_service() -> Any:
    """Return the client of the key-value service that JAX's processes share; None if there is one process.

    `base/processes.py` needs it. Without it, runs of several processes fail at the start with an AttributeError.
    """
    from jax._src import distributed

    return distributed.global_state.client


def looks_for_reused_keys() -> bool:
    """Return whether JAX checks for reused keys. The check mistakes the rows of a table of keys for one key."""
    return bool(getattr(jax.config, "jax_debug_key_reuse", False))


# Primitives of `jax.lax`, by their public names. Those that a version of JAX lacks are left out.


def _named(names: str) -> frozenset[Any]:
    return frozenset(getattr(lax, f"{name}_p") for name in names.split() if hasattr(lax, f"{name}_p"))


# Fused by the compiler, so that they need no memory of their own. If one is missing, memory estimates are larger.
_FUSED = _named("""
    abs add and broadcast_in_dim ceil clamp convert_element_type copy cos div eq erf exp exp2
    expm1 floor ge gt integer_pow iota is_finite le log log1p logistic lt max min mul ne neg not or pad pow real
    reshape rev round rsqrt select_n shift_left shift_right_arithmetic shift_right_logical sign sin sqrt square
    squeeze stop_gradient sub tan tanh transpose xor
""")


_ADD_ANY = "add_any"  # of gradients; it has no public name


def adds(eqn: Any) -> bool:
    """Return whether an equation adds two values of the same shape."""
    return eqn.primitive is lax.add_p or eqn.primitive.name == _ADD_ANY


def is_fused(eqn: Any) -> bool:
    """Return whether the compiler fuses an equation into its readers."""
    return eqn.primitive in _FUSED or eqn.primitive.name == _ADD_ANY


LOOPS = _named("scan while")
# Not computed for many iterations together: a condition would be computed both ways, and generators other than JAX's
# default draw different numbers when vectorised.
IN_TURN = _named("while cond rng_bit_generator rng_uniform")

# Primitives without a public name, matched by the primitive's name.


def has_custom_derivative(eqn: Any) -> bool:
    """Return whether an equation calls a function with a custom derivative rule."""
    return eqn.primitive.name in ("custom_jvp_call", "custom_vjp_call", "custom_vjp_call_jaxpr")


def is_rule(value: Any) -> bool:
    """Return whether an equation's parameter is a function, such as a derivative rule, which JAX may have wrapped."""
    return callable(value) or hasattr(value, "call_wrapped")


def is_foreign(eqn: Any) -> bool:
    """Return whether an equation calls something outside JAX: a callback or a library."""
    return "callback" in eqn.primitive.name or "ffi" in eqn.primitive.name


def draws_words(eqn: Any) -> bool:
    """Return whether an equation draws random words."""
    return eqn.primitive.name in ("random_bits", "threefry2x32")


def derives_keys(eqn: Any) -> bool:
    """Return whether an equation derives keys or draws random numbers; wrapping a key does not count.

    If JAX renames these primitives, nothing is drawn ahead: programs are correct, but slower to compile on a GPU.
    """
    name = eqn.primitive.name
    return draws_words(eqn) or (name.startswith("random_") and name not in ("random_wrap", "random_unwrap"))
