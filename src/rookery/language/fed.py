"""The federation as algorithms see it: its methods build the plan of a round while the round is traced."""

from collections.abc import Callable, Sequence
from copy import copy
from typing import Any, ClassVar, NamedTuple, Protocol, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from rookery.base import convolutions, jaxprs
from rookery.base.arguments import kind_of
from rookery.base.compat import Tracer
from rookery.data.clients import Clients
from rookery.data.cohort import Draw, sample_cohort
from rookery.data.rows import Count, entries
from rookery.language import channel as channels
from rookery.language import primitives
from rookery.language.asynchronous import begun_again
from rookery.language.channel import Bookkeeping, ChannelExchange
from rookery.language.client import Client, Data, Epochs
from rookery.language.exchange import Exchanging
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
from rookery.language.messages import Parts, described
from rookery.language.primitives import zeroed
from rookery.language.tracing import PerClient, Tracing, source_of
from rookery.problems.problems import Problem

__all__ = [
    "Algorithm", "Amount", "AtLeastOne", "BatchSize", "Bookkeeping", "Bounds", "Client", "Data", "Decay", "Epochs",
    "Fed", "NonFiniteError", "Optimizer", "PerClient", "Positive", "Schedule", "Share", "Step", "Steps",
]  # fmt: skip

C = TypeVar("C")


class NonFiniteError(FloatingPointError):
    """A value became infinite or not a number; the message says where."""


class Inputs(NamedTuple):
    """The inputs of a client's function by kind, in their order."""

    sent: int  # how many of the server's values it closes over
    data: tuple[int, ...]  # which leaves of the client's data
    identity: bool  # whether it reads the client's number
    key: bool  # whether it reads a key
    own: int  # how many of the client's values of earlier maps
    noise: bool = False  # whether it reads a key from the client's own entropy
    levels: bool = False  # whether it reads the noise multipliers of its releases


