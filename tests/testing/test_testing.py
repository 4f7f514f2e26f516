"""The contract for anyone's method: what it catches, by name, and what it says."""

import json
import shutil
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from typer.testing import CliRunner

import rookery as rk
from rookery import cli
from rookery.engines.engine import Job
from rookery.testing import NAMES, Report, Result, check_method, checks
from rookery.testing.clipping import update_norms
from rookery.testing.contract import QUICK

OWN = Path(__file__).parents[2] / "examples" / "own_methods"


class State(NamedTuple):
    x: Any
    y: Any = ()


@dataclass(frozen=True)
class Sound:
    """FedAvg with clients' numbers of steps, which it divides by; what is broken below is a change of it."""

    step: rk.Step = 0.05
    local_steps: rk.Steps = 1
    batch_size: rk.BatchSize = None

    solves: ClassVar = (rk.SingleLevel,)
    marks: ClassVar[Any] = (None, rk.Bookkeeping("τ"))

    def init(self, fed: rk.Fed, x: Any, y: Any, key: Any) -> State:
        return State(x)

    def round(self, fed: rk.Fed, state: State, key: Any) -> State:
        count, order = self.keys(key)
        steps = fed.map(lambda c, k: c.steps(self.local_steps, k, self.batch_size, "upper"), count)

        def local(c: rk.Client, k: Any, steps: Any) -> Any:
            one = lambda i, x: rk.tree.step(x, self.step, self.direction(c, x, c.upper(k, self.batch_size, i)))
            last = c.loop(steps, one, state.x)
            return rk.tree.sub(state.x, last), jnp.asarray(steps, jnp.result_type(*jax.tree.leaves(last)))

        moved, tau = fed.mean(fed.map(local, order, steps), name="moved, τ", bookkeeping=self.marks)
        return State(self.last(rk.tree.step(state.x, 1.0, rk.tree.scale(1 / tau, moved))))

    def keys(self, key: Any) -> Any:
        return jax.random.split(key)

    def direction(self, c: rk.Client, x: Any, batch: Any) -> Any:
        return c.f_x(x, (), batch)

    def last(self, x: Any) -> Any:
        return x


class Unmarked(Sound):
    """τ is clipped together with the update."""

    marks = None


class Wider(Sound):
    """The state's type changes."""

    def last(self, x: Any) -> Any:
        return x.astype(jnp.float16)


class Uncounted(Sound):
    """The gradient of a value is taken past the oracles."""

    def direction(self, c: rk.Client, x: Any, batch: Any) -> Any:
        return jax.grad(lambda x: c.f(x, (), batch))(x)


class ReusesKey(Sound):
    """Two maps draw from one key."""

    def keys(self, key: Any) -> Any:
        return key, key


class ByNumber(Sound):
    """A client's number decides how much it counts."""

    def direction(self, c: rk.Client, x: Any, batch: Any) -> Any:
        return rk.tree.scale(1.0 + c.id.astype(jnp.result_type(x)), c.f_x(x, (), batch))


class Forgetful(Sound):
    """A value of Python's own outlives a round, and no checkpoint has it."""

    seen: ClassVar[list[int]] = []

    def direction(self, c: rk.Client, x: Any, batch: Any) -> Any:
        self.seen.append(1)
        return rk.tree.scale(1 + 0.1 * len(self.seen), c.f_x(x, (), batch))


