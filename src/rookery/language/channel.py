"""The channel: what stands between a client's value and the server's. Channels are records, composed by `chain`."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool

from rookery.base import draws
from rookery.base.arguments import is_number


class ChannelExchange(NamedTuple):
    """An exchange as a channel sees it."""

    name: str
    kind: str  # "mean", "sum", "gather" or, where a client holds the centre's data, "center"
    shapes: Any  # of one client's update (its difference to `around`, where the algorithm names one); None: bookkeeping
    share: Any = None  # in `decode`: the largest weight that one client has in the result


@dataclass(frozen=True)
class Bookkeeping:
    """Marks a part of a message that is not an update, such as a number of steps: no channel clips it or hides it.

    Arguments:
        what: what it is, for `rk.explain`.
        most: a public bound. With a channel, entries are clamped to [0, most] at the client. None: it is sent as it is.
    """

    what: str
    most: float | None = None

    def __post_init__(self) -> None:
        if self.most is not None and not (is_number(self.most) and self.most >= 0):
            raise ValueError(f"Bookkeeping: most must be a number of at least 0, or None; got {self.most!r}.")

    def bounded(self, value: Array) -> Array:
        """The value within its bound, if it has one; what is not finite counts as 0."""
        if self.most is None:
            return value
        most = self.most
        if jnp.issubdtype(value.dtype, jnp.integer):
            most = min(int(most), int(jnp.iinfo(value.dtype).max))
        value = jnp.where(jnp.isfinite(value), value, jnp.zeros((), value.dtype))
        return jnp.clip(value, 0, most).astype(value.dtype)


class Channel(Protocol):
    """What is done to a client's update on its way to the server, and to the result there.

    Every method is traced and becomes a part of the plan, on every engine. A channel receives only
    the updates of a message, with None for its `Bookkeeping`.

    A channel may also have `reduce(exchange, rows, weights, present)`, one of a chain, for example a median instead
    of the mean. `rows` has a row for each client, `weights` add up to 1 (of a mean), and absent clients have weight
    0.
    """

    def init(self, exchange: ChannelExchange) -> tuple[Any, Any]:
        """What the server and what each client remembers of this exchange from round to round; () for nothing."""

    def encode(self, exchange: ChannelExchange, value: Any, key: Array, state: Any) -> tuple[Any, Any]:
        """At the client: what is sent, and the client's new state."""

    def decode(self, exchange: ChannelExchange, total: Any, key: Array, state: Any) -> tuple[Any, Any]:
        """At the server: the result, and the server's new state.

        `key` comes from the server's own entropy: nothing that a client sees leads to it.
        """


@dataclass(frozen=True)
class Plain:
    """The plain mean: nothing is done to a value. What a run without a channel has."""

    def init(self, exchange: ChannelExchange) -> tuple[Any, Any]:
        """Nothing."""
        return (), ()

    def encode(self, exchange: ChannelExchange, value: Any, key: Array, state: Any) -> tuple[Any, Any]:
        """The value."""
        return value, state

    def decode(self, exchange: ChannelExchange, total: Any, key: Array, state: Any) -> tuple[Any, Any]:
        """The total."""
        return total, state


@dataclass(frozen=True)
class Chain:
    """Several channels: a value passes them in order at the client, and in the opposite order at the server."""

    members: tuple[Any, ...]

    @property
    def bound(self) -> float | None:
        """The norm that what it sends is bounded by; None if it is not known."""
        last = self.members[-1] if self.members else None
        if last is not None and type(last).encode is Plain.encode:
            return Chain(self.members[:-1]).bound
        return getattr(last, "bound", None)

    @property
    def reduce(self) -> Any:
        """That of the one member that has one; None: the weighted sum."""
        return next((own.reduce for own in self.members if getattr(own, "reduce", None) is not None), None)

    def init(self, exchange: ChannelExchange) -> tuple[Any, Any]:
        """A state for each member."""
        server, client = zip(*(own.init(exchange) for own in self.members), strict=True) if self.members else ((), ())
        return server, client

    def encode(self, exchange: ChannelExchange, value: Any, key: Array, state: Any) -> tuple[Any, Any]:
        """Through all members."""
        after = []
        for i, (own, before) in enumerate(zip(self.members, state, strict=True)):
            value, new = own.encode(exchange, value, jax.random.fold_in(key, i), before)
            after.append(new)
        return value, tuple(after)

    def decode(self, exchange: ChannelExchange, total: Any, key: Array, state: Any) -> tuple[Any, Any]:
        """Through all members, the last first."""
        after = []
        for i, (own, before) in reversed(list(enumerate(zip(self.members, state, strict=True)))):
            total, new = own.decode(exchange, total, jax.random.fold_in(key, i), before)
            after.append(new)
        return total, tuple(reversed(after))


