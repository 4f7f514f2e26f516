"""The papers' own step sizes: the constants of a problem in, an algorithm with its hyperparameters out.

FedNest (Tarzanagh et al., ICML 2022): Theorem 3.1 with (18) and (55)–(56) for bilevel problems, (64)–(65) for minimax
and (72)–(73) for compositional ones; Theorem 3.2 for single-level ones. The theorem leaves ᾱ, T and N to orders of
magnitude in κ and K: here the constant in front of each is one, and all can be given.

Read otherwise than printed:
    (27) has L_y in the last term of a_1, a_2 and a_3, where (51) and (54) have L_yx: L_yx;
    (64) has ℓ_{l,0}: ℓ_{f,0}; (65b) has μ_g and ℓ_{g,1}: μ_f and ℓ_{f,1}, as g = −f;
    (11) and D̃_f of (18) have ℓ_{f,1} where ∇_y f is bounded, which ℓ_{f,0} does: the larger of the two;
    (56) caps β by 1/(8ℓ_{g,1}), Lemma C.3 by 1, too: by 1/max(1, 8ℓ_{g,1});
    (73b) caps β by 1/(8ℓ_{r,0}), but the lower Hessian is the identity and Lemma C.3 needs β < 1/(6ℓ_{g,1}), with
        ℓ_{g,1} = 1 at the least: 1/(8 max(1, ℓ_{r,0})).

The constants do not scale: with f ten times as large, 1/(216M_f² + 5M_f) falls by a hundred, not ten. And they are
safe rather than quick; steps ten or a hundred times as long mostly converge, too.
"""

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from rookery.algorithms import FedNest, FedSVRG
from rookery.tasks.quadratic import solution
from rookery.tasks.task import Task


class Smoothness(NamedTuple):
    """What Lemma C.1 makes of a problem's constants; the class of problem no longer shows."""

    mu: float  # μ_g: g is strongly convex in y
    l_g: float  # ℓ_{g,1}, in the cap of β
    l_y: float  # L_y: y*(x) is Lipschitz
    l_yx: float  # L_yx: so is its derivative
    m_f: float  # M_f: the hypergradient is, in y and in x
    l_f: float  # L_f: ∇Φ is
    sigma: float  # σ̃_f: standard deviation of a client's estimate
    d_f: float  # D̃_f: bound on it, in the mean square
    eta_l_yx: float  # η·L_yx, where η > 0 is free in (27)
    l_yx_eta: float  # L_yx/η


@dataclass(frozen=True)
class Constants:
    """A bilevel problem's: Assumptions A and B, each for every client."""

    mu_g: float  # μ_g: g_i is strongly convex in y
    l_f0: float  # ℓ_{f,0}: of f_i, i.e. a bound on its gradient
    l_f1: float  # ℓ_{f,1}: of ∇f_i, in (x, y)
    l_g1: float  # ℓ_{g,1}: of ∇g_i, in (x, y)
    l_g2: float = 0.0  # ℓ_{g,2}: of ∇²g_i
    sigma_f: float = 0.0  # σ_f: standard deviation of ∇f_i(z; ξ)
    sigma_g1: float = 0.0  # σ_{g,1}: of ∇g_i(z; ζ)
    sigma_g2: float = 0.0  # σ_{g,2}: of ∇²g_i(z; ζ)

    @property
    def kappa(self) -> float:
        """κ_g = ℓ_{g,1}/μ_g."""
        return self.l_g1 / self.mu_g

    def smoothness(self) -> Smoothness:
        """(18), with η = M_f/L_y of the proof of Corollary 3.1."""
        kappa, mu = self.kappa, self.mu_g
        l_yx = (1 + kappa) * self.l_g2 * (1 + kappa) / mu
        curved = self.l_f0 / mu * self.l_g2 * (1 + kappa)
        m_f = self.l_f1 * (1 + kappa) + curved
        variance = self.sigma_f**2 + 3 / mu**2 * (
            (self.sigma_f**2 + self.l_f0**2) * (self.sigma_g2**2 + 2 * self.l_g1**2) + self.sigma_f**2 * self.l_g1**2
        )
        return Smoothness(
            mu=mu,
            l_g=self.l_g1,
            l_y=kappa,
            l_yx=l_yx,
            m_f=m_f,
            l_f=self.l_f1 + kappa * (self.l_f1 + m_f) + curved,
            sigma=math.sqrt(variance),
            d_f=math.sqrt((self.l_f0 + 2 * kappa * max(self.l_f0, self.l_f1)) ** 2 + variance),
            eta_l_yx=l_yx * m_f / kappa,
            l_yx_eta=l_yx * kappa / m_f,
        )

    def bias(self, terms: int) -> float:
        """b of (11): how far the hypergradient's mean may be off with N = terms."""
        return self.kappa * max(self.l_f0, self.l_f1) * (1 - 1 / self.kappa) ** terms

    def neumann_terms(self, rounds: int) -> int:
        """N = ⌈κ_g log K⌉, as Corollary 3.1 asks; then b ≤ κ_g max(ℓ_{f,0}, ℓ_{f,1})/K."""
        return max(1, math.ceil(self.kappa * math.log(rounds)))


