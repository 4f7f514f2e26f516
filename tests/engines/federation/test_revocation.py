"""Certificates that end: revoked, expired and renewed ones, over gRPC, at the handshake and in the middle of a run."""

import dataclasses
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.engines.federation import processes
from tests.engines.federation.clocks import ahead
from tests.engines.federation.processes import Played, Process, play
from tests.engines.federation.studies import study, without_data

import rookery as rk
from rookery.engines.engine import Job
from rookery.engines.federation.kits import Kit, load_kit
from rookery.engines.federation.provision import make_kits, renew, revoke
from rookery.engines.federation.responder import Responder
from rookery.engines.federation.transports import grpc as network
from rookery.engines.federation.transports import grpc_site, trust
from rookery.engines.federation.transports.trust import Trust, note, noted, proof

pytest.importorskip("cryptography.x509")
pytestmark = pytest.mark.xdist_group("processes")

NAMES = ("a", "b", "c")


@pytest.fixture
def out(tmp_path: Path) -> Path:
    make_kits(tmp_path / "kits", "localhost", NAMES, 30)
    return tmp_path / "kits"


@pytest.fixture
def transport(out: Path) -> Iterator[network.GrpcServer]:
    found = network.GrpcServer("localhost:0", (), out / "coordinator")
    yield found
    found.close()


def a_job(minimum: int = 2) -> Job:
    problem = rk.SingleLevel(lambda x, rows: ((x - rows) ** 2).mean())
    clients = rk.Clients(upper=[np.full(n, n, np.float32) for n in (1, 2, 3)])
    return Job(problem, clients, rk.FedAvg(), (np.float32(0), ()), 3, 0, None, rk.Faults(minimum=minimum))


class Joined:
    """Sites in threads, each with its kit."""

    def __init__(self, address: str, kits: dict[str, Kit], handle: dict[str, Callable[[bytes], Any]]) -> None:
        self.ended: dict[str, str] = {}
        self.told: dict[str, list[str]] = {name: [] for name in kits}
        self.over = threading.Event()
        self._threads = [
            threading.Thread(target=self._join, args=(name, address, kit, handle[name]), daemon=True)
            for name, kit in kits.items()
        ]
        for thread in self._threads:
            thread.start()

    def _join(self, name: str, address: str, kit: Kit, handle: Any) -> None:
        try:
            grpc_site.join(handle, self.over.is_set, name, address, kit, self.told[name].append, patience=20.0)
            self.ended[name] = ""
        except grpc_site.JoinError as error:
            self.ended[name] = str(error)

    def end(self) -> None:
        self.over.set()
        for thread in self._threads:
            thread.join(20)


def waiting(true: Callable[[], Any], seconds: float = 10.0) -> None:
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end
        time.sleep(0.02)


def test_a_connected_site_is_refused_in_the_round_after_its_revocation(
    out: Path, transport: network.GrpcServer
) -> None:
    """It is asked nothing more, and a reply that it sends all the same is not used."""
    what, played = a_job(), Played()
    own = [Responder(name, study(what, i)) for i, name in enumerate(NAMES)]
    asked = {name: 0 for name in NAMES}

    def counting(i: int) -> Callable[[bytes], Any]:
        def handle(message: bytes) -> Any:
            asked[NAMES[i]] += 1
            return own[i].handle(message)

        return handle

    kits = {name: load_kit(out / name) for name in NAMES}
    joined = Joined(transport.address, kits, {name: counting(i) for i, name in enumerate(NAMES)})
    at: dict[int, dict[str, int]] = {}

    def between(t: int) -> None:
        at[t] = dict(asked)
        if t == 2:
            revoke(out, "c")

    engine = rk.Federation(transport=transport, patience=20.0, tell=played.told.append, watch=played.watch)
    play(engine, without_data(what), 4, played, between)
    asked_of_c = asked["c"]
    joined.end()
    assert at[2]["c"] > at[1]["c"]
    assert asked_of_c == at[2]["c"]  # nothing since
    assert {site for _, site in played.lost} == {2}
    assert played.links.records[0].missing == 0
    assert played.says("c has lost its connection", "revoked")
    assert "the certificate of 'c' was revoked or replaced" in joined.ended["c"]
    waiting(lambda: any("List 2 of revoked certificates is in force" in text for text in joined.told["a"]))
    assert Trust(load_kit(out / "a"), "localhost", print)._revocations.number == 2


@pytest.mark.slow
def test_a_revoked_process_is_refused_within_one_round(sites: list[Process], tmp_path: Path) -> None:
    make_kits(tmp_path / "kits", "localhost", list(processes.NAMES), 30)
    found = network.GrpcServer("localhost:0", (), tmp_path / "kits" / "coordinator")
    what: dict[str, Any] = {"name": "FedAvg", "faults": rk.Faults(minimum=2)}
    for process, name in zip(sites, processes.NAMES, strict=True):
        process.join(what, found.address, kit=tmp_path / "kits" / name)
    played, replies = Played(), dict[int, int]()

    def between(t: int) -> None:
        replies[t] = played.links.records[2].replies
        if t == 3:
            revoke(tmp_path / "kits", processes.NAMES[2])

    play(processes.federation(found, played), without_data(processes.job(**what)), 6, played, between)
    assert replies[0] < replies[1] < replies[2] < replies[3] == replies[4] == played.links.records[2].replies
    assert {site for _, site in played.lost} == {2}
    results = [process.result() for process in sites]
    assert [result.get("error") for result in results[:2]] == [None, None]
    assert "was revoked or replaced; ask for a new kit" in results[2]["error"]


