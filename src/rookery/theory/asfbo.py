"""The step sizes of ASFBO (anonymous, under review): (160)–(163) of Lemma 21, and r = L_f/μ_g of (30)."""

import itertools
import math
from typing import Any

import numpy as np

from rookery.algorithms import ASFBO
from rookery.theory.fednest import Constants


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
    """Return ASFBO with the step sizes of its Lemma 21, (160)–(163), and the radius r = L_f/μ_g of (30).

    γ_x is at most √(P/(τ̄T)) and each of the twelve terms of (161), divided by the largest possible ρ^t; γ_y and γ_z
    are at most c_γy and c_γz times the smallest γ_x, as in (160). The local steps are 1/(τ̄√T), or (163) if that is
    smaller.

    Corrections: what is printed, and after the colon what is used here:
        (161) has L_Φ² where a descent lemma has L_Φ: the larger of the two;
        (163) caps only η_x and η_y: η_z has the cap of η_y. It contains c_a·α_max·τ̄, which is τ_max here, by Lemma 1.

    Arguments:
        constants: the problem's constants; L_f is ℓ_{f,0}, L_1 the larger of ℓ_{f,1} and ℓ_{g,1}, L_2 is ℓ_{g,2}.
        rounds: T.
        cohort: P.
        c_lower, c_linear: c_γy and c_γz, any positive numbers; None: the largest powers of two for which (161) allows
        the longest step.
        spread: γ_max/γ_min of each variable (10 in the paper's experiments); with 1 the steps are fixed.
        largest_weight: β_max, n times the largest p_i.
        beta_gh: β_gh of Assumption 5; 1 suffices if the clients' gradients differ by bounded amounts.
        l_g3: L_3, the Lipschitz constant of ∇³g_i.
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
    settings: dict[str, Any] = {
        "upper_step": min(local, 1 / (l_1 * math.sqrt(2 * most))),
        "lower_step": min(local, 1 / (l_1 * math.sqrt(4 * most))),
        "linear_step": min(local, 1 / (l_1 * math.sqrt(4 * most))),
        "server_upper_step": gammas[0],
        "server_lower_step": gammas[1],
        "server_linear_step": gammas[2],
        "bounds": tuple((gamma / spread, gamma) for gamma in gammas),
        "radius": constants.l_f0 / constants.mu_g,
    }
    return ASFBO(**(settings | others))


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
    """Return the twelve terms of (161), in order; `most` is the largest τ_i, and with `momentum` sets α_max/α_min."""
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
