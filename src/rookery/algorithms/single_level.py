"""Single-level methods: FedAvg, and what corrects the drift of its local steps: FedProx, SCAFFOLD and FedSVRG."""

from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import jax
from jaxtyping import Array

from rookery.base import tree
from rookery.language.fed import BatchSize, Client, Fed, Optimizer, Positive, Step, Steps
from rookery.parts.local import sgd, svrg
from rookery.problems.problems import SingleLevel


class State(NamedTuple):
    """The variable; y is empty."""

    x: tree.Tree
    y: tuple[()] = ()


class Controlled(NamedTuple):
    """The variable, and SCAFFOLD's control variate at the server; y is empty."""

    x: tree.Tree
    control: tree.Tree
    y: tuple[()] = ()


@dataclass(frozen=True)
class FedAvg:
    """Local SGD on each client, then the mean.

    Solves single-level problems. Departures: none. Exchanges a round: 1.

    With an `optimizer` of optax's the local steps are its updates: it has a step size of its own, and `step` is not
    used. Every client starts it afresh in every round.

    Example:
        >>> import jax.numpy as jnp, rookery as rk
        >>> problem = rk.SingleLevel(lambda x, b: jnp.mean((x - b) ** 2))
        >>> clients = rk.Clients(upper=[jnp.array([1.0]), jnp.array([3.0])])
        >>> round(float(rk.solve(problem, clients, rk.FedAvg(step=0.1), jnp.zeros(()), rounds=50).x), 3)
        2.0

    Reference: McMahan et al., Communication-Efficient Learning of Deep Networks from Decentralized Data, 2017.
    """

    step: Step = 0.01  # η
    local_steps: Steps = 1  # τ_i
    batch_size: BatchSize = None  # B; None: all the client's data
    optimizer: Optimizer = None  # of optax, for the local steps in the place of η; None: plain steps

    replaces: ClassVar = {"optimizer": "step"}
    solves: ClassVar[tuple[type, ...]] = (SingleLevel,)

    def init(self, fed: Fed, x: tree.Tree, y: tuple[()], key: Array) -> State:
        """The start."""
        return State(x)

    def round(self, fed: Fed, state: State, key: Array) -> State:
        """Local steps, then the mean."""

        def local(c: Client, k: Array) -> tree.Tree:
            count, order = jax.random.split(k)
            steps = c.steps(self.local_steps, count, self.batch_size, "upper")
            gradient = lambda x, v: c.f_x(x, (), c.upper(order, self.batch_size, v))
            return sgd(c, gradient, state.x, _size(self), steps, self.optimizer)

        return State(fed.problem.project_upper(fed.mean(fed.map(local, key), name="x", around=state.x)))


@dataclass(frozen=True)
class FedProx:
    """FedAvg whose local steps are drawn back to where they started.

    Solves single-level problems. Round (Alg. 2): each client of the cohort minimises F_k(w) + μ/2‖w − w^t‖² roughly, by
    local steps w_k ← w_k − η(∇F_k(w_k) + μ(w_k − w^t)) from w^t; then w^(t+1) is the mean of the w_k.

    Departures: the cohort is drawn uniformly and the mean has the clients' weights p_k, where the paper draws by p_k
    and takes the plain mean. How rough is said by the number of local steps, not by γ. `optimizer` as in `FedAvg`.

    Exchanges a round: 1.

    Reference: Li, Sahu, Zaheer, Sanjabi, Talwalkar and Smith, Federated Optimization in Heterogeneous Networks, 2020.
    """

    step: Step = 0.01  # η
    local_steps: Steps = 1  # τ_i
    proximal: Positive = 0.1  # μ
    batch_size: BatchSize = None  # None: all the client's data
    optimizer: Optimizer = None  # of optax, for the local steps in the place of η; None: plain steps

    replaces: ClassVar = {"optimizer": "step"}
    solves: ClassVar[tuple[type, ...]] = (SingleLevel,)

    def init(self, fed: Fed, x: tree.Tree, y: tuple[()], key: Array) -> State:
        """The start."""
        return State(x)

    def round(self, fed: Fed, state: State, key: Array) -> State:
        """Local steps, then the mean."""

        def local(c: Client, k: Array) -> tree.Tree:
            count, order = jax.random.split(k)
            steps = c.steps(self.local_steps, count, self.batch_size, "upper")

            def gradient(x: tree.Tree, v: Any) -> tree.Tree:
                pull = tree.scale(self.proximal, tree.sub(x, state.x))
                return tree.add(c.f_x(x, (), c.upper(order, self.batch_size, v)), pull)

            return sgd(c, gradient, state.x, _size(self), steps, self.optimizer)

        return State(fed.problem.project_upper(fed.mean(fed.map(local, key), name="x", around=state.x)))


