"""Secure sums in a federation: the numbers of a simulation, dropouts, lost and forged messages, policies and words."""

import dataclasses
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats
from tests.contract.cases import claims, ragged
from tests.contract.cases import job as of_contract
from tests.engines.federation.processes import Played, Process, Trick, federation, in_threads, play, server
from tests.engines.federation.processes import job as of_network
from tests.engines.federation.studies import in_memory, responders, study, without_data
from tests.engines.federation.test_faults import meanwhile, until
from tests.engines.federation.test_policy import opened

import rookery as rk
from rookery.engines.checks import start_values
from rookery.engines.engine import Job
from rookery.engines.federation import certificates, wire
from rookery.engines.federation.audit import Audit, verify
from rookery.engines.federation.identity import Identity
from rookery.engines.federation.in_words import in_words_for_a_site
from rookery.engines.federation.kits import load_kit
from rookery.engines.federation.masking import Masking, signed_text
from rookery.engines.federation.policy import Policy
from rookery.engines.federation.provision import make_kits, renew, revoke
from rookery.engines.federation.responder import Responder
from rookery.engines.federation.site import RefusedError
from rookery.testing.runs import agree, close, outcome

SECURE = rk.chain(rk.clip(1.0), rk.secure_sum())
PROBLEM = rk.SingleLevel(lambda x, rows: jnp.mean(jnp.sum((x - rows) ** 2, -1)))
SIZES, NUMBERS = (1, 3, 40, 200), 600
DATA = [np.full((n, NUMBERS), n / 64, np.float32) for n in SIZES]
METHOD = rk.FedAvg(step=0.25, local_steps=1)


def job(channel: Any = SECURE, faults: Any = None, **given: Any) -> Job:
    clients = rk.Clients(upper=DATA, weights=(1.0, 2.0, 1.0, 4.0))
    start = start_values(PROBLEM, clients, np.zeros(NUMBERS, np.float32))
    return Job(PROBLEM, clients, METHOD, start, len(SIZES), 0, channel, faults, **given)


Told = tuple[int, dict[str, Any], bytes]  # a site, a request to it, and its answer


def tapped(
    engine: Any, change: Callable[[int, dict[str, Any], Any], Any] = lambda i, header, message: message
) -> list[Told]:
    """What sites are asked from now on, and answer. `change` may lose a request (None) or alter it."""
    found: list[Told] = []
    ask = engine.transport._ask

    def asked(i: int, message: Any) -> Any:
        header, _ = wire.decode(message)
        changed = change(i, header, message)
        if changed is None:
            raise TimeoutError
        answer = ask(i, changed)
        found.append((i, header, bytes(answer)))
        return answer

    engine.transport._ask = asked
    return found


def inside(
    change: Callable[[int, dict[str, Any], Any], Any] = lambda i, header, message: message,
) -> tuple[Any, list[Told]]:
    """An engine with sites in this process, which share a trace, and what they are asked."""
    found: list[Told] = []

    def transport(sites: Any) -> Any:
        def asked(i: int, message: Any) -> Any:
            header, _ = wire.decode(message)
            if change(i, header, message) is None:
                raise TimeoutError
            answer = sites[i].handle(message)
            found.append((i, header, bytes(answer)))
            return answer

        return asked

    return rk.Federation(transport=transport), found


def advanced(engine: Any, what: Job, rounds: int = 2) -> Any:
    session = engine.open(without_data(what) if hasattr(engine.transport, "receive") else what)
    session.init()
    session.advance(rounds)
    return session


def here(what: Job, rounds: int = 2) -> Any:
    session: Any = rk.Simulation().open(what)
    session.init()
    session.advance(rounds)
    return np.asarray(session.state.x)


def test_the_same_numbers_as_in_simulation_and_nothing_but_masks_leaves_a_site() -> None:
    """All arrays that carry values are uniform, and different from each other; no reply equals the value of a site."""
    engine = in_memory(responders(job()))
    found = tapped(engine)
    session = advanced(engine, job())
    np.testing.assert_array_equal(session.state.x, here(job()))
    replies = [
        wire.decode(answer)[1][0] for _, header, answer in found if header.get("do") == "work" and header["reply"]
    ]
    assert len(replies) == 2 * len(SIZES)
    assert {a.dtype for a in replies} == {np.dtype(np.uint32)}
    values = np.concatenate(replies)
    assert stats.chisquare(np.bincount(values.view(np.uint8), minlength=256)).pvalue > 1e-6
    asked = [header["do"] for i, header, _ in found if i == 0 and header["do"] not in ("hello", "open")]
    assert asked == ["keys", "shares", "work", "unmask"] * 2  # one agreement a round


