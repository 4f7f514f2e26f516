"""`tune`: a candidate's numbers are those of `solve`; one compilation; what diverges is dropped; the command line."""

import inspect
import json
import os
import shlex
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import pairwise
from types import SimpleNamespace
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import pandas as pd
import pytest
from typer.testing import CliRunner

import rookery as rk
from rookery import algorithms, cli
from rookery.engines.engine import PROGRAMS, Job
from rookery.engines.simulation.sweep import Sweep
from rookery.run.race import Race
from rookery.run.search import all_candidates
from rookery.run.search import ranges as search_ranges

TASK = rk.tasks.quadratic(clients=3, upper_dim=2, lower_dim=2)
METHOD = rk.LFedNest(upper_step=0.01, lower_step=0.1, lower_local_steps=2, neumann_terms=3, hessian_step=0.2)
ROUNDS = 24


TRIED = [{"upper_step": u, "lower_step": v} for u in (0.01, 0.03, 0.1, 0.2, 0.3) for v in (0.05, 0.1, 0.2, 0.3, 1e200)]


def search(method: Any = METHOD, rounds: int = ROUNDS, **given: Any) -> rk.Tuning:
    asked = {"evaluate": TASK.evaluate, "metric": "distance", "candidates": 25} | given
    return rk.tune(TASK.problem, TASK.clients, method, TASK.init, rounds, **asked)


