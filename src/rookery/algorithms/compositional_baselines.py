"""Baselines of the FedDRO paper: single-machine methods, with a minibatch of every client in each common step."""

from dataclasses import dataclass
from typing import Any, ClassVar, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax.flatten_util import ravel_pytree
from jaxtyping import Array

from rookery.base import tree
from rookery.language.fed import AtLeastOne, BatchSize, Client, Data, Fed, Share, Step
from rookery.parts.compositional import first_value, plus_h, slope
from rookery.parts.momentum import moving_average
from rookery.problems.problems import Compositional


class State(NamedTuple):
    """The variable, the estimate of the inner value, and NASA's running gradient."""

    x: tree.Tree
    y: tree.Tree
    z: tree.Tree = None


@dataclass(frozen=True)
class ParallelSGD:
    """SGD on the plain part h only: the composition f(g) is left out, as if a constraint were ignored.

    The method runs on compositional problems with an `extra` part h, such as a loss with a fairness penalty, and shows
    what the penalty changes. A round is x ← x − η mean ∇h_k(x; ξ). y stays at its start.

    Departures from the paper: none; the paper describes it in one line ("unconstrained").

    Exchanges per round: 1.

    Reference: Khanduri et al., On Federated Compositional Optimization: Algorithms, Analysis, and Guarantees, Sec. 6.
    """

    step: Step = 0.01  # η
    batch_size: BatchSize = None  # of ξ; None: all the client's data

    solves: ClassVar[tuple[type, ...]] = (Compositional,)
    needs: ClassVar[tuple[str, ...]] = ("extra",)

    def init(self, fed: Fed, x: tree.Tree, y: tree.Tree, key: Array) -> State:
        return State(x, y)

    def round(self, fed: Fed, state: State, key: Array) -> State:
        gradient = lambda c, k: c.f_x(state.x, state.y, c.upper(k, self.batch_size))
        return state._replace(x=_stepped(fed, state.x, self.step, fed.mean(fed.map(gradient, key), name="gradient")))