@dataclass(frozen=True)
class Scaffold:
    """SCAFFOLD: FedAvg with control variates kept by the clients (c_i) and the server (c). With one client, SGD.

    Solves single-level problems. Round (Alg. 1): each client of the cohort S takes local steps
    y_i ← y_i − η_l(∇f_i(y_i) − c_i + c) from x; then c_i⁺ = c_i − c + (x − y_i)/(τ_i η_l), option II;
    x ← x + η_g(mean y_i − x) and c ← c + Σ_S p_i (c_i⁺ − c_i), so that c = Σ p_i c_i throughout (with equal weights,
    the paper's c + |S|/N·mean).

    Departures: the weights; a number of local steps for each client.
    Exchanges a round: 1, which carries the variable and the change of the control variate.

    Reference: Karimireddy, Kale, Mohri, Reddi, Stich and Suresh, SCAFFOLD, ICML 2020.
    """

    step: Step = 0.01  # η_l
    server_step: Step = 1.0  # η_g
    local_steps: Steps = 1  # τ_i; K
    batch_size: BatchSize = None  # None: all the client's data

    solves: ClassVar[tuple[type, ...]] = (SingleLevel,)

    def init(self, fed: Fed, x: tree.Tree, y: tuple[()], key: Array) -> Controlled:
        """The start: c = 0."""
        return Controlled(x, tree.zeros_like(x))

    def memory(self, x: tree.Tree, y: tuple[()]) -> tree.Tree:
        """What a client remembers: c_i, 0 at first."""
        return tree.zeros_like(x)

    def round(self, fed: Fed, state: Controlled, key: Array) -> Controlled:
        """Local steps with both corrections, then the means."""

        def local(c: Client, k: Array, own: tree.Tree) -> tuple[Any, tree.Tree]:
            count, order = jax.random.split(k)
            steps = c.steps(self.local_steps, count, self.batch_size, "upper")
            correction = tree.sub(state.control, own)
            gradient = lambda x, v: tree.add(c.f_x(x, (), c.upper(order, self.batch_size, v)), correction)
            last = sgd(c, gradient, state.x, self.step, steps)
            progress = tree.scale(1 / (steps * self.step), tree.sub(state.x, last))
            change = tree.sub(progress, state.control)  # c_i⁺ − c_i
            return (last, change), tree.add(own, change)

        both = fed.map_state(local, key)
        (mean, change), heard = fed.mean(both, name="x, c", around=(state.x, None), heard=True)
        x = tree.step(state.x, self.server_step, tree.sub(state.x, mean))
        control = tree.add(state.control, tree.scale(heard.weight, change))  # c + Σ_S p_i (c_i⁺ − c_i)
        return Controlled(fed.problem.project_upper(x), control)


@dataclass(frozen=True)
class FedSVRG:
    """SVRG on each client against the cohort's gradient, then the mean (FedLin has the same form).

    Solves single-level problems: FedOut (Alg. 2 of Tarzanagh et al. 2022) with no y, hence no implicit part.

    Departures: the anchor is the full local gradient unless `anchor_batch` is given. Exchanges a round: 2.

    Reference: Tarzanagh et al., FedNest, ICML 2022, Section 3.3; Konečný et al. 2018; Mitra et al. 2021.
    """

    step: Step = 0.01  # α
    local_steps: Steps = 1  # τ_i
    batch_size: BatchSize = None  # of ξ; None: all the client's data
    anchor_batch: BatchSize = None  # of ξ_i in the anchor h_i; None: all the client's data
    scale_steps: bool = False  # α_i = α/τ_i, as in the theory

    solves: ClassVar[tuple[type, ...]] = (SingleLevel,)

    def init(self, fed: Fed, x: tree.Tree, y: tuple[()], key: Array) -> State:
        """The start."""
        return State(x)

    def round(self, fed: Fed, state: State, key: Array) -> State:
        """The anchor, the local steps, and the mean."""
        k1, k2 = jax.random.split(key)
        h = fed.mean(fed.map(lambda c, k: c.f_x(state.x, (), c.upper(k, self.anchor_batch)), k1), name="h")

        def local(c: Client, k: Array) -> tree.Tree:
            count, order = jax.random.split(k)
            steps = c.steps(self.local_steps, count, self.batch_size, "upper")
            gradient = lambda x, v: c.f_x(x, (), c.upper(order, self.batch_size, v))
            return svrg(c, gradient, state.x, h, self.step / steps if self.scale_steps else self.step, steps)

        return State(fed.problem.project_upper(fed.mean(fed.map(local, k2), name="x", around=state.x)))


def _size(h: FedAvg | FedProx) -> Any:
    """Of a local step; an optimizer's updates have a size of their own."""
    return h.step if h.optimizer is None else 1.0