def race(tried: Any = TRIED, **given: Any) -> rk.Tuning:
    """The search of these candidates, in slots of 4: 20 that behave, and 5 that overflow in the first round."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys.modules["rookery.run.tune"], "all_candidates", lambda *_: tried)
        return search(search={"upper_step": (0.01, 0.3), "lower_step": (0.05, 5.0)}, slots=4, **given)


@pytest.fixture(scope="module")
def found() -> rk.Tuning:
    """One such search, for which the rounds are compiled once."""
    before = PROGRAMS.made
    result = race()
    assert PROGRAMS.made == before + 2  # the start and the rounds
    return result


# The search.


def test_a_candidates_numbers_are_those_of_solve(found: rk.Tuning) -> None:
    for row in found.table.iloc[[0, 6, 9, 13]].to_dict("records"):
        assert row["status"] != "diverged"
        method = replace(METHOD, upper_step=row["upper_step"], lower_step=row["lower_step"])
        run = rk.solve(
            TASK.problem, TASK.clients, method, TASK.init, row["rounds"], every=3, evaluate=TASK.evaluate
        ).history  # fmt: skip
        distances = run.set_index("round")["distance"]
        shown = {at: row[f"round {at}"] for at in (3, 6, 12, 24) if at <= row["rounds"]}
        np.testing.assert_allclose(list(shown.values()), distances[list(shown)], rtol=1e-8)
        assert row["last"] == row[f"round {row['rounds']}"]
        np.testing.assert_allclose(found.start, distances[0], rtol=1e-12)


def test_the_worse_half_stops_at_each_rung(found: rk.Tuning) -> None:
    table = found.table
    rungs = ["round 3", "round 6", "round 12", "round 24"]
    assert [name for name in table if name.startswith("round ")] == rungs
    assert len(table) == 25
    lost = table["status"] == "diverged"
    assert found.diverged == lost.sum() == 5
    assert set(table["lower_step"][lost]) == {1e200}
    assert table[rungs][lost].isna().all(axis=None)
    assert (table["rounds"][lost] == 1).all()  # dropped at once
    counts = table[rungs].notna().sum().tolist()
    assert counts == [20, 16, 8, 4]  # half of 25 each time, and as many as fill the slots of 4
    for rung, after in pairwise(rungs):
        went_on = table[after].notna()
        stopped = table[rung].notna() & ~went_on
        assert table[rung][went_on].max() < table[rung][stopped].min()
    assert table["status"].tolist() == ["finished"] * 4 + ["stopped"] * 16 + ["diverged"] * 5


@pytest.mark.slow
def test_the_best_beats_what_was_set(found: rk.Tuning) -> None:
    as_set = rk.solve(
        TASK.problem, TASK.clients, METHOD, TASK.init, ROUNDS, every=ROUNDS, evaluate=TASK.evaluate
    ).history["distance"].iloc[-1]  # fmt: skip
    assert found.best is not None
    assert found.value < as_set / 10
    assert found.value == found.table["round 24"].min()
    assert replace(found.best, upper_step=0.01, lower_step=0.1) == METHOD  # what was not searched is as it was
    assert "of 25 diverged" in repr(found)


def test_an_end_of_a_range_is_told_and_the_next_range_lies_around_it(found: rk.Tuning) -> None:
    lowest = replace(found, best=replace(METHOD, upper_step=0.1, lower_step=0.05))
    assert lowest.edges == {"lower_step": "lower"}
    assert lowest.moved() == {"upper_step": (0.01, 0.3), "lower_step": (0.005, 0.5)}
    highest = replace(found, best=replace(METHOD, upper_step=0.3, lower_step=0.5))
    assert highest.edges == {"upper_step": "upper"}
    assert highest.moved()["upper_step"] == (0.0548, 1.64)
    assert highest.moved()["lower_step"] == (0.05, 5.0)


def test_another_search_of_the_same_shape_compiles_nothing(found: rk.Tuning) -> None:
    before = PROGRAMS.made
    again = race([{name: 0.9 * value for name, value in one.items()} for one in TRIED], rounds=7)
    assert PROGRAMS.made == before
    assert [name for name in again.table if name.startswith("round ")] == ["round 1", "round 2", "round 4", "round 7"]


def saddle(x: Any, y: Any, batch: Any) -> Any:
    a, t = jnp.mean(batch["a"]), jnp.mean(batch["t"])
    return 0.5 * a * x @ x - t * jnp.sum(x) + x @ y - 0.5 * a * y @ y


def test_a_sign_turns_the_search_around(found: rk.Tuning) -> None:
    assert (found.metric, found.higher_is_better) == ("distance", False)
    worst = race(metric="+distance")
    assert (worst.metric, worst.higher_is_better) == ("distance", True)
    assert worst.value == worst.table["last"].max() > found.value


@pytest.mark.slow
def test_memory_cohorts_single_precision_and_higher_is_better() -> None:
    """A method with memory on a part of the clients; float32 stays float32 under steps that are float64 numbers."""
    data = [{"a": np.float32([a, a]), "t": np.float32([t, 2 * t])} for a, t in ((1, 1), (2, -1), (4, 3))]
    problem, clients, init = (
        rk.Minimax(saddle),
        rk.Clients(upper=data),
        (np.ones(2, np.float32), np.ones(2, np.float32)),
    )
    evaluate = lambda x, y: {"score": -jnp.sum(x**2) - jnp.sum(y**2), "bits": x.dtype.itemsize * 8}
    given = {"evaluate": evaluate, "cohort": 2, "seed": 3}
    method = rk.ScaffoldSaddle(upper_step=0.02, lower_step=0.02, local_steps=2, batch_size=1)
    result = rk.tune(problem, clients, method, init, 8, candidates=9, slots=3, metric="score", **given)
    assert result.higher_is_better
    assert result.table["round 8"].iloc[0] == result.table["round 8"].max()
    for row in result.table.head(2).to_dict("records"):
        own = replace(method, upper_step=row["upper_step"], lower_step=row["lower_step"])
        run = rk.solve(problem, clients, own, init, 8, **given).history.iloc[-1]
        assert run["bits"] == 32
        np.testing.assert_allclose(row["last"], run["score"], rtol=2e-5)


# What decides, and what has diverged.

SQUARES = rk.SingleLevel(lambda x, b: jnp.mean((x - b) ** 2))
PAIR = rk.Clients(upper=[np.array([1.0, 2.0, 3.0]), np.array([3.0])])
ZERO = jnp.zeros(())


def excess(x: Any, y: Any = None) -> Any:
    return jnp.mean(jnp.array([jnp.mean((x - b) ** 2) for b in (np.array([1.0, 2.0, 3.0]), 3.0)]))


@contextmanager
def trying(name: str, values: list[float]) -> Iterator[dict[str, Any]]:
    """A search of these values."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys.modules["rookery.run.tune"], "all_candidates", lambda *_: [{name: value} for value in values])
        yield {name: (min(values), max(values))}


@pytest.mark.parametrize("offset", [0.0, 1000.0, -1e6])
def test_candidates_are_compared_at_full_precision(offset: float) -> None:
    """An offset of the metric, which leaves three digits alike, changes nothing."""
    given = {"search": {"step": (0.01, 1.0)}, "candidates": 13, "metric": "loss", "slots": 1}
    found = rk.tune(SQUARES, PAIR, rk.FedAvg(), ZERO, 8, evaluate=lambda x, y: {"loss": offset + excess(x)}, **given)
    table = found.table
    for rung, after in pairwise(["round 1", "round 2", "round 4", "round 8"]):
        went_on, stopped = table[after].notna(), table[rung].notna() & table[after].isna()
        assert table[rung][went_on].max() < table[rung][stopped].min()
    assert found.value == table["round 8"].min()
    np.testing.assert_allclose(found.value - offset, 7 / 12, rtol=1e-6)  # the least of all


