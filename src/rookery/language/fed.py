"""What an algorithm is written in: the primitives, which build the plan of a round while it is traced."""

from collections import OrderedDict
from collections.abc import Callable
from copy import copy
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple, Protocol, TypeVar, cast

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, PyTree

from rookery.base import convolutions, jaxprs
from rookery.base.arguments import kind_of
from rookery.base.compat import Primitive, ShapedArray
from rookery.data.clients import Clients, sample_cohort
from rookery.data.source import Count
from rookery.language import channel as channels
from rookery.language import ledger
from rookery.language.channel import Bookkeeping, Faults
from rookery.language.client import Client, Data, Epochs
from rookery.language.hyperparameters import (
    Amount,
    AtLeastOne,
    BatchSize,
    Bounds,
    Decay,
    Optimizer,
    Positive,
    Schedule,
    Share,
    Step,
    Steps,
)  # fmt: skip
from rookery.problems.problems import Problem

__all__ = [
    "Algorithm", "Amount", "AtLeastOne", "BatchSize", "Bookkeeping", "Bounds", "Client", "Data", "Decay", "Epochs",
    "Fed", "NonFiniteError", "Optimizer", "PerClient", "Positive", "Schedule", "Share", "Step", "Steps",
]  # fmt: skip

C = TypeVar("C")


class NonFiniteError(FloatingPointError):
    """A value became infinite or not a number; the message says where."""


# The plan's own primitives: engines give them their meaning. A per-client value has a leading client axis in the plan.

client_map = Primitive("client_map")  # ids, what the client is sent, its key, its own values -> its new values
scatter = Primitive("scatter")  # ids, rows at the server -> a value for each client
reduce = Primitive("reduce")  # ids, weights, who is present, per-client values -> weighted sums, who replied
gather = Primitive("gather")  # ids, who is present, per-client values -> the rows at the server, who replied
center = Primitive("center")  # what the centre is sent, its key -> values at the server
loop = Primitive("loop")  # n, what the body closes over, carry -> carry
PRIMITIVES = (client_map, scatter, reduce, gather, center, loop)
for _primitive in PRIMITIVES:
    _primitive.multiple_results = True


class Inputs(NamedTuple):
    """What a client's function takes, in this order: the numbers of its inputs of each kind."""

    sent: int  # values it closes over, of the server's
    data: tuple[int, ...]  # which leaves of the client's data
    identity: bool  # the client's number
    key: bool
    own: int  # per-client values of earlier maps


def _aval(shape: tuple[int, ...], dtype: Any) -> Any:
    return ShapedArray(shape, dtype)


def accumulator(dtype: Any) -> Any:
    """The type in which values of this type are added up: float32 or better."""
    return jnp.promote_types(dtype, jnp.float32)


client_map.def_abstract_eval(
    lambda ids, *_, work, **__: [_aval((*ids.shape, *v.aval.shape), v.aval.dtype) for v in work.outvars[:-1]]
)
scatter.def_abstract_eval(lambda ids, rows: [_aval(rows.shape, rows.dtype)])


@reduce.def_abstract_eval
def _(ids: Any, weights: Any, *rows: Any, lossy: bool, **_: Any) -> list[Any]:
    sums = [_aval(v.shape[1:], accumulator(v.dtype)) for v in rows[lossy:]]
    return sums + [_aval(weights.shape, jnp.bool_)] * lossy


@gather.def_abstract_eval
def _(ids: Any, *rows: Any, lossy: bool, **_: Any) -> list[Any]:
    return [_aval(v.shape, v.dtype) for v in (*rows[lossy:], *rows[:lossy])]


center.def_abstract_eval(lambda *_, work, **__: [_aval(v.aval.shape, v.aval.dtype) for v in work.outvars[:-1]])
loop.def_abstract_eval(lambda *_, body, **__: [_aval(v.aval.shape, v.aval.dtype) for v in body.outvars])


