"""Methods for one machine that the FedDRO paper compares with, run in parallel: a minibatch each, one common step."""

from dataclasses import dataclass
from typing import Any, ClassVar, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax.flatten_util import ravel_pytree
from jaxtyping import Array

from rookery.base import tree
from rookery.language.fed import AtLeastOne, BatchSize, Client, Data, Fed, Share, Step
from rookery.parts.compositional import first_value, plus_h, slope
from rookery.problems.problems import Compositional


class State(NamedTuple):
    """The variable, the estimate of the inner value, and NASA's running gradient."""

    x: tree.Tree
    y: tree.Tree
    z: tree.Tree = None


@dataclass(frozen=True)
class ParallelSGD:
    """SGD on the plain part h alone: the composition f(g) is left out, as a constraint that is ignored.

    Runs on compositional problems with an `extra` part h, such as a loss with a fairness penalty, and shows what the
    penalty changes: x ← x − η mean ∇h_k(x; ξ). y stays at its start.

    Departures: none, it is one line of the paper ("unconstrained"). Exchanges a round: 1.

    Reference: Khanduri et al., On Federated Compositional Optimization: Algorithms, Analysis, and Guarantees, Sec. 6.
    """

    step: Step = 0.01  # η
    batch_size: BatchSize = None  # of ξ; None: all the client's data

    solves: ClassVar[tuple[type, ...]] = (Compositional,)
    needs: ClassVar[tuple[str, ...]] = ("extra",)

    def init(self, fed: Fed, x: tree.Tree, y: tree.Tree, key: Array) -> State:
        """The start."""
        return State(x, y)

    def round(self, fed: Fed, state: State, key: Array) -> State:
        """One step."""
        gradient = lambda c, k: c.f_x(state.x, state.y, c.upper(k, self.batch_size))
        return state._replace(x=_stepped(fed, state.x, self.step, fed.mean(fed.map(gradient, key), name="gradient")))


@dataclass(frozen=True)
class MBSGD:
    """Minibatch SGD for compositions: the inner value is that of the minibatch.

    Solves compositional problems, min over x of h(x) + f(g(x)) with g = mean g_k, whose f is known to all: y = mean
    g_k(x; ζ_k), then x ← x − η mean(∇h_k(x; ξ_k) + ∇g_k(x; ζ_k)ᵀ∇f(y)), on the same ζ_k. The gradient is biased by the
    noise of y, the less the larger the minibatches.

    `inner="own"`: every client takes its own g_k(x; ζ_k) for y and saves an exchange. That is FedAvg's case I with one
    local step and, with more than one client, ends at a wrong point; y then stays at its start.

    Departures: the paper says "minibatch SGD customised for CO" and no more; this is our reading.
    Exchanges a round: 2, with inner="own" 1.

    Reference: Ghadimi and Lan, Stochastic First- and Zeroth-Order Methods for Nonconvex Stochastic Programming, 2013.
    """

    step: Step = 0.01  # η
    batch_size: BatchSize = None  # of ξ and ζ; None: all the client's data
    inner: Literal["shared", "own"] = "shared"

    solves: ClassVar[tuple[type, ...]] = (Compositional,)
    needs: ClassVar[tuple[str, ...]] = ("known outer",)

    def init(self, fed: Fed, x: tree.Tree, y: tree.Tree, key: Array) -> State:
        """The start."""
        return State(x, y)

    def round(self, fed: Fed, state: State, key: Array) -> State:
        """One step."""
        if self.inner == "shared":
            return _two_exchanges(self, fed, state, 1.0, key)
        x = state.x

        def gradient(c: Client, k: Array) -> tree.Tree:
            ku, kl = jax.random.split(k)
            value, pullback = c.r_and_pullback(x, c.lower(kl, self.batch_size))
            return plus_h(c, x, value, pullback(slope(c.problem, value)), ku, self.batch_size)

        return state._replace(x=_stepped(fed, x, self.step, fed.mean(fed.map(gradient, key), name="gradient")))


