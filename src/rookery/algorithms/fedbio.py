"""FedBiO and FedBiOAcc, for a lower level that is one for all and for one that is each client's own.

After Li, Huang and Huang, NeurIPS 2023.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool

from rookery.base import tree
from rookery.language.fed import AtLeastOne, BatchSize, Client, Fed, Positive, Step
from rookery.parts import hypergradient, single_loop
from rookery.parts.storm import storm
from rookery.problems.problems import Bilevel

Several = tuple[tree.Tree, ...]  # of x, y and u, in this order (x and y where the lower level is local)


class State(NamedTuple):
    """What the server has: y is empty where it is the clients' own, the last two are FedBiOAcc's."""

    x: tree.Tree
    y: tree.Tree
    u: tree.Tree = None  # ≈ [∇²_y g]⁻¹∇_y f
    momenta: Any = None  # ν, ω and q, or ν alone
    t: Any = None  # steps taken so far


class Sizes(NamedTuple):
    """Of the minibatches; None: all the client's data."""

    upper: int | None  # b_x
    lower: int | None  # b_y


@dataclass(frozen=True)
class _FedBiO:
    """What the family shares."""

    upper_step: Step = 0.01  # η
    lower_step: Step = 0.01  # γ
    local_steps: AtLeastOne = 1  # I
    batch_size: BatchSize = None  # b; None: all the client's data
    upper_batch: BatchSize = None  # b_x, of all that x and u descend along; None: batch_size
    lower_batch: BatchSize = None  # b_y, of what y descends along; None: batch_size

    solves: ClassVar[tuple[type, ...]] = (Bilevel,)


@dataclass(frozen=True)
class FedBiO(_FedBiO):
    """Local SGD on three problems at once: the upper, the lower, and the linear system of the hypergradient.

    Solves bilevel problems with one lower level for all. Beside x and y there is u, which solves ∇²_y g u = ∇_y f.

    Round: I local steps (Alg. 1, lines 4–7 and 13), all from the values before the step, on minibatches of their own:
        y ← y − γ ∇_y g(x, y; B_y),
        x ← x − η (∇_x f(x, y; B_f1) − ∇²_xy g(x, y; B_g1) u),
        u ← u − τ (∇²_y g(x, y; B_g2) u − ∇_y f(x, y; B_f2)), which is line 13;
    then the mean of all three (lines 9 and 15).

    Departures: a cohort may be drawn and clients may have weights (the paper has all of them, alike); local steps go
    through a client's samples without replacement, unless `Clients(replace=True)`; u starts at 0 (the paper leaves it
    open); x is kept in the problem's set, if it has one, after the mean; `shared_batch=True` is ours: B_f1 = B_f2 and
    B_g1 = B_g2 = B_y, at about half the work. (A step on all the data does so anyway: nothing changes.)

    Exchanges a round: 1. Arguments: see the fields, each with the paper's symbol. With several local steps and unlike
    clients the limit is off by an amount in proportion to the steps; with one it is exact.

    Example:
        >>> import rookery as rk
        >>> task = rk.tasks.quadratic(clients=4, seed=0)
        >>> method = rk.FedBiO(upper_step=0.05, lower_step=0.1, linear_step=0.1)
        >>> run = rk.solve(task.problem, task.clients, method, task.init, rounds=300, every=300, evaluate=task.evaluate)
        >>> bool(run.history["distance"].iloc[-1] < 1e-6)
        True

    Reference: Li, Huang and Huang, Communication-Efficient Federated Bilevel Optimization with Global and Local Lower
    Level Problems, NeurIPS 2023.
    """

    linear_step: Step = 0.01  # τ
    shared_batch: bool = False  # one minibatch of each level a step, in the place of five

    def init(self, fed: Fed, x: tree.Tree, y: tree.Tree, key: Array) -> State:
        """The start: u = 0."""
        return State(x, y, tree.zeros_like(y))

    def round(self, fed: Fed, state: State, key: Array) -> State:
        """Alg. 1 from one synchronisation to the next."""
        steps = (self.upper_step, self.lower_step, self.linear_step)

        def local(c: Client, k: Array) -> Several:
            orders = jax.random.split(k, 5)
            step = lambda v, z: move(z, steps, directions(self, c, [z], orders, v, _sizes(self))[0])
            return c.loop(self.local_steps, step, (state.x, state.y, state.u))

        x, y, u = fed.mean(fed.map(local, key), name="x, y, u", around=(state.x, state.y, state.u))
        return State(fed.problem.project_upper(x), y, u)


