"""The simulation: a cohort is vectorised, a mean is a reduction, and a run of rounds is one compiled program."""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Jaxpr, Literal, Var
from jaxtyping import Array

from rookery import convolutions, fed, jaxprs, ledger, plan
from rookery.clients import Clients
from rookery.engines import engine
from rookery.engines.engine import Job, Stopped
from rookery.fed import Book, Fed, Inputs, Threaded
from rookery.ledger import Amounts, Ledger
from rookery.plan import Body, Call, Carry, Given, Plan, Server

__all__ = ["Ledger", "SimulatedFed", "Simulation"]

ROUNDS_AT_ONCE = 256  # in one compiled call
_AUTO_BLOCK, _AUTO_BYTES = 128, {"cpu": 2**28, "gpu": 2**30}  # of clients side by side, and of their replies
_CACHE = 2**16  # bytes of a matrix that leaves no room for many other clients' in a CPU's cache


@dataclass(frozen=True)
class Simulation:
    """The default engine: everything in this process, vectorised and compiled.

    Arguments:
        block: clients computed side by side; a larger cohort goes in blocks of this size, to bound memory. "auto":
            128, or fewer where their replies are large; on a CPU one where local steps multiply large matrices.
        debug: run one client at a time, not compiled, and name the client and the step where the first value that is
            not finite appears.
        convolutions: "products" computes them, and pooling, as slices and matrix products; "xla" as XLA does; "auto" as
            products on CPUs and GPUs, where XLA's are slow in loops and with each client's own kernel.
    """

    block: int | str = "auto"
    debug: bool = False
    convolutions: str = "auto"

    sees_memory = True

    def __post_init__(self) -> None:
        whole = isinstance(self.block, int) and not isinstance(self.block, bool) and self.block >= 1
        if not whole and self.block != "auto":
            raise ValueError(f'Simulation: block={self.block!r} is not an integer, at least 1, or "auto".')
        if not isinstance(self.debug, bool):
            raise ValueError(f"Simulation: debug={self.debug!r} is not True or False.")
        convolutions.check(self.convolutions, "Simulation")

    def open(self, job: Job) -> Any:
        """A session for this job."""
        if not job.clients.held:
            raise ValueError(
                "rk.Clients.like holds no data, sites do: give engine=rk.Federation(address, ...), or data."
            )
        if self.debug:
            from rookery.engines import debug

            return debug.Session(engine.traced(job, True, self.convolutions), self)
        return Session(engine.traced(job, False, self.convolutions), self)


