"""FedBiO and FedBiOAcc, for a shared lower level and for one that differs by client (Li et al., NeurIPS 2023)."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool

from rookery.base import tree
from rookery.language.fed import AtLeastOne, BatchSize, Client, Fed, Positive, Step
from rookery.parts import hypergradient, single_loop
from rookery.parts.momentum import storm
from rookery.problems.problems import Bilevel

Several = tuple[tree.Tree, ...]  # for x, y and u; for x and y if the lower level is local


class State(NamedTuple):
    """The server's state. y is empty if it belongs to the clients; the last two fields are those of FedBiOAcc."""

    x: tree.Tree
    y: tree.Tree
    u: tree.Tree = None  # ≈ [∇²_y g]⁻¹∇_y f
    momenta: Any = None  # ν, ω and q; only ν if the lower level is local
    t: Any = None  # steps taken so far


class Sizes(NamedTuple):
    """Sizes of the minibatches; None: all the client's data."""

    upper: int | None  # b_x
    lower: int | None  # b_y


@dataclass(frozen=True)
class _FedBiO:
    """The hyperparameters of the family."""

    upper_step: Step = 0.01  # η
    lower_step: Step = 0.01  # γ
    local_steps: AtLeastOne = 1  # I
    batch_size: BatchSize = None  # b; None: all the client's data
    upper_batch: BatchSize = None  # b_x, for the directions of x and u; None: batch_size
    lower_batch: BatchSize = None  # b_y, for the direction of y; None: batch_size

    solves: ClassVar[tuple[type, ...]] = (Bilevel,)


