"""Single-level methods: FedAvg, and FedProx, SCAFFOLD and FedSVRG, which correct the drift of its local steps."""

from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import jax
from jaxtyping import Array

from rookery.base import tree
from rookery.language.fed import BatchSize, Client, Fed, Optimizer, Positive, Step, Steps
from rookery.parts.local import descend, sgd
from rookery.parts.state import State
from rookery.problems.problems import SingleLevel


class Controlled(NamedTuple):
    """The variable, and SCAFFOLD's control variate at the server; y is empty."""

    x: tree.Tree
    control: tree.Tree
    y: tuple[()] = ()


@dataclass(frozen=True)
class FedAvg:
    """Local SGD on each client, then the mean.

    FedAvg solves single-level problems.

    With an optax `optimizer` the local steps are its updates. The optimizer has its own step size, so `step` is not
    used, and starts afresh on every client in every round.

    Departures from the paper: none.

    Exchanges per round: 1.

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
    optimizer: Optimizer = None  # of optax, for the local steps instead of η; None: plain steps

    replaces: ClassVar = {"optimizer": "step"}
    solves: ClassVar[tuple[type, ...]] = (SingleLevel,)

    def init(self, fed: Fed, x: tree.Tree, y: tuple[()], key: Array) -> State:
        return State(x)

    def round(self, fed: Fed, state: State, key: Array) -> State:
        def local(c: Client, k: Array) -> tree.Tree:
            gradient = lambda x, batch: c.f_x(x, (), batch)
            return descend(c, gradient, state.x, k, optimizer=self.optimizer, **_local_steps(self))

        return State(fed.problem.project_upper(fed.mean(fed.map(local, key), name="x", around=state.x)))


@dataclass(frozen=True)
class FedProx:
    """FedAvg whose local steps are pulled back towards their starting point.

    FedProx solves single-level problems. In each round (Alg. 2) each client of the cohort approximately minimises
    F_k(w) + μ/2‖w − w^t‖², by local steps w_k ← w_k − η(∇F_k(w_k) + μ(w_k − w^t)) from w^t; then w^(t+1) is the mean of
    the w_k.

    Departures from the paper: the cohort is drawn uniformly and the mean has the clients' weights p_k, whereas the
    paper draws by p_k and takes the plain mean. The number of local steps sets the accuracy, not γ. `optimizer` is as
    in `FedAvg`.

    Exchanges per round: 1.

    Reference: Li, Sahu, Zaheer, Sanjabi, Talwalkar and Smith, Federated Optimization in Heterogeneous Networks, 2020.
    """

    step: Step = 0.01  # η
    local_steps: Steps = 1  # τ_i
    proximal: Positive = 0.1  # μ
    batch_size: BatchSize = None  # None: all the client's data
    optimizer: Optimizer = None  # of optax, for the local steps instead of η; None: plain steps

    replaces: ClassVar = {"optimizer": "step"}
    solves: ClassVar[tuple[type, ...]] = (SingleLevel,)

    def init(self, fed: Fed, x: tree.Tree, y: tuple[()], key: Array) -> State:
        return State(x)

    def round(self, fed: Fed, state: State, key: Array) -> State:
        def local(c: Client, k: Array) -> tree.Tree:
            count, order = jax.random.split(k)
            steps = c.steps(self.local_steps, count, self.batch_size, "upper")

            def gradient(x: tree.Tree, v: Any) -> tree.Tree:
                pull = tree.scale(self.proximal, tree.sub(x, state.x))
                return tree.add(c.f_x(x, (), c.upper(order, self.batch_size, v)), pull)

            size = self.step if self.optimizer is None else 1.0
            return sgd(c, gradient, state.x, size, steps, self.optimizer)

        return State(fed.problem.project_upper(fed.mean(fed.map(local, key), name="x", around=state.x)))


@dataclass(frozen=True)
class Scaffold:
    """SCAFFOLD: FedAvg with control variates on the clients (c_i) and the server (c). With one client it is SGD.

    SCAFFOLD solves single-level problems. In each round (Alg. 1) each client of the cohort S takes local steps
    y_i ← y_i − η_l(∇f_i(y_i) − c_i + c) from x. Then c_i⁺ = c_i − c + (x − y_i)/(τ_i η_l), option II; x ← x + η_g(mean
    y_i − x); and c ← c + Σ_S p_i (c_i⁺ − c_i), which keeps c = Σ p_i c_i (with equal weights, the paper's
    c + |S|/N·mean).

    Departures from the paper: client weights; the number of local steps may differ by client.

    Exchanges per round: 1, which carries the variable and the change of the control variate.

    Reference: Karimireddy, Kale, Mohri, Reddi, Stich and Suresh, SCAFFOLD, ICML 2020.
    """

    step: Step = 0.01  # η_l
    server_step: Step = 1.0  # η_g
    local_steps: Steps = 1  # τ_i; K
    batch_size: BatchSize = None  # None: all the client's data

    solves: ClassVar[tuple[type, ...]] = (SingleLevel,)

    def init(self, fed: Fed, x: tree.Tree, y: tuple[()], key: Array) -> Controlled:
        """Start at c = 0."""
        return Controlled(x, tree.zeros_like(x))

    def memory(self, x: tree.Tree, y: tuple[()]) -> tree.Tree:
        """A client's memory: c_i, at first 0."""
        return tree.zeros_like(x)

    def round(self, fed: Fed, state: Controlled, key: Array) -> Controlled:
        def local(c: Client, k: Array, c_i: tree.Tree) -> tuple[Any, tree.Tree]:
            count, order = jax.random.split(k)
            steps = c.steps(self.local_steps, count, self.batch_size, "upper")
            correction = tree.sub(state.control, c_i)
            gradient = lambda x, v: tree.add(c.f_x(x, (), c.upper(order, self.batch_size, v)), correction)
            last = sgd(c, gradient, state.x, self.step, steps)
            progress = tree.scale(1 / (steps * self.step), tree.sub(state.x, last))
            change = tree.sub(progress, state.control)  # c_i⁺ − c_i
            return (last, change), tree.add(c_i, change)

        replies = fed.map_state(local, key)
        (mean, change), heard = fed.mean(replies, name="x, c", around=(state.x, None), heard=True)
        x = tree.step(state.x, self.server_step, tree.sub(state.x, mean))
        control = tree.add(state.control, tree.scale(heard.weight, change))  # c + Σ_S p_i (c_i⁺ − c_i)
        return Controlled(fed.problem.project_upper(x), control)