class Session:
    """A run in this process."""

    keepers = None
    durable = False

    def __init__(self, traced: engine.Traced, simulation: Simulation) -> None:
        self._traced, self._job = traced, traced.job
        self._data = traced.job.clients
        self.clients = traced.job.clients
        self.rounds = 0
        self.stopped: Stopped | None = None
        self.warned: Stopped | None = None
        self._carry: Any = None
        self._block = simulation.block

    @cached_property
    def fingerprint(self) -> str:
        """Of the program and its constants."""
        return self._traced.fingerprint

    @property
    def state(self) -> Any:
        """The algorithm's state; its buffers are donated by the next `advance`."""
        return self._carry.state

    @property
    def memory(self) -> Any:
        """What the clients remember, one row for each; likewise."""
        return self._carry.memory

    def init(self) -> Amounts:
        """See `engine.Session.init`."""
        traced = self._traced
        program = engine.PROGRAMS.find(
            ("start", traced.start.identity, shapes(self._data), self._block),
            lambda: jax.jit(partial(start, Program(traced.start, self._data, self._block))),
        )
        self._carry, report = program(traced.start.consts, self._data, traced.hyper, traced.job.start, traced.seed)
        report = jax.device_get(report)
        self._check_start(report)
        return amounts(traced.start, report)

    def _check_start(self, report: Any) -> None:
        if not report["finite"].all():
            found = engine.not_finite(-1, engine.where_not_finite(self._carry, report["finite"]))
            if self._job.on_nonfinite == "stop":
                self.stopped = found
            else:
                self.warned = found

    def advance(self, rounds: int) -> list[Amounts]:
        """See `engine.Session.advance`."""
        traced, job = self._traced, self._job
        limit = ROUNDS_AT_ONCE
        program = engine.PROGRAMS.find(
            ("rounds", traced.round.identity, shapes(self._data), self._block, job.cohort, minimum(job), limit),
            lambda: jax.jit(
                partial(advance, Program(traced.round, self._data, self._block), job.cohort, minimum(job), limit),
                donate_argnums=3,
            ),
        )
        done: list[Amounts] = []
        while len(done) < rounds and self.stopped is None:
            count = min(rounds - len(done), limit)
            strict = job.on_nonfinite == "stop"
            self._carry, reports = program(
                traced.round.consts, self._data, traced.hyper, self._carry, self.rounds, count, strict, traced.seed
            )
            done += self._told(jax.device_get(reports), count)
        return done

    def _told(self, reports: Any, count: int) -> list[Amounts]:
        """What the rounds have cost; and whether one of them was not completed."""
        costs = []
        for k in range(count):
            report = jax.tree.map(lambda a: a[k], reports)
            if report["least"] < minimum(self._job):
                self.stopped = engine.too_few(self.rounds, int(report["least"]), minimum(self._job))
                break
            if not report["finite"].all():
                found = engine.not_finite(self.rounds, engine.where_not_finite(self._carry, report["finite"]))
                if self._job.on_nonfinite == "stop":
                    self.stopped = found
                    break
                self.warned = self.warned or found
            costs.append(amounts(self._traced.round, report))
            self.rounds += 1
        return costs

    def measure(self) -> tuple[dict[str, np.ndarray], np.ndarray]:
        """See `engine.Session.measure`."""
        traced = self._traced
        program = engine.PROGRAMS.find(
            ("measure", traced.measure.identity, shapes(self._data), self._block),
            lambda: jax.jit(partial(measure, Program(traced.measure, self._data, self._block))),
        )
        return self._measured(program)

    def _measured(self, program: Any) -> tuple[dict[str, np.ndarray], np.ndarray]:
        traced, carry = self._traced, self._carry
        seen = Carry((carry.state.x, carry.state.y), carry.memory)
        found = program(traced.measure.consts, self._data, traced.hyper, seen, self.rounds, traced.seed)
        return {name: np.asarray(rows) for name, rows in found.items()}, np.ones(self._data.n, bool)

    def save(self) -> Carry:
        """See `engine.Session.save`."""
        return self._carry

    def restore(self, saved: Any, rounds: int) -> None:
        """See `engine.Session.restore`."""
        self._carry, self.rounds = saved, rounds

    def close(self) -> None:
        """Give up the state."""
        self._carry = None


def minimum(job: Job) -> int:
    """The replies that an exchange needs."""
    return 0 if job.faults is None else job.faults.minimum


def shapes(value: Any) -> Any:
    """Structure, shapes and types of a pytree."""
    leaves, structure = jax.tree.flatten(value)
    return structure, tuple((a.shape, str(a.dtype)) for a in leaves)


def amounts(traced: Plan, report: dict[str, Any]) -> Amounts:
    """What a round has cost, from what it reports."""
    turns = tuple(np.asarray(n) for n in report["turns"])
    key = tuple((n.shape, n.tobytes()) for n in turns)
    cache = traced.__dict__.setdefault("_costs", {})
    if key not in cache:
        if len(cache) > 1000:
            cache.clear()
        cache[key] = plan.costs(traced, turns)
    return Amounts(cache[key], ledger.as_integers(report["work"]), int(report["missing"]))


# The compiled programs.


