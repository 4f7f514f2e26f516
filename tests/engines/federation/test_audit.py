"""The audit log: a chain of lines that only grows, and outlives crashes and full disks."""

import contextlib
import errno
import json
import os
import resource
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.engines.federation.processes import FORK, SECONDS
from typer.testing import CliRunner

from rookery import cli
from rookery.engines.federation import audit as audits
from rookery.engines.federation.audit import Audit, verify
from rookery.engines.federation.site import Sent

RUN, OPENING, FINGERPRINT = "ab" * 16, "ee" * 32, "cd" * 16


def reply(audit: Audit, moment: tuple[int, int], call: int, name: str, kind: str, size: int, request: str = "") -> None:
    audit.replied(moment, call, name, kind, kind == "mean", request or f"{moment}", Sent(size, str(call) * 64))


def a_run(audit: Audit, rounds: int = 2) -> None:
    """A run of so many rounds: two exchanges and an end each, then an evaluation."""
    audit.opened(RUN, OPENING, FINGERPRINT, 4, 3)
    reply(audit, (0, 0), 0, "shares", "sum", 8)
    for t in range(rounds):
        reply(audit, (1, t), 1, "losses", "gather", 16)
        reply(audit, (1, t), 2, "direction", "mean", 24)
        reply(audit, (1, t), 3, "finish", "finish", 0)
    reply(audit, (2, rounds), 4, "evaluation", "gather", 8)


def written(path: Path, rounds: int = 2) -> None:
    """The log of such a run."""
    audit = Audit(path)
    a_run(audit, rounds)
    audit.close()


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def counted(audit: Audit) -> tuple[int, int, int, int]:
    return audit.counts.rounds, audit.counts.evaluations, audit.counts.exchanges, audit.counts.bytes_up


def test_a_line_for_every_reply_and_counts_that_outlive_a_restart(tmp_path: Path) -> None:
    path = tmp_path / "site" / "audit.jsonl"
    written(path)
    assert verify(path) is None
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    found = lines(path)
    assert [line["event"] for line in found] == ["opened"] + ["reply"] * 8
    told = {"time", "run", "fingerprint", "phase", "round", "call", "exchange", "kind", "aggregated", "request"}
    assert told | {"bytes", "sha256"} <= set(found[2])
    assert (found[2]["phase"], found[2]["round"], found[2]["exchange"]) == ("round", 0, "losses")
    assert str(found[0]["time"]).endswith("+00:00")
    audit = Audit(path)
    assert counted(audit) == (1 + 2, 1, 1 + 2 * 2 + 1, 8 + 2 * 40 + 8)  # the start counts as a round
    audit.opened(RUN, OPENING, FINGERPRINT, 4, 3)
    assert not audit.answered.is_new((1, 1))  # the site was restarted within the round
    assert audit.answered.asked((1, 1), 1) == {"(1, 1)"}
    assert not audit.answered.is_new((2, 2))
    assert audit.answered.is_new((1, 2))
    audit.opened("ef" * 16, OPENING, FINGERPRINT, 4, 3)
    assert audit.answered.is_new((1, 1))  # of another run
    audit.refused({"do": "work", "run": RUN}, "no" * 1000)
    assert (audit.counts.refused, audit.runs[RUN].counts.refused) == (1, 1)
    audit.close()
    assert verify(path) is None
    assert len(str(lines(path)[-1]["why"])) == 500


def test_a_run_keeps_the_words_that_it_was_first_opened_with(tmp_path: Path) -> None:
    audit = Audit(tmp_path / "audit.jsonl")
    audit.opened(RUN, OPENING, FINGERPRINT, 4, 3)
    audit.opened(RUN, "ff" * 32, FINGERPRINT, 4, 3)
    assert audit.runs[RUN].opening == OPENING
    audit.close()
    again = Audit(tmp_path / "audit.jsonl")
    assert again.runs[RUN].opening == OPENING
    again.close()


