"""The audit log of a site: what it agreed to, what it refused, and every reply, in a file that only grows.

A line of JSON each, with the SHA-256 of the line before it: who changes, removes or inserts a line breaks the chain
from there on, and `verify` finds the place. Lines that are cut off at the end leave no trace in the file; note its last
hash elsewhere if that matters. No value of the data is in it, and no secret: of a reply the bytes and the SHA-256.
"""

import hashlib
import json
import os
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from rookery.engines.federation.site import Sent
from rookery.engines.federation.store import Moment

_FIRST = "0" * 64  # what the first line has in the place of a hash
PHASES = ("start", "round", "evaluation")


class Audit:
    """The log, and what it counts over all runs that it knows of.

    A process that is killed may leave a line that is torn; it stays, and a line after it says so. The log is on the
    disk at the latest when the next round begins, or when it is closed.

    Arguments:
        path: of the file; what it holds is gone on from. ValueError if its chain is broken.

    Attributes:
        rounds: that the site took part in. One that is begun again counts again.
        exchanges: replies to exchanges, those of evaluations too. A reply that is sent again counts again.
        bytes_up: the bytes of arrays in them.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        self.rounds = self.exchanges = self.bytes_up = 0
        self._last, self._round, self._fingerprint, self._run = _FIRST, ("", -1), "", ""
        broken, self._last, whole = _scan(self.path, self._count)
        if broken is not None:
            raise ValueError(
                f"{self.path}: line {broken} is not what was written there. Keep the file as it is, and give a folder "
                "without one."
            )
        self._file = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        if not whole:
            os.write(self._file, b"\n")
            self._write({"event": "torn"}, sync=True)

    def opened(self, run: str, fingerprint: str, clients: int, cohort: int) -> None:
        """The site takes part in a run."""
        self._run, self._fingerprint = run, fingerprint
        told = {"run": run, "fingerprint": fingerprint, "clients": clients, "cohort": cohort}
        self._write({"event": "opened", **told}, sync=True)

    def refused(self, header: dict[str, Any], why: str) -> None:
        """It refuses a run, or a request."""
        run = header.get("run")
        what = {"open": "a run", "work": "a request"}.get(str(header.get("do")), "a message")
        told = {"run": run if isinstance(run, str) else "", "what": what, "why": why}
        self._write({"event": "refused", **{name: text[:500] for name, text in told.items()}}, sync=True)

    def replied(self, moment: Moment, exchange: str, kind: str, aggregated: bool, sent: Sent) -> None:
        """It has replied. `kind` is "finish" for the end of a round, at which nothing but work is reported."""
        phase, t = moment
        line = {
            "event": "reply",
            "run": self._run,
            "fingerprint": self._fingerprint,
            "phase": PHASES[phase],
            "round": t,
            "exchange": exchange,
            "kind": kind,
            "aggregated": aggregated,
            "bytes": sent.bytes,
            "sha256": sent.digest,
        }
        self._write(line, sync=phase != 1 or self.is_new(moment))

    def is_new(self, moment: Moment) -> bool:
        """Whether a moment of the run that is open is a round that has not begun yet."""
        return moment[0] == 1 and (self._run, moment[1]) != self._round

    def close(self) -> None:
        """Close the file."""
        os.fsync(self._file)
        os.close(self._file)

    def _count(self, line: dict[str, Any]) -> None:
        if line["event"] == "reply":
            self.exchanges += line["kind"] != "finish"
            self.bytes_up += line["bytes"]
            if line["phase"] == "round" and (line["run"], line["round"]) != self._round:
                self._round = (line["run"], line["round"])
                self.rounds += 1

    def _write(self, line: dict[str, Any], sync: bool) -> None:
        whole = {"time": datetime.now(UTC).isoformat(timespec="milliseconds"), **line, "before": self._last}
        raw = json.dumps(whole, allow_nan=False).encode() + b"\n"
        written = 0
        while written < len(raw):
            written += os.write(self._file, raw[written:])
        if sync:
            os.fsync(self._file)
        self._last = _hash(raw)
        self._count(whole)


def verify(path: str | Path) -> int | None:
    """The number, from 1 on, of the first line that is not what was written there; None if there is none.

    A line that was torn by a crash is none of them, if the next one says so.
    """
    return _scan(Path(path), lambda line: None)[0]


def _scan(path: Path, each: Callable[[dict[str, Any]], None]) -> tuple[int | None, str, bool]:
    """The first broken line, or None; the last hash; and whether the last line is whole. `each` is told the lines."""
    last, torn, whole = _FIRST, None, True
    for number, raw, line in _lines(path):
        whole = raw.endswith(b"\n")
        if torn is not None and (line is None or line["event"] != "torn"):
            return torn, last, whole
        torn = None
        if line is None:
            torn = number
        elif line["before"] != last:
            return number, last, whole
        else:
            each(line)
        last = _hash(raw)
    return torn if whole else None, last, whole


def _lines(path: Path) -> Iterator[tuple[int, bytes, dict[str, Any] | None]]:
    """The lines: their number, their bytes, and what they say; None for what is no line of a log."""
    if not path.exists():
        return
    with path.open("rb") as file:
        for number, raw in enumerate(file, 1):
            try:
                line = json.loads(raw)
                whole = isinstance(line, dict) and {"event", "before"} <= set(line)
            except ValueError:
                whole = False
            yield number, raw, line if whole else None


def _hash(raw: bytes) -> str:
    return hashlib.sha256(raw.removesuffix(b"\n")).hexdigest()
