"""How an exchange becomes steps of the plan: encoded at the clients, reduced, decoded at the server."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from rookery.base import jaxprs
from rookery.base.arguments import kind_of
from rookery.base.compat import Primitive
from rookery.data.clients import Clients
from rookery.data.rows import entries
from rookery.language import channel as channels
from rookery.language import primitives
from rookery.language.channel import ChannelExchange, Plain
from rookery.language.client import Client
from rookery.language.lateness import checked_chances, heard, uncorrected
from rookery.language.ledger import Exchange
from rookery.language.messages import Encoded, Parts
from rookery.language.primitives import largest_of, result_type, weighted_sum
from rookery.language.tracing import ExchangeKeys, Heard, PerClient, Tracing


class Exchanging:
    """A cohort that can exchange values with the server. `Fed` adds what algorithms see."""

    n: int  # the number of clients in the federation
    cohort_size: int
    _clients: Clients
    _ids: Array
    _weights: Array
    _cohort: int  # 0 for the round's own cohort, which has memory; resampled ones are numbered from 1
    _repeats: bool  # whether a client may be in the cohort twice
    _drawn: Array | None  # with Poisson sampling: which of `ids` are in the cohort
    _tracing: Tracing

    def map(self, fn: Callable[..., Any], key: Array, *values: PerClient | None) -> PerClient:
        """See `Fed.map`."""
        raise NotImplementedError

    def _bind(self, primitive: Primitive, *args: Any, **params: Any) -> list[Any]:
        """Add a step to the plan."""
        return primitive.bind(*args, **params)

    def _reduced(
        self, kind: str, value: PerClient, name: str, weights: Any, around: Any, heard: bool, bookkeeping: Any
    ) -> Any:
        """The weighted mean or sum."""
        keys, uneven = self._tracing.next_keys(), self._uneven(weights)
        steady, weights = weights is self._weights, jnp.asarray(weights)
        weights = weights.astype(result_type(weights.dtype))
        p, total = self._scaled(kind, weights)
        sent = self._encoded(kind, value, name, around, keys, bookkeeping, steady, p)
        if self._corrects:
            why = "is a sum" if kind == "sum" else "" if steady else "has weights that the method chooses"
            why = why or ("tells the method how many clients replied" if heard else "")
            p, total = self._corrected(p, name, sent, why)
        channel = sent.channel
        by_channel = None if channel is None else getattr(channel, "reduce", None)
        if by_channel is None and self._attack is not None and not self._attack.alone:
            by_channel = _summed  # the server must see the replies, of which the attack is made
        if self._tracing.asynchronous and sent.secure is None and by_channel is None:
            return self._reduced_from_buffer(kind, name, sent, keys, entries(weights, self._ids), heard)
        if sent.secure is not None:
            reduced = self._reduced_securely(kind, name, sent, keys, p, total)
        elif by_channel is None:
            reduced = self._reduced_by_plan(kind, name, sent, keys, p, total)
        else:
            state = self._server_state(channel, sent.exchange)
            assert keys is not None
            exchange = sent.exchange._replace(state=state, key=jax.random.fold_in(keys.public, 1), uneven=uneven)
            sent = sent._replace(exchange=exchange)
            reduced = self._reduced_by_channel(by_channel, kind, name, sent, keys, p, total)
        result, p, total, present = reduced
        if self._lossy:
            least = self._tracing.threaded.least
            self._tracing.threaded = self._tracing.threaded._replace(least=jnp.where(total > 0, least, 0))
        rate = self._tracing.rate
        if channel is not None:
            if rate is None:
                by_client = jnp.zeros(self.n, p.dtype).at[self._ids].add(p)  # a client may be in the cohort twice
            else:  # the largest share of any client, in this cohort or not
                by_client = weights / (total if kind == "mean" else rate)
            exchange = sent.exchange._replace(share=jnp.max(jnp.abs(by_client)))
            whole = jnp.ones(()) if kind == "mean" else jnp.sum(weights)
            bookkept = self._hidden(channel, exchange, sent.parts, result[1], keys, whole)
            updates = self._decoded(channel, exchange, result[0], keys)
            result = sent.parts.at_server(updates, bookkept)
        if not heard:
            return result
        dtype = jnp.result_type(*(result_type(a.dtype) for a in jax.tree.leaves(value.rows)))
        replies: Any = self.cohort_size if present is None else jnp.sum(present)
        replies = replies if rate is None else rate * self.n
        return result, Heard(total.astype(dtype), jnp.asarray(replies, dtype))

    def _scaled(self, kind: str, weights: Array) -> tuple[Array, Array]:
        """The clients' weights in a mean or a sum, and the total that a mean divides by.

        In a private run, the total is that of a cohort of the expected size: who takes part is secret. With lost
        replies, weights are scaled once it is known who replied.
        """
        p, rate = entries(weights, self._ids), self._tracing.rate
        if rate is not None:
            total = rate * jnp.sum(weights)
            return p / (total if kind == "mean" else rate), total
        if kind == "sum":
            p = p if self._lossy else p * (self.n / self.cohort_size)
        total = jnp.sum(p)
        return p / total if kind == "mean" and not self._lossy else p, total

    def _reduced_by_plan(
        self, kind: str, name: str, sent: Encoded, keys: Any, p: Array, total: Array
    ) -> tuple[Any, Array, Array, Any]:
        """Reduce by the plan's `reduce`. Returns the result, the weights, their total before scaling, and who replied.

        Lost replies are left out of the sums, which are scaled to the weights that remain.
        """
        lossy = self._lossy
        sums, likes, structure = self._sums(kind, name, sent, keys, p, lossy=lossy)
        present: Any = self._noted(sums.pop()) if lossy else None
        scale: Any = None
        if lossy and self._tracing.rate is None and not self._corrects:
            total = jnp.sum(jnp.where(present, p, 0))
            safe = jnp.where(total > 0, total, 1)
            scale = 1 / safe if kind == "mean" else self.n / jnp.maximum(jnp.sum(present), 1)
            p = jnp.where(present, p, 0) * scale
        scaled = lambda a, like: (a if scale is None else a * scale.astype(a.dtype)).astype(result_type(like.dtype))
        result = jax.tree.unflatten(structure, [scaled(a, v) for a, v in zip(sums, likes, strict=True)])
        return result, p, total, present

    def _sums(
        self, kind: str, name: str, sent: Encoded, keys: Any, p: Array, **params: Any
    ) -> tuple[list[Any], list[Any], Any]:
        """Add a `reduce` to the plan. Returns its outputs, and the leaves and the structure of the clients' values."""
        leaves, structure = jax.tree.flatten(sent.value.rows)
        record, closed, likes = self._described(kind, name, sent), list[Any](), leaves
        mask, unpacking = self._mask(record, keys), dict[str, Any]()
        if (unpack := self._unpack(sent)) is not None:
            one = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape[1:], a.dtype), sent.value.rows)
            traced, shapes = jaxprs.trace(unpack, one)
            closed, unpacking = traced.consts, {"unpack": jaxprs.open_up(traced), "closed": len(traced.consts)}
            likes, structure = jax.tree.flatten(shapes)
        sums = self._bind(
            primitives.reduce, self._ids, p, *mask, *closed, *leaves, exchange=record, **params, **unpacking
        )
        return sums, likes, structure

    def _reduced_from_buffer(self, kind: str, name: str, sent: Encoded, keys: Any, p: Array, heard: bool) -> Any:
        """Reduce over the replies in the buffer of an asynchronous run: see `rk.Asynchronous`."""
        channel, exchange, parts = sent.channel, sent.exchange, sent.parts
        if jax.tree.leaves(exchange.public):
            raise ValueError(
                f"channel: in an asynchronous run, the exchange {name!r} must have a channel without `public`, because "
                'clients begin at different times. Leave that channel out; to compress, use feedback="error".'
            )
        moves = tuple(parts.moves)
        sums, likes, structure = self._sums(kind, name, sent, keys, p, lossy=False, asynchronous=moves)
        *sums, whole, counted, largest = sums
        factor = whole * (self.n / self.cohort_size) if kind == "sum" else jnp.ones((), p.dtype)
        of_values, of_moves = (factor / jnp.where(total > 0, total, 1) for total in (counted, whole))
        scaled = lambda a, like, by: (a * by.astype(a.dtype)).astype(result_type(like.dtype))
        scales = [of_moves if is_move else of_values for is_move in moves]
        leaves = [scaled(*each) for each in zip(sums, likes, scales, strict=True)]
        updates, marked = jax.tree.unflatten(structure, leaves)
        scale = of_moves if all(moves[: len(moves) - len(parts.bookkeeping)]) else of_values  # of the updates
        exchange = exchange._replace(share=largest * scale)
        marked = self._hidden(channel, exchange, parts, marked, keys, factor)
        result = parts.at_server(self._decoded(channel, exchange, updates, keys), marked)
        dtype = jnp.result_type(*(result_type(a.dtype) for a in likes))
        return (result, Heard(whole.astype(dtype), jnp.asarray(self.cohort_size, dtype))) if heard else result

    def _reduced_securely(
        self, kind: str, name: str, sent: Encoded, keys: Any, p: Array, total: Array
    ) -> tuple[Any, Array, Array, Any]:
        """Add up integers in which clients have included their weights. Returns the same as `_reduced_by_plan`.

        With too few replies the result is zero, and the round counts as failed.
        """
        secure, lossy, largest = sent.secure, self._lossy, largest_of(p)
        leaves, structure = jax.tree.flatten(sent.value.rows)
        fewest = secure.fewest(self.cohort_size)
        record = self._described(kind, name, sent)._replace(secure=fewest)
        mask, ones = self._mask(record, keys), jnp.ones(self.cohort_size, jnp.uint32)
        sums = self._bind(primitives.reduce, self._ids, ones, *mask, *leaves, exchange=record, lossy=lossy)
        present: Any = self._noted(sums.pop()) if lossy else None
        scale: Any = jnp.ones((), p.dtype)
        if lossy:
            enough = jnp.sum(present) >= fewest
            p = jnp.where(present & enough, p, 0)
            total = jnp.sum(p)
            count = jnp.maximum(jnp.sum(present), 1).astype(p.dtype)
            scale = 1 / jnp.where(total > 0, total, 1) if kind == "mean" else self.n / count
            p = p * scale
            sums = [jnp.where(enough, a, jnp.zeros((), a.dtype)) for a in sums]
            least = self._tracing.threaded.least
            self._tracing.threaded = self._tracing.threaded._replace(least=jnp.where(enough, least, 0))
        updates, marked = secure.values(sent.plain, jax.tree.unflatten(structure, sums), scale * largest)
        return (updates, marked), p, total, present

    def _reduced_by_channel(
        self, reduce: Callable[..., Any], kind: str, name: str, sent: Encoded, keys: Any, p: Array, total: Array
    ) -> tuple[Any, Array, Array, Any]:
        """Reduce by a channel's `reduce`, which is given every reply. Returns the same as `_reduced_by_plan`."""
        (updates, marked), present = self._gathered(kind, name, sent, keys)
        if present is not None:
            p = jnp.where(present, p, 0)
            total = jnp.sum(p)
            p = p / jnp.where(total > 0, total, 1) if kind == "mean" else p * (self.n / jnp.sum(present))
        mask = jnp.ones(self.cohort_size, bool) if present is None else present
        beside = getattr(sent.channel, "reduce_bookkeeping", None)
        marked = _summed(None, marked, p) if beside is None else beside(sent.parts.bookkeeping, marked, p, mask)
        return (reduce(sent.exchange, updates, p, mask), marked), p, total, present

    def _uneven(self, weights: Any) -> str:
        """Why the clients' replies must not count equally, or ""."""
        if self._repeats:
            return "a client may be in the cohort twice, and its reply then counts twice"
        equal = isinstance(weights, np.ndarray) and bool(np.all(weights == weights[0]))
        return "" if weights is self._weights or equal else "the method weighs the clients itself"

    def _encoded(
        self, kind: str, value: PerClient, name: str, around: Any, keys: ExchangeKeys | None, bookkeeping: Any,
        steady: bool = False, weights: Any = None,
    ) -> Encoded:  # fmt: skip
        """What clients send: with a channel, the encoded updates and the bookkeeping.

        `weights`: of the clients of the cohort, which they apply themselves in a secure sum.
        """
        if not isinstance(value, PerClient):
            raise TypeError(
                f"fed.{kind}: {name!r} must be a per-client value, as fed.map returns; got {kind_of(value)}."
            )
        self._check_cohort(value, kind)
        shapes = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape[1:], a.dtype), value.rows)
        parts = Parts(shapes, name, bookkeeping, around)
        updates = parts.split(shapes)[0]
        steady &= self.cohort_size == self.n and not (self._lossy or self._cohort or self._tracing.asynchronous)
        exchange, tracing = ChannelExchange(name, kind, updates, steady=steady), self._tracing
        first = tracing.exchanges.setdefault(name, exchange)
        channel = channels.chosen(tracing.channel, name)
        if channel is None and (self._attack is not None or self._corrects or tracing.asynchronous):
            channel = Plain()  # so that what acts on updates, as an attack does, finds them
        if channel is None or keys is None:
            return Encoded(value, exchange, None, parts)
        states = channel.init(exchange)
        if first.shapes != updates and jax.tree.leaves(states):
            raise ValueError(
                f"Exchanges must have different names if a channel has a state; got two exchanges {name!r} with values "
                "of different shapes. Rename one."
            )
        if hasattr(channel, "public"):
            exchange = exchange._replace(public=channel.public(self._server_state(channel, exchange)))
            tracing.exact += jax.tree.leaves(exchange.public)  # what `unpack` at the server computes with, too
        remembered = None if self._cohort or not tracing.threaded.client else tracing.threaded.client.get(name)
        fresh, plain = states[1], list[Any]()
        secure = getattr(channel, "secure", None)
        share = None if secure is None else self._shares_sent(name, weights)

        def encode(_: Client, key: Array, value: Any, state: Any, share: Any) -> Any:
            updates, marked = parts.at_client(value, above_least=hasattr(channel, "hide"))
            updates, state = channel.encode(exchange, updates, key, fresh if state is None else state)
            message = updates, marked
            if secure is not None:
                plain.append(secure.plain(name, message, parts.bookkeeping, self.cohort_size))
                message = secure.integers(plain[-1], message, share, jax.random.fold_in(key, 1))
            return message, state

        state = None if remembered is None else PerClient(remembered, self._cohort)
        both = self.map(encode, keys.public, value, state, share)
        sent, state = both.rows
        if remembered is not None:
            client = {**tracing.threaded.client, name: state}
            tracing.threaded = tracing.threaded._replace(client=client)
        encoded = PerClient(sent, self._cohort)
        if self._attack is not None and (secure is not None or (self._attack.alone and channels.compresses(channel))):
            raise ValueError(
                f"Faults: attack={self._attack!r} must be tried without compression and secure sums, because it "
                f"replaces numbers and not the message that the exchange {name!r} packs. Leave out one of the two."
            )
        if self._attack is not None and self._attack.alone:
            liars, attack = self._tracing.liars, self._attack
            lie = lambda c, key, value: attack.replace(value, jnp.asarray(liars)[c.id], key)
            encoded = self.map(lie, jax.random.fold_in(keys.public, 2), encoded)
        return Encoded(encoded, exchange, channel, parts, secure, plain[-1] if plain else None)

    def _shares_sent(self, name: str, weights: Array) -> PerClient:
        """Send each client its weight, relative to the largest one of the cohort."""
        if self._repeats:
            raise ValueError(
                f"rk.secure_sum needs cohorts with each client once, and the exchange {name!r} has one that is drawn "
                "with replacement. Choose another method or setting."
            )
        relative = weights / largest_of(weights)
        return PerClient(self._bind(primitives.scatter, self._ids, relative)[0], self._cohort)

    def _unpack(self, sent: Encoded) -> Callable[[Any], Any] | None:
        """What turns a client's message back into its updates and bookkeeping; None if nothing is compressed."""
        channel, exchange = sent.channel, sent.exchange
        if not channels.compresses(channel):
            return None
        state = self._server_state(channel, exchange)
        return lambda both: (channel.unpack(exchange, both[0], state), both[1])

    def _decoded(self, channel: Any, exchange: Any, total: Any, keys: Any) -> Any:
        """The result, decoded by the channel's server side, whose state is updated."""
        tracing = self._tracing
        result, state = channel.decode(exchange, total, keys.noise, self._server_state(channel, exchange))
        states = tracing.threaded.server or {}
        if exchange.name in states:
            tracing.threaded = tracing.threaded._replace(server={**states, exchange.name: state})
        return result

    def _server_state(self, channel: Any, exchange: Any) -> Any:
        """The state of the channel's server side for this exchange."""
        states = self._tracing.threaded.server or {}
        return states[exchange.name] if exchange.name in states else channel.init(exchange)[0]

    def _hidden(
        self, channel: Any, exchange: Any, parts: Parts, values: list[Any], keys: Any, whole: Array
    ) -> list[Any]:
        """The bookkeeping of a result as the channel leaves it: a private one adds noise.

        `whole`: the sum of the shares of all clients.
        """
        if not hasattr(channel, "hide") or not values:
            return values
        key, state = jax.random.fold_in(keys.noise, 1), self._server_state(channel, exchange)
        return channel.hide(exchange, parts.bookkeeping, values, key, state, whole)

    def _gathered(self, kind: str, name: str, sent: Encoded, keys: Any) -> tuple[Any, Any]:
        """The replies, and which clients replied; None if no reply can be lost."""
        if self._corrects:
            raise ValueError(uncorrected(name, "has its replies one by one"))
        leaves, structure = jax.tree.flatten(sent.value.rows)
        lossy, record = self._lossy, self._described(kind, name, sent)
        mask = self._mask(record, keys)
        rows = self._bind(primitives.gather, self._ids, *mask, *leaves, exchange=record, lossy=lossy)
        present = self._noted(rows.pop()) if lossy else None
        replies = jax.tree.unflatten(structure, rows)
        if (unpack := self._unpack(sent)) is not None:
            replies = jax.vmap(unpack)(replies)
        if self._attack is not None and not self._attack.alone:
            liars, key = jnp.asarray(self._tracing.liars)[self._ids], jax.random.fold_in(keys.public, 2)
            replies = self._attack.replace_all(replies, self._ids, liars, present, key)
        return replies, present

    def _described(self, kind: str, name: str, sent: Encoded) -> Exchange:
        """The ledger's record of an exchange."""
        everyone = self._cohort and self._drawn is None and self.cohort_size == self.n
        return sent.described(kind, name)._replace(clients=self.n if everyone else None)

    def _check_cohort(self, value: Any, what: str) -> None:
        if isinstance(value, PerClient) and value.cohort != self._cohort:
            raise ValueError(
                f"fed.{what} must be given a value of its own cohort; got one of another. The round's own "
                "cohort and one of `resample` or `everyone` can't use each other's values."
            )

    @property
    def _attack(self) -> Any:
        """What some clients send instead of their replies; None: all are honest."""
        return None if self._tracing.faults is None else self._tracing.faults.attack

    @property
    def _lossy(self) -> bool:
        """Whether some clients of `ids` may have no reply."""
        return self._tracing.faults is not None or self._drawn is not None

    def _mask(self, record: Exchange, keys: Any) -> list[Array]:
        """Which replies arrive in time; empty if no reply can be lost. With a clock, the server waits for them."""
        present, watch, faults = self._present(keys) if self._lossy else None, self._tracing.watch, self._tracing.faults
        if watch is not None:
            self._chances(record)
            seconds = watch.exchange(self._cohort, self._ids, record.reply_bytes)
            key = None if keys is None else jax.random.fold_in(keys.chance, 1)
            late = getattr(faults, "deadline", None), getattr(faults, "first", None)
            present, waited = heard(seconds, present, *late, key)
            self._tracing.waited(waited)
        return [] if present is None else [present]

    @property
    def _corrects(self) -> bool:
        """Whether weights are divided by the clients' chances to be heard."""
        return self._tracing.faults is not None and self._tracing.faults.correct

    def _corrected(self, p: Array, name: str, sent: Encoded, wrong: str) -> tuple[Array, Array]:
        """The weights, divided by the clients' chances to be heard, and scaled to add up to 1 on average.

        Dividing by the sum of those that are heard instead would leave a bias. `wrong`: why this is not possible.
        """
        if wrong or self._repeats or sent.secure is not None:
            raise ValueError(uncorrected(name, wrong or "is of a cohort or a channel with chances of its own"))
        watch, chance = self._tracing.watch, self._chances(self._described("mean", name, sent))
        total = jnp.sum(self._weights) * (self.cohort_size / self.n)
        if watch is not None and chance is not None:
            p = p / watch.of_turn(chance)[self._ids].astype(p.dtype)
        return p / total, total

    def _chances(self, record: Exchange) -> np.ndarray | None:
        """Each client's chance to be heard in time, with an axis for each loop around the exchange.

        None: it depends on what is drawn during the run. Raise ValueError if too few clients can ever reply in time,
        or if a client never can whose share is to be corrected.
        """
        watch, faults = self._tracing.watch, self._tracing.faults
        if watch is None or faults is None or not self._tracing.waits_for_some or not watch.complete:
            return None
        times = None if self._repeats else watch.times(self._cohort, record.reply_bytes)
        if times is None:
            if faults.correct:
                raise ValueError(
                    "faults: correct needs to know before the run how long clients take, but how much they compute for "
                    f"the exchange {record.name!r} is drawn later. Leave correct out, or give fixed numbers of steps."
                )
            return None
        names, asked = self._clients.names, self.cohort_size
        chance, unheard = checked_chances(times, asked, faults, record.name, names)
        self._tracing.unheard.update(unheard)
        return chance

    def _present(self, keys: Any) -> Array:
        """Draw whose replies are not lost, among the clients that are in the cohort."""
        faults, drawn = self._tracing.faults, self._drawn
        if faults is None:
            assert drawn is not None
            return drawn
        arrived = faults.present(jax.random.fold_in(keys.chance, 0), self.cohort_size)
        return arrived if drawn is None else arrived & drawn

    def _noted(self, present: Array) -> Array:
        """Note who replied in the round's report, and return it."""
        before, replies = self._tracing.threaded, jnp.sum(present, dtype=jnp.int32)
        stayed = before.stayed if self._cohort else before.stayed & present
        asked = self.cohort_size if self._drawn is None else jnp.sum(self._drawn, dtype=jnp.int32)
        missing, least = before.missing + asked - replies, jnp.minimum(before.least, replies)
        self._tracing.threaded = before._replace(missing=missing, least=least, stayed=stayed)
        return present


def _summed(exchange: ChannelExchange | None, rows: Any, weights: Array, present: Any = None) -> Any:
    """The weighted sum, as a channel's `reduce`."""
    return jax.tree.map(lambda a: weighted_sum(weights, a), rows)
