"""The methods again, in NumPy: plain loops over the clients, explicit matrices, written only from the papers.

A problem here is any object with the weights `p` and the derivatives f_x, f_y, g_y, g_yy, g_xy of client i. With full
batches each method is a deterministic map, so the library must give the same numbers, round by round.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

Vector = np.ndarray
Pair = tuple[Vector, Vector]
Rule = Callable[[Vector], Vector]  # a gradient -> what is subtracted
Cohort = Sequence[int]


def everyone(problem: Any, rounds: int) -> list[Cohort]:
    """Full participation."""
    return [range(len(problem.p))] * rounds


def mean(problem: Any, cohort: Cohort, values: Sequence[Vector]) -> Vector:
    """Σ p_i v_i / Σ p_i over the cohort."""
    total, weight = np.zeros_like(values[0]), 0.0
    for i, value in zip(cohort, values, strict=True):
        total = total + problem.p[i] * value
        weight += problem.p[i]
    return total / weight


@dataclass
class Nest:
    """The FedNest family's hyperparameters by the paper's letters."""

    alpha: float
    beta: float
    T: int
    tau_inner: Sequence[int]  # τ_i of the inner optimizer
    tau_outer: Sequence[int]  # and of the outer one
    N: int
    inverse_l: float  # 1/ℓ_{g,1}
    neumann: str = "sum"
    scaled: bool = False  # α_i = α/τ_i, β_i = β/τ_i
    kind: str = "bilevel"  # or "minimax", "compositional"
    project: Callable[[Vector], Vector] = lambda x: x
    draw: Callable[..., int] | None = None  # N' of (client, local step), for neumann="random"
    inner_rule: Callable[[], "Rule"] | None = None  # an optimizer for local steps on y, and
    outer_rule: Callable[[], "Rule"] | None = None  # on x

    def inner_steps(self, i: int) -> "Rule":
        """A run of local steps on y: what is subtracted, for each direction."""
        return (
            (lambda g: self.beta_i(i) * g)
            if self.inner_rule is None
            else self._scaled(i, self.tau_inner, self.inner_rule())
        )

    def outer_steps(self, i: int) -> "Rule":
        """The same on x."""
        return (
            (lambda g: self.alpha_i(i) * g)
            if self.outer_rule is None
            else self._scaled(i, self.tau_outer, self.outer_rule())
        )

    def _scaled(self, i: int, tau: Sequence[int], rule: "Rule") -> "Rule":
        return (lambda g: rule(g) / tau[i]) if self.scaled else rule

    def alpha_i(self, i: int) -> float:
        return self.alpha / self.tau_outer[i] if self.scaled else self.alpha

    def beta_i(self, i: int) -> float:
        return self.beta / self.tau_inner[i] if self.scaled else self.beta


def fed_inn(problem: Any, s: Nest, cohort: Cohort, x: Vector, y: Vector) -> Vector:
    """Alg. 4."""
    q = mean(problem, cohort, [problem.g_y(i, x, y) for i in cohort])
    last = []
    for i in cohort:
        y_i, move = y, s.inner_steps(i)
        for _ in range(s.tau_inner[i]):
            y_i = y_i - move(problem.g_y(i, x, y_i) - problem.g_y(i, x, y) + q)
        last.append(y_i)
    return mean(problem, cohort, last)


def local_y(problem: Any, s: Nest, i: int, x: Vector, y: Vector) -> Vector:
    """Alg. 6, lines 3–6."""
    move = s.inner_steps(i)
    for _ in range(s.tau_inner[i]):
        y = y - move(problem.g_y(i, x, y))
    return y


def lfed_inn(problem: Any, s: Nest, cohort: Cohort, x: Vector, y: Vector) -> Vector:
    """Alg. 6."""
    return mean(problem, cohort, [local_y(problem, s, i, x, y) for i in cohort])


def conjugate_gradients(matrix: np.ndarray, b: Vector, iterations: int) -> Vector:
    """Hestenes and Stiefel 1952, from zero, a fixed number of iterations."""
    p, r = np.zeros_like(b), b.copy()
    d = r.copy()
    for _ in range(iterations):
        if r @ r == 0:
            break
        a = (r @ r) / (d @ matrix @ d)
        p = p + a * d
        r_new = r - a * (matrix @ d)
        d = r_new + ((r_new @ r_new) / (r @ r)) * d
        r = r_new
    return p


def inverse_product(s: Nest, hessian: np.ndarray, b: Vector, terms: int | None) -> Vector:
    """About H⁻¹b; `terms` is N' where it is drawn."""
    contraction = np.eye(len(b)) - s.inverse_l * hessian
    if s.neumann == "sum":
        return s.inverse_l * sum(np.linalg.matrix_power(contraction, n) @ b for n in range(s.N + 1))
    if s.neumann == "random":
        return s.N * s.inverse_l * np.linalg.matrix_power(contraction, terms) @ b
    return conjugate_gradients(hessian, b, s.N)


