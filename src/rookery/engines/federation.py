"""The lock-step engine: a coordinator and sites that share algorithm, problem and seed, and exchange arrays.

Every side runs the same round. `map` is lazy, and an exchange is the only point where anything crosses: the coordinator
asks its sites, reduces their replies and goes on with the result; a site that is asked for exchange k replays the
results before it and computes its own k-th value alone, in one compiled function of (state, results so far, data, key),
with k static. It keeps what it computed for earlier exchanges and the algorithm still holds on to, and need not compute
it again; but a site that forgot everything except its data and memory can always catch up. The pieces of a loop come to
the same program, and `programs` compiles it once.

This file knows no transport: a site turns bytes into bytes, and the coordinator is given a function that carries them.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any, Literal
from weakref import WeakValueDictionary

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from rookery.clients import Clients, Count, sample_cohort
from rookery.engines import programs, wire
from rookery.engines.simulation import Amounts, Carry
from rookery.fed import WORK, Algorithm, Client, Exchange, describe
from rookery.hyperparameters import Split, at_round, join
from rookery.problems import Problem

Phase = Literal["init", "round"]
Transport = Callable[[int, bytes], bytes]  # (client, request) -> reply


class _Reached(Exception):
    """Ends a site's replay at the exchange it was asked for."""

    def __init__(self, value: "_Lazy") -> None:
        super().__init__()
        self.value = value


class _Lazy:
    """A per-client value, computed from others when somebody needs it, and then once.

    Arguments:
        compute: compute(*values) gives this one and the work it was, or None.
        inputs: what it is computed from.
        done: told the work.
    """

    def __init__(
        self, compute: Callable[..., tuple[Any, Any]], inputs: Sequence["_Lazy | None"] = (),
        done: Callable[[Any], None] = lambda work: None,
    ) -> None:  # fmt: skip
        self._compute: Callable[..., tuple[Any, Any]] | None = compute
        self._inputs, self._done = inputs, done
        self._value: Any = None
        self._shapes: Any = None

    @property
    def computed(self) -> bool:
        """Whether it has been."""
        return self._compute is None

    def force(self) -> Any:
        """The value."""
        if self._compute is not None:
            self._value, work = self._compute(*(v and v.force() for v in self._inputs))
            self._done(work)
            self._compute, self._inputs = None, ()
        return self._value

    def shapes(self) -> Any:
        """The shapes of the value, without computing it."""
        if self._shapes is None:
            compute = self._compute or (lambda: (self._value, None))
            self._shapes = jax.eval_shape(compute, *(v and v.shapes() for v in self._inputs))[0]
        return self._shapes


@dataclass
class _Script:
    """How far one side has come in a round; cohorts of one round share it."""

    exchange: Callable[..., Any]  # (k, kind, value, name, ids, weights) -> the result; ids: None for the round's cohort
    count: Callable[[int, Count], int]  # (j, n) -> how often the j-th loop of traced length runs
    index: Callable[[int], Any] = int  # what a loop's body is given for i
    exchanges: int = 0
    loops: int = 0
    maps: int = 0
    work: dict[int, Array] = field(default_factory=dict)  # of the maps that were computed
    kept: dict[int, Any] = field(default_factory=dict)  # values of maps that were computed before
    alive: WeakValueDictionary[int, _Lazy] = field(default_factory=WeakValueDictionary)  # what the algorithm holds
    touched: bool = False  # whether the clients' memory was used


