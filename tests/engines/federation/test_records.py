"""Runs that are private for each record: a site's own noise, and its account over all runs."""

import dataclasses
import functools
import json
import stat
from collections import Counter
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tests.contract.cases import claims, job, ragged
from tests.engines.federation.processes import NAMES, Played, Process, Trick, federation, play, server
from tests.engines.federation.processes import job as of_network
from tests.engines.federation.studies import in_memory, responders, study, without_data
from tests.engines.federation.test_faults import until
from tests.engines.federation.test_limits import Ask, by_hand, elsewhere, of, shifted
from tests.engines.federation.test_policy import opened as understood
from typer.testing import CliRunner

import rookery as rk
from rookery import cli
from rookery.channels.account import Account, Draws
from rookery.data.clients import Clients
from rookery.engines.checks import start_values
from rookery.engines.engine import Job
from rookery.engines.federation import policy as policies
from rookery.engines.federation import wire
from rookery.engines.federation.audit import Audit, verify
from rookery.engines.federation.entropy import Entropy
from rookery.engines.federation.in_words import in_words_for_a_site
from rookery.engines.federation.policy import Policy, PolicyGuard
from rookery.engines.federation.responder import Responder
from rookery.engines.federation.site import Sent
from rookery.engines.federation.spending import Release, Spending
from rookery.testing.runs import agree, outcome

HIDDEN = rk.private(noise=0.5, delta=1e-5, clip=1.0, unit="record")
METHODS = ("FedBiO", "LFedNest", "FedNest", "Scaffold")
SLOW = [pytest.param(name, marks=pytest.mark.slow) for name in METHODS if name != "Scaffold"]


def private(name: str, **given: Any) -> Any:
    return job(name, ragged(claims(name)[0], 3), channel=HIDDEN, **given)


@pytest.mark.parametrize("name", ["Scaffold", *SLOW])
def test_with_the_noise_seed_fixed_sites_have_the_numbers_of_a_simulation(name: str) -> None:
    what = private(name, noise_seed=5)
    agree(outcome(rk.Simulation(), what), outcome(rk.Federation(), what))


def test_without_a_noise_seed_no_two_runs_are_alike() -> None:
    """Except for the counts of samples, which say how many records are expected, not how many were drawn."""
    first, second = (outcome(rk.Federation(), private("Scaffold"), 3) for _ in range(2))
    leaves = zip(jax.tree.leaves(first.state.x), jax.tree.leaves(second.state.x), strict=True)
    assert not any(np.array_equal(a, b) for a, b in leaves)
    assert first.counts == second.counts


# ------------------------------------------------------------ a site's account

PROBLEM = rk.SingleLevel(lambda x, rows: jnp.mean(jnp.square(x - rows)))
CLIENTS = rk.Clients(upper=[np.linspace(0.0, n, 2 * n).reshape(n, 2) for n in (20, 30, 40)])
METHOD = rk.FedAvg(step=0.1, local_steps=1)  # all records, once a round
QUIET = rk.private(noise=10.0, delta=1e-5, clip=1.0, unit="record")
DELTA = 1e-5
NUMBERS = iter(range(10**6, 10**9))


def price(rounds: int, noise: float = 10.0) -> float:
    """ε of so many rounds, independently of sites."""
    return Account((Draws(rounds, noise**-2),), ()).epsilon(1.0, DELTA, 0)


def of_three(channel: Any = QUIET, method: Any = METHOD, **given: Any) -> Job:
    return Job(PROBLEM, CLIENTS, method, start_values(PROBLEM, CLIENTS, np.ones(2)), 3, 0, channel, **given)


def site(folder: Path, what: Job, i: int = 0, **rules: Any) -> Responder:
    """A site with its log, as it is after a start of its process."""
    audit = Audit(folder / "audit.jsonl")
    return Responder(f"site-{i}", study(what, i), folder, PolicyGuard(Policy(**{"delta": DELTA, **rules}), audit))


def stopped(responder: Responder) -> None:
    responder._log.close()


def with_site_0(what: Job, first: Responder) -> Any:
    """An engine in which site 0 is this one."""
    return in_memory([first, *responders(what)[1:]])


def tapped(engine: Any) -> list[tuple[int, dict[str, Any], list[Any], bytes]]:
    """What sites are asked from now on, and what they answer."""
    found: list[Any] = []
    ask = engine.transport._ask

    def asked(i: int, message: bytes) -> bytes:
        answer = bytes(ask(i, message))
        found.append((i, *wire.decode(message), answer))
        return answer

    engine.transport._ask = asked
    return found


