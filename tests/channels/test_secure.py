"""Secure sums in simulation: the fixed point against NumPy, on every engine to the last bit, and what is refused."""

import dataclasses
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import rookery as rk
from rookery.channels.secure import SecureSum
from rookery.language.channel import ChannelExchange

SIZES, WEIGHTS = (1, 3, 40, 200), (1.0, 2.0, 1.0, 4.0)
DATA = [np.full((n, 2), [n / 64, -n / 128], np.float32) for n in SIZES]  # so that float32 has no rounding of its own
PROBLEM = rk.SingleLevel(lambda x, rows: jnp.mean(jnp.sum((x - rows) ** 2, -1)))
CLIENTS = rk.Clients(upper=DATA, weights=WEIGHTS)
METHOD = rk.FedAvg(step=0.25, local_steps=1)


def secure(bound: float = 1.0, **given: Any) -> Any:
    return rk.chain(rk.clip(bound), rk.secure_sum(**given))


def solved(engine: Any = None, channel: Any = None, rounds: int = 3, clients: Any = CLIENTS, **given: Any) -> Any:
    start = np.zeros(2, np.float32)
    return rk.solve(PROBLEM, clients, METHOD, start, rounds, channel=channel, engine=engine, **given)


def by_hand(bits: int, bound: float, rounds: int) -> np.ndarray:
    """FedAvg with a secure sum, in NumPy; every step is exact in double precision except the rounding."""
    x, weights = np.zeros(2), np.array(WEIGHTS)
    room = (2 ** (bits - 1) - 1) / len(SIZES) - 1
    unit = 2.0 ** math.ceil(math.log2(bound / room))
    for _ in range(rounds):
        total = np.zeros(2)
        for rows, weight in zip(DATA, weights, strict=True):
            mean = np.float32(rows.astype(np.float64).mean(0))
            update = np.float32(x - 0.25 * 2 * (x - mean)).astype(np.float64) - x
            norm = np.linalg.norm(update)
            update = np.float32(update * min(1, bound / norm)).astype(np.float64)
            total += np.rint(update * (weight / weights.max()) / unit) * unit
        x = np.float32(x + total * weights.max() / weights.sum()).astype(np.float64)
    return x


@pytest.mark.parametrize("bound", [8.0, 0.5])
def test_the_fixed_point_is_that_of_numpy(bound: float) -> None:
    np.testing.assert_allclose(solved(channel=secure(bound)).x, by_hand(32, bound, 3), rtol=3e-7)


def test_sixteen_bits_round_at_random_and_without_bias() -> None:
    """Every result is one of the two neighbours on the grid, and the mean over many keys is the value."""
    channel: SecureSum = secure(1.0, bits=16).secure
    value = jnp.asarray([0.123456, -0.7, 1.0, 0.0], jnp.float32)
    plain = channel.plain("x", (value, []), [], 3)
    unit = plain[0].unit
    draw = jax.jit(lambda key: channel.integers(plain, (value, []), jnp.float32(1), key)[0])
    found = np.stack([np.asarray(draw(jax.random.key(i))) for i in range(400)]).view(np.int16) * unit
    assert np.all(np.abs(found - np.asarray(value)) < unit)
    spread = np.sqrt(np.var(found, axis=0) / 400)
    assert np.all(np.abs(found.mean(0) - np.asarray(value)) <= 4.5 * spread + 1e-7)


ENGINES = {"blocks": rk.Simulation(block=2), "mesh": rk.Simulation(mesh=2), "federation": rk.Federation()}
QUICK = {("mesh", 16), ("federation", 16)}  # and 64 bits on every engine in the contract


@pytest.mark.parametrize(
    ("engine", "bits"),
    [
        pytest.param(engine, bits, marks=() if (name, bits) in QUICK else pytest.mark.slow, id=f"{name}-{bits}")
        for name, engine in ENGINES.items()
        for bits in (16, 32, 64)
    ],
)
def test_every_engine_has_the_same_numbers_to_the_last_bit(engine: Any, bits: int) -> None:
    channel, cohort = secure(bits=bits), None if bits == 32 else 3
    expected = solved(channel=channel, cohort=cohort, seed=2)
    np.testing.assert_array_equal(solved(engine, channel, cohort=cohort, seed=2).x, expected.x)