class LockstepFed:
    """`Fed` for one side of the protocol."""

    def __init__(
        self, problem: Problem, n: int, cohort_size: int, script: _Script, client: Callable[..., Client], memory: Any,
        members: Array, ids: Any = None,
    ) -> None:  # fmt: skip
        self.problem, self.n, self.cohort_size = problem, n, cohort_size
        self._script, self._client, self._members, self._ids = script, client, members, ids
        self.memory = _Lazy(lambda: (memory, None))

    def map(self, fn: Callable[..., Any], key: Array, *values: _Lazy | None) -> _Lazy:
        """See `Fed.map`."""
        place, script = self._place(), self._script

        def compute(*own: Any) -> Any:
            client = self._client()
            value = fn(client, jax.random.fold_in(key, client.id), *own)
            return value, client.work

        if place in script.kept:
            value = _Lazy(lambda: (script.kept[place], None))
            value.force()
        else:
            value = _Lazy(compute, values, self._worked(place))
        script.alive[place] = value
        return value

    def map_state(self, fn: Callable[..., Any], key: Array, *values: _Lazy | None) -> _Lazy:
        """See `Fed.map_state`."""
        self._script.touched = True
        both = self.map(fn, key, self.memory, *values)
        self.memory = _Lazy(lambda pair: (pair[1], None), (both,))
        return _Lazy(lambda pair: (pair[0], None), (both,))

    def mean(self, value: _Lazy, name: str = "mean", weights: Array | None = None) -> Any:
        """See `Fed.mean`."""
        return self._exchange("mean", value, name, weights)

    def sum(self, value: _Lazy, name: str = "sum") -> Any:
        """See `Fed.sum`."""
        return self._exchange("sum", value, name)

    def gather(self, value: _Lazy, name: str = "gather") -> Any:
        """See `Fed.gather`."""
        return self._exchange("gather", value, name)

    def center(self, fn: Callable[..., Any], key: Array, name: str = "center") -> Any:
        """See `Fed.center`."""

        def compute() -> Any:
            client = self._client(None, self.n)
            value = fn(client, jax.random.fold_in(key, self.n))
            return jax.tree.map(jnp.asarray, value), client.work

        return self._exchange("center", _Lazy(compute, (), self._worked(self._place())), name)

    def scatter(self, rows: Any) -> _Lazy:
        """See `Fed.scatter`."""

        def own() -> Any:
            place = jnp.argmax(self._members == self._client().id)
            return jax.tree.map(lambda row: row[place], rows), None

        return _Lazy(own)

    def _place(self) -> int:
        """The number of the next map."""
        self._script.maps += 1
        return self._script.maps - 1

    def _worked(self, place: int) -> Callable[[Any], None]:
        work = self._script.work
        return lambda done: None if done is None else work.update({place: done})

    def _exchange(self, kind: str, value: _Lazy, name: str, weights: Any = None) -> Any:
        self._script.exchanges += 1
        return self._script.exchange(self._script.exchanges - 1, kind, value, name, self._ids, weights)

    def loop(self, n: Count, body: Callable[[Any, Any], Any], carry: Any) -> Any:
        """See `Fed.loop`."""
        if not isinstance(n, int):
            self._script.loops += 1
            n = self._script.count(self._script.loops - 1, n)
        for i in range(n):
            carry = body(self._script.index(i), carry)
        return carry

    def resample(self, key: Array, chances: Array | None = None) -> "LockstepFed":
        """See `Fed.resample`."""
        ids = sample_cohort(key, self.n, self.cohort_size, chances)
        return LockstepFed(self.problem, self.n, self.cohort_size, self._script, self._client, None, ids, ids)


@dataclass(frozen=True)
class _Setting:
    """What every side knows and no message carries."""

    problem: Problem
    fixed: Algorithm
    n: int
    cohort: int
    center: int | None = None  # the client that holds the centre's data; None: the server

    def run(self, traced: Any, phase: Phase, script: _Script, client: Callable[..., Client], memory: Any, state: Any,
            t: Count, seed: Array) -> tuple[LockstepFed, Any]:  # fmt: skip
        """Run `init` or a round over the script; what it leaves behind, and the state after it."""
        algorithm = at_round(join(self.fixed, traced), t)
        if phase == "init":
            fed = LockstepFed(self.problem, self.n, self.n, script, client, memory, self.members(phase, t, seed))
            return fed, algorithm.init(fed, *state, jax.random.fold_in(seed, 0))
        fed = LockstepFed(self.problem, self.n, self.cohort, script, client, memory, self.members(phase, t, seed))
        _, noise = jax.random.split(jax.random.fold_in(seed, t + 1))
        return fed, algorithm.round(fed, state, noise)

    def members(self, phase: Phase, t: Count, seed: Array) -> Array:
        """Who takes part."""
        choice, _ = jax.random.split(jax.random.fold_in(seed, t + 1))
        return sample_cohort(choice, self.n, self.n if phase == "init" else self.cohort)

    def ids(self, phase: Phase, t: int, seed: Array) -> list[int]:
        """The same as numbers."""
        return np.asarray(self.members(phase, t, seed)).tolist()


