"""The links by themselves, over a transport whose every event is written down."""

import itertools
import time
from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import rookery as rk
from rookery.engines.federation import wire
from rookery.engines.federation.links import Links, Reply, Request, SiteError
from rookery.engines.federation.transports import Event


class Scripted:
    """A transport: script(site, header, turn) -> the events that follow a message."""

    def __init__(self, script: Callable[[int, dict[str, Any], int], list[Event]], count: int = 3) -> None:
        self.names, self.rejoins = tuple("abcdefgh"[:count]), True
        self._script, self._events = script, deque[Event]()
        self.sent: list[tuple[int, dict[str, Any]]] = []
        self._turns = [itertools.count() for _ in self.names]
        self.dismissed: list[tuple[int, str]] = []

    def send(self, site: int, message: bytes) -> None:
        header, _ = wire.decode(message)
        self.sent.append((site, header))
        self._events.extend(self._script(site, header, next(self._turns[site])))

    def receive(self, seconds: float) -> Event | None:
        return self._events.popleft() if self._events else None

    def dismiss(self, site: int, why: str) -> None:
        self.dismissed.append((site, why))

    def close(self, why: str = "") -> None: ...


def reply(
    site: int, header: dict[str, Any], answer: str = "value", number: int | None = None, value: float = 0
) -> Event:
    told = {"answer": answer, "number": header["number"] if number is None else number}
    return Event(site, "reply", wire.encode(told, [np.float64(value or site + 1)]))


def requests(links: Links, count: int = 3) -> dict[int, Request]:
    number = links.number()
    message = wire.encode({"do": "work", "number": number}, [])
    whole = lambda again: wire.encode({"do": "work", "number": again, "whole": True}, [])
    return {i: Request(number, message, whole) for i in range(count)}


def values(found: dict[int, Reply]) -> dict[int, float]:
    return {site: float(own.arrays[0]) for site, own in sorted(found.items())}


def with_opening(script: Callable[[int, dict[str, Any], int], list[Event]]) -> tuple[Scripted, Links]:
    """Links whose sites have all opened the run."""
    transport = Scripted(script)
    links = Links(transport)
    links.opening = lambda site, number: wire.encode({"do": "open", "number": number}, [])
    for record in links.records:
        record.opened = True
    return transport, links


def test_what_is_no_transport_is_refused() -> None:
    class Lacks:
        names, rejoins = ("a", "b"), False
        send = receive = close = Scripted.close

    with pytest.raises(TypeError, match=r"transport must have names, .*, close; got .* without dismiss\. See"):
        rk.Federation(transport=Lacks())
    with pytest.raises(TypeError, match=r"got the class Scripted\. Give Scripted\(\.\.\.\)"):
        rk.Federation(transport=Scripted)
    with pytest.raises(TypeError, match="got 'localhost:9443' without names, rejoins, send"):
        rk.Federation(transport="localhost:9443")
    within = lambda sites: lambda client, request: sites[client].handle(request)
    assert rk.Federation(transport=within).transport is within


def test_replies_in_any_order() -> None:
    held: list[Event] = []

    def script(site: int, header: dict[str, Any], turn: int) -> list[Event]:
        held.append(reply(site, header))
        return held[::-1] if len(held) == 3 else []

    links = Links(Scripted(script))
    assert values(links.ask(requests(links))) == {0: 1, 1: 2, 2: 3}


def test_old_repeated_and_foreign_replies_are_dropped() -> None:
    def script(site: int, header: dict[str, Any], turn: int) -> list[Event]:
        right = reply(site, header)
        before = reply(site, header, number=header["number"] - 1, value=99)
        return [before, right, right, reply((site + 1) % 3, header, number=5, value=99), before]

    links = Links(Scripted(script))
    for _ in range(2):
        assert values(links.ask(requests(links))) == {0: 1, 1: 2, 2: 3}
    assert links.dropped >= 18


def test_numbers_are_not_those_of_a_coordinator_before() -> None:
    first, second = (Links(Scripted(lambda *_: [])).number() for _ in range(2))
    assert abs(first - second) > 1000


OPENED = [("open", False), ("work", False)]


@pytest.mark.parametrize(
    ("answers", "sent"),
    [
        pytest.param(["closed", "opened", "resync", "value"], [*OPENED, ("work", True)], id="has not opened the run"),
        pytest.param(
            ["resync", *["closed", "opened", "resync"] * 2, "value"],
            [("work", True), *OPENED, ("work", True), *OPENED, ("work", True)],
            id="is killed at the whole request",
        ),
    ],
)
def test_a_site_that_has_forgotten(answers: list[str], sent: list[tuple[str, bool]]) -> None:
    """It is sent the opening, the request once more, and then everything."""
    script = lambda site, header, turn: [reply(site, header, answers[turn] if site == 1 else "value")]
    transport, links = with_opening(script)
    assert values(links.ask(requests(links))) == {0: 1, 1: 2, 2: 3}
    to_b = [(header["do"], header.get("whole", False)) for site, header in transport.sent if site == 1]
    assert to_b == [("work", False), *sent]