@dataclass(frozen=True)
class FedBiOAcc(_FedBiO):
    """FedBiO with STORM on all three variables.

    Solves bilevel problems with one lower level for all. With α_t = δ/(u₀ + t)^{1/3}, t = 1, 2, … over all local steps,
    one of them (Alg. 2) is: y ← y − γα_t ω, x ← x − ηα_t ν, u ← u − τα_t q (line 4); then, on the same fresh
    minibatches at the new point and the old (lines 10–12), with the directions ∇_y g, μ and r of `FedBiO`,
        ω ← ∇_y g⁺ + (1 − c_ω α_t²)(ω − ∇_y g), ν ← μ⁺ + (1 − c_ν α_t²)(ν − μ), q ← r⁺ + (1 − c_u α_t²)(q − r).

    Round: I such steps. In the last, the variables are averaged (line 6) before the momenta are taken, at the averaged
    point against the client's own old one; then these are averaged, too (line 14). In the first round every client
    begins with estimates of its own on `first_batch` samples (line 2), later with the server's momenta.

    Departures: as in `FedBiO`; c·α_t² is cut off at 1, where the lemmas want it.

    Exchanges a round: 2, x, y and u, then ν, ω and q.

    Reference: Li, Huang and Huang 2023, Alg. 2.
    """

    linear_step: Step = 0.01  # τ
    shared_batch: bool = False  # one minibatch of each level a step, in the place of five
    first_batch: BatchSize = None  # b_1, of the first momenta; None: all the client's data
    delta: Positive = 3.0  # δ of α_t, which by default is about 1 at first, and a quarter after 2,000 steps
    offset: Positive = 30.0  # u₀ of α_t
    c_lower: Positive = 1.0  # c_ω
    c_upper: Positive = 1.0  # c_ν
    c_linear: Positive = 1.0  # c_u

    def init(self, fed: Fed, x: tree.Tree, y: tree.Tree, key: Array) -> State:
        """The start: u = 0, and momenta that the first round does not look at."""
        z = (x, y, tree.zeros_like(y))
        return State(*z, momenta=tree.zeros_like(z), t=jnp.int32(0))

    def round(self, fed: Fed, state: State, key: Array) -> State:
        """Alg. 2 from one synchronisation to the next."""
        k1, k2 = jax.random.split(key)
        z, size = (state.x, state.y, state.u), _sizes(self)
        steps, forget = (
            (self.upper_step, self.lower_step, self.linear_step),
            (self.c_upper, self.c_lower, self.c_linear),
        )

        def local(c: Client, k: Array) -> tuple[Several, Several]:
            first, *orders = jax.random.split(k, 6)
            begin = lambda: directions(self, c, [z], jax.random.split(first, 5), 0, Sizes(*[self.first_batch] * 2))[0]
            momenta = _anew(c, state.t == 0, begin, state.momenta)  # line 2
            both = lambda points, v: directions(self, c, points, orders, v, size)
            return accelerated(self, c, both, z, momenta, steps, forget, state.t)

        own = fed.map(local, k1)
        alpha = _alpha(self, state.t + self.local_steps)
        last = fed.map(lambda c, k, own: move(own[0], steps, own[1], alpha), k2, own)  # line 4
        x, y, u = fed.mean(last, name="x, y, u", around=z)  # line 6
        new = (fed.problem.project_upper(x), y, u)

        def correct(c: Client, k: Array, own: tuple[Several, Several]) -> Several:
            old, momenta = own
            return storms(directions(self, c, [new, old], jax.random.split(k, 5), 0, size), momenta, forget, alpha)

        momenta = fed.mean(fed.map(correct, k2, own), name="ν, ω, q", around=state.momenta)  # lines 10–14
        return State(*new, momenta, state.t + self.local_steps)


