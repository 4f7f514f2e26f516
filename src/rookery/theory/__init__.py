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

FedDRO (Khanduri et al.): Theorems 4.3 and 5.2, which give orders of magnitude in K and T: see `feddro`, `ds_feddro`.

ASFBO (anonymous, under review): (160)–(163) of Lemma 21 and r = L_f/μ_g of (30): see `asfbo`.

FedBiO and FedBiOAcc (Li, Huang and Huang, NeurIPS 2023): Theorems 1–4, stated by orders of magnitude. The appendix's
factors (η = μγ/(36κL̃), γ below τ/(36κL), τ below 1/(144κL)) would move x by a billionth a step on a mild quadratic:
here the factor in front of each order is one, but for those of the lemmas on stability. See `fedbio`, `fedbio_acc`.

Adaptively weighted nodes (anonymous, under review): Theorems 3 and 4, with (12), (17), (18), (51) and the constants of
Lemma 4: see `weighted_nodes`.

FedNest's constants do not scale: with f ten times as large, 1/(216M_f² + 5M_f) falls by a hundred, not ten. And they
are safe rather than quick; steps ten or a hundred times as long mostly converge, too.
"""

import itertools
import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from rookery.algorithms import (
    ASFBO,
    DSFedDRO,
    FedBiO,
    FedBiOAcc,
    FedBiOAccLocal,
    FedBiOLocal,
    FedDRO,
    FedNest,
    FedSVRG,
    WeightedNodesABA,
    WeightedNodesProx,
)
from rookery.problems.problems import Scope
from rookery.tasks.quadratic import solution
from rookery.tasks.task import Task

__all__ = [
    "CompositionalConstants",
    "Constants",
    "MinimaxConstants",
    "SingleLevelConstants",
    "Smoothness",
    "Steps",
    "WeightedConstants",
    "asfbo",
    "asfbo_terms",
    "ds_feddro",
    "fedbio",
    "fedbio_acc",
    "feddro",
    "fednest",
    "fedsvrg",
    "quadratic_constants",
    "steps",
    "weighted_nodes",
]


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


def feddro(constants: CompositionalConstants, steps: int, clients: int, c: float = 1.0, **others: Any) -> FedDRO:
    """FedDRO with the hyperparameters of Theorem 4.3: η = c√(K/T), β = 4B_g⁴L_f²η and I = T^{1/4}/K^{3/4}.

    Raises ValueError where T is so small that β > 1. (The theorem's T_th is in an appendix that we have not seen; this
    is the part of it that shows.)

    Arguments:
        constants: the problem's; B_g is ℓ_{r,0} and L_f is ℓ_{f,1}.
        steps: T, local steps in all, so that a run has T/I rounds.
        clients: K.
        c: in front of η.
        others: FedDRO's other hyperparameters (`batch_size`, …).

    Example:
        >>> method = feddro(CompositionalConstants(l_f0=1, l_f1=1, l_r0=1), steps=10_000, clients=4)
        >>> f"{method.step:.3f}, {method.momentum:.3f}, I = {method.local_steps}"
        '0.020, 0.080, I = 4'
    """
    ratio = 4 * constants.l_r0**4 * constants.l_f1**2
    eta = c * math.sqrt(clients / steps)
    if ratio * eta > 1:
        least = math.ceil(clients * (c * ratio) ** 2)
        raise ValueError(
            f"steps={steps} is too few: β = 4B_g⁴L_f²η = {ratio * eta:.3g} > 1; take {least}, or a lower c."
        )
    found = {"step": eta, "momentum": ratio * eta, "local_steps": max(1, round(steps**0.25 / clients**0.75))}
    return FedDRO(**(found | others))


def ds_feddro(
    steps: int, clients: int, c: float = 1.0, c_beta: float = 1.0, c_gamma: float = 1.0, **others: Any
) -> DSFedDRO:
    """DS-FedDRO with Theorem 5.2: η = c/√(IT), β = c_β·η, γ_x = √(KI), γ_y = c_γ·γ_x and I = √(T/K).

    Read otherwise than printed: γ_x. The theorem has γ_x = O(√(K/T)), but then the steps of a whole run,
    (T/I)·γ_x·ηI, add up to K^{3/4}T^{−1/4} at the most, and a long run does not leave its start. With √(KI), as in the
    two-sided FedAvg of Yang et al. (2021), γ_x·η is c√(K/T), the step of Theorem 4.3. A round then moves x by c·∇Φ or
    so: c should be below 1/L_Φ, and c·c_β·c_γ, the share of y that is new, at most 1.

    Arguments:
        steps: T, local steps in all, so that a run has T/I rounds.
        clients: K.
        c, c_beta, c_gamma: in front of η, β and γ_y, which the theorem leaves open.
        others: DSFedDRO's other hyperparameters.
    """
    local = max(1, round(math.sqrt(steps / clients)))
    eta, gamma = c / math.sqrt(local * steps), math.sqrt(clients * local)
    found = {"step": eta, "momentum": c_beta * eta, "server_step": gamma, "server_inner_step": c_gamma * gamma}
    return DSFedDRO(**(found | {"local_steps": local} | others))


@dataclass(frozen=True)
class WeightedConstants:
    """Those of a weighted-nodes problem: Assumption 1, each for every node."""

    mu: float  # μ: L_k is strongly convex
    l_0: float  # ℓ_0: of L_k, i.e. a bound on its gradient
    l_1: float  # ℓ_1: of ∇l, sample by sample
    radius: float  # R: the largest ‖θ(w)‖
    nodes: int  # K
    l_2: float = 0.0  # ℓ_2: of ∇²L_k

    @property
    def bend(self) -> float:
        """2ℓ_0ℓ_1/μ + ℓ_2ℓ_0²/μ², in (12) and (50)."""
        return 2 * self.l_0 * self.l_1 / self.mu + self.l_2 * self.l_0**2 / self.mu**2

    @property
    def l_F(self) -> float:
        """ℓ_F of (12): of ∇F."""
        steep = self.l_0 / self.mu
        return self.bend * math.sqrt(self.nodes) * steep + self.nodes * self.l_1 * steep**2

    def gamma_0(self, tau: int, q: float) -> float:
        """γ_0 of (17): Local-SVRG's longest step."""
        longest = min(3 / (80 * self.l_1), q / (4 * self.mu))
        if tau == 1:
            return longest
        drift = (tau - 1) * (6 * (tau - 1) + 8 + 16 / (1 - q))
        return min(longest, 1 / (self.l_1 * math.sqrt(5 * math.e) * drift))

    def error(self, tau: int, q: float) -> tuple[float, float]:
        """C_1(C_2 + C_3(τ−1)) and C_4(τ−1)² of Lemma 4: what a hypergradient's error is in proportion to."""
        gamma, steep = self.gamma_0(tau, q) * self.l_1, self.l_0 / self.mu
        c_2 = 4 + 32 * gamma**2 / (3 * q)
        c_3 = 30 * math.e * gamma**3 * (2 + q) / q
        both = 2 * self.nodes * (self.l_0**2 + self.bend**2)  # (49) and (50), by ‖a + b‖² ≤ 2‖a‖² + 2‖b‖²
        c_1 = both * 2 / self.mu * max(self.radius, steep) ** 2
        c_4 = both * 45 * math.e / self.mu * self.l_1 * (self.l_1 / self.mu + 1) ** 2 * self.l_0**2
        return c_1 * (c_2 + c_3 * (tau - 1)), c_4 * (tau - 1) ** 2


