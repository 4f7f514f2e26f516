"""Federated compositional methods: inner functions that differ by client, and Fed-DR-SCGD, where g is shared.

After Huang, Li and Huang 2021; Gao, Li and Huang 2022; Wu et al. 2023; Gao 2024.
"""

from copy import copy
from dataclasses import dataclass, replace
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from rookery.base import tree
from rookery.data.rows import Count
from rookery.language.fed import AtLeastOne, BatchSize, Client, Data, Epochs, Fed, Positive, Share, Step
from rookery.parts.compositional import first_value, slope
from rookery.parts.momentum import moving_average, storm
from rookery.parts.projection import ball
from rookery.problems.functions import takes_key
from rookery.problems.problems import Compositional


class State(NamedTuple):
    """The server's state. y is empty if the inner value belongs to the clients."""

    x: tree.Tree
    y: tree.Tree = ()
    m: tree.Tree = None  # the running gradient, if the method has one
    rounds: Any = None  # number of rounds done, if it is counted


@dataclass(frozen=True)
class ComFedL:
    """Local SGD on the composition, with the inner value of a large minibatch.

    ComFedL solves compositional problems whose inner function differs by client, min over x of mean
    h_k(x) + f_k(g_k(x)). f_k may take data, f(value, batch), or be known to all, f(value).

    Each round takes `local_steps` steps x_k ← x_k − η(∇h_k(x_k; B') + ∇g_k(x_k; B)ᵀ∇f_k(g_k(x_k; B); B')), then
    x ← mean x_k. The noise of g_k(x_k; B) biases the gradient, less so with a larger `inner_batch`. The method is SCGD
    with momentum 1, run by each client.

    Departures from the paper: unverified, since we had no access to the paper's algorithm box; the step follows the
    description in a later paper (Gao et al. 2022, where it is their method with γ = 1), and the averaging is that of
    FedAvg; the plain part h; cohorts instead of all clients.

    Exchanges per round: 1.

    Reference: Huang, Li and Huang, Compositional Federated Learning: Applications in Distributionally Robust Averaging
    and Meta Learning, 2021.
    """

    step: Step = 0.01  # η
    local_steps: AtLeastOne = 1  # τ
    batch_size: BatchSize = None  # of B', for f and h; None: all the client's data
    inner_batch: BatchSize = None  # of B, for g; None: all the client's data

    solves: ClassVar[tuple[type, ...]] = (Compositional,)
    scope: ClassVar = "client"

    def init(self, fed: Fed, x: tree.Tree, y: tree.Tree, key: Array) -> State:
        return State(x)

    def round(self, fed: Fed, state: State, key: Array) -> State:
        def local(c: Client, k: Array) -> tree.Tree:
            step = lambda t, x: tree.step(x, self.step, _estimates(self, c, (x,), k, t)[0])
            return c.loop(self.local_steps, step, state.x)

        return State(fed.problem.project_upper(fed.mean(fed.map(local, key), name="x", around=state.x)))


