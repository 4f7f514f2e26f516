"""Asynchronous rounds of a federation: FedBuff written out in NumPy, with replies that arrive in an order we choose."""

import dataclasses
import itertools
import time
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tests.engines.federation.processes import FORK, SECONDS, paced_site, server, with_a_common_minimiser
from tests.engines.federation.studies import responders, without_data
from tests.golden import quadratics as q

import rookery as rk
from rookery.engines import engine as engine_of
from rookery.engines.checks import start_values
from rookery.engines.engine import Job
from rookery.engines.federation import wire
from rookery.engines.federation.audit import Audit
from rookery.engines.federation.coordinator import Coordinator
from rookery.engines.federation.federation import _sites
from rookery.engines.federation.in_words import in_words_for_a_site as in_words
from rookery.engines.federation.links import Links
from rookery.engines.federation.policy import Policy, PolicyGuard
from rookery.engines.federation.session import Session
from rookery.engines.federation.transports import Event
from rookery.engines.federation.transports.memory import Memory
from rookery.engines.federation.transports.nvflare import Calls
from rookery.language.ledger import Ledger

N, BUFFER, ROUNDS = q.N_CLIENTS, 2, 8
# Of replies: site 2 is the fastest, and site 3 the slowest.
ORDER = (2, 0, 2, 2, 4, 0, 1, 2, 4, 3, 0, 0, 2, 4, 1, 2, 3, 0)
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
        names = [f"site-{i}" for i in range(len(sites))]
        super().__init__(len(sites), lambda i, message: bytes(sites[i].handle(message)), names)
        self.rejoins = True
        self.order, self.before, self.count = deque(order), before, 0
        self.working: dict[int, bytes] = {}
        self.events = deque[Event]()
        self.asked: list[tuple[int, int]] = []  # the site and the round of each request in a round
        self.gone: set[int] = set()

    def leave(self, site: int) -> None:
        self.working.pop(site, None)  # its request, and the reply, are lost
        self.gone.add(site)
        self.events.append(Event(site, "gone", b"has lost its connection"))

    def come(self, site: int) -> None:
        self.gone.discard(site)
        self.events.append(Event(site, "here"))

    def send(self, site: int, message: Any) -> None:
        header, _ = wire.decode(message)
        if site in self.gone:
            self.events.append(Event(site, "gone", b"is not connected"))
        elif header["do"] == "work" and header["phase"] == 1:
            assert site not in self.working, "a site has two requests at the same time"
            self.working[site] = message
            self.asked.append((site, header["round"]))
        else:
            self.events.append(Event(site, "reply", self._ask(site, message)))

    def receive(self, seconds: float) -> Event | None:
        if not self.events and seconds > 0:
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


def job(problem: Any, clients: Any, method: Any, init: Any, **how: Any) -> Job:
    asynchronous = rk.Asynchronous(BUFFER, **how)
    return Job(problem, clients, method, start_values(problem, clients, init), clients.n, 4, asynchronous=asynchronous)


def averaging(**how: Any) -> Job:
    return job(SQUARES, CLIENTS, rk.FedAvg(step=0.2, local_steps=3), START, **how)


def steps_of_averaging(i: int, state: State) -> State:
    x = state[0]
    for _ in range(3):
        x = x - 0.2 * (x - ROWS[i].mean(0))
    return (x - state[0],)


def opened(what: Job, transport: Any, own: Any = None, **given: Any) -> Any:
    """A session with these responders; or with sites of this process, which need not open the run."""
    if own is not None:
        engine: Any = rk.Federation(transport=transport(own), patience=0.0)
        return dataclasses.replace(engine, **given).open(without_data(what))
    traced = engine_of.traced(what)
    sites = _sites(traced, "run")
    links = Links(transport(sites), patience=given.pop("patience", 0.0), **given)
    return Session(traced, Coordinator(traced, "run", links), sites)