def test_a_clients_memory_that_diverges_counts() -> None:
    """As in `solve`, which stops before the round."""
    method = rk.Ditto(step=0.1, personal_step=0.1, personal_steps=5, proximal=0.5)
    given = {"evaluate": lambda x, y: {"loss": excess(x)}}
    with trying("personal_step", [0.1, 1e30, 1e60]) as wanted:
        found = rk.tune(SQUARES, PAIR, method, ZERO, 16, search=wanted, metric="loss", **given)
    status = found.table.set_index("personal_step")["status"].to_dict()
    assert status == {0.1: "finished", 1e30: "diverged", 1e60: "diverged"}
    for step in (1e30, 1e60):
        with pytest.warns(rk.NonFiniteWarning, match="what a client remembers"):
            run = rk.solve(SQUARES, PAIR, replace(method, personal_step=step), ZERO, 16, **given)
        assert run.stopped is not None


@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("start", [0.0, 1.1e-16, 3.0, -2.0])
def test_what_counts_as_diverged(start: float, sign: int) -> None:
    """Worse than the start by more than a million times max(1, |start|), whichever way is better and however small."""
    far = lambda x, y: {"far": sign * (start + jnp.abs(x))}
    with trying("step", [1e-3, 0.1, 1e5]) as wanted:
        metric = "-far" if sign > 0 else "+far"
        found = rk.tune(SQUARES, PAIR, rk.FedAvg(), ZERO, 2, evaluate=far, search=wanted, metric=metric)
    assert found.start == sign * start
    assert found.table.set_index("step")["status"].to_dict() == {1e-3: "finished", 0.1: "finished", 1e5: "diverged"}


def test_channel_and_faults_are_those_of_solve() -> None:
    given = {
        "channel": rk.clip(0.05), "faults": rk.Faults(dropout=0.4), "seed": 3,
        "evaluate": lambda x, y: {"loss": excess(x)},
    }  # fmt: skip
    clients = rk.Clients(upper=[np.array([float(k)]) for k in range(6)])
    found = rk.tune(SQUARES, clients, rk.FedAvg(), ZERO, 8, search={"step": (0.01, 1.0)}, metric="loss", **given)
    for row in found.table.iloc[[0, -1]].to_dict("records"):
        run = rk.solve(SQUARES, clients, rk.FedAvg(step=row["step"]), ZERO, row["rounds"], **given)
        np.testing.assert_allclose(row["last"], run.history["loss"].iloc[-1], rtol=1e-10)
    plain = rk.tune(
        SQUARES, clients, rk.FedAvg(), ZERO, 8, search={"step": (0.01, 1.0)}, metric="loss", evaluate=given["evaluate"]
    )
    assert plain.value < found.value
    with pytest.raises(TypeError, match=r"faults must be rk\.Faults\(.*; got 0\.1"):
        rk.tune(SQUARES, clients, rk.FedAvg(), ZERO, 8, metric="loss", **given | {"faults": 0.1})
    with pytest.raises(rk.RoundFailedError, match=r"fewer replies .* than faults\.minimum=6"):
        rk.tune(
            SQUARES, clients, rk.FedAvg(), ZERO, 8, metric="loss", **given | {"faults": rk.Faults(0.4, minimum=6)}
        )  # fmt: skip


def test_all_candidates_get_the_same_noise() -> None:
    """Also in programs of their own: a step that a clip makes meaningless leaves the noise alone."""
    given = {"channel": rk.chain(rk.clip(1e-9), rk.gaussian(1e9)), "evaluate": lambda x, y: {"at": x}}
    wanted = {"local_steps": [1, 2], "step": [0.1, 0.2]}
    runs = [
        rk.tune(SQUARES, PAIR, rk.FedAvg(), ZERO, 2, search=wanted, metric="+at", **given, **more).table["round 1"]
        for more in ({}, {}, {"noise_seed": 1}, {"noise_seed": 1})
    ]
    for values in runs:
        np.testing.assert_allclose(values, values[0], atol=1e-6)
        assert abs(values[0]) > 1e-3
    assert len({values[0] for values in runs}) == 3
    with pytest.raises(ValueError, match="noise_seed needs a channel"):
        search(noise_seed=1)


