"""Asynchronous rounds of a federation: FedBuff written out in NumPy, with replies that arrive in an order we choose."""

import dataclasses
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from tests.engines.federation.studies import responders, without_data
from tests.golden import quadratics as q

import rookery as rk
from rookery.engines.checks import start_values
from rookery.engines.engine import Job
from rookery.engines.federation import wire
from rookery.engines.federation.audit import Audit
from rookery.engines.federation.policy import Policy, PolicyGuard
from rookery.engines.federation.transports import Event
from rookery.engines.federation.transports.memory import Memory

N, BUFFER, ROUNDS = q.N_CLIENTS, 2, 8
ORDER = (2, 0, 2, 2, 4, 0, 1, 2, 4, 3, 0, 0, 2, 4, 1, 2, 3, 0)  # of replies: site 2 is the fastest, and site 3 the slowest
SLOW = (2, 0, 2, 2, 4, 0, 1, 2, 4, 0, 2, 2, 4, 1, 2, 0, 3, 0)
ROWS = [np.random.default_rng(m).normal(m % 4, 1.0, (m, 2)) for m in (1, 3, 40, 7, 200)]
SQUARES = rk.SingleLevel(lambda x, b: ((x - b) ** 2).sum(-1).mean() / 2)
CLIENTS = rk.Clients(upper=ROWS, weights=q.WEIGHTS)
START = np.array([3.0, -1.0])
State = tuple[np.ndarray, ...]


class Paced(Memory):
    """Sites whose replies in rounds arrive in a given order; everything else is answered at once.

    `before(count, transport)`: called before the reply with this number, from 0, is received; events that it puts into
    `events` come first.
    """

    def __init__(self, sites: list[Any], order: Any, before: Callable[[int, Any], None] = lambda *_: None) -> None:
        super().__init__(len(sites), lambda i, message: bytes(sites[i].handle(message)), [s.name for s in sites])
        self.rejoins = True
        self.order, self.before, self.count = deque(order), before, 0
        self.working: dict[int, bytes] = {}
        self.events = deque[Event]()
        self.asked: list[tuple[int, int]] = []  # the site and the round of each request in a round

    def send(self, site: int, message: Any) -> None:
        header, _ = wire.decode(message)
        if header["do"] == "work" and header["phase"] == 1:
            assert site not in self.working, "a site has two requests at the same time"
            self.working[site] = message
            self.asked.append((site, header["round"]))
        else:
            self.events.append(Event(site, "reply", self._ask(site, message)))

    def receive(self, seconds: float) -> Event | None:
        if not self.events and self.working and seconds > 0:
            self.before(self.count, self)
        if self.events:
            return self.events.popleft()
        if not self.working or not seconds:
            return None
        site = next(i for i in self.order if i in self.working)
        self.order.remove(site)
        self.count += 1
        self.events.append(Event(site, "reply", self._ask(site, self.working.pop(site))))
        return self.events.popleft()


def job(problem: Any, clients: Any, method: Any, init: Any, buffer: int = BUFFER, channel: Any = None, **how: Any) -> Job:
    asynchronous = rk.Asynchronous(buffer, **how)
    start = start_values(problem, clients, init)
    return Job(problem, clients, method, start, clients.n, 4, channel, asynchronous=asynchronous)


def averaging(**how: Any) -> Job:
    return job(SQUARES, CLIENTS, rk.FedAvg(step=0.2, local_steps=3), START, **how)


def steps_of_averaging(i: int, state: State) -> State:
    x = state[0]
    for _ in range(3):
        x = x - 0.2 * (x - ROWS[i].mean(0))
    return (x - state[0],)


def played(what: Job, transport: Memory, rounds: int = ROUNDS) -> tuple[list[Any], list[float], Any]:
    """The state after each round, the mean staleness in each, and the session."""
    session: Any = rk.Federation(transport=transport, patience=0.0).open(without_data(what))
    session.init()
    states, late = [], []
    for _ in range(rounds):
        (cost,) = session.advance(1)
        states.append(session.state)
        late.append(cost.staleness)
    return states, late, session