def played(
    what: Job, order: Any = ORDER, before: Any = lambda *_: None, own: Any = None, rounds: int = ROUNDS,
    kind: type[Paced] = Paced,
) -> tuple[list[Any], list[float], Any]:  # fmt: skip
    """The state after each round, the mean staleness in each, and the session."""
    session = opened(what, lambda sites: kind(sites, order, before), own)
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
    order, what = SLOW if how else ORDER, averaging(**how)
    seen: list[Any] = []
    own = None if how else responders(what, guard=lambda i: seen.append)
    states, late, session = played(what, order, own=own)
    assert how or "which ends after 2 replies, each client that is ready" in " ".join(in_words(seen[0]).split())
    settings = how.get("staleness", 0.5), how.get("oldest", np.inf)
    step = lambda state, moved: (state[0] + moved[0],)
    assert_same(fedbuff((START,), steps_of_averaging, step, order, *settings), states, late, "x")
    assert max(late) > 2
    session.close()
    assert all(site.done and not site.reason for site in own or ())


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
    states, late, _ = played(what)
    assert_same(fedbuff((x, y, np.zeros_like(y)), reply, step, ORDER), states, late, "xyu")


CHANNELS = {"plain": None, "compressed": rk.chain(rk.clip(0.5), rk.quantize(8))}


def test_a_site_that_begins_twice_with_one_model_draws_anew() -> None:
    class Tapped(Paced):
        def send(self, site: int, message: Any) -> None:
            super().send(site, message)
            if site == 2:
                sent.append(wire.decode(message)[1])

    sent: list[Any] = []
    what = dataclasses.replace(averaging(), algorithm=rk.FedAvg(step=0.2, batch_size=1))
    played(what, kind=Tapped, rounds=2)
    first, second, later = sent[-3:]
    np.testing.assert_array_equal(first[1], START)
    np.testing.assert_array_equal(second[1], START)
    assert not np.array_equal(later[1], START)
    key = engine_of.choice_and_key(jax.random.key(4), 0)[1]
    for again, found in ((key, first[-1]), (jax.random.fold_in(key, 1), second[-1])):
        np.testing.assert_array_equal(found, jax.random.key_data(jax.random.fold_in(again, 2)))


class Pulls(NamedTuple):
    x: Any
    y: Any
    targets: Any


@dataclasses.dataclass(frozen=True)
class Pulled:
    """Each client moves x halfway to a target of its own, which the server sends it."""

    def init(self, fed: rk.Fed, x: Any, y: Any, key: Any) -> Pulls:
        return Pulls(x, y, jnp.arange(2.0 * fed.n).reshape(fed.n, 2))

    def round(self, fed: rk.Fed, state: Pulls, key: Any) -> Pulls:
        targets = fed.scatter(state.targets[fed.ids])
        moved = fed.map(lambda client, key, target: (state.x + target) / 2, key, targets)
        return state._replace(x=fed.mean(moved, "x", around=state.x))


def test_what_the_server_sends_to_each_client_is_for_the_client_that_begins() -> None:
    what = job(SQUARES, CLIENTS, Pulled(), START)
    reply = lambda i, state: ((np.array([2.0 * i, 2 * i + 1]) - state[0]) / 2,)
    states, late, _ = played(what)
    assert_same(fedbuff((START,), reply, lambda state, moved: (state[0] + moved[0],), ORDER), states, late, "x")


@pytest.mark.slow
@pytest.mark.parametrize("channel", CHANNELS)
def test_the_same_as_in_simulation(channel: str) -> None:
    """With minibatches and, in one process, sites that take turns. The quick tests are those against NumPy."""
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
    assert here.history["staleness"].max() > 1


def test_what_is_counted_is_what_is_sent() -> None:
    session = opened(averaging(), lambda sites: Paced(sites, ORDER))
    ledger, wired = Ledger(), session.coordinator
    ledger.add([session.init()], N)
    ledger.add(session.advance(ROUNDS), BUFFER)
    assert (wired.sent, wired.received) == (ledger.counts["bytes_down"], ledger.counts["bytes_up"])
    assert wired.received == ROUNDS * BUFFER * START.nbytes


def test_repeated_late_and_forged_replies_change_nothing() -> None:
    states, _, _ = played(averaging())
    seen: list[tuple[int, bytes]] = []

    class Noisy(Paced):
        def receive(self, seconds: float) -> Event | None:
            count, event = self.count, super().receive(seconds)
            if event is not None and self.count > count:
                site, reply = event.site, bytes(event.message)
                header, arrays = wire.decode(reply)
                wrong = wire.encode(header, [a + 9 for a in arrays])
                self.events += [Event(site, "reply", reply)]  # once more
                self.events += [Event(other, "reply", wrong) for other in range(N) if other != site]
                self.events += [Event(site, "reply", old) for _, old in seen[-3:]]
                seen.append((site, reply))
            return event

    again, _, session = played(averaging(), kind=Noisy)
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
        played(averaging(), before=broken)


