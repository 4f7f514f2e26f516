"""`solve`: the history, the best state, callbacks, schedules, sweeps, Ctrl-C and the debugging engine."""

import json
import os
import pickle
import re
import signal
import subprocess
import sys
import textwrap
import threading
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pandas as pd
import pytest
from matplotlib.figure import Figure

import rookery as rk
from rookery import report
from rookery.engines.engine import PROGRAMS
from rookery.engines.simulation.device import Session

COUNTED = [
    "exchanges",
    "bytes_up",
    "bytes_down",
    "missing",
    "samples_busiest",
    "samples_upper",
    "samples_lower",
    "gradients",
    "products",
]
CURVATURE, TARGET = [1.0, 2.0, 4.0], [1.0, -1.0, 3.0]


def loss(x: Any, batch: Any) -> Any:
    """½ a (x − t)² a sample."""
    return jnp.mean(0.5 * batch["a"][:, None] * (x - batch["t"][:, None]) ** 2) * x.shape[0]


def saddle(x: Any, y: Any, batch: Any) -> Any:
    a, t = jnp.mean(batch["a"]), jnp.mean(batch["t"])
    return 0.5 * a * x @ x - t * jnp.sum(x) + x @ y - 0.5 * a * y @ y


SINGLE, SADDLE = rk.SingleLevel(loss), rk.Minimax(saddle)
CLIENTS = rk.Clients(upper=[{"a": np.array([a]), "t": np.array([t])} for a, t in zip(CURVATURE, TARGET, strict=True)])
START = np.array([5.0, -2.0])


def value(x: Any, y: Any = None) -> dict[str, Any]:
    return {"size": jnp.sum(x**2), "first": x[0]}


def run(rounds: int, **given: Any) -> rk.Run:
    method = given.pop("method", rk.FedAvg(step=0.1, local_steps=2))
    return rk.solve(SINGLE, CLIENTS, method, START, rounds, **{"evaluate": value} | given)


def by_hand(rounds: int, step: Any = 0.1, local_steps: int = 2) -> np.ndarray:
    """x at the start and after every round of FedAvg."""
    x, seen = START, [START]
    for t in range(rounds):
        own = []
        for a, target in zip(CURVATURE, TARGET, strict=True):
            x_i = x
            for _ in range(local_steps):
                x_i = x_i - (step(t) if callable(step) else step) * a * (x_i - target)
            own.append(x_i)
        x = np.mean(own, axis=0)
        seen.append(x)
    return np.stack(seen)


def same(a: rk.Run, b: rk.Run) -> None:
    """Exactly the same run, but for the clock."""
    pd.testing.assert_frame_equal(
        a.history.drop(columns="seconds"), b.history.drop(columns="seconds"), check_exact=True
    )
    pd.testing.assert_frame_equal(a.exchanges, b.exchanges)
    assert jax.tree.structure(a.state) == jax.tree.structure(b.state)
    for u, v in zip(jax.tree.leaves(a.state), jax.tree.leaves(b.state), strict=True):
        np.testing.assert_array_equal(u, v)


# The history.


def test_columns_and_counts() -> None:
    found = run(4)
    assert list(found.history.columns) == ["round", *COUNTED, "seconds", "size", "first"]
    assert found.history["round"].tolist() == [0, 1, 2, 3, 4]
    rounds = found.history["round"].to_numpy()
    x_bytes = START.nbytes
    for name, each in {
        "exchanges": 1,
        "bytes_up": 3 * x_bytes,
        "bytes_down": 3 * (x_bytes + 8),  # x and the step
        "missing": 0,
        "samples_busiest": 2,
        "samples_upper": 6,
        "samples_lower": 0,
        "gradients": 6,
        "products": 0,
    }.items():
        assert found.history[name].tolist() == (each * rounds).tolist(), name
    assert (np.diff(found.history["seconds"]) > 0).all()
    x = by_hand(4)
    np.testing.assert_allclose(found.history["size"], np.sum(x**2, axis=1), rtol=1e-12)
    np.testing.assert_allclose(found.history["first"], x[:, 0], rtol=1e-12)
    assert found.exchanges.to_dict("records") == [
        {
            "name": "x",
            "kind": "mean",
            "shape": "(2)",
            "count": 1,
            "bytes_up": 3 * x_bytes,
            "bytes_down": 3 * (x_bytes + 8),
        }
    ]
    assert repr(found).startswith("Run(rounds=4, size=")


