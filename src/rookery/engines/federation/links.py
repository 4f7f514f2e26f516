"""The coordinator's links to the sites: everybody is asked at once, and replies are taken as they come.

A request has a number that its reply repeats; a reply to anything but the request under way is dropped, so that a
repeated, late or reordered message changes nothing. A site that has not this run open is sent the opening first; one
that has forgotten what it was sent is sent everything again. Nothing that a site says is shown unescaped.
"""

import random
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from rookery.base.printable import printable
from rookery.engines.federation import wire
from rookery.engines.federation.transports import Event, Transport

_STEP = 1.0  # seconds from one look at the clock to the next
_TRIES = 2  # requests in a row that a site may leave unanswered before others stop waiting for it
_LINE = 2000  # characters of a line about sites


class SiteError(RuntimeError):
    """A site can't be reached, refuses, or replies with what it should not."""


class Reply(NamedTuple):
    """What a site answered."""

    header: dict[str, Any]
    arrays: list[Any]


class Request(NamedTuple):
    """What a site is asked: `whole(number)` is the same request with all that a site needs that has forgotten."""

    number: int
    message: wire.Message
    whole: Callable[[int], wire.Message] | None = None
    opens: bool = False  # whether it is the opening itself


@dataclass(eq=False)
class _Asked:
    """A site's request under way."""

    request: Request
    waits_for: int  # the number of the message whose reply is to come
    opening: bool = False
    again: wire.Message = b""  # the request with everything, once it was asked for
    since: float = 0.0


@dataclass(eq=False)
class Record:
    """What is known of a site.

    Attributes:
        state: "gone", "late" (it is still at an earlier request), "refused" or "connected".
        since: when that began, in seconds since 1970.
        why: it is not connected, in words.
        replies, missing: to exchanges, and those that were left out.
        sent, received: bytes of messages.
        opened: whether it has this run open, on the connection that it has now.
        owes: the number of the last message that it was sent, whose reply is to come.
        unanswered: how many requests in a row it has left unanswered: it was late, or left, or connected anew.
    """

    state: str = "gone"
    since: float = field(default_factory=time.time)
    why: str = ""
    replies: int = 0
    missing: int = 0
    sent: int = 0
    received: int = 0
    opened: bool = False
    owes: int = -1
    unanswered: int = 0

    def becomes(self, state: str) -> str:
        """The state before."""
        before = self.state
        self.opened = self.opened and state != "gone"
        if state != before:
            self.state, self.since = state, time.time()
        return before


@dataclass(eq=False)
class Links:
    """One run's links.

    Arguments:
        transport: what carries the messages.
        deadline: the seconds that a site has for a reply.
        patience: the seconds to wait for sites without which a run can't go on; None: for ever.
        opening: opening(site, number) -> the message that opens this run at a site; None: there is none.
        finite: whether a reply that is not finite is a wrong one, where the run can go on without.
        tell: tell(text), told what happens to sites.
        watch: watch(links), called whenever something did, and after every exchange.
    """

    transport: Transport
    deadline: float = 600.0
    patience: float | None = 0.0
    opening: Callable[[int, int], bytes] | None = None
    finite: bool = False
    tell: Callable[[str], None] = lambda text: None
    watch: Callable[["Links"], None] = lambda links: None
    dropped: int = 0  # messages that nobody waited for
    exchanges: int = 0
    rounds: int = 0  # that are done
    opened: dict[int, dict[str, Any]] = field(default_factory=dict)  # what sites said when they last opened the run
    _numbers: int = field(default_factory=lambda: random.SystemRandom().getrandbits(40) << 12)

    def __post_init__(self) -> None:
        self.records = [Record() for _ in self.transport.names]

    @property
    def sent(self) -> int:
        """Bytes of messages."""
        return sum(record.sent for record in self.records)

    @property
    def received(self) -> int:
        """Bytes of messages."""
        return sum(record.received for record in self.records)

    def name(self, site: int) -> str:
        """What the site is called."""
        return self.transport.names[site]

    def number(self) -> int:
        """A number for a request, which no other has, not even of a coordinator before this one."""
        self._numbers += 1
        return self._numbers

    def ask(
        self,
        requests: Mapping[int, Request],
        least: int | None = None,
        check: Callable[[int, Reply], str | None] = lambda site, reply: None,
        dismiss: bool = False,
    ) -> dict[int, Reply]:
        """The replies, by site.

        Without `least` they are all needed, and the sites that are gone, late or refuse are waited for. With it, those
        are left out, and so are sites whose reply is found wrong by `check(site, reply)`, which says what is wrong; if
        that leaves fewer than `least` good ones, the sites that may come back are waited for. With `dismiss`, a site
        whose reply is wrong is told why and let go, and waited for like one that refuses.
        """
        found = _Asking(self, requests, least, check, dismiss).run()
        for site in requests:
            self.records[site].replies += site in found
            self.records[site].missing += site not in found
        self.exchanges += 1
        self.watch(self)
        return found

    def send(self, site: int, message: wire.Message) -> None:
        """Send a message."""
        self.records[site].sent += len(message)
        self.transport.send(site, message)

    def note(self, text: str) -> None:
        """Something happened."""
        self.tell(printable(text, _LINE))
        self.watch(self)


