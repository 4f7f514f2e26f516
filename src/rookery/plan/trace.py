"""The plan: an algorithm's `init` or `round` as one traced program, which engines interpret."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from rookery.base import draws, jaxprs
from rookery.base.arguments import kind_of
from rookery.base.compat import Jaxpr
from rookery.base.placement import duplicate
from rookery.data.clients import Clients
from rookery.language import channel as channels
from rookery.language import hyperparameters, records
from rookery.language.clock import Timing, Watch
from rookery.language.fed import Fed
from rookery.language.metrics import check_numbers
from rookery.language.primitives import accumulator
from rookery.language.tracing import ExchangeKeys, PerClient, Threaded, Tracing
from rookery.plan import words
from rookery.plan.calls import Body, Call, body_of, with_literals_inside, without_unused_maps
from rookery.problems.problems import Problem, unconstrained


class Setting(NamedTuple):
    """What a plan is traced from. Only the shapes of the clients' data matter."""

    problem: Problem
    clients: Clients
    algorithm: Any  # without its floats and arrays: see hyperparameters.split
    cohort: int
    channel: Any = None
    faults: channels.Faults | None = None
    debug: bool = False  # for a run that computes a client's loops turn by turn
    products: bool = False  # whether convolutions are computed as products: see convolutions.py
    chance: float | None = None  # of a client to be in a Poisson cohort, which has at most `cohort` clients
    clock: Timing | None = None
    asynchronous: bool = False  # whether the means of a round are over the replies in a buffer

    @property
    def rate(self) -> float | None:
        """In a private run: the share of all clients that a cohort is expected to have; else None."""
        if not channels.is_private(self.channel):
            return None
        return self.cohort / self.clients.n if self.chance is None else self.chance


class Carry(NamedTuple):
    """The values that a round passes on to the next."""

    state: Any  # the algorithm's
    memory: Any = None  # what the clients remember, a row for each
    client: Any = ()  # the state of the channel's client side, a row for each client
    server: Any = ()  # the state of its server side
    noise: Any = ()  # with a channel: the root of the server's own randomness, two words


class Given(NamedTuple):
    """A plan's inputs."""

    carry: Any  # of `init`: (x, y)
    hyper: Any  # the algorithm's floats and arrays
    t: Any  # the round, from 0
    ids: Any  # the cohort
    weights: Any  # of all clients
    key: Any  # the algorithm's
    chance: Any  # the key that decides which replies get lost
    noise: Any = ()  # of `init`: see Carry
    present: Any = ()  # with Poisson sampling: which of `ids` are in the cohort


class Made(NamedTuple):
    """A plan's outputs."""

    carry: Carry
    missing: Any = None  # these three with faults only: see `Threaded`
    least: Any = None
    stayed: Any = None
    seconds: Any = None  # with a clock