def test_another_shape_and_another_bound_on_the_same_problem() -> None:
    problem = rk.SingleLevel(lambda x, rows: jnp.mean((x["w"] - rows) ** 2) + x["b"] ** 2)
    for width, bound in ((2, 1.0), (3, 1.0), (3, 0.25)):
        clients = rk.Clients(upper=[np.ones((n, width), np.float32) for n in SIZES])
        start = {"w": np.zeros(width, np.float32), "b": np.float32(1)}
        run = rk.solve(problem, clients, METHOD, start, 1, channel=secure(bound))
        move = np.concatenate([run.x["w"], [run.x["b"] - 1]])
        assert np.linalg.norm(move) == pytest.approx(
            min(bound, np.linalg.norm([0.5 / width] * width + [-0.5])), rel=1e-6
        )


def test_a_client_with_nan_counts_as_zero_and_extreme_weights_do_not_overflow() -> None:
    data = [*DATA[:3], np.full((4, 2), np.float32(3e38))]
    for weights in ((1, 1, 1, 1), (1e-6, 1, 1e6, 1)):
        run = solved(channel=secure(1.0), clients=rk.Clients(upper=data, weights=weights), rounds=1)
        assert np.all(np.abs(run.x) <= 1)


def test_the_sum_of_as_many_clients_as_there_are_does_not_overflow() -> None:
    """All at the bound, with the same sign."""
    clients, up = rk.Clients(upper=[np.full((1, 1), 9.0, np.float32)] * 7), []
    for bits in (16, 32):
        run = rk.solve(PROBLEM, clients, METHOD, np.zeros(1, np.float32), 1, channel=secure(1.0, bits=bits))
        np.testing.assert_allclose(run.x, 1.0, rtol=3e-4)
        up.append(run.history["bytes_up"].iloc[-1])
    assert up == [7 * 2, 7 * 4]


def test_lost_replies_are_left_out_of_the_mean() -> None:
    faults = rk.Faults(dropout=0.1)
    plain = solved(channel=rk.clip(1.0), faults=faults, seed=5, rounds=2)
    hidden = solved(channel=secure(), faults=faults, seed=5, rounds=2)
    assert plain.history["missing"].iloc[-1] > 0
    np.testing.assert_allclose(hidden.x, plain.x, rtol=1e-6)
    np.testing.assert_array_equal(hidden.x, solved(rk.Federation(), secure(), faults=faults, seed=5, rounds=2).x)


@pytest.mark.parametrize("engine", [rk.Simulation(), rk.Federation()], ids=str)
def test_below_the_threshold_the_round_fails(engine: Any) -> None:
    with pytest.raises(rk.RoundFailedError, match="got 0 replies"):
        solved(engine, secure(threshold=4), faults=rk.Faults(dropout=0.3), rounds=20)


def test_messages_of_sixteen_bits_are_half_as_long() -> None:
    up = [solved(channel=secure(bits=bits)).history["bytes_up"].iloc[-1] for bits in (32, 16)]
    assert up[0] == 2 * up[1] == solved(channel=rk.clip(1.0)).history["bytes_up"].iloc[-1]


def test_noise_of_the_server_is_added_to_the_sum() -> None:
    channel = rk.chain(rk.clip(1.0), rk.gaussian(0.5), rk.secure_sum())
    noisy = solved(channel=channel, noise_seed=3, rounds=1)
    plain = solved(channel=rk.chain(rk.clip(1.0), rk.gaussian(0.5)), noise_seed=3, rounds=1)
    np.testing.assert_allclose(noisy.x, plain.x, rtol=1e-6)


# ------------------------------------------------------------ bookkeeping

BOUNDED = (None, rk.Bookkeeping("steps", most=15, least=1))


@dataclasses.dataclass(frozen=True)
class Counting:
    """A method whose clients send a number of steps along."""

    marks: Any = BOUNDED

    solves = (rk.SingleLevel,)

    def init(self, fed: Any, x: Any, y: Any, key: Any) -> Any:
        return _State(x, y, jnp.float32(0))

    def round(self, fed: Any, state: Any, key: Any) -> Any:
        size = lambda c: jnp.sum(c.places, dtype=jnp.int32)
        value = fed.map(lambda c, k: (jnp.full(2, size(c) / 8, jnp.float32), size(c)), key)
        move, steps = fed.mean(value, "x", bookkeeping=self.marks)
        return _State(state.x + move, state.y, steps)


class _State(NamedTuple):
    x: Any
    y: Any
    steps: Any