def fedbuff(
    start: State, reply: Callable[[int, State], State], step: Callable[[State, State], State], order: Any,
    a: float = 0.5, oldest: float = np.inf,
) -> Iterator[tuple[State, float]]:  # fmt: skip
    """The state after each round, and its mean staleness. `reply(i, state)`: the differences that client i sends."""
    state, t, arriving = start, 0, iter(order)
    at_work = {i: (0, reply(i, start)) for i in range(N)}
    while True:
        buffer = []
        while len(buffer) < BUFFER:
            i = next(arriving)
            buffer.append((i, t - at_work[i][0], at_work[i][1]))
            if len(buffer) < BUFFER:
                at_work[i] = (t, reply(i, state))
        p = np.array([q.WEIGHTS[i] for i, _, _ in buffer])
        s = np.array([(1 + late) ** -a if late <= oldest else 0.0 for _, late, _ in buffer])
        parts = zip(*(differences for _, _, differences in buffer), strict=True)
        means = [sum(w * d for w, d in zip(p * s / p.sum(), part, strict=True)) for part in parts]
        state, t = step(state, tuple(means)), t + 1
        at_work[buffer[-1][0]] = (t, reply(buffer[-1][0], state))
        yield state, float(np.mean([late for _, late, _ in buffer]))


def assert_same(expected: Iterator[tuple[State, float]], states: list[Any], late: list[float], names: str) -> None:
    for (wanted, staleness), state, found in zip(expected, states, late, strict=False):
        assert found == staleness
        for name, value in zip(names, wanted, strict=True):
            np.testing.assert_allclose(getattr(state, name), value, rtol=1e-10, atol=1e-10)
    assert np.abs(states[-1].x - states[0].x).max() > 1e-3


@pytest.mark.parametrize("how", [{}, {"staleness": 0.0}, {"oldest": 3}], ids=["by staleness", "alike", "recent"])
def test_fedavg(how: dict[str, Any]) -> None:
    order = SLOW if how else ORDER
    own = responders(what := averaging(**how))
    states, late, session = played(what, Paced(own, order))
    settings = how.get("staleness", 0.5), how.get("oldest", np.inf)
    step = lambda state, moved: (state[0] + moved[0],)
    assert_same(fedbuff((START,), steps_of_averaging, step, order, *settings), states, late, "x")
    assert max(late) > 2
    session.close()
    assert all(site.done and not site.reason for site in own)


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
    method = rk.FedBiO(upper_step=eta, lower_step=gamma, linear_step=tau, local_steps=3)
    projected = rk.Bilevel(q.BILEVEL.upper, q.BILEVEL.lower, project_upper=q.project)
    what = job(projected, clients, method, q.INIT)
    states, late, _ = played(what, Paced(responders(what), ORDER))
    assert_same(fedbuff((x, y, np.zeros_like(y)), reply, step, ORDER), states, late, "xyu")


CHANNELS = {"plain": None, "compressed": rk.chain(rk.clip(0.5), rk.quantize(8))}


@pytest.mark.parametrize("channel", CHANNELS)
def test_the_same_as_in_simulation(channel: str) -> None:
    """With minibatches: a site that begins twice with one model draws anew. In one process, sites take turns."""
    given: dict[str, Any] = {
        "rounds": 7, "seed": 3, "channel": CHANNELS[channel], "asynchronous": rk.Asynchronous(3, 1.0),
        "noise_seed": None if channel == "plain" else 5, "progress": False,
    }  # fmt: skip
    method, clock = rk.FedAvg(step=0.1, local_steps=2, batch_size=2), rk.Clock(latency=1 + np.arange(N) / 1000)
    here = rk.solve(SQUARES, CLIENTS, method, START, **given, clock=clock)
    there = rk.solve(SQUARES, CLIENTS, method, START, **given, engine=rk.Federation())
    np.testing.assert_allclose(there.x, here.x, rtol=1e-10)
    for column in ("exchanges", "bytes_up", "bytes_down", "staleness"):
        assert here.history[column].tolist() == there.history[column].tolist(), column
    assert here.history["staleness"].max() == 1


