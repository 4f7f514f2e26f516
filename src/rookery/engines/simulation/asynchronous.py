"""Asynchronous simulation on one device: the clients that begin in the same round are vectorised.

They are sent the same model, so a round computes as much as a synchronous one with as many clients. Replies are kept
until they arrive. Which client begins when, and which reply arrives when, is computed beforehand: see `queue`.
"""

import itertools
import math
from collections.abc import Callable
from functools import cached_property, partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from rookery.base import jaxprs
from rookery.data.clients import Clients
from rookery.engines import engine
from rookery.engines.interpreter import Block, Interpreter, weighted_sum
from rookery.engines.simulation import device, queue
from rookery.engines.simulation.queue import Events, Queue
from rookery.language import ledger
from rookery.language.asynchronous import Asynchronous, begun_again
from rookery.language.ledger import Amounts, Entry, Exchange
from rookery.plan import calls, trace
from rookery.plan.calls import Read
from rookery.plan.costs import bytes_down, costs
from rookery.plan.trace import Carry, Given, Plan


class Kept(NamedTuple):
    """The replies that have not arrived yet, by place."""

    rows: list[Array]
    weights: Array


class Saved(NamedTuple):
    """What a checkpoint keeps."""

    carry: Carry
    kept: Kept
    queue: Queue


class Session(device.Session):
    """An asynchronous run in this process: an `engine.Session`."""

    def __init__(self, traced: engine.Traced, simulation: device.Settings) -> None:
        super().__init__(traced, simulation)
        job = traced.job
        assert job.asynchronous is not None
        self._how, self._places = job.asynchronous, job.cohort
        once, needed = traced.round.writes_memory, job.cohort + job.replies
        if once and job.clients.n < needed:
            raise ValueError(
                f"asynchronous: cohort + buffer must be at most the {job.clients.n} clients for a method whose clients "
                f"remember something, so that none begins twice with one model; got {needed}. Choose a smaller cohort."
            )
        self._timetable = Timetable(traced, once)
        self._queue: Any = None
        self._kept: Any = None

    @cached_property
    def fingerprint(self) -> str:
        """A digest of the program, its constants and the clock, which decides which replies a round has."""
        return jaxprs.digest(self._traced.fingerprint, self._timetable.fingerprint)

    def init(self) -> Amounts:
        traced, cost = self._traced, super().init()
        self._queue = self._timetable.start()
        program = self._late_program("begin", begin)
        with self._explained():
            after, self._kept, report = program(
                traced.round.consts, self._data, traced.hyper, self._carry, traced.seed, self._queue.order
            )
            done, fine = jax.device_get(report)
        reason = None if fine.all() else engine.not_finite(0, engine.where_not_finite(after, fine))
        if reason is not None and self._job.on_nonfinite == "stop":
            self.stopped = self.stopped or reason
        else:
            self._carry, self.warned = after, self.warned or reason
        work = [a + b for a, b in zip(cost.work, ledger.as_integers(done), strict=True)]
        down = sum(entry.down for entry in costs(traced.round, ()).values())
        first = {Exchange("begin", "finish", "", 0, clients=self._places - 1): Entry(0, 0, down)}
        exchanges = {**cost.exchanges, **(first if self._places > 1 else {})}
        return Amounts(exchanges, work, seconds=self._timetable.before, staleness=0.0)

    def advance(self, rounds: int) -> list[Amounts]:
        traced, limit = self._traced, device.ROUNDS_AT_ONCE
        program = self._late_program("rounds", advance, limit, device.together(), donate=(3, 4))
        done: list[Amounts] = []
        while len(done) < rounds and self.stopped is None:
            count, strict, first = min(rounds - len(done), limit), self._job.on_nonfinite == "stop", self.rounds
            after, events = self._timetable.rounds(self._queue, first, count)
            with self._explained():
                (self._carry, self._kept), reports = program(
                    traced.round.consts, self._data, traced.hyper, self._carry, self._kept, first, count, strict,
                    traced.seed, events,
                )  # fmt: skip
                reports = jax.device_get(reports)
            completed = self._completed(reports, count)
            if len(completed) < count:
                after, _ = self._timetable.rounds(self._queue, first, len(completed))
            self._queue = after
            for cost, seconds, staleness in zip(completed, events.seconds, events.staleness, strict=False):
                done.append(cost._replace(seconds=float(seconds), staleness=float(np.mean(staleness))))
        return done

    def _late_program(self, name: str, function: Callable[..., Any], *fixed: Any, donate: tuple[int, ...] = ()) -> Any:
        """The compiled function(program, *fixed, ...), from the cache if it is there."""
        of, how = self._traced.round, (self._how, self._places)
        program = lambda: partial(function, Program(of, self._data, self._block, *how), *fixed)
        return engine.PROGRAMS.find(
            (name, "asynchronous", of.identity, engine.shapes(self._data), self._block, *how, *fixed),
            lambda: engine.compiled(of, program(), donate_argnums=donate),
        )

    def save(self) -> Any:
        return Saved(self._carry, self._kept, self._queue)

    def restore(self, saved: Any, rounds: int) -> None:
        super().restore(saved.carry, rounds)
        self._kept, self._queue = saved.kept, jax.tree.map(np.asarray, saved.queue)

    def close(self) -> None:
        super().close()
        self._kept = self._queue = None


