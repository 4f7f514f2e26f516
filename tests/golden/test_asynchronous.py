"""Asynchronous rounds against FedBuff written out event by event, with a heap and NumPy."""

import heapq
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import quadratics as q
from tests.contract import cases

import rookery as rk

Vector = np.ndarray
State = tuple[Vector, ...]
N, PLACES, BUFFER, ROUNDS, SEED = q.N_CLIENTS, 3, 2, 12, 4
SECONDS = np.array([[1.0, 2.3, 0.31, 5.7, 1.45], [0.9, 1.7, 0.37, 6.1, 1.33]])  # by the round in which a client begins
WEIGHTS = np.array(q.WEIGHTS)


def draw(t: int, k: int, least: int, end: int) -> int:
    """The k-th draw of round t."""
    key = jax.random.split(jax.random.fold_in(jax.random.key(SEED), t + 1))[0]
    return int(jax.random.randint(jax.random.fold_in(key, k), (), least, end, np.int32))


def first_order() -> list[int]:
    """The order of the clients before the first round."""
    key = jax.random.split(jax.random.fold_in(jax.random.key(SEED), 1))[0]
    return jax.random.permutation(jax.random.fold_in(key, 0x6F726465), N).tolist()


def fedbuff(
    start: State, reply: Callable[[int, State], State], step: Callable[[State, State], State],
    staleness: float = 0.5, oldest: float = np.inf, once: bool = False,
) -> list[tuple[float, State]]:  # fmt: skip
    """The time and the state after each round.

    `reply(i, state)` are the differences that client i sends. `once`: no client begins twice with one model.
    """
    state, clients, queue, found = start, first_order(), list[Any](), list[tuple[float, State]]()
    now, t, drawn, out, began = 0.0, 0, 0, 0, dict[int, int]()

    def begin(place: int) -> None:
        i = clients[place]
        began[i] = t
        heapq.heappush(queue, (now + SECONDS[t % len(SECONDS)][i], place, i, t, reply(i, state)))

    def replace(place: int) -> None:
        nonlocal drawn, out
        r = draw(t, drawn, int(once and began.get(clients[place]) == t), N - PLACES - out + 1)
        other = PLACES - 1 + r if r else place
        clients[place], clients[other] = clients[other], clients[place]
        if once and began.get(clients[other]) == t:
            out += 1
            clients[other], clients[N - out] = clients[N - out], clients[other]
        drawn += 1
        begin(place)

    for place in range(PLACES - 1):
        begin(place)
    replace(PLACES - 1)
    while len(found) < ROUNDS:
        buffer = []
        while len(buffer) < BUFFER:
            now, place, i, version, differences = heapq.heappop(queue)
            buffer.append((i, t - version, differences))
            if len(buffer) < BUFFER:
                replace(place)
        p = np.array([WEIGHTS[i] for i, _, _ in buffer])
        s = np.array([(1 + late) ** -staleness if late <= oldest else 0.0 for _, late, _ in buffer])
        parts = zip(*(differences for _, _, differences in buffer), strict=True)
        means = [sum(w * d for w, d in zip(p * s / p.sum(), part, strict=True)) for part in parts]
        state = step(state, (*means, p.sum()))
        found.append((now, state))
        t, drawn, out = t + 1, 0, 0
        replace(place)
    return found


def assert_same(expected: Any, method: Any, problem: Any, clients: Any, init: Any, names: Any, **how: Any) -> None:
    clock, asynchronous = rk.Clock(latency=SECONDS), rk.Asynchronous(buffer=BUFFER, **how)
    given: Any = {"cohort": PLACES, "seed": SEED, "clock": clock, "asynchronous": asynchronous}
    moved = 0.0
    with rk.session(problem, clients, method, init, **given) as run:
        for seconds, state in expected:
            run.advance()
            assert run.counts["clock"] == pytest.approx(seconds, rel=1e-6)
            for name, value in zip(names, state, strict=False):
                np.testing.assert_allclose(getattr(run.state, name), value, rtol=1e-10, atol=1e-10)
            moved = max(moved, np.abs(state[0] - expected[0][1][0]).max())
    assert moved > 1e-3, "the test would pass on a run that does nothing"


