"""What a plan allows, by hand; and requests that ask for something else. test_hosts.py runs every algorithm guarded."""

import dataclasses
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tests.engines.federation.studies import in_memory, responders, without_data

import rookery as rk
from rookery.engines import engine
from rookery.engines.checks import start_values
from rookery.engines.engine import Job
from rookery.engines.federation import wire
from rookery.engines.federation.dataflow import ROW, SENT, sources
from rookery.language.fed import PerClient
from rookery.plan.calls import CenterCall
from rookery.testing.runs import agree, outcome


class State(NamedTuple):
    x: Any
    y: tuple[()] = ()


@dataclass(frozen=True)
class Remembering:
    """A method with memory, without its round."""

    step: float = 0.1

    solves: ClassVar[tuple[type, ...]] = (rk.SingleLevel,)

    def memory(self, x: Any, y: Any) -> Any:
        return jnp.zeros_like(x)

    def init(self, fed: Any, x: Any, y: Any, key: Any) -> State:
        return State(x)


class Winding(Remembering):
    """A value of the clients that goes through a loop of drawn length, memory, a gather, a scatter, another cohort."""

    def round(self, fed: Any, state: State, key: Any) -> State:
        x = state.x
        first = fed.map_state(lambda c, k, m: (c.f_x(x, (), c.upper(k)), m + 1), key)

        def turn(i: Any, both: Any) -> Any:
            own, x = both
            x = x - self.step * fed.mean(own, name="inside")
            return fed.map(lambda c, k, v: 0.5 * v + c.f_x(x, (), c.upper(k)), key, own), x

        turns = 1 + jax.random.randint(key, (), 0, 2)
        own, x = fed.loop(turns, turn, (first, x))
        rows = fed.gather(own, name="seen")
        back = fed.map(lambda c, k, v, row: v * row, key, own, fed.scatter(rows))
        fresh = fed.resample(jax.random.fold_in(key, 1))
        x = x - self.step * fed.mean(back, name="back")
        x = x - self.step * fresh.mean(fresh.map(lambda c, k: c.f_x(x, (), c.upper(k)), key), name="fresh")
        return State(x - self.step * fed.center(lambda c, k: c.f_x(x, (), c.upper(k)), key, name="judge"))


PROBLEM = rk.SingleLevel(lambda x, b: jnp.mean(jnp.square(x - b)))
DATA = [np.arange(float(2 * n)).reshape(n, 2) for n in (2, 3, 4)]


def job(channel: Any = None, algorithm: Any = None, **given: Any) -> Job:
    clients = rk.Clients(upper=DATA, center=DATA[0], center_client=1)
    start = start_values(PROBLEM, clients, np.ones(2))
    return Job(PROBLEM, clients, algorithm or Winding(), start, 2, 3, channel, **given)


def test_what_a_plan_allows_by_hand() -> None:
    plan = engine.traced(job()).round
    named = {call.exchange.name: call.number for call in plan.body.calls if hasattr(call, "exchange")}
    found = sources(plan)
    maps = [number for number in sorted(found.sent) if number != named["judge"]]
    first, inner, back, fresh = maps
    replies = {name: found.replies[number] for name, number in named.items()}
    either = frozenset([("m", first, 0), ("m", inner, 0)])  # of the first turn, and of those after it
    assert replies["inside"] == [either]
    assert replies["seen"] == [either]  # the loop may have no turn, for all that the plan says
    assert replies["back"] == [frozenset([("m", back, 0)])]
    assert replies["fresh"] == [frozenset([("m", fresh, 0)])]
    assert replies["judge"] == [frozenset([("m", named["judge"], 0)])]
    assert found.local[first] == [frozenset([("memory", 0)])]
    assert found.local[inner] == [either]
    assert found.local[back] == [either, frozenset([ROW])]
    assert found.remembered == {"memory": [frozenset([("m", first, 1)])], "client": []}
    constants = {("c", i) for i in range(len(plan.consts))}
    assert {source for operands in found.sent.values() for each in operands for source in each} - constants == {SENT}
    assert all(len(each) == 1 for operands in found.sent.values() for each in operands)
    times = {name: found.times[number] for name, number in named.items()}
    assert times == {"inside": None, "seen": 1, "back": 1, "fresh": 1, "judge": 1}