# Integers and words.


def test_integers_and_words(tmp_path: Any) -> None:
    """A program for each value; the numbers are those of `solve`."""
    given = {"evaluate": lambda x, y: {"loss": excess(x)}, "candidates": 18}
    before = PROGRAMS.made
    wanted = {"local_steps": (1, 2), "step": (0.01, 1.0)}
    found = rk.tune(SQUARES, PAIR, rk.FedAvg(batch_size=1), ZERO, 8, search=wanted, metric="loss", **given)
    assert 2 <= PROGRAMS.made - before <= 2 * 2
    assert found.search == {"local_steps": [1, 2], "step": (0.01, 1.0)}
    assert len(found.table) == 2 * 9
    assert set(found.table["local_steps"]) == {1, 2}
    del given["candidates"]
    for row in found.table.iloc[[0, 10]].to_dict("records"):
        method = rk.FedAvg(batch_size=1, step=row["step"], local_steps=row["local_steps"])
        run = rk.solve(SQUARES, PAIR, method, ZERO, row["rounds"], **given)
        np.testing.assert_allclose(row["last"], run.history["loss"].iloc[-1], rtol=1e-8)
    assert found.best is not None
    assert (found.best.step, found.best.local_steps) == tuple(found.table.loc[0, ["step", "local_steps"]])
    found.picture().savefig(tmp_path / "map.png")
    search = search_ranges(rk.FedAvg(), {"local_steps": (1, 20), "step": (0.01, 1.0)})
    assert search == {"local_steps": [1, 2, 4, 9, 20], "step": (0.01, 1.0)}
    found = replace(found, search=search)
    told = replace(found, best=replace(found.best, step=0.1, local_steps=20))
    assert told.edges == {"local_steps": "upper"}
    assert told.moved() == {"local_steps": [4, 9, 19, 41, 89], "step": (0.01, 1.0)}
    assert replace(found, best=replace(found.best, step=0.1, local_steps=1)).edges == {}  # there is no integer below


@pytest.mark.slow
def test_words_alone(tmp_path: Any) -> None:
    """Nothing is a real number: each candidate is a program of its own."""
    given = {"search": {"neumann": ["sum", "cg"], "lower_rounds": [1, 3]}, "candidates": 4, "rounds": 4}
    found = search(rk.FedNest(upper_step=0.01, lower_step=0.1, neumann_terms=3, hessian_step=0.2), **given)
    assert len(found.table) == 4
    assert found.best is not None
    assert found.best.neumann == found.table["neumann"][0]
    assert found.edges.keys() <= {"lower_rounds"}
    assert "neumann=" in repr(found)
    found.picture().savefig(tmp_path / "words.png")


# On many devices.

LOPSIDED = rk.Clients(
    upper=[{"a": np.linspace(1, 2, n), "t": np.linspace(-1, n, n)} for n in (1, 5, 2, 7, 3)], weights="size"
)


def on(mesh: Any, tried: list[dict[str, float]], **given: Any) -> rk.Tuning:
    """The search of these candidates for a method with memory, of clients of unequal size."""
    method = rk.ScaffoldSaddle(upper_step=0.02, lower_step=0.02, local_steps=2, batch_size=2)
    score = lambda x, y, memory: {"norm": jnp.sum(x**2) + sum(jnp.sum(a**2) for a in jax.tree.leaves(memory))}
    asked = {"evaluate": score, "metric": "-norm", "cohort": 3, "slots": 3} | given
    engine = None if mesh is None else rk.Simulation(mesh=mesh)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys.modules["rookery.run.tune"], "all_candidates", lambda *_: tried)
        return rk.tune(rk.Minimax(saddle), LOPSIDED, method, (np.ones(2), np.ones(2)), 8, engine=engine, **asked)


def alike(one: rk.Tuning, many: rk.Tuning) -> None:
    """Two searches have the same results."""
    assert one.best == many.best
    np.testing.assert_allclose(one.start, many.start, rtol=1e-10)
    pd.testing.assert_frame_equal(one.table, many.table, rtol=1e-10)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mesh", "seed"), [(2, 0), *(pytest.param(4, seed, marks=pytest.mark.slow) for seed in (0, 5))]
)
def test_candidates_divided_among_devices(mesh: int, seed: int) -> None:
    """Nine candidates, one of which diverges: on four devices there is room for twelve, and there are four slots."""
    tried = [{"upper_step": u, "lower_step": v} for u in (0.01, 0.03, 1e200) for v in (0.02, 0.05, 0.1)]
    tried = [*tried[:6], *tried[7:], {"upper_step": 0.1, "lower_step": 0.1}]
    one, many = on(None, tried, seed=seed), on(mesh, tried, seed=seed)
    alike(one, many)
    assert one.diverged == 2
    assert one.table["round 8"].notna().sum() == 3


