"""ASFBO and LA-ASFBO, and the methods they extend, SimFBO and ShroFBO (Yang, Xiao and Ji, NeurIPS 2023)."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from rookery.base import tree
from rookery.data.rows import Count
from rookery.language.fed import BatchSize, Bookkeeping, Bounds, Client, Decay, Fed, Positive, Share, Step, Steps
from rookery.parts import projection
from rookery.parts.local import bounds_of_steps
from rookery.parts.momentum import storm
from rookery.parts.single_loop import Three, directions
from rookery.problems.problems import Bilevel

Scalar = Float[Array, ""]
Norms = tuple[Scalar, Scalar, Scalar]


class State(NamedTuple):
    """The variables, with z ≈ [∇²_y g]⁻¹∇_y f, and the running norms s_x, s_y, s_z of the adaptive server."""

    x: tree.Tree
    y: tree.Tree
    z: tree.Tree
    s: Norms


@dataclass(frozen=True)
class _SingleLoop:
    """The family's hyperparameters, and Alg. 1 with three switches that the methods set.

    direction: a client steps along its "gradient", a "momentum" of gradients (20), or "storm" (21).
    aggregation: the "sum" of the clients' q_i (23), or "reweighted" by their numbers of steps (26).
    server: "fixed" steps, or "adaptive" ones (27)–(28).
    """

    upper_step: Step = 0.01  # η_x
    lower_step: Step = 0.03  # η_y
    linear_step: Step = 0.02  # η_z
    server_upper_step: Step = 0.03  # γ_x
    server_lower_step: Step = 0.03  # γ_y
    server_linear_step: Step = 0.05  # γ_z
    radius: Positive | None = None  # r of the ball in which the server keeps z; None: the whole space
    local_steps: Steps = (5, 15)  # τ_i
    batch_size: BatchSize = None  # of ξ and ζ; None: all the client's data
    shared_batch: bool = True  # one minibatch of each level per step instead of five

    solves: ClassVar[tuple[type, ...]] = (Bilevel,)

    def init(self, fed: Fed, x: tree.Tree, y: tree.Tree, key: Array) -> State:
        """Start at z = 0 and s = 0 (line 1)."""
        z = tree.zeros_like(y)
        s_x, s_y, s_z = (jnp.zeros_like(tree.norm(v)) for v in (x, y, z))
        return State(x, y, z, (s_x, s_y, s_z))

    def round(self, fed: Fed, state: State, key: Array) -> State:
        """Alg. 1, lines 3–16."""
        h: Any = self  # the switches are fields of some subclasses and class variables of others

        def reply(c: Client, k: Array) -> tuple[Three, Scalar]:  # lines 4–13
            q, steps = local(h, c, state, k)
            norm = jnp.asarray(steps, state.s[0].dtype)  # ‖a_i‖₁ = τ_i (Lemma 1)
            return (tree.scale(1 / norm, q) if h.aggregation == "reweighted" else q), norm

        tau = Bookkeeping("τ", *bounds_of_steps(h.local_steps))
        d, rho = fed.sum(fed.map(reply, key), name="q_x, q_y, q_z", bookkeeping=(None, tau))  # (26), and ρ^t of (25)
        if h.aggregation == "sum":
            d = tree.scale(1 / rho, d)  # (24): the weights are p_i τ_i/ρ^t
        gammas, s = _server_steps(h, state.s, d)  # (27), (28)
        x, y, z = _moved(state[:3], [rho * gamma for gamma in gammas], d)  # (29)
        z = z if h.radius is None else projection.ball(z, h.radius)  # (30)
        return State(fed.problem.project_upper(x), y, z, s)


@dataclass(frozen=True)
class ASFBO(_SingleLoop):
    """Adaptive single-loop federated bilevel optimization: all three variables at once, one exchange per round.

    ASFBO solves bilevel problems. Besides x and y it keeps z, which solves ∇²_y g z = ∇_y f, i.e. minimises R = ½
    zᵀ∇²_y g z − zᵀ∇_y f. The three directions are ∇_x f − ∇²_xy g z, ∇_y g and ∇_z R = ∇²_y g z − ∇_y f.

    In each round (Alg. 1) the cohort starts from the server's x, y, z (15). Each client takes τ_i steps on all three
    simultaneously (19). It steps along momenta u, v, w, which start at the first directions (16) and then follow (20),
    and sends their sums q_i (22). The server forms h = Σ p̃_i q_i/τ_i with p̃_i = (n/P) p_i (26), updates
    s ← ϱs + (1 − ϱ)‖h‖ for each variable (27), and steps by ρ^t·clip(γ/(s + ρ), bounds)·h (28)–(29), where ρ^t = Σ p̃_i
    τ_i (25). The server keeps z in a ball (30).

    The momenta restart in every round, so that the round's first minibatch has the weight (1 − (1 − β)^τ)/β in q (Lemma
    1). u is less noisy than one minibatch's gradient, but q is noisier than a sum of plain gradients.

    Departures from the paper:
        ρ^t is computed over the cohort, not over all clients as in the paper, because clients that sit out have no τ_i;
        the bounds come from the paper's Assumption 9 and experiments, not from Alg. 1; bounds=None removes them;
        one ξ and one ζ per step serve all three directions, as printed in (17)–(18). `shared_batch=False` is Appendix
        B.3, with separate minibatches for each direction;
        z starts at 0, which the paper leaves open; radius=None, the default, projects nothing (the theory's radius is
        L_f/μ_g, and the experiments do not give theirs);
        x is projected onto the problem's set, if it has one, after the server's step;
        the last momentum of a round is not computed, since nothing uses it.

    Exchanges per round: 1, which carries q_x, q_y, q_z and τ_i.

    Arguments: see the fields, each with the paper's symbol; the defaults are those of the paper's experiments.
    `local_steps` is an int, a range (low, high) drawn for each client and round, `Epochs(k)`, or an array with an entry
    for each client. `direction` ("gradient", "momentum", "storm"), `aggregation` ("sum", "reweighted") and `server`
    ("fixed", "adaptive") select a variant: `LAASFBO`, `SimFBO` and `ShroFBO` are three of the twelve combinations. With
    an adaptive server and "sum", s follows the norm of Σ p̃_i q_i/ρ^t (24), so that both aggregations have the same
    scale.

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

    momentum: Share = 0.25  # β: the weight of the new direction in a momentum
    decay: Decay = 0.75  # ϱ
    floor: Positive = 0.001  # ρ
    bounds: Bounds | None = ((0.01, 0.1), (0.03, 0.3), (0.02, 0.2))  # (γ_min, γ_max) of x, y and z
    direction: Literal["gradient", "momentum", "storm"] = "momentum"
    aggregation: Literal["sum", "reweighted"] = "reweighted"
    server: Literal["fixed", "adaptive"] = "adaptive"