@pytest.mark.parametrize(
    ("rounds", "every", "expected"), [(6, 2, [0, 2, 4, 6]), (7, 3, [0, 3, 6, 7]), (2, 5, [0, 2]), (0, 1, [0])]
)
def test_when_it_is_evaluated(rounds: int, every: int, expected: list[int]) -> None:
    """At the start, every `every` rounds and at the end, on the variables of that very round."""
    found = run(rounds, every=every)
    assert found.history["round"].tolist() == expected
    np.testing.assert_allclose(found.history["first"], by_hand(rounds)[expected, 0], rtol=1e-12)
    np.testing.assert_allclose(found.x, by_hand(rounds)[-1], rtol=1e-12)
    assert found.rounds == rounds
    assert not found.interrupted


def test_many_rounds_in_one_call_are_the_same_run() -> None:
    """The rounds are grouped by the clock: their number in a call must not matter."""
    one_by_one, grouped = run(40, every=1), run(40, every=40)
    np.testing.assert_allclose(grouped.x, one_by_one.x, rtol=1e-13)
    last = lambda r: r.history.drop(columns=["seconds", "size", "first"]).iloc[-1].tolist()
    assert last(one_by_one) == last(grouped)


def test_without_evaluate() -> None:
    found = run(3, evaluate=None)
    assert list(found.history.columns) == ["round", *COUNTED, "seconds"]
    assert found.best is None