ROWS = [np.random.default_rng(m).normal(m % 4, 1.0, (m, 2)) for m in (1, 3, 40, 7, 200)]
SQUARES = rk.SingleLevel(lambda x, b: ((x - b) ** 2).sum(-1).mean() / 2)
CLIENTS = rk.Clients(upper=ROWS, weights=q.WEIGHTS)
START = np.array([3.0, -1.0])


@pytest.mark.parametrize("how", [{}, {"staleness": 0.0}, {"oldest": 1}], ids=["by staleness", "alike", "recent"])
def test_fedavg(how: dict[str, Any]) -> None:
    def reply(i: int, state: State) -> State:
        x = state[0]
        for _ in range(3):
            x = x - 0.2 * (x - ROWS[i].mean(0))
        return (x - state[0],)

    expected = fedbuff((START,), reply, lambda state, moved: (state[0] + moved[0],), **how)
    assert_same(expected, rk.FedAvg(step=0.2, local_steps=3), SQUARES, CLIENTS, START, "x", **how)


def test_fedbio() -> None:
    problem, clients = q.bilevel()
    eta, gamma, tau = 0.05, 0.1, 0.08

    def reply(i: int, state: State) -> State:
        x, y, u = state
        for _ in range(3):
            f_x, f_y, g_y = problem.f_x(i, x, y), problem.f_y(i, x, y), problem.g_y(i, x, y)
            H, J = problem.g_yy(i, x, y), problem.g_xy(i, x, y)
            x, y, u = x - eta * (f_x - J @ u), y - gamma * g_y, tau * f_y + u - tau * H @ u
        return x - state[0], y - state[1], u - state[2]

    step = lambda state, moved: (q.project(state[0] + moved[0]), state[1] + moved[1], state[2] + moved[2])
    x, y = (np.asarray(a) for a in q.INIT)
    expected = fedbuff((x, y, np.zeros_like(y)), reply, step)
    method = rk.FedBiO(upper_step=eta, lower_step=gamma, linear_step=tau, local_steps=3)
    projected = rk.Bilevel(q.BILEVEL.upper, q.BILEVEL.lower, project_upper=q.project)
    assert_same(expected, method, projected, clients, q.INIT, "xyu")


def test_control_variates() -> None:
    """Scaffold: no client begins twice with one model, and c stays the mean of the c_i that have arrived."""
    own, eta = {i: np.zeros(2) for i in range(N)}, 0.2

    def reply(i: int, state: State) -> State:
        x, c = state
        for _ in range(3):
            x = x - eta * (x - ROWS[i].mean(0) - own[i] + c)
        change = (state[0] - x) / (3 * eta) - c
        own[i] = own[i] + change
        return x - state[0], change

    def step(state: State, moved: State) -> State:
        return state[0] + moved[0], state[1] + moved[2] * moved[1]

    expected = fedbuff((START, np.zeros(2)), reply, step, staleness=0.0, once=True)
    method = rk.Scaffold(step=eta, local_steps=3)
    assert_same(expected, method, SQUARES, CLIENTS, START, ("x", "control"), staleness=0.0)


def test_the_plan_in_words() -> None:
    how = rk.Asynchronous(buffer=BUFFER)
    text = str(rk.explain(SQUARES, CLIENTS, rk.FedAvg(), START, cohort=PLACES, asynchronous=how))
    assert text.startswith("FedAvg.round, 2 of 5 clients")
    assert "aggregated as replies come: only the mean of those in the buffer is used" in text


CLOCK = rk.Clock(latency=[1.0, 1.7, 0.3, 2.9, 1.1])


def test_one_client_after_another_is_a_synchronous_run() -> None:
    clients = rk.Clients(upper=ROWS[3:4])
    method = rk.FedAvg(step=0.2, local_steps=3, batch_size=2)
    run = rk.solve(SQUARES, clients, method, START, 5)
    late = rk.solve(
        SQUARES, clients, method, START, 5, clock=rk.Clock(latency=1.0), asynchronous=rk.Asynchronous(buffer=1)
    )
    np.testing.assert_array_equal(run.x, late.x)
    assert late.history["staleness"].tolist() == [0.0] * 6
    assert late.history["bytes_down"].tolist() == run.history["bytes_down"].tolist()


