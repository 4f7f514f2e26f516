"""The plan: `init` or `round` as one traced program, which engines interpret and people can read."""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array

from rookery.base import draws, jaxprs
from rookery.base.arguments import kind_of
from rookery.base.compat import Jaxpr, Literal, Var
from rookery.data.clients import Clients
from rookery.language import channel as channels
from rookery.language import fed, hyperparameters, ledger
from rookery.language.fed import Book, Fed, Keys, PerClient, Threaded
from rookery.language.ledger import Entries, Entry
from rookery.language.metrics import check_numbers
from rookery.plan import words
from rookery.problems.problems import Problem, unconstrained


class Setting(NamedTuple):
    """What a plan is made from. Of the clients' data only the shapes matter."""

    problem: Problem
    clients: Clients
    algorithm: Any  # with _Traced in the places of its floats and arrays: see hyperparameters.split
    cohort: int
    channel: Any = None
    faults: channels.Faults | None = None
    debug: bool = False  # for a run that takes a client's loops turn by turn
    products: bool = False  # with convolutions as products: see convolutions.py


class Carry(NamedTuple):
    """What goes from round to round."""

    state: Any  # the algorithm's
    memory: Any = None  # what the clients remember, a row for each
    client: Any = ()  # what the clients' side of the channel does, likewise
    server: Any = ()  # what the server's side does
    noise: Any = ()  # where there is a channel: the root of the server's own randomness, two words


class Given(NamedTuple):
    """A plan's inputs."""

    carry: Any  # of `init`: (x, y)
    hyper: Any  # the algorithm's floats and arrays
    t: Any  # the round, from 0
    ids: Any  # the cohort
    weights: Any  # the clients', all of them
    key: Any  # the algorithm's
    chance: Any  # which replies get lost
    noise: Any = ()  # of `init`: see Carry


class Made(NamedTuple):
    """A plan's outputs."""

    carry: Carry
    missing: Any = None  # of the faults: see fed.Threaded
    least: Any = None
    stayed: Any = None


# A plan's body is a list of steps: equations of the server's own that can be compiled together, and our primitives.


class Server(NamedTuple):
    """Equations between two of our primitives."""

    jaxpr: Jaxpr
    inputs: list[Var]
    outputs: list[Var]


class Call(NamedTuple):
    """One of our primitives."""

    eqn: Any
    number: int  # among all of the plan
    body: "Body | None" = None  # of a loop


@dataclass(frozen=True)
class Body:
    """A jaxpr as a list of steps."""

    inputs: list[Var]
    steps: list[Server | Call]
    outputs: list[Any]

    @cached_property
    def uses(self) -> Counter[Var]:
        """How often each value is read."""
        read = Counter(v for v in self.outputs if isinstance(v, Var))
        for step in self.steps:
            read.update(step.inputs if isinstance(step, Server) else [v for v in step.eqn.invars if isinstance(v, Var)])
        return read


