"""The engines: sums, the ledger, caches, what travels, losses, divergence, lost replies and memory."""

import gc
import json
import os
import subprocess
import sys
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import rookery as rk
from rookery.base import draws
from rookery.data.clients import Clients
from rookery.engines import checks, engine, interpreter
from rookery.engines.engine import PROGRAMS, Job
from rookery.engines.federation import wire
from rookery.engines.federation.site import Site
from rookery.engines.simulation import device as simulation
from rookery.language import ledger
from rookery.plan.calls import WorkCall
from rookery.plan.costs import costs
from rookery.run.progress import Pace

ENGINES = [rk.Simulation(), rk.Federation()]
on_both = pytest.mark.parametrize("engine", ENGINES, ids=["simulation", "federation"])
# Where the second engine is a variant: in the slow run.
on_first = pytest.mark.parametrize(
    "engine", [ENGINES[0], pytest.param(ENGINES[1], marks=pytest.mark.slow)], ids=["simulation", "federation"]
)

SQUARES = rk.SingleLevel(lambda x, b: jnp.mean((x - b) ** 2))
COUPLED = rk.Minimax(lambda x, y, b: jnp.mean((x - b) ** 2) + x @ y - y @ y)
ROWS = [np.array([[1.0, 2.0], [3.0, 4.0]]), np.array([[5.0, 1.0], [0.0, 2.0]]), np.array([[-1.0, 0.5], [2.0, 7.0]])]
THREE = rk.Clients(upper=ROWS)
ZERO = np.zeros(2)


class State(NamedTuple):
    x: Any
    y: tuple[()] = ()


@dataclass(frozen=True)
class Method:
    """What the methods of these tests have in common; `round` is one's own."""

    solves: ClassVar[tuple[type, ...]] = (rk.SingleLevel,)

    def init(self, fed: Any, x: Any, y: Any, key: Any) -> State:
        return State(x)


def traced(problem: Any, clients: Clients, method: Any, *start: Any) -> engine.Traced:
    """The plans of a run; of the start only the shapes matter."""
    return engine.traced(Job(problem, clients, method, start if len(start) == 2 else (*start, ()), clients.n))


def same_state(a: rk.Run, b: rk.Run) -> None:
    """The same variables to the last bit, and the same history but for the clock."""
    assert jax.tree.structure(a.state) == jax.tree.structure(b.state)
    for u, v in zip(jax.tree.leaves(a.state), jax.tree.leaves(b.state), strict=True):
        np.testing.assert_array_equal(u, v)
    assert a.history.drop(columns="seconds").equals(b.history.drop(columns="seconds"))


# Sums.


def equations(jaxpr: Any) -> Iterator[str]:
    """The names of all primitives of a jaxpr, inside others, too."""
    for eqn in jaxpr.eqns:
        yield str(eqn.primitive)
        for value in jax.tree.leaves(list(eqn.params.values()), is_leaf=lambda v: hasattr(v, "eqns")):
            inner = getattr(value, "jaxpr", value)
            yield from equations(inner) if hasattr(inner, "eqns") else ()


@pytest.mark.parametrize("block", ["auto", 2])
def test_a_mean_is_no_product_of_matrices(block: Any) -> None:
    """A GPU would round its factors to ten bits."""
    assert "dot_general" not in equations(jax.make_jaxpr(interpreter.weighted_sum)(ZERO, np.ones((2, 3))).jaxpr)
    assert "dot_general" in equations(jax.make_jaxpr(lambda a: jax.jit(jnp.dot)(a, a))(ZERO).jaxpr)
    plans = traced(SQUARES, THREE, rk.FedSVRG(step=0.1), ZERO)
    program = simulation.Program(plans.round, THREE, block)
    one = partial(simulation.one_round, program, 3, plans.round.consts, THREE, plans.hyper)
    found = set(equations(jax.make_jaxpr(one)(plans.start.made.carry, 0, plans.seed).jaxpr))
    assert "reduce_sum" in found
    assert "dot_general" not in found


@dataclass(frozen=True)
class Average(Method):
    """x is the mean of the clients' first samples."""

    def round(self, fed: Any, state: State, key: Any) -> State:
        return State(fed.mean(fed.map(lambda c, k: c.upper(k).rows[0], key)))


@pytest.mark.parametrize("kind", [jnp.bfloat16, pytest.param(jnp.float16, marks=pytest.mark.slow)])
def test_narrow_values_are_added_up_in_float32(kind: Any) -> None:
    values = 1 + np.arange(1000) % 100 / 128  # numbers that both types hold; a sum in bfloat16 would end at 256
    rows = np.asarray(jnp.asarray(values, kind))
    assert np.asarray(rows, float).tolist() == values.tolist()
    total = interpreter.weighted_sum(jnp.ones(1000), rows)
    assert (total.dtype, float(total)) == (jnp.float32, values.sum())
    for own, count in ((rk.Simulation(block=70), 1000), (rk.Federation(), 100)):
        clients = rk.Clients(upper=[rows[i : i + 1] for i in range(count)])
        run = rk.solve(SQUARES, clients, Average(), jnp.zeros((), kind), 1, engine=own)
        assert run.x.dtype == kind
        assert run.x == jnp.asarray(values[:count].mean(), kind)


# The ledger: exact, however large.


@dataclass(frozen=True)
class Talkative(Method):
    """600 exchanges a round."""

    def round(self, fed: Any, state: State, key: Any) -> State:
        one = lambda i, x: fed.mean(fed.map(lambda c, k: x - c.f_x(x, (), c.upper(k)), key), name="x")
        return State(fed.loop(600, one, state.x))


FIRST = rk.SingleLevel(lambda x, b: jnp.mean((x[0] - b) ** 2).astype(x.dtype))