def asked_of_site_0(what: Job, responder: Responder, rounds: int = 2) -> list[tuple[Any, Any]]:
    engine = with_site_0(what, responder)
    found = tapped(engine)
    session: Any = engine.open(without_data(what))
    session.init()
    assert len(session.advance(rounds)) == rounds
    return [(header, arrays) for i, header, arrays, _ in found if i == 0]


@functools.cache
def asked_by_three() -> dict[str, Any]:
    """The opening of a run."""
    return understood(of_three(), 0).header


def lines(folder: Path, event: str = "spent") -> list[Any]:
    found = [json.loads(line) for line in (folder / "audit.jsonl").read_text().splitlines()]
    return [line for line in found if line["event"] == event]


def answer(ask: Ask, header: dict[str, Any], arrays: list[Any]) -> tuple[Any, list[Any]]:
    return ask({**header, "number": next(NUMBERS)}, arrays)


def test_the_log_is_the_account_and_the_same_request_is_free(tmp_path: Path) -> None:
    """Also after a restart: the secret is kept, so the noise is the same, and so is every bit of the reply."""
    what = of_three()
    first = site(tmp_path, what, epsilon=9.0)
    asked = asked_of_site_0(what, first)
    assert len(lines(tmp_path)) == 2
    assert first._log.spending.epsilon(DELTA) == pytest.approx(price(2))
    opening, (work, inputs) = of(asked, "open")[0], of(asked, "work", 1)
    said, sent = answer(by_hand(first), elsewhere(work), inputs)
    assert (said["answer"], len(lines(tmp_path))) == ("value", 2)
    stopped(first)
    again = site(tmp_path, what, epsilon=9.0)
    ask = by_hand(again)
    assert answer(ask, {**opening, "done": 1}, [])[0]["answer"] == "opened"
    said, replayed = answer(ask, elsewhere(work), inputs)
    assert said["answer"] == "value"
    assert all(np.array_equal(a, b) for a, b in zip(sent, replayed, strict=True))
    assert len(lines(tmp_path)) == 2
    assert again._log.spending.epsilon(DELTA) == pytest.approx(price(2))
    stopped(again)
    assert verify(tmp_path / "audit.jsonl") is None


def test_another_point_is_refused_in_an_answered_round_and_charged_in_a_new_one(tmp_path: Path) -> None:
    what = of_three()
    responder = site(tmp_path, what, epsilon=9.0)
    asked = asked_of_site_0(what, responder)
    (work, inputs), ask = of(asked, "work", 1), by_hand(responder)
    said, _ = answer(ask, elsewhere(work), shifted(inputs, 1.0))
    assert "more often than in the plan" in said["why"]
    assert len(lines(tmp_path)) == 2
    said, first = answer(ask, elsewhere(work, round=2), shifted(inputs, 1.0))
    assert (said["answer"], len(lines(tmp_path))) == ("value", 3)
    said, second = answer(ask, elsewhere(work, round=3), shifted(inputs, 1.0 + 1e-12))  # all but the same point
    assert (said["answer"], len(lines(tmp_path))) == ("value", 4)
    assert np.abs(first[0] - second[0]).max() > 1e-6  # the noise is fresh
    stopped(responder)


def test_a_charge_precedes_the_reply_and_a_crash_in_between_costs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    what = of_three()
    responder = site(tmp_path, what, epsilon=9.0)
    asked = asked_of_site_0(what, responder, 1)
    (work, inputs), ask = of(asked, "work", 1), by_hand(responder)
    with monkeypatch.context() as patch:
        patch.setattr(type(responder._site), "_compute", lambda *_: (_ for _ in ()).throw(RuntimeError("crash")))
        assert "it failed" in answer(ask, elsewhere(work, round=1), shifted(inputs, 2.0))[0]["why"]
    assert len(lines(tmp_path)) == 2
    said, _ = answer(ask, elsewhere(work, round=1), shifted(inputs, 1.0))  # not answered yet: charged once more
    assert (said["answer"], len(lines(tmp_path))) == ("value", 3)
    stopped(responder)


