"""`check`: diagnose a problem before a run (means, finite values, curvature, derivatives) and suggest steps."""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.flatten_util import ravel_pytree

from rookery.base.arguments import check_counts, check_seed
from rookery.base.placement import on_host
from rookery.data.clients import Clients
from rookery.data.rows import ClientRows
from rookery.engines import checks
from rookery.engines.checks.values import UNLESS, WRITE_A_MEAN, rows_of
from rookery.problems.problems import Bilevel, Compositional, Minimax, Problem, SingleLevel, WeightedNodes, with_key
from rookery.problems.variables import adapt

Verdict = Literal["good", "note", "bad"]
Vector = np.ndarray
_BLOCK = 64  # samples of a batch in the search for values that are not finite
_BLOCKS = 1024  # such batches, at most
_PRODUCTS = 100  # Hessian-vector products for one look at the curvature
_STEPS = 300  # gradient steps of the lower level
_FLAT = 1e-6  # of the largest curvature: less counts as zero
_CURVED_DOWN = 0.1  # of the largest curvature: more of it, downwards, is more than rounding
_AWAY = 1e3  # growth of the residual that means there is no minimum
_WRONG = 0.01  # relative difference of the hypergradient and finite differences


@dataclass(frozen=True)
class Line:
    """One check: what it found, whether that is good, and what to do if it is not."""

    name: str
    value: str
    verdict: Verdict = "good"
    advice: str = ""

    def __str__(self) -> str:
        mark = {"good": "good", "note": "note", "bad": "BAD "}[self.verdict]
        return f"  {mark}  {self.name}: {self.value}" + (f"\n        → {self.advice}" if self.advice else "")


@dataclass(frozen=True)
class Diagnosis:
    """The result of `check`; print it.

    Attributes:
        title: the problem and how many clients were looked at.
        lines: one for each check.
        numbers: `mu` and `smoothness` (the smallest and the largest curvature of the lower level, at its solution),
            `condition`, `residual` (of the lower level after `steps` gradient steps, relative to the start),
            `difference` (hypergradient and finite differences, relative) and `implicit_share`, as far as found.
        suggested: hyperparameters to start from, by their names.
    """

    title: str
    lines: tuple[Line, ...]
    numbers: dict[str, float] = field(default_factory=dict)
    suggested: dict[str, Any] = field(default_factory=dict)

    @property
    def bad(self) -> tuple[Line, ...]:
        """The lines that report a problem."""
        return tuple(line for line in self.lines if line.verdict == "bad")

    def __str__(self) -> str:
        verdict = {0: "no problems found", 1: "one problem found"}.get(len(self.bad), f"{len(self.bad)} problems found")
        words = [f"{self.title}: {verdict}.", *map(str, self.lines)]
        if self.suggested:
            words.append("  Try: " + ", ".join(f"{name}={value!r}" for name, value in self.suggested.items()))
        return "\n".join(words)


def check(
    problem: Problem, clients: Clients, init: Any, *, at_most: int = 8, samples: int = 128, seed: int = 0
) -> Diagnosis:
    """Diagnose a problem before a run; print the result.

    The first checks use the arguments as they are: whether losses are means over their batch (on batches of 2, 3, 5 and
    up to 64 samples), and whether values and gradients are finite. The others work on a small sample in double
    precision, if the losses allow it: whether x and y are used; the curvature of the lower level in y; its residual
    after gradient steps; the hypergradient by implicit differentiation against finite differences of the upper
    objective, with the lower level solved again at each point; and the share of the implicit part. For single-level and
    compositional problems, only the gradient in x is compared. `check` reads the data in one process: it is a
    diagnostic tool, not a federated computation. What `solve` refuses, `check` refuses with the same error.

    Arguments:
        problem, clients, init: as in `solve`.
        at_most: how many clients to look at, among the larger half (for weighted nodes: all clients).
        samples: how many samples of each client to use, at most, at each level.
        seed: the seed of the random directions, and of the key for losses with dropout.

    >>> import jax.numpy as jnp, numpy as np, rookery as rk
    >>> problem = rk.Minimax(lambda x, y, b: jnp.mean(b) * x * y - 2 * y**2 + x**2)
    >>> found = rk.check(problem, rk.Clients(upper=[np.ones(3), np.ones(4)]), (np.ones(()), np.ones(())))
    >>> found.bad, found.suggested["lower_step"]
    ((), 0.25)
    """
    check_counts(at_most=at_most, samples=samples)
    check_seed(seed)
    models = adapt(problem, init)
    problem = models.problem
    x, y = checks.start_values(problem, clients, models.init)
    if not clients.held:
        raise ValueError("clients must hold data; got the clients of rk.Clients.like. Run rk.check where the data are.")
    if isinstance(problem, WeightedNodes):
        checks.check_nodes(clients)
    checks.check_one_data_set(problem, clients)
    checks.check_losses(problem, clients, x, y)
    look = _Look([], {}, {})
    sample = _sample(problem, clients, at_most, samples)
    title = f"{type(problem).__name__}, looked at {len(sample.ids)} of {clients.n} clients"
    look.lines.append(_means(problem, clients, x, y))
    look.lines.extend(_precision(init, x))
    problem = with_key(problem, jax.random.key(seed))
    finite = _finite(problem, clients, x, y, sample)
    look.lines.extend(finite)
    if all(line.verdict == "good" for line in finite):
        with jax.enable_x64(True):
            _in_double(problem, sample, x, y, np.random.default_rng(seed), look)
    return Diagnosis(title, tuple(look.lines), look.numbers, look.suggested)