@jax.tree_util.register_pytree_node_class
@dataclass(frozen=True)
class PerClient:
    """A value that every client of the cohort has and nobody else sees: what `fed.map` gives."""

    rows: PyTree[Array]
    cohort: int = 0  # whose value it is: 0 for the round's own cohort

    def tree_flatten(self) -> tuple[tuple[Any], int]:
        """Its arrays, so that it can be carried through a loop."""
        return (self.rows,), self.cohort

    @classmethod
    def tree_unflatten(cls, cohort: int, children: tuple[Any]) -> "PerClient":
        """The inverse of tree_flatten."""
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
    """Who replied to an exchange."""

    weight: Any  # Σ p_i over them
    replies: Any  # how many they are


class Threaded(NamedTuple):
    """What changes in the course of a round beside the algorithm's own values, and is carried through its loops."""

    memory: Any = None  # the cohort's own
    client: Any = ()  # what a channel's client side remembers, by exchange
    server: Any = ()  # what its server side does
    missing: Any = None  # how many replies did not arrive
    least: Any = None  # the replies to the exchange that had the fewest
    stayed: Any = None  # who has missed no exchange of the round


class Keys(NamedTuple):
    """What is random in an exchange beside the method itself."""

    chance: Array  # which replies get lost: derived from the seed
    public: Array  # for a channel's client side: derived from the seed
    noise: Any = None  # for a channel's server side, where there is one: from the server's own entropy

    def at(self, i: Any) -> "Keys":
        """The keys of the i-th of several."""
        chance, public = (jax.random.fold_in(key, i) for key in (self.chance, self.public))
        return Keys(chance, public, None if self.noise is None else jax.random.fold_in(self.noise, i))


class Book:
    """What the cohorts of one round share while it is traced."""

    def __init__(
        self, channel: Any = None, faults: Faults | None = None, keys: "Keys | None" = None,
        threaded: Threaded | None = None, debug: bool = False, products: bool = False,
    ) -> None:  # fmt: skip
        self.debug, self.products = debug, products  # see plan.Setting
        self.channel, self.faults, self.threaded = channel, faults, threaded or Threaded()
        self.exchanges: dict[str, channels.Exchange] = {}  # those met so far, by name
        self.sample_by_sample: set[str] = set()  # the losses that are evaluated so
        self._keys, self._drawn = keys, 0
        self.cohorts = 0  # fresh ones so far

    def next_keys(self) -> "Keys | None":
        """The keys of the next exchange; None where nothing is random in it."""
        self._drawn += 1
        if self._keys is None:
            return None
        return self._keys.at(self._drawn)

    def enter(self, i: Any, threaded: Threaded) -> tuple[Any, ...]:
        """Enter a loop's body, where the keys depend on the turn. Gives what `leave` needs."""
        before = self._keys, self.threaded
        keys = self.next_keys()
        self._keys = None if keys is None else keys.at(i)
        self.threaded = threaded
        return before

    def leave(self, before: tuple[Any, ...]) -> Threaded:
        """Leave it again: what is threaded at the end of the body."""
        after = self.threaded
        self._keys, self.threaded = before
        return after