@dataclass(frozen=True)
class MinimaxConstants:
    """A minimax problem's: Assumptions E and F."""

    mu_f: float  # μ_f: f_i is strongly concave in y
    l_f0: float  # ℓ_{f,0}: of f_i, i.e. a bound on its gradient
    l_f1: float  # ℓ_{f,1}: of ∇f_i
    l_f2: float = 0.0  # ℓ_{f,2}: of ∇²f_i
    sigma_f: float = 0.0  # σ_f: standard deviation of ∇f_i(z; ξ)

    @property
    def kappa(self) -> float:
        """κ_f = ℓ_{f,1}/μ_f."""
        return self.l_f1 / self.mu_f

    def smoothness(self) -> Smoothness:
        """(64), with η = 1 of the proof of Corollary 3.2."""
        l_yx = self.l_f2 * (1 + self.kappa) ** 2 / self.mu_f
        return Smoothness(
            mu=self.mu_f,
            l_g=self.l_f1,
            l_y=self.kappa,
            l_yx=l_yx,
            m_f=self.l_f1,
            l_f=self.l_f1 * (1 + self.kappa),
            sigma=self.sigma_f,
            d_f=math.hypot(self.l_f0, self.sigma_f),
            eta_l_yx=l_yx,
            l_yx_eta=l_yx,
        )


@dataclass(frozen=True)
class CompositionalConstants:
    """A compositional problem's, f(r(x)): Assumptions G and H."""

    l_f0: float  # ℓ_{f,0}: of f_i, i.e. a bound on its gradient
    l_f1: float  # ℓ_{f,1}: of ∇f_i
    l_r0: float  # ℓ_{r,0}: of r_i
    l_r1: float = 0.0  # ℓ_{r,1}: of ∇r_i
    sigma_f: float = 0.0  # σ_f: standard deviation of ∇f_i(y; ξ)
    sigma_r0: float = 0.0  # σ_{r,0}: of r_i(x; ζ)
    sigma_r1: float = 0.0  # σ_{r,1}: of ∇r_i(x; ζ)

    def smoothness(self) -> Smoothness:
        """(72), with η = 1/L_yx of the proof of Corollary 3.3; μ_g = 1, as ∇²_y g is the identity."""
        outer = self.l_f0**2 + self.sigma_f**2
        return Smoothness(
            mu=1.0,
            l_g=max(1.0, self.l_r0),
            l_y=self.l_r0,
            l_yx=self.l_r1,
            m_f=self.l_r0 * self.l_f1,
            l_f=self.l_r0**2 * self.l_f1 + self.l_f0 * self.l_r1,
            sigma=math.sqrt(self.l_r0**2 * self.sigma_f**2 + outer * self.sigma_r1**2),
            d_f=math.sqrt(outer * (self.l_r0**2 + self.sigma_r1**2)),
            eta_l_yx=1.0,
            l_yx_eta=self.l_r1**2,
        )


@dataclass(frozen=True)
class SingleLevelConstants:
    """A single-level problem's: Assumptions C and D."""

    l_f: float  # L_f: of ∇f_i
    sigma_f: float = 0.0  # σ_f: standard deviation of ∇f_i(x; ξ); the steps do not depend on it


Nested = Constants | MinimaxConstants | CompositionalConstants


