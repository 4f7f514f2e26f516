"""The hyperparameters of FedBiO and FedBiOAcc (Li, Huang and Huang, NeurIPS 2023): Theorems 1–4, orders of magnitude.

The appendix's factors (η = μγ/(36κL̃), γ below τ/(36κL), τ below 1/(144κL)) would move x by a billionth per step on a
mild quadratic. Here the factor in front of each order is one, except where the lemmas on stability give it.
"""

import math
from typing import Any

from rookery.algorithms import FedBiO, FedBiOAcc, FedBiOAccLocal, FedBiOLocal
from rookery.problems.problems import Scope
from rookery.theory.fednest import Constants


def fedbio(
    constants: Constants, steps: int, clients: int, local_steps: int = 1, c: float = 1.0, scope: Scope = "global",
    **others: Any,
) -> FedBiO | FedBiOLocal:  # fmt: skip
    """Return FedBiO with the hyperparameters of Theorem 1, or FedBiOLocal with those of Theorem 3.

    T steps are for ε = T^{-2/3}, the order of the bound on ‖∇Φ‖². L bounds the slopes of ∇f_i and ∇g_i, κ = L/μ and
    L̃² = L² + 2ℓ_{g,2}²ℓ_{f,0}²/μ²; L_f and M_f are those of `Smoothness`.
        A shared lower level: γ = min{γ̄, c T^{-1/3}} with γ̄ = 1/(8IL̃) of Lemma 7, τ = γ̄, η = μγ/(κL̃), b_x = 1/(Mε)
        and b_y = κ⁴/(Mε).
        A lower level for each client: γ = 1/(2L), η = min{η̄, c T^{-1/3}} with η̄ = min{1/(IL_f), μγ/(κM_f)}, b_x =
        1/(Mε), b_y = κ⁵/ε, and a series of Q = κ log(κ/ε) terms with 1/L.

    Arguments:
        constants: the problem's constants.
        steps: T, the total number of local steps; a run has T/I rounds.
        clients: M.
        local_steps: I.
        c: the factor of the step that shrinks with T.
        scope: "global" for a shared lower level, "client" for one for each client.
        others: the algorithm's other hyperparameters; `batch_size`, even as None, replaces both batch sizes.

    Example:
        >>> method = fedbio(Constants(mu_g=1, l_f0=1, l_f1=0.1, l_g1=1.5), steps=1000, clients=4, local_steps=2)
        >>> f"{method.upper_step:.4f}, {method.lower_step:.4f}, b = {method.upper_batch}, {method.lower_batch}"
        '0.0185, 0.0417, b = 25, 127'
    """
    mu, slope, kappa, tilde = _slopes(constants)
    s, epsilon, shrinking = constants.smoothness(), steps ** (-2 / 3), c * steps ** (-1 / 3)
    settings: dict[str, Any] = {"local_steps": local_steps}
    if "batch_size" not in others:
        lower = kappa**4 / (clients * epsilon) if scope == "global" else kappa**5 / epsilon
        settings |= {"upper_batch": _count(1 / (clients * epsilon)), "lower_batch": _count(lower)}
    if scope == "client":
        gamma = 1 / (2 * slope)
        eta = min(1 / (local_steps * s.l_f), mu * gamma / (kappa * s.m_f), shrinking)
        settings |= {"upper_step": eta, "lower_step": gamma, **_series(slope, kappa, epsilon)}
        return FedBiOLocal(**(settings | others))
    bar = 1 / (8 * local_steps * tilde)
    gamma = min(bar, shrinking)
    settings |= {"upper_step": mu * gamma / (kappa * tilde), "lower_step": gamma, "linear_step": bar}
    return FedBiO(**(settings | others))


def fedbio_acc(
    constants: Constants, steps: int, clients: int, batch_size: int | None = None, local_steps: int | None = None,
    scope: Scope = "global", **others: Any,
) -> FedBiOAcc | FedBiOAccLocal:  # fmt: skip
    """Return FedBiOAcc with the hyperparameters of Theorem 2, or FedBiOAccLocal with those of Theorem 4.

    T steps on batches of b are for ε = (bMT)^{-2/3}. With B = bM, and L̃ and κ as in `fedbio` (M_f for L̃ with a lower
    level for each client): γ = τ = 1/(2L) of Lemmas 13–14, η = μγ/(κL̃); c_ν = 1/B + L̃/B²,
    c_ω = c_u = L̃²/(μ²B) + L̃/B²; δ = B^{2/3}L̃^{-1/3} and u₀ = B² max{2, 1/L̃, I^{9/2}L̃², c^{3/2}}, so that
    α_t ≤ 1/(I^{3/2}L̃) and α_t ≤ 1; the first batch is I^{3/2}b. The local form has b_x = b, b_y = bM, and Q = κ
    log(κB/ε).

    Arguments:
        constants, steps, clients, scope, others: as in `fedbio`.
        batch_size: b; None: √(MT) = ε^{-1/2}, for which the communication is of order ε^{-1}.
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
    settings: dict[str, Any] = {
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
        settings |= {"lower_batch": together, **_series(slope, kappa, epsilon / together)}
        return FedBiOAccLocal(**(settings | others))
    return FedBiOAcc(**(settings | {"linear_step": gamma, "c_linear": c_lower} | others))


def _slopes(constants: Constants) -> tuple[float, float, float, float]:
    """μ, L, κ and L̃ of the FedBiO paper."""
    mu, slope = constants.mu_g, max(constants.l_f1, constants.l_g1)
    return mu, slope, slope / mu, math.hypot(slope, math.sqrt(2) * constants.l_g2 * constants.l_f0 / mu)


def _series(slope: float, kappa: float, epsilon: float) -> dict[str, Any]:
    return {"neumann_terms": _count(kappa * math.log(kappa / epsilon)), "hessian_step": 1 / slope}


def _count(number: float) -> int:
    return max(1, math.ceil(number - 1e-9))