def test_who_connects_anew_is_sent_the_opening_first() -> None:
    """It may be another process, and go on from what is on its disk."""

    def script(site: int, header: dict[str, Any], turn: int) -> list[Event]:
        if (site, turn) == (1, 1):
            return [Event(1, "here")]
        return [reply(site, header, "opened" if header["do"] == "open" else "value")]

    transport, links = with_opening(script)
    for _ in range(3):
        assert values(links.ask(requests(links))) == {0: 1, 1: 2, 2: 3}
    assert [header["do"] for site, header in transport.sent if site == 1] == ["work", "work", "open", "work", "work"]
    assert all(header["do"] == "work" for site, header in transport.sent if site != 1)


def gone_at(first: int) -> Callable[[int, dict[str, Any], int], list[Event]]:
    """Site 1 is lost at its first messages, and is connected again afterwards."""

    def script(site: int, header: dict[str, Any], turn: int) -> list[Event]:
        if site == 1 and turn < first:
            return [Event(1, "gone", b"has left"), Event(1, "here")]
        return [reply(site, header, "opened" if header["do"] == "open" else "value")]

    return script


def test_without_faults_a_site_that_comes_back_is_asked_again() -> None:
    told: list[str] = []
    links = Links(Scripted(gone_at(2)), patience=None, tell=told.append)
    links.opening = lambda site, number: wire.encode({"do": "open", "number": number}, [])
    assert values(links.ask(requests(links))) == {0: 1, 1: 2, 2: 3}
    assert told.count("b has left.") == 1  # at first it was not there, and that is not told
    assert told.count("b is connected.") == 2


def test_without_patience_it_is_an_error_that_names_it() -> None:
    script = lambda site, header, turn: [Event(1, "gone", b"has left")] if site == 1 else [reply(site, header)]
    links = Links(Scripted(script), patience=0.0)
    with pytest.raises(SiteError, match=r"^b has left\.$"):
        links.ask(requests(links))


def test_with_enough_others_a_lost_site_is_left_out_and_asked_again_next_time() -> None:
    lost = [True]

    def script(site: int, header: dict[str, Any], turn: int) -> list[Event]:
        return [Event(1, "gone", b"has left")] if site == 1 and lost[0] else [reply(site, header)]

    links = Links(Scripted(script), patience=None)
    assert values(links.ask(requests(links), least=2)) == {0: 1, 2: 3}
    lost[0] = False
    assert values(links.ask(requests(links), least=2)) == {0: 1, 1: 2, 2: 3}
    assert [record.missing for record in links.records] == [0, 1, 0]


def test_a_late_site_is_not_asked_before_it_has_replied() -> None:
    held: list[Event] = []

    def script(site: int, header: dict[str, Any], turn: int) -> list[Event]:
        if site == 1 and turn == 0:
            held.append(reply(site, header, value=99))
            return []
        events = [reply(site, header)]
        if site == 2 and header["number"] == second[0].number:
            events = [*held, *events]  # the late reply arrives in the middle of the next exchange
        return events

    transport = Scripted(script)
    told: list[str] = []
    links = Links(transport, deadline=0.05, patience=None, tell=told.append)
    second = [Request(-1, b"")]
    assert values(links.ask(requests(links), least=2)) == {0: 1, 2: 3}
    assert told == ["b has not replied in 0.05 s."]
    assert links.records[1].state == "late"
    asked = requests(links)
    second[0] = asked[0]
    assert values(links.ask(asked, least=2)) == {0: 1, 1: 2, 2: 3}
    assert links.records[1].state == "connected"


@pytest.mark.parametrize("garbage", [b"", b"\xff" * 40, wire.encode({"answer": "value"}, [])])
def test_garbage(garbage: bytes) -> None:
    """What is not a message is a wrong reply; a message without a number is nobody's."""

    def script(site: int, header: dict[str, Any], turn: int) -> list[Event]:
        return [Event(1, "reply", garbage)] if site == 1 else [reply(site, header)]

    told: list[str] = []
    links = Links(Scripted(script), deadline=0.05, patience=None, tell=told.append)
    assert values(links.ask(requests(links), least=2)) == {0: 1, 2: 3}
    assert told[0].startswith("b ")


