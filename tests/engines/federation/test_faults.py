"""What goes wrong in a federation, with real processes: the run ends with the right numbers, and says who did what.

The method is FedSVRG, with two exchanges a round, or Ditto, whose clients remember. A site does its trick at its
second request of round 1. What is left out of a mean is left out in the same run within this process, for comparison.
"""

import contextlib
import os
import shutil
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tests.engines.federation.processes import (
    FORK,
    NAMES,
    SECONDS,
    Played,
    Process,
    Trick,
    federation,
    job,
    join,
    play,
    prepared,
    replayed,
    server,
)
from tests.engines.federation.studies import like, study, without_data
from typer.testing import CliRunner

import rookery as rk
from rookery import cli
from rookery.engines.federation.provision import make_kits
from rookery.engines.federation.responder import Responder
from rookery.engines.federation.transports import grpc_site
from rookery.testing.runs import close

pytestmark = pytest.mark.xdist_group("processes")
LENIENT = rk.Faults(minimum=2)
LOSSY: dict[str, Any] = {"name": "FedSVRG", "faults": LENIENT}
STRICT: dict[str, Any] = {"name": "FedSVRG"}
DITTO: dict[str, Any] = {"name": "Ditto"}


def until(true: Callable[[], Any], what: str) -> None:
    end = time.monotonic() + SECONDS
    while not true():
        assert time.monotonic() < end, f"{what} does not happen"
        time.sleep(0.02)


@contextlib.contextmanager
def meanwhile(do: Callable[[], None]) -> Iterator[None]:
    """Something that another thread does, whose error is ours."""
    failed: list[BaseException] = []

    def run() -> None:
        try:
            do()
        except BaseException as error:
            failed.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    yield
    thread.join(SECONDS)
    assert not thread.is_alive()
    if failed:
        raise failed[0]


def with_trick(sites: list[Process], what: dict[str, Any], trick: Trick, folder: Path | None = None) -> Played:
    """A run in which the second site does its trick once."""
    transport = server()
    for site in sites:
        site.join(what, transport.address, folder and folder / NAMES[site.i], trick if site.i == 1 else None)
    played, first = Played(), []

    def between(t: int) -> None:
        if t == 1:
            first.append(transport._connections[1])
        if t == 2 and trick.do in FRAMES:
            until(lambda: transport._connections.get(1) not in (None, *first), "its return")

    return play(federation(transport, played), without_data(job(**what)), played=played, between=between)


def hurry(played: Played) -> Callable[[int], None]:
    """A deadline of three seconds, once everything is compiled."""
    return lambda t: setattr(played.links, "deadline", 3.0 if t else SECONDS)


def ended(sites: list[Process]) -> None:
    for site in sites:
        assert site.result().get("reason") == ""


# ------------------------------------------------------------ replies that are wrong

WRONG = {
    "nan": "not finite",
    "shape": "where the plan has",
    "type": "float32",
    "fewer": "where the plan has",
    "garbage": "not a message",
    "empty": "not a message",
    "no work": "what work it has done",
    "strange work": "what work it has done",
    "stale": "ahead of the coordinator",
}
FAST = ("nan",)


@pytest.mark.parametrize("do", [do if do in FAST else pytest.param(do, marks=pytest.mark.slow) for do in WRONG])
def test_a_reply_that_is_wrong_is_left_out_of_its_mean(do: str, sites: list[Process]) -> None:
    played = with_trick(sites, LOSSY, Trick(do))
    ended(sites)
    assert {site for _, site in played.lost} == {1}
    assert len(played.lost) == 1 or do == "stale"
    assert played.says("berta", WRONG[do])
    close(played.state, replayed(job(**LOSSY), played.lost))


def test_without_faults_a_wrong_reply_ends_the_run_by_name(sites: list[Process]) -> None:
    with pytest.raises(RuntimeError, match=r"berta replies to '\w+' with .* where the plan has"):
        with_trick(sites, STRICT, Trick("shape"))
    for site in sites:  # all are told who it was, and why
        assert "berta replies to" in site.result()["reason"]


def test_without_faults_the_run_stops_at_what_is_not_finite(sites: list[Process]) -> None:
    with pytest.raises(AssertionError, match=r"round 2: .* is not finite. \(berta replies to '\w+' with a value that"):
        with_trick(sites, STRICT, Trick("nan"))
    for site in sites:
        assert "berta replies to" in site.result()["reason"]


