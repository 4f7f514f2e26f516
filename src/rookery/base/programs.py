"""A cache of compiled programs."""

import threading
from collections import OrderedDict
from collections.abc import Callable
from typing import Any


class Programs:
    """A cache of compiled programs that drops the least recently used. Threads may share it."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._lock = threading.RLock()
        self._programs: OrderedDict[Any, Any] = OrderedDict()
        self.made = 0  # how many had to be made

    def find(self, key: Any, make: Callable[[], Any]) -> Any:
        """Return the program with this key; `make` it if the cache does not have it."""
        with self._lock:  # `make` only wraps a function, which is compiled when it is first called
            if key not in self._programs:
                self.made += 1
                self._programs[key] = make()
            self._programs.move_to_end(key)
            program = self._programs[key]
            while len(self._programs) > self._most:
                self._programs.popitem(last=False)
            return program

    def clear(self) -> None:
        """Drop all programs."""
        with self._lock:
            self._programs.clear()