@pytest.mark.slow
@pytest.mark.parametrize("name", ["FedSVRG", "Scaffold", "FedNest", "SimFBO", "FedBiO"])
def test_methods_of_the_library(name: str) -> None:
    """Those with memory, inner loops and bookkeeping."""
    what = of_contract(name, ragged(claims(name)[0]), channel=SECURE)
    engine = in_memory(own := responders(what))
    agree(outcome(rk.Simulation(), what), outcome(engine, without_data(what), responders=own), 1e-6)


class _State(NamedTuple):
    x: Any
    y: Any


@dataclasses.dataclass(frozen=True)
class Looping:
    """A method with an exchange in a loop, and another one."""

    solves = (rk.SingleLevel,)

    def init(self, fed: Any, x: Any, y: Any, key: Any) -> Any:
        return _State(x, y)

    def round(self, fed: Any, state: Any, key: Any) -> Any:
        move = lambda i, x: fed.mean(fed.map(lambda c, k: x + 2.0**-4, key), "inner", around=x)
        x = fed.loop(3, move, state.x)
        return _State(x + fed.mean(fed.map(lambda c, k: x * 0.5, key), "outer"), state.y)


def test_one_agreement_on_keys_serves_all_exchanges_of_a_round() -> None:
    """Every exchange, also of a loop, has its own slot."""
    what = dataclasses.replace(job(), algorithm=Looping())
    engine, found = inside()
    np.testing.assert_array_equal(advanced(engine, what).state.x, here(what))
    for t in range(2):
        used = [h["masks"] for i, h, _ in found if i == 0 and "masks" in h and (h["phase"], h["round"]) == (1, t)]
        assert len({mask["agreement"] for mask in used}) == 1
        assert [mask["slot"] for mask in used] == [0, 1, 2, 3]


LENIENT = rk.Faults(minimum=1)


def expected(lost: int, rounds: int = 1) -> np.ndarray:
    """FedAvg without a client, in NumPy, up to the fixed point."""
    weights = np.array([1.0, 2.0, 1.0, 4.0])
    weights[lost] = 0
    moves = [d.mean(0) / 2 * min(1, 1 / np.linalg.norm(d.mean(0) / 2)) for d in DATA]
    return np.average(moves, axis=0, weights=weights)


@pytest.mark.parametrize("stage", ["keys", "shares", "work", "unmask"])
def test_a_site_that_drops_out_in_the_middle_of_an_exchange_does_not_spoil_the_sum(stage: str) -> None:
    what = job(faults=LENIENT)
    engine, found = inside(lambda i, h, m: None if i == 3 and h["do"] == stage and h.get("round", 0) == 0 else m)
    session = advanced(engine, what, 1)
    assert session.stopped is None
    at_hand = here(job(), 1) if stage == "unmask" else expected(3)
    np.testing.assert_allclose(session.state.x, at_hand, rtol=1e-6)
    assert [i for i, h, _ in found if h["do"] == "unmask"] == [0, 1, 2]


@pytest.mark.parametrize("stage", ["keys", "shares", "work", "unmask"])
def test_below_the_threshold_the_round_fails_and_reveals_nothing(stage: str) -> None:
    what = job(faults=LENIENT)
    engine, found = inside(lambda i, h, m: None if i >= 2 and h["do"] == stage else m)
    session = advanced(engine, what, 1)
    assert session.stopped is not None
    assert "got 0 replies" in session.stopped.reason
    assert "the secure sum 'x' needs 3" in session.stopped.reason
    assert not np.any(session.state.x)
    answers = [wire.decode(answer) for _, h, answer in found if h["do"] == "unmask"]
    assert not answers if stage != "unmask" else len(answers) == 2  # two of three shares reveal nothing


def test_without_faults_the_run_says_who_is_missing() -> None:
    engine, _ = inside(lambda i, h, m: None if i == 1 and h["do"] == "work" else m)
    with pytest.raises(RuntimeError, match="client 1 did not answer"):
        advanced(engine, job())


