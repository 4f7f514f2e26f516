"""Checks of a problem's functions by their values on a few samples: finite, and means over their batch."""

import functools
import itertools
from collections import OrderedDict
from collections.abc import Callable, Iterable
from typing import Any
from weakref import WeakKeyDictionary

import jax
import jax.numpy as jnp
import numpy as np

from rookery.base import compat, jaxprs
from rookery.base.programs import Programs
from rookery.data.clients import Clients
from rookery.data.rows import ClientRows
from rookery.engines.checks.losses import known_of, level_name, number_of_samples, user_name, warn
from rookery.language.client import Client
from rookery.problems.functions import with_key
from rookery.problems.problems import Bilevel, Composed, Problem

WRITE_A_MEAN = "Write it as a mean (jnp.mean over the batch, plus terms without data)"
UNLESS = (
    "; if the loss is a statistic of its batch, e.g. Cox's or one with batch normalisation, give the problem "
    "batch_statistic=True."
)
_SCALE = f"Its size depends on the batch, and clients of other sizes would be refused. {WRITE_A_MEAN}{UNLESS}"

_SOUND: OrderedDict[str, None] = OrderedDict()  # checks that passed, by program and data
_VALUES: WeakKeyDictionary[Any, set[str]] = WeakKeyDictionary()  # by problem: the samples and starts that passed
_REMEMBERED = 256
_SEARCHED = 64  # samples searched for some that differ
_OF_MEASURE = 16  # samples for an evaluation
_OF_BATCH = 3  # samples of a batch
_OF_CLIENT = 4096  # samples on which a value that is not finite is computed again

# Each program runs once or twice on a few samples, so compilation is what it costs.
_QUICK = {"xla_backend_optimization_level": 0}

_COMPILED = Programs(most=64)  # their constants are inputs, so that other data find them again


class _Traced:
    """A function traced for arguments of these shapes; programs that are equal are compiled once."""

    def __init__(self, function: Callable[..., Any], *args: Any) -> None:
        traced, shapes = jaxprs.trace(function, *args)
        self._jaxpr, self._structure = jaxprs.open_up(traced), jax.tree.structure(shapes)
        self.consts, self.identity = traced.consts, jaxprs.identified(self._jaxpr)

    def __call__(self, *args: Any) -> Any:
        options = _QUICK | compat.cpu_options() if jax.default_backend() == "cpu" else None
        run = functools.partial(jaxprs.run, self._jaxpr)
        program = _COMPILED.find(self.identity, lambda: jax.jit(run, compiler_options=options))
        return jax.tree.unflatten(self._structure, program(*self.consts, *jax.tree.leaves(args)))


class _Comparison:
    """A function that computes something in two ways, traced once. `passed`: whether these data have passed before."""

    def __init__(self, both_ways: Callable[..., Any], *args: Any) -> None:
        self._traced = _Traced(both_ways, *args)
        self._key = jaxprs.digest(self._traced.identity[0], *self._traced.consts, *jax.tree.leaves(args[1:]))
        self.passed = self._key in _SOUND

    def __call__(self, *args: Any) -> Any:
        return self._traced(*args)

    def remember(self) -> None:
        """Record that the check passed."""
        _SOUND[self._key] = None
        if len(_SOUND) > _REMEMBERED:
            _SOUND.popitem(last=False)


# A loss is a mean over its batch.


def check_whole_batches(problem: Problem, names: frozenset[str]) -> None:
    """Raise ValueError if one of the losses `names`, evaluated sample by sample, is a statistic of its batch."""
    split = sorted(names & {"f", "g", "r"})
    if problem.batch_statistic and split:
        raise ValueError(
            f"{user_name(problem, split[0])} must be evaluated on whole batches, because of batch_statistic=True; this "
            "run would evaluate it sample by sample, as it does if clients differ in size, have fewer samples than a "
            "batch, or are private for each record. Give a batch_size that every client can fill, or clients of one "
            "size."
        )


