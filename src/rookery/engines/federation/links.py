"""The coordinator's links to the sites: all are asked at the same time, and replies are taken as they come.

A request has a number that its reply repeats. A reply to anything but the pending request is dropped, so a repeated,
late or reordered message changes nothing. A site that has not opened this run is sent the opening first, and a site
that has forgotten its inputs is sent everything again. Nothing that a site says is shown unescaped.
"""

import math
import random
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from rookery.base.printable import printable
from rookery.engines.federation import wire
from rookery.engines.federation.heads import Notary, is_head
from rookery.engines.federation.transports import Event, Transport

_TICK = 1.0  # seconds between looks at the clock
_TRIES = 2  # requests in a row that a site may leave unanswered before others stop waiting for it
_LINE = 2000  # characters of a line about sites


class SiteError(RuntimeError):
    """A site can't be reached, refuses, or sends a wrong reply."""


class Reply(NamedTuple):
    """A site's answer."""

    header: dict[str, Any]
    arrays: list[Any]


class Request(NamedTuple):
    """A request to a site; `whole(number)` is the same request with everything that it depends on."""

    number: int
    message: wire.Message
    whole: Callable[[int], wire.Message] | None = None
    opens: bool = False  # whether it is the opening itself


@dataclass(eq=False)
class _Pending:
    """A request that has not been answered yet."""

    request: Request
    awaited: int  # the number of the message whose reply is to come
    opening: bool = False  # whether that message is the opening
    whole_sent: bool = False
    since: float = 0.0


@dataclass(eq=False)
class Record:
    """The coordinator's record of a site.

    Attributes:
        state: "gone", "late" (still busy with an earlier request), "refused" or "connected".
        since: when this state began, in seconds since 1970.
        why: why it is not connected.
        replies, missing: how many exchanges it replied to, and how many went on without it.
        sent, received: bytes of messages.
        opened: whether it has opened this run on its present connection.
        owes: the number of the last message that it was sent.
        unanswered: how many requests in a row it has left unanswered: it was late, or left, or reconnected.
        final: whether it has refused for good: asking again, or restarting it, changes nothing.
        epsilon: what it says it has spent of its privacy budget; None: it does not say.
        head: the head of its audit log, as its last reply says; None: it does not say.
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
    final: bool = False
    epsilon: float | None = None
    head: list[Any] | None = None

    def becomes(self, state: str) -> str:
        """Set the state, and return the state before."""
        before = self.state
        self.opened = self.opened and state != "gone"
        if state != before:
            self.state, self.since = state, time.time()
        return before


@dataclass(eq=False)
class Links:
    """One run's links to its sites.

    Arguments:
        transport: carries the messages.
        deadline: the seconds that a site has for a reply.
        patience: the seconds to wait for sites that the run can't go on without; None: for ever.
        opening: opening(site, number) -> the message that opens this run at a site; None: there is none.
        finite: whether a reply that is not finite counts as wrong where the run can go on without it.
        tell: tell(text), called with a line about each event at a site.
        watch: watch(links), called after each event at a site, and after every exchange.
        notary: keeps and countersigns the heads of sites' audit logs; None: heads are ignored.
    """

    transport: Transport
    deadline: float = 600.0
    patience: float | None = 0.0
    opening: Callable[[int, int], bytes] | None = None
    finite: bool = False
    tell: Callable[[str], None] = lambda text: None
    watch: Callable[["Links"], None] = lambda links: None
    notary: Notary | None = None
    dropped: int = 0  # messages that nobody waited for
    exchanges: int = 0
    rounds: int = 0  # completed
    opened: dict[int, dict[str, Any]] = field(default_factory=dict)  # sites' last answers to the opening
    _numbers: int = field(default_factory=lambda: random.SystemRandom().getrandbits(40) << 12)

    def __post_init__(self) -> None:
        self.records = [Record() for _ in self.transport.names]

    @property
    def sent(self) -> int:
        """Bytes of messages to all sites."""
        return sum(record.sent for record in self.records)

    @property
    def received(self) -> int:
        """Bytes of messages from all sites."""
        return sum(record.received for record in self.records)

    def name(self, site: int) -> str:
        """Return a site's name."""
        return self.transport.names[site]

    def number(self) -> int:
        """Return a number that no other request has, not even one of an earlier coordinator."""
        self._numbers += 1
        return self._numbers

    def ask(
        self,
        requests: Mapping[int, Request],
        least: int | None = None,
        check: Callable[[int, Reply], str | None] = lambda site, reply: None,
        dismiss: bool = False,
        take: Callable[[int, Reply], Reply] = lambda site, reply: reply,
    ) -> dict[int, Reply]:
        """Return the replies, by site, as `take(site, reply)` leaves them once they are checked.

        Without `least` all replies are needed, so the call waits for sites that are gone, are late or refuse. With
        `least`, such sites are left out, and so are sites whose reply is wrong: `check(site, reply)` returns what is
        wrong with it. If fewer than `least` good replies are left, the call waits for the sites that may come back.
        With `dismiss`, a site whose reply is wrong is told why, disconnected, and treated like one that refuses.
        """
        replies = Collector(self, requests, least, check, dismiss, take).run()
        for site in requests:
            self.records[site].replies += site in replies
            self.records[site].missing += site not in replies
        self.exchanges += 1
        self.watch(self)
        return replies

    def keep_heads(self, run: str, t: int) -> None:
        """Keep the heads of sites' audit logs after t rounds."""
        said = {site: record.head for site, record in enumerate(self.records) if record.head is not None}
        if self.notary is not None and said:
            try:
                self.notary.keep(self.transport.names, run, t, said)
            except OSError as error:
                self.note(f"The heads of sites' audit logs can't be written ({error.strerror}).")

    def note(self, text: str) -> None:
        """Report that something happened."""
        self.tell(printable(text, _LINE))
        self.watch(self)