class Fed:
    """The primitives, as an algorithm's `init` and `round` are given them.

    Attributes:
        problem: one of those that the algorithm says it solves.
        n: clients in the federation.
        cohort_size: P, clients in this round.
    """

    def __init__(
        self, problem: Problem, clients: Clients, weights: Float[Array, " n"], ids: Int[Array, " cohort"], book: Book,
    ) -> None:  # fmt: skip
        self.problem: Any = problem
        self.n, self.cohort_size = clients.n, int(ids.shape[0])
        self._clients, self._weights, self._book = clients, weights, book
        self._ids = jnp.asarray(ids, jnp.int32)
        self._cohort = 0  # the round's, which has memory; fresh ones have other numbers
        self._repeats = False  # whether a client may be in the cohort twice

    def map(self, fn: Callable[..., Any], key: Array, *values: PerClient | None) -> PerClient:
        """fn(client, key, *values) on every client of the cohort; `values` are the client's own of earlier maps.

        What fn closes over is what a client is sent.
        """
        for value in values:
            self._check_own(value, "map")
        given, structure = jax.tree.flatten(values)
        rows = [jax.ShapeDtypeStruct(v.shape[1:], v.dtype) for v in given]

        def on_client(data: Clients, identity: Any, key: Array, own: list[Any]) -> Any:
            client = Client(self.problem, data, 0, identity, self._book.debug, self._book.products)
            value = fn(client, key, *(v and v.rows for v in jax.tree.unflatten(structure, own)))
            self._book.sample_by_sample |= client.sample_by_sample
            return jax.tree.map(jaxprs.strong, value), client.counts

        traced, (shapes, _) = jaxprs.trace(on_client, self._clients.members(None), _INTEGER, _key_like(key), rows)
        work, sent, inputs = self._work(traced, len(rows))
        own = [v for v, used in zip(given, inputs.pop("own"), strict=True) if used]
        kept = Inputs(**inputs, own=len(own))
        out = self._bind(
            client_map, self._ids, *sent, *([key] if kept.key else []), *own,
            work=work, inputs=kept, source=_source(fn), repeats=self._repeats,
        )  # fmt: skip
        return PerClient(jax.tree.unflatten(jax.tree.structure(shapes), out), self._cohort)

    def map_state(self, fn: Callable[..., Any], key: Array, *values: PerClient | None) -> PerClient:
        """The same, for fn(client, key, memory, *values) -> (value, memory), where memory stays with the client."""
        if self._cohort:
            raise ValueError(
                "map_state on a cohort of `resample`: what its clients write would be lost. Use map there, or "
                "map_state on the round's own cohort."
            )
        both = self.map(fn, key, PerClient(self._book.threaded.memory, self._cohort), *values)
        if not isinstance(both.rows, tuple) or len(both.rows) != 2:
            raise TypeError("map_state's function must return two things: (value, memory).")
        value, memory = both.rows
        self._book.threaded = self._book.threaded._replace(memory=memory)
        return PerClient(value, self._cohort)

    def mean(
        self, value: PerClient, name: str = "mean", weights: Array | None = None, around: Any = None,
        heard: bool = False, bookkeeping: Any = None,
    ) -> Any:  # fmt: skip
        """One exchange: Σ p_i v_i / Σ p_i over the clients of the cohort that reply.

        Arguments:
            value: what each client sends.
            name: for the ledger, and for channels that are chosen by name.
            weights: one for each client of the federation, in the place of p.
            around: where the value is an iterate, the public value that it started from: a tree like the value, or its
                beginnings, with None where there is none. Channels see the difference.
            heard: whether to return who replied, a `Heard`, too.
            bookkeeping: which parts of the value are not updates: a tree like the value, or its beginnings, with a
                `Bookkeeping` there and None elsewhere. Channels act on the other parts alone.
        """
        weights = self._weights if weights is None else weights
        return self._reduced("mean", value, name, weights, around, heard, bookkeeping)

    def sum(self, value: PerClient, name: str = "sum", bookkeeping: Any = None) -> Any:
        """One exchange: Σ (n/P) p_i v_i over the P clients that reply, unbiased for the sum over all clients."""
        return self._reduced("sum", value, name, self._weights, None, False, bookkeeping)

    def gather(self, value: PerClient, name: str = "gather", replied: bool = False, bookkeeping: Any = None) -> Any:
        """One exchange: the replies themselves, stacked; small, and not aggregated. Zeros where there is no reply.

        With `replied`, also which clients of the cohort did: True or False for each.
        """
        keys = self._book.next_keys()
        sent = self._encoded("gather", value, name, None, keys, bookkeeping)
        rows, present = self._gathered("gather", name, sent, keys)
        if sent.channel is not None:
            updates, beside = rows
            updates = self._decoded(sent.channel, sent.exchange._replace(share=jnp.float32(1)), updates, keys)
            rows = sent.parts.whole(updates, beside)
            rows = rows if present is None else jax.tree.map(lambda a: _where_rows(present, a), rows)
        if not replied:
            return rows
        return rows, jnp.ones(self.cohort_size, bool) if present is None else present

    def scatter(self, rows: Any) -> PerClient:
        """Row j of what the server holds, to the j-th client of the cohort."""
        if self._repeats:
            raise ValueError("scatter on a cohort in which a client may be twice: it works once, and has one row.")
        leaves, structure = jax.tree.flatten(jax.tree.map(jnp.asarray, rows))
        for leaf in leaves:
            if leaf.shape[:1] != (self.cohort_size,):
                raise ValueError(
                    f"scatter: an array of shape {leaf.shape} has not a row for each of the {self.cohort_size} clients."
                )
        sent = [self._bind(scatter, self._ids, a)[0] for a in leaves]
        return PerClient(jax.tree.unflatten(structure, sent), self._cohort)

    def center(
        self, fn: Callable[..., Any], key: Array, name: str = "center", around: Any = None, bookkeeping: Any = None
    ) -> Any:
        """fn(client, key) on the centre's data, which are `client.upper`.

        Where the server holds the data this is no exchange. Where a client does, it is one, in which that client alone
        is asked. The centre's samples and oracles count as the clients' do. `around` and `bookkeeping`: see `mean`.
        """
        data = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), self._clients.at_center())
        holder, keys = self._clients.center_client, self._book.next_keys()
        channel = None if holder is None or keys is None else channels.chosen(self._book.channel, name)
        seen: list[tuple[channels.Exchange, _Parts]] = []

        def at_center(data: Clients, identity: Any, key: Array, _: list[Any]) -> Any:
            client = Client(self.problem, data, None, identity, self._book.debug, self._book.products)
            value = jax.tree.map(jaxprs.strong, fn(client, key))
            self._book.sample_by_sample |= client.sample_by_sample
            shapes = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), value)
            parts = _Parts(shapes, name, bookkeeping, around)
            exchange = channels.Exchange(name, "center", parts.split(shapes)[0])
            seen.append((exchange, parts))
            if channel is not None:  # the client that holds the data sends it as it would send any other reply
                updates, beside = parts.taken(value)
                state = channel.init(exchange)[1]
                value = channel.encode(exchange, updates, jax.random.fold_in(key, 1), state)[0], beside
            return value, client.counts

        traced, (shapes, _) = jaxprs.trace(at_center, data, _INTEGER, _key_like(key), [])
        work, sent, inputs = self._work(traced, 0)
        kept = Inputs(**inputs | {"own": 0})
        exchange, parts = seen[-1]
        described = _described(name, "center", work.outvars[:-1])._replace(beside=parts.described())
        key = jax.random.fold_in(key, self.n)
        out = self._bind(
            center, *sent, *([key] if kept.key else []),
            work=work, inputs=kept, source=_source(fn), exchange=described, holder=holder,
        )  # fmt: skip
        value = jax.tree.unflatten(jax.tree.structure(shapes), out)
        if channel is None:
            return value
        self._book.exchanges.setdefault(name, exchange)
        updates, beside = value
        return parts.whole(self._decoded(channel, exchange._replace(share=jnp.float32(1)), updates, keys), beside)

    def loop(self, n: Count, body: Callable[[Any, C], C], carry: C) -> C:
        """n times carry = body(i, carry), where the body exchanges."""
        book = self._book
        if isinstance(n, int) and n <= 1:
            return body(jnp.int32(0), carry) if n == 1 else carry

        def turn(i: Any, both: Any) -> tuple[Any, Any]:
            before = book.enter(i, both[1])
            try:
                carry = body(i, both[0])
            finally:
                threaded = book.leave(before)
            return (carry, threaded), ()

        traced = jaxprs.LoopBody(turn, (carry, book.threaded))
        leaves, structure = jax.tree.flatten(traced.carry)
        length = n if isinstance(n, int) else None
        count = [] if length is not None else [jnp.asarray(n, jnp.int32)]
        out = self._bind(loop, *count, *traced.consts, *leaves, body=traced.jaxpr, length=length)
        result, book.threaded = jax.tree.unflatten(structure, out)
        return result

    @property
    def shares(self) -> Float[Array, " cohort"]:
        """What each client of the cohort counts in a mean: p_i / Σ p_i."""
        p = self._weights[self._ids]
        return p / jnp.sum(p)

    def resample(self, key: Array, chances: Array | None = None) -> "Fed":
        """The same federation with a fresh cohort of the same size, for exchanges of its own, without memory.

        Drawn uniformly, without repetition; or, with each client's chance given, independently: a client that is drawn
        twice does its work once, and its reply counts twice.
        """
        ids = sample_cohort(key, self.n, self.cohort_size, chances)
        fresh = copy(self)
        self._book.cohorts += 1
        fresh._ids, fresh._cohort, fresh._repeats = ids, self._book.cohorts, chances is not None
        return fresh

    # What the exchanges share.

    def _bind(self, primitive: Primitive, *args: Any, **params: Any) -> list[Any]:
        """A part of the plan. (An engine that evaluates at once has its own.)"""
        return primitive.bind(*args, **params)

    def _work(self, traced: Any, own: int) -> tuple[Any, list[Any], dict[str, Any]]:
        """See `_work`; with convolutions rewritten, where that is chosen."""
        work, sent, inputs = _work(traced, own)
        return convolutions.rewrite(work) if self._book.products else work, sent, inputs

    def _reduced(
        self, kind: str, value: PerClient, name: str, weights: Any, around: Any, heard: bool, bookkeeping: Any
    ) -> Any:
        keys = self._book.next_keys()
        p = jnp.asarray(weights)[self._ids]
        sent = self._encoded(kind, value, name, around, keys, bookkeeping)
        channel = sent.channel
        lossy = self._book.faults is not None
        if kind == "sum":
            p = p if lossy else p * (self.n / self.cohort_size)
        total = jnp.sum(p)
        p = p / total if kind == "mean" and not lossy else p
        custom = None if channel is None else getattr(channel, "reduce", None)
        if custom is None:
            leaves, structure = jax.tree.flatten(sent.value.rows)
            described = sent.described(kind, name)
            who = [self._present(keys)] if lossy else []
            out = self._bind(reduce, self._ids, p, *who, *leaves, exchange=described, lossy=lossy)
            present: Any = self._noted(out.pop()) if lossy else None
            scale: Any = None
            if lossy:
                total = jnp.sum(jnp.where(present, p, 0))
                safe = jnp.where(total > 0, total, 1)
                scale = 1 / safe if kind == "mean" else self.n / jnp.maximum(jnp.sum(present), 1)
                p = jnp.where(present, p, 0) * scale
            back = lambda a, like: (a if scale is None else a * scale.astype(a.dtype)).astype(_result(like.dtype))
            result = jax.tree.unflatten(structure, [back(a, v) for a, v in zip(out, leaves, strict=True)])
        else:
            rows, present = self._gathered(kind, name, sent, keys)
            if present is not None:
                p = jnp.where(present, p, 0)
                total = jnp.sum(p)
                p = p / jnp.where(total > 0, total, 1) if kind == "mean" else p * (self.n / jnp.sum(present))
            there = jnp.ones(self.cohort_size, bool) if present is None else present
            updates, beside = rows
            result = custom(sent.exchange, updates, p, there), [_weighted(p, a) for a in beside]
        if lossy:
            least = self._book.threaded.least
            self._book.threaded = self._book.threaded._replace(least=jnp.where(total > 0, least, 0))
        if channel is not None:
            by_client = jnp.zeros(self.n, p.dtype).at[self._ids].add(p)  # one may be in the cohort twice
            share = jnp.max(jnp.abs(by_client))
            updates = self._decoded(channel, sent.exchange._replace(share=share), result[0], keys)
            result = sent.parts.whole(updates, result[1])
        if not heard:
            return result
        dtype = jnp.result_type(*(_result(a.dtype) for a in jax.tree.leaves(value.rows)))
        replies = self.cohort_size if present is None else jnp.sum(present)
        return result, Heard(total.astype(dtype), jnp.asarray(replies, dtype))

    def _encoded(
        self, kind: str, value: PerClient, name: str, around: Any, keys: Keys | None, bookkeeping: Any
    ) -> "_Sent":
        """What clients send: with a channel, the encoded updates and the bookkeeping beside them."""
        if not isinstance(value, PerClient):
            raise TypeError(
                f"fed.{kind}: {name!r} must be a per-client value, as fed.map returns; got {kind_of(value)}."
            )
        self._check_own(value, kind)
        shapes = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape[1:], a.dtype), value.rows)
        parts = _Parts(shapes, name, bookkeeping, around)
        updates = parts.split(shapes)[0]
        exchange, book = channels.Exchange(name, kind, updates), self._book
        first = book.exchanges.setdefault(name, exchange)
        channel = channels.chosen(book.channel, name)
        if channel is None or keys is None:
            return _Sent(value, exchange, None, parts)
        states = channel.init(exchange)
        if first.shapes != updates and jax.tree.leaves(states):
            raise ValueError(
                f"two exchanges are named {name!r} and send values of different shapes, and the channel remembers "
                "what it has seen of one: give them names of their own."
            )
        remembered = None if self._cohort or not book.threaded.client else book.threaded.client.get(name)
        fresh = states[1]

        def encode(_: Client, key: Array, value: Any, state: Any) -> Any:
            updates, beside = parts.taken(value)
            updates, state = channel.encode(exchange, updates, key, fresh if state is None else state)
            return (updates, beside), state

        own = None if remembered is None else PerClient(remembered, self._cohort)
        both = self.map(encode, keys.public, value, own)
        sent, state = both.rows
        if remembered is not None:
            client = {**book.threaded.client, name: state}
            book.threaded = book.threaded._replace(client=client)
        return _Sent(PerClient(sent, self._cohort), exchange, channel, parts)

    def _decoded(self, channel: Any, exchange: Any, total: Any, keys: Any) -> Any:
        book = self._book
        states = book.threaded.server or {}
        state = states[exchange.name] if exchange.name in states else channel.init(exchange)[0]
        result, state = channel.decode(exchange, total, keys.noise, state)
        if exchange.name in states:
            book.threaded = book.threaded._replace(server={**states, exchange.name: state})
        return result

    def _gathered(self, kind: str, name: str, sent: "_Sent", keys: Any) -> tuple[Any, Any]:
        leaves, structure = jax.tree.flatten(sent.value.rows)
        lossy = self._book.faults is not None
        who = [self._present(keys)] if lossy else []
        out = self._bind(gather, self._ids, *who, *leaves, exchange=sent.described(kind, name), lossy=lossy)
        present = self._noted(out.pop()) if lossy else None
        return jax.tree.unflatten(structure, out), present

    def _check_own(self, value: Any, what: str) -> None:
        if isinstance(value, PerClient) and value.cohort != self._cohort:
            raise ValueError(
                f"fed.{what} is given a value of another cohort's clients: a cohort of `resample` and the round's own "
                "have nothing to do with each other's values."
            )

    def _present(self, keys: Any) -> Array:
        assert self._book.faults is not None
        return self._book.faults.present(jax.random.fold_in(keys.chance, 0), self.cohort_size)

    def _noted(self, present: Array) -> Array:
        """`present`, noted in what the round reports."""
        before, replies = self._book.threaded, jnp.sum(present, dtype=jnp.int32)
        stayed = before.stayed if self._cohort else before.stayed & present
        missing = before.missing + self.cohort_size - replies
        self._book.threaded = before._replace(missing=missing, least=jnp.minimum(before.least, replies), stayed=stayed)
        return present


