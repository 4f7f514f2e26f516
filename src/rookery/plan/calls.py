"""A plan's program as a list of typed steps, and the visitor that walks it."""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import count
from typing import Any, ClassVar, Generic, NamedTuple, TypeVar

import jax
import jax.numpy as jnp

from rookery.base import jaxprs
from rookery.base.compat import Jaxpr, Literal, ShapedArray, Var
from rookery.language import ledger, primitives

V = TypeVar("V")
Atom = Any  # an operand of the program: a Var or a Literal
Read = Callable[[Any], Any]  # maps an operand to its value, a list of operands to their values, and None to None


@dataclass(frozen=True, eq=False)
class ServerWork:
    """The server's equations between two calls. An engine may compile them together."""

    jaxpr: Jaxpr
    operands: list[Var]
    outputs: list[Var]


@dataclass(frozen=True, eq=False)
class Call:
    """A call of one of the plan's primitives, which engines interpret.

    Attributes:
        number: its number among all calls of the plan, in order.
        operands, outputs: all variables that it reads and defines, in the primitive's order.
    """

    primitive: ClassVar[str]
    number: int
    operands: list[Atom]
    outputs: list[Var]


@dataclass(frozen=True, eq=False)
class WorkCall(Call):
    """A call of a client's function.

    Attributes:
        sent: the server's values that the function closes over.
        key: the key that the client's own is derived from; None if the function draws nothing.
        local: the client's values of earlier maps.
        work: the function. Its inputs are, in this order: `sent`, the data, the client's number, its key, its noise,
            `local`. Its outputs are those of the call, and the counts of its work.
        data: which leaves of the client's data the function reads.
        identity: whether it reads the client's number.
        source: the file and line of the function, for messages.
        noise: if its oracles are private for each record: the key that stands for the client's own entropy, which a
            site replaces by its own.
        levels: the noise multipliers, which a site replaces, too.
    """

    sent: list[Atom]
    key: Atom | None
    local: list[Atom]
    work: Jaxpr
    data: tuple[int, ...]
    identity: bool
    source: str
    noise: Atom | None
    levels: Atom | None

    def arguments(
        self, sent: Sequence[Any], data: Sequence[Any], identity: Any, key: Any, local: Sequence[Any] = (),
        noise: Any = None, levels: Any = None,
    ) -> list[Any]:  # fmt: skip
        """Arrange the arguments of `work`, leaving out those that it does not read."""
        number = [identity] if self.identity else []
        given = (self.key, key), (self.noise, noise), (self.levels, levels)
        drawn = [value for operand, value in given if operand is not None]
        return [*sent, *(data[i] for i in self.data), *number, *drawn, *local]

    @property
    def reply(self) -> list[Any]:
        """The shapes and types of one client's outputs."""
        return [v.aval for v in self.work.outvars[:-1]]


@dataclass(frozen=True, eq=False)
class MapCall(WorkCall):
    """`fed.map`: every client of the cohort `ids` computes a function.

    `repeats`: whether a client may be in the cohort twice; it works once.
    """

    primitive = "client_map"
    ids: Var
    repeats: bool

    @property
    def same_for_all(self) -> bool:
        """Whether all clients compute the same, because the function reads nothing of a client."""
        return not (self.data or self.identity or self.local) and self.key is None and self.noise is None


@dataclass(frozen=True, eq=False)
class CenterCall(WorkCall):
    """`fed.center`: a function of the centre's data. `holder`: the client that has these data; None: the server."""

    primitive = "center"
    exchange: ledger.Exchange
    holder: int | None


@dataclass(frozen=True, eq=False)
class ScatterCall(Call):
    """`fed.scatter`: row j of the server's `rows` goes to the j-th client of the cohort `ids`."""

    primitive = "scatter"
    ids: Var
    rows: Atom


@dataclass(frozen=True, eq=False)
class ExchangeCall(Call):
    """An exchange in which every client of the cohort `ids` sends its `rows`.

    `present`: the clients whose replies are not lost; None if no reply can be lost. If it is not None, the last output
    says which clients did reply.
    """

    exchange: ledger.Exchange
    ids: Var
    present: Atom | None
    rows: list[Atom]


