"""The checks of the contract: each raises AssertionError with one line, or returns a remark."""

import dataclasses
import tempfile
import unittest
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from rookery.engines import engine
from rookery.engines.checks import check_run
from rookery.engines.engine import Job
from rookery.engines.federation import Federation
from rookery.engines.simulation import Simulation
from rookery.language import hyperparameters
from rookery.plan.calls import Body, LoopCall, MapCall
from rookery.plan.costs import costs, counted_loops
from rookery.run.result import NonFiniteWarning, RoundFailedError, Run
from rookery.run.solve import solve
from rookery.testing import cases
from rookery.testing.cases import HARD, Case
from rookery.testing.clipping import clip_changes_nothing
from rookery.testing.runs import Outcome, TooFewRepliesError, difference, disagreement, outcome

V = TypeVar("V")
TOLERANCE = 1e-9  # in double precision
SINGLE_TOLERANCE = 1e-4
_SEEDS = range(25, 33)  # tried in turn until no exchange loses all its replies


class Skipped(unittest.SkipTest):
    """A check that does not apply; pytest counts it as skipped."""


@dataclass(frozen=True)
class Subject:
    """A method and the cases it is checked on.

    Attributes:
        method: the method with its hyperparameters.
        equal: the case with clients of equal size.
        unequal: the case with clients of very unequal size.
        exchanges: the number of exchanges per round that the method states, or None.
        gradients: the number of gradients that a client computes in a round, or None.
    """

    method: Any
    equal: Case
    unequal: Case
    exchanges: int | None = None
    gradients: float | None = None

    @property
    def small(self) -> Any:
        """The method with minibatches."""
        return cases.with_minibatches(self.method)

    @property
    def full(self) -> Any:
        """The method with full batches."""
        return cases.with_full_batches(self.method)


# Shared by the checks.


def engines() -> dict[str, Any]:
    """Return the engines that must agree, by name; with a mesh if there are two devices."""
    by_name: dict[str, Any] = {
        "the simulation": Simulation(),
        "the simulation in blocks of 2": Simulation(block=2),
        "the in-memory federation": Federation(),
    }
    if jax.device_count() > 1:
        by_name["a mesh of 2 devices"] = Simulation(mesh=2)
    return by_name


def engines_agree(job: Job, on: dict[str, Any] | None = None, rounds: int = 2, tolerance: float = TOLERANCE) -> Outcome:
    """Check that engines give the same state, memory and ledger; return the first engine's outcome.

    The bytes that the federation measures must equal the ledger's, unless a client may be drawn twice.
    """
    (first, reference), *others = (engines() if on is None else on).items()
    here = outcome(reference, job, rounds)
    for name, other in others:
        there = outcome(other, job, rounds)
        gap = disagreement(here, there, tolerance)
        assert not gap, f"{first} and {name} differ: {gap}."
        measured = there.sent, there.received
        ledger = there.counts["bytes_down"], there.counts["bytes_up"]
        assert there.sent is None or measured == ledger or repeats(job), (
            f"{name} sent and received {measured} bytes; the ledger says {ledger}."
        )
    leaves = jax.tree.leaves((here.state, here.memory))
    assert all(np.isfinite(leaf).all() for leaf in leaves), "a value is not finite; smaller steps may help."
    return here


def repeats(job: Job) -> bool:
    """Return whether a cohort of the method may contain a client twice; the federation then asks it once."""
    return any(call.repeats for call in engine.traced(job).round.body.of(MapCall))


def _with_replies(make: Callable[[int], V]) -> V:
    """Return make(seed) for the first seed with which no exchange loses all its replies."""
    for seed in _SEEDS:
        try:
            return make(seed)
        except (TooFewRepliesError, RoundFailedError):
            continue
    raise Skipped("with lost replies no round completes on these clients.")


def _solved(method: Any, case: Case, order: list[int] | None = None, rounds: int = 2, **options: Any) -> Run:
    weights = cases.weights(method, case)
    if weights is not None and order is not None:
        weights = [weights[i] for i in order]
    with warnings.catch_warnings():
        warnings.simplefilter("error", NonFiniteWarning)
        return solve(case.problem, case.clients(order, weights), method, case.init, rounds, progress=False, **options)


def _plural(count: float, noun: str) -> str:
    return f"{count:g} {noun}{'' if count == 1 else 's'}"


def _check_exchanges(subject: Subject, counts: Sequence[float]) -> None:
    stated = subject.exchanges
    assert stated is None or set(counts) == {stated}, (
        f"a round has {_plural(next(n for n in counts if n != stated), 'exchange')}; stated: {stated}."
    )


def _without_mesh() -> str:
    return "" if jax.device_count() > 1 else "No mesh: there is one device."


# The checks.


def trace(subject: Subject) -> str:
    """init and round can be traced, keep structure, shapes and types, and exchange as often as stated."""
    for method, case in ((subject.method, subject.equal), (subject.small, subject.unequal)):
        double, single = (cases.job(method, c, **HARD) for c in (case, cases.single(case)))
        check_run(case.problem, double.clients, method, *double.start, 0, double.cohort, 1, 0)
        for job, dtype in ((double, np.float64), (single, np.float32)):
            traced = engine.traced(job)
            types_kept(traced, job, np.dtype(dtype))
            if not counted_loops(traced.round.body):
                _check_exchanges(subject, [exchanges_of(traced)])
    return ""