class Timetable:
    """Which client begins when, and which reply arrives when, computed on the CPU.

    Attributes:
        before: the seconds that the start takes.
        fingerprint: a digest of how long clients take.
    """

    def __init__(self, traced: engine.Traced, once: bool) -> None:
        job, plans = traced.job, (traced.start, traced.round)
        assert job.clock is not None
        clock = job.clock.at(job.clients)._replace(down=tuple(map(bytes_down, plans)))
        setting = traced.setting._replace(clock=clock)
        alone = setting._replace(cohort=1)  # the seconds of a round's plan are those of one client
        first = trace.start_plan(setting, job.start, traced.hyper)
        one_round = trace.round_plan(alone, traced.start.made.carry, traced.hyper)
        consts = first.consts, one_round.consts
        self.fingerprint = jaxprs.digest(first.fingerprint, one_round.fingerprint, *itertools.chain(*consts))
        seconds = _Seconds(first), _Seconds(one_round)
        rows = math.lcm(*map(len, clock.rates))
        self._seconds = _Timed(*seconds, job.clients.n, job.cohort, job.replies, once, rows)
        self._inputs = _here((*consts, traced.hyper, job.clients.weights, traced.seed))
        self.before, shortest = map(float, self._call("first"))
        if not shortest > 0:
            raise ValueError(
                f"clock must give every client some time in an asynchronous run; got one that takes {shortest:g} s. "
                "Give it compute, uplink, downlink or latency."
            )

    def start(self) -> Queue:
        """The queue before the first round."""
        return self._call("start")

    def rounds(self, before: Queue, begin: int, count: int) -> tuple[Queue, Events]:
        """The queue after `count` rounds from round `begin` on, and what happens in them."""
        return self._call("rounds", before, np.int32(begin), np.int32(count))

    def _call(self, name: str, *args: Any) -> Any:
        seconds = self._seconds
        program = engine.PROGRAMS.find((name, "timetable", *seconds.identity), lambda: jax.jit(getattr(seconds, name)))
        return jax.device_get(program(self._inputs, *_here(args)))


def _here(value: Any) -> Any:
    """The value on the CPU, or on the default device where JAX has no CPU."""
    try:
        return jax.device_put(value, jax.devices("cpu")[0])
    except RuntimeError:
        return value


class _Timed(NamedTuple):
    """What a timetable computes. It holds no data, because compiled programs are kept longer than a run."""

    start_plan: "_Seconds"
    round_plan: "_Seconds"
    n: int
    places: int
    buffer: int
    once: bool
    rows: int  # the rounds after which the speeds begin again

    @property
    def identity(self) -> tuple[Any, ...]:
        """The key of its compiled programs."""
        return self.start_plan.identity, self.round_plan.identity, *self[2:]

    def first(self, inputs: Any) -> tuple[Any, Array]:
        """The seconds of the start, and of the fastest client in any row of the speeds."""
        consts, _, hyper, weights, seed = inputs
        keys, t = engine.start_keys(seed, self.n), jnp.int32(0)
        given = {"hyper": hyper, "t": t, "ids": keys.ids, "weights": weights, "key": keys.key, "chance": keys.chance}
        duration = self._duration(inputs)
        clients, rounds = (jnp.arange(count, dtype=jnp.int32) for count in (self.n, self.rows))
        of_round = lambda t: jnp.min(jax.vmap(lambda client: duration(client, t, jnp.int32(0)))(clients))
        shortest = jax.lax.map(of_round, rounds)
        return self.start_plan(consts, **given), jnp.min(shortest)

    def start(self, inputs: Any) -> Queue:
        """See `queue.start`."""
        return queue.start(inputs[-1], self.n, self.places, self._duration(inputs))

    def rounds(self, inputs: Any, before: Queue, begin: Any, count: Any) -> tuple[Queue, Events]:
        """See `queue.rounds`."""
        how = device.ROUNDS_AT_ONCE, self.buffer, self.once, inputs[-1], self._duration(inputs)
        return queue.rounds(before, begin, count, *how)

    def _duration(self, inputs: Any) -> queue.Duration:
        _, consts, hyper, weights, seed = inputs

        def duration(client: Array, t: Array, again: Array) -> Array:
            key, ids = engine.choice_and_key(seed, t)[1], (client + self.n * again)[None]
            return self.round_plan(consts, hyper=hyper, t=t, ids=ids, weights=weights, key=key, chance=key)

        return duration


