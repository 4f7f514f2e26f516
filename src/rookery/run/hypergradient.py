"""Checks of a nested problem on a sample: the curvature of its lower level, and its hypergradient."""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.flatten_util import ravel_pytree

from rookery.problems.problems import Bilevel, Minimax, WeightedNodes
from rookery.run.diagnosis import Findings

Vector = np.ndarray
_DENSE = 100  # dimensions up to which eigenvalues are computed from the full matrix
_STEPS = 300  # gradient steps of the lower level
_NEWTON_STEPS = 10  # without a minimum, each of them lowers the gradient by a factor, too
_FLAT = 1e-6  # share of the largest curvature below which a direction counts as flat
_CURVED_DOWN = 0.1  # share of the largest curvature above which negative curvature is not rounding
_GROWTH = 1e3  # growth of the residual that means there is no minimum
_WRONG = 0.01  # relative difference of the hypergradient and finite differences


class Sample(NamedTuple):
    """The data of a few clients, with equally many rows each: [clients, rows, ...]."""

    ids: np.ndarray
    weights: np.ndarray
    lower: Any
    upper: Any
    center: Any
    whole: bool  # whether it holds all data


class _Oracles(NamedTuple):
    """The two levels on the sample, as functions of flat x and y. With client scope, y holds the y of every client."""

    f: Callable[..., Any]  # (x, y) -> value, ∇_x, ∇_y
    g: Callable[..., Any]  # (x, y) -> value, ∇_y
    g_yy: Callable[..., Vector]  # (x, y, v) -> ∇²_y g · v
    g_xy: Callable[..., Vector]  # (x, y, v) -> ∇_x⟨∇_y g, v⟩
    x: Vector
    y: Vector
    to_tree: Callable[[Any], Any]  # from flat x to x


def _oracles(problem: Any, sample: Sample, x: Any, y: Any) -> _Oracles:
    flat_x, x_tree = ravel_pytree(x)
    flat_y, y_tree = ravel_pytree(y)
    p = jnp.asarray(sample.weights)
    local = getattr(problem, "lower_scope", "global") == "client"
    if local:
        flat_y = jnp.tile(flat_y, len(sample.ids))

    def of_clients(loss: Any, x: Any, y: Any, rows: Any) -> Any:
        if local:
            ys = y.reshape(len(sample.ids), -1)
            return jax.vmap(lambda y, batch: loss(x_tree(x), y_tree(y), batch))(ys, rows)
        return jax.vmap(lambda batch: loss(x_tree(x), y_tree(y), batch))(rows)

    def upper(x: Any, y: Any) -> Any:
        if isinstance(problem, WeightedNodes):
            return problem.f(x_tree(x), y_tree(y), sample.center)
        return p @ of_clients(problem.f, x, y, sample.upper)

    def lower(x: Any, y: Any) -> Any:
        values = of_clients(problem.g, x, y, sample.lower)
        if local:  # the sum has the curvatures of all clients
            return jnp.sum(values)
        return (x_tree(x) if isinstance(problem, WeightedNodes) else p) @ values

    def in_numpy(function: Callable[..., Any]) -> Callable[..., Any]:
        program = jax.jit(function)
        return lambda *args: jax.tree.map(lambda a: np.asarray(a, float), program(*args))

    def f(x: Any, y: Any) -> Any:
        value, slopes = jax.value_and_grad(upper, (0, 1))(x, y)
        return value, *slopes

    slope = jax.grad(lower, 1)
    return _Oracles(
        f=in_numpy(f),
        g=in_numpy(jax.value_and_grad(lower, 1)),
        g_yy=in_numpy(lambda x, y, v: jax.jvp(lambda y: slope(x, y), (y,), (v,))[1]),
        g_xy=in_numpy(lambda x, y, v: jax.grad(lambda x: jnp.vdot(slope(x, y), v))(x)),
        x=np.asarray(flat_x, float),
        y=np.asarray(flat_y, float),
        to_tree=x_tree,
    )


# Numerics.