class Program:
    """A plan, to be interpreted for data of these shapes; without the plan's constants, which a caller hands over."""

    def __init__(self, traced: Plan, clients: Clients, block: int | str) -> None:
        self.body, self.made, self.axes = traced.body, jax.tree.structure(traced.made), clients.client_axes()
        self.loops = plan.traced_loops(traced.body)
        self.block = block

    def __call__(self, consts: list[Any], clients: Clients, given: Given) -> tuple[Any, dict[str, Any]]:
        """The plan's outputs, a `plan.Made`, and what the round reports."""
        interpreter = self.interpreter(clients)
        out = interpreter.run(self.body, [*consts, *jax.tree.leaves(given)])
        made = jax.tree.unflatten(self.made, out)
        zero = jnp.int32(0)
        report = {
            "work": interpreter.work,
            "turns": [interpreter.turns[number] for number in self.loops],
            "missing": zero if made.missing is None else made.missing,
            "least": jnp.int32(2**30) if made.least is None else made.least,
        }
        return made, report

    def interpreter(self, clients: Clients) -> "Interpreter":
        """What evaluates the plan."""
        return Interpreter(clients, self.axes, self.block)


def start(program: Program, consts: Any, clients: Clients, hyper: Any, start: Any, seed: Array) -> Any:
    """The carry before the first round, and what it reports."""
    keys = engine.start_keys(seed, clients.n)
    given = Given(start, hyper, jnp.int32(0), keys.ids, clients.weights, keys.key, keys.private)
    made, report = program(consts, clients, given)
    report["finite"] = _finite(made.carry)
    return made.carry, report


def measure(program: Program, consts: Any, clients: Clients, hyper: Any, seen: Carry, t: Any, seed: Array) -> Any:
    """What everybody makes of x, y and their memory after t rounds: rows by name."""
    t = jnp.asarray(t, jnp.int32)
    keys = engine.measure_keys(seed, t, clients.n)
    made, _ = program(consts, clients, Given(seen, hyper, t, keys.ids, clients.weights, keys.key, keys.private))
    return made.carry.state


def _finite(carry: Carry) -> Array:
    """For each leaf of the state and of the clients' memory, whether it is finite."""
    leaves = [leaf for part in (carry.state, carry.memory) for _, leaf in engine.real_leaves(part)]
    return jnp.stack([jnp.all(jnp.isfinite(leaf)) for leaf in leaves]) if leaves else jnp.ones(0, bool)


def one_round(
    program: Program, cohort: int, consts: Any, clients: Clients, hyper: Any, carry: Carry, t: Any, seed: Array
) -> Any:
    """The carry after round t, counted from 0, and what it reports; for memory, the cohort's rows before and after."""
    keys = engine.round_keys(seed, t, clients.n, cohort)
    everyone = cohort == clients.n
    rows = lambda value: value if everyone else jax.tree.map(lambda a: a[keys.ids], value)
    own = carry._replace(memory=rows(carry.memory), client=rows(carry.client))
    made, report = program(
        consts, clients, Given(own, hyper, jnp.asarray(t, jnp.int32), keys.ids, clients.weights, keys.key, keys.private)
    )
    after = made.carry
    if made.stayed is not None:  # who missed an exchange keeps the memory of before
        keep = lambda new, old: jnp.where(made.stayed.reshape(-1, *(1,) * (new.ndim - 1)), new, old)
        memory, client = jax.tree.map(keep, (after.memory, after.client), (own.memory, own.client))
        after = after._replace(memory=memory, client=client)
    report["finite"] = _finite(after)
    return keys.ids, own, after, report


def put(carry: Carry, ids: Any, own: Carry, after: Carry, good: Any, everyone: bool) -> Carry:
    """The carry with the cohort's rows written; if the round was not good, what it was."""
    choose = lambda new, old: jax.tree.map(lambda a, b: jnp.where(good, a, b), new, old)
    state, server = choose((after.state, after.server), (own.state, own.server))
    memory, client = choose((after.memory, after.client), (own.memory, own.client))
    if not everyone:
        put = lambda whole, rows: whole.at[ids].set(rows)
        memory, client = jax.tree.map(put, (carry.memory, carry.client), (memory, client))
    return Carry(state, memory, client, server)