class _Seconds:
    """The seconds that a plan takes, as a function of its inputs other than the state."""

    def __init__(self, plan: Plan) -> None:
        self._given, self.identity = plan.given, plan.identity
        self._jaxpr, self._used = jaxprs.prune(plan.jaxpr, [v is plan.outputs.seconds for v in plan.body.outputs])
        state = jax.tree.leaves(plan.inputs.carry)
        if any(used and v in state for v, used in zip(plan.body.inputs, self._used, strict=True)):
            raise ValueError(
                f"asynchronous must be None for {plan.title.partition('.')[0]} here: how long a client takes depends "
                "on the state, so it is not known in advance. Leave it out, or choose another method."
            )

    def __call__(self, consts: list[Any], **given: Any) -> Array:
        values = [*consts, *jax.tree.leaves(self._given._replace(**given))]
        return jaxprs.run(self._jaxpr, *(a for a, used in zip(values, self._used, strict=True) if used))[0]


# The compiled programs.


class Program(device.Program):
    """A plan whose mean is over the replies that arrive."""

    def __init__(self, traced: Plan, clients: Clients, block: Block, how: Asynchronous, places: int) -> None:
        super().__init__(traced, clients, block)
        self.how, self.places = how, places
        (self.call,) = traced.body.of(calls.ReduceCall)

    def nothing_kept(self) -> Kept:
        """No replies."""
        rows: list[Any] = [v.aval for v in self.call.rows]
        if self.call.unpack is not None:
            outputs: list[Any] = [v.aval for v in self.call.unpack.outputs]
            rows = [jax.ShapeDtypeStruct((0, *a.shape), a.dtype) for a in outputs]
        weights: Any = self.call.weights.aval
        empty = lambda a: jnp.zeros((self.places, *a.shape[1:]), a.dtype)
        return Kept(list(map(empty, rows)), empty(weights))

    def begun(
        self, consts: list[Any], clients: Clients, given: Given, events: Events, kept: Kept, counted: Any = None
    ) -> tuple[Any, dict[str, Any], Kept]:
        """The plan's outputs, the round's report, and the replies of the clients that begin."""
        interpreter = _Interpreter(clients, self.axes, self.block, self.how, events, kept, counted)
        made, report = self.interpreted(interpreter, consts, given)
        return made, {**report, "least": interpreter.heard}, interpreter.new