@dataclass(frozen=True, eq=False)
class Plan:
    """A traced `init` or `round`.

    Attributes:
        title: of what.
        jaxpr: the program; the first of its inputs are its constants, what losses and algorithm close over.
        consts: their values.
        body: the program as steps.
        given, made: the shapes of its further inputs, a `Given`, and of its outputs, a `Made`.
        sample_by_sample: the losses ("f", "g", "r") that are evaluated on single samples.
        exchanges: by name.
    """

    title: str
    jaxpr: Jaxpr
    consts: list[Any]
    body: Body
    given: Given
    made: Made
    sample_by_sample: frozenset[str]
    exchanges: dict[str, channels.Exchange]

    @cached_property
    def _identified(self) -> tuple[str, Any]:
        structures = str(jax.tree.structure(self.given)), str(jax.tree.structure(self.made))
        return jaxprs.identified(self.jaxpr, also=structures)

    @property
    def fingerprint(self) -> str:
        """The same for plans that are the same program, whatever their constants."""
        return self._identified[0]

    @property
    def identity(self) -> tuple[Any, ...]:
        """What a compiled program is found by: the fingerprint, the objects that it calls, and the states' types."""
        return *self._identified, jax.tree.structure(self.given), jax.tree.structure(self.made)

    @cached_property
    def calls(self) -> dict[int, Any]:
        """The equations of our own primitives, by number."""
        found: dict[int, Any] = {}

        def walk(body: Body) -> None:
            for step in body.steps:
                if isinstance(step, Call):
                    found[step.number] = step.eqn
                    if step.body is not None:
                        walk(step.body)

        walk(self.body)
        return found

    @cached_property
    def writes_memory(self) -> bool:
        """Whether what the clients (or their side of a channel) remember is another value after it than before."""
        made = jax.tree.unflatten(jax.tree.structure(self.made), self.body.outputs).carry
        given = jax.tree.unflatten(jax.tree.structure(self.given), self.body.inputs[len(self.consts) :]).carry
        before = (given.memory, given.client) if isinstance(given, Carry) else ()
        return jax.tree.leaves((made.memory, made.client)) != jax.tree.leaves(before)

    @cached_property
    def signature(self) -> str:
        """The same for all who have traced this plan, whatever their own data's shapes: its calls and their types."""
        avals = lambda variables: " ".join(f"{v.aval.dtype}{v.aval.shape}" for v in variables)
        each = [
            f"{number} {eqn.primitive} {eqn.params.get('exchange')} {avals(eqn.invars)} -> {avals(eqn.outvars)}"
            for number, eqn in sorted(self.calls.items())
        ]
        return jaxprs.digest(self.title, *each)[:16]

    def __str__(self) -> str:
        return words.in_words(self)


def start_plan(setting: Setting, start: Any, hyper: Any, states: tuple[Any, Any] = ((), ())) -> Plan:
    """The plan of `init`. `states`: what the channel's two sides remember at first: see `channel_states`."""

    def init(given: Given) -> tuple[Book, Made]:
        algorithm = hyperparameters.at_round(hyperparameters.join(setting.algorithm, given.hyper), 0)
        x, y = given.carry
        keys = None if setting.channel is None else Keys(given.chance, _public(given.key), _noise(given.noise, 0))
        book = Book(setting.channel, None, keys, debug=setting.debug, products=setting.products)
        everyone = Fed(setting.problem, setting.clients, given.weights, given.ids, book)
        if hasattr(algorithm, "memory"):
            memory = everyone.map(lambda c, k: algorithm.memory(x, y), given.key).rows
            book.threaded = book.threaded._replace(memory=memory)
        state = jax.tree.map(jaxprs.strong, algorithm.init(everyone, x, y, given.key))
        if not (hasattr(state, "x") and hasattr(state, "y")):
            name = type(setting.algorithm).__name__
            raise TypeError(f"{name}.init returns {kind_of(state)}; a state is a NamedTuple with x and y.")
        client = everyone.map(lambda c, k: states[0], given.key).rows
        server = jax.tree.map(jnp.asarray, states[1])
        return book, Made(Carry(state, book.threaded.memory, client, server, given.noise))

    noise = () if setting.channel is None else jax.ShapeDtypeStruct((2,), jnp.uint32)
    given = _given(setting, start, hyper, setting.clients.n)._replace(noise=noise)
    return _traced(f"{type(setting.algorithm).__name__}.init", init, given)


def channel_states(setting: Setting, plan: Plan) -> tuple[Any, Any]:
    """What the channel's clients and server remember of a plan's exchanges before the first round, by name."""
    client, server = {}, {}
    for name, exchange in plan.exchanges.items():
        own = channels.chosen(setting.channel, name)
        at_server, at_client = ((), ()) if own is None else own.init(exchange)
        if jax.tree.leaves(at_client):
            client[name] = at_client
        if jax.tree.leaves(at_server):
            server[name] = at_server
    return client or (), server or ()