@pytest.mark.parametrize("do", ["twice", pytest.param("old", marks=pytest.mark.slow)])
def test_a_reply_that_nobody_waits_for_changes_nothing(do: str, sites: list[Process]) -> None:
    """The same reply twice; and an old one, in whose place the deadline comes."""
    transport, played = server(), Played()
    for site in sites:
        site.join(LOSSY, transport.address, None, Trick(do) if site.i == 1 else None)
    between = hurry(played) if do == "old" else lambda t: None
    play(federation(transport, played), without_data(job(**LOSSY)), 3, played, between)
    told = [site.result() for site in sites]
    assert played.links.dropped == 1
    assert {site for _, site in played.lost} == (set() if do == "twice" else {1})
    assert [own["reason"] for own in told] == [""] * 3  # who was left out is told of the end, too
    close(played.state, replayed(job(**LOSSY), played.lost))


# ------------------------------------------------------------ frames that are wrong

FRAMES = {"many": "nobody has asked for", "too long": "more than", "large frame": "has l"}


@pytest.mark.parametrize(
    "do", ["too long", *(pytest.param(do, marks=pytest.mark.slow) for do in ("many", "large frame"))]
)
def test_a_frame_that_is_wrong_ends_the_connection_and_the_site_comes_back(do: str, sites: list[Process]) -> None:
    played = with_trick(sites, LOSSY, Trick(do))
    ended(sites)
    assert played.says("berta", FRAMES[do])
    assert played.told.count("berta is connected.") == 2
    assert {site for _, site in played.lost} <= {1}
    close(played.state, replayed(job(**LOSSY), played.lost))


@pytest.mark.slow
def test_half_a_message_and_then_nothing(sites: list[Process]) -> None:
    """It is late, and is left out; the others do not wait for it."""
    transport, played = server(), Played()
    for site in sites:
        site.join(LOSSY, transport.address, None, Trick("half") if site.i == 1 else None)
    play(federation(transport, played), without_data(job(**LOSSY)), 3, played, hurry(played))
    sites[1].kill()
    for i in (0, 2):
        assert not sites[i].result()["reason"]
    assert played.says("berta has not replied in 3 s")
    assert 1 in {site for _, site in played.lost}
    close(played.state, replayed(job(**LOSSY), played.lost))


@pytest.mark.slow
def test_connections_that_say_nothing_keep_nobody_out(sites: list[Process]) -> None:
    transport, played = server(), Played()
    host, _, port = transport.address.rpartition(":")
    idle = [socket.create_connection((host, int(port))) for _ in range(50)]
    for connection in idle[:25]:
        connection.sendall(b"PRI * HTTP/2.0\r\n")  # half of a greeting
    for site in sites:
        site.join(STRICT, transport.address)
    play(federation(transport, played), without_data(job(**STRICT)), 2, played)
    ended(sites)
    for connection in idle:
        connection.close()
    close(played.state, play(rk.Simulation(), job(**STRICT), 2).state)


# ------------------------------------------------------------ sites that die


@pytest.mark.parametrize("do", ["killed before", pytest.param("killed after", marks=pytest.mark.slow)])
def test_a_site_that_is_killed_is_left_out_and_comes_back(do: str, sites: list[Process]) -> None:
    transport, played = server(), Played()
    for site in sites:
        site.join(LOSSY, transport.address, None, Trick(do) if site.i == 1 else None)

    def between(t: int) -> None:
        if t == 3:
            sites[1].died()
            sites[1].join(LOSSY, transport.address)
            until(lambda: transport._connections.get(1), "its return")

    play(federation(transport, played), without_data(job(**LOSSY)), 5, played, between)
    ended(sites)
    assert played.says("berta", "has l")
    assert played.told.count("berta is connected.") == 2
    rounds = {exchange for exchange, _ in played.lost}
    assert {site for _, site in played.lost} == {1}
    assert max(rounds) < played.links.exchanges - 5  # the last rounds have it again
    close(played.state, replayed(job(**LOSSY), played.lost, 5))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("what", "do", "at"),
    [
        (STRICT, "killed before", 1),
        # After it has written what it remembers of the round.
        pytest.param(DITTO, "killed after", 1, marks=pytest.mark.slow),
        pytest.param(DITTO, "killed before", 1, marks=pytest.mark.slow),
        pytest.param(DITTO, "killed after", 0, marks=pytest.mark.slow),
    ],
)
def test_without_faults_the_run_waits_for_a_site_that_was_killed(
    what: dict[str, Any], do: str, at: int, sites: list[Process], tmp_path: Path
) -> None:
    transport, played = server(), Played()
    for site in sites:
        site.join(what, transport.address, tmp_path / NAMES[site.i], Trick(do, at=at) if site.i == 1 else None)

    def restart() -> None:
        until(lambda: played.says("The run pauses", "berta"), "a pause")
        sites[1].died()
        sites[1].join(what, transport.address, tmp_path / "berta")

    with meanwhile(restart):
        play(federation(transport, played), without_data(job(**what)), played=played)
    told = [site.result() for site in sites]
    assert played.says("The run goes on.")
    assert not played.lost
    here = play(rk.Simulation(), job(**what))
    close(here.state, played.state)
    for i, own in enumerate(told):
        close([np.array(leaf[i]) for leaf in jax.tree.leaves((here.carry.memory, here.carry.client))], own["memory"])


