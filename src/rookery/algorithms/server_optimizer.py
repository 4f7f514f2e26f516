"""`with_server_optimizer`: an optimizer at the server, for any method, that takes a round's change as its gradient.

`FedOpt`: the server's optimizers of Reddi et al.
"""

import dataclasses
import functools
from collections import namedtuple
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array

from rookery.base import tree
from rookery.base.arguments import check_amounts, check_positive, kind_of
from rookery.language import hyperparameters
from rookery.language.fed import Algorithm, Fed
from rookery.parts import optimizers
from rookery.parts.projection import capped_simplex
from rookery.problems.problems import WeightedNodes

_UPPER, _LOWER = "server_upper_optimizer", "server_lower_optimizer"


class Moments(NamedTuple):
    """The states of the server's optimizers for x and y: None without one, and a tuple for methods with y and z."""

    upper: Any
    lower: Any


@dataclass(frozen=True)
class FedOpt:
    """Adam, Yogi or Adagrad as Reddi et al. state them for a server, without bias correction.

    For the change Δ = x⁺ − x of a round, m ← β₁m + (1 − β₁)Δ, v follows the rule, and x ← x + η·m/(√v + τ):

    - "adam": v ← β₂v + (1 − β₂)Δ²
    - "yogi": v ← v − (1 − β₂)Δ²·sign(v − Δ²)
    - "adagrad": v ← v + Δ²

    m starts at 0 and v at τ² or at `start`. Without bias correction and with start=0, Adam's first step is
    (1 − β₁)/√(1 − β₂) times that of `optax.adam`: equal for β₂ = .99, and 3.2 times as long for β₂ = .999.

    Use it as `with_server_optimizer(method, upper=FedOpt("adam", 0.01))`. `FedOpt` has the two functions of an optax
    optimizer, `init` and `update`. Departures from the paper: none known; `start` may be 0, as in FLamby.

    Reference: Reddi et al., Adaptive Federated Optimization, ICLR 2021, Alg. 2.
    """

    rule: Literal["adam", "yogi", "adagrad"]
    step: float  # η
    momentum: float = 0.9  # β₁
    decay: float = 0.99  # β₂; Adagrad has none
    floor: float = 1e-3  # τ
    start: float | None = None  # v before the first round; None: τ²

    def __post_init__(self) -> None:
        if self.rule not in ("adam", "yogi", "adagrad"):
            raise ValueError(f"rule must be one of adam, yogi, adagrad; got {self.rule!r}.")
        check_positive(step=self.step, floor=self.floor)
        check_amounts(momentum=self.momentum, decay=self.decay, start=0.0 if self.start is None else self.start)
        for name, value in (("momentum", self.momentum), ("decay", self.decay)):
            if value >= 1:
                raise ValueError(f"{name} must be below 1; got {value!r}.")

    def init(self, x: tree.Tree) -> tuple[tree.Tree, tree.Tree]:
        """Return m and v before the first round."""
        start = self.floor**2 if self.start is None else self.start
        return tree.zeros_like(x), jax.tree.map(lambda a: jnp.full_like(a, start), x)

    def update(self, gradient: tree.Tree, state: Any, x: Any = None) -> tuple[tree.Tree, tuple[tree.Tree, tree.Tree]]:
        """Return what is added to x, and m and v; the gradient is −Δ."""
        keep = self.decay
        grown = {
            "adam": lambda v, g: keep * v + (1 - keep) * g**2,
            "yogi": lambda v, g: v - (1 - keep) * g**2 * jnp.sign(v - g**2),
            "adagrad": lambda v, g: v + g**2,
        }[self.rule]
        m = jax.tree.map(lambda m, g: self.momentum * m - (1 - self.momentum) * g, state[0], gradient)
        v = jax.tree.map(grown, state[1], gradient)
        return jax.tree.map(lambda m, v: self.step * m / (jnp.sqrt(v) + self.floor), m, v), (m, v)


