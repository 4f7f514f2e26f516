"""Checkpoints: a resumed run is the uninterrupted one, on every engine, whatever happened to process and disk."""

import copy
import functools
import json
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pandas as pd
import pytest
from jax.sharding import NamedSharding, PartitionSpec

import rookery as rk
from rookery.base import content
from rookery.engines import checkpoints, folders
from rookery.engines.folders import Folder

ENGINES = [rk.Simulation(), rk.Federation()]
on_both = pytest.mark.parametrize("engine", ENGINES, ids=["simulation", "federation"])
slow = functools.partial(pytest.param, marks=pytest.mark.slow)
# Where one engine stands for both: the other is in the slow run.
on_first, on_second = (
    pytest.mark.parametrize(
        "engine",
        [pytest.param(own, marks=pytest.mark.slow if i == left else ()) for i, own in enumerate(ENGINES)],
        ids=["simulation", "federation"],
    )
    for left in (1, 0)
)

SQUARES = rk.SingleLevel(lambda x, b: jnp.mean((x - b) ** 2))
SADDLE = rk.Minimax(lambda x, y, b: jnp.mean((x - b) ** 2) + x @ y - y @ y)
ROWS = [np.array([[1.0, 2.0], [3.0, 4.0], [0.5, 0.5]]), np.array([[5.0, 1.0]]), np.array([[-1.0, 0.5], [2.0, 7.0]])]
CLIENTS = rk.Clients(upper=ROWS)  # of unequal size
ZERO = np.zeros(2)
DITTO = rk.Ditto(step=0.1, local_steps=2, personal_step=0.1, personal_steps=2, proximal=0.5)
GIVEN: dict[str, Any] = {
    "problem": SQUARES,
    "clients": CLIENTS,
    "algorithm": DITTO,
    "init": ZERO,
    "rounds": 6,
    "cohort": 2,
    "seed": 3,
    "every": 2,
    "evaluate": lambda x, y: {"far": jnp.abs(x[1] - 1)},
    "keep_best": "-far",
}