def test_values_that_are_not_finite_end_the_run_and_the_site_is_named() -> None:
    def broken(count: int, transport: Paced) -> None:
        if count == 3:
            site = next(i for i in transport.order if i in transport.working)
            header, arrays = wire.decode(transport._ask(site, transport.working.pop(site)))
            transport.events.append(Event(site, "reply", wire.encode(header, [a * np.nan for a in arrays])))

    session = opened(averaging(), lambda sites: Paced(sites, ORDER, broken), finite=True)
    session.init()
    session.advance(ROUNDS)
    assert session.rounds == 1
    assert "site-2 replies to 'x' with a value that is not finite" in session.stopped.reason


def test_a_site_that_leaves_and_comes_back_gets_the_newest_model() -> None:
    def leaves(count: int, transport: Paced) -> None:
        if count == 2 and 1 in transport.working:
            transport.leave(1)
        if count == 9 and 1 in transport.gone:
            transport.come(1)

    order = [i for i in ORDER if i != 1][:9]
    order += [1, 2, 0, 3, 1, 4, 2]
    own = responders(what := averaging())
    states, late, session = played(what, order, leaves, own)
    back = 9 // BUFFER
    rounds = [t for site, t in session.coordinator.links.transport.asked if site == 1]
    assert rounds[:2] == [0, back], "in the round of its return, and not before"
    # The same without the site, until it is back: then it has the newest model.
    at_work = {i: (0, steps_of_averaging(i, (START,))) for i in range(N)}
    state, t, found = (START,), 0, []
    for arriving, i in enumerate(order):
        if arriving == 9:
            at_work[1] = (t, steps_of_averaging(1, state))
        found.append((i, t - at_work[i][0], at_work[i][1][0]))
        if len(found) == BUFFER:
            p = np.array([q.WEIGHTS[i] for i, _, _ in found])
            s = np.array([(1 + each) ** -0.5 for _, each, _ in found])
            assert late[t] == np.mean([each for _, each, _ in found])
            state, found, t = (state[0] + (p * s / p.sum()) @ [d for _, _, d in found],), [], t + 1
            np.testing.assert_allclose(states[t - 1].x, state[0], rtol=1e-10, atol=1e-10)
        at_work[i] = (t, steps_of_averaging(i, state))
    assert t == ROUNDS


@pytest.mark.slow
def test_a_reply_to_a_request_that_is_lost_is_dropped() -> None:
    """A connection is lost and found again while the site computes: it is asked for the same once more.

    The quick tests are those of a site that leaves, and of late replies.
    """

    def reconnects(count: int, transport: Paced) -> None:
        if count == 1 and 2 in transport.working and not transport.asked.count((2, 0)) > 2:
            old = transport._ask(2, transport.working.pop(2))
            transport.events += [Event(2, "gone", b"is gone"), Event(2, "here"), Event(2, "reply", old)]

    straight, _, _ = played(averaging())
    states, _, session = played(averaging(), before=reconnects, own=responders(averaging()))
    np.testing.assert_array_equal([state.x for state in states], [state.x for state in straight])
    assert session.coordinator.links.dropped == 1


def test_a_reply_after_the_deadline_counts_like_any_other() -> None:
    def dawdles(count: int, transport: Paced) -> None:
        if count == 5 and not told:
            time.sleep(0.2)  # now all sites that are at work are late

    told: list[str] = []
    session = opened(
        averaging(), lambda sites: Paced(sites, ORDER, dawdles), deadline=0.2, patience=30.0, tell=told.append
    )
    session.init()
    session.advance(ROUNDS)
    assert "site-3 has not replied in 0.2 s." in told
    assert told[-1] == "The run goes on."
    np.testing.assert_array_equal(session.state.x, played(averaging())[0][-1].x)


def test_with_too_few_sites_the_run_pauses() -> None:
    def leave(count: int, transport: Paced) -> None:
        if count == 6 and not transport.gone:
            for site in (0, 1, 3, 4):
                transport.leave(site)

    with pytest.raises(RuntimeError, match=r"site-0 has lost its connection.*site-4 has lost its connection"):
        played(averaging(), (*ORDER[:6], 2, 2, 2), leave)

    told: list[str] = []

    def returns(count: int, transport: Paced) -> None:
        leave(count, transport)
        if count == 7 and 4 in transport.gone:
            transport.come(4)

    paced = lambda sites: Paced(sites, (*ORDER[:6], *(2, 4) * 7), returns)
    session = opened(averaging(), paced, patience=5.0, tell=told.append)
    session.init()
    session.advance(ROUNDS)
    assert session.rounds == ROUNDS
    assert [line for line in told if line.startswith("The run")] == [
        "The run pauses: 1 of the 2 sites that it needs are there.",
        "The run goes on.",
    ]


