"""MEHA (Liu et al., ICML 2024): bilevel problems whose lower level may be nonconvex, by its Moreau envelope."""

from dataclasses import dataclass
from typing import ClassVar, NamedTuple

from jaxtyping import Array

from rookery.base import tree
from rookery.language.fed import BatchSize, Client, Data, Fed, Positive, Step, Steps
from rookery.parts import fields
from rookery.parts.fields import Several
from rookery.problems.problems import Bilevel


class State(NamedTuple):
    """The variables: x, y, and z, the paper's θ, near the minimiser of g(x, ·) + ‖· − y‖²/(2γ)."""

    x: tree.Tree
    y: tree.Tree
    z: tree.Tree


@dataclass(frozen=True)
class MEHA:
    """MEHA: a penalty on g(x, y) minus its Moreau envelope, for lower levels that need not be convex.

    MEHA solves bilevel problems. The envelope v(x, y) = min_z [g(x, z) + ‖z − y‖²/(2γ)] is smooth even if g is only
    weakly convex in y, as long as 1/γ is larger than the modulus of weak convexity. If g is convex, g(x, y) ≤ v(x, y)
    says that y solves the lower level, otherwise that it is stationary. A step with the penalty c is
        z ← z − η (∇_y g(x, z) + (z − y)/γ),
        x ← x − α (∇_x f(x, y)/c + ∇_x g(x, y) − ∇_x g(x, z)),
        y ← y − β (∇_y f(x, y)/c + ∇_y g(x, y) − (y − z)/γ),
    all from the values before the step, with one minibatch of f and one of g. A round is τ_i such local steps and the
    mean of x, y and z. The limit is off by O(1/c); a small γ weakens the constraint.

    With `control="anchor"` every local direction is corrected by the cohort's mean direction at the server's point, so
    that several local steps have the same limit as one.

    Departures from the paper:
        unverified, since we had no access to the paper's algorithm box; the formulas are those of a public
        implementation (BOAT), which steps on y before x;
        the federated form and `control` are ours. The updates are simultaneous, because a client's own new z would bias
        the mean of x, even with one local step. With one client the limit is the same in every order;
        c is constant unless it is a schedule of the round. The paper's is c̲(k + 1)^p with 0 ≤ p < ½, for example
        `multiplier=lambda k: 2 * (1 + k) ** 0.25`;
        a nonsmooth part of g is not offered. x is projected onto the problem's set, if it has one, after the mean.

    Exchanges per round: 1, or 2 with `control="anchor"`.

    Example:
        >>> import rookery as rk
        >>> task = rk.tasks.quadratic(clients=4, seed=0)
        >>> method = rk.MEHA(multiplier=lambda k: 2 * (1 + k) ** 0.4)
        >>> run = rk.solve(task.problem, task.clients, method, task.init, rounds=800, every=800, evaluate=task.evaluate)
        >>> bool(run.history["distance"].iloc[-1] < 1e-3)
        True

    Reference: Liu, Liu, Yao, Zeng and Zhang, Moreau Envelope for Nonconvex Bi-Level Optimization: A Single-Loop and
    Hessian-Free Solution Strategy, ICML 2024.
    """

    upper_step: Step = 0.05  # α
    lower_step: Step = 0.1  # β
    auxiliary_step: Step = 0.1  # η, of z
    multiplier: Positive = 10.0  # c_k
    smoothing: Positive = 1.0  # 1/γ
    local_steps: Steps = 1  # τ_i
    batch_size: BatchSize = None  # of both levels' minibatches; None: all the client's data
    control: fields.Control = "none"  # "anchor": local steps without drift, in two exchanges

    solves: ClassVar[tuple[type, ...]] = (Bilevel,)
    lower_variables: ClassVar[tuple[str, ...]] = ("y", "z")  # a server optimizer for the lower level steps both

    def init(self, fed: Fed, x: tree.Tree, y: tree.Tree, key: Array) -> State:
        """Start at z = y."""
        return State(x, y, y)

    def round(self, fed: Fed, state: State, key: Array) -> State:
        x, y, z = fields.descend(
            fed, self._field, tuple(state), key, steps=(self.upper_step, self.lower_step, self.auxiliary_step),
            local_steps=self.local_steps, batch_size=self.batch_size, control=self.control, name="x, y, z",
        )  # fmt: skip
        return State(fed.problem.project_upper(x), y, z)

    def _field(self, c: Client, w: Several, upper: Data, lower: Data) -> Several:
        x, y, z = w
        f_x, f_y = c.f_x_and_y(x, y, upper)
        (g_x, g_y), (g_x_z, g_y_z) = c.g_x_and_y(x, y, lower), c.g_x_and_y(x, z, lower)
        pull = tree.scale(self.smoothing, tree.sub(y, z))
        d_x = tree.add(tree.scale(1 / self.multiplier, f_x), tree.sub(g_x, g_x_z))
        d_y = tree.add(tree.scale(1 / self.multiplier, f_y), tree.sub(g_y, pull))
        return d_x, d_y, tree.sub(g_y_z, pull)
