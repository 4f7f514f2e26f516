"""The checks themselves, and the function that runs them on anyone's method."""

import dataclasses
import functools
import tempfile
import time
import unittest
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from rookery.base.printable import located
from rookery.channels import clip
from rookery.data.clients import Clients
from rookery.engines import engine
from rookery.engines.checks import check_run
from rookery.engines.engine import Job
from rookery.engines.federation import Federation
from rookery.engines.simulation import Simulation
from rookery.language import hyperparameters
from rookery.language.channel import ChannelExchange, Plain
from rookery.plan.calls import Body, LoopCall, MapCall
from rookery.plan.costs import costs, counted_loops
from rookery.run.result import NonFiniteWarning, RoundFailedError, Run
from rookery.run.solve import solve
from rookery.testing import cases
from rookery.testing.cases import HARD, VERY_UNEQUAL, Case
from rookery.testing.runs import Outcome, TooFewRepliesError, difference, disagreement, outcome

V = TypeVar("V")
TOLERANCE = 1e-9  # in double precision
SINGLE_TOLERANCE = 1e-4
_SEEDS = range(25, 33)  # tried until not all replies to an exchange are lost


class Skipped(unittest.SkipTest):
    """A check that does not apply; pytest counts it as skipped."""


@dataclass(frozen=True)
class Subject:
    """A method and what it is checked on.

    Attributes:
        method: the method with its hyperparameters.
        equal: the case of clients of equal size.
        unequal: the case of clients of very unequal size.
        exchanges: the number of exchanges a round that the method states, or None.
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


# What the checks have in common. Each raises AssertionError with one line, or returns a remark.


def engines() -> dict[str, Any]:
    """Return the engines that must agree, by name; a mesh where there are two devices."""
    found: dict[str, Any] = {
        "the simulation": Simulation(),
        "the simulation in blocks of 2": Simulation(block=2),
        "the in-memory federation": Federation(),
    }
    if jax.device_count() > 1:
        found["a mesh of 2 devices"] = Simulation(mesh=2)
    return found


def engines_agree(job: Job, on: dict[str, Any] | None = None, rounds: int = 2, tolerance: float = TOLERANCE) -> Outcome:
    """Check that engines give the same state, memory and ledger; return the first one's outcome.

    What the federation measures on its wire must be what the ledger says, unless a client is drawn twice.
    """
    on = engines() if on is None else on
    (first, reference), *others = on.items()
    here = outcome(reference, job, rounds)
    for name, own in others:
        there = outcome(own, job, rounds)
        said = disagreement(here, there, tolerance)
        assert not said, f"{first} and {name} differ: {said}."
        wired = there.sent, there.received
        ledger = there.counts["bytes_down"], there.counts["bytes_up"]
        assert there.sent is None or wired == ledger or repeats(job), (
            f"{name} sent and received {wired} bytes; the ledger says {ledger}."
        )
    leaves = jax.tree.leaves((here.state, here.memory))
    assert all(np.isfinite(leaf).all() for leaf in leaves), "a value is not finite; smaller steps may help."
    return here


def repeats(job: Job) -> bool:
    """Return whether a cohort of the method may have a client twice, which is then asked once."""
    return any(call.repeats for call in engine.traced(job).round.body.of(MapCall))


def _with_replies(make: Callable[[int], V]) -> V:
    """make(seed) with the first seed for which no exchange loses all its replies."""
    for seed in _SEEDS:
        try:
            return make(seed)
        except (TooFewRepliesError, RoundFailedError):
            continue
    raise Skipped("with lost replies no round completes on these clients.")


def _count(found: float, what: str) -> str:
    return f"{found:g} {what}{'' if found == 1 else 's'}"


def _stated(subject: Subject, found: Sequence[float]) -> None:
    wanted = subject.exchanges
    assert wanted is None or set(found) == {wanted}, (
        f"a round has {_count(next(n for n in found if n != wanted), 'exchange')}; stated: {wanted}."
    )


# The checks.


def trace(subject: Subject) -> str:
    """init and round can be traced, keep structure, shapes and types, and exchange as often as stated."""
    for method, it in ((subject.method, subject.equal), (subject.small, subject.unequal)):
        what = cases.job(method, it, **HARD)
        check_run(it.problem, what.clients, method, *what.start, 0, what.cohort, 1, 0)
        narrow = cases.job(method, cases.single(it), **HARD)
        for own, dtype in ((what, np.float64), (narrow, np.float32)):
            traced = engine.traced(own)
            types_kept(traced, own, np.dtype(dtype))
            if not counted_loops(traced.round.body):
                _stated(subject, [exchanges_of(traced)])
    return ""


def exchanges_of(traced: Any) -> int:
    """Return how many exchanges the plan of a round has; a loop of random length counts as no turn."""
    turns = [np.int32(0) for _ in counted_loops(traced.round.body)]
    return sum(entry.count for entry in costs(traced.round, turns).values())


def types_kept(traced: Any, job: Job, dtype: Any) -> None:
    """Check that a round keeps the state's shapes and types, and that its numbers are of the start's type."""
    before, after = traced.start.made.carry, traced.round.made.carry
    x = job.start[0]
    said: Any = (jax.tree.structure(after.state.x), jax.tree.structure(x))
    assert said[0] == said[1], f"state.x has the structure {said[0]}; x has {said[1]}."
    for name, one, other, cut in (
        ("the state", before.state, after.state, 0),
        ("the clients' memory", before.memory, after.memory, 1),
    ):
        told = [[(leaf.shape[cut:], leaf.dtype) for leaf in jax.tree.leaves(tree)] for tree in (one, other)]
        assert told[0] == told[1], f"{name} has the shapes and types {told[0]} before a round and {told[1]} after it."
    for path, leaf in jax.tree_util.tree_leaves_with_path((before, after)):
        if jnp.issubdtype(leaf.dtype, jnp.inexact):
            name = jax.tree_util.keystr(path[1:]).removeprefix(".")
            assert leaf.dtype == dtype, f"{name} is {leaf.dtype}; the start is {dtype}."


def keys(subject: Subject) -> str:
    """No two maps of a round, and no two turns of a loop, are given the same key."""
    what = cases.job(subject.small, subject.unequal)
    traced = engine.traced(what)
    for title, body in (("init", traced.start.body), ("round", traced.round.body)):
        _check_keys(title, body, set())
    return ""


def _check_keys(title: str, body: Body, fixed: set[Any]) -> None:
    """`fixed`: the values that are the same in every turn of the loop that this is the body of."""
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
    """All engines give the same state, memory and ledger with clients of equal size, with minibatches."""
    _stated(subject, engines_agree(cases.job(subject.small, subject.equal)).each_round)
    return _without_mesh()


def unequal_clients(subject: Subject) -> str:
    """All engines give the same with clients of very unequal size, with full batches."""
    _stated(subject, engines_agree(cases.job(subject.full, subject.unequal)).each_round)
    return _without_mesh()


def channel_and_faults(subject: Subject) -> str:
    """All engines give the same with very unequal clients, minibatches, clipping, noise and lost replies."""
    here = _with_replies(lambda seed: engines_agree(cases.job(subject.small, subject.unequal, seed, **HARD)))
    _stated(subject, here.each_round)
    return _without_mesh()


def _without_mesh() -> str:
    return "" if jax.device_count() > 1 else "No mesh: there is one device."


def counts(subject: Subject) -> str:
    """A round has as many exchanges, and a client computes as many gradients, as stated."""
    what = cases.job(subject.full, subject.equal)
    here = outcome(Simulation(), what)
    _stated(subject, here.each_round)
    found, wanted = here.work[-1] / what.cohort, subject.gradients
    assert wanted is None or all(own / what.cohort == wanted for own in here.work), (
        f"a client computes {_count(found, 'gradient')} a round; stated: {wanted}."
    )
    return f"{_count(here.each_round[-1], 'exchange')} a round, {_count(found, 'gradient')} by each client."


def _solved(method: Any, it: Case, order: list[int] | None = None, rounds: int = 2, **given: Any) -> Run:
    own = cases.weights(method, it)
    picked = None if own is None else own if order is None else [own[i] for i in order]
    with warnings.catch_warnings():
        warnings.simplefilter("error", NonFiniteWarning)
        return solve(it.problem, it.clients(order, picked), method, it.init, rounds, progress=False, **given)


def resume(subject: Subject) -> str:
    """A run that goes on from a checkpoint is the uninterrupted run, bit by bit."""
    method, it = subject.small, subject.unequal
    cohort = cases.job(method, it).cohort
    for name, own in (("the simulation", Simulation()), ("the in-memory federation", Federation())):

        def both(seed: int) -> tuple[Run, Run]:
            given = {"cohort": cohort, "seed": seed, "engine": own, **HARD}
            whole = _solved(method, it, rounds=3, **given)
            with tempfile.TemporaryDirectory() as folder:
                given["checkpoint"] = Path(folder) / "run"
                _solved(method, it, rounds=2, **given)
                return whole, _solved(method, it, rounds=3, **given)

        whole, resumed = _with_replies(both)
        said = difference((whole.state, whole.memory), (resumed.state, resumed.memory), 0, types=True)
        histories = [run.history.drop(columns="seconds") for run in (whole, resumed)]
        said = said or ("" if histories[0].equals(histories[1]) else "the ledgers")
        assert not said, f"on {name} an uninterrupted run and a resumed one differ: {said}."
    return ""


@dataclass(frozen=True)
class Recorder(Plain):
    """A channel that notes the largest norm of an update in the server's state, and changes nothing.

    Scalars that travel beside arrays are not counted as a part of the update, unless a variable has scalars itself.
    """

    scalars: bool

    def init(self, exchange: ChannelExchange) -> tuple[Any, Any]:
        """The largest norm so far."""
        return jnp.zeros((), jnp.result_type(float)), ()

    def encode(self, exchange: ChannelExchange, value: Any, key: Any, state: Any) -> tuple[Any, Any]:
        """The value and its norm."""
        leaves = jax.tree.leaves(value)
        arrays = leaves if self.scalars else [a for a in leaves if a.ndim] or leaves
        squares = [jnp.sum(jnp.square(jnp.abs(a))) for a in arrays]
        kind = self.init(exchange)[0].dtype
        return (value, jnp.sqrt(sum(squares, jnp.zeros((), kind))).astype(kind)), state

    def reduce(self, exchange: ChannelExchange, rows: Any, weights: Any, present: Any) -> Any:
        """The weighted sum of the values, and the largest norm."""
        values, norms = rows
        add = lambda a: jnp.tensordot(weights.astype(a.dtype), a, axes=1)
        return jax.tree.map(add, values), norms

    def decode(self, exchange: ChannelExchange, total: Any, key: Any, state: Any) -> tuple[Any, Any]:
        """The value, and the largest norm so far."""
        value, norms = total
        return value, jnp.maximum(state, jnp.max(norms))


def update_norms(job: Job, rounds: int = 2) -> dict[str, float]:
    """Return the largest norm of an update in each exchange of a run."""
    scalars = any(jnp.ndim(leaf) == 0 for leaf in jax.tree.leaves(job.start))
    found = outcome(Simulation(), dataclasses.replace(job, channel=Recorder(scalars)), rounds).server
    return {name: float(norm) for name, norm in (found or {}).items()}


def loose_clip(subject: Subject) -> str:
    """Clipping at 1.01 times the largest update of a run changes nothing."""
    clip_changes_nothing(cases.job(subject.small, subject.unequal))
    return ""


def clip_changes_nothing(job: Job, rounds: int = 2, tolerance: float = TOLERANCE) -> None:
    """Check that clipping each exchange at 1.01 times its largest update leaves a run as it is."""
    bounds = {name: clip(max(1.01 * norm, 1e-6)) for name, norm in update_norms(job, rounds).items()}
    free, bounded = (
        outcome(Simulation(), dataclasses.replace(job, channel=own), rounds) for own in (None, bounds or None)
    )
    said = difference((free.state, free.memory), (bounded.state, bounded.memory), tolerance)
    assert not said, (
        f"clipping at 1.01 times the largest update changes the run: {said}. A number that is sent beside an update is "
        "clipped together with it; mark it with bookkeeping=(..., rk.Bookkeeping(...))."
    )


@dataclass(frozen=True)
class InSingle:
    """Two engines compared in single precision: the largest difference, the types, and whether the ledgers agree."""

    difference: float
    types: list[str]
    ledger: bool


def in_single(job: Job) -> InSingle:
    """Run a job of float32 data on two engines."""
    both_engines: tuple[Any, ...] = (Simulation(block=2), Federation())
    here, there = (outcome(own, job) for own in both_engines)
    both = list(zip(*(jax.tree.leaves((own.state, own.memory)) for own in (here, there)), strict=True))
    apart = [np.max(np.abs(np.float64(a) - np.float64(b)) / np.maximum(1, np.abs(b)), initial=0) for a, b in both]
    kinds = sorted({str(a.dtype) for pair in both for a in pair if a.dtype.kind == "f"})
    return InSingle(
        float(max(apart, default=0)), kinds, here.counts == there.counts and here.exchanges == there.exchanges
    )


def single_precision(subject: Subject) -> str:
    """Without jax_enable_x64 the engines agree as well as 32 bits can, and nothing is wider."""
    with jax.enable_x64(False):
        narrow = cases.single(subject.unequal)
        found = _with_replies(lambda seed: in_single(cases.job(subject.small, narrow, seed, **HARD)))
    assert found.difference < SINGLE_TOLERANCE, f"the engines differ by {found.difference:.1e} in float32."
    assert found.types == ["float32"], f"the state has the types {', '.join(found.types)}."
    assert found.ledger, "the engines' ledgers differ in float32."
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
    """Return the names of the hyperparameters that are real numbers, other than 0."""
    named = [(own.name, getattr(method, own.name)) for own in dataclasses.fields(method)]
    return [name for name, value in named if hyperparameters.is_real(method, name, value) and value]


def client_order(subject: Subject) -> str:
    """With full batches the order of the clients does not matter."""
    it, order = (
        subject.equal,
        list(range(min(subject.equal.n, 3) if subject.equal.weights is None else subject.equal.n)),
    )
    method = subject.full
    first, again = (_solved(method, it, order, seed=seed) for seed in (1, 2))
    if difference((first.state, first.memory), (again.state, again.memory), TOLERANCE):
        raise Skipped("the method is random with full batches, and another order is another draw.")
    other = _solved(method, it, order[::-1], seed=1)
    said = _reordered(first.state, other.state, len(order))
    said = said or difference(first.memory, jax.tree.map(lambda a: a[::-1], other.memory), TOLERANCE)
    assert not said, f"in the opposite order of clients, {said}."
    return ""


def _reordered(one: Any, other: Any, n: int) -> str:
    """How two states differ, where an array with an entry for each client may be in the opposite order."""
    for (path, a), b in zip(jax.tree_util.tree_leaves_with_path(one), jax.tree.leaves(other), strict=True):
        said = difference({jax.tree_util.keystr(path): a}, {jax.tree_util.keystr(path): b}, TOLERANCE)
        each = np.ndim(a) > 0 and np.shape(a)[0] == n
        if said and not (each and not difference(a, jnp.asarray(b)[::-1], TOLERANCE)):
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


# Running them.


@dataclass(frozen=True)
class Result:
    """How a check ended: "passed", "failed" or "skipped", with a line on what differed, or why it was skipped."""

    name: str
    outcome: str
    detail: str
    seconds: float


@dataclass(frozen=True, eq=False)
class Check:
    """One check of a method. Calling it raises AssertionError with one line if the method fails.

    Attributes:
        name: which check on which class of problems, for example "loose clip [Bilevel]".
    """

    name: str
    _function: Callable[[], str]

    def __call__(self) -> str:
        """Run the check; return a remark, or an empty text."""
        with jax.enable_x64(True):
            try:
                return self._function()
            except (AssertionError, unittest.SkipTest):
                raise
            except Exception as error:
                raise AssertionError(located(error)) from error

    def result(self) -> Result:
        """Run the check and say how it ended."""
        begin = time.perf_counter()
        try:
            how, detail = "passed", self()
        except unittest.SkipTest as reason:
            how, detail = "skipped", str(reason)
        except AssertionError as error:
            how, detail = "failed", " ".join(str(error).split())
        return Result(self.name, how, detail, time.perf_counter() - begin)

    def __repr__(self) -> str:
        return self.name


@dataclass(frozen=True)
class Report:
    """What the checks of a method found."""

    method: str
    results: tuple[Result, ...]

    def of(self, how: str) -> list[Result]:
        """Return the checks that "passed", "failed" or were "skipped"."""
        return [own for own in self.results if own.outcome == how]

    @property
    def failed(self) -> list[Result]:
        """The checks that failed."""
        return self.of("failed")

    @property
    def ok(self) -> bool:
        """Whether no check failed."""
        return not self.failed

    def __str__(self) -> str:
        """One line for each check."""
        width = max((len(own.name) for own in self.results), default=0)
        lines = [f"{own.outcome:8}{own.name:{width}}  {own.detail}".rstrip() for own in self.results]
        return "\n".join([f"{self.method}: {self.summary}", *lines])

    @property
    def summary(self) -> str:
        """How many checks ended how, in words."""
        return ", ".join(f"{len(self.of(how))} {how}" for how in ("passed", "failed", "skipped"))


def checks(
    method: Any,
    problem: Any = None,
    clients: Clients | None = None,
    init: Any = None,
    *,
    exchanges: int | None = None,
    gradients: float | None = None,
    only: Sequence[str] = (),
    skip: Sequence[str] = (),
    quick: bool = False,
) -> Iterator[Check]:
    """Yield the checks of a method, each a function without arguments, for `pytest.mark.parametrize`.

    The arguments are those of `check_method`.

    >>> import rookery as rk
    >>> [check.name for check in checks(rk.FedAvg(), quick=True)][:2]
    ['trace [SingleLevel]', 'keys [SingleLevel]']
    """
    method = _method(method)
    for word, given in (("only", only), ("skip", skip)):
        for name in given:
            if name not in CHECKS:
                raise ValueError(f"{word} must name checks; got {name!r}. The checks are: {', '.join(CHECKS)}.")
    chosen = [name for name in (only or (QUICK if quick else CHECKS)) if name not in skip]
    for kind, own in _subjects(method, problem, clients, init, exchanges, gradients):
        for name in chosen:
            yield Check(f"{name} [{kind}]", functools.partial(_checked, CHECKS[name], own))


def _checked(function: Callable[[Subject], str], make: Callable[[], Subject]) -> str:
    return function(make())


def _subjects(
    method: Any, problem: Any, clients: Any, init: Any, exchanges: Any, gradients: Any
) -> Iterator[tuple[str, Callable[[], Subject]]]:
    """What the method is checked on, by class of problem; made when it is needed, in double precision."""
    if problem is not None and not isinstance(problem, str):
        if clients is None or init is None:
            raise ValueError("a problem of your own needs clients and init, too: check_method(method, problem, ...).")

        @functools.cache
        def own() -> Subject:
            it = cases.own_case(problem, clients, init)
            return Subject(method, it, it, exchanges, gradients)

        yield type(problem).__name__, own
        return
    claimed = cases.kinds(method)
    if problem is not None:
        named = {kind.lower(): kind for kind in claimed} | {
            kind.lower().removeprefix("local"): kind for kind in claimed
        }
        if problem.lower().replace("-", "") not in named:
            raise ValueError(
                f"problem must be one that {type(method).__name__} solves ({', '.join(claimed)}); got {problem!r}."
            )
        claimed = [named[problem.lower().replace("-", "")]]
    for kind in claimed:
        yield kind, functools.partial(_bundled, method, kind, exchanges, gradients)


def _bundled(method: Any, kind: str, exchanges: Any, gradients: Any) -> Subject:
    return Subject(method, cases.case(kind), cases.ragged(kind, sizes=VERY_UNEQUAL), exchanges, gradients)


def _method(given: Any) -> Any:
    """The method, checked for what all the checks need."""
    method: Any = given() if isinstance(given, type) else given
    name = type(method).__name__
    if not dataclasses.is_dataclass(type(method)):
        raise TypeError(f"{name} must be a dataclass: write @dataclass(frozen=True) above the class.")
    for part in ("solves", "init", "round"):
        if not hasattr(method, part):
            what = "solves: ClassVar = (rk.Bilevel,)" if part == "solves" else f"a method {part}"
            raise TypeError(f"{name} must have {what}; it has no {part!r}.")
    if not isinstance(method.solves, tuple) or not cases.kinds(method):
        raise TypeError(f"{name}.solves must be a tuple of problem classes, e.g. (rk.Bilevel,); got {method.solves!r}.")
    return method


def check_method(
    method: Any,
    problem: Any = None,
    clients: Clients | None = None,
    init: Any = None,
    *,
    exchanges: int | None = None,
    gradients: float | None = None,
    only: Sequence[str] = (),
    skip: Sequence[str] = (),
    quick: bool = False,
) -> Report:
    """Check a method against the contract; raise AssertionError with a line for each check that fails.

    The checks come with small problems of every class, with four clients of equal size and four of 1, 3, 40 and 200
    samples. `rookery.testing.NAMES` describes them.

    Arguments:
        method: the method, or its class for its default hyperparameters.
        problem: a problem of your own, or the name of one of the classes that the method solves; None: all of these.
        clients, init: for a problem of your own, as in `rk.solve`.
        exchanges: the number of exchanges a round that the method states; None: it is not compared.
        gradients: the number of gradients that one client computes in a round, with full batches; likewise.
        only: the names of the checks to run; empty: all of them.
        skip: the names of checks to leave out, for example "keys" where two maps draw the same minibatches on purpose.
        quick: run only the checks that find most mistakes.

    Returns:
        What passed and what was skipped, with the reasons.
    """
    given: dict[str, Any] = {"exchanges": exchanges, "gradients": gradients, "only": only, "skip": skip, "quick": quick}
    report = Report(
        type(_method(method)).__name__,
        tuple(run_in_order(checks(method, problem, clients, init, **given))),
    )
    if not report.ok:
        raise AssertionError("\n".join(f"{report.method}: {own.name}: {own.detail}" for own in report.failed))
    return report


def run_in_order(of: Iterator[Check] | Sequence[Check]) -> Iterator[Result]:
    """Yield the results of checks; a method that can't be traced fails that check, and the others are skipped."""
    broken: set[str] = set()
    for check in of:
        name, _, kind = check.name.partition(" [")
        if kind in broken:
            yield Result(check.name, "skipped", "the method can't be traced.", 0.0)
            continue
        found = check.result()
        if name == "trace" and found.outcome == "failed":
            broken.add(kind)
        yield found