@dataclass(frozen=True, eq=False)
class Plan:
    """A traced `init` or `round`.

    Attributes:
        title: e.g. "FedNest.round".
        jaxpr: the program. Its first inputs are its constants, which the losses and the algorithm close over.
        consts: the values of the constants.
        body: the program as a list of steps.
        given, made: the shapes of its other inputs, a `Given`, and of its outputs, a `Made`.
        sample_by_sample: the losses ("f", "g", "r") that are evaluated on single samples.
        exchanges: its exchanges by name.
        channel: the channel; a private one is calibrated.
        unheard: the clients that are always too late for an exchange, in ascending order.
        price: what privacy costs, if `rk.explain` was asked for it.
        derived: a cache for values that engines compute from the plan, such as its costs.
    """

    title: str
    jaxpr: Jaxpr
    consts: list[Any]
    body: Body
    given: Given
    made: Made
    sample_by_sample: frozenset[str]
    exchanges: dict[str, channels.ChannelExchange]
    channel: Any = None
    unheard: tuple[int, ...] = ()
    price: Any = None
    derived: dict[Any, Any] = field(default_factory=dict, repr=False)

    @cached_property
    def _identified(self) -> tuple[str, Any]:
        structures = str(jax.tree.structure(self.given)), str(jax.tree.structure(self.made))
        return jaxprs.identified(self.jaxpr, also=structures)

    @property
    def fingerprint(self) -> str:
        """A digest of the program, without the values of its constants."""
        return self._identified[0]

    @property
    def identity(self) -> tuple[Any, ...]:
        """The key of a compiled program: the fingerprint, the objects it calls, and the types of its states."""
        return *self._identified, jax.tree.structure(self.given), jax.tree.structure(self.made)

    @cached_property
    def calls(self) -> dict[int, Call]:
        """All calls by number."""
        return {call.number: call for call in self.body.calls}

    @property
    def inputs(self) -> Given:
        """The variables of the inputs, without the constants."""
        return jax.tree.unflatten(jax.tree.structure(self.given), self.body.inputs[len(self.consts) :])

    @property
    def outputs(self) -> Made:
        """The variables of the outputs."""
        return jax.tree.unflatten(jax.tree.structure(self.made), self.body.outputs)

    @cached_property
    def writes_memory(self) -> bool:
        """Whether the plan changes the memory of clients or the state of their side of a channel."""
        before, after = self.inputs.carry, self.outputs.carry
        remembered = (before.memory, before.client) if isinstance(before, Carry) else ()
        origins = [self.body.origin(v) for v in jax.tree.leaves((after.memory, after.client))]
        return origins != jax.tree.leaves(remembered)

    @cached_property
    def signature(self) -> str:
        """A digest of the calls and their types, which does not depend on the shapes of a site's data."""
        avals = lambda variables: " ".join(f"{v.aval.dtype}{v.aval.shape}" for v in variables)
        lines = [
            f"{call.number} {call.primitive} {getattr(call, 'exchange', None)} {avals(call.operands)} -> "
            f"{avals(call.outputs)}"
            for call in self.body.calls
        ]
        return jaxprs.digest(self.title, *lines)[:16]

    def __str__(self) -> str:
        return words.in_words(self) + ("" if self.price is None else f"\n{self.price}")


LEVELS = "noise multipliers"  # among the hyperparameters: those of releases that are private for each record


def with_levels(channel: Any, hyper: dict[str, Any]) -> dict[str, Any]:
    """The hyperparameters, with a place for the noise multipliers of a channel that is private for each record."""
    if not channels.is_private_for_records(channel):
        return hyper
    return {
        **hyper,
        LEVELS: np.array([dict(channel.levels).get(level, np.nan) for level in records.LEVELS], np.float32),
    }


def _with_hyper(setting: Setting, hyper: dict[str, Any], t: Any) -> tuple[Any, Any]:
    """The algorithm in round t, and the noise multipliers, or None."""
    hyper = dict(hyper)
    levels = hyper.pop(LEVELS, None)
    return hyperparameters.at_round(hyperparameters.join(setting.algorithm, hyper), t), levels


def start_plan(setting: Setting, start: Any, hyper: Any, states: tuple[Any, Any] = ((), ())) -> Plan:
    """The plan of `init`. `states`: the initial states of the channel's two sides: see `channel_states`."""

    def init(given: Given) -> tuple[Tracing, Made]:
        algorithm, levels = _with_hyper(setting, given.hyper, 0)
        x, y = given.carry
        keys = None
        if setting.channel is not None:
            keys = ExchangeKeys(given.chance, _public(given.key), _noise(given.noise, 0))
        rate = None if setting.rate is None else 1.0
        tracing = Tracing(setting.channel, None, keys, debug=setting.debug, products=setting.products, rate=rate)
        tracing.levels = levels
        _start_clock(tracing, setting.clock, 0, 0)
        everyone = Fed(setting.problem, setting.clients, given.weights, given.ids, tracing)
        if hasattr(algorithm, "memory"):
            memory = everyone.map(lambda c, k: algorithm.memory(x, y), given.key).rows
            tracing.threaded = tracing.threaded._replace(memory=memory)
        state = jax.tree.map(jaxprs.strong, algorithm.init(everyone, x, y, given.key))
        if not (hasattr(state, "x") and hasattr(state, "y")):
            name = type(setting.algorithm).__name__
            raise TypeError(f"{name}.init must return a NamedTuple with fields x and y; got {kind_of(state)}.")
        client = everyone.map(lambda c, k: states[0], given.key).rows
        server = jax.tree.map(jnp.asarray, states[1])
        tracing.settle(given.ids)
        carry = Carry(state, tracing.threaded.memory, client, server, given.noise)
        return tracing, Made(carry, seconds=tracing.threaded.seconds)

    noise = () if setting.channel is None else jax.ShapeDtypeStruct((2,), jnp.uint32)
    given = _given(setting, start, hyper, setting.clients.n)._replace(noise=noise)
    return _traced(f"{type(setting.algorithm).__name__}.init", init, given, setting.channel)


