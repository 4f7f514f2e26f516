"""The simulation: a cohort is vectorised, a mean is a reduction, and a run of rounds is one compiled program."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, PyTree

from rookery import tree
from rookery.clients import Clients, Count, sample_cohort
from rookery.fed import WORK, Algorithm, Client, Exchange, NonFiniteError, check_finite, describe
from rookery.hyperparameters import Split, at_round, join
from rookery.problems import Problem


@jax.tree_util.register_pytree_node_class
@dataclass(frozen=True)
class Stacked:
    """A per-client value: one row for each client of the cohort. Algorithms hand it on and never look inside."""

    rows: PyTree[Array]

    def tree_flatten(self) -> tuple[tuple[Any], None]:
        """Its arrays, so that it can be carried through a loop."""
        return (self.rows,), None

    @classmethod
    def tree_unflatten(cls, _: None, children: tuple[Any]) -> "Stacked":
        """The inverse of tree_flatten."""
        return cls(*children)


class Amounts(NamedTuple):
    """What a round has cost so far; bytes are those of one client."""

    exchanges: dict[Exchange, dict[str, Count]]  # for each: how often, bytes up, bytes down
    known: Count  # bytes of the state and of all results so far: what a newcomer has to be sent
    work: Int[Array, " 4"]  # the sums over all clients, in the order of WORK
    busiest: Count  # samples, map by map those of the client with the most


_NO_WORK = np.zeros(len(WORK), np.int32)


class Ledger:
    """Collects Amounts while a round is traced; cohorts of one round share it."""

    def __init__(self, state_bytes: int) -> None:
        self.amounts = Amounts({}, state_bytes, jnp.asarray(_NO_WORK), jnp.int32(0))

    def named(self, *description: Any) -> Exchange:
        """The exchange of this description: one of before if there is one, else the next."""
        for exchange in self.amounts.exchanges:
            if exchange[1:] == description:
                return exchange
        return Exchange(len(self.amounts.exchanges), *description)

    def exchanged(self, exchange: Exchange, has: Count) -> None:
        """An exchange by a cohort that has been sent `has` bytes before."""
        self._add(exchange, {"count": 1, "up": exchange.reply_bytes, "down": self.amounts.known - has})

    def asked(self, exchange: Exchange, has: Count) -> None:
        """The one client that holds the centre's data was, and has been sent `has` bytes before; or the server was."""
        alone = {"count": 1, "up": exchange.reply_bytes, "down": self.amounts.known - has}
        self._add(exchange, alone if exchange.reply_bytes else {"count": 0, "up": 0, "down": 0})

    def _add(self, exchange: Exchange, now: dict[str, Count]) -> None:
        before = self.amounts.exchanges.get(exchange, {"count": 0, "up": 0, "down": 0})
        self.amounts.exchanges[exchange] = {name: before[name] + now[name] for name in now}

    def add(self, more: Amounts) -> None:
        """Add what a loop has cost, except for `known`, which it has kept up itself."""
        for exchange, entry in sorted(more.exchanges.items()):
            self._add(self.named(*exchange[1:]), entry)
        work, busiest = self.amounts.work + more.work, self.amounts.busiest + more.busiest
        self.amounts = self.amounts._replace(work=work, busiest=busiest)

    def returned(self, exchange: Exchange) -> None:
        """The exchange's result is there, to be sent out with the next broadcast."""
        self.amounts = self.amounts._replace(known=self.amounts.known + exchange.result_bytes)

    def worked(self, work: Int[Array, "cohort 4"]) -> None:
        """The cohort has done this much."""
        done = self.amounts.work + jnp.sum(work, axis=0, dtype=jnp.int32)
        self.amounts = self.amounts._replace(work=done, busiest=self.amounts.busiest + jnp.max(work[:, 0] + work[:, 1]))