@pytest.fixture(autouse=True)
def _every_evaluation(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every evaluation is saved, however short the run."""
    monkeypatch.setattr(checkpoints, "SHARE", 1e9)
    monkeypatch.setattr(Folder, "busy", lambda self: False)


def same(a: rk.Run, b: rk.Run) -> None:
    """The same run to the last bit, but for the clock."""
    clock = {"columns": "seconds"}
    pd.testing.assert_frame_equal(a.history.drop(**clock), b.history.drop(**clock), check_exact=True)
    pd.testing.assert_frame_equal(a.exchanges, b.exchanges)
    equal((a.state, a.memory), (b.state, b.memory))
    assert (a.best is None) == (b.best is None)
    if a.best is not None and b.best is not None:
        equal((a.best.x, a.best.y, a.best.memory), (b.best.x, b.best.y, b.best.memory))
        assert (a.best.round, a.best.value) == (b.best.round, b.best.value)


def equal(a: Any, b: Any) -> None:
    assert jax.tree.structure(a) == jax.tree.structure(b)
    for u, v in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        assert u.dtype == v.dtype
        np.testing.assert_array_equal(*(words(a) for a in (u, v)))


def words(a: Any) -> Any:
    return jax.random.key_data(a) if jax.dtypes.issubdtype(a.dtype, jax.dtypes.prng_key) else a


@cache
def uncut(federated: bool = False) -> rk.Run:
    """The run that nothing has cut short, for all who compare with it."""
    return rk.solve(**GIVEN, engine=rk.Federation() if federated else rk.Simulation())


def until(rounds: int) -> dict[str, Any]:
    return {"callbacks": [lambda run: run.rounds >= rounds]}


def stored(place: Path) -> list[Any]:
    """All arrays of a saved round."""
    folder, done = Folder(place.parent), int(place.name.removeprefix("round_"))
    shapes = folder.header(done)["arrays"]
    like = {name: [jax.ShapeDtypeStruct(*each) for each in part] for name, part in shapes.items()}
    return jax.tree.leaves(folder.read(done, like))


def saved(folder: Path) -> list[str]:
    return sorted(place.name for place in folder.iterdir() if place.name != "sites")


# Resumed is uninterrupted.


@on_both
def test_resumed_is_uninterrupted(engine: Any, tmp_path: Path) -> None:
    """State, clients' memory, cohorts, history, costs and the best: all as if nothing had happened."""
    given, folder = {**GIVEN, "engine": engine}, tmp_path / "deep" / "run"
    whole = rk.solve(**given)
    first = rk.solve(**given, checkpoint=folder, **until(4))
    assert first.rounds == 4
    assert saved(folder) == ["round_2", "round_4"]
    resumed = rk.solve(**given, checkpoint=folder)
    same(resumed, whole)
    assert resumed.history["seconds"].iloc[-1] > first.history["seconds"].iloc[-1]  # the clock goes on, too
    assert saved(folder) == ["round_4", "round_6"]


def test_ctrl_c_between_two_evaluations_changes_nothing(tmp_path: Path) -> None:
    """The row that it makes goes again, and is not the best meanwhile."""

    class Pressed:
        sees_memory = True

        def open(self, job: Any) -> Any:
            session = rk.Simulation().open(job)
            advance = session.advance

            def one_round(rounds: int) -> Any:
                if session.rounds == 1:
                    os.kill(os.getpid(), signal.SIGINT)
                return advance(1)

            session.advance = one_round
            return session

    there = rk.solve(**GIVEN | {"rounds": 2}).x
    given = {**GIVEN, "evaluate": lambda x, y: {"far": jnp.sum(jnp.abs(x - there))}, "every": 3}
    first = rk.solve(**given | {"engine": Pressed()}, checkpoint=tmp_path / "run")
    assert first.history["round"].tolist() == [0, 2]
    assert first.history["far"].iloc[1] == 0
    same(rk.solve(**given, checkpoint=tmp_path / "run"), rk.solve(**given))


@pytest.mark.slow
def test_the_debugging_run(tmp_path: Path) -> None:
    method = rk.Ditto(step=0.1, personal_step=0.1, personal_steps=1)
    given = {**GIVEN, "algorithm": method, "every": 1, "rounds": 2, "engine": rk.Simulation(debug=True)}
    rk.solve(**given, checkpoint=tmp_path / "run", **until(1))
    same(rk.solve(**given, checkpoint=tmp_path / "run"), rk.solve(**given))


@pytest.mark.slow
@on_first
def test_in_bfloat16(engine: Any, tmp_path: Path) -> None:
    clients = rk.Clients(upper=[jnp.asarray(rows, jnp.bfloat16) for rows in ROWS])
    given = {**GIVEN, "clients": clients, "init": jnp.zeros(2, jnp.bfloat16), "engine": engine, "rounds": 4}
    whole = rk.solve(**given)
    assert whole.x.dtype == jnp.bfloat16
    rk.solve(**given, checkpoint=tmp_path / "run", **until(2))
    same(rk.solve(**given, checkpoint=tmp_path / "run"), whole)


@pytest.mark.slow
def test_two_levels_with_drawn_local_steps(tmp_path: Path) -> None:
    method = rk.ScaffoldSaddle(upper_step=0.1, lower_step=0.1, local_steps=(1, 3))
    given = {**GIVEN, "problem": SADDLE, "algorithm": method, "init": (ZERO, np.ones(2))}
    whole = rk.solve(**given)
    rk.solve(**given, checkpoint=tmp_path / "run", **until(2))
    same(rk.solve(**given, checkpoint=tmp_path / "run"), whole)


class State(NamedTuple):
    x: Any
    y: tuple[()]
    key: Any


@dataclass(frozen=True)
class Walks:
    """A random walk of the server's, and one of each client's, with keys of their own."""

    solves: ClassVar[tuple[type, ...]] = (rk.SingleLevel,)

    def init(self, fed: Any, x: Any, y: Any, key: Any) -> State:
        return State(x, (), jax.random.key(7, impl="rbg"))

    def memory(self, x: Any, y: Any) -> Any:
        return {"at": x, "key": jax.random.key(5)}

    def round(self, fed: Any, state: State, key: Any) -> State:
        def local(client: Any, k: Any, own: Any) -> Any:
            after, draw = jax.random.split(own["key"])
            at = own["at"] + jax.random.normal(draw, own["at"].shape)
            return at, {"at": at, "key": after}

        after, draw = jax.random.split(state.key)
        moved = state.x + jax.random.normal(draw, state.x.shape)
        return State(0.5 * moved + fed.mean(fed.map_state(local, key)), (), after)


@on_first
def test_keys_in_state_and_memory(engine: Any, tmp_path: Path) -> None:
    given = {**GIVEN, "algorithm": Walks(), "engine": engine, "rounds": 4}
    if engine.sees_memory:
        given["evaluate"] = lambda x, y, memory: {"far": jnp.abs(memory["at"][0, 0])}
    whole = rk.solve(**given)
    rk.solve(**given, checkpoint=tmp_path / "run", **until(2))
    same(rk.solve(**given, checkpoint=tmp_path / "run"), whole)


def test_a_finished_run_is_not_run_again(tmp_path: Path) -> None:
    whole = rk.solve(**GIVEN, checkpoint=tmp_path / "run")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(jnp, "abs", None)  # which `evaluate` calls
        again = rk.solve(**GIVEN, checkpoint=tmp_path / "run")
    same(again, whole)


def test_more_rounds_go_on_from_the_end(tmp_path: Path) -> None:
    rk.solve(**GIVEN | {"rounds": 3}, checkpoint=tmp_path / "run")
    resumed = rk.solve(**GIVEN, checkpoint=tmp_path / "run")
    assert resumed.history["round"].tolist() == [0, 2, 4, 6]  # as those of a whole run
    equal(resumed.state, uncut().state)


def passing(x: Any, y: Any) -> dict[str, Any]:
    """Best after round 10 of `EXTENDED`."""
    return {"far": jnp.abs(x[1] - 0.41)}


EXTENDED: dict[str, Any] = {
    **GIVEN,
    "algorithm": rk.FedAvg(step=0.02),
    "cohort": None,
    "evaluate": passing,
    "evaluate_client": lambda client, x, y: {"loss": client.mean(lambda b: jnp.mean((x - b) ** 2), client.upper())},
}


@pytest.mark.parametrize(
    ("every", "lengths"),
    [(1, (10, 12)), *(slow(*own) for own in ((4, (10, 20)), (4, (8, 9, 10, 13)), (3, (2, 10, 11)), (11, (10, 12))))],
)
def test_an_extended_run_is_an_uninterrupted_one(every: int, lengths: tuple[int, ...], tmp_path: Path) -> None:
    """Also where an earlier end is off the schedule and better than all that follows."""
    for rounds in lengths:
        given = {**EXTENDED, "every": every, "rounds": rounds}
        whole = rk.solve(**given)
        for _ in range(2):  # extended, and asked again
            same(rk.solve(**given, checkpoint=tmp_path / "run"), whole)
        assert whole.best is not None
        if every == 4:
            assert whole.best.round == min(rounds, 10 if rounds == 10 else 9 if rounds == 9 else 8)


def test_another_every_keeps_the_rows(tmp_path: Path) -> None:
    """Rows of the first schedule stay; the end off both schedules is dropped, and one on the new schedule is kept."""
    rk.solve(**EXTENDED | {"every": 4, "rounds": 9}, checkpoint=tmp_path / "run")
    found = rk.solve(**EXTENDED | {"every": 5, "rounds": 15}, checkpoint=tmp_path / "run")
    assert found.history["round"].tolist() == [0, 4, 8, 10, 15]
    assert found.best.round == 10
    rk.solve(**EXTENDED | {"every": 4, "rounds": 10}, checkpoint=tmp_path / "other")
    found = rk.solve(**EXTENDED | {"every": 5, "rounds": 15}, checkpoint=tmp_path / "other")
    assert found.history["round"].tolist() == [0, 4, 8, 10, 15]
    assert found.best.round == 10


@pytest.mark.parametrize("first", ["-far", "+far", None])
def test_another_keep_best_is_refused(first: str | None, tmp_path: Path) -> None:
    """A state that was not kept can't be the best."""
    rk.solve(**EXTENDED | {"rounds": 2, "keep_best": first}, checkpoint=tmp_path / "run")
    with pytest.raises(ValueError, match=f"its keep_best is {re.escape(repr(first))}, this run's '-loss'.* another"):
        rk.solve(**EXTENDED | {"rounds": 4, "keep_best": "loss"}, checkpoint=tmp_path / "run")


def measures(text: str = "x[1] - 1", offset: Any = 0.0, **around: Any) -> Any:
    """evaluate(x, y), made from text as if a file had been edited."""
    names = {"jnp": jnp, "np": np, "offset": offset, **around}
    exec(f"def evaluate(x, y):\n    return {{'far': jnp.abs({text}) + offset}}", names)
    return names["evaluate"]


@dataclass
class Distance:
    """A callable with settings."""

    there: Any

    def __call__(self, x: Any, y: Any) -> dict[str, Any]:
        return {"far": jnp.sum(jnp.abs(x - self.there))}


class Plain:
    def __init__(self, there: float) -> None:
        self.there = there

    def far(self, x: Any, y: Any) -> dict[str, Any]:
        return {"far": jnp.sum(jnp.abs(x - self.there))}

    def near(self, x: Any, y: Any) -> dict[str, Any]:
        return {"far": -jnp.sum(jnp.abs(x - self.there))}


def to(there: Any, x: Any, y: Any) -> dict[str, Any]:
    return {"far": jnp.sum(jnp.abs(x - there))}


CORRECTED = {
    "body": (measures(), measures("x[0] - 1"), "its code differs"),
    "constant": (measures(), measures("x[1] - 2"), "its code differs"),
    "array": (measures("x[0] - a[1]", a=np.arange(3.0)), measures("x[0] - a[1]", a=np.ones(3)), "a differs"),
    "key": (measures(offset=jax.random.key(0)), measures(offset=jax.random.key(1)), "offset differs"),
    "helper": (
        measures("far(x)", far=lambda x: x[0]), measures("far(x)", far=lambda x: x[1]), "far differs"
    ),
    "two": (measures("a - b", a=1, b=2), measures("a - b", a=2, b=1), "a, b differ"),
    "callable": (Distance(np.zeros(2)), Distance(np.ones(2)), "there differs"),
    "method": (Plain(0.0).far, Plain(1.0).far, "there differs"),
    "another method": (Plain(0.0).far, Plain(0.0).near, "its code differs"),
    "partial": (functools.partial(to, 0.0), functools.partial(to, 1.0), "the function differs"),
    "jitted": (measures("f(x)", f=jax.jit(lambda x: x[0])), measures("f(x)", f=jax.jit(lambda x: x[1])), "f differs"),
    "mapped": (
        measures("f(x)", f=jax.vmap(lambda x: x + 1)), measures("f(x)", f=jax.vmap(lambda x: x + 2)), "f differs"
    ),
    "optional": (measures(), None, "saved with evaluate, and this run has none"),
    "added": (None, measures(), "saved without evaluate, and this run has one"),
}  # fmt: skip


@pytest.mark.parametrize("case", CORRECTED)
def test_a_corrected_metric_is_told_apart(case: str, tmp_path: Path) -> None:
    before, after, _ = CORRECTED[case]
    assert content.fingerprint(before) != content.fingerprint(after)


@pytest.mark.parametrize("case", ["body", "array", "two", "callable", "optional", "added"])
@pytest.mark.parametrize("rounds", [2, 4])
def test_another_evaluate_is_refused(case: str, rounds: int, tmp_path: Path) -> None:
    """Of a finished run and of one that goes on: no row holds the values of a metric that was corrected since."""
    before, after, message = CORRECTED[case]
    given = {**EXTENDED, "keep_best": None}
    rk.solve(**given | {"rounds": 2, "evaluate": before}, checkpoint=tmp_path / "run")
    with pytest.raises(ValueError, match=f"{message}.*Give the same evaluate, another checkpoint folder, or delete"):
        rk.solve(**given | {"rounds": rounds, "evaluate": after}, checkpoint=tmp_path / "run")


def test_what_an_evaluate_changes_itself_is_named(tmp_path: Path) -> None:
    seen: list[Any] = []
    given = {**EXTENDED, "keep_best": None, "evaluate": lambda x, y: seen.append(x) or {"far": x[0]}}
    rk.solve(**given | {"rounds": 2}, checkpoint=tmp_path / "run")
    with pytest.raises(
        ValueError,
        match=r"evaluate reads other values \(seen differs\)\. .*If evaluate itself changes it, do that in a callback",
    ):
        rk.solve(**given, checkpoint=tmp_path / "run")


def test_another_evaluate_client_is_refused(tmp_path: Path) -> None:
    other = lambda client, x, y: {"loss": client.mean(lambda b: jnp.mean((x - b) ** 4), client.upper())}
    rk.solve(**EXTENDED, checkpoint=tmp_path / "run")
    with pytest.raises(ValueError, match=r"its evaluate_client is another function \(its code differs\)"):
        rk.solve(**EXTENDED | {"evaluate_client": other}, checkpoint=tmp_path / "run")


MEASURE = """
    import functools, itertools, threading
    import jax, jax.numpy as jnp, numpy as np
    import rookery as rk

    class Scale:
        names = {"a", "b", "c", "d"}
        def __init__(self): self.lock, self.by, self.me = threading.Lock(), np.float32(2), self
        @functools.cached_property
        def twice(self): return 2 * self.by
        def __call__(self, x): return x * self.twice if "a" in {"a", "b"} else x

    def made():
        scale, data = Scale(), rk.Clients(upper=[np.ones(3)])
        helper = jax.jit(jax.vmap(lambda x: x + 1))
        def evaluate(x, y, *, of=frozenset({"x", "y", "z"})):
            "In words."
            return {"loss": jnp.sum(scale(helper(x))) + data.n + len([i for i in (1, 2) if "far" in of])}
        return evaluate
"""


def test_a_function_is_the_same_in_another_process() -> None:
    """With sets, locks, caches, cycles, jitted functions and clients around it; also after it was called."""
    source = textwrap.dedent(MEASURE)
    show = "\nimport json\nfrom rookery.base import content\nprint(json.dumps(content.fingerprint(made())))"
    other = subprocess.run(
        [sys.executable, "-c", source + show], capture_output=True, text=True, check=True,
        env=os.environ | {"PYTHONHASHSEED": "7", "JAX_ENABLE_X64": "1"},
    )  # fmt: skip
    names: dict[str, Any] = {"__name__": "study"}
    exec("# Another line.\n" + source, names)
    evaluate = names["made"]()
    found = content.fingerprint(evaluate)
    assert found == json.loads(other.stdout)
    evaluate(jnp.ones(2), ())
    assert content.fingerprint(evaluate) == found


def test_a_schedule_goes_on(tmp_path: Path) -> None:
    given = {**GIVEN, "algorithm": rk.FedAvg(step=lambda t: 0.2 / (1.0 + t), local_steps=2)}
    rk.solve(**given, checkpoint=tmp_path / "run", **until(2))
    same(rk.solve(**given, checkpoint=tmp_path / "run"), rk.solve(**given))


@on_second
def test_what_a_failed_round_wrote_is_not_stored(engine: Any, tmp_path: Path) -> None:
    """The sites have written their memory when the coordinator finds that too few have replied."""
    given: dict[str, Any] = {**GIVEN, "cohort": None, "seed": 2, "every": 100, "rounds": 9, "engine": engine}
    strict, faults = rk.Faults(0.3, minimum=3), rk.Faults(0.3)
    with pytest.raises(rk.RoundFailedError) as caught:
        rk.solve(**given, faults=strict, checkpoint=tmp_path / "run")
    assert 0 < caught.value.run.rounds < 9
    resumed = rk.solve(**given, faults=faults, checkpoint=tmp_path / "run")
    whole = rk.solve(**given, faults=faults)
    equal((resumed.state, resumed.memory), (whole.state, whole.memory))
    assert resumed.history["missing"].iloc[-1] == whole.history["missing"].iloc[-1]


@on_first
def test_memory_that_diverges_is_not_stored(engine: Any, tmp_path: Path) -> None:
    method = rk.Ditto(step=0.1, personal_step=1e100, personal_steps=1)
    with pytest.warns(rk.NonFiniteWarning, match="stopped there"):
        rk.solve(**{**GIVEN, "algorithm": method, "every": 9, "engine": engine}, checkpoint=tmp_path / "run")
    arrays = [a for place in (tmp_path / "run").rglob("round_*") for a in stored(place)]
    assert len(arrays) > 2
    assert all(np.isfinite(a).all() for a in arrays)


# While the run goes on.


def test_a_round_is_saved_as_it_was(tmp_path: Path) -> None:
    """While it is written, the next rounds are computed in the same buffers."""
    size, seen = 300_000, {}

    def evaluate(x: Any, y: Any) -> dict[str, Any]:
        seen[len(seen)] = np.array(x)
        return {}

    clients = rk.Clients(upper=[np.arange(size, dtype=float)[None], np.ones((2, size))])
    rk.solve(SQUARES, clients, rk.FedAvg(step=0.1), np.ones(size), 5, evaluate=evaluate, checkpoint=tmp_path / "run")
    assert saved(tmp_path / "run") == ["round_4", "round_5"]
    for done in (4, 5):
        (x,) = (a for a in stored(tmp_path / "run" / f"round_{done}") if a.size)
        np.testing.assert_array_equal(x, seen[done])
    assert np.abs(seen[4] - seen[5]).max() > 0.05


def test_what_is_being_written_may_be_donated(tmp_path: Path) -> None:
    folder, add = Folder(tmp_path / "run"), jax.jit(lambda x: x + 1, donate_argnums=0)
    x = add(jnp.zeros(10**6))
    for done in range(3):
        folder.write(done, {}, {"carry": x}, done - 1)
        for _ in range(20):
            x = add(x)
    folder.close()
    for done in (1, 2):
        np.testing.assert_array_equal(stored(folder.place(done))[0], np.full(10**6, 1.0 + 20 * done))


def test_saving_takes_a_share_of_the_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rounds are shorter than saving one: few are saved, among them the last; in the end nothing is lost."""
    monkeypatch.undo()
    written: list[int] = []
    write = Folder.write
    monkeypatch.setattr(Folder, "write", lambda self, done, *rest: written.append(done) or write(self, done, *rest))
    given = {**GIVEN, "every": 1, "rounds": 60}
    rk.solve(**given, checkpoint=tmp_path / "run", **until(50))
    assert (written[0], written[-1]) == (1, 50)
    assert len(written) < 25
    same(rk.solve(**given, checkpoint=tmp_path / "run"), rk.solve(**given))


def test_a_round_is_left_out_while_another_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Here as if the first were never finished; the last evaluation is saved all the same."""
    monkeypatch.setattr(Folder, "busy", lambda self: bool(self.rounds()) or self._begun is not None)
    rk.solve(**GIVEN, checkpoint=tmp_path / "run")
    assert saved(tmp_path / "run") == ["round_2", "round_6"]
    monkeypatch.undo()
    folder = Folder(tmp_path / "other")
    assert not folder.busy()
    folder.write(1, {}, {"carry": jnp.zeros(3)}, None)
    end = time.monotonic() + 60
    while folder.busy():
        assert time.monotonic() < end
    assert folder.rounds() == [1]
    folder.close()


def test_an_error_of_the_writer_is_told(tmp_path: Path) -> None:
    """A file may not grow beyond 100 kB, as on a disk that is full: rounds go on, and the next save says so."""
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    clients = rk.Clients(upper=[np.random.default_rng(0).normal(size=(1, 10**5))] * 2)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10**5, limit[1]))
    try:
        with pytest.raises(OSError, match=r"^The checkpoint .*run can't be written \(.*\)\.$"):
            rk.solve(SQUARES, clients, rk.FedAvg(step=0.1), np.zeros(10**5), 2, checkpoint=tmp_path / "run")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
    assert not Folder(tmp_path / "run").rounds()