def channel_states(setting: Setting, plan: Plan) -> tuple[Any, Any]:
    """The states of the channel's client and server sides before the first round, by exchange."""
    client, server = {}, {}
    for name, exchange in plan.exchanges.items():
        channel = channels.chosen(setting.channel, name)
        at_server, at_client = ((), ()) if channel is None else channel.init(exchange)
        if jax.tree.leaves(at_client):
            client[name] = at_client
        if jax.tree.leaves(at_server):
            server[name] = at_server
    return client or (), server or ()


def plans(setting: Setting, start: Any, hyper: Any, measure: Any = None) -> tuple[Plan, ...]:
    """The plans of the start, of a round and, with `measure`, of an evaluation."""
    first = start_plan(setting, start, hyper)
    one_round = round_plan(setting, first.made.carry, hyper)
    if setting.channel is not None:
        channels.check(setting.channel, [*first.exchanges, *one_round.exchanges])
        if hasattr(setting.channel, "calibrated"):
            setting = setting._replace(channel=setting.channel.calibrated(first, one_round, setting))
            first, one_round = (replace(plan, channel=setting.channel) for plan in (first, one_round))
        states = channel_states(setting, one_round)
        if states != ((), ()) or hasattr(setting.channel, "calibrated"):
            first = start_plan(setting, start, hyper, states)
            one_round = round_plan(setting, first.made.carry, hyper)
    if measure is None:
        return first, one_round
    return first, one_round, measure_plan(setting, measure, first.made.carry, hyper)


def round_plan(setting: Setting, carry: Carry, hyper: Any) -> Plan:
    """The plan of a round. `carry`: the shapes of its carry, with a row for each client of the federation."""
    rows = lambda a: jax.ShapeDtypeStruct((setting.cohort, *a.shape[1:]), a.dtype)
    cohorts = carry._replace(memory=jax.tree.map(rows, carry.memory), client=jax.tree.map(rows, carry.client))

    def one_round(given: Given) -> tuple[Tracing, Made]:
        name = type(setting.algorithm).__name__
        algorithm, levels = _with_hyper(setting, given.hyper, given.t)
        state, *threaded, noise = given.carry
        present = None if setting.chance is None else given.present
        lossy = setting.faults is not None or present is not None
        if lossy:
            everyone = jnp.ones(setting.cohort, bool) if present is None else present
            threaded += [jnp.int32(0), jnp.int32(setting.cohort), everyone]
        keys = None
        if lossy or setting.channel is not None or setting.asynchronous:
            noise_key = None if setting.channel is None else _noise(noise, given.t + 1)
            keys = ExchangeKeys(given.chance, _public(given.key), noise_key)
        tracing = Tracing(
            setting.channel, setting.faults, keys, Threaded(*threaded), setting.debug, setting.products, setting.rate,
            setting.chance,
        )  # fmt: skip
        tracing.levels, tracing.down = levels, channels.down(setting.channel)
        tracing.asynchronous = setting.asynchronous
        _start_clock(tracing, setting.clock, given.t, 1)
        ids = given.ids
        if setting.asynchronous and setting.clock is not None:  # one client: see `Timetable`
            ids, tracing.again = ids % setting.clients.n, ids[0] // setting.clients.n
        if setting.faults is not None and setting.faults.attack is not None:
            tracing.liars = setting.faults.attack.liars(setting.clients.n, given.chance)
        cohort = Fed(setting.problem, setting.clients, given.weights, ids, tracing, present)
        state = _like(state, _projected(setting.problem, algorithm.round(cohort, state, given.key)), name)
        tracing.settle(ids)
        after = tracing.threaded
        memory = _like(given.carry.memory, after.memory, f"{name}, what its clients remember")
        carry = Carry(state, memory, after.client, after.server, noise)
        return tracing, Made(carry, after.missing, after.least, after.stayed, after.seconds)

    given = _given(setting, cohorts, hyper, setting.cohort)
    if setting.chance is not None:
        given = given._replace(present=jax.ShapeDtypeStruct((setting.cohort,), bool))
    return _traced(f"{type(setting.algorithm).__name__}.round", one_round, given, setting.channel)


def _start_clock(tracing: Tracing, timing: Timing | None, t: Any, plan: int) -> None:
    if timing is not None:
        tracing.watch = Watch(timing, t, plan)
        tracing.threaded = tracing.threaded._replace(seconds=jnp.zeros((), jnp.float32))


