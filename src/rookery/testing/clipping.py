"""Measure the norms of a run's updates, and check that a clip above all of them changes nothing."""

import dataclasses
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from rookery.channels import clip
from rookery.engines.engine import Job
from rookery.engines.simulation import Simulation
from rookery.language.channel import ChannelExchange, Plain
from rookery.testing.runs import difference, outcome


@dataclass(frozen=True)
class NormRecorder(Plain):
    """A channel that changes no value and keeps the largest norm of an update in the server's state.

    Scalars sent together with arrays do not count as a part of the update unless `scalars` is set.
    """

    scalars: bool

    def init(self, exchange: ChannelExchange) -> tuple[Any, Any]:
        """Start with a largest norm of 0."""
        return jnp.zeros((), jnp.result_type(float)), ()

    def encode(self, exchange: ChannelExchange, value: Any, key: Any, state: Any) -> tuple[Any, Any]:
        """Return the value and its norm."""
        leaves = jax.tree.leaves(value)
        arrays = leaves if self.scalars else [a for a in leaves if a.ndim] or leaves
        squares = [jnp.sum(jnp.square(jnp.abs(a))) for a in arrays]
        dtype = jnp.result_type(float)
        return (value, jnp.sqrt(sum(squares, jnp.zeros((), dtype))).astype(dtype)), state

    def reduce(self, exchange: ChannelExchange, rows: Any, weights: Any, present: Any) -> Any:
        """Return the weighted sum of the values, and the norms."""
        values, norms = rows
        return jax.tree.map(lambda a: jnp.tensordot(weights.astype(a.dtype), a, axes=1), values), norms

    def decode(self, exchange: ChannelExchange, total: Any, key: Any, state: Any) -> tuple[Any, Any]:
        """Return the value and the largest norm so far."""
        value, norms = total
        return value, jnp.maximum(state, jnp.max(norms))


def update_norms(job: Job, rounds: int = 2) -> dict[str, float]:
    """Return the largest norm of an update in each exchange of a run."""
    scalars = any(jnp.ndim(leaf) == 0 for leaf in jax.tree.leaves(job.start))
    norms = outcome(Simulation(), dataclasses.replace(job, channel=NormRecorder(scalars)), rounds).server
    return {name: float(norm) for name, norm in (norms or {}).items()}


def clip_changes_nothing(job: Job, tolerance: float, rounds: int = 2) -> None:
    """Check that clipping each exchange at 1.01 times its largest update does not change a run."""
    bounds = {name: clip(max(1.01 * norm, 1e-6)) for name, norm in update_norms(job, rounds).items()}
    free = outcome(Simulation(), dataclasses.replace(job, channel=None), rounds)
    clipped = outcome(Simulation(), dataclasses.replace(job, channel=bounds or None), rounds)
    gap = difference((free.state, free.memory), (clipped.state, clipped.memory), tolerance)
    assert not gap, (
        f"clipping at 1.01 times the largest update changes the run: {gap}. A number that is sent together with an "
        "update is clipped together with it; mark it with bookkeeping=(..., rk.Bookkeeping(...))."
    )