class _Asking:
    """One exchange, until its replies are there."""

    def __init__(
        self, links: Links, requests: Mapping[int, Request], least: int | None, check: Any, dismiss: bool
    ) -> None:
        self._links, self._least, self._check, self._dismiss = links, least, check, dismiss
        self._requests = requests
        self._under_way: dict[int, _Asked] = {}
        self._away: dict[int, str] = {}  # those that may come back, and why they are not there
        self._wrong: set[int] = set()
        self._replies: dict[int, Reply] = {}
        self._begin = self._oldest = time.monotonic()  # nobody under way was asked before `_oldest`
        self._first: dict[int, float] = {}  # when each site was asked, whichever connection it has now
        self._paused = False

    def run(self) -> dict[int, Reply]:
        links = self._links
        while (event := links.transport.receive(0.0)) is not None:  # what has happened since
            self._take(event)
        for site, request in self._requests.items():
            if site in self._under_way:
                continue
            state = links.records[site].state
            if state in ("late", "refused"):
                self._away[site] = "is still at an earlier request" if state == "late" else links.records[site].why
            else:
                self._begin_with(site, request)
        while not self._finished():
            event = links.transport.receive(self._seconds())
            if event is not None:
                self._take(event)
            self._look_at_the_clock()
        return self._replies

    def _begin_with(self, site: int, request: Request) -> None:
        since = time.monotonic()
        if self._least is not None and not self._paused:  # connecting anew buys no time
            since = self._first.setdefault(site, since)
        asked = self._under_way[site] = _Asked(request, request.number, since=since)
        self._away.pop(site, None)
        if self._links.opening is None or self._links.records[site].opened or request.opens:
            self._send(site, asked, request.message)
        else:  # who has connected anew may be another process, which goes on from what is on its disk
            self._open(site, asked)

    def _open(self, site: int, asked: _Asked) -> None:
        assert self._links.opening is not None
        asked.opening, asked.waits_for = True, self._links.number()
        asked.again = b""  # it has forgotten that, too
        self._send(site, asked, self._links.opening(site, asked.waits_for))

    def _send(self, site: int, asked: _Asked, message: wire.Message) -> None:
        self._links.records[site].owes = asked.waits_for
        self._links.send(site, message)

    def _let_go(self) -> None:
        """Leave out sites that have answered nothing for a while, once the others' replies are enough."""
        records = self._links.records
        if self._least is None or len(self._replies) < self._least:
            return
        if all(records[site].unanswered >= _TRIES for site in self._under_way):
            for site in list(self._under_way):
                del self._under_way[site]
                records[site].becomes("late")
                self._away[site] = records[site].why

    def _finished(self) -> bool:
        if self._under_way:
            self._let_go()
        if self._under_way:
            return False
        missing = len(self._away)
        good = len(self._replies)
        if not missing or (self._least is not None and good >= self._least):
            if self._paused and good:
                self._links.note("The run goes on." if self._links.opening is not None else "All sites are there.")
            return True
        needed = len(self._requests) if self._least is None else self._least
        who = "; ".join(f"{self._links.name(site)} {why}" for site, why in self._away.items())
        waited = time.monotonic() - self._begin
        refusing = sum(self._links.records[site].state == "refused" for site in self._away)
        hopeless = refusing and not self._links.transport.rejoins and good + missing - refusing < needed
        if hopeless or (self._links.patience is not None and waited >= self._links.patience):
            if self._least is None:
                raise SiteError(who)
            return True
        if not self._paused:
            self._paused = True
            met = self._links.opening is not None
            who = who if met else ", ".join(map(self._links.name, self._away))
            self._links.note(
                f"Waiting for {who}."
                if not met
                else f"The run pauses: {good} of {needed} replies that it needs are there ({who})."
            )
        return False

    def _seconds(self) -> float:
        """Until the next look at the clock."""
        now, ends = time.monotonic(), [_STEP]
        if self._under_way:
            ends.append(self._oldest + self._links.deadline - now)
        if self._paused and self._links.patience is not None:
            ends.append(self._begin + self._links.patience - now)
        return max(0.0, min(ends))

    def _look_at_the_clock(self) -> None:
        now = time.monotonic()
        if not self._under_way or now - self._oldest < self._links.deadline:
            return
        for site, asked in list(self._under_way.items()):
            if now - asked.since >= self._links.deadline:
                del self._under_way[site]
                self._leave_out(site, "late", f"has not replied in {self._links.deadline:g} s")
        self._oldest = min((asked.since for asked in self._under_way.values()), default=now)

    def _leave_out(self, site: int, state: str, why: str) -> None:
        record = self._links.records[site]
        before = record.becomes(state)
        self._away[site] = record.why = why
        ignored = state == "late" or (state, before) == ("gone", "connected")
        record.unanswered += ignored
        if before != state:
            self._note(site, why)
        if ignored and record.unanswered == _TRIES and self._least is not None:
            self._links.note(f"{self._links.name(site)} is not waited for until it answers.")

    def _note(self, site: int, text: str) -> None:
        """Tell what happens to a site, unless it comes and goes and answers nothing."""
        if self._links.records[site].unanswered <= _TRIES:
            self._links.note(f"{self._links.name(site)} {text.rstrip('.')}.")
        else:
            self._links.watch(self._links)

    def _take(self, event: Event) -> None:
        links, site = self._links, event.site
        record = links.records[site]
        if event.kind == "gone":
            refused = record.state == "refused"
            if self._under_way.pop(site, None) is not None:
                self._leave_out(site, "gone", _why(event))
            elif record.becomes("gone") != "gone":
                self._note(site, _why(event))
                if site in self._away and not refused:  # else the refusal says more
                    self._away[site] = _why(event)
            return
        before = record.becomes("connected")
        if event.kind == "here":
            record.opened = False
            self._note(site, "is connected")
            if site in self._requests and site not in self._replies and site not in self._wrong:
                self._begin_with(site, self._requests[site])
            return
        links.records[site].received += len(event.message)
        try:
            reply = Reply(*wire.decode(event.message))
        except wire.WireError as error:
            if site in self._under_way:
                self._found_wrong(site, f"replies with what is no message ({printable(error)})")
            else:
                links.dropped += 1
            return
        asked = self._under_way.get(site)
        if asked is None or reply.header.get("number") != asked.waits_for:
            links.dropped += 1
            self._take_late(site, reply)
            if before in ("late", "gone") and asked is None and site in self._away and record.state != "refused":
                self._begin_with(site, self._requests[site])
            return
        self._answer(site, asked, reply)

    def _take_late(self, site: int, reply: Reply) -> None:
        """The reply to an earlier request: too late to be used, but it says that the site answers."""
        record = self._links.records[site]
        if reply.header.get("number") != record.owes:
            return
        match reply.header.get("answer"):
            case "value":
                record.unanswered = 0
            case "opened":
                self._links.opened[site], record.opened = reply.header, True
            case "refused":
                self._leave_out(site, "refused", f"refuses: {printable(reply.header.get('why'))}")

    def _answer(self, site: int, asked: _Asked, reply: Reply) -> None:
        links, answer = self._links, reply.header.get("answer")
        if answer == "opened":
            links.opened[site] = reply.header
        if answer == "closed" and links.opening is not None and not asked.opening:
            return self._open(site, asked)
        links.records[site].opened |= answer == "opened"
        if answer == "opened" and asked.opening:
            asked.opening, asked.waits_for = False, asked.request.number
            return self._send(site, asked, asked.request.message)
        if answer == "resync" and asked.request.whole is not None and not asked.again:
            asked.waits_for = links.number()
            asked.again = asked.request.whole(asked.waits_for)
            return self._send(site, asked, asked.again)
        del self._under_way[site]
        if answer == "refused":
            return self._leave_out(site, "refused", f"refuses: {printable(reply.header.get('why'))}")
        if answer == "stale":
            why = "is ahead of the coordinator: another coordinator has this run."
            if self._least is None:
                raise SiteError(f"{links.name(site)} {why}")
            return self._leave_out(site, "refused", why)
        if answer not in ("value", "opened", "hello"):
            return self._found_wrong(site, f"answers {printable(repr(answer))}, which is not an answer to this")
        wrong = self._check(site, reply)
        if wrong is not None:
            return self._found_wrong(site, printable(wrong, _LINE))
        links.records[site].unanswered = 0
        self._replies[site] = reply

    def _found_wrong(self, site: int, why: str) -> None:
        links = self._links
        self._under_way.pop(site, None)
        if self._dismiss:
            self._leave_out(site, "refused", why)
            return links.transport.dismiss(site, why)
        self._wrong.add(site)
        if self._least is None:
            raise SiteError(f"{links.name(site)} {why}")
        links.note(f"{links.name(site)} {why}: it is left out.")
        return None


def _why(event: Event) -> str:
    """Why a site is gone."""
    return printable(bytes(event.message).decode(errors="replace")) or "is gone"
