"""A random iterate as a method's output."""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array

from rookery.base import draws, tree


def one_of(count: Any, new: tree.Tree, old: tree.Tree, key: Array) -> tree.Tree:
    """Return `new`, the count-th iterate, with probability 1/count, else `old`: all iterates are equally likely."""
    take = draws.coins(key, 1 / count)
    return jax.tree.map(lambda a, b: jnp.where(take, a, b), new, old)