@dataclass(frozen=True)
class FedBiO(_FedBiO):
    """Local SGD on three problems at once: the upper level, the lower level, and the hypergradient's linear system.

    FedBiO solves bilevel problems whose lower level is shared by all clients. Besides x and y it keeps u, an estimate
    of [∇²_y g]⁻¹∇_y f.

    Each round takes I local steps (Alg. 1, lines 4–7 and 13). All three updates use the values from before the step and
    minibatches of their own:
        y ← y − γ ∇_y g(x, y; B_y),
        x ← x − η (∇_x f(x, y; B_f1) − ∇²_xy g(x, y; B_g1) u),
        u ← u − τ (∇²_y g(x, y; B_g2) u − ∇_y f(x, y; B_f2)), which is line 13.
    The server then averages x, y and u (lines 9 and 15).

    Departures from the paper: any cohort and any client weights (the paper uses all clients, equally weighted);
    minibatches are drawn without replacement unless `Clients(replace=True)`; u starts at 0, which the paper leaves
    open; x is projected onto the problem's set, if it has one, after the mean; `shared_batch=True` is ours and sets
    B_f1 = B_f2 and B_g1 = B_g2 = B_y, at about half the work (with full batches this is done anyway, and changes
    nothing).

    Exchanges per round: 1.

    Arguments: see the fields, each with the paper's symbol. With several local steps and heterogeneous clients the
    limit is off by an amount proportional to the steps; with one local step it is exact.

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
    shared_batch: bool = False  # one minibatch of each level per step instead of five

    def init(self, fed: Fed, x: tree.Tree, y: tree.Tree, key: Array) -> State:
        """Start at u = 0."""
        return State(x, y, tree.zeros_like(y))

    def round(self, fed: Fed, state: State, key: Array) -> State:
        steps = (self.upper_step, self.lower_step, self.linear_step)

        def local(c: Client, k: Array) -> Several:
            orders = jax.random.split(k, 5)
            step = lambda v, z: move(z, directions(self, c, [z], orders, v, _sizes(self))[0], steps)
            return c.loop(self.local_steps, step, (state.x, state.y, state.u))

        x, y, u = fed.mean(fed.map(local, key), name="x, y, u", around=(state.x, state.y, state.u))
        return State(fed.problem.project_upper(x), y, u)


@dataclass(frozen=True)
class FedBiOAcc(_FedBiO):
    """FedBiO with STORM on all three variables.

    FedBiOAcc solves bilevel problems whose lower level is shared by all clients.

    With α_t = δ/(u₀ + t)^{1/3}, where t = 1, 2, … counts all local steps, a step (Alg. 2) is
        y ← y − γα_t ω, x ← x − ηα_t ν, u ← u − τα_t q (line 4);
        ω ← ∇_y g⁺ + (1 − c_ω α_t²)(ω − ∇_y g), ν ← μ⁺ + (1 − c_ν α_t²)(ν − μ), q ← r⁺ + (1 − c_u α_t²)(q − r) (lines
        10–12),
    where ∇_y g, μ and r are the directions of `FedBiO`, and ⁺ marks the new point; both points use the same fresh
    minibatches.

    Each round takes I such steps. In the last one the server averages the variables (line 6) first. The clients then
    update their momenta, from their own old point to the averaged one, and the server averages these (line 14). In the
    first round each client starts from its own estimates on `first_batch` samples (line 2), and in later rounds from
    the server's momenta.

    Departures from the paper: as in `FedBiO`; c·α_t² is capped at 1, as the lemmas require.

    Exchanges per round: 2, the first for x, y and u, the second for ν, ω and q.

    Reference: Li, Huang and Huang 2023, Alg. 2.
    """

    linear_step: Step = 0.01  # τ
    shared_batch: bool = False  # one minibatch of each level per step instead of five
    first_batch: BatchSize = None  # b_1, of the first momenta; None: all the client's data
    delta: Positive = 3.0  # δ of α_t; by default α_t is about 1 at first and 1/4 after 2,000 steps
    offset: Positive = 30.0  # u₀ of α_t
    c_lower: Positive = 1.0  # c_ω
    c_upper: Positive = 1.0  # c_ν
    c_linear: Positive = 1.0  # c_u

    def init(self, fed: Fed, x: tree.Tree, y: tree.Tree, key: Array) -> State:
        """Start at u = 0, with momenta that the first round does not use."""
        z = (x, y, tree.zeros_like(y))
        return State(*z, momenta=tree.zeros_like(z), t=jnp.int32(0))

    def round(self, fed: Fed, state: State, key: Array) -> State:
        k1, k2 = jax.random.split(key)
        z, size = (state.x, state.y, state.u), _sizes(self)
        steps = self.upper_step, self.lower_step, self.linear_step
        forget = self.c_upper, self.c_lower, self.c_linear

        def local(c: Client, k: Array) -> tuple[Several, Several]:
            first, *orders = jax.random.split(k, 6)
            begin = lambda: directions(self, c, [z], jax.random.split(first, 5), 0, Sizes(*[self.first_batch] * 2))[0]
            momenta = _anew(c, state.t == 0, begin, state.momenta)  # line 2
            both = lambda points, v: directions(self, c, points, orders, v, size)
            return accelerated(self, c, both, z, momenta, steps, forget, state.t)

        reached = fed.map(local, k1)
        alpha = _alpha(self, state.t + self.local_steps)
        last = fed.map(lambda c, k, reached: move(reached[0], reached[1], steps, alpha), k2, reached)  # line 4
        x, y, u = fed.mean(last, name="x, y, u", around=z)  # line 6
        new = (fed.problem.project_upper(x), y, u)

        def correct(c: Client, k: Array, reached: tuple[Several, Several]) -> Several:
            old, momenta = reached
            return storms(directions(self, c, [new, old], jax.random.split(k, 5), 0, size), momenta, forget, alpha)

        momenta = fed.mean(fed.map(correct, k2, reached), name="ν, ω, q", around=state.momenta)  # lines 10–14
        return State(*new, momenta, state.t + self.local_steps)


@dataclass(frozen=True)
class FedBiOLocal(_FedBiO):
    """FedBiO for lower levels that differ by client; each client keeps its y.

    FedBiOLocal solves bilevel problems with `lower_scope="client"`: min over x of mean f_i(x, y_i*(x)), where
    y_i*(x) = argmin g_i(x, ·). Its gradient is the mean of the clients' own hypergradients.

    Each round takes I local steps (Alg. 3, lines 5–6), from the values before the step:
        y_i ← y_i − γ ∇_y g_i(x, y_i; B_y), x ← x − η Φ_i(x, y_i),
        Φ_i = ∇_x f_i − ∇²_xy g_i · τ Σ_{k=0}^{Q} Π_{j≤k} (I − τ∇²_y g_i(ξ_j)) ∇_y f_i, of (6).
    One ξ_f serves both parts of ∇f_i; all other minibatches are independent. The server then averages x (line 8).

    `Run.y` is empty, since y is never sent. A client remembers its y_i while it sits out.

    Departures from the paper: cohorts, weights, samples without replacement and the set of x, as in `FedBiO`.

    Exchanges per round: 1, of x (the paper's "we only communicate the lower level variable" is a slip).

    Reference: Li, Huang and Huang 2023, Alg. 3.
    """

    neumann_terms: AtLeastOne = 5  # Q
    hessian_step: Step = 0.1  # τ of the series, at most 1/ℓ of every ∇²_y g_i

    scope: ClassVar[str] = "client"

    def init(self, fed: Fed, x: tree.Tree, y: tree.Tree, key: Array) -> State:
        return State(x, ())

    def memory(self, x: tree.Tree, y: tree.Tree) -> tree.Tree:
        """A client's memory: y_i, at first the given y."""
        return y

    def round(self, fed: Fed, state: State, key: Array) -> State:
        steps = (self.upper_step, self.lower_step)

        def local(c: Client, k: Array, y: tree.Tree) -> tuple[tree.Tree, tree.Tree]:
            noise = jax.random.split(k)
            step = lambda v, z: move(z, local_directions(self, c, [z], noise, v, _sizes(self))[0], steps)
            return c.loop(self.local_steps, step, (state.x, y))

        return State(fed.problem.project_upper(fed.mean(fed.map_state(local, key), name="x", around=state.x)), ())


@dataclass(frozen=True)
class FedBiOAccLocal(_FedBiO):
    """FedBiOAcc for lower levels that differ by client; each client keeps its y and the momentum of y.

    FedBiOAccLocal solves bilevel problems with `lower_scope="client"`. It takes the steps of `FedBiOAcc` on x and y_i
    along ν and ω_i (Alg. 4), which estimate Φ_i of `FedBiOLocal` and ∇_y g_i.

    Each round takes I steps. In the last one the server averages x (line 6) before the momenta are updated, and then
    averages ν (line 14).

    `Run.y` is empty, as in `FedBiOLocal`. A client remembers y_i, ω_i and the number of steps they have seen. If the
    other clients have taken more steps (because this client is new or sat out), its ω_i belongs to an old x. The client
    then restarts from a plain estimate on `first_batch` samples at the x it receives, as all clients do in the first
    round (line 2). ν belongs to the server and is estimated in this way in the first round only.

    Departures from the paper: as in `FedBiOLocal`; c·α_t² is capped at 1, as the lemmas require.

    Exchanges per round: 2, the first for x, the second for ν.

    Reference: Li, Huang and Huang 2023, Alg. 4.
    """

    neumann_terms: AtLeastOne = 5  # Q
    hessian_step: Step = 0.1  # τ of the series, at most 1/ℓ of every ∇²_y g_i
    first_batch: BatchSize = None  # b_1, of the first momenta; None: all the client's data
    delta: Positive = 3.0  # δ of α_t; by default α_t is about 1 at first and 1/4 after 2,000 steps
    offset: Positive = 30.0  # u₀ of α_t
    c_lower: Positive = 1.0  # c_ω
    c_upper: Positive = 1.0  # c_ν

    scope: ClassVar[str] = "client"

    def init(self, fed: Fed, x: tree.Tree, y: tree.Tree, key: Array) -> State:
        """Start with a momentum that the first round does not use."""
        return State(x, (), momenta=tree.zeros_like(x), t=jnp.int32(0))

    def memory(self, x: tree.Tree, y: tree.Tree) -> tuple[tree.Tree, tree.Tree, Array]:
        """A client's memory: y_i, ω_i, and the number of steps after which they were computed."""
        return y, tree.zeros_like(y), jnp.int32(-1)

    def round(self, fed: Fed, state: State, key: Array) -> State:
        k1, k2 = jax.random.split(key)
        size, steps, forget = _sizes(self), (self.upper_step, self.lower_step), (self.c_upper, self.c_lower)

        def local(c: Client, k: Array, memory: Any) -> tuple[Any, Any]:
            y, omega, age = memory
            kx, ky, *noise = jax.random.split(k, 4)
            begin_x = lambda: local_hypergradients(self, c, [(state.x, y)], kx, self.first_batch)[0]
            begin_y = lambda: c.g_y(state.x, y, c.lower(ky, self.first_batch))
            momenta = _anew(c, state.t == 0, begin_x, state.momenta), _anew(c, age != state.t, begin_y, omega)
            both = lambda points, v: local_directions(self, c, points, noise, v, size)
            return accelerated(self, c, both, (state.x, y), momenta, steps, forget, state.t), memory

        reached = fed.map_state(local, k1)
        alpha = _alpha(self, state.t + self.local_steps)
        last = fed.map(lambda c, k, reached: move(reached[0], reached[1], steps, alpha)[0], k2, reached)  # line 4
        x = fed.problem.project_upper(fed.mean(last, name="x", around=state.x))  # line 6

        def correct(c: Client, k: Array, memory: Any, reached: tuple[Several, Several]) -> tuple[tree.Tree, Any]:
            old, momenta = reached
            y = move(old, momenta, steps, alpha)[1]
            both = local_directions(self, c, [(x, y), old], jax.random.split(k), 0, size)
            nu, omega = storms(both, momenta, forget, alpha)
            return nu, (y, omega, state.t + self.local_steps)

        nu = fed.mean(fed.map_state(correct, k2, reached), name="ν", around=state.momenta)  # lines 11–14
        return State(x, (), momenta=nu, t=state.t + self.local_steps)


def SOBA(
    upper_step: Any = 0.01, lower_step: Any = 0.01, linear_step: Any = None, batch_size: int | None = None
) -> FedBiO:
    """SOBA in its synchronous form: `FedBiO` with one local step and one minibatch of each level for all terms.

    Arguments:
        upper_step: ργ, on x.
        lower_step: ρ, on y.
        linear_step: on u (the paper's v); None: lower_step, as in the paper.
        batch_size: as in `FedBiO`.

    Reference: Dagréou, Ablin, Vaiter and Moreau, A Framework for Bilevel Optimization That Enables Stochastic and
    Global Variance Reduction Algorithms, NeurIPS 2022.
    """
    linear_step = lower_step if linear_step is None else linear_step
    return FedBiO(upper_step, lower_step, batch_size=batch_size, linear_step=linear_step, shared_batch=True)


def directions(
    h: FedBiO | FedBiOAcc, c: Client, points: list[Several], orders: Any, v: Any, size: Sizes
) -> list[Several]:
    """Return ∇_x f − ∇²_xy g u, ∇_y g and ∇²_y g u − ∇_y f at each point, on the v-th minibatches of five orders."""
    three: Any = points
    return [*single_loop.directions(c, three, orders, v, size.upper, size.lower, h.shared_batch)]


def local_directions(
    h: FedBiOLocal | FedBiOAccLocal, c: Client, points: list[Several], noise: Any, v: Any, size: Sizes
) -> list[Several]:
    """Return Φ_i and ∇_y g_i at each point (x, y_i), on the minibatches of the v-th step."""
    phi = local_hypergradients(h, c, points, jax.random.fold_in(noise[0], v), size.upper)
    batch = c.lower(noise[1], size.lower, v)
    return [(d, c.g_y(z[0], z[1], batch)) for d, z in zip(phi, points, strict=True)]


def local_hypergradients(
    h: FedBiOLocal | FedBiOAccLocal, c: Client, points: list[Several], key: Array, size: int | None
) -> list[tree.Tree]:
    """Return Φ_i of (6), a series of Q + 1 terms, at each point."""
    series: dict[str, Any] = {"method": "sum", "terms": h.neumann_terms, "step": h.hessian_step}
    return hypergradient.local_at(c, points, key, **series, upper_batch=size, lower_batch=size)


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
    """Take the first I − 1 steps after a synchronisation; both([new, old], v) gives the directions of the v-th step."""

    def step(v: Any, carry: tuple[Several, Several]) -> tuple[Several, Several]:
        (old, momenta), alpha = carry, _alpha(h, t + v + 1)
        new = move(old, momenta, steps, alpha)
        return new, storms(both([new, old], v), momenta, forget, alpha)

    return c.loop(h.local_steps - 1, step, (z, momenta))


def move(z: Several, along: Several, steps: tuple[Any, ...], alpha: Any = 1.0) -> Several:
    """Step with each variable's own step size, times α."""
    return tuple(tree.step(v, alpha * step, d) for v, step, d in zip(z, steps, along, strict=True))


def storms(both: list[Several], momenta: Several, forget: tuple[Any, ...], alpha: Any) -> Several:
    """Update each momentum with its own c·α²; `both` holds the directions at the new point and at the old one."""
    rates = [jnp.minimum(c * alpha**2, 1.0) for c in forget]
    new, old = both
    return tuple(storm(*args) for args in zip(new, momenta, old, rates, strict=True))


def _alpha(h: FedBiOAcc | FedBiOAccLocal, t: Any) -> Any:
    """α_t = δ/(u₀ + t)^{1/3}."""
    return h.delta / (h.offset + t) ** (1 / 3)


def _anew(c: Client, when: Bool[Array, ""], begin: Callable[[], tree.Tree], otherwise: tree.Tree) -> tree.Tree:
    """Return `begin()` if `when`, else `otherwise`. It is a loop of 0 or 1 turns: skipped work costs nothing."""
    return c.loop(when.astype(jnp.int32), lambda *_: begin(), otherwise, most=1)


def _sizes(h: _FedBiO) -> Sizes:
    default = lambda size: h.batch_size if size is None else size
    return Sizes(default(h.upper_batch), default(h.lower_batch))
