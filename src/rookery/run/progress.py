"""Progress of a run: rounds per call, Ctrl-C, the bar, and the trackers that follow it."""

import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import Any, Protocol, runtime_checkable

from rookery.run.result import Run

SECONDS_PER_CALL = 0.5  # about how long a call may take, so that the bar moves and Ctrl-C is noticed


class Pace:
    """How many rounds to compute in one call: up to eight times as many as before, as long as calls stay short."""

    def __init__(self, most: int) -> None:
        self._most, self._per_call = most, 1

    def next(self, wanted: int) -> int:
        """Return the rounds of the next call, at most `wanted`."""
        return max(1, min(wanted, self._most, self._per_call))

    def took(self, count: int, seconds: float) -> None:
        """Record how long a call of `count` rounds took."""
        self._per_call = max(1, min(8 * count, int(SECONDS_PER_CALL * count / seconds)))


@contextmanager
def interrupts(announce: bool = False) -> Iterator[threading.Event]:
    """Yield an event that the first Ctrl-C sets, with a message if `announce`; a second raises KeyboardInterrupt."""
    event = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield event
        return
    before = signal.getsignal(signal.SIGINT)

    def handle(number: int, frame: FrameType | None) -> None:
        if event.is_set():
            raise KeyboardInterrupt
        event.set()
        if announce:  # print is not safe here: the signal may have interrupted another print
            os.write(2, b"Stopping after this round; press Ctrl-C again to stop immediately.\n")

    signal.signal(signal.SIGINT, handle)
    try:
        yield event
    finally:
        signal.signal(signal.SIGINT, before)


@contextmanager
def progress_bar(
    progress: bool | str | None, algorithm: Any, notes: Sequence[str] = (), counts: bool = True
) -> Iterator[Callable[[int, int, str], None]]:
    """Yield a function update(done, total, text) for a bar on standard error, printed below the notes.

    Arguments:
        progress: whether to show the bar; a string is its title, by default the algorithm's name. None: show it if
            standard error is a terminal.
        counts: show `done` and `total`, and keep the bar when it is complete.
    """
    if not (sys.stderr.isatty() if progress is None else progress):
        yield lambda done, total, text: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    shown = [MofNCompleteColumn()] if counts else []
    columns = [TextColumn("{task.description}"), BarColumn(bar_width=24), *shown, TimeRemainingColumn()]
    columns.append(TextColumn("{task.fields[text]}"))
    with Progress(*columns, console=Console(stderr=True), transient=not counts) as bar:
        task = bar.add_task(progress if isinstance(progress, str) else type(algorithm).__name__, total=1, text="")
        for note in notes:
            bar.console.print(note, highlight=False)
        yield lambda done, total, text: bar.update(task, completed=done, total=total, text=text)


@runtime_checkable
class Tracker(Protocol):
    """A callback of `solve` that gets the settings, every row of the history, and the end of a run.

    If the run continues from a checkpoint, the tracker gets all rows, from the first.
    """

    def start(self, settings: dict[str, Any]) -> None:
        """Begin a run with these settings: its algorithm, hyperparameters, seed and so on."""

    def row(self, row: dict[str, Any]) -> None:
        """Take a new row of the history, a dict by column."""

    def end(self, run: Run | None) -> None:
        """End the run; `run` is None if an exception ended it."""


class Followers:
    """The trackers of one run: each gets the settings, each row once, and the end, even after an exception."""

    def __init__(self, trackers: Sequence[Tracker], settings: dict[str, Any]) -> None:
        self._trackers, self._settings, self._known = trackers, settings, 0
        self.run: Run | None = None

    def __enter__(self) -> "Followers":
        for tracker in self._trackers:
            tracker.start(self._settings)
        return self

    def tell(self, rows: Sequence[dict[str, Any]]) -> None:
        """Pass on the rows that are new."""
        for row in rows[self._known :]:
            for tracker in self._trackers:
                tracker.row(dict(row))
        self._known = len(rows)

    def __exit__(self, *error: object) -> None:
        for tracker in self._trackers:
            tracker.end(self.run)