class SimulatedFed:
    """`Fed` for a cohort held in this process."""

    def __init__(
        self,
        problem: Problem,
        clients: Clients,
        ids: Int[Array, " cohort"],
        ledger: Ledger,
        memory: PyTree[Array],
        block: int,
        debug: bool,
        repeats: bool = False,
    ) -> None:
        self.problem, self.clients, self.ids, self.ledger, self.memory = problem, clients, ids, ledger, memory
        self.n, self.cohort_size = clients.n, int(ids.shape[0])
        self.block, self.debug = block, debug
        self.repeats = repeats  # whether a client may be in the cohort twice
        self.has: Count = 0  # bytes this cohort has been sent
        self.touched = False  # whether its memory was used

    def map(self, fn: Callable[..., Any], key: Array, *values: Stacked | None) -> Stacked:
        """See `Fed.map`."""

        def on_client(identity: Count, own: tuple[Any, ...]) -> tuple[Any, Array]:
            client = Client(self.problem, self.clients, identity, identity, self.debug)
            value = fn(client, jax.random.fold_in(key, identity), *(v and v.rows for v in own))
            return value, client.work

        if self.debug:
            value, work = self._one_by_one(on_client, values, fn)
        elif self.cohort_size <= self.block:
            value, work = jax.vmap(on_client)(self.ids, values)
        else:
            value, work = jax.lax.map(lambda xs: on_client(*xs), (self.ids, values), batch_size=self.block)
        if self.repeats:
            work = jnp.where(jnp.diff(self.ids, prepend=-1)[:, None] > 0, work, 0)
        self.ledger.worked(work)
        return Stacked(value)

    def _one_by_one(self, on_client: Callable[..., Any], values: tuple[Any, ...], fn: Callable[..., Any]) -> Any:
        replies = []
        for place, identity in enumerate(self.ids):
            try:
                reply = on_client(identity, jax.tree.map(lambda a: a[place], values))
                check_finite(reply[0], "its result")
            except NonFiniteError as error:
                code = fn.__code__
                place_in_code = f"{code.co_filename.rsplit('/', 1)[-1]}:{code.co_firstlineno}"
                raise NonFiniteError(f"client {int(identity)}, in the map at {place_in_code}, {error}") from None
            replies.append(reply)
        return jax.tree.map(lambda *leaves: jnp.stack(leaves), *replies)

    def map_state(self, fn: Callable[..., Any], key: Array, *values: Stacked | None) -> Stacked:
        """See `Fed.map_state`."""
        self.touched = True
        both = self.map(fn, key, Stacked(self.memory), *values)
        value, self.memory = both.rows
        return Stacked(value)

    def mean(self, value: Stacked, name: str = "mean", weights: Array | None = None) -> Any:
        """See `Fed.mean`."""
        p = (self.clients.weights if weights is None else weights)[self.ids]
        return self._reduce(value, name, "mean", lambda v: _weighted(p / jnp.sum(p), v))

    def sum(self, value: Stacked, name: str = "sum") -> Any:
        """See `Fed.sum`."""
        p = self.clients.weights[self.ids] * (self.n / self.cohort_size)
        return self._reduce(value, name, "sum", lambda v: _weighted(p, v))

    def gather(self, value: Stacked, name: str = "gather") -> Any:
        """See `Fed.gather`."""
        return self._reduce(value, name, "gather", lambda v: v)

    def center(self, fn: Callable[..., Any], key: Array, name: str = "center") -> Any:
        """See `Fed.center`."""
        client = Client(self.problem, self.clients, None, self.n, self.debug)
        value = jax.tree.map(jnp.asarray, fn(client, jax.random.fold_in(key, self.n)))
        if self.debug:
            check_finite(value, f"the centre, {name!r}")
        self.ledger.worked(client.work[None])
        size, holder = tree.nbytes(value), self.clients.center_client
        exchange = self.ledger.named(name, "center", describe(value), 0 if holder is None else size, size)
        self.ledger.asked(exchange, 0 if holder is None else jnp.where(jnp.any(self.ids == holder), self.has, 0))
        self.ledger.returned(exchange)
        return value

    def scatter(self, rows: Any) -> Stacked:
        """See `Fed.scatter`."""
        return Stacked(rows)

    def _reduce(self, value: Stacked, name: str, kind: Any, reduction: Callable[[Array], Array]) -> Any:
        result = jax.tree.map(reduction, value.rows)
        if self.debug:
            check_finite(result, f"the server, exchange {name!r}")
        one = jax.tree.map(lambda v: jax.ShapeDtypeStruct(v.shape[1:], v.dtype), value.rows)
        exchange = self.ledger.named(name, kind, describe(one), tree.nbytes(one), tree.nbytes(result))
        self.ledger.exchanged(exchange, self.has)
        self.has = self.ledger.amounts.known
        self.ledger.returned(exchange)
        return result

    def loop(self, n: Count, body: Callable[[Any, Any], Any], carry: Any) -> Any:
        """See `Fed.loop`."""
        if self.debug or (isinstance(n, int) and n <= 1):
            for i in range(int(n)):
                carry = body(i, carry)
            return carry
        ledger, before = self.ledger, self.ledger.amounts

        @jax.jit  # so that looking at its shapes and looping over it trace it once
        def step(i: Any, carry: Any, known: Count, has: Count, memory: Any) -> tuple[Any, Amounts, Count, Any]:
            ledger.amounts, self.has, self.memory = Amounts({}, known, jnp.asarray(_NO_WORK), jnp.int32(0)), has, memory
            carry = body(i, carry)
            return carry, _as_arrays(ledger.amounts), _as_arrays(self.has), self.memory

        def add(i: Any, state: tuple[Any, Amounts, Count, Any]) -> tuple[Any, Amounts, Count, Any]:
            carry, total, has, memory = state
            carry, now, has, memory = step(i, carry, total.known, has, memory)
            return carry, tree.add(total, now)._replace(known=now.known), has, memory

        first = jnp.int32(0), carry, _as_arrays(before.known), _as_arrays(self.has), self.memory
        nothing = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), jax.eval_shape(step, *first)[1])
        start = carry, nothing._replace(known=first[2]), *first[3:]
        times = np.int32(n) if isinstance(n, int) else n.astype(jnp.int32)
        carry, now, self.has, self.memory = jax.lax.fori_loop(np.int32(0), times, add, start)
        ledger.amounts = before._replace(known=now.known)
        ledger.add(now)
        return carry

    def resample(self, key: Array, chances: Array | None = None) -> "SimulatedFed":
        """See `Fed.resample`."""
        ids = sample_cohort(key, self.n, self.cohort_size, chances)
        own = (self.ledger, None, self.block, self.debug, chances is not None)
        return SimulatedFed(self.problem, self.clients, ids, *own)


