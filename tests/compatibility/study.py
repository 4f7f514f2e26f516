"""The study of the recorded runs. Sites compare its source with that in the recordings, so it must stay as it is."""

from typing import Any

import jax.numpy as jnp

import rookery as rk

SITES = {"north": [1.0, 3.0], "south": [2.0, 4.0, 12.0]}
START = 10.0
ROUNDS = 3


def loss(x: Any, batch: Any) -> Any:
    return jnp.mean((x - batch) ** 2)


def distance(x: Any, y: Any) -> dict[str, Any]:
    return {"distance": jnp.abs(x - 4)}


problem = rk.SingleLevel(loss)
method = rk.Scaffold(step=0.1, local_steps=2)