@dataclass(frozen=True)
class LocalSCGDM:
    """Local SCGD with momentum: a running inner value u_k and a running gradient m_k.

    Local-SCGDM is meant for compositional problems whose inner function differs by client, min over x of mean
    h_k(x) + f_k(g_k(x)). f_k may take data, f(value, batch), or be known to all, f(value).

    Each round takes p steps (Alg. 1):
        u_k ← (1−γη)u_k + γη g_k(x_k; ζ),
        z_k = ∇h_k(x_k; ξ) + ∇g_k(x_k; ζ)ᵀ∇f_k(u_k; ξ) with the new u_k,
        m_k ← (1−αη)m_k + αη z_k, x_k ← x_k − βη m_k;
    then x, u and m are averaged. At the very first step u_k = g_k(x; ζ) and m_k = z_k. Without m_k
    (`gradient_momentum=None`) it is Local-SCGD.

    Caution: the averaged u tracks mean g_k, not g_k. With a large `momentum` the clients soon forget it (the paper's
    experiments have γη ≥ 0.7). With γη → 0 and p fixed, as in its theory, the method solves another problem, min mean
    f_k(mean g_k(x)). `share_inner=False` leaves u_k with the client and solves the stated problem; y is then empty.

    Departures from the paper: the plain part h; `share_inner`; cohorts instead of all clients: with `share_inner=False`
    a client continues from the u_k of its last round, and at first from g_k(x; ζ).

    Exchanges per round: 1, which carries x, u (unless `share_inner=False`) and m (unless `gradient_momentum=None`).

    Reference: Gao, Li and Huang, On the Convergence of Local Stochastic Compositional Gradient Descent with Momentum,
    ICML 2022, Alg. 1.
    """

    step: Step = 0.01  # βη
    momentum: Share = 0.7  # γη
    gradient_momentum: Share | None = 0.8  # αη; None: no running gradient, Local-SCGD
    local_steps: AtLeastOne = 5  # p
    batch_size: BatchSize = None  # of ξ and ζ; None: all the client's data
    share_inner: bool = True  # average u, as in the paper; or leave it with the client

    solves: ClassVar[tuple[type, ...]] = (Compositional,)
    scope: ClassVar = "client"

    def init(self, fed: Fed, x: tree.Tree, y: tree.Tree, key: Array) -> State:
        """Start with u and m that are not used before the first estimate."""
        return State(x, y if self.share_inner else (), _no_gradient_yet(self, x), jnp.int32(0))

    def memory(self, x: tree.Tree, y: tree.Tree) -> Any:
        """A client's memory if u stays with it: u_k, and whether it has been computed."""
        return None if self.share_inner else (y, jnp.bool_(False))

    def round(self, fed: Fed, state: State, key: Array) -> State:
        """Alg. 1: p steps, then the means."""
        new = state.rounds == 0

        def local(c: Client, k: Array, u: tree.Tree, new_u: Bool[Array, ""]) -> tuple[tree.Tree, tree.Tree, tree.Tree]:
            ku, kl = jax.random.split(k)

            def one(t: Any, carry: tuple[tree.Tree, tree.Tree, tree.Tree]) -> tuple[tree.Tree, tree.Tree, tree.Tree]:
                x, u, m = carry
                value, pullback = c.r_and_pullback(x, c.lower(kl, self.batch_size, t))
                u = _running(u, value, self.momentum, new_u & (t == 0))
                z = _gradient(c, x, u, pullback, _outer_batch(c, ku, self.batch_size, t))
                z = _running(m, z, self.gradient_momentum, new & (t == 0))
                return tree.step(x, self.step, z), u, _kept(self, z)

            return c.loop(self.local_steps, one, (state.x, u, state.m))

        def with_local_inner(c: Client, k: Array, memory: Any) -> tuple[Any, Any]:
            u, computed = memory
            x, u, m = local(c, k, u, ~computed)
            return (x, m), (u, jnp.bool_(True))

        if self.share_inner:
            replies = fed.map(lambda c, k: local(c, k, state.y, new), key)
            x, u, m = fed.mean(replies, name="x, u, m", around=(state.x, state.y, state.m))
        else:
            u, (x, m) = (), fed.mean(fed.map_state(with_local_inner, key), name="x, m", around=(state.x, state.m))
        return State(fed.problem.project_upper(x), u, m, state.rounds + 1)


@dataclass(frozen=True)
class _Conditional:
    """The hyperparameters of the methods for conditional problems."""

    step: Step = 0.01  # η
    gradient_momentum: Share | None = None  # a; None: no running gradient, FCSG
    local_steps: AtLeastOne = 10  # q
    batch_size: BatchSize = None  # outer samples of a step; None: all the client's data
    inner_batch: BatchSize = None  # m, inner samples for each; None: all the client's data

    solves: ClassVar[tuple[type, ...]] = (Compositional,)
    scope: ClassVar = "client"
    conditional: ClassVar = True


