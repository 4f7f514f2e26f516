"""F2SA, F2SA-2 and V-PBGD: bilevel methods that replace the hypergradient by a penalty, with first derivatives only."""

from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array

from rookery.base import tree
from rookery.language.fed import AtLeastOne, BatchSize, Client, Data, Fed, Positive, Step, Steps
from rookery.parts import fields
from rookery.parts.fields import Several
from rookery.problems.problems import Bilevel


class State(NamedTuple):
    """The variables: x, y, and z, the second lower variable."""

    x: tree.Tree
    y: tree.Tree
    z: tree.Tree


@dataclass(frozen=True)
class _FirstOrder:
    """The hyperparameters of the family, and its round: a field over x, y and z."""

    upper_step: Step = 0.01  # α
    lower_step: Step = 0.1  # γ
    multiplier: Positive = 10.0  # λ
    local_steps: Steps = 1  # τ_i
    batch_size: BatchSize = None  # of both levels' minibatches; None: all the client's data
    control: fields.Control = "none"  # "anchor": local steps without drift, at twice the exchanges

    solves: ClassVar[tuple[type, ...]] = (Bilevel,)
    lower_variables: ClassVar[tuple[str, ...]] = ("y", "z")  # a server optimizer for the lower level steps both

    def init(self, fed: Fed, x: tree.Tree, y: tree.Tree, key: Array) -> State:
        """Start at z = y."""
        return State(x, y, y)

    def round(self, fed: Fed, state: State, key: Array) -> State:
        h: Any = self
        how = {"local_steps": h.local_steps, "batch_size": h.batch_size, "control": h.control}
        if h.lower_rounds is None:
            x, y, z = fields.descend(fed, h._field, tuple(state), key, steps=h._steps(), name="x, y, z", **how)
            return State(fed.problem.project_upper(x), y, z)
        lower, upper = jax.random.split(key)
        size, *sizes = h._steps()

        def below(t: Any, w: Several) -> Several:
            field = lambda c, w, f, g: h._field(c, (state.x, *w), f, g)[1:]
            return fields.descend(fed, field, w, jax.random.fold_in(lower, t), steps=(*sizes,), name="y, z", **how)

        y, z = fed.loop(h.lower_rounds, below, (state.y, state.z))
        field = lambda c, w, f, g: h._field(c, (*w, y, z), f, g)[:1]
        (x,) = fields.descend(fed, field, (state.x,), upper, steps=(size,), name="x", **how)
        return State(fed.problem.project_upper(x), y, z)


@dataclass(frozen=True)
class F2SA(_FirstOrder):
    """Descend on a penalty instead of the hypergradient: no Hessian- or Jacobian-vector products.

    F2SA solves bilevel problems. It replaces them by min over x of min_y [f(x, y) + λg(x, y)] − λ min_z g(x, z), whose
    gradient differs from the hypergradient by O(1/λ). y follows the minimiser of f + λg, and z that of g.

    A step moves all three variables from the values before the step,
        x ← x − α (∇_x f(x, y) + λ (∇_x g(x, y) − ∇_x g(x, z))),
        y ← y − γ (∇_y f(x, y)/λ + ∇_y g(x, y)),
        z ← z − γ' ∇_y g(x, z),
    with one minibatch of f and one of g. A round is τ_i such local steps and the mean of x, y and z. `Run.y` is y;
    `Run.state.z` is closer to y*(x).

    With `lower_rounds=T` a round follows the order of the paper's Alg. 1: T times the steps on y and z and their mean,
    then, at the new y and z, the steps on x and their mean. With `control="anchor"` every local direction is corrected
    by the cohort's mean direction at the server's point, so that several local steps have the same limit as one.

    Departures from the paper:
        unverified, since we had no access to the paper's algorithm box; the recursions are those of the public
        benchmark (benchopt/benchmark_bilevel), and the growth of λ below follows from the paper's rates;
        the federated form is ours, and so are `lower_rounds=None` and `control`. All variables move together because a
        client's own new y and z would bias the mean of x, even with one local step;
        y and z share the minibatches of g (the paper draws two): their noise, which λ multiplies in x's direction, then
        cancels; y's direction is divided by λ, so that steps of the same size suit y and z;
        λ is constant unless it is a schedule of the round. `multiplier=lambda k: 2 * (1 + k) ** (1 / 7)` grows like the
        paper's λ with noise at both levels; with the exponent 1/3 it grows like the paper's λ without noise. With a
        constant λ the method is F2BA (Chen, Ma and Zhang, Near-Optimal Nonconvex-Strongly-Convex Bilevel Optimization
        with Fully First-Order Oracles, JMLR 2025);
        x is projected onto the problem's set, if it has one, after the mean.

    Exchanges per round: 1, or T + 1 with `lower_rounds`; twice as many with `control="anchor"`.

    Example:
        >>> import rookery as rk
        >>> task = rk.tasks.quadratic(clients=4, seed=0)
        >>> method = rk.F2SA(upper_step=0.05, lower_step=0.1, auxiliary_step=0.1, multiplier=1000.0)
        >>> run = rk.solve(task.problem, task.clients, method, task.init, rounds=400, every=400, evaluate=task.evaluate)
        >>> bool(run.history["distance"].iloc[-1] < 1e-6)
        True

    Reference: Kwon, Kwon, Wright and Nowak, A Fully First-Order Method for Stochastic Bilevel Optimization, ICML 2023.
    """

    auxiliary_step: Step = 0.1  # γ', of z
    lower_rounds: AtLeastOne | None = None  # T; None: x, y and z move together

    def _steps(self) -> tuple[Any, Any, Any]:
        return self.upper_step, self.lower_step, self.auxiliary_step

    def _field(self, c: Client, w: Several, upper: Data, lower: Data) -> Several:
        x, y, z = w
        f_x, f_y = c.f_x_and_y(x, y, upper)
        (g_x, g_y), (z_x, z_y) = c.g_x_and_y(x, y, lower), c.g_x_and_y(x, z, lower)
        d_x = tree.add(f_x, tree.scale(self.multiplier, tree.sub(g_x, z_x)))
        return d_x, tree.add(tree.scale(1 / self.multiplier, f_y), g_y), z_y