def test_a_folder_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match=r"can't be written \((NotADirectory|FileExists)Error"):
        rk.solve(**GIVEN, checkpoint=tmp_path / "file" / "run")


def test_an_error_of_the_run_is_the_one_that_is_told(tmp_path: Path) -> None:
    """And what was saved before it is there."""

    def fail(run: rk.Run) -> None:
        if run.rounds == 4:
            raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        rk.solve(**GIVEN, checkpoint=tmp_path / "run", callbacks=[fail])
    assert saved(tmp_path / "run") == ["round_2", "round_4"]
    same(rk.solve(**GIVEN, checkpoint=tmp_path / "run"), uncut())


# Killed.

KILLED = """
    import sys
    import jax.numpy as jnp, numpy as np
    import rookery as rk
    from rookery.engines import checkpoints, folders

    checkpoints.SHARE, folders.Folder.busy = 1e9, lambda self: False
    remembers = sys.argv[3] == "what changed"  # a memory of 24 MB, of which a round changes a fourth
    rows = np.random.default_rng(0).normal(size=(12 if remembers else 2, 1, 500_000))
    given = dict(problem=rk.SingleLevel(lambda x, b: jnp.mean((x - b) ** 2)), clients=rk.Clients(upper=list(rows)),
                 algorithm=rk.Scaffold(step=0.1) if remembers else rk.FedAvg(step=0.1),
                 cohort=3 if remembers else None, init=np.zeros(500_000), every=1)
    if sys.argv[2] == "begin":
        rk.solve(**given, rounds=1000, checkpoint=sys.argv[1])
    rounds = int(sys.argv[2])
    resumed, whole = rk.solve(**given, rounds=rounds, checkpoint=sys.argv[1]), rk.solve(**given, rounds=rounds)
    print(bool(jnp.all(resumed.x == whole.x)), bool(np.all(resumed.memory == whole.memory)) if remembers else True,
          resumed.rounds)
"""