def test_bookkeeping_with_a_bound_is_part_of_the_sum() -> None:
    """Clamped to its bounds, and as exact as the fixed point for them."""
    for engine in (rk.Simulation(), rk.Federation()):
        run = rk.solve(PROBLEM, CLIENTS, Counting(), np.zeros(2, np.float32), 1, channel=secure(64.0), engine=engine)
        expected = np.average(np.clip(SIZES, 1, 15), weights=WEIGHTS)
        np.testing.assert_allclose(run.state.steps, expected, rtol=1e-6)
        np.testing.assert_allclose(run.x, np.average(np.array(SIZES) / 8, weights=WEIGHTS), rtol=1e-6)


def test_bookkeeping_without_a_bound_is_refused() -> None:
    method = Counting((None, rk.Bookkeeping("steps")))
    with pytest.raises(ValueError, match=r"carries bookkeeping without one \(steps\)"):
        rk.solve(PROBLEM, CLIENTS, method, np.zeros(2, np.float32), 1, channel=secure())


# ------------------------------------------------------------ what is refused


def test_without_a_bound_it_is_refused() -> None:
    with pytest.raises(ValueError, match=r"Put rk.clip\(bound\) before it"):
        rk.chain(rk.secure_sum())
    with pytest.raises(ValueError, match=r"Put rk.clip\(bound\) before it"):
        solved(channel=rk.secure_sum())


@dataclasses.dataclass(frozen=True)
class Median:
    """A channel that needs single replies."""

    def init(self, exchange: ChannelExchange) -> Any:
        return (), ()

    def encode(self, exchange: Any, value: Any, key: Any, state: Any) -> Any:
        return value, state

    def decode(self, exchange: Any, total: Any, key: Any, state: Any) -> Any:
        return total, state

    def reduce(self, exchange: Any, rows: Any, weights: Any, present: Any) -> Any:
        return jax.tree.map(lambda a: jnp.median(a, 0), rows)


class Coded(Median):
    """A channel whose messages the server decodes one by one."""

    bound, reduce = 1.0, None

    def unpack(self, *_: Any) -> Any: ...


def test_what_does_not_go_together() -> None:
    with pytest.raises(ValueError, match="Coded needs each client's value by itself"):
        rk.chain(Coded(), rk.secure_sum())
    with pytest.raises(ValueError, match="Median needs each client's value by itself"):
        rk.chain(Median(), rk.clip(1.0), rk.secure_sum())
    with pytest.raises(ValueError, match="must be the last member"):
        rk.chain(rk.clip(1.0), rk.secure_sum(), rk.clip(1.0))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"bits": 12}, "bits must be 16, 32 or 64; got 12"),
        ({"bits": True}, "bits must be"),
        ({"unit": 0}, "unit must be a positive number"),
        ({"threshold": 1}, "threshold must be an integer of at least 2"),
    ],
)
def test_bad_arguments(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        rk.secure_sum(**given)


class Twice(Counting):
    """A method with a cohort in which a client may be twice."""

    def round(self, fed: Any, state: Any, key: Any) -> Any:
        again = fed.resample(key, jnp.full(fed.n, 1 / fed.n))
        return _State(state.x + again.mean(again.map(lambda c, k: jnp.ones(2, jnp.float32), key), "x"), state.y, 0.0)


def refused(match: str, channel: Any, **given: Any) -> None:
    """In one line, while the plan is traced, and so before anything is compiled."""
    with pytest.raises(ValueError, match=match) as raised:
        solved(channel=channel, **given)
    assert any(entry.name == "traced" for entry in raised.traceback)
    assert "\n" not in str(raised.value)


def test_what_is_refused_before_the_run() -> None:
    refused("unit must be so large that the sum of 4 clients", secure(unit=1e-12))
    refused("threshold must be more than half of the 4 clients", secure(threshold=2))
    refused("at least 3 clients in an exchange, because with two sites", secure(), cohort=2)
    with pytest.raises(ValueError, match="with each client once"):
        rk.solve(PROBLEM, CLIENTS, Twice(), np.zeros(2, np.float32), 1, channel=secure())
    refused("single precision can scale", secure(1e-30))


def test_too_few_bits_are_refused() -> None:
    channel: SecureSum = secure(bits=16).secure
    with pytest.raises(ValueError, match="bits=16 are too few for the sum of 20000 clients"):
        channel.plain("x", (jnp.zeros(2), []), [], 20_000)


def test_gathers_and_a_centre_at_a_client_are_refused() -> None:
    for kind, what in (("gather", "gathers single replies"), ("center", "the centre's data")):
        with pytest.raises(ValueError, match=what):
            secure().init(ChannelExchange("x", kind, jnp.zeros(2)))