@pytest.mark.slow
def test_the_run_waits_for_a_site_that_has_lost_what_it_remembers(sites: list[Process], tmp_path: Path) -> None:
    """Its folder is an old copy: it refuses, the run pauses, and goes on once the right one is put back."""
    transport, played = server(), Played()
    folder = tmp_path / "berta"
    held: list[dict[str, bytes]] = []
    for site in sites:
        site.join(DITTO, transport.address, tmp_path / NAMES[site.i])

    def restart_with(content: dict[str, bytes]) -> None:
        sites[1].kill()
        for name, text in content.items():
            (folder / name).write_bytes(text)
        sites[1].join(DITTO, transport.address, folder)

    def between(t: int) -> None:
        if t in (1, 3):
            held.append({path.name: path.read_bytes() for path in folder.iterdir()})
        if t == 3:
            restart_with(held[0])

    def put_right() -> None:
        until(lambda: played.says("berta refuses: it has lost its memory"), "a refusal")
        restart_with(held[1])

    with meanwhile(put_right):
        play(federation(transport, played), without_data(job(**DITTO)), 5, played, between)
    ended(sites)
    assert played.says("The run pauses")
    assert played.says("The run goes on.")
    close(played.state, play(rk.Simulation(), job(**DITTO), 5).state)


@pytest.mark.slow
def test_a_needed_site_that_refuses_is_named_when_patience_is_over(sites: list[Process], tmp_path: Path) -> None:
    transport, played = server(), Played()
    for site in sites:
        site.join(DITTO, transport.address, tmp_path / NAMES[site.i])

    def between(t: int) -> None:
        if t == 3:
            sites[1].kill()
            sites[1].join(DITTO, transport.address, tmp_path / "empty")
            played.links.patience = 3.0

    with pytest.raises(RuntimeError, match="berta refuses: it has lost its memory"):
        play(federation(transport, played), without_data(job(**DITTO)), 5, played, between)
    for site in sites:
        assert "berta refuses: it has lost its memory" in site.result()["reason"]


@pytest.mark.slow
def test_a_site_that_comes_back_with_other_data_is_not_believed(sites: list[Process], tmp_path: Path) -> None:
    """Two sites that swap their names in the middle of a run, say."""
    transport, played = server(), Played()
    same: dict[str, Any] = {"name": "FedAvg", "seed": 26}
    for site in sites:
        site.join(same, transport.address, tmp_path / NAMES[site.i])

    def between(t: int) -> None:
        if t == 2:
            sites[1].kill()
            sites[1].join(same, transport.address, tmp_path / "berta", Trick("other data"))

    with pytest.raises(RuntimeError, match=r"berta refuses: its (data are not those|number of samples)"):
        play(federation(transport, played, patience=5.0), without_data(job(**same)), 3, played, between)
    for site in sites:
        site.result()