def advance(
    program: Program, cohort: int, minimum: int, limit: int, consts: Any, clients: Clients, hyper: Any, carry: Carry,
    begin: Any, rounds: Any, strict: Any, seed: Array,
) -> Any:  # fmt: skip
    """At most `rounds` rounds from round `begin` on, until one is not good; `carry` is donated."""
    begin, rounds = jnp.asarray(begin, jnp.int32), jnp.asarray(rounds, jnp.int32)
    once = jax.jit(partial(one_round, program, cohort, consts, clients, hyper))  # traced once, for shapes and loop
    reported = jax.eval_shape(once, carry, begin, seed)[-1]
    leaves, structure = jax.tree.flatten(reported)
    width = sum(leaf.size for leaf in leaves)

    def body(state: Any) -> Any:
        i, _, carry, reports = state
        ids, own, after, report = once(carry, begin + i, seed)
        enough = report["least"] >= minimum
        good = enough & (jnp.all(report["finite"]) | ~strict)
        row = jnp.concatenate([leaf.astype(jnp.uint32).ravel() for leaf in jax.tree.leaves(report)])
        carry = put(carry, ids, own, after, good, cohort == clients.n)
        return i + 1, good, carry, reports.at[i].set(row)

    first = (jnp.int32(0), jnp.bool_(True), carry, jnp.zeros((limit, width), jnp.uint32))
    *_, carry, reports = jax.lax.while_loop(lambda s: (s[0] < rounds) & s[1], body, first)
    columns = jnp.split(reports, np.cumsum([leaf.size for leaf in leaves])[:-1].tolist(), axis=1)
    back = [c.reshape(limit, *leaf.shape).astype(leaf.dtype) for c, leaf in zip(columns, leaves, strict=True)]
    return carry, jax.tree.unflatten(structure, back)


# The interpreter.


@dataclass
class _Mapped:
    """A client's function and its inputs; computed when somebody needs it."""

    eqn: Any
    ids: Array
    sent: list[Any]
    key: Any
    own: list[Any]  # arrays, or (_Mapped, output)
    rows: list[Any] = field(default_factory=list)  # once computed; None for what nobody needs