class Fed(Exchanging):
    """The federation, as an algorithm's `init` and `round` see it. Its methods build the plan of a round.

    Attributes:
        problem: the problem, of a class that the algorithm solves.
        n: the number of clients in the federation.
        cohort_size: P, the number of clients in this cohort; with Poisson sampling, the places for them.
    """

    def __init__(
        self, problem: Problem, clients: Clients, weights: Float[Array, " n"], ids: Int[Array, " cohort"],
        tracing: Tracing, drawn: Array | None = None,
    ) -> None:  # fmt: skip
        self.problem: Any = problem
        self.n, self.cohort_size = clients.n, int(ids.shape[0])
        self._clients, self._weights, self._tracing = clients, weights, tracing
        self._ids = jnp.asarray(ids, jnp.int32)
        self._cohort = 0  # the round's own cohort, which has memory; resampled ones are numbered from 1
        self._repeats = False  # whether a client may be in the cohort twice
        self._drawn = drawn  # with Poisson sampling: which of `ids` are in the cohort

    def map(self, fn: Callable[..., Any], key: Array, *values: PerClient | None) -> PerClient:
        """Compute fn(client, key, *values) on every client of the cohort.

        `values` are the client's values of earlier maps. A client is sent the values that fn closes over.
        """
        for value in values:
            self._check_cohort(value, "map")
        local, structure = jax.tree.flatten(values)
        rows = [jax.ShapeDtypeStruct(v.shape[1:], v.dtype) for v in local]

        def on_client(data: Clients, identity: Any, key: Array, noise: list[Any], local: list[Any]) -> Any:
            records = self._tracing.records_of(noise)
            client = Client(self.problem, data, 0, identity, self._tracing.debug, self._tracing.products, records)
            value = fn(client, key, *(v and v.rows for v in jax.tree.unflatten(structure, local)))
            self._tracing.sample_by_sample |= client.sample_by_sample
            return jax.tree.map(jaxprs.strong, value), client.counts

        like, data = jax.ShapeDtypeStruct((), key.dtype), self._clients.members(None)
        noise = self._tracing.record_noise()
        traced, (shapes, _) = jaxprs.trace(on_client, data, _INTEGER, like, jax.tree.map(jax.typeof, noise), rows)
        work, operands, inputs = self._work(traced, key, noise, local)
        if self._tracing.watch is not None:
            counts = self._counts(work, operands, inputs, self._ids, self._tracing.watch.sizes, source_of(fn))
            self._tracing.watch.work(self._cohort, self._ids, counts, self._known_counts(work, operands, inputs))
        if self._tracing.down is not None:
            work, operands, inputs = self._packed_down(work, operands, inputs)
        out = self._bind(
            primitives.client_map, self._ids, *operands,
            work=work, inputs=inputs, source=source_of(fn), repeats=self._repeats,
        )  # fmt: skip
        return PerClient(jax.tree.unflatten(jax.tree.structure(shapes), out), self._cohort)

    def map_state(self, fn: Callable[..., Any], key: Array, *values: PerClient | None) -> PerClient:
        """Compute fn(client, key, memory, *values) -> (value, memory), where the memory stays with the client."""
        if self._cohort:
            raise ValueError(
                "fed.map_state must be called on the round's own cohort; the memory of a cohort of `resample` or "
                "`everyone` would be lost. Use map there."
            )
        both = self.map(fn, key, PerClient(self._tracing.threaded.memory, self._cohort), *values)
        if not isinstance(both.rows, tuple) or len(both.rows) != 2:
            raise TypeError(
                f"The function of fed.map_state must return a pair (value, memory); got {kind_of(both.rows)}."
            )
        value, memory = both.rows
        self._tracing.threaded = self._tracing.threaded._replace(memory=memory)
        return PerClient(value, self._cohort)

    def mean(
        self, value: PerClient, name: str = "mean", weights: Array | np.ndarray | None = None, around: Any = None,
        heard: bool = False, bookkeeping: Any = None,
    ) -> Any:  # fmt: skip
        """One exchange: Σ p_i v_i / Σ p_i over the clients of the cohort that reply.

        Arguments:
            value: what each client sends.
            name: the name of the exchange, in the ledger and for channels chosen by name.
            weights: replaces p, with an entry for each client of the federation. Robust means, which count all clients
                equally, accept only equal weights in a NumPy array.
            around: the public value that an iterate started from, so that channels act on the difference: a tree like
                the value, or a prefix of it, with None for parts that are not iterates.
            heard: whether to also return a `Heard`, which says how many clients replied, and their weight.
            bookkeeping: which parts of the value are not updates, so that channels do not act on them: a tree like the
                value, or a prefix of it, with a `Bookkeeping` for those parts and None for the others.
        """
        weights = self._weights if weights is None else weights
        return self._reduced("mean", value, name, weights, around, heard, bookkeeping)

    def sum(self, value: PerClient, name: str = "sum", bookkeeping: Any = None) -> Any:
        """One exchange: Σ (n/P) p_i v_i over the P clients that reply, unbiased for the sum over all clients."""
        return self._reduced("sum", value, name, self._weights, None, False, bookkeeping)

    def gather(self, value: PerClient, name: str = "gather", replied: bool = False, bookkeeping: Any = None) -> Any:
        """One exchange: the replies themselves, stacked and not aggregated, with zeros for clients that do not reply.

        With `replied` it also returns which clients of the cohort replied: True or False for each.
        """
        keys = self._tracing.next_keys()
        sent = self._encoded("gather", value, name, None, keys, bookkeeping)
        rows, present = self._gathered("gather", name, sent, keys)
        if sent.channel is not None:
            updates, marked = rows
            updates = self._decoded(sent.channel, sent.exchange._replace(share=jnp.float32(1)), updates, keys)
            rows = sent.parts.at_server(updates, marked)
            rows = rows if present is None else jax.tree.map(lambda a: zeroed(present, a), rows)
        if not replied:
            return rows
        return rows, jnp.ones(self.cohort_size, bool) if present is None else present

    def scatter(self, rows: Any) -> PerClient:
        """Send row j of what the server holds to the j-th client of the cohort."""
        if self._repeats:
            raise ValueError(
                "fed.scatter must not be used on a cohort of resample(..., chances): a client may be in it twice, and "
                "gets one row."
            )
        leaves, structure = jax.tree.flatten(jax.tree.map(jnp.asarray, rows))
        for leaf in leaves:
            if leaf.shape[:1] != (self.cohort_size,):
                raise ValueError(
                    f"fed.scatter: rows must have one row for each of the {self.cohort_size} clients of the cohort; "
                    f"got an array of shape {leaf.shape}."
                )
        sent = [self._bind(primitives.scatter, self._ids, a)[0] for a in leaves]
        return PerClient(jax.tree.unflatten(structure, sent), self._cohort)

    def center(
        self, fn: Callable[..., Any], key: Array, name: str = "center", around: Any = None, bookkeeping: Any = None
    ) -> Any:
        """Compute fn(client, key) on the centre's data, which are `client.upper`.

        If a client holds these data, this is one exchange with that client; if the server does, there is no exchange.
        The centre's samples and oracles are counted like the clients'. `around` and `bookkeeping`: see `mean`.
        """
        data = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), self._clients.at_center())
        holder, keys = self._clients.center_client, self._tracing.next_keys()
        channel = None if holder is None or keys is None else channels.chosen(self._tracing.channel, name)
        messages: list[tuple[ChannelExchange, Parts]] = []

        def at_center(data: Clients, identity: Any, key: Array, noise: list[Any], _: list[Any]) -> Any:
            records = self._tracing.records_of(noise)
            client = Client(self.problem, data, None, identity, self._tracing.debug, self._tracing.products, records)
            value = jax.tree.map(jaxprs.strong, fn(client, key))
            self._tracing.sample_by_sample |= client.sample_by_sample
            shapes = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), value)
            parts = Parts(shapes, name, bookkeeping, around)
            exchange = ChannelExchange(name, "center", parts.split(shapes)[0])
            messages.append((exchange, parts))
            if channel is not None:  # the client that holds the data sends it like any other reply
                updates, marked = parts.at_client(value)
                state = channel.init(exchange)[1]
                value = channel.encode(exchange, updates, jax.random.fold_in(key, 1), state)[0], marked
            return value, client.counts

        noise, like = self._tracing.record_noise(), jax.ShapeDtypeStruct((), key.dtype)
        traced, (shapes, _) = jaxprs.trace(at_center, data, _INTEGER, like, jax.tree.map(jax.typeof, noise), [])
        exchange, parts = messages[-1]
        work, operands, inputs = self._work(traced, jax.random.fold_in(key, self.n), noise, [])
        record = described(name, "center", [v.aval for v in work.outvars[:-1]])
        record = parts.described(record, channels.compresses(channel))
        if self._tracing.watch is not None and holder is not None:
            at = jnp.full(1, holder, jnp.int32)
            counts = self._counts(work, operands, inputs, at, (None,) * len(jax.tree.leaves(data)), source_of(fn))
            self._tracing.watch.work("center", at, counts)
            self._tracing.waited(self._tracing.watch.exchange("center", at, record.reply_bytes)[0])
        out = self._bind(
            primitives.center, *operands,
            work=work, inputs=inputs, source=source_of(fn), exchange=record, holder=holder,
        )  # fmt: skip
        value = jax.tree.unflatten(jax.tree.structure(shapes), out)
        if channel is None:
            return value
        self._tracing.exchanges.setdefault(name, exchange)
        updates, marked = value
        if channels.compresses(channel):
            updates = channel.unpack(exchange, updates, self._server_state(channel, exchange))
        return parts.at_server(self._decoded(channel, exchange._replace(share=jnp.float32(1)), updates, keys), marked)

    def loop(self, n: Count, body: Callable[[Any, C], C], carry: C, most: int | None = None) -> C:
        """Compute carry = body(i, carry) n times, where the body exchanges. `most`: a bound on n, if n is drawn."""
        tracing = self._tracing
        if isinstance(n, int) and n <= 1:
            return body(jnp.int32(0), carry) if n == 1 else carry

        tracing.settle()
        first = 0 if tracing.watch is None else tracing.watch.exchanges

        def turn(i: Any, both: Any) -> tuple[Any, Any]:
            if tracing.watch is not None:  # a body may be traced twice
                tracing.watch.exchanges = first
            before = tracing.enter(i, both[1])
            try:
                carry = body(i, both[0])
            finally:
                threaded = tracing.leave(before)
            return (carry, threaded), ()

        traced = jaxprs.LoopBody(turn, (carry, tracing.threaded))
        leaves, structure = jax.tree.flatten(traced.carry)
        length = n if isinstance(n, int) else None
        count, bound = [], {}
        if length is None:
            count = [jnp.asarray(n, jnp.int32) if most is None else jnp.minimum(jnp.asarray(n, jnp.int32), most)]
            bound = {} if most is None else {"most": most}
        out = self._bind(primitives.loop, *count, *traced.consts, *leaves, body=traced.jaxpr, length=length, **bound)
        result, tracing.threaded = jax.tree.unflatten(structure, out)
        return result

    @property
    def ids(self) -> Int[Array, " cohort"]:
        """The numbers of the cohort's clients, in the order of the rows of `gather` and `scatter`."""
        return self._ids

    @property
    def shares(self) -> Float[Array, " cohort"]:
        """The clients' shares in a mean over the cohort: p_i / Σ p_i."""
        p = entries(self._weights, self._ids)
        return p / jnp.sum(p)

    def resample(self, key: Array, chances: Array | None = None) -> "Fed":
        """Draw another cohort of the same size, without memory, and return the federation with that cohort.

        It is drawn uniformly and without replacement. If `chances` gives each client's probability, it is drawn with
        replacement: a client that is drawn twice works once, and its reply counts twice.
        """
        tracing, drawn = self._tracing, None
        if tracing.rate is not None and chances is None:  # a private run: the server keeps its cohorts secret
            keys = tracing.next_keys()
            assert keys is not None
            ids, drawn = Draw(self.cohort_size, tracing.chance)(keys.noise, self.n)
        else:
            ids = sample_cohort(key, self.n, self.cohort_size, chances)
        return self._with_cohort(ids, drawn, chances is not None)

    @property
    def everyone(self) -> "Fed":
        """The federation with all clients as its cohort, without memory; itself if its cohort has all clients."""
        if self.cohort_size == self.n and self._drawn is None and not self._repeats:
            return self
        if self._tracing.rate is not None:
            raise ValueError(
                "fed.everyone must not be used in a run that is private for each client, because the privacy "
                "account assumes drawn cohorts; got a cohort that is drawn. Leave cohort out of solve."
            )
        return self._with_cohort(jnp.arange(self.n, dtype=jnp.int32))

    def _with_cohort(self, ids: Int[Array, " cohort"], drawn: Array | None = None, repeats: bool = False) -> "Fed":
        """The federation with another cohort."""
        fresh = copy(self)
        fresh._tracing.cohorts += 1
        fresh._ids, fresh._drawn, fresh._cohort, fresh._repeats = ids, drawn, self._tracing.cohorts, repeats
        fresh.cohort_size = int(ids.shape[0])
        return fresh

    # Steps of the plan.

    def _work(self, traced: Any, key: Array, noise: list[Any], local: list[Any]) -> tuple[Any, list[Any], Inputs]:
        """A client's function with dead code removed, its operands, and their kinds.

        Its inputs are constants, data, the client's number, key, noise (a key and multipliers, or nothing), local.
        """
        work, used = jaxprs.prune(jaxprs.open_up(traced))
        begin, last = len(traced.consts), len(used) - len(local)
        end = last - len(noise)
        identity, with_key = used[end - 2 : end]
        hiding = [v for v, is_used in zip(noise, used[end:last], strict=True) if is_used]
        sent = [c for c, is_used in zip(traced.consts, used, strict=False) if is_used]
        kept = [v for v, is_used in zip(local, used[last:], strict=True) if is_used]
        data = tuple(i for i, is_used in enumerate(used[begin : end - 2]) if is_used)
        inputs = Inputs(len(sent), data, identity, with_key, len(kept), *used[end:last])
        work = convolutions.rewrite(work) if self._tracing.products else work
        return work, [*sent, *([key] if with_key else []), *hiding, *kept], inputs

    def _counts(
        self, work: Any, operands: list[Any], inputs: Inputs, ids: Array, sizes: Sequence[Any], source: str
    ) -> Array:
        """The counts of a client's function, a row for each of these clients, as the server knows them beforehand."""
        counted, used = jaxprs.prune(work, [False] * (len(work.outvars) - 1) + [True])
        sent, rest = operands[: inputs.sent], operands[inputs.sent :]
        again: Any = self._tracing.again
        key: Any = rest[0] if inputs.key else None
        key = key if key is None or again is None else begun_again(key, again)
        hidden = [None] * (inputs.noise + inputs.levels + inputs.own)
        known = [True] * len(sent) + [sizes[k] is not None for k in inputs.data]
        known += [True] * (inputs.identity + inputs.key) + [False] * len(hidden)
        if any(reads and not is_known for reads, is_known in zip(used, known, strict=True)):
            raise ValueError(
                "clock must be None for methods in which how much a client computes depends on its data, its memory or "
                f"values of its own, as in the function at {source}. Leave the clock out."
            )

        def of_one(i: Array) -> Array:
            data = [None if sizes[k] is None else jnp.asarray(sizes[k])[i][None] for k in inputs.data]
            own = [jax.random.fold_in(key, i)] if inputs.key else []
            arguments = [*sent, *data, *([i] if inputs.identity else []), *own, *hidden]
            return jaxprs.run(counted, *(a for a, reads in zip(arguments, used, strict=True) if reads))[0]

        return jax.vmap(of_one)(ids)

    def _known_counts(self, work: Any, operands: list[Any], inputs: Inputs) -> np.ndarray | None:
        """The counts of a client's function for all clients; None if they depend on what is drawn during the run."""
        watch, _, used = self._tracing.watch, *jaxprs.prune(work, [False] * (len(work.outvars) - 1) + [True])
        read = [*operands[: inputs.sent], *[None] * (len(inputs.data) + inputs.identity), *operands[inputs.sent :]]
        drawn = any(reads and isinstance(value, Tracer) for reads, value in zip(used, read, strict=False))
        if drawn or watch is None or not self._tracing.waits_for_some:
            return None
        with jax.ensure_compile_time_eval():
            everyone = jnp.arange(self.n, dtype=jnp.int32)
            return np.asarray(self._counts(work, operands, inputs, everyone, watch.sizes, ""))

    def _packed_down(self, work: Any, operands: list[Any], inputs: Inputs) -> tuple[Any, list[Any], Inputs]:
        """The client's function, changed so that it is sent packed values and unpacks them first."""
        down, sent, rest = self._tracing.down, operands[: inputs.sent], operands[inputs.sent :]
        packed = [self._tracing.packed(value) for value in sent]
        likes = [jax.typeof(value) for value in sent]

        def unpacked(sent: list[Any], *rest: Any) -> list[Any]:
            both = zip(sent, likes, packed, strict=True)
            values = [a[0] if p is None else down.unpack(a, like) for a, like, p in both]
            return jaxprs.run(work, *values, *rest)

        messages = [(value,) if p is None else p for value, p in zip(sent, packed, strict=True)]
        shapes = [jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype) for v in work.invars[inputs.sent :]]
        traced, _ = jaxprs.trace(unpacked, jax.tree.map(jax.typeof, messages), *shapes)
        flat = [a for message in messages for a in message]
        return jaxprs.open_up(traced), [*flat, *rest], inputs._replace(sent=len(flat))


_INTEGER = jax.ShapeDtypeStruct((), jnp.int32)


class Algorithm(Protocol):
    """An algorithm: a frozen record of hyperparameters with two pure methods.

    `init` makes the state from x and y; the state is a NamedTuple whose fields include x (and y). `round` advances it
    by one round. A method whose clients remember something between rounds has a third method, `memory(x, y)`, which
    returns what a client remembers before its first round. (`map_state` in `init` first writes memory with the shape of
    a client's data.)

    Fields are checked by their annotations: `rk.Step` is a positive number or a schedule round -> float, `rk.Steps` a
    number of local steps, `rk.BatchSize` a count or None, Literal["a", "b"] one of these words; float, int and bool
    mean what they say. A class whose optimizers replace step sizes declares `replaces = {"optimizer": "step"}`.
    """

    solves: ClassVar[tuple[type, ...]]

    def init(self, fed: Fed, x: Any, y: Any, key: Array) -> Any:
        """Return the first state. Exchanges of `init` reach every client."""

    def round(self, fed: Fed, state: Any, key: Array) -> Any:
        """Return the state after one more round."""