@pytest.mark.slow
def test_one_process_gives_way_to_another_of_the_same_name(sites: list[Process], tmp_path: Path) -> None:
    """A site that was taken for dead wakes up when another has taken its place: it ends, and nothing is wrong."""
    transport, played = server(), Played()
    for site in sites:
        site.join(DITTO, transport.address, tmp_path / NAMES[site.i])
    second = Process(sites[1]._folder, 1)

    def between(t: int) -> None:
        if t == 1:
            os.kill(sites[1].process.pid, signal.SIGSTOP)
            first = transport._connections[1]
            second.join(DITTO, transport.address, tmp_path / "berta")  # which the one asleep has locked
            assert "is in use by process" in second.result()["error"]
            shutil.copytree(tmp_path / "berta", tmp_path / "copy")
            second.join(DITTO, transport.address, tmp_path / "copy")
            until(lambda: transport._connections[1] is not first, "the second one's arrival")
        if t == 3:
            sites[1].wake()
            assert "another process has joined under this name" in sites[1].result()["error"]

    play(federation(transport, played), without_data(job(**DITTO)), 5, played, between)
    told = [sites[0].result(), second.result(), sites[2].result()]
    second.kill()
    here = play(rk.Simulation(), job(**DITTO), 5)
    close(here.state, played.state)
    for i, own in enumerate(told):
        close([np.array(leaf[i]) for leaf in jax.tree.leaves((here.carry.memory, here.carry.client))], own["memory"])


# ------------------------------------------------------------ sites that come and go


def test_who_connects_anew_again_and_again_and_answers_nothing_stalls_nobody() -> None:
    """Each time it opens another stream, and leaves the earlier one open."""
    transport, played = server(), Played()
    what = job("FedAvg", faults=LENIENT)
    over, streams = threading.Event(), []

    def attack() -> None:
        until(lambda: played.links is not None and played.links.rounds >= 1, "a round")
        end = time.monotonic() + 20
        while not over.wait(0.4) and time.monotonic() < end:
            channel = grpc.insecure_channel(transport.address, options=[("grpc.use_local_subchannel_pool", 1)])
            stream = channel.stream_stream("/rookery.Federation/Join")(
                iter(over.wait, True), metadata=(("site", NAMES[2]),)
            )
            streams.append((channel, stream))
        over.wait(20)

    def begin(t: int) -> None:
        if t == 2:
            until(lambda: len(streams) >= 2, "an attack")
            played.links.deadline = 1.0
            began.append(time.monotonic())

    began: list[float] = []
    responders = [Responder(name, study(what, i)) for i, name in enumerate(NAMES)]

    def take_part(responder: Responder) -> None:
        with contextlib.suppress(grpc_site.JoinError):  # the third gives way
            join(responder, transport.address)

    threads = [threading.Thread(target=take_part, args=(responder,), daemon=True) for responder in responders]
    for thread in threads:
        thread.start()
    with meanwhile(attack):
        try:
            play(federation(transport, played), without_data(what), 12, played, begin)
            took = time.monotonic() - began[0]
        finally:
            over.set()
    for channel, _ in streams:
        channel.close()
    assert took < 6  # at most two waits of a second, and not one in each of ten rounds
    assert played.says("clara has connected anew.")
    assert played.says("clara is not waited for until it answers.")
    assert len(played.told) < 20
    close(played.state, replayed(what, played.lost, 12))


# ------------------------------------------------------------ sites that hang


@pytest.mark.parametrize("what", [LOSSY, pytest.param(STRICT, marks=pytest.mark.slow)], ids=["lenient", "strict"])
def test_a_site_that_hangs_is_late(what: dict[str, Any], sites: list[Process]) -> None:
    transport, played = server(), Played()
    for site in sites:
        site.join(what, transport.address, None, Trick("asleep") if site.i == 1 else None)

    def wake() -> None:
        until(lambda: sites[1].process.is_alive() and sites[1].stopped(), "its sleep")
        played.links.deadline = 1.0
        until(lambda: played.says("berta has not replied in 1 s."), "a deadline")
        played.links.deadline = SECONDS
        sites[1].wake()

    def between(t: int) -> None:
        if t == 3 and what is LOSSY:
            back = lambda: transport._connections[1].unread or played.links.records[1].state == "connected"
            until(back, "its late reply")

    with meanwhile(wake):
        play(federation(transport, played), without_data(job(**what)), 4, played, between)
    ended(sites)
    assert played.links.dropped >= 1
    assert {site for _, site in played.lost} == ({1} if what is LOSSY else set())
    close(played.state, replayed(job(**what), played.lost, 4))


# ------------------------------------------------------------ the coordinator


