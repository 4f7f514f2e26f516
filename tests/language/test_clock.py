"""Simulated seconds: against the ledger and against NumPy, late replies, and what is refused."""

from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.stats
from tests.contract.cases import case, claims, full, job, pairs, ragged, together

import rookery as rk
from rookery.language.clock import Watch
from rookery.language.lateness import chances, heard

PROBLEM = rk.SingleLevel(lambda x, b: jnp.mean((x - b) ** 2))
VALUES = np.array([0.0, 1.0, 4.0, 9.0, 16.0])
CLIENTS = rk.Clients(upper=[np.full(3, v) for v in VALUES])
METHOD = rk.FedAvg(step=0.25, local_steps=2)
SLOW = rk.Clock(compute=[1.0, 2.0, 4.0, 8.0, 16.0], latency=0.5)  # a round takes 2.5, 1.5, 1, 0.75, 0.625 seconds


def solved(**given: Any) -> rk.Run:
    rounds = given.pop("rounds", 1)
    return rk.solve(PROBLEM, CLIENTS, METHOD, given.pop("start", 2.0), rounds, **given)


def clock(run: rk.Run) -> list[float]:
    return run.history["clock"].tolist()


def after_one_round(heard: Any, start: float = 2.0) -> float:
    """FedAvg in NumPy: each step halves the distance to a client's value."""
    values = VALUES[heard]
    return float(np.mean(values + (start - values) / 4))


EXACT = {"FedAvg", "FedNest", "FedBiO", "LFedNest", "ASFBO", "AdaFBiO", "FedDRO", "F2SA", "Scaffold"}
REFUSED = {"PFedMe", "BRFedBiP", "FedBiOAccLocal", "FedMBO"}  # what a client computes depends on what it holds
WITH_MINIBATCHES = {"LocalSVRG", "WeightedNodesABA", "WeightedNodesProx"}


@together([pair for pair in pairs() if pair[0] not in REFUSED], default={"FedAvg", "FedNest"})
def test_of_like_clients_it_is_the_ledgers_sum(name: str, kind: str) -> None:
    """Where clients have the same work, the slowest is any of them; in the others, some draw more steps than others."""
    what = job(name, case(kind), full(name), clock=rk.Clock(compute=8.0, uplink=64.0, downlink=128.0, latency=0.25))
    session = rk.Simulation().open(what)
    for cost, size in zip(
        [session.init(), *session.advance(2)], (what.clients.n, what.cohort, what.cohort), strict=True
    ):
        messages = sum(0.25 * entry.count + entry.up / 64 + entry.down / 128 for entry in cost.exchanges.values())
        work = cost.work[2] + 2 * cost.work[3]
        assert cost.seconds is not None
        busy = cost.seconds - messages
        at_server = any(ledger.kind == "center" and not entry.count for ledger, entry in cost.exchanges.items())
        assert at_server or work / size / 8 - 1e-3 <= busy
        assert busy <= work / 8 + 1e-3
        if name in EXACT:
            np.testing.assert_allclose(busy, work / size / 8, rtol=1e-5, atol=1e-3)


def test_the_server_waits_for_the_slowest() -> None:
    assert clock(solved(clock=SLOW, rounds=3)) == [0.0, 2.5, 5.0, 7.5]
    last = rk.Clock(compute=[16.0, 8.0, 4.0, 2.0, 1.0], uplink=[1e9, 1e9, 1e9, 1e9, 4.0], downlink=8.0)
    run = solved(clock=last)
    up, down = (run.history[name].iloc[-1] / len(VALUES) for name in ("bytes_up", "bytes_down"))
    assert clock(run)[-1] == pytest.approx(2 / 1 + up / 4 + down / 8)


def test_a_cohort_waits_for_its_own_slowest() -> None:
    run = solved(clock=SLOW, rounds=8, cohort=2, seed=3)
    steps = np.diff(clock(run))
    assert set(steps) <= {2.5, 1.5, 1.0, 0.75}
    assert len(set(steps)) > 1