def test_a_client_that_begins_twice_with_one_model_draws_anew() -> None:
    """Client 0 replies twice before client 1 does, and moves to two rows, one of them even and one odd."""
    rows = [np.arange(2.0)[:, None], np.zeros((2, 1))]
    clients, clock = rk.Clients(upper=rows), rk.Clock(latency=[1.0, 9.0])
    method, given = rk.FedAvg(step=1.0, batch_size=1), {"clock": clock, "asynchronous": rk.Asynchronous(buffer=2)}
    found = set[float]()
    for seed in range(4):
        run = rk.solve(SQUARES, clients, method, np.zeros(1), 1, seed=seed, **given)
        assert run.history["clock"].iloc[-1] == 2.0
        found.add(float(run.x[0]))
        if 0.5 in found:
            return
    raise AssertionError(f"no seed gives 0.5, but {found}")


def test_drawn_steps_take_as_long_as_they_are_many() -> None:
    """All replies but the first are those of client 0, which begins twice with each model, and draws its steps anew."""
    clients, clock = rk.Clients(upper=[np.ones((1, 1)), np.zeros((1, 1))]), rk.Clock(compute=[1.0, 1e-9])
    given: Any = {"seed": 2, "clock": clock, "asynchronous": rk.Asynchronous(buffer=2)}
    with rk.session(SQUARES, clients, rk.FedAvg(local_steps=(1, 50)), np.zeros(1), **given) as run:
        counts = [(run.advance(), run.counts["gradients"], run.counts["clock"])[1:] for _ in range(6)]
    steps, seconds = np.diff(np.array(counts), axis=0).T
    np.testing.assert_array_equal(steps, seconds)


def test_what_the_first_clients_remember_is_checked() -> None:
    """Client 2 diverges at once, and it would take until after the run to reply."""
    clients = rk.Clients(upper=[np.full((1, 1), value, np.float32) for value in (1, 0, 3e38, 1, 1, 1)])
    method = rk.Ditto(step=1e-3, personal_step=10.0, personal_steps=3)
    given: Any = {"cohort": 4, "clock": rk.Clock(latency=[1, 1, 1e6, 1, 1, 1])}
    given |= {"asynchronous": rk.Asynchronous(buffer=2, staleness=0.0), "on_nonfinite": "stop"}
    with pytest.warns(rk.NonFiniteWarning, match="round 1: what a client remembers .* is not finite"):
        run = rk.solve(SQUARES, clients, method, np.zeros(1, np.float32), 4, seed=2, **given)
    assert run.rounds == 0
    assert np.isfinite(run.memory).all()
    with pytest.warns(rk.NonFiniteWarning, match="round 1: what a client remembers"):
        run = rk.solve(SQUARES, clients, method, np.zeros(1, np.float32), 4, seed=2, **given | {"on_nonfinite": "warn"})
    assert run.rounds == 4


ONE: Any = SQUARES, CLIENTS, rk.FedAvg(step=0.2, local_steps=2, batch_size=2), START
GIVEN: Any = {"cohort": PLACES, "clock": CLOCK, "asynchronous": rk.Asynchronous(buffer=BUFFER)}


def refused(checkpoint: Path, **other: Any) -> None:
    with pytest.raises(ValueError, match="belongs to another run: its program"):
        rk.solve(*ONE, 9, checkpoint=checkpoint, **(GIVEN | other))


@pytest.mark.slow
def test_a_resumed_run_needs_the_same_speeds_and_the_same_limit(tmp_path: Path) -> None:
    rk.solve(*ONE, 4, checkpoint=tmp_path, **GIVEN)
    refused(tmp_path, clock=rk.Clock(latency=[1.0, 1.7, 0.3, 2.9, 1.2]))
    refused(tmp_path, asynchronous=rk.Asynchronous(buffer=BUFFER, oldest=9))


def test_a_resumed_run_equals_an_uninterrupted_one_and_needs_the_same_late_replies(tmp_path: Path) -> None:
    whole = rk.solve(*ONE, 9, **GIVEN)
    rk.solve(*ONE, 4, checkpoint=tmp_path, **GIVEN)
    refused(tmp_path, asynchronous=rk.Asynchronous(buffer=BUFFER, staleness=0.0))
    resumed = rk.solve(*ONE, 9, checkpoint=tmp_path, **GIVEN)
    np.testing.assert_array_equal(whole.x, resumed.x)
    pd_columns = ["clock", "staleness", "bytes_up", "bytes_down", "gradients"]
    assert whole.history[pd_columns].equals(resumed.history[pd_columns])


