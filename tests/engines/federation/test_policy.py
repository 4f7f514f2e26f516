"""A site's say: what its policy refuses, before data are touched, within limits, and in words."""

import dataclasses
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tests.engines.federation.studies import in_memory, like, responders, without_data

import rookery as rk
from rookery.channels.privacy import Clip, Gaussian
from rookery.data.clients import Clients
from rookery.engines import engine
from rookery.engines.checks import start_values
from rookery.engines.engine import Job
from rookery.engines.federation import wire
from rookery.engines.federation.audit import Audit, verify
from rookery.engines.federation.in_words import in_words_for_a_site
from rookery.engines.federation.opening import fingerprint
from rookery.engines.federation.policy import Policy, PolicyGuard
from rookery.engines.federation.responder import Opened
from rookery.engines.federation.site import RefusedError
from rookery.language.channel import Chain
from rookery.run.evaluation import over_clients

TOUCHED: list[Any] = []


def loss(x: Any, batch: Any) -> Any:
    if not isinstance(batch, jax.core.Tracer):
        TOUCHED.append(batch)
    return jnp.mean(jnp.square(x - batch))


PROBLEM = rk.SingleLevel(loss)
CLIENTS = rk.Clients(upper=[np.linspace(0.0, n, 2 * n).reshape(n, 2) for n in (2, 3, 4)])
HIDDEN = rk.chain(rk.clip(0.5), rk.gaussian(1.2))


def own_mean(client: Any, x: Any, y: Any) -> Any:
    return {"distance": client.mean(lambda rows: jnp.mean(jnp.square(x - rows)), client.upper())}


def job(algorithm: Any, channel: Any = None, measure: Any = None, **given: Any) -> Job:
    start = start_values(PROBLEM, CLIENTS, np.ones(2))
    return Job(PROBLEM, CLIENTS, algorithm, start, 3, 0, channel, measure=measure, **given)


def solve(algorithm: Any, guard: Any, rounds: int = 2, **given: Any) -> Any:
    """`rk.solve` with sites of these guards, guard(i) each."""
    measure = given.get("evaluate_client")
    seen = None if measure is None else lambda client, x, y, memory: measure(client, x, y)
    own = responders(job(algorithm, given.get("channel"), seen), guard=guard)
    return rk.solve(PROBLEM, like(CLIENTS), algorithm, np.ones(2), rounds, engine=in_memory(own), **given)


class Understood(Exception):
    """What a site understands, before it has agreed."""


def opened(what: Job, client: int = 1) -> Any:
    """The run as a site understands it."""
    own = responders(what)

    def ask(i: int, message: bytes) -> bytes:
        header, _ = wire.decode(message)
        if (header["do"], i) == ("open", client):
            raise Understood(own[i].explain(header))
        return own[i].handle(message) if header["do"] == "hello" else b""

    engine = in_memory(own)
    engine.transport._ask = ask
    with pytest.raises(Understood) as caught:
        engine.open(dataclasses.replace(what, clients=like(what.clients)))
    return caught.value.args[0]


FAST = rk.FastDRO(step=0.1, size=0.5, batch_size=2)


