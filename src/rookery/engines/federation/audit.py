"""A site's audit log: the runs it agreed to, what it refused, and every reply, in a file that only grows.

Each line is a JSON object with the SHA-256 of the line before it. A second file, `audit.head`, holds the number of
lines and the hash of the last one. Together they show whether any line was changed, removed or inserted. They protect
against accidents, and against anyone who can't write to both files. Someone who can, such as the owner, is able to
make a consistent pair, which differs from the heads that the coordinator has: see `heads`.

The log holds no value of the data and no secret: it has the SHA-256 of requests and replies, the size of replies, and
what was released of the site's records, with how much noise. Each line has a random number, so that the hash of a line,
which leaves the site as a head, can't be used to try out what the data may be.
"""

import hashlib
import json
import os
import secrets
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

from rookery.engines.federation.kits import Kit
from rookery.engines.federation.site import Sent
from rookery.engines.federation.spending import Release, Spending
from rookery.engines.federation.store import Moment, locked

FILE = "audit.jsonl"  # the file's name in a site's folder
RECEIPTS = ".receipts"  # the suffix of the file beside it, with the coordinator's receipts
PHASES = ("start", "round", "evaluation")
_SHOWN = 1000  # heads whose receipts may still come
_FIRST = "0" * 64  # the hash before the first line


@dataclass
class Counts:
    """What a site has answered and refused.

    Attributes:
        rounds: rounds in which the site replied. The start of a run counts as one if the site replies in it.
        evaluations: evaluations to which it replied.
        exchanges: replies to exchanges, including evaluations. A reply that is sent again counts again.
        bytes_up: bytes of arrays in these replies.
        refused: refused runs and requests.
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
        opening: the digest of the message that opened the run.
        counts: the totals.
        moment: the last start or round that was answered.
        evaluated: the number of rounds before the last evaluation; -1: there was none.
        requests: the digests of the requests at that moment and at the last evaluation, by exchange.
        spending: what was released of the site's records with noise.
        delta: the δ of the run's channel; None: the run is not private for each record.
    """

    opening: str = ""
    counts: Counts = field(default_factory=Counts)
    moment: Moment = (-1, 0)
    evaluated: int = -1
    requests: tuple[dict[Any, set[str]], dict[Any, set[str]]] = field(default_factory=lambda: ({}, {}))
    spending: Spending = field(default_factory=Spending)
    delta: float | None = None

    def is_new(self, moment: Moment) -> bool:
        """Return whether nothing was answered in this moment."""
        return moment[1] != self.evaluated if moment[0] == 2 else moment != self.moment

    def asked(self, moment: Moment, call: Any) -> set[str]:
        """Return the digests of the answered requests for an exchange in this moment, if this is the last moment."""
        return set() if self.is_new(moment) else self.requests[moment[0] == 2].get(call, set())

    def note(self, moment: Moment, call: Any, request: str) -> None:
        """Record an answer."""
        requests = self.requests[moment[0] == 2]
        if self.is_new(moment):
            requests.clear()
            self.counts.evaluations += moment[0] == 2
            self.counts.rounds += moment[0] != 2
        if moment[0] == 2:
            self.evaluated = max(self.evaluated, moment[1])
        else:
            self.moment = max(self.moment, moment)
        requests.setdefault(call, set()).add(request)


