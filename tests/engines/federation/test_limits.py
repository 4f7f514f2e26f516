"""A site's limits against a coordinator that asks for more than it may: re-opened runs, chosen points, restarts."""

import contextlib
import dataclasses
import itertools
import json
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from tests.engines.federation.processes import FORK, SECONDS, play, prepared
from tests.engines.federation.processes import job as of_three
from tests.engines.federation.studies import in_memory, responders, study, without_data

import rookery as rk
from rookery.engines.checks import start_values
from rookery.engines.engine import Job
from rookery.engines.federation import wire
from rookery.engines.federation.audit import Audit, verify
from rookery.engines.federation.policy import Policy, PolicyGuard
from rookery.engines.federation.responder import Responder
from rookery.engines.federation.site import RefusedError
from rookery.engines.federation.transports import grpc as network
from rookery.engines.federation.transports import grpc_site
from rookery.testing.runs import close

PROBLEM = rk.SingleLevel(lambda x, rows: jnp.mean(jnp.square(x - rows)))
ROWS = np.arange(6.0).reshape(3, 2)
NUMBERS = iter(range(10**6, 10**12))  # of requests, maps and values that no honest coordinator has used


def measure(client: Any, x: Any, y: Any, memory: Any) -> Any:
    return {"loss": client.mean(lambda rows: jnp.mean(jnp.square(x - rows)), client.upper())}


def job(faults: Any = None) -> Job:
    """A federation of one site."""
    method, clients = rk.FedAvg(step=0.1, local_steps=1), rk.Clients(upper=[ROWS])
    start = start_values(PROBLEM, clients, np.ones(2))
    return Job(PROBLEM, clients, method, start, 1, 0, None, faults, measure=measure)


def site(folder: Path, faults: Any = None, **limits: Any) -> Responder:
    """The site, with its log: as it is after a start of its process."""
    return Responder(
        "anna", study(job(faults), 0), folder, PolicyGuard(Policy(**limits), Audit(folder / "audit.jsonl"))
    )


def honest(transport: Any, faults: Any = None, rounds: int = 3) -> list[tuple[Any, Any]]:
    """What a coordinator asks in a run of three rounds, with evaluations before and after."""
    asked: list[tuple[Any, Any]] = []
    send = transport.send

    def tapped(i: int, message: Any) -> None:
        asked.append(wire.decode(message))
        send(i, message)

    transport.send = tapped
    engine = rk.Federation(transport=transport, patience=SECONDS, deadline=SECONDS, tell=lambda text: None)
    session: Any = engine.open(without_data(job(faults)))
    session.init()
    session.measure()
    assert len(session.advance(rounds)) == rounds
    session.measure()
    transport.send = send
    return asked


def of(asked: list[tuple[Any, Any]], do: str, phase: int = -1) -> tuple[dict[str, Any], list[Any]]:
    """The last request of that kind."""
    found = [(h, a) for h, a in asked if h["do"] == do and (phase < 0 or h["phase"] == phase)]
    return found[-1]


def shifted(arrays: list[Any], by: float) -> list[Any]:
    """The same inputs, but for the first, the point at which the client computes."""
    at = next(i for i, a in enumerate(arrays) if a.shape == (2,) and a.dtype == np.float64)
    return [a + by if i == at else a for i, a in enumerate(arrays)]


def elsewhere(header: dict[str, Any], **new: Any) -> dict[str, Any]:
    """The same request under other numbers."""
    far = 1000 * next(NUMBERS)
    move = lambda ref: ["m", ref[1] + far, ref[2]] if isinstance(ref, list) and ref[0] == "m" else ref
    maps = [
        [n + far, call, [v + far if isinstance(v, int) else v for v in sent], key, list(map(move, own))]
        for n, call, sent, key, own in header["maps"]
    ]
    values = [v + far for v in header["values"]]
    return {**header, "maps": maps, "values": values, "reply": list(map(move, header["reply"])), **new}