class _Parts:
    """The parts of a message: its updates, and the bookkeeping that no channel touches.

    Arguments:
        like: a value of this shape.
        name: of the exchange.
        marks, around: see `bookkeeping` and `around` in `Fed.mean`.
    """

    def __init__(self, like: Any, name: str, marks: Any, around: Any) -> None:
        self._like = jax.tree.leaves(like)
        self._structure = cast(Any, jax.tree.structure(like))
        self._marks = _marks(marks, like, name)
        start = self._structure.flatten_up_to(_spread(around, like))
        self._around = [s if mark is None else None for s, mark in zip(start, self._marks, strict=True)]

    def split(self, value: Any) -> tuple[Any, list[Any]]:
        """The updates, a tree with None in the place of bookkeeping; and the bookkeeping."""
        leaves = self._structure.flatten_up_to(value)
        updates = [a if mark is None else None for a, mark in zip(leaves, self._marks, strict=True)]
        beside = [a for a, mark in zip(leaves, self._marks, strict=True) if mark is not None]
        return jax.tree.unflatten(self._structure, updates), beside

    def taken(self, value: Any) -> tuple[Any, list[Any]]:
        """At the client: the updates as differences to `around`, and the bookkeeping, each part within its bound."""
        both = zip(self._structure.flatten_up_to(value), self._around, strict=True)
        moves = jax.tree.unflatten(self._structure, [a if s is None else a - s for a, s in both])
        updates, beside = self.split(moves)
        marks = [mark for mark in self._marks if mark is not None]
        return updates, [mark.bounded(a) for a, mark in zip(beside, marks, strict=True)]

    def whole(self, updates: Any, beside: list[Any]) -> Any:
        """At the server: the value of these parts."""
        first, second = iter(jax.tree.leaves(updates)), iter(beside)
        leaves = [next(first) if mark is None else next(second) for mark in self._marks]
        both = zip(leaves, self._around, strict=True)
        moved = [a if s is None else (s + a).astype(a.dtype) for a, s in both]
        return jax.tree.unflatten(self._structure, moved)

    def described(self) -> tuple[tuple[str, str, float | None], ...]:
        """The bookkeeping in words: what it is, its shape, and its bound."""
        both = zip(self._like, self._marks, strict=True)
        return tuple((mark.what, ledger.shape_of([a]), mark.most) for a, mark in both if mark is not None)