def chain(*members: Channel) -> Channel:
    """Several channels as one: `rk.chain(rk.clip(1.0), rk.gaussian(1.1))`. Without any it is the plain mean.

    A member that needs a bound on what it receives (noise) takes it from a member before it (a clip). Its noise is
    scaled for a weighted mean, so it can't be combined with a `reduce`.
    """
    bounded: list[Any] = []
    bound = None
    for own in members:
        if not is_channel(own):
            raise TypeError(f"rk.chain takes channels such as rk.clip(1.0); got {own!r}.")
        given = own.bounded_by(bound) if hasattr(own, "bounded_by") else own
        kept = (
            bound if getattr(type(given), "encode", None) is Plain.encode else None
        )  # others may enlarge what is sent
        bound = getattr(given, "bound", kept)
        bounded.append(given)
    result = Chain(tuple(bounded))
    reducing = [own for own in _each(result) if getattr(own, "reduce", None) is not None]
    scaled = [own for own in _each(result) if hasattr(own, "bounded_by")]
    if len(reducing) > 1:
        raise ValueError("rk.chain: two of the channels reduce the clients' values; one of them can.")
    if reducing and scaled:
        noise, other = type(scaled[0]).__name__, type(reducing[0]).__name__
        raise ValueError(
            f"rk.chain: the noise of {noise} is scaled for a weighted mean, and {other} reduces the clients' values in "
            "another way. Leave out one of the two."
        )
    return result


def _each(channel: Any) -> list[Any]:
    """The channels that a channel, or a dict of channels, is made of."""
    if isinstance(channel, Mapping | Chain):
        inner = channel.values() if isinstance(channel, Mapping) else channel.members
        return [own for part in inner for own in _each(part)]
    return [] if channel is None else [channel]


def draws_noise(channel: Any) -> bool:
    """Return whether the server's side of a channel, or of a dict of channels, may draw noise."""
    return any(getattr(type(own), "decode", None) is not Plain.decode for own in _each(channel))


def is_channel(value: Any) -> bool:
    """Return whether the value has a channel's methods."""
    return not isinstance(value, type) and all(callable(getattr(value, m, None)) for m in ("init", "encode", "decode"))


def check_kind(channel: Any) -> None:
    """Raise TypeError if `channel` is not a channel, a dict of channels, or None."""
    for own in channel.values() if isinstance(channel, Mapping) else [channel]:
        if own is not None and not is_channel(own):
            raise TypeError(
                "channel must be a channel such as rk.clip(1.0), or a dict from exchange names to channels; got "
                f"{own!r}."
            )


def chosen(channel: Any, name: str) -> Any:
    """The channel of the exchange with this name, or None."""
    if isinstance(channel, Mapping):
        return channel.get(name)
    return channel


def check(channel: Any, names: list[str]) -> None:
    """Raise if `channel` is not a channel, or names an exchange that the method does not have."""
    check_kind(channel)
    for name in channel if isinstance(channel, Mapping) else ():
        if name not in names:
            known = ", ".join(repr(n) for n in dict.fromkeys(names))
            raise ValueError(f"channel: this method has no exchange {name!r}; it has: {known}.")


@dataclass(frozen=True)
class Faults:
    """Replies that do not arrive.

    A reply that is lost is left out of its mean, whose weights are those of the others. A client that missed an
    exchange of a round keeps the memory it had before the round. `missing` in the history counts them. The start
    (round 0) reaches everybody.

    Arguments:
        dropout: the chance that a client's reply to an exchange is lost, each on its own.
        minimum: if fewer replies to an exchange arrive, the round fails.
    """

    dropout: float = 0.0
    minimum: int = 1

    def __post_init__(self) -> None:
        if not isinstance(self.dropout, int | float) or isinstance(self.dropout, bool) or not 0 <= self.dropout < 1:
            raise ValueError(f"Faults: dropout must be a number of at least 0 and below 1; got {self.dropout!r}.")
        if not isinstance(self.minimum, int) or isinstance(self.minimum, bool) or self.minimum < 1:
            raise ValueError(f"Faults: minimum must be an integer of at least 1; got {self.minimum!r}.")

    def present(self, key: Array, size: int) -> Bool[Array, " cohort"]:
        """Whose replies arrive."""
        return ~draws.coins(key, self.dropout, (size,))