Ask = Callable[[dict[str, Any], list[Any]], tuple[dict[str, Any], list[Any]]]


def attack(ask: Ask, asked: list[tuple[Any, Any]]) -> dict[str, list[str]]:
    """What a malicious coordinator gets after that run: the answers by attack."""
    opening, _ = of(asked, "open")
    work, inputs = of(asked, "work", 1)
    evaluation, point = of(asked, "work", 2)

    def answer(header: dict[str, Any], arrays: list[Any]) -> str:
        said, sent = ask({**header, "number": next(NUMBERS)}, arrays)
        assert said["answer"] == "value" or not sent
        return said["answer"] if said["answer"] != "refused" else f"refused: {said['why']}"

    found: dict[str, list[str]] = {"extra key": [], "opened again": [], "earlier": [], "evaluations": [], "same": []}
    for k in range(20):
        found["extra key"].append(answer({**opening, "extra": k}, []))
        if k % 10 == 1:
            found["extra key"].append(answer({**opening, "jax": f"0.0.{k}"}, []))
        answer({**opening, "done": -1}, [])
        found["earlier"].append(answer(elsewhere(work, round=0), shifted(inputs, 1.0 + k)))
        found["opened again"].append(answer(elsewhere(work), shifted(inputs, 1.0 + k)))
    answer(opening, [])
    for k in range(40):
        found["evaluations"].append(answer(elsewhere(evaluation, round=1000 + k), shifted(point, 1.0 + k)))
        found["evaluations"].append(answer(elsewhere(evaluation), shifted(point, 1.0 + k)))
    for _ in range(3):
        found["same"].append(answer(elsewhere(work), inputs))
    return found


def by_hand(responder: Responder) -> Ask:
    return lambda header, arrays: wire.decode(responder.handle(wire.encode(header, arrays)))


def check_attack(found: dict[str, list[str]], folder: Path) -> None:
    for name in ("extra key", "opened again", "earlier", "evaluations"):
        assert all(text.startswith("refused: ") or text == "stale" for text in found[name]), (name, found[name])
    assert "must have known fields only; got 'extra'" in found["extra key"][0]
    assert "more often than in the plan" in found["opened again"][0]
    assert any("it does not go back" in text for text in found["earlier"])
    assert "has seen only 3" in found["evaluations"][0]
    assert found["same"] == ["value"] * 3  # a reply that got lost
    log = [json.loads(line) for line in (folder / "audit.jsonl").read_text().splitlines()]
    replies = {line["sha256"] for line in log if line["event"] == "reply" and line["phase"] == "round"}
    assert len(replies) == 3
    assert verify(folder / "audit.jsonl") is None


def test_a_reopened_run_and_chosen_evaluations_get_nothing_more(tmp_path: Path) -> None:
    responder = site(tmp_path, rounds=3, evaluations=2)
    asked = honest(in_memory([responder]).transport)
    check_attack(attack(by_hand(responder), asked), tmp_path)


def test_without_a_folder_a_reopened_run_gets_nothing_more_either() -> None:
    responder = Responder("anna", study(job(), 0))
    asked = honest(in_memory([responder]).transport)
    found = attack(by_hand(responder), asked)
    del found["same"]
    assert all(text.startswith("refused: ") or text == "stale" for texts in found.values() for text in texts)


def test_no_row_is_in_a_message_or_in_the_log(tmp_path: Path) -> None:
    responder, said = site(tmp_path), []
    transport = in_memory([responder]).transport
    ask = transport._ask
    transport._ask = lambda i, message: said.append(bytes(ask(i, message))) or said[-1]
    honest(transport)
    assert len(said) >= 2 + 3 + 2  # hello, open, rounds, evaluations
    for text in (*said, (tmp_path / "audit.jsonl").read_bytes()):
        assert not any(row.tobytes() in text or str(row.tolist()).encode() in text for row in ROWS)


