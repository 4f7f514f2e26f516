"""The channel of `private` for records: its account. The noise is added by the clients' oracles."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from jaxtyping import Array

from rookery.channels.account import Account, Draws, Worst
from rookery.channels.budgeted import Budgeted, of_name, refuse
from rookery.language.channel import ChannelExchange
from rookery.language.records import LEVELS, OVERFLOW
from rookery.plan.releases import Releases, releases


@dataclass(frozen=True)
class PrivateRecords(Budgeted):
    """The channel of `private` for records. All that is in a message is private already, so anything may follow.

    Attributes:
        levels: once the noise is calibrated, its multiplier for the lower and for the upper data.
        then: a channel for the messages; None: they stay unchanged.
    """

    unit = "record"
    then: Any = None

    @property
    def secure(self) -> Any:
        """The secure sum at the end of `then`; None: there is none."""
        return getattr(self.then, "secure", None)

    @property
    def reduce(self) -> Any:
        """The `reduce` of `then`; None: the weighted sum."""
        return getattr(self.then, "reduce", None)

    def init(self, exchange: ChannelExchange) -> tuple[Any, Any]:
        return ((), ()) if self.then is None else self.then.init(exchange)

    def encode(self, exchange: ChannelExchange, value: Any, key: Array, state: Any) -> tuple[Any, Any]:
        return (value, state) if self.then is None else self.then.encode(exchange, value, key, state)

    def decode(self, exchange: ChannelExchange, total: Any, key: Array, state: Any) -> tuple[Any, Any]:
        return (total, state) if self.then is None else self.then.decode(exchange, total, key, state)

    def bound(self, oracle: str) -> float:
        """Return the largest norm of one record's value of an oracle; of a product, relative to the public vector."""
        if isinstance(self.clip, tuple) and oracle not in dict(self.clip):
            known = ", ".join(repr(name) for name, _ in self.clip)
            raise ValueError(
                f"rk.private: clip must have a number for each oracle that the method uses; got numbers for {known}, "
                f"and none for {oracle!r}."
            )
        return of_name(self.clip, oracle)

    def account(self, start: Any, one_round: Any, setting: Any) -> Worst:
        found = [releases(plan) for plan in (start, one_round)]
        return Worst(tuple(self._accounts(found, setting, dict(self.levels)).values()))

    def calibrated(self, start: Any, one_round: Any, setting: Any) -> "PrivateRecords":
        if self.levels:
            return self
        self._check(setting)
        found = [releases(plan) for plan in (start, one_round)]
        refuse(reason for each in found for reason in each.refused_records)
        accounts = self._accounts(found, setting, dict.fromkeys(LEVELS, 1.0))
        if not accounts:
            raise ValueError("A private run must use the clients' data; got a method that does not.")
        if self.noise is not None:
            levels = {level: of_name(self.noise, level) for level in LEVELS}
        else:
            levels = {level: self._needed(account) for level, account in accounts.items()}
            levels = {level: levels.get(level, max(levels.values())) for level in LEVELS}
        return replace(self, levels=tuple(levels.items()))

    def _accounts(self, found: list[Releases], setting: Any, levels: Mapping[str, float]) -> dict[str, Account]:
        """Return the account of each data set. If both levels have the same data, a record is in both."""
        groups = [LEVELS] if setting.clients.one_data_set else [(level,) for level in LEVELS]
        accounts = {}
        for group in groups:
            first, each = (_draws(one, group, levels) for one in found)
            if first or each:
                accounts[group[-1]] = Account(first, each, overflow=OVERFLOW)
        return accounts

    def _check(self, setting: Any) -> None:
        clients = setting.clients
        n = max(clients.lower.widest, clients.upper.widest)
        if self.delta >= 1 / n:
            raise ValueError(
                f"rk.private: delta must be below 1/n for the n = {n} records of the largest client; got "
                f"{self.delta!r}."
            )
        if isinstance(self.noise, tuple) and sorted(dict(self.noise)) != sorted(LEVELS):
            raise ValueError(
                f"rk.private: noise must be a number, or have one for 'lower' and one for 'upper'; got "
                f"{dict(self.noise)}."
            )


def _draws(found: Releases, group: tuple[str, ...], levels: Mapping[str, float]) -> tuple[Draws, ...]:
    return tuple(
        Draws(event.times, event.releases.total() / levels[event.level] ** 2, event.chance)
        for event in found.records
        if event.level in group
    )
