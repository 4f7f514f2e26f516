"""Saddle points by simultaneous local descent on x and ascent on y: FedAvg-S, SCAFFOLD-S, and their relatives."""

from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import jax
from jaxtyping import Array

from rookery.base import draws, tree
from rookery.language.fed import BatchSize, Client, Fed, Share, Step, Steps
from rookery.parts import fields
from rookery.parts.fields import Several, move
from rookery.parts.momentum import moving_average
from rookery.problems.problems import Minimax


class State(NamedTuple):
    """The two variables; for SCAFFOLD the server's control variates of both, and with momentum the directions."""

    x: tree.Tree
    y: tree.Tree
    control: Any = None
    momentum: Any = None


def _directions(c: Client, z: tuple[tree.Tree, tree.Tree], batch: Any) -> tuple[tree.Tree, tree.Tree]:
    """Return ∇_x f and −∇_y f at z = (x, y), the gradients of the two players' losses."""
    f_x, f_y = c.f_x_and_y(*z, batch)
    return f_x, tree.scale(-1.0, f_y)


@dataclass(frozen=True)
class _Saddle:
    """The hyperparameters of all methods."""

    upper_step: Step = 0.01  # α
    lower_step: Step = 0.01  # β
    local_steps: Steps = 1  # τ_i
    batch_size: BatchSize = None  # of ξ; None: all the client's data

    solves: ClassVar[tuple[type, ...]] = (Minimax,)


@dataclass(frozen=True)
class _LocalSteps(_Saddle):
    """The round of local steps along (∇_x f_i, −∇_y f_i), then the mean."""

    control: fields.Control = "none"  # "anchor": local steps without drift, in two exchanges

    extra: ClassVar[bool] = False  # whether the steps are extragradient steps

    def init(self, fed: Fed, x: tree.Tree, y: tree.Tree, key: Array) -> State:
        return State(x, y)

    def round(self, fed: Fed, state: State, key: Array) -> State:
        field = lambda c, w, batch, _: _directions(c, w, batch)
        x, y = fields.descend(
            fed, field, state[:2], key, steps=(self.upper_step, self.lower_step), local_steps=self.local_steps,
            batch_size=self.batch_size, control=self.control, name="x, y", extra=self.extra,
        )  # fmt: skip
        return State(fed.problem.project_upper(x), y)


@dataclass(frozen=True)
class FedAvgSaddle(_LocalSteps):
    """FedAvg-S: local steps on both variables simultaneously, then the mean. With one client it is SGDA.

    FedAvg-S solves minimax problems. A local step is x ← x − α ∇_x f_i and y ← y − β (−∇_y f_i), both from the values
    before the step. With several local steps and unlike clients the limit is not the saddle point; `control="anchor"`
    corrects that, see `FedGDAGT`.

    Departures from the paper: none; `control="anchor"` is another paper's.

    Exchanges per round: 1, or 2 with `control="anchor"`.

    Reference: Hou, Thekumparampil, Fanti and Oh, Efficient Algorithms for Federated Saddle Point Optimization, 2021.
    """


@dataclass(frozen=True)
class FedGDAGT(_LocalSteps):
    """FedGDA-GT: FedAvg-S with gradient tracking, which is exact for any number of local steps.

    FedGDA-GT solves minimax problems. Write G_i(w) = (∇_x f_i, −∇_y f_i) at w = (x, y). The clients first send G_i(w),
    and the server averages them to h. Each client then takes τ_i steps w_i ← w_i − S·(G_i(w_i) − G_i(w) + h) from w,
    with S the two step sizes, and the server averages the w_i. With full batches and full participation the limit is
    the saddle point. The method is `FedAvgSaddle(control="anchor")`, and SCAFFOLD-S without memory.

    Departures from the paper: unverified, since we had no access to the paper's algorithm box; the steps are those of
    public code that compares methods. x and y have a step size each; cohorts, client weights and minibatches are
    allowed (the paper takes full gradients of all clients). Only x is projected.

    Exchanges per round: 2, of the directions and of the variables.

    Example:
        >>> import jax.numpy as jnp
        >>> import rookery as rk
        >>> game = rk.Minimax(lambda x, y, b: jnp.mean((x - b["u"]) ** 2 - (y - b["v"]) ** 2) + x * y)
        >>> hospitals = [{"u": jnp.array([1.0, 2.0]), "v": jnp.array([0.0, 1.0])}, {"u": jnp.ones(3), "v": jnp.ones(3)}]
        >>> method = rk.FedGDAGT(upper_step=0.05, lower_step=0.05, local_steps=5)
        >>> run = rk.solve(game, rk.Clients(upper=hospitals), method, (jnp.array(0.0), jnp.array(0.0)), rounds=100)
        >>> print(f"{run.x:.3f} {run.y:.3f}")
        0.700 1.100

    Reference: Sun and Wei, A Communication-efficient Algorithm with Linear Convergence for Federated Minimax Learning,
    NeurIPS 2022.
    """

    control: fields.Control = "anchor"  # the method; "none": FedAvgSaddle