def fed_ihgp(problem: Any, s: Nest, cohort: Cohort, x: Vector, y: Vector) -> Vector:
    """Alg. 3; in the compositional case p = mean ∇f_i(y)."""
    if s.kind == "compositional":
        return mean(problem, cohort, [problem.outer_gradient(i, y) for i in cohort])
    b = mean(problem, cohort, [problem.f_y(i, x, y) for i in cohort])
    hessian = mean(problem, cohort, [problem.g_yy(i, x, y) for i in cohort])
    return inverse_product(s, hessian, b, None if s.draw is None else s.draw())


def global_hypergradient(problem: Any, s: Nest, cohort: Cohort, x: Vector, y: Vector) -> Vector:
    """h of Alg. 2, lines 3–8."""
    if s.kind == "minimax":
        return mean(problem, cohort, [problem.f_x(i, x, y) for i in cohort])
    p = fed_ihgp(problem, s, cohort, x, y)
    if s.kind == "compositional":
        own = [problem.extra_gradient(i, x) + problem.jacobian(i, x).T @ p for i in cohort]
    else:
        own = [problem.f_x(i, x, y) - problem.g_xy(i, x, y) @ p for i in cohort]
    return mean(problem, cohort, own)


def fed_out(problem: Any, s: Nest, cohort: Cohort, x: Vector, y: Vector) -> Vector:
    """Alg. 2."""
    h = global_hypergradient(problem, s, cohort, x, y)
    last = []
    for i in cohort:
        x_i, move = x, s.outer_steps(i)
        for _ in range(s.tau_outer[i]):
            x_i = x_i - move(problem.f_x(i, x_i, y) - problem.f_x(i, x, y) + h)
        last.append(x_i)
    return s.project(mean(problem, cohort, last))


def local_x(problem: Any, s: Nest, i: int, x: Vector, y: Vector) -> Vector:
    """Alg. 5, lines 4–10, with ∇_y f_i where the paper misprints ∇_x f_i."""
    move = s.outer_steps(i)
    for v in range(s.tau_outer[i]):
        if s.kind == "minimax":
            h = problem.f_x(i, x, y)
        elif s.kind == "compositional":
            h = problem.extra_gradient(i, x) + problem.jacobian(i, x).T @ problem.outer_gradient(i, y)
        else:
            terms = None if s.draw is None else s.draw(i, v)
            solved = inverse_product(s, problem.g_yy(i, x, y), problem.f_y(i, x, y), terms)
            h = problem.f_x(i, x, y) - problem.g_xy(i, x, y) @ solved
        x = x - move(h)
    return x


def lfed_out(problem: Any, s: Nest, cohort: Cohort, x: Vector, y: Vector) -> Vector:
    """Alg. 5."""
    return s.project(mean(problem, cohort, [local_x(problem, s, i, x, y) for i in cohort]))


def alternating(inner: Callable[..., Vector], outer: Callable[..., Vector]) -> Callable[..., Pair]:
    """One round of Alg. 1: y is new when x moves."""

    def one_round(problem: Any, s: Nest, cohort: Cohort, x: Vector, y: Vector) -> Pair:
        for _ in range(s.T):
            y = inner(problem, s, cohort, x, y)
        return outer(problem, s, cohort, x, y), y

    return one_round


