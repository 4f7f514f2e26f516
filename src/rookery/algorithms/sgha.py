"""SGHA (Gu, Wu and Yang 2026): a single loop of first-order steps on the Lagrangian of the lower level's optimality."""

from dataclasses import dataclass
from typing import ClassVar, NamedTuple

from jaxtyping import Array

from rookery.base import tree
from rookery.language.fed import Amount, BatchSize, Client, Data, Fed, Positive, Share, Step, Steps
from rookery.parts import fields, projection
from rookery.parts.fields import Several
from rookery.parts.momentum import moving_average
from rookery.problems.problems import Bilevel


class State(NamedTuple):
    """The variables, the multiplier λ ≈ −[∇²_y g]⁻¹∇_y f, and the smoothed x̂ and ŷ."""

    x: tree.Tree
    y: tree.Tree
    dual: tree.Tree
    smooth: tuple[tree.Tree, tree.Tree]


@dataclass(frozen=True)
class SGHA:
    """SGHA: descent on x and y and ascent on a multiplier, with products replaced by differences of gradients.

    SGHA solves bilevel problems. Its Lagrangian is f(x, y) + ⟨λ, ∇_y g(x, y)⟩, whose derivatives are differences of
    gradients, H_x = [∇_x g(x, y + δλ) − ∇_x g(x, y − δλ)]/(2δ) ≈ ∇²_xy g·λ and H_y ≈ ∇²_y g·λ. A step (Alg. 1 and 2) is
        x ← x − γ_x (∇_x f + H_x + p_w (x − x̂)),
        y ← y − γ_y (∇_y f + H_y + p_w (y − ŷ)),
        λ ← λ − γ_λ (p_λ λ − ∇_y g(x, y)),
    all from the values before the step, with one minibatch of f and one of g. A round is τ_i such local steps and the
    mean of x, y and λ. The server then projects λ onto a ball, and moves x̂ ← x̂ + β(x − x̂), and ŷ likewise. The limit is
    off by O(p_λ).

    Departures from the paper: the federated form is ours (with one client and one local step it is the paper's
    algorithm); so is `control`, whose "anchor" corrects every local direction by the cohort's mean direction at the
    server's point, so that several local steps have the same limit as one. λ starts at 0, x̂ at x and ŷ at y, which the
    paper leaves open. The defaults are ours, since steps with the theory's constants are too small in practice.
    `difference=None`, with exact products in place of the differences, is ours, too. x is projected onto the problem's
    set, if it has one, after the mean.

    Exchanges per round: 1, or 2 with `control="anchor"`.

    Arguments: see the fields, each with the paper's symbol. `difference` is the paper's τ, called δ here. The rounding
    error of a difference is that of a gradient divided by δ: use values below .001 only in double precision.

    Example:
        >>> import rookery as rk
        >>> task = rk.tasks.quadratic(clients=4, seed=0)
        >>> method = rk.SGHA(upper_step=0.05, lower_step=0.05, linear_step=0.1)
        >>> run = rk.solve(task.problem, task.clients, method, task.init, rounds=800, every=800, evaluate=task.evaluate)
        >>> bool(run.history["distance"].iloc[-1] < 1e-4)
        True

    Reference: Gu, Wu and Yang, SGHA: A Single-Loop Fully First-Order Algorithm for Nonconvex–Strongly-Convex Bilevel
    Optimization, 2026, Alg. 1–2.
    """

    upper_step: Step = 0.01  # γ_x
    lower_step: Step = 0.01  # γ_y
    linear_step: Step = 0.05  # γ_λ
    smoothing: Amount = 1.0  # p_w
    smoothing_rate: Share = 0.1  # β
    dual_regularization: Amount = 0.001  # p_λ
    difference: Positive | None = 0.01  # τ; None: exact products
    radius: Positive | None = None  # C_λ of the ball of λ; None: the whole space
    local_steps: Steps = 1  # τ_i
    batch_size: BatchSize = None  # of both levels' minibatches; None: all the client's data
    control: fields.Control = "none"  # "anchor": local steps without drift, in two exchanges

    solves: ClassVar[tuple[type, ...]] = (Bilevel,)

    def init(self, fed: Fed, x: tree.Tree, y: tree.Tree, key: Array) -> State:
        """Start at λ = 0, x̂ = x and ŷ = y."""
        return State(x, y, tree.zeros_like(y), (x, y))

    def round(self, fed: Fed, state: State, key: Array) -> State:
        field = lambda c, w, upper, lower: self._directions(c, w, state.smooth, upper, lower)
        x, y, dual = fields.descend(
            fed, field, state[:3], key, steps=(self.upper_step, self.lower_step, self.linear_step),
            local_steps=self.local_steps, batch_size=self.batch_size, control=self.control, name="x, y, λ",
        )  # fmt: skip
        x = fed.problem.project_upper(x)
        dual = dual if self.radius is None else projection.ball(dual, self.radius)
        return State(x, y, dual, moving_average(state.smooth, (x, y), self.smoothing_rate))

    def _directions(self, c: Client, w: Several, smooth: Several, upper: Data, lower: Data) -> Several:
        x, y, dual = w
        d_x, d_y, g_y = self._lagrangian(c, x, y, dual, upper, lower)
        x_hat, y_hat = smooth
        d_x = tree.add(d_x, tree.scale(self.smoothing, tree.sub(x, x_hat)))
        d_y = tree.add(d_y, tree.scale(self.smoothing, tree.sub(y, y_hat)))
        return d_x, d_y, tree.sub(tree.scale(self.dual_regularization, dual), g_y)

    def _lagrangian(
        self, c: Client, x: tree.Tree, y: tree.Tree, dual: tree.Tree, upper: Data, lower: Data
    ) -> tuple[tree.Tree, tree.Tree, tree.Tree]:
        """Return ∇_x f + H_x, ∇_y f + H_y and ∇_y g."""
        if self.difference is None:
            d_x, g_y, minus_d_y = c.f_and_g(x, y, tree.scale(-1, dual), upper, lower)
            return d_x, tree.scale(-1, minus_d_y), g_y
        plus = c.g_x_and_y(x, tree.step(y, -self.difference, dual), lower)
        minus = c.g_x_and_y(x, tree.step(y, self.difference, dual), lower)
        products = tree.scale(0.5 / self.difference, tree.sub(plus, minus))
        return *tree.add(c.f_x_and_y(x, y, upper), products), c.g_y(x, y, lower)
