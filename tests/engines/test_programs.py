"""Programs are found by what they are: equal ones are compiled once, others are told apart, and a site works once."""

import functools
import os
import subprocess
import sys
import types
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import rookery as rk
from rookery.base import compat, jaxprs
from rookery.base.programs import Programs
from rookery.engines import engine as engines
from rookery.engines.checks import values
from rookery.engines.engine import PROGRAMS
from rookery.engines.federation.site import Site
from rookery.language.loops import rarely

X, Y = jnp.arange(3.0), jnp.ones((2, 2))


def of(fn: Callable[..., Any], *args: Any) -> str:
    """The fingerprint of a function's program: its constants are inputs, and what it does not need is left out."""
    traced, _ = jaxprs.trace(fn, *args)
    return jaxprs.fingerprint(jaxprs.prune(jaxprs.open_up(traced))[0])


def new(*calls: Callable[[], Any]) -> int:
    """How many programs these calls add."""
    before = PROGRAMS.made
    for call in calls:
        call()
    return PROGRAMS.made - before


# The fingerprint.


def test_names_and_inputs_that_are_not_needed_make_no_difference() -> None:
    first = of(lambda a, b: {"sum": jnp.sum(jnp.exp(a) * 0.1718)}, X, Y)
    second = of(lambda old, a: {"total": jnp.sum(jnp.exp(a[1]) * 0.1718)}, Y, [Y, X])
    assert first == second


def test_inputs_are_told_apart_by_their_place() -> None:
    assert of(lambda a, b: a - 2 * b, X, X) != of(lambda a, b: b - 2 * a, X, X)


@pytest.mark.parametrize("wrapped", [lambda f: f, jax.jit, lambda f: lambda a: jax.lax.map(f, a)])
def test_what_a_function_closes_over_is_an_input_and_a_number_in_its_code_is_not(wrapped: Any) -> None:
    cos = wrapped(jnp.cos)
    scaled = lambda values: of(lambda a: cos(a) * values, X)
    assert scaled(np.array([1.0, 2.0, 3.0])) == scaled(np.array([3.0, 4.0, 5.0]))
    assert scaled(np.array([1.0, 2.0, 3.0])) != scaled(np.float32([1.0, 2.0, 3.0]))
    written = lambda i: of(wrapped(lambda a: jnp.tanh(a) + i), X)
    assert written(1) == written(1)
    assert written(1) != written(2)


def test_types_and_weak_types_are_told_apart() -> None:
    double = lambda a: 2 * a
    assert len({of(double, jnp.ones(5, dtype)) for dtype in (float, jnp.float32, jnp.int32, jnp.bfloat16)}) == 4
    assert of(double, jnp.ones(5)) != of(double, jnp.ones(7))
    strong, weak = of(lambda a: np.float32(0.3125), X), of(lambda a: jnp.float32(1) * 0 + 0.3125, X)
    assert strong != weak
    assert of(double, jnp.ones(())) != of(double, 1.0)


def test_equations_inside_a_nested_program_are_told_apart() -> None:
    def nested(by: float) -> str:
        return of(lambda a: jax.lax.scan(lambda c, _: (c * by, None), a, None, length=2)[0], X)

    assert nested(2.0) == nested(2.0)
    assert nested(2.0) != nested(3.0)


def test_derivatives_of_a_function_of_its_own_rule_make_no_difference() -> None:
    """Each trace of jax.nn.relu makes new functions for the derivative, which is not taken any more."""
    gradient = lambda: of(lambda a: jax.grad(lambda a: jnp.sum(jax.nn.relu(a)) + jnp.sum(jax.nn.silu(a)))(a), X)
    value = lambda: of(lambda a: jax.nn.relu(a), X)
    assert gradient() == gradient()
    assert value() == value()
    assert of(lambda a: jax.nn.relu(a), X) != of(lambda a: jax.nn.silu(a), X)
    traces = (jaxprs.trace(lambda a: jax.nn.relu(a) + jax.nn.silu(a), X)[0].jaxpr for _ in range(2))
    first, second = map(jaxprs.identified, traces)
    assert first == second  # the objects as well, which decide whether a compiled program is used again


def test_rules_for_batching_are_told_apart() -> None:
    """They are used where clients are vectorised; those of `client.when` are the same in every trace."""

    def scaled(by: float) -> Any:
        @jax.custom_batching.custom_vmap
        def same(a: Any) -> Any:
            return a * 1.0

        same.def_vmap(lambda size, batched, a: (a * by, True))
        return of(lambda a: same(a), X)

    assert scaled(2.0) != scaled(3.0)
    rare = lambda by: of(lambda a: rarely(a[0] > 0, lambda: a * by, a), X)
    assert rare(2.0) == rare(2.0)
    assert rare(2.0) != rare(3.0)


def test_callbacks_are_told_apart() -> None:
    shape = jax.ShapeDtypeStruct((), np.float32)
    traced = [
        jaxprs.trace(lambda a, by=by: jax.pure_callback(lambda v: v * by, shape, a), np.float32(1))[0].jaxpr
        for by in (2, 3)
    ]
    assert len({jaxprs.fingerprint(own) for own in traced}) == 2
    assert jaxprs.fingerprint(traced[0]) == jaxprs.fingerprint(traced[0])


