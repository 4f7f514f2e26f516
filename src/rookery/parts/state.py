"""The state of methods that keep nothing but their variables."""

from typing import Any, NamedTuple


class State(NamedTuple):
    """The two variables; y is empty in single-level problems."""

    x: Any
    y: Any = ()
