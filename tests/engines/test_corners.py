"""Corners of the engines in which a wrong number would not be noticed."""

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import rookery as rk
from rookery.engines import engine
from rookery.engines.engine import Job
from rookery.engines.federation import wire
from rookery.language.channel import ChannelExchange

ENGINES = {
    "whole": rk.Simulation(),
    "blocks": rk.Simulation(block=2),
    "debug": rk.Simulation(debug=True),
    "federation": rk.Federation(),
}
QUICK = ("blocks", "federation")  # the others are variants of the first
EACH = [pytest.param(own, id=name, marks=() if name in QUICK else pytest.mark.slow) for name, own in ENGINES.items()]
on_all = pytest.mark.parametrize("engine", EACH)
on_compiled = pytest.mark.parametrize("engine", [own for own in EACH if own.id != "debug"])

SQUARES = rk.SingleLevel(lambda x, b: jnp.mean((x - b) ** 2))
VALUES = np.array([1.0, 2.0, 4.0, 8.0])
FOUR = rk.Clients(upper=[np.array([v]) for v in VALUES])


class State(NamedTuple):
    x: Any
    y: tuple[()] = ()


@dataclass(frozen=True)
class Method:
    """What the methods of these tests have in common; `round` is one's own."""

    solves: ClassVar[tuple[type, ...]] = (rk.SingleLevel,)

    def init(self, fed: Any, x: Any, y: Any, key: Any) -> State:
        return State(x)


def solve(method: Any, rounds: int = 1, start: Any = 0.0, **how: Any) -> rk.Run:
    return rk.solve(SQUARES, FOUR, method, np.asarray(start), rounds, **how)


def cohort_of_round(t: int, seed: int = 0, size: int = 2) -> list[int]:
    return np.asarray(engine.round_keys(jax.random.key(seed), t, 4, size).ids).tolist()


# Programs are told apart.


def fingerprint(loss: Any) -> str:
    return engine.traced(Job(rk.SingleLevel(loss), FOUR, rk.FedAvg(), (jnp.zeros(()), ()), 4)).round.fingerprint


def with_inner_constant(values: Any) -> Any:
    """A loss whose constant sits inside the program of a compiled function."""
    table = np.asarray(values)
    return lambda x, b: jnp.mean((x - b) ** 2) + jax.jit(lambda z: jnp.sum(z * jax.lax.cumsum(table)))(x)


def with_own_batching(factor: float) -> Any:
    @jax.custom_batching.custom_vmap
    def scaled(z: Any) -> Any:
        return 2.0 * z

    scaled.def_vmap(lambda size, batched, z: (factor * z, batched[0]))
    return lambda x, b: jnp.mean(jax.vmap(scaled)((x - b) ** 2))


def test_losses_that_differ_in_a_literal_only() -> None:
    of = lambda factor: fingerprint(lambda x, b: jnp.mean((x - b) ** 2) * factor)
    assert of(2.0) == of(2.0) == of(2)
    assert len({of(v) for v in (2.0, 3.0, 1 + 1e-12, 1.0, -0.0, 0.0)}) == 6


def test_constants_inside_compiled_functions_count() -> None:
    """Two losses with other tables give other results, one after the other."""
    found = []
    for values in ([1.0, 2.0], [1.0, 3.0], [1.0, 2.0]):
        problem = rk.SingleLevel(with_inner_constant(values))
        found.append(float(rk.solve(problem, FOUR, rk.FedAvg(step=0.1), np.zeros(()), 1).x))
    assert found[0] == found[2]
    assert found[1] - found[0] == pytest.approx(-0.1, rel=1e-9)


def test_batching_rules_of_ones_own_count() -> None:
    assert fingerprint(with_own_batching(2.0)) != fingerprint(with_own_batching(3.0))


ELSEWHERE = """
import jax, json, sys
jax.config.update("jax_enable_x64", True)
sys.path.insert(0, sys.argv[1])
from test_corners import stored
print(json.dumps(stored()))
"""