def test_bytes_beyond_32_bits() -> None:
    plans = traced(FIRST, THREE, Talkative(), jax.ShapeDtypeStruct((10**6,), jnp.float32))
    entries = costs(plans.round, [])
    ((exchange, entry),) = entries.items()
    assert (exchange.reply_bytes, entry.count, entry.up, entry.down) == (4 * 10**6, 600, 24 * 10**8, 24 * 10**8)
    account = ledger.Ledger()
    account.add([ledger.Amounts(entries, [0] * 5)] * 1000, cohort=3)
    assert account.counts["exchanges"] == 600_000
    assert account.counts["bytes_up"] == account.counts["bytes_down"] == 3 * 1000 * 24 * 10**8
    assert account.last[0]["bytes_up"] == 3 * 24 * 10**8


def test_a_state_beyond_32_bits() -> None:
    """2.4 GB: traced, counted and lowered, not run."""
    start = jax.ShapeDtypeStruct((6 * 10**8,), jnp.float32)
    plans = traced(FIRST, THREE, rk.FedAvg(step=0.1), start)
    (entry,) = costs(plans.round, []).values()
    assert entry.up == 24 * 10**8
    assert entry.down - entry.up == 8  # the step
    program = simulation.Program(plans.start, THREE, "auto")
    given = plans.start.consts, THREE, plans.hyper, plans.job.start, plans.seed, plans.noise
    begin = jax.eval_shape(partial(simulation.start, program), *given)
    assert begin[0].state.x.shape == start.shape


@dataclass(frozen=True)
class Busy(Method):
    """Every local step takes 2³⁰ samples, or says so."""

    local_steps: Any = 5

    def round(self, fed: Any, state: State, key: Any) -> State:
        def local(c: Any, k: Any) -> Any:
            def step(i: Any, x: Any) -> Any:
                c._count("samples_upper", 2**30)
                c._count("gradients")
                return x + 1

            return c.loop(c.steps(self.local_steps, k, None, "upper"), step, state.x)

        return State(fed.mean(fed.map(local, key)))


@pytest.mark.parametrize(
    ("own", "local_steps"),
    [
        (rk.Simulation(block=2), 5),
        (rk.Federation(), (3, 6)),
        pytest.param(rk.Simulation(block=2), (3, 6), marks=pytest.mark.slow),
        pytest.param(rk.Federation(), 5, marks=pytest.mark.slow),
    ],
)
def test_work_beyond_32_bits(own: Any, local_steps: Any) -> None:
    run = rk.solve(SQUARES, THREE, Busy(local_steps), ZERO, 3, engine=own, every=3)
    steps = run.history["gradients"].iloc[-1]
    assert steps == 3 * round(3 * float(run.x[0])) / 3  # x is the mean number of steps, summed over the rounds
    assert steps == 45 if local_steps == 5 else 27 <= steps <= 54
    assert run.history["samples_upper"].iloc[-1] == steps * 2**30 > 2**34
    busiest = run.history["samples_busiest"].iloc[-1]
    assert busiest == 15 * 2**30 if local_steps == 5 else steps / 3 <= busiest / 2**30 <= 18


@dataclass(frozen=True)
class BusyBetween(Method):
    """A loop of a fixed length that counts beyond 32 bits, between batches whose sizes differ by client."""

    def round(self, fed: Any, state: State, key: Any) -> State:
        def local(c: Any, k: Any) -> Any:
            before = c.f_x(state.x, (), c.upper())
            busy = c.loop(4, lambda i, z: (c._count("samples_upper", 2**30), z)[1], before)
            other = c.loop(2, lambda i, z: c.loop(4, lambda i, z: (c._count("products", 2**29), z)[1], z), busy)
            return other + c.f_x(state.x, (), c.upper())

        return State(state.x - 0.1 * fed.mean(fed.map(local, key)))


def test_work_beyond_32_bits_beside_batches_of_unequal_size() -> None:
    clients = rk.Clients(upper=[np.ones((n, 1)) for n in (1, 3, 40)])
    run = rk.solve(SQUARES, clients, BusyBetween(), ZERO, 2)
    last = run.history.iloc[-1]
    assert last["samples_upper"] == 2 * (3 * 2**32 + 2 * 44)
    assert last["gradients"] == 2 * 3 * 2
    assert last["products"] == 2 * 3 * 2**32


QUICK = settings(deadline=None, derandomize=True, max_examples=60)
ADDED, TIMES, ADDED_UP, WORKED = map(jax.jit, (ledger.add, ledger.times, ledger.total, ledger.worked))
large = st.integers(0, 2**64 - 1) | st.integers(0, 2**33)