def test_the_first_broken_line_is_found(tmp_path: Path) -> None:
    path = tmp_path / "audit.jsonl"
    written(path)
    whole = path.read_bytes().splitlines(keepends=True)
    last = whole[-1].replace(b'"bytes": 8', b'"bytes": 7')
    assert last != whole[-1]
    cases = {
        "changed": ([*whole[:3], whole[3].replace(b'"bytes": 24', b'"bytes": 23'), *whole[4:]], 5),
        "left out": ([*whole[:3], *whole[4:]], 4),
        "inserted": ([*whole[:3], whole[2], *whole[3:]], 4),
        "swapped": ([*whole[:2], whole[3], whole[2], *whole[4:]], 3),
        "not a line": ([*whole[:2], b"gone\n", *whole[2:]], 3),
        "the first": (whole[1:], 1),
        "at the end": ([*whole, b"{}\n"], len(whole) + 1),
        "the last changed": ([*whole[:-1], last], len(whole)),
        "the last cut": (whole[:-1], len(whole)),
        "most cut": (whole[:2], 3),
        "cut within a line": ([*whole[:4], whole[4][:30]], 5),
        "emptied": ([], 1),
    }
    for name, (changed, broken) in cases.items():
        path.write_bytes(b"".join(changed))
        assert verify(path) == broken, name
        with pytest.raises(ValueError, match=f"is not as it was written, from line {broken} on. .* audit.head"):
            Audit(path)
        result = CliRunner().invoke(cli.app, ["audit", str(tmp_path)])
        assert (result.exit_code, f"from line {broken} on" in result.output) == (1, True), result.output
    path.unlink()
    assert verify(path) == 1
    (tmp_path / "audit.head").unlink()
    assert verify(path) is None  # who can write to both files leaves no trace


@pytest.mark.parametrize("content", ["", "?", '{"lines": "x"}', None])
def test_a_log_without_its_second_file_goes_on(tmp_path: Path, content: str | None) -> None:
    """It is of an earlier release, or was damaged: nothing locks the owner out, and `rookery audit` says it."""
    path, head = tmp_path / "audit.jsonl", tmp_path / "audit.head"
    written(path)
    head.unlink()
    if content is not None:
        head.write_text(content)
    assert "lines cut off at the end would not be noticed" in " ".join(
        CliRunner().invoke(cli.app, ["audit", str(tmp_path)]).output.split()
    )
    Audit(path).close()
    assert json.loads(head.read_text())["lines"] == 9
    path.write_bytes(b"")
    assert verify(path) == 1


def test_a_log_of_an_earlier_release_goes_on(tmp_path: Path) -> None:
    """Without digests of requests, and with a torn line that the next one tells of."""
    path = tmp_path / "audit.jsonl"
    before, texts = "0" * 64, []
    reply = {"event": "reply", "run": RUN, "fingerprint": FINGERPRINT, "phase": "round", "kind": "mean", "bytes": 8}
    reply |= {"aggregated": True, "sha256": "1" * 64, "exchange": "x"}
    told: list[Any] = [{"event": "opened", "run": RUN}, {**reply, "round": 0}, None, {"event": "torn"}]
    for line in [*told, {**reply, "round": 1}]:
        raw = b'{"event": "rep' if line is None else json.dumps({**line, "before": before}).encode()
        texts.append(raw)
        before = audits._hash(raw)
    path.write_bytes(b"\n".join(texts) + b"\n")
    assert verify(path) is None
    audit = Audit(path)
    assert counted(audit) == (2, 0, 2, 16)
    audit.opened("ef" * 16, OPENING, FINGERPRINT, 4, 3)
    audit.close()
    assert verify(path) is None


@pytest.mark.parametrize("cut", [1, 20])
def test_a_line_that_was_torn_by_a_crash_is_cut_off_and_the_log_goes_on(tmp_path: Path, cut: int) -> None:
    """Its reply was never sent. The second file is behind then: it is written after a line is on the disk."""
    path = tmp_path / "audit.jsonl"
    audit = Audit(path)
    a_run(audit)
    reply(audit, (1, 2), 1, "losses", "gather", 16)
    head = (tmp_path / "audit.head").read_bytes()
    reply(audit, (1, 2), 2, "direction", "mean", 24)
    assert (tmp_path / "audit.head").read_bytes() == head
    whole = path.read_bytes()
    path.write_bytes(whole[:-cut])
    assert verify(path) is None
    assert Audit(path)  # as another process would, after kill -9 of the first
    audit = Audit(path)
    assert counted(audit) == (4, 1, 7, 8 + 2 * 40 + 8 + 16)
    audit.opened(RUN, OPENING, FINGERPRINT, 4, 3)
    audit.close()
    assert verify(path) is None
    assert [line["event"] for line in lines(path)[-3:]] == ["reply", "torn", "opened"]
    assert path.read_bytes().startswith(b"".join(whole.splitlines(keepends=True)[:-1]))


