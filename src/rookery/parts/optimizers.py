"""Steps by any optimizer of optax's kind, a pair of functions `init` and `update`; optax itself is not imported."""

from typing import Any

import jax
import jax.numpy as jnp

from rookery.base import jaxprs, tree


def start(optimizer: Any, z: tree.Tree, name: str) -> Any:
    """The optimizer's state before its first step; ValueError, about `name`, if it can't take steps on z."""
    try:
        state = jax.tree.map(jaxprs.strong, optimizer.init(z))
        update, after = jax.eval_shape(optimizer.update, z, state, z)
    except Exception as error:
        told = " ".join(str(error).split())[:200]
        raise ValueError(
            f"{name}: the optimizer fails on the variable, {type(error).__name__}: {told} (Its update is given the "
            "gradient, its own state and the variable, and nothing else.)"
        ) from error
    if not _alike(after, state):
        raise ValueError(
            f"{name}: an update changes the structure, shapes or types of the optimizer's state; they must stay as "
            "its init makes them."
        )
    if not _alike(update, z):
        raise ValueError(f"{name}: the optimizer's updates have not the variable's structure and shapes; they must.")
    return state


def direction(optimizer: Any, gradient: tree.Tree, state: Any, z: tree.Tree) -> tuple[tree.Tree, Any]:
    """What to take a step of size 1 against, in the place of the gradient at z; and the state after it."""
    update, after = optimizer.update(gradient, state, z)
    return jax.tree.map(lambda u, own: -_cast(u, own), update, z), jax.tree.map(_cast, after, state)


def _cast(new: Any, old: Any) -> Any:
    new = jnp.asarray(new)
    return new if new.dtype == old.dtype else new.astype(old.dtype)


def _alike(new: Any, old: Any) -> bool:
    """Whether one can take the other's place: structures and shapes agree, and types but for their width."""
    structures: Any = jax.tree.structure(new), jax.tree.structure(old)
    if structures[0] != structures[1]:
        return False
    real = lambda a: jnp.issubdtype(a.dtype, jnp.floating)
    pairs = list(zip(jax.tree.leaves(new), jax.tree.leaves(old), strict=True))
    return all(a.shape == b.shape and (a.dtype == b.dtype or (real(a) and real(b))) for a, b in pairs)
