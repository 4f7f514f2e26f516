"""Single-level methods: FedAvg (McMahan et al., AISTATS 2017), and FedSVRG, which is FedNest's FedOut with no y."""

from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import jax
from jaxtyping import Array

from rookery import tree
from rookery.fed import Client, Fed, Step, Steps
from rookery.parts.local import sgd, svrg
from rookery.problems import SingleLevel


class State(NamedTuple):
    """The variable; y is empty."""

    x: tree.Tree
    y: tuple[()] = ()


@dataclass(frozen=True)
class FedAvg:
    """Local SGD on each client, then the mean.

    Solves single-level problems. Departures: none. Exchanges a round: 1.

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
    batch_size: int | None = None  # B; None: all the client's data

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
            return sgd(c, gradient, state.x, self.step, steps)

        return State(fed.problem.project_upper(fed.mean(fed.map(local, key), name="x", around=state.x)))


@dataclass(frozen=True)
class FedSVRG:
    """SVRG on each client against the cohort's gradient, then the mean (FedLin has the same form).

    Solves single-level problems: FedOut (Alg. 2 of Tarzanagh et al. 2022) with no y, hence no implicit part.

    Departures: the anchor is the full local gradient unless `anchor_batch` is given. Exchanges a round: 2.

    Reference: Tarzanagh et al., FedNest, ICML 2022, Section 3.3; Konečný et al. 2018; Mitra et al. 2021.
    """

    step: Step = 0.01  # α
    local_steps: Steps = 1  # τ_i
    batch_size: int | None = None  # of ξ; None: all the client's data
    anchor_batch: int | None = None  # of ξ_i in the anchor h_i; None: all the client's data
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
