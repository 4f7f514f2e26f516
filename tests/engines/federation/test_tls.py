"""Who is let in: mutual TLS between coordinator and sites, and what happens without; how long a reply may be."""

import dataclasses
import os
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import jax.numpy as jnp
import numpy as np
import pytest
from tests.engines.federation.clocks import ahead
from tests.engines.federation.processes import Played, federation, in_threads, play, server
from tests.engines.federation.studies import without_data
from typer.testing import CliRunner

import rookery as rk
from rookery import cli
from rookery.engines.checks import start_values
from rookery.engines.engine import Job
from rookery.engines.federation import certificates, provision
from rookery.engines.federation.kits import Kit, load_kit
from rookery.engines.federation.provision import make_kits
from rookery.engines.federation.transports import grpc as network
from rookery.engines.federation.transports import grpc_site

pytest.importorskip("cryptography.x509")
pytestmark = pytest.mark.xdist_group("processes")


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tls")
    make_kits(folder / "kits", "localhost", ["a", "b"], 30)
    make_kits(folder / "others", "localhost", ["a", "b"], 30)
    return folder


@pytest.fixture
def listening(out: Path) -> Iterator[network.GrpcServer]:
    found = network.GrpcServer("localhost:0", (), out / "kits" / "coordinator")
    yield found
    found.close()


def credentials(kit: Kit) -> Any:
    return grpc.ssl_channel_credentials(kit.ca, kit.key, kit.cert)


def attempt(transport: network.GrpcServer, own: Any, name: str) -> str:
    """Join, and say what came of it; one that gets in is told nothing either, for nobody asks it anything."""
    channel = grpc.secure_channel(transport.address, own) if own else grpc.insecure_channel(transport.address)
    stopped = threading.Event()
    stream = channel.stream_stream("/rookery.Federation/Join")(
        iter(lambda: stopped.wait(20) or None, None), metadata=(("site", name),), timeout=20
    )
    try:
        stream.initial_metadata()
        stopped.wait(0.1)  # the status of a refusal may come after it
        if stream.is_active():
            return "connected"
        next(stream)
    except grpc.RpcError as error:
        return error.code().name
    finally:
        stopped.set()
        stream.cancel()
        channel.close()
    return "answered"


def test_a_site_with_its_certificate_is_let_in(out: Path, listening: network.GrpcServer) -> None:
    assert attempt(listening, credentials(load_kit(out / "kits" / "a")), "a") == "connected"
    event = listening.receive(5.0)
    assert event is not None
    assert (event.site, event.kind) == (0, "here")


def expired(out: Path, monkeypatch: pytest.MonkeyPatch) -> Kit:
    good = load_kit(out / "kits" / "a")
    paths = (out / "kits" / "ca" / "ca.pem", out / "kits" / "ca" / "key.pem")
    ca = certificates.load_authority(paths, (paths[0].read_bytes(), paths[1].read_bytes()))
    with monkeypatch.context() as patch:
        patch.setattr(certificates, "datetime", ahead(-40))
        cert, key = ca.issue("a", 30, ["a"], server=False)
    return dataclasses.replace(good, key=key, cert=cert)


