"""Precision and rematerialisation of a problem's functions."""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from rookery.base.jaxprs import is_key
from rookery.problems.functions import with_functions

PRECISIONS = (None, "float32", "bfloat16")
# A problem's functions of data. An outer function takes a few numbers only, and is left unchanged.
_ON_DATA = ("upper", "lower", "objective", "inner", "extra", "loss", "features")


@dataclass(frozen=True)
class Computing:
    """How losses are computed, wherever a client evaluates or differentiates them.

    Arguments:
        precision: "bfloat16" rounds x, y and the batch on their way into a loss and computes the loss in that type; the
            iterates, their gradients, messages and sums keep their own type. "float32" multiplies float32 matrices in
            full precision, where GPUs round to 10 bits (TF32) by default. None: JAX's default.
        remat: keep only the results of a loss's matrix products for its derivatives, and recompute the rest.
    """

    precision: str | None = None
    remat: bool = False

    def check(self, where: str) -> None:
        """Raise ValueError if a setting is not valid."""
        if self.precision not in PRECISIONS:
            raise ValueError(f'{where}: precision must be "bfloat16", "float32" or None; got {self.precision!r}.')
        if not isinstance(self.remat, bool):
            raise ValueError(f"{where}: remat must be True or False; got {self.remat!r}.")

    def __call__(self, problem: Any) -> Any:
        """The problem with its functions computed this way."""
        if self == AS_IT_IS:
            return problem

        def changed(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
            name = name.partition("[")[0]
            return self._function(function, name != "features") if name in _ON_DATA else function

        return with_functions(problem, changed)

    def _function(self, function: Callable[..., Any], widened: bool = True) -> Callable[..., Any]:
        """The function with this precision and remat. `widened`: whether its value returns to the type of its
        arguments."""
        policy = jax.checkpoint_policies.dots_with_no_batch_dims_saveable

        @functools.wraps(function)
        def computed(*args: Any, **key: Any) -> Any:
            run: Callable[..., Any] = functools.partial(function, **key)
            if self.remat:
                run = jax.checkpoint(run, policy=policy)
            if self.precision == "float32":
                with jax.default_matmul_precision("float32"):
                    return run(*args)
            if self.precision is None:
                return run(*args)
            value = run(*jax.tree.map(_rounded, args))
            dtypes = [leaf.dtype for leaf in map(jnp.asarray, jax.tree.leaves(args)) if _is_wide(leaf)]
            dtype = jnp.result_type(jnp.float32, *dtypes)
            return jax.tree.map(lambda a: a.astype(dtype) if _is_real(a) else a, value) if widened else value

        return computed


AS_IT_IS = Computing()


def _is_real(a: Any) -> bool:
    return jnp.issubdtype(jnp.asarray(a).dtype, jnp.floating)


def _is_wide(a: Any) -> bool:
    return _is_real(a) and jnp.asarray(a).dtype.itemsize > 2


def _rounded(a: Any) -> Any:
    return jnp.asarray(a).astype(jnp.bfloat16) if not is_key(a) and _is_wide(a) else a
