"""Methods between a coordinator and three processes, over gRPC: the same numbers and costs as in simulation."""

import dataclasses
import json
import threading
import time
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tests.engines.federation.processes import NAMES, Played, Process, federation, job, join, play, server
from tests.engines.federation.studies import responders, study, without_data

import rookery as rk
from rookery.engines.checks import start_values
from rookery.engines.engine import Job
from rookery.engines.federation import description, wire
from rookery.engines.federation.agreement import declared
from rookery.engines.federation.responder import Responder
from rookery.engines.federation.transports import grpc_site
from rookery.engines.federation.transports.memory import Memory
from rookery.language.channel import Plain
from rookery.language.ledger import Ledger
from rookery.testing.runs import close

pytestmark = pytest.mark.xdist_group("processes")

CASES: dict[str, dict[str, Any]] = {
    "local steps": {"name": "FedAvg"},
    "bilevel": {"name": "FedBiO"},
    "many exchanges": {"name": "FedNest"},
    "memory": {"name": "Ditto"},
    "two exchanges": {"name": "FedSVRG"},
    "compositional": {"name": "FedDRO"},
    "weighted nodes": {"name": "WeightedNodesProx", "center_client": 1},
}
FAST = ("memory",)


def counted(played: Played) -> tuple[dict[str, int], list[Any]]:
    ledger = Ledger()
    ledger.add(played.costs[:1], 3)
    ledger.add(played.costs[1:], 3)
    return ledger.counts, ledger.last


@pytest.mark.parametrize("name", [n if n in FAST else pytest.param(n, marks=pytest.mark.slow) for n in CASES])
def test_the_same_as_in_simulation(name: str, sites: list[Process]) -> None:
    what = job(**CASES[name])
    transport = server()
    for site in sites:
        site.join(CASES[name], transport.address)
    there = play(federation(transport, played := Played()), without_data(what), played=played)
    here = play(rk.Simulation(), what)
    told = [site.result() for site in sites]

    close(here.state, there.state)
    assert counted(here) == counted(there)
    wired = there.session.coordinator
    assert (wired.sent, wired.received) == (counted(there)[0]["bytes_down"], counted(there)[0]["bytes_up"])
    carry = here.carry
    for i, own in enumerate(told):
        close([np.array(leaf[i]) for leaf in jax.tree.leaves((carry.memory, carry.client))], own["memory"])
    assert told[0]["memory"] or name != "memory"

    assert there.compiled == 0
    for own in told:
        late = {moment: count for moment, count in own["compiled"].items() if moment > (1, 0) and moment[0] < 2}
        assert not late, f"compiled in {late}"

    asked = [own.replies for own in there.links.records]
    payload = wired.sent + wired.received
    measured, messages = there.links.sent + there.links.received, 2 * sum(asked)
    study = len(NAMES) * len(wire.encode(declared(what.problem).words(), []))  # which the opening has, once for each
    assert payload < measured < 1.05 * payload + 1024 * messages + study
    assert there.links.dropped == 0
    assert not there.lost
    assert [text for text in there.told if "is connected" in text] == [
        f"{name} is connected." for name in sorted(NAMES, key=lambda name: there.told.index(f"{name} is connected."))
    ]


class Stream:
    """What gRPC gives to the coordinator for a site's stream; `ends` is called when it has ended."""

    def __init__(self, name: str, ended: bool = False) -> None:
        self._name, self._ended = name, ended
        self._silent = threading.Event()

    def invocation_metadata(self) -> list[tuple[str, str]]:
        return [("site", self._name)]

    def send_initial_metadata(self, metadata: Any) -> None: ...

    def add_callback(self, callback: Any) -> bool:
        self.ends = callback
        return not self._ended

    def requests(self) -> Iterator[bytes]:
        self._silent.wait(10)
        yield from ()


