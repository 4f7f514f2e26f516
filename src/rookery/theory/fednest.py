"""The step sizes of FedNest and FedSVRG (Tarzanagh et al., ICML 2022).

Theorem 3.1 with (18) and (55)–(56) for bilevel problems, (64)–(65) for minimax and (72)–(73) for compositional ones;
Theorem 3.2 for single-level ones. The theorem leaves ᾱ, T and N to orders of magnitude in κ and K. Here the constant in
front of each is one, and each can be set.

Corrections: what is printed, and after the colon what is used here:
    (27) has L_y in the last term of a_1, a_2 and a_3, where (51) and (54) have L_yx: L_yx;
    (64) has ℓ_{l,0}: ℓ_{f,0}; (65b) has μ_g and ℓ_{g,1}: μ_f and ℓ_{f,1}, as g = −f;
    (11) and D̃_f of (18) have ℓ_{f,1} where ∇_y f is bounded, i.e. by ℓ_{f,0}: the larger of the two;
    (56) caps β by 1/(8ℓ_{g,1}), Lemma C.3 also by 1: by 1/max(1, 8ℓ_{g,1});
    (73b) caps β by 1/(8ℓ_{r,0}), but the lower Hessian is the identity and Lemma C.3 needs β < 1/(6ℓ_{g,1}) with
        ℓ_{g,1} ≥ 1: 1/(8 max(1, ℓ_{r,0})).

The constants do not scale: with f ten times as large, 1/(216M_f² + 5M_f) falls by a hundred, not ten. They are safe
rather than fast; steps ten or a hundred times as long mostly converge, too.
"""

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

from rookery.algorithms import FedNest, FedSVRG


class Smoothness(NamedTuple):
    """The constants of Lemma C.1. They follow from a problem's constants, for all classes of problems."""

    mu: float  # μ_g: strong convexity of g in y
    l_g: float  # ℓ_{g,1}, in the cap of β
    l_y: float  # L_y: Lipschitz constant of y*(x)
    l_yx: float  # L_yx: of the derivative of y*(x)
    m_f: float  # M_f: of the hypergradient, in y and in x
    l_f: float  # L_f: of ∇Φ
    sigma: float  # σ̃_f: standard deviation of a client's estimate
    d_f: float  # D̃_f: bound on that estimate in the mean square
    eta_l_yx: float  # η·L_yx, where η > 0 is free in (27)
    l_yx_eta: float  # L_yx/η


@dataclass(frozen=True)
class Constants:
    """The constants of a bilevel problem, Assumptions A and B. Each holds for every client."""

    mu_g: float  # μ_g: strong convexity of g_i in y
    l_f0: float  # ℓ_{f,0}: Lipschitz constant of f_i, a bound on its gradient
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
        """Return the constants (18), with η = M_f/L_y of the proof of Corollary 3.1."""
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
        """b of (11), a bound on the bias of the hypergradient with N = terms."""
        return self.kappa * max(self.l_f0, self.l_f1) * (1 - 1 / self.kappa) ** terms

    def neumann_terms(self, rounds: int) -> int:
        """N = ⌈κ_g log K⌉, as in Corollary 3.1; then b ≤ κ_g max(ℓ_{f,0}, ℓ_{f,1})/K."""
        return max(1, math.ceil(self.kappa * math.log(rounds)))


@dataclass(frozen=True)
class MinimaxConstants:
    """The constants of a minimax problem, Assumptions E and F."""

    mu_f: float  # μ_f: strong concavity of f_i in y
    l_f0: float  # ℓ_{f,0}: Lipschitz constant of f_i, a bound on its gradient
    l_f1: float  # ℓ_{f,1}: of ∇f_i
    l_f2: float = 0.0  # ℓ_{f,2}: of ∇²f_i
    sigma_f: float = 0.0  # σ_f: standard deviation of ∇f_i(z; ξ)

    @property
    def kappa(self) -> float:
        """κ_f = ℓ_{f,1}/μ_f."""
        return self.l_f1 / self.mu_f

    def smoothness(self) -> Smoothness:
        """Return the constants (64), with η = 1 of the proof of Corollary 3.2."""
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
    """The constants of a compositional problem f(r(x)), Assumptions G and H."""

    l_f0: float  # ℓ_{f,0}: Lipschitz constant of f_i, a bound on its gradient
    l_f1: float  # ℓ_{f,1}: of ∇f_i
    l_r0: float  # ℓ_{r,0}: of r_i
    l_r1: float = 0.0  # ℓ_{r,1}: of ∇r_i
    sigma_f: float = 0.0  # σ_f: standard deviation of ∇f_i(y; ξ)
    sigma_r0: float = 0.0  # σ_{r,0}: of r_i(x; ζ)
    sigma_r1: float = 0.0  # σ_{r,1}: of ∇r_i(x; ζ)

    def smoothness(self) -> Smoothness:
        """Return the constants (72), with η = 1/L_yx of the proof of Corollary 3.3; μ_g = 1, as ∇²_y g = I."""
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
    """The constants of a single-level problem, Assumptions C and D."""

    l_f: float  # L_f: Lipschitz constant of ∇f_i
    sigma_f: float = 0.0  # σ_f: standard deviation of ∇f_i(x; ξ); the steps do not depend on it


