"""The channel of `private` for clients: clipping, noise, and their account."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array

from rookery.channels.account import Account, Draws
from rookery.channels.budgeted import Budgeted, of_name, refuse
from rookery.channels.privacy import Clip, noisy
from rookery.data.cohort import overflow
from rookery.language.channel import Bookkeeping, ChannelExchange
from rookery.language.ledger import Exchange
from rookery.plan.releases import Releases, released, releases

_BIT = 0.05  # the part of an exchange's privacy that an adaptive bound spends
_PACE = 0.2  # of an adaptive bound: Andrew et al.'s η_C


@dataclass(frozen=True)
class Private(Budgeted):
    """The channel of `private` for clients.

    Attributes:
        levels: once the noise is calibrated, its multiplier by exchange.
    """

    unit = "client"
    quantile: float | None = None

    # The account.

    def account(self, start: Any, one_round: Any, setting: Any, levels: Mapping[str, float] | None = None) -> Account:
        """Return the account of a run with these plans. `levels`: noise multipliers; None: those of this channel."""
        self._check(setting)
        both = [releases(plan) for plan in (start, one_round)]
        refuse(reason for found in both for reason in found.refused)
        known = dict(self.levels) if levels is None else levels
        n, chance, places = setting.clients.n, setting.chance, setting.cohort
        rate = places / n if chance is None else chance
        first, each = _draws(both[0], known, 1.0), _draws(both[1], known, rate)
        if chance is None:
            return Account(first, each, fixed=(n, places))
        return Account(first, each, overflow=overflow(places, n, chance))

    def calibrated(self, start: Any, one_round: Any, setting: Any) -> "Private":
        """Return the channel with the noise that the budget needs, or the noise that was given."""
        if self.levels:
            return self
        exchanges = {e.name: e for plan in (start, one_round) for e in _exchanges(plan)}
        self._check_names(exchanges)
        if not exchanges:
            refuse(reason for plan in (start, one_round) for reason in releases(plan).refused)
            raise ValueError("A private run must have exchanges; got a method without any.")
        if self.noise is not None:
            levels = {name: of_name(self.noise, name) for name in exchanges}
            chosen = replace(self, levels=tuple(levels.items()))
            chosen.account(start, one_round, setting)
            return chosen
        shapes = {**one_round.exchanges, **start.exchanges}
        ratios = {name: self._ratio(shapes[name]) for name in exchanges}
        least = min(ratios.values())
        ratios = {name: ratio / least for name, ratio in ratios.items()}
        account = self.account(start, one_round, setting, ratios)
        noise = self._needed(account)
        return replace(self, levels=tuple((name, noise * ratio) for name, ratio in ratios.items()))

    def _ratio(self, exchange: ChannelExchange) -> float:
        """The noise multiplier, up to a factor, with which the noise of all exchanges together is smallest.

        An exchange of d numbers with the bound C and the multiplier σ has noise of the squared norm d(σC)². For a given
        Σ 1/σ², the sum of these is smallest if σ² is in proportion to 1/(√d C).
        """
        numbers = sum(math.prod(a.shape) for a in jax.tree.leaves(exchange.shapes))
        return (max(numbers, 1) * of_name(self.clip, exchange.name) ** 2) ** -0.25

    def _check(self, setting: Any) -> None:
        n = setting.clients.n
        if self.delta >= 1 / n:
            raise ValueError(
                f"rk.private: delta must be below 1/n for the n = {n} clients, because a larger delta would let a run "
                f"publish a client's data; got {self.delta!r}."
            )
        if setting.clients.by_size:
            raise ValueError(
                'A private run must have public weights; got clients with weights="size", which their data determine. '
                "Give Clients(weights=None), or numbers that may be published."
            )

    def _check_names(self, known: Mapping[str, Any]) -> None:
        for what, given in (("clip", self.clip), ("noise", self.noise)):
            if isinstance(given, tuple):
                names = [name for name, _ in given]
                if sorted(names) != sorted(known):
                    raise ValueError(
                        f"rk.private: {what} must have a number for each exchange of the method, "
                        f"{', '.join(map(repr, known))}; got {', '.join(map(repr, names)) or 'none'}."
                    )

    # The channel.

    def init(self, exchange: ChannelExchange) -> tuple[Any, Any]:
        level = dict(self.levels).get(exchange.name, math.nan)
        state = {"noise": jnp.asarray(level, float)}
        if self.quantile is not None:
            state["bound"] = jnp.asarray(of_name(self.clip, exchange.name), float)
        return state, ()

    def public(self, state: Any) -> Any:
        """The value that clients are sent: an adaptive bound."""
        return state.get("bound")

    def encode(self, exchange: ChannelExchange, value: Any, key: Array, state: Any) -> tuple[Any, Any]:
        if self.quantile is None:
            return Clip(of_name(self.clip, exchange.name)).encode(exchange, value, key, state)
        clipped, state = Clip(exchange.public).encode(exchange, value, key, state)
        within = jax.tree.map(lambda a, b: jnp.all(a == b), value, clipped)
        return (clipped, jnp.all(jnp.stack(jax.tree.leaves(within))).astype(float) - 0.5), state

    def decode(self, exchange: ChannelExchange, total: Any, key: Array, state: Any) -> tuple[Any, Any]:
        if self.quantile is None:
            scale = state["noise"] * of_name(self.clip, exchange.name) * exchange.share
            return noisy(total, scale, key), state
        total, half = total  # `half`: the mean of ±1/2, so that a client moves it by half of its share
        of_update, of_bit = state["noise"] / math.sqrt(1 - _BIT), state["noise"] / math.sqrt(_BIT)
        fresh, bit = jax.random.split(key)
        share = noisy(half, of_bit * exchange.share / 2, bit) + 0.5
        bound = state["bound"] * jnp.exp(-_PACE * (jnp.clip(share, 0, 1) - self.quantile))
        return noisy(total, of_update * state["bound"] * exchange.share, fresh), {**state, "bound": bound}

    def hide(
        self, exchange: ChannelExchange, marks: list[Bookkeeping], values: list[Any], key: Array, state: Any, whole: Any
    ) -> list[Any]:
        """Return bookkeeping with noise, in its bounds. `values`: what exceeds the lower bounds."""

        def hidden(i: int, mark: Bookkeeping, value: Array) -> Array:
            if mark.most is None:  # the account refuses it
                return value
            span = mark.most - mark.least
            scale = state["noise"] * span * math.sqrt(max(value.size, 1)) * exchange.share
            noise = noisy(value, scale, jax.random.fold_in(key, i)) if span else jnp.zeros_like(value)
            return (mark.least * whole + jnp.clip(noise, 0, span * whole)).astype(value.dtype)

        return [hidden(i, mark, value) for i, (mark, value) in enumerate(zip(marks, values, strict=True))]


def _exchanges(plan: Any) -> list[Exchange]:
    return [exchange for event in releases(plan).events for exchange in event.releases]


def _draws(found: Releases, levels: Mapping[str, float], chance: float) -> tuple[Draws, ...]:
    precision = lambda event: sum(
        times * released(exchange) / levels[exchange.name] ** 2 for exchange, times in event.releases.items()
    )
    return tuple(Draws(event.times, precision(event), chance) for event in found.events)