def test_an_evaluation_at_the_clients_waits_for_all() -> None:
    loss = lambda client, x, y, memory: {"loss": client.f(x, y, client.upper())}
    what = dataclasses.replace(averaging(), measure=loss)
    session = opened(what, lambda sites: Paced(sites, [*ORDER[:5], *range(N), *range(N), *ORDER]))
    session.init()
    session.advance(2)
    found, replied = session.measure()
    x = np.asarray(session.state.x)
    expected = [((x - rows) ** 2).sum(-1).mean() / 2 for rows in ROWS]
    np.testing.assert_allclose(found["loss"], expected, rtol=1e-10)
    assert replied.all()
    assert not session.coordinator.links.transport.working
    late = [cost.staleness for cost in session.advance(3)]
    assert session.stopped is None
    assert late[0] > 0, "the replies that have arrived meanwhile are counted"
    found, _ = session.measure()
    x = np.asarray(session.state.x)
    np.testing.assert_allclose(found["loss"], [((x - rows) ** 2).sum(-1).mean() / 2 for rows in ROWS], rtol=1e-10)


@pytest.mark.slow
def test_a_run_is_resumed_with_requests_for_the_newest_model(tmp_path: Any) -> None:
    """Quick tests resume asynchronous simulations and synchronous federations."""
    given: Any = {"asynchronous": rk.Asynchronous(2), "checkpoint": tmp_path / "c", "progress": False, "every": 1}
    method = rk.FedAvg(step=0.2, local_steps=3)
    rk.solve(SQUARES, CLIENTS, method, START, 3, **given, engine=rk.Federation())
    run = rk.solve(SQUARES, CLIENTS, method, START, 5, **given, engine=rk.Federation())
    assert run.rounds == 5
    assert run.history["staleness"].tolist() == [0, 0, 1, 2, 0, 1], "2 without a resumption"


@pytest.mark.parametrize(
    ("method", "given", "said"),
    [
        (rk.FedAvg(step=0.2), {"cohort": 3}, "cohort must be all 5 clients in an asynchronous federation.*got 3"),
        (rk.FedAvg(step=0.2), {"clock": rk.Clock(compute=1.0)}, "clock must be None with rk.Federation"),
        (rk.Scaffold(step=0.2), {}, "asynchronous must be None for Scaffold here in a federation: its cli"),
        (rk.Scaffold(step=0.2), {"asynchronous": rk.Asynchronous(2)}, "None for Scaffold here in a federation"),
        (rk.FedAvg(step=0.2), {"channel": rk.top_k(0.5, feedback="error")}, "its clients' side of the channel"),
        (rk.FedAvg(step=0.2), {"faults": rk.Faults(minimum=2)}, "faults must be None in an asynchronous run"),
        (rk.FedAvg(step=0.2), {"asynchronous": rk.Asynchronous(6)}, "buffer must be at most the 5 clients"),
    ],
)  # fmt: skip
def test_what_is_refused(method: Any, given: dict[str, Any], said: str) -> None:
    given = {"asynchronous": rk.Asynchronous(2, staleness=0.0), "engine": rk.Federation(), **given}
    with pytest.raises(ValueError, match=said):
        rk.solve(SQUARES, CLIENTS, method, START, 2, progress=False, **given)


def test_what_a_policy_refuses() -> None:
    rules: dict[int, dict[str, Any]] = {1: {"minimum_cohort": 2}, 2: {"rounds": 9, "evaluations": 9}}
    own = responders(averaging(), guard=lambda i: PolicyGuard(Policy(**rules.get(i, {})), Audit()))
    with pytest.raises(ValueError, match="at least 2 clients in a round; got asynchronous rounds") as found:
        played(averaging(), own=own)
    assert "its policy limits rounds and not exchanges, and an asynchronous run may ask it" in str(found.value)