def check_means(problem: Any, clients: Clients, x: Any, y: Any, names: frozenset[str]) -> None:
    """Check on a few samples that losses are finite at the start, and means over their batch.

    A loss in `names` is evaluated sample by sample, which would change the problem if it is not a mean: that raises
    ValueError. Any other loss that is not a mean causes a warning. The values and derivatives that methods use are
    computed on a batch, near the start, and compared with their means over its samples. Compiling takes most of the
    time, so that all of it is one program, which runs twice.
    """
    check_whole_batches(problem, names)
    if any(isinstance(a, jax.ShapeDtypeStruct) for a in jax.tree.leaves((x, y))):
        return
    composed = isinstance(problem, Composed)
    losses = "fg" if isinstance(problem, Bilevel) else "rf" if composed else "f"
    split = sorted(names - problem.random)  # two evaluations of a random loss differ in any case
    some = lambda name: _some_samples(rows_of(clients, name), clients.here, _OF_BATCH, least=1)
    rows = {name: some(name) for name in [*losses, *(name for name in split if name not in losses)]}
    key = jaxprs.digest(repr(sorted(names)), *jax.tree.leaves((rows, x, y)))
    if key in known_of(_VALUES, problem):
        return
    split = [name for name in split if len(jax.tree.leaves(rows[name])[0]) > 1]
    compared = set() if problem.batch_statistic else set(losses) - names - problem.random
    fixed = with_key(problem, jax.random.key(0))
    sample = jax.tree.map(lambda a: _read(a, 0, 1)[0], clients.upper.rows) if composed else None

    def values(x: Any, y: Any, rows: Any) -> dict[str, Any]:
        more = [sample] if composed and fixed.inner_is_conditional else []
        value = lambda n, z: fixed.chain[n](z, rows["r"], *more)
        at = (x, fixed.forward(x, value)) if composed else (x, y)
        loss = {"f": lambda batch: fixed.f(*at, batch), "g": lambda batch: fixed.g(x, y, batch)}
        of = loss | {"r": lambda batch: fixed.r(*at, batch, *more)}
        alone = lambda name: _over_samples(of[name], rows[name]) if name in compared else None
        return {name: (of[name](rows[name]), alone(name)) for name in losses}

    def both(x: Any, y: Any, rows: Any) -> tuple[dict[str, Any], dict[str, Any]]:
        used = {name: _both_ways(problem, clients, name)((x, y), [rows[name]])[0] for name in split}
        return used, values(x, y, rows)

    evaluate = _Traced(both, x, y, rows)
    near, at_start = evaluate(*_nudged((x, y)), rows), evaluate(x, y, rows)
    for name in split:
        _check_split(problem, rows_of(clients, name), name, rows[name], (each[0][name] for each in (near, at_start)))
    for name in losses:
        if not _finite(at_start[1][name][0]):
            _check_finite(problem, clients, name, lambda *args: _Traced(values, *args)(*args), x, y, rows)
    for name, (together, alone) in near[1].items():
        for level, a, b in _pairs(together, alone) if name in compared else ():
            if not _close(a, b):
                warn(f"{_not_a_mean(problem, name, level, 'it', a, b, rows[name])} {_SCALE}")
                break
    known_of(_VALUES, problem).add(key)


def rows_of(clients: Clients, name: str) -> Any:
    """Return the rows on which a loss (f, g or r) is evaluated."""
    return clients.lower if name in ("g", "r") else clients.upper


def check_mean(problem: Problem, clients: Clients, x: Any, y: Any, name: str, counts: Iterable[int]) -> None:
    """Raise ValueError if a loss (f, g or r) is not a mean over batches of each of these numbers of samples."""
    source = rows_of(clients, name)
    some = (_some_samples(source, clients.here, count) for count in counts)
    batches = [rows for rows in some if rows is not None]
    if not batches:
        return
    compare = _Comparison(_both_ways(problem, clients, name), _nudged((x, y)), batches)
    if compare.passed:
        return
    found = [compare(z, batches) for z in (_nudged((x, y)), (x, y))]
    for i, rows in enumerate(batches):
        _check_split(problem, source, name, rows, (each[i] for each in found))
    compare.remember()


def _check_split(problem: Problem, source: ClientRows, name: str, rows: Any, found: Iterable[tuple[Any, Any]]) -> None:
    """Raise ValueError if what was found for a loss on a batch is not the mean of what was found sample by sample.

    `found`: both, at one point after another; the first at which all is finite counts.
    """
    together, alone = next(filter(_finite, found), ((), ()))
    for level, a, b in _pairs(together, alone):
        if not _close(a, b):
            what = "its value" if name == "r" else "it" if a.ndim == 0 and name == "f" else "its gradient"
            fix = "; or give all clients the same number of samples, and batches that are not larger"
            not_a_mean = _not_a_mean(problem, name, level, what, a, b, rows)
            raise ValueError(
                f"{not_a_mean} Where clients differ in size, have fewer samples than "
                "a batch, or where the method weights single samples, the loss is evaluated sample by sample, and that "
                f"would change the problem. {WRITE_A_MEAN}{'' if source.widest == source.narrowest else fix}."
            )