@dataclass(frozen=True)
class FedBiOLocal(_FedBiO):
    """FedBiO where every client has a lower level of its own; its y stays with it.

    Solves bilevel problems with `lower_scope="client"`: min over x of mean f_i(x, y_i*(x)), y_i*(x) = argmin g_i(x, ·).
    The gradient of that is the mean of the clients' own hypergradients.

    Round: I local steps (Alg. 3, lines 5–6), from the values before the step,
        y_i ← y_i − γ ∇_y g_i(x, y_i; B_y),  x ← x − η Φ_i(x, y_i),
        Φ_i = ∇_x f_i − ∇²_xy g_i · τ Σ_{k=0}^{Q} Π_{j≤k} (I − τ∇²_y g_i(ξ_j)) ∇_y f_i, of (6);
    one ξ_f serves both parts of ∇f_i, all other batches are independent. Then the mean of x (line 8).

    `Run.y` is empty: no y is the server's, and none is sent. A client remembers its y_i while it sits out.

    Departures: cohorts, weights, samples without replacement and the problem's set of x, as in `FedBiO`.

    Exchanges a round: 1, of x alone (that "we only communicate the lower level variable" is a slip).

    Reference: Li, Huang and Huang 2023, Alg. 3.
    """

    neumann_terms: AtLeastOne = 5  # Q
    hessian_step: Step = 0.1  # τ of the series, at most 1/ℓ of every ∇²_y g_i

    scope: ClassVar[str] = "client"

    def init(self, fed: Fed, x: tree.Tree, y: tree.Tree, key: Array) -> State:
        """The start."""
        return State(x, ())

    def memory(self, x: tree.Tree, y: tree.Tree) -> tree.Tree:
        """What a client remembers: y_i, the given y at first."""
        return y

    def round(self, fed: Fed, state: State, key: Array) -> State:
        """Alg. 3 from one synchronisation to the next."""
        steps = (self.upper_step, self.lower_step)

        def local(c: Client, k: Array, y: tree.Tree) -> tuple[tree.Tree, tree.Tree]:
            noise = jax.random.split(k)
            step = lambda v, z: move(z, steps, local_directions(self, c, [z], noise, v, _sizes(self))[0])
            return c.loop(self.local_steps, step, (state.x, y))

        return State(fed.problem.project_upper(fed.mean(fed.map_state(local, key), name="x", around=state.x)), ())


@dataclass(frozen=True)
class FedBiOAccLocal(_FedBiO):
    """FedBiOAcc where every client has a lower level of its own; its y and the momentum of it stay with it.

    Solves bilevel problems with `lower_scope="client"`, by the steps of `FedBiOAcc` on x and y_i along ν and ω_i
    (Alg. 4), which estimate Φ_i of `FedBiOLocal` and ∇_y g_i.

    Round: I steps; in the last, x is averaged (line 6) before the momenta are taken; then ν is, too (line 14).

    `Run.y` is empty, as in `FedBiOLocal`. A client remembers y_i and ω_i, and how far it has come. If that is not where
    the others are (it has never taken part, or sat out), ω_i begins with a plain estimate on `first_batch` samples at
    the x it is sent, as all do in the first round (line 2): its old ω_i belongs to an x long gone. ν, which is the
    server's, does so in the first round alone.

    Departures: as in `FedBiOLocal`; c·α_t² is cut off at 1, where the lemmas want it.

    Exchanges a round: 2, x, then ν.

    Reference: Li, Huang and Huang 2023, Alg. 4.
    """

    neumann_terms: AtLeastOne = 5  # Q
    hessian_step: Step = 0.1  # τ of the series, at most 1/ℓ of every ∇²_y g_i
    first_batch: BatchSize = None  # b_1, of the first momenta; None: all the client's data
    delta: Positive = 3.0  # δ of α_t, which by default is about 1 at first, and a quarter after 2,000 steps
    offset: Positive = 30.0  # u₀ of α_t
    c_lower: Positive = 1.0  # c_ω
    c_upper: Positive = 1.0  # c_ν

    scope: ClassVar[str] = "client"

    def init(self, fed: Fed, x: tree.Tree, y: tree.Tree, key: Array) -> State:
        """The start: a momentum that the first round does not look at."""
        return State(x, (), momenta=tree.zeros_like(x), t=jnp.int32(0))

    def memory(self, x: tree.Tree, y: tree.Tree) -> tuple[tree.Tree, tree.Tree, Array]:
        """What a client remembers: y_i, ω_i, and the number of steps they are of; none so far."""
        return y, tree.zeros_like(y), jnp.int32(-1)

    def round(self, fed: Fed, state: State, key: Array) -> State:
        """Alg. 4 from one synchronisation to the next."""
        k1, k2 = jax.random.split(key)
        size, steps, forget = _sizes(self), (self.upper_step, self.lower_step), (self.c_upper, self.c_lower)

        def local(c: Client, k: Array, memory: Any) -> tuple[Any, Any]:
            y, omega, reached = memory
            kx, ky, *noise = jax.random.split(k, 4)
            begin_x = lambda: own_hypergradients(self, c, [(state.x, y)], kx, self.first_batch)[0]
            begin_y = lambda: c.g_y(state.x, y, c.lower(ky, self.first_batch))
            momenta = _anew(c, state.t == 0, begin_x, state.momenta), _anew(c, reached != state.t, begin_y, omega)
            both = lambda points, v: local_directions(self, c, points, noise, v, size)
            return accelerated(self, c, both, (state.x, y), momenta, steps, forget, state.t), memory

        own = fed.map_state(local, k1)
        alpha = _alpha(self, state.t + self.local_steps)
        last = fed.map(lambda c, k, own: move(own[0], steps, own[1], alpha)[0], k2, own)  # line 4
        x = fed.problem.project_upper(fed.mean(last, name="x", around=state.x))  # line 6

        def correct(c: Client, k: Array, memory: Any, own: tuple[Several, Several]) -> tuple[tree.Tree, Any]:
            old, momenta = own
            y = move(old, steps, momenta, alpha)[1]
            both = local_directions(self, c, [(x, y), old], jax.random.split(k), 0, size)
            nu, omega = storms(both, momenta, forget, alpha)
            return nu, (y, omega, state.t + self.local_steps)

        nu = fed.mean(fed.map_state(correct, k2, own), name="ν", around=state.momenta)  # lines 11–14
        return State(x, (), momenta=nu, t=state.t + self.local_steps)