def stored() -> dict[str, str]:
    """What a checkpoint knows of some programs."""
    quadratic = rk.tasks.quadratic(clients=4, seed=3)
    nest = rk.FedNest(hessian_step=0.1, lower_local_steps=2, neumann_terms=2)
    rows = [np.array([[v, 1.0], [1.0, v]]) for v in VALUES]
    nodes = rk.WeightedNodes(lambda theta, b: jnp.mean((theta - b) ** 2))
    jobs = {
        "FedNest": Job(quadratic.problem, quadratic.clients, nest, quadratic.init, 3),
        "WeightedNodesProx": Job(
            nodes, rk.Clients(lower=rows, center=rows[0]),
            rk.WeightedNodesProx(steps=3), (jnp.full(4, 0.25), jnp.zeros(2)), 4,
        ),
        "LocalSVRG": Job(SQUARES, FOUR, rk.LocalSVRG(refresh=0.5), (jnp.zeros(()), ()), 4),
    }  # fmt: skip
    return {name: engine.traced(job).fingerprint for name, job in jobs.items()}


@pytest.mark.slow
def test_a_fingerprint_is_the_same_in_another_process() -> None:
    """Otherwise no checkpoint could be resumed: of methods that branch (`Client.when`), too."""
    environment = {**os.environ, "PYTHONHASHSEED": "7"}
    program = [sys.executable, "-c", ELSEWHERE, os.path.dirname(__file__)]
    said = subprocess.run(program, env=environment, capture_output=True, text=True, check=False)
    assert said.returncode == 0, said.stderr
    assert json.loads(said.stdout) == stored()


# Cohorts.


@dataclass(frozen=True)
class FreshFirst(Method):
    """Another cohort is asked before the round's own writes its memory."""

    def memory(self, x: Any, y: Any) -> Any:
        return jnp.zeros(())

    def round(self, fed: Any, state: State, key: Any) -> State:
        other = fed.resample(key)
        seen = other.mean(other.map(lambda c, k: c.f(state.x, (), c.upper(k)), key), name="other")
        own = fed.map_state(lambda c, k, count: (count + 0 * seen, count + 1 + 0 * seen), key)
        return State(fed.mean(own, name="own") + 0 * seen)


@on_compiled
def test_memory_is_the_own_cohorts_where_another_is_asked_first(engine: Any) -> None:
    counts, expected = np.zeros(4), []
    for t in range(5):
        ids = cohort_of_round(t)
        expected.append(counts[ids].mean())
        counts[ids] += 1
    path: list[float] = []
    watch = lambda x, y: path.append(float(x)) or {}
    run = solve(FreshFirst(), 5, cohort=2, engine=engine, evaluate=watch)
    assert path[1:] == expected
    assert len(set(counts)) > 1
    if run.memory is not None:
        np.testing.assert_array_equal(run.memory, counts)


@dataclass(frozen=True)
class Misplaced(Method):
    """A value of the round's cohort is given to another one."""

    what: str = "map"

    def round(self, fed: Any, state: State, key: Any) -> State:
        other = fed.resample(key)
        own = fed.map(lambda c, k: state.x + 1.0, key)
        if self.what == "map":
            return State(other.mean(other.map(lambda c, k, v: v, key, own)))
        return State(getattr(other, self.what)(own))


@pytest.mark.parametrize("what", ["map", "mean", "sum", "gather"])
def test_values_of_another_cohort_are_refused(what: str) -> None:
    with pytest.raises(ValueError, match=f"^fed.{what} must be given a value of its own cohort"):
        solve(Misplaced(what), cohort=2)


@dataclass(frozen=True)
class ByChance(Method):
    """x is a mean over clients that may be drawn several times."""

    chances: tuple[float, ...] = (0.0, 1.0, 0.0, 0.0)
    scattered: bool = False

    def round(self, fed: Any, state: State, key: Any) -> State:
        other = fed.resample(key, jnp.array(self.chances))
        if self.scattered:
            return State(other.mean(other.scatter(jnp.arange(3.0))))
        return State(other.mean(other.map(lambda c, k: 1.0 + 0 * state.x, key)))


@on_compiled
def test_the_noise_hides_a_client_that_is_drawn_three_times(engine: Any) -> None:
    """What one client moves a mean by is its whole weight: drawn three times of three, all of it."""
    noise = lambda method: float(solve(method, cohort=3, channel=channel, noise_seed=1, engine=engine).x) - 0.01
    channel = rk.chain(rk.clip(0.01), rk.gaussian(1.0))
    alone = noise(ByChance())
    among = noise(ByChance((0.0, 1.0, 1.0, 1.0)))
    ids = np.asarray(drawn_by_chance((0.0, 1.0, 1.0, 1.0)))
    most = max(np.bincount(ids)) / 3
    assert alone != 0
    assert among == pytest.approx(most * alone, rel=1e-5)


