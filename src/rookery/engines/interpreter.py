"""The interpreter, which evaluates a plan for a cohort in this process, vectorised and under a trace."""

import functools
import itertools
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from rookery.base import jaxprs
from rookery.base.compat import Jaxpr, Literal
from rookery.data.clients import Clients
from rookery.language import ledger
from rookery.language.primitives import sum_type, zeroed
from rookery.plan import calls
from rookery.plan.calls import Read, Visitor
from rookery.plan.costs import counted_loops

AUTO_BLOCK, _AUTO_BYTES = 128, {"cpu": 2**20, "gpu": 2**30}  # clients side by side, and the bytes of their replies
_CACHE = 2**15  # bytes of a matrix beyond which a CPU's cache does not hold those of several clients


class Fitting(NamedTuple):
    """A block of as many clients as fit into a device's memory; on a CPU, whose caches are small, often fewer."""

    fit: int


Block = int | str | Fitting  # clients computed side by side; "auto": chosen without regard to memory


@dataclass(eq=False)
class Mapped:
    """A client's function and its operands. The function is computed when one of its values is needed."""

    call: calls.MapCall
    ids: Array
    sent: list[Any]
    key: Any
    local: list[Any]  # arrays, or `MappedValue`s
    noise: Any = None
    levels: Any = None
    rows: list[Any] = field(default_factory=list)  # once computed; None for values that are not read


class MappedValue(NamedTuple):
    """One value of a client's function, which may not have been computed yet."""

    mapped: Mapped
    output: int

    @property
    def rows(self) -> Any:
        """A row for each client."""
        return self.mapped.rows[self.output]

    @property
    def aval(self) -> Any:
        """The shape and type of all rows."""
        return self.mapped.call.outputs[self.output].aval

    def within(self, group: "list[Mapped]") -> bool:
        """Return whether it is a value of one of these functions."""
        return any(self.mapped is mapped for mapped in group)


def is_within(value: Any, group: list[Mapped]) -> bool:
    """Return whether it is a value of one of these functions."""
    return isinstance(value, MappedValue) and value.within(group)


