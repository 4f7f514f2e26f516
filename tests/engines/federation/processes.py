"""Sites and coordinators as processes of their own, forked from one that has JAX imported; and what they do wrong."""

import contextlib
import dataclasses
import functools
import multiprocessing
import os
import queue
import signal
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import jax
import numpy as np
from tests.contract.cases import Case, claims, method, needs, ragged
from tests.engines.federation.studies import in_memory, without_data
from tests.engines.federation.studies import study as study_of

import rookery as rk
from rookery.engines.checks import start_values
from rookery.engines.engine import Job
from rookery.engines.federation import wire
from rookery.engines.federation.audit import Audit
from rookery.engines.federation.kits import load_kit
from rookery.engines.federation.policy import Policy, PolicyGuard
from rookery.engines.federation.responder import Responder
from rookery.engines.federation.transports import grpc as network
from rookery.engines.federation.transports import grpc_site

NAMES = ("anna", "berta", "clara")
SECONDS = 60.0  # that nothing here may take
FORK = multiprocessing.get_context("forkserver")
FORK.set_forkserver_preload(["rookery.cli", "rookery.run.join", "grpc", "orbax.checkpoint", "tests.contract.cases"])
COMPILED = "/jax/core/compile/backend_compile_duration"


@functools.cache
def job(
    name: str, center_client: int | None = None, faults: Any = None, seed: int = 25, channel: Any = None, **given: Any
) -> Job:
    """A method for three clients of unequal size and weight, on a few numbers."""
    it: Case = ragged(claims(name)[0])
    data = {level: each[:3] for level, each in it.data.items()}
    equal = isinstance(it.problem, rk.WeightedNodes) or "equal weights" in needs(name)
    weights = None if equal else [1, 2, 1]
    clients = rk.Clients(**data, **it.center, weights=weights, center_client=center_client)
    start = start_values(it.problem, clients, it.init)
    return Job(it.problem, clients, method(name, **given), start, 3, seed, channel, faults)


# ---------------------------------------------------------------------------------------------------- what a site does


class Trick:
    """What a site does wrong, once: at its k-th request for work of a moment, or at its k-th request of a kind."""

    def __init__(self, do: str, moment: tuple[int, int] = (1, 1), at: int = 1, kind: str = "work") -> None:
        self.do, self.moment, self.at, self.kind = do, moment, at, kind

    def due(self, header: dict[str, Any]) -> bool:
        if header.get("do") != self.kind:
            return False
        if self.kind == "work" and (header["phase"], header["round"]) != self.moment:
            return False
        self.at -= 1
        return self.at == -1


class Attending:
    """A responder that counts what it compiles, by moment, and has its trick."""

    def __init__(self, responder: Responder, trick: Trick | None) -> None:
        self.responder, self.trick, self.last = responder, trick, b""
        self.compiled: dict[tuple[int, int], int] = {}
        self.memory: list[Any] = []
        self._moment = (-1, 0)
        jax.monitoring.register_event_duration_secs_listener(self._event)

    def _event(self, name: str, seconds: float, **_: Any) -> None:
        if name == COMPILED:
            self.compiled[self._moment] = self.compiled.get(self._moment, 0) + 1

    def handle(self, message: bytes) -> bytes:
        """The reply, if it is one that goes through the responder's own transport."""
        header, _ = wire.decode(message)
        self._moment = (header.get("phase", -1), header.get("round", 0))
        self._look(header)
        due = self.trick is not None and self.trick.due(header)
        do = self.trick.do if due and self.trick else ""
        if do == "killed before":
            os.kill(os.getpid(), signal.SIGKILL)
        if do == "asleep":
            os.kill(os.getpid(), signal.SIGSTOP)
        reply = bytes(self.responder.handle(message))
        if do == "killed after":
            os.kill(os.getpid(), signal.SIGKILL)
        before, self.last = self.last, reply
        return altered(do, reply, before)

    def _look(self, header: dict[str, Any]) -> None:
        """At the end of a run, at what is remembered."""
        site = self.responder._site
        if header.get("do") == "finish" and site is not None:
            own = site.memory.following or site.memory.present
            self.memory = [np.array(leaf) for leaf in (*own["memory"], *own["client"])]

    def frames(self, message: bytes) -> list[bytes]:
        """The same in pieces, for tricks with those."""
        header, _ = wire.decode(message)
        self._look(header)
        due = self.trick is not None and self.trick.due(header)
        reply = bytes(self.responder.handle(message))
        whole = list(network.pieces(reply))
        match self.trick.do if due and self.trick else "":
            case "twice":
                return [*whole, *whole]
            case "empty":
                return [b""]
            case "many":
                return [b"?"] * 100
            case "too long":
                return [bytes(1 << 20)] * 18
            case "large frame":
                return [bytes(3 << 20)]
            case "half":
                return [bytes(1 << 20)]  # the first of two, and then nothing
        return whole


