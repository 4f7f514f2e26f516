"""Channels, which act on clients' updates on their way to the server: their protocol, and `chain` to compose them."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool

from rookery.base import draws
from rookery.base.arguments import is_integer, is_number


class ChannelExchange(NamedTuple):
    """An exchange as a channel sees it.

    Attributes:
        name: its name in the method, such as "x".
        kind: "mean", "sum", "gather" or, if a client holds the centre's data, "center".
        shapes: the shapes of a client's update (its difference from `around`, if the method names one): a tree of
            `jax.ShapeDtypeStruct`, with None instead of bookkeeping.
        share: in `decode`: the largest weight of a client in the result.
        public: in `encode` and `decode`: the value that the clients are sent, if the channel has `public(state)`.
        steady: whether every client replies in every round, with the same weight.
        state: in `reduce`: the server's state.
        key: in `reduce`: a key that is derived from the seed.
        uneven: in `reduce`: why the clients' replies must not count equally, or "".
    """

    name: str
    kind: str
    shapes: Any
    share: Any = None
    public: Any = None
    steady: bool = False
    state: Any = None
    key: Any = None
    uneven: str = ""


@dataclass(frozen=True)
class Bookkeeping:
    """Marks a part of a message that is not an update, such as a number of steps: no channel clips it.

    Arguments:
        what: its meaning, for `rk.explain`.
        most: a public bound. With a channel, the client clamps entries to [least, most]; `rk.private` then hides them
            with noise. None: it is sent unchanged, and refused by `rk.private`.
        least: the public lower bound. If it equals `most`, the value itself is public.
    """

    what: str
    most: float | None = None
    least: float = 0.0

    def __post_init__(self) -> None:
        if self.most is not None and not (is_number(self.most) and self.most >= 0):
            raise ValueError(f"Bookkeeping: most must be a number of at least 0, or None; got {self.most!r}.")
        if not is_number(self.least) or not 0 <= self.least <= (self.least if self.most is None else self.most):
            raise ValueError(f"Bookkeeping: least must be a number from 0 to `most`; got {self.least!r}.")

    def bounded(self, value: Array) -> Array:
        """The value clamped to its bounds, if it has them; entries that are not finite become 0 first."""
        if self.most is None:
            return value
        least, most = self.least, self.most
        if jnp.issubdtype(value.dtype, jnp.integer):
            least, most = int(least), min(int(most), int(jnp.iinfo(value.dtype).max))
        value = jnp.where(jnp.isfinite(value), value, jnp.zeros((), value.dtype))
        return jnp.clip(value, least, most).astype(value.dtype)


class Channel(Protocol):
    """What happens to a client's update on its way to the server, and to the result there.

    Every method is traced and becomes part of the plan, on every engine. A channel is given only the updates of a
    message, with None instead of its `Bookkeeping`. It refuses an exchange that it cannot handle by an error in `init`.

    One channel of a chain may also have `reduce(exchange, rows, weights, present)`, e.g. a median instead of the mean.
    `rows` has a row for each client, the `weights` of a mean add up to 1, and absent clients have weight 0. This
    channel may also have `reduce_bookkeeping(marks, rows, weights, present)`; otherwise the bookkeeping is summed.

    One channel of a chain may have `unpack(exchange, message, state)`, which turns a compressed message back into an
    update of the original shapes. It runs at the server, for each reply, before replies are added up. `state` is the
    state of the server's side; what `unpack` computes must depend on nothing else.

    Clients and server may share numbers that change, such as a random rotation for each round: `public(state)` returns
    the part of the server's state that the clients are sent. Clients find it in `exchange.public`, and the ledger
    counts it.

    A channel after which noise may follow has an attribute `bound`: no message of a client has a larger norm, over all
    its numbers together. A channel with `unpack` has a method `held_to(bound)` instead, which returns a channel whose
    `unpack` keeps to that norm.
    """

    def init(self, exchange: ChannelExchange) -> tuple[Any, Any]:
        """The initial states of the server and of each client for this exchange; () for none."""

    def encode(self, exchange: ChannelExchange, value: Any, key: Array, state: Any) -> tuple[Any, Any]:
        """At the client: the message, and the client's new state.

        `key` derives from the seed and differs for each client, round and exchange.
        """

    def decode(self, exchange: ChannelExchange, total: Any, key: Array, state: Any) -> tuple[Any, Any]:
        """At the server: the result, and the server's new state.

        `key` comes from the server's own entropy: nothing that a client sees leads to it.
        """


@dataclass(frozen=True)
class Plain:
    """The plain mean, which leaves values unchanged, as in a run without a channel."""

    def init(self, exchange: ChannelExchange) -> tuple[Any, Any]:
        return (), ()

    def encode(self, exchange: ChannelExchange, value: Any, key: Array, state: Any) -> tuple[Any, Any]:
        return value, state

    def decode(self, exchange: ChannelExchange, total: Any, key: Array, state: Any) -> tuple[Any, Any]:
        return total, state


@dataclass(frozen=True)
class Chain:
    """Several channels: a value passes them in order at the client, and in reverse order at the server."""

    members: tuple[Any, ...]

    @property
    def bound(self) -> float | None:
        """A bound on the norm of a message; None if it is not known."""
        last = self.members[-1] if self.members else None
        if last is not None and type(last).encode is Plain.encode:
            return Chain(self.members[:-1]).bound
        return getattr(last, "bound", None)

    @property
    def secure(self) -> Any:
        """The secure sum at the end of the chain; None: there is none."""
        return getattr(self.members[-1], "secure", None) if self.members else None

    @property
    def reduce(self) -> Any:
        """The `reduce` of the member that has one; None: the weighted sum."""
        i = next((i for i, member in enumerate(self.members) if _reduces(member)), None)
        if i is None:
            return None
        of_member = lambda exchange: self._for_member(exchange, i)._replace(state=exchange.state[i])
        return lambda exchange, *replies: self.members[i].reduce(of_member(exchange), *replies)

    @property
    def reduce_bookkeeping(self) -> Any:
        """The `reduce_bookkeeping` of the member that reduces; None: the weighted sum."""
        return next((getattr(m, "reduce_bookkeeping", None) for m in self.members if _reduces(m)), None)

    @property
    def unpack(self) -> Any:
        """The `unpack` of the member that has one; None: messages are sent as they are."""
        for i, member in enumerate(self.members):
            if compresses(member):
                return lambda exchange, message, state: member.unpack(self._for_member(exchange, i), message, state[i])
        return None

    def public(self, state: Any) -> tuple[Any, ...]:
        """The values that the members send to the clients, with None for members that send nothing."""
        of_one = lambda member, state: member.public(state) if hasattr(member, "public") else None
        return tuple(map(of_one, self.members, state))

    def init(self, exchange: ChannelExchange) -> tuple[Any, Any]:
        states = [member.init(exchange) for member in self.members]
        return tuple(server for server, _ in states), tuple(client for _, client in states)

    def encode(self, exchange: ChannelExchange, value: Any, key: Array, state: Any) -> tuple[Any, Any]:
        after = []
        for i, (member, before) in enumerate(zip(self.members, state, strict=True)):
            value, new = member.encode(self._for_member(exchange, i), value, jax.random.fold_in(key, i), before)
            after.append(new)
        return value, tuple(after)

    def decode(self, exchange: ChannelExchange, total: Any, key: Array, state: Any) -> tuple[Any, Any]:
        after = []
        for i, (member, before) in reversed(list(enumerate(zip(self.members, state, strict=True)))):
            total, new = member.decode(self._for_member(exchange, i), total, jax.random.fold_in(key, i), before)
            after.append(new)
        return total, tuple(reversed(after))

    def _for_member(self, exchange: ChannelExchange, i: int) -> ChannelExchange:
        """The exchange as the i-th member sees it."""
        return exchange if exchange.public is None else exchange._replace(public=exchange.public[i])


def chain(*members: Channel) -> Channel:
    """Compose channels: `rk.chain(rk.clip(1.0), rk.gaussian(1.1))`. An empty chain is the plain mean.

    A member that needs a bound on its input (noise) takes it from a member before it (a clip). Its noise is scaled for
    a weighted mean, so it can't be combined with a `reduce`.
    """
    bounded: list[Any] = []
    bound = None
    for member in members:
        if not is_channel(member):
            raise TypeError(f"rk.chain must be given channels such as rk.clip(1.0); got {member!r}.")
        if hasattr(member, "calibrated"):
            raise ValueError("rk.private must be the whole channel of a run; got it in a chain.")
    _check_secure([single for member in members for single in _flat(member)])
    for member in _with_packing(list(members)):
        if hasattr(member, "bounded_by") and bound is None:
            _check_bound(member, bounded)
        channel: Any = member.bounded_by(bound) if hasattr(member, "bounded_by") else member
        keeps_bound = getattr(type(channel), "encode", None) is Plain.encode  # others may enlarge the message
        bound = getattr(channel, "bound", bound if keeps_bound else None)
        bounded.append(channel)
    result = Chain(tuple(bounded))
    if len(down_too := [member for member in _flat(result) if hasattr(member, "down")]) > 1:
        raise ValueError(f"rk.chain must have at most one rk.broadcast; got {down_too}.")
    reducing = [member for member in _flat(result) if _reduces(member)]
    scaled = [member for member in _flat(result) if hasattr(member, "bounded_by") and not _is_secure(member)]
    if len(reducing) > 1:
        raise ValueError(f"rk.chain must have at most one channel that reduces the clients' values; got {reducing}.")
    if reducing and scaled:
        noise, other = type(scaled[0]).__name__, type(reducing[0]).__name__
        raise ValueError(
            f"rk.chain: the noise of {noise} is scaled for a weighted mean, and {other} reduces the clients' values in "
            "another way. Leave out one of the two."
        )
    return result


def _check_bound(member: Any, before: list[Any]) -> None:
    """Raise ValueError if an earlier channel has a bound that a channel between it and this one may not keep."""
    last = next(
        (i for i, other in reversed(list(enumerate(before))) if getattr(other, "bound", None) is not None), None
    )
    if last is not None:
        clip, between, noise = (type(channel).__name__ for channel in (before[last], before[last + 1], member))
        raise ValueError(
            f"rk.chain: {noise} needs a bound on the values, and {between} may enlarge what {clip} has bounded. Put "
            f"rk.clip(bound) before it, after {between}; or give {between} an attribute `bound`, if it keeps to one."
        )


def _check_secure(members: list[Any]) -> None:
    """Raise ValueError if a secure sum is not the last member, or if another member needs single replies."""
    if not any(map(_is_secure, members)):
        return
    single = [member for member in members if _reduces(member) or compresses(member)]
    if single:
        other = type(single[0]).__name__
        raise ValueError(
            f"rk.chain: {other} needs each client's value by itself, and rk.secure_sum shows the server only their "
            "sum. Leave out one of the two."
        )
    if any(map(_is_secure, members[:-1])):
        raise ValueError(
            "rk.chain: rk.secure_sum must be the last member, because it turns values into integers; got another "
            "after it."
        )


def _is_secure(channel: Any) -> bool:
    return getattr(channel, "secure", None) is not None


def _with_packing(given: list[Any]) -> list[Any]:
    """Check the members of a chain with one that compresses, and return them, its output bounded if noise follows."""
    if not any(map(compresses, given)):
        return given
    members = [single for member in given for single in _flat(member)]
    packing = [member for member in members if compresses(member)]
    if len(packing) > 1:
        raise ValueError(f"rk.chain must have at most one channel that compresses; got {packing}.")
    at = next(i for i, member in enumerate(members) if member is packing[0])
    before, after = members[:at], members[at + 1 :]
    for member in after:
        if getattr(type(member), "encode", None) is not Plain.encode:
            raise ValueError(
                f"rk.chain: {type(member).__name__} can't act on a compressed message. Put it before "
                f"{type(packing[0]).__name__}."
            )
    if getattr(packing[0], "sums_only", False) and any(map(_reduces, members)):
        other = next(type(member).__name__ for member in members if _reduces(member))
        raise ValueError(
            f'rk.chain: with feedback="difference" the server knows the sum of the updates alone, and {other} needs '
            'each of them. Use feedback="error".'
        )
    noise = next((type(member).__name__ for member in after if hasattr(member, "bounded_by")), None)
    if noise is not None and not hasattr(packing[0], "held_to"):
        packs = type(packing[0]).__name__
        raise ValueError(
            f"rk.chain: {noise} needs a bound on each message, and {packs} gives none for what it unpacks. Leave out "
            f"one of the two, or give {packs} a method held_to(bound) (see rk.Channel)."
        )
    if noise is not None:
        return [*before, packing[0].held_to(Chain(tuple(before)).bound), *after]
    return members


def down(channel: Any) -> Any:
    """The object that packs the values sent to clients: the `down` of a member, or None."""
    return next((member.down for member in _flat(channel) if hasattr(member, "down")), None)


def compresses(channel: Any) -> bool:
    """Return whether the server unpacks each reply of a channel."""
    return getattr(channel, "unpack", None) is not None


def _reduces(channel: Any) -> bool:
    return getattr(channel, "reduce", None) is not None


def _flat(channel: Any) -> list[Any]:
    """The single channels of a channel, or of a dict of channels."""
    if isinstance(channel, Mapping | Chain):
        inner = channel.values() if isinstance(channel, Mapping) else channel.members
        return [member for part in inner for member in _flat(part)]
    return [] if channel is None else [channel]


def rules(channel: Any) -> list[Any]:
    """Return the members of a channel, or of a dict of channels, that check the number of clients before a run."""
    return [member for member in _flat(channel) if hasattr(member, "check_cohort")]


def draws_noise(channel: Any) -> bool:
    """Return whether the server's side of a channel, or of a dict of channels, may draw noise."""
    silent = lambda member: getattr(type(member), "decode", None) is Plain.decode or hasattr(member, "held_to")
    return not all(silent(member) for member in _flat(channel))


