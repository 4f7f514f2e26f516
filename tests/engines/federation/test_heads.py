"""Heads of audit logs: a log whose end was cut, or that was rewritten, differs from what the coordinator has kept."""

import base64
import json
import shutil
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.engines.federation.processes import Played, play
from tests.engines.federation.studies import study, without_data
from tests.engines.federation.test_audit import FINGERPRINT, OPENING, RUN, a_run
from typer.testing import CliRunner

import rookery as rk
from rookery import cli
from rookery.engines.engine import Job
from rookery.engines.federation import audit as audits
from rookery.engines.federation import heads as module
from rookery.engines.federation.audit import Audit
from rookery.engines.federation.heads import Head, Notary, Receipts, compare, is_head, own_statement, signed_head
from rookery.engines.federation.kits import Kit, load_kit
from rookery.engines.federation.policy import Policy, PolicyGuard
from rookery.engines.federation.provision import make_kits
from rookery.engines.federation.transports import grpc as network
from rookery.run.join import join

certificates = pytest.importorskip("rookery.engines.federation.certificates")
pytestmark = pytest.mark.xdist_group("processes")

NAMES = ("a", "b")


@pytest.fixture(scope="module")
def played(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of 60 rounds over gRPC, with logs at both sites, and the coordinator's file."""
    folder = tmp_path_factory.mktemp("heads")
    make_kits(folder / "kits", "localhost", NAMES, 30)
    transport = network.GrpcServer("localhost:0", (), folder / "kits" / "coordinator")
    problem = rk.SingleLevel(lambda x, rows: ((x - rows) ** 2).mean())
    clients = rk.Clients(upper=[np.full(n, n, np.float32) for n in (1, 2)])
    what = Job(problem, clients, rk.FedAvg(), (np.float32(0), ()), 2, 0)
    logs = [Audit(folder / name / audits.FILE) for name in NAMES]

    def site(i: int) -> None:
        guard = PolicyGuard(Policy(rounds=100), logs[i])
        kit = load_kit(folder / "kits" / NAMES[i])
        join(transport.address, NAMES[i], study(what, i), kit=kit, guard=guard, tell=lambda text: None, patience=60.0)

    threads = [threading.Thread(target=site, args=(i,), daemon=True) for i in range(2)]
    for thread in threads:
        thread.start()
    found = Played()
    engine = rk.Federation(transport=transport, patience=60.0, tell=found.told.append, heads=folder / "heads.jsonl")
    play(engine, without_data(what), 60, found)
    for thread in threads:
        thread.join(60)
    for log in logs:
        log.close()
    assert not [text for text in found.told if "audit" in text]
    return folder


@pytest.fixture
def folder(played: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(played, tmp_path / "copy"))


def audited(folder: Path, *words: Any) -> tuple[int, str]:
    done = CliRunner().invoke(cli.app, ["audit", "verify", str(folder / "b"), *map(str, words)])
    return done.exit_code, " ".join(done.output.split())


def cut(path: Path, lines: int) -> None:
    whole = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(whole[:-lines]))


def cut_the_log(site: Path, lines: int) -> None:
    """Cut a log so that it is consistent in itself: what its owner can do, or who has broken in."""
    path = site / audits.FILE
    cut(path, lines)
    hashes = audits.line_hashes(path)
    path.with_suffix(".head").write_text(json.dumps({"lines": len(hashes), "sha256": hashes[-1]}))
    assert audits.verify(path) is None


def test_a_log_with_all_its_lines(folder: Path) -> None:
    kept = [json.loads(line) for line in (folder / "heads.jsonl").read_text().splitlines()]
    assert len([line for line in kept if line.get("site") == "a"]) == 60
    assert len((folder / "a" / "audit.receipts").read_text().splitlines()) == 60 + 2
    ca = ("--ca", folder / "kits" / "b" / "ca.pem")
    for words in ((), ca, ("--heads", folder / "heads.jsonl", "--site", "b", *ca)):
        code, said = audited(folder, *words)
        assert (code, "of the 60 heads in" in said) == (0, True), said
        assert ("with valid signatures" if words else "were not checked: give --ca") in said
    same = CliRunner().invoke(cli.app, ["audit", str(folder / "a" / "audit.jsonl"), "--json"])
    assert json.loads(same.stdout)["heads"]["wrong"] == ""


