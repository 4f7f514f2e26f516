"""`private`: a budget of differential privacy, and the noise that keeps a run to it."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jaxtyping import Array

from rookery.base.arguments import is_integer, is_number
from rookery.channels.account import Account, Draws
from rookery.channels.privacy import Clip, noisy
from rookery.data.cohort import overflow
from rookery.language.channel import Bookkeeping, ChannelExchange, Plain
from rookery.language.ledger import Exchange
from rookery.plan.releases import Releases, released, releases

_BIT = 0.05  # the part of an exchange's privacy that an adaptive bound spends
_PACE = 0.2  # of an adaptive bound: Andrew et al.'s η_C
_CLIENT, _RECORD = "client", "record"

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
        """Return ε after so many rounds."""
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


@dataclass(frozen=True)
class Private(Budgeted):
    """The channel of `private` for clients.

    Attributes:
        levels: once the noise is calibrated, its multiplier by exchange.
    """

    unit = _CLIENT
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
                f"rk.private: delta must be below 1/n, the chance that would allow to publish one of n = {n} clients; "
                f"got {self.delta!r}."
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
        state = {"noise": jnp.asarray(level, jnp.float32)}
        if self.quantile is not None:
            state["bound"] = jnp.asarray(of_name(self.clip, exchange.name), jnp.float32)
        return state, ()

    def public(self, state: Any) -> Any:
        """What the clients are told: an adaptive bound."""
        return state.get("bound")

    def encode(self, exchange: ChannelExchange, value: Any, key: Array, state: Any) -> tuple[Any, Any]:
        if self.quantile is None:
            return Clip(of_name(self.clip, exchange.name)).encode(exchange, value, key, state)
        clipped, state = Clip(exchange.public).encode(exchange, value, key, state)
        within = jax.tree.map(lambda a, b: jnp.all(a == b), value, clipped)
        return (clipped, jnp.all(jnp.stack(jax.tree.leaves(within))).astype(jnp.float32) - 0.5), state

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
            assert mark.most is not None
            span = mark.most - mark.least
            scale = state["noise"] * span * math.sqrt(max(value.size, 1)) * exchange.share
            noise = noisy(value, scale, jax.random.fold_in(key, i)) if span else jnp.zeros_like(value)
            return (mark.least * whole + jnp.clip(noise, 0, span * whole)).astype(value.dtype)

        return [hidden(i, mark, value) for i, (mark, value) in enumerate(zip(marks, values, strict=True))]


def private(
    epsilon: float | None = None,
    delta: float | None = None,
    clip: float | Mapping[str, float] = 1.0,
    rounds: int | None = None,
    unit: str = "client",
    noise: float | Mapping[str, float] | None = None,
    quantile: float | None = None,
) -> Budgeted:
    """Keep a run to a budget of differential privacy, (ε, δ), for any method: `channel=rk.private(8, 1e-5)`.

    The unit is a client. Its update to each exchange is clipped, and the server adds Gaussian noise to the result. The
    noise is the smallest with which all releases of the run, counted in the method's plan, keep to the budget. Cohorts
    are drawn from the server's own entropy, means divide by public numbers, and an update that is not finite counts as
    zero. With `cohort=rk.Poisson(50)` the same ε needs less noise than with cohorts of fixed size.

    The threat: anyone who sees all results that the server computes, and the data of all clients but one. The server
    itself is trusted. Not covered are `Run.memory` and the counts of samples in the history, which the server should
    keep to itself, and what `evaluate` publishes of data that are not public.

    Refused, because it can't be accounted for: a method that gathers single replies, bookkeeping without a bound, a
    centre held by a client, weights from the clients' sizes, `evaluate_client`, `keep_best`, and `rk.tune`.

    Arguments:
        epsilon: ε. None: there is no budget, and the history shows what the given `noise` costs.
        delta: δ, below 1/n for n clients.
        clip: the largest norm of a client's update, or {name of an exchange: norm}.
        rounds: the rounds that share the budget; None: those of `rk.solve`. After them the run ends.
        unit: "client".
        noise: the noise multiplier, or {name of an exchange: multiplier}: the standard deviation over the largest
            effect of one client. None: the smallest that keeps to ε, divided among the exchanges so that their noise
            together is smallest.
        quantile: let each bound follow this quantile of the updates' norms (Andrew et al., 2021), from `clip` on. A
            twentieth of the privacy of each exchange pays for it. None: fixed bounds.

    Example:
        >>> import rookery as rk
        >>> rk.private(epsilon=8, delta=1e-5, clip=1.0).unit
        'client'
    """
    if epsilon is None and noise is None:
        raise ValueError("rk.private: epsilon must be given, e.g. epsilon=8, unless `noise` is; got neither.")
    if epsilon is not None:
        _check("epsilon", epsilon)
    if delta is None or not is_number(delta) or not 0 < delta < 1:
        raise ValueError(f"rk.private: delta must be a number between 0 and 1, such as 1e-5; got {delta!r}.")
    if rounds is not None and (not is_integer(rounds) or rounds < 1):
        raise ValueError(f"rk.private: rounds must be an integer of at least 1, or None; got {rounds!r}.")
    if unit not in (_CLIENT, _RECORD):
        raise ValueError(f'rk.private: unit must be "client" or "record"; got {unit!r}.')
    if quantile is not None and not (is_number(quantile) and 0 < quantile < 1):
        raise ValueError(f"rk.private: quantile must be a number between 0 and 1, or None; got {quantile!r}.")
    bounds, levels = _by_name("clip", clip), None if noise is None else _by_name("noise", noise)
    rounds = None if rounds is None else int(rounds)
    fields = None if epsilon is None else float(epsilon), float(delta), bounds, rounds, levels
    if unit == _CLIENT:
        return Private(*fields, quantile=quantile)
    if quantile is not None:
        raise ValueError("rk.private: quantile must be None for records, whose bounds are fixed; got a number.")
    from rookery.channels.private_records import PrivateRecords  # which is made of what is above

    return PrivateRecords(*fields)


def _by_name(what: str, given: Any) -> ByName:
    if isinstance(given, Mapping):
        for name, value in given.items():
            _check(f"{what}[{name!r}]", value)
        return tuple((str(name), float(value)) for name, value in given.items())
    _check(what, given)
    return float(given)


def _check(what: str, value: Any) -> None:
    if not is_number(value) or not 0 < value < math.inf:
        raise ValueError(f"rk.private: {what} must be a positive number; got {value!r}.")


def of_name(given: ByName, name: str) -> float:
    """Return the number for a name."""
    return dict(given)[name] if isinstance(given, tuple) else given


def _exchanges(plan: Any) -> list[Exchange]:
    return [exchange for event in releases(plan).events for exchange in event.releases]


def _draws(found: Releases, levels: Mapping[str, float], chance: float) -> tuple[Draws, ...]:
    precision = lambda event: sum(
        times * released(exchange) / levels[exchange.name] ** 2 for exchange, times in event.releases.items()
    )
    return tuple(Draws(event.times, precision(event), chance) for event in found.events)