_as_arrays = partial(jax.tree.map, partial(jnp.asarray, dtype=jnp.int32))


def _weighted(p: Float[Array, " cohort"], v: Array) -> Array:
    return jnp.tensordot(p.astype(v.dtype), v, axes=1)


class Carry(NamedTuple):
    """What goes from round to round: the algorithm's state, and what each client remembers."""

    state: Any
    memory: PyTree[Array]  # one row for each client of the federation, or None


@dataclass(frozen=True)
class Simulation:
    """The default engine: everything in this process, vectorised and compiled.

    Arguments:
        block: clients computed side by side; a larger cohort goes in blocks of this size, to bound memory.
        debug: run one client at a time, not compiled, and name the client and the step where the first value that is
            not finite appears.
    """

    block: int = 128
    debug: bool = False

    def start(
        self, problem: Problem, clients: Clients, split: Split, x: Any, y: Any, seed: int
    ) -> tuple[Carry, Amounts]:
        """The state before the first round, and what it has cost to make."""
        arguments = (clients, split.traced, x, y, jax.random.key(seed))
        if self.debug:
            with jax.disable_jit():
                return _start(self, problem, split.fixed, *arguments)
        return _start_compiled(self, problem, split.fixed, *arguments)

    def advance(
        self, problem: Problem, clients: Clients, split: Split, cohort: int, carry: Carry, start: int, rounds: int,
        limit: int, seed: int,
    ) -> tuple[Carry, list[Amounts]]:  # fmt: skip
        """`rounds` (at most `limit`) more rounds from round `start`, in one call; carry's buffers are given up."""
        arguments = (clients, split.traced, carry, start, rounds, jax.random.key(seed))
        if self.debug:
            with jax.disable_jit():
                carry, costs = _advance_one_by_one(self, problem, split.fixed, cohort, *arguments)
        else:
            carry, stacked = _advance_compiled(self, problem, split.fixed, cohort, limit, *arguments)
            stacked = jax.device_get(stacked)
            costs = [jax.tree.map(lambda a: a[t], stacked) for t in range(rounds)]
        return carry, costs