def test_a_site_that_was_restarted_has_no_keys_and_a_run_that_needs_it_agrees_anew(tmp_path: Path) -> None:
    """Between shares and reply: without faults all agree on keys again, and the numbers are the same."""
    what, again = job(), []

    def restart(i: int, header: dict[str, Any], message: Any) -> Any:
        if i == 1 and header["do"] == "work" and header["phase"] == 1 and not again:
            again.append(header)
            own[1] = Responder("site-1", study(what, 1))
        return message

    engine = in_memory(own := responders(what))
    found = tapped(engine, restart)
    session = advanced(engine, what, 2)
    np.testing.assert_array_equal(session.state.x, here(what))
    assert [h["do"] for i, h, _ in found if i == 0 and h.get("round") == 0].count("keys") == 2
    lenient = job(faults=LENIENT)  # with faults it is left out until the next round
    again.clear()
    engine = in_memory(own := responders(lenient))
    tapped(engine, restart)
    session = advanced(engine, lenient, 1)
    np.testing.assert_allclose(session.state.x, expected(1), rtol=1e-6)
    assert "no keys for this round's sums" in session.coordinator.blamed["site-1"] or session.coordinator.blamed


def test_a_repeated_request_has_the_same_answer() -> None:
    """Every message twice, as on a connection that is lost after the site has answered."""
    engine = in_memory(responders(job()))
    ask, answers = engine.transport._ask, []

    def twice(i: int, message: Any) -> Any:
        answer = bytes(ask(i, message))
        answers.append(answer == bytes(ask(i, message)))
        return answer

    engine.transport._ask = twice
    np.testing.assert_array_equal(advanced(engine, job()).state.x, here(job()))
    assert all(answers)


def test_a_reply_is_not_sent_without_masks() -> None:
    """A coordinator that leaves out the masks, names too few sites, or uses a slot again is refused."""
    what = job()
    engine = in_memory(own := responders(what))
    found: list[Any] = []
    ask = engine.transport._ask
    engine.transport._ask = lambda i, m: (found.append((i, *wire.decode(m))), ask(i, m))[1]
    advanced(engine, what, 1)
    header, arrays = next((h, a) for i, h, a in found if i == 0 and "masks" in h)
    bare = {name: value for name, value in header.items() if name != "masks"}
    changed = lambda **new: {**header, "masks": {**header["masks"], **new}}
    for forged, why in (
        (bare, "must be asked for as such"),
        (changed(among=[0, 1]), "at least 3 sites"),
        (changed(among=[0, 1, 2]), "hide one reply"),
        (changed(slot=7), "slot of an agreement"),
        (changed(among=[0, 0, 1, 2]), "in order, each once"),
    ):
        answer, sent = wire.decode(own[0].handle(wire.encode(forged, arrays)))
        assert answer["answer"] == "refused", why
        assert why in answer["why"]
        assert not sent
    answer, sent = wire.decode(own[0].handle(wire.encode(changed(agreement=1), arrays)))
    assert (answer.get("forgotten"), sent) == (True, [])
    unmask, sealed = next((h, a) for i, h, a in found if i == 0 and h["do"] == "unmask")
    answer, _ = wire.decode(own[0].handle(wire.encode({**unmask, "added": [0, 1, 2]}, sealed)))
    assert "the same sites as before" in answer["why"]


def test_over_runs_a_reply_is_added_up_with_the_same_sites_only(tmp_path: Path) -> None:
    """The same run again with another site missing would show that site's reply; also after a restart, from the log."""
    what = job(faults=LENIENT)

    class Logged:
        def __init__(self, i: int) -> None:
            self.audit = Audit(tmp_path / str(i) / "audit.jsonl")

        def __call__(self, run: Any) -> None: ...

    def run(lost: int) -> Any:
        guards = [Logged(i) for i in range(4)]
        engine = in_memory(responders(what, tmp_path, guards.__getitem__))
        tapped(engine, lambda i, h, m: None if i == lost and h["do"] == "work" else m)
        session = advanced(engine, what, 1)
        for one in guards:
            one.audit.close()
        return session

    for lost, stops in ((3, False), (3, False), (2, True)):
        session = run(lost)
        assert (session.stopped is not None) == stops
    assert "site-0 refuses: it has helped to add up this very reply with other sites" in session.stopped.reason
    assert verify(tmp_path / "0" / "audit.jsonl") is None
    assert (tmp_path / "0" / "audit.jsonl").read_text().count('"unmasked"') == 1


