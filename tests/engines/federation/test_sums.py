"""Sums of replies: exact, whatever their order, and in memory for one reply at a time."""

import dataclasses
import tracemalloc
from fractions import Fraction
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from tests.engines.federation.studies import responders, without_data

import rookery as rk
from rookery.engines.checks import start_values
from rookery.engines.engine import Job
from rookery.engines.federation import wire
from rookery.engines.federation.sums import ExactSum, ModularSum
from rookery.engines.federation.transports.grpc import Assembly
from rookery.engines.federation.transports.incoming import Room
from rookery.engines.federation.transports.memory import Memory
from rookery.engines.federation.wire import PART

TYPES = [np.float16, jnp.bfloat16, np.float32, np.float64, np.int32, np.bool_]


def draw(rng: Any, count: int, size: int, dtype: Any) -> list[np.ndarray]:
    """Numbers of very different sizes."""
    scale = 4 if np.dtype(dtype).itemsize < 4 else 30
    rows = rng.normal(size=(count, size)) * 10.0 ** rng.integers(-scale, scale + 1, (count, size))
    return list(np.clip(rows, -1e9, 1e9).astype(dtype) if dtype == np.int32 else rows.astype(dtype))


def added(weights: Any, rows: list[np.ndarray], order: Any) -> np.ndarray:
    total = ExactSum(rows[0].shape, rows[0].dtype, len(rows))
    for i in order:
        total.add(weights[i], rows[i])
    return total.result()


@pytest.mark.parametrize("dtype", TYPES, ids=lambda dtype: np.dtype(dtype).name)
def test_a_sum_does_not_depend_on_the_order_and_is_exact(dtype: Any) -> None:
    """Against rational numbers: what is 80 bits below the largest term may be lost, and nothing else."""
    rng = np.random.default_rng(0)
    for count in (1, 3, 40):
        rows, weights = draw(rng, count, 30, dtype), rng.random(count)
        expected = added(weights, rows, range(count))
        for _ in range(10):
            np.testing.assert_array_equal(added(weights, rows, rng.permutation(count)), expected)
        kind = expected.dtype
        terms = [(kind.type(w) * row.astype(kind)).astype(float) for w, row in zip(weights, rows, strict=True)]
        exact = [float(sum(map(Fraction, column))) for column in np.stack(terms, 1).tolist()]
        most = max(np.max(np.abs(term)) for term in terms)
        np.testing.assert_allclose(expected, exact, rtol=2 * np.finfo(kind).eps, atol=most * count * 2.0**-80)


def test_terms_that_cancel_leave_what_is_left() -> None:
    """Where a plain sum has nothing left, in either order."""
    rows = [np.array([value]) for value in (1e16, 1.0, -1e16, 1e-3)]
    for order in ([0, 1, 2, 3], [1, 0, 3, 2], [3, 2, 1, 0], [0, 2, 1, 3]):
        assert added(np.ones(4), rows, order) == pytest.approx(1.001, abs=1e-14)


def test_the_parts_are_unique_on_ties() -> None:
    """Numbers just at and around half a step of each grid, in all orders of two groups."""
    rng, width = np.random.default_rng(1), 52 - (64).bit_length()
    halves = [2.0 ** (-width * k - 1) * (1 + sign * 2.0**-52) for k in range(1, 3) for sign in (-1, 0, 1)]
    rows = [np.array([sign * value]) for value in [*halves, 1.0, 2.0**-30] for sign in (1, -1, 1, 1)]
    results = {float(added(np.ones(len(rows)), rows, rng.permutation(len(rows)))[0]) for _ in range(300)}
    assert len(results) == 1


@pytest.mark.parametrize("odd", [np.inf, -np.inf, np.nan, 1e300])
def test_values_that_are_not_finite_or_huge(odd: float) -> None:
    rows = [np.array([1.0, 2.0]), np.array([odd, 2.0]), np.array([3.0, 2.0])]
    for order in ([0, 1, 2], [1, 0, 2], [2, 0, 1]):
        np.testing.assert_array_equal(added(np.ones(3), rows, order), [odd + 4, 6.0])
    assert np.isnan(added(np.ones(2), [np.array([np.inf]), np.array([-np.inf])], [0, 1]))[0]


def test_no_replies_and_no_numbers() -> None:
    np.testing.assert_array_equal(ExactSum((2,), np.float32, 3).result(), np.zeros(2, np.float32))
    total = ExactSum((0, 3), np.float32, 3)
    total.add(1.0, np.zeros((0, 3), np.float32))
    assert total.result().shape == (0, 3)


def test_a_sum_modulo_two_to_the_k() -> None:
    shapes = [np.zeros((2, 2), np.uint32), np.zeros(3, np.uint32)]
    total = ModularSum(shapes)
    for _ in range(3):
        total.add([np.full((2, 2), 2**31, np.uint32), np.arange(3, dtype=np.uint32)])
    first, second = total.result()
    np.testing.assert_array_equal(first, np.full((2, 2), 2**31, np.uint32))
    np.testing.assert_array_equal(second, [0, 3, 6])