def curvature(product: Callable[[Vector], Vector], size: int, rng: np.random.Generator) -> tuple[float, float]:
    """Return the smallest and the largest eigenvalue of a symmetric matrix, NaN if it is not finite.

    They are exact up to 100 dimensions; beyond, they are accurate to about a millionth of their difference.
    """
    start = rng.normal(size=size)
    if size <= _DENSE:
        matrix = np.stack([product(unit) for unit in np.eye(size)])
        values = np.linalg.eigvalsh(matrix) if np.isfinite(matrix).all() else np.full(2, math.nan)
        return float(values[0]), float(values[-1])
    if not np.isfinite(product(start)).all():
        return math.nan, math.nan
    first = _farthest(product, 0.0, start)
    other = _farthest(product, first, start)  # relative to the other end, the smallest eigenvalue is a large one
    return min(first, other), max(first, other)


def _farthest(product: Callable[[Vector], Vector], shift: float, start: Vector) -> float:
    """Return the eigenvalue farthest from `shift`."""
    from scipy.sparse.linalg import ArpackNoConvergence, LinearOperator, eigsh  # slow to import

    shifted = lambda v: product(v) - shift * v
    if np.linalg.norm(shifted(start)) <= 1e-12 * abs(shift) * np.linalg.norm(start):  # a multiple of the identity
        return shift
    operator = LinearOperator((start.size, start.size), matvec=lambda v: shifted(v.ravel()), dtype=float)
    for tolerance in (1e-6, 1e-3, 1e-1):
        try:
            value = eigsh(operator, 1, v0=start, ncv=50, maxiter=10, tol=tolerance, return_eigenvectors=False)
            return shift + float(value[0])
        except ArpackNoConvergence:
            continue
    return math.nan


def solve_symmetric(product: Callable[[Vector], Vector], b: Vector, most: int) -> tuple[Vector, float]:
    """Return a solution p of H·p = b, and the residual relative to b.

    H may be singular or indefinite: p minimises the residual.
    """
    from scipy.sparse.linalg import LinearOperator, minres  # slow to import

    scale = float(np.linalg.norm(b))
    if scale == 0:
        return np.zeros_like(b), 0.0
    operator = LinearOperator((b.size, b.size), matvec=lambda v: product(v.ravel()), dtype=float)
    p, _ = minres(operator, b, rtol=1e-14, maxiter=most)
    left = float(np.linalg.norm(b - product(p))) / scale
    return p, left if math.isfinite(left) else math.inf


def minimise(at: _Oracles, x: Vector, y: Vector) -> tuple[Vector, float]:
    """Return y*(x), starting from y, and the norm of the gradient there."""
    from scipy.optimize import minimize  # slow to import

    scale = 1 + float(np.linalg.norm(at.g(x, y)[1]))
    options = {"gtol": 1e-6 * scale, "maxiter": _NEWTON_STEPS}
    with np.errstate(all="ignore"):  # without a minimum, values overflow
        hessian_product = lambda y, v: at.g_yy(x, y, v)
        y = minimize(lambda y: at.g(x, y), y, jac=True, hessp=hessian_product, method="trust-ncg", options=options).x
    value, slope = at.g(x, y)
    while np.linalg.norm(slope) > 1e-11 * scale:  # Newton steps judged by the gradient: values differ by rounding here
        move, _ = solve_symmetric(lambda v: at.g_yy(x, y, v), slope, min(y.size + 10, 200))
        new_value, new_slope = at.g(x, y - move)
        to_saddle = not new_value <= value + 1e-9 * (1 + abs(value))
        if to_saddle or not np.linalg.norm(new_slope) < 0.1 * np.linalg.norm(slope):
            break
        y, value, slope = y - move, new_value, new_slope
    norm = float(np.linalg.norm(slope))
    return y, norm if math.isfinite(norm) else math.inf


def _descend(at: _Oracles, step: float) -> tuple[Vector, list[float]]:
    """Take gradient steps of the lower level until the residual is a thousandth; return y and all residuals.

    The loop is written out here, because the residuals of plain gradient steps are reported. If a step does not lower
    the value, it is halved, and so are the steps after it.
    """
    y = at.y
    value, slope = at.g(at.x, y)
    norms = [float(np.linalg.norm(slope))]
    for _ in range(_STEPS):
        if not 1e-3 * norms[0] < norms[-1] < _GROWTH * norms[0]:
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