def test_what_is_counted_is_what_is_sent() -> None:
    _, _, session = played(averaging(), Paced(responders(averaging()), ORDER))
    wired, size = session.coordinator, START.nbytes
    assert (wired.sent, wired.received) == ((N - 1 + ROUNDS * BUFFER) * size, ROUNDS * BUFFER * size)


def test_repeated_late_and_forged_replies_change_nothing() -> None:
    states, _, _ = played(averaging(), Paced(responders(averaging()), ORDER))
    seen: list[tuple[int, bytes]] = []

    class Noisy(Paced):
        def receive(self, seconds: float) -> Event | None:
            event = super().receive(seconds)
            if event is not None and self.count and not self.events:
                site, reply = event.site, bytes(event.message)
                header, arrays = wire.decode(reply)
                wrong = wire.encode(header, [a + 9 for a in arrays])
                self.events += [Event(site, "reply", reply)]  # once more
                self.events += [Event(other, "reply", wrong) for other in range(N) if other != site]
                self.events += [Event(site, "reply", old) for _, old in seen[-3:]]
                seen.append((site, reply))
            return event

    again, _, session = played(averaging(), Noisy(responders(averaging()), ORDER))
    np.testing.assert_array_equal([state.x for state in again], [state.x for state in states])
    assert session.coordinator.links.dropped > 5 * ROUNDS


@pytest.mark.parametrize("what", ["shape", "not a message"])
def test_a_wrong_reply_ends_the_run_and_the_site_is_named(what: str) -> None:
    def broken(count: int, transport: Paced) -> None:
        if count == 5:
            site = next(i for i in transport.order if i in transport.working)
            header, arrays = wire.decode(transport._ask(site, transport.working.pop(site)))
            message = wire.encode(header, [a[:1] for a in arrays]) if what == "shape" else b"?"
            transport.events.append(Event(site, "reply", message))

    said = "site-0 replies to 'x'" if what == "shape" else "site-0 sends something that is not a message"
    with pytest.raises(RuntimeError, match=said):
        played(averaging(), Paced(responders(averaging()), ORDER, broken))


def test_values_that_are_not_finite_end_the_run_and_the_site_is_named() -> None:
    def broken(count: int, transport: Paced) -> None:
        if count == 3:
            site = next(i for i in transport.order if i in transport.working)
            header, arrays = wire.decode(transport._ask(site, transport.working.pop(site)))
            transport.events.append(Event(site, "reply", wire.encode(header, [a * np.nan for a in arrays])))

    transport = Paced(responders(averaging()), ORDER, broken)
    session: Any = rk.Federation(transport=transport, patience=0.0).open(without_data(averaging()))
    session.init()
    session.advance(ROUNDS)
    assert session.rounds == 1
    assert "site-2 replies to 'x' with a value that is not finite" in session.stopped.reason


def test_a_site_that_leaves_and_comes_back_gets_the_newest_model() -> None:
    def leaves(count: int, transport: Paced) -> None:
        if count == 2 and 1 in transport.working:
            del transport.working[1]  # its request and the reply are lost
            transport.events.append(Event(1, "gone", b"has lost its connection"))
        if count == 9 and 1 not in transport.working:
            transport.events.append(Event(1, "here"))

    order = [i for i in ORDER if i != 1][:9]
    order += [1, 2, 0, 3, 1, 4, 2]
    own = responders(what := averaging())
    transport = Paced(own, order, leaves)
    states, late, _ = played(what, transport)
    back = 9 // BUFFER
    rounds = [t for site, t in transport.asked if site == 1]
    assert rounds[:2] == [0, back], "in the round of its return, and not before"
    # The same without the site, until it is back: then it has the newest model.
    state, t, at_work, arriving, found = (START,), 0, {i: (0, steps_of_averaging(i, (START,))) for i in range(N)}, 0, []
    for i in order:
        if arriving == 9:
            at_work[1] = (t, steps_of_averaging(1, state))
        arriving += 1
        found.append((i, t - at_work[i][0], at_work[i][1][0]))
        if len(found) == BUFFER:
            p = np.array([q.WEIGHTS[i] for i, _, _ in found])
            s = np.array([(1 + each) ** -0.5 for _, each, _ in found])
            assert late[t] == np.mean([each for _, each, _ in found])
            state, found, t = (state[0] + (p * s / p.sum()) @ [d for _, _, d in found],), [], t + 1
            np.testing.assert_allclose(states[t - 1].x, state[0], rtol=1e-10, atol=1e-10)
        at_work[i] = (t, steps_of_averaging(i, state))
    assert t == ROUNDS