@pytest.mark.slow
def test_a_site_whose_limit_is_reached_refuses_and_the_others_go_on() -> None:
    """The quick test is that of a site that leaves."""
    rules = Policy(rounds=9, exchanges=2)
    own = responders(averaging(), guard=lambda i: PolicyGuard(rules if i == 2 else Policy(), Audit()))
    _, _, session = played(averaging(), (2, 0, 2, 2, 4, 0, 1, 4, 3, 0, 0, 4, 1, 3, 0, 1, 1, 4), own=own)
    links = session.coordinator.links
    assert "limit of 2 exchanges" in links.records[2].why
    assert [site for site, _ in links.transport.asked].count(2) == 3


def test_a_site_answers_no_more_different_requests_in_a_round_than_the_round_has_replies() -> None:
    own = responders(averaging())
    _, _, session = played(averaging(), own=own, rounds=1)
    site, request = next(iter(session.coordinator.links.transport.working.items()))
    header, arrays = wire.decode(request)

    def ask(value: float) -> dict[str, Any]:
        """The same with another value, under other numbers."""
        new = itertools.count(10_000)
        numbers = dict(zip((old for old, *_ in header["maps"]), new, strict=False))
        known = lambda refs: [["m", numbers[ref[1]], ref[2]] if ref[0] == "m" else ref for ref in refs]
        maps = [[numbers[old], call, sent, key, known(local)] for old, call, sent, key, local in header["maps"]]
        changed = {**header, "maps": maps, "reply": known(header["reply"]), "keep": []}
        return wire.decode(own[site].handle(wire.encode(changed, [arrays[0] + value, *arrays[1:]])))[0]

    answers = [ask(value) for value in (1.0, 2.0, 2.0, 1.0, 3.0)]
    assert [answer["answer"] for answer in answers] == ["value"] * 4 + ["refused"]
    assert "more often than in the plan" in answers[-1]["why"]


@pytest.mark.slow
def test_one_of_four_processes_is_ten_times_slower(tmp_path: Path) -> None:
    """At equal replies the run is at least four times as fast. Without real time: `test_fedavg`."""

    def timed(asynchronous: Any, rounds: int) -> tuple[float, Any, Any]:
        what = with_a_common_minimiser(asynchronous)
        transport = server(tuple(f"site-{i}" for i in range(4)))
        given = asynchronous, str(tmp_path / "jax"), str(tmp_path / "log")
        processes = [
            FORK.Process(target=paced_site, args=(i, transport.address, 3.0 if i == 3 else 0.3, *given), daemon=True)
            for i in range(4)
        ]
        for process in processes:
            process.start()
        session: Any = rk.Federation(transport=transport, patience=SECONDS).open(without_data(what))
        try:
            session.init()
            begun = time.monotonic()
            costs = session.advance(rounds)
            seconds, state = time.monotonic() - begun, session.state
        finally:
            session.close()
        for process in processes:
            process.join(SECONDS)
            assert process.exitcode == 0, (tmp_path / "log").read_text()
        return seconds, state, costs

    together, state, _ = timed(None, 14)
    alone, late_state, costs = timed(rk.Asynchronous(buffer=2), 28)
    assert len(costs) == 28
    assert max(cost.staleness for cost in costs) > 4
    assert np.abs(state.x - 1).max() < 1e-3
    assert np.abs(late_state.x - 1).max() < 0.01 * 4, "less than 1% of the distance at the start"
    assert together > 4 * alone, (together, alone)


@pytest.mark.slow
def test_over_calls_of_flares_sites() -> None:
    """The quick tests are those of the calls by themselves."""

    def proxy(i: int) -> Any:
        def ask(message: bytes) -> bytes:
            header, _ = wire.decode(message)
            slow = i == 3 and header["do"] == "work" and header["phase"] == 1
            time.sleep(0.3 if slow else 0)
            return bytes(own[i].handle(message))

        return lambda timeout: SimpleNamespace(ask=ask)

    own = responders(what := averaging())
    calls = Calls([site.name for site in own], {site.name: proxy(i) for i, site in enumerate(own)}, 30.0)
    session: Any = rk.Federation(transport=calls).open(without_data(what))
    session.init()
    late = []
    while max(late, default=0) < 3 and session.rounds < 1000:  # until the slow site's first reply is counted
        (cost,) = session.advance(1)
        late.append(cost.staleness)
    assert max(late) >= 3
    assert [record.replies > 1 for record in session.coordinator.links.records] == [True] * N
    session.close()
    assert all(site.done and not site.reason for site in own)