@pytest.mark.slow
def test_more_devices_than_candidates_and_clients_that_measure() -> None:
    measure = lambda client, x, y: {
        "norm": client.mean(lambda rows: jnp.mean(rows["a"]) * jnp.sum(x**2), client.upper())
    }
    given = {"evaluate": None, "evaluate_client": measure}
    tried = [{"upper_step": u} for u in (0.01, 0.03, 0.1)]
    mesh = jax.sharding.Mesh(np.asarray(jax.devices()[::-1]), ("any",))
    alike(on(None, tried, **given), on(mesh, tried, **given))


def test_each_device_runs_its_own_candidates() -> None:
    """No device has the carries of all of them, before and after rounds of some."""
    job = Job(rk.Minimax(saddle), LOPSIDED, rk.ScaffoldSaddle(batch_size=2), (jnp.ones(2), jnp.ones(2)), 3)
    sweep = Sweep(job, {"upper_step"}, rk.Simulation(mesh=4))
    values = {"upper_step": (0.01, 0.02, 0.03, 0.04) * 2}
    carries = sweep.start(values, 8)
    ids = np.asarray([5, 1, 8, 8], np.int32)
    some = {"upper_step": values["upper_step"][:4]}
    share = lambda tree: {shard.data.shape[0] for leaf in jax.tree.leaves(tree) for shard in leaf.addressable_shards}
    assert share(carries) == {2}
    carries, finite, replied, _ = sweep.advance(some, carries, ids, 0, 2)
    assert share(carries) == {2}
    assert finite.tolist() == replied.tolist() == [True] * 4


@pytest.mark.parametrize(
    ("engine", "said"),
    [
        (rk.Federation(), r"engine must be a compiled rk.Simulation\(mesh=...\) to tune; got Federation"),
        (rk.Simulation(debug=True), "engine must be a compiled"),
        (rk.Simulation(mesh=5), "mesh must be .* from 1 to 4; got 5"),
    ],
)
def test_engines_that_are_refused(engine: Any, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        search(engine=engine)


def test_devices_of_other_processes_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jax, "process_index", lambda: 1)
    with pytest.raises(ValueError, match="mesh must have devices of this process only; got 'all'"):
        search(engine=rk.Simulation(mesh="all"))


# What is tried.


@pytest.mark.parametrize(("names", "most", "levels"), [(3, 49, 7), (4, 30, 5), (6, 49, 7), (2, 81, 9), (2, 48, 5)])
def test_any_two_values_of_any_two_step_sizes_meet_once(names: int, most: int, levels: int) -> None:
    ranges = {f"s{k}": (0.01, 1.0) for k in range(names)}
    own = type("Own", (), dict.fromkeys(ranges, 0.1))()
    frame = pd.DataFrame(all_candidates(ranges, own, most))
    assert len(frame) == levels**2
    for a in ranges:
        assert frame[a].nunique() == levels
        for b in ranges:
            assert a == b or len(frame[[a, b]].drop_duplicates()) == levels**2
    assert (frame == 0.1).all(axis=1).sum() == 1  # what is set is among them
    assert (frame.min() == 0.01).all()
    assert (frame.max() == 1).all()


def test_one_step_size_and_the_values_themselves() -> None:
    own = rk.FedAvg(step=0.0123456)
    ranges = search_ranges(own, None)
    values = [one["step"] for one in all_candidates(ranges, own, 49)]
    assert len(values) == 13
    assert values[6] == 0.0123456
    assert all(len(f"{value:.12g}".lstrip("0.")) <= 3 for value in values if value != 0.0123456)
    np.testing.assert_allclose(np.diff(np.log10(values)), 1 / 6, atol=5e-3)


@pytest.mark.parametrize("name", algorithms.__all__)
def test_every_algorithm_has_step_sizes_to_search(name: str) -> None:
    method = getattr(rk, name)()
    ranges = search_ranges(method, None)
    assert 1 <= len(ranges) <= 6
    for step, (low, high) in ranges.items():
        assert low < getattr(method, step) < high
    assert len(all_candidates(ranges, method, 49)) in (13, 49)


