"""Clipping, bookkeeping and noise: what is bounded, what is left unchanged, and what nobody can reproduce."""

from collections import OrderedDict
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import rookery as rk
from rookery.engines import engine as engines
from rookery.language.channel import ChannelExchange

SQUARES = rk.SingleLevel(lambda x, b: jnp.mean((x - b) ** 2))
ROWS = [np.array([[1.0, 2.0], [3.0, 1.0]]), np.array([[0.5, -1.0]]), np.array([[2.0, 2.0], [0.0, 1.0], [1.0, 1.0]])]
CLIENTS = rk.Clients(upper=ROWS)
ZERO = np.zeros(2)
METHOD = rk.FedAvg(step=0.1, local_steps=2, batch_size=1)
NOISY = rk.chain(rk.clip(1.0), rk.gaussian(0.5))
ENGINES = [rk.Simulation(), rk.Federation()]
on_both = pytest.mark.parametrize("engine", ENGINES, ids=["simulation", "federation"])
slow = partial(pytest.param, marks=pytest.mark.slow)


def run(engine: Any = None, rounds: int = 3, **given: Any) -> rk.Run:
    return rk.solve(SQUARES, CLIENTS, METHOD, ZERO, rounds, engine=engine, **given)


# Noise from entropy.


@on_both
def test_the_seed_does_not_lead_to_the_noise(engine: Any) -> None:
    """The same seed, twice: every draw but the noise is the same, so that whoever knows the seed knows no noise."""
    first, second = (run(engine, channel=NOISY, seed=3).x for _ in range(2))
    assert np.all(np.asarray(first) != np.asarray(second))
    bounded = rk.clip(1.0)
    np.testing.assert_array_equal(run(engine, channel=bounded, seed=3).x, run(engine, channel=bounded, seed=3).x)


def test_a_noise_seed_repeats_the_noise_and_says_that_it_hides_nothing() -> None:
    here, again, other = (run(channel=NOISY, noise_seed=seed) for seed in (5, 5, 6))
    there = run(rk.Federation(), channel=NOISY, noise_seed=5)
    np.testing.assert_array_equal(here.x, again.x)
    np.testing.assert_allclose(here.x, there.x, rtol=1e-12)
    assert np.all(np.asarray(here.x) != np.asarray(other.x))
    assert here.notes == (
        "The noise comes from a seed and can be drawn again: this run is not private. (noise_seed=5)",
    )
    assert run(channel=NOISY).notes == ()
    assert run(channel={"x": rk.clip(1.0)}, noise_seed=5).notes == ()  # a clip draws none