def plans(setting: Setting, start: Any, hyper: Any, measure: Any = None) -> tuple[Plan, ...]:
    """The plans of the start, of a round and, if something is measured, of an evaluation."""
    first = start_plan(setting, start, hyper)
    one_round = round_plan(setting, first.made.carry, hyper)
    if setting.channel is not None:
        channels.check(setting.channel, [*first.exchanges, *one_round.exchanges])
        states = channel_states(setting, one_round)
        if states != ((), ()):
            first = start_plan(setting, start, hyper, states)
            one_round = round_plan(setting, first.made.carry, hyper)
    if measure is None:
        return first, one_round
    return first, one_round, measure_plan(setting, measure, first.made.carry, hyper)


def round_plan(setting: Setting, carry: Carry, hyper: Any) -> Plan:
    """The plan of a round. `carry` gives the shapes, with a row for each client of the federation."""
    rows = lambda a: jax.ShapeDtypeStruct((setting.cohort, *a.shape[1:]), a.dtype)
    cohorts = carry._replace(memory=jax.tree.map(rows, carry.memory), client=jax.tree.map(rows, carry.client))

    def one_round(given: Given) -> tuple[Book, Made]:
        name = type(setting.algorithm).__name__
        algorithm = hyperparameters.at_round(hyperparameters.join(setting.algorithm, given.hyper), given.t)
        state, *threaded, noise = given.carry
        lossy = setting.faults is not None
        if lossy:
            threaded += [jnp.int32(0), jnp.int32(setting.cohort), jnp.ones(setting.cohort, bool)]
        keys = None
        if lossy or setting.channel is not None:
            own = None if setting.channel is None else _noise(noise, given.t + 1)
            keys = Keys(given.chance, _public(given.key), own)
        book = Book(setting.channel, setting.faults, keys, Threaded(*threaded), setting.debug, setting.products)
        cohort = Fed(setting.problem, setting.clients, given.weights, given.ids, book)
        state = _like(state, _projected(setting.problem, algorithm.round(cohort, state, given.key)), name)
        after = book.threaded
        memory = _like(given.carry.memory, after.memory, f"{name}, what its clients remember")
        made = Carry(state, memory, after.client, after.server, noise)
        return book, Made(made, after.missing, after.least, after.stayed)

    return _traced(
        f"{type(setting.algorithm).__name__}.round", one_round, _given(setting, cohorts, hyper, setting.cohort)
    )


def measure_plan(setting: Setting, measure: Callable[..., Any], carry: Carry, hyper: Any) -> Plan:
    """The plan of an evaluation: measure(client, x, y, memory) -> {name: number} on all clients, a row for each.

    `carry` gives the shapes. What clients remember stays as it is.
    """
    state = carry.state
    seen = Carry((state.x, state.y), carry.memory)

    def measured(given: Given) -> tuple[Book, Made]:
        book = Book(debug=setting.debug, products=setting.products)
        everyone = Fed(setting.problem, setting.clients, given.weights, given.ids, book)
        (x, y), memory = given.carry.state, given.carry.memory

        def on_client(client: Any, key: Array, memory: Any) -> Any:
            return _numbers(measure(client.with_key(key), x, y, memory))

        values = everyone.map(on_client, given.key, None if memory is None else PerClient(memory))
        return book, Made(Carry(everyone.gather(values, "evaluation"), memory))

    return _traced(
        f"{type(setting.algorithm).__name__}.evaluation", measured, _given(setting, seen, hyper, setting.clients.n)
    )


def _numbers(metrics: Any) -> dict[str, Array]:
    check_numbers("evaluate_client", metrics)
    return {name: jnp.asarray(value, fed.accumulator(jnp.result_type(value))) for name, value in metrics.items()}


def _public(key: Array) -> Array:
    """The stream of the channel's keys that clients see: beside those that the algorithm derives from its key."""
    return jax.random.fold_in(key, 0x63686E)


def _noise(root: Array, t: Any) -> Array:
    """The server's own key for a round; 0 is the start."""
    return jax.random.fold_in(jax.random.wrap_key_data(root, impl="threefry2x32"), t)