@dataclass(frozen=True)
class SCGD:
    """Stochastic compositional gradient descent: a running average of the inner value.

    Solves compositional problems, min over x of h(x) + f(g(x)) with g = mean g_k, whose f is known to all:
    y ← (1−β)y + β mean g_k(x; ζ_k), then x ← x − α mean(∇h_k(x; ξ_k) + ∇g_k(x; ζ_k)ᵀ∇f(y)), with the new y and the same
    ζ_k. It needs two time scales, β ≫ α; in the theory α_t ~ t^{−3/4}, β_t ~ t^{−1/2}. MBSGD is β = 1.

    Departures: clients in parallel; the plain part h; y starts at mean g_k(x). Exchanges a round: 2. At the start: 1.

    Reference: Wang, Fang and Liu, Stochastic Compositional Gradient Descent, Mathematical Programming 161, 2017.
    """

    step: Step = 0.01  # α
    momentum: Share = 0.1  # β
    batch_size: BatchSize = None  # of ξ and ζ; None: all the client's data
    first_batch: BatchSize = None  # of the first y; None: all the client's data

    solves: ClassVar[tuple[type, ...]] = (Compositional,)
    needs: ClassVar[tuple[str, ...]] = ("known outer",)

    def init(self, fed: Fed, x: tree.Tree, y: tree.Tree, key: Array) -> State:
        """The start: y = mean g_k(x)."""
        return State(x, first_value(fed, x, key, self.first_batch))

    def round(self, fed: Fed, state: State, key: Array) -> State:
        """One step."""
        return _two_exchanges(self, fed, state, self.momentum, key)


@dataclass(frozen=True)
class NASA:
    """Nested averaged stochastic approximation: running averages of the inner value and of the gradient.

    Solves compositional problems, min over x of h(x) + f(g(x)) with g = mean g_k, whose f is known to all. With
    (2.5)–(2.8)'s a, b, β and τ_t: x ← x − (τ/β)z; z ← (1 − aτ)z + aτ mean(∇h_k(x; ξ) + ∇g_k(x; ζ)ᵀ∇f(y)); and
    y ← (1 − bτ)y + bτ mean g_k(x; ζ'): at the new x, with the old y. One time scale, τ_t ~ 1/√T.

    Departures: clients in parallel; the plain part h; with a set, x is projected after its step (the paper moves
    towards the projection, which is the same without one); y starts at mean g_k(x), z at 0.

    Exchanges a round: 1, of the gradient and the inner value. At the start: 1.

    Reference: Ghadimi, Ruszczyński and Wang, A Single Timescale Stochastic Approximation Method for Nested Stochastic
    Optimization, SIAM Journal on Optimization 30, 2020.
    """

    step: Step = 0.01  # τ/β
    momentum: Share = 0.1  # bτ, of y
    gradient_momentum: Share = 0.1  # aτ, of z
    batch_size: BatchSize = None  # of ξ, ζ and ζ'; None: all the client's data
    first_batch: BatchSize = None  # of the first y; None: all the client's data

    solves: ClassVar[tuple[type, ...]] = (Compositional,)
    needs: ClassVar[tuple[str, ...]] = ("known outer",)

    def init(self, fed: Fed, x: tree.Tree, y: tree.Tree, key: Array) -> State:
        """The start: y = mean g_k(x), z = 0."""
        return State(x, first_value(fed, x, key, self.first_batch), tree.zeros_like(x))

    def round(self, fed: Fed, state: State, key: Array) -> State:
        """One step."""
        x = _stepped(fed, state.x, self.step, state.z)
        f_y = slope(fed.problem, state.y)

        def both(c: Client, k: Array) -> tuple[tree.Tree, tree.Tree]:
            k1, k2, k3 = jax.random.split(k, 3)
            through_g = c.r_x(x, c.lower(k1, self.batch_size), f_y)
            gradient = plus_h(c, x, state.y, through_g, k2, self.batch_size)
            return gradient, c.r(x, c.lower(k3, self.batch_size))

        gradient, value = fed.mean(fed.map(both, key), name="gradient, y")
        y = tree.step(state.y, self.momentum, tree.sub(state.y, value))
        return State(x, y, tree.step(state.z, self.gradient_momentum, tree.sub(state.z, gradient)))