@dataclass(frozen=True)
class LocalExtragradient(_LocalSteps):
    """Local extragradient: each local step looks ahead before it moves, so that it does not circle a saddle point.

    The method solves minimax problems. With G_i(w) = (∇_x f_i, −∇_y f_i) at w = (x, y), a local step is
        w' = w_i − S·G_i(w_i; ξ),
        w_i ← w_i − S·G_i(w'; ξ'),
    and the server averages the w_i. On f = xy, the steps of `FedAvgSaddle` spiral outwards, whereas these steps, of
    size γ < 1, multiply the distance by √(1 − γ² + γ⁴).

    With unlike clients the limit is off even for one local step, because each client looks ahead by itself.
    `control="anchor"` corrects both lines with h = mean G_i(w), as in `FedGDAGT`; the limit is then the saddle point.

    Departures from the paper: unverified, since we had no access to the paper's algorithm box; the steps are those of
    two public scripts, which agree. Both lines have the same step sizes S, one for x and one for y; x is projected
    only after the mean; `control="anchor"` is ours. A local step takes two minibatches, so `rk.Epochs(1)` makes two
    passes over the data.

    Exchanges per round: 1, or 2 with `control="anchor"`.

    Reference: Beznosikov, Samokhin and Gasnikov, Distributed Saddle-Point Problems: Lower Bounds, Near-Optimal and
    Robust Algorithms, 2020 (Extra Step Local SGD).
    """

    extra: ClassVar[bool] = True


@dataclass(frozen=True)
class ScaffoldSaddle(_Saddle):
    """SCAFFOLD-S: FedAvg-S with control variates on the clients (c_i) and the server (c). With one client it is SGDA.

    SCAFFOLD-S solves minimax problems. A local step is z ← z − step·(d_i(z) − c_i + c) with d_i = (∇_x f_i, −∇_y f_i).
    Then c_i⁺ = c_i − c + (z − z_i)/(τ_i·step), SCAFFOLD's option II, and c ← c + Σ_S p_i (c_i⁺ − c_i), which keeps
    c = Σ p_i c_i (with equal weights, SCAFFOLD's c + (1/n) Σ_S).

    Departures from the paper: client weights; a server step of 1.

    Exchanges per round: 1, which carries the variables and the change of the control variates.

    Reference: Hou et al. 2021, with Karimireddy et al., SCAFFOLD, ICML 2020.
    """

    def init(self, fed: Fed, x: tree.Tree, y: tree.Tree, key: Array) -> State:
        """Start at c = 0."""
        return State(x, y, tree.zeros_like((x, y)))

    def memory(self, x: tree.Tree, y: tree.Tree) -> tuple[tree.Tree, tree.Tree]:
        """A client's memory: c_i, at first 0."""
        return tree.zeros_like((x, y))

    def round(self, fed: Fed, state: State, key: Array) -> State:
        z = (state.x, state.y)

        def local(c: Client, k: Array, c_i: Any) -> tuple[Any, Any]:
            count, order = jax.random.split(k)
            steps = c.steps(self.local_steps, count, self.batch_size, "upper")
            correction = tree.sub(state.control, c_i)

            def step(v: Any, z: tuple[tree.Tree, tree.Tree]) -> tuple[tree.Tree, tree.Tree]:
                d_x, d_y = tree.add(_directions(c, z, c.upper(order, self.batch_size, v)), correction)
                return tree.step(z[0], self.upper_step, d_x), tree.step(z[1], self.lower_step, d_y)

            last = c.loop(steps, step, z)
            moved = tree.sub(z, last)
            sizes = self.upper_step, self.lower_step
            progress = tuple(tree.scale(1 / (steps * size), d) for size, d in zip(sizes, moved, strict=True))
            change = tree.sub(progress, state.control)  # c_i⁺ − c_i
            return (last, change), tree.add(c_i, change)

        replies = fed.map_state(local, key)
        ((x, y), change), heard = fed.mean(replies, name="x, y, c", around=(z, None), heard=True)
        control = tree.add(state.control, tree.scale(heard.weight, change))  # c + Σ_S p_i (c_i⁺ − c_i)
        return State(fed.problem.project_upper(x), y, control)