# When all goes wrong, or is broken off.


def test_if_all_that_go_on_diverge_the_next_best_take_their_places(monkeypatch: pytest.MonkeyPatch) -> None:
    """The metric of the four that go on to the last rung is not finite there."""
    original = Race._run

    def run(self: Any, entrants: Any, end: int, *rest: Any) -> Any:
        if end == 24:
            entrants_seen.append(len(entrants))
        return original(self, entrants, end, *rest)

    def evaluate(x: Any, y: Any) -> dict[str, float]:
        calls.append(1)
        before = 1 + 20 + 16 + 8  # the start, and three rungs
        return {"distance": np.nan if before < len(calls) <= before + 4 else TASK.evaluate(x, y)["distance"]}

    entrants_seen: list[int] = []
    calls: list[int] = []
    monkeypatch.setattr(Race, "_run", run)
    result = race(evaluate=evaluate)
    assert entrants_seen == [4, 4]
    assert result.table["status"].tolist()[:4] == ["finished"] * 4
    assert result.diverged == 5 + 4


def test_all_diverge() -> None:
    result = race([{"upper_step": one["upper_step"], "lower_step": 1e200} for one in TRIED])
    assert result.best is None
    assert result.diverged == 25
    assert result.picture() is not None
    assert "none" in repr(result)


def test_interrupted() -> None:
    """Ctrl-C at the first rung: the best so far."""
    seen = []

    def evaluate(x: Any, y: Any) -> dict[str, float]:
        seen.append(1)
        if len(seen) == 2:
            os.kill(os.getpid(), signal.SIGINT)
        return TASK.evaluate(x, y)

    result = race(evaluate=evaluate)
    assert result.interrupted
    assert result.best is not None
    assert [name for name in result.table if name.startswith("round ")] == ["round 3"]
    assert result.value == result.table["round 3"].min()


# What is refused.


@dataclass(frozen=True)
class NoSteps:
    """Stands for a method without step sizes."""

    size: int = 1
    solves: ClassVar[tuple[type, ...]] = (rk.Bilevel,)

    def init(self, fed: Any, x: Any, y: Any, key: Any) -> Any:
        """Never called."""

    def round(self, fed: Any, state: Any, key: Any) -> Any:
        """Nor this."""


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"search": ["uper_step"]}, "LFedNest has no hyperparameter 'uper_step'; it has: upper_step"),
        ({"search": {"upper_step": (1.0, 0.1)}}, "got 1 to 0.1. Give the lower end first"),
        ({"search": {"upper_step": (0.0, 0.1)}}, "must be of positive numbers, since it is logarithmic; got 0 to 0.1"),
        ({"search": {"upper_step": (-1, 0.1)}}, "must be of positive numbers"),
        ({"search": {"upper_step": (0.1, float("inf"))}}, "must be of positive numbers"),
        ({"search": {"upper_step": 0.1}}, r"must be two numbers, \(low, high\), or a list of values; got 0.1"),
        ({"search": ["lower_rounds"]}, r"lower_rounds=1 needs a range of integers, \(low, high\), or a list of values"),
        ({"search": {"lower_rounds": (1, 4.5)}}, "must be of integers; got 1 to 4.5"),
        ({"search": {"lower_rounds": (0, 4)}}, "must be of positive numbers"),
        ({"search": {"lower_rounds": [1, 0]}}, "lower_rounds"),
        ({"search": {"lower_rounds": [1, 2, 1]}}, r"must be a list of different values; got \[1, 2, 1\]"),
        ({"search": {"lower_rounds": []}}, "must be a list of different values"),
        ({"search": {"lower_rounds": [*range(1, 30)]}}, "candidates must be at least 29, .*; got 25"),
        ({"search": {"lower_rounds": (1, 9), "upper_step": None}, "candidates": 14}, "at least 15 .*; got 14"),
        ({"search": {}}, "search must be names"),
        ({"search": "upper_step"}, "search must be names"),
        ({"method": replace(METHOD, upper_step=lambda t: 0.1 / (t + 1))}, "upper_step is a schedule"),
        ({"method": replace(METHOD, hessian_step="auto"), "search": ["hessian_step"]}, "to search around; got 'auto'"),
        ({"method": NoSteps()}, "must name what to search, with its range: NoSteps has no step sizes. It has: size"),
        ({"candidates": 8}, "candidates must be at least 9 to search 3 step sizes; got 8"),
        ({"candidates": 1, "search": ["upper_step"]}, "candidates must be at least 3 to search 1 step size; got 1"),
        ({"rounds": -1}, "rounds must be an integer of at least 1; got -1"),
        ({"candidates": 0}, "candidates must be an integer of at least 1; got 0"),
        ({"rounds": 0}, "rounds must be an integer of at least 1; got 0"),
        ({"slots": 0}, "slots must be an integer of at least 1; got 0"),
        ({"cohort": 9}, "got 9"),
        ({"metric": "zz"}, "metric='zz' must name a metric .*; it returns distance, gradient"),
        ({"metric": "losss", "evaluate": lambda x, y: {"losss": 1.0}}, "Write '.losss' if higher .* mean 'losses'"),
        ({"metric": "-distanc"}, "metric='distanc' must name a metric .*; it returns distance, gradient"),
    ],
)  # fmt: skip
def test_bad_input(given: dict[str, Any], said: str) -> None:
    before = PROGRAMS.made
    with pytest.raises(ValueError, match=said):
        search(**given)
    assert PROGRAMS.made <= before + 1  # the start, where the metric shows that it is wrong