class Interpreter(Visitor[Any]):
    """Evaluates the steps of one body. Per-client values are arrays with a row for each client of the cohort.

    Clients' functions are computed as late as possible, together with the exchange that needs them. A cohort larger
    than a block is then computed block by block, and only the sums are kept.
    """

    def __init__(self, clients: Clients, axes: list[Any], block: Block) -> None:
        self._clients, self._axes, self._block = clients, axes, block
        self._deferred: list[Mapped] = []  # functions that may not have been computed yet
        self._taken: tuple[Any, Any] = None, None  # the clients whose data were taken last, and the data
        self._worked_here: list[Any] = []  # for each function, a row of counts for each client
        self._worked_in_loops: list[Any] = []
        self.turns: dict[int, Any] = {}  # by number, the turns of loops whose length only the run determines

    @property
    def work(self) -> Any:
        """The work of all clients: see `ledger.worked`."""
        by_size: dict[int, list[Any]] = {}
        for counts in self._worked_here:
            by_size.setdefault(len(counts), []).append(counts)
        done = [self._total_work(jnp.stack(same_size)) for same_size in by_size.values()] + self._worked_in_loops
        return functools.reduce(ledger.add, done) if done else jnp.asarray(ledger.NO_WORK)

    def _total_work(self, counts: Any) -> Any:
        """The work of all clients in several functions, from a row of counts for each client."""
        return ledger.worked(counts)

    def run(self, body: calls.Body, inputs: list[Any]) -> list[Any]:
        """Return the values of the body's outputs, as arrays."""
        return [self._array(value) for value in self.visit(body, inputs)]

    def literal(self, literal: Literal) -> Any:
        return jaxprs.literal(literal)

    def server(self, step: calls.ServerWork, read: Read) -> list[Any]:
        return jaxprs.run(step.jaxpr, *read(step.operands))

    def map(self, call: calls.MapCall, read: Read) -> list[Any]:
        """Defer a client function: it is computed when a value of it is needed."""
        sent = [self._array(value) for value in read(call.sent)]
        noise = read(call.noise), read(call.levels)
        mapped = Mapped(call, read(call.ids), sent, read(call.key), read(call.local), *noise)
        self._deferred.append(mapped)
        return [MappedValue(mapped, i) for i in range(len(call.outputs))]

    def scatter(self, call: calls.ScatterCall, read: Read) -> list[Any]:
        return [read(call.rows)]

    def reduce(self, call: calls.ReduceCall, read: Read) -> list[Any]:
        weights, present = read(call.weights), read(call.present)
        replies = [] if present is None else [present]
        masked = weights if present is None else jnp.where(present, weights, 0)
        rows = read(call.rows) if call.unpack is None else self._unpacked(call, read)
        return [*self._weighted_sums(read(call.ids), masked, rows), *replies]

    def _unpacked(self, call: calls.ReduceCall, read: Read) -> list[Any]:
        """The rows of compressed messages, unpacked when they are needed, as by a function of the clients."""
        assert call.unpack is not None
        rows = read(call.rows)
        repeats = any(isinstance(row, MappedValue) and row.mapped.call.repeats for row in rows)
        mapped = Mapped(call.unpacking(repeats), read(call.ids), read(call.unpack.operands), None, rows)
        self._deferred.append(mapped)
        return [MappedValue(mapped, i) for i in range(len(mapped.call.outputs))]

    def gather(self, call: calls.GatherCall, read: Read) -> list[Any]:
        rows = [self._gathered(read(call.ids), self._array(value)) for value in read(call.rows)]
        present = read(call.present)
        if present is None:
            return rows
        return [*(zeroed(present, a) for a in rows), present]

    def center(self, call: calls.CenterCall, read: Read) -> list[Any]:
        data = jax.tree.leaves(self._clients.at_center())
        noise = (), read(call.noise), read(call.levels)
        arguments = call.arguments(read(call.sent), data, jnp.int32(self._clients.n), read(call.key), *noise)
        *out, counts = jaxprs.run(call.work, *arguments)
        self._worked_at_center(counts[None])
        return out

    def loop(self, call: calls.LoopCall, read: Read) -> list[Any]:
        length, body = call.length, call.body
        count: Any = np.int32(length) if length is not None else self._array(read(call.count))
        fixed, carry = ([self._array(value) for value in read(operands)] for operands in (call.fixed, call.carry))
        inner = counted_loops(body)

        def turn(i: Any, values: Any) -> Any:
            inside = self._inside()
            values = inside.run(body, [*fixed, i, *values])
            return values, (inside.work, [inside.turns[number] for number in inner])

        traced = jaxprs.LoopBody(turn, carry)
        per_turn = traced.constants_of_aux()  # work and inner turns, if all turns have the same
        drawn = traced.before(length)
        if per_turn is not None:
            one_turn = lambda i, carry: traced(i, carry, drawn(i))[0]
            carry = jax.lax.fori_loop(np.int32(0), count, one_turn, traced.carry)
            done, turns = ledger.times(per_turn[0], jnp.maximum(count, 0)), per_turn[1]
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
            self.turns[call.number] = jnp.maximum(count, 0)
        self._worked_in_loops.append(done)
        return carry

    def _inside(self) -> "Interpreter":
        """A new interpreter, for a loop's body."""
        return Interpreter(self._clients, self._axes, self._block)

    # Clients' functions.

    def _array(self, value: Any) -> Any:
        """The value as an array; a deferred function is computed first."""
        if not isinstance(value, MappedValue):
            return value
        if not value.mapped.rows:
            self._compute(self._group([value]))
        return value.rows

    def _group(self, values: list[Any]) -> list[Mapped]:
        """The functions that must be computed for these values, in order."""
        group: dict[int, Mapped] = {}

        def visit(value: Any) -> None:
            if isinstance(value, MappedValue) and not value.mapped.rows and id(value.mapped) not in group:
                for local in value.mapped.local:
                    visit(local)
                group[id(value.mapped)] = value.mapped

        for value in values:
            visit(value)
        return list(group.values())

    def _read_later(self, mapped: Mapped, group: list[Mapped]) -> list[bool]:
        """For each value of a function: whether a later step, or a function outside this group, reads it."""
        waiting = [d for d in self._deferred if not d.rows and d not in group]
        pending = [v for d in waiting for v in d.local if isinstance(v, MappedValue) and v.mapped is mapped]
        read = {v.output for v in pending}
        return [self.remaining[v] > 0 or i in read for i, v in enumerate(mapped.call.outputs)]

    def _weighted_sums(self, ids: Any, weights: Any, values: list[Any]) -> list[Any]:
        group = self._group(values)
        if group and len(weights) > self._block_of(group):
            return self._compute(group, (weights, values))
        if group:
            self._compute(group)
        return [weighted_sum(weights, self._array(v)) for v in values]

    def _gathered(self, ids: Any, rows: Any) -> Any:
        """All rows of a per-client value, one for each member of the cohort."""
        return rows

    def _compute(self, group: list[Mapped], reduced: Any = None) -> list[Any]:
        """Compute functions, in blocks if the cohort is larger than a block.

        `reduced`: weights and values, for a cohort that is larger. With it, return the weighted sums of the values,
        added up block by block, and keep only the rows that are read later. Without it, keep all rows.
        """
        size, block = len(group[0].ids), self._block_of(group)
        if size <= block or (reduced is None and all(mapped.call.same_for_all for mapped in group)):
            for mapped in group:
                local = [self._array(v) for v in mapped.local]
                mapped.rows, counts = self._apply(mapped, mapped.ids, local)
                self._worked(mapped, mapped.ids, counts)
            return []
        blocks = -(-size // block)
        block = -(-size // blocks)
        padding = blocks * block - size

        def cut(a: Any) -> Any:
            a = jnp.concatenate([a, jnp.broadcast_to(a[:1], (padding, *a.shape[1:]))]) if padding else a
            return a.reshape(blocks, block, *a.shape[1:])

        outside = [[None if is_within(v, group) else cut(self._array(v)) for v in m.local] for m in group]
        keep = self._kept(group, reduced)
        valid = (jnp.arange(blocks * block) < size).reshape(blocks, block)
        weights, values = reduced if reduced is not None else (jnp.zeros(size), [])
        inside = [v for v in values if is_within(v, group)]

        def one(total: Any, xs: Any) -> Any:
            ids, local, weights, valid = xs
            masked = jnp.where(valid, weights, 0)
            added, kept, counts = self._on_block(group, ids, local, inside, masked, valid, keep)
            return jax.tree.map(jnp.add, total, added), (kept, counts)

        zeros = [jnp.zeros(v.aval.shape[1:], sum_type(weights.dtype, v.aval.dtype)) for v in inside]
        xs = ([cut(m.ids) for m in group], outside, cut(weights), valid)
        total, (kept, counts) = jax.lax.scan(one, zeros, xs)
        whole = lambda a: a.reshape(blocks * block, *a.shape[2:])[:size]
        for mapped, is_kept, rows, done in zip(group, keep, kept, counts, strict=True):
            remaining = iter(rows)
            mapped.rows = [whole(next(remaining)) if k else None for k in is_kept] or [None]
            self._worked(mapped, mapped.ids, whole(done))
        sums = iter(total)
        return [next(sums) if is_within(v, group) else weighted_sum(weights, self._array(v)) for v in values]

    def _kept(self, group: list[Mapped], reduced: Any) -> list[list[bool]]:
        """Which values of each function in a group are kept, with a row for each client."""
        if reduced is None:
            return [[True] * len(mapped.call.outputs) for mapped in group]
        return [self._read_later(mapped, group) for mapped in group]

    def _on_block(
        self, group: list[Mapped], ids: Any, local: Any, values: list[MappedValue], weights: Any, valid: Any, keep: Any
    ) -> tuple[list[Any], Any, list[Any]]:
        """Compute functions for a block of clients: weighted sums of `values`, the rows to keep, and counts of work.

        `local` has None for operands that the group itself computes.
        """
        rows: dict[Mapped, list[Any]] = {}
        counts = []
        for mapped, block_ids, arrays in zip(group, ids, local, strict=True):
            both = zip(mapped.local, arrays, strict=True)
            operands = [rows[v.mapped][v.output] if array is None else array for v, array in both]
            rows[mapped], done = self._apply(mapped, block_ids, operands)
            counts.append(jnp.where(valid[:, None, None], done, 0))
        sums = [weighted_sum(weights, rows[v.mapped][v.output]) for v in values]
        kept = [list(itertools.compress(rows[mapped], flags)) for mapped, flags in zip(group, keep, strict=True)]
        return sums, kept, counts

    def _apply(self, mapped: Mapped, ids: Any, local: list[Any]) -> tuple[list[Any], Any]:
        """Compute a function for some clients side by side. Returns rows of its values, and of counts of work."""
        call = mapped.call
        each = lambda key: None if key is None else self._keys(key, ids)
        if self._taken[0] is not ids:  # the maps of a cohort share its data
            self._taken = ids, jax.tree.leaves(self._members(ids))
        data = self._taken[1]
        axes = call.arguments([None] * len(mapped.sent), self._axes, 0, 0, [0] * len(local), 0, None)
        keys, noise = each(mapped.key), each(mapped.noise)
        arguments = call.arguments(mapped.sent, data, self._numbers(ids), keys, local, noise, mapped.levels)
        out = jax.vmap(lambda *a: jaxprs.run(call.work, *a), axes, axis_size=len(ids))(*arguments)
        return out[:-1], out[-1]

    def _worked(self, mapped: Mapped, ids: Any, counts: Any) -> None:
        if mapped.call.repeats:  # a client that is drawn twice works once
            counts = jnp.where(jnp.diff(ids, prepend=-1)[:, None, None] != 0, counts, 0)
        self._worked_here.append(counts)

    def _worked_at_center(self, counts: Any) -> None:
        self._worked_here.append(counts)

    def _keys(self, key: Array, ids: Any) -> Array:
        """The keys of these clients."""
        return jax.vmap(lambda i: jax.random.fold_in(key, i))(ids)

    def _numbers(self, ids: Any) -> Any:
        """The numbers of these clients."""
        return ids

    def _members(self, ids: Any) -> Clients:
        """The data of these clients."""
        return self._clients.members(ids)

    def _block_of(self, group: list[Mapped]) -> int:
        if isinstance(self._block, int):
            return self._block
        fit = self._block.fit if isinstance(self._block, Fitting) else None
        return auto_block([mapped.call for mapped in group], fit)


def auto_block(maps: list[calls.MapCall], fit: int | None = None) -> int:
    """The number of clients, at most `fit`, that compute these maps side by side."""
    if fit is not None and jax.default_backend() != "cpu":
        return fit
    if jax.default_backend() == "cpu" and any(_large_products(call.work) for call in maps):
        return 1
    replies = sum(ledger.nbytes(call.reply) for call in maps)
    most = _AUTO_BYTES.get(jax.default_backend(), 2**28)
    return max(1, min(AUTO_BLOCK, most // max(replies, 1), fit or AUTO_BLOCK))


def _large_products(jaxpr: Jaxpr) -> bool:
    """Return whether it multiplies a matrix so large that several clients' matrices do not fit into a cache."""
    large = lambda eqn: any(ledger.nbytes([v.aval]) > _CACHE for v in (*eqn.invars, *eqn.outvars))
    return any(
        (eqn.primitive is jax.lax.dot_general_p and large(eqn)) or any(map(_large_products, jaxprs.within(eqn.params)))
        for eqn in jaxpr.eqns
    )


def weighted_sum(weights: Array, rows: Array) -> Array:
    """Σ w_j v_j over the rows with a weight other than 0, in float32 or better; in a secure sum, modulo 2^k.

    It is not a matrix product, which a GPU would round to fewer bits.
    """
    kind = sum_type(weights.dtype, rows.dtype)
    w = weights.astype(kind).reshape(-1, *(1,) * (rows.ndim - 1))
    product = w * rows.astype(kind)
    return jnp.sum(jnp.where(w != 0, product, 0), axis=0, dtype=kind)
