"""Asynchronous rounds of a federation: a round of the plan whose mean is over the replies that arrive.

Every site works at one request at a time. When it has replied, it is sent the newest model at once. The site whose
reply ends the round is sent the model of the next round. Replies are counted in the order in which they arrive.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from rookery.base import jaxprs
from rookery.engines import engine
from rookery.engines.engine import Job
from rookery.engines.federation import wire
from rookery.engines.federation.arrivals import Arrivals
from rookery.engines.federation.links import Links, Request, SiteError
from rookery.engines.federation.phase import Phase
from rookery.engines.federation.replies import unusable_values, wrong_arrays, wrong_work
from rookery.engines.federation.values import (
    Cohort,
    Computed,
    Mapped,
    Scattered,
    ServerValue,
    Wanted,
    arrays_for,
    client_keys,
)
from rookery.language import primitives
from rookery.language.ledger import Amounts, Entries, Entry, Exchange
from rookery.plan import calls, costs
from rookery.plan.calls import Body, Read
from rookery.plan.trace import Made, Plan


def check_job(job: Job) -> None:
    """Raise ValueError if a federation can't run this asynchronous job, as far as is known without a plan."""
    if job.asynchronous is None:
        return
    if hasattr(job.algorithm, "memory"):
        raise _remembers(type(job.algorithm).__name__, "its clients remember")
    if job.cohort != job.clients.n:
        raise ValueError(
            f"cohort must be all {job.clients.n} clients in an asynchronous federation, whose sites are all at work; "
            f"got {job.cohort}. Leave it out."
        )


def _remembers(name: str, who: str) -> ValueError:
    return ValueError(
        f"asynchronous must be None for {name} here in a federation: {who} something, which a site can't take back if "
        "its reply is lost. Leave it out, choose another method or channel, or use rk.Simulation."
    )


def first_requests(traced: engine.Traced) -> Entries:
    """The cost of the requests with which the run begins, except for the last one, which counts with its reply."""
    others = traced.job.clients.n - 1
    down = sum(entry.down for entry in costs.costs(traced.round, ()).values())
    return {Exchange("begin", "finish", "", 0, clients=others): Entry(0, 0, down)} if others else {}


class Begun(NamedTuple):
    """What the coordinator keeps of a request while the site is at work."""

    t: int  # the round whose model the site was sent
    weight: Any
    unpacked: Callable[[list[Any]], list[Any]]


class Pace:
    """The sites at work, from round to round.

    Attributes:
        arrivals: their replies.
        begun: what each of them is working on.
    """

    def __init__(self, traced: engine.Traced, links: Links) -> None:
        plan = traced.round
        if jax.tree.leaves((plan.given.carry.memory, plan.given.carry.client)):
            raise _remembers(plan.title.partition(".")[0], "its clients' side of the channel remembers")
        (call,) = plan.body.of(calls.ReduceCall)
        rows: list[Any] = call.rows
        shapes = [(v.aval.shape[1:], np.dtype(v.aval.dtype)) for v in rows]
        wrong = lambda site, reply: wrong_work(reply) or wrong_arrays(call.exchange.name, reply, shapes)
        self.arrivals = Arrivals(links, traced.job.replies, wrong)
        self.begun: dict[int, Begun] = {}
        scattered = [scatter.rows for scatter in plan.body.of(calls.ScatterCall)]
        self._by_client = _by_client(plan, [call.weights, *scattered], traced.job.clients.n)

    def by_client(self, inputs: list[Any]) -> list[np.ndarray]:
        """Return the weights, and the rows of each scatter: an entry for each client. `inputs`: those of the plan."""
        return [np.asarray(a) for a in self._by_client(inputs)]


def _by_client(plan: Plan, wanted: list[Any], n: int) -> Callable[[list[Any]], list[Array]]:
    """Return a function from the plan's inputs to the rows that each client would get of these values of the server."""
    eqns = []
    for eqn in plan.jaxpr.eqns:
        if eqn.primitive is primitives.reduce:
            break
        eqns += [] if eqn.primitive in primitives.PRIMITIVES else [eqn]
    jaxpr, used = jaxprs.prune(jaxprs.part(plan.jaxpr, eqns, plan.jaxpr.invars, wanted))
    ids, inputs = plan.inputs.ids, [v for v, is_used in zip(plan.jaxpr.invars, used, strict=True) if is_used]

    def of_one(client: Array, given: list[Any]) -> list[Array]:
        cohort = jnp.full(ids.aval.shape, client, ids.aval.dtype)
        arguments = [cohort if v is ids else a for v, a in zip(inputs, given, strict=True)]
        return [a[0] for a in jaxprs.run(jaxpr, *arguments)]

    program = jax.jit(lambda given: jax.vmap(of_one, (0, None))(jnp.arange(n), given))
    read = lambda value: value.array if isinstance(value, ServerValue) else value
    return lambda values: program([read(a) for a, is_used in zip(values, used, strict=True) if is_used])


