"""Projections onto simple sets."""

import jax.numpy as jnp

from rookery import tree


def ball(z: tree.Tree, radius: tree.Scalar) -> tree.Tree:
    """The nearest point with ‖z‖ ≤ radius, the norm over all leaves: z·min(1, radius/‖z‖)."""
    return tree.scale(radius / jnp.maximum(tree.norm(z), radius), z)