def test_speeds_by_round_begin_again() -> None:
    trace = np.array([[1.0] * 5, [2.0] * 5])
    assert clock(solved(clock=rk.Clock(compute=trace), rounds=4)) == [0.0, 2.0, 3.0, 5.0, 6.0]


def test_speeds_from_a_distribution_are_those_of_the_seed() -> None:
    drawn = lambda seed: clock(solved(clock=rk.Clock(compute=scipy.stats.lognorm(1.0), seed=seed)))[-1]
    assert drawn(1) == drawn(1) != drawn(2)
    speeds = scipy.stats.lognorm(1.0).rvs(size=5, random_state=np.random.default_rng(1))
    assert drawn(1) == pytest.approx(2 / speeds.min(), rel=1e-6)


@pytest.mark.parametrize(
    ("name", "kind"),
    [("FedAvg", "SingleLevel"), ("Scaffold", "SingleLevel"), ("FedNest", "Bilevel"), ("FedBiOAcc", "Bilevel")],
)
def test_the_numbers_are_those_without_a_clock(name: str, kind: str) -> None:
    given = {"faults": rk.Faults(dropout=0.2)}
    states = []
    for clock in (None, rk.Clock(compute=2.0, uplink=scipy.stats.uniform(1, 9), latency=0.1)):
        session = rk.Simulation().open(job(name, ragged(kind), clock=clock, **given))
        session.init()
        session.advance(2)
        states.append(np.asarray(session.state.x))
    np.testing.assert_array_equal(*states)


def test_a_deadline_leaves_out_late_replies() -> None:
    run = solved(clock=SLOW, faults=rk.Faults(deadline=1.2), rounds=2)
    assert clock(run) == pytest.approx([0.0, 1.2, 2.4])
    assert run.history["missing"].tolist() == [0, 2, 4]
    assert solved(clock=SLOW, faults=rk.Faults(deadline=1.2)).x == pytest.approx(after_one_round([2, 3, 4]))
    all_in_time = solved(clock=SLOW, faults=rk.Faults(deadline=3.0))
    assert (clock(all_in_time)[-1], float(all_in_time.x)) == (2.5, pytest.approx(after_one_round(slice(None))))


def test_the_first_replies_end_an_exchange() -> None:
    run = solved(clock=SLOW, faults=rk.Faults(first=2))
    assert clock(run)[-1] == 0.75
    assert run.x == pytest.approx(after_one_round([3, 4]))
    both = solved(clock=SLOW, faults=rk.Faults(first=4, deadline=1.2))
    assert (clock(both)[-1], float(both.x)) == (pytest.approx(1.2), pytest.approx(after_one_round([2, 3, 4])))
    early = solved(clock=SLOW, faults=rk.Faults(first=2, deadline=1.2))
    assert (clock(early)[-1], float(early.x)) == (0.75, pytest.approx(after_one_round([3, 4])))


def test_a_deadline_that_nobody_meets_is_refused_in_one_line() -> None:
    with pytest.raises(
        ValueError, match=r"deadline must leave at least 1 .* takes them 0.625 s. Give a longer"
    ) as said:
        solved(clock=SLOW, faults=rk.Faults(deadline=0.6))
    assert "\n" not in str(said.value)
    with pytest.raises(ValueError, match=r"at least 3 of the clients the time to reply; got 0.9 s, .* takes them 1 s"):
        solved(clock=SLOW, faults=rk.Faults(deadline=0.9, minimum=3))


@pytest.mark.parametrize("method", [METHOD, rk.FedAvg(step=0.25, local_steps=(2, 3))], ids=["in a round", "drawn"])
def test_a_deadline_that_nobody_meets_in_some_round_ends_the_run(method: Any) -> None:
    trace = np.array([[16.0] * 5, [1.0] * 5])
    with pytest.raises(rk.RoundFailedError, match="round 2: an exchange got 0 replies"):
        rk.solve(PROBLEM, CLIENTS, method, 2.0, 2, clock=rk.Clock(compute=trace), faults=rk.Faults(deadline=1.0))