def altered(do: str, reply: bytes, before: bytes) -> bytes:
    """A reply as a faulty site would send it."""
    if do in ("", "killed before", "killed after", "asleep"):
        return reply
    header, arrays = wire.decode(reply)
    first = arrays[0]
    match do:
        case "nan":
            arrays[0] = np.full_like(first, np.nan)
        case "shape":
            arrays[0] = np.zeros((*first.shape, 2), first.dtype)
        case "type":
            arrays[0] = first.astype(np.float32)
        case "fewer":
            arrays = arrays[1:]
        case "old":
            return before
        case "garbage":
            return bytes(range(256)) * 4
        case "no work":
            del header["work"]
        case "strange work":
            header["work"] = [[1, "many"]]
        case "stale":
            header = {"answer": "stale", "number": header["number"]}
        case _:
            raise ValueError(do)
    return wire.encode(header, arrays)


FRAMES = ("twice", "empty", "many", "too long", "large frame", "half")


def attend(frames: Callable[[bytes], list[bytes]], done: Callable[[], bool], name: str, address: str) -> None:
    """A site of our own making on the same stream: it sends what `frames` gives, and comes back when thrown out."""
    while not done():
        channel = grpc.insecure_channel(address, options=[("grpc.max_send_message_length", -1)])
        out: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        stream = channel.stream_stream("/rookery.Federation/Join")(iter(out.get, None), metadata=(("site", name),))
        assembly = network.Assembly(lambda: 1 << 30)
        try:
            for piece in stream:
                message = assembly.add(piece)
                for frame in frames(message) if message is not None else ():
                    out.put(frame)
        except grpc.RpcError:
            time.sleep(0.1)
        finally:
            out.put(None)
            stream.cancel()
            channel.close()


def prepared(cache: str, log: str | None) -> None:
    """The settings of all processes here."""
    if log is not None:
        file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        os.dup2(file, 1)
        os.dup2(file, 2)
    jax.config.update("jax_enable_x64", True)
    jax.config.update("jax_compilation_cache_dir", cache)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)


def _site(pipe: Any, cache: str, log: str) -> None:
    """A process that joins one run after the other."""
    prepared(cache, log)
    with contextlib.suppress(EOFError):
        while True:
            order = pipe.recv()
            try:
                pipe.send(_join(**order))
            except BaseException as error:
                traceback.print_exc()
                pipe.send({"error": f"{type(error).__name__}: {error}"})