# The picture.


@pytest.mark.parametrize("names", [1, 2, 3, pytest.param(6, marks=pytest.mark.slow)])
def test_pictures(names: int) -> None:
    ranges = {f"s{k}": (0.01, 1.0) for k in range(names)}
    frame = pd.DataFrame(all_candidates(ranges, type("Own", (), dict.fromkeys(ranges, 0.1))(), 25))
    frame = frame.assign(status="stopped", rounds=3, last=np.geomspace(1e-6, 1e3, len(frame)))
    frame.loc[0, "status"], frame.loc[0, "rounds"] = "finished", 24
    frame.loc[9:11, ["status", "last"]] = "diverged", np.nan
    fig = rk.Tuning(
        frame, METHOD, ranges, "distance", False, 5.0, 24, 1.0, 1.0, False
    ).picture("Distance")  # fmt: skip
    axes = [ax for ax in fig.axes if ax.get_visible()]
    assert len(axes) == {1: 1, 2: 2, 3: 4, 6: 16}[names]  # the pairs, and the scale of colours
    assert axes[0].get_xlabel() == "s0"
    crosses = [line for line in axes[0].get_lines() if line.get_marker() == "x"]
    assert len(crosses) == 3
    fig.draw_without_rendering()


# The command line.


def invoke(*arguments: Any) -> Any:
    return CliRunner().invoke(cli.app, [str(argument) for argument in arguments])


SMALL = ["tune", "quadratic", "-a", "LFedNest", "--clients", 3, "--set", "hessian_step=0.2", "--candidates", 9]


def test_the_command_line_from_end_to_end(tmp_path: Any) -> None:
    ranges = ["--over", "upper_step=0.001:0.1", "--over", "lower-step"]
    result = invoke(*SMALL, "--rounds", 8, *ranges, "--out", tmp_path / "t")
    assert result.exit_code == 0, result.output
    assert (tmp_path / "t" / "landscape.png").read_bytes().startswith(b"\x89PNG")
    told = json.loads((tmp_path / "t" / "tuning.json").read_text())
    table = pd.read_csv(tmp_path / "t" / "candidates.csv")
    assert len(table) == told["tried"] == 9
    assert told["search"] == {"upper_step": [0.001, 0.1], "lower_step": [0.01, 1.0]}
    assert told["best"] == table.loc[0, ["upper_step", "lower_step"]].to_dict()
    assert "of 9 diverged" in result.stdout
    assert told["run"] in result.stdout
    # The largest upper step is best, and the command that looks further is printed.
    assert told["edges"]["upper_step"] == "upper"
    assert "upper_step is best at the upper end of its range, 0.001 to 0.1." in result.stdout
    assert "--candidates 9 --over upper_step=0.01:1 " in told["next"]
    assert told["next"] in result.stdout
    # The command that is printed gives the number that was found.
    program, *arguments = shlex.split(told["run"])
    assert program == "rookery"
    assert "--set hessian_step=0.2" in told["run"]
    run = json.loads(invoke(*arguments, "--json").stdout)
    np.testing.assert_allclose(run["last"]["distance"], told["value"], rtol=1e-8)


