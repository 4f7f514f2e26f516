"""One phase of a run (the start, a round or an evaluation), interpreted at the coordinator.

The server's equations are computed here. Clients' functions are collected, and sent to the sites with the next exchange
that needs them.
"""

import weakref
from collections.abc import Callable, Iterator
from functools import cached_property, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from rookery.base import jaxprs
from rookery.base.compat import Literal
from rookery.base.jaxprs import is_key
from rookery.engines import engine
from rookery.engines.federation import wire
from rookery.engines.federation.dataflow import secure_times
from rookery.engines.federation.links import Links, Reply, Request, SiteError, needed
from rookery.engines.federation.replies import is_forgotten, unusable_values, wrong_arrays, wrong_finish, wrong_work
from rookery.engines.federation.site import NO_EXCHANGE, client_program
from rookery.engines.federation.store import Moment
from rookery.engines.federation.sums import ExactSum, ModularSum
from rookery.engines.federation.values import (
    Cohort,
    Computed,
    Mapped,
    Remembered,
    Scattered,
    ServerValue,
    Wanted,
    arrays_for,
    client_keys,
    closure,
    reference,
    sent_array,
    shape_of,
)
from rookery.language import ledger
from rookery.language.ledger import Amounts, Entries, Entry
from rookery.plan import calls, costs
from rookery.plan.calls import Read, Visitor
from rookery.plan.trace import Made, Plan

_TRIES = 5  # of a secure sum, if sites are restarted meanwhile
_UNKNOWN = 8  # exchanges for which sites agree on keys at once, if the run draws their number