def exchanges_of(traced: Any) -> int:
    """Return the number of exchanges in the plan of a round; a loop of random length counts as zero turns."""
    turns = [np.int32(0) for _ in counted_loops(traced.round.body)]
    return sum(entry.count for entry in costs(traced.round, turns).values())


def types_kept(traced: Any, job: Job, dtype: Any) -> None:
    """Check that a round keeps the state's shapes and types, and that its numbers have the start's type."""
    before, after = traced.start.made.carry, traced.round.made.carry
    structures: Any = [jax.tree.structure(x) for x in (after.state.x, job.start[0])]
    assert structures[0] == structures[1], f"state.x has the structure {structures[0]}; x has {structures[1]}."
    shapes = lambda tree, axes: [(leaf.shape[axes:], leaf.dtype) for leaf in jax.tree.leaves(tree)]
    for name, one, other in (
        ("the state", shapes(before.state, 0), shapes(after.state, 0)),
        ("the clients' memory", shapes(before.memory, 1), shapes(after.memory, 1)),
    ):
        assert one == other, f"{name} has the shapes and types {one} before a round and {other} after it."
    for path, leaf in jax.tree_util.tree_leaves_with_path((before, after)):
        if jnp.issubdtype(leaf.dtype, jnp.inexact):
            name = jax.tree_util.keystr(path[1:]).removeprefix(".")
            assert leaf.dtype == dtype, f"{name} is {leaf.dtype}; the start is {dtype}."


def keys(subject: Subject) -> str:
    """No two maps of a round, and no two turns of a loop, are given the same key."""
    traced = engine.traced(cases.job(subject.small, subject.unequal))
    for title, body in (("init", traced.start.body), ("round", traced.round.body)):
        _check_keys(title, body, set())
    return ""


def _check_keys(title: str, body: Body, fixed: set[Any]) -> None:
    """Check one body; `fixed` holds the values that stay the same in every turn of the loop around it."""
    used: dict[Any, str] = {}
    for step in body.steps:
        if isinstance(step, LoopCall):
            _check_keys(title, step.body, set(step.body.inputs[: len(step.fixed)]))
        if not isinstance(step, MapCall) or step.key is None:
            continue
        assert step.key not in fixed, (
            f"{title}: every turn of a fed.loop gives the same key to {step.source}; use jax.random.fold_in(key, i)."
        )
        assert step.key not in used, (
            f"{title}: two maps are given the same key, {used[step.key]} and {step.source}; split it with "
            'jax.random.split, or skip "keys" if they draw the same minibatches on purpose.'
        )
        used[step.key] = step.source


def equal_clients(subject: Subject) -> str:
    """All engines give the same state, memory and ledger with clients of equal size and minibatches."""
    _check_exchanges(subject, engines_agree(cases.job(subject.small, subject.equal)).each_round)
    return _without_mesh()


def unequal_clients(subject: Subject) -> str:
    """All engines give the same results with clients of very unequal size and full batches."""
    _check_exchanges(subject, engines_agree(cases.job(subject.full, subject.unequal)).each_round)
    return _without_mesh()


def channel_and_faults(subject: Subject) -> str:
    """All engines give the same results with very unequal clients, minibatches, clipping, noise and lost replies."""
    here = _with_replies(lambda seed: engines_agree(cases.job(subject.small, subject.unequal, seed, **HARD)))
    _check_exchanges(subject, here.each_round)
    return _without_mesh()


def counts(subject: Subject) -> str:
    """A round has as many exchanges, and a client computes as many gradients, as stated."""
    job = cases.job(subject.full, subject.equal)
    here = outcome(Simulation(), job)
    _check_exchanges(subject, here.each_round)
    gradients = [count / job.cohort for count in here.work]
    assert subject.gradients is None or set(gradients) == {subject.gradients}, (
        f"a client computes {_plural(gradients[-1], 'gradient')} a round; stated: {subject.gradients}."
    )
    return f"{_plural(here.each_round[-1], 'exchange')} a round, {_plural(gradients[-1], 'gradient')} by each client."


def resume(subject: Subject) -> str:
    """A run resumed from a checkpoint equals the uninterrupted run, bit for bit."""
    method, case = subject.small, subject.unequal
    cohort = cases.job(method, case).cohort
    for name, on in (("the simulation", Simulation()), ("the in-memory federation", Federation())):

        def both(seed: int) -> tuple[Run, Run]:
            options = {"cohort": cohort, "seed": seed, "engine": on, **HARD}
            whole = _solved(method, case, rounds=3, **options)
            with tempfile.TemporaryDirectory() as folder:
                options["checkpoint"] = Path(folder) / "run"
                _solved(method, case, rounds=2, **options)
                return whole, _solved(method, case, rounds=3, **options)

        whole, resumed = _with_replies(both)
        gap = difference((whole.state, whole.memory), (resumed.state, resumed.memory), 0, types=True)
        histories = [run.history.drop(columns="seconds") for run in (whole, resumed)]
        gap = gap or ("" if histories[0].equals(histories[1]) else "the ledgers")
        assert not gap, f"on {name} an uninterrupted run and a resumed one differ: {gap}."
    return ""