def _join(
    what: dict[str, Any],
    i: int,
    address: str,
    folder: Any,
    trick: Trick | None,
    kit: Any,
    patience: float | None,
    rules: dict[str, Any] | None,
) -> dict[str, Any]:
    brings = study_of(job(**what), i)
    if trick is not None and trick.do == "other data":
        brings = dataclasses.replace(brings, data=study_of(job(**what), 1 - i).data)
    audit = None if rules is None else Audit(folder / "audit.jsonl")
    guard = {} if rules is None else {"guard": PolicyGuard(Policy(**rules), audit)}
    responder = Responder(NAMES[i], brings, folder, **guard)
    own = Attending(responder, trick)
    if trick is not None and trick.do in FRAMES:
        attend(own.frames, lambda: responder.done, NAMES[i], address)
    else:
        keys = None if kit is None else load_kit(Path(kit), address)
        grpc_site.join(own.handle, lambda: responder.done, NAMES[i], address, keys, print, patience=patience)
    if audit is not None:
        audit.close()
    return {"compiled": own.compiled, "reason": responder.reason, "memory": own.memory}


# ------------------------------------------------------------------------------------------------------- who starts it


class Process:
    """A site's process, started when it is needed."""

    def __init__(self, folder: Path, i: int) -> None:
        self._folder, self.i = folder, i
        self.process: Any = None
        self.busy = False

    def join(
        self,
        what: dict[str, Any],
        address: str,
        folder: Path | None = None,
        trick: Trick | None = None,
        kit: Path | None = None,
        patience: float | None = None,
        rules: dict[str, Any] | None = None,
    ) -> None:
        """Have it join a run, with a policy of these rules."""
        if self.process is None or not self.process.is_alive():
            self._pipe, theirs = FORK.Pipe()
            log = self._folder / f"{NAMES[self.i]}.log"
            self.process = FORK.Process(target=_site, args=(theirs, str(self._folder / "jax"), str(log)), daemon=True)
            self.process.start()
        self.busy = True
        self._pipe.send(
            {"what": what, "i": self.i, "address": address, "folder": folder, "trick": trick, "kit": kit,
             "patience": patience, "rules": rules}
        )  # fmt: skip

    def result(self) -> dict[str, Any]:
        """What it says at the end of the run."""
        assert self._pipe.poll(SECONDS), f"{NAMES[self.i]} does not end"
        self.busy = False
        return self._pipe.recv()

    def died(self) -> None:
        """Wait until it is dead."""
        self.process.join(SECONDS)
        assert self.process.exitcode is not None

    def kill(self) -> None:
        """kill -9, if it is there."""
        if self.process is not None:
            self.process.kill()
            self.process.join(SECONDS)
            self.busy = False

    def stopped(self) -> bool:
        """Whether it is asleep."""
        return Path(f"/proc/{self.process.pid}/stat").read_text().rsplit(")", 1)[1].split()[0] == "T"

    def wake(self) -> None:
        """Go on after SIGSTOP."""
        os.kill(self.process.pid, signal.SIGCONT)


# ------------------------------------------------------------------------------------------------------ a run of theirs


@dataclasses.dataclass
class Played:
    """A run over the network, from the coordinator's side.

    Attributes:
        told: what was said of sites.
        lost: (exchange, site), counted with hello and opening.
        messages: that went out, and came.
        compiled: at the coordinator, after the first round.
    """

    state: Any = None
    told: list[str] = dataclasses.field(default_factory=list)
    lost: set[tuple[int, int]] = dataclasses.field(default_factory=set)
    links: Any = None
    session: Any = None
    carry: Any = None
    costs: list[Any] = dataclasses.field(default_factory=list)
    compiled: int = 0
    missing: list[int] = dataclasses.field(default_factory=lambda: [0, 0, 0])

    def watch(self, links: Any) -> None:
        """Note who was left out."""
        self.links = links
        for site, record in enumerate(links.records):
            if record.missing > self.missing[site]:
                self.lost.add((links.exchanges - 1, site))
                self.missing[site] = record.missing

    def says(self, *words: str) -> bool:
        """Whether something was said that has all these words."""
        return any(all(word in text for word in words) for text in self.told)