def _given(setting: Setting, carry: Any, hyper: Any, cohort: int) -> Given:
    key = jax.ShapeDtypeStruct((), draws.seed_key(0).dtype)
    integer = lambda *dims: jax.ShapeDtypeStruct(dims, jnp.int32)
    return Given(carry, hyper, integer(), integer(cohort), setting.clients.weights, key, key)


def _projected(problem: Any, state: Any) -> Any:
    """The state with x in the problem's set: an algorithm need not think of it, and most iterates are in it already."""
    project = getattr(problem, "project_upper", None)
    if project in (None, unconstrained):
        return state
    return state._replace(x=project(state.x))


def _like(before: Any, after: Any, name: str) -> Any:
    """`after` in the types of `before`; an error where structure, shapes or types differ."""
    old: Any = jax.tree.structure(before)
    new: Any = jax.tree.structure(after)
    if old != new:
        raise TypeError(f"{name}: a round returns the structure {new}; it was given {old}. They must agree.")

    def same(path: Any, a: Any, b: Any) -> Any:
        b = jnp.asarray(b)
        fits = a.dtype == b.dtype or (jax.typeof(b).weak_type and jnp.promote_types(a.dtype, b.dtype) == a.dtype)
        if a.shape != b.shape or not fits:
            raise TypeError(
                f"{name}: a round changes {jax.tree_util.keystr(path)} from {a.dtype}{list(a.shape)} to "
                f"{b.dtype}{list(b.shape)}; shape and type must stay as they are."
            )
        return jaxprs.strong(b) if a.dtype == b.dtype else b.astype(a.dtype)

    return jax.tree_util.tree_map_with_path(same, before, after)


def _traced(title: str, fn: Callable[[Given], tuple[Book, Made]], given: Given) -> Plan:
    books: list[Book] = []

    def whole(given: Given) -> Made:
        book, made = fn(given)
        books.append(book)
        return made

    traced, shapes = jaxprs.trace(whole, given)
    jaxpr = _without_unused_maps(_with_literals_inside(jaxprs.open_up(traced)))
    return Plan(
        title=title,
        jaxpr=jaxpr,
        consts=[jnp.array(c) for c in traced.consts],
        body=steps(jaxpr, iter(range(10**9))),
        given=given,
        made=shapes,
        sample_by_sample=frozenset(books[-1].sample_by_sample),
        exchanges=books[-1].exchanges,
    )


def _with_literals_inside(jaxpr: Jaxpr) -> Jaxpr:
    """With the literals that our primitives' functions are given moved into them: constants, which nobody is sent."""
    eqns = []
    for eqn in jaxpr.eqns:
        if eqn.primitive in (fed.client_map, fed.center):
            begin, inputs = int(eqn.primitive is fed.client_map), eqn.params["inputs"]
            work, given, left = _moved_in(eqn.params["work"], eqn.invars, begin, inputs.sent)
            eqn = eqn.replace(invars=given, params={**eqn.params, "work": work, "inputs": inputs._replace(sent=left)})
        elif eqn.primitive is fed.loop:
            begin = int(eqn.params["length"] is None)
            body, given, _ = _moved_in(
                eqn.params["body"], eqn.invars, begin, len(eqn.invars) - begin - len(eqn.outvars)
            )
            eqn = eqn.replace(invars=given, params={**eqn.params, "body": _with_literals_inside(body)})
        eqns.append(eqn)
    return jaxprs.part(jaxpr, eqns, jaxpr.invars, jaxpr.outvars)