def drawn_by_chance(chances: Any) -> Any:
    from rookery.data.cohort import sample_cohort

    key = engine.round_keys(jax.random.key(0), 0, 4, 3).key
    return sample_cohort(key, 4, 3, jnp.array(chances))


def test_no_rows_for_clients_that_may_be_drawn_twice() -> None:
    with pytest.raises(ValueError, match=r"^fed.scatter must not be used on a cohort of resample"):
        solve(ByChance(scattered=True), cohort=3)


@dataclass(frozen=True)
class All(Method):
    """x is the mean over all clients, and a cohort of the round moves it."""

    def round(self, fed: Any, state: State, key: Any) -> State:
        everyone = fed.everyone
        assert fed.cohort_size == 4 or everyone is not fed
        sums = everyone.mean(everyone.map(lambda c, k: c.f_x(state.x, (), c.upper(k)), key), name="all")
        own = fed.map(lambda c, k: c.f_x(state.x, (), c.upper(k)), key)
        return State(state.x - 0.5 * sums + 0.1 * fed.mean(own, name="own"))


@pytest.mark.parametrize("engine", [*EACH, pytest.param(rk.Simulation(mesh="all"), id="mesh", marks=pytest.mark.slow)])
def test_an_exchange_with_everyone_beside_a_cohort(engine: Any) -> None:
    """The ledger counts the clients of each, and the plan names them."""
    run, x = solve(All(), 3, cohort=2, engine=engine), 0.0
    for t in range(3):
        x -= 0.5 * 2 * (x - VALUES.mean()) - 0.1 * 2 * (x - VALUES[cohort_of_round(t)].mean())
    assert float(run.x) == pytest.approx(x, rel=1e-12)
    assert run.exchanges["bytes_up"].tolist() == [4 * 8, 2 * 8]
    assert run.history["gradients"].iloc[-1] == 3 * (4 + 2)


def test_lost_replies_of_everyone() -> None:
    """They are drawn for all clients, alike on both engines, and stay out of the mean."""
    given: dict[str, Any] = {"rounds": 4, "cohort": 2, "faults": rk.Faults(dropout=0.4)}
    runs = [solve(All(), engine=own, **given) for own in (rk.Simulation(), rk.Federation())]
    assert float(runs[0].x) == pytest.approx(float(runs[1].x), rel=1e-12)
    assert float(runs[0].x) != pytest.approx(float(solve(All(), 4, cohort=2).x), rel=1e-3)
    for name in ("missing", "bytes_up", "bytes_down", "gradients"):
        assert runs[0].history[name].tolist() == runs[1].history[name].tolist()
    assert runs[0].history["missing"].iloc[-1] > 4  # of 4 * (4 + 2) replies


def test_everyone_is_the_cohort_of_a_run_without_one_and_is_refused_in_a_private_run() -> None:
    plan = str(rk.explain(SQUARES, FOUR, All(), np.array(0.0), cohort=2))
    assert plan.count("all clients at") == 1
    assert "all clients at" not in str(rk.explain(SQUARES, FOUR, All(), np.array(0.0)))
    private = rk.private(epsilon=8, delta=1e-5, clip=1.0)
    with pytest.raises(ValueError, match=r"^fed.everyone must not be used .*Leave cohort out of solve"):
        solve(All(), cohort=2, channel=private)
    solve(All(), cohort=4, channel=private)


# Maps that are computed late, and in blocks.


@dataclass(frozen=True)
class Late(Method):
    """A map's values are read by later ones, by a mean and by memory, in another order than they were made in."""

    def memory(self, x: Any, y: Any) -> Any:
        return jnp.zeros(())

    def round(self, fed: Any, state: State, key: Any) -> State:
        first = fed.map(lambda c, k: (c.f(state.x, (), c.upper(k)), jnp.sin(c.id * 1.0)), key)
        second = fed.map(lambda c, k, pair: (pair[0] + pair[1], pair[1] ** 2), key, first)
        noted = fed.map_state(lambda c, k, m, pair: (m + pair[1], pair[0]), key, second)
        early = fed.mean(noted, name="early")
        third = fed.map(lambda c, k, a, b: a[0] * b[1] + early, key, first, second)
        return State(fed.mean(third, name="third") + fed.mean(first, name="first")[1])