@dataclass(frozen=True, eq=False)
class ReduceCall(ExchangeCall):
    """`fed.mean` or `fed.sum`: the weighted sums of the clients' rows.

    `unpack`: if a channel compresses the rows, the server's work on one of them before it is added to the sums. Its
    inputs are the server's values in its `operands`, and a client's row.
    `asynchronous`: not None if the sums are over the replies that have arrived, to this request or an earlier one,
    weighted by their staleness. It says for each sum whether it adds differences from what clients were sent. The last
    outputs are then the sum of the weights without staleness, the sum with it, and the largest weight with it.
    """

    primitive = "reduce"
    weights: Atom
    unpack: ServerWork | None = None
    asynchronous: tuple[bool, ...] | None = None

    def unpacking(self, repeats: bool) -> MapCall:
        """Describe `unpack` as a function of every client that does no work, for engines that compute it with them."""
        assert self.unpack is not None
        jaxpr, sent, size = self.unpack.jaxpr, self.unpack.operands, self.ids.aval.shape[0]  # type: ignore[attr-defined]
        idle = lambda *a: [*jaxprs.run(jaxpr, *a), jnp.zeros((2, len(ledger.WORK)), jnp.uint32)]
        avals: Any = [v.aval for v in (*jaxpr.invars, *jaxpr.outvars)]
        inputs, outputs = avals[: len(jaxpr.invars)], avals[len(jaxpr.invars) :]
        traced, _ = jaxprs.trace(idle, *(jax.ShapeDtypeStruct(a.shape, a.dtype) for a in inputs))
        rows: Any = [_Rows(ShapedArray((size, *a.shape), a.dtype)) for a in outputs]
        return MapCall(
            number=self.number, operands=[*sent, *self.rows], outputs=rows, sent=sent, key=None, local=self.rows,
            work=jaxprs.open_up(traced), data=(), identity=False, source="the server", noise=None, levels=None,
            ids=self.ids, repeats=repeats,
        )  # fmt: skip


class _Rows(NamedTuple):
    """A stand-in for a variable that no step of a plan defines."""

    aval: ShapedArray


@dataclass(frozen=True, eq=False)
class GatherCall(ExchangeCall):
    """`fed.gather`: the clients' rows, with zeros for clients that do not reply."""

    primitive = "gather"


@dataclass(frozen=True, eq=False)
class LoopCall(Call):
    """`fed.loop`: the body's inputs are `fixed`, the turn and the carry; its outputs are the next carry.

    The number of turns is `length` if it is known before the run, and the value of `count` otherwise; `most` is a bound
    on it, if there is one.
    """

    primitive = "loop"
    length: int | None
    most: int | None
    count: Atom | None
    fixed: list[Atom]
    carry: list[Atom]
    body: "Body"

    def turns(self, read: Read) -> Any:
        """The number of turns."""
        return self.length if self.length is not None else read(self.count)


@dataclass(frozen=True, eq=False)
class Body:
    """A plan's program, or a loop's, as a list of steps."""

    inputs: list[Var]
    steps: list[ServerWork | Call]
    outputs: list[Atom]

    @cached_property
    def uses(self) -> Counter[Var]:
        """How often each value is read."""
        read = [*self.outputs, *(v for step in self.steps for v in step.operands)]
        return Counter(v for v in read if isinstance(v, Var))

    @cached_property
    def calls(self) -> list[Call]:
        """All calls in order, including those inside loops."""
        return list(self._walk())

    def origin(self, value: Atom) -> Atom:
        """The variable with this value before the loops that carry it unchanged."""
        for step in reversed(self.steps):
            if isinstance(step, LoopCall) and value in step.outputs:
                i, inner = step.outputs.index(value), step.body
                if inner.origin(inner.outputs[i]) is inner.inputs[i - len(step.carry)]:
                    value = step.carry[i]
        return value

    def _walk(self) -> Iterator[Call]:
        for step in self.steps:
            if isinstance(step, Call):
                yield step
            if isinstance(step, LoopCall):
                yield from step.body._walk()

    def of(self, kind: type[V]) -> list[V]:
        """The calls of one kind."""
        return [call for call in self.calls if isinstance(call, kind)]