def test_a_reply_that_was_on_its_way_is_not_used(out: Path, transport: network.GrpcServer) -> None:
    kit, answer = load_kit(out / "c"), threading.Event()

    def handle(message: bytes) -> bytes:
        answer.wait(10)
        return b"a reply"

    joined = Joined(transport.address, {"c": kit}, {"c": handle})
    assert transport.receive(10.0) == (2, "here", b"")
    transport.send(2, b"\x01\x00\x00\x00 a request")
    answer.set()
    waiting(lambda: not transport._events.empty())  # the reply has come, and nobody has taken it
    revoke(out, "c")
    events = [event for _ in range(10) if (event := transport.receive(0.1)) is not None]
    assert [event.kind for event in events] == ["gone"]
    joined.end()


def test_a_revocation_while_a_site_connects(out: Path, transport: network.GrpcServer) -> None:
    introduce = transport._introduce

    def slowly(connection: Any, nonce: str) -> None:
        introduce(connection, nonce)
        revoke(out, "c")
        transport._reread()  # by another thread, which does not see this connection yet

    transport._introduce = slowly  # type: ignore[method-assign]
    joined = Joined(transport.address, {"c": load_kit(out / "c")}, {"c": lambda message: b""})
    waiting(lambda: joined.ended)
    assert "was revoked or replaced" in joined.ended["c"]
    assert not transport._connections


def expire(monkeypatch: pytest.MonkeyPatch, days: float) -> None:
    """Have this process think that it is so many days later."""

    for module in (network, trust):
        monkeypatch.setattr(module, "datetime", ahead(days))


