"""The cohorts of rounds, drawn ahead on the device for the host."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from rookery.data.cohort import Draw
from rookery.engines import engine

_AHEAD = 256  # rounds whose cohorts are drawn in one call
_DRAWN = 2**24  # numbers that such a call may need


class Cohorts:
    """The cohorts of the next rounds, drawn for `ahead` rounds in a call: in the session's thread, for use in any."""

    def __init__(self, seed: Array, n: int, draw: Draw, ahead: int = _AHEAD) -> None:
        cohort = draw.places
        numbers = cohort**2 if cohort <= 2048 and 8 * cohort <= n else n  # of a draw: see `sample_cohort`
        batch = max(1, min(ahead, _DRAWN // numbers))

        def several(seed: Array, noise: Any, begin: Array) -> Array:
            ids = lambda t: engine.round_keys(seed, t, n, draw, noise).ids
            return jax.lax.map(ids, begin + jnp.arange(ahead, dtype=jnp.int32), batch_size=batch)

        self._draw = engine.PROGRAMS.find(("cohorts", n, draw, ahead), lambda: jax.jit(several))
        self._seed, self._ahead = seed, ahead
        self.noise: Any = ()  # see `engine.noise_root`
        self.restart(0)

    def restart(self, t: int) -> None:
        """Continue with round t. The reading thread must be idle."""
        self._drawn: dict[int, Any] = {}
        self._end = t

    def reach(self, t: int) -> None:
        """Draw the cohorts of all rounds before t, at least."""
        while self._end < t:
            self._drawn[self._end] = self._draw(self._seed, self.noise, jnp.int32(self._end))
            self._end += self._ahead

    def __call__(self, t: int) -> np.ndarray:
        """The cohorts of rounds t, t + 1, …, one row per round."""
        return np.asarray(self._drawn.pop(t))