def test_settings_of_jax_are_told_apart() -> None:
    traced = jaxprs.trace(lambda a: a @ a, X)[0].jaxpr
    found = [jaxprs.fingerprint(traced)]
    for setting in (
        jax.threefry_partitionable(not jax.config.jax_threefry_partitionable),
        jax.enable_x64(not jax.config.jax_enable_x64),
        jax.default_matmul_precision("highest"),
    ):
        with setting:
            found.append(jaxprs.fingerprint(traced))
    assert len(set(found)) == 4
    assert jaxprs.fingerprint(traced) == found[0]


# The programs.


def test_programs_are_bounded_and_the_oldest_are_dropped() -> None:
    programs, made = Programs(most=2), []
    make = lambda key: programs.find(key, lambda: made.append(key) or key.upper())
    assert [make(key) for key in "abacabc"] == list("ABACABC")
    assert made == ["a", "b", "c", "b", "c"]  # a is used between all of them, and stays
    assert programs.made == 5
    assert len(programs._programs) == 2
    programs.clear()
    assert len(programs._programs) == 0


def mean_problem() -> rk.SingleLevel:
    return rk.SingleLevel(lambda x, batch: jnp.mean((x - batch) ** 2))


def test_an_engine_serves_again_with_other_data() -> None:
    engine, problem = rk.Federation(), mean_problem()
    for value in (1.0, 10.0):
        clients = rk.Clients(upper=[np.full((2, 1), value)] * 2)
        run = rk.solve(problem, clients, rk.FedAvg(step=0.5), jnp.zeros(1), 3, engine=engine, progress=False)
        assert float(run.x[0]) == pytest.approx(value)


def test_the_windows_of_a_loop_are_one_program_for_a_site() -> None:
    """Three times the exchanges, and no more programs."""
    rng = np.random.default_rng(0)
    rows = [{"a": rng.normal(size=(6, 3)), "b": rng.normal(size=6)} for _ in range(4)]
    problem = rk.WeightedNodes(lambda theta, batch: jnp.mean((batch["a"] @ theta - batch["b"]) ** 2), 0.5)
    clients = rk.Clients(lower=rows[:3], center=rows[3])

    def solve(windows: int) -> Any:
        method = rk.WeightedNodesProx(0.05, 0.05, 0.1, steps=4 * windows, sync_every=4, refresh=0.3)
        return rk.solve(problem, clients, method, jnp.zeros(3), 1, engine=rk.Federation(), progress=False)

    assert new(lambda: solve(2)) >= 1
    assert new(lambda: solve(6)) == 0


def test_sites_of_unequal_sizes_share_their_programs() -> None:
    """Eight clients of eight sizes compile no more than two of two."""
    method = rk.FedSVRG(step=0.1, local_steps=2)

    def solve(sizes: Any) -> Any:
        clients = rk.Clients(upper=[np.arange(float(size)) for size in sizes])
        return rk.solve(mean_problem(), clients, method, jnp.zeros(()), 1, engine=rk.Federation(), progress=False)

    assert new(lambda: solve((3, 11))) >= 2
    assert new(lambda: solve((3, 5, 6, 7, 8, 9, 10, 11))) <= 1  # the server's: it has more weights


# What a site computes.


class State(NamedTuple):
    x: Any
    y: tuple[()] = ()


@dataclass(frozen=True)
class LaterAgain:
    """The first map's value is needed for the first exchange and the third, not for the second."""

    solves: ClassVar[tuple[type, ...]] = (rk.SingleLevel,)

    def init(self, fed: Any, x: Any, y: Any, key: Any) -> State:
        return State(x)

    def round(self, fed: Any, state: State, key: Any) -> State:
        first = fed.map(lambda c, k: c.f_x(state.x, (), c.upper(k)), key)
        one = fed.mean(first, name="one")
        two = fed.mean(fed.map(lambda c, k: one + 1, key), name="two")
        return State(fed.mean(fed.map(lambda c, k, value: value * two, key, first), name="three"))


def test_a_site_computes_nothing_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    computed: list[int] = []
    compute = Site._compute

    def counted(site: Site, plan: Any, function: Any) -> None:
        computed.append(function.number)
        compute(site, plan, function)

    monkeypatch.setattr(Site, "_compute", counted)
    clients = rk.Clients(upper=[np.ones((2, 1))])
    here = rk.solve(mean_problem(), clients, LaterAgain(), jnp.zeros(1), 1, engine=rk.Federation(), progress=False)
    assert len(computed) == len(set(computed)) == 3
    assert float(here.x[0]) == pytest.approx(-2 * (-2 + 1))  # f_x = 2(x - 1) = -2