@pytest.mark.parametrize("every", [1, 7])
def test_without_evaluation_rounds_go_in_long_calls(
    every: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """With the rows and the counts of a run that stops at each of them."""
    calls: list[int] = []
    advance = Session.advance
    monkeypatch.setattr(Session, "advance", lambda self, count: calls.append(count) or advance(self, count))
    looked = run(300, every=every)
    assert len(calls) >= 300 / every
    for more in ({}, {"checkpoint": tmp_path / "run"}):
        calls.clear()
        found = run(300, every=every, evaluate=None, **more)
        assert sum(calls) == 300
        assert len(calls) <= 12
        columns = ["round", *COUNTED]
        pd.testing.assert_frame_equal(found.history[columns], looked.history[columns])
        pd.testing.assert_frame_equal(found.exchanges, looked.exchanges)
        assert (found.history["seconds"].diff()[1:] > 0).all()
        np.testing.assert_array_equal(found.x, looked.x)


def test_a_run_advanced_by_hand_is_that_of_solve() -> None:
    """State, memory and counts, however the rounds are divided."""
    given = {name: SCAFFOLD[name] for name in ("problem", "clients", "algorithm", "init", "cohort", "seed")}
    whole = rk.solve(**given, rounds=9)
    with rk.session(**given) as stepped:
        before = stepped.state
        assert [stepped.advance(count) for count in (1, 0, 5)] == [1, 0, 5]
        assert stepped.advance(3) == 3
        assert (stepped.rounds, stepped.stopped) == (9, None)
        for a, b in zip(jax.tree.leaves(stepped.state), jax.tree.leaves(whole.state), strict=True):
            np.testing.assert_array_equal(a, b)
        for a, b in zip(jax.tree.leaves(stepped.memory), jax.tree.leaves(whole.memory), strict=True):
            np.testing.assert_array_equal(a, b)
        assert stepped.counts == whole.history.iloc[-1][COUNTED].to_dict()
        np.testing.assert_array_equal(before.x, START)  # a copy: the rounds have not run over it
        with pytest.raises(ValueError, match="rounds must be"):
            stepped.advance(-1)


def test_a_run_advanced_by_hand_stops() -> None:
    with rk.session(SINGLE, CLIENTS, rk.FedAvg(step=1e200), START) as stepped:
        completed = stepped.advance(9)
        assert completed < 9
        assert "is not finite" in str(stepped.stopped)
        assert np.isfinite(stepped.state.x).all()
        assert stepped.advance(2) == 0
    with pytest.raises(TypeError, match=r"engine must be rk\.Simulation"):
        rk.session(SINGLE, CLIENTS, rk.FedAvg(), START, engine=rk.Simulation)  # type: ignore[arg-type]


def test_errors_are_public() -> None:
    assert issubclass(rk.MemoryLimitError, MemoryError)
    assert issubclass(rk.HostError, RuntimeError)


# What a run can be asked for.


def test_a_run_is_saved(tmp_path: Path) -> None:
    found = run(6, every=2, evaluate=wave, keep_best="-loss")
    found.save(tmp_path / "new" / "run")
    folder = tmp_path / "new" / "run"
    pd.testing.assert_frame_equal(pd.read_csv(folder / "history.csv"), found.history)
    pd.testing.assert_frame_equal(pd.read_csv(folder / "exchanges.csv"), found.exchanges)
    weights = rk.load_weights(folder / "weights.safetensors")
    assert found.best is not None
    np.testing.assert_array_equal(weights["x"], found.x)
    np.testing.assert_array_equal(weights["best.x"], found.best.x)
    settings = json.loads((folder / "settings.json").read_text())
    assert (settings["algorithm"], settings["hyperparameters"]["step"], settings["rounds"]) == ("FedAvg", 0.1, 6)
    assert settings["best"] == {"round": found.best.round, "value": found.best.value}
    with pytest.raises(ValueError, match=r"folder must be a new folder; .*run already holds .*\. Choose another"):
        found.save(folder)


def test_a_run_is_pickled() -> None:
    method = rk.with_server_optimizer(rk.FedAvg(step=0.1), upper=optax.adam(0.1))
    found = run(3, method=method, keep_best="-size")
    again = pickle.loads(pickle.dumps(found))
    assert jax.tree.structure(again.state) == jax.tree.structure(found.state)
    for a, b in zip(jax.tree.leaves(again.state), jax.tree.leaves(found.state), strict=True):
        np.testing.assert_array_equal(a, b)
    np.testing.assert_array_equal(again.state.server_optimizer.upper[0].mu, found.state.server_optimizer.upper[0].mu)
    pd.testing.assert_frame_equal(again.history, found.history)


def test_a_run_is_plotted() -> None:
    found = run(6, every=2, evaluate=wave)
    for x, across in (
        ("round", [0, 2, 4, 6]),
        ("gradients", found.history["gradients"]),
        ("bytes", found.history["bytes_up"] + found.history["bytes_down"]),
    ):
        axes = found.plot("loss", x=x, ax=Figure().subplots())
        np.testing.assert_array_equal(axes.lines[0].get_xdata(), across)
        np.testing.assert_array_equal(axes.lines[0].get_ydata(), found.history["loss"])
    assert [line.get_label() for line in found.plot(ax=axes).lines] == ["loss", "accuracy", "loss"]
    for given, message in (
        ({"x": "gradient"}, "x must be one of round, .*; got 'gradient'. Did you mean 'gradients'"),
        ({"metrics": ["los"]}, r"metrics of the run \(accuracy, loss\); got 'los'. Did you mean 'loss'"),
    ):
        with pytest.raises(ValueError, match=message):
            found.plot(*given.pop("metrics", []), **given)
    with pytest.raises(TypeError, match=r"ax must be matplotlib axes, .*; got 3"):
        found.plot(ax=3)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="no metrics to plot"):
        run(1, evaluate=None).plot()


# The best state.


def wave(x: Any, y: Any) -> dict[str, float]:
    """A metric that is best in the middle of the run: x crosses 2.2 on its way."""
    off = float(jnp.abs(x[0] - 2.2))
    return {"accuracy": -off, "loss": off}


@pytest.mark.parametrize("keep_best", ["accuracy", "+accuracy", "loss", "-loss"])
def test_keep_best(keep_best: str) -> None:
    x = by_hand(12)
    best = int(np.argmin(np.abs(x[:, 0] - 2.2)))
    assert 0 < best < 12
    assert abs(x[best, 0] - 2.2) < 0.9 * np.abs(np.delete(x[:, 0], best) - 2.2).min()
    found = run(12, evaluate=wave, keep_best=keep_best)
    assert found.best is not None
    assert found.best.round == best
    np.testing.assert_allclose(found.best.x, x[best], rtol=1e-12)  # its own copy: later rounds have not run over it
    name = keep_best.lstrip("+-")
    assert found.best.value == found.history[name][best]
    np.testing.assert_allclose(found.x, x[-1], rtol=1e-12)