class Visitor(Generic[V]):
    """Walks a body's steps in order, with a value of type V for each variable.

    A subclass computes the outputs of each kind of step from the values of its operands, which `read` returns. For an
    interpreter the values are arrays; for descriptions and costs they are names.
    """

    remaining: Counter[Var]  # how often each value is still read, after the current step

    def visit(self, body: Body, inputs: Sequence[V]) -> list[V]:
        """Return the values of the body's outputs. Values that no later step reads are dropped."""
        values: dict[Var, V] = dict(zip(body.inputs, inputs, strict=True))
        outer, self.remaining = getattr(self, "remaining", None), Counter(body.uses)

        def read(operand: Any) -> Any:
            if isinstance(operand, list):
                return [read(v) for v in operand]
            if operand is None:
                return None
            return self.literal(operand) if isinstance(operand, Literal) else values[operand]

        for step in body.steps:
            variables = [v for v in step.operands if isinstance(v, Var)]
            self.remaining.subtract(variables)
            outputs = self._step(step, read)
            for v in variables:
                if not self.remaining[v]:
                    values.pop(v, None)
            values.update((v, out) for v, out in zip(step.outputs, outputs, strict=True) if self.remaining[v])
        if outer is not None:
            self.remaining = outer
        return [read(v) for v in body.outputs]

    def _step(self, step: ServerWork | Call, read: Read) -> Sequence[V]:
        match step:
            case ServerWork():
                return self.server(step, read)
            case MapCall():
                return self.map(step, read)
            case ScatterCall():
                return self.scatter(step, read)
            case ReduceCall():
                return self.reduce(step, read)
            case GatherCall():
                return self.gather(step, read)
            case CenterCall():
                return self.center(step, read)
            case LoopCall():
                return self.loop(step, read)
        raise TypeError(f"a plan's step must be a ServerWork or a Call; got {step!r}.")

    def literal(self, literal: Literal) -> V:
        """The value of a literal."""
        raise NotImplementedError

    def server(self, step: ServerWork, read: Read) -> Sequence[V]:
        """The outputs of the server's own equations."""
        raise NotImplementedError

    def map(self, call: MapCall, read: Read) -> Sequence[V]:
        """The outputs of a function of every client."""
        raise NotImplementedError

    def scatter(self, call: ScatterCall, read: Read) -> Sequence[V]:
        """The output of a message for each client."""
        raise NotImplementedError

    def reduce(self, call: ReduceCall, read: Read) -> Sequence[V]:
        """The outputs of a mean or a sum."""
        return self.exchange(call, read)

    def gather(self, call: GatherCall, read: Read) -> Sequence[V]:
        """The outputs of an exchange that is not aggregated."""
        return self.exchange(call, read)

    def exchange(self, call: ExchangeCall, read: Read) -> Sequence[V]:
        """The outputs of a reduce or a gather, for visitors that treat them alike."""
        raise NotImplementedError

    def center(self, call: CenterCall, read: Read) -> Sequence[V]:
        """The outputs of a function of the centre's data."""
        raise NotImplementedError

    def loop(self, call: LoopCall, read: Read) -> Sequence[V]:
        """The outputs of a loop."""
        raise NotImplementedError


# From a traced program to steps. The equations of our primitives are taken apart only here.


def body_of(jaxpr: Jaxpr, numbers: Iterator[int] | None = None) -> Body:
    """The program as a list of steps, with its calls numbered in order."""
    numbers = count() if numbers is None else numbers
    read_after: list[set[Var]] = []  # by equation
    reading = {v for v in jaxpr.outvars if isinstance(v, Var)}
    for eqn in reversed(jaxpr.eqns):
        read_after.append(set(reading))
        reading |= {v for v in eqn.invars if isinstance(v, Var)}
    read_after.reverse()
    steps: list[ServerWork | Call] = []
    pending: list[int] = []  # the server's equations since the last call

    def flush() -> None:
        if pending:
            eqns = [jaxpr.eqns[i] for i in pending]
            outputs = [v for eqn in eqns for v in eqn.outvars if v in read_after[pending[-1]]]
            inputs = jaxprs.free_vars(eqns)
            steps.append(ServerWork(jaxprs.part(jaxpr, eqns, inputs, outputs), inputs, outputs))
            pending.clear()

    for i, eqn in enumerate(jaxpr.eqns):
        if eqn.primitive in primitives.PRIMITIVES:
            flush()
            steps.append(_call(eqn, numbers))
        else:
            pending.append(i)
    flush()
    return Body(list(jaxpr.invars), steps, list(jaxpr.outvars))