def play(
    engine: Any,
    what: Job,
    rounds: int = 3,
    played: Played | None = None,
    between: Callable[[int], None] = lambda t: None,
) -> Played:
    """Run a job, to the end."""
    played = played or Played()
    events = [0]
    listen = lambda name, seconds, **_: events.__setitem__(0, events[0] + (name == COMPILED))
    jax.monitoring.register_event_duration_secs_listener(listen)
    session: Any = engine.open(what)
    with contextlib.closing(session):
        played.session = session
        played.costs = [session.init()]
        for t in range(rounds):
            between(t)
            before = events[0]
            played.costs += session.advance(1)
            played.compiled += events[0] - before if t else 0
        played.state = jax.tree.map(np.array, session.state)
        played.carry = session.save()
        assert session.stopped is None, session.stopped
    jax.monitoring.unregister_event_duration_listener(listen)
    return played


def server(names: tuple[str, ...] = NAMES) -> network.GrpcServer:
    """A coordinator's end, at a port that is free."""
    return network.GrpcServer("127.0.0.1:0", names, None, True)


def federation(transport: Any, played: Played, deadline: float = SECONDS, patience: float | None = SECONDS) -> Any:
    """The engine."""
    tell = played.told.append
    return rk.Federation(transport=transport, deadline=deadline, patience=patience, tell=tell, watch=played.watch)


def replayed(what: Job, lost: set[tuple[int, int]], rounds: int = 3) -> Any:
    """The state after the same run within this process, where the same replies are lost."""
    from tests.engines.federation.studies import responders

    count = [0]
    engine = in_memory(responders(what))
    ask = engine.transport._ask

    def lossy(i: int, message: bytes) -> bytes:
        if (count[0], i) in lost:
            raise TimeoutError
        return ask(i, message)

    engine.transport._ask = lossy
    engine = dataclasses.replace(engine, watch=lambda links: count.__setitem__(0, links.exchanges))
    return play(engine, without_data(what), rounds).state


def join(responder: Responder, address: str) -> None:
    """Join a run without certificates, until it is over."""
    done = lambda: responder.done
    grpc_site.join(responder.handle, done, responder.name, address, None, lambda text: None, patience=SECONDS)


@contextlib.contextmanager
def in_threads(what: Job, address: str, names: tuple[str, ...]) -> Iterator[list[Responder]]:
    """Sites in threads of this process, which all join over the network, until the run is over."""
    from tests.engines.federation.studies import study

    found = [Responder(name, study(what, i)) for i, name in enumerate(names)]
    threads = [threading.Thread(target=join, args=(responder, address), daemon=True) for responder in found]
    for thread in threads:
        thread.start()
    yield found
    for thread in threads:
        thread.join(SECONDS)
        assert not thread.is_alive()


# --------------------------------------------------------------------------------------------------- sites of any speed


@functools.cache
def with_a_common_minimiser(asynchronous: Any = None) -> Job:
    """Local steps of four clients whose losses differ, and have the same minimiser, 1."""
    problem = rk.SingleLevel(lambda x, rows: rows["a"].mean() * ((x - 1) ** 2).sum() / 2)
    clients = rk.Clients(upper=[{"a": np.full(2, a)} for a in (0.7, 1.0, 1.3, 0.8)])
    start = start_values(problem, clients, np.full(3, 5.0))
    return Job(problem, clients, rk.FedAvg(step=0.3, local_steps=3), start, 4, asynchronous=asynchronous)


def paced_site(i: int, address: str, seconds: float, asynchronous: Any, cache: str, log: str) -> None:
    """A process that joins a run, and takes so many seconds for its part of a round."""
    prepared(cache, log)
    what = with_a_common_minimiser(asynchronous)
    responder = Responder(f"site-{i}", study_of(what, i))

    def handle(message: bytes) -> bytes:
        header, _ = wire.decode(message)
        if header.get("do") == "work" and header["phase"] == 1:
            time.sleep(seconds)
        return bytes(responder.handle(message))

    grpc_site.join(handle, lambda: responder.done, responder.name, address, None, print, patience=SECONDS)
    assert responder.done
    assert not responder.reason, responder.reason