class _Interpreter(Interpreter):
    """Evaluates a round for the clients that begin in it, and its mean over the replies that arrive.

    Functions are computed for `ids + n·again`, so that a client that begins twice in a round draws anew.
    """

    def __init__(
        self, clients: Clients, axes: list[Any], block: Block, how: Asynchronous, events: Events, kept: Kept,
        counted: Any,
    ) -> None:  # fmt: skip
        super().__init__(clients, axes, block)
        self._how, self._events, self._waiting, self._counted = how, events, kept, counted
        self._ids = events.ids + clients.n * events.again
        self.heard: Any = None  # how many replies count
        self.new: Any = None  # the replies of the clients that begin

    def map(self, call: calls.MapCall, read: Read) -> list[Any]:
        outputs = super().map(call, read)
        outputs[0].mapped.ids = self._ids
        return outputs

    def reduce(self, call: calls.ReduceCall, read: Read) -> list[Any]:
        rows = read(call.rows) if call.unpack is None else self._unpacked(call, read)
        self.new = Kept(list(map(self._array, rows)), read(call.weights))
        source, places = self._events.source, len(self._waiting.weights)

        def arrived(kept: Array, new: Array) -> Array:
            old = source < places
            known, fresh = kept[jnp.minimum(source, places - 1)], new[jnp.maximum(source - places, 0)]
            return jnp.where(old.reshape(-1, *(1,) * (new.ndim - 1)), known, fresh)

        replies = jax.tree.map(arrived, self._waiting, self.new)
        weights = replies.weights * self._how.weights(self._events.staleness, replies.weights.dtype)
        self.heard = jnp.sum(weights > 0, dtype=jnp.int32)
        totals = jnp.sum(replies.weights), jnp.sum(weights), jnp.max(weights)
        return [*(weighted_sum(weights, a) for a in replies.rows), *totals]

    def _keys(self, key: Array, ids: Any) -> Array:
        n = self._clients.n
        return jax.vmap(lambda i: jax.random.fold_in(begun_again(key, i // n), i % n))(ids)

    def _numbers(self, ids: Any) -> Any:
        return ids % self._clients.n

    def _members(self, ids: Any) -> Clients:
        return super()._members(ids % self._clients.n)

    def _worked(self, mapped: Any, ids: Any, counts: Any) -> None:
        if self._counted is not None:
            counts = jnp.where(self._counted[:, None, None], counts, 0)
        super()._worked(mapped, ids, counts)


def _round(
    program: Program, consts: Any, clients: Clients, hyper: Any, carry: Carry, t: Any, seed: Array, events: Events,
    kept: Kept, counted: Any = None,
) -> Any:  # fmt: skip
    """Compute round t.

    Returns the carry before and after it (of the clients' memory only the rows of those that begin), a report, and the
    replies of those that begin.
    """
    rows = lambda value: jax.tree.map(lambda a: a[events.ids], value)
    before = carry._replace(memory=rows(carry.memory), client=rows(carry.client))
    key = engine.choice_and_key(seed, t)[1]
    t = jnp.asarray(t, jnp.int32)
    given = Given(before, hyper, t, events.ids, clients.weights, key, key)
    made, report, new = program.begun(consts, clients, given, events, kept, counted)
    return before, made.carry, report, new


def _put(rows: Any, at: Array, new: Any) -> Any:
    """The rows with new ones written at some places, if they are within bounds."""
    return jax.tree.map(lambda a, b: a.at[at].set(b, mode="drop"), rows, new)


def begin(
    program: Program, consts: Any, clients: Clients, hyper: Any, carry: Carry, seed: Array, order: Array
) -> tuple[Carry, Kept, tuple[Array, Array]]:
    """Let the clients in all places but the last begin.

    Returns the carry, their replies, their work, and what is finite: see `device.finite`.
    """
    buffer, places = program.how.buffer, program.places - 1
    turns = -(-places // buffer)

    def turn(i: Any, state: Any) -> Any:
        carry, kept, work = state
        place = i * buffer + jnp.arange(buffer)
        counted = place < places
        ids = jnp.asarray(order)[place % max(places, 1)]
        zero = jnp.zeros(buffer, jnp.int32)
        events = Events(ids, zero, place, zero, zero, jnp.float32(0))
        _, after, report, new = _round(program, consts, clients, hyper, carry, 0, seed, events, kept, counted)
        at, remembered = jnp.where(counted, ids, clients.n), (carry.memory, carry.client)
        memory, client = _put(remembered, at, (after.memory, after.client))
        kept = _put(kept, jnp.where(counted, place, program.places), new)
        return carry._replace(memory=memory, client=client), kept, ledger.add(work, report["work"])

    state = carry, program.nothing_kept(), jnp.asarray(ledger.NO_WORK)
    carry, kept, work = jax.lax.fori_loop(0, turns, turn, state)
    return carry, kept, (work, device.finite(carry, program.private))


def advance(
    program: Program, limit: int, together: int, consts: Any, clients: Clients, hyper: Any, carry: Carry, kept: Kept,
    begin: Any, rounds: Any, strict: Any, seed: Array, events: Events,
) -> Any:  # fmt: skip
    """Compute at most `rounds` rounds from round `begin` on, up to one that fails: see `device.advance`."""
    begin = jnp.asarray(begin, jnp.int32)

    def one(i: Any, state: Any) -> Any:
        wanted, (carry, kept) = state
        now = jax.tree.map(lambda rows: jnp.asarray(rows)[i], events)
        before, after, report, new = _round(program, consts, clients, hyper, carry, begin + i, seed, now, kept)
        report["finite"] = device.finite(after, program.private)
        if jax.tree.leaves((carry.memory, carry.client)):
            report["ids"] = now.ids
        good = wanted & (report["least"] >= 1) & (jnp.all(report["finite"]) | ~jnp.asarray(strict))
        choose = lambda new, old: jax.tree.map(lambda a, b: jnp.where(good, a, b), new, old)
        state, server = choose((after.state, after.server), (before.state, before.server))
        written = lambda at, rows: jnp.where(good, at, rows)  # nowhere if the round was not good
        remembered, ids = (carry.memory, carry.client), written(now.ids, clients.n)
        memory, client = _put(remembered, ids, (after.memory, after.client))
        kept = _put(kept, written(now.place, program.places), new)
        return (good, (Carry(state, memory, client, server, carry.noise), kept)), report

    return device.repeated(one, limit, together, (carry, kept), begin, rounds)