Nested = Constants | MinimaxConstants | CompositionalConstants


@dataclass(frozen=True)
class Steps:
    """The steps of (55), and the terms of which they are the minimum."""

    alpha_1: float  # ᾱ1: descent of Φ, (51)
    alpha_2: float  # ᾱ2: β stays below 1/(8ℓ_{g,1}), and 1
    alpha_3: float  # ᾱ3: drift of the local steps, (49)
    alpha_bar: float  # ᾱ
    beta_bar: float  # β̄: y keeps up with x, (54)
    lower_rounds: int  # T
    rounds: int  # K

    @property
    def cap(self) -> float:
        """min{ᾱ1, ᾱ2, ᾱ3}, the step at small K."""
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
    """Return the steps (55)–(56), for the three classes of nested problems.

    Arguments:
        constants: the problem's constants.
        rounds: K.
        lower_rounds: T; None: ⌈κ_g⁴⌉, ⌈κ_f⌉ or 1, as in Corollaries 3.1–3.3.
        alpha_bar: ᾱ; None: κ_g^{-2.5}, κ_f^{-1} or 1, as in the same corollaries.
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
    constants: Nested, rounds: int, lower_rounds: int | None = None, alpha_bar: float | None = None, **others: Any
) -> FedNest:
    """Return FedNest with the hyperparameters of Theorem 3.1 and Corollaries 3.1–3.3.

    The steps are those of `steps`, divided as α_i = α/τ_i and β_i = β/τ_i; N is ⌈κ_g log K⌉ and `hessian_step` is
    1/ℓ_{g,1}. FedIHGP is that of Lemma 2.2, the random one with a fresh cohort for every product. The anchors use the
    batch size of the other gradients.

    Arguments:
        constants, rounds, lower_rounds, alpha_bar: as in `steps`.
        others: FedNest's other hyperparameters (`batch_size`, `upper_local_steps`, …); with neumann="sum" the series
        has the N terms that the random one has in the mean.

    Example:
        >>> method = fednest(Constants(mu_g=1, l_f0=1, l_f1=0.1, l_g1=1.5), rounds=10_000, upper_local_steps=4)
        >>> f"{method.upper_step:.4f}, {method.lower_step:.4f}, T = {method.lower_rounds}, N = {method.neumann_terms}"
        '0.0036, 0.0025, T = 6, N = 14'
    """
    sizes = steps(constants, rounds, lower_rounds, alpha_bar)
    settings: dict[str, Any] = {"upper_step": sizes.alpha, "lower_step": sizes.beta, "lower_rounds": sizes.lower_rounds}
    settings |= {"scale_steps": True, "anchor_batch": others.get("batch_size")}
    if isinstance(constants, Constants):
        terms = constants.neumann_terms(rounds)
        if others.get("neumann") == "sum":
            terms = max(1, terms - 1)
        settings |= {"neumann": "random", "neumann_terms": terms, "resample": True}
        settings["hessian_step"] = 1 / constants.l_g1
    return FedNest(**(settings | others))


def fedsvrg(constants: SingleLevelConstants, rounds: int, alpha_bar: float = 1.0, **others: Any) -> FedSVRG:
    """Return FedSVRG with the step of Theorem 3.2: α = min{1/(3L_f(1 + 8L_f)), ᾱ/√K}, divided as α_i = α/τ_i.

    Arguments:
        constants: the problem's constants.
        rounds: K.
        alpha_bar: ᾱ, any positive number.
        others: FedSVRG's other hyperparameters.
    """
    alpha = min(1 / (3 * constants.l_f * (1 + 8 * constants.l_f)), alpha_bar / math.sqrt(rounds))
    settings: dict[str, Any] = {"step": alpha, "scale_steps": True, "anchor_batch": others.get("batch_size")}
    return FedSVRG(**(settings | others))