@dataclass(frozen=True)
class FCSG(_Conditional):
    """Local SGD, or FCSG-M with momentum, for conditional problems: the inner mean depends on the outer sample.

    FCSG solves compositional problems whose inner function differs by client, min over x of mean_k E_ξ[h_k(x;
    ξ) + f_k(E_{η|ξ} g_k(x; η, ξ); ξ)]. The problem may be conditional, with inner(x, batch, sample), or not, with
    inner(x, batch), where FCSG is ComFedL.

    Each round takes q steps x_k ← x_k − ηv_k along the estimate v_k = ∇h_k(x_k; ξ) + ∇g_k(x_k; B, ξ)ᵀ∇f_k(g_k(x_k; B,
    ξ); ξ), then x ← mean x_k. B are m fresh inner samples for each outer sample ξ; they cannot be tracked from step to
    step. v_k has a bias of order 1/m. FCSG-M, with `gradient_momentum`, takes d_k ← (1−a)d_k + a v_k and
    x_k ← x_k − ηd_k, and averages x and d. At the very first step d_k = v_k.

    The outer samples of a conditional problem are processed one after another: the theory has few of them, each with a
    large `inner_batch`.

    Departures from the paper: we had no access to the paper and follow the authors' published code and another paper's
    summary; the first estimate uses the usual batch size, not a larger one; if the problem is not conditional, one B
    serves all outer samples of a step; the plain part h; cohorts instead of all clients.

    Exchanges per round: 1, which carries x, with momentum x and d.

    Example:
        >>> import jax.numpy as jnp, rookery as rk
        >>> inner = lambda x, batch, sample: jnp.mean((sample["a"] + batch) * x)  # η: noise on the sample's input
        >>> problem = rk.Compositional(inner, lambda v, b: jnp.mean((v - b["t"]) ** 2), inner_scope="client")
        >>> data = {"a": jnp.array([1.0, 2.0]), "t": jnp.array([3.0, 6.0])}
        >>> clients = rk.Clients(lower=[jnp.array([-0.1, 0.1])] * 3, upper=[data] * 3)
        >>> run = rk.solve(problem, clients, rk.FCSG(step=0.1, local_steps=2), (0.0, None), rounds=40)
        >>> round(float(run.x), 3)
        3.0

    Reference: Wu et al., Federated Conditional Stochastic Optimization, NeurIPS 2023.
    """

    def init(self, fed: Fed, x: tree.Tree, y: tree.Tree, key: Array) -> State:
        """Start with a d that is not used before the first estimate."""
        return State(x, (), _no_gradient_yet(self, x), jnp.int32(0))

    def round(self, fed: Fed, state: State, key: Array) -> State:
        def local(c: Client, k: Array) -> tuple[tree.Tree, tree.Tree]:
            def one(t: Any, carry: tuple[tree.Tree, tree.Tree]) -> tuple[tree.Tree, tree.Tree]:
                x, d = carry
                (v,) = _estimates(self, c, (x,), k, t)
                v = _running(d, v, self.gradient_momentum, (state.rounds == 0) & (t == 0))
                return tree.step(x, self.step, v), _kept(self, v)

            return c.loop(self.local_steps, one, (state.x, state.m))

        name = "x" if state.m is None else "x, d"
        x, d = fed.mean(fed.map(local, key), name=name, around=(state.x, state.m))
        return State(fed.problem.project_upper(x), (), d, state.rounds + 1)


@dataclass(frozen=True)
class AccFCSGM(_Conditional):
    """Acc-FCSG-M: FCSG with STORM, d_k ← v_k(x_k) + (1−a)(d_k − v_k(x_k⁻)) on the same samples, x_k ← x_k − ηd_k.

    Acc-FCSG-M solves the problems of `FCSG`, conditional or not, with the same estimate v_k.

    Each round takes q steps, then averages x and d. x_k⁻ is the point of the client's last estimate; after a
    synchronisation it is the client's own point before the average, which it remembers. At the very first step
    d_k = v_k.

    Departures from the paper: as for `FCSG`; a client that was not in the last round uses the mean of the others' last
    points, x + ηd, as its own (the paper has all clients in every round).

    Exchanges per round: 1, which carries x and d.

    Reference: Wu et al., Federated Conditional Stochastic Optimization, NeurIPS 2023.
    """

    gradient_momentum: Share = 0.1  # a

    def init(self, fed: Fed, x: tree.Tree, y: tree.Tree, key: Array) -> State:
        """Start with a d that is not used before the first estimate."""
        return State(x, (), tree.zeros_like(x), jnp.int32(0))

    def memory(self, x: tree.Tree, y: tree.Tree) -> tuple[tree.Tree, Int[Array, ""]]:
        """A client's memory: the point of its last estimate, and the round of it."""
        return x, jnp.int32(-2)

    def round(self, fed: Fed, state: State, key: Array) -> State:
        others = tree.step(state.x, -self.step, state.m)

        def local(c: Client, k: Array, memory: Any) -> tuple[Any, Any]:
            def one(t: Any, carry: tuple[tree.Tree, tree.Tree, tree.Tree]) -> tuple[tree.Tree, tree.Tree, tree.Tree]:
                x, old, d = carry
                new, before = _estimates(self, c, (x, old), k, t)
                d = storm(new, d, before, jnp.where((state.rounds == 0) & (t == 0), 1, self.gradient_momentum))
                return tree.step(x, self.step, d), x, d

            x, last, d = c.loop(self.local_steps, one, (state.x, _last(memory, state, others), state.m))
            return (x, d), (last, state.rounds)

        x, d = fed.mean(fed.map_state(local, key), name="x, d", around=(state.x, state.m))
        return State(fed.problem.project_upper(x), (), d, state.rounds + 1)


