"""ASFBO and LA-ASFBO, and the methods they extend, SimFBO and ShroFBO (Yang, Xiao and Ji, NeurIPS 2023)."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from rookery.base import tree
from rookery.data.source import Count
from rookery.language.fed import BatchSize, Bookkeeping, Bounds, Client, Decay, Fed, Positive, Share, Step, Steps
from rookery.parts import projection
from rookery.parts.local import most_steps
from rookery.parts.single_loop import Three, directions
from rookery.parts.storm import storm
from rookery.problems.problems import Bilevel

Scalar = Float[Array, ""]
Norms = tuple[Scalar, Scalar, Scalar]


class State(NamedTuple):
    """The variables, z ≈ [∇²_y g]⁻¹∇_y f among them; and the running norms s_x, s_y, s_z of the adaptive server."""

    x: tree.Tree
    y: tree.Tree
    z: tree.Tree
    s: Norms


@dataclass(frozen=True)
class _SingleLoop:
    """What the family shares: the hyperparameters, and Alg. 1 with its three switches, which the methods set.

    direction: what a client steps along: its "gradient", a "momentum" of them (20), or "storm" (21).
    aggregation: "sum" of what the clients have gathered (23), or "reweighted" by their numbers of steps (26).
    server: "fixed" steps, or "adaptive" ones (27)–(28).
    """

    upper_step: Step = 0.01  # η_x
    lower_step: Step = 0.03  # η_y
    linear_step: Step = 0.02  # η_z
    server_upper_step: Step = 0.03  # γ_x
    server_lower_step: Step = 0.03  # γ_y
    server_linear_step: Step = 0.05  # γ_z
    radius: Positive | None = None  # r of the ball that the server keeps z in; None: all of the space
    local_steps: Steps = (5, 15)  # τ_i
    batch_size: BatchSize = None  # of ξ and ζ; None: all the client's data
    shared_batch: bool = True  # one minibatch of each level a step, in the place of five

    solves: ClassVar[tuple[type, ...]] = (Bilevel,)

    def init(self, fed: Fed, x: tree.Tree, y: tree.Tree, key: Array) -> State:
        """The start: z = 0, s = 0 (line 1)."""
        z = tree.zeros_like(y)
        s_x, s_y, s_z = (jnp.zeros_like(tree.norm(v)) for v in (x, y, z))
        return State(x, y, z, (s_x, s_y, s_z))

    def round(self, fed: Fed, state: State, key: Array) -> State:
        """Alg. 1, lines 3–16."""
        h: Any = self  # its subclasses': the switches and what they need

        def reply(c: Client, k: Array) -> tuple[Three, Scalar]:
            q, steps = local(h, c, state, k)
            norm = jnp.asarray(steps, state.s[0].dtype)  # ‖a_i‖₁ = τ_i (Lemma 1)
            return (tree.scale(1 / norm, q) if h.aggregation == "reweighted" else q), norm

        tau = Bookkeeping("τ", most=most_steps(h.local_steps))
        d, rho = fed.sum(fed.map(reply, key), name="q_x, q_y, q_z", bookkeeping=(None, tau))  # ρ^t of (25)
        if h.aggregation == "sum":
            d = tree.scale(1 / rho, d)  # (24): the weights are p_i τ_i/ρ^t
        gammas, s = server_steps(h, state.s, d)  # (27), (28)
        x, y, z = move(state[:3], [rho * gamma for gamma in gammas], d)  # (29)
        z = z if h.radius is None else projection.ball(z, h.radius)  # (30)
        return State(fed.problem.project_upper(x), y, z, s)


@dataclass(frozen=True)
class ASFBO(_SingleLoop):
    """Adaptive single-loop federated bilevel optimization: all three variables at once, one exchange a round.

    Solves bilevel problems. Beside x and y there is z, which solves ∇²_y g z = ∇_y f, i.e. minimises
    R = ½ zᵀ∇²_y g z − zᵀ∇_y f. The three directions are ∇_x f − ∇²_xy g z, ∇_y g and ∇_z R = ∇²_y g z − ∇_y f.

    Round (Alg. 1): the cohort starts from the server's x, y, z (15). Each client takes τ_i steps on all three at once
    (19) along momenta u, v, w that start at the first directions (16) and then follow (20), and sends their sums
    q_i (22). The server forms h = Σ p̃_i q_i/τ_i with p̃_i = (n/P) p_i (26), keeps s ← ϱs + (1 − ϱ)‖h‖ for each variable
    (27) and steps by ρ^t·clip(γ/(s + ρ), bounds)·h (28)–(29), where ρ^t = Σ p̃_i τ_i (25); z stays in a ball (30).

    Mind that the momenta start afresh in every round: its first minibatch has the weight (1 − (1 − β)^τ)/β in q
    (Lemma 1). u is less noisy than one minibatch's gradient, but q is noisier than a sum of plain gradients.

    Departures:
        ρ^t is that of the cohort; the paper's is of all clients, of which those that sit out have no τ_i;
        the bounds are in the paper's Assumption 9 and experiments, not in Alg. 1: bounds=None leaves them away;
        one ξ and one ζ a step serve all three directions, as (17)–(18) print it; `shared_batch=False` is Appendix B.3,
        where each direction has its own;
        z starts at 0 (the paper does not say); radius=None, the default, projects nothing (the theory's is L_f/μ_g, and
        the experiments' is not given);
        x is kept in the problem's set, if it has one, after the server's step;
        the last momentum of a round is not computed, as nothing uses it.

    Exchanges a round: 1, which carries q_x, q_y, q_z and τ_i.

    Arguments: see the fields, each with the paper's symbol; the defaults are those of its experiments. `local_steps` is
    an int, a range (low, high) drawn for each client and round, `Epochs(k)`, or an array with an entry for each
    client. `direction` ("gradient", "momentum", "storm"), `aggregation` ("sum", "reweighted") and `server` ("fixed",
    "adaptive") take the method apart: `LAASFBO`, `SimFBO` and `ShroFBO` are three of the twelve combinations. Where
    the server is adaptive, s follows the norm of Σ p̃_i q_i/ρ^t under "sum" (24), so that both kinds are of one size.

    Example:
        >>> import rookery as rk
        >>> task = rk.tasks.quadratic(clients=4, seed=0)
        >>> method = rk.ASFBO(local_steps=[1, 2, 3, 4], upper_step=0.005, lower_step=0.005, linear_step=0.005)
        >>> run = rk.solve(task.problem, task.clients, method, task.init, rounds=300, every=300, evaluate=task.evaluate)
        >>> bool(run.history["distance"].iloc[-1] < 1e-3)
        True

    Reference: Communication-Efficient Adaptive Federated Bi-level Optimization with Data and System Heterogeneity
    (anonymous, under review).
    """

    momentum: Share = 0.25  # β: how much of a momentum is new at each step
    decay: Decay = 0.75  # ϱ
    floor: Positive = 0.001  # ρ
    bounds: Bounds | None = ((0.01, 0.1), (0.03, 0.3), (0.02, 0.2))  # (γ_min, γ_max) of x, y and z
    direction: Literal["gradient", "momentum", "storm"] = "momentum"
    aggregation: Literal["sum", "reweighted"] = "reweighted"
    server: Literal["fixed", "adaptive"] = "adaptive"


@dataclass(frozen=True)
class LAASFBO(ASFBO):
    """LA-ASFBO, locally accelerated: ASFBO with STORM (21) in the place of plain momentum.

    The second point of a STORM step shares the first one's minibatches: 2τ_i − 1 evaluations of the three directions a
    round, on τ_i minibatches.

    Departures: as in `ASFBO`; ‖a_i‖₁ = τ_i, which Lemma 1 shows for plain momentum, is used here too.
    Exchanges a round: 1.

    Reference: as `ASFBO`.
    """

    direction: Literal["gradient", "momentum", "storm"] = "storm"


@dataclass(frozen=True)
class SimFBO(_SingleLoop):
    """SimFBO: plain local steps on x, y and z at once, and a server that adds them up.

    Solves bilevel problems: the round of `ASFBO` with plain gradients, and the server's step is γ·Σ p̃_i q_i, projected
    for z. With unequal τ_i it tends to the optimum of the problem whose clients weigh p_i τ_i (see `ShroFBO`).

    Departures: z's start, its radius and the minibatches as in `ASFBO`; every local step counts alike (a^(k) = 1).
    Exchanges a round: 1.

    Reference: Yang, Xiao and Ji, SimFBO: Towards Simple, Flexible and Communication-Efficient Federated Bilevel
    Learning, NeurIPS 2023. The default steps are those that the ASFBO paper gives for its own methods.
    """

    direction: ClassVar[str] = "gradient"
    aggregation: ClassVar[str] = "sum"
    server: ClassVar[str] = "fixed"


@dataclass(frozen=True)
class ShroFBO(_SingleLoop):
    """ShroFBO: SimFBO re-weighted for clients that take unequal numbers of local steps.

    Solves bilevel problems: the server's step is ρ^t γ·Σ p̃_i q_i/τ_i with ρ^t = Σ p̃_i τ_i.

    Departures: as in `SimFBO`; ρ^t as in `ASFBO`. Exchanges a round: 1.

    Reference: as `SimFBO`.
    """

    direction: ClassVar[str] = "gradient"
    aggregation: ClassVar[str] = "reweighted"
    server: ClassVar[str] = "fixed"


# What the client and the server do.


def local(h: Any, c: Client, state: State, key: Array) -> tuple[Three, Count]:
    """Lines 5–11, on one client: q_i and τ_i. Where it stands follows from q so far: x_i = x − η_x q_x, by (19)."""
    count, *orders = jax.random.split(key, 6)
    steps = c.steps(h.local_steps, count, h.batch_size, "lower")
    size, shared = h.batch_size, h.shared_batch
    place = lambda q: move(state[:3], (h.upper_step, h.lower_step, h.linear_step), q)
    at = lambda k, *points: directions(c, list(points), orders, k, size, size, shared)

    def advance(k: Any, carry: tuple[Three, Three]) -> tuple[Three, Three]:
        q, u = carry
        if h.direction == "storm":  # (21), at this point and the one before
            new, old = at(k + 1, place(q), place(tree.sub(q, u)))
            u = storm(new, u, old, h.momentum)
        elif h.direction == "momentum":  # (20)
            u = tree.add(tree.scale(h.momentum, at(k + 1, place(q))[0]), tree.scale(1 - h.momentum, u))
        else:
            u = at(k + 1, place(q))[0]
        return tree.add(q, u), u

    first = at(0, state[:3])[0]  # (16)
    return c.loop(steps, advance, (first, first), before=1)[0], steps


def move(at: Three, sizes: Sequence[Any], along: Three) -> Three:
    """x, y and z, each by a step of its own size."""
    x, y, z = (tree.step(v, size, d) for v, size, d in zip(at, sizes, along, strict=True))
    return x, y, z


def server_steps(h: Any, s: Norms, along: Three) -> tuple[Sequence[Any], Norms]:
    """γ^t of x, y and z, and the new s: as they are, or by (27)–(28)."""
    gammas: Sequence[Any] = (h.server_upper_step, h.server_lower_step, h.server_linear_step)
    if h.server == "fixed":
        return gammas, s
    s_x, s_y, s_z = (h.decay * old + (1 - h.decay) * tree.norm(d) for old, d in zip(s, along, strict=True))
    gammas = [gamma / (new + h.floor) for gamma, new in zip(gammas, (s_x, s_y, s_z), strict=True)]
    if h.bounds is not None:
        gammas = [g if b is None else jnp.clip(g, *b) for g, b in zip(gammas, h.bounds, strict=True)]
    return gammas, (s_x, s_y, s_z)