@pytest.mark.slow
@pytest.mark.parametrize("what", ["everything", "what changed"])
def test_killed_in_the_middle_of_writing(what: str, tmp_path: Path) -> None:
    """A process, by a signal that it can't handle: the round before is used, and what is half-written goes away."""
    folder, script = tmp_path / "run", [sys.executable, "-c", textwrap.dedent(KILLED), str(tmp_path / "run")]
    process = subprocess.Popen([*script, "begin", what])
    try:
        wait_for(lambda: Folder(folder).rounds()[-1:] > [2] and stopped_while_writing(process, folder), process)
    finally:
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
    assert half_written(folder)
    last = Folder(folder).rounds()[-1]
    assert ("apart" in Folder(folder).header(last)) == (what == "what changed")
    done = last + 2
    told = subprocess.run([*script, str(done), what], capture_output=True, text=True, timeout=120, check=True)
    assert told.stdout.split() == ["True", "True", str(done)], told.stderr
    assert not half_written(folder)


def stopped_while_writing(process: Any, folder: Path) -> bool:
    """Stops the process if it is writing, and lets it go on where it has just finished."""
    if not half_written(folder):
        return False
    os.kill(process.pid, signal.SIGSTOP)
    os.waitpid(process.pid, os.WUNTRACED)
    if half_written(folder):
        return True
    os.kill(process.pid, signal.SIGCONT)
    return False