@pytest.mark.parametrize("ended", [False, True])
def test_a_stream_that_ends_while_a_message_is_on_its_way_is_told(ended: bool) -> None:
    """gRPC asks for no piece after that: what stands behind it is not run."""
    transport = server()
    stream = Stream(NAMES[0], ended)
    pieces = transport._join(stream.requests(), stream)
    if ended:
        assert list(pieces) == []
    else:
        first = threading.Thread(target=next, args=(pieces,), daemon=True)
        first.start()
        while transport.receive(1).kind != "here":
            pass
        transport.send(0, b"hello")
        first.join(10)
        stream.ends()
    kinds = []
    while (event := transport.receive(0.5)) is not None:
        kinds.append(event.kind)
    assert kinds == ["here", "gone"][1 - ended :]
    transport.send(0, b"hello")
    assert transport.receive(1).kind == "gone"
    transport.close()


def small(width: int = 2) -> Job:
    """Two sites whose rows have so many columns."""
    problem = rk.SingleLevel(lambda x, rows: jnp.mean((rows @ x[: rows.shape[-1]] - 1.0) ** 2))
    clients = rk.Clients(upper=[np.ones((n, width)) for n in (2, 3)])
    return Job(problem, clients, rk.FedAvg(step=0.1), start_values(problem, clients, np.zeros(2)), 2, 0)


def joining(responder: Responder, address: str) -> tuple[threading.Thread, list[str]]:
    """A site in a thread, and how it ended."""
    said: list[str] = []

    def take_part() -> None:
        try:
            join(responder, address)
            said.append(responder.reason)
        except grpc_site.JoinError as error:
            said.append(str(error))

    thread = threading.Thread(target=take_part, daemon=True)
    thread.start()
    return thread, said


def test_a_site_with_one_more_column_is_refused_alone_and_the_others_wait() -> None:
    transport, played = server(("a", "b")), Played()
    good = [Responder(name, study(small(), i)) for i, name in enumerate(("a", "b"))]
    first, first_said = joining(good[0], transport.address)
    other, other_said = joining(Responder("b", study(small(3), 1)), transport.address)

    def put_right() -> None:
        other.join(60)
        threads.append(joining(good[1], transport.address))

    threads: list[Any] = []
    helper = threading.Thread(target=put_right)
    helper.start()
    play(federation(transport, played), without_data(small()), 2, played)
    helper.join(60)
    second, second_said = threads[0]
    for thread in (first, second):
        thread.join(60)
    assert first_said == second_said == [""]
    told = "has other samples than the coordinator: upper: array (3,) float64 at the site, upper: array (2,) float64"
    assert told in other_said[0]
    assert played.says(f"b {told}")


def test_all_sites_learn_who_kept_a_run_from_beginning() -> None:
    transport = server(("a", "b"))
    brought = {"a": study(small(2), 0), "b": study(small(3), 1)}
    threads = [joining(Responder(name, own), transport.address) for name, own in brought.items()]
    engine = federation(transport, Played(), patience=2.0)
    with pytest.raises(RuntimeError, match="b has other samples than the coordinator"):
        engine.open(without_data(small()))
    for thread, said in threads:
        thread.join(60)
        assert "has other samples than the coordinator" in said[0]
    assert threads[0][1][0].startswith(f"The coordinator at {transport.address} refuses a: the run is over: b has")


FORGED = "\x1b[2J\n12:00:00 All sites are there." + "x" * 100_000


FORGERIES: list[dict[str, Any]] = [
    {"conditions": {FORGED: FORGED}},
    {"samples": {"upper": [[FORGED, [2], "float64"]]}},
    {"name": FORGED},
    {"samples": {"upper": 7}},
    {"samples": {"upper": [[FORGED]]}},
    {"sizes": {"upper": 10**30}},
]


@pytest.mark.parametrize(
    "change", [*FORGERIES[:2], *(pytest.param(own, marks=pytest.mark.slow) for own in FORGERIES[2:])]
)
def test_what_a_site_says_of_itself_is_shown_escaped_and_short(change: dict[str, Any]) -> None:
    class Forging(Responder):
        def hello(self) -> dict[str, Any]:
            return super().hello() | change

    transport, played = server(("a", "b")), Played()
    threads = [
        joining(cls(n, study(small(), i)), transport.address)
        for i, (n, cls) in enumerate([("a", Responder), ("b", Forging)])
    ]
    with pytest.raises(RuntimeError, match=r"^b ") as raised:
        federation(transport, played, patience=1.0).open(without_data(small()))
    for thread, _ in threads:
        thread.join(60)
    for line in [str(raised.value), *played.told, *(said[0] for _, said in threads)]:
        assert line.isprintable()
        assert len(line) < 1500