class AsynchronousPhase(Phase):
    """A round whose mean is over the replies that arrive: see `Phase`.

    Attributes:
        heard: how many replies count.
    """

    def __init__(self, pace: Pace, *args: Any) -> None:
        super().__init__(*args)
        self._pace = pace
        self._rows: list[np.ndarray] = []  # by client: the weights, and what each scatter sends
        self._keyed: list[tuple[Mapped, Any, Any]] = []  # the functions, with the keys of the algorithm and of noise
        self._again: dict[int, list[Mapped]] = {}  # the same for sites that begin once more in this round
        self._times: dict[int, int] = {}  # by site: how often it has begun in this round before
        self._staleness: list[int] = []
        self.heard = 0

    def visit(self, body: Body, inputs: Any) -> list[Any]:
        """See `Visitor`. An asynchronous plan has no loops, so that this is called once."""
        self._rows = self._pace.by_client(inputs)
        return super().visit(body, inputs)

    def map(self, call: calls.MapCall, read: Read) -> list[Any]:
        """See `Visitor`."""
        made = super().map(call, read)
        mapped = made[0].mapped
        key, noise = read(call.key), read(call.noise) if mapped.noise is not None else None
        self._keyed.append((mapped, key, noise))
        return made

    def scatter(self, call: calls.ScatterCall, read: Read) -> list[Any]:
        """See `Visitor`."""
        super().scatter(call, read)
        scatters = self._plan.body.of(calls.ScatterCall)
        return [Scattered(self._rows[1 + scatters.index(call)])]

    def reduce(self, call: calls.ReduceCall, read: Read) -> list[ServerValue]:
        """See `Visitor`. Sums over the first replies that arrive, and the three totals of their weights."""
        job, pace, links, cohort = self._job, self._pace, self._links, self._everyone
        assert job.asynchronous is not None
        how, count, t, name = job.asynchronous, job.replies, self._moment[1], call.exchange.name
        self._entries.setdefault(call.exchange, Entry()).add(Entry(1, call.exchange.reply_bytes, cohort.down))
        cohort.pending, cohort.down = [], 0
        (sums, unpacked), weights = self._sums(call, read, count), self._rows[0]
        rows, arrivals = read(call.rows), pace.arrivals

        def request(site: int) -> Request:
            lost = pace.begun.get(site)
            if lost is None or lost.t < t:  # else it is asked for the same once more
                self._times[site] = self._times.get(site, -1) + 1
            pace.begun[site] = Begun(t, weights[site], unpacked)
            return self._request(call.number, rows, site)

        arrivals.renew = request
        for site in filter(arrivals.is_idle, cohort.ids):
            arrivals.begin(site, request(site))
        counted: list[tuple[Any, Any]] = []  # of each reply: its weight, and how much it counts by its staleness
        try:
            while True:
                site, reply = arrivals.take()
                begun = pace.begun.pop(site)
                unusable = unusable_values(name, reply) if links.finite else None
                if unusable is not None:
                    self.blamed[links.name(site)] = unusable
                self._staleness.append(t - begun.t)
                counted.append((begun.weight, np.asarray(how.weights(t - begun.t, begun.weight.dtype))))
                weight = begun.weight * counted[-1][1]
                if weight != 0:
                    for total, leaf in zip(sums, begun.unpacked(reply.arrays), strict=True):
                        total.add(weight, leaf)
                for k, (_, work) in enumerate(reply.header["work"]):
                    self._work.setdefault(k, {})[len(counted)] = work
                self.received += call.exchange.reply_bytes
                if len(counted) == count:
                    break
                arrivals.begin(site, request(site))
        except SiteError as error:
            raise RuntimeError(str(error)) from error
        links.exchanges += 1
        links.watch(links)
        each = np.array([p * s for p, s in counted], weights.dtype)
        self.heard = int(np.sum(each > 0))
        totals = np.sum([p for p, _ in counted], dtype=weights.dtype), np.sum(each), np.max(each)
        return [ServerValue(jnp.asarray(a)) for a in (*(total.result() for total in sums), *totals)]

    def amounts(self, made: Made) -> Amounts:
        """See `Phase`."""
        return super().amounts(made)._replace(staleness=float(np.mean(self._staleness)))

    def _cohort(self, ids: ServerValue) -> Cohort:
        """Return all clients: those that are idle begin."""
        if not self._cohorts:
            self._cohorts[0] = (ids, Cohort(list(range(self._job.clients.n))))
        return self._cohorts[0][1]

    def _request(self, call: int, rows: list[Any], site: int) -> Request:
        """Return a request with all that it depends on, and with another key each time that a site begins anew."""
        again = self._times[site]
        if again not in self._again:
            self._again[again] = self._rekeyed(again) if again else [mapped for mapped, _, _ in self._keyed]
        maps = self._again[again]
        known = {old: new for (old, _, _), new in zip(self._keyed, maps, strict=True)}
        wanted = Wanted(call, [_of(known, ref) for ref in rows])
        values = {v.number: v for m in maps for v in m.sent if v.constant < 0}
        number = self._links.number()
        header, shared = self._header(maps, wanted, values, number)
        header |= {"keep": [m.number for m in maps], "held": list(values)}
        own = arrays_for(maps, site)
        seeded = sum(m.noise[0].nbytes for m in maps if m.noise is not None)  # which no real run sends
        self.sent += sum(a.nbytes for a in (*shared, *own)) - seeded
        return Request(number, wire.encode_each(header, shared, [own])[0])

    def _rekeyed(self, again: int) -> list[Mapped]:
        """Return the round's functions with other keys, as the simulation derives them."""
        known: dict[Mapped, Mapped] = {}
        keys = lambda key: client_keys(jax.random.fold_in(key.array, again), np.asarray(self._everyone.ids, np.int32))
        drawn = lambda key: None if key is None else np.asarray(keys(key))
        for old, key, noise in self._keyed:
            local = [_of(known, ref) for ref in old.local]
            new = Mapped(next(self._numbers), old.call, old.sent, drawn(key), local, old.shapes, drawn(noise))
            self._alive.add(new)
            known[old] = new
        return list(known.values())


def _of(known: dict[Mapped, Mapped], value: Any) -> Any:
    """Return a client's value as the functions with other keys compute it."""
    return Computed(known[value.mapped], value.output) if isinstance(value, Computed) else value
