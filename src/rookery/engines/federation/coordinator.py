"""The coordinator: it runs the server's part of the plan, and asks the sites for the clients'."""

import math
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from rookery.base import jaxprs
from rookery.base.compat import Literal
from rookery.base.printable import printable
from rookery.engines import engine
from rookery.engines.engine import PROGRAMS
from rookery.engines.federation import wire
from rookery.engines.federation.links import Links, Reply, Request, SiteError
from rookery.engines.federation.site import client_program
from rookery.language import ledger
from rookery.language.ledger import Amounts, Entries, Entry
from rookery.language.primitives import accumulator
from rookery.plan import costs
from rookery.plan.calls import (
    CenterCall,
    GatherCall,
    LoopCall,
    MapCall,
    Read,
    ReduceCall,
    ScatterCall,
    ServerWork,
    Visitor,
    WorkCall,
)
from rookery.plan.trace import Carry, Given, Made, Plan


@dataclass(eq=False)
class Value:
    """A value of the server's. That it is this object, and not another of the same numbers, is what a site has."""

    array: Any
    number: int = -1  # once it is sent
    constant: int = -1  # of the plan: whoever has traced it has them


@dataclass(eq=False)
class Mapped:
    """A client's function, to be computed by the cohort."""

    number: int
    call: int  # of the plan
    sent: list[Value]
    keys: Any  # one for each of the cohort, or None
    own: list[Any]  # per-client values
    shapes: list[Any]


@dataclass(frozen=True)
class Own:
    """A value that the sites have computed and keep."""

    mapped: Mapped
    output: int


@dataclass(frozen=True)
class Kept:
    """What a site remembers: a leaf of it."""

    kind: str  # "memory" or "client", the channel's
    leaf: int


@dataclass(eq=False)
class Rows:
    """A value for each client that the server has sent out."""

    rows: Any


@dataclass(eq=False)
class Cohort:
    """Those who are asked: their numbers, what they have been sent, and what they have yet to compute."""

    ids: list[int]
    has: set[int] = field(default_factory=set)
    pending: list[Mapped] = field(default_factory=list)
    down: int = 0  # bytes to be sent with the next request
    delivered: set[int] = field(default_factory=set)  # the values that have gone out with a request


FINISH = -1  # what a request calls for that calls for no exchange


class Wanted(NamedTuple):
    """What a request asks for: the reply to an exchange of the plan, or that something is remembered."""

    call: int
    reply: list[Any]
    kept: dict[str, list[Any]] = {}  # noqa: RUF012