def test_a_spent_budget_ends_the_answers_in_all_runs(tmp_path: Path) -> None:
    """Three releases fit. A second run begins with the same request as the first, which is free, and has one more."""
    what, most = of_three(), (price(3) + price(4)) / 2
    run = lambda rounds: outcome(with_site_0(what, own), without_data(what), rounds, responders=None)
    own = site(tmp_path, what, epsilon=most)
    asked_of_site_0(what, own, 2)
    stopped(own)
    own = site(tmp_path, what, epsilon=most)
    why = rf"site-0 refuses: its privacy budget is spent: ε = {price(3):.3g} of .* would make it {price(4):.3g}"
    with pytest.raises(RuntimeError, match=why):
        run(3)
    assert own._log.spending.epsilon(DELTA) == pytest.approx(price(3))
    assert [len(r.spending._releases) for r in own._log.runs.values()] == [1, 1]
    assert "budget is spent" in lines(tmp_path, "refused")[-1]["why"]
    stopped(own)


def test_with_faults_the_run_goes_on_without_the_site(tmp_path: Path) -> None:
    what = of_three(faults=rk.Faults(minimum=2))
    own = site(tmp_path, what, epsilon=(price(2) + price(3)) / 2, show_epsilon=True)
    engine = with_site_0(what, own)
    session: Any = engine.open(without_data(what))
    session.init()
    assert len(session.advance(4)) == 4
    links = session.coordinator.links
    assert (links.records[0].state, links.records[0].epsilon) == ("refused", pytest.approx(price(1)))  # ten seconds old
    assert [record.epsilon for record in links.records[1:]] == [None, None]
    assert "budget is spent" in links.records[0].why
    assert "budget is spent" in session.coordinator.blamed["site-0"]
    session.close()
    stopped(own)


def test_two_levels_are_accounted_apart_unless_the_data_change() -> None:
    lower, upper, both = (Release(level, 0.01, 1.0) for level in ("lower", "upper", "both"))
    spending = Spending()
    spending.add("a", {lower: 3, upper: 1, both: 1})
    assert spending.epsilon(DELTA) == pytest.approx(price(4))
    assert spending.epsilon(DELTA, "b") == pytest.approx(price(5))  # a lower record may be an upper one now
    spending.add("b", {upper: 2})
    assert spending.counts() == (Counter({(0.01, 1.0): 5}), Counter({(0.01, 1.0): 7}))


@pytest.mark.slow
@pytest.mark.xdist_group("processes")
def test_a_budget_of_a_real_process_outlives_kill_9(sites: list[Process], tmp_path: Path) -> None:
    """ε = 1 pays for three rounds. The second is computed, and the site is killed before it replies: that is spent."""
    noisy = rk.private(noise=6.5, delta=DELTA, unit="record")
    assert price(3, 6.5) < 1 < price(4, 6.5)
    what = {"name": "FedAvg", "local_steps": 1, "batch_size": None, "channel": noisy, "faults": rk.Faults(minimum=2)}
    folders, rules = [tmp_path / name for name in NAMES], {"epsilon": 1.0, "delta": DELTA, "show_epsilon": True}
    transport, played = server(), Played()
    join = lambda site, trick=None: site.join(
        what, transport.address, folders[site.i], trick, rules=rules if site.i == 1 else None
    )
    for site in sites:
        join(site, Trick("killed after", at=0) if site.i == 1 else None)
    spent: list[int] = []

    def between(t: int) -> None:
        spent.append(len(lines(folders[1])))
        if t == 2:
            sites[1].died()
            join(sites[1])
            until(lambda: transport._connections.get(1), "its return")

    play(federation(transport, played), without_data(of_network(**what)), 5, played, between)
    assert spent == [0, 1, 2, 3, 3]
    why = f"berta refuses: its privacy budget is spent: ε = {price(3, 6.5):.3g} of 1 at δ = 1e-05"
    assert played.says(why)
    assert played.links.records[1].epsilon == pytest.approx(price(3, 6.5))
    assert {site for _, site in played.lost} == {1}
    for site in sites:
        site.result()
    transport, played = server(), Played()  # another run: the first request is the same, and free
    for site in sites:
        join(site)
    play(federation(transport, played), without_data(of_network(**what)), 3, played)
    for site in sites:
        site.result()
    assert played.says(why)
    assert len(lines(folders[1])) == 3
    transport, played = server(), Played()
    what["faults"] = None  # the run can't go on, and does not wait for what will not come
    for site in sites:
        join(site)
    with pytest.raises(RuntimeError, match=why):
        play(federation(transport, played, patience=None), without_data(of_network(**what)), 3, played)
    for site in sites:
        assert why in site.result()["reason"]
    assert len(lines(folders[1])) == 3
    assert verify(folders[1] / "audit.jsonl") is None
    assert all("budget is spent" in line["why"] for line in lines(folders[1], "refused"))