class _Look(NamedTuple):
    """What has been found so far."""

    lines: list[Line]
    numbers: dict[str, float]
    suggested: dict[str, Any]

    def add(self, name: str, value: str, verdict: Verdict = "good", advice: str = "") -> None:
        self.lines.append(Line(name, value, verdict, advice))


class _Sample(NamedTuple):
    """A few clients' data, as many rows of each: [clients, rows, ...]."""

    ids: np.ndarray
    weights: np.ndarray
    lower: Any
    upper: Any
    center: Any
    whole: bool  # nothing was left out


def _sample(problem: Problem, clients: Clients, at_most: int, samples: int) -> _Sample:
    order = np.argsort(-(clients.lower_sizes + clients.upper_sizes), kind="stable")
    if isinstance(problem, WeightedNodes):
        ids = np.arange(clients.n)
    else:
        larger = order[: max(at_most, -(-clients.n // 2))]
        ids = np.sort(larger[np.linspace(0, len(larger) - 1, min(at_most, len(larger))).astype(int)])
    weights = np.asarray(clients.weights, float)[ids]
    weights = weights / weights.sum() if weights.sum() > 0 else np.full(len(ids), 1 / len(ids))
    rows = [_rows(source, ids, samples) for source in (clients.lower, clients.upper)]
    center = None if clients.center is None else jax.tree.map(lambda a: a[0], _rows(clients.center, [0], samples))
    seen = sum(len(ids) * len(jax.tree.leaves(own)[0][0]) for own in rows)
    whole = seen == clients.lower_sizes.sum() + clients.upper_sizes.sum()
    return _Sample(ids, weights, rows[0], rows[1], center, whole)


def _rows(source: ClientRows, ids: Iterable[int], most: int) -> Any:
    """As many samples of each, spread over its data."""
    ids = np.asarray(ids)
    sizes, offsets = np.asarray(source.sizes)[ids], np.asarray(source.offsets)[ids]
    count = min(most, int(sizes.min()))
    index = offsets[:, None] + (np.arange(count)[None] * sizes[:, None]) // count
    return jax.tree.map(lambda a: np.asarray(a)[index], source.rows)


# With the arguments as they are.


_COUNTS = (2, 3, 5, 64)  # samples of the batches that are compared with single samples


def _means(problem: Problem, clients: Clients, x: Any, y: Any) -> Line:
    names = {Bilevel: ("f", "g"), Compositional: ("f", "r")}.get(type(problem), ("f",))
    sizes = max(clients.lower_sizes.max(), clients.upper_sizes.max())
    if sizes < 2:
        return Line("means over the batch", "not checked: every client has one sample", "note")
    try:
        for name in names:
            for count in () if name in problem.random else _COUNTS:
                checks.check_mean(problem, clients, x, y, name, count)
                if count >= sizes:
                    break
    except ValueError as error:
        found, _, advice = str(error).partition(" Where clients differ")
        advice, source = advice[advice.index(WRITE_A_MEAN) :], rows_of(clients, name)
        if source.widest == source.narrowest:  # `solve` goes on, with a warning
            advice = WRITE_A_MEAN + UNLESS
        return Line("means over the batch", found.rstrip("."), "bad", advice)
    return Line("means over the batch", ", ".join(name for name, *_ in _losses(problem, clients, None)))


def _precision(init: Any, x: Any) -> list[Line]:
    """A line if a start in double precision is rounded to single precision."""
    wide = any(getattr(leaf, "dtype", None) == np.float64 for leaf in jax.tree.leaves(init))
    if not wide or jnp.result_type(*jax.tree.leaves(x)) != jnp.float32:
        return []
    advice = 'call jax.config.update("jax_enable_x64", True) before making the clients to compute in float64.'
    return [Line("precision", "init is float64, and runs compute in float32, JAX's default", "note", advice)]


def _losses(problem: Any, clients: Clients, value: Any) -> list[tuple[str, ClientRows, Callable[..., Any]]]:
    """Each loss by name, its data, and (z, rows) -> a number, at z = (x, y)."""
    f = lambda z, rows: problem.f(*z, rows)
    if isinstance(problem, Bilevel):
        g = lambda z, rows: problem.g(z[0], z[1], rows)
        return [("upper", clients.upper, f), ("lower", clients.lower, g)]
    if isinstance(problem, Compositional):
        sample = jax.tree.map(lambda a: a[0], clients.upper.rows) if problem.inner_is_conditional else None
        more = () if sample is None else (sample,)

        def inner(z: Any, rows: Any) -> Any:
            return sum(jnp.sum(leaf) for leaf in jax.tree.leaves(problem.inner(z[0], rows, *more)))

        outer = lambda z, rows: problem.f(z[0], value, rows)
        return [("inner", clients.lower, inner), ("outer", clients.upper, outer)]
    name = "objective" if isinstance(problem, Minimax) else "loss"
    found = [(name, clients.upper, f)]
    if isinstance(problem, WeightedNodes) and clients.center is not None:
        found.append((f"{name} at the centre", clients.center, f))
    return found


def _finite(problem: Problem, clients: Clients, x: Any, y: Any, sample: _Sample) -> list[Line]:
    """A line for each loss that is not finite somewhere; one that all is well, otherwise."""
    value = None
    if isinstance(problem, Compositional):
        more = (jax.tree.map(lambda a: a[0, 0], sample.upper),) if problem.inner_is_conditional else ()
        value = problem.inner(x, jax.tree.map(lambda a: a[0], sample.lower), *more)
    lines = []
    seen = {}
    for name, source, loss in _losses(problem, clients, value):
        blocks, owner = _blocks(source)
        seen[id(source)] = np.unique(blocks).size  # the last batches of a client overlap, and levels may share data
        rows = source.rows
        if on_host(rows):
            rows = _read(rows, blocks.reshape(-1))
            blocks = np.arange(blocks.size).reshape(blocks.shape)
        wrong = np.asarray(jax.jit(_wrong(loss))((x, y), rows, jnp.asarray(blocks)))
        if wrong.any():
            first = int(np.argmax(wrong > 0))
            who = "the centre" if source is clients.center else f"client {clients.names[owner[first]]}"
            what = "its gradient" if wrong[first] == 1 else "it"
            where = f"{type(problem).__name__}.{name}"
            lines.append(
                Line(
                    "finite values",
                    f"{where}: {what} is not finite on samples of {who} ({int((wrong > 0).sum())} of {len(wrong)} "
                    "batches), at init",
                    "bad",
                    "look for log, sqrt or a division at 0 and for exp of a large number; a jnp.where does not protect "
                    "a gradient, so put a safe number into the branch that is not taken.",
                )
            )
    return lines or [Line("finite values", f"values and gradients at init, on {sum(seen.values())} samples")]


def _wrong(loss: Callable[..., Any]) -> Callable[..., Any]:
    """For each batch: 2 if the value is not finite, 1 if only the gradient is not, else 0."""

    def each(z: Any, rows: Any, blocks: Any) -> Any:
        def one(index: Any) -> Any:
            value, slopes = jax.value_and_grad(loss)(z, jax.tree.map(lambda a: a[index], rows))
            fine = jnp.stack([jnp.all(jnp.isfinite(leaf)) for leaf in jax.tree.leaves(slopes)])
            return jnp.where(jnp.isfinite(value), jnp.where(jnp.all(fine), 0, 1), 2)

        return jax.lax.map(one, blocks)

    return each


def _read(rows: Any, index: np.ndarray) -> Any:
    return jax.tree.map(lambda a: a[index], rows)


def _blocks(source: ClientRows) -> tuple[np.ndarray, np.ndarray]:
    """Batches of one length that cover the clients' samples (the first of them, if there are many); whose they are."""
    sizes, offsets = np.asarray(source.sizes), np.asarray(source.offsets)
    length = min(_BLOCK, source.narrowest)
    ids = np.unique(np.linspace(0, len(sizes) - 1, min(len(sizes), _BLOCKS)).astype(int))
    each = max(1, _BLOCKS // len(ids))
    starts, owner = [], []
    for i in ids:
        own = np.minimum(np.arange(0, sizes[i], length), sizes[i] - length)[:each]
        starts.extend(offsets[i] + own)
        owner.extend([i] * len(own))
    return np.asarray(starts)[:, None] + np.arange(length), np.asarray(owner)


# In double precision, on the sample.


def _in_double(problem: Problem, sample: _Sample, x: Any, y: Any, rng: np.random.Generator, look: _Look) -> None:
    try:
        _nested_or_plain(problem, _wide(sample), _wide(x), _wide(y), rng, look)
    except (TypeError, ValueError) as error:
        first = str(error).strip().splitlines()[0]
        look.add("in double precision", f"the losses fail there: {first}", "note", "nothing more was looked at.")


def _nested_or_plain(problem: Problem, sample: _Sample, x: Any, y: Any, rng: Any, look: _Look) -> None:
    if isinstance(problem, SingleLevel | Compositional):
        _plain_gradient(_objective(problem, sample), x, rng, look)
    else:
        _nested(problem, _oracles(problem, sample, x, y), sample, rng, look)


def _wide(value: Any) -> Any:
    widen = lambda a: np.asarray(a, np.float64) if jnp.issubdtype(a.dtype, jnp.floating) else np.asarray(a)
    return jax.tree.map(lambda a: widen(a) if hasattr(a, "dtype") else a, value)


def _objective(problem: Any, sample: _Sample) -> Callable[[Any], Any]:
    """The objective of a problem without a lower level, as a function of x."""
    p = jnp.asarray(sample.weights)
    if isinstance(problem, SingleLevel):
        return lambda x: p @ jax.vmap(lambda own: problem.f(x, (), own))(sample.upper)
    if problem.inner_is_conditional:

        def of_client(x: Any, lower: Any, upper: Any) -> Any:
            of_sample = lambda row: problem.f(x, problem.inner(x, lower, row), jax.tree.map(lambda a: a[None], row))
            return jnp.mean(jax.vmap(of_sample)(upper))

        return lambda x: p @ jax.vmap(lambda low, up: of_client(x, low, up))(sample.lower, sample.upper)

    def composed(x: Any) -> Any:
        values = jax.vmap(lambda own: problem.inner(x, own))(sample.lower)
        if problem.inner_scope == "client":
            return p @ jax.vmap(lambda value, own: problem.f(x, value, own))(values, sample.upper)
        value = jax.tree.map(lambda a: jnp.tensordot(p, a, axes=1), values)
        return p @ jax.vmap(lambda own: problem.f(x, value, own))(sample.upper)

    return composed


def _plain_gradient(objective: Callable[[Any], Any], x: Any, rng: np.random.Generator, look: _Look) -> None:
    flat, unravel = ravel_pytree(x)
    value_and_slope = jax.jit(jax.value_and_grad(lambda z: objective(unravel(z))))
    at = lambda z: tuple(np.asarray(part, float) for part in value_and_slope(z))
    x0 = np.asarray(flat, float)
    slope = at(x0)[1]
    slopes = [slope, at(x0 + 0.1 * rng.normal(size=x0.shape))[1]]
    if not np.any(slopes):
        look.add("x is used", "the objective does not depend on x", "bad", "let the loss use x.")
        return
    _leaves_used(unravel, slopes, look)
    _compare(lambda z: float(at(z)[0]), x0, slope, rng, look, "gradient")


def _leaves_used(unravel: Callable[[Any], Any], slopes: list[Vector], look: _Look) -> None:
    """A line if there are parts of x in which all slopes are 0."""
    leaves = jax.tree_util.tree_leaves_with_path(unravel(np.sum(np.abs(slopes), axis=0)))
    idle = [f"x{jax.tree_util.keystr(path)}" for path, leaf in leaves if not leaf.any()]
    if idle:
        advice = "let a loss use it, or take it out of x."
        look.add("x is used", f"no loss depends on {', '.join(idle)}: the gradient is 0", "bad", advice)


def _compare(
    value: Callable[[Vector], float], x: Vector, slope: Vector, rng: Any, look: _Look, what: str, parts: float = 0.0
) -> None:
    """Compare a directional derivative by finite differences with that of the gradient.

    At a stationary point both are rounding errors. What two steps of the differences disagree by, what rounding of the
    values leaves, and what is left of `parts`, the lengths of terms that cancel in the gradient, counts as noise.
    """
    length = float(np.linalg.norm(slope))
    direction = _unit(_unit(slope) + _unit(rng.normal(size=x.shape)))
    step = 1e-4 * (1 + float(np.linalg.norm(x)) / math.sqrt(x.size))
    ends = [(value(x + h * direction), value(x - h * direction)) for h in (step, step / 2)]
    measured, again = ((a - b) / (2 * h) for (a, b), h in zip(ends, (step, step / 2), strict=True))
    rounding = 50 * np.finfo(float).eps * max(abs(v) for pair in ends for v in pair) / step
    noise = 4 * abs(measured - again) + rounding + 1e-8 * parts
    beyond = max(0.0, abs(measured - float(slope @ direction)) - noise)
    difference = beyond / max(length, abs(measured), 1e-12)
    look.numbers["difference"] = difference
    words = f"{what} and finite differences: {_n(float(slope @ direction))} and {_n(measured)} in a random direction"
    if difference <= _WRONG:
        look.add("derivatives", words)
    else:
        look.add(
            "derivatives",
            words,
            "bad",
            "look for stop_gradient, round, argmax or a sharp kink in a loss, and for a custom derivative that is "
            "wrong.",
        )


class _Oracles(NamedTuple):
    """The two levels on the sample, as functions of flat x and y. (With client scope y is every client's own.)"""

    f: Callable[..., Any]  # (x, y) -> value, ∇_x, ∇_y
    g: Callable[..., Any]  # (x, y) -> value, ∇_y
    g_yy: Callable[..., Vector]  # (x, y, v) -> ∇²_y g · v
    g_xy: Callable[..., Vector]  # (x, y, v) -> ∇_x⟨∇_y g, v⟩
    x: Vector
    y: Vector
    of_x: Callable[[Any], Any]  # x as it was given


def _oracles(problem: Any, sample: _Sample, x: Any, y: Any) -> _Oracles:
    flat_x, of_x = ravel_pytree(x)
    flat_y, of_y = ravel_pytree(y)
    p = jnp.asarray(sample.weights)
    local = getattr(problem, "lower_scope", "global") == "client"
    if local:
        flat_y = jnp.tile(flat_y, len(sample.ids))

    def each(loss: Any, x: Any, y: Any, rows: Any) -> Any:
        if local:
            own = y.reshape(len(sample.ids), -1)
            return jax.vmap(lambda y, batch: loss(of_x(x), of_y(y), batch))(own, rows)
        return jax.vmap(lambda batch: loss(of_x(x), of_y(y), batch))(rows)

    def upper(x: Any, y: Any) -> Any:
        if isinstance(problem, WeightedNodes):
            return problem.f(of_x(x), of_y(y), sample.center)
        return p @ each(problem.f, x, y, sample.upper)

    def lower(x: Any, y: Any) -> Any:
        values = each(problem.g, x, y, sample.lower)
        if local:  # each client's own: their sum has the curvatures of all
            return jnp.sum(values)
        return (of_x(x) if isinstance(problem, WeightedNodes) else p) @ values

    slope = jax.grad(lower, 1)
    f = jax.jit(jax.value_and_grad(upper, (0, 1)))
    g = jax.jit(jax.value_and_grad(lower, 1))
    g_yy = jax.jit(lambda x, y, v: jax.jvp(lambda y: slope(x, y), (y,), (v,))[1])
    g_xy = jax.jit(lambda x, y, v: jax.grad(lambda x: jnp.vdot(slope(x, y), v))(x))

    def of_f(x: Vector, y: Vector) -> tuple[float, Vector, Vector]:
        value, (by_x, by_y) = f(x, y)
        return float(value), np.asarray(by_x, float), np.asarray(by_y, float)

    def of_g(x: Vector, y: Vector) -> tuple[float, Vector]:
        value, by_y = g(x, y)
        return float(value), np.asarray(by_y, float)

    product = lambda of: lambda *args: np.asarray(of(*args), float)
    flat = (np.asarray(flat_x, float), np.asarray(flat_y, float))
    return _Oracles(of_f, of_g, product(g_yy), product(g_xy), *flat, of_x)


def _nested(problem: Any, at: _Oracles, sample: _Sample, rng: np.random.Generator, look: _Look) -> None:
    """Lines about the lower level and the hypergradient, as long as the ones before make sense of them."""
    if not _used(problem, at, rng, look):
        return
    what = "−f" if isinstance(problem, Minimax) else "the lower level"
    low, high = curvature(lambda v: at.g_yy(at.x, at.y, v), at.y.size, rng)
    if not _smooth(low + high, what, look):
        return
    if max(abs(low), abs(high)) <= 1e-12 * float(np.linalg.norm(at.g(at.x, at.y)[1])):
        name = "f" if isinstance(problem, Minimax) else "it"
        look.add(
            "curvature in y",
            f"of {what}, at init, is 0: {name} is linear in y, without a {'maximum' if name == 'f' else 'minimum'}",
            "bad",
            f"add a penalty on y, {'−' if name == 'f' else ''}½·λ·‖y‖².",
        )
        return
    if high <= 0 or -low > high:
        sign = (
            "f is strongly convex in y, and y maximises it"
            if isinstance(problem, Minimax)
            else ("it is concave in y, and methods minimise it")
        )
        look.add(
            "curvature in y",
            f"of {what}, at init, from {_n(low)} to {_n(high)}: negative curvature dominates",
            "bad",
            f"{sign}: does a loss have the wrong sign?",
        )
        return
    y, norms = _descend(at, 1 / high)
    _residual(norms, high, what, look)
    y, rest = minimise(at, at.x, y)
    start = max(norms[0], 1e-12)
    solved = rest <= 1e-6 * max(start, 1e-3)
    low, high_there = curvature(lambda v: at.g_yy(at.x, y, v), y.size, rng)
    if not _smooth(low + high_there, what, look):
        return
    high = max(high, high_there)
    _, by_x, by_y = at.f(at.x, y)
    p, left = conjugate_gradients(lambda v: at.g_yy(at.x, y, v), by_y, min(2 * y.size + 20, 1000))
    enough = sample.ids.size * len(jax.tree.leaves(sample.lower)[0][0]) >= y.size  # rows to tell what is flat
    if low < -_FLAT * high and not solved and rest >= norms[-1]:  # Newton's method did not improve on gradient steps
        look.numbers.update({"mu": low, "smoothness": high, "condition": math.inf})
        look.add(
            "curvature in y",
            f"of {what} from μ = {_n(low)} to ℓ = {_n(high)}: it is not convex, and no minimum was found: ‖∇_y g‖ went "
            f"from {_n(start)} to {_n(rest)}",
            "bad",
            f"add a penalty on y, ½·λ·‖y‖² with λ above {_n(-low)}.",
        )
        return
    if not _curved(low, high, left, solved, enough, what, sample, look):
        return
    implicit = -at.g_xy(at.x, y, p)
    if isinstance(problem, Bilevel | WeightedNodes):
        _share(by_x, implicit, look)
    _suggest(problem, low, high, norms, look)
    if not solved or left > 1e-4:
        look.add(
            "derivatives",
            f"not compared: ‖∇_y g‖ is still {_n(rest)} after {what} was solved as well as it could be",
            "note",
            "the hypergradient means little where the lower level has no clear solution: a penalty on y would help.",
        )
        return
    again = lambda x: at.f(x, minimise(at, x, y)[0])[0]
    parts = float(np.linalg.norm(by_x) + np.linalg.norm(implicit))
    _compare(again, at.x, by_x + implicit, rng, look, "hypergradient", parts)


def _smooth(curvature: float, what: str, look: _Look) -> bool:
    """Whether the curvature is a number; a line if it is not."""
    if not math.isfinite(curvature):
        look.add(
            "curvature in y",
            f"the second derivative of {what} is not finite, though the first is",
            "bad",
            "look for a norm, a power or an absolute value at 0; add a small number inside, or start y elsewhere.",
        )
    return math.isfinite(curvature)


def _used(problem: Any, at: _Oracles, rng: np.random.Generator, look: _Look) -> bool:
    """Whether both losses use y, and the lower one x; a line if one of them does not."""
    points = [(at.x + s * rng.normal(size=at.x.shape), at.y + s * rng.normal(size=at.y.shape)) for s in (0.0, 0.1)]
    v = rng.normal(size=at.y.shape)
    names = ("objective", "objective") if isinstance(problem, Minimax) else ("upper", "lower")
    names = ("loss", "loss") if isinstance(problem, WeightedNodes) else names
    for name, uses in (
        (names[0], any(at.f(x, y)[2].any() for x, y in points)),
        (names[1], any(at.g(x, y)[1].any() for x, y in points)),
    ):
        if not uses:
            kind = type(problem).__name__
            look.add(
                "y is used",
                f"{kind}.{name} does not depend on y: its gradient in y is 0",
                "bad",
                "let it use y; without a y that both levels share, rk.SingleLevel states the problem.",
            )
            return False
    mixed = [at.g_xy(x, y, v) for x, y in points]
    if isinstance(problem, Bilevel | Minimax):
        _leaves_used(at.of_x, [*mixed, *(at.f(x, y)[1] for x, y in points)], look)
    if not np.any(mixed):
        free = isinstance(problem, Minimax)
        look.add(
            "y is used",
            "y*(x) does not depend on x: " + ("x and y are in separate terms" if free else "the lower level has no x"),
            "note" if free else "bad",
            "the lower solution is the same for every x: solve it once, and use rk.SingleLevel for x.",
        )
        return free
    look.add("y is used", "by both levels, and y*(x) moves with x")
    return True


def curvature(product: Callable[[Vector], Vector], size: int, rng: np.random.Generator) -> tuple[float, float]:
    """The smallest and the largest eigenvalue by Lanczos's method, exact up to 100 dimensions.

    Of more, the largest is nearly exact and the smallest an estimate from above.
    """
    basis: list[Vector] = []
    diagonal: list[float] = []
    beside: list[float] = []
    v = _unit(rng.normal(size=size))
    for _ in range(min(size, _PRODUCTS)):
        basis.append(v)
        image = product(v)
        if not np.isfinite(image).all():
            return math.nan, math.nan
        diagonal.append(float(v @ image))
        for _ in range(2):  # twice is enough to stay orthogonal
            image = image - np.stack(basis).T @ (np.stack(basis) @ image)
        length = float(np.linalg.norm(image))
        scale = max(map(abs, diagonal))
        if length <= 1e-10 * max(scale, 1e-300):  # an invariant subspace: go on outside it
            image = rng.normal(size=size)
            for _ in range(2):
                image = image - np.stack(basis).T @ (np.stack(basis) @ image)
            length = 0.0
            if float(np.linalg.norm(image)) < 1e-8:
                break
        beside.append(length)
        v = _unit(image)
    around = beside[: len(diagonal) - 1]
    values = np.linalg.eigvalsh(np.diag(diagonal) + np.diag(around, 1) + np.diag(around, -1))
    return float(values[0]), float(values[-1])


def _descend(at: _Oracles, step: float) -> tuple[Vector, list[float]]:
    """Gradient steps of the lower level until the residual is a thousandth; the residual before each.

    A step that does not lower the value is halved, and so are those after it.
    """
    y = at.y
    value, slope = at.g(at.x, y)
    norms = [float(np.linalg.norm(slope))]
    for _ in range(_STEPS):
        if not 1e-3 * norms[0] < norms[-1] < _AWAY * norms[0]:
            break
        for _ in range(30):
            new_value, new_slope = at.g(at.x, y - step * slope)
            if new_value <= value - 0.25 * step * norms[-1] ** 2 + 1e-12 * abs(value):
                break
            step /= 2
        else:
            break
        y, value, slope = y - step * slope, new_value, new_slope
        norms.append(float(np.linalg.norm(slope)))
    return y, norms


def _residual(norms: list[float], high: float, what: str, look: _Look) -> None:
    steps = len(norms) - 1
    if norms[0] <= 1e-10 * max(high, 1):
        look.add("residual of y", f"{what} is solved at init already")
        return
    ratio = norms[-1] / norms[0]
    look.numbers.update({"residual": ratio, "steps": steps})
    words = f"‖∇_y g‖ comes to {_n(ratio)} of its start in {steps} gradient step(s) of 1/ℓ or less"
    if not ratio < _AWAY:
        look.add(
            "residual of y",
            f"‖∇_y g‖ is {_n(ratio)} times its start after {steps} gradient step(s) that lower the value",
            "bad",
            "the lower level has no minimum nearby: add a penalty on y, or start y elsewhere.",
        )
    elif ratio > 0.1:
        look.add("residual of y", words, "note", "that is slow: rescale the data, or add a penalty on y.")
    else:
        look.add("residual of y", words)


def minimise(at: _Oracles, x: Vector, y: Vector) -> tuple[Vector, float]:
    """Return y*(x) by Newton's method with conjugate gradients, from y, and the length of the gradient there.

    Where there is no minimum, it stops when the gradient has grown by far.
    """
    value, slope = at.g(x, y)
    length = 1 + float(np.linalg.norm(slope))
    products = 0
    while 1e-11 * length < float(np.linalg.norm(slope)) < _AWAY * length and products < 2000:
        limit = min(y.size + 10, 200)
        move, _ = conjugate_gradients(lambda v: at.g_yy(x, y, v), slope, limit, enough=1e-6)
        products += limit
        share, fall = 1.0, float(move @ slope)
        for _ in range(30):
            new_value, new_slope = at.g(x, y - share * move)
            near = float(np.linalg.norm(new_slope)) < 0.5 * float(np.linalg.norm(slope))  # where values say no more
            if new_value <= value - 1e-4 * share * fall or (near and new_value <= value + 1e-9 * (1 + abs(value))):
                break
            share /= 2
        else:
            break
        y, value, slope = y - share * move, new_value, new_slope
    return y, float(np.linalg.norm(slope))


def conjugate_gradients(
    product: Callable[[Vector], Vector], b: Vector, most: int, enough: float = 1e-10
) -> tuple[Vector, float]:
    """About H⁻¹b, and the residual relative to b. Stops where H curves down."""
    p, rest, direction = np.zeros_like(b), b, b
    start = float(np.linalg.norm(b))
    if start == 0:
        return p, 0.0
    for k in range(most):
        image = product(direction)
        bend = float(direction @ image)
        if not bend > 1e-14 * float(direction @ direction):
            return (direction if k == 0 else p), float(np.linalg.norm(rest)) / start
        size = float(rest @ rest) / bend
        p, new = p + size * direction, rest - size * image
        direction = new + float(new @ new) / float(rest @ rest) * direction
        rest = new
        if float(np.linalg.norm(rest)) <= enough * start:
            break
    return p, float(np.linalg.norm(rest)) / start


def _curved(
    low: float, high: float, left: float, solved: bool, enough: bool, what: str, sample: _Sample, look: _Look
) -> bool:
    """A line on the curvature at the solution; whether a hypergradient makes sense there."""
    low = 0.0 if abs(low) <= 1e-12 * high else low
    look.numbers.update({"mu": low, "smoothness": high, "condition": high / low if low > 0 else math.inf})
    words = f"of {what} from μ = {_n(low)} to ℓ = {_n(high)}"
    more = "" if sample.whole else "; or look at more data, check(..., at_most=..., samples=...)"
    penalty = f"add a penalty on y, ½·λ·‖y‖² with λ of about {_n(high / 1000)}{more}."
    if low < -_CURVED_DOWN * high:
        look.add("curvature in y", f"{words}: it is not convex, even where it was minimised", "bad", penalty)
        return False
    if low <= _FLAT * high and solved and left > 1e-3:
        look.add(
            "curvature in y",
            f"{words}: it is not strongly convex, and the upper level feels the flat directions",
            "bad" if sample.whole or enough else "note",
            penalty,
        )
        return False
    if low <= _FLAT * high:
        felt = "the upper level does not feel the flat directions" if left <= 1e-3 else "it was not solved"
        advice = (
            "" if left <= 1e-3 else f"the theory does not hold; what works in practice may work here, too. Or {penalty}"
        )
        look.add("curvature in y", f"{words}: not strongly convex, but {felt}", "note", advice)
        return True
    look.add("curvature in y", f"{words}, condition {_n(high / low)}: strongly convex")
    return True


def _share(direct: Vector, implicit: Vector, look: _Look) -> None:
    by_x, by_y = float(np.linalg.norm(direct)), float(np.linalg.norm(implicit))
    share = by_y / max(by_x + by_y, 1e-300)
    look.numbers["implicit_share"] = share
    words = f"{share:.1%} of the hypergradient (the rest is ∇_x f)"
    if share < 1e-6:
        advice = "at this point x acts on f directly alone, and a single-level method would do as well."
        look.add("implicit part", words, "note", advice)
    else:
        look.add("implicit part", words)


def _suggest(problem: Any, low: float, high: float, norms: list[float], look: _Look) -> None:
    """Steps of 1/ℓ; of y as many as make a tenth of its residual, for y goes on from round to round; of the series as
    many terms as leave a hundredth.
    """
    step = _two_digits(1 / high)
    within = [t for t, norm in enumerate(norms) if norm <= 0.1 * norms[0]]
    condition = high / low if low > _FLAT * high else math.inf
    if within:
        look.suggested["lower_local_steps"] = max(1, within[0])
    elif math.isfinite(condition):
        look.suggested["lower_local_steps"] = min(_STEPS, math.ceil(condition * math.log(10)))
    look.suggested["lower_step"] = step
    if isinstance(problem, WeightedNodes):
        steps = look.suggested.pop("lower_local_steps", None)
        look.suggested.clear()
        look.suggested.update({"model_step": step, "linear_step": step} | ({"steps": steps} if steps else {}))
    if isinstance(problem, Bilevel):
        look.suggested["hessian_step"] = step
        series = condition * math.log(100)
        if series <= 30:
            look.suggested["neumann_terms"] = math.ceil(series)
        else:
            terms = math.sqrt(condition) / 2 * math.log(200) if math.isfinite(condition) else 30
            look.suggested.update({"neumann": "cg", "neumann_terms": math.ceil(min(terms, 50))})


def _two_digits(value: float) -> float:
    return float(f"{value:.2g}")


def _unit(v: Vector) -> Vector:
    length = float(np.linalg.norm(v))
    return v / length if length > 0 else v


def _n(value: float) -> str:
    return f"{value:.3g}"