def _both_ways(problem: Problem, clients: Clients, name: str) -> Callable[[Any, Any], list[tuple[Any, Any]]]:
    """Return a function (z, batches) of what methods use of a loss: for each batch, and the mean over its samples."""
    used = _used_of(problem, clients, name)

    def both(z: Any, batches: list[Any]) -> list[tuple[Any, Any]]:
        ends = [0, *np.cumsum([len(jax.tree.leaves(rows)[0]) for rows in batches]).tolist()]
        together = jax.tree.map(lambda *each: jnp.concatenate(each), *batches) if len(batches) > 1 else batches[0]
        single = _of_samples(lambda row: used(z, row), together)
        mean = lambda begin, end: jax.tree.map(lambda a: jnp.mean(a[begin:end], axis=0), single)
        return [(used(z, rows), mean(*cut)) for rows, cut in zip(batches, itertools.pairwise(ends), strict=True)]

    return both


def _used_of(problem: Any, clients: Clients, name: str) -> Callable[[Any, Any], Any]:
    """Return a function (z, rows) of what methods use of the loss at z = (x, y), all linear in the batch's mean."""
    if name == "r":
        sample = jax.tree.map(lambda a: a[0], clients.upper.rows)
        return lambda z, rows: problem.r(*z, rows, *([sample] if problem.inner_is_conditional else []))
    if name == "f":
        return lambda z, rows: jax.value_and_grad(lambda z: problem.f(*z, rows))(z)

    def of_g(z: Any, rows: Any) -> Any:  # ∇_y g, and the products with v = y: of ½‖y − r(x)‖² these are means, too
        x, y = z
        gradients = lambda y: jax.grad(problem.g, (0, 1))(x, y, rows)
        return jax.grad(problem.g, 1)(x, y, rows), jax.jvp(gradients, (y,), (y,))[1]

    return of_g


def _check_finite(
    problem: Any, clients: Clients, name: str, evaluate: Callable[..., Any], x: Any, y: Any, rows: Any
) -> None:
    """Raise ValueError if a loss is not finite even on all samples of a client together.

    A mean over the samples of a class, for example, is not finite on a few samples without that class.
    """
    more = {loss: _some_samples(rows_of(clients, loss), clients.here, _OF_CLIENT, least=1) for loss in rows}
    if not _finite(evaluate(x, y, more)[name][0]):
        who = clients.names[_largest(rows_of(clients, name), clients.here)[0]]
        raise ValueError(
            f"{user_name(problem, name)} must be finite at init; it is NaN or infinite on the samples of client {who}. "
            "Start elsewhere, or look for log, sqrt or a division at 0 and for exp of a large number."
        )


def _pairs(together: Any, alone: Any) -> list[tuple[int, Any, Any]]:
    """Return the leaves of two trees in pairs, with their positions in the outermost tuple, if there is one."""
    leaves = zip(jax.tree_util.tree_leaves_with_path(together), jax.tree.leaves(alone), strict=True)
    return [(getattr(path[0], "idx", 0) if path else 0, a, b) for (path, a), b in leaves]


def _not_a_mean(problem: Any, name: str, level: int, what: str, together: Any, alone: Any, rows: Any) -> str:
    shown = lambda v: np.array2string(np.asarray(v).ravel()[:3], precision=5)
    count = number_of_samples(len(jax.tree.leaves(rows)[0]))
    whose = level_name(problem, level) if name == "r" else user_name(problem, name)
    return (
        f"{whose} must be a mean over its batch; on {count} {what} is {shown(together)}, and the "
        f"mean over each of them alone is {shown(alone)}."
    )


# Features and evaluations.


def check_features(problem: Problem, clients: Clients, x: Any) -> None:
    """Raise ValueError if a row of a problem's features depends on other rows.

    Two samples of each level, if need be of two clients, are computed together and one by one, near the start.
    """
    features: Any = problem.features
    sources = [] if features is None else [s for s in (clients.lower, clients.upper) if s is not None]

    def both_ways(x: Any, rows: Any) -> Any:
        return features(x, rows), jax.vmap(lambda row: features(x, jax.tree.map(lambda a: a[None], row)))(rows)

    for rows in (_some_samples(source, clients.here, 2, of_one=False) for source in sources):
        if rows is None or (compare := _Comparison(both_ways, _nudged(x), rows)).passed:
            continue
        together, alone = map(jax.tree.leaves, compare(_nudged(x), rows))
        for a, b in zip(together, alone, strict=True):
            if a.shape[:1] != (2,) or b.shape != (2, 1, *a.shape[1:]) or not _close(a, b[:, 0]):
                raise ValueError(
                    "Bilevel.features must keep the batch's leading axis and compute each row from that row only, "
                    "because it is given all of a client's samples, or those of both levels, in one batch; on two "
                    "samples together it returns other rows than on each of them. Compute statistics of the batch "
                    "in the losses, and leave features out."
                )
        compare.remember()