# ------------------------------------------------------------ runs that are refused


def test_runs_that_do_not_hide_records_are_refused_before_data_are_touched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    held: list[int] = []
    monkeypatch.setattr(Clients, "at_site", lambda own, data: held.append(1))
    measure = lambda client, x, y, memory: {"loss": client.mean(lambda rows: jnp.mean(x - rows), client.upper())}
    cases = [
        (of_three(None), {}, "must hide single records"),
        (of_three(rk.private(noise=10.0, delta=1e-5)), {}, "must hide single records"),
        (of_three(measure=measure), {}, "FedAvg.evaluation uses its records without noise"),
        (of_three(), {"delta": 0.2}, r"delta must be below 1/n for its n = 20 records; got 0\.2"),
    ]
    for what, rules, why in cases:
        run = understood(what, 0)
        with pytest.raises(policies.RefusedError, match=why):
            Policy(**{"epsilon": 1.0, "delta": DELTA, **rules}).check(run)
    assert held == []


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"levels": {"tuple": []}}, None),  # it calibrates the channel itself
        ({"levels": 5}, "must have a positive noise multiplier"),
        ({"levels": {"tuple": [{"tuple": ["lower", 10.0]}]}}, "must have a positive noise multiplier"),
        ({"levels": {"tuple": [{"tuple": ["lower", 10.0]}, {"tuple": ["upper", 0.0]}]}}, "positive noise"),
        ({"levels": {"tuple": [{"tuple": ["lower", 10.0]}, {"tuple": ["upper", -1.0]}]}}, "positive noise"),
        ({"levels": {"tuple": [{"tuple": ["lower", 10.0]}, {"tuple": ["upper", 1e-60]}]}}, "positive noise"),
        ({"levels": {"tuple": [{"tuple": ["lower", 10.0]}, {"tuple": ["upper", 1e60]}]}}, "positive noise"),
        ({"levels": {"tuple": [{"tuple": ["lower", 10.0]}, {"tuple": ["upper", "x"]}]}}, "positive noise"),
    ],
)
def test_a_forged_channel(change: dict[str, Any], why: str | None) -> None:
    header = asked_by_three()
    channel = {**header["channel"], "fields": {**header["channel"]["fields"], **change}}
    responder = Responder("site-0", study(of_three(), 0))
    if why is None:
        assert responder.explain({**header, "channel": channel}).prices.noise == {"lower": 10.0, "upper": 10.0}
        return
    said = wire.decode(responder.handle(wire.encode({**header, "channel": channel, "number": 1}, [])))[0]
    assert said["answer"] == "refused"
    assert why in said["why"]


def test_a_coordinator_that_claims_less_noise_or_more_records_pays_for_it(tmp_path: Path) -> None:
    """The levels count that the site adds, and a request has no place for others; sizes are the site's own."""
    what = of_three()
    header = understood(what, 0).header
    level = lambda noise: {"tuple": [{"tuple": [name, noise]} for name in ("lower", "upper")]}
    fields = header["channel"]["fields"]
    channel = {**header["channel"], "fields": {**fields, "levels": level(0.5)}}
    responder = site(tmp_path, what, epsilon=1.0)
    asked = asked_of_site_0(what, responder, 1)
    work, inputs = of(asked, "work", 1)
    ask, run = by_hand(responder), "ab" * 16
    assert answer(ask, {**header, "run": run, "channel": channel}, [])[0]["answer"] == "opened"
    said, sent = answer(ask, elsewhere(work, run=run), inputs)
    assert ("budget is spent" in said["why"], sent) == (True, [])
    more = {**header, "run": "cd" * 16, "levels": {"upper": [400, 400, None]}}
    assert "its number of samples (upper), 20; got 400 to 400" in answer(ask, more, [])[0]["why"]
    seeded = elsewhere(work, round=1)
    seeded["maps"] = [[*each, True] for each in seeded["maps"]]
    answer(ask, {**of(asked, "open")[0], "done": 1}, [])
    assert "must have the fields of the protocol" in answer(ask, seeded, [*inputs, np.zeros(2, np.uint32)])[0]["why"]
    wide = [np.stack([a, a]) if a.shape == (2,) and a.dtype == np.float64 else a for a in inputs]
    assert (
        "must be given arrays of the plan's shapes and types" in answer(ask, elsewhere(work, round=1), wide)[0]["why"]
    )
    stopped(responder)


