"""Sites within this process: a request is answered when its reply is received, so that replies are there one by one."""

import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from rookery.engines.federation.transports import Event
from rookery.engines.federation.wire import Message

ATTEMPTS = 3  # to reach a site


class Memory:
    """A `Transport` to sites in this process.

    Arguments:
        count: the number of sites.
        ask: ask(site, request) -> reply; it raises TimeoutError or ConnectionError if there is none.
        names: the sites' names; None: "client 0" and so on.
    """

    def __init__(self, count: int, ask: Callable[[int, Message], Message], names: Sequence[str] | None = None) -> None:
        self.names = tuple(names or (f"client {i}" for i in range(count)))
        self._ask, self.limit, self.rejoins = ask, 0, False  # nobody looks at the limit
        self._requests: deque[tuple[int, Message]] = deque()

    def send(self, site: int, message: Message) -> None:
        """See `Transport`."""
        self._requests.append((site, message))

    def receive(self, seconds: float) -> Event | None:
        """Ask the next site, up to three times."""
        if not self._requests:
            if seconds > 0:
                time.sleep(min(seconds, 0.01))
            return None
        site, message = self._requests.popleft()
        for _ in range(ATTEMPTS):
            try:
                return Event(site, "reply", self._ask(site, message))
            except (TimeoutError, ConnectionError):
                continue
        return Event(site, "gone", f"did not answer, {ATTEMPTS} times".encode())

    def dismiss(self, site: int, why: str) -> None:
        """Nothing to do."""

    def close(self, why: str = "") -> None:
        """Nothing to do."""


def in_process(sites: Sequence[Any], transport: Any = None) -> Memory:
    """Return the transport to these sites; `transport(sites)` may give another ask(site, request)."""
    ask = (lambda i, request: sites[i].handle(request)) if transport is None else transport(sites)
    return Memory(len(sites), ask)