def test_a_log_whose_last_50_lines_were_cut_is_found(folder: Path) -> None:
    """By its receipts; and if those were cut alike, by what the coordinator has kept."""
    ca = ("--ca", folder / "kits" / "b" / "ca.pem")
    coordinators = ("--heads", folder / "heads.jsonl", "--site", "b", *ca)
    cut_the_log(folder / "b", 50)
    lines = len(audits.line_hashes(folder / "b" / audits.FILE))
    for words in (ca, coordinators):
        code, said = audited(folder, *words)
        assert (code, f"lines are missing: it has {lines}, and had {lines + 50}" in said) == (1, True), said
    receipts = folder / "b" / "audit.receipts"
    whole = receipts.read_text().splitlines()
    kept = [line for line in whole if json.loads(line).get("lines", 0) <= lines]
    receipts.write_text("".join(f"{line}\n" for line in kept))
    assert audited(folder, *ca)[0] == 0
    code, said = audited(folder, *coordinators)
    assert (code, "lines are missing" in said) == (1, True)
    receipts.unlink()
    assert audited(folder)[0] == 0
    assert audited(folder, *coordinators)[0] == 1
    again = Audit(folder / "b" / audits.FILE)  # and new lines are put in the place of those that were cut
    for t in range(100):
        again.refused({"do": "open", "run": f"{t}"}, "no")
    again.close()
    code, said = audited(folder, *coordinators)
    assert (code, "it was rewritten: line" in said) == (1, True)


def test_heads_that_nobody_has_signed(folder: Path) -> None:
    """Neither a site nor a coordinator can invent a head of the other."""
    path, ca = folder / "heads.jsonl", (folder / "kits" / "a" / "ca.pem").read_bytes()
    log = folder / "b" / audits.FILE
    whole = path.read_text().splitlines()
    at = next(i for i, line in enumerate(whole) if json.loads(line).get("site") == "b")
    line = json.loads(whole[at])
    coordinator, b = load_kit(folder / "kits" / "coordinator"), load_kit(folder / "kits" / "b")

    def changed(own: Kit, counter: Kit, **fields: Any) -> None:
        new = line | fields
        statement = own_statement(new["run"], new["lines"], new["sha256"])
        new["signature"] = base64.b64encode(certificates.sign(own.key, module._OWN, statement)).decode()
        head = Head(*(new[name] for name in Head._fields))
        signed = certificates.sign(counter.key, module._COUNTER, head.statement())
        path.write_text(
            "\n".join([*whole, json.dumps(new | {"countersignature": base64.b64encode(signed).decode()}), ""])
        )
        return new["sha256"]

    changed(b, coordinator, lines=100_000)  # both have signed it: it stands
    assert "lines are missing" in compare(log, path, ca, "b").wrong
    for own, counter, who in (
        (coordinator, coordinator, "b"),
        (b, b, "coordinator"),
        (b, load_kit(folder / "kits" / "a"), "coordinator"),
    ):
        changed(own, counter, lines=100_000)
        with pytest.raises(ValueError, match=f"with 100000 lines, is not signed by the {who}"):
            compare(log, path, ca, "b")
    whole[at] = json.dumps(line | {"round": 7})
    path.write_text("\n".join([*whole, ""]))
    with pytest.raises(ValueError, match="is not signed by the coordinator"):
        compare(log, path, ca, "b")
    make_kits(folder / "others", "localhost", ["b"], 30)
    with pytest.raises(ValueError, match="is not signed by the b"):
        compare(log, path, (folder / "others" / "b" / "ca.pem").read_bytes(), "b")


def test_files_that_are_no_heads(folder: Path) -> None:
    for words, line in (
        (("--heads", folder / "heads.jsonl"), "has heads of a, b. Give --site NAME."),
        (("--heads", folder / "heads.jsonl", "--site", "c"), "must have heads of c; it has those of a, b."),
        (
            ("--heads", folder / "b" / "audit.jsonl"),
            "must have a head of a log in each line; line 1 does not",
        ),
        (("--heads", folder / "nowhere"), "must be a file with heads of a log"),
        (("--ca", folder / "nowhere"), "--ca must be ca.pem of a kit"),
    ):
        code, said = audited(folder, *words)
        assert (code, line in said) == (2, True), said
    with (folder / "heads.jsonl").open("a") as file:
        file.write('{"site": "a", "run')  # torn by a crash
    assert audited(folder, "--heads", folder / "heads.jsonl", "--site", "b")[0] == 0


