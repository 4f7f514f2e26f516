"""Methods between a coordinator and three processes, over gRPC: the same numbers and costs as in simulation."""

import threading
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
import pytest
from tests.contract.runs import close
from tests.federation.processes import NAMES, Played, Process, federation, job, play, server
from tests.federation.studies import without_data

import rookery as rk
from rookery.ledger import Ledger

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
FAST = ("bilevel", "memory")


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
    assert payload < measured < 1.05 * payload + 1024 * messages
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
