"""The privacy budget of a run: what it has spent, and how many rounds it allows."""

from dataclasses import dataclass, field
from typing import Any

from rookery.channels.private import Budgeted
from rookery.engines.engine import Session


@dataclass
class Budget:
    """What a private run may reveal, and what it has revealed so far.

    Attributes:
        channel: the run's channel, calibrated.
        account: its account.
        wanted: the run's rounds.
        repeated: rounds that count twice, because they may have been computed before a restart, with other noise.
    """

    channel: Budgeted
    account: Any
    wanted: int
    repeated: int = 0
    _spent: dict[int, float] = field(default_factory=dict, repr=False)

    @classmethod
    def of(cls, session: Session, rounds: int) -> "Budget | None":
        """Return the budget of a session; None if its run is not private. Raise ValueError if it allows no round."""
        if not isinstance(getattr(session, "channel", None), Budgeted):
            return None
        budget = cls(session.channel, session.account, rounds)
        budget.check()
        return budget

    def check(self) -> None:
        """Raise ValueError if the budget does not allow one round."""
        if self.rounds < min(self.wanted, 1):
            raise ValueError(
                f"epsilon must be large enough for one round; got {self.channel.epsilon:g}, and a round costs "
                f"{self.epsilon(1):.3g} with this noise. Give more noise, or a larger epsilon."
            )

    @property
    def rounds(self) -> int:
        """How many of the run's rounds the budget allows."""
        return self.channel.affordable(self.account, self.wanted + self.repeated) - self.repeated

    def epsilon(self, rounds: int) -> float:
        """Return ε after this many rounds."""
        count = rounds + self.repeated
        if count not in self._spent:
            self._spent[count] = self.channel.spent(self.account, count)
        return self._spent[count]

    @property
    def settings(self) -> dict[str, Any]:
        """The promised privacy, the clip and the noise, as JSON values."""
        channel = self.channel
        named = {name: getattr(channel, name, None) for name in ("unit", "epsilon", "delta", "quantile")}
        named = {name: value for name, value in named.items() if value is not None}
        clip = channel.clip if isinstance(channel.clip, float) else dict(channel.clip)
        return {**named, "clip": clip, "noise": dict(channel.levels)}

    def in_words(self) -> str:
        """Describe the budget in a sentence."""
        channel, rounds = self.channel, self.rounds
        noise = sorted({level for _, level in channel.levels})
        multipliers = f"{noise[0]:.3g}" if noise[0] == noise[-1] else f"{noise[0]:.3g} to {noise[-1]:.3g}"
        spent = f"ε = {self.epsilon(rounds):.3g} at δ = {channel.delta:g} after {rounds} rounds"
        return f"Private for each {channel.unit}: {spent}, with a noise multiplier of {multipliers}."