class Coordinator:
    """One run's server."""

    def __init__(self, traced: engine.Traced, run: str, links: Links) -> None:
        self._traced, self.run, self.links = traced, run, links
        self._numbers = iter(range(10**18))
        self._compiled: dict[int, Any] = {}
        self.sent = self.received = 0  # bytes of arrays, as they went over the wire
        self.lost: set[int] = set()  # who did not reply in the last phase
        self.wrote: set[int] = set()  # who has written what it remembers, in the last phase
        self.memory_finite: list[bool] = []  # for each leaf of what the sites remember, in the last phase
        self.blamed: dict[str, str] = {}  # who sent something wrong, or nothing, in the last phase, and what

    def start(self) -> tuple[Made, Amounts]:
        """The algorithm's `init`."""
        traced = self._traced
        keys = engine.start_keys(traced.seed, traced.job.clients.n)
        return self._phase(traced.start, (0, 0), traced.job.start, keys, traced.noise)

    def round(self, t: int, state: Any, server: Any, noise: Any) -> tuple[Made, Amounts]:
        """Round t, counted from 0."""
        self.links.rounds = t
        traced, job = self._traced, self._traced.job
        keys = _round_keys(traced.seed, t, job.clients.n, job.cohort)
        before = traced.round.given.carry
        kept = lambda kind, value: _numbered(kind, value)
        carry = Carry(state, kept("memory", before.memory), kept("client", before.client), server, noise)
        return self._phase(traced.round, (1, t), carry, keys)

    def measure(self, t: int, state: Any) -> dict[str, Any]:
        """What each client makes of x, y and its memory after t rounds: rows by name."""
        traced = self._traced
        keys = engine.measure_keys(traced.seed, t, traced.job.clients.n)
        memory = _numbered("memory", traced.measure.given.carry.memory)
        made, _ = self._phase(traced.measure, (2, t), Carry((state.x, state.y), memory), keys)
        return made.carry.state

    def _phase(
        self, traced: Plan, moment: tuple[int, int], carry: Any, keys: engine.RoundKeys, noise: Any = ()
    ) -> tuple[Made, Amounts]:
        t = np.int32(moment[1])
        self.blamed = {}
        ids = Value(keys.ids)
        weights = self._traced.job.clients.weights
        given = Given(carry, self._traced.hyper, t, ids, weights, keys.key, keys.chance, noise)
        leaves = jax.tree.leaves(given, is_leaf=lambda v: isinstance(v, Kept | Value))
        phase = _Phase(self, traced, moment, ids)
        consts = [Value(c, constant=i) for i, c in enumerate(traced.consts)]
        inputs = [v if isinstance(v, Kept | Value) else Value(v) for v in leaves]
        out = phase.visit(traced.body, [*consts, *inputs])
        structure = jax.tree.structure(traced.made)
        made: Made = jax.tree.unflatten(structure, [v.array if isinstance(v, Value) else v for v in out])
        phase.finish(made)
        self.lost, self.wrote = phase.lost, phase.wrote
        if moment[0] == 2:
            return made, phase.amounts(made)
        self.memory_finite = [all(leaf) for leaf in zip(*phase.finite, strict=True)]
        return made, phase.amounts(made)

    def compiled(self, step: ServerWork) -> Callable[..., list[Any]]:
        """The server's equations between two exchanges, compiled once."""
        held = self._compiled.get(id(step.jaxpr))
        if held is None:
            jaxpr = step.jaxpr
            make = lambda: jax.jit(lambda *a: jaxprs.run(jaxpr, *a))
            held = self._compiled[id(jaxpr)] = PROGRAMS.find(("server", jaxprs.identified(jaxpr)), make)
        return held

    def next_number(self) -> int:
        """A number that nothing else in this run has."""
        return next(self._numbers)

    def ask_to_save(self, asked: dict[str, Any]) -> dict[int, Any] | None:
        """Ask all sites for their checkpoints: see `Site`. The rounds that each has saved; None if not all replied,
        and the run has faults."""
        links, n = self.links, self._traced.job.clients.n
        number = links.number()
        message = wire.encode({"do": "save", "run": self.run, "number": number, **asked}, [])
        lossy = self._traced.job.faults is not None
        patience, links.patience = links.patience, 0.0 if lossy else links.patience
        try:
            asked_of = {i: Request(number, message) for i in range(n)}
            found = links.ask(asked_of, n if lossy else None, lambda site, reply: _no_rounds(reply))
        except SiteError as error:
            raise _needed(error) from error
        finally:
            links.patience = patience
        for site, reply in found.items():
            if "why" in reply.header:
                raise ValueError(f"{links.name(site)}: {printable(reply.header['why'])}")
        rounds = lambda told: range(told["rounds"][0], 10**9) if told["onwards"] and told["rounds"] else told["rounds"]
        return {i: rounds(found[i].header) for i in range(n)} if len(found) == n else None

    def close(self, why: str = "") -> None:
        """Tell sites on a network that the run is over, and let them go."""
        links = self.links
        if links.opening is not None:
            links.opening, links.patience, links.deadline = None, 0.0, 5.0
            links.tell = lambda text: None  # that they leave
            number = links.number()
            message = wire.encode({"do": "finish", "number": number, "run": self.run, "why": why}, [])
            there = [i for i in range(self._traced.job.clients.n) if links.records[i].state != "gone"]
            for i in there:  # who has refused is told, too
                links.records[i].becomes("connected")
            links.ask({i: Request(number, message) for i in there}, least=0)
        links.transport.close(why)


def _needed(error: SiteError) -> RuntimeError:
    """A site without which the run can't go on."""
    away = " and the run has no faults=rk.Faults(...)." if "did not answer" in str(error) else ""
    return RuntimeError(f"{error},{away}" if away else str(error))


@partial(jax.jit, static_argnums=(2, 3))
def _round_keys(seed: Any, t: Any, n: int, cohort: int) -> engine.RoundKeys:
    return engine.round_keys(seed, t, n, cohort)


@jax.jit
def _client_keys(key: Any, ids: Any) -> Any:
    return jax.random.key_data(jax.vmap(lambda i: jax.random.fold_in(key, i))(ids))


def _numbered(kind: str, value: Any) -> Any:
    leaves, structure = jax.tree.flatten(value)
    return jax.tree.unflatten(structure, [Kept(kind, i) for i in range(len(leaves))])