@dataclass(frozen=True)
class LAASFBO(ASFBO):
    """LA-ASFBO, locally accelerated: ASFBO with STORM (21) instead of plain momentum.

    LA-ASFBO solves bilevel problems by the round of `ASFBO`, with (21) in place of (20). The second point of a STORM
    step shares the first point's minibatches: a round evaluates the three directions 2τ_i − 1 times, on τ_i
    minibatches.

    Departures from the paper: as in `ASFBO`; ‖a_i‖₁ = τ_i, which Lemma 1 shows for plain momentum, is used here, too.

    Exchanges per round: 1.

    Reference: as `ASFBO`.
    """

    direction: Literal["gradient", "momentum", "storm"] = "storm"


@dataclass(frozen=True)
class SimFBO(_SingleLoop):
    """SimFBO: plain local steps on x, y and z at once, and a server that adds them up.

    SimFBO solves bilevel problems by the round of `ASFBO` with plain gradients. The server's step is γ·Σ p̃_i q_i,
    projected for z. With unequal τ_i it converges to the solution of the problem with client weights p_i τ_i (see
    `ShroFBO`).

    Departures from the paper: the start of z, its radius and the minibatches are as in `ASFBO`; all local steps have
    equal weight (a^(k) = 1).

    Exchanges per round: 1.

    Reference: Yang, Xiao and Ji, SimFBO: Towards Simple, Flexible and Communication-Efficient Federated Bilevel
    Learning, NeurIPS 2023. The default steps are those that the ASFBO paper gives for its own methods.
    """

    direction: ClassVar[str] = "gradient"
    aggregation: ClassVar[str] = "sum"
    server: ClassVar[str] = "fixed"