def test_a_reply_to_a_request_that_is_lost_is_dropped() -> None:
    """A connection is lost and found again while the site computes: it is asked for the same once more."""

    def reconnects(count: int, transport: Paced) -> None:
        if count == 1 and 2 in transport.working and not transport.asked.count((2, 0)) > 2:
            old = transport._ask(2, transport.working.pop(2))
            transport.events += [Event(2, "gone", b"is gone"), Event(2, "here"), Event(2, "reply", old)]

    straight, _, _ = played(averaging(), Paced(responders(averaging()), ORDER))
    own = responders(averaging())
    transport = Paced(own, ORDER, reconnects)
    states, _, session = played(averaging(), transport)
    np.testing.assert_array_equal([state.x for state in states], [state.x for state in straight])
    assert session.coordinator.links.dropped == 1


def test_with_too_few_sites_the_run_pauses() -> None:
    def leave(count: int, transport: Paced) -> None:
        if count == 6:
            for site in [0, 1, 3, 4]:
                transport.working.pop(site, None)
                transport.events.append(Event(site, "gone", b"has lost its connection"))
            transport.before = lambda *_: None

    with pytest.raises(RuntimeError, match="site-0 has lost its connection; site-1 has lost its connection"):
        played(averaging(), Paced(responders(averaging()), (*ORDER, 2, 2, 2, 2), leave))

    told: list[str] = []

    def returns(count: int, transport: Paced) -> None:
        if count == 6 and not told:
            leave(count, transport)
            transport.before = lambda *_: None
            transport.receive, transport.idle = idle.__get__(transport), 0

    def idle(transport: Any, seconds: float) -> Event | None:
        if transport.events:
            return transport.events.popleft()
        transport.idle += 1
        del transport.receive
        return Event(4, "here")

    transport = Paced(responders(averaging()), (*ORDER[:6], *(2, 4) * 5), returns)
    engine = rk.Federation(transport=transport, patience=5.0, tell=told.append)
    session: Any = engine.open(without_data(averaging()))
    session.init()
    session.advance(ROUNDS)
    assert session.rounds == ROUNDS
    assert [line for line in told if line.startswith("The run")] == [
        "The run pauses: 1 of 2 sites that it needs are there.",
        "The run goes on.",
    ]


def test_an_evaluation_at_the_clients_waits_for_all() -> None:
    what = dataclasses.replace(averaging(), measure=lambda client, x, y, memory: {"loss": client.f(x, y)})
    transport = Paced(responders(what), [*ORDER[:5], *range(N), *range(N), *ORDER])
    session: Any = rk.Federation(transport=transport, patience=0.0).open(without_data(what))
    session.init()
    session.advance(2)
    found, replied = session.measure()
    x = np.asarray(session.state.x)
    expected = [((x - rows) ** 2).sum(-1).mean() / 2 for rows in ROWS]
    np.testing.assert_allclose(found["loss"], expected, rtol=1e-10)
    assert replied.all()
    assert not transport.working
    late = [cost.staleness for cost in session.advance(3)]
    assert session.stopped is None
    assert late[0] > 0, "the replies that have arrived meanwhile are counted"
    found, _ = session.measure()
    x = np.asarray(session.state.x)
    np.testing.assert_allclose(found["loss"], [((x - rows) ** 2).sum(-1).mean() / 2 for rows in ROWS], rtol=1e-10)