# ------------------------------------------------------------ certificates


@pytest.fixture(scope="module")
def kits(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("kits")
    names = [f"site-{i}" for i in range(4)]
    make_kits(folder / "kits", "localhost", names, 30)
    make_kits(folder / "others", "localhost", names, 30)
    return folder


class Announced:
    """Three sites with certificates that have announced their keys, and the coordinator's request that follows."""

    def __init__(self, kits: Path, t: int = 0, number: int = 7) -> None:
        self.identities = [Identity(load_kit(kits / "kits" / f"site-{i}")) for i in range(3)]
        self.sites = [Masking("run", i, identity) for i, identity in enumerate(self.identities)]
        asked = {"agreement": number, "slots": 1, "phase": 1, "round": t}
        found = [site.announce(asked) for site in self.sites]
        peers = [{"client": i, "name": f"site-{i}", **fields} for i, (fields, _) in enumerate(found)]
        self.request: Any = {"agreement": number, "threshold": 2, "peers": peers}
        self.parts = [parts[0] for _, parts in found]

    def share(self, of_site_1: Any = None, parts: Any = None) -> Any:
        """What site 0 answers if the coordinator passes on something else of site 1."""
        zero, one, two = self.request["peers"]
        request = {**self.request, "peers": [zero, {**one, **(of_site_1 or {})}, two]}
        return self.sites[0].share(request, [self.parts[0], self.parts[1] if parts is None else parts, self.parts[2]])


def test_with_certificates_the_numbers_are_the_same(kits: Path) -> None:
    own = lambda i: Identity(load_kit(kits / "kits" / f"site-{i}"))
    sites = [Responder(f"site-{i}", study(job(), i), identity=own(i)) for i in range(4)]
    np.testing.assert_array_equal(advanced(in_memory(sites), job()).state.x, here(job()))


def test_a_coordinator_can_not_put_other_keys_in_the_place_of_a_sites(kits: Path) -> None:
    foreign, coordinator = (Identity(load_kit(kits / path)) for path in ("others/site-1", "kits/coordinator"))
    announced = Announced(kits)
    second, genuine = announced.identities[2], announced.parts[1]
    changed = genuine.copy()
    changed[1, 0] ^= 1
    text = lambda client: signed_text("run 1 0 7", client, changed)
    forgeries: list[tuple[dict[str, Any], Any, str]] = [
        ({}, changed, "signed with its certificate"),
        ({"signature": "zz"}, genuine, "signed with its certificate"),
        ({"signature": None}, genuine, "signed with its certificate"),
        ({"cert": foreign.cert, "signature": foreign.sign(text(1))}, changed, "issued by this federation's CA"),
        ({"cert": second.cert, "signature": second.sign(text(1))}, changed, "another participant's"),
        ({"cert": "nothing"}, genuine, "issued by this federation's CA"),
        (
            {"cert": coordinator.cert, "name": "coordinator", "signature": coordinator.sign(text(1))},
            changed,
            "another participant's",
        ),
        ({"cert": second.cert, "name": "site-2", "signature": second.sign(text(1))}, changed, "once"),
    ]
    for fields, parts, why in forgeries:
        with pytest.raises(RefusedError, match=why):
            announced.share(fields, parts)
    assert announced.share()[0].shape[:2] == (2, 1)


@pytest.mark.parametrize("other", [{"t": 1}, {"number": 8}], ids=str)
def test_keys_of_another_round_are_refused(kits: Path, other: dict[str, int]) -> None:
    """A replay of what a site has signed before."""
    now, before = Announced(kits), Announced(kits, **other)
    with pytest.raises(RefusedError, match="site-1 must be signed"):
        now.share(before.request["peers"][1], before.parts[1])


def test_a_certificate_that_has_expired_is_refused(kits: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kit = load_kit(kits / "kits" / "site-1")
    content, later = b"content", certificates.datetime.now(certificates.UTC) + certificates.timedelta(days=40)
    identity = Identity(kit)
    signature = identity.sign(content)
    identity.check("site-1", identity.cert, signature, content)
    with pytest.raises(ValueError, match="signed with its certificate"):
        identity.check("site-1", identity.cert, signature, b"other content")

    class Later(certificates.datetime):
        @classmethod
        def now(cls, zone: Any = None) -> Any:
            return later

    monkeypatch.setattr(certificates, "datetime", Later)
    with pytest.raises(ValueError, match="be valid now"):
        identity.check("site-1", identity.cert, signature, content)


def test_a_certificate_that_was_revoked_is_refused_and_a_renewed_one_is_used(tmp_path: Path) -> None:
    """Once the list is in the site's folder, where its connection puts it."""
    make_kits(tmp_path, "localhost", ["site-0", "site-1"], 30)
    own, other = (Identity(load_kit(tmp_path / f"site-{i}")) for i in range(2))
    before, signature = other.cert, other.sign(b"content")
    own.check("site-1", before, signature, b"content")
    renew(tmp_path, ["site-1"])
    assert other.cert == (tmp_path / "site-1" / "cert.pem").read_text()
    own.check("site-1", other.cert, other.sign(b"content"), b"content")
    revoke(tmp_path, "site-1")
    shutil.copy(tmp_path / "coordinator" / "revoked.pem", tmp_path / "site-0" / "revoked.pem")
    with pytest.raises(ValueError, match="must be in force; it was revoked"):
        own.check("site-1", before, signature, b"content")


# ------------------------------------------------------------ policies, words, other transports


def test_a_policy_can_demand_secure_sums() -> None:
    wanted = Policy(secure_sum=True)
    wanted.check(opened(job()))
    with pytest.raises(RefusedError, match=r"the coordinator would see the replies to 'x' of FedAvg.round"):
        wanted.check(opened(job(rk.clip(1.0))))
    with pytest.raises(RefusedError, match="the coordinator sees evaluations"):
        wanted.check(opened(job(measure=lambda client, x, y, memory: {"loss": jnp.float32(0)})))
    with pytest.raises(ValueError, match="secure_sum must be true or false; got 1"):
        Policy(secure_sum=1)  # type: ignore[arg-type]
    Policy(clip=1.0, aggregated=True).check(opened(job()))
    with pytest.raises(RefusedError, match=r"clipped to 0\.5"):
        Policy(clip=0.5).check(opened(job()))


def test_words_for_the_owner_of_a_site() -> None:
    text = " ".join(in_words_for_a_site(opened(job())).split())
    assert "the coordinator never sees your reply, only the sum of those of at least 3 sites" in text
    assert "clipped here: scaled down, if need be, to a norm of 1. Then it is rounded to integers and hidden" in text
    assert "never sees your reply" not in in_words_for_a_site(opened(job(rk.clip(1.0))))


def test_with_noise_for_records() -> None:
    clients = rk.Clients(upper=[d[:, :2] for d in DATA[1:]])
    run = lambda engine, then: rk.solve(
        PROBLEM, clients, METHOD, np.zeros(2, np.float32), 2, engine=engine, noise_seed=5,
        channel=rk.private(noise=0.5, delta=1e-5, clip=1.0, unit="record", then=then),
    )  # fmt: skip
    hidden, clipped = run(rk.Simulation(), SECURE), run(rk.Simulation(), rk.clip(1.0))
    np.testing.assert_allclose(run(rk.Federation(), SECURE).x, hidden.x, rtol=1e-6)
    np.testing.assert_allclose(clipped.x, hidden.x, rtol=1e-6)
    assert hidden.history["epsilon"].iloc[-1] == clipped.history["epsilon"].iloc[-1] > 0


def test_what_follows_the_noise_of_records_is_a_channel() -> None:
    for wrong in ({"unit": "client", "then": SECURE}, {"unit": "record", "then": 3}):
        with pytest.raises(ValueError, match="then must be a channel"):
            rk.private(noise=0.5, delta=1e-5, **wrong)


def test_over_flare_it_is_refused() -> None:
    class Calls:
        names, limit, rejoins, secure_sums = ("a", "b", "c", "d"), 0, False, False

        def send(self, site: int, message: bytes) -> None: ...
        def receive(self, seconds: float) -> None: ...
        def dismiss(self, site: int, why: str) -> None: ...
        def close(self, why: str = "") -> None: ...

    with pytest.raises(ValueError, match="NVIDIA FLARE do not"):
        rk.Federation(transport=Calls()).open(without_data(job()))


def test_without_cryptography_it_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    import importlib.util

    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"needs cryptography. Run pip install 'rookery\[federation\]'"):
        rk.Federation().open(job())


def test_a_described_channel_is_the_same_at_the_site() -> None:
    from rookery.engines.federation import description

    for channel in (SECURE, rk.private(noise=1.0, delta=1e-5, unit="record", then=SECURE)):
        assert description.build(description.describe(channel), description.known()) == channel
    assert dataclasses.is_dataclass(SECURE.secure)
    assert jax.tree.leaves(SECURE.init(opened(job()).plans[1].exchanges["x"])) == []


# ------------------------------------------------------------ with real processes over gRPC

OVER_GRPC: dict[str, Any] = {"name": "FedSVRG", "channel": SECURE}


@pytest.mark.slow
@pytest.mark.xdist_group("processes")
@pytest.mark.parametrize(("kind", "at"), [("keys", 1), ("shares", 1), ("work", 0), ("work", 1), ("unmask", 3)])
def test_a_process_that_is_killed_in_the_middle_of_an_exchange(kind: str, at: int, sites: list[Process]) -> None:
    """FedSVRG has two exchanges a round. The sum is that of the others, with certificates; then it is away."""
    what = OVER_GRPC | {"faults": rk.Faults(minimum=2)}
    transport, played = server(), Played()
    for site in sites:
        site.join(what, transport.address, None, Trick("killed before", (1, 1), at, kind) if site.i == 1 else None)
    play(federation(transport, played), without_data(of_network(**what)), 3, played)
    for site in (sites[0], sites[2]):
        assert site.result()["reason"] == ""
    sites[1].died()
    assert {site for _, site in played.lost} == {1}
    close(played.state, in_memory_without(what, kind, at))


def in_memory_without(what: dict[str, Any], kind: str, at: int) -> Any:
    """The state after the same run in this process, in which site 1 is gone from that request on."""
    engine, gone = in_memory(responders(of_network(**what))), [at]

    def lose(i: int, header: dict[str, Any], message: Any) -> Any:
        due = i == 1 and header["do"] == kind and (kind != "work" or (header["phase"], header["round"]) == (1, 1))
        gone[0] -= due
        return None if i == 1 and gone[0] < 0 else message

    tapped(engine, lose)
    return play(engine, without_data(of_network(**what)), 3).state


@pytest.mark.slow
@pytest.mark.xdist_group("processes")
def test_without_faults_all_agree_on_keys_again_once_a_process_that_was_killed_is_back(sites: list[Process]) -> None:
    transport, played = server(), Played()
    for site in sites:
        site.join(OVER_GRPC, transport.address, None, Trick("killed before") if site.i == 1 else None)

    def restart() -> None:
        until(lambda: played.says("The run pauses", "berta"), "a pause")
        sites[1].died()
        sites[1].join(OVER_GRPC, transport.address)

    with meanwhile(restart):
        play(federation(transport, played), without_data(of_network(**OVER_GRPC)), played=played)
    for site in sites:
        assert site.result()["reason"] == ""
    close(played.state, play(rk.Simulation(), of_network(**OVER_GRPC)).state, 1e-6)


@pytest.mark.slow
@pytest.mark.xdist_group("processes")
def test_an_exchange_of_a_megabyte_takes_at_most_three_times_as_long() -> None:
    """Over gRPC, with five sites in threads of this process; the median of many rounds, one way and the other."""
    data = [np.ones((2, 1), np.float32)] * 5
    clients, seconds = rk.Clients(upper=data), {}
    start = start_values(PROBLEM, clients, np.zeros(1 << 18, np.float32))
    names = tuple(f"site-{i}" for i in range(5))
    for name, channel in (("plain", rk.clip(1.0)), ("secure", SECURE)):
        what, times = Job(PROBLEM, clients, METHOD, start, 5, 0, channel), list[float]()
        transport = server(names)
        with in_threads(what, transport.address, names):
            session: Any = federation(transport, Played(missing=[0] * 5)).open(without_data(what))
            session.init()
            for _ in range(15):
                begin = time.perf_counter()
                session.advance(1)
                times.append(time.perf_counter() - begin)
            session.close()
        seconds[name] = float(np.median(times[3:]))
    print(seconds, seconds["secure"] / seconds["plain"])
    assert seconds["secure"] <= 3 * seconds["plain"], seconds