def check_measure(problem: Problem, clients: Clients, measure: Callable[..., Any], z: Any, memory: Any) -> None:
    """Raise ValueError if `evaluate_client` passes something to client.mean that is not a mean over samples.

    A few samples of the largest client are evaluated together and one by one. `memory` gives the shapes of the clients'
    memory, with a row per client.
    """
    sources = [source for source in (clients.lower, clients.upper, clients.test) if source is not None]
    if all(source.widest == source.narrowest for source in sources):
        return
    own_memory = _nudged(jax.tree.map(lambda a: jnp.zeros(a.shape[1:], a.dtype), memory))
    x, y = _nudged(z)
    evaluate = lambda data: measure(Client(problem, data, 0, 0).with_key(jax.random.key(0)), x, y, own_memory)
    together, alone = (
        _Traced(evaluate, few)(few) for few in (clients.subset(_OF_MEASURE, ragged) for ragged in (False, True))
    )
    for name, a in together.items():
        a, b = float(a), float(alone[name])
        if np.isfinite([a, b]).all() and abs(a - b) > 1e-3 * (abs(a) + abs(b)) + 1e-12:
            raise ValueError(
                f"evaluate_client: {name!r} must be a mean over samples; on a few of them it is {a:.5g}, and the mean "
                f"over each of them alone is {b:.5g}. Where clients differ in size, client.mean evaluates sample by "
                "sample; compute it from client.samples() instead, where only the rows that batch.mask marks are "
                "samples."
            )


# Numbers.


def _over_samples(function: Callable[[Any], Any], rows: Any) -> Any:
    """Return the mean of function over batches of one sample each."""
    return jax.tree.map(lambda a: jnp.mean(a, axis=0), _of_samples(function, rows))


def _of_samples(function: Callable[[Any], Any], rows: Any) -> Any:
    """Return the values of function on batches of one sample each, stacked."""
    return jax.vmap(lambda row: function(jax.tree.map(lambda a: a[None], row)))(rows)


def _finite(value: Any) -> bool:
    return all(bool(np.isfinite(np.asarray(a, np.float64)).all()) for a in jax.tree.leaves(value))


def _close(a: Any, b: Any) -> bool:
    """Return whether two arrays agree up to rounding, or are not finite and so cannot be compared."""
    if not jnp.issubdtype(a.dtype, jnp.floating):
        return bool(np.all(np.asarray(a) == np.asarray(b)))
    tolerance = min(0.1, max(1e-6, 8000 * float(jnp.finfo(a.dtype).eps)))
    a, b = (np.asarray(value, np.float64).ravel() for value in (a, b))
    if not (np.isfinite(a).all() and np.isfinite(b).all()):
        return True
    return float(np.linalg.norm(a - b)) <= tolerance * float(np.linalg.norm(a) + np.linalg.norm(b)) + 1e-30


def _nudged(z: Any) -> Any:
    """Return a point near z: at z itself, e.g. all zeros, many values are equal by chance."""
    rng = np.random.default_rng(0)
    return jax.tree.map(lambda a: (np.asarray(a, np.float64) + 0.1 * rng.normal(size=a.shape)).astype(a.dtype), z)


# Samples.


def _largest(source: ClientRows, here: range | None) -> tuple[int, int]:
    """Return the client with the most samples among those whose data are here, and its number of samples."""
    here = range(len(source.sizes)) if here is None else here
    sizes = np.asarray(source.sizes)[here.start : here.stop]
    return here.start + int(np.argmax(sizes)), int(sizes.max())


def _some_samples(source: ClientRows, here: range | None, count: int, least: int = 2, of_one: bool = True) -> Any:
    """Return up to `count` samples of the largest client that is here, if possible ones that differ from the first.

    Returns None if that client has fewer than `least`. With of_one=False the samples may come from several clients.
    """
    client, size = _largest(source, here)
    if size < least and not of_one:
        here = range(len(source.sizes)) if here is None else here
        client, size = here.start, int(np.asarray(source.sizes)[here.start : here.stop].sum())
    if size < least:
        return None
    begin = int(np.asarray(source.offsets)[client])
    end = begin + min(size, max(count, min(size, _SEARCHED)))
    samples = jax.tree.map(lambda a: _read(a, begin, end), source.rows)
    differs = np.any([(a != a[:1]).reshape(len(a), -1).any(axis=1) for a in jax.tree.leaves(samples)], axis=0)
    order = np.argsort(~differs[1:], kind="stable") + 1
    chosen = np.sort(np.concatenate([[0], order[: count - 1]]))
    return jax.tree.map(lambda a: a[chosen], samples)


def _read(a: Any, begin: int, end: int) -> np.ndarray:
    """Return some rows in NumPy; JAX would compile the slice, which is needed only for rows off the host."""
    if isinstance(a, jax.Array) and all(device.platform == "cpu" for device in a.devices()):
        a = np.asarray(a)
    return np.asarray(a[begin:end])
