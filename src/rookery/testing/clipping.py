"""Measure the norms of a run's updates, and check that a clip above all of them changes nothing."""

import dataclasses
import functools
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from rookery.channels import clip
from rookery.engines.engine import Job
from rookery.engines.simulation import Simulation
from rookery.language.channel import ChannelExchange, Plain
from rookery.testing.runs import difference, outcome

_NORMS: dict[str, float] = {}  # by exchange: the largest that a run has shown so far


def _note(name: str, norm: Any) -> None:
    _NORMS[name] = max(_NORMS.get(name, 0.0), float(norm))


@dataclass(frozen=True)
class NormRecorder(Plain):
    """A channel that changes no value and notes the largest norm of an update, also of the updates before round 1.

    Scalars sent together with arrays do not count as a part of the update unless `scalars` is set.
    """

    scalars: bool

    def encode(self, exchange: ChannelExchange, value: Any, key: Any, state: Any) -> tuple[Any, Any]:
        """Return the value, and note its norm."""
        leaves = jax.tree.leaves(value)
        arrays = leaves if self.scalars else [a for a in leaves if a.ndim] or leaves
        squares = [jnp.sum(jnp.square(jnp.abs(a))) for a in arrays]
        dtype = jnp.result_type(float)
        norm = jnp.sqrt(sum(squares, jnp.zeros((), dtype))).astype(dtype)
        jax.debug.callback(functools.partial(_note, exchange.name), norm)
        return value, state


def update_norms(job: Job, rounds: int = 2) -> dict[str, float]:
    """Return the largest norm of an update in each exchange of a run."""
    scalars = any(jnp.ndim(leaf) == 0 for leaf in jax.tree.leaves(job.start))
    _NORMS.clear()
    outcome(Simulation(), dataclasses.replace(job, channel=NormRecorder(scalars)), rounds)
    jax.effects_barrier()
    return dict(_NORMS)


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
