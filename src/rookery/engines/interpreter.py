"""The interpreter: evaluates a plan's steps for a cohort, vectorised, under a trace."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from rookery.base import jaxprs
from rookery.base.compat import Jaxpr, Literal, Var
from rookery.data.clients import Clients
from rookery.language import fed, ledger
from rookery.language.fed import Book, Fed, Inputs, Threaded
from rookery.plan import trace as plan
from rookery.plan.trace import Body, Call, Server

AUTO_BLOCK, _AUTO_BYTES = 128, {"cpu": 2**20, "gpu": 2**30}  # of clients side by side, and of their replies
_DRAWN_AHEAD = 2**20  # bytes of one of a loop's draws that are made before it
_CACHE = 2**15  # bytes of a matrix that leaves no room for many other clients' in a CPU's cache


class Fitting(NamedTuple):
    """As many clients side by side as a device has room for; on a CPU, whose caches are small, often fewer."""

    fit: int


Block = int | str | Fitting  # "auto": as many as seem good, whatever the memory


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

    def __init__(self, clients: Clients, axes: list[Any], block: Block) -> None:
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
            total = ledger.add(total, self._of_all(jnp.stack(each)))
        for done in self._worked_in_loops:
            total = ledger.add(total, done)
        return total

    def _of_all(self, counts: Any) -> Any:
        """What clients have done in several functions, of a row for each."""
        return ledger.worked(counts)

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
            return self._reduce(given[0], weights, present, rest, wanted) + ([present] if params["lossy"] else [])
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
                self._compute(self._group([value]), everything)
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

    def _reduce(self, ids: Any, weights: Any, present: Any, values: list[Any], wanted: Any) -> list[Any]:
        group = self._group(values)
        if present is not None:
            weights = jnp.where(present, weights, 0)
        if not group or len(weights) <= self._block_of(group):
            if group:
                self._compute(group, everything)
            return [weighted_sum(weights, self._array(v)) for v in values]
        return self._compute(group, wanted, (weights, values))

    def _compute(self, group: list[_Mapped], wanted: Any, reduced: Any = None) -> list[Any]:
        """Compute functions, in blocks if the cohort is larger; values to be reduced are added up block by block.

        What is wanted later is kept with a row for each client.
        """
        size, block = len(group[0].ids), self._block_of(group)
        among = {id(m) for m in group}
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

        outside = [[None if inside(v, among) else cut(self._array(v)) for v in m.own] for m in group]
        keep = [wanted(m, among) for m in group]
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
            added = [weighted_sum(masked, rows[id(v[0])][v[1]]) for v in values if inside(v, among)]
            kept = [
                [a for a, is_kept in zip(rows[id(m)], k, strict=True) if is_kept]
                for m, k in zip(group, keep, strict=True)
            ]
            return jax.tree.map(jnp.add, total, added), (kept, counts)

        avals = [m.eqn.outvars[i].aval for v in values if inside(v, among) for m, i in [v]]
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
            result.append(next(sums) if inside(v, among) else weighted_sum(reduced[0], self._array(v)))
        return result

    def _apply(self, mapped: _Mapped, ids: Any, own: list[Any]) -> tuple[list[Any], Any]:
        """A client's function on some clients side by side: rows of its values, and of what they count."""
        inputs: Inputs = mapped.eqn.params["inputs"]
        data = jax.tree.leaves(self._members(ids))
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
            each = self._inside()
            values = each.run(body, [*fixed, i, *values])
            return values, (each.work, [each.turns[number] for number in inner])

        traced = jaxprs.LoopBody(turn, carry)
        each = traced.constants_of_aux()  # what every turn costs, where that is always the same
        drawn = traced.before(length, _DRAWN_AHEAD)
        if each is not None:
            one_turn = lambda i, carry: traced(i, carry, drawn(i))[0]
            carry = jax.lax.fori_loop(np.int32(0), count, one_turn, traced.carry)
            done, turns = ledger.times(each[0], jnp.maximum(count, 0)), each[1]
            turns = [jnp.broadcast_to(n, (length, *n.shape)) for n in turns]
        else:

            def one(state: Any, i: Any) -> Any:
                carry, (added, turns) = traced(i, state[0], drawn(i))
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

    def _members(self, ids: Any) -> Clients:
        """The data of these clients."""
        return self._clients.members(ids)

    def _inside(self) -> "Interpreter":
        """One for a loop's body."""
        return Interpreter(self._clients, self._axes, self._block)

    def _block_of(self, group: list[_Mapped]) -> int:
        if isinstance(self._block, int):
            return self._block
        fit = self._block.fit if isinstance(self._block, Fitting) else None
        return auto_block([m.eqn for m in group], fit)


def auto_block(maps: list[Any], fit: int | None = None) -> int:
    """The clients that compute these maps side by side, of whom there is room for `fit`."""
    if fit is not None and jax.default_backend() != "cpu":
        return fit
    if jax.default_backend() == "cpu" and any(_large_products(eqn.params["work"]) for eqn in maps):
        return 1
    replies = sum(ledger.nbytes([v.aval for v in eqn.outvars]) // eqn.invars[0].aval.shape[0] for eqn in maps)
    most = _AUTO_BYTES.get(jax.default_backend(), 2**28)
    return max(1, min(AUTO_BLOCK, most // max(replies, 1), fit or AUTO_BLOCK))


def _large_products(jaxpr: Jaxpr) -> bool:
    """Whether there is a product of matrices one of which is so large that several clients' fill a cache."""
    large = lambda eqn: any(ledger.nbytes([v.aval]) > _CACHE for v in (*eqn.invars, *eqn.outvars))
    return any(
        (eqn.primitive is jax.lax.dot_general_p and large(eqn)) or any(map(_large_products, jaxprs.within(eqn.params)))
        for eqn in jaxpr.eqns
    )


def everything(mapped: _Mapped, _: set[int]) -> list[bool]:
    """That all outputs of a function will be read."""
    return [True] * len(mapped.eqn.outvars)


def _mapped(values: list[Any]) -> list[Any]:
    """Those of the values that are outputs of functions."""
    return [value for value in values if isinstance(value, tuple)]


def inside(value: Any, group: set[int]) -> bool:
    """Whether a value is an output of a function of this group."""
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
        self, problem: Any, clients: Clients, ids: Array, counted: Any, memory: Any = None, block: Block = "auto",
        debug: bool = False,
    ) -> None:  # fmt: skip
        super().__init__(problem, clients, clients.weights, ids, Book(threaded=Threaded(memory)))
        self._interpreter = Interpreter(clients, clients.client_axes(), block)

    def _bind(self, primitive: Any, *args: Any, **params: Any) -> list[Any]:
        traced, _ = jaxprs.trace(lambda *a: primitive.bind(*a, **params), *args)
        body = plan.steps(jaxprs.open_up(traced), iter(range(10**9)))
        return self._interpreter.run(body, [*traced.consts, *args])