def compare_derivatives(
    value: Callable[[Vector], float], x: Vector, slope: Vector, rng: np.random.Generator, findings: Findings,
    what: str, parts: float = 0.0,
) -> None:  # fmt: skip
    """Compare a directional derivative by finite differences with that of the gradient.

    Three things count as noise: the disagreement of two step lengths of the differences, rounding of the values, and
    rounding of `parts`, the norms of terms that cancel in the gradient. At a stationary point nothing else is left.
    """
    unit = lambda v: v / max(float(np.linalg.norm(v)), 1e-300)
    direction = unit(unit(slope) + unit(rng.normal(size=x.shape)))
    step = 1e-4 * (1 + float(np.linalg.norm(x)) / math.sqrt(x.size))
    ends = [(value(x + h * direction), value(x - h * direction)) for h in (step, step / 2)]
    measured, again = ((a - b) / (2 * h) for (a, b), h in zip(ends, (step, step / 2), strict=True))
    rounding = 50 * np.finfo(float).eps * max(abs(v) for pair in ends for v in pair) / step
    noise = 4 * abs(measured - again) + rounding + 1e-8 * parts
    computed = float(slope @ direction)
    beyond = max(0.0, abs(measured - computed) - noise)
    difference = beyond / max(float(np.linalg.norm(slope)), abs(measured), 1e-12)
    findings.numbers["difference"] = difference
    text = f"{what} and finite differences: {_n(computed)} and {_n(measured)} in a random direction"
    advice = (
        "look for stop_gradient, round, argmax or a sharp kink in a loss, and for a custom derivative that is wrong."
    )
    findings.add("derivatives", text, *(() if difference <= _WRONG else ("bad", advice)))


# The lines.


def check_nested(problem: Any, sample: Sample, x: Any, y: Any, rng: np.random.Generator, findings: Findings) -> None:
    """Add lines about the lower level and the hypergradient, until one shows that the next would be meaningless."""
    at = _oracles(problem, sample, x, y)
    what = "−f" if isinstance(problem, Minimax) else "the lower level"
    if not _check_use(problem, at, rng, findings):
        return
    low, high = curvature(lambda v: at.g_yy(at.x, at.y, v), at.y.size, rng)
    if not _check_start(problem, at, low, high, what, findings):
        return
    y, norms = _descend(at, 1 / high)
    _check_residual(norms, high, what, findings)
    y, rest = minimise(at, at.x, y)
    start = max(norms[0], 1e-12)
    solved = rest <= 1e-6 * max(start, 1e-3)
    low, high_there = curvature(lambda v: at.g_yy(at.x, y, v), y.size, rng)
    if not _check_smooth(low + high_there, what, findings):
        return
    high = max(high, high_there)
    if low < -_FLAT * high and not solved and rest >= norms[-1]:  # no improvement on gradient steps
        findings.numbers.update({"mu": low, "smoothness": high, "condition": math.inf})
        findings.add(
            "curvature in y",
            f"of {what} from μ = {_n(low)} to ℓ = {_n(high)}: it is not convex, and no minimum was found: ‖∇_y g‖ went "
            f"from {_n(start)} to {_n(rest)}",
            "bad",
            f"add a penalty on y, ½·λ·‖y‖² with λ above {_n(-low)}.",
        )
        return
    _, by_x, by_y = at.f(at.x, y)
    p, left = solve_symmetric(lambda v: at.g_yy(at.x, y, v), by_y, min(2 * y.size + 20, 1000))
    if not _check_curvature(low, high, left, solved, what, y.size, sample, findings):
        return
    implicit = -at.g_xy(at.x, y, p)
    if isinstance(problem, Bilevel | WeightedNodes):
        _check_share(by_x, implicit, findings)
    _suggest(problem, low, high, norms, findings)
    if not solved or left > 1e-4:
        findings.add(
            "derivatives",
            f"not compared: ‖∇_y g‖ is still {_n(rest)} after {what} was solved as well as it could be",
            "note",
            "the hypergradient means little where the lower level has no clear solution: a penalty on y would help.",
        )
        return
    objective = lambda x: at.f(x, minimise(at, x, y)[0])[0]
    parts = float(np.linalg.norm(by_x) + np.linalg.norm(implicit))
    compare_derivatives(objective, at.x, by_x + implicit, rng, findings, "hypergradient", parts)


