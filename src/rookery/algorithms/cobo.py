"""CoBo (Hashemi, He and Jaggi 2024): a model for each client, and weights that say which clients help each other."""

from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from rookery.base import tree
from rookery.language.fed import Amount, AtLeastOne, BatchSize, Client, Fed, Positive, Step, Steps
from rookery.parts.local import sgd
from rookery.problems.problems import SingleLevel


class State(NamedTuple):
    """The models' mean, all models, the weights of all pairs, and the number of rounds so far."""

    x: tree.Tree
    models: tree.Tree  # a row for each client
    weights: Float[Array, "n n"]
    rounds: Int[Array, ""]
    y: tuple[()] = ()


@dataclass(frozen=True)
class CoBo:
    """A model for each client, pulled towards the models of those clients whose gradients agree with its own.

    CoBo solves single-level problems with a model x_i for each client,
        min over x_1, …, x_n of Σ f_i(x_i) + (ρ/2) Σ_{i<j} w_ij ‖x_i − x_j‖²,
    where w_ij in [0, 1] maximises w ⟨∇f_i(z), ∇f_j(z)⟩ at the midpoint z = (x_i + x_j)/2. `Run.memory` holds the x_i,
    `Run.weights` the w_ij, and `Run.x` the plain mean of the models.

    All models start at x⁰ and all weights at 1. In a round (Alg. 1), pairs (i, j) of clients compute their gradients at
    the midpoint, and w_ij ← clip(w_ij + γ ⟨∇f_i(z; ξ), ∇f_j(z; ξ')⟩, 0, 1). Then each client of the cohort steps
    x_i ← x_i − η(∇f_i(x_i; ξ) + ρ Σ_k w_ik (x_i − x_k)), with the new weights and the others' models from before the
    round, τ_i times.

    Departures from the paper:
        the paper's form is pairwise. Here the server holds all models and weights, n·d + n² numbers, and **sees every
        client's model and gradients**: use it with few clients, who trust the server;
        the pairs are a random perfect matching of the cohort, in which an odd client rests. Of n clients, a pair is
        drawn with chance 1/(n − 1) if n is even and 1/n if it is odd (the paper: each pair with chance 1/n). Pairs are
        unordered, so that w_ij = w_ji;
        `local_steps`, `pair_every` (pairs in every k-th round only) and `normalize` (the cosine instead of the inner
        product, which scales with the gradients) are ours. Clients outside the cohort keep their models and weights.
        The last models are returned (the paper: those of a random round). Clients' weights in
        `rk.Clients` are not used. Models are projected onto the problem's set, if it has one, after their steps.

    Exchanges per round: 1, of both gradients, which are not aggregated. If `local_steps` or `pair_every` is not 1: one
    of the model's change and, in rounds with pairs, one of the gradient at the midpoint.

    Example:
        >>> import jax.numpy as jnp
        >>> import rookery as rk
        >>> hospitals = rk.Clients(upper=[{"t": jnp.array([t])} for t in (0.0, 0.0, 5.0, 5.0)])
        >>> problem = rk.SingleLevel(lambda x, b: jnp.mean((x - b["t"]) ** 2))
        >>> run = rk.solve(problem, hospitals, rk.CoBo(proximal=1.0), jnp.array(9.0), rounds=400)
        >>> print(run.memory.round(2), run.weights[0])
        [0. 0. 5. 5.] [0. 1. 0. 0.]

    Reference: Hashemi, He and Jaggi, CoBo: Collaborative Learning via Bilevel Optimization, NeurIPS 2024.
    """

    step: Step = 0.05  # η; in theory at most 1/(2√3 L)
    proximal: Positive = 0.1  # ρ; 0.5 over the size of a cluster is a good start
    weight_step: Amount = 0.1  # γ; 0: the weights stay
    local_steps: Steps = 1  # τ_i
    pair_every: AtLeastOne = 1  # rounds from one matching to the next
    normalize: bool = False  # w_ij by the gradients' cosine
    batch_size: BatchSize = None  # of ξ; None: all the client's data

    solves: ClassVar[tuple[type, ...]] = (SingleLevel,)

    def init(self, fed: Fed, x: tree.Tree, y: tuple[()], key: Array) -> State:
        """Start with x for every client, and with all weights at 1; the diagonal is 0 throughout."""
        models = jax.tree.map(lambda a: jnp.broadcast_to(a, (fed.n, *a.shape)), x)
        return State(x, models, 1 - jnp.eye(fed.n, dtype=jnp.result_type(*jax.tree.leaves(x))), jnp.int32(0))

    def memory(self, x: tree.Tree, y: tuple[()]) -> tree.Tree:
        """A client's memory: its own model, at first x."""
        return x

    def round(self, fed: Fed, state: State, key: Array) -> State:
        k1, k2, k3, k4 = jax.random.split(key, 4)
        own, partner = _rows(state.models, fed.ids), _matching(k1, fed.cohort_size)
        middle = tree.scale(0.5, tree.add(own, _rows(own, partner)))
        learnt = lambda w, slopes: self._learnt(w, fed.ids, partner, slopes)

        if isinstance(self.local_steps, int) and self.local_steps == self.pair_every == 1:
            replies = fed.map_state(self._both_gradients, k2, fed.scatter(middle))
            (slopes, at_own), there = fed.gather(replies, name="gradients", replied=True)
            weights = learnt(state.weights, slopes)
            total, towards = _pull(weights[fed.ids], state.models)
            change = tree.scale(self.step, self._direction(at_own, own, total, towards))
        else:

            def pairs(i: Any, carry: tuple[Array, Array]) -> tuple[Array, Array]:
                gradient = lambda c, k, z: c.f_x(z, (), c.upper(k, self.batch_size))
                at_middle = fed.map(gradient, jax.random.fold_in(k2, i), fed.scatter(middle))
                slopes, there = fed.gather(at_middle, name="gradients", replied=True)
                return learnt(carry[0], slopes), there

            due = 1 if self.pair_every == 1 else (state.rounds % self.pair_every == 0).astype(jnp.int32)
            weights, there = fed.loop(due, pairs, (state.weights, jnp.ones(fed.cohort_size, bool)), most=1)
            pulls = fed.scatter(_pull(weights[fed.ids], state.models))
            change, still = fed.gather(fed.map_state(self._local, k3, pulls), name="x", replied=True)
            there = there & still

        new = jax.vmap(fed.problem.project_upper)(tree.sub(own, change))
        new = jax.tree.map(lambda a, b: jnp.where(_wide(there, a), a, b), new, own)
        fed.map_state(lambda c, k, _, x_i: ((), x_i), k4, fed.scatter(new))
        models = jax.tree.map(lambda a, b: a.at[fed.ids].set(b), state.models, new)
        return State(jax.tree.map(lambda a: jnp.mean(a, axis=0), models), models, weights, state.rounds + 1)

    def _both_gradients(self, c: Client, k: Array, x_i: tree.Tree, z: tree.Tree) -> tuple[Any, tree.Tree]:
        k1, k2 = jax.random.split(k)
        gradient = lambda x, k: c.f_x(x, (), c.upper(k, self.batch_size))
        return (gradient(z, k1), gradient(x_i, k2)), x_i

    def _local(self, c: Client, k: Array, x_i: tree.Tree, pull: tuple[Array, tree.Tree]) -> tuple[tree.Tree, tree.Tree]:
        """Take the local steps from x_i, and send how far they led."""
        count, order = jax.random.split(k)
        steps = c.steps(self.local_steps, count, self.batch_size, "upper")
        direction = lambda x, v: self._direction(c.f_x(x, (), c.upper(order, self.batch_size, v)), x, *pull)
        return tree.sub(x_i, sgd(c, direction, x_i, self.step, steps)), x_i

    def _direction(self, gradient: tree.Tree, x: tree.Tree, total: Array, towards: tree.Tree) -> tree.Tree:
        """∇f_i(x) + ρ(Σ_k w_ik x − Σ_k w_ik x_k), for one client or with a row for each client."""
        pull = jax.tree.map(lambda a, b: _wide(total, a) * a - b, x, towards)
        return tree.add(gradient, tree.scale(self.proximal, pull))

    def _learnt(self, weights: Array, ids: Int[Array, " p"], partner: Int[Array, " p"], slopes: tree.Tree) -> Array:
        """The weights after the pairs' gradients. A gradient that did not arrive is 0 and changes no weight."""
        agree = jax.vmap(tree.dot)(slopes, _rows(slopes, partner))
        if self.normalize:
            sizes = jax.vmap(tree.norm)(slopes)
            agree = agree / jnp.maximum(sizes * sizes[partner], jnp.finfo(agree.dtype).tiny)
        old = weights[ids, ids[partner]]
        new = jnp.clip(old + self.weight_step * agree.astype(old.dtype), 0, 1)
        return weights.at[ids, ids[partner]].set(jnp.where(ids == ids[partner], old, new))


def _matching(key: Array, size: int) -> Int[Array, " size"]:
    """Draw a perfect matching: the partner of each place, which is the place itself for one that rests."""
    order = jax.random.permutation(key, jnp.arange(size, dtype=jnp.int32))
    beside = jnp.arange(size) ^ 1
    return jnp.zeros(size, jnp.int32).at[order].set(order[jnp.where(beside < size, beside, size - 1)])


def _pull(weights: Float[Array, "p n"], models: tree.Tree) -> tuple[Float[Array, " p"], tree.Tree]:
    """Σ_k w_ik and Σ_k w_ik x_k, a row for each client i."""
    return jnp.sum(weights, axis=1), jax.tree.map(lambda a: jnp.tensordot(weights, a, 1).astype(a.dtype), models)


def _rows(models: tree.Tree, ids: Array) -> tree.Tree:
    return jax.tree.map(lambda a: a[ids], models)


def _wide(numbers: Array, like: Array) -> Array:
    """A number, or one for each row, in a shape that multiplies `like`."""
    return numbers.reshape(*numbers.shape, *(1,) * (like.ndim - numbers.ndim))