def _moved_in(inner: Jaxpr, given: list[Any], begin: int, count: int) -> tuple[Jaxpr, list[Any], int]:
    """The inner jaxpr, whose first inputs are given[begin : begin + count], with the literals among them in their
    places; what it is still given; and how many of those inputs are left."""
    sent = given[begin : begin + count]
    known = {v: a for v, a in zip(inner.invars, sent, strict=False) if isinstance(a, Literal)}
    if not known:
        return inner, given, count
    read = lambda v: known.get(v, v) if isinstance(v, Var) else v
    eqns = [eqn.replace(invars=[read(v) for v in eqn.invars]) for eqn in inner.eqns]
    inputs = [v for v in inner.invars if v not in known]
    left = [a for a in sent if not isinstance(a, Literal)]
    moved = jaxprs.part(inner, eqns, inputs, [read(v) for v in inner.outvars])
    return moved, [*given[:begin], *left, *given[begin + count :]], len(left)


def _without_unused_maps(jaxpr: Jaxpr) -> Jaxpr:
    """Without the clients' functions whose values nobody needs: no engine computes or counts them."""
    needed = {v for v in jaxpr.outvars if isinstance(v, Var)}
    kept = []
    for eqn in reversed(jaxpr.eqns):
        mapped = eqn.primitive in (fed.client_map, fed.scatter)
        if mapped and not any(v in needed for v in eqn.outvars):
            continue
        kept.append(eqn)
        needed.update(v for v in eqn.invars if isinstance(v, Var))
    return jaxprs.part(jaxpr, kept[::-1], jaxpr.invars, jaxpr.outvars)


def steps(jaxpr: Jaxpr, numbers: Any) -> Body:
    """The jaxpr as steps."""
    after: list[set[Var]] = []  # what is read after each equation
    reading = {v for v in jaxpr.outvars if isinstance(v, Var)}
    for eqn in reversed(jaxpr.eqns):
        after.append(set(reading))
        reading |= {v for v in eqn.invars if isinstance(v, Var)}
    after.reverse()
    result: list[Server | Call] = []
    own: list[int] = []

    def flush() -> None:
        if own:
            eqns = [jaxpr.eqns[i] for i in own]
            made = [v for eqn in eqns for v in eqn.outvars if v in after[own[-1]]]
            inputs = jaxprs.free_vars(eqns)
            result.append(Server(jaxprs.part(jaxpr, eqns, inputs, made), inputs, made))
            own.clear()

    for i, eqn in enumerate(jaxpr.eqns):
        if eqn.primitive not in fed.PRIMITIVES:
            own.append(i)
            continue
        flush()
        number = next(numbers)
        body = steps(_without_unused_maps(eqn.params["body"]), numbers) if eqn.primitive is fed.loop else None
        result.append(Call(eqn, number, body))
    flush()
    return Body(list(jaxpr.invars), result, list(jaxpr.outvars))


# What a round costs, from the plan alone.


def costs(plan: Plan, turns: Sequence[Any]) -> Entries:
    """The entries of the round's exchanges. `turns`: how often each loop of `traced_loops` ran.

    A client is sent the values that its functions close over and it has not got: each once, but those that a loop
    carries or makes in every turn. What it is sent for its next reply counts with that exchange; after the last one
    it counts as "finish".
    """
    walker = _Walker(dict(zip(traced_loops(plan.body), turns, strict=True)))
    entries: Entries = {}
    walker.known.update(plan.body.inputs[: len(plan.consts)])  # whoever has traced the plan has its constants
    walker.walk(plan.body, {v: v for v in plan.body.inputs}, entries, ())
    ids = jax.tree.unflatten(jax.tree.structure(plan.given), plan.body.inputs[len(plan.consts) :]).ids
    down = walker.pending.get(ids, 0)
    if down or plan.writes_memory:
        entries.setdefault(FINISH, Entry()).add(Entry(0, 0, down))
    return entries


FINISH = ledger.Exchange("finish", "finish", "", 0)


def traced_loops(body: Body, inside: bool = False) -> list[int]:
    """The numbers of the loops whose length is not known before the run, in the plan's order."""
    found = []
    for step in body.steps:
        if isinstance(step, Call) and step.body is not None:
            traced = step.eqn.params["length"] is None
            if traced and inside:
                raise ValueError(
                    "A fed.loop of a length that is not known before the run stands inside another one: give one of "
                    "them an int."
                )
            found += [step.number] * traced + traced_loops(step.body, inside or traced)
    return found