@pytest.mark.slow
def test_the_command_line_searches_integers(tmp_path: Any) -> None:
    ranges = ["--over", "lower_rounds=1,2", "--over", "lower_step=0.01:1"]
    result = invoke(*SMALL, "--rounds", 2, *ranges, "--out", tmp_path / "t")
    assert result.exit_code == 0, result.output
    told = json.loads((tmp_path / "t" / "tuning.json").read_text())
    assert told["search"] == {"lower_rounds": [1, 2], "lower_step": [0.01, 1.0]}
    assert told["tried"] == 6
    assert f"--set lower_rounds={told['best']['lower_rounds']} " in told["run"]
    if told["edges"].get("lower_rounds"):
        assert "--over lower_rounds=" in told["next"]


@pytest.mark.slow
def test_the_command_line_on_two_devices(tmp_path: Any) -> None:
    words = [*SMALL, "--rounds", 2, "--over", "upper_step=0.001:0.1", "--over", "lower_step", "--json"]
    one, two = (invoke(*words, *more, "--out", tmp_path / str(k)) for k, more in enumerate(([], ["--mesh", 2])))
    assert (one.exit_code, two.exit_code) == (0, 0), two.output
    assert json.loads(one.stdout)["best"] == json.loads(two.stdout)["best"]
    assert " --mesh 2 " in json.loads(two.stdout)["next"]
    assert "--mesh" not in json.loads(two.stdout)["run"]  # clients would be divided, and there may be too few
    refused = invoke(*words, "--mesh", 9)
    assert refused.exit_code == 2
    assert "got 9" in refused.stderr


def test_json_quiet_and_a_search_that_fails(tmp_path: Any) -> None:
    ranges = ["--over", "upper_step=0.001:0.1", "--over", "lower_step=1e200:1e250"]
    result = invoke(*SMALL, "--rounds", 8, *ranges, "--json", "--out", tmp_path)
    assert result.exit_code == 1
    assert "All 9 candidates diverged. Search smaller steps: rookery tune quadratic" in result.stderr
    told = json.loads(result.stdout)
    assert told["best"] == {}
    assert told["run"] is None
    assert len(told["candidates"]) == told["diverged"] == 9
    new = tmp_path / "new"
    quiet = invoke(*SMALL, "--rounds", 2, "--over", "upper_step", "--over", "lower_step", "--quiet", "--out", new)
    assert (quiet.exit_code, quiet.output) == (0, "")


def test_a_start_that_is_not_finite_is_not_blamed_on_the_steps(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    real = rk.tune

    def tune(*given: Any, **options: Any) -> Any:
        return real(*given, **options | {"evaluate": lambda x, y: {"distance": np.nan}})

    monkeypatch.setattr(cli.tune, "rk", SimpleNamespace(**{**vars(rk), "tune": tune}))
    result = invoke(*SMALL, "--rounds", 2, "--out", tmp_path / "t")
    assert result.exit_code == 1, result.output
    assert "distance is not finite at round 0. The start or the data cause it" in result.stderr
    assert "smaller steps" not in result.stderr


def test_the_command_tries_as_many_as_the_function() -> None:
    assert inspect.signature(rk.tune).parameters["candidates"].default == cli.tune.CANDIDATES


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--over", "uper_step=0.1:1"], "did you mean upper_step"),
        (["--over", "upper_step=1:0.1"], "Give the lower end first"),
        (["--over", "upper_step=-1:1"], "must be of positive numbers"),
        (["--over", "upper_step=0.1"], "must have the form name=low:high"),
        (["--over", "upper_step=a:b"], "must have the form name=low:high"),
        (["--over", "lower_rounds=1,,2"], "must have the form name=low:high"),
        (["--over", "lower_rounds=1:4.5"], "must be of integers"),
        (["--over", "lower_rounds=1,0"], "lower_rounds"),
        (["--candidates", "2"], "must be at least 9"),
        (["--rounds", "0"], "rounds must be"),
        (["--metric", "zz"], "must name a metric that evaluate returns; it returns distance"),
        (["--metric", "loss"], "must name a metric that evaluate returns; it returns distance"),
        (["--set", "upper_step=1", "--set", "lower_step=1"], "--set gives every step size of LFedNest"),
        (["--out", "README.md"], "is a file"),
    ],
)  # fmt: skip
def test_the_command_line_refuses(arguments: list[str], said: str, tmp_path: Any, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "README.md").touch()
    result = invoke(*SMALL, *arguments)
    assert result.exit_code == 2, result.output
    assert said in result.stderr
    assert len(result.stderr.splitlines()) == 1
    assert result.stdout == ""
    assert [path.name for path in tmp_path.iterdir()] == ["README.md"]