def test_a_restart_forgets_no_answer(tmp_path: Path) -> None:
    """The process is started again, with the log that it has: the attack gets as little, and the counts go on."""
    responder = site(tmp_path, rounds=4, evaluations=2)
    asked = honest(in_memory([responder]).transport)
    del responder
    again = site(tmp_path, rounds=4, evaluations=2)
    opening, _ = of(asked, "open")
    ask = by_hand(again)
    assert ask({**opening, "done": 3}, [])[0]["answer"] == "opened"
    check_attack(attack(ask, asked), tmp_path)
    counts = again._log.counts
    assert (counts.rounds, counts.evaluations, counts.exchanges, counts.bytes_up) == (3, 2, 5 + 3, 3 * 16 + 2 * 8 + 48)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["Ditto", "FedNest"])
def test_an_honest_run_in_which_every_reply_is_lost_with_its_site(name: str, tmp_path: Path) -> None:
    """The site is started again after each of its replies, and once more after the reply to the same request with all
    that it needs: it answers again, and counts the round once."""
    what = of_three(name)
    rules = lambda i: PolicyGuard(Policy(rounds=3, exchanges=1000), Audit(tmp_path / str(i) / "audit.jsonl"))
    own = responders(what, tmp_path, rules)
    lost: set[Any] = set()
    whole: set[Any] = set()  # those that were sent with everything that they depend on

    def ask(i: int, message: bytes) -> bytes:
        header, _ = wire.decode(message)
        answer = own[i].handle(message)
        if i != 1 or header["do"] != "work":
            return answer
        said, _ = wire.decode(answer)
        request = (header["phase"], header["round"], header["call"], str(header["reply"]))
        if said["answer"] == "resync":
            whole.add(request)
        if said["answer"] == "value" and (request, request in whole) not in lost:
            lost.add((request, request in whole))
            own[i] = Responder("site-1", study(what, 1), tmp_path / "1", rules(1))  # kill -9, and started again
            return own[i].handle(message)
        return answer

    engine = in_memory(own)
    engine.transport._ask = ask
    there = play(engine, without_data(what), 2)
    close(play(rk.Simulation(), what, 2).state, there.state)
    counts = [responder._log.counts for responder in own]
    assert len({count.rounds for count in counts}) == 1
    assert counts[1].rounds in (2, 3)
    finishes = sum(call == -1 for (_, _, call, _), _ in lost)
    assert counts[1].exchanges == counts[0].exchanges + len(lost) - finishes
    assert len(lost) >= 4
    assert any(again for _, again in lost)