def with_server_optimizer(method: Algorithm, upper: Any = None, lower: Any = None) -> Any:
    """Return the method with an optax optimizer at the server: FedAdam, FedYogi or server momentum, for any method.

    After a round of the method, which takes x to x⁺, the optimizer receives x − x⁺ as the gradient at x, and its update
    is added to x. With `optax.sgd(1.0)` that is the method itself. The optimizer's state is
    `Run.state.server_optimizer`. It stays at the server and is never sent to a client.

    The result is a record with all the hyperparameters of the method; `dataclasses.replace` and `tune` work on it.

    Arguments:
        method: any method of the library or a user's, a frozen dataclass.
        upper: optax.adam(1e-3), optax.sgd(1.0, momentum=0.9), FedOpt("yogi", 1e-2), … for x; None: x stays as the
            method leaves it.
        lower: the same for y. If a method has two lower variables, such as y and z of F2SA, the optimizer steps both,
            each with its own moments; your own method declares them as lower_variables = ("y", "z"). Not for methods
            whose y is empty or belongs to the clients.

    The rest of the method's state (momenta, control variates, estimates) and its clients' memory stay as the method
    leaves them: they belong to x⁺, not to the optimizer's x. The numbers given to optax are part of the compiled
    program, so changing them compiles again; with `optax.inject_hyperparams` the rounds compile once.

    Example:
        >>> import jax.numpy as jnp, optax, rookery as rk
        >>> problem = rk.SingleLevel(lambda x, b: jnp.mean((x - b) ** 2))
        >>> clients = rk.Clients(upper=[jnp.array([1.0]), jnp.array([3.0])])
        >>> fed_adam = rk.with_server_optimizer(rk.FedAvg(step=0.1), upper=optax.adam(0.1))
        >>> round(float(rk.solve(problem, clients, fed_adam, jnp.zeros(()), rounds=200).x), 2)
        2.0

    Reference: Reddi et al., Adaptive Federated Optimization, ICLR 2021.
    """
    cls = type(method)
    if isinstance(method, type) or not dataclasses.is_dataclass(method) or not hasattr(method, "round"):
        what = f"the class {method.__name__}" if isinstance(method, type) else kind_of(method)
        raise TypeError(f"with_server_optimizer: method must be an algorithm, such as rk.FedAvg(step=0.1); got {what}.")
    if not cls.__dataclass_params__.frozen:
        raise TypeError(
            f"with_server_optimizer: {cls.__name__} must be a frozen dataclass. Use @dataclass(frozen=True)."
        )
    if hasattr(method, _UPPER):
        raise ValueError(f"{cls.__name__} has a server optimizer already. Chain two with optax.chain(...).")
    if upper is None and lower is None:
        raise ValueError("with_server_optimizer needs an optimizer; got none. Set upper=optax.adam(1e-3), or lower=….")
    for name, value in (("upper", upper), ("lower", lower)):
        if value is not None and not hyperparameters.is_optimizer(value):
            fix = "Call it with a step size" if callable(value) else "Use for example optax.adam(1e-3)"
            raise TypeError(f"with_server_optimizer: {name} must be an optax optimizer; got {value!r}. {fix}.")
    settings = {field.name: getattr(method, field.name) for field in dataclasses.fields(method) if field.init}
    return _extended(cls)(**settings, **{_UPPER: upper, _LOWER: lower})