def sums_securely(channel: Any) -> bool:
    """Return whether a channel, or one of a dict of channels, has a secure sum."""
    return any(map(_is_secure, channel.values() if isinstance(channel, Mapping) else [channel]))


def is_private(channel: Any) -> bool:
    """Return whether a channel hides the single client, so that cohorts are secret and denominators public."""
    return getattr(channel, "unit", None) == "client"


def is_private_for_records(channel: Any) -> bool:
    """Return whether a channel hides the single record, by noise that the client adds to what its oracles compute."""
    return getattr(channel, "unit", None) == "record"


def is_channel(value: Any) -> bool:
    """Return whether the value has a channel's methods."""
    return not isinstance(value, type) and all(callable(getattr(value, m, None)) for m in ("init", "encode", "decode"))


def check_kind(channel: Any) -> None:
    """Raise TypeError if `channel` is not a channel, a dict of channels, or None."""
    for member in channel.values() if isinstance(channel, Mapping) else [channel]:
        if isinstance(channel, Mapping) and hasattr(member, "calibrated"):
            raise ValueError(
                "rk.private must be the channel of all exchanges; got it for one. Give bounds by name instead: "
                'rk.private(..., clip={"x": 1.0, ...}).'
            )
        if isinstance(channel, Mapping) and down(member) is not None:
            raise ValueError(
                "rk.broadcast must be in the channel of all exchanges, because a value that clients are sent may serve "
                f"several; got it for one. Give channel={member!r}."
            )
        if member is not None and not is_channel(member):
            raise TypeError(
                "channel must be a channel such as rk.clip(1.0), or a dict from exchange names to channels; got "
                f"{member!r}."
            )