def coordinate(
    pipe: Any, cache: str, log: str, what: dict[str, Any], address: str, folder: str, die: int, seed: int
) -> None:
    """A coordinator's process, which is killed once it has had so many exchanges."""
    prepared(cache, log)
    it = job(**what)

    def watch(links: Any) -> None:
        if die and links.exchanges >= die and links.rounds >= 1:
            os.kill(os.getpid(), signal.SIGKILL)

    engine = rk.Federation(
        address, sites=NAMES, insecure=True, deadline=SECONDS, patience=SECONDS, watch=watch, tell=print
    )
    init = it.start[0] if isinstance(it.problem, rk.SingleLevel) else it.start
    try:
        run = rk.solve(
            it.problem, like(it.clients), it.algorithm, init, 4, seed=seed, engine=engine, checkpoint=folder, every=4
        )
        pipe.send(jax.tree.map(np.array, run.state))
    except Exception as error:
        pipe.send(str(error))


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()[1]


def coordinator(sites: list[Process], *given: Any) -> tuple[Any, Any]:
    pipe, theirs = FORK.Pipe()
    folder = sites[0]._folder
    args = (theirs, str(folder / "jax"), str(folder / "coordinator.log"), *given)
    process = FORK.Process(target=coordinate, args=args, daemon=True)
    process.start()
    return process, pipe


def received(pipe: Any, process: Any) -> Any:
    try:
        assert pipe.poll(SECONDS), "no result"
        return pipe.recv()
    finally:
        process.join(SECONDS)
        process.kill()


@pytest.mark.parametrize(
    ("what", "die"), [(DITTO, 9), pytest.param(STRICT, 7, marks=pytest.mark.slow)], ids=["memory", "none"]
)
def test_the_coordinator_is_killed_and_goes_on(
    what: dict[str, Any], die: int, sites: list[Process], tmp_path: Path
) -> None:
    address = f"127.0.0.1:{free_port()}"
    for site in sites:
        site.join(what, address, tmp_path / NAMES[site.i])
    process, _ = coordinator(sites, what, address, str(tmp_path / "run"), die, 25)
    process.join(SECONDS)
    assert process.exitcode == -signal.SIGKILL
    saved = [int(path.name[6:]) for path in (tmp_path / "run").glob("round_*") if path.name[6:].isdigit()]
    assert 0 < max(saved) < 4
    process, pipe = coordinator(sites, what, address, str(tmp_path / "run"), 0, 25)
    state = received(pipe, process)
    assert not isinstance(state, str), state
    here = play(rk.Simulation(), job(**what), 4)
    close(here.state, state)
    for i, site in enumerate(sites):
        leaves = jax.tree.leaves((here.carry.memory, here.carry.client))
        close([np.array(leaf[i]) for leaf in leaves], site.result()["memory"])


@pytest.mark.slow
def test_a_coordinator_with_another_seed_does_not_go_on(sites: list[Process], tmp_path: Path) -> None:
    address = f"127.0.0.1:{free_port()}"
    for seed in (25, 26):
        for site in sites:
            site.join(DITTO, address, tmp_path / NAMES[site.i])
        process, pipe = coordinator(sites, DITTO, address, str(tmp_path / "run"), 0, seed)
        found = received(pipe, process)
        reasons = [site.result()["reason"] for site in sites]
    assert "another run: its seed is 25, this run's 26" in found
    assert all("its seed is 25, this run's 26" in reason for reason in reasons)


# ------------------------------------------------------------ the commands

STUDY = """
import jax.numpy as jnp, numpy as np, rookery as rk
from rookery.tasks import Task
sample = {"a": np.zeros(3), "b": np.zeros(())}
loss = lambda x, batch: jnp.mean((batch["a"] @ x - batch["b"]) ** 2)
measure = lambda client, x, y: {"loss": client.mean(lambda rows: loss(x, rows), client.upper())}
def task(clients=3):
    like = rk.Clients.like(upper=sample, n=clients)
    return Task("study", rk.SingleLevel(loss), like, np.zeros(3), None, "loss", 30, every=10, evaluate_client=measure)
"""
SITE = """
import numpy as np
from study import task
def data():
    rng = np.random.default_rng({seed})
    return {{"upper": {{"a": rng.normal(size=({seed} + 2, 3)), "b": rng.normal(size={seed} + 2)}}}}
"""
METHOD = {"step": 0.1, "personal_step": 0.1, "proximal": 0.5, "batch_size": 2}