@pytest.mark.parametrize(("value", "shown"), [(3e38, "3.0e+38, too large"), (np.inf, "not finite")])
def test_a_value_that_nothing_can_be_computed_with_is_left_out_by_name(value: float, shown: str) -> None:
    problem = rk.SingleLevel(lambda x, rows: jnp.mean((rows - x) ** 2))
    clients = rk.Clients(upper=[np.ones(n, np.float32) for n in (2, 3, 4)])
    start = (np.float32(0), ())
    what = Job(problem, clients, rk.FedAvg(step=0.1), start, 3, 0, None, rk.Faults(minimum=2))
    own = responders(what)

    def ask(i: int, message: bytes) -> bytes:
        asked, (header, arrays) = wire.decode(message)[0], wire.decode(own[i].handle(message))
        if i == 2 and asked.get("phase") == 1 and asked.get("reply"):
            arrays = [np.full_like(a, value) for a in arrays]
        return wire.encode(header, arrays)

    played = Played()
    engine = rk.Federation(transport=Memory(3, ask, ["a", "b", "c"]), patience=0.0, tell=played.told.append)
    for i, responder in enumerate(own):
        responder.name = "abc"[i]
    play(engine, without_data(what), 3, played)
    assert played.says("c replies to", shown, "it is left out")
    assert np.isfinite(played.state.x)


@dataclasses.dataclass(frozen=True)
class OwnMethod(rk.FedAvg):
    """A method that a user has written."""


@dataclasses.dataclass(frozen=True)
class OwnChannel(Plain):
    """A channel that a user has written."""


def test_a_site_that_does_not_know_a_method_says_how_it_learns_it() -> None:
    """Over the network the coordinator shows that, and goes on once the site is started again with the method."""
    what = dataclasses.replace(small(), algorithm=OwnMethod(step=0.1))
    transport, played = server(("a", "b")), Played()
    knows = [Responder(name, study(what, i)) for i, name in enumerate(("a", "b"))]
    ignorant = Responder("b", dataclasses.replace(study(what, 1), names={}))
    first, _ = joining(knows[0], transport.address)
    joining(ignorant, transport.address)
    line = (
        "This site does not know the method 'OwnMethod'. Import it in the site's module, for example: from "
        f"{__name__} import OwnMethod."
    )

    def put_right() -> None:
        end = time.monotonic() + 60
        while not played.says("b refuses", line) and time.monotonic() < end:
            time.sleep(0.02)
        joining(knows[1], transport.address)

    helper = threading.Thread(target=put_right)
    helper.start()
    play(federation(transport, played), without_data(what), 2, played)
    helper.join(60)
    first.join(60)
    assert played.says("b refuses", line)
    assert line in ignorant.reason


def test_a_site_that_does_not_know_a_channel_says_so() -> None:
    described = description.describe(rk.chain(rk.clip(1.0), OwnChannel()))
    with pytest.raises(ValueError, match=r"does not know the channel 'OwnChannel'. Import .* import OwnChannel"):
        description.build(described, description.known(), "channel")
    known = description.known({"OwnChannel": OwnChannel})
    assert description.build(described, known, "channel") == rk.chain(rk.clip(1.0), OwnChannel())


@pytest.mark.parametrize("dtype", ["S300000000", "object", "U9", "datetime64[s]", "complex128", "float32, float32"])
def test_an_array_of_another_type_is_refused_before_it_is_made(dtype: str) -> None:
    with pytest.raises(ValueError, match="an array must have one of the types bool, int8"):
        description.build({"array": ["1"], "dtype": dtype}, {})


def test_arrays_that_are_described_are_built_again() -> None:
    for array in (np.arange(3), np.float32([1, 2]), np.asarray(jnp.bfloat16(1.5))[None], np.array([True])):
        built = description.build(json.loads(json.dumps(description.describe(array))), {})
        assert built.dtype == array.dtype
        np.testing.assert_array_equal(built, array)
    words = ["a", ["b", 1]]
    assert description.build(json.loads(json.dumps(description.describe(words))), {}) == words
