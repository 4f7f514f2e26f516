"""Compressed messages: feedback, memory, bytes on the wire, noise, and what is refused."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import rookery as rk
from rookery.channels import downlink
from rookery.engines.engine import Job
from rookery.language.channel import ChannelExchange, Plain
from rookery.testing.runs import outcome

SQUARES = rk.SingleLevel(lambda x, b: jnp.mean((x - b) ** 2))
SIZE, STEP = 5, 0.3
RNG = np.random.default_rng(3)
MEANS = RNG.normal(size=(4, SIZE))
CLIENTS = rk.Clients(upper=[row[None] for row in MEANS], weights=[1.0, 2.0, 1.0, 4.0])
WEIGHTS = np.array([1.0, 2.0, 1.0, 4.0]) / 8
METHOD = rk.FedAvg(step=STEP)
ENGINES = [rk.Simulation(), rk.Federation()]
on_both = pytest.mark.parametrize("engine", ENGINES, ids=["simulation", "federation"])
slow = partial(pytest.param, marks=pytest.mark.slow)


def run(rounds: int = 3, engine: Any = None, **given: Any) -> rk.Run:
    return rk.solve(SQUARES, CLIENTS, METHOD, np.zeros(SIZE), rounds, engine=engine, **given)


def top(value: Any, k: int) -> Any:
    kept = np.zeros_like(value)
    places = np.argsort(-np.abs(value), kind="stable")[:k]
    kept[places] = value[places]
    return kept


def transcribed(feedback: str | None, k: int, rounds: int) -> Any:
    """FedAvg with one local step and compressed updates, after the papers."""
    x, memory, aggregate = np.zeros(SIZE), np.zeros((4, SIZE)), np.zeros(SIZE)
    for _ in range(rounds):
        updates = -STEP * 2 / SIZE * (x - MEANS)
        if feedback == "error":
            sent = np.array([top(u + e, k) for u, e in zip(updates, memory, strict=True)])
            memory = updates + memory - sent
        elif feedback == "difference":
            memory = memory + np.array([top(u - g, k) for u, g in zip(updates, memory, strict=True)])
            sent = memory
        elif feedback == "aggregate":
            sent = np.array([aggregate + top(u - aggregate, k) for u in updates])
            aggregate = WEIGHTS @ sent
        else:
            sent = np.array([top(u, k) for u in updates])
        x = x + WEIGHTS @ sent
    return x


@pytest.mark.parametrize("feedback", ["error", "difference", "aggregate", None])
@on_both
def test_feedback_as_in_the_papers(engine: Any, feedback: str | None) -> None:
    there = run(6, engine, channel=rk.top_k(k=2, feedback=feedback))
    np.testing.assert_allclose(there.x, transcribed(feedback, 2, 6), rtol=0, atol=1e-12)


def distance(rounds: int, channel: Any) -> float:
    return float(np.linalg.norm(run(rounds, channel=channel).x - WEIGHTS @ MEANS))


def test_with_feedback_a_quadratic_is_solved_and_without_it_is_not() -> None:
    assert distance(700, rk.top_k(k=1, feedback="difference")) < 1e-6
    assert distance(700, rk.top_k(k=1, feedback=None)) > 0.05
    assert distance(700, rk.quantize(4, feedback="difference")) < 1e-6
    assert distance(700, rk.quantize(4)) > 1e-3


@pytest.mark.slow
def test_fed_back_errors_leave_a_distance_of_the_order_of_the_step() -> None:
    far = []
    for step in (0.2, 0.02):
        method = rk.FedAvg(step=step)
        got = rk.solve(SQUARES, CLIENTS, method, np.zeros(SIZE), int(300 / step), channel=rk.top_k(k=1))
        far.append(float(np.linalg.norm(got.x - WEIGHTS @ MEANS)))
    assert 3 < far[0] / far[1] < 30
    assert far[0] < 0.5 * distance(700, rk.top_k(k=1, feedback=None))


# A nested method, a matrix, and all that is lost.


@pytest.mark.parametrize(
    "channel",
    [rk.top_k(0.3, feedback="difference"), slow(rk.quantize(8, feedback="difference")), slow(rk.low_rank(1))],
    ids=lambda channel: type(channel.codec).__name__,
)
def test_a_nested_method_converges(channel: Any) -> None:
    task = rk.tasks.quadratic(clients=3)
    method = rk.FedBiO(upper_step=0.05, lower_step=0.1, linear_step=0.1)
    plain, packed = (
        rk.solve(task.problem, task.clients, method, task.init, 800, channel=given) for given in (None, channel)
    )
    np.testing.assert_allclose(packed.x, plain.x, atol=1e-6)
    assert packed.history["bytes_up"].iloc[-1] <= plain.history["bytes_up"].iloc[-1]


class Watched:
    """A session whose channel's memory can be seen."""

    def __init__(self, engine: Any, **given: Any) -> None:
        job = Job(SQUARES, CLIENTS, METHOD, (jnp.zeros(SIZE), ()), given.pop("cohort", 4), seed=4, **given)
        self.session: Any = engine.open(job)
        self.session.init()

    def round(self) -> tuple[Any, Any, Any, int]:
        """Advance by a round: the memory before and after it, x before and after it, and how many replies were lost."""
        before, x = self.memory(), np.asarray(self.session.state.x)
        lost = self.session.advance(1)[0].missing
        return before, self.memory(), np.asarray(self.session.state.x) - x, lost

    def memory(self) -> Any:
        if hasattr(self.session, "sites"):
            return np.array([site.memory.after(self.session.rounds)["client"][0] for site in self.session.sites])
        return np.array(self.session.save().client["x"])