@dataclass(frozen=True)
class FedDRSCGD:
    """Fed-DR-SCGD with two levels: STORM on the inner value and on the Jacobian–vector product.

    Fed-DR-SCGD solves compositional problems whose inner function is shared, min over x of h(x) + f(g(x)) with g = mean
    g_k, and whose f is known to all. (In the paper all levels are shared in this way.) The clients' g_k must be close
    to each other ("bounded functional heterogeneity"). Between two averages u_k moves towards the client's own g_k.
    Fixed β and p leave an error of order βp in the limit, which is large if the g_k differ; the method converges as
    βp → 0.

    Each round takes p steps:
        u_k ← g_k(x_k; ζ) + (1−β)(u_k − g_k(x_k⁻; ζ)),
        w_k ← Π[v_k(x_k, u_k) + (1−α)(w_k − v_k(x_k⁻, u_k⁻))] with v_k(x, u) = ∇h_k(x; ξ) + ∇g_k(x; ζ)ᵀ∇f(u),
        x_k ← x_k − ηw_k;
    then x, u and w are averaged. Π is the projection onto the ball of `radius`, the product of the Lipschitz constants
    of f and g. x_k⁻ and u_k⁻ are those of the client's last step; after a synchronisation they are its own values from
    before the average, which it remembers.

    Departures from the paper: the updates are unverified, since we had no access to the paper's algorithm box; they
    follow the paper's statement of the problem and of the idea, and a summary. Two levels, whereas the paper has any
    number; f known to all, because with clients' own f_k the mean of ∇g_kᵀ∇f_k is not the gradient; the plain part h.
    The start is ours: u = mean g_k(x), and w_k = v_k at the very first step. A client that was not in the last round
    uses the means of the others' last points, x + ηw and u, as its own (the paper has all clients in every round).

    Exchanges per round: 1, which carries x, u and w. At the start: 1.

    Reference: Gao, A Doubly Recursive Stochastic Compositional Gradient Descent Method for Federated Multi-Level
    Compositional Optimization, ICML 2024.
    """

    step: Step = 0.01  # η
    momentum: Share = 0.1  # β, of u
    gradient_momentum: Share = 0.1  # α, of w
    local_steps: AtLeastOne = 5  # p
    radius: Positive | None = None  # of the ball for w; None: no projection
    batch_size: BatchSize = None  # of ξ and ζ; None: all the client's data
    first_batch: BatchSize = None  # of the first u; None: all the client's data

    solves: ClassVar[tuple[type, ...]] = (Compositional,)
    needs: ClassVar[tuple[str, ...]] = ("known outer",)

    def init(self, fed: Fed, x: tree.Tree, y: tree.Tree, key: Array) -> State:
        """Start at u = mean g_k(x), with a w that is not used before the first estimate."""
        return State(x, first_value(fed, x, key, self.first_batch), tree.zeros_like(x), jnp.int32(0))

    def memory(self, x: tree.Tree, y: tree.Tree) -> tuple[Any, Int[Array, ""]]:
        """A client's memory: x_k and u_k of its last step, and the round of it."""
        return (x, y), jnp.int32(-2)

    def round(self, fed: Fed, state: State, key: Array) -> State:
        others = tree.step(state.x, -self.step, state.m), state.y

        def local(c: Client, k: Array, memory: Any) -> tuple[Any, Any]:
            ku, kl = jax.random.split(k)

            def one(t: Any, carry: Any) -> Any:
                x, u, (old_x, old_u), w = carry
                lower, upper = c.lower(kl, self.batch_size, t), _outer_batch(c, ku, self.batch_size, t)
                value, pullback = c.r_and_pullback(x, lower)
                old_value, old_pullback = c.r_and_pullback(old_x, lower)
                u = storm(value, u, old_value, self.momentum)
                new, before = _gradient(c, x, u, pullback, upper), _gradient(c, old_x, old_u, old_pullback, upper)
                w = storm(new, w, before, jnp.where((state.rounds == 0) & (t == 0), 1, self.gradient_momentum))
                w = w if self.radius is None else ball(w, self.radius)
                return tree.step(x, self.step, w), u, (x, u), w

            start = state.x, state.y, _last(memory, state, others), state.m
            x, u, last, w = c.loop(self.local_steps, one, start)
            return (x, u, w), (last, state.rounds)

        x, u, w = fed.mean(fed.map_state(local, key), name="x, u, w", around=(state.x, state.y, state.m))
        return State(fed.problem.project_upper(x), u, w, state.rounds + 1)


