"""Steps by an optax optimizer, or by any pair of functions `init` and `update`; optax itself is not imported."""

from typing import Any

import jax
import jax.numpy as jnp

from rookery.base import jaxprs, tree


def start(optimizer: Any, z: tree.Tree, name: str) -> Any:
    """Return the optimizer's state before its first step; raise ValueError, naming `name`, if it cannot step on z."""
    try:
        state = jax.tree.map(jaxprs.strong, optimizer.init(z))
        update, after = jax.eval_shape(optimizer.update, z, state, z)
    except Exception as error:
        message = " ".join(str(error).split())[:200]
        raise ValueError(
            f"{name}: the optimizer fails on the variable, {type(error).__name__}: {message} (Its update receives the "
            "gradient, its state and the variable.)"
        ) from error
    if not _alike(after, state):
        raise ValueError(
            f"{name}: an update must keep the structure, shapes and types of the optimizer's state as its init made "
            "them."
        )
    if not _alike(update, z):
        raise ValueError(f"{name}: the optimizer's updates must have the structure and shapes of the variable.")
    return state


def direction(optimizer: Any, gradient: tree.Tree, state: Any, z: tree.Tree) -> tuple[tree.Tree, Any]:
    """Return the direction against which a step of size 1 is the optimizer's update, and the state after it."""
    update, after = optimizer.update(gradient, state, z)
    return jax.tree.map(lambda u, leaf: -_cast(u, leaf), update, z), jax.tree.map(_cast, after, state)


def _cast(new: Any, old: Any) -> Any:
    new = jnp.asarray(new)
    return new if new.dtype == old.dtype else new.astype(old.dtype)


def _alike(new: Any, old: Any) -> bool:
    """Whether structures and shapes agree, and dtypes up to the width of floats."""
    structures: Any = jax.tree.structure(new), jax.tree.structure(old)
    if structures[0] != structures[1]:
        return False
    real = lambda a: jnp.issubdtype(a.dtype, jnp.floating)
    pairs = list(zip(jax.tree.leaves(new), jax.tree.leaves(old), strict=True))
    return all(a.shape == b.shape and (a.dtype == b.dtype or (real(a) and real(b))) for a, b in pairs)