def chosen(channel: Any, name: str) -> Any:
    """The channel of the exchange with this name, or None."""
    return channel.get(name) if isinstance(channel, Mapping) else channel


def check(channel: Any, names: list[str]) -> None:
    """Raise if `channel` is not a channel, or names an exchange that the method does not have."""
    check_kind(channel)
    for name in channel if isinstance(channel, Mapping) else ():
        if name not in names:
            known = ", ".join(repr(n) for n in dict.fromkeys(names))
            raise ValueError(f"channel must name exchanges of this method, which are {known}; got {name!r}.")


@dataclass(frozen=True)
class Faults:
    """Replies that do not arrive, and clients that lie.

    A mean leaves lost replies out and normalises the weights of the others. A client that missed an exchange of a round
    keeps its memory from before the round. `missing` in the history counts lost replies. The start (round 0) loses
    none.

    Arguments:
        dropout: the probability that a client's reply to an exchange is lost, independently of all others.
        minimum: the round fails if fewer replies to an exchange arrive. The simulation ignores it for cohorts of
            `rk.Poisson`, whose size is secret.
        attack: what some clients send instead of their replies, e.g. `rk.attacks.SignFlip(2)`; None: all are honest.
        deadline: with a clock, the seconds after which an exchange ends: later replies are lost.
        first: with a clock, the replies after which an exchange ends: `cohort=60` and `first=50` asks ten clients more
            than it needs. Fast clients are then heard more often than slow ones, and the result is biased towards their
            data.
        correct: with `deadline` or `first`: divide each client's weight by its chance to be heard, so that slow clients
            count as much as fast ones in the long run. This needs a method that only takes means with the clients' own
            weights, and speeds with which no client is always late.
    """

    dropout: float = 0.0
    minimum: int = 1
    attack: Any = None
    deadline: float | None = None
    first: int | None = None
    correct: bool = False

    def __post_init__(self) -> None:
        if not isinstance(self.dropout, int | float) or isinstance(self.dropout, bool) or not 0 <= self.dropout < 1:
            raise ValueError(f"Faults: dropout must be a number of at least 0 and below 1; got {self.dropout!r}.")
        if not isinstance(self.minimum, int) or isinstance(self.minimum, bool) or self.minimum < 1:
            raise ValueError(f"Faults: minimum must be an integer of at least 1; got {self.minimum!r}.")
        if self.deadline is not None and (not is_number(self.deadline) or not self.deadline > 0):
            raise ValueError(f"Faults: deadline must be a positive number of seconds; got {self.deadline!r}.")
        if self.first is not None and (not is_integer(self.first) or self.first < 1):
            raise ValueError(f"Faults: first must be an integer of at least 1; got {self.first!r}.")
        if not isinstance(self.correct, bool) or (self.correct and self.deadline is None and self.first is None):
            raise ValueError(
                f"Faults: correct must be False without deadline or first; got {self.correct!r}. Give one of them."
            )
        if self.attack is not None and (isinstance(self.attack, type) or not hasattr(self.attack, "attackers")):
            raise TypeError(f"Faults: attack must be an attack such as rk.attacks.SignFlip(2); got {self.attack!r}.")

    def present(self, key: Array, size: int) -> Bool[Array, " cohort"]:
        """Draw whose replies arrive."""
        return ~draws.coins(key, self.dropout, (size,))