@dataclass(frozen=True)
class ShroFBO(_SingleLoop):
    """ShroFBO: SimFBO re-weighted for clients that take unequal numbers of local steps.

    ShroFBO solves bilevel problems. The server's step is ρ^t γ·Σ p̃_i q_i/τ_i with ρ^t = Σ p̃_i τ_i.

    Departures from the paper: as in `SimFBO`; ρ^t is as in `ASFBO`.

    Exchanges per round: 1.

    Reference: as `SimFBO`.
    """

    direction: ClassVar[str] = "gradient"
    aggregation: ClassVar[str] = "reweighted"
    server: ClassVar[str] = "fixed"


def local(h: Any, c: Client, state: State, key: Array) -> tuple[Three, Count]:
    """Lines 5–11 on one client: q_i of (22), and τ_i. Here u stands for the momenta u, v and w of x, y and z.

    (19) and (22) add up the same momenta, so the point after k steps is x_i^k = x − η_x q_x^k; the same holds for y and
    z. The loop carries q and u, and computes the point from q.
    """
    count, *orders = jax.random.split(key, 6)
    steps = c.steps(h.local_steps, count, h.batch_size, "lower")
    sizes = h.upper_step, h.lower_step, h.linear_step
    start = state[:3]  # (15)
    at = lambda k, *points: directions(c, list(points), orders, k, h.batch_size, h.batch_size, h.shared_batch)

    def iterate(k: Any, carry: tuple[Three, Three]) -> tuple[Three, Three]:
        q, u = carry
        k = k + 1
        point = _moved(start, sizes, q)  # (19)
        if h.direction == "gradient":
            (u,) = at(k, point)
        elif h.direction == "momentum":  # (20)
            (new,) = at(k, point)
            u = tree.add(tree.scale(h.momentum, new), tree.scale(1 - h.momentum, u))
        else:  # (21), with the point one step back
            new, old = at(k, point, _moved(start, sizes, tree.sub(q, u)))
            u = storm(new, u, old, h.momentum)
        return tree.add(q, u), u  # (22)

    (u,) = at(0, start)  # (16)
    q, _ = c.loop(steps, iterate, (u, u), before=1)
    return q, steps


def _moved(point: Three, sizes: Sequence[Any], along: Three) -> Three:
    """Step from the point, with a step size for each of x, y and z."""
    x, y, z = (tree.step(v, size, d) for v, size, d in zip(point, sizes, along, strict=True))
    return x, y, z


def _server_steps(h: Any, s: Norms, along: Three) -> tuple[Sequence[Any], Norms]:
    """Return γ^t for x, y and z, and the new s: fixed, or by (27)–(28)."""
    gammas: Sequence[Any] = (h.server_upper_step, h.server_lower_step, h.server_linear_step)
    if h.server == "fixed":
        return gammas, s
    s_x, s_y, s_z = (h.decay * old + (1 - h.decay) * tree.norm(d) for old, d in zip(s, along, strict=True))
    gammas = [gamma / (new + h.floor) for gamma, new in zip(gammas, (s_x, s_y, s_z), strict=True)]
    if h.bounds is not None:
        gammas = [g if b is None else jnp.clip(g, *b) for g, b in zip(gammas, h.bounds, strict=True)]
    return gammas, (s_x, s_y, s_z)
