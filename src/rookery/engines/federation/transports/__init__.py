"""What carries messages between the coordinator and the sites: bytes, whole, in order, or not at all."""

from typing import NamedTuple, Protocol

from rookery.engines.federation.wire import Message


class Event(NamedTuple):
    """Something that happened to a site's connection."""

    site: int
    kind: str  # "reply"; "gone", with the reason; "here", when it is connected, also again
    message: Message = b""


class Transport(Protocol):
    """The coordinator's end. Which reply belongs to which request is not its concern."""

    names: tuple[str, ...]  # of the sites: a site's number is its place among them
    limit: int  # bytes that a reply may have
    rejoins: bool  # whether a site that refuses may come back with another answer

    def send(self, site: int, message: Message) -> None:
        """Send a request. It does not wait, and does not raise: of a site that is not there it says "gone"."""

    def receive(self, seconds: float) -> Event | None:
        """The next event; None if there is none in that time."""

    def dismiss(self, site: int, why: str) -> None:
        """Tell a site why it can't take part, and end its connection."""

    def close(self, why: str = "") -> None:
        """Give up all connections; `why`, if the run was not completed."""