def test_only_receipts_for_own_heads_are_kept(folder: Path, tmp_path: Path) -> None:
    log, told = Audit(tmp_path / "log" / audits.FILE), list[str]()
    log.kit = a = load_kit(folder / "kits" / "a")
    coordinator = load_kit(folder / "kits" / "coordinator")
    a_run(log)
    log._run = RUN
    said = signed_head(a, RUN, *log.show_head())
    sent: list[str] = []

    class Transport:
        kit = coordinator
        certificate = staticmethod(lambda site: a.cert)
        receipt = staticmethod(lambda site, receipt: sent.append(receipt))

    notary, noted = Notary(tmp_path / "heads.jsonl", Transport(), told.append), Receipts(log, told.append)
    notary.keep(("a",), RUN, 2, {0: said})
    notary.keep(("a",), RUN, 3, {0: said})  # nothing new
    path = tmp_path / "log" / "audit.receipts"
    other = json.loads(sent[0])
    for wrong in (
        "", "[]", "{}", json.dumps(other | {"lines": 3}), json.dumps(other | {"round": 9}),
        json.dumps(other | {"site": "b"}), json.dumps(other | {"countersignature": ""}),
    ):  # fmt: skip
        noted(wrong, coordinator.cert)
    noted(sent[0], a.cert)
    assert not path.exists()
    assert told == ["A receipt from the coordinator is not for a head of this site's audit log, and was not kept."]
    noted(sent[0].replace(", ", ",\n") + "\n" * 9, coordinator.cert)
    assert len(path.read_text().splitlines()) == 3
    assert compare(tmp_path / "log" / audits.FILE, path, a.ca) == (1, 9, "", True)
    told.clear()
    notary.keep(("a",), RUN, 4, {0: signed_head(a, RUN, 5, "0" * 64)})
    assert told == ["The audit log of a had 9 lines, and now has 5: it was cut or replaced."]
    notary.keep(("a",), RUN, 4, {0: signed_head(coordinator, RUN, 12, "0" * 64)})
    assert told[1:] == ["a has not signed the head of its audit log, which is not countersigned."]
    assert (len(sent), len((tmp_path / "heads.jsonl").read_text().splitlines())) == (2, 4)
    log.close()


def test_without_certificates_heads_are_kept_as_they_are(tmp_path: Path) -> None:
    log = Audit(tmp_path / "log" / audits.FILE)
    a_run(log, 30)
    Notary(tmp_path / "heads.jsonl").keep(("a",), RUN, 30, {0: signed_head(None, RUN, *log.show_head())})
    log.close()
    assert compare(log.path, tmp_path / "heads.jsonl").wrong == ""
    cut_the_log(tmp_path / "log", 50)
    assert "lines are missing" in compare(log.path, tmp_path / "heads.jsonl").wrong


def test_a_head_tells_nothing_of_what_is_in_the_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else a coordinator that knows all records but one could try out which it is."""

    class Clock(audits.datetime):
        @classmethod
        def now(cls, tz: Any = None) -> Any:
            return cls(2030, 1, 1, tzinfo=tz)

    monkeypatch.setattr(audits, "datetime", Clock)
    heads = set()
    for i in range(2):
        log = Audit(tmp_path / str(i) / audits.FILE)
        log.opened(RUN, OPENING, FINGERPRINT, 4, 3)
        heads.add(log.show_head())
        log.close()
        assert len(json.loads((tmp_path / str(i) / audits.FILE).read_text())["salt"]) == 32
    assert len(heads) == 2


def test_what_is_a_head() -> None:
    good = [3, "0" * 64, ""]
    assert is_head(good)
    for wrong in (None, {}, [], [True, "0" * 64, ""], [0, "0" * 64, ""], [3, "0" * 63, ""], [3, "0" * 64], [3, 4, ""],
                  [3.0, "0" * 64, ""], [3, "0" * 64, "x" * 2000]):  # fmt: skip
        assert not is_head(wrong), wrong
