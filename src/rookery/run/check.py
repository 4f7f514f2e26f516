"""`check`: diagnose a problem before a run and suggest hyperparameters."""

from collections.abc import Callable, Iterable
from typing import Any

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
from rookery.problems.functions import with_key
from rookery.problems.problems import Bilevel, Composed, Minimax, Problem, SingleLevel, WeightedNodes
from rookery.problems.variables import adapt
from rookery.run.diagnosis import Diagnosis, Findings, Line
from rookery.run.hypergradient import Sample, check_leaves, check_nested, compare_derivatives

_BLOCK = 64  # samples of a batch in the search for values that are not finite
_BLOCKS = 1024  # such batches, at most
_COUNTS = (2, 3, 5, 64)  # samples of the batches that are compared with single samples


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
        at_most: the number of clients to examine, chosen from the larger half (for weighted nodes: all clients).
        samples: the number of samples per client and level, at most.
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
    findings = Findings()
    sample = _sample(problem, clients, at_most, samples)
    findings.lines.append(_means(problem, clients, x, y))
    findings.lines.extend(_precision(init, x))
    problem = with_key(problem, jax.random.key(seed))
    finite = _finite(problem, clients, x, y, sample)
    findings.lines.extend(finite)
    if all(line.verdict == "good" for line in finite):
        with jax.enable_x64(True):
            _in_double(problem, sample, x, y, np.random.default_rng(seed), findings)
    title = f"{type(problem).__name__}, looked at {len(sample.ids)} of {clients.n} clients"
    return Diagnosis(title, tuple(findings.lines), findings.numbers, findings.suggested)


