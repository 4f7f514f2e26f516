"""BR-FedBi, BR-FedBiM and BR-FedBiP: single-loop bilevel methods for a federation in which some clients lie."""

from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array

from rookery.base import draws, tree
from rookery.language.fed import BatchSize, Client, Fed, Share, Step
from rookery.parts import single_loop
from rookery.parts.fields import move
from rookery.parts.momentum import moving_average, storm
from rookery.parts.single_loop import Three
from rookery.problems.problems import Bilevel


class State(NamedTuple):
    """The variables; for BR-FedBiP also those of the last round and the number of rounds."""

    x: tree.Tree
    y: tree.Tree
    z: tree.Tree  # ≈ [∇²_y g]⁻¹∇_y f
    before: Any = None
    rounds: Any = None


@dataclass(frozen=True)
class BRFedBi:
    """BR-FedBi: steps of x, y and z along directions that the server combines by a robust rule, variable by variable.

    BR-FedBi solves bilevel problems whose lower level is shared by all clients. Besides x and y it keeps z, an estimate
    of [∇²_y g]⁻¹∇_y f (the paper's has the opposite sign).

    In a round each client computes, on one minibatch of each level,
        D_x = ∇_x f − ∇²_xy g z, D_y = ∇_y g, D_z = ∇²_y g z − ∇_y f,
    and the server takes x ← x − η_x AGG(D_x), y ← y − η_y AGG(D_y) and z ← z − η_z AGG(D_z).

    AGG is the run's channel: `channel=rk.trimmed_mean(2)`, or any other [robust mean](../robust.md), judges x, y and z
    separately. Without a channel AGG is the mean, and the method is `FedBiO(local_steps=1, shared_batch=True)`.

    Departures from the paper:
        unverified: we had a summary with these formulas and the reviews, not the paper;
        any cohort; x is projected onto the problem's set, if it has one;
        the robust means count all clients equally and ignore their weights.

    Exchanges per round: 1.

    Example:
        >>> import rookery as rk
        >>> task = rk.tasks.quadratic(clients=10, heterogeneity=0.0, noise=0.0, seed=0)
        >>> method = rk.BRFedBi(upper_step=0.05, lower_step=0.1, linear_step=0.1)
        >>> liars = rk.Faults(attack=rk.attacks.SignFlip(3, scale=10))
        >>> run = rk.solve(
        ...     task.problem, task.clients, method, task.init, rounds=400, channel=rk.median(3), faults=liars,
        ...     evaluate=task.evaluate, every=400,
        ... )
        >>> bool(run.history["distance"].iloc[-1] < 1e-4)
        True

    Reference: Single-Loop Byzantine-Resilient Federated Bilevel Optimization, ICLR 2026 (OpenReview AzaE6Dcz1C).
    """

    upper_step: Step = 0.01  # η_x
    lower_step: Step = 0.01  # η_y
    linear_step: Step = 0.01  # η_z
    batch_size: BatchSize = None  # b; None: all the client's data

    solves: ClassVar[tuple[type, ...]] = (Bilevel,)

    def init(self, fed: Fed, x: tree.Tree, y: tree.Tree, key: Array) -> State:
        """Start at z = 0."""
        return State(x, y, tree.zeros_like(y))

    def round(self, fed: Fed, state: State, key: Array) -> State:
        """One step."""
        local = lambda c, k: directions(c, [state[:3]], k, self.batch_size)[0]
        return self._stepped(fed, state, fed.mean(fed.map(local, key), name="D_x, D_y, D_z"))

    def _stepped(self, fed: Fed, state: State, direction: Three) -> State:
        steps = self.upper_step, self.lower_step, self.linear_step
        x, y, z = move(state[:3], direction, steps)
        return state._replace(x=fed.problem.project_upper(x), y=y, z=z)


