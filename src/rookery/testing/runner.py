"""Run the contract's checks on a method, and report how each one ended."""

import dataclasses
import functools
import time
import unittest
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax

from rookery.base.printable import located
from rookery.data.clients import Clients
from rookery.testing import cases
from rookery.testing.cases import VERY_UNEQUAL
from rookery.testing.contract import CHECKS, QUICK, Subject


@dataclass(frozen=True)
class Result:
    """How a check ended: "passed", "failed" or "skipped", and a line with what differed or why it was skipped."""

    name: str
    outcome: str
    detail: str
    seconds: float


@dataclass(frozen=True, eq=False)
class Check:
    """One check of a method. Calling it raises AssertionError with one line if the method fails.

    Attributes:
        name: the check and the class of problems, for example "loose clip [Bilevel]".
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
            ending, detail = "passed", self()
        except unittest.SkipTest as reason:
            ending, detail = "skipped", str(reason)
        except AssertionError as error:
            ending, detail = "failed", " ".join(str(error).split())
        return Result(self.name, ending, detail, time.perf_counter() - begin)

    def __repr__(self) -> str:
        return self.name


@dataclass(frozen=True)
class Report:
    """The results of a method's checks."""

    method: str
    results: tuple[Result, ...]

    def of(self, ending: str) -> list[Result]:
        """Return the checks that "passed", "failed" or were "skipped"."""
        return [result for result in self.results if result.outcome == ending]

    @property
    def failed(self) -> list[Result]:
        """The checks that failed."""
        return self.of("failed")

    @property
    def ok(self) -> bool:
        """Whether no check failed."""
        return not self.failed

    @property
    def summary(self) -> str:
        """The number of checks that passed, failed and were skipped."""
        return ", ".join(f"{len(self.of(ending))} {ending}" for ending in ("passed", "failed", "skipped"))

    def __str__(self) -> str:
        """Return one line for each check."""
        width = max((len(result.name) for result in self.results), default=0)
        lines = [f"{result.outcome:8}{result.name:{width}}  {result.detail}".rstrip() for result in self.results]
        return "\n".join([f"{self.method}: {self.summary}", *lines])


def check_method(
    method: Any, problem: Any = None, clients: Clients | None = None, init: Any = None, **options: Any
) -> Report:
    """Check a method against the contract; raise AssertionError with a line for each check that fails.

    The checks come with small problems of every class, with four clients of equal size and four with 1, 3, 40 and 200
    samples. `rookery.testing.NAMES` describes the checks.

    Arguments:
        method: the method, or its class for the default hyperparameters.
        problem: your own problem, or the name of a class that the method solves; None: every class it solves.
        clients, init: for your own problem, as in `rk.solve`.
        exchanges: the number of exchanges per round that the method states; None: not compared.
        gradients: the number of gradients that one client computes in a round with full batches; None: not compared.
        only: the names of the checks to run; empty: all of them.
        skip: the names of checks to leave out, for example "keys" if two maps draw the same minibatches on purpose.
        quick: run only the checks that find most mistakes.

    Returns:
        The report, with the reasons for skipped checks.
    """
    results = tuple(run_in_order(checks(method, problem, clients, init, **options)))
    report = Report(type(_checked(method)).__name__, results)
    if not report.ok:
        raise AssertionError("\n".join(f"{report.method}: {result.name}: {result.detail}" for result in report.failed))
    return report


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
    method = _checked(method)
    for option, names in (("only", only), ("skip", skip)):
        for name in names:
            if name not in CHECKS:
                raise ValueError(f"{option} must name checks; got {name!r}. The checks are: {', '.join(CHECKS)}.")
    chosen = [name for name in (only or (QUICK if quick else CHECKS)) if name not in skip]
    for kind, make in _cases(method, problem, clients, init):

        def run(check: Callable[[Subject], str], make: Callable[[], tuple[Any, Any]] = make) -> str:
            equal, unequal = make()
            return check(Subject(method, equal, unequal, exchanges, gradients))

        for name in chosen:
            yield Check(f"{name} [{kind}]", functools.partial(run, CHECKS[name]))


def _cases(method: Any, problem: Any, clients: Any, init: Any) -> Iterator[tuple[str, Callable[[], tuple[Any, Any]]]]:
    """Yield each class of problems with a function that makes its two cases, of equal and of unequal clients."""
    if problem is not None and not isinstance(problem, str):
        if clients is None or init is None:
            raise ValueError("Your own problem needs clients and init, too: check_method(method, problem, ...).")
        yield type(problem).__name__, functools.cache(lambda: (cases.own_case(problem, clients, init),) * 2)
        return
    kinds = cases.kinds(method)
    if problem is not None:
        known = {name.lower(): kind for kind in kinds for name in (kind.removeprefix("Local"), kind)}
        if problem.lower().replace("-", "") not in known:
            raise ValueError(
                f"problem must be one that {type(method).__name__} solves ({', '.join(kinds)}); got {problem!r}."
            )
        kinds = [known[problem.lower().replace("-", "")]]
    for kind in kinds:
        yield kind, lambda kind=kind: (cases.case(kind), cases.ragged(kind, sizes=VERY_UNEQUAL))  # type: ignore[misc]


def _checked(method: Any) -> Any:
    """Return the method as an instance that has everything the checks need, or raise TypeError."""
    method = method() if isinstance(method, type) else method
    name = type(method).__name__
    if not dataclasses.is_dataclass(type(method)):
        raise TypeError(f"{name} must be a dataclass: write @dataclass(frozen=True) above the class.")
    for part in ("solves", "init", "round"):
        if not hasattr(method, part):
            needed = "solves: ClassVar = (rk.Bilevel,)" if part == "solves" else f"a method {part}"
            raise TypeError(f"{name} must have {needed}; it has no {part!r}.")
    if not isinstance(method.solves, tuple) or not cases.kinds(method):
        raise TypeError(f"{name}.solves must be a tuple of problem classes, e.g. (rk.Bilevel,); got {method.solves!r}.")
    return method


def run_in_order(checks: Iterable[Check]) -> Iterator[Result]:
    """Yield the results of checks; if a method cannot be traced, its other checks are skipped."""
    broken: set[str] = set()
    for check in checks:
        name, _, kind = check.name.partition(" [")
        if kind in broken:
            yield Result(check.name, "skipped", "the method can't be traced.", 0.0)
            continue
        result = check.result()
        if name == "trace" and result.outcome == "failed":
            broken.add(kind)
        yield result