def test_a_value_that_nobody_needs_is_not_computed() -> None:
    """On neither engine, and it does not count."""

    @dataclass(frozen=True)
    class Idle(LaterAgain):
        def round(self, fed: Any, state: State, key: Any) -> State:
            fed.map(lambda c, k: c.f_x(state.x, (), c.upper(k)), key)
            return State(fed.mean(fed.map(lambda c, k: state.x + 1, key), name="one"))

    clients = rk.Clients(upper=[np.ones((2, 1))])
    for engine in (rk.Simulation(), rk.Federation(), rk.Simulation(debug=True)):
        run = rk.solve(mean_problem(), clients, Idle(), jnp.zeros(1), 2, engine=engine, progress=False)
        assert float(run.x[0]) == 2
        assert run.history[["samples_upper", "gradients"]].iloc[-1].tolist() == [0, 0]


# What a program calls.


class Scaled:
    """A callback whose repr says nothing of what it holds."""

    def __init__(self, factor: Any) -> None:
        self.factor = factor

    def __call__(self, x: Any) -> np.ndarray:
        return np.asarray(x) * np.sum(self.factor)

    def __repr__(self) -> str:
        return "Scaled()"


def called(callback: Any) -> rk.SingleLevel:
    kind = jax.ShapeDtypeStruct((), jnp.result_type(float))
    call = lambda: jax.pure_callback(callback, kind, jnp.ones(()), vmap_method="sequential")
    return rk.SingleLevel(lambda x, b: jnp.mean((x - b) ** 2) * jax.lax.stop_gradient(call()))


def closing_over(factor: Any) -> Any:
    return lambda x: np.asarray(x) * np.sum(factor)


LONG = np.zeros(5000)  # its repr is cut


@pytest.mark.parametrize(
    "make",
    [Scaled, closing_over, lambda factor: functools.partial(np.multiply, factor)],
    ids=["an object", "a closure", "a partial"],
)
def test_programs_are_told_apart_by_what_they_call(make: Any) -> None:
    def x(factor: float) -> float:
        clients = rk.Clients(upper=[np.array([1.0, 2.0])])
        return float(rk.solve(called(make(factor)), clients, rk.FedAvg(step=0.1), np.zeros(()), 1).x)

    assert x(1.0) == pytest.approx(0.3)
    assert x(2.0) == pytest.approx(0.6)


def test_a_callbacks_fingerprint_is_the_same_in_every_process() -> None:
    """By its code and what it holds: arrays whose repr is cut, too."""
    here = fingerprints()
    assert len(set(here)) == len(here)
    program = "import test_programs; print(test_programs.fingerprints())"
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *sys.path])}
    environment |= {"JAX_ENABLE_X64": "1", "PYTHONHASHSEED": "7"}
    told = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True)
    assert told.stdout.strip() == str(here)


def fingerprints() -> list[str]:
    changed = LONG.copy()
    changed[2500] = 1
    clients = rk.Clients(upper=[np.array([1.0, 2.0])])
    made = []
    for callback in (Scaled(1.0), Scaled(2.0), Scaled(LONG), Scaled(changed), closing_over(LONG), closing_over(2.0)):
        job = engines.Job(called(callback), clients, rk.FedAvg(), (jnp.zeros(()), ()), 1)
        made.append(engines.traced(job).round.fingerprint)
    return made


@pytest.mark.parametrize("known", [True, False])
def test_a_cpus_programs_compile_with_the_options_that_it_knows(known: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    jitted: list[Any] = []
    real = jax.jit

    def jit(function: Any, compiler_options: Any = None, **more: Any) -> Any:
        if not known and compiler_options:
            raise ValueError("No such compile option")
        jitted.append(compiler_options)
        return real(function, compiler_options=compiler_options, **more)

    monkeypatch.setattr(jax, "jit", jit)
    compat.cpu_options.cache_clear()
    quick = compat.cpu_options()
    compat.cpu_options.cache_clear()
    rest = types.SimpleNamespace(jaxpr=jaxprs.open_up(jaxprs.trace(jnp.sum, X)[0]))
    assert engines.compiled(rest, jnp.sum)(X) == 3  # type: ignore[arg-type]
    assert jitted[-1] == quick
    assert known or quick == {}
    compat.cpu_options.cache_clear()


def test_threads_share_the_programs() -> None:
    programs, made = Programs(most=2), []

    def look(i: int) -> None:
        for k in range(2000):
            made.append(programs.find((i + k) % 5, lambda k=(i + k) % 5: k) == (i + k) % 5)

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(look, range(4)))
    assert all(made)
    assert len(made) == 8000


def test_checks_find_their_programs_for_other_data_and_look_at_these() -> None:
    problem = rk.SingleLevel(lambda x, b: jnp.mean(jnp.log(b) * x**2))
    solve = lambda scale: rk.solve(
        problem, rk.Clients(upper=[np.full(3, scale), np.full(5, scale)]), rk.FedAvg(step=0.1), np.ones(()), 1
    )
    solve(2.0)
    made = values._COMPILED.made
    solve(3.0)
    assert values._COMPILED.made == made
    with pytest.raises(ValueError, match="must be finite at init"):
        solve(-1.0)