class Phase(Visitor[Any]):
    """One phase.

    Arguments:
        traced: the job and its plans.
        plan: the plan of this phase.
        moment: which phase it is.
        ids: the cohort.
        run, links: the run's name, and the way to the sites.
        numbers: numbers for values and functions, each used once in a run.
        compiled: compiled(step) -> the server's equations as a compiled function.

    Attributes:
        sent, received: bytes of arrays in requests and replies.
        lost: the clients that did not reply.
        wrote: the clients that have written what they remember.
        finite: for each site that wrote, whether the leaves of its memory are finite.
        blamed: what was wrong with a site's reply, or why there was none, by the site's name.
    """

    def __init__(
        self,
        traced: engine.Traced,
        plan: Plan,
        moment: Moment,
        ids: ServerValue,
        run: str,
        links: Links,
        numbers: Iterator[int],
        compiled: Callable[[calls.ServerWork], Callable[..., Any]],
    ) -> None:
        self._job, self._plan, self._moment = traced.job, plan, moment
        self._run, self._links, self._numbers, self._compiled = run, links, numbers, compiled
        self._cohorts: dict[int, tuple[ServerValue, Cohort]] = {}
        self._alive: weakref.WeakSet[Mapped] = weakref.WeakSet()
        self._sent: weakref.WeakSet[ServerValue] = weakref.WeakSet()
        self._work: dict[int, dict[int, list[int]]] = {}  # by function and client
        self._entries: Entries = {}
        self._center = Cohort([])
        self._everyone = self._cohort(ids)
        self._seeded = links.opening is None and self._job.noise_seed is not None  # with sites in this process only
        faults = self._job.faults
        # The replies that an exchange needs; None: all. The start needs all clients.
        self._least = None if faults is None or moment[0] == 0 else faults.minimum
        self.sent = self.received = 0
        self.lost: set[int] = set()
        self.wrote: set[int] = set()
        self.finite: list[list[bool]] = []
        self.blamed: dict[str, str] = {}

    def literal(self, literal: Literal) -> ServerValue:
        """See `Visitor`."""
        return ServerValue(jaxprs.literal(literal))

    def server(self, step: calls.ServerWork, read: Read) -> list[ServerValue]:
        """See `Visitor`."""
        return [ServerValue(a) for a in self._compiled(step)(*(value.array for value in read(step.operands)))]

    def map(self, call: calls.MapCall, read: Read) -> list[Any]:
        """See `Visitor`. The function goes out with the next exchange of its cohort."""
        ids, key, sent = read(call.ids), read(call.key), read(call.sent)
        cohort = self._cohort(ids)
        clients = np.asarray(cohort.ids, np.int32)
        keys = None if key is None else np.asarray(client_keys(key.array, clients))
        mapped = self._mapped(call, sent, keys, read(call.local))
        if self._seeded and call.noise is not None:
            mapped.noise = np.asarray(client_keys(read(call.noise).array, clients))
        cohort.pending.append(mapped)
        cohort.down += self._new_bytes(cohort, sent) + (0 if key is None else 8)
        return [Computed(mapped, i) for i in range(len(call.outputs))]

    def scatter(self, call: calls.ScatterCall, read: Read) -> list[Any]:
        """See `Visitor`."""
        rows = np.asarray(read(call.rows).array)
        self._cohort(read(call.ids)).down += rows.nbytes // max(len(rows), 1)
        return [Scattered(rows)]

    def reduce(self, call: calls.ReduceCall, read: Read) -> list[ServerValue]:
        """See `Visitor`. Sum w_j v_j over the clients present, in float32 or better, as the replies come."""
        if call.exchange.secure:
            return self._sum_securely(call, read)
        cohort, weights = self._cohort(read(call.ids)), np.asarray(read(call.weights).array)
        there, (sums, unpacked) = self._there(cohort, call, read), self._sums(call, read, len(cohort.ids))
        places = cohort.places

        def take(client: int, reply: Reply) -> Reply:
            counting = [place for place in places[client] if there[place] and weights[place] != 0]
            leaves = unpacked(reply.arrays) if counting else []
            for place in counting:
                for total, leaf in zip(sums, leaves, strict=True):
                    total.add(weights[place], leaf)
            return Reply(reply.header, [])

        _, present = self._exchange(call, read, take)
        return self._received(call, [total.result() for total in sums], present)

    def _sums(self, call: calls.ReduceCall, read: Read, count: int) -> tuple[list[ExactSum], Callable[[Any], Any]]:
        """Return empty sums of at most `count` replies, and unpacked(arrays) -> the arrays to add of a reply."""
        if (step := call.unpack) is None:
            shapes, unpacked = list(map(shape_of, read(call.rows))), lambda arrays: arrays
        else:
            shapes = [v.aval for v in step.outputs]
            unpack = partial(self._compiled(step), *(value.array for value in read(step.operands)))
            unpacked = lambda arrays: list(map(np.asarray, unpack(*arrays)))
        return [ExactSum(s.shape, s.dtype, count) for s in shapes], unpacked

    def gather(self, call: calls.GatherCall, read: Read) -> list[ServerValue]:
        """See `Visitor`."""
        replies, present = self._exchange(call, read)
        missing = [np.zeros(s.shape, s.dtype) for s in map(shape_of, read(call.rows))]
        each = [missing if reply is None else reply for reply in replies]
        return self._received(call, [np.stack(leaf) for leaf in zip(*each, strict=True)], present)

    def center(self, call: calls.CenterCall, read: Read) -> list[ServerValue]:
        """See `Visitor`."""
        exchange, sent, key = call.exchange, read(call.sent), read(call.key)
        entry = self._entries.setdefault(exchange, Entry())
        if call.holder is not None:
            entry.add(Entry(1, exchange.reply_bytes, self._new_bytes(self._center, sent) + (0 if key is None else 8)))
            keys = None if key is None else np.asarray(jax.random.key_data(key.array))[None]
            mapped = self._mapped(call, sent, keys, [])
            if self._seeded and call.noise is not None:
                mapped.noise = np.asarray(jax.random.key_data(read(call.noise).array))[None]
            wanted = Wanted(call.number, [Computed(mapped, i) for i in range(len(mapped.shapes))])
            self._center.ids = [call.holder]
            replies = self._ask_cohort(self._center, [mapped], wanted, exchange, None)
            return [ServerValue(jnp.asarray(a)) for a in replies[call.holder]]
        clients = self._job.clients
        data, number = jax.tree.leaves(clients.at_center()), jnp.int32(clients.n)
        key, noise, levels = (None if v is None else v.array for v in (key, read(call.noise), read(call.levels)))
        arguments = call.arguments([v.array for v in sent], data, number, key, (), noise, levels)
        *out, counts = client_program(self._plan, call)(*arguments)
        self._work[next(self._numbers)] = {clients.n: ledger.as_integers(counts)}
        return [ServerValue(a) for a in out]

    def loop(self, call: calls.LoopCall, read: Read) -> list[Any]:
        """See `Visitor`. A carried value is new to a site in every turn."""
        count = call.length if call.length is not None else int(read(call.count).array)
        fixed, carry = read(call.fixed), read(call.carry)
        renewed = lambda value: ServerValue(value.array) if isinstance(value, ServerValue) else value
        for i in range(count):
            inputs = [*fixed, ServerValue(jnp.int32(i)), *map(renewed, carry)]
            carry = []  # so that sites need not hold it while the body runs
            carry = self.visit(call.body, inputs)
        return carry

    def finish(self, made: Made) -> None:
        """Have the sites that missed nothing write what they remember."""
        cohort, is_leaf = self._everyone, lambda value: isinstance(value, Computed | Remembered)
        leaves = {kind: jax.tree.leaves(getattr(made.carry, kind), is_leaf=is_leaf) for kind in ("memory", "client")}
        changed = any(ref != Remembered(kind, i) for kind, refs in leaves.items() for i, ref in enumerate(refs))
        if not (changed or cohort.pending):
            return
        if cohort.down or changed:
            self._entries.setdefault(costs.FINISH, Entry()).add(Entry(0, 0, cohort.down))
        stayed = np.ones(len(cohort.ids), bool) if made.stayed is None else np.array(made.stayed)
        maps, cohort.pending, cohort.down = cohort.pending, [], 0
        requests: dict[int, Request] = {}
        size = 0
        for who, refs in ((stayed, leaves), (~stayed, {})):  # clients that missed an exchange compute, but do not write
            places = {cohort.ids[j]: j for j in np.flatnonzero(who).tolist()}
            some, count = self._requests(cohort, maps, Wanted(NO_EXCHANGE, [], refs), places)
            requests, size = requests | some, max(size, count)
        real = len(engine.real_leaves(self._plan.made.carry.memory))
        replies = self._ask(requests, size, self._least, lambda site, reply: wrong_finish(reply, real))
        self.lost |= set(requests) - set(replies)
        self.wrote = {client for client in replies if stayed[cohort.ids.index(client)]}

    def amounts(self, made: Made) -> Amounts:
        """Return what the phase has cost."""
        totals, busiest = [0] * len(ledger.WORK), 0
        for by_client in self._work.values():
            counts = list(by_client.values())
            totals = [total + sum(count[i] for count in counts) for i, total in enumerate(totals)]
            busiest += max(count[0] + count[1] for count in counts)
        return Amounts(self._entries, [*totals, busiest], 0 if made.missing is None else int(made.missing))

    def _cohort(self, ids: ServerValue) -> Cohort:
        if id(ids) not in self._cohorts:
            self._cohorts[id(ids)] = (ids, Cohort(np.asarray(ids.array).tolist()))
        return self._cohorts[id(ids)][1]

    def _mapped(self, call: calls.WorkCall, sent: list[ServerValue], keys: Any, local: list[Any]) -> Mapped:
        shapes = [jax.ShapeDtypeStruct(aval.shape, aval.dtype) for aval in call.reply]
        mapped = Mapped(next(self._numbers), call.number, sent, keys, local, shapes)
        self._alive.add(mapped)
        return mapped

    def _new_bytes(self, cohort: Cohort, sent: list[ServerValue]) -> int:
        """Return the bytes of the values that the cohort does not have yet, and count these as sent."""
        count = 0
        for value in sent:
            if value.constant < 0 and value.number not in cohort.has:
                if value.number < 0:
                    value.number = next(self._numbers)
                self._sent.add(value)
                cohort.has.add(value.number)
                count += ledger.nbytes([jax.typeof(value.array)])
        return count

    def _there(self, cohort: Cohort, call: calls.ExchangeCall, read: Read) -> np.ndarray:
        """Return which replies count if they arrive."""
        present = read(call.present)
        return np.ones(len(cohort.ids), bool) if present is None else np.array(present.array)

    def _exchange(
        self, call: calls.ExchangeCall, read: Read, take: Callable[[int, Reply], Reply] = lambda client, reply: reply
    ) -> tuple[list[Any], np.ndarray]:
        """Return each client's reply, as `take` leaves it, or None, and which clients replied."""
        cohort, exchange = self._cohort(read(call.ids)), call.exchange
        there = self._there(cohort, call, read)
        self._entries.setdefault(exchange, Entry()).add(Entry(1, exchange.reply_bytes, cohort.down))
        maps, cohort.pending, cohort.down = cohort.pending, [], 0
        wanted = Wanted(call.number, read(call.rows))
        replies = self._ask_cohort(cohort, maps, wanted, exchange, self._least, take)
        there &= [client in replies for client in cohort.ids]
        each = zip(cohort.ids, there, strict=True)
        return [replies[client] if is_there else None for client, is_there in each], there

    def _sum_securely(self, call: calls.ReduceCall, read: Read) -> list[ServerValue]:
        """Sum integers that the sites hide under masks. With too few replies the sum is zero, and nobody replied."""
        cohort, exchange = self._cohort(read(call.ids)), call.exchange
        shapes, there = list(map(shape_of, read(call.rows))), self._there(cohort, call, read)
        clients = tuple(cohort.ids)
        self._entries.setdefault(exchange, Entry()).add(Entry(1, exchange.reply_bytes, cohort.down))
        maps, cohort.pending, cohort.down = cohort.pending, [], 0
        for _ in range(_TRIES):
            total, slot, forgotten = ModularSum(shapes), self._summing.slot(clients, exchange.secure), set[int]()
            if slot is None:
                why: str | None = f"needs {exchange.secure} sites that agree on keys"
                break

            def take(client: int, reply: Reply, total: ModularSum = total, forgotten: set[int] = forgotten) -> Reply:
                if is_forgotten(reply):
                    forgotten.add(client)
                elif there[clients.index(client)]:
                    total.add(reply.arrays)
                return Reply(reply.header, [])

            wanted = Wanted(call.number, read(call.rows), masks=slot.fields)
            least = None if self._least is None else max(self._least, exchange.secure)
            replies = self._ask_cohort(cohort, maps, wanted, exchange, least, take)
            if forgotten:  # a site was restarted, and the run needs all
                self._summing.renew(clients)
                why = "needs sites that keep their keys for an exchange"
                continue
            added = [client for client in sorted(replies) if there[clients.index(client)]]
            why = self._summing.unmask(slot, call.number, added, total.total)
            if why is None:
                return self._received(call, total.result(), np.isin(clients, added))
            break
        if self._least is None:
            raise SiteError(f"The secure sum {exchange.name!r} {why}.")
        self.blamed[f"the secure sum {exchange.name!r}"] = str(why)
        return self._received(call, ModularSum(shapes).result(), np.zeros(len(clients), bool))

    @cached_property
    def _summing(self) -> Any:
        from rookery.engines.federation.summing import Summing  # needs cryptography

        slots = sum(times or _UNKNOWN for times in secure_times(self._plan).values())
        return Summing(self._run, self._moment, self._links, slots, self._least)

    def _received(self, call: calls.ExchangeCall, arrays: list[Any], present: np.ndarray) -> list[ServerValue]:
        last = [] if call.present is None else [present]
        return [ServerValue(jnp.asarray(a)) for a in (*arrays, *last)]

    def _ask_cohort(
        self, cohort: Cohort, maps: list[Mapped], wanted: Wanted, exchange: Any, least: int | None,
        take: Callable[[int, Reply], Reply] = lambda client, reply: reply,
    ) -> dict[int, list[Any]]:  # fmt: skip
        """Return the replies that arrived, by client, as `take` leaves them."""
        asked = cohort.ids if wanted.masks is None else wanted.masks["among"]
        places = {client: found[0] for client, found in cohort.places.items() if client in asked}
        requests, size = self._requests(cohort, maps, wanted, places)
        shapes = [(s.shape, np.dtype(np.uint32 if is_key(s) else s.dtype)) for s in map(shape_of, wanted.reply)]

        def wrong(site: int, reply: Reply) -> str | None:
            if wanted.masks is not None and is_forgotten(reply):
                return None if least is None else "has been restarted, and has no keys for this round's sums"
            malformed = wrong_arrays(exchange.name, reply, shapes)
            if malformed is not None or not self._links.finite:
                return malformed
            unusable = unusable_values(exchange.name, reply)
            if unusable is not None:
                self.blamed[self._links.name(site)] = unusable
            return None if least is None else unusable

        replies = self._ask(requests, size, least, wrong, take)
        self.received += exchange.reply_bytes * len(replies)
        self.lost |= set(cohort.ids) - set(replies)
        cohort.delivered.update(v.number for m in maps for v in m.sent)
        return {client: reply.arrays for client, reply in replies.items()}

    def _ask(
        self, requests: dict[int, Request], size: int, least: int | None, wrong: Callable[[int, Reply], str | None],
        take: Callable[[int, Reply], Reply] = lambda site, reply: reply,
    ) -> dict[int, Reply]:  # fmt: skip
        """Ask, and note the work that sites say they have done; `size` is the bytes of arrays in a request."""
        links = self._links
        self.sent += size * len(requests)
        try:
            check = lambda site, reply: wrong_work(reply) or wrong(site, reply)
            replies = links.ask(requests, least, check, take=take)
        except SiteError as error:
            raise needed(error) from error
        for site in set(requests) - set(replies):
            self.blamed.setdefault(links.name(site), links.records[site].why or "did not reply")
        for client, (header, _) in replies.items():
            for number, counts in header["work"]:
                self._work.setdefault(number, {})[client] = counts
            self.finite += [header["finite"]] if "finite" in header else []
        return replies

    def _requests(
        self, cohort: Cohort, maps: list[Mapped], wanted: Wanted, places: dict[int, int]
    ) -> tuple[dict[int, Request], int]:
        """Return a request for each client, with the values that it lacks, and the bytes of the arrays in one request.

        `places`: the place in the cohort of each client.
        """
        values = {v.number: v for m in maps for v in m.sent if v.constant < 0 and v.number not in cohort.delivered}
        number = self._links.number()
        header, shared = self._header(maps, wanted, values, number)
        last = [arrays_for(maps, place) for place in places.values()]
        seeded = sum(m.noise[0].nbytes for m in maps if m.noise is not None)  # which no real run sends
        size = sum(a.nbytes for a in (*shared, *last[0])) - seeded if last else 0
        messages = zip(places.items(), wire.encode_each(header, shared, last) if last else (), strict=True)
        whole = lambda place: partial(self._whole, maps, wanted, place)
        return {client: Request(number, message, whole(place)) for (client, place), message in messages}, size

    def _whole(self, maps: list[Mapped], wanted: Wanted, place: int, number: int) -> wire.Message:
        """Return the request for a site that has forgotten everything."""
        refs = [ref for refs in (wanted.reply, *wanted.remember.values()) for ref in refs]
        every = closure([*maps, *(ref.mapped for ref in refs if isinstance(ref, Computed))])
        values = {v.number: v for m in every for v in m.sent if v.constant < 0}
        header, shared = self._header(every, wanted, values, number)
        return wire.encode_each(header, shared, [arrays_for(every, place)])[0]

    def _header(
        self, maps: list[Mapped], wanted: Wanted, values: dict[int, ServerValue], number: int
    ) -> tuple[dict[str, Any], list[Any]]:
        described = []
        for m in maps:
            refs = [["c", v.constant] if v.constant >= 0 else v.number for v in m.sent]
            seeded = [] if m.noise is None else [True]
            described.append([m.number, m.call, refs, m.keys is not None, list(map(reference, m.local)), *seeded])
        header = {
            "do": "work",
            "number": number,
            "run": self._run,
            "phase": self._moment[0],
            "round": self._moment[1],
            "maps": described,
            "values": list(values),
            "keep": [m.number for m in self._alive],
            "held": [v.number for v in self._sent],
            "call": wanted.call,
            "reply": list(map(reference, wanted.reply)),
            **{kind: list(map(reference, refs)) for kind, refs in wanted.remember.items()},
            **({} if wanted.masks is None else {"masks": wanted.masks}),
        }
        return header, [sent_array(v.array) for v in values.values()]