@pytest.mark.parametrize("name", ["error_rate", "mean_error", "loss_test"])
def test_the_best_of_a_name_that_tells(name: str) -> None:
    """It used to be the state of the highest error rate."""
    found = run(12, evaluate=lambda x, y: {name: wave(x, y)["loss"]}, keep_best=name)
    assert found.best is not None
    assert found.best.value == found.history[name].min()


def test_a_name_that_does_not_tell_is_refused() -> None:
    with pytest.raises(ValueError, match=r"'first' does not say which way is better. Write '\+first'"):
        run(1, keep_best="first")
    with pytest.raises(ValueError, match="keep_best='loss' needs evaluate="):
        run(1, evaluate=None, keep_best="loss")


def test_the_first_of_equals_is_kept_and_nan_is_never_best() -> None:
    scores = iter([np.nan, 1.0, 2.0, 2.0, np.nan])
    found = run(4, evaluate=lambda x, y: {"score": next(scores)}, keep_best="score")
    assert found.best is not None
    assert (found.best.round, found.best.value) == (2, 2.0)


# Callbacks.


def test_callbacks_see_the_run_so_far() -> None:
    seen: list[rk.Run] = []
    run(5, every=2, callbacks=[seen.append])
    assert [r.rounds for r in seen] == [2, 4, 5]
    assert [len(r.history) for r in seen] == [2, 3, 4]
    x = by_hand(5)
    for r in seen:  # each keeps its own state, although the run has gone on
        np.testing.assert_allclose(r.x, x[r.rounds], rtol=1e-12)


def test_a_callback_ends_the_run() -> None:
    also = []
    found = run(10, every=2, callbacks=[lambda r: r.rounds >= 4, also.append])
    assert found.rounds == 4
    assert found.interrupted
    assert found.history["round"].tolist() == [0, 2, 4]
    assert len(also) == 2  # the others are still called
    np.testing.assert_allclose(found.x, by_hand(4)[-1], rtol=1e-12)
    assert run(3, callbacks=[lambda r: 1]).rounds == 3  # only True itself ends it


SCAFFOLD: dict[str, Any] = {
    "problem": SADDLE,
    "clients": CLIENTS,
    "algorithm": rk.ScaffoldSaddle(upper_step=0.1, lower_step=0.1, local_steps=(1, 3)),
    "init": (START, np.array([0.5, 0.5])),
    "rounds": 9,
    "cohort": 2,
    "seed": 3,
    "every": 2,
    "evaluate": lambda x, y: {"x0": x[0], "far": jnp.abs(x[1] + 1)},
    "keep_best": "-far",
}


# Schedules and sweeps.


@pytest.mark.parametrize("every", [1, 7])
def test_a_schedule_is_its_value_in_each_round(every: int) -> None:
    schedule = lambda t: 0.2 / (1.0 + t)
    found = run(7, every=every, method=rk.FedAvg(step=schedule, local_steps=2))
    assert re.fullmatch(r"<function \S*<lambda>>", found.settings["hyperparameters"]["step"])  # without an address
    assert report.plain(schedule) == found.settings["hyperparameters"]["step"]
    expected = by_hand(7, schedule)
    np.testing.assert_allclose(found.x, expected[-1], rtol=1e-12)
    np.testing.assert_allclose(found.history["first"], expected[found.history["round"], 0], rtol=1e-12)
    assert np.abs(expected[-1] - by_hand(7, lambda t: schedule(t + 1))[-1]).max() > 1e-2  # the first round is round 0


def test_a_sweep_over_a_float_compiles_once() -> None:
    run(2)
    before = PROGRAMS.made
    for step in (0.2, 0.3, 1):  # an int where a float is asked for is one
        np.testing.assert_allclose(
            run(2, method=rk.FedAvg(step=step, local_steps=2)).x, by_hand(2, step)[-1], rtol=1e-12
        )
    run(2, seed=5)
    assert PROGRAMS.made == before
    run(2, method=rk.FedAvg(step=0.2, local_steps=3))  # whereas an int is static
    assert PROGRAMS.made == before + 1


# Seeds.


def test_the_seed_decides_the_run() -> None:
    runs = [rk.solve(**SCAFFOLD | {"seed": seed}) for seed in (3, 3, 4)]
    same(runs[0], runs[1])
    assert not np.allclose(runs[0].x, runs[2].x)