def test_wrong_replies_do_not_make_a_run_wait_for_ever() -> None:
    links = Links(Scripted(lambda site, header, turn: [reply(site, header)]), patience=None)
    found = links.ask(requests(links), least=2, check=lambda site, reply: "is wrong" if site else None)
    assert values(found) == {0: 1}
    with pytest.raises(SiteError, match="b is wrong"):
        links.ask(requests(links), check=lambda site, reply: "is wrong" if site == 1 else None)


def test_a_refusal_is_told_and_ends_a_run_that_needs_everybody() -> None:
    def script(site: int, header: dict[str, Any], turn: int) -> list[Event]:
        told = {"answer": "refused" if site == 1 else "value", "number": header["number"], "why": "it may not."}
        return [Event(site, "reply", wire.encode(told, [np.float64(site + 1)]))]

    links = Links(Scripted(script), patience=0.0)
    with pytest.raises(SiteError, match=r"^b refuses: it may not\.$"):
        links.ask(requests(links))
    links = Links(Scripted(script), patience=0.0)
    assert values(links.ask(requests(links), least=2)) == {0: 1, 2: 3}
    assert links.records[1].state == "refused"


def test_who_refuses_is_not_waited_for_where_nobody_can_come_back() -> None:
    """In a job of FLARE, say: its processes are the same to its end."""
    refusal = lambda header: Event(1, "reply", wire.encode({"answer": "refused", "number": header["number"]}, []))
    transport = Scripted(lambda site, header, turn: [refusal(header) if site == 1 else reply(site, header)])
    transport.rejoins = False
    links = Links(transport)
    for least in (2, 3):
        assert values(links.ask(requests(links), least=least)) == {0: 1, 2: 3}
    assert links.records[1].state == "refused"


FORGED = "no.\x1b[2J\r\n12:00:00 All sites are there.\u202e" + "x" * 200_000


@pytest.mark.parametrize("answer", ["refused", FORGED])
@pytest.mark.parametrize("least", [2, None])
def test_nothing_that_a_site_says_reaches_the_terminal_as_it_is(answer: str, least: int | None) -> None:
    def script(site: int, header: dict[str, Any], turn: int) -> list[Event]:
        told = {"answer": answer if site == 1 else "value", "number": header["number"], "why": FORGED}
        return [Event(site, "reply", wire.encode(told, [np.float64(1)]))]

    lines: list[str] = []
    links = Links(Scripted(script), patience=0.0, tell=lines.append)
    try:
        links.ask(requests(links), least)
    except SiteError as error:
        lines.append(str(error))
    assert any("All sites are there" in line for line in lines)
    for line in lines:
        assert line.isprintable()
        assert len(line) < 500


def test_who_does_not_fit_is_told_why_and_waited_for() -> None:
    """The others' replies are kept; it is asked again when it is back."""

    def script(site: int, header: dict[str, Any], turn: int) -> list[Event]:
        right = reply(site, header, value=99 if (site, turn) == (1, 0) else 0)
        return [right, Event(1, "gone", b"was let go"), Event(1, "here")] if (site, turn) == (1, 0) else [right]

    told: list[str] = []
    transport = Scripted(script)
    links = Links(transport, patience=None, tell=told.append)
    wrong = lambda site, reply: "has other samples" if float(reply.arrays[0]) == 99 else None
    assert values(links.ask(requests(links), None, wrong, dismiss=True)) == {0: 1, 1: 2, 2: 3}
    assert transport.dismissed == [(1, "has other samples")]
    assert "b has other samples." in told
    assert [site for site, _ in transport.sent] == [0, 1, 2, 1]


def test_a_site_that_does_not_fit_and_does_not_come_back_is_named_with_the_reason() -> None:
    def script(site: int, header: dict[str, Any], turn: int) -> list[Event]:
        return [reply(site, header), *([Event(1, "gone", b"was let go")] if site == 1 else [])]

    links = Links(Scripted(script), patience=0.2)
    with pytest.raises(SiteError, match=r"^b has other samples\.$"):
        links.ask(requests(links), None, lambda site, reply: "has other samples" if site == 1 else None, dismiss=True)


def test_connecting_anew_buys_no_time() -> None:
    """With enough others; each connection replaces the one before without a word."""
    began: list[float] = []

    class Reconnecting(Scripted):
        def receive(self, seconds: float) -> Event | None:
            found = super().receive(seconds)
            if found is None and seconds > 0 and time.monotonic() - began[0] < 5:
                time.sleep(0.05)
                return Event(1, "here")
            return found

    transport = Reconnecting(lambda site, header, turn: [] if site == 1 else [reply(site, header)])
    links = Links(transport, deadline=0.3, patience=None)
    began.append(time.monotonic())
    assert values(links.ask(requests(links), least=2)) == {0: 1, 2: 3}
    assert time.monotonic() - began[0] < 2