@dataclass(frozen=True)
class GCIVR:
    """SPIDER estimates of the inner value, of its Jacobian and of ∇h: a full batch, then differences on minibatches.

    Solves compositional problems, min over x of h(x) + f(g(x)) with g = mean g_k, whose f is known to all; the inner
    value should be small, for its whole Jacobian is sent.

    Round (one epoch of τ steps): y = g(x), Z = ∇g(x), u = ∇h(x) on full batches, and x ← x − η(u + Zᵀ∇f(y)); then τ − 1
    times, with x⁻ the x of the step before and one minibatch for both, y += g(x; ζ) − g(x⁻; ζ), likewise Z and u, and
    the same step on x.

    Departures: clients in parallel. The authors' published code differs and is not followed: there the full batch that
    starts an epoch is never taken, and an Adagrad step is put on top.

    Exchanges a round: τ (one a step), each of d_g + d_g·d + d numbers.

    Reference: Haddadpour, Kamani, Mahdavi and Karbasi, Learning Distributionally Robust Models at Scale via Composite
    Optimization, ICLR 2022.
    """

    step: Step = 0.01  # η
    anchor_every: AtLeastOne = 10  # τ, about √m of m samples
    batch_size: BatchSize = None  # of ξ and ζ, about √m; None: all the client's data
    anchor_batch: BatchSize = None  # of the first estimates; None: all the client's data

    solves: ClassVar[tuple[type, ...]] = (Compositional,)
    needs: ClassVar[tuple[str, ...]] = ("known outer",)

    def init(self, fed: Fed, x: tree.Tree, y: tree.Tree, key: Array) -> State:
        """The start."""
        return State(x, y)

    def round(self, fed: Fed, state: State, key: Array) -> State:
        """One epoch."""
        first, rest = jax.random.split(key)

        def anchor(c: Client, k: Array) -> Any:
            ku, kl = jax.random.split(k)
            return _parts(c, state.x, c.lower(kl, self.anchor_batch), _upper(c, ku, self.anchor_batch))

        def step(t: Any, carry: Any) -> Any:
            old, x, estimate = carry

            def change(c: Client, k: Array) -> Any:
                ku, kl = jax.random.split(k)
                batches = c.lower(kl, self.batch_size, t), _upper(c, ku, self.batch_size, t)
                return tree.sub(_parts(c, x, *batches), _parts(c, old, *batches))

            estimate = tree.add(estimate, fed.mean(fed.map(change, rest), name="y, Z, u"))
            return x, _stepped(fed, x, self.step, _direction(fed, estimate)), estimate

        estimate = fed.mean(fed.map(anchor, first), name="y, Z, u")
        start = state.x, _stepped(fed, state.x, self.step, _direction(fed, estimate)), estimate
        _, x, estimate = fed.loop(self.anchor_every - 1, step, start)
        return State(x, estimate[0])


def _stepped(fed: Fed, x: tree.Tree, step: Any, direction: tree.Tree) -> tree.Tree:
    return fed.problem.project_upper(tree.step(x, step, direction))


def _two_exchanges(h: MBSGD | SCGD, fed: Fed, state: State, momentum: Any, key: Array) -> State:
    """y ← (1−β)y + β mean g_k(x; ζ_k), then a step on x with that y and the same ζ_k."""
    x = state.x
    inner_batch = lambda c, k: c.lower(jax.random.split(k)[1], h.batch_size)
    value = fed.mean(fed.map(lambda c, k: c.r(x, inner_batch(c, k)), key), name="y")
    y = tree.step(state.y, momentum, tree.sub(state.y, value))
    f_y = slope(fed.problem, y)

    def gradient(c: Client, k: Array) -> tree.Tree:
        through_g = c.r_x(x, inner_batch(c, k), f_y)
        return plus_h(c, x, y, through_g, jax.random.split(k)[0], h.batch_size)

    return State(_stepped(fed, x, h.step, fed.mean(fed.map(gradient, key), name="gradient")), y)


# GCIVR's three estimates, (y, Z, u), or two where there is no h.


def _upper(c: Client, key: Array, size: int | None, step: Any = 0) -> Data | None:
    return None if c.problem.extra is None else c.upper(key, size, step)  # type: ignore[union-attr]


def _parts(c: Client, x: tree.Tree, lower: Data, upper: Data | None) -> tuple[tree.Tree, ...]:
    value, jacobian = c.r_and_jacobian(x, lower)
    return (value, jacobian) if upper is None else (value, jacobian, c.f_x(x, value, upper))


def _direction(fed: Fed, estimate: tuple[tree.Tree, ...]) -> tree.Tree:
    """u + Zᵀ∇f(y)."""
    y, jacobian, *plain = estimate
    v, _ = ravel_pytree(slope(fed.problem, y))
    through_g = jax.tree.map(lambda rows: jnp.tensordot(v, rows, axes=1), jacobian)
    return tree.add(plain[0], through_g) if plain else through_g