@pytest.mark.slow
def test_noise_is_never_used_for_two_functions(tmp_path: Path) -> None:
    """The same request in runs with another bound, another number of the client, more noise, another loss or other data
    has another noise. Otherwise the difference of two replies would have none."""
    other = rk.SingleLevel(lambda x, rows: jnp.mean(jnp.square(2 * x - rows)))
    doubled = rk.Clients(upper=[2 * np.asarray(CLIENTS.client_data(i)["upper"][0]) for i in range(3)])
    runs = [
        of_three(),
        of_three(rk.private(noise=10.0, delta=1e-5, clip=2.0, unit="record")),
        of_three(rk.private(noise=11.0, delta=1e-5, clip=1.0, unit="record")),
        dataclasses.replace(of_three(), problem=other),
        dataclasses.replace(of_three(), clients=doubled),
    ]
    for what in runs:
        responder = site(tmp_path, what, epsilon=99.0)
        asked_of_site_0(what, responder, 1)
        stopped(responder)
    responder = site(tmp_path, what, epsilon=99.0)
    own = responders(what)
    engine = in_memory([own[0], Responder("site-1", study(what, 0), tmp_path, responder._guard), own[2]])
    session: Any = engine.open(without_data(what))  # the same data as client 1
    session.init()
    session.advance(1)
    stopped(responder)
    noises = [noise for line in lines(tmp_path) for noise in line["noises"]]
    assert len(set(noises)) == len(noises) == len(runs) + 1


def test_the_chance_is_that_of_the_sites_own_number_of_records() -> None:
    """The smallest site has 20 records, the third 40; four are expected in a minibatch."""
    what = of_three(method=rk.FedAvg(step=0.1, local_steps=3, batch_size=4))
    run = understood(what, 2)
    assert run.prices.plan(run.plans[1]) == Counter({Release("both", 0.01, 0.1): 3})
    many = understood(of_three(method=rk.FedAvg(step=0.1, local_steps=3, batch_size=30)), 2)
    assert many.prices.plan(many.plans[1]) == Counter({Release("both", 0.01, 0.75): 3})


def test_a_record_whose_loss_is_not_finite_is_not_told(caplog: pytest.LogCaptureFixture) -> None:
    """Nobody learns that from a refusal, nor from a reply."""
    rows = np.array(CLIENTS.client_data(0)["upper"][0])
    rows[0] = 1e200  # its loss overflows
    clients = rk.Clients(upper=[rows, *(np.asarray(CLIENTS.client_data(i)["upper"][0]) for i in (1, 2))])
    loose = Job(PROBLEM, clients, METHOD, start_values(PROBLEM, CLIENTS, np.ones(2)), 3, 0)
    with pytest.raises(ValueError, match="site-0 refuses: a loss or a metric"):
        in_memory(responders(loose)).open(without_data(loose))
    hidden = dataclasses.replace(loose, channel=QUIET)
    caplog.clear()
    found = outcome(in_memory(own := responders(hidden)), without_data(hidden), 1, responders=own)
    assert np.all(np.isfinite(found.state.x))
    assert "finite" in caplog.text  # in the site's own log


# ------------------------------------------------------------ policies, the secret, and words


def test_policies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "policy.toml"
    path.write_text("epsilon = 3.0\ndelta = 1e-5\nshow_epsilon = true\n")
    assert Policy.read(path) == Policy(epsilon=3.0, delta=1e-5, show_epsilon=True)
    wrong = {
        "epsilon = 3.0": "must be given together; delta is missing",
        "delta = 1e-5": "must be given together; epsilon is missing",
        "epsilon = 0\ndelta = 1e-5": "epsilon must be a positive number; got 0",
        "epsilon = inf\ndelta = 1e-5": "epsilon must be a positive number; got inf",
        "epsilon = nan\ndelta = 1e-5": "epsilon must be a positive number; got nan",
        "epsilon = 1\ndelta = 1": "delta must be a number between 0 and 1, such as 1e-5; got 1",
        "epsilon = 1\ndelta = '1e-5'": "delta must be a number between 0 and 1",
        "show_epsilon = true": "show_epsilon must be false without epsilon",
        "epsilon = 1\ndelta = 1e-5\nshow_epsilon = 1": "show_epsilon must be true or false; got 1",
    }
    for text, why in wrong.items():
        path.write_text(text)
        with pytest.raises(ValueError, match=why):
            Policy.read(path)
    rules = Policy(epsilon=3.0, delta=1e-5)
    with pytest.raises(ValueError, match="needs an audit log"):
        PolicyGuard(rules)
    monkeypatch.setattr(policies.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"needs dp-accounting, which computes ε\. Install rookery\[privacy\]"):
        PolicyGuard(rules, Audit())


