"""Small problems of every class, with clients of equal and of unequal size, to check methods on."""

import dataclasses
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from rookery.channels import clip, gaussian
from rookery.data.clients import Clients
from rookery.engines.checks import start_values
from rookery.engines.engine import Job
from rookery.language.channel import Faults, chain
from rookery.language.hyperparameters import BatchSize, Steps, annotations
from rookery.problems.problems import Bilevel, Compositional, Minimax, MultiLevel, SingleLevel, WeightedNodes
from rookery.tasks.quadratic import quadratic

UNEQUAL = (2, 3, 5, 4)  # samples per client
VERY_UNEQUAL = (1, 3, 40, 200)
# The classes of problems; in a "Local…" problem every client has its own lower level or inner function.
KINDS = (
    "Bilevel", "LocalBilevel", "Minimax", "Compositional", "LocalCompositional", "MultiLevel", "SingleLevel",
    "WeightedNodes",
)  # fmt: skip

# Clipped and noisy updates, and lost replies.
HARD: dict[str, Any] = {"channel": chain(clip(1.0), gaussian(0.1)), "faults": Faults(dropout=0.2), "noise_seed": 7}


@dataclass(frozen=True)
class Case:
    """A problem with its clients' data in lists, so that clients can be reordered, repeated or left out.

    Attributes:
        problem: the problem.
        data: for each level, a list with the rows of each client.
        init: the start.
        center: the centre's data, as arguments of `Clients`.
        weights: the clients' weights; None: unequal weights, unless the method needs equal ones.
    """

    problem: Any
    data: dict[str, list[Any]]
    init: Any
    center: dict[str, Any] = field(default_factory=dict)
    weights: tuple[float, ...] | None = None

    @property
    def n(self) -> int:
        """The number of clients."""
        return len(next(iter(self.data.values())))

    def clients(self, order: list[int] | None = None, weights: Any = None) -> Clients:
        """Return the clients in this order, which may repeat clients or leave some out."""
        picked: Any = self.data if order is None else {k: [v[i] for i in order] for k, v in self.data.items()}
        learnt = isinstance(self.problem, WeightedNodes)
        return Clients(**picked, **self.center, weights=None if learnt else weights)


def own_case(problem: Any, clients: Clients, init: Any) -> Case:
    """Return the case of a user's problem and clients."""
    if not clients.held:
        raise ValueError("clients must hold data; got the clients of rk.Clients.like, which hold none.")
    data: dict[str, list[Any]] = {}
    for i in range(clients.n):
        for name, rows in clients.client_data(i).items():
            if name in ("lower", "upper", "test"):
                data.setdefault(name, []).extend(rows)
    if clients.one_data_set:
        data.pop("lower" if isinstance(problem, Minimax | SingleLevel) else "upper", None)
    center: dict[str, Any] = {"replace": clients.replace}
    if clients.center is not None:
        rows = jax.tree.map(np.asarray, clients.center.rows)
        center |= {"center": rows, "center_client": clients.center_client}
    return Case(problem, data, init, center, tuple(np.asarray(clients.weights).tolist()))


def _saddle(x: Any, y: Any, batch: Any) -> Any:
    a, b, c = (jnp.mean(batch[k], axis=0) for k in "abc")
    return 0.5 * x @ x * jnp.mean(jnp.exp(batch["c"][:, 0])) + x @ a @ y - 0.5 * y @ y + b @ y - c @ x


def _inner(x: Any, batch: Any) -> Any:
    return {"r": jnp.mean(jnp.tanh(batch["m"] @ x) + batch["s"], axis=0)}


def _outer(value: Any) -> Any:
    return jnp.sum((value["r"] - 0.3) ** 2) + jnp.sum(value["r"] ** 4)


def _client_outer(value: Any, batch: Any) -> Any:
    return jnp.mean(batch["w"]) * jnp.sum(value["r"] ** 2) + _outer(value)


def _second(value: Any, batch: Any) -> Any:
    return jnp.mean(jnp.tanh(value["r"]) * batch["s"] + batch["m"][..., 0] * value["r"] ** 2, axis=0)


def _extra(x: Any, batch: Any) -> Any:
    return 0.5 * jnp.mean(batch["w"]) * x @ x


def _loss(x: Any, batch: Any) -> Any:
    return jnp.mean(jnp.log1p(jnp.exp(-batch["t"] * (batch["a"] @ x)))) + 0.05 * x @ x