# ------------------------------------------------------------ at the coordinator


class Fakes:
    """Sites that answer at once, with arrays that exist only then; in another order for each seed."""

    def __init__(self, count: int, size: int, seed: int | None = None, channel: Any = None) -> None:
        problem = rk.SingleLevel(lambda x, rows: jnp.mean((x - rows) ** 2))
        clients = rk.Clients(upper=[np.zeros((1, 1), np.float32)] * count)
        start = start_values(problem, clients, np.zeros(size, np.float32))
        self.job = Job(problem, clients, rk.FedAvg(step=0.1, local_steps=1), start, count, 0, channel)
        first = rk.Clients(upper=[np.zeros((1, 1), np.float32)])
        self._hello = responders(dataclasses.replace(self.job, clients=first))[0].hello()
        self._size = size

    def ask(self, i: int, message: Any) -> Any:
        header, _ = wire.decode(message)
        answer: Any = {"number": header["number"]}
        if header["do"] == "hello":
            return wire.encode({**answer, "answer": "hello", **self._hello, "name": f"site-{i}"}, [])
        if header["do"] == "open":
            return wire.encode({**answer, "answer": "opened", "evaluation": "together"}, [])
        arrays = [self.value(i)] if header.get("reply") else []
        return wire.encode({**answer, "answer": "value", "work": []}, arrays)

    def value(self, i: int) -> np.ndarray:
        """A site's reply."""
        if self._size > 10**6:  # where drawing would take long
            return np.full(self._size, i + 1, np.float32)
        return np.random.default_rng(i).normal(size=self._size).astype(np.float32)

    def engine(self, shuffled: int | None = None) -> Any:
        names = [f"site-{i}" for i in range(self.job.clients.n)]
        transport = Memory(len(names), self.ask, names)
        if shuffled is not None:
            rng, receive = np.random.default_rng(shuffled), transport.receive

            def any_order(seconds: float) -> Any:
                waiting = transport._requests
                waiting.rotate(int(rng.integers(len(waiting))) if waiting else 0)
                return receive(seconds)

            transport.receive = any_order  # type: ignore[method-assign]
        return rk.Federation(transport=transport, patience=0.0)


def test_the_result_does_not_depend_on_who_was_first() -> None:
    fakes, found = Fakes(20, 100), []
    for shuffled in (None, 1, 2):
        session = fakes.engine(shuffled).open(without_data(fakes.job))
        session.init()
        session.advance(1)
        found.append(np.asarray(session.state.x))
    np.testing.assert_array_equal(found[1], found[0])
    np.testing.assert_array_equal(found[2], found[0])
    values = [np.random.default_rng(i).normal(size=100).astype(np.float32) for i in range(20)]
    np.testing.assert_allclose(found[0], np.mean(values, 0), rtol=1e-5, atol=1e-7)


def test_the_coordinator_holds_one_reply_at_a_time() -> None:
    """Forty sites with 400 kB each: half of them at most, most of it the sum's."""
    fakes = Fakes(40, 100_000)
    session = fakes.engine().open(without_data(fakes.job))
    session.init()
    tracemalloc.start()
    session.advance(1)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 20 * 400_000, peak


@pytest.mark.slow
def test_two_hundred_sites_with_ten_million_numbers_stay_under_a_gigabyte() -> None:
    """In a process of its own, whose largest resident memory the system knows."""
    import subprocess
    import sys

    code = "from tests.engines.federation.test_sums import large; large()"
    root = Path(__file__).parents[3]
    out = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True, check=True)
    most = float(out.stdout.split()[-1])
    assert most < 2**30, f"{most / 2**20:.0f} MiB"


def large() -> None:
    fakes = Fakes(200, 10**7)
    session = fakes.engine().open(without_data(fakes.job))
    session.init()
    session.advance(1)
    np.testing.assert_allclose(session.state.x[:: 10**6], 201 / 2)
    status = Path("/proc/self/status").read_text()  # `getrusage` also counts what the parent had when this began
    print(1024 * int(status.partition("VmHWM:")[2].split()[0]))


def test_long_messages_that_wait_go_to_files_once_there_is_no_room() -> None:
    """Three sites' messages come at the same time, and are whole; the room is free again when they are taken."""
    room, limit = Room(3 * PART), lambda: 100 * PART
    assemblies = [Assembly(limit, room) for _ in range(3)]
    pieces = [[bytes([i]) * PART] * 3 + [b"end"] for i in range(3)]
    messages: list[Any] = []
    for turn in range(4):
        messages = [assembly.add(each[turn]) for assembly, each in zip(assemblies, pieces, strict=True)]
    assert not room.take(1)
    for message, each in zip(messages, pieces, strict=True):
        assert bytes(message) == b"".join(each) == bytes(message)
        assert len(message) == 3 * PART + 3
    del message, messages
    assert room.take(3 * PART)
    assert assemblies[0].add(b"short") == b"short"