@on_all
def test_maps_that_are_read_later(engine: Any) -> None:
    run = solve(Late(), 3, engine=engine)
    x, memory = 0.0, np.zeros(4)
    for _ in range(3):
        losses, sines = (x - VALUES) ** 2, np.sin(np.arange(4.0))
        early = np.mean(memory + sines**2)
        memory = losses + sines
        x = np.mean(losses * sines**2 + early) + np.mean(sines)
    np.testing.assert_allclose(run.x, x, rtol=1e-12)


# Numbers.


@pytest.mark.parametrize(
    ("passes", "steps"), [*(pytest.param(*own, marks=pytest.mark.slow) for own in ((0.7, 70), (1 / 3, 34))), (1.1, 110)]
)
def test_epochs_are_counted_in_integers(passes: float, steps: int) -> None:
    """⌈passes · 1000 / 10⌉: 1.1 · 1000 / 10 is above 110 in floating point, and the steps are 110."""
    clients = rk.Clients(upper=[np.zeros(1000)])
    method = rk.FedAvg(step=0.0001, local_steps=rk.Epochs(passes), batch_size=10)
    run = rk.solve(SQUARES, clients, method, np.zeros(()), 1)
    assert int(run.history["samples_upper"].iloc[-1]) == 10 * steps


@dataclass(frozen=True)
class Reciprocal(Method):
    def round(self, fed: Any, state: State, key: Any) -> State:
        return State(fed.mean(fed.map(lambda c, k: 1.0 / (c.upper(k).rows[0] - 1.0), key)))


@on_compiled
def test_who_has_no_weight_is_not_looked_at(engine: Any) -> None:
    """Client 0 replies infinity, and its weight is 0."""
    clients = rk.Clients(upper=[np.array([v]) for v in VALUES], weights=[0, 1, 1, 0])
    run = rk.solve(SQUARES, clients, Reciprocal(), np.zeros(()), 1, engine=engine)
    assert float(run.x) == pytest.approx((1 / 1 + 1 / 3) / 2, rel=1e-12)


class Counted(NamedTuple):
    x: Any
    count: Any
    y: tuple[()] = ()


@dataclass(frozen=True)
class Integers(Method):
    step: Any = 1

    def init(self, fed: Any, x: Any, y: Any, key: Any) -> Counted:  # type: ignore[override]
        return Counted(x, jnp.int32(0))

    def round(self, fed: Any, state: Counted, key: Any) -> Counted:  # type: ignore[override]
        x = fed.mean(fed.map(lambda c, k: state.x, key))
        return Counted(x, state.count + self.step)


@on_compiled
def test_integers_of_a_state_stay_integers(engine: Any) -> None:
    run = solve(Integers(), 3, engine=engine)
    assert (int(run.state.count), run.state.count.dtype) == (3, np.int32)
    with pytest.raises(TypeError, match=r"a round must keep the shape and type of \.count, int32\[\]; got float"):
        solve(Integers(0.5), 1, engine=engine)


def test_clipping_survives_large_numbers() -> None:
    """The square of 1e30 does not fit into float32; that of 1e-30 is 0."""
    for size in (1e30, 1e-30):
        value = {"a": jnp.array([3 * size, 4 * size], jnp.float32)}
        sent, _ = rk.clip(size).encode(ChannelExchange("e", "mean", value), value, jax.random.key(0), ())
        np.testing.assert_allclose(sent["a"], np.array([0.6, 0.8]) * size, rtol=1e-6)
    value = jnp.zeros(3, jnp.float32)
    sent, _ = rk.clip(1.0).encode(ChannelExchange("e", "mean", value), value, jax.random.key(0), ())
    np.testing.assert_array_equal(sent, np.zeros(3))


# Effects.


@pytest.mark.parametrize("batch_size", [1, pytest.param(None, marks=pytest.mark.slow)])
def test_prints_in_loops_are_kept(batch_size: int | None, capfd: pytest.CaptureFixture[str]) -> None:
    def loss(x: Any, b: Any) -> Any:
        jax.debug.print("loss at {}", x)
        return jnp.mean((x - b) ** 2)

    method = rk.FedAvg(step=0.1, local_steps=3, batch_size=batch_size)
    run = rk.solve(rk.SingleLevel(loss), FOUR, method, np.zeros(()), 1, seed=3)
    jax.effects_barrier()
    assert capfd.readouterr().out.count("loss at") >= 3
    np.testing.assert_allclose(run.x, rk.solve(SQUARES, FOUR, method, np.zeros(()), 1, seed=3).x, rtol=1e-12)


# The network.