@dataclass(frozen=True)
class ProxSkipGDA:
    """ProxSkip-GDA-FL: gradient descent ascent that averages after a random number of local steps.

    The method solves minimax problems. Each client remembers h_i, an estimate of G_i = (∇_x f_i, −∇_y f_i) at the
    solution. It steps w_i ← w_i − S·(G_i(w_i) − h_i), and after each step a coin, the same for all clients, shows heads
    with probability p. At heads the server averages, w ← mean w_i, and each client sets h_i ← h_i + p S⁻¹(w − w_i).
    A round lasts from heads to heads: the server draws the number of steps, 1/p on average. The weighted mean of the
    h_i stays 0, also if replies are lost, but not with clipping or noise. With full batches the limit is the saddle
    point, and h_i = G_i there.

    In theory, with steps of 1/L and p = √(step·μ), where μ is the strong convexity and concavity, the number of
    exchanges grows like the square root of the condition number L/μ.

    Departures from the paper: unverified, since we had no access to the paper's algorithm box; the steps are those of
    the authors' code. A round takes at most 20/p steps, which cuts short fewer than one round in 10⁸. x and y have a
    step size each; client weights and minibatches are allowed; x is projected onto the problem's set, if it has one,
    after the mean.

    Exchanges per round: 1, after 1/p steps on average. All clients take part. The mean is sent to them immediately, for
    h_i, and again at the start of the next round. Privacy for each record is refused, because the number of steps has
    no bound before the run.

    Reference: Zhang, Choudhury, Stich and Loizou, Communication-Efficient Gradient
    Descent-Accent Methods for Distributed Variational Inequalities: Unified Analysis and Local Updates, 2023.
    """

    upper_step: Step = 0.01  # γ, of x
    lower_step: Step = 0.01  # γ, of y
    chance: Share = 0.1  # p
    batch_size: BatchSize = None  # of ξ; None: all the client's data

    solves: ClassVar[tuple[type, ...]] = (Minimax,)
    needs: ClassVar[tuple[str, ...]] = ("all clients",)

    def init(self, fed: Fed, x: tree.Tree, y: tree.Tree, key: Array) -> State:
        return State(x, y)

    def memory(self, x: tree.Tree, y: tree.Tree) -> Several:
        """A client's memory: h_i, at first 0."""
        return tree.zeros_like((x, y))

    def round(self, fed: Fed, state: State, key: Array) -> State:
        k1, k2, k3 = jax.random.split(key, 3)
        z, sizes = (state.x, state.y), (self.upper_step, self.lower_step)
        count = draws.tosses(k1, self.chance, 20 / self.chance)

        def local(c: Client, k: Array, h_i: Several) -> tuple[Several, Several]:
            corrected = lambda w, batch: tree.sub(_directions(c, w, batch), h_i)
            return c.loop(count, lambda v, w: move(w, corrected(w, c.upper(k, self.batch_size, v)), sizes), z), h_i

        last = fed.map_state(local, k2)
        mean = fed.mean(last, name="x, y", around=z)

        def correct(c: Client, k: Array, h_i: Several, last: Several) -> tuple[tuple[()], Several]:
            apart = tree.sub(mean, last)
            return (), tuple(tree.step(h, -self.chance / s, d) for h, s, d in zip(h_i, sizes, apart, strict=True))

        fed.map_state(correct, k3, last)
        return State(fed.problem.project_upper(mean[0]), mean[1])


@dataclass(frozen=True)
class MomentumLocalSGDA(_Saddle):
    """Momentum Local SGDA: local steps along running averages of both players' directions.

    The method solves minimax problems. With G_i(w) = (∇_x f_i, −∇_y f_i) at w = (x, y), a local step is
        w_i ← w_i − S·d_i, then at the new point d_i ← (1 − β) d_i + β G_i(w_i; ξ),
    and after τ_i steps the server averages w_i and d_i. d starts as mean G_i. With one local step the limit is the
    saddle point; with more, and unlike clients, it is not.

    Departures from the paper: unverified, since we had no access to the paper's algorithm box, and the steps are from
    memory. The paper's α, which scales the steps and the momentum alike, is part of `upper_step`, `lower_step` and
    `momentum`. x is projected onto the problem's set, if it has one, after the mean.

    Exchanges per round: 1, of x, y and d; and 1 at the start, of d.

    Reference: Sharma, Panda, Joshi and Varshney, Federated Minimax Optimization: Improved Convergence Analyses and
    Algorithms, ICML 2022.
    """

    momentum: Share = 0.5  # β (the paper's βα), the weight of the new direction

    def init(self, fed: Fed, x: tree.Tree, y: tree.Tree, key: Array) -> State:
        """Start at d = mean G_i."""
        start = lambda c, k: _directions(c, (x, y), c.upper(k, self.batch_size))
        return State(x, y, momentum=fed.mean(fed.map(start, key), name="d"))

    def round(self, fed: Fed, state: State, key: Array) -> State:
        start = (state.x, state.y), state.momentum

        def local(c: Client, k: Array) -> tuple[Several, Several]:
            count, order = jax.random.split(k)

            def step(v: Any, both: tuple[Several, Several]) -> tuple[Several, Several]:
                w, d = move(*both, (self.upper_step, self.lower_step)), both[1]
                return w, moving_average(d, _directions(c, w, c.upper(order, self.batch_size, v)), self.momentum)

            return c.loop(c.steps(self.local_steps, count, self.batch_size, "upper"), step, start)

        (x, y), d = fed.mean(fed.map(local, key), name="x, y, d", around=start)
        return State(fed.problem.project_upper(x), y, momentum=d)