def test_ties_are_broken_by_chance() -> None:
    run = solved(clock=rk.Clock(latency=1.0), faults=rk.Faults(first=1), rounds=9, start=0.0)
    assert run.x > 0  # the first client alone would leave it at 0


def test_the_run_says_which_clients_it_never_hears(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO", "rookery"):
        solved(clock=SLOW, faults=rk.Faults(deadline=1.2))
    assert "2 of 5 clients are always too late for an exchange" in caplog.text
    assert "leaves out their data: 0, 1." in caplog.text
    caplog.clear()
    with caplog.at_level("INFO", "rookery"):
        solved(clock=SLOW, faults=rk.Faults(deadline=2.5))
    assert "too late" not in caplog.text


# Weights that correct the bias of a deadline or of the first replies.

N = 60
MANY = rk.Clients(upper=[np.full(2, float(k)) for k in range(N)])
VARYING = np.exp(np.random.default_rng(0).normal(0, 0.7, (50, N)) + np.linspace(0, 2, N))  # large values are faster


@pytest.mark.parametrize("late", [{"first": 15}, {"first": 15, "deadline": 3.0}, {"deadline": 3.0}], ids=str)
def test_chances_are_those_of_the_simulation(late: dict[str, Any]) -> None:
    rng, times, counts, dropout = np.random.default_rng(1), 1 / VARYING[:2], np.zeros(N), 0.3
    times[0, :20] = times[0, 20]  # ties
    many = 3000
    asked = np.array([np.sort(rng.choice(N, 25, replace=False)) for _ in range(many)])
    given = late.get("deadline"), late.get("first")
    one = jax.jit(jax.vmap(lambda due, there, key: heard(due, there, *given, key)[0]))
    for row in times:
        there = rng.random(asked.shape) >= dropout
        replied = one(row[asked].astype(np.float32), there, jax.random.split(jax.random.key(0), many))
        np.add.at(counts, asked[np.asarray(replied)], 1)
    expected = chances(times.astype(np.float32), 25, *given, dropout) * (1 - dropout) * 2 * many * 25 / N
    assert np.all(np.abs(counts - expected) < 4.5 * np.sqrt(expected + 1))


class State(NamedTuple):
    x: Any
    y: Any


@dataclass(frozen=True)
class InLoops:
    """A method with exchanges in a loop, whose first turn sends more, and after it."""

    solves = (rk.SingleLevel,)

    def init(self, fed: Any, x: Any, y: Any, key: Any) -> State:
        return State(x, y)

    def round(self, fed: Any, state: State, key: Any) -> State:
        def body(i: Any, x: Any) -> Any:
            step = fed.map(lambda c, k: state.x + c.f_x(x, (), c.upper(k)), key)
            return x - 0.1 * fed.mean(step, name="in the loop")

        x = fed.loop(3, body, state.x)
        last = fed.map(lambda c, k: c.f_x(x, (), c.upper(k)) + c.f_x(2 * x, (), c.upper(k)), key)
        return State(x - 0.1 * fed.mean(last, name="after it"), state.y)


def test_the_times_known_before_the_run_are_those_of_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    known, original = [], Watch.exchange

    def exchange(self: Watch, cohort: Any, ids: Any, up: int) -> Any:
        times = self.times(cohort, up) if self.complete else None
        during = original(self, cohort, ids, up)
        known.append(times)
        return during if times is None else self.of_turn(times[0])[ids]

    def seconds() -> list[float]:
        speeds = rk.Clock(compute=SLOW.compute, uplink=64.0, downlink=[8.0, 4.0, 2.0, 1.0, 0.5], latency=0.1)
        return clock(rk.solve(PROBLEM, CLIENTS, InLoops(), 2.0, 2, clock=speeds, faults=rk.Faults(deadline=1e9)))

    during = seconds()
    monkeypatch.setattr(Watch, "exchange", exchange)
    assert seconds() == during
    in_loop, after = (next(a for a in reversed(known) if a is not None and a.ndim == ndim) for ndim in (3, 2))
    assert in_loop.shape == (1, 2, len(VALUES))
    assert np.all(in_loop[:, 0] > in_loop[:, 1])  # the first turn sends more
    assert after.shape == (1, len(VALUES))


def long_run_mean(**faults: Any) -> tuple[float, float]:
    """FedAvg's x in the long run, which minimises the mean loss of those it hears, and its standard error."""
    clock, rounds = rk.Clock(compute=VARYING), 2000
    given = {"clock": clock, "faults": rk.Faults(**faults), "cohort": 30, "seed": 2}
    method = rk.FedAvg(step=0.05, local_steps=1)
    run = rk.solve(PROBLEM, MANY, method, (N - 1) / 2, rounds, evaluate=lambda x, y: {"x": x}, every=10, **given)
    blocks = run.history["x"].to_numpy()[1:].reshape(-1, 10).mean(axis=1)[1:]  # of two turns of the trace each
    return float(blocks.mean()), float(blocks.std(ddof=1) / np.sqrt(len(blocks)))


@pytest.mark.parametrize("late", [{"first": 20}, pytest.param({"deadline": 0.5}, marks=pytest.mark.slow)], ids=str)
def test_weights_correct_the_bias(late: dict[str, Any]) -> None:
    true = (N - 1) / 2
    biased, error = long_run_mean(**late)
    assert biased - true > 60 * error
    mean, error = long_run_mean(**late, correct=True)
    assert abs(mean - true) < 3 * error
    assert error < 0.1


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"faults": rk.Faults(first=2, correct=True)}, "3 of 5 are always too late for the exchange 'x': 0, 1, 2"),
        ({"faults": rk.Faults(deadline=1.2, correct=True)}, "2 of 5 are always too late for the exchange 'x': 0, 1"),
        ({"channel": rk.median(1)}, "the exchange 'x' has its replies one by one"),
        ({"channel": rk.chain(rk.clip(1.0), rk.secure_sum())}, "a cohort or a channel with chances of its own"),
        ({"algorithm": rk.FedAvg(step=0.25, local_steps=(2, 3))}, "correct needs to know before the run how long"),
    ],
)
def test_what_cannot_be_corrected(given: dict[str, Any], message: str) -> None:
    given = {"faults": rk.Faults(first=4, correct=True, minimum=3), "clock": SLOW} | given
    method = given.pop("algorithm", METHOD)
    with pytest.raises(ValueError, match=message) as said:
        rk.solve(PROBLEM, CLIENTS, method, 2.0, 1, **given)
    assert "\n" not in str(said.value)