class Disk:
    """A disk for `os.write` and `os.fsync` that has room for so many bytes."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.room: float = float("inf")
        self.broken = False
        self._write, self._fsync = os.write, os.fsync
        monkeypatch.setattr(os, "write", self.write)
        monkeypatch.setattr(os, "fsync", self.fsync)

    def write(self, file: int, raw: bytes) -> int:
        if self.room <= 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        count = self._write(file, raw[: int(min(self.room, len(raw)))])
        self.room -= count
        return count

    def fsync(self, file: int) -> None:
        if self.broken:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        self._fsync(file)


def test_what_can_not_be_written_leaves_nothing_and_the_log_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, disk = tmp_path / "audit.jsonl", Disk(monkeypatch)
    audit = Audit(path)
    a_run(audit)
    before, counts = path.read_bytes(), counted(audit)
    for room in (0, 1, 100):
        disk.room = room
        with pytest.raises(OSError, match="No space"):
            reply(audit, (1, 5), 1, "losses", "gather", 16)
        assert path.read_bytes() == before
        assert counted(audit) == counts
        assert audit.answered.is_new((1, 5))
    disk.room, disk.broken = float("inf"), True
    with pytest.raises(OSError, match="Input/output"):
        reply(audit, (1, 5), 1, "losses", "gather", 16)
    assert path.read_bytes() == before
    disk.broken = False
    reply(audit, (1, 5), 1, "losses", "gather", 16)
    audit.close()
    assert verify(path) is None
    assert len(lines(path)) == 10


def test_a_torn_line_on_a_full_disk_locks_nobody_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The log is opened although nothing can be written, and writes again when there is space."""
    path = tmp_path / "audit.jsonl"
    written(path)
    whole = path.read_bytes()
    path.write_bytes(whole + b'{"time": "20')
    disk = Disk(monkeypatch)
    disk.room = 0
    audit = Audit(path)
    assert counted(audit) == (3, 1, 6, 96)
    with pytest.raises(OSError, match="No space"):
        audit.opened(RUN, OPENING, FINGERPRINT, 4, 3)
    disk.room = float("inf")
    audit.opened(RUN, OPENING, FINGERPRINT, 4, 3)
    audit.close()
    assert verify(path) is None
    assert len(lines(path)) == 10