# What x, y and u descend along.


def directions(
    h: FedBiO | FedBiOAcc, c: Client, points: list[Several], orders: Any, v: Any, size: Sizes
) -> list[Several]:
    """∇_x f − ∇²_xy g u, ∇_y g and ∇²_y g u − ∇_y f at each point, on the v-th minibatches of five orders."""
    three: Any = points
    return [*single_loop.directions(c, three, orders, v, size.upper, size.lower, h.shared_batch)]


def local_directions(
    h: FedBiOLocal | FedBiOAccLocal, c: Client, points: list[Several], noise: Any, v: Any, size: Sizes
) -> list[Several]:
    """Φ_i and ∇_y g_i at each point (x, y_i), on the same minibatches, those of the v-th step."""
    phi = own_hypergradients(h, c, points, jax.random.fold_in(noise[0], v), size.upper)
    batch = c.lower(noise[1], size.lower, v)
    return [(own, c.g_y(z[0], z[1], batch)) for own, z in zip(phi, points, strict=True)]


def own_hypergradients(
    h: FedBiOLocal | FedBiOAccLocal, c: Client, points: list[Several], key: Array, size: int | None
) -> list[tree.Tree]:
    """Φ_i of (6) at each point: the series has Q + 1 terms."""
    series: dict[str, Any] = {"method": "sum", "terms": h.neumann_terms, "step": h.hessian_step}
    return hypergradient.local_at(c, points, key, **series, upper_batch=size, lower_batch=size)


# Small things that several of them need.


def accelerated(
    h: FedBiOAcc | FedBiOAccLocal,
    c: Client,
    both: Callable[[list[Several], Any], list[Several]],
    z: Several,
    momenta: Several,
    steps: tuple[Any, ...],
    forget: tuple[Any, ...],
    t: Any,
) -> tuple[Several, Several]:
    """The first I − 1 steps after a synchronisation; `both` gives the directions at two points in the v-th step."""

    def step(v: Any, carry: tuple[Several, Several]) -> tuple[Several, Several]:
        (old, momenta), alpha = carry, _alpha(h, t + v + 1)
        new = move(old, steps, momenta, alpha)
        return new, storms(both([new, old], v), momenta, forget, alpha)

    return c.loop(h.local_steps - 1, step, (z, momenta))


def move(z: Several, steps: tuple[Any, ...], d: Several, alpha: Any = 1.0) -> Several:
    """Each variable by its own step, and α."""
    return tuple(tree.step(own, alpha * step, along) for own, step, along in zip(z, steps, d, strict=True))


def storms(both: list[Several], momenta: Several, forget: tuple[Any, ...], alpha: Any) -> Several:
    """Each momentum with its own c·α²; `both` are the directions at the new point and at the old."""
    rates = [jnp.minimum(c * alpha**2, 1.0) for c in forget]
    return tuple(storm(*one) for one in zip(both[0], momenta, both[1], rates, strict=True))


def _alpha(h: FedBiOAcc | FedBiOAccLocal, t: Any) -> Any:
    """α_t = δ/(u₀ + t)^{1/3}."""
    return h.delta / (h.offset + t) ** (1 / 3)


def _anew(c: Client, when: Bool[Array, ""], begin: Callable[[], tree.Tree], otherwise: tree.Tree) -> tree.Tree:
    """`begin()` when that is so: a loop of one turn or none, so that work not done is neither paid for nor counted."""
    return c.loop(when.astype(jnp.int32), lambda *_: begin(), otherwise)


def _sizes(h: _FedBiO) -> Sizes:
    upper = h.batch_size if h.upper_batch is None else h.upper_batch
    return Sizes(upper, h.batch_size if h.lower_batch is None else h.lower_batch)