@pytest.mark.parametrize("engine", [rk.Simulation(mesh=2), rk.Simulation(block=2)], ids=["mesh", "blocks"])
def test_on_every_kind_of_simulation(engine: Any) -> None:
    given = {"clock": SLOW, "faults": rk.Faults(first=3), "cohort": 4, "seed": 1, "rounds": 3}
    here, there = solved(**given), solved(**given, engine=engine)
    np.testing.assert_allclose(clock(there), clock(here), rtol=1e-6)
    np.testing.assert_allclose(there.x, here.x, rtol=1e-9)


def test_a_checkpoint_keeps_it(tmp_path: Any) -> None:
    whole = solved(clock=SLOW, rounds=4)
    solved(clock=SLOW, rounds=2, checkpoint=tmp_path)
    assert clock(solved(clock=SLOW, rounds=4, checkpoint=tmp_path)) == clock(whole)
    with pytest.raises(ValueError, match="checkpoint"):
        solved(rounds=4, checkpoint=tmp_path)


def test_tune_by_clock_gives_each_candidate_the_rounds_it_has_time_for() -> None:
    """Short rounds are worth more than long ones here: the clients' values differ only a little."""
    given = {"evaluate": lambda x, y: {"loss": jnp.mean((x - VALUES) ** 2)}, "clock": SLOW, "cohort": 2}
    search = {"local_steps": [1, 8], "step": [0.01, 0.1]}
    found = rk.tune(PROBLEM, CLIENTS, METHOD, 2.0, 40, metric="loss", search=search, until=40.0, slots=2, **given)
    assert [name for name in found.table if name.startswith("second")] == [
        "second 5", "second 10", "second 20", "second 40"
    ]  # fmt: skip
    ran = {}
    for row in found.table.drop_duplicates("local_steps").to_dict("records"):
        method = replace(METHOD, local_steps=row["local_steps"], step=row["step"])
        history = rk.solve(PROBLEM, CLIENTS, method, 2.0, 40, **given).history
        for seconds in (5, 10, 20, 40):
            if not np.isnan(row[f"second {seconds}"]):
                at = history[history["clock"] <= seconds].iloc[-1]
                assert row[f"second {seconds}"] == pytest.approx(at["loss"], rel=1e-6)
                ran[row["local_steps"]] = int(at["round"])
        assert row["rounds"] == ran[row["local_steps"]] or row["status"] == "stopped"
    assert ran[1] > 2 * ran[8]
    assert found.rounds == found.table["rounds"].iloc[0]
    assert found.until == 40.0


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"until": 30.0}, r"until=30.0 needs clock=rk.Clock"),
        ({"until": 0.0, "clock": SLOW}, "until must be a positive number; got 0.0"),
        ({"until": 8.0, "clock": SLOW}, "until must leave candidates the time for a round .* got 8 s, and none .* 1 s"),
    ],
)
def test_bad_budgets(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message) as said:
        rk.tune(
            PROBLEM, CLIENTS, METHOD, 2.0, 8, metric="-x", evaluate=lambda x, y: {"x": abs(x)}, candidates=3, **given
        )
    assert "\n" not in str(said.value)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"compute": -1.0}, "Clock: compute must be positive; got -1"),
        ({"compute": [1.0, 0.0]}, "Clock: compute must be positive; got 0"),
        ({"uplink": np.nan}, "Clock: uplink must be positive; got nan"),
        ({"latency": -0.5}, "Clock: latency must be at least 0; got -0.5"),
        ({"downlink": "fast"}, "Clock: downlink must be a number, an array"),
        ({"seed": 1.5}, "Clock: seed must be an integer"),
    ],
)
def test_bad_speeds(given: dict[str, Any], message: str) -> None:
    with pytest.raises((ValueError, TypeError), match=message):
        rk.Clock(**given)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"clock": 3.0}, "clock must be rk.Clock"),
        ({"clock": rk.Clock(compute=[1.0, 2.0])}, "compute must have a number for each of the 5 clients; got 2"),
        ({"faults": rk.Faults(deadline=3.0)}, "deadline needs the speeds of clients; got clock=None"),
        ({"faults": rk.Faults(first=3)}, "first needs the speeds of clients; got clock=None"),
        ({"clock": SLOW, "channel": rk.private(8, 1e-2)}, "clock must be None in a private run"),
        ({"clock": SLOW, "engine": rk.Federation()}, "clock must be None with rk.Federation"),
        ({"clock": SLOW, "engine": rk.Simulation(debug=True)}, "clock must be None with debug=True"),
    ],
)
def test_bad_input(given: dict[str, Any], message: str) -> None:
    with pytest.raises((ValueError, TypeError), match=message):
        solved(**given)


@pytest.mark.parametrize(
    ("given", "message"), [({"deadline": 0.0}, "deadline"), ({"first": 0}, "first"), ({"correct": True}, "correct")]
)
def test_bad_faults(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=f"Faults: {message} must be"):
        rk.Faults(**given)


@pytest.mark.parametrize(
    "name",
    ["PFedMe", *(pytest.param(n, marks=pytest.mark.slow) for n in sorted((REFUSED | WITH_MINIBATCHES) - {"PFedMe"}))],
)
def test_a_method_whose_work_depends_on_what_a_client_holds_is_refused(name: str) -> None:
    what = job(name, case(claims(name)[0]), clock=rk.Clock(compute=2.0))
    with pytest.raises(ValueError, match="clock must be None for methods in which how much a client computes"):
        rk.Simulation().open(what)