@dataclass(frozen=True)
class Steps:
    """The steps of (55) and what they are the least of."""

    alpha_1: float  # ᾱ1: descent of Φ, (51)
    alpha_2: float  # ᾱ2: β stays below 1/(8ℓ_{g,1}), and 1
    alpha_3: float  # ᾱ3: drift of the local steps, (49)
    alpha_bar: float  # ᾱ
    beta_bar: float  # β̄: y keeps up with x, (54)
    lower_rounds: int  # T
    rounds: int  # K

    @property
    def cap(self) -> float:
        """min{ᾱ1, ᾱ2, ᾱ3}: the step at small K."""
        return min(self.alpha_1, self.alpha_2, self.alpha_3)

    @property
    def alpha(self) -> float:
        """α_k, the same for all k."""
        return min(self.cap, self.alpha_bar / math.sqrt(self.rounds))

    @property
    def beta(self) -> float:
        """β_k = β̄α_k/T."""
        return self.beta_bar * self.alpha / self.lower_rounds


def steps(constants: Nested, rounds: int, lower_rounds: int | None = None, alpha_bar: float | None = None) -> Steps:
    """(55)–(56), for the three classes of nested problems.

    Arguments:
        constants: the problem's.
        rounds: K.
        lower_rounds: T; None: ⌈κ_g⁴⌉, ⌈κ_f⌉ or 1, as Corollaries 3.1–3.3 ask.
        alpha_bar: ᾱ; None: κ_g^{-2.5}, κ_f^{-1} or 1, likewise.
    """
    if isinstance(constants, CompositionalConstants):
        default_t, default_alpha = 1, 1.0
    elif isinstance(constants, MinimaxConstants):
        default_t, default_alpha = math.ceil(constants.kappa), 1 / constants.kappa
    else:
        default_t, default_alpha = math.ceil(constants.kappa**4), constants.kappa**-2.5
    t = default_t if lower_rounds is None else lower_rounds
    s = constants.smoothness()
    alpha_1 = 1 / (2 * s.l_f + 4 * s.m_f * s.l_y + 2 * s.m_f * s.l_yx_eta / s.l_y)
    beta_bar = (11 * s.m_f * s.l_y + s.eta_l_yx * s.d_f**2 * alpha_1 + s.m_f * s.l_y * alpha_1 / 2) / s.mu
    return Steps(
        alpha_1=alpha_1,
        alpha_2=t / (max(1.0, 8 * s.l_g) * beta_bar),
        alpha_3=1 / (216 * s.m_f**2 + 5 * s.m_f),
        alpha_bar=default_alpha if alpha_bar is None else alpha_bar,
        beta_bar=beta_bar,
        lower_rounds=t,
        rounds=rounds,
    )


def fednest(
    constants: Nested,
    rounds: int,
    lower_rounds: int | None = None,
    alpha_bar: float | None = None,
    **others: Any,
) -> FedNest:
    """FedNest with the hyperparameters of Theorem 3.1 and Corollaries 3.1–3.3.

    The steps are those of `steps`, shared out as α_i = α/τ_i and β_i = β/τ_i; N is ⌈κ_g log K⌉ and `hessian_step`
    1/ℓ_{g,1}. FedIHGP is that of Lemma 2.2: the random one, with a fresh cohort for every product. The
    anchors are as stochastic as the rest.

    Arguments:
        constants, rounds, lower_rounds, alpha_bar: as in `steps`.
        others: FedNest's other hyperparameters (`batch_size`, `upper_local_steps`, …); with neumann="sum" the series
            gets the N terms that the random one has in the mean.

    Example:
        >>> method = fednest(Constants(mu_g=1, l_f0=1, l_f1=0.1, l_g1=1.5), rounds=10_000, upper_local_steps=4)
        >>> f"{method.upper_step:.4f}, {method.lower_step:.4f}, T = {method.lower_rounds}, N = {method.neumann_terms}"
        '0.0036, 0.0025, T = 6, N = 14'
    """
    found = steps(constants, rounds, lower_rounds, alpha_bar)
    given: dict[str, Any] = {"scale_steps": True, "anchor_batch": others.get("batch_size")}
    if isinstance(constants, Constants):
        terms = constants.neumann_terms(rounds)
        if others.get("neumann") == "sum":
            terms = max(1, terms - 1)
        given |= {"neumann": "random", "neumann_terms": terms, "resample": True, "hessian_step": 1 / constants.l_g1}
    step = {"upper_step": found.alpha, "lower_step": found.beta, "lower_rounds": found.lower_rounds}
    return FedNest(**(given | step | others))