def test_a_gather_is_refused_before_data_are_touched(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Site 1 refuses FastDRO's losses of single samples; the coordinator says which site, which exchange, and why."""
    held: list[int] = []
    monkeypatch.setattr(Clients, "at_site", lambda own, data, was=Clients.at_site: held.append(1) or was(own, data))
    audit = Audit(tmp_path / "audit.jsonl")
    rules = lambda i: PolicyGuard(Policy(aggregated=i == 1), audit if i == 1 else None)
    TOUCHED.clear()
    with pytest.raises(
        ValueError, match=r"site-1 refuses: its policy wants every exchange aggregated, and 'losses' of"
    ):
        solve(FAST, rules)
    assert len(held) == 2  # the others have agreed, and looked at their data
    before = len(TOUCHED)
    own = responders(job(FAST), guard=lambda i: PolicyGuard(Policy(aggregated=True)))
    held.clear()
    with pytest.raises(ValueError, match="site-0 refuses"):
        rk.solve(PROBLEM, like(CLIENTS), FAST, np.ones(2), 1, engine=in_memory(own))
    assert (held, len(TOUCHED)) == ([], before)
    audit.close()
    assert "'losses' of FastDRO.round" in (tmp_path / "audit.jsonl").read_text()
    assert verify(tmp_path / "audit.jsonl") is None


@pytest.fixture(scope="module")
def fast() -> Any:
    return opened(job(FAST, HIDDEN))


def test_every_rule(fast: Any) -> None:
    alike = lambda **new: dataclasses.replace(fast, **new)
    own = lambda *members: alike(channel=Chain(members))
    faults = lambda minimum: alike(faults=rk.Faults(minimum=minimum))

    @dataclasses.dataclass(frozen=True)
    class Odd(Clip):
        bound: float = 0.1

    refused = [
        (Policy(plans=("0" * 32,)), fast, "does not approve this plan"),
        (Policy(plans=()), fast, "does not approve this plan"),
        (Policy(minimum_cohort=4), fast, "at least 4 clients; got 3, of which 3 are in a round"),
        (Policy(minimum_cohort=3), alike(cohort=2), "at least 3 clients"),
        (Policy(minimum_cohort=3), faults(2), r"Give Faults\(minimum=3\)"),
        (Policy(aggregated=True), fast, "'losses' of FastDRO.round"),
        (Policy(aggregated=("losses",)), fast, "wants this exchange aggregated"),
        (Policy(least_noise=1.3), fast, "at least 1.3 times the clip's bound on 'shares'; it has 1.2"),
        (Policy(least_noise=1.0), own(Clip(0.5), Gaussian(1.2, 0.01)), "it has 0.024"),  # of another bound
        (Policy(least_noise=1.0), own(Gaussian(1.2, 0.5)), "it has 0"),
        (Policy(least_noise=1.0), own(Odd(), Gaussian(1.2, 0.5)), "it has 0"),
        (Policy(least_noise=1.0), alike(channel=None), "it has 0"),
        (Policy(clip=0.4), fast, "'shares' clipped to 0.4; its bound is 0.5"),
        (Policy(clip=0.5), alike(channel=None), "not clipped"),
        (Policy(clip=0.5), own(Clip(-5.0)), "not clipped"),
        (Policy(clip=0.5), own(Odd()), "not clipped"),
        (Policy(clip=0.5), alike(channel={"losses": HIDDEN}), "'shares' clipped"),
        (Policy(evaluation="none"), alike(plans=(*fast.plans, fast.plans[1])), "does not allow evaluations"),
    ]
    for policy, run, why in refused:
        with pytest.raises(RefusedError, match=why):
            policy.check(run)
    allowed = [
        (Policy(), alike(channel=None)),
        (Policy(plans=(fast.fingerprint,), minimum_cohort=3, least_noise=1.2, clip=0.5), faults(3)),
        (Policy(aggregated=("direction",), evaluation="none"), fast),
        (Policy(clip=0.5, least_noise=1.0), own(Clip(2.0), Chain((Clip(0.4), Gaussian(1.0, 0.4))))),
    ]
    for policy, run in allowed:
        policy.check(run)


def test_the_file(tmp_path: Path) -> None:
    path = tmp_path / "policy.toml"
    path.write_text('plans = ["ab"]\nrounds = 100\naggregated = ["losses"]\nleast_noise = 1\nevaluation = "own"\n')
    assert Policy.read(path) == Policy(("ab",), 100, aggregated=("losses",), least_noise=1, evaluation="own")
    path.write_text("")
    assert Policy.read(path) == Policy()
    wrong = {
        "minimum_cohorts = 3": "no rule 'minimum_cohorts'; did you mean 'minimum_cohort'?",
        "zzz = 3": "there are plans, rounds",
        "rounds = 0": "rounds must be an integer of at least 1; got 0",
        "rounds = true": "rounds must be an integer of at least 1; got True",
        'plans = "ab"': "must be a list of fingerprints",
        "plans = [1]": "must be a list of fingerprints",
        "aggregated = 1": "aggregated must be true, false or a list of exchanges; got 1",
        "least_noise = -1": "least_noise must be a number of at least 0; got -1",
        "clip = 0": "clip must be a positive number; got 0",
        'evaluation = "all"': "must be one of 'none', 'together', 'own'; got 'all'",
        "plans = [": "policy.toml: ",
    }
    for text, why in wrong.items():
        path.write_text(text)
        with pytest.raises(ValueError, match=why.replace("?", r"\?")) as caught:
            Policy.read(path)
        assert "policy.toml" in str(caught.value)
    with pytest.raises(ValueError, match=r"TOML file that can be read; .*nope\.toml: No such file"):
        Policy.read(tmp_path / "nope.toml")
    with pytest.raises(ValueError, match="needs an audit log"):
        PolicyGuard(Policy(rounds=3))


def test_limits_are_kept_over_all_runs_of_the_log(tmp_path: Path) -> None:
    method = rk.FedAvg(step=0.1, local_steps=1)
    path = tmp_path / "audit.jsonl"

    def run(**limits: int) -> Any:
        audit = Audit(path)
        try:
            return solve(method, lambda i: PolicyGuard(Policy(**limits), audit) if i == 2 else lambda opened: None)
        finally:
            audit.close()

    assert run(rounds=3).rounds == 2
    with pytest.raises(RuntimeError, match="site-2 refuses: its policy's limit of 3 rounds is reached"):
        run(rounds=3)
    audit = Audit(path)
    assert (audit.counts.rounds, audit.counts.exchanges, audit.counts.bytes_up) == (3, 3, 3 * 16)
    audit.close()
    with pytest.raises(RuntimeError, match="site-2 refuses: its policy's limit of 4 exchanges is reached"):
        run(exchanges=4)
    with pytest.raises(RuntimeError, match="site-2 refuses: its policy's limit of 79 bytes sent is reached"):
        run(bytes_up=79)
    assert Policy(rounds=3).limits == {"rounds": 3, "evaluations": 4}
    assert Policy(rounds=3, evaluations=1).limits == {"rounds": 3, "evaluations": 1}
    text = path.read_text()
    assert text.count('"refused"') == 3
    assert verify(path) is None


def test_evaluations_show_no_site_alone() -> None:
    method = rk.FedAvg(step=0.1, local_steps=1)
    here = rk.solve(PROBLEM, CLIENTS, method, np.ones(2), 1, evaluate_client=own_mean).history

    def columns(*words: str) -> Any:
        rules = lambda i: PolicyGuard(Policy(evaluation=words[i]))
        return solve(method, rules, 1, evaluate_client=own_mean).history

    together = columns("own", "together", "own")
    assert [name for name in together if name.startswith("distance")] == ["distance"]
    np.testing.assert_allclose(together["distance"], here["distance"], rtol=1e-12)
    own = columns("own", "own", "own")
    np.testing.assert_allclose(own["distance_q0"], here["distance_q0"], rtol=1e-12)
    with pytest.raises(ValueError, match="site-1 refuses: its policy does not allow evaluations"):
        columns("own", "none", "own")


def test_quantiles_and_means_of_few() -> None:
    rows = {"loss": np.arange(5.0)}
    found = lambda replied: over_clients(rows, np.array(replied, bool), np.ones(5), shows_each=False)
    assert found([1, 1, 1, 1, 1])["loss_q50"] == 2.0
    assert found([1, 1, 1, 1, 0]) == {"loss": 1.5}
    assert np.isnan(found([0, 1, 0, 0, 0])["loss"])
    assert over_clients(rows, np.arange(5) == 1, np.ones(5))["loss_q0"] == 1.0


def nested() -> Any:
    from tests.contract.cases import method, ragged

    it = ragged("Bilevel")
    clients = it.clients()
    start = start_values(it.problem, clients, it.init)
    algorithm = method("FedNest")
    measure = lambda client, x, y, memory: {"size": jnp.sum(x * x)}
    return opened(Job(it.problem, clients, algorithm, start, 3, 0, HIDDEN, rk.Faults(minimum=2), measure=measure), 2)


@pytest.mark.parametrize("name", ["FastDRO", "FedNest"])
def test_a_run_in_words(name: str) -> None:
    run = opened(job(FAST)) if name == "FastDRO" else nested()
    text = in_words_for_a_site(run)
    text = text.replace(run.fingerprint, "FINGERPRINT").replace(run.header["run"], "RUN") + "\n"
    assert max(map(len, text.splitlines())) <= 100
    assert text == (Path(__file__).parent / "words" / f"{name}.txt").read_text()


def test_a_loss_that_is_no_mean_is_refused_without_a_number_of_the_data(caplog: pytest.LogCaptureFixture) -> None:
    """The site's own log has the numbers that were computed from two of its samples; the coordinator has none."""
    problem = rk.SingleLevel(lambda x, b: jnp.sum((x - b) ** 2))
    clients = rk.Clients(upper=[np.array([1.25, 3.5]), np.array([2.75, 4.5, 7.125])])
    what = Job(problem, clients, rk.FedAvg(step=0.1), (jnp.zeros(()), ()), 2)
    with pytest.raises(ValueError, match=r"site-0 refuses: .*not a mean over samples, .*; its log says more") as told:
        in_memory(responders(what)).open(without_data(what))
    assert not any(letter.isdigit() for letter in str(told.value).replace("site-0", "").replace("site-1", ""))
    assert "on 3 samples" in caplog.text


def test_bookkeeping_without_a_bound_is_neither_clipped_nor_hidden() -> None:
    """FedNest's probe of ℓ goes with x as it is: a policy that wants everything bounded refuses the run."""
    task = rk.tasks.quadratic(clients=3)
    job = Job(task.problem, task.clients, rk.FedNest(), task.init, 3, channel=HIDDEN)
    traced = engine.traced(job)
    plans = (traced.start, traced.round)
    opened = Opened({"client": 0}, plans, fingerprint(plans), HIDDEN, 3, 3, job.algorithm)
    for policy in (Policy(clip=0.5), Policy(least_noise=1.0)):
        with pytest.raises(RefusedError, match=r"'Hv'.* bookkeeping without a bound \(a power iteration for 1/ℓ\)"):
            policy.check(opened)
    Policy().check(opened)
    fixed = engine.traced(dataclasses.replace(job, algorithm=rk.FedNest(hessian_step=0.1)))
    plans = (fixed.start, fixed.round)
    Policy(clip=0.5).check(dataclasses.replace(opened, plans=plans))


@pytest.mark.parametrize(
    ("channel", "said", "bytes_out"),
    [
        (None, "nothing is done to it", "160 bytes"),
        (rk.top_k(0.1), "it is compressed here: of each array, 10 % of the numbers with the largest", "18 bytes; 160"),
        (
            rk.chain(rk.clip(0.5), rk.quantize(4), rk.broadcast(8)),
            "norm of 0.5. Then it is compressed here: each",
            "18 b",
        ),
    ],
    ids=["plain", "top", "clipped"],
)
def test_a_compressed_reply_in_words(channel: Any, said: str, bytes_out: str) -> None:
    clients = rk.Clients(upper=[np.ones((2, 20)), np.zeros((1, 20))])
    run = opened(Job(PROBLEM, clients, rk.FedAvg(step=0.1), (np.ones(20), ()), 2, 0, channel))
    text = " ".join(in_words_for_a_site(run).split())
    assert said in text.partition("Before a reply is sent:")[2]
    assert bytes_out in text
    assert ("before compression" in text) == (channel is not None)
    assert ("What comes in during a round is rounded to 8 bits per number" in text) == ("clip" in str(channel).lower())


@pytest.mark.parametrize(
    ("channel", "refused"),
    [
        (rk.chain(rk.clip(0.5), rk.top_k(0.1, feedback=None)), ""),
        (rk.chain(rk.clip(0.5), rk.top_k(0.1)), "not clipped, as far as can be told"),
        (rk.chain(rk.clip(0.5), rk.quantize(8)), "not clipped, as far as can be told"),
    ],
    ids=["top", "feedback", "rounded"],
)
def test_a_policy_on_clipped_and_compressed_replies(channel: Any, refused: str) -> None:
    clients = rk.Clients(upper=[np.ones((2, 20)), np.zeros((1, 20))])
    run = opened(Job(PROBLEM, clients, rk.FedAvg(step=0.1), (np.ones(20), ()), 2, 0, channel))
    if not refused:
        Policy(clip=0.5).check(run)
    else:
        with pytest.raises(RefusedError, match=refused):
            Policy(clip=0.5).check(run)