@cache
def _structures(setting: _Setting, phase: Phase) -> dict[Any, Any]:
    """The structure and the shapes of each exchange's value, by its number and the loop counts before it."""
    return {}


def _structure(setting: _Setting, phase: Phase, k: int, counts: tuple[int, ...], value: _Lazy) -> Any:
    known = _structures(setting, phase)
    if (k, counts) not in known:
        shapes = value.shapes()
        known[k, counts] = jax.tree.structure(shapes), describe(shapes)
    return known[k, counts]


@dataclass
class _Piece:
    """A site's part of a round up to one exchange, compiled, and what was learnt when it was traced."""

    run: Callable[..., Any]
    maps: tuple[int, ...] = ()  # the maps it computes
    structure: Any = None  # of what it returns


@cache
def _piece(setting: _Setting, phase: Phase, known: int, counts: tuple[int, ...], places: tuple[int, ...]) -> _Piece:
    """The value for the exchange after `known` others; or, if they were all, the client's memory.

    `places` are the maps whose values are handed over, for they were computed before. It gives the values that later
    pieces may need in the same way: of the maps that were computed and which the algorithm still holds on to.
    """

    def run(
        traced: Any, state: Any, results: Any, data: Clients, identity: Any, memory: Any, t: Any, seed: Array,
        kept: dict[int, Any],
    ) -> Any:  # fmt: skip
        def exchange(k: int, kind: str, value: _Lazy, name: str, ids: Any, weights: Any) -> Any:
            if k == known:
                raise _Reached(value)
            structure, _ = _structure(setting, phase, k, counts[: script.loops], value)
            return jax.tree.unflatten(structure, results[k])

        script = _Script(exchange, lambda j, _: counts[j], programs.index, kept=kept)
        client = lambda place=0, who=identity: Client(setting.problem, data, place, who)
        after: dict[int, Any] = {}
        try:
            fed, _ = setting.run(traced, phase, script, client, memory, state, t, seed)
            out = fed.memory.force()
        except _Reached as reached:
            out = reached.value.force()
            after = {place: lazy.force() for place, lazy in script.alive.items() if lazy.computed}
        piece.maps, piece.structure = tuple(sorted(script.work)), jax.tree.structure(out)
        return jax.tree.leaves(out), [script.work[place] for place in piece.maps], after

    piece = _Piece(programs.shared(run))
    return piece


def _state_structure(setting: _Setting, traced: Any, start: Any, data: Clients) -> Any:
    """The structure of the algorithm's state, from a run of `init` in which only shapes matter."""

    def init(traced: Any, start: Any, data: Clients) -> Any:
        def exchange(k: int, kind: str, value: _Lazy, name: str, ids: Any, weights: Any) -> Any:
            lead = (setting.n,) if kind == "gather" else ()
            return jax.tree.map(lambda s: jnp.zeros(lead + s.shape, s.dtype), value.shapes())

        script = _Script(exchange, lambda j, _: 1)
        client = lambda place=0, who=0: Client(setting.problem, data, place, who)
        memory = _first_memory(setting, traced, start)
        return setting.run(traced, "init", script, client, memory, start, 0, jax.random.key(0))[1]

    return jax.tree.structure(jax.eval_shape(init, traced, start, data))


