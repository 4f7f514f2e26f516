"""FedDRO, DS-FedDRO, and FedAvg for compositional problems (Khanduri et al.)."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array

from rookery.base import tree
from rookery.data.rows import Count
from rookery.language.fed import AtLeastOne, BatchSize, Client, Fed, PerClient, Share, Step
from rookery.parts import output
from rookery.parts.compositional import first_value, plus_h, slope
from rookery.parts.momentum import moving_average, storm
from rookery.problems.problems import Compositional

Output = Literal["last", "random"]


class State(NamedTuple):
    """The output: x, and the inner value y that goes with it."""

    x: tree.Tree
    y: tree.Tree
    done: Any = None  # rounds, where they are counted
    last: Any = None  # the last iterate (x, y), with output="random"

    @property
    def now(self) -> tuple[tree.Tree, tree.Tree]:
        """The point from which the next round starts."""
        return (self.x, self.y) if self.last is None else self.last


def _start(h: "FedDRO | DSFedDRO", x: tree.Tree, y: tree.Tree) -> State:
    return State(x, y, jnp.int32(0), None if h.output == "last" else (x, y))


def _after(h: "FedDRO | DSFedDRO", state: State, x: tree.Tree, y: tree.Tree, key: Array) -> State:
    """Return the state after a round that ended at x and y."""
    done = state.done + 1
    if h.output == "last":
        return State(x, y, done)
    x_out, y_out = output.one_of(done, (x, y), (state.x, state.y), key)
    return State(x_out, y_out, done, (x, y))


@dataclass(frozen=True)
class FedDRO:
    """Local SGD on h + f(g) in which the clients share their estimate ȳ of the inner value at every step.

    FedDRO solves compositional problems, min over x of h(x) + f(g(x)) with g = mean g_k, whose f is known to all.

    Each round takes I steps (Alg. 2, lines 3–11). A step is
        x_k ← x_k − η(∇h_k(x_k; ξ) + ∇g_k(x_k; ζ)ᵀ∇f(ȳ)), which is (7);
        y_k = (1−β)(ȳ − g_k(x_k^old; ζ)) + g_k(x_k; ζ), which is (8), on the minibatch ζ of the next step;
        ȳ ← mean y_k.
    After the last step, x ← mean x_k. Before the first round, ȳ = mean g_k(x).

    Departures from the paper:
        x_k^old in a round's first step. As printed, x_k has been overwritten by the mean x̄ by then, and (8) subtracts
        g_k(x̄) from a ȳ formed at the clients' own points. Every round leaves the error mean g_k(x_k) − g(x̄) in ȳ. It is
        of order ηI and decays at the rate β. With β = cη, as in Theorem 4.3, the method converges to a wrong point
        (unless d_g = 1 and h = 0, where all client gradients have the factor f'(ȳ) and vanish together). Here each
        client remembers its x_k from before the mean, and (8) subtracts g_k at that point. The exchanges are the same,
        and the error falls with η. `as_printed=True` restores the paper's order;
        the output is the last iterate. The paper's x̄^{a(T)}, a(T) uniform, is `output="random"`, drawn from the
        averaged iterates, one per round. (The state then also holds the last iterate, which doubles what a round
        broadcasts.)
        cohorts: the paper uses all clients. With a cohort, ȳ and x are the cohort's means. A client that sat out the
        last round subtracts g_k(x̄), so that only a part of the printed error is removed.

    Exchanges per round: I. I − 1 of them carry y, and the last one carries x and y. At the start: 1.

    Example:
        >>> import jax.numpy as jnp, rookery as rk
        >>> problem = rk.Compositional(lambda x, b: jnp.mean(b["a"] * x + b["s"], axis=0), lambda v: jnp.sqrt(1 + v**2))
        >>> lines = [(3.0, 2.0), (-1.0, -2.0)]  # g_1 = 3x + 2, g_2 = −x − 2: FedAvg goes to −0.76
        >>> clients = rk.Clients(lower=[{"a": jnp.array([a]), "s": jnp.array([s])} for a, s in lines])
        >>> method = rk.FedDRO(step=0.05, momentum=0.5, local_steps=5)
        >>> abs(float(rk.solve(problem, clients, method, (1.5, None), rounds=200).x)) < 1e-6
        True

    Reference: Khanduri et al., On Federated Compositional Optimization: Algorithms, Analysis, and Guarantees, Alg. 2.
    """

    step: Step = 0.01  # η
    momentum: Share = 0.1  # β: the weight of the new value in (8)
    local_steps: AtLeastOne = 1  # I
    batch_size: BatchSize = None  # of ξ and ζ; None: all the client's data
    first_batch: BatchSize = None  # of the first ȳ; None: all the client's data
    as_printed: bool = False
    output: Output = "last"

    solves: ClassVar[tuple[type, ...]] = (Compositional,)
    needs: ClassVar[tuple[str, ...]] = ("known outer",)

    def init(self, fed: Fed, x: tree.Tree, y: tree.Tree, key: Array) -> State:
        """Start at ȳ = mean g_k(x)."""
        return _start(self, x, first_value(fed, x, key, self.first_batch))

    def memory(self, x: tree.Tree, y: tree.Tree) -> Any:
        """A client's memory: its last x_k from before the mean, and the number of rounds done by then."""
        return None if self.as_printed else (x, jnp.int32(0))

    def round(self, fed: Fed, state: State, key: Array) -> State:
        """Alg. 2, I times lines 3–11."""
        local, pick = jax.random.split(key)
        x, y = state.now

        def last_point(c: Client, k: Array, memory: Any) -> tuple[tree.Tree, Any]:
            point, when = memory
            return jax.tree.map(lambda mine, mean: jnp.where(when == state.done, mine, mean), point, x), memory

        x_old = fed.map(lambda c, k: x, key) if self.as_printed else fed.map_state(last_point, key)
        x_k, x_mean, y_mean = _share_inner(self, fed, x, x_old, y, self.momentum, local)
        if not self.as_printed:
            fed.map_state(lambda c, k, _, x_k: (None, (x_k, state.done + 1)), key, x_k)
        return _after(self, state, x_mean, y_mean, pick)


@dataclass(frozen=True)
class DSFedDRO:
    """DS-FedDRO: local steps with the client's own running inner value, and step sizes at the server for x and y.

    DS-FedDRO solves compositional problems, min over x of h(x) + f(g(x)) with g = mean g_k, whose f is known to all.

    Each round takes I local steps (Alg. 3, line 5),
        x_k ← x_k − η(∇h_k(x_k; ξ) + ∇g_k(x_k; ζ)ᵀ∇f(y_k)),
        y_k ← (1−β)y_k + βg_k(x_k; ζ), on the minibatch ζ of the next step;
    then x ← x − γ_x mean(x − x_k) and y ← y − γ_y mean(y − y_k) (line 7). Before the first round, y = mean g_k(x).

    At the limit mean(x − x_k) = mean(y − y_k) = 0 for any γ_x and γ_y. The method converges as β(I − 1) → 0. A fixed β
    leaves an error of that order, which is large if the clients' inner functions differ.

    Departures from the paper: line 5 says "using (7)", with a ȳ that no client has between two exchanges; here it is
    the client's own y_k. The output is as in `FedDRO`. The paper uses all clients; with a cohort the means are the
    cohort's.

    Exchanges per round: 1. At the start: 1.

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
        """Start at y = mean g_k(x)."""
        return _start(self, x, first_value(fed, x, key, self.first_batch))

    def round(self, fed: Fed, state: State, key: Array) -> State:
        """Alg. 3, I times lines 3–10."""
        local, pick = jax.random.split(key)
        x, y = state.now

        def moved(c: Client, k: Array) -> tuple[tree.Tree, tree.Tree]:
            return tree.sub((x, y), _keep_inner(self, c, x, y, self.momentum, k))

        d_x, d_y = fed.mean(fed.map(moved, local), name="x, y")  # line 7
        x_new = fed.problem.project_upper(tree.step(x, self.server_step, d_x))
        return _after(self, state, x_new, tree.step(y, self.server_inner_step, d_y), pick)


@dataclass(frozen=True)
class CompositionalFedAvg:
    """FedAvg for compositional problems: local steps with the client's own inner value. It does not converge.

    The method runs on compositional problems, min over x of h(x) + f(g(x)) with g = mean g_k, whose f is known to all.

    Each round takes I local steps (Alg. 1, line 5), x_k ← x_k − η(∇h_k(x_k) + ∇g_k(x_k)ᵀ∇f(y_k)) and y_k ← g_k(x_k);
    then x ← mean x_k and either y_k ← g_k(x) (case I) or y_k ← mean y_k (case II) (line 7).

    Case I is FedAvg on another problem, mean f(g_k(x)), and fails for every I; case II fails for I > 1 (Theorem 4.1).
    `share_inner_every_step=True` is the modified version of Theorem 4.2, which converges: y_k ← mean y_k at every step,
    in either case.

    Departures from the paper: the plain part h; minibatches, each of which serves g_k and then ∇g_k at the same point;
    in case I the first y_k, too, is g_k(x). In case I there is no common y, and the y returned is that of the start.
    The paper uses all clients; with a cohort the means are the cohort's.

    Exchanges per round: 1; I if the inner value is shared at every step. At the start: 1, in case I none.

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
        """Start at y = mean g_k(x), if it is shared."""
        shared = self.share_inner_every_step or self.case == "II"
        return State(x, first_value(fed, x, key, self.first_batch) if shared else y)

    def round(self, fed: Fed, state: State, key: Array) -> State:
        """Alg. 1, I times lines 3–9."""
        x, y = state.now
        if self.share_inner_every_step:
            x_old = fed.map(lambda c, k: x, key)
            return State(*_share_inner(self, fed, x, x_old, y, None, key)[1:])
        if self.case == "I":
            local = lambda c, k: c.loop(self.local_steps, _value_and_step(self, c, 1.0, k), (x, y))[0]
            return State(fed.problem.project_upper(fed.mean(fed.map(local, key), name="x", around=x)), y)
        both = lambda c, k: _keep_inner(self, c, x, y, 1.0, k)
        x_mean, y_mean = fed.mean(fed.map(both, key), name="x, y", around=(x, y))
        return State(fed.problem.project_upper(x_mean), y_mean)


Method = FedDRO | DSFedDRO | CompositionalFedAvg


def _share_inner(
    h: Method, fed: Fed, x: tree.Tree, x_old: PerClient, y: tree.Tree, momentum: Any, key: Array
) -> tuple[PerClient, tree.Tree, tree.Tree]:
    """Alg. 2, I times lines 3–11, from x, x_k^old and ȳ. Returns the clients' x_k, and the means x̄ and ȳ.

    Without momentum y_k = g_k(x_k), which is (8) with β = 1 and the modified Alg. 1 of Theorem 4.2.
    """

    def update(t: Count, x_k: PerClient, x_old: PerClient, y: tree.Tree) -> tuple[PerClient, PerClient]:  # line 6
        f_y = slope(fed.problem, y)

        def descend(c: Client, k: Array, x: tree.Tree) -> tree.Tree:  # (7)
            inner, plain = jax.random.split(k)
            through_g = c.r_x(x, c.lower(inner, h.batch_size, t), f_y)
            return tree.step(x, h.step, plus_h(c, x, y, through_g, plain, h.batch_size, t))

        def estimate(c: Client, k: Array, old: tree.Tree, new: tree.Tree) -> tree.Tree:  # (8)
            inner, _ = jax.random.split(k)
            batch = c.lower(inner, h.batch_size, t + 1)
            value = c.r(new, batch)
            return value if momentum is None else storm(value, y, c.r(old, batch), momentum)

        x_new = fed.map(descend, key, x_k)
        return x_new, fed.map(estimate, key, x_old, x_new)

    def step(t: Count, carry: tuple[PerClient, PerClient, tree.Tree]) -> tuple[PerClient, PerClient, tree.Tree]:
        x_k, y_k = update(t, *carry)
        return x_k, x_k, fed.mean(y_k, name="y", around=carry[2])

    last = h.local_steps - 1
    x_k, x_old, y = fed.loop(last, step, (fed.map(lambda c, k: x, key), x_old, y))
    x_k, y_k = update(last, x_k, x_old, y)
    both = fed.map(lambda c, k, x, y: (x, y), key, x_k, y_k)
    x_mean, y_mean = fed.mean(both, name="x, y", around=(x, y))  # line 8
    return x_k, fed.problem.project_upper(x_mean), y_mean


def _keep_inner(
    h: Method, c: Client, x: tree.Tree, y: tree.Tree, momentum: Any, key: Array
) -> tuple[tree.Tree, tree.Tree]:
    """Return a client's x_k and y_k after I steps of line 5 of Alg. 3. With momentum 1 it is case II of Alg. 1.

    The value that ends a step and the gradient that starts the next one are taken at one point and on one minibatch.
    Each turn of the loop therefore evaluates both together.
    """
    inner, plain = jax.random.split(key)
    through_g = c.r_x(x, c.lower(inner, h.batch_size), slope(c.problem, y))
    x = tree.step(x, h.step, plus_h(c, x, y, through_g, plain, h.batch_size))
    step = _value_and_step(h, c, momentum, key)
    x, y = c.loop(h.local_steps, lambda t, z: step(t + 1, z), (x, y), before=1)
    return x, moving_average(y, c.r(x, c.lower(inner, h.batch_size, h.local_steps)), momentum)


def _value_and_step(h: Method, c: Client, momentum: Any, key: Array) -> Callable[[Any, Any], Any]:
    """Return step(t, (x, y)) -> (x, y): y ← (1−β)y + βg_k(x; ζ), then x by the gradient with that y."""
    inner, plain = jax.random.split(key)

    def step(t: Any, z: tuple[tree.Tree, tree.Tree]) -> tuple[tree.Tree, tree.Tree]:
        x, y = z
        value, pullback = c.r_and_pullback(x, c.lower(inner, h.batch_size, t))
        y = moving_average(y, value, momentum)
        through_g = pullback(slope(c.problem, y))
        return tree.step(x, h.step, plus_h(c, x, y, through_g, plain, h.batch_size, t)), y

    return step