def non_alternating(problem: Any, s: Nest, cohort: Cohort, x: Vector, y: Vector) -> Pair:
    """Appendix H.1: the nested loop within the client, [x_i, y_i] averaged once."""
    xs, ys = [], []
    for i in cohort:
        y_i = y
        for _ in range(s.T):
            y_i = local_y(problem, s, i, x, y_i)
        xs.append(local_x(problem, s, i, x, y_i))
        ys.append(y_i)
    return s.project(mean(problem, cohort, xs)), mean(problem, cohort, ys)


NEST: dict[str, Callable[..., Pair]] = {  # Table 2 and Appendix H.1
    "FedNest": alternating(fed_inn, fed_out),
    "LFedNest": alternating(lfed_inn, lfed_out),
    "FedNestSGD": alternating(lfed_inn, fed_out),
    "LFedNestSVRG": alternating(fed_inn, lfed_out),
    "LFedNestNonAlt": non_alternating,
}


def nest(name: str, problem: Any, s: Nest, start: Pair, who: Sequence[Cohort]) -> Iterator[Pair]:
    """The variables at the start and after each round."""
    x, y = start
    yield x, y
    for cohort in who:
        x, y = NEST[name](problem, s, cohort, x, y)
        yield x, y


# Saddle points (Hou et al. 2021).


@dataclass
class Saddle:
    """Steps, local steps and the set of x."""

    alpha: float
    beta: float
    tau: Sequence[int]
    project: Callable[[Vector], Vector] = lambda x: x


def fedavg_saddle(problem: Any, s: Saddle, start: Pair, who: Sequence[Cohort]) -> Iterator[Pair]:
    """Simultaneous local descent and ascent, then the mean."""
    x, y = start
    yield x, y
    for cohort in who:
        xs, ys = [], []
        for i in cohort:
            x_i, y_i = x, y
            for _ in range(s.tau[i]):
                down, up = problem.f_x(i, x_i, y_i), problem.f_y(i, x_i, y_i)
                x_i, y_i = x_i - s.alpha * down, y_i + s.beta * up
            xs.append(x_i)
            ys.append(y_i)
        x, y = s.project(mean(problem, cohort, xs)), mean(problem, cohort, ys)
        yield x, y


def scaffold_saddle(problem: Any, s: Saddle, start: Pair, who: Sequence[Cohort]) -> Iterator[Pair]:
    """SCAFFOLD (Karimireddy et al. 2020, Alg. 1, option II, server step 1) on the field (∇_x f, −∇_y f).

    With weights, c ← c + Σ_{i∈S} p_i (c_i⁺ − c_i), which keeps c = Σ p_i c_i.
    """
    x, y = start
    n = len(problem.p)
    c_x, c_y = np.zeros_like(x), np.zeros_like(y)
    own_x, own_y = [np.zeros_like(x) for _ in range(n)], [np.zeros_like(y) for _ in range(n)]
    yield x, y
    for cohort in who:
        xs, ys = [], []
        move_x, move_y = np.zeros_like(x), np.zeros_like(y)
        for i in cohort:
            x_i, y_i = x, y
            for _ in range(s.tau[i]):
                d_x, d_y = problem.f_x(i, x_i, y_i), -problem.f_y(i, x_i, y_i)
                x_i, y_i = x_i - s.alpha * (d_x - own_x[i] + c_x), y_i - s.beta * (d_y - own_y[i] + c_y)
            new_x = own_x[i] - c_x + (x - x_i) / (s.tau[i] * s.alpha)
            new_y = own_y[i] - c_y + (y - y_i) / (s.tau[i] * s.beta)
            move_x = move_x + problem.p[i] * (new_x - own_x[i])
            move_y = move_y + problem.p[i] * (new_y - own_y[i])
            own_x[i], own_y[i] = new_x, new_y
            xs.append(x_i)
            ys.append(y_i)
        x, y = s.project(mean(problem, cohort, xs)), mean(problem, cohort, ys)
        c_x, c_y = c_x + move_x, c_y + move_y
        yield x, y


# A single level.