def test_noise_is_in_proportion_to_what_a_client_can_change() -> None:
    """With one reply in the buffer, a client changes x by at most its clipped move, reduced by its staleness."""
    clients = rk.Clients(upper=[np.zeros((1, 1))] * 2)
    problem = rk.SingleLevel(lambda x, b: jnp.mean(0 * x) + b.sum())  # all that changes x is noise
    given: Any = {"clock": rk.Clock(latency=[1.0, 2.5]), "channel": rk.chain(rk.clip(1.0), rk.gaussian(1.0))}
    how, before, late = rk.Asynchronous(buffer=1, staleness=2.0), np.zeros(4096), set()
    with rk.session(problem, clients, rk.FedAvg(), before, noise_seed=0, asynchronous=how, **given) as run:
        for _ in range(4):
            run.advance()
            after, staleness = np.asarray(run.state.x), run.counts["staleness"]
            assert np.std(after - before) == pytest.approx((1 + staleness) ** -2, rel=0.05)
            before, late = after, late | {staleness}
    assert late == {0, 1, 2}


def test_what_is_counted() -> None:
    """`cohort` clients begin before the first step; then as many begin as reply."""
    run = rk.solve(*ONE, 4, **GIVEN)
    number, key = 8, 8  # bytes
    begun = [PLACES - 1 + BUFFER * t for t in range(5)]
    assert run.history["bytes_up"].tolist() == [2 * number * BUFFER * t for t in range(5)]
    assert run.history["bytes_down"].diff().iloc[1:].tolist() == [(3 * number + key) * BUFFER] * 4
    assert run.history["gradients"].tolist() == [2 * count for count in begun]
    assert run.history["exchanges"].tolist() == [0, 1, 2, 3, 4]


ALLOWED = """
    AFL ASFBO AccFCSGM AdaFBiO BRFedBi BRFedBiM ComFedL CompositionalFedAvg DSFedDRO Ditto F2SA2 FCSG FedAvg
    FedAvgSaddle FedBiO FedBiOLocal FedDRSCGD FedProx LAASFBO LFedNestNonAlt LocalBSGM LocalBSGVR LocalSCGDM
    MEHA MomentumLocalSGDA NASA ParallelSGD QFedAvg Scaffold ScaffoldSaddle ShroFBO SimFBO VPBGD
"""


@pytest.mark.slow
@pytest.mark.parametrize(("name", "kind"), cases.pairs())
def test_which_methods(name: str, kind: str) -> None:
    """Quick tests run four of them, and refuse one for each reason."""
    case, algorithm = cases.case(kind, clients=6), cases.method(name)
    run = lambda: rk.solve(
        case.problem, case.clients(), algorithm, case.init, 4, cohort=3,
        clock=rk.Clock(latency=[1.0, 1.7, 0.3, 2.9, 1.1, 0.9]), asynchronous=rk.Asynchronous(buffer=2, staleness=0.0),
    )  # fmt: skip
    if name not in ALLOWED.split():
        reasons = f"(asynchronous must be None for|clock must be None).*{name}|how much a client|needs all 6 clients"
        with pytest.raises(ValueError, match=reasons):
            run()
        return
    found = run()
    assert found.rounds == 4
    assert np.isfinite(np.concatenate([np.ravel(leaf) for leaf in jax.tree.leaves(found.state)])).all()


class _State(NamedTuple):
    x: Any
    y: Any = ()


@dataclass(frozen=True)
class Directions:
    """The server draws a direction, clients reply with the slope along it, and the server steps along it."""

    sends: Literal["numbers", "key"] = "numbers"
    solves: ClassVar = (rk.SingleLevel,)

    def init(self, fed: Any, x: Any, y: Any, key: Any) -> Any:
        return _State(x)

    def round(self, fed: Any, state: Any, key: Any) -> Any:
        own, shared = jax.random.split(key)
        direction = lambda: jax.random.normal(shared, state.x.shape)
        drawn = direction()
        along = lambda: drawn if self.sends == "numbers" else direction()
        slope = lambda c, k: jnp.vdot(c.f_x(state.x, (), c.upper(k, None)), along())
        return _State(state.x - 0.1 * fed.mean(fed.map(slope, own)) * drawn)