@pytest.mark.parametrize("who", ["nobody", "in plain text", "of another CA", "expired", "another name", "coordinator"])
def test_anybody_else_is_refused(
    who: str,
    out: Path,
    listening: network.GrpcServer,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    kit, code, name = load_kit(out / "kits" / "a"), "UNAVAILABLE", "a"
    match who:
        case "nobody":
            own = grpc.ssl_channel_credentials(kit.ca)
        case "in plain text":
            own = None
        case "of another CA":
            other = load_kit(out / "others" / "a")
            own = grpc.ssl_channel_credentials(kit.ca, other.key, other.cert)
        case "expired":
            own = credentials(expired(out, monkeypatch))
        case "another name":
            own, code, name = credentials(kit), "PERMISSION_DENIED", "b"
        case "coordinator":
            own = credentials(load_kit(out / "kits" / "coordinator"))
    assert attempt(listening, own, name) == code
    assert listening.receive(0.2) is None
    assert not listening._connections
    if who == "another name":
        assert "the certificate belongs to 'a', but the site calls itself 'b'" in caplog.text


@pytest.mark.parametrize("whose", ["coordinator", "site"])
def test_a_kit_of_another_ca_ends_in_one_line(whose: str, out: Path, listening: network.GrpcServer) -> None:
    """Either side may be the one that does not know the other's CA; the site has no `patience` that would end."""
    kit = load_kit(out / "others" / "a")
    line = "the coordinator's certificate was not issued by this federation's CA"
    if whose == "site":
        kit = dataclasses.replace(kit, ca=load_kit(out / "kits" / "a").ca, folder=None, revocations=0)
        line = "the coordinator does not accept this site's certificate"
    asked: list[bytes] = []
    told: list[str] = []
    with pytest.raises(grpc_site.JoinError) as raised:
        grpc_site.join(lambda m: asked.append(m) or b"", lambda: False, "a", listening.address, kit, told.append)
    whole = f"Cannot connect to {listening.address}: {line}. Check that the kit belongs to this federation."
    assert str(raised.value) == whole
    assert told == [f"{whole} Trying again."]
    assert not asked
    assert listening.receive(0.2) is None


def test_a_site_that_was_connected_once_tries_on(out: Path) -> None:
    """Whoever listens at that address meanwhile can't end it."""
    kit = load_kit(out / "kits" / "a")
    true = network.GrpcServer("localhost:0", (), out / "kits" / "coordinator")
    over, told = threading.Event(), list[str]()
    join = lambda: grpc_site.join(lambda m: b"", over.is_set, "a", true.address, kit, told.append)
    site = threading.Thread(target=join, daemon=True)
    site.start()
    until(lambda: told)
    with true._lock:  # it dies without a word
        true._connections[0].close()
    true._server.stop(0).wait()
    false = network.GrpcServer(true.address, (), out / "others" / "coordinator")
    until(lambda: any("was not issued by" in text for text in told), 20)
    time.sleep(2.0)
    assert site.is_alive()
    over.set()
    false.close()
    site.join(20)


def until(true: Any, seconds: float = 10.0) -> None:
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end
        time.sleep(0.02)


# ------------------------------------------------------------ revoked certificates


def test_a_revoked_certificate_neither_connects_nor_displaces_its_owner(tmp_path: Path) -> None:
    """Its name has a new kit: by `revoke`, or since the folder was deleted and made anew."""
    folder = tmp_path / "kits"
    make_kits(folder, "localhost", ["a", "b"], 30)
    old = {name: dataclasses.replace(load_kit(folder / name), folder=None, revocations=0) for name in "ab"}
    provision.revoke(folder, "a")
    shutil.rmtree(folder / "b")
    make_kits(folder, "localhost", ["a", "b"], 30)
    transport = network.GrpcServer("localhost:0", (), folder / "coordinator")
    for i, name in enumerate("ab"):
        over = threading.Event()
        new = load_kit(folder / name)
        join = lambda new=new, over=over: grpc_site.join(
            lambda m: b"", over.is_set, new.name, transport.address, new, str
        )
        owner = threading.Thread(target=join, daemon=True)
        owner.start()
        assert transport.receive(10.0) == (i, "here", b"")
        with pytest.raises(
            grpc_site.JoinError, match=f"certificate of '{name}' was revoked or replaced; ask for a new kit"
        ):
            grpc_site.join(lambda m: b"", lambda: False, name, transport.address, old[name], str)
        assert transport.receive(0.2) is None
        assert owner.is_alive()
        over.set()
    transport.close()


def test_a_coordinator_that_runs_notices_a_revocation(tmp_path: Path) -> None:
    folder = tmp_path / "kits"
    make_kits(folder, "localhost", ["a", "b"], 30)
    transport = network.GrpcServer("localhost:0", (), folder / "coordinator")
    kit = dataclasses.replace(load_kit(folder / "a"), folder=None, revocations=0)  # of a site that has no list itself
    said = list[str]()

    def join() -> None:
        try:
            grpc_site.join(lambda m: b"", lambda: False, "a", transport.address, kit, str)
        except grpc_site.JoinError as error:
            said.append(str(error))

    site = threading.Thread(target=join, daemon=True)
    site.start()
    assert transport.receive(10.0) == (0, "here", b"")
    provision.revoke(folder, "a")
    events = [event for _ in range(5) if (event := transport.receive(0.2)) is not None]
    assert [(event.site, event.kind) for event in events] == [(0, "gone")]
    site.join(10)
    assert "was revoked or replaced" in said[0]
    (folder / "coordinator" / "kit.toml").write_text("half a fi")  # as it is copied: the list before holds
    time.sleep(1.1)
    with pytest.raises(grpc_site.JoinError, match="was revoked"):
        grpc_site.join(lambda m: b"", lambda: False, "a", transport.address, kit, str)
    transport.close()


STRANGERS = """
import os, pathlib, socket, sys, time
from rookery.engines.federation.transports import grpc
server = grpc.GrpcServer("localhost:0", (), pathlib.Path(sys.argv[1]))
host, _, port = server.address.rpartition(":")
for k in range(60):
    with socket.create_connection((host, int(port))) as one:
        one.sendall([b"GET / HTTP/1.1\\r\\n\\r\\n", os.urandom(300), b"PRI * HTTP/2.0\\r\\n"][k % 3])
        one.settimeout(5)
        try:
            one.recv(10)
        except OSError:
            pass
server.close()
"""


def test_strangers_write_nothing_to_the_coordinators_log(out: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "GRPC_VERBOSITY"}
    words = [sys.executable, "-c", STRANGERS.replace("\\\\", "\\"), str(out / "kits" / "coordinator")]
    done = subprocess.run(words, capture_output=True, text=True, timeout=60, env=environment, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_refused_sites_are_counted_and_not_told_one_by_one(
    out: Path, listening: network.GrpcServer, caplog: pytest.LogCaptureFixture
) -> None:
    own = credentials(load_kit(out / "kits" / "a"))
    for _ in range(5):
        assert attempt(listening, own, "b") == "PERMISSION_DENIED"
    assert len(caplog.records) == 1
    listening._logged -= 60.0
    assert attempt(listening, own, "b") == "PERMISSION_DENIED"
    assert caplog.records[1].getMessage().startswith("Refused 5 connections, the last of them: ")


def test_a_name_that_is_none_of_the_sites_is_told_so(out: Path) -> None:
    transport = network.GrpcServer("localhost:0", ["b"], out / "kits" / "coordinator")
    with pytest.raises(grpc_site.JoinError, match="'a' is not one of this run's sites"):
        grpc_site.join(lambda m: b"", lambda: False, "a", transport.address, load_kit(out / "kits" / "a"), str)
    transport.close()


def test_a_site_that_was_not_told_learns_that_the_run_is_over(out: Path) -> None:
    transport = network.GrpcServer("localhost:0", ["a", "b"], out / "kits" / "coordinator")
    threading.Timer(0.5, transport.close).start()
    with pytest.raises(grpc_site.JoinError, match="refuses a: the run is over"):
        grpc_site.join(lambda m: b"", lambda: False, "a", transport.address, load_kit(out / "kits" / "a"), str)


# ------------------------------------------------------------ without certificates


def test_without_certificates_only_this_machine(out: Path) -> None:
    for address in ("0.0.0.0:0", "[::]:0", "10.0.0.7:0", "example.org:0"):
        site = "must be on this machine without certificates|must be one that sites can connect to"
        with pytest.raises(ValueError, match=r"must be at 127\.0\.0\.1 without certificates; got"):
            network.GrpcServer(address, ["a"], None, True)
        with pytest.raises(ValueError, match=site):
            grpc_site.join(lambda m: b"", lambda: True, "a", address.replace(":0", ":9443"), None)
    transport = network.GrpcServer("127.0.0.1:0", ["a"], None, True)
    port = int(transport.address.rpartition(":")[2])
    table = [line.split() for name in ("tcp", "tcp6") for line in Path("/proc/net", name).read_text().splitlines()[1:]]
    bound = {
        row[1].rpartition(":")[0] for row in table if row[3] == "0A" and int(row[1].rpartition(":")[2], 16) == port
    }
    transport.close()
    assert bound
    assert all(address.endswith("0100007F") for address in bound)


def test_a_site_gets_in_beside_connections_that_say_nothing() -> None:
    """(A whole run beside them: test_faults.)"""
    transport = server(("a",))
    host, _, port = transport.address.rpartition(":")
    idle = [socket.create_connection((host, int(port))) for _ in range(50)]
    for connection in idle[:25]:
        connection.sendall(b"PRI * HTTP/2.0\r\n")  # half of a greeting
    assert attempt(transport, None, "a") == "connected"
    for connection in idle:
        connection.close()
    transport.close()


def test_who_joins_later_under_a_name_takes_its_place() -> None:
    """(In the middle of a run: test_faults.)"""
    transport = server(("a",))
    later = threading.Thread(target=attempt, args=(transport, None, "a"))
    with pytest.raises(grpc_site.JoinError, match="another process has joined under this name"):
        grpc_site.join(
            lambda m: b"", lambda: False, "a", transport.address, None, lambda text: later.start(), patience=20
        )
    later.join()
    transport.close()


STUDY = """
import jax.numpy as jnp, numpy as np, rookery as rk
from rookery.tasks import Task
loss = lambda x, batch: jnp.mean((batch["a"] - x) ** 2)
like = lambda n: rk.Clients.like(upper={"a": np.zeros(2)}, n=n)
measured = lambda x, y: {"loss": jnp.sum(x)}
task = lambda clients=1: Task("study", rk.SingleLevel(loss), like(clients), np.zeros(2), measured, "loss", 1)
"""


def serve(folder: Path, *given: str) -> Any:
    (folder / "study.py").write_text(STUDY)
    return CliRunner().invoke(cli.app, ["serve", f"{folder / 'study.py'}:task", "--algorithm", "FedAvg", *given])


def test_serve_without_kit_and_without_insecure(tmp_path: Path) -> None:
    done = serve(tmp_path, "--sites", "a", "--address", "127.0.0.1:0")
    assert done.exit_code == 2
    assert "rookery federation init" in done.stderr
    assert done.stderr.count("\n") == 1


def test_serve_insecure_says_so_and_stays_here(tmp_path: Path) -> None:
    done = serve(tmp_path, "--sites", "a", "--address", "0.0.0.0:0", "--insecure")
    assert done.exit_code == 2
    warned, refused = done.stderr.splitlines()
    assert "nothing is encrypted" in warned
    assert "address must be at 127.0.0.1 without certificates; got '0.0.0.0:0'" in refused


# ------------------------------------------------------------ large replies


def _far(x: Any, batch: Any) -> Any:
    return jnp.mean(batch["a"]) * jnp.mean((x - 1.0) ** 2)


def test_a_reply_of_20_megabytes() -> None:
    """More than a site may send before there is a plan."""
    clients = rk.Clients(upper=[{"a": np.ones(n)} for n in (1, 2)])
    problem, method = rk.SingleLevel(_far), rk.FedAvg(step=0.1, local_steps=1)
    start = start_values(problem, clients, np.zeros(2_500_000))
    what = Job(problem, clients, method, start, 2, 0)
    transport, played = server(("a", "b")), Played()
    assert transport.limit < 20_000_000
    with in_threads(what, transport.address, ("a", "b")):
        play(federation(transport, played), without_data(what), 1, played)
    assert transport.limit == 20_000_000 + (1 << 20)
    assert played.session.coordinator.received == 40_000_000
    assert np.ptp(played.state.x) == 0
    assert played.state.x[0] > 0