def check_leaves(to_tree: Callable[[Any], Any], slopes: list[Vector], findings: Findings) -> None:
    """Add a line if all slopes are 0 in some leaves of x."""
    leaves = jax.tree_util.tree_leaves_with_path(to_tree(np.sum(np.abs(slopes), axis=0)))
    idle = [f"x{jax.tree_util.keystr(path)}" for path, leaf in leaves if not leaf.any()]
    if idle:
        advice = "let a loss use it, or take it out of x."
        findings.add("x is used", f"no loss depends on {', '.join(idle)}: the gradient is 0", "bad", advice)


def _check_use(problem: Any, at: _Oracles, rng: np.random.Generator, findings: Findings) -> bool:
    """Return whether both losses use y, and the lower one x; add a line if one of them does not."""
    points = [(at.x + s * rng.normal(size=at.x.shape), at.y + s * rng.normal(size=at.y.shape)) for s in (0.0, 0.1)]
    v = rng.normal(size=at.y.shape)
    names = {Minimax: ("objective", "objective"), WeightedNodes: ("loss", "loss")}.get(
        type(problem), ("upper", "lower")
    )
    used = any(at.f(x, y)[2].any() for x, y in points), any(at.g(x, y)[1].any() for x, y in points)
    for name, uses_y in zip(names, used, strict=True):
        if not uses_y:
            findings.add(
                "y is used",
                f"{type(problem).__name__}.{name} does not depend on y: its gradient in y is 0",
                "bad",
                "let it use y; without a y that both levels share, rk.SingleLevel states the problem.",
            )
            return False
    mixed = [at.g_xy(x, y, v) for x, y in points]
    if isinstance(problem, Bilevel | Minimax):
        check_leaves(at.to_tree, [*mixed, *(at.f(x, y)[1] for x, y in points)], findings)
    if not np.any(mixed):
        free = isinstance(problem, Minimax)
        findings.add(
            "y is used",
            "y*(x) does not depend on x: " + ("x and y are in separate terms" if free else "the lower level has no x"),
            "note" if free else "bad",
            "the lower solution is the same for every x: solve it once, and use rk.SingleLevel for x.",
        )
        return free
    findings.add("y is used", "by both levels, and y*(x) moves with x")
    return True


def _check_smooth(curvature: float, what: str, findings: Findings) -> bool:
    """Return whether the curvature is finite; add a line if it is not."""
    if not math.isfinite(curvature):
        findings.add(
            "curvature in y",
            f"the second derivative of {what} is not finite, though the first is",
            "bad",
            "look for a norm, a power or an absolute value at 0; add a small number inside, or start y elsewhere.",
        )
    return math.isfinite(curvature)


def _check_start(problem: Any, at: _Oracles, low: float, high: float, what: str, findings: Findings) -> bool:
    """Return whether the curvature at init is that of a minimisation; add a line if it is not."""
    if not _check_smooth(low + high, what, findings):
        return False
    minimax = isinstance(problem, Minimax)
    if max(abs(low), abs(high)) <= 1e-12 * float(np.linalg.norm(at.g(at.x, at.y)[1])):
        name, end, sign = ("f", "maximum", "−") if minimax else ("it", "minimum", "")
        text = f"of {what}, at init, is 0: {name} is linear in y, without a {end}"
        findings.add("curvature in y", text, "bad", f"add a penalty on y, {sign}½·λ·‖y‖².")
        return False
    if high <= 0 or -low > high:
        text = f"of {what}, at init, from {_n(low)} to {_n(high)}: negative curvature dominates"
        why = (
            "f is strongly convex in y, and y maximises it"
            if minimax
            else "it is concave in y, and methods minimise it"
        )
        findings.add("curvature in y", text, "bad", f"{why}: does a loss have the wrong sign?")
        return False
    return True