class Interpreter:
    """Evaluates a plan's steps for a cohort in this process, under a trace."""

    def __init__(self, clients: Clients, axes: list[Any], block: int | str) -> None:
        self._clients, self._axes, self._block = clients, axes, block
        self._worked_here: list[Any] = []  # for each function, a row of counts for each client
        self._worked_in_loops: list[Any] = []
        self.turns: dict[int, Any] = {}  # how often loops of traced length ran

    @property
    def work(self) -> Any:
        """What all clients have done: see `ledger.worked`."""
        total = jnp.asarray(ledger.NO_WORK)
        by_size: dict[int, list[Any]] = {}
        for counts in self._worked_here:
            by_size.setdefault(len(counts), []).append(counts)
        for each in by_size.values():
            total = ledger.add(total, ledger.worked(jnp.stack(each)))
        for done in self._worked_in_loops:
            total = ledger.add(total, done)
        return total

    def run(self, body: Body, inputs: list[Any]) -> list[Any]:
        """The values of the body's outputs."""
        values: dict[Var, Any] = dict(zip(body.inputs, inputs, strict=True))
        left = dict(body.uses)  # how often a value will still be read
        deferred: list[_Mapped] = []  # functions that may not have been computed yet
        read = lambda v: jaxprs.literal(v) if isinstance(v, Literal) else values[v]
        for step in body.steps:
            if isinstance(step, Server):
                out = jaxprs.run(step.jaxpr, *(values[v] for v in step.inputs))
                values.update(zip(step.outputs, out, strict=True))
                continue
            eqn = step.eqn
            given = [read(v) for v in eqn.invars]
            for v in eqn.invars:
                if isinstance(v, Var):
                    left[v] -= 1

            def wanted(mapped: _Mapped, group: set[int]) -> list[bool]:
                later = {(id(m), i) for d in deferred if not d.rows and id(d) not in group for m, i in _mapped(d.own)}
                return [left.get(v, 0) > 0 or (id(mapped), i) in later for i, v in enumerate(mapped.eqn.outvars)]

            out = self.call(step, given, wanted)
            deferred += [out[0][0]] if eqn.primitive is fed.client_map and out else []
            values.update(zip(eqn.outvars, out, strict=True))
        return [self._array(read(v)) for v in body.outputs]

    def call(self, step: Call, given: list[Any], wanted: Callable[[_Mapped, set[int]], list[bool]]) -> list[Any]:
        """One of our primitives. `wanted` tells which outputs of a mapped function will be read later on."""
        eqn, params = step.eqn, step.eqn.params
        if eqn.primitive is fed.client_map:
            inputs: Inputs = params["inputs"]
            ids, rest = given[0], given[1 + inputs.sent :]
            key = rest.pop(0) if inputs.key else None
            mapped = _Mapped(eqn, ids, [self._array(v) for v in given[1 : 1 + inputs.sent]], key, rest)
            return [(mapped, i) for i in range(len(eqn.outvars))]
        if eqn.primitive is fed.scatter:
            return given[1:]
        if eqn.primitive is fed.reduce:
            weights, *rest = given[1:]
            present = rest.pop(0) if params["lossy"] else None
            return self._reduce(weights, present, rest, wanted) + ([present] if params["lossy"] else [])
        if eqn.primitive is fed.gather:
            if not params["lossy"]:
                return [self._array(v) for v in given[1:]]
            present, *rows = given[1:]
            there = lambda a: present.reshape(-1, *(1,) * (a.ndim - 1))
            arrays = [self._array(v) for v in rows]
            return [*(jnp.where(there(a), a, jnp.zeros((), a.dtype)) for a in arrays), present]
        if eqn.primitive is fed.center:
            return self._center(params, given)
        return self._loop(step, [self._array(v) for v in given])

    def _array(self, value: Any) -> Any:
        """A value; a mapped function's is computed."""
        if isinstance(value, tuple):
            mapped, i = value
            if not mapped.rows:
                self._compute(self._group([value]), _all)
            return mapped.rows[i]
        return value

    def _group(self, values: list[Any]) -> list[_Mapped]:
        """The functions that have to be computed for these values, in order."""
        found: dict[int, _Mapped] = {}

        def visit(value: Any) -> None:
            if isinstance(value, tuple) and not value[0].rows and id(value[0]) not in found:
                for own in value[0].own:
                    visit(own)
                found[id(value[0])] = value[0]

        for value in values:
            visit(value)
        return list(found.values())

    def _reduce(self, weights: Any, present: Any, values: list[Any], wanted: Any) -> list[Any]:
        group = self._group(values)
        if present is not None:
            weights = jnp.where(present, weights, 0)
        if not group or len(weights) <= self._block_of(group):
            if group:
                self._compute(group, _all)
            return [weighted_sum(weights, self._array(v)) for v in values]
        return self._compute(group, wanted, (weights, values))

    def _compute(self, group: list[_Mapped], wanted: Any, reduced: Any = None) -> list[Any]:
        """Compute functions, in blocks if the cohort is larger; values to be reduced are added up block by block.

        What is wanted later is kept with a row for each client.
        """
        size, block = len(group[0].ids), self._block_of(group)
        inside = {id(m) for m in group}
        if size <= block:
            for mapped in group:
                own = [self._array(v) for v in mapped.own]
                mapped.rows, counts = self._apply(mapped, mapped.ids, own)
                self._worked(mapped, mapped.ids, counts)
            return []
        blocks = -(-size // block)
        block = -(-size // blocks)
        padding = blocks * block - size

        def cut(a: Any) -> Any:
            a = jnp.concatenate([a, jnp.broadcast_to(a[:1], (padding, *a.shape[1:]))]) if padding else a
            return a.reshape(blocks, block, *a.shape[1:])

        outside = [[None if _inside(v, inside) else cut(self._array(v)) for v in m.own] for m in group]
        keep = [wanted(m, inside) for m in group]
        valid = (jnp.arange(blocks * block) < size).reshape(blocks, block)
        weights, values = reduced if reduced is not None else (jnp.zeros(size), [])
        weights = cut(weights)

        def one(total: Any, xs: Any) -> Any:
            ids, own, weights, valid = xs
            rows: dict[int, list[Any]] = {}
            counts = []
            for mapped, given, who in zip(group, own, ids, strict=True):
                args = [rows[id(v[0])][v[1]] if g is None else g for v, g in zip(mapped.own, given, strict=True)]
                rows[id(mapped)], done = self._apply(mapped, who, args)
                counts.append(jnp.where(valid[:, None, None], done, 0))
            masked = jnp.where(valid, weights, 0)
            added = [weighted_sum(masked, rows[id(v[0])][v[1]]) for v in values if _inside(v, inside)]
            kept = [
                [a for a, is_kept in zip(rows[id(m)], k, strict=True) if is_kept]
                for m, k in zip(group, keep, strict=True)
            ]
            return jax.tree.map(jnp.add, total, added), (kept, counts)

        avals = [m.eqn.outvars[i].aval for v in values if _inside(v, inside) for m, i in [v]]
        zeros = [jnp.zeros(a.shape[1:], fed.accumulator(a.dtype)) for a in avals]
        xs = ([cut(m.ids) for m in group], outside, weights, valid)
        total, (kept, counts) = jax.lax.scan(one, zeros, xs)
        whole = lambda a: a.reshape(blocks * block, *a.shape[2:])[:size]
        for mapped, is_kept, rows, done in zip(group, keep, kept, counts, strict=True):
            found = iter(rows)
            mapped.rows = [whole(next(found)) if k else None for k in is_kept] or [None]
            self._worked(mapped, mapped.ids, whole(done))
        if reduced is None:
            return []
        sums, result = iter(total), []
        for v in values:
            result.append(next(sums) if _inside(v, inside) else weighted_sum(reduced[0], self._array(v)))
        return result

    def _apply(self, mapped: _Mapped, ids: Any, own: list[Any]) -> tuple[list[Any], Any]:
        """A client's function on some clients side by side: rows of its values, and of what they count."""
        inputs: Inputs = mapped.eqn.params["inputs"]
        data = jax.tree.leaves(self._clients.members(ids))
        args: list[Any] = list(mapped.sent)
        axes: list[int | None] = [None] * inputs.sent
        args += [data[i] for i in inputs.data]
        axes += [self._axes[i] for i in inputs.data]
        if inputs.identity:
            args, axes = [*args, ids], [*axes, 0]
        if inputs.key:
            args, axes = [*args, jax.vmap(lambda i: jax.random.fold_in(mapped.key, i))(ids)], [*axes, 0]
        work = mapped.eqn.params["work"]
        out = jax.vmap(lambda *a: jaxprs.run(work, *a), [*axes, *[0] * len(own)], axis_size=len(ids))(*args, *own)
        return out[:-1], out[-1]

    def _worked(self, mapped: _Mapped, ids: Any, counts: Any) -> None:
        if mapped.eqn.params["repeats"]:  # who was drawn twice has worked once
            counts = jnp.where(jnp.diff(ids, prepend=-1)[:, None, None] > 0, counts, 0)
        self._worked_here.append(counts)

    def _center(self, params: dict[str, Any], given: list[Any]) -> list[Any]:
        inputs: Inputs = params["inputs"]
        data = jax.tree.leaves(self._clients.at_center())
        sent, key = given[: inputs.sent], given[inputs.sent :]
        identity = [jnp.int32(self._clients.n)] if inputs.identity else []
        *out, counts = jaxprs.run(params["work"], *sent, *(data[i] for i in inputs.data), *identity, *key)
        self._worked_here.append(counts[None])
        return out

    def _loop(self, step: Call, given: list[Any]) -> list[Any]:
        body, length = step.body, step.eqn.params["length"]
        assert body is not None
        count, number_of_loop = np.int32(length) if length is not None else given.pop(0), step.number
        split = len(given) - len(body.outputs)
        fixed, carry = given[:split], given[split:]
        inner = plan.traced_loops(body)

        def turn(i: Any, values: Any) -> Any:
            inside = Interpreter(self._clients, self._axes, self._block)
            values = inside.run(body, [*fixed, i, *values])
            return values, (inside.work, [inside.turns[number] for number in inner])

        traced = jaxprs.LoopBody(turn, carry)
        each = traced.constants_of_aux()  # what every turn costs, where that is always the same
        if each is not None:
            carry = jax.lax.fori_loop(np.int32(0), count, lambda i, carry: traced(i, carry)[0], traced.carry)
            done, turns = ledger.times(each[0], jnp.maximum(count, 0)), each[1]
            turns = [jnp.broadcast_to(n, (length, *n.shape)) for n in turns]
        else:

            def one(state: Any, i: Any) -> Any:
                carry, (added, turns) = traced(i, state[0])
                return (carry, ledger.add(state[1], added)), turns

            start = (traced.carry, jnp.asarray(ledger.NO_WORK))
            if length is None:
                carry, done = jax.lax.fori_loop(np.int32(0), count, lambda i, state: one(state, i)[0], start)
                turns = []
            else:
                (carry, done), turns = jax.lax.scan(one, start, jnp.arange(length, dtype=jnp.int32))
        self.turns.update(zip(inner, turns, strict=True))
        if length is None:
            self.turns[number_of_loop] = jnp.maximum(count, 0)
        self._worked_in_loops.append(done)
        return carry

    def _block_of(self, group: list[_Mapped]) -> int:
        if isinstance(self._block, int):
            return self._block
        if jax.default_backend() == "cpu" and any(_large_products(m.eqn.params["work"]) for m in group):
            return 1
        replies = sum(ledger.nbytes([v.aval for v in m.eqn.outvars]) // len(m.ids) for m in group)
        most = _AUTO_BYTES.get(jax.default_backend(), 2**28)
        return max(1, min(_AUTO_BLOCK, most // max(replies, 1)))


def _large_products(jaxpr: Jaxpr) -> bool:
    """Whether there is a product of matrices, two of its three of them so large that several clients' fill a cache."""
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "dot_general":
            sizes = sorted(ledger.nbytes([v.aval]) for v in (*eqn.invars, *eqn.outvars))
            if sizes[1] > _CACHE:
                return True
        if any(map(_large_products, jaxprs.within(eqn.params))):
            return True
    return False


def _all(mapped: _Mapped, _: set[int]) -> list[bool]:
    return [True] * len(mapped.eqn.outvars)


def _mapped(values: list[Any]) -> list[Any]:
    """Those of the values that are outputs of functions."""
    return [value for value in values if isinstance(value, tuple)]


def _inside(value: Any, group: set[int]) -> bool:
    return isinstance(value, tuple) and id(value[0]) in group


def weighted_sum(weights: Array, rows: Array) -> Array:
    """Σ w_j v_j in float32 or better: no product of matrices, which a GPU would round. Weight 0: not looked at."""
    kind = fed.accumulator(rows.dtype)
    w = weights.astype(kind).reshape(-1, *(1,) * (rows.ndim - 1))
    product = w * rows.astype(kind)
    return jnp.sum(jnp.where(w != 0, product, 0), axis=0)


class SimulatedFed(Fed):
    """The primitives evaluated at once, under any trace: for trying a part of an algorithm by itself.

    Arguments:
        problem, clients, ids: the cohort `ids` of these clients.
        counted: a `Ledger`, which is not written to.
        memory: what the cohort remembers, a row for each.
        block: clients side by side.
    """

    def __init__(
        self, problem: Any, clients: Clients, ids: Array, counted: Any, memory: Any = None, block: int | str = "auto",
        debug: bool = False,
    ) -> None:  # fmt: skip
        super().__init__(problem, clients, clients.weights, ids, Book(threaded=Threaded(memory)))
        self._interpreter = Interpreter(clients, clients.client_axes(), block)

    def _bind(self, primitive: Any, *args: Any, **params: Any) -> list[Any]:
        traced, _ = jaxprs.trace(lambda *a: primitive.bind(*a, **params), *args)
        body = plan.steps(jaxprs.open_up(traced), iter(range(10**9)))
        return self._interpreter.run(body, [*traced.consts, *args])
