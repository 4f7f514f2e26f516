"""How a problem's functions are computed: in which precision, and with how much memory."""

import functools
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Any

import jax
import jax.numpy as jnp

PRECISIONS = (None, "float32", "bfloat16")
# The functions of a problem that see data. An outer function sees a value, a few numbers, and stays as it is.
_ON_DATA = ("upper", "lower", "objective", "inner", "extra", "loss")


@dataclass(frozen=True)
class Computing:
    """How losses are computed, wherever a client evaluates or differentiates them.

    Arguments:
        precision: "bfloat16": x, y and the batch are rounded to it on the way into a loss, and the loss is computed so;
            the iterates, their gradients, what is sent and what is added up keep their own type. "float32": products of
            float32 matrices in full, which GPUs otherwise round to 10 bits (TF32). None: as JAX does by itself.
        remat: keep the results of a loss's matrix products for its derivatives, and compute the rest again.
    """

    precision: str | None = None
    remat: bool = False

    def check(self, where: str) -> None:
        """Raise a ValueError for what can't be chosen."""
        if self.precision not in PRECISIONS:
            raise ValueError(f'{where}: precision={self.precision!r} is not "bfloat16", "float32" or None.')
        if not isinstance(self.remat, bool):
            raise ValueError(f"{where}: remat={self.remat!r} is not True or False.")

    def __call__(self, problem: Any) -> Any:
        """The problem with its functions computed this way."""
        if self == AS_IT_IS:
            return problem
        given = {field.name: getattr(problem, field.name) for field in fields(problem)}
        made = {name: self._function(fn) for name, fn in given.items() if name in _ON_DATA and fn is not None}
        if given.get("features") is not None:
            made["features"] = self._function(given["features"], back=False)
        return replace(problem, **made)

    def _function(self, function: Callable[..., Any], back: bool = True) -> Callable[..., Any]:
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
            own = [leaf.dtype for leaf in map(jnp.asarray, jax.tree.leaves(args)) if _is_wide(leaf)]
            kind = jnp.result_type(jnp.float32, *own)
            return jax.tree.map(lambda a: a.astype(kind) if _is_real(a) else a, value) if back else value

        return computed


AS_IT_IS = Computing()


def _is_real(a: Any) -> bool:
    return jnp.issubdtype(jnp.asarray(a).dtype, jnp.floating)


def _is_wide(a: Any) -> bool:
    return _is_real(a) and jnp.asarray(a).dtype.itemsize > 2


def _rounded(a: Any) -> Any:
    return jnp.asarray(a).astype(jnp.bfloat16) if not _is_key(a) and _is_wide(a) else a


def _is_key(a: Any) -> bool:
    return hasattr(a, "dtype") and jax.dtypes.issubdtype(a.dtype, jax.dtypes.prng_key)