def test_the_secret(tmp_path: Path) -> None:
    first = Entropy(tmp_path)
    path = tmp_path / "secret"
    assert (stat.S_IMODE(path.stat().st_mode), len(path.read_bytes())) == (0o600, 32)
    again = Entropy(tmp_path)
    assert np.array_equal(first.key("a"), again.key("a"))
    assert not np.array_equal(first.key("a"), first.key("b"))
    assert first.mark("a") == again.mark("a") != Entropy().mark("a")
    path.chmod(0o640)
    with pytest.raises(ValueError, match="must be readable by its owner only"):
        Entropy(tmp_path)
    path.chmod(0o600)
    path.write_bytes(b"short")
    with pytest.raises(ValueError, match="must have 32 bytes; got 5"):
        Entropy(tmp_path)
    path.unlink()
    path.mkdir(mode=0o700)
    with pytest.raises(ValueError, match=r"can't be read or written \(Is a directory\)"):
        Entropy(tmp_path)


def test_after_the_loss_of_the_secret_the_same_request_is_charged_again(tmp_path: Path) -> None:
    what = of_three()
    first = site(tmp_path, what, epsilon=9.0)
    asked = asked_of_site_0(what, first)
    opening, (work, inputs) = of(asked, "open")[0], of(asked, "work", 1)
    _, sent = answer(by_hand(first), elsewhere(work), inputs)
    stopped(first)
    secret = (tmp_path / "secret").read_bytes()
    (tmp_path / "secret").unlink()
    again = site(tmp_path, what, epsilon=9.0)
    ask = by_hand(again)
    assert answer(ask, {**opening, "done": 1}, [])[0]["answer"] == "opened"
    said, other = answer(ask, elsewhere(work), inputs)
    assert said["answer"] == "value"
    assert not np.array_equal(sent[0], other[0])
    assert len(lines(tmp_path)) == 3
    assert again._log.spending.epsilon(DELTA) == pytest.approx(price(3))
    stopped(again)
    text = (tmp_path / "audit.jsonl").read_bytes()
    assert secret not in text
    assert secret.hex().encode() not in text


def test_a_run_in_words_says_what_it_costs() -> None:
    run = understood(of_three(), 1)
    text = " ".join(in_words_for_a_site(run, Policy(epsilon=price(7) + 1e-6, delta=DELTA).budget).split())
    assert "adds noise (10 for the lower data, 10 for the upper data)" in text
    assert f"A single round costs ε = {price(1):.3g} at δ = 1e-05" in text
    assert "the rest allows 7 rounds." in text
    assert "Private for each record" in in_words_for_a_site(run)
    spent = Spending()
    spent.add("", {Release("both", 0.01, 1.0): 5})
    text = " ".join(in_words_for_a_site(run, Policy(epsilon=price(7) + 1e-6, delta=DELTA).budget, spent).split())
    assert f"Spent so far is ε = {price(5):.3g} of" in text
    assert "the rest allows 2 rounds." in text


def test_the_audit_shows_what_is_spent(tmp_path: Path) -> None:
    audit = Audit(tmp_path / "audit.jsonl")
    for name, rounds, delta in (("ab" * 16, 2, DELTA), ("cd" * 16, 1, 1e-4), ("ef" * 16, 0, None)):
        audit.opened(name, "", "", 3, 3, delta)
        for t in range(rounds):
            audit.spent("data", [f"{name} {t}"], {Release("both", 0.01, 1.0): 1})
        audit.replied((1, 0), 0, "x", "mean", True, "", Sent(8, ""))
    audit.close()
    (tmp_path / "policy.toml").write_text("epsilon = 9.0\ndelta = 1e-5\n")
    invoke = lambda *words: CliRunner().invoke(cli.app, ["audit", str(tmp_path), *words])
    result = invoke("--policy", str(tmp_path / "policy.toml"))
    assert result.exit_code == 0, result.output
    said = " ".join(result.output.split())
    assert f"ε = {price(3):.3g} of 9 at δ = 1e-05 is spent. It does not cover 1 run that was not private." in said
    told = json.loads(invoke("--json").output)
    assert told["privacy"]["epsilon"] == pytest.approx(price(3))
    spent = [pytest.approx(price(2)), pytest.approx(price(1)), None]
    assert [run.get("epsilon") for run in told["runs"].values()] == spent