BROKEN = {
    "loose clip": (Unmarked, r"clipping at 1.01 times the largest update changes the run: .*rk.Bookkeeping"),
    "trace": (Wider, r"a round must keep the shape and type of .x, float\d\d\[3\]; got float16"),
    "keys": (ReusesKey, "two maps are given the same key, .*split it with jax.random.split, or skip"),
    "client order": (ByNumber, "in the opposite order of clients, x.* in one and .* in the other"),
    "equal clients": (Forgetful, "the simulation and .* differ: state: x"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_method_is_caught_by_name(name: str) -> None:
    cls, line = BROKEN[name]
    with pytest.raises(AssertionError, match=line) as caught:
        check_method(cls, only=[name])
    assert str(caught.value).startswith(f"{cls.__name__}: {name} [SingleLevel]: ")
    assert len(str(caught.value).splitlines()) == 1


def test_work_past_the_oracles_is_refused_and_the_other_checks_are_skipped() -> None:
    with pytest.raises(
        AssertionError, match=r"^Uncounted: trace.*client.f must not be differentiated.*test_testing"
    ) as caught:
        check_method(Uncounted)
    assert len(str(caught.value).splitlines()) == 1


def test_a_sound_method_passes_what_the_broken_ones_fail() -> None:
    named = ["trace", "keys", "counts", "loose clip", "client order"]
    report = check_method(Sound(), exchanges=1, gradients=1, only=named)
    assert report.ok
    assert [own.name for own in report.results] == [f"{name} [SingleLevel]" for name in named]
    assert "5 passed, 0 failed, 0 skipped" in str(report)
    assert "1 exchange a round, 1 gradient by each client." in str(report)


@pytest.mark.parametrize(
    ("stated", "line"),
    [
        ({"exchanges": 2}, "a round has 1 exchange; stated: 2"),
        ({"gradients": 5}, "a client computes 1 gradient a round; stated: 5"),
    ],
)
def test_what_is_stated_is_compared(stated: dict[str, int], line: str) -> None:
    with pytest.raises(AssertionError, match=line):
        check_method(Sound, only=["counts"], **stated)


@pytest.mark.slow
def test_the_whole_contract_of_a_sound_method() -> None:
    report = check_method(Sound(), exchanges=1, gradients=1)
    assert [own.outcome for own in report.results] == ["passed"] * len(NAMES)


@dataclass(frozen=True)
class LargeAtFirst:
    """The same exchange before the first round and in each: at first 3 and 4, then 0.6 and 0.8."""

    solves: ClassVar = (rk.SingleLevel,)

    def init(self, fed: rk.Fed, x: Any, y: Any, key: Any) -> State:
        return State(fed.mean(fed.map(lambda c, k: jnp.asarray([3.0, 4.0]), key), name="a"))

    def round(self, fed: rk.Fed, state: State, key: Any) -> State:
        return State(fed.mean(fed.map(lambda c, k: jnp.asarray([0.6, 0.8]), key), name="a"))


def test_the_largest_update_may_be_one_before_the_first_round() -> None:
    clients = rk.Clients(upper=[np.ones((2, 2))] * 3)
    problem = rk.SingleLevel(lambda x, rows: jnp.mean((rows - x) ** 2))
    norms = update_norms(Job(problem, clients, LargeAtFirst(), (jnp.zeros(2), ()), 3))
    assert norms == {"a": pytest.approx(5.0, rel=1e-12)}


def test_a_problem_of_ones_own() -> None:
    rng = np.random.default_rng(1)
    rows = [{"a": rng.normal(size=(n, 2)), "t": rng.normal(size=n)} for n in (2, 7, 1)]
    clients = rk.Clients(upper=rows, weights=[1, 2, 3])
    problem = rk.SingleLevel(lambda x, b: jnp.mean((b["a"] @ x["w"] + x["b"] - b["t"]) ** 2))
    init = {"w": np.zeros(2), "b": np.zeros(())}
    report = check_method(Sound, problem, clients, init, only=["trace", "client order"])
    assert report.ok
    assert [own.name for own in report.results] == ["trace [SingleLevel]", "client order [SingleLevel]"]
    assert "2 passed, 0 failed, 0 skipped" in str(report)


def test_checks_are_for_parametrize() -> None:
    found = list(checks(rk.FedNest(), quick=True))
    kinds = ("Bilevel", "Minimax", "Compositional")
    assert [check.name for check in found] == [f"{name} [{kind}]" for kind in kinds for name in QUICK]
    assert set(QUICK) <= set(NAMES)
    assert repr(found[0]) == "trace [Bilevel]"


def test_a_check_that_does_not_apply_is_skipped() -> None:
    """A draw of its own makes a method random with full batches."""

    class Noisy(Sound):
        def round(self, fed: rk.Fed, state: State, key: Any) -> State:
            key, own = jax.random.split(key)
            new = super().round(fed, state, key)
            return State(new.x + 0.01 * jax.random.normal(own, new.x.shape, new.x.dtype))

    (found,) = check_method(Noisy, only=["client order"]).results
    assert (found.outcome, found.detail) == (
        "skipped",
        "the method is random even with full batches, and another order makes it draw other numbers.",
    )


@dataclass(frozen=True)
class NoSolves:
    step: float = 0.1


@pytest.mark.parametrize(
    ("given", "line"),
    [
        ({"method": NoSolves}, "NoSolves must have solves: ClassVar"),
        ({"method": object()}, "object must be a dataclass"),
        ({"method": Sound, "only": ["loose"]}, "only must name checks; got 'loose'. The checks are: trace, keys"),
        (
            {"method": Sound, "problem": "minimax"},
            r"problem must be one that Sound solves \(SingleLevel\); got 'minimax'",
        ),
        ({"method": Sound, "problem": rk.SingleLevel(lambda x, b: 0)}, "needs clients and init"),
    ],
)
def test_bad_input(given: dict[str, Any], line: str) -> None:
    with pytest.raises((TypeError, ValueError), match=line):
        check_method(**given)


def test_a_report_in_words() -> None:
    report = Report("F", (Result("trace", "passed", "", 1.0), Result("resume", "failed", "x differs", 0.1)))
    assert not report.ok
    assert str(report).splitlines() == [
        "F: 1 passed, 1 failed, 0 skipped",
        "passed  trace",
        "failed  resume  x differs",
    ]


# The command.


def invoke(*arguments: Any) -> Any:
    return CliRunner().invoke(cli.app, [str(argument) for argument in arguments])


BAD = """
import rookery as rk
from dataclasses import dataclass
from typing import ClassVar

@dataclass(frozen=True)
class NoSolves:
    step: float = 0.1
    def init(self, fed, x, y, key): ...
    def round(self, fed, state, key): ...
"""


def test_the_command(tmp_path: Path) -> None:
    shutil.copy(OWN / "g_pbgd.py", tmp_path / "mine_g_pbgd.py")
    file = tmp_path / "mine_g_pbgd.py"
    done = invoke(
        "contract", f"{file}:GPBGD", "--only", "keys", "--only", "counts", "--exchanges", 2, "--set", "local_steps=2"
    )
    assert done.exit_code == 0, done.output
    assert "counts [Bilevel]  passed" in done.stdout
    assert "2 exchanges a round, 3 gradients by each client." in done.stdout
    assert "keeps the contract: 2 passed, 0 failed, 0 skipped" in done.stdout
    failed = invoke("contract", f"{file}:GPBGD", "--only", "counts", "--gradients", 5, "--json")
    assert failed.exit_code == 1
    told = json.loads(failed.stdout)
    assert (told["passed"], told["failed"]) == (0, 1)
    assert told["checks"][0]["detail"] == "a client computes 2 gradients a round; stated: 5.0."
    assert "mine_g_pbgd.py:GPBGD fails 1 of 1 checks." in failed.stderr


@pytest.mark.parametrize(
    "kind",
    [
        "bilevel",
        *(
            pytest.param(k, marks=pytest.mark.slow)
            for k in ("minimax", "compositional", "single-level", "weighted-nodes")
        ),
    ],
)
def test_what_new_writes_names_the_command_and_passes_it(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    name = f"Fresh{kind.replace('-', '')}"
    said = invoke("new", "algorithm", name, "--problem", kind).stdout
    command = said.splitlines()[-1].split()
    assert command == ["rookery", "contract", f"{name.lower()}.py:{name}"]
    few = ["--only", "trace", "--only", "keys"] if kind == "bilevel" else []
    done = invoke(*command[1:], *few)
    assert done.exit_code == 0, done.output


def test_bad_input_of_the_command(tmp_path: Path) -> None:
    file = tmp_path / "bad_method.py"
    file.write_text(BAD)
    for arguments, line in {
        (f"{tmp_path}/none.py:GPBGD",): "There is no file",
        (f"{file}:GPBGD",): "has no 'GPBGD'",
        (f"{file}:NoSolves",): "a frozen dataclass with solves, init and round; bad_method.py:NoSolves is the class "
        "NoSolves without solves",
        ("FedAvg", "--problem", "bilevel"): "problem must be one that FedAvg solves (SingleLevel); got 'bilevel'",
        ("FedAvg", "--set", "stp=1"): "FedAvg has no setting 'stp'; did you mean step",
        ("FedAvg", "--set", "step"): "--set must have the form key=value",
        ("FedAvg", "--only", "clip"): "only must name checks; got 'clip'",
    }.items():
        refused = invoke("contract", *arguments)
        assert refused.exit_code == 2, refused.output
        assert line in refused.stderr
        assert len(refused.stderr.strip().splitlines()) == 1


def test_settings_stay_what_a_class_allows() -> None:
    from rookery.testing.cases import with_full_batches, with_minibatches

    assert with_minibatches(Sound()) == Sound(local_steps=(1, 3), batch_size=2)
    assert with_minibatches(Sound(local_steps=(2, 4), batch_size=5)) == Sound(local_steps=(2, 4), batch_size=5)
    assert with_full_batches(Sound(local_steps=(2, 4), batch_size=5)) == Sound(local_steps=2)
    assert with_full_batches(replace(Sound(), local_steps=3)).local_steps == 3