def command(cache: str, log: str, folder: str, words: list[str]) -> None:
    """`rookery ...`, in a process of its own."""
    prepared(cache, log)
    os.chdir(folder)
    sys.path.insert(0, folder)
    sys.argv = ["rookery", *words]
    cli.main()


def logs_agree(folder: Path) -> None:
    """All sites' logs have what the coordinator has kept of them; one of them not any more when it is cut."""
    audit = lambda name, *more: CliRunner().invoke(
        cli.app,
        ["audit", "verify", str(folder / name), "--ca", str(folder / "kits" / name / "ca.pem"), *map(str, more)],
    )
    kept = folder / "run" / "heads.jsonl"
    for name in NAMES:
        for more in ((), ("--heads", kept, "--site", name)):
            done = audit(name, *more)
            assert (done.exit_code, "with valid signatures" in " ".join(done.output.split())) == (0, True), done.output
    log = folder / "anna" / "audit.jsonl"
    log.write_bytes(b"".join(log.read_bytes().splitlines(keepends=True)[:-50]))
    log.with_suffix(".head").unlink()
    log.with_suffix(".receipts").unlink()
    assert audit("anna").exit_code == 0
    done = audit("anna", "--heads", kept, "--site", "anna")
    assert (done.exit_code, "lines are missing" in " ".join(done.output.split())) == (1, True), done.output


@pytest.mark.slow
def test_the_commands(sites: list[Process], tmp_path: Path) -> None:
    """With certificates; site and coordinator are killed, and started again as they were."""
    port = free_port()
    make_kits(tmp_path / "kits", f"localhost:{port}", list(NAMES), 30)
    (tmp_path / "study.py").write_text(STUDY)
    started: list[Any] = []

    def start(who: str, *words: str) -> Any:
        log = str(tmp_path / f"{who}.log")
        args = (str(sites[0]._folder / "jax"), log, str(tmp_path), [*words, "--kit", f"kits/{who}"])
        process = FORK.Process(target=command, args=args, daemon=True)
        process.start()
        started.append(process)
        return process

    def site(i: int) -> Any:
        (tmp_path / f"site_{i}.py").write_text(SITE.format(seed=i))
        return start(NAMES[i], "site", "--module", f"site_{i}.py", "--folder", NAMES[i])

    settings = [word for name, value in METHOD.items() for word in ("--set", f"{name}={value}")]
    words = ["serve", "study.py:task", "--algorithm", "Ditto", *settings, "--out", "run"]
    saved = lambda: [int(p.name[6:]) for p in (tmp_path / "run" / "checkpoint").glob("round_*") if p.name[6:].isdigit()]
    told = lambda: (tmp_path / "coordinator.log").read_text()
    try:
        running = [site(i) for i in range(3)]
        coordinator = start("coordinator", *words)
        until(lambda: max(saved(), default=0) >= 3, "round 3")
        running[1].kill()
        until(lambda: "The run pauses" in told(), "a pause")
        running[1] = site(1)
        at = max(saved())
        until(lambda: max(saved(), default=0) > at, "another round")
        coordinator.kill()
        coordinator.join(SECONDS)
        assert max(saved()) < 30, "it was too fast"
        coordinator = start("coordinator", *words, "--resume")
        for process in (coordinator, *running):
            process.join(SECONDS)
            assert process.exitcode == 0, told()
    finally:
        for process in started:
            process.kill()
    assert "berta" in told()
    logs_agree(tmp_path)

    rows = []
    for seed in range(3):
        rng = np.random.default_rng(seed)
        rows.append({"a": rng.normal(size=(seed + 2, 3)), "b": rng.normal(size=seed + 2)})
    problem = rk.SingleLevel(lambda x, batch: jnp.mean((batch["a"] @ x - batch["b"]) ** 2))
    run = rk.solve(problem, rk.Clients(upper=rows), rk.Ditto(**METHOD), np.zeros(3), 30)  # type: ignore[arg-type]
    with np.load(tmp_path / "run" / "state.npz") as found:
        assert any(found[name].shape == (3,) and np.allclose(found[name], run.x, rtol=1e-10) for name in found), {
            name: found[name] for name in found
        }