@dataclass(frozen=True)
class FedSVRG:
    """SVRG on each client against the cohort's gradient, then the mean (FedLin has the same form).

    FedSVRG solves single-level problems. A round is FedOut (Alg. 2 of Tarzanagh et al. 2022) without y, hence without
    an implicit part.

    Departures from the paper: the anchor is the full local gradient unless `anchor_batch` is given.

    Exchanges per round: 2.

    Reference: Tarzanagh et al., FedNest, ICML 2022, Section 3.3; Konečný et al. 2018; Mitra et al. 2021.
    """

    step: Step = 0.01  # α
    local_steps: Steps = 1  # τ_i
    batch_size: BatchSize = None  # of ξ; None: all the client's data
    anchor_batch: BatchSize = None  # of ξ_i in the anchor h_i; None: all the client's data
    scale_steps: bool = False  # α_i = α/τ_i, as in the theory

    solves: ClassVar[tuple[type, ...]] = (SingleLevel,)

    def init(self, fed: Fed, x: tree.Tree, y: tuple[()], key: Array) -> State:
        return State(x)

    def round(self, fed: Fed, state: State, key: Array) -> State:
        k1, k2 = jax.random.split(key)
        h = fed.mean(fed.map(lambda c, k: c.f_x(state.x, (), c.upper(k, self.anchor_batch)), k1), name="h")

        def local(c: Client, k: Array) -> tree.Tree:
            gradient = lambda x, batch: c.f_x(x, (), batch)
            return descend(c, gradient, state.x, k, anchor=h, scale_steps=self.scale_steps, **_local_steps(self))

        return State(fed.problem.project_upper(fed.mean(fed.map(local, k2), name="x", around=state.x)))


def _local_steps(h: FedAvg | FedSVRG) -> dict[str, Any]:
    """The arguments of `descend` that the methods share."""
    return {"level": "upper", "step": h.step, "local_steps": h.local_steps, "batch_size": h.batch_size}