@pytest.mark.parametrize("engine", [*ENGINES, slow(rk.Simulation(mesh=2))], ids=["simulation", "federation", "mesh"])
def test_a_checkpoint_keeps_the_noise(engine: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run that goes on draws the noise that it would have drawn: no round is seen with two."""
    entropy = [b"\1" * 8]
    monkeypatch.setattr(engines, "urandom", lambda size: entropy[-1][:size])
    whole = run(engine, 6, channel=NOISY)
    run(engine, 3, channel=NOISY, checkpoint=tmp_path / "run")
    entropy.append(b"\2" * 8)
    resumed = run(engine, 6, channel=NOISY, checkpoint=tmp_path / "run")
    np.testing.assert_array_equal(resumed.x, whole.x)
    assert np.all(np.asarray(run(engine, 6, channel=NOISY).x) != np.asarray(whole.x))


def test_a_run_keeps_its_noise(tmp_path: Path) -> None:
    run(channel=NOISY, noise_seed=5, checkpoint=tmp_path / "run")
    with pytest.raises(ValueError, match=r"noise_seed must match the checkpoint's noise.*got 6"):
        run(channel=NOISY, noise_seed=6, checkpoint=tmp_path / "run", rounds=5)
    resumed = run(channel=NOISY, checkpoint=tmp_path / "run", rounds=5)
    np.testing.assert_array_equal(resumed.x, run(channel=NOISY, noise_seed=5, rounds=5).x)
    assert "not private" in resumed.notes[0]  # whether this call names the seed or not
    assert resumed.settings["noise_seed"] == 5


def test_where_a_noise_seed_is_refused() -> None:
    with pytest.raises(ValueError, match=r"noise_seed needs a channel.*got channel=None"):
        run(noise_seed=1)
    with pytest.raises(ValueError, match=r"noise_seed must be an integer from 0.*got 1.5"):
        run(noise_seed=1.5, channel=NOISY)
    shape = rk.Clients.like(upper=np.zeros(2), n=3)
    network = rk.Federation(address="localhost:9", sites=("a", "b", "c"), insecure=True)
    with pytest.raises(ValueError, match=r"noise_seed must be None over a network.*got .*Leave it out"):
        rk.solve(SQUARES, shape, METHOD, ZERO, 1, channel=NOISY, noise_seed=1, engine=network)


def test_the_noise_has_its_size() -> None:
    """With step 0 every update is zero: x is pure noise, with the standard deviation multiplier · bound · share."""
    still = rk.FedAvg(step=1e-30)
    clients = rk.Clients(upper=[np.zeros((1, 20_000))] * 4)
    channel = rk.chain(rk.clip(0.5), rk.gaussian(2.0))
    x = np.asarray(rk.solve(SQUARES, clients, still, np.zeros(20_000), 1, channel=channel).x)
    assert np.std(x) == pytest.approx(2.0 * 0.5 / 4, rel=0.03)
    assert abs(np.mean(x)) < 4 * 0.25 / np.sqrt(20_000)


# A clip bounds every value.


def clipped(bound: float, value: Any) -> Any:
    shapes = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), value)
    return rk.clip(bound).encode(ChannelExchange("x", "mean", shapes), value, jax.random.key(0), ())[0]


def norm(value: Any) -> float:
    return float(np.sqrt(sum(np.sum(np.abs(np.asarray(a, complex)) ** 2) for a in jax.tree.leaves(value))))


@pytest.mark.parametrize("kind", [jnp.float16, jnp.bfloat16, jnp.float32, jnp.float64, jnp.complex64])
@pytest.mark.parametrize(
    "entries",
    [
        [np.nan, 1e4], [np.inf, 1e4], [-np.inf, np.nan], [1e4, 1e4], [3e4] * 3, [1e-7, 0.0], [0.3, 0.4], [6e4, 1e-3],
    ],
    ids=str,
)  # fmt: skip
@pytest.mark.parametrize("bound", [1.0, 0.037])
def test_nothing_is_larger_than_the_bound(kind: Any, entries: list[float], bound: float) -> None:
    value = {"a": jnp.asarray(entries, kind), "b": jnp.asarray([[0.5]], kind)}
    sent = clipped(bound, value)
    rounding = 1e-6 if kind in (jnp.float32, jnp.complex64) else 1e-12
    assert norm(sent) <= bound * (1 + rounding)
    given = norm(value)
    if not np.isfinite(given):
        assert norm(sent) == 0
    elif given <= bound:
        jax.tree.map(np.testing.assert_array_equal, sent, value)
    else:
        assert norm(sent) >= 0.97 * bound


@pytest.mark.parametrize("bound", [1e-30, 1e-25, 1.0, 1e30])
def test_values_whose_squares_overflow_or_vanish_are_bounded(bound: float) -> None:
    """In units of the bound, squares are accurate; a norm above 10¹⁹ bounds counts as infinite."""
    direction = jnp.asarray([0.6, 0.8], jnp.float32)
    for times, expected in ((0.5, 0.5), (100.0, 1.0), (1e18, 1.0), (1e20, 0.0), (1e38, 0.0)):
        sent = np.asarray(clipped(bound, direction * jnp.float32(times) * jnp.float32(bound)), np.float64)
        kept = expected if times * bound < 1e38 else 0.0
        np.testing.assert_allclose(sent / bound, [0.6 * kept, 0.8 * kept], rtol=1e-6)


def test_the_largest_bounds_hold_as_well() -> None:
    """The reciprocal of 1e38 is flushed to zero in single precision."""
    sent = np.asarray(clipped(1e38, jnp.full(4, 3e38, jnp.float32)), np.float64)
    assert 0 < np.linalg.norm(sent) <= 1e38


@pytest.mark.parametrize("value", [jnp.arange(3), jnp.array([True])], ids=["integers", "booleans"])
def test_what_can_not_be_scaled_is_refused(value: Any) -> None:
    with pytest.raises(
        TypeError, match=r"rk.clip needs floating-point updates, but the exchange 'x' sends.*Bookkeeping"
    ):
        clipped(1.0, (jnp.ones(2), value))


def test_a_client_that_diverges_moves_nobody_under_a_clip() -> None:
    rows = [np.full((1, 2), 1e100)] * 2
    method = rk.FedAvg(step=1e150, local_steps=3)  # the second step is beyond float64
    stopped = rk.solve(SQUARES, rk.Clients(upper=rows), method, ZERO, 2, channel=rk.clip(0.1))
    np.testing.assert_array_equal(stopped.x, ZERO)


# Bookkeeping is not an update.

QUADRATIC = rk.tasks.quadratic(clients=4, samples=3, noise=0.1, seed=3)


def solved(method: Any, **given: Any) -> rk.Run:
    return rk.solve(QUADRATIC.problem, QUADRATIC.clients, method, QUADRATIC.init, evaluate=QUADRATIC.evaluate, **given)


@pytest.mark.parametrize(
    "method", [rk.LFedNest, slow(rk.FedNest), slow(rk.LFedNestNonAlt)], ids=lambda cls: cls.__name__
)
def test_a_clip_leaves_the_estimate_of_the_hessian_alone(method: Any) -> None:
    """hessian_step="auto" sends a probe of ℓ along with x; a clip far below ℓ changes only x."""
    free, bounded = (solved(method(), rounds=25, channel=channel) for channel in (None, rk.clip(0.05)))
    largest = np.linalg.norm(free.state.probe)
    assert largest > 1
    assert np.linalg.norm(bounded.state.probe) == pytest.approx(largest, rel=1e-3)
    assert not np.allclose(bounded.x, free.x)


@pytest.mark.slow
@pytest.mark.parametrize("method", [rk.SimFBO, rk.ShroFBO, rk.ASFBO, rk.LAASFBO], ids=lambda cls: cls.__name__)
def test_a_clip_above_the_updates_changes_nothing_whatever_goes_with_them(method: Any) -> None:
    """τ = 9 goes with updates that are far smaller than the bound, which is below τ."""
    steps = {"upper_step": 1e-3, "lower_step": 1e-3, "linear_step": 1e-3}
    near = (QUADRATIC.init[0] * 0, QUADRATIC.init[1] * 0)
    problem = rk.Bilevel(
        upper=lambda x, y, b: 0.05 * QUADRATIC.problem.upper(x, y, b),
        lower=lambda x, y, b: 0.05 * QUADRATIC.problem.lower(x, y, b),
    )
    go = lambda **how: rk.solve(problem, QUADRATIC.clients, method(local_steps=9, **steps), near, rounds=2, **how)
    free, bounded = go(), go(channel=rk.clip(5.0))
    np.testing.assert_allclose(bounded.x, free.x, rtol=1e-12)
    np.testing.assert_allclose(bounded.y, free.y, rtol=1e-12)
    tight = go(channel=rk.clip(1e-4))
    assert not np.allclose(tight.y, free.y, rtol=1e-6)


def test_a_plan_says_what_no_channel_touches() -> None:
    told = str(rk.explain(QUADRATIC.problem, QUADRATIC.clients, rk.ASFBO(local_steps=(2, 15)), QUADRATIC.init))
    assert "bookkeeping in it: τ (), clamped to [2, 15] under a channel" in told
    told = str(rk.explain(QUADRATIC.problem, QUADRATIC.clients, rk.FedNest(), QUADRATIC.init, channel=NOISY))
    assert told.count("bookkeeping in it") == 1
    assert "bookkeeping in it: a power iteration for 1/ℓ (4), no bound" in told


def test_bookkeeping_is_clamped_to_its_bound() -> None:
    steps = rk.Bookkeeping("steps", most=4)
    given = jnp.array([3.0, 7.0, -2.0, jnp.nan, jnp.inf])
    np.testing.assert_array_equal(steps.bounded(given), [3, 4, 0, 0, 0])
    np.testing.assert_array_equal(rk.Bookkeeping("h").bounded(given), given)
    np.testing.assert_array_equal(rk.Bookkeeping("who", most=2).bounded(jnp.array([1, 9])), [1, 2])


class State(NamedTuple):
    x: Any
    told: Any
    y: Any = ()


@dataclass(frozen=True)
class Sends:
    """A round in which every client sends one value, which the state keeps."""

    value: Any
    how: Any

    solves: ClassVar[tuple[type, ...]] = (rk.SingleLevel,)

    def init(self, fed: rk.Fed, x: Any, y: Any, key: Any) -> State:
        return State(x, jax.tree.map(lambda a: jnp.zeros(jnp.shape(a)), self.value()))

    def round(self, fed: rk.Fed, state: State, key: Any) -> State:
        mean = fed.mean(fed.map(lambda c, k: self.value(), key), **self.how())
        return State(state.x, jax.tree.map(lambda a: jnp.asarray(a, float), mean))


@pytest.mark.parametrize("kind", [dict, OrderedDict])
def test_a_mark_finds_its_leaf_in_any_order(kind: Any) -> None:
    value = lambda: kind([("tau", jnp.asarray(5.0)), ("big", jnp.asarray(100.0))])
    how = lambda: {"bookkeeping": kind(tau=rk.Bookkeeping("τ", most=10))}
    told = rk.solve(SQUARES, CLIENTS, Sends(value, how), ZERO, 1, channel=rk.clip(1.0)).state.told
    assert (float(told["tau"]), float(told["big"])) == (5.0, 1.0)


def test_a_start_goes_with_updates_alone() -> None:
    value = lambda: (jnp.asarray(1.0), jnp.asarray(7.0))
    how = lambda: {"around": (jnp.asarray(0.5), jnp.asarray(10.0)), "bookkeeping": (None, rk.Bookkeeping("t", most=20))}
    for channel in (None, rk.clip(1.0)):
        told = rk.solve(SQUARES, CLIENTS, Sends(value, how), ZERO, 1, channel=channel).state.told
        assert [float(a) for a in told] == pytest.approx([1.0, 7.0])


def test_bounds_of_short_integers() -> None:
    assert int(rk.Bookkeeping("n", most=200).bounded(jnp.int8(5))) == 5
    assert int(rk.Bookkeeping("n", most=300).bounded(jnp.uint8(250))) == 250
    with pytest.raises(ValueError, match=r"most must be a number of at least 0, or None; got -1"):
        rk.Bookkeeping("n", most=-1)


def test_the_estimate_of_the_hessian_is_right_from_the_start() -> None:
    given = (QUADRATIC.problem, QUADRATIC.clients, rk.FedNest(), QUADRATIC.init)
    sizes = []
    for channel in (None, rk.clip(0.05)):
        with rk.session(*given, channel=channel) as session:
            sizes.append(float(np.linalg.norm(session.state.probe)))
    assert sizes[0] == pytest.approx(sizes[1], rel=1e-12)
    assert sizes[0] > 1


@dataclass(frozen=True)
class Larger:
    """A channel that enlarges what is sent."""

    def init(self, exchange: Any) -> Any:
        return (), ()

    def encode(self, exchange: Any, value: Any, key: Any, state: Any) -> Any:
        return jax.tree.map(lambda a: 100 * a, value), state

    def decode(self, exchange: Any, total: Any, key: Any, state: Any) -> Any:
        return total, state


def test_noise_needs_a_bound_on_what_is_sent_in_the_end() -> None:
    with pytest.raises(ValueError, match=r"Put rk.clip\(bound\) before it"):
        rk.chain(rk.clip(1.0), Larger(), rk.gaussian(1.0))
    with pytest.raises(ValueError, match=r"Larger may enlarge what Clip has bounded.*before it, after Larger"):
        rk.chain(rk.clip(1.0), Larger(), rk.gaussian(1.0))
    inner = rk.chain(rk.chain(Larger(), rk.clip(0.5)), rk.gaussian(2.0))
    assert inner.members[1].received == 0.5


@dataclass(frozen=True)
class Median(Larger):
    """A channel with a `reduce` of its own."""

    def reduce(self, exchange: Any, rows: Any, weights: Any, present: Any) -> Any:
        return jax.tree.map(lambda a: jnp.median(a, axis=0), rows)


@pytest.mark.parametrize(
    "members", [(rk.clip(1.0), rk.gaussian(1.0), Median()), (Median(), NOISY), (rk.chain(Median()), NOISY)]
)
def test_noise_for_a_mean_does_not_hide_a_median(members: tuple[Any, ...]) -> None:
    with pytest.raises(ValueError, match=r"noise of Gaussian is scaled for a weighted mean, and Median reduces"):
        rk.chain(*members)


@pytest.mark.parametrize("channel", [rk.clip, rk.gaussian])
def test_the_numbers_of_a_channel(channel: Any) -> None:
    assert channel(np.float32(2)) == channel(np.int64(2)) == channel(2.0)
    for wrong in (True, np.bool_(True), np.float32("nan"), 10**400, "2"):
        with pytest.raises(ValueError, match="must be a positive number; got"):
            channel(wrong)


def test_a_noise_seed_that_is_the_seed_leads_to_other_keys() -> None:
    job = engines.Job(SQUARES, CLIENTS, METHOD, (ZERO, ()), 3, 7, NOISY, noise_seed=7)
    assert not np.array_equal(engines.noise_root(job), jax.random.key_data(jax.random.key(7)))