@dataclass(frozen=True)
class BRFedBiM(BRFedBi):
    """BR-FedBiM: BR-FedBi with momentum at the clients, which averages out the minibatch noise that can hide lies.

    BR-FedBiM solves bilevel problems whose lower level is shared by all clients. A client keeps m_i ← (1 − θ) m_i +
    θ D_i for each of the directions D_i of `BRFedBi`, starting from m_i = D_i in its first round, and sends m_i.

    Departures from the paper:
        unverified, as in `BRFedBi`; our summary leaves the order of momentum and step open: here the momentum is
        updated with the direction at the point that the client receives, and then sent;
        a client that sat out continues with the momentum that it had.

    Exchanges per round: 1.

    Reference: as for `BRFedBi`.
    """

    momentum: Share = 0.1  # θ, the weight of the new directions

    def memory(self, x: tree.Tree, y: tree.Tree) -> tuple[Three, Array]:
        """A client's memory: m_i, and whether it has one."""
        return tree.zeros_like((x, y, y)), jnp.bool_(False)

    def round(self, fed: Fed, state: State, key: Array) -> State:
        """One step along the momenta."""

        def local(c: Client, k: Array, memory: tuple[Three, Array]) -> tuple[Three, tuple[Three, Array]]:
            old, begun = memory
            share = jnp.where(begun, self.momentum, 1.0)
            new = moving_average(old, directions(c, [state[:3]], k, self.batch_size)[0], share)
            return new, (new, jnp.bool_(True))

        return self._stepped(fed, state, fed.mean(fed.map_state(local, key), name="m_x, m_y, m_z"))


@dataclass(frozen=True)
class BRFedBiP(BRFedBi):
    """BR-FedBiP: BR-FedBi with PAGE estimates, now and then from a large batch and otherwise from differences.

    BR-FedBiP solves bilevel problems whose lower level is shared by all clients. In each round one coin decides for all
    clients. With probability p a client takes v_i = D_i(w), the directions of `BRFedBi` at w = (x, y, z) on a large
    batch. Otherwise v_i ← v_i + D_i(w) − D_i(w⁻), where w⁻ is the last round's w, on one minibatch for both. The client
    sends v_i.

    Departures from the paper:
        unverified, as in `BRFedBi`; our summary leaves p open, for which PAGE suggests b/(b + b_large);
        the first round takes the large batch, and so does a client that did not take part in the last round.

    Exchanges per round: 1.

    Reference: as for `BRFedBi`; PAGE: Li, Bao, Zhang and Richtárik, ICML 2021.
    """

    refresh: Share = 0.1  # p, the chance of the large batch
    anchor_batch: BatchSize = None  # b_large; None: all the client's data

    def init(self, fed: Fed, x: tree.Tree, y: tree.Tree, key: Array) -> State:
        """Start at z = 0."""
        w = (x, y, tree.zeros_like(y))
        return State(*w, before=w, rounds=jnp.int32(0))

    def memory(self, x: tree.Tree, y: tree.Tree) -> tuple[Three, Array]:
        """A client's memory: v_i, and the number of rounds after which it was computed."""
        return tree.zeros_like((x, y, y)), jnp.int32(-1)

    def round(self, fed: Fed, state: State, key: Array) -> State:
        """One step along the estimates."""
        (k1, k2), w = jax.random.split(key), state[:3]
        coin = draws.coins(k2, self.refresh)

        def local(c: Client, k: Array, memory: tuple[Three, Array]) -> tuple[Three, tuple[Three, Array]]:
            old, age = memory
            k_large, k_small = jax.random.split(k)
            anew = (coin | (age != state.rounds)).astype(jnp.int32)

            def differing(_: Any, v: Three) -> Three:
                at_new, at_old = directions(c, [w, state.before], k_small, self.batch_size)
                return storm(at_new, v, at_old, 0.0)

            v = c.loop(1 - anew, differing, old, most=1)
            v = c.loop(anew, lambda *_: directions(c, [w], k_large, self.anchor_batch)[0], v, most=1)
            return v, (v, state.rounds + 1)

        v = fed.mean(fed.map_state(local, k1), name="v_x, v_y, v_z")
        return self._stepped(fed, state, v)._replace(before=w, rounds=state.rounds + 1)


def directions(c: Client, points: list[Three], key: Array, size: int | None) -> list[Three]:
    """Return D_x, D_y and D_z at each point, on one minibatch of each level."""
    return single_loop.directions(c, points, jax.random.split(key, 5), 0, size, size, shared=True)