def fedsvrg(constants: SingleLevelConstants, rounds: int, alpha_bar: float = 1.0, **others: Any) -> FedSVRG:
    """FedSVRG with the step of Theorem 3.2: α = min{1/(3L_f(1 + 8L_f)), ᾱ/√K}, shared out as α_i = α/τ_i.

    Arguments:
        constants: the problem's.
        rounds: K.
        alpha_bar: ᾱ, any positive number.
        others: FedSVRG's other hyperparameters.
    """
    alpha = min(1 / (3 * constants.l_f * (1 + 8 * constants.l_f)), alpha_bar / math.sqrt(rounds))
    given: dict[str, Any] = {"scale_steps": True, "anchor_batch": others.get("batch_size")}
    return FedSVRG(**(given | {"step": alpha} | others))


def quadratic_constants(task: Task, radius: float | None = None) -> Constants:
    """The constants of a `quadratic` task, each the worst of its clients'.

    A quadratic's gradient and the noise of its Hessians' products have no bound over the whole space: ℓ_{f,0}, σ_f and
    σ_{g,1} are bounds on a ball around the start. On quadratics, where ℓ_{g,2} = 0, no hyperparameter depends on
    them.

    Arguments:
        task: made by `rk.tasks.quadratic`, or with data of the same names.
        radius: of the ball; None: twice the distance from the start to the solution.
    """
    start = np.concatenate([np.asarray(part, float) for part in task.init])
    if radius is None:
        closed = solution(task)
        radius = 2 * float(np.linalg.norm(np.concatenate([closed.x, closed.y(closed.x)]) - start))
    lower, upper = _clients_rows(task.clients.lower), _clients_rows(task.clients.upper)
    mu, l_f0, l_f1, l_g1, sigma_f, sigma_g1, sigma_g2 = [], [], [], [], [], [], []
    for low, up in zip(lower, upper, strict=True):
        blank = np.zeros((len(low["A"]), low["B"].shape[2], low["B"].shape[2]))
        g = np.block([[blank, -low["B"].swapaxes(1, 2)], [-low["B"], low["A"]]])
        g_shift = np.concatenate([np.zeros(blank.shape[:2]), low["b"]], axis=1)
        f = np.block([[up["D"], up["E"]], [up["E"].swapaxes(1, 2), up["C"]]])
        f_shift = np.concatenate([up["d"], up["c"]], axis=1)
        mu.append(np.linalg.eigvalsh(low["A"].mean(axis=0))[0])
        l_g1.append(_norm(g.mean(axis=0)))
        l_f1.append(_norm(f.mean(axis=0)))
        l_f0.append(np.linalg.norm(f.mean(axis=0) @ start - f_shift.mean(axis=0)) + l_f1[-1] * radius)
        sigma_f.append(_spread(f, f_shift, start, radius))
        sigma_g1.append(_spread(g, g_shift, start, radius))
        sigma_g2.append(_root_mean_square([_norm(own) for own in g - g.mean(axis=0)]))
    return Constants(
        mu_g=float(min(mu)),
        l_f0=float(max(l_f0)),
        l_f1=float(max(l_f1)),
        l_g1=float(max(l_g1)),
        sigma_f=float(max(sigma_f)),
        sigma_g1=float(max(sigma_g1)),
        sigma_g2=float(max(sigma_g2)),
    )


def _clients_rows(source: Any) -> list[dict[str, np.ndarray]]:
    cuts = np.asarray(source.offsets)[1:]
    split = {name: np.split(np.asarray(rows, float), cuts) for name, rows in source.rows.items()}
    return [{name: parts[i] for name, parts in split.items()} for i in range(len(source.sizes))]


def _spread(hessians: np.ndarray, shifts: np.ndarray, start: np.ndarray, radius: float) -> float:
    """A bound on the standard deviation of the samples' gradients Hz − s, for z in the ball."""
    away, off = hessians - hessians.mean(axis=0), shifts - shifts.mean(axis=0)
    return _root_mean_square(
        [np.linalg.norm(h @ start - s) + _norm(h) * radius for h, s in zip(away, off, strict=True)]
    )


def _norm(matrix: np.ndarray) -> float:
    return float(np.linalg.norm(matrix, 2))


def _root_mean_square(values: list[Any]) -> float:
    return float(np.sqrt(np.mean(np.square(values))))