def _check_residual(norms: list[float], high: float, what: str, findings: Findings) -> None:
    steps = len(norms) - 1
    if norms[0] <= 1e-10 * max(high, 1):
        findings.add("residual of y", f"{what} is solved at init already")
        return
    ratio = norms[-1] / norms[0]
    findings.numbers.update({"residual": ratio, "steps": steps})
    text = f"‖∇_y g‖ comes to {_n(ratio)} of its start in {steps} gradient step(s) of 1/ℓ or less"
    if not ratio < _GROWTH:
        findings.add(
            "residual of y",
            f"‖∇_y g‖ is {_n(ratio)} times its start after {steps} gradient step(s) that lower the value",
            "bad",
            "the lower level has no minimum nearby: add a penalty on y, or start y elsewhere.",
        )
    elif ratio > 0.1:
        findings.add("residual of y", text, "note", "that is slow: rescale the data, or add a penalty on y.")
    else:
        findings.add("residual of y", text)


def _check_curvature(
    low: float, high: float, left: float, solved: bool, what: str, size: int, sample: Sample, findings: Findings
) -> bool:
    """Add a line on the curvature at the solution; return whether a hypergradient makes sense there."""
    low = 0.0 if abs(low) <= 1e-12 * high else low
    findings.numbers.update({"mu": low, "smoothness": high, "condition": high / low if low > 0 else math.inf})
    text = f"of {what} from μ = {_n(low)} to ℓ = {_n(high)}"
    more = "" if sample.whole else "; or look at more data, check(..., at_most=..., samples=...)"
    penalty = f"add a penalty on y, ½·λ·‖y‖² with λ of about {_n(high / 1000)}{more}."
    if low < -_CURVED_DOWN * high:
        findings.add("curvature in y", f"{text}: it is not convex, even where it was minimised", "bad", penalty)
        return False
    if low > _FLAT * high:
        findings.add("curvature in y", f"{text}, condition {_n(high / low)}: strongly convex")
        return True
    if solved and left > 1e-3:
        enough_rows = sample.ids.size * len(jax.tree.leaves(sample.lower)[0][0]) >= size
        text = f"{text}: it is not strongly convex, and the upper level feels the flat directions"
        findings.add("curvature in y", text, "bad" if sample.whole or enough_rows else "note", penalty)
        return False
    why, advice = "the upper level does not feel the flat directions", ""
    if left > 1e-3:
        why = "it was not solved"
        advice = f"the theory does not hold; what works in practice may work here, too. Or {penalty}"
    findings.add("curvature in y", f"{text}: not strongly convex, but {why}", "note", advice)
    return True


def _check_share(direct: Vector, implicit: Vector, findings: Findings) -> None:
    by_x, by_y = float(np.linalg.norm(direct)), float(np.linalg.norm(implicit))
    share = by_y / max(by_x + by_y, 1e-300)
    findings.numbers["implicit_share"] = share
    text = f"{share:.1%} of the hypergradient (the rest is ∇_x f)"
    advice = "at this point x acts on f only directly, and a single-level method would do as well."
    findings.add("implicit part", text, *(("note", advice) if share < 1e-6 else ()))


def _suggest(problem: Any, low: float, high: float, norms: list[float], findings: Findings) -> None:
    """Suggest steps of 1/ℓ, how many steps leave a tenth of y's residual, and how many terms leave a hundredth.

    A tenth is enough because y continues from round to round.
    """
    step = float(f"{1 / high:.2g}")
    within = [t for t, norm in enumerate(norms) if norm <= 0.1 * norms[0]]
    condition = high / low if low > _FLAT * high else math.inf
    steps = None
    if within:
        steps = max(1, within[0])
    elif math.isfinite(condition):
        steps = min(_STEPS, math.ceil(condition * math.log(10)))
    if isinstance(problem, WeightedNodes):
        findings.suggested.update({"model_step": step, "linear_step": step} | ({"steps": steps} if steps else {}))
        return
    findings.suggested.update(({"lower_local_steps": steps} if steps else {}) | {"lower_step": step})
    if isinstance(problem, Bilevel):
        findings.suggested["hessian_step"] = step
        series = condition * math.log(100)
        if series <= 30:
            findings.suggested["neumann_terms"] = math.ceil(series)
        else:
            terms = math.sqrt(condition) / 2 * math.log(200) if math.isfinite(condition) else 30
            findings.suggested.update({"neumann": "cg", "neumann_terms": math.ceil(min(terms, 50))})


def _n(value: float) -> str:
    return f"{value:.3g}"