class _Sent(NamedTuple):
    """What clients send in an exchange."""

    value: PerClient  # with a channel: what it made of the updates, and a list of the bookkeeping
    exchange: channels.Exchange  # as the channel sees it
    channel: Any
    parts: _Parts

    def described(self, kind: str, name: str) -> ledger.Exchange:
        """The exchange as the ledger has it."""
        avals = [_aval(v.shape[1:], v.dtype) for v in jax.tree.leaves(self.value.rows)]
        return _described(name, kind, avals)._replace(beside=self.parts.described())


def _marks(given: Any, like: Any, name: str) -> list[Any]:
    """For each leaf of `like`, its mark or None; `given` is a tree like it, or its beginnings."""
    if given is None or isinstance(given, channels.Bookkeeping):
        return [given] * len(jax.tree.leaves(like))
    if isinstance(given, tuple | list) and isinstance(like, tuple | list) and len(given) == len(like):
        return [mark for own, part in zip(given, like, strict=True) for mark in _marks(own, part, name)]
    if isinstance(given, dict) and isinstance(like, dict) and given.keys() <= like.keys():
        return [mark for key in _keys(like) for mark in _marks(given.get(key), like[key], name)]
    raise TypeError(
        f"bookkeeping of the exchange {name!r} must be a tree like the value, with rk.Bookkeeping(...) or None in it; "
        f"got {given!r}."
    )