def _call(eqn: Any, numbers: Iterator[int]) -> Call:
    """The typed view of an equation with one of our primitives."""
    rest, params, number = list(eqn.invars), eqn.params, next(numbers)
    common = number, list(eqn.invars), list(eqn.outvars)
    take = rest.pop
    if eqn.primitive is primitives.loop:
        counted = None if params["length"] is not None else take(0)
        fixed = len(rest) - len(eqn.outvars)
        body = body_of(without_unused_maps(params["body"]), numbers)
        most = params["length"] if params["length"] is not None else params.get("most")
        return LoopCall(*common, params["length"], most, counted, rest[:fixed], rest[fixed:], body)
    if eqn.primitive is primitives.center:
        return CenterCall(*common, **_work(rest, params), exchange=params["exchange"], holder=params["holder"])
    ids = take(0)
    if eqn.primitive is primitives.client_map:
        return MapCall(*common, **_work(rest, params), ids=ids, repeats=params["repeats"])
    if eqn.primitive is primitives.scatter:
        return ScatterCall(*common, ids, take(0))
    weights = take(0) if eqn.primitive is primitives.reduce else None
    present = take(0) if params["lossy"] else None
    if eqn.primitive is primitives.reduce:
        unpack, closed = params.get("unpack"), params.get("closed", 0)
        work = None if unpack is None else ServerWork(unpack, rest[:closed], unpack.outvars)
        late = params.get("asynchronous")
        return ReduceCall(*common, params["exchange"], ids, present, rest[closed:], weights, work, late)
    return GatherCall(*common, params["exchange"], ids, present, rest)


def _work(operands: list[Atom], params: dict[str, Any]) -> dict[str, Any]:
    """The fields of a `WorkCall` that a `Call` does not have."""
    inputs = params["inputs"]
    sent, rest = operands[: inputs.sent], operands[inputs.sent :]
    key, noise, levels = (rest.pop(0) if is_read else None for is_read in (inputs.key, inputs.noise, inputs.levels))
    work = {"work": params["work"], "data": inputs.data, "identity": inputs.identity, "source": params["source"]}
    return {"sent": sent, "key": key, "noise": noise, "levels": levels, "local": rest, **work}


def with_literals_inside(jaxpr: Jaxpr) -> Jaxpr:
    """Move literal operands of clients' functions and loop bodies into these, so that no constant is sent."""
    eqns = []
    for eqn in jaxpr.eqns:
        if eqn.primitive in (primitives.client_map, primitives.center):
            begin, inputs = int(eqn.primitive is primitives.client_map), eqn.params["inputs"]
            work, operands, left = _moved_in(eqn.params["work"], eqn.invars, begin, inputs.sent)
            params = {**eqn.params, "work": work, "inputs": inputs._replace(sent=left)}
            eqn = eqn.replace(invars=operands, params=params)
        elif eqn.primitive is primitives.loop:
            begin = int(eqn.params["length"] is None)
            fixed = len(eqn.invars) - begin - len(eqn.outvars)
            body, operands, _ = _moved_in(eqn.params["body"], eqn.invars, begin, fixed)
            eqn = eqn.replace(invars=operands, params={**eqn.params, "body": with_literals_inside(body)})
        eqns.append(eqn)
    return jaxprs.part(jaxpr, eqns, jaxpr.invars, jaxpr.outvars)


def _moved_in(inner: Jaxpr, operands: list[Atom], begin: int, length: int) -> tuple[Jaxpr, list[Atom], int]:
    """Move the literals among operands[begin : begin + length], the first inputs of `inner`, into it.

    Returns the new inner jaxpr, the remaining operands, and how many of that range remain.
    """
    sent = operands[begin : begin + length]
    known = {v: a for v, a in zip(inner.invars, sent, strict=False) if isinstance(a, Literal)}
    if not known:
        return inner, operands, length
    read = lambda v: known.get(v, v) if isinstance(v, Var) else v
    eqns = [eqn.replace(invars=[read(v) for v in eqn.invars]) for eqn in inner.eqns]
    inputs = [v for v in inner.invars if v not in known]
    left = [a for a in sent if not isinstance(a, Literal)]
    moved = jaxprs.part(inner, eqns, inputs, [read(v) for v in inner.outvars])
    return moved, [*operands[:begin], *left, *operands[begin + length :]], len(left)


def without_unused_maps(jaxpr: Jaxpr) -> Jaxpr:
    """Remove clients' functions and messages whose values are not read, so that no engine computes or counts them."""
    needed = {v for v in jaxpr.outvars if isinstance(v, Var)}
    kept = []
    for eqn in reversed(jaxpr.eqns):
        mapped = eqn.primitive in (primitives.client_map, primitives.scatter)
        if mapped and not any(v in needed for v in eqn.outvars):
            continue
        kept.append(eqn)
        needed.update(v for v in eqn.invars if isinstance(v, Var))
    return jaxprs.part(jaxpr, kept[::-1], jaxpr.invars, jaxpr.outvars)