def half_written(folder: Path) -> list[Path]:
    return list(folder.glob("round_*.*"))


def wait_for(condition: Callable[[], Any], process: Any) -> None:
    end = time.monotonic() + 100
    while not condition():
        assert process.poll() is None
        assert time.monotonic() < end
        time.sleep(0.001)


@on_second
def test_half_written_rounds_are_not_looked_at(engine: Any, tmp_path: Path) -> None:
    given, folder = {**GIVEN, "engine": engine}, tmp_path / "run"
    rk.solve(**given, checkpoint=folder, **until(4))
    places = [folder, folder / "sites" / "0"] if isinstance(engine, rk.Federation) else [folder]
    for place in places:
        half = place / "round_6.orbax-checkpoint-tmp"
        shutil.copytree(place / "round_4", half)
        shutil.rmtree(half / "arrays")
        (place / "round_1.deleted").mkdir()
    same(rk.solve(**given, checkpoint=folder), rk.solve(**given))
    assert all(saved(place) == ["round_4", "round_6"] for place in places)


def test_what_is_being_written_does_not_change(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread of orbax's writes the header while the run goes on, at times several rounds later."""
    given, write = [], Folder.write

    def watched(self: Folder, done: int, header: Any, *rest: Any) -> None:
        given.append((header, copy.deepcopy(header)))
        write(self, done, header, *rest)

    monkeypatch.setattr(Folder, "write", watched)
    rk.solve(**GIVEN, checkpoint=tmp_path / "run")
    assert len(given) == 3
    assert all(now == then for now, then in given)


# A federation's sites.


@pytest.fixture(scope="module")
def _begun(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("begun") / "run"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(checkpoints, "SHARE", 1e9)
        patch.setattr(Folder, "busy", lambda self: False)
        rk.solve(**GIVEN, engine=rk.Federation(), checkpoint=folder, **until(4))
    return folder


@pytest.fixture
def begun(_begun: Path, tmp_path: Path) -> Path:
    """A federation's checkpoint after 4 rounds, with rounds 2 and 4."""
    return Path(shutil.copytree(_begun, tmp_path / "run"))


def resumed(folder: Path) -> rk.Run:
    return rk.solve(**GIVEN, engine=rk.Federation(), checkpoint=folder)


def test_what_a_client_remembers_stays_with_it(begun: Path) -> None:
    session = rk.solve(**GIVEN | {"rounds": 4})  # in the simulation, where it is seen
    arrays = stored(begun / "round_4")
    assert not any(np.allclose(a, own) for a in arrays for own in session.memory)
    for i in range(3):
        (own,) = stored(begun / "sites" / str(i) / "round_4")
        np.testing.assert_allclose(own, session.memory[i], rtol=1e-12)


def test_those_who_remember_nothing_save_nothing(tmp_path: Path) -> None:
    rk.solve(**GIVEN | {"algorithm": rk.FedAvg(step=0.1)}, engine=rk.Federation(), checkpoint=tmp_path / "run")
    assert saved(tmp_path / "run") == ["round_4", "round_6"]
    assert not (tmp_path / "run" / "sites").exists()


@pytest.mark.parametrize(
    "behind", ["a site", "the coordinator", pytest.param("the coordinator, at the first save", marks=pytest.mark.slow)]
)
def test_the_last_round_that_all_have_is_used(begun: Path, behind: str) -> None:
    """As when the process was killed while some had written already."""
    who = begun / "sites" / "1" if behind == "a site" else begun
    shutil.rmtree(who / "round_4")
    if "first" in behind:
        shutil.rmtree(who / "round_2")
    same(resumed(begun), uncut(federated=True))
    assert saved(begun / "sites" / "2") == ["round_4", "round_6"]


def test_no_round_that_all_have(begun: Path) -> None:
    shutil.rmtree(begun / "sites" / "1")
    with pytest.raises(ValueError, match=r"has saved the rounds \[2, 4\] and client 1 none, so no round"):
        resumed(begun)


def test_a_site_with_another_runs_memory(begun: Path, tmp_path: Path) -> None:
    rk.solve(**{**GIVEN, "seed": 9}, engine=rk.Federation(), checkpoint=tmp_path / "other", **until(4))
    shutil.rmtree(begun / "sites" / "1")
    shutil.copytree(tmp_path / "other" / "sites" / "1", begun / "sites" / "1")
    with pytest.raises(ValueError, match=r"^client 1: .* holds the memory of another run's client\. Delete it"):
        resumed(begun)


def test_a_damaged_site(begun: Path) -> None:
    shutil.rmtree(begun / "sites" / "1" / "round_4" / "arrays")
    with pytest.raises(
        ValueError, match=r"^client 1: .*round_4 is not a checkpoint.*; delete it to go on from round 2"
    ):
        resumed(begun)
    shutil.rmtree(begun / "sites" / "1" / "round_4")
    same(resumed(begun), uncut(federated=True))


@pytest.mark.slow
def test_a_site_that_cannot_be_reached_at_a_save(tmp_path: Path) -> None:
    """The checkpoint is left out, and the one before is kept by all."""

    def transport(sites: Any) -> Any:
        def send(i: int, request: bytes) -> bytes:
            if i == 1 and b'"what": "save", "round": 4' in request:
                raise TimeoutError
            return sites[i].handle(request)

        return send

    given, folder = {**GIVEN, "engine": rk.Federation(transport=transport)}, tmp_path / "run"
    with pytest.warns(UserWarning, match="The checkpoint of round 4 was skipped: not all sites replied"):
        rk.solve(**given, faults=rk.Faults(0.0), checkpoint=folder, **until(4))
    assert saved(folder) == ["round_2"]
    assert saved(folder / "sites" / "0") == ["round_2", "round_4"]
    given["engine"] = rk.Federation()
    same(rk.solve(**given, faults=rk.Faults(0.0), checkpoint=folder), rk.solve(**given, faults=rk.Faults(0.0)))
    with pytest.raises(RuntimeError, match="client 1 did not answer, 3 times, and the run has no faults"):
        rk.solve(**given | {"engine": rk.Federation(transport=transport)}, checkpoint=tmp_path / "other")


# What is refused.

FEDAVG: dict[str, Any] = {**GIVEN, "algorithm": rk.FedAvg(step=0.1), "cohort": None, "seed": 0, "rounds": 2}


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The checkpoint of a finished run; to be copied by those who change it."""
    folder = tmp_path_factory.mktemp("checkpoints") / "run"
    rk.solve(**FEDAVG, checkpoint=folder)
    return folder


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"seed": 1}, r"another run: its seed is 0, this run's 1\. Give another checkpoint folder, or delete this one"),
        ({"cohort": 2}, r"another run: its cohort is 3, this run's 2"),
        ({"algorithm": rk.FedAvg(step=0.2)}, r"another run: its step is '0.1', this run's '0.2'"),
        ({"algorithm": rk.FedAvg(step=lambda t: 0.1)}, r"another run: its step is '0.1', this run's \[0.1, "),
        ({"algorithm": rk.FedSVRG(step=0.1)}, r"another run: its algorithm is 'FedAvg.*, this run's 'FedSVRG"),
        ({"clients": rk.Clients(upper=[*ROWS, ROWS[0]])}, r"another run: its (cohort|clients) is 3, this run's 4"),
        ({"init": np.ones(2)}, r"another run: its start is"),
        ({"clients": rk.Clients(upper=[*ROWS[:2], ROWS[2] + 1e-9])}, r"another run: its data is"),
        ({"rounds": 1}, r"rounds must be at least 2, .*; got 1"),
    ],
)
def test_a_checkpoint_of_another_run(finished: Path, changed: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        rk.solve(**FEDAVG | changed, checkpoint=finished)
    assert str(finished) in str(caught.value)


def test_a_checkpoint_of_another_engine(begun: Path) -> None:
    with pytest.raises(ValueError, match="belongs to another run: its arrays have other shapes or types"):
        rk.solve(**GIVEN, checkpoint=begun)


def penalised(strength: float) -> rk.SingleLevel:
    return rk.SingleLevel(lambda x, b: jnp.mean((x - b) ** 2) + strength * jnp.sum(x**2))


@on_first
def test_a_checkpoint_knows_the_program(engine: Any, tmp_path: Path) -> None:
    folder, table = tmp_path / "run", np.ones(2)
    reading = rk.SingleLevel(lambda x, b: jnp.mean((x - b * table) ** 2))
    given: dict[str, Any] = {**FEDAVG, "problem": penalised(1.0), "engine": engine}
    rk.solve(**given, checkpoint=folder)
    rk.solve(**given | {"problem": reading}, checkpoint=tmp_path / "reading")
    table[1] = 2
    noise = rk.chain(rk.clip(1.0), rk.gaussian(0.1))
    others: list[tuple[Path, dict[str, Any]]] = [
        (folder, {"problem": penalised(100.0)}),
        (folder, {"problem": replace(penalised(1.0), project_upper=lambda x: jnp.clip(x, -1, 1))}),
        (tmp_path / "reading", {"problem": reading}),
        (folder, {"channel": noise}),
        (folder, {"faults": rk.Faults(0.1)}),
    ]
    for path, changed in others:
        with pytest.raises(ValueError, match=r"belongs to another run: its program \(losses, projection"):
            rk.solve(**given | changed, checkpoint=path)
    assert rk.solve(**given | {"rounds": 4}, checkpoint=folder).rounds == 4


def test_a_file_of_an_earlier_version(tmp_path: Path) -> None:
    np.savez(tmp_path / "run.npz", header=np.zeros(3))
    with pytest.raises(
        ValueError, match=r"checkpoint must be a folder; .*run.npz' is a file.*Delete it to start afresh"
    ):
        rk.solve(**FEDAVG, checkpoint=tmp_path / "run.npz")


def cut(place: Path) -> None:
    """Half of every file of the arrays."""
    for path in (place / "arrays").rglob("*"):
        if path.is_file():
            path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


@pytest.mark.parametrize(
    "damage",
    [
        lambda place: [shutil.rmtree(place), place.mkdir()],
        lambda place: shutil.rmtree(place / "header"),
        lambda place: (place / "header" / "metadata").write_text("not JSON"),
        lambda place: (place / "header" / "metadata").write_text("{}"),
        lambda place: shutil.rmtree(place / "arrays"),
        lambda place: shutil.rmtree(place / "arrays" / "d"),
        cut,
    ],
    ids=["empty", "no header", "text", "no format", "no arrays", "no data", "cut"],
)
def test_a_damaged_checkpoint(finished: Path, tmp_path: Path, damage: Any) -> None:
    folder = tmp_path / "run"
    shutil.copytree(finished, folder)
    damage(folder / "round_2")
    with pytest.raises(
        ValueError, match=r"round_2 is not a checkpoint of this program, or is damaged; delete .* afresh"
    ):
        rk.solve(**FEDAVG, checkpoint=folder)


def test_a_later_format(finished: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    shutil.copytree(finished, folder)
    (folder / "round_2" / "header" / "metadata").write_text('{"format": 99}')
    with pytest.raises(ValueError, match="round_2 must have one of the formats 4 to 5 of this version; got 99"):
        rk.solve(**FEDAVG, checkpoint=folder)


# Of a large memory, only the rows that changed are written.

MANY = rk.Clients(upper=[np.array([[float(i % 7), 1.0]]) for i in range(40)])


def crowd(method: Any = DITTO, **more: Any) -> dict[str, Any]:
    return {**GIVEN, "clients": MANY, "algorithm": method, "cohort": 3, "rounds": 9, "every": 1, **more}


@pytest.fixture
def _apart(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(folders, "APART", 1)


def written(folder: Path) -> dict[int, tuple[int, int | None]]:
    """By round, how many clients' rows it has, and the round before it that has the others."""
    headers = {done: Folder(folder).header(done) for done in Folder(folder).rounds()}
    assert all(header["format"] == 5 for header in headers.values())
    return {done: (header["apart"]["rows"], header["apart"]["since"]) for done, header in headers.items()}


@pytest.mark.usefixtures("_apart")
@pytest.mark.parametrize("cohort", [3, slow(40)])
def test_rows_that_changed(cohort: int, tmp_path: Path) -> None:
    given = crowd(cohort=cohort)
    rk.solve(**given, checkpoint=tmp_path / "run", **until(5))
    if cohort == 3:
        assert written(tmp_path / "run") == {1: (40, None)} | {done: (3, done - 1) for done in range(2, 6)}
    else:  # all change
        assert written(tmp_path / "run") == {4: (40, None), 5: (40, None)}
    same(rk.solve(**given, checkpoint=tmp_path / "run"), rk.solve(**given))
    assert written(tmp_path / "run")[9] == ((3, 8) if cohort == 3 else (40, None))


@pytest.mark.usefixtures("_apart")
def test_all_rows_are_written_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Once as many rows have been written as there are, or the chain of rounds is long; older rounds are deleted."""
    monkeypatch.setattr(folders, "_CHAIN", 4)
    rk.solve(**crowd(), checkpoint=tmp_path / "run")
    assert written(tmp_path / "run") == {5: (40, None), 6: (3, 5), 7: (3, 6), 8: (3, 7), 9: (40, None)}
    rk.solve(**crowd(cohort=15, rounds=4), checkpoint=tmp_path / "many")  # 15 + 15 rows, and 15 would be more than 40
    assert written(tmp_path / "many") == {1: (40, None), 2: (15, 1), 3: (15, 2), 4: (40, None)}
    monkeypatch.setattr(folders, "APART", 10**9)  # another version's choice: all in one again
    same(rk.solve(**crowd(rounds=11), checkpoint=tmp_path / "run"), rk.solve(**crowd(rounds=11)))
    assert saved(tmp_path / "run") == ["round_10", "round_11"]


@pytest.mark.usefixtures("_apart")
def test_a_round_goes_back_by_two(tmp_path: Path) -> None:
    """A damaged round is deleted by hand: the run goes on from the one before, and what follows is right."""
    folder = tmp_path / "run"
    rk.solve(**crowd(), checkpoint=folder, **until(5))
    shutil.rmtree(folder / "round_5" / "rows")
    with pytest.raises(ValueError, match=r"round_5 is not .* damaged; delete it to go on from round 4"):
        rk.solve(**crowd(), checkpoint=folder)
    shutil.rmtree(folder / "round_5")
    same(rk.solve(**crowd(), checkpoint=folder), rk.solve(**crowd()))
    shutil.rmtree(folder / "round_3")
    message = r"round_9 builds on round_3, which is missing or damaged; delete round_3 and all later rounds to go on "
    with pytest.raises(ValueError, match=message + "from round 2"):
        rk.solve(**crowd(rounds=10), checkpoint=folder)


@pytest.mark.slow
@pytest.mark.usefixtures("_apart")
@pytest.mark.parametrize("debug", [True, False])
def test_rows_of_several_kinds(debug: bool, tmp_path: Path) -> None:
    """A channel's memory at the clients, random keys, and the debugging run. Quick: `test_rows_that_changed`."""
    channel = rk.top_k(0.5, feedback="error")
    given = crowd(channel=channel, rounds=5, engine=rk.Simulation(debug=debug))
    rk.solve(**given, checkpoint=tmp_path / "run", **until(3))
    assert written(tmp_path / "run") == {1: (40, None), 2: (3, 1), 3: (3, 2)}
    same(rk.solve(**given, checkpoint=tmp_path / "run"), rk.solve(**given))


# The data's identity, and several devices.


def test_the_data_are_digested_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    digested: list[Any] = []
    digest = content.of_arrays
    monkeypatch.setattr(content, "of_arrays", lambda value: digested.append(type(value)) or digest(value))
    clients = rk.Clients(upper=ROWS)
    for name in ("one", "two"):
        rk.solve(**{**FEDAVG, "clients": clients}, checkpoint=tmp_path / name)
    assert digested.count(rk.Clients) == 1
    assert len({digest(rk.Clients(upper=[r.astype(kind) for r in ROWS])) for kind in (np.float32, np.float64)}) == 2


def test_another_number_of_devices(tmp_path: Path) -> None:
    def over(count: int) -> NamedSharding:
        return NamedSharding(jax.make_mesh((count,), ("d",), devices=jax.devices()[:count]), PartitionSpec("d"))

    folder, value = Folder(tmp_path / "run"), np.arange(8.0)
    folder.write(1, {}, {"carry": jax.device_put(value, over(4))}, None)
    folder.wait()
    for count in (2, 1):
        found = folder.read(1, {"carry": jax.device_put(np.zeros(8), over(count))})["carry"]
        assert found.sharding.num_devices == count
        np.testing.assert_array_equal(found, value)
    folder.close()