@cache
def case(kind: str, clients: int = 4, samples: int = 3) -> Case:
    """Return the problem of this class, with heterogeneous clients of equal size."""
    rng = np.random.default_rng(5)
    draw = lambda *shape: rng.normal(size=(samples, *shape))
    if kind in ("Bilevel", "LocalBilevel"):
        scope: Any = "client" if kind == "LocalBilevel" else "global"
        task = quadratic(clients=clients, samples=samples, noise=0.1, seed=3, scope=scope)
        data = {level: [task.clients.client_data(i)[level][0] for i in range(clients)] for level in ("lower", "upper")}
        return Case(task.problem, data, task.init)
    if kind == "Minimax":
        data = {"upper": [{"a": 0.3 * draw(3, 2), "b": draw(2), "c": 0.3 * draw(3)} for _ in range(clients)]}
        return Case(Minimax(_saddle), data, (np.ones(3), np.ones(2)))
    if kind in ("Compositional", "LocalCompositional", "MultiLevel"):
        data = {
            "lower": [{"m": draw(2, 3), "s": draw(2)} for _ in range(clients)],
            "upper": [{"w": np.abs(draw())} for _ in range(clients)],
        }
        problem = Compositional(_inner, _outer, _extra)
        if kind == "LocalCompositional":
            problem = Compositional(_inner, _client_outer, _extra, inner_scope="client")
        if kind == "MultiLevel":
            three = MultiLevel((_inner, _second), lambda value: jnp.sum((value - 0.3) ** 2), _extra)
            return Case(three, data, (np.ones(3), ({"r": np.ones(2)}, np.ones(2))))
        return Case(problem, data, (np.ones(3), {"r": np.ones(2)}))
    data = {"upper": [{"a": draw(3), "t": np.sign(draw())} for _ in range(clients)]}
    center = {"center": {"a": draw(3), "t": np.sign(draw())}}
    if kind == "WeightedNodes":
        return Case(WeightedNodes(_loss), {"lower": data["upper"]}, np.ones(3), center)
    return Case(SingleLevel(_loss), data, np.ones(3), center)


@cache
def ragged(kind: str, clients: int = 4, sizes: tuple[int, ...] = UNEQUAL) -> Case:
    """Return the problem of this class, with clients of these sizes."""
    it, sizes = case(kind, clients, max(sizes)), sizes[:clients]
    cut = lambda clients: [jax.tree.map(lambda a: a[:size], rows) for rows, size in zip(clients, sizes, strict=True)]
    return Case(it.problem, {level: cut(rows) for level, rows in it.data.items()}, it.init, it.center)


def single(it: Case) -> Case:
    """Return the case in float32."""
    narrow = lambda a: np.asarray(a, np.float32) if np.issubdtype(np.asarray(a).dtype, np.floating) else a
    data, init, center = (jax.tree.map(narrow, part) for part in (it.data, it.init, it.center))
    return dataclasses.replace(it, data=data, init=init, center=center)


def kinds(method: Any) -> list[str]:
    """Return the classes of problems that a method claims to solve, as in KINDS."""
    local = getattr(method, "scope", "global") == "client"
    known = (Bilevel, Minimax, Compositional, MultiLevel, SingleLevel, WeightedNodes)
    return ["Local" * local + cls.__name__ for cls in method.solves if cls in known]


def needs(method: Any) -> tuple[str, ...]:
    """Return the method's requirements on the problem, the clients and the run."""
    return getattr(method, "needs", ())


def weights(method: Any, it: Case) -> list[float] | None:
    """Return the clients' weights: unequal, unless the method refuses them."""
    if "equal weights" in needs(method):
        return None
    return [(1, 2, 1, 3)[i % 4] for i in range(it.n)] if it.weights is None else list(it.weights)


def job(method: Any, it: Case, seed: int = 25, **given: Any) -> Job:
    """Return the method on a case as a job for an engine, with three clients per round if the method allows it."""
    clients = it.clients(weights=weights(method, it))
    start = start_values(it.problem, clients, it.init)
    cohort = it.n if "all clients" in needs(method) else min(3, it.n)
    return Job(it.problem, clients, method, start, cohort, seed, **given)


def _annotated(method: Any, kind: Any) -> list[str]:
    kinds = annotations(method.__class__)
    return [field.name for field in dataclasses.fields(method) if kinds.get(field.name) is kind]


def with_minibatches(method: Any) -> Any:
    """Return the method with minibatches of 2 and 1 to 3 local steps, unless its fields say otherwise."""
    batches = {name: 2 for name in _annotated(method, BatchSize) if getattr(method, name) is None}
    steps = {name: (1, 3) for name in _annotated(method, Steps) if isinstance(getattr(method, name), int)}
    return _replaced(method, **batches, **steps)


def with_full_batches(method: Any) -> Any:
    """Return the method with full batches and a fixed number of local steps."""
    batches = dict.fromkeys(_annotated(method, BatchSize))
    steps = {name: 2 for name in _annotated(method, Steps) if not isinstance(getattr(method, name), int)}
    return _replaced(method, **batches, **steps)


def _replaced(method: Any, **given: Any) -> Any:
    """Return the method with these fields, or unchanged if its class refuses the combination."""
    try:
        return dataclasses.replace(method, **given)
    except (TypeError, ValueError):
        return method
