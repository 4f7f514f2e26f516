"""FedDRO, DS-FedDRO, and FedAvg for compositional problems (Khanduri et al.)."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array

from rookery.base import draws, tree
from rookery.data.source import Count
from rookery.language.fed import AtLeastOne, BatchSize, Client, Fed, PerClient, Share, Step
from rookery.parts.compositional import first_value, plus_h, slope
from rookery.parts.storm import storm
from rookery.problems.problems import Compositional

Output = Literal["last", "random"]


class State(NamedTuple):
    """The output, x and the inner value y that goes with it; `last`: the current iterate, if the output is random."""

    x: tree.Tree
    y: tree.Tree
    done: Any = None  # rounds, where they are counted
    last: Any = None  # (x, y), with output="random"

    @property
    def now(self) -> tuple[tree.Tree, tree.Tree]:
        """Where the next round starts."""
        return (self.x, self.y) if self.last is None else self.last


def _start(output: Output, x: tree.Tree, y: tree.Tree) -> State:
    return State(x, y, jnp.int32(0), None if output == "last" else (x, y))


def _after(output: Output, state: State, x: tree.Tree, y: tree.Tree, key: Array) -> State:
    """The state one round further; a random output is the t-th iterate with probability 1/t, else what it was."""
    done = state.done + 1
    if output == "last":
        return State(x, y, done)
    take = draws.coins(key, 1 / done)
    pick = lambda new, old: jax.tree.map(lambda a, b: jnp.where(take, a, b), new, old)
    return State(pick(x, state.x), pick(y, state.y), done, (x, y))


@dataclass(frozen=True)
class FedDRO:
    """Local SGD on h + f(g) in which the clients share their estimate ȳ of the inner value at every step.

    Solves compositional problems, min over x of h(x) + f(g(x)) with g = mean g_k, whose f is known to all.

    Round (Alg. 2, I times lines 3–11): x_k ← x_k − η(∇h_k(x_k; ξ) + ∇g_k(x_k; ζ)ᵀ∇f(ȳ)), (7); then
    y_k = (1−β)(ȳ − g_k(x_k^old; ζ)) + g_k(x_k; ζ), (8), on the minibatch ζ of the next step; ȳ ← mean y_k; and at the
    end x ← mean x_k. Before the first round ȳ = mean g_k(x).

    Departures:
        where (8) subtracts in a round's first step. As printed, x_k has been overwritten by the mean x̄ and it subtracts
        g_k(x̄), from a ȳ formed at the clients' own points: every round leaves the error mean g_k(x_k) − g(x̄) in ȳ, of
        order ηI, and it is forgotten at the rate β. With β = cη, as in Theorem 4.3, the limit is a wrong point (unless
        d_g = 1 and h = 0: then all client gradients have the factor f'(ȳ), and vanish together). Here (8) subtracts at
        the client's own x_k before the mean, which it remembers: the same exchanges, and the error falls with η.
        `as_printed=True` is the paper's order;
        the returned x̄^{a(T)}, a(T) uniform, is `output="random"`, drawn from the averaged iterates, one a round. The
        default is the last. (With "random" the state has both, and so a round starts with twice the bytes down.)
        the paper has all clients take part. With a cohort, ȳ and x are the cohort's means, and a client that sat out
        the last round has no such point and subtracts at x̄: the printed error is then removed in part only.

    Exchanges a round: I, of which I − 1 carry y alone and one x, too. At the start: 1.

    Example:
        >>> import jax.numpy as jnp, rookery as rk
        >>> problem = rk.Compositional(lambda x, b: jnp.mean(b["a"] * x + b["s"], axis=0), lambda v: jnp.sqrt(1 + v**2))
        >>> each = [(3.0, 2.0), (-1.0, -2.0)]  # g_1 = 3x + 2, g_2 = −x − 2: FedAvg goes to −0.76
        >>> clients = rk.Clients(lower=[{"a": jnp.array([a]), "s": jnp.array([s])} for a, s in each])
        >>> method = rk.FedDRO(step=0.05, momentum=0.5, local_steps=5)
        >>> abs(float(rk.solve(problem, clients, method, (1.5, None), rounds=200).x)) < 1e-6
        True

    Reference: Khanduri et al., On Federated Compositional Optimization: Algorithms, Analysis, and Guarantees, Alg. 2.
    """

    step: Step = 0.01  # η
    momentum: Share = 0.1  # β: the weight of what is new in (8)
    local_steps: AtLeastOne = 1  # I
    batch_size: BatchSize = None  # of ξ and ζ; None: all the client's data
    first_batch: BatchSize = None  # of the first ȳ; None: all the client's data
    as_printed: bool = False
    output: Output = "last"

    solves: ClassVar[tuple[type, ...]] = (Compositional,)
    needs: ClassVar[tuple[str, ...]] = ("known outer",)

    def init(self, fed: Fed, x: tree.Tree, y: tree.Tree, key: Array) -> State:
        """The start: ȳ = mean g_k(x)."""
        return _start(self.output, x, first_value(fed, x, key, self.first_batch))

    def memory(self, x: tree.Tree, y: tree.Tree) -> Any:
        """What a client remembers: the point of its last inner value, and the round of that."""
        return None if self.as_printed else (x, jnp.int32(0))

    def round(self, fed: Fed, state: State, key: Array) -> State:
        """Alg. 2, I times lines 4–10."""
        local, pick = jax.random.split(key)
        x, y = state.now
        storm_y = lambda c, y, batch, old, new: storm(c.r(new, batch), y, c.r(old, batch), self.momentum)

        def own_point(c: Client, k: Array, memory: Any) -> tuple[tree.Tree, Any]:
            point, when = memory
            return jax.tree.map(lambda own, mean: jnp.where(when == state.done, own, mean), point, x), memory

        before = fed.map(lambda c, k: x, key) if self.as_printed else fed.map_state(own_point, key)
        x_k, x_mean, y_mean = _with_shared_inner(self, fed, x, y, before, storm_y, local)
        if not self.as_printed:
            fed.map_state(lambda c, k, _, own: (None, (own, state.done + 1)), key, x_k)
        return _after(self.output, state, x_mean, y_mean, pick)


@dataclass(frozen=True)
class DSFedDRO:
    """DS-FedDRO: local steps with the client's own running inner value, and step sizes at the server for x and y.

    Solves compositional problems, min over x of h(x) + f(g(x)) with g = mean g_k, whose f is known to all.

    Round (Alg. 3): I times x_k ← x_k − η(∇h_k(x_k; ξ) + ∇g_k(x_k; ζ)ᵀ∇f(y_k)), then y_k ← (1−β)y_k + βg_k(x_k; ζ), on
    the minibatch ζ of the next step; and at the end x ← x − γ_x mean(x − x_k), y ← y − γ_y mean(y − y_k). Before the
    first round y = mean g_k(x).

    Where it ends, mean(x − x_k) = mean(y − y_k) = 0, whatever γ_x and γ_y: it converges as β(I − 1) → 0, and with a
    fixed β it keeps an error of that order, large where the clients' inner functions differ.

    Departures: line 5 says "using (7)", with a ȳ that no client has between two exchanges: here it is the client's own
    y_k; the output as in `FedDRO`. The paper has all clients take part; with a cohort the means are the cohort's.

    Exchanges a round: 1. At the start: 1.

    Reference: Khanduri et al., On Federated Compositional Optimization: Algorithms, Analysis, and Guarantees, Alg. 3.
    """

    step: Step = 0.01  # η
    momentum: Share = 0.1  # β
    local_steps: AtLeastOne = 1  # I
    server_step: Step = 1.0  # γ_x
    server_inner_step: Step = 1.0  # γ_y
    batch_size: BatchSize = None  # of ξ and ζ; None: all the client's data
    first_batch: BatchSize = None  # of the first y; None: all the client's data
    output: Output = "last"

    solves: ClassVar[tuple[type, ...]] = (Compositional,)
    needs: ClassVar[tuple[str, ...]] = ("known outer",)

    def init(self, fed: Fed, x: tree.Tree, y: tree.Tree, key: Array) -> State:
        """The start: y = mean g_k(x)."""
        return _start(self.output, x, first_value(fed, x, key, self.first_batch))

    def round(self, fed: Fed, state: State, key: Array) -> State:
        """Alg. 3, I times lines 4–10."""
        local, pick = jax.random.split(key)
        x, y = state.now

        def moved(c: Client, k: Array) -> tuple[tree.Tree, tree.Tree]:
            return tree.sub((x, y), _with_own_inner(self, c, x, y, self.momentum, k))

        d_x, d_y = fed.mean(fed.map(moved, local), name="x, y")
        x_new = fed.problem.project_upper(tree.step(x, self.server_step, d_x))
        return _after(self.output, state, x_new, tree.step(y, self.server_inner_step, d_y), pick)


@dataclass(frozen=True)
class CompositionalFedAvg:
    """FedAvg for compositional problems: local steps with the client's own inner value. It does not converge.

    Runs on compositional problems, min over x of h(x) + f(g(x)) with g = mean g_k, whose f is known to all.

    Round (Alg. 1): I times x_k ← x_k − η(∇h_k(x_k) + ∇g_k(x_k)ᵀ∇f(y_k)), y_k ← g_k(x_k); and at the end x ← mean x_k
    and either y_k ← g_k(x) (case I) or y_k ← mean y_k (case II).

    Case I is FedAvg on another problem, mean f(g_k(x)), and fails for every I; case II fails for I > 1 (Theorem 4.1).
    `share_inner_every_step=True` is the modified version of Theorem 4.2, which converges: y_k ← mean y_k at every step,
    whatever the case.

    Departures: the plain part h; minibatches, of which each serves g_k and then ∇g_k at the same point; in case I also
    the first y_k is g_k(x). There nobody knows a common y, and the y returned is that of the start. The paper has all
    clients take part; with a cohort the means are the cohort's.

    Exchanges a round: 1; I if the inner value is shared at every step. At the start: 1, in case I none.

    Reference: Khanduri et al., On Federated Compositional Optimization: Algorithms, Analysis, and Guarantees, Alg. 1.
    """

    step: Step = 0.01  # η
    local_steps: AtLeastOne = 1  # I
    case: Literal["I", "II"] = "II"
    share_inner_every_step: bool = False
    batch_size: BatchSize = None  # of each minibatch; None: all the client's data
    first_batch: BatchSize = None  # of the first y; None: all the client's data

    solves: ClassVar[tuple[type, ...]] = (Compositional,)
    needs: ClassVar[tuple[str, ...]] = ("known outer",)

    def init(self, fed: Fed, x: tree.Tree, y: tree.Tree, key: Array) -> State:
        """The start: y = mean g_k(x), where it is shared at all."""
        shared = self.share_inner_every_step or self.case == "II"
        return State(x, first_value(fed, x, key, self.first_batch) if shared else y)

    def round(self, fed: Fed, state: State, key: Array) -> State:
        """Alg. 1, I times lines 4–9."""
        x, y = state.now
        if self.share_inner_every_step:
            value = lambda c, y, batch, old, new: c.r(new, batch)
            return State(*_with_shared_inner(self, fed, x, y, fed.map(lambda c, k: x, key), value, key)[1:])
        if self.case == "I":
            own = lambda c, k: c.loop(self.local_steps, _own_step(self, c, 1.0, k), (x, y))[0]
            return State(fed.problem.project_upper(fed.mean(fed.map(own, key), name="x", around=x)), y)
        both = lambda c, k: _with_own_inner(self, c, x, y, 1.0, k)
        x_mean, y_mean = fed.mean(fed.map(both, key), name="x, y", around=(x, y))
        return State(fed.problem.project_upper(x_mean), y_mean)


Method = FedDRO | DSFedDRO | CompositionalFedAvg
Estimate = Callable[[Client, tree.Tree, Any, tree.Tree, tree.Tree], tree.Tree]


def _with_shared_inner(
    h: Method, fed: Fed, x: tree.Tree, y: tree.Tree, before: PerClient, estimate: Estimate, key: Array
) -> tuple[PerClient, tree.Tree, tree.Tree]:
    """Alg. 2: I local steps, ȳ shared after each, and x after the last. The clients' own x_k, x and ȳ.

    `before` is where each client took its part of ȳ, and estimate(c, ȳ, batch, old, new) its next part, y_k.
    """

    def local(t: Count, x_k: PerClient, before: PerClient, y: tree.Tree) -> tuple[PerClient, PerClient]:
        f_y = slope(fed.problem, y)

        def update(c: Client, k: Array, x: tree.Tree) -> tree.Tree:  # (7)
            inner, plain = jax.random.split(k)
            through_g = c.r_x(x, c.lower(inner, h.batch_size, t), f_y)
            return tree.step(x, h.step, plus_h(c, x, y, through_g, plain, h.batch_size, t))

        def inner_value(c: Client, k: Array, old: tree.Tree, new: tree.Tree) -> tree.Tree:  # (8)
            inner, _ = jax.random.split(k)
            return estimate(c, y, c.lower(inner, h.batch_size, t + 1), old, new)

        new = fed.map(update, key, x_k)
        return new, fed.map(inner_value, key, before, new)

    def step(t: Count, carry: tuple[PerClient, PerClient, tree.Tree]) -> tuple[PerClient, PerClient, tree.Tree]:
        x_k, y_k = local(t, *carry)
        return x_k, x_k, fed.mean(y_k, name="y", around=carry[2])

    start = fed.map(lambda c, k: x, key), before, y
    x_k, before, y = fed.loop(h.local_steps - 1, step, start)
    x_k, y_k = local(h.local_steps - 1, x_k, before, y)
    x_mean, y_mean = fed.mean(fed.map(lambda c, k, x, y: (x, y), key, x_k, y_k), name="x, y", around=(x, y))
    return x_k, fed.problem.project_upper(x_mean), y_mean


def _with_own_inner(
    h: Method, c: Client, x: tree.Tree, y: tree.Tree, momentum: Any, key: Array
) -> tuple[tree.Tree, tree.Tree]:
    """Alg. 3, lines 4–5, I times: x_k and y_k. (With momentum 1 that is case II of Alg. 1.)

    Each step's inner value and the next one's gradient are at one point and on one minibatch, hence one evaluation.
    """
    inner, plain = jax.random.split(key)
    through_g = c.r_x(x, c.lower(inner, h.batch_size), slope(c.problem, y))
    x = tree.step(x, h.step, plus_h(c, x, y, through_g, plain, h.batch_size))
    step = _own_step(h, c, momentum, key)
    x, y = c.loop(h.local_steps, lambda t, z: step(t + 1, z), (x, y), before=1)
    return x, _track(y, momentum, c.r(x, c.lower(inner, h.batch_size, h.local_steps)))


def _own_step(h: Method, c: Client, momentum: Any, key: Array) -> Callable[[Any, Any], Any]:
    """(t, (x, y)) -> (x, y): y by the client's inner value at x, then x by the gradient with that y."""
    inner, plain = jax.random.split(key)

    def step(t: Any, z: tuple[tree.Tree, tree.Tree]) -> tuple[tree.Tree, tree.Tree]:
        x, y = z
        value, pullback = c.r_and_pullback(x, c.lower(inner, h.batch_size, t))
        y = _track(y, momentum, value)
        through_g = pullback(slope(c.problem, y))
        return tree.step(x, h.step, plus_h(c, x, y, through_g, plain, h.batch_size, t)), y

    return step


def _track(y: tree.Tree, momentum: Any, value: tree.Tree) -> tree.Tree:
    """(1 − β)y + β·value."""
    return tree.step(y, momentum, tree.sub(y, value))