def test_a_reply_of_another_shape_is_refused() -> None:
    def tampering(sites: list[Any]) -> Any:
        def send(i: int, request: bytes) -> bytes:
            answer, arrays = wire.decode(sites[i].handle(request))
            return wire.encode(answer, [np.concatenate([a.reshape(1), a.reshape(1)]) for a in arrays])

        return send

    with pytest.raises(RuntimeError, match=r"^client 0 replies to 'x' with .*\(2,\)"):
        solve(rk.FedAvg(step=0.1), engine=rk.Federation(transport=tampering))


# The centre.


@dataclass(frozen=True)
class Central(Method):
    def round(self, fed: Any, state: State, key: Any) -> State:
        return State(fed.center(lambda c, k: jnp.array([3.0, 4.0]) + 0 * state.x, key))


@on_all
def test_a_channel_stands_before_the_client_that_holds_the_centres_data(engine: Any) -> None:
    data: dict[str, Any] = {"upper": [np.full((2, 2), v) for v in VALUES], "center": np.ones((2, 2))}
    clip = rk.clip(1.0)
    found = lambda clients, channel: (
        rk.solve(SQUARES, clients, Central(), np.zeros(2), 1, channel=channel, engine=engine).x
    )
    np.testing.assert_allclose(found(rk.Clients(**data, center_client=2), clip), [0.6, 0.8], rtol=1e-12)
    np.testing.assert_allclose(found(rk.Clients(**data, center_client=2), None), [3.0, 4.0], rtol=1e-12)
    np.testing.assert_allclose(found(rk.Clients(**data), clip), [3.0, 4.0], rtol=1e-12)  # the server's own data


@dataclass(frozen=True)
class CentralSteps(Method):
    """An iterate and a number of steps come from the centre."""

    def round(self, fed: Any, state: State, key: Any) -> State:
        work = lambda c, k: (state.x + jnp.array([3.0, 4.0]), jnp.int32(7))
        marks = (None, rk.Bookkeeping("steps", 5))
        x, steps = fed.center(work, key, around=(state.x, None), bookkeeping=marks)
        return State(x + 100 * steps)


@on_all
def test_the_centres_reply_is_clipped_around_what_it_was_sent_and_its_bookkeeping_is_bounded(engine: Any) -> None:
    data: dict[str, Any] = {
        "upper": [np.full((2, 2), v) for v in VALUES],
        "center": np.ones((2, 2)),
        "center_client": 2,
    }
    found = lambda channel: (
        rk.solve(SQUARES, rk.Clients(**data), CentralSteps(), np.full(2, 10.0), 1, channel=channel, engine=engine).x
    )
    np.testing.assert_allclose(found(rk.clip(1.0)), [510.6, 510.8], rtol=1e-12)
    np.testing.assert_allclose(found(None), [713.0, 714.0], rtol=1e-12)


# Channels that remember.


@dataclass(frozen=True)
class Remembering:
    """Adds to what a client sends what it sent before."""

    def init(self, exchange: ChannelExchange) -> tuple[Any, Any]:
        zeros = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), exchange.shapes)
        return (), zeros

    def encode(self, exchange: ChannelExchange, value: Any, key: Any, state: Any) -> tuple[Any, Any]:
        sent = jax.tree.map(jnp.add, value, state)
        return sent, sent

    def decode(self, exchange: ChannelExchange, total: Any, key: Any, state: Any) -> tuple[Any, Any]:
        return total, state


@dataclass(frozen=True)
class OneName(Method):
    """Two exchanges of one name."""

    alike: bool = True

    def round(self, fed: Any, state: State, key: Any) -> State:
        first = fed.mean(fed.map(lambda c, k: jnp.ones(2), key), name="v")
        shape = (2,) if self.alike else (3,)
        second = fed.mean(fed.map(lambda c, k: jnp.ones(shape), key), name="v")
        return State(state.x + jnp.sum(first) + 10 * jnp.sum(second))


@on_compiled
def test_exchanges_of_one_name_share_what_a_channel_remembers(engine: Any) -> None:
    run = solve(OneName(), 2, channel=Remembering(), engine=engine)
    assert float(run.x) == 2 * 1 + 10 * 2 * 2 + 2 * 3 + 10 * 2 * 4


def test_exchanges_of_one_name_that_differ_are_refused_by_a_channel_that_remembers() -> None:
    with pytest.raises(ValueError, match="got two exchanges 'v' with values of different shapes"):
        solve(OneName(alike=False), channel=Remembering())
    assert float(solve(OneName(alike=False)).x) == 2 + 30
