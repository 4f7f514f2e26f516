"""Comm-FedBiO: federated bilevel optimization with compressed hypergradients, after Li, Pei and Huang, KDD 2022."""

from dataclasses import dataclass
from typing import Any, ClassVar, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax.flatten_util import ravel_pytree
from jaxtyping import Array, Float

from rookery.base import tree
from rookery.channels.codecs import largest, random_places, spread
from rookery.language.fed import AtLeastOne, BatchSize, Bookkeeping, Client, Fed, PerClient, Step, Steps
from rookery.parts import features, hypergradient
from rookery.parts.local import descend
from rookery.problems.problems import Bilevel


class State(NamedTuple):
    """The two variables, and u ≈ [∇²_y g]⁻¹∇_y f as one flat vector."""

    x: tree.Tree
    y: tree.Tree
    u: Float[Array, " d"]


@dataclass(frozen=True)
class CommFedBiO:
    """Local SGD at the lower level, and a hypergradient whose linear system is solved with compressed messages.

    Comm-FedBiO solves bilevel problems.

    Each round has three steps:
        1. y ← mean y_i after I local steps on g_i.
        2. Solve ∇²_y g·u = ∇_y f. *Iterative*: Q times, each client sends C(α(∇²_y g_i·u − ∇_y f_i) + e_i) and keeps
        the rest as its new e_i, and the server takes u ← u − mean. *Non-iterative* (`compress="sketch"`): with Gaussian
        S₁ (r₁×d) and S₂ (r₂×d), which all participants draw from one key, each client sends S₂∇²_y g_i S₁ᵀ (by r₁
        products) and S₂∇_y f_i; the server solves the small least-squares problem for ω and sets u = S₁ᵀω.
        3. x ← x − η mean(∇_x f_i − ∇²_xy g_i·u).

    C is `compress` and keeps k = d/`shrink` entries. "top" keeps the client's largest, sent with their places. "random"
    keeps entries drawn anew for each message but common to all clients, so that no places are sent. "none" keeps all.
    Without error feedback "random" is scaled by d/k, which makes it unbiased; with error feedback it is not scaled.
    Either way an entry moves d/k times as far when it is sent, so α must be below 2/ℓ divided by that factor. If
    clients differ, "random" still converges to the exact solution. "top" leaves an error of the order of α, because the
    messages do not vanish at the solution; a decreasing α removes it.

    Departures from the paper: unverified, since we had no access to the paper's algorithm box; this is its outline. u
    and e_i carry over from round to round; the sketch has r₁ = d/`shrink` and r₂ = 2r₁. The cohort's weights travel
    with y, because the server itself adds up the top-k messages.

    Exchanges per round: Q + 2; 3 with the sketch.

    Reference: Li, Pei and Huang, Communication-Efficient Robust Federated Learning with Noisy Labels, KDD 2022.
    """

    upper_step: Step = 0.01  # η
    lower_step: Step = 0.01  # of the local steps on y
    linear_step: Step = 0.1  # α
    lower_local_steps: Steps = 1  # I
    neumann_terms: AtLeastOne = 5  # Q
    compress: Literal["top", "random", "none", "sketch"] = "top"  # C
    shrink: AtLeastOne = 10  # d/k, or d/r₁ for the sketch
    error_feedback: bool = True
    batch_size: BatchSize = None  # of every minibatch; None: all the client's data

    solves: ClassVar[tuple[type, ...]] = (Bilevel,)

    def init(self, fed: Fed, x: tree.Tree, y: tree.Tree, key: Array) -> State:
        """Start at u = 0."""
        return State(x, y, self.memory(x, y))

    def memory(self, x: tree.Tree, y: tree.Tree) -> Float[Array, " d"]:
        """A client's memory: e_i, 0 at first."""
        return ravel_pytree(tree.zeros_like(y))[0]

    def round(self, fed: Fed, state: State, key: Array) -> State:
        k1, k2, k3 = jax.random.split(key, 3)
        x = state.x
        seen = features.seen(fed, x, key)
        steps: Any = {"step": self.lower_step, "local_steps": self.lower_local_steps, "batch_size": self.batch_size}

        def local(c: Client, k: Array, z: Any) -> tree.Tree:
            return descend(c, lambda y, batch: c.g_y(x, y, batch), state.y, k, level="lower", seen=z, **steps)

        y = fed.mean(fed.map(local, k1, seen), name="y", around=state.y)
        solve = self._sketched if self.compress == "sketch" else self._iterated
        u = solve(fed, x, y, state.u, seen, k2)
        vector = ravel_pytree(y)[1](u)
        local_part = lambda c, k: hypergradient.given_vector(c, x, y, vector, k, self.batch_size)
        h = fed.mean(fed.map(local_part, k3), name="h")
        return State(fed.problem.project_upper(tree.step(x, self.upper_step, h)), y, u)

    def _kept(self, size: int) -> int:
        """k, the number of entries kept of a vector of this size: one in `shrink`, rounded up."""
        return -(-size // self.shrink)

    def _iterated(self, fed: Fed, x: tree.Tree, y: tree.Tree, u: Array, seen: PerClient | None, key: Array) -> Array:
        size, unravel = u.size, ravel_pytree(y)[1]
        k = size if self.compress == "none" else self._kept(size)
        scale = 1 if self.error_feedback or self.compress != "random" else size / k

        def once(q: Any, u: Array) -> Array:
            noise, draw = jax.random.split(jax.random.fold_in(key, q))
            shared = random_places(draw, size, k) if self.compress == "random" else jnp.arange(k)

            def message(c: Client, key: Array, error: Array, z: Any) -> tuple[tuple[Array, Array], Array]:
                ku, kl = jax.random.split(key)
                product = c.g_yy(x, y, c.lower(kl, self.batch_size, seen=z), unravel(u))
                residual = tree.sub(product, c.f_y(x, y, c.upper(ku, self.batch_size)))
                whole = self.linear_step * ravel_pytree(residual)[0] + error
                places = largest(whole, k) if self.compress == "top" else shared
                values = scale * whole[places]
                rest = whole - spread(values, places, size) if self.error_feedback else error
                return (values, places) if self.compress == "top" else values, rest

            sent = fed.map_state(message, noise, seen)
            if self.compress == "top":
                marks = (None, Bookkeeping("places of the entries", most=size - 1))
                (values, places), there = fed.gather(sent, name="Hu − f_y", replied=True, bookkeeping=marks)
                shares = jnp.where(there, fed.shares, 0).astype(u.dtype)
                weighed = (shares / jnp.sum(shares))[:, None] * values
                return u - spread(weighed.ravel(), places.ravel(), size)
            return u - spread(fed.mean(sent, name="Hu − f_y"), shared, size)

        return fed.loop(self.neumann_terms, once, u)

    def _sketched(self, fed: Fed, x: tree.Tree, y: tree.Tree, u: Array, seen: PerClient | None, key: Array) -> Array:
        noise, k1, k2 = jax.random.split(key, 3)
        rank, unravel = self._kept(u.size), ravel_pytree(y)[1]
        s1 = jax.random.normal(k1, (rank, u.size), u.dtype)
        s2 = jax.random.normal(k2, (2 * rank, u.size), u.dtype)

        def sketch(c: Client, k: Array, z: Any) -> tuple[Array, Array]:
            ku, kl = jax.random.split(k)
            batch = c.lower(kl, self.batch_size, seen=z)
            column = lambda i: s2 @ ravel_pytree(c.g_yy(x, y, batch, unravel(s1[i])))[0]
            matrix = c.loop(rank, lambda i, m: m.at[:, i].set(column(i)), jnp.zeros((2 * rank, rank), u.dtype))
            return matrix, s2 @ ravel_pytree(c.f_y(x, y, c.upper(ku, self.batch_size)))[0]

        matrix, right = fed.mean(fed.map(sketch, noise, seen), name="S₂HS₁ᵀ, S₂f_y")
        return s1.T @ jnp.linalg.lstsq(matrix, right)[0]