@dataclass(frozen=True)
class F2SA2(_FirstOrder):
    """F2SA-2: F2SA with a central difference, whose bias falls with the square of 1/λ.

    F2SA2 solves bilevel problems. With ν = 1/λ and ℓ_ν(x) = min_y [g + νf], the hypergradient is the derivative of
    ∇ℓ_ν at ν = 0. `F2SA` is its forward difference, F2SA2 its central difference, at the price of one more gradient of
    f:
        x ← x − α (½ (∇_x f(x, y) + ∇_x f(x, z)) + (λ/2) (∇_x g(x, y) − ∇_x g(x, z))),
        y ← y − γ (∇_y g(x, y) + ∇_y f(x, y)/λ),
        z ← z − γ (∇_y g(x, z) − ∇_y f(x, z)/λ).
    Rounds, `lower_rounds` and `control` are those of `F2SA`. g − f/λ must be strongly convex in y, which it is for λ
    above ℓ_f/μ_g. The mean of `Run.y` and `Run.state.z` is closer to y*(x) than either.

    Departures from the paper: unverified, since we had no access to the paper's algorithm box; the steps are those of
    the authors' code, without the normalisation of x's direction that it has as an option. The federated form and the
    minibatches are as in `F2SA`; orders p above 2 are not offered.

    Exchanges per round: 1, or T + 1 with `lower_rounds`; twice as many with `control="anchor"`.

    Reference: Chen, Li, Chayti and Zhang, Faster Gradient Methods for Highly-Smooth Stochastic Bilevel Optimization,
    ICLR 2026.
    """

    lower_rounds: AtLeastOne | None = None  # T; None: x, y and z move together

    def _steps(self) -> tuple[Any, Any, Any]:
        return self.upper_step, self.lower_step, self.lower_step

    def _field(self, c: Client, w: Several, upper: Data, lower: Data) -> Several:
        x, y, z = w
        (f_x, f_y), (g_x, g_y) = c.f_x_and_y(x, y, upper), c.g_x_and_y(x, y, lower)
        (f_x_z, f_y_z), (g_x_z, g_y_z) = c.f_x_and_y(x, z, upper), c.g_x_and_y(x, z, lower)
        total = tree.add(tree.add(f_x, f_x_z), tree.scale(self.multiplier, tree.sub(g_x, g_x_z)))
        above, below = tree.scale(1 / self.multiplier, f_y), tree.scale(1 / self.multiplier, f_y_z)
        return tree.scale(0.5, total), tree.add(g_y, above), tree.sub(g_y_z, below)


@dataclass(frozen=True)
class VPBGD(_FirstOrder):
    """V-PBGD: descend on f + γ(g − min_y g) in x and y together.

    VPBGD solves bilevel problems. Its lower level need not be strongly convex in y; a Polyak–Łojasiewicz inequality is
    enough. z (the paper's ω) follows a minimiser of g(x, ·). With the penalty γ, a step is
        x ← x − α (∇_x f(x, y) + γ (∇_x g(x, y) − ∇_x g(x, z))) / max(γ, 1),
        y ← y − α_y (∇_y f(x, y) + γ ∇_y g(x, y)) / max(γ, 1),
        z ← z − β ∇_y g(x, z),
    all from the values before the step. A round is τ_i such local steps and the mean of x, y and z. The limit is that
    of `F2SA` with λ = γ, but the path differs. `control` is as in `F2SA`.

    Departures from the paper: unverified, since we had no access to the paper's algorithm box; the steps are those of
    the authors' code, which takes them along min(1/γ, 1)·∇F_γ and has its own step for each variable. The federated
    form is ours. z takes one step at a time (T = 1) and, like y, uses the minibatch of g of the step. The authors'
    γ grows linearly from 0; here it must be positive, e.g. `multiplier=lambda k: 0.1 + 0.01 * k`.

    Exchanges per round: 1, or 2 with `control="anchor"`.

    Reference: Shen and Chen, On Penalty-based Bilevel Gradient Descent Method, ICML 2023.
    """

    upper_step: Step = 0.05  # α
    lower_step: Step = 0.05  # α_y
    auxiliary_step: Step = 0.1  # β, of z
    multiplier: Positive = 10.0  # γ

    lower_rounds: ClassVar[None] = None

    def _steps(self) -> tuple[Any, Any, Any]:
        return self.upper_step, self.lower_step, self.auxiliary_step

    def _field(self, c: Client, w: Several, upper: Data, lower: Data) -> Several:
        x, y, z = w
        f_x, f_y = c.f_x_and_y(x, y, upper)
        (g_x, g_y), (g_x_z, g_y_z) = c.g_x_and_y(x, y, lower), c.g_x_and_y(x, z, lower)
        scale = jnp.maximum(self.multiplier, 1)
        d_x = tree.add(f_x, tree.scale(self.multiplier, tree.sub(g_x, g_x_z)))
        d_y = tree.add(f_y, tree.scale(self.multiplier, g_y))
        return tree.scale(1 / scale, d_x), tree.scale(1 / scale, d_y), g_y_z
