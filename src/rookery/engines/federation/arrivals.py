"""Replies of sites that work at their own pace, taken in the order in which they arrive, over many rounds."""

import time
from collections import deque
from collections.abc import Callable

from rookery.engines.federation.links import Collector, Links, Reply, Request, SiteError


class Arrivals(Collector):
    """Collects replies one by one. A site has one request at a time.

    The deadline only decides which sites count as present: a late reply counts like any other. A site that has lost its
    connection, and with it its request, is sent a new request when it is back.

    Arguments:
        links: the links to all sites.
        least: how many sites must be present. If there are fewer, the run waits for others to come back.
        check: check(site, reply) -> what is wrong with it, or None.

    Attributes:
        renew: renew(site) -> the request for a site that is back.
    """

    renew: Callable[[int], Request]

    def __init__(self, links: Links, least: int, check: Callable[[int, Reply], str | None]) -> None:
        super().__init__(links, {}, None, check, False, self._arrive)
        self._requests: dict[int, Request] = {}
        self._needed = least
        self._arrived: deque[tuple[int, Reply]] = deque()
        self._late: set[int] = set()
        self._waiting_since = 0.0

    def is_idle(self, site: int) -> bool:
        """Return whether a site may begin: it has no request, and its last reply has been taken."""
        return (
            site not in self._pending
            and all(other != site for other, _ in self._arrived)
            and self._links.records[site].state != "refused"
        )

    def begin(self, site: int, request: Request) -> None:
        """Send a site its next request."""
        self._replies.pop(site, None)
        self._requests[site] = request
        self._ask(site, request)

    def take(self) -> tuple[int, Reply]:
        """Return the first reply and its site, once enough sites are present; raise SiteError if they stay away."""
        links = self._links
        while not (self._are_present() and self._arrived):
            self._receive(links.patience if self._paused else None)
        site, reply = self._arrived.popleft()
        links.records[site].replies += 1
        return site, reply

    def settle(self) -> None:
        """Wait until all sites have replied, except for those that are gone or late: these lose their requests."""
        self._requests.clear()  # a site that comes back now waits for the next round
        while set(self._pending) - self._late:
            self._receive(None)
        self._pending.clear()
        self._late.clear()

    def _arrive(self, site: int, reply: Reply) -> Reply:
        self._late.discard(site)
        self._arrived.append((site, reply))
        return reply

    def _receive(self, patience: float | None) -> None:
        """Wait for an event, for a second at most."""
        links, now = self._links, time.monotonic()
        if patience is not None and now - self._waiting_since >= patience:
            raise SiteError(f"{self._missing()}.")
        seconds = 1.0 if patience is None else min(1.0, self._waiting_since + patience - now)
        event = links.transport.receive(seconds)
        if event is not None:
            self._take(event)
        self._late &= set(self._pending)
        for site, pending in self._pending.items():
            if site not in self._late and time.monotonic() - pending.since >= links.deadline:
                self._late.add(site)
                links.records[site].why = f"has not replied in {links.deadline:g} s"
                links.records[site].becomes("late")
                links.note(f"{links.name(site)} {links.records[site].why}.")

    def _are_present(self) -> bool:
        """Return whether enough sites are present, and say so if that changes."""
        links = self._links
        present = len(links.records) - len({*self._away, *self._late})
        if present >= self._needed:
            if self._paused:
                links.note("The run goes on.")
            self._paused = False
            return True
        refusing = [record for record in links.records if record.state == "refused"]
        if len(links.records) - sum(r.final or not links.transport.rejoins for r in refusing) < self._needed:
            raise SiteError(f"{self._missing()}.")
        if not self._paused:
            self._paused, self._waiting_since = True, time.monotonic()
            if links.patience != 0:
                links.note(f"The run pauses: {present} of the {self._needed} sites that it needs are there.")
        return False

    def _missing(self) -> str:
        away = {site: self._away.get(site, self._links.records[site].why) for site in (*self._away, *self._late)}
        return "; ".join(f"{self._links.name(site)} {why.rstrip('.')}" for site, why in away.items())

    def _request(self, site: int) -> Request:
        self._requests[site] = self.renew(site)
        return self._requests[site]