def wide(*values: int) -> Any:
    """As the device holds them."""
    return np.array([[v % 2**32 for v in values], [v // 2**32 for v in values]], np.uint32)


@QUICK
@given(large, large, st.integers(0, 2**32 - 1))
def test_wide_numbers_add_and_multiply(a: int, b: int, n: int) -> None:
    modulo = lambda values: [v % 2**64 for v in values]
    assert ledger.as_integers(ADDED(wide(a, b), wide(b, b))) == modulo([a + b, 2 * b])
    assert ledger.as_integers(TIMES(wide(a, b), np.uint32(n))) == modulo([n * a, n * b])


@QUICK
@given(st.lists(st.tuples(st.integers(0, 2**50), st.integers(0, 2**50)), min_size=6, max_size=6))
def test_wide_numbers_add_up(rows: list[tuple[int, int]]) -> None:
    stacked = np.stack([wide(*row, *row) for row in rows])
    assert ledger.as_integers(ADDED_UP(stacked)) == [sum(column) for column in zip(*rows, strict=True)] * 2
    *sums, busiest = ledger.as_integers(WORKED(stacked[None]))
    assert sums == [sum(column) for column in zip(*rows, strict=True)] * 2
    assert busiest == max(a + b for a, b in rows)


# One problem, several shapes.


@on_first
def test_two_shapes_of_one_problem(engine: Any) -> None:
    problem = rk.SingleLevel(lambda x, b: jnp.mean((jax.tree.leaves(x)[0] - b) ** 2))
    method = rk.FedAvg(step=0.25)
    mean = np.mean(ROWS, axis=(0, 1))
    for start in (ZERO, {"w": ZERO}, np.float32(ZERO), ZERO):
        run = rk.solve(problem, THREE, method, start, 1, engine=engine)
        assert jax.tree.structure(run.x) == jax.tree.structure(start)
        first, kind = jax.tree.leaves(run.x)[0], jax.tree.leaves(start)[0].dtype
        assert first.dtype == kind
        np.testing.assert_allclose(first, mean / 4, rtol=1e-6)
    sizes = [ROWS[0], np.concatenate(ROWS[1:])]
    expected = np.mean([np.mean(rows, axis=0) for rows in sizes], axis=0) / 4
    run = rk.solve(problem, rk.Clients(upper=sizes), method, ZERO, 1, engine=engine)
    np.testing.assert_allclose(run.x, expected, rtol=1e-12)


# What compiled programs hold.


class Loss:
    """A loss that weak references can be made to, with an array of its own."""

    def __init__(self) -> None:
        self.own = np.ones((7, 11, 13))

    def __call__(self, x: Any, b: Any) -> Any:
        return jnp.mean((x - b) ** 2) * jnp.mean(self.own)


@on_first
def test_a_run_leaves_neither_loss_nor_data_behind(engine: Any) -> None:
    def once() -> list[weakref.ref[Any]]:
        loss = Loss()
        problem, clients = rk.SingleLevel(loss), rk.Clients(upper=[np.ones((2, 17)), np.ones((3, 17))])
        rk.solve(problem, clients, rk.FedAvg(step=0.1), np.zeros(17), 2, engine=engine)
        return [weakref.ref(thing) for thing in (loss, problem, clients, clients.upper.rows)]

    held = once()
    gc.collect()
    assert [ref() for ref in held] == [None] * 4
    assert not [a.shape for a in jax.live_arrays() if a.shape in ((7, 11, 13), (5, 17), (3, 17))]
    assert len(PROGRAMS._programs) <= PROGRAMS._most <= 256


def test_an_asynchronous_run_leaves_neither_loss_nor_data_behind() -> None:
    def once() -> list[weakref.ref[Any]]:
        loss, how = Loss(), rk.Asynchronous(buffer=1)
        problem, clients = rk.SingleLevel(loss), rk.Clients(upper=[np.ones((2, 17)), np.ones((3, 17))])
        method, clock = rk.FedAvg(step=0.1), rk.Clock(latency=np.ones((4, 2)))
        rk.solve(problem, clients, method, np.zeros(17), 1, clock=clock, asynchronous=how)
        return [weakref.ref(thing) for thing in (loss, problem, clients, clients.upper.rows)]

    held = once()
    gc.collect()
    assert [ref() for ref in held] == [None] * 4
    assert not [a.shape for a in jax.live_arrays() if a.shape in ((7, 11, 13), (5, 17), (3, 17), (4, 2))]


# What counts is what a loss reads now.

STRENGTH = 0.0


def ridge(x: Any, b: Any) -> Any:
    return jnp.mean((x - b) ** 2) + STRENGTH * jnp.sum(x**2)


class Ridge:
    strength = 0.0

    def loss(self, x: Any, b: Any) -> Any:
        return jnp.mean((x - b) ** 2) + self.strength * jnp.sum(x**2)


def after_three(loss: Any, engine: Any) -> float:
    """x after three rounds of FedAvg with the step ⅛, from 0, of a client that has the value 2."""
    clients = rk.Clients(upper=[np.full((2, 1), 2.0)])
    return float(rk.solve(rk.SingleLevel(loss), clients, rk.FedAvg(step=0.125), np.zeros(1), 3, engine=engine).x[0])


def by_hand(strength: float, target: float = 2.0) -> float:
    x = 0.0
    for _ in range(3):
        x -= 0.125 * (2 * (x - target) + 2 * strength * x)
    return x


@on_first
def test_a_changed_value_counts(engine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    bound, factor = Ridge(), np.ones(1)
    scaled = lambda x, b: jnp.mean((x - factor * b) ** 2)
    for strength in (0.0, 2.0):
        monkeypatch.setattr(sys.modules[__name__], "STRENGTH", strength)
        bound.strength = strength
        factor[:] = 1 + strength
        assert after_three(ridge, engine) == pytest.approx(by_hand(strength), rel=1e-12)
        assert after_three(bound.loss, engine) == pytest.approx(by_hand(strength), rel=1e-12)
        assert after_three(scaled, engine) == pytest.approx(by_hand(0, 2 * (1 + strength)), rel=1e-12)


@on_first
def test_equal_code_compiles_once_and_arrays_are_inputs(engine: Any) -> None:
    def fresh(array: Any) -> Callable[..., Any]:
        return lambda x, b: jnp.mean((x - b) ** 2 * array) + 0.375 * jnp.sum(x**2)

    first = after_three(fresh(np.array([1.0])), engine)
    before = PROGRAMS.made
    assert after_three(fresh(np.array([1.0])), engine) == first
    assert after_three(fresh(np.array([2.0])), engine) != first
    assert PROGRAMS.made == before


# Messages: what sites are sent, and what asking twice does.


class Recorder:
    """A transport that keeps all requests and replies, and what happens on the way."""

    def __init__(self, deliver: Callable[[Site, bytes, list[bytes]], bytes] | None = None) -> None:
        self.messages: list[tuple[int, bytes, bytes]] = []
        self._deliver = deliver or (lambda site, request, before: site.handle(request))

    def __call__(self, sites: list[Site]) -> Callable[[int, bytes], bytes]:
        self.sites = list(sites)

        def send(client: int, request: bytes) -> bytes:
            before = [sent for to, sent, _ in self.messages if to == client]
            reply = self._deliver(sites[client], request, before)
            self.messages.append((client, request, reply))
            return reply

        return send


def twice(site: Site, request: bytes, before: list[bytes]) -> bytes:
    first, second = site.handle(request), site.handle(request)
    assert first == second
    return second


def late(site: Site, request: bytes, before: list[bytes]) -> bytes:
    """After the answer the last two requests arrive once more."""
    answer = site.handle(request)
    for old in before[-2:]:
        site.handle(old)
    return answer


def forgetful(site: Site, request: bytes, before: list[bytes]) -> bytes:
    site.forget()
    return site.handle(request)


REMEMBERING = {
    "Ditto": (SQUARES, rk.Ditto(step=0.1, personal_step=0.1, personal_steps=2), ZERO),
    "PDSGD": (SQUARES, rk.PDSGD(step=0.1, batch_size=1), ZERO),
    "ScaffoldSaddle": (COUPLED, rk.ScaffoldSaddle(upper_step=0.1, lower_step=0.1), (ZERO, ZERO)),
}


@pytest.mark.parametrize(
    "name", ["ScaffoldSaddle", *(pytest.param(name, marks=pytest.mark.slow) for name in ("Ditto", "PDSGD"))]
)
def test_asking_twice_late_or_a_site_that_forgot_changes_nothing(name: str) -> None:
    problem, method, start = REMEMBERING[name]
    how: dict[str, Any] = {"rounds": 3, "cohort": 2, "seed": 1}
    plain = Recorder()
    expected = rk.solve(problem, THREE, method, start, **how, engine=rk.Federation(transport=plain))
    for deliver in (twice, late, forgetful):
        found = Recorder(deliver)
        same_state(rk.solve(problem, THREE, method, start, **how, engine=rk.Federation(transport=found)), expected)
        for site, like in zip(found.sites, plain.sites, strict=True):
            assert jax.tree.all(jax.tree.map(np.array_equal, site.memory.after(3), like.memory.after(3)))
    assert any(jax.tree.leaves(site.memory.after(3)) for site in plain.sites)


@pytest.mark.parametrize("sizes", [pytest.param((3, 3), marks=pytest.mark.slow), (3, 5)])
def test_replies_with_an_entry_for_each_sample(sizes: tuple[int, ...]) -> None:
    """On sites of any sizes; and no site is sent what another replied."""
    rng = np.random.default_rng(0)
    clients = rk.Clients(upper=[rng.normal(size=(size, 2)) for size in sizes])
    method, recorder = rk.FastDRO(step=0.1, batch_size=None), Recorder()
    here, there = (
        rk.solve(SQUARES, clients, method, ZERO, 2, engine=own)
        for own in (rk.Simulation(), rk.Federation(transport=recorder))
    )
    np.testing.assert_allclose(here.x, there.x, rtol=1e-12)
    replied: list[set[float]] = [set() for _ in sizes]
    received: list[set[float]] = [set() for _ in sizes]
    for client, request, reply in recorder.messages:
        replied[client] |= reals(reply)
        received[client] |= reals(request)
    assert all(len(own) > 4 for own in replied)
    assert not received[0] & replied[1]
    assert not received[1] & replied[0]


def reals(message: bytes) -> set[float]:
    """All real numbers of a message but 0 and 1."""
    arrays = wire.decode(message)[1]
    return {float(v) for a in arrays if a.dtype.kind == "f" for v in a.ravel()} - {0.0, 1.0}


def test_sites_see_neither_the_seed_nor_the_servers_keys() -> None:
    """A client has the keys that were derived for it, from which no other can be computed."""
    seed, recorder, rounds = 987_654_321, Recorder(), 3
    method = rk.FedAvg(step=0.1, local_steps=(1, 2))
    private = {"channel": rk.chain(rk.clip(1.0), rk.gaussian(0.1)), "faults": rk.Faults(0.2)}
    how: dict[str, Any] = {"cohort": 2, "seed": seed, "engine": rk.Federation(transport=recorder)}
    rk.solve(SQUARES, THREE, method, ZERO, rounds, **how, **private, noise_seed=123_456_789)
    key, own = draws.seed_key(seed), []
    root = jax.random.fold_in(draws.seed_key(123_456_789), engine._NOISE)
    noise = [jax.random.fold_in(root, t) for t in range(rounds + 1)]
    secret = [key, root, *noise, *(jax.random.fold_in(k, 1) for k in noise), *engine.start_keys(key, 3)[1:3]]
    for t in range(rounds):
        ids, algorithm, servers, _ = engine.round_keys(key, t, 3, 2)
        at_round = jax.random.fold_in(key, t + 1)
        secret += [at_round, *jax.random.split(at_round), algorithm, servers, jax.random.fold_in(servers, 1)]
        own += [(int(i), words(jax.random.fold_in(algorithm, i))) for i in ids]
    assert recorder.messages
    for client, request, reply in recorder.messages:
        for one in secret:
            assert words(one) not in request + reply
        assert str(seed) not in json.dumps(wire.decode(request)[0])
        assert not any(of != client and derived in request for of, derived in own)
    assert all(any(derived in request for _, request, _ in recorder.messages) for _, derived in own)
    for site in recorder.sites:
        for array in arrays_within(vars(site)):
            assert all(words(one) not in array for one in secret)


def words(key: Any) -> bytes:
    return np.asarray(jax.random.key_data(key)).tobytes()


def arrays_within(value: Any, seen: set[int] | None = None) -> Iterator[bytes]:
    """The bytes of all arrays that can be reached through containers and records."""
    seen = set() if seen is None else seen
    if id(value) in seen or isinstance(value, type):
        return
    seen.add(id(value))
    if isinstance(value, np.ndarray | jax.Array):
        is_key = jax.dtypes.issubdtype(value.dtype, jax.dtypes.prng_key)
        yield np.asarray(jax.random.key_data(value) if is_key else value).tobytes()
        return
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple | set) else []
    for own in [*inner, *getattr(value, "__dict__", {}).values()]:
        yield from arrays_within(own, seen)


@pytest.mark.slow
def test_no_method_sends_a_key() -> None:
    from contract import cases

    for name, kind in cases.pairs():
        case = cases.case(kind)
        clients = case.clients()
        start = checks.start_values(case.problem, clients, case.init)
        plans = traced(case.problem, clients, cases.method(name), *start)
        sent = [v for plan in (plans.start, plans.round) for call in plan.body.of(WorkCall) for v in call.sent]
        assert not [v for v in sent if jax.dtypes.issubdtype(v.aval.dtype, jax.dtypes.prng_key)], name


# A loss is a mean over its batch.


def gaps(x: Any, b: Any) -> Any:
    return b["a"] @ x - b["t"]


def normalised(a: Any) -> Any:
    return (a - a.mean(0)) / (a.std(0) + 1e-3)


MEANS = {
    "mean and ridge": lambda x, b: jnp.mean(gaps(x, b) ** 2) + 0.1 * x @ x,
    "mean and lasso": lambda x, b: jnp.mean(jnp.abs(gaps(x, b))) + jnp.sum(jnp.abs(x)),
}
NO_MEANS = {
    "sum": lambda x, b: jnp.sum(gaps(x, b) ** 2),
    "sum and ridge": lambda x, b: jnp.sum(gaps(x, b) ** 2) + 0.1 * x @ x,
    "logsumexp": lambda x, b: jax.nn.logsumexp(gaps(x, b)),
    "batch normalisation": lambda x, b: jnp.mean((normalised(b["a"]) @ x - b["t"]) ** 2),
    "root": lambda x, b: jnp.sqrt(jnp.mean(gaps(x, b) ** 2)),
}


def data(*sizes: int, both: bool = False) -> Clients:
    rng = np.random.default_rng(3)
    own = [{"a": rng.normal(size=(size, 2)), "t": rng.normal(size=size)} for size in sizes]
    return rk.Clients(lower=own, upper=own) if both else rk.Clients(upper=own)


def good(x: Any, y: Any, b: Any) -> Any:
    return jnp.mean(gaps(y, b) ** 2) + 0.1 * y @ y * jnp.sum(x**2)


def problems(loss: Any) -> dict[str, tuple[Any, Any]]:
    """Problems with this loss in each place, by the place's name, with a method."""
    nested = lambda x, y, b: loss(y, b) + jnp.sum(x**2)
    inner = rk.Compositional(lambda x, b: jnp.stack([loss(x, b), jnp.mean(b["t"])]), lambda value: value @ value)
    bilevel = rk.FedBiO()
    return {
        "SingleLevel.loss": (rk.SingleLevel(loss), rk.FedAvg()),
        "Bilevel.upper": (rk.Bilevel(nested, good), bilevel),
        "Bilevel.lower": (rk.Bilevel(good, nested), bilevel),
        "Minimax.objective": (rk.Minimax(lambda x, y, b: loss(x, b) + x @ y - y @ y), rk.FedAvgSaddle()),
        "Compositional.inner": (inner, rk.LFedNest()),
        "Compositional.inner of its own": (inner, rk.MBSGD()),
        "Bilevel.lower of a composition": (inner.as_bilevel(), bilevel),
    }


def opened(loss: Any, place: str, engine: Any, sizes: tuple[int, ...]) -> None:
    """As far as `solve` gets before anything is compiled."""
    problem, method = problems(loss)[place]
    clients = data(*sizes, both=not isinstance(problem, rk.SingleLevel | rk.Minimax))
    start = (jnp.ones(2), jnp.ones(2)) if not isinstance(problem, rk.SingleLevel) else (jnp.ones(2), ())
    engine.open(Job(problem, clients, method, start, len(sizes))).close()


PLACES = list(problems(MEANS["mean and ridge"]))


@pytest.mark.parametrize(
    ("place", "engine"),
    [
        (PLACES[0], rk.Federation()),
        *(pytest.param(place, rk.Simulation(), marks=pytest.mark.slow) for place in PLACES),
    ],
)
def test_a_loss_that_is_no_mean_needs_equal_clients(place: str, engine: Any) -> None:
    named = place.split(" ")[0].replace(".", r"\.")
    losses = NO_MEANS if place == "SingleLevel.loss" else {"sum": NO_MEANS["sum"]}
    opened(losses["sum"], place, engine, (4, 4))
    for loss in losses.values():
        with pytest.raises(ValueError, match=rf"^{named} must be a mean over its batch; on 3 samples .*jnp\.mean"):
            opened(loss, place, engine, (3, 5))
    for loss in MEANS.values():
        opened(loss, place, engine, (3, 5))


def test_equal_clients_are_not_told_to_be_equal() -> None:
    """A method that weights single samples evaluates them one by one, whatever the clients' sizes."""
    job = Job(rk.SingleLevel(NO_MEANS["sum"]), data(4, 4), rk.FastDRO(), (jnp.ones(2), ()), 2)
    with pytest.raises(ValueError, match=r"the problem\. Write it as a mean \(.* plus terms without data\)\.$"):
        rk.Simulation().open(job)


def test_two_samples_that_differ_are_looked_at() -> None:
    """Of equal ones batch normalisation makes zeros, together and alone."""
    own = [{"a": np.ones((size, 2)), "t": np.ones(size)} for size in (3, 5)]
    own[1]["a"][3:] = [[2.0, 3.0], [4.0, 5.0]]
    problem = rk.SingleLevel(NO_MEANS["batch normalisation"])
    with pytest.raises(ValueError, match="must be a mean"):
        rk.solve(problem, rk.Clients(upper=own), rk.FedAvg(), np.ones(2), 1)


@on_both
def test_unequal_clients_have_the_same_problem_on_both_engines(engine: Any) -> None:
    """One step from x: the mean of the clients' gradients, each the mean over its own samples."""
    clients, x = data(3, 5), np.array([1.0, -1.0])
    run = rk.solve(rk.SingleLevel(MEANS["mean and ridge"]), clients, rk.FedAvg(step=0.5), x, 1, engine=engine)
    gradients = []
    for i in range(2):
        (rows,) = clients.client_data(i)["upper"]
        gradients.append(2 * np.mean((rows["a"] @ x - rows["t"])[:, None] * rows["a"], axis=0) + 0.2 * x)
    np.testing.assert_allclose(run.x, x - 0.5 * np.mean(gradients, axis=0), rtol=1e-12)


def test_a_statistic_of_the_batch_is_not_split(recwarn: Any) -> None:
    """It may be no mean where batches stay whole, without a warning; elsewhere the run is refused, on all engines."""
    problem = rk.SingleLevel(NO_MEANS["logsumexp"], batch_statistic=True)
    fine = lambda clients, method: rk.Simulation().open(Job(problem, clients, method, (jnp.ones(2), ()), 2)).close()
    fine(data(4, 4), rk.FedAvg())
    fine(data(3, 5), rk.FedAvg(batch_size=3))
    assert not recwarn.list
    private = rk.private(epsilon=8, delta=1e-5, clip=1.0, rounds=1, unit="record")
    cases = [
        (data(3, 5), rk.FedAvg(), {}),
        (data(3, 5), rk.FedAvg(batch_size=4), {}),
        (data(4, 4), rk.FastDRO(), {}),
        (data(4, 4), rk.FedAvg(batch_size=2), {"channel": private}),
    ]
    refused = r"^SingleLevel\.loss must be evaluated on whole batches, because of batch_statistic=True; this run"
    cases.append((data(3, 5), rk.FedAvg(), {"engine": rk.Federation()}))
    for clients, method, more in cases:
        with pytest.raises(ValueError, match=refused):
            rk.solve(problem, clients, method, jnp.ones(2), 1, **more)
    with pytest.raises(ValueError, match=refused):
        rk.solve(
            problem, data(3, 5), rk.FedAvg(batch_size=3), jnp.ones(2), 1,
            evaluate_client=lambda client, x, y: {"loss": client.f(x, y, client.samples())},
        )  # fmt: skip
    nested = rk.Minimax(lambda x, y, b: jnp.sum(gaps(x, b)) + x @ y - y @ y, batch_statistic=True)
    assert nested.as_bilevel().batch_statistic
    (line,) = [line for line in rk.check(problem, data(4, 4), jnp.ones(2)).lines if line.name == "means over the batch"]
    assert (line.verdict, line.value) == ("note", "not compared: batch_statistic=True")


# Divergence.

PAIR = rk.SingleLevel(lambda x, b: jnp.mean((x["a"] - b) ** 2) + jnp.mean(x["b"] ** 2))
PAIR_START = {"a": np.zeros(2), "b": np.ones(1)}


@on_both
def test_a_run_stops_before_the_first_value_that_is_not_finite(engine: Any) -> None:
    """A step of 10¹⁰⁰: after three rounds x is about 10³⁰⁰."""
    how: dict[str, Any] = {"evaluate": lambda x, y: {"first": x["a"][0]}, "every": 2, "engine": engine}
    with pytest.warns(rk.NonFiniteWarning, match=r"round 4: x\['a'\] is not finite\. The run stopped there") as told:
        run = rk.solve(PAIR, THREE, rk.FedAvg(step=1e100), PAIR_START, 9, **how)
    assert len(told) == 1
    assert run.stopped == "round 4: x['a'] is not finite."
    assert (run.rounds, run.interrupted) == (3, False)
    assert run.history["round"].tolist() == [0, 2, 3]
    assert np.isfinite(run.history["first"]).all()
    assert 1e299 < run.x["a"][0] == run.history["first"].iloc[-1] < 1e301
    assert "stopped" in repr(run)
    with pytest.warns(rk.NonFiniteWarning, match=r"^round 4: x\['a'\] is not finite\. The run continued\.$"):
        run = rk.solve(PAIR, THREE, rk.FedAvg(step=1e100), PAIR_START, 9, on_nonfinite="warn", **how)
    assert (run.rounds, run.stopped) == (9, None)
    assert np.isnan(run.x["a"]).all()


@on_first
def test_memory_that_diverges_stops_a_run_too(engine: Any) -> None:
    """The common model is fine."""
    method = rk.Ditto(step=0.1, personal_step=1e100, personal_steps=1)
    how: dict[str, Any] = {"every": 9, "engine": engine}
    with pytest.warns(rk.NonFiniteWarning, match="stopped there"):
        run = rk.solve(PAIR, THREE, method, PAIR_START, 9, **how)
    assert run.stopped == "round 4: what a client remembers (['a']) is not finite."
    assert run.rounds == 3
    assert run.memory is None or np.isfinite(run.memory["a"]).all()
    with pytest.warns(rk.NonFiniteWarning, match=r"^round 4: what a client remembers .* continued\.$"):
        run = rk.solve(PAIR, THREE, method, PAIR_START, 9, on_nonfinite="warn", engine=engine)
    assert run.rounds == 9
    assert np.isfinite(run.x["a"]).all()


@dataclass(frozen=True)
class Broken(Method):
    """Its start is infinite, in one place."""

    where: str = "state"

    def init(self, fed: Any, x: Any, y: Any, key: Any) -> State:
        return State({**x, "b": x["b"] / 0.0} if self.where == "state" else x)

    def memory(self, x: Any, y: Any) -> Any:
        return {"own": x["b"] / 0.0 if self.where == "memory" else x["b"]}

    def round(self, fed: Any, state: State, key: Any) -> State:
        return State(fed.mean(fed.map_state(lambda c, k, own: (state.x, own), key)))


@on_both
@pytest.mark.parametrize(("where", "named"), [("state", "x['b']"), ("memory", "what a client remembers (['own'])")])
def test_a_start_that_is_not_finite(where: str, named: str, engine: Any) -> None:
    with pytest.warns(rk.NonFiniteWarning, match="^before the first round: .* No round was run. Check the start"):
        run = rk.solve(PAIR, THREE, Broken(where), PAIR_START, 3, engine=engine)
    assert run.stopped == f"before the first round: {named} is not finite."
    assert run.rounds == 0
    with pytest.warns(rk.NonFiniteWarning, match="continued"):
        assert rk.solve(PAIR, THREE, Broken(where), PAIR_START, 3, engine=engine, on_nonfinite="warn").rounds == 3


# Callbacks, seeds and precision.


@pytest.mark.parametrize("answer", [True, np.True_, jnp.array(True), np.array(True)])
def test_any_kind_of_true_ends_a_run(answer: Any) -> None:
    assert rk.solve(SQUARES, THREE, rk.FedAvg(), ZERO, 3, callbacks=[lambda run: answer]).rounds == 1


@pytest.mark.parametrize("answer", [None, 1, "yes", np.array([True]), jnp.int32(1), np.False_, jnp.array(False)])
def test_no_other_answer_does(answer: Any) -> None:
    assert rk.solve(SQUARES, THREE, rk.FedAvg(), ZERO, 2, callbacks=[lambda run: answer]).rounds == 2


@pytest.mark.parametrize("double", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_seeds_beyond_32_bits_are_others(double: bool) -> None:
    with jax.enable_x64(double):
        clients, method = rk.Clients(upper=ROWS), rk.FedAvg(step=0.1)
        seeds = 0, 2**32, 2**40, 2**64 - 1, 0
        found = [np.asarray(rk.solve(SQUARES, clients, method, ZERO, 6, cohort=2, seed=seed).x) for seed in seeds]
    assert len({tuple(x.tolist()) for x in found}) == 4
    np.testing.assert_array_equal(found[0], found[-1])


@dataclass(frozen=True)
class Tells(Method):
    """x becomes a list of who took part, with how many steps and which samples."""

    local_steps: Any = (1, 40)

    def round(self, fed: Any, state: State, key: Any) -> State:
        def local(c: Any, k: Any) -> Any:
            count, order = jax.random.split(k)
            steps = c.steps(self.local_steps, count, 2, "upper")
            told = [jnp.float32(c.id), steps.astype(jnp.float32), *c.upper(order, 2, 1).rows[:, 0]]
            return jnp.stack(told)

        return State(jnp.roll(state.x, 1, axis=0).at[0].set(fed.gather(fed.map(local, key))))


def told() -> list[Any]:
    clients = rk.Clients(upper=[np.float32(100 * i + np.arange(4 + i)[:, None]) for i in range(9)])
    problem = rk.SingleLevel(lambda x, b: jnp.mean((x[0, 0, 0] - b) ** 2))
    run = rk.solve(problem, clients, Tells(), np.zeros((5, 3, 4), np.float32), 5, cohort=3, seed=4)
    return np.asarray(run.x).tolist()


@pytest.mark.slow
def test_the_same_draws_without_double_precision() -> None:
    assert jax.config.jax_enable_x64
    program = "import jax, test_engines; assert not jax.config.jax_enable_x64; print(test_engines.told())"
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([os.path.dirname(__file__), *sys.path])}
    environment.pop("JAX_ENABLE_X64", None)
    said = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=False)
    assert said.returncode == 0, said.stderr
    here = told()
    assert said.stdout.strip() == str(here)
    who, steps, *samples = np.moveaxis(np.array(here), -1, 0)
    assert len(np.unique(who)) > 3
    assert len(np.unique(steps)) > 5
    assert all((s // 100 == who).all() for s in samples)


# Replies that do not arrive.

DROPOUT = rk.Faults(dropout=0.4)
SHARES = np.array([0.5, 0.3, 0.2])


def present(seed: int, t: int, exchange: int, faults: rk.Faults = DROPOUT, size: int = 3) -> np.ndarray:
    """Whose replies to an exchange of round t arrive; exchanges are counted from 1."""
    chance = engine.round_keys(draws.seed_key(seed), t, size, size).chance
    return np.asarray(faults.present(jax.random.fold_in(jax.random.fold_in(chance, exchange), 0), size))


def gradient(x: np.ndarray, rows: np.ndarray) -> np.ndarray:
    return np.mean(2 * (x - rows), axis=0) / 2  # the mean is over two entries, too


@on_first
def test_a_mean_is_that_of_the_replies(engine: Any) -> None:
    """FedSVRG, by hand: two exchanges a round, each with losses of its own."""
    clients = rk.Clients(upper=ROWS, weights=SHARES)
    method = rk.FedSVRG(step=0.2, local_steps=2)
    run = rk.solve(SQUARES, clients, method, ZERO, 6, seed=2, faults=DROPOUT, engine=engine)
    x, missing = ZERO, 0
    for t in range(6):
        first, second = present(2, t, 1), present(2, t, 2)
        missing += int((~first).sum() + (~second).sum())
        anchors = np.stack([gradient(x, rows) for rows in ROWS])
        h = SHARES[first] @ anchors[first] / SHARES[first].sum()
        own = []
        for rows, anchor in zip(ROWS, anchors, strict=True):
            x_i = x
            for _ in range(2):
                x_i = x_i - 0.2 * (gradient(x_i, rows) - anchor + h)
            own.append(x_i)
        x = SHARES[second] @ np.stack(own)[second] / SHARES[second].sum()
    assert 0 < missing < 36
    np.testing.assert_allclose(run.x, x, rtol=1e-12)
    assert run.history["missing"].iloc[-1] == missing
    assert run.history["exchanges"].iloc[-1] == 12


@dataclass(frozen=True)
class Counts(Method):
    """A client remembers how often it has taken part; x is the sum of what the others heard."""

    def memory(self, x: Any, y: Any) -> Any:
        return jnp.zeros(())

    def round(self, fed: Any, state: State, key: Any) -> State:
        return State(state.x + fed.sum(fed.map_state(lambda c, k, count: (count + 1, count + 1), key)))


@on_both
def test_who_is_not_heard_keeps_its_memory(engine: Any) -> None:
    clients = rk.Clients(upper=ROWS, weights=SHARES)
    run = rk.solve(SQUARES, clients, Counts(), np.zeros(()), 6, seed=2, faults=DROPOUT, engine=engine)
    counts, x = np.zeros(3), 0.0
    for t in range(6):
        there = present(2, t, 1)
        x += 3 / there.sum() * SHARES[there] @ (counts[there] + 1)
        counts += there
    assert 0 < counts.min() < counts.max() <= 6
    np.testing.assert_allclose(run.x, x, rtol=1e-12)
    if run.memory is not None:
        np.testing.assert_array_equal(run.memory, counts)


@pytest.mark.parametrize("handled", [False, True])
def test_what_the_network_loses_is_lost(handled: bool) -> None:
    """In round 2 client 0 is not reached, or not heard; and every first attempt fails."""
    tried: list[bytes] = []

    def deliver(site: Site, request: bytes, before: list[bytes]) -> bytes:
        header = wire.decode(request)[0]
        lost = (header["phase"], header["round"], int(site._identity)) == (1, 1, 0)
        if lost or request not in tried:
            tried.append(request)
            if handled:
                site.handle(request)
            raise TimeoutError
        return site.handle(request)

    clients, lossy = rk.Clients(upper=ROWS, weights=SHARES), rk.Federation(transport=Recorder(deliver))
    run = rk.solve(SQUARES, clients, Counts(), np.zeros(()), 3, faults=rk.Faults(), engine=lossy)
    assert float(run.x) == pytest.approx(1 + 1.5 * 2 * 0.5 + (0.5 * 2 + 0.5 * 3), rel=1e-12)
    assert run.history["missing"].tolist() == [0, 0, 1, 1]
    with pytest.raises(RuntimeError, match="client 0 did not answer, 3 times, and the run has no faults="):
        rk.solve(SQUARES, clients, Counts(), np.zeros(()), 3, engine=lossy)


@on_both
def test_too_few_replies_fail_the_round(engine: Any) -> None:
    faults = rk.Faults(dropout=0.3, minimum=3)
    there = [present(2, t, 1, faults).sum() for t in range(20)]
    failed = next(t for t, count in enumerate(there) if count < 3)
    assert failed > 0
    with pytest.raises(
        rk.RoundFailedError, match=rf"^round {failed + 1}: an exchange got {there[failed]} replies with a weight"
    ) as e:
        rk.solve(SQUARES, THREE, rk.FedAvg(step=0.1), ZERO, 20, seed=2, faults=faults, engine=engine)
    run = e.value.run
    assert run.rounds == run.history["round"].iloc[-1] == failed
    x = ZERO
    for _ in range(failed):
        x = x - 0.1 * np.mean([gradient(x, rows) for rows in ROWS], axis=0)
    np.testing.assert_allclose(run.x, x, rtol=1e-12)


@on_first
def test_replies_without_weight_fail_the_round(engine: Any) -> None:
    clients = rk.Clients(upper=ROWS, weights=[0, 1, 0])
    failed = next(t for t in range(20) if not present(2, t, 1)[1])
    assert failed > 0
    assert present(2, failed, 1).any()
    with pytest.raises(
        rk.RoundFailedError, match=rf"^round {failed + 1}: an exchange got 0 replies with a weight above 0, and needs"
    ) as e:
        rk.solve(SQUARES, clients, rk.FedAvg(step=0.1), ZERO, 20, seed=2, faults=DROPOUT, engine=engine)
    assert np.isfinite(e.value.run.x).all()


# The rest.


def test_a_call_is_as_long_as_the_clock_allows() -> None:
    """(Of several processes, the first decides for all: see contract/test_processes.py.)"""

    def calls(seconds: float) -> list[int]:
        pace, made = Pace(256), []
        for _ in range(12):
            made.append(pace.next(1000))
            pace.took(made[-1], seconds * made[-1])
        return made

    assert calls(1e-6) == [1, 8, 64, *[256] * 9]
    assert calls(0.2) == [1, 2, 2, 2, 2, 2, 2, 2, 2, 2, 2, 2]


@dataclass(frozen=True)
class Unaware(Method):
    """An algorithm that does not think of the problem's set."""

    def round(self, fed: Any, state: State, key: Any) -> State:
        return State(fed.mean(fed.map(lambda c, k: state.x - c.f_x(state.x, (), c.upper(k)), key)))


@on_both
def test_every_round_ends_in_the_problems_set(engine: Any) -> None:
    problem = replace(SQUARES, project_upper=lambda x: jnp.clip(x, -0.5, 0.5))
    path: list[Any] = []
    rk.solve(problem, THREE, Unaware(), ZERO, 3, engine=engine, evaluate=lambda x, y: path.append(np.asarray(x)) or {})
    assert np.abs(path).max() == 0.5


@on_both
def test_memory_is_written_by_the_rounds_own_cohort_alone(engine: Any) -> None:
    @dataclass(frozen=True)
    class Elsewhere(Counts):
        def round(self, fed: Any, state: State, key: Any) -> State:
            other = fed.resample(key)
            return State(other.mean(other.map_state(lambda c, k, count: (count + 1, count + 1), key)))

    with pytest.raises(ValueError, match=r"^fed.map_state must be called on the round's own cohort"):
        rk.solve(SQUARES, THREE, Elsewhere(), np.zeros(()), 1, cohort=2, engine=engine)


def models_in_memory(block: int) -> float:
    """The temporary memory of a compiled run of FedAvg with a cohort of 64, in models of a million numbers."""
    clients = rk.Clients(upper=[np.ones((2, 1), np.float32)] * 64)
    plans = traced(SQUARES, clients, rk.FedAvg(local_steps=3), jax.ShapeDtypeStruct((10**6,), jnp.float32))
    rounds = partial(simulation.advance, simulation.Program(plans.round, clients, block), 64, 0, 256, 1)
    given = plans.round.consts, clients, plans.hyper, plans.start.made.carry, 0, 1, True, plans.seed
    compiled = jax.jit(rounds, donate_argnums=3).lower(*given).compile()
    return compiled.memory_analysis().temp_size_in_bytes / 4e6


def test_what_is_only_averaged_is_never_held_for_the_whole_cohort() -> None:
    assert models_in_memory(block=4) < 16
    assert models_in_memory(block=64) > 64
