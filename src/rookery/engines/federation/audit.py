"""The audit log of a site: what it agreed to, what it refused, and every reply, in a file that only grows.

Each line is a JSON object with the SHA-256 of the line before it. A second file, `audit.head`, holds the number of
lines and the hash of the last one. Together they show that a line was changed, removed or inserted, wherever it stands.
They protect against accidents, and against anyone who can't write to both files; who can write to both, as the owner
can, is able to make a consistent pair. The log holds no value of the data and no secret: of a request and of a reply it
has the SHA-256, and of a reply the bytes.
"""

import hashlib
import json
import os
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

from rookery.engines.federation.site import Sent
from rookery.engines.federation.store import Moment, locked

FILE = "audit.jsonl"  # the file's name in a site's folder
PHASES = ("start", "round", "evaluation")
_FIRST = "0" * 64  # what the first line has in the place of a hash


@dataclass
class Counts:
    """What a site has answered and refused.

    Attributes:
        rounds: rounds in which the site replied. The start of a run counts as one if the site replies in it.
        evaluations: evaluations to which it replied.
        exchanges: replies to exchanges, those of evaluations included. A reply that is sent again counts again.
        bytes_up: bytes of arrays in them.
        refused: runs and requests that it refused.
    """

    rounds: int = 0
    evaluations: int = 0
    exchanges: int = 0
    bytes_up: int = 0
    refused: int = 0


@dataclass
class Answered:
    """What a site has answered in one run.

    Attributes:
        opening: the digest of the words with which the run was opened.
        counts: how much it was.
        moment: the last moment of the start or of a round.
        requests: the digests of the requests of that moment, by exchange.
        evaluated: after how many rounds the last evaluation was; -1: there was none.
        evaluations: the digests of that evaluation's requests, by exchange.
    """

    opening: str = ""
    counts: Counts = field(default_factory=Counts)
    moment: Moment = (-1, 0)
    requests: dict[Any, set[str]] = field(default_factory=dict)
    evaluated: int = -1
    evaluations: dict[Any, set[str]] = field(default_factory=dict)

    def is_new(self, moment: Moment) -> bool:
        """Whether nothing was answered in this moment."""
        return moment[1] != self.evaluated if moment[0] == 2 else moment != self.moment

    def asked(self, moment: Moment, call: Any) -> set[str]:
        """The digests of the requests for an exchange that were answered in the moment, if it is the last one."""
        if self.is_new(moment):
            return set()
        return (self.evaluations if moment[0] == 2 else self.requests).get(call, set())

    def note(self, moment: Moment, call: Any, request: str) -> None:
        """Note an answer."""
        new = self.is_new(moment)
        if moment[0] == 2:
            self.counts.evaluations += new
            self.evaluated, self.evaluations = max(self.evaluated, moment[1]), {} if new else self.evaluations
            self.evaluations.setdefault(call, set()).add(request)
        else:
            self.counts.rounds += new
            self.moment, self.requests = max(self.moment, moment), {} if new else self.requests
            self.requests.setdefault(call, set()).add(request)