def test_a_certificate_that_expires_ends_the_connection_unless_it_was_renewed(
    out: Path, transport: network.GrpcServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A renewed one comes over the connection, is saved, and is used for the next connection."""
    for name in "ab":
        shutil.copytree(out / name, out.parent / name)
    kits = {name: load_kit(out.parent / name) for name in "ab"}
    joined = Joined(transport.address, kits, {name: lambda message: b"" for name in "ab"})
    waiting(lambda: len(transport._connections) == 2)
    renew(out, ["a"], 90)
    renew(out, ["coordinator"], 90)
    while transport.receive(0.1) is not None:
        pass
    waiting(lambda: any("renewed, and is valid until" in text for text in joined.told["a"]))
    assert load_kit(out.parent / "a").cert == load_kit(out / "a").cert != kits["a"].cert
    first = transport._connections[0].serial
    expire(monkeypatch, 31)
    while transport.receive(0.1) is not None:
        pass
    waiting(lambda: "b" in joined.ended)
    assert "the certificate of 'b' expired on" in joined.ended["b"]
    assert "renew it with `rookery federation renew`" in joined.ended["b"]
    waiting(lambda: 0 in transport._connections and transport._connections[0].serial != first)
    with pytest.raises(grpc_site.JoinError, match=r"b can't connect to .*: the certificate of 'b' expired on"):
        grpc_site.join(lambda m: b"", lambda: False, "b", transport.address, kits["b"], print)
    joined.end()


# ------------------------------------------------------------ what a site believes


def introduced(kit: Kit, coordinator: Kit, site: str = "", nonce: str = "", pem: bytes | None = None) -> Trust:
    own = Trust(kit, "localhost", lambda text: None)
    own.begin()
    if pem is None:
        pem = (coordinator.folder / "revoked.pem").read_bytes() if coordinator.folder else b""
    said = noted(note(list=pem, **proof(coordinator, site or kit.name, nonce or own.nonce)))
    assert said is not None
    own.take(said)
    own.check()
    return own


def test_a_coordinator_must_prove_that_its_certificate_is_in_force(out: Path, tmp_path: Path) -> None:
    old, a = load_kit(out / "coordinator"), load_kit(out / "a")
    introduced(a, old)
    make_kits(tmp_path / "others", "localhost", ["a"], 30)
    false = load_kit(tmp_path / "others" / "coordinator")
    stolen = dataclasses.replace(old, key=false.key)
    listed = (out / "a" / "revoked.pem").read_bytes()
    for words, who in (
        ("shows a certificate that is not the coordinator's", false),
        ("shows a certificate that is not the coordinator's", load_kit(out / "b")),  # a site as a coordinator
        ("can't prove that its certificate is its own", stolen),
    ):
        with pytest.raises(ValueError, match=words):
            introduced(a, who, pem=listed)
    for said in ({"site": "b"}, {"nonce": "0" * 32}):  # what it has signed for another connection
        with pytest.raises(ValueError, match="can't prove that its certificate is its own"):
            introduced(a, old, **said)
    silent = Trust(a, "localhost", print)
    silent.begin()
    with pytest.raises(ValueError, match="has not proved who it is"):
        silent.check()


def test_the_coordinators_certificate_may_be_revoked_too(out: Path, tmp_path: Path) -> None:
    """A site learns it from the list, which the next coordinator sends or its owner puts into the kit."""
    old, a = load_kit(out / "coordinator"), load_kit(out / "a")
    before = (out / "a" / "revoked.pem").read_bytes()
    own = introduced(a, old)
    revoke(out, "coordinator")  # the list in the kit of a is replaced
    with pytest.raises(ValueError, match="has a certificate that was revoked"):
        own.check()
    with pytest.raises(ValueError, match="has a certificate that was revoked"):
        introduced(a, old)
    (out / "a" / "revoked.pem").write_bytes(before)
    own = introduced(load_kit(out / "a"), load_kit(out / "coordinator"))  # the new one sends the new list
    assert own._revocations.number == 2
    with pytest.raises(ValueError, match=r"has a list of revoked certificates that is not to be trusted: .*got 1"):
        introduced(load_kit(out / "a"), old, pem=before)  # the old one comes with the old list, after a restart
    with pytest.raises(ValueError, match="has a certificate that was revoked"):
        introduced(load_kit(out / "a"), old)


def test_a_list_is_never_older_than_one_seen_before(out: Path, tmp_path: Path) -> None:
    a, first = load_kit(out / "a"), (out / "a" / "revoked.pem").read_bytes()
    revoke(out, "b")
    coordinator = load_kit(out / "coordinator")
    own = introduced(a, coordinator)
    make_kits(tmp_path / "others", "localhost", ["a"], 30)
    forged = (tmp_path / "others" / "a" / "revoked.pem").read_bytes()
    for words, wrong in (("got 1", first), ("must be there; it has none", b""), ("signed by this federation", forged)):
        with pytest.raises(ValueError, match=f"has a list .* that is not to be trusted: .*{words}"):
            own.take({**(noted(note(list=wrong)) or {})})
        with pytest.raises(ValueError, match="not to be trusted"):
            introduced(a, coordinator, pem=wrong)
    silent = noted(note(**proof(coordinator, "a", own.nonce))) or {}
    with pytest.raises(ValueError, match="must be there; it has none"):
        own.take(silent)  # it leaves its list out
    earlier = dataclasses.replace(a, folder=None, revocations=0)  # a kit of an earlier version has no list
    bare = dataclasses.replace(coordinator, folder=None)
    assert introduced(earlier, bare)._revocations.number == 0


def test_a_renewed_certificate_is_for_this_site_and_key(out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    a, coordinator = load_kit(out / "a"), load_kit(out / "coordinator")
    own = introduced(a, coordinator)
    renew(out, ["a", "b"], 60)
    for wrong in (load_kit(out / "b").cert, coordinator.cert):
        with pytest.raises(ValueError, match="sends a renewed certificate that is not this site's"):
            own.take({**(noted(note(renewed=wrong)) or {})})
    own.take(noted(note(renewed=load_kit(out / "a").cert)) or {})
    assert own.kit.cert == load_kit(out / "a").cert
    own.take(noted(note(renewed=a.cert)) or {})  # the earlier one, again
    assert own.kit.cert == load_kit(out / "a").cert


def test_a_warning_before_the_end(out: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    from rookery.engines.federation import certificates

    cert = load_kit(out / "a").cert
    assert certificates.ending(cert) == ""
    for days, soon in ((20, False), (24, True)):
        with monkeypatch.context() as patch:
            patch.setattr(certificates, "datetime", ahead(days))
            assert bool(certificates.ending(cert)) is soon
    with monkeypatch.context() as patch:
        patch.setattr(certificates, "datetime", ahead(24))
        told: list[str] = []
        own = Trust(load_kit(out / "a"), "localhost", told.append)
        own.begin()
        own.begin()
        own.begin()
        coordinator = network.GrpcServer("localhost:0", (), out / "coordinator")
        joined = Joined(coordinator.address, {"b": load_kit(out / "b")}, {"b": lambda message: b""})
        waiting(lambda: len(caplog.records) == 2)
        coordinator.close()
        joined.end()
    for who, record in zip(("coordinator", "b"), caplog.records, strict=True):
        assert f"The certificate of {who} ends on" in record.getMessage()
    assert len(told) == 1
    assert "This site's certificate ends on" in told[0]
    assert "in 5 days. Renew it with `rookery federation renew`." in told[0]


def test_notes_are_no_messages() -> None:
    assert noted(b"\x02\x00\x00\x00{}") is None
    assert noted(note(list=b"x", what="y")) == {"list": "eA==", "what": "y"}
    for wrong in (b"", b"[]", b"{", b"1"):
        with pytest.raises(ValueError):
            noted(bytes(4) + wrong)