class _Phase(Visitor[Any]):
    """`init` or one round, as it is interpreted."""

    def __init__(self, coordinator: Coordinator, traced: Plan, moment: tuple[int, int], ids: Value) -> None:
        self._coordinator, self._plan, self._moment = coordinator, traced, moment
        self._cohorts: dict[int, tuple[Value, Cohort]] = {}
        self._alive: weakref.WeakSet[Mapped] = weakref.WeakSet()
        self._sent: weakref.WeakSet[Value] = weakref.WeakSet()
        self._work: dict[int, dict[int, list[int]]] = {}  # by map and client
        self._entries: Entries = {}
        self.finite: list[list[bool]] = []  # what sites say of their memory
        self._center = Cohort([])
        self._own = self._cohort(ids)
        faults = coordinator._traced.job.faults
        # The replies that an exchange needs; None: all. The start reaches everybody.
        self._least = None if faults is None or moment[0] == 0 else faults.minimum
        self.lost: set[int] = set()
        self.wrote: set[int] = set()

    def literal(self, literal: Literal) -> Value:
        """See `Visitor`."""
        return Value(jaxprs.literal(literal))

    def server(self, step: ServerWork, read: Read) -> list[Value]:
        """See `Visitor`."""
        out = self._coordinator.compiled(step)(*(value.array for value in read(step.operands)))
        return [Value(array) for array in out]

    def map(self, call: MapCall, read: Read) -> list[Any]:
        """See `Visitor`. The function goes out with the next exchange of its cohort."""
        ids, key, sent = read(call.ids), read(call.key), read(call.sent)
        keys = None if key is None else np.asarray(_client_keys(key.array, ids.array))
        cohort, mapped = self._cohort(ids), self._mapped(call, sent, keys, read(call.local))
        cohort.pending.append(mapped)
        cohort.down += self._new_bytes(cohort, sent) + (0 if key is None else 8)
        return [Own(mapped, i) for i in range(len(call.outputs))]

    def _mapped(self, call: WorkCall, sent: list[Value], keys: Any, local: list[Any]) -> Mapped:
        shapes = [jax.ShapeDtypeStruct(aval.shape, aval.dtype) for aval in call.reply]
        mapped = Mapped(self._coordinator.next_number(), call.number, sent, keys, local, shapes)
        self._alive.add(mapped)
        return mapped

    def scatter(self, call: ScatterCall, read: Read) -> list[Any]:
        """See `Visitor`."""
        rows = np.asarray(read(call.rows).array)
        self._cohort(read(call.ids)).down += rows.nbytes // max(len(rows), 1)
        return [Rows(rows)]

    def reduce(self, call: ReduceCall, read: Read) -> list[Value]:
        """See `Visitor`."""
        replies, present = self._exchange(call, read)
        sums = _weighted(np.asarray(read(call.weights).array), read(call.rows), replies, present)
        return self._received(call, sums, present)

    def gather(self, call: GatherCall, read: Read) -> list[Value]:
        """See `Visitor`."""
        replies, present = self._exchange(call, read)
        missing = [np.zeros(s.shape, s.dtype) for s in map(_shape, read(call.rows))]
        each = [missing if reply is None else reply for reply in replies]
        return self._received(call, [np.stack(leaf) for leaf in zip(*each, strict=True)], present)

    def _received(self, call: ReduceCall | GatherCall, arrays: list[Any], present: np.ndarray) -> list[Value]:
        also = [] if call.present is None else [present]
        return [Value(jnp.asarray(a)) for a in (*arrays, *also)]

    def _cohort(self, ids: Value) -> Cohort:
        if id(ids) not in self._cohorts:
            self._cohorts[id(ids)] = (ids, Cohort(np.asarray(ids.array).tolist()))
        return self._cohorts[id(ids)][1]

    def _new_bytes(self, cohort: Cohort, sent: list[Value]) -> int:
        """The bytes of those of the values that the cohort has not got; they count as sent."""
        count = 0
        for value in sent:
            if value.constant < 0 and value.number not in cohort.has:
                if value.number < 0:
                    value.number = self._coordinator.next_number()
                self._sent.add(value)
                cohort.has.add(value.number)
                count += ledger.nbytes([jax.typeof(value.array)])
        return count

    def _exchange(self, call: ReduceCall | GatherCall, read: Read) -> tuple[list[Any], np.ndarray]:
        """Each client's reply, or None, and who replied."""
        cohort, exchange, present = self._cohort(read(call.ids)), call.exchange, read(call.present)
        there = np.ones(len(cohort.ids), bool) if present is None else np.array(present.array)
        entry = self._entries.setdefault(exchange, Entry())
        entry.add(Entry(1, exchange.reply_bytes, cohort.down))
        maps, cohort.pending, cohort.down = cohort.pending, [], 0
        found = self._ask_all(cohort, maps, Wanted(call.number, read(call.rows)), exchange, self._least)
        there &= [client in found for client in cohort.ids]
        return [found[client] if is_there else None for client, is_there in zip(cohort.ids, there, strict=True)], there

    def _ask_all(
        self, cohort: Cohort, maps: list[Mapped], wanted: Wanted, exchange: Any, least: int | None
    ) -> dict[int, list[Any]]:
        """The replies that arrived, by client."""
        asked: dict[int, int] = {}  # each client, and where it first stands
        for place, client in enumerate(cohort.ids):
            asked.setdefault(client, place)
        requests, new = self._requests(cohort, maps, wanted, asked)
        shapes = [(s.shape, _words_type(s.dtype)) for s in map(_shape, wanted.reply)]
        bounded = self._coordinator.links.finite

        def wrong(site: int, reply: Reply) -> str | None:
            found = _what_is_wrong(exchange.name, reply, shapes)
            excess = _excess(exchange.name, reply) if bounded and found is None else None
            if excess is not None:
                self._blame(site, excess)
            return found or (None if least is None else excess)

        replies = self._take(requests, new, least, wrong)
        self._coordinator.received += exchange.reply_bytes * len(replies)
        self.lost |= set(asked) - set(replies)
        cohort.delivered.update(v.number for m in maps for v in m.sent)
        return {client: reply.arrays for client, reply in replies.items()}

    def _blame(self, site: int, why: str) -> None:
        self._coordinator.blamed[self._coordinator.links.name(site)] = why

    def _take(
        self, requests: dict[int, Request], new: int, least: int | None, wrong: Callable[[int, Reply], str | None]
    ) -> dict[int, Reply]:
        """Ask, and note the work that sites say they have done."""
        coordinator = self._coordinator
        links = coordinator.links
        coordinator.sent += new * len(requests)
        try:
            replies = links.ask(requests, least, lambda site, reply: _what_is_told(reply) or wrong(site, reply))
        except SiteError as error:
            raise _needed(error) from error
        for site in set(requests) - set(replies):
            coordinator.blamed.setdefault(links.name(site), links.records[site].why or "did not reply")
        for client, (header, _) in replies.items():
            for number, counts in header["work"]:
                self._work.setdefault(number, {})[client] = counts
            self.finite += [header["finite"]] if "finite" in header else []
        return replies

    def _requests(
        self, cohort: Cohort, maps: list[Mapped], wanted: Wanted, asked: dict[int, int]
    ) -> tuple[dict[int, Request], int]:
        """A request for each of those asked, the j-th of the cohort, with what it has not been sent yet; and the bytes
        of arrays in one."""
        values = {v.number: v for m in maps for v in m.sent if v.constant < 0 and v.number not in cohort.delivered}
        number = self._coordinator.links.number()
        header, shared = self._header(maps, wanted, values, number)
        own = [self._own_arrays(maps, j) for j in asked.values()]
        count = sum(a.nbytes for a in (*shared, *own[0])) if own else 0
        each = zip(asked.items(), wire.encode_each(header, shared, own) if own else (), strict=True)
        whole = lambda j: partial(self._whole, maps, wanted, j)
        return {client: Request(number, message, whole(j)) for (client, j), message in each}, count

    def _whole(self, maps: list[Mapped], wanted: Wanted, j: int, number: int) -> wire.Message:
        """The request to the j-th of the cohort, for a site that has forgotten everything."""
        every = self._closure([*maps, *_maps_of(wanted)])
        values = {v.number: v for m in every for v in m.sent if v.constant < 0}
        header, shared = self._header(every, wanted, values, number)
        return wire.encode_each(header, shared, [self._own_arrays(every, j)])[0]

    def _header(
        self, maps: list[Mapped], wanted: Wanted, values: dict[int, Value], number: int
    ) -> tuple[dict[str, Any], list[Any]]:
        described = []
        for m in maps:
            refs = [["c", v.constant] if v.constant >= 0 else v.number for v in m.sent]
            described.append([m.number, m.call, refs, m.keys is not None, [_ref(value) for value in m.own]])
        header = {
            "do": "work",
            "number": number,
            "run": self._coordinator.run,
            "phase": self._moment[0],
            "round": self._moment[1],
            "maps": described,
            "values": list(values),
            "keep": [m.number for m in self._alive],
            "held": [v.number for v in self._sent],
            "call": wanted.call,
            "reply": list(map(_ref, wanted.reply)),
            **{name: list(map(_ref, refs)) for name, refs in wanted.kept.items()},
        }
        return header, [_words(v.array) for v in values.values()]

    def _own_arrays(self, maps: list[Mapped], j: int) -> list[Any]:
        """What goes to the j-th of the cohort alone."""
        arrays = []
        for m in maps:
            arrays += [] if m.keys is None else [m.keys[j]]
            arrays += [value.rows[j] for value in m.own if isinstance(value, Rows)]
        return arrays

    def _closure(self, maps: list[Mapped]) -> list[Mapped]:
        """All that has to be computed again by a site that has forgotten everything."""
        found: dict[int, Mapped] = {}

        def visit(m: Mapped) -> None:
            if m.number not in found:
                for value in m.own:
                    if isinstance(value, Own):
                        visit(value.mapped)
                found[m.number] = m

        for m in maps:
            visit(m)
        return list(found.values())

    def center(self, call: CenterCall, read: Read) -> list[Value]:
        """See `Visitor`."""
        exchange, sent, key = call.exchange, read(call.sent), read(call.key)
        entry = self._entries.setdefault(exchange, Entry())
        if call.holder is not None:
            entry.add(Entry(1, exchange.reply_bytes, self._new_bytes(self._center, sent) + (0 if key is None else 8)))
            keys = None if key is None else np.asarray(jax.random.key_data(key.array))[None]
            mapped = self._mapped(call, sent, keys, [])
            wanted = Wanted(call.number, [Own(mapped, i) for i in range(len(mapped.shapes))])
            self._center.ids = [call.holder]
            replies = self._ask_all(self._center, [mapped], wanted, exchange, None)
            return [Value(jnp.asarray(a)) for a in replies[call.holder]]
        clients = self._coordinator._traced.job.clients
        arguments = call.arguments(
            [value.array for value in sent],
            jax.tree.leaves(clients.at_center()),
            jnp.int32(clients.n),
            None if key is None else key.array,
        )
        *out, counts = client_program(self._plan, call)(*arguments)
        self._work[self._coordinator.next_number()] = {clients.n: ledger.as_integers(counts)}
        return [Value(a) for a in out]

    def loop(self, call: LoopCall, read: Read) -> list[Any]:
        """See `Visitor`."""
        count = call.length if call.length is not None else int(read(call.count).array)
        fixed, carry = read(call.fixed), read(call.carry)
        for i in range(count):
            carry = self.visit(call.body, [*fixed, Value(jnp.int32(i)), *map(_anew, carry)])
        return carry

    def finish(self, made: Made) -> None:
        """Have the sites that missed nothing write what they remember."""
        carry, cohort = made.carry, self._own
        leaves = {name: jax.tree.leaves(getattr(carry, name), is_leaf=_is_own) for name in ("memory", "client")}
        changed = any(ref != Kept(name, i) for name, refs in leaves.items() for i, ref in enumerate(refs))
        if not (changed or cohort.pending):
            return
        if cohort.down or changed:
            self._entries.setdefault(costs.FINISH, Entry()).add(Entry(0, 0, cohort.down))
        stayed = np.ones(len(cohort.ids), bool) if made.stayed is None else np.array(made.stayed)
        maps, cohort.pending, cohort.down = cohort.pending, [], 0
        requests: dict[int, Request] = {}
        count = 0
        for who, refs in ((stayed, leaves), (~stayed, {})):  # who missed an exchange computes, but writes nothing
            asked = {cohort.ids[j]: j for j in np.flatnonzero(who).tolist()}
            own, new = self._requests(cohort, maps, Wanted(FINISH, [], refs), asked)
            requests, count = requests | own, max(count, new)
        real = len(engine.real_leaves(self._plan.made.carry.memory))
        found = self._take(requests, count, self._least, lambda site, reply: _says_no_more(reply, real))
        self.lost |= set(requests) - set(found)
        self.wrote = {client for client in found if stayed[cohort.ids.index(client)]}

    def amounts(self, made: Made) -> Amounts:
        """What the phase has cost."""
        totals, busiest = [0] * len(ledger.WORK), 0
        for by_client in self._work.values():
            each = list(by_client.values())
            totals = [a + sum(own[i] for own in each) for i, a in enumerate(totals)]
            busiest += max(own[0] + own[1] for own in each)
        return Amounts(self._entries, [*totals, busiest], 0 if made.missing is None else int(made.missing))


