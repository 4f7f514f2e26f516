"""The audit log: a chain of lines that only grows, and outlives crashes."""

import json
import stat
from pathlib import Path

import pytest

from rookery.engines.federation.audit import Audit, verify
from rookery.engines.federation.site import Sent

RUN, FINGERPRINT = "ab" * 16, "cd" * 16


def written(path: Path, rounds: int = 2) -> None:
    """A log of a run of so many rounds: two exchanges and an end each, then an evaluation."""
    audit = Audit(path)
    audit.opened(RUN, FINGERPRINT, 4, 3)
    audit.replied((0, 0), "shares", "sum", True, Sent(8, "0" * 64))
    for t in range(rounds):
        audit.replied((1, t), "losses", "gather", False, Sent(16, "1" * 64))
        audit.replied((1, t), "direction", "mean", True, Sent(24, "2" * 64))
        audit.replied((1, t), "finish", "finish", False, Sent(0, "3" * 64))
    audit.replied((2, rounds), "evaluation", "gather", False, Sent(8, "4" * 64))
    audit.close()


def lines(path: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_line_for_every_reply_and_counts_that_outlive_a_restart(tmp_path: Path) -> None:
    path = tmp_path / "site" / "audit.jsonl"
    written(path)
    assert verify(path) is None
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    found = lines(path)
    assert [line["event"] for line in found] == ["opened"] + ["reply"] * 8
    assert {"time", "run", "fingerprint", "phase", "round", "exchange", "kind", "aggregated", "bytes", "sha256"} <= set(
        found[2]
    )
    assert (found[2]["phase"], found[2]["round"], found[2]["exchange"]) == ("round", 0, "losses")
    assert str(found[0]["time"]).endswith("+00:00")
    audit = Audit(path)
    assert (audit.rounds, audit.exchanges, audit.bytes_up) == (2, 1 + 2 * 2 + 1, 8 + 2 * 40 + 8)
    audit.opened(RUN, FINGERPRINT, 4, 3)
    assert not audit.is_new((1, 1))  # the site was restarted within the round
    assert audit.is_new((1, 2))
    audit.opened("ef" * 16, FINGERPRINT, 4, 3)
    assert audit.is_new((1, 1))  # of another run
    audit.refused({"do": "work", "run": RUN}, "no" * 1000)
    audit.close()
    assert verify(path) is None
    assert len(str(lines(path)[-1]["why"])) == 500


def test_the_first_broken_line_is_found(tmp_path: Path) -> None:
    path = tmp_path / "audit.jsonl"
    written(path)
    whole = path.read_bytes().splitlines(keepends=True)
    cases = {
        "changed": ([*whole[:3], whole[3].replace(b'"bytes": 24', b'"bytes": 23'), *whole[4:]], 5),
        "left out": ([*whole[:3], *whole[4:]], 4),
        "inserted": ([*whole[:3], whole[2], *whole[3:]], 4),
        "swapped": ([*whole[:2], whole[3], whole[2], *whole[4:]], 3),
        "no line": ([*whole[:2], b"gone\n", *whole[2:]], 3),
        "the first": (whole[1:], 1),
        "at the end": ([*whole, b"{}\n"], len(whole) + 1),
    }
    for name, (changed, broken) in cases.items():
        path.write_bytes(b"".join(changed))
        assert verify(path) == broken, name
        with pytest.raises(ValueError, match=f"line {broken} is not what was written"):
            Audit(path)


@pytest.mark.parametrize("cut", [1, 20])
def test_a_line_that_was_torn_by_a_crash_stays_and_the_log_goes_on(tmp_path: Path, cut: int) -> None:
    path = tmp_path / "audit.jsonl"
    written(path)
    torn = path.read_bytes()[:-cut]
    path.write_bytes(torn)
    assert verify(path) is None
    audit = Audit(path)
    audit.opened(RUN, FINGERPRINT, 4, 3)
    audit.close()
    assert path.read_bytes().startswith(torn + b"\n")
    assert verify(path) is None
    assert b'"torn"' in path.read_bytes().splitlines()[-2]
    again = Audit(path)
    assert (again.rounds, again.exchanges) == (2, 6 if cut == 1 else 5)
    again.close()
    path.write_bytes(path.read_bytes().replace(b'"torn"', b'"reply"'))
    assert verify(path) is not None