@on_both
def test_who_is_absent_or_not_heard_keeps_its_memory(engine: Any) -> None:
    watched = Watched(engine, channel=rk.top_k(k=1), cohort=3, faults=rk.Faults(dropout=0.4))
    lost_once = 0
    for _ in range(6):
        x = np.asarray(watched.session.state.x)
        before, after, moved, lost = watched.round()
        updates = -STEP * 2 / SIZE * (x - MEANS) + before
        sent = np.array([top(u, 1) for u in updates])
        changed = np.flatnonzero(np.any(before != after, axis=1))
        assert len(changed) == 3 - lost
        np.testing.assert_allclose(after[changed], (updates - sent)[changed], atol=1e-14)
        shares = WEIGHTS[changed] / np.sum(WEIGHTS[changed]) if len(changed) else np.zeros(0)
        np.testing.assert_allclose(moved, shares @ sent[changed], atol=1e-14)
        lost_once += lost
    assert lost_once > 0


@pytest.mark.parametrize("engine", [*ENGINES, slow(rk.Simulation(mesh=2))], ids=["simulation", "federation", "mesh"])
@pytest.mark.parametrize("feedback", ["error", slow("difference"), slow("aggregate")])
def test_a_checkpoint_keeps_the_feedback(engine: Any, feedback: str, tmp_path: Path) -> None:
    given = {"engine": engine, "channel": rk.chain(rk.top_k(k=1, feedback=feedback), rk.broadcast(8))}
    whole = run(6, **given)
    run(3, checkpoint=tmp_path / "run", **given)
    resumed = run(6, checkpoint=tmp_path / "run", **given)
    np.testing.assert_array_equal(resumed.x, whole.x)


def test_an_update_that_is_not_finite_counts_as_zero_and_spoils_no_memory() -> None:
    exchange = ChannelExchange("x", "mean", (jax.ShapeDtypeStruct((4,), float),) * 2)
    for feedback in ("error", None):
        channel = rk.top_k(k=1, feedback=feedback)
        state = channel.init(exchange)[1]
        value = (jnp.array([1.0, jnp.nan, 2.0, 3.0]), jnp.ones(4))
        message, after = channel.encode(exchange, value, jax.random.key(0), state)
        assert not any(np.any(a) for a in jax.tree.leaves(channel.unpack(exchange, message, ())))
        assert all(np.all(np.isfinite(a)) for a in jax.tree.leaves(after))


# Bytes.

LONG = 20_000
LARGE = rk.Clients(upper=[RNG.normal(size=(1, LONG)) for _ in range(3)])


def large(channel: Any, rounds: int = 2) -> Any:
    return outcome(rk.Federation(), Job(SQUARES, LARGE, METHOD, (jnp.zeros(LONG), ()), 3, 0, channel), rounds)


