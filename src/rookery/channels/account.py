"""The privacy account of a run with noise: its ε, computed by Google's `dp-accounting` from what the plan releases.

A release is a sum with Gaussian noise. Its noise multiplier is the standard deviation divided by the largest effect
that one unit (a client, or a record) has on the sum when it is added or left out.
"""

import importlib
import logging
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import Any

_INTERVAL = 1e-3  # of the privacy losses that are told apart: ε is too large by less than a thousandth
_MOST_NOISE = math.log(1e6)


@dataclass(frozen=True)
class Draws:
    """Samples of units that are drawn in the same way, with everything that is released of each sample.

    Attributes:
        times: the number of samples.
        precision: Σ 1/σ² over the releases of one sample, where σ is a noise multiplier relative to the others.
        chance: the probability that a unit is in a sample.
    """

    times: int
    precision: float
    chance: float = 1.0


@dataclass(frozen=True)
class Account:
    """What a run reveals of one unit.

    Attributes:
        start, round: the samples that `init` and a round draw.
        fixed: (n, size) if samples, unless they contain all units, have a fixed size and are drawn without replacement.
            Two runs are then neighbours if one unit's data are replaced, which has twice the effect of leaving it out.
            None: each unit is drawn independently of the others, and neighbours differ in one unit that is left out.
            overflow: the probability that a sample has no place for one more unit. It is added to δ.
    """

    start: tuple[Draws, ...]
    round: tuple[Draws, ...]
    fixed: tuple[int, int] | None = None
    overflow: float = 0.0

    def epsilon(self, noise: float, delta: float, rounds: int) -> float:
        """Return ε after this many rounds with this noise multiplier."""
        return _epsilon(self, noise, delta, rounds)

    def _epsilon(self, noise: float, delta: float, rounds: int) -> float:
        steps = [*self.start, *(Draws(rounds * each.times, each.precision, each.chance) for each in self.round)]
        steps = [each for each in steps if each.times and each.precision]
        delta -= self.overflow * sum(each.times for each in steps if each.chance < 1)
        if not steps:
            return 0.0
        if delta <= 0:
            return math.inf
        dp, noise = _library(), noise / (1 if self.fixed is None else 2)
        if all(each.chance == 1 for each in steps):
            precision = sum(each.times * each.precision for each in steps)
            return float(dp.get_epsilon_gaussian(noise / math.sqrt(precision), delta))
        if self.fixed is None:
            accountant = dp.pld.PLDAccountant(value_discretization_interval=_INTERVAL)
        else:
            accountant = dp.rdp.RdpAccountant(neighboring_relation=dp.NeighboringRelation.REPLACE_ONE)
        for each in steps:
            accountant.compose(self._event(dp, each, noise / math.sqrt(each.precision)), each.times)
        return float(accountant.get_epsilon(delta))

    def _event(self, dp: Any, draws: Draws, noise: float) -> Any:
        released = dp.GaussianDpEvent(noise)
        if draws.chance == 1:
            return released
        if self.fixed is None:
            return dp.PoissonSampledDpEvent(draws.chance, released)
        return dp.SampledWithoutReplacementDpEvent(*self.fixed, released)

    def noise(self, epsilon: float, delta: float, rounds: int) -> float:
        """Return the smallest noise multiplier, to three digits, with which this many rounds reveal at most ε."""
        from scipy.optimize import brentq  # slow to import

        excess: Callable[[float], float] = lambda log: math.log(
            max(self.epsilon(math.exp(log), delta, rounds), 1e-12) / epsilon
        )
        low, high = math.log(0.5), 0.0
        while excess(high) > 0:
            low, high = high, high + 1
            if high > _MOST_NOISE:
                raise ValueError(
                    f"epsilon must be large enough for {rounds} rounds; got {epsilon!r}. Run fewer rounds, or "
                    "increase epsilon."
                )
        while excess(low) <= 0:
            low, high = low - 1, low
        found = brentq(excess, low, high, xtol=2e-4)
        while excess(found) > 0:
            found += 2e-4
        return math.exp(found)

    def rounds(self, noise: float, epsilon: float, delta: float, most: int) -> int:
        """Return how many rounds, at most `most`, reveal at most ε with this noise multiplier; -1: not even `init`."""
        if self.epsilon(noise, delta, most) <= epsilon:
            return most
        low, high = -1, most
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if self.epsilon(noise, delta, middle) <= epsilon else (low, middle)
        return low


@dataclass(frozen=True)
class Worst:
    """The accounts of several data sets. Each unit is in one of them, so the largest ε counts."""

    accounts: tuple[Account, ...]

    def epsilon(self, noise: float, delta: float, rounds: int) -> float:
        """See `Account`."""
        return max(account.epsilon(noise, delta, rounds) for account in self.accounts)

    def noise(self, epsilon: float, delta: float, rounds: int) -> float:
        """See `Account`."""
        return max(account.noise(epsilon, delta, rounds) for account in self.accounts)

    def rounds(self, noise: float, epsilon: float, delta: float, most: int) -> int:
        """See `Account`."""
        return min(account.rounds(noise, epsilon, delta, most) for account in self.accounts)


@lru_cache(maxsize=4096)
def _epsilon(account: Account, noise: float, delta: float, rounds: int) -> float:
    return account._epsilon(noise, delta, rounds)


@cache
def _library() -> Any:
    try:
        library: Any = importlib.import_module("dp_accounting")
        importlib.import_module("dp_accounting.pld")
        importlib.import_module("dp_accounting.rdp")
    except ImportError as error:
        raise ImportError("The privacy account needs dp-accounting. Install rookery[privacy].") from error
    # It warns of each Rényi order that it leaves out, which only makes ε larger.
    logging.getLogger("absl").addFilter(lambda record: "Excluding this order" not in record.getMessage())
    return library
