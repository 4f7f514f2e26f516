"""A site's folder: its lock, and what the site remembers of a run.

A site keeps the last two versions, so that it can go back by one round, in one file in the wire format. The file is
replaced as a whole: a site that is killed has the old or the new one.
"""

import os
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple
from weakref import WeakValueDictionary

import numpy as np

from rookery.engines.federation import wire

try:
    import fcntl
except ImportError:  # Windows: no lock
    fcntl = None  # type: ignore[assignment]

LOCK = "lock"  # the file's name
FORMAT = 1  # of what a site remembers; Rookery 0.1 did not name it
Moment = tuple[int, int]  # (0, 0) for the start, (1, t) for round t; (2, t) asks for an evaluation after t rounds
Memory = dict[str, list[Any]]  # the leaves that the client ("memory") and its side of the channel ("client") remember


class FormatError(ValueError):
    """A file of another version of Rookery."""


class Lock:
    """An exclusive lock of this process on a site's folder, while the object lives: see `locked`."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._file = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            if fcntl is not None:
                fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            process = os.read(self._file, 20).decode(errors="replace").strip()
            which = f"process {process}" if process.isdigit() else "another process"
            raise ValueError(
                f"{folder} is in use by {which}, and only one process may use a site's folder. Stop that process, or "
                "give this site another folder."
            ) from None
        except OSError as error:
            raise ValueError(
                f"{folder} can't be locked ({error.strerror}), so two processes could write to it. Give a folder on a "
                "local disk."
            ) from None
        with suppress(OSError):  # on a full disk only the process number is missing
            os.ftruncate(self._file, 0)
            os.pwrite(self._file, f"{os.getpid()}\n".encode(), 0)

    def __del__(self) -> None:
        if hasattr(self, "_file"):
            os.close(self._file)


_LOCKS: WeakValueDictionary[Path, Lock] = WeakValueDictionary()


def locked(folder: str | Path) -> Lock:
    """Lock a site's folder, and make it if need be; ValueError if another process holds the lock.

    All users within one process share the lock. The system releases it when the process ends, even if it is killed; a
    stopped process (SIGSTOP) keeps it.
    """
    path = Path(folder).resolve()
    lock = _LOCKS.get(path)
    if lock is None:
        lock = _LOCKS[path] = Lock(path)
    return lock


class Version(NamedTuple):
    """What a site remembers after a moment in which it wrote."""

    moment: Moment
    memory: Memory


class Store:
    """The file of one run.

    Arguments:
        path: the file.
        data: a digest of the data that the site has now. It stays with the site.
        plan: the fingerprint of the run's plan; ValueError if the file belongs to another plan.
        run: a digest that identifies the run. The file keeps the digest of the run that made it.
    """

    def __init__(self, path: str | Path, data: str = "", plan: str = "", run: str = "") -> None:
        self.path, self.data, self.plan, self._run = Path(path), data, plan, run
        found = self._read()[0] if self.path.exists() else {"run": run}
        self._made_by = found.get("run", "")
        if found.get("plan", plan) != plan:
            raise ValueError("its memory under this name is another run's. Give the name of this run.")

    def begin(self) -> None:
        """Make the file, which notes the data's digest, unless it exists; ValueError if another run made it."""
        if not self.path.exists():
            self.write([])
        self._check_run()

    def check(self) -> None:
        """Raise ValueError if the file was made with other data than the site has now."""
        if self.path.exists() and self._read()[0].get("data", "") != self.data:
            raise ValueError("its data have changed since it began this run. Restore them, or begin a new run.")

    def delete(self) -> None:
        """Delete the file; ValueError if another run made it."""
        self._check_run()
        self.path.unlink(missing_ok=True)

    def _check_run(self) -> None:
        if self._made_by != self._run:
            raise ValueError("its memory under this name is another run's, and is kept. Give the run a new name.")

    def write(self, versions: list[Version]) -> None:
        """Replace the file, and make sure that it is on the disk."""
        described = [[list(v.moment), {kind: len(leaves) for kind, leaves in v.memory.items()}] for v in versions]
        arrays = [np.asarray(leaf) for v in versions for leaves in v.memory.values() for leaf in leaves]
        self.path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        new = self.path.with_suffix(".new")
        with os.fdopen(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
            header = {
                "format": FORMAT,
                "versions": described,
                "data": self.data,
                "plan": self.plan,
                "run": self._made_by,
            }
            file.write(wire.encode(header, arrays))
            file.flush()
            os.fsync(file.fileno())
        new.replace(self.path)

    def read(self) -> list[Version]:
        """Return the versions, oldest first; none if there is no file."""
        return self._read()[1] if self.path.exists() else []

    def _read(self) -> tuple[dict[str, Any], list[Version]]:
        try:
            header, arrays = wire.decode(self.path.read_bytes())
            written = header.get("format", FORMAT)
            if written != FORMAT:
                raise FormatError(
                    f"{self.path.name} must have the format {FORMAT} of this version; got {written!r}. Update Rookery."
                )
            rest, versions = iter(arrays), []
            for (phase, t), counts in header["versions"]:
                memory = {kind: [next(rest) for _ in range(count)] for kind, count in counts.items()}
                versions.append(Version((int(phase), int(t)), memory))
        except FormatError:
            raise
        except (wire.WireError, KeyError, TypeError, ValueError, StopIteration) as error:
            raise ValueError(
                f"{self.path.name} is not a site's memory, or is damaged. Restore it from a copy."
            ) from error
        return header, versions