def _gradient(c: Client, x: tree.Tree, u: tree.Tree, pullback: Any, upper: Data | None) -> tree.Tree:
    """Return ∇h(x; ξ) + ∇g(x)ᵀ∇f(u; ξ); no ξ is needed if the problem has no h and its f is known to all."""
    if upper is None:
        return pullback(slope(c.problem, u))
    h_x, f_u = c.f_x_and_y(x, u, upper)
    return tree.add(h_x, pullback(f_u))


def _outer_batch(c: Client, key: Array, size: int | None, step: Count) -> Data | None:
    problem: Any = c.problem
    return None if problem.outer_is_known and problem.extra is None else c.upper(key, size, step)


def _estimates(
    h: ComFedL | FCSG | AccFCSGM, c: Client, points: tuple[tree.Tree, ...], key: Array, step: Count
) -> list[tree.Tree]:
    """Return v_k = ∇h(x; ξ) + ∇g(x; B)ᵀ∇f(g(x; B); ξ) at each point, with the same samples at all points."""
    ku, kl = jax.random.split(key)

    def at(c: Client, x: tree.Tree, lower: Data, upper: Data | None) -> tree.Tree:
        value, pullback = c.r_and_pullback(x, lower)
        return _gradient(c, x, value, pullback, upper)

    problem: Any = c.problem
    if not problem.inner_is_conditional:
        lower, upper = c.lower(kl, h.inner_batch, step), _outer_batch(c, ku, h.batch_size, step)
        return [at(c, x, lower, upper) for x in points]

    count = c.steps(Epochs(1), ku, 1, "upper")  # one step for each of the client's samples
    if h.batch_size is not None:
        count = min(h.batch_size, count) if isinstance(count, int) else jnp.minimum(h.batch_size, count)

    def one(j: Any, total: list[tree.Tree]) -> list[tree.Tree]:
        place = step * count + j
        upper = c.upper(ku, 1, place)
        sample = jax.tree.map(lambda a: a[0], upper.rows)
        conditioned = copy(c)  # the same client with the inner function of this sample
        conditioned.problem = replace(problem, inner=_of_sample(problem.inner, sample))
        lower = c.lower(kl, h.inner_batch, place)
        return tree.add(total, [at(conditioned, x, lower, upper) for x in points])

    total = c.loop(count, one, [tree.zeros_like(x) for x in points])
    return jax.tree.map(lambda a: a / jnp.asarray(count, a.dtype), total)


def _of_sample(inner: Any, sample: Any) -> Any:
    """The inner function for one outer sample; it takes a key if the given function does."""
    if takes_key(inner):
        return lambda x, batch, key: inner(x, batch, sample, key=key)
    return lambda x, batch: inner(x, batch, sample)


def _running(old: tree.Tree, new: tree.Tree, momentum: Any, first: Bool[Array, ""]) -> tree.Tree:
    """Return (1 − momentum)·old + momentum·new; `new` if it is the first, or without momentum."""
    return new if momentum is None else moving_average(old, new, jnp.where(first, 1, momentum))


def _no_gradient_yet(h: LocalSCGDM | FCSG, x: tree.Tree) -> tree.Tree:
    return None if h.gradient_momentum is None else tree.zeros_like(x)


def _kept(h: LocalSCGDM | FCSG, gradient: tree.Tree) -> tree.Tree:
    return None if h.gradient_momentum is None else gradient


def _last(memory: tuple[Any, Int[Array, ""]], state: State, others: Any) -> Any:
    """Return what the client remembers if it was in the last round, else the others' mean."""
    value, when = memory
    return jax.tree.map(lambda a, b: jnp.where(when == state.rounds - 1, a, b), value, others)