def _first_memory(setting: _Setting, traced: Any, start: Any) -> Any:
    algorithm = at_round(join(setting.fixed, traced), 0)
    return algorithm.memory(*start) if hasattr(algorithm, "memory") else None


class Site:
    """One client: its own data and memory, and what everybody knows. Bytes in, bytes out."""

    def __init__(
        self, setting: _Setting, traced: dict[str, Any], identity: int, data: Clients, start: tuple[Any, Any], seed: int
    ) -> None:
        self._setting, self._traced, self._identity, self._data, self._start = setting, traced, identity, data, start
        self._seed = jax.random.key(seed)
        self._memory = _first_memory(setting, traced, start)
        self._state_structure = _state_structure(setting, traced, start, data)
        self._at: tuple[Phase, int] | None = None
        self._state: Any = None
        self._results: list[list[Any]] = []
        self._kept: dict[int, Any] = {}  # by map: what the round's earlier pieces computed and later ones may need
        self._counted: set[int] = set()

    def handle(self, request: bytes) -> bytes:
        """Answer a request; the answer "resync" asks for it again with everything from the round's start on."""
        header, arrays = wire.decode(request)
        moment = (header["phase"], header["round"])
        leaves = [arrays.pop(0) for _ in range(header["state"])]
        if header["from"] == 0 and leaves:
            structure = jax.tree.structure(self._start) if header["phase"] == "init" else self._state_structure
            if moment != self._at:
                self._counted = set()
            self._at, self._state = moment, jax.tree.unflatten(structure, leaves)
            self._results, self._kept = [], {}
        elif moment != self._at or len(self._results) < header["from"]:
            return wire.encode({"answer": "resync"}, [])
        if header["from"] < len(self._results):
            del self._results[header["from"] :]
            self._kept = {}
        for length in header["results"]:
            self._results.append([arrays.pop(0) for _ in range(length)])
        places = tuple(sorted(self._kept))
        piece = _piece(self._setting, header["phase"], len(self._results), tuple(header["counts"]), places)
        value, work, self._kept = piece.run(
            self._traced,
            self._state,
            self._results,
            self._data,
            self._identity,
            self._memory,
            header["round"],
            self._seed,
            self._kept,
        )
        new = [(place, w.tolist()) for place, w in zip(piece.maps, work, strict=True) if place not in self._counted]
        self._counted.update(place for place, _ in new)
        if header["op"] == "finish":
            self._memory = jax.tree.unflatten(piece.structure, value)
            return wire.encode({"answer": "finished", "work": new}, [])
        return wire.encode({"answer": "value", "work": new}, value)