def test_where_clients_may_miss_rounds_evaluations_are_counted(tmp_path: Path) -> None:
    """The site can't know how far the run is: each evaluation is of a later round, and counts."""
    faults = rk.Faults(minimum=1)
    responder = site(tmp_path, faults, rounds=3)  # and so at most four evaluations
    asked = honest(in_memory([responder]).transport, faults)
    evaluation, point = of(asked, "work", 2)
    ask, found = by_hand(responder), []
    for k in range(40):
        said, _ = ask(elsewhere(evaluation, round=1000 + k // 2), shifted(point, float(k)))
        found.append(said.get("why", said["answer"]))
    assert found.count("value") == 2
    assert "more often than in the plan" in found[1]
    assert found[-1] == "its policy's limit of 4 evaluations is reached. Its owner can raise it."


def test_a_limit_holds_over_runs_and_the_start_counts(tmp_path: Path) -> None:
    """A coordinator that only ever begins: each start at another point is a round."""
    method = rk.FastDRO(step=0.1, size=0.5, batch_size=2)
    what = dataclasses.replace(job(), algorithm=method, measure=None)
    audit = Audit(tmp_path / "audit.jsonl")
    responder = Responder("anna", study(what, 0), tmp_path, PolicyGuard(Policy(rounds=3), audit))
    engine = in_memory([responder])
    for _ in range(3):
        session: Any = engine.open(without_data(what))
        session.init()
    session = engine.open(without_data(what))
    with pytest.raises(RuntimeError, match="limit of 3 rounds is reached"):
        session.init()
    assert audit.counts.rounds == 3


def test_rounds_bound_nothing_where_a_round_has_any_number_of_exchanges(tmp_path: Path) -> None:
    from tests.engines.federation.test_dataflow import Winding

    clients = rk.Clients(upper=[ROWS, ROWS], center=ROWS, center_client=1)
    what = dataclasses.replace(job(), clients=clients, algorithm=Winding(), cohort=2, measure=None)

    def sites(**limits: int) -> list[Responder]:
        return [
            Responder(f"site-{i}", study(what, i), guard=PolicyGuard(Policy(**limits), Audit(tmp_path / f"{i}.jsonl")))
            for i in range(2)
        ]

    with pytest.raises(ValueError, match=r"limits rounds and not exchanges, and Winding\.round has an"):
        in_memory(sites(rounds=3)).open(without_data(what))
    in_memory(sites(rounds=3, exchanges=20)).open(without_data(what))


def test_a_run_deletes_and_replaces_only_what_it_made_itself(tmp_path: Path) -> None:
    """Whatever store a coordinator names: when it opens a run, moves to another name, or ends a run."""
    victim, other = "ab" * 16, "cd" * 16
    runs = map("{:032}".format, itertools.count())

    def start(**given: Any) -> Any:
        """Begin a run at a site that has just started; then ask(**change) sends the opening with these changes."""
        what = dataclasses.replace(job(), algorithm=rk.Ditto(**given), measure=None)
        responder = Responder("anna", study(what, 0), tmp_path, PolicyGuard(Policy(), Audit(tmp_path / "audit.jsonl")))
        engine, ask, asked = in_memory([responder]), by_hand(responder), []
        engine.transport._ask = lambda i, message: asked.append(wire.decode(message)) or responder.handle(message)
        session: Any = engine.open(without_data(what))
        session.init()
        opening, _ = of(asked, "open")
        return lambda **change: ask({**opening, **change}, [])[0]

    def refuses(said: dict[str, Any], why: str) -> bool:
        """Whether an answer says why, if it says anything, and so does the last line of the site's log."""
        return why in said.get("why", why) and why in (tmp_path / "audit.jsonl").read_text().splitlines()[-1]

    ask = start()
    (first,) = tmp_path.glob("*.memory")
    assert "why" not in ask(do="save", what="open", name=victim)  # as a coordinator with checkpoints does
    assert ask(do="save", what="restore", round=-1)["rounds"] == [0]
    (path,) = tmp_path.glob("*.memory")  # what the run itself had made is gone
    assert path.stem == victim != first.stem
    before = path.read_bytes()

    made, plan = "is another run's, and is kept", "is another run's. Give the name of this run"
    assert refuses(ask(run=next(runs), store=victim), made)  # a run that begins
    for remembers in (False, True):  # one that goes on from there, as one that is resumed does
        run = next(runs)
        assert ask(run=run, store=victim, done=0, remembers=remembers)["answer"] == "opened"
        assert refuses(ask(run=run, do="save", what="open", name=other), made)
        assert ask(run=run, do="finish")["answer"] == "value"
        assert refuses({}, made)
        assert path.read_bytes() == before

    ask = start(local_steps=3)  # another plan
    assert refuses(ask(do="save", what="open", name=victim), plan)
    assert "8 to 64 hexadecimal digits" in ask(do="save", what="open", name="../x")["why"]
    for done in (-1, 0):
        assert refuses(ask(run=next(runs), store=victim, done=done), plan)
    assert path.read_bytes() == before


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "client": ({"client": 99}, "'client' must be at most 0, as there are 1 clients; got 99"),
    "a negative client": ({"client": -1}, "'client' must be an integer of at least 0; got -1"),
    "a client in words": ({"client": "0"}, "'client' must be an integer"),
    "cohort": ({"cohort": 2}, "'cohort' must be at most 1"),
    "clients": ({"clients": 1.0}, "'clients' must be an integer of at least 1; got 1.0"),
    "a bool": ({"clients": True}, "'clients' must be an integer of at least 1; got true"),
    "center": ({"center_client": 1}, "'center_client' must be at most 0"),
    "run": ({"run": "../../etc"}, "'run' must be 8 to 64 hexadecimal digits"),
    "store": ({"store": "a/b"}, "'store' must be 8 to 64 hexadecimal digits"),
    "levels": ({"levels": {"upper": [3, 3]}}, "'levels' must be sizes by level"),
    "sizes": ({"sizes": {"upper": "3"}}, "'sizes' must be numbers of samples"),
    "done": ({"done": 1.5}, "'done' must be an integer of at least -1"),
    "flag": ({"replace": 0}, "'replace' must be true or false; got 0"),
    "jax": ({"jax": {}}, "'jax' must be a text"),
    "signatures": ({"signatures": [1]}, "'signatures' must be texts"),
    "method": ({"algorithm": [1]}, "'algorithm' must be a description"),
    "center's data": ({"center": {"sample": [["", [-1], "float64"]], "size": 1}}, "'center' must be null, or"),
    "no conditions": ({"conditions": None}, "it runs under other conditions"),
    "another word": ({"\x1b[2J": 1}, r"must have known fields only; got '\\x1b[2J'"),
}


def test_an_opening_is_checked_word_by_word(tmp_path: Path) -> None:
    responder = site(tmp_path)
    asked = honest(in_memory([responder]).transport, rounds=1)
    opening, _ = of(asked, "open")
    ask = by_hand(responder)
    for name, (change, why) in WRONG.items():
        said, _ = ask({**opening, **change}, [])
        assert said["answer"] == "refused", name
        assert why in said["why"], (name, said)
    for word in opening:
        if word not in ("do", "number", "arrays", "conditions"):
            said, _ = ask({key: value for key, value in opening.items() if key != word}, [])
            assert said["answer"] == "refused", word
    assert ask(opening, [])[0]["answer"] == "opened"
    for change in ({"measures": False}, {"jax": "0.0"}):
        assert "opened with a different message" in ask({**opening, **change}, [])[0]["why"]


NASTY = "\x1b[2J\x1b[31mAll is well.\nThis site's policy allows it.\u202e"


def nasty(value: Any) -> Any:
    """A value of the same structure, with these words in the place of every text."""
    if isinstance(value, dict):
        return {NASTY + name: nasty(entry) for name, entry in value.items()}
    if isinstance(value, list):
        return [nasty(entry) for entry in value]
    return NASTY if isinstance(value, str) else value


def test_no_escape_sequence_reaches_the_log_or_the_terminal(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of nothing that a coordinator says: the run's name, versions, fingerprints, fields, reasons, what fails."""
    from rookery.cli.site import Reading
    from rookery.engines.federation.in_words import in_words_for_a_site

    responder = site(tmp_path)
    asked = honest(in_memory([responder]).transport, rounds=1)
    opening, _ = of(asked, "open")
    work, inputs = of(asked, "work", 1)
    ask = by_hand(responder)
    described = json.loads(json.dumps(opening["algorithm"]))
    described["fields"]["step"] = NASTY
    renamed = {**opening, "run": "ab" * 16, "fingerprint": NASTY, "jax": NASTY}
    said = [ask(renamed, [])[0]["why"]]
    assert "its plan differs" in said[0]
    for change in (
        {"run": "ab" * 16, "algorithm": described}, {"algorithm": {"class": NASTY, "fields": {}}}, {NASTY: NASTY},
        {"faults": {"class": "Faults", "fields": {NASTY: 1}}}, {"conditions": {**opening["conditions"], NASTY: NASTY}},
    ):  # fmt: skip
        said.append(ask({**opening, **change}, [])[0].get("why", ""))
    save = {"do": "save", "number": 1, "run": opening["run"], "what": "open", "name": opening["store"]}
    hello = {"do": "hello", "number": 1}
    for message, arrays in ((opening, []), (work, inputs), (save, []), (hello, [])):  # every word of every message
        ask(opening, [])
        for word, value in message.items():
            run = {"run": f"{next(NUMBERS):032}"} if message is opening else {}
            for lie in (NASTY, *([nasty(value)] if isinstance(value, dict | list) else [])):
                answer, _ = ask({**message, **run, word: lie}, arrays)
                said += [text for text in answer.values() if isinstance(text, str)]
    responder._opening, responder._site = {}, None
    with pytest.raises(RefusedError) as raised:
        responder.explain(renamed)
    said.append(str(raised.value))
    opened = dataclasses.replace(responder.explain(opening), header={**opening, "run": NASTY})
    opened = dataclasses.replace(opened, algorithm=dataclasses.replace(opened.algorithm, local_steps=NASTY))
    with pytest.raises(Exception, match="its owner is reading the plan"):
        Reading(Policy(plans=("ab",)))(opened)
    ask({"do": "finish", "run": responder._run, "why": NASTY}, [])
    shown = caplog.text + capsys.readouterr().out + in_words_for_a_site(opened) + responder.reason + "".join(said)
    shown += (tmp_path / "audit.jsonl").read_text()
    assert "\x1b" not in shown, shown.partition("\x1b")[0][-500:]
    assert "\u202e" not in shown
    assert "\nThis site's policy allows it." not in shown
    assert "\\x1b[2J" in shown


def test_no_escape_sequence_reaches_the_coordinator(tmp_path: Path) -> None:
    """Of nothing that a site says: whichever answer has it, and in whichever of its words."""
    lies: tuple[Callable[[dict[str, Any]], dict[str, Any]], ...] = (
        lambda said: {word: value if word in ("answer", "number") else nasty(value) for word, value in said.items()},
        lambda said: {**said, "answer": NASTY},
        lambda said: {**said, "answer": "refused", "why": NASTY},
        lambda said: {**said, "why": NASTY, "study": [NASTY], "rounds": [NASTY], "finite": NASTY, NASTY: NASTY},
    )
    responder, shown, about = site(tmp_path), list[str](), [""]
    engine = in_memory([responder])
    engine = dataclasses.replace(engine, tell=shown.append)

    def tried(lie: Callable[..., Any], do: str, step: Callable[[], Any]) -> Any:
        """What the step gives, if an answer to these requests is a lie."""

        def ask(i: int, message: Any) -> bytes:
            said, arrays = wire.decode(responder.handle(message))
            about.append(wire.decode(message)[0]["do"])
            return wire.encode(lie(said) if about[-1] == do else said, arrays)

        engine.transport._ask = ask
        try:
            return step()
        except (RuntimeError, ValueError) as error:
            shown.append(str(error))

    session: Any = tried(lies[0], "", lambda: engine.open(without_data(job())))
    session.init()
    coordinator = session.coordinator
    for lie in lies:
        for do in ("hello", "open"):
            tried(lie, do, lambda: engine.open(without_data(job())))
        tried(lie, "work", session.measure)
        tried(lie, "save", lambda: coordinator.ask_to_save({"what": "open", "name": "ab" * 16}))
        shown += [coordinator.links.records[0].why, *coordinator.blamed.values()]
        coordinator.links.records[0].state = "connected"
    tried(lies[0], "finish", session.close)
    assert {"hello", "open", "work", "save", "finish"} <= set(about)
    assert any("\\x1b[2J" in text for text in shown)
    assert all(text.isprintable() and len(text) < 2000 for text in shown), shown


# ------------------------------------------------------------ with a process of its own, over gRPC


def _take_part(address: str, folder: Path, scratch: Path, limits: dict[str, int]) -> None:
    prepared(str(scratch / "jax"), str(scratch / "site.log"))
    responder = site(folder, **limits)
    grpc_site.join(responder.handle, lambda: responder.done, "anna", address, None, print, patience=SECONDS)


@contextlib.contextmanager
def process(address: str, folder: Path, scratch: Path, **limits: int) -> Iterator[Any]:
    """A site's process; its cache and what it says are in `scratch`."""
    own = FORK.Process(target=_take_part, args=(address, folder, scratch, limits), daemon=True)
    own.start()
    yield own
    own.kill()
    own.join(SECONDS)


class Listening:
    """A coordinator's end that stays open, and what it gets from the one site that joins."""

    def __init__(self) -> None:
        self.transport = network.GrpcServer("127.0.0.1:0", ("anna",), None, True)
        self._close = self.transport.close
        self.transport.close = lambda: None  # type: ignore[method-assign]

    def ask(self, header: dict[str, Any], arrays: list[Any]) -> tuple[dict[str, Any], list[Any]]:
        self.transport.send(0, wire.encode(header, arrays))
        return wire.decode(self.until("reply").message)

    def until(self, kind: str) -> Any:
        while True:
            event = self.transport.receive(SECONDS)
            assert event is not None, f"no {kind}"
            if event.kind == kind:
                return event

    def close(self) -> None:
        self._close()


@pytest.fixture
def listening() -> Iterator[Listening]:
    own = Listening()
    yield own
    own.close()


@pytest.mark.slow
@pytest.mark.xdist_group("processes")
def test_a_process_that_is_killed_and_started_again_answers_no_more(tmp_path: Path, listening: Listening) -> None:
    """The attack with a real process and over gRPC: before and after kill -9."""
    folder, address = tmp_path / "anna", listening.transport.address
    with process(address, folder, tmp_path, rounds=3, evaluations=2):
        asked = honest(listening.transport)
        check_attack(attack(listening.ask, asked), folder)
    listening.until("gone")
    with process(address, folder, tmp_path, rounds=3, evaluations=2):
        listening.until("here")
        assert listening.ask({**of(asked, "open")[0], "done": 3}, [])[0]["answer"] == "opened"
        check_attack(attack(listening.ask, asked), folder)


@pytest.mark.slow
@pytest.mark.xdist_group("processes")
def test_two_processes_in_one_folder_and_then_a_full_disk(small: Path, tmp_path: Path, listening: Listening) -> None:
    """The second process ends, also while the first sleeps; the disk is filled, and emptied: the log stays whole."""
    folder, address = small / "anna", listening.transport.address
    with process(address, folder, tmp_path, rounds=9) as first:
        asked = honest(listening.transport, rounds=1)
        os.kill(first.pid, signal.SIGSTOP)
        with process(address, folder, tmp_path, rounds=9) as second:
            second.join(SECONDS)
            assert second.exitcode == 1
        os.kill(first.pid, signal.SIGCONT)
        assert f"{folder} is in use by process {first.pid}" in (tmp_path / "site.log").read_text()
        work, inputs = of(asked, "work", 1)
        ask = lambda t: listening.ask(elsewhere(work, number=next(NUMBERS), round=t), shifted(inputs, float(t)))
        assert ask(1)[0]["answer"] == "value"
        with (small / "rest").open("wb", buffering=0) as file, contextlib.suppress(OSError):
            while True:
                file.write(b"\0" * 512)
        said, t = {"answer": "value"}, 1
        while said["answer"] == "value" and t < 9:  # the last block of the log has some room yet
            t += 1
            said, sent = ask(t)
        assert "it can't write to its folder (No space left on device)" in said["why"]
        assert sent == []
        assert verify(folder / "audit.jsonl") is None
        (small / "rest").unlink()
        assert ask(t)[0]["answer"] == "value"
    log = [json.loads(line) for line in (folder / "audit.jsonl").read_text().splitlines()]
    rounds = [line["round"] for line in log if line["event"] == "reply" and line["phase"] == "round"]
    assert rounds == list(range(t + 1))
    assert verify(folder / "audit.jsonl") is None