def test_a_run_is_resumed_with_requests_for_the_newest_model(tmp_path: Any) -> None:
    given: Any = {"asynchronous": rk.Asynchronous(2), "checkpoint": tmp_path / "c", "progress": False, "every": 1}
    method = rk.FedAvg(step=0.2, local_steps=3)
    rk.solve(SQUARES, CLIENTS, method, START, 3, **given, engine=rk.Federation())
    run = rk.solve(SQUARES, CLIENTS, method, START, 5, **given, engine=rk.Federation())
    assert run.rounds == 5
    assert run.history["staleness"].tolist() == [0, 0, 1, 2, 0, 1], "2 without a resumption"


class TooLarge(Exception): ...


@pytest.mark.parametrize(
    ("method", "given", "said"),
    [
        (rk.FedAvg(step=0.2), {"cohort": 3}, "cohort must be all 5 clients in an asynchronous federation.*got 3"),
        (rk.FedAvg(step=0.2), {"clock": rk.Clock(compute=1.0)}, "clock must be None with rk.Federation"),
        (rk.Scaffold(step=0.2), {}, "asynchronous must be None for Scaffold here in a federation: its clients"),
        (rk.FedAvg(step=0.2), {"channel": rk.top_k(0.5, feedback="error")}, "in a federation: its clients, or their"),
        (rk.FedAvg(step=0.2), {"faults": rk.Faults(minimum=2)}, "faults must be None in an asynchronous run"),
        (rk.FedAvg(step=0.2), {"asynchronous": rk.Asynchronous(6)}, "buffer must be at most the 5 clients"),
    ],
)  # fmt: skip
def test_what_is_refused(method: Any, given: dict[str, Any], said: str) -> None:
    given = {"asynchronous": rk.Asynchronous(2, staleness=0.0), "engine": rk.Federation(), **given}
    with pytest.raises(ValueError, match=said):
        rk.solve(SQUARES, CLIENTS, method, START, 2, progress=False, **given)


@pytest.mark.parametrize(
    ("rules", "said"),
    [
        ({"minimum_cohort": 2}, "at least 2 clients in a round; got asynchronous rounds"),
        ({"rounds": 9, "evaluations": 9}, "limits rounds and not exchanges, and an asynchronous run may ask it several"),
        ({"rounds": 9, "exchanges": 3}, "its policy allows 3 exchanges"),
    ],
)
def test_what_a_policy_refuses(rules: dict[str, Any], said: str) -> None:
    own = responders(averaging(), guard=lambda i: PolicyGuard(Policy(**(rules if i == 2 else {})), Audit()))
    try:
        played(averaging(), Paced(own, ORDER))
    except (ValueError, RuntimeError) as error:
        assert said in str(error)
    assert any(said in reason for reason in [own[2].reason, *_refusals(own[2])])


def _refusals(site: Any) -> list[str]:
    return []


def test_a_site_answers_no_more_different_requests_in_a_round_than_the_round_has_replies() -> None:
    own = responders(averaging())
    transport = Paced(own, ORDER)
    played(averaging(), transport, 1)
    header, arrays = wire.decode(next(iter(transport.working.values())))
    site = next(iter(transport.working))

    def ask(value: float) -> dict[str, Any]:
        numbers = {old: 10_000 + old for old, *_ in header["maps"]}
        maps = [[numbers[old], *rest] for old, *rest in header["maps"]]
        reply = [[kind, numbers[number], output] for kind, number, output in header["reply"]]
        changed = {**header, "maps": maps, "reply": reply, "keep": [*numbers.values()], "number": 7}
        request = wire.encode(changed, [arrays[0] + value, *arrays[1:]])
        return wire.decode(own[site].handle(request))[0]

    answers = [ask(value) for value in (1.0, 2.0, 2.0, 1.0, 3.0)]
    assert [answer["answer"] for answer in answers] == ["value"] * 4 + ["refused"]
    assert "more often than in the plan" in answers[-1]["why"]