def _anew(value: Any) -> Any:
    """What a loop carries is new to a site in every turn."""
    return Value(value.array) if isinstance(value, Value) else value


def _is_own(value: Any) -> bool:
    return isinstance(value, Own | Kept)


def _ref(value: Any) -> Any:
    if isinstance(value, Own):
        return ["m", value.mapped.number, value.output]
    if isinstance(value, Kept):
        return [value.kind, value.leaf]
    return "row"


def _maps_of(wanted: Wanted) -> list[Mapped]:
    refs = [wanted.reply, *wanted.kept.values()]
    return [v.mapped for own in refs for v in own if isinstance(v, Own)]


def _shape(value: Any) -> Any:
    assert isinstance(value, Own)
    return value.mapped.shapes[value.output]


def _words(array: Any) -> Any:
    if jax.dtypes.issubdtype(jax.typeof(array).dtype, jax.dtypes.prng_key):
        return np.asarray(jax.random.key_data(array))
    return np.asarray(array, jax.typeof(array).dtype)


def _what_is_wrong(name: str, reply: Reply, wanted: list[Any]) -> str | None:
    """What is wrong with a reply to the exchange of this name; None if nothing is."""
    if [(a.shape, a.dtype) for a in reply.arrays] != wanted:
        got = [(a.shape, str(a.dtype)) for a in reply.arrays]
        return f"replies to {name!r} with {printable(got)}, where the plan has {wanted}."
    if "finite" in reply.header:
        return f"replies to {name!r} with more than the plan has"
    return None