def _sample(problem: Problem, clients: Clients, at_most: int, samples: int) -> Sample:
    order = np.argsort(-(clients.lower_sizes + clients.upper_sizes), kind="stable")
    if isinstance(problem, WeightedNodes):
        ids = np.arange(clients.n)
    else:
        larger = order[: max(at_most, -(-clients.n // 2))]
        ids = np.sort(larger[np.linspace(0, len(larger) - 1, min(at_most, len(larger))).astype(int)])
    weights = np.asarray(clients.weights, float)[ids]
    weights = weights / weights.sum() if weights.sum() > 0 else np.full(len(ids), 1 / len(ids))
    lower, upper = (_rows(source, ids, samples) for source in (clients.lower, clients.upper))
    center = None if clients.center is None else jax.tree.map(lambda a: a[0], _rows(clients.center, [0], samples))
    count = sum(len(ids) * len(jax.tree.leaves(rows)[0][0]) for rows in (lower, upper))
    whole = count == clients.lower_sizes.sum() + clients.upper_sizes.sum()
    return Sample(ids, weights, lower, upper, center, whole)


def _rows(source: ClientRows, ids: Iterable[int], most: int) -> Any:
    """Return equally many samples of each client, spread over its data."""
    ids = np.asarray(ids)
    sizes, offsets = np.asarray(source.sizes)[ids], np.asarray(source.offsets)[ids]
    count = min(most, int(sizes.min()))
    index = offsets[:, None] + (np.arange(count)[None] * sizes[:, None]) // count
    return jax.tree.map(lambda a: np.asarray(a)[index], source.rows)


# With the arguments as they are.


def _means(problem: Problem, clients: Clients, x: Any, y: Any) -> Line:
    names = ["f", *(["g"] if isinstance(problem, Bilevel) else ["r"] if isinstance(problem, Composed) else [])]
    if problem.batch_statistic:
        return Line("means over the batch", "not compared: batch_statistic=True", "note")
    sizes = max(clients.lower_sizes.max(), clients.upper_sizes.max())
    if sizes < 2:
        return Line("means over the batch", "not checked: every client has one sample", "note")
    counts = [count for count, smaller in zip(_COUNTS, (0, *_COUNTS), strict=False) if smaller < sizes]
    try:
        for name in names:
            if name not in problem.random:
                checks.check_mean(problem, clients, x, y, name, counts)
    except ValueError as error:
        value, _, advice = str(error).partition(" Where clients differ")
        advice, source = advice[advice.index(WRITE_A_MEAN) :], rows_of(clients, name)
        if source.widest == source.narrowest:  # `solve` only warns
            advice = WRITE_A_MEAN + UNLESS
        return Line("means over the batch", value.rstrip("."), "bad", advice)
    return Line("means over the batch", ", ".join(name for name, *_ in _losses(problem, clients, None)))


def _precision(init: Any, x: Any) -> list[Line]:
    """Return a line if a start in double precision is rounded to single precision."""
    wide = any(getattr(leaf, "dtype", None) == np.float64 for leaf in jax.tree.leaves(init))
    if not wide or jnp.result_type(*jax.tree.leaves(x)) != jnp.float32:
        return []
    advice = 'call jax.config.update("jax_enable_x64", True) before making the clients to compute in float64.'
    return [Line("precision", "init is float64, and runs compute in float32, JAX's default", "note", advice)]


def _losses(problem: Any, clients: Clients, value: Any) -> list[tuple[str, ClientRows, Callable[..., Any]]]:
    """Return the name of each loss, its data, and the loss as a function (z, rows) with z = (x, y)."""
    f = lambda z, rows: problem.f(*z, rows)
    if isinstance(problem, Bilevel):
        g = lambda z, rows: problem.g(z[0], z[1], rows)
        return [("upper", clients.upper, f), ("lower", clients.lower, g)]
    if isinstance(problem, Composed):
        more = () if not problem.inner_is_conditional else (jax.tree.map(lambda a: a[0], clients.upper.rows),)

        def inner(z: Any, rows: Any) -> Any:
            values = problem.forward(z[0], lambda n, z: problem.chain[n](z, rows, *more))
            return sum(jnp.sum(leaf) for leaf in jax.tree.leaves(values))

        outer = lambda z, rows: problem.f(z[0], value, rows)
        return [("inner", clients.lower, inner), ("outer", clients.upper, outer)]
    name = "objective" if isinstance(problem, Minimax) else "loss"
    losses = [(name, clients.upper, f)]
    if isinstance(problem, WeightedNodes) and clients.center is not None:
        losses.append((f"{name} at the centre", clients.center, f))
    return losses


def _finite(problem: Problem, clients: Clients, x: Any, y: Any, sample: Sample) -> list[Line]:
    """Return a line for each loss that is not finite somewhere; one good line if there is none."""
    value = None
    if isinstance(problem, Composed):
        more = (jax.tree.map(lambda a: a[0, 0], sample.upper),) if problem.inner_is_conditional else ()
        rows = jax.tree.map(lambda a: a[0], sample.lower)
        value = problem.forward(x, lambda n, z: problem.chain[n](z, rows, *more))
    advice = (
        "look for log, sqrt or a division at 0 and for exp of a large number; a jnp.where does not protect a gradient, "
        "so put a safe number into the branch that is not taken."
    )
    lines, counts = [], {}
    for name, source, loss in _losses(problem, clients, value):
        blocks, owner = _blocks(source)
        counts[id(source)] = np.unique(blocks).size  # the last batches of a client overlap, and levels may share data
        rows = source.rows
        if on_host(rows):
            flat = blocks.reshape(-1)
            rows = jax.tree.map(lambda a: a[flat], rows)
            blocks = np.arange(blocks.size).reshape(blocks.shape)
        codes = np.asarray(jax.jit(_codes(loss))((x, y), rows, jnp.asarray(blocks)))
        if codes.any():
            first, wrong = int(np.argmax(codes > 0)), int((codes > 0).sum())
            who = "the centre" if source is clients.center else f"client {clients.names[owner[first]]}"
            what = f"{type(problem).__name__}.{name}: {'its gradient' if codes[first] == 1 else 'it'}"
            text = f"{what} is not finite on samples of {who} ({wrong} of {len(codes)} batches), at init"
            lines.append(Line("finite values", text, "bad", advice))
    return lines or [Line("finite values", f"values and gradients at init, on {sum(counts.values())} samples")]


def _codes(loss: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that gives each batch a code: 2 if the value is not finite, 1 if only the gradient, else 0."""

    def codes(z: Any, rows: Any, blocks: Any) -> Any:
        def code(index: Any) -> Any:
            value, slopes = jax.value_and_grad(loss)(z, jax.tree.map(lambda a: a[index], rows))
            fine = jnp.stack([jnp.all(jnp.isfinite(leaf)) for leaf in jax.tree.leaves(slopes)])
            return jnp.where(jnp.isfinite(value), jnp.where(jnp.all(fine), 0, 1), 2)

        return jax.lax.map(code, blocks)

    return codes


def _blocks(source: ClientRows) -> tuple[np.ndarray, np.ndarray]:
    """Return the rows of batches of one length that cover the clients' samples, up to a limit, and their clients."""
    sizes, offsets = np.asarray(source.sizes), np.asarray(source.offsets)
    length = min(_BLOCK, source.narrowest)
    ids = np.unique(np.linspace(0, len(sizes) - 1, min(len(sizes), _BLOCKS)).astype(int))
    per_client = max(1, _BLOCKS // len(ids))
    starts, owner = [], []
    for i in ids:
        begins = np.minimum(np.arange(0, sizes[i], length), sizes[i] - length)[:per_client]
        starts.extend(offsets[i] + begins)
        owner.extend([i] * len(begins))
    return np.asarray(starts)[:, None] + np.arange(length), np.asarray(owner)


# In double precision, on the sample.


def _in_double(problem: Problem, sample: Sample, x: Any, y: Any, rng: np.random.Generator, findings: Findings) -> None:
    sample, x, y = (jax.tree.map(_widened, value) for value in (sample, x, y))
    try:
        if isinstance(problem, SingleLevel | Composed):
            _plain_gradient(_objective(problem, sample), x, rng, findings)
        else:
            check_nested(problem, sample, x, y, rng, findings)
    except (TypeError, ValueError) as error:
        first = str(error).strip().splitlines()[0]
        findings.add("in double precision", f"the losses fail there: {first}", "note", "no further checks were made.")


def _widened(a: Any) -> Any:
    if not hasattr(a, "dtype"):
        return a
    return np.asarray(a, np.float64) if jnp.issubdtype(a.dtype, jnp.floating) else np.asarray(a)


def _objective(problem: Any, sample: Sample) -> Callable[[Any], Any]:
    """Return the objective of a problem without a lower level, as a function of x."""
    p = jnp.asarray(sample.weights)
    if isinstance(problem, SingleLevel):
        return lambda x: p @ jax.vmap(lambda rows: problem.f(x, (), rows))(sample.upper)
    if problem.inner_is_conditional:

        def of_client(x: Any, lower: Any, upper: Any) -> Any:
            of_sample = lambda row: problem.f(x, problem.inner(x, lower, row), jax.tree.map(lambda a: a[None], row))
            return jnp.mean(jax.vmap(of_sample)(upper))

        return lambda x: p @ jax.vmap(lambda low, up: of_client(x, low, up))(sample.lower, sample.upper)

    def composed(x: Any) -> Any:
        each = lambda n, z: jax.vmap(lambda rows: problem.chain[n](z, rows))(sample.lower)
        if getattr(problem, "inner_scope", "global") == "client":
            return p @ jax.vmap(lambda value, rows: problem.f(x, value, rows))(each(0, x), sample.upper)
        mean = lambda n, z: jax.tree.map(lambda a: jnp.tensordot(p, a, axes=1), each(n, z))
        value = problem.forward(x, mean)
        return p @ jax.vmap(lambda rows: problem.f(x, value, rows))(sample.upper)

    return composed


def _plain_gradient(objective: Callable[[Any], Any], x: Any, rng: np.random.Generator, findings: Findings) -> None:
    flat, unravel = ravel_pytree(x)
    value_and_slope = jax.jit(jax.value_and_grad(lambda z: objective(unravel(z))))
    at = lambda z: tuple(np.asarray(part, float) for part in value_and_slope(z))
    x0 = np.asarray(flat, float)
    slope = at(x0)[1]
    slopes = [slope, at(x0 + 0.1 * rng.normal(size=x0.shape))[1]]
    if not np.any(slopes):
        findings.add("x is used", "the objective does not depend on x", "bad", "let the loss use x.")
        return
    check_leaves(unravel, slopes, findings)
    compare_derivatives(lambda z: float(at(z)[0]), x0, slope, rng, findings, "gradient")
