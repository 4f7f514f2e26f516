"""Messages on their way in: in memory as long as there is room for all of them, and in temporary files beyond that."""

import tempfile
import threading
import weakref
from typing import IO

from rookery.engines.federation.wire import Parts

MEMORY = 256 << 20  # bytes of long messages that a coordinator holds in memory


class Room:
    """The bytes that all incoming messages together may hold in memory."""

    def __init__(self, size: int = MEMORY) -> None:
        self._free, self._lock = size, threading.Lock()

    def take(self, size: int) -> bool:
        """Take this many bytes; return False if there is no room for them."""
        with self._lock:
            if size > self._free:
                return False
            self._free -= size
            return True

    def give(self, sizes: list[int]) -> None:
        """Give back what was taken."""
        with self._lock:
            self._free += sum(sizes)


class Incoming(Parts):
    """A message of several pieces. What it takes of the room is given back when it is deleted."""

    def __init__(self, room: Room) -> None:
        super().__init__([])
        self._room, self._taken = room, list[int]()
        self._file: IO[bytes] | None = None
        weakref.finalize(self, room.give, self._taken)

    def add(self, piece: bytes) -> None:
        """Add the next piece."""
        if self._file is None and self._room.take(len(piece)):
            self._taken.append(len(piece))
            self.parts.append(piece)
            return
        if self._file is None:
            self._file = tempfile.TemporaryFile()  # noqa: SIM115  # it lives as long as this message
            weakref.finalize(self, self._file.close)
        self._file.write(piece)

    def __len__(self) -> int:
        return sum(self._taken) + (0 if self._file is None else self._file.tell())

    def __bytes__(self) -> bytes:
        if self._file is None:
            return b"".join(self.parts)
        self._file.seek(0)
        return b"".join([*self.parts, self._file.read()])