def _excess(name: str, reply: Reply) -> str | None:
    """Whether a reply has values that nothing can be computed with: not finite, or their squares are not."""
    for array in reply.arrays:
        if jnp.issubdtype(array.dtype, jnp.inexact) and array.size:
            # As in float32, for a float16's squares are added up in that.
            most = math.sqrt(float(jnp.finfo(accumulator(array.dtype)).max))
            largest = float(np.max(np.abs(array)))  # NaN if one of them is
            if not math.isfinite(largest):
                return f"replies to {name!r} with a value that is not finite"
            if largest > most:
                return f"replies to {name!r} with a value of {largest:.1e}, too large to compute with"
    return None


def _what_is_told(reply: Reply) -> str | None:
    """What is wrong with what a reply says of the work that was done."""
    counts = lambda own: isinstance(own, list) and len(own) == len(ledger.WORK) and all(map(_is_count, own))
    match reply.header.get("work"):
        case list(work) if all(isinstance(w, list) and len(w) == 2 and _is_count(w[0]) and counts(w[1]) for w in work):
            return None
    return "does not say what work it has done"


def _no_rounds(reply: Reply) -> str | None:
    """What is wrong with what a site says of its checkpoints."""
    match reply.header:
        case {"why": str()}:
            return None
        case {"rounds": list(rounds), "onwards": bool()} if all(map(_is_count, rounds)):
            return None
    return "does not say which rounds it has saved"


def _says_no_more(reply: Reply, leaves: int) -> str | None:
    """What is wrong with the reply to a request that only has the site remember something."""
    finite = reply.header.get("finite", [True] * leaves)
    if reply.arrays or not isinstance(finite, list) or [type(f) for f in finite] != [bool] * leaves:
        return "replies with more than that it remembers"
    return None


def _is_count(number: Any) -> bool:
    return type(number) is int and number >= 0


def _words_type(dtype: Any) -> Any:
    return np.dtype(np.uint32) if jax.dtypes.issubdtype(dtype, jax.dtypes.prng_key) else np.dtype(dtype)


def _weighted(weights: Any, values: list[Any], replies: list[Any], present: np.ndarray) -> list[Any]:
    """Σ w_j v_j over those present, in float32 or better, one reply after the other."""
    totals = [np.zeros(s.shape, accumulator(s.dtype)) for s in map(_shape, values)]
    for weight, reply, there in zip(weights, replies, present, strict=True):
        if there and weight != 0:
            for total, leaf in zip(totals, reply, strict=True):
                total += total.dtype.type(weight) * leaf.astype(total.dtype)
    return totals