@dataclass(frozen=True)
class MBSGD:
    """Minibatch SGD for compositions, with the inner value computed on the minibatch.

    MBSGD solves compositional problems, min over x of h(x) + f(g(x)) with g = mean g_k, whose f is known to all. A
    round is y = mean g_k(x; ζ_k), then x ← x − η mean(∇h_k(x; ξ_k) + ∇g_k(x; ζ_k)ᵀ∇f(y)) on the same ζ_k. The noise of
    y biases the gradient, less so with larger minibatches.

    With `inner="own"`, every client uses its own g_k(x; ζ_k) for y, which saves an exchange. That is case I of FedAvg
    with one local step: with more than one client it converges to a wrong point. y then stays at its start.

    Departures from the paper: the paper says only "minibatch SGD customised for CO"; this is our reading.

    Exchanges per round: 2, or 1 with inner="own".

    Reference: Ghadimi and Lan, Stochastic First- and Zeroth-Order Methods for Nonconvex Stochastic Programming, 2013.
    """

    step: Step = 0.01  # η
    batch_size: BatchSize = None  # of ξ and ζ; None: all the client's data
    inner: Literal["shared", "own"] = "shared"

    solves: ClassVar[tuple[type, ...]] = (Compositional,)
    needs: ClassVar[tuple[str, ...]] = ("known outer",)

    def init(self, fed: Fed, x: tree.Tree, y: tree.Tree, key: Array) -> State:
        return State(x, y)

    def round(self, fed: Fed, state: State, key: Array) -> State:
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

    SCGD solves compositional problems, min over x of h(x) + f(g(x)) with g = mean g_k, whose f is known to all. A round
    is y ← (1−β)y + β mean g_k(x; ζ_k), then x ← x − α mean(∇h_k(x; ξ_k) + ∇g_k(x; ζ_k)ᵀ∇f(y)) with the new y and the
    same ζ_k. It needs two time scales, β ≫ α; in the theory α_t ~ t^{−3/4} and β_t ~ t^{−1/2}. MBSGD is β = 1.

    Departures from the paper: clients in parallel; the plain part h; y starts at mean g_k(x).

    Exchanges per round: 2. At the start: 1.

    Reference: Wang, Fang and Liu, Stochastic Compositional Gradient Descent, Mathematical Programming 161, 2017.
    """

    step: Step = 0.01  # α
    momentum: Share = 0.1  # β
    batch_size: BatchSize = None  # of ξ and ζ; None: all the client's data
    first_batch: BatchSize = None  # of the first y; None: all the client's data

    solves: ClassVar[tuple[type, ...]] = (Compositional,)
    needs: ClassVar[tuple[str, ...]] = ("known outer",)

    def init(self, fed: Fed, x: tree.Tree, y: tree.Tree, key: Array) -> State:
        """Start at y = mean g_k(x)."""
        return State(x, first_value(fed, x, key, self.first_batch))

    def round(self, fed: Fed, state: State, key: Array) -> State:
        return _two_exchanges(self, fed, state, self.momentum, key)


@dataclass(frozen=True)
class NASA:
    """Nested averaged stochastic approximation: running averages of the inner value and of the gradient.

    NASA solves compositional problems, min over x of h(x) + f(g(x)) with g = mean g_k, whose f is known to all.

    With a, b, β and τ_t of (2.5)–(2.8), a round is x ← x − (τ/β)z; z ← (1 − aτ)z + aτ mean(∇h_k(x; ξ) + ∇g_k(x;
    ζ)ᵀ∇f(y)); y ← (1 − bτ)y + bτ mean g_k(x; ζ'). Both averages use the new x and the old y. There is one time scale,
    τ_t ~ 1/√T.

    Departures from the paper: clients in parallel; the plain part h; x is projected onto the problem's set after its
    step (the paper moves towards the projection, which is the same without a set); y starts at mean g_k(x) and z at 0.

    Exchanges per round: 1, of the gradient and the inner value. At the start: 1.

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
        """Start at y = mean g_k(x) and z = 0."""
        return State(x, first_value(fed, x, key, self.first_batch), tree.zeros_like(x))

    def round(self, fed: Fed, state: State, key: Array) -> State:
        x = _stepped(fed, state.x, self.step, state.z)
        f_y = slope(fed.problem, state.y)

        def both(c: Client, k: Array) -> tuple[tree.Tree, tree.Tree]:
            k1, k2, k3 = jax.random.split(k, 3)
            through_g = c.r_x(x, c.lower(k1, self.batch_size), f_y)
            gradient = plus_h(c, x, state.y, through_g, k2, self.batch_size)
            return gradient, c.r(x, c.lower(k3, self.batch_size))

        gradient, value = fed.mean(fed.map(both, key), name="gradient, y")
        y = moving_average(state.y, value, self.momentum)
        return State(x, y, moving_average(state.z, gradient, self.gradient_momentum))


@dataclass(frozen=True)
class GCIVR:
    """SPIDER estimates of the inner value, of its Jacobian and of ∇h: a full batch, then differences on minibatches.

    GCIVR solves compositional problems, min over x of h(x) + f(g(x)) with g = mean g_k, whose f is known to all. The
    inner value should be small, since its whole Jacobian is sent.

    A round is an epoch of τ steps. It starts with y = g(x), Z = ∇g(x) and u = ∇h(x) on full batches and the step
    x ← x − η(u + Zᵀ∇f(y)). Then, τ − 1 times, it updates y += g(x; ζ) − g(x⁻; ζ), and Z and u in the same way, where x⁻
    is the x of the step before, and takes the same step on x.

    Departures from the paper: clients in parallel. The authors' published code differs and is not followed: it never
    takes the full batch that starts an epoch, and it adds an Adagrad step.

    Exchanges per round: τ, one per step, each of d_g + d_g·d + d numbers.

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
        return State(x, y)

    def round(self, fed: Fed, state: State, key: Array) -> State:
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
    """Update y ← (1−β)y + β mean g_k(x; ζ_k), then x by a step with that y and the same ζ_k."""
    x = state.x
    inner_batch = lambda c, k: c.lower(jax.random.split(k)[1], h.batch_size)
    value = fed.mean(fed.map(lambda c, k: c.r(x, inner_batch(c, k)), key), name="y")
    y = moving_average(state.y, value, momentum)
    f_y = slope(fed.problem, y)

    def gradient(c: Client, k: Array) -> tree.Tree:
        through_g = c.r_x(x, inner_batch(c, k), f_y)
        return plus_h(c, x, y, through_g, jax.random.split(k)[0], h.batch_size)

    return State(_stepped(fed, x, h.step, fed.mean(fed.map(gradient, key), name="gradient")), y)


# GCIVR's estimates: (y, Z, u), or (y, Z) without h.


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