def loose_clip(subject: Subject) -> str:
    """Clipping at 1.01 times the largest update of a run changes nothing."""
    clip_changes_nothing(cases.job(subject.small, subject.unequal), TOLERANCE)
    return ""


@dataclass(frozen=True)
class InSingle:
    """Two engines compared in single precision: the largest difference, the types, and whether the ledgers agree."""

    difference: float
    types: list[str]
    ledger: bool


def in_single(job: Job) -> InSingle:
    """Compare two engines on a job with float32 data."""
    both: tuple[Any, ...] = (Simulation(block=2), Federation())
    here, there = (outcome(on, job) for on in both)
    pairs = list(zip(*(jax.tree.leaves((run.state, run.memory)) for run in (here, there)), strict=True))
    gaps = [np.max(np.abs(np.float64(a) - np.float64(b)) / np.maximum(1, np.abs(b)), initial=0) for a, b in pairs]
    types = sorted({str(a.dtype) for pair in pairs for a in pair if a.dtype.kind == "f"})
    ledger = here.counts == there.counts and here.exchanges == there.exchanges
    return InSingle(float(max(gaps, default=0)), types, ledger)


def single_precision(subject: Subject) -> str:
    """Without jax_enable_x64 the engines agree as well as 32 bits can, and nothing is wider."""
    with jax.enable_x64(False):
        narrow = cases.single(subject.unequal)
        both = _with_replies(lambda seed: in_single(cases.job(subject.small, narrow, seed, **HARD)))
    assert both.difference < SINGLE_TOLERANCE, f"the engines differ by {both.difference:.1e} in float32."
    assert both.types == ["float32"], f"the state has the types {', '.join(both.types)}."
    assert both.ledger, "the engines' ledgers differ in float32."
    return ""


def sweep(subject: Subject) -> str:
    """Another value of a float hyperparameter compiles nothing."""
    if not floats(subject.method):
        raise Skipped("the method has no float hyperparameter.")
    sweep_compiles_nothing(subject.small, lambda method: outcome(Simulation(), cases.job(method, subject.unequal), 1))
    return ""


def sweep_compiles_nothing(method: Any, run: Callable[[Any], Outcome], effects: bool = False) -> None:
    """Check that halving a float compiles nothing and, with `effects`, that it changes the run."""
    before = run(method)
    compiled = engine.PROGRAMS.made
    for name in floats(method):
        other = run(dataclasses.replace(method, **{name: 0.5 * getattr(method, name)}))
        assert engine.PROGRAMS.made == compiled, f"another {name} compiles the run again."
        same = not difference((other.state, other.memory), (before.state, before.memory), 1e-12)
        assert not (effects and same), f"another {name} changes nothing."


def floats(method: Any) -> list[str]:
    """Return the names of the hyperparameters that are real numbers other than 0."""
    values = {field.name: getattr(method, field.name) for field in dataclasses.fields(method)}
    return [name for name, value in values.items() if hyperparameters.is_real(method, name, value) and value]


def client_order(subject: Subject) -> str:
    """With full batches the order of the clients does not matter."""
    method, case = subject.full, subject.equal
    order = list(range(min(case.n, 3) if case.weights is None else case.n))
    first, again = (_solved(method, case, order, seed=seed) for seed in (1, 2))
    if difference((first.state, first.memory), (again.state, again.memory), TOLERANCE):
        raise Skipped("the method is random even with full batches, and another order makes it draw other numbers.")
    other = _solved(method, case, order[::-1], seed=1)
    gap = _difference_reversed(first.state, other.state, len(order))
    gap = gap or difference(first.memory, jax.tree.map(lambda a: a[::-1], other.memory), TOLERANCE)
    assert not gap, f"in the opposite order of clients, {gap}."
    return ""


def _difference_reversed(one: Any, other: Any, n: int) -> str:
    """Say how two states differ; an array with an entry for each of n clients may be in the opposite order."""
    for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True):
        per_client = np.ndim(a) > 0 and np.shape(a)[0] == n
        reversed_equal = per_client and not difference(a, jnp.asarray(b)[::-1], TOLERANCE)
        if difference(a, b, TOLERANCE) and not reversed_equal:
            return difference(one, other, TOLERANCE)
    return ""


CHECKS: dict[str, Callable[[Subject], str]] = {
    "trace": trace,
    "keys": keys,
    "counts": counts,
    "equal clients": equal_clients,
    "unequal clients": unequal_clients,
    "channel and faults": channel_and_faults,
    "loose clip": loose_clip,
    "client order": client_order,
    "resume": resume,
    "sweep": sweep,
    "single precision": single_precision,
}
NAMES = {name: (function.__doc__ or "").strip() for name, function in CHECKS.items()}
QUICK = ("trace", "keys", "counts", "channel and faults", "loose clip", "client order")
