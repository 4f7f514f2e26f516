"""The costs of a run: work counted on the device, and exchanges and bytes counted in Python integers."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, UInt

from rookery.base.jaxprs import is_key

WORK = ("samples_upper", "samples_lower", "gradients", "products")  # what a client counts
COUNTED = ("exchanges", "bytes_up", "bytes_down", "missing", "samples_busiest", *WORK)

# Wide numbers have a leading axis of length 2, for the low and the high 32-bit word: devices without 64-bit integers
# count beyond 2³¹ with them. Their arithmetic is jitted so that JAX traces each function once, not once per use.

Wide = UInt[Array, "2 ..."]


def wide(count: Any) -> Wide:
    """Integers of at least 0 as wide numbers."""
    low = jnp.asarray(count).astype(jnp.uint32)[None]
    return lax.pad(low, np.uint32(0), [(0, 1, 0), *[(0, 0, 0)] * (low.ndim - 1)])


def wide_row(counts: Sequence[Any]) -> Wide:
    """Several counts, Python integers or arrays, as a row of wide numbers."""
    if all(isinstance(count, int) for count in counts):
        low, high = zip(*(divmod(count, 2**32)[::-1] for count in counts), strict=True)
        return jnp.array([low, high], jnp.uint32)
    if any(isinstance(count, int) and count >= 2**31 for count in counts):
        return jnp.concatenate([wide_row([c]) if isinstance(c, int) else wide(c)[:, None] for c in counts], axis=1)
    return wide(jnp.stack([jnp.asarray(count, jnp.int32) for count in counts]))


@jax.jit
def add(a: Wide, b: Wide) -> Wide:
    """a + b."""
    return _joined(*_plus(a, b))


@jax.jit
def times(a: Wide, n: Any) -> Wide:
    """n·a, for an integer n of at least 0 and below 2³²."""
    n = jnp.asarray(n).astype(jnp.uint32)
    half, mask = np.uint32(16), np.uint32(0xFFFF)
    low, high = a
    (a0, a1), (n0, n1) = (low & mask, low >> half), (n & mask, n >> half)
    first = a1 * n0 + (a0 * n0 >> half)
    second = a0 * n1 + (first & mask)
    return _joined(low * n, a1 * n1 + (first >> half) + (second >> half) + high * n)


@jax.jit
def total(a: UInt[Array, "rows 2 k"]) -> UInt[Array, "2 k"]:
    """The sum over the rows of wide numbers."""
    return _joined(*lax.reduce((a[:, 0], a[:, 1]), _ZERO, _plus, [0]))


def largest(a: UInt[Array, "maps rows 2"]) -> UInt[Array, "maps 2"]:
    """The largest wide number of each map."""
    return jnp.stack(lax.reduce((a[..., 0], a[..., 1]), _ZERO, _larger, [1]), axis=-1)


@jax.jit
def worked(counts: UInt[Array, "maps rows 2 4"]) -> UInt[Array, "2 5"]:
    """The work of clients in several maps: the sums in the order of WORK, then the samples of each map's busiest
    client, added up."""
    low, high = counts[..., 0, :], counts[..., 1, :]
    samples = _plus((low[..., 0], high[..., 0]), (low[..., 1], high[..., 1]))
    busiest = lax.reduce(lax.reduce(samples, _ZERO, _larger, [1]), _ZERO, _plus, [0])
    sums = lax.reduce((low, high), _ZERO, _plus, [0, 1])
    return _joined(*(lax.concatenate([s, lax.expand_dims(b, [0])], 0) for s, b in zip(sums, busiest, strict=True)))


# With the two words apart. They are joined once, at the end, because XLA fuses little with a concatenation.

_ZERO = np.uint32(0), np.uint32(0)


def _joined(low: Array, high: Array) -> Wide:
    return lax.concatenate([lax.expand_dims(low, [0]), lax.expand_dims(high, [0])], 0)


def _plus(a: Any, b: Any) -> tuple[Array, Array]:
    low = a[0] + b[0]
    return low, a[1] + b[1] + (low < a[0]).astype(jnp.uint32)


def _larger(a: Any, b: Any) -> tuple[Array, Array]:
    first = (a[1] > b[1]) | ((a[1] == b[1]) & (a[0] > b[0]))
    return lax.select(first, a[0], b[0]), lax.select(first, a[1], b[1])


NO_WORK = np.zeros((2, len(WORK) + 1), np.uint32)


def as_integers(a: Any) -> list[int]:
    """Wide numbers as Python integers."""
    low, high = np.asarray(a).tolist()
    return [l + 2**32 * h for l, h in zip(low, high, strict=True)]


# Exchanges.


class Exchange(NamedTuple):
    """An exchange of the plan: its name, how it reduces, and what each client sends."""

    name: str
    kind: str  # "mean", "sum", "gather", "center"; "finish", not an exchange: what clients are sent after the last one
    shape: str
    reply_bytes: int
    beside: tuple[tuple[str, str, float | None, float], ...] = ()  # its bookkeeping: meaning, shape, bounds if any
    updates: bool = True  # whether there is anything else in it
    clients: int | None = None  # how many take part; None: as many as in the round's cohort
    plain_bytes: int | None = None  # if a channel compresses the reply: its bytes before that
    secure: int = 0  # the fewest replies of a secure sum, in which the server sees none of them; 0: it is not one


@dataclass
class Entry:
    """The cost of one exchange of the plan in a round, for each client that took part."""

    count: int = 0
    up: int = 0
    down: int = 0
    missing: int = 0

    def add(self, other: "Entry", times: int = 1) -> None:
        """Add a multiple of another entry."""
        self.count += times * other.count
        self.up += times * other.up
        self.down += times * other.down


Entries = dict[Exchange, Entry]


def add_entries(entries: Entries, more: Entries, times: int = 1) -> None:
    """Add a multiple of other entries."""
    for exchange, entry in more.items():
        entries.setdefault(exchange, Entry()).add(entry, times)


class Amounts(NamedTuple):
    """The cost of a round."""

    exchanges: Entries
    work: list[int]  # the sums over all clients, in the order of WORK, and `samples_busiest`
    missing: int = 0  # replies that did not arrive
    seconds: float | None = None  # with a clock
    staleness: float | None = None  # in an asynchronous round: the mean over the replies


@dataclass
class Ledger:
    """The cost of a run so far."""

    rounds: int = 0
    counts: dict[str, Any] = field(default_factory=lambda: dict.fromkeys(COUNTED, 0))
    last: list[dict[str, Any]] = field(default_factory=list)  # the last round's exchanges

    def add(self, costs: Sequence[Amounts], cohort: int) -> None:
        """Add rounds with cohorts of this size."""
        for cost in costs:
            for exchange, entry in cost.exchanges.items():
                clients = _clients_in(exchange, cohort)
                self.counts["exchanges"] += entry.count
                self.counts["bytes_up"] += clients * entry.up
                self.counts["bytes_down"] += clients * entry.down
            for name, amount in zip((*WORK, "samples_busiest"), cost.work, strict=True):
                self.counts[name] += amount
            self.counts["missing"] += cost.missing
            if cost.seconds is not None:
                self.counts["clock"] = self.counts.get("clock", 0.0) + cost.seconds
            if cost.staleness is not None:
                self.counts["staleness"] = cost.staleness
            self.rounds += 1
        if costs:
            self.last = [
                {
                    "name": exchange.name,
                    "kind": exchange.kind,
                    "shape": exchange.shape,
                    "count": entry.count,
                    "bytes_up": _clients_in(exchange, cohort) * entry.up,
                    "bytes_down": _clients_in(exchange, cohort) * entry.down,
                }
                for exchange, entry in costs[-1].exchanges.items()
                if entry.count or entry.down or exchange.kind in ("center", "finish")
            ]


def _clients_in(exchange: Exchange, cohort: int) -> int:
    """The clients in an exchange: the cohort, all of them, or the one that holds the centre's data."""
    return 1 if exchange.kind == "center" else exchange.clients or cohort


def shape_of(avals: Sequence[Any]) -> str:
    """The shapes of one client's reply, as the list of exchanges shows them: `(200, 10) + (10)`."""
    shapes = ["(" + ", ".join(map(str, aval.shape)) + ")" for aval in avals]
    return " + ".join(shapes) if len(shapes) <= 4 else f"{' + '.join(shapes[:3])} + {len(shapes) - 3} more"


def nbytes(avals: Sequence[Any]) -> int:
    """The bytes of arrays of these shapes and types in a message. A random key has 8."""
    itemsize = lambda aval: 8 if is_key(aval) else jnp.dtype(aval.dtype).itemsize
    return sum(itemsize(aval) * int(np.prod(aval.shape, dtype=object)) for aval in avals)
