"""Heads of sites' audit logs: how many lines a log has after a round, and the hash of the last one.

A site signs the head that it sends with a reply. The coordinator keeps it in a file of its own, countersigns it, and
sends that back as a receipt, which the site keeps beside its log. A head commits to all lines before it, so a log that
was cut or rewritten differs from it. Signatures need certificates; without them, heads are kept as they are.
"""

import base64
import json
import logging
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from rookery.base.printable import printable
from rookery.engines.federation.audit import Audit, line_hashes
from rookery.engines.federation.kits import COORDINATOR, Kit

FILE = "heads.jsonl"  # the coordinator's file, in the folder of a run
LOG = logging.getLogger("rookery.heads")
_OWN, _COUNTER = "audit head", "audit receipt"  # purposes of signatures


class Head(NamedTuple):
    """A site's head, as the coordinator keeps it and countersigns it."""

    site: str
    run: str
    round: int  # how many rounds were completed
    lines: int
    sha256: str
    signature: str  # the site's; empty without certificates

    def statement(self) -> bytes:
        """Return what the coordinator signs."""
        return json.dumps(list(self)).encode()


def own_statement(run: str, lines: int, sha256: str) -> bytes:
    """Return what a site signs."""
    return json.dumps([run, lines, sha256]).encode()


def signed_head(kit: Kit | None, run: str, lines: int, sha256: str) -> list[Any]:
    """Return the field of a reply with the site's head."""
    if kit is None:
        return [lines, sha256, ""]
    from rookery.engines.federation.certificates import sign

    signature = sign(kit.key, _OWN, own_statement(run, lines, sha256))
    return [lines, sha256, base64.b64encode(signature).decode()]


def is_head(said: Any) -> bool:
    """Return whether this is the field of a reply with a site's head."""
    match said:
        case [int(lines), str(sha256), str(signature)]:
            return type(lines) is int and 0 < lines < 2**53 and len(sha256) == 64 and len(signature) <= 1024
    return False


class Certified(Protocol):
    """The methods that a transport needs so that heads are countersigned."""

    kit: Any  # the coordinator's

    def certificate(self, site: int) -> bytes:
        """Return the certificate (PEM) of a site's last connection."""

    def receipt(self, site: int, receipt: str) -> None:
        """Send a receipt to the site, if it is connected."""


class Notary:
    """Keeps and countersigns the heads of a run's sites, at the coordinator.

    Arguments:
        path: the file to append them to; None: they are only countersigned.
        transport: the transport, if it has certificates; None: nothing is signed.
        tell: tell(text), called if a site's log was cut.
    """

    def __init__(
        self,
        path: str | Path | None,
        transport: Certified | None = None,
        tell: Callable[[str], None] = LOG.warning,
    ) -> None:
        self._path, self._transport, self._tell = None if path is None else Path(path), transport, tell
        self._last: dict[int, tuple[int, str]] = {}
        self._written: set[bytes] = set()

    def keep(self, names: tuple[str, ...], run: str, t: int, said: Mapping[int, Any]) -> None:
        """Keep and countersign what sites have said of their logs, by site, after t rounds."""
        lines = []
        for site, head in said.items():
            count, sha256, signature = head
            if self._last.get(site) == (count, sha256):
                continue
            lines += self._countersigned(site, Head(names[site], run, t, count, sha256, signature))
        if lines and self._path is not None:
            with self._path.open("a", encoding="utf-8") as file:
                file.write("".join(f"{line}\n" for line in lines))

    def _countersigned(self, site: int, head: Head) -> list[str]:
        transport = self._transport
        line: dict[str, Any] = {"time": datetime.now(UTC).isoformat(timespec="milliseconds"), **head._asdict()}
        if transport is None:
            self._compare(site, head)
            return [json.dumps(line)]
        from rookery.engines.federation.certificates import sign, verify

        cert, own = transport.certificate(site), own_statement(head.run, head.lines, head.sha256)
        if not verify(cert, _OWN, own, _decoded(head.signature)):
            self._tell(f"{head.site} has not signed the head of its audit log, which is not countersigned.")
            return []
        self._compare(site, head)
        countersignature = sign(transport.kit.key, _COUNTER, head.statement())
        receipt = json.dumps({**line, "countersignature": base64.b64encode(countersignature).decode()})
        transport.receipt(site, receipt)
        new = [known for known in (transport.kit.cert, cert) if known not in self._written]
        self._written.update(new)
        return [*(json.dumps({"certificate": known.decode()}) for known in new), receipt]

    def _compare(self, site: int, head: Head) -> None:
        before, _ = self._last.get(site, (0, ""))
        self._last[site] = (head.lines, head.sha256)
        if head.lines <= before:
            self._tell(
                f"The audit log of {head.site} had {before} lines, and now has {head.lines}: it was cut or replaced."
            )


def checked_receipt(receipt: str, shown: Mapping[int, tuple[str, str]], site: bytes, coordinator: bytes) -> str:
    """Return the line to keep for the coordinator's receipt for a head of a site; "" if it is not such a receipt.

    `shown` has the run and the hash of each such head, by its number of lines; `site` and `coordinator` are
    certificates (PEM).
    """
    from rookery.engines.federation.certificates import name_of

    try:
        line = json.loads(receipt)
        head = _head(line)
    except (ValueError, KeyError, TypeError):
        return ""
    own = shown.get(head.lines) == (head.run, head.sha256) and head.site == name_of(site)
    if not own or not _countersigned_by(coordinator, head, line):
        return ""
    time, countersignature = printable(str(line.get("time")), 40), str(line["countersignature"])
    return json.dumps({"time": time, **head._asdict(), "countersignature": countersignature})