_INTEGER = jax.ShapeDtypeStruct((), jnp.int32)


def _key_like(key: Array) -> Any:
    return jax.ShapeDtypeStruct((), key.dtype)


def _work(traced: Any, own: int) -> tuple[Any, list[Any], dict[str, Any]]:
    """A client's function without what it does not need; what it is sent; and which inputs are left."""
    consts = len(traced.consts)
    work, used = jaxprs.prune(jaxprs.open_up(traced))
    sent, data, (identity, key), values = (
        used[:consts],
        used[consts : -2 - own],
        used[-2 - own :][:2],
        used[len(used) - own :],
    )
    left = {
        "sent": sum(sent),
        "data": tuple(i for i, is_used in enumerate(data) if is_used),
        "identity": identity,
        "key": key,
        "own": values,
    }
    return work, [c for c, is_used in zip(traced.consts, sent, strict=True) if is_used], left


def _described(name: str, kind: str, avals: Any) -> ledger.Exchange:
    shapes = [getattr(v, "aval", v) for v in avals]
    return ledger.Exchange(name, kind, ledger.shape_of(shapes), ledger.nbytes(shapes))


def _source(fn: Any) -> str:
    """Where a client's function stands, for messages and printed plans."""
    code = getattr(fn, "__code__", None)
    if code is None:
        return getattr(fn, "__name__", type(fn).__name__)
    return f"{code.co_filename.rsplit('/', 1)[-1]}:{code.co_firstlineno}"