@pytest.mark.slow
def test_a_guarded_run_gives_what_the_simulation_gives() -> None:
    what = dataclasses.replace(job(rk.chain(rk.clip(1.0), rk.gaussian(0.1))), noise_seed=5)
    own = responders(what)
    agree(outcome(rk.Simulation(), what), outcome(in_memory(own), without_data(what), responders=own))


class Two(Remembering):
    """Two exchanges, of which one sends a part of what was computed; and memory."""

    def round(self, fed: Any, state: State, key: Any) -> State:
        x = state.x

        def both(c: Any, k: Any, m: Any) -> Any:
            direction = c.f_x(x, (), c.upper(k, 1))
            return (direction, m), m + direction

        made = fed.map_state(both, key)
        direction, secret = (PerClient(rows) for rows in made.rows)
        mean = fed.mean(direction, name="direction")
        then = fed.map(lambda c, k, own: jnp.sum(mean * own), key, secret)
        return State(x - self.step * (mean + fed.mean(then, name="then")))


def on(name: str, header: Any) -> bool:
    """Whether it is the request of the exchange: the clip's function is the last of the maps."""
    return header["do"] == "work" and header["phase"] == 1 and header["call"] == CALLS[name]


CALLS: dict[str, int] = {}


def changed(header: Any, **new: Any) -> Any:
    return {**header, **new}


def with_map(header: Any, i: int, place: int, value: Any) -> Any:
    maps = [list(m) for m in header["maps"]]
    maps[i][place] = value
    return changed(header, maps=maps)


MEDDLING: dict[str, tuple[str, Any, str]] = {
    "not clipped": (
        "direction",
        lambda h: changed(h, reply=[["m", h["maps"][0][0], 0]]),
        "reply to 'direction' must have the plan's values",
    ),
    "kept": (
        "direction",
        lambda h: changed(h, reply=[["m", h["maps"][0][0], 1]]),
        "reply to 'direction' must have the plan's values",
    ),
    "memory": (
        "direction",
        lambda h: changed(h, reply=[["memory", 0]]),
        "reply to 'direction' must have the plan's values",
    ),
    "two": (
        "direction",
        lambda h: changed(h, reply=h["reply"] * 2),
        "reply to 'direction' must have the plan's values",
    ),
    "another's": ("direction", lambda h: changed(h, call=CALLS["then"]), "reply to 'then' must have the plan's values"),
    "at the end": ("direction", lambda h: changed(h, call=-1), "not an exchange of the plan"),
    "unknown": ("direction", lambda h: changed(h, call=999), "not an exchange of the plan"),
    "no function": ("direction", lambda h: with_map(h, 0, 1, CALLS["then"]), "not a client's function"),
    "another function": ("direction", lambda h: with_map(h, 1, 1, h["maps"][0][1]), "function"),
    "a constant": (
        "direction",
        lambda h: with_map(h, 0, 2, [["c", 0]] * len(h["maps"][0][2])),
        "must be sent the plan's server values",
    ),
    "fewer": ("direction", lambda h: with_map(h, 0, 2, []), "must be sent the plan's server values"),
    "no key": ("direction", lambda h: with_map(h, 0, 3, False), "must be given a key, as in the plan"),
    "own": (
        "direction",
        lambda h: with_map(h, 1, 4, [["m", h["maps"][0][0], 1]]),
        "must be given the plan's client values",
    ),
    "from memory": (
        "direction",
        lambda h: with_map(h, 1, 4, [["memory", 0]]),
        "must be given the plan's client values",
    ),
    "not there": ("direction", lambda h: with_map(h, 1, 4, [["m", 12345, 0]]), ""),  # it asks for everything
    "a row": ("direction", lambda h: with_map(h, 1, 4, ["row"]), "must be given the plan's client values"),
    "writes": ("direction", lambda h: changed(h, memory=[h["reply"][0]], client=[]), "at a time other"),
    "no map": ("direction", lambda h: changed(h, maps=[[1, 2, 3]]), "must have the fields of the protocol"),
    "no reference": ("direction", lambda h: changed(h, reply=[["m", 1]]), "must have the fields of the protocol"),
    "phase": ("direction", lambda h: changed(h, phase=7), "must be a message of the protocol"),
    "other memory": ("finish", lambda h: changed(h, memory=[["memory", 1]]), "not in the plan"),
    "more memory": ("finish", lambda h: changed(h, memory=h["memory"] * 2), "not in the plan"),
    "asks at the end": ("finish", lambda h: changed(h, reply=h["memory"]), "not an exchange of the plan"),
}


