"""The simulated clock: how long each client takes for its work and its messages."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from rookery.base.arguments import check_seed
from rookery.language.ledger import WORK

_GRADIENTS, _PRODUCTS = WORK.index("gradients"), WORK.index("products")
_OWN = object()  # stands for what only a client has
PRODUCT = 2  # gradients that take as long as one product with a Hessian or a Jacobian


@dataclass(frozen=True, eq=False)
class Clock:
    """The speeds of clients, for simulated seconds: `rk.solve(..., clock=rk.Clock(compute=50.0, uplink=1e6))`.

    In an exchange, a client is busy for `latency` + bytes down / `downlink` + work / `compute` + bytes up / `uplink`,
    and the server waits for the slowest client that replies. Work and bytes are counted as in the ledger. A gradient
    counts as one unit of work, for minibatches of any size, and a product with a Hessian or a Jacobian as two. A round
    also includes the work of clients after its last exchange. In a loop of exchanges, clients begin each turn together.
    The server's own work takes no time. The column `clock` of the history has the seconds so far.

    Each speed is a number, an array with a number for each client, an array with such a row for each round (after the
    last row it begins again), or a distribution such as `scipy.stats.lognorm(1.0)`, from which each client draws one
    number.

    Arguments:
        compute: gradients per second.
        uplink: bytes per second from a client to the server.
        downlink: bytes per second from the server to a client.
        latency: additional seconds of every exchange.
        seed: the seed of the draws from distributions.

    Example:
        >>> import numpy as np, rookery as rk
        >>> problem = rk.SingleLevel(lambda x, b: ((x - b) ** 2).mean())
        >>> clients = rk.Clients(upper=[np.ones(3), np.zeros(3)])
        >>> clock = rk.Clock(compute=[10.0, 1.0], latency=0.5)
        >>> run = rk.solve(problem, clients, rk.FedAvg(step=0.1, local_steps=3), 0.0, rounds=2, clock=clock)
        >>> run.history["clock"].tolist()
        [0.0, 3.5, 7.0]
    """

    compute: Any = np.inf
    uplink: Any = np.inf
    downlink: Any = np.inf
    latency: Any = 0.0
    seed: int = 0

    def __post_init__(self) -> None:
        check_seed(self.seed, "Clock: seed")
        for name in ("compute", "uplink", "downlink", "latency"):
            value = getattr(self, name)
            if not hasattr(value, "rvs"):
                _checked(name, value)

    def at(self, clients: Any) -> "Timing":
        """Return the clock of these clients; raise ValueError if it has speeds for another number of clients."""
        n, drawn = clients.n, np.random.default_rng(self.seed)
        rates = {}
        for name in ("compute", "uplink", "downlink", "latency"):
            value = getattr(self, name)
            values = _checked(name, value.rvs(size=n, random_state=drawn) if hasattr(value, "rvs") else value)
            if values.ndim and values.shape[-1] != n:
                raise ValueError(
                    f"Clock: {name} must have a number for each of the {n} clients; got {values.shape[-1]} numbers."
                )
            rates[name] = np.broadcast_to(values, (*values.shape[:-1], n)) if values.ndim < 2 else values
            rates[name] = np.atleast_2d(rates[name]).astype(np.float32)
        own = lambda data: data.member(jax.tree.map(lambda _: _OWN, data.rows), _OWN, data.sizes)
        leaves = jax.tree.leaves(clients.map_levels(own, _OWN))
        return Timing(Rates(**rates), tuple(None if leaf is _OWN else np.asarray(leaf) for leaf in leaves))


def _checked(name: str, value: Any) -> np.ndarray:
    """Return numbers as an array; raise ValueError unless all are positive, or for the latency at least 0."""
    values = np.asarray(value)
    if not np.issubdtype(values.dtype, np.number) or np.iscomplexobj(values) or values.ndim > 2 or not values.size:
        raise ValueError(
            f"Clock: {name} must be a number, an array with one for each client (and a row for each round), or a "
            f"distribution with `rvs`; got {value!r}."
        )
    values = values.astype(float)
    least = "at least 0" if name == "latency" else "positive"
    wrong = ~(values >= 0) if name == "latency" else ~(values > 0)
    if wrong.any():
        raise ValueError(f"Clock: {name} must be {least}; got {values[wrong].flat[0]:g}.")
    return values


class Rates(NamedTuple):
    """The speeds of all clients, with a row for each round."""

    compute: Any
    uplink: Any
    downlink: Any
    latency: Any


class Timing(NamedTuple):
    """What a plan needs to know for its clock."""

    rates: Rates
    sizes: tuple[Any, ...]  # for each leaf of the clients' data: numbers of samples, None for other leaves
    down: tuple[Mapping[Any, np.ndarray], ...] | None = None  # of the start and of a round: see `costs.bytes_down`


class Watch:
    """The clock of one round while it is traced.

    Attributes:
        sizes: see `Timing`.
        complete: whether the bytes that clients are sent are known.
        turns: for each loop around the current step, whether its turn is not the first.
        exchanges: how many exchanges have been traced so far.
    """

    def __init__(self, timing: Timing, t: Any, plan: int) -> None:
        self.sizes, self._table = timing.sizes, {} if timing.down is None else timing.down[plan]
        self.complete, self._trace = timing.down is not None, timing.rates
        self._rates = Rates(*(jnp.asarray(a)[0 if len(a) == 1 else t % len(a)] for a in timing.rates))
        self._busy: dict[Any, tuple[Array, Array]] = {}  # by cohort: its clients and their work since the last exchange
        self._known: dict[Any, Any] = {}  # by cohort: the work of all clients, None if it depends on draws
        self.turns: list[Array] = []
        self.exchanges = 0

    def work(self, cohort: Any, ids: Array, counts: Array, known: np.ndarray | None = None) -> None:
        """Add the counts of a client's function to what each client of a cohort has to do.

        `known`: the counts of all clients, if they do not depend on draws.
        """
        self._busy[cohort] = ids, self._of(cohort, ids) + _done(counts)
        before = self._known.get(cohort, np.float32(0))
        self._known[cohort] = None if known is None or before is None else before + _done(known)

    def times(self, cohort: Any, up: int) -> np.ndarray | None:
        """Return the seconds until each client's reply would arrive; None if they depend on draws of the run.

        The first axis is for the rounds of the speeds, the last one for all clients of the federation, and between them
        is an axis for each loop around the exchange.
        """
        busy = self._known.get(cohort, np.float32(0))
        if busy is None:
            return None
        down = np.asarray(self._table.get(self.exchanges, 0), np.float32)[None, ..., None]
        rounds = np.arange(math.lcm(*map(len, self._trace)))
        by_turn = (len(rounds), *(1,) * len(self.turns), -1)
        rate = Rates(*(np.asarray(a)[rounds % len(a)].reshape(by_turn) for a in self._trace))
        return rate.latency + down / rate.downlink + busy / rate.compute + np.float32(up) / rate.uplink

    def of_turn(self, by_turn: np.ndarray) -> Array:
        """Return the entry of this turn in an array with an axis for each loop around the exchange."""
        return jnp.asarray(by_turn, jnp.float32)[tuple(turn.astype(jnp.int32) for turn in self.turns)]

    def exchange(self, cohort: Any, ids: Array, up: int) -> Array:
        """Return the seconds until the reply of each client of a cohort arrives."""
        busy, down = self._of(cohort, ids), self._down(self.exchanges)
        self._busy.pop(cohort, None)
        self._known.pop(cohort, None)
        self.exchanges += 1
        rate = Rates(*(a[ids] for a in self._rates))
        return rate.latency + down / rate.downlink + busy / rate.compute + np.float32(up) / rate.uplink

    def settle(self, last: Array | None = None) -> Array:
        """Return how long clients are busy with work that no exchange follows.

        `last`: the round's cohort, which gets the last messages; None before the end of the round.
        """
        seconds = [jnp.max(busy / self._rates.compute[ids]) for ids, busy in self._busy.values()]
        if last is not None:
            rate = Rates(*(a[last] for a in self._rates))
            seconds.append(jnp.max(self._down("finish") / rate.downlink + self._of(0, last) / rate.compute))
        self._busy, self._known = {}, {}
        return jnp.max(jnp.stack(seconds)) if seconds else jnp.zeros((), jnp.float32)

    def _of(self, cohort: Any, ids: Array) -> Array:
        return self._busy[cohort][1] if cohort in self._busy else jnp.zeros(len(ids), jnp.float32)

    def _down(self, exchange: Any) -> Array:
        """The bytes that a client is sent before an exchange."""
        return self.of_turn(self._table.get(exchange, np.zeros((2,) * len(self.turns))))


def _done(counts: Any) -> Any:
    """The work in counts of gradients and products, a row for each client."""
    return counts[:, 0, _GRADIENTS].astype(jnp.float32) + PRODUCT * counts[:, 0, _PRODUCTS].astype(jnp.float32)
