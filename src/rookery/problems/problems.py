"""Problems: records of pure loss functions. A loss is a mean over its batch, plus terms without data, unless it says
otherwise.

Every problem offers algorithms the same two functions of (x, y, batch): `f`, the upper loss, and `g`, the lower loss.
Algorithms may use what is special about a class, e.g. an identity Hessian.

A loss may be random (dropout): it then has another parameter, `key`, and receives a key with every batch. Two gradients
on the same batch, at two points, use the same key.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

from jaxtyping import Array, Float, PyTree

from rookery.base import tree
from rookery.problems.functions import call, required_arguments, takes_key

Loss = Callable[..., Float[Array, ""]]
Projection = Callable[[tree.Tree], tree.Tree]
Key = Array | None
Scope = Literal["global", "client"]


def unconstrained(x: tree.Tree) -> tree.Tree:
    """Return x: the projection of an unconstrained problem."""
    return x


class _Penalised:
    """A problem that may have terms without data."""

    takes: ClassVar[dict[str, str]]  # which of x and y its functions take first
    batch_statistic: bool = False  # whether losses are statistics of their batch, and not means over its rows

    def free(self, loss: str) -> Loss | None:
        """Return the terms of f or g without data, as a function of x and y; None if there are none."""
        return None

    @property
    def without_penalty(self) -> Any:
        """The problem without these terms."""
        return replace(self, penalty=None)  # type: ignore[type-var]


@dataclass(frozen=True)
class Bilevel(_Penalised):
    """min over x of mean f_i(x, y*(x)), where y*(x) minimises mean g_i(x, y).

    Arguments:
        upper: f(x, y, batch), a scalar: the mean over the batch.
        lower: g(x, y, batch), also a mean over the batch; strongly convex in y for the theory to hold.
        lower_scope: "global", one y for all clients; or "client", y_i*(x) minimises the client's own g_i.
        features: optional, features(x, batch): the losses are called with its value instead of the batch. It may depend
            on x, not on y, and keeps the batch's leading axis; each row depends only on that row (no batch statistics).
            A method that moves only y computes it once instead of at every step; one that moves both computes it for
            both levels' batches together.
        project_upper: keeps x in its set after each server step.
        penalty: optional, penalty(x, y): a term of the lower loss without data. `rk.private` with records as the unit
            neither clips it nor adds noise to it.
        batch_statistic: whether a loss is a statistic of the whole batch, such as one with batch normalisation; see
            `SingleLevel`.

    Example:
        >>> import jax.numpy as jnp
        >>> ridge = Bilevel(
        ...     upper=lambda x, y, b: jnp.mean((b["a"] @ y - b["t"]) ** 2),
        ...     lower=lambda x, y, b: jnp.mean((b["a"] @ y - b["t"]) ** 2),
        ...     penalty=lambda x, y: jnp.exp(x) * jnp.sum(y**2),
        ... )
        >>> ridge.lower_scope
        'global'
    """

    upper: Loss
    lower: Loss
    lower_scope: Scope = "global"
    features: Callable[[tree.Tree, PyTree[Any]], PyTree[Any]] | None = None
    project_upper: Projection = unconstrained
    penalty: Callable[..., Float[Array, ""]] | None = None
    batch_statistic: bool = False

    takes: ClassVar[dict[str, str]] = {"upper": "xy", "lower": "xy", "features": "x", "penalty": "xy"}

    def f(self, x: tree.Tree, y: tree.Tree, batch: PyTree[Any], key: Key = None) -> Float[Array, ""]:
        """Return the upper loss on a batch."""
        return call(self.upper, x, y, batch if self.features is None else self.features(x, batch), key=key)

    def g(self, x: tree.Tree, y: tree.Tree, batch: PyTree[Any], key: Key = None) -> Float[Array, ""]:
        """Return the lower loss on a batch."""
        return self.g_seen(x, y, batch if self.features is None else self.features(x, batch), key)

    def f_seen(self, x: tree.Tree, y: tree.Tree, seen: PyTree[Any], key: Key = None) -> Float[Array, ""]:
        """Return the upper loss on a batch after `features`."""
        return call(self.upper, x, y, seen, key=key)

    def g_seen(self, x: tree.Tree, y: tree.Tree, seen: PyTree[Any], key: Key = None) -> Float[Array, ""]:
        """Return the lower loss on a batch after `features`."""
        value = call(self.lower, x, y, seen, key=key)
        return value if self.penalty is None else value + self.penalty(x, y)

    def free(self, loss: str) -> Loss | None:
        return self.penalty if loss == "g" else None

    @property
    def random(self) -> frozenset[str]:
        """Which of f and g (and r, a compositional problem's inner function) take a key."""
        return _random(f=[self.upper], g=[self.lower])


@dataclass(frozen=True)
class Minimax(_Penalised):
    """min over x, max over y of mean f_i(x, y); strongly concave in y for the theory to hold.

    Arguments:
        objective: f(x, y, batch), a scalar: the mean over the batch.
        project_upper: keeps x in its set after each server step.
        penalty: optional, penalty(x, y): a term of the objective without data; see `Bilevel`.
        batch_statistic: whether the objective is a statistic of the whole batch; see `SingleLevel`.
    """

    objective: Loss
    project_upper: Projection = unconstrained
    features: None = None
    penalty: Callable[..., Float[Array, ""]] | None = None
    batch_statistic: bool = False

    takes: ClassVar[dict[str, str]] = {"objective": "xy", "penalty": "xy"}

    def f(self, x: tree.Tree, y: tree.Tree, batch: PyTree[Any], key: Key = None) -> Float[Array, ""]:
        """Return the objective, which x minimises."""
        value = call(self.objective, x, y, batch, key=key)
        return value if self.penalty is None else value + self.penalty(x, y)

    def g(self, x: tree.Tree, y: tree.Tree, batch: PyTree[Any], key: Key = None) -> Float[Array, ""]:
        """Return minus the objective, which y minimises."""
        return -self.f(x, y, batch, key)

    def free(self, loss: str) -> Loss | None:
        penalty = self.penalty
        if penalty is None or loss == "f":
            return penalty
        return lambda x, y: -penalty(x, y)

    @property
    def random(self) -> frozenset[str]:
        """See `Bilevel.random`."""
        return _random(f=[self.objective], g=[self.objective])

    def as_bilevel(self) -> Bilevel:
        """Return the problem with g = −f, for methods that only take bilevel problems."""
        f, g = _losses(self)
        return Bilevel(f, g, project_upper=self.project_upper, batch_statistic=self.batch_statistic)


class Composed(_Penalised):
    """The part that two classes of problems share: inner functions, each of which takes the value of the one before."""

    inner: Any
    outer: Callable[..., Float[Array, ""]]
    extra: Loss | None

    @property
    def chain(self) -> tuple[Callable[..., tree.Tree], ...]:
        """The inner functions, beginning with the function of x."""
        return tuple(self.inner)

    def tracked(self, y: tree.Tree) -> tuple[tree.Tree, ...]:
        """Return the inner functions' values, which y stands for."""
        return tuple(y)

    def joined(self, values: Sequence[tree.Tree]) -> tree.Tree:
        """Return these values as y."""
        return tuple(values)

    def forward(self, x: tree.Tree, evaluate: Callable[[int, tree.Tree], tree.Tree]) -> tree.Tree:
        """Return all values, as y; evaluate(n, z) gives the value of the n-th inner function, from 0, at z."""
        values: list[tree.Tree] = []
        for n in range(len(self.chain)):
            values.append(evaluate(n, values[-1] if values else x))
        return self.joined(values)

    def f(self, x: tree.Tree, y: tree.Tree, batch: PyTree[Any], key: Key = None) -> Float[Array, ""]:
        """Return f(y) + h(x), where y stands for the inner value."""
        value = self.tracked(y)[-1]
        value = call(self.outer, *((value,) if self.outer_is_known else (value, batch)), key=key)
        return value if self.extra is None else value + call(self.extra, x, batch, key=key)

    def r(self, x: tree.Tree, y: tree.Tree, batch: PyTree[Any], *sample: Any, key: Key = None) -> tree.Tree:
        """Return the inner functions' values on a batch: the first at x, every other at the tracked value before."""
        at = zip(self.chain, (x, *self.tracked(y)), strict=False)
        return tuple(call(function, z, batch, *sample, key=key) for function, z in at)

    @property
    def random(self) -> frozenset[str]:
        """See `Bilevel.random`."""
        extra = [] if self.extra is None else [self.extra]
        return _random(f=[self.outer, *extra], g=[*self.chain], r=[*self.chain])

    @property
    def outer_is_known(self) -> bool:
        """Whether f is the same for all clients, f(value), rather than a client's own, f(value, batch)."""
        return required_arguments(self.outer) < 2

    @property
    def inner_is_conditional(self) -> bool:
        """Whether the inner function depends on the outer sample, g(x, batch, sample)."""
        return False


@dataclass(frozen=True)
class Compositional(Composed):
    """min over x of h(x) + f(g(x)) with g = mean g_i (or, with client scope, of mean f_i(g_i(x))).

    Arguments:
        inner: g(x, batch), the inner function's value: an array or pytree, the mean over the batch. In a conditional
            problem it depends on the outer sample, g(x, batch, sample): mean E_ξ f_i(E_η g_i(x; η, ξ); ξ), where batch
            has the inner samples η, from the lower data, and sample is the outer one ξ, a row of the upper data.
        outer: f(value), or f(value, batch) if the outer function is stochastic and the client's own.
        extra: h(x, batch), an additional loss, or None.
        inner_scope: "global": the inner function is the mean over the clients; "client": each client has its own.
        project_upper: keeps x in its set after each server step.
    """

    inner: Callable[..., tree.Tree]
    outer: Callable[..., Float[Array, ""]]
    extra: Loss | None = None
    inner_scope: Scope = "global"
    project_upper: Projection = unconstrained
    features: None = None

    takes: ClassVar[dict[str, str]] = {"inner": "x", "extra": "x"}

    @property
    def chain(self) -> tuple[Callable[..., tree.Tree], ...]:
        return (self.inner,)

    def tracked(self, y: tree.Tree) -> tuple[tree.Tree, ...]:
        return (y,)

    def joined(self, values: Sequence[tree.Tree]) -> tree.Tree:
        return values[0]

    def g(self, x: tree.Tree, y: tree.Tree, batch: PyTree[Any], key: Key = None) -> Float[Array, ""]:
        """Return ½‖y − g(x)‖². Its derivatives, ∇_y = y − g(x) and ∇²_xy v = −∇g(x)ᵀv, are means over the batch."""
        gap = tree.sub(y, call(self.inner, x, batch, key=key))
        return 0.5 * tree.dot(gap, gap)

    @property
    def inner_is_conditional(self) -> bool:
        return required_arguments(self.inner) >= 3

    def as_bilevel(self) -> Bilevel:
        """Return the problem with y tracking the inner value, for methods that only take bilevel problems."""
        if self.inner_is_conditional:
            raise ValueError(
                "A conditional problem, g(x, batch, sample), has no bilevel form: every outer sample has its own inner "
                "value, and a single y cannot track them all."
            )
        f, g = _losses(self)
        return Bilevel(f, g, lower_scope=self.inner_scope, project_upper=self.project_upper)


@dataclass(frozen=True)
class MultiLevel(Composed):
    """min over x of h(x) + f(r_N(… r_2(r_1(x)) …)) with r_n = mean r_n,i: compositions of more than two functions.

    y is a tuple with the tracked value of each inner function: y[0] stands for r_1(x), y[1] for r_2(y[0]), and so on.
    `FedMSA` solves these problems. They have no bilevel form for unlike clients: the mean of ½‖y[n] − r_n,i(y[n − 1])‖²
    is smallest at another y, because the spread of the r_n,i depends on y[n − 1].

    Arguments:
        inner: a tuple of functions, r_1(x, batch) and then r_n(value, batch), where value is the value of the function
            before. Each returns an array or pytree, the mean over the batch. All take batches of the lower data.
        outer: f(value), known to all clients. If it takes data, make it the last of the inner functions, and let outer
            return its value.
        extra: h(x, batch), an additional loss on the upper data, or None.
        project_upper: keeps x in its set after each server step.

    Example:
        The mean loss plus its upper semideviation over the samples of all clients, mean ℓ + √(mean (ℓ − mean ℓ)₊²):

        >>> import jax.numpy as jnp, numpy as np, rookery as rk
        >>> losses = lambda x, b: (b - x) ** 2
        >>> problem = rk.MultiLevel(
        ...     inner=(
        ...         lambda x, b: (x, jnp.mean(losses(x, b))),
        ...         lambda v, b: (v[1], jnp.mean(jnp.maximum(losses(v[0], b) - v[1], 0) ** 2)),
        ...     ),
        ...     outer=lambda v: v[0] + jnp.sqrt(v[1] + 1e-6),
        ... )
        >>> clients = rk.Clients([np.array([0.0, 1.0]), np.array([1.0, 6.0])])
        >>> method = rk.FedMSA(0.02, 0.3, 0.3, jacobians="tracked")
        >>> run = rk.solve(problem, clients, method, np.array(2.0), rounds=200)
        >>> len(run.y), float(run.x) > 2  # the mean, 2, has the smallest mean loss
        (2, True)
    """

    inner: tuple[Callable[..., tree.Tree], ...]
    outer: Callable[..., Float[Array, ""]]
    extra: Loss | None = None
    project_upper: Projection = unconstrained
    features: None = None

    takes: ClassVar[dict[str, str]] = {"inner[0]": "x", "extra": "x"}


@dataclass(frozen=True)
class SingleLevel(_Penalised):
    """min over x of mean f_i(x), which FedAvg and FedSVRG solve.

    Arguments:
        loss: f(x, batch), a scalar: the mean over the batch.
        project_upper: keeps x in its set after each server step.
        penalty: optional, penalty(x): a term of the loss without data; see `Bilevel`.
        batch_statistic: whether the loss is a statistic of the whole batch, such as Cox's, and not a mean over rows.
            `solve` then does not warn that it is not a mean, and refuses runs that would evaluate the loss sample by
            sample: with all data of clients of unequal size, with batches larger than a client's data, with methods
            that weight single samples, and with records as the unit of privacy.
    """

    loss: Loss
    project_upper: Projection = unconstrained
    features: None = None
    penalty: Callable[..., Float[Array, ""]] | None = None
    batch_statistic: bool = False

    takes: ClassVar[dict[str, str]] = {"loss": "x", "penalty": "x"}

    def f(self, x: tree.Tree, y: tree.Tree, batch: PyTree[Any], key: Key = None) -> Float[Array, ""]:
        """Return the loss; there is no y."""
        value = call(self.loss, x, batch, key=key)
        return value if self.penalty is None else value + self.penalty(x)

    def free(self, loss: str) -> Loss | None:
        penalty = self.penalty
        return None if penalty is None else lambda x, y: penalty(x)

    @property
    def random(self) -> frozenset[str]:
        """See `Bilevel.random`."""
        return _random(f=[self.loss])


@dataclass(frozen=True)
class WeightedNodes(_Penalised):
    """min over w of L_0(θ(w)), where θ(w) minimises Σ w_k L_k(θ): which clients to learn from.

    x is w, one weight for each client, in the capped simplex: Σ w_k = 1 and 0 ≤ w_k ≤ cap. y is θ, the model. L_k is
    the loss on client k's data, L_0 that on the centre's: `Clients(lower=[...], center=rows)`.

    Arguments:
        loss: l(θ, batch), a scalar: the mean over the batch; strongly convex for the theory to hold.
        cap: b, the largest weight, from 1/K (only equal weights) to 1.
        penalty: optional, penalty(θ): a term of the loss without data; see `Bilevel`.
        batch_statistic: whether the loss is a statistic of the whole batch; see `SingleLevel`.

    Example:
        >>> import jax.numpy as jnp, rookery as rk
        >>> problem = rk.WeightedNodes(lambda theta, b: jnp.mean((theta - b) ** 2), cap=0.9)
        >>> clients = rk.Clients(lower=[jnp.array([3.0]), jnp.array([-3.0])], center=jnp.array([1.5]))
        >>> method = rk.WeightedNodesProx(model_step=0.3, linear_step=0.3, weight_step=0.01, steps=20)
        >>> [round(float(w), 3) for w in rk.solve(problem, clients, method, jnp.zeros(()), rounds=60).weights]
        [0.75, 0.25]
    """

    loss: Loss
    cap: float = 1.0
    features: None = None
    penalty: Callable[..., Float[Array, ""]] | None = None
    batch_statistic: bool = False

    takes: ClassVar[dict[str, str]] = {"loss": "y", "penalty": "y"}

    def f(self, x: tree.Tree, y: tree.Tree, batch: PyTree[Any], key: Key = None) -> Float[Array, ""]:
        """Return the loss of θ, on the centre's data; w does not matter."""
        value = call(self.loss, y, batch, key=key)
        return value if self.penalty is None else value + self.penalty(y)

    def g(self, x: tree.Tree, y: tree.Tree, batch: PyTree[Any], key: Key = None) -> Float[Array, ""]:
        """Return the loss of θ, on a client's data."""
        return self.f(x, y, batch, key)

    def free(self, loss: str) -> Loss | None:
        penalty = self.penalty
        return None if penalty is None else lambda x, y: penalty(y)

    @property
    def random(self) -> frozenset[str]:
        """See `Bilevel.random`."""
        return _random(f=[self.loss], g=[self.loss])


Problem = Bilevel | Minimax | Compositional | MultiLevel | SingleLevel | WeightedNodes


def _random(**losses: list[Callable[..., Any]]) -> frozenset[str]:
    return frozenset(name for name, functions in losses.items() if any(map(takes_key, functions)))


def _losses(problem: "Minimax | Compositional") -> list[Loss]:
    """Return f and g, which take a key only if the problem is random."""
    keyless = lambda loss: lambda x, y, batch: loss(x, y, batch)
    losses = {"f": problem.f, "g": problem.g}
    return [loss if name in problem.random else keyless(loss) for name, loss in losses.items()]