class Audit:
    """The log, and what it counts over all runs that it knows of.

    A line is written before its reply is sent. If it can't be, the file is cut back to its last whole line, the reply
    is not sent, and the next line is tried afresh; so is a line that a crash has torn, when the log is opened again.
    The log is on the disk at the latest when the next round begins, or when it is closed.

    Arguments:
        path: of the file, which is gone on from; ValueError if it is broken, or in use by another process. None: the
            log is in memory alone, and a restart forgets it.

    Attributes:
        runs: what was answered in each run, by its name.
        counts: the same over all runs.
    """

    def __init__(self, path: str | Path | None = None) -> None:
        self.path = None if path is None else Path(path)
        self.runs: dict[str, Answered] = {}
        self.counts = Counts()
        self._last, self._lines, self._end, self._whole = _FIRST, 0, 0, True
        self._run, self._fingerprint = "", ""
        self._file = -1
        if self.path is not None:
            self._lock = locked(self.path.parent)
            self._go_on(self.path)

    def _go_on(self, path: Path) -> None:
        found = _scan(path, self._count)
        if found.broken is not None:
            raise ValueError(
                f"{path} is not as it was written, from line {found.broken} on. To keep it as evidence, move "
                f"{path.name} and {_head(path).name} to another folder; a new log is begun then, and counts from 0."
            )
        self._last, self._lines, self._end = found.last, found.lines, found.end
        self._file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        if found.torn:
            self._whole = False
            with suppress(OSError):  # on a full disk it is tried again with the next line
                self._write({"event": "torn"}, sync=True)
        elif found.lines:
            with suppress(OSError):
                self._sync()

    def opened(self, run: str, opening: str, fingerprint: str, clients: int, cohort: int) -> None:
        """The site takes part in a run. OSError if that can't be written."""
        told = {"run": run, "opening": opening, "fingerprint": fingerprint, "clients": clients, "cohort": cohort}
        self._write({"event": "opened", **told}, sync=True)
        self._run, self._fingerprint = run, fingerprint

    def refused(self, header: dict[str, Any], why: str) -> None:
        """It refuses a run, or a request. OSError if that can't be written."""
        run = header.get("run")
        what = {"open": "a run", "work": "a request"}.get(str(header.get("do")), "a message")
        told = {"run": run if isinstance(run, str) else "", "what": what, "why": why}
        self._write({"event": "refused", **{name: text[:500] for name, text in told.items()}}, sync=False)

    def replied(
        self, moment: Moment, call: int, exchange: str, kind: str, aggregated: bool, request: str, sent: Sent
    ) -> None:
        """It replies, in the run that was opened last; OSError if that can't be written.

        `kind` is "finish" for the end of a round, at which nothing but work is reported; `request` is a digest of all
        that the reply depends on.
        """
        phase, t = moment
        line = {
            "event": "reply",
            "run": self._run,
            "fingerprint": self._fingerprint,
            "phase": PHASES[phase],
            "round": t,
            "call": call,
            "exchange": exchange,
            "kind": kind,
            "aggregated": aggregated,
            "request": request,
            "bytes": sent.bytes,
            "sha256": sent.digest,
        }
        self._write(line, sync=phase != 1 or self.answered.is_new(moment))

    @property
    def answered(self) -> Answered:
        """What was answered in the run that was opened last."""
        return self.runs.setdefault(self._run, Answered())

    def close(self) -> None:
        """Close the file."""
        if self._file >= 0:
            with suppress(OSError):
                self._sync()
            os.close(self._file)
            self._file = -1

    def _count(self, line: dict[str, Any]) -> None:
        if line["event"] == "refused":
            self.counts.refused += 1
            if line["run"] in self.runs:
                self.runs[line["run"]].counts.refused += 1
        elif line["event"] == "opened":
            own = self.runs.setdefault(line["run"], Answered())
            own.opening = own.opening or line.get("opening", "")
        elif line["event"] == "reply":
            own = self.runs.setdefault(line["run"], Answered())
            before = own.counts.rounds, own.counts.evaluations
            moment = (PHASES.index(line["phase"]), line["round"])
            own.note(moment, line.get("call", line["exchange"]), line.get("request", line["sha256"]))
            self.counts.rounds += own.counts.rounds - before[0]
            self.counts.evaluations += own.counts.evaluations - before[1]
            for counts in (self.counts, own.counts):
                counts.exchanges += line["kind"] != "finish"
                counts.bytes_up += line["bytes"]

    def _write(self, line: dict[str, Any], sync: bool) -> None:
        whole = {"time": datetime.now(UTC).isoformat(timespec="milliseconds"), **line, "before": self._last}
        raw = json.dumps(whole, allow_nan=False).encode() + b"\n"
        if self._file >= 0:
            self._append(raw, sync)
        self._last = _hash(raw)
        self._lines, self._end = self._lines + 1, self._end + len(raw)
        self._count(whole)
        if sync and self._file >= 0:
            self._write_head()

    def _append(self, raw: bytes, sync: bool) -> None:
        """Write a line, or nothing of it."""
        try:
            if not self._whole:
                os.ftruncate(self._file, self._end)
            self._whole = False
            written = 0
            while written < len(raw):
                written += os.write(self._file, raw[written:])
            if sync:
                os.fsync(self._file)
            self._whole = True
        except OSError:
            with suppress(OSError):
                os.ftruncate(self._file, self._end)
            raise

    def _sync(self) -> None:
        """Have all lines on the disk, and then their number and the last hash."""
        os.fsync(self._file)
        self._write_head()

    def _write_head(self) -> None:
        """Replace the second file. One that is behind, for the disk is full, is still true of the lines before."""
        assert self.path is not None
        path = _head(self.path)
        new = path.with_suffix(".new")
        with suppress(OSError):
            with os.fdopen(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as file:
                json.dump({"lines": self._lines, "sha256": self._last}, file)
            new.replace(path)


class Found(NamedTuple):
    """What a look at a log finds.

    Attributes:
        broken: the number, from 1 on, of the first line that is not what was written there; None if all are.
        lines: how many whole lines there are, up to that one.
        last: the hash of the last of them.
        end: where it ends, in bytes.
        torn: whether a part of a line follows, which a crash has torn or which is being written.
        head: whether the second file is there, so that lines which were cut off at the end are found.
    """

    broken: int | None
    lines: int
    last: str
    end: int
    torn: bool
    head: bool


def verify(path: str | Path) -> int | None:
    """Return the number, from 1 on, of the first line that is not what was written there; None if all are."""
    return _scan(Path(path), lambda line: None).broken


def read(path: str | Path) -> tuple[Found, Audit]:
    """Look at a log without changing it: what was found, and what it counts, up to the first broken line."""
    log = Audit()
    return _scan(Path(path), log._count), log


def _scan(path: Path, each: Callable[[dict[str, Any]], None]) -> Found:
    """Look at all lines; `each` is told what they say."""
    wanted = _read_head(path)
    lines, hash_there = wanted or (0, "")
    last, end, count, odd = _FIRST, 0, 0, None

    def found(broken: int | None, torn: bool = False) -> Found:
        return Found(broken, count, last, end, torn, wanted is not None)

    for raw, line in _lines(path):
        if not raw.endswith(b"\n"):
            return found(count + 1 if count < lines else odd, torn=True)
        if odd is not None and (line is None or line["event"] != "torn"):
            return found(odd)
        odd = None
        if line is None:  # a torn line may stand there, as earlier releases left it, if the next one says so
            odd = count + 1
        elif line["before"] != last:
            return found(count + 1)
        if count + 1 == lines and _hash(raw) != hash_there:
            return found(count + 1)
        if line is not None:
            try:
                each(line)
            except (KeyError, TypeError, ValueError):
                return found(count + 1)
        last, end, count = _hash(raw), end + len(raw), count + 1
    return found(count + 1 if count < lines else odd)


def _head(path: Path) -> Path:
    return path.with_suffix(".head")


def _read_head(path: Path) -> tuple[int, str] | None:
    """The number of lines and the last hash, as the second file has them; None if it can't tell."""
    try:
        match json.loads(_head(path).read_bytes()):
            case {"lines": int(lines), "sha256": str(last)}:
                return lines, last
    except (OSError, ValueError):
        pass
    return None


def _lines(path: Path) -> Iterator[tuple[bytes, dict[str, Any] | None]]:
    """The lines: their bytes, and what they say; None for what is not a line of a log."""
    if not path.exists():
        return
    with path.open("rb") as file:
        for raw in file:
            try:
                line = json.loads(raw)
                whole = isinstance(line, dict) and {"event", "before"} <= set(line)
            except ValueError:
                whole = False
            yield raw, line if whole else None


def _hash(raw: bytes) -> str:
    return hashlib.sha256(raw.removesuffix(b"\n")).hexdigest()