def weighted_nodes(
    constants: WeightedConstants, rounds: int, sync_every: int = 1, refresh: float = 0.5, convex: bool = True,
    **others: Any,
) -> WeightedNodesABA | WeightedNodesProx:  # fmt: skip
    """The method for a convex F (Theorem 3: ABA) or any other (Theorem 4: Prox), with η = 1/(3ℓ_F).

    With τ = 1: γ = γ_0 and T_s = ln(C_1C_2(s+1)^p/γ_0)/(γ_0μ), where p is 4 or 2. With τ > 1: γ = 1/M_s, with
    M_s = max{1/γ_0, (s+1)^{p/2}·√(C_1(C_2 + C_3(τ−1)) + C_4(τ−1)²)}, (18) and (51), and T_s = M_s ln(M_s³)/μ. Every
    round takes the T_s of the last, the longest. Local-SVRG returns its average, and Prox a random iterate.

    Arguments:
        constants: the problem's.
        rounds: S.
        sync_every: τ.
        refresh: q; below 1 where τ > 1.
        convex: whether F is.
        others: the method's other hyperparameters (`batch_size`, …).

    Example:
        >>> constants = WeightedConstants(mu=1, l_0=1, l_1=1, radius=1, nodes=4)
        >>> method = weighted_nodes(constants, rounds=100)
        >>> f"{method.weight_step:.3f}, {method.model_step:.4f}, T = {method.steps}"
        '0.042, 0.0375, T = 733'
    """
    if sync_every > 1 and refresh >= 1:
        raise ValueError(f"refresh={refresh}: (17) has 16/(1 − q), so that q must be below 1 where sync_every > 1.")
    gamma_0, power = constants.gamma_0(sync_every, refresh), 4 if convex else 2
    noise, drift = constants.error(sync_every, refresh)
    step: Any
    if sync_every == 1:
        step, steps = gamma_0, math.log(noise * rounds**power / gamma_0) / (gamma_0 * constants.mu)
    else:
        root = math.sqrt(noise + drift)
        step = lambda t: 1 / jnp.maximum(1 / gamma_0, (t + 1) ** (power // 2) * root)
        longest = max(1 / gamma_0, rounds ** (power / 2) * root)
        steps = longest * math.log(longest**3) / constants.mu
    found = {"model_step": step, "linear_step": step, "weight_step": 1 / (3 * constants.l_F), "steps": math.ceil(steps)}
    found |= {"sync_every": sync_every, "refresh": refresh, "average": "theory", "strong_convexity": constants.mu}
    if convex:
        return WeightedNodesABA(**(found | others))
    return WeightedNodesProx(**(found | {"output": "random"} | others))


def asfbo(
    constants: Constants,
    rounds: int,
    cohort: int,
    c_lower: float | None = None,
    c_linear: float | None = None,
    spread: float = 10.0,
    largest_weight: float = 1.0,
    beta_gh: float = 1.0,
    l_g3: float = 0.0,
    **others: Any,
) -> ASFBO:
    """ASFBO with the step sizes of its Lemma 21, (160)–(163), and the radius r = L_f/μ_g of (30).

    γ_x is at most √(P/(τ̄T)) and the twelve terms of (161) over the largest possible ρ^t; γ_y and γ_z are at most c_γy
    and c_γz times the least γ_x, as (160) has them. The local steps are 1/(τ̄√T), or (163) if that is less.

    Read otherwise than printed:
        (161) has L_Φ² where a descent lemma has L_Φ: the larger of the two;
        (163) caps η_x and η_y alone: η_z as η_y. It is in c_a·α_max·τ̄, which is τ_max here, by Lemma 1.

    Arguments:
        constants: the problem's; L_f is ℓ_{f,0}, L_1 the larger of ℓ_{f,1} and ℓ_{g,1}, L_2 is ℓ_{g,2}.
        rounds: T.
        cohort: P.
        c_lower, c_linear: c_γy and c_γz, any positive numbers; None: the largest powers of two under which (161)
            allows the longest step.
        spread: γ_max/γ_min of each variable (10 in the paper's experiments); with 1 the steps are fixed.
        largest_weight: β_max, n times the largest p_i.
        beta_gh: β_gh of Assumption 5; 1 will do where the clients' gradients differ by bounded amounts.
        l_g3: L_3: of ∇³g_i.
        others: ASFBO's other hyperparameters; τ_i are its `local_steps` (not `Epochs`), β its `momentum`.

    Example:
        >>> method = asfbo(Constants(mu_g=1, l_f0=2, l_f1=0.1, l_g1=1), rounds=10_000, cohort=10, local_steps=4)
        >>> f"{method.bounds[0][1]:.1e}, {method.upper_step:.4f}, r = {method.radius:.0f}"
        '2.9e-04, 0.0025, r = 2'
    """
    plain = ASFBO(**others)
    taus = np.asarray(plain.local_steps, float)
    mean, most = float(taus.mean()), float(taus.max())
    l_1 = max(constants.l_f1, constants.l_g1)
    terms = lambda c_y, c_z: asfbo_terms(
        constants, cohort, c_y, c_z, plain.momentum, most, largest_weight, beta_gh, l_g3
    )
    grid = [2.0**k for k in range(-20, 21)]
    c_lower, c_linear = max(
        itertools.product([c_lower] if c_lower else grid, [c_linear] if c_linear else grid),
        key=lambda both: (min(terms(*both)), both),
    )
    gamma_x = min(min(terms(c_lower, c_linear)) / (largest_weight * most), math.sqrt(cohort / (mean * rounds)))
    gammas = gamma_x, c_lower * gamma_x / spread, c_linear * gamma_x / spread
    local = 1 / (mean * math.sqrt(rounds))
    given: dict[str, Any] = {
        "upper_step": min(local, 1 / (l_1 * math.sqrt(2 * most))),
        "lower_step": min(local, 1 / (l_1 * math.sqrt(4 * most))),
        "linear_step": min(local, 1 / (l_1 * math.sqrt(4 * most))),
        "server_upper_step": gammas[0],
        "server_lower_step": gammas[1],
        "server_linear_step": gammas[2],
        "bounds": tuple((gamma / spread, gamma) for gamma in gammas),
        "radius": constants.l_f0 / constants.mu_g,
    }
    return ASFBO(**(given | others))


def asfbo_terms(
    constants: Constants,
    cohort: int,
    c_y: float,
    c_z: float,
    momentum: float,
    most: float,
    beta_max: float = 1.0,
    beta_gh: float = 1.0,
    l_3: float = 0.0,
) -> list[float]:
    """The twelve terms of (161), in their order; `most` is the largest τ_i, which with `momentum` gives α_max/α_min."""
    mu, l_f, l_1, l_2 = constants.mu_g, constants.l_f0, max(constants.l_f1, constants.l_g1), constants.l_g2
    alpha_max, alpha_min = (1 - (1 - momentum) ** most) / momentum, momentum if most > 1 else 1.0  # (89)
    r = l_f / mu
    r_max = (1 + alpha_max / alpha_min) * r  # (107)
    l_r = math.sqrt(2 * (l_2**2 * r_max**2 + l_1**2))  # (112)
    estimate = l_1 + l_1**2 / mu + l_f * (l_2 / mu + l_1 * l_2 / mu**2)  # (114)
    l_phi = estimate * (1 + l_1 / mu)  # (116)
    l_y = l_1 / mu  # (118)
    l_yx = l_2 * (1 + l_y) / mu * (1 + l_1 / mu)  # (120)
    l_z = math.sqrt((2 * l_1**2 / mu**2 + 2 * l_f**2 * l_2**2 / mu**4) * (1 + l_y**2))  # (122)
    l_zx = 2 / mu * math.sqrt((l_2**2 + r**2 * l_3**2 + l_2**2 * l_z**2) * (1 + l_y**2) + l_2**2 * l_z**2)  # (124)
    k_y = (40 * (l_1**2 + r**2 * l_2**2) / mu + 384 * l_r**2 * l_1**2 / mu**3) / c_y  # (165)
    k_z = 6 * l_1**2 / (mu * c_z)
    smooth, bound = max(l_phi, l_phi**2), l_f**2 + r_max**2 * l_1**2
    drawn = 2 * beta_max / cohort + 3
    over = lambda a, b: a / b if b else math.inf
    return [
        mu / (12 * l_1**2 * c_z),
        mu / (36 * l_1**2 * c_z * drawn),
        cohort * mu * c_z / (36 * l_1**2 * beta_max * (l_z**2 + l_zx / 2)),
        cohort / (6 * smooth * beta_max),
        4 / smooth,
        4 / c_y,
        4 / c_z,
        mu / (12 * c_y * (drawn * l_1**2 + 2 * beta_max * beta_gh**2 / cohort + 3 * l_1**2)),
        cohort * c_y * mu / (36 * beta_max * (l_1**2 + r**2 * l_2**2) * (l_z**2 + l_yx / 2)),
        over(c_y * mu, 4 * l_yx * bound),
        over(c_z * mu, 4 * l_zx * bound),
        1 / (8 * (k_y * (l_y**2 + l_yx / 2) + k_z * (l_z**2 + l_zx / 2))),
    ]


def fedbio(
    constants: Constants,
    steps: int,
    clients: int,
    local_steps: int = 1,
    c: float = 1.0,
    scope: Scope = "global",
    **others: Any,
) -> FedBiO | FedBiOLocal:
    """FedBiO with the hyperparameters of Theorem 1, or FedBiOLocal with those of Theorem 3.

    T steps are for ε = T^{-2/3}, the bound's order on ‖∇Φ‖². One lower level for all: γ = min{γ̄, c T^{-1/3}} with
    γ̄ = 1/(8IL̃) of Lemma 7, τ = γ̄, η = μγ/(κL̃), b_x = 1/(Mε) and b_y = κ⁴/(Mε), where L bounds the slopes of ∇f_i and
    ∇g_i, κ = L/μ and L̃² = L² + 2ℓ_{g,2}²ℓ_{f,0}²/μ². One for each client: γ = 1/(2L), η = min{η̄, c T^{-1/3}} with
    η̄ = min{1/(IL_f), μγ/(κM_f)}, b_x = 1/(Mε), b_y = κ⁵/ε, and a series of Q = κ log(κ/ε) terms with 1/L. L_f and M_f
    are those of `Smoothness`.

    Arguments:
        constants: the problem's.
        steps: T, local steps in all, so that a run has T/I rounds.
        clients: M.
        local_steps: I.
        c: in front of the step that shrinks with T.
        scope: whether the lower level is one for all.
        others: the algorithm's other hyperparameters; with `batch_size` given, even as None, the batches are those.

    Example:
        >>> method = fedbio(Constants(mu_g=1, l_f0=1, l_f1=0.1, l_g1=1.5), steps=1000, clients=4, local_steps=2)
        >>> f"{method.upper_step:.4f}, {method.lower_step:.4f}, b = {method.upper_batch}, {method.lower_batch}"
        '0.0185, 0.0417, b = 25, 127'
    """
    mu, slope, kappa, tilde = _slopes(constants)
    s, epsilon, shrinking = constants.smoothness(), steps ** (-2 / 3), c * steps ** (-1 / 3)
    given: dict[str, Any] = {"local_steps": local_steps}
    if "batch_size" not in others:
        lower = kappa**4 / (clients * epsilon) if scope == "global" else kappa**5 / epsilon
        given |= {"upper_batch": _count(1 / (clients * epsilon)), "lower_batch": _count(lower)}
    if scope == "client":
        gamma = 1 / (2 * slope)
        eta = min(1 / (local_steps * s.l_f), mu * gamma / (kappa * s.m_f), shrinking)
        return FedBiOLocal(
            **(given | {"upper_step": eta, "lower_step": gamma} | _series(slope, kappa, epsilon) | others)
        )
    bar = 1 / (8 * local_steps * tilde)
    gamma = min(bar, shrinking)
    given |= {"upper_step": mu * gamma / (kappa * tilde), "lower_step": gamma, "linear_step": bar}
    return FedBiO(**(given | others))


def fedbio_acc(
    constants: Constants,
    steps: int,
    clients: int,
    batch_size: int | None = None,
    local_steps: int | None = None,
    scope: Scope = "global",
    **others: Any,
) -> FedBiOAcc | FedBiOAccLocal:
    """FedBiOAcc with the hyperparameters of Theorem 2, or FedBiOAccLocal with those of Theorem 4.

    T steps on batches of b are for ε = (bMT)^{-2/3}. With B = bM, and L̃ and κ as in `fedbio` (M_f for L̃ where the lower
    level is each client's own): γ = τ = 1/(2L) of Lemmas 13–14, η = μγ/(κL̃); c_ν = 1/B + L̃/B², c_ω = c_u =
    L̃²/(μ²B) + L̃/B²; δ = B^{2/3}L̃^{-1/3} and u₀ = B² max{2, 1/L̃, I^{9/2}L̃², c^{3/2}}, so that α_t ≤ 1/(I^{3/2}L̃)
    and α_t ≤ 1; the first batch is I^{3/2}b. The local form has b_x = b, b_y = bM, and Q = κ log(κB/ε).

    Arguments:
        constants, steps, clients, scope, others: as in `fedbio`.
        batch_size: b; None: √(MT) = ε^{-1/2}, with which the communication is of order ε^{-1}.
        local_steps: I; None: κ^{10/9} B^{-2/3} ε^{-1/3}, which is κ^{10/9} M^{-2/3} for that b.

    Example:
        >>> method = fedbio_acc(Constants(mu_g=1, l_f0=1, l_f1=0.1, l_g1=1.5), steps=1000, clients=4)
        >>> f"{method.upper_step:.3f}, b = {method.batch_size}, I = {method.local_steps}, u0 = {method.offset:.2g}"
        '0.148, b = 64, I = 1, u0 = 1.5e+05'
    """
    mu, slope, kappa, tilde = _slopes(constants)
    if scope == "client":
        tilde = constants.smoothness().m_f
    b = _count(math.sqrt(clients * steps)) if batch_size is None else batch_size
    together = b * clients
    epsilon = (together * steps) ** (-2 / 3)
    if local_steps is None:
        local_steps = max(1, round(kappa ** (10 / 9) * together ** (-2 / 3) * epsilon ** (-1 / 3)))
    c_upper = 1 / together + tilde / together**2
    c_lower = (tilde / mu) ** 2 / together + tilde / together**2
    gamma = 1 / (2 * slope)
    given: dict[str, Any] = {
        "upper_step": mu * gamma / (kappa * tilde),
        "lower_step": gamma,
        "local_steps": local_steps,
        "batch_size": b,
        "first_batch": _count(local_steps**1.5 * b),
        "delta": together ** (2 / 3) * tilde ** (-1 / 3),
        "offset": together**2 * max(2.0, 1 / tilde, local_steps**4.5 * tilde**2, c_upper**1.5, c_lower**1.5),
        "c_lower": c_lower,
        "c_upper": c_upper,
    }
    if scope == "client":
        given |= {"lower_batch": together, **_series(slope, kappa, epsilon / together)}
        return FedBiOAccLocal(**(given | others))
    return FedBiOAcc(**(given | {"linear_step": gamma, "c_linear": c_lower} | others))


def _slopes(constants: Constants) -> tuple[float, float, float, float]:
    """μ, L, κ and L̃ of the FedBiO paper."""
    mu, slope = constants.mu_g, max(constants.l_f1, constants.l_g1)
    return mu, slope, slope / mu, math.hypot(slope, math.sqrt(2) * constants.l_g2 * constants.l_f0 / mu)


def _series(slope: float, kappa: float, epsilon: float) -> dict[str, Any]:
    return {"neumann_terms": _count(kappa * math.log(kappa / epsilon)), "hessian_step": 1 / slope}


def _count(number: float) -> int:
    return max(1, math.ceil(number - 1e-9))


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
        each = np.atleast_2d(closed.y(closed.x))  # one y, or one for each client
        radius = 2 * max(float(np.linalg.norm(np.concatenate([closed.x, y]) - start)) for y in each)
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


def __dir__() -> list[str]:
    return __all__