class Coordinator:
    """The server: it holds the state, the weights and perhaps the centre's data, and reduces what the sites reply."""

    def __init__(
        self, setting: _Setting, traced: dict[str, Any], weights: np.ndarray, template: Clients, start: Any, seed: int,
        send: Transport,
    ) -> None:  # fmt: skip
        self._setting, self._traced, self._weights, self._template = setting, traced, weights, template
        self.memory = _first_memory(setting, traced, start)  # for its shapes: a site's own never leaves it
        self._seed, self._send = jax.random.key(seed), send

    def run(self, phase: Phase, state: Any, t: int) -> tuple[Any, Amounts]:
        """One phase: the state after it, and what it cost."""
        exchanges: dict[Exchange, dict[str, int]] = {}
        work: dict[int, dict[int, list[int]]] = {}  # by map and client
        results: list[list[Any]] = []
        counts: list[int] = []
        has: list[int | None] = [None]  # how many results the round's cohort has been sent; None: not even the state
        everyone = self._setting.ids(phase, t, self._seed)
        header = {"phase": phase, "round": t, "counts": counts}

        def exchange(k: int, kind: str, value: _Lazy, name: str, fresh: Any, weights: Any) -> Any:
            structure, shape = _structure(self._setting, phase, k, tuple(counts), value)
            if kind == "center":
                holder = self._setting.center
                since = has[0] if fresh is None and holder in everyone else None
                result, up, down = self._ask_center({**header, "op": "reply"}, state, results, since, work)
                results.append(result)
                entry = _count(exchanges, name, kind, shape, up, _nbytes(result), down)
                if holder is None:
                    entry["count"] = 0
                return jax.tree.unflatten(structure, result)
            ids, since = (everyone, has[0]) if fresh is None else (np.asarray(fresh).tolist(), None)
            replies, up, down = self._ask(ids, {**header, "op": "reply"}, state, results, since, work)
            if fresh is None:
                has[0] = len(results)
            results.append(self._reduce(kind, name, ids, replies, weights))
            _count(exchanges, name, kind, shape, up, _nbytes(results[-1]), down)
            return jax.tree.unflatten(structure, results[-1])

        def count(j: int, n: Count) -> int:
            counts.append(int(n))
            return counts[-1]

        script = _Script(exchange, count)
        client = lambda place=0, who=0: Client(self._setting.problem, self._template, place, who)
        fed, after = self._setting.run(self._traced, phase, script, client, self.memory, state, t, self._seed)
        if script.touched:
            if phase == "init":  # which may be the first to write the memory
                self.memory = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), fed.memory.shapes())
            _, _, down = self._ask(everyone, {**header, "op": "finish"}, state, results, has[0], work)
            _count(exchanges, "finish", "finish", "", 0, 0, down)["count"] = 0
        totals, busiest = np.zeros(len(WORK), np.int64), 0
        for by_client in work.values():
            each = np.array(list(by_client.values()))
            totals += each.sum(axis=0)
            busiest += int((each[:, 0] + each[:, 1]).max())
        return after, Amounts(exchanges, 0, totals, busiest)  # type: ignore[arg-type]

    def _ask(
        self, ids: list[int], header: dict[str, Any], state: Any, results: list[list[Any]], has: int | None,
        work: dict[int, dict[int, list[int]]],
    ) -> tuple[list[list[Any]], int, int]:  # fmt: skip
        """Every site's reply, and the bytes of arrays that one of them sent and was sent."""
        request, down = self._request(header, state, results, has)
        replies, up = [], 0
        for identity in ids:
            answer, arrays = wire.decode(self._send(identity, request))
            if answer["answer"] == "resync":
                again, _ = self._request(header, state, results, None)
                answer, arrays = wire.decode(self._send(identity, again))
            for place, amounts in answer["work"]:
                work.setdefault(place, {})[identity] = amounts
            replies.append(arrays)
            up = _nbytes(arrays)
        return replies, up, down

    def _ask_center(
        self, header: dict[str, Any], state: Any, results: list[list[Any]], has: int | None,
        work: dict[int, dict[int, list[int]]],
    ) -> tuple[list[Any], int, int]:  # fmt: skip
        """What the centre answers, who is a site or the server itself; and the bytes sent for it."""
        holder = self._setting.center
        if holder is not None:
            (reply,), up, down = self._ask([holder], header, state, results, has, work)
            return [jnp.asarray(leaf) for leaf in reply], up, down
        piece = _piece(self._setting, header["phase"], len(results), tuple(header["counts"]), ())
        data, memory, t = self._template, self.memory, header["round"]
        value, amounts, _ = piece.run(self._traced, state, results, data, self._setting.n, memory, t, self._seed, {})
        for place, own in zip(piece.maps, amounts, strict=True):
            work.setdefault(place, {})[self._setting.n] = own.tolist()
        return value, 0, 0

    def _request(self, header: dict[str, Any], state: Any, results: Any, has: int | None) -> tuple[bytes, int]:
        leaves = jax.tree.leaves(state) if has is None else []
        begin = 0 if has is None else has
        new = results[begin:]
        about = {**header, "state": len(leaves), "from": begin, "results": [len(r) for r in new]}
        arrays = leaves + [leaf for r in new for leaf in r]
        return wire.encode(about, arrays), _nbytes(arrays)

    def _reduce(self, kind: str, name: str, ids: list[int], replies: list[list[Any]], weights: Any) -> list[Any]:
        shapes = {tuple(leaf.shape for leaf in reply) for reply in replies}
        if len(shapes) > 1:
            raise ValueError(
                f"The sites' replies to the exchange {name!r} are of different shapes: {shapes}. A reply with an entry "
                "for each of a site's samples needs as many samples at every site: give a batch_size."
            )
        p = (self._weights if weights is None else np.asarray(weights))[ids]
        p = p / p.sum() if kind == "mean" else p * (self._setting.n / len(ids))
        stacked = [np.stack(leaf) for leaf in zip(*replies, strict=True)]
        if kind == "gather":
            return [jnp.asarray(s) for s in stacked]
        return [jnp.asarray(np.tensordot(p.astype(s.dtype), s, axes=1)) for s in stacked]