def test_what_the_plan_does_not_do_is_refused_and_changes_nothing() -> None:
    what = job(rk.clip(0.5), Two())
    plan = engine.traced(what).round
    CALLS.update({c.exchange.name: c.number for c in plan.body.calls if hasattr(c, "exchange")}, finish=-1)
    here = outcome(rk.Simulation(), what)
    own, done = responders(what), set()

    def ask(i: int, message: bytes) -> bytes:
        header, arrays = wire.decode(message)
        for name, (exchange, change, why) in MEDDLING.items():
            if header["do"] == "work" and on(exchange, header) and (exchange != "finish" or "memory" in header):
                said, sent = wire.decode(own[i].handle(wire.encode(change(header), arrays)))
                assert said["answer"] == ("refused" if why else "resync"), name
                assert why in said.get("why", ""), (name, said)
                assert sent == []
                done.add(name)
        answer = own[i].handle(message)
        if header["do"] == "work" and on("direction", header):
            assert own[i].handle(message) == answer  # who asks again gets the same again
            again, values = elsewhere(header, arrays)
            said, sent = wire.decode(own[i].handle(wire.encode(again, values)))
            assert (said["answer"], sent) == ("refused", [])
            assert "'direction' more often than in the plan" in said["why"]
        return answer

    def elsewhere(header: Any, arrays: Any) -> Any:
        """The same request, of the same round, at another point."""
        new = lambda number: number + 10**6 if isinstance(number, int) else number  # a constant stays
        moved = lambda ref: ["m", new(ref[1]), ref[2]] if ref[0] == "m" else ref
        maps = [
            [new(n), call, [new(v) for v in sent], key, [moved(ref) for ref in refs]]
            for n, call, sent, key, refs in header["maps"]
        ]
        reply, values = [moved(ref) for ref in header["reply"]], [new(v) for v in header["values"]]
        return changed(header, maps=maps, reply=reply, values=values), [arrays[0] + 1, *arrays[1:]]

    federation = in_memory(own)
    federation.transport._ask = ask
    there = outcome(federation, without_data(what), responders=own)
    agree(here, there)
    assert done == set(MEDDLING)


def test_the_center_is_for_its_holder_alone() -> None:
    what = job()
    own, tried = responders(what), []

    def ask(i: int, message: bytes) -> bytes:
        header, _ = wire.decode(message)
        if header["do"] == "work" and header["phase"] == 1 and i == 1 and header["call"] == max(named):
            for other in (0, 2):
                said, _ = wire.decode(own[other].handle(message))
                tried.append(said.get("why"))
        return own[i].handle(message)

    named = [call.number for call in engine.traced(what).round.body.of(CenterCall)]
    federation = in_memory(own)
    federation.transport._ask = ask
    outcome(federation, without_data(what), rounds=1, responders=own)
    assert tried
    assert all("'judge' must be computed by the site with the centre's data" in why for why in tried)


@pytest.mark.parametrize("number", [-1, 1])
def test_a_function_that_no_plan_has_is_refused_in_words(number: int) -> None:
    what = job()
    own = responders(what)
    session: Any = in_memory(own).open(without_data(what))
    header = {"do": "work", "number": 1, "run": session.coordinator.run, "phase": number, "round": 0, "maps": []}
    header |= {"values": [], "keep": [], "held": [], "call": 0, "reply": [["memory", 0]]}
    said, arrays = wire.decode(own[0].handle(wire.encode(header, [])))
    assert (said["answer"], arrays) == ("refused", [])