REFUSED: dict[str, tuple[Any, dict[str, Any], str]] = {
    "a direction that the server draws": (Directions(), {}, "the server draws numbers, sends them"),
    "a direction that all draw": (Directions(sends="key"), {}, "the server draws numbers, sends them"),
    "more than one exchange": (rk.FedSVRG(), {}, 'one exchange.*it has those named "h", "x"'),
    "a larger buffer": (rk.FedAvg(), {"asynchronous": rk.Asynchronous(buffer=6)}, "at most the 5 clients.*got 6"),
    "no clock": (rk.FedAvg(), {"clock": None}, "needs the speeds of clients; got clock=None"),
    "no time": (rk.FedAvg(), {"clock": rk.Clock(latency=[1, 1, 0, 1, 1])}, "got one that takes 0 s"),
    "faults": (rk.FedAvg(), {"faults": rk.Faults(dropout=0.1)}, "faults must be None in an asynchronous run"),
    "a budget": (rk.FedAvg(), {"channel": rk.private(8, 1e-3, clip=1.0)}, "clock must be None in a private run"),
    "a median": (rk.FedAvg(), {"channel": rk.median()}, "needs every reply.*by itself"),
    "a secure sum": (
        rk.FedAvg(), {"channel": rk.chain(rk.clip(1.0), rk.secure_sum()), "asynchronous": rk.Asynchronous(3)},
        "reply to the same request",
    ),
    "relative to results": (
        rk.FedAvg(), {"channel": rk.top_k(0.5, feedback="aggregate")}, "must have a channel without `public`",
    ),
    "staleness of control variates": (rk.Scaffold(), {"cohort": 3}, "count alike for Scaffold.*Give staleness=0"),
    "too few for memory": (rk.Ditto(), {}, r"cohort \+ buffer must be at most the 5 clients"),
    "the result in the same round": (rk.FineTuned(), {}, "need the result of the exchange in the same round"),
    "needs synchronous rounds": (rk.PDSGD(), {}, "asynchronous must be None for PDSGD, which needs synchronous rounds"),
    "no time in a later round": (
        rk.FedAvg(), {"clock": rk.Clock(latency=[[1] * 5, [1, 1, 0, 1, 1]])}, "got one that takes 0 s",
    ),
    "a mesh": (rk.FedAvg(), {"engine": rk.Simulation(mesh=2)}, "mesh must be left out"),
    "memory on the host": (rk.Ditto(), {"engine": rk.Simulation(memory="host")}, 'memory must be "device"'),
    "debugging": (rk.FedAvg(), {"engine": rk.Simulation(debug=True)}, "clock must be None with debug=True"),
    "another type": (rk.FedAvg(), {"asynchronous": 3}, "asynchronous must be rk.Asynchronous"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_refusals(name: str) -> None:
    method, given, says = REFUSED[name]
    how: Any = {"clock": CLOCK, "asynchronous": rk.Asynchronous(buffer=BUFFER), **given}
    with pytest.raises((ValueError, TypeError), match=says):
        rk.solve(SQUARES, CLIENTS, method, START, 3, **how)


def test_a_buffer_of_replies_that_are_too_old_fails() -> None:
    """The slow client's reply is two steps old when it comes."""
    clients, clock = rk.Clients(upper=ROWS[:2]), rk.Clock(latency=[1.0, 2.5])
    how = rk.Asynchronous(buffer=1, oldest=1)
    with pytest.raises(rk.RoundFailedError, match="round 3: an exchange got 0 replies"):
        rk.solve(SQUARES, clients, rk.FedAvg(), START, 5, clock=clock, asynchronous=how)


BAD: list[dict[str, Any]] = [
    {"buffer": 0},
    {"buffer": 2.5},
    {"buffer": 1, "staleness": -1},
    {"buffer": 1, "oldest": -1},
]


@pytest.mark.parametrize("given", BAD)
def test_bad_settings(given: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"Asynchronous: \w+ must be"):
        rk.Asynchronous(**given)


def test_compressed_and_clipped_replies() -> None:
    """Error feedback stays with the client, and clipping acts on the difference to the model that the client had."""
    channel = rk.chain(rk.clip(1e-3), rk.top_k(0.5))
    given: Any = {"cohort": 2, "clock": CLOCK, "channel": channel, "asynchronous": rk.Asynchronous(buffer=2)}
    with rk.session(SQUARES, CLIENTS, rk.FedAvg(step=0.5), START, **given) as run:
        run.advance()
        assert 0 < np.linalg.norm(np.asarray(run.state.x) - START) <= 1e-3
        assert run.advance(149) == 149
        assert bool(jnp.all(jnp.isfinite(run.state.x)))
