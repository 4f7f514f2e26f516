"""The privacy account of a run with noise: its ε, computed from the plan's releases by Google's `dp-accounting`.

The unit is a client: two runs are neighbours if one client's data differ or, with Poisson cohorts, if one client is
left out. A release is a mean or a sum with Gaussian noise whose standard deviation is a multiple of the largest part
that one client has in it. The clients' weights must be public and equal, and no reply may be lost: otherwise a client
also changes the parts of the others, which is not accounted for.
"""

import importlib
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

from rookery.plan.releases import Event, Releases

_MOST_NOISE = 1e6


@dataclass(frozen=True)
class Account:
    """What a run reveals of one client.

    Attributes:
        start: the releases of `init`, which are about all clients.
        round: the releases of a round.
        n: the number of clients.
        cohort: the size of a round's cohort; with `poisson`, its expected size.
        poisson: whether each client is in a cohort with the same probability, independently of the others. Else a
            cohort has a fixed size and is drawn without replacement.
    """

    start: Releases
    round: Releases
    n: int
    cohort: int
    poisson: bool = False

    def __post_init__(self) -> None:
        reasons = dict.fromkeys((*self.start.refused, *self.round.refused))
        if reasons:
            raise ValueError(f"A private run must be one whose releases can all be accounted for. {' '.join(reasons)}")
        if self.start.count and self.poisson:
            raise ValueError("With Poisson cohorts, the start must have no exchange; got a method whose start has.")

    def epsilon(self, noise: float, delta: float, rounds: int) -> float:
        """Return ε after so many rounds. `noise`: the standard deviation over the largest part of one client."""
        dp = _library()
        accountant = self._accountant()
        for event in self.start.events:
            accountant.compose(_gaussian(event, noise / 2), event.times)
        for event in self.round.events:
            accountant.compose(self._sampled(dp, event, noise), event.times * rounds)
        return float(accountant.get_epsilon(delta))

    def noise(self, epsilon: float, delta: float, rounds: int) -> float:
        """Return the smallest noise, to three digits, with which so many rounds reveal at most ε."""
        spent: Callable[[float], float] = cache(lambda noise: self.epsilon(noise, delta, rounds))
        if not epsilon > 0 or spent(_MOST_NOISE) > epsilon:
            raise ValueError(f"epsilon must be positive, and large enough for this run; got {epsilon!r}.")
        low, high = 1e-2, _MOST_NOISE
        while high / low > 1.001:
            middle = math.sqrt(low * high)
            low, high = (low, middle) if spent(middle) <= epsilon else (middle, high)
        return high

    def _accountant(self) -> Any:
        dp = _library()
        if self.poisson or self.cohort == self.n:
            return dp.pld.PLDAccountant()
        return dp.rdp.RdpAccountant(neighboring_relation=dp.NeighboringRelation.REPLACE_ONE)

    def _sampled(self, dp: Any, event: Event, noise: float) -> Any:
        """One draw of a cohort. A client that is replaced changes a result by twice as much as one that is left out."""
        if self.poisson:
            return dp.PoissonSampledDpEvent(self.cohort / self.n, _gaussian(event, noise))
        if self.cohort == self.n:
            return _gaussian(event, noise / 2)
        return dp.SampledWithoutReplacementDpEvent(self.n, self.cohort, _gaussian(event, noise / 2))


def _gaussian(event: Event, noise: float) -> Any:
    """All releases of one draw together: k of the same noise are one with noise/√k."""
    return _library().GaussianDpEvent(noise / math.sqrt(event.releases.total()))


@cache
def _library() -> Any:
    try:
        library: Any = importlib.import_module("dp_accounting")
        importlib.import_module("dp_accounting.pld")
        importlib.import_module("dp_accounting.rdp")
    except ImportError as error:
        raise ImportError("The privacy account needs dp-accounting. Install rookery[privacy].") from error
    return library