def test_one_in_a_hundred_is_sent_in_less_than_three_hundredths() -> None:
    """As the coordinator counts what it receives: values of 8 bytes, and places of 2."""
    plain, packed = large(None), large(rk.top_k(0.01))
    assert packed.received == 2 * 3 * 200 * (8 + 2)
    assert plain.received == 2 * 3 * LONG * 8
    assert packed.received < 0.03 * plain.received  # type: ignore[operator]
    assert (packed.sent, packed.received) == (packed.counts["bytes_down"], packed.counts["bytes_up"])


@pytest.mark.slow
def test_the_bytes_of_every_channel() -> None:
    each = 2 * 3
    for channel, size in (
        (rk.quantize(8), LONG + 8),
        (rk.quantize(4), LONG // 2 + 8),
        (rk.quantize(1), LONG // 8 + 8),
        (rk.random_k(0.01), 200 * 8 + 4),
        (rk.low_rank(3), LONG * 8),  # a vector is sent as it is
    ):
        assert large(channel).received == each * size
    down = large(rk.broadcast(4))
    assert down.sent == down.counts["bytes_down"]
    assert down.sent == each * (LONG // 2 + 8 + 8)  # the scale, and the step


def test_a_broadcast_is_rounded_and_unbiased(monkeypatch: pytest.MonkeyPatch) -> None:
    """A client starts from the rounded x, and the server adds its move to the exact x; the start is exact."""
    monkeypatch.setattr(downlink, "LEAST", 2)
    first = run(1, channel=rk.broadcast(8))
    np.testing.assert_allclose(first.x, transcribed(None, SIZE, 1), atol=1e-12)  # zero is a level
    start, level = np.array([-1.0, 0.35, 0.62, -0.5, 0.2]), STEP * 2 / SIZE / 7  # a level, times the step
    solved = lambda seed, channel: np.asarray(
        rk.solve(SQUARES, CLIENTS, METHOD, start, 1, seed=seed, channel=channel).x
    )
    moves = np.array([solved(seed, rk.broadcast(4)) for seed in range(16)]) - solved(0, None)
    assert np.all(np.abs(np.mean(moves, axis=0)) <= 4 * level / 2 / np.sqrt(16))
    assert np.all(np.std(moves[:, 1:], axis=0) > level / 4)
    assert np.max(np.abs(moves)) <= level


def test_the_start_and_the_evaluation_get_exact_values() -> None:
    seen = lambda client, x, y: {"x": jnp.sum(x)}
    start = RNG.normal(size=40)
    clients = rk.Clients(upper=[RNG.normal(size=(1, 40)) for _ in range(2)])
    got = rk.solve(SQUARES, clients, METHOD, start, 1, evaluate_client=seen, channel=rk.broadcast(1))
    np.testing.assert_allclose(got.history["x"], [np.sum(start), np.sum(got.x)], rtol=1e-12)


# With other channels.


class Largest:
    """Takes the largest of all replies, entry by entry."""

    def init(self, exchange: Any) -> Any:
        return (), ()

    def encode(self, exchange: Any, value: Any, key: Any, state: Any) -> Any:
        return value, state

    def decode(self, exchange: Any, total: Any, key: Any, state: Any) -> Any:
        return total, state

    def reduce(self, exchange: Any, rows: Any, weights: Any, present: Any) -> Any:
        return jax.tree.map(lambda a: jnp.max(a, axis=0), rows)


class Unchanged(Largest):
    """Encodes in a way of its own."""

    reduce: Any = None


@on_both
def test_a_channel_that_reduces_sees_unpacked_rows(engine: Any) -> None:
    class Reducing(Plain):
        reduce = Largest.reduce

    got = run(1, engine, channel=rk.chain(rk.top_k(k=2, feedback=None), Reducing()))
    sent = np.array([top(STEP * 2 / SIZE * row, 2) for row in MEANS])
    np.testing.assert_allclose(got.x, sent.max(axis=0), atol=1e-12)


class Halves(Unchanged):
    """A compressor that says nothing of the norm of what it unpacks."""

    def unpack(self, exchange: Any, message: Any, state: Any) -> Any:
        return jax.tree.map(lambda a: a / 2, message)


def test_noise_is_refused_after_a_compressor_that_keeps_to_no_bound() -> None:
    with pytest.raises(ValueError, match=r"Gaussian needs a bound on each message, and Halves gives none.*held_to"):
        rk.chain(rk.clip(1.0), Halves(), rk.gaussian(1.0))


class Doubling(Unchanged):
    """Multiplies by a number that the server tells the clients, and divides by it again."""

    def init(self, exchange: Any) -> Any:
        return jnp.full((), 2.0), ()

    def public(self, state: Any) -> Any:
        return state

    def encode(self, exchange: Any, value: Any, key: Any, state: Any) -> Any:
        return jax.tree.map(lambda a: exchange.public * a, value), state

    def decode(self, exchange: Any, total: Any, key: Any, state: Any) -> Any:
        return jax.tree.map(lambda a: a / exchange.public, total), state


@on_both
@pytest.mark.parametrize("others", [(Unchanged(),), (rk.top_k(k=2, feedback="aggregate"),)], ids=["nothing", "more"])
def test_each_channel_of_a_chain_tells_the_clients_its_own(engine: Any, others: Any) -> None:
    """The numbers are what they are without it, and what the clients are told is counted."""
    got, expected = (run(3, engine, channel=rk.chain(*first, *others)) for first in ((Doubling(),), ()))
    np.testing.assert_allclose(got.x, expected.x, atol=1e-12)
    more = got.history["bytes_down"].iloc[-1] - expected.history["bytes_down"].iloc[-1]
    assert more == 3 * CLIENTS.n * jnp.zeros(()).nbytes


@pytest.mark.parametrize("compress", [rk.top_k(0.5, feedback=None), rk.quantize(1)], ids=["top", "one bit"])
def test_noise_after_compression_keeps_the_bound(compress: Any) -> None:
    """One bit enlarges a clipped update; the server scales it down to the clip's bound before the noise."""
    channel: Any = rk.chain(rk.clip(0.1), compress, rk.gaussian(0.5))
    exchange = ChannelExchange("x", "mean", jax.ShapeDtypeStruct((50,), float))
    value = jnp.asarray(RNG.normal(size=50))
    state = channel.init(exchange)
    message, _ = channel.encode(exchange, value, jax.random.key(0), state[1])
    assert np.linalg.norm(channel.unpack(exchange, message, state[0])) <= 0.1 * (1 + 1e-12)
    assert channel.bound == 0.1
    free: Any = rk.chain(rk.clip(0.1), rk.quantize(1))
    message, _ = free.encode(exchange, value, jax.random.key(0), free.init(exchange)[1])
    assert np.linalg.norm(free.unpack(exchange, message, free.init(exchange)[0])) > 0.1


def test_a_memory_that_a_loop_carries_unchanged_is_not_written() -> None:
    """FedMBO's exchanges are with cohorts drawn anew, which remember nothing."""
    task = rk.tasks.quadratic(clients=3)
    writes = [
        rk.explain(task.problem, task.clients, method, task.init, cohort=2, channel=rk.top_k(k=1)).writes_memory
        for method in (rk.FedMBO(hessian_step=0.1), rk.FedNest(hessian_step=0.1))
    ]
    assert writes == [False, True]


def test_compression_draws_no_noise() -> None:
    assert run(1, channel=rk.top_k(0.5), noise_seed=3).notes == ()


def test_a_plan_says_what_is_compressed() -> None:
    clients = rk.Clients(upper=[RNG.normal(size=(1, 400)).astype("f") for _ in range(2)])
    channel = rk.chain(rk.top_k(0.01), rk.broadcast(8))
    plan = str(rk.explain(SQUARES, clients, METHOD, np.zeros(400, "f"), channel=channel))
    assert "(24 bytes; 1.6 kB before compression), aggregated" in plan
    assert "FedAvg.round, 2 of 2 clients; what they are sent is rounded to 8 bits per number" in plan
    assert "are sent: step, x (412 bytes)" in plan  # 400 bytes, a scale of 4, and the step


INTEGERS = rk.SingleLevel(lambda x, b: jnp.mean((x - b) ** 2))
REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "no bits": (lambda: rk.quantize(3), r"rk.quantize: bits must be 8, 4 or 1; got 3\."),
    "true bits": (lambda: rk.quantize(True), r"bits must be 8, 4 or 1; got True\."),
    "broadcast": (lambda: rk.broadcast(16), r"rk.broadcast: bits must be 8, 4 or 1; got 16\."),
    "no share": (lambda: rk.top_k(0), r"rk.top_k: share must be a number between 0 and 1, such as 0.01; got 0\."),
    "all": (lambda: rk.random_k(1.0), r"rk.random_k: share must be a number between 0 and 1, .*; got 1.0\."),
    "neither": (lambda: rk.top_k(), r"must be given a share such as 0.01, or k=...; got None and None\."),
    "both": (lambda: rk.top_k(0.1, k=3), r"must be given a share such as 0.01, or k=...; got 0.1 and 3\."),
    "no k": (lambda: rk.top_k(k=0), r"rk.top_k: k must be an integer of at least 1; got 0\."),
    "rank": (lambda: rk.low_rank(0), r"rk.low_rank: rank must be an integer of at least 1; got 0\."),
    "feedback": (lambda: rk.top_k(0.1, feedback="client"), r'feedback must be "error", .* or None; got \'client\'\.'),
    "two": (lambda: rk.chain(rk.top_k(0.1), rk.quantize(8)), r"must have at most one channel that compresses; got"),
    "nested": (lambda: rk.chain(rk.chain(rk.top_k(0.1)), rk.quantize(8)), r"at most one channel that compresses"),
    "two ways": (lambda: rk.chain(rk.broadcast(8), rk.broadcast(4)), r"must have at most one rk.broadcast; got"),
    "after": (lambda: rk.chain(rk.top_k(0.1), rk.clip(1.0)), r"Clip can't act on a compressed message. Put it before"),
    "noise": (
        lambda: rk.chain(rk.clip(1.0), rk.top_k(0.1), rk.gaussian(1.0)),
        r'noise needs a bound on each message, and feedback=\'error\' adds .* Use feedback=None before noise\.',
    ),
    "random noise": (
        lambda: rk.chain(rk.clip(1.0), rk.random_k(0.1), rk.gaussian(1.0)),
        r"rk.random_k enlarges the entries that it sends. Use rk.top_k or rk.quantize before noise\.",
    ),
    "no bound": (lambda: rk.chain(rk.quantize(8), rk.gaussian(1.0)), r"Put rk.clip\(bound\) before it in the chain\."),
    "private": (lambda: rk.chain(rk.top_k(0.1), rk.private(8, 1e-5)), r"rk.private must be the whole channel of a run"),
    "a median": (
        lambda: rk.chain(rk.top_k(0.1, feedback="difference"), Largest()),
        r"the server knows the sum of the updates alone, and Largest needs each of them\. Use feedback=\"error\"\."
        r"|Largest can't act on a compressed message",
    ),
    "one exchange": (lambda: run(channel={"x": rk.broadcast(8)}), r"rk.broadcast must be in the channel of all"),
    "large k": (lambda: run(channel=rk.top_k(k=6)), r"k must be at most the size of each array; .* sends one of 5"),
    "a cohort": (
        lambda: run(channel=rk.top_k(0.5, feedback="difference"), cohort=2),
        r'rk.top_k: feedback="difference" needs every client in every round, .* Use feedback="error"\.',
    ),
    "faults": (
        lambda: run(channel=rk.quantize(8, feedback="difference"), faults=rk.Faults(0.1)),
        r'rk.quantize: feedback="difference" needs every client',
    ),
    "other weights": (
        lambda: rk.solve(
            SQUARES, rk.Clients(upper=[row[None] for row in MEANS]), rk.AFL(step=0.1, weight_step=0.1), np.zeros(SIZE),
            1, channel=rk.top_k(0.5, feedback="difference"),
        ),
        r'feedback="difference" needs every client in every round, with weights that do not change',
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_one_clear_line(case: str) -> None:
    make, said = REFUSED[case]
    with pytest.raises(ValueError, match=said) as told:
        make()
    assert "\n" not in str(told.value)


def test_integers_must_be_marked() -> None:
    exchange = ChannelExchange("n", "mean", jax.ShapeDtypeStruct((4,), jnp.int32))
    with pytest.raises(TypeError, match=r"rk.quantize needs real floating-point updates, but the exchange 'n' sends"):
        rk.quantize(8).init(exchange)