@functools.cache
def _extended(cls: Any) -> Any:
    """The class of the method with two more fields, and the server's step after each round."""
    below_names = getattr(cls, "lower_variables", ("y",))

    def init(self: Any, fed: Fed, x: tree.Tree, y: tree.Tree, key: Array) -> Any:
        """Start the method and the optimizers."""
        state = cls.init(self, fed, x, y, key)
        lower = getattr(self, _LOWER)
        if any(getattr(state, name, None) is not None for name in ("last", "last_model")):
            raise ValueError(
                f"{cls.__name__} must return its last iterate, because the server optimizer steps from it; it returns "
                'another one. Set output="last" (for LocalSVRG, average="last").'
            )
        if lower is not None and not jax.tree.leaves(state.y):
            raise ValueError(
                f"with_server_optimizer: lower must be left out for {cls.__name__}, which keeps no y at the server (y "
                "is empty, or belongs to the clients)."
            )
        upper = _start(getattr(self, _UPPER), state.x, "upper")
        below = [_start(lower, getattr(state, name), "lower") for name in below_names] if lower is not None else [None]
        return _with_moments(state, Moments(upper, tuple(below) if len(below) > 1 else below[0]))

    def one_round(self: Any, fed: Fed, state: Any, key: Array) -> Any:
        """Run the method's round, then step from where it began."""
        after = cls.round(self, fed, _without_moments(state), key)
        x, upper = _stepped(getattr(self, _UPPER), state.x, after.x, state.server_optimizer.upper)
        lower = state.server_optimizer.lower
        if getattr(self, _LOWER) is not None:
            after, lower = _stepped_below(getattr(self, _LOWER), below_names, state, after, lower)
        if isinstance(fed.problem, WeightedNodes) and getattr(self, _UPPER) is not None:
            x = capped_simplex(x, fed.problem.cap)  # the engine projects onto other sets
        return _with_moments(after._replace(x=x), Moments(upper, lower))

    methods = {"init": init, "round": one_round, "__doc__": cls.__doc__}
    fields: list[Any] = [(_UPPER, Any, None), (_LOWER, Any, None)]
    name = f"{cls.__name__}WithServerOptimizer"
    return dataclasses.make_dataclass(name, fields, bases=(cls,), namespace=methods, frozen=True)


def _start(optimizer: Any, z: tree.Tree, name: str) -> Any:
    return None if optimizer is None else optimizers.start(optimizer, z, f"with_server_optimizer, {name}")


def _stepped(optimizer: Any, before: tree.Tree, after: tree.Tree, moments: Any) -> tuple[tree.Tree, Any]:
    """Return the point after the server's step, and the optimizer's new state."""
    if optimizer is None:
        return after, None
    direction, moments = optimizers.direction(optimizer, tree.sub(before, after), moments, before)
    return tree.step(before, 1.0, direction), moments


def _stepped_below(optimizer: Any, names: tuple[str, ...], state: Any, after: Any, moments: Any) -> tuple[Any, Any]:
    """Step y, and z if the method has two lower variables, each with its own moments."""
    kept = []
    for name, old in zip(names, moments if len(names) > 1 else (moments,), strict=True):
        value, new = _stepped(optimizer, getattr(state, name), getattr(after, name), old)
        after = after._replace(**{name: value})
        kept.append(new)
    return after, tuple(kept) if len(names) > 1 else kept[0]


# The state is the method's state with one more field.


def _with_moments(state: Any, moments: Moments) -> Any:
    cls: Any = type(state)
    return _state_class(cls)(*state, moments)


def _without_moments(state: Any) -> Any:
    """The method's own state."""
    return type(state).of_method(*state[:-1])


def _unpickled(cls: Any, values: tuple[Any, ...]) -> Any:
    return _state_class(cls)(*values)


@functools.cache
def _state_class(cls: Any) -> Any:
    base: Any = namedtuple(cls.__name__, [*cls._fields, "server_optimizer"])  # type: ignore[misc]

    class State(base):
        """The method's state with its properties, and the states of the server's optimizers."""

        __slots__ = ()
        of_method = cls

        def __reduce__(self) -> Any:  # pickle cannot find a class that is made on demand
            return _unpickled, (cls, tuple(self))

        def __getattr__(self, name: str) -> Any:
            return getattr(_without_moments(self), name)

    State.__name__ = State.__qualname__ = cls.__name__
    return State