def fedavg(
    problem: Any, s: Saddle, x: Vector, who: Sequence[Cohort], rule: Callable[[], Rule] | None = None, mu: float = 0.0
) -> Iterator[Vector]:
    """McMahan et al. 2017; with μ, FedProx (Li et al. 2020, Alg. 2); with a rule, local steps by an optimizer."""
    yield x
    for cohort in who:
        last = []
        for i in cohort:
            x_i, move = x, (lambda g: s.alpha * g) if rule is None else rule()
            for _ in range(s.tau[i]):
                x_i = x_i - move(problem.f_x(i, x_i) + mu * (x_i - x))
            last.append(x_i)
        x = s.project(mean(problem, cohort, last))
        yield x


def scaffold(problem: Any, s: Saddle, x: Vector, who: Sequence[Cohort], server: float) -> Iterator[Vector]:
    """Karimireddy et al. 2020, Alg. 1, option II; with weights, c ← c + Σ_{i∈S} p_i (c_i⁺ − c_i)."""
    n = len(problem.p)
    c, own = np.zeros_like(x), [np.zeros_like(x) for _ in range(n)]
    yield x
    for cohort in who:
        moved, change = [], np.zeros_like(x)
        for i in cohort:
            y_i = x
            for _ in range(s.tau[i]):
                y_i = y_i - s.alpha * (problem.f_x(i, y_i) - own[i] + c)
            plus = own[i] - c + (x - y_i) / (s.tau[i] * s.alpha)
            change = change + problem.p[i] * (plus - own[i])
            own[i] = plus
            moved.append(y_i - x)
        x, c = s.project(x + server * mean(problem, cohort, moved)), c + change
        yield x


def fedsvrg(problem: Any, s: Saddle, x: Vector, who: Sequence[Cohort], scaled: bool) -> Iterator[Vector]:
    """FedOut without y."""
    yield x
    for cohort in who:
        h = mean(problem, cohort, [problem.f_x(i, x) for i in cohort])
        last = []
        for i in cohort:
            x_i, step = x, s.alpha / s.tau[i] if scaled else s.alpha
            for _ in range(s.tau[i]):
                x_i = x_i - step * (problem.f_x(i, x_i) - problem.f_x(i, x) + h)
            last.append(x_i)
        x = s.project(mean(problem, cohort, last))
        yield x


# Optimizers: each is a function that is given gradients one after the other, and says what to subtract.


def momentum(step: float, decay: float) -> Rule:
    """Polyak's: m ← g + decay·m."""
    m: Any = 0.0

    def rule(g: Vector) -> Vector:
        nonlocal m
        m = g + decay * m
        return step * m

    return rule


def adam(step: float, b1: float, b2: float, eps: float) -> Rule:
    """Kingma and Ba 2015, Alg. 1, where the bias of both moments is corrected."""
    m, v, t = 0.0, 0.0, 0

    def rule(g: Vector) -> Vector:
        nonlocal m, v, t
        t += 1
        m, v = b1 * m + (1 - b1) * g, b2 * v + (1 - b2) * g * g
        return step * (m / (1 - b1**t)) / (np.sqrt(v / (1 - b2**t)) + eps)

    return rule


def adaptive(kind: str, step: float, b1: float, b2: float, tau: float, start: float | None = None) -> Rule:
    """FedAdagrad, FedYogi and FedAdam (Reddi et al. 2021, Alg. 2): v starts at τ² (None), and no bias is corrected."""
    m, v = 0.0, tau**2 if start is None else start

    def rule(g: Vector) -> Vector:
        nonlocal m, v
        delta = -g
        m = b1 * m + (1 - b1) * delta
        if kind == "adagrad":
            v = v + delta**2
        elif kind == "yogi":
            v = v - (1 - b2) * delta**2 * np.sign(v - delta**2)
        else:
            v = b2 * v + (1 - b2) * delta**2
        return -step * m / (np.sqrt(v) + tau)

    return rule


def with_server(
    one_round: Callable[[Any, Cohort], Any],
    rules: Sequence[Rule | None],
    project: Any,
    start: Any,
    who: Sequence[Cohort],
) -> Iterator[Any]:
    """Any method with an optimizer at the server: variables by round. A rule of None keeps the method's update."""
    z = start
    yield z
    for cohort in who:
        after = one_round(z, cohort)
        moved = [b if rule is None else a - rule(a - b) for a, b, rule in zip(z, after, rules, strict=True)]
        z = (project(moved[0]), *moved[1:])
        yield z