# Ctrl-C.


def test_ctrl_c_returns_the_run_so_far() -> None:
    before = signal.getsignal(signal.SIGINT)

    def press(r: rk.Run) -> None:
        if r.rounds == 3:
            os.kill(os.getpid(), signal.SIGINT)

    found = run(50, callbacks=[press])
    assert found.interrupted
    assert found.rounds == 3
    assert found.history["round"].tolist() == [0, 1, 2, 3]
    np.testing.assert_allclose(found.x, by_hand(3)[-1], rtol=1e-12)
    assert signal.getsignal(signal.SIGINT) is before
    assert run(2).rounds == 2  # and the next run is not interrupted


def test_a_second_ctrl_c_stops_at_once() -> None:
    def press(r: rk.Run) -> None:
        for _ in range(2):
            os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        run(50, callbacks=[press])


@pytest.mark.slow
def test_ctrl_c_between_two_evaluations(tmp_path: Path) -> None:
    """In a process of its own: the run ends within moments, with a row and a checkpoint for where it stopped."""
    script = textwrap.dedent("""
        import os, signal, sys, threading
        import jax.numpy as jnp, numpy as np
        import rookery as rk

        def evaluate(x, y):
            if x == 0:  # at the start alone
                threading.Timer(1.0, lambda: os.kill(os.getpid(), signal.SIGINT)).start()
            return {"x": x}

        problem = rk.SingleLevel(lambda x, b: jnp.mean((x - b) ** 2))
        clients = rk.Clients(upper=[np.array([1.0]), np.array([3.0])])
        run = rk.solve(problem, clients, rk.FedAvg(step=0.01), np.zeros(()), 10**9, every=10**9, evaluate=evaluate,
                       checkpoint=sys.argv[1])
        print(run.interrupted, run.history["round"].tolist() == [0, run.rounds], 0 < run.rounds < 10**9)
        print(np.isclose(run.history["x"].iloc[-1], float(run.x)))
    """)
    folder = tmp_path / "run"
    done = subprocess.run(
        [sys.executable, "-c", script, str(folder)], capture_output=True, text=True, timeout=120, check=True
    )
    assert done.stdout.split() == ["True"] * 4, done.stdout + done.stderr
    assert len(list(folder.glob("round_*"))) == 1


def test_a_run_in_a_thread() -> None:
    """Where signals cannot be handled, a run goes on without."""
    found: list[rk.Run] = []
    thread = threading.Thread(target=lambda: found.append(run(2)))
    thread.start()
    thread.join()
    np.testing.assert_allclose(found[0].x, by_hand(2)[-1], rtol=1e-12)


# The debugging engine.


@pytest.mark.slow
def test_debug_equals_compiled() -> None:
    given = SCAFFOLD | {"rounds": 4}
    compiled, plain = rk.solve(**given), rk.solve(**given, engine=rk.Simulation(debug=True))
    for u, v in zip(jax.tree.leaves(compiled.state), jax.tree.leaves(plain.state), strict=True):
        np.testing.assert_allclose(u, v, rtol=1e-12, atol=1e-14)
    exact = ["round", *COUNTED]
    pd.testing.assert_frame_equal(compiled.history[exact], plain.history[exact])


def test_debug_names_client_round_and_local_step() -> None:
    """Client 1 multiplies x by −10¹⁰⁰ at every local step: the fourth of the first round is infinite."""
    data = [{"a": np.array([a]), "t": np.array([0.0])} for a in (1.0, 1e100, 2.0)]
    clients, method = rk.Clients(upper=data), rk.FedAvg(step=1.0, local_steps=5)
    with pytest.raises(
        rk.NonFiniteError, match=r"round 1, client 1, in the map at single_level.py:\d+, local step 4 of 5"
    ):
        rk.solve(SINGLE, clients, method, np.ones(1), 3, engine=rk.Simulation(debug=True))
    # With one local step it takes rounds instead: 10¹⁰⁰ᵗ/3 after round t.
    method = rk.FedAvg(step=1.0, local_steps=1)
    with pytest.raises(rk.NonFiniteError, match=r"round 4, client 1, .*local step 1 of 1"):
        rk.solve(SINGLE, clients, method, np.ones(1), 6, engine=rk.Simulation(debug=True))
