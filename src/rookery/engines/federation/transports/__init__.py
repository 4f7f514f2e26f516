"""Transports carry messages between the coordinator and the sites: whole and in order, or not at all."""

from typing import Literal, NamedTuple, Protocol

from rookery.engines.federation.wire import Message


class Event(NamedTuple):
    """An event on a site's connection.

    Attributes:
        site: the site's number.
        kind: "reply"; "here", when it connects or reconnects; "gone", when its connection has ended.
        message: the reply, or why the site is gone, for example b"has ended its process"; b"" for "is gone".
    """

    site: int
    kind: Literal["reply", "here", "gone"]
    message: Message = b""


class Transport(Protocol):
    """The coordinator's end. It does not know which reply belongs to which request."""

    names: tuple[str, ...]  # of the sites; a site's number is its place among them
    limit: int  # the most bytes of a reply; set by the coordinator when it knows the plans
    rejoins: bool  # whether a site that refuses may come back with another answer

    def send(self, site: int, message: Message) -> None:
        """Send a request, without waiting or raising; a "gone" event follows if the site is not there."""

    def receive(self, seconds: float) -> Event | None:
        """Return the next event; None if there is none in that time."""

    def dismiss(self, site: int, why: str) -> None:
        """Tell a site why it can't take part, and end its connection."""

    def close(self, why: str = "") -> None:
        """End all connections; `why` says why the run was not completed."""