def _nbytes(arrays: Sequence[Any]) -> int:
    return sum(a.size * a.dtype.itemsize for a in arrays)


def _count(exchanges: Any, name: str, kind: Any, shape: str, up: int, result: int, down: int) -> dict[str, int]:
    same = [exchange for exchange in exchanges if exchange[1:] == (name, kind, shape, up, result)]
    exchange = same[0] if same else Exchange(len(exchanges), name, kind, shape, up, result)
    entry = exchanges.get(exchange, {"count": 0, "up": 0, "down": 0})
    exchanges[exchange] = {"count": entry["count"] + 1, "up": entry["up"] + up, "down": entry["down"] + down}
    return exchanges[exchange]


class Federation:
    """The lock-step engine with all its sites in this process: the proof that an algorithm is honest.

    Each site holds its own data and memory only, and what it exchanges with the coordinator are bytes. A run gives the
    same numbers as in the `Simulation`, up to rounding, and the same ledger.
    """

    _sites: list[Site]
    _coordinator: Coordinator | None

    def start(
        self, problem: Problem, clients: Clients, split: Split, x: Any, y: Any, seed: int
    ) -> tuple[Carry, Amounts]:
        """Set up the sites, and run the algorithm's `init` over them."""
        self._given = (problem, clients, split, x, y, seed)
        self._sites, self._coordinator = [], None
        state, amounts = self._open(clients.n).run("init", (x, y), 0)
        return Carry(state, None), amounts

    def _open(self, cohort: int) -> Coordinator:
        problem, clients, split, x, y, seed = self._given
        setting = _Setting(problem, split.fixed, clients.n, cohort, clients.center_client)
        if not self._sites:
            self._sites = [
                Site(setting, split.traced, i, Clients(**clients.client_data(i)), (x, y), seed)
                for i in range(clients.n)
            ]
        for site in self._sites:
            site._setting = setting
        shapes = jax.tree.map(lambda a: np.zeros_like(a[:1]) if hasattr(a, "shape") else a, clients.client_data(0))
        if clients.center is not None and clients.center_client is None:
            shapes["center"] = clients.center.rows
        template = Clients(**shapes)  # what a sample looks like; the coordinator has none but the centre's
        weights = np.asarray(clients.weights)
        send = lambda i, request: self._sites[i].handle(request)
        before = self._coordinator
        self._coordinator = Coordinator(setting, split.traced, weights, template, (x, y), seed, send)
        if before is not None:
            self._coordinator.memory = before.memory
        return self._coordinator

    def advance(
        self, problem: Problem, clients: Clients, split: Split, cohort: int, carry: Carry, start: int, rounds: int,
        limit: int, seed: int,
    ) -> tuple[Carry, list[Amounts]]:  # fmt: skip
        """`rounds` more rounds."""
        coordinator = self._open(cohort)
        costs = []
        for t in range(start, start + rounds):
            state, amounts = coordinator.run("round", carry.state, t)
            carry = Carry(state, None)
            costs.append(amounts)
        return carry, costs