def _result(dtype: Any) -> Any:
    """The type of a mean of values of this type."""
    return dtype if jnp.issubdtype(dtype, jnp.inexact) else accumulator(dtype)


def _weighted(weights: Array, rows: Array) -> Array:
    """Σ w_j v_j over the rows whose weight is not 0, in the type of a mean."""
    w = weights.astype(accumulator(rows.dtype)).reshape(-1, *(1,) * (rows.ndim - 1))
    return jnp.sum(jnp.where(w != 0, w * rows, 0), axis=0).astype(_result(rows.dtype))


def _where_rows(present: Array, rows: Array) -> Array:
    return jnp.where(present.reshape(-1, *(1,) * (rows.ndim - 1)), rows, jnp.zeros((), rows.dtype))


def _spread(around: Any, like: Any) -> Any:
    """`around`, a tree like `like` or its beginnings, with None for whatever it leaves out; as a tree of leaves."""
    if around is None:
        return jax.tree.map(lambda _: None, like)
    if isinstance(around, tuple | list) and isinstance(like, tuple | list):
        parts = [_spread(a, l) for a, l in zip(around, like, strict=True)]
        return type(like)(*parts) if hasattr(like, "_fields") else type(like)(parts)
    if isinstance(around, dict) and isinstance(like, dict):
        kind = OrderedDict if isinstance(like, OrderedDict) else dict
        return kind((k, _spread(around.get(k), like[k])) for k in like)
    return around


def _keys(value: dict[Any, Any]) -> list[Any]:
    """The keys of a dict in the order in which JAX has its entries."""
    return list(value) if isinstance(value, OrderedDict) else sorted(value)


class Algorithm(Protocol):
    """An algorithm: a frozen record of hyperparameters with two pure methods.

    `init` makes the state from x and y; the state is a NamedTuple whose fields include x (and y). `round` takes it one
    round further. Methods whose clients remember something between rounds have a third, `memory(x, y)`: what a client
    remembers before its first round. (What has the shape of the client's data is first written by `init`'s map_state.)

    Fields are checked by their annotations: `rk.Step` is a positive number or a schedule round -> float, `rk.Steps` a
    number of local steps, `rk.BatchSize` a count or None, Literal["a", "b"] one of these words; float, int and bool are
    what they say. A class whose optimizers take the place of step sizes says so: `replaces = {"optimizer": "step"}`.
    """

    solves: ClassVar[tuple[type, ...]]

    def init(self, fed: Fed, x: Any, y: Any, key: Array) -> Any:
        """The first state; may exchange, and then reaches every client."""

    def round(self, fed: Fed, state: Any, key: Array) -> Any:
        """The state after one more round."""