class Compared(NamedTuple):
    """How a log compares with heads.

    Attributes:
        heads: how many heads of this site there are.
        lines: the largest number of lines in one of these heads.
        wrong: what is wrong with the log, in one line; "" if it has all lines as they were.
        signed: whether the signatures were checked.
    """

    heads: int
    lines: int
    wrong: str
    signed: bool


def compare(log: Path, path: Path, ca: bytes | None = None, site: str | None = None) -> Compared:
    """Compare a log with heads of it: the coordinator's file, or the receipts beside the log.

    Arguments:
        log: the log.
        path: the file with the heads.
        ca: the CA's certificate (PEM), to check signatures; None: they are not checked.
        site: the site whose log it is; None if there are heads of one site only.
    """
    entries, certificates = _read(path)
    names = sorted({head.site for head, _ in entries})
    if site is None and len(names) > 1:
        raise ValueError(f"{path} has heads of {', '.join(names)}. Give --site NAME.")
    if site is not None and site not in names:
        raise ValueError(f"{path} must have heads of {site}; it has those of {', '.join(names) or 'no site'}.")
    entries = [entry for entry in entries if site in (None, entry[0].site)]
    if not entries:
        raise ValueError(f"{path} must have heads of a log; it has none.")
    if ca is not None:
        for head, line in entries:
            _check_signatures(path, head, line, ca, certificates)
    found = line_hashes(log)
    most = max(head.lines for head, _ in entries)
    for head, _ in sorted(entries, key=lambda entry: entry[0].lines):
        if head.lines > len(found):
            wrong = f"lines are missing: it has {len(found)}, and had {most}"
            return Compared(len(entries), most, wrong, ca is not None)
        if found[head.lines - 1] != head.sha256:
            wrong = f"it was rewritten: line {head.lines} is not the one it had after round {head.round}"
            return Compared(len(entries), most, wrong, ca is not None)
    return Compared(len(entries), most, "", ca is not None)


def _read(path: Path) -> tuple[list[tuple[Head, dict[str, Any]]], list[bytes]]:
    try:
        texts = path.read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} must be a file with heads of a log; it can't be read ({error}).") from None
    entries, certificates = [], []
    for number, text in enumerate(texts[:-1], 1):  # a last line without its end was torn by a crash
        try:
            line = json.loads(text)
            if "certificate" in line:
                certificates.append(str(line["certificate"]).encode())
            else:
                entries.append((_head(line), line))
        except (ValueError, KeyError, TypeError):
            raise ValueError(f"{path} must have a head of a log in each line; line {number} does not.") from None
    return entries, certificates


def _head(line: dict[str, Any]) -> Head:
    head = Head(*(line[name] for name in Head._fields))
    if not is_head([head.lines, head.sha256, head.signature]) or type(head.round) is not int:
        raise ValueError("it is not a head")
    return head._replace(site=printable(str(head.site), 64))


def _check_signatures(path: Path, head: Head, line: dict[str, Any], ca: bytes, certificates: list[bytes]) -> None:
    from rookery.engines.federation.certificates import is_server, issued_by, name_of, verify

    good = [cert for cert in certificates if issued_by(ca, cert, today=False)]
    statement = own_statement(head.run, head.lines, head.sha256)
    own = any(name_of(c) == head.site and verify(c, _OWN, statement, _decoded(head.signature)) for c in good)
    counter = any(name_of(c) != head.site and is_server(c) and _countersigned_by(c, head, line) for c in good)
    for who, right in ((head.site, own), (COORDINATOR, counter)):
        if not right:
            raise ValueError(
                f"{path} must have heads signed by site and coordinator; the one of {head.site} after round "
                f"{head.round}, with {head.lines} lines, is not signed by the {who}."
            )


def _countersigned_by(cert: bytes, head: Head, line: dict[str, Any]) -> bool:
    from rookery.engines.federation.certificates import verify

    return verify(cert, _COUNTER, head.statement(), _decoded(str(line.get("countersignature", ""))))


def _decoded(text: str) -> bytes:
    try:
        return base64.b64decode(text)
    except ValueError:
        return b""


class Receipts:
    """Keeps the coordinator's receipts beside a site's log.

    Arguments:
        log: the log, with a file and with the site's kit.
        tell: tell(text), called if the coordinator sends something else.
    """

    def __init__(self, log: Audit, tell: Callable[[str], None]) -> None:
        self._log, self._tell, self._told = log, tell, False
        self._written: set[bytes] = set()

    def __call__(self, receipt: str, coordinator: bytes) -> None:
        """Keep a receipt; `coordinator` is the certificate (PEM) that it has proved to be its own."""
        kit = self._log.kit
        if kit is None or self._log.path is None:
            return
        wrong = "is not for a head of this site's audit log, and was not kept"
        good = checked_receipt(receipt, self._log.shown, kit.cert, coordinator)
        if good:
            new = [cert for cert in (coordinator, kit.cert) if cert not in self._written]
            lines = [*(json.dumps({"certificate": cert.decode()}) for cert in new), good]
            try:
                self._log.keep_receipt("\n".join(lines))
                self._written.update(new)
                return
            except OSError as error:
                wrong = f"can't be written beside this site's audit log ({error.strerror})"
        if not self._told:
            self._told = True
            self._tell(f"A receipt from the coordinator {wrong}.")
