"""What the private channels have in common: a budget, and noise calibrated to it."""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, ClassVar

from rookery.language.channel import Plain

ByName = float | tuple[tuple[str, float], ...]  # one number, or one for each name


@dataclass(frozen=True)
class Budgeted(Plain):
    """A channel with a budget of privacy: see `private`.

    Attributes:
        levels: once the noise is calibrated, its multipliers by name.
    """

    unit: ClassVar[str]
    epsilon: float | None
    delta: float
    clip: ByName
    rounds: int | None
    noise: ByName | None
    levels: tuple[tuple[str, float], ...] = ()

    def account(self, start: Any, one_round: Any, setting: Any) -> Any:
        """Return the account of a run with these plans and this channel's noise."""
        raise NotImplementedError

    def calibrated(self, start: Any, one_round: Any, setting: Any) -> "Budgeted":
        """Return the channel with the noise that the budget needs, or the noise that was given."""
        raise NotImplementedError

    def spent(self, account: Any, rounds: int) -> float:
        """Return ε after this many rounds."""
        return account.epsilon(1.0, self.delta, rounds)

    def affordable(self, account: Any, rounds: int) -> int:
        """Return how many of these rounds the budget allows."""
        most = rounds if self.rounds is None else min(rounds, self.rounds)
        return most if self.epsilon is None else account.rounds(1.0, self.epsilon, self.delta, most)

    def _needed(self, account: Any) -> float:
        """Return the noise multiplier that the budget needs."""
        if self.rounds is None:
            raise ValueError(
                "rk.private: rounds must be given here, because the noise depends on how many rounds share the budget; "
                "got None."
            )
        assert self.epsilon is not None
        return account.noise(self.epsilon, self.delta, max(self.rounds, 1))


def refuse(reasons: Iterable[str]) -> None:
    """Raise ValueError if there are reasons why a run's releases can't be accounted for."""
    unique = dict.fromkeys(reasons)
    if unique:
        raise ValueError(f"A private run must have releases that can all be accounted for. {' '.join(unique)}")


def of_name(given: ByName, name: str) -> float:
    """Return the number for a name; nan if it is missing, which `calibrated` refuses."""
    return dict(given).get(name, math.nan) if isinstance(given, tuple) else given