def _start(
    engine: Simulation, problem: Problem, fixed: Algorithm, clients: Clients, traced: Any, x: Any, y: Any, key: Array
) -> tuple[Carry, Amounts]:
    algorithm = at_round(join(fixed, traced), 0)
    remembered = algorithm.memory(x, y) if hasattr(algorithm, "memory") else None
    memory = jax.tree.map(lambda a: jnp.broadcast_to(a, (clients.n, *jnp.shape(a))), remembered)
    ledger = Ledger(tree.nbytes((x, y)))
    fed = SimulatedFed(problem, clients, jnp.arange(clients.n), ledger, memory, engine.block, engine.debug)
    state = algorithm.init(fed, x, y, jax.random.fold_in(key, 0))
    _finish(fed)
    return Carry(state, fed.memory), ledger.amounts


def _finish(fed: SimulatedFed) -> None:
    """What the clients remember may depend on the last result: if they used their memory, they are sent it."""
    if fed.touched:
        last = fed.ledger.named("finish", "finish", "", 0, 0)
        fed.ledger.amounts.exchanges[last] = {"count": 0, "up": 0, "down": fed.ledger.amounts.known - fed.has}


def _round(
    engine: Simulation, problem: Problem, fixed: Algorithm, cohort: int, clients: Clients, traced: Any, carry: Carry,
    t: Count, key: Array,
) -> tuple[Carry, Amounts]:  # fmt: skip
    """Round t, counted from 0."""
    algorithm = at_round(join(fixed, traced), t)
    choice, noise = jax.random.split(jax.random.fold_in(key, t + 1))
    ids = sample_cohort(choice, clients.n, cohort)
    everyone = cohort == clients.n
    own = carry.memory if everyone else jax.tree.map(lambda a: a[ids], carry.memory)
    ledger = Ledger(tree.nbytes(carry.state))
    fed = SimulatedFed(problem, clients, ids, ledger, own, engine.block, engine.debug)
    state = algorithm.round(fed, carry.state, noise)
    _finish(fed)
    memory = fed.memory if everyone else jax.tree.map(lambda a, b: a.at[ids].set(b), carry.memory, fed.memory)
    return Carry(state, memory), ledger.amounts


def _advance(
    engine: Simulation, problem: Problem, fixed: Algorithm, cohort: int, limit: int, clients: Clients, traced: Any,
    carry: Carry, start: Count, rounds: Count, key: Array,
) -> tuple[Carry, Amounts]:  # fmt: skip
    one = jax.jit(partial(_round, engine, problem, fixed, cohort, clients, traced))
    start = jnp.asarray(start, jnp.int32)
    shapes = jax.eval_shape(one, carry, start, key)[1]
    leaves, structure = jax.tree.flatten(shapes)
    costs = jnp.zeros((limit, sum(leaf.size for leaf in leaves)), jnp.int32)  # one row for each round, as numbers

    def body(i: Array, both: tuple[Carry, Array]) -> tuple[Carry, Array]:
        carry, costs = both
        carry, cost = one(carry, start + i, key)
        row = jnp.concatenate([jnp.asarray(leaf, jnp.int32).ravel() for leaf in jax.tree.leaves(cost)])
        return carry, costs.at[i].set(row)

    carry, costs = jax.lax.fori_loop(jnp.int32(0), jnp.asarray(rounds, jnp.int32), body, (carry, costs))
    columns = jnp.split(costs, np.cumsum([leaf.size for leaf in leaves])[:-1].tolist(), axis=1)
    each = [column.reshape(limit, *leaf.shape) for column, leaf in zip(columns, leaves, strict=True)]
    return carry, jax.tree.unflatten(structure, each)


def _advance_one_by_one(
    engine: Simulation, problem: Problem, fixed: Algorithm, cohort: int, clients: Clients, traced: Any, carry: Carry,
    start: int, rounds: int, key: Array,
) -> tuple[Carry, list[Amounts]]:  # fmt: skip
    costs = []
    for t in range(start, start + rounds):
        try:
            carry, cost = _round(engine, problem, fixed, cohort, clients, traced, carry, t, key)
            check_finite(carry.state, "the server, the state after the round")
        except NonFiniteError as error:
            raise NonFiniteError(f"round {t + 1}, {error}") from None
        costs.append(jax.device_get(cost))
    return carry, costs


_start_compiled = jax.jit(_start, static_argnums=(0, 1, 2))
_advance_compiled = jax.jit(_advance, static_argnums=(0, 1, 2, 3, 4), donate_argnums=(7,))