class Audit:
    """The log, and its totals over all runs.

    A line is written before its reply is sent. If it can't be written, the file is cut back to its last whole line, and
    the reply is not sent. A line that a crash has torn is cut off when the log is opened again. All lines are on the
    disk when the next round begins, or when the log is closed.

    Arguments:
        path: the file to continue; ValueError if it is broken, or in use by another process. None: the log is only in
            memory, and a restart forgets it.

    Attributes:
        runs: what was answered in each run, by the run's name.
        counts: the totals over all runs.
        spending: what was released of the site's records, in all runs.
        charged: identifies the noise of these releases.
        unmasked: by the digest of the request for a reply, the sites with which the reply was added up in a secure sum.
    """

    def __init__(self, path: str | Path | None = None) -> None:
        self.path = None if path is None else Path(path)
        self.kit: Kit | None = None
        self.shown: dict[int, tuple[str, str]] = {}
        self.runs: dict[str, Answered] = {}
        self.counts = Counts()
        self.spending = Spending()
        self.charged: set[str] = set()
        self.unmasked: dict[str, list[str]] = {}
        self._last, self._lines, self._end, self._whole = _FIRST, 0, 0, True
        self._run, self._fingerprint = "", ""
        self._file = -1
        if self.path is not None:
            self._lock = locked(self.path.parent)
            self._continue(self.path)

    def _continue(self, path: Path) -> None:
        found = _scan(path, self._count)
        if found.broken is not None:
            raise ValueError(
                f"{path} is not as it was written, from line {found.broken} on. To keep it as evidence, move "
                f"{path.name} and {_head(path).name} to another folder; a new log then counts from 0."
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

    def opened(
        self, run: str, opening: str, fingerprint: str, clients: int, cohort: int, delta: float | None = None
    ) -> None:
        """Log that the site takes part in a run; OSError if that can't be written.

        `delta` is the δ of a run that is private for each record.
        """
        line: dict[str, Any] = {"run": run, "opening": opening, "fingerprint": fingerprint, "clients": clients}
        line |= {"cohort": cohort, "delta": delta}
        self._write({"event": "opened", **line}, sync=True)
        self._run, self._fingerprint = run, fingerprint

    def refused(self, header: dict[str, Any], why: str) -> None:
        """Log that the site refuses a run or a request; OSError if that can't be written."""
        run = header.get("run")
        what = {"open": "a run", "work": "a request"}.get(str(header.get("do")), "a message")
        line = {"run": run if isinstance(run, str) else "", "what": what, "why": why}
        self._write({"event": "refused", **{name: text[:500] for name, text in line.items()}}, sync=False)

    def spent(self, data: str, noises: list[str], releases: dict[Release, int]) -> None:
        """Log what is about to be released of the site's records; OSError if that can't be written.

        It counts from now on, whether or not it is computed and sent. `noises` identifies its noise, and `data` the
        data.
        """
        listed = [[*release, times] for release, times in releases.items()]
        line = {"run": self._run, "data": data, "noises": noises, "releases": listed}
        self._write({"event": "spent", **line}, sync=True)

    def unmasking(self, request: str, sites: list[str]) -> None:
        """Log that this site helps to unmask the sum of these sites' replies; OSError if that can't be written."""
        self._write({"event": "unmasked", "run": self._run, "request": request, "sites": sites}, sync=True)

    def replied(
        self, moment: Moment, call: int, exchange: str, kind: str, aggregated: bool, request: str, sent: Sent
    ) -> None:
        """Log a reply in the run that was opened last; OSError if that can't be written.

        `kind` is "finish" for the end of a round, when only work is reported; `request` is a digest of everything that
        the reply depends on.
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

    def show_head(self) -> tuple[int, str]:
        """Return the number of lines and the hash of the last one, as they are sent to the coordinator."""
        self.shown[self._lines] = self._run, self._last
        while len(self.shown) > _SHOWN:
            del self.shown[next(iter(self.shown))]
        return self._lines, self._last

    def keep_receipt(self, receipt: str) -> None:
        """Write a receipt of the coordinator's, or a certificate, beside the log; OSError if it can't be written."""
        assert self.path is not None
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT
        with os.fdopen(os.open(self.path.with_suffix(RECEIPTS), flags, 0o600), "w", encoding="utf-8") as file:
            file.write(f"{receipt}\n")

    @property
    def answered(self) -> Answered:
        """The answers in the run that was opened last."""
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
            run = self.runs.setdefault(line["run"], Answered())
            run.opening = run.opening or line.get("opening", "")
            run.delta = line.get("delta")
        elif line["event"] == "spent":
            run = self.runs.setdefault(line["run"], Answered())
            releases = {Release(*release): int(times) for *release, times in line["releases"]}
            for spending in (self.spending, run.spending):
                spending.add(line["data"], releases)
            self.charged.update(line["noises"])
        elif line["event"] == "unmasked":
            self.unmasked[line["request"]] = line["sites"]
        elif line["event"] == "reply":
            run = self.runs.setdefault(line["run"], Answered())
            before = run.counts.rounds, run.counts.evaluations
            moment = (PHASES.index(line["phase"]), line["round"])
            run.note(moment, line.get("call", line["exchange"]), line.get("request", line["sha256"]))
            self.counts.rounds += run.counts.rounds - before[0]
            self.counts.evaluations += run.counts.evaluations - before[1]
            for counts in (self.counts, run.counts):
                counts.exchanges += line["kind"] != "finish"
                counts.bytes_up += line["bytes"]

    def _write(self, line: dict[str, Any], sync: bool) -> None:
        time, salt = datetime.now(UTC).isoformat(timespec="milliseconds"), secrets.token_hex(16)
        whole = {"time": time, **line, "salt": salt, "before": self._last}
        raw = json.dumps(whole, allow_nan=False).encode() + b"\n"
        if self._file >= 0:
            self._append(raw, sync)
        self._last = _hash(raw)
        self._lines, self._end = self._lines + 1, self._end + len(raw)
        self._count(whole)
        if sync and self._file >= 0:
            self._write_head()

    def _append(self, raw: bytes, sync: bool) -> None:
        """Write a whole line, or nothing."""
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
        """Write all lines to the disk, and then their number and the last hash."""
        os.fsync(self._file)
        self._write_head()

    def _write_head(self) -> None:
        """Replace the second file. If the disk is full, the old one stays, and holds for the earlier lines."""
        assert self.path is not None
        path = _head(self.path)
        new = path.with_suffix(".new")
        with suppress(OSError):
            with os.fdopen(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as file:
                json.dump({"lines": self._lines, "sha256": self._last}, file)
            new.replace(path)


class Found(NamedTuple):
    """The result of reading a log.

    Attributes:
        broken: the number, from 1, of the first line that is not as it was written; None if all are.
        lines: the number of whole lines up to that one.
        last: the hash of the last of these.
        end: the byte at which that line ends.
        torn: whether a part of a line follows, torn by a crash or just being written.
        head: whether there is a second file, which shows if lines were cut off at the end.
    """

    broken: int | None
    lines: int
    last: str
    end: int
    torn: bool
    head: bool


def verify(path: str | Path) -> int | None:
    """Return the number, from 1, of the first line that is not as it was written; None if all are."""
    return _scan(Path(path), lambda line: None).broken


def line_hashes(path: Path) -> list[str]:
    """Return the hash of each whole line of a log."""
    return [_hash(raw) for raw, _ in _lines(path) if raw.endswith(b"\n")]


def read(path: str | Path) -> tuple[Found, Audit]:
    """Read a log without changing it; return the result, and the log up to the first broken line."""
    log = Audit()
    return _scan(Path(path), log._count), log


def _scan(path: Path, each: Callable[[dict[str, Any]], None]) -> Found:
    """Read and check all lines; `each` is called with every good one."""
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
        if line is None:  # allowed if the next line says that it was torn, as earlier releases left it
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
    """Return the number of lines and the last hash from the second file; None if it can't be read."""
    try:
        match json.loads(_head(path).read_bytes()):
            case {"lines": int(lines), "sha256": str(last)}:
                return lines, last
    except (OSError, ValueError):
        pass
    return None


def _lines(path: Path) -> Iterator[tuple[bytes, dict[str, Any] | None]]:
    """Yield the lines: the bytes, and the object; None for what is not a line of a log."""
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
