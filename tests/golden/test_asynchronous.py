"""Asynchronous rounds against FedBuff written out event by event, with a heap and NumPy."""

import heapq
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import pytest
import quadratics as q

import rookery as rk

Vector = np.ndarray
State = tuple[Vector, ...]
N, PLACES, BUFFER, ROUNDS, SEED = q.N_CLIENTS, 3, 2, 12, 4
SECONDS = np.array([[1.0, 2.3, 0.31, 5.7, 1.45], [0.9, 1.7, 0.37, 6.1, 1.33]])  # by the round in which a client begins
WEIGHTS = np.array(q.WEIGHTS)


def draws(t: int, k: int, choices: int) -> int:
    """The k-th draw of round t."""
    key = jax.random.split(jax.random.fold_in(jax.random.key(SEED), t + 1))[0]
    return int(jax.random.randint(jax.random.fold_in(key, k), (), 0, choices, np.int32))


def order() -> list[int]:
    """The order of the clients before the first round."""
    key = jax.random.split(jax.random.fold_in(jax.random.key(SEED), 1))[0]
    return jax.random.permutation(jax.random.fold_in(key, 0x6F726465), N).tolist()


def fedbuff(
    start: State, reply: Callable[[int, State], State], step: Callable[[State, State], State], a: float,
    oldest: float = np.inf,
) -> list[tuple[float, State]]:  # fmt: skip
    """The time and the state after each round. `reply(i, state)` is a client's differences to the state."""
    state, clients, queue, found = start, order(), list[Any](), list[tuple[float, State]]()
    now, t, drawn = 0.0, 0, 0

    def begin(place: int) -> None:
        i = clients[place]
        heapq.heappush(queue, (now + SECONDS[t % len(SECONDS)][i], place, i, t, reply(i, state)))

    def replace(place: int) -> None:
        nonlocal drawn
        r = draws(t, drawn, N - PLACES + 1)
        other = place if r == 0 else PLACES - 1 + r
        clients[place], clients[other] = clients[other], clients[place]
        drawn += 1
        begin(place)

    for place in range(PLACES - 1):
        begin(place)
    replace(PLACES - 1)
    while len(found) < ROUNDS:
        buffer = []
        while len(buffer) < BUFFER:
            now, place, i, version, difference = heapq.heappop(queue)
            buffer.append((i, t - version, difference))
            if len(buffer) < BUFFER:
                replace(place)
        p = np.array([WEIGHTS[i] for i, _, _ in buffer])
        s = np.array([(1 + tau) ** -a if tau <= oldest else 0.0 for _, tau, _ in buffer])
        each = zip(*(difference for _, _, difference in buffer), strict=True)
        moved = tuple(sum(w * d for w, d in zip(p * s / p.sum(), part, strict=True)) for part in each)
        state = step(state, moved)
        found.append((now, state))
        t, drawn = t + 1, 0
        replace(place)
    return found


def library(problem: Any, clients: Any, method: Any, init: Any, **how: Any) -> list[tuple[float, Any]]:
    """The time and the state after each round."""
    found = []
    clock = rk.Clock(latency=SECONDS)
    asynchronous = rk.Asynchronous(buffer=BUFFER, **how)
    session = rk.session(
        problem, clients, method, init, cohort=PLACES, seed=SEED, clock=clock, asynchronous=asynchronous
    )
    with session as run:
        for _ in range(ROUNDS):
            run.advance()
            found.append((float(run.counts["clock"]), run.state))
    return found


HOW: dict[str, dict[str, Any]] = {"by staleness": {}, "alike": {"staleness": 0.0}, "recent ones": {"oldest": 1}}


@pytest.mark.parametrize("how", HOW)
def test_fedavg(how: str) -> None:
    rng = np.random.default_rng(0)
    rows = [rng.normal(k, 1.0, (m, 2)) for k, m in enumerate((1, 3, 40, 7, 5))]
    problem = rk.SingleLevel(lambda x, b: ((x - b) ** 2).sum(-1).mean() / 2)
    clients = rk.Clients(upper=rows, weights=q.WEIGHTS)
    start = np.array([3.0, -1.0])

    def reply(i: int, state: State) -> State:
        x = state[0]
        for _ in range(3):
            x = x - 0.2 * (x - rows[i].mean(0))
        return (x - state[0],)

    step = lambda state, moved: (state[0] + moved[0],)
    settings = {"staleness": 0.5, **HOW[how]}
    expected = fedbuff((start,), reply, step, settings["staleness"], settings.get("oldest", np.inf))
    found = library(problem, clients, rk.FedAvg(step=0.2, local_steps=3), start, **HOW[how])
    for (now, state), (clock, run) in zip(expected, found, strict=True):
        assert clock == pytest.approx(now, rel=1e-6)
        np.testing.assert_allclose(run.x, state[0], rtol=0, atol=1e-10)
