"""Clocks that are days ahead."""

from datetime import datetime, timedelta
from typing import Any


def ahead(days: float) -> type[datetime]:
    """A `datetime` that says it is so many days later."""

    class Clock(datetime):
        @classmethod
        def now(cls, tz: Any = None) -> datetime:
            return datetime.now(tz) + timedelta(days=days)

    return Clock