def test_a_request_that_can_not_be_logged_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is sent that is not in the log; the site goes on when there is space."""
    from tests.engines.federation import test_limits as limits
    from tests.engines.federation.studies import in_memory

    responder = limits.site(tmp_path, rounds=5)
    asked = limits.honest(in_memory([responder]).transport, rounds=1)
    work, inputs = limits.of(asked, "work", 1)
    disk, ask = Disk(monkeypatch), limits.by_hand(responder)
    before = (tmp_path / "audit.jsonl").read_bytes()
    for room in (0, 50):
        disk.room = room
        said, sent = ask(limits.elsewhere(work, round=1), inputs)
        assert (said["answer"], sent) == ("refused", [])
        assert said["why"] == "it can't write to its folder (No space left on device); it goes on when it can."
        assert (tmp_path / "audit.jsonl").read_bytes() == before
    disk.room = 0
    said, _ = ask({**limits.of(asked, "open")[0], "run": "ab" * 16}, [])
    assert (said["answer"], "No space left" in said["why"]) == ("refused", True)
    disk.room = float("inf")
    assert ask(limits.of(asked, "open")[0], [])[0]["answer"] == "opened"
    assert ask(limits.elsewhere(work, round=1), inputs)[0]["answer"] == "value"
    assert verify(tmp_path / "audit.jsonl") is None
    assert responder._log.counts.rounds == 2


# ------------------------------------------------------------ real full disks


@pytest.mark.slow
def test_a_full_file_system(small: Path) -> None:
    path, rest = small / "site" / "audit.jsonl", small / "rest"
    audit = Audit(path)
    a_run(audit)
    with rest.open("wb", buffering=0) as file, contextlib.suppress(OSError):
        while True:
            file.write(b"\0" * 512)

    def until_full(write: Callable[[int], None]) -> int:
        for t in range(2, 200):
            try:
                write(t)
            except OSError:
                return t - 2
        raise AssertionError

    done = until_full(lambda t: reply(audit, (1, t), 1, "losses", "gather", 16))
    audit.close()
    assert verify(path) is None
    assert len(lines(path)) == 9 + done
    again = Audit(path)  # a start with a full disk
    assert again.counts.rounds == 3 + done
    until_full(lambda t: again.refused({"do": "work", "run": RUN}, "no"))
    rest.unlink()
    again.refused({"do": "work", "run": RUN}, "no")
    again.close()
    assert verify(path) is None
    assert lines(path)[-1]["event"] == "refused"


def _write_until_full(path: Path, pipe: Any) -> None:
    """In a process whose files may have 4,000 bytes."""
    import signal

    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4000, resource.RLIM_INFINITY))
    audit = Audit(path)
    a_run(audit, 1)
    try:
        for t in range(1, 100):
            reply(audit, (1, t), 1, "losses", "gather", 16)
    except OSError as error:
        pipe.send((error.errno, audit.counts.rounds, path.stat().st_size))
    pipe.recv()
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    reply(audit, (1, 100), 1, "losses", "gather", 16)
    pipe.send((0, audit.counts.rounds, path.stat().st_size))
    pipe.recv()


@pytest.mark.xdist_group("processes")
def test_a_process_that_may_write_no_more(tmp_path: Path) -> None:
    """The kernel writes a part of a line, and then refuses: nothing of it stays, and kill -9 later changes nothing."""
    path = tmp_path / "audit.jsonl"
    pipe, theirs = FORK.Pipe()
    process = FORK.Process(target=_write_until_full, args=(path, theirs), daemon=True)
    process.start()
    assert pipe.poll(SECONDS)
    error, rounds, size = pipe.recv()
    assert (error, size <= 4000) == (errno.EFBIG, True)
    assert path.read_bytes().endswith(b"\n")
    pipe.send("go on")
    assert pipe.poll(SECONDS)
    assert pipe.recv()[1] == rounds + 1
    process.kill()
    process.join(SECONDS)
    assert verify(path) is None
    audit = Audit(path)
    assert audit.counts.rounds == rounds + 1
    audit.close()


# ------------------------------------------------------------ rookery audit


def test_the_command_says_what_was_answered_and_what_is_left(tmp_path: Path) -> None:
    written(tmp_path / "site" / "audit.jsonl")
    audit = Audit(tmp_path / "site" / "audit.jsonl")
    audit.refused({"do": "open", "run": "\x1b[2J"}, "no")
    audit.opened("\x1b[2J", OPENING, FINGERPRINT, 4, 3)
    (tmp_path / "policy.toml").write_text("rounds = 1000\nbytes_up = 5_000\n")
    invoke = lambda *words: CliRunner().invoke(cli.app, ["audit", *map(str, words)])
    result = invoke(tmp_path / "site", "--policy", tmp_path / "policy.toml")  # while the site is running
    assert result.exit_code == 0
    rows = [line.split() for line in result.output.splitlines()]
    assert result.output.startswith("11 lines, all as written.")
    for row in (["rounds", "3", "1,000"], ["evaluations", "1", "1,001"], ["exchanges", "6"], ["refused", "1"]):
        assert row in rows
    assert ["bytes", "sent", "96", "5,000"] in rows
    assert [RUN, "3", "1", "6", "96", "0"] in rows
    assert "\x1b" not in result.output
    audit.close()
    told = json.loads(invoke(tmp_path / "site", "--json").output)
    assert told["counts"] == {"rounds": 3, "evaluations": 1, "exchanges": 6, "bytes_up": 96, "refused": 1}
    assert (told["broken"], told["lines"], told["runs"][RUN]["rounds"]) == (None, 11, 3)
    result = invoke(tmp_path)
    assert (result.exit_code, "must be a site's folder" in result.output) == (2, True)