def measure_plan(setting: Setting, measure: Callable[..., Any], carry: Carry, hyper: Any) -> Plan:
    """The plan of an evaluation: measure(client, x, y, memory) -> {name: number} on all clients, a row for each.

    `carry`: the shapes of the carry. The clients' memory does not change.
    """
    state = carry.state
    iterates = Carry((state.x, state.y), carry.memory)

    def measured(given: Given) -> tuple[Tracing, Made]:
        tracing = Tracing(debug=setting.debug, products=setting.products)
        everyone = Fed(setting.problem, setting.clients, given.weights, given.ids, tracing)
        (x, y), memory = given.carry.state, given.carry.memory

        def on_client(client: Any, key: Array, memory: Any) -> Any:
            return _numbers(measure(client.with_key(key), x, y, memory))

        values = everyone.map(on_client, given.key, None if memory is None else PerClient(memory))
        return tracing, Made(Carry(everyone.gather(values, "evaluation"), memory))

    return _traced(
        f"{type(setting.algorithm).__name__}.evaluation", measured, _given(setting, iterates, hyper, setting.clients.n)
    )


def _numbers(metrics: Any) -> dict[str, Array]:
    check_numbers("evaluate_client", metrics)
    return {name: jnp.asarray(value, accumulator(jnp.result_type(value))) for name, value in metrics.items()}


def _public(key: Array) -> Array:
    """The stream of the channel's keys that clients see, separate from the algorithm's own."""
    return jax.random.fold_in(key, 0x63686E)


def _noise(root: Array, t: Any) -> Array:
    """The server's key for the noise of round t; 0 is the start."""
    return jax.random.fold_in(noise_key(root), t)


def noise_key(root: Array) -> Array:
    """The key of the server's own randomness."""
    return jax.random.wrap_key_data(root, impl="threefry2x32")


def _given(setting: Setting, carry: Any, hyper: Any, cohort: int) -> Given:
    key = jax.ShapeDtypeStruct((), draws.seed_key(0).dtype)
    integer = lambda *dims: jax.ShapeDtypeStruct(dims, jnp.int32)
    return Given(carry, hyper, integer(), integer(cohort), setting.clients.weights, key, key)


def _projected(problem: Any, state: Any) -> Any:
    """The state with x projected onto the problem's set, so that algorithms need not do it."""
    project = getattr(problem, "project_upper", None)
    if project in (None, unconstrained):
        return state
    return state._replace(x=project(state.x))


def _like(before: Any, after: Any, name: str) -> Any:
    """`after` in the types of `before`; raise TypeError if structures, shapes or types differ."""
    old: Any = jax.tree.structure(before)
    new: Any = jax.tree.structure(after)
    if old != new:
        raise TypeError(f"{name}: a round must return the structure that it is given, {old}; got {new}.")

    def same(path: Any, a: Any, b: Any) -> Any:
        b = jnp.asarray(b)
        fits = a.dtype == b.dtype or (jax.typeof(b).weak_type and jnp.promote_types(a.dtype, b.dtype) == a.dtype)
        if a.shape != b.shape or not fits:
            raise TypeError(
                f"{name}: a round must keep the shape and type of {jax.tree_util.keystr(path)}, "
                f"{a.dtype}{list(a.shape)}; got {b.dtype}{list(b.shape)}."
            )
        return jaxprs.strong(b) if a.dtype == b.dtype else b.astype(a.dtype)

    return jax.tree_util.tree_map_with_path(same, before, after)


def _traced(title: str, fn: Callable[[Given], tuple[Tracing, Made]], given: Given, channel: Any = None) -> Plan:
    tracings: list[Tracing] = []

    def outputs(given: Given) -> Made:
        tracing, made = fn(given)
        tracings.append(tracing)
        return made

    traced, shapes = jaxprs.trace(outputs, given)
    jaxpr = without_unused_maps(with_literals_inside(jaxprs.open_up(traced)))
    return Plan(
        title=title,
        jaxpr=jaxpr,
        consts=[duplicate(c) if isinstance(c, jax.Array) else jnp.array(c) for c in traced.consts],
        body=body_of(jaxpr),
        given=given,
        made=shapes,
        sample_by_sample=frozenset(tracings[-1].sample_by_sample),
        exchanges=tracings[-1].exchanges,
        channel=channel,
        unheard=tuple(sorted(tracings[-1].unheard)),
    )
