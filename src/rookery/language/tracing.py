"""Per-client values, and the state that the exchanges of a round share while it is traced."""

from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
from jaxtyping import Array, PyTree

from rookery.base.compat import Tracer
from rookery.language.channel import ChannelExchange, Faults
from rookery.language.clock import Watch
from rookery.language.records import Records

_RECORDS = 0x7265636F  # separates the noise of clients' functions from that of exchanges


@jax.tree_util.register_pytree_node_class
@dataclass(frozen=True)
class PerClient:
    """The result of `fed.map`: each client of the cohort has a value of its own, which nobody else sees."""

    rows: PyTree[Array]
    cohort: int = 0  # the number of the cohort; 0 is the round's own

    def tree_flatten(self) -> tuple[tuple[Any], int]:
        return (self.rows,), self.cohort

    @classmethod
    def tree_unflatten(cls, cohort: int, children: tuple[Any]) -> "PerClient":
        return cls(*children, cohort)

    def _refuse(self, *_: Any) -> Any:
        raise TypeError(
            "A per-client value can't be used as an array: the server has not received it. Exchange it first, e.g. "
            "fed.mean(value, name=...), or compute with it inside fed.map."
        )

    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = __rtruediv__ = _refuse
    __matmul__ = __rmatmul__ = __pow__ = __rpow__ = __neg__ = __abs__ = __getitem__ = __iter__ = _refuse
    __jax_array__ = __array__ = __float__ = __lt__ = __le__ = __gt__ = __ge__ = _refuse


class Heard(NamedTuple):
    """The clients that replied to an exchange."""

    weight: Any  # Σ p_i over these clients
    replies: Any  # their number


class Threaded(NamedTuple):
    """Values that change during a round, in addition to the algorithm's own. Loops carry them."""

    memory: Any = None  # what the cohort's clients remember
    client: Any = ()  # the state of a channel's client side, by exchange
    server: Any = ()  # the state of its server side
    missing: Any = None  # how many replies did not arrive
    least: Any = None  # the number of replies to the exchange that had the fewest
    stayed: Any = None  # for each client: whether it has taken part in every exchange so far
    seconds: Any = None  # with a clock: since the beginning of the round


class ExchangeKeys(NamedTuple):
    """The keys of one exchange, in addition to the algorithm's own."""

    chance: Array  # decides which replies get lost: derived from the seed
    public: Array  # for a channel's client side: derived from the seed
    noise: Any = None  # for a channel's server side: from the server's own entropy

    def at(self, i: Any) -> "ExchangeKeys":
        """The keys of exchange i."""
        chance, public = (jax.random.fold_in(key, i) for key in (self.chance, self.public))
        return ExchangeKeys(chance, public, None if self.noise is None else jax.random.fold_in(self.noise, i))


class Tracing:
    """The state that the cohorts of one round share while the round is traced."""

    def __init__(
        self, channel: Any = None, faults: Faults | None = None, keys: ExchangeKeys | None = None,
        threaded: Threaded | None = None, debug: bool = False, products: bool = False, rate: float | None = None,
        chance: float | None = None,
    ) -> None:  # fmt: skip
        self.debug, self.products, self.rate, self.chance = debug, products, rate, chance  # see trace.Setting
        self.channel, self.faults, self.threaded = channel, faults, threaded or Threaded()
        self.exchanges: dict[str, ChannelExchange] = {}  # by name, those traced so far
        self.sample_by_sample: set[str] = set()  # the losses that are evaluated sample by sample
        self._keys, self._drawn, self._mapped = keys, 0, 0
        self.levels: Any = None  # with a channel that is private for each record: the noise multipliers
        self.cohorts = 0  # how many have been resampled so far
        self.down: Any = None  # what packs the server's values on their way to clients, if a channel does so
        self.exact: list[Any] = []  # values that it leaves as they are
        self._packed: dict[int, tuple[Any, tuple[Array, ...]]] = {}  # by the identity of the value
        self.watch: Watch | None = None  # with a clock
        self.asynchronous = False  # whether means are over the replies in a buffer
        self.again: Array | None = None  # how often the only client has begun before with this model, if it may have
        self.unheard: set[int] = set()  # the clients that are always too late for an exchange
        self.liars: Any = None  # with an attack: whether each client of the federation lies in this round

    def next_keys(self) -> ExchangeKeys | None:
        """The keys of the next exchange; None if nothing in it is random."""
        self._drawn += 1
        return None if self._keys is None else self._keys.at(self._drawn)

    def packed(self, value: Any) -> tuple[Array, ...] | None:
        """The server's value as clients are sent it, packed once; None: it is sent as it is."""
        known = not isinstance(value, Tracer)  # a constant, which every participant has
        if known or any(value is exact for exact in self.exact) or not self.down.packs(value):
            return None
        if id(value) not in self._packed:
            keys = self.next_keys()
            assert keys is not None
            self._packed[id(value)] = value, self.down.pack(value, keys.public)
        return self._packed[id(value)][1]

    def record_noise(self) -> list[Any]:
        """The noise of the next client's function: a key and the multipliers; empty if oracles add no noise."""
        if self.levels is None:
            return []
        assert self._keys is not None
        self._mapped += 1
        return [jax.random.fold_in(jax.random.fold_in(self._keys.noise, _RECORDS), self._mapped), self.levels]

    def records_of(self, noise: list[Any]) -> Records | None:
        """The `Records` that make a client's oracles private for each record; None without noise."""
        return Records(self.channel.bound, *noise) if noise else None

    def enter(self, i: Any, threaded: Threaded) -> tuple[Any, ...]:
        """Enter a loop's body, in which keys depend on the turn i. Returns the argument of `leave`."""
        before = self._keys, self.threaded, dict(self._packed)
        keys = self.next_keys()
        self._keys = None if keys is None else keys.at(i)
        self.threaded = threaded
        if self.watch is not None:
            self.watch.turns.append(i > 0)
        return before

    def leave(self, before: tuple[Any, ...]) -> Threaded:
        """Leave the loop's body. Returns the threaded values at its end."""
        self.settle()
        after = self.threaded
        self._keys, self.threaded, self._packed = before
        if self.watch is not None:
            self.watch.turns.pop()
        return after

    @property
    def waits_for_some(self) -> bool:
        """Whether the server stops waiting before all replies are there."""
        return self.faults is not None and (self.faults.deadline is not None or self.faults.first is not None)

    def waited(self, seconds: Array) -> None:
        """Add to the time of the round."""
        self.threaded = self.threaded._replace(seconds=self.threaded.seconds + seconds)

    def settle(self, last: Array | None = None) -> None:
        """With a clock: wait for work that no exchange follows; see `Watch.settle`."""
        if self.watch is not None:
            self.waited(self.watch.settle(last))


def source_of(fn: Any) -> str:
    """The file and line of a client's function, for messages and printed plans."""
    code = getattr(fn, "__code__", None)
    if code is None:
        return getattr(fn, "__name__", type(fn).__name__)
    return f"{code.co_filename.rsplit('/', 1)[-1]}:{code.co_firstlineno}"