class Collector:
    """Collects the replies to the requests of one exchange."""

    def __init__(
        self, links: Links, requests: Mapping[int, Request], least: int | None, check: Any, dismiss: bool, take: Any
    ) -> None:
        self._links, self._least, self._check, self._dismiss, self._keep = links, least, check, dismiss, take
        self._requests = requests
        self._pending: dict[int, _Pending] = {}
        self._away: dict[int, str] = {}  # sites that may come back, and why they are away
        self._wrong: set[int] = set()
        self._replies: dict[int, Reply] = {}
        self._begin = self._oldest = time.monotonic()  # no pending request is older than `_oldest`
        self._first_asked: dict[int, float] = {}  # by site, over all its connections
        self._paused = False

    def run(self) -> dict[int, Reply]:
        links = self._links
        while (event := links.transport.receive(0.0)) is not None:  # since the last exchange
            self._take(event)
        for site, request in self._requests.items():
            if site in self._pending:
                continue
            state = links.records[site].state
            if state in ("late", "refused"):
                self._away[site] = "is still at an earlier request" if state == "late" else links.records[site].why
            else:
                self._ask(site, request)
        while not self._finished():
            event = links.transport.receive(self._seconds())
            if event is not None:
                self._take(event)
            self._check_deadlines()
        return self._replies

    def _ask(self, site: int, request: Request) -> None:
        since = time.monotonic()
        if self._least is not None and not self._paused:  # reconnecting does not extend the deadline
            since = self._first_asked.setdefault(site, since)
        pending = self._pending[site] = _Pending(request, request.number, since=since)
        self._away.pop(site, None)
        if self._links.opening is None or self._links.records[site].opened or request.opens:
            self._send(site, pending, request.message)
        else:  # a new connection may be a new process, which goes on from what is on its disk
            self._open(site, pending)

    def _open(self, site: int, pending: _Pending) -> None:
        assert self._links.opening is not None
        pending.opening, pending.awaited = True, self._links.number()
        pending.whole_sent = False  # the site has forgotten that, too
        self._send(site, pending, self._links.opening(site, pending.awaited))

    def _send(self, site: int, pending: _Pending, message: wire.Message) -> None:
        record = self._links.records[site]
        record.owes = pending.awaited
        record.sent += len(message)
        self._links.transport.send(site, message)

    def _finished(self) -> bool:
        if self._pending:
            self._skip_unresponsive()
        if self._pending:
            return False
        links, good, missing = self._links, len(self._replies), len(self._away)
        if not missing or (self._least is not None and good >= self._least):
            if self._paused and good:
                links.note("The run goes on." if links.opening is not None else "All sites are there.")
            return True
        needed = len(self._requests) if self._least is None else self._least
        who = "; ".join(f"{links.name(site)} {why.rstrip('.')}" for site, why in self._away.items())
        refused = [r for r in (links.records[site] for site in self._away) if r.state == "refused"]
        refusing = sum(record.final or not links.transport.rejoins for record in refused)
        hopeless = refusing and good + missing - refusing < needed
        if hopeless or (links.patience is not None and time.monotonic() - self._begin >= links.patience):
            if self._least is None:
                raise SiteError(f"{who}.")
            return True
        if not self._paused:
            self._paused = True
            if links.opening is None:
                links.note(f"Waiting for {', '.join(map(links.name, self._away))}.")
            else:
                links.note(f"The run pauses: {good} of {needed} replies that it needs are there ({who}).")
        return False

    def _skip_unresponsive(self) -> None:
        """Leave out sites that have answered nothing for a while, once the others' replies are enough."""
        records = self._links.records
        if self._least is None or len(self._replies) < self._least:
            return
        if all(records[site].unanswered >= _TRIES for site in self._pending):
            for site in list(self._pending):
                del self._pending[site]
                records[site].becomes("late")
                self._away[site] = records[site].why

    def _seconds(self) -> float:
        """Return how long to wait for an event."""
        now, ends = time.monotonic(), [_TICK]
        if self._pending:
            ends.append(self._oldest + self._links.deadline - now)
        if self._paused and self._links.patience is not None:
            ends.append(self._begin + self._links.patience - now)
        return max(0.0, min(ends))

    def _check_deadlines(self) -> None:
        now, deadline = time.monotonic(), self._links.deadline
        if not self._pending or now - self._oldest < deadline:
            return
        for site, pending in list(self._pending.items()):
            if now - pending.since >= deadline:
                del self._pending[site]
                self._leave_out(site, "late", f"has not replied in {deadline:g} s")
        self._oldest = min((pending.since for pending in self._pending.values()), default=now)

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
        """Report what happens to a site, unless it keeps reconnecting without answering."""
        if self._links.records[site].unanswered <= _TRIES:
            self._links.note(f"{self._links.name(site)} {text.rstrip('.')}.")
        else:
            self._links.watch(self._links)

    def _take(self, event: Event) -> None:
        links, site = self._links, event.site
        record, pending = links.records[site], self._pending.get(site)
        if event.kind == "gone":
            return self._lose(site, printable(bytes(event.message).decode(errors="replace")) or "is gone")
        before = record.becomes("connected")
        if event.kind == "here":
            record.opened = record.final = False
            self._note(site, "is connected")
            if site in self._requests and site not in self._replies and site not in self._wrong:
                self._ask(site, self._request(site))
            return None
        record.received += len(event.message)
        try:
            reply = Reply(*wire.decode(event.message))
        except wire.WireError as error:
            if pending is not None:
                return self._reject(site, f"sends something that is not a message ({printable(error)})")
            links.dropped += 1
            return None
        if pending is not None and reply.header.get("number") == pending.awaited:
            return self._answer(site, pending, reply)
        links.dropped += 1
        self._take_late(site, reply)
        if before in ("late", "gone") and pending is None and site in self._away and record.state != "refused":
            self._ask(site, self._request(site))
        return None

    def _request(self, site: int) -> Request:
        """Return the request for a site that is back."""
        return self._requests[site]

    def _lose(self, site: int, why: str) -> None:
        record = self._links.records[site]
        refused = record.state == "refused"
        if self._pending.pop(site, None) is not None:
            self._leave_out(site, "gone", why)
        elif record.becomes("gone") != "gone":
            self._note(site, why)
            if site in self._away and not refused:  # else the refusal says more
                self._away[site] = why

    def _take_late(self, site: int, reply: Reply) -> None:
        """Note a reply to an earlier request: too late to be used, but it shows that the site answers."""
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

    def _answer(self, site: int, pending: _Pending, reply: Reply) -> None:
        links, answer = self._links, reply.header.get("answer")
        if answer == "closed" and links.opening is not None and not pending.opening:
            return self._open(site, pending)
        if answer == "opened":
            links.opened[site], links.records[site].opened = reply.header, True
            if pending.opening:
                pending.opening, pending.awaited = False, pending.request.number
                return self._send(site, pending, pending.request.message)
        if answer == "resync" and pending.request.whole is not None and not pending.whole_sent:
            pending.awaited, pending.whole_sent = links.number(), True
            return self._send(site, pending, pending.request.whole(pending.awaited))
        del self._pending[site]
        if answer == "refused":
            links.records[site].final = reply.header.get("final") is True
            return self._leave_out(site, "refused", f"refuses: {printable(reply.header.get('why'))}")
        if answer == "stale":
            why = "is ahead of the coordinator, because another coordinator has this run"
            if self._least is None:
                raise SiteError(f"{links.name(site)} {why.rstrip('.')}.")
            return self._leave_out(site, "refused", why)
        if answer not in ("value", "opened", "hello"):
            return self._reject(site, f"answers {printable(repr(answer))}, which does not fit the request")
        wrong = self._check(site, reply)
        if wrong is not None:
            return self._reject(site, printable(wrong, _LINE))
        links.records[site].unanswered = 0
        spent = reply.header.get("epsilon")
        if isinstance(spent, float) and math.isfinite(spent):
            links.records[site].epsilon = spent
        head = reply.header.get("head")
        if is_head(head):
            links.records[site].head = head
        self._replies[site] = self._keep(site, reply)
        return None

    def _reject(self, site: int, why: str) -> None:
        links = self._links
        self._pending.pop(site, None)
        if self._dismiss:
            self._leave_out(site, "refused", why)
            return links.transport.dismiss(site, why)
        self._wrong.add(site)
        if self._least is None:
            raise SiteError(f"{links.name(site)} {why.rstrip('.')}.")
        links.note(f"{links.name(site)} {why}: it is left out.")
        return None


def needed(error: SiteError) -> RuntimeError:
    """Return the error of a run that can't go on without a site."""
    away = ", and the run has no faults=rk.Faults(...)." if "did not answer" in str(error) else "."
    return RuntimeError(f"{str(error).rstrip('.')}{away}")