class _Walker:
    """Goes through a plan's steps with names for values in the place of values."""

    def __init__(self, turns: dict[int, Any]) -> None:
        self._turns = turns
        self.known: set[Any] = set()  # to everybody
        self.pending: dict[Any, int] = {}  # bytes for the next exchange, by cohort
        self._sent: dict[Any, set[Any]] = {}  # by cohort, which is the name of its ids
        self._names = 0

    def walk(self, body: Body, names: dict[Any, Any], entries: Entries, turn: tuple[int, ...]) -> None:
        for step in body.steps:
            if isinstance(step, Server):
                names.update((v, self._new()) for v in step.outputs)
                continue
            eqn, params = step.eqn, step.eqn.params
            if eqn.primitive is fed.client_map:
                cohort, inputs = names[eqn.invars[0]], params["inputs"]
                self._send(cohort, eqn.invars[1 : 1 + inputs.sent], names)
                self._add(cohort, 8 * inputs.key)  # a key of the client's own
            elif eqn.primitive is fed.scatter:
                row = eqn.invars[1].aval
                self._add(names[eqn.invars[0]], ledger.nbytes([jax.ShapeDtypeStruct(row.shape[1:], row.dtype)]))
            elif eqn.primitive is fed.center:
                entry = entries.setdefault(params["exchange"], Entry())
                if params["holder"] is not None:
                    self._send("center", eqn.invars[: params["inputs"].sent], names)
                    down = self.pending.pop("center", 0) + 8 * params["inputs"].key
                    entry.add(Entry(1, params["exchange"].reply_bytes, down))
            elif eqn.primitive in (fed.reduce, fed.gather):
                down = self.pending.pop(names[eqn.invars[0]], 0)
                entry = entries.setdefault(params["exchange"], Entry())
                entry.add(Entry(1, params["exchange"].reply_bytes, down))
            else:
                self._loop(step, names, entries, turn)
            names.update((v, self._new()) for v in eqn.outvars)

    def _loop(self, step: Call, names: dict[Any, Any], entries: Entries, turn: tuple[int, ...]) -> None:
        body, length = step.body, step.eqn.params["length"]
        assert body is not None
        fixed = dict(zip(body.inputs, loop_constants(step), strict=False))
        if length is None:
            length = int(self._turns[step.number][turn]) if turn else int(self._turns[step.number])
        differ = bool(_inner(body))
        for i in range(length if differ else min(length, 2)):  # all turns after the first cost the same
            own = {v: names[fixed[v]] if v in fixed else self._new() for v in body.inputs}
            one: Entries = {}
            self.walk(body, own, one, (*turn, i))
            ledger.add_entries(entries, one, length - 1 if i == 1 and not differ else 1)

    def _send(self, cohort: Any, values: Sequence[Any], names: dict[Any, Any]) -> None:
        has = self._sent.setdefault(cohort, set()) | self.known
        new = [v for v in dict.fromkeys(values) if names[v] not in has]
        self._sent[cohort].update(names[v] for v in new)
        self._add(cohort, ledger.nbytes([v.aval for v in new]))

    def _add(self, cohort: Any, count: int) -> None:
        self.pending[cohort] = self.pending.get(cohort, 0) + count

    def _new(self) -> int:
        self._names += 1
        return self._names


def loop_constants(step: Call) -> list[Any]:
    """What a loop's body closes over: the values of its first inputs. Then come the turn and the carry."""
    given = step.eqn.invars[step.eqn.params["length"] is None :]
    return given[: len(given) - len(step.eqn.outvars)]


def _inner(body: Body) -> list[int]:
    """The loops of traced length inside a body."""
    loops = [(step, step.body) for step in body.steps if isinstance(step, Call) and step.body is not None]
    return [step.number for step, inside in loops if step.eqn.params["length"] is None or _inner(inside)]
